"""Counters of fixed windows in this process: all that there is without others, and what is left while they cannot be reached."""

from __future__ import annotations

from collections.abc import Callable

from corral.ports.coordination import Counted

KEPT = 100_000
"""How many counters there are at most: beyond, the oldest are forgotten, which lets their callers begin again."""
_LOOK = 1024


class Windows:
    """Counters by key. `clock` is in milliseconds and never goes back."""

    def __init__(self, clock: Callable[[], int], kept: int = KEPT) -> None:
        self._clock = clock
        self._kept = kept
        self._counters: dict[str, tuple[int, int]] = {}
        """key -> (end of its window, how much of it is used)."""
        self._look_at = _LOOK

    def count(self, key: str, amount: int, limit: int, window_ms: int) -> Counted:
        """See `ports.coordination`."""
        now = self._clock()
        end, used = self._counters.get(key, (0, 0))
        if end <= now:
            end, used = now + window_ms, 0
            self._counters.pop(key, None)
        if used + amount > limit:
            return Counted(False, max(1, end - now))
        self._counters[key] = (end, used + amount)
        if len(self._counters) > self._look_at:
            self._forget(now)
        return Counted(True)

    def _forget(self, now: int) -> None:
        """Those whose window is over, and the oldest beyond what is kept. Each look pays for as many counts as it has seen."""
        self._counters = {key: value for key, value in self._counters.items() if value[0] > now}
        for key in list(self._counters)[: max(0, len(self._counters) - self._kept)]:
            del self._counters[key]
        self._look_at = min(max(_LOOK, 2 * len(self._counters)), self._kept + _LOOK)

    def __len__(self) -> int:
        return len(self._counters)
