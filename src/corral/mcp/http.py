"""MCP as streamable HTTP: `/mcp`, for those who have the key, by the host names that are allowed, never from a foreign web page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from corral.errors import CorralError
from corral.mcp.server import CorralMCP
from corral.mcp.sessions import Wishes

PATH = "/mcp"
MAX_BODY = 32 << 20


@asynccontextmanager
async def application(
    server: CorralMCP,
    wishes: Wishes,
    *,
    accepts: Callable[[str], bool] | None,
    hosts: Sequence[str],
    origins: Sequence[str],
) -> AsyncIterator[ASGIApp]:
    """The ASGI application while it may serve; all sessions have ended afterwards.

    `accepts` judges the Authorization header; None lets everybody in. `hosts`: Host headers, `NAME:*` for any port. `origins`: web
    pages that may call, none by default: what a browser sends carries one.
    """
    below = server.streamable_http_app(
        streamable_http_path=PATH,
        transport_security=TransportSecuritySettings(allowed_hosts=list(hosts), allowed_origins=list(origins)),
        session_idle_timeout=wishes.idle_s,
        max_sessions=wishes.most_sessions,
        max_request_body_size=MAX_BODY,
    )
    async with below.router.lifespan_context(below):
        yield below if accepts is None else _Guarded(below, accepts)


class _Guarded:
    def __init__(self, below: ASGIApp, accepts: Callable[[str], bool]) -> None:
        self._below = below
        self._accepts = accepts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that looks for OAuth has to find out that there is none (404).
        guarded = scope["type"] == "http" and not scope["path"].startswith("/.well-known/")
        if guarded and not self._accepts(Headers(scope=scope).get("authorization", "")):
            error = CorralError(
                "unauthorized", "this MCP server needs its key", hint="send the header Authorization: Bearer KEY"
            )
            answer = JSONResponse(
                error.to_problem(), 401, {"WWW-Authenticate": "Bearer"}, media_type="application/problem+json"
            )
            await answer(scope, receive, send)
            return
        await self._below(scope, receive, send)
