"""`GET /v1/execs/{id}/ws`: one exec over a WebSocket, output one way, input, size and signals the other.

To the client go text messages, JSON objects with `type`: the events of the stream (`started stdout stderr gap ended`, with `cursor`),
`taken` (input was handed over: `bytes`, `offset` after it if the message had one, `open` false when the program reads no more), `pong`,
and `error` (a problem document, and `of`: the message that it answers). With `?encoding=binary` output comes as binary messages:
kind (1 byte: 1 stdout, 2 stderr), offset (8 bytes, big-endian), length of the cursor (2 bytes), cursor, data.

From the client come JSON objects: `{"type": "stdin", "text" | "base64", "offset"?, "eof"?}`, `{"type": "resize", "rows", "cols"}`,
`{"type": "signal", "signal"}`, `{"type": "cancel"}`, `{"type": "ping"}`; or binary messages of input: 8 bytes offset, data. Input with
an offset may be sent again after a reconnect: what has arrived is skipped. At most `WINDOW` bytes may wait to be taken.

The connection ends with 1000 after `ended`, 1012 when the service stops (reconnect with `?cursor=`), 1008 for what breaks these rules.
Closing it leaves the exec alone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from corral.api import sse
from corral.api.calls import Request, choice_of, seen_by, until_stop
from corral.api.problems import decode, problem
from corral.api.rate import check_rate
from corral.api.routes import check_scope, exec_socket, match
from corral.api.turns import Turns
from corral.domain.values import bytes_of
from corral.errors import CorralError
from corral.services.control import Services
from corral.services.events import StreamEvent

Json = dict[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
WINDOW = 1024 * 1024
"""Bytes of input that a connection may have under way."""
WAITING = 256
"""Messages that may wait to be acted on."""
KINDS = {"stdout": 1, "stderr": 2}
HEAD = struct.Struct(">BQH")
OFFSET = struct.Struct(">Q")


class _Closed(Exception):
    """The client went away, or broke the rules (`code`)."""

    def __init__(self, code: int | None = None, reason: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


async def serve(
    services: Services, request: Request, refusal: CorralError | None, receive: Receive, send: Send, turns: Turns
) -> None:
    """One connection, from its handshake to its end. `refusal`: why it is none."""
    await receive()
    try:
        if refusal is not None:
            raise refusal
        route, parts = match("GET", request.path)
        check_scope(route, request.caller)
        await check_rate(services, request.caller)
        if route.handler is not exec_socket:
            raise CorralError("bad_request", "this path is no WebSocket", hint="use /v1/execs/{id}/ws")
        exec_id = parts["exec_id"]
        binary = choice_of(request, "encoding", ("json", "binary"), "json") == "binary"
        start = sse.Position.parse(request.query.get("cursor"))
        services.core.check_open()
        await services.sandboxes.get_exec(request.caller, exec_id)
    except CorralError as error:
        await _refuse(seen_by(services, request.caller)(error), send)
        return
    await send({"type": "websocket.accept"})
    await _Connection(services, request, exec_id, binary, receive, send, turns).run(start)


async def _refuse(error: CorralError, send: Send) -> None:
    status, document, more = problem(error)
    headers = [(b"content-type", b"application/problem+json"), (b"connection", b"close")]
    headers += [(name.lower().encode(), value.encode()) for name, value in more.items()]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": json.dumps(document).encode()})


class _Connection:
    def __init__(
        self,
        services: Services,
        request: Request,
        exec_id: str,
        binary: bool,
        receive: Receive,
        send: Send,
        turns: Turns,
    ) -> None:
        self._services = services
        self._request = request
        self._exec_id = exec_id
        self._binary = binary
        self._receive = receive
        self._to_client = send
        self._turns = turns
        self._inbox: asyncio.Queue[Json] = asyncio.Queue(WAITING)
        self._waiting = 0

    async def run(self, start: sse.Position) -> None:
        code, reason = 1000, ""
        work = [asyncio.ensure_future(part) for part in (self._output(start), self._listen(), self._act())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        except _Closed as closed:
            if closed.code is None:
                return
            code, reason = closed.code, closed.reason
        except CorralError as error:
            error = self._seen(error)
            await self._say({"type": "error", **_without_type(error)})
            code, reason = (1012 if error.code == "shutting_down" else 1008), error.code
        finally:
            for part in work:
                part.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        with contextlib.suppress(OSError, RuntimeError):  # it may have gone in this moment
            await self._to_client({"type": "websocket.close", "code": code, "reason": reason})

    def _seen(self, error: CorralError) -> CorralError:
        return seen_by(self._services, self._request.caller)(error)

    # -- to the client ---------------------------------------------------------------------------------------------------------
    async def _say(self, document: Json) -> None:
        try:
            await self._to_client({"type": "websocket.send", "text": json.dumps(document, separators=(",", ":"))})
        except (OSError, RuntimeError) as error:
            raise _Closed from error

    async def _output(self, start: sse.Position) -> None:
        source = self._services.sandboxes.stream(self._request.caller, self._exec_id, start.node)
        events: AsyncIterator[StreamEvent] = sse.position(
            until_stop(self._services, source), start, whole=not self._binary
        )
        async for event in events:
            await self._turns.take()
            if event.kind in KINDS and self._binary:
                cursor = (event.cursor or "").encode()
                head = HEAD.pack(KINDS[event.kind], event.offset, len(cursor))
                try:
                    await self._to_client({"type": "websocket.send", "bytes": head + cursor + event.data})
                except (OSError, RuntimeError) as error:
                    raise _Closed from error
                continue
            document: Json = {"type": event.kind, "cursor": event.cursor}
            if event.kind in KINDS:
                document["offset"] = event.offset
                try:
                    document["text"] = event.data.decode("utf-8")
                except ValueError:
                    document["base64"] = base64.b64encode(event.data).decode("ascii")
            else:
                document.update(event.doc or {})
            await self._say(document)
            if event.kind == "ended":
                return

    # -- from the client -------------------------------------------------------------------------------------------------------
    async def _listen(self) -> None:
        """Read on while others act: a connection that is not read answers no ping."""
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                raise _Closed
            try:
                document = self._read(message)
            except CorralError as error:
                raise _Closed(1008, error.detail[:100]) from error
            self._waiting += len(document.get("data", b""))
            if self._waiting > WINDOW or self._inbox.full():
                raise _Closed(1008, "more is under way than was taken; wait for taken")
            self._inbox.put_nowait(document)

    def _read(self, message: Message) -> Json:
        raw = message.get("bytes")
        if raw is not None:
            if len(raw) < OFFSET.size:
                raise CorralError("bad_request", "a binary message is an offset of 8 bytes and data")
            return {"type": "stdin", "offset": OFFSET.unpack_from(raw)[0], "data": raw[OFFSET.size :]}
        document = decode(message["text"].encode("utf-8", "replace"))
        if not isinstance(document, dict) or not isinstance(document.get("type"), str):
            raise CorralError("bad_request", "a message is an object with a type")
        document.pop("data", None)  # our own name for what is decoded
        if document["type"] == "stdin":
            text, encoded = document.get("text"), document.get("base64")
            if text is not None and (encoded is not None or not isinstance(text, str)):
                raise CorralError("bad_request", "input is text or base64")
            try:
                document["data"] = bytes_of(encoded, "/base64") if encoded is not None else (text or "").encode("utf-8")
            except UnicodeEncodeError as error:
                raise CorralError("bad_request", "the text holds half of a surrogate pair") from error
        return document

    async def _act(self) -> None:
        while True:
            document = await self._inbox.get()
            size = len(document.get("data", b""))
            try:
                await self._do(document)
            except CorralError as error:
                error = self._seen(error)
                if error.code == "shutting_down":
                    raise error from None
                await self._say({"type": "error", "of": document["type"], **_without_type(error)})
            finally:
                self._waiting -= size

    async def _do(self, document: Json) -> None:
        sandboxes, caller = self._services.sandboxes, self._request.caller
        lease = self._request.headers.get("corral-lease")
        match document["type"]:
            case "stdin":
                offset, eof, data = document.get("offset"), document.get("eof", False), document["data"]
                if offset is not None and (isinstance(offset, bool) or not isinstance(offset, int) or offset < 0):
                    raise CorralError("invalid_value", "offset is not a number of bytes", field="/offset")
                if not isinstance(eof, bool):
                    raise CorralError("invalid_value", "eof is neither true nor false", field="/eof")
                takes = await sandboxes.stdin_exec(caller, self._exec_id, data, eof, offset, lease)
                end = None if offset is None else offset + len(data)
                await self._say({"type": "taken", "bytes": len(data), "offset": end, "open": takes and not eof})
            case "resize":
                await sandboxes.resize_exec(caller, self._exec_id, document, lease)
            case "signal":
                await sandboxes.signal_exec(caller, self._exec_id, document, lease)
            case "cancel":
                await sandboxes.cancel_exec(caller, self._exec_id, "cancelled", lease)
            case "ping":
                await self._say({"type": "pong"})
            case unknown:
                hint = "stdin, resize, signal, cancel or ping"
                raise CorralError("invalid_value", f"there is no message {unknown[:40]!r}", hint=hint, field="/type")


def _without_type(error: CorralError) -> Json:
    """The problem without its URN: `type` is the message's."""
    return {name: value for name, value in error.to_problem().items() if name != "type"}
