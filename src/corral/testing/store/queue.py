"""Queue and quota: room is held from the transaction that needs it to the one that ends it, once; the next run is the fair one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from corral.domain.quota import Amounts, Ceiling, QuotaRules, TenantLimits
from corral.domain.records import RunRecord
from corral.ports.queue import Charge, Entry, Ticket
from corral.testing.store.bench import EVENT, Bench, audit, check, key_of, refused

ROOM = Amounts(sandboxes=1, cpu=1000, memory=512)
NEVER_MS = 10**9


def rules(host: Ceiling | None = None, weights: dict[str, float] | None = None, **most: int) -> QuotaRules:
    """The same ceiling for every tenant, `host` for all together."""
    tenants = {"*": TenantLimits(Ceiling(**most))}
    tenants |= {name: TenantLimits(Ceiling(**most), weight) for name, weight in (weights or {}).items()}
    return QuotaRules(host or Ceiling(), tenants)


async def submitted(b: Bench, run_id: str, limits: QuotaRules, **columns: Any) -> RunRecord:
    run, _ = await b.store.submit_run(b.run(run_id, **columns), audit(run_id), None, Ticket(limits))
    return run


async def placed(
    b: Bench,
    run_id: str,
    limits: QuotaRules,
    *,
    cost: int = 1000,
    priority: str = "normal",
    timeout_ms: int = NEVER_MS,
    amounts: Amounts = ROOM,
    **columns: Any,
) -> RunRecord:
    """A run that is submitted and ready to start."""
    await submitted(b, run_id, limits, **columns)
    entry = Entry(f"sbx_of_{run_id}", amounts, cost, priority, timeout_ms)
    return await b.store.place_run(run_id, changes={"decisions": {"plan": run_id}}, entry=entry, rules=limits)


async def finished(b: Bench, *run_ids: str) -> None:
    for run_id in run_ids:
        await b.store.finish_run(run_id, result={}, reason="ok", timings={}, audit=audit(run_id))


async def admitted(b: Bench, limits: QuotaRules, count: int = 1) -> list[str]:
    runs = await b.store.admit(limits, [f"sbx_{b.clock.now}_{i}" for i in range(count)])
    assert all(run.state == "starting" and run.sandbox_id for run in runs)
    return [run.run_id for run in runs]


async def held(b: Bench, tenant_id: str = "default") -> Amounts:
    assert await b.store.quota_drift() == []
    return (await b.store.tenant_use(tenant_id)).use


async def in_turn(b: Bench, limits: QuotaRules, running: Sequence[str], count: int) -> list[str]:
    """Who is admitted when the running ones end one by one."""
    order, running = [], list(running)
    for _ in range(count):
        await finished(b, running.pop(0))
        order += (now := await admitted(b, limits))
        running += now
    return order


@check
async def a_run_that_finds_room_starts_in_the_same_transaction(b: Bench) -> None:
    run = await placed(b, "run_1", rules(running=1))
    assert (run.state, run.sandbox_id, run.decisions) == ("starting", "sbx_of_run_1", {"plan": "run_1"})
    assert await held(b) == Amounts(running=1) + ROOM == await held(b, "*")
    assert await b.store.waiting() == 0 and await b.store.queued_run("run_1", "default") is None


@check
async def a_run_without_room_waits_and_is_admitted_when_there_is(b: Bench) -> None:
    limits = rules(running=1)
    await placed(b, "run_1", limits)
    run = await placed(b, "run_2", limits)
    assert (run.state, run.sandbox_id) == ("queued", None)
    assert await held(b) == Amounts(queued=1, running=1) + ROOM
    assert await admitted(b, limits) == []
    await finished(b, "run_1")
    b.clock.now += 5
    assert await admitted(b, limits) == ["run_2"]
    assert (await held(b)).running == 1 and await b.store.waiting() == 0
    again = await b.store.get_run("run_2", "default")
    assert again is not None and again.decisions == {"plan": "run_2"} and again.sandbox_id == "sbx_1700000000005_0"


@check
async def a_finished_run_holds_nothing_whatever_state_it_was_in(b: Bench) -> None:
    limits = rules(running=1)
    await submitted(b, "run_0", limits)
    await placed(b, "run_1", limits)
    await placed(b, "run_2", limits)
    await finished(b, "run_0", "run_1", "run_2", "run_2", "run_1")
    assert await held(b) == Amounts() == await held(b, "*")
    assert await b.store.waiting() == 0


@check
async def a_sandbox_holds_its_room_until_nothing_of_it_is_left(b: Bench) -> None:
    run = await placed(b, "run_1", rules())
    made = b.sandbox(run.sandbox_id or "")
    await b.store.create_sandbox(made, EVENT, audit(), None, (), Charge(ROOM, rules(), "run_1"))
    assert await held(b) == Amounts(running=1) + ROOM, "its run held it already"
    await finished(b, "run_1")
    assert await held(b) == ROOM
    for state in ("sanitizing", "failed", "lost"):
        await b.step(made.sandbox_id, state)
    assert await held(b) == ROOM
    await b.step(made.sandbox_id, "terminated")
    assert await held(b) == Amounts()


@check
async def a_sandbox_that_ends_before_its_run_is_returned_once(b: Bench) -> None:
    run = await placed(b, "run_1", rules())
    await b.store.create_sandbox(
        b.sandbox(run.sandbox_id or ""), EVENT, audit(), None, (), Charge(ROOM, rules(), "run_1")
    )
    await b.step(run.sandbox_id or "", "terminated")
    assert await held(b) == Amounts(running=1)
    await finished(b, "run_1")
    assert await held(b) == Amounts()


@check
async def a_sandbox_without_room_is_refused_and_leaves_nothing(b: Bench) -> None:
    limits = rules(sandboxes=2, host=Ceiling(memory=1300))
    for name in ("sbx_1", "sbx_2"):
        await b.store.create_sandbox(b.sandbox(name), EVENT, audit(), None, (), Charge(ROOM, limits))
    third = b.store.create_sandbox(b.sandbox("sbx_3"), EVENT, audit(), key_of(), (), Charge(ROOM, limits))
    error = await refused("quota_exceeded", third)
    assert error.retryable and error.facts["limit"] == "tenants.sandboxes" and error.facts["retry_after_s"] > 0
    assert await b.store.get_sandbox("sbx_3", None) is None
    other = b.sandbox("sbx_4", tenant_id="t2")
    error = await refused(
        "quota_exceeded", b.store.create_sandbox(other, EVENT, audit(), None, (), Charge(ROOM, limits))
    )
    assert error.facts["limit"] == "capacity.memory"
    await b.step("sbx_1", "terminated")
    made, fresh = await b.store.create_sandbox(b.sandbox("sbx_3"), EVENT, audit(), key_of(), (), Charge(ROOM, limits))
    assert fresh and made.sandbox_id == "sbx_3", "the key of a refused call is free"
    assert await held(b) == ROOM + ROOM


@check
async def a_key_is_charged_once(b: Bench) -> None:
    limits = rules(queued=1, sandboxes=1)
    for _ in range(3):
        await b.store.submit_run(b.run(), audit(), key_of(), Ticket(limits))
        sandbox = b.sandbox(), EVENT, audit(), key_of(route="POST /v1/sandboxes"), ()
        await b.store.create_sandbox(*sandbox, Charge(ROOM, limits))
    assert await held(b) == Amounts(queued=1) + ROOM


@check
async def more_than_the_depth_is_refused(b: Bench) -> None:
    limits = rules(queued=2, running=1)
    await placed(b, "run_1", limits)
    await placed(b, "run_2", limits)
    await submitted(b, "run_3", limits)
    error = await refused("queue_full", b.store.submit_run(b.run("run_4"), audit(), key_of(), Ticket(limits)))
    assert error.retryable and error.facts["retry_after_s"] > 0
    await submitted(b, "run_5", limits, tenant_id="t2")
    await finished(b, "run_3")
    assert (await b.store.submit_run(b.run("run_4"), audit(), key_of(), Ticket(limits)))[1]


@check
async def a_tenant_at_its_ceiling_holds_up_nobody_else(b: Bench) -> None:
    limits = rules(running=1)
    for i in range(3):
        await placed(b, f"run_{i}", limits, tenant_id="greedy")
    assert (await placed(b, "run_9", limits, tenant_id="modest")).state == "starting"
    assert (await b.store.tenant_use("greedy")).waiting == 2


@check
async def nobody_overtakes_the_next_one_where_the_host_is_full(b: Bench) -> None:
    limits = rules(host=Ceiling(cpu=2000))
    await placed(b, "run_1", limits, tenant_id="a")
    big = Amounts(sandboxes=1, cpu=2000, memory=1)
    assert (await placed(b, "run_2", limits, tenant_id="b", amounts=big)).state == "queued"
    assert (await placed(b, "run_3", limits, tenant_id="c", cost=1)).state == "queued"
    await finished(b, "run_1")
    assert await admitted(b, limits, 5) == ["run_2"]
    await finished(b, "run_2")
    assert await admitted(b, limits, 5) == ["run_3"]


@check
async def tenants_share_in_proportion_to_their_weights(b: Bench) -> None:
    limits = rules(host=Ceiling(running=1), weights={"heavy": 3.0, "light": 1.0})
    await placed(b, "run_first", limits, tenant_id="other")
    for i in range(12):
        b.clock.now += 1
        await placed(b, f"run_l{i:02}", limits, tenant_id="light")
    for i in range(12):
        await placed(b, f"run_h{i:02}", limits, tenant_id="heavy")
    order = await in_turn(b, limits, ["run_first"], 12)
    heavy = sum(name.startswith("run_h") for name in order)
    assert heavy == 9, order
    assert [name for name in order if name.startswith("run_l")] == ["run_l00", "run_l01", "run_l02"]


@check
async def a_tenant_that_comes_late_has_no_credit_and_no_debt(b: Bench) -> None:
    limits = rules(host=Ceiling(running=1))
    await placed(b, "run_a0", limits, tenant_id="a")
    for i in range(1, 9):
        await placed(b, f"run_a{i}", limits, tenant_id="a")
    last = (await in_turn(b, limits, ["run_a0"], 4))[-1]
    for i in range(4):
        await placed(b, f"run_b{i}", limits, tenant_id="b")
    order = await in_turn(b, limits, [last], 6)
    assert [name[4] for name in order] in (list("bababa"), list("ababab")), order


@check
async def what_a_run_lasts_longer_than_it_said_is_charged(b: Bench) -> None:
    limits = rules(host=Ceiling(running=1))
    await placed(b, "run_a0", limits, tenant_id="a", cost=10)
    for i in range(1, 4):
        await placed(b, f"run_a{i}", limits, tenant_id="a", cost=10)
        await placed(b, f"run_b{i}", limits, tenant_id="b", cost=1000)
    b.clock.now += 5000
    assert (await in_turn(b, limits, ["run_a0"], 3)) == ["run_b1", "run_b2", "run_b3"]


@check
async def priority_then_order_within_a_tenant(b: Bench) -> None:
    limits = rules(running=1)
    await placed(b, "run_0", limits)
    for i, priority in enumerate(["low", "normal", "high", "normal", "high", "low"], 1):
        b.clock.now += 1
        await placed(b, f"run_{i}", limits, priority=priority)
    queue = await b.store.list_queue("default")
    assert [each.run_id for each in queue] == ["run_3", "run_5", "run_2", "run_4", "run_1", "run_6"]
    assert [each.priority for each in queue] == ["high", "high", "normal", "normal", "low", "low"]
    assert [each.position for each in queue] == [1, 2, 3, 4, 5, 6]
    assert await b.store.queued_run("run_4", "default") == queue[3]
    assert await b.store.still_queued(["run_0", "run_4", "run_x"]) == {"run_4"}
    assert await b.store.queued_run("run_4", "t2") is None and await b.store.list_queue("t2") == []
    assert await in_turn(b, limits, ["run_0"], 6) == [each.run_id for each in queue]


@check
async def a_run_of_low_priority_does_not_wait_for_ever(b: Bench) -> None:
    limits = rules(running=1)
    await placed(b, "run_0", limits)
    await placed(b, "run_low", limits, priority="low")
    b.clock.now += 1_200_001
    await placed(b, "run_high", limits, priority="high")
    assert [each.run_id for each in await b.store.list_queue("default")] == ["run_low", "run_high"]


@check
async def a_run_whose_time_is_over_is_not_admitted(b: Bench) -> None:
    limits = rules(running=1)
    await placed(b, "run_1", limits)
    await placed(b, "run_2", limits, timeout_ms=100)
    await placed(b, "run_3", limits)
    queued = await b.store.queued_run("run_2", "default")
    assert queued is not None and queued.deadline_at == b.clock.now + 100
    b.clock.now += 100
    await finished(b, "run_1")
    assert await admitted(b, limits, 5) == ["run_3"]
    await finished(b, "run_2", "run_3")
    assert await held(b) == Amounts()


@check
async def a_run_is_placed_once_and_by_its_driver(b: Bench) -> None:
    limits = rules()
    await submitted(b, "run_1", limits, driver="w1")
    entry = Entry("sbx_x", ROOM, 1)
    await refused("superseded", b.store.place_run("run_1", changes={}, entry=entry, rules=limits, driver="w2"))
    await b.store.place_run("run_1", changes={}, entry=entry, rules=limits, driver="w1")
    await refused("conflict", b.store.place_run("run_1", changes={}, entry=entry, rules=limits, driver="w1"))
    await refused("not_found", b.store.place_run("run_9", changes={}, entry=entry, rules=limits))
    assert await held(b) == Amounts(running=1) + ROOM


@check
async def many_at_once_never_hold_more_than_there_is(b: Bench) -> None:
    limits = rules(host=Ceiling(running=3), running=2)

    async def one(i: int) -> RunRecord:
        return await placed(b, f"run_{i:02}", limits, tenant_id=f"t{i % 3}")

    runs = await asyncio.gather(*(one(i) for i in range(24)))
    assert sum(run.state == "starting" for run in runs) == 3
    running = [run.run_id for run in runs if run.state == "starting"]
    ended = 0
    while running:
        assert len(running) <= 3
        await asyncio.gather(*(finished(b, run_id) for run_id in running))
        ended += len(running)
        assert await held(b, "*") == Amounts(queued=24 - ended)
        b.clock.now += 1
        lots = await asyncio.gather(
            *(b.store.admit(limits, [f"sbx_{b.clock.now}_{w}_{i}" for i in range(4)]) for w in "xyz")
        )
        running = [run.run_id for lot in lots for run in lot]
    assert ended == 24
    assert await held(b, "*") == Amounts()


@check
async def drift_is_told_and_mended(b: Bench) -> None:
    limits = rules()
    await b.store.submit_run(b.run("run_1"), audit("run_1"))  # as by a version that counted nothing
    [drift] = await b.store.quota_drift()
    assert (drift.kind, drift.subject) == ("not_reserved", "run_1")
    await finished(b, "run_1")
    run = await placed(b, "run_2", limits)
    await b.store.update_run("run_2", expect_states=["starting"], changes={"state": "finished"})  # returns nothing
    found = {(each.kind, each.subject) for each in await b.store.quota_drift()}
    assert found == {("no_holder", "run_2"), ("no_holder", run.sandbox_id)}
    assert await b.store.mend_quota() and await b.store.mend_quota() == []
    assert await held(b) == Amounts() == await held(b, "*")
