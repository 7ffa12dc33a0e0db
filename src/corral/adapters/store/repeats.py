"""`ports.repeats` as SQL. See `transactions` for the rules."""

from __future__ import annotations

from corral.domain.records import Idempotency
from corral.ports.repeats import DELIVERY_LIFE_MS, KEY_LIFE_MS

from .rows import idempotency_conflict
from .sql_text import page_size
from .transacting import Transacting, Tx
from .transactions import check_idempotency

# ruff: noqa: S608 - what is put together are column names of this package

_KEY = "tenant_id, route, request_key"


def made_under(tx: Tx, idem: Idempotency) -> str | None:
    found = tx.rows(
        "SELECT body_digest, resource_id FROM idempotency_key"
        " WHERE tenant_id = :tenant AND route = :route AND request_key = :key AND created_at > :old",
        {"tenant": idem.tenant_id, "route": idem.route, "key": idem.key, "old": tx.now - KEY_LIFE_MS},
    )
    if not found:
        return None
    [(digest, known)] = found
    if digest != idem.body_digest:
        raise idempotency_conflict(idem.route, idem.key)
    return str(known)


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
