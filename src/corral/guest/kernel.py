"""System calls that the standard library lacks, through `_ctypes` itself: the `ctypes` package would cost 4 ms of start."""

from __future__ import annotations

import _ctypes
import _struct
import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_library: Any = _ctypes.dlopen(None, 0)  # type: ignore[arg-type,unused-ignore]
_prctl = _ctypes.dlsym(_library, "prctl")
_syscall = _ctypes.dlsym(_library, "syscall")
_capget = _ctypes.dlsym(_library, "capget")
_capset = _ctypes.dlsym(_library, "capset")
_CAPABILITY_VERSION_3 = 0x20080522

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
PR_CAP_AMBIENT = 47
CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 5, 6, 7, 21
CLONE_NEWPID = 0x20000000
_CLONE = {"x86_64": 56, "aarch64": 220}
_MOUNT, _UMOUNT = {"x86_64": 165, "aarch64": 40}, {"x86_64": 166, "aarch64": 39}
_NOSUID_NODEV_NOEXEC, _DETACH = 2 | 4 | 8, 2


def _char() -> Any:
    return type("c_char", (_ctypes._SimpleCData,), {"_type_": "c"})


def _call(address: int, *arguments: Any) -> int:
    return int(_ctypes.call_function(address, arguments))  # type: ignore[attr-defined,unused-ignore]


def prctl(option: int, value: int = 0, more: Any = 0) -> int:
    return _call(_prctl, option, value, more, 0, 0)


def set_dumpable(on: bool) -> None:
    prctl(PR_SET_DUMPABLE, 1 if on else 0)


def become_subreaper() -> bool:
    """False where the kernel has none for sure; gVisor says yes to the request, does nothing, and does not know the question."""
    answer: Any = (_char() * 4)()
    return (
        prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
        and _call(_prctl, PR_GET_CHILD_SUBREAPER, answer, 0, 0, 0) == 0
        and any(bytes(answer))
    )


def fork_as_init() -> int:
    """`fork`, with the child as PID 1 of a pid namespace of its own. Needs CAP_SYS_ADMIN; there must be one thread only."""
    number = _CLONE.get(os.uname().machine)
    pid = -1 if number is None else _call(_syscall, number, CLONE_NEWPID | 17, 0, 0, 0, 0)
    if pid < 0:
        # Why is not to be had from here; if no process at all can be made, an ordinary fork says so.
        if os.fork() == 0:
            os._exit(0)
        raise OSError(errno.ENOSPC, "no pid namespace can be made")
    return pid


def mount(kind: bytes, target: str, options: bytes = b"") -> None:
    """A new file system of this kind at `target`. Needs CAP_SYS_ADMIN."""
    number = _MOUNT.get(os.uname().machine)
    where = os.fsencode(target)
    if number is None or _call(_syscall, number, b"none", where, kind, _NOSUID_NODEV_NOEXEC, options) != 0:
        raise OSError(errno.EPERM, "it cannot be mounted", target)


def unmount(target: str) -> None:
    """Take it off, whoever uses it; nothing happens where nothing is mounted."""
    number = _UMOUNT.get(os.uname().machine)
    if number is not None:
        _call(_syscall, number, os.fsencode(target), _DETACH)


def no_new_privileges() -> None:
    if prctl(PR_SET_NO_NEW_PRIVS, 1) != 0:
        raise OSError(1, "no_new_privs")


def clear_inheritable() -> None:
    """Programs started from here inherit no capability; ours stay. Where it cannot be done nothing has changed."""
    header = _struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    memory: Any = (_char() * 24)()
    if _call(_capget, header, memory) == 0:
        effective, permitted, _, effective_more, permitted_more, _ = _struct.unpack("=6I", bytes(memory))
        _call(_capset, header, _struct.pack("=6I", effective, permitted, 0, effective_more, permitted_more, 0))


def give_up(capability: int) -> None:
    """For good, and for all children that may gain no privileges."""
    header = _struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    memory: Any = (_char() * 24)()
    if _call(_capget, header, memory) == 0:
        words = list(_struct.unpack("=6I", bytes(memory)))
        for word in range(3):
            words[word + 3 * (capability // 32)] &= ~(1 << capability % 32)
        if _call(_capset, header, _struct.pack("=6I", *words)) == 0:
            return
    raise OSError(errno.EPERM, "a capability cannot be given up")


def clear_ambient() -> None:
    prctl(PR_CAP_AMBIENT, 4)


class Filter:
    """A classic BPF program, at a fixed address so that children of a fork can install it without any work."""

    def __init__(self, program: bytes) -> None:
        if not program or len(program) % 8:
            raise ValueError("the seccomp filter is not a BPF program")
        self._memory: Any = (_char() * len(program)).from_buffer_copy(program)
        self._head = _struct.pack("@HP", len(program) // 8, _ctypes.addressof(self._memory))

    def install(self) -> None:
        if prctl(PR_SET_SECCOMP, 2, self._head) != 0:
            raise OSError(22, "the seccomp filter was refused")


def landlock_abi() -> int:
    """0 where the kernel has none."""
    return max(0, _call(_syscall, 444, 0, 0, 1))


def landlock_confine_signals() -> None:
    """From now on this process and its children may signal only each other (ABI 6)."""
    ruleset = _call(_syscall, 444, _struct.pack("=QQQ", 0, 0, 2), 24, 0)
    if ruleset < 0 or _call(_syscall, 446, ruleset, 0) != 0:
        raise OSError(1, "landlock")
