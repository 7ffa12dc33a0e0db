"""Processes of a sandbox as the host sees them, without a cgroup: by pid namespace, read in /proc.

This is what holds the limits of a sandbox that an ordinary user started ("watched"), and the host's witness that a kill was
complete. Works for root and for the user who owns the sandbox's user namespace, even when the processes are not dumpable.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from corral.linux.process import ProcessRef, ref_of, start_time

_NS_GET_PARENT = 0xB702
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_LOOKED_AT = 20_000
"""Open files of one sandbox that one look takes in: looking must not be what a program can make dear."""


@dataclass(frozen=True)
class Totals:
    """Sums over all live processes of a sandbox at one moment.

    `memory_bytes` is RSS, or PSS where it was asked for, and the memory files (`memfd_create`) that are open: those need not be mapped.
    RSS counts what is shared more than once, so it is never too small; PSS is never too large.
    """

    count: int
    memory_bytes: int
    cpu_seconds: float


def pid_namespace(pid: int) -> int | None:
    """Inode of the pid namespace of a process; None when it is gone or foreign."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None


def depth(pid: int) -> int:
    """How many pid namespaces the process is in below /proc's own: 0 for a host process, >= 1 inside a sandbox."""
    levels = _status(pid, b"NSpid")
    return max(0, len(levels) - 1) if levels is not None else 0


def members(namespace: int) -> list[int]:
    """Host pids of all live processes in a pid namespace or one nested in it. Zombies are left out."""
    own = pid_namespace(os.getpid())
    verdicts: dict[int, bool] = {namespace: True}
    if own is not None and own != namespace:
        verdicts[own] = False
    found = []
    for pid in _pids():
        inode = pid_namespace(pid)
        if inode is None:
            continue
        if inode not in verdicts:
            verdicts[inode] = _nested(pid, namespace)
        if verdicts[inode] and _runs(pid):
            found.append(pid)
    return found


def totals(pids: list[int], *, pss: bool = False) -> Totals:
    """Memory, CPU time and number of these processes. CPU time includes what their ended and awaited children used."""
    count = memory = ticks = mapped = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        count += 1
        ticks += sum(int(field) for field in fields[11:15])
        shared_out = _pss(pid) if pss else None
        memory += int(fields[21]) * _PAGE if shared_out is None else shared_out[0]
        mapped += 0 if shared_out is None else shared_out[1]
    return Totals(count, memory + max(0, _memory_files(pids) - mapped), ticks / _TICKS)


def unlinked(pids: list[int], device: int) -> tuple[int, int]:
    """(bytes, number) of the files of a device that have no name any more and are kept by these processes, which have them open."""
    sizes: dict[int, int] = {}
    for path in _open_files(pids):
        with contextlib.suppress(OSError):
            info = os.stat(path)
            if info.st_nlink == 0 and info.st_dev == device and stat.S_ISREG(info.st_mode):
                sizes[info.st_ino] = info.st_blocks * 512
    return sum(sizes.values()), len(sizes)


def with_arguments(marker: tuple[str, ...]) -> list[ProcessRef]:
    """Every process whose command line holds these arguments one after the other: how a launch without a record is found."""
    wanted = b"\0" + b"\0".join(os.fsencode(part) for part in marker) + b"\0"
    found = []
    for pid in _pids():
        started = start_time(pid)
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = b"\0" + file.read()
        except OSError:
            continue
        # The start time is read before the command line, so the reference is to the process whose line this was.
        if wanted in line and started is not None and (ref := ref_of(pid)) is not None and ref.start_time == started:
            found.append(ref)
    return found


def children(pid: int) -> list[int]:
    """Pids whose parent is this process, of any of its threads."""
    found = []
    for candidate in _pids():
        parents = _status(candidate, b"PPid")
        if parents == [pid]:
            found.append(candidate)
    return found


def in_session(leader: int) -> list[ProcessRef]:
    """Every live process of the session that `leader` began, itself included."""
    found = []
    for pid in _pids():
        ref = ref_of(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if ref is not None and int(fields[3]) == leader and fields[0] not in (b"Z", b"X"):
            found.append(ref)
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _status(pid: int, key: bytes) -> list[int] | None:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            text = file.read()
    except OSError:
        return None
    _, found, rest = text.partition(b"\n" + key + b":")
    return [int(word) for word in rest.split(b"\n", 1)[0].split()] if found else None


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[:1]
    except OSError:
        return False
    return state not in ([b"Z"], [b"X"], [])


def _nested(pid: int, ancestor: int) -> bool:
    """Whether the pid namespace of `pid` lies below the one with inode `ancestor`."""
    try:
        fd = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        for _ in range(32):  # the kernel's own bound on nesting
            try:
                # EPERM at the edge of what we may see: above our own namespace.
                parent = fcntl.ioctl(fd, _NS_GET_PARENT)
            except OSError:
                return False
            os.close(fd)
            fd = parent
            if os.fstat(fd).st_ino == ancestor:
                return True
        return False
    finally:
        os.close(fd)


def _pss(pid: int) -> tuple[int, int] | None:
    """(PSS, how much of it is shared memory, which files may be behind)"""
    found = {}
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            name, _, rest = line.partition(b":")
            if name in (b"Pss", b"Pss_Shmem"):
                found[name] = int(rest.split()[0]) * 1024
    return (found[b"Pss"], found.get(b"Pss_Shmem", 0)) if b"Pss" in found else None


def _memory_files(pids: list[int]) -> int:
    """Bytes of all memory files that these processes have open, each counted once."""
    sizes: dict[int, int] = {}
    for path in _open_files(pids):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/memfd:"):
                info = os.stat(path)
                sizes[info.st_ino] = info.st_blocks * 512
    return sum(sizes.values())


def _open_files(pids: list[int]) -> Iterator[str]:
    looked = 0
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                looked += 1
                if looked > _MOST_LOOKED_AT:
                    return
                yield entry.path
