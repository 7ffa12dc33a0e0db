"""The web face: a FastAPI application over the table of `routes`. Imported only when somebody connects (it costs 0.7 s)."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.requests import Request as WebRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from corral.api import sse
from corral.api.problems import problem, read_body
from corral.api.routes import ROUTES, Reply, Request, dispatch
from corral.errors import CorralError
from corral.services.control import Services
from corral.services.events import Caller

DRAIN_BYTES = 256 * 1024 * 1024
DRAIN_S = 10.0


def create_app(services: Services, *, key: str | None = None) -> FastAPI:
    """The application. With `key`, each call but the health checks needs `Authorization: Bearer KEY`."""
    app = FastAPI(title="Corral", version=version("corral"), docs_url=None, redoc_url=None)

    def endpoint(open_to_all: bool) -> Callable[[WebRequest], Any]:
        async def call(request: WebRequest) -> Response:
            if key is not None and not open_to_all and not _has_key(request, key):
                status, document, headers = problem(
                    CorralError("unauthorized", "the key is missing or wrong", hint="set CORRAL_KEY")
                )
                return _Answer(Reply(status, document, headers))
            return await _respond(services, request)

        return call

    for route in ROUTES:
        path = route.pattern
        name = f"{route.method.lower()} {path}"
        call = endpoint(path in ("/healthz", "/readyz"))
        app.add_api_route(path, call, methods=[route.method], response_model=None, name=name, operation_id=name)
    app.add_route(
        "/{rest:path}", endpoint(False), methods=["GET", "POST", "PUT", "DELETE", "PATCH"], include_in_schema=False
    )
    return app


def _has_key(request: WebRequest, key: str) -> bool:
    given = request.headers.get("authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {key}".encode())


async def _respond(services: Services, request: WebRequest) -> Response:
    """Run the call; a client that goes away while it waits cancels the waiting, not the work."""
    call = _request(request)
    if request.method == "PUT":  # its body is streamed by the handler itself
        return _Answer(await dispatch(services, call))
    try:
        call = replace(call, body=await read_body(call.body))
    except CorralError as error:
        await _drain(request)
        status, document, headers = problem(error)
        return _Answer(Reply(status, document, {**headers, "Connection": "close"}))
    work = asyncio.ensure_future(dispatch(services, call))
    left = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return _Answer(work.result())
        return _Answer(Reply(499, {}))  # nobody reads it
    finally:
        work.cancel()
        left.cancel()
        await asyncio.gather(work, left, return_exceptions=True)


async def _drain(request: WebRequest) -> None:
    """Read on and forget, for a while: an answer that is sent while the client still writes is lost when we close."""
    left = DRAIN_BYTES
    try:
        async with asyncio.timeout(DRAIN_S):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _request(request: WebRequest) -> Request:
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return Request(
        request.method,
        raw.partition(b"?")[0].decode("ascii", "surrogateescape"),
        _query(request.scope.get("query_string", b"")),
        {name.lower(): value for name, value in request.headers.items()},
        _body(request),
        caller=Caller(),
    )


def _query(raw: bytes) -> dict[str, str]:
    from urllib.parse import parse_qsl

    text = raw.decode("ascii", "surrogateescape")
    return dict(parse_qsl(text, keep_blank_values=True, encoding="utf-8", errors="surrogateescape"))


async def _body(request: WebRequest) -> AsyncIterator[bytes]:
    try:
        async for part in request.stream():
            if part:
                yield part
    except ClientDisconnect as error:
        raise CorralError("bad_request", "the client went away while it sent the body") from error


class _Answer(Response):
    """A `Reply` on the wire. JSON is ASCII, so that lone surrogates of foreign paths survive."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.background = None
        self.status_code = reply.status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self.reply
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
                status, document, more = problem(error)
                await _Answer(Reply(status, document, more))(scope, receive, send)
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
