"""`ports.repeats` as SQL. See `transactions` for the rules."""

from __future__ import annotations

from corral.domain.records import Idempotency
from corral.ports.repeats import DELIVERY_LIFE_MS, KEY_LIFE_MS

from .rules import check_idempotency, made_before
from .sql_text import page_size
from .transacting import Transacting, Tx

# ruff: noqa: S608 - what is put together are column names of this package

_KEY = "tenant_id, route, request_key"


def claim_key(tx: Tx, idem: Idempotency | None, resource_id: str) -> str | None:
    """None if the key is new, or too old to count (now it belongs to `resource_id`), else the id of what it made before."""
    if idem is None:
        return None
    check_idempotency(idem)
    key = {"tenant": idem.tenant_id, "route": idem.route, "key": idem.key}
    while True:
        # Where several transactions run at once, this one waits here for another that has inserted the key and is not committed.
        fresh = tx.rows(
            "INSERT INTO idempotency_key (tenant_id, route, request_key, body_digest, resource_id, created_at)"
            " VALUES (:tenant, :route, :key, :digest, :resource, :now)"
            " ON CONFLICT (tenant_id, route, request_key) DO UPDATE SET body_digest = :digest, resource_id = :resource,"
            " created_at = :now WHERE idempotency_key.created_at <= :old RETURNING resource_id",
            {
                **key,
                "digest": idem.body_digest,
                "resource": resource_id,
                "now": tx.now,
                "old": tx.now - KEY_LIFE_MS,
            },
        )
        if fresh:
            return None
        found = tx.rows(
            "SELECT body_digest, resource_id FROM idempotency_key"
            " WHERE tenant_id = :tenant AND route = :route AND request_key = :key",
            key,
        )
        if found:  # else it was old, and has been removed between the two
            return made_before(idem, *found[0])


def made_under(tx: Tx, idem: Idempotency) -> str | None:
    found = tx.rows(
        "SELECT body_digest, resource_id FROM idempotency_key"
        " WHERE tenant_id = :tenant AND route = :route AND request_key = :key AND created_at > :old",
        {"tenant": idem.tenant_id, "route": idem.route, "key": idem.key, "old": tx.now - KEY_LIFE_MS},
    )
    return made_before(idem, *found[0]) if found else None


def forget_old(tx: Tx, limit: int) -> int:
    removed = 0
    for table, key, at, life_ms in (
        ("idempotency_key", _KEY, "created_at", KEY_LIFE_MS),
        ("webhook_delivery", "delivery_id", "done_at", DELIVERY_LIFE_MS),
    ):
        # Materialized, else a database may look for them once for each row. What somebody else holds waits for the next time.
        removed += len(
            tx.rows(
                f"WITH picked AS MATERIALIZED (SELECT {key} FROM {table} WHERE {at} <= :old"
                f" ORDER BY {at} LIMIT :limit {tx.skip_locked})"
                f" DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM picked) RETURNING 1",
                {"old": tx.now - life_ms, "limit": page_size(limit)},
            )
        )
    return removed


class SqlRepeats(Transacting):
    """`ports.repeats.RepeatsStore`."""

    async def made_under(self, idempotency: Idempotency) -> str | None:
        check_idempotency(idempotency)
        return await self._read(made_under, idempotency)

    async def forget_old(self, limit: int = 500) -> int:
        return await self._write(forget_old, limit)
