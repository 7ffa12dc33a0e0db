"""From a plan to the running main program: who it is, where, within which limits, and the exec itself.

All of this happens in a child of the supervisor, which becomes the program. It is forked with the plan in hand, or before there is
one: then it does beforehand what all plans have in common, and waits.
"""

from __future__ import annotations

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
SOFT_OPEN_FILES = 1024
MAX_PACKED = 48 * 1024
"""Plans above this are not handed to a child that waits."""

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
        """What a child that waits does not know beforehand."""
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
    """What most plans have in common, so that it can be done before there is one."""

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


def become_main(plan: Plan, report: int) -> NoReturn:
    """In a forked child. A failure goes to `report`, packed; the exec closes it."""
    try:
        os.setsid()
        _default_signals()
        _score(plan.oom_score_adj, plan.dumpable)
        _become(plan)
        kernel.no_new_privileges()
        if plan.confine_signals:
            kernel.landlock_confine_signals()
        if plan.seccomp is not None:
            plan.seccomp.install()
        _execute(plan)
    except BaseException as error:
        os.write(report, pack(_event_of(error)))
    os._exit(127)


def await_plan(plans: _socket.socket, said: int, report: int, standard: Standard) -> NoReturn:
    """In a forked child: become main as soon as there is a plan; end when the guest is gone.

    `said` gets a byte just before the plan is taken, so who finds none there, or still finds the plan, knows that nothing ran; and
    another one if background processes are to be ended.
    """
    try:
        gc.disable()
        os.setsid()
        _signal.set_wakeup_fd(-1)
        _default_signals()
        _score(standard.oom_score_adj, dumpable=False)
        kernel.no_new_privileges()
        if standard.seccomp is not None:
            standard.seccomp.install()
        _rehearse(said)
        if plans.recv(1, _socket.MSG_PEEK):
            os.write(said, b"p")
            data, control, _, _ = plans.recvmsg(MAX_PACKED + 1, 64, _socket.MSG_CMSG_CLOEXEC)
            plan = _unpack_plan(data, control)
            if plan.background_kill:
                os.write(said, b"k")
            if plan.oom_score_adj != standard.oom_score_adj:
                _score(plan.oom_score_adj, dumpable=False)
            _become(plan)
            _execute(plan)
    except BaseException as error:
        os.write(report, pack(_event_of(error)))
    finally:
        os._exit(127)


def _rehearse(said: int) -> None:
    # After the fork each page costs a fault when it is first touched: better now than when somebody waits. A plan that changes nothing.
    plan = Plan()
    plan.argv, plan.environment, plan.cwd = [b"/"], {b"A": b"B"}, b"."
    plan.uid, plan.gid, plan.umask = os.getuid(), os.getgid(), 0o22
    plan.nice, plan.oom_score_adj, plan.limits = 0, 0, {"core": resource.getrlimit(resource.RLIMIT_CORE)[1]}
    plan.background_kill = False
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    try:
        plan = _unpack_plan(plan.pack(), [(0, 0, _three.pack(0, 1, 2))])
        _become(plan)
        os.write(said, b"")
        _execute(plan)
    except Step:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)


def _unpack_plan(data: bytes, control: list[tuple[int, int, bytes]]) -> Plan:
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
    plan.stdin, plan.stdout, plan.stderr = _three.unpack(control[0][2])
    plan.pty = False
    return plan


def _become(plan: Plan) -> None:
    os.dup2(plan.stdin, 0)
    os.dup2(plan.stdout, 1)
    os.dup2(plan.stderr, 2)
    if plan.pty:
        fcntl.ioctl(0, TIOCSCTTY, 0)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    os.umask(plan.umask)
    if plan.nice:
        os.nice(plan.nice)
    for name, value in plan.limits.items():
        _limit(_LIMITS[name], value)
    _switch_user(plan.uid, plan.gid)
    try:
        os.chdir(plan.cwd)
    except OSError as error:
        raise Step("cwd", error, f"cannot change to the working directory: {error.strerror}") from None


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


def _limit(number: int, value: int) -> None:
    _, hard = resource.getrlimit(number)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    # `select` breaks on descriptors above 1023; programs that can do with more (Node, Java, Go) raise the soft limit themselves.
    soft = min(value, SOFT_OPEN_FILES) if number == resource.RLIMIT_NOFILE else value
    resource.setrlimit(number, (soft, value))


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


def _execute(plan: Plan) -> NoReturn:
    name = plan.argv[0]
    if b"/" in name:
        candidates = [name]
    else:
        path = plan.environment.get(b"PATH", DEFAULT_PATH)
        candidates = [(part or b".") + b"/" + name for part in path.split(b":")] if name else []
    failed = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for candidate in candidates:
        try:
            os.execve(candidate, plan.argv, plan.environment)  # noqa: S606
        except OSError as error:
            # As execvp does: look on, but remember that there was something that may not be run.
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                failed = error
                if error.errno != errno.EACCES:
                    break
    shown = name.decode("utf-8", "surrogateescape")
    raise Step("argv", failed, f"{shown}: {failed.strerror}")
