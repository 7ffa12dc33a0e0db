"""The properties at the end of the lifecycle's table, under machines that take any legal path."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from corral.domain import lease
from corral.domain.fence import Fence
from corral.domain.instance import INSTANCE
from corral.domain.sandbox import (
    EVENTS,
    FLAGS,
    HOLDS_COMPUTE,
    NONE,
    STATES,
    SYSTEM_EVENTS,
    WITH_INSTANCE,
    decide,
    legal_events,
)
from corral.errors import CorralError

ALL_FLAGS = st.frozensets(st.sampled_from(FLAGS))


class Lifecycle(RuleBasedStateMachine):
    """A sandbox with its instances and lease, driven by whatever events the table takes, as the services commit them."""

    @initialize()
    def create(self):
        step = decide(NONE, "create")
        self.state, self.remembered = step.next_state, None
        self.now = 0
        self.row = lease.first("sbx_x", 0)
        self.incarnation = 0
        self.instances: dict[str, str] = {}
        self.quota = True
        self.destroyed = False
        self.open_execs = 0
        self.tokens = [0]
        self.history = [self.state]

    def bound(self):
        return [name for name, state in self.instances.items() if state == "bound"]

    @rule(data=st.data(), flags=ALL_FLAGS)
    def event(self, data, flags):
        events = legal_events(self.state, self.remembered)
        self.take(data.draw(st.sampled_from(events)), flags)

    @rule(event=st.sampled_from(EVENTS), flags=ALL_FLAGS)
    def any_event(self, event, flags):
        self.take(event, flags)

    @rule(ms=st.integers(0, 5000))
    def time_passes(self, ms):
        self.now += ms

    @rule(owner=st.sampled_from("ab"))
    def renew(self, owner):
        before = self.row
        try:
            self.row, _ = lease.renew(
                before, self.incarnation, owner, Fence(self.incarnation, before.lease_version), 1000, self.now
            )
        except CorralError as error:
            assert error.code == "lease_lost"
            assert before.lease_owner != owner or self.now >= before.expires_at
        else:
            assert self.row.expires_at > self.now and self.row.expires_at >= before.expires_at

    @precondition(lambda self: self.bound())
    @rule()
    def a_condemned_instance_is_not_bound_again(self):
        for name, state in self.instances.items():
            if state in ("condemned", "gone"):
                try:
                    INSTANCE.decide(state, "bind")
                except CorralError:
                    continue
                raise AssertionError(name)

    def take(self, event, flags):
        try:
            step = decide(self.state, event, flags, remembered=self.remembered, history=self.history)
        except CorralError as error:
            assert error.code == "illegal_transition" and error.facts["history"] == self.history
            return
        if step.condemn:
            for name in self.instances:
                if self.instances[name] in ("warming", "bound"):
                    self.instances[name] = INSTANCE.decide(self.instances[name], "condemn")
        if "create_instance" in step.commands:
            self.incarnation += 1
            self.instances[f"i{self.incarnation}"] = "warming"
        if step.bind:
            warming = [name for name, state in self.instances.items() if state == "warming"]
            if not warming:
                self.incarnation += 1
                warming = [f"i{self.incarnation}"]
                self.instances[warming[0]] = "warm"
            self.instances[warming[0]] = INSTANCE.decide(self.instances[warming[0]], "bind")
        if step.lease == "take":
            self.row = lease.take(self.row, "a", 1000, self.now, by_force=True)
        elif step.lease == "take_system":
            self.row = lease.take(self.row, lease.system_owner(event), 1000, self.now, by_force=True)
        self.tokens.append(self.row.lease_version)
        if "reserve_quota" in step.commands:
            assert not self.quota, "reserved twice"
            self.quota = True
        if "release_quota" in step.commands or step.next_state == "terminated":
            self.quota = False
        if "start_exec" in step.commands:
            self.open_execs += 1
        if step.end_execs:
            self.open_execs = 0
        if event in ("destroy", "ttl"):
            self.destroyed = True
        assert step.next_state in STATES
        self.state, self.remembered = step.next_state, step.remembered
        self.history = [*self.history[-20:], self.state]

    @invariant()
    def tokens_never_fall(self):
        assert all(a <= b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        self.tokens = self.tokens[-2:]

    @invariant()
    def at_most_one_bound_instance(self):
        assert len(self.bound()) <= 1

    @invariant()
    def an_instance_is_behind_every_state_that_says_so_and_no_other(self):
        assert (len(self.bound()) == 1) == (self.state in WITH_INSTANCE), (self.state, self.instances)

    @invariant()
    def quota_is_held_only_where_compute_may_be(self):
        if self.quota:
            assert self.state in HOLDS_COMPUTE
        if self.state in WITH_INSTANCE or self.state in ("allocating", "provisioning"):
            assert self.quota, self.history

    @invariant()
    def after_a_destroy_only_the_end_follows(self):
        if self.destroyed:
            assert self.state in ("sanitizing", "terminated")

    @invariant()
    def no_exec_is_open_where_none_can_run(self):
        if self.state in ("sanitizing", "terminated", "lost", "failed", "hibernated"):
            assert self.open_execs == 0

    @invariant()
    def what_is_remembered_fits_the_state(self):
        if self.state in ("pausing", "paused", "resuming"):
            assert self.remembered in ("leased", "running", "idle")
        elif self.state == "recycling":
            assert self.remembered in ("soft", "fork")
        else:
            assert self.remembered is None


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def reachable(start, remembered, events):
    """States that the events lead to, each under the most favourable conditions."""
    seen = {(start, remembered)}
    queue = deque(seen)
    while queue:
        state, kept = queue.popleft()
        for event in legal_events(state, kept):
            if event not in events:
                continue
            for flags in FLAG_SETS:
                try:
                    step = decide(state, event, flags, remembered=kept)
                except CorralError:
                    continue
                place = (step.next_state, step.remembered)
                if place not in seen:
                    seen.add(place)
                    queue.append(place)
    return {state for state, _ in seen}


FLAG_SETS = [frozenset(), *(frozenset({flag}) for flag in FLAGS), frozenset(FLAGS), frozenset(FLAGS) - {"tainted", "expired"},
             frozenset({"attempts_left", "retryable"})]  # fmt: skip


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


def test_every_state_can_be_reached():
    assert reachable(NONE, None, set(EVENTS)) == {NONE, *STATES}
