"""One row of a table by its key, its change by compare-and-set, and pages of a table. See `transactions` for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .rows import OPEN_EXEC, Row, Shape, conflict, not_found, superseded
from .sql_text import one_of, page_size
from .transacting import Tx

# ruff: noqa: S608 - what is put together are column names of this package

OPEN_EXEC_WORDS = "state IN ('starting', 'running')"
"""The very words of the indexes of open execs: nothing that is bound would do."""
assert OPEN_EXEC == ("starting", "running")
_LAST = {"run": "finished", "sandbox": "terminated"}


def row_of(tx: Tx, shape: Shape[Any], key: str, lock: str = "") -> tuple[Any, ...]:
    found = tx.rows(f"SELECT {shape.select} FROM {shape.table} WHERE {shape.key} = :key {lock}", {"key": key})
    if not found:
        raise not_found(shape.table, key)
    return found[0]


def update_row(
    tx: Tx, shape: Shape[Any], key: str, expect: Sequence[str], changes: Row, driver: str | None = None
) -> tuple[Any, ...]:
    """CAS on the state of a row that has a version, and on its driver if one is given."""
    params: dict[str, Any] = {"key": key, **new_values(changes)}
    where = one_of("state", expect, params)
    if driver is not None:
        params["driver"] = driver
        where += " AND driver = :driver"
    changed = tx.rows(
        f"UPDATE {shape.table} SET {set_columns(tuple(changes))}version = version + 1"
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


def page_of(
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


def set_columns(columns: Sequence[str]) -> str:
    return "".join(f"{name} = :new_{name}, " for name in columns)


def new_values(changes: Row) -> dict[str, Any]:
    return {f"new_{name}": value for name, value in changes.items()}
