"""Runs from submission to settled, over a node in memory."""

from __future__ import annotations

import asyncio
import base64

import pytest

from corral.errors import CorralError
from corral.services.execs import Stopwatch
from corral.services.executor import Executor

from .conftest import turns

PRINT = {"command": ["print", "你好", "42"]}
SLEEP = {"command": ["sleep"]}


async def test_a_run_answers_the_whole_contract(world, until):
    reply = await world.call("POST", "/v1/runs", PRINT)
    assert reply.status == 200, reply.document
    run = reply.document
    assert run["state"] == "finished"
    assert run["id"].startswith("run_") and run["sandbox_id"].startswith("sbx_")
    result = run["result"]
    assert (
        result["reason"] == "ok" and result["hint"] is None and result["exit_code"] == 0 and result["started"] is True
    )
    assert result["stdout"]["text"] == "你好 42" and result["stdout"]["base64"] is None
    assert result["stdout"]["bytes"] == result["stdout"]["kept_bytes"] == len("你好 42".encode())
    assert result["stderr"]["bytes"] == 0
    names = ("queued", "planning", "acquiring", "preparing", "running", "collecting", "total")
    assert set(result["timings"]) == {f"{n}_ms" for n in names}
    assert all(isinstance(v, int) for v in result["timings"].values())
    decisions = run["decisions"]
    assert decisions["placement"]["runtime"] == "bubblewrap" and decisions["placement"]["template_digest"]
    assert decisions["guard"]["limits"]["memory"] == 512 << 20
    for name in ("plan", "guard", "reuse", "placement"):
        assert decisions[name]["verdict"] and decisions[name]["reason"]
    await until(lambda: not world.node.live)
    view = await world.store.get_sandbox(run["sandbox_id"], "default")
    await until(lambda: _state(world, run["sandbox_id"], "terminated"))
    assert view is not None
    assert await world.store.open_commands(run["sandbox_id"]) == []


async def _state(world, sandbox_id, state):
    view = await world.store.get_sandbox(sandbox_id, None)
    return view is not None and view.sandbox.state == state


async def test_no_output_bytes_are_in_the_store(world):
    reply = await world.call("POST", "/v1/runs", PRINT)
    row = await world.store.get_run(reply.document["id"], "default")
    assert row.result["stdout"] == {"produced": 9, "head": 9, "tail": 0}


async def test_output_none_leaves_the_bytes_out(world):
    reply = await world.call("POST", "/v1/runs", PRINT, output="none")
    assert reply.document["result"]["stdout"]["text"] is None
    assert reply.document["result"]["stdout"]["bytes"] == 9


async def test_the_agent_view_is_a_string(world):
    reply = await world.call("POST", "/v1/runs", PRINT, view="agent", output="none")
    assert "你好 42" in reply.document["agent_view"]
    assert reply.document["result"]["stdout"]["text"] is None


async def test_what_policy_refuses_is_a_finished_run(world):
    reply = await world.call("POST", "/v1/runs", {**PRINT, "timeout_s": 100_000})
    assert reply.status == 200
    run = reply.document
    assert run["result"]["reason"] == "policy_denied" and run["result"]["started"] is False
    assert run["result"]["exit_code"] is None and "3600" in run["result"]["hint"]
    assert run["decisions"]["guard"]["limits"]["wall"] == 100_000
    assert run["decisions"]["placement"]["runtime"] is None
    nothing = {"bytes": 0, "kept_bytes": 0, "truncated": False, "text": "", "base64": None, "head_bytes": None}
    assert run["result"]["stdout"] == run["result"]["stderr"] == nothing
    assert world.node.creates == []


async def test_a_bad_value_makes_no_run(world):
    reply = await world.call("POST", "/v1/runs", {**PRINT, "memory": "-1"})
    assert reply.status == 422 and reply.document["field"] == "/memory"
    reply = await world.call("POST", "/v1/runs", {**PRINT, "runtime": "runsc"})
    assert reply.status == 422 and reply.document["code"] == "not_supported_yet"
    reply = await world.call("POST", "/v1/runs", {"code": "x", "language": "rust"})
    assert reply.status == 422 and reply.document["code"] == "not_supported_yet"
    reply = await world.call(
        "POST", "/v1/runs", {**PRINT, "template": "polyglot"}
    )  # policy allows it, but it is not here
    assert reply.status == 422 and reply.document["code"] == "not_supported_yet"
    assert reply.document["field"] == "/template" and "host" in reply.document["hint"]
    assert (await world.call("GET", "/v1/runs")).document["items"] == []


async def test_a_program_that_is_missing_is_127(world):
    reply = await world.call("POST", "/v1/runs", {"command": ["missing"]})
    result = reply.document["result"]
    assert (result["reason"], result["exit_code"], result["started"]) == ("nonzero_exit", 127, False)


async def test_a_run_whose_cwd_is_missing_says_so(world):
    result = (await world.call("POST", "/v1/runs", {"command": ["nocwd"], "cwd": "/nope"})).document["result"]
    assert result["reason"] == "cwd_not_found" and result["started"] is False


async def test_code_lies_in_the_workspace_and_is_started_by_its_runner(world):
    reply = await world.call("POST", "/v1/runs", {"code": "print(1)", "language": "python", "code_path": "sub/x.py"})
    assert reply.document["result"]["stdout"]["text"] == "ran /workspace/sub/x.py"
    [files] = world.node.files.values()
    assert files == [("sub/x.py", 0o644, b"print(1)")]


async def test_a_failing_build_is_the_result(world):
    run = (await world.call("POST", "/v1/runs", {"code": "x", "language": "c", "timeout_s": 5})).document
    result = run["result"]
    assert (result["reason"], result["exit_code"], result["phase"], result["build"]) == (
        "nonzero_exit",
        1,
        "build",
        None,
    )
    assert result["hint"].startswith("the build failed")
    assert world.node.starts == [run["exec_id"]]
    assert result["limits"]["wall"]["value"] == 120


async def test_a_compiler_that_speaks_of_a_full_disk_is_heard_for_the_hint_only(world):
    world.node.more_languages = ["cpp"]
    document = {"code": "x", "language": "cpp", "disk": "16M"}
    result = (await world.call("POST", "/v1/runs", document)).document["result"]
    assert (result["reason"], result["phase"]) == ("nonzero_exit", "build")
    assert "the limit is 16 MiB, ask for more disk" in result["hint"]


async def test_a_build_that_works_is_followed_by_the_program(world):
    document = {"code": "x", "language": "javascript", "timeout_s": 5, "stdin": "for the program"}
    run = (await world.call("POST", "/v1/runs", document)).document
    result = run["result"]
    assert result["stdout"]["text"] == "program" and result["phase"] == "run"
    built, ran = world.node.starts
    assert ran == run["exec_id"]
    build = {"exec_id": built, "exit_code": 0, "reason": "ok", "running_ms": 3, "stdout_bytes": 0, "stderr_bytes": 0}
    assert result["build"] == build
    limits = [world.node.execs[each].spec.limits for each in (built, ran)]
    assert [each.wall_s for each in limits] == [120, 5]  # the clock of the caller's code starts with the program
    assert [world.node.execs[each].spec.stdin for each in (built, ran)] == [None, b"for the program"]


async def test_what_ends_a_run_after_its_build_does_not_deny_the_build(world, monkeypatch):
    step = Executor._step

    async def cancelled(self, flight, request, view, name, *rest):
        if name == "program":
            flight.cancel.set()
        return await step(self, flight, request, view, name, *rest)

    async def broken(self, flight, request, view, name, *rest):
        if name == "program":
            raise CorralError("store_error", "the disk is full")
        return await step(self, flight, request, view, name, *rest)

    for instead, reason, word in ((cancelled, "cancelled", "before the program"), (broken, "infra_error", "store")):
        world.node.starts.clear()
        monkeypatch.setattr(Executor, "_step", instead)
        run = (await world.call("POST", "/v1/runs", {"code": "x", "language": "javascript"})).document
        result = run["result"]
        assert (result["reason"], result["started"], result["phase"]) == (reason, True, "build")
        assert [result["build"]["exec_id"]] == world.node.starts
        assert result["hint"].startswith("the build had succeeded; ") and word in result["hint"]
        assert "nothing was run" not in result["hint"]


async def test_the_time_of_a_build_counts_as_preparing():
    watch = Stopwatch("preparing")
    watch.switch("running")
    watch.switch("collecting")
    spent = sum(watch.spent.values())
    watch.prepared()
    assert set(watch.spent) == {"preparing"} and watch.spent["preparing"] >= spent


async def test_a_build_gets_the_longer_of_its_own_time_and_the_programs(world):
    result = (await world.call("POST", "/v1/runs", {"code": "x", "language": "c", "timeout_s": 500})).document["result"]
    assert result["limits"]["wall"]["value"] == 500


async def test_a_template_without_the_language_is_told_with_those_that_have_it(world):
    async def hint():
        result = (await world.call("POST", "/v1/runs", {"code": "select 1", "language": "sql"})).document["result"]
        assert (result["reason"], result["exit_code"], result["started"]) == ("missing_tool", None, False)
        assert result["phase"] is None and "the template host has no sql: it lacks sqlite3" in result["hint"]
        return result["hint"]

    assert (await hint()).endswith("no template of this installation has it")
    other = {"name": "polyglot", "digest": None, "available": False, "reason": "no mmdebstrap", "languages": ["sql"]}
    world.node.more_templates = [other]
    assert (await hint()).endswith("polyglot would have it, but: no mmdebstrap")
    world.node.more_templates = [{**other, "available": True, "reason": None}]
    assert (await hint()).endswith("use a template that has it: polyglot")
    assert world.node.creates == []


async def test_code_that_is_compiled_runs_in_a_kept_sandbox(world):
    sandbox = (await world.call("POST", "/v1/sandboxes", {})).document["id"]
    document = {"code": "x", "language": "c", "args": ["a b"], "wait": 5}

    async def ended():
        return (await world.call("POST", f"/v1/sandboxes/{sandbox}/execs", document)).document

    exec_ = await ended()
    assert exec_["result"]["phase"] == "build" and exec_["result"]["hint"].startswith("the build failed")
    spec = world.node.execs[exec_["id"]].spec
    assert spec.argv[-3:] == ("print", "program", "a b")
    [(path, _, _)] = [file for files in world.node.files.values() for file in files]
    assert path == f".corral-exec/{exec_['id']}/main.c"
    world.node.there = {"/built"}
    exec_ = await ended()
    assert exec_["result"]["phase"] == "run" and "build" not in exec_["result"]["hint"]
    world.node.removed.clear()
    world.node.remove_error = CorralError("permission_denied", "the program took the rights away")
    exec_ = await ended()
    assert exec_["state"] == "ended", "what cannot be removed harms nothing"
    gone = [f"/workspace/.corral-exec/{exec_['id']}", f"/var/tmp/.corral-build/{exec_['id']}"]
    assert world.node.removed == [(path, "sandbox") for path in gone]
    refused = await world.call("POST", f"/v1/sandboxes/{sandbox}/execs", {"code": "x", "language": "sql"})
    assert refused.document["code"] == "missing_tool" and "sqlite3" in refused.document["detail"]


async def test_a_lost_sandbox_is_never_a_success(world, until):
    run = (await world.call("POST", "/v1/runs", {"command": ["die"]})).document
    assert run["result"]["reason"] == "sandbox_lost" and run["result"]["exit_code"] is None
    await until(lambda: _state(world, run["sandbox_id"], "terminated"))


async def test_the_same_key_is_the_same_run_and_another_body_is_refused(world):
    calls = [world.call("POST", "/v1/runs", PRINT, h_idempotency_key="k") for _ in range(20)]
    replies = await asyncio.gather(*calls)
    assert len({r.document["id"] for r in replies}) == 1
    assert len(world.node.creates) == 1 and len(world.node.starts) == 1
    other = await world.call("POST", "/v1/runs", SLEEP, h_idempotency_key="k")
    assert other.status == 409 and other.document["code"] == "idempotency_conflict"


async def test_wait_ends_before_the_run_does(world):
    reply = await world.call("POST", "/v1/runs", SLEEP, wait=0.05)
    assert reply.status == 202 and reply.headers["Location"] == f"/v1/runs/{reply.document['id']}"
    assert reply.document["result"] is None
    reply = await world.call("POST", f"/v1/runs/{reply.document['id']}/cancel")
    assert reply.document["result"]["reason"] == "cancelled"


async def test_cancel_while_running_is_cancelled_with_what_was_there(world, until):
    run = (await world.call("POST", "/v1/runs", SLEEP, wait=0)).document
    await until(lambda: world.node.starts)
    world.node.execs[world.node.starts[0]].emit(b"partial")
    reply = await world.call("POST", f"/v1/runs/{run['id']}/cancel")
    result = reply.document["result"]
    assert result["reason"] == "cancelled" and result["stdout"]["text"] == "partial" and result["started"] is True
    again = await world.call("POST", f"/v1/runs/{run['id']}/cancel")
    assert again.document["result"]["reason"] == "cancelled"


async def test_cancel_while_the_sandbox_is_made_answers_at_once_and_leaves_nothing(world, until):
    world.node.create_gate = asyncio.Event()
    run = (await world.call("POST", "/v1/runs", SLEEP, wait=0)).document
    await until(lambda: world.node.creates)
    reply = await world.call("POST", f"/v1/runs/{run['id']}/cancel")
    assert reply.document["result"]["reason"] == "cancelled" and reply.document["result"]["started"] is False
    world.node.create_gate.set()
    sandbox_id = (await world.call("GET", f"/v1/runs/{run['id']}")).document["sandbox_id"]
    await until(lambda: _state(world, sandbox_id, "terminated"))
    assert not world.node.live and not world.node.starts


async def test_cancel_between_frame_and_answer_still_kills(world, until):
    world.node.start_gate = asyncio.Event()
    run = (await world.call("POST", "/v1/runs", SLEEP, wait=0)).document
    await until(lambda: _state(world, _sandbox(world, run), "running"))
    cancel = asyncio.create_task(world.call("POST", f"/v1/runs/{run['id']}/cancel"))
    await turns()
    world.node.start_gate.set()
    assert (await cancel).document["result"]["reason"] == "cancelled"


def _sandbox(world, run):
    return next(iter(world.node.live.values())).sandbox_id if world.node.live else "sbx_none"


async def test_an_attached_run_ends_when_its_client_is_gone(world, until):
    run = (await world.call("POST", "/v1/runs", {**SLEEP, "attached": True}, wait=0)).document
    reply = await world.call("GET", f"/v1/runs/{run['id']}/stream")
    first = await anext(reply.events)
    assert first.kind == "started"
    await _another_client_is_gone(world, until)
    assert (await world.call("GET", f"/v1/runs/{run['id']}")).document["state"] == "running"
    await reply.events.aclose()

    async def finished():
        return (await world.call("GET", f"/v1/runs/{run['id']}")).document["state"] == "finished"

    await until(finished)
    assert (await world.call("GET", f"/v1/runs/{run['id']}")).document["result"]["reason"] == "cancelled"


async def _another_client_is_gone(world, until):
    """A run that began later, and that nobody watches, has been ended for that."""
    other = (await world.call("POST", "/v1/runs", {**SLEEP, "attached": True}, wait=0)).document

    async def ended():
        return (await world.call("GET", f"/v1/runs/{other['id']}")).document["state"] == "finished"

    await until(ended)


async def test_a_run_that_is_not_attached_outlives_its_client(world, until):
    run = (await world.call("POST", "/v1/runs", SLEEP, wait=0)).document
    await _another_client_is_gone(world, until)
    assert (await world.call("GET", f"/v1/runs/{run['id']}")).document["state"] == "running"


async def test_the_stream_has_started_output_and_ended_in_order(world):
    run = (await world.call("POST", "/v1/runs", PRINT, wait=0)).document
    reply = await world.call("GET", f"/v1/runs/{run['id']}/stream")
    events = [event async for event in reply.events]
    assert [e.kind for e in events] == ["started", "stdout", "ended"]
    assert events[1].data == "你好 42".encode()
    assert events[2].doc["result"]["reason"] == "ok"
    resumed = await world.call("GET", f"/v1/runs/{run['id']}/stream", cursor=events[1].cursor)
    assert [e.kind async for e in resumed.events] == ["ended"]


async def test_a_stream_that_is_opened_before_the_start_has_all_output(world, until):
    world.node.start_gate = asyncio.Event()
    run = (await world.call("POST", "/v1/runs", PRINT, wait=0)).document
    reply = await world.call("GET", f"/v1/runs/{run['id']}/stream")
    first = asyncio.ensure_future(anext(reply.events))

    async def waits():
        return bool(await world.store.open_execs())

    await until(waits)
    await turns()
    assert not first.done()
    world.node.start_gate.set()
    assert (await first).kind == "started"
    assert b"".join([e.data async for e in reply.events]) == "你好 42".encode()


async def test_the_stream_of_a_refused_run_ends(world):
    run = (await world.call("POST", "/v1/runs", {**PRINT, "memory": "6G", "tmp": "6G"})).document
    reply = await world.call("GET", f"/v1/runs/{run['id']}/stream")
    [event] = [event async for event in reply.events]
    assert event.kind == "ended" and event.doc["result"]["reason"] == "policy_denied"


async def test_keep_leaves_the_sandbox_leased(world):
    run = (await world.call("POST", "/v1/runs", {**PRINT, "keep": True})).document
    sandbox = (await world.call("GET", f"/v1/sandboxes/{run['sandbox_id']}")).document
    assert sandbox["state"] == "leased" and run["lease_version"] == sandbox["lease_version"] == 1
    done = await world.call("POST", f"/v1/sandboxes/{run['sandbox_id']}/execs", {"argv": ["print", "x"]})
    assert done.document["result"]["stdout"]["text"] == "x"


async def test_an_instance_that_cannot_be_made_is_infra_error(world, until):
    from corral.errors import CorralError

    world.node.create_error = CorralError("infra_error", "no luck")
    run = (await world.call("POST", "/v1/runs", PRINT)).document
    assert run["result"]["reason"] == "infra_error" and run["result"]["started"] is False
    assert "no luck" in run["result"]["hint"]
    assert len(world.node.creates) == 2
    await until(lambda: _state(world, run["sandbox_id"], "terminated"))


async def test_unknown_ids_are_not_found(world):
    for method, path in (
        ("GET", "/v1/runs/run_x"),
        ("POST", "/v1/runs/run_x/cancel"),
        ("GET", "/v1/runs/run_x/stream"),
        ("GET", "/v1/runs/run_x/artifacts/a/b"),
        ("GET", "/v1/sandboxes/sbx_x"),
        ("DELETE", "/v1/sandboxes/sbx_x"),
        ("GET", "/v1/execs/exe_x"),
        ("GET", "/nowhere"),
    ):
        reply = await world.call(method, path)
        assert (reply.status, reply.document["code"]) == (404, "not_found"), path


async def test_the_running_time_is_not_below_the_last_time_of_the_timeline(world):
    from corral.domain.facts import ExecFacts

    run = await world.call("POST", "/v1/runs", {"command": ["sleep"]}, wait=0)
    run_id = run.document["id"]
    while not world.node.starts:
        await asyncio.sleep(0)
    made = world.node.execs[world.node.starts[0]]
    for _ in range(9):
        made.emit(b"x")
    made.end(ExecFacts(True, 0))
    result = (await world.call("GET", f"/v1/runs/{run_id}", wait=10)).document["result"]
    assert result["timings"]["running_ms"] >= result["timeline"][-1]["t_ms"] == 8


@pytest.mark.parametrize("where", ["start_exec", "wait_exec"])
async def test_a_fault_of_ours_ends_the_exec_and_everybody_who_waits_for_it(world, monkeypatch, where):
    async def broken(*_, **__):
        raise RuntimeError("a fault")

    monkeypatch.setattr(world.node, where, broken)
    reply = await asyncio.wait_for(world.call("POST", "/v1/runs", PRINT), 10)
    result = reply.document["result"]
    assert (result["reason"], result["started"], result["exit_code"]) == ("infra_error", None, None)
    assert "RuntimeError" in result["hint"]
    stream = await world.call("GET", f"/v1/runs/{reply.document['id']}/stream")
    kinds = [event.kind async for event in stream.events]
    assert kinds[-1] == "ended"
    sandbox = (await world.call("POST", "/v1/sandboxes", {})).document["id"]
    reply = await asyncio.wait_for(
        world.call("POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["print"]}, wait=30), 10
    )
    assert (reply.document["state"], reply.document["result"]["reason"]) == ("lost", "infra_error")
    view = await world.store.get_sandbox(sandbox, None)
    assert view.sandbox.state in ("leased", "sanitizing", "terminated")
    assert await world.store.open_execs() == []


async def test_a_store_that_fails_for_a_moment_loses_no_end(world, monkeypatch):
    monkeypatch.setattr("corral.services.control.LOOK_AGAIN_S", (0.0, 0.0))
    finish, left = world.store.finish_run, [1, 1]

    async def failing(*arguments, **more):
        if left:
            left.pop()
            raise CorralError("store_error", "the disk is full")
        return await finish(*arguments, **more)

    monkeypatch.setattr(world.store, "finish_run", failing)
    reply = await asyncio.wait_for(world.call("POST", "/v1/runs", PRINT), 10)
    assert (reply.document["state"], reply.document["result"]["reason"]) == ("finished", "ok")


async def test_what_ended_before_a_decision_still_has_the_members_of_the_contract(world, monkeypatch):
    async def failing(*_, **__):
        raise CorralError("template_unavailable", "cannot be built")

    monkeypatch.setattr(world.node, "ensure_template", failing)
    run = (await world.call("POST", "/v1/runs", PRINT)).document
    assert run["result"]["reason"] != "ok" and run["result"]["started"] is False
    placement = run["decisions"]["placement"]
    assert (placement["verdict"], placement["runtime"], placement["template_digest"]) == ("not_reached", None, None)
    assert run["decisions"]["guard"]["limits"]["memory"] == 512 << 20


async def test_files_that_the_wished_disk_cannot_hold_make_no_run(world):
    files = [{"path": "big", "base64": base64.b64encode(bytes(9 << 20)).decode()}]
    for path in ("/v1/runs", "/v1/sandboxes"):
        document = {"files": files, "disk": "8M"} | (PRINT if path == "/v1/runs" else {})
        reply = await world.call("POST", path, document)
        assert (reply.status, reply.document["code"], reply.document["field"]) == (422, "invalid_value", "/files")
    assert world.node.creates == []


async def test_the_end_of_a_stream_has_the_result_with_little_output_in_it(world, monkeypatch):
    run = (await world.call("POST", "/v1/runs", PRINT)).document
    for path in (f"/v1/runs/{run['id']}/stream", f"/v1/execs/{run['exec_id']}/stream"):
        *_, ended = [event async for event in (await world.call("GET", path)).events]
        assert ended.kind == "ended" and ended.doc["result"] == run["result"]
        monkeypatch.setattr("corral.services.executor.ENDED_BYTES", 5)
        *_, ended = [event async for event in (await world.call("GET", path)).events]
        shown = ended.doc["result"]["stdout"]
        assert (shown["bytes"], shown["kept_bytes"], shown["truncated"], shown["text"]) == (9, 9, False, None)
        monkeypatch.undo()
