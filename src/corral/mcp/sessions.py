"""Sessions: one sandbox each, made by the first call that needs it, ended with the session.

A sandbox that is gone is told once by the call that meets it; the next call makes another one, and its answer says that the files
are gone. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from corral.client.transport import Json, quote
from corral.errors import CorralError
from corral.mcp.backend import Backend, Connect
from corral.mcp.commands import Command

GONE = frozenset({"sandbox_lost", "sandbox_deleted", "lease_lost", "guest_lost"})
"""Codes and reasons after which a sandbox is of no use."""
MOST_COMMANDS = 32
DELETE_WAIT_S = 20
SWEEP_S = 15.0


@dataclass(frozen=True)
class Wishes:
    """What the operator of the MCP server decides."""

    sandbox: Json = field(default_factory=dict)
    """The body of `POST /v1/sandboxes`."""
    idle_s: float = 1800.0
    """How long a session that has no connection of its own may be silent."""
    most_sessions: int = 64


class Session:
    """One caller's sandbox and commands."""

    def __init__(self, backend: Backend, wishes: Wishes, name: str) -> None:
        self.name = name
        self.backend = backend
        self.commands: OrderedDict[str, Command] = OrderedDict()
        self.last_used = time.monotonic()
        self.busy = 0
        self._wishes = wishes
        self._sandbox: Json | None = None
        self._making: asyncio.Task[Json] | None = None
        self._news: str | None = None
        self._before: str | None = None
        self._closed = False

    @property
    def current(self) -> Json | None:
        """The sandbox's document as it was made; None before and between."""
        return self._sandbox

    async def sandbox(self) -> Json:
        """The sandbox, made now if there is none. However many ask at once, one is made."""
        while self._sandbox is None:
            self._check_open()
            if self._making is None:
                self._making = asyncio.create_task(self._make())
            await asyncio.shield(self._making)
        return self._sandbox

    async def _make(self) -> Json:
        try:
            made = await self.backend.request("POST", "/v1/sandboxes", self._wishes.sandbox)
            self._sandbox = made
            if self._before is not None:
                self._news = f"{made['id']} is a new, empty sandbox: {self._before}, and its files with it."
                self._before = None
            return made
        finally:
            self._making = None

    def lose(self, sandbox_id: str, why: str) -> None:
        """The sandbox is gone; the next call makes another. Of one that was lost before: nothing."""
        if self._sandbox is not None and self._sandbox["id"] == sandbox_id:
            self._sandbox = None
            self._before = f"the one before, {sandbox_id}, is gone ({why})"

    def take_news(self) -> str | None:
        """What the next answer has to say first; told once."""
        news, self._news = self._news, None
        return news

    def remember(self, command: Command) -> None:
        """For status and interrupt. Ended ones are forgotten when there are too many."""
        self.commands[command.ident] = command
        for ident in [i for i, c in self.commands.items() if c.ended][: max(0, len(self.commands) - MOST_COMMANDS)]:
            if ident != command.ident:
                del self.commands[ident]

    def command(self, ident: str) -> Command:
        """By id; `not_found` names those that are known."""
        found = self.commands.get(ident)
        if found is None:
            known = ", ".join(self.commands) or "none was started in this session"
            raise CorralError(
                "not_found", f"there is no command {ident[:80]}", hint=f"known commands: {known}", field="/command_id"
            )
        return found

    async def reset(self) -> Json:
        """End the sandbox with all that runs in it, and make a fresh one."""
        old, self._sandbox = self._sandbox, None
        self.commands.clear()
        self._before = self._news = None
        if old is not None:
            await self._delete(old["id"])
        return await self.sandbox()

    async def close(self) -> None:
        """End the sandbox; no call makes another."""
        self._closed = True
        if self._making is not None:
            await asyncio.wait({self._making})
        old, self._sandbox = self._sandbox, None
        if old is not None:
            await self._delete(old["id"])

    async def _delete(self, sandbox_id: str) -> None:
        for _ in range(3):
            answer = await self.backend.request(
                "DELETE", f"/v1/sandboxes/{quote(sandbox_id)}", params={"wait": DELETE_WAIT_S}
            )
            if answer.get("state") == "terminated":
                return
        hint = "corral gc removes it once its processes have ended; corral doctor lists what is left"
        raise CorralError("infra_error", f"{sandbox_id} is not yet terminated", hint=hint)

    def _check_open(self) -> None:
        if self._closed:
            raise CorralError("shutting_down", "this session has ended", hint="open a new one", retryable=False)


class Sessions:
    """All sessions of one server by their key; see `opened`."""

    def __init__(self, connect: Connect, wishes: Wishes) -> None:
        self.backend = Backend(connect)
        self._wishes = wishes
        self._known: dict[str, Session] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def get(self, key: str) -> tuple[Session, bool]:
        """(the session, is it new). Too many: `quota_exceeded`."""
        session = self._known.get(key)
        if session is not None:
            return session, False
        if len(self._known) >= self._wishes.most_sessions:
            raise CorralError(
                "quota_exceeded",
                f"{len(self._known)} sessions are open, as many as this server allows",
                hint="end one, or try again later: idle ones are ended after a while",
            )
        session = self._known[key] = Session(self.backend, self._wishes, key)
        return session, True

    @asynccontextmanager
    async def using(self, session: Session) -> AsyncIterator[None]:
        """While a call is under way the session is not idle."""
        session.busy += 1
        try:
            yield
        finally:
            session.busy -= 1
            session.last_used = time.monotonic()

    async def end(self, key: str) -> None:
        """End a session; it is ended even if the caller does not wait."""
        session = self._known.pop(key, None)
        if session is None:
            return
        task = asyncio.create_task(self._end(session))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await asyncio.shield(task)

    @staticmethod
    async def _end(session: Session) -> None:
        try:
            await session.close()
        except CorralError as error:
            print(f"corral: {error.code}: {error.detail}", file=sys.stderr)

    async def sweep(self) -> None:
        """End what has been idle too long, forever."""
        while True:
            await anyio.sleep(min(SWEEP_S, self._wishes.idle_s / 4))
            for key in self.idle(time.monotonic()):
                if key in self.idle(time.monotonic()):  # ending the others takes time, in which it may be used again
                    await self.end(key)

    def idle(self, now: float) -> list[str]:
        """Keys of the sessions that nobody uses: no call and no command under way, and silent for long."""
        return [
            key
            for key, session in self._known.items()
            if not session.busy
            and all(command.ended for command in session.commands.values())
            and now - session.last_used >= self._wishes.idle_s
        ]

    async def close(self) -> None:
        """End all sessions, then let go of the service."""
        try:
            await asyncio.gather(*(self.end(key) for key in list(self._known)))
            if self._ending:
                await asyncio.wait(self._ending)
        finally:
            await self.backend.close()


@asynccontextmanager
async def opened(connect: Connect, wishes: Wishes) -> AsyncIterator[Sessions]:
    """The sessions of one server, all ended at the end."""
    sessions = Sessions(connect, wishes)
    sweeper = asyncio.create_task(sessions.sweep())
    try:
        yield sessions
    finally:
        sweeper.cancel()
        with anyio.CancelScope(shield=True):
            await sessions.close()
