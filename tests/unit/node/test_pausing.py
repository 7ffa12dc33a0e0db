"""Pause and resume at the node: who is refused, whose time stands, what a later node finds, and that the end waits for nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.node.conftest import FENCE, Bench

from corral import faults
from corral.adapters.runtimes.fake import FakeRuntime
from corral.domain.fence import Fence
from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.ports.node import ExecSpec
from corral.ports.runtime import InstanceRef, RuntimeInfo

SHORT = Limits(wall_s=0.4)


async def code_of(attempt: Any) -> str:
    with pytest.raises(CorralError) as caught:
        await attempt
    return caught.value.code


def runs(bench: Bench, instance: str) -> bool:
    return bench.runtime._guests[instance].runs.is_set()  # type: ignore[attr-defined]


async def test_nothing_begins_in_a_paused_instance_and_all_goes_on_after(bench: Bench) -> None:
    instance = await bench.create()
    exec_id = await bench.begin(instance, "cat", stdin_open=True)
    await bench.node.pause(instance, FENCE)
    assert not runs(bench, instance)
    for attempt in (
        bench.begin(instance, "true"),
        bench.node.stat_file(instance, "/workspace"),
        bench.node.checkpoint_instance(instance, FENCE, "/nowhere"),
    ):
        assert await code_of(attempt) == "sandbox_paused"
    await bench.node.stats(instance)
    await bench.node.put_files(instance, FENCE, [("a", 0o644, b"x")])
    assert (await bench.node.collect(instance, outputs=(), max_bytes=1, into=None)).complete, "the host can look"
    await bench.node.pause(instance, FENCE)
    await bench.node.resume(instance, FENCE)
    await bench.node.resume(instance, FENCE)
    assert runs(bench, instance)
    await bench.node.stdin_exec(exec_id, b"later", True)
    assert (await bench.node.wait_exec(exec_id)).exit_code == 0
    assert b"".join([piece async for piece in bench.node.kept_output(exec_id, "stdout")]) == b"later"
    assert (await bench.run(instance, "true"))[0].exit_code == 0


async def test_many_pauses_at_once_are_one(bench: Bench) -> None:
    instance = await bench.create()
    await asyncio.gather(*(bench.node.pause(instance, FENCE) for _ in range(8)))
    assert not runs(bench, instance)
    await asyncio.gather(*(bench.node.resume(instance, FENCE) for _ in range(8)))
    assert runs(bench, instance)


async def test_an_older_fence_pauses_and_resumes_nothing(bench: Bench) -> None:
    instance = await bench.create(fence=Fence(1, 5))
    assert await code_of(bench.node.pause(instance, Fence(1, 4))) == "lease_lost"
    await bench.node.pause(instance, Fence(1, 5))
    assert await code_of(bench.node.resume(instance, Fence(1, 4))) == "lease_lost"
    assert not runs(bench, instance)


async def test_the_wall_time_of_a_paused_program_does_not_pass(bench: Bench) -> None:
    instance = await bench.create()
    exec_id = await bench.begin(instance, "cat", stdin_open=True, limits=SHORT)
    await bench.node.pause(instance, FENCE)
    await asyncio.sleep(0.6)
    await bench.node.resume(instance, FENCE)
    resumed = time.monotonic()
    facts = await bench.node.wait_exec(exec_id)
    assert facts.ended_by == "timeout" and 0.1 < time.monotonic() - resumed < 30


async def test_an_end_that_is_asked_for_meanwhile_comes_first_after_the_resume(bench: Bench) -> None:
    instance = await bench.create()
    exec_id = await bench.begin(instance, "cat", stdin_open=True)
    await bench.node.pause(instance, FENCE)
    ending = asyncio.create_task(bench.node.end_exec(exec_id, "cancelled"))
    await asyncio.sleep(0.05)
    assert not ending.done() and not runs(bench, instance)
    await bench.node.resume(instance, FENCE)
    assert (await bench.node.wait_exec(exec_id)).ended_by == "cancelled"
    await ending


async def test_a_fence_is_kept_for_a_paused_guest_and_ends_what_is_older(bench: Bench) -> None:
    instance = await bench.create()
    exec_id = await bench.begin(instance, "cat", stdin_open=True)
    await bench.node.pause(instance, FENCE)
    await bench.node.fence(instance, Fence(1, 2), "kill")
    assert await code_of(bench.node.resume(instance, FENCE)) == "lease_lost"
    await bench.node.resume(instance, Fence(1, 3))
    assert (await bench.node.wait_exec(exec_id)).ended_by == "lease_lost"
    assert bench.runtime._guests[instance].floor == [1, 3]  # type: ignore[attr-defined]


async def test_a_paused_instance_is_destroyed_at_once_and_its_exec_ends(bench: Bench) -> None:
    instance = await bench.create()
    exec_id = await bench.begin(instance, "sleep", "100")
    await bench.node.pause(instance, FENCE)
    assert (await asyncio.wait_for(bench.node.destroy(instance, "sandbox_deleted"), 5)).clean
    assert (await bench.node.wait_exec(exec_id)).ended_by == "sandbox_deleted"
    assert await code_of(bench.node.resume(instance, FENCE)) in ("not_found", "sandbox_lost")


async def test_the_deadline_of_the_host_ends_a_frozen_instance(bench: Bench) -> None:
    instance = await bench.create()
    exec_id = await bench.begin(instance, "sleep", "100")
    await bench.node.pause(instance, FENCE)
    await bench.node.extend_deadline(instance, FENCE, 0.0)
    assert await asyncio.wait_for(bench.node.lost(), 10) == instance
    assert (await bench.node.wait_exec(exec_id)).sandbox_lost


async def test_a_node_that_comes_later_finds_it_paused_and_it_goes_on(bench: Bench) -> None:
    instance = await bench.create()
    exec_id = await bench.begin(instance, "cat", stdin_open=True, limits=dataclasses.replace(Limits(), wall_s=1.0))
    await bench.node.pause(instance, FENCE)
    await asyncio.sleep(0.3)
    await bench.restart()
    assert not runs(bench, instance)
    assert await code_of(bench.begin(instance, "true")) == "sandbox_paused"
    await asyncio.sleep(1.0)
    await bench.node.resume(instance, FENCE)
    await bench.node.stdin_exec(exec_id, b"on", True)
    assert (await bench.node.wait_exec(exec_id)).exit_code == 0
    assert b"".join([piece async for piece in bench.node.kept_output(exec_id, "stdout")]) == b"on"
    assert (await bench.run(instance, "true"))[0].exit_code == 0


async def test_a_node_that_comes_later_can_destroy_it_paused(bench: Bench) -> None:
    instance = await bench.create()
    exec_id = await bench.begin(instance, "sleep", "100")
    await bench.node.pause(instance, FENCE)
    await bench.restart()
    assert (await asyncio.wait_for(bench.node.destroy(instance, "sandbox_deleted"), 5)).clean
    facts = await asyncio.wait_for(bench.node.wait_exec(exec_id), 5)
    assert facts.ended_by == "sandbox_deleted" or facts.sandbox_lost


@pytest.mark.parametrize("place", ["node.pause.journalled", "node.pause.stopped", "node.resume.journalled"])
async def test_a_node_that_died_in_the_middle_leaves_one_that_runs(bench: Bench, place: str) -> None:
    instance = await bench.create()
    exec_id = await bench.begin(instance, "cat", stdin_open=True)
    if place.startswith("node.resume"):
        await bench.node.pause(instance, FENCE)

    class Died(Exception):
        """And tidies nothing up."""

    async def nothing(*_: Any) -> None:
        raise Died

    def die() -> None:
        bench.node._let_run = nothing  # type: ignore[method-assign]
        raise Died

    work = bench.node.resume if place.startswith("node.resume") else bench.node.pause
    faults.arm(place, die)
    try:
        with pytest.raises(Died):
            await work(instance, FENCE)
    finally:
        faults.arm(place, None)
    await bench.restart()
    assert runs(bench, instance)
    assert "pause" not in bench.node._journal.instances[instance].data
    await bench.node.stdin_exec(exec_id, b"on", True)
    assert (await bench.node.wait_exec(exec_id)).exit_code == 0
    await bench.node.pause(instance, FENCE)
    await bench.node.resume(instance, FENCE)


class Stiff(FakeRuntime):
    """Cannot be frozen although it says so."""

    async def pause(self, ref: InstanceRef) -> None:
        await super().pause(ref)
        raise CorralError("infra_error", "does not freeze")


class Rigid(FakeRuntime):
    async def probe(self) -> RuntimeInfo:
        info = await super().probe()
        return dataclasses.replace(info, capabilities={**info.capabilities, "pause": False})


async def test_a_pause_that_fails_leaves_it_running(bench_of: Callable[..., Any]) -> None:
    bench = await bench_of(lambda _: Stiff("/nowhere", installation_id="x"))
    instance = await bench.create()
    assert await code_of(bench.node.pause(instance, FENCE)) == "infra_error"
    assert runs(bench, instance)
    assert (await bench.run(instance, "echo", "on"))[1] == b"on\n"


class Endless(FakeRuntime):
    """Takes as long to be frozen as nobody waits."""

    async def pause(self, ref: InstanceRef) -> None:
        await asyncio.Event().wait()


async def test_a_pause_that_a_destruction_cuts_short_is_told_so(bench_of: Callable[..., Any]) -> None:
    bench = await bench_of(lambda _: Endless("/nowhere", installation_id="x"))
    instance = await bench.create()
    pausing = asyncio.create_task(bench.node.pause(instance, FENCE))
    await asyncio.sleep(0.05)
    assert (await bench.node.destroy(instance, "sandbox_deleted")).clean
    assert await code_of(pausing) == "sandbox_deleted"


async def test_a_runtime_that_cannot_pause_says_so(bench_of: Callable[..., Any]) -> None:
    bench = await bench_of(lambda _: Rigid("/nowhere", installation_id="x"))
    instance = await bench.create()
    assert await code_of(bench.node.pause(instance, FENCE)) == "not_supported_yet"
    await bench.node.start_exec(instance, FENCE, ExecSpec("exe_01arz3ndektsv4rrffq69g5fav", ("true",)))
