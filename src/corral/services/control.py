"""What every service shares, and the services as one value. Composed by `bootstrap`, used by `api.routes`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from corral.domain.ids import new_id
from corral.domain.policy import Policy
from corral.domain.request import HostCaps
from corral.domain.runner import Names, Runner
from corral.errors import CorralError
from corral.ports.coordination import Coordination
from corral.ports.node import Node, Progress
from corral.ports.store import Store
from corral.services.documents import Documents
from corral.services.events import Wakes, Watchers

if TYPE_CHECKING:
    from corral.services.executor import Executor
    from corral.services.files import Files
    from corral.services.sandboxes import Sandboxes
    from corral.services.templates import Templates
    from corral.services.upkeep import Upkeep

Json = dict[str, Any]
LOOK_S = 2.0
"""After how long somebody who waits looks although no other worker has rung: a wake-up may be lost."""
LOOK_UNHEARD_S = 0.3
"""The same while none can be heard."""


@dataclass
class Core:
    """The ports, the clock and the dice, and the tasks that run behind the calls. Holds no fact that is not in the store."""

    store: Store
    node: Node
    policy: Policy
    runners: Mapping[str, Runner]
    host: HostCaps
    artifacts: str
    """Directory of artifacts: one sub-directory per run."""
    now_ms: Callable[[], int]
    entropy: Callable[[int], bytes]
    log: Callable[[str], None]
    delays: Mapping[str, float]
    coordination: Coordination
    """The other workers, if there are any. What is rung there is heard here once it is open (`Services.start`)."""
    worker: str = "owner"
    """Who drives runs and execs and locks commands. A state directory has one owner at a time, the same over restarts; among several
    workers each process has a name of its own."""
    unsafe: frozenset[str] = frozenset()
    progress: Progress | None = None
    wakes: Wakes = field(default_factory=Wakes)
    watchers: Watchers = field(default_factory=Watchers)
    draining: bool = False
    """Nothing new is taken; what is under way goes on."""
    closing: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with `closing`, for those who wait for something else."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Work that may be dropped at a stop: the next owner finds it in the store."""
    last: set[asyncio.Task[Any]] = field(default_factory=set)
    """Work that a stop waits for (bounded): removing what a finished run leaves."""

    def __post_init__(self) -> None:
        if not self.coordination.alone:
            self.wakes.others = self.coordination.ring
            self.wakes.patience = lambda: LOOK_S if self.coordination.healthy else LOOK_UNHEARD_S

    @property
    def driver(self) -> str | None:
        """Who a write about a run says must still drive it; None where nobody else can have taken it over."""
        return None if self.coordination.alone else self.worker

    @cached_property
    def names(self) -> Names:
        """By what the languages of the runners are told."""
        return Names.of(self.runners.values())

    def id(self, prefix: str) -> str:
        """A new id."""
        return new_id(prefix, self.now_ms(), self.entropy(10))

    def check_open(self) -> None:
        """`shutting_down` once the service stops."""
        if self.closing:
            raise CorralError("shutting_down", "the service is stopping")

    def check_accepting(self) -> None:
        """`shutting_down` once the service takes nothing new."""
        if self.draining or self.closing:
            raise CorralError("shutting_down", "the service is stopping and takes nothing new")

    def as_seen(self, error: CorralError) -> CorralError:
        """While the service stops, its own failures mean nothing: the caller should ask the next owner."""
        if (self.closing and error.status >= 500) or (error.code == "cursor_gone" and self.closing):
            return CorralError("shutting_down", "the service is stopping")
        return error

    def spawn(self, work: Coroutine[Any, Any, Any], name: str, *, last: bool = False) -> asyncio.Task[Any]:
        """Run in the background; an unexpected failure is logged, never lost."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        kept = self.last if last else self.tasks
        kept.add(task)

        def done(ended: asyncio.Task[Any]) -> None:
            kept.discard(ended)
            if not ended.cancelled() and (error := ended.exception()) is not None and not self.closing:
                self.log(f"{name}: {type(error).__name__}: {error}")

        task.add_done_callback(done)
        return task

    def close(self) -> None:
        """From now on nothing new begins, and whoever waits is told to ask the next owner."""
        self.closing = True
        self.stopping.set()
        self.wakes.ring_all()

    async def stop(self, drain_s: float) -> None:
        """Drop what the next owner can take up, after the last things have had `drain_s` seconds."""
        self.close()
        until = asyncio.get_running_loop().time() + drain_s
        while self.last and (left := until - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(set(self.last), timeout=left)
        for task in [*self.tasks, *self.last]:
            task.cancel()
        rest = [*self.tasks, *self.last]
        if rest:
            await asyncio.wait(rest, timeout=2.0)


@dataclass
class Services:
    """The use cases."""

    core: Core
    documents: Documents
    sandboxes: Sandboxes
    runs: Executor
    upkeep: Upkeep
    files: Files

    @property
    def templates(self) -> Templates:
        """What sandboxes are made from."""
        return self.upkeep.templates

    async def start(self) -> None:
        """Take over what an earlier owner left, then begin the loops."""
        await self.upkeep.take_over()
        self.upkeep.begin()

    async def stop(self, drain_s: float, *, hand_on: bool = False) -> None:
        """Let go; nothing depends on this being called. `hand_on`: attached runs without a client are left to the next owner."""
        alone = [] if hand_on else self.runs.alone()
        self.core.close()
        await self.runs.abandon(alone)
        await self.core.stop(drain_s)
