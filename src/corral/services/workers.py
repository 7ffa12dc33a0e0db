"""What a worker does among others: tell that it is alive, take over what dead ones left, bring on what nobody moves.

Nothing here is needed for what goes well: whoever begins something ends it. Each step is safe beside the same step of another worker:
a run or exec has one driver by the store, a sandbox moves by compare-and-set, the node does an effect once. Where there is one worker
by construction (`Coordination.alone`) none of this runs; `Upkeep.take_over` does it all at the start.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from corral.domain.records import CommandRecord, ExecRecord, RunRecord, SandboxView
from corral.errors import CorralError
from corral.ports.workers import FORGET_MS
from corral.services.control import Core
from corral.services.execs import fence_of, instance_of
from corral.services.executor import Executor
from corral.services.lifecycle import Lifecycle
from corral.services.sandboxes import Sandboxes

Json = dict[str, Any]
MAKING = ("requested", "planning", "allocating", "provisioning", "locking", "ready")
ENDED = ("sanitizing", "failed", "lost")
HELD = ("leased", "running", "paused")
LEFT = "workers"
"""Rung by a worker that leaves: what it drove is free."""
GAP_S = 0.05
"""Between two beats, however much is heard."""
AT_ONCE = 20
"""Commands and sandboxes that one look brings on."""
COMMANDS = ("create_instance", "fence", "fence_adopt", "condemn_instance", "destroy")
"""Kinds of commands that any worker can do from the sandbox's stored state. Execs are their drivers'."""
SLOW: dict[str, float] = {"recycling": 4.0}
"""States in which a living worker may stay for so many times `stale_s`: a soft reset waits for programs to end."""
RESTORED = "the database was restored from an older copy"


class Workers:
    """See the module docstring."""

    def __init__(self, core: Core, lifecycle: Lifecycle, executor: Executor, sandboxes: Sandboxes) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._executor = executor
        self._sandboxes = sandboxes
        self._news = asyncio.Event()
        self._count = 0
        """Beats that are in the store."""
        self._last: tuple[float, int] | None = None
        """(monotonic seconds, the store's clock) of the last of them."""
        self._absent = False
        """Our row was not there, and what that means has not been judged yet."""
        self._older = False
        """The store was found to be older than our last beat, and the others have not been told yet."""
        self._regression_ms = 0
        """Of `Core.regressed_ms`, what has been dealt with."""
        self._joined = False
        self.on_regression: list[Callable[[], Awaitable[Any]]] = []
        """Called when the store turns out to be an older copy, before anything that it holds is gone on with."""
        self.movers: dict[str, Callable[[SandboxView], Awaitable[Any]]] = {}
        """More transitional states -> how a sandbox that nobody has moved for `stale_s` is brought on from there."""

    # -- life ------------------------------------------------------------------------------------------------------------------
    async def join(self) -> None:
        """Listen to the others, be alive in the store, take over what is free."""
        core = self._core
        await core.coordination.open(self._heard, self._missed)
        await core.endure(self.beat)
        self._joined = True
        await core.endure(self.adopt)

    def begin(self) -> None:
        """The loops."""
        self._core.keep_on(self._beats, "beats")
        self._core.keep_on(self._bring_on, "bring on")

    async def leave(self) -> None:
        """Others take over at once. Nothing depends on it."""
        core = self._core
        if self._joined:
            self._joined = False
            try:
                await core.store.leave(core.worker)
                core.coordination.ring([LEFT])
            except CorralError as error:
                core.log(f"leaving: {error}")
        await core.coordination.close()

    def _heard(self, key: str) -> None:
        self._core.wakes.heard(key)
        if key == LEFT or self._executor.drives(key) or self._sandboxes.drives(key):
            self._news.set()

    def _missed(self) -> None:
        self._core.wakes.ring_all()
        self._news.set()

    # -- beats and take-over ---------------------------------------------------------------------------------------------------
    async def _beats(self) -> None:
        core = self._core
        while True:
            away = core.doubtful
            try:
                await self.beat()
                if not away:  # else the others were away too, perhaps: let them say first that they are there
                    await self.adopt()
                core.store_works()
            except CorralError as error:
                if error.code == "store_error":
                    core.store_failed(error)
                else:
                    core.log(f"beat: {error}")
                    core.uncertain = True  # what was adopted just now may not be driven yet
            await asyncio.sleep(GAP_S)
            try:
                async with asyncio.timeout(core.delays["beat_s"]):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def beat(self) -> None:
        """One beat, and what it brings: ends that were asked for elsewhere of what this worker drives."""
        core = self._core
        self._news.clear()
        rows = await core.store.workers()
        # Our last beat is in the store, else it is older than this beat. The events alone would not tell: others write new ones.
        mine = next((row.facts.get("beat", 0) for row in rows if row.worker_id == core.worker), None)
        self._older = self._older or (mine is not None and mine < self._count)
        self._absent = self._absent or (mine is None and self._last is not None)
        newest = core.newest_event  # what was committed before the beat begins, which sees it
        at = asyncio.get_running_loop().time()
        ttl_ms = round(core.delays["worker_ttl_s"] * 1000)
        facts = {"pid": os.getpid(), "node_id": core.node.node_id, "beat": self._count + 1}
        beat = await core.store.beat(core.worker, ttl_ms, facts, core.watchers.watched, ttl_ms)
        core.beaten(at, beat)
        self._count += 1
        if self._absent and self._last is not None and not forgotten(at - self._last[0], beat.now_ms - self._last[1]):
            self._older = True
        self._absent, self._last = False, (at, beat.now_ms)
        self._older = self._older or beat.last_event_id < newest
        if self._older:
            core.log("the store is older than it was: it was restored from a copy")
            core.set_back()
            for hook in self.on_regression:
                await hook()
            self._older = False
            core.newest_event = beat.last_event_id
        core.saw_event(beat.last_event_id)
        if core.regressed_ms > self._regression_ms:
            at_ms = core.regressed_ms
            await self.regressed()
            self._regression_ms = at_ms
        for run_id, why in beat.runs.items():
            self._executor.asked_to_end(run_id, why)
        for exec_id, why in beat.execs.items():
            self._sandboxes.asked_to_end(exec_id, why)

    async def adopt(self) -> None:
        """Drive on what no living worker drives, and what names this one without its knowing."""
        core = self._core
        if core.draining or core.closing:
            return
        grace_s = core.delays["takeover_client_gone_s"]
        for run in await core.store.adopt_runs(core.worker):
            await self._drive(run, grace_s)
        for record in await core.store.adopt_execs(core.worker):
            self.drive_exec(record, grace_s)
        if core.uncertain:
            core.uncertain = False
            await self._find_own(grace_s)

    async def _drive(self, run: RunRecord, grace_s: float) -> None:
        if run.created_at > self._core.regressed_ms:
            self._executor.drive(run, grace_s)
        elif not self._executor.drives(run.run_id):
            await self._executor.give_up(run, RESTORED)

    def drive_exec(self, record: ExecRecord, grace_s: float) -> None:
        """Go on with an exec that somebody else had begun, or that was begun in a history that did not happen."""
        if record.created_at <= self._core.regressed_ms and record.state == "starting":
            record = replace(record, state="running")  # what became of it the node knows; it is not sent again
        self._sandboxes.drive(record, grace_s)

    async def _find_own(self, grace_s: float) -> None:
        """A call of ours failed although its commit had been done: then there is a row that waits for us."""
        core = self._core
        for run in await self._own_runs():
            await self._drive(run, grace_s)
        for record in await core.store.open_execs():
            if record.driver == core.worker and record.run_id is None:
                self.drive_exec(record, grace_s)

    async def _own_runs(self) -> list[RunRecord]:
        """Those of which the store says that they are driven here, and which are not. Few, so they are read one by one."""
        store, worker = self._core.store, self._core.worker
        found: list[RunRecord] = []
        for run_id, tenant_id in await store.driven_runs(worker):
            if not self._executor.drives(run_id):
                run = await store.get_run(run_id, tenant_id)
                if run is not None and run.state != "finished" and run.driver == worker:
                    found.append(run)
        return found

    async def regressed(self) -> None:
        """The store was set back: open runs in it may have been ended in what is lost. Those that fly here go on, the others end."""
        core = self._core
        for run in await self._own_runs():
            if run.created_at <= core.regressed_ms:
                await self._executor.give_up(run, RESTORED)
        for record in await core.store.open_execs():
            if record.driver == core.worker and record.run_id is None:
                self.drive_exec(record, core.delays["takeover_client_gone_s"])

    # -- commands, and the level below them ------------------------------------------------------------------------------------
    async def _bring_on(self) -> None:
        core = self._core
        looks = 0
        while True:
            await asyncio.sleep(core.delays["sweep_s"])
            if core.draining:
                continue
            try:
                await self.commands()
                if looks % 5 == 0:
                    await self.stale()
                if looks % 60 == 0:
                    await self.compare()
                looks += 1
            except CorralError as error:
                if error.code == "store_error":
                    core.store_failed(error)
                else:
                    core.log(f"bring on: {error}")

    async def commands(self) -> None:
        """Do the commands that nobody holds: from the sandbox's state now, which says whether they are still wanted."""
        core = self._core
        for _ in range(AT_ONCE):
            claim_ms = round(core.delays["claim_s"] * 1000)
            command = await core.store.lock_command(core.worker, claim_ms, kinds=COMMANDS)
            if command is None:
                return
            view = await core.store.get_sandbox(command.sandbox_id, None)
            outcome: Json | None
            if view is None:
                outcome = {"ok": False, "code": "not_found"}
            else:
                outcome = await self._obey(command, view)
            if outcome is not None:
                await core.store.finish_command(
                    command.command_id, core.worker, {**outcome, "attempt": command.attempt}
                )

    async def _obey(self, command: CommandRecord, view: SandboxView) -> Json | None:
        """None = not known yet: the transition that ends it brings the outcome, or the claim runs out and it is tried again."""
        core, row, kind, args = self._core, view.sandbox, command.kind, command.args
        if kind == "condemn_instance" and (instance_id := args.get("instance_id")) is not None:
            return {"ok": True} if await self._lifecycle.remove_instance(str(instance_id), "condemned") else None
        if row.state == "terminated":
            return {"ok": True, "cause": "terminated"}
        if row.state in ENDED:
            self._remove(view)
            return None
        if kind == "condemn_instance":
            removed = True
            for instance in await core.store.list_instances(core.node.node_id, states=("condemned",)):
                if instance.sandbox_id == row.sandbox_id:
                    removed &= await self._lifecycle.remove_instance(instance.instance_id, "condemned")
            return {"ok": True} if removed else None
        if kind in ("fence", "fence_adopt") and row.state in HELD and command.token == fence_of(view).token:
            return await self._fence(view)
        if row.state not in MAKING:
            return {"ok": True, "cause": "done before"}
        await self._make(view)
        return None

    async def _fence(self, view: SandboxView) -> Json | None:
        """Whoever took the lease may have ended before the node knew it; what runs by now may be the new holder's."""
        core = self._core
        try:
            await core.node.fence(instance_of(view), fence_of(view), "adopt")
        except CorralError as error:
            return None if error.retryable else {"ok": False, "code": error.code, "detail": error.detail}
        return {"ok": True}

    async def stale(self) -> None:
        """Bring on what is on its way from one state to another and has not been moved for a while; end what no run needs any more."""
        core = self._core
        before = core.store_ms() - round(core.delays["stale_s"] * 1000)
        for view in await core.store.stale_sandboxes((*MAKING, *ENDED, *self.movers), before, AT_ONCE):
            state = view.sandbox.state
            if state in ENDED:
                self._remove(view)
            elif state in MAKING:
                await self._make(view)
            elif core.store_ms() - view.sandbox.last_active_at < core.delays["stale_s"] * SLOW.get(state, 1.0) * 1000:
                continue
            elif (move := self.movers.get(state)) is not None:
                core.spawn(_quietly(move(view)), f"{view.sandbox.sandbox_id} {state}")
        for view in await core.store.abandoned_sandboxes(before, AT_ONCE):
            self._remove(view)

    async def _make(self, view: SandboxView) -> None:
        row = view.sandbox
        if row.one_shot:  # its run's driver makes it; without one nobody wants it
            run = await self._core.store.get_run(_run_of(view), row.tenant_id)
            if run is None or run.state == "finished":
                self._remove(view)
            return
        work = self._lifecycle.provide(self._lifecycle.wanted_of(view), view)
        self._core.spawn(_quietly(work), f"{row.sandbox_id} brought on")

    async def compare(self) -> None:
        """Sandboxes whose instance the node does not have (it has ended while nobody listened) are lost."""
        core = self._core
        known = await core.store.list_instances(core.node.node_id, states=("bound",))
        if not known:
            return
        here = set(await core.node.instances())  # after the store was asked: what is bound had been made before
        for instance in known:
            if instance.instance_id not in here and instance.sandbox_id is not None:
                work = self._lifecycle.lost(instance.sandbox_id, "instance_gone")
                core.spawn(_quietly(work), f"{instance.sandbox_id} lost", last=True)

    def _remove(self, view: SandboxView) -> None:
        row = view.sandbox
        end = self._lifecycle.lost if row.state in ENDED else self._lifecycle.destroy
        self._core.spawn(_quietly(end(row.sandbox_id, "interrupted")), f"{row.sandbox_id} interrupted", last=True)


def forgotten(passed_s: float, passed_ms: int) -> bool:
    """A worker without a row may have stood still for so long, by either clock, that others have removed it: the row says nothing then.

    The store's clock may have been set back since it removed the row, and ours stands still while a machine sleeps.
    """
    return max(passed_s * 1000, passed_ms) > FORGET_MS


def _run_of(view: SandboxView) -> str:
    """A one-shot's run is in its owner's name."""
    return str(view.sandbox.labels.get("owner", "")).rpartition("/")[2]


async def _quietly(work: Awaitable[Any]) -> None:
    """A failure shows in the sandbox's state; nobody waits for this call, and the next look comes."""
    try:
        await work
    except CorralError:
        pass
