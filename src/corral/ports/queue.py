"""The part of the store that holds the queue of runs and what tenants hold (quota). See `ports.store` for the rules.

What is held has a *reservation* row, written in the transaction that makes something pending and deleted in the one that ends it, so
that it is returned exactly once whatever happens between. A submitted run holds a place in the queue (`submit_run`), an admitted one
`running` and the room of its sandbox (`place_run`, `admit`), a sandbox its room from `create_sandbox` until it is `terminated` or
`hibernated`; `finish_run` returns what the run held, and its sandbox's room if there is none. Sums per tenant are kept with them.

`rules` come from the policy with each call: the store decides over them inside its transaction and keeps none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from corral.domain.quota import NO_RULES, Amounts, QuotaRules
from corral.domain.records import RunRecord
from corral.domain.webhook import NewWebhook


@dataclass(frozen=True)
class Ticket:
    """What comes with a submitted run: the rules that its queue is bounded by, and whom to tell of its end."""

    rules: QuotaRules = NO_RULES
    webhook: NewWebhook | None = None


@dataclass(frozen=True)
class Charge:
    """What a new sandbox holds, unless its run holds it already."""

    amounts: Amounts
    rules: QuotaRules = NO_RULES
    run_id: str | None = None


@dataclass(frozen=True)
class Entry:
    """What a run that is ready to start asks for."""

    sandbox_id: str
    """The id that its sandbox will have if it starts at once."""
    amounts: Amounts
    """Of its sandbox."""
    cost: int
    priority: str = "normal"
    timeout_ms: int = 600_000
    """How long it may wait."""

    @property
    def demand(self) -> Amounts:
        """With the run itself."""
        return self.amounts + Amounts(running=1)


@dataclass(frozen=True)
class QueuedRun:
    """A run that waits. `position` counts from 1 among its tenant's own."""

    run_id: str
    tenant_id: str
    priority: str
    position: int
    queued_at: int
    deadline_at: int
    demand: Amounts


@dataclass(frozen=True)
class TenantUse:
    """What a tenant holds (`*`: all together). `waiting`: runs in the queue; `queued` counts those that are being planned too."""

    tenant_id: str
    use: Amounts
    waiting: int = 0


@dataclass(frozen=True)
class Drift:
    """Where what is reserved is not what is live: a fault, named for the operator."""

    kind: str
    """`no_holder`: a reservation without a live holder; `not_reserved`: the other way round; `sum`: a sum is not that of its rows."""
    subject: str
    data: dict[str, Any] = field(default_factory=dict)


class QueueStore(Protocol):
    """See the module docstring."""

    async def place_run(
        self, run_id: str, *, changes: dict[str, Any], entry: Entry, rules: QuotaRules, driver: str | None = None
    ) -> RunRecord:
        """A `requested` or `planning` run, with `changes`, becomes `starting` (with `entry.sandbox_id`) if it is the next one and
        there is room for it, else `queued`; one transaction. `conflict` from another state, `superseded` as in `update_run`."""
        ...

    async def admit(self, rules: QuotaRules, sandbox_ids: Sequence[str]) -> list[RunRecord]:
        """Queued runs that there is room for become `starting`, fair between tenants, each with one of these ids; -> those."""
        ...

    async def waiting(self) -> int:
        """How many runs are queued, of all tenants."""
        ...

    async def queued_run(self, run_id: str, tenant_id: str) -> QueuedRun | None:
        """Where it stands; None if it does not wait (any more)."""
        ...

    async def still_queued(self, run_ids: Sequence[str]) -> set[str]:
        """Those of these runs that wait."""
        ...

    async def list_queue(self, tenant_id: str, *, limit: int = 100) -> list[QueuedRun]:
        """The tenant's queued runs in the order in which they will be admitted."""
        ...

    async def tenant_use(self, tenant_id: str) -> TenantUse: ...

    async def quota_drift(self) -> list[Drift]:
        """Compare what is reserved with what is live, in one snapshot; nothing = they agree."""
        ...

    async def mend_quota(self) -> list[Drift]:
        """Remove reservations without a live holder and set the sums right; -> what was mended."""
        ...
