"""The directory that a sandbox writes, as the host works on it: every answer comes from a thread with the sandbox's ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from corral.errors import CorralError
from corral.linux.guesttree import copying, looking, putting
from corral.linux.guesttree.copying import Copied
from corral.linux.guesttree.globs import glob
from corral.linux.guesttree.ids import read_all_again, run_as
from corral.linux.guesttree.looking import DiskUse, Look
from corral.linux.guesttree.putting import parts_of
from corral.linux.guesttree.walk import Caps
from corral.linux.manifest import Manifest

T = TypeVar("T")


class GuestTree:
    """A directory that a sandbox writes. Synchronous: call it from a worker thread (`asyncio.to_thread`).

    `uid`, `gid`: the host ids of the sandbox's user. As root the work is done as them; otherwise as ourselves.
    """

    def __init__(self, path: str, uid: int, gid: int, caps: Caps | None = None) -> None:
        self._path = path
        self._caps = caps or Caps()
        self._user: tuple[int, int] | None = None
        if os.geteuid() == 0:
            if uid <= 0 or gid <= 0:
                raise CorralError("infra_error", "a guest tree is never touched as uid 0")
            self._user = (uid, gid)

    def _with_root(self, work: Callable[[int], T], *, read_all: bool = False) -> T:
        def seen(root: int) -> T:
            if read_all and self._user is not None:
                read_all_again()
            return work(root)

        # The root itself is the host's: its path has no component that a sandbox can change.
        root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return run_as(self._user, lambda: seen(root))
        finally:
            os.close(root)

    def scan(self, previous: Manifest | None = None, *, settle: bool = False) -> Manifest:
        """The manifest now. Files that are provably untouched since `previous` are not read again.

        `settle`: programs run, so what is read is written back first. The kernel moves the change time at the first write through a
        mapping after a write-back only; a stamp would otherwise hold for what such a program still writes.
        """
        return self._with_root(lambda root: looking.scan(root, self._caps, previous, settle), read_all=True)

    def look(self, previous: Manifest | None = None, *, settle: bool = False) -> Look:
        """`scan`, with what `is_as_seen` needs."""

        def work(root: int) -> Look:
            info = os.fstat(root)
            return Look((info.st_ino, info.st_ctime_ns), looking.scan(root, self._caps, previous, settle))

        return self._with_root(work, read_all=True)

    def usage(self) -> DiskUse:
        """Bytes in blocks (hard links once) and names, for limits that are held by watching."""
        return self._with_root(lambda root: looking.usage(root, self._caps), read_all=True)

    def put(self, files: Sequence[tuple[str, int, bytes | None]]) -> None:
        """Write (relative path, mode, content), parents made. A link in the way is `invalid_value`; a full disk `too_large`.

        The last name is replaced, whatever it was, unless it is a directory; setuid and setgid are dropped. Without content it is a
        directory, new or there already; directories get their modes last, so that one may be closed to writing.
        """
        for index, (path, _, _) in enumerate(files):
            parts_of(path, index)
        self._with_root(lambda root: putting.put(root, files))

    def copy_out(self, globs: Sequence[str], into: str, max_bytes: int) -> Copied:
        """Copy regular files that match to the host directory `into` (which only we write), at their relative paths.

        Globs are relative to the root: `*` and `?` stay within a name, `**` crosses directories; a match of a directory takes all
        below it. Modes are reduced to rw and x; a file that does not fit in what is left of `max_bytes`, or comes after as many as
        the caps allow, is skipped and named.
        """
        patterns = [glob(pattern) for pattern in globs]
        return self._with_root(lambda root: copying.copy_out(root, self._caps, self._user, patterns, into, max_bytes))
