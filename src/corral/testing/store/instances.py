"""Instances, execs, commands and audit rows: what belongs to a sandbox."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from corral.domain.fence import Fence
from corral.domain.records import (
    CommandDone,
    InstanceChange,
    LeaseChange,
    Transition,
)
from corral.errors import CorralError
from corral.testing.store.bench import EVENT, START_MS, Bench, audit, check, everything, key_of, refused


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
    key = key_of(route="POST /v1/sandboxes/sbx_1/execs")
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
    key = key_of(route="POST /v1/sandboxes/sbx_1/execs")
    before = await everything(b)
    for code, parts in (
        ("conflict", {"transition": replace(begun, expect_version=1)}),
        ("lease_lost", {"fence": Fence(0, 2)}),
        ("lease_lost", {"renew": ("you/1", 30_000)}),
        ("not_found", {"tenant_id": "other"}),
    ):
        whole: dict[str, Any] = {"fence": fence, "transition": begun, "renew": ("me/1", 30_000), "idempotency": key}
        await refused(code, b.store.begin_exec(b.exec(), **{**whole, **parts}))
        assert await everything(b) == before, parts
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
    before = await everything(b)
    stale = replace(last, expect_version=2)
    await refused("conflict", b.store.end_exec("exe_1", changes={"state": "ended"}, done=[done], others=stale))
    assert await everything(b) == before
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
