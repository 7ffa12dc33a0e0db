"""Conformance of a store: what `corral.ports.store` promises, as checks without a test framework.

`CHECKS` is a list of `(id, run)`; `await run_check(run, make)` runs one, where `make(clock)` builds an unopened store on an empty
database of its own. `corral.testing.pytest_suites.StoreConformance` wraps them for pytest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from corral.domain.fence import Fence
from corral.domain.records import (
    AuditRecord,
    CommandDone,
    CommandRecord,
    Committed,
    EventRecord,
    ExecRecord,
    Idempotency,
    InstanceChange,
    InstanceRecord,
    LeaseChange,
    RunRecord,
    SandboxRecord,
    Transition,
)
from corral.errors import CorralError
from corral.ports.store import Store

START_MS = 1_700_000_000_000
HARD_JSON: dict[str, Any] = {
    "chinese": "你好，世界",
    "emoji": "🦬👩‍👩‍👧",
    "lone": "a\udc80b\udcff\ud83d",
    "nul": "a\0b",
    "separators": "\u2028\u2029\x7f\x1b[0m",
    "large": 2**200,
    "negative": -(2**63) - 1,
    "float": 0.1,
    "tiny": 5e-324,
    "nested": [[], {}, [None, True, False, [{"a": [1, {"b": ["c"]}]}]]],
    "clé\udcfe": "key",
    "": "empty",
}


class Clock:
    """The store's clock in the hands of a check."""

    def __init__(self) -> None:
        self.now = START_MS

    def __call__(self) -> int:
        return self.now


MakeStore = Callable[[Callable[[], int]], Store]


@dataclass
class Bench:
    """A store under test with its clock, and records to fill it."""

    store: Store
    clock: Clock = field(default_factory=Clock)

    def run(self, run_id: str = "run_1", **columns: Any) -> RunRecord:
        known: dict[str, Any] = {"tenant_id": "default", "owner": "me", "state": "requested", "request": {}}
        return RunRecord(run_id=run_id, **{**known, "created_at": self.clock.now, **columns})

    def sandbox(self, sandbox_id: str = "sbx_1", **columns: Any) -> SandboxRecord:
        known: dict[str, Any] = {
            "tenant_id": "default",
            "state": "requested",
            "runtime": "fake",
            "template_id": "host",
            "template_digest": "sha256:00",
            "resource_class": "python-small",
            "limits": {"memory_bytes": 1},
            "created_at": self.clock.now,
            "last_active_at": self.clock.now,
            "expires_at": self.clock.now + 3_600_000,
        }
        return SandboxRecord(sandbox_id=sandbox_id, **{**known, **columns})

    def instance(self, instance_id: str = "ins_1", **columns: Any) -> InstanceRecord:
        known: dict[str, Any] = {
            "node_id": "node_1",
            "runtime": "fake",
            "template_digest": "sha256:00",
            "resource_class": "python-small",
            "security_level": 1,
            "state": "warming",
            "sandbox_id": None,
            "incarnation": 0,
            "born_at": self.clock.now,
        }
        return InstanceRecord(instance_id=instance_id, **{**known, **columns})

    def exec(self, exec_id: str = "exe_1", sandbox_id: str = "sbx_1", **columns: Any) -> ExecRecord:
        known: dict[str, Any] = {"incarnation": 0, "lease_version": 1, "state": "starting", "spec": {"argv": ["true"]}}
        return ExecRecord(exec_id=exec_id, sandbox_id=sandbox_id, **{**known, "created_at": self.clock.now, **columns})

    def command(self, command_id: str, sandbox_id: str = "sbx_1", **columns: Any) -> CommandRecord:
        known: dict[str, Any] = {"incarnation": 0, "token": 1, "kind": "fence"}
        return CommandRecord(command_id=command_id, sandbox_id=sandbox_id, **{**known, **columns})

    async def made(self, sandbox_id: str = "sbx_1", **columns: Any) -> SandboxRecord:
        """A sandbox in the store, at version 1."""
        record, _ = await self.store.create_sandbox(self.sandbox(sandbox_id, **columns), EVENT, audit())
        return record

    async def step(self, sandbox_id: str = "sbx_1", state: str = "locking", **parts: Any) -> Committed:
        """A transition from whatever version the sandbox has."""
        view = await self.store.get_sandbox(sandbox_id, None)
        assert view is not None
        version = parts.pop("expect_version", view.sandbox.version)
        event = parts.pop("event", replace(EVENT, event_type=state))
        return await self.store.commit_transition(Transition(sandbox_id, version, state, event, **parts))

    async def leased(self, sandbox_id: str = "sbx_1", ttl_ms: int = 30_000) -> Fence:
        """A sandbox in the store whose lease `me/1` holds with token 1."""
        await self.made(sandbox_id)
        done = await self.step(sandbox_id, "leased", lease=LeaseChange("take", "me/1", ttl_ms))
        return Fence(done.sandbox.incarnation, done.lease.lease_version)


EVENT = EventRecord("", "create", None, None)
Check = Callable[[Bench], Awaitable[None]]
CHECKS: list[tuple[str, Check]] = []


def audit(subject: str = "run_1", **columns: Any) -> AuditRecord:
    return AuditRecord(
        **{"tenant_id": "default", "actor": "me", "kind": "run.submitted", "subject": subject, **columns}
    )


def check(run: Check) -> Check:
    """Register a check under its function's name."""
    CHECKS.append((run.__name__, run))
    return run


async def run_check(run: Check, make: MakeStore) -> None:
    """Open, run, close; the store is closed also when the check fails."""
    clock = Clock()
    bench = Bench(make(clock), clock)
    await bench.store.open()
    try:
        await run(bench)
    finally:
        await bench.store.close()


async def refused(code: str, call: Awaitable[Any]) -> CorralError:
    """The error with which the call is refused; AssertionError if it is not, or by another code."""
    try:
        result = await call
    except CorralError as error:
        assert error.code == code, f"expected {code}, got {error}"
        return error
    raise AssertionError(f"expected {code}, got {result!r}")


def _key(key: str = "k", digest: str = "d1", **parts: str) -> Idempotency:
    return Idempotency(**{"tenant_id": "default", "route": "POST /v1/runs", "key": key, "body_digest": digest, **parts})


# -- opening -----------------------------------------------------------------------------------------------------------------------


@check
async def rows_survive_close_and_open(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    installation = await b.store.installation_id()
    assert installation
    await b.store.close()
    await b.store.close()
    await b.store.open()
    await b.store.open()
    assert await b.store.get_run("run_1", "default") == b.run()
    assert await b.store.installation_id() == installation


@check
async def a_closed_store_refuses_every_call(b: Bench) -> None:
    await b.store.close()
    for call in (b.store.get_run("run_1", "default"), b.store.submit_run(b.run(), audit()), b.store.open_runs()):
        assert not (await refused("store_error", call)).retryable


# -- values ------------------------------------------------------------------------------------------------------------------------


@check
async def every_column_of_a_run_comes_back(b: Bench) -> None:
    run = b.run(
        user_id="u",
        session_id="会话",
        sandbox_id="sbx_9",
        incarnation=2,
        lease_version=3,
        exec_id="exe_9",
        attached=True,
        cancel_requested="cancelled",
        decisions=HARD_JSON,
        timings={"queued_ms": 1},
        result=HARD_JSON,
        reason="ok",
        finished_at=7,
        request=HARD_JSON,
        owner="owner 🦬",
    )
    stored, made = await b.store.submit_run(run, audit())
    assert made and stored == run
    assert await b.store.get_run("run_1", "default") == run
    assert await b.store.list_runs("default") == [replace(run, request={})]


@check
async def a_list_of_runs_leaves_out_what_may_be_large(b: Bench) -> None:
    for i in range(120):
        await b.store.submit_run(b.run(f"run_{i:03}", created_at=START_MS + i, request={"code": "x" * 1000}), audit())
        result = {"exit_code": i, "files": ["f"], "timeline": ["t"]}
        await b.store.finish_run(f"run_{i:03}", result=result, reason="ok", timings={"total_ms": i}, audit=audit())
    runs = await b.store.list_runs("default", limit=110)
    assert [run.run_id for run in runs] == [f"run_{i:03}" for i in range(119, 9, -1)]
    assert all(run.request == {} for run in runs)
    assert [run.result for run in runs] == [{"exit_code": i} for i in range(119, 9, -1)]
    assert (await b.store.get_run("run_007", "default")).request == {"code": "x" * 1000}  # type: ignore[union-attr]


@check
async def every_column_of_a_sandbox_comes_back(b: Bench) -> None:
    sandbox = b.sandbox(
        user_id="u",
        session_id="s",
        incarnation=4,
        tainted=True,
        remembered_state="idle",
        conditions=HARD_JSON,
        labels={"a": 1},
        limits=HARD_JSON,
        one_shot=False,
        failure="infra_error",
    )
    stored, made = await b.store.create_sandbox(sandbox, EVENT, audit())
    assert made and stored == sandbox
    view = await b.store.get_sandbox("sbx_1", "default")
    assert view is not None and view.sandbox == sandbox
    assert [v.sandbox for v in await b.store.list_sandboxes(None)] == [sandbox]


@check
async def json_of_every_kind_comes_back(b: Bench) -> None:
    await b.leased()
    event = replace(EVENT, metadata=HARD_JSON, request_id="请求")
    instance = b.instance(ref=HARD_JSON)
    command = b.command("cmd_1", args=HARD_JSON)
    await b.step(
        event=event,
        instances=(InstanceChange("insert", instance),),
        commands=(command,),
        audit=audit("sbx_1", data=HARD_JSON),
    )
    assert (await b.store.history("sbx_1"))[-1].metadata == HARD_JSON
    assert (await b.store.history("sbx_1"))[-1].request_id == "请求"
    assert await b.store.list_instances("node_1") == [instance]
    assert await b.store.open_commands() == [command]
    assert (await b.store.list_audit("default", subject="sbx_1"))[0].data == HARD_JSON
    record, _ = await b.store.create_exec(b.exec(spec=HARD_JSON), Fence(0, 1))
    assert record.spec == HARD_JSON
    assert (await b.store.update_exec("exe_1", expect_states=["starting"], changes={"result": HARD_JSON})).result == (
        HARD_JSON
    )


@check
async def values_are_not_shared_with_the_caller(b: Bench) -> None:
    request: dict[str, Any] = {"list": [1]}
    await b.store.submit_run(b.run(request=request), audit())
    request["list"].append(2)
    first = await b.store.get_run("run_1", "default")
    assert first is not None and first.request == {"list": [1]}
    first.request["list"].append(3)
    second = await b.store.get_run("run_1", "default")
    assert second is not None and second.request == {"list": [1]}


@check
async def what_cannot_be_kept_is_refused(b: Bench) -> None:
    for bad in (
        b.run(request={"x": float("nan")}),
        b.run(request={"x": object()}),
        b.run(owner="a\udc80"),
        b.run(owner="a\0"),
        b.run(finished_at=2**63),
    ):
        await refused("invalid_value", b.store.submit_run(bad, audit()))
    await refused("invalid_value", b.store.submit_run(b.run(), audit(), _key("a\udc80")))
    assert await b.store.open_runs() == [] and await b.store.list_audit("default") == []


@check
async def an_id_that_is_no_unicode_is_unknown(b: Bench) -> None:
    assert await b.store.get_run("run_\udc80", "default") is None
    assert await b.store.get_sandbox("sbx_\udc80", "default") is None
    assert await b.store.get_exec("exe_\udc80", None) is None
    await refused("not_found", b.store.list_runs("default", after="run_\udc80"))
    await refused("not_found", b.store.update_run("run_\udc80", expect_states=["requested"], changes={}))


# -- runs --------------------------------------------------------------------------------------------------------------------------


@check
async def one_idempotency_key_makes_one_run(b: Bench) -> None:
    calls = [b.store.submit_run(b.run(f"run_{i}"), audit(f"run_{i}"), _key()) for i in range(20)]
    answers = await asyncio.gather(*calls)
    assert sum(made for _, made in answers) == 1
    assert len({run.run_id for run, _ in answers}) == 1
    assert len(await b.store.open_runs()) == 1
    assert len(await b.store.list_audit("default")) == 1


@check
async def another_body_under_a_key_is_refused(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit(), _key())
    await refused("idempotency_conflict", b.store.submit_run(b.run("run_2"), audit(), _key(digest="d2")))
    assert len(await b.store.open_runs()) == 1 and len(await b.store.list_audit("default")) == 1
    for other in (_key("k2"), _key(route="POST /v1/sandboxes"), _key(tenant_id="t2")):
        made = b.run(f"run_{other.key}{other.route}{other.tenant_id}", tenant_id=other.tenant_id)
        assert (await b.store.submit_run(made, audit(), other))[1]


@check
async def a_used_key_answers_with_the_run_of_now(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit(), _key())
    await b.store.update_run("run_1", expect_states=["requested"], changes={"state": "running"})
    run, made = await b.store.submit_run(b.run("run_2"), audit(), _key())
    assert not made and run.run_id == "run_1" and run.state == "running"


@check
async def a_used_id_is_a_conflict_and_leaves_nothing(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    await refused("conflict", b.store.submit_run(b.run(owner="other"), audit(), _key()))
    assert len(await b.store.list_audit("default")) == 1
    assert (await b.store.submit_run(b.run("run_2"), audit(), _key()))[1], "the key of a failed submit is free"


@check
async def a_run_changes_only_from_an_expected_state(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    changes = {"state": "running", "decisions": {"plan": "p"}, "attached": True, "cancel_requested": None}
    run = await b.store.update_run(
        "run_1", expect_states=["planning", "requested"], changes=changes, audit=audit(kind="run.started")
    )
    assert (run.state, run.version, run.decisions, run.attached) == ("running", 2, {"plan": "p"}, True)
    assert run == await b.store.get_run("run_1", "default")
    again = b.store.update_run("run_1", expect_states=["requested"], changes={"state": "planning"}, audit=audit())
    assert (await refused("conflict", again)).retryable
    await refused("conflict", b.store.update_run("run_1", expect_states=[], changes={"state": "planning"}))
    assert run == await b.store.get_run("run_1", "default")
    assert [a.kind for a in await b.store.list_audit("default")] == ["run.submitted", "run.started"]
    await refused("not_found", b.store.update_run("run_2", expect_states=["requested"], changes={"state": "x"}))


@check
async def fixed_and_unknown_columns_cannot_be_changed(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    for column in ("run_id", "tenant_id", "version", "created_at", "no_such", "state = 'x' --"):
        try:
            await b.store.update_run("run_1", expect_states=["requested"], changes={column: "x"})
        except ValueError:
            continue
        raise AssertionError(f"{column} was changed")
    assert await b.store.get_run("run_1", "default") == b.run()


@check
async def one_of_many_changes_of_one_state_wins(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())

    async def attempt(number: int) -> bool:
        try:
            await b.store.update_run(
                "run_1", expect_states=["requested"], changes={"state": "planning", "owner": f"w{number}"}
            )
        except CorralError as error:
            assert error.code == "conflict"
            return False
        return True

    assert sum(await asyncio.gather(*(attempt(i) for i in range(20)))) == 1
    run = await b.store.get_run("run_1", "default")
    assert run is not None and run.version == 2


@check
async def a_run_finishes_once(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    b.clock.now += 5
    answers = await asyncio.gather(
        *(
            b.store.finish_run("run_1", result={"n": i}, reason=f"r{i}", timings={"total_ms": i}, audit=audit())
            for i in range(8)
        )
    )
    assert all(answer == answers[0] for answer in answers)
    run = answers[0]
    assert (run.state, run.finished_at, run.version) == ("finished", b.clock.now, 2)
    assert run.result is not None and f"r{run.result['n']}" == run.reason
    assert len(await b.store.list_audit("default")) == 2
    assert await b.store.open_runs() == []
    finish = b.store.finish_run("run_2", result={}, reason="ok", timings={}, audit=audit())
    await refused("not_found", finish)


@check
async def runs_are_paged_newest_first(b: Bench) -> None:
    for i in (3, 1, 4, 0, 2):
        await b.store.submit_run(b.run(f"run_{i}", created_at=START_MS + i // 2), audit())
    await b.store.submit_run(b.run("run_x", tenant_id="t2"), audit())
    seen: list[str] = []
    page = await b.store.list_runs("default", limit=2)
    while page:
        seen += [run.run_id for run in page]
        page = await b.store.list_runs("default", after=seen[-1], limit=2)
    assert seen == ["run_4", "run_3", "run_2", "run_1", "run_0"]
    assert [r.run_id for r in await b.store.open_runs() if r.tenant_id == "default"] == seen[::-1]
    await b.store.update_run("run_3", expect_states=["requested"], changes={"state": "running"})
    assert [r.run_id for r in await b.store.list_runs("default", states=["running", "queued"])] == ["run_3"]
    assert [r.run_id for r in await b.store.list_runs("default", states=["requested"], after="run_3")] == (
        ["run_2", "run_1", "run_0"]
    )
    assert await b.store.list_runs("default", states=[]) == []
    assert await b.store.list_runs("default", limit=0) == [] == await b.store.list_runs("default", limit=-1)
    assert len(await b.store.list_runs("default", limit=2**80)) == 5
    await refused("not_found", b.store.list_runs("default", after="run_x"))


@check
async def a_foreign_tenant_sees_nothing(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    fence = await b.leased()
    await b.store.create_exec(b.exec(), fence)
    assert await b.store.get_run("run_1", "t2") is None
    assert await b.store.get_sandbox("sbx_1", "t2") is None
    assert await b.store.get_exec("exe_1", "t2") is None
    assert await b.store.list_runs("t2") == [] == await b.store.list_audit("t2")
    assert await b.store.list_sandboxes("t2") == []
    await refused("not_found", b.store.create_exec(b.exec("exe_2"), fence, tenant_id="t2"))
    await refused("not_found", b.store.list_sandboxes("t2", after="sbx_1"))
    assert await b.store.get_exec("exe_1", None) == await b.store.get_exec("exe_1", "default") is not None
    assert len(await b.store.list_sandboxes(None)) == 1


# -- sandboxes ---------------------------------------------------------------------------------------------------------------------


@check
async def a_new_sandbox_is_nobodys_and_has_one_event(b: Bench) -> None:
    await b.made()
    view = await b.store.get_sandbox("sbx_1", "default")
    assert view is not None and view.lease is not None and view.instance is None
    assert (view.lease.lease_owner, view.lease.lease_version) == (None, 0)
    [event] = await b.store.history("sbx_1")
    assert (event.sandbox_id, event.event_type, event.old_state, event.new_state) == (
        "sbx_1",
        "create",
        None,
        "requested",
    )
    assert event.timestamp == b.clock.now and event.event_id > 0
    assert len(await b.store.list_audit("default")) == 1


@check
async def one_idempotency_key_makes_one_sandbox(b: Bench) -> None:
    calls = [b.store.create_sandbox(b.sandbox(f"sbx_{i}"), EVENT, audit(), _key()) for i in range(20)]
    answers = await asyncio.gather(*calls)
    assert sum(made for _, made in answers) == 1 and len({s.sandbox_id for s, _ in answers}) == 1
    assert len(await b.store.list_sandboxes("default")) == 1
    await refused("idempotency_conflict", b.store.create_sandbox(b.sandbox("sbx_x"), EVENT, audit(), _key(digest="d2")))
    await refused("conflict", b.store.create_sandbox(answers[0][0], EVENT, audit()))


@check
async def sandboxes_are_paged_with_what_belongs_to_them(b: Bench) -> None:
    for i in range(5):
        b.clock.now += i % 2
        await b.made(f"sbx_{i}")
    await b.step("sbx_3", "ready", instances=(InstanceChange("insert", b.instance(state="bound", sandbox_id="sbx_3")),))
    first = await b.store.list_sandboxes("default", limit=3)
    rest = await b.store.list_sandboxes("default", after=first[-1].sandbox.sandbox_id, limit=3)
    assert [v.sandbox.sandbox_id for v in first + rest] == ["sbx_4", "sbx_3", "sbx_2", "sbx_1", "sbx_0"]
    for view in first + rest:
        assert view == await b.store.get_sandbox(view.sandbox.sandbox_id, "default")
    assert first[1].instance is not None
    assert [v.sandbox.sandbox_id for v in await b.store.list_sandboxes(None, states=["ready"])] == ["sbx_3"]


@check
async def a_transition_happens_whole(b: Bench) -> None:
    await b.made()
    b.clock.now += 9
    done = await b.store.commit_transition(
        Transition(
            "sbx_1",
            1,
            "locking",
            replace(EVENT, event_type="provisioned", request_id="req"),
            changes={"incarnation": 1, "conditions": {"reachable": True}, "labels": {"x": "y"}},
            lease=LeaseChange("take", "me/1", 30_000),
            expect_fence=Fence(0, 0),
            instances=(InstanceChange("insert", b.instance(state="bound", sandbox_id="sbx_1", incarnation=1)),),
            commands=(b.command("cmd_1"), b.command("cmd_2", kind="identify")),
            audit=audit("sbx_1"),
        )
    )
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None and view.sandbox == done.sandbox and view.lease == done.lease
    assert (done.sandbox.state, done.sandbox.version, done.sandbox.incarnation) == ("locking", 2, 1)
    assert done.sandbox.conditions == {"reachable": True}
    lease = done.lease
    assert (lease.lease_owner, lease.lease_version) == ("me/1", 1)
    assert (lease.acquired_at, lease.heartbeat_at, lease.expires_at) == (b.clock.now,) * 2 + (b.clock.now + 30_000,)
    assert view.instance is not None and view.instance.state == "bound"
    assert [c.command_id for c in await b.store.open_commands("sbx_1")] == ["cmd_1", "cmd_2"]
    event = (await b.store.history("sbx_1"))[-1]
    assert (event.event_id, event.old_state, event.new_state) == (done.event_id, "requested", "locking")
    assert len(await b.store.list_audit("default", subject="sbx_1")) == 1


@check
async def a_refused_transition_changes_nothing(b: Bench) -> None:
    fence = await b.leased()
    await b.step(state="running", instances=(InstanceChange("insert", b.instance(state="bound", sandbox_id="sbx_1")),))
    await b.store.create_exec(b.exec(), fence)
    before = await _everything(b)
    whole: dict[str, Any] = {
        "changes": {"labels": {"x": 1}},
        "lease": LeaseChange("take", "other/1", 1000),
        "commands": (b.command("cmd_1"),),
        "end_execs": "sandbox_deleted",
        "audit": audit("sbx_1"),
    }
    second = InstanceChange("insert", b.instance("ins_2", state="bound", sandbox_id="sbx_1"))
    twice = InstanceChange("insert", b.instance("ins_1"))
    missing = InstanceChange("move", instance_id="ins_9", expect=("warm",), state="bound")
    for code, parts in (
        ("conflict", {"expect_version": 1}),
        ("conflict", {"expect_version": 9}),
        ("lease_lost", {"expect_fence": Fence(0, 0)}),
        ("lease_lost", {"expect_fence": Fence(0, 2)}),
        ("lease_lost", {"expect_fence": Fence(1, 1)}),
        ("conflict", {"instances": (second,)}),
        ("conflict", {"instances": (twice,)}),
        ("not_found", {"instances": (missing,)}),
        ("conflict", {"commands": (b.command("cmd_1"), b.command("cmd_1"))}),
        ("illegal_transition", {"changes": {"incarnation": -1}}),
        ("invalid_value", {"changes": {"labels": {"x": float("inf")}}}),
    ):
        await refused(code, b.step(state="sanitizing", **{**whole, **parts}))
        assert await _everything(b) == before, parts
    await refused("not_found", b.store.commit_transition(Transition("sbx_9", 1, "x", EVENT)))


@check
async def steps_of_a_sandbox_happen_together_or_not_at_all(b: Bench) -> None:
    first = Transition("sbx_1", 1, "planning", replace(EVENT, event_type="planning_started"))
    second = Transition("sbx_1", 2, "allocating", replace(EVENT, event_type="planned"), commands=(b.command("cmd_1"),))
    made, fresh = await b.store.create_sandbox(b.sandbox(), EVENT, audit(), _key(), [first, second])
    assert fresh and (made.state, made.version) == ("allocating", 3)
    again, fresh = await b.store.create_sandbox(b.sandbox("sbx_2"), EVENT, audit(), _key(), [first, second])
    assert not fresh and again == made
    third = Transition("sbx_1", 3, "locking", replace(EVENT, event_type="bound"), lease=LeaseChange("take", "me", 1000))
    done = CommandDone(("fence",), "w", {"ok": True}, {"n": 1})
    before = await _everything(b)
    await refused("conflict", b.store.commit_transitions([third, replace(third, new_state="ready")]))
    assert await _everything(b) == before
    mine = tuple(b.command(f"cmd_{n}", args={"n": n}, claimed_by="w") for n in (1, 2))
    foreign = b.command("cmd_4", args={"n": 1}, claimed_by="another")
    more = replace(third, commands=(replace(mine[0], command_id="cmd_3"), mine[1], foreign))
    final = Transition("sbx_1", 4, "ready", replace(EVENT, event_type="ready"), done=(done,))
    left = await b.store.commit_transitions([more, final])
    assert (left.sandbox.state, left.sandbox.version, left.lease.lease_owner) == ("ready", 5, "me")
    types = [(e.event_type, e.old_state, e.new_state) for e in await b.store.history("sbx_1")]
    assert types[1:] == [
        ("planning_started", "requested", "planning"),
        ("planned", "planning", "allocating"),
        ("bound", "allocating", "locking"),
        ("ready", "locking", "ready"),
    ]
    assert [c.command_id for c in await b.store.open_commands("sbx_1")] == ["cmd_1", "cmd_2", "cmd_4"]


async def _everything(b: Bench) -> list[Any]:
    return [
        await b.store.list_sandboxes(None),
        await b.store.list_instances("node_1"),
        await b.store.list_execs("sbx_1"),
        await b.store.open_commands(),
        await b.store.history("sbx_1"),
        await b.store.list_audit("default"),
    ]


@check
async def one_of_many_transitions_of_one_version_wins(b: Bench) -> None:
    await b.made()

    async def attempt(number: int) -> bool:
        try:
            await b.store.commit_transition(
                Transition("sbx_1", 1, "locking", EVENT, lease=LeaseChange("take", f"w/{number}", 1000))
            )
        except CorralError as error:
            assert error.code == "conflict"
            return False
        return True

    assert sum(await asyncio.gather(*(attempt(i) for i in range(20)))) == 1
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None and view.lease is not None
    assert (view.sandbox.version, view.lease.lease_version, len(await b.store.history("sbx_1"))) == (2, 1, 2)


@check
async def a_taint_never_ends(b: Bench) -> None:
    await b.made()
    await b.step(changes={"tainted": True})
    await refused("illegal_transition", b.step(changes={"tainted": False}))
    assert (await b.step(changes={"tainted": True})).sandbox.tainted


@check
async def ending_execs_spares_the_ended_and_keeps_the_first_reason(b: Bench) -> None:
    fence = await b.leased()
    await b.leased("sbx_2")
    for number in range(4):
        await b.store.create_exec(b.exec(f"exe_{number}"), fence)
    await b.store.create_exec(b.exec("exe_other", "sbx_2"), fence)
    await b.store.update_exec("exe_1", expect_states=["starting"], changes={"state": "running"})
    await b.store.update_exec("exe_2", expect_states=["starting"], changes={"state": "ended"})
    await b.store.update_exec("exe_3", expect_states=["starting"], changes={"cancel_requested": "cancelled"})
    await b.step(state="sanitizing", end_execs="sandbox_deleted")
    assert [(e.cancel_requested, e.version) for e in await b.store.list_execs("sbx_1")] == [
        ("sandbox_deleted", 2),
        ("sandbox_deleted", 3),
        (None, 2),
        ("cancelled", 3),
    ]
    assert [e.cancel_requested for e in await b.store.list_execs("sbx_2")] == [None]


@check
async def history_is_in_order_and_event_ids_rise(b: Bench) -> None:
    await b.made()
    await b.made("sbx_2")
    ids = []
    for number in range(6):
        ids.append((await b.step(state=f"s{number}")).event_id)
        ids.append(await b.store.add_event(EventRecord("sbx_2", "condition", None, None, {"n": number}, timestamp=1)))
    assert ids == sorted(set(ids))
    events = await b.store.history("sbx_1")
    assert [e.event_type for e in events] == ["create", *(f"s{i}" for i in range(6))]
    assert [e.old_state for e in events] == [None, "requested", *(f"s{i}" for i in range(5))]
    assert [e.event_type for e in await b.store.history("sbx_1", limit=2)] == ["s4", "s5"]
    assert await b.store.history("sbx_1", limit=0) == []
    others = await b.store.history("sbx_2")
    assert [e.metadata for e in others[1:]] == [{"n": i} for i in range(6)]
    assert all(e.timestamp == b.clock.now for e in others), "the store stamps, not the caller"
    assert await b.store.history("sbx_9") == []
    await refused("not_found", b.store.add_event(EventRecord("sbx_9", "condition", None, None)))


# -- leases ------------------------------------------------------------------------------------------------------------------------


@check
async def tokens_only_rise(b: Bench) -> None:
    await b.made()
    tokens = []
    for lease in (
        LeaseChange("take", "a/1", 1000),
        LeaseChange("take", "b/1", 1000),
        LeaseChange("drop"),
        LeaseChange("take", "system:ttl", 0),
        LeaseChange("take", "system:ttl", 1000),
    ):
        tokens.append((await b.step(lease=lease)).lease.lease_version)
    assert tokens == [1, 2, 3, 4, 5]
    assert (await b.step(lease=LeaseChange("extend", "system:ttl", 5000))).lease.lease_version == 5


@check
async def a_dropped_lease_is_nobodys(b: Bench) -> None:
    fence = await b.leased()
    lease = (await b.step(lease=LeaseChange("drop"))).lease
    assert (lease.lease_owner, lease.lease_version, lease.expires_at) == (None, 2, b.clock.now)
    await refused("lease_lost", b.store.renew_lease("sbx_1", "me/1", fence, 1000))
    await refused("lease_lost", b.store.create_exec(b.exec(), fence))
    await refused("lease_lost", b.step(lease=LeaseChange("extend", None, 1000)))


@check
async def a_transition_extends_a_lease_that_is_held(b: Bench) -> None:
    await b.leased(ttl_ms=1000)
    b.clock.now += 999
    lease = (await b.step(lease=LeaseChange("extend", "me/1", 1000))).lease
    assert (lease.expires_at, lease.heartbeat_at, lease.lease_version) == (b.clock.now + 1000, b.clock.now, 1)
    assert (await b.step(lease=LeaseChange("extend", "me/1", 10))).lease.expires_at == lease.expires_at, "never back"
    await refused("lease_lost", b.step(lease=LeaseChange("extend", "you/1", 1000)))
    b.clock.now = lease.expires_at
    await refused("lease_lost", b.step(lease=LeaseChange("extend", "me/1", 1000)))


@check
async def a_renewal_answers_the_row_and_extends_it_below_two_thirds(b: Bench) -> None:
    fence = await b.leased(ttl_ms=30_000)
    start = b.clock.now
    b.clock.now = start + 10_000  # exactly two thirds are left
    lease = await b.store.renew_lease("sbx_1", "me/1", fence, 30_000)
    assert (lease.expires_at, lease.heartbeat_at) == (start + 30_000, start)
    b.clock.now += 1
    lease = await b.store.renew_lease("sbx_1", "me/1", fence, 30_000)
    assert (lease.expires_at, lease.heartbeat_at) == (b.clock.now + 30_000, b.clock.now)
    assert (lease.lease_version, lease.acquired_at) == (1, start)
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None and view.lease == lease and view.sandbox.version == 2
    assert (await b.store.renew_lease("sbx_1", "me/1", fence, 1)) == lease, "a shorter wish never shortens"


@check
async def a_renewal_after_expiry_fails(b: Bench) -> None:
    fence = await b.leased(ttl_ms=1000)
    b.clock.now += 999
    await b.store.renew_lease("sbx_1", "me/1", fence, 1000)
    b.clock.now += 1000  # the first instant at which it is not held any more
    for _ in range(3):
        await refused("lease_lost", b.store.renew_lease("sbx_1", "me/1", fence, 1000))
        b.clock.now += 1


@check
async def only_the_holder_with_the_current_fence_renews(b: Bench) -> None:
    fence = await b.leased()
    for owner, wrong in (
        ("you/1", fence),
        ("me/1", Fence(fence.incarnation, fence.token - 1)),
        ("me/1", Fence(fence.incarnation, fence.token + 1)),
        ("me/1", Fence(fence.incarnation + 1, fence.token)),
    ):
        assert not (await refused("lease_lost", b.store.renew_lease("sbx_1", owner, wrong, 1000))).retryable
    await refused("not_found", b.store.renew_lease("sbx_9", "me/1", fence, 1000))
    await b.step(changes={"incarnation": 1})
    await refused("lease_lost", b.store.renew_lease("sbx_1", "me/1", fence, 1000))
    await b.store.renew_lease("sbx_1", "me/1", Fence(1, fence.token), 1000)


# -- instances ---------------------------------------------------------------------------------------------------------------------


@check
async def a_warm_instance_is_bound_to_one_sandbox(b: Bench) -> None:
    await b.made("sbx_0")
    await b.step("sbx_0", instances=(InstanceChange("insert", b.instance("ins_w", state="warm")),))
    for i in range(1, 9):
        await b.made(f"sbx_{i}", incarnation=3)
    bind = InstanceChange("move", instance_id="ins_w", expect=("warm",), state="bound", ref={"pid": 7})

    async def claim(number: int) -> str | None:
        try:
            await b.step(f"sbx_{number}", instances=(bind,))
        except CorralError as error:
            assert error.code == "conflict"
            return None
        return f"sbx_{number}"

    winners = [w for w in await asyncio.gather(*(claim(i) for i in range(1, 9))) if w]
    assert len(winners) == 1
    [instance] = await b.store.list_instances("node_1")
    assert (instance.state, instance.sandbox_id, instance.incarnation, instance.ref) == (
        "bound",
        winners[0],
        3,
        {"pid": 7},
    )


@check
async def a_sandbox_has_one_bound_instance(b: Bench) -> None:
    await b.made()
    one = InstanceChange("insert", b.instance("ins_1", state="bound", sandbox_id="sbx_1"))
    await b.step(
        instances=(one, InstanceChange("insert", b.instance("ins_2", sandbox_id="sbx_1", born_at=START_MS + 1)))
    )
    bind = InstanceChange("move", instance_id="ins_2", expect=("warming", "warm"), state="bound")
    await refused("conflict", b.step(instances=(bind,)))
    update = b.store.update_instance("ins_2", expect_states=["warming"], state="bound")
    await refused("conflict", update)
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None and view.instance is not None and view.instance.instance_id == "ins_1"
    condemn = InstanceChange("move", instance_id="ins_1", expect=("bound",), state="condemned")
    await b.step(changes={"incarnation": 1}, instances=(condemn, bind))
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None and view.instance is not None
    assert (view.instance.instance_id, view.instance.incarnation) == ("ins_2", 1)


@check
async def a_condemned_or_gone_instance_never_comes_back(b: Bench) -> None:
    await b.made()
    for state in ("condemned", "gone"):
        name = f"ins_{state}"
        await b.step(instances=(InstanceChange("insert", b.instance(name, state=state, sandbox_id="sbx_1")),))
        for target in ("warming", "warm", "bound"):
            move = InstanceChange("move", instance_id=name, expect=(state,), state=target)
            await refused("conflict", b.step(instances=(move,)))
            await refused("conflict", b.store.update_instance(name, expect_states=[state], state=target))
    gone = await b.store.update_instance("ins_condemned", expect_states=["condemned"], state="gone", ref={"x": 1})
    assert (gone.state, gone.ref) == ("gone", {"x": 1})
    await refused("conflict", b.store.update_instance("ins_condemned", expect_states=["gone"], state="condemned"))


@check
async def an_instance_of_one_sandbox_is_not_bound_to_another(b: Bench) -> None:
    await b.made()
    await b.made("sbx_2")
    await b.step(instances=(InstanceChange("insert", b.instance(sandbox_id="sbx_1")),))
    bind = InstanceChange("move", instance_id="ins_1", expect=("warming",), state="bound")
    await refused("conflict", b.step("sbx_2", instances=(bind,)))
    await b.step("sbx_1", instances=(bind,))
    await b.step("sbx_2", instances=(InstanceChange("insert", b.instance("ins_3", state="warm")),))
    await refused("conflict", b.store.update_instance("ins_3", expect_states=["warm"], state="bound"))


@check
async def an_instance_changes_only_from_an_expected_state(b: Bench) -> None:
    await b.made()
    await b.step(instances=(InstanceChange("insert", b.instance(ref={"a": 1})),))
    warm = await b.store.update_instance("ins_1", expect_states=["warming"], state="warm")
    assert (warm.state, warm.ref) == ("warm", {"a": 1}), "a ref that is not given stays"
    await refused("conflict", b.store.update_instance("ins_1", expect_states=["warming"], state="condemned"))
    await refused("not_found", b.store.update_instance("ins_9", expect_states=["warming"], state="warm"))
    assert await b.store.list_instances("node_1", states=["warm"]) == [warm]
    assert await b.store.list_instances("node_1", states=["bound"]) == [] == await b.store.list_instances("node_2")


@check
async def a_view_shows_the_newest_instance_when_none_is_bound(b: Bench) -> None:
    await b.made()
    records = [
        b.instance("ins_a", sandbox_id="sbx_1", state="condemned", born_at=1),
        b.instance("ins_b", sandbox_id="sbx_1", state="condemned", born_at=3),
        b.instance("ins_c", sandbox_id="sbx_1", state="gone", born_at=4),
    ]
    await b.step(instances=tuple(InstanceChange("insert", r) for r in records))
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None and view.instance == records[1]


# -- execs -------------------------------------------------------------------------------------------------------------------------


@check
async def an_exec_needs_the_current_fence(b: Bench) -> None:
    fence = await b.leased()
    record, made = await b.store.create_exec(b.exec(state="running", lease_version=9), fence)
    assert made and (record.state, record.incarnation, record.lease_version) == ("starting", 0, fence.token)
    assert await b.store.get_exec("exe_1", "default") == record
    for wrong in (Fence(0, 0), Fence(0, 2), Fence(1, 1)):
        await refused("lease_lost", b.store.create_exec(b.exec("exe_2"), wrong))
    await refused("not_found", b.store.create_exec(b.exec("exe_2", "sbx_9"), fence))
    await refused("conflict", b.store.create_exec(b.exec(), fence))
    assert await b.store.list_execs("sbx_1") == [record]


@check
async def one_idempotency_key_makes_one_exec(b: Bench) -> None:
    fence = await b.leased()
    key = _key(route="POST /v1/sandboxes/sbx_1/execs")
    calls = [b.store.create_exec(b.exec(f"exe_{i}"), fence, idempotency=key) for i in range(20)]
    answers = await asyncio.gather(*calls)
    assert sum(made for _, made in answers) == 1 and len({e.exec_id for e, _ in answers}) == 1
    await b.step(lease=LeaseChange("take", "you/1", 1000))
    again, made = await b.store.create_exec(b.exec("exe_x"), fence, idempotency=key)
    assert not made and again == answers[0][0], "a repeated request is answered, whoever holds the lease now"
    other = replace(key, body_digest="d2")
    await refused("idempotency_conflict", b.store.create_exec(b.exec("exe_x"), fence, idempotency=other))
    await refused("lease_lost", b.store.create_exec(b.exec("exe_y"), fence, idempotency=replace(key, key="k2")))
    assert len(await b.store.list_execs("sbx_1")) == 1


@check
async def an_exec_begins_with_its_lease_and_its_transition(b: Bench) -> None:
    fence = await b.leased()
    begun = Transition("sbx_1", 2, "running", replace(EVENT, event_type="exec_requested"))
    key = _key(route="POST /v1/sandboxes/sbx_1/execs")
    before = await _everything(b)
    for code, parts in (
        ("conflict", {"transition": replace(begun, expect_version=1)}),
        ("lease_lost", {"fence": Fence(0, 2)}),
        ("lease_lost", {"renew": ("you/1", 30_000)}),
        ("not_found", {"tenant_id": "other"}),
    ):
        whole: dict[str, Any] = {"fence": fence, "transition": begun, "renew": ("me/1", 30_000), "idempotency": key}
        await refused(code, b.store.begin_exec(b.exec(), **{**whole, **parts}))
        assert await _everything(b) == before, parts
    b.clock.now += 20_000
    record, done = await b.store.begin_exec(b.exec(), fence, begun, renew=("me/1", 30_000), idempotency=key)
    assert record.state == "starting" and done is not None
    assert (done.sandbox.state, done.sandbox.version) == ("running", 3)
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None and (view.sandbox, view.lease) == (done.sandbox, done.lease)
    assert done.lease.expires_at == b.clock.now + 30_000
    again = await b.store.begin_exec(b.exec("exe_x"), fence, begun, renew=("me/1", 30_000), idempotency=key)
    assert again == (record, None)
    await b.store.begin_exec(b.exec("exe_2"), fence, replace(begun, expect_version=3))
    assert [e.exec_id for e in await b.store.open_execs("sbx_1")] == ["exe_1", "exe_2"]


@check
async def the_last_exec_ends_with_the_transition_of_the_last(b: Bench) -> None:
    fence = await b.leased()
    command = b.command("cmd_1", kind="start_exec", args={"exec_id": "exe_1"}, claimed_by="w")
    begun = Transition("sbx_1", 2, "running", replace(EVENT, event_type="exec_requested"), commands=(command,))
    await b.store.begin_exec(b.exec(), fence, begun)
    await b.store.create_exec(b.exec("exe_2"), fence)
    done = CommandDone(("start_exec",), "w", {"ok": True}, {"exec_id": "exe_1"})
    last = Transition("sbx_1", 3, "leased", replace(EVENT, event_type="exec_ended"))
    before = await _everything(b)
    stale = replace(last, expect_version=2)
    await refused("conflict", b.store.end_exec("exe_1", changes={"state": "ended"}, done=[done], others=stale))
    assert await _everything(b) == before
    ended = await b.store.end_exec("exe_1", changes={"state": "ended", "result": {"x": 1}}, done=[done], last=last)
    assert (ended.state, ended.result, ended.version) == ("ended", {"x": 1}, 2)
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None and view.sandbox.state == "running", "another one is open"
    assert not await b.store.open_commands("sbx_1")
    await refused("conflict", b.store.end_exec("exe_1", changes={"state": "lost"}, last=last))
    await refused("not_found", b.store.end_exec("exe_9", changes={"state": "lost"}, last=last))
    await b.store.end_exec("exe_2", changes={"state": "ended"}, last=last, others=stale)
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None and (view.sandbox.state, view.sandbox.version) == ("leased", 4)


@check
async def execs_are_listed_oldest_first(b: Bench) -> None:
    fence = await b.leased()
    await b.leased("sbx_2")
    for number in (2, 0, 1):
        await b.store.create_exec(b.exec(f"exe_{number}", created_at=START_MS + number), fence)
    await b.store.create_exec(b.exec("exe_z", "sbx_2", created_at=START_MS), fence)
    await b.store.update_exec("exe_1", expect_states=["starting"], changes={"state": "running", "started_at": 5})
    done = await b.store.update_exec("exe_0", expect_states=["starting"], changes={"state": "ended", "result": {}})
    assert (done.version, done.result) == (2, {})
    await refused("conflict", b.store.update_exec("exe_0", expect_states=["running"], changes={"state": "lost"}))
    await refused("not_found", b.store.update_exec("exe_9", expect_states=["running"], changes={"state": "lost"}))
    assert [e.exec_id for e in await b.store.list_execs("sbx_1")] == ["exe_0", "exe_1", "exe_2"]
    assert [e.exec_id for e in await b.store.open_execs("sbx_1")] == ["exe_1", "exe_2"]
    assert [e.exec_id for e in await b.store.open_execs()] == ["exe_z", "exe_1", "exe_2"]


# -- commands ----------------------------------------------------------------------------------------------------------------------


@check
async def commands_are_locked_oldest_first_by_one_worker(b: Bench) -> None:
    await b.made()
    await b.step(commands=tuple(b.command(f"cmd_{9 - i}", kind="ab"[i % 2]) for i in range(6)))
    only = await b.store.lock_command("w0", 1000, kinds=["b"])
    assert only is not None and (only.command_id, only.attempt, only.claimed_by) == ("cmd_8", 1, "w0")
    assert only.claim_until == b.clock.now + 1000
    locked = await asyncio.gather(*(b.store.lock_command(f"w{i}", 1000) for i in range(1, 9)))
    assert sorted(c.command_id for c in locked if c) == ["cmd_4", "cmd_5", "cmd_6", "cmd_7", "cmd_9"]
    assert await b.store.lock_command("w9", 1000) is None
    assert await b.store.lock_command("w9", 1000, kinds=[]) is None
    assert [c.command_id for c in await b.store.open_commands()] == [f"cmd_{9 - i}" for i in range(6)]
    assert await b.store.open_commands("sbx_9") == []


@check
async def a_command_has_one_outcome(b: Bench) -> None:
    await b.made()
    await b.step(commands=(b.command("cmd_1"),))
    assert not await b.store.finish_command("cmd_1", "w1", {"early": True}), "nobody has locked it"
    await b.store.lock_command("w1", 1000)
    assert not await b.store.finish_command("cmd_1", "w2", {"other": True})
    results = await asyncio.gather(*(b.store.finish_command("cmd_1", "w1", {"n": i}) for i in range(8)))
    assert sum(results) == 1
    assert await b.store.open_commands() == []
    b.clock.now += 10_000
    assert await b.store.lock_command("w2", 1000) is None
    await refused("not_found", b.store.finish_command("cmd_9", "w1", {}))


@check
async def a_claim_that_runs_out_passes_to_another_worker(b: Bench) -> None:
    await b.made()
    await b.step(commands=(b.command("cmd_1"),))
    await b.store.lock_command("w1", 1000)
    b.clock.now += 999
    assert await b.store.lock_command("w2", 1000) is None
    b.clock.now += 1
    second = await b.store.lock_command("w2", 1000)
    assert second is not None and (second.attempt, second.claimed_by) == (2, "w2")
    assert not await b.store.finish_command("cmd_1", "w1", {"late": True})
    b.clock.now += 5000
    assert await b.store.finish_command("cmd_1", "w2", {"done": True}), "run out, but nobody else took it"


@check
async def a_command_may_be_inserted_locked(b: Bench) -> None:
    await b.made()
    mine = b.command("cmd_1", claimed_by="w1", claim_until=b.clock.now + 500)
    await b.step(commands=(mine, b.command("cmd_2", claimed_by="w1"), b.command("cmd_3", done_at=5, outcome={"x": 1})))
    first = await b.store.lock_command("w2", 1000)
    assert first is not None and (first.command_id, first.done_at, first.outcome) == ("cmd_3", None, None)
    assert await b.store.lock_command("w2", 1000) is None
    assert [c.attempt for c in await b.store.open_commands()] == [1, 1, 1]
    assert await b.store.finish_command("cmd_1", "w1", {})
    b.clock.now += 3_600_000
    orphan = await b.store.lock_command("w2", 1000)
    assert orphan is not None and (orphan.command_id, orphan.attempt) == ("cmd_2", 2), "no claim lasts for ever"


# -- audit -------------------------------------------------------------------------------------------------------------------------


@check
async def audit_rows_are_stamped_and_in_order(b: Bench) -> None:
    ids = []
    for number in range(5):
        b.clock.now += 1
        ids.append(await b.store.add_audit(audit(f"s{number % 2}", data={"n": number}, audit_id=99, timestamp=1)))
    await b.store.add_audit(audit("s0", tenant_id="t2"))
    rows = await b.store.list_audit("default")
    assert [r.audit_id for r in rows] == ids == sorted(set(ids))
    assert [r.data["n"] for r in rows] == [0, 1, 2, 3, 4]
    assert [r.timestamp for r in rows] == [START_MS + i for i in range(1, 6)]
    assert [r.data["n"] for r in await b.store.list_audit("default", subject="s0")] == [0, 2, 4]
    assert [r.data["n"] for r in await b.store.list_audit("default", limit=2)] == [3, 4]


# -- cancellation ------------------------------------------------------------------------------------------------------------------


@check
async def a_cancelled_caller_does_not_disturb_others(b: Bench) -> None:
    tasks = [asyncio.ensure_future(b.store.submit_run(b.run(f"run_{i}"), audit())) for i in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(a, asyncio.CancelledError) for a in answers[::2])
    assert all(isinstance(a, tuple) and a[1] for a in answers[1::2])
    await b.store.submit_run(b.run("run_last"), audit())
    stored = {run.run_id for run in await b.store.open_runs()}
    assert {f"run_{i}" for i in range(1, 20, 2)} | {"run_last"} <= stored
    assert len(await b.store.list_audit("default")) == len(stored), "each of them whole"
