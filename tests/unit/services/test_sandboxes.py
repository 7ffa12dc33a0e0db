"""Kept sandboxes: create, exec, delete, expiry, loss; over a node in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from corral.domain.records import EventRecord, LeaseChange, Transition
from corral.errors import CorralError

from .conftest import turns

OPEN = ("starting", "running")


async def make(world, **document):
    reply = await world.call("POST", "/v1/sandboxes", document)
    assert reply.status == 201, reply.document
    return reply.document


async def state_of(world, sandbox_id):
    return (await world.call("GET", f"/v1/sandboxes/{sandbox_id}")).document["state"]


async def run(world, sandbox_id, *argv, **more):
    query = more.pop("query", {})
    return await world.call("POST", f"/v1/sandboxes/{sandbox_id}/execs", {"argv": list(argv), **more}, **query)


async def test_a_sandbox_document_is_the_contracts(world):
    made = await make(world, memory="256M", ttl_s=100)
    wanted = (
        "id state runtime template template_digest resource_class limits lease_version incarnation session created_at "
        "expires_at conditions tainted"
    )
    assert set(wanted.split()) <= set(made)
    assert made["state"] == "leased" and made["lease_version"] == 1 and made["incarnation"] == 1
    assert made["limits"]["memory"]["value"] == 256 << 20 and made["limits"]["memory"]["mode"] == "enforced"
    listed = (await world.call("GET", "/v1/sandboxes")).document
    assert [item["id"] for item in listed["items"]] == [made["id"]] and listed["next"] is None
    seen = (await world.call("GET", f"/v1/sandboxes/{made['id']}")).document
    assert seen["instance"]["state"] == "bound"
    states = [event["new_state"] for event in seen["history"]]
    assert states[0] == "requested" and states[-1] == "leased"


async def test_pages_of_sandboxes_follow_each_other(world):
    made = {(await make(world))["id"] for _ in range(5)}
    seen, after = set(), {}
    for _ in range(3):
        page = (await world.call("GET", "/v1/sandboxes", limit=2, **after)).document
        seen |= {item["id"] for item in page["items"]}
        after = {"after": page["next"]}
    assert seen == made and after == {"after": None}


async def test_execs_answer_with_lease_and_incarnation(world):
    made = await make(world)
    done = (await run(world, made["id"], "print", "x")).document
    assert done["id"].startswith("exe_") and done["sandbox_id"] == made["id"]
    assert (done["lease_version"], done["incarnation"]) == (1, 1)
    assert done["result"]["reason"] == "ok" and done["result"]["stdout"]["text"] == "x"
    assert await state_of(world, made["id"]) == "leased"
    assert await world.store.open_commands(made["id"]) == []


async def test_eight_execs_at_once_all_end_right(world):
    made = await make(world)
    replies = await asyncio.gather(*(run(world, made["id"], "print", str(n)) for n in range(8)))
    assert [r.document["result"]["stdout"]["text"] for r in replies] == [str(n) for n in range(8)]
    assert await state_of(world, made["id"]) == "leased"


async def test_a_missing_cwd_is_an_error_of_the_call(world):
    made = await make(world)
    reply = await run(world, made["id"], "nocwd")
    assert reply.status == 422 and reply.document["code"] == "cwd_not_found"


async def test_root_is_refused(world):
    made = await make(world)
    reply = await run(world, made["id"], "print", user="root")
    assert reply.status == 403 and reply.document["code"] == "user_refused"


async def test_an_old_lease_is_refused(world):
    made = await make(world)
    assert (await run(world, made["id"], "print", "x", query={"h_corral_lease": "1.1"})).status == 200
    reply = await run(world, made["id"], "print", "x", query={"h_corral_lease": "1.0"})
    assert reply.status == 409 and reply.document["code"] == "lease_lost"


async def test_a_sandbox_that_moved_on_unseen_is_looked_at_again(world):
    made = await make(world)
    assert (await run(world, made["id"], "print", "x")).status == 200
    view = await world.store.get_sandbox(made["id"], None)
    event = EventRecord(made["id"], "acquire", None, None)
    taken = LeaseChange("take", view.lease.lease_owner, 60_000)
    await world.store.commit_transition(Transition(made["id"], view.sandbox.version, "leased", event, lease=taken))
    again = await run(world, made["id"], "print", "x", query={"h_corral_lease": "1.1"})
    assert again.status == 409 and again.document["code"] == "lease_lost"
    await world.services.core.store.commit_transition(
        Transition(made["id"], view.sandbox.version + 1, "leased", event, lease=taken)
    )
    done = (await run(world, made["id"], "print", "y")).document
    assert (done["lease_version"], done["result"]["stdout"]["text"]) == (3, "y")
    foreign = Transition(made["id"], 0, "leased", event, lease=LeaseChange("take", "another", 60_000))
    view = await world.store.get_sandbox(made["id"], None)
    await world.store.commit_transition(replace(foreign, expect_version=view.sandbox.version))
    lost = await run(world, made["id"], "print", "z")
    assert lost.status == 409 and lost.document["code"] == "lease_held"
    assert len(world.node.starts) == 2


async def test_wait_zero_answers_202_and_the_exec_goes_on(world, until):
    made = await make(world)
    reply = await run(world, made["id"], "sleep", wait=0)
    assert reply.status == 202 and reply.document["result"] is None
    exec_id = reply.document["id"]
    await until(lambda: exec_id in world.node.execs)
    await world.call("POST", f"/v1/execs/{exec_id}/stdin")
    await world.call("POST", f"/v1/execs/{exec_id}/signal", {"signal": "TERM"})
    done = (await world.call("GET", f"/v1/execs/{exec_id}", wait=5)).document
    assert done["result"]["reason"] == "signal" and done["result"]["signal"] == "SIGTERM"
    assert (await world.call("POST", f"/v1/execs/{exec_id}/signal", {"signal": "TERM"})).status == 409


@pytest.mark.parametrize("signal", [0, -1, 65, "NOPE", None, True, "SIG", [9]])
async def test_bad_signals_are_refused(world, signal):
    reply = await world.call("POST", "/v1/execs/exe_x/signal", {"signal": signal})
    assert reply.status == 422 and reply.document["field"] == "/signal"


async def test_cancel_ends_the_exec_only(world, until):
    made = await make(world)
    exec_id = (await run(world, made["id"], "sleep", wait=0)).document["id"]
    other = (await run(world, made["id"], "sleep", wait=0)).document["id"]
    await until(lambda: other in world.node.execs)
    reply = await world.call("POST", f"/v1/execs/{exec_id}/cancel")
    assert reply.document["result"]["reason"] == "cancelled"
    assert await state_of(world, made["id"]) == "running"
    await world.call("POST", f"/v1/execs/{other}/cancel")
    assert await state_of(world, made["id"]) == "leased"


async def test_the_stream_of_an_exec_resumes(world):
    made = await make(world)
    exec_id = (await run(world, made["id"], "print", "café")).document["id"]
    events = [e async for e in (await world.call("GET", f"/v1/execs/{exec_id}/stream")).events]
    assert [e.kind for e in events] == ["started", "stdout", "ended"]
    again = await world.call("GET", f"/v1/execs/{exec_id}/stream", cursor=events[1].cursor)
    assert [e.kind async for e in again.events] == ["ended"]


async def test_a_cursor_that_is_gone_is_410_with_the_total(world):
    made = await make(world)
    exec_id = (await run(world, made["id"], "print", "x")).document["id"]
    reply = await world.call("GET", f"/v1/execs/{exec_id}/stream", cursor="0.0.-1")
    assert reply.status == 410 and reply.document["code"] == "cursor_gone" and reply.document["bytes"] == 1
    reply = await world.call("GET", f"/v1/execs/{exec_id}/stream", cursor="nonsense")
    assert reply.status == 422


async def test_delete_ends_what_waits_and_is_repeatable(world, until):
    made = await make(world)
    waiting = asyncio.create_task(run(world, made["id"], "sleep"))
    await until(lambda: world.node.starts)
    first, second = await asyncio.gather(*(world.call("DELETE", f"/v1/sandboxes/{made['id']}") for _ in range(2)))
    assert {first.status, second.status} == {200} and first.document["state"] == "terminated"
    result = (await waiting).document["result"]
    assert result["reason"] == "sandbox_deleted" and result["exit_code"] is None
    assert not world.node.live
    assert (await world.call("DELETE", f"/v1/sandboxes/{made['id']}")).status == 200
    reply = await run(world, made["id"], "print", "x")
    assert reply.status == 410 and reply.document["code"] == "sandbox_deleted"
    assert await world.store.open_commands(made["id"]) == []


async def test_delete_wins_against_creation(world, until):
    world.node.create_gate = asyncio.Event()
    creating = asyncio.create_task(world.call("POST", "/v1/sandboxes", {}))
    await until(lambda: world.node.creates)
    [item] = (await world.call("GET", "/v1/sandboxes")).document["items"]
    deleting = asyncio.create_task(world.call("DELETE", f"/v1/sandboxes/{item['id']}"))
    await turns()
    world.node.create_gate.set()
    assert (await deleting).document["state"] == "terminated"
    assert (await creating).document["code"] == "sandbox_deleted"
    assert not world.node.live


@pytest.mark.parametrize("busy", [False, True])
async def test_a_delete_that_nobody_waits_for_is_committed_before_it_is_answered(world, until, busy):
    made = await make(world)
    if busy:
        await run(world, made["id"], "sleep", wait=0)
        await until(lambda: world.node.starts)
    world.node.destroy_gate = asyncio.Event()
    path = f"/v1/sandboxes/{made['id']}"
    for reply in await asyncio.gather(*(world.call("DELETE", path, wait=0) for _ in range(2))):
        assert reply.status == 202 and reply.document["state"] == "sanitizing"
    assert await state_of(world, made["id"]) == "sanitizing"
    world.node.destroy_gate.set()
    assert (await world.call("DELETE", path)).document["state"] == "terminated"


async def test_delete_answers_202_when_it_takes_longer_than_the_wait(world, until):
    made = await make(world)
    world.node.destroy_gate = asyncio.Event()
    reply = await world.call("DELETE", f"/v1/sandboxes/{made['id']}", wait=0.05)
    assert reply.status == 202 and reply.document["state"] == "sanitizing"
    world.node.destroy_gate.set()

    async def gone():
        return await state_of(world, made["id"]) == "terminated"

    await until(gone)


async def test_a_sandbox_whose_files_are_refused_does_not_stay(world, until, monkeypatch):
    async def no_room(instance_id, fence, files):
        raise CorralError("too_large", "no room for 'a'", field="/files/0/path")

    monkeypatch.setattr(world.node, "put_files", no_room)
    reply = await world.call("POST", "/v1/sandboxes", {"files": [{"path": "a", "content": "x"}]})
    assert reply.status == 413 and reply.document["field"] == "/files/0/path"
    await until(lambda: world.node.live == {})
    assert (await world.call("GET", "/v1/sandboxes")).document["items"] == []


async def test_a_sandbox_that_is_deleted_while_its_files_are_written_is_told_as_deleted(world, monkeypatch):
    async def deleted(instance_id, fence, files):
        [item] = (await world.call("GET", "/v1/sandboxes")).document["items"]
        assert (await world.call("DELETE", f"/v1/sandboxes/{item['id']}")).status == 200
        raise CorralError("infra_error", "'a': No such file or directory")

    monkeypatch.setattr(world.node, "put_files", deleted)
    reply = await world.call("POST", "/v1/sandboxes", {"files": [{"path": "a", "content": "x"}]})
    assert (reply.status, reply.document["code"]) == (410, "sandbox_deleted")


async def test_nothing_is_remembered_of_clients_that_waited_for_what_is_over(world, until):
    made = await make(world)
    assert (await run(world, made["id"], "print", "x", attached=True)).status == 200
    assert (await world.call("POST", "/v1/runs", {"command": ["print", "x"], "attached": True})).status == 200
    watchers = world.services.core.watchers
    await until(lambda: not watchers._count)
    assert watchers._left == {} == watchers._grace


async def test_a_store_that_fails_once_does_not_make_losses_go_unheard(world, until, monkeypatch):
    first, second = await make(world), await make(world)
    held = [instance_id for instance_id in world.node.creates]
    real, calls = world.store.list_instances, []

    async def once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise CorralError("store_error", "busy")
        return await real(*args, **kwargs)

    monkeypatch.setattr(world.store, "list_instances", once)
    world.node.gone.put_nowait(held[0])
    await until(lambda: len(calls) == 1)
    world.node.gone.put_nowait(held[1])

    async def are_over():
        return {await state_of(world, made["id"]) for made in (first, second)} == {"terminated"}

    await until(are_over)


async def test_twenty_creations_with_one_key_are_one_sandbox(world):
    replies = await asyncio.gather(*(world.call("POST", "/v1/sandboxes", {}, h_idempotency_key="k") for _ in range(20)))
    assert {r.status for r in replies} == {201} and len({r.document["id"] for r in replies}) == 1
    assert len(world.node.creates) == 1
    other = await world.call("POST", "/v1/sandboxes", {"memory": "64M"}, h_idempotency_key="k")
    assert other.status == 409


async def test_the_ttl_ends_a_sandbox(world, until):
    made = await make(world, ttl_s=50)
    world.offset_ms = 51_000

    async def gone():
        return await state_of(world, made["id"]) == "terminated"

    await until(gone)
    assert not world.node.live


async def test_a_sandbox_that_ends_by_itself_is_lost_and_its_exec_says_so(world, until):
    made = await make(world)
    result = (await run(world, made["id"], "die")).document["result"]
    assert result["reason"] == "sandbox_lost" and result["exit_code"] is None

    async def gone():
        return await state_of(world, made["id"]) == "terminated"

    await until(gone)
    reply = await run(world, made["id"], "print", "x")
    assert reply.document["code"] == "sandbox_lost"
    seen = (await world.call("GET", f"/v1/sandboxes/{made['id']}")).document
    assert "lost" in [event["new_state"] for event in seen["history"]]


async def test_an_attached_exec_ends_when_its_client_is_gone(world, until):
    made = await make(world)
    exec_id = (await run(world, made["id"], "sleep", attached=True, wait=0)).document["id"]

    async def ended():
        return (await world.call("GET", f"/v1/execs/{exec_id}")).document["state"] == "ended"

    await until(ended)
    assert (await world.call("GET", f"/v1/execs/{exec_id}")).document["result"]["reason"] == "cancelled"
    assert await state_of(world, made["id"]) == "leased"


async def test_looking_after_attached_execs_does_not_read_what_runs(world, until, monkeypatch):
    made = await make(world)
    watched = (await run(world, made["id"], "sleep", wait=0)).document["id"]
    exec_id = (await run(world, made["id"], "sleep", attached=True, wait=0)).document["id"]

    async def too_much(*args):
        raise AssertionError("reads the input of every exec that runs")

    monkeypatch.setattr(world.store, "open_execs", too_much)

    async def ended():
        return (await world.call("GET", f"/v1/execs/{exec_id}")).document["state"] == "ended"

    await until(ended)
    assert (await world.call("GET", f"/v1/execs/{watched}")).document["state"] == "running"


async def test_archives_go_in_and_out(world):
    made = await make(world)
    reply = await world.call("GET", f"/v1/sandboxes/{made['id']}/files/archive", path="/workspace/a")
    assert b"".join([b async for b in reply.raw]) == b"tar of /workspace/a"
    reply = await world.call("GET", f"/v1/sandboxes/{made['id']}/files/archive")
    assert reply.status == 422 and reply.document["field"] == "/path"
    assert (await world.call("PUT", f"/v1/sandboxes/{made['id']}/files/archive", path="/workspace")).status == 200


async def test_policy_refuses_a_sandbox_without_making_one(world):
    reply = await world.call("POST", "/v1/sandboxes", {"ttl_s": 10**6})
    assert reply.status == 403 and reply.document["code"] == "policy_denied" and reply.document["hint"]
    assert (await world.call("GET", "/v1/sandboxes", all="true")).document["items"] == []


async def test_doctor_and_health(world):
    document = (await world.call("GET", "/v1/doctor")).document
    assert document["default"] == "bubblewrap" and document["host"]["cgroup"] == "hybrid"
    assert document["runtimes"][0]["limits"]["memory"] == "enforced" and document["leftovers"] == []
    assert (await world.call("GET", "/readyz")).status == 200
    world.node.usable = False
    assert (await world.call("GET", "/v1/doctor")).document["default"] is None
    assert (await world.call("GET", "/readyz")).status == 503
    assert (await world.call("POST", "/v1/gc")).status == 200


async def test_an_exec_that_a_deletion_overtakes_says_deleted(world, until, monkeypatch):
    made = await make(world)
    path = f"/v1/sandboxes/{made['id']}"
    world.node.destroy_gate = asyncio.Event()
    asked, told = asyncio.Event(), asyncio.Event()

    async def refuse(*_):
        asked.set()
        await told.wait()
        raise CorralError("guest_lost", "the channel closed")

    monkeypatch.setattr(world.node, "start_exec", refuse)
    call = asyncio.create_task(world.call("POST", path + "/execs", {"argv": ["print", "x"]}))
    await asyncio.wait_for(asked.wait(), 10)
    await world.call("DELETE", path, wait=0.05)
    told.set()
    assert (await call).document["result"]["reason"] == "sandbox_deleted"
    tar = await world.call("GET", path + "/files/archive", path="/workspace/a")
    assert tar.document["code"] == "sandbox_deleted"


async def test_input_and_signals_that_a_deletion_overtakes_are_told_of_it(world, monkeypatch):
    made = await make(world)
    path = f"/v1/sandboxes/{made['id']}"
    exec_id = (await world.call("POST", path + "/execs", {"argv": ["sleep"], "stdin_open": True}, wait=0)).document[
        "id"
    ]
    world.node.destroy_gate = asyncio.Event()
    asked, told = [asyncio.Event(), asyncio.Event()], asyncio.Event()

    def broken(number):
        async def call(*_, **__):
            asked[number].set()
            await told.wait()
            raise CorralError("guest_lost", "broken pipe")

        return call

    monkeypatch.setattr(world.node, "stdin_exec", broken(0))
    monkeypatch.setattr(world.node, "signal_exec", broken(1))
    feed = asyncio.create_task(world.call("POST", f"/v1/execs/{exec_id}/stdin"))
    stop = asyncio.create_task(world.call("POST", f"/v1/execs/{exec_id}/signal", {"signal": "TERM"}))
    for one in asked:
        await asyncio.wait_for(one.wait(), 10)
    await world.call("DELETE", path, wait=0.05)
    told.set()
    assert [reply.document["code"] for reply in await asyncio.gather(feed, stop)] == ["sandbox_deleted"] * 2


async def test_what_a_call_meets_in_a_sandbox_that_ends_is_told_by_its_end(world):
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    world.node.destroy_gate = asyncio.Event()
    await world.call("DELETE", f"/v1/sandboxes/{made['id']}", wait=0.05)
    met = await world.services.sandboxes.met(CorralError("lease_lost", "older"), made["id"])
    assert met.code == "sandbox_deleted"
    other = (await world.call("POST", "/v1/sandboxes", {})).document
    assert (await world.services.sandboxes.met(CorralError("lease_lost", "older"), other["id"])).code == "lease_lost"


def _allow(world, *profiles: str) -> None:
    rule = world.services.core.policy.templates["host"]
    rules = {**world.services.core.policy.templates, "host": replace(rule, seccomp=frozenset({"default", *profiles}))}
    world.services.core.policy = replace(world.services.core.policy, templates=rules)


async def test_a_weaker_profile_of_a_template_needs_the_policys_leave(world):
    world.node.profiles["host"] = "debug"
    reply = await world.call("POST", "/v1/runs", {"command": ["print", "1"]})
    result = reply.document["result"]
    assert result["reason"] == "policy_denied" and result["started"] is False
    assert "templates.host.seccomp: [debug]" in result["hint"]
    refused = await world.call("POST", "/v1/sandboxes", {})
    assert refused.status == 403 and refused.document["code"] == "policy_denied"
    _allow(world, "browser")
    assert (await world.call("POST", "/v1/sandboxes", {})).status == 403
    assert world.node.live == {}


async def test_an_allowed_profile_is_handed_on_shown_and_logged(world):
    world.node.profiles["host"] = "debug"
    _allow(world, "debug")
    run = (await world.call("POST", "/v1/runs", {"command": ["print", "1"], "keep": True})).document
    assert run["result"]["reason"] == "ok" and run["decisions"]["placement"]["seccomp"] == "debug"
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    assert [request.seccomp for request in world.node.live.values()] == ["debug", "debug"]
    view = await world.store.get_sandbox(made["id"], None)
    assert view is not None and world.services.sandboxes._lifecycle.wanted_of(view).seccomp == "debug"
    weaker = [line for line in world.logged if "seccomp profile debug" in line]
    assert len(weaker) == 2


async def test_the_default_profile_is_named_too_and_not_logged(world):
    run = (await world.call("POST", "/v1/runs", {"command": ["print", "1"]})).document
    assert run["decisions"]["placement"]["seccomp"] == "default"
    assert not any("seccomp" in line for line in world.logged)
