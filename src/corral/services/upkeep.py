"""What keeps an installation right: taking over after another owner, the loops behind the calls, gc and doctor."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from corral.domain.grade import Check
from corral.domain.limits import LimitModes
from corral.domain.records import ExecRecord, RunRecord, SandboxView
from corral.domain.request import Placement
from corral.errors import CorralError
from corral.services import placing
from corral.services.control import Core
from corral.services.documents import Documents
from corral.services.events import Caller
from corral.services.executor import Executor
from corral.services.lifecycle import Lifecycle
from corral.services.sandboxes import LIVING_STATES, OPEN_EXEC, Sandboxes
from corral.services.templates import Templates
from corral.services.workers import MAKING, RESTORED, Workers

Json = dict[str, Any]
PAGE = 500
GC_WAIT_S = 60.0
"""What gc waits at most for the end of what it cancelled: a template that is being built is not cut short."""
FORGETS_S = 60.0
"""How often the store is asked to forget what is too old."""
EXPECTED: Json = {"modes": LimitModes().as_dict()}


class Upkeep:
    """See the module docstring."""

    def __init__(
        self, core: Core, lifecycle: Lifecycle, executor: Executor, sandboxes: Sandboxes, documents: Documents
    ) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._executor = executor
        self._sandboxes = sandboxes
        self._documents = documents
        self.templates = Templates(core, self._living)
        self.workers = Workers(core, lifecycle, executor, sandboxes)
        leases = sandboxes.leases
        self.workers.on_regression.append(leases.floors.set_back)
        self.workers.movers |= {"recycling": leases.interrupted, "reuse_checking": leases.interrupted}
        self.workers.movers |= dict.fromkeys(("pausing", "resuming"), sandboxes.pausing.bring_on)
        self._bases_looked_at_ms = core.now_ms()
        self._looking: asyncio.Task[None] | None = None
        self._forgets_at_s = 0.0

    # -- take-over -------------------------------------------------------------------------------------------------------------
    async def take_over(self) -> None:
        """Bring what the store has open and what the node has alive together (the node has adopted its journal already).

        Every open run and exec is driven on: its row says how far it came, and the node knows whether its frame arrived. A sandbox
        whose instance is gone is lost; one whose one-shot run has ended, or whose step 10 was cut short, is destroyed. Among other
        workers only what none of them drives is taken.
        """
        core = self._core
        if not core.coordination.alone:  # what is found to be older is so by the store's clock, which a beat brings
            await core.endure(self.workers.beat)
        await core.endure(self._sandboxes.leases.floors.attach_node)
        if not core.coordination.alone:
            await self.workers.join()
            return
        runs = await core.store.open_runs()
        views = await self._living()
        if not (runs or views):
            return
        live = set(await core.node.instances())
        wanted = {run.sandbox_id for run in runs}
        grace_s = core.delays["takeover_client_gone_s"]
        await self._sandboxes.expiry.sweep()  # owners may be short-lived, each too short for the loop's
        for view in views:
            self._adopt_sandbox(view, live, wanted)
        for run in runs:
            if run.created_at <= core.regressed_ms:
                await self._executor.give_up(run, RESTORED)
            else:
                self._executor.drive(run, grace_s)
        for record in await core.store.open_execs():
            if record.run_id is None:
                self.workers.drive_exec(record, grace_s)
            elif not _driven_by(record, runs):
                core.spawn(self._close_exec(record), f"{record.exec_id} close")

    def _adopt_sandbox(self, view: SandboxView, live: set[str], wanted: set[str | None]) -> None:
        row, core = view.sandbox, self._core
        here = view.instance is not None and view.instance.instance_id in live
        if row.state in ("sanitizing", "failed", "lost"):
            core.spawn(self._lifecycle.lost(row.sandbox_id, "interrupted"), f"{row.sandbox_id} take over", last=True)
        elif row.one_shot and row.sandbox_id not in wanted:
            work = self._lifecycle.destroy(row.sandbox_id, "interrupted")
            core.spawn(work, f"{row.sandbox_id} take over", last=True)
        elif row.state in MAKING:
            if row.sandbox_id not in wanted:
                work = self._lifecycle.provide(self._lifecycle.wanted_of(view), view)
                core.spawn(_quietly(work), f"{row.sandbox_id} take over")
        elif here and row.state in ("recycling", "reuse_checking"):
            core.spawn(self._sandboxes.leases.interrupted(view), f"{row.sandbox_id} take over", last=True)
        elif here and row.state in ("pausing", "resuming"):
            core.spawn(_quietly(self._sandboxes.pausing.bring_on(view)), f"{row.sandbox_id} take over", last=True)
        elif not here:
            core.spawn(self._lifecycle.lost(row.sandbox_id, "instance_gone"), f"{row.sandbox_id} lost", last=True)

    async def _close_exec(self, record: ExecRecord) -> None:
        """An exec whose run has finished without it (it cannot have a result of its own any more)."""
        changes = {"state": "lost", "ended_at": self._core.now_ms()}
        try:
            await self._core.store.update_exec(record.exec_id, expect_states=OPEN_EXEC, changes=changes)
        except CorralError as error:
            if error.code != "conflict":
                raise
        self._core.wakes.ring(record.exec_id)

    async def _living(self) -> list[SandboxView]:
        views: list[SandboxView] = []
        after: str | None = None
        while True:
            page = await self._core.store.list_sandboxes(None, states=LIVING_STATES, after=after, limit=PAGE)
            views += page
            if len(page) < PAGE:
                return views
            after = page[-1].sandbox.sandbox_id

    # -- loops -----------------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """The loops that run as long as the service does."""
        if not self._core.coordination.alone:
            self.workers.begin()
        self._core.keep_on(self._watch_lost, "lost instances")
        self._core.keep_on(self._sweep, "sweep")

    async def _watch_lost(self) -> None:
        while True:
            instance_id = ""
            try:
                instance_id = await self._core.reach(self._core.node.lost)
                await self._core.endure(partial(self.instance_lost, instance_id))
            except CorralError as error:  # the next take-over finds it; those that are lost later must be heard of too
                self._core.log(f"{instance_id} lost: {error}")
                self._core.check_open()

    async def instance_lost(self, instance_id: str) -> None:
        """The node says that an instance has ended by itself."""
        core = self._core
        for instance in await core.store.list_instances(core.node.node_id, states=("warming", "warm", "bound")):
            if instance.instance_id == instance_id and instance.sandbox_id is not None:
                work = core.endure(partial(self._lifecycle.lost, instance.sandbox_id, "instance_gone"))
                core.spawn(work, f"{instance.sandbox_id} lost", last=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._core.delays["sweep_s"])
            try:
                await self.sweep()
                self._core.store_works()
            except CorralError as error:
                if error.code == "store_error":
                    self._core.store_failed(error)
                else:
                    self._core.log(f"sweep: {error}")

    async def sweep(self) -> None:
        """End what has outlived its TTL, and what was attached to a client that is gone."""
        core = self._core
        now = core.now_ms()
        self._look_at_bases(now)
        await self._forget_old()
        await self._sandboxes.expiry.sweep()
        await self._sandboxes.leases.sweep()
        patience_s = core.delays["client_gone_s"]
        for run in self._executor.in_flight:
            alone = run.attached and run.cancel_requested is None and core.watchers.alone_s(run.run_id) >= patience_s
            if alone and await self._executor.deserted(run):
                await self._executor.cancel(Caller(run.tenant_id, run.owner), run.run_id, "client_gone")
        # Not all open ones from the store: an exec's row holds its input, and this comes round every second.
        for exec_id in core.watchers.deserted(patience_s):
            record = await core.store.get_exec(exec_id, None)
            if record is not None and record.state in OPEN_EXEC and record.cancel_requested is None:
                if self._sandboxes.watched_elsewhere(record):
                    continue
                view = await self._lifecycle.view(record.sandbox_id)
                caller = Caller(view.sandbox.tenant_id)
                core.spawn(self._sandboxes.cancel_exec(caller, record.exec_id, "client_gone"), record.exec_id)

    def _look_at_bases(self, now_ms: int) -> None:
        """From time to time, beside the rest: removing a base may take longer than the next look at the TTLs can wait."""
        self._bases_looked_at_ms = min(self._bases_looked_at_ms, now_ms)  # the clock may have been set back
        due = now_ms - self._bases_looked_at_ms >= self._core.delays["bases_s"] * 1000
        if due and (self._looking is None or self._looking.done()):
            self._bases_looked_at_ms = now_ms
            self._looking = self._core.spawn(self._sweep_bases(), "sweep of bases")

    async def _forget_old(self) -> None:
        """A piece of what the store has kept long enough; the next one with the next sweep, once nothing is left a minute later."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._forgets_at_s and not await self._core.store.forget_old():
            self._forgets_at_s = now_s + FORGETS_S

    async def _sweep_bases(self) -> None:
        try:
            if counts := await self.templates.sweep():
                self._core.log(f"sweep: removed {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
        except (CorralError, OSError) as error:  # the next one comes
            self._core.log(f"sweep of bases: {error}")

    # -- gc and doctor ---------------------------------------------------------------------------------------------------------
    async def gc(self, *, unknown: bool = False) -> Json:
        """End what clients that are gone left running, finish removals, have the node remove what nobody owns; -> counts.

        Owners may be short-lived, each too short to see that a client does not come back: this call stays until it knows.
        `unknown`: also what a store that was set back to an earlier copy does not know; without it that is only listed.
        """
        core = self._core
        await self._end_abandoned()
        if core.last:  # destructions under way, of what this call ended and of what had ended just before
            await asyncio.wait(set(core.last), timeout=GC_WAIT_S)
        finished = 0
        for view in await self._living():
            if view.sandbox.state in ("sanitizing", "failed", "lost"):
                ended = await self._lifecycle.lost(view.sandbox.sandbox_id, "gc")
                finished += ended.sandbox.state == "terminated"
        for instance in await core.store.list_instances(core.node.node_id, states=("condemned",)):
            await self._lifecycle.remove_instance(instance.instance_id, "gc")
        here = (
            await core.node.instances()
        )  # before the store is asked: an instance has its row before the node hears of it
        known = await core.store.list_instances(core.node.node_id, states=("warming", "warm", "bound", "condemned"))
        forgotten = 0  # made for somebody, and no row says for whom
        if unknown or not await core.node.regressed():
            for instance_id in set(here) - {instance.instance_id for instance in known}:
                forgotten += await self._lifecycle.remove_instance(instance_id, "gc")
            await core.node.regressed(forget=True)
        removed = await core.node.gc() | await self.templates.sweep()
        if forgotten:
            removed["instance"] = removed.get("instance", 0) + forgotten
        if mended := await self._executor.queue.mend():
            removed["reservation"] = mended
        return {"removed": removed, "sandboxes": finished, "leftovers": await self._leftovers()}

    async def _leftovers(self) -> list[Json]:
        """What the node finds, and what lives there for nobody that the store knows, since it was set back."""
        found = await self._core.node.leftovers()
        unknown = await self._sandboxes.leases.floors.unknown()
        return found + [{"kind": "unknown_instance", "id": one, "instance_id": one} for one in unknown]

    async def _end_abandoned(self) -> None:
        """Cancel each attached run and exec for which no client comes within the grace, and wait for their ends (bounded)."""
        core = self._core
        patience_s = core.delays["client_gone_s"]
        ends: list[asyncio.Task[None]] = []
        for run in self._executor.in_flight:
            if run.attached:
                ends.append(core.spawn(self._end_run(run, patience_s), f"{run.run_id} abandoned"))
        for record in await core.store.open_execs():
            if record.attached and record.run_id is None:
                ends.append(core.spawn(self._end_exec(record, patience_s), f"{record.exec_id} abandoned"))
        if ends:
            await asyncio.wait(ends, timeout=patience_s + GC_WAIT_S)

    async def _end_run(self, run: RunRecord, patience_s: float) -> None:
        if run.cancel_requested is None:
            if not await self._stays_alone(run.run_id, patience_s) or not await self._executor.deserted(run):
                return
            await self._executor.cancel(Caller(run.tenant_id, run.owner), run.run_id, "client_gone")
        await self._executor.over(run.run_id)

    async def _end_exec(self, record: ExecRecord, patience_s: float) -> None:
        if await self._stays_alone(record.exec_id, patience_s):
            row = await self._core.store.get_exec(record.exec_id, None)
            if row is None or self._sandboxes.watched_elsewhere(row):
                return
            view = await self._lifecycle.view(record.sandbox_id)
            await self._sandboxes.cancel_exec(Caller(view.sandbox.tenant_id), record.exec_id, "client_gone")

    async def _stays_alone(self, key: str, patience_s: float) -> bool:
        """False as soon as somebody watches it, or it is over."""
        while True:
            alone_s = self._core.watchers.unwatched_s(key)
            if alone_s is None or alone_s >= patience_s:
                return alone_s is not None
            await asyncio.sleep(min(0.1, patience_s - alone_s))

    async def default_runtime(self) -> tuple[str | None, str]:
        """(what a request without wishes runs on, why); None = nothing can run here."""
        policy = self._core.policy
        try:
            choice = await placing.choose(self._core, Placement(), policy.needs(None))
        except CorralError as error:
            return None, error.detail
        return choice.runtime, choice.reason

    async def doctor(self, *, fresh: bool = False, security: bool = False) -> Json:
        """The document of `corral doctor`; with `security` host and runtimes are graded."""
        core = self._core
        checks: list[Check] = []
        if fresh or security:  # before the default is chosen, which depends on them
            try:
                checks = await core.node.posture(fresh=True)
            except CorralError:
                if security:
                    raise
        runtimes = await core.node.runtimes(fresh=fresh)
        default, why = await self.default_runtime()
        more: Json = {
            "default_reason": why,
            "templates": await core.node.templates(),
            "bases": await self.templates.bases(),
            "quota": await self._executor.queue.drift(),
        }
        if security:
            more["security"] = self._documents.security(runtimes, checks, core.unsafe)
        return self._documents.doctor(runtimes, default, await core.node.host(), await self._leftovers(), more)


def _driven_by(record: ExecRecord, runs: list[RunRecord]) -> bool:
    return any(run.run_id == record.run_id for run in runs)


async def _quietly(work: Any) -> None:
    """A failure shows in the sandbox's state; nobody waits for this call."""
    try:
        await work
    except CorralError:
        pass
