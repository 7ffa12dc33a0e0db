"""`ports.queue` as SQL: who is admitted next, where a run stands, whether what is reserved is what is live. See `reserving`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from corral.domain.queue import Head, Waiting, choose, finish_of, place_of, priority_of, start_of
from corral.domain.quota import EVERYBODY, NAMES, RUNNING, Amounts, QuotaRules
from corral.domain.records import RunRecord
from corral.ports.queue import Drift, Entry, QueuedRun, TenantUse

from .reserving import AMOUNTS, TOGETHER, Sums, amounts_of, change, enqueue, lock, run_admitted
from .rows import RUN, Row, conflict, not_found, superseded, to_text
from .runs import update_run
from .sql_text import one_of, page_size
from .transacting import Transacting, Tx

# ruff: noqa: S608 - what is put together are column names of this package

UNPLACED = ("requested", "planning")
_ROOM = ("sandboxes", "cpu", "memory")


def place_run(tx: Tx, run_id: str, changes: Row, entry: Entry, rules: QuotaRules, driver: str | None) -> RunRecord:
    found = tx.rows(
        f"SELECT tenant_id, created_at, state, driver FROM run WHERE run_id = :run_id {tx.for_update}",
        {"run_id": run_id},
    )
    if not found:
        raise not_found("run", run_id)
    tenant_id, created_at, state, driven_by = found[0]
    if driver is not None and driven_by != driver and state != "finished":
        raise superseded(run_id, driven_by)
    if state not in UNPLACED:
        raise conflict(f"run {run_id} is {state}, not {' or '.join(UNPLACED)}", state=state)
    sums = lock(tx, tenant_id, everybody=True)
    place = place_of(int(created_at), entry.priority)
    mine = Waiting(tenant_id, sums.finish, sums.mine, Head(run_id, place, entry.cost, entry.demand))
    if _is_next(tx, sums, mine, rules):
        _charge(tx, mine, entry.sandbox_id, entry.amounts, sums.clock, rules, waited=False)
        return update_run(tx, run_id, UNPLACED, {**changes, "state": "starting", "sandbox_id": entry.sandbox_id}, None)
    enqueue(tx, run_id, tenant_id, place, entry)
    return update_run(tx, run_id, UNPLACED, {**changes, "state": "queued"}, None)


def _is_next(tx: Tx, sums: Sums, mine: Waiting, rules: QuotaRules) -> bool:
    """Whether a run that is not in the queue would be the one that is admitted now."""
    others = _waiting(tx) if sums.waiting else []
    for other in others:
        if other.tenant_id == mine.tenant_id and (other.head.place, other.head.run_id) < (
            mine.head.place,
            mine.head.run_id,
        ):
            return False
    waiting = [*(other for other in others if other.tenant_id != mine.tenant_id), mine]
    return choose(waiting, sums.clock, sums.everybody, rules) is mine


def _charge(
    tx: Tx, each: Waiting, sandbox_id: str, amounts: Amounts, clock: int, rules: QuotaRules, *, waited: bool
) -> tuple[Amounts, int, int]:
    """Reservations and sums of an admitted run; -> (what they grew by, the tenant's virtual finish, the clock)."""
    weight = rules.of(each.tenant_id).weight
    start = start_of(clock, each.finish)
    finish = finish_of(start, each.head.cost, weight)
    added = run_admitted(tx, each.head.run_id, each.tenant_id, sandbox_id, amounts, each.head.cost, weight)
    change(tx, each.tenant_id, added, waiting=-1 if waited else 0, finish=finish, clock=start)
    return added, finish, start


def _waiting(tx: Tx, tenant_id: str | None = None) -> list[Waiting]:
    """The tenants that wait with the first run of each; those whose time is over are their drivers' to end."""
    one = "" if tenant_id is None else " AND u.tenant_id = :tenant"
    found = tx.rows(
        f"SELECT {', '.join('u.' + name for name in NAMES)}, u.tenant_id, u.finish, q.run_id, q.place, q.cost,"
        " q.sandboxes, q.cpu, q.memory FROM tenant_use u JOIN run_queue q ON q.run_id = (SELECT h.run_id FROM run_queue h"
        " WHERE h.tenant_id = u.tenant_id AND h.deadline_at > :now ORDER BY h.place, h.run_id LIMIT 1)"
        f" WHERE u.waiting > 0 AND u.tenant_id <> '*'{one} ORDER BY u.tenant_id",
        {"now": tx.now, **({} if tenant_id is None else {"tenant": tenant_id})},
    )
    made: list[Waiting] = []
    for row in found:
        tenant, finish, run_id, place, cost, sandboxes, cpu, memory = row[len(NAMES) :]
        demand = Amounts(running=1, sandboxes=int(sandboxes), cpu=int(cpu), memory=int(memory))
        head = Head(str(run_id), int(place), int(cost), demand)
        made.append(Waiting(str(tenant), int(finish), amounts_of(row), head))
    return made


def admit(tx: Tx, rules: QuotaRules, sandbox_ids: Sequence[str]) -> list[RunRecord]:
    sums = lock(tx, EVERYBODY, everybody=True)
    everybody, clock = sums.everybody, sums.clock
    waiting = {each.tenant_id: each for each in _waiting(tx)} if sums.waiting else {}
    admitted: list[RunRecord] = []
    for sandbox_id in sandbox_ids:
        while (pick := choose(list(waiting.values()), clock, everybody, rules)) is not None:
            # Not waited for: whoever has the row now (a cancel, its end) may be waiting for our lock.
            if tx.rows(
                f"SELECT run_id FROM run WHERE run_id = :run_id AND state = 'queued' {tx.skip_locked}",
                {"run_id": pick.head.run_id},
            ):
                break
            del waiting[pick.tenant_id]
        if pick is None:
            return admitted
        # The virtual finish may have moved meanwhile, and what the tenant holds have shrunk: neither needs the lock of everybody.
        pick = replace(pick, finish=lock(tx, pick.tenant_id).finish)
        amounts = pick.head.demand - RUNNING
        tx.send("DELETE FROM run_queue WHERE run_id = :run_id", {"run_id": pick.head.run_id})
        added, _, clock = _charge(tx, pick, sandbox_id, amounts, clock, rules, waited=True)
        changes: Row = {"state": "starting", "sandbox_id": sandbox_id}
        admitted.append(update_run(tx, pick.head.run_id, ("queued",), changes, None))
        everybody += added
        waiting.pop(pick.tenant_id)
        waiting |= {each.tenant_id: each for each in _waiting(tx, pick.tenant_id)}
    return admitted


def count_waiting(tx: Tx) -> int:
    [(count,)] = tx.rows("SELECT COALESCE(SUM(waiting), 0) FROM tenant_use WHERE waiting > 0 AND tenant_id <> '*'")
    return int(count)


_QUEUED = (
    "SELECT q.run_id, q.tenant_id, q.place, q.queued_at, q.deadline_at, q.sandboxes, q.cpu, q.memory, r.created_at"
    " FROM run_queue q JOIN run r ON r.run_id = q.run_id WHERE q.tenant_id = :tenant"
)


def _queued(row: tuple[Any, ...], position: int) -> QueuedRun:
    run_id, tenant_id, place, queued_at, deadline_at, sandboxes, cpu, memory, created_at = row
    demand = Amounts(running=1, sandboxes=int(sandboxes), cpu=int(cpu), memory=int(memory))
    priority = priority_of(int(created_at), int(place))
    return QueuedRun(str(run_id), str(tenant_id), priority, position, int(queued_at), int(deadline_at), demand)


def queued_run(tx: Tx, run_id: str, tenant_id: str) -> QueuedRun | None:
    found = tx.rows(f"{_QUEUED} AND q.run_id = :run_id", {"tenant": tenant_id, "run_id": run_id})
    if not found:
        return None
    [(ahead,)] = tx.rows(
        "SELECT COUNT(*) FROM run_queue WHERE tenant_id = :tenant AND (place, run_id) < (:place, :run_id)",
        {"tenant": tenant_id, "place": found[0][2], "run_id": run_id},
    )
    return _queued(found[0], int(ahead) + 1)


def still_queued(tx: Tx, run_ids: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for start in range(0, len(run_ids), 500):
        params: dict[str, Any] = {}
        where = one_of("run_id", run_ids[start : start + 500], params)
        found |= {str(run_id) for (run_id,) in tx.rows(f"SELECT run_id FROM run_queue WHERE {where}", params)}
    return found


def list_queue(tx: Tx, tenant_id: str, limit: int) -> list[QueuedRun]:
    found = tx.rows(
        f"{_QUEUED} ORDER BY q.place, q.run_id LIMIT :limit", {"tenant": tenant_id, "limit": page_size(limit)}
    )
    return [_queued(row, position) for position, row in enumerate(found, 1)]


def tenant_use(tx: Tx, tenant_id: str) -> TenantUse:
    one = f"SELECT {AMOUNTS}, waiting FROM tenant_use WHERE tenant_id = :tenant"
    found = tx.rows(TOGETHER) if tenant_id == EVERYBODY else tx.rows(one, {"tenant": tenant_id})
    if not found:
        return TenantUse(tenant_id, Amounts())
    return TenantUse(tenant_id, amounts_of(found[0]), int(found[0][len(NAMES)]))


_LIVE_HOLDER = (
    "EXISTS (SELECT 1 FROM run WHERE run.run_id IN (reservation.holder_id, reservation.run_id)"
    " AND run.state <> 'finished') OR EXISTS (SELECT 1 FROM sandbox WHERE sandbox.sandbox_id = reservation.holder_id"
    " AND sandbox.state NOT IN ('terminated', 'hibernated'))"
)


def quota_drift(tx: Tx) -> list[Drift]:
    found = [
        Drift("no_holder", str(holder), {"tenant_id": tenant})
        for holder, tenant in tx.rows(f"SELECT holder_id, tenant_id FROM reservation WHERE NOT ({_LIVE_HOLDER})")
    ]
    for table, key, live in (
        ("run", "run_id", "<> 'finished'"),
        ("sandbox", "sandbox_id", "NOT IN ('terminated', 'hibernated')"),
    ):
        found += [
            Drift("not_reserved", str(holder), {"tenant_id": tenant})
            for holder, tenant in tx.rows(
                f"SELECT {key}, tenant_id FROM {table} WHERE state {live}"
                f" AND NOT EXISTS (SELECT 1 FROM reservation WHERE reservation.holder_id = {table}.{key})"
            )
        ]
    for tenant_id, (right, waiting, kept) in _sums(tx).items():
        if kept != (right, waiting):
            data = {"is": None if kept is None else kept[0].as_dict(), "should_be": right.as_dict(), "waiting": waiting}
            found.append(Drift("sum", tenant_id, data))
    return found


def _sums(tx: Tx) -> dict[str, tuple[Amounts, int, tuple[Amounts, int] | None]]:
    """tenant -> (its reservations' sum, its rows in the queue, what its row says)."""
    sums = ", ".join(f"SUM({name})" for name in NAMES)
    held = {
        str(row[-1]): amounts_of(row)
        for row in tx.rows(f"SELECT {sums}, tenant_id FROM reservation GROUP BY tenant_id")
    }
    queued = {str(t): int(n) for t, n in tx.rows("SELECT tenant_id, COUNT(*) FROM run_queue GROUP BY tenant_id")}
    kept = {
        str(row[-1]): (amounts_of(row), int(row[-2]))
        for row in tx.rows(f"SELECT {AMOUNTS}, waiting, tenant_id FROM tenant_use WHERE tenant_id <> '*'")
    }
    return {t: (held.get(t, Amounts()), queued.get(t, 0), kept.get(t)) for t in sorted({*held, *queued, *kept})}


def mend_quota(tx: Tx) -> list[Drift]:
    lock(tx, EVERYBODY)
    tx.rows(
        "INSERT INTO tenant_use (tenant_id) SELECT DISTINCT tenant_id FROM reservation WHERE true ON CONFLICT DO NOTHING"
    )
    tx.rows(f"SELECT 1 FROM tenant_use WHERE tenant_id <> '*' ORDER BY tenant_id {tx.for_update}")
    drift = [each for each in quota_drift(tx) if each.kind != "not_reserved"]
    if not drift:
        return []
    tx.rows(f"DELETE FROM reservation WHERE NOT ({_LIVE_HOLDER})")
    tx.rows("DELETE FROM run_queue WHERE run_id NOT IN (SELECT run_id FROM run WHERE state = 'queued')")
    for tenant_id, (right, waiting, _) in _sums(tx).items():
        sets = ", ".join(f"{name} = :{name}" for name in NAMES)
        tx.rows(
            f"UPDATE tenant_use SET {sets}, waiting = :waiting WHERE tenant_id = :tenant",
            {**right.as_dict(), "waiting": waiting, "tenant": tenant_id},
        )
    return drift


class SqlQueue(Transacting):
    """`ports.queue.QueueStore`."""

    async def place_run(
        self, run_id: str, *, changes: dict[str, Any], entry: Entry, rules: QuotaRules, driver: str | None = None
    ) -> RunRecord:
        to_text(entry.sandbox_id, "run.sandbox_id")
        return await self._write(place_run, run_id, RUN.encode_changes(changes), entry, rules, driver)

    async def admit(self, rules: QuotaRules, sandbox_ids: Sequence[str]) -> list[RunRecord]:
        return await self._write(admit, rules, tuple(sandbox_ids))

    async def waiting(self) -> int:
        return await self._read(count_waiting)

    async def queued_run(self, run_id: str, tenant_id: str) -> QueuedRun | None:
        return await self._read(queued_run, run_id, tenant_id)

    async def still_queued(self, run_ids: Sequence[str]) -> set[str]:
        return await self._read(still_queued, tuple(run_ids))

    async def list_queue(self, tenant_id: str, *, limit: int = 100) -> list[QueuedRun]:
        return await self._read(list_queue, tenant_id, limit)

    async def tenant_use(self, tenant_id: str) -> TenantUse:
        return await self._read(tenant_use, tenant_id)

    async def quota_drift(self) -> list[Drift]:
        return await self._read(quota_drift)

    async def mend_quota(self) -> list[Drift]:
        return await self._write(mend_quota)
