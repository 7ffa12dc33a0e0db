"""The SDK's transport for an event loop: connected at first use, each call in a thread of its own.

A call that has begun is finished even if the one who asked is cancelled meanwhile: what was started is known, and can be ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from corral.client.transport import Json, Params, Transport
from corral.errors import CorralError

T = TypeVar("T")
Connect = Callable[[], Transport]
MOST_CALLS = 128
"""Calls under way at once; more wait. Programs that run take no call while they run."""


class Backend:
    """See the module docstring. Belongs to one event loop."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._limiter = anyio.CapacityLimiter(MOST_CALLS)
        self._connecting: asyncio.Task[Transport] | None = None
        self._closed = False

    async def transport(self) -> Transport:
        """Connected; a failure is raised to all who wait for it and is tried again by the next call."""
        if self._closed:
            raise CorralError("shutting_down", "this MCP server is ending", retryable=False)
        if self._connecting is None or _failed(self._connecting):
            self._connecting = asyncio.create_task(self.threaded(self._connect))
        return await asyncio.shield(self._connecting)

    async def threaded(self, call: Callable[[], T]) -> T:
        """`call()` in a thread; its end is awaited even when the caller is cancelled."""
        return await anyio.to_thread.run_sync(call, limiter=self._limiter)  # shields itself from cancellation

    async def request(self, method: str, path: str, json: Json | None = None, params: Params | None = None) -> Json:
        """See `Transport.request`."""
        transport = await self.transport()
        return await self.threaded(lambda: transport.request(method, path, json, params))

    async def close(self) -> None:
        """Let go of the transport; idempotent."""
        self._closed = True
        connecting, self._connecting = self._connecting, None
        if connecting is None:
            return
        await asyncio.wait({connecting})
        if not _failed(connecting):
            await self.threaded(connecting.result().close)


def _failed(task: asyncio.Task[Transport]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
