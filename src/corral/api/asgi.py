"""The wire: the table of `routes` as an ASGI application without a framework.

Every owner serves it on the state directory's socket, `corral serve` on TCP as well; it is quick to import, because other processes
wait for that.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any

from corral.api import sse
from corral.api.keys import AdminKey
from corral.api.problems import problem, read_body
from corral.api.routes import Reply, Request, dispatch
from corral.errors import CorralError
from corral.services.control import Services
from corral.services.events import Caller

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

DRAIN_BYTES = 256 * 1024 * 1024
DRAIN_S = 10.0
OPEN_TO_ALL = ("/healthz", "/readyz")
STREAMED = ("PUT",)
"""Methods whose handler reads the body itself, block by block."""


class Application:
    """`await application(scope, receive, send)`. With `key`, all but the health checks need `Authorization: Bearer KEY`."""

    def __init__(self, services: Services, key: AdminKey | None = None) -> None:
        self._services = services
        self._key = key
        self.calls: set[asyncio.Task[Any]] = set()
        """Those that are under way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP call; anything else is refused."""
        if scope["type"] != "http":
            raise RuntimeError(f"not served: {scope['type']}")
        task = asyncio.current_task()
        assert task is not None
        self.calls.add(task)
        try:
            await self._call(scope, receive, send)
        finally:
            self.calls.discard(task)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _request(scope, receive)
        if (
            self._key is not None
            and request.path not in OPEN_TO_ALL
            and not self._key.accepts(request.headers.get("authorization", ""))
        ):
            refusal = CorralError("unauthorized", "the key is missing or wrong", hint="set CORRAL_KEY")
            await _answer(_problem(refusal), receive, send)
            return
        reply = await self._reply(request, receive)
        if reply is not None:
            await _answer(reply, receive, send)

    async def _reply(self, request: Request, receive: Receive) -> Reply | None:
        """The answer; None when the client went away, which ends the waiting, not the work."""
        if request.method in STREAMED:
            return await dispatch(self._services, request)
        try:
            request = replace(request, body=await read_body(request.body))
        except CorralError as error:
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


def _problem(error: CorralError, *, close: bool = False) -> Reply:
    status, document, headers = problem(error)
    if close:
        headers = {**headers, "Connection": "close"}
    return Reply(status, document, headers, media_type="application/problem+json")


async def _drain(receive: Receive) -> None:
    """Read on and forget, for a while: an answer that is sent while the client still writes is lost when we close."""
    left = DRAIN_BYTES
    try:
        async with asyncio.timeout(DRAIN_S):
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
        _body(receive),
        caller=Caller(),
    )


def _query(raw: bytes) -> dict[str, str]:
    if not raw:
        return {}
    from urllib.parse import parse_qsl

    text = raw.decode("ascii", "surrogateescape")
    return dict(parse_qsl(text, keep_blank_values=True, encoding="utf-8", errors="surrogateescape"))


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CorralError("bad_request", "the client went away while it sent the body")
        if block := message.get("body", b""):
            yield block
        if not message.get("more_body", False):
            return


async def _answer(reply: Reply, receive: Receive, send: Send) -> None:
    """A `Reply` on the wire. JSON is ASCII, so that lone surrogates of foreign paths survive."""
    headers = [(b"content-type", reply.media_type.encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in reply.headers.items()]
    if reply.raw is None and reply.events is None:
        body = b"" if reply.document is None else json.dumps(reply.document, separators=(",", ":")).encode()
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return
    if reply.events is not None:
        headers.append((b"cache-control", b"no-store"))
    source = reply.raw if reply.raw is not None else _wire(reply)
    first = b""
    if reply.raw is not None:  # so that an error before the first byte is an answer with its own status
        try:
            first = await anext(source, b"")
        except CorralError as error:
            await _answer(_problem(error), receive, send)
            return
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    left = asyncio.ensure_future(_left(receive))
    pump = asyncio.ensure_future(_pump(source, first, send))
    try:
        await asyncio.wait({left, pump}, return_when=asyncio.FIRST_COMPLETED)
        if pump.done():
            pump.result()
    finally:
        left.cancel()
        pump.cancel()
        await asyncio.gather(left, pump, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pump(source: AsyncIterator[bytes], first: bytes, send: Send) -> None:
    try:
        if first:
            await send({"type": "http.response.body", "body": first, "more_body": True})
        async for block in source:
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()


async def _wire(reply: Reply) -> AsyncIterator[bytes]:
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
            except CorralError as error:
                yield f"event: error\ndata: {json.dumps(error.to_problem())}\n\n".encode()
                return
            pending = None
            if event is None:
                return
            yield sse.encode(event, text=reply.text)
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()
