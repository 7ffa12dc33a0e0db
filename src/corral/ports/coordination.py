"""Coordination: what workers tell each other to be quicker. No promise rests on it, and it may vanish at any instant.

Contract for every adapter (`corral.testing.coordination` is the conformance suite):

* A wake-up says "look at the store for this key". It may be lost, doubled, late or come from a stranger: whoever waits also looks from
  time to time by itself. It carries no data.
* Counters limit rates, approximately: at most `limit` per `window_ms` over all workers while it works, per worker while it does not.
* No call raises for a broken connection, and none blocks for longer than `PATIENCE_S`: the answer is then what can be said without
  the others. `healthy` says which it is; each change of it is logged once by the adapter.
* Bounded memory whatever strangers do: keys are at most `MAX_KEY` characters, counters end with their windows.
* No I/O before `open`; `close` is idempotent. One loop uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

PATIENCE_S = 0.5
MAX_KEY = 200


@dataclass(frozen=True)
class Counted:
    """Answer of `count`: whether it is within the limit, and otherwise in how many milliseconds to ask again."""

    allowed: bool
    retry_after_ms: int = 0


class Coordination(Protocol):
    """See the module docstring."""

    async def open(self, heard: Callable[[str], None], missed: Callable[[], None]) -> None:
        """Connect in the background; an adapter that cannot connect opens all the same.

        `heard(key)` is called on the loop for each wake-up by another worker (not for one's own); `missed()` whenever wake-ups may
        have been lost, such as after a reconnect: then everything is to be looked at once.
        """
        ...

    async def close(self) -> None: ...

    @property
    def healthy(self) -> bool:
        """Wake-ups reach the others at this moment, as far as is known."""
        ...

    @property
    def alone(self) -> bool:
        """There are no others by construction (in process): nobody needs to look by itself."""
        ...

    def ring(self, keys: Sequence[str]) -> None:
        """Wake the other workers that listen to these keys. Does not wait; bounded: what cannot be sent is dropped."""
        ...

    async def count(self, key: str, amount: int, limit: int, window_ms: int) -> Counted:
        """Add to a counter of a fixed window; over the limit nothing is added."""
        ...
