"""The store: source of record. The unit is the *transaction function*, not the statement.

Contract for every adapter (`corral.testing.store` is the conformance suite):

* Each function is one serialisable transaction: it happens whole or not at all, also over `kill -9`. It is async and safe to call
  from many tasks of one event loop at once.
* A compare-and-set that finds another state raises `CorralError("conflict")` and changes nothing. An unknown id raises
  `not_found`. A fence below the row's raises `lease_lost`. A failing database raises `store_error` (retryable); that is never read
  as a fact about a sandbox.
* The store's clock (`now_ms`, Unix epoch milliseconds, injected) judges expiry and stamps rows; `lease_version` and `event_id` only
  ever rise. Events and audit rows are written in the transaction of the change that they describe.
* Values go in and come out as the frozen records of `corral.domain.records`; JSON columns round-trip exactly, non-UTF-8 text
  (lone surrogates) and all of Unicode included.
* No I/O before `open`; `open` migrates an empty database and refuses an older or newer one with a clear error; `close` is idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

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
from corral.ports.expiry import ExpiryStore
from corral.ports.identity import IdentityStore
from corral.ports.leases import LeaseStore
from corral.ports.queue import Charge, QueueStore, Ticket
from corral.ports.repeats import RepeatsStore
from corral.ports.webhooks import WebhookStore
from corral.ports.workers import WorkerStore


class Store(QueueStore, IdentityStore, LeaseStore, WorkerStore, WebhookStore, ExpiryStore, RepeatsStore, Protocol):
    """See the module docstring; `None` from a `get_*` means that there is no such row."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def installation_id(self) -> str:
        """A random id made once per database; instances of others are never touched."""
        ...

    # -- runs ------------------------------------------------------------------------------------------------------------------
    async def submit_run(
        self,
        run: RunRecord,
        audit: AuditRecord,
        idempotency: Idempotency | None = None,
        ticket: Ticket | None = None,
    ) -> tuple[RunRecord, bool]:
        """Insert the run, once per idempotency key. -> (the run, True if this call made it). `idempotency_conflict` on another body.

        With a `ticket` it holds a place in its tenant's queue, or `queue_full` (not asked of a key that is known).
        """
        ...

    async def update_run(
        self,
        run_id: str,
        *,
        expect_states: Sequence[str],
        changes: dict[str, Any],
        audit: AuditRecord | None = None,
        driver: str | None = None,
    ) -> RunRecord:
        """Set columns (a changed `state` included) if the state is one of `expect_states`, else `conflict`.

        `driver`: who must still drive the run, else `superseded` (here and below; None = whoever).
        """
        ...

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
        """Any state -> `finished`, once; a second call changes nothing and returns the stored row."""
        ...

    async def get_run(self, run_id: str, tenant_id: str) -> RunRecord | None: ...

    async def list_runs(
        self, tenant_id: str, *, states: Sequence[str] | None = None, after: str | None = None, limit: int = 100
    ) -> list[RunRecord]:
        """Newest first; `after` = id of the last one seen. In a list `request` is {}, and `files`, `timeline` of results are missing."""
        ...

    async def open_runs(self) -> list[RunRecord]:
        """All runs of all tenants that are not finished, oldest first (take-over, gc)."""
        ...

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
        """Insert row, lease row (owner None, version 0), environment row and event. Idempotent like `submit_run`.

        `transitions` are its first steps, committed with it (not when the key is known); -> the row after them. `charge`: what it
        holds from now on; `quota_exceeded` if there is no room for that.
        """
        ...

    async def commit_transition(self, transition: Transition) -> Committed:
        """All of `Transition` or nothing. `conflict` if `version` moved on, `lease_lost` if `expect_fence` is not the current one.

        `LeaseChange.take` sets owner, `lease_version + 1`, times; `extend` moves `expires_at` (never back); `drop` clears the owner
        with `lease_version + 1`. Binding a second instance to a sandbox, or a condemned or gone one, is `conflict`.
        """
        ...

    async def commit_transitions(self, transitions: Sequence[Transition]) -> Committed:
        """Several steps of one sandbox, in order, in one transaction: all or none. -> what the last one left."""
        ...

    async def get_sandbox(self, sandbox_id: str, tenant_id: str | None) -> SandboxView | None:
        """One snapshot of sandbox, lease, instance; a foreign tenant's id is None (`tenant_id=None` = the system itself)."""
        ...

    async def list_sandboxes(
        self, tenant_id: str | None, *, states: Sequence[str] | None = None, after: str | None = None, limit: int = 100
    ) -> list[SandboxView]: ...

    async def history(self, sandbox_id: str, limit: int = 1000) -> list[EventRecord]:
        """Events, oldest first."""
        ...

    async def add_event(self, event: EventRecord) -> int:
        """An observation that changes no state (`stale_ignored`, `condition`)."""
        ...

    # -- leases ----------------------------------------------------------------------------------------------------------------
    async def renew_lease(self, sandbox_id: str, owner: str, fence: Fence, ttl_ms: int) -> LeaseRecord:
        """Answer the committed expiry; extend the row only when less than two thirds of `ttl_ms` is left. `lease_lost` when the
        owner or fence differs or the expiry (store's clock) has passed; a renewal after expiry always fails."""
        ...

    # -- instances -------------------------------------------------------------------------------------------------------------
    async def update_instance(
        self, instance_id: str, *, expect_states: Sequence[str], state: str, ref: dict[str, Any] | None = None
    ) -> InstanceRecord:
        """CAS outside a sandbox transition (condemned -> gone, ...)."""
        ...

    async def list_instances(self, node_id: str, *, states: Sequence[str] | None = None) -> list[InstanceRecord]: ...

    # -- execs -----------------------------------------------------------------------------------------------------------------
    async def create_exec(
        self, record: ExecRecord, fence: Fence, *, idempotency: Idempotency | None = None, tenant_id: str = "default"
    ) -> tuple[ExecRecord, bool]:
        """Insert as `starting`; `lease_lost` unless `fence` is the sandbox's current one. Committed before any frame is sent."""
        ...

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
        """`create_exec`, `renew_lease` for `renew` = (owner, ttl_ms), and the sandbox's `transition`, in one transaction.

        `driver`: who must still drive the exec's run. A second exec for a step of a run is `conflict`.

        An exec that was made before under the key: (that exec, None), and nothing else happens.
        """
        ...

    async def end_exec(
        self,
        exec_id: str,
        *,
        changes: dict[str, Any],
        done: Sequence[CommandDone] = (),
        last: Transition | None = None,
        others: Transition | None = None,
    ) -> ExecRecord:
        """`update_exec` of an open exec, outcomes, and its sandbox's transition: `last` if now none is open, else `others`."""
        ...

    async def update_exec(
        self, exec_id: str, *, expect_states: Sequence[str], changes: dict[str, Any]
    ) -> ExecRecord: ...

    async def get_exec(self, exec_id: str, tenant_id: str | None) -> ExecRecord | None: ...

    async def open_execs(self, sandbox_id: str | None = None) -> list[ExecRecord]:
        """Execs in `starting` or `running`, oldest first."""
        ...

    async def list_execs(self, sandbox_id: str) -> list[ExecRecord]: ...

    # -- commands --------------------------------------------------------------------------------------------------------------
    async def lock_command(
        self, worker: str, claim_ms: int, *, kinds: Sequence[str] | None = None
    ) -> CommandRecord | None:
        """Lock the oldest open command that nobody holds (or whose claim has run out); `attempt + 1`."""
        ...

    async def finish_command(self, command_id: str, worker: str, outcome: dict[str, Any]) -> bool:
        """Record the one outcome; False if it already had one or another worker holds it now."""
        ...

    async def open_commands(self, sandbox_id: str | None = None) -> list[CommandRecord]: ...

    # -- audit -----------------------------------------------------------------------------------------------------------------
    async def add_audit(self, audit: AuditRecord) -> int: ...

    async def list_audit(
        self, tenant_id: str, *, subject: str | None = None, limit: int = 1000
    ) -> list[AuditRecord]: ...
