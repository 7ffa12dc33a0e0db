"""From a plan to a running main program: who it is, where, within which limits, and the exec itself.

Two ways. `become_main` is a forked child that turns into the program. A *starter* is forked before there is a plan: it waits for one,
turns into the exec's user for good, and starts the program by `vfork`, so that on the way to it nothing is copied. It is gone when
the program runs, which then belongs to the starter's parent, the supervisor.
"""

from __future__ import annotations

import _posixsubprocess
import _signal  # type: ignore[import-not-found]  # `signal` itself would import enum
import _socket
import _struct
import errno
import fcntl
import gc
import marshal
import os
import resource

from corral.guest import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

TIOCSCTTY = 0x540E
DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
MAX_PACKED = 48 * 1024
"""Plans above this are not handed to a starter."""

_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "core": resource.RLIMIT_CORE,
    "fsize": resource.RLIMIT_FSIZE,
    "data": resource.RLIMIT_DATA,
    "nproc": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
    "cpu": resource.RLIMIT_CPU,
}
LIMIT_NAMES = frozenset(_LIMITS)

_three = _struct.Struct("3i")
_vfork_exec: Any = _posixsubprocess.fork_exec


def pack(value: Any) -> bytes:
    """For the guest's own processes among themselves; never for what came from elsewhere."""
    return marshal.dumps(value)


def unpack(data: bytes) -> Any:
    return marshal.loads(data)  # noqa: S302


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

    def pack(self) -> bytes:
        """What a starter does not know beforehand."""
        return pack(
            (
                self.argv,
                self.environment,
                self.cwd,
                self.uid,
                self.gid,
                self.umask,
                self.nice,
                self.oom_score_adj,
                self.limits,
                self.background_kill,
            )
        )


class Standard:
    """What all plans for starters have in common, so that a starter can do it before there is one."""

    def __init__(self, seccomp: kernel.Filter | None, oom_score_adj: int) -> None:
        self.seccomp = seccomp
        self.oom_score_adj = oom_score_adj

    def fits(self, plan: Plan) -> bool:
        return plan.seccomp is self.seccomp and not (plan.pty or plan.confine_signals or plan.dumpable)


class Step(Exception):
    """A step towards the program that did not work: whose fault it is, and why."""

    def __init__(self, what: str, error: OSError, message: str) -> None:
        self.what = what
        self.number = error.errno or errno.EIO
        self.message = message

    def event(self) -> dict[str, Any]:
        return {
            "event": "failed",
            "what": self.what,
            "errno": errno.errorcode.get(self.number, str(self.number)),
            "message": self.message[:500],
        }


def _event_of(error: BaseException) -> dict[str, Any]:
    if isinstance(error, Step):
        return error.event()
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    return Step("platform", OSError(number, ""), f"{type(error).__name__}: {error}").event()


# -- a child that becomes the program ------------------------------------------------------------------------------------------------
def become_main(plan: Plan, report: int) -> NoReturn:
    """In a forked child. Failures go to `report`, packed; the exec closes it."""
    try:
        os.setsid()
        os.dup2(plan.stdin, 0)
        os.dup2(plan.stdout, 1)
        os.dup2(plan.stderr, 2)
        if plan.pty:
            fcntl.ioctl(0, TIOCSCTTY, 0)
        _default_signals()
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        os.umask(plan.umask)
        _score(plan.oom_score_adj, plan.dumpable)
        _turn_into_user(plan)
        kernel.no_new_privileges()
        if plan.confine_signals:
            kernel.landlock_confine_signals()
        if plan.seccomp is not None:
            plan.seccomp.install()
        _execute(plan)
    except BaseException as error:
        os.write(report, pack(_event_of(error)))
    os._exit(127)


def _default_signals() -> None:
    # What the interpreter and the guest ignore; the one handler is reset by exec.
    for number in (2, 13, 25):
        _signal.signal(number, _signal.SIG_DFL)


def _score(value: int, dumpable: bool) -> None:
    # /proc/self belongs to nobody while the process is not dumpable. The guest's other capabilities keep execs out meanwhile.
    try:
        if not dumpable:
            kernel.set_dumpable(True)
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"%d" % value)
        finally:
            os.close(fd)
    except OSError:
        pass  # lowering is refused without CAP_SYS_RESOURCE; raising never is
    finally:
        if not dumpable:
            kernel.set_dumpable(False)


def _turn_into_user(plan: Plan) -> None:
    if plan.nice:
        os.nice(plan.nice)
    for name, value in plan.limits.items():
        _limit(_LIMITS[name], value)
    _switch_user(plan.uid, plan.gid)
    try:
        os.chdir(plan.cwd)
    except OSError as error:
        raise Step("cwd", error, f"cannot change to the working directory: {error.strerror}") from None


def _limit(number: int, value: int) -> None:
    _, hard = resource.getrlimit(number)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(number, (value, value))


def _switch_user(uid: int, gid: int) -> None:
    if uid != 0 and uid == os.getuid() and gid == os.getgid():
        return
    try:
        try:
            os.setgroups([])
        except PermissionError:
            # A user namespace may forbid setgroups for good; then there are no groups worth anything in it.
            if set(os.getgroups()) - {gid, 65534}:
                raise
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise Step("user", error, f"cannot become {uid}:{gid}: {error.strerror}") from None


def _candidates(plan: Plan) -> list[bytes]:
    name = plan.argv[0]
    if b"/" in name:
        return [name]
    path = plan.environment.get(b"PATH", DEFAULT_PATH)
    return [(part or b".") + b"/" + name for part in path.split(b":")] if name else []


class _Search:
    """As execvp looks: on behind what is not there, but it is remembered that there was something that may not be run."""

    def __init__(self) -> None:
        self.failed = errno.ENOENT

    def goes_on(self, number: int) -> bool:
        if number in (errno.ENOENT, errno.ENOTDIR):
            return True
        self.failed = number
        return number == errno.EACCES

    def error(self, plan: Plan) -> Step:
        shown = plan.argv[0].decode("utf-8", "surrogateescape")
        reason = os.strerror(self.failed)
        return Step("argv", OSError(self.failed, reason), f"{shown}: {reason}")


def _execute(plan: Plan) -> NoReturn:
    search = _Search()
    for candidate in _candidates(plan):
        try:
            os.execve(candidate, plan.argv, plan.environment)  # noqa: S606
        except OSError as error:
            if not search.goes_on(error.errno or errno.EIO):
                break
    raise search.error(plan)


# -- a starter -----------------------------------------------------------------------------------------------------------------------
def starter(plans: _socket.socket, report: int, standard: Standard) -> NoReturn:
    """In a forked child of the supervisor: serve one plan, or none when the guest is gone.

    `report` gets `(pid, background_kill, failure)` packed, `pid` 0 when there is a failure. Nothing of a program ran if it gets nothing
    and this process left no child.
    """
    try:
        gc.disable()
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        _default_signals()
        _score(standard.oom_score_adj, dumpable=False)
        kernel.no_new_privileges()
        if standard.seccomp is not None:
            standard.seccomp.install()
        data, control, _, _ = plans.recvmsg(MAX_PACKED + 1, 64, _socket.MSG_CMSG_CLOEXEC)
        if data:
            os.write(report, pack(_serve(data, control, standard)))
    finally:
        os._exit(0)


def _serve(data: bytes, control: list[tuple[int, int, bytes]], standard: Standard) -> tuple[int, bool, Any]:
    plan = Plan()
    (
        plan.argv,
        plan.environment,
        plan.cwd,
        plan.uid,
        plan.gid,
        plan.umask,
        plan.nice,
        plan.oom_score_adj,
        plan.limits,
        plan.background_kill,
    ) = unpack(data)
    try:
        plan.stdin, plan.stdout, plan.stderr = _three.unpack(control[0][2])
        if plan.oom_score_adj != standard.oom_score_adj:
            _score(plan.oom_score_adj, dumpable=False)
        _turn_into_user(plan)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        return _spawn(plan), plan.background_kill, None
    except BaseException as error:
        return 0, plan.background_kill, _event_of(error)


def _spawn(plan: Plan) -> int:
    environment = [name + b"=" + value for name, value in plan.environment.items()]
    search = _Search()
    candidates = _candidates(plan)
    for candidate in candidates:
        if len(candidates) > 1:
            try:
                os.stat(candidate)
            except OSError as error:
                if search.goes_on(error.errno or errno.EIO):
                    continue
                break
        pid, number = _fork_exec(plan, candidate, environment)
        if number == 0:
            return pid
        os.waitpid(pid, 0)
        if not search.goes_on(number):
            break
    raise search.error(plan)


def _fork_exec(plan: Plan, program: bytes, environment: list[bytes]) -> tuple[int, int]:
    """(pid, 0), or an errno where the program cannot be run. Without a change of user the interpreter uses vfork."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            pid = _vfork_exec(
                plan.argv, [program], False, (), None, environment,
                plan.stdin, -1, -1, plan.stdout, -1, plan.stderr, read, write,
                True, True, -1, None, None, None, plan.umask, None, True,
            )  # fmt: skip
        except OSError as error:
            raise Step("platform", error, f"the process cannot be made: {error.strerror}") from None
        finally:
            os.close(write)
        told = os.read(read, 512)
    finally:
        os.close(read)
    if not told:
        return pid, 0
    # "OSError:<errno in hex>:<what>"
    return pid, int(told.split(b":")[1], 16) or errno.EIO
