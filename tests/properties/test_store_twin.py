"""The SQLite store and its twin in memory answer every sequence of calls alike, refusals included."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from corral.adapters.store.memory import MemoryStore
from corral.adapters.store.migrate import ensure
from corral.adapters.store.sqlite import SqliteStore
from corral.domain.fence import Fence
from corral.domain.quota import PRIORITIES, Amounts, Ceiling, QuotaRules, TenantLimits
from corral.domain.records import EventRecord, Idempotency, InstanceChange, LeaseChange, Transition
from corral.domain.webhook import NewWebhook
from corral.errors import CorralError
from corral.ports.queue import Charge, Entry, Ticket
from corral.testing.store import Bench, Clock, audit


@cache
def empty_database() -> tuple[Path, Any]:
    """A database with its tables, and the directory that goes with the process."""
    directory = tempfile.TemporaryDirectory(prefix="corral-twin-")
    path = Path(directory.name) / "empty.db"
    ensure(path)
    return path, directory


def few(prefix: str, count: int = 3) -> st.SearchStrategy[str]:
    return st.sampled_from([f"{prefix}_{i}" for i in range(count)])


RUN_STATES = st.sampled_from(["requested", "running", "finished"])
INSTANCE_STATES = st.sampled_from(["warming", "warm", "bound", "condemned", "gone"])
SANDBOX_STATES = st.sampled_from(["requested", "ready", "leased", "sanitizing", "terminated"])
EXEC_STATES = st.sampled_from(["starting", "running", "ended", "lost"])
TEXT = st.one_of(st.sampled_from(["你好", "🦬", "a\udc80", "x\0"]), st.text(max_size=3))
JSON = st.dictionaries(
    st.text(max_size=2), st.one_of(st.integers(), st.none(), TEXT, st.lists(TEXT, max_size=2)), max_size=2
)
TENANTS = st.sampled_from(["default", "t2"])
OWNERS = st.sampled_from(["a/1", "b/1", "system:ttl"])
FENCES = st.builds(Fence, st.integers(0, 2), st.integers(0, 5))
KEYS = st.none() | st.builds(Idempotency, TENANTS, st.just("r"), st.sampled_from(["k1", "k2"]), st.sampled_from("de"))
LEASES = st.none() | st.builds(LeaseChange, st.sampled_from(["take", "extend", "drop"]), OWNERS, st.integers(0, 100))
EVENT = EventRecord("", "e", None, None)
ROOMS = st.builds(Amounts, sandboxes=st.just(1), cpu=st.sampled_from([1, 500]), memory=st.sampled_from([1, 2]))
RULES = QuotaRules(Ceiling(running=2, memory=4), {"*": TenantLimits(Ceiling(queued=2, sandboxes=2), 0.5)})


class Twins(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory(prefix="corral-twin-")
        path = Path(self.directory.name) / "corral.db"
        shutil.copy(empty_database()[0], path)
        self.clock = Clock()
        self.both = [Bench(SqliteStore(path, self.clock), self.clock), Bench(MemoryStore(self.clock), self.clock)]
        for bench in self.both:
            self.loop.run_until_complete(bench.store.open())
        self.tokens: dict[str, int] = {}
        self.last_event = 0

    def teardown(self) -> None:
        for bench in self.both:
            self.loop.run_until_complete(bench.store.close())
        self.loop.close()
        self.directory.cleanup()

    def alike(self, call: Callable[[Bench], Any]) -> Any:
        answers = []
        for bench in self.both:
            try:
                answers.append(self.loop.run_until_complete(call(bench)))
            except CorralError as error:
                answers.append((error.code, error.retryable))
            except (ValueError, TypeError) as error:
                answers.append((type(error), str(error)))
        assert answers[0] == answers[1]
        return answers[0]

    @rule(ms=st.integers(1, 60))
    def time_passes(self, ms: int) -> None:
        self.clock.now += ms

    @rule(run_id=few("run"), tenant=TENANTS, request=JSON, key=KEYS, owner=TEXT)
    def submit_run(self, **a: Any) -> None:
        columns = {"tenant_id": a["tenant"], "request": a["request"], "owner": a["owner"]}
        self.alike(lambda b: b.store.submit_run(b.run(a["run_id"], **columns), audit(a["run_id"]), a["key"]))

    @rule(run_id=few("run"), expect=st.lists(RUN_STATES, max_size=2), state=RUN_STATES, timings=JSON)
    def update_run(self, run_id: str, expect: list[str], state: str, timings: dict[str, Any]) -> None:
        changes = {"state": state, "timings": timings}
        self.alike(lambda b: b.store.update_run(run_id, expect_states=expect, changes=changes, audit=audit()))

    @rule(run_id=few("run"), tenant=TENANTS, key=KEYS, hooked=st.booleans())
    def submit_run_with_a_ticket(self, run_id: str, tenant: str, key: Idempotency | None, hooked: bool) -> None:
        ticket = Ticket(RULES, NewWebhook(f"whd_{run_id}", "https://a.example/") if hooked else None)
        self.alike(lambda b: b.store.submit_run(b.run(run_id, tenant_id=tenant), audit(run_id), key, ticket))

    @rule(
        run_id=few("run"),
        room=ROOMS,
        priority=st.sampled_from(PRIORITIES),
        cost=st.integers(1, 50),
        wait=st.integers(1, 99),
    )
    def place_run(self, run_id: str, room: Amounts, priority: str, cost: int, wait: int) -> None:
        entry = Entry(f"sbx_{run_id[-1]}", room, cost, priority, wait)
        self.alike(lambda b: b.store.place_run(run_id, changes={"attached": True}, entry=entry, rules=RULES))

    @rule(count=st.integers(0, 3))
    def admit(self, count: int) -> None:
        self.alike(lambda b: b.store.admit(RULES, [f"sbx_{i}" for i in range(count)]))

    @rule(
        worker=st.sampled_from(["w1", "w2"]), limit=st.integers(0, 2), state=st.sampled_from(["pending", "failed", "x"])
    )
    def deliver(self, worker: str, limit: int, state: str) -> None:
        self.alike(lambda b: b.store.due_deliveries())
        for each in self.alike(lambda b: b.store.claim_deliveries(worker, 20, limit)):
            self.alike(
                lambda b, e=each: b.store.delivery_tried(e.delivery_id, worker, state=state, retry_ms=5, error="e")
            )

    @rule(mend=st.booleans())
    def drift(self, mend: bool) -> None:
        def told(found: Any) -> Any:
            return sorted((each.kind, each.subject) for each in found)

        async def both(b: Bench) -> Any:
            return told(await (b.store.mend_quota() if mend else b.store.quota_drift()))

        self.alike(both)
        for tenant in ("default", "t2", "*"):
            self.alike(lambda b, t=tenant: b.store.tenant_use(t))
            self.alike(lambda b, t=tenant: b.store.list_queue(t, limit=2))
        self.alike(lambda b: b.store.waiting())
        self.alike(lambda b: b.store.queued_run("run_1", "default"))
        self.alike(lambda b: b.store.delivery_of("run_1", "default"))

    @rule(sandbox_id=few("sbx"), tenant=TENANTS, room=ROOMS)
    def create_sandbox_with_a_charge(self, sandbox_id: str, tenant: str, room: Amounts) -> None:
        made = lambda b: b.sandbox(sandbox_id, tenant_id=tenant)  # noqa: E731
        self.alike(lambda b: b.store.create_sandbox(made(b), EVENT, audit(), None, (), Charge(room, RULES)))

    @rule(run_id=few("run"), result=JSON)
    def finish_run(self, run_id: str, result: dict[str, Any]) -> None:
        self.alike(lambda b: b.store.finish_run(run_id, result=result, reason="ok", timings={}, audit=audit()))

    @rule(sandbox_id=few("sbx"), tenant=TENANTS, key=KEYS, labels=JSON)
    def create_sandbox(self, sandbox_id: str, tenant: str, key: Idempotency | None, labels: dict[str, Any]) -> None:
        self.alike(
            lambda b: b.store.create_sandbox(
                b.sandbox(sandbox_id, tenant_id=tenant, labels=labels), EVENT, audit(sandbox_id), key
            )
        )

    @rule(data=st.data(), sandbox_id=few("sbx"), state=SANDBOX_STATES, lease=LEASES, fence=st.none() | FENCES)
    def commit_transition(self, data: Any, sandbox_id: str, state: str, lease: Any, fence: Fence | None) -> None:
        view = self.alike(lambda b: b.store.get_sandbox(sandbox_id, None))
        version = (view.sandbox.version if view else 1) + data.draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
        if fence is not None and view and data.draw(st.booleans()):
            fence = Fence(view.sandbox.incarnation, view.lease.lease_version)
        changes = data.draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "incarnation": st.integers(0, 2),
                    "tainted": st.booleans(),
                    "conditions": JSON,
                    "failure": st.none() | TEXT,
                    "state": st.just("x"),
                },
            )
        )
        if data.draw(st.integers(0, 9)):
            changes.pop("state", None)
        bench = self.both[0]
        inserts = st.builds(
            lambda i, s, sb: InstanceChange("insert", bench.instance(i, state=s, sandbox_id=sb)),
            few("ins", 4),
            INSTANCE_STATES,
            st.none() | few("sbx"),
        )
        moves = st.builds(
            lambda i, e, s, r: InstanceChange("move", None, i, tuple(e), s, r),
            few("ins", 4),
            st.lists(INSTANCE_STATES, max_size=3),
            INSTANCE_STATES,
            st.none() | JSON,
        )
        commands = st.builds(
            lambda c, w, k: bench.command(c, sandbox_id, claimed_by=w, kind=k),
            few("cmd", 5),
            st.none() | st.just("w1"),
            st.sampled_from("ab"),
        )
        transition = Transition(
            sandbox_id,
            version,
            state,
            replace(EVENT, metadata=data.draw(JSON)),
            changes,
            lease,
            fence,
            tuple(data.draw(st.lists(inserts | moves, max_size=2))),
            tuple(data.draw(st.lists(commands, max_size=2))),
            data.draw(st.none() | st.just("sandbox_deleted")),
            data.draw(st.none() | st.just(audit(sandbox_id))),
        )
        self.alike(lambda b: b.store.commit_transition(transition))

    @rule(sandbox_id=few("sbx"), metadata=JSON)
    def add_event(self, sandbox_id: str, metadata: dict[str, Any]) -> None:
        self.alike(lambda b: b.store.add_event(EventRecord(sandbox_id, "condition", None, None, metadata)))

    @rule(sandbox_id=few("sbx"), owner=OWNERS, ttl=st.integers(0, 100), fence=FENCES, current=st.booleans())
    def renew_lease(self, sandbox_id: str, owner: str, ttl: int, fence: Fence, current: bool) -> None:
        view = self.alike(lambda b: b.store.get_sandbox(sandbox_id, None))
        if current and view:
            fence = Fence(view.sandbox.incarnation, view.lease.lease_version)
            owner = view.lease.lease_owner or owner
        self.alike(lambda b: b.store.renew_lease(sandbox_id, owner, fence, ttl))

    @rule(instance_id=few("ins", 4), expect=st.lists(INSTANCE_STATES, max_size=3), state=INSTANCE_STATES)
    def update_instance(self, instance_id: str, expect: list[str], state: str) -> None:
        self.alike(lambda b: b.store.update_instance(instance_id, expect_states=expect, state=state))

    @rule(data=st.data(), exec_id=few("exe", 4), sandbox_id=few("sbx"), key=KEYS, tenant=TENANTS)
    def create_exec(self, data: Any, exec_id: str, sandbox_id: str, key: Idempotency | None, tenant: str) -> None:
        view = self.alike(lambda b: b.store.get_sandbox(sandbox_id, tenant))
        fence = data.draw(FENCES)
        if view and data.draw(st.booleans()):
            fence = Fence(view.sandbox.incarnation, view.lease.lease_version)
        # A key is of one route, and so of one kind of thing.
        key = replace(key, route="exec") if key else None
        self.alike(lambda b: b.store.create_exec(b.exec(exec_id, sandbox_id), fence, idempotency=key, tenant_id=tenant))

    @rule(exec_id=few("exe", 4), expect=st.lists(EXEC_STATES, max_size=3), state=EXEC_STATES)
    def update_exec(self, exec_id: str, expect: list[str], state: str) -> None:
        self.alike(lambda b: b.store.update_exec(exec_id, expect_states=expect, changes={"state": state}))

    @rule(worker=st.sampled_from(["w1", "w2"]), claim=st.integers(0, 100), kinds=st.none() | st.just(["a"]))
    def lock_command(self, worker: str, claim: int, kinds: list[str] | None) -> None:
        self.alike(lambda b: b.store.lock_command(worker, claim, kinds=kinds))

    @rule(command_id=few("cmd", 5), worker=st.sampled_from(["w1", "w2"]), outcome=JSON)
    def finish_command(self, command_id: str, worker: str, outcome: dict[str, Any]) -> None:
        self.alike(lambda b: b.store.finish_command(command_id, worker, outcome))

    @rule(
        tenant=TENANTS,
        after=st.none() | few("sbx"),
        limit=st.integers(-1, 4),
        states=st.none() | st.lists(SANDBOX_STATES),
    )
    def lists(self, tenant: str, after: str | None, limit: int, states: list[str] | None) -> None:
        self.alike(lambda b: b.store.list_sandboxes(tenant, states=states, after=after, limit=limit))
        run = after.replace("sbx", "run") if after else None
        self.alike(lambda b: b.store.list_runs(tenant, after=run, limit=limit))
        self.alike(lambda b: b.store.list_audit(tenant, subject=after, limit=limit))
        self.alike(lambda b: b.store.history("sbx_0", limit=limit))

    @invariant()
    def same_rows_and_safe(self) -> None:
        views = self.alike(lambda b: b.store.list_sandboxes(None))
        instances = self.alike(lambda b: b.store.list_instances("node_1"))
        self.alike(lambda b: b.store.open_runs())
        self.alike(lambda b: b.store.open_commands())
        self.alike(lambda b: b.store.open_execs())
        bound = [i.sandbox_id for i in instances if i.state == "bound"]
        assert len(bound) == len(set(bound)) and None not in bound
        events: list[int] = []
        for view in views:
            name = view.sandbox.sandbox_id
            assert view.lease.lease_version >= self.tokens.get(name, 0), "a token never falls"
            self.tokens[name] = view.lease.lease_version
            history = [e.event_id for e in self.alike(lambda b, name=name: b.store.history(name))]
            assert history == sorted(history)
            events += history
        assert len(events) == len(set(events)) and max(events, default=0) >= self.last_event
        self.last_event = max(events, default=0)


Twins.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTwins = Twins.TestCase
TestTwins.pytestmark = [pytest.mark.timeout(900)]  # a failure is worth being shrunk
