"""The wire: the table of `routes` as an ASGI application without a framework.

Every owner serves it on the state directory's socket, `corral serve` on TCP as well; it is quick to import, because other processes
wait for that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from corral.api import sse
from corral.api.auth import Gate, Watch, refused
from corral.api.keys import AdminKey
from corral.api.pieces import encoded, written
from corral.api.problems import problem, read_body
from corral.api.routes import Reply, Request, dispatch
from corral.api.turns import Turns
from corral.domain.discretion import Discretion
from corral.errors import CorralError
from corral.services.control import Services
from corral.services.events import Caller

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DRAIN_BYTES = 256 * 1024 * 1024
DRAIN_S = 10.0
STRANGER_BYTES, STRANGER_S = 1024 * 1024, 1.0
NOBODY = Caller(owner="nobody", scopes=frozenset())
"""Who has not shown a key."""
TO_STRANGERS = Discretion(())
ONCE = (b"authorization", b"corral-lease", b"idempotency-key")
"""Headers of which a call has one, or it is not clear what it asks for."""
OPEN_TO_ALL = ("/healthz", "/readyz")
STREAMED = ("PUT",)
"""Methods whose handler reads the body itself, block by block."""


MAX_TARGET = 16 * 1024
"""Bytes of path and query together."""
MAX_HEADERS = 64 * 1024
BODY_PAUSE_S = 30.0
"""How long a client may pause while it sends a body, before it is taken for gone or for one who only holds the line."""
BODY_S = 300.0
"""How long a body that is read as a whole may take."""
BODIES = 256 * 1024 * 1024
"""Bytes of bodies that are held in memory at once, over all calls."""


class Application:
    """`await application(scope, receive, send)`. With `key`, all but the health checks need `Authorization: Bearer KEY`.

    KEY is that one, or one of the store, or a token of the configured issuer.
    """

    def __init__(self, services: Services, key: AdminKey | None = None) -> None:
        self._services = services
        self._gate = Gate(services, key)
        self.calls: set[asyncio.Task[Any]] = set()
        """Those that are under way."""
        self.transfers: dict[asyncio.Task[Any], int] = {}
        """Those of them that carry bytes which no client can ask for again from the middle; -> blocks so far."""
        self.transfers_over = False
        """Set by who has seen the last one end and stops now: none begins any more, the caller is sent to the next owner."""
        self._held = 0
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP call or one WebSocket."""
        if scope["type"] not in ("http", "websocket"):
            raise RuntimeError(f"not served: {scope['type']}")
        task = asyncio.current_task()
        assert task is not None
        self.calls.add(task)
        try:
            await (self._call if scope["type"] == "http" else self._socket)(scope, receive, send)
        finally:
            self.calls.discard(task)
            self.transfers.pop(task, None)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _request(scope, receive)
        head = request.method == "HEAD"
        refusal, caller = await self._entered(scope, request)
        if refusal is not None:
            unread = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
            if unread:
                await _drain(receive, STRANGER_BYTES, STRANGER_S)
            await _answer(_problem(refusal, close=unread), receive, send, head, self._turns)
            return
        if caller.ends:
            with self._watched(request, receive, "http.disconnect") as watch:
                request = replace(request, caller=caller, body=_Body(watch.receive))
                await self._answered(request, watch.receive, send, watch)
        else:
            await self._answered(replace(request, caller=caller), receive, send, None)

    async def _answered(self, request: Request, receive: Receive, send: Send, watch: Watch | None) -> None:
        head = request.method == "HEAD"
        reply = await self._reply(request, receive)
        if watch is not None and watch.over:
            if reply is not None:
                await _close(reply.raw if reply.raw is not None else reply.events)
            await _answer(_problem(refused(), close=True), watch.waiting, send, head, self._turns)
            return
        if reply is None:
            return
        raw = reply.raw
        if raw is not None and request.query.get("follow", "false") in ("false", "0"):
            if self.transfers_over:
                await _close(raw)
                reply = _problem(_stopping(), close=True)
            else:
                reply = replace(reply, raw=self._transfer(raw))
        whole = await _answer(reply, receive, send, head, self._turns)
        if not whole and watch is not None and watch.over:
            if whole is None:
                await _answer(_problem(refused(), close=True), watch.waiting, send, head, self._turns)
                return
            if reply.events is None:
                raise refused()  # what was sent so far must not look like all there is
            last = f"event: error\ndata: {json.dumps(refused().to_problem())}\n\n".encode()
            await send({"type": "http.response.body", "body": last})

    def _transfer(self, blocks: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The same blocks, counted; from now on the call is a transfer."""
        task = asyncio.current_task()
        assert task is not None and not isinstance(blocks, bytes)
        self.transfers[task] = 0

        async def counted() -> AsyncIterator[bytes]:
            try:
                async for block in blocks:
                    self.transfers[task] = self.transfers.get(task, 0) + 1
                    yield block
            finally:
                await _close(blocks)

        return counted()

    async def _entered(self, scope: Scope, request: Request) -> tuple[CorralError | None, Caller]:
        """Who calls, or what can be said without looking at the body."""
        names = [name for name, _ in scope["headers"]]
        if any(names.count(name) > 1 for name in ONCE) or (
            b"content-length" in names and b"transfer-encoding" in names
        ):
            # A proxy in front may have read the other one.
            detail, hint = "two keys, two leases, or two lengths of the body", "send one of each"
            return CorralError("bad_request", detail, hint=hint), NOBODY
        caller = NOBODY
        if request.path not in OPEN_TO_ALL:
            try:
                caller = await self._gate.caller(request, (scope.get("client") or ("",))[0])
            except CorralError as error:
                return TO_STRANGERS.error(error), NOBODY
        if len(request.path) + len(scope.get("query_string", b"")) > MAX_TARGET:
            hint = "what is long belongs into the body"
            return CorralError("url_too_long", f"the URL has more than {MAX_TARGET} bytes", hint=hint), NOBODY
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADERS:
            detail, hint = f"the headers have more than {MAX_HEADERS} bytes", "what is long belongs into the body"
            return CorralError("headers_too_large", detail, hint=hint), NOBODY
        return None, caller

    @contextmanager
    def _watched(self, request: Request, receive: Receive, gone: str) -> Iterator[Watch]:
        watch = Watch(receive, lambda: self._gate.still(request), gone)
        try:
            yield watch
        finally:
            watch.close()

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        from corral.api.websocket import serve

        request = _request({**scope, "method": "GET"}, receive)
        refusal, caller = await self._entered(scope, request)
        request = replace(request, caller=caller)
        if not caller.ends:
            await serve(self._services, request, refusal, receive, send, self._turns)
            return
        with self._watched(request, receive, "websocket.disconnect") as watch:
            await serve(self._services, request, refusal, watch.receive, send, self._turns)
            if watch.over:
                with suppress(OSError, RuntimeError):  # it may have gone, or never have begun
                    await send({"type": "websocket.close", "code": 1008, "reason": "unauthorized"})

    async def _reply(self, request: Request, receive: Receive) -> Reply | None:
        """The answer; None when the client went away, which ends the waiting, not the work."""
        if request.method in STREAMED:
            if self.transfers_over:
                return _problem(_stopping(), close=True)
            reply = await dispatch(self._services, replace(request, body=self._transfer(request.body)))
            if isinstance(request.body, _Body) and not request.body.over:  # refused in the middle
                await _drain(receive)
                return replace(reply, headers={**reply.headers, "Connection": "close"})
            return reply
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if self._held + size > BODIES:
                raise CorralError("overloaded", "too many large requests at once", hint="try again in a moment")
            held += size
            self._held += size

        try:
            try:
                async with asyncio.timeout(BODY_S):
                    request = replace(request, body=await read_body(_counted(request.body, hold)))
            except TimeoutError:
                return _problem(_slow(BODY_S), close=True)
            except CorralError as error:
                if error.code != "request_timeout":
                    await _drain(receive)
                return _problem(error, close=True)
            work = asyncio.ensure_future(dispatch(self._services, request))
            left = asyncio.ensure_future(_left(receive))
            try:
                await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
                return work.result() if work.done() else None
            finally:
                work.cancel()
                left.cancel()
                await asyncio.gather(work, left, return_exceptions=True)
        finally:
            self._held -= held


async def _counted(body: bytes | AsyncIterator[bytes], hold: Callable[[int], None]) -> AsyncIterator[bytes]:
    if isinstance(body, bytes):
        yield body
        return
    async for block in body:
        hold(len(block))
        yield block


def _stopping() -> CorralError:
    return CorralError("shutting_down", "the service is stopping")


def _slow(seconds: float) -> CorralError:
    return CorralError("request_timeout", f"the body did not come within {seconds:.0f} s", hint="send it again")


def _problem(error: CorralError, *, close: bool = False) -> Reply:
    status, document, headers = problem(error)
    if close:
        headers = {**headers, "Connection": "close"}
    return Reply(status, document, headers, media_type="application/problem+json")


async def _drain(receive: Receive, most: int = DRAIN_BYTES, seconds: float = DRAIN_S) -> None:
    """Read on and forget, for a while: an answer that is sent while the client still writes is lost when we close."""
    left = most
    try:
        async with asyncio.timeout(seconds):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _request(scope: Scope, receive: Receive) -> Request:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return Request(
        scope["method"],
        raw.partition(b"?")[0].decode("ascii", "surrogateescape"),
        _query(scope.get("query_string", b"")),
        {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]},
        _Body(receive),
        caller=Caller(),
        pieces=True,
    )


def _query(raw: bytes) -> dict[str, str]:
    if not raw:
        return {}
    from urllib.parse import parse_qsl

    text = raw.decode("ascii", "surrogateescape")
    return dict(parse_qsl(text, keep_blank_values=True, encoding="utf-8", errors="surrogateescape"))


class _Body:
    """The blocks of a request's body; `over` when nothing more will come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.over = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self.over:
            try:
                async with asyncio.timeout(BODY_PAUSE_S):
                    message = await self._receive()
            except TimeoutError as error:
                raise _slow(BODY_PAUSE_S) from error
            if message["type"] == "http.disconnect":
                self.over = True
                raise CorralError("bad_request", "the client went away while it sent the body")
            self.over = not message.get("more_body", False)
            if block := message.get("body", b""):
                return bytes(block)
        raise StopAsyncIteration


async def _answer(reply: Reply, receive: Receive, send: Send, head: bool, turns: Turns) -> bool | None:
    """A `Reply` on the wire, without its body for HEAD.

    -> whether all of it was sent; None when nothing was, because the client went away before there was anything.
    """
    headers = [(b"content-type", reply.media_type.encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in reply.headers.items()]
    if reply.raw is None and reply.events is None:
        body, parts = (b"", []) if reply.document is None else encoded(reply.document)
        if parts:
            return await _answer(replace(reply, document=None, raw=written(parts)), receive, send, head, turns)
        if not any(name == b"content-length" for name, _ in headers):  # an answer to HEAD says how long it would be
            headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if head else body})
        return True
    if reply.events is not None:
        headers.append((b"cache-control", b"no-store"))
    source = reply.raw if reply.raw is not None else _wire(reply, turns)
    if head:
        await _close(reply.raw if reply.raw is not None else reply.events)
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return True
    first = b""
    if reply.raw is not None:  # so that an error before the first byte is an answer with its own status
        begun, left = asyncio.ensure_future(_next(source)), asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({begun, left}, return_when=asyncio.FIRST_COMPLETED)
            if not begun.done():
                return None
            first = begun.result()
        except CorralError as error:
            return await _answer(_problem(reply.seen(error)), receive, send, head, turns)
        finally:
            left.cancel()
            begun.cancel()
            await asyncio.gather(left, begun, return_exceptions=True)
            if not begun.done() or begun.cancelled():
                await _close(source)
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    left = asyncio.ensure_future(_left(receive))
    pump = asyncio.ensure_future(_pump(source, first, send, turns if reply.events is None else None))
    try:
        await asyncio.wait({left, pump}, return_when=asyncio.FIRST_COMPLETED)
        if pump.done():
            pump.result()
        return pump.done()
    finally:
        left.cancel()
        pump.cancel()
        await asyncio.gather(left, pump, return_exceptions=True)


async def _next(source: AsyncIterator[bytes]) -> bytes:
    return await anext(source, b"")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pump(source: AsyncIterator[bytes], first: bytes, send: Send, turns: Turns | None) -> None:
    """`turns` None: each block has had its turn already, before it was encoded."""
    try:
        if first:
            await send({"type": "http.response.body", "body": first, "more_body": True})
        async for block in source:
            if turns is not None:
                await turns.take()
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        await _close(source)


async def _close(source: Any) -> None:
    close = getattr(source, "aclose", None)
    if close is not None:
        await close()


async def _wire(reply: Reply, turns: Turns) -> AsyncIterator[bytes]:
    """Events encoded, with a comment every 15 s; an error in the middle becomes a last event `error`."""
    assert reply.events is not None
    source = reply.events
    pending: asyncio.Future[Any] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(source, None))
            done, _ = await asyncio.wait({pending}, timeout=sse.KEEP_ALIVE_S)
            if not done:
                yield sse.KEEP_ALIVE
                continue
            try:
                event = pending.result()
            except CorralError as failure:
                error = reply.seen(failure)
                retry = f"retry: {sse.RETRY_MS}\n" if error.retryable else ""
                yield f"event: error\n{retry}data: {json.dumps(error.to_problem())}\n\n".encode()
                return
            pending = None
            if event is None:
                return
            await turns.take()
            yield sse.encode(event, text=reply.text)
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await _close(source)
