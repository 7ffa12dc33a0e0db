"""Unpacking what strangers packed into a new tree: nothing outside of it is touched, whatever an entry says.

A name is relative, without `..`, UTF-8. Links on the way to it are resolved as if the tree were the root, and a missing directory is
made. What exists is never written to but replaced. Devices, set-id bits, owners, extended attributes and empty device marks do not
enter; entries, bytes and lengths are capped. The tree is written by nobody else meanwhile.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from corral.node.templates_sealing import CredentialSearch
from corral.node.templates_tar import CHUNK, Counted, Entry, Refused, Source, Tar, decompressed

MAX_NAME = 3072
MAX_PART = 255
MAX_DEPTH = 200
MAX_STEPS = 1000
"""Parts of a name and of the links on its way."""
MAX_NOTED = 256 * 1024 * 1024
"""Bytes of the paths that one layer sets: they are kept in memory while it is unpacked."""
HOST_FAULTS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
        *(errno.EACCES, errno.EPERM),
    }
)
"""Errors of which no entry is the cause."""
WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"


@dataclass(frozen=True)
class Caps:
    """The most that one template may unpack."""

    entries: int = 1_000_000
    size_bytes: int = 32 << 30
    by_disk: bool = False
    """The disk has no room for more bytes; otherwise they would be refused anywhere."""

    def within(self, directory: Path) -> Caps:
        """The same, and at most nine tenths of what is free where it goes."""
        room = shutil.disk_usage(directory).free * 9 // 10
        return Caps(self.entries, room, True) if room < self.size_bytes else self


class Tree:
    """A tree that is being unpacked. `name` is the template's, for messages about credentials."""

    def __init__(self, name: str, root: Path, caps: Caps) -> None:
        self._name = name
        self._root = os.fsencode(root)
        self._caps = caps
        self._entries = 0
        self._bytes = 0
        self._unpacked = 0
        """Of all archives, also what was skipped in them."""
        self._noted = 0
        self._fresh: set[bytes] = set()
        """Paths that the current layer has set: its whiteouts are about lower layers only."""
        self._above: set[bytes] = set()
        """Directories above those."""
        self._opaque: set[bytes] = set()
        self.left_out: Counter[str] = Counter()
        """What was not taken, by kind."""

    def unpack(self, source: Source, *, layer: str | None = None) -> tuple[str, int]:
        """One archive over what is there; -> digest of the uncompressed bytes and their count. With `layer`, whiteouts are applied.

        `Refused` says which entry is to blame; the tree is then of no use.
        """
        self._fresh, self._above, self._opaque, self._noted = set(), set(), set(), 0
        with decompressed(source) as plain:
            counted = Counted(plain, self._caps.size_bytes + (self._caps.entries << 12) - self._unpacked)
            tar = Tar(counted)
            for entry in tar:
                told = entry.name.decode("utf-8", "backslashreplace")
                try:
                    self._one(tar, entry, layer)
                except OSError as error:
                    if error.errno in HOST_FAULTS:
                        raise
                    raise Refused(f"{told}: {error.strerror or error}") from error
                except Refused as error:
                    raise Refused(f"{told}: {error}") from None
            digest = counted.finish()
            self._unpacked += counted.count
            return digest, counted.count

    def left(self) -> Caps:
        """What may still be unpacked for the same template."""
        return Caps(self._caps.entries - self._entries, self._caps.size_bytes - self._bytes, self._caps.by_disk)

    def _count(self) -> None:
        self._entries += 1
        if self._entries > self._caps.entries:
            raise Refused(f"there are more than {self._caps.entries} entries")

    def _one(self, tar: Tar, entry: Entry, layer: str | None) -> None:
        self._count()
        parts = _parts(entry.name)
        if not parts:
            if entry.kind != "directory":
                raise Refused("the root is no directory")
            return
        last = parts[-1]
        if layer is not None and last.startswith(WHITEOUT):
            self._whiteout(parts[:-1], last)
            return
        if entry.kind == "device":
            self.left_out["device"] += 1
            return
        parent = self._parent(parts[:-1])
        path = os.path.join(parent, last)
        if entry.kind == "directory":
            self._directory(path)
        elif entry.kind == "symlink":
            if not entry.link or b"\0" in entry.link or len(entry.link) > MAX_NAME:
                raise Refused("a link to nowhere")
            self._clear(path)
            os.symlink(entry.link, path)
        elif entry.kind == "hardlink":
            self._hard_link(path, entry.link)
        else:
            self._file(tar, entry, path, layer)
        if layer is not None:
            self._note(path)

    def _note(self, path: bytes) -> None:
        if path not in self._fresh:
            self._fresh.add(path)
            self._noted += len(path)
        while (path := os.path.dirname(path)) not in self._above and len(path) >= len(self._root):
            self._above.add(path)
            self._noted += len(path)
        if self._noted > MAX_NOTED:
            raise Refused(f"the names of the layer are more than {MAX_NOTED} bytes together")

    def _file(self, tar: Tar, entry: Entry, path: bytes, layer: str | None) -> None:
        self._grow(entry.size)
        self._clear(path)
        mode = 0o755 if entry.mode & 0o111 else 0o644  # no set-id bit ever
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        search = CredentialSearch(self._name, entry.name, f" of layer {layer}" if layer else "")
        with open(fd, "wb", buffering=CHUNK) as file:
            for piece in tar.content():
                file.write(piece)
                search.feed(piece)
        os.utime(path, (max(0.0, min(entry.mtime, 1e10)),) * 2)
        search.finish()

    def _hard_link(self, path: bytes, link: bytes) -> None:
        try:
            parts = _parts(link)
        except Refused as error:
            raise Refused(f"hard link to {link.decode('utf-8', 'backslashreplace')}: {error}") from None
        target = os.path.join(self._parent(parts[:-1], make=False), parts[-1]) if parts else self._root
        try:
            info = os.lstat(target)
        except OSError:
            info = None
        if info is None or not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
            raise Refused(f"hard link to {link.decode('utf-8', 'backslashreplace')}, which is no file of this tree")
        if target == path:
            return
        self._grow(info.st_size)  # each name is read once more when the tree is digested
        self._clear(path)
        os.link(target, path, follow_symlinks=False)

    def _directory(self, path: bytes) -> None:
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            os.mkdir(path, 0o755)
            return
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(path)
            os.mkdir(path, 0o755)

    def _whiteout(self, parents: list[bytes], mark: bytes) -> None:
        if mark == OPAQUE:
            directory = self._parent(parents)
            if directory not in self._opaque:
                self._opaque.add(directory)
                self._purge_below(directory)
                self._note(directory)
            return
        if mark.startswith(WHITEOUT + WHITEOUT):
            self.left_out["mark"] += 1  # of aufs, about nothing that is here
            return
        name = mark.removeprefix(WHITEOUT)
        if name in (b"", b".", b".."):
            raise Refused("a whiteout of nothing")
        self._purge(os.path.join(self._parent(parents), name))

    def _purge(self, path: bytes) -> None:
        """Remove what lower layers have there; what this layer has set stays."""
        try:
            is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return
        if path not in self._fresh:
            if not is_directory:
                os.unlink(path)
            elif path in self._above:
                self._purge_below(path)
            else:
                shutil.rmtree(path)
        elif is_directory:
            self._purge_below(path)

    def _purge_below(self, path: bytes) -> None:
        for child in os.listdir(path):
            self._purge(os.path.join(path, child))

    def _clear(self, path: bytes) -> None:
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(info.st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def _grow(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._caps.size_bytes:
            if self._caps.by_disk:
                raise OSError(
                    errno.ENOSPC, f"its files need more than the {self._caps.size_bytes} bytes that may be used"
                )
            raise Refused(f"the files are more than {self._caps.size_bytes} bytes together")

    def _parent(self, parts: list[bytes], *, make: bool = True) -> bytes:
        """The real directory of these parts below the root; links are followed as if the tree were the root of everything."""
        todo = list(reversed(parts))
        done: list[bytes] = []
        steps = 0
        while todo:
            part = todo.pop()
            steps += 1
            if steps > MAX_STEPS or len(done) > MAX_DEPTH:
                raise Refused("too many directories or links on the way")
            if part in (b"", b"."):
                continue
            if part == b"..":  # of a link only; over the root it stays there, as in a kernel's root
                del done[-1:]
                continue
            here = b"/".join((self._root, *done, part))
            try:
                info = os.lstat(here)
            except FileNotFoundError:
                if not make:
                    raise Refused("no such directory in this tree") from None
                self._count()
                os.mkdir(here, 0o755)
                done.append(part)
                continue
            if stat.S_ISLNK(info.st_mode):
                target = os.readlink(here)
                if target.startswith(b"/"):
                    done = []
                todo += reversed(target.split(b"/"))
            elif stat.S_ISDIR(info.st_mode):
                done.append(part)
            else:
                raise Refused(f"{here[len(self._root) + 1 :].decode('utf-8', 'backslashreplace')} is no directory")
        return b"/".join((self._root, *done))


def _parts(name: bytes) -> list[bytes]:
    """The parts of an entry's name; `Refused` for what no name of a tree may be."""
    if not name or len(name) > MAX_NAME:
        raise Refused("an empty name" if not name else f"a name of {len(name)} bytes")
    if name.startswith(b"/"):
        raise Refused("an absolute name")
    if b"\0" in name:
        raise Refused("a name with a NUL byte")
    try:
        name.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("the name is not UTF-8") from None
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if len(parts) > MAX_DEPTH:
        raise Refused(f"{len(parts)} directories in one another")
    if b".." in parts:
        raise Refused("a name with ..")
    if long := next((part for part in parts if len(part) > MAX_PART), None):
        raise Refused(f"a name of {len(long)} bytes")
    return parts
