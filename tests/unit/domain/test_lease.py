import pytest

from corral.domain import lease
from corral.domain.fence import Fence
from corral.errors import CorralError


def held(owner="a", ttl=1000, now=0):
    return lease.take(lease.first("sbx_x", now), owner, ttl, now)


def code_of(call, *args, **more):
    with pytest.raises(CorralError) as caught:
        call(*args, **more)
    return caught.value.code


def test_taking_raises_the_token_every_time():
    row = held()
    assert (row.lease_owner, row.lease_version, row.expires_at) == ("a", 1, 1000)
    row = lease.take(row, "a", 1000, 10)
    assert row.lease_version == 2
    row = lease.release(row, 20)
    assert (row.lease_owner, row.lease_version, row.expires_at) == (None, 3, 20)
    assert lease.take(row, "b", 1000, 20).lease_version == 4


def test_another_owner_waits_until_the_expiry_to_the_millisecond():
    assert code_of(lease.take, held(), "b", 1000, 999) == "lease_held"
    assert lease.take(held(), "b", 1000, 1000).lease_owner == "b"
    assert lease.take(held(), lease.system_owner("ttl"), 1000, 1, by_force=True).lease_owner == "system:ttl"


def test_a_renewal_writes_only_when_less_than_two_thirds_are_left():
    row = held(ttl=900)
    assert lease.renew(row, 1, "a", Fence(1, 1), 900, 300) == (row, False)
    later, written = lease.renew(row, 1, "a", Fence(1, 1), 900, 301)
    assert written and later.expires_at == 1201 and later.lease_version == 1


def test_a_renewal_never_moves_the_expiry_back():
    assert lease.renew(held(ttl=10_000), 1, "a", Fence(1, 1), 100, 0)[0].expires_at == 10_000


@pytest.mark.parametrize("owner, fence, now", [("b", Fence(1, 1), 1), ("a", Fence(1, 0), 1), ("a", Fence(0, 1), 1),
                                               ("a", Fence(2, 1), 1), ("a", Fence(1, 1), 1000), ("a", Fence(1, 1), 5000)])  # fmt: skip
def test_a_renewal_of_what_is_lost_is_lost(owner, fence, now):
    assert code_of(lease.renew, held(), 1, owner, fence, 1000, now) == "lease_lost"


def test_at_every_moment_exactly_one_of_holder_and_taker_is_right():
    row = held(ttl=5)
    for now in range(10):
        renewed = taken = True
        try:
            lease.renew(row, 1, "a", Fence(1, 1), 5, now)
        except CorralError:
            renewed = False
        try:
            lease.take(row, "b", 5, now)
        except CorralError:
            taken = False
        assert renewed != taken


def test_fences_are_compared_incarnation_first():
    lease.check(Fence(2, 1), Fence(2, 1))
    assert code_of(lease.check, Fence(2, 1), Fence(1, 99)) == "lease_lost"
    assert code_of(lease.check, Fence(2, 1), Fence(2, 2)) == "conflict"
    assert lease.admit(Fence(1, 5), Fence(2, 0)) == Fence(2, 0)
    assert code_of(lease.admit, Fence(1, 5), Fence(1, 4)) == "lease_lost"


def test_a_lease_needs_a_time():
    assert code_of(lease.take, lease.first("x", 0), "a", 0, 0) == "invalid_value"
