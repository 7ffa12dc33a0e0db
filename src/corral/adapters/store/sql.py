"""The store's functions over any SQL database: values checked and encoded in the caller's thread, then one transaction each.

An adapter (`sqlite`, `postgres`) says how a transaction is run: `_write` and `_read`. The statements are in `transactions` and its
siblings, one module for each part of the port.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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

from . import commands, execs, runs, trail, transactions, views
from .expiry import SqlExpiry
from .identity import SqlIdentity
from .leases import SqlLeases
from .queue import SqlQueue
from .repeats import SqlRepeats
from .rows import (
    AUDIT,
    EVENT,
    EXEC,
    RUN,
    SANDBOX,
    check_instance_state,
    check_ttl,
    encode_done,
    encode_transition,
    to_json,
    to_text,
)
from .webhooks import SqlWebhooks
from .workers import SqlWorkers


class SqlStore(SqlQueue, SqlIdentity, SqlLeases, SqlWorkers, SqlWebhooks, SqlExpiry, SqlRepeats):
    """See the module docstring."""

    # -- runs ------------------------------------------------------------------------------------------------------------------
    async def submit_run(
        self,
        run: RunRecord,
        audit: AuditRecord,
        idempotency: Idempotency | None = None,
        ticket: Ticket | None = None,
    ) -> tuple[RunRecord, bool]:
        return await self._write(runs.submit_run, RUN.encode(run), AUDIT.encode(audit), idempotency, ticket)

    async def update_run(
        self,
        run_id: str,
        *,
        expect_states: Sequence[str],
        changes: dict[str, Any],
        audit: AuditRecord | None = None,
        driver: str | None = None,
    ) -> RunRecord:
        row = AUDIT.encode(audit) if audit is not None else None
        return await self._write(
            runs.update_run, run_id, tuple(expect_states), RUN.encode_changes(changes), row, driver
        )

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
        return await self._write(
            runs.finish_run,
            run_id,
            to_json(result, "run.result"),
            to_text(reason, "run.reason"),
            to_json(timings, "run.timings"),
            AUDIT.encode(audit),
            driver,
        )

    async def get_run(self, run_id: str, tenant_id: str) -> RunRecord | None:
        return await self._read(runs.get_run, run_id, tenant_id)

    async def list_runs(
        self, tenant_id: str, *, states: Sequence[str] | None = None, after: str | None = None, limit: int = 100
    ) -> list[RunRecord]:
        return await self._read(runs.list_runs, tenant_id, states, after, limit)

    async def open_runs(self) -> list[RunRecord]:
        return await self._read(runs.open_runs)

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
        return await self._write(
            transactions.create_sandbox,
            SANDBOX.encode(sandbox),
            EVENT.encode(event),
            AUDIT.encode(audit),
            idempotency,
            [encode_transition(each) for each in transitions],
            charge,
        )

    async def commit_transitions(self, transitions: Sequence[Transition]) -> Committed:
        steps = [encode_transition(each) for each in transitions]
        return await self._write(transactions.commit_transitions, steps)

    async def commit_transition(self, transition: Transition) -> Committed:
        return await self._write(transactions.commit_transition, encode_transition(transition))

    async def get_sandbox(self, sandbox_id: str, tenant_id: str | None) -> SandboxView | None:
        return await self._read(views.get_sandbox, sandbox_id, tenant_id)

    async def list_sandboxes(
        self, tenant_id: str | None, *, states: Sequence[str] | None = None, after: str | None = None, limit: int = 100
    ) -> list[SandboxView]:
        return await self._read(views.list_sandboxes, tenant_id, states, after, limit)

    async def history(self, sandbox_id: str, limit: int = 1000) -> list[EventRecord]:
        """The newest `limit` events, oldest first."""
        return await self._read(trail.history, sandbox_id, limit)

    async def add_event(self, event: EventRecord) -> int:
        return await self._write(trail.add_event, EVENT.encode(event))

    async def renew_lease(self, sandbox_id: str, owner: str, fence: Fence, ttl_ms: int) -> LeaseRecord:
        check_ttl(ttl_ms)
        return await self._write(transactions.renew_lease, sandbox_id, owner, fence, ttl_ms)

    # -- instances -------------------------------------------------------------------------------------------------------------
    async def update_instance(
        self, instance_id: str, *, expect_states: Sequence[str], state: str, ref: dict[str, Any] | None = None
    ) -> InstanceRecord:
        check_instance_state(state)
        text = to_json(ref, "instance.ref") if ref is not None else None
        return await self._write(transactions.update_instance, instance_id, tuple(expect_states), state, text)

    async def list_instances(self, node_id: str, *, states: Sequence[str] | None = None) -> list[InstanceRecord]:
        return await self._read(views.list_instances, node_id, states)

    # -- execs -----------------------------------------------------------------------------------------------------------------
    async def create_exec(
        self, record: ExecRecord, fence: Fence, *, idempotency: Idempotency | None = None, tenant_id: str = "default"
    ) -> tuple[ExecRecord, bool]:
        return await self._write(execs.create_exec, EXEC.encode(record), fence, idempotency, tenant_id)

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
        if renew is not None:
            check_ttl(renew[1])
        row, step = EXEC.encode(record), encode_transition(transition)
        return await self._write(execs.begin_exec, row, fence, step, renew, idempotency, tenant_id, driver)

    async def end_exec(
        self,
        exec_id: str,
        *,
        changes: dict[str, Any],
        done: Sequence[CommandDone] = (),
        last: Transition | None = None,
        others: Transition | None = None,
    ) -> ExecRecord:
        return await self._write(
            execs.end_exec,
            exec_id,
            EXEC.encode_changes(changes),
            encode_done(done),
            encode_transition(last) if last is not None else None,
            encode_transition(others) if others is not None else None,
        )

    async def update_exec(self, exec_id: str, *, expect_states: Sequence[str], changes: dict[str, Any]) -> ExecRecord:
        return await self._write(execs.update_exec, exec_id, tuple(expect_states), EXEC.encode_changes(changes))

    async def get_exec(self, exec_id: str, tenant_id: str | None) -> ExecRecord | None:
        return await self._read(execs.get_exec, exec_id, tenant_id)

    async def open_execs(self, sandbox_id: str | None = None) -> list[ExecRecord]:
        return await self._read(execs.open_execs, sandbox_id)

    async def list_execs(self, sandbox_id: str) -> list[ExecRecord]:
        return await self._read(execs.list_execs, sandbox_id)

    # -- commands --------------------------------------------------------------------------------------------------------------
    async def lock_command(
        self, worker: str, claim_ms: int, *, kinds: Sequence[str] | None = None
    ) -> CommandRecord | None:
        check_ttl(claim_ms)
        return await self._write(commands.lock_command, to_text(worker, "claimed_by"), claim_ms, kinds)

    async def finish_command(self, command_id: str, worker: str, outcome: dict[str, Any]) -> bool:
        """Only the worker whose claim it is may finish it, run out or not; False for everybody else."""
        text = to_json(outcome, "sandbox_command.outcome")
        return await self._write(commands.finish_command, command_id, worker, text)

    async def open_commands(self, sandbox_id: str | None = None) -> list[CommandRecord]:
        return await self._read(commands.open_commands, sandbox_id)

    # -- audit -----------------------------------------------------------------------------------------------------------------
    async def add_audit(self, audit: AuditRecord) -> int:
        return await self._write(trail.add_audit, AUDIT.encode(audit))

    async def list_audit(self, tenant_id: str, *, subject: str | None = None, limit: int = 1000) -> list[AuditRecord]:
        """The newest `limit` rows, oldest first."""
        return await self._read(trail.list_audit, tenant_id, subject, limit)
