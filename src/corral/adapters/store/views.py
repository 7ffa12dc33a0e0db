"""Sandboxes as they are read, with lease and instance. See `transactions` for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.domain.records import InstanceRecord, LeaseRecord, SandboxRecord, SandboxView

from .rows import INSTANCE, LEASE, SANDBOX
from .sql_text import one_of
from .tables import page_of
from .transacting import Tx

# ruff: noqa: S608 - what is put together are column names of this package

_PAGE = 500
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
    return views(tx, [SANDBOX.decode(row) for row in page_of(tx, SANDBOX, tenant_id, states, after, limit)])


def list_instances(tx: Tx, node_id: str, states: Sequence[str] | None) -> list[InstanceRecord]:
    params: dict[str, Any] = {"node_id": node_id}
    where = "" if states is None else " AND " + one_of("state", states, params)
    if states is not None and "gone" not in states:
        where += " AND state <> 'gone'"  # the very words of an index
    found = tx.rows(
        f"SELECT {INSTANCE.select} FROM instance WHERE node_id = :node_id{where} ORDER BY born_at, instance_id", params
    )
    return [INSTANCE.decode(row) for row in found]
