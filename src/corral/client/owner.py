"""Calls of the process that owns the state directory: from any thread or event loop to the owner's own, without HTTP."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from corral.client.effects import Effects
from corral.client.line import Answer, Event, Json, Params, Request
from corral.errors import CorralError

T = TypeVar("T")
AHEAD_BYTES = 1024 * 1024
AHEAD_ITEMS = 256


class Owner(Protocol):
    """What is needed of `bootstrap.Owner`."""

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run on the owner's loop; `shutting_down` when it has stopped."""
        ...

    async def dispatch(
        self,
        method: str,
        path: str,
        params: Params | None,
        headers: Mapping[str, str] | None = None,
        document: Any = None,
        body: bytes | AsyncIterator[bytes] = b"",
    ) -> Any:
        """The `Reply` of a route, or its problem raised."""
        ...


class OwnerSingle:
    """Calls of the owner itself: the routes are dispatched on the owner's event loop, without HTTP."""

    def __init__(self, owner: Owner, effects: Effects) -> None:
        self._owner = owner
        self._effects = effects

    async def send(self, request: Request) -> Answer:
        """See `Single`."""
        owner, effects = self._owner, self._effects
        headers = dict(request.headers)
        body: bytes | AsyncIterator[bytes] = request.raw or b""
        if request.blocks is None:
            call = owner.dispatch(request.method, request.path, request.params, headers, request.json, body)
            return OwnerAnswer(owner, effects, await effects.settled(owner.submit(call)))
        feed = _Feed()
        if request.size is not None:
            headers["content-length"] = str(request.size)
        sent = owner.submit(self._upload(request, headers, feed))
        try:
            async for block in request.blocks:
                if block and not await effects.settled(owner.submit(feed.put(block))):
                    break
            await effects.settled(owner.submit(feed.put(None)))
        except BaseException:
            sent.cancel()
            raise
        return OwnerAnswer(owner, effects, await effects.settled(sent))

    async def _upload(self, request: Request, headers: dict[str, str], feed: _Feed) -> Any:
        try:
            return await self._owner.dispatch(
                request.method, request.path, request.params, headers, None, feed.blocks()
            )
        finally:
            feed.close()

    def close(self) -> None:
        """The owner itself is closed by who opened it."""


class OwnerAnswer:
    """See `Answer`."""

    def __init__(self, owner: Owner, effects: Effects, reply: Any) -> None:
        self._owner = owner
        self._effects = effects
        self._reply = reply
        self._ahead: _Ahead[Any] | None = None
        self.status: int = reply.status
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in reply.headers.items()}

    async def document(self) -> Json:
        document: Json = self._reply.document or {}
        return document

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        if self._reply.raw is not None:
            async for block in self._each(self._reply.raw):
                yield block

    async def events(self) -> AsyncGenerator[Event, None]:
        if self._reply.events is None:
            raise CorralError("infra_error", "this is not a stream", retryable=False)
        async for event in self._each(self._reply.events):
            yield Event(event.kind, event.cursor, event.offset, event.data, event.doc)

    async def _each(self, source: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        self._ahead = _Ahead(source)
        while batch := await self._effects.settled(self._owner.submit(self._ahead.take())):
            for item in batch:
                yield item

    async def close(self) -> None:
        source = self._ahead or _closer(self._reply)
        if source is not None:
            try:
                self._owner.submit(source.close())
            except CorralError:
                pass  # the owner has stopped, and everything with it


def _closer(reply: Any) -> _Ahead[Any] | None:
    source = reply.raw if reply.raw is not None else reply.events
    return None if source is None else _Ahead(source)


class _Ahead(Generic[T]):
    """Lives on the owner's loop: reads some of a source ahead, so that a reader in another thread crosses over once for many items."""

    def __init__(self, source: AsyncIterator[T]) -> None:
        self._source = source
        self._items: list[T] = []
        self._bytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    async def take(self) -> list[T]:
        """All that is there, at least one; empty at the end."""
        if self._pump is None:
            self._pump = asyncio.ensure_future(self._read())
            self._pump.add_done_callback(self._ended)
        while not self._items:
            if self._pump.done():
                await self._pump
                return []
            self._news.clear()
            await self._news.wait()
        items, self._items, self._bytes = self._items, [], 0
        self._room.set()
        return items

    def _ended(self, pump: asyncio.Task[None]) -> None:
        self._news.set()
        if not pump.cancelled():
            pump.exception()  # `take` raises it; a reader who never comes back missed nothing

    async def _read(self) -> None:
        try:
            async for item in self._source:
                self._items.append(item)
                self._bytes += len(item if isinstance(item, bytes) else getattr(item, "data", b""))
                self._news.set()
                while self._bytes >= AHEAD_BYTES or len(self._items) >= AHEAD_ITEMS:
                    self._room.clear()
                    await self._room.wait()
        finally:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()

    async def close(self) -> None:
        """Stop reading."""
        if self._pump is None:
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
            return
        self._pump.cancel()
        await asyncio.wait({self._pump})


class _Feed:
    """Lives on the owner's loop: the body of an upload, whose blocks come from another thread."""

    def __init__(self) -> None:
        self._blocks: deque[bytes | None] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False

    async def put(self, block: bytes | None) -> bool:
        """One more block, None at the end; False when nobody reads on."""
        while len(self._blocks) >= 4 and not self._closed:
            self._room.clear()
            await self._room.wait()
        self._blocks.append(block)
        self._news.set()
        return not self._closed

    async def blocks(self) -> AsyncIterator[bytes]:
        """The body."""
        while True:
            while not self._blocks:
                self._news.clear()
                await self._news.wait()
            block = self._blocks.popleft()
            self._room.set()
            if block is None:
                return
            yield block

    def close(self) -> None:
        """The call is over, whether it has read everything or not."""
        self._closed = True
        self._room.set()
