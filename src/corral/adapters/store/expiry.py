"""`ports.expiry` as SQL. See `transactions` for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.domain.expiry import IDLE_STATES
from corral.domain.records import SandboxView
from corral.ports.expiry import Due

from .rows import SANDBOX
from .sql_text import one_of, page_size
from .transacting import Transacting, Tx
from .views import views

# ruff: noqa: S608 - what is put together are column names of this package

LIVES = "state <> 'terminated' AND state <> 'sanitizing'"
"""The very words of the index by time to live."""
IDLES = "idle_timeout_ms IS NOT NULL"
"""The very words of the index by activity."""
_CHUNK = 500


def due_sandboxes(tx: Tx, limit: int) -> list[Due]:
    params: dict[str, Any] = {"now": tx.now, "limit": page_size(limit)}
    found = _found(tx, f"{LIVES} AND expires_at <= :now ORDER BY expires_at, sandbox_id", params)
    due = [Due(view, "ttl") for view in found]
    if len(due) < limit:
        params = {"now": tx.now, "limit": page_size(limit - len(due)), "no": False}
        states = one_of("state", IDLE_STATES, params)
        where = f"{IDLES} AND last_active_at + idle_timeout_ms <= :now AND {states} AND expires_at > :now"
        found = _found(tx, f"{where} AND one_shot = :no ORDER BY last_active_at + idle_timeout_ms, sandbox_id", params)
        due += [Due(view, "idle_timeout") for view in found]
    return due


def _found(tx: Tx, where: str, params: dict[str, Any]) -> list[SandboxView]:
    found = tx.rows(f"SELECT {SANDBOX.select} FROM sandbox WHERE {where} LIMIT :limit", params)
    return views(tx, [SANDBOX.decode(row) for row in found])


def touch(tx: Tx, sandbox_ids: Sequence[str]) -> None:
    known = sorted({one for one in sandbox_ids if one.isascii()})  # in one order: two of these never wait in a ring
    for start in range(0, len(known), _CHUNK):
        params: dict[str, Any] = {"now": tx.now}
        where = one_of("sandbox_id", known[start : start + _CHUNK], params)
        tx.rows(f"SELECT sandbox_id FROM sandbox WHERE {where} ORDER BY sandbox_id {tx.for_update}", params)
        tx.rows(
            f"UPDATE sandbox SET last_active_at = :now, version = version + 1"
            f" WHERE {where} AND {LIVES} AND last_active_at < :now",
            params,
        )


class SqlExpiry(Transacting):
    """`ports.expiry.ExpiryStore`."""

    async def due_sandboxes(self, limit: int = 100) -> list[Due]:
        return await self._read(due_sandboxes, limit)

    async def touch(self, sandbox_ids: Sequence[str]) -> None:
        if sandbox_ids:
            await self._write(touch, tuple(sandbox_ids))
