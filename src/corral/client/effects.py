"""What differs between the synchronous and the asynchronous client: how a call waits.

All logic of the client is written once, as coroutines over `Effects`. Under `Blocking` no effect ever suspends, so `drive` runs such
a coroutine to its end in the calling thread, without an event loop; `corral.client.aio` has the effects for asyncio.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from corral.errors import CorralError

if TYPE_CHECKING:
    import ssl
    from concurrent.futures import Future

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 90.0
"""Longer than the longest `wait` we ask for and than the pause between comments of a stream."""


@dataclass(frozen=True)
class Address:
    """Where a server listens: `host` and `port`, with `tls` or without; or the socket `name` in `directory`."""

    host: str = ""
    port: int = 0
    tls: ssl.SSLContext | None = field(default=None, compare=False)
    directory: str | None = None
    name: str = ""


class Wire(Protocol):
    """One open connection. Every method but the last two raises OSError when it is broken, or after `READ_TIMEOUT_S`."""

    async def send(self, data: bytes) -> None:
        """All of `data`."""
        ...

    async def receive(self) -> bytes:
        """The next bytes; empty at the end."""
        ...

    def waiting(self) -> bool:
        """True if bytes, or the end, have come that nobody has received."""
        ...

    def close(self) -> None:
        """Let go at once. Repeated: nothing."""
        ...


class Effects(Protocol):
    """See the module docstring. Safe to use from several threads, or from several tasks."""

    async def connect(self, address: Address) -> Wire:
        """A new connection, or OSError."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def local(self, call: Callable[..., T], *arguments: Any) -> T:
        """A call that may block for a while: the local disk, an iterator of the caller's."""
        ...

    async def settled(self, future: Future[T]) -> T:
        """What a future of another thread becomes; it is cancelled when this waiting is interrupted."""
        ...

    async def consume(self, call: Callable[[Iterator[bytes]], T], blocks: AsyncGenerator[bytes, None]) -> T:
        """`call` with the blocks as an ordinary iterator."""
        ...

    async def finish(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        """Clean-up in the middle of an interruption: waited for at most `seconds`, its errors are nobody's."""
        ...

    def place(self) -> object:
        """Connections are used again only in the same place (a process, an event loop)."""
        ...


# -- without suspending --------------------------------------------------------------------------------------------------------
LOOK_S = 0.25


def result_of(future: Future[T], timeout: float | None = None) -> T:
    """`future.result(timeout)`, waited for in short pieces.

    A signal that the kernel gives to another thread of this process does not wake a main thread that waits for a lock, and its handler
    would run when all is over.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        left = LOOK_S if until is None else min(LOOK_S, until - time.monotonic())
        try:
            return future.result(max(0.0, left))
        except TimeoutError:
            if future.done() or (until is not None and time.monotonic() >= until):
                raise


def drive(work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    """Run a coroutine whose effects are `Blocking`, to its end, here and now."""
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as done:
        result: T = done.value
        return result
    if isinstance(work, Coroutine):
        work.close()
    raise RuntimeError("a call of the synchronous client has suspended")


def iterate(source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """The same items as an ordinary generator; closing it closes the source."""
    try:
        while True:
            try:
                item = drive(source.__anext__())
            except StopAsyncIteration:
                return
            yield item
    finally:
        drive(source.aclose())


async def in_turn(items: Iterable[T], effects: Effects) -> AsyncGenerator[T, None]:
    """The items of an ordinary iterable, each made by an effect of its own."""
    source = iter(items)
    missing: Any = object()
    while (item := await effects.local(next, source, missing)) is not missing:
        yield item


class Blocking:
    """Effects of the synchronous client: plain blocking calls in the calling thread."""

    async def connect(self, address: Address) -> Wire:
        if address.directory is not None:
            return _BlockingWire(open_socket(address.directory, address.name, CONNECT_TIMEOUT_S))
        sock = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if address.tls is not None:
                sock = address.tls.wrap_socket(sock, server_hostname=address.host)
        except BaseException:
            sock.close()
            raise
        return _BlockingWire(sock, tls=address.tls is not None)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - nothing else runs here

    async def local(self, call: Callable[..., T], *arguments: Any) -> T:
        return call(*arguments)

    async def settled(self, future: Future[T]) -> T:
        try:
            return result_of(future)
        except BaseException as error:
            if future.cancelled() and isinstance(error, Exception):
                raise CorralError("shutting_down", "the service is stopping") from error
            future.cancel()
            raise

    async def consume(self, call: Callable[[Iterator[bytes]], T], blocks: AsyncGenerator[bytes, None]) -> T:
        return call(iterate(blocks))

    async def finish(self, work: Coroutine[Any, Any, object], seconds: float) -> None:
        try:
            await work
        except Exception:  # noqa: S110 - the interruption that brought us here is what the caller hears of
            pass

    def place(self) -> object:
        return os.getpid()


def open_socket(directory: str, name: str, timeout_s: float | None) -> socket.socket:
    """A connected unix socket, reached through its directory's descriptor: the path may be longer than a socket address."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = -1
    try:
        sock.settimeout(timeout_s)
        folder = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        sock.connect(f"/proc/self/fd/{folder}/{name}")
    except BaseException:
        sock.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return sock


class _BlockingWire:
    def __init__(self, sock: socket.socket, *, tls: bool = False) -> None:
        sock.settimeout(READ_TIMEOUT_S)
        self._socket = sock
        self._tls = tls
        self._came: bytes | None = None

    async def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    async def receive(self) -> bytes:
        came, self._came = self._came, None
        return self._socket.recv(BLOCK) if came is None else came

    def waiting(self) -> bool:
        if self._came is not None:
            return True
        try:
            look = select.poll()
            look.register(self._socket, select.POLLIN)
            if not self._tls:
                return bool(look.poll(0))
            if look.poll(0) or self._socket.pending():  # type: ignore[attr-defined]
                self._came = self._at_once()
        except (OSError, ValueError):
            return True
        return self._came is not None

    def _at_once(self) -> bytes | None:
        """What has come for us: under TLS the socket also has bytes that are not, such as tickets."""
        import ssl

        self._socket.settimeout(0)
        try:
            return self._socket.recv(BLOCK)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        finally:
            self._socket.settimeout(READ_TIMEOUT_S)

    def close(self) -> None:
        self._socket.close()


BLOCK = 256 * 1024


async def pieces(data: bytes | memoryview) -> AsyncGenerator[bytes, None]:
    """Bytes at hand in blocks."""
    view = memoryview(data)
    for at in range(0, len(view), BLOCK):
        yield bytes(view[at : at + BLOCK])


async def chained(first: bytes, rest: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """`first`, then the rest."""
    if first:
        yield first
    async for block in rest:
        yield block
