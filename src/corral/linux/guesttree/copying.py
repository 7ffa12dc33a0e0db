"""Files that are copied out of a tree into a directory of the host."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field

from corral.linux.guesttree import beneath
from corral.linux.guesttree.beneath import write_all
from corral.linux.guesttree.globs import Glob
from corral.linux.guesttree.ids import host_ids
from corral.linux.guesttree.walk import CHUNK, Caps, Walk

_IN_THE_WAY = frozenset(
    {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.EXDEV, errno.EACCES}
)
"""What a tree that changes while it is copied brings about: a file where a directory was, or the other way round."""


@dataclass
class Copied:
    """What `copy_out` brought: (path relative to the root, size, SHA-256), names over a cap, and whether all was seen."""

    files: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    skipped: list[bytes] = field(default_factory=list)
    complete: bool = True


def copy_out(
    root: int, caps: Caps, user: tuple[int, int] | None, patterns: Sequence[Glob], into: str, max_bytes: int
) -> Copied:
    """Copy from an open directory, in a thread that works as `user`: see `GuestTree.copy_out`."""
    copied = Copied()
    done: set[bytes] = set()
    with host_ids(user):
        target = os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for fixed, pattern in patterns:
            start = os.dup(root)
            try:
                for part in fixed:
                    below = beneath.open_one(start, part, beneath.DIRECTORY)
                    os.close(start)
                    start = below
                walk = Walk(start, caps)
                prefix = b"".join(part + b"/" for part in fixed)
                for path, fd, name, info in walk(prefix):
                    if not stat.S_ISREG(info.st_mode) or path in done or not pattern.fullmatch(path):
                        continue
                    done.add(path)
                    max_bytes -= _copy_one(fd, name, path, target, max_bytes, copied, caps.copies, user)
                copied.complete = copied.complete and walk.complete
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno not in _IN_THE_WAY:
                    raise
                copied.complete = False
            finally:
                os.close(start)
    finally:
        os.close(target)
    copied.files.sort()
    return copied


def _copy_one(
    fd: int,
    name: bytes,
    path: bytes,
    target: int,
    room: int,
    copied: Copied,
    most: int,
    user: tuple[int, int] | None,
) -> int:
    try:
        source, info = beneath.open_regular(fd, name)
    except OSError:
        copied.complete = False
        return 0
    try:
        if info.st_size > room or len(copied.files) >= most:
            copied.skipped.append(path)
            return 0
        with host_ids(user):
            out = _create_host_file(target, path, 0o755 if info.st_mode & 0o100 else 0o644)
            try:
                whole = hashlib.sha256()
                left = info.st_size  # a file that grows meanwhile is taken as it was when we met it
                while left > 0 and (piece := os.read(source, min(CHUNK, left))):
                    whole.update(piece)
                    write_all(out, piece)
                    left -= len(piece)
            finally:
                os.close(out)
        copied.files.append((path, info.st_size - left, whole.digest()))
        return info.st_size - left
    finally:
        os.close(source)


def _create_host_file(directory: int, path: bytes, mode: int) -> int:
    """Create `path` under a directory that only we write."""
    *parents, name = path.split(b"/")
    here = os.dup(directory)
    try:
        for parent in parents:
            below = beneath.enter(here, parent)
            os.close(here)
            here = below
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=here)
        fd = beneath.open_one(here, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(fd, mode)
        return fd
    finally:
        os.close(here)
