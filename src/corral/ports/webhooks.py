"""The part of the store that keeps webhooks: who is to be told of a run's end, how often that was tried. See `ports.store` for the rules.

A webhook's row is written with its run (`submit_run`) and becomes due in the transaction that finishes the run, whoever does that. Any
worker claims due rows; a claim that runs out is free again, so a receiver may be told twice, never not at all: deliveries have an id.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from corral.domain.webhook import Delivery


@dataclass(frozen=True)
class Secrets:
    """What a tenant's deliveries are signed with; the old one too while it is being replaced."""

    secret: str = field(repr=False)
    old_secret: str | None = field(default=None, repr=False)
    old_until: int | None = None
    created_at: int = 0


class WebhookStore(Protocol):
    """See the module docstring."""

    async def due_deliveries(self) -> int:
        """How many are due now and claimed by nobody."""
        ...

    async def claim_deliveries(self, worker: str, claim_ms: int, limit: int = 8) -> list[Delivery]:
        """Claim due ones, the longest due first; each has one winner. `attempts` counts this one already."""
        ...

    async def delivery_tried(
        self,
        delivery_id: str,
        worker: str,
        *,
        state: str,
        retry_ms: int | None = None,
        status: int | None = None,
        error: str | None = None,
    ) -> bool:
        """What became of a claimed attempt: `delivered`, `failed`, or `pending` again in `retry_ms`. False if the claim is lost.

        With the first two the secret of the row is gone.
        """
        ...

    async def delivery_of(self, run_id: str, tenant_id: str) -> Delivery | None:
        """The webhook of a run."""
        ...

    async def webhook_secrets(self, tenant_id: str, proposal: str) -> Secrets:
        """The tenant's; the first caller's proposal becomes its secret. An old one whose time is over is left out."""
        ...

    async def rotate_webhook_secret(self, tenant_id: str, secret: str, overlap_ms: int) -> Secrets:
        """From now on `secret`; the one before goes on beside it for `overlap_ms`."""
        ...
