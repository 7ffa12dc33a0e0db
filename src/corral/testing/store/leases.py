"""Leases: tokens only rise, and nothing is renewed that has ended."""

from __future__ import annotations

from corral.domain.fence import Fence
from corral.domain.records import (
    LeaseChange,
)
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
