"""Processes of a sandbox as the host sees them, without a cgroup: by pid namespace, read in /proc.

This is what holds the limits of a sandbox that an ordinary user started ("watched"), and the host's witness that a kill was
complete. Works for root and for the user who owns the sandbox's user namespace, even when the processes are not dumpable.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from corral.linux.process import ProcessRef, ref_of, start_time

_NS_GET_PARENT = 0xB702
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
MOST_OPEN = 40_000
"""Open files of one sandbox that one look takes in: looking must not be what a program can make dear. A look that meets more says so."""
_MAPPINGS_BYTES = 16 << 20
"""Of lists of mappings that one look reads: about twenty thousand of them. What is not read is not taken off, so nothing hides there."""
_KCMP = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_KCMP_FILES = 2
_PIDFD_GETFD = 438
_ENDED = (b"Z", b"X")
_libc = ctypes.CDLL(None, use_errno=True)
_LOCKED_IN = "/secretmem"
_MEMORY_FILES = ("/memfd:", _LOCKED_IN)
_MAPPED = tuple(b" " + word.encode() for word in _MEMORY_FILES)
File = tuple[int, int]
"""Device and inode."""


@dataclass(frozen=True)
class Totals:
    """Sums over all live processes of a sandbox at one moment.

    `memory_bytes` is RSS, or PSS where RSS is large, and the memory files (`memfd_create`, `memfd_secret`) that are open: those need not be mapped.
    RSS counts what is shared more than once, so it is never too small; PSS is never too large. Without `whole` not every open file
    could be looked at, and `memory_bytes` is a lower bound.
    """

    count: int
    memory_bytes: int
    cpu_seconds: float
    whole: bool = True


@dataclass(frozen=True)
class Nameless:
    """Files without a name that processes keep by having them open. Without `whole` there may be more."""

    bytes: int = 0
    count: int = 0
    whole: bool = True


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
        if verdicts[inode] and runs(pid):
            found.append(pid)
    return found


def totals(pids: list[int], *, pss_above: int | None = None) -> Totals:
    """Memory, CPU time and number of these processes. CPU time includes what their ended and awaited children used.

    RSS, which is cheap to read, unless it is more than `pss_above`: then PSS.
    """
    count = rss = ticks = 0
    places = []
    for pid in pids:
        try:
            place = f"/proc/{pid}"
            fields = _stat(place)
            if fields[0] == b"Z" and (threads := _threads(pid)):
                # Its first thread has ended, and shows no memory: that is another's to tell.
                place = f"/proc/{pid}/task/{threads[0]}"
                fields[21] = _stat(place)[21]
        except OSError:
            continue
        count += 1
        places.append(place)
        ticks += sum(int(field) for field in fields[11:15])
        rss += int(fields[21]) * _PAGE
    files, whole = _memory_files(pids)
    memory = rss + sum(files.values())
    if pss_above is not None and memory > pss_above:
        memory = _proportional(places, files)
    return Totals(count, memory, ticks / _TICKS, whole)


def unlinked(pids: list[int], device: int) -> Nameless:
    """The files of a device that have no name any more and are kept by these processes, which have them open."""
    sizes: dict[int, int] = {}

    def look(name: str, table: int) -> None:
        info = os.stat(name, dir_fd=table)
        if info.st_nlink == 0 and info.st_dev == device and stat.S_ISREG(info.st_mode):
            sizes[info.st_ino] = info.st_blocks * 512

    whole = _look_at_open_files(pids, look)
    return Nameless(sum(sizes.values()), len(sizes), whole)


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


def in_session(leader: int) -> list[ProcessRef]:
    """Every live process of the session that `leader` began, itself included."""
    found = []
    for pid in _pids():
        ref = ref_of(pid)
        try:
            fields = _stat(f"/proc/{pid}")
        except OSError:
            continue
        if ref is not None and int(fields[3]) == leader and runs(pid):
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


def runs(pid: int) -> bool:
    """Whether any thread of the process still does: the first one may end before the others, and then shows as a zombie."""
    try:
        return _stat(f"/proc/{pid}")[0] not in _ENDED or bool(_threads(pid))
    except OSError:
        return False


def _threads(pid: int) -> list[str]:
    """Threads of the process that have not ended. OSError when it is gone."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            if _stat(f"/proc/{pid}/task/{thread}")[0] not in _ENDED:
                found.append(thread)
    return found


def _stat(place: str) -> list[bytes]:
    """What the kernel tells of a process or thread, from its state on. OSError when it is gone."""
    with open(f"{place}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    if not fields:
        raise ProcessLookupError
    return fields


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


def _proportional(places: Iterable[str], files: dict[File, int]) -> int:
    """PSS of the processes, and of the memory files what that does not hold yet."""
    memory, mapped, to_read = 0, dict.fromkeys(files, 0), _MAPPINGS_BYTES
    for place in places:
        shared_out = _pss(place)
        memory += _rss(place) if shared_out is None else shared_out
        if files and shared_out is not None and to_read > 0:
            to_read -= _add_mapped(place, mapped, to_read)
    return memory + sum(max(0, size - mapped[file]) for file, size in files.items())


def _pss(place: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(f"{place}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return None


def _rss(place: str) -> int:
    try:
        return int(_stat(place)[21]) * _PAGE
    except (OSError, IndexError):
        return 0


def _add_mapped(place: str, mapped: dict[File, int], most: int) -> int:
    """Add how much of each of these files is in the PSS of a process: of the files themselves, not of private copies of their pages.

    -> how many bytes of its lists were read, of `most` that may be.
    """
    read = 0
    with contextlib.suppress(OSError, ValueError):
        with open(f"{place}/maps", "rb") as file:
            text = file.read(most)
        read = len(text)
        if not any(word in text for word in _MAPPED):
            return read
        current, share = None, 0
        with open(f"{place}/smaps", "rb") as file:
            for line in file:
                read += len(line)
                if read > most:
                    break
                if b" /" in line and any(word in line for word in _MAPPED):
                    _, _, _, device, inode, _ = line.split(None, 5)
                    major, _, minor = device.partition(b":")
                    current = os.makedev(int(major, 16), int(minor, 16)), int(inode)
                elif current in mapped and line.startswith(b"Pss:"):
                    share = int(line.split()[1]) * 1024
                elif current in mapped and line.startswith(b"Anonymous:"):
                    mapped[current] += max(0, share - int(line.split()[1]) * 1024)
                    current = None
    return read


def _memory_files(pids: list[int]) -> tuple[dict[File, int], bool]:
    """(bytes of every memory file that these processes have open, whether there are certainly no more)"""
    sizes: dict[File, int] = {}

    def look(name: str, table: int) -> None:
        link = os.readlink(name, dir_fd=table)
        if link.startswith(_MEMORY_FILES):
            info = os.stat(name, dir_fd=table)
            # Of a secret one the kernel does not tell how much of it is there.
            size = info.st_size if link.startswith(_LOCKED_IN) else info.st_blocks * 512
            sizes[info.st_dev, info.st_ino] = size

    whole = _look_at_open_files(pids, look)
    return sizes, whole


def _look_at_open_files(pids: list[int], look: Callable[[str, int], None]) -> bool:
    """Give every open file of these processes to `look`, by its name in an open directory; -> whether that was all of them.

    More than `MOST_OPEN` are too many to see: a watched limit must not take the others for none.
    """
    left, whole = MOST_OPEN, True
    for pid in pids:
        try:
            tables, compared = _tables(pid)
            left -= compared
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile, and its files with it
        except OSError:
            whole = False
            continue
        for thread, shared in tables.items():
            try:
                names = os.listdir(f"/proc/{pid}/task/{thread}/fdinfo")
                left -= len(names)
                if left < 0:
                    return False
                if names:
                    _look_at_table(pid, thread, names, look)
            except PermissionError:
                continue  # no program of a sandbox can forbid it, so it is the host that does, of all of them
            except (FileNotFoundError, ProcessLookupError):
                whole = whole and not (shared and runs(pid))
            except OSError:
                whole = False
    return whole


def _look_at_table(pid: int, thread: int, names: list[str], look: Callable[[str, int], None]) -> None:
    try:
        table = os.open(f"/proc/{pid}/task/{thread}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        # Of a process that is not dumpable, which any can become at will, that is root's alone.
        _look_at_copies(pid, thread, names, look)
        return
    try:
        for name in names:
            try:  # thousands of them: `suppress` would take as long as the call
                look(name, table)
            except OSError:  # closed meanwhile
                pass
    finally:
        os.close(table)


def _look_at_copies(pid: int, thread: int, names: list[str], look: Callable[[str, int], None]) -> None:
    """The same with copies of its descriptors, each for a moment: who may trace the process may have them, where the host lets anybody."""
    process = os.pidfd_open(thread, 0 if thread == pid else os.O_EXCL)  # of a thread: Linux 6.9
    try:
        own = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in names:
                copy = _libc.syscall(_PIDFD_GETFD, process, int(name), 0)
                if copy < 0:
                    if (error := ctypes.get_errno()) in (errno.EBADF, errno.ESRCH):
                        continue  # closed meanwhile
                    raise OSError(error, os.strerror(error))  # PermissionError where the host has none copied
                try:
                    look(str(copy), own)
                except OSError:
                    pass
                finally:
                    os.close(copy)
        finally:
            os.close(own)
    finally:
        os.close(process)


def _tables(pid: int) -> tuple[dict[int, bool], int]:
    """(a thread for each table of open files that the process has -> whether others have it too, how many comparisons that took)

    All threads have one table unless a program does what few do: end the first thread, or take a table apart. OSError when it is gone.
    """
    tables: dict[int, bool] = {}
    compared = 0
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        for other in tables:
            compared += 1
            # A kernel without the call has every thread looked at.
            if _KCMP is not None and _libc.syscall(_KCMP, thread, other, _KCMP_FILES, 0, 0) == 0:
                tables[other] = True
                break
        else:
            tables[thread] = False
        if compared > MOST_OPEN:
            break
    return tables, compared
