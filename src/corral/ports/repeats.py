"""The part of the store about calls that are repeated under their `Idempotency-Key`, and about what is kept only for a time.

A key counts for `KEY_LIFE_MS` from its first use, by the store's clock; older, it is new again, whether its row is still there or not.
"""

from __future__ import annotations

from typing import Protocol

from corral.domain.records import Idempotency

KEY_LIFE_MS = 24 * 3_600_000
DELIVERY_LIFE_MS = 7 * 24 * 3_600_000
"""How long it can be seen what became of a webhook, once it is delivered or given up."""


class RepeatsStore(Protocol):
    """See the module docstring."""

    async def made_under(self, idempotency: Idempotency) -> str | None:
        """The id of what the key made; None for a key that is new. `idempotency_conflict` on another body."""
        ...

    async def forget_old(self, limit: int = 500) -> int:
        """Remove idempotency keys and ended webhook deliveries whose time is over, at most `limit` of each, by indexes; -> how many."""
        ...
