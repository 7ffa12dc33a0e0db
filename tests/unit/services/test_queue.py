"""The queue over a node in memory: who waits, who is next, what is refused, and that quota comes back on every path."""

from __future__ import annotations

from dataclasses import replace

import pytest

from corral.api.routes import Request, dispatch
from corral.domain.quota import Amounts, Ceiling, QuotaRules, TenantLimits
from corral.errors import CorralError
from corral.services.events import Caller

PRINT = {"command": ["print", "hi"]}
SLEEP = {"command": ["sleep"]}


def limit(world, host: Ceiling | None = None, weights: dict[str, float] | None = None, **most: int) -> None:
    """From now on these are the rules."""
    tenants = {"*": TenantLimits(Ceiling(**most))}
    tenants |= {name: TenantLimits(Ceiling(**most), weight) for name, weight in (weights or {}).items()}
    world.services.core.quota = QuotaRules(host or Ceiling(), tenants)


async def submit(world, document, tenant="default", wait=0.0, **headers):
    request = Request("POST", "/v1/runs", {"wait": str(wait)}, headers, b"", document, Caller(tenant, f"key:{tenant}"))
    return await dispatch(world.services, request)


async def show(world, run_id, tenant="default", wait=0.0):
    request = Request("GET", f"/v1/runs/{run_id}", {"wait": str(wait)}, caller=Caller(tenant, f"key:{tenant}"))
    return (await dispatch(world.services, request)).document


async def end(world, run_id, tenant="default"):
    request = Request("POST", f"/v1/runs/{run_id}/cancel", {}, caller=Caller(tenant, f"key:{tenant}"))
    return (await dispatch(world.services, request)).document


async def nothing_is_held(world):
    return (await world.store.tenant_use("*")).use == Amounts() and await world.store.quota_drift() == []


def in_state(world, run_id, state, tenant="default"):
    async def check():
        run = await world.store.get_run(run_id, tenant)
        return run is not None and run.state == state

    return check


async def test_a_run_without_room_is_queued_and_starts_when_there_is(world, until):
    limit(world, running=1)
    first = (await submit(world, SLEEP)).document["id"]
    await until(in_state(world, first, "running"))
    answer = await submit(world, PRINT)
    second = answer.document["id"]
    assert answer.status == 202 and answer.document["state"] == "queued"
    await until(in_state(world, second, "queued"))
    document = await show(world, second)
    assert document["sandbox_id"] is None
    assert document["queue"]["position"] == 1 and document["queue"]["ahead"] == 0
    assert document["queue"]["waiting_for"] == "tenants.running"
    queue = (await world.call("GET", "/v1/queue")).document
    assert [item["run_id"] for item in queue["items"]] == [second]
    assert queue["use"]["running"] == 1 and queue["limits"]["running"] == 1 and queue["waiting"] == 1
    await end(world, first)
    document = await show(world, second, wait=10)
    assert document["state"] == "finished" and document["result"]["reason"] == "ok" and document["queue"] is None
    assert document["result"]["timings"]["queued_ms"] > 0
    await until(lambda: nothing_is_held(world))


async def test_a_run_ends_when_it_has_waited_as_long_as_it_may(world, until):
    limit(world, running=1)
    first = (await submit(world, SLEEP)).document["id"]
    await until(in_state(world, first, "running"))
    answer = await submit(world, PRINT | {"queue_timeout_s": 0.05}, wait=10)
    result = answer.document["result"]
    assert (result["reason"], result["started"], result["exit_code"]) == ("queue_timeout", False, None)
    assert "tenants.running" in result["hint"]
    assert answer.document["decisions"]["placement"]["runtime"] == "bubblewrap"
    await end(world, first)
    await until(lambda: nothing_is_held(world))


async def test_a_queued_run_is_cancelled_at_once(world, until):
    limit(world, running=1)
    first = (await submit(world, SLEEP)).document["id"]
    await until(in_state(world, first, "running"))
    second = (await submit(world, PRINT)).document["id"]
    await until(in_state(world, second, "queued"))
    result = (await end(world, second))["result"]
    assert (result["reason"], result["started"]) == ("cancelled", False)
    await end(world, first)
    await until(lambda: nothing_is_held(world))


async def test_priorities_decide_within_a_tenant(world, until):
    limit(world, running=1)
    first = (await submit(world, SLEEP)).document["id"]
    await until(in_state(world, first, "running"))
    made = {}
    for priority in ("low", "normal", "high"):
        made[priority] = (await submit(world, PRINT | {"priority": priority})).document["id"]
        await until(in_state(world, made[priority], "queued"))
    queue = (await world.call("GET", "/v1/queue")).document
    assert [item["run_id"] for item in queue["items"]] == [made["high"], made["normal"], made["low"]]
    await end(world, first)
    for run_id in made.values():
        assert (await show(world, run_id, wait=10))["result"]["reason"] == "ok"
    rows = [await world.store.get_run(run_id, "default") for run_id in (made["high"], made["normal"], made["low"])]
    assert [row.finished_at for row in rows] == sorted(row.finished_at for row in rows)


async def test_two_tenants_share_although_one_is_greedy(world, until):
    limit(world, host=Ceiling(running=1))
    first = (await submit(world, SLEEP, "other")).document["id"]
    await until(in_state(world, first, "running", "other"))
    greedy = [(await submit(world, PRINT, "greedy")).document["id"] for _ in range(50)]
    await until(lambda: _waits(world, "greedy", 50))
    modest = [(await submit(world, PRINT, "modest")).document["id"] for _ in range(50)]
    await until(lambda: _waits(world, "modest", 50))
    admitted: list[str] = []
    admit = world.store.admit

    async def seen(*args):
        runs = await admit(*args)
        admitted.extend(run.tenant_id for run in runs)
        return runs

    world.store.admit = seen
    await end(world, first, "other")
    for tenant, ids in (("greedy", greedy), ("modest", modest)):
        for run_id in ids:
            document = await show(world, run_id, tenant, wait=30)
            assert document["result"]["reason"] == "ok", document["result"]
    assert len(admitted) == 100
    for cut in range(2, 101):
        assert abs(admitted[:cut].count("greedy") - admitted[:cut].count("modest")) <= 1
    await until(lambda: nothing_is_held(world))


async def _waits(world, tenant, count):
    return (await world.store.tenant_use(tenant)).waiting == count


async def test_the_depth_of_the_queue_is_a_limit_with_a_time_to_come_back(world, until):
    limit(world, running=1, queued=1)
    first = (await submit(world, SLEEP)).document["id"]
    await until(in_state(world, first, "running"))
    second = await submit(world, PRINT, **{"idempotency-key": "a"})
    await until(in_state(world, second.document["id"], "queued"))
    full = await submit(world, PRINT)
    assert full.status == 429 and full.document["code"] == "queue_full" and int(full.headers["Retry-After"]) > 0
    again = await submit(world, PRINT, **{"idempotency-key": "a"})
    assert again.status == 202 and again.document["id"] == second.document["id"], "a repeated call is not charged"
    other = await submit(world, PRINT, "t2", wait=10)
    assert other.status == 200
    await end(world, first)
    await show(world, second.document["id"], wait=10)
    await until(lambda: nothing_is_held(world))


async def test_what_can_never_fit_is_denied_at_once(world):
    limit(world, memory=256 << 20)
    answer = await submit(world, PRINT, wait=10)
    result, guard = answer.document["result"], answer.document["decisions"]["guard"]
    assert answer.status == 200 and result["reason"] == "policy_denied" and result["started"] is False
    assert guard["verdict"] == "deny" and guard["rule"] == "tenants.memory" and "256" in result["hint"]
    made = await world.call("POST", "/v1/sandboxes", {})
    assert made.status == 403 and made.document["code"] == "policy_denied"
    assert await nothing_is_held(world)


async def test_a_priority_that_the_policy_does_not_allow_is_denied_with_what_it_does(world):
    rules = TenantLimits(priorities=frozenset({"normal", "low"}))
    world.services.core.quota = QuotaRules(tenants={"*": rules})
    answer = await submit(world, PRINT | {"priority": "high"}, wait=10)
    assert answer.document["result"]["reason"] == "policy_denied"
    assert answer.document["decisions"]["guard"]["suggested"] == {"priority": "normal"}
    late = await submit(world, PRINT | {"queue_timeout_s": 10**6}, wait=10)
    assert late.document["decisions"]["guard"]["rule"] == "queue.max_timeout_s"
    wrong = await submit(world, PRINT | {"priority": "urgent"})
    assert wrong.status == 422 and wrong.document["field"] == "/priority"


async def test_a_sandbox_over_the_quota_is_refused_and_its_room_comes_back(world, until):
    limit(world, sandboxes=1)
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    refused = await world.call("POST", "/v1/sandboxes", {})
    assert refused.status == 429 and refused.document["code"] == "quota_exceeded"
    assert refused.document["limit"] == "tenants.sandboxes" and int(refused.headers["Retry-After"]) > 0
    assert "1 sandboxes" in refused.document["detail"]
    await world.call("DELETE", f"/v1/sandboxes/{made['id']}")
    await until(lambda: nothing_is_held(world))
    assert (await world.call("POST", "/v1/sandboxes", {})).status == 201


async def test_a_run_waits_for_the_room_of_a_kept_sandbox(world, until):
    limit(world, sandboxes=1)
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    run_id = (await submit(world, PRINT)).document["id"]
    await until(in_state(world, run_id, "queued"))
    assert (await show(world, run_id))["queue"]["waiting_for"] == "tenants.sandboxes"
    await world.call("DELETE", f"/v1/sandboxes/{made['id']}")
    assert (await show(world, run_id, wait=10))["result"]["reason"] == "ok"


@pytest.mark.parametrize(
    "document",
    [PRINT, {"command": ["exit", "3"]}, {"command": ["missing"]}, {"command": ["die"]}, {"code": "x", "language": "c"}],
)
async def test_quota_comes_back_however_a_run_ends(world, until, document):
    answer = await submit(world, document, wait=10)
    assert answer.status == 200 and answer.document["state"] == "finished"
    await until(lambda: nothing_is_held(world))


async def test_quota_comes_back_when_nothing_can_be_made(world, until):

    async def fails(*_):
        raise CorralError("infra_error", "no more disk")

    world.node.create = fails
    answer = await submit(world, PRINT, wait=10)
    assert answer.document["result"]["reason"] == "infra_error"
    made = await world.call("POST", "/v1/sandboxes", {})
    assert made.status >= 500
    await until(lambda: nothing_is_held(world))


async def test_a_kept_run_holds_its_sandbox_until_the_time_is_over(world, until):
    answer = await submit(world, PRINT | {"keep": True, "ttl_s": 1}, wait=10)
    assert answer.document["result"]["reason"] == "ok"
    use = (await world.store.tenant_use("default")).use
    assert (use.running, use.sandboxes) == (0, 1)
    await until(lambda: nothing_is_held(world))


async def test_a_killed_owner_leaves_a_queue_that_the_next_one_works_off(world, until):
    limit(world, running=1)
    first = (await submit(world, SLEEP)).document["id"]
    await until(in_state(world, first, "running"))
    ids = [(await submit(world, PRINT)).document["id"] for _ in range(5)]
    await until(lambda: _waits(world, "default", 5))
    rules = world.services.core.quota
    await world.crash()
    assert await world.store.quota_drift() == []
    await world.start()
    world.services.core.quota = rules
    await end(world, first)
    for run_id in ids:
        assert (await show(world, run_id, wait=30))["result"]["reason"] == "ok"
    await until(lambda: nothing_is_held(world))


async def test_a_run_that_finds_room_costs_no_more_calls_of_the_store(world):
    calls: list[str] = []
    for name in ("submit_run", "update_run", "place_run", "admit", "waiting", "queued_run", "tenant_use", "finish_run"):
        real = getattr(world.store, name)

        def counted(*args, _name=name, _real=real, **more):
            calls.append(_name)
            return _real(*args, **more)

        setattr(world.store, name, counted)
    await submit(world, PRINT, wait=10)
    assert calls.count("place_run") == 1 and not {"admit", "waiting", "queued_run", "tenant_use"} & set(calls)


async def test_doctor_tells_drift_and_gc_mends_it(world):
    await submit(world, PRINT | {"keep": True}, wait=10)
    assert (await world.call("GET", "/v1/doctor")).document["quota"] == []
    row = world.store._use["default"]
    world.store._use["default"] = {**row, "held": replace(row["held"], sandboxes=7)}
    [drift] = (await world.call("GET", "/v1/doctor")).document["quota"]
    assert (drift["kind"], drift["subject"]) == ("sum", "default")
    assert (await world.call("POST", "/v1/gc")).document["removed"]["reservation"] == 1
    assert (await world.call("GET", "/v1/doctor")).document["quota"] == []


async def test_a_key_may_call_as_often_as_the_policy_says(world):
    core = world.services.core
    core.policy = replace(core.policy, calls_per_minute=3)
    answers = [await world.call("GET", "/v1/queue") for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
    assert answers[-1].document["code"] == "rate_limited" and 0 < int(answers[-1].headers["Retry-After"]) <= 60
    assert (await world.call("GET", "/healthz")).status == 200
    request = Request("GET", "/v1/queue", caller=Caller("t2", "key:t2"))
    assert (await dispatch(world.services, request)).status == 200, "each key for itself"
