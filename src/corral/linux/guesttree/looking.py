"""What a tree holds, and whether that can have changed since."""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import time
from dataclasses import dataclass

from corral.linux.guesttree import beneath
from corral.linux.guesttree.walk import CHUNK, Caps, Walk
from corral.linux.manifest import Entry, Manifest

RACY_NS = 100_000_000
"""A file changed this shortly before a scan may change again within one clock tick: its stamp proves nothing."""
_SYNC_PAGES = 1 | 2 | 4  # wait, write, wait; no journal, no flush of the device
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class DiskUse:
    """Blocks and names under the tree; `complete` False = the walk met a cap, so at least this much."""

    bytes: int
    entries: int
    complete: bool


@dataclass(frozen=True)
class Look:
    """A scan and the root's own inode and change time before it: what `is_as_seen` compares with."""

    root: tuple[int, int]
    manifest: Manifest


def is_as_seen(path: str, look: Look, most: int = 64) -> bool:
    """True only if nothing can have changed since a look: every directory and entry has the inode, size, mode and change time of then.

    A directory whose change time stands has the names that it had. Quick, so it may be called where nothing may wait, once no program
    of the sandbox runs; it reads no file and opens nothing but the tree's own directories. False says nothing: more than `most` entries,
    a stamp too fresh to prove anything, no access.
    """
    seen = look.manifest
    if not seen.complete or len(seen.entries) > most:
        return False
    sure = seen.taken_ns - RACY_NS
    opened: dict[bytes, int] = {}
    try:
        opened[b""] = root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        info = os.fstat(root)
        if (info.st_ino, info.st_ctime_ns) != look.root or info.st_ctime_ns >= sure:
            return False
        for name, entry in seen.entries.items():  # a scan names a directory before what is in it
            above, _, last = name.rpartition(b"/")
            info = os.stat(last, dir_fd=opened[above], follow_symlinks=False)
            if (info.st_ino, info.st_ctime_ns, stat.S_IMODE(info.st_mode)) != (entry.inode, entry.stamp, entry.mode):
                return False
            if entry.stamp >= sure or (entry.kind == "file" and info.st_size != entry.size):
                return False
            if entry.kind == "dir":
                opened[name] = beneath.open_one(opened[above], last, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        return True
    except (OSError, KeyError):
        return False
    finally:
        for fd in opened.values():
            os.close(fd)


def scan(root: int, caps: Caps, previous: Manifest | None, settle: bool) -> Manifest:
    """The manifest of what lies under an open directory: see `GuestTree.scan`."""
    walk = Walk(root, caps)
    manifest = Manifest(taken_ns=time.time_ns())
    budget = caps.hash_bytes
    for path, fd, name, info in walk():
        mode = stat.S_IMODE(info.st_mode)
        if stat.S_ISDIR(info.st_mode):
            manifest.entries[path] = Entry("dir", 0, mode, info.st_ino, info.st_ctime_ns, None)
        elif stat.S_ISLNK(info.st_mode):
            try:
                target = os.readlink(name, dir_fd=fd)
            except OSError:
                continue
            digest = hashlib.sha256(target).digest()
            manifest.entries[path] = Entry("symlink", len(target), mode, info.st_ino, info.st_ctime_ns, digest)
        elif stat.S_ISREG(info.st_mode):
            known = _untouched(previous, path, info)
            if known is None and info.st_size <= budget:
                budget -= info.st_size
                known, info = _hash(walk, fd, name, info, settle)
            manifest.entries[path] = Entry("file", info.st_size, mode, info.st_ino, info.st_ctime_ns, known)
    manifest.complete = walk.complete
    return manifest


def _hash(walk: Walk, fd: int, name: bytes, info: os.stat_result, settle: bool) -> tuple[bytes | None, os.stat_result]:
    try:
        source, info = beneath.open_regular(fd, name)
    except OSError:
        return None, info  # unreadable or swapped meanwhile: a name without digest, not a failure
    whole = hashlib.sha256()
    left = info.st_size
    try:
        if settle:
            _libc.sync_file_range(source, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_SYNC_PAGES))
        while left > 0 and not walk.late():
            piece = os.read(source, min(CHUNK, left))
            if not piece:
                break
            whole.update(piece)
            left -= len(piece)
    except OSError:
        return None, info
    finally:
        os.close(source)
    return (whole.digest() if left == 0 else None), info


def _untouched(previous: Manifest | None, path: bytes, info: os.stat_result) -> bytes | None:
    if previous is None or (before := previous.entries.get(path)) is None or before.kind != "file":
        return None
    if (before.inode, before.size, before.stamp) != (info.st_ino, info.st_size, info.st_ctime_ns):
        return None
    return before.digest if before.stamp < previous.taken_ns - RACY_NS else None


def usage(root: int, caps: Caps) -> DiskUse:
    """What an open directory takes: see `GuestTree.usage`."""
    walk = Walk(root, caps)
    total = names = 0
    linked: set[int] = set()
    for _, _, _, info in walk():
        names += 1
        if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
            if info.st_ino in linked:
                continue
            linked.add(info.st_ino)
        total += info.st_blocks * 512
    return DiskUse(total, names, walk.complete)
