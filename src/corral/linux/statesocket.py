"""STATE/api.sock, by which other processes find the owner. Light: the parent of a server's processes has it, and nothing that serves."""

from __future__ import annotations

import contextlib
import os
import socket

from corral.errors import CorralError

SOCKET = "api.sock"


def bind_socket(state_dir: str) -> socket.socket:
    """Listen on STATE/api.sock, mode 0600 from its first moment, whatever the length of the path. Replaces a stale one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    fresh = f"{SOCKET}.{os.getpid()}"
    try:
        if os.path.lexists(os.path.join(state_dir, fresh)):
            os.unlink(fresh, dir_fd=folder)
        listener.bind(f"/proc/self/fd/{folder}/{fresh}")
        os.chmod(fresh, 0o600, dir_fd=folder)
        listener.listen(1024)
        listener.setblocking(False)
        os.rename(fresh, SOCKET, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        listener.close()
        raise CorralError(
            "infra_error",
            f"cannot make the socket in {state_dir}: {error.strerror}",
            hint="the state directory must be on a writable local file system",
            retryable=False,
        ) from error
    finally:
        os.close(folder)
    return listener


def hide_socket(state_dir: str) -> None:
    """Who comes from now on waits for the next owner, unless we show it again."""
    with contextlib.suppress(OSError):
        os.rename(os.path.join(state_dir, SOCKET), os.path.join(state_dir, f"{SOCKET}.hidden"))


def show_socket(state_dir: str) -> None:
    """What was hidden is found again."""
    with contextlib.suppress(OSError):
        os.rename(os.path.join(state_dir, f"{SOCKET}.hidden"), os.path.join(state_dir, SOCKET))


def unlink_socket(state_dir: str) -> None:
    """Nobody finds STATE/api.sock any more."""
    for name in (SOCKET, f"{SOCKET}.hidden"):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(state_dir, name))
