"""What the parts of the file program have in common: refusals, the facts of one entry, and lines of JSON."""

from __future__ import annotations

import errno
import os
import stat

from corral.guest import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHUNK = 256 * 1024

_CODES = {
    errno.ENOENT: "not_found",
    errno.ENOTDIR: "not_found",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EFBIG: "disk_full",
    errno.EEXIST: "already_exists",
    errno.ENOTEMPTY: "not_empty",
    errno.EISDIR: "is_a_directory",
    errno.ENXIO: "not_a_file",
}
_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class Refused(Exception):
    """Ends the program with one JSON line."""

    def __init__(self, code: str, detail: str, entry: str | None = None, size: int | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.entry = entry
        self.size = size


def raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def shown(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def refusal_of(error: OSError, path: bytes) -> Refused:
    """What an error of the system means to who asked, naming the path."""
    code = _CODES.get(error.errno or 0, "invalid_value")
    return Refused(code, f"{shown(path)!r}: {error.strerror}", shown(path))


def type_of(info: os.stat_result) -> str:
    return _TYPES.get(stat.S_IFMT(info.st_mode), "device")


def facts(path: bytes, info: os.stat_result, target: bytes | None = None) -> dict[str, Any]:
    """One entry as the host is told of it."""
    told: dict[str, Any] = {
        "path": shown(path),
        "type": type_of(info),
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "mtime_ns": info.st_mtime_ns,
        "inode": info.st_ino,
    }
    if target is not None:
        told["target"] = shown(target)
    return told


def seen(path: bytes) -> dict[str, Any]:
    """The facts of a name itself; of a link also where it points."""
    info = os.lstat(path)
    return facts(path, info, os.readlink(path) if stat.S_ISLNK(info.st_mode) else None)


def line(value: dict[str, Any]) -> bytes:
    return protocol.dumps(value) + b"\n"


def say(data: bytes) -> None:
    """All of it to standard output."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]
