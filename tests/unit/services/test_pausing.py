"""Pause, resume, and the ends of kept sandboxes in time; over a node in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from corral.domain.fence import Fence
from corral.errors import CorralError

from .cluster import Cluster
from .conftest import turns

HOUR_MS = 3_600_000


async def make(world, **document):
    reply = await world.call("POST", "/v1/sandboxes", document)
    assert reply.status == 201, reply.document
    return reply.document["id"]


async def look(world, sandbox_id):
    return (await world.call("GET", f"/v1/sandboxes/{sandbox_id}")).document


async def state_of(world, sandbox_id):
    return (await look(world, sandbox_id))["state"]


async def turn(world, sandbox_id, word, **headers):
    return await world.call("POST", f"/v1/sandboxes/{sandbox_id}/{word}", None, **headers)


async def run(world, sandbox_id, *argv, **more):
    return await world.call("POST", f"/v1/sandboxes/{sandbox_id}/execs", {"argv": list(argv), **more})


@pytest.fixture
async def box(world):
    return await make(world)


@pytest.fixture
def shut(world):
    """What the node does next is not done before the gate is opened."""
    world.node.turn_gate = asyncio.Event()
    yield world.node.turn_gate
    world.node.turn_gate.set()


async def test_a_paused_sandbox_refuses_all_use_and_goes_on_where_it_was(world, box):
    begun = (await run(world, box, "sleep", wait=False)).document
    paused = await turn(world, box, "pause")
    assert (paused.status, paused.document["state"]) == (200, "paused")
    again = await turn(world, box, "pause")
    assert (again.status, again.document["state"]) == (200, "paused")
    for call in (
        run(world, box, "print", "x"),
        world.call("GET", f"/v1/sandboxes/{box}/files/stat", None, path="/workspace"),
        world.call("POST", f"/v1/execs/{begun['id']}/signal", {"signal": "TERM"}),
        world.call("POST", f"/v1/sandboxes/{box}/files/mkdir", {"path": "d"}),
    ):
        refused = await call
        assert (refused.status, refused.document["code"]) == (409, "sandbox_paused"), refused.document
        assert "resume" in refused.document["hint"]
    resumed = await turn(world, box, "resume")
    assert (resumed.status, resumed.document["state"]) == (200, "running")
    assert (await turn(world, box, "resume")).document["state"] == "running"
    assert (await run(world, box, "print", "x")).document["result"]["stdout"]["text"] == "x"
    assert [word for word, _ in world.node.turns] == ["pause", "resume"]


async def test_many_callers_join_one_transition_and_get_its_result(world, box, shut, until):
    calls = [asyncio.create_task(turn(world, box, "pause")) for _ in range(10)]
    await until(lambda: world.node.turns)
    calls += [asyncio.create_task(turn(world, box, "pause")) for _ in range(5)]
    await turns()
    assert not any(call.done() for call in calls)
    shut.set()
    answers = await asyncio.gather(*calls)
    assert {(one.status, one.document["state"]) for one in answers} == {(200, "paused")}
    assert len(world.node.turns) == 1


async def test_a_pause_that_fails_leaves_the_sandbox_as_it_was_for_all_who_asked(world, box, shut, until):
    world.node.turn_error = CorralError("infra_error", "it does not freeze")
    calls = [asyncio.create_task(turn(world, box, "pause")) for _ in range(3)]
    await until(lambda: world.node.turns)
    await turns()
    shut.set()
    assert {(await call).document["code"] for call in calls} == {"infra_error"}
    world.node.turn_error = None
    assert await state_of(world, box) == "leased"
    assert (await run(world, box, "print", "x")).status == 200
    assert (await turn(world, box, "pause")).document["state"] == "paused"


async def test_a_resume_that_fails_is_the_end_of_the_sandbox(world, box, until):
    await turn(world, box, "pause")
    world.node.turn_error = CorralError("guest_lost", "it does not wake")
    failed = await turn(world, box, "resume")
    assert failed.document["code"] == "sandbox_lost", failed.document
    await until(lambda: world.node.destroyed)
    assert (await turn(world, box, "resume")).document["code"] == "sandbox_lost"


@pytest.mark.parametrize("word", ["pause", "resume"])
async def test_a_delete_wins_against_what_is_under_way(world, box, shut, until, word):
    if word == "resume":
        shut.set()
        await turn(world, box, "pause")
        shut.clear()
    call = asyncio.create_task(turn(world, box, word))
    await until(lambda: [one for one, _ in world.node.turns] == ["pause", "resume"][: 2 if word == "resume" else 1])
    assert (await world.call("DELETE", f"/v1/sandboxes/{box}")).document["state"] == "terminated"
    shut.set()
    answer = await call
    assert (answer.status, answer.document["code"]) == (410, "sandbox_deleted"), answer.document
    assert await state_of(world, box) == "terminated"


@pytest.mark.parametrize("word", ["pause", "resume"])
async def test_an_owner_that_died_in_the_middle_is_followed_by_one_that_goes_on(world, box, shut, until, word):
    if word == "resume":
        shut.set()
        await turn(world, box, "pause")
        shut.clear()
    asyncio.create_task(turn(world, box, word)).add_done_callback(lambda task: task.cancelled() or task.exception())
    await until(lambda: world.node.turns and world.node.turns[-1][0] == word)
    await world.crash()
    shut.set()
    await world.start()
    wanted = "paused" if word == "pause" else "leased"

    async def there():
        return await state_of(world, box) == wanted

    await until(there)
    assert await state_of(world, box) == wanted


async def test_an_exec_that_ends_while_it_is_being_frozen_leaves_an_idle_lease(world, box, shut, until):
    begun = (await run(world, box, "sleep", wait=False)).document
    call = asyncio.create_task(turn(world, box, "pause"))
    await until(lambda: world.node.turns)
    await world.call("POST", f"/v1/execs/{begun['id']}/cancel", None)
    shut.set()
    assert (await call).document["state"] == "paused"
    assert (await turn(world, box, "resume")).document["state"] == "leased"


async def test_an_exec_that_meets_the_pause_begins_when_it_is_over(world, box, until):
    world.node.start_gate = asyncio.Event()
    call = asyncio.create_task(run(world, box, "print", "late"))

    async def there():
        return await state_of(world, box) == "running"

    await until(there)
    await turn(world, box, "pause")
    world.node.start_gate.set()
    await turns()
    assert not call.done() and not world.node.starts
    await turn(world, box, "resume")
    assert (await call).document["result"]["stdout"]["text"] == "late"


async def test_only_the_holder_pauses(world, box):
    held = (await world.call("POST", f"/v1/sandboxes/{box}/attach", {"owner": "s/1"})).document
    refused = await turn(world, box, "pause")
    assert (refused.status, refused.document["code"]) == (409, "lease_held"), refused.document
    stale = await turn(world, box, "pause", h_corral_lease="1.1")
    assert stale.document["code"] == "lease_lost"
    assert (await turn(world, box, "pause", h_corral_lease=held["lease"])).document["state"] == "paused"
    assert (await turn(world, box, "resume", h_corral_lease=held["lease"])).document["state"] == "leased"
    assert (await turn(world, box, "pause", h_corral_lease="nonsense")).document["code"] == "invalid_value"
    assert (await turn(world, "sbx_01aaaaaaaaaaaaaaaaaaaaaaaa", "pause")).status == 404


@pytest.mark.parametrize("what", ["pause", "resume", "patch"])
async def test_a_lease_that_has_run_out_changes_nothing_even_before_that_is_committed(world, box, what, monkeypatch):
    held = (await world.call("POST", f"/v1/sandboxes/{box}/attach", {"owner": "s/1", "ttl_s": 30})).document
    if what == "resume":
        assert (await turn(world, box, "pause", h_corral_lease=held["lease"])).status == 200
    before = (await look(world, box))["state"]

    async def later(sandbox_id, tenant_id, see=world.store.see_sandbox):
        seen = await see(sandbox_id, tenant_id)
        return replace(seen, now_ms=seen.view.lease.expires_at)  # the first millisecond at which it is nobody's

    monkeypatch.setattr(world.store, "see_sandbox", later)
    if what == "patch":
        late = await patch(world, box, ttl_s=50, h_corral_lease=held["lease"])
    else:
        late = await turn(world, box, what, h_corral_lease=held["lease"])
    assert (late.status, late.document["code"]) == (409, "lease_lost"), late.document
    assert (await look(world, box))["state"] == before


async def test_a_lease_that_runs_out_while_paused_leaves_a_paused_sandbox_that_anybody_resumes(world, box, until):
    held = (await world.call("POST", f"/v1/sandboxes/{box}/attach", {"owner": "s/1", "ttl_s": 1})).document
    assert (await turn(world, box, "pause", h_corral_lease=held["lease"])).status == 200
    world.offset_ms += 2000

    async def there():
        return (await look(world, box))["lease"] is None

    await until(there)
    assert await state_of(world, box) == "paused"
    assert (await turn(world, box, "resume", h_corral_lease=held["lease"])).document["code"] == "lease_lost"
    assert (await turn(world, box, "resume")).document["state"] == "idle"
    assert world.node.turns[-1][1] > Fence.parse(held["lease"]), "the node is told the new fence"
    assert (await run(world, box, "print", "mine")).document["result"]["stdout"]["text"] == "mine"


@pytest.mark.parametrize("word", ["resume", "failed pause"])
async def test_what_was_kept_and_ends_while_it_is_paused_is_settled_when_it_goes_on(world, box, until, word):
    lease = (await world.call("POST", f"/v1/sandboxes/{box}/attach", {"owner": "s/1"})).document["lease"]
    route = f"/v1/sandboxes/{box}/execs"
    document = {"argv": ["sleep"], "wait": False, "attached": False}
    begun = (await world.call("POST", route, document, h_corral_lease=lease)).document
    await until(lambda: world.node.starts)
    release = await world.call("POST", f"/v1/sandboxes/{box}/release", {"keep": True}, h_corral_lease=lease)
    assert release.document["state"] == "running", release.document
    if word == "resume":
        assert (await turn(world, box, "pause")).document["state"] == "paused"
        await world.call("POST", f"/v1/execs/{begun['id']}/cancel", None)
        await turn(world, box, "resume")
    else:
        world.node.turn_gate = asyncio.Event()
        world.node.turn_error = CorralError("infra_error", "the freezer does not answer")
        call = asyncio.create_task(turn(world, box, "pause"))
        await until(lambda: world.node.turns)
        await world.call("POST", f"/v1/execs/{begun['id']}/cancel", None)
        world.node.turn_gate.set()
        assert (await call).status >= 500

    async def there():
        return await state_of(world, box) == "idle"

    await until(there)
    assert await state_of(world, box) == "idle", "nobody has it, so it is for the next one"


async def test_a_runtime_that_cannot_pause_and_the_sandbox_of_a_run_are_refused(world, box, until):
    started = (await world.call("POST", "/v1/runs", {"command": ["sleep"]}, wait="0")).document
    running = {}

    async def runs():
        running.update((await world.call("GET", f"/v1/runs/{started['id']}")).document)
        return running["state"] == "running"

    await until(runs)
    refused = await turn(world, running["sandbox_id"], "pause")
    assert refused.document["code"] == "illegal_transition", refused.document
    await world.call("POST", f"/v1/runs/{started['id']}/cancel", None)
    world.node.can = {}
    assert (await turn(world, box, "pause")).document["code"] == "not_supported_yet"
    assert await state_of(world, box) == "leased"


async def test_an_instance_that_is_lost_while_paused_or_between_is_lost(world, box, shut, until):
    shut.set()
    await turn(world, box, "pause")
    [instance] = world.node.live
    del world.node.live[instance]
    world.node.gone.put_nowait(instance)

    async def there():
        return await state_of(world, box) == "terminated"

    await until(there)
    assert (await turn(world, box, "resume")).document["code"] == "sandbox_lost"


# -- ends in time --------------------------------------------------------------------------------------------------------------
async def swept(world):
    """Whatever has come to its end by now is ended."""
    await world.services.upkeep.sweep()
    await turns()


async def until_ended(world, sandbox_id):
    for _ in range(500):
        found = await look(world, sandbox_id)
        if found["state"] == "terminated":
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(found)


async def patch(world, sandbox_id, **document):
    headers = {k: document.pop(k) for k in list(document) if k.startswith("h_")}
    return await world.call("PATCH", f"/v1/sandboxes/{sandbox_id}", document, **headers)


async def test_a_sandbox_that_nobody_uses_ends_and_says_why(world):
    box, other = await make(world, idle_timeout_s=60), await make(world)
    assert (await look(world, box))["idle_timeout_s"] == 60 and (await look(world, other))["idle_timeout_s"] is None
    world.offset_ms += 59_000
    await swept(world)
    assert await state_of(world, box) == "leased"
    world.offset_ms += 1_000
    found = await until_ended(world, box)
    assert found["failure"] == "idle_timeout"
    assert "not used for its idle_timeout_s" in (await turn(world, box, "pause")).document["detail"]
    assert [e["metadata"]["row"] for e in found["history"] if e["event"] in ("lease_expired", "settled")] == [
        "19",
        "33",
    ]
    assert await state_of(world, other) == "leased"
    assert (await run(world, box, "print", "x")).document["code"] == "sandbox_deleted"


async def test_a_sandbox_whose_time_is_over_says_so(world):
    box = await make(world, ttl_s=60)
    world.offset_ms += 60_000
    assert (await until_ended(world, box))["failure"] == "ttl"
    refused = (await run(world, box, "print", "x")).document
    assert refused["code"] == "sandbox_deleted" and "the end of its ttl_s" in refused["detail"]


async def test_each_use_starts_it_anew_and_a_program_that_runs_is_use(world):
    box = await make(world, idle_timeout_s=60)
    for _ in range(3):
        world.offset_ms += 50_000
        assert (await world.call("GET", f"/v1/sandboxes/{box}/files/list", None, path="/workspace")).status == 200
        await swept(world)
    begun = (await run(world, box, "sleep", wait=False)).document
    world.offset_ms += 600_000
    await swept(world)
    assert await state_of(world, box) == "running"
    await world.call("POST", f"/v1/execs/{begun['id']}/cancel", None)
    assert await state_of(world, box) == "leased"
    world.offset_ms += 61_000
    await until_ended(world, box)


async def test_an_open_watch_is_use(world):
    box = await make(world, idle_timeout_s=60)
    view = await world.services.sandboxes._lifecycle.view(box)

    class Stream:
        pass

    stream = Stream()
    world.services.expiry.keeps(view, stream)
    with world.services.expiry.using(view):
        for _ in range(3):
            world.offset_ms += 40_000
            await swept(world)
    for _ in range(3):
        world.offset_ms += 40_000
        await swept(world)
    assert await state_of(world, box) == "leased"
    del stream
    world.offset_ms += 61_000
    await until_ended(world, box)


async def test_a_use_at_the_last_moment_keeps_it(world):
    """The sweep has found it idle; before its end is committed a call comes."""
    box = await make(world, idle_timeout_s=60)
    world.offset_ms += 61_000
    view = await world.services.sandboxes._lifecycle.view(box)
    await world.store.touch([box])
    await world.services.expiry._end_unused(view)
    assert await state_of(world, box) == "leased"


async def test_paused_time_is_no_idle_time_and_the_time_to_live_goes_on(world):
    box, other = await make(world, idle_timeout_s=60), await make(world, ttl_s=100)
    await turn(world, box, "pause")
    await turn(world, other, "pause")
    world.offset_ms += 90_000
    await swept(world)
    assert (await state_of(world, box), await state_of(world, other)) == ("paused", "paused")
    world.offset_ms += 11_000
    await until_ended(world, other)
    assert await state_of(world, box) == "paused"
    await turn(world, box, "resume")
    world.offset_ms += 30_000
    await swept(world)
    assert await state_of(world, box) == "leased", "the resume was a use"


async def test_the_ends_can_be_moved_and_the_node_follows(world):
    box = await make(world, ttl_s=100)
    [instance] = world.node.live
    world.offset_ms += 90_000
    moved = await patch(world, box, ttl_s=1000, idle_timeout_s=500)
    assert moved.status == 200, moved.document
    assert moved.document["idle_timeout_s"] == 500 and world.node.deadlines[instance] == 1060
    world.offset_ms += 400_000
    await swept(world)
    assert await state_of(world, box) == "leased"
    assert (await patch(world, box, idle_timeout_s="none")).document["idle_timeout_s"] is None
    assert (await patch(world, box, ttl_s=10)).status == 200 and world.node.deadlines[instance] == 70
    world.offset_ms += 11_000
    await until_ended(world, box)
    assert (await patch(world, box, ttl_s=10)).document["code"] == "sandbox_deleted"


async def test_what_cannot_be_moved_is_refused(world, box):
    for document, code in (
        ({}, "invalid_value"),
        ({"ttl_s": 0}, "invalid_value"),
        ({"ttl_s": "soon"}, "invalid_value"),
        ({"idle_timeout_s": -1}, "invalid_value"),
        ({"memory": "1G"}, "invalid_value"),
        ({"ttl_s": 10**6}, "policy_denied"),
        ({"ttl_s": "none"}, "policy_denied"),
    ):
        refused = await world.call("PATCH", f"/v1/sandboxes/{box}", document)
        assert refused.document["code"] == code, (document, refused.document)
    assert (await patch(world, box, ttl_s=50, h_corral_lease="1.0")).document["code"] == "lease_lost"


async def test_policy_may_allow_no_time_to_live_and_may_ask_for_a_time_without_activity(world):
    assert (await world.call("POST", "/v1/sandboxes", {"ttl_s": "none"})).document["code"] == "policy_denied"
    core = world.services.core
    caps = replace(core.policy.caps, unlimited_ttl=True, idle_timeout_s=600.0)
    core.policy = replace(core.policy, caps=caps)
    endless = await world.call("POST", "/v1/sandboxes", {"ttl_s": "none"})
    assert endless.status == 201 and endless.document["expires_at"] is None
    assert endless.document["idle_timeout_s"] == 600, "the cap, as nothing was said"
    for asked in (601, "none"):
        refused = await world.call("POST", "/v1/sandboxes", {"idle_timeout_s": asked})
        assert refused.document["code"] == "policy_denied", refused.document
    world.offset_ms += 1000 * HOUR_MS
    await until_ended(world, endless.document["id"])


async def test_a_pause_that_another_worker_did_and_undid_before_we_looked_did_not_fail(tmp_path, until):
    cluster = Cluster(tmp_path)
    try:
        ours, theirs = [await cluster.start(name, stale_s=60.0) for name in ("a", "b")]
        box = await make(ours)
        cluster.hub.works = False  # nobody is told anything
        cluster.node.turn_gate = asyncio.Event()
        first = asyncio.create_task(turn(theirs, box, "pause"))
        await until(lambda: cluster.node.turns)
        second = asyncio.create_task(turn(ours, box, "pause"))
        await asyncio.sleep(0.1)  # it has seen the other one's, most probably, and looks again in a second
        cluster.node.turn_gate.set()
        assert (await first).document["state"] == "paused"
        assert (await turn(theirs, box, "resume")).document["state"] == "leased"
        answer = await second
        assert (answer.status, answer.document["state"]) == (200, "paused"), answer.document
        assert await state_of(theirs, box) == "paused"
    finally:
        await cluster.stop()
