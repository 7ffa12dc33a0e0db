"""The part of the store that ends sandboxes in time. See `ports.store` for the rules, `domain.expiry` for what is meant.

The store's clock judges, nobody else's: a clock of a host that is wrong, or jumps, ends nothing early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from corral.domain.expiry import Cause
from corral.domain.records import SandboxView


@dataclass(frozen=True)
class Due:
    """A sandbox whose time is over."""

    view: SandboxView
    cause: Cause


class ExpiryStore(Protocol):
    """See the module docstring."""

    async def due_sandboxes(self, limit: int = 100) -> list[Due]:
        """Sandboxes whose time to live is over, longest ago first, then those without activity for too long. By indexes."""
        ...

    async def touch(self, sandbox_ids: Sequence[str]) -> None:
        """They are in use now: `last_active_at` is the store's clock and `version` rises, so that nobody ends them as idle who looked
        before. Unknown ids and those that have ended are left out."""
        ...
