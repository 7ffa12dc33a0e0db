"""References to processes that survive reuse of numbers, and the only place that sends a signal.

A number is never signalled: a stopped container reports pid -1, and `kill(-1)` as root ends every process of the
machine. A `ProcessRef` names one process by (pid, start time, boot id); whatever cannot be proved to be that process is
treated as gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class ProcessRef:
    """One process of one boot. `start_time` is field 22 of /proc/PID/stat, in clock ticks since boot."""

    pid: int
    start_time: int
    boot_id: str

    def to_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "start_time": self.start_time, "boot_id": self.boot_id}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProcessRef:
        """Inverse of `to_json`; ValueError when a member is missing or of another type."""
        try:
            pid, start_time, boot = data["pid"], data["start_time"], data["boot_id"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a process reference: {data!r}") from error
        if not (type(pid) is int and type(start_time) is int and isinstance(boot, str)):
            raise ValueError(f"not a process reference: {data!r}")
        return cls(pid, start_time, boot)


@cache
def boot_id() -> str:
    """The kernel's random id of this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def start_time(pid: int) -> int | None:
    """Start time of a live or zombie process, or None when there is no such pid."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command name may hold spaces and parentheses; everything after the last ")" is numeric.
    fields = stat.rpartition(b")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def ref_of(pid: int) -> ProcessRef | None:
    """A reference to the process that has this pid now, or None when there is none."""
    if pid <= 0:
        return None
    started = start_time(pid)
    return None if started is None else ProcessRef(pid, started, boot_id())


def open_pidfd(ref: ProcessRef) -> int | None:
    """A pidfd of exactly this process (close it), or None when it is gone. A zombie has one that polls readable."""
    if ref.pid <= 0 or ref.boot_id != boot_id():
        return None
    try:
        fd = os.pidfd_open(ref.pid)
    except OSError:
        return None
    # Compared after the open: the pidfd pins whatever had the number at that moment.
    if start_time(ref.pid) != ref.start_time:
        os.close(fd)
        return None
    return fd


def _ended(fd: int, timeout_ms: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def is_alive(ref: ProcessRef) -> bool:
    """Whether the process still runs; a zombie does not."""
    fd = open_pidfd(ref)
    if fd is None:
        return False
    try:
        return not _ended(fd, 0)
    finally:
        os.close(fd)


def kill(ref: ProcessRef, sig: int = signal.SIGKILL) -> bool:
    """Send a signal to exactly this process; True when it was delivered, False when the process is gone.

    Raises ValueError for pid <= 1 and PermissionError when the caller may not signal it.
    """
    if ref.pid <= 1:
        raise ValueError(f"refusing to signal pid {ref.pid}")
    fd = open_pidfd(ref)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, sig)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def wait_gone_blocking(ref: ProcessRef, timeout_s: float) -> bool:
    """Block until the process has ended; False when `timeout_s` passed first. For threads."""
    fd = open_pidfd(ref)
    if fd is None:
        return True
    try:
        return _ended(fd, max(0, int(timeout_s * 1000)))
    finally:
        os.close(fd)


def collect(ref: ProcessRef) -> None:
    """Take a dead process from the kernel's table if it became our child: where we are who inherits orphans, nobody else does."""
    if ref.pid > 1 and ref.boot_id == boot_id() and start_time(ref.pid) == ref.start_time:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(ref.pid, os.WNOHANG)


def collect_of(first_id: int, count: int) -> None:
    """Take every dead child of ours that ran under one of these ids from the kernel's table: orphans that nobody else collects.

    No other thread may be waiting for one of them.
    """
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                children = [int(pid) for pid in file.read().split()]
        except OSError:  # the thread has ended, or the kernel has no such list
            continue
        for pid in children:
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as status:
                    fields = dict(line.split(":", 1) for line in status if ":" in line)
                if fields["State"].split()[0] == "Z" and first_id <= int(fields["Uid"].split()[0]) < first_id + count:
                    os.waitpid(pid, os.WNOHANG)


async def wait_gone(ref: ProcessRef) -> None:
    """Return when the process has ended (at once when it is gone already); cancellable, whoever its parent is."""
    fd = open_pidfd(ref)
    if fd is None:
        return
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def readable() -> None:
        if not ended.done():
            ended.set_result(None)

    try:
        loop.add_reader(fd, readable)
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)
