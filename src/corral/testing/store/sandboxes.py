"""Sandboxes: a transition happens whole, one wins, and history has it in order."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from corral.domain.fence import Fence
from corral.domain.records import (
    CommandDone,
    EventRecord,
    InstanceChange,
    LeaseChange,
    Transition,
)
from corral.errors import CorralError
from corral.testing.store.bench import EVENT, Bench, audit, check, everything, key_of, refused


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
    calls = [b.store.create_sandbox(b.sandbox(f"sbx_{i}"), EVENT, audit(), key_of()) for i in range(20)]
    answers = await asyncio.gather(*calls)
    assert sum(made for _, made in answers) == 1 and len({s.sandbox_id for s, _ in answers}) == 1
    assert len(await b.store.list_sandboxes("default")) == 1
    await refused(
        "idempotency_conflict", b.store.create_sandbox(b.sandbox("sbx_x"), EVENT, audit(), key_of(digest="d2"))
    )
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
    before = await everything(b)
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
        assert await everything(b) == before, parts
    await refused("not_found", b.store.commit_transition(Transition("sbx_9", 1, "x", EVENT)))


@check
async def steps_of_a_sandbox_happen_together_or_not_at_all(b: Bench) -> None:
    first = Transition("sbx_1", 1, "planning", replace(EVENT, event_type="planning_started"))
    second = Transition("sbx_1", 2, "allocating", replace(EVENT, event_type="planned"), commands=(b.command("cmd_1"),))
    made, fresh = await b.store.create_sandbox(b.sandbox(), EVENT, audit(), key_of(), [first, second])
    assert fresh and (made.state, made.version) == ("allocating", 3)
    again, fresh = await b.store.create_sandbox(b.sandbox("sbx_2"), EVENT, audit(), key_of(), [first, second])
    assert not fresh and again == made
    third = Transition("sbx_1", 3, "locking", replace(EVENT, event_type="bound"), lease=LeaseChange("take", "me", 1000))
    done = CommandDone(("fence",), "w", {"ok": True}, {"n": 1})
    before = await everything(b)
    await refused("conflict", b.store.commit_transitions([third, replace(third, new_state="ready")]))
    assert await everything(b) == before
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
    assert [c.command_id for c in await b.store.open_commands("sbx_1")] == ["cmd_1", "cmd_2"], "whoever has locked it"


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
