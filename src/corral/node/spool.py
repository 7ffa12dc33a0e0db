"""The output of one exec on disk: exact bytes of both streams up to the kill limit, and the order in which they came.

`STATE/spool/<exec_id>/{stdout,stderr,order}`. File sizes are the truth: after `kill -9` a spool opens at exactly the bytes that were
written, and everything else (head and tail, timeline, cursors, live following) is derived from the files in bounded pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
from array import array
from collections.abc import AsyncIterator
from typing import Any, Literal

from corral.domain.facts import StreamFacts
from corral.errors import CorralError
from corral.ports.node import Chunk

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")
PIECE = 64 * 1024
FOLLOWED = 32 * 1024
"""Bytes that a follower takes at once: about three times as much is held for each of those who do not keep up."""
MAX_ENTRIES = 10_000
_INLINE = 16 * 1024
_RECORD = struct.Struct("<IBQ")  # t_ms, index of the stream, offset at which the entry begins
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND | os.O_NOFOLLOW


class _Order:
    """Which stream spoke when: entry -> (t_ms, stream index, first offset), packed, mirrored in a file."""

    def __init__(self, raw: bytes, sizes: list[int]) -> None:
        self.t_ms = array("I")
        self.index = bytearray()
        self.offset = array("Q")
        for t_ms, index, offset in _RECORD.iter_unpack(raw[: len(raw) - len(raw) % _RECORD.size]):
            # An entry is written before its bytes; one whose bytes never came is dropped.
            if index < len(STREAMS) and offset < sizes[index]:
                self.add(t_ms, index, offset)

    def __len__(self) -> int:
        return len(self.index)

    def add(self, t_ms: int, index: int, offset: int) -> None:
        self.t_ms.append(t_ms)
        self.index.append(index)
        self.offset.append(offset)

    def pack(self) -> bytes:
        return b"".join(_RECORD.pack(*entry) for entry in zip(self.t_ms, self.index, self.offset, strict=True))


class Spool:
    """One writer (the pump of the exec), any number of readers, all on one event loop.

    `limit` = bytes kept on disk per stream; what comes beyond is only counted. `on_disk`/`produced` per stream.
    """

    def __init__(self, directory: str, limit: int, *, ended: bool = False) -> None:
        """Open what is there; what is not is made with the first byte. `ended`: nothing will be written."""
        self.directory = directory
        self.ended = ended
        self._limit = limit
        self._gone = False
        self._news = asyncio.Event()
        self._fds: list[int] = []
        sizes, order = [0, 0], b""
        there = os.path.isdir(directory)
        if there:
            sizes = [self._size(stream) for stream in STREAMS]
            order = self._read("order", 0, MAX_ENTRIES * _RECORD.size)
        self.on_disk: dict[Stream, int] = dict(zip(STREAMS, sizes, strict=True))
        self.produced: dict[Stream, int] = dict(self.on_disk)
        self._order = _Order(order, sizes)
        if there and not ended:
            self._open()
            os.ftruncate(self._fds[2], 0)
            _write_all(self._fds[2], self._order.pack())

    def _open(self) -> None:
        # Only when there is something to keep: a program that says nothing costs no file.
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._fds = [os.open(os.path.join(self.directory, name), _APPEND, 0o600) for name in (*STREAMS, "order")]

    def _size(self, name: str) -> int:
        try:
            return os.stat(os.path.join(self.directory, name)).st_size
        except FileNotFoundError:
            return 0

    async def write(self, stream: Stream, offset: int, data: bytes, t_ms: int) -> None:
        """Append bytes that begin at `offset`; what is already there is skipped, a hole is `guest_lost`."""
        known = self.produced[stream]
        if offset > known:
            raise CorralError("guest_lost", f"bytes {known}..{offset} of {stream} were never delivered")
        data = data[known - offset :] if offset < known else data
        if not data or self.ended:
            return
        if not self._fds:
            self._open()
        room = self._limit - self.on_disk[stream]
        kept = data[:room] if room > 0 else b""
        if kept:
            index = STREAMS.index(stream)
            self._note(index, self.on_disk[stream], min(max(t_ms, 0), 0xFFFFFFFF))
            if len(kept) <= _INLINE:
                _write_all(self._fds[index], kept)
            else:
                # A busy disk may make a large write wait; other sandboxes must not wait with it.
                await asyncio.to_thread(_write_all, self._fds[index], kept)
            self.on_disk[stream] += len(kept)
        self.produced[stream] = known + len(data)
        self._wake()

    def _note(self, index: int, offset: int, t_ms: int) -> None:
        count = len(self._order)
        if count:
            # Neighbours are merged, coarser the more there are: about an hour of steady output stays below the cap.
            fresh = t_ms - self._order.t_ms[-1] < (10 << (count * 10 // MAX_ENTRIES))
            if (self._order.index[-1] == index and fresh) or count >= MAX_ENTRIES:
                return
        _write_all(self._fds[2], _RECORD.pack(t_ms, index, offset))
        self._order.add(t_ms, index, offset)

    def save_input(self, data: bytes, eof: bool) -> None:
        """Keep standard input that was given at once, for a node that has to go on with it."""
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        path = os.path.join(self.directory, "input-eof" if eof else "input")
        fd = os.open(path, _APPEND, 0o600)
        try:
            _write_all(fd, data)
        finally:
            os.close(fd)

    def saved_input(self) -> tuple[bytes, bool] | None:
        """What `save_input` kept, while the exec runs."""
        for name, eof in (("input", False), ("input-eof", True)):
            if size := self._size(name):
                return self._read(name, 0, size), eof
        return None

    def finish(self) -> None:
        """No more bytes will come: readers end when they have read all."""
        self.ended = True
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
        self._wake()

    def drop_input(self) -> None:
        """The exec ended: its input is of no more use."""
        for name in ("input", "input-eof"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.directory, name))

    def remove(self) -> None:
        """Finish and delete; followers get `cursor_gone`."""
        self._gone = True
        self.finish()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def facts(self, keep: int) -> dict[Stream, StreamFacts]:
        """Produced, head and tail per stream when `keep` bytes of each are to be kept."""
        answer: dict[Stream, StreamFacts] = {}
        for stream in STREAMS:
            produced, there = self.produced[stream], self.on_disk[stream]
            if produced <= keep and produced == there:
                answer[stream] = StreamFacts(produced, produced, 0)
            else:
                head = min(keep // 2, there)
                answer[stream] = StreamFacts(produced, head, min(keep - keep // 2, there - head))
        return answer

    async def kept(self, stream: Stream, facts: StreamFacts, offset: int = 0) -> AsyncIterator[bytes]:
        """The kept bytes from the `offset`th of them, in pieces: head, then tail; no piece has of both."""
        start = self.on_disk[stream] - facts.tail
        for begin, size in ((0, facts.head), (start, facts.tail)):
            at, end = begin + min(offset, size), begin + size
            offset -= min(offset, size)
            while at < end and (piece := self._read(stream, at, min(PIECE, end - at))):
                at += len(piece)
                yield piece
                await asyncio.sleep(0)

    async def raw(self, stream: Stream) -> AsyncIterator[bytes]:
        """Everything on disk now, in pieces."""
        at, end = 0, self.on_disk[stream]
        while at < end and (piece := self._read(stream, at, min(PIECE, end - at))):
            at += len(piece)
            yield piece
            await asyncio.sleep(0)

    async def follow(self, cursor: str | None) -> AsyncIterator[Chunk]:
        """Chunks in the order in which they came, from the cursor to the end of the exec, waiting for more."""
        done = self._parse(cursor)
        position = 0
        while True:
            news, ended = self._news, self.ended
            if self._gone:
                raise CorralError("cursor_gone", "the output was dropped")
            position, found = self._next(position, done)
            if found is None:
                if ended:
                    return
                await news.wait()
                continue
            stream, upto, t_ms = found
            data = self._read(stream, done[stream], min(FOLLOWED, upto - done[stream]))
            if not data:
                raise CorralError("cursor_gone", "the output is no longer kept")
            offset = done[stream]
            done[stream] += len(data)
            yield Chunk(stream, offset, data, t_ms, f"{done['stdout']}.{done['stderr']}")
            await asyncio.sleep(0)  # there may be much to read, and nothing else on this path waits for anything

    def _parse(self, cursor: str | None) -> dict[Stream, int]:
        if not cursor:
            return {"stdout": 0, "stderr": 0}
        left, dot, right = cursor.partition(".")
        if not (dot and left.isascii() and left.isdigit() and right.isascii() and right.isdigit()) or len(cursor) > 40:
            raise CorralError("invalid_value", f"not a cursor: {cursor[:60]!r}", field="/cursor")
        done: dict[Stream, int] = {"stdout": int(left), "stderr": int(right)}
        for stream in STREAMS:
            if done[stream] > self.on_disk[stream]:
                raise CorralError("invalid_value", f"the cursor is beyond the end of {stream}", field="/cursor")
        return done

    def _next(self, position: int, done: dict[Stream, int]) -> tuple[int, tuple[Stream, int, int] | None]:
        """(entry to go on from, (stream, end of its bytes, t_ms) of the first entry that is not done)."""
        order = self._order
        while position < len(order):
            stream, end = STREAMS[order.index[position]], self._end(position)
            if done[stream] < end:
                return position, (stream, end, order.t_ms[position])
            if position == len(order) - 1:
                break
            position += 1
        # Past the cap the last entries grow in no known order: whatever is left, stdout first.
        for stream in STREAMS:
            if done[stream] < self.on_disk[stream]:
                return position, (stream, self.on_disk[stream], order.t_ms[-1] if len(order) else 0)
        return position, None

    def _end(self, position: int) -> int:
        index = self._order.index[position]
        following = self._order.index.find(index, position + 1)
        return self._order.offset[following] if following >= 0 else self.on_disk[STREAMS[index]]

    def timeline(self) -> list[dict[str, Any]]:
        """`{"t_ms","stream","offset","bytes"}` in order, at most `MAX_ENTRIES`."""
        ends = dict(self.on_disk)
        entries: list[dict[str, Any]] = []
        for position in range(len(self._order) - 1, -1, -1):
            stream, offset = STREAMS[self._order.index[position]], self._order.offset[position]
            t_ms = self._order.t_ms[position]
            entries.append({"t_ms": t_ms, "stream": stream, "offset": offset, "bytes": ends[stream] - offset})
            ends[stream] = offset
        entries.reverse()
        return entries

    def _read(self, name: str, offset: int, size: int) -> bytes:
        if size <= 0:
            return b""
        try:
            fd = os.open(os.path.join(self.directory, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return b""
        try:
            whole = os.pread(fd, size, offset)
            while 0 < len(whole) < size and (piece := os.pread(fd, size - len(whole), offset + len(whole))):
                whole += piece
            return whole
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
