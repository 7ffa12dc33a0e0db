"""The application on a socket: uvicorn, with limits of time and size on what comes before a request is one."""

from __future__ import annotations

import asyncio
import json
import ssl
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from corral.api.asgi import MAX_HEADERS
from corral.api.problems import problem
from corral.errors import CorralError

KEEP_ALIVE_S = 5
HEADERS_S = 10.0
"""How long the headers of a request may take, counted from the connection or from their first byte."""
LINGER_S = 1.0
"""How long one who was refused in the middle of sending has to read why."""
MAX_CONNECTIONS = 4096
SHARED_ACCEPTS = 2
MAX_MESSAGE = 2 * 1024 * 1024
"""Bytes of one message of a WebSocket; more than its window of input, encoded."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 that waits for headers a while, holds so many connections, and refuses in the API's own words."""

    _waiting: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(CorralError("overloaded", "too many connections", hint="use fewer, or try again in a moment"))
            return
        self._wait()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if (
            self.transport.is_closing()
            or self.transport.get_protocol() is not self
            or self.conn.their_state is not h11.IDLE
        ):
            self._stop_waiting()
        elif self.conn.trailing_data[0]:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEADERS_S, self._too_late)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_late(self) -> None:
        self._waiting = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            detail = f"the headers did not come within {HEADERS_S:.0f} s"
            self._refuse(CorralError("request_timeout", detail, hint="send the request in one go"))

    def send_400_response(self, msg: str) -> None:
        """Called for what is no HTTP."""
        if len(self.conn.trailing_data[0]) >= MAX_HEADERS:
            detail = f"the headers have more than {MAX_HEADERS} bytes"
            self._refuse(CorralError("headers_too_large", detail, hint="what is long belongs into the body"))
        else:
            self._refuse(CorralError("bad_request", "this is not a request of HTTP/1.1", hint="http:// or https://?"))

    def _refuse(self, error: CorralError) -> None:
        """Answer outside of any call, and hang up. In the middle of another answer nothing can be said."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and (
            self.cycle is None or self.cycle.response_complete
        ):
            status, document, more = problem(error)
            body = json.dumps(document).encode()
            headers = [
                (b"content-type", b"application/problem+json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                *((name.lower().encode(), value.encode()) for name, value in more.items()),
            ]
            reason = HTTPStatus(status).phrase.encode()
            for event in (
                h11.Response(status_code=status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self._stop_waiting()
        # Who still sends would lose the answer by a close; so it is read on a while, and forgotten.
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._waiting = self.loop.call_later(LINGER_S, self.transport.close)

    def eof_received(self) -> None:
        if self._refused:
            self.transport.close()


def make_server(application: Any, tls: ssl.SSLContext | None = None, *, shared: bool = False) -> uvicorn.Server:
    """A server for listening sockets: `await server.serve(sockets=[…])`. Ends by `should_exit`, at once by `force_exit`.

    `shared`: other processes accept from the same sockets, so it takes a few connections at a time and leaves them the rest.
    """
    return uvicorn.Server(
        uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="none",
            http=PatientProtocol,
            h11_max_incomplete_event_size=MAX_HEADERS,
            ws=WebSocketsSansIOProtocol,  # named here, so that it is imported with this module and not on the event loop
            ws_max_size=MAX_MESSAGE,
            ws_per_message_deflate=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            backlog=SHARED_ACCEPTS if shared else 1024,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
    )
