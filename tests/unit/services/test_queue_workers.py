"""The queue among several workers: whoever is alive lets in what there is room for, and drives what the dead have left waiting."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral.domain.quota import Amounts, Ceiling, QuotaRules, TenantLimits
from corral.errors import CorralError

from .cluster import Cluster

PRINT = {"command": ["print", "hi"]}
SLEEP = {"command": ["sleep"]}
ONE_AT_A_TIME = QuotaRules(Ceiling(running=1), {"*": TenantLimits()})


async def begin(cluster: Cluster, name: str) -> None:
    world = await cluster.start(name)
    world.services.core.quota = ONE_AT_A_TIME


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await begin(cluster, "a")
    await begin(cluster, "b")
    yield cluster
    await cluster.stop()


async def submit(cluster: Cluster, name: str, document=PRINT) -> str:
    reply = await cluster.call(name, "POST", "/v1/runs", document, wait=0)
    assert reply.status == 202, reply.document
    return reply.document["id"]


async def ended(cluster: Cluster, name: str, run_id: str) -> dict:
    reply = await cluster.call(name, "GET", f"/v1/runs/{run_id}", wait=20)
    assert reply.document["state"] == "finished", reply.document
    return reply.document["result"]


def in_state(cluster: Cluster, run_id: str, state: str):
    async def check() -> bool:
        run = await cluster.store.get_run(run_id, "default")
        return run is not None and run.state == state

    return check


async def nothing_is_held(cluster: Cluster) -> bool:
    return (await cluster.store.tenant_use("*")).use == Amounts() and await cluster.store.quota_drift() == []


async def waiting(cluster: Cluster, count: int) -> bool:
    return await cluster.store.waiting() == count


async def test_a_run_is_let_in_by_the_worker_at_which_room_came_free(two, until):
    first = await submit(two, "a", SLEEP)
    await until(in_state(two, first, "running"))
    second = await submit(two, "b")
    await until(in_state(two, second, "queued"))
    await two.call("a", "POST", f"/v1/runs/{first}/cancel")
    assert (await ended(two, "b", second))["reason"] == "ok"
    run = await two.store.get_run(second, "default")
    assert run.driver == "w_b"
    await until(lambda: nothing_is_held(two))


async def test_wake_ups_that_are_lost_only_make_it_slower(two, until):
    first = await submit(two, "a", SLEEP)
    await until(in_state(two, first, "running"))
    second = await submit(two, "b")
    await until(in_state(two, second, "queued"))
    two.hub.works = False
    await two.call("a", "POST", f"/v1/runs/{first}/cancel")
    assert (await ended(two, "b", second))["reason"] == "ok"


async def test_a_queue_whose_owner_was_killed_is_worked_off_by_another(two, until):
    first = await submit(two, "a", SLEEP)
    await until(in_state(two, first, "running"))
    queued = [await submit(two, "a") for _ in range(6)]
    await until(lambda: waiting(two, 6))
    await two.kill("a")
    assert await two.store.quota_drift() == []
    await until(lambda: _driven_by(two, queued, "w_b"))
    await two.call("b", "POST", f"/v1/runs/{first}/cancel")
    for run_id in queued:
        result = await ended(two, "b", run_id)
        assert (result["reason"], result["started"]) == ("ok", True)
    assert len(two.node.starts) == 7
    await until(lambda: nothing_is_held(two))


async def _driven_by(cluster: Cluster, run_ids: list[str], worker: str) -> bool:
    rows = [await cluster.store.get_run(run_id, "default") for run_id in run_ids]
    return all(row is not None and row.driver == worker for row in rows)


async def test_a_queued_run_is_cancelled_through_any_worker(two, until):
    first = await submit(two, "a", SLEEP)
    await until(in_state(two, first, "running"))
    second = await submit(two, "a")
    await until(in_state(two, second, "queued"))
    await two.call("b", "POST", f"/v1/runs/{second}/cancel")
    result = await ended(two, "b", second)
    assert (result["reason"], result["started"]) == ("cancelled", False)
    await two.call("b", "POST", f"/v1/runs/{first}/cancel")
    await until(lambda: nothing_is_held(two))


async def test_a_deadline_is_kept_although_its_driver_was_killed(two, until):
    first = await submit(two, "a", SLEEP)
    await until(in_state(two, first, "running"))
    second = await submit(two, "a", PRINT | {"queue_timeout_s": 0.5})
    await until(in_state(two, second, "queued"))
    await two.kill("a")
    result = await ended(two, "b", second)
    assert (result["reason"], result["started"]) == ("queue_timeout", False)


async def test_many_workers_let_in_no_more_than_there_is_room_for(two, until):
    await begin(two, "c")
    most = 0
    admit, place = two.store.admit, two.store.place_run

    async def seen(call, *args, **more):
        nonlocal most
        answer = await call(*args, **more)
        most = max(most, (await two.store.tenant_use("*")).use.running)
        return answer

    two.store.admit = lambda *args: seen(admit, *args)
    two.store.place_run = lambda *args, **more: seen(place, *args, **more)
    runs = [await submit(two, name) for _ in range(10) for name in "abc"]
    for run_id in runs:
        assert (await ended(two, "b", run_id))["reason"] == "ok"
    assert most == 1 and len(two.node.starts) == 30
    await until(lambda: nothing_is_held(two))


async def test_a_commit_whose_answer_was_lost_places_a_run_once(two, until):
    """The store says that it failed after each transaction of a kind, once for each run."""
    failed: set[str] = set()
    for name in ("place_run", "finish_run"):
        real = getattr(two.store, name)

        async def doubtful(run_id, *args, _real=real, _name=name, **more):
            answer = await _real(run_id, *args, **more)
            if f"{_name} {run_id}" not in failed:
                failed.add(f"{_name} {run_id}")
                raise CorralError("store_error", "the connection broke during the commit")
            return answer

        setattr(two.store, name, doubtful)
    runs = [await submit(two, name) for name in "abab"]
    for run_id in runs:
        assert (await ended(two, "a", run_id))["reason"] == "ok"
    assert len(failed) == 8 and len(two.node.starts) == 4
    await until(lambda: nothing_is_held(two))
