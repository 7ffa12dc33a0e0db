"""The lifecycle manager: every transition of a sandbox is decided by `domain.sandbox`, committed with its command rows, then acted on.

`provide` and `destroy` are driven by the stored state, so that both go on where an earlier process stopped. Effects are idempotent
at the node; a command row is finished with the outcome of its effect. Nobody else changes a sandbox's state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from corral import faults
from corral.domain.facts import ExecFacts
from corral.domain.fence import Fence
from corral.domain.instance import LIVE
from corral.domain.lease import system_owner
from corral.domain.limits import LimitModes, Limits
from corral.domain.placement import PlacementChoice, RuntimeFacts, choose
from corral.domain.records import (
    AuditRecord,
    CommandRecord,
    EventRecord,
    ExecRecord,
    Idempotency,
    InstanceChange,
    InstanceRecord,
    LeaseChange,
    SandboxRecord,
    SandboxView,
    Transition,
)
from corral.domain.request import Placement
from corral.domain.sandbox import Step, decide
from corral.errors import CorralError
from corral.ports.node import CreateInstance
from corral.services.control import Core
from corral.services.documents import read_limits, stored_limits
from corral.services.execs import Execs, Outcome, fence_of

Json = dict[str, Any]
EFFECTS = frozenset(
    ("create_instance", "fence", "fence_adopt", "start_exec", "kill_exec", "condemn_instance", "destroy")
)
"""Commands that do something in this version; the rest of the table's commands belong to components that later steps bring."""
SYSTEM_TTL_MS = 3_600_000
ATTEMPTS = 2
RETRIES = 8
ENDING = ("sanitizing", "terminated", "lost")
DESTROY_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)
MARGIN_S = 60.0
"""How much later than its TTL an instance ends itself, if nobody does."""


@dataclass(frozen=True)
class Wanted:
    """A sandbox that is to be provided, and who leases it."""

    sandbox_id: str
    tenant_id: str
    owner: str
    runtime: str
    security_level: int
    template: str
    template_digest: str
    resource_class: str
    limits: Limits
    modes: LimitModes
    ttl_s: float
    one_shot: bool

    @property
    def ttl_ms(self) -> int:
        return max(1, round(self.ttl_s * 1000))


class Lifecycle:
    """See the module docstring."""

    def __init__(self, core: Core, execs: Execs) -> None:
        self._core = core
        self._execs = execs
        self._providing: dict[str, asyncio.Task[SandboxView]] = {}
        self._destroying: dict[str, asyncio.Task[SandboxView]] = {}

    # -- transitions -----------------------------------------------------------------------------------------------------------
    async def view(self, sandbox_id: str, tenant_id: str | None = None) -> SandboxView:
        """The sandbox; `not_found` for an unknown id or a foreign tenant's."""
        view = await self._core.store.get_sandbox(sandbox_id, tenant_id)
        if view is None:
            raise CorralError("not_found", f"there is no sandbox {sandbox_id[:64]}")
        return view

    async def fire(
        self,
        view: SandboxView,
        event: str,
        flags: Collection[str] = (),
        *,
        owner: str | None = None,
        ttl_ms: int = 0,
        cause: str = "lifecycle",
        changes: Json | None = None,
        insert: InstanceRecord | None = None,
        ref: Json | None = None,
        metadata: Json | None = None,
        audit: AuditRecord | None = None,
        args: Json | None = None,
    ) -> SandboxView:
        """Commit one transition over `view`; `conflict` when the sandbox moved on, `illegal_transition` outside the table."""
        row = view.sandbox
        step = decide(row.state, event, flags, remembered=row.remembered_state)
        if not (step.changes_state or step.commands or step.lease or insert or changes):
            return view
        transition, instance = self._transition(view, step, owner, ttl_ms, cause, dict(changes or {}), insert, ref)
        commands = self._commands(view, transition, step, args or {})
        event_row = EventRecord(
            row.sandbox_id, event, row.state, step.next_state, {"row": step.row, **(metadata or {})}
        )
        faults.point("transition.before")
        done = await self._core.store.commit_transition(
            replace(transition, event=event_row, commands=commands, audit=audit)
        )
        faults.point("transition.after")
        self._core.wakes.ring(row.sandbox_id)
        return SandboxView(done.sandbox, done.lease, instance)

    def _transition(
        self,
        view: SandboxView,
        step: Step,
        owner: str | None,
        ttl_ms: int,
        cause: str,
        changes: Json,
        insert: InstanceRecord | None,
        ref: Json | None,
    ) -> tuple[Transition, InstanceRecord | None]:
        row, instance = view.sandbox, view.instance
        changes.setdefault("last_active_at", self._core.now_ms())
        if step.remembered != row.remembered_state:
            changes["remembered_state"] = step.remembered
        if step.failure is not None:
            changes["failure"] = step.failure
        if step.taint is not None:
            changes["tainted"] = True
        lease = None
        if step.lease == "take":
            lease = LeaseChange("take", owner, ttl_ms)
        elif step.lease == "take_system":
            lease = LeaseChange("take", system_owner(cause), SYSTEM_TTL_MS)
        elif step.lease == "extend":
            lease = LeaseChange("extend", owner, ttl_ms)
        moves: list[InstanceChange] = []
        if insert is not None:
            moves.append(InstanceChange("insert", record=insert))
            instance = insert
        if step.condemn and instance is not None and instance.state in LIVE:
            moves.append(
                InstanceChange("move", instance_id=instance.instance_id, expect=LIVE, state="condemned", ref=ref)
            )
            instance = replace(instance, state="condemned")
        if step.bind and instance is not None:
            moves.append(
                InstanceChange(
                    "move", instance_id=instance.instance_id, expect=("warming", "warm"), state="bound", ref=ref
                )
            )
            instance = replace(instance, state="bound", ref=ref)
        transition = Transition(
            sandbox_id=row.sandbox_id,
            expect_version=row.version,
            new_state=step.next_state,
            event=EventRecord(row.sandbox_id, step.event, row.state, step.next_state),
            changes=changes,
            lease=lease,
            instances=tuple(moves),
            end_execs=step.end_execs,
        )
        return transition, instance

    def _commands(self, view: SandboxView, transition: Transition, step: Step, args: Json) -> tuple[CommandRecord, ...]:
        token = fence_of(view).token + (1 if transition.lease is not None and transition.lease.kind != "extend" else 0)
        incarnation = int(transition.changes.get("incarnation", view.sandbox.incarnation))
        return tuple(
            CommandRecord(
                command_id=self._core.id("cmd"),
                sandbox_id=view.sandbox.sandbox_id,
                incarnation=incarnation,
                token=token,
                kind=kind,
                args=args,
                claimed_by=self._core.worker,
            )
            for kind in step.commands
            if kind in EFFECTS
        )

    async def done(self, sandbox_id: str, kinds: Collection[str], outcome: Json, **match: Any) -> None:
        """Give open commands of these kinds their outcome; `match` compares members of their arguments."""
        for command in await self._core.store.open_commands(sandbox_id):
            if command.kind in kinds and all(command.args.get(name) == value for name, value in match.items()):
                await self._core.store.finish_command(command.command_id, self._core.worker, outcome)

    async def retrying(self, sandbox_id: str, attempt: Callable[[SandboxView], Awaitable[SandboxView]]) -> SandboxView:
        """`attempt` over a fresh view until no other transition came in between."""
        for _ in range(RETRIES):
            try:
                return await attempt(await self.view(sandbox_id))
            except CorralError as error:
                if error.code != "conflict":
                    raise
        raise CorralError("conflict", f"the sandbox {sandbox_id} changes all the time")

    # -- placement -------------------------------------------------------------------------------------------------------------
    async def choose(self, placement: Placement, floor: int, enforced: Collection[str]) -> PlacementChoice:
        """Which runtime; raises what makes the wish impossible here."""
        facts = [
            RuntimeFacts(i.name, i.usable, i.reason, i.security_level, i.start_ms, i.limits)
            for i in await self._core.node.runtimes()
        ]
        return choose(facts, placement.runtime, placement.isolation, floor, enforced)

    # -- creation --------------------------------------------------------------------------------------------------------------
    async def record(self, wanted: Wanted, idempotency: Idempotency | None = None) -> SandboxRecord:
        """The sandbox's row, made once per idempotency key."""
        core = self._core
        now = core.now_ms()
        sandbox = SandboxRecord(
            sandbox_id=wanted.sandbox_id,
            tenant_id=wanted.tenant_id,
            state="requested",
            runtime=wanted.runtime,
            template_id=wanted.template,
            template_digest=wanted.template_digest,
            resource_class=wanted.resource_class,
            limits=stored_limits(wanted.limits, wanted.modes),
            created_at=now,
            last_active_at=now,
            expires_at=now + wanted.ttl_ms,
            one_shot=wanted.one_shot,
            labels={"owner": wanted.owner, "security_level": wanted.security_level},
        )
        event = EventRecord(wanted.sandbox_id, "create", None, "requested", {"row": "1"})
        audit = AuditRecord(wanted.tenant_id, wanted.owner, "sandbox.created", wanted.sandbox_id, {})
        made, _ = await core.store.create_sandbox(sandbox, event, audit, idempotency)
        return made

    async def provide(self, wanted: Wanted) -> SandboxView:
        """The sandbox leased to its owner, from whatever state it is in; joins a call that is under way."""
        task = self._providing.get(wanted.sandbox_id)
        if task is None:
            task = self._core.spawn(self._provide(wanted), f"{wanted.sandbox_id} provide")
            self._providing[wanted.sandbox_id] = task
            task.add_done_callback(lambda _: self._providing.pop(wanted.sandbox_id, None))
        return await asyncio.shield(task)

    def wanted_of(self, view: SandboxView) -> Wanted:
        """What a stored row asks for."""
        row = view.sandbox
        limits, modes = read_limits(row.limits)
        return Wanted(
            sandbox_id=row.sandbox_id,
            tenant_id=row.tenant_id,
            owner=str(row.labels.get("owner", "key:local")),
            runtime=row.runtime,
            security_level=int(row.labels.get("security_level", 0)),
            template=row.template_id,
            template_digest=row.template_digest,
            resource_class=row.resource_class,
            limits=limits,
            modes=modes,
            ttl_s=max(1.0, (row.expires_at - row.created_at) / 1000),
            one_shot=row.one_shot,
        )

    async def _provide(self, wanted: Wanted) -> SandboxView:
        if await self._core.store.get_sandbox(wanted.sandbox_id, None) is None:
            await self.record(wanted)
        view = await self.view(wanted.sandbox_id)
        while True:
            try:
                match view.sandbox.state:
                    case "requested":
                        view = await self.fire(view, "planning_started")
                    case "planning":
                        view = await self.fire(view, "planned")
                    case "allocating":
                        view = await self._begin_instance(view, wanted)
                    case "provisioning":
                        view = await self._create(view, wanted)
                    case "locking":
                        view = await self._lock(view)
                    case "ready":
                        view = await self.fire(view, "acquire", ["creator"], owner=wanted.owner, ttl_ms=wanted.ttl_ms)
                    case "leased" | "running":
                        return view
                    case "failed":
                        why = view.sandbox.conditions.get("failed") or "the sandbox could not be made"
                        # Not awaited: the destruction waits for this very task to end.
                        self._core.spawn(self.destroy(wanted.sandbox_id, "failed"), "failed", last=True)
                        raise CorralError("infra_error", str(why))
                    case _:
                        raise gone(view)
            except CorralError as error:
                if error.code != "conflict":
                    raise
                view = await self.view(wanted.sandbox_id)

    async def _begin_instance(self, view: SandboxView, wanted: Wanted) -> SandboxView:
        core, incarnation = self._core, view.sandbox.incarnation + 1
        instance = InstanceRecord(
            instance_id=core.id("ins"),
            node_id=core.node.node_id,
            runtime=wanted.runtime,
            template_digest=wanted.template_digest,
            resource_class=wanted.resource_class,
            security_level=wanted.security_level,
            state="warming",
            sandbox_id=wanted.sandbox_id,
            incarnation=incarnation,
            born_at=core.now_ms(),
        )
        return await self.fire(
            view,
            "miss",
            changes={"incarnation": incarnation},
            insert=instance,
            args={"instance_id": instance.instance_id},
        )

    async def _create(self, view: SandboxView, wanted: Wanted) -> SandboxView:
        core, row, instance = self._core, view.sandbox, view.instance
        assert instance is not None
        request = CreateInstance(
            instance_id=instance.instance_id,
            sandbox_id=row.sandbox_id,
            incarnation=row.incarnation,
            fence=fence_of(view),
            runtime=wanted.runtime,
            template=wanted.template,
            limits=wanted.limits,
            deadline_s=wanted.ttl_s + MARGIN_S,
            unsafe=core.unsafe,
        )
        try:
            faults.point("instance.create.before")
            report = await core.node.create(request, core.progress)
            faults.point("instance.create.after")
        except CorralError as error:
            return await self._create_failed(view, instance, error)
        await self.done(row.sandbox_id, ("create_instance",), {"ok": True, "phases": report.phases})
        return await self.fire(
            view,
            "provisioned",
            owner=wanted.owner,
            ttl_ms=wanted.ttl_ms,
            ref=report.ref,
            metadata={"phases": report.phases},
        )

    async def _create_failed(self, view: SandboxView, instance: InstanceRecord, error: CorralError) -> SandboxView:
        self._core.log(f"{instance.instance_id}: {error}")
        flags = ["attempts_left"] if view.sandbox.incarnation < ATTEMPTS else []
        if error.retryable:
            flags.append("retryable")
        said = f"{error.detail}; {error.hint}" if error.hint else error.detail
        outcome = {"ok": False, "code": error.code, "detail": said}
        await self.done(view.sandbox.sandbox_id, ("create_instance",), outcome)
        conditions = {**view.sandbox.conditions, "failed": said}
        view = await self.fire(view, "provision_failed", flags, changes={"conditions": conditions}, metadata=outcome)
        await self.remove_instance(instance.instance_id, "provision_failed")
        await self.done(view.sandbox.sandbox_id, ("condemn_instance",), {"ok": True})
        return view

    async def _lock(self, view: SandboxView) -> SandboxView:
        instance = view.instance
        assert instance is not None
        sandbox_id = view.sandbox.sandbox_id
        try:
            await self._core.node.fence(instance.instance_id, fence_of(view), "kill")
        except CorralError as error:
            flags = ["attempts_left"] if view.sandbox.incarnation < ATTEMPTS else []
            await self.done(sandbox_id, ("fence",), {"ok": False, "code": error.code, "detail": error.detail})
            conditions = {**view.sandbox.conditions, "failed": error.detail}
            view = await self.fire(view, "fence_failed", flags, changes={"conditions": conditions})
            await self.remove_instance(instance.instance_id, "fence_failed")
            await self.done(sandbox_id, ("condemn_instance",), {"ok": True})
            return view
        await self.done(sandbox_id, ("fence",), {"ok": True})
        view = await self.fire(view, "fenced")
        return await self.fire(view, "bound")

    # -- execs -----------------------------------------------------------------------------------------------------------------
    async def exec_requested(
        self, record: ExecRecord, fence: Fence, idempotency: Idempotency | None = None, tenant_id: str = "default"
    ) -> ExecRecord:
        """The exec's row as `starting`, and its sandbox `running`. An exec that an earlier call made under the key is returned."""
        store = self._core.store
        try:
            made, fresh = await store.create_exec(record, fence, idempotency=idempotency, tenant_id=tenant_id)
        except CorralError as error:
            if error.code != "lease_lost":
                raise
            view = await self.view(record.sandbox_id)
            if view.sandbox.state in ENDING:
                raise gone(view) from error
            raise
        if not fresh:
            return made
        try:
            await self.running(made)
        except CorralError as error:
            if error.code != "illegal_transition":
                raise
            changes = {"state": "never_started", "ended_at": self._core.now_ms()}
            await store.update_exec(made.exec_id, expect_states=("starting",), changes=changes)
            raise gone(await self.view(record.sandbox_id)) from error
        return made

    async def running(self, record: ExecRecord) -> SandboxView:
        """The sandbox is `running` for this exec; safe to repeat after a restart."""

        async def attempt(view: SandboxView) -> SandboxView:
            return await self.fire(
                view, "exec_requested", args={"exec_id": record.exec_id}, metadata={"exec_id": record.exec_id}
            )

        return await self.retrying(record.sandbox_id, attempt)

    async def exec_ended(self, record: ExecRecord, outcome: Outcome, result: Json) -> ExecRecord:
        """Store the result of an exec, then what follows for its sandbox."""
        core = self._core
        state = _final(outcome.facts, outcome.verdict.started)
        try:
            record = await core.store.update_exec(
                record.exec_id,
                expect_states=("starting", "running"),
                changes={"state": state, "result": result, "ended_at": core.now_ms()},
            )
        except CorralError as error:
            if error.code != "conflict":
                raise
        reason = outcome.verdict.reason
        await self.done(record.sandbox_id, ("start_exec",), {"ok": True, "reason": reason}, exec_id=record.exec_id)

        async def attempt(view: SandboxView) -> SandboxView:
            if view.sandbox.state != "running":
                return view
            if not outcome.facts.killed_all:
                return await self.fire(view, "kill_failed")
            others = await core.store.open_execs(record.sandbox_id)
            metadata = {"exec_id": record.exec_id, "reason": reason}
            return await self.fire(view, "exec_ended", ["others_run"] if others else [], metadata=metadata)

        view = await self.retrying(record.sandbox_id, attempt)
        core.wakes.ring(record.exec_id)  # whoever is told of the end sees the sandbox as it is after it
        if view.sandbox.state == "sanitizing" and not outcome.facts.killed_all:
            core.spawn(self.destroy(record.sandbox_id, "unkillable"), f"{record.sandbox_id} unkillable", last=True)
        if outcome.facts.guest_lost and not outcome.facts.sandbox_lost and outcome.facts.ended_by is None:
            core.spawn(self.lost(record.sandbox_id, "guest_lost"), f"{record.sandbox_id} guest lost", last=True)
        return record

    # -- the end ---------------------------------------------------------------------------------------------------------------
    async def lost(self, sandbox_id: str, why: str) -> SandboxView:
        """G3: the instance is gone by the node's own word; execs end `sandbox_lost`, then what is left is removed."""

        async def attempt(view: SandboxView) -> SandboxView:
            match view.sandbox.state:
                case "sanitizing" | "terminated":
                    return view
                case "lost":
                    return await self.fire(view, "give_up", cause=why)
                case "requested" | "planning" | "allocating" | "provisioning" | "failed":
                    return await self.fire(view, "destroy", cause=why)
                case _:
                    lost = await self.fire(view, "instance_gone", cause=why, metadata={"evidence": why})
                    return await self.fire(lost, "give_up", cause=why)

        await self.retrying(sandbox_id, attempt)
        return await self.destroy(sandbox_id, why)

    async def destroy(
        self, sandbox_id: str, cause: str, audit: AuditRecord | None = None, event: str = "destroy"
    ) -> SandboxView:
        """End the sandbox whatever it does; returns when nothing of it is left. Idempotent; joins a call that is under way."""
        task = self._destroying.get(sandbox_id)
        if task is None:
            work = self._destroy(sandbox_id, cause, audit, event)
            task = self._core.spawn(work, f"{sandbox_id} destroy", last=True)
            self._destroying[sandbox_id] = task
            task.add_done_callback(lambda _: self._destroying.pop(sandbox_id, None))
        return await asyncio.shield(task)

    async def _destroy(self, sandbox_id: str, cause: str, audit: AuditRecord | None, event: str) -> SandboxView:
        async def attempt(view: SandboxView) -> SandboxView:
            return await self.fire(view, event, cause=cause, metadata={"cause": cause}, audit=audit)

        view = await self.retrying(sandbox_id, attempt)
        if view.sandbox.state == "terminated":
            return view
        for record in await self._core.store.open_execs(sandbox_id):
            self._execs.request_end(record.exec_id)
        if (making := self._providing.get(sandbox_id)) is not None:
            await asyncio.wait({making})  # an instance that is half made is removed when its maker has stopped
        for pause_s in (*DESTROY_PAUSES_S, None):
            view = await self.view(sandbox_id)
            if view.sandbox.state == "terminated":
                return view
            if view.instance is None or await self.remove_instance(view.instance.instance_id, cause):
                outcome = {"ok": True, "cause": cause}
                await self.done(sandbox_id, EFFECTS, outcome)
                view = await self.retrying(sandbox_id, self._sanitized)
                break
            await self.retrying(sandbox_id, lambda v: self.fire(v, "step_failed"))
            if pause_s is not None:
                await asyncio.sleep(pause_s)
        return view

    async def _sanitized(self, view: SandboxView) -> SandboxView:
        if view.sandbox.state == "terminated":
            return view
        changes = {"failure": view.sandbox.failure or "deleted"}
        return await self.fire(view, "sanitized", ["evidence_ok"], changes=changes)

    async def remove_instance(self, instance_id: str, reason: str) -> bool:
        """Destroy a condemned instance; True when the host shows that nothing is left."""
        try:
            faults.point("instance.destroy.before")
            evidence = await self._core.node.destroy(instance_id, reason)
        except CorralError as error:
            self._core.log(f"destroy {instance_id}: {error}")
            return False
        if not evidence.clean:
            self._core.log(f"destroy {instance_id}: left {', '.join(evidence.left)}")
            return False
        try:
            await self._core.store.update_instance(instance_id, expect_states=("condemned",), state="gone")
        except CorralError as error:
            if error.code not in ("conflict", "not_found"):
                raise
        return True


def gone(view: SandboxView) -> CorralError:
    """Why a sandbox that is ending or has ended cannot be used."""
    row = view.sandbox
    lost = row.state == "lost" or row.failure == "sandbox_lost"
    return CorralError(
        "sandbox_lost" if lost else "sandbox_deleted",
        f"the sandbox {row.sandbox_id} " + ("is lost" if lost else "was deleted"),
        hint="create a new one",
    )


def _final(facts: ExecFacts, started: bool | None) -> str:
    if started is False:
        return "never_started"
    unknown = facts.exit_code is None and facts.signal is None
    return "lost" if unknown and (facts.sandbox_lost or facts.guest_lost or facts.infra) else "ended"
