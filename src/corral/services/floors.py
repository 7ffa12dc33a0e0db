"""A store that was set back to an older copy, as its nodes show it: they have heard of later events, and have seen higher fences.

Nothing is ended: fences go on above what the nodes have seen, and what the store does not know stays for the operator.
"""

from __future__ import annotations

import asyncio

from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.services.control import Core
from corral.services.execs import fence_of
from corral.services.lifecycle import Lifecycle

NODE_S = 1.0
"""How long a look waits for the node's answer. A node that is away holds up nothing that needs the store only."""


class Floors:
    """See the module docstring."""

    def __init__(self, core: Core, lifecycle: Lifecycle) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._looking: asyncio.Task[None] | None = None

    async def attach_node(self) -> None:
        """At the start: the store takes every fence of the node's that is above its own, and the node learns how far the store is."""
        await self.note_event(await self._core.store.newest_event())
        await self._adopt_floors()

    async def look(self) -> None:
        """Tell the node how far the store is, and see whether it has heard of more; goes on beside the caller if it does not answer."""
        newest = await self._core.store.newest_event()
        self._core.saw_event(newest)
        if self._looking is None or self._looking.done():
            self._looking = self._core.spawn(self._note_newest(newest), "newest event")
        done, _ = await asyncio.wait({self._looking}, timeout=NODE_S)
        for task in done:
            task.result()

    async def _note_newest(self, event_id: int) -> None:
        try:
            await self.note_event(event_id)
        except CorralError as error:
            if error.code not in ("node_unavailable", "shutting_down"):  # the next look asks again
                raise

    async def note_event(self, event_id: int) -> None:
        """The store has this event; if the node has heard of a later one that is not there any more, the store was set back."""
        node, store = self._core.node, self._core.store
        highest = await node.remember_event(event_id)
        if highest <= event_id:
            return
        newest = await store.newest_event()  # an answer that was long under way says nothing
        if newest < highest:
            await self.store_regressed(newest, highest)

    async def set_back(self) -> None:
        """A worker has seen that the store is older than it was."""
        newest = await self._core.store.newest_event()
        await self.store_regressed(newest, await self._core.node.remember_event(newest))

    async def store_regressed(self, newest: int, highest: int) -> None:
        """Nothing is ended: fences go on above what the node has seen, and what the store does not know stays for the operator."""
        self._core.log(
            f"store_regressed: its newest event is {newest}, the node has seen {highest}: "
            "nothing is ended, fences are raised above what the node has seen"
        )
        self._core.set_back()
        self._core.newest_event = newest
        self._lifecycle.forget()
        await self._adopt_floors()
        await self._core.node.remember_event(newest, accept=True)
        if unknown := await self.unknown():
            self._core.log(f"store_regressed: not in the store, left alone: {', '.join(unknown)}; see `corral doctor`")

    async def unknown(self) -> list[str]:
        """Instances that live on the node and that the store does not know, since it was set back; else nothing."""
        core = self._core
        if not await core.node.regressed():
            return []
        here = await core.node.instances()
        states = ("warming", "warm", "bound", "condemned")
        known = {one.instance_id for one in await core.store.list_instances(core.node.node_id, states=states)}
        return sorted(set(here) - known)

    async def _adopt_floors(self) -> None:
        for instance_id, sandbox_id, floor in await self._core.node.floors():
            await self._adopt_floor(instance_id, sandbox_id, floor)

    async def _adopt_floor(self, instance_id: str, sandbox_id: str, floor: Fence) -> None:
        core = self._core
        evidence = {"node": core.node.node_id, "instance": instance_id}
        view = await core.store.adopt_floor(sandbox_id, floor, evidence)
        if view is None:
            return
        core.log(f"store_regressed: {sandbox_id} goes on at {fence_of(view)}, above {floor} on {core.node.node_id}")
        core.wakes.ring(sandbox_id)
        try:
            await core.node.fence(instance_id, fence_of(view), "adopt")
        except CorralError as error:  # whoever acquires it brings the fence again
            core.log(f"{sandbox_id}: {error}")

    async def heard(self, sandbox_id: str, error: CorralError) -> None:
        """A node refused a fence: if its floor is above the row's, the row is behind, and takes it."""
        try:
            floor = Fence.parse(str(error.facts.pop("floor", "")))
        except ValueError:
            return
        view = await self._core.store.get_sandbox(sandbox_id, None)
        if view is not None and view.instance is not None and fence_of(view) < floor:
            await self._adopt_floor(view.instance.instance_id, sandbox_id, floor)
