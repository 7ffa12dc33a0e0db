"""Pause and resume of kept sandboxes: rows 28 to 30b of the table.

The state says what is under way and is committed first; the node then does it, and doing it again changes nothing. So whoever finds a
sandbox that nobody moves any more in `pausing` or `resuming` brings it on (`bring_on`). Callers who want the same join what is under way
and get its result; a delete wins against both. Time to live and leases go on while a sandbox is paused.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from corral import faults
from corral.domain.fence import Fence
from corral.domain.lease import BETWEEN, REGRESSED, expired, is_system, key_of
from corral.domain.lease import lost as lease_lost
from corral.domain.records import AuditRecord, SandboxView
from corral.errors import CorralError
from corral.ports.leases import Seen
from corral.services.control import Core
from corral.services.events import Caller
from corral.services.execs import fence_of, instance_of
from corral.services.leases import held_by_another
from corral.services.lifecycle import Lifecycle
from corral.services.transitions import ENDING, Plan, gone

Json = dict[str, Any]
Event = Literal["pause", "resume"]
PATIENCE_S = 120.0
"""How long a call waits for what is under way."""
LOOK_S = 1.0
UNDER_WAY: dict[Event, str] = {"pause": "pausing", "resume": "resuming"}
BEYOND_USE = ("sandbox_lost", "guest_lost", "not_found")


class Pausing:
    """See the module docstring."""

    def __init__(self, core: Core, lifecycle: Lifecycle) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._turning: dict[str, tuple[Event, asyncio.Task[SandboxView]]] = {}

    async def pause(self, caller: Caller, sandbox_id: str, lease: str | None = None) -> SandboxView:
        """Stop all that runs inside, with its memory as it is. A paused sandbox stays as it is; `not_supported_yet` where it cannot be."""
        return await self._turn(caller, sandbox_id, lease, "pause")

    async def resume(self, caller: Caller, sandbox_id: str, lease: str | None = None) -> SandboxView:
        """Go on where it was paused. One that is not paused stays as it is."""
        return await self._turn(caller, sandbox_id, lease, "resume")

    async def _turn(self, caller: Caller, sandbox_id: str, lease: str | None, event: Event) -> SandboxView:
        core = self._core
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        with core.wakes.listen(sandbox_id) as woken:
            while loop.time() < until:
                core.check_open()
                woken.look()
                view = await self._lifecycle.view(sandbox_id, caller.tenant_id)
                state = view.sandbox.state
                if state in ENDING:
                    raise gone(view)
                if view.sandbox.one_shot:
                    detail = f"the sandbox {sandbox_id} belongs to a run, which has a time limit"
                    hint = "sandboxes that were created, or kept, can be paused"
                    raise CorralError("illegal_transition", detail, hint=hint)
                check_holder(view, caller, lease)
                seen = None if lease is None else await core.store.see_sandbox(sandbox_id, caller.tenant_id)
                if seen is not None:
                    check_runs(seen)
                if state == "paused" if event == "pause" else state in ("leased", "running", "idle"):
                    return view
                if state in ("pausing", "resuming"):
                    if (under_way := self._turning.get(sandbox_id)) is None:
                        # Another worker's: what it failed in, or what was undone since, is tried here.
                        await woken.wait(LOOK_S)
                        continue
                    of_it, task = under_way
                    await asyncio.wait({task}, timeout=until - loop.time())
                    if of_it == event and task.done():
                        return await _result(task)
                    continue
                try:
                    task = await self._begin(view, caller, event)
                except CorralError as error:
                    if error.code != "conflict":
                        raise
                    continue
                return await _result(task)
        raise CorralError("conflict", f"the sandbox {sandbox_id} is {state}", hint="try again in a moment")

    async def _begin(self, view: SandboxView, caller: Caller, event: Event) -> asyncio.Task[SandboxView]:
        row = view.sandbox
        flags: list[str] = []
        if event == "pause":
            if row.state not in ("leased", "running", "idle"):
                raise CorralError(
                    "conflict", f"the sandbox {row.sandbox_id} is {row.state}", hint="try again in a moment"
                )
            await self._check_can(row.runtime)
            flags.append("can_pause")
        audit = AuditRecord(caller.tenant_id, caller.owner, f"sandbox.{event}", row.sandbox_id, {})
        faults.point(f"{event}.before")
        view = await self._lifecycle.fire(view, event, flags, cause=event, audit=audit)
        return self._spawn(view, event)

    async def _check_can(self, runtime: str | None) -> None:
        for info in await self._core.node.runtimes():
            if info.name == runtime and info.capabilities.get("pause", False):
                return
        hint = "corral doctor says which runtimes can"
        raise CorralError("not_supported_yet", f"the runtime {runtime} cannot pause here", hint=hint)

    # -- the work --------------------------------------------------------------------------------------------------------------
    def _spawn(self, view: SandboxView, event: Event) -> asyncio.Task[SandboxView]:
        """What the committed state asks for, beside whoever asked for it: a caller that goes away leaves nothing half done."""
        sandbox_id = view.sandbox.sandbox_id
        task: asyncio.Task[SandboxView] = self._core.spawn(self._work(view, event), f"{sandbox_id} {event}", last=True)
        self._turning[sandbox_id] = (event, task)
        task.add_done_callback(lambda ended: self._left(sandbox_id, ended))
        return task

    def _left(self, sandbox_id: str, ended: asyncio.Task[SandboxView]) -> None:
        if sandbox_id in self._turning and self._turning[sandbox_id][1] is ended:
            del self._turning[sandbox_id]

    async def bring_on(self, view: SandboxView) -> None:
        """Go on with one that is `pausing` or `resuming` and that nobody moves."""
        if view.sandbox.sandbox_id not in self._turning:
            await asyncio.shield(self._spawn(view, "pause" if view.sandbox.state == "pausing" else "resume"))

    async def _work(self, view: SandboxView, event: Event) -> SandboxView:
        core, sandbox_id = self._core, view.sandbox.sandbox_id
        act = core.node.pause if event == "pause" else core.node.resume
        failed: CorralError | None = None
        try:
            instance_id, fence = instance_of(view), fence_of(view)
            await core.reach(lambda: act(instance_id, fence))
            faults.point(f"{event}.done")
        except CorralError as error:
            if error.code in ("shutting_down", "node_unavailable"):
                raise  # the next worker asks again
            failed = error
        done = {"pause": ("paused", "pause_failed"), "resume": ("resumed", "resume_failed")}[event][failed is not None]
        after = await self._lifecycle.retrying(sandbox_id, lambda seen: self._report(seen, event, done, failed))
        if after.sandbox.state in ENDING and failed is None:
            raise gone(after)  # deleted meanwhile
        if failed is not None:
            if event == "resume" or failed.code in BEYOND_USE:
                core.spawn(self._lifecycle.lost(sandbox_id, f"{event}_failed"), f"{sandbox_id} lost", last=True)
            raise gone(after) if after.sandbox.state in ENDING else failed
        return after

    async def _report(self, view: SandboxView, event: Event, done: str, failed: CorralError | None) -> SandboxView:
        if view.sandbox.state != UNDER_WAY[event]:
            return view
        plan = Plan(view)
        core = self._core
        outcome: Json = (
            {"ok": True} if failed is None else {"ok": False, "code": failed.code, "detail": core.told(failed)}
        )
        self._lifecycle.step(
            plan,
            done,
            cause=event,
            metadata={} if failed is None else outcome,
            done=(self._lifecycle.finishing(("fence",), outcome),),
        )
        holder = plan.view.lease.lease_owner if plan.view.lease is not None else None
        if plan.view.sandbox.state == "leased" and is_system(holder) and holder != REGRESSED:
            # The last of what was kept for a released lease ended while it stood still: what row 27 does to one that runs.
            self._lifecycle.step(plan, "release", cause="settled")
        after = await self._lifecycle.commit(plan)
        if after.sandbox.state == "recycling":
            self._lifecycle.on_recycling(after.sandbox.sandbox_id)
        return after


def check_holder(view: SandboxView, caller: Caller, lease: str | None) -> None:
    """Who has the sandbox may do this, and anybody of its tenant to one that nobody has."""
    holder = view.lease.lease_owner if view.lease is not None else None
    if lease is not None:
        try:
            fence = Fence.parse(lease)
        except ValueError as error:
            detail = "Corral-Lease is not <incarnation>.<lease_version>"
            raise CorralError("invalid_value", detail, hint="as the lease's document gives it") from error
        if fence != fence_of(view) or holder is None or key_of(holder) != caller.owner:
            raise lease_lost(f"the lease {fence} is not the current one")
    elif holder is not None and not is_system(holder) and (key_of(holder) != caller.owner or BETWEEN in holder):
        assert view.lease is not None
        raise held_by_another(view.sandbox.sandbox_id, view.lease.expires_at, view.lease.heartbeat_at)


def check_runs(seen: Seen) -> None:
    """`lease_lost` once the lease has run out by the store's clock, whether or not that has been committed yet."""
    if seen.view.lease is not None and expired(seen.view.lease, seen.now_ms):
        raise lease_lost(f"the lease {fence_of(seen.view)} had expired")


async def _result(task: asyncio.Task[SandboxView]) -> SandboxView:
    """What the work came to; it may be dropped when the service stops, and then goes on at the next one."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        us = asyncio.current_task()
        if not task.cancelled() or (us is not None and us.cancelling()):
            raise
        raise CorralError("shutting_down", "the service is stopping") from None
