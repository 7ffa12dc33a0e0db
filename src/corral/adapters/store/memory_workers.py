"""`ports.workers` in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from corral.domain.records import ExecRecord, RunRecord, SandboxView, WorkerRecord
from corral.ports.workers import FORGET_MS, Beat

from .memory_base import MemoryBase
from .rows import EXEC, OPEN_EXEC, RUN, SANDBOX, WORKER, Row, check_ttl, to_json, to_text
from .sql_text import page_size


class MemoryWorkers(MemoryBase):
    """`ports.workers.WorkerStore`."""

    async def beat(
        self, worker_id: str, ttl_ms: int, facts: dict[str, Any], watched: Sequence[str] = (), watch_ms: int = 0
    ) -> Beat:
        check_ttl(ttl_ms)
        check_ttl(watch_ms)
        to_text(worker_id, "worker_id")
        text = to_json(facts, "worker.facts")

        def work() -> Beat:
            now = self._now
            known = self._workers.get(worker_id, {"started_at": now})
            row: Row = {"worker_id": worker_id, "started_at": known["started_at"]}
            self._put(self._workers, worker_id, {**row, "alive_until": now + ttl_ms, "facts": text})
            for each, old in list(self._workers.items()):
                if int(old["alive_until"] or 0) < now - FORGET_MS:
                    self._drop(self._workers, each)
            for table, open_ in ((self._runs, _open_run), (self._execs, _open_exec)):
                for key in watched:
                    if key in table and open_(table[key]):
                        self._put(table, key, {**table[key], "watched_until": now + watch_ms})
            runs = {
                key: str(row["cancel_requested"])
                for key, row in self._runs.items()
                if _open_run(row) and row["driver"] == worker_id and row["cancel_requested"] is not None
            }
            execs = {
                key: str(row["cancel_requested"])
                for key, row in self._execs.items()
                if _open_exec(row)
                and row["cancel_requested"] is not None
                and worker_id in (row["driver"], self._runs.get(row["run_id"], {}).get("driver"))
            }
            return Beat(now, len(self._events), runs, execs)

        return await self._transact(work)

    async def leave(self, worker_id: str) -> None:
        def work() -> None:
            self._drop(self._workers, worker_id)
            for key, row in list(self._commands.items()):
                if row["claimed_by"] == worker_id and row["done_at"] is None:
                    self._put(self._commands, key, {**row, "claimed_by": None, "claim_until": None})

        await self._transact(work)

    async def workers(self) -> list[WorkerRecord]:
        def work() -> list[WorkerRecord]:
            found = [WORKER.from_row(row) for row in self._workers.values()]
            return sorted(found, key=lambda worker: (worker.started_at, worker.worker_id))

        return await self._transact(work)

    async def hold_command(self, sandbox_id: str, kind: str, worker_id: str, claim_ms: int) -> bool:
        check_ttl(claim_ms)
        to_text(worker_id, "claimed_by")

        def work() -> bool:
            held = True
            for key, row in list(self._commands.items()):
                if row["sandbox_id"] != sandbox_id or row["kind"] != kind or row["done_at"] is not None:
                    continue
                by = row["claimed_by"]
                if by is None or by == worker_id or int(row["claim_until"] or 0) <= self._now or self._dead(by):
                    attempt = int(row["attempt"] or 0) + (by != worker_id)
                    claim: Row = {"claimed_by": worker_id, "claim_until": self._now + claim_ms, "attempt": attempt}
                    self._put(self._commands, key, {**row, **claim})
                else:
                    held = False
            return held

        return await self._transact(work)

    def _driven(self, row: Row) -> bool:
        worker = self._workers.get(row["driver"])
        return worker is not None and int(worker["alive_until"] or 0) > self._now

    def _adopt(
        self, table: dict[Any, Row], key: str, open_: Callable[[Row], bool], worker_id: str, limit: int
    ) -> list[Row]:
        free = [row for row in table.values() if open_(row) and not self._driven(row)]
        free.sort(key=lambda row: (int(row["created_at"] or 0), str(row[key])))
        taken = []
        for row in free[: page_size(limit)]:
            taken.append({**row, "driver": worker_id, "version": int(row["version"] or 0) + 1})
            self._put(table, row[key], taken[-1])
        return taken

    async def adopt_runs(self, worker_id: str, limit: int = 100) -> list[RunRecord]:
        to_text(worker_id, "run.driver")
        return await self._transact(
            lambda: [RUN.from_row(row) for row in self._adopt(self._runs, "run_id", _open_run, worker_id, limit)]
        )

    async def driven_runs(self, worker_id: str) -> list[tuple[str, str]]:
        def work() -> list[tuple[str, str]]:
            found = [row for row in self._runs.values() if _open_run(row) and row["driver"] == worker_id]
            found.sort(key=lambda row: (int(row["created_at"] or 0), str(row["run_id"])))
            return [(str(row["run_id"]), str(row["tenant_id"])) for row in found]

        return await self._transact(work)

    async def adopt_execs(self, worker_id: str, limit: int = 100) -> list[ExecRecord]:
        to_text(worker_id, "exec.driver")

        def alone(row: Row) -> bool:
            return _open_exec(row) and row["run_id"] is None

        return await self._transact(
            lambda: [EXEC.from_row(row) for row in self._adopt(self._execs, "exec_id", alone, worker_id, limit)]
        )

    async def stale_sandboxes(self, states: Sequence[str], before_ms: int, limit: int = 100) -> list[SandboxView]:
        def work() -> list[SandboxView]:
            found = [
                row
                for row in self._sandboxes.values()
                if row["state"] in states
                and row["state"] != "terminated"
                and int(row["last_active_at"] or 0) < before_ms
            ]
            return self._oldest(found, limit)

        return await self._transact(work)

    def _oldest(self, found: list[Row], limit: int) -> list[SandboxView]:
        found.sort(key=lambda row: (int(row["last_active_at"] or 0), str(row[SANDBOX.key])))
        return [self._view(row) for row in found[: page_size(limit)]]

    async def abandoned_sandboxes(self, before_ms: int, limit: int = 100) -> list[SandboxView]:
        def work() -> list[SandboxView]:
            wanted = {row["sandbox_id"] for row in self._runs.values() if _open_run(row)}
            found = [
                row
                for row in self._sandboxes.values()
                if row["one_shot"]
                and row["state"] != "terminated"
                and int(row["last_active_at"] or 0) < before_ms
                and row["sandbox_id"] not in wanted
            ]
            return self._oldest(found, limit)

        return await self._transact(work)


def _open_run(row: Row) -> bool:
    return row["state"] != "finished"


def _open_exec(row: Row) -> bool:
    return row["state"] in OPEN_EXEC
