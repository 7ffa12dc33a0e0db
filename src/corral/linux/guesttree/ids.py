"""Work on a tree is done in a thread of its own with the file-system ids of the sandbox, which ends with the work."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from corral.errors import CorralError

T = TypeVar("T")
_NUMBERS = {"x86_64": (116, 122, 123), "aarch64": (159, 151, 152)}  # setgroups, setfsuid, setfsgid
_CAPABILITY_VERSION_3 = 0x20080522
_DAC_READ_SEARCH = 1 << 2
_libc = ctypes.CDLL(None, use_errno=True)


def _thread_ids(uid: int, gid: int) -> None:
    """Make the calling thread act on files as uid:gid without supplementary groups, and verify it (raw calls are per thread)."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise CorralError("infra_error", f"no system call numbers for {platform.machine()}")
    setgroups, setfsuid, setfsgid = numbers
    if _libc.syscall(ctypes.c_long(setgroups), ctypes.c_size_t(0), None) != 0:
        raise CorralError("infra_error", f"setgroups: {os.strerror(ctypes.get_errno())}")
    for number, value in ((setfsgid, gid), (setfsuid, uid)):
        _libc.syscall(ctypes.c_long(number), ctypes.c_long(value))
        if (_libc.syscall(ctypes.c_long(number), ctypes.c_long(-1)) & 0xFFFFFFFF) != value:
            raise CorralError("infra_error", f"the thread could not become {uid}:{gid}")


def read_all_again() -> None:
    """Let the calling thread read every directory and file again, which `_thread_ids` took from it, as far as we may ourselves.

    For scans only: what a sandbox does to its own modes must not hide from us what it wrote. That a scan stays inside its tree is
    held by `beneath.open_one`, not by ids.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0-31, then of 32-63
    if _libc.capget(header, sets) == 0 and sets[1] & _DAC_READ_SEARCH:
        sets[0] |= _DAC_READ_SEARCH
        _libc.capset(header, sets)


@contextlib.contextmanager
def host_ids(user: tuple[int, int] | None) -> Iterator[None]:
    """Inside `run_as`: back to the host's ids for the writing of host files."""
    if user is None:
        yield
        return
    _thread_ids(os.geteuid(), os.getegid())
    try:
        yield
    finally:
        _thread_ids(*user)


def run_as(user: tuple[int, int] | None, work: Callable[[], T]) -> T:
    """Run `work` in a fresh thread with these ids (None = keep ours) and give its answer."""
    answer: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            if user is not None:
                _thread_ids(*user)
            answer.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="guesttree", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return answer[0]
