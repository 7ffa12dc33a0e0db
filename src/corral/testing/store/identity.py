"""Tenants, users, keys: who is there, who is accepted, and what ends whom."""

from __future__ import annotations

import asyncio
from typing import Any

from corral.domain.identity import DEFAULT_TENANT, KeyRecord, TenantRecord, UserRecord, key_hash
from corral.domain.records import Idempotency
from corral.testing.store.bench import EVENT, START_MS, Bench, audit, check, key_of, refused


def tenant(b: Bench, tenant_id: str = "acme", **columns: Any) -> TenantRecord:
    return TenantRecord(
        tenant_id, **{"name": tenant_id, "created_at": b.clock.now, "created_by": "key:local", **columns}
    )


def a_key(b: Bench, number: int = 1, tenant_id: str = "acme", **columns: Any) -> KeyRecord:
    known: dict[str, Any] = {
        "key_hash": key_hash(number.to_bytes(32, "big")),
        "scopes": ["run"],
        "created_at": b.clock.now,
        "created_by": "key:local",
    }
    return KeyRecord(f"key_{number}", tenant_id, **{**known, **columns})


async def made(b: Bench, tenant_id: str = "acme") -> TenantRecord:
    record, fresh = await b.store.create_tenant(tenant(b, tenant_id), audit(tenant_id, tenant_id=tenant_id))
    assert fresh
    return record


async def good(b: Bench, key_id: str = "key_1") -> bool:
    view = await b.store.find_key(key_id)
    return view is not None and view.good


@check
async def the_default_tenant_is_there_and_stays(b: Bench) -> None:
    assert [t.tenant_id for t in await b.store.list_tenants()] == [DEFAULT_TENANT]
    await refused("conflict", b.store.update_tenant(DEFAULT_TENANT, audit(), disabled=True))
    await refused("conflict", b.store.delete_tenant(DEFAULT_TENANT, audit()))
    await refused("already_exists", b.store.create_tenant(tenant(b, DEFAULT_TENANT), audit()))
    assert (await b.store.update_tenant(DEFAULT_TENANT, audit(), name="我们")).name == "我们"
    assert await b.store.count_tenants() == 1


@check
async def a_tenant_is_made_once(b: Bench) -> None:
    calls = [b.store.create_tenant(tenant(b), audit("acme", tenant_id="acme")) for _ in range(8)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(not isinstance(answer, BaseException) for answer in answers) == 1
    assert await b.store.get_tenant("acme") == tenant(b)
    assert len(await b.store.list_audit("acme")) == 1 and await b.store.count_tenants() == 2
    again = key_of(route="POST /v1/tenants")
    first, fresh = await b.store.create_tenant(tenant(b, "bob"), audit(), again)
    assert fresh and await b.store.create_tenant(tenant(b, "bob"), audit(), again) == (first, False)
    await refused(
        "idempotency_conflict",
        b.store.create_tenant(tenant(b, "bob"), audit(), key_of(route="POST /v1/tenants", digest="d2")),
    )


@check
async def tenants_are_listed_by_id_in_pages(b: Bench) -> None:
    for name in ("c", "a", "b"):
        await made(b, name)
    assert [t.tenant_id for t in await b.store.list_tenants(limit=2)] == ["a", "b"]
    assert [t.tenant_id for t in await b.store.list_tenants(after="b")] == ["c", "default"]
    assert await b.store.get_tenant("nobody") is None


@check
async def a_disabled_tenant_stops_its_keys_until_it_is_enabled(b: Bench) -> None:
    await made(b)
    await b.store.create_key(a_key(b), audit())
    assert await good(b)
    first = await b.store.update_tenant("acme", audit(), disabled=True)
    b.clock.now += 5
    assert (await b.store.update_tenant("acme", audit(), disabled=True)).disabled_at == first.disabled_at == START_MS
    assert not await good(b)
    assert (await b.store.update_tenant("acme", audit(), disabled=False)).disabled_at is None
    assert await good(b)
    await refused("not_found", b.store.update_tenant("nobody", audit(), disabled=True))


@check
async def a_tenant_with_something_that_goes_on_is_not_deleted(b: Bench) -> None:
    await made(b)
    await b.store.create_key(a_key(b), audit())
    await refused("tenant_in_use", b.store.delete_tenant("acme", audit()))
    await b.store.update_tenant("acme", audit(), disabled=True)
    await b.store.create_sandbox(b.sandbox(tenant_id="acme"), EVENT, audit())
    await refused("tenant_in_use", b.store.delete_tenant("acme", audit()))
    await b.step(state="terminated")
    await b.store.submit_run(b.run(tenant_id="acme"), audit())
    await refused("tenant_in_use", b.store.delete_tenant("acme", audit()))
    await b.store.finish_run("run_1", result={}, reason="ok", timings={}, audit=audit())
    gone = await b.store.delete_tenant("acme", audit("acme", tenant_id="acme", kind="tenant.deleted"))
    assert gone.deleted_at == START_MS
    assert await b.store.get_tenant("acme") is None and await b.store.count_tenants() == 1
    assert not await good(b) and await b.store.find_key("key_1") is None
    await refused("already_exists", b.store.create_tenant(tenant(b), audit()))
    await refused("not_found", b.store.create_key(a_key(b, 2), audit()))
    await refused("not_found", b.store.create_user(UserRecord("acme", "li", START_MS), audit()))
    await refused("not_found", b.store.delete_tenant("acme", audit()))
    assert [row.kind for row in await b.store.list_audit("acme")][-1] == "tenant.deleted"


@check
async def users_belong_to_a_tenant(b: Bench) -> None:
    await made(b)
    await made(b, "other")
    for name in ("zoe", "li"):
        await b.store.create_user(UserRecord("acme", name, b.clock.now, "李"), audit())
    await refused("already_exists", b.store.create_user(UserRecord("acme", "li", b.clock.now), audit()))
    await b.store.create_user(UserRecord("other", "li", b.clock.now), audit())
    assert [(u.user_id, u.name) for u in await b.store.list_users("acme")] == [("li", "李"), ("zoe", "李")]
    assert [u.user_id for u in await b.store.list_users("acme", after="li", limit=1)] == ["zoe"]
    assert (await b.store.update_user("acme", "li", audit(), disabled=True)).disabled_at == START_MS
    other = await b.store.get_user("other", "li")
    assert other is not None and other.disabled_at is None and other.name is None
    await refused("not_found", b.store.update_user("acme", "nobody", audit(), disabled=True))
    assert await b.store.get_user("acme", "nobody") is None


@check
async def the_keys_of_a_user_stop_with_him(b: Bench) -> None:
    await made(b)
    await made(b, "other")
    await b.store.create_key(a_key(b, 1, user_id="li"), audit())
    await b.store.create_key(a_key(b, 2, "other", user_id="li"), audit())
    assert [u.user_id for u in await b.store.list_users("acme")] == ["li"], "made with his first key"
    await b.store.update_user("acme", "li", audit(), disabled=True)
    assert (await good(b), await good(b, "key_2")) == (False, True)
    await b.store.update_user("acme", "li", audit(), disabled=False)
    assert await good(b)
    await b.store.delete_user("acme", "li", audit())
    assert (await good(b), await good(b, "key_2")) == (False, True)
    await b.store.create_user(UserRecord("acme", "li", b.clock.now), audit())
    assert not await good(b), "another one of the same name does not get them"
    await refused("not_found", b.store.delete_user("acme", "nobody", audit()))


@check
async def a_key_is_good_until_it_expires_or_is_revoked(b: Bench) -> None:
    await made(b)
    wanted = a_key(b, name="for 测试", scopes=["tenant", "run"], expires_at=b.clock.now + 10)
    assert await b.store.create_key(wanted, audit("key_1", tenant_id="acme")) == (wanted, True)
    b.clock.now += 9
    view = await b.store.find_key("key_1")
    assert view is not None and (view.key, view.now, view.good) == (wanted, b.clock.now, True)
    b.clock.now += 1
    assert not await good(b)
    await b.store.create_key(a_key(b, 2), audit())
    assert await good(b, "key_2")
    revoked = await b.store.revoke_key("key_2", "acme", audit("key_2", kind="key.revoked"))
    assert revoked.revoked_at == b.clock.now and not await good(b, "key_2")
    b.clock.now += 1
    assert await b.store.revoke_key("key_2", None, audit("key_2", kind="key.revoked")) == revoked, "again: as it is"
    assert [row.kind for row in await b.store.list_audit("acme", subject="key_2")] == ["key.revoked"]
    await refused("not_found", b.store.revoke_key("key_2", "other", audit()))
    await refused("not_found", b.store.revoke_key("key_9", None, audit()))
    assert await b.store.find_key("key_9") is None


@check
async def two_keys_never_share_an_id_or_a_secret(b: Bench) -> None:
    await made(b)
    await b.store.create_key(a_key(b), audit())
    await refused("conflict", b.store.create_key(a_key(b, key_hash=key_hash(b"x" * 32)), audit()))
    same = a_key(b, 2, key_hash=a_key(b).key_hash)
    await refused("conflict", b.store.create_key(same, audit()))
    assert len((await b.store.list_keys("acme"))[0]) == 1


def _once(key: str = "k") -> Idempotency:
    return key_of(key, tenant_id="acme", route="POST /v1/keys")


@check
async def a_key_whose_secret_was_lost_on_the_way_gets_a_new_one_unless_it_was_used(b: Bench) -> None:
    await made(b)
    await b.store.create_key(a_key(b, 1), audit(), _once())
    again, fresh = await b.store.create_key(a_key(b, 2), audit(), _once())
    assert fresh and (again.key_id, again.key_hash) == ("key_1", a_key(b, 2).key_hash)
    b.clock.now += 7
    await b.store.touch_key("key_1")
    used, fresh = await b.store.create_key(a_key(b, 3), audit(), _once())
    assert not fresh and (used.key_hash, used.last_used_at) == (again.key_hash, b.clock.now)
    assert len((await b.store.list_keys("acme"))[0]) == 1
    await b.store.create_key(a_key(b, 4), audit(), _once("k2"))
    await b.store.revoke_key("key_4", None, audit())
    assert not (await b.store.create_key(a_key(b, 5), audit(), _once("k2")))[1], "a revoked one stays revoked"


@check
async def keys_are_listed_newest_first_for_one_tenant_or_for_all(b: Bench) -> None:
    await made(b)
    await made(b, "other")
    for number, whose in ((1, "acme"), (2, "other"), (3, "acme")):
        await b.store.create_key(a_key(b, number, whose), audit())
        b.clock.now += 1
    everything, now = await b.store.list_keys(None)
    assert ([k.key_id for k in everything], now) == (["key_3", "key_2", "key_1"], b.clock.now)
    assert [k.key_id for k in (await b.store.list_keys("acme", limit=1))[0]] == ["key_3"]
    assert [k.key_id for k in (await b.store.list_keys("acme", after="key_3"))[0]] == ["key_1"]
    await refused("not_found", b.store.list_keys("acme", after="key_2"))


@check
async def a_rotated_key_has_a_successor_and_ends_after_the_overlap(b: Bench) -> None:
    await made(b)
    await b.store.create_key(a_key(b, user_id="li", name="bot", scopes=["run", "read"]), audit())
    rotated = audit("key_2", kind="key.rotated")
    blank = a_key(b, 2, "nobody", scopes=["admin"], expires_at=b.clock.now + 99)
    new, fresh = await b.store.rotate_key("key_1", "acme", blank, 10, rotated)
    assert fresh and (new.tenant_id, new.user_id, new.name, new.scopes) == ("acme", "li", "bot", ["run", "read"])
    assert (new.lineage, new.rotated_from, new.expires_at) == ("key_1", "key_1", START_MS + 99)
    assert await good(b) and await good(b, "key_2")
    await refused("conflict", b.store.rotate_key("key_1", None, a_key(b, 3), 10, audit()))
    third, _ = await b.store.rotate_key("key_2", None, a_key(b, 3), 0, audit())
    assert (third.lineage, third.rotated_from) == ("key_1", "key_2")
    assert not await good(b, "key_2"), "no overlap"
    b.clock.now += 10
    assert (await good(b), await good(b, "key_3")) == (False, True)
    await refused("not_found", b.store.rotate_key("key_3", "other", a_key(b, 4), 0, audit()))
    await refused("not_found", b.store.rotate_key("key_9", None, a_key(b, 4), 0, audit()))
    await b.store.revoke_key("key_3", None, audit())
    await refused("conflict", b.store.rotate_key("key_3", None, a_key(b, 4), 0, audit()))
    assert [row.kind for row in await b.store.list_audit("acme", subject="key_2")] == ["key.rotated"]


@check
async def an_overlap_never_makes_a_key_live_longer(b: Bench) -> None:
    await made(b)
    await b.store.create_key(a_key(b, expires_at=b.clock.now + 5), audit())
    await b.store.rotate_key("key_1", None, a_key(b, 2), 1000, audit())
    view = await b.store.find_key("key_1")
    assert view is not None and view.key.expires_at == START_MS + 5


@check
async def of_many_rotations_at_once_one_wins(b: Bench) -> None:
    await made(b)
    await b.store.create_key(a_key(b), audit())
    calls = [b.store.rotate_key("key_1", None, a_key(b, number), 10, audit()) for number in range(2, 10)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(not isinstance(answer, BaseException) for answer in answers) == 1
    assert len((await b.store.list_keys("acme"))[0]) == 2
    await b.store.create_key(a_key(b, 20), audit())
    once = key_of(tenant_id="acme", route="POST /v1/keys/key_20/rotate")
    first, fresh = await b.store.rotate_key("key_20", None, a_key(b, 21), 10, audit(), once)
    again, renewed = await b.store.rotate_key("key_20", None, a_key(b, 22), 10, audit(), once)
    assert fresh and renewed and first.key_id == again.key_id == "key_21" and first.key_hash != again.key_hash
