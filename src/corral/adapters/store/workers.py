"""`ports.workers` as SQL: who is alive, who drives what. See `transactions` for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.domain.records import ExecRecord, RunRecord, SandboxView, WorkerRecord
from corral.ports.workers import FORGET_MS, Beat

from .rows import EXEC, OPEN_EXEC, RUN, SANDBOX, WORKER, check_ttl, to_json, to_text
from .sql_text import one_of, page_size
from .transacting import Transacting, Tx
from .views import views

# ruff: noqa: S608 - what is put together are column names of this package

ALIVE = "SELECT worker_id FROM worker WHERE alive_until > :now"


def beat(tx: Tx, worker_id: str, ttl_ms: int, facts: str, watched: Sequence[str], watch_ms: int) -> Beat:
    until = {"worker": worker_id, "now": tx.now, "until": tx.now + ttl_ms, "facts": facts}
    tx.rows(
        "INSERT INTO worker (worker_id, started_at, alive_until, facts) VALUES (:worker, :now, :until, :facts)"
        " ON CONFLICT (worker_id) DO UPDATE SET alive_until = :until, facts = :facts",
        until,
    )
    tx.rows("DELETE FROM worker WHERE alive_until < :before", {"before": tx.now - FORGET_MS})
    seen = sorted({i for i in watched if i.isascii()})
    for table, key, where in (("run", "run_id", "state <> 'finished'"), ("exec", "exec_id", _OPEN)):
        for start in range(0, len(seen), 500):
            params: dict[str, Any] = {"until": tx.now + watch_ms}
            ids = one_of(key, seen[start : start + 500], params)
            # Locked in one order by all: clients of one run may wait at two workers that beat at once.
            locked = f"SELECT {key} FROM {table} WHERE {ids} AND {where} ORDER BY {key} {tx.for_update}"
            tx.rows(
                f"WITH locked AS MATERIALIZED ({locked})"
                f" UPDATE {table} SET watched_until = :until WHERE {key} IN (SELECT {key} FROM locked)",
                params,
            )
    runs = tx.rows(
        "SELECT run_id, cancel_requested FROM run WHERE state <> 'finished' AND driver = :worker"
        " AND cancel_requested IS NOT NULL",
        {"worker": worker_id},
    )
    execs = tx.rows(
        f"SELECT e.exec_id, e.cancel_requested FROM exec e LEFT JOIN run r ON r.run_id = e.run_id WHERE e.{_OPEN}"
        " AND e.cancel_requested IS NOT NULL AND (e.driver = :worker OR r.driver = :worker)",
        {"worker": worker_id},
    )
    [(last,)] = tx.rows("SELECT COALESCE(MAX(event_id), 0) FROM sandbox_event")
    return Beat(tx.now, int(last), {str(k): str(v) for k, v in runs}, {str(k): str(v) for k, v in execs})


_OPEN = "state IN ('starting', 'running')"
assert OPEN_EXEC == ("starting", "running")


def leave(tx: Tx, worker_id: str) -> None:
    tx.rows("DELETE FROM worker WHERE worker_id = :worker", {"worker": worker_id})
    tx.rows(
        "UPDATE sandbox_command SET claimed_by = NULL, claim_until = NULL WHERE claimed_by = :worker AND done_at IS NULL",
        {"worker": worker_id},
    )


def list_workers(tx: Tx) -> list[WorkerRecord]:
    found = tx.rows(f"SELECT {WORKER.select} FROM worker ORDER BY started_at, worker_id")
    return [WORKER.decode(row) for row in found]


def hold_command(tx: Tx, sandbox_id: str, kind: str, worker_id: str, claim_ms: int) -> bool:
    params = {"sandbox": sandbox_id, "kind": kind, "worker": worker_id, "now": tx.now, "until": tx.now + claim_ms}
    where = "sandbox_id = :sandbox AND kind = :kind AND done_at IS NULL"
    tx.rows(
        "UPDATE sandbox_command SET claimed_by = :worker, claim_until = :until,"
        " attempt = attempt + CASE WHEN claimed_by = :worker THEN 0 ELSE 1 END"
        f" WHERE {where} AND (claimed_by IS NULL OR claimed_by = :worker OR claim_until <= :now OR claimed_by IN"
        " (SELECT worker_id FROM worker WHERE alive_until <= :now))",
        params,
    )
    return not tx.rows(f"SELECT 1 FROM sandbox_command WHERE {where} AND claimed_by <> :worker LIMIT 1", params)


def adopt_runs(tx: Tx, worker_id: str, limit: int) -> list[RunRecord]:
    found = tx.rows(
        "WITH picked AS MATERIALIZED (SELECT run_id FROM run"
        f" WHERE state <> 'finished' AND (driver IS NULL OR driver NOT IN ({ALIVE}))"
        f" ORDER BY created_at, run_id LIMIT :limit {tx.skip_locked})"
        " UPDATE run SET driver = :worker, version = version + 1 WHERE run_id IN (SELECT run_id FROM picked)"
        f" RETURNING {RUN.select}",
        {"worker": worker_id, "now": tx.now, "limit": page_size(limit)},
    )
    return sorted(map(RUN.decode, found), key=lambda run: (run.created_at, run.run_id))


def adopt_execs(tx: Tx, worker_id: str, limit: int) -> list[ExecRecord]:
    found = tx.rows(
        "WITH picked AS MATERIALIZED (SELECT exec_id FROM exec"
        f" WHERE {_OPEN} AND run_id IS NULL AND (driver IS NULL OR driver NOT IN ({ALIVE}))"
        f" ORDER BY created_at, exec_id LIMIT :limit {tx.skip_locked})"
        " UPDATE exec SET driver = :worker, version = version + 1 WHERE exec_id IN (SELECT exec_id FROM picked)"
        f" RETURNING {EXEC.select}",
        {"worker": worker_id, "now": tx.now, "limit": page_size(limit)},
    )
    return sorted(map(EXEC.decode, found), key=lambda record: (record.created_at, record.exec_id))


def driven_runs(tx: Tx, worker_id: str) -> list[tuple[str, str]]:
    found = tx.rows(
        "SELECT run_id, tenant_id FROM run WHERE state <> 'finished' AND driver = :worker ORDER BY created_at, run_id",
        {"worker": worker_id},
    )
    return [(str(run_id), str(tenant_id)) for run_id, tenant_id in found]


def stale_sandboxes(tx: Tx, states: Sequence[str], before_ms: int, limit: int) -> list[SandboxView]:
    params: dict[str, Any] = {"before": before_ms, "limit": page_size(limit)}
    where = one_of("state", states, params)
    found = tx.rows(
        f"SELECT {SANDBOX.select} FROM sandbox WHERE state <> 'terminated' AND last_active_at > 0"  # as its index says
        f" AND {where} AND last_active_at < :before"
        " ORDER BY last_active_at, sandbox_id LIMIT :limit",
        params,
    )
    return views(tx, [SANDBOX.decode(row) for row in found])


def abandoned_sandboxes(tx: Tx, before_ms: int, limit: int) -> list[SandboxView]:
    found = tx.rows(
        f"SELECT {SANDBOX.qualified('s')} FROM sandbox s WHERE s.one_shot AND s.state <> 'terminated'"
        " AND s.last_active_at < :before AND NOT EXISTS"
        " (SELECT 1 FROM run r WHERE r.sandbox_id = s.sandbox_id AND r.state <> 'finished')"
        " ORDER BY s.last_active_at, s.sandbox_id LIMIT :limit",
        {"before": before_ms, "limit": page_size(limit)},
    )
    return views(tx, [SANDBOX.decode(row) for row in found])


class SqlWorkers(Transacting):
    """`ports.workers.WorkerStore`."""

    async def beat(
        self, worker_id: str, ttl_ms: int, facts: dict[str, Any], watched: Sequence[str] = (), watch_ms: int = 0
    ) -> Beat:
        check_ttl(ttl_ms)
        check_ttl(watch_ms)
        text = to_json(facts, "worker.facts")
        return await self._write(beat, to_text(worker_id, "worker_id"), ttl_ms, text, tuple(watched), watch_ms)

    async def leave(self, worker_id: str) -> None:
        await self._write(leave, worker_id)

    async def workers(self) -> list[WorkerRecord]:
        return await self._read(list_workers)

    async def hold_command(self, sandbox_id: str, kind: str, worker_id: str, claim_ms: int) -> bool:
        check_ttl(claim_ms)
        return await self._write(hold_command, sandbox_id, kind, to_text(worker_id, "claimed_by"), claim_ms)

    async def adopt_runs(self, worker_id: str, limit: int = 100) -> list[RunRecord]:
        return await self._write(adopt_runs, to_text(worker_id, "run.driver"), limit)

    async def driven_runs(self, worker_id: str) -> list[tuple[str, str]]:
        return await self._read(driven_runs, worker_id)

    async def adopt_execs(self, worker_id: str, limit: int = 100) -> list[ExecRecord]:
        return await self._write(adopt_execs, to_text(worker_id, "exec.driver"), limit)

    async def stale_sandboxes(self, states: Sequence[str], before_ms: int, limit: int = 100) -> list[SandboxView]:
        return await self._read(stale_sandboxes, tuple(states), before_ms, limit)

    async def abandoned_sandboxes(self, before_ms: int, limit: int = 100) -> list[SandboxView]:
        return await self._read(abandoned_sandboxes, before_ms, limit)
