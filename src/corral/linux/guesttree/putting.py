"""Files that are written into a tree, and why one cannot be."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence

from corral.errors import CorralError
from corral.linux.guesttree import beneath
from corral.linux.guesttree.beneath import write_all


def put(root: int, files: Sequence[tuple[str, int, bytes | None]]) -> None:
    """Write into an open directory: see `GuestTree.put`."""
    directories = []
    for index, (path, mode, content) in enumerate(files):
        parts = parts_of(path, index)
        if content is None:
            directories.append((len(parts), index, parts))
        with _named(path, index), _entered(root, parts if content is None else parts[:-1]) as directory:
            if content is not None:
                _write_file(directory, parts[-1], mode & 0o777, content)
    for _, index, parts in sorted(directories, reverse=True):  # the deepest first
        path, mode, _ = files[index]
        with _named(path, index), _entered(root, parts) as directory:
            os.fchmod(directory, mode & 0o777)


def parts_of(path: str, index: int) -> list[bytes]:
    """The names of a relative path, or the refusal of the file at `index`."""
    raw = path.encode("utf-8", "surrogateescape")
    parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
    bad = None
    if raw.startswith(b"/"):
        bad = "is absolute"
    elif b".." in parts:
        bad = "goes up with `..`"
    elif b"\0" in raw:
        bad = "holds a NUL"
    elif not parts or raw.endswith(b"/"):
        bad = "names no file"
    elif any(len(part) > 255 for part in parts) or len(parts) > 64 or len(raw) > 4000:
        bad = "is too long or too deep"
    if bad is not None:
        raise CorralError("invalid_value", f"file path {path!r} {bad}", field=f"/files/{index}/path")
    return parts


@contextlib.contextmanager
def _named(path: str, index: int) -> Iterator[None]:
    """An OSError inside becomes the refusal of the file at `index`."""
    try:
        yield
    except OSError as error:
        raise _put_error(error, path, index) from error


@contextlib.contextmanager
def _entered(root: int, parts: Sequence[bytes]) -> Iterator[int]:
    """The directory `parts` below `root`, made as far as it is missing."""
    directory = os.dup(root)
    try:
        for part in parts:
            below = beneath.enter(directory, part)
            os.close(directory)
            directory = below
        yield directory
    finally:
        os.close(directory)


def _write_file(directory: int, name: bytes, mode: int, content: bytes) -> None:
    # A new name renamed over the old one: a link there is replaced, not followed, and no reader sees half a file.
    fresh = b".corral-" + secrets.token_hex(8).encode()
    fd = beneath.open_one(directory, fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            write_all(fd, content)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.rename(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh, dir_fd=directory)
        raise


def _put_error(error: OSError, path: str, index: int) -> CorralError:
    where = f"/files/{index}/path"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CorralError(
            "too_large", f"no room for {path!r}", field=where, hint="ask for a larger disk limit or send less"
        )
    if error.errno in (errno.ELOOP, errno.EXDEV):
        return CorralError("invalid_value", f"{path!r} leads through a link", field=where)
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
        return CorralError("invalid_value", f"{path!r}: a file and a directory are in each other's way", field=where)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return CorralError("invalid_value", f"{path!r}: the sandbox's user may not write there", field=where)
    if error.errno == errno.ENAMETOOLONG:
        return CorralError("invalid_value", f"{path!r} is too long", field=where)
    return CorralError("infra_error", f"{path!r}: {error.strerror}")
