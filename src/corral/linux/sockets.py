"""Unix sockets in directories whose path may be longer than the 108 bytes that an address can hold."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def _address(directory: str, name: str) -> Iterator[str]:
    """A short path of `directory/name`, valid while the block runs."""
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"not a socket name: {name!r}")
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def listen(directory: str, name: str, *, backlog: int = 16) -> socket.socket:
    """A listening stream socket at `directory/name`, mode 0600, replacing one of that name; close-on-exec."""
    with _address(directory, name) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # The mode of the descriptor becomes the mode of the file at bind: no moment in which others may connect.
            os.fchmod(sock.fileno(), 0o600)
            sock.bind(path)
            os.chmod(path, 0o600)
            sock.listen(backlog)
        except BaseException:
            sock.close()
            raise
    return sock


def connect(directory: str, name: str, *, timeout_s: float | None = None) -> socket.socket:
    """A stream socket connected to `directory/name`; raises OSError (ENOENT, ECONNREFUSED, timeout) like `connect`."""
    with _address(directory, name) as path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(timeout_s)
            sock.connect(path)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
    return sock
