"""Settling: what makes a sandbox fit for its next owner when a lease has ended. What ran is ended, what is temporary is removed.

If that shows clean the sandbox is idle, and if it shows something that cannot be cleaned this is its end. It can be done over from the
start at any time, by anybody, so nothing else ends it: a node that is away and a store that does not answer are waited for, and a worker
that dies is replaced. Whoever settles holds the sandbox's `settle` command. A delete, and the end of the sandbox's time, win.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from corral import faults
from corral.domain.fence import Fence
from corral.domain.records import SandboxView
from corral.errors import CorralError
from corral.services.control import Core
from corral.services.execs import fence_of, instance_of
from corral.services.floors import Floors
from corral.services.lifecycle import Lifecycle
from corral.services.transitions import Plan

CLAIM_MS = 60_000
"""How long a settling is held for at a time; once that has run out another worker does it over."""
SETTLE_S = 45.0
"""For one attempt: less than it is held for, so that nobody takes one for interrupted that is under way."""
ANSWER_S = 5.0
"""How long the node may take to show that it is there."""
SLOW = 3
"""So many attempts may take too long with a node that is there: what hangs then is inside the sandbox."""
BEHIND = 8
"""How often the sandbox may turn out to have a higher fence elsewhere."""
EXECS_S = 10.0
TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/run/user/1000")  # noqa: S108 - inside the sandbox
"""What no owner leaves to the next."""
USERS = ("sandbox", "root")
AWAY = ("node_unavailable", "store_error", "shutting_down")
"""Errors that say nothing about the sandbox."""
GONE = ("sandbox_lost", "guest_lost", "not_found")
UNSETTLED = "unsettled"
"""Condition of a sandbox whose lease ended while it stood still: nothing can be cleaned in it then, so its next owner waits for that."""


class Settling:
    """See the module docstring."""

    def __init__(self, core: Core, lifecycle: Lifecycle, floors: Floors) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._floors = floors
        self._under_way: dict[str, asyncio.Task[None]] = {}
        lifecycle.on_recycling = self.later

    def later(self, sandbox_id: str) -> None:
        """The sandbox has come to be recycled, or whoever settled it has stopped: settle it beside the caller."""
        if sandbox_id not in self._under_way:
            task = self._core.spawn(self._settle(sandbox_id), f"{sandbox_id} settle", last=True)
            self._under_way[sandbox_id] = task
            task.add_done_callback(lambda _: self._under_way.pop(sandbox_id, None))

    async def take_over(self) -> None:
        """Settle what nobody does any more."""
        store, worker = self._core.store, self._core.worker
        while (command := await store.lock_command(worker, CLAIM_MS, kinds=("settle",))) is not None:
            found = await store.get_sandbox(command.sandbox_id, None)
            if found is not None and found.sandbox.state == "recycling":
                self.later(command.sandbox_id)
            else:
                await store.finish_command(command.command_id, worker, {"ok": False, "why": "stale"})

    async def _settle(self, sandbox_id: str) -> None:
        core = self._core
        away = slow = behind = 0
        while (view := await core.endure(partial(self._ours, sandbox_id))) is not None:
            faults.point("settle.before")
            left: str | None
            try:
                async with asyncio.timeout(SETTLE_S):
                    left = await self.clean(view)
            except TimeoutError:
                slow += await self._answers()
                if slow < SLOW:
                    continue
                left = "it took too long"
            except CorralError as error:
                if error.code in AWAY:
                    core.check_open()
                    await core.pause(away)
                    core.check_open()
                    away += 1
                    continue
                if error.code in GONE:
                    await core.endure(partial(self._lifecycle.lost, sandbox_id, "instance_gone"))
                    return
                if error.code == "lease_lost" and behind < BEHIND:
                    behind += 1
                    await core.endure(partial(self._floors.heard, sandbox_id, error))
                    continue
                left = core.told(error)
            faults.point("settle.cleaned")
            if await core.endure(partial(self._settled, view, left)):
                return

    async def _ours(self, sandbox_id: str) -> SandboxView | None:
        """The sandbox, as long as it is to be settled and no other worker does it."""
        view = await self._core.store.get_sandbox(sandbox_id, None)
        if view is None or view.sandbox.state != "recycling":
            return None
        held = await self._core.store.hold_command(sandbox_id, "settle", self._core.worker, CLAIM_MS)
        return view if held else None

    async def _answers(self) -> bool:
        """The node is there: what took too long did so inside."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._core.node.instances()
        except (TimeoutError, CorralError):
            return False
        return True

    async def clean(self, view: SandboxView) -> str | None:
        """End all that runs and remove what is temporary; -> what is left, None: nothing."""
        node, sandbox_id, fence = self._core.node, view.sandbox.sandbox_id, fence_of(view)
        instance_id = instance_of(view)
        await node.fence(instance_id, fence, "kill")
        loop = asyncio.get_running_loop()
        until = loop.time() + EXECS_S
        for record in await self._core.store.open_execs(sandbox_id):  # whoever drives them writes down their ends
            with self._core.wakes.listen(record.exec_id) as woken:
                while (row := await self._core.store.get_exec(record.exec_id, None)) is not None:
                    if row.state not in ("starting", "running") or loop.time() >= until:
                        break
                    await woken.wait(min(0.5, until - loop.time()))
                    woken.look()
        stays: str | None = None
        for user in USERS:
            stays = await node.empty_directories(instance_id, fence, TEMPORARY, user=user)
            if stays is None:
                return None
        return f"{stays} cannot be removed"

    async def _settled(self, view: SandboxView, left: str | None) -> bool:
        """Commit what the cleaning has shown of the sandbox under this fence; False: it has another one by now, so it shows nothing."""
        lifecycle, sandbox_id, fence = self._lifecycle, view.sandbox.sandbox_id, fence_of(view)
        after = await lifecycle.retrying(sandbox_id, lambda seen: self._reported(seen, fence, left), view)
        if after.sandbox.state == "sanitizing":
            if left is not None:
                self._core.log(f"{sandbox_id} is not used again: {left}")
            work = lifecycle.destroy(sandbox_id, "unknown_history" if left is not None else "settled")
            self._core.spawn(work, f"{sandbox_id} unsettled", last=True)
        return after.sandbox.state != "recycling"

    async def _reported(self, view: SandboxView, fence: Fence, left: str | None) -> SandboxView:
        lifecycle, row = self._lifecycle, view.sandbox
        if row.state != "recycling" or fence_of(view) != fence:
            return view  # deleted, lost, or settled by another meanwhile
        plan = Plan(view)
        if left is not None:
            lifecycle.step(plan, "failed", cause="unknown_history", metadata={"left": left})
        else:
            flags = ["evidence_ok"]
            if row.tainted:
                flags.append("tainted")
            if row.expires_at > self._core.store_ms():
                flags.append("session_alive")
            done = lifecycle.finishing(("settle", "fence", "fence_adopt"), {"ok": True})
            lifecycle.step(plan, "settled", flags, cause="settled", done=(done,))
            if plan.view.sandbox.state == "idle":
                plan.transitions[0] = replace(plan.transitions[0], settled=True)
        return await lifecycle.commit(plan)
