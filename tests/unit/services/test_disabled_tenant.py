"""What becomes of the things of a tenant that is disabled, and what an admin can do about them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from corral.api.routes import ROUTES, Reply, Request, dispatch
from corral.domain.identity import EVERYTHING
from corral.domain.quota import Amounts, Ceiling, QuotaRules, TenantLimits
from corral.services import identity as identity_module
from corral.services.events import Caller

from .conftest import World

ADMIN = Caller()
ACME = Caller("acme", "key:acme", scopes=frozenset({"run", "read", "tenant"}))
BOLT = Caller("bolt", "key:bolt", scopes=frozenset({"run", "read", "tenant"}))
WAIT = {"command": ["sleep"]}
OFF = {"disabled": True}


async def call(world: World, caller: Caller, method: str, path: str, document: Any = None) -> Reply:
    assert world.services is not None
    path, _, query = path.partition("?")
    parts = dict(part.split("=") for part in query.split("&")) if query else {}
    return await dispatch(world.services, Request(method, path, parts, {}, b"", document, caller))


async def got(world: World, caller: Caller, method: str, path: str, document: Any = None) -> dict[str, Any]:
    reply = await call(world, caller, method, path, document)
    assert reply.status < 300 and reply.document is not None, reply
    return reply.document


@pytest.fixture
async def tenants(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """`acme` and `bolt`, each of which may have one run at a time."""
    monkeypatch.setattr(identity_module, "HOLDS_S", 0.05)
    for name in ("acme", "bolt"):
        await got(world, ADMIN, "POST", "/v1/tenants", {"id": name})
    assert world.services is not None
    world.services.core.quota = QuotaRules(Ceiling(), {"*": TenantLimits(Ceiling(running=1))})
    return world


async def running(world: World, caller: Caller) -> str:
    run_id = str((await got(world, caller, "POST", "/v1/runs?wait=0", WAIT))["id"])
    async with asyncio.timeout(10):
        while (await got(world, caller, "GET", f"/v1/runs/{run_id}"))["state"] != "running":
            await asyncio.sleep(0.005)
    return run_id


async def queued(world: World, caller: Caller) -> str:
    run_id = str((await got(world, caller, "POST", "/v1/runs?wait=0", {"command": ["print", "x"]}))["id"])
    async with asyncio.timeout(10):
        while (await got(world, caller, "GET", f"/v1/runs/{run_id}"))["state"] != "queued":
            await asyncio.sleep(0.005)
    return run_id


async def test_what_waits_is_cancelled_what_runs_goes_on_and_nothing_is_held_afterwards(tenants: World) -> None:
    busy = await running(tenants, ACME)
    waiting = [await queued(tenants, ACME) for _ in range(3)]
    other = await running(tenants, BOLT)
    assert (await got(tenants, ADMIN, "PATCH", "/v1/tenants/acme", OFF))["state"] == "disabled"
    for run_id in waiting:
        run = await got(tenants, ADMIN, "GET", f"/v1/runs/{run_id}?tenant=acme&wait=10")
        assert (run["result"]["reason"], run["result"]["started"]) == ("cancelled", False)
    assert (await got(tenants, ADMIN, "GET", "/v1/queue?tenant=acme"))["waiting"] == 0
    assert (await got(tenants, ADMIN, "GET", f"/v1/runs/{busy}?tenant=acme"))["state"] == "running"
    assert (await got(tenants, BOLT, "GET", f"/v1/runs/{other}"))["state"] == "running", "nobody else's"
    ended = await got(tenants, ADMIN, "POST", f"/v1/runs/{busy}/cancel?tenant=acme")
    assert ended["result"]["reason"] == "cancelled"
    await got(tenants, BOLT, "POST", f"/v1/runs/{other}/cancel")
    async with asyncio.timeout(10):
        while (await tenants.store.tenant_use("acme")).use != Amounts():
            await asyncio.sleep(0.005)
    assert await tenants.store.quota_drift() == []


async def test_a_run_that_was_sent_in_the_last_moment_is_cancelled_too(tenants: World) -> None:
    busy = await running(tenants, ACME)
    await got(tenants, ADMIN, "PATCH", "/v1/tenants/acme", OFF)
    late = await queued(tenants, ACME)  # its key had been looked at just before
    run = await got(tenants, ADMIN, "GET", f"/v1/runs/{late}?tenant=acme&wait=10")
    assert (run["result"]["reason"], run["result"]["started"]) == ("cancelled", False)
    await got(tenants, ADMIN, "POST", f"/v1/runs/{busy}/cancel?tenant=acme")


async def test_a_waiting_run_that_nobody_cancelled_is_refused_at_its_turn(
    tenants: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def died(*_: Any) -> None:
        """As if the worker had ended between the commit and the cancels."""

    assert tenants.services is not None
    monkeypatch.setattr(tenants.services.identity, "_cancel_waiting", died)
    busy = await running(tenants, ACME)
    waiting = await queued(tenants, ACME)
    await got(tenants, ADMIN, "PATCH", "/v1/tenants/acme", OFF)
    await got(tenants, ADMIN, "POST", f"/v1/runs/{busy}/cancel?tenant=acme")
    run = await got(tenants, ADMIN, "GET", f"/v1/runs/{waiting}?tenant=acme&wait=10")
    assert (run["result"]["reason"], run["result"]["started"]) == ("policy_denied", False)
    assert "disabled" in str(run)
    assert await tenants.store.quota_drift() == []


async def test_a_tenant_that_is_enabled_again_at_once_loses_no_new_run(tenants: World) -> None:
    await got(tenants, ADMIN, "PATCH", "/v1/tenants/acme", OFF)
    await got(tenants, ADMIN, "PATCH", "/v1/tenants/acme", {"disabled": False})
    busy = await running(tenants, ACME)
    waiting = await queued(tenants, ACME)
    await asyncio.sleep(0.3)  # longer than late ones are looked for
    assert (await got(tenants, ACME, "GET", f"/v1/runs/{waiting}"))["state"] == "queued"
    for run_id in (waiting, busy):
        await got(tenants, ACME, "POST", f"/v1/runs/{run_id}/cancel")


async def test_an_admin_sees_and_removes_what_a_disabled_tenant_has(tenants: World) -> None:
    box = await got(tenants, ACME, "POST", "/v1/sandboxes", {})
    at = f"/v1/sandboxes/{box['id']}"
    started = await got(tenants, ACME, "POST", f"{at}/execs?wait=0", {"argv": ["sleep"]})
    await got(tenants, ADMIN, "PATCH", "/v1/tenants/acme", OFF)
    refused = await call(tenants, ADMIN, "DELETE", "/v1/tenants/acme")
    assert refused.document is not None and refused.document["code"] == "tenant_in_use"
    assert "corral sandbox rm --tenant acme" in refused.document["hint"]
    for path in ("/v1/sandboxes", "/v1/leases"):
        items = (await got(tenants, ADMIN, "GET", f"{path}?tenant=acme"))["items"]
        assert [item.get("id") or item["sandbox_id"] for item in items] == [box["id"]], path
        assert (await got(tenants, ADMIN, "GET", path))["items"] == [], "unnamed it is the admin's own"
    assert (await got(tenants, ADMIN, "GET", f"{at}?tenant=acme"))["history"]
    assert (await got(tenants, ADMIN, "GET", f"{at}/execs?tenant=acme"))["items"][0]["id"] == started["id"]
    assert (await call(tenants, ADMIN, "GET", at)).status == 404
    done = await got(tenants, ADMIN, "POST", f"/v1/execs/{started['id']}/cancel?tenant=acme")
    assert done["result"]["reason"] == "cancelled"
    assert (await got(tenants, ADMIN, "DELETE", f"{at}?tenant=acme"))["state"] == "terminated"
    removed = [row for row in tenants.store._audit.values() if row["kind"] == "sandbox.deleted"]
    assert [(row["tenant_id"], row["actor"]) for row in removed] == [("acme", ADMIN.actor)]
    assert (await got(tenants, ADMIN, "DELETE", "/v1/tenants/acme"))["state"] == "deleted"
    assert (await call(tenants, ADMIN, "GET", "/v1/sandboxes?tenant=acme")).status == 404


async def test_nobody_else_names_another_tenant_whether_it_is_there_or_not(tenants: World) -> None:
    box = await got(tenants, ACME, "POST", "/v1/sandboxes", {})
    for route in ROUTES:
        if not route.is_tenants_own:
            continue
        path = route.pattern.replace("{sandbox_id}", box["id"]).replace("{path:path}", "x")
        path = path.replace("{run_id}", "run_x").replace("{exec_id}", "exe_x")
        theirs = await call(tenants, BOLT, route.method, f"{path}?tenant=acme", {})
        never = await call(tenants, BOLT, route.method, f"{path}?tenant=nobody", {})
        assert theirs.status == never.status == 404, route
        assert str(theirs.document).replace("acme", "nobody") == str(never.document), route
    assert (await got(tenants, ACME, "GET", f"/v1/sandboxes/{box['id']}?tenant=acme"))["id"] == box["id"], "one's own"
    bad = await call(tenants, ADMIN, "GET", "/v1/sandboxes?tenant=../x")
    assert bad.status == 422 and bad.document is not None and bad.document["field"] == "/tenant"


async def test_in_another_s_name_an_admin_begins_changes_and_reads_nothing(tenants: World) -> None:
    box = await got(tenants, ACME, "POST", "/v1/sandboxes", {})
    named = {f"{route.method} {route.pattern}" for route in ROUTES if route.of_tenant}
    assert named == {
        "GET /v1/runs", "GET /v1/runs/{run_id}", "POST /v1/runs/{run_id}/cancel",
        "GET /v1/sandboxes", "GET /v1/sandboxes/{sandbox_id}", "DELETE /v1/sandboxes/{sandbox_id}",
        "GET /v1/sandboxes/{sandbox_id}/execs", "GET /v1/execs/{exec_id}", "POST /v1/execs/{exec_id}/cancel",
        "GET /v1/leases", "GET /v1/queue",
    }  # fmt: skip
    for route in ROUTES:
        if route.is_tenants_own and not route.of_tenant:
            path = route.pattern.replace("{sandbox_id}", box["id"]).replace("{path:path}", "x")
            path = path.replace("{run_id}", "run_x").replace("{exec_id}", "exe_x")
            refused = await call(tenants, ADMIN, route.method, f"{path}?tenant=acme", {})
            assert refused.document is not None and refused.document["field"] == "/tenant", route
    assert (await got(tenants, ADMIN, "GET", "/v1/runs?tenant=acme"))["items"] == []
    assert ADMIN.scopes == EVERYTHING
