"""The transitions of sandboxes: each is decided by `domain.sandbox` and committed with its command rows, and nobody else changes a state.

What a command row asks for is done by `services.lifecycle` and others who fire the transitions; effects are none of this module's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any

from corral import faults
from corral.domain.fence import Fence
from corral.domain.instance import LIVE
from corral.domain.lease import SYSTEM_TTL_MS, named, system_owner
from corral.domain.records import (
    AuditRecord,
    CommandDone,
    CommandRecord,
    Committed,
    EventRecord,
    InstanceChange,
    InstanceRecord,
    LeaseChange,
    LeaseRecord,
    SandboxView,
    Transition,
)
from corral.domain.sandbox import Step, decide
from corral.errors import CorralError
from corral.services.control import Core
from corral.services.execs import Execs, fence_of
from corral.services.queue import QUEUE

Json = dict[str, Any]
EFFECTS = frozenset(
    ("create_instance", "fence", "fence_adopt", "start_exec", "kill_exec", "settle", "condemn_instance", "destroy")
)
"""Commands that do something in this version; the rest of the table's commands belong to components that later steps bring."""
RETRIES = 8
SEEN = 1024
ENDING = ("sanitizing", "terminated", "lost")
STANDING = ("pausing", "paused", "resuming")


class Plan:
    """Transitions of one sandbox that will be committed together, and the view that they lead to."""

    def __init__(self, view: SandboxView) -> None:
        self.view = view
        self.transitions: list[Transition] = []


class Transitions:
    """Views of sandboxes, and what is committed over them."""

    def __init__(self, core: Core, execs: Execs) -> None:
        self._core = core
        self._execs = execs
        self._seen: OrderedDict[str, SandboxView] = OrderedDict()
        """Views as last committed here, to decide over without a read: every commit compares the version again."""

    async def latest(self, sandbox_id: str, tenant_id: str) -> SandboxView:
        """`view`, perhaps as of an earlier moment: only to commit something over it."""
        seen = self._seen.get(sandbox_id)
        if seen is not None and seen.sandbox.tenant_id == tenant_id:
            return seen
        return await self.view(sandbox_id, tenant_id)

    async def view(self, sandbox_id: str, tenant_id: str | None = None) -> SandboxView:
        """The sandbox; `not_found` for an unknown id or a foreign tenant's."""
        view = await self._core.store.get_sandbox(sandbox_id, tenant_id)
        if view is None:
            raise CorralError(
                "not_found", f"there is no sandbox {sandbox_id[:64]}", hint="corral sandbox ls --all lists them"
            )
        self._see(view)
        return view

    def _see(self, view: SandboxView) -> None:
        sandbox_id = view.sandbox.sandbox_id
        self._seen.pop(sandbox_id, None)
        if view.sandbox.state in ("leased", "running"):
            self._seen[sandbox_id] = view
            if len(self._seen) > SEEN:
                self._seen.popitem(last=False)

    def forget(self) -> None:
        """The store was set back: versions that it gives again are not the ones that were seen here."""
        self._seen.clear()

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
        plan = Plan(view)
        self.step(
            plan,
            event,
            flags,
            owner=owner,
            ttl_ms=ttl_ms,
            cause=cause,
            changes=changes,
            insert=insert,
            ref=ref,
            metadata=metadata,
            audit=audit,
            args=args,
        )
        return await self.commit(plan)

    def step(
        self,
        plan: Plan,
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
        done: tuple[CommandDone, ...] = (),
        gone: str | None = None,
    ) -> None:
        """Add one transition to a plan. `done`: outcomes of earlier commands; `gone`: a condemned instance that is removed."""
        view = plan.view
        row = view.sandbox
        step = decide(row.state, event, flags, remembered=row.remembered_state)
        if not (step.changes_state or step.commands or step.lease or step.taint or insert or changes or done):
            return
        transition, instance = self._transition(view, step, owner, ttl_ms, cause, dict(changes or {}), insert, ref)
        if gone is not None:
            move = InstanceChange("move", instance_id=gone, expect=("condemned",), state="gone")
            transition = replace(transition, instances=(*transition.instances, move))
            instance = None
        transition = replace(
            transition,
            event=EventRecord(
                row.sandbox_id,
                event,
                row.state,
                step.next_state,
                {"row": step.row, **_hands(view, transition), **(metadata or {})},
            ),
            commands=self._commands(view, transition, step, args or {}),
            audit=audit,
            done=done,
        )
        sandbox = replace(row, **transition.changes, state=step.next_state, version=row.version + 1)
        lease = view.lease
        if transition.lease is not None and transition.lease.kind == "take":
            now, token = self._core.now_ms(), fence_of(view).token + 1
            lease = LeaseRecord(row.sandbox_id, transition.lease.owner, token, now, now, now + transition.lease.ttl_ms)
        plan.transitions.append(transition)
        plan.view = SandboxView(sandbox, lease, instance)

    async def commit(self, plan: Plan) -> SandboxView:
        """All of a plan in one transaction; -> the view after it."""
        if not plan.transitions:
            return plan.view
        faults.point("transition.before")
        done = await self._core.store.commit_transitions(plan.transitions)
        return self._committed(plan, done)

    def _committed(self, plan: Plan, done: Committed | None) -> SandboxView:
        faults.point("transition.after")
        if done is not None:
            self._core.saw_event(done.event_id)
        for transition in plan.transitions:
            if transition.end_execs is not None:
                self._execs.request_ends(transition.sandbox_id, transition.end_execs)
        self._core.wakes.ring(plan.view.sandbox.sandbox_id)
        if plan.view.sandbox.state in ("terminated", "hibernated"):
            self._core.wakes.heard(QUEUE)  # its room has come free
        view = plan.view if done is None else SandboxView(done.sandbox, done.lease, plan.view.instance)
        self._see(view)
        return view

    def finishing(self, kinds: Collection[str], outcome: Json, **match: Any) -> CommandDone:
        """For `step(done=…)`: commands of ours of these kinds have this outcome."""
        return CommandDone(tuple(kinds), self._core.worker, outcome, match)

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
        changes.setdefault("last_active_at", self._core.store_ms())
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

    async def done(self, sandbox_id: str, kinds: Collection[str], outcome: Json) -> None:
        """Give open commands of these kinds their outcome."""
        for command in await self._core.store.open_commands(sandbox_id):
            if command.kind in kinds:
                await self._core.store.finish_command(command.command_id, self._core.worker, outcome)

    async def retrying(
        self,
        sandbox_id: str,
        attempt: Callable[[SandboxView], Awaitable[SandboxView]],
        view: SandboxView | None = None,
    ) -> SandboxView:
        """`attempt` over `view`, then over fresh ones, until no other transition came in between."""
        for _ in range(RETRIES):
            try:
                return await attempt(view or await self.view(sandbox_id))
            except CorralError as error:
                if error.code != "conflict":
                    raise
                view = None
        raise restless(sandbox_id)


def _hands(view: SandboxView, transition: Transition) -> Json:
    """Whose the sandbox becomes, for its history: a lease is acquired or lost by an event, never silently."""
    change = transition.lease
    if change is None or change.kind != "take":
        return {}
    incarnation = int(transition.changes.get("incarnation", view.sandbox.incarnation))
    fence = Fence(incarnation, fence_of(view).token + 1)
    was = view.lease.lease_owner if view.lease is not None else None
    return {"owner": named(change.owner), "lease": str(fence), "was": named(was)}


def restless(sandbox_id: str) -> CorralError:
    """Why a transition was not committed, however often it was tried."""
    return CorralError("conflict", f"the sandbox {sandbox_id} changes all the time")


def paused(view: SandboxView) -> CorralError:
    """Why a sandbox that is paused, or nearly so, cannot be used."""
    row = view.sandbox
    return CorralError("sandbox_paused", f"the sandbox {row.sandbox_id} is {row.state}", hint="resume it first")


def gone(view: SandboxView) -> CorralError:
    """Why a sandbox that is ending or has ended cannot be used."""
    row = view.sandbox
    lost = row.state == "lost" or row.failure == "sandbox_lost"
    ended = {
        "ttl": "has reached the end of its ttl_s",
        "idle_timeout": "was not used for its idle_timeout_s and has ended",
    }
    return CorralError(
        "sandbox_lost" if lost else "sandbox_deleted",
        f"the sandbox {row.sandbox_id} " + ("is lost" if lost else ended.get(row.failure or "", "was deleted")),
        hint="create a new one",
    )
