"""The part of the store that leases need beyond `commit_transition` and `renew_lease`. See `ports.store` for the rules.

Expiry is judged by the store's clock alone, in the transaction that acts on it. A fence is issued by the store and only rises; where a
node shows one that is higher, the store has been set back to an earlier copy, and takes the node's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from corral.domain.fence import Fence
from corral.domain.records import LeaseRecord, SandboxView
from corral.errors import CorralError


@dataclass(frozen=True)
class Renewal:
    """One lease to be extended: see `Store.renew_lease`."""

    sandbox_id: str
    owner: str
    fence: Fence
    ttl_ms: int


@dataclass(frozen=True)
class Seen:
    """A sandbox in one snapshot, and the store's clock at that moment."""

    view: SandboxView
    now_ms: int


class LeaseStore(Protocol):
    """See the module docstring."""

    async def see_sandbox(self, sandbox_id: str, tenant_id: str | None) -> Seen | None:
        """`get_sandbox` with the store's clock."""
        ...

    async def renew_leases(self, renewals: Sequence[Renewal]) -> tuple[int, list[LeaseRecord | CorralError]]:
        """`renew_lease` for each, in one transaction; -> (the store's clock, the lease or the refusal of each, in order).

        A refusal concerns its own renewal only. A sandbox may come more than once.
        """
        ...

    async def due_leases(self, limit: int = 100) -> list[SandboxView]:
        """Kept sandboxes that are in use or paused under a lease that has run out and is not the system's; longest ago first."""
        ...

    async def list_leases(self, tenant_id: str, *, after: str | None = None, limit: int = 100) -> list[Seen]:
        """A tenant's sandboxes that somebody has, the system not counted; newest sandbox first, `after` as of `list_sandboxes`."""
        ...

    async def adopt_floor(self, sandbox_id: str, floor: Fence, evidence: dict[str, Any]) -> SandboxView | None:
        """A node has seen `floor`: if that is above the row's fence, the row gets the next token after it, for `system:store_regressed`.

        An event `floor_adopted` has both fences and the evidence. -> the sandbox after that, None if the row is not behind, has
        ended or does not exist. Nothing else of it changes.
        """
        ...

    async def newest_event(self) -> int:
        """The highest event id, 0 without any."""
        ...

    async def environment_version(self, sandbox_id: str) -> int:
        """How often what the sandbox holds has changed hands cleanly, from 1."""
        ...
