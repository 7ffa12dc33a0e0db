"""Names are opened one at a time under an open directory, never through a link, onto another mount or out of the tree."""

from __future__ import annotations

import ctypes
import errno
import os
import stat

_SYS_OPENAT2 = 437
_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08  # NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
"""Flags for a directory that will be listed or gone through."""
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def open_one(directory: int, name: bytes, flags: int, mode: int = 0) -> int:
    """Open `name` under an open directory; a link, another mount or a way out is OSError (ELOOP, EXDEV)."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, _RESOLVE)
    for _ in range(16):
        fd: int = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(directory),
            ctypes.c_char_p(name),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(code, os.strerror(code))


def open_regular(directory: int, name: bytes) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; anything else is OSError without ever having been opened (a FIFO would tell its writer)."""
    handle = open_one(directory, name, os.O_PATH | os.O_NOFOLLOW)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.ENXIO, "not a regular file")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), info
    finally:
        os.close(handle)


def enter(directory: int, name: bytes) -> int:
    """Open the directory `name`, made if it is missing."""
    try:
        return open_one(directory, name, DIRECTORY)
    except FileNotFoundError:
        try:
            os.mkdir(name, 0o755, dir_fd=directory)
            made = open_one(directory, name, DIRECTORY)
            os.fchmod(made, 0o755)
            return made
        except FileExistsError:
            return open_one(directory, name, DIRECTORY)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
