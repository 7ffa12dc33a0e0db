"""Leases: tokens only rise, and nothing is renewed that has ended."""

from __future__ import annotations

from corral.domain.fence import Fence
from corral.domain.records import (
    LeaseChange,
)
from corral.errors import CorralError
from corral.ports.leases import Renewal
from corral.testing.store.bench import Bench, check, refused


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
async def a_lease_knows_the_call_that_took_it_until_it_is_another_one(b: Bench) -> None:
    await b.made()
    lease = (await b.step(lease=LeaseChange("take", "me/1", 1000, request_digest="d1"))).lease
    assert lease.request_digest == "d1"
    b.clock.now += 900
    assert (await b.store.renew_lease("sbx_1", "me/1", Fence(0, 1), 1000)).request_digest == "d1"
    b.clock.now += 900
    _, [longer] = await b.store.renew_leases([Renewal("sbx_1", "me/1", Fence(0, 1), 1000)])
    assert not isinstance(longer, CorralError) and longer.request_digest == "d1"
    assert (await b.step(lease=LeaseChange("extend", "me/1", 9000))).lease.request_digest == "d1"
    seen = await b.store.see_sandbox("sbx_1", None)
    assert seen is not None and seen.view.lease is not None and seen.view.lease.request_digest == "d1"
    assert (await b.step(lease=LeaseChange("take", "me/1", 1000))).lease.request_digest is None
    await b.step(lease=LeaseChange("take", "me/1", 1000, request_digest="d2"))
    adopted = await b.store.adopt_floor("sbx_1", Fence(0, 9), {})
    assert adopted is not None and adopted.lease is not None and adopted.lease.request_digest is None
    await b.step(lease=LeaseChange("take", "me/1", 1000, request_digest="d3"))
    assert (await b.step(lease=LeaseChange("drop"))).lease.request_digest is None
    await refused("invalid_value", b.step(lease=LeaseChange("take", "me/1", 1000, request_digest="a\0b")))


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


@check
async def a_lease_ends_by_its_expiry_only_once_the_stores_clock_says_so(b: Bench) -> None:
    await b.leased(ttl_ms=1000)
    b.clock.now += 999
    await refused("conflict", b.step(lease=LeaseChange("take", "system:lease_expired", 1000, if_expired=True)))
    b.clock.now += 1
    lease = (await b.step(lease=LeaseChange("take", "system:lease_expired", 1000, if_expired=True))).lease
    assert (lease.lease_owner, lease.lease_version) == ("system:lease_expired", 2)
    b.clock.now = lease.expires_at
    await refused("lease_lost", b.step(lease=LeaseChange("take", "system:released", 1000, if_held=True)))
    b.clock.now -= 1
    assert (await b.step(lease=LeaseChange("take", "system:released", 1000, if_held=True))).lease.lease_version == 3


@check
async def a_sandbox_is_seen_with_the_stores_clock(b: Bench) -> None:
    await b.leased(ttl_ms=1000)
    b.clock.now += 7
    seen = await b.store.see_sandbox("sbx_1", None)
    assert seen is not None and seen.now_ms == b.clock.now
    assert seen.view == await b.store.get_sandbox("sbx_1", None)
    assert await b.store.see_sandbox("sbx_1", "another tenant") is None
    assert await b.store.see_sandbox("sbx_9", None) is None


@check
async def renewals_of_one_batch_succeed_and_fail_each_by_itself(b: Bench) -> None:
    fences = {}
    for n in range(1, 4):
        await b.made(f"sbx_{n}")
        await b.step(f"sbx_{n}", lease=LeaseChange("take", f"me/{n}", 1000 * n))
        fences[n] = Fence(0, 1)
    b.clock.now += 1000
    wishes = [
        Renewal("sbx_3", "me/3", fences[3], 3000),
        Renewal("sbx_1", "me/1", fences[1], 1000),
        Renewal("sbx_9", "me/9", Fence(0, 1), 1000),
        Renewal("sbx_2", "me/2", fences[2], 2000),
        Renewal("sbx_2", "you/2", fences[2], 9000),
        Renewal("sbx_2", "me/2", Fence(0, 2), 9000),
        Renewal("sbx_2", "me/2", fences[2], 9000),
    ]
    now, answers = await b.store.renew_leases(wishes)
    assert now == b.clock.now
    assert [a.code if isinstance(a, CorralError) else a.expires_at - now for a in answers] == [
        *(2000, "lease_lost", "not_found", 2000, "lease_lost", "lease_lost", 9000),
    ], "exactly two thirds are left of the first: its row stays"
    for n, left in ((1, 0), (2, 9000), (3, 2000)):
        view = await b.store.get_sandbox(f"sbx_{n}", None)
        assert view is not None and view.lease is not None and view.lease.expires_at - now == left
    assert await b.store.renew_leases([]) == (b.clock.now, [])


@check
async def due_leases_are_those_that_have_run_out_longest_ago_first(b: Bench) -> None:
    plan = {
        "sbx_1": ("leased", "me/1", 2000),
        "sbx_2": ("running", "me/2", 1000),
        "sbx_3": ("leased", "me/3", 3000),
        "sbx_4": ("leased", "system:released", 10),
        "sbx_5": ("idle", "me/5", 10),
        "sbx_6": ("paused", "me/6", 1500),
        "sbx_7": ("reuse_checking", "me/7", 1700),
    }
    for sandbox_id, (state, owner, ttl_ms) in plan.items():
        await b.made(sandbox_id, one_shot=False)
        await b.step(sandbox_id, state, lease=LeaseChange("take", owner, ttl_ms))
    await b.made("sbx_8", one_shot=True)
    await b.step("sbx_8", "leased", lease=LeaseChange("take", "me/8", 10))
    b.clock.now += 999
    assert await b.store.due_leases() == []
    b.clock.now += 1001  # the first instant at which the first is not held any more
    assert [view.sandbox.sandbox_id for view in await b.store.due_leases()] == ["sbx_2", "sbx_6", "sbx_7", "sbx_1"]
    assert [view.sandbox.sandbox_id for view in await b.store.due_leases(2)] == ["sbx_2", "sbx_6"]


@check
async def leases_are_listed_by_tenant_newest_sandbox_first(b: Bench) -> None:
    for n in range(1, 6):
        await b.made(f"sbx_{n}")
        await b.step(f"sbx_{n}", "leased", lease=LeaseChange("take", f"me/{n}", 1000))
        b.clock.now += 1
    await b.step("sbx_2", "idle", lease=LeaseChange("take", "system:released", 1000))
    await b.step("sbx_4", "terminated")
    first = await b.store.list_leases("default", limit=2)
    assert [seen.view.sandbox.sandbox_id for seen in first] == ["sbx_5", "sbx_3"]
    assert {seen.now_ms for seen in first} == {b.clock.now}
    rest = await b.store.list_leases("default", after="sbx_3", limit=2)
    assert [seen.view.sandbox.sandbox_id for seen in rest] == ["sbx_1"]
    assert await b.store.list_leases("another") == []
    await refused("not_found", b.store.list_leases("another", after="sbx_3"))


@check
async def a_floor_above_the_row_is_adopted_and_nothing_else_changes(b: Bench) -> None:
    fence = await b.leased()
    before = await b.store.get_sandbox("sbx_1", None)
    for known in (fence, Fence(0, 0)):
        assert await b.store.adopt_floor("sbx_1", known, {}) is None
    assert await b.store.get_sandbox("sbx_1", None) == before
    after = await b.store.adopt_floor("sbx_1", Fence(0, 7), {"node": "n1"})
    assert before is not None and after is not None and after.lease is not None and after.sandbox is not None
    assert (after.lease.lease_version, after.lease.lease_owner) == (8, "system:store_regressed")
    assert after.sandbox.state == before.sandbox.state and after.sandbox.version == before.sandbox.version + 1
    await refused("lease_lost", b.store.renew_lease("sbx_1", "me/1", fence, 1000))
    assert await b.store.adopt_floor("sbx_1", Fence(0, 7), {}) is None, "once"
    event = (await b.store.history("sbx_1"))[-1]
    assert (event.event_type, event.metadata["floor"], event.metadata["row"]) == ("floor_adopted", "0.7", str(fence))
    assert event.metadata["node"] == "n1" and await b.store.newest_event() == event.event_id
    higher = await b.store.adopt_floor("sbx_1", Fence(3, 1), {})
    assert higher is not None and higher.lease is not None
    assert (higher.sandbox.incarnation, higher.lease.lease_version) == (3, 2)
    assert await b.store.adopt_floor("sbx_9", Fence(3, 1), {}) is None
    await b.step(state="terminated")
    assert await b.store.adopt_floor("sbx_1", Fence(9, 1), {}) is None


@check
async def each_clean_change_of_hands_counts(b: Bench) -> None:
    await b.made()
    assert await b.store.environment_version("sbx_1") == 1
    await b.step(state="idle", settled=True)
    await b.step(state="leased")
    await b.step(state="idle", settled=True)
    assert await b.store.environment_version("sbx_1") == 3
    await refused("not_found", b.store.environment_version("sbx_9"))


@check
async def the_newest_event_is_the_last_one(b: Bench) -> None:
    assert await b.store.newest_event() == 0
    await b.made()
    before = await b.store.newest_event()
    assert (await b.step(state="idle")).event_id == before + 1 == await b.store.newest_event()
