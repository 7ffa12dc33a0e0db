"""`ports.leases` as SQL: renewals in one go, what has run out, fences that a node knows better. See `transactions` for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from corral.domain.fence import Fence
from corral.domain.lease import REGRESSED, SYSTEM_TTL_MS
from corral.domain.records import EventRecord, LeaseRecord, SandboxRecord, SandboxView
from corral.errors import CorralError
from corral.ports.leases import Renewal, Seen

from .rows import EVENT, LEASE, SANDBOX, Row, check_ttl, lease_lost, not_found, renewed_expiry, to_text
from .rules import check_holder
from .sql_text import one_of, page_size
from .trail import add_event
from .transacting import Transacting, Tx
from .views import get_sandbox, views

# ruff: noqa: S608 - what is put together are column names of this package

HELD = "l.lease_owner IS NOT NULL AND substr(l.lease_owner, 1, 7) <> 'system:'"
"""Somebody has it, the system not counted: the very words of the index."""
ENDING = ("leased", "running", "paused", "reuse_checking")
"""States in which an expired lease is to be taken back."""
_CHUNK = 500


def see_sandbox(tx: Tx, sandbox_id: str, tenant_id: str | None) -> Seen | None:
    view = get_sandbox(tx, sandbox_id, tenant_id)
    return None if view is None else Seen(view, tx.now)


def renewed(
    sandbox_id: str, incarnation: int, lease: LeaseRecord, wish: Renewal, now: int
) -> LeaseRecord | CorralError | None:
    """The rule of one renewal, as a value (both stores): the lease to write, a refusal, or None: the row is long enough."""
    current = Fence(incarnation, lease.lease_version)
    if wish.fence != current:
        return lease_lost(sandbox_id, f"the fence is {current}, not {wish.fence}")
    try:
        check_holder(lease, wish.owner, now)
    except CorralError as error:
        return error
    expires_at = renewed_expiry(lease.expires_at, now, wish.ttl_ms)
    if expires_at is None:
        return None
    return replace(lease, heartbeat_at=now, expires_at=expires_at)


def renew_leases(tx: Tx, wishes: Sequence[Renewal]) -> tuple[int, list[LeaseRecord | CorralError]]:
    known: dict[str, tuple[int, LeaseRecord]] = {}
    ids = sorted({wish.sandbox_id for wish in wishes})
    for start in range(0, len(ids), _CHUNK):
        params: dict[str, Any] = {}
        where = one_of("s.sandbox_id", ids[start : start + _CHUNK], params)
        # In one order, so that two of these never wait for each other in a ring.
        found = tx.rows(
            f"SELECT s.incarnation, {LEASE.qualified('l')} FROM sandbox s JOIN sandbox_lease l"
            f" ON l.sandbox_id = s.sandbox_id WHERE {where} ORDER BY s.sandbox_id {tx.for_update}",
            params,
        )
        for row in found:
            lease = LEASE.decode(row[1:])
            known[lease.sandbox_id] = (int(row[0]), lease)
    answers: list[LeaseRecord | CorralError] = []
    longer: dict[int, list[str]] = {}
    for wish in wishes:
        if wish.sandbox_id not in known:
            answers.append(not_found("sandbox", wish.sandbox_id))
            continue
        incarnation, lease = known[wish.sandbox_id]
        new = renewed(wish.sandbox_id, incarnation, lease, wish, tx.now)
        if isinstance(new, LeaseRecord):
            known[wish.sandbox_id] = (incarnation, new)
            longer.setdefault(new.expires_at, []).append(wish.sandbox_id)
        answers.append(lease if new is None else new)
    for expires_at, each in longer.items():
        for start in range(0, len(each), _CHUNK):
            params = {"now": tx.now, "until": expires_at}
            where = one_of("sandbox_id", each[start : start + _CHUNK], params)
            tx.rows(f"UPDATE sandbox_lease SET heartbeat_at = :now, expires_at = :until WHERE {where}", params)
    return tx.now, answers


def due_leases(tx: Tx, limit: int) -> list[SandboxView]:
    params: dict[str, Any] = {"now": tx.now, "no": False, "limit": page_size(limit)}
    states = one_of("s.state", ENDING, params)
    found = tx.rows(
        f"SELECT {SANDBOX.qualified('s')} FROM sandbox_lease l JOIN sandbox s ON s.sandbox_id = l.sandbox_id"
        f" WHERE {HELD} AND l.expires_at <= :now AND {states} AND s.one_shot = :no"
        " ORDER BY l.expires_at LIMIT :limit",
        params,
    )
    return views(tx, [SANDBOX.decode(row) for row in found])


def list_leases(tx: Tx, tenant_id: str, after: str | None, limit: int) -> list[Seen]:
    params: dict[str, Any] = {"tenant_id": tenant_id, "limit": page_size(limit)}
    where = f"s.tenant_id = :tenant_id AND s.state <> 'terminated' AND {HELD}"
    if after is not None:
        last = tx.rows(
            "SELECT created_at FROM sandbox WHERE sandbox_id = :after AND tenant_id = :tenant_id",
            {"after": after, "tenant_id": tenant_id},
        )
        if not last:
            raise not_found("sandbox", after)
        where += " AND (s.created_at, s.sandbox_id) < (:created_at, :after)"
        params |= {"created_at": last[0][0], "after": after}
    found = tx.rows(
        f"SELECT {SANDBOX.qualified('s')} FROM sandbox s JOIN sandbox_lease l ON l.sandbox_id = s.sandbox_id"
        f" WHERE {where} ORDER BY s.created_at DESC, s.sandbox_id DESC LIMIT :limit",
        params,
    )
    return [Seen(view, tx.now) for view in views(tx, [SANDBOX.decode(row) for row in found])]


def raised(sandbox: SandboxRecord, lease: LeaseRecord, floor: Fence, now: int) -> tuple[int, LeaseRecord] | None:
    """(incarnation, lease) above a floor that a node has seen, or None: the row is not behind (both stores)."""
    if sandbox.state == "terminated" or Fence(sandbox.incarnation, lease.lease_version) >= floor:
        return None
    incarnation = max(sandbox.incarnation, floor.incarnation)
    new = LeaseRecord(lease.sandbox_id, REGRESSED, floor.token + 1, now, now, now + SYSTEM_TTL_MS)
    return incarnation, new


def adoption(sandbox: SandboxRecord, lease: LeaseRecord, floor: Fence, evidence: dict[str, Any]) -> Row:
    """The event of an adoption."""
    about = {"floor": str(floor), "row": str(Fence(sandbox.incarnation, lease.lease_version)), **evidence}
    return EVENT.encode(
        EventRecord(sandbox.sandbox_id, "floor_adopted", sandbox.state, sandbox.state, {**about, "owner": REGRESSED})
    )


def adopt_floor(tx: Tx, sandbox_id: str, floor: Fence, evidence: dict[str, Any]) -> SandboxView | None:
    found = tx.rows(
        f"SELECT {SANDBOX.select} FROM sandbox WHERE sandbox_id = :sandbox_id {tx.for_update}",
        {"sandbox_id": sandbox_id},
    )
    if not found:
        return None
    sandbox = SANDBOX.decode(found[0])
    [row] = tx.rows(
        f"SELECT {LEASE.select} FROM sandbox_lease WHERE sandbox_id = :sandbox_id", {"sandbox_id": sandbox_id}
    )
    lease = LEASE.decode(row)
    new = raised(sandbox, lease, floor, tx.now)
    if new is None:
        return None
    tx.rows(
        "UPDATE sandbox SET incarnation = :incarnation, version = version + 1 WHERE sandbox_id = :sandbox_id",
        {"incarnation": new[0], "sandbox_id": sandbox_id},
    )
    tx.rows(
        "UPDATE sandbox_lease SET lease_owner = :lease_owner, lease_version = :lease_version, acquired_at = :acquired_at,"
        " heartbeat_at = :heartbeat_at, expires_at = :expires_at, request_digest = :request_digest"
        " WHERE sandbox_id = :sandbox_id",
        LEASE.encode(new[1]),
    )
    add_event(tx, adoption(sandbox, lease, floor, evidence))
    return get_sandbox(tx, sandbox_id, None)


def newest_event(tx: Tx) -> int:
    [(newest,)] = tx.rows("SELECT COALESCE(MAX(event_id), 0) FROM sandbox_event")
    return int(newest)


def environment_version(tx: Tx, sandbox_id: str) -> int:
    found = tx.rows(
        "SELECT environment_version FROM sandbox_environment WHERE sandbox_id = :sandbox_id", {"sandbox_id": sandbox_id}
    )
    if not found:
        raise not_found("sandbox", sandbox_id)
    return int(found[0][0])


def check_wishes(wishes: Sequence[Renewal]) -> None:
    """Programming errors and text that no database holds, before the transaction (both stores)."""
    for wish in wishes:
        check_ttl(wish.ttl_ms)
        to_text(wish.owner, "sandbox_lease.lease_owner")


class SqlLeases(Transacting):
    """`ports.leases.LeaseStore`."""

    async def see_sandbox(self, sandbox_id: str, tenant_id: str | None) -> Seen | None:
        return await self._read(see_sandbox, sandbox_id, tenant_id)

    async def renew_leases(self, renewals: Sequence[Renewal]) -> tuple[int, list[LeaseRecord | CorralError]]:
        check_wishes(renewals)
        return await self._write(renew_leases, tuple(renewals))

    async def due_leases(self, limit: int = 100) -> list[SandboxView]:
        return await self._read(due_leases, limit)

    async def list_leases(self, tenant_id: str, *, after: str | None = None, limit: int = 100) -> list[Seen]:
        return await self._read(list_leases, tenant_id, after, limit)

    async def adopt_floor(self, sandbox_id: str, floor: Fence, evidence: dict[str, Any]) -> SandboxView | None:
        return await self._write(adopt_floor, sandbox_id, floor, dict(evidence))

    async def newest_event(self) -> int:
        return await self._read(newest_event)

    async def environment_version(self, sandbox_id: str) -> int:
        return await self._read(environment_version, sandbox_id)
