"""Leases over a node in memory: who gets a sandbox, how it changes hands, what a stale holder can still do (nothing)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from corral.adapters.store.databases import SqliteDatabase
from corral.adapters.store.sqlite import SqliteStore
from corral.api.routes import Request, dispatch
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.ports.leases import Renewal
from corral.services.events import Caller

from .conftest import World, turns


async def made(world, **fields):
    answer = await world.call("POST", "/v1/sandboxes", fields)
    assert answer.status == 201, answer.document
    return answer.document["id"]


async def attach(world, sandbox_id, owner="s/1", caller=None, headers=None, **fields):
    document = {"owner": owner, **fields}
    path = f"/v1/sandboxes/{sandbox_id}/attach"
    request = Request("POST", path, {}, headers or {}, b"", document, caller or Caller())
    return await dispatch(world.services, request)


async def with_lease(world, method, route, lease=None, document=None, caller=None, body=b"", **query):
    headers = {} if lease is None else {"corral-lease": lease}
    request = Request(method, route, query, headers, body, document, caller or Caller())
    return await dispatch(world.services, request)


async def state_of(world, sandbox_id):
    return (await world.call("GET", f"/v1/sandboxes/{sandbox_id}")).document["state"]


async def settled(world, sandbox_id, until, state="idle"):
    async def there():
        return await state_of(world, sandbox_id) == state

    await until(there)


def code(answer):
    return answer.document.get("code")


async def test_a_lease_is_a_document_with_its_fence_and_the_sandbox_shows_its_owner(world):
    box = await made(world)
    answer = await attach(world, box, "session/call", ttl_s=30)
    assert answer.status == 200, answer.document
    lease = answer.document
    assert (lease["owner"], lease["implicit"], lease["sandbox_id"]) == ("session/call", False, box)
    assert lease["lease"] == f"{lease['incarnation']}.{lease['lease_version']}" and lease["lease_version"] == 2
    assert 0 < lease["ttl_ms"] <= 30_000 and lease["acquired_at"] < lease["expires_at"]
    shown = (await world.call("GET", f"/v1/sandboxes/{box}")).document
    assert shown["lease"]["owner"] == "session/call" and shown["lease"]["lease"] == lease["lease"]
    taken = [event for event in shown["history"] if event["event"] == "acquire"][-1]["metadata"]
    assert (taken["owner"], taken["was"], taken["lease"]) == ("session/call", "key:local", lease["lease"])
    [listed] = (await world.call("GET", "/v1/leases")).document["items"]
    assert listed == {**lease, "ttl_ms": listed["ttl_ms"]} and listed["ttl_ms"] <= lease["ttl_ms"]


async def test_a_lease_is_reported_only_after_node_and_guest_know_its_fence(world, until):
    box = await made(world)
    world.node.fence_gate = asyncio.Event()
    asking = asyncio.create_task(attach(world, box))
    await until(lambda: world.node.fenced[-1][1] == Fence(1, 2))
    await turns()
    assert not asking.done()
    world.node.fence_gate.set()
    assert (await asking).document["lease"] == "1.2"


async def test_without_a_lease_the_one_who_holds_none_is_told_who_is_there_and_a_stale_fence_is_lost(world, until):
    box = await made(world)
    lease = (await attach(world, box)).document["lease"]
    path = f"/v1/sandboxes/{box}"
    run = {"argv": ["print", "x"]}
    assert code(await with_lease(world, "POST", f"{path}/execs", None, run)) == "lease_held"
    assert (await with_lease(world, "POST", f"{path}/execs", lease, run)).status == 200
    for stale in ("1.1", "0.9", "1.3", "2.0"):
        assert code(await with_lease(world, "POST", f"{path}/execs", stale, run)) == "lease_lost", stale
        assert code(await with_lease(world, "DELETE", path, stale)) == "lease_lost", stale
        assert code(await with_lease(world, "POST", f"{path}/renew", stale, {})) == "lease_lost", stale
        assert code(await with_lease(world, "POST", f"{path}/release", stale, {})) == "lease_lost", stale
        assert code(await with_lease(world, "PUT", f"{path}/files/archive", stale, path="/workspace")) == "lease_lost"
    assert code(await with_lease(world, "POST", f"{path}/execs", "1", run)) == "invalid_value"
    assert len(world.node.starts) == 1
    # Reading needs no lease; the tenant's own end of it needs none either.
    assert (await world.call("GET", f"{path}/files/archive", path="/workspace")).status == 200
    assert (await world.call("DELETE", path)).status == 200


async def test_the_owner_of_a_lease_is_of_its_key(world):
    box = await made(world)
    lease = (await attach(world, box, "s/1")).document["lease"]
    other = Caller(owner="key:another")
    path = f"/v1/sandboxes/{box}"
    run = {"argv": ["print", "x"]}
    assert code(await attach(world, box, "s/1", other)) == "lease_held"
    for answer in (
        await with_lease(world, "POST", f"{path}/execs", lease, run, other),
        await with_lease(world, "POST", f"{path}/renew", lease, {"owner": "s/1"}, other),
        await with_lease(world, "POST", f"{path}/release", lease, {"owner": "s/1"}, other),
    ):
        assert code(answer) == "lease_lost"
    assert code(await with_lease(world, "POST", f"{path}/renew", lease, {"owner": "s/2"})) == "lease_lost"
    foreign = Caller("elsewhere", "key:local")
    assert code(await attach(world, box, "s/1", foreign)) == "not_found"
    assert (await with_lease(world, "GET", "/v1/leases", caller=foreign)).document["items"] == []


async def test_a_second_owner_is_refused_outside_the_session_and_waits_inside(world, until):
    box = await made(world)
    first = (await attach(world, box, "s/1", session="s", ttl_s=60)).document
    refused = await attach(world, box, "t/1")
    assert (refused.status, code(refused)) == (409, "lease_held") and int(refused.headers["Retry-After"]) >= 1
    assert code(await attach(world, box, "t/1", session="t")) == "lease_held"
    assert code(await attach(world, box, "t/1", contention="wait", wait_s=0.05)) == "lease_held"
    unable = await attach(world, box, "t/1", contention="fork")
    assert (code(unable), unable.document["field"]) == ("not_supported_yet", "/contention")
    waiting = asyncio.create_task(attach(world, box, "s/2", session="s"))
    await turns()
    assert not waiting.done()
    assert (await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", first["lease"], {})).status == 200
    second = (await waiting).document
    assert second["owner"] == "s/2" and second["lease_version"] > first["lease_version"] + 1
    assert (box, second["session"]) == (second["sandbox_id"], "s")


async def test_contention_new_gives_a_sandbox_like_it(world):
    box = await made(world, ttl_s=1234)
    await attach(world, box, "s/1")
    other = (await attach(world, box, "s/2", contention="new")).document
    assert other["sandbox_id"] != box and other["owner"] == "s/2"
    like = (await world.call("GET", f"/v1/sandboxes/{other['sandbox_id']}")).document
    assert like["state"] == "leased" and like["template"] == "host"


async def test_what_runs_goes_on_when_its_own_caller_takes_a_lease_by_name(world, until):
    box = await made(world)
    answer = await world.call("POST", f"/v1/sandboxes/{box}/execs", {"argv": ["sleep"], "wait": 0})
    await until(lambda: world.node.starts)
    lease = (await attach(world, box)).document
    assert world.node.fenced[-1][2] == "adopt" and lease["state"] == "running"
    done = await with_lease(
        world, "POST", f"/v1/execs/{answer.document['id']}/signal", lease["lease"], {"signal": "TERM"}
    )
    assert done.status == 200
    result = (await world.call("GET", f"/v1/execs/{answer.document['id']}", wait=5)).document["result"]
    assert result["reason"] == "signal"
    assert await state_of(world, box) == "leased"


async def test_the_same_owner_that_asks_again_gets_a_new_token_and_a_repeated_call_the_same(world):
    box = await made(world)
    first = (await attach(world, box)).document["lease"]
    again = (await attach(world, box)).document["lease"]
    assert Fence.parse(again) > Fence.parse(first), "whoever was it before is fenced off"
    key = {"idempotency-key": "k1"}
    one = (await attach(world, box, headers=key)).document
    two = (await attach(world, box, headers=key)).document
    assert one == {**two, "ttl_ms": one["ttl_ms"]} and 0 < two["ttl_ms"] <= one["ttl_ms"]


async def test_a_repeated_attach_gets_the_same_lease_from_another_process_while_it_is_the_current_one(world):
    box = await made(world)
    key = {"idempotency-key": "k1"}
    one = (await attach(world, box, "s/1", headers=key)).document
    await world.crash()
    await world.start()
    two = (await attach(world, box, "s/1", headers=key)).document
    assert two == {**one, "ttl_ms": two["ttl_ms"]} and two["ttl_ms"] <= one["ttl_ms"]
    renewed = await with_lease(world, "POST", f"/v1/sandboxes/{box}/renew", one["lease"], {"owner": "s/1"})
    assert renewed.status == 200
    other = (await attach(world, box, "s/1", headers={"idempotency-key": "k2"})).document
    assert Fence.parse(other["lease"]) > Fence.parse(one["lease"]), "another key is another call"
    third = (await attach(world, box, "s/1", headers=key)).document
    assert Fence.parse(third["lease"]) > Fence.parse(other["lease"]), (
        "what is not the current one any more is taken anew"
    )


async def test_a_repeated_attach_gets_the_same_lease_from_the_next_owner_of_a_database_file(tmp_path):
    world = World(tmp_path)
    SqliteDatabase(tmp_path / "corral.db").upgrade()
    world.store = SqliteStore(tmp_path / "corral.db", world.now_ms)
    await world.start()
    box = await made(world)
    answers = []
    for wish in ({}, {"contention": "new"}):
        for _ in range(2):
            answers.append(
                (await attach(world, box, f"s/{len(wish)}", headers={"idempotency-key": "k1"}, **wish)).document
            )
            await world.crash()
            await world.store.close()
            world.store = SqliteStore(tmp_path / "corral.db", world.now_ms)
            await world.start()
    one, two, new, same = ((answer["sandbox_id"], answer["lease"]) for answer in answers)
    assert one == two and new == same and one[0] == box != new[0]
    await world.services.stop(5.0)


async def test_a_lease_whose_taker_died_before_the_node_knew_it_is_made_known_by_the_repeated_call(world, until):
    box = await made(world)
    key = {"idempotency-key": "k1"}
    world.node.fence_gate = asyncio.Event()
    asking = asyncio.create_task(attach(world, box, headers=key))
    await until(lambda: world.node.fenced[-1][1] == Fence(1, 2))
    [instance] = world.node.live
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await world.crash()
    world.node.fence_gate = None
    world.node.fenced.clear()
    await world.start()
    assert (await attach(world, box, headers=key)).document["lease"] == "1.2"
    assert world.node.floor_of[instance] == Fence(1, 2) and world.node.fenced


async def test_a_repeated_attach_with_contention_new_gets_the_same_new_sandbox_from_another_process(world, until):
    box = await made(world)
    first = (await attach(world, box, "s/1")).document["lease"]
    key = {"idempotency-key": "k1"}
    one = (await attach(world, box, "s/2", headers=key, contention="new")).document
    await world.crash()
    await world.start()
    # Also where the one that was asked for has come free meanwhile.
    assert (await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", first, {})).status == 200
    two = (await attach(world, box, "s/2", headers=key, contention="new")).document
    assert one["sandbox_id"] != box and two == {**one, "ttl_ms": two["ttl_ms"]}
    other = (await attach(world, one["sandbox_id"], "s/3", headers=key, contention="new")).document
    assert other["sandbox_id"] not in (box, one["sandbox_id"])


async def test_a_new_sandbox_whose_maker_died_half_way_is_the_one_that_the_repeated_call_gets(world, until):
    box = await made(world)
    await attach(world, box, "s/1")
    key = {"idempotency-key": "k1"}
    world.node.create_gate = asyncio.Event()
    asking = asyncio.create_task(attach(world, box, "s/2", headers=key, contention="new"))

    async def begun():
        return len((await world.call("GET", "/v1/sandboxes")).document["items"]) == 2

    await until(begun)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await world.crash()
    world.node.create_gate.set()
    await world.start()
    got = (await attach(world, box, "s/2", headers=key, contention="new")).document
    assert got["owner"] == "s/2" and got["sandbox_id"] != box, got
    assert len((await world.call("GET", "/v1/sandboxes")).document["items"]) == 2


async def test_the_idempotency_key_of_one_caller_gives_another_one_nothing(world):
    box = await made(world)
    key = {"idempotency-key": "k1"}
    assert (await attach(world, box, headers=key)).status == 200
    assert code(await attach(world, box, "s/1", Caller(owner="key:another"), key)) == "lease_held"


async def test_a_call_that_nobody_waits_for_any_more_gets_nothing_and_takes_nothing(world, until):
    box = await made(world)
    first = (await attach(world, box, "s/1")).document["lease"]
    key = {"idempotency-key": "k1"}
    wish = {"contention": "wait", "wait_s": 60}
    for _ in range(2):
        gone = asyncio.create_task(attach(world, box, "s/2", headers=key, **wish))
        await turns()
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    leaving, staying = (asyncio.create_task(attach(world, box, "s/2", headers=key, **wish)) for _ in range(2))
    await turns()
    leaving.cancel()
    assert (await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", first, {})).status == 200
    held = (await staying).document
    assert held["owner"] == "s/2"
    await turns()
    shown = (await world.call("GET", f"/v1/sandboxes/{box}")).document
    assert shown["lease"]["lease"] == held["lease"], "nobody has taken it from its holder"
    assert [e["metadata"].get("owner") for e in shown["history"] if e["event"] == "acquire"].count("s/2") == 1
    renewed = await with_lease(world, "POST", f"/v1/sandboxes/{box}/renew", held["lease"], {"owner": "s/2"})
    assert renewed.status == 200


async def test_a_released_sandbox_is_settled_before_it_is_idle(world, until):
    box = await made(world)
    [instance] = world.node.live
    lease = (await attach(world, box)).document["lease"]
    world.node.tmp[instance] = ["/tmp/a", "/dev/shm/b", "/workspace/kept"]
    running = await with_lease(world, "POST", f"/v1/sandboxes/{box}/execs", lease, {"argv": ["sleep"], "wait": 0})
    await until(lambda: world.node.starts)
    answer = await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", lease, {"owner": "s/1"})
    assert answer.document["state"] == "recycling" and answer.document["lease"] is None
    await settled(world, box, until)
    assert world.node.tmp[instance] == ["/workspace/kept"]
    assert world.node.fenced[-1][2] == "kill" and world.node.floor_of[instance] == Fence(1, 3)
    ended = (await world.call("GET", f"/v1/execs/{running.document['id']}")).document
    assert ended["result"]["reason"] == "lease_lost"
    assert await world.store.environment_version(box) == 2
    assert await world.store.open_commands(box) == []
    again = await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", lease, {"owner": "s/1"})
    assert again.status == 200 and again.document["state"] == "idle", "a release that is repeated changes nothing"


async def test_an_idle_sandbox_is_checked_before_it_is_leased_again_and_a_caller_without_a_lease_gets_it_too(
    world, until
):
    box = await made(world)
    lease = (await attach(world, box)).document["lease"]
    await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", lease, {})
    await settled(world, box, until)
    other = await attach(world, box, "x/1", Caller(owner="key:another"))
    assert code(other) == "conflict" and "another user" in other.document["detail"]
    assert await state_of(world, box) == "idle"
    done = await world.call("POST", f"/v1/sandboxes/{box}/execs", {"argv": ["print", "x"]})
    assert done.document["result"]["stdout"]["text"] == "x"
    history = (await world.call("GET", f"/v1/sandboxes/{box}")).document["history"]
    states = [event["new_state"] for event in history]
    assert states[-5:] == ["idle", "reuse_checking", "leased", "running", "leased"]


async def test_a_tainted_sandbox_is_not_used_again(world, until):
    box = await made(world)
    lease = (await attach(world, box)).document["lease"]
    view = await world.store.get_sandbox(box, None)
    await world.services.sandboxes._lifecycle.fire(view, "taint")
    await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", lease, {})
    await settled(world, box, until, "terminated")


async def test_what_cannot_be_cleaned_is_destroyed(world, until):
    box = await made(world)
    [instance] = world.node.live
    lease = (await attach(world, box)).document["lease"]
    world.node.tmp[instance] = ["/tmp/a"]
    world.node.sticky.add("/tmp/a")
    await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", lease, {})
    await settled(world, box, until, "terminated")
    view = await world.store.get_sandbox(box, None)
    assert view.sandbox.tainted
    events = [event.event_type for event in await world.store.history(box)]
    assert "failed" in events and "settled" not in events


async def test_an_expired_lease_is_taken_back_by_the_sweep_and_its_holder_hears_lease_lost(world, until):
    box = await made(world)
    lease = (await attach(world, box, ttl_s=2)).document["lease"]
    running = await with_lease(world, "POST", f"/v1/sandboxes/{box}/execs", lease, {"argv": ["sleep"], "wait": 0})
    await until(lambda: world.node.starts)
    world.offset_ms += 2_100
    for path in ("renew", "execs"):
        answer = await with_lease(
            world, "POST", f"/v1/sandboxes/{box}/{path}", lease, {"argv": ["print"]} if path == "execs" else {}
        )
        assert code(answer) == "lease_lost", path
    await settled(world, box, until)
    result = (await world.call("GET", f"/v1/execs/{running.document['id']}")).document["result"]
    assert result["reason"] == "lease_lost"
    history = (await world.call("GET", f"/v1/sandboxes/{box}")).document["history"]
    lost = next(event for event in history if event["event"] == "lease_expired")["metadata"]
    assert (lost["was"], lost["owner"]) == ("s/1", "system:lease_expired")
    assert code(await with_lease(world, "POST", f"/v1/sandboxes/{box}/renew", lease, {})) == "lease_lost"


async def test_whoever_waits_gets_a_sandbox_whose_holder_has_let_its_lease_run_out(world):
    await world.crash()
    await world.start(sweep_s=60.0)  # nobody but the one who asks finds it
    box = await made(world)
    first = (await attach(world, box, "s/1", ttl_s=2)).document
    world.offset_ms += 1_900
    answer = await attach(world, box, "s/2", contention="wait", wait_s=10)
    assert answer.document["owner"] == "s/2" and answer.document["lease_version"] > first["lease_version"]


async def test_each_call_of_the_holder_extends_its_lease_for_as_long_as_it_was_taken(world):
    box = await made(world)
    lease = (await attach(world, box, ttl_s=10)).document
    for _ in range(4):
        world.offset_ms += 5_000
        done = await with_lease(world, "POST", f"/v1/sandboxes/{box}/execs", lease["lease"], {"argv": ["print", "x"]})
        assert done.status == 200
    renewed = (await with_lease(world, "POST", f"/v1/sandboxes/{box}/renew", lease["lease"], {})).document
    assert renewed["lease"] == lease["lease"] and renewed["expires_at"] > lease["expires_at"]
    assert 6_000 < renewed["ttl_ms"] <= 10_000


async def test_renewals_at_the_very_expiry_agree_with_the_row(world):
    await world.crash()
    await world.start(sweep_s=60.0)
    box = await made(world)
    outcomes = set()
    for n in range(40):
        lease = (await attach(world, box, f"s/{n}", ttl_s=1, contention="wait")).document
        view = await world.store.get_sandbox(box, None)
        world.offset_ms += view.lease.expires_at - world.now_ms() - 2 + n % 5
        answer = await with_lease(world, "POST", f"/v1/sandboxes/{box}/renew", lease["lease"], {})
        row = await world.store.get_sandbox(box, None)
        outcomes.add(answer.status)
        if answer.status == 200:
            assert (
                row.lease.expires_at > view.lease.expires_at
                and str(Fence(1, row.lease.lease_version)) == lease["lease"]
            )
        else:
            assert code(answer) == "lease_lost" and row.lease.expires_at == view.lease.expires_at
        world.offset_ms += 3_000
    assert outcomes == {200, 409}


async def test_many_renewals_at_once_are_few_transactions(world):
    boxes = [await made(world) for _ in range(20)]
    leases = [(await attach(world, box)).document["lease"] for box in boxes]
    counted = 0
    real = world.store.renew_leases

    async def counting(renewals):
        nonlocal counted
        counted += 1
        return await real(renewals)

    world.store.renew_leases = counting
    pairs = zip(boxes, leases, strict=True)
    answers = await asyncio.gather(
        *(with_lease(world, "POST", f"/v1/sandboxes/{box}/renew", lease, {}) for box, lease in pairs)
    )
    assert [answer.status for answer in answers] == [200] * 20
    assert counted < 10


@pytest.mark.parametrize("begun", [True, False])
async def test_whoever_waits_for_a_renewal_when_the_service_stops_is_told_so(world, monkeypatch, begun):
    lease = (await attach(world, box := await made(world))).document["lease"]
    services, reached = world.services, asyncio.Event()

    async def stands_still(renewals):
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(world.store, "renew_leases", stands_still)
    fence = Fence.parse(lease)
    first = asyncio.create_task(services.leases.renew(Caller(), box, fence, None, None))
    if begun:
        await reached.wait()
    else:
        while not services.leases._renewing:
            await asyncio.sleep(0)
    second = asyncio.create_task(services.leases.extend(Renewal(box, "key:local/s/1", fence, 1000)))
    services.core.close()
    for task in services.core.tasks:
        task.cancel()
    for call in (first, second):
        with pytest.raises(CorralError) as refused:
            await asyncio.wait_for(call, 10)
        assert refused.value.code == "shutting_down"


async def test_released_with_keep_what_nobody_is_attached_to_goes_on_and_is_settled_after(world, until):
    box = await made(world)
    lease = (await attach(world, box)).document["lease"]
    path = f"/v1/sandboxes/{box}/execs"
    detached = (await with_lease(world, "POST", path, lease, {"argv": ["sleep"], "wait": 0})).document["id"]
    attached = (
        await with_lease(world, "POST", path, lease, {"argv": ["sleep"], "wait": 0, "attached": True})
    ).document["id"]
    await until(lambda: len(world.node.starts) == 2)
    answer = await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", lease, {"keep": True})
    assert answer.document["state"] == "running"
    gone = (await world.call("GET", f"/v1/execs/{attached}", wait=5)).document["result"]
    assert gone["reason"] == "lease_lost"
    assert (await world.call("GET", f"/v1/execs/{detached}")).document["state"] in ("starting", "running")
    world.node.execs[detached].end(replace(world.node.execs[attached].facts, ended_by=None, signal=None, exit_code=0))
    await settled(world, box, until)
    assert (await world.call("GET", f"/v1/execs/{detached}")).document["result"]["reason"] == "ok"


@pytest.mark.parametrize("stage", ["taken", "checking"])
async def test_an_acquisition_that_was_cut_short_can_be_made_again(world, until, stage):
    box = await made(world)
    if stage == "checking":
        lease = (await attach(world, box)).document["lease"]
        await with_lease(world, "POST", f"/v1/sandboxes/{box}/release", lease, {})
        await settled(world, box, until)
    world.node.fence_gate = asyncio.Event()
    asking = asyncio.create_task(attach(world, box, "s/2"))
    before = len(world.node.fenced)
    await until(lambda: len(world.node.fenced) > before)
    await world.crash()
    asking.cancel()
    world.node.fence_gate.set()
    await world.start()
    answer = await attach(world, box, "s/2", contention="wait")
    assert answer.status == 200, answer.document
    [instance] = world.node.live
    assert str(world.node.floor_of[instance]) == answer.document["lease"]
    run = await with_lease(world, "POST", f"/v1/sandboxes/{box}/execs", answer.document["lease"], {"argv": ["print"]})
    assert run.status == 200


async def test_a_take_over_while_a_delete_of_the_old_holder_is_under_way_ends_nothing_of_the_new_one(world):
    box = await made(world)
    old = (await attach(world, box, "s/1")).document["lease"]
    new = (await attach(world, box, "s/1")).document["lease"]
    assert code(await with_lease(world, "DELETE", f"/v1/sandboxes/{box}", old)) == "lease_lost"
    assert await state_of(world, box) == "leased"
    assert (await with_lease(world, "DELETE", f"/v1/sandboxes/{box}", new)).document["state"] == "terminated"
    assert (await with_lease(world, "DELETE", f"/v1/sandboxes/{box}", new)).status == 200


async def test_what_a_restored_store_makes_again_goes_on_above_what_it_had_before(world):
    world.node.past = Fence(1, 7)
    box = await made(world)
    view = await world.store.get_sandbox(box, None)
    assert (view.sandbox.state, view.sandbox.incarnation) == ("leased", 1)
    assert view.lease.lease_version == 9, "8 above the floor, one more for its creator"
    [request] = world.node.live.values()
    assert request.fence == Fence(1, 8) and world.node.destroyed == []


async def test_a_restored_store_takes_the_floors_of_the_node_and_ends_nothing(world, until):
    box = await made(world)
    [instance] = world.node.live
    lease = (await attach(world, box)).document["lease"]
    await world.services.leases.sweep()
    await world.crash()
    # An older copy of the store: the row is behind what the node has journalled, and so are the events.
    world.node.floor_of[instance] = Fence(1, 9)
    world.node.event_id += 50
    stranger = replace(world.node.live[instance], sandbox_id="sbx_unknown", instance_id="ins_unknown")
    world.node.live["ins_unknown"] = stranger
    await world.start(sweep_s=60.0)
    view = await world.store.get_sandbox(box, None)
    assert (view.lease.lease_version, view.lease.lease_owner) == (10, "system:store_regressed")
    assert world.node.floor_of[instance] == Fence(1, 10) and world.node.fenced[-1][2] == "adopt"
    assert world.node.destroyed == []
    event = [e for e in await world.store.history(box) if e.event_type == "floor_adopted"][-1]
    assert event.metadata["floor"] == "1.9" and event.metadata["instance"] == instance
    assert any("store_regressed" in line and "ins_unknown" in line for line in world.logged)
    path = f"/v1/sandboxes/{box}/execs"
    assert code(await with_lease(world, "POST", path, lease, {"argv": ["print"]})) == "lease_lost"
    after = (await world.call("POST", "/v1/gc")).document
    assert (
        world.node.destroyed == []
        and {"kind": "unknown_instance", "id": "ins_unknown", "instance_id": "ins_unknown"} in after["leftovers"]
    )
    done = await world.call("POST", path, {"argv": ["print", "x"]})
    assert done.document["lease_version"] == 11, "its own caller goes on"
    assert (await world.call("POST", "/v1/gc", unknown="true")).document["leftovers"] == []
    assert world.node.destroyed == [("ins_unknown", "gc")]


async def test_a_node_that_refuses_a_fence_below_its_floor_shows_that_the_row_is_behind(world):
    await world.crash()
    await world.start(sweep_s=60.0)
    box = await made(world)
    [instance] = world.node.live
    world.node.floor_of[instance] = Fence(1, 7)
    path = f"/v1/sandboxes/{box}/files/archive"
    first = await with_lease(world, "PUT", path, None, path="/workspace")
    assert (code(first), "floor" in first.document) == ("lease_lost", False)
    view = await world.store.get_sandbox(box, None)
    assert view.lease.lease_version == 8
    assert (await with_lease(world, "PUT", path, None, path="/workspace")).status == 200


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"owner": ""},
        {"owner": " x"},
        {"owner": "a\nb"},
        {"owner": 3},
        {"owner": "x" * 201},
        {"owner": "x", "ttl_s": 0},
        {"owner": "x", "ttl_s": "1"},
        {"owner": "x", "ttl_s": 1e9},
        {"owner": "x", "contention": "win"},
        {"owner": "x", "wait_s": -1},
        {"owner": "x", "more": 1},
        [],
    ],
)
async def test_what_cannot_be_is_refused(world, document):
    box = await made(world)
    answer = await world.call("POST", f"/v1/sandboxes/{box}/attach", document)
    assert (answer.status, code(answer)) == (422, "invalid_value")


async def test_a_run_s_sandbox_is_nobody_else_s(world, until):
    run = (await world.call("POST", "/v1/runs", {"command": ["sleep"]}, wait=0)).document["id"]
    await until(lambda: world.node.starts)
    box = (await world.call("GET", f"/v1/runs/{run}")).document["sandbox_id"]
    assert code(await attach(world, box)) == "conflict"
    await world.call("POST", f"/v1/runs/{run}/cancel")


async def test_chinese_owners_are_kept(world):
    box = await made(world)
    lease = (await attach(world, box, "会话/调用 1", session="会话")).document
    assert (lease["owner"], lease["session"]) == ("会话/调用 1", "会话")
    assert (
        code(await with_lease(world, "POST", f"/v1/sandboxes/{box}/renew", lease["lease"], {"owner": "会话/调用 1"}))
        is None
    )
