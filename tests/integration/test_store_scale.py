"""A hundred thousand sandboxes and a million events: whatever lists, claims and sweeps do does not grow with what has ended.

Not the time is looked at but the work: what the database plans, and how many steps (SQLite) or pages (PostgreSQL) it takes, against the
same with a hundredth of the rows. `python -m bench.store` measures the time.
"""

from __future__ import annotations

import inspect
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from bench.store_rows import BIG, FEW, fill_postgres, fill_sqlite

from corral.adapters.store import (
    commands,
    execs,
    expiry,
    leases,
    migrate,
    queue,
    repeats,
    runs,
    trail,
    transactions,
    views,
    webhooks,
    workers,
)
from corral.adapters.store.postgres_session import Session, translated
from corral.adapters.store.sql import SqlStore
from corral.adapters.store.sqlite import _SqliteTx
from corral.domain.fence import Fence
from corral.domain.quota import Amounts, QuotaRules
from corral.ports.leases import Renewal
from corral.ports.queue import Charge, Ticket
from corral.testing.store import Bench, Clock, audit
from corral.testing.store.bench import EVENT, START_MS, key_of
from postgres_server import PostgresServer, running

NOW = START_MS
LARGE, SMALL = (100_000, 1_000_000), (1_000, 10_000)
Work = Callable[[Any], Any]
b = Bench(None, Clock())  # type: ignore[arg-type]


def transition(sandbox_id: str, **parts: Any) -> Any:
    from corral.adapters.store.rows import encode_transition
    from corral.domain.records import Transition

    return encode_transition(Transition(sandbox_id, parts.pop("version", 3), "running", EVENT, **parts))


def encoded(record: Any) -> Any:
    from corral.adapters.store import rows

    shapes = {"RunRecord": rows.RUN, "ExecRecord": rows.EXEC, "AuditRecord": rows.AUDIT, "SandboxRecord": rows.SANDBOX}
    return shapes[type(record).__name__].encode(record)


LEASED = "sbx_00000615"  # leased, of tenant t5; its lease is key:1's
FENCE = Fence(1, 2)
CALLS: dict[str, Work] = {
    # lists
    "list_runs": lambda tx: runs.list_runs(tx, "default", None, None, 20),
    "list_runs open": lambda tx: runs.list_runs(tx, "default", ["queued", "running"], None, 20),
    "list_sandboxes": lambda tx: views.list_sandboxes(tx, "t5", None, None, 20),
    "list_sandboxes open": lambda tx: views.list_sandboxes(tx, "t5", ["idle", "leased"], None, 20),
    "list_sandboxes all tenants": lambda tx: views.list_sandboxes(tx, None, ["idle", "leased"], None, 20),
    "list_sandboxes after": lambda tx: views.list_sandboxes(tx, "t5", ["leased"], "sbx_00000815", 20),
    "history": lambda tx: trail.history(tx, LEASED, 20),
    "list_execs": lambda tx: execs.list_execs(tx, LEASED),
    "list_audit": lambda tx: trail.list_audit(tx, "default", None, 20),
    "list_audit subject": lambda tx: trail.list_audit(tx, "t5", "run_00000615", 20),
    "list_leases": lambda tx: leases.list_leases(tx, "t5", None, 20),
    "list_queue": lambda tx: queue.list_queue(tx, "default", 20),
    "workers": workers.list_workers,
    # claims
    "lock_command": lambda tx: commands.lock_command(tx, "w", 1000, None),
    "hold_command": lambda tx: workers.hold_command(tx, LEASED, "settle", "w", 1000),
    "adopt_runs": lambda tx: workers.adopt_runs(tx, "w", 10),
    "adopt_execs": lambda tx: workers.adopt_execs(tx, "w", 10),
    "claim_deliveries": lambda tx: webhooks.claim_deliveries(tx, "w", 1000, 8),
    "admit": lambda tx: queue.admit(tx, QuotaRules(), ["sbx_a", "sbx_b"]),
    # sweeps
    "beat": lambda tx: workers.beat(tx, "w", 1000, "{}", ["run_00000001", "exe_00000001"], 1000),
    "driven_runs": lambda tx: workers.driven_runs(tx, "w_1"),
    "stale_sandboxes": lambda tx: workers.stale_sandboxes(tx, ("locking", "sanitizing", "failed"), NOW, 20),
    "abandoned_sandboxes": lambda tx: workers.abandoned_sandboxes(tx, NOW, 20),
    "due_leases": lambda tx: leases.due_leases(tx, 20),
    "due_sandboxes": lambda tx: expiry.due_sandboxes(tx, 20),
    "due_deliveries": webhooks.due_deliveries,
    "open_runs": runs.open_runs,
    "open_execs": lambda tx: execs.open_execs(tx, None),
    "open_commands": lambda tx: commands.open_commands(tx, None),
    "list_instances": lambda tx: views.list_instances(tx, "node_1", ("condemned",)),
    "newest_event": leases.newest_event,
    "waiting": queue.count_waiting,
    # one thing
    "get_run": lambda tx: runs.get_run(tx, "run_00000615", "t5"),
    "get_sandbox": lambda tx: views.get_sandbox(tx, LEASED, "t5"),
    "see_sandbox": lambda tx: leases.see_sandbox(tx, LEASED, "t5"),
    "get_exec": lambda tx: execs.get_exec(tx, "exe_00000615", "t5"),
    "open_execs of one": lambda tx: execs.open_execs(tx, LEASED),
    "open_commands of one": lambda tx: commands.open_commands(tx, LEASED),
    "queued_run": lambda tx: queue.queued_run(tx, "run_00000010", "default"),
    "still_queued": lambda tx: queue.still_queued(tx, ["run_00000010", "run_00000615"]),
    "tenant_use": lambda tx: queue.tenant_use(tx, "t5"),
    "tenant_use of all": lambda tx: queue.tenant_use(tx, "*"),
    "delivery_of": lambda tx: webhooks.delivery_of(tx, "run_00000615", "t5"),
    # writes
    "submit_run": lambda tx: runs.submit_run(tx, encoded(b.run("run_new")), encoded(audit()), key_of()),
    "submit_run again": lambda tx: runs.submit_run(
        tx, encoded(b.run("run_new")), encoded(audit()), key_of("key_00000210", "d")
    ),
    "submit_run with a place": lambda tx: runs.submit_run(
        tx, encoded(b.run("run_new", tenant_id="t5")), encoded(audit()), None, Ticket(QuotaRules())
    ),
    "create_sandbox with its room": lambda tx: transactions.create_sandbox(
        tx,
        encoded(b.sandbox("sbx_new")),
        encode_event(),
        encoded(audit()),
        None,
        (),
        Charge(Amounts(sandboxes=1), QuotaRules()),
    ),
    "update_run": lambda tx: runs.update_run(tx, "run_00000060", ["running"], {"owner": "x"}, None),
    "finish_run": lambda tx: runs.finish_run(tx, "run_00000060", "{}", "ok", "{}", encoded(audit())),
    "create_sandbox": lambda tx: transactions.create_sandbox(
        tx, encoded(b.sandbox("sbx_new")), encode_event(), encoded(audit()), None, [transition("sbx_new", version=1)]
    ),
    "commit_transition": lambda tx: transactions.commit_transition(tx, transition(LEASED, end_execs="sandbox_deleted")),
    "renew_lease": lambda tx: transactions.renew_lease(tx, LEASED, "key:1", FENCE, 10_000_000),
    "renew_leases": lambda tx: leases.renew_leases(tx, [Renewal(LEASED, "key:1", FENCE, 10_000_000)]),
    "begin_exec": lambda tx: execs.begin_exec(
        tx, encoded(b.exec("exe_new", LEASED)), FENCE, transition(LEASED), ("key:1", 10_000_000), None, "t5"
    ),
    "end_exec": lambda tx: execs.end_exec(tx, "exe_00000099", {"state": "ended"}, (), transition("sbx_00000099"), None),
    "finish_command": lambda tx: commands.finish_command(tx, "cmd_00000001", "w", "{}"),
    "touch": lambda tx: expiry.touch(tx, [LEASED]),
    "forget_old": lambda tx: repeats.forget_old(tx, 20),
    "made_under": lambda tx: repeats.made_under(tx, key_of("key_00000210", "d")),
    "update_instance": lambda tx: transactions.update_instance(tx, "ins_00000001", ["condemned"], "gone", None),
}
ALL_THAT_LIVES = {
    # Each returns what lives on a node, and reads no more than that.
    "list_instances living": lambda tx: views.list_instances(tx, "node_1", ("warming", "warm", "bound")),
}
LITTLE = ("worker", "picked", "locked", "tenant_use", "tenant", "run_queue")
"""What may be read whole."""
ELSEWHERE = {
    "open close installation_id": "no work on rows",
    "add_event add_audit create_exec update_exec commit_transitions": "parts of what is here",
    "leave adopt_floor environment_version place_run delivery_tried webhook_secrets rotate_webhook_secret": "one row by its key",
    "quota_drift mend_quota": "look at everything, for doctor",
}


def encode_event() -> Any:
    from corral.adapters.store import rows

    return rows.EVENT.encode(EVENT)


def test_every_function_of_runs_and_sandboxes_is_looked_at() -> None:
    """Accounts (`identity`) are few; everything else is named here, by what it does or why not."""
    from corral.adapters.store.identity import SqlIdentity

    accounts = {name for name, _ in inspect.getmembers(SqlIdentity, inspect.iscoroutinefunction)}
    functions = {
        name
        for name, _ in inspect.getmembers(SqlStore, inspect.iscoroutinefunction)
        if not name.startswith("_") and name not in accounts
    }
    named = {call.split()[0] for call in CALLS} | {name for names in ELSEWHERE for name in names.split()}
    assert functions - named == set(), "add it to CALLS"


class SqliteLooked(_SqliteTx):
    """Asks for the plan of each statement and counts the steps of its program."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection, NOW)
        self._connection = connection
        self.work = 0
        self.scans: list[str] = []
        self.texts: list[str] = []
        connection.set_progress_handler(self._step, 20)

    def _step(self) -> int:
        self.work += 1
        return 0

    def rows(self, text: str, params: Mapping[str, Any] = {}) -> list[tuple[Any, ...]]:
        work = self.work
        for *_, detail in self._connection.execute(f"EXPLAIN QUERY PLAN {text}", params):
            words = detail.split()
            if words[0] == "SCAN" and "INDEX" not in words and words[1] not in LITTLE:
                self.scans.append(f"{detail}: {text}")
        self.work = work
        found = super().rows(text, params)
        self.texts.append(f"{(self.work - work) * 20} steps: {text} {dict(params)}")
        return found


class PostgresLooked:
    """The same with the pages that each statement touches, planned for its values or for any."""

    skip_locked = "FOR NO KEY UPDATE SKIP LOCKED"
    for_update = "FOR NO KEY UPDATE"

    def __init__(self, session: Session, generic: bool) -> None:
        self._session = session
        self._generic = generic
        self.now = NOW
        self.work = 0
        self.scans: list[str] = []
        self.texts: list[str] = []

    def rows(self, text: str, params: Mapping[str, Any] = {}) -> list[tuple[Any, ...]]:
        query, names = translated(text)
        values = [params[name] for name in names]
        if text.startswith(("SELECT", "UPDATE", "WITH", "DELETE", "INSERT")) and len(values) < 40:
            kinds = ", ".join(_kind(value) for value in values)
            self._session.rows("SAVEPOINT looked")
            self._session.rows(f"PREPARE looked{f'({kinds})' if kinds else ''} AS {query}")
            given = ", ".join(_literal(value) for value in values)
            call = f"EXECUTE looked{f'({given})' if given else ''}"
            [(plan,)] = self._session.rows(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {call}")
            self._session.rows("ROLLBACK TO SAVEPOINT looked")
            self._session.rows("DEALLOCATE looked")
            top = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
            pages = top["Shared Hit Blocks"] + top["Shared Read Blocks"]
            self.work += pages
            self.texts.append(f"{pages} pages: {text} {dict(params)}")
            self._look(top, text)
        return self._session.rows(text, params)

    def send(self, text: str, params: Mapping[str, Any] = {}) -> None:
        self.rows(text, params)

    def _look(self, node: dict[str, Any], text: str) -> None:
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") in BIG:
            self.scans.append(f"{node['Relation Name']}: {text}")
        if node.get("Rows Removed by Filter", 0) * node.get("Actual Loops", 1) > 20 * FEW:
            self.scans.append(f"{node['Rows Removed by Filter']} rows read for nothing: {text}")
        for below in node.get("Plans", ()):
            self._look(below, text)


def _kind(value: Any) -> str:
    return (
        "boolean" if isinstance(value, bool) else "bigint" if isinstance(value, int) else "text" if value else "unknown"
    )


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value)


@pytest.fixture(scope="module")
def sqlite_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = []
    for count, events in (SMALL, LARGE):
        path = tmp_path_factory.mktemp("scale") / "corral.db"
        migrate.ensure(path)
        fill_sqlite(path, count, events, NOW)
        made.append(path)
    return made


@pytest.fixture(scope="module")
def postgres_urls() -> Iterator[list[str]]:
    quick = {"shared_buffers": "512MB", "wal_level": "minimal", "max_wal_senders": "0", "max_wal_size": "4GB"}
    with running(**quick, autovacuum="off", maintenance_work_mem="256MB") as server:
        yield [_filled(server, *size) for size in (SMALL, LARGE)]


def _filled(server: PostgresServer, count: int, events: int) -> str:
    url = server.fresh_database(tables=True)
    with psycopg.connect(url, autocommit=True) as connection:
        fill_postgres(connection, count, events, NOW)
    return url


def looked_sqlite(path: Path, work: Work) -> SqliteLooked:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        tx = SqliteLooked(connection)
        work(tx)
        connection.execute("ROLLBACK")
    finally:
        connection.close()
    return tx


def looked_postgres(url: str, work: Work, generic: bool) -> PostgresLooked:
    session = Session(url)
    try:
        session.begin("BEGIN", clock=False)
        session.rows(f"SET LOCAL plan_cache_mode = force_{'generic' if generic else 'custom'}_plan")
        tx = PostgresLooked(session, generic)
        work(tx)
        session.roll_back()
    finally:
        session.close()
    return tx


def told(few: Any, many: Any) -> str:
    return "\n".join([f"{few.work} -> {many.work}", *few.texts, "->", *many.texts])


@pytest.mark.timeout(900)
def test_sqlite_does_no_more_work_with_many_rows(sqlite_files: list[Path]) -> None:
    wrong = []
    for name, work in CALLS.items():
        few, many = (looked_sqlite(path, work) for path in sqlite_files)
        if many.scans or many.work > 2 * few.work + 10:
            wrong.append(f"== {name}: {many.scans}\n{told(few, many)}")
    for name, work in ALL_THAT_LIVES.items():
        if scans := looked_sqlite(sqlite_files[1], work).scans:
            wrong.append(f"== {name}: {scans}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(900)
def test_postgresql_does_no_more_work_with_many_rows(postgres_urls: list[str]) -> None:
    wrong = []
    for name, work in CALLS.items():
        for generic in (False, True):
            few, many = (looked_postgres(url, work, generic) for url in postgres_urls)
            # A tree of a hundred times as many rows is a level or two higher, and its rows lie on pages of their own.
            if many.scans or many.work > 3 * few.work + 50:
                wrong.append(f"== {name}{' (any values)' if generic else ''}: {many.scans}\n{told(few, many)}")
    for name, work in ALL_THAT_LIVES.items():
        if scans := [s for s in looked_postgres(postgres_urls[1], work, False).scans if "for nothing" not in s]:
            wrong.append(f"== {name}: {scans}")
    assert not wrong, "\n".join(wrong)
