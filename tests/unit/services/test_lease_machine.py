"""Leases under a machine that takes any path: owners that come, work, sleep too long and crash at any stage, and a clock that jumps ahead."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from corral.api.routes import Reply, Request, dispatch
from corral.domain.fence import Fence

from .conftest import World

OWNERS = st.sampled_from(["a", "b", "c"])
PLACE = tempfile.TemporaryDirectory()
"""One for all, as what is read once is kept there."""
TTLS = st.sampled_from([1.0, 2.5, 10.0])


class Timed(World):
    """A world whose clock only the test moves."""

    clock = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.clock


@dataclass
class Holding:
    """A lease as somebody was told of it."""

    owner: str
    fence: Fence
    ttl_ms: int
    until_ms: int
    over: bool = False
    """Released, or somebody has been told of a newer one."""


class Leases(RuleBasedStateMachine):
    """One sandbox; every lease that was ever reported may be used again at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.told: list[Holding] = []
        self.disturbed = False
        """Somebody may have taken the sandbox and never heard of it: the last lease that was told may be lost early."""
        self.accepted: list[Fence] = []
        self.floor = Fence(0, 0)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def begin(self) -> None:
        self.world = Timed(Path(PLACE.name))
        real = self.world.node._check

        def check(instance_id: str, fence: Fence) -> None:
            real(instance_id, fence)
            self.accepted.append(fence)

        self.world.node._check = check  # type: ignore[method-assign]
        self.run(self.world.start(sweep_s=3600.0))
        made = self.run(self.world.call("POST", "/v1/sandboxes", {"ttl_s": 86_400}))
        assert made.status == 201, made.document
        self.box = made.document["id"]

    def call(self, method: str, below: str, document: Any = None, lease: str | None = None, **query: str) -> Reply:
        headers = {} if lease is None else {"corral-lease": lease}
        request = Request(method, f"/v1/sandboxes/{self.box}{below}", query, headers, b"data", document)

        async def work() -> Reply:
            assert self.world.services is not None
            answer = await dispatch(self.world.services, request)
            await self.quiet()
            return answer

        return self.run(work())

    async def quiet(self) -> None:
        """What follows of itself has followed."""
        async with asyncio.timeout(20):
            while True:
                view = await self.world.store.get_sandbox(self.box, None)
                if view.sandbox.state not in ("recycling", "running"):
                    return
                await asyncio.sleep(0.001)

    @property
    def last(self) -> Holding | None:
        return self.told[-1] if self.told else None

    def newest(self) -> Fence:
        return max((one.fence for one in self.told), default=Fence(0, 0))

    # -- what owners do --------------------------------------------------------------------------------------------------------
    @rule(owner=OWNERS, ttl=TTLS)
    def acquire(self, owner: str, ttl: float) -> None:
        before, last = self.newest(), self.last
        answer = self.call("POST", "/attach", {"owner": owner, "ttl_s": ttl, "contention": "fail"})
        held = last is not None and not last.over and self.world.clock < last.until_ms and not self.disturbed
        if answer.status == 409:
            assert answer.document["code"] == "lease_held", answer.document
            assert self.disturbed or (held and last is not None and last.owner != owner), "nobody has it"
            return
        assert answer.status == 200, answer.document
        assert not (held and last is not None and last.owner != owner), f"two owners: {last} and {owner}"
        fence = Fence.parse(answer.document["lease"])
        assert fence > before, "a token that is not new"
        [floor] = self.world.node.floor_of.values()
        assert floor == fence, "reported before the node knew it"
        for one in self.told:
            one.over = True
        ttl_ms = round(ttl * 1000)
        assert 0 < answer.document["ttl_ms"] <= ttl_ms
        self.told.append(Holding(owner, fence, ttl_ms, self.world.clock + answer.document["ttl_ms"]))
        self.disturbed = False

    def good(self, one: Holding) -> bool | None:
        """Whether it must be good, must not be, or None: somebody may have taken it without having been told."""
        if one.over or one is not self.last or self.world.clock >= one.until_ms:
            return False
        return None if self.disturbed else True

    def judged(self, one: Holding, answer: Reply) -> None:
        expected = self.good(one)
        lost = answer.document.get("code") == "lease_lost"
        assert lost or answer.status < 300, answer.document
        assert expected is None or expected is not lost, (one, self.world.clock, answer.document)
        if not lost:  # each use of it extends it
            left = one.until_ms - self.world.clock
            if 3 * left < 2 * one.ttl_ms:
                one.until_ms = self.world.clock + one.ttl_ms

    @rule(which=st.integers(0, 10**6))
    def renew(self, which: int) -> None:
        if self.told:
            one = self.told[which % len(self.told)]
            answer = self.call("POST", "/renew", {"owner": one.owner}, str(one.fence))
            self.judged(one, answer)
            if answer.status == 200:
                assert self.world.clock + answer.document["ttl_ms"] == one.until_ms, "another expiry than the row's"

    @rule(which=st.integers(0, 10**6))
    def work(self, which: int) -> None:
        if self.told:
            one, starts = self.told[which % len(self.told)], len(self.world.node.starts)
            answer = self.call("POST", "/execs", {"argv": ["print", "x"]}, str(one.fence))
            self.judged(one, answer)
            assert (len(self.world.node.starts) > starts) == (answer.status == 200)

    @rule(which=st.integers(0, 10**6))
    def write(self, which: int) -> None:
        if self.told:
            one = self.told[which % len(self.told)]
            self.accepted.clear()
            answer = self.call("PUT", "/files/archive", None, str(one.fence), path="/workspace")
            self.judged(one, answer)
            assert self.accepted == ([one.fence] if answer.status == 200 else []), "an effect of a stale holder"

    @rule(which=st.integers(0, 10**6))
    def release(self, which: int) -> None:
        if self.told:
            one = self.told[which % len(self.told)]
            again = one.over and self.released == one.fence
            answer = self.call("POST", "/release", {"owner": one.owner}, str(one.fence))
            if again and answer.status == 200:
                return
            expected = self.good(one)
            lost = answer.document.get("code") == "lease_lost"
            assert lost or answer.status == 200, answer.document
            assert expected is None or expected is not lost, (one, answer.document)
            if not lost:
                one.over, self.released = True, one.fence

    released: Fence | None = None

    # -- what happens to them --------------------------------------------------------------------------------------------------
    @rule(ms=st.sampled_from([1, 400, 999, 1000, 1600, 2500, 9999]))
    def time_passes(self, ms: int) -> None:
        self.world.clock += ms

    @rule()
    def sweep(self) -> None:
        async def work() -> None:
            await self.world.services.leases.sweep()
            await self.quiet()

        self.run(work())

    @rule()
    def restart(self) -> None:
        async def work() -> None:
            await self.world.crash()
            await self.world.start(sweep_s=3600.0)
            await self.quiet()

        self.run(work())

    @rule(owner=OWNERS, stage=st.sampled_from(["store", "node", "guest"]))
    def crash_while_acquiring(self, owner: str, stage: str) -> None:
        """The service dies after the store, the node or the guest has the new fence; nobody is told."""
        node, real = self.world.node, self.world.node.fence
        reached = asyncio.Event()

        async def fence(instance_id: str, fence: Fence, mode: Any) -> None:
            if stage != "store":
                await real(instance_id, fence, mode)
            reached.set()
            await asyncio.Event().wait()

        async def work() -> None:
            document = {"owner": owner, "ttl_s": 5, "contention": "fail"}
            request = Request("POST", f"/v1/sandboxes/{self.box}/attach", {}, {}, b"", document)
            node.fence = fence  # type: ignore[method-assign]
            asking = asyncio.ensure_future(dispatch(self.world.services, request))
            waiting = asyncio.ensure_future(reached.wait())
            await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
            await self.world.crash()
            for task in (asking, waiting):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            node.fence = real  # type: ignore[method-assign]
            await self.world.start(sweep_s=3600.0)
            await self.quiet()

        self.run(work())
        if reached.is_set():
            self.disturbed = True

    @invariant()
    def floors_and_tokens_never_fall(self) -> None:
        if not hasattr(self, "box"):
            return
        for floor in self.world.node.floor_of.values():
            assert floor >= self.floor
            self.floor = floor
        view = self.run(self.world.store.get_sandbox(self.box, None))
        now = Fence(view.sandbox.incarnation, view.lease.lease_version)
        assert now >= self.floor, "the node is ahead of the store"
        assert view.sandbox.state not in ("sanitizing", "terminated"), (
            "what is cut short is done over, and ends nothing"
        )

    def teardown(self) -> None:
        async def work() -> None:
            if self.world.services is not None:
                await self.world.services.stop(2.0)

        if hasattr(self, "world"):
            self.run(work())
        self.loop.close()


Leases.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
TestLeases = Leases.TestCase
