"""A store that is set back to an older copy under what runs: nothing is begun twice, and no result says more than is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from corral.domain.quota import Ceiling, QuotaRules, TenantLimits

from .cluster import Cluster
from .test_workers import PRINT, SLEEP, Gate, finished


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await cluster.start("a")
    await cluster.start("b")
    yield cluster
    await cluster.stop()


def forget(cluster: Cluster, sandbox_id: str) -> None:
    """The store is as before the sandbox was made; its run is there."""
    tables: Any = cluster.store
    for name in ("_sandboxes", "_leases"):
        del getattr(tables, name)[sandbox_id]
    for name in ("_instances", "_commands", "_execs"):
        rows = getattr(tables, name)
        for key in [key for key, row in rows.items() if row["sandbox_id"] == sandbox_id]:
            del rows[key]


async def sandbox_of(cluster: Cluster, run_id: str) -> str:
    run = await cluster.store.get_run(run_id, "default")
    assert run is not None and run.sandbox_id is not None
    return run.sandbox_id


@pytest.mark.parametrize("lost", [False, True])
async def test_a_run_whose_sandbox_is_forgotten_while_it_is_made_ends_and_leaves_one_body_that_goes(two, until, lost):
    gate = two.node.create_gate = asyncio.Event()
    run_id = (await two.call("a", "POST", "/v1/runs", PRINT, wait=0)).document["id"]
    await until(lambda: two.node.creates)
    sandbox_id = await sandbox_of(two, run_id)
    two.store.lost = lost
    gate.set()
    if lost:
        await until(lambda: two.workers["a"].services.core.store_lost)
        await until(lambda: not two.workers["a"].services.sandboxes._lifecycle._providing)
    forget(two, sandbox_id)
    two.store.lost = False
    run = await finished(two, "a", run_id)
    assert (run["result"]["reason"], run["result"]["started"]) == ("infra_error", False), run["result"]
    assert len(two.node.creates) == 1 and not two.node.starts
    assert await two.store.get_sandbox(sandbox_id, None) is None

    async def none_lives() -> bool:
        return not await two.node.instances()

    await until(none_lives)


async def test_a_program_that_ran_is_never_told_as_not_started_though_its_row_is_gone(two, until):
    run_id = (await two.call("a", "POST", "/v1/runs", SLEEP, wait=0)).document["id"]
    await until(lambda: two.node.starts)
    sandbox_id = await sandbox_of(two, run_id)
    [record] = await two.store.list_execs(sandbox_id)
    del two.store._execs[record.exec_id]
    await two.node.end_exec(record.exec_id, "cancelled")
    run = await finished(two, "a", run_id)
    assert (run["result"]["reason"], run["result"]["started"]) == ("infra_error", True), run["result"]


async def test_an_exec_of_an_older_copy_that_the_node_does_not_know_may_have_started(two, until, monkeypatch):
    box = (await two.call("a", "POST", "/v1/sandboxes", {})).document["id"]
    gate = Gate(monkeypatch, two.node, "start_exec")
    route = f"/v1/sandboxes/{box}/execs"
    exec_id = (await two.call("a", "POST", route, {"argv": ["sleep"], "wait": False})).document["id"]
    await gate.reached.wait()
    services = two.workers["b"].services
    services.core.set_back()
    await two.kill("a")  # the other finds a row that says less than may have happened
    row = (await two.call("b", "GET", f"/v1/execs/{exec_id}", wait=10)).document
    assert (row["state"], row["result"]["reason"], row["result"]["started"]) == ("lost", "sandbox_lost", None), row
    assert not two.node.starts


async def test_runs_and_execs_are_dated_by_the_clock_of_the_store(two, until):
    ahead = two.workers["b"]
    ahead.offset_ms += 3_600_000
    run_id = (await two.call("b", "POST", "/v1/runs", SLEEP, wait=0)).document["id"]
    await until(lambda: two.node.starts)
    run = await two.store.get_run(run_id, "default")
    [record] = await two.store.list_execs(await sandbox_of(two, run_id))
    for at in (run.created_at, record.created_at):
        assert abs(at - two.now_ms()) < 600_000, "else what is older than a restored copy would seem newer"
    await two.call("b", "POST", f"/v1/runs/{run_id}/cancel")
    await finished(two, "a", run_id)


async def test_what_was_seen_of_a_sandbox_before_the_store_was_set_back_is_not_committed_over(two):
    services = two.workers["a"].services
    box = (await two.call("a", "POST", "/v1/sandboxes", {})).document["id"]
    lifecycle = services.sandboxes._lifecycle
    seen = await lifecycle.view(box)
    row = two.store._sandboxes[box]  # the same version as was seen, of another history
    two.store._sandboxes[box] = {**row, "tainted": True}
    assert not (await lifecycle.latest(box, "default")).sandbox.tainted, "else this test shows nothing"
    await services.leases.floors.set_back()
    now = await lifecycle.latest(box, "default")
    assert now.sandbox.tainted and now.sandbox.version >= seen.sandbox.version


async def test_a_queued_run_that_a_restored_store_knows_only_from_before_it_was_queued_ends_with_the_reason(two, until):
    one = QuotaRules(Ceiling(running=1), {"*": TenantLimits()})
    for world in two.workers.values():
        world.services.core.quota = one
    first = (await two.call("a", "POST", "/v1/runs", SLEEP, wait=0)).document["id"]
    await until(lambda: two.node.starts)
    run_id = (await two.call("a", "POST", "/v1/runs", PRINT, wait=0)).document["id"]

    async def queued() -> bool:
        row = await two.store.get_run(run_id, "default")
        return row is not None and row.state == "queued" and bool(two.workers["a"].services.queue._waits)

    await until(queued)
    tables: Any = two.store
    del tables._queue[run_id]
    tables._use["default"]["waiting"] -= 1
    tables._runs[run_id] = {**tables._runs[run_id], "state": "planning", "decisions": "{}"}
    two.workers["a"].services.queue._waits[run_id].set()
    run = await finished(two, "a", run_id)
    assert (run["result"]["reason"], run["result"]["started"]) == ("infra_error", False), run["result"]
    assert "restored" in run["result"]["hint"] and "send it again" in run["result"]["hint"]
    await two.call("a", "POST", f"/v1/runs/{first}/cancel")
    await finished(two, "a", first)
