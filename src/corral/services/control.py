"""What every service shares, and the services as one value. Composed by `bootstrap`, used by `api.routes`."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from corral.domain.discretion import Discretion
from corral.domain.ids import new_id
from corral.domain.policy import Policy
from corral.domain.quota import QuotaRules
from corral.domain.request import HostCaps
from corral.domain.runner import Names, Runner
from corral.errors import CorralError
from corral.ports.coordination import Coordination
from corral.ports.delivery import Sender
from corral.ports.node import Node, Progress
from corral.ports.sealing import Sealer, Unsealed
from corral.ports.store import Store
from corral.ports.workers import Beat
from corral.services.documents import Documents
from corral.services.events import Wakes, Watchers

if TYPE_CHECKING:
    from corral.services.executor import Executor
    from corral.services.expiry import Expiry
    from corral.services.files import Files
    from corral.services.identity import Identity
    from corral.services.leases import Leases
    from corral.services.pausing import Pausing
    from corral.services.queue import Queue
    from corral.services.sandboxes import Sandboxes
    from corral.services.templates import Templates
    from corral.services.upkeep import Upkeep
    from corral.services.webhooks import Webhooks

Json = dict[str, Any]
LOOK_S = 2.0
"""After how long somebody who waits looks although no other worker has rung: a wake-up may be lost."""
LOOK_UNHEARD_S = 0.3
"""The same while none can be heard."""
LOOK_AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts at a store or a node that does not answer."""
NODE_PATIENCE_S = 120.0
"""How long a node may be away before what it has is given up: it is started again, and adopts what lives."""
AGAIN_S = 1.0
"""After which a loop that failed by a fault of ours begins again."""
T = TypeVar("T")


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
    sender: Sender | None = None
    """What opens the connections of webhooks; None = none are delivered here."""
    sealer: Sealer = field(default_factory=Unsealed)
    """What secrets go through on their way into the store and out of it."""
    progress: Progress | None = None
    wakes: Wakes = field(default_factory=Wakes)
    watchers: Watchers = field(default_factory=Watchers)
    draining: bool = False
    """Nothing new is taken; what is under way goes on."""
    refusing: CorralError | None = None
    """Why, where it is not a stop."""
    leaving: bool = False
    """Others serve from now on: who waits or follows here is sent to them, with what there is."""
    departing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with `leaving` or `closing`, for those who wait for something else."""
    closing: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with `closing`, for those who wait for something else."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Work that may be dropped at a stop: the next owner finds it in the store."""
    last: set[asyncio.Task[Any]] = field(default_factory=set)
    """Work that a stop waits for (bounded): removing what a finished run leaves."""
    uncertain: bool = False
    """A commit of ours had an unknown outcome: there may be rows that name this worker and that it does not drive."""
    store_lost: bool = False
    """The store did not answer last time."""
    regressed_ms: int = 0
    """When (by the store's clock) it was last found that the store had been set back. Runs made before are of a history that did not
    happen: what became of them is not known here, so none that does not fly already is started."""
    newest_event: int = 0
    """The highest id of an event that was seen in the store, our own commits included: one that is not there any more was lost."""
    _beat: tuple[float, int] | None = None
    """(monotonic seconds, the store's clock) of the last beat."""

    def __post_init__(self) -> None:
        if not self.coordination.alone:
            self.wakes.others = self.coordination.ring
            self.wakes.patience = lambda: LOOK_S if self.coordination.healthy else LOOK_UNHEARD_S

    @property
    def driver(self) -> str | None:
        """Who a write about a run says must still drive it; None where nobody else can have taken it over."""
        return None if self.coordination.alone else self.worker

    def beaten(self, at: float, beat: Beat) -> None:
        """A beat that was begun at `at` (of the loop's clock) has been committed."""
        self._beat = (at, beat.now_ms)

    def saw_event(self, event_id: int) -> None:
        """The store has committed this event."""
        self.newest_event = max(self.newest_event, event_id)

    def set_back(self) -> None:
        """The store has turned out to be older than what was seen of it."""
        self.regressed_ms = max(self.regressed_ms, self.store_ms())

    @property
    def doubtful(self) -> bool:
        """The last beat is so old that another worker may have taken over what this one drives."""
        if self.coordination.alone:
            return False
        ttl_s = self.delays["worker_ttl_s"]
        return self._beat is None or asyncio.get_running_loop().time() - self._beat[0] >= ttl_s

    def store_ms(self) -> int:
        """The store's clock, as far as is known here."""
        if self._beat is None:
            return self.now_ms()
        at, then_ms = self._beat
        return then_ms + round((asyncio.get_running_loop().time() - at) * 1000)

    @cached_property
    def names(self) -> Names:
        """By what the languages of the runners are told."""
        return Names.of(self.runners.values())

    @cached_property
    def quota(self) -> QuotaRules:
        """Who may hold how much here."""
        return self.policy.quota(self.host.cpus)

    def id(self, prefix: str) -> str:
        """A new id."""
        return new_id(prefix, self.now_ms(), self.entropy(10))

    def check_open(self) -> None:
        """`shutting_down` once the service stops."""
        if self.closing:
            raise CorralError("shutting_down", "the service is stopping")

    def check_accepting(self) -> None:
        """`shutting_down` once the service takes nothing new; `state_locked` once another has the store."""
        if self.refusing is not None:
            raise self.refusing
        if self.draining or self.closing:
            raise CorralError("shutting_down", "the service is stopping and takes nothing new")

    def check_staying(self) -> None:
        """`shutting_down` once whoever waits here should go on waiting elsewhere."""
        if self.leaving or self.closing:
            raise CorralError("shutting_down", "the service is stopping")

    def as_seen(self, error: CorralError) -> CorralError:
        """While the service stops, its own failures mean nothing: the caller should ask the next owner."""
        if (self.closing and error.status >= 500) or (error.code == "cursor_gone" and self.closing):
            return CorralError("shutting_down", "the service is stopping")
        return error

    @cached_property
    def discretion(self) -> Discretion:
        """What is not for tenants: where this installation lies."""
        state, package = os.path.dirname(os.path.abspath(self.artifacts)), os.path.dirname(os.path.dirname(__file__))
        return Discretion((state, os.path.realpath(state), package))

    def told(self, error: CorralError) -> str:
        """What results and histories, which tenants read, say of a failure. If that is not all of it, the log has the rest."""
        seen = self.discretion.error(error)
        if seen is not error:
            self.log(f"told without what lies where: {error}")
        return f"{seen.detail}; {seen.hint}" if seen.hint else seen.detail

    async def endure(self, work: Callable[[], Awaitable[T]]) -> T:
        """`work`, and again for as long as the store does not answer: for what was accepted and has to come to its end.

        An attempt may have been committed although it says that it failed, so `work` must be safe to repeat. `shutting_down` once
        the service stops: the next one goes on.
        """
        attempt = 0
        while True:
            try:
                done = await work()
            except CorralError as error:
                if error.code != "store_error":
                    raise
                self.store_failed(error)
                self.check_open()
            else:
                if attempt:
                    self.store_works()
                return done
            await self.pause(attempt)
            attempt += 1

    async def reach(self, work: Callable[[], Awaitable[T]]) -> T:
        """`work` at the node, and again while the node's process is away, for what may be repeated there (by instance and exec)."""
        loop = asyncio.get_running_loop()
        since, attempt = None, 0
        while True:
            began = loop.time()
            try:
                return await work()
            except CorralError as error:
                if error.code != "node_unavailable":
                    raise
                self.check_open()
                if since is None or loop.time() - began > NODE_PATIENCE_S / 2:  # it had been there for a while
                    since, attempt = loop.time(), 0
                if loop.time() - since >= NODE_PATIENCE_S:
                    raise
            await self.pause(attempt)
            attempt += 1

    async def pause(self, attempt: int) -> None:
        """Between two attempts: longer each time, cut short by the end of the service."""
        try:
            async with asyncio.timeout(LOOK_AGAIN_S[min(attempt, len(LOOK_AGAIN_S) - 1)]):
                await self.stopping.wait()
        except TimeoutError:
            pass

    def store_failed(self, error: CorralError) -> None:
        """Said once, until it works again. What was asked of it just now may have been done nevertheless."""
        self.uncertain = True
        if not self.store_lost:
            self.store_lost = True
            self.log(f"the store is lost, what runs goes on and is written down later: {error}")

    def store_works(self) -> None:
        """It has answered."""
        if self.store_lost:
            self.store_lost = False
            self.log("the store answers again")

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

    def keep_on(self, loop: Callable[[], Coroutine[Any, Any, Any]], name: str) -> asyncio.Task[Any]:
        """A loop that lasts as long as the service: a fault of ours in it is logged, and it begins again."""

        async def lasting() -> None:
            while not self.closing:
                try:
                    await loop()
                    return
                except Exception:
                    self.log(f"{name}: {traceback.format_exc()}")
                await asyncio.sleep(AGAIN_S)

        return self.spawn(lasting(), name)

    def leave(self) -> None:
        """Others serve from now on: nothing new begins, waits end with what there is, streams end and go on there. The rest goes on."""
        self.draining = self.leaving = True
        self.departing.set()
        self.wakes.ring_all()

    def close(self) -> None:
        """From now on nothing new begins, and whoever waits is told to ask the next owner."""
        self.closing = True
        self.stopping.set()
        self.departing.set()
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

    @cached_property
    def identity(self) -> Identity:
        """Who may call."""
        from corral.services.identity import Identity

        return Identity(self.core, self.runs.cancel)

    @property
    def expiry(self) -> Expiry:
        """When sandboxes end by themselves."""
        return self.sandboxes.expiry

    @property
    def pausing(self) -> Pausing:
        """Sandboxes that stand still for a while."""
        return self.sandboxes.pausing

    @property
    def leases(self) -> Leases:
        """Who has which sandbox."""
        return self.sandboxes.leases

    @cached_property
    def webhooks(self) -> Webhooks:
        """Who is told of the end of runs."""
        from corral.services.webhooks import Webhooks

        return Webhooks(self.core, self.documents)

    @property
    def queue(self) -> Queue:
        """Which run is next."""
        return self.runs.queue

    @property
    def templates(self) -> Templates:
        """What sandboxes are made from."""
        return self.upkeep.templates

    async def start(self) -> None:
        """Take over what an earlier owner left, then begin the loops."""
        await self.identity.begin()
        await self.upkeep.take_over()
        self.upkeep.begin()
        self.queue.begin()
        self.webhooks.begin()

    async def stop(self, drain_s: float, *, hand_on: bool = False) -> None:
        """Let go; nothing depends on this being called. `hand_on`: attached runs without a client are left to the next owner."""
        # Other workers take over at once, and see for themselves whether a client comes to them.
        alone = [] if hand_on or not self.core.coordination.alone else self.runs.alone()
        self.webhooks.last_call()
        self.core.close()
        await self.runs.abandon(alone)
        await self.core.stop(drain_s)
        await self.upkeep.workers.leave()
