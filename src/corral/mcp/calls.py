"""One call of a tool: whose session it is, how it runs something, how its refusals become answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from mcp.server.mcpserver import Context
from mcp_types import CallToolResult
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from corral.client.transport import Json
from corral.errors import CorralError
from corral.mcp import answers, commands
from corral.mcp.sessions import GONE, Session, Sessions

SESSION_HEADER = "corral-session"
PROCESS = "process"
"""The key of the one session of a server that is somebody's child process (stdio) or part of their program."""
BACKGROUND_S = 3600.0
PROGRESS_STEP_S = 1.0

CallContext = Context[Sessions, Any]


@dataclass(frozen=True)
class Call:
    """One call of a tool: its session, and the client that waits."""

    session: Session
    ctx: CallContext

    async def told(self, seconds: float, words: str) -> None:
        """Progress, where the client asked for it."""
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self.ctx.report_progress(seconds, None, commands.sendable(words or "running"))

    async def sandbox(self) -> Json:
        """The session's sandbox. Making the first one of an installation can take long, which is told."""
        if self.session.current is not None:
            return self.session.current
        telling = asyncio.create_task(self._tell_of_making())
        try:
            return await self.session.sandbox()
        finally:
            telling.cancel()

    async def _tell_of_making(self) -> None:
        began = time.monotonic()
        while True:
            await anyio.sleep(PROGRESS_STEP_S)
            await self.told(time.monotonic() - began, "making the sandbox")

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[Json]:
        """The sandbox, for one use of it. An error that says that it is gone is noted."""
        sandbox = await self.sandbox()
        try:
            yield sandbox
        except CorralError as error:
            self.gone_by(error, sandbox["id"])
            raise

    def gone_by(self, error: CorralError, sandbox_id: str) -> None:
        """Does the error say that the sandbox is gone? Then the next call makes another."""
        if error.code in GONE or (error.code == "not_found" and sandbox_id in error.detail):
            self.session.lose(sandbox_id, error.code)

    async def run(
        self, title: str, request: Json, timeout_s: float | None, background: bool, wait_s: float, chars: int
    ) -> CallToolResult:
        """Start it, wait for its end as long as asked, answer. A cancelled call ends what it started."""
        limit = timeout_s if timeout_s is not None else BACKGROUND_S if background else None
        wait_s = 0.0 if background else wait_s
        async with self.inside() as sandbox:
            command = await self._start(sandbox["id"], title, request, limit, timeout_s is None, wait_s, chars)
        self.session.remember(command)
        try:
            await command.wait(wait_s - command.seconds(), self.told)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await command.cancel()
            raise
        return await self.answer(command, chars, whole=True)

    async def _start(
        self, sandbox_id: str, title: str, request: Json, limit: float | None, ours: bool, wait_s: float, chars: int
    ) -> commands.Command:
        wanted = {**request, "timeout_s": limit} if limit is not None else request
        try:
            return await commands.start(self.session.backend, sandbox_id, title, wanted, wait_s, chars)
        except CorralError as error:
            # Our own default may be over this installation's cap; what the model asked for is its own to change.
            if not (ours and limit is not None and error.code == "policy_denied"):
                raise
        return await commands.start(self.session.backend, sandbox_id, title, request, wait_s, chars)

    async def answer(
        self, command: commands.Command, chars: int, *, whole: bool = False, cursor: int | None = None
    ) -> CallToolResult:
        """`whole`: of a command that has ended, all of its output as an agent view."""
        if command.failure is not None:
            self.gone_by(command.failure, command.sandbox_id)
        result = command.document.get("result")
        if result is not None and result["reason"] in GONE:
            self.session.lose(command.sandbox_id, result["reason"])
        if whole and result is not None:
            document = command.document if "agent_view" in command.document else await command.view(chars)
            command.looked = sys.maxsize
            return answers.command_ended(command, document, self.session.take_news())
        if result is not None:
            await (await command.follow()).wait()  # a quick one was never followed: its output is read now
        elif command.failure is None:
            await command.follow()
        return answers.command_seen(command, command.look(cursor, chars), self.session.take_news())


async def perform(ctx: CallContext, act: Callable[[Call], Awaitable[CallToolResult]]) -> CallToolResult:
    """Run one tool for the session of the call; refusals become answers."""
    session: Session | None = None
    try:
        sessions = ctx.request_context.lifespan_context
        session = _session(sessions, ctx)
        async with sessions.using(session):
            return await act(Call(session, ctx))
    except CorralError as error:
        return answers.failure(error, session.take_news() if session is not None else None)


def _session(sessions: Sessions, ctx: CallContext) -> Session:
    """Whose call this is.

    stdio or in process: the one session there is. HTTP with the handshake: the MCP session, which ends with it. HTTP without
    (2026-07-28 has no sessions): by the client's name and its `Corral-Session` header, ended when idle.
    """
    headers = ctx.headers
    if headers is None:
        return sessions.get(PROCESS)[0]
    ident = headers.get("mcp-session-id")
    if ident is not None and ctx.protocol_version in HANDSHAKE_PROTOCOL_VERSIONS:
        key = f"mcp {ident}"
        session, new = sessions.get(key)
        if new:
            # The connection's own teardown, which the SDK documents but exposes on no public name.
            ctx.session._connection.exit_stack.push_async_callback(sessions.end, key)
        return session
    parameters = ctx.session.client_params
    client = parameters.client_info.name if parameters is not None else ""
    named = f"{client}\0{headers.get(SESSION_HEADER, '')}"
    return sessions.get(f"named {hashlib.sha256(named.encode()).hexdigest()}")[0]
