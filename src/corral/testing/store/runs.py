"""Runs: once per key, changed from an expected state, finished once, seen by their tenant only."""

from __future__ import annotations

import asyncio

from corral.errors import CorralError
from corral.testing.store.bench import START_MS, Bench, audit, check, key_of, refused


@check
async def one_idempotency_key_makes_one_run(b: Bench) -> None:
    calls = [b.store.submit_run(b.run(f"run_{i}"), audit(f"run_{i}"), key_of()) for i in range(20)]
    answers = await asyncio.gather(*calls)
    assert sum(made for _, made in answers) == 1
    assert len({run.run_id for run, _ in answers}) == 1
    assert len(await b.store.open_runs()) == 1
    assert len(await b.store.list_audit("default")) == 1


@check
async def another_body_under_a_key_is_refused(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit(), key_of())
    await refused("idempotency_conflict", b.store.submit_run(b.run("run_2"), audit(), key_of(digest="d2")))
    assert len(await b.store.open_runs()) == 1 and len(await b.store.list_audit("default")) == 1
    for other in (key_of("k2"), key_of(route="POST /v1/sandboxes"), key_of(tenant_id="t2")):
        made = b.run(f"run_{other.key}{other.route}{other.tenant_id}", tenant_id=other.tenant_id)
        assert (await b.store.submit_run(made, audit(), other))[1]


@check
async def a_used_key_answers_with_the_run_of_now(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit(), key_of())
    await b.store.update_run("run_1", expect_states=["requested"], changes={"state": "running"})
    run, made = await b.store.submit_run(b.run("run_2"), audit(), key_of())
    assert not made and run.run_id == "run_1" and run.state == "running"


@check
async def a_used_id_is_a_conflict_and_leaves_nothing(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    await refused("conflict", b.store.submit_run(b.run(owner="other"), audit(), key_of()))
    assert len(await b.store.list_audit("default")) == 1
    assert (await b.store.submit_run(b.run("run_2"), audit(), key_of()))[1], "the key of a failed submit is free"


@check
async def a_run_changes_only_from_an_expected_state(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    changes = {"state": "running", "decisions": {"plan": "p"}, "attached": True, "cancel_requested": None}
    run = await b.store.update_run(
        "run_1", expect_states=["planning", "requested"], changes=changes, audit=audit(kind="run.started")
    )
    assert (run.state, run.version, run.decisions, run.attached) == ("running", 2, {"plan": "p"}, True)
    assert run == await b.store.get_run("run_1", "default")
    again = b.store.update_run("run_1", expect_states=["requested"], changes={"state": "planning"}, audit=audit())
    assert (await refused("conflict", again)).retryable
    await refused("conflict", b.store.update_run("run_1", expect_states=[], changes={"state": "planning"}))
    assert run == await b.store.get_run("run_1", "default")
    assert [a.kind for a in await b.store.list_audit("default")] == ["run.submitted", "run.started"]
    await refused("not_found", b.store.update_run("run_2", expect_states=["requested"], changes={"state": "x"}))


@check
async def fixed_and_unknown_columns_cannot_be_changed(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    for column in ("run_id", "tenant_id", "version", "created_at", "no_such", "state = 'x' --"):
        try:
            await b.store.update_run("run_1", expect_states=["requested"], changes={column: "x"})
        except ValueError:
            continue
        raise AssertionError(f"{column} was changed")
    assert await b.store.get_run("run_1", "default") == b.run()


@check
async def one_of_many_changes_of_one_state_wins(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())

    async def attempt(number: int) -> bool:
        try:
            await b.store.update_run(
                "run_1", expect_states=["requested"], changes={"state": "planning", "owner": f"w{number}"}
            )
        except CorralError as error:
            assert error.code == "conflict"
            return False
        return True

    assert sum(await asyncio.gather(*(attempt(i) for i in range(20)))) == 1
    run = await b.store.get_run("run_1", "default")
    assert run is not None and run.version == 2


@check
async def a_run_finishes_once(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    b.clock.now += 5
    answers = await asyncio.gather(
        *(
            b.store.finish_run("run_1", result={"n": i}, reason=f"r{i}", timings={"total_ms": i}, audit=audit())
            for i in range(8)
        )
    )
    assert all(answer == answers[0] for answer in answers)
    run = answers[0]
    assert (run.state, run.finished_at, run.version) == ("finished", b.clock.now, 2)
    assert run.result is not None and f"r{run.result['n']}" == run.reason
    assert len(await b.store.list_audit("default")) == 2
    assert await b.store.open_runs() == []
    finish = b.store.finish_run("run_2", result={}, reason="ok", timings={}, audit=audit())
    await refused("not_found", finish)


@check
async def runs_are_paged_newest_first(b: Bench) -> None:
    for i in (3, 1, 4, 0, 2):
        await b.store.submit_run(b.run(f"run_{i}", created_at=START_MS + i // 2), audit())
    await b.store.submit_run(b.run("run_x", tenant_id="t2"), audit())
    seen: list[str] = []
    page = await b.store.list_runs("default", limit=2)
    while page:
        seen += [run.run_id for run in page]
        page = await b.store.list_runs("default", after=seen[-1], limit=2)
    assert seen == ["run_4", "run_3", "run_2", "run_1", "run_0"]
    assert [r.run_id for r in await b.store.open_runs() if r.tenant_id == "default"] == seen[::-1]
    await b.store.update_run("run_3", expect_states=["requested"], changes={"state": "running"})
    assert [r.run_id for r in await b.store.list_runs("default", states=["running", "queued"])] == ["run_3"]
    assert [r.run_id for r in await b.store.list_runs("default", states=["requested"], after="run_3")] == (
        ["run_2", "run_1", "run_0"]
    )
    assert await b.store.list_runs("default", states=[]) == []
    assert await b.store.list_runs("default", limit=0) == [] == await b.store.list_runs("default", limit=-1)
    assert len(await b.store.list_runs("default", limit=2**80)) == 5
    await refused("not_found", b.store.list_runs("default", after="run_x"))


@check
async def a_foreign_tenant_sees_nothing(b: Bench) -> None:
    await b.store.submit_run(b.run(), audit())
    fence = await b.leased()
    await b.store.create_exec(b.exec(), fence)
    assert await b.store.get_run("run_1", "t2") is None
    assert await b.store.get_sandbox("sbx_1", "t2") is None
    assert await b.store.get_exec("exe_1", "t2") is None
    assert await b.store.list_runs("t2") == [] == await b.store.list_audit("t2")
    assert await b.store.list_sandboxes("t2") == []
    await refused("not_found", b.store.create_exec(b.exec("exe_2"), fence, tenant_id="t2"))
    await refused("not_found", b.store.list_sandboxes("t2", after="sbx_1"))
    assert await b.store.get_exec("exe_1", None) == await b.store.get_exec("exe_1", "default") is not None
    assert len(await b.store.list_sandboxes(None)) == 1
