"""The file program's watch: changes below a directory, or of one file, as lines of JSON, until nobody wants them any more.

`{"event", "path", "directory"}`, `moved` with `from`; `started` comes first, `overflow` says that events were lost. The kernel tells
(inotify), so a quiet directory costs nothing. Standard input is the other side's sign of life: when it ends, or stays silent too
long, so does this program.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _struct
import ctypes
import errno
import os
import select
import stat
import time

from corral.guest.entries import Refused, line, refusal_of, say, shown
from corral.guest.fileops import PART, PART_END

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SILENCE_S = 300
"""Without a sign of life for this long, nobody is there."""
MOST = 8192
"""Directories that one call may watch."""
PAIR_S = 0.02
"""How long the second half of a move may take."""
QUIET_S = 0.1
"""A file that is being written is told of this often at most."""

MODIFY, ATTRIB, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF, UNMOUNT, OVERFLOW, IGNORED, IS_DIRECTORY = 0x400, 0x800, 0x2000, 0x4000, 0x8000, 0x40000000
ONLY_DIRECTORY, NO_FOLLOW, EXCLUDE_UNLINKED = 0x01000000, 0x02000000, 0x04000000
WANTED = MODIFY | ATTRIB | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF
_head = _struct.Struct("iIII")


class Watch:
    """One call: what is watched, and what is still to be told."""

    def __init__(self, top: bytes, recursive: bool, only: bytes | None) -> None:
        self.top = top
        self.recursive = recursive
        self.only = only
        self.library = ctypes.CDLL(None, use_errno=True)
        self.fd = self.library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise self._refusal(ctypes.get_errno(), top)
        self.paths: dict[int, bytes] = {}
        self.numbers: dict[bytes, int] = {}
        self.leaving: dict[int, tuple[bytes, bool, float]] = {}
        """Moves of which only the first half came, by cookie."""
        self.quiet: dict[bytes, tuple[float, bool]] = {}
        """Files told of just now: until when, and whether they changed again."""
        self.found: set[bytes] = set()
        """What was told of because it was found in a new directory; the kernel may tell it again."""
        self.over = False
        self.out = bytearray()

    @staticmethod
    def _refusal(number: int, path: bytes) -> Refused:
        if number in (errno.ENOSPC, errno.EMFILE, errno.ENFILE):
            return Refused("quota_exceeded", f"{shown(path)!r}: no more directories can be watched here", shown(path))
        return refusal_of(OSError(number, os.strerror(number)), path)

    # -- what is watched -----------------------------------------------------------------------------------------------
    def add(self, directory: bytes, *, top: bool = False) -> None:
        if len(self.paths) >= MOST:
            raise self._refusal(errno.ENOSPC, directory)
        mask = WANTED | ONLY_DIRECTORY | EXCLUDE_UNLINKED | (0 if top else NO_FOLLOW)
        number = self.library.inotify_add_watch(self.fd, ctypes.c_char_p(directory), mask)
        if number < 0:
            raise self._refusal(ctypes.get_errno(), directory)
        self.paths[number] = directory
        self.numbers[directory] = number

    def add_below(self, directory: bytes, *, tell: bool) -> None:
        """Watch every directory below one that is watched; with `tell` all that is found there has just come."""
        stack = [directory]
        while stack:
            here = stack.pop()
            try:
                entries = list(os.scandir(here))
            except OSError:
                continue
            for entry in entries:
                below = entry.is_dir(follow_symlinks=False)
                if tell:
                    self.found.add(entry.path)
                    self.tell("created", entry.path, below)
                if below and self._try(entry.path):
                    stack.append(entry.path)

    def _try(self, directory: bytes) -> bool:
        try:
            self.add(directory)
        except Refused as refused:
            if refused.code == "quota_exceeded":  # what happens there will not be told
                self.tell("overflow", directory, True)
            return False
        return True

    def forget_below(self, directory: bytes) -> None:
        for path in [path for path in self.numbers if path == directory or path.startswith(directory + b"/")]:
            number = self.numbers.pop(path)
            self.paths.pop(number, None)
            self.library.inotify_rm_watch(self.fd, number)

    def rename_below(self, old: bytes, new: bytes) -> None:
        for path in [path for path in self.numbers if path == old or path.startswith(old + b"/")]:
            number = self.numbers.pop(path)
            renamed = new + path[len(old) :]
            self.numbers[renamed] = number
            self.paths[number] = renamed

    # -- what is told --------------------------------------------------------------------------------------------------
    def tell(self, event: str, path: bytes, directory: bool, **more: Any) -> None:
        self.out += line({"event": event, "path": shown(path), "directory": directory, **more})

    def take(self) -> None:
        """Everything that the kernel has to tell now."""
        while True:
            try:
                data = os.read(self.fd, 64 * 1024)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                number, mask, cookie, length = _head.unpack_from(data, at)
                at += _head.size
                name = data[at : at + length].rstrip(b"\0")
                at += length
                self.event(number, mask, cookie, name)
            self.flush()

    def event(self, number: int, mask: int, cookie: int, name: bytes) -> None:
        if mask & OVERFLOW:
            self.tell("overflow", self.top, True)
            return
        above = self.paths.get(number)
        if above is None:
            return
        if mask & (DELETE_SELF | MOVE_SELF | UNMOUNT) and above == self.top:
            self.tell("deleted", self.top, True)
            self.over = True
            return
        if mask & IGNORED:
            self.paths.pop(number, None)
            if self.numbers.get(above) == number:
                del self.numbers[above]
            return
        if not name or (self.only is not None and name != self.only and not cookie):
            return
        path = above + name if above.endswith(b"/") else above + b"/" + name
        directory = bool(mask & IS_DIRECTORY)
        if mask & MOVED_FROM:
            self.leaving[cookie] = path, directory, time.monotonic() + PAIR_S
        elif mask & MOVED_TO:
            self.arrived(path, directory, cookie)
        elif not (self.ours(name) or _nameless(path, name)):
            self.change(mask, path, directory)

    @staticmethod
    def ours(name: bytes) -> bool:
        """A file of this API that is not whole yet."""
        return name.startswith(PART) and name.endswith(PART_END)

    def matters(self, path: bytes) -> bool:
        return self.only is None or os.path.basename(path) == self.only

    def arrived(self, path: bytes, directory: bool, cookie: int) -> None:
        before = self.leaving.pop(cookie, None)
        if before is not None and self.ours(os.path.basename(before[0])):
            if self.matters(path):
                self.tell("modified", path, directory)
            return
        if before is not None and self.matters(path) and self.matters(before[0]):
            if directory:
                self.rename_below(before[0], path)
            self.tell("moved", path, directory, **{"from": shown(before[0])})
            return
        if before is not None and self.matters(before[0]):
            self.left(before[0], directory)
        if self.matters(path):
            self.came(path, directory)

    def came(self, path: bytes, directory: bool) -> None:
        if path in self.found:
            self.found.discard(path)
            return
        self.tell("created", path, directory)
        if directory and self.recursive and self._try(path):
            self.add_below(path, tell=True)

    def left(self, path: bytes, directory: bool) -> None:
        if directory:
            self.forget_below(path)
        self.quiet.pop(path, None)
        self.tell("deleted", path, directory)

    def change(self, mask: int, path: bytes, directory: bool) -> None:
        if mask & CREATE:
            self.came(path, directory)
        elif mask & DELETE:
            self.left(path, directory)
        elif mask & (MODIFY | ATTRIB):
            until, _ = self.quiet.get(path, (0.0, False))
            now = time.monotonic()
            if now < until:
                self.quiet[path] = until, True
            else:
                self.tell("modified", path, directory)
                self.quiet[path] = now + QUIET_S, False

    def late(self) -> float | None:
        """Tell what has waited long enough; when to look again."""
        now = time.monotonic()
        for cookie, (path, directory, until) in list(self.leaving.items()):
            if now >= until:
                del self.leaving[cookie]
                if self.matters(path) and not self.ours(os.path.basename(path)):
                    self.left(path, directory)
        for path, (until, again) in list(self.quiet.items()):
            if now >= until:
                del self.quiet[path]
                if again:
                    self.tell("modified", path, False)
        self.flush()
        times = [until for _, _, until in self.leaving.values()] + [until for until, _ in self.quiet.values()]
        return max(0.0, min(times) - now) if times else None

    def flush(self) -> None:
        if self.out:
            say(bytes(self.out))
            self.out.clear()


def _nameless(path: bytes, name: bytes) -> bool:
    """A file without a name is called by its number in events."""
    return name[:1] == b"#" and name[1:].isdigit() and not os.path.lexists(path)


def watch(path: bytes, *, recursive: bool) -> None:
    """Until standard input ends, or what is watched is gone."""
    info = os.stat(path)
    if stat.S_ISDIR(info.st_mode):
        work = Watch(path, recursive, None)
        work.add(path, top=True)
    else:
        # Another file may take its place: the directory knows.
        work = Watch(os.path.dirname(path) or b"/", False, os.path.basename(path))
        work.add(work.top, top=True)
    if work.recursive:
        _below(work)
    say(line({"event": "started", "path": shown(path), "directory": work.only is None}))
    poll = select.poll()
    poll.register(work.fd, select.POLLIN)
    poll.register(0, select.POLLIN)
    _signal.alarm(SILENCE_S)
    while not work.over:
        pause = work.late()
        for fd, _ in poll.poll(None if pause is None else int(pause * 1000) + 1):
            if fd == work.fd:
                work.take()
            elif os.read(0, 4096):
                _signal.alarm(SILENCE_S)
            else:
                return
        if not work.leaving and len(work.found) > MOST:
            work.found.clear()
    work.flush()


def _below(work: Watch) -> None:
    """At the start, more directories than can be watched are a refusal, not an event."""
    work.add_below(work.top, tell=False)
    if work.out:
        raise Refused("quota_exceeded", f"{shown(work.top)!r} has more directories than can be watched")
