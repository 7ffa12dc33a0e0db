"""A channel without connections: two pipes, and a resync in place of a connect. Looks to the client like a transport of asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Protocol

from corral.guest import protocol

_READ = 256 * 1024


class PipeEnds(Protocol):
    """The host's ends, not blocking and nobody else's until `close` (`corral.linux.fifos.Ends`)."""

    @property
    def to_guest(self) -> int: ...

    @property
    def from_guest(self) -> int: ...

    def close(self) -> None: ...


class Receiver(asyncio.Protocol):
    """What a transport delivers, to two functions."""

    def __init__(self, arrived: Callable[[bytes], None], ended: Callable[[Exception | None], None]) -> None:
        self._arrived = arrived
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        self._arrived(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended(error)


class PipeTransport:
    """Bytes over two pipes, once `resync` has answered. What the receiver is told is what a stream transport would tell it."""

    def __init__(self, ends: PipeEnds, receiver: asyncio.Protocol) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends = ends
        self._receiver = receiver
        self._read_fd = ends.from_guest
        self._write_fd = ends.to_guest
        self._out = bytearray()
        self._closed = False
        self._paused = False
        self._answer = b""
        self._seen = b""
        self._patience = 0
        self._synced: asyncio.Future[None] = self._loop.create_future()

    async def resync(self, patience: int) -> None:
        """Have the guest begin anew; what came from it before its answer was not for us. At most `patience` bytes of that."""
        self._answer = protocol.MAGIC + os.urandom(protocol.NONCE)
        self._patience = patience
        self._loop.add_reader(self._read_fd, self._readable)
        self.write(self._answer)
        await self._synced

    def write(self, data: bytes) -> None:
        if self._closed:
            return
        waits = bool(self._out)
        self._out += data
        if not waits and not self._flush() and not self._closed:
            self._loop.add_writer(self._write_fd, self._writable)

    def get_write_buffer_size(self) -> int:
        return len(self._out)

    def pause_reading(self) -> None:
        if not self._closed and not self._paused:
            self._paused = True
            self._loop.remove_reader(self._read_fd)

    def resume_reading(self) -> None:
        if not self._closed and self._paused:
            self._paused = False
            self._loop.add_reader(self._read_fd, self._readable)

    def abort(self) -> None:
        """Let go at once: others may connect when this returns."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._read_fd)
        self._loop.remove_writer(self._write_fd)
        self._out.clear()
        self._ends.close()
        if not self._synced.done():
            self._synced.set_exception(ConnectionError("the pipes were given up"))
            self._synced.exception()  # nobody may be waiting any more

    def _fail(self, error: Exception | None) -> None:
        if not self._closed:
            self.abort()
            self._receiver.connection_lost(error)

    def _flush(self) -> bool:
        """True when nothing is left to write, now or ever."""
        try:
            while self._out:
                count = os.write(self._write_fd, self._out)
                del self._out[:count]
        except BlockingIOError:
            return False
        except OSError as error:
            # Who writes is in the middle of something: it is told afterwards.
            self._loop.call_soon(self._fail, error)
        return True

    def _writable(self) -> None:
        if self._flush() and not self._closed:
            self._loop.remove_writer(self._write_fd)

    def _readable(self) -> None:
        try:
            data = os.read(self._read_fd, _READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
            return
        if not data:
            self._fail(None)
            return
        if not self._synced.done():
            data = self._seen + data
            at = data.find(self._answer)
            if at < 0:
                self._seen = data[1 - len(self._answer) :]
                self._patience -= len(data) - len(self._seen)
                if self._patience < 0:
                    self._fail(ConnectionError("it floods the pipe instead of answering the resync"))
                return
            self._seen = b""
            self._synced.set_result(None)
            data = data[at + len(self._answer) :]
        if data:
            self._receiver.data_received(data)
