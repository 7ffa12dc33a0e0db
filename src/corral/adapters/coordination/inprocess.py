"""Coordination of a worker that has no others to talk to: the owner of a state directory, or one replica without Redis.

Nothing to install, nothing to lose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from corral.ports.coordination import Counted

from .windows import Windows


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class InProcess:
    """`corral.ports.coordination.Coordination` for one process. Not `alone`: another may stand beside it for a while, unheard."""

    healthy = True

    def __init__(self, clock: Callable[[], int] = _monotonic_ms, *, alone: bool = True) -> None:
        self.alone = alone
        self._windows = Windows(clock)

    async def open(self, heard: Callable[[str], None], missed: Callable[[], None]) -> None:
        """Nothing will ever be heard."""

    async def close(self) -> None:
        """Nothing to let go of."""

    def ring(self, keys: Sequence[str]) -> None:
        """Nobody else listens."""

    async def count(self, key: str, amount: int, limit: int, window_ms: int) -> Counted:
        return self._windows.count(key, amount, limit, window_ms)
