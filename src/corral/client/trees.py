"""Trees of local files as tar streams, and back.

Nothing in an archive that a sandbox made is trusted: no link is followed, no name leaves the target. Only directories, files and
links are packed and made; a link is made as it is, whatever it points to. Owners, setuid and devices are left out.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from corral.errors import CorralError

BLOCK = 256 * 1024


@dataclass
class Unpacked:
    """What was copied."""

    files: int = 0
    directories: int = 0
    links: int = 0
    bytes: int = 0

    def count(self, member: tarfile.TarInfo) -> None:
        """One more member."""
        if member.isdir():
            self.directories += 1
        elif member.issym():
            self.links += 1
        else:
            self.files += 1
            self.bytes += member.size

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"files": self.files, "directories": self.directories, "links": self.links, "bytes": self.bytes}


class Reader(io.RawIOBase):
    """An iterator of blocks as a file to read from."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


@contextlib.contextmanager
def opened(blocks: Iterable[bytes]) -> Iterator[tarfile.TarFile]:
    """A tar stream to read once, from its start to its end; one that is damaged is `infra_error`."""
    try:
        with tarfile.open(fileobj=io.BufferedReader(Reader(blocks), BLOCK), mode="r|", errorlevel=1) as archive:
            yield archive
    except (tarfile.TarError, ValueError, ArithmeticError, RecursionError) as error:
        # Numbers and names that are none end in the errors of whatever reads them, a NUL in a name in that of the system call.
        raise CorralError("infra_error", f"the archive is damaged: {error}", retryable=False) from error


def unpack_stream(blocks: Iterable[bytes], dst: str, name: str) -> Unpacked:
    """`unpack` of a tar stream."""
    with opened(blocks) as archive:
        return unpack(archive, dst, name)


def unpack(archive: tarfile.TarFile, dst: str, name: str) -> Unpacked:
    """The tree of `archive` as `dst`, or below it as `name` when it is a directory. OSError says what could not be written."""
    done = Unpacked()
    first = archive.next()
    if first is None:
        return done
    top = _parts(first.name)
    target = Target(*_place(dst, name or "workspace", first.isdir()))
    try:
        modes: list[tuple[list[str], int]] = []
        for member in archive:
            _unpack_one(archive, member, target, top[0] if top else "", modes)
            done.count(member)
        for parts, mode in reversed(modes):
            target.set_mode(parts, mode)
    finally:
        target.close()
    return done


def _unpack_one(
    archive: tarfile.TarFile, member: tarfile.TarInfo, target: Target, root: str, modes: list[tuple[list[str], int]]
) -> None:
    parts = _parts(member.name)
    if root:
        if parts[:1] != [root]:
            raise CorralError("infra_error", f"the archive names {member.name!r} outside its root", retryable=False)
        parts = parts[1:]
    if member.isdir():
        target.make_directory(parts)
        modes.append((parts, member.mode))
    elif member.issym():
        target.make_link(parts, member.linkname)
    elif member.isreg():
        content = archive.extractfile(member)
        assert content is not None
        target.make_file(parts, member.mode, content)
    elif member.islnk():
        target.make_copy(parts, _parts(member.linkname)[1 if root else 0 :])
    else:
        raise CorralError("infra_error", f"{member.name!r} is no file, directory or link", retryable=False)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or name.startswith("/"):
        raise CorralError("infra_error", f"the archive names {name!r}", retryable=False)
    return parts


def _place(dst: str, name: str, directory: bool) -> tuple[str, str]:
    """(existing local directory, name in it) for the root of the copy."""
    if os.path.isdir(dst):
        return dst, name
    if dst.endswith("/") and not directory:
        raise NotADirectoryError(20, "no such directory", dst)
    folder, new = os.path.split(dst.rstrip("/"))
    return folder or ".", new


class Target:
    """The root of the copy: `name` in the directory `folder`. Paths below are lists of plain names."""

    def __init__(self, folder: str, name: str) -> None:
        self._name = name
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._folder)

    def make_directory(self, parts: list[str]) -> None:
        """Private until `set_mode`; one that is there stays."""
        folder, name = self._open_parent(parts)
        try:
            try:
                os.mkdir(name, 0o700, dir_fd=folder)
            except FileExistsError:
                os.close(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder))
        finally:
            os.close(folder)

    def make_link(self, parts: list[str], points_to: str) -> None:
        """A symbolic link as it was inside."""
        folder, name = self._open_parent(parts)
        try:
            self._clear(folder, name)
            os.symlink(points_to, name, dir_fd=folder)
        finally:
            os.close(folder)

    def make_file(self, parts: list[str], mode: int, content: Any) -> None:
        """A new file, in the place of whatever file or link had the name."""
        folder, name = self._open_parent(parts)
        try:
            self._clear(folder, name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=folder)
            with open(descriptor, "wb") as file:
                while block := content.read(BLOCK):
                    file.write(block)
                os.fchmod(descriptor, mode & 0o777)
        finally:
            os.close(folder)

    def make_copy(self, parts: list[str], earlier: list[str]) -> None:
        """A hard link inside becomes a file of its own."""
        folder, name = self._open_parent(earlier)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # whatever lies there: a pipe would wait
            descriptor = os.open(name, flags, dir_fd=folder)
        finally:
            os.close(folder)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise CorralError("infra_error", f"a hard link to {'/'.join(earlier)!r}, no file", retryable=False)
        with open(descriptor, "rb") as content:
            self.make_file(parts, mode, content)

    def set_mode(self, parts: list[str], mode: int) -> None:
        """The mode of a directory; last, as it may forbid writing into it."""
        folder, name = self._open_parent(parts)
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            os.fchmod(descriptor, mode & 0o777)
        finally:
            os.close(descriptor)

    def _open_parent(self, parts: list[str]) -> tuple[int, str]:
        """(descriptor of the parent, reached name by name without following a link; last name)."""
        *above, name = [self._name, *parts]
        descriptor = os.dup(self._folder)
        for part in above:
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                deeper = os.open(part, flags, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = deeper
        return descriptor, name

    @staticmethod
    def _clear(folder: int, name: str) -> None:
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass


# -- packing -------------------------------------------------------------------------------------------------------------------
def pack(src: str, name: str, done: Unpacked | None = None) -> Iterator[bytes]:
    """A tar of `src` under `name`, block by block, counted in `done`. OSError says what cannot be read or is none of the three."""
    for path, inside in _tree(src, name):
        facts = os.lstat(path)
        info = tarfile.TarInfo(inside)
        info.mode, info.mtime = stat.S_IMODE(facts.st_mode) & 0o777, int(facts.st_mtime)
        if stat.S_ISDIR(facts.st_mode):
            info.type = tarfile.DIRTYPE
            yield _header(info)
        elif stat.S_ISLNK(facts.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
            yield _header(info)
        elif stat.S_ISREG(facts.st_mode):
            with open(path, "rb") as file:
                info.size = os.fstat(file.fileno()).st_size
                yield _header(info)
                yield from _content(file, info.size, path)
        else:
            raise OSError(errno.EINVAL, "it is no file, directory or link", path)
        if done is not None:
            done.count(info)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(file: io.BufferedReader, size: int, path: str) -> Iterator[bytes]:
    left = size
    while left:
        block = file.read(min(left, BLOCK))
        if not block:
            raise OSError(errno.EIO, "it became shorter while it was read", path)
        left -= len(block)
        yield block
    if padding := -size % tarfile.BLOCKSIZE:  # an empty block would say that the upload is over
        yield bytes(padding)


def _tree(src: str, name: str) -> Iterator[tuple[str, str]]:
    """(local path, name in the archive), parents first, in order."""
    yield src, name
    if os.path.islink(src) or not os.path.isdir(src):
        return
    for entry in sorted(os.listdir(src)):
        yield from _tree(os.path.join(src, entry), entry if name == "." else f"{name}/{entry}")
