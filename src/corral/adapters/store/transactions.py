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
from typing import Any

from corral.domain.fence import Fence
from corral.domain.records import (
    AuditRecord,
    CommandRecord,
    Committed,
    EventRecord,
    ExecRecord,
    Idempotency,
    InstanceRecord,
    LeaseChange,
    LeaseRecord,
    RunRecord,
    SandboxRecord,
    SandboxView,
)
from corral.errors import CorralError
from corral.ports.queue import Charge, Ticket
from corral.ports.repeats import KEY_LIFE_MS

from . import reserving
from .rows import (
    AUDIT,
    COMMAND,
    DEFAULT_CLAIM_MS,
    EVENT,
    EXEC,
    INSTANCE,
    LEASE,
    OPEN_EXEC,
    RUN,
    SANDBOX,
    DoneStep,
    InstanceStep,
    Row,
    Shape,
    Step,
    conflict,
    idempotency_conflict,
    lease_lost,
    listed,
    may_move,
    not_found,
    renewed_expiry,
    superseded,
    to_text,
)
from .sql_text import one_of, page_size
from .transacting import Tx

# The only things put together as text here are column names and parameter names of this package; values are always bound.
# ruff: noqa: S608

_PAGE = 500
_LAST = {"run": "finished", "sandbox": "terminated"}
_OPEN_EXEC = "state IN ('starting', 'running')"
"""The very words of the indexes of open execs: nothing that is bound would do."""
assert OPEN_EXEC == ("starting", "running")
_LIST_ROWS = 50


def _set(columns: Sequence[str]) -> str:
    return "".join(f"{name} = :new_{name}, " for name in columns)


def _new(changes: Row) -> dict[str, Any]:
    return {f"new_{name}": value for name, value in changes.items()}


def check_idempotency(idem: Idempotency) -> None:
    """`invalid_value` for text that cannot be a key (both stores)."""
    for name in ("tenant_id", "route", "key", "body_digest"):
        to_text(getattr(idem, name), f"idempotency_key.{name}")


def _claim_key(tx: Tx, idem: Idempotency | None, resource_id: str) -> str | None:
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
            [(digest, known)] = found
            if digest != idem.body_digest:
                raise idempotency_conflict(idem.route, idem.key)
            return str(known)


def add_audit(tx: Tx, audit: Row) -> int:
    [(audit_id,)] = tx.rows(AUDIT.insert, {**audit, "timestamp": tx.now})
    return int(audit_id)


def _note(tx: Tx, audit: Row) -> None:
    """`add_audit` whose id nobody asks for."""
    tx.send(AUDIT.insert, {**audit, "timestamp": tx.now})


def _add_event(tx: Tx, event: Row, sandbox_id: str, old_state: str | None, new_state: str | None) -> int:
    row = {**event, "sandbox_id": sandbox_id, "timestamp": tx.now}
    if row["old_state"] is None:
        row["old_state"] = old_state
    if row["new_state"] is None:
        row["new_state"] = new_state
    [(event_id,)] = tx.rows(EVENT.insert, row)
    return int(event_id)


# -- runs --------------------------------------------------------------------------------------------------------------------------


def submit_run(
    tx: Tx, run: Row, audit: Row, idem: Idempotency | None, ticket: Ticket | None = None
) -> tuple[RunRecord, bool]:
    run_id = str(run["run_id"])
    known = _claim_key(tx, idem, run_id)
    if known is not None:
        return RUN.decode(_row(tx, RUN, known)), False
    tx.send(RUN.insert, run)
    _note(tx, audit)
    if ticket is not None:
        reserving.run_submitted(tx, run_id, str(run["tenant_id"]), ticket)
    return RUN.from_row(run), True


def _row(tx: Tx, shape: Shape[Any], key: str, lock: str = "") -> tuple[Any, ...]:
    found = tx.rows(f"SELECT {shape.select} FROM {shape.table} WHERE {shape.key} = :key {lock}", {"key": key})
    if not found:
        raise not_found(shape.table, key)
    return found[0]


def _update(
    tx: Tx, shape: Shape[Any], key: str, expect: Sequence[str], changes: Row, driver: str | None = None
) -> tuple[Any, ...]:
    """CAS on the state of a row that has a version, and on its driver if one is given."""
    params: dict[str, Any] = {"key": key, **_new(changes)}
    where = one_of("state", expect, params)
    if driver is not None:
        params["driver"] = driver
        where += " AND driver = :driver"
    changed = tx.rows(
        f"UPDATE {shape.table} SET {_set(tuple(changes))}version = version + 1"
        f" WHERE {shape.key} = :key AND {where} RETURNING {shape.select}",
        params,
    )
    if changed:
        return changed[0]
    state = tx.rows(
        f"SELECT state{'' if driver is None else ', driver'} FROM {shape.table} WHERE {shape.key} = :key", {"key": key}
    )
    if not state:
        raise not_found(shape.table, key)
    if driver is not None and state[0][1] != driver:
        raise superseded(key, state[0][1])
    raise conflict(f"{shape.table} {key} is {state[0][0]}, not {' or '.join(expect) or 'anything'}", state=state[0][0])


def update_run(
    tx: Tx, run_id: str, expect: Sequence[str], changes: Row, audit: Row | None, driver: str | None = None
) -> RunRecord:
    row = _update(tx, RUN, run_id, expect, changes, driver)
    if audit is not None:
        _note(tx, audit)
    return RUN.decode(row)


def finish_run(
    tx: Tx, run_id: str, result: str, reason: str, timings: str, audit: Row, driver: str | None = None
) -> RunRecord:
    _check_driver(tx, run_id, driver, again=True)
    changed = tx.rows(
        "UPDATE run SET state = 'finished', result = :result, reason = :reason, timings = :timings, finished_at = :now,"
        f" version = version + 1 WHERE run_id = :run_id AND state <> 'finished' RETURNING {RUN.select}",
        {"result": result, "reason": reason, "timings": timings, "now": tx.now, "run_id": run_id},
    )
    if not changed:
        return RUN.decode(_row(tx, RUN, run_id))
    _note(tx, audit)
    ended = RUN.decode(changed[0])
    reserving.run_ended(tx, run_id, ended.tenant_id)
    return ended


def _check_driver(tx: Tx, run_id: str | None, driver: str | None, *, again: bool = False) -> None:
    """`superseded` unless `driver` still drives the run, `conflict` when it is over; `again`: then there is nothing to refuse.

    The row stays locked, so that nobody takes it over meanwhile.
    """
    if driver is None or run_id is None:
        return
    found = tx.rows(f"SELECT driver, state FROM run WHERE run_id = :run_id {tx.for_update}", {"run_id": run_id})
    if not found:
        raise not_found("run", run_id)
    over = found[0][1] == "finished"
    if over and again:
        return
    if found[0][0] != driver:
        raise superseded(run_id, found[0][0])
    if over:
        raise conflict(f"run {run_id} is finished", state="finished")


def get_run(tx: Tx, run_id: str, tenant_id: str) -> RunRecord | None:
    found = tx.rows(
        f"SELECT {RUN.select} FROM run WHERE run_id = :run_id AND tenant_id = :tenant_id",
        {"run_id": run_id, "tenant_id": tenant_id},
    )
    return RUN.decode(found[0]) if found else None


def _page(
    tx: Tx,
    shape: Shape[Any],
    tenant_id: str | None,
    states: Sequence[str] | None,
    after: str | None,
    limit: int,
    select: str | None = None,
) -> list[tuple[Any, ...]]:
    """Newest first by (created_at, id); `after` must be a row that the tenant may see."""
    params: dict[str, Any] = {"limit": page_size(limit)}
    where = ["1 = 1"]
    if tenant_id is not None:
        where.append("tenant_id = :tenant_id")
        params["tenant_id"] = tenant_id
    if after is not None:
        params["after"] = after
        last = tx.rows(
            f"SELECT created_at FROM {shape.table} WHERE {' AND '.join(where)} AND {shape.key} = :after",
            {k: v for k, v in params.items() if k != "limit"},
        )
        if not last:
            raise not_found(shape.table, after)
        params["created_at"] = last[0][0]
        where.append(f"(created_at, {shape.key}) < (:created_at, :after)")
    if states is not None:
        where.append(one_of("state", states, params))
        if (last_state := _LAST[shape.table]) not in states:
            where.append(f"state <> '{last_state}'")  # the very words of an index
    return tx.rows(
        f"SELECT {select or shape.select} FROM {shape.table} WHERE {' AND '.join(where)}"
        f" ORDER BY created_at DESC, {shape.key} DESC LIMIT :limit",
        params,
    )


def list_runs(tx: Tx, tenant_id: str, states: Sequence[str] | None, after: str | None, limit: int) -> list[RunRecord]:
    # A request may be as large as a body, and results have long lists: a few rows at a time, and the first not at all.
    select = ", ".join("'{}'" if name == "request" else name for name in RUN.columns)
    found: list[RunRecord] = []
    left = page_size(limit)
    while True:
        rows = _page(tx, RUN, tenant_id, states, after, min(left, _LIST_ROWS), select)
        found += [listed(RUN.decode(row)) for row in rows]
        left -= len(rows)
        if left <= 0 or len(rows) < _LIST_ROWS:
            return found
        after = found[-1].run_id


def open_runs(tx: Tx) -> list[RunRecord]:
    found = tx.rows(f"SELECT {RUN.select} FROM run WHERE state <> 'finished' ORDER BY created_at, run_id")
    return [RUN.decode(row) for row in found]


# -- sandboxes ---------------------------------------------------------------------------------------------------------------------


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
    known = _claim_key(tx, idem, sandbox_id)
    if known is not None:
        return SANDBOX.decode(_row(tx, SANDBOX, known)), False
    tx.send(SANDBOX.insert, sandbox)
    lease = LeaseRecord(sandbox_id, None, 0, tx.now, tx.now, tx.now)
    tx.send(LEASE.insert, LEASE.encode(lease))
    tx.send(
        "INSERT INTO sandbox_environment (sandbox_id, base_image_digest, environment_version, dirty_level)"
        " VALUES (:sandbox_id, :digest, 1, 'clean')",
        {"sandbox_id": sandbox_id, "digest": sandbox["template_digest"]},
    )
    _add_event(tx, event, sandbox_id, None, str(sandbox["state"]))
    _note(tx, audit)
    made = SANDBOX.from_row(sandbox)
    for step in steps:
        left = _commit(tx, step, made, lease)
        made, lease = left.sandbox, left.lease
    if charge is not None:
        reserving.sandbox_made(tx, sandbox_id, made.tenant_id, charge)
    return made, True


def _sandbox_and_lease(tx: Tx, sandbox_id: str) -> tuple[SandboxRecord, LeaseRecord]:
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


def _check_fence(sandbox: SandboxRecord, lease: LeaseRecord, fence: Fence) -> None:
    current = Fence(sandbox.incarnation, lease.lease_version)
    if fence != current:
        raise lease_lost(sandbox.sandbox_id, f"the fence is {current}, not {fence}")


def commit_transitions(tx: Tx, steps: Sequence[Step]) -> Committed:
    """In order; the last one's answer."""
    first, *more = steps
    left = commit_transition(tx, first)
    for step in more:
        left = _commit(tx, step, left.sandbox, left.lease)
    return left


def commit_transition(tx: Tx, step: Step) -> Committed:
    return _commit(tx, step, *_sandbox_and_lease(tx, step.source.sandbox_id))


def _commit(tx: Tx, step: Step, old: SandboxRecord, lease: LeaseRecord) -> Committed:
    """`commit_transition` of a sandbox whose rows this transaction has locked, and which are as given."""
    source = step.source
    if source.sandbox_id != old.sandbox_id:
        return commit_transition(tx, step)
    if source.expect_fence is not None:
        _check_fence(old, lease, source.expect_fence)
    if old.version != source.expect_version:
        raise conflict(
            f"sandbox {old.sandbox_id} is {old.state} at version {old.version}, not {source.expect_version}",
            state=old.state,
        )
    check_monotone(old, step.changes)
    check_expired(source.lease, lease, tx.now)
    [row] = tx.rows(
        f"UPDATE sandbox SET {_set(tuple(step.changes))}state = :state, version = version + 1"
        f" WHERE sandbox_id = :sandbox_id RETURNING {SANDBOX.select}",
        {**_new(step.changes), "state": step.new_state, "sandbox_id": old.sandbox_id},
    )
    sandbox = SANDBOX.decode(row)
    if source.lease is not None:
        lease = _change_lease(tx, lease, source.lease)
    for change in step.instances:
        _change_instance(tx, change, sandbox)
    _finish_commands(tx, old.sandbox_id, step.done)
    for command in step.commands:
        _add_command(tx, command)
    if source.end_execs is not None:
        tx.send(
            "UPDATE exec SET cancel_requested = COALESCE(cancel_requested, :reason), version = version + 1"
            f" WHERE sandbox_id = :sandbox_id AND {_OPEN_EXEC}",
            {"reason": source.end_execs, "sandbox_id": old.sandbox_id},
        )
    if source.settled:
        tx.send(
            "UPDATE sandbox_environment SET environment_version = environment_version + 1 WHERE sandbox_id = :sandbox_id",
            {"sandbox_id": old.sandbox_id},
        )
    event_id = _add_event(tx, step.event, old.sandbox_id, old.state, step.new_state)
    if step.audit is not None:
        _note(tx, step.audit)
    if step.new_state in reserving.FREE_STATES:
        reserving.sandbox_ended(tx, old.sandbox_id, old.tenant_id)
    return Committed(sandbox, lease, event_id)


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
    old = INSTANCE.decode(_row(tx, INSTANCE, change.instance_id, tx.for_update))
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


def new_command(row: Row, now: int) -> Row:
    """A command as it is inserted: open, and locked only if it names its worker (then it is in its first attempt)."""
    row = {**row, "done_at": None, "outcome": None}
    if row["claimed_by"] is None:
        return {**row, "claim_until": None}
    until = row["claim_until"] if row["claim_until"] is not None else now + DEFAULT_CLAIM_MS
    return {**row, "claim_until": until, "attempt": max(1, int(row["attempt"] or 0))}


def _add_command(tx: Tx, command: Row) -> None:
    tx.send(COMMAND.insert, new_command(command, tx.now))


_INSTANCE_ORDER = "CASE WHEN state = 'bound' THEN 0 ELSE 1 END, born_at DESC, incarnation DESC, instance_id DESC"


def views(tx: Tx, sandboxes: Sequence[SandboxRecord]) -> list[SandboxView]:
    leases: dict[str, LeaseRecord] = {}
    instances: dict[str, InstanceRecord] = {}
    for start in range(0, len(sandboxes), _PAGE):
        params: dict[str, Any] = {}
        where = one_of("sandbox_id", [s.sandbox_id for s in sandboxes[start : start + _PAGE]], params)
        for row in tx.rows(f"SELECT {LEASE.select} FROM sandbox_lease WHERE {where}", params):
            lease = LEASE.decode(row)
            leases[lease.sandbox_id] = lease
        for row in tx.rows(
            f"SELECT {INSTANCE.select} FROM instance WHERE {where} AND state <> 'gone' ORDER BY {_INSTANCE_ORDER}",
            params,
        ):
            instance = INSTANCE.decode(row)
            instances.setdefault(str(instance.sandbox_id), instance)
    return [SandboxView(s, leases.get(s.sandbox_id), instances.get(s.sandbox_id)) for s in sandboxes]


def get_sandbox(tx: Tx, sandbox_id: str, tenant_id: str | None) -> SandboxView | None:
    found = tx.rows(f"SELECT {SANDBOX.select} FROM sandbox WHERE sandbox_id = :sandbox_id", {"sandbox_id": sandbox_id})
    if not found:
        return None
    sandbox = SANDBOX.decode(found[0])
    if tenant_id is not None and sandbox.tenant_id != tenant_id:
        return None
    return views(tx, [sandbox])[0]


def list_sandboxes(
    tx: Tx, tenant_id: str | None, states: Sequence[str] | None, after: str | None, limit: int
) -> list[SandboxView]:
    return views(tx, [SANDBOX.decode(row) for row in _page(tx, SANDBOX, tenant_id, states, after, limit)])


def history(tx: Tx, sandbox_id: str, limit: int) -> list[EventRecord]:
    found = tx.rows(
        f"SELECT {EVENT.select} FROM sandbox_event WHERE sandbox_id = :sandbox_id ORDER BY event_id DESC LIMIT :limit",
        {"sandbox_id": sandbox_id, "limit": page_size(limit)},
    )
    return [EVENT.decode(row) for row in reversed(found)]


def add_event(tx: Tx, event: Row) -> int:
    sandbox_id = str(event["sandbox_id"])
    _row(tx, SANDBOX, sandbox_id, tx.for_update)  # the ids of a sandbox's events rise in the order of their commits
    return _add_event(tx, event, sandbox_id, None, None)


def renew_lease(tx: Tx, sandbox_id: str, owner: str, fence: Fence, ttl_ms: int) -> LeaseRecord:
    sandbox, lease = _sandbox_and_lease(tx, sandbox_id)
    _check_fence(sandbox, lease, fence)
    return _renewed(tx, lease, owner, ttl_ms)


def _renewed(tx: Tx, lease: LeaseRecord, owner: str, ttl_ms: int) -> LeaseRecord:
    check_holder(lease, owner, tx.now)
    expires_at = renewed_expiry(lease.expires_at, tx.now, ttl_ms)
    if expires_at is None:
        return lease
    new = replace(lease, heartbeat_at=tx.now, expires_at=expires_at)
    _write_lease(tx, new)
    return new


def check_holder(lease: LeaseRecord, owner: str, now: int) -> None:
    """`lease_lost` unless `owner` holds it now; `expires_at` is the first instant at which it is not held (both stores)."""
    if lease.lease_owner != owner:
        raise lease_lost(lease.sandbox_id, f"its owner is {lease.lease_owner or 'nobody'}")
    if now >= lease.expires_at:
        raise lease_lost(lease.sandbox_id, "it has expired")


# -- instances ---------------------------------------------------------------------------------------------------------------------


def update_instance(tx: Tx, instance_id: str, expect: Sequence[str], state: str, ref: str | None) -> InstanceRecord:
    old = INSTANCE.decode(_row(tx, INSTANCE, instance_id, tx.for_update))
    check_move(old, expect, state, old.sandbox_id)
    return _move_instance(tx, old, state, ref, sandbox_id=old.sandbox_id, incarnation=old.incarnation)


def list_instances(tx: Tx, node_id: str, states: Sequence[str] | None) -> list[InstanceRecord]:
    params: dict[str, Any] = {"node_id": node_id}
    where = "" if states is None else " AND " + one_of("state", states, params)
    if states is not None and "gone" not in states:
        where += " AND state <> 'gone'"  # the very words of an index
    found = tx.rows(
        f"SELECT {INSTANCE.select} FROM instance WHERE node_id = :node_id{where} ORDER BY born_at, instance_id", params
    )
    return [INSTANCE.decode(row) for row in found]


# -- execs -------------------------------------------------------------------------------------------------------------------------


def create_exec(tx: Tx, record: Row, fence: Fence, idem: Idempotency | None, tenant_id: str) -> tuple[ExecRecord, bool]:
    made, fresh, _, _ = _create_exec(tx, record, fence, idem, tenant_id)
    return made, fresh


def _create_exec(
    tx: Tx, record: Row, fence: Fence, idem: Idempotency | None, tenant_id: str
) -> tuple[ExecRecord, bool, SandboxRecord, LeaseRecord]:
    """-> (exec, whether it is new, its sandbox and lease, locked)."""
    exec_id, sandbox_id = str(record["exec_id"]), str(record["sandbox_id"])
    sandbox, lease = _sandbox_and_lease(tx, sandbox_id)
    if sandbox.tenant_id != tenant_id:
        raise not_found("sandbox", sandbox_id)
    known = _claim_key(tx, idem, exec_id)
    if known is not None:
        return EXEC.decode(_row(tx, EXEC, known)), False, sandbox, lease
    _check_fence(sandbox, lease, fence)
    row: Row = {**record, "state": "starting", "incarnation": fence.incarnation, "lease_version": fence.token}
    tx.send(EXEC.insert, row)
    return EXEC.from_row(row), True, sandbox, lease


def begin_exec(
    tx: Tx,
    record: Row,
    fence: Fence,
    step: Step,
    renew: tuple[str, int] | None,
    idem: Idempotency | None,
    tenant_id: str,
    driver: str | None = None,
) -> tuple[ExecRecord, Committed | None]:
    _check_driver(tx, None if record["run_id"] is None else str(record["run_id"]), driver)
    made, fresh, sandbox, lease = _create_exec(tx, record, fence, idem, tenant_id)
    if not fresh:
        return made, None
    if renew is not None:
        lease = _renewed(tx, lease, *renew)
    return made, _commit(tx, step, sandbox, lease)


def end_exec(
    tx: Tx, exec_id: str, changes: Row, done: Sequence[DoneStep], last: Step | None, others: Step | None
) -> ExecRecord:
    if tx.for_update:
        # Of two execs that end at once one must see the other's end, and whoever ends all of them has the sandbox first.
        tx.rows(
            "SELECT 1 FROM sandbox WHERE sandbox_id = (SELECT sandbox_id FROM exec WHERE exec_id = :exec_id)"
            f" {tx.for_update}",
            {"exec_id": exec_id},
        )
    ended = update_exec(tx, exec_id, OPEN_EXEC, changes)
    _finish_commands(tx, ended.sandbox_id, done)
    if last is not None or others is not None:
        more = tx.rows(
            f"SELECT 1 FROM exec WHERE sandbox_id = :sandbox_id AND {_OPEN_EXEC} LIMIT 1",
            {"sandbox_id": ended.sandbox_id},
        )
        if (step := others if more else last) is not None:
            commit_transition(tx, step)
    return ended


def update_exec(tx: Tx, exec_id: str, expect: Sequence[str], changes: Row) -> ExecRecord:
    return EXEC.decode(_update(tx, EXEC, exec_id, expect, changes))


def get_exec(tx: Tx, exec_id: str, tenant_id: str | None) -> ExecRecord | None:
    params: dict[str, Any] = {"exec_id": exec_id}
    where = "e.exec_id = :exec_id"
    if tenant_id is not None:
        params["tenant_id"] = tenant_id
        where += " AND s.tenant_id = :tenant_id"
    found = tx.rows(
        f"SELECT {EXEC.qualified('e')} FROM exec e JOIN sandbox s ON s.sandbox_id = e.sandbox_id WHERE {where}", params
    )
    return EXEC.decode(found[0]) if found else None


def open_execs(tx: Tx, sandbox_id: str | None) -> list[ExecRecord]:
    return _execs(tx, sandbox_id, _OPEN_EXEC)


def list_execs(tx: Tx, sandbox_id: str) -> list[ExecRecord]:
    return _execs(tx, sandbox_id, "1 = 1")


def _execs(tx: Tx, sandbox_id: str | None, where: str) -> list[ExecRecord]:
    params: dict[str, Any] = {}
    if sandbox_id is not None:
        params["sandbox_id"] = sandbox_id
        where += " AND sandbox_id = :sandbox_id"
    found = tx.rows(f"SELECT {EXEC.select} FROM exec WHERE {where} ORDER BY created_at, exec_id", params)
    return [EXEC.decode(row) for row in found]


# -- commands ----------------------------------------------------------------------------------------------------------------------


def lock_command(tx: Tx, worker: str, claim_ms: int, kinds: Sequence[str] | None) -> CommandRecord | None:
    params: dict[str, Any] = {"worker": worker, "now": tx.now, "until": tx.now + claim_ms}
    where = "" if kinds is None else " AND " + one_of("kind", kinds, params)
    locked = tx.rows(
        "WITH picked AS MATERIALIZED (SELECT command_id FROM sandbox_command WHERE done_at IS NULL"
        " AND (claimed_by IS NULL OR claim_until <= :now OR claimed_by IN"
        f" (SELECT worker_id FROM worker WHERE alive_until <= :now)){where} ORDER BY command_seq LIMIT 1 {tx.skip_locked})"
        " UPDATE sandbox_command SET claimed_by = :worker, claim_until = :until, attempt = attempt + 1"
        f" WHERE command_id IN (SELECT command_id FROM picked) RETURNING {COMMAND.select}",
        params,
    )
    return COMMAND.decode(locked[0]) if locked else None


def _finish_commands(tx: Tx, sandbox_id: str, done: Sequence[DoneStep]) -> None:
    """The outcome is of the transition that reports it, whoever holds the command."""
    for each in done:
        params: dict[str, Any] = {"sandbox_id": sandbox_id}
        where = one_of("kind", each.kinds, params)
        found = tx.rows(
            f"SELECT {COMMAND.select} FROM sandbox_command WHERE sandbox_id = :sandbox_id AND done_at IS NULL AND {where}",
            params,
        )
        for command in map(COMMAND.decode, found):
            if each.meets(command.args):
                tx.send(
                    "UPDATE sandbox_command SET done_at = :now, outcome = :outcome"
                    " WHERE command_id = :command_id AND done_at IS NULL",
                    {"now": tx.now, "outcome": each.outcome, "command_id": command.command_id},
                )


def finish_command(tx: Tx, command_id: str, worker: str, outcome: str) -> bool:
    done = tx.rows(
        "UPDATE sandbox_command SET done_at = :now, outcome = :outcome"
        " WHERE command_id = :command_id AND done_at IS NULL AND claimed_by = :worker RETURNING command_id",
        {"now": tx.now, "outcome": outcome, "command_id": command_id, "worker": worker},
    )
    if not done:
        _row(tx, COMMAND, command_id)
    return bool(done)


def open_commands(tx: Tx, sandbox_id: str | None) -> list[CommandRecord]:
    params: dict[str, Any] = {}
    where = "done_at IS NULL"
    if sandbox_id is not None:
        params["sandbox_id"] = sandbox_id
        where += " AND sandbox_id = :sandbox_id"
    found = tx.rows(f"SELECT {COMMAND.select} FROM sandbox_command WHERE {where} ORDER BY command_seq", params)
    return [COMMAND.decode(row) for row in found]


# -- audit, installation -----------------------------------------------------------------------------------------------------------


def list_audit(tx: Tx, tenant_id: str, subject: str | None, limit: int) -> list[AuditRecord]:
    params: dict[str, Any] = {"tenant_id": tenant_id, "limit": page_size(limit)}
    where = "tenant_id = :tenant_id"
    if subject is not None:
        params["subject"] = subject
        where += " AND subject = :subject"
    found = tx.rows(f"SELECT {AUDIT.select} FROM audit WHERE {where} ORDER BY audit_id DESC LIMIT :limit", params)
    return [AUDIT.decode(row) for row in reversed(found)]


def installation_id(tx: Tx, proposal: str) -> str:
    """The stored id; the first caller's proposal becomes it."""
    tx.rows(
        "INSERT INTO installation (only_row, installation_id, created_at) VALUES (1, :id, :now)"
        " ON CONFLICT (only_row) DO NOTHING",
        {"id": proposal, "now": tx.now},
    )
    [(stored,)] = tx.rows("SELECT installation_id FROM installation")
    return str(stored)
