"""What the parts of the store in memory share: the tables, transactions over them, and rows by key."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from corral.domain.records import Idempotency, SandboxView
from corral.errors import CorralError
from corral.ports.repeats import KEY_LIFE_MS

from .rows import INSTANCE, LEASE, SANDBOX, Row, Shape, conflict, not_found, superseded
from .rules import check_idempotency, made_before
from .sql_text import page_size

T = TypeVar("T")
_ABSENT: Any = object()


class MemoryBase:
    """The tables, and one transaction at a time over them. Rows survive `close` and `open` of the same object."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._guard = threading.Lock()
        self._usable = False
        self._installation = secrets.token_hex(16)
        self._runs: dict[Any, Row] = {}
        self._sandboxes: dict[Any, Row] = {}
        self._leases: dict[Any, Row] = {}
        self._instances: dict[Any, Row] = {}
        self._execs: dict[Any, Row] = {}
        self._commands: dict[Any, Row] = {}
        self._events: dict[Any, Row] = {}
        self._audit: dict[Any, Row] = {}
        self._workers: dict[Any, Row] = {}
        self._reservations: dict[Any, dict[str, Any]] = {}
        self._use: dict[Any, dict[str, Any]] = {}
        self._queue: dict[Any, dict[str, Any]] = {}
        self._webhooks: dict[Any, Row] = {}
        self._webhook_secrets: dict[Any, Any] = {}
        self._environments: dict[Any, int] = {}
        self._keys: dict[Any, tuple[str, str, int]] = {}
        self._undo: list[tuple[dict[Any, Any], Any, Any]] = []
        self._now = 0

    async def open(self) -> None:
        """Again: nothing."""
        self._usable = True

    async def close(self) -> None:
        """Again: nothing."""
        self._usable = False

    async def installation_id(self) -> str:
        self._check_open()
        return self._installation

    def _check_open(self) -> None:
        if not self._usable:
            raise CorralError("store_error", "the store is not open", retryable=False)

    async def _transact(self, work: Callable[[], T]) -> T:
        self._check_open()
        await asyncio.sleep(0)  # as with a real database, others run between the call and its effect
        with self._guard:
            self._check_open()
            self._now = self._clock()
            self._undo.clear()
            try:
                return work()
            except BaseException:
                for table, key, old in reversed(self._undo):
                    if old is _ABSENT:
                        table.pop(key, None)
                    else:
                        table[key] = old
                raise

    def _put(self, table: dict[Any, Any], key: Any, row: Any) -> None:
        self._undo.append((table, key, table.get(key, _ABSENT)))
        table[key] = row

    def _insert(self, table: dict[Any, Row], shape: Shape[Any], row: Row) -> None:
        key = row[shape.key]
        if key in table:
            raise conflict(f"{shape.table} {key} exists already")
        self._put(table, key, row)

    def _get(self, table: dict[Any, Row], shape: Shape[Any], key: str) -> Row:
        row = table.get(key)
        if row is None:
            raise not_found(shape.table, key)
        return row

    def _append(self, table: dict[Any, Row], key: str, row: Row) -> int:
        number = len(table) + 1
        self._put(table, number, {**row, key: number, "timestamp": self._now})
        return number

    def _claim_key(self, idem: Idempotency | None, resource_id: str) -> str | None:
        if idem is None:
            return None
        check_idempotency(idem)
        key = (idem.tenant_id, idem.route, idem.key)
        if key not in self._keys or self._keys[key][2] <= self._now - KEY_LIFE_MS:
            self._put(self._keys, key, (idem.body_digest, resource_id, self._now))
            return None
        digest, known, _ = self._keys[key]
        return made_before(idem, digest, known)

    def _update(
        self,
        table: dict[Any, Row],
        shape: Shape[Any],
        key: str,
        expect: Sequence[str],
        changes: Row,
        driver: str | None = None,
    ) -> Row:
        row = self._get(table, shape, key)
        if driver is not None and row["driver"] != driver:
            raise superseded(key, None if row["driver"] is None else str(row["driver"]))
        if row["state"] not in expect:
            raise conflict(
                f"{shape.table} {key} is {row['state']}, not {' or '.join(expect) or 'anything'}", state=row["state"]
            )
        return self._set(table, key, {**row, **changes, "version": int(row["version"] or 0) + 1})

    def _set(self, table: dict[Any, Row], key: str, row: Row) -> Row:
        self._put(table, key, row)
        return row

    @staticmethod
    def _page(
        table: dict[Any, Row],
        shape: Shape[Any],
        tenant_id: str | None,
        states: Sequence[str] | None,
        after: str | None,
        limit: int,
    ) -> list[Row]:
        def place(row: Row) -> tuple[int, str]:
            return int(row["created_at"] or 0), str(row[shape.key])

        rows = [row for row in table.values() if tenant_id is None or row["tenant_id"] == tenant_id]
        if after is not None:
            last = [row for row in rows if row[shape.key] == after]
            if not last:
                raise not_found(shape.table, after)
            rows = [row for row in rows if place(row) < place(last[0])]
        rows = [row for row in rows if states is None or row["state"] in states]
        return sorted(rows, key=place, reverse=True)[: page_size(limit)]

    def _drop(self, table: dict[Any, Any], key: Any) -> None:
        if key in table:
            self._undo.append((table, key, table[key]))
            del table[key]

    def _dead(self, worker_id: Any) -> bool:
        """It has a row, which has expired."""
        row = self._workers.get(worker_id)
        return row is not None and int(row["alive_until"] or 0) <= self._now

    def _view(self, row: Row) -> SandboxView:
        sandbox = SANDBOX.from_row(row)
        mine = [
            INSTANCE.from_row(r)
            for r in self._instances.values()
            if r["sandbox_id"] == sandbox.sandbox_id and r["state"] != "gone"
        ]
        mine.sort(key=lambda i: (i.state == "bound", i.born_at, i.incarnation, i.instance_id))
        lease = LEASE.from_row(self._leases[sandbox.sandbox_id])
        return SandboxView(sandbox, lease, mine[-1] if mine else None)
