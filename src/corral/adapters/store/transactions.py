"""The transaction functions as SQL text that SQLite (>= 3.35) and PostgreSQL both read: named parameters, `ON CONFLICT`, `RETURNING`.

Each function runs inside one open transaction and either returns or raises; whoever calls it commits or rolls back. The database
driver's unique violations become `conflict` there. See ADR 0002 for why this is text.

On SQLite transactions that write run one after the other. On PostgreSQL they run at READ COMMITTED, each statement on what is committed
when it begins: a function that decides over rows locks them first (`tx.for_update`), and reads after that what the decision needs. The
order is run, sandbox (with its lease), exec, instance, command; whoever does it otherwise may be chosen as the loser of a deadlock, and
is run again. One `UPDATE … WHERE` that says all of its condition needs no lock: it judges the newest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from corral.domain.fence import Fence
from corral.domain.records import Committed, Idempotency, InstanceRecord, LeaseChange, LeaseRecord, SandboxRecord
from corral.ports.queue import Charge

from . import reserving
from .commands import add_command, finish_commands
from .repeats import claim_key
from .rows import INSTANCE, LEASE, SANDBOX, InstanceStep, Row, Step, conflict, lease_lost, not_found, renewed_expiry
from .rules import changed_lease, check_expired, check_holder, check_monotone, check_move
from .tables import OPEN_EXEC_WORDS, new_values, row_of, set_columns
from .trail import note, record_event
from .transacting import Tx

# The only things put together as text here are column names and parameter names of this package; values are always bound.
# ruff: noqa: S608


def create_sandbox(
    tx: Tx,
    sandbox: Row,
    event: Row,
    audit: Row,
    idem: Idempotency | None,
    steps: Sequence[Step] = (),
    charge: Charge | None = None,
) -> tuple[SandboxRecord, bool]:
    sandbox_id = str(sandbox["sandbox_id"])
    known = claim_key(tx, idem, sandbox_id)
    if known is not None:
        return SANDBOX.decode(row_of(tx, SANDBOX, known)), False
    tx.send(SANDBOX.insert, sandbox)
    lease = LeaseRecord(sandbox_id, None, 0, tx.now, tx.now, tx.now)
    tx.send(LEASE.insert, LEASE.encode(lease))
    tx.send(
        "INSERT INTO sandbox_environment (sandbox_id, base_image_digest, environment_version, dirty_level)"
        " VALUES (:sandbox_id, :digest, 1, 'clean')",
        {"sandbox_id": sandbox_id, "digest": sandbox["template_digest"]},
    )
    record_event(tx, event, sandbox_id, None, str(sandbox["state"]))
    note(tx, audit)
    made = SANDBOX.from_row(sandbox)
    for step in steps:
        left = commit_locked(tx, step, made, lease)
        made, lease = left.sandbox, left.lease
    if charge is not None:
        reserving.sandbox_made(tx, sandbox_id, made.tenant_id, charge)
    return made, True


def commit_transitions(tx: Tx, steps: Sequence[Step]) -> Committed:
    """In order; the last one's answer."""
    first, *more = steps
    left = commit_transition(tx, first)
    for step in more:
        left = commit_locked(tx, step, left.sandbox, left.lease)
    return left


def commit_transition(tx: Tx, step: Step) -> Committed:
    return commit_locked(tx, step, *sandbox_and_lease(tx, step.source.sandbox_id))


def commit_locked(tx: Tx, step: Step, old: SandboxRecord, lease: LeaseRecord) -> Committed:
    """`commit_transition` of a sandbox whose rows this transaction has locked, and which are as given."""
    source = step.source
    if source.sandbox_id != old.sandbox_id:
        return commit_transition(tx, step)
    if source.expect_fence is not None:
        check_fence(old, lease, source.expect_fence)
    if old.version != source.expect_version:
        raise conflict(
            f"sandbox {old.sandbox_id} is {old.state} at version {old.version}, not {source.expect_version}",
            state=old.state,
        )
    check_monotone(old, step.changes)
    check_expired(source.lease, lease, tx.now)
    [row] = tx.rows(
        f"UPDATE sandbox SET {set_columns(tuple(step.changes))}state = :state, version = version + 1"
        f" WHERE sandbox_id = :sandbox_id RETURNING {SANDBOX.select}",
        {**new_values(step.changes), "state": step.new_state, "sandbox_id": old.sandbox_id},
    )
    sandbox = SANDBOX.decode(row)
    if source.lease is not None:
        lease = _change_lease(tx, lease, source.lease)
    for change in step.instances:
        _change_instance(tx, change, sandbox)
    finish_commands(tx, old.sandbox_id, step.done)
    for command in step.commands:
        add_command(tx, command)
    if source.end_execs is not None:
        tx.send(
            "UPDATE exec SET cancel_requested = COALESCE(cancel_requested, :reason), version = version + 1"
            f" WHERE sandbox_id = :sandbox_id AND {OPEN_EXEC_WORDS}",
            {"reason": source.end_execs, "sandbox_id": old.sandbox_id},
        )
    if source.settled:
        tx.send(
            "UPDATE sandbox_environment SET environment_version = environment_version + 1 WHERE sandbox_id = :sandbox_id",
            {"sandbox_id": old.sandbox_id},
        )
    event_id = record_event(tx, step.event, old.sandbox_id, old.state, step.new_state)
    if step.audit is not None:
        note(tx, step.audit)
    if step.new_state in reserving.FREE_STATES:
        reserving.sandbox_ended(tx, old.sandbox_id, old.tenant_id)
    return Committed(sandbox, lease, event_id)


def renew_lease(tx: Tx, sandbox_id: str, owner: str, fence: Fence, ttl_ms: int) -> LeaseRecord:
    sandbox, lease = sandbox_and_lease(tx, sandbox_id)
    check_fence(sandbox, lease, fence)
    return renewed(tx, lease, owner, ttl_ms)


def sandbox_and_lease(tx: Tx, sandbox_id: str) -> tuple[SandboxRecord, LeaseRecord]:
    """Both rows, locked: whatever a transaction decides over a sandbox, it decides after this."""
    found = tx.rows(
        f"SELECT {SANDBOX.qualified('s')}, {LEASE.qualified('l')} FROM sandbox s"
        f" JOIN sandbox_lease l ON l.sandbox_id = s.sandbox_id WHERE s.sandbox_id = :sandbox_id {tx.for_update}",
        {"sandbox_id": sandbox_id},
    )
    if not found:
        raise not_found("sandbox", sandbox_id)
    split = len(SANDBOX.columns)
    return SANDBOX.decode(found[0][:split]), LEASE.decode(found[0][split:])


def check_fence(sandbox: SandboxRecord, lease: LeaseRecord, fence: Fence) -> None:
    current = Fence(sandbox.incarnation, lease.lease_version)
    if fence != current:
        raise lease_lost(sandbox.sandbox_id, f"the fence is {current}, not {fence}")


def renewed(tx: Tx, lease: LeaseRecord, owner: str, ttl_ms: int) -> LeaseRecord:
    check_holder(lease, owner, tx.now)
    expires_at = renewed_expiry(lease.expires_at, tx.now, ttl_ms)
    if expires_at is None:
        return lease
    new = replace(lease, heartbeat_at=tx.now, expires_at=expires_at)
    _write_lease(tx, new)
    return new


def _change_lease(tx: Tx, lease: LeaseRecord, change: LeaseChange) -> LeaseRecord:
    new = changed_lease(tx.now, lease, change)
    _write_lease(tx, new)
    return new


def _write_lease(tx: Tx, lease: LeaseRecord) -> None:
    tx.send(
        "UPDATE sandbox_lease SET lease_owner = :lease_owner, lease_version = :lease_version, acquired_at = :acquired_at,"
        " heartbeat_at = :heartbeat_at, expires_at = :expires_at, request_digest = :request_digest"
        " WHERE sandbox_id = :sandbox_id",
        LEASE.encode(lease),
    )


def _change_instance(tx: Tx, change: InstanceStep, sandbox: SandboxRecord) -> None:
    if change.record is not None:
        tx.send(INSTANCE.insert, change.record)
        return
    old = INSTANCE.decode(row_of(tx, INSTANCE, change.instance_id, tx.for_update))
    check_move(old, change.expect, change.state, sandbox.sandbox_id)
    bound = change.state == "bound"
    _move_instance(
        tx,
        old,
        change.state,
        change.ref,
        sandbox_id=sandbox.sandbox_id if bound else old.sandbox_id,
        incarnation=sandbox.incarnation if bound else old.incarnation,
    )


def _move_instance(
    tx: Tx, old: InstanceRecord, state: str, ref: str | None, *, sandbox_id: str | None, incarnation: int
) -> InstanceRecord:
    [row] = tx.rows(
        "UPDATE instance SET state = :state, sandbox_id = :sandbox_id, incarnation = :incarnation,"
        f" ref = COALESCE(:ref, ref) WHERE instance_id = :instance_id RETURNING {INSTANCE.select}",
        {
            "state": state,
            "sandbox_id": sandbox_id,
            "incarnation": incarnation,
            "ref": ref,
            "instance_id": old.instance_id,
        },
    )
    return INSTANCE.decode(row)


def update_instance(tx: Tx, instance_id: str, expect: Sequence[str], state: str, ref: str | None) -> InstanceRecord:
    old = INSTANCE.decode(row_of(tx, INSTANCE, instance_id, tx.for_update))
    check_move(old, expect, state, old.sandbox_id)
    return _move_instance(tx, old, state, ref, sandbox_id=old.sandbox_id, incarnation=old.incarnation)
