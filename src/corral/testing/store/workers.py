"""Workers: who is alive, who drives what, and that no write of a driver counts once another has taken over."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from corral.domain.fence import Fence
from corral.domain.records import Transition
from corral.ports.workers import FORGET_MS
from corral.testing.store.bench import EVENT, START_MS, Bench, audit, check, refused

TTL_MS = 5000


async def running(b: Bench, driver: str, run_id: str = "run_1", sandbox_id: str = "sbx_1") -> Fence:
    """A run with its sandbox, leased."""
    fence = await b.leased(sandbox_id)
    await b.store.submit_run(b.run(run_id, sandbox_id=sandbox_id, driver=driver), audit())
    return fence


async def begin(b: Bench, fence: Fence, driver: str | None, exec_id: str = "exe_1", step: str = "program") -> Any:
    view = await b.store.get_sandbox("sbx_1", None)
    assert view is not None
    record = b.exec(
        exec_id, incarnation=fence.incarnation, lease_version=fence.token, run_id="run_1", step=step, driver=driver
    )
    transition = Transition("sbx_1", view.sandbox.version, "running", replace(EVENT, event_type="exec_requested"))
    return await b.store.begin_exec(record, fence, transition, driver=driver)


@check
async def a_beat_keeps_a_worker_alive_and_tells_the_stores_clock(b: Bench) -> None:
    beat = await b.store.beat("w_1", TTL_MS, {"pid": 1, "说": "你好"})
    assert (beat.now_ms, beat.last_event_id, beat.runs, beat.execs) == (START_MS, 0, {}, {})
    b.clock.now += 1000
    await b.store.beat("w_1", TTL_MS, {"pid": 2})
    [row] = await b.store.workers()
    assert (row.worker_id, row.started_at, row.alive_until) == ("w_1", START_MS, START_MS + 1000 + TTL_MS)
    assert row.facts == {"pid": 2}
    await b.made()
    beat = await b.store.beat("w_1", TTL_MS, {})
    assert beat.last_event_id == (await b.store.history("sbx_1"))[-1].event_id


@check
async def a_worker_that_left_is_gone_and_one_dead_for_a_day_too(b: Bench) -> None:
    for name in ("w_1", "w_2", "w_3"):
        await b.store.beat(name, TTL_MS, {})
        b.clock.now += 1
    await b.store.leave("w_2")
    await b.store.leave("w_2")
    assert [row.worker_id for row in await b.store.workers()] == ["w_1", "w_3"]
    b.clock.now += TTL_MS + FORGET_MS - 3  # as long as the first may have been dead
    await b.store.beat("w_4", TTL_MS, {})
    assert [row.worker_id for row in await b.store.workers()] == ["w_1", "w_3", "w_4"]
    b.clock.now += 10
    await b.store.beat("w_4", TTL_MS, {})
    assert [row.worker_id for row in await b.store.workers()] == ["w_4"]


@check
async def what_a_living_worker_drives_is_not_taken_and_what_a_dead_one_drove_is(b: Bench) -> None:
    await b.store.beat("w_1", TTL_MS, {})
    await b.store.submit_run(b.run("run_1", driver="w_1"), audit())
    await b.store.submit_run(b.run("run_2", driver=None, created_at=START_MS + 1), audit())
    await b.store.submit_run(b.run("run_3", driver="w_1"), audit())
    await b.store.finish_run("run_3", result={}, reason="ok", timings={}, audit=audit())
    assert [run.run_id for run in await b.store.adopt_runs("w_2")] == ["run_2"]
    b.clock.now += TTL_MS - 1
    await b.store.beat("w_2", TTL_MS, {})
    assert await b.store.adopt_runs("w_2") == []
    b.clock.now += 1
    [run] = await b.store.adopt_runs("w_2")
    assert (run.run_id, run.driver) == ("run_1", "w_2")
    assert run == await b.store.get_run("run_1", "default")
    assert await b.store.adopt_runs("w_2") == []
    assert await b.store.driven_runs("w_2") == [("run_1", "default"), ("run_2", "default")]
    assert await b.store.driven_runs("w_1") == []


@check
async def execs_of_their_own_are_taken_over_and_those_of_runs_go_with_the_run(b: Bench) -> None:
    fence = await running(b, "w_1")
    await begin(b, fence, "w_1")
    await b.store.create_exec(b.exec("exe_2", incarnation=fence.incarnation, driver="w_1"), fence)
    [record] = await b.store.adopt_execs("w_2")
    assert (record.exec_id, record.driver) == ("exe_2", "w_2")
    await b.store.beat("w_2", TTL_MS, {})
    assert await b.store.adopt_execs("w_3") == []


@check
async def a_superseded_driver_changes_nothing(b: Bench) -> None:
    fence = await running(b, "w_1")
    await b.store.beat("w_2", TTL_MS, {})
    [run] = await b.store.adopt_runs("w_2")
    writes: list[Awaitable[Any]] = [
        b.store.update_run("run_1", expect_states=["requested"], changes={"state": "running"}, driver="w_1"),
        b.store.finish_run("run_1", result={}, reason="ok", timings={}, audit=audit(), driver="w_1"),
        begin(b, fence, "w_1"),
    ]
    for write in writes:
        await refused("superseded", write)
    assert run == await b.store.get_run("run_1", "default")
    assert await b.store.list_execs("sbx_1") == []
    record, _ = await begin(b, fence, "w_2")
    assert (record.step, record.driver) == ("program", "w_2")
    done = await b.store.finish_run("run_1", result={}, reason="ok", timings={}, audit=audit(), driver="w_2")
    late = await b.store.finish_run("run_1", result={"x": 1}, reason="late", timings={}, audit=audit(), driver="w_1")
    assert late == done, "the end is told to whoever comes late"


@check
async def a_run_that_is_over_begins_no_exec_whoever_asks(b: Bench) -> None:
    fence = await running(b, "w_1")
    await b.store.finish_run("run_1", result={}, reason="cancelled", timings={}, audit=audit())
    await refused("conflict", begin(b, fence, "w_1"))
    await refused("superseded", begin(b, fence, "w_2"))
    assert await b.store.list_execs("sbx_1") == []


@check
async def a_step_of_a_run_has_one_exec(b: Bench) -> None:
    fence = await running(b, "w_1")
    await begin(b, fence, "w_1", "exe_1", "build")
    await begin(b, fence, "w_1", "exe_2", "program")
    await refused("conflict", begin(b, fence, "w_1", "exe_3", "program"))
    assert [row.exec_id for row in await b.store.list_execs("sbx_1")] == ["exe_1", "exe_2"]


@check
async def a_beat_brings_the_ends_that_were_asked_for_of_what_it_drives(b: Bench) -> None:
    fence = await running(b, "w_1")
    await begin(b, fence, "w_1")
    await b.store.create_exec(b.exec("exe_2", incarnation=fence.incarnation, driver="w_2"), fence)
    await b.store.update_run("run_1", expect_states=["requested"], changes={"cancel_requested": "cancelled"})
    for exec_id in ("exe_1", "exe_2"):
        await b.store.update_exec(exec_id, expect_states=["starting"], changes={"cancel_requested": "lease_lost"})
    one, two = await b.store.beat("w_1", TTL_MS, {}), await b.store.beat("w_2", TTL_MS, {})
    assert (one.runs, one.execs) == ({"run_1": "cancelled"}, {"exe_1": "lease_lost"})
    assert (two.runs, two.execs) == ({}, {"exe_2": "lease_lost"})
    await b.store.update_exec("exe_2", expect_states=["starting"], changes={"state": "ended"})
    assert (await b.store.beat("w_2", TTL_MS, {})).execs == {}


@check
async def a_beat_says_what_clients_wait_for_whoever_drives_it(b: Bench) -> None:
    fence = await running(b, "w_1")
    await begin(b, fence, "w_1")
    watched = ["run_1", "exe_1", "run_none", "\udc80", *(f"run_{n}" for n in range(2, 1200))]
    await b.store.beat("w_2", TTL_MS, {}, watched, 3000)
    run, record = await b.store.get_run("run_1", "default"), await b.store.get_exec("exe_1", None)
    assert run is not None and record is not None
    assert run.watched_until == record.watched_until == START_MS + 3000
    await b.store.finish_run("run_1", result={}, reason="ok", timings={}, audit=audit())
    b.clock.now += 10
    await b.store.beat("w_2", TTL_MS, {}, watched, 3000)
    run = await b.store.get_run("run_1", "default")
    assert run is not None and run.watched_until == START_MS + 3000


@check
async def commands_of_a_dead_worker_are_free_at_once_and_of_one_that_left(b: Bench) -> None:
    await b.made()
    await b.store.beat("w_1", TTL_MS, {})
    await b.step(commands=(b.command("cmd_1", claimed_by="w_1"),))
    assert await b.store.lock_command("w_2", 60_000) is None
    b.clock.now += TTL_MS
    locked = await b.store.lock_command("w_2", 60_000)
    assert locked is not None and (locked.command_id, locked.claimed_by, locked.attempt) == ("cmd_1", "w_2", 2)
    await b.store.leave("w_2")
    locked = await b.store.lock_command("w_3", 60_000)
    assert locked is not None and locked.attempt == 3


@check
async def a_held_command_is_nobody_else_s_for_as_long_as_it_is_held_on(b: Bench) -> None:
    await b.made()
    await b.made("sbx_2")
    await b.step(commands=(b.command("cmd_1", kind="settle", claimed_by="w_1"), b.command("cmd_2", kind="fence")))
    await b.store.beat("w_1", TTL_MS, {})
    assert await b.store.hold_command("sbx_2", "settle", "w_2", 1000), "there is none that another could hold"
    assert not await b.store.hold_command("sbx_1", "settle", "w_2", 1000)
    for _ in range(3):
        assert await b.store.hold_command("sbx_1", "settle", "w_1", 60_000)
        b.clock.now += 50_000
        await b.store.beat("w_1", TTL_MS, {})
    assert await b.store.lock_command("w_2", 1000, kinds=["settle"]) is None
    [settle, fence] = await b.store.open_commands("sbx_1")
    assert (settle.claimed_by, settle.attempt, settle.claim_until) == ("w_1", 1, b.clock.now + 10_000)
    assert (fence.claimed_by, fence.attempt) == (None, 0), "another kind"
    b.clock.now += TTL_MS
    assert await b.store.hold_command("sbx_1", "settle", "w_2", 500), "its holder is dead"
    assert not await b.store.hold_command("sbx_1", "settle", "w_1", 500)
    [settle, _] = await b.store.open_commands("sbx_1")
    assert (settle.claimed_by, settle.attempt, settle.claim_until) == ("w_2", 2, b.clock.now + 500)
    b.clock.now += 500
    assert await b.store.hold_command("sbx_1", "settle", "w_3", 500), "its claim has run out"
    await b.store.finish_command("cmd_1", "w_3", {"ok": True})
    assert await b.store.hold_command("sbx_1", "settle", "w_1", 500), "it is done"
    assert [command.kind for command in await b.store.open_commands("sbx_1")] == ["fence"]


@check
async def what_nobody_moves_is_found(b: Bench) -> None:
    for number, state in enumerate(("locking", "sanitizing", "leased", "locking")):
        await b.made(f"sbx_{number}", state=state, last_active_at=START_MS + 10 - number)
    found = await b.store.stale_sandboxes(("locking", "sanitizing"), START_MS + 9)
    assert [view.sandbox.sandbox_id for view in found] == ["sbx_3"]
    found = await b.store.stale_sandboxes(("locking", "sanitizing"), START_MS + 11, 2)
    assert [view.sandbox.sandbox_id for view in found] == ["sbx_3", "sbx_1"]
    assert await b.store.stale_sandboxes((), START_MS + 11) == []


@check
async def one_shots_without_an_open_run_are_found(b: Bench) -> None:
    for number in range(6):
        await b.made(f"sbx_{number}", state="leased", one_shot=number != 0, last_active_at=START_MS - number)
    await b.made("sbx_gone", state="terminated", one_shot=True, last_active_at=START_MS - 9)
    await b.store.submit_run(b.run("run_1", sandbox_id="sbx_1"), audit())
    await b.store.submit_run(b.run("run_2", sandbox_id="sbx_2"), audit())
    await b.store.finish_run("run_2", result={}, reason="ok", timings={}, audit=audit())
    found = await b.store.abandoned_sandboxes(START_MS - 2)
    assert [view.sandbox.sandbox_id for view in found] == ["sbx_5", "sbx_4", "sbx_3"]
    found = await b.store.abandoned_sandboxes(START_MS + 1)
    assert [view.sandbox.sandbox_id for view in found] == ["sbx_5", "sbx_4", "sbx_3", "sbx_2"]
    assert len(await b.store.abandoned_sandboxes(START_MS + 1, 1)) == 1
