"""`ports.webhooks` as SQL. See `transactions` for the rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from corral.domain.webhook import Delivery
from corral.ports.webhooks import Secrets

from .rows import DELIVERY, Row, check_ttl, to_text
from .sql_text import page_size
from .transacting import Transacting, Tx

# ruff: noqa: S608 - what is put together are column names of this package

STATES = ("pending", "delivered", "failed")
_DUE = "state = 'pending' AND next_at <= :now AND (claim_until IS NULL OR claim_until <= :now)"


def due_deliveries(tx: Tx) -> int:
    [(count,)] = tx.rows(f"SELECT COUNT(*) FROM webhook_delivery WHERE {_DUE}", {"now": tx.now})
    return int(count)


def claim_deliveries(tx: Tx, worker: str, claim_ms: int, limit: int) -> list[Delivery]:
    found = tx.rows(
        # Materialized, else a database may look for them once for each row, and lock more than the limit.
        f"WITH picked AS MATERIALIZED (SELECT delivery_id FROM webhook_delivery WHERE {_DUE}"
        f" ORDER BY next_at, delivery_id LIMIT :limit {tx.skip_locked})"
        " UPDATE webhook_delivery SET claimed_by = :worker, claim_until = :until, attempts = attempts + 1"
        f" WHERE delivery_id IN (SELECT delivery_id FROM picked) RETURNING {DELIVERY.select}",
        {"worker": worker, "until": tx.now + claim_ms, "now": tx.now, "limit": page_size(limit)},
    )
    return sorted(map(DELIVERY.decode, found), key=lambda each: (each.next_at or 0, each.delivery_id))


def tried(now: int, state: str, retry_ms: int | None, status: int | None, error: str | None) -> Row:
    """The columns that an attempt leaves (both stores). What is over needs no secret any more."""
    pending = state == "pending"
    return {
        **({} if pending else {"secret": None}),
        "state": state,
        "next_at": now + (retry_ms or 0) if pending else None,
        "claimed_by": None,
        "claim_until": None,
        "last_status": status,
        "last_error": error,
        "done_at": None if pending else now,
    }


def delivery_tried(
    tx: Tx, delivery_id: str, worker: str, state: str, retry_ms: int | None, status: int | None, error: str | None
) -> bool:
    columns = tried(tx.now, state, retry_ms, status, error)
    sets = ", ".join(f"{name} = :{name}" for name in columns)
    return bool(
        tx.rows(
            f"UPDATE webhook_delivery SET {sets} WHERE delivery_id = :delivery AND claimed_by = :worker"
            " AND webhook_delivery.state = 'pending' RETURNING delivery_id",
            {**columns, "delivery": delivery_id, "worker": worker},
        )
    )


def delivery_of(tx: Tx, run_id: str, tenant_id: str) -> Delivery | None:
    found = tx.rows(
        f"SELECT {DELIVERY.select} FROM webhook_delivery WHERE run_id = :run_id AND tenant_id = :tenant",
        {"run_id": run_id, "tenant": tenant_id},
    )
    return DELIVERY.decode(found[0]) if found else None


def usable(secrets: Secrets, now: int) -> Secrets:
    """Without an old secret whose time is over (both stores)."""
    if secrets.old_until is not None and secrets.old_until <= now:
        return replace(secrets, old_secret=None, old_until=None)
    return secrets


_SECRETS = "SELECT secret, old_secret, old_until, created_at FROM webhook_secret WHERE tenant_id = :tenant"


def webhook_secrets(tx: Tx, tenant_id: str, proposal: str) -> Secrets:
    tx.rows(
        "INSERT INTO webhook_secret (tenant_id, secret, created_at) VALUES (:tenant, :secret, :now)"
        " ON CONFLICT (tenant_id) DO NOTHING",
        {"tenant": tenant_id, "secret": proposal, "now": tx.now},
    )
    [row] = tx.rows(_SECRETS, {"tenant": tenant_id})
    return usable(Secrets(*row), tx.now)


def rotate_webhook_secret(tx: Tx, tenant_id: str, secret: str, overlap_ms: int) -> Secrets:
    params: dict[str, Any] = {"tenant": tenant_id, "secret": secret, "now": tx.now, "until": tx.now + overlap_ms}
    tx.rows(
        "INSERT INTO webhook_secret (tenant_id, secret, created_at) VALUES (:tenant, :secret, :now)"
        " ON CONFLICT (tenant_id) DO UPDATE SET old_secret = webhook_secret.secret, old_until = :until,"
        " secret = :secret, created_at = :now",
        params,
    )
    [row] = tx.rows(_SECRETS, {"tenant": tenant_id})
    return usable(Secrets(*row), tx.now)


class SqlWebhooks(Transacting):
    """`ports.webhooks.WebhookStore`."""

    async def due_deliveries(self) -> int:
        return await self._read(due_deliveries)

    async def claim_deliveries(self, worker: str, claim_ms: int, limit: int = 8) -> list[Delivery]:
        check_ttl(claim_ms)
        return await self._write(claim_deliveries, to_text(worker, "claimed_by"), claim_ms, limit)

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
        return await self._write(delivery_tried, delivery_id, worker, state, retry_ms, status, said)

    async def delivery_of(self, run_id: str, tenant_id: str) -> Delivery | None:
        return await self._read(delivery_of, run_id, tenant_id)

    async def webhook_secrets(self, tenant_id: str, proposal: str) -> Secrets:
        return await self._write(webhook_secrets, tenant_id, to_text(proposal, "secret"))

    async def rotate_webhook_secret(self, tenant_id: str, secret: str, overlap_ms: int) -> Secrets:
        check_ttl(overlap_ms)
        return await self._write(rotate_webhook_secret, tenant_id, to_text(secret, "secret"), overlap_ms)


def check_state(state: str) -> None:
    """ValueError for a word that an attempt cannot leave (both stores)."""
    if state not in STATES:
        raise ValueError(f"no such state of a delivery: {state!r}")
