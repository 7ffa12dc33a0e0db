"""Rules that every store keeps, over values: what may change, and what it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from corral.domain.records import Idempotency, InstanceRecord, LeaseChange, LeaseRecord, SandboxRecord
from corral.errors import CorralError

from .rows import DEFAULT_CLAIM_MS, Row, conflict, idempotency_conflict, lease_lost, may_move, to_text


def check_idempotency(idem: Idempotency) -> None:
    """`invalid_value` for text that cannot be a key (both stores)."""
    for name in ("tenant_id", "route", "key", "body_digest"):
        to_text(getattr(idem, name), f"idempotency_key.{name}")


def made_before(idem: Idempotency, digest: str, resource_id: str) -> str:
    """What a key that counts has made: another request under it is a conflict."""
    if digest != idem.body_digest:
        raise idempotency_conflict(idem.route, idem.key)
    return resource_id


def check_monotone(old: SandboxRecord, changes: Row) -> None:
    """A fence never falls and a taint never ends."""
    incarnation = changes.get("incarnation")
    if isinstance(incarnation, int) and incarnation < old.incarnation:
        raise CorralError(
            "illegal_transition", f"the incarnation of {old.sandbox_id} cannot fall below {old.incarnation}"
        )
    if old.tainted and changes.get("tainted") is False:
        raise CorralError("illegal_transition", f"the taint of {old.sandbox_id} ends only with its destruction")


def check_expired(change: LeaseChange | None, lease: LeaseRecord, now: int) -> None:
    """`conflict` where a change is for an expired lease only, and this one is held; `lease_lost` the other way (both stores)."""
    if change is not None and change.if_expired and now < lease.expires_at:
        raise conflict(f"the lease of {lease.sandbox_id} has not expired")
    if change is not None and change.if_held and now >= lease.expires_at:
        raise lease_lost(lease.sandbox_id, "it has expired")


def check_holder(lease: LeaseRecord, owner: str, now: int) -> None:
    """`lease_lost` unless `owner` holds it now; `expires_at` is the first instant at which it is not held (both stores)."""
    if lease.lease_owner != owner:
        raise lease_lost(lease.sandbox_id, f"its owner is {lease.lease_owner or 'nobody'}")
    if now >= lease.expires_at:
        raise lease_lost(lease.sandbox_id, "it has expired")


def changed_lease(now: int, lease: LeaseRecord, change: LeaseChange) -> LeaseRecord:
    """The rule of a lease change, as a value (both stores use it)."""
    owner, ttl_ms = change.owner, change.ttl_ms
    if change.kind == "take":
        version, digest = lease.lease_version + 1, change.request_digest
        return LeaseRecord(lease.sandbox_id, owner, version, now, now, now + ttl_ms, digest)
    if change.kind == "drop":
        return LeaseRecord(lease.sandbox_id, None, lease.lease_version + 1, lease.acquired_at, now, now)
    if lease.lease_owner is None or (owner is not None and owner != lease.lease_owner):
        raise lease_lost(lease.sandbox_id, f"its owner is {lease.lease_owner or 'nobody'}")
    if now >= lease.expires_at:
        raise lease_lost(lease.sandbox_id, "it has expired")
    return replace(lease, heartbeat_at=now, expires_at=max(lease.expires_at, now + ttl_ms))


def check_move(old: InstanceRecord, expect: Sequence[str], state: str, sandbox_id: str | None) -> None:
    """The rules of an instance's state (both stores use them): CAS, never back, bound only to its own sandbox."""
    if old.state not in expect:
        raise conflict(
            f"instance {old.instance_id} is {old.state}, not {' or '.join(expect) or 'anything'}", state=old.state
        )
    if not may_move(old.state, state):
        raise conflict(f"instance {old.instance_id} is {old.state} and never becomes {state} again", state=old.state)
    if state == "bound" and (sandbox_id is None or old.sandbox_id not in (None, sandbox_id)):
        raise conflict(f"instance {old.instance_id} cannot be bound to {sandbox_id}: it is of {old.sandbox_id}")


def new_command(row: Row, now: int) -> Row:
    """A command as it is inserted: open, and locked only if it names its worker (then it is in its first attempt)."""
    row = {**row, "done_at": None, "outcome": None}
    if row["claimed_by"] is None:
        return {**row, "claim_until": None}
    until = row["claim_until"] if row["claim_until"] is not None else now + DEFAULT_CLAIM_MS
    return {**row, "claim_until": until, "attempt": max(1, int(row["attempt"] or 0))}
