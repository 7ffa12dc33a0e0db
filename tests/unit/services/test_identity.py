"""Who is let in, for how long that is remembered, and what making a second tenant changes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from corral.adapters.store.memory import MemoryStore
from corral.api.auth import WRONG, Gate, network_of, refused, secret_of
from corral.api.calls import Request
from corral.api.keys import AdminKey
from corral.api.routes import Reply, dispatch
from corral.domain.identity import EVERYTHING, KeyView
from corral.errors import CorralError
from corral.ports.identity import Claims
from corral.services import admission as admission_module
from corral.services.events import Caller

from .conftest import World, turns

ADMIN_KEY = "the-key-of-the-server"


async def call(world: World, method: str, path: str, document: Any = None, caller: Caller | None = None) -> Reply:
    assert world.services is not None
    path, _, query = path.partition("?")
    parts = dict(part.split("=") for part in query.split("&")) if query else {}
    return await dispatch(world.services, Request(method, path, parts, {}, b"", document, caller or Caller()))


async def made(world: World, tenant: str = "acme", **more: Any) -> dict[str, Any]:
    if tenant != "default":
        await call(world, "POST", "/v1/tenants", {"id": tenant})
    reply = await call(world, "POST", "/v1/keys", {"tenant": tenant, "scopes": ["run"], **more})
    assert reply.status == 201 and reply.document is not None, reply
    return reply.document


def gate(world: World) -> Gate:
    assert world.services is not None
    return Gate(world.services, AdminKey.of(ADMIN_KEY))


def asking(secret: str, path: str = "/v1/runs") -> Request:
    return Request("GET", path, headers={"authorization": f"Bearer {secret}"})


async def enters(world: World, secret: str, address: str = "192.0.2.1") -> Caller:
    return await gate(world).caller(asking(secret), address)


async def is_refused(world: World, secret: str, address: str = "192.0.2.1") -> CorralError:
    with pytest.raises(CorralError) as error:
        await enters(world, secret, address)
    return error.value


class CountingStore(MemoryStore):
    reads = 0
    gate: asyncio.Event | None = None
    broken = False

    async def find_key(self, key_id: str) -> KeyView | None:
        self.reads += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.broken:
            raise CorralError("store_error", "the store does not answer")
        return await super().find_key(key_id)


@pytest.fixture
async def counted(world: World) -> CountingStore:
    """The world's store, which counts from now on."""
    world.store.__class__ = CountingStore
    return world.store  # type: ignore[return-value]


async def test_the_server_s_key_is_as_before_and_a_key_of_the_store_is_its_tenant_s(world: World) -> None:
    assert await enters(world, ADMIN_KEY) == Caller() and Caller().scopes == EVERYTHING
    key = await made(world, user="li", scopes=["tenant", "run"], expires_in_s=60)
    caller = await enters(world, key["key"])
    assert (caller.tenant_id, caller.user_id, caller.key_id, caller.owner) == ("acme", "li", key["id"], key["owner"])
    assert caller.scopes == {"tenant", "run", "read"} and caller.ends


async def test_a_busy_key_costs_one_read_in_a_while(world: World, counted: CountingStore) -> None:
    key = (await made(world))["key"]
    counted.gate = asyncio.Event()
    many = [asyncio.ensure_future(enters(world, key)) for _ in range(20)]
    await turns()
    counted.gate.set()
    assert {caller.tenant_id for caller in await asyncio.gather(*many)} == {"acme"}
    for _ in range(20):
        await enters(world, key)
    assert counted.reads == 1
    for _ in range(20):
        await is_refused(world, key[:-1] + ("0" if key[-1] != "0" else "1"))
    assert counted.reads == 2, "a wrong one, too"


async def test_a_key_that_was_revoked_by_another_worker_is_refused_within_a_second(
    world: World, counted: CountingStore
) -> None:
    key = await made(world)
    await enters(world, key["key"])
    from corral.testing.store import audit

    await counted.revoke_key(key["id"], None, audit())
    began = time.monotonic()
    while True:
        try:
            await enters(world, key["key"])
        except CorralError as error:
            assert error.code == "unauthorized"
            break
        await asyncio.sleep(0.01)
    assert time.monotonic() - began < 1.0


async def test_a_key_is_refused_at_its_instant_though_it_was_good_a_moment_ago(world: World) -> None:
    key = (await made(world, expires_in_s=1))["key"]
    until = time.monotonic() + 1.0
    await enters(world, key)
    while time.monotonic() < until + 0.05:
        try:
            await enters(world, key)
        except CorralError:
            break
        await asyncio.sleep(0.005)
    assert (await is_refused(world, key)).code == "unauthorized"


async def test_what_is_remembered_is_bounded_and_wrong_keys_push_no_good_one_out(
    world: World, counted: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "KNOWN", 10)
    monkeypatch.setattr(admission_module, "HOLDS_S", 60.0)
    good = (await made(world))["key"]
    await enters(world, good)
    reads = counted.reads
    assert world.services is not None
    admission = world.services.identity.admission
    for number in range(100):
        assert (await admission.of(f"ck_{'0' * 26}_{number:064x}")).caller is None
    assert len(admission._bad) == 10 and len(admission._good) == 1
    await enters(world, good)
    assert counted.reads == reads + 100


async def test_a_store_that_does_not_answer_refuses_nobody(world: World, counted: CountingStore) -> None:
    key = (await made(world))["key"]
    counted.broken = True
    error = await is_refused(world, key)
    assert (error.code, error.status, error.retryable) == ("store_error", 503, True)
    assert await gate(world).still(asking(key)), "a call that goes on is not cut off for it"
    counted.broken = False
    await enters(world, key)


async def test_everybody_who_is_refused_hears_the_same(world: World) -> None:
    key = (await made(world))["key"]
    wrong = ["", "x", "a.b.c", "ck_" + "0" * 26 + "_" + "0" * 64, key[:-2] + "zz", "ключ", "\udcff"]
    said = {(await is_refused(world, secret, f"192.0.2.{n}")).to_problem()["detail"] for n, secret in enumerate(wrong)}
    assert said == {refused().detail}
    for header in (f"Basic {key}", key, f"Bearer{key}", "Bearer", "Bearer " + "x" * 20_000):
        assert secret_of(header) is None


async def test_who_tries_many_keys_waits_and_a_good_key_from_there_passes(world: World) -> None:
    key = (await made(world))["key"]
    codes = [(await is_refused(world, f"wrong-{n}")).code for n in range(WRONG + 5)]
    assert codes == ["unauthorized"] * WRONG + ["rate_limited"] * 5
    error = await is_refused(world, "wrong")
    assert 1 <= error.facts["retry_after_s"] <= 60
    assert (await enters(world, key)).tenant_id == "acme" and await enters(world, ADMIN_KEY) == Caller()
    assert (await is_refused(world, "wrong", "192.0.2.77")).code == "unauthorized", "another address"
    rows = [row for row in await world.store.list_audit("default") if row.kind == "auth.refused"]
    assert [row.actor for row in rows] == ["address:192.0.2.1", "address:192.0.2.77"], "one of each"


async def test_callers_by_ipv4_at_a_listener_of_both_families_count_each_for_himself(world: World) -> None:
    for n in range(WRONG + 1):
        code = (await is_refused(world, f"wrong-{n}", "::ffff:192.0.2.1")).code
    assert code == "rate_limited"
    assert (await is_refused(world, "wrong", "::ffff:192.0.2.2")).code == "unauthorized", "another host"
    assert (await is_refused(world, "wrong", "192.0.2.1")).code == "rate_limited", "the same host, in other words"
    assert network_of("2001:db8:0:1::5") == network_of("2001:db8:0:1:ffff::1%eth0") == "2001:db8:0:1::/64"


async def test_a_user_whom_a_key_makes_is_in_the_audit_once(world: World) -> None:
    one = await made(world, user="li")
    await made(world, user="li")
    rows = [row for row in await world.store.list_audit("acme") if row.kind == "user.created"]
    assert [(row.subject, row.actor, row.data) for row in rows] == [
        ("li", Caller().actor, {"by": "key", "key": one["id"]})
    ]


async def test_runs_and_sandboxes_say_whose_user_made_them(world: World) -> None:
    key = await made(world, user="li")
    caller = await enters(world, key["key"])
    run = await call(world, "POST", "/v1/runs?wait=10", {"command": ["print", "hi"]}, caller)
    box = await call(world, "POST", "/v1/sandboxes", {}, caller)
    assert run.document is not None and box.document is not None
    stored = await world.store.get_run(run.document["id"], "acme")
    view = await world.store.get_sandbox(box.document["id"], "acme")
    assert stored is not None and stored.user_id == "li" and stored.owner == caller.owner
    assert stored.reason == "ok", stored.result
    assert view is not None and view.sandbox.user_id == "li" and view.lease is not None
    assert view.lease.lease_owner == caller.owner
    kinds = {row.kind: row.actor for row in await world.store.list_audit("acme")}
    assert kinds["run.submitted"] == caller.actor == f"key:{key['id'].removeprefix('key_')}"
    await call(world, "DELETE", f"/v1/sandboxes/{box.document['id']}", None, caller)


async def test_a_second_tenant_demands_held_limits_and_its_end_takes_that_back(world: World) -> None:
    assert world.services is not None
    core = world.services.core
    assert core.policy.needs(None).enforced == frozenset()
    await call(world, "POST", "/v1/tenants", {"id": "acme"})
    assert core.policy.needs(None).enforced == {"memory", "pids", "disk"}
    await world.crash()
    await world.start()
    assert world.services.core.policy.shared, "known from the start"
    await call(world, "PATCH", "/v1/tenants/acme", {"disabled": True})
    assert world.services.core.policy.shared, "what it left goes on"
    assert (await call(world, "DELETE", "/v1/tenants/acme")).status == 200
    assert not world.services.core.policy.shared


class Tokens:
    """A verifier whose tokens are `ey.TENANT.USER`."""

    def may_be(self, text: str) -> bool:
        return text.startswith("ey.")

    async def verify(self, text: str) -> Claims:
        _, tenant, user = text.split(".")
        if user == "nobody":
            raise CorralError("unauthorized", "expired")
        if user == "silence":
            raise CorralError("issuer_unavailable", "no answer")
        return Claims(tenant, user, ["run"], int(time.time() * 1000) + 60_000)


async def test_a_token_is_its_tenant_s_and_its_user_s(world: World) -> None:
    assert world.services is not None
    world.services.identity.admission.tokens = Tokens()
    await call(world, "POST", "/v1/tenants", {"id": "acme"})
    caller = await enters(world, "ey.acme.li")
    assert (caller.tenant_id, caller.user_id, caller.owner, caller.key_id) == ("acme", "li", "user:li", None)
    assert caller.scopes == {"run", "read"} and caller.ends
    strange = await enters(world, "ey.acme.auth0|7")
    user = await world.store.get_user("acme", str(strange.user_id))
    assert user is not None and user.name == "auth0|7", "made when he came first"
    for bad in ("ey.bolt.li", "ey.acme.nobody"):
        assert (await is_refused(world, bad)).code == "unauthorized"
    assert (await is_refused(world, "ey.acme.silence")).code == "issuer_unavailable"
    await call(world, "PATCH", "/v1/users/li?tenant=acme", {"disabled": True})
    assert (await is_refused(world, "ey.acme.li")).code == "unauthorized"
    await call(world, "PATCH", "/v1/tenants/acme", {"disabled": True})
    assert (await is_refused(world, "ey.acme.zoe")).code == "unauthorized"


@pytest.mark.parametrize(
    "method, path, body, field",
    [
        ("POST", "/v1/tenants", {"id": "Not So"}, "/id"),
        ("POST", "/v1/tenants", {"id": "a", "name": "\x1b"}, "/name"),
        ("POST", "/v1/tenants", {"admin": True}, "/admin"),
        ("PATCH", "/v1/tenants/acme", {"disabled": "yes"}, "/disabled"),
        ("POST", "/v1/keys", {"scopes": ["root"]}, "/scopes"),
        ("POST", "/v1/keys", {"scopes": []}, "/scopes"),
        ("POST", "/v1/keys", {"expires_in_s": 0}, "/expires_in_s"),
        ("POST", "/v1/keys", {"expires_in_s": 1e300}, "/expires_in_s"),
        ("POST", "/v1/keys", {"expires_in_s": True}, "/expires_in_s"),
        ("POST", "/v1/keys", {"user": "a/b"}, "/user"),
        ("POST", "/v1/keys", {"tenant": 7}, "/tenant"),
        ("POST", "/v1/keys/key_x/rotate", {"overlap_s": -1}, "/overlap_s"),
        ("POST", "/v1/users", {"id": "a b"}, "/id"),
        ("GET", "/v1/keys?tenant=A", None, "/tenant"),
        ("GET", "/v1/users?limit=0", None, "/limit"),
    ],
)
async def test_a_bad_value_is_named(world: World, method: str, path: str, body: Any, field: str) -> None:
    reply = await call(world, method, path, body)
    assert reply.status == 422 and reply.document is not None and reply.document["field"] == field, reply


async def test_everybody_may_look_at_his_own_key_and_at_no_other(world: World) -> None:
    key, other = await made(world), await made(world)
    caller = await enters(world, key["key"])
    mine = await call(world, "GET", f"/v1/keys/{key['id']}", None, caller)
    assert mine.status == 200 and mine.document is not None and "key" not in mine.document
    assert (await call(world, "GET", f"/v1/keys/{other['id']}", None, caller)).status == 403
    assert (await call(world, "GET", "/v1/keys/key_x", None, caller)).status == 403
    assert mine.document["last_used_at"] is not None


async def test_lists_go_on_page_by_page(world: World) -> None:
    for name in ("a1", "b2", "c3"):
        await call(world, "POST", "/v1/tenants", {"id": name})
        await call(world, "POST", "/v1/users", {"id": name, "tenant": "a1"})
        await call(world, "POST", "/v1/keys", {"tenant": "a1"})
    for path, first in (("/v1/tenants", "a1"), ("/v1/users?tenant=a1", "a1"), ("/v1/keys?tenant=a1", None)):
        mark = "&" if "?" in path else "?"
        page = (await call(world, "GET", f"{path}{mark}limit=2")).document
        assert page is not None and len(page["items"]) == 2 and page["next"] == page["items"][-1]["id"]
        assert first in (None, page["items"][0]["id"])
        rest = (await call(world, "GET", f"{path}{mark}limit=2&after={page['next']}")).document
        assert rest is not None and rest["items"] and rest["next"] is None


async def test_another_worker_s_second_tenant_is_heard_of(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.services import identity

    monkeypatch.setattr(identity, "LOOK_S", 0.01)
    assert world.services is not None
    core = world.services.core
    follow = core.spawn(world.services.identity._follow(), "tenants")
    from corral.domain.identity import TenantRecord
    from corral.testing.store import audit

    await world.store.create_tenant(TenantRecord("acme", "acme", 0, "me"), audit())
    async with asyncio.timeout(10):
        while not core.policy.shared:
            await asyncio.sleep(0.01)
    follow.cancel()


async def test_the_first_call_of_a_second_tenant_finds_that_there_are_several(world: World) -> None:
    key = await made(world)
    assert world.services is not None
    core = world.services.core
    core.policy = replace(core.policy, shared=False)  # as at a worker that did not make the tenant
    world.services.identity.admission.forget()
    await enters(world, key["key"])
    assert core.policy.needs(None).enforced == {"memory", "pids", "disk"}


async def test_only_the_operator_is_told_where_the_store_is(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    key = await made(world)
    caller = await enters(world, key["key"])

    async def lost(*_: Any, **__: Any) -> Any:
        raise CorralError("store_error", "postgresql://user@10.0.0.5/corral does not answer", hint="is it there?")

    monkeypatch.setattr(world.store, "list_runs", lost)
    told = (await call(world, "GET", "/v1/runs", caller=caller)).document
    assert told is not None and (told["code"], told["retryable"]) == ("store_error", True)
    assert "10.0.0.5" not in str(told) and "user" not in str(told)
    assert "10.0.0.5" in str((await call(world, "GET", "/v1/runs")).document)


async def test_who_could_not_give_a_key_cannot_take_it_away(world: World) -> None:
    strong = await made(world, "default", scopes=["admin"])
    weak = await made(world, "default", scopes=["run"])
    caller = Caller(scopes=frozenset({"tenant", "run"}))
    refused = await call(world, "DELETE", f"/v1/keys/{strong['id']}", caller=caller)
    assert refused.status == 403 and refused.document is not None and "admin" in refused.document["detail"]
    shown = await call(world, "GET", f"/v1/keys/{strong['id']}")
    assert shown.document is not None and shown.document["state"] == "active"
    assert (await call(world, "DELETE", f"/v1/keys/{weak['id']}", caller=caller)).status == 200


async def test_who_could_not_give_a_user_s_key_neither_disables_nor_removes_the_user(world: World) -> None:
    strong = await made(world, "default", user="li", scopes=["admin"])
    await made(world, "default", user="bo", scopes=["run"])
    caller = Caller(scopes=frozenset({"tenant", "run", "read"}))
    for method, change in (("PATCH", {"disabled": True}), ("PATCH", {"disabled": False}), ("DELETE", None)):
        refused = await call(world, method, "/v1/users/li", change, caller=caller)
        assert refused.status == 403 and refused.document is not None and "admin" in refused.document["detail"]
    assert (await enters(world, strong["key"])).user_id == "li"
    assert (await call(world, "PATCH", "/v1/users/li", {"name": "李"}, caller=caller)).status == 200
    assert (await call(world, "PATCH", "/v1/users/bo", {"disabled": True}, caller=caller)).status == 200
    assert (await call(world, "DELETE", "/v1/users/bo", caller=caller)).status in (200, 204)
    # A key that lets nobody in any more does not protect anybody.
    assert (await call(world, "DELETE", f"/v1/keys/{strong['id']}")).status == 200
    assert (await call(world, "DELETE", "/v1/users/li", caller=caller)).status in (200, 204)


async def test_a_loop_behind_the_calls_survives_a_fault_of_ours(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.services is not None
    monkeypatch.setattr("corral.services.control.AGAIN_S", 0.0)
    turns: list[int] = []

    async def loop() -> None:
        turns.append(len(turns))
        if len(turns) < 3:
            raise ZeroDivisionError("a fault of ours")

    await world.services.core.keep_on(loop, "loop")
    assert turns == [0, 1, 2]
