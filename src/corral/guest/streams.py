"""Buffers of an exec: output with offsets until it is acknowledged, input until the program takes it."""

from __future__ import annotations

import os

from corral.guest import protocol
from corral.guest.requests import Refusal

MAX_CHUNKS = 2048
MAX_CHUNK = 64 * 1024


class Stream:
    """Bytes of one output that nobody has acknowledged yet: `[base, end)`, in chunks with a time stamp each."""

    __slots__ = ("_chunks", "base", "end", "fd", "name", "open")

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.open = fd >= 0
        self.base = 0
        self.end = 0
        self._chunks: list[tuple[int, int, bytearray]] = []

    @property
    def full(self) -> bool:
        return self.end - self.base >= protocol.WINDOW

    def append(self, t_ms: int, data: bytes) -> None:
        chunks = self._chunks
        if chunks:
            _, last_ms, last = chunks[-1]
            # Many tiny writes: coarser time stamps rather than memory without bound.
            if (last_ms == t_ms or len(chunks) >= MAX_CHUNKS) and len(last) + len(data) <= MAX_CHUNK:
                last += data
                self.end += len(data)
                return
        chunks.append((self.end, t_ms, bytearray(data)))
        self.end += len(data)

    def acknowledge(self, offset: int) -> None:
        if offset > self.end:
            raise Refusal("bad_request", "acknowledged what was never written")
        if offset > self.base:
            self.base = offset
            drop = self._find(offset)
            if drop:
                del self._chunks[:drop]

    def piece(self, offset: int) -> tuple[int, memoryview]:
        """(t_ms, bytes) from `offset`, which must lie in `[base, end)`: at most one frame's worth."""
        start, t_ms, data = self._chunks[self._find(offset)]
        at = offset - start
        # A copy: the chunk may grow while the frame waits.
        return t_ms, memoryview(bytes(data[at : at + protocol.MAX_DATA]))

    def _find(self, offset: int) -> int:
        """Index of the chunk that holds `offset` (the count of chunks when it is the end)."""
        low, high = 0, len(self._chunks)
        while low < high:
            middle = (low + high) // 2
            start, _, data = self._chunks[middle]
            if start + len(data) <= offset:
                low = middle + 1
            else:
                high = middle
        return low


class Input:
    """Standard input on its way: received bytes that the program has not taken yet."""

    __slots__ = ("buffer", "eof", "fd", "pty", "received", "reported", "written")

    def __init__(self, fd: int, pty: bool) -> None:
        self.fd = fd
        self.pty = pty
        self.buffer = bytearray()
        self.received = 0
        self.written = 0
        self.reported = 0
        self.eof = False

    def facts(self) -> dict[str, int]:
        return {"received": self.received, "written": self.written, "open": int(self.fd >= 0)}


def pipes(count: int) -> list[tuple[int, int]]:
    """All of them or, with OSError, none."""
    made: list[tuple[int, int]] = []
    try:
        for _ in range(count):
            made.append(os.pipe2(os.O_CLOEXEC))
    except OSError:
        for fd in sum(made, ()):
            os.close(fd)
        raise
    return made
