"""Processes inside: looking, signalling, ending. The only module of the guest that sends signals.

A number is signalled only when it is an unreaped child of the caller or through a pidfd whose start time was compared.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself would import enum
import os
import time

from corral.guest.kernel import become_subreaper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SIGKILL, SIGTERM, SIGSTOP, SIGCONT = 9, 15, 19, 18


class Process:
    """One line of the process table. `live` is False for a zombie all of whose threads are gone."""

    __slots__ = ("live", "parent", "pid", "start")

    def __init__(self, pid: int, parent: int, start: int, live: bool) -> None:
        self.pid = pid
        self.parent = parent
        self.start = start
        self.live = live


def look(pid: int) -> Process | None:
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, 1024)
    except OSError:
        return None
    finally:
        os.close(fd)
    # The name may hold anything, ")" and newlines included: fields begin behind the last ")".
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    # A leader that ended before its threads shows as Z, and lives.
    dead = fields[0] in (b"Z", b"X") and int(fields[17]) <= 1
    return Process(pid, int(fields[1]), int(fields[19]), not dead)


def table() -> dict[int, Process]:
    found: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = look(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def descendants(root: int, spare: frozenset[int] | set[int] = frozenset()) -> list[Process]:
    """Live processes below `root`; trees whose top is in `spare` are left out."""
    children: dict[int, list[Process]] = {}
    for process in table().values():
        children.setdefault(process.parent, []).append(process)
    out: list[Process] = []
    pending = [root]
    while pending:
        for process in children.get(pending.pop(), ()):
            if process.pid in spare:
                continue
            if process.live:
                out.append(process)
            pending.append(process.pid)
    return out


def send(process: Process, number: int) -> None:
    """Signal exactly this process or none."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno != 38:
            return
        fd = -1
    try:
        now = look(process.pid)
        if now is None or now.start != process.start or process.pid <= 1:
            return
        if fd >= 0:
            _signal.pidfd_send_signal(fd, number)
        else:
            os.kill(process.pid, number)
    except OSError:
        pass
    finally:
        if fd >= 0:
            os.close(fd)


def send_child(pid: int, number: int) -> None:
    """Signal an own child that was not reaped yet: its number cannot belong to another."""
    if pid > 1:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def end_tree(
    root: int,
    until: float,
    killed: set[tuple[int, int]],
    reap: Callable[[], None],
    spare: Callable[[], set[int]] | None = None,
) -> bool:
    """STOP all, KILL all, until nothing below `root` lives. False when something outlives `until` (monotonic)."""
    pause = 0.0005
    while True:
        reap()
        living = descendants(root, spare() if spare else frozenset())
        if not living:
            return True
        if time.monotonic() > until:
            return False
        # Stopped processes cannot fork on while the others are being killed.
        for process in living:
            send(process, SIGSTOP)
        for process in living:
            send(process, SIGKILL)
            killed.add((process.pid, process.start))
        reap()
        time.sleep(pause)
        pause = min(pause * 2, 0.02)


def end_everything(until: float, reap: Callable[[], None]) -> bool:
    """PID 1 only: KILL every other process of the namespace until none is left."""
    if os.getpid() != 1:
        raise AssertionError("only PID 1 of a sandbox may do this")
    while True:
        try:
            os.kill(-1, SIGKILL)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        reap()
        if time.monotonic() > until:
            return False
        time.sleep(0.0005)


def subreaper_works() -> bool:
    """Whether an orphan comes back to a subreaper (gVisor says yes to the request and does nothing)."""
    read, write = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            become_subreaper()
            inner = os.fork()
            if inner == 0:
                parent = os.getpid()
                if os.fork() == 0:
                    while os.getppid() == parent:
                        time.sleep(0.0002)
                    os.write(write, b"0" if os.getppid() == 1 else b"1")
                os._exit(0)
            os.waitpid(inner, 0)
            os.waitpid(-1, 0)
        finally:
            os._exit(0)
    os.close(write)
    answer = os.read(read, 1)
    os.close(read)
    os.waitpid(middle, 0)
    return answer == b"1"
