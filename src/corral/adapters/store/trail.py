"""What has happened: events of sandboxes and the audit. See `transactions` for the rules."""

from __future__ import annotations

from typing import Any

from corral.domain.records import AuditRecord, EventRecord

from .rows import AUDIT, EVENT, SANDBOX, Row
from .sql_text import page_size
from .tables import row_of
from .transacting import Tx

# ruff: noqa: S608 - what is put together are column names of this package


def add_audit(tx: Tx, audit: Row) -> int:
    [(audit_id,)] = tx.rows(AUDIT.insert, {**audit, "timestamp": tx.now})
    return int(audit_id)


def note(tx: Tx, audit: Row) -> None:
    """`add_audit` whose id nobody asks for."""
    tx.send(AUDIT.insert, {**audit, "timestamp": tx.now})


def record_event(tx: Tx, event: Row, sandbox_id: str, old_state: str | None, new_state: str | None) -> int:
    row = {**event, "sandbox_id": sandbox_id, "timestamp": tx.now}
    if row["old_state"] is None:
        row["old_state"] = old_state
    if row["new_state"] is None:
        row["new_state"] = new_state
    [(event_id,)] = tx.rows(EVENT.insert, row)
    return int(event_id)


def add_event(tx: Tx, event: Row) -> int:
    sandbox_id = str(event["sandbox_id"])
    row_of(tx, SANDBOX, sandbox_id, tx.for_update)  # the ids of a sandbox's events rise in the order of their commits
    return record_event(tx, event, sandbox_id, None, None)


def history(tx: Tx, sandbox_id: str, limit: int) -> list[EventRecord]:
    found = tx.rows(
        f"SELECT {EVENT.select} FROM sandbox_event WHERE sandbox_id = :sandbox_id ORDER BY event_id DESC LIMIT :limit",
        {"sandbox_id": sandbox_id, "limit": page_size(limit)},
    )
    return [EVENT.decode(row) for row in reversed(found)]


def list_audit(tx: Tx, tenant_id: str, subject: str | None, limit: int) -> list[AuditRecord]:
    params: dict[str, Any] = {"tenant_id": tenant_id, "limit": page_size(limit)}
    where = "tenant_id = :tenant_id"
    if subject is not None:
        params["subject"] = subject
        where += " AND subject = :subject"
    found = tx.rows(f"SELECT {AUDIT.select} FROM audit WHERE {where} ORDER BY audit_id DESC LIMIT :limit", params)
    return [AUDIT.decode(row) for row in reversed(found)]
