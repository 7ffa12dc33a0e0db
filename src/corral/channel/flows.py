"""What is under way for one exec: output that came and was not taken yet, input that was sent and not read yet."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from corral.channel.answers import ExecStatus, Stream, Violation
from corral.guest import protocol

MERGE_ABOVE = 512
"""Pieces of output that may wait before tiny ones are merged whatever their time."""


class Attached:
    """One exec that is being followed: what came and was not taken yet."""

    def __init__(self, number: int, exec_id: str, streams: dict[Stream, int], offsets: dict[Stream, int]) -> None:
        self.number = number
        self.exec_id = exec_id
        self.streams = streams
        self.next = dict(offsets)
        self.taken = dict(offsets)
        self.acked = dict(offsets)
        self.queue: deque[tuple[Stream, int, int, bytearray]] = deque()
        self.news = asyncio.Event()
        self.ended: ExecStatus | None = None
        self.leaving = False
        self.superseded = False

    def add(self, name: Stream, offset: int, t_ms: int, data: bytes, window: int) -> None:
        if offset != self.next[name]:
            raise Violation("output at a wrong offset")
        if self.ended is not None:
            raise Violation("output after the end")
        self.next[name] = offset + len(data)
        if self.leaving:
            # Sent before the guest knew that nobody wants it; no more than it may have had on the way.
            if self.next[name] - self.acked[name] > window:
                raise Violation("more output than the window allows")
            return
        if self.next[name] - self.acked[name] > window:
            raise Violation("more output than the window allows")
        if self.queue:
            last_name, _, last_ms, last = self.queue[-1]
            # Tiny frames are merged so that their number costs no memory.
            if (
                last_name == name
                and (last_ms == t_ms or len(self.queue) >= MERGE_ABOVE)
                and len(last) + len(data) <= protocol.MAX_DATA
            ):
                last += data
                self.news.set()
                return
        if len(self.queue) >= 4 * MERGE_ABOVE:
            raise Violation("more pieces of output than are reasonable")
        self.queue.append((name, offset, t_ms, bytearray(data)))
        self.news.set()


class Input:
    """Standard input of one exec: how much was sent and taken."""

    def __init__(self, offset: int, written: int, open_: bool) -> None:
        self.sent = offset
        self.written = written
        self.open = open_
        self.lock = asyncio.Lock()
        self.moved = asyncio.Event()

    def reads(self) -> bool:
        return self.open

    def close(self) -> None:
        """The program is over: whoever waits for it to read waits no more."""
        self.open = False
        self.moved.set()

    def take(self, written: int, open_: bool) -> None:
        if written > self.sent or written < self.written:
            raise Violation("the program took more input than there was")
        self.written = written
        self.open = self.open and open_
        self.moved.set()


class Budget:
    """So many frames in a second, a quarter of that at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._left = rate / 4
        self._at = time.monotonic()

    def spend(self, count: int) -> float:
        """-> seconds until there is a budget again."""
        now = time.monotonic()
        self._left = min(self._rate / 4, self._left + (now - self._at) * self._rate) - count
        self._at = now
        return max(0.0, -self._left / self._rate)


def first_piece(rest: memoryview) -> memoryview:
    """Of input: at most one frame's worth, never with the resync mark inside a frame."""
    piece = rest[: protocol.MAX_DATA]
    at = bytes(piece).find(protocol.MAGIC)
    return piece if at < 0 else rest[: at + 8]


def forget_closed(inputs: dict[str, Input], most: int) -> None:
    """The oldest of them: they stay a while, as the guest's last word about them may still be on its way."""
    for exec_id in [name for name, known in inputs.items() if not known.open][:most]:
        del inputs[exec_id]
