"""Effects for asyncio: connections belong to the event loop, what another loop does is awaited, the local disk is read in threads."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from corral.client.effects import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, Address, Wire, open_socket
from corral.errors import CorralError

T = TypeVar("T")
HIGH = 1024 * 1024
"""A connection with so many bytes that nobody has received is not read on."""


class Loop:
    """`Effects` of whichever event loop is running."""

    def __init__(self) -> None:
        self._finishing: set[asyncio.Task[object]] = set()

    async def connect(self, address: Address) -> Wire:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if address.directory is not None:
                sock = open_socket(address.directory, address.name, 0.0)
                _, wire = await loop.create_connection(_LoopWire, sock=sock)
                return wire
            _, wire = await loop.create_connection(
                _LoopWire,
                address.host,
                address.port,
                ssl=address.tls,
                server_hostname=address.host if address.tls is not None else None,
                happy_eyeballs_delay=0.25,
            )
        return wire

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def local(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(call, *arguments)

    async def settled(self, future: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise CorralError("shutting_down", "the service is stopping") from None
            raise

    async def consume(self, call: Callable[[Iterator[bytes]], T], blocks: AsyncGenerator[bytes, None]) -> T:
        loop = asyncio.get_running_loop()
        source = _Handed(blocks, loop)
        work = loop.run_in_executor(None, call, source)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            source.stop()
            await asyncio.wait({work})
            work.exception()
            raise
        finally:
            await blocks.aclose()

    async def finish(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finished)
        await asyncio.wait({task}, timeout=seconds)

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._finishing.discard(task)
        if not task.cancelled():
            task.exception()  # nobody's: the interruption that brought us here is what the caller hears of

    def place(self) -> object:
        return os.getpid(), asyncio.get_running_loop()


class _Handed(Iterator[bytes]):
    """Blocks of an event loop for a thread that iterates over them."""

    def __init__(self, blocks: AsyncGenerator[bytes, None], loop: asyncio.AbstractEventLoop) -> None:
        self._blocks = blocks
        self._loop = loop
        self._guard = threading.Lock()
        self._pending: Future[bytes | None] | None = None
        self._stopped = False

    def __next__(self) -> bytes:
        with self._guard:
            if self._stopped:
                raise CorralError("cancelled", "the transfer was cancelled")
            self._pending = asyncio.run_coroutine_threadsafe(self._step(), self._loop)
        block = self._pending.result()
        if block is None:
            raise StopIteration
        return block

    async def _step(self) -> bytes | None:
        return await anext(self._blocks, None)

    def stop(self) -> None:
        """The thread gets no more, at once."""
        with self._guard:
            self._stopped = True
            if self._pending is not None:
                self._pending.cancel()


class _LoopWire(asyncio.Protocol):
    """A `Wire` on an event loop. Bounded both ways: it stops reading, and waits to write, when the other side is slower."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._came: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._paused = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._full = False

    # -- called by the loop ------------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._came.append(data)
        self._size += len(data)
        if self._size >= HIGH and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> None:
        self._ended = True
        _wake(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._error = exc
        self._transport = None
        _wake(self._reader)
        _wake(self._writer)

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        _wake(self._writer)

    # -- called by the client ----------------------------------------------------------------------------------------------------
    async def send(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise self._lost()
        self._transport.write(data)
        if self._full:
            async with asyncio.timeout(READ_TIMEOUT_S):
                while self._full and self._transport is not None:
                    self._writer = self._loop.create_future()
                    await self._writer
        else:
            # A peer that takes everything at once never fills the buffer: without a turn for the loop, neither its early answer nor any other task
            # would be seen before the end of the upload.
            await asyncio.sleep(0)
        if self._transport is None:
            raise self._lost()

    async def receive(self) -> bytes:
        if not self._came and not self._ended:
            async with asyncio.timeout(READ_TIMEOUT_S):
                while not self._came and not self._ended:
                    self._reader = self._loop.create_future()
                    await self._reader
        if self._came:
            block = self._came.popleft()
            self._size -= len(block)
            if self._paused and self._size < HIGH // 2 and self._transport is not None:
                self._paused = False
                self._transport.resume_reading()
            return block
        if self._error is not None:
            raise self._lost()
        return b""

    def waiting(self) -> bool:
        return bool(self._came) or self._ended or self._transport is None

    def close(self) -> None:
        self._ended = True
        transport, self._transport = self._transport, None
        if transport is not None and not self._loop.is_closed():
            transport.abort()

    def _lost(self) -> OSError:
        error = self._error
        return error if isinstance(error, OSError) else ConnectionResetError(str(error or "the connection is closed"))


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
