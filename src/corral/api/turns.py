"""Turns of the event loop, shared out to streams: however many have much to send, everybody else is heard in between."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 4
"""Blocks per turn of the loop, over all streams. One of 64 KiB costs about half a millisecond to encode and to write."""


class Turns:
    """`await take()` before each block. In the order in which they were asked for; nobody waits while few ask."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._armed = False

    async def take(self) -> None:
        """Returns when it is this caller's turn; a caller that is cancelled meanwhile takes none."""
        self._arm()
        if self._left > 0:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._armed = False
        self._left = self._at_once
        while self._waiting and self._left > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < self._at_once:
            self._arm()
