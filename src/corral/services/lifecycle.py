"""The lifecycle manager: what the transitions of a sandbox ask for is done, from its making over its execs to its end.

`provide` and `destroy` are driven by the stored state, so that both go on where an earlier process stopped. Effects are idempotent
at the node; a command row is finished with the outcome of its effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from corral import faults
from corral.domain.facts import ExecFacts
from corral.domain.fence import Fence
from corral.domain.grade import ANY_GRADE
from corral.domain.instance import LIVE
from corral.domain.lease import REGRESSED, is_system
from corral.domain.limits import LimitModes, Limits
from corral.domain.quota import sandbox_amounts
from corral.domain.records import (
    AuditRecord,
    EventRecord,
    ExecRecord,
    Idempotency,
    InstanceRecord,
    LeaseRecord,
    SandboxRecord,
    SandboxView,
)
from corral.errors import CorralError
from corral.ports.node import CreateInstance
from corral.ports.queue import Charge
from corral.services.control import Core
from corral.services.documents import read_limits, stored_limits
from corral.services.execs import Execs, Outcome, fence_of
from corral.services.transitions import EFFECTS, ENDING, RETRIES, STANDING, Plan, Transitions, gone, paused, restless

Json = dict[str, Any]
ATTEMPTS = 2
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
    idle_timeout_s: float | None = None
    """How long it may be without activity; None = for ever."""
    seccomp: str = "default"
    """Profile of system calls."""
    user_id: str | None = None
    """Whose key asked for it."""

    @property
    def ttl_ms(self) -> int:
        return max(1, round(self.ttl_s * 1000))


class Lifecycle(Transitions):
    """See the module docstring."""

    def __init__(self, core: Core, execs: Execs) -> None:
        super().__init__(core, execs)
        self._providing: dict[str, asyncio.Task[SandboxView]] = {}
        self._made: dict[str, str | None] = {}
        """Sandboxes whose row a `provide` has seen that goes on, or ended since the store did not answer -> the instance by then."""
        self._destroying: dict[str, tuple[asyncio.Task[SandboxView], asyncio.Event]] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.on_recycling: Callable[[str], None] = lambda sandbox_id: None
        """Called when the end of an exec has let a sandbox come to be recycled: `services.settling` settles it."""

    def _turn(self, sandbox_id: str) -> asyncio.Lock:
        """Execs of one sandbox begin and end one after another here, or many at once would only conflict with each other."""
        lock = self._turns.get(sandbox_id)
        if lock is None:
            lock = self._turns[sandbox_id] = asyncio.Lock()
        return lock

    # -- creation --------------------------------------------------------------------------------------------------------------
    async def begin(self, wanted: Wanted, idempotency: Idempotency | None = None) -> tuple[SandboxView, bool]:
        """The sandbox's row and its way to `provisioning`, made once per idempotency key; -> (view, whether by this call)."""
        core = self._core
        now = core.store_ms()
        sandbox = SandboxRecord(
            sandbox_id=wanted.sandbox_id,
            tenant_id=wanted.tenant_id,
            user_id=wanted.user_id,
            state="requested",
            runtime=wanted.runtime,
            template_id=wanted.template,
            template_digest=wanted.template_digest,
            resource_class=wanted.resource_class,
            limits=stored_limits(wanted.limits, wanted.modes),
            created_at=now,
            last_active_at=now,
            expires_at=now + wanted.ttl_ms,
            idle_timeout_ms=None if wanted.idle_timeout_s is None else max(1, round(wanted.idle_timeout_s * 1000)),
            one_shot=wanted.one_shot,
            labels={
                "owner": wanted.owner,
                "security_level": wanted.security_level,
                **({} if wanted.seccomp == "default" else {"seccomp": wanted.seccomp}),
            },
        )
        event = EventRecord(wanted.sandbox_id, "create", None, "requested", {"row": "1"})
        audit = AuditRecord(wanted.tenant_id, wanted.owner, "sandbox.created", wanted.sandbox_id, {})
        plan = Plan(SandboxView(sandbox, LeaseRecord(wanted.sandbox_id, None, 0, now, now, now), None))
        self.step(plan, "planning_started")
        self.step(plan, "planned")
        self._plan_instance(plan, wanted)
        faults.point("transition.before")
        charge = Charge(sandbox_amounts(wanted.limits), core.quota)
        made, fresh = await core.store.create_sandbox(sandbox, event, audit, idempotency, plan.transitions, charge)
        if not fresh:
            return await self.view(made.sandbox_id), False
        return replace(self._committed(plan, None), sandbox=made), True

    async def provide(self, wanted: Wanted, view: SandboxView | None = None) -> SandboxView:
        """The sandbox leased to its owner, from whatever state it is in; joins a call that is under way. `view`: as known now."""
        task = self._providing.get(wanted.sandbox_id)
        if task is None:
            task = self._core.spawn(self._provide(wanted, view), f"{wanted.sandbox_id} provide")
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
            user_id=row.user_id,
            owner=str(row.labels.get("owner", "key:local")),
            runtime=row.runtime,
            security_level=int(row.labels.get("security_level", 0)),
            template=row.template_id,
            template_digest=row.template_digest,
            resource_class=row.resource_class,
            limits=limits,
            modes=modes,
            ttl_s=max(1.0, (row.expires_at - row.created_at) / 1000),
            idle_timeout_s=None if row.idle_timeout_ms is None else row.idle_timeout_ms / 1000,
            one_shot=row.one_shot,
            seccomp=str(row.labels.get("seccomp", "default")),
        )

    async def _provide(self, wanted: Wanted, view: SandboxView | None) -> SandboxView:
        view = view or await self._core.store.get_sandbox(wanted.sandbox_id, None)
        if view is None and wanted.sandbox_id in self._made:  # a second row would get a second body
            raise await self._forgotten(wanted.sandbox_id)
        try:
            if view is None:
                view, _ = await self.begin(wanted)
            made = await self._bring(wanted, view)
        except CorralError as error:
            if error.code != "store_error":
                self._made.pop(wanted.sandbox_id, None)
            raise
        self._made.pop(wanted.sandbox_id, None)
        return made

    async def _forgotten(self, sandbox_id: str) -> CorralError:
        """The store was set back to before the sandbox's row: its half-made body goes, which nobody else will ever hear of."""
        if (instance_id := self._made.pop(sandbox_id, None)) is not None:
            await self._removed(instance_id, "forgotten")
        return CorralError("infra_error", "the database was restored to a copy that does not know the sandbox")

    async def _bring(self, wanted: Wanted, view: SandboxView) -> SandboxView:
        while True:
            self._made[wanted.sandbox_id] = view.instance.instance_id if view.instance is not None else None
            try:
                match view.sandbox.state:
                    case "requested":
                        view = await self.fire(view, "planning_started")
                    case "planning":
                        view = await self.fire(view, "planned")
                    case "allocating":
                        plan = Plan(view)
                        self._plan_instance(plan, wanted)
                        view = await self.commit(plan)
                    case "provisioning":
                        view = await self._create(view, wanted)
                    case "locking":
                        view = await self._lock(view, wanted)
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
                if error.code not in ("conflict", "not_found"):
                    raise
                seen = await self._core.store.get_sandbox(wanted.sandbox_id, None)
                if seen is None:
                    raise await self._forgotten(wanted.sandbox_id) from error
                if error.code == "not_found":
                    raise
                view = seen

    def _plan_instance(self, plan: Plan, wanted: Wanted) -> None:
        core, incarnation = self._core, plan.view.sandbox.incarnation + 1
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
        self.step(
            plan,
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
            seccomp=wanted.seccomp,
            unsafe=core.unsafe - {ANY_GRADE},
        )
        if wanted.seccomp != "default":
            core.log(f"{row.sandbox_id}: weaker by its template {wanted.template}: seccomp profile {wanted.seccomp}")
        try:
            faults.point("instance.create.before")
            report = await core.node.create(request, core.progress)
            faults.point("instance.create.after")
        except CorralError as error:
            if await self._behind(view, instance, error):
                raise CorralError("conflict", f"{row.sandbox_id} goes on above what the node has seen") from error
            return await self._create_failed(view, instance, error)
        plan = Plan(view)
        self.step(
            plan,
            "provisioned",
            owner=wanted.owner,
            ttl_ms=wanted.ttl_ms,
            ref=report.ref,
            metadata={"phases": report.phases},
            done=(self.finishing(("create_instance",), {"ok": True, "phases": report.phases}),),
        )
        try:
            return await self.commit(plan)
        except CorralError as error:
            if error.code == "conflict" and core.driver is not None:
                await self._unwanted(row.sandbox_id, instance.instance_id)
            raise

    async def _behind(self, view: SandboxView, instance: InstanceRecord, error: CorralError) -> bool:
        """The node has seen a higher fence than this row has: the store was set back, and takes it."""
        floor = error.facts.get("floor")
        if error.code != "lease_lost" or floor is None:
            return False
        evidence = {"node": instance.node_id, "instance": instance.instance_id}
        adopted = await self._core.store.adopt_floor(view.sandbox.sandbox_id, Fence.parse(str(floor)), evidence)
        return adopted is not None

    async def _unwanted(self, sandbox_id: str, instance_id: str) -> None:
        """An instance that was made while another worker moved the sandbox on: nobody else removes it, if it has become useless."""
        view = await self.view(sandbox_id)
        instance = view.instance
        if instance is None or instance.instance_id != instance_id or instance.state not in LIVE:
            await self._removed(instance_id, "unwanted")

    async def _create_failed(self, view: SandboxView, instance: InstanceRecord, error: CorralError) -> SandboxView:
        self._core.log(f"{instance.instance_id}: {error}")
        flags = ["attempts_left"] if view.sandbox.incarnation < ATTEMPTS else []
        if error.retryable:
            flags.append("retryable")
        said = self._core.told(error)
        outcome = {"ok": False, "code": error.code, "detail": said}
        await self.done(view.sandbox.sandbox_id, ("create_instance",), outcome)
        conditions = {**view.sandbox.conditions, "failed": said}
        view = await self.fire(view, "provision_failed", flags, changes={"conditions": conditions}, metadata=outcome)
        await self.remove_instance(instance.instance_id, "provision_failed")
        await self.done(view.sandbox.sandbox_id, ("condemn_instance",), {"ok": True})
        return view

    async def _lock(self, view: SandboxView, wanted: Wanted) -> SandboxView:
        instance = view.instance
        assert instance is not None
        sandbox_id = view.sandbox.sandbox_id
        try:
            await self._core.node.fence(instance.instance_id, fence_of(view), "kill")
        except CorralError as error:
            flags = ["attempts_left"] if view.sandbox.incarnation < ATTEMPTS else []
            await self.done(sandbox_id, ("fence",), {"ok": False, "code": error.code, "detail": error.detail})
            conditions = {**view.sandbox.conditions, "failed": self._core.told(error)}
            view = await self.fire(view, "fence_failed", flags, changes={"conditions": conditions})
            await self.remove_instance(instance.instance_id, "fence_failed")
            await self.done(sandbox_id, ("condemn_instance",), {"ok": True})
            return view
        plan = Plan(view)
        self.step(plan, "fenced", done=(self.finishing(("fence",), {"ok": True}),))
        self.step(plan, "bound")
        self.step(plan, "acquire", ["creator"], owner=wanted.owner, ttl_ms=wanted.ttl_ms)
        return await self.commit(plan)

    # -- execs -----------------------------------------------------------------------------------------------------------------
    async def exec_requested(
        self,
        record: ExecRecord,
        view: SandboxView,
        *,
        renew: tuple[str, int] | None = None,
        idempotency: Idempotency | None = None,
        tenant_id: str = "default",
        any_fence: bool = False,
        driver: str | None = None,
    ) -> tuple[ExecRecord, SandboxView | None]:
        """The exec's row as `starting`, its sandbox `running` and, with `renew` = (owner, ttl_ms), the lease: one transaction.

        An exec that an earlier call made under the key is returned, without a view. From here on its end may be requested.
        `any_fence`: the caller named none, so the sandbox's current one counts if `view` was older. `driver`: who must still drive the
        exec's run, else `superseded`. Safe to repeat with the same record.
        """
        about = {"exec_id": record.exec_id}

        async def attempt(view: SandboxView) -> tuple[ExecRecord, SandboxView | None]:
            plan = Plan(view)
            self.step(plan, "exec_requested", args=about, metadata=about)
            faults.point("transition.before")
            fence = Fence(record.incarnation, record.lease_version)
            made, done = await self._core.store.begin_exec(
                record,
                fence,
                plan.transitions[0],
                renew=renew,
                idempotency=idempotency,
                tenant_id=tenant_id,
                driver=driver,
            )
            if done is None:
                return made, None
            self._execs.expect(made)
            return made, self._committed(plan, done)

        async with self._turn(record.sandbox_id):
            for _ in range(RETRIES):
                try:
                    return await attempt(view)
                except CorralError as error:
                    if error.code not in ("conflict", "lease_lost", "illegal_transition"):
                        raise
                    if (made := await self._core.store.get_exec(record.exec_id, None)) is not None:
                        self._execs.expect(made)  # an attempt that seemed to have failed
                        return made, await self.view(record.sandbox_id)
                    view = await self.view(record.sandbox_id)
                    if view.sandbox.state in ENDING:
                        raise gone(view) from error
                    if view.sandbox.state in STANDING:
                        raise paused(view) from error
                    now = fence_of(view)
                    if any_fence and now != Fence(record.incarnation, record.lease_version):
                        record = replace(record, incarnation=now.incarnation, lease_version=now.token)
                    elif error.code != "conflict":
                        raise
        raise restless(record.sandbox_id)

    async def exec_ended(
        self, record: ExecRecord, outcome: Outcome, result: Json, view: SandboxView | None = None
    ) -> ExecRecord:
        """The result of an exec and what follows for its sandbox, in one transaction. `view`: the sandbox as last seen."""
        core, facts, reason = self._core, outcome.facts, outcome.verdict.reason
        changes = {"state": _final(facts, outcome.verdict.started), "result": result, "ended_at": core.now_ms()}
        if outcome.started_at is not None and outcome.verdict.started is not False:
            changes["started_at"] = outcome.started_at
        done = self.finishing(("start_exec",), {"ok": True, "reason": reason}, exec_id=record.exec_id)
        metadata = {"exec_id": record.exec_id, "reason": reason}
        async with self._turn(record.sandbox_id):
            for _ in range(RETRIES):
                view = view or await self.view(record.sandbox_id)
                last, others = Plan(view), Plan(view)
                if view.sandbox.state == "running":
                    if facts.killed_all:
                        owner = view.lease.lease_owner if view.lease is not None else None
                        flags = ["owner_system"] if is_system(owner) and owner != REGRESSED else []
                        self.step(last, "exec_ended", flags, metadata=metadata, cause="settled")
                        self.step(others, "exec_ended", ["others_run"], metadata=metadata)
                    else:
                        self.step(last, "kill_failed")
                        others = last
                elif view.sandbox.state in STANDING and view.sandbox.remembered_state == "running":
                    self.step(last, "exec_ended", metadata=metadata)
                    self.step(others, "exec_ended", ["others_run"], metadata=metadata)
                faults.point("transition.before")
                try:
                    record = await core.store.end_exec(
                        record.exec_id,
                        changes=changes,
                        done=[done],
                        last=last.transitions[0] if last.transitions else None,
                        others=others.transitions[0] if others.transitions else None,
                    )
                    self._committed(last, None)
                    if last.view.sandbox.state == "recycling":
                        self.on_recycling(record.sandbox_id)
                    break
                except CorralError as error:
                    if error.code != "conflict":
                        raise
                view = None
                row = await core.store.get_exec(record.exec_id, None)
                if row is None or row.state not in ("starting", "running"):
                    record = row or record  # it has had its end
                    break
            else:
                raise restless(record.sandbox_id)
        core.wakes.ring(record.exec_id, record)  # whoever is told of the end sees the sandbox as it is after it
        if not facts.killed_all:
            core.spawn(self.destroy(record.sandbox_id, "unkillable"), f"{record.sandbox_id} unkillable", last=True)
        if facts.guest_lost and not facts.sandbox_lost and facts.ended_by is None:
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
                case "resuming":
                    lost = await self.fire(view, "resume_failed", cause=why, metadata={"evidence": why})
                    return await self.fire(lost, "give_up", cause=why)
                case "pausing":
                    view = await self.fire(view, "pause_failed", cause=why)
                    lost = await self.fire(view, "instance_gone", cause=why, metadata={"evidence": why})
                    return await self.fire(lost, "give_up", cause=why)
                case _:
                    lost = await self.fire(view, "instance_gone", cause=why, metadata={"evidence": why})
                    return await self.fire(lost, "give_up", cause=why)

        await self.retrying(sandbox_id, attempt)
        return await self.destroy(sandbox_id, why)

    async def destroy(
        self,
        sandbox_id: str,
        cause: str,
        audit: AuditRecord | None = None,
        event: str = "destroy",
        wait_s: float | None = None,
    ) -> SandboxView:
        """End the sandbox whatever it does; returns when nothing of it is left, or as it is after `wait_s`.

        Never before its end is committed: whoever has the answer knows that it will not run again. Idempotent; joins a call that
        is under way.
        """
        if sandbox_id not in self._destroying:
            condemned = asyncio.Event()
            work = self._destroy(sandbox_id, cause, audit, event, condemned)
            task = self._core.spawn(work, f"{sandbox_id} destroy", last=True)
            task.add_done_callback(lambda _: self._destroying.pop(sandbox_id, None))
            task.add_done_callback(lambda _: condemned.set())  # also when it could not be committed
            self._destroying[sandbox_id] = (task, condemned)
        task, condemned = self._destroying[sandbox_id]
        await condemned.wait()
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        return task.result() if done else await self.view(sandbox_id)

    async def _destroy(
        self, sandbox_id: str, cause: str, audit: AuditRecord | None, event: str, condemned: asyncio.Event
    ) -> SandboxView:
        async def attempt(view: SandboxView) -> SandboxView:
            why: Json = {} if event != "ttl" or view.sandbox.failure else {"failure": "ttl"}
            return await self.fire(view, event, cause=cause, changes=why, metadata={"cause": cause}, audit=audit)

        view = await self.retrying(sandbox_id, attempt)
        condemned.set()
        known: SandboxView | None = view
        if (making := self._providing.get(sandbox_id)) is not None:
            if view.instance is not None:  # one that waits for its turn to be made need not have it any more
                await self._removed(view.instance.instance_id, cause)
            await asyncio.wait({making})  # an instance that is half made is removed when its maker has stopped
            known = None
        return await self._core.endure(lambda: self._remove(sandbox_id, cause, known))

    async def _remove(self, sandbox_id: str, cause: str, view: SandboxView | None) -> SandboxView:
        """What follows the committed end: the instance goes, then the sandbox is `terminated`. Safe to repeat."""
        for pause_s in (*DESTROY_PAUSES_S, None):
            view = view or await self.view(sandbox_id)
            if view.sandbox.state == "terminated":
                return view
            if view.instance is None or await self._removed(view.instance.instance_id, cause):
                return await self.retrying(sandbox_id, lambda seen: self._sanitized(seen, cause), view)
            view = await self.retrying(sandbox_id, lambda v: self.fire(v, "step_failed"), view)
            if pause_s is not None:
                await asyncio.sleep(pause_s)
                view = None
        assert view is not None
        return view

    async def _sanitized(self, view: SandboxView, cause: str) -> SandboxView:
        if view.sandbox.state == "terminated":
            return view
        plan = Plan(view)
        condemned = view.instance is not None and view.instance.state == "condemned"
        self.step(
            plan,
            "sanitized",
            ["evidence_ok"],
            changes={"failure": view.sandbox.failure or "deleted"},
            done=(self.finishing(EFFECTS, {"ok": True, "cause": cause}),),
            gone=view.instance.instance_id if view.instance is not None and condemned else None,
        )
        return await self.commit(plan)

    async def remove_instance(self, instance_id: str, reason: str) -> bool:
        """Destroy a condemned instance; True when the host shows that nothing is left."""
        if not await self._removed(instance_id, reason):
            return False
        try:
            await self._core.store.update_instance(instance_id, expect_states=("condemned",), state="gone")
        except CorralError as error:
            if error.code not in ("conflict", "not_found"):
                raise
        return True

    async def _removed(self, instance_id: str, reason: str) -> bool:
        try:
            faults.point("instance.destroy.before")
            evidence = await self._core.node.destroy(instance_id, reason)
        except CorralError as error:
            self._core.log(f"destroy {instance_id}: {error}")
            return False
        if not evidence.clean:
            self._core.log(f"destroy {instance_id}: left {', '.join(evidence.left)}")
        return evidence.clean


def _final(facts: ExecFacts, started: bool | None) -> str:
    if started is False:
        return "never_started"
    unknown = facts.exit_code is None and facts.signal is None
    return "lost" if unknown and (facts.sandbox_lost or facts.guest_lost or facts.infra) else "ended"
