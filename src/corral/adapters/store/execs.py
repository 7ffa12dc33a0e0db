"""Execs as SQL: begun and ended together with what that means for their sandbox. See `transactions` for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.domain.fence import Fence
from corral.domain.records import Committed, ExecRecord, Idempotency, LeaseRecord, SandboxRecord

from .commands import finish_commands
from .repeats import claim_key
from .rows import EXEC, OPEN_EXEC, DoneStep, Row, Step, not_found
from .runs import check_driver
from .tables import OPEN_EXEC_WORDS, row_of, update_row
from .transacting import Tx
from .transactions import check_fence, commit_locked, commit_transition, renewed, sandbox_and_lease

# ruff: noqa: S608 - what is put together are column names of this package


def create_exec(tx: Tx, record: Row, fence: Fence, idem: Idempotency | None, tenant_id: str) -> tuple[ExecRecord, bool]:
    made, fresh, _, _ = _create_exec(tx, record, fence, idem, tenant_id)
    return made, fresh


def _create_exec(
    tx: Tx, record: Row, fence: Fence, idem: Idempotency | None, tenant_id: str
) -> tuple[ExecRecord, bool, SandboxRecord, LeaseRecord]:
    """-> (exec, whether it is new, its sandbox and lease, locked)."""
    exec_id, sandbox_id = str(record["exec_id"]), str(record["sandbox_id"])
    sandbox, lease = sandbox_and_lease(tx, sandbox_id)
    if sandbox.tenant_id != tenant_id:
        raise not_found("sandbox", sandbox_id)
    known = claim_key(tx, idem, exec_id)
    if known is not None:
        return EXEC.decode(row_of(tx, EXEC, known)), False, sandbox, lease
    check_fence(sandbox, lease, fence)
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
    check_driver(tx, None if record["run_id"] is None else str(record["run_id"]), driver)
    made, fresh, sandbox, lease = _create_exec(tx, record, fence, idem, tenant_id)
    if not fresh:
        return made, None
    if renew is not None:
        lease = renewed(tx, lease, *renew)
    return made, commit_locked(tx, step, sandbox, lease)


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
    finish_commands(tx, ended.sandbox_id, done)
    if last is not None or others is not None:
        more = tx.rows(
            f"SELECT 1 FROM exec WHERE sandbox_id = :sandbox_id AND {OPEN_EXEC_WORDS} LIMIT 1",
            {"sandbox_id": ended.sandbox_id},
        )
        if (step := others if more else last) is not None:
            commit_transition(tx, step)
    return ended


def update_exec(tx: Tx, exec_id: str, expect: Sequence[str], changes: Row) -> ExecRecord:
    return EXEC.decode(update_row(tx, EXEC, exec_id, expect, changes))


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
    return _execs(tx, sandbox_id, OPEN_EXEC_WORDS)


def list_execs(tx: Tx, sandbox_id: str) -> list[ExecRecord]:
    return _execs(tx, sandbox_id, "1 = 1")


def _execs(tx: Tx, sandbox_id: str | None, where: str) -> list[ExecRecord]:
    params: dict[str, Any] = {}
    if sandbox_id is not None:
        params["sandbox_id"] = sandbox_id
        where += " AND sandbox_id = :sandbox_id"
    found = tx.rows(f"SELECT {EXEC.select} FROM exec WHERE {where} ORDER BY created_at, exec_id", params)
    return [EXEC.decode(row) for row in found]
