"""What is on a replica's sockets from their first moment to their last: who comes too early is told so, who comes late is sent on.

Before the application is there `/healthz` answers, `/readyz` names what is missing, and everything else is a retryable problem. While
the replica leaves, each answer closes its connection, so that the client's next request finds another replica.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from corral.api.problems import problem
from corral.errors import CorralError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
CODES = {"store": "store_error", "node": "node_unavailable"}
"""What a missing part is to a caller."""


class Front:
    """An ASGI application before an `Application`. `missing` names the part that is waited for."""

    def __init__(self) -> None:
        self.application: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None
        self.missing: str | None = None
        self.leaving = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP call or one WebSocket."""
        told = _closing(send) if self.leaving and scope["type"] == "http" else send
        if self.application is not None:
            await self.application(scope, receive, told)
        elif scope["type"] == "http":
            await self._wait(scope["path"], told)
        else:
            await send({"type": "websocket.close", "code": 1013})

    async def _wait(self, path: str, send: Send) -> None:
        status, document, more = problem(self._refusal())
        kind = b"application/problem+json"
        if path in ("/healthz", "/readyz"):
            kind = b"application/json"
            status = 200 if path == "/healthz" else 503
            missing = [] if self.missing is None else [self.missing]
            document = {"status": "ok"} if path == "/healthz" else {"status": "starting", "missing": missing}
        headers = [(b"content-type", kind), *((name.lower().encode(), value.encode()) for name, value in more.items())]
        body = json.dumps(document).encode()
        headers += [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self) -> CorralError:
        if self.missing is None:
            return CorralError("shutting_down", "the service is starting", hint="try again in a moment")
        detail = f"the service is starting and waits for the {self.missing}"
        return CorralError(CODES.get(self.missing, "overloaded"), detail, hint="GET /readyz says when it is ready")


def _closing(send: Send) -> Send:
    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [header for header in message["headers"] if header[0] != b"connection"]
            message = {**message, "headers": [*kept, (b"connection", b"close")]}
        await send(message)

    return closing
