"""A walk through a hostile tree that ends: entries, depth and seconds are capped."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from corral.linux.guesttree import beneath

CHUNK = 256 * 1024
"""How much of a file is read at once."""


@dataclass(frozen=True)
class Caps:
    """How much of a hostile tree we are willing to look at."""

    entries: int = 100_000
    depth: int = 128
    hash_bytes: int = 2 * 1024**3
    seconds: float = 20.0
    copies: int = 10_000
    """Files that are copied out: each is a file of the host, a line of the result and a request of who fetches it."""


class Walk:
    """A depth-first walk under an open directory. Yields (path, directory fd, name, lstat) with caps; closes what it opens."""

    def __init__(self, root: int, caps: Caps) -> None:
        self.root = root
        self.caps = caps
        self.complete = True
        self.deadline = time.monotonic() + caps.seconds
        self.seen = 0

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def __call__(self, prefix: bytes = b"") -> Iterator[tuple[bytes, int, bytes, os.stat_result]]:
        stack: list[tuple[int, os._ScandirIterator[str], bytes]] = []
        try:
            first = os.dup(self.root)
            stack.append((first, os.scandir(first), prefix))
            while stack:
                fd, entries, path = stack[-1]
                try:
                    item = next(entries, None)
                except OSError:
                    self.complete, item = False, None
                if item is None:
                    stack.pop()
                    entries.close()
                    os.close(fd)
                    continue
                self.seen += 1
                if self.seen > self.caps.entries or (self.seen % 64 == 0 and self.late()):
                    self.complete = False
                    return
                name = os.fsencode(item.name)
                try:
                    info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError:
                    self.complete = False
                    continue
                here = path + name
                yield here, fd, name, info
                if not stat.S_ISDIR(info.st_mode):
                    continue
                if len(stack) >= self.caps.depth:
                    self.complete = False
                    continue
                try:
                    child = beneath.open_one(fd, name, beneath.DIRECTORY)
                except FileNotFoundError:
                    continue
                except OSError:
                    self.complete = False
                    continue
                try:
                    scan = os.scandir(child)
                except OSError:
                    os.close(child)
                    self.complete = False
                    continue
                stack.append((child, scan, here + b"/"))
        finally:
            for fd, entries, _ in stack:
                entries.close()
                os.close(fd)
