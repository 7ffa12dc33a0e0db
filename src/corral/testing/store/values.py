"""What is kept comes back as it was, and what cannot be kept is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from corral.domain.fence import Fence
from corral.domain.records import (
    AuditRecord,
    InstanceChange,
)
from corral.testing.store.bench import EVENT, HARD_JSON, START_MS, Bench, audit, check, key_of, refused


@check
async def rows_survive_close_and_open(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    installation = await b.store.installation_id()
    assert installation
    await b.store.close()
    await b.store.close()
    await b.store.open()
    await b.store.open()
    assert await b.store.get_run("run_1", "default") == b.run()
    assert await b.store.installation_id() == installation


@check
async def a_closed_store_refuses_every_call(b: Bench) -> None:
    await b.store.close()
    for call in (b.store.get_run("run_1", "default"), b.store.submit_run(b.run(), audit()), b.store.open_runs()):
        assert not (await refused("store_error", call)).retryable


@check
async def every_column_of_a_run_comes_back(b: Bench) -> None:
    run = b.run(
        user_id="u",
        session_id="会话",
        sandbox_id="sbx_9",
        incarnation=2,
        lease_version=3,
        exec_id="exe_9",
        attached=True,
        cancel_requested="cancelled",
        decisions=HARD_JSON,
        timings={"queued_ms": 1},
        result=HARD_JSON,
        reason="ok",
        finished_at=7,
        request=HARD_JSON,
        owner="owner 🦬",
    )
    stored, made = await b.store.submit_run(run, audit())
    assert made and stored == run
    assert await b.store.get_run("run_1", "default") == run
    assert await b.store.list_runs("default") == [replace(run, request={})]


@check
async def a_list_of_runs_leaves_out_what_may_be_large(b: Bench) -> None:
    for i in range(120):
        await b.store.submit_run(b.run(f"run_{i:03}", created_at=START_MS + i, request={"code": "x" * 1000}), audit())
        result = {"exit_code": i, "files": ["f"], "timeline": ["t"]}
        await b.store.finish_run(f"run_{i:03}", result=result, reason="ok", timings={"total_ms": i}, audit=audit())
    runs = await b.store.list_runs("default", limit=110)
    assert [run.run_id for run in runs] == [f"run_{i:03}" for i in range(119, 9, -1)]
    assert all(run.request == {} for run in runs)
    assert [run.result for run in runs] == [{"exit_code": i} for i in range(119, 9, -1)]
    assert (await b.store.get_run("run_007", "default")).request == {"code": "x" * 1000}  # type: ignore[union-attr]


@check
async def every_column_of_a_sandbox_comes_back(b: Bench) -> None:
    sandbox = b.sandbox(
        user_id="u",
        session_id="s",
        incarnation=4,
        tainted=True,
        remembered_state="idle",
        conditions=HARD_JSON,
        labels={"a": 1},
        limits=HARD_JSON,
        one_shot=False,
        failure="infra_error",
    )
    stored, made = await b.store.create_sandbox(sandbox, EVENT, audit())
    assert made and stored == sandbox
    view = await b.store.get_sandbox("sbx_1", "default")
    assert view is not None and view.sandbox == sandbox
    assert [v.sandbox for v in await b.store.list_sandboxes(None)] == [sandbox]


@check
async def json_of_every_kind_comes_back(b: Bench) -> None:
    await b.leased()
    event = replace(EVENT, metadata=HARD_JSON, request_id="请求")
    instance = b.instance(ref=HARD_JSON)
    command = b.command("cmd_1", args=HARD_JSON)
    await b.step(
        event=event,
        instances=(InstanceChange("insert", instance),),
        commands=(command,),
        audit=audit("sbx_1", data=HARD_JSON),
    )
    assert (await b.store.history("sbx_1"))[-1].metadata == HARD_JSON
    assert (await b.store.history("sbx_1"))[-1].request_id == "请求"
    assert await b.store.list_instances("node_1") == [instance]
    assert await b.store.open_commands() == [command]
    assert (await b.store.list_audit("default", subject="sbx_1"))[0].data == HARD_JSON
    record, _ = await b.store.create_exec(b.exec(spec=HARD_JSON), Fence(0, 1))
    assert record.spec == HARD_JSON
    assert (await b.store.update_exec("exe_1", expect_states=["starting"], changes={"result": HARD_JSON})).result == (
        HARD_JSON
    )


@check
async def values_are_not_shared_with_the_caller(b: Bench) -> None:
    request: dict[str, Any] = {"list": [1]}
    await b.store.submit_run(b.run(request=request), audit())
    request["list"].append(2)
    first = await b.store.get_run("run_1", "default")
    assert first is not None and first.request == {"list": [1]}
    first.request["list"].append(3)
    second = await b.store.get_run("run_1", "default")
    assert second is not None and second.request == {"list": [1]}


@check
async def what_cannot_be_kept_is_refused(b: Bench) -> None:
    for bad in (
        b.run(request={"x": float("nan")}),
        b.run(request={"x": object()}),
        b.run(owner="a\udc80"),
        b.run(owner="a\0"),
        b.run(finished_at=2**63),
    ):
        await refused("invalid_value", b.store.submit_run(bad, audit()))
    await refused("invalid_value", b.store.submit_run(b.run(), audit(), key_of("a\udc80")))
    assert await b.store.open_runs() == [] and await b.store.list_audit("default") == []


@check
async def an_id_that_is_no_unicode_is_unknown(b: Bench) -> None:
    assert await b.store.get_run("run_\udc80", "default") is None
    assert await b.store.get_sandbox("sbx_\udc80", "default") is None
    assert await b.store.get_exec("exe_\udc80", None) is None
    await refused("not_found", b.store.list_runs("default", after="run_\udc80"))
    await refused("not_found", b.store.update_run("run_\udc80", expect_states=["requested"], changes={}))


@check
async def a_cancelled_caller_does_not_disturb_others(b: Bench) -> None:
    def subjects(rows: list[AuditRecord]) -> set[str]:
        return {row.subject for row in rows}

    tasks = [asyncio.ensure_future(b.store.submit_run(b.run(f"run_{i}"), audit(f"run_{i}"))) for i in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(a, asyncio.CancelledError) for a in answers[::2])
    assert all(isinstance(a, tuple) and a[1] for a in answers[1::2])
    await b.store.submit_run(b.run("run_last"), audit("run_last"))
    # What was cancelled may still be on its way, and come between two looks.
    before = subjects(await b.store.list_audit("default"))
    stored = {run.run_id for run in await b.store.open_runs()}
    after = subjects(await b.store.list_audit("default"))
    assert {f"run_{i}" for i in range(1, 20, 2)} | {"run_last"} <= stored
    assert before <= stored <= after, "each of them whole"
