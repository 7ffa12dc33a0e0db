"""The order of the queue: no tenant starves, shares follow weights, nobody is over a ceiling, whatever comes in whatever order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from corral.adapters.store.memory import MemoryStore
from corral.domain.queue import (
    AGEING_MS,
    Head,
    Waiting,
    choose,
    cost_of,
    expected_ms,
    finish_of,
    overtime,
    place_of,
    priority_of,
    rate_of,
    start_of,
    units,
)
from corral.domain.quota import PRIORITIES, Amounts, Ceiling, QuotaRules, TenantLimits
from corral.domain.records import Idempotency
from corral.errors import CorralError
from corral.ports.queue import Charge, Entry, Ticket
from corral.testing.store import Bench, Clock, audit
from corral.testing.store.bench import EVENT

ONE = Amounts(running=1, sandboxes=1, cpu=1000, memory=1)


@dataclass
class Line:
    """A tenant that always has something queued."""

    weight: float
    cost: int
    finish: int = 0
    served: int = 0
    starts: list[int] = field(default_factory=list)


def rules(lines: dict[str, Line], host: Ceiling | None = None) -> QuotaRules:
    return QuotaRules(host or Ceiling(), {name: TenantLimits(weight=line.weight) for name, line in lines.items()})


def serve(lines: dict[str, Line], rounds: int, clock: int = 0) -> int:
    """Admit `rounds` runs of tenants that all wait all the time."""
    order = rules(lines)
    for turn in range(rounds):
        waiting = [
            Waiting(name, line.finish, Amounts(), Head(f"{name}{turn}", turn, line.cost, ONE))
            for name, line in lines.items()
        ]
        pick = choose(waiting, clock, Amounts(), order)
        assert pick is not None
        line = lines[pick.tenant_id]
        clock = start_of(clock, line.finish)
        line.finish = finish_of(clock, line.cost, line.weight)
        line.served += line.cost
        line.starts.append(turn)
    return clock


LINES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(Line, st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0]), st.integers(1000, 50_000)),
    min_size=2,
    max_size=6,
)


@given(LINES, st.integers(50, 400))
def test_each_gets_its_share_up_to_one_run(lines: dict[str, Line], rounds: int) -> None:
    serve(lines, rounds)
    longest = {name: line.cost / line.weight for name, line in lines.items()}
    for a, one in lines.items():
        for b, other in lines.items():
            gap = abs(one.served / one.weight - other.served / other.weight)
            assert gap <= longest[a] + longest[b] + rounds, (
                "the bound of start-time fair queueing, and what was rounded"
            )


@given(LINES, st.integers(1, 200))
def test_nobody_starves(lines: dict[str, Line], before: int) -> None:
    clock = serve(lines, before)
    lines["late"] = Line(0.5, 50_000)
    start, others = start_of(clock, 0), [line for name, line in lines.items() if name != "late"]
    serve_more = sum(
        int((start - line.finish) * line.weight // line.cost) + 2 for line in others if line.finish <= start
    )
    serve(lines, serve_more + len(others) + 1, clock)
    assert lines["late"].starts, "it begins where the others are, so each has at most a run or two before it"


@given(
    st.lists(
        st.builds(
            Waiting,
            st.sampled_from("abcdefgh"),
            st.integers(0, 10**6),
            st.builds(Amounts, running=st.integers(0, 5), cpu=st.integers(0, 5000)),
            st.builds(
                Head, st.uuids().map(str), st.integers(0, 100), st.integers(1, 1000),
                st.builds(Amounts, running=st.just(1), cpu=st.integers(1, 4000)),
            ),
        ),
        max_size=8,
        unique_by=lambda each: each.tenant_id,
    ),
    st.integers(0, 10**6),
    st.builds(Amounts, running=st.integers(0, 10), cpu=st.integers(0, 10_000)),
    st.builds(Ceiling, running=st.none() | st.integers(1, 10), cpu=st.none() | st.integers(1, 10_000)),
    st.builds(Ceiling, running=st.none() | st.integers(1, 5), cpu=st.none() | st.integers(1, 6000)),
)  # fmt: skip
def test_who_is_chosen_fits_and_nobody_that_fits_comes_before(waiting, clock, everybody, host, each) -> None:
    order = QuotaRules(host, {"*": TenantLimits(each)})
    pick = choose(waiting, clock, everybody, order)
    able = [w for w in waiting if each.passed(w.use, w.head.demand) is None]
    if pick is None:
        first = min(able, key=lambda w: (start_of(clock, w.finish), w.head.place, w.tenant_id), default=None)
        assert first is None or host.passed(everybody, first.head.demand) is not None
        return
    assert pick in able and order.passed(pick.tenant_id, pick.use, everybody, pick.head.demand) is None
    assert all(start_of(clock, pick.finish) <= start_of(clock, w.finish) for w in able)
    assert choose(list(reversed(waiting)), clock, everybody, order) is pick


@given(st.integers(0, 2**45), st.integers(0, 2**45), st.sampled_from(PRIORITIES), st.sampled_from(PRIORITIES))
def test_priority_counts_until_the_lower_one_has_waited_long(at: int, later: int, a: str, b: str) -> None:
    assert priority_of(at, place_of(at, a)) == a
    ahead = PRIORITIES.index(a) < PRIORITIES.index(b)
    if ahead and at - later < AGEING_MS:
        assert (
            place_of(at, a) < place_of(later, b)
            or at > later + AGEING_MS * (PRIORITIES.index(b) - PRIORITIES.index(a)) - 1
        )
    if a == b and at < later:
        assert place_of(at, a) < place_of(later, b)


@given(st.integers(1, 64_000), st.integers(1, 2**40), st.none() | st.floats(0.001, 10**6), st.floats(0.001, 86_400))
def test_costs_are_positive_and_pay_for_the_time_that_was_said(cpu: int, memory: int, expected, wall: float) -> None:
    demand = Amounts(running=1, sandboxes=1, cpu=cpu, memory=memory)
    cost = cost_of(demand, expected, wall)
    assert cost >= 1
    paid = expected_ms(demand, cost)
    assert paid + 1 >= min(max(expected, 0.01) if expected is not None else 10.0, wall) * 1000
    assert paid <= wall * 1000 + 1 / units(demand) + 1
    assert overtime(rate_of(demand, 1.0), -5) == 0
    assert overtime(rate_of(demand, 1.0), 1000) >= units(demand) * 1000 - 1


TENANTS = st.sampled_from(["a", "b", "c"])
ROOM = st.builds(
    Amounts, sandboxes=st.just(1), cpu=st.sampled_from([500, 1000, 2000]), memory=st.sampled_from([1, 512, 1024])
)
RULES = QuotaRules(
    Ceiling(running=4, cpu=6000, memory=4096),
    {
        "*": TenantLimits(Ceiling(queued=4, running=2, sandboxes=3)),
        "b": TenantLimits(Ceiling(running=3, memory=2048), 2.0),
    },
)


class Held(RuleBasedStateMachine):
    """Runs and sandboxes that come and go on every path; a crash is that whatever would have come next does not."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        clock = Clock()
        self.b = Bench(MemoryStore(clock), clock)
        self.do(self.b.store.open())
        self.runs: dict[str, str] = {}
        self.rooms: dict[str, Amounts] = {}
        self.sandboxes: dict[str, str] = {}
        self.count = 0

    def do(self, work):
        try:
            return self.loop.run_until_complete(work)
        except CorralError as error:
            return error

    def teardown(self) -> None:
        self.do(self.b.store.close())
        self.loop.close()

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}_{self.count:04}"

    def some(self, data, names):
        return data.draw(st.sampled_from(sorted(names))) if names else None

    @rule(tenant=TENANTS, key=st.none() | st.sampled_from("xyz"))
    def submit(self, tenant: str, key: str | None) -> None:
        name = self.fresh("run")
        idem = None if key is None else Idempotency(tenant, "r", key, "d")
        made = self.do(self.b.store.submit_run(self.b.run(name, tenant_id=tenant), audit(name), idem, Ticket(RULES)))
        if isinstance(made, CorralError):
            assert made.code == "queue_full" and tenant != "b"
        elif made[1]:
            self.runs[name] = tenant

    @rule(data=st.data(), room=ROOM, priority=st.sampled_from(PRIORITIES), timeout_ms=st.sampled_from([1, 10**6]))
    def place(self, data, room: Amounts, priority: str, timeout_ms: int) -> None:
        if (name := self.some(data, self.runs)) is not None:
            entry = Entry(f"sbx_of_{name}", room, 1000, priority, timeout_ms)
            placed = self.do(self.b.store.place_run(name, changes={}, entry=entry, rules=RULES))
            if not isinstance(placed, CorralError):
                self.rooms[name] = room

    @rule(count=st.integers(1, 4))
    def admit(self, count: int) -> None:
        self.do(self.b.store.admit(RULES, [self.fresh("sbx") for _ in range(count)]))

    @rule(data=st.data())
    def finish(self, data) -> None:
        if (name := self.some(data, self.runs)) is not None:
            self.do(self.b.store.finish_run(name, result={}, reason="ok", timings={}, audit=audit(name)))

    @rule(data=st.data())
    def make_the_sandbox_of_a_run(self, data) -> None:
        if (name := self.some(data, self.rooms)) is None:
            return
        run = self.do(self.b.store.get_run(name, self.runs[name]))
        if run.sandbox_id is not None and run.sandbox_id not in self.sandboxes:
            self.make(run.sandbox_id, run.tenant_id, self.rooms[name])

    @rule(tenant=TENANTS, room=ROOM)
    def make_a_sandbox(self, tenant: str, room: Amounts) -> None:
        self.make(self.fresh("sbx"), tenant, room)

    def make(self, sandbox_id: str, tenant: str, room: Amounts) -> None:
        record = self.b.sandbox(sandbox_id, tenant_id=tenant)
        made = self.do(self.b.store.create_sandbox(record, EVENT, audit(), None, (), Charge(room, RULES)))
        if isinstance(made, CorralError):
            assert made.code == "quota_exceeded"
        else:
            self.sandboxes[sandbox_id] = tenant

    @rule(data=st.data(), state=st.sampled_from(["leased", "failed", "lost", "sanitizing", "terminated", "terminated"]))
    def move_a_sandbox(self, data, state: str) -> None:
        name = self.some(data, self.sandboxes)
        if name is not None:
            view = self.do(self.b.store.get_sandbox(name, None))
            if view.sandbox.state != "terminated":
                self.do(self.b.step(name, state))

    @rule(ms=st.integers(1, 5000))
    def time_passes(self, ms: int) -> None:
        self.b.clock.now += ms

    @invariant()
    def what_is_reserved_is_what_is_live(self) -> None:
        assert self.do(self.b.store.quota_drift()) == []

    @invariant()
    def nobody_is_over_a_ceiling(self) -> None:
        total = Amounts()
        for tenant in ("a", "b", "c"):
            use = self.do(self.b.store.tenant_use(tenant)).use
            total = total + use
            assert RULES.of(tenant).ceiling.passed(use - use, use) is None, (tenant, use)
        assert self.do(self.b.store.tenant_use("*")).use == total
        assert RULES.host.passed(Amounts(), total) is None


Held.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


TestHeld = Held.TestCase
