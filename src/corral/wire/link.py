"""Frames on one connection: four bytes of length, then a packed list. Both sides are processes of one user (`check_peer`).

A frame is `[kind, call, ...]`; the caller counts its calls. The callee answers each with one `RESULT` or `ERROR`, after any number of
`PROGRESS`. Streams go beside it, either way: `ITEM`s, then `END` (with a problem when the source failed); the sender of a stream has
`WINDOW` bytes of credit, and gets more by `CREDIT` as the receiver's reader takes what has come: one that is slow keeps at most that much
waiting. `CANCEL` from the caller ends a call whose answer nobody wants any more. The first frame of either side is `HELLO`.

A frame longer than `WHOLE` goes as `PART`s, in turn with those of other calls and only as the peer reads: whatever is small, beats among
it, passes between them. Frames of one call keep their order.

A peer that hangs closes nothing. Who `watch`es sends a `PING` with each beat, which the other side's loop answers by `PONG` however long
its calls take; after `SILENT_BEATS` of them without a byte the connection counts as broken. Beats of our own loop are counted, not time:
one that stood still itself has not listened.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

from corral.errors import CorralError
from corral.wire.codec import pack, unpack

HELLO, CALL, RESULT, ERROR, ITEM, END, CREDIT, CANCEL, PROGRESS, PING, PONG, PART = range(12)
VERSIONS = (1, 1)
"""First and last version of the protocol that is spoken here."""
MAX_FRAME = 256 * 1024 * 1024
"""Eight times the longest body of a request. What may be longer is a stream: output, files, archives."""
BEAT_S = 5.0
SILENT_BEATS = 4
WINDOW = 256 * 1024
PIECE = 64 * 1024
"""Longer blocks of bytes are sent in pieces."""
WHOLE = 2 * PIECE
"""A longer frame is sent in parts of `PIECE`."""


class Link(asyncio.Protocol):
    """One connection. `frame` is called with each list that comes, `gone` once, when nothing more will."""

    def __init__(self, frame: Callable[[list[Any]], None], gone: Callable[[], None]) -> None:
        self._frame = frame
        self._gone = gone
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._parting: dict[int, deque[memoryview]] = {}
        """Frames that go in parts, by call; the call at the front is the next whose turn it is."""
        self._turn: asyncio.Handle | None = None
        self._parts: dict[int, bytearray] = {}
        """What has come of such frames."""
        self._silent = 0
        self._beat: asyncio.TimerHandle | None = None
        self.open = False

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.open = True
        try:
            check_peer(transport.get_extra_info("socket"))
        except PermissionError:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._silent = 0
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 4:
            length = int.from_bytes(buffer[at : at + 4], "big")
            if length > MAX_FRAME:
                self.abort()
                return
            if len(buffer) - at - 4 < length:
                break
            try:
                self._take(unpack(bytes(memoryview(buffer)[at + 4 : at + 4 + length])))
            except (ValueError, TypeError, IndexError, KeyError):  # not of our protocol
                self.abort()
                return
            at += 4 + length
        del buffer[:at]

    def _take(self, frame: list[Any]) -> None:
        if frame[0] == PING:
            self.send(PONG, 0)
        elif frame[0] == PART:
            _, number, last, data = frame
            joined = self._parts.setdefault(number, bytearray())
            joined += data
            if len(joined) > MAX_FRAME:
                raise ValueError("a frame that is too long")
            if last:
                self._frame(unpack(self._parts.pop(number)))
        elif frame[0] != PONG:
            self._frame(frame)

    def pause_writing(self) -> None:
        self._flowing.clear()

    def resume_writing(self) -> None:
        self._flowing.set()
        self._next_turn()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        for timer in (self._beat, self._turn):
            if timer is not None:
                timer.cancel()
        self._parting.clear()
        self._parts.clear()
        self._flowing.set()
        self._gone()

    # -- ours --------------------------------------------------------------------------------------------------------------
    @property
    def flowing(self) -> bool:
        """What is sent now does not have to wait for the peer."""
        return self.open and self._flowing.is_set()

    def send(self, *frame: Any) -> None:
        """Send a frame; nothing on a connection that is gone. TypeError for what has no form on the wire.

        `infra_error` for one that is too long: sent, it would end the connection with all calls on it, and again when it is repeated.
        """
        packed = pack(list(frame))
        if len(packed) > MAX_FRAME:
            raise CorralError(
                "infra_error",
                f"{len(packed)} bytes at once do not go over the node's socket, at most {MAX_FRAME} do",
                hint="ask for less at a time",
                retryable=False,
            )
        number = frame[1]
        if not self.open:
            return
        if len(packed) <= WHOLE and number not in self._parting:
            self._write(packed)
            return
        self._parting.setdefault(number, deque()).append(memoryview(packed))
        self._next_turn()

    def _write(self, packed: bytes) -> None:
        if self._transport is not None:
            self._transport.write(len(packed).to_bytes(4, "big") + packed)

    def _next_turn(self) -> None:
        # One part in each turn of the loop, so that what others have to say meanwhile is said, however quickly the peer reads.
        if self._parting and self._turn is None and self.flowing:
            self._turn = asyncio.get_running_loop().call_soon(self._send_part)

    def _send_part(self) -> None:
        self._turn = None
        if not self._parting or not self.flowing:
            return
        number = next(iter(self._parting))
        frames = self._parting.pop(number)
        rest = frames.popleft()
        piece, rest = rest[:PIECE], rest[PIECE:]
        self._write(pack([PART, number, not rest, bytes(piece)]))
        if rest:
            frames.appendleft(rest)
        if frames:
            self._parting[number] = frames
        self._next_turn()

    def watch(self) -> None:
        """From now on a peer that says nothing at all is gone."""
        self._beat = asyncio.get_running_loop().call_later(BEAT_S, self._beats)

    def _beats(self) -> None:
        if self._silent >= SILENT_BEATS:
            self.abort()
        elif self.open:
            self._silent += 1
            self.send(PING, 0)
            self.watch()

    async def flows(self) -> None:
        """Wait while the peer does not read."""
        await self._flowing.wait()

    def close(self) -> None:
        """Send what is waiting, then end."""
        for number, frames in self._parting.items():
            for rest in frames:
                for at in range(0, len(rest), PIECE):
                    self._write(pack([PART, number, at + PIECE >= len(rest), bytes(rest[at : at + PIECE])]))
        self._parting.clear()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End at once."""
        if self._transport is not None:
            self._transport.abort()


def check_peer(sock: socket.socket) -> None:
    """PermissionError unless the process at the other end runs as our user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = struct.unpack("3i", raw)[1]
    if uid != os.geteuid():
        raise PermissionError(f"the other end of the node's socket belongs to user {uid}")


def agreed(theirs: Any) -> int:
    """The newest version that both speak; `node_unavailable` when there is none."""
    first, last = theirs
    version = min(VERSIONS[1], int(last))
    if version < max(VERSIONS[0], int(first)):
        raise CorralError(
            "node_unavailable",
            f"the node speaks versions {first} to {last} of the protocol, this process {VERSIONS[0]} to {VERSIONS[1]}",
            hint="restart corral serve, so that all its processes are of one version",
            retryable=False,
        )
    return version


class Credit:
    """What a sender of a stream may still send."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._given = asyncio.Event()
        self._over = False

    async def wait(self) -> bool:
        """Until something may be sent; False when nothing will be read any more."""
        while self._left <= 0 and not self._over:
            self._given.clear()
            await self._given.wait()
        return not self._over

    def spend(self, size: int) -> None:
        """So much was sent; the last frame may go over."""
        self._left -= size

    def give(self, size: int) -> None:
        """The receiver has taken so much."""
        self._left += size
        self._given.set()

    def end(self) -> None:
        """Nobody reads any more."""
        self._over = True
        self._given.set()


class Inflow:
    """The receiving end of a stream: an iterator; `grant(bytes)` is called as they are taken."""

    def __init__(self, grant: Callable[[int], None]) -> None:
        self._grant = grant
        self._items: deque[tuple[Any, int]] = deque()
        self._came = asyncio.Event()
        self._ended = False
        self._error: BaseException | None = None
        self._taken = 0

    def put(self, item: Any, size: int) -> None:
        """One more has come."""
        if not self._ended:
            self._items.append((item, size))
            self._came.set()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes: the end, or a failure, after what is here."""
        if not self._ended:
            self._ended, self._error = True, error
            self._came.set()

    def __aiter__(self) -> Inflow:
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            if self._ended:
                if (error := self._error) is not None:
                    self._error = None
                    raise error
                raise StopAsyncIteration
            self._came.clear()
            await self._came.wait()
        item, size = self._items.popleft()
        self._taken += size
        if self._taken >= WINDOW // 4 and not self._ended:
            self._grant(self._taken)
            self._taken = 0
        return item
