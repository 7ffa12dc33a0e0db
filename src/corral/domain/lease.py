"""The rules of leases, pure: who may take, how long it lasts, which fence is stale. The store applies them in its transactions.

Time is the store's clock, in milliseconds. A token never falls: every change of the owner raises it, letting go included. A renewal
answers the committed expiry and writes only when less than two thirds of the time is left, so most renewals cost no write.
"""

from __future__ import annotations

from dataclasses import replace

from corral.domain.fence import Fence
from corral.domain.records import LeaseRecord
from corral.errors import CorralError

SYSTEM = "system:"
REGRESSED = SYSTEM + "store_regressed"
"""The owner after the store went backwards: nobody's work ended, so nothing of it is stopped, and its caller may go on."""
BETWEEN = " "
"""Between the key and the owner that it names: no key has it in its name, so no owner can be written that is another key's."""
MAX_OWNER = 200
SYSTEM_TTL_MS = 3_600_000
"""How long a system owner has a lease at a time."""


def system_owner(reason: str) -> str:
    """The owner while the lifecycle manager works: `system:<reason>`."""
    return SYSTEM + reason


def is_system(owner: str | None) -> bool:
    return owner is not None and owner.startswith(SYSTEM)


def owner_name(key: str, owner: str | None) -> str:
    """What stands in the row: the key itself (the implicit lease of its callers), or `<key> <owner>` for an owner that it names."""
    return key if owner is None else f"{key}{BETWEEN}{owner}"


def key_of(lease_owner: str) -> str:
    """The key of an owner's name; a system owner is its own."""
    return lease_owner if is_system(lease_owner) else lease_owner.partition(BETWEEN)[0]


def named(lease_owner: str | None) -> str | None:
    """The owner as its caller named it; an implicit lease is named by its key."""
    if lease_owner is None or is_system(lease_owner):
        return lease_owner
    key, between, owner = lease_owner.partition(BETWEEN)
    return owner if between else key


def ttl_of(lease: LeaseRecord) -> int:
    """How long it was taken or extended for, in milliseconds."""
    return max(1, lease.expires_at - lease.heartbeat_at)


def left_ms(lease: LeaseRecord, now_ms: int) -> int:
    """What its holder may still count on; never below 0."""
    return max(0, lease.expires_at - now_ms)


def first(sandbox_id: str, now_ms: int) -> LeaseRecord:
    """The row of a new sandbox: nobody's, token 0."""
    return LeaseRecord(sandbox_id, None, 0, acquired_at=now_ms, heartbeat_at=now_ms, expires_at=now_ms)


def expired(lease: LeaseRecord, now_ms: int) -> bool:
    """True from the very millisecond of the expiry on, so that holder and taker can never both be right."""
    return now_ms >= lease.expires_at


def take(lease: LeaseRecord, owner: str, ttl_ms: int, now_ms: int, *, by_force: bool = False) -> LeaseRecord:
    """A new owner with the next token. `lease_held` while another holds it, unless `by_force` (the lifecycle manager)."""
    held = lease.lease_owner is not None and lease.lease_owner != owner and not expired(lease, now_ms)
    if held and not by_force:
        raise CorralError(
            "lease_held",
            f"the sandbox is leased to another owner for {lease.expires_at - now_ms} ms more",
            hint="wait for its end, fork the sandbox, or make a new one",
        )
    _positive(ttl_ms)
    return replace(
        lease,
        lease_owner=owner,
        lease_version=lease.lease_version + 1,
        acquired_at=now_ms,
        heartbeat_at=now_ms,
        expires_at=now_ms + ttl_ms,
    )


def renew(
    lease: LeaseRecord, incarnation: int, owner: str, fence: Fence, ttl_ms: int, now_ms: int
) -> tuple[LeaseRecord, bool]:
    """(the lease as it now holds, whether the row must be written). `lease_lost` for another owner or fence, or once expired."""
    _positive(ttl_ms)
    if lease.lease_owner != owner or fence != Fence(incarnation, lease.lease_version):
        raise lost("another owner has taken the sandbox")
    if expired(lease, now_ms):
        raise lost("the lease had expired before it was renewed")
    if not due(lease, ttl_ms, now_ms):
        return lease, False
    return replace(lease, heartbeat_at=now_ms, expires_at=max(lease.expires_at, now_ms + ttl_ms)), True


def due(lease: LeaseRecord, ttl_ms: int, now_ms: int) -> bool:
    """True when less than two thirds of the time is left: the row is to be extended."""
    return 3 * (lease.expires_at - now_ms) < 2 * ttl_ms


def release(lease: LeaseRecord, now_ms: int) -> LeaseRecord:
    """Nobody's, with the next token: what the old owner still sends is stale."""
    return replace(
        lease, lease_owner=None, lease_version=lease.lease_version + 1, heartbeat_at=now_ms, expires_at=now_ms
    )


def check(current: Fence, presented: Fence) -> None:
    """`lease_lost` unless the presented fence is the current one; a newer one than the row's means the row went backwards."""
    if presented < current:
        raise lost(f"the fence {presented} is older than {current}")
    if presented > current:
        raise CorralError(
            "conflict", f"the fence {presented} is newer than the recorded {current}", hint="read the sandbox again"
        )


def admit(floor: Fence, presented: Fence) -> Fence:
    """The new floor of a node or guest after an operation: the presented fence, or `lease_lost` when it is below the floor."""
    if presented < floor:
        raise lost(f"the fence {presented} is below the floor {floor}")
    return presented


def lost(why: str) -> CorralError:
    """`lease_lost` with the hint that fits every case."""
    return CorralError("lease_lost", why, hint="acquire the sandbox again and look at what changed before going on")


def _positive(ttl_ms: int) -> None:
    if ttl_ms <= 0:
        raise CorralError(
            "invalid_value", "a lease must last longer than 0 ms", field="/ttl_ms", hint="for example 60000"
        )
