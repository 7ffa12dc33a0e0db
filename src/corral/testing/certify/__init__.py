"""`corral certify`: the hostile suite on the user's own host, against the runtimes that work there.

`await run(["crun"])` or, from a program without a loop, `run_blocking(["crun"])` -> `Report`. A runtime is named as everywhere: one of
ours, or one of the entry point group `corral.runtimes`, so that an adapter of somebody else's proves itself by the same suite.

Everything happens on a state directory of its own, which is gone afterwards; running sandboxes are neither seen nor touched. An attack
holds only where its control succeeds (`verdict`); the witness is the host wherever it has one. With defences switched off by
`settings.unsafe` the suite runs without them and fails: that is how it is tested itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from corral import config
from corral.domain.grade import ANY_GRADE
from corral.errors import CorralError
from corral.ports.node import Node
from corral.ports.runtime import Runtime
from corral.testing.certify import (  # noqa: F401  # they register
    captured,
    files,
    guest,
    kernel,
    limits,
    network,
    pausing,
    place,
    residue,
)
from corral.testing.certify.bench import Bench
from corral.testing.certify.register import ATTACKS, GROUPS, Attack
from corral.testing.certify.verdict import Finding, Report, RuntimeReport, broken, find

__all__ = ["ATTACKS", "GROUPS", "Finding", "Report", "RuntimeReport", "run", "run_blocking"]

Progress = Callable[[str, float | None], None]
ATTACK_S = 100.0
"""No attack may take longer, or it counts as one that was not survived."""
KILLED = ("sandbox_lost", "guest_lost")


async def run(
    runtimes: Sequence[str] = (),
    *,
    only: Collection[str] = (),
    settings: config.Config | None = None,
    progress: Progress | None = None,
) -> Report:
    """Try every attack (or those that `only` names: groups, or `group/attack`) on every runtime named, or on all that are configured.

    A runtime that does not work here is reported as such and tried no further; a name that is none is `invalid_value`.
    """
    settings = settings or config.load()
    attacks = _chosen(only)
    names = list(dict.fromkeys(runtimes)) or _configured(settings)
    reports = []
    await place.clear_dead(settings)
    for number, name in enumerate(names):

        def tell(sentence: str, fraction: float, name: str = name, number: int = number) -> None:
            if progress is not None:
                progress(f"{name}: {sentence}", (number + fraction) / len(names))

        reports.append(await _certify(name, attacks, settings, tell))
    host, versions = await asyncio.to_thread(_host), _versions(reports)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Report(now, "root" if os.geteuid() == 0 else "user", host, versions, tuple(reports), tuple(runtimes))


def run_blocking(runtimes: Sequence[str] = (), **options: Any) -> Report:
    """`run` with an event loop of its own. A signal that ends this process ends the trial first, and only then is handled."""
    came: list[int] = []

    async def interruptible() -> Report:
        with _signals_cancel(came):
            return await run(runtimes, **options)

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        if came:
            signal.raise_signal(came[0])
        raise


@contextlib.contextmanager
def _signals_cancel(came: list[int]) -> Iterator[None]:
    """In the main thread: the first signal cancels this task and nothing beside it; the second is for whoever handled them before."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    handlers: dict[int, Any] = {}

    def arrived(number: int) -> None:
        came.append(number)
        restore()
        if task is not None:
            task.cancel()

    def restore() -> None:
        while handlers:
            number, handler = handlers.popitem()
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What is ignored, or was set by something that is not Python, is left alone.
            if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                loop.add_signal_handler(number, arrived, number)
                handlers[number] = handler
    try:
        yield
    finally:
        restore()


def _chosen(only: Collection[str]) -> list[Attack]:
    """The attacks of these groups (`guest`) or of these names (`guest/old fences`), in the order of the groups."""
    known = set(GROUPS) | {f"{attack.group}/{attack.name}" for attack in ATTACKS}
    if unknown := sorted(set(only) - known):
        hint = f"groups: {', '.join(GROUPS)}; or GROUP/ATTACK as the table names it"
        raise CorralError("invalid_value", f"there is no group {unknown[0]!r}", field="/only", hint=hint)
    order = {group: place for place, group in enumerate(GROUPS)}
    chosen = [one for one in ATTACKS if not only or one.group in only or f"{one.group}/{one.name}" in only]
    return sorted(chosen, key=lambda one: order[one.group])


def _configured(settings: config.Config) -> list[str]:
    from corral import bootstrap

    return list(settings.runtimes or bootstrap.by_default(settings))


async def _certify(
    name: str, attacks: Sequence[Attack], settings: config.Config, tell: Callable[[str, float], None]
) -> RuntimeReport:
    began = time.monotonic()
    with place.make(settings.state_dir, name, f"cert{secrets.token_hex(6)}") as at:
        return await _certify_in(at, attacks, settings, tell, began)


async def _certify_in(
    at: place.Place,
    attacks: Sequence[Attack],
    settings: config.Config,
    tell: Callable[[str, float], None],
    began: float,
) -> RuntimeReport:
    name, state, installation = at.runtime, at.path, at.installation
    trial = dataclasses.replace(settings, state_dir=str(state), runtimes=(name,))

    def compose(base: Path, around: Callable[[Runtime], Runtime]) -> Node:
        from corral import bootstrap

        return bootstrap.trial_node(trial, installation, name, str(base), around)

    findings: list[Finding] = []
    living = 0
    try:
        tell("probing", 0.0)
        bench = None
        try:
            try:
                bench = Bench(compose, state, installation, settings.unsafe - {ANY_GRADE})
                info = await bench.open()
            except Exception as error:  # an adapter of anybody's: what was found of the others is told all the same
                if bench is None and isinstance(error, CorralError) and error.code == "invalid_value":
                    raise  # there is no such runtime
                return RuntimeReport(name, None, 0, _words(error))
            if not info.usable:
                return RuntimeReport(name, info.version, info.security_level, info.reason or "it does not work here")
            for count, attack in enumerate(attacks):
                tell(f"{attack.group}: {attack.name}", count / max(1, len(attacks)))
                findings.append(await _try(attack, bench))
            with contextlib.suppress(Exception):  # then the last row has no control, and says so
                living = await residue.while_living(bench)
        finally:
            # Also when it is interrupted in the middle of its opening.
            if bench is not None:
                await _closed(bench)
        findings += await asyncio.to_thread(residue.after_all, str(state), installation, living)
    finally:
        await asyncio.to_thread(residue.remove, str(state))
    took = time.monotonic() - began
    return RuntimeReport(
        *(name, info.version, info.security_level, None, tuple(findings), took),
        tuple(sorted(settings.unsafe - {ANY_GRADE})),
    )


async def _closed(bench: Bench) -> None:
    """Everything of the trial is ended, however often somebody interrupts that; what it left all the same the last row tells."""
    closing, interrupted = asyncio.ensure_future(bench.close()), False
    while not closing.done():
        try:
            await asyncio.wait([closing])
        except asyncio.CancelledError:
            interrupted = True
    closing.exception()
    if interrupted:
        raise asyncio.CancelledError


async def _try(attack: Attack, bench: Bench) -> Finding:
    began = time.monotonic()
    words = (attack.group, attack.name, attack.about, attack.witness)

    def took() -> int:
        return round((time.monotonic() - began) * 1000)

    try:
        async with asyncio.timeout(ATTACK_S):
            trials = await attack.run(bench)
    except CorralError as error:
        return broken(*words, _words(error), took())
    except TimeoutError:
        return broken(*words, f"not within {ATTACK_S:.0f} s", took())
    except Exception as error:  # what a hostile program told may be anything: that is a row, not the end of the report
        return broken(*words, _words(error), took())
    return find(*words, trials, took())


def _words(error: Exception) -> str:
    return f"{error.code}: {error.detail}" if isinstance(error, CorralError) else f"{type(error).__name__}: {error}"


def _host() -> dict[str, Any]:
    from corral.linux import cgroups

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cgroup": cgroups.host().kind,
        "memory_bytes": memory,
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }


def _versions(reports: Sequence[RuntimeReport]) -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"corral": None, "python": platform.python_version()}
    with contextlib.suppress(PackageNotFoundError):  # a checkout that is not installed
        found["corral"] = version("corral")
    found.update({report.name: report.version for report in reports})
    return found
