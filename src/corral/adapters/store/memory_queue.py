"""`ports.queue` in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from corral.domain.queue import (
    Head,
    Waiting,
    choose,
    expected_ms,
    finish_of,
    overtime,
    place_of,
    priority_of,
    rate_of,
    start_of,
)
from corral.domain.quota import EVERYBODY, QUEUED, RUNNING, Amounts, QuotaRules, exceeded
from corral.domain.records import RunRecord
from corral.ports.queue import Charge, Drift, Entry, QueuedRun, TenantUse, Ticket

from .memory_base import MemoryBase
from .queue import UNPLACED
from .reserving import FREE_STATES
from .rows import RUN, Row, to_text
from .sql_text import page_size


class MemoryQueue(MemoryBase):
    """`ports.queue.QueueStore`, and the hooks of the transactions that make something pending or end it."""

    # -- sums ------------------------------------------------------------------------------------------------------------------
    def _use_of(self, tenant_id: str) -> dict[str, Any]:
        return self._use.get(tenant_id) or {"held": Amounts(), "waiting": 0, "finish": 0}

    def _change(
        self, tenant_id: str, delta: Amounts, waiting: int = 0, finish: int | None = None, clock: int | None = None
    ) -> None:
        for key, time in ((tenant_id, finish), (EVERYBODY, clock)):
            old = self._use_of(key)
            new = {"held": old["held"] + delta, "waiting": old["waiting"] + waiting}
            self._put(self._use, key, {**new, "finish": old["finish"] if time is None else time})

    def _check_room(self, rules: QuotaRules, tenant_id: str, more: Amounts) -> None:
        mine, everybody = self._use_of(tenant_id)["held"], self._use_of(EVERYBODY)["held"]
        rule = rules.passed(tenant_id, mine, everybody, more)
        if rule is not None:
            raise exceeded(rules, tenant_id, rule, everybody if rule.startswith("capacity.") else mine, more)

    def _reserve(
        self,
        holder: str,
        tenant_id: str,
        amounts: Amounts,
        run_id: str | None = None,
        paid_until: int | None = None,
        rate: int = 0,
    ) -> bool:
        if holder in self._reservations:
            return False
        row = {"tenant_id": tenant_id, "amounts": amounts, "run_id": run_id, "paid_until": paid_until, "rate": rate}
        self._put(self._reservations, holder, row)
        return True

    # -- hooks -----------------------------------------------------------------------------------------------------------------
    def _run_submitted(self, run_id: str, tenant_id: str, ticket: Ticket) -> None:
        if (hook := ticket.webhook) is not None:
            row: Row = {"delivery_id": hook.delivery_id, "run_id": run_id, "tenant_id": tenant_id, "url": hook.url}
            row |= {"secret": hook.secret, "state": "waiting", "attempts": 0, "created_at": self._now, "next_at": None}
            none = dict.fromkeys(("claimed_by", "claim_until", "last_status", "last_error", "done_at"))
            self._put(self._webhooks, hook.delivery_id, {**row, **none})
        self._check_room(ticket.rules, tenant_id, QUEUED)
        if self._reserve(run_id, tenant_id, QUEUED):
            self._change(tenant_id, QUEUED)

    def _run_ended(self, run_id: str, tenant_id: str) -> None:
        for key, hook in list(self._webhooks.items()):
            if hook["run_id"] == run_id and hook["state"] == "waiting":
                self._put(self._webhooks, key, {**hook, "state": "pending", "next_at": self._now})
        waited = run_id in self._queue
        self._drop(self._queue, run_id)
        held, owed, found = Amounts(), 0, waited
        for holder, row in list(self._reservations.items()):
            sandbox = self._sandboxes.get(holder)
            alone = row["run_id"] == run_id and (sandbox is None or sandbox["state"] == "terminated")
            if holder == run_id or alone:
                self._drop(self._reservations, holder)
                held, found = held + row["amounts"], True
                if row["paid_until"] is not None:
                    owed += overtime(row["rate"], self._now - row["paid_until"])
        if found:
            finish = self._use_of(tenant_id)["finish"] + owed if owed else None
            self._change(tenant_id, Amounts() - held, -int(waited), finish)

    def _sandbox_made(self, sandbox_id: str, tenant_id: str, charge: Charge) -> None:
        if self._reserve(sandbox_id, tenant_id, charge.amounts, charge.run_id):
            self._check_room(charge.rules, tenant_id, charge.amounts)
            self._change(tenant_id, charge.amounts)

    def _sandbox_ended(self, sandbox_id: str, tenant_id: str) -> None:
        row = self._reservations.get(sandbox_id)
        if row is not None:
            self._drop(self._reservations, sandbox_id)
            self._change(tenant_id, Amounts() - row["amounts"])

    # -- the queue -------------------------------------------------------------------------------------------------------------
    async def place_run(
        self, run_id: str, *, changes: dict[str, Any], entry: Entry, rules: QuotaRules, driver: str | None = None
    ) -> RunRecord:
        to_text(entry.sandbox_id, "run.sandbox_id")
        encoded = RUN.encode_changes(changes)

        def work() -> RunRecord:
            row = self._update(self._runs, RUN, run_id, UNPLACED, encoded, driver)
            tenant_id, place = str(row["tenant_id"]), place_of(int(row["created_at"] or 0), entry.priority)
            head = Head(run_id, place, entry.cost, entry.demand)
            mine = Waiting(tenant_id, self._use_of(tenant_id)["finish"], self._use_of(tenant_id)["held"], head)
            if self._is_next(mine, rules):
                return self._start(mine, entry.sandbox_id, rules, row)
            deadline = self._now + entry.timeout_ms
            queued = {"tenant_id": tenant_id, "place": place, "cost": entry.cost, "amounts": entry.amounts}
            self._put(self._queue, run_id, {**queued, "queued_at": self._now, "deadline_at": deadline})
            self._change(tenant_id, Amounts(), 1)
            return RUN.from_row(self._set(self._runs, run_id, {**row, "state": "queued"}))

        return await self._transact(work)

    def _start(self, each: Waiting, sandbox_id: str, rules: QuotaRules, row: Row) -> RunRecord:
        demand, weight, run_id = each.head.demand, rules.of(each.tenant_id).weight, each.head.run_id
        clock = start_of(self._use_of(EVERYBODY)["finish"], each.finish)
        before = self._reservations.get(run_id, {"amounts": Amounts()})["amounts"]
        self._drop(self._reservations, run_id)
        paid_until = self._now + expected_ms(demand, each.head.cost)
        self._reserve(run_id, each.tenant_id, RUNNING, None, paid_until, rate_of(demand, weight))
        self._reserve(sandbox_id, each.tenant_id, demand - RUNNING, run_id)
        waited = run_id in self._queue
        self._drop(self._queue, run_id)
        finish = finish_of(clock, each.head.cost, weight)
        self._change(each.tenant_id, demand - before, -int(waited), finish, clock)
        return RUN.from_row(self._set(self._runs, run_id, {**row, "state": "starting", "sandbox_id": sandbox_id}))

    def _is_next(self, mine: Waiting, rules: QuotaRules) -> bool:
        others = self._waiting()
        first = next((other for other in others if other.tenant_id == mine.tenant_id), mine)
        if (first.head.place, first.head.run_id) < (mine.head.place, mine.head.run_id):
            return False
        waiting = [*(other for other in others if other.tenant_id != mine.tenant_id), mine]
        totals = self._use_of(EVERYBODY)
        return choose(waiting, totals["finish"], totals["held"], rules) is mine

    def _waiting(self) -> list[Waiting]:
        heads: dict[str, tuple[int, str]] = {}
        for run_id, row in self._queue.items():
            if row["deadline_at"] > self._now:
                mine = (row["place"], run_id)
                heads[row["tenant_id"]] = min(heads.get(row["tenant_id"], mine), mine)
        return [
            Waiting(
                tenant_id,
                self._use_of(tenant_id)["finish"],
                self._use_of(tenant_id)["held"],
                Head(run_id, place, self._queue[run_id]["cost"], self._queue[run_id]["amounts"] + RUNNING),
            )
            for tenant_id, (place, run_id) in sorted(heads.items())
        ]

    async def admit(self, rules: QuotaRules, sandbox_ids: Sequence[str]) -> list[RunRecord]:
        def work() -> list[RunRecord]:
            admitted: list[RunRecord] = []
            for sandbox_id in sandbox_ids:
                totals = self._use_of(EVERYBODY)
                pick = choose(self._waiting(), totals["finish"], totals["held"], rules)
                if pick is None:
                    break
                row = self._update(self._runs, RUN, pick.head.run_id, ("queued",), {})
                admitted.append(self._start(pick, sandbox_id, rules, row))
            return admitted

        return await self._transact(work)

    async def waiting(self) -> int:
        return await self._transact(lambda: int(self._use_of(EVERYBODY)["waiting"]))

    def _mine(self, tenant_id: str) -> list[QueuedRun]:
        mine = sorted((row["place"], run_id) for run_id, row in self._queue.items() if row["tenant_id"] == tenant_id)
        return [
            QueuedRun(
                run_id,
                tenant_id,
                priority_of(int(self._runs[run_id]["created_at"] or 0), place),
                position,
                self._queue[run_id]["queued_at"],
                self._queue[run_id]["deadline_at"],
                self._queue[run_id]["amounts"] + RUNNING,
            )
            for position, (place, run_id) in enumerate(mine, 1)
        ]

    async def queued_run(self, run_id: str, tenant_id: str) -> QueuedRun | None:
        return await self._transact(
            lambda: next((each for each in self._mine(tenant_id) if each.run_id == run_id), None)
        )

    async def still_queued(self, run_ids: Sequence[str]) -> set[str]:
        return await self._transact(lambda: {run_id for run_id in run_ids if run_id in self._queue})

    async def list_queue(self, tenant_id: str, *, limit: int = 100) -> list[QueuedRun]:
        return await self._transact(lambda: self._mine(tenant_id)[: page_size(limit)])

    async def tenant_use(self, tenant_id: str) -> TenantUse:
        def work() -> TenantUse:
            row = self._use_of(tenant_id)
            return TenantUse(tenant_id, row["held"], row["waiting"])

        return await self._transact(work)

    # -- whether it is right ---------------------------------------------------------------------------------------------------
    def _live_holders(self) -> dict[str, str]:
        runs = {key: str(row["tenant_id"]) for key, row in self._runs.items() if row["state"] != "finished"}
        sandboxes = {
            key: str(row["tenant_id"]) for key, row in self._sandboxes.items() if row["state"] not in FREE_STATES
        }
        return {**runs, **sandboxes}

    def _sums(self) -> dict[str, tuple[Amounts, int]]:
        sums: dict[str, tuple[Amounts, int]] = {EVERYBODY: (Amounts(), 0)}
        rows = [(row["tenant_id"], row["amounts"], 0) for row in self._reservations.values()]
        rows += [(row["tenant_id"], Amounts(), 1) for row in self._queue.values()]
        for tenant_id, amounts, waiting in rows:
            for key in (tenant_id, EVERYBODY):
                held, waits = sums.get(key, (Amounts(), 0))
                sums[key] = (held + amounts, waits + waiting)
        return {**{key: (Amounts(), 0) for key in self._use}, **sums}

    def _drift(self) -> list[Drift]:
        live = self._live_holders()
        found = [
            Drift("no_holder", holder, {"tenant_id": row["tenant_id"]})
            for holder, row in self._reservations.items()
            if holder not in live and row["run_id"] not in live
        ]
        found += [
            Drift("not_reserved", holder, {"tenant_id": tenant_id})
            for holder, tenant_id in live.items()
            if holder not in self._reservations
        ]
        for tenant_id, (right, waiting) in sorted(self._sums().items()):
            row = self._use_of(tenant_id)
            if (row["held"], row["waiting"]) != (right, waiting):
                data = {"is": row["held"].as_dict(), "should_be": right.as_dict(), "waiting": waiting}
                found.append(Drift("sum", tenant_id, data))
        return found

    async def quota_drift(self) -> list[Drift]:
        return await self._transact(self._drift)

    async def mend_quota(self) -> list[Drift]:
        def work() -> list[Drift]:
            drift = [replace(each) for each in self._drift() if each.kind != "not_reserved"]
            for each in drift:
                if each.kind == "no_holder":
                    self._drop(self._reservations, each.subject)
            for tenant_id, (right, waiting) in self._sums().items():
                self._put(self._use, tenant_id, {**self._use_of(tenant_id), "held": right, "waiting": waiting})
            return drift

        return await self._transact(work)
