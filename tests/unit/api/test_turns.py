"""However many streams have much to send, everybody else is heard in between."""

from __future__ import annotations

import asyncio

import pytest

from corral.api.turns import Turns


async def passes(turns: Turns, count: int, seen: list[int], name: int) -> None:
    for _ in range(count):
        await turns.take()
        seen.append(name)


async def test_two_hundred_streams_leave_the_loop_to_others_after_a_few_blocks() -> None:
    turns, seen = Turns(4), []
    streams = [asyncio.create_task(passes(turns, 5, seen, name)) for name in range(200)]
    steps: list[int] = []
    while not all(stream.done() for stream in streams):
        before = len(seen)
        await asyncio.sleep(0)
        steps.append(len(seen) - before)
    assert len(seen) == 1000 and max(steps) <= 8
    assert set(seen[:204]) == set(range(200)), "each has its turn before anybody asks again"


async def test_few_streams_wait_for_nothing() -> None:
    turns = Turns(4)
    for _ in range(4):
        step = turns.take()
        with pytest.raises(StopIteration):
            step.send(None)


async def test_one_that_leaves_while_it_waits_holds_up_nobody() -> None:
    turns, seen = Turns(1), []
    await turns.take()
    leaving = [asyncio.create_task(passes(turns, 1, seen, 0)) for _ in range(50)]
    staying = asyncio.create_task(passes(turns, 3, seen, 1))
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.wait_for(staying, 30)
    assert seen.count(1) == 3 and seen.count(0) <= 1
