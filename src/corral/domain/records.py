"""Rows of the store as frozen values (B50 and design 8). Times are integer milliseconds of the store's clock (Unix epoch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from corral.domain.fence import Fence

Json = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One execution with its result. `state`: requested planning queued starting running collecting finished."""

    run_id: str
    tenant_id: str
    owner: str
    state: str
    request: Json
    created_at: int
    user_id: str | None = None
    session_id: str | None = None
    sandbox_id: str | None = None
    incarnation: int | None = None
    lease_version: int | None = None
    exec_id: str | None = None
    attached: bool = False
    """A client waits in the foreground: the run is cancelled when it is gone for good."""
    cancel_requested: str | None = None
    """None, or why: `cancelled`, `client_gone`, ..."""
    decisions: Json = field(default_factory=lambda: {"plan": None, "guard": None, "reuse": None, "placement": None})
    timings: Json = field(default_factory=dict)
    result: Json | None = None
    reason: str | None = None
    finished_at: int | None = None
    version: int = 1
    driver: str | None = None
    """The worker that drives it; whoever else finds it open takes it over once that worker is dead."""
    watched_until: int = 0
    """A client waits for it at some worker, at least until then."""


@dataclass(frozen=True)
class SandboxRecord:
    """The promise to the caller (`sandbox_instance` of B50 is this row joined with its bound instance)."""

    sandbox_id: str
    tenant_id: str
    state: str
    runtime: str
    template_id: str
    template_digest: str
    resource_class: str
    limits: Json
    created_at: int
    last_active_at: int
    expires_at: int
    user_id: str | None = None
    session_id: str | None = None
    incarnation: int = 0
    version: int = 1
    tainted: bool = False
    remembered_state: str | None = None
    """What `pausing`/`paused` go back to; `recycling:<level>` keeps its level here too."""
    conditions: Json = field(default_factory=dict)
    labels: Json = field(default_factory=dict)
    one_shot: bool = True
    failure: str | None = None
    """Reason of `failed`/`lost`/`terminated`."""
    idle_timeout_ms: int | None = None
    """How long it may be without activity (`domain.expiry`); None = for ever."""


@dataclass(frozen=True)
class LeaseRecord:
    """Whose it is now. `lease_version` only rises; `lease_owner` None = nobody.

    `request_digest`: of the call that took it, if that had an idempotency key; who repeats the call is known by it.
    """

    sandbox_id: str
    lease_owner: str | None
    lease_version: int
    acquired_at: int
    heartbeat_at: int
    expires_at: int
    request_digest: str | None = None


@dataclass(frozen=True)
class InstanceRecord:
    """The body: warming -> warm -> bound -> condemned -> gone. At most one `bound` per sandbox. `ref` is the runtime's, opaque."""

    instance_id: str
    node_id: str
    runtime: str
    template_digest: str
    resource_class: str
    security_level: int
    state: str
    sandbox_id: str | None
    incarnation: int
    born_at: int
    ref: Json | None = None


@dataclass(frozen=True)
class ExecRecord:
    """One process tree. `state`: starting running ended never_started lost. Committed as `starting` before the frame is sent."""

    exec_id: str
    sandbox_id: str
    incarnation: int
    lease_version: int
    state: str
    spec: Json
    created_at: int
    run_id: str | None = None
    attached: bool = False
    cancel_requested: str | None = None
    started_at: int | None = None
    ended_at: int | None = None
    result: Json | None = None
    version: int = 1
    step: str | None = None
    """Which part of its run: a run has one exec for each, whoever drives it."""
    driver: str | None = None
    watched_until: int = 0


@dataclass(frozen=True)
class WorkerRecord:
    """A process that drives runs, execs and commands. Alive until `alive_until` by the store's clock; what a dead one drove is free."""

    worker_id: str
    started_at: int
    alive_until: int
    facts: Json = field(default_factory=dict)


@dataclass(frozen=True)
class CommandRecord:
    """An effect to be done (outbox). Written with its transition; done at most once per `command_id`."""

    command_id: str
    sandbox_id: str
    incarnation: int
    token: int
    kind: str
    args: Json = field(default_factory=dict)
    attempt: int = 0
    claimed_by: str | None = None
    claim_until: int | None = None
    done_at: int | None = None
    outcome: Json | None = None


@dataclass(frozen=True)
class EventRecord:
    """One transition or observation; `event_id` is issued by the store, rising."""

    sandbox_id: str
    event_type: str
    old_state: str | None
    new_state: str | None
    metadata: Json = field(default_factory=dict)
    request_id: str | None = None
    event_id: int = 0
    timestamp: int = 0


@dataclass(frozen=True)
class AuditRecord:
    """Who did what and why; `kind` is dotted (`run.submitted`, `guard.denied`). `audit_id` and `timestamp` are the store's."""

    tenant_id: str
    actor: str
    kind: str
    subject: str
    data: Json = field(default_factory=dict)
    audit_id: int = 0
    timestamp: int = 0


@dataclass(frozen=True)
class Idempotency:
    """(tenant, route, key) with the digest of the body; another digest under the same key is `idempotency_conflict`."""

    tenant_id: str
    route: str
    key: str
    body_digest: str


@dataclass(frozen=True)
class LeaseChange:
    """Part of a transition: `take` (owner changes, T+), or `extend` (same owner), or `drop` (owner None, T+)."""

    kind: str
    owner: str | None = None
    ttl_ms: int = 0
    if_expired: bool = False
    """`conflict` unless it has expired by the store's clock: whoever reads is never sure of that."""
    if_held: bool = False
    """`lease_lost` if it has."""
    request_digest: str | None = None
    """For `take`: see `LeaseRecord`."""


@dataclass(frozen=True)
class InstanceChange:
    """Part of a transition: `insert` a record, or move `instance_id` from one of `expect` to `state` (CAS), binding it on the way."""

    kind: str
    record: InstanceRecord | None = None
    instance_id: str | None = None
    expect: tuple[str, ...] = ()
    state: str | None = None
    ref: Json | None = None


@dataclass(frozen=True)
class CommandDone:
    """Part of a transaction: the sandbox's open commands of these kinds get their outcome from `worker`, whoever has locked them.

    `match` compares members of their arguments.
    """

    kinds: tuple[str, ...]
    worker: str
    outcome: Json
    match: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Transition:
    """One committed step of a sandbox: the CAS on `version`, and all that belongs in the same transaction.

    `changes` are columns of SandboxRecord to set (not state, version). `commands` are inserted open; one whose `claimed_by` is set
    is inserted locked for that worker. `end_execs`: when not None, every open exec of the sandbox gets this reason in the same
    transaction (`sandbox_deleted`, `sandbox_lost`, ...) as `cancel_requested`. `done`: outcomes of earlier commands, given first.
    """

    sandbox_id: str
    expect_version: int
    new_state: str
    event: EventRecord
    changes: Json = field(default_factory=dict)
    lease: LeaseChange | None = None
    expect_fence: Fence | None = None
    instances: tuple[InstanceChange, ...] = ()
    commands: tuple[CommandRecord, ...] = ()
    end_execs: str | None = None
    audit: AuditRecord | None = None
    done: tuple[CommandDone, ...] = ()
    settled: bool = False
    """What the sandbox holds has changed hands cleanly: `environment_version` + 1."""


@dataclass(frozen=True)
class Committed:
    """What a transition left."""

    sandbox: SandboxRecord
    lease: LeaseRecord
    event_id: int


@dataclass(frozen=True)
class SandboxView:
    """A sandbox with what belongs to it, read in one snapshot."""

    sandbox: SandboxRecord
    lease: LeaseRecord | None
    instance: InstanceRecord | None
    """The bound instance, else the newest one of this sandbox that is not `gone`."""
