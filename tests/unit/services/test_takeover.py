"""A process that ends at any point: the next one on the same store and node brings every open thing to an honest end."""

from __future__ import annotations

import asyncio

import pytest

from corral import faults
from corral.domain.facts import ExecFacts

POINTS = (
    "transition.before",
    "transition.after",
    "instance.create.before",
    "instance.create.after",
    "exec.start.before",
    "exec.start.after",
    "run.exec.before",
    "run.exec.after",
    "run.finish.before",
    "run.finish.after",
    "instance.destroy.before",
)


class Stop(BaseException):
    """Stands for the process's end: nothing catches it."""


async def finished(world, run_id):
    return (await world.call("GET", f"/v1/runs/{run_id}")).document["state"] == "finished"


async def terminated(world, sandbox_id):
    return (await world.call("GET", f"/v1/sandboxes/{sandbox_id}")).document["state"] == "terminated"


@pytest.fixture
def armed():
    yield
    for point in POINTS:
        faults.arm(point, None)


@pytest.mark.parametrize("times", range(1, 9))
@pytest.mark.parametrize("point", POINTS)
async def test_a_run_ends_honestly_wherever_the_service_stops(world, until, armed, point, times):
    stopped = asyncio.Event()
    left = times

    def stop():
        nonlocal left
        left -= 1
        if left <= 0:
            stopped.set()
            raise asyncio.CancelledError

    faults.arm(point, stop)
    reply = await world.call("POST", "/v1/runs", {"command": ["print", "x"]}, wait=0)
    run_id = reply.document["id"]

    async def over():
        return stopped.is_set() or await finished(world, run_id)

    await until(over)
    await world.crash()
    faults.arm(point, None)
    await world.start()
    await until(lambda: finished(world, run_id))
    run = (await world.call("GET", f"/v1/runs/{run_id}")).document
    assert run["result"]["reason"] == "ok" and run["result"]["stdout"]["text"] == "x"
    assert len(world.node.starts) == 1, "code starts at most once"
    await until(lambda: terminated(world, run["sandbox_id"]))
    assert not world.node.live
    assert await world.store.open_commands(run["sandbox_id"]) == []
    assert await world.store.open_execs() == []


async def test_a_running_program_goes_on_under_the_next_owner(world, until):
    run_id = (await world.call("POST", "/v1/runs", {"command": ["sleep"]}, wait=0)).document["id"]
    await until(lambda: world.node.starts)
    await world.crash()
    await world.start()
    exec_id = world.node.starts[0]
    world.node.execs[exec_id].emit(b"after")
    world.node.execs[exec_id].end(ExecFacts(True, 0))
    await until(lambda: finished(world, run_id))
    result = (await world.call("GET", f"/v1/runs/{run_id}")).document["result"]
    assert result["reason"] == "ok" and result["stdout"]["text"] == "after"
    assert world.node.starts == [exec_id]


@pytest.mark.parametrize("started", [False, None])
async def test_an_exec_whose_frame_was_interrupted_is_sent_again(world, until, started):
    world.node.start_gate = asyncio.Event()
    run_id = (await world.call("POST", "/v1/runs", {"command": ["print", "x"]}, wait=0)).document["id"]

    async def committed():
        return bool(await world.store.open_execs())

    await until(committed)
    [row] = await world.store.open_execs()
    await world.crash()
    # What the node tells after its own restart: journalled, but the guest has never heard of it.
    from corral.ports.node import ExecSpec

    from .fake_node import FakeExec

    [instance_id] = world.node.live
    ghost = world.node.execs[row.exec_id] = FakeExec(ExecSpec(row.exec_id, ("print",)), instance_id)
    ghost.end(ExecFacts(started, infra="interrupted"))
    world.node.start_gate = None
    await world.start()
    await until(lambda: finished(world, run_id))
    result = (await world.call("GET", f"/v1/runs/{run_id}")).document["result"]
    assert (result["reason"], result["stdout"]["text"]) == ("ok", "x")
    assert world.node.starts == [row.exec_id]


async def test_a_sandbox_that_died_meanwhile_is_never_a_success(world, until):
    run_id = (await world.call("POST", "/v1/runs", {"command": ["sleep"]}, wait=0)).document["id"]
    await until(lambda: world.node.starts)
    await world.crash()
    world.node.live.clear()
    world.node.execs.clear()
    await world.start()
    await until(lambda: finished(world, run_id))
    run = (await world.call("GET", f"/v1/runs/{run_id}")).document
    assert run["result"]["reason"] in ("sandbox_lost", "infra_error")
    assert run["result"]["exit_code"] is None and run["result"]["started"] in (True, None)
    await until(lambda: terminated(world, run["sandbox_id"]))


async def test_an_attached_run_whose_client_does_not_come_back_is_cancelled(world, until):
    document = {"command": ["sleep"], "attached": True}
    run_id = (await world.call("POST", "/v1/runs", document, wait=0)).document["id"]
    await until(lambda: world.node.starts)
    await world.crash()
    await world.start()
    await until(lambda: finished(world, run_id))
    result = (await world.call("GET", f"/v1/runs/{run_id}")).document["result"]
    assert result["reason"] == "cancelled"


async def test_a_cancel_that_was_recorded_is_carried_out(world, until):
    run_id = (await world.call("POST", "/v1/runs", {"command": ["sleep"]}, wait=0)).document["id"]
    await until(lambda: world.node.starts)
    open_states = ("starting", "running")
    await world.store.update_run(run_id, expect_states=open_states, changes={"cancel_requested": "cancelled"})
    await world.crash()
    await world.start()
    await until(lambda: finished(world, run_id))
    result = (await world.call("GET", f"/v1/runs/{run_id}")).document["result"]
    assert (result["reason"], result["started"]) == ("cancelled", True)


@pytest.mark.parametrize(("then", "started"), [("runs", True), ("ended", True), ("unsent", False), ("gone", None)])
async def test_what_was_to_end_when_its_owner_died_is_told_as_started_by_what_the_node_knows(
    world, until, then, started
):
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    path, document = f"/v1/sandboxes/{made['id']}/execs", {"argv": ["sleep"], "wait": 0}
    if then in ("unsent", "gone"):
        world.node.start_gate = asyncio.Event()
    exec_id = (await world.call("POST", path, document)).document["id"]
    if then in ("runs", "ended"):
        await until(lambda: exec_id in world.node.execs)
    await world.crash()
    changes = {"state": "starting", "cancel_requested": "lease_lost"}  # the frame was sent, and nothing written since
    await world.store.update_exec(exec_id, expect_states=("starting", "running"), changes=changes)
    if then == "ended":
        world.node.execs[exec_id].end(ExecFacts(True, 0))
    elif then == "gone":
        world.node.live.clear()
    world.node.start_gate = None
    await world.start()
    result = (await world.call("GET", f"/v1/execs/{exec_id}", wait=5)).document["result"]
    assert result["started"] is started, result
    assert (result["exit_code"] == 0) is (then == "ended")
    assert world.node.starts == ([exec_id] if started else [])


async def test_a_kept_sandbox_and_its_exec_survive(world, until):
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    path = f"/v1/sandboxes/{made['id']}/execs"
    exec_id = (await world.call("POST", path, {"argv": ["sleep"], "wait": 0})).document["id"]
    await until(lambda: exec_id in world.node.execs)
    await world.crash()
    await world.start()
    world.node.execs[exec_id].emit(b"still here")
    await world.node.signal_exec(exec_id, 15)
    done = (await world.call("GET", f"/v1/execs/{exec_id}", wait=5)).document
    assert done["result"]["signal"] == "SIGTERM" and done["result"]["stdout"]["text"] == "still here"
    assert (await world.call("POST", path, {"argv": ["print", "y"]})).document["result"]["reason"] == "ok"


async def test_a_kept_sandbox_that_died_meanwhile_is_lost(world, until):
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    await world.crash()
    world.node.live.clear()
    await world.start()
    await until(lambda: terminated(world, made["id"]))
    seen = (await world.call("GET", f"/v1/sandboxes/{made['id']}")).document
    assert seen["failure"] == "sandbox_lost"


async def test_a_deletion_that_was_cut_short_is_finished(world, until):
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    world.node.destroy_gate = asyncio.Event()
    await world.call("DELETE", f"/v1/sandboxes/{made['id']}", wait=0.05)
    await world.crash()
    world.node.destroy_gate = None
    await world.start()
    await until(lambda: terminated(world, made["id"]))
    assert not world.node.live


async def test_a_creation_that_was_cut_short_is_finished_for_the_same_key(world, until):
    world.node.create_gate = asyncio.Event()
    call = asyncio.create_task(world.call("POST", "/v1/sandboxes", {}, h_idempotency_key="k"))
    await until(lambda: world.node.creates)
    await world.crash()
    call.cancel()
    world.node.create_gate = None
    await world.start()
    made = (await world.call("POST", "/v1/sandboxes", {}, h_idempotency_key="k")).document
    assert made["state"] == "leased"
    assert len(set(world.node.creates)) == 1 and len(world.node.live) == 1


async def test_stopping_hands_over_what_others_wait_for(world, until):
    run_id = (await world.call("POST", "/v1/runs", {"command": ["sleep"]}, wait=0)).document["id"]
    await until(lambda: world.node.starts)
    await world.services.stop(5.0)
    assert (await world.store.get_run(run_id, "default")).state == "running"
    assert (await world.call("POST", "/v1/runs", {"command": ["print"]})).document["code"] == "shutting_down"
    await world.start()
    await world.call("POST", f"/v1/runs/{run_id}/cancel")
    await until(lambda: finished(world, run_id))


async def test_stopping_cancels_an_attached_run_of_this_process(world, until):
    run_id = (await world.call("POST", "/v1/runs", {"command": ["sleep"], "attached": True}, wait=0)).document["id"]
    await until(lambda: world.node.starts)
    await world.services.stop(5.0)
    row = await world.store.get_run(run_id, "default")
    assert row.state == "finished" and row.reason == "cancelled"
    assert not world.node.live


@pytest.fixture
def patient():
    """Delays as they are outside tests: no sweep comes to help within the life of a short-lived owner."""
    return {"sweep_s": 60.0, "client_gone_s": 0.3, "takeover_client_gone_s": 60.0}


async def test_gc_ends_what_a_killed_owner_left_running(world, until, patient):
    document = {"command": ["sleep"], "attached": True}
    run_id = (await world.call("POST", "/v1/runs", document, wait=0)).document["id"]
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    path = f"/v1/sandboxes/{made['id']}/execs"
    one = (await world.call("POST", path, {"argv": ["sleep"], "attached": True, "wait": 0})).document["id"]
    detached = (await world.call("POST", path, {"argv": ["sleep"], "wait": 0})).document["id"]
    await until(lambda: len(world.node.starts) == 3)
    for _ in range(2):  # a short-lived owner in between changes nothing
        await world.crash()
        await world.start(**patient)
    assert (await world.call("POST", "/v1/gc")).status == 200
    run = (await world.call("GET", f"/v1/runs/{run_id}")).document
    assert (run["state"], run["result"]["reason"]) == ("finished", "cancelled")
    assert await terminated(world, run["sandbox_id"])
    assert (await world.call("GET", f"/v1/execs/{one}")).document["result"]["reason"] == "cancelled"
    assert (await world.call("GET", f"/v1/execs/{detached}")).document["state"] == "running"
    assert len(world.node.live) == 1


async def test_gc_ends_an_instance_of_which_the_store_knows_nothing(world):
    assert (await world.call("POST", "/v1/sandboxes", {})).status == 201
    [(known, body)] = world.node.live.items()
    world.node.live["ins_forgotten"] = body
    assert (await world.call("POST", "/v1/gc")).document["removed"]["instance"] == 1
    assert world.node.destroyed == [("ins_forgotten", "gc")]
    assert list(world.node.live) == [known]


async def test_gc_leaves_alone_what_a_client_waits_for(world, until, patient):
    await world.crash()
    await world.start(**patient)
    document = {"command": ["sleep"], "attached": True}
    run_id = (await world.call("POST", "/v1/runs", document, wait=0)).document["id"]
    await until(lambda: world.node.starts)
    waiting = asyncio.create_task(world.call("GET", f"/v1/runs/{run_id}", wait=60))
    await until(lambda: world.services.core.watchers.unwatched_s(run_id) is None)
    await world.call("POST", "/v1/gc")
    assert not await finished(world, run_id)
    await world.call("POST", f"/v1/runs/{run_id}/cancel")
    assert (await waiting).document["state"] == "finished"


@pytest.mark.parametrize("attached", [True, False])
async def test_a_run_cut_short_while_its_sandbox_is_made_has_a_driver_under_every_owner(
    world, until, patient, attached
):
    world.node.create_gate = asyncio.Event()
    document = {"command": ["print", "x"], "attached": attached}
    run_id = (await world.call("POST", "/v1/runs", document, wait=0)).document["id"]
    await until(lambda: world.node.creates)
    for _ in range(3):
        await world.crash()
        await world.start(**patient)
        assert [run.run_id for run in world.services.runs.in_flight] == [run_id]
    if attached:
        asyncio.get_running_loop().call_later(1.0, world.node.create_gate.set)
        await world.call("POST", "/v1/gc")
    else:
        world.node.create_gate.set()
        await until(lambda: finished(world, run_id))
    run = (await world.call("GET", f"/v1/runs/{run_id}")).document
    assert run["result"]["reason"] == ("cancelled" if attached else "ok")
    await until(lambda: terminated(world, run["sandbox_id"]))
    assert not world.node.live
    assert len(world.node.starts) == (0 if attached else 1)
