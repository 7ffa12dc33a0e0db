"""`ports.webhooks` in memory."""

from __future__ import annotations

from corral.domain.webhook import Delivery
from corral.ports.webhooks import Secrets

from .memory_base import MemoryBase
from .rows import DELIVERY, Row, check_ttl, to_text
from .sql_text import page_size
from .webhooks import check_state, tried, usable


class MemoryWebhooks(MemoryBase):
    """`ports.webhooks.WebhookStore`."""

    def _due(self) -> list[Row]:
        due = [
            row
            for row in self._webhooks.values()
            if row["state"] == "pending"
            and int(row["next_at"] or 0) <= self._now
            and (row["claim_until"] is None or int(row["claim_until"]) <= self._now)
        ]
        return sorted(due, key=lambda row: (int(row["next_at"] or 0), str(row["delivery_id"])))

    async def due_deliveries(self) -> int:
        return await self._transact(lambda: len(self._due()))

    async def claim_deliveries(self, worker: str, claim_ms: int, limit: int = 8) -> list[Delivery]:
        check_ttl(claim_ms)
        to_text(worker, "claimed_by")

        def work() -> list[Delivery]:
            claimed = []
            for row in self._due()[: page_size(limit)]:
                new: Row = {**row, "claimed_by": worker, "claim_until": self._now + claim_ms}
                new["attempts"] = int(row["attempts"] or 0) + 1
                self._put(self._webhooks, row["delivery_id"], new)
                claimed.append(DELIVERY.from_row(new))
            return claimed

        return await self._transact(work)

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
        check_state(state)
        said = None if error is None else to_text(error, "last_error")

        def work() -> bool:
            row = self._webhooks.get(delivery_id)
            if row is None or row["claimed_by"] != worker or row["state"] != "pending":
                return False
            self._put(self._webhooks, delivery_id, {**row, **tried(self._now, state, retry_ms, status, said)})
            return True

        return await self._transact(work)

    async def delivery_of(self, run_id: str, tenant_id: str) -> Delivery | None:
        def work() -> Delivery | None:
            rows = self._webhooks.values()
            found = [row for row in rows if (row["run_id"], row["tenant_id"]) == (run_id, tenant_id)]
            return DELIVERY.from_row(found[0]) if found else None

        return await self._transact(work)

    async def webhook_secrets(self, tenant_id: str, proposal: str) -> Secrets:
        to_text(proposal, "secret")

        def work() -> Secrets:
            if tenant_id not in self._webhook_secrets:
                self._put(self._webhook_secrets, tenant_id, Secrets(proposal, created_at=self._now))
            return usable(self._webhook_secrets[tenant_id], self._now)

        return await self._transact(work)

    async def rotate_webhook_secret(self, tenant_id: str, secret: str, overlap_ms: int) -> Secrets:
        check_ttl(overlap_ms)
        to_text(secret, "secret")

        def work() -> Secrets:
            old = self._webhook_secrets.get(tenant_id)
            new = Secrets(secret, created_at=self._now)
            if old is not None:
                new = Secrets(secret, old.secret, self._now + overlap_ms, self._now)
            self._put(self._webhook_secrets, tenant_id, new)
            return usable(new, self._now)

        return await self._transact(work)
