"""Control groups of either version: find what this process may use by trying, make one per instance, read it, kill it.

A group is named `<installation>/<instance>` and lies at `<hierarchy>/corral/<installation>/<instance>`: in every v1
controller that we may use and, where a v2 hierarchy is there, in that too (on hybrid hosts it has no controllers but kills
atomically by `cgroup.kill`). A counter that does not exist reads as None. Moving a process into a group is by number: only
for our own children that wait, or for the writer itself (`0`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from corral.domain.limits import Limits
from corral.linux import process

Kind = Literal["v1", "v2", "hybrid", "none"]

V1_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct", "freezer")
LIMITED = ("memory", "pids", "cpu")
CPU_PERIOD_US = 100_000
TOP = "corral"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class CgroupStats:
    """Counters since the group began; None where the host has no such counter."""

    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    oom_kills: int | None = None
    pids: int | None = None
    peak_pids: int | None = None
    pids_limit_hits: int | None = None
    cpu_seconds: float | None = None
    cpu_throttled: int | None = None


@dataclass(frozen=True)
class Cgroup:
    """One group in every hierarchy where it exists; the kernel accepted the limits `held` (memory, pids, cpu)."""

    name: str
    v1: dict[str, str] = field(default_factory=dict)
    v2: str | None = None
    held: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "v1": dict(self.v1), "v2": self.v2, "held": sorted(self.held)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cgroup:
        return cls(str(data["name"]), dict(data["v1"]), data["v2"], frozenset(data["held"]))

    @property
    def directories(self) -> tuple[str, ...]:
        """Each directory once: controllers may be mounted together."""
        found = [*self.v1.values(), *([self.v2] if self.v2 else [])]
        return tuple(dict.fromkeys(found))

    @property
    def procs_files(self) -> tuple[str, ...]:
        """Files to which a launcher writes `0` to put itself into the group."""
        return tuple(f"{directory}/cgroup.procs" for directory in self.directories)

    def exists(self) -> bool:
        return any(os.path.isdir(directory) for directory in self.directories)

    def join(self, pid: int) -> None:
        """Move a process (all its threads) into the group; raises OSError."""
        for path in self.procs_files:
            _write(path, str(pid))

    def procs(self) -> list[int]:
        """Pids of every process in the group or below it, as this process sees them; zombies are not listed by v2."""
        found: set[int] = set()
        for directory in self.directories:
            for path in _tree(directory):
                for word in (_read(f"{path}/cgroup.procs") or "").split():
                    if word.isdigit() and int(word) > 0:
                        found.add(int(word))
        return sorted(found)

    def counts(self, controller: str) -> bool:
        """Whether the group is in a hierarchy that counts `memory`, `pids` or `cpu`."""
        return controller in self.v1 or (self.v2 is not None and controller in self.held)

    def stats(self) -> CgroupStats:
        if (memory := self.v1.get("memory")) is not None:
            usage, peak = _number(f"{memory}/memory.usage_in_bytes"), _number(f"{memory}/memory.max_usage_in_bytes")
            ooms = _keyed(f"{memory}/memory.oom_control", "oom_kill")
        elif self.v2 is not None:
            usage, peak = _number(f"{self.v2}/memory.current"), _number(f"{self.v2}/memory.peak")
            ooms = _keyed(f"{self.v2}/memory.events", "oom_kill")
        else:
            usage = peak = ooms = None
        pids_at, cpu_at = self.v1.get("pids", self.v2), self.v1.get("cpu", self.v2)
        cpu: float | None = None
        if (acct := self.v1.get("cpuacct")) is not None:
            nanoseconds = _number(f"{acct}/cpuacct.usage")
            cpu = None if nanoseconds is None else nanoseconds / 1e9
        elif self.v2 is not None and (micro := _keyed(f"{self.v2}/cpu.stat", "usage_usec")) is not None:
            cpu = micro / 1e6
        return CgroupStats(
            memory_bytes=usage,
            peak_memory_bytes=peak,
            oom_kills=ooms,
            pids=_number(f"{pids_at}/pids.current") if pids_at else None,
            peak_pids=_number(f"{pids_at}/pids.peak") if pids_at else None,
            pids_limit_hits=_keyed(f"{pids_at}/pids.events", "max") if pids_at else None,
            cpu_seconds=cpu,
            cpu_throttled=_keyed(f"{cpu_at}/cpu.stat", "nr_throttled") if cpu_at else None,
        )

    def reset_peak(self) -> bool:
        """Start the memory peak anew; False where the host cannot (v2: a reset holds for one descriptor only)."""
        if (memory := self.v1.get("memory")) is None:
            return False
        try:
            _write(f"{memory}/memory.max_usage_in_bytes", "0")
        except OSError:
            return False
        return True

    def freeze(self, timeout_s: float = 5.0) -> bool:
        """Stop every process; False when the host cannot or not all stopped in time (then they run again)."""
        if (freezer := self.v1.get("freezer")) is not None:
            path, word = f"{freezer}/freezer.state", "FROZEN"
        elif self.v2 is not None and os.path.exists(f"{self.v2}/cgroup.freeze"):
            path, word = f"{self.v2}/cgroup.freeze", "1"
        else:
            return False
        with contextlib.suppress(OSError):
            end = time.monotonic() + timeout_s
            while True:
                # v1 needs the write again while forking processes keep it in FREEZING.
                _write(path, word)
                if word == "FROZEN" and _read(path) == word:
                    return True
                if word == "1" and _keyed(f"{self.v2}/cgroup.events", "frozen") == 1:
                    return True
                if time.monotonic() >= end:
                    break
                time.sleep(0.002)
        self.thaw()
        return False

    def thaw(self) -> None:
        """Let frozen processes run; does nothing where nothing is frozen."""
        with contextlib.suppress(OSError):
            if (freezer := self.v1.get("freezer")) is not None:
                _write(f"{freezer}/freezer.state", "THAWED")
        with contextlib.suppress(OSError):
            if self.v2 is not None:
                _write(f"{self.v2}/cgroup.freeze", "0")

    def kill(self, timeout_s: float = 30.0) -> bool:
        """SIGKILL to everything until nothing is left; True when the group is empty. Blocks: use a thread."""
        end = time.monotonic() + timeout_s
        pause = 0.001
        while True:
            atomic = False
            if self.v2 is not None:
                with contextlib.suppress(OSError):
                    _write(f"{self.v2}/cgroup.kill", "1")
                    atomic = True
            pids = self.procs()
            if not pids:
                self.thaw()
                return True
            if not atomic or pause > 0.01:
                # Frozen, nobody forks between the listing and the signal, and no number can change hands.
                self.freeze(1.0)
                for pid in self.procs():
                    if pid > 1 and pid != os.getpid() and (ref := process.ref_of(pid)) is not None:
                        with contextlib.suppress(OSError):
                            process.kill(ref)
            self.thaw()
            if time.monotonic() >= end:
                return not self.procs()
            time.sleep(pause)
            pause = min(pause * 2, 0.1)

    def remove(self, timeout_s: float = 5.0) -> tuple[str, ...]:
        """Remove the group, what is below, and our parents if empty; -> directories that stayed. Idempotent."""
        left: list[str] = []
        end = time.monotonic() + timeout_s
        for directory in self.directories:
            # The kernel answers EBUSY for a moment after the last process, until its parent has reaped it.
            while not _remove_tree(directory):
                if time.monotonic() >= end:
                    left.append(directory)
                    break
                time.sleep(0.005)
            parent = directory
            for _ in self.name.split("/"):
                parent = os.path.dirname(parent)
                with contextlib.suppress(OSError):
                    _rmdir(parent)
        return tuple(left)


@dataclass(frozen=True)
class Hierarchies:
    """Where this process may make groups: v1 controller -> directory, and the v2 directory with its usable controllers."""

    v1: dict[str, str] = field(default_factory=dict)
    v2: str | None = None
    v2_controllers: frozenset[str] = frozenset()

    @property
    def kind(self) -> Kind:
        if any(name in self.v1 for name in ("memory", "pids", "cpu")):
            return "hybrid" if self.v2 is not None else "v1"
        return "v2" if self.v2 is not None and self.v2_controllers else "none"

    def can(self, limit: str) -> bool:
        """Whether `memory`, `pids` or `cpu` can be limited here."""
        return limit in self.v1 or limit in self.v2_controllers

    def open(self, name: str) -> Cgroup:
        """The group of this name without making it: where it would lie (also one that an OCI runtime made there)."""
        _check(name)
        v1 = {controller: f"{base}/{TOP}/{name}" for controller, base in self.v1.items()}
        v2 = f"{self.v2}/{TOP}/{name}" if self.v2 is not None else None
        held = frozenset(limit for limit in LIMITED if self.can(limit))
        return Cgroup(name, v1, v2, held)

    def create(self, name: str, limits: Limits) -> Cgroup:
        """Make the group, or take the one there, and set memory, pids and cpu; an OSError leaves nothing made.

        What can be limited here is limited afterwards, as read back, or it is an OSError (EBUSY): a runtime that declares a limit
        as enforced never has an instance without it.
        """
        group = self.open(name)
        try:
            for directory in group.directories:
                self._make(directory, name)
            if lost := sorted(limit for limit in group.held if not _limit(group, limit, limits)):
                raise OSError(errno.EBUSY, f"the kernel does not take the limit of {', '.join(lost)}")
        except BaseException:
            group.remove(0.0)
            raise
        return group

    def _make(self, directory: str, name: str) -> None:
        parts = [TOP, *name.split("/")]
        base = directory[: -len("/".join(parts)) - 1]
        for attempt in range(20):
            path = base
            try:
                for part in parts:
                    if base == self.v2:
                        _enable(path, self.v2_controllers)
                    path = f"{path}/{part}"
                    with contextlib.suppress(FileExistsError):
                        _mkdir(path)
                return
            except FileNotFoundError:
                # Another process removed a parent that was empty for a moment.
                if attempt == 19:
                    raise

    def find_ours(self, installation: str) -> list[str]:
        """Names `<installation>/<instance>` of all groups of an installation, in whatever hierarchy one is left."""
        _check(installation)
        found: set[str] = set()
        for base in {*self.v1.values(), *([self.v2] if self.v2 else [])}:
            with contextlib.suppress(OSError), os.scandir(f"{base}/{TOP}/{installation}") as entries:
                found.update(f"{installation}/{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False))
        return sorted(found)

    def remove_empty(self, instance: str) -> None:
        """Remove the groups that any installation has for an instance, as far as nothing runs in them."""
        _check(instance)
        for base in {*self.v1.values(), *([self.v2] if self.v2 else [])}:
            with contextlib.suppress(OSError), os.scandir(f"{base}/{TOP}") as entries:
                for entry in entries:
                    if os.path.isdir(f"{entry.path}/{instance}") and _remove_tree(f"{entry.path}/{instance}"):
                        with contextlib.suppress(OSError):  # others of it are left
                            _rmdir(entry.path)


@cache
def host() -> Hierarchies:
    """What this process may use, found once."""
    return detect()


def detect(mountinfo: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup") -> Hierarchies:
    """Find usable hierarchies by trying each: make a group, set what it offers, put a child into it, remove it.

    A limit that a group does not take, or does not have when it is read back, cannot be held here.
    """
    v1: dict[str, str] = {}
    v2: str | None = None
    v2_controllers: frozenset[str] = frozenset()
    for kind, point, options in _mounts(mountinfo):
        if kind == "cgroup":
            names = [name for name in V1_CONTROLLERS if name in options and name not in v1]
            v1.update(dict.fromkeys(_try(point, names) or () if names else (), point))
        elif v2 is None:
            for base in _v2_bases(point, own):
                usable = _try(base, LIMITED, v2=True)
                if usable is not None:
                    v2, v2_controllers = base, usable
                    break
    return Hierarchies(v1, v2, v2_controllers - frozenset(v1))


def _mounts(mountinfo: str) -> list[tuple[str, str, frozenset[str]]]:
    found = []
    for line in (_read(mountinfo) or "").splitlines():
        left, dash, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if dash and len(fields) >= 5 and len(tail) >= 3 and tail[0] in ("cgroup", "cgroup2"):
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            found.append((tail[0], point, frozenset(tail[2].split(","))))
    return found


def _v2_bases(point: str, own: str) -> list[str]:
    """Directories under which a v2 group may be ours: the top (root), else the ancestors of our own group."""
    bases = [point]
    for line in (_read(own) or "").splitlines():
        if line.startswith("0::/") and ".." not in line:
            path = point
            for part in line[4:].split("/")[:-1]:
                path = f"{path}/{part}"
                bases.append(path)
    return bases


def _try(base: str, controllers: Collection[str], v2: bool = False) -> frozenset[str] | None:
    """Those of the controllers that a new group under `base` can have; None when no group can be made and joined there."""
    probe = f"{base}/{TOP}/probe-{os.getpid()}-{secrets.token_hex(4)}"
    group = Cgroup(
        probe[len(f"{base}/{TOP}/") :], {} if v2 else dict.fromkeys(controllers, probe), probe if v2 else None
    )
    try:
        _mkdirs(base, probe)
        if v2:
            _enable(base, controllers)
            _enable(f"{base}/{TOP}", controllers)
            controllers = set(controllers) & {*(_read(f"{probe}/cgroup.controllers") or "").split()}
        usable = frozenset(name for name in controllers if name not in LIMITED or _limit(group, name, Limits()))
        return usable if _joined(probe) else None
    except (OSError, subprocess.SubprocessError):
        return None
    finally:
        Cgroup(group.name, {}, probe).remove(1.0)


def _joined(probe: str) -> bool:
    """Whether a child of ours can be put into a group."""
    if os.geteuid() == 0:
        # Who may make groups and is root may also move processes; five children would cost a tenth of a second.
        return os.access(f"{probe}/cgroup.procs", os.W_OK)
    # A child, because moving this process would need the way back.
    joined = subprocess.run(
        ["/bin/sh", "-c", 'echo 0 >"$1/cgroup.procs"', "sh", probe],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=10,
    )
    return joined.returncode == 0


def _mkdirs(base: str, path: str) -> None:
    for _ in range(20):
        try:
            with contextlib.suppress(FileExistsError):
                _mkdir(f"{base}/{TOP}")
            _mkdir(path)
            return
        except FileNotFoundError:
            continue
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _enable(directory: str, controllers: Collection[str]) -> None:
    for controller in sorted(controllers):
        with contextlib.suppress(OSError):
            _write(f"{directory}/cgroup.subtree_control", f"+{controller}")


def _limit(group: Cgroup, limit: str, limits: Limits) -> bool:
    """Set one limit; False when the kernel does not take it, or has another one afterwards."""
    try:
        if (directory := group.v1.get(limit)) is not None:
            if limit == "memory":
                return _set_memory_v1(directory, limits.memory_bytes)
            if limit == "pids":
                return _set(f"{directory}/pids.max", str(limits.pids))
            period = _set(f"{directory}/cpu.cfs_period_us", str(CPU_PERIOD_US))
            return _set(f"{directory}/cpu.cfs_quota_us", str(_quota(limits.cpu))) and period
        assert group.v2 is not None
        if limit == "memory":
            swap = f"{group.v2}/memory.swap.max"
            without_swap = not os.path.exists(swap) or _set(swap, "0")
            return _set(f"{group.v2}/memory.max", _pages(limits.memory_bytes)) and without_swap
        if limit == "pids":
            return _set(f"{group.v2}/pids.max", str(limits.pids))
        return _set(f"{group.v2}/cpu.max", f"{_quota(limits.cpu)} {CPU_PERIOD_US}")
    except OSError:
        return False


def _set(path: str, text: str) -> bool:
    """Write a value; -> whether it is what is read then."""
    _write(path, text)
    return _read(path) == text


def _pages(size: int) -> str:
    """A size as the kernel keeps it: whole pages."""
    return str(size - size % os.sysconf("SC_PAGE_SIZE"))


def _set_memory_v1(directory: str, size: int) -> bool:
    # memory <= memory+swap must hold after each write, so the order depends on the direction of the change.
    both, plain, text = f"{directory}/memory.memsw.limit_in_bytes", f"{directory}/memory.limit_in_bytes", _pages(size)
    if not os.path.exists(both):
        return _set(plain, text)
    try:
        _write(both, text)
        _write(plain, text)
    except OSError:
        _write(plain, text)
        _write(both, text)
    return _read(plain) == _read(both) == text


def _quota(cpu: float) -> int:
    return max(1000, int(cpu * CPU_PERIOD_US))


def _check(name: str) -> None:
    if not name or not all(_PART.fullmatch(part) for part in name.split("/")):
        raise ValueError(f"not a group name: {name!r}")


def _tree(directory: str) -> list[str]:
    """The directory and all groups below it, deepest last; empty when it is gone."""
    found = [directory] if os.path.isdir(directory) else []
    for path in found:
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            found.extend(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    return found


def _remove_tree(directory: str) -> bool:
    for path in reversed(_tree(directory)):
        try:
            _rmdir(path)
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def _mkdir(path: str) -> None:
    os.mkdir(path, 0o755)


def _rmdir(path: str) -> None:
    os.rmdir(path)


def _read(path: str) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    pieces = []
    try:
        while piece := os.read(fd, 65536):
            pieces.append(piece)
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(pieces).decode("utf-8", "surrogateescape").strip()


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _keyed(path: str, key: str) -> int | None:
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return None


def _write(path: str, text: str) -> None:
    # Never creates: in a control file system a missing file means a missing feature.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)
