"""Two FIFOs as the channel to a guest whose runtime passes no socket inside: `guest.in` and `guest.out` of an instance's directory.

The guest holds both ends of both, so nothing that is under way is lost while nobody is connected. There are no connections: two readers
would steal each other's bytes, so whoever connects holds a lock. It lies on a file of its own, of which the guest has no descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import stat

TO_GUEST = "guest.in"
FROM_GUEST = "guest.out"
LOCK = "guest.lock"


def make(directory: str) -> tuple[int, int]:
    """A new pair, replacing one of before: descriptors for the standard input and output of the guest. The caller closes them.

    Both are open for reading and writing: they open at once, and the pair outlives every process of the host side.
    """
    made: list[int] = []
    try:
        for name in (TO_GUEST, FROM_GUEST):
            path = os.path.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.mkfifo(path, 0o600)
            made.append(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
    except BaseException:
        for fd in made:
            os.close(fd)
        raise
    return made[0], made[1]


class Ends:
    """The host's ends of a pair and the lock on it, both not blocking. Closed, or forgotten, it is free for others."""

    def __init__(self, lock: io.FileIO, to_guest: io.FileIO, from_guest: io.FileIO) -> None:
        self._lock = lock
        self._to_guest = to_guest
        self._from_guest = from_guest

    @property
    def to_guest(self) -> int:
        return self._to_guest.fileno()

    @property
    def from_guest(self) -> int:
        return self._from_guest.fileno()

    def close(self) -> None:
        """Idempotent. The lock goes last."""
        self._to_guest.close()
        self._from_guest.close()
        if not self._lock.closed:
            # Not by closing alone: a child that was forked meanwhile shares it until it executes something.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()


def connect(directory: str) -> Ends:
    """The host's ends, locked; never waits.

    BlockingIOError while another holds them. ENXIO when nothing reads at the other end: the guest is gone. The guest's end of output
    shows as an end of file, where only the guest still holds it.
    """
    lock = _open(directory, LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        to_guest = _open(directory, TO_GUEST, os.O_WRONLY)
        try:
            return Ends(lock, to_guest, _open(directory, FROM_GUEST, os.O_RDONLY))
        except BaseException:
            to_guest.close()
            raise
    except BaseException:
        lock.close()
        raise


def _open(directory: str, name: str, flags: int) -> io.FileIO:
    fd = os.open(os.path.join(directory, name), flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if name != LOCK and not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{name} is no FIFO")
    return io.FileIO(fd, "r" if flags == os.O_RDONLY else "w")
