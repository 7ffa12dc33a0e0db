"""What a beat shows of the store: one that was set back to an older copy is seen, and one that has only forgotten a worker is not taken for it."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.ports.workers import FORGET_MS
from corral.services.workers import forgotten

from .cluster import Cluster
from .test_leases import made

DAY_MS = FORGET_MS
PLACE = tempfile.TemporaryDirectory()
"""One for all, as what is read once is kept there."""
OLDER = "the store is older than it was"
TABLES = ("_runs", "_sandboxes", "_leases", "_instances", "_execs", "_commands", "_events", "_audit", "_workers")


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Two workers that beat only when the test says so."""
    cluster = Cluster(tmp_path)
    for name in ("a", "b"):
        await quiet(cluster, name)
    yield cluster
    await cluster.stop()


async def quiet(cluster: Cluster, name: str) -> None:
    world = await cluster.start(name, worker_ttl_s=5.0)
    assert world.services is not None
    for task in world.services.core.tasks:
        if task.get_name() in ("beats", "bring on", "sweep"):
            task.cancel()


def passes(cluster: Cluster, ms: int) -> None:
    """The store's clock moves."""
    cluster.now_ms.__self__.offset_ms += ms  # type: ignore[attr-defined]


async def beat(cluster: Cluster, name: str) -> bool:
    """One beat; -> whether it took the store for an older copy."""
    world = cluster.workers[name]
    before = sum(OLDER in line for line in world.logged)
    await world.services.upkeep.workers.beat()
    return sum(OLDER in line for line in world.logged) > before


def rows(cluster: Cluster) -> dict[str, Any]:
    return {name: copy.deepcopy(getattr(cluster.store, name)) for name in TABLES}


def restore(cluster: Cluster, copied: dict[str, Any]) -> None:
    for name, value in copied.items():
        setattr(cluster.store, name, copy.deepcopy(value))


async def names(cluster: Cluster) -> set[str]:
    return {row.worker_id for row in await cluster.store.workers()}


async def test_a_worker_that_stood_still_for_longer_than_its_row_is_kept_finds_the_store_as_it_was(two):
    await made(two.workers["a"])
    assert not await beat(two, "a")
    passes(two, DAY_MS + 60_000)
    assert not await beat(two, "b")
    assert await names(two) == {"w_b"}, "else this test shows nothing"
    await made(two.workers["b"])
    assert not await beat(two, "a") and two.workers["a"].services.core.regressed_ms == 0
    assert await names(two) == {"w_a", "w_b"}
    assert not await beat(two, "a")


async def test_one_that_finds_no_row_of_its_own_earlier_than_that_is_on_an_older_copy(two):
    copied = rows(two)
    del copied["_workers"]["w_a"]
    await beat(two, "a")
    passes(two, DAY_MS // 2)
    restore(two, copied)
    assert await beat(two, "a") and two.workers["a"].services.core.regressed_ms > 0
    assert not await beat(two, "a"), "said once"


async def test_one_that_stood_still_for_long_sees_by_the_events_that_the_store_is_an_older_copy(two):
    copied = rows(two)
    await made(two.workers["b"])
    await beat(two, "a")
    restore(two, copied)
    passes(two, DAY_MS + 60_000)
    await beat(two, "b")
    assert await names(two) == {"w_b"}
    assert await beat(two, "a")


@pytest.mark.parametrize("jump", [-3 * DAY_MS, -60_000, 60_000, 3 * DAY_MS])
async def test_a_clock_of_the_store_that_jumps_is_no_older_copy(two, jump):
    await made(two.workers["a"])
    assert not await beat(two, "a")
    passes(two, jump)
    assert not await beat(two, "b"), "whose own row the jump may have outlived"
    assert not await beat(two, "a")
    passes(two, -jump)
    assert not await beat(two, "b") and not await beat(two, "a")


async def test_what_a_beat_that_failed_has_seen_is_judged_by_the_next_one(two, monkeypatch):
    copied = rows(two)
    del copied["_workers"]["w_a"]
    await beat(two, "a")
    restore(two, copied)
    failed = []

    def fails() -> bool:
        """The first write is done, and said to have failed."""
        failed.append(True)
        return len(failed) == 2

    two.store.fails_after = fails
    with pytest.raises(Exception, match="the connection broke"):
        await beat(two, "a")
    assert "w_a" in await names(two), "its row is there by now"
    assert await beat(two, "a")


async def test_a_worker_misses_its_own_commits_although_its_last_beat_is_there(two):
    await beat(two, "a")
    copied = rows(two)
    box = await made(two.workers["a"])  # between two beats
    restore(two, copied)
    assert await two.store.get_sandbox(box, None) is None
    assert await beat(two, "a"), "the event that it was given is not there"
    assert not await beat(two, "a")
    await made(two.workers["a"])
    assert not await beat(two, "a"), "the ids that are given again are the store's own"


async def test_a_commit_while_a_beat_is_under_way_is_not_missed_by_that_beat(two, monkeypatch):
    a = two.workers["a"]
    real, reached, gate = two.store.beat, asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> Any:
        answer = await real(*args)
        reached.set()
        await gate.wait()
        return answer

    monkeypatch.setattr(two.store, "beat", slow)
    beating = asyncio.create_task(beat(two, "a"))
    await reached.wait()
    newest = await two.store.newest_event()
    await made(a)
    assert a.services.core.newest_event > newest, "else this test shows nothing"
    gate.set()
    assert not await beating
    assert a.services.core.newest_event > newest, "what was seen is not forgotten"
    assert not await beat(two, "a")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("passes"), st.integers(-3 * DAY_MS, 3 * DAY_MS)),
        st.tuples(st.just("beats"), st.sampled_from(["a", "b"])),
        st.tuples(st.just("makes"), st.sampled_from(["a", "b"])),
        st.tuples(st.just("copies"), st.none()),
        st.tuples(st.just("restores"), st.none()),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
def test_whatever_the_clocks_do_only_a_restored_store_is_taken_for_one(steps):
    """Two workers, one of which may have been removed for its age: each is told of a copy that has lost what it knows, and of nothing else."""

    async def scenario() -> None:
        cluster = Cluster(Path(PLACE.name))
        for name in ("a", "b"):
            await quiet(cluster, name)
        try:
            await played(cluster)
        finally:
            await cluster.stop()

    async def played(cluster: Cluster) -> None:
        copied: dict[str, Any] | None = None
        restored = dict.fromkeys("ab", False)
        knows: dict[str, int] = dict.fromkeys("ab", 0)
        """The highest event that each has seen in the store as it is."""
        last, highest = dict.fromkeys("ab", cluster.now_ms()), cluster.now_ms()
        for word, what in [*steps, ("beats", "a"), ("beats", "b")]:
            match word:
                case "passes":
                    passes(cluster, what)
                    highest = max(highest, cluster.now_ms())
                case "makes":
                    await made(cluster.workers[what])
                    knows[what] = await cluster.store.newest_event()
                case "copies":
                    copied = rows(cluster)
                case "restores" if copied is not None:
                    restore(cluster, copied)
                    restored = dict.fromkeys("ab", True)
                case "beats":
                    lost = await cluster.store.newest_event() < knows[what]
                    there = any(row.worker_id == f"w_{what}" for row in await cluster.store.workers())
                    went_back = cluster.now_ms() < highest
                    told = await beat(cluster, what)
                    if told:
                        # One jump there and back again within one pause is the same as a copy, to a worker without a row.
                        assert restored[what] or (not there and went_back), "it is the same store"
                    else:
                        assert not lost, "what it had seen is not there"
                        known_s = cluster.now_ms() - last[what]
                        assert there or known_s > FORGET_MS, "its row is not there"
                    restored[what] = False
                    last[what] = cluster.now_ms()
                    knows[what] = await cluster.store.newest_event()

    asyncio.run(scenario())


@given(st.floats(0, 4 * FORGET_MS / 1000), st.integers(-4 * FORGET_MS, 4 * FORGET_MS))
def test_a_row_may_have_gone_for_its_age_by_either_clock(passed_s, passed_ms):
    """A process that is stopped knows how long by its own clock; a machine that sleeps only by the store's."""
    assert forgotten(passed_s, passed_ms) == (passed_s * 1000 > FORGET_MS or passed_ms > FORGET_MS)
