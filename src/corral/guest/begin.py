"""How the guest begins: what it is told, what it finds out about the kernel below it, and what it closes before any code may run."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself would import enum
import os

from corral.guest import kernel, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


class Options:
    """The command line."""

    def __init__(self, arguments: list[str]) -> None:
        self.instance = ""
        self.installation = ""
        self.same_uid = False
        self.exec_uid = 1000
        self.exec_gid = 1000
        self.deadline: float | None = None
        self.seccomp = "none"
        self.control_fd = -1
        self.fifo = False
        self.exec_pid_namespaces = False
        self.cover_proc = ""
        self.unsafe_dumpable = False
        self.unsafe_no_landlock = False
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            if word == "--same-uid":
                self.same_uid = True
            elif word == "--control-fifo":
                self.fifo = True
            elif word == "--exec-pid-namespaces":
                self.exec_pid_namespaces = True
            elif word == "--unsafe-dumpable":
                self.unsafe_dumpable = True
            elif word == "--unsafe-no-landlock":
                self.unsafe_no_landlock = True
            elif not rest:
                fail(f"unknown or incomplete option {word}")
            else:
                self._take(word, rest.pop(0))
        if self.control_fd < 0 and not self.fifo:
            fail("--control-fd is missing")

    def _take(self, word: str, value: str) -> None:
        if word == "--instance":
            self.instance = value
        elif word == "--installation":
            self.installation = value
        elif word == "--exec-uid":
            self.exec_uid = int(value)
        elif word == "--exec-gid":
            self.exec_gid = int(value)
        elif word == "--deadline":
            self.deadline = float(value)
        elif word == "--seccomp-exec":
            self.seccomp = value
        elif word == "--cover-proc":
            self.cover_proc = value
        elif word == "--control-fd":
            self.control_fd = int(value)
        else:
            fail(f"unknown option {word}")


def fail(message: str) -> NoReturn:
    """Say it and end with status 2."""
    os.write(2, f"corral guest: {message}\n".encode("utf-8", "replace"))
    os._exit(2)


def harden(options: Options) -> dict[str, int]:
    """Close what execs could use against the guest; -> the capabilities of its hello."""
    effective = _effective_capabilities()
    if options.same_uid:
        # The guest keeps its capability, execs get none: that alone keeps them from tracing it.
        kernel.clear_ambient()
    kernel.clear_inheritable()
    if not options.unsafe_dumpable:
        kernel.set_dumpable(False)
    # A background job of a shell ignores SIGINT and SIGQUIT, and so would everything inside: programs begin with the defaults.
    # 13 and 25 are the interpreter's own and are reset for each exec.
    for number in range(1, 65):
        if number not in (13, 25) and _signal.getsignal(number) == _signal.SIG_IGN:
            _signal.signal(number, _signal.SIG_DFL)
    # SIGINT has a Python handler, and what has a handler reaches even PID 1.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL if os.getpid() == 1 else _signal.SIG_IGN)
    if os.getpid() != 1:
        kernel.become_subreaper()
    try:
        os.close(os.pidfd_open(os.getpid()))
        pidfd = 1
    except OSError:
        pidfd = 0
    abi = kernel.landlock_abi()
    change = effective >> kernel.CAP_SETUID & 1 and effective >> kernel.CAP_SETGID & 1
    # Only Linux itself has Landlock, and there it works: no need to try.
    subreaper = abi > 0 or processes.subreaper_works()
    covered = bool(options.cover_proc and os.getpid() == 1 and not options.unsafe_dumpable)
    # Only a supervisor that is the parent of a namespace is covered like the guest.
    namespaces = options.exec_pid_namespaces or covered or not subreaper
    namespaces = bool(namespaces and effective >> kernel.CAP_SYS_ADMIN & 1 and processes.namespaces_work())
    if covered:
        if not namespaces:
            fail("/proc cannot be covered: programs cannot have pid namespaces of their own")
        try:
            processes.take_cover(options.cover_proc)
        except OSError as error:
            fail(f"/proc cannot be covered: {error}")
    return {
        "subreaper": int(subreaper),
        "exec_pid_namespaces": int(namespaces),
        "covered": int(covered),
        "pidfd": pidfd,
        "change_uid": int(bool(change)),
        "landlock": abi,
        "same_uid": int(options.same_uid),
        "pid1": int(os.getpid() == 1),
    }


def _effective_capabilities() -> int:
    try:
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 16384)
        finally:
            os.close(fd)
        return int(text.split(b"CapEff:", 1)[1].split(None, 1)[0], 16)
    except (OSError, IndexError, ValueError):
        return 0


def load_filter(where: str) -> kernel.Filter | None:
    """The seccomp filter of execs: `none`, `fd:N`, `hex:` and the program itself, or a path."""
    if where == "none":
        return None
    try:
        if where.startswith("hex:"):
            return kernel.Filter(bytes.fromhex(where[4:]))
        fd = int(where[3:]) if where.startswith("fd:") else os.open(where, os.O_RDONLY | os.O_CLOEXEC)
        program = b""
        while part := os.read(fd, 65536):
            program += part
        os.close(fd)
        return kernel.Filter(program)
    except (OSError, ValueError) as error:
        fail(f"the seccomp filter cannot be used: {error}")
