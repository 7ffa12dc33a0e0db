"""Execs as the node sees them: output, ends, clocks, kills, restarts, and guests that cannot be trusted."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.adapters.runtimes.fake import FakeGuest
from corral.channel import GuestClient
from corral.domain.fence import Fence
from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.node import body, files
from corral.ports.node import Chunk, ExecSpec
from corral.testing.runtimes import LeakyRuntime, LyingRuntime, NeverRuntime, SlowRuntime, TwoFacedRuntime

from .conftest import FENCE, Bench, fresh


async def test_output_exit_codes_signals_and_start_failures_are_reported_as_they_were(bench: Bench) -> None:
    ins = await bench.create()
    facts, out, err = await bench.run(ins, "echo", "你好", "\udcff")
    assert (facts.started, facts.exit_code, facts.signal, out, err) == (
        True,
        0,
        None,
        "你好 ".encode() + b"\xff\n",
        b"",
    )
    assert (await bench.run(ins, "exit", "7"))[0].exit_code == 7
    assert (await bench.run(ins, "die", "11"))[0].signal == 11
    facts, _, err = await bench.run(ins, "error", "oops")
    assert err == b"oops\n"
    facts, _, _ = await bench.run(ins, "nothing-such")
    assert facts.started is False
    assert facts.start_failure is not None
    assert (facts.start_failure.what, facts.start_failure.errno) == ("argv", "ENOENT")
    assert facts.running_ms is None


async def test_stdin_given_at_once_ends_and_without_it_there_is_none(bench: Bench) -> None:
    ins = await bench.create()
    data = bytes(range(256)) * 5000
    assert (await bench.run(ins, "cat", stdin=data))[1] == data
    assert (await bench.run(ins, "cat"))[1] == b""
    exec_id = await bench.begin(ins, "cat", stdin_open=True)
    await bench.node.stdin_exec(exec_id, b"one ", False)
    await bench.node.stdin_exec(exec_id, b"two", True)
    await bench.node.wait_exec(exec_id)
    assert b"".join([piece async for piece in bench.node.kept_output(exec_id, "stdout")]) == b"one two"


async def test_a_second_start_of_the_same_exec_starts_nothing(bench: Bench) -> None:
    ins = await bench.create()
    spec = ExecSpec(fresh("exe"), ("echo", "once"))
    await asyncio.gather(*(bench.node.start_exec(ins, FENCE, spec) for _ in range(5)))
    await bench.node.wait_exec(spec.exec_id)
    await bench.node.start_exec(ins, FENCE, spec)
    assert b"".join([piece async for piece in bench.node.kept_output(spec.exec_id, "stdout")]) == b"once\n"


async def test_a_timeout_ends_the_exec_with_its_output_kept(bench: Bench) -> None:
    ins = await bench.create()
    begun = time.monotonic()
    facts, out, _ = await bench.run(ins, "stubborn", limits=Limits(wall_s=0.3), grace_s=0.5)
    assert 0.7 < time.monotonic() - begun < 5
    assert (facts.ended_by, facts.signal, out) == ("timeout", 9, b"ready\n")
    assert (await bench.run(ins, "echo", "after"))[1] == b"after\n"


async def test_cancel_is_idempotent_and_the_first_reason_stays(bench: Bench) -> None:
    ins = await bench.create()
    exec_id = await bench.begin(ins, "sleep", "60")
    await asyncio.gather(*(bench.node.end_exec(exec_id, why) for why in ("cancelled", "timeout")))
    facts = await bench.node.wait_exec(exec_id)
    assert facts.ended_by == "cancelled"
    await bench.node.end_exec(exec_id, "timeout")
    assert (await bench.node.wait_exec(exec_id)).ended_by == "cancelled"


async def test_output_above_the_kill_limit_ends_the_exec_and_head_and_tail_are_kept(bench: Bench) -> None:
    ins = await bench.create()
    limits = Limits(output_bytes=1001, output_kill_bytes=300_000)
    exec_id = await bench.begin(ins, "flood", "50000000", limits=limits)
    facts = await bench.node.wait_exec(exec_id)
    assert facts.ended_by == "output_limit"
    assert facts.stdout.produced > 300_000
    assert (facts.stdout.head, facts.stdout.tail) == (500, 501)
    raw = b"".join([piece async for piece in bench.node.raw_output(exec_id, "stdout")])
    assert len(raw) == 300_000
    kept = b"".join([piece async for piece in bench.node.kept_output(exec_id, "stdout")])
    assert kept == raw[:500] + raw[-501:]
    for offset in (1, 499, 500, 501, 1000, 1001, 5000):
        rest = [piece async for piece in bench.node.kept_output(exec_id, "stdout", offset=offset)]
        assert b"".join(rest) == kept[offset:], offset
    facts = (await bench.run(ins, "flood", "2000", limits=limits))[0]
    assert (facts.ended_by, facts.stdout.produced, facts.stdout.kept) == (None, 2000, 1001)


async def test_a_stream_resumes_by_cursor_with_every_byte_once_and_in_order(bench: Bench) -> None:
    ins = await bench.create()
    exec_id = await bench.begin(ins, "lines", "400")
    seen: dict[str, bytes] = {"stdout": b"", "stderr": b""}
    order = b""
    cursor: str | None = None
    while True:
        count = 0
        async for chunk in bench.node.stream_exec(exec_id, cursor):
            assert isinstance(chunk, Chunk)
            assert chunk.offset == len(seen[chunk.stream])
            seen[chunk.stream] += chunk.data
            order += chunk.data
            cursor = chunk.cursor
            count += 1
            if count == 7:
                break
        if count == 0:
            break
    expected = [f"line {n}\n".encode() for n in range(400)]
    assert seen == {"stdout": b"".join(expected[::2]), "stderr": b"".join(expected[1::2])}
    assert order == b"".join(expected)
    timeline = await bench.node.timeline(exec_id)
    assert sum(entry["bytes"] for entry in timeline) == len(order)
    assert [entry["t_ms"] for entry in timeline] == sorted(entry["t_ms"] for entry in timeline)
    for bad in ("x", "1", "-1.0", "99999999.0", "0.0.0"):
        with pytest.raises(CorralError) as caught:
            [c async for c in bench.node.stream_exec(exec_id, bad)]
        assert caught.value.code == "invalid_value"


async def test_a_lost_sandbox_ends_its_execs_with_what_they_said_and_is_reported(bench: Bench) -> None:
    ins = await bench.create()
    waiting = await bench.begin(ins, "sleep", "60")
    begun = time.monotonic()
    facts, out, _ = await bench.run(ins, "crash")
    assert time.monotonic() - begun < 20
    assert (facts.sandbox_lost, facts.started, facts.exit_code, out) == (True, True, None, b"last words\n")
    assert (await bench.node.wait_exec(waiting)).sandbox_lost
    assert await asyncio.wait_for(bench.node.lost(), 5) == ins
    with pytest.raises(CorralError) as caught:
        await bench.begin(ins, "true")
    assert caught.value.code == "sandbox_lost"
    assert (await bench.node.destroy(ins, "lost")).clean
    assert await bench.node.instances() == []


async def test_an_oom_kill_is_told_by_the_counter_and_only_once(bench: Bench) -> None:
    ins = await bench.create()
    facts, _, _ = await bench.run(ins, "oom")
    assert (facts.signal, facts.usage.oom_kills) == (9, 1)
    facts, _, _ = await bench.run(ins, "die", "9")
    assert (facts.signal, facts.usage.oom_kills) == (9, 0)
    assert facts.usage.peak_memory_bytes is None


async def test_destroy_ends_waiting_execs_with_the_reason(bench: Bench) -> None:
    ins = await bench.create()
    exec_id = await bench.begin(ins, "stubborn")
    waiting = asyncio.ensure_future(bench.node.wait_exec(exec_id))
    await asyncio.sleep(0)
    first, second = await asyncio.gather(bench.node.destroy(ins, "rm"), bench.node.destroy(ins, "rm"))
    assert first.clean
    assert second.clean
    facts = await waiting
    assert facts.ended_by == "sandbox_deleted"
    assert (await bench.node.destroy(ins, "rm")).clean
    assert (await bench.node.wait_exec(exec_id)).ended_by == "sandbox_deleted"
    assert await bench.node.leftovers() == []
    await bench.node.forget_exec(exec_id)
    with pytest.raises(CorralError) as caught:
        await bench.node.wait_exec(exec_id)
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("work", ["put", "mark", "freshen"])
async def test_what_the_host_does_with_files_while_they_are_removed_is_told_by_the_removal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    ins = await bench.create()
    real = getattr(files, work)

    async def late(*arguments: Any, **more: Any) -> None:
        assert (await bench.node.destroy(ins, "rm")).clean
        await real(*arguments, **more)
        raise FileNotFoundError  # `freshen` finds nothing to do

    monkeypatch.setattr(files, work, late)
    calls: dict[str, Callable[[], Any]] = {
        "put": lambda: bench.node.put_files(ins, FENCE, [("a", 0o644, b"")]),
        "mark": lambda: bench.node.mark(ins),
        "freshen": lambda: bench.begin(ins, "true"),
    }
    with pytest.raises(CorralError) as caught:
        await calls[work]()
    assert caught.value.code == "sandbox_deleted"
    assert await bench.node.leftovers() == []


async def test_files_of_an_older_fence_are_never_put_after_those_of_a_newer_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ins = await bench.create()
    real, begun, let = files.put, asyncio.Event(), asyncio.Event()
    put: list[bytes] = []

    async def slow(tree: Any, mark: str, items: Any, **more: Any) -> None:
        if not begun.is_set():
            begun.set()
            await let.wait()
        await real(tree, mark, items, **more)
        put.append(items[0][2])

    monkeypatch.setattr(files, "put", slow)

    def putting(fence: Fence, content: bytes) -> asyncio.Task[None]:
        return asyncio.create_task(bench.node.put_files(ins, fence, [("a", 0o644, content)]))

    old = putting(FENCE, b"old")
    await begun.wait()
    late = putting(FENCE, b"late")
    await asyncio.sleep(0)
    await bench.node.fence(ins, Fence(1, 2), "adopt")
    new = putting(Fence(1, 2), b"new")
    old.cancel()  # whoever asked is gone; the thread is not
    await asyncio.sleep(0)
    assert not put and not new.done()
    let.set()
    await new
    assert put == [b"old", b"new"]
    with pytest.raises(CorralError) as caught:
        await late
    assert caught.value.code == "lease_lost"


async def test_old_fences_are_refused_and_a_new_owner_ends_or_adopts_older_execs(bench: Bench) -> None:
    ins = await bench.create()
    kept = await bench.begin(ins, "sleep", "60")
    await bench.node.fence(ins, Fence(1, 2), "adopt")
    for call in (
        bench.begin(ins, "true"),
        bench.node.put_files(ins, FENCE, [("a", 0o644, b"")]),
        bench.node.extend_deadline(ins, FENCE, 5),
        bench.node.fence(ins, FENCE, "adopt"),
    ):
        with pytest.raises(CorralError) as caught:
            await call
        assert caught.value.code == "lease_lost"
    await bench.node.fence(ins, Fence(1, 3), "kill")
    assert (await bench.node.wait_exec(kept)).ended_by == "lease_lost"
    await bench.restart()
    with pytest.raises(CorralError) as caught:
        await bench.begin(ins, "true", fence=Fence(1, 2))
    assert caught.value.code == "lease_lost"


async def test_a_restarted_node_adopts_sandboxes_and_running_execs_to_the_byte(bench: Bench) -> None:
    ins = await bench.create()
    lines = await bench.begin(ins, "lines", "600")
    sleeper = await bench.begin(ins, "sleep", "600", limits=Limits(wall_s=2.0))
    done = await bench.begin(ins, "exit", "3")
    await bench.node.wait_exec(done)
    for _ in range(3):
        await asyncio.sleep(0.1)
        await bench.restart()
    assert (await bench.node.wait_exec(done)).exit_code == 3
    facts = await bench.node.wait_exec(lines)
    assert (facts.exit_code, facts.started) == (0, True)
    out = b"".join([piece async for piece in bench.node.kept_output(lines, "stdout")])
    assert out == b"".join(f"line {n}\n".encode() for n in range(0, 600, 2))
    facts = await bench.node.wait_exec(sleeper)
    assert facts.ended_by == "timeout"
    assert facts.running_ms is not None
    assert 1500 < facts.running_ms < 4000
    assert await bench.node.instances() == [ins]


async def test_an_exec_that_was_not_noted_before_a_crash_keeps_its_clock(bench: Bench) -> None:
    ins = await bench.create()
    bench.node._note_running = lambda job: None  # type: ignore[method-assign]
    sleeper = await bench.begin(ins, "sleep", "600")
    await asyncio.sleep(0.6)
    await bench.restart()
    await bench.node.end_exec(sleeper, "cancelled")
    facts = await bench.node.wait_exec(sleeper)
    assert facts.running_ms is not None and facts.running_ms >= 500


async def test_an_instance_that_ended_while_no_node_lived_is_reported_lost(bench_of: Callable[..., Any]) -> None:
    bench: Bench = await bench_of()
    ins = await bench.create()
    exec_id = await bench.begin(ins, "echo", "said")
    sleeper = await bench.begin(ins, "sleep", "60")
    await bench.node.wait_exec(exec_id)
    await bench.node.close()
    await bench.runtime.kill(bench.runtime.partial_ref("", ins))
    await bench.start()
    assert await asyncio.wait_for(bench.node.lost(), 5) == ins
    facts = await bench.node.wait_exec(sleeper)
    assert (facts.sandbox_lost, facts.exit_code, facts.started) == (True, None, True)
    assert b"".join([piece async for piece in bench.node.kept_output(exec_id, "stdout")]) == b"said\n"


async def test_the_deadline_ends_a_sandbox_that_nobody_extends(bench: Bench) -> None:
    short = await bench.create(deadline_s=0.5)
    long = await bench.create(deadline_s=0.5)
    await bench.node.extend_deadline(long, FENCE, 60)
    assert await asyncio.wait_for(bench.node.lost(), 10) == short
    assert (await bench.run(long, "true"))[0].exit_code == 0


@pytest.mark.parametrize("mood", ["silent", "garbage"])
async def test_a_guest_that_does_not_keep_to_its_protocol_is_ended_and_nothing_is_guessed(
    bench_of: Callable[..., Any], mood: Any
) -> None:
    made: list[TwoFacedRuntime] = []

    def wrap(inner: Any) -> Any:
        made.append(TwoFacedRuntime(inner))
        return made[0]

    bench: Bench = await bench_of(wrap)
    ins = await bench.create()
    exec_id = await bench.begin(ins, "lines", "100000", limits=Limits(wall_s=1.0), grace_s=0.3)
    made[0].mood = mood
    begun = time.monotonic()
    facts = await bench.node.wait_exec(exec_id)
    assert time.monotonic() - begun < 20
    assert facts.exit_code is None
    assert facts.guest_lost or facts.sandbox_lost
    assert facts.ended_by in (None, "timeout")
    assert await asyncio.wait_for(bench.node.lost(), 10) == ins


@pytest.mark.slow
async def test_a_kill_that_the_runtime_only_claims_is_said_to_have_left_something(
    bench_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "GONE_S", 0.5)

    def wrap(inner: Any) -> Any:
        two = TwoFacedRuntime(LyingRuntime(inner))
        return two

    bench: Bench = await bench_of(wrap)
    ins = await bench.create()
    exec_id = await bench.begin(ins, "stubborn")
    bench.runtime.mood = "silent"  # type: ignore[attr-defined]
    ending = asyncio.ensure_future(bench.node.end_exec(exec_id, "cancelled"))
    await asyncio.wait_for(ending, 10)
    facts = await bench.node.wait_exec(exec_id)
    assert (facts.ended_by, facts.killed_all, facts.exit_code) == ("cancelled", False, None)


async def test_a_runtime_that_never_answers_is_unusable_and_blocks_nothing(
    bench_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.node.probes.PROBE_S", 0.2)
    bench: Bench = await bench_of(NeverRuntime)
    (info,) = await bench.node.runtimes()
    assert not info.usable
    assert info.reason
    with pytest.raises(CorralError) as caught:
        await bench.create()
    assert caught.value.code == "runtime_unavailable"


async def test_what_destroy_could_not_remove_stays_a_leftover_until_gc_removes_it(bench_of: Callable[..., Any]) -> None:
    bench: Bench = await bench_of(LeakyRuntime)
    ins = await bench.create()
    evidence = await bench.node.destroy(ins, "rm")
    assert (evidence.clean, evidence.left) == (False, ("a mount that is busy",))
    assert {(item["kind"], item["instance_id"]) for item in await bench.node.leftovers()} >= {("instance", ins)}
    assert (await bench.node.gc())["failed"] > 0
    bench.runtime.healed = True  # type: ignore[attr-defined]
    assert (await bench.node.gc())["failed"] == 0
    assert await bench.node.leftovers() == []
    assert await bench.node.instances() == []


async def test_slow_calls_delay_one_sandbox_and_no_other_caller(bench_of: Callable[..., Any]) -> None:
    bench: Bench = await bench_of(lambda inner: SlowRuntime(inner, 0.3))
    first, second = await asyncio.gather(bench.create(), bench.create())
    begun = time.monotonic()
    await asyncio.gather(*(bench.run(ins, "true") for ins in (first, second) for _ in range(5)))
    assert time.monotonic() - begun < 3


async def test_gc_removes_what_no_journal_owns_and_nothing_else(bench: Bench, tmp_path: Path) -> None:
    ins = await bench.create()
    mine = await bench.begin(ins, "echo", "x")
    await bench.node.wait_exec(mine)
    stray = fresh("ins")
    (tmp_path / "i" / stray[4:] / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "spool" / fresh("exe")).mkdir()
    kinds = sorted(item["kind"] for item in await bench.node.leftovers())
    assert kinds == ["directory", "spool"]
    counts = await bench.node.gc()
    assert counts == {"directory": 1, "spool": 1, "failed": 0}
    assert (await bench.run(ins, "echo", "alive"))[1] == b"alive\n"
    assert b"".join([piece async for piece in bench.node.kept_output(mine, "stdout")]) == b"x\n"


async def test_a_flood_in_one_sandbox_does_not_slow_an_exec_in_another(bench: Bench) -> None:
    noisy, quiet = await bench.create(), await bench.create()
    big = Limits(output_kill_bytes=10**10, output_bytes=1000)
    flood = await bench.begin(noisy, "flood", str(10**9), limits=big)
    times = []
    for _ in range(20):
        begun = time.monotonic()
        assert (await bench.run(quiet, "true"))[0].exit_code == 0
        times.append(time.monotonic() - begun)
    await bench.node.end_exec(flood, "cancelled")
    assert sorted(times)[18] < 1.0


async def test_a_copy_of_a_state_directory_does_not_reach_the_sandboxes_of_the_original(
    bench: Bench, tmp_path: Path
) -> None:
    ins = await bench.create()
    await bench.node.close()
    copy = tmp_path / "copy"
    shutil.copytree(bench.state, copy, ignore=lambda _, names: [name for name in names if name == "s"])
    with pytest.raises(CorralError) as refused:
        await Bench(copy, bench.runtime).start()
    assert refused.value.code == "conflict" and str(bench.state) in refused.value.detail and refused.value.hint
    alias = tmp_path / "alias"
    alias.symlink_to(bench.state)
    again = Bench(alias, bench.runtime)
    await again.start()
    assert (await again.run(ins, "echo", "still"))[1] == b"still\n"
    await again.node.close()
    await bench.start()


async def test_what_a_transfer_uses_after_an_exec_is_not_charged_to_the_next(bench: Bench) -> None:
    ins = await bench.create()
    body = bench.node._bodies[ins]
    body.transfers = 1
    await bench.run(ins, "echo", "beside a transfer")
    assert body._base is None, "counters that a transfer still moves are no base"
    body.transfers = 0
    await bench.run(ins, "echo", "alone")
    assert body._base is not None


async def test_whoever_ends_an_exec_whose_start_is_refused_meanwhile_hears_of_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ins = await bench.create()
    asked, refuse = asyncio.Event(), asyncio.Event()

    async def refusing(*values: Any) -> Any:
        asked.set()
        await refuse.wait()
        raise CorralError("conflict", "not today")

    monkeypatch.setattr(FakeGuest, "_exec_operation", refusing)
    exec_id = fresh("exe")
    starting = asyncio.create_task(bench.node.start_exec(ins, FENCE, ExecSpec(exec_id, ("true",))))
    await asyncio.wait_for(asked.wait(), 20)
    ending = asyncio.create_task(bench.node.end_exec(exec_id, "cancelled"))
    await asyncio.sleep(0)
    refuse.set()
    for outcome in await asyncio.wait_for(asyncio.gather(starting, ending, return_exceptions=True), 20):
        assert isinstance(outcome, CorralError) and outcome.code == "conflict"


async def test_whoever_gives_input_waits_no_longer_than_the_exec_lasts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = asyncio.Event()

    async def for_ever(*values: Any, **more: Any) -> bool:
        given.set()
        await asyncio.Event().wait()
        return True

    ins = await bench.create()
    exec_id = await bench.begin(ins, "cat", stdin_open=True)
    monkeypatch.setattr(GuestClient, "stdin", for_ever)
    giving = asyncio.create_task(bench.node.stdin_exec(exec_id, b"x", False))
    await asyncio.wait_for(given.wait(), 20)
    await bench.node.end_exec(exec_id, "cancelled")
    assert await asyncio.wait_for(giving, 20) is False
