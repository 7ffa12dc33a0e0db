"""What the store costs: its transactions against the bare driver doing the same statements, and many rows against few.

    .venv/bin/python -m bench.store [--rounds 200] [--stores sqlite,postgresql] [--json FILE]

Per database one file or server of its own. *Against the driver*: the statements that a transaction of the store runs are recorded once,
then the same are run by `sqlite3` or `psycopg` directly in a thread, in turns with the store; what is left is threads, encoding, records
and decisions. *Many rows*: p50 of list, claim and sweep with 100 000 sandboxes and a million events against 1 000 and ten thousand, in
turns; at most 2 is asked for. Every transaction here really commits, but for claims, whose rows are put back in between.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg

from bench.store_rows import fill_postgres, fill_sqlite
from corral.adapters.store import migrate
from corral.adapters.store.postgres import PostgresStore
from corral.adapters.store.postgres_session import translated
from corral.adapters.store.sqlite import SqliteStore
from corral.domain.fence import Fence
from corral.domain.records import Transition
from corral.testing.store import Bench, Clock, audit
from corral.testing.store.bench import EVENT, START_MS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from postgres_server import PostgresServer

SIZES = ((1_000, 10_000), (100_000, 1_000_000))
BUDGET = 2.0
Statements = list[tuple[str, dict[str, Any]]]


class Place:
    """One kind of database: makes them, fills them, runs recorded statements on them without the store."""

    name = ""

    def fresh(self) -> Any:
        raise NotImplementedError

    def filled(self, count: int, events: int) -> Any:
        raise NotImplementedError

    def store(self, where: Any, clock: Clock) -> Any:
        raise NotImplementedError

    def driver(self, where: Any) -> Callable[[Statements], None]:
        """Runs statements in one transaction, each prepared, its rows fetched."""
        raise NotImplementedError


class Sqlite(Place):
    name = "sqlite"

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._count = 0

    def fresh(self) -> Path:
        self._count += 1
        path = self._scratch / f"{self._count}.db"
        migrate.ensure(path)
        return path

    def filled(self, count: int, events: int) -> Path:
        path = self.fresh()
        fill_sqlite(path, count, events, START_MS)
        return path

    def store(self, where: Path, clock: Clock) -> SqliteStore:
        return SqliteStore(where, clock)

    def driver(self, where: Path) -> Callable[[Statements], None]:
        connection = sqlite3.connect(where, isolation_level=None, cached_statements=256, check_same_thread=False)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")

        def run(statements: Statements) -> None:
            connection.execute("BEGIN IMMEDIATE")
            for text, params in statements:
                connection.execute(text, params).fetchall()
            connection.execute("COMMIT")

        return run


class Postgresql(Place):
    name = "postgresql"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    def fresh(self) -> str:
        return self._server.fresh_database(tables=True)

    def filled(self, count: int, events: int) -> str:
        url = self.fresh()
        with psycopg.connect(url, autocommit=True) as connection:
            fill_postgres(connection, count, events, START_MS)
        return url

    def store(self, where: str, clock: Clock) -> PostgresStore:
        return PostgresStore(where, clock)

    def driver(self, where: str) -> Callable[[Statements], None]:
        connection = psycopg.connect(where, autocommit=True, prepare_threshold=0, cursor_factory=psycopg.RawCursor)

        def run(statements: Statements) -> None:
            connection.execute("BEGIN")
            for text, params in statements:
                query, names = translated(text)
                cursor = connection.execute(query, [params[name] for name in names])
                if cursor.description is not None:
                    cursor.fetchall()
            connection.execute("COMMIT")

        return run


@contextlib.contextmanager
def recorded(store: Any):
    """The statements of every transaction that the store runs meanwhile."""
    seen: Statements = []
    inner = store._submit

    def submit(writes: bool, work: Callable[[Any], Any]) -> Any:
        def watched(tx: Any) -> Any:
            return work(_Watched(tx, seen))

        return inner(writes, watched)

    store._submit = submit
    try:
        yield seen
    finally:
        del store._submit


class _Watched:
    def __init__(self, tx: Any, seen: Statements) -> None:
        self._tx = tx
        self._seen = seen
        self.skip_locked, self.for_update = tx.skip_locked, tx.for_update

    @property
    def now(self) -> int:
        return int(self._tx.now)

    def rows(self, text: str, params: Any = {}) -> Any:
        self._seen.append((text, dict(params)))
        return self._tx.rows(text, params)

    def send(self, text: str, params: Any = {}) -> None:
        self._seen.append((text, dict(params)))
        self._tx.send(text, params)


async def timed(call: Callable[[], Awaitable[Any]]) -> float:
    start = time.perf_counter()
    await call()
    return (time.perf_counter() - start) * 1000


# -- against the driver ------------------------------------------------------------------------------------------------------------


def _named(statements: Statements, old: str, new: str) -> Statements:
    """The same for another run, sandbox or exec: what is unique must not repeat."""
    swap = {f"{kind}_{old}": f"{kind}_{new}" for kind in ("run", "sbx", "exe")}
    return [
        (text, {k: swap.get(v, v) if isinstance(v, str) else v for k, v in params.items()})
        for text, params in statements
    ]


async def against_driver(place: Place, rounds: int) -> list[dict[str, Any]]:
    """An exec's begin and end, a renewal, a run's submission, each by the store and by the driver."""
    where, clock = place.fresh(), Clock()
    store = place.store(where, clock)
    await store.open()
    bench = Bench(store, clock)
    run = place.driver(where)
    fence = Fence(0, 1)

    def begun(n: str, version: int) -> Callable[[], Awaitable[Any]]:
        step = Transition(f"sbx_{n}", version, "running", EVENT)
        return lambda: store.begin_exec(bench.exec(f"exe_{n}", f"sbx_{n}"), fence, step, renew=("me/1", 30_000))

    def ended(n: str, version: int) -> Callable[[], Awaitable[Any]]:
        last = Transition(f"sbx_{n}", version, "leased", EVENT)
        return lambda: store.end_exec(f"exe_{n}", changes={"state": "ended", "result": {}}, last=last)

    calls: dict[str, Callable[[str], Callable[[], Awaitable[Any]]]] = {
        "submit_run": lambda n: lambda: store.submit_run(bench.run(f"run_{n}"), audit(f"run_{n}")),
        "begin_exec": lambda n: begun(n, 2),
        "end_exec": lambda n: ended(n, 3),
        "renew_lease": lambda n: lambda: store.renew_lease(f"sbx_{n}", "me/1", fence, 30_000),
        "get_sandbox": lambda n: lambda: store.get_sandbox(f"sbx_{n}", "default"),
    }
    patterns: dict[str, Statements] = {}
    await bench.leased("sbx_record")
    for name, call in calls.items():
        with recorded(store) as seen:
            await call("record")()
        patterns[name] = list(seen)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    for number in range(rounds):
        for who, suffix in random.sample([(0, f"s{number}"), (1, f"d{number}")], 2):
            await bench.leased(f"sbx_{suffix}")
            for name, call in calls.items():
                if who == 0:
                    spent = await timed(call(suffix))
                else:
                    statements = _named(patterns[name], "record", suffix)
                    spent = await timed(lambda s=statements: asyncio.to_thread(run, s))
                times[name][who].append(spent)
    await store.close()
    return [
        {
            "store": place.name,
            "transaction": name,
            "statements": len(patterns[name]),
            "store_ms": statistics.median(ours),
            "driver_ms": statistics.median(theirs),
            "ratio": statistics.median(ours) / statistics.median(theirs),
        }
        for name, (ours, theirs) in times.items()
    ]


# -- many rows ---------------------------------------------------------------------------------------------------------------------


def _asked(store: Any) -> dict[str, Callable[[], Awaitable[Any]]]:
    async def claim() -> None:
        command = await store.lock_command("w", 0)
        assert command is not None

    async def adopt() -> None:
        assert await store.adopt_runs("w", 10)

    return {
        "list sandboxes": lambda: store.list_sandboxes("default", limit=100),
        "list open sandboxes": lambda: store.list_sandboxes("t3", states=["idle", "leased"], limit=20),
        "list runs": lambda: store.list_runs("default", limit=100),
        "history": lambda: store.history("sbx_00000615", limit=10),
        "claim: lock_command": claim,
        "claim: adopt_runs": adopt,
        "sweep: stale_sandboxes": lambda: store.stale_sandboxes(["locking", "sanitizing"], START_MS, 100),
        "sweep: due_sandboxes": lambda: store.due_sandboxes(100),
        "sweep: due_leases": lambda: store.due_leases(20),
        "sweep: open_runs": store.open_runs,
        "sweep: list_instances": lambda: store.list_instances("node_1", states=["condemned"]),
        "beat": lambda: store.beat("w2", 1000, {}, ["run_00000001"], 1000),
    }


async def many_rows(place: Place, rounds: int) -> list[dict[str, Any]]:
    stores = []
    for size in SIZES:
        store = place.store(place.filled(*size), Clock())
        await store.open()
        stores.append(store)
    asked = [_asked(store) for store in stores]
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in asked[0]}
    for number in range(rounds + 5):
        for which in random.sample((0, 1), 2):
            for name, call in asked[which].items():
                spent = await timed(call)
                if number >= 5:  # the first ones fill caches
                    times[name][which].append(spent)
    for store in stores:
        await store.close()
    return [
        {
            "store": place.name,
            "what": name,
            "few_ms": statistics.median(few),
            "many_ms": statistics.median(many),
            "ratio": statistics.median(many) / statistics.median(few),
        }
        for name, (few, many) in times.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    lines = [columns] + [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
    print(flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.store", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--stores", default="sqlite,postgresql")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"against_driver": [], "many_rows": []}
    with contextlib.ExitStack() as undo:
        scratch = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="corral-bench-store-")))
        for name in given.stores.split(","):
            if name == "sqlite":
                place: Place = Sqlite(scratch)
            else:
                place = Postgresql(undo.enter_context(PostgresServer(durable=True, shared_buffers="512MB")))
            rows = asyncio.run(against_driver(place, given.rounds))
            found["against_driver"] += rows
            show(rows)
            rows = asyncio.run(many_rows(place, given.rounds))
            found["many_rows"] += rows
            show(rows)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    over = [row for row in found["many_rows"] if row["ratio"] > BUDGET]
    for row in over:
        print(f"over the budget of {BUDGET}: {row['store']} {row['what']} {row['ratio']:.2f}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
