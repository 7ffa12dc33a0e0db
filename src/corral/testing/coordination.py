"""Conformance of a coordination: what `corral.ports.coordination` promises, as checks without a test framework.

`CHECKS` is a list of `(id, run)`; `await run_check(run, place)` runs one. A `Place` makes workers of one installation and, where there
is a server between them, lets a check break it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from corral.ports.coordination import MAX_KEY, PATIENCE_S, Coordination

LONG_S = 30.0
"""What anything that comes sooner or later may take."""


class Server(Protocol):
    """What stands between the workers, as a check breaks it."""

    def kill(self) -> None: ...
    def start(self) -> None: ...
    def restart(self) -> None: ...
    def flush(self) -> None: ...
    def hang(self) -> None: ...
    def go_on(self) -> None: ...


@dataclass
class Place:
    """`make(log)` gives an unopened worker of the one installation; `server` None: nothing stands between."""

    make: Callable[[Callable[[str], None]], Coordination]
    server: Server | None = None


@dataclass
class Worker:
    """An opened coordination and what came to it."""

    coordination: Coordination
    heard: list[str] = field(default_factory=list)
    missed: int = 0
    logged: list[str] = field(default_factory=list)

    async def healthy(self, wanted: bool = True) -> None:
        await until(lambda: self.coordination.healthy is wanted)


@dataclass
class Bench:
    """What a check has at hand."""

    place: Place
    opened: list[Worker] = field(default_factory=list)

    async def worker(self, *, healthy: bool = True) -> Worker:
        logged: list[str] = []
        worker = Worker(self.place.make(logged.append), logged=logged)
        self.opened.append(worker)

        def missed() -> None:
            worker.missed += 1

        await worker.coordination.open(worker.heard.append, missed)
        if healthy:
            await worker.healthy()
        return worker


Check = Callable[[Bench], Awaitable[None]]
CHECKS: list[tuple[str, Check]] = []


def check(run: Check) -> Check:
    CHECKS.append((run.__name__, run))
    return run


async def run_check(run: Check, place: Place) -> None:
    """Run, then close what was opened, and bring the server back if it hangs."""
    bench = Bench(place)
    try:
        await run(bench)
    finally:
        if place.server is not None:
            place.server.go_on()
        for worker in bench.opened:
            await worker.coordination.close()


async def until(good: Callable[[], Any]) -> None:
    """Wait for a condition, long."""
    async with asyncio.timeout(LONG_S):
        while not good():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def reaches(one: Worker, two: Worker, *keys: str) -> None:
    """What one rings is heard by the other; again and again, since a loaded machine may have lost a connection just then."""
    async with asyncio.timeout(LONG_S):
        while not set(keys) <= set(two.heard):
            one.coordination.ring(keys)
            for _ in range(100):
                if set(keys) <= set(two.heard):
                    break
                await asyncio.sleep(0.02)


async def timed(work: Awaitable[Any]) -> tuple[Any, float]:
    """(its answer, the seconds that it took)."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    return await work, loop.time() - began


# -- counters ----------------------------------------------------------------------------------------------------------------------


@check
async def a_counter_allows_its_limit_and_then_says_when_to_ask_again(b: Bench) -> None:
    one = (await b.worker()).coordination
    answers = [await one.count("calls", 1, 5, 60_000) for _ in range(7)]
    assert [a.allowed for a in answers] == [True] * 5 + [False] * 2
    assert all(a.retry_after_ms == 0 for a in answers[:5])
    assert all(0 < a.retry_after_ms <= 60_000 for a in answers[5:])


@check
async def over_the_limit_nothing_is_added(b: Bench) -> None:
    one = (await b.worker()).coordination
    assert (await one.count("bytes", 6, 10, 60_000)).allowed
    assert not (await one.count("bytes", 5, 10, 60_000)).allowed
    assert (await one.count("bytes", 4, 10, 60_000)).allowed
    assert not (await one.count("bytes", 11, 10, 60_000)).allowed


@check
async def a_new_window_begins_after_the_old_one(b: Bench) -> None:
    one = (await b.worker()).coordination
    assert (await one.count("short", 1, 1, 200)).allowed
    refused = await one.count("short", 1, 1, 200)
    if not refused.allowed:  # else the machine was slow, and the window is over
        assert 0 < refused.retry_after_ms <= 200
    await asyncio.sleep(0.3)
    assert (await one.count("short", 1, 1, 60_000)).allowed
    assert not (await one.count("short", 1, 1, 60_000)).allowed


@check
async def counters_are_apart_by_key_whatever_its_letters(b: Bench) -> None:
    one = (await b.worker()).coordination
    for key in ("a", "b", "é", "你好", "a\n", "a\0", "\udc80", "x" * (10 * MAX_KEY)):
        assert (await one.count(key, 1, 1, 60_000)).allowed, key
        assert not (await one.count(key, 1, 1, 60_000)).allowed, key


# -- between workers ---------------------------------------------------------------------------------------------------------------


def together(run: Check) -> Check:
    """A check of several workers: nothing to check where there can be only one."""

    async def check(b: Bench) -> None:
        if (await b.worker()).coordination.alone:
            return
        await run(b)

    CHECKS.append((run.__name__, check))
    return check


def broken(run: Callable[[Bench, Server], Awaitable[None]]) -> Check:
    """A check that breaks what stands between the workers."""

    async def check(b: Bench) -> None:
        if b.place.server is not None:
            await run(b, b.place.server)

    CHECKS.append((run.__name__, check))
    return check


@together
async def a_ring_is_heard_by_the_others_and_not_by_oneself(b: Bench) -> None:
    one, two, three = await b.worker(), await b.worker(), await b.worker()
    await reaches(one, two, "run_1", "exe_1")
    await reaches(one, three, "run_1", "exe_1")
    assert set(two.heard) == set(three.heard) == {"run_1", "exe_1"}
    await reaches(two, one, "run_2")
    assert "run_1" not in one.heard


@together
async def a_thousand_rings_arrive(b: Bench) -> None:
    one, two = await b.worker(), await b.worker()
    keys = [f"run_{number}" for number in range(1000)]
    for key in keys:
        one.coordination.ring([key])
    await reaches(one, two, *keys)


@together
async def keys_that_cannot_be_are_dropped_and_harm_nobody(b: Bench) -> None:
    one, two = await b.worker(), await b.worker()
    one.coordination.ring(["", "x" * (MAX_KEY + 1), "a\nb", "\0", "\udc80", "good"])
    one.coordination.ring([f"flood_{number}" for number in range(50_000)])
    await reaches(one, two, "good")
    assert not {"", "a", "b", "a\nb", "\0", "\udc80"} & set(two.heard)
    assert all(len(key) <= MAX_KEY for key in two.heard)


@together
async def the_limit_of_a_counter_is_shared(b: Bench) -> None:
    one, two = (await b.worker()).coordination, (await b.worker()).coordination
    calls = [each.count("shared", 1, 10, 60_000) for each in (one, two) for _ in range(20)]
    assert sum(answer.allowed for answer in await asyncio.gather(*calls)) == 10


@check
async def closed_it_is_quiet_and_closing_again_is_nothing(b: Bench) -> None:
    one = await b.worker()
    await one.coordination.close()
    await one.coordination.close()
    one.coordination.ring(["run_1"])


@together
async def what_is_rung_just_before_the_end_is_sent(b: Bench) -> None:
    one, two = await b.worker(), await b.worker()
    one.coordination.ring(["last"])
    await one.coordination.close()
    await until(lambda: "last" in two.heard)


# -- without the server ------------------------------------------------------------------------------------------------------------


@broken
async def it_opens_without_a_server_and_finds_it_later(b: Bench, server: Server) -> None:
    server.kill()
    one, took = await timed(b.worker(healthy=False))
    assert took < 5 * PATIENCE_S and not one.coordination.healthy
    one.coordination.ring(["lost"])
    assert (await one.coordination.count("k", 1, 1, 60_000)).allowed
    assert not (await one.coordination.count("k", 1, 1, 60_000)).allowed, "alone it still counts for itself"
    server.start()
    await one.healthy()


@broken
async def a_killed_server_is_noticed_logged_once_and_found_again(b: Bench, server: Server) -> None:
    one, two = await b.worker(), await b.worker()
    server.kill()
    await one.healthy(False)
    await two.healthy(False)
    for _ in range(50):
        one.coordination.ring(["run_1"])
        answer, took = await timed(one.coordination.count("k", 1, 100, 60_000))
        assert answer.allowed and took < 5 * PATIENCE_S
    await asyncio.sleep(0.5)
    assert len(one.logged) == 1, one.logged
    missed = one.missed
    server.start()
    await one.healthy()
    await two.healthy()
    assert len(one.logged) == 2 and one.missed == missed + 1, "all is to be looked at once"
    await reaches(two, one, "after")


@broken
async def a_restarted_server_is_found_again(b: Bench, server: Server) -> None:
    one, two = await b.worker(), await b.worker()
    server.restart()
    await until(lambda: one.missed and two.missed)
    await one.healthy()
    await two.healthy()
    await reaches(one, two, "after")


@broken
async def a_flushed_server_changes_nothing_but_counters(b: Bench, server: Server) -> None:
    one, two = await b.worker(), await b.worker()
    assert (await one.coordination.count("k", 1, 1, 60_000)).allowed
    assert not (await two.coordination.count("k", 1, 1, 60_000)).allowed
    server.flush()
    await reaches(one, two, "run_1")
    assert (await two.coordination.count("k", 1, 1, 60_000)).allowed
    assert not one.logged and not two.logged


@broken
async def a_hanging_server_blocks_nobody(b: Bench, server: Server) -> None:
    one, two = await b.worker(), await b.worker()
    server.hang()
    _, took = await timed(asyncio.gather(*(one.coordination.count("k", 1, 1000, 60_000) for _ in range(100))))
    assert took < 10 * PATIENCE_S
    one.coordination.ring(["lost"])
    await one.healthy(False)
    await two.healthy(False)
    assert len(one.logged) == 1, one.logged
    _, took = await timed(one.coordination.count("k", 1, 1000, 60_000))
    assert took < PATIENCE_S
    server.go_on()
    await one.healthy()
    await two.healthy()
    await reaches(two, one, "after")


@broken
async def closing_does_not_wait_for_a_server_that_hangs(b: Bench, server: Server) -> None:
    one = await b.worker()
    server.hang()
    one.coordination.ring(["lost"])
    _, took = await timed(one.coordination.close())
    assert took < 10 * PATIENCE_S
