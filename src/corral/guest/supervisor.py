"""The supervisor of one exec: a forked child of the guest that starts main, sees it end, and can end everything below it.

It is a child subreaper, so whatever main leaves behind (double forks, new sessions) stays below it; it lives until none of that is
left. It talks to the guest over one packet socket: JSON out (`started`, `failed`, `exited`, `killed`), short commands in
(`K <grace ms>`, `S <signal>` to main, `T <signal>` to all).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself would import enum
import errno
import fcntl
import os
import resource
import select
import time

from corral.guest import kernel, processes, protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import Any, NoReturn

TIOCSCTTY = 0x540E
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
KILL_PATIENCE_S = 5.0
"""How long rounds of KILL go on before the supervisor says that something survived."""

_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "core": resource.RLIMIT_CORE,
    "fsize": resource.RLIMIT_FSIZE,
    "data": resource.RLIMIT_DATA,
    "nproc": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
    "cpu": resource.RLIMIT_CPU,
}
_QUIET = tuple(number for number in range(1, 65) if number not in (4, 5, 6, 7, 8, 11, _signal.SIGCHLD, 32, 33))
"""Signals that a supervisor blocks: all but its own faults and the news of children."""

LIMIT_NAMES = frozenset(_LIMITS)


class Plan:
    """What to run, checked by the guest. `stdin`, `stdout`, `stderr` are the program's ends; with `pty` all three are the slave."""

    __slots__ = (
        "argv",
        "background_kill",
        "confine_signals",
        "cwd",
        "dumpable",
        "environment",
        "gid",
        "limits",
        "nice",
        "oom_score_adj",
        "pty",
        "seccomp",
        "stderr",
        "stdin",
        "stdout",
        "uid",
        "umask",
    )

    argv: list[bytes]
    background_kill: bool
    confine_signals: bool
    cwd: bytes
    dumpable: bool
    environment: dict[bytes, bytes]
    gid: int
    limits: dict[str, int]
    nice: int
    oom_score_adj: int
    pty: bool
    seccomp: kernel.Filter | None
    stderr: int
    stdin: int
    stdout: int
    uid: int
    umask: int


def run(plan: Plan, guest: _socket.socket) -> NoReturn:
    """In the forked child: never returns."""
    status = 70
    try:
        status = _Supervisor(plan, guest).run()
    finally:
        os._exit(status)


class _Step(Exception):
    def __init__(self, what: str, error: OSError, message: str) -> None:
        self.what = what
        self.number = error.errno or errno.EIO
        self.message = message


class _Supervisor:
    def __init__(self, plan: Plan, guest: _socket.socket) -> None:
        self.plan = plan
        self.guest = guest
        self.main = 0
        self.main_ended = False
        self.childless = False
        self.killed: set[tuple[int, int]] = set()

    def run(self) -> int:
        plan = self.plan
        os.setsid()
        # A supervisor of the same uid as its exec can be signalled by it: only KILL and STOP may have an effect.
        _signal.pthread_sigmask(_signal.SIG_SETMASK, _QUIET)
        _signal.set_wakeup_fd(-1)
        _close_others({0, 1, 2, plan.stdin, plan.stdout, plan.stderr, self.guest.fileno()})
        if not plan.dumpable:
            kernel.set_dumpable(False)
        kernel.become_subreaper()
        failure = self._start()
        for fd in {plan.stdin, plan.stdout, plan.stderr}:
            os.close(fd)
        if failure is not None:
            self._tell(failure)
            return 0
        self._tell({"event": "started", "pid": self.main, "at": _now_ms()})
        self._watch()
        return 0

    # -- start -------------------------------------------------------------------------------------------------------------------
    def _start(self) -> dict[str, Any] | None:
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            self.main = os.fork()
        except OSError as error:
            return _failure(_Step("platform", error, "the process cannot be made"))
        if self.main == 0:
            _become_main(self.plan, write)
        os.close(write)
        answer = b""
        while True:
            part = os.read(read, 4096)
            if not part:
                break
            answer += part
        os.close(read)
        if not answer:
            return None
        os.waitpid(self.main, 0)
        return protocol.loads(answer)

    # -- watch -------------------------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self.guest.fileno(), select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        self._reap()
        while not (self.main_ended and self.childless):
            for fd, _ in poller.poll():
                if fd == wake_read:
                    _drain(wake_read)
                elif not self._command():
                    # The guest is gone, and with it the sandbox: nothing may live on without it.
                    processes.end_tree(os.getpid(), time.monotonic() + KILL_PATIENCE_S, self.killed, self._reap)
                    return
            self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                return
            self.childless = False
            if pid == 0:
                return
            if pid == self.main and not self.main_ended:
                self.main_ended = True
                self._report_end(status, usage)

    def _report_end(self, status: int, usage: Any) -> None:
        ended = _now_ms()
        survivors: list[processes.Process] = []
        all_dead = True
        before = len(self.killed)
        if self.plan.background_kill:
            all_dead = processes.end_tree(os.getpid(), time.monotonic() + KILL_PATIENCE_S, self.killed, self._reap)
        if not all_dead or not self._no_children():
            survivors = processes.descendants(os.getpid())
        self._tell(
            {
                "event": "exited",
                "status": status,
                "at": ended,
                "utime_ms": int(usage.ru_utime * 1000),
                "stime_ms": int(usage.ru_stime * 1000),
                "maxrss_kib": usage.ru_maxrss,
                "killed": len(self.killed) - before,
                "killed_all": all_dead,
                "background": len(survivors),
            }
        )

    def _no_children(self) -> bool:
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return True
        return False

    def _command(self) -> bool:
        try:
            message = self.guest.recv(256)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not message:
            return False
        kind, number = message[:1], int(message[1:])
        if kind == b"K":
            self._kill(number / 1000)
        elif kind == b"S":
            if not self.main_ended:
                processes.send_child(self.main, number)
        else:
            for process in processes.descendants(os.getpid()):
                processes.send(process, number)
        return True

    def _kill(self, grace: float) -> None:
        me = os.getpid()
        before = len(self.killed)
        if grace > 0:
            for number in (processes.SIGTERM, processes.SIGCONT):
                for process in processes.descendants(me):
                    processes.send(process, number)
            self._wait_for_none(time.monotonic() + grace)
        done = processes.end_tree(me, time.monotonic() + KILL_PATIENCE_S, self.killed, self._reap)
        self._reap()
        self._tell({"event": "killed", "killed": len(self.killed) - before, "killed_all": done})

    def _wait_for_none(self, until: float) -> None:
        pause = 0.002
        while time.monotonic() < until:
            self._reap()
            if self.childless or not processes.descendants(os.getpid()):
                return
            # A second, shorter kill cuts the grace short.
            if select.select([self.guest], [], [], min(pause, max(0.0, until - time.monotonic())))[0]:
                try:
                    message = self.guest.recv(256)
                except OSError:
                    return
                if not message:
                    return
                if message[:1] == b"K":
                    until = min(until, time.monotonic() + int(message[1:]) / 1000)
            pause = min(pause * 2, 0.05)

    def _tell(self, event: dict[str, Any]) -> None:
        try:
            self.guest.send(protocol.dumps(event))
        except OSError:
            pass


def _become_main(plan: Plan, report: int) -> NoReturn:
    try:
        _prepare(plan)
        _execute(plan)
    except _Step as step:
        os.write(report, protocol.dumps(_failure(step)))
    except BaseException as error:
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        os.write(
            report, protocol.dumps(_failure(_Step("platform", OSError(number, ""), f"{type(error).__name__}: {error}")))
        )
    os._exit(127)


def _prepare(plan: Plan) -> None:
    os.setsid()
    os.dup2(plan.stdin, 0)
    os.dup2(plan.stdout, 1)
    os.dup2(plan.stderr, 2)
    if plan.pty:
        fcntl.ioctl(0, TIOCSCTTY, 0)
    # What the interpreter and the guest ignore; the one handler is reset by exec.
    for number in (2, 13, 25):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    os.umask(plan.umask)
    if plan.nice:
        os.nice(plan.nice)
    _score(plan)
    for name, value in plan.limits.items():
        _limit(_LIMITS[name], value)
    _switch_user(plan)
    kernel.no_new_privileges()
    try:
        os.chdir(plan.cwd)
    except OSError as error:
        raise _Step("cwd", error, f"cannot change to the working directory: {error.strerror}") from None
    if plan.confine_signals:
        kernel.landlock_confine_signals()


def _score(plan: Plan) -> None:
    # /proc/self belongs to nobody while the process is not dumpable. The guest's other capabilities keep execs out meanwhile.
    try:
        if not plan.dumpable:
            kernel.set_dumpable(True)
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        try:
            os.write(fd, b"%d" % plan.oom_score_adj)
        finally:
            os.close(fd)
    except OSError:
        pass  # lowering is refused without CAP_SYS_RESOURCE; raising never is
    finally:
        if not plan.dumpable:
            kernel.set_dumpable(False)


def _limit(number: int, value: int) -> None:
    _, hard = resource.getrlimit(number)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(number, (value, value))


def _switch_user(plan: Plan) -> None:
    if plan.uid != 0 and plan.uid == os.getuid() and plan.gid == os.getgid():
        return
    try:
        try:
            os.setgroups([])
        except PermissionError:
            # A user namespace may forbid setgroups for good; then there are no groups worth anything in it.
            if set(os.getgroups()) - {plan.gid, 65534}:
                raise
        os.setresgid(plan.gid, plan.gid, plan.gid)
        os.setresuid(plan.uid, plan.uid, plan.uid)
    except OSError as error:
        raise _Step("user", error, f"cannot become {plan.uid}:{plan.gid}: {error.strerror}") from None


def _execute(plan: Plan) -> NoReturn:
    name = plan.argv[0]
    if b"/" in name:
        candidates = [name]
    else:
        path = plan.environment.get(b"PATH", DEFAULT_PATH.encode())
        candidates = [(part or b".") + b"/" + name for part in path.split(b":")] if name else []
    if plan.seccomp is not None:
        plan.seccomp.install()
    failed = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for candidate in candidates:
        try:
            os.execve(candidate, plan.argv, plan.environment)  # noqa: S606
        except OSError as error:
            # As execvp does: look on, but remember that there was something that may not be run.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                if error.errno != errno.EACCES:
                    failed = error
                    break
                failed = error
    shown = name.decode("utf-8", "surrogateescape")
    raise _Step("argv", failed, f"{shown}: {failed.strerror}")


def _failure(step: _Step) -> dict[str, Any]:
    return {
        "event": "failed",
        "what": step.what,
        "errno": errno.errorcode.get(step.number, str(step.number)),
        "message": step.message[:500],
    }


def _close_others(keep: set[int]) -> None:
    last = 2
    for fd in sorted(keep):
        if fd > last + 1:
            os.closerange(last + 1, fd)
        last = max(last, fd)
    os.closerange(last + 1, 1 << 20)


def _drain(fd: int) -> None:
    try:
        while len(os.read(fd, 512)) == 512:
            pass
    except BlockingIOError:
        pass


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
