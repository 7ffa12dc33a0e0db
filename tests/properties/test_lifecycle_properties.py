"""The properties at the end of the lifecycle's table, under machines that take any legal path."""

from collections import deque
from dataclasses import dataclass
from itertools import combinations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from corral.domain import lease
from corral.domain.fence import Fence
from corral.domain.instance import INSTANCE, LIVE
from corral.domain.sandbox import (
    EVENTS,
    HOLDS_COMPUTE,
    NONE,
    STATES,
    SYSTEM_EVENTS,
    TABLE,
    WITH_INSTANCE,
    decide,
    legal_events,
)
from corral.errors import CorralError


@dataclass(frozen=True)
class World:
    """A sandbox with all that its table promises about, small enough that every reachable one can be visited."""

    state: str = NONE
    remembered: str | None = None
    warming: int = 0
    bound: int = 0
    quota: bool = False
    execs: bool = False
    destroyed: bool = False

    def after(self, step) -> "World":
        """The world once a step is committed, as the services do it."""
        warming, bound = self.warming, self.bound
        if step.condemn:
            warming = bound = 0
        if "create_instance" in step.commands:
            warming += 1
        if step.bind:
            warming, bound = 0, bound + 1  # a pool's warm member, or the one that was made for this sandbox
        quota = (self.quota or "reserve_quota" in step.commands) and "release_quota" not in step.commands
        return World(
            state=step.next_state,
            remembered=step.remembered,
            warming=warming,
            bound=bound,
            quota=quota and step.next_state != "terminated",
            execs=("start_exec" in step.commands or self.execs)
            and not step.end_execs
            and step.row not in ("22", "27", "30b"),
            destroyed=self.destroyed or step.event in ("destroy", "ttl"),
        )

    def check(self, before: "World", step) -> None:
        assert not ("reserve_quota" in step.commands and before.quota), "reserved twice"
        assert not ("release_quota" in step.commands and not before.quota), "returned twice"
        assert self.bound <= 1, "two bound instances"
        assert (self.bound == 1) == (self.state in WITH_INSTANCE), (
            "an instance where there is none, or none where there is one"
        )
        assert not self.quota or self.state in HOLDS_COMPUTE
        if self.state in (*WITH_INSTANCE, "allocating", "provisioning"):
            assert self.quota, "compute without a reservation"
        if self.destroyed:
            assert self.state in ("sanitizing", "terminated")
        if before.state == "terminated":
            assert self.state == "terminated"
        if self.execs:
            assert self.state in ("running", "pausing", "paused", "resuming", "recycling")
        if self.state in ("pausing", "paused", "resuming"):
            assert self.remembered in ("leased", "running", "idle")
        elif self.state == "recycling":
            assert self.remembered in ("soft", "fork")
        else:
            assert self.remembered is None
        owned = before.state in LEASED and before.remembered != "idle" and step.row != "27"  # 27: the system's already
        if owned and self.state not in LEASED:
            assert step.lease == "take_system" or step.condemn, "the lease ended and the old token would still be good"


LEASED = ("leased", "running", "reuse_checking", "pausing", "paused", "resuming")
"""States in which an owner's token is good."""


def conditions(state, remembered, event):
    """Every combination of the conditions that the rows of this pair look at."""
    places = (state, f"{state}:{remembered}")
    rows = [row for row in TABLE if event in row.events and any(place in places for place in row.states)]
    names = sorted({flag.lstrip("!") for row in rows for flag in row.when})
    for size in range(len(names) + 1):
        yield from combinations(names, size)


def steps(state, remembered, events=EVENTS):
    """Every legal step from here, under every combination of conditions."""
    for event in legal_events(state, remembered):
        if event in events:
            for flags in conditions(state, remembered, event):
                try:
                    yield decide(state, event, flags, remembered=remembered)
                except CorralError as error:
                    assert error.code == "illegal_transition"


def test_every_world_that_can_be_reached_keeps_every_promise():
    first = World()
    seen = {first: ()}
    queue = deque([first])
    while queue:
        world = queue.popleft()
        for step in steps(world.state, world.remembered):
            following = world.after(step)
            try:
                following.check(world, step)
            except AssertionError as error:
                raise AssertionError(
                    f"{error}: {[*seen[world], step.row + ' ' + step.event]} -> {following}"
                ) from error
            if following not in seen:
                seen[following] = (*seen[world], f"{step.row} {step.event}")
                queue.append(following)
    assert {world.state for world in seen} == {NONE, *STATES}


class Leases(RuleBasedStateMachine):
    """Two owners and the system over one sandbox, with a clock: tokens never fall, and there is never a second owner."""

    @initialize()
    def create(self):
        self.now = 0
        self.row = lease.first("sbx_x", 0)
        self.incarnation = 1
        self.holders: dict[str, Fence] = {}
        self.tokens = [0]

    @rule(ms=st.integers(0, 700))
    def time_passes(self, ms):
        self.now += ms

    @rule(owner=st.sampled_from("ab"), force=st.booleans())
    def take(self, owner, force):
        name = lease.system_owner(owner) if force else owner
        try:
            self.row = lease.take(self.row, name, 1000, self.now, by_force=force)
        except CorralError as error:
            assert error.code == "lease_held" and self.row.lease_owner != owner and self.now < self.row.expires_at
        else:
            self.holders[name] = Fence(self.incarnation, self.row.lease_version)
        self.tokens.append(self.row.lease_version)

    @rule(owner=st.sampled_from(["a", "b", "system:a"]))
    def renew(self, owner):
        fence = self.holders.get(owner, Fence(0, 0))
        before = self.row
        right = before.lease_owner == owner and fence == Fence(self.incarnation, before.lease_version)
        try:
            self.row, written = lease.renew(before, self.incarnation, owner, fence, 1000, self.now)
        except CorralError as error:
            assert error.code == "lease_lost" and not (right and self.now < before.expires_at)
        else:
            assert right and self.now < before.expires_at
            assert self.row.expires_at >= before.expires_at and 3 * (self.row.expires_at - self.now) >= 2000
            assert written == (self.row != before)
        assert self.row.lease_version == before.lease_version

    @rule()
    def release(self):
        self.row = lease.release(self.row, self.now)
        self.tokens.append(self.row.lease_version)

    @rule()
    def new_instance(self):
        self.incarnation += 1

    @invariant()
    def tokens_never_fall(self):
        assert all(a <= b for a, b in zip(self.tokens, self.tokens[1:], strict=False))

    @invariant()
    def at_most_one_fence_is_good(self):
        current = Fence(self.incarnation, self.row.lease_version)
        assert sum(fence == current for fence in self.holders.values()) <= 1


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


class Instances(RuleBasedStateMachine):
    """Instances of one sandbox under any order of events: what was condemned is never bound again, what is gone stays gone."""

    @initialize()
    def create(self):
        self.states = {"i0": INSTANCE.initial}
        self.condemned: set[str] = set()

    @rule()
    def another(self):
        self.states[f"i{len(self.states)}"] = INSTANCE.initial

    @rule(data=st.data(), event=st.sampled_from(sorted({event for _, event in INSTANCE.table})))
    def event(self, data, event):
        name = data.draw(st.sampled_from(sorted(self.states)))
        before = self.states[name]
        try:
            self.states[name] = INSTANCE.decide(before, event)
        except CorralError as error:
            assert error.code == "illegal_transition"
        if self.states[name] == "condemned":
            self.condemned.add(name)
        if before == "gone":
            assert self.states[name] == "gone"

    @invariant()
    def what_was_condemned_never_serves_again(self):
        assert all(self.states[name] not in LIVE for name in self.condemned)


TestInstances = Instances.TestCase
TestInstances.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def reachable(start, remembered, events):
    """States that the events lead to, under any conditions."""
    seen = {(start, remembered)}
    queue = deque(seen)
    while queue:
        for step in steps(*queue.popleft(), events):
            place = (step.next_state, step.remembered)
            if place not in seen:
                seen.add(place)
                queue.append(place)
    return {state for state, _ in seen}


def places():
    for state in STATES:
        if state == "recycling":
            yield from ((state, "soft"), (state, "fork"))
        elif state in ("pausing", "paused", "resuming"):
            yield from ((state, kept) for kept in ("leased", "running", "idle"))
        else:
            yield state, None


def test_from_every_state_system_events_alone_lead_to_the_end():
    for state, remembered in places():
        assert "terminated" in reachable(state, remembered, SYSTEM_EVENTS), state


def test_after_a_destroy_only_terminated_follows_whatever_comes():
    assert reachable("sanitizing", None, set(EVENTS)) == {"sanitizing", "terminated"}
    assert reachable("terminated", None, set(EVENTS)) == {"terminated"}
