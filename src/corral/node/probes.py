"""What each runtime and the host can do: found by probes once per boot, user and version, kept in the state directory.

A runtime whose probe is dear says by `probe_key()` what the answer depends on beside the host. What works is then kept for all state
directories of root: in `/run`, where no one else can write, and which ends with the boot. A fresh look never takes it from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from corral.domain.grade import Check, check_dict
from corral.domain.limits import LimitModes
from corral.errors import CorralError
from corral.linux import process, seccomp, userns
from corral.ports.runtime import Runtime, RuntimeInfo

PROBE_S = 20.0
PROBE_VERSION = 2
AGAIN_S = 10.0
SLOW_S, SPARED_S = 4.0, 300.0
"""A failure that took longer than the first is not asked for again within the second, unless by name or for a fresh look."""


class HostChecks:
    """What the host's checks saw. Where one that must hold does not, who asks `AGAIN_S` later has them made again: it may have been mended."""

    def __init__(self, path: str, look: Callable[[], list[Check]]) -> None:
        self._path = path
        self._look = look
        self._seen: list[Check] | None = None
        self._again_at = math.inf
        self._lock = asyncio.Lock()

    async def all(self, *, fresh: bool = False) -> list[Check]:
        """Every check, in their order. Raises `infra_error`."""
        async with self._lock:
            known = None if fresh or time.monotonic() >= self._again_at else self._seen or self._load()
            if known is None:
                known = await asyncio.to_thread(self._look)
                self._again_at = time.monotonic() + AGAIN_S if _must_failed(known) else math.inf
                self._save(known)
            self._seen = known
            return known

    def _key(self) -> str:
        return f"{_host()} {seccomp.version()}"

    def _load(self) -> list[Check] | None:
        try:
            with open(self._path, encoding="utf-8") as file:
                data = json.load(file)
            return [Check(**check) for check in data["checks"]] if data["key"] == self._key() else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _save(self, checks: list[Check]) -> None:
        with contextlib.suppress(OSError):  # then the next process looks for itself
            if _must_failed(checks):
                os.unlink(self._path)
                return
            with open(self._path + ".new", "w", encoding="utf-8") as file:
                json.dump({"key": self._key(), "checks": [check_dict(check) for check in checks]}, file)
            os.replace(self._path + ".new", self._path)


def _must_failed(checks: list[Check]) -> bool:
    return any(check.kind == "must" and check.ok is False for check in checks)


def _host() -> str:
    return f"{process.boot_id()} {os.geteuid()} {PROBE_VERSION}"


class Probes:
    """Answers of `probe`; one that did not work is asked again by the next process: the host may have been mended.

    One that took long not to work is spared for a while by whoever wants to know of all: every command would wait for it.
    """

    def __init__(self, path: str, runtimes: Mapping[str, Runtime], run_dir: str = userns.RUN) -> None:
        self._path = path
        self._run = run_dir
        self._runtimes = runtimes
        self._infos: dict[str, RuntimeInfo] = {}
        self._failed_slowly: dict[str, float] = {}
        self._lock = asyncio.Lock()

    async def all(self, *, fresh: bool = False) -> list[RuntimeInfo]:
        """In the order of the runtimes."""
        async with self._lock:
            spared = {} if fresh else self._spared()
            await self._ensure([name for name in self._runtimes if name not in spared], fresh)
            return [spared.get(name) or self._infos[name] for name in self._runtimes]

    async def one(self, name: str) -> RuntimeInfo:
        """Of one runtime, without waiting for the probes of others."""
        async with self._lock:
            await self._ensure([name], False)
            return self._infos[name]

    async def _ensure(self, names: list[str], fresh: bool) -> None:
        missing = [name for name in names if fresh or name not in self._infos]
        if not missing:
            return
        if not fresh:
            cached = self._load()
            self._infos.update({name: cached[name] for name in missing if name in cached})
            missing = [name for name in missing if name not in self._infos]
            known = await asyncio.to_thread(self._shared, missing) if missing else {}
            self._infos.update(known)
            missing = [name for name in missing if name not in known]
            if known and not missing:
                self._save()
        for name, info in zip(missing, await asyncio.gather(*map(self._probe, missing)), strict=True):
            self._infos[name] = info
        if missing:
            self._save()
            await asyncio.to_thread(self._share, missing)

    async def _probe(self, name: str) -> RuntimeInfo:
        """An adapter may be anybody's: whatever it does, it is itself not usable, and the others are."""
        limit = asyncio.timeout(PROBE_S)
        began = time.monotonic()
        try:
            async with limit:
                info = _keepable(await self._runtimes[name].probe())
        except Exception as error:
            if limit.expired():
                reason = "the probe did not end in time"
            elif isinstance(error, (CorralError, OSError)):
                reason = str(error)
            else:
                reason = f"the adapter failed: {error!r}"
            info = RuntimeInfo(name, False, reason, 0, None, {}, LimitModes())
        self._failed_slowly.pop(name, None)
        if not info.usable and time.monotonic() - began > SLOW_S:
            self._failed_slowly[name] = time.monotonic()
        return info

    def _spared(self) -> dict[str, RuntimeInfo]:
        """What lately took long not to work, by the word of another process, which the reason then says."""
        if self._infos.keys() >= self._runtimes.keys():
            return {}
        runtimes, slow = self._read()
        lately = time.monotonic() - SPARED_S
        remembered = f"as found within the last {SPARED_S / 60:.0f} minutes; corral doctor --fresh asks again"
        return {
            name: dataclasses.replace(runtimes[name], reason=f"{runtimes[name].reason} ({remembered})")
            for name in self._runtimes
            if name not in self._infos
            and name in runtimes
            and not runtimes[name].usable
            and slow.get(name, -math.inf) > lately
        }

    def _load(self) -> dict[str, RuntimeInfo]:
        return {name: info for name, info in self._read()[0].items() if info.usable}

    def _read(self) -> tuple[dict[str, RuntimeInfo], dict[str, float]]:
        """(every answer that is kept, when the slow ones of those that did not work were given)"""
        try:
            with open(self._path, encoding="utf-8") as file:
                data = json.load(file)
            if data["key"] != _host():
                return {}, {}
            slow = {str(name): float(at) for name, at in data["slow"].items()}
            return {name: _info(info) for name, info in data["runtimes"].items()}, slow
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}, {}

    def _save(self) -> None:
        kept, slow = self._read()
        kept |= self._infos
        # What has another answer now may have failed quickly: only our own word says that one of these was slow.
        slow = {name: at for name, at in slow.items() if name not in self._infos} | self._failed_slowly
        runtimes = {name: dataclasses.asdict(info) for name, info in kept.items()}
        with open(self._path + ".new", "w", encoding="utf-8") as file:
            json.dump({"key": _host(), "runtimes": runtimes, "slow": slow}, file)
        os.replace(self._path + ".new", self._path)

    # -- for all state directories of root -----------------------------------------------------------------------------
    def _shared_path(self, name: str) -> str | None:
        key = None
        with contextlib.suppress(Exception):  # then nothing is shared
            key = getattr(self._runtimes[name], "probe_key", lambda: None)() if os.geteuid() == 0 else None
        if key is None:
            return None
        return os.path.join(self._run, f"probe-{name}-{hashlib.sha256(f'{_host()} {key}'.encode()).hexdigest()[:24]}")

    def _shared(self, names: list[str]) -> dict[str, RuntimeInfo]:
        found = {}
        for name in names:
            path = self._shared_path(name)
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if path is not None:
                    with open(path, encoding="utf-8") as file:
                        found[name] = _info(json.load(file))
        return found

    def _share(self, names: list[str]) -> None:
        for name in names:
            path = self._shared_path(name)
            if path is None:
                continue
            with contextlib.suppress(OSError):  # then each state directory looks for itself
                if not self._infos[name].usable:
                    os.unlink(path)
                    continue
                userns.make_run_directory(self._run)
                aside = f"{path}.{os.getpid()}.{threading.get_ident()}"
                with open(aside, "w", encoding="utf-8") as file:
                    json.dump(dataclasses.asdict(self._infos[name]), file)
                os.replace(aside, path)


def _keepable(info: RuntimeInfo) -> RuntimeInfo:
    """The answer as other processes will read it. TypeError or ValueError for one that cannot be kept."""
    return _info(json.loads(json.dumps(dataclasses.asdict(info))))


def _info(data: dict[str, Any]) -> RuntimeInfo:
    return RuntimeInfo(**{**data, "limits": LimitModes(**data["limits"])})
