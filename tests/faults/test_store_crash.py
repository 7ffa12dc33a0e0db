"""A process killed with -9 around a commit or in the middle of making the tables leaves all of a transaction or nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from corral.adapters.store import migrate
from corral.adapters.store.sqlite import SqliteStore
from corral.domain.fence import Fence
from corral.testing.store import START_MS

CHILD = """
import asyncio, sys
from corral import faults
from corral.adapters.store.sqlite import SqliteStore
from corral.domain.records import LeaseChange, InstanceChange
from corral.testing.store import Bench, Clock, audit

async def main(path, kill_at):
    clock = Clock()
    bench = Bench(SqliteStore(path, clock), clock)
    await bench.store.open()
    await bench.leased()
    await bench.store.create_exec(bench.exec(), (await fence(bench)))
    import signal
    faults.arm(kill_at, lambda: signal.raise_signal(signal.SIGKILL))
    await bench.step(
        state="sanitizing",
        changes={"tainted": True},
        lease=LeaseChange("take", "system:destroy", 1000),
        instances=(InstanceChange("insert", bench.instance(sandbox_id="sbx_1")),),
        commands=(bench.command("cmd_1"), bench.command("cmd_2")),
        end_execs="sandbox_deleted",
        audit=audit("sbx_1"),
    )
    print("survived", flush=True)

async def fence(bench):
    from corral.domain.fence import Fence
    view = await bench.store.get_sandbox("sbx_1", None)
    return Fence(view.sandbox.incarnation, view.lease.lease_version)

asyncio.run(main(*sys.argv[1:]))
"""

OPEN = """
import asyncio, sys
from corral.adapters.store.sqlite import SqliteStore

async def main(path):
    store = SqliteStore(path, lambda: 1)
    await store.open()
    print(await store.installation_id(), flush=True)
    await store.close()

asyncio.run(main(sys.argv[1]))
"""


def _child(code: str, *arguments: str | Path, fault: str = "") -> subprocess.Popen[str]:
    environment = {**os.environ, "CORRAL_FAULT_POINTS": fault}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _end(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=120)
    return child.returncode, out, err


@pytest.mark.parametrize("point", ["store.commit.before", "store.commit.after"])
async def test_a_transaction_is_there_whole_or_not_at_all_after_kill(tmp_path: Path, point: str) -> None:
    path = tmp_path / "corral.db"
    status, out, err = _end(_child(CHILD, path, point))
    assert status == -signal.SIGKILL and "survived" not in out, err

    happened = point == "store.commit.after"
    store = SqliteStore(path, lambda: START_MS)
    await store.open()
    try:
        view = await store.get_sandbox("sbx_1", None)
        assert view is not None and view.lease is not None
        assert (view.sandbox.state == "sanitizing") is happened
        assert view.sandbox.tainted is happened
        assert view.sandbox.version == (3 if happened else 2)
        assert (view.lease.lease_owner, view.lease.lease_version) == (
            ("system:destroy", 2) if happened else ("me/1", 1)
        )
        assert len(await store.list_instances("node_1")) == happened
        assert [c.command_id for c in await store.open_commands()] == (["cmd_1", "cmd_2"] if happened else [])
        assert [e.cancel_requested for e in await store.open_execs()] == ["sandbox_deleted" if happened else None]
        assert len(await store.history("sbx_1")) == (3 if happened else 2)
        assert len(await store.list_audit("default", subject="sbx_1")) == happened
        # and it goes on from there
        owner = "system:destroy" if happened else "me/1"
        await store.renew_lease("sbx_1", owner, Fence(0, 2 if happened else 1), 10)
    finally:
        await store.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_a_killed_migration_leaves_an_empty_database_that_the_next_one_fills(tmp_path: Path) -> None:
    path = tmp_path / "corral.db"
    status, _, err = _end(_child(OPEN, path, fault="store.migrate.before=kill"))
    assert status == -signal.SIGKILL, err
    assert migrate.version(path) is None
    status, out, err = _end(_child(OPEN, path))
    assert status == 0 and len(out.strip()) == 32, err
    assert migrate.version(path) == migrate.HEAD


@pytest.mark.slow
def test_eight_processes_may_open_a_new_database_at_once(tmp_path: Path) -> None:
    path = tmp_path / "corral.db"
    ends = [_end(child) for child in [_child(OPEN, path) for _ in range(8)]]
    assert [status for status, _, _ in ends] == [0] * 8, ends
    assert len({out for _, out, _ in ends}) == 1
