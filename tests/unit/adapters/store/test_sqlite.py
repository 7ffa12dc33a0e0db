"""What only the SQLite store has: threads, a busy or failing database, several loops."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from corral import faults
from corral.adapters.store import migrate
from corral.adapters.store.sqlite import SqliteStore
from corral.domain.records import LeaseChange
from corral.errors import CorralError
from corral.testing.store import Bench, Clock, audit


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "empty.db"
    migrate.ensure(path)
    return path


@pytest.fixture
async def bench(tmp_path: Path, empty_database: Path) -> AsyncIterator[Bench]:
    path = tmp_path / "corral.db"
    shutil.copy(empty_database, path)
    clock = Clock()
    bench = Bench(SqliteStore(path, clock), clock)
    await bench.store.open()
    yield bench
    await bench.store.close()


@pytest.fixture
def fault():
    armed: list[str] = []

    def arm(name: str, action) -> None:
        armed.append(name)
        faults.arm(name, action)

    yield arm
    for name in armed:
        faults.arm(name, None)


async def test_a_failure_before_the_commit_takes_everything_back(bench: Bench, fault) -> None:
    def fail() -> None:
        raise RuntimeError("struck")

    fault("store.commit.before", fail)
    with pytest.raises(RuntimeError, match="struck"):
        await bench.store.submit_run(bench.run(), audit())
    faults.arm("store.commit.before", None)
    assert await bench.store.open_runs() == [] and await bench.store.list_audit("default") == []
    assert (await bench.store.submit_run(bench.run(), audit()))[1]


async def test_a_cancelled_caller_leaves_its_transaction_running(bench: Bench, fault) -> None:
    reached, go = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go.wait(60)

    fault("store.commit.before", hold)
    task = asyncio.ensure_future(bench.store.submit_run(bench.run(), audit()))
    await asyncio.to_thread(reached.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await bench.store.open_runs() == [], "readers do not wait for the writer and see only what is committed"
    go.set()
    faults.arm("store.commit.before", None)
    await bench.store.add_audit(audit())
    assert [r.run_id for r in await bench.store.open_runs()] == ["run_1"]


async def test_a_reader_of_another_process_sees_commits_and_does_not_block(bench: Bench, tmp_path: Path) -> None:
    await bench.store.submit_run(bench.run(), audit())
    other = sqlite3.connect(tmp_path / "corral.db", isolation_level=None)
    try:
        other.execute("BEGIN")
        assert other.execute("SELECT run_id FROM run").fetchall() == [("run_1",)]
        await bench.store.submit_run(bench.run("run_2"), audit())
        assert other.execute("SELECT run_id FROM run").fetchall() == [("run_1",)]
    finally:
        other.close()


async def test_a_database_that_is_busy_too_long_is_a_retryable_store_error(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.adapters.store.sqlite._BUSY_S", 0.05)
    await bench.store.close()
    await bench.store.open()
    other = sqlite3.connect(tmp_path / "corral.db", isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CorralError) as caught:
            await bench.store.submit_run(bench.run(), audit())
        assert caught.value.code == "store_error" and caught.value.retryable
        assert await bench.store.open_runs() == []
        other.execute("ROLLBACK")
    finally:
        other.close()
    assert (await bench.store.submit_run(bench.run(), audit()))[1]


async def test_closing_finishes_what_is_queued(bench: Bench) -> None:
    tasks = [asyncio.ensure_future(bench.store.submit_run(bench.run(f"run_{i}"), audit())) for i in range(50)]
    await asyncio.sleep(0)
    await bench.store.close()
    assert all(made for _, made in await asyncio.gather(*tasks))
    assert not [t for t in threading.enumerate() if t.name.startswith("store-") and t.is_alive()]
    await bench.store.open()
    assert len(await bench.store.open_runs()) == 50


async def test_several_loops_may_use_one_store(bench: Bench) -> None:
    def elsewhere(number: int) -> None:
        async def work() -> None:
            for i in range(20):
                await bench.store.submit_run(bench.run(f"run_{number}_{i}"), audit())

        asyncio.run(work())

    await asyncio.gather(*(asyncio.to_thread(elsewhere, number) for number in range(3)))
    assert len(await bench.store.open_runs()) == 60


async def test_the_view_of_instances_follows_the_bound_one(bench: Bench, tmp_path: Path) -> None:
    from corral.domain.records import InstanceChange

    await bench.leased()
    connection = sqlite3.connect(tmp_path / "corral.db")
    read = "SELECT sandbox_id, runtime_provider, runtime_instance_id, state, version, tainted FROM sandbox_instance"
    assert connection.execute(read).fetchall() == [("sbx_1", "fake", None, "leased", 2, 0)]
    bound = bench.instance(state="bound", sandbox_id="sbx_1")
    await bench.step(state="ready", instances=(InstanceChange("insert", bound),), lease=LeaseChange("drop"))
    assert connection.execute(read).fetchall() == [("sbx_1", "fake", "ins_1", "ready", 3, 0)]
    connection.close()


async def test_the_installation_id_may_come_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "corral.db"
    for expected, new_id in (("first_org", "first"), ("first_org", "second")):
        store = SqliteStore(path, lambda: 1, lambda prefix, name=new_id: f"{name}_{prefix}")
        await store.open()
        assert await store.installation_id() == expected
        await store.close()
