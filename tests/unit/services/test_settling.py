"""Settling is done over until it is known what it shows: nodes, stores and workers that go away delay it and end nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.services import control, floors, leases, settling
from corral.services.events import Caller

from .cluster import Cluster
from .test_leases import attach, code, made, settled, state_of, with_lease


class Away:
    """A node whose process does not answer: calls fail after a while, as over the wire, or hang until it is back."""

    def __init__(self, node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs = False
        self.back = asyncio.Event()
        self.back.set()
        self.calls = 0
        for name in ("fence", "empty_directories", "instances", "remember_event", "destroy"):
            monkeypatch.setattr(node, name, self._guarded(getattr(node, name)))

    def _guarded(self, real: Any) -> Any:
        async def call(*args: Any, **more: Any) -> Any:
            self.calls += not self.back.is_set()
            if self.hangs:
                await self.back.wait()
            elif not self.back.is_set():
                raise CorralError("node_unavailable", "the node does not answer")
            return await real(*args, **more)

        return call

    def goes(self, *, hangs: bool = False) -> None:
        self.hangs = hangs
        self.back.clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "SETTLE_S", 0.15)
    monkeypatch.setattr(settling, "ANSWER_S", 0.05)
    monkeypatch.setattr(settling, "CLAIM_MS", 400)
    monkeypatch.setattr(control, "LOOK_AGAIN_S", (0.05,))


@pytest.fixture
def away(world, monkeypatch) -> Away:
    return Away(world.node, monkeypatch)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await cluster.start("a")
    await cluster.start("b")
    yield cluster
    await cluster.stop()


async def used(world: Any) -> tuple[str, str, str]:
    """(sandbox, its instance, the lease): somebody has it, and has left something in /tmp."""
    box = await made(world)
    [instance] = world.node.live
    lease = (await attach(world, box)).document["lease"]
    world.node.tmp[instance] = ["/tmp/a", "/workspace/kept"]
    return box, instance, lease


async def release(world: Any, box: str, lease: str) -> None:
    answer = await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", lease, {})
    assert (answer.status, answer.document["state"]) == (200, "recycling"), answer.document


async def clean(world: Any, box: str, instance: str) -> None:
    view = await world.store.get_sandbox(box, None)
    assert (view.sandbox.state, view.sandbox.tainted) == ("idle", False)
    assert world.node.tmp[instance] == ["/workspace/kept"] and world.node.destroyed == []
    assert [c.kind for c in await world.store.open_commands(box)] == []
    assert await world.store.environment_version(box) == 2, "settled once"


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_node_that_is_away_for_longer_than_a_settling_may_take_delays_it(world, until, away, quick, hangs):
    box, instance, lease = await used(world)
    away.goes(hangs=hangs)
    await release(world, box, lease)
    await until(lambda: away.calls)
    await asyncio.sleep(1.0)  # several times as long as one attempt, and as the claim
    assert await state_of(world, box) == "recycling"
    away.back.set()
    await settled(world, box, until)
    await clean(world, box, instance)


async def test_what_hangs_in_the_sandbox_while_the_node_answers_is_its_end(world, until, quick, monkeypatch):
    box, _, lease = await used(world)
    tries = 0

    async def hangs(*_: Any, **__: Any) -> None:
        nonlocal tries
        tries += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(world.node, "empty_directories", hangs)
    await release(world, box, lease)
    await settled(world, box, until, "terminated")
    assert tries == settling.SLOW and (await world.store.get_sandbox(box, None)).sandbox.tainted
    assert any("it took too long" in line for line in world.logged)


@pytest.mark.parametrize("why", ["fence", "empty_directories"])
async def test_what_cannot_be_ended_or_removed_is_the_sandbox_s_end(world, until, monkeypatch, why):
    box, _, lease = await used(world)

    async def fails(*_: Any, **__: Any) -> None:
        raise CorralError("infra_error", "something cannot be killed", retryable=False)

    monkeypatch.setattr(world.node, why, fails)
    await release(world, box, lease)
    await settled(world, box, until, "terminated")
    assert (await world.store.get_sandbox(box, None)).sandbox.tainted


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_claim_is_held_for_as_long_as_the_node_is_away_and_no_other_worker_interferes(
    two, until, monkeypatch, quick, hangs
):
    a = two.workers["a"]
    box, instance, lease = await used(a)
    away = Away(two.node, monkeypatch)
    away.goes(hangs=hangs)
    await release(a, box, lease)
    [command] = await two.store.open_commands(box)
    row = two.store._commands[command.command_id]
    two.store._commands[command.command_id] = {
        **row,
        "claim_until": two.now_ms() + 400,
    }  # as if it had begun a while ago
    await asyncio.sleep(1.5)  # `stale_s` is 0.2 s here, the claim 0.4 s
    [command] = await two.store.open_commands(box)
    assert (command.kind, command.claimed_by, command.attempt) == ("settle", "w_a", 1)
    assert command.claim_until > two.now_ms(), "it is held on"
    away.back.set()
    await settled(a, box, until)
    await clean(a, box, instance)


@pytest.mark.parametrize("how", ["killed", "frozen", "left"])
@pytest.mark.parametrize("stage", ["fence", "empty_directories"])
async def test_a_settling_whose_worker_stops_is_done_over_by_another(two, until, monkeypatch, how, stage):
    a, b = two.workers["a"], two.workers["b"]
    box, instance, lease = await used(a)
    real, reached, gate = getattr(two.node, stage), asyncio.Event(), asyncio.Event()

    async def stops_once(*args: Any, **more: Any) -> Any:
        if not reached.is_set():
            reached.set()
            await gate.wait()
        return await real(*args, **more)

    monkeypatch.setattr(two.node, stage, stops_once)
    await release(a, box, lease)
    await asyncio.wait_for(reached.wait(), 10)
    match how:
        case "killed":
            await two.kill("a")
        case "frozen":
            two.freeze("a")
        case "left":
            await two.workers.pop("a").services.stop(0.1, hand_on=True)
    await settled(b, box, until)
    await clean(b, box, instance)
    lease = (await attach(b, box, "s/2")).document["lease"]
    two.node.tmp[instance].append("/tmp/of-the-next")
    gate.set()
    if how == "frozen":
        await until(lambda: not a.services.leases._settling._under_way)
    assert two.node.tmp[instance] == ["/workspace/kept", "/tmp/of-the-next"], "a late settling does nothing any more"
    assert (await state_of(b, box), two.node.destroyed) == ("leased", [])
    renewed = await with_lease(b, "POST", f"/v1/sandboxes/{box}/renew", lease, {"owner": "s/2"})
    assert renewed.status == 200, renewed.document


async def test_what_one_settling_has_shown_says_nothing_of_the_next_one(world, until):
    box, instance, lease = await used(world)
    gate = world.node.fence_gate = asyncio.Event()
    await release(world, box, lease)
    late = await world.store.get_sandbox(box, None)
    gate.set()
    await settled(world, box, until)
    lease = (await attach(world, box, "s/2")).document["lease"]
    world.node.tmp[instance].append("/tmp/of-the-second")
    gate = world.node.fence_gate = asyncio.Event()
    await release(world, box, lease)
    for left in (None, "something"):
        assert not await world.services.leases._settling._settled(late, left)
        assert await state_of(world, box) == "recycling"
    gate.set()
    await settled(world, box, until)
    assert world.node.tmp[instance] == ["/workspace/kept"]


async def test_a_settling_that_was_cut_short_is_done_over_by_the_next_owner(world, until):
    box, instance, lease = await used(world)
    world.node.fence_gate = asyncio.Event()
    await release(world, box, lease)
    await until(lambda: world.node.fenced[-1][2] == "kill")
    await world.crash()
    world.node.fence_gate.set()
    await world.start()
    await settled(world, box, until)
    await clean(world, box, instance)


async def test_a_stop_in_the_middle_of_a_settling_ends_nothing(world, until, monkeypatch):
    box, instance, lease = await used(world)
    stopping = world.services.core.stopping

    async def closes(*_: Any) -> None:
        await stopping.wait()
        raise CorralError("shutting_down", "the connection to the node is closed")

    with monkeypatch.context() as patched:
        patched.setattr(world.node, "fence", closes)
        await release(world, box, lease)
        await world.services.stop(1.0)
    assert (await world.store.get_sandbox(box, None)).sandbox.state == "recycling"
    await world.start()
    await settled(world, box, until)
    await clean(world, box, instance)


async def test_a_store_that_is_lost_in_the_middle_of_a_settling_delays_it(two, until):
    a = two.workers["a"]
    box, instance, lease = await used(a)
    two.node.fence_gate = asyncio.Event()
    await release(a, box, lease)
    await until(lambda: two.node.fenced[-1][2] == "kill")
    two.store.lost = True
    two.node.fence_gate.set()
    await asyncio.sleep(0.5)  # longer than the worker's row lives
    two.store.lost = False
    await settled(a, box, until)
    await clean(a, box, instance)


@pytest.mark.parametrize("what", ["touch", "extend"])
async def test_what_else_changes_a_sandbox_while_it_is_settled_does_not_stop_that(world, until, what):
    box, instance, lease = await used(world)
    world.node.fence_gate = asyncio.Event()
    await release(world, box, lease)
    await until(lambda: world.node.fenced[-1][2] == "kill")
    before = (await world.store.get_sandbox(box, None)).sandbox.version
    if what == "touch":
        await asyncio.sleep(0.002)
        await world.store.touch([box])
    else:
        assert (await world.call("PATCH", f"/v1/sandboxes/{box}", {"ttl_s": 500})).status == 200
    assert (await world.store.get_sandbox(box, None)).sandbox.version > before
    world.node.fence_gate.set()
    await settled(world, box, until)
    await clean(world, box, instance)


async def test_a_delete_wins_against_a_settling_that_waits_for_the_node(world, until, away):
    box, _, lease = await used(world)
    away.goes()
    await release(world, box, lease)
    deleting = asyncio.create_task(world.call("DELETE", f"/v1/sandboxes/{box}"))
    await settled(world, box, until, "sanitizing")
    await until(lambda: not world.services.leases._settling._under_way)
    away.back.set()
    assert (await deleting).status in (200, 202)
    await settled(world, box, until, "terminated")
    assert not (await world.store.get_sandbox(box, None)).sandbox.tainted, "it was the delete that ended it"


async def test_a_settling_waits_for_the_node_no_longer_than_the_sandbox_lives(world, until, away):
    box, _, lease = await used(world)
    away.goes()
    await release(world, box, lease)
    world.offset_ms += 3_601_000
    await settled(world, box, until, "sanitizing")
    assert (await world.store.get_sandbox(box, None)).sandbox.failure == "ttl"
    await until(lambda: not world.services.leases._settling._under_way)
    away.back.set()
    await settled(world, box, until, "terminated")


async def test_a_caller_hears_in_its_own_time_that_the_settling_lasts_and_one_that_waits_gets_the_sandbox(
    world, until, away, monkeypatch
):
    monkeypatch.setattr(leases, "JOIN_S", 0.1)
    box, _, lease = await used(world)
    away.goes()
    await release(world, box, lease)
    waiting = asyncio.create_task(attach(world, box, "s/2", contention="wait", wait_s=60))
    refused = await attach(world, box, "s/3")
    assert (refused.status, code(refused), refused.document["retryable"]) == (409, "lease_held", True)
    assert refused.headers["Retry-After"] == "1" and "recycling" in refused.document["detail"]
    assert not waiting.done()
    away.back.set()
    assert (await waiting).document["owner"] == "s/2"


async def test_a_sandbox_whose_node_has_seen_a_higher_fence_is_settled_above_that(world, until):
    box, instance, lease = await used(world)
    world.node.floor_of[instance] = Fence(1, 9)
    await release(world, box, lease)
    await settled(world, box, until)
    view = await world.store.get_sandbox(box, None)
    assert view.lease.lease_version == 10 and world.node.floor_of[instance] == Fence(1, 10)
    assert world.node.destroyed == [] and world.node.tmp[instance] == ["/workspace/kept"]
    assert await world.store.open_commands(box) == []


async def test_leases_run_out_and_time_to_live_ends_while_the_node_hangs(world, until, away, monkeypatch):
    monkeypatch.setattr(floors, "NODE_S", 0.05)
    box, _, _ = await used(world)
    other = await made(world, ttl_s=2)
    away.goes(hangs=True)
    world.offset_ms += 61_000
    await settled(world, box, until, "recycling")
    await settled(world, other, until, "sanitizing")
    away.back.set()
    await settled(world, box, until)


@pytest.mark.parametrize("how", ["release", "expiry"])
async def test_what_was_left_by_a_lease_that_ended_while_the_sandbox_was_paused_is_gone_for_its_next_owner(
    world, until, how
):
    box, instance, lease = await used(world)
    path = f"/v1/sandboxes/{box}"
    assert (await with_lease(world, "POST", f"{path}/pause", lease)).document["state"] == "paused"
    if how == "release":
        assert (await with_lease(world, "POST", f"{path}/release", lease, {})).document["state"] == "paused"
    else:
        world.offset_ms += 61_000

    async def ended() -> bool:
        return (await world.call("GET", path)).document["lease"] is None

    await until(ended)
    assert (await world.call("GET", path)).document["conditions"] == {"unsettled": True}
    assert (await world.call("POST", f"{path}/resume")).document["state"] == "idle"
    away = CorralError("node_unavailable", "the node does not answer")
    world.node.fence_error = away
    assert code(await attach(world, box, "s/2")) == "node_unavailable"
    world.node.fence_error = None
    assert (await attach(world, box, "s/2")).status == 200
    assert world.node.tmp[instance] == ["/workspace/kept"]
    assert (await world.call("GET", path)).document["conditions"] == {}


async def test_a_sandbox_that_was_paused_and_cannot_be_cleaned_after_is_nobody_s_any_more(world, until):
    box, _, lease = await used(world)
    world.node.sticky.add("/tmp/a")
    path = f"/v1/sandboxes/{box}"
    await with_lease(world, "POST", f"{path}/pause", lease)
    await with_lease(world, "POST", f"{path}/release", lease, {})
    await world.call("POST", f"{path}/resume")
    assert code(await attach(world, box, "s/2")) == "sandbox_deleted"
    await settled(world, box, until, "terminated")


# -- what is known of a fence ------------------------------------------------------------------------------------------------------


async def test_the_commands_of_a_take_over_are_over_once_node_and_guest_know_the_fence(world, until):
    box = await made(world)
    for _ in range(3):
        await attach(world, box)

    async def none() -> bool:
        return await world.store.open_commands(box) == []

    await until(none)


async def test_a_lease_whose_taker_died_before_the_node_knew_it_is_made_known_by_another_worker(two, until):
    box = await made(two.workers["a"])
    two.node.fence_gate = asyncio.Event()
    key = {"idempotency-key": "k1"}
    asking = asyncio.create_task(attach(two.workers["a"], box, headers=key))
    await until(lambda: two.node.fenced[-1][1] == Fence(1, 2))
    [instance] = two.node.live
    two.node.floor_of[instance] = Fence(1, 1)  # it has not come that far
    await two.kill("a")
    asking.cancel()
    two.node.fence_gate = None
    await until(lambda: two.node.floor_of[instance] == Fence(1, 2))
    assert two.node.fenced[-1][2] == "adopt"
    answer = await attach(two.workers["b"], box, headers=key)
    assert answer.document["lease"] == "1.2"


async def test_a_repeated_attach_ends_nothing_of_what_its_first_call_began(world, until):
    box = await made(world)
    key = {"idempotency-key": "k1"}
    lease = (await attach(world, box, headers=key)).document["lease"]
    run = {"argv": ["sleep"], "wait": 0}
    begun = (await with_lease(world, "POST", f"/v1/sandboxes/{box}/execs", lease, run)).document["id"]
    await until(lambda: world.node.starts)
    assert (await attach(world, box, headers=key)).document["lease"] == lease
    assert "kill" not in [mode for _, fence, mode in world.node.fenced if fence == Fence.parse(lease)]
    assert (await world.call("GET", f"/v1/execs/{begun}")).document["state"] in ("starting", "running")


@pytest.mark.parametrize("keys", [(None, None), ("k1", "k2"), ("k1", "k1")])
@pytest.mark.parametrize("first", [0, 1])
async def test_one_owner_that_attaches_at_two_workers_at_once_is_told_each_fence_once(
    two, until, monkeypatch, keys, first
):
    a, b = two.workers["a"], two.workers["b"]
    box, _, lease = await used(a)
    await release(a, box, lease)
    await settled(a, box, until)
    gates, real, asked = [asyncio.Event(), asyncio.Event()], two.node.fence, 0

    async def fence(*args: Any) -> None:
        nonlocal asked
        asked += 1
        gate = gates[asked - 1] if asked <= 2 else None
        await real(*args)
        if gate is not None:
            await gate.wait()

    monkeypatch.setattr(two.node, "fence", fence)
    calls = []
    for world, key in zip((a, b), keys, strict=True):
        headers = {} if key is None else {"idempotency-key": key}
        calls.append(asyncio.create_task(attach(world, box, "s/2", Caller(), headers)))
        await until(lambda known=len(calls): asked >= known)
    gates[first].set()
    await settled(a, box, until, "leased")
    gates[1 - first].set()
    told = [answer.document["lease"] for answer in await asyncio.gather(*calls)]
    assert (told[0] == told[1]) == (keys == ("k1", "k1")), told
    now = (await b.store.get_sandbox(box, None)).lease.lease_version
    assert max(Fence.parse(one) for one in told) == Fence(1, now), "the last one is the one that counts"
