"""The store in memory: the twin of the SQLite store for tests and experiments. Same rules, same errors, nothing survives the process.

Rows are kept encoded, as a database would, so that nothing is shared with the caller. A transaction has no await inside; what it
changed is taken back if it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from corral.domain.fence import Fence
from corral.domain.records import (
    AuditRecord,
    CommandDone,
    CommandRecord,
    Committed,
    EventRecord,
    ExecRecord,
    Idempotency,
    InstanceRecord,
    LeaseRecord,
    RunRecord,
    SandboxRecord,
    SandboxView,
    Transition,
)
from corral.ports.queue import Charge, Ticket

from .memory_expiry import MemoryExpiry
from .memory_identity import MemoryIdentity
from .memory_leases import MemoryLeases
from .memory_queue import MemoryQueue
from .memory_repeats import MemoryRepeats
from .memory_webhooks import MemoryWebhooks
from .memory_workers import MemoryWorkers
from .reserving import FREE_STATES
from .rows import (
    AUDIT,
    COMMAND,
    EVENT,
    EXEC,
    INSTANCE,
    LEASE,
    OPEN_EXEC,
    RUN,
    SANDBOX,
    DoneStep,
    InstanceStep,
    Row,
    Step,
    check_instance_state,
    check_ttl,
    conflict,
    encode_done,
    encode_transition,
    lease_lost,
    listed,
    not_found,
    renewed_expiry,
    superseded,
    to_json,
    to_text,
)
from .rules import changed_lease, check_expired, check_holder, check_monotone, check_move, new_command
from .sql_text import page_size

T = TypeVar("T")
_ABSENT: Any = object()


class MemoryStore(
    MemoryQueue, MemoryIdentity, MemoryLeases, MemoryWorkers, MemoryWebhooks, MemoryExpiry, MemoryRepeats
):
    """`corral.ports.store.Store` in dictionaries. Rows survive `close` and `open` of the same object."""

    # -- runs ------------------------------------------------------------------------------------------------------------------
    async def submit_run(
        self,
        run: RunRecord,
        audit: AuditRecord,
        idempotency: Idempotency | None = None,
        ticket: Ticket | None = None,
    ) -> tuple[RunRecord, bool]:
        row, audit_row = RUN.encode(run), AUDIT.encode(audit)

        def work() -> tuple[RunRecord, bool]:
            known = self._claim_key(idempotency, run.run_id)
            if known is not None:
                return RUN.from_row(self._get(self._runs, RUN, known)), False
            self._insert(self._runs, RUN, row)
            self._append(self._audit, "audit_id", audit_row)
            if ticket is not None:
                self._run_submitted(run.run_id, run.tenant_id, ticket)
            return RUN.from_row(row), True

        return await self._transact(work)

    async def update_run(
        self,
        run_id: str,
        *,
        expect_states: Sequence[str],
        changes: dict[str, Any],
        audit: AuditRecord | None = None,
        driver: str | None = None,
    ) -> RunRecord:
        audit_row = AUDIT.encode(audit) if audit is not None else None
        encoded = RUN.encode_changes(changes)

        def work() -> RunRecord:
            row = self._update(self._runs, RUN, run_id, expect_states, encoded, driver)
            if audit_row is not None:
                self._append(self._audit, "audit_id", audit_row)
            return RUN.from_row(row)

        return await self._transact(work)

    async def finish_run(
        self,
        run_id: str,
        *,
        result: dict[str, Any],
        reason: str,
        timings: dict[str, Any],
        audit: AuditRecord,
        driver: str | None = None,
    ) -> RunRecord:
        changes: Row = {
            "state": "finished",
            "result": to_json(result, "run.result"),
            "reason": to_text(reason, "run.reason"),
            "timings": to_json(timings, "run.timings"),
        }
        audit_row = AUDIT.encode(audit)

        def work() -> RunRecord:
            row = self._get(self._runs, RUN, run_id)
            if row["state"] == "finished":
                return RUN.from_row(row)
            done: Row = {**changes, "finished_at": self._now}
            row = self._update(self._runs, RUN, run_id, (str(row["state"]),), done, driver)
            self._append(self._audit, "audit_id", audit_row)
            self._run_ended(run_id, str(row["tenant_id"]))
            return RUN.from_row(row)

        return await self._transact(work)

    async def get_run(self, run_id: str, tenant_id: str) -> RunRecord | None:
        def work() -> RunRecord | None:
            row = self._runs.get(run_id)
            return RUN.from_row(row) if row is not None and row["tenant_id"] == tenant_id else None

        return await self._transact(work)

    async def list_runs(
        self, tenant_id: str, *, states: Sequence[str] | None = None, after: str | None = None, limit: int = 100
    ) -> list[RunRecord]:
        return await self._transact(
            lambda: [listed(RUN.from_row(row)) for row in self._page(self._runs, RUN, tenant_id, states, after, limit)]
        )

    async def open_runs(self) -> list[RunRecord]:
        def work() -> list[RunRecord]:
            rows = [RUN.from_row(row) for row in self._runs.values() if row["state"] != "finished"]
            return sorted(rows, key=lambda run: (run.created_at, run.run_id))

        return await self._transact(work)

    # -- sandboxes -------------------------------------------------------------------------------------------------------------
    async def create_sandbox(
        self,
        sandbox: SandboxRecord,
        event: EventRecord,
        audit: AuditRecord,
        idempotency: Idempotency | None = None,
        transitions: Sequence[Transition] = (),
        charge: Charge | None = None,
    ) -> tuple[SandboxRecord, bool]:
        row, event_row, audit_row = SANDBOX.encode(sandbox), EVENT.encode(event), AUDIT.encode(audit)
        steps = [encode_transition(each) for each in transitions]

        def work() -> tuple[SandboxRecord, bool]:
            known = self._claim_key(idempotency, sandbox.sandbox_id)
            if known is not None:
                return SANDBOX.from_row(self._get(self._sandboxes, SANDBOX, known)), False
            self._insert(self._sandboxes, SANDBOX, row)
            lease = LeaseRecord(sandbox.sandbox_id, None, 0, self._now, self._now, self._now)
            self._put(self._leases, sandbox.sandbox_id, LEASE.encode(lease))
            self._add_event(event_row, sandbox.sandbox_id, None, sandbox.state)
            self._append(self._audit, "audit_id", audit_row)
            made = self._commit_all(steps).sandbox if steps else SANDBOX.from_row(row)
            if charge is not None:
                self._sandbox_made(made.sandbox_id, made.tenant_id, charge)
            return made, True

        return await self._transact(work)

    def _add_event(self, event: Row, sandbox_id: str, old_state: str | None, new_state: str | None) -> int:
        row: Row = {**event, "sandbox_id": sandbox_id}
        row["old_state"] = row["old_state"] if row["old_state"] is not None else old_state
        row["new_state"] = row["new_state"] if row["new_state"] is not None else new_state
        return self._append(self._events, "event_id", row)

    def _sandbox_and_lease(self, sandbox_id: str) -> tuple[SandboxRecord, LeaseRecord]:
        row = self._get(self._sandboxes, SANDBOX, sandbox_id)
        return SANDBOX.from_row(row), LEASE.from_row(self._leases[sandbox_id])

    @staticmethod
    def _check_fence(sandbox: SandboxRecord, lease: LeaseRecord, fence: Fence) -> None:
        if (fence.incarnation, fence.token) != (sandbox.incarnation, lease.lease_version):
            raise lease_lost(sandbox.sandbox_id, f"{fence} is not its fence")

    async def commit_transition(self, transition: Transition) -> Committed:
        return await self.commit_transitions([transition])

    async def commit_transitions(self, transitions: Sequence[Transition]) -> Committed:
        steps = [encode_transition(each) for each in transitions]
        return await self._transact(lambda: self._commit_all(steps))

    def _commit_all(self, steps: Sequence[Step]) -> Committed:
        *before, last = steps
        for step in before:
            self._commit(step)
        return self._commit(last)

    def _commit(self, step: Step) -> Committed:
        transition = step.source
        old, lease = self._sandbox_and_lease(transition.sandbox_id)
        if transition.expect_fence is not None:
            self._check_fence(old, lease, transition.expect_fence)
        if old.version != transition.expect_version:
            raise conflict(f"sandbox {old.sandbox_id} is at version {old.version}", state=old.state)
        check_monotone(old, step.changes)
        check_expired(transition.lease, lease, self._now)
        row: Row = {**self._sandboxes[old.sandbox_id], **step.changes}
        row.update(state=step.new_state, version=old.version + 1)
        self._put(self._sandboxes, old.sandbox_id, row)
        sandbox = SANDBOX.from_row(row)
        if (change := transition.lease) is not None:
            lease = changed_lease(self._now, lease, change)
            self._put(self._leases, old.sandbox_id, LEASE.encode(lease))
        for instance in step.instances:
            self._change_instance(instance, sandbox)
        self._finish_commands(old.sandbox_id, step.done)
        for command in step.commands:
            self._get(self._sandboxes, SANDBOX, str(command["sandbox_id"]))
            self._insert(self._commands, COMMAND, new_command(command, self._now))
        if transition.end_execs is not None:
            self._end_execs(old.sandbox_id, transition.end_execs)
        if transition.settled:
            self._put(self._environments, old.sandbox_id, self._environments.get(old.sandbox_id, 1) + 1)
        event_id = self._add_event(step.event, old.sandbox_id, old.state, step.new_state)
        if step.audit is not None:
            self._append(self._audit, "audit_id", step.audit)
        if step.new_state in FREE_STATES:
            self._sandbox_ended(old.sandbox_id, old.tenant_id)
        return Committed(sandbox, lease, event_id)

    def _change_instance(self, change: InstanceStep, sandbox: SandboxRecord) -> None:
        if change.record is not None:
            self._insert(self._instances, INSTANCE, change.record)
            self._check_one_bound(change.record)
            return
        row = self._get(self._instances, INSTANCE, change.instance_id)
        check_move(INSTANCE.from_row(row), change.expect, change.state, sandbox.sandbox_id)
        row = {**row, "state": change.state, "ref": change.ref if change.ref is not None else row["ref"]}
        if change.state == "bound":
            row.update(sandbox_id=sandbox.sandbox_id, incarnation=sandbox.incarnation)
        self._put(self._instances, change.instance_id, row)
        self._check_one_bound(row)

    def _check_one_bound(self, row: Row) -> None:
        if row["state"] != "bound":
            return
        bound = [r for r in self._instances.values() if r["state"] == "bound" and r["sandbox_id"] == row["sandbox_id"]]
        if len(bound) > 1:
            raise conflict(f"sandbox {row['sandbox_id']} has a bound instance already")

    def _end_execs(self, sandbox_id: str, reason: str) -> None:
        for exec_id, row in list(self._execs.items()):
            if row["sandbox_id"] == sandbox_id and row["state"] in OPEN_EXEC:
                why = row["cancel_requested"] if row["cancel_requested"] is not None else reason
                version = int(row["version"] or 0) + 1
                self._put(self._execs, exec_id, {**row, "cancel_requested": why, "version": version})

    async def get_sandbox(self, sandbox_id: str, tenant_id: str | None) -> SandboxView | None:
        def work() -> SandboxView | None:
            row = self._sandboxes.get(sandbox_id)
            return self._view(row) if row is not None and tenant_id in (None, row["tenant_id"]) else None

        return await self._transact(work)

    async def list_sandboxes(
        self, tenant_id: str | None, *, states: Sequence[str] | None = None, after: str | None = None, limit: int = 100
    ) -> list[SandboxView]:
        return await self._transact(
            lambda: [self._view(row) for row in self._page(self._sandboxes, SANDBOX, tenant_id, states, after, limit)]
        )

    async def history(self, sandbox_id: str, limit: int = 1000) -> list[EventRecord]:
        """The newest `limit` events, oldest first."""

        def work() -> list[EventRecord]:
            rows = [EVENT.from_row(row) for row in self._events.values() if row["sandbox_id"] == sandbox_id]
            return rows[max(0, len(rows) - page_size(limit)) :]

        return await self._transact(work)

    async def add_event(self, event: EventRecord) -> int:
        row = EVENT.encode(event)

        def work() -> int:
            self._get(self._sandboxes, SANDBOX, event.sandbox_id)
            return self._add_event(row, event.sandbox_id, None, None)

        return await self._transact(work)

    async def renew_lease(self, sandbox_id: str, owner: str, fence: Fence, ttl_ms: int) -> LeaseRecord:
        check_ttl(ttl_ms)
        return await self._transact(lambda: self._renew(sandbox_id, owner, fence, ttl_ms))

    def _renew(self, sandbox_id: str, owner: str, fence: Fence, ttl_ms: int) -> LeaseRecord:
        sandbox, lease = self._sandbox_and_lease(sandbox_id)
        self._check_fence(sandbox, lease, fence)
        check_holder(lease, owner, self._now)
        expires_at = renewed_expiry(lease.expires_at, self._now, ttl_ms)
        if expires_at is None:
            return lease
        new = replace(lease, heartbeat_at=self._now, expires_at=expires_at)
        self._put(self._leases, sandbox_id, LEASE.encode(new))
        return new

    # -- instances -------------------------------------------------------------------------------------------------------------
    async def update_instance(
        self, instance_id: str, *, expect_states: Sequence[str], state: str, ref: dict[str, Any] | None = None
    ) -> InstanceRecord:
        check_instance_state(state)
        text = to_json(ref, "instance.ref") if ref is not None else None

        def work() -> InstanceRecord:
            row = self._get(self._instances, INSTANCE, instance_id)
            old = INSTANCE.from_row(row)
            check_move(old, expect_states, state, old.sandbox_id)
            row = {**row, "state": state, "ref": text if text is not None else row["ref"]}
            self._put(self._instances, instance_id, row)
            self._check_one_bound(row)
            return INSTANCE.from_row(row)

        return await self._transact(work)

    async def list_instances(self, node_id: str, *, states: Sequence[str] | None = None) -> list[InstanceRecord]:
        def work() -> list[InstanceRecord]:
            rows = [
                INSTANCE.from_row(row)
                for row in self._instances.values()
                if row["node_id"] == node_id and (states is None or row["state"] in states)
            ]
            return sorted(rows, key=lambda i: (i.born_at, i.instance_id))

        return await self._transact(work)

    # -- execs -----------------------------------------------------------------------------------------------------------------
    async def create_exec(
        self, record: ExecRecord, fence: Fence, *, idempotency: Idempotency | None = None, tenant_id: str = "default"
    ) -> tuple[ExecRecord, bool]:
        row = EXEC.encode(record)
        return await self._transact(lambda: self._create_exec(row, fence, idempotency, tenant_id))

    def _create_exec(
        self, row: Row, fence: Fence, idempotency: Idempotency | None, tenant_id: str
    ) -> tuple[ExecRecord, bool]:
        sandbox, lease = self._sandbox_and_lease(str(row["sandbox_id"]))
        if sandbox.tenant_id != tenant_id:
            raise not_found("sandbox", sandbox.sandbox_id)
        known = self._claim_key(idempotency, str(row["exec_id"]))
        if known is not None:
            return EXEC.from_row(self._get(self._execs, EXEC, known)), False
        self._check_fence(sandbox, lease, fence)
        new: Row = {**row, "state": "starting", "incarnation": fence.incarnation, "lease_version": fence.token}
        steps = [(r["run_id"], r["step"]) for r in self._execs.values() if r["step"] is not None]
        if row["step"] is not None and row["run_id"] is not None and (row["run_id"], row["step"]) in steps:
            raise conflict(f"the run {row['run_id']} has an exec for {row['step']} already")
        self._insert(self._execs, EXEC, new)
        return EXEC.from_row(new), True

    async def begin_exec(
        self,
        record: ExecRecord,
        fence: Fence,
        transition: Transition,
        *,
        renew: tuple[str, int] | None = None,
        idempotency: Idempotency | None = None,
        tenant_id: str = "default",
        driver: str | None = None,
    ) -> tuple[ExecRecord, Committed | None]:
        row, step = EXEC.encode(record), encode_transition(transition)
        if renew is not None:
            check_ttl(renew[1])

        def work() -> tuple[ExecRecord, Committed | None]:
            if driver is not None and record.run_id is not None:
                run = self._get(self._runs, RUN, record.run_id)
                if run["driver"] != driver:
                    raise superseded(record.run_id, None if run["driver"] is None else str(run["driver"]))
                if run["state"] == "finished":
                    raise conflict(f"run {record.run_id} is finished", state="finished")
            made, fresh = self._create_exec(row, fence, idempotency, tenant_id)
            if not fresh:
                return made, None
            if renew is not None:
                self._renew(made.sandbox_id, renew[0], fence, renew[1])
            return made, self._commit(step)

        return await self._transact(work)

    async def end_exec(
        self,
        exec_id: str,
        *,
        changes: dict[str, Any],
        done: Sequence[CommandDone] = (),
        last: Transition | None = None,
        others: Transition | None = None,
    ) -> ExecRecord:
        encoded, outcomes = EXEC.encode_changes(changes), encode_done(done)
        last_step = encode_transition(last) if last is not None else None
        other_step = encode_transition(others) if others is not None else None

        def work() -> ExecRecord:
            ended = EXEC.from_row(self._update(self._execs, EXEC, exec_id, OPEN_EXEC, encoded))
            self._finish_commands(ended.sandbox_id, outcomes)
            step = other_step if self._some_execs(ended.sandbox_id, only_open=True) else last_step
            if step is not None:
                self._commit(step)
            return ended

        return await self._transact(work)

    async def update_exec(self, exec_id: str, *, expect_states: Sequence[str], changes: dict[str, Any]) -> ExecRecord:
        encoded = EXEC.encode_changes(changes)
        return await self._transact(
            lambda: EXEC.from_row(self._update(self._execs, EXEC, exec_id, expect_states, encoded))
        )

    async def get_exec(self, exec_id: str, tenant_id: str | None) -> ExecRecord | None:
        def work() -> ExecRecord | None:
            row = self._execs.get(exec_id)
            if row is None or tenant_id not in (None, self._sandboxes[row["sandbox_id"]]["tenant_id"]):
                return None
            return EXEC.from_row(row)

        return await self._transact(work)

    async def open_execs(self, sandbox_id: str | None = None) -> list[ExecRecord]:
        return await self._transact(lambda: self._some_execs(sandbox_id, only_open=True))

    async def list_execs(self, sandbox_id: str) -> list[ExecRecord]:
        return await self._transact(lambda: self._some_execs(sandbox_id, only_open=False))

    def _some_execs(self, sandbox_id: str | None, *, only_open: bool) -> list[ExecRecord]:
        rows = [
            EXEC.from_row(row)
            for row in self._execs.values()
            if (sandbox_id is None or row["sandbox_id"] == sandbox_id) and (not only_open or row["state"] in OPEN_EXEC)
        ]
        return sorted(rows, key=lambda e: (e.created_at, e.exec_id))

    # -- commands --------------------------------------------------------------------------------------------------------------
    async def lock_command(
        self, worker: str, claim_ms: int, *, kinds: Sequence[str] | None = None
    ) -> CommandRecord | None:
        to_text(worker, "claimed_by")
        check_ttl(claim_ms)

        def work() -> CommandRecord | None:
            for command_id, row in self._commands.items():
                free = (
                    row["claimed_by"] is None
                    or int(row["claim_until"] or 0) <= self._now
                    or self._dead(row["claimed_by"])
                )
                if row["done_at"] is None and free and (kinds is None or row["kind"] in kinds):
                    locked: Row = {**row, "claimed_by": worker, "claim_until": self._now + claim_ms}
                    locked["attempt"] = int(row["attempt"] or 0) + 1
                    self._put(self._commands, command_id, locked)
                    return COMMAND.from_row(locked)
            return None

        return await self._transact(work)

    async def finish_command(self, command_id: str, worker: str, outcome: dict[str, Any]) -> bool:
        """Only the worker whose claim it is may finish it, run out or not; False for everybody else."""
        text = to_json(outcome, "sandbox_command.outcome")
        return await self._transact(lambda: self._finish_command(command_id, worker, text))

    def _finish_command(self, command_id: str, worker: str, outcome: str) -> bool:
        row = self._get(self._commands, COMMAND, command_id)
        if row["done_at"] is not None or row["claimed_by"] != worker:
            return False
        self._put(self._commands, command_id, {**row, "done_at": self._now, "outcome": outcome})
        return True

    def _finish_commands(self, sandbox_id: str, done: Sequence[DoneStep]) -> None:
        for each in done:
            for command_id, row in list(self._commands.items()):
                meant = row["sandbox_id"] == sandbox_id and row["kind"] in each.kinds and row["done_at"] is None
                if meant and each.meets(COMMAND.from_row(row).args):
                    self._put(self._commands, command_id, {**row, "done_at": self._now, "outcome": each.outcome})

    async def open_commands(self, sandbox_id: str | None = None) -> list[CommandRecord]:
        return await self._transact(
            lambda: [
                COMMAND.from_row(row)
                for row in self._commands.values()
                if row["done_at"] is None and sandbox_id in (None, row["sandbox_id"])
            ]
        )

    # -- audit -----------------------------------------------------------------------------------------------------------------
    async def add_audit(self, audit: AuditRecord) -> int:
        row = AUDIT.encode(audit)
        return await self._transact(lambda: self._append(self._audit, "audit_id", row))

    async def list_audit(self, tenant_id: str, *, subject: str | None = None, limit: int = 1000) -> list[AuditRecord]:
        """The newest `limit` rows, oldest first."""

        def work() -> list[AuditRecord]:
            rows = [
                AUDIT.from_row(row)
                for row in self._audit.values()
                if row["tenant_id"] == tenant_id and subject in (None, row["subject"])
            ]
            return rows[max(0, len(rows) - page_size(limit)) :]

        return await self._transact(work)
