"""Runs as SQL. See `transactions` for the rules."""

from __future__ import annotations

from collections.abc import Sequence

from corral.domain.records import Idempotency, RunRecord
from corral.ports.queue import Ticket

from . import reserving
from .repeats import claim_key
from .rows import RUN, Row, conflict, listed, not_found, superseded
from .sql_text import page_size
from .tables import page_of, row_of, update_row
from .trail import note
from .transacting import Tx

# ruff: noqa: S608 - what is put together are column names of this package

_LIST_ROWS = 50


def submit_run(
    tx: Tx, run: Row, audit: Row, idem: Idempotency | None, ticket: Ticket | None = None
) -> tuple[RunRecord, bool]:
    run_id = str(run["run_id"])
    known = claim_key(tx, idem, run_id)
    if known is not None:
        return RUN.decode(row_of(tx, RUN, known)), False
    tx.send(RUN.insert, run)
    note(tx, audit)
    if ticket is not None:
        reserving.run_submitted(tx, run_id, str(run["tenant_id"]), ticket)
    return RUN.from_row(run), True


def update_run(
    tx: Tx, run_id: str, expect: Sequence[str], changes: Row, audit: Row | None, driver: str | None = None
) -> RunRecord:
    row = update_row(tx, RUN, run_id, expect, changes, driver)
    if audit is not None:
        note(tx, audit)
    return RUN.decode(row)


def finish_run(
    tx: Tx, run_id: str, result: str, reason: str, timings: str, audit: Row, driver: str | None = None
) -> RunRecord:
    check_driver(tx, run_id, driver, again=True)
    changed = tx.rows(
        "UPDATE run SET state = 'finished', result = :result, reason = :reason, timings = :timings, finished_at = :now,"
        f" version = version + 1 WHERE run_id = :run_id AND state <> 'finished' RETURNING {RUN.select}",
        {"result": result, "reason": reason, "timings": timings, "now": tx.now, "run_id": run_id},
    )
    if not changed:
        return RUN.decode(row_of(tx, RUN, run_id))
    note(tx, audit)
    ended = RUN.decode(changed[0])
    reserving.run_ended(tx, run_id, ended.tenant_id)
    return ended


def check_driver(tx: Tx, run_id: str | None, driver: str | None, *, again: bool = False) -> None:
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


def list_runs(tx: Tx, tenant_id: str, states: Sequence[str] | None, after: str | None, limit: int) -> list[RunRecord]:
    # A request may be as large as a body, and results have long lists: a few rows at a time, and the first not at all.
    select = ", ".join("'{}'" if name == "request" else name for name in RUN.columns)
    found: list[RunRecord] = []
    left = page_size(limit)
    while True:
        rows = page_of(tx, RUN, tenant_id, states, after, min(left, _LIST_ROWS), select)
        found += [listed(RUN.decode(row)) for row in rows]
        left -= len(rows)
        if left <= 0 or len(rows) < _LIST_ROWS:
            return found
        after = found[-1].run_id


def open_runs(tx: Tx) -> list[RunRecord]:
    found = tx.rows(f"SELECT {RUN.select} FROM run WHERE state <> 'finished' ORDER BY created_at, run_id")
    return [RUN.decode(row) for row in found]
