"""Several workers on one store and one node: every accepted run, exec and sandbox is brought to its end by whoever is alive."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster

PRINT = {"command": ["print", "你好"]}
SLEEP = {"command": ["sleep"]}


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await cluster.start("a")
    await cluster.start("b")
    yield cluster
    await cluster.stop()


class Gate:
    """Stops the first call of a method until it is opened (or its caller is killed); later calls pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Any, name: str, *, after: bool = False) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()
        real = getattr(target, name)

        async def held(*args: Any, **more: Any) -> Any:
            first, result = not self.reached.is_set(), None
            self.reached.set()
            if after:
                result = await real(*args, **more)
            if first:
                await self.open.wait()
            return result if after else await real(*args, **more)

        monkeypatch.setattr(target, name, held)


async def finished(cluster: Cluster, name: str, run_id: str) -> dict[str, Any]:
    reply = await cluster.call(name, "GET", f"/v1/runs/{run_id}", wait=10)
    assert reply.document is not None and reply.document["state"] == "finished", reply.document
    return reply.document


async def state(cluster: Cluster, sandbox_id: str) -> str | None:
    view = await cluster.store.get_sandbox(sandbox_id, None)
    return None if view is None else view.sandbox.state


async def audits(cluster: Cluster, kind: str, subject: str) -> int:
    return sum(row.kind == kind for row in await cluster.store.list_audit("default", subject=subject))


STAGES = [
    ("store", "update_run", False),
    ("node", "ensure_template", False),
    ("store", "create_sandbox", False),
    ("store", "create_sandbox", True),
    ("node", "create", False),
    ("node", "create", True),
    ("node", "fence", False),
    ("store", "begin_exec", False),
    ("store", "begin_exec", True),
    ("node", "start_exec", False),
    ("node", "start_exec", True),
    ("node", "wait_exec", True),
    ("node", "collect", False),
    ("store", "end_exec", False),
    ("store", "end_exec", True),
    ("store", "finish_run", False),
    ("store", "finish_run", True),
    ("node", "destroy", False),
    ("node", "destroy", True),
]


@pytest.mark.parametrize(("where", "what", "after"), STAGES)
async def test_a_worker_killed_at_any_stage_of_a_run_is_replaced_and_the_program_starts_once(
    two, until, monkeypatch, where, what, after
):
    gate = Gate(monkeypatch, getattr(two, where), what, after=after)
    run_id = (await two.call("a", "POST", "/v1/runs", PRINT, wait=0)).document["id"]
    await asyncio.wait_for(gate.reached.wait(), 10)
    await two.kill("a")
    run = await finished(two, "b", run_id)
    assert (run["result"]["reason"], run["result"]["started"]) == ("ok", True), run["result"]
    assert run["result"]["stdout"]["text"] == "你好"
    assert len(two.node.starts) == 1
    assert await audits(two, "run.finished", run_id) == 1
    await until(lambda: not two.node.live)
    await until(lambda: _terminated(two, run["sandbox_id"]))
    assert await two.store.open_execs() == []
    assert await two.store.open_commands(run["sandbox_id"]) == []


async def _terminated(cluster: Cluster, sandbox_id: str) -> bool:
    return await state(cluster, sandbox_id) == "terminated"


@pytest.mark.parametrize(("where", "what", "after"), STAGES)
async def test_a_worker_that_was_frozen_at_any_stage_does_nothing_twice(two, until, monkeypatch, where, what, after):
    gate = Gate(monkeypatch, getattr(two, where), what, after=after)
    run_id = (await two.call("a", "POST", "/v1/runs", PRINT, wait=0)).document["id"]
    await asyncio.wait_for(gate.reached.wait(), 10)
    two.freeze("a")
    run = await finished(two, "b", run_id)
    gate.open.set()
    await until(lambda: not two.workers["a"].services.runs.in_flight)
    await until(lambda: not two.node.live)
    await until(lambda: _terminated(two, run["sandbox_id"]))
    after_all = await finished(two, "b", run_id)
    assert after_all == run and run["result"]["reason"] == "ok"
    assert len(two.node.starts) == 1
    assert await audits(two, "run.finished", run_id) == 1
    assert await two.store.open_execs() == []


async def test_a_worker_that_stood_still_while_it_put_files_does_not_put_them_after_another_took_over(
    two, until, monkeypatch
):
    gate = Gate(monkeypatch, two.node, "put_files")
    document = {**SLEEP, "files": [{"path": "in.txt", "content": "你好"}]}
    run_id = (await two.call("a", "POST", "/v1/runs", document, wait=0)).document["id"]
    await asyncio.wait_for(gate.reached.wait(), 10)
    two.freeze("a")
    await until(lambda: two.node.starts)
    gate.open.set()
    await until(lambda: not two.workers["a"].services.runs.in_flight)
    [put] = two.node.files.values()
    assert len(put) == 1, "the program may have changed its input by now"
    row = await two.store.get_run(run_id, "default")
    view = await two.store.get_sandbox(row.sandbox_id, None)
    [record] = await two.store.open_execs()
    assert row.lease_version == record.lease_version == view.lease.lease_version == 2
    assert await _commands(two, row.sandbox_id) == ["start_exec"]
    await two.call("b", "POST", f"/v1/runs/{run_id}/cancel")
    assert (await finished(two, "b", run_id))["result"]["reason"] == "cancelled"
    await until(lambda: _terminated(two, row.sandbox_id))


async def test_two_workers_that_both_take_a_run_over_leave_it_to_the_last(two, until, monkeypatch):
    gate = Gate(monkeypatch, two.node, "put_files")
    document = {**PRINT, "files": [{"path": "in.txt", "content": "hi"}]}
    run_id = (await two.call("a", "POST", "/v1/runs", document, wait=0)).document["id"]
    await asyncio.wait_for(gate.reached.wait(), 10)
    fencing = Gate(monkeypatch, two.node, "fence")
    await two.kill("a")
    await asyncio.wait_for(fencing.reached.wait(), 10)
    two.freeze("b")
    await two.start("c")
    run = await finished(two, "c", run_id)
    fencing.open.set()
    await until(lambda: not two.workers["b"].services.runs.in_flight)
    assert run["result"]["reason"] == "ok", run["result"]
    assert len(two.node.starts) == 1
    [put] = two.node.files.values()
    assert len(put) == 1
    await until(lambda: _terminated(two, run["sandbox_id"]))


async def _commands(cluster: Cluster, sandbox_id: str) -> list[str]:
    return [command.kind for command in await cluster.store.open_commands(sandbox_id)]


async def test_an_exec_of_a_dead_worker_is_waited_for_by_another(two, until):
    sandbox = (await two.call("a", "POST", "/v1/sandboxes", {})).document["id"]
    exec_id = (await two.call("a", "POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["sleep"]}, wait=0)).document[
        "id"
    ]
    await until(lambda: two.node.starts == [exec_id])
    await two.kill("a")
    await until(lambda: _driver(two, exec_id, "w_b"))
    await two.call("b", "POST", f"/v1/execs/{exec_id}/signal", {"signal": "TERM"})
    reply = await two.call("b", "GET", f"/v1/execs/{exec_id}", wait=10)
    assert (reply.document["state"], reply.document["result"]["signal"]) == ("ended", "SIGTERM")
    assert two.node.starts == [exec_id] and await state(two, sandbox) == "leased"


async def _driver(cluster: Cluster, exec_id: str, worker: str) -> bool:
    row = await cluster.store.get_exec(exec_id, None)
    return row is not None and row.driver == worker


async def test_a_worker_that_leaves_hands_on_at_once(two, until):
    run_id = (await two.call("a", "POST", "/v1/runs", SLEEP, wait=0)).document["id"]
    await until(lambda: two.node.starts)
    leaving = two.workers.pop("a")
    await leaving.services.stop(1.0, hand_on=True)
    await until(lambda: two.workers["b"].services.runs.drives(run_id))
    assert [row.worker_id for row in await two.store.workers()] == ["w_b"]
    await two.call("b", "POST", f"/v1/runs/{run_id}/cancel")
    assert (await finished(two, "b", run_id))["result"]["reason"] == "cancelled"
    assert len(two.node.starts) == 1


@pytest.mark.parametrize("works", [True, False])
async def test_a_run_is_cancelled_waited_for_and_streamed_at_another_worker(two, until, works):
    two.hub.works = works
    run_id = (await two.call("a", "POST", "/v1/runs", SLEEP, wait=0)).document["id"]
    await until(lambda: two.node.starts)
    stream = await two.call("b", "GET", f"/v1/runs/{run_id}/stream")
    kinds: list[str] = []

    async def follow() -> None:
        async for event in stream.events:
            kinds.append(event.kind)

    following = asyncio.ensure_future(follow())
    waiting = asyncio.ensure_future(finished(two, "b", run_id))
    await until(lambda: kinds == ["started"])
    await two.call("b", "POST", f"/v1/runs/{run_id}/cancel")
    assert (await waiting)["result"]["reason"] == "cancelled"
    await asyncio.wait_for(following, 10)
    assert kinds[-1] == "ended"


@pytest.mark.parametrize("works", [True, False])
async def test_a_run_that_has_not_started_is_cancelled_at_another_worker(two, until, works):
    two.hub.works = works
    two.node.create_gate = asyncio.Event()
    run_id = (await two.call("a", "POST", "/v1/runs", PRINT, wait=0)).document["id"]
    await until(lambda: two.node.creates)
    await two.call("b", "POST", f"/v1/runs/{run_id}/cancel")
    run = await finished(two, "b", run_id)
    assert (run["result"]["reason"], run["result"]["started"]) == ("cancelled", False)
    two.node.create_gate.set()
    await until(lambda: not two.node.live and two.node.destroyed)
    assert two.node.starts == []


async def test_an_exec_is_cancelled_at_another_worker(two, until):
    sandbox = (await two.call("a", "POST", "/v1/sandboxes", {})).document["id"]
    exec_id = (await two.call("a", "POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["sleep"]}, wait=0)).document[
        "id"
    ]
    await until(lambda: two.node.starts)
    reply = await two.call("b", "POST", f"/v1/execs/{exec_id}/cancel")
    assert reply.document["result"]["reason"] == "cancelled"


async def test_a_sandbox_deleted_at_another_worker_ends_its_exec_as_deleted(two, until):
    sandbox = (await two.call("a", "POST", "/v1/sandboxes", {})).document["id"]
    call = two.call("a", "POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["sleep"]}, wait=10)
    waiting = asyncio.ensure_future(call)
    await until(lambda: two.node.starts)
    assert (await two.call("b", "DELETE", f"/v1/sandboxes/{sandbox}")).document["state"] == "terminated"
    assert (await waiting).document["result"]["reason"] == "sandbox_deleted"
    assert not two.node.live


async def test_an_attached_run_is_kept_while_its_client_waits_at_another_worker(two, until):
    run_id = (await two.call("a", "POST", "/v1/runs", {**SLEEP, "attached": True}, wait=0)).document["id"]
    await until(lambda: two.node.starts)
    waiting = asyncio.ensure_future(finished(two, "b", run_id))
    await until(lambda: _watched(two, run_id))
    await _another_client_is_gone(two, until, "a")
    assert not waiting.done()
    waiting.cancel()
    await until(lambda: _finished(two, run_id))
    run = await finished(two, "a", run_id)
    assert run["result"]["reason"] == "cancelled"


async def _another_client_is_gone(cluster: Cluster, until: Any, name: str) -> None:
    """Of a run that began later, and that was ended for it."""
    run = (await cluster.call(name, "POST", "/v1/runs", {**SLEEP, "attached": True}, wait=0)).document
    await until(lambda: _finished(cluster, run["id"]))


async def _watched(cluster: Cluster, run_id: str) -> bool:
    return (await cluster.store.get_run(run_id, "default")).watched_until > 0


async def _finished(cluster: Cluster, run_id: str) -> bool:
    return (await cluster.store.get_run(run_id, "default")).state == "finished"


async def test_a_client_of_a_dead_worker_that_comes_back_keeps_its_run(two, until):
    run_id = (await two.call("a", "POST", "/v1/runs", {**SLEEP, "attached": True}, wait=0)).document["id"]
    await until(lambda: two.node.starts)
    await two.kill("a")
    waiting = asyncio.ensure_future(finished(two, "b", run_id))
    await _another_client_is_gone(two, until, "b")
    assert not waiting.done()
    await two.call("b", "POST", f"/v1/runs/{run_id}/cancel")
    assert (await waiting)["result"]["reason"] == "cancelled"


# -- sandboxes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "what", "after"),
    [stage for stage in STAGES if stage[1] in ("create", "fence")] + [("store", "create_sandbox", True)],
)
async def test_a_sandbox_that_a_dead_worker_was_making_is_made_by_another(two, until, monkeypatch, where, what, after):
    gate = Gate(monkeypatch, getattr(two, where), what, after=after)
    asking = asyncio.ensure_future(two.call("a", "POST", "/v1/sandboxes", {}, h_idempotency_key="k"))
    await asyncio.wait_for(gate.reached.wait(), 10)
    await two.kill("a")
    asking.cancel()
    [view] = await two.store.list_sandboxes(None)
    await until(lambda: _is(two, view.sandbox.sandbox_id, "leased"))
    reply = await two.call("b", "POST", "/v1/sandboxes", {}, h_idempotency_key="k")
    assert reply.document["id"] == view.sandbox.sandbox_id and len(two.node.live) == 1
    await until(lambda: _no_commands(two))


async def _no_commands(cluster: Cluster) -> bool:
    return await cluster.store.open_commands() == []


async def _is(cluster: Cluster, sandbox_id: str, wanted: str) -> bool:
    return await state(cluster, sandbox_id) == wanted


async def test_a_deletion_that_a_dead_worker_had_begun_is_brought_to_its_end(two, until):
    sandbox = (await two.call("a", "POST", "/v1/sandboxes", {})).document["id"]
    two.node.destroy_gate = asyncio.Event()
    asking = asyncio.ensure_future(two.call("a", "DELETE", f"/v1/sandboxes/{sandbox}"))
    await until(lambda: _is(two, sandbox, "sanitizing"))
    await two.kill("a")
    asking.cancel()
    two.node.destroy_gate.set()
    await until(lambda: _is(two, sandbox, "terminated"))
    assert not two.node.live
    await until(lambda: _no_commands(two))


async def test_deletes_and_creates_at_two_workers_at_once_agree(two, until):
    for _ in range(10):
        name = ("a", "b")
        key = f"k{_}"
        made = await asyncio.gather(
            *(two.call(name[i % 2], "POST", "/v1/sandboxes", {}, h_idempotency_key=key) for i in range(20))
        )
        [sandbox] = {reply.document["id"] for reply in made}
        gone = await asyncio.gather(*(two.call(n, "DELETE", f"/v1/sandboxes/{sandbox}") for n in name * 3))
        assert {reply.document["state"] for reply in gone} == {"terminated"}
    await until(lambda: not two.node.live)


async def test_a_sandbox_deleted_at_one_worker_while_another_makes_it_leaves_no_instance(two, until):
    two.node.create_gate = asyncio.Event()
    asking = asyncio.ensure_future(two.call("a", "POST", "/v1/sandboxes", {}))
    await until(lambda: two.node.creates)
    [view] = await two.store.list_sandboxes(None)
    reply = await two.call("b", "DELETE", f"/v1/sandboxes/{view.sandbox.sandbox_id}")
    assert reply.document["state"] == "terminated"
    two.node.create_gate.set()
    assert (await asking).document["code"] == "sandbox_deleted"
    await until(lambda: not two.node.live)


async def test_one_key_at_two_workers_makes_one_run(two):
    name = ("a", "b")
    calls = [two.call(name[i % 2], "POST", "/v1/runs", PRINT, h_idempotency_key="k", wait=10) for i in range(20)]
    replies = await asyncio.gather(*calls)
    assert len({reply.document["id"] for reply in replies}) == 1
    assert {reply.document["result"]["reason"] for reply in replies} == {"ok"}
    assert len(two.node.starts) == len(two.node.creates) == 1
    refused = await two.call("b", "POST", "/v1/runs", SLEEP, h_idempotency_key="k")
    assert (refused.document["code"], refused.status) == ("idempotency_conflict", 409)


# -- the store is lost -------------------------------------------------------------------------------------------------------------


async def test_a_result_arrives_when_the_store_is_back(two, until):
    run_id = (await two.call("a", "POST", "/v1/runs", SLEEP, wait=0)).document["id"]
    await until(lambda: two.node.starts)
    two.store.lost = True
    await until(lambda: all(int(row["alive_until"]) < two.now_ms() for row in two.store._workers.values()))
    for name in ("a", "b"):
        refused = await two.call(name, "POST", "/v1/runs", PRINT)
        assert refused.status == 503 and refused.document["code"] == "store_error" and refused.document["retryable"]
    await two.node.signal_exec(two.node.starts[0], 15)
    refused_before = two.store.refused
    await until(lambda: two.store.refused > refused_before + 10)
    two.store.lost = False
    run = await finished(two, "b", run_id)
    assert (run["result"]["reason"], run["result"]["signal"]) == ("signal", "SIGTERM")
    assert len(two.node.starts) == 1 and await audits(two, "run.finished", run_id) == 1
    for world in two.workers.values():
        assert sum("the store is lost" in line for line in world.logged) == 1, world.logged
    await until(lambda: not two.node.live)


@pytest.mark.parametrize(("where", "what", "after"), STAGES)
async def test_a_store_that_is_lost_at_any_stage_of_a_run_delays_it_and_nothing_else(
    two, until, monkeypatch, where, what, after
):
    gate = Gate(monkeypatch, getattr(two, where), what, after=after)
    run_id = (await two.call("a", "POST", "/v1/runs", PRINT, wait=0)).document["id"]
    await asyncio.wait_for(gate.reached.wait(), 10)
    two.store.lost = True
    gate.open.set()
    await until(lambda: two.store.refused > 10)
    two.store.lost = False
    run = await finished(two, "b", run_id)
    assert run["result"]["reason"] == "ok", run["result"]
    assert len(two.node.starts) == 1
    await until(lambda: not two.node.live)
    await until(lambda: _terminated(two, run["sandbox_id"]))
    assert await audits(two, "run.finished", run_id) == 1 and await two.store.open_execs() == []


@pytest.mark.parametrize("skip", range(24))
async def test_a_commit_of_unknown_outcome_is_not_done_twice(two, until, skip):
    """The `skip`-th transaction of a run is done and said to have failed."""
    test, seen = asyncio.current_task(), 0

    def fails() -> bool:
        nonlocal seen
        seen += asyncio.current_task() is not test
        return seen == skip + 1 and asyncio.current_task() is not test

    run_id = (await two.call("a", "POST", "/v1/runs", PRINT, wait=0)).document["id"]
    two.store.fails_after = fails
    run = await finished(two, "b", run_id)
    assert run["result"]["reason"] == "ok", run["result"]
    assert len(two.node.starts) == 1
    await until(lambda: not two.node.live)
    await until(lambda: _terminated(two, run["sandbox_id"]))
    assert await audits(two, "run.finished", run_id) == 1


async def test_a_submission_whose_commit_was_not_heard_of_is_driven(two, until):
    test, failed = asyncio.current_task(), []

    def fails() -> bool:
        if asyncio.current_task() is not test or failed:
            return False
        failed.append(True)
        return True

    two.store.fails_after = fails
    refused = await two.call("a", "POST", "/v1/runs", PRINT, h_idempotency_key="k")
    assert refused.document["code"] == "store_error"
    reply = await two.call("b", "POST", "/v1/runs", PRINT, h_idempotency_key="k", wait=10)
    assert reply.document["state"] == "finished" and len(two.node.starts) == 1


# -- an older copy -----------------------------------------------------------------------------------------------------------------


async def test_runs_of_an_older_copy_of_the_store_are_ended_and_never_started_again(two, until):
    kept = (await two.call("a", "POST", "/v1/sandboxes", {})).document["id"]
    call = two.call("a", "POST", f"/v1/sandboxes/{kept}/execs", {"argv": ["sleep"]}, wait=0)
    program = (await call).document["id"]
    await until(lambda: two.node.starts)
    gate = two.node.create_gate = asyncio.Event()
    old = (await two.call("a", "POST", "/v1/runs", PRINT, wait=0)).document["id"]
    flying = (await two.call("b", "POST", "/v1/runs", SLEEP, wait=0)).document["id"]
    await until(lambda: len(two.node.creates) == 3)
    tables = ("_runs", "_sandboxes", "_leases", "_instances", "_execs", "_commands", "_events", "_audit", "_workers")
    copied = {name: copy.deepcopy(getattr(two.store, name)) for name in tables}
    gate.set()
    await finished(two, "a", old)
    await until(lambda: len(two.node.starts) == 3)
    await two.call("b", "POST", f"/v1/execs/{program}/signal", {"signal": "TERM"})
    assert (await two.call("b", "GET", f"/v1/execs/{program}", wait=10)).document["state"] == "ended"
    called = []
    for world in two.workers.values():

        async def hook(world: Any = world) -> None:
            called.append(world)

        world.services.upkeep.workers.on_regression.append(hook)
    for key, row in copied["_workers"].items():  # each has told the store once more that it is alive
        await until(lambda key=key, row=row: two.store._workers[key]["facts"] != row["facts"])
    for name, value in copied.items():
        setattr(two.store, name, value)
    run = await finished(two, "b", old)
    assert (run["result"]["reason"], run["result"]["started"]) == ("infra_error", None)
    assert "older copy" in run["result"]["hint"]
    await until(lambda: len(called) == 2)
    again = (await two.call("b", "GET", f"/v1/execs/{program}", wait=10)).document
    assert (again["state"], again["result"]["signal"]) == ("ended", "SIGTERM"), "the node knows what became of it"
    assert len(two.node.starts) == 3
    assert await state(two, kept) == "leased"
    await two.call("a", "POST", f"/v1/runs/{flying}/cancel")
    await finished(two, "a", flying)
    assert len(two.node.starts) == 3


async def test_a_worker_that_starts_on_an_older_copy_starts_none_of_its_runs(two, until):
    gate = two.node.create_gate = asyncio.Event()
    old = (await two.call("a", "POST", "/v1/runs", PRINT, wait=0)).document["id"]
    await until(lambda: two.node.creates)
    tables = ("_runs", "_sandboxes", "_leases", "_instances", "_execs", "_commands", "_events", "_audit", "_workers")
    copied = {name: copy.deepcopy(getattr(two.store, name)) for name in tables}
    gate.set()
    run = await finished(two, "b", old)
    await until(lambda: _terminated(two, run["sandbox_id"]))
    newest = await two.store.newest_event()
    await until(lambda: two.node.event_id >= newest)  # the node has heard how far the store was
    for name in ("a", "b"):
        leaving = two.workers.pop(name)
        await leaving.services.stop(1.0, hand_on=True)
    for name, value in copied.items():
        setattr(two.store, name, value)
    await two.start("c")
    run = await finished(two, "c", old)
    assert (run["result"]["reason"], run["result"]["started"]) == ("infra_error", None)
    assert len(two.node.starts) == 1
