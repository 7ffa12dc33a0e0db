"""Several workers over one store and one node in memory, and what stands between them: each can be killed, frozen, cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from corral.adapters.store.memory import MemoryStore
from corral.api.routes import Reply
from corral.errors import CorralError
from corral.ports.coordination import Counted

from .conftest import World
from .fake_node import FakeNode

QUICK = {"beat_s": 0.03, "worker_ttl_s": 0.3, "stale_s": 0.2, "claim_s": 0.2}


class Hub:
    """What the members ring reaches all the others at once, while it works."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.works = True

    def restore(self) -> None:
        self.works = True
        for member in self.members:
            member.missed()


class Member:
    """`corral.ports.coordination.Coordination` over a hub."""

    alone = False

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.heard: Callable[[str], None] = lambda key: None
        self.missed: Callable[[], None] = lambda: None

    @property
    def healthy(self) -> bool:
        return self._hub.works

    async def open(self, heard: Callable[[str], None], missed: Callable[[], None]) -> None:
        self.heard, self.missed = heard, missed
        self._hub.members.append(self)

    async def close(self) -> None:
        if self in self._hub.members:
            self._hub.members.remove(self)

    def ring(self, keys: Sequence[str]) -> None:
        if self._hub.works:
            for member in list(self._hub.members):
                if member is not self:
                    for key in keys:
                        member.heard(key)

    async def count(self, key: str, amount: int, limit: int, window_ms: int) -> Counted:
        return Counted(True)


class Store(MemoryStore):
    """One that can be lost: then every call fails, a write perhaps after it was done."""

    lost = False
    refused = 0
    """How many transactions found it lost."""
    fails_after: Callable[[], bool] | None = None
    """Whether the transaction that has just been done is said to have failed."""

    async def _transact(self, work: Any) -> Any:
        if self.lost:
            self.refused += 1
            raise CorralError("store_error", "the store does not answer")
        done = await super()._transact(work)
        if self.fails_after is not None and self.fails_after():
            raise CorralError("store_error", "the connection broke during the commit")
        return done


class Cluster:
    """Workers by name."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.hub = Hub()
        self.node = FakeNode()
        self.workers: dict[str, World] = {}
        first = World(tmp)
        self.now_ms = first.now_ms
        self.store = Store(first.now_ms)

    async def start(self, name: str, **delays: float) -> World:
        world = World(self.tmp)
        world.store, world.node = self.store, self.node
        await world.start(Member(self.hub), f"w_{name}", **{**QUICK, **delays})
        self.workers[name] = world
        return world

    async def kill(self, name: str) -> None:
        """kill -9: its tasks end where they are, its row stays."""
        world = self.workers.pop(name)
        assert world.services is not None
        await world.services.core.coordination.close()
        await world.crash()
        await asyncio.sleep(0)

    def freeze(self, name: str) -> None:
        """It beats no more and hears nothing, but what it has begun goes on: as after a long SIGSTOP."""
        world = self.workers[name]
        assert world.services is not None
        for task in world.services.core.tasks:
            if task.get_name() in ("beats", "bring on", "sweep"):
                task.cancel()
        self.hub.members.remove(world.services.core.coordination)  # type: ignore[arg-type]

    async def stop(self) -> None:
        for gate in ("create_gate", "start_gate", "destroy_gate"):
            if (event := getattr(self.node, gate)) is not None:
                event.set()
        self.store.lost = False
        for world in self.workers.values():
            if world.services is not None:
                await world.services.stop(2.0)

    async def call(self, name: str, method: str, route: str, document: Any = None, **query: Any) -> Reply:
        return await self.workers[name].call(method, route, document, **query)
