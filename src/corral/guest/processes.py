"""Processes inside: looking, signalling, ending. The only module of the guest that sends signals.

A number is signalled only when it is an unreaped child of the caller or through a pidfd whose start time was compared.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself would import enum
import os
import time

from corral.guest.kernel import become_subreaper, fork_as_init, mount, unmount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SIGKILL, SIGTERM, SIGSTOP, SIGCONT = 9, 15, 19, 18

_table = "/proc"
"""Where the process table is seen whole."""


def take_cover(directory: str) -> None:
    """From now on /proc shows nobody more of this process than its number, nor of what calls `cover_self`.

    For a kernel that tells everybody the environment, maps and descriptors of every process. `directory` is made, for root only; in
    it the table is seen whole. The mounts must be the sandbox's own. OSError where it cannot be done.
    """
    global _table
    os.mkdir(directory, 0o700)
    table = f"{directory}/proc"  # a mount on the directory itself would have a mode of its own, open to all
    os.mkdir(table)
    mount(b"proc", table)
    mount(b"tmpfs", f"/proc/{os.getpid()}", b"mode=0,size=4k")
    _table = table


def cover_self() -> None:
    """Where cover is taken: for this process too, until `reap` or `await_child` has it."""
    if _table != "/proc":
        mount(b"tmpfs", f"/proc/{os.readlink('/proc/self')}", b"mode=0,size=4k")


def _uncover(pid: int) -> None:
    # While it still has its number: later another one's entry would be reached, or none, and the mount would stay for ever.
    if _table != "/proc":
        unmount(f"/proc/{pid}")


def reap() -> tuple[int, int]:
    """`waitpid` for any child that has ended, (0, 0) when none has."""
    if _table == "/proc":
        return os.waitpid(-1, os.WNOHANG)
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return 0, 0
    _uncover(ended.si_pid)
    return os.waitpid(ended.si_pid, 0)


class Process:
    """One line of the process table. `live` is False for a zombie all of whose threads are gone."""

    __slots__ = ("live", "parent", "pid", "start", "state")

    def __init__(self, pid: int, parent: int, start: int, live: bool, state: bytes = b"") -> None:
        self.pid = pid
        self.parent = parent
        self.start = start
        self.live = live
        self.state = state


def look(pid: int) -> Process | None:
    try:
        fd = os.open(f"{_table}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
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
    return Process(pid, int(fields[1]), int(fields[19]), not dead, fields[0])


def table() -> dict[int, Process]:
    found: dict[int, Process] = {}
    for name in os.listdir(_table):
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


def resident(among: list[Process]) -> int:
    """Bytes that they have in memory, what they share counted for each."""
    pages = 0
    for process in among:
        try:
            fd = os.open(f"{_table}/{process.pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
            try:
                pages += int(os.read(fd, 256).split()[1])
            finally:
                os.close(fd)
        except (OSError, IndexError, ValueError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


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


def await_child(pid: int, until: float) -> None:
    """Reap an own child that is about to end; it is killed if it has not by then (monotonic)."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            send_child(pid, SIGKILL)
            until += 3600.0
        time.sleep(0.002)
    _uncover(pid)
    os.waitpid(pid, 0)


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
    """PID 1 only, of a sandbox or of an exec: KILL every other process of the namespace until none is left."""
    if os.getpid() != 1:
        raise AssertionError("only PID 1 of a namespace may do this")
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


class Subtree:
    """What is below this process, a subreaper: found by its parents, ended one by one."""

    exact = False
    """Whether there are no others as soon as this process has no child."""

    def living(self) -> list[Process]:
        return descendants(os.getpid())

    def signal(self, number: int) -> None:
        for process in self.living():
            send(process, number)

    def reaped(self, pid: int, status: int) -> None:
        pass

    def end(self, until: float, killed: set[tuple[int, int]], reap: Callable[[], None]) -> bool:
        return end_tree(os.getpid(), until, killed, reap)


class Namespace:
    """What is below this process, the init of a pid namespace of its own: reached as one, and gone with it.

    /proc shows the numbers of the namespace above, so nothing that was read there can be signalled from here.
    """

    exact = True

    def __init__(self) -> None:
        if os.getpid() != 1:
            raise AssertionError("only the init of a namespace may signal all of it")
        self._killed: set[tuple[int, int]] | None = None

    def living(self) -> list[Process]:
        return descendants(int(os.readlink("/proc/self")))

    def signal(self, number: int) -> None:
        try:
            os.kill(-1, number)
        except OSError:
            pass

    def reaped(self, pid: int, status: int) -> None:
        # While all are being killed nobody else reaps: who comes back from it is counted here.
        if self._killed is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == SIGKILL:
            self._killed.add((pid, len(self._killed)))

    def end(self, until: float, killed: set[tuple[int, int]], reap: Callable[[], None]) -> bool:
        reap()
        self._killed = killed
        try:
            done = end_everything(until, reap)
            reap()
            return done
        finally:
            self._killed = None


def subreaper_works() -> bool:
    """Whether an orphan comes back to a subreaper. This process becomes one."""
    if not become_subreaper():
        return False
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


def namespaces_work() -> bool:
    """Whether a child can be the init of a pid namespace."""
    try:
        pid = fork_as_init()
    except OSError:
        return False
    if pid == 0:
        os._exit(0 if os.getpid() == 1 else 1)
    return os.waitpid(pid, 0)[1] == 0
