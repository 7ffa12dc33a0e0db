"""Tar streams of the file program: an archive on standard input or output.

Entries stay below their destination: no absolute name, no `..`, no way through a link (a link is only ever created or replaced); no
devices or FIFOs; set-id bits are dropped. Names are bytes throughout.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tarfile

from corral.guest.entries import CHUNK, Refused, raw, refusal_of

MAX_NAMES = 1024 * 1024
_NAMES = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_of(name: str, entry: str) -> list[bytes]:
    """Components of a relative name; Refused for anything that could lead elsewhere."""
    whole = raw(name)
    if whole.startswith(b"/"):
        raise Refused("invalid_value", f"the archive holds an absolute name: {entry!r}", entry)
    parts = [part for part in whole.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in whole:
        raise Refused("invalid_value", f"the archive holds a name that leads out: {entry!r}", entry)
    return parts


def enter(directory: int, name: bytes, entry: str) -> int:
    """Open or make a directory under an open one, never through a link."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=directory)
    except FileNotFoundError:
        os.mkdir(name, 0o755, dir_fd=directory)
        return os.open(name, _DIRECTORY, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise Refused("invalid_value", f"{entry!r} leads through something that is no directory", entry) from None
        raise


def parent_of(root: int, parts: list[bytes], entry: str) -> int:
    here = os.dup(root)
    try:
        for part in parts[:-1]:
            below = enter(here, part, entry)
            os.close(here)
            here = below
    except BaseException:
        os.close(here)
        raise
    return here


def clear(directory: int, name: bytes, entry: str) -> None:
    """Make room for a new name: what is there goes, unless it is a directory."""
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.EPERM):
            raise Refused("invalid_value", f"{entry!r}: a directory of that name is in the way", entry) from None
        raise


class Header(tarfile.TarInfo):
    """One header of a stream that has to be whole: what `tarfile` takes for an end of the archive is an end only if it says so."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Header:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error}, before the end of the archive") from None
        if header.type in _NAMES and header.size > MAX_NAMES:  # they are read into memory as a whole
            raise tarfile.ReadError(f"names and attributes of {header.size} bytes")
        return header


class Unpacker:
    def __init__(self, root: int, max_bytes: int, max_entries: int) -> None:
        self.root = root
        self.left = max_bytes
        self.entries = max_entries
        self.modes: list[tuple[list[bytes], int]] = []

    def run(self, archive: tarfile.TarFile) -> None:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # a stream may have millions of entries; none is needed again
            self.entries -= 1
            if self.entries < 0:
                raise Refused("too_large", "the archive has more entries than the sandbox may have files", member.name)
            self.one(archive, member)
        for parts, mode in reversed(self.modes):
            self.set_mode(parts, mode)

    def one(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        entry = member.name
        parts = parts_of(entry, entry)
        if not parts:
            if member.isdir():
                return
            raise Refused("invalid_value", f"the archive holds an entry without a name: {entry!r}", entry)
        try:
            here = parent_of(self.root, parts, entry)
            try:
                self.place(archive, member, here, parts)
            finally:
                os.close(here)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise Refused("too_large", f"no room for {entry!r}: the disk limit is reached", entry) from None
            raise Refused("invalid_value", f"{entry!r}: {error.strerror}", entry) from None
        except (
            tarfile.TarError,
            OverflowError,
            ValueError,
        ) as error:  # cut short; a NUL in a link; a time that no file can have
            raise Refused("invalid_value", f"{entry!r}: {error}", entry) from None

    def place(self, archive: tarfile.TarFile, member: tarfile.TarInfo, here: int, parts: list[bytes]) -> None:
        name, entry = parts[-1], member.name
        if member.isdir():
            os.close(enter(here, name, entry))
            self.modes.append((parts, member.mode & 0o777))
        elif member.issym():
            clear(here, name, entry)
            os.symlink(raw(member.linkname), name, dir_fd=here)
        elif member.islnk():
            target = parts_of(member.linkname, entry)
            source = parent_of(self.root, target, entry) if target else -1
            try:
                if not target or not stat.S_ISREG(os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode):
                    raise Refused("invalid_value", f"{entry!r} is a hard link to what is no file", entry)
                clear(here, name, entry)
                os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=here, follow_symlinks=False)
            finally:
                if source >= 0:
                    os.close(source)
        elif member.isreg():
            if member.size > self.left:
                raise Refused("too_large", f"no room for {entry!r}: the disk limit is reached", entry)
            clear(here, name, entry)
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=here)
            try:
                self.copy(archive, member, fd)
                os.fchmod(fd, member.mode & 0o777)
                os.utime(fd, (max(0, member.mtime), max(0, member.mtime)))
            finally:
                os.close(fd)
        else:
            raise Refused("invalid_value", f"{entry!r} is neither file, directory nor link", entry)

    def copy(self, archive: tarfile.TarFile, member: tarfile.TarInfo, fd: int) -> None:
        source = archive.extractfile(member)
        if source is None:
            return
        while piece := source.read(CHUNK):
            self.left -= len(piece)
            if self.left < 0:
                raise Refused("too_large", f"no room for {member.name!r}: the disk limit is reached", member.name)
            view = memoryview(piece)
            while view:
                view = view[os.write(fd, view) :]

    def set_mode(self, parts: list[bytes], mode: int) -> None:
        # Last, so that a read-only directory can be filled first.
        try:
            here = parent_of(self.root, [*parts, b""], "")
        except (OSError, Refused):
            return
        try:
            os.fchmod(here, mode)
        finally:
            os.close(here)


def unpack(destination: str, max_bytes: int, max_entries: int) -> None:
    target = raw(destination)
    try:
        os.makedirs(target, exist_ok=True)
        root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise Refused("not_a_directory", f"{destination!r} is or leads through a file", destination) from None
        raise refusal_of(error, target) from None
    try:
        with tarfile.open(
            fileobj=sys.stdin.buffer, mode="r|", tarinfo=Header, encoding="utf-8", errors="surrogateescape"
        ) as archive:
            Unpacker(root, max_bytes, max_entries).run(archive)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise Refused("invalid_value", f"not a tar archive, or cut short: {error}") from None
    while sys.stdin.buffer.read(CHUNK):
        pass


class _Padded:
    """A file that is exactly as long as its header says, whatever happens to it meanwhile."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, size: int) -> bytes:
        piece = os.read(self.fd, size)
        while len(piece) < size:
            more = os.read(self.fd, size - len(piece))
            piece += more or bytes(size - len(piece))
        return piece


def pack(path: str) -> None:
    target = raw(path)
    name = os.path.basename(target.rstrip(b"/")) or b"."
    try:
        kind = stat.S_IFMT(os.lstat(target).st_mode)
    except OSError as error:
        raise Refused("not_found", f"{path!r}: {error.strerror}", path) from None
    if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        raise Refused("not_a_file", f"{path!r} is no file, directory or link", path)
    # The GNU format keeps names of any bytes as they are.
    with tarfile.open(
        fileobj=sys.stdout.buffer,
        mode="w|",
        format=tarfile.GNU_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
        bufsize=64 * 1024,
    ) as archive:
        archive.copybufsize = CHUNK  # type: ignore[attr-defined]
        _add(archive, target, name)
    sys.stdout.buffer.flush()


def _add(archive: tarfile.TarFile, path: bytes, name: bytes) -> None:
    """A whole tree. No recursion: a path may have more parts than calls can nest."""
    stack = [(path, name, iter(_member(archive, path, name)))]
    while stack:
        path, name, below = stack[-1]
        one = next(below, None)
        if one is None:
            stack.pop()
            continue
        path, name = path + b"/" + one, name + b"/" + one
        stack.append((path, name, iter(_member(archive, path, name))))


def _member(archive: tarfile.TarFile, path: bytes, name: bytes) -> list[bytes]:
    """One member; the names below it."""
    below: list[bytes] = []
    shown = name.decode("utf-8", "surrogateescape")
    try:
        info = os.lstat(path)
        member = tarfile.TarInfo(shown)
        member.mode = stat.S_IMODE(info.st_mode) & 0o777
        member.mtime = int(info.st_mtime)
        if stat.S_ISDIR(info.st_mode):
            member.type = tarfile.DIRTYPE
            below = sorted(os.listdir(path))
            archive.addfile(member)
        elif stat.S_ISLNK(info.st_mode):
            member.type = tarfile.SYMTYPE
            member.linkname = os.readlink(path).decode("utf-8", "surrogateescape")
            archive.addfile(member)
        elif stat.S_ISREG(info.st_mode):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                member.size = os.fstat(fd).st_size
                archive.addfile(member, _Padded(fd))  # type: ignore[arg-type]
            finally:
                os.close(fd)
        archive.members = []  # type: ignore[attr-defined]
    except FileNotFoundError:
        if b"/" not in name:
            raise Refused("not_found", f"{shown!r} does not exist", shown) from None
        # else removed meanwhile, as files of a program that runs are; its name had been read, nothing of it was sent
    except OSError as error:
        raise Refused("invalid_value", f"{shown!r}: {error.strerror}", shown) from None
    return below
