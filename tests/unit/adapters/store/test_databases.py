"""A database as a whole, on both: versions up and down with data, what `check` finds, copies that are restored."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from corral import faults
from corral.adapters.store import migrate, migrate_postgres
from corral.adapters.store.databases import PostgresDatabase, SqliteDatabase
from corral.adapters.store.postgres import PostgresStore
from corral.adapters.store.sqlite import SqliteStore
from corral.errors import CorralError
from corral.ports.store import Store
from corral.testing.store import Bench, Clock, audit
from postgres_server import PASSWORD, PostgresServer, postgres_server, running

__all__ = ["postgres_server"]
OLD = migrate.REVISIONS[0]
Rows = dict[str, list[dict[str, Any]]]


@dataclass
class Case:
    """One kind of database: empty, and ways to look at it from outside."""

    database: Any
    make: Callable[[], Store]
    engine: sa.Engine
    to: Callable[..., None]

    def at(self, revision: str) -> Case:
        self.to(revision)
        return self

    def version(self) -> str | None:
        return self.database.check().version

    def reflected(self) -> sa.MetaData:
        found = sa.MetaData()
        with self.engine.connect() as connection:
            found.reflect(connection)
        return found

    def fill(self, tables: sa.MetaData | None = None) -> None:
        """Two rows in every table, with a value in every column; of these tables and columns, or of all."""
        tables = tables or self.reflected()
        with self.engine.begin() as connection:
            for table in tables.sorted_tables:
                # The first version had a table of reservations, and never a row in it.
                if table.name in ("alembic_version", "installation", "reservation"):
                    continue
                for number in (1, 2):
                    row = {column.name: _value(table.name, column, number) for column in table.columns}
                    if [column.name for column in table.primary_key] == ["tenant_id"]:
                        row["tenant_id"] = f"t{number}"
                    connection.execute(table.insert().values(row))

    def rows(self) -> Rows:
        with self.engine.connect() as connection:
            return {
                table.name: sorted(
                    (dict(row) for row in connection.execute(table.select()).mappings()), key=lambda row: str(row)
                )
                for table in self.reflected().sorted_tables
                if table.name != "alembic_version"
            }

    def shape(self) -> dict[str, Any]:
        """Columns and indexes of every table."""
        look = sa.inspect(self.engine)
        return {
            name: (
                sorted((c["name"], str(c["type"]), c["nullable"]) for c in look.get_columns(name)),
                sorted((i["name"], tuple(i["column_names"]), bool(i["unique"])) for i in look.get_indexes(name)),
            )
            for name in look.get_table_names()
        }

    def execute(self, text: str) -> None:
        with self.engine.begin() as connection:
            connection.exec_driver_sql(text)


def _value(table: str, column: sa.Column[Any], number: int) -> Any:
    if column.foreign_keys or (table == "sandbox" and column.name == "sandbox_id"):
        return f"sbx_{number}"
    kind = column.type
    if isinstance(kind, sa.Boolean):
        return number == 1
    if isinstance(kind, sa.Integer):
        return 1_700_000_000_000 + number
    if isinstance(kind, sa.Float):
        return number + 0.5
    return {"state": "bound", "tenant_id": "default"}.get(column.name, f'{{"{column.name}": "值 {number}"}}')


def lost(before: Rows, after: Rows) -> list[tuple[str, dict[str, Any]]]:
    """Rows that are not there any more with the same values, in the tables and columns that both have."""
    found = []
    for table in before.keys() & after.keys():
        for old in before[table]:
            if not any(all(old[name] == new[name] for name in old.keys() & new.keys()) for new in after[table]):
                found.append((table, old))
    return found


@pytest.fixture(params=["sqlite", "postgresql"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    clock = Clock()
    if request.param == "sqlite":
        path = tmp_path / "corral.db"
        engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.pool.NullPool)

        def to(revision: str, *, down: bool = False) -> None:
            migrate.run_alembic(path, revision, down=down)

        yield Case(SqliteDatabase(path), lambda: SqliteStore(path, clock), engine, to)
    else:
        url = request.getfixturevalue("postgres_server").fresh_database()
        engine = sa.create_engine(
            "postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=sa.pool.NullPool
        )

        def to(revision: str, *, down: bool = False) -> None:
            now = PostgresDatabase(url)._version()
            migrate_postgres.run_alembic(url, revision, down=down, expected=now)

        yield Case(PostgresDatabase(url), lambda: PostgresStore(url, clock), engine, to)
    engine.dispose()


def refusal(store: Store) -> CorralError:
    with pytest.raises(CorralError) as caught:
        asyncio.run(store.open())
    assert caught.value.code == "store_error" and not caught.value.retryable and caught.value.hint
    return caught.value


def test_rows_of_the_older_version_survive_the_way_up_and_back(case: Case) -> None:
    case.at(OLD).fill()
    shape, before = case.shape(), case.rows()
    assert all(len(rows) == 2 for name, rows in before.items() if name not in ("installation", "reservation"))
    assert case.database.upgrade() == (OLD, migrate.HEAD) == (OLD, case.version())
    assert lost(before, case.rows()) == []
    assert case.database.upgrade() == (migrate.HEAD, migrate.HEAD), "again: nothing"
    assert case.database.downgrade(OLD) == (migrate.HEAD, OLD) == (migrate.HEAD, case.version())
    assert case.shape() == shape
    assert before.keys() == case.rows().keys() and lost(before, case.rows()) == []


def test_rows_of_this_version_survive_the_way_down_and_up_as_far_as_the_older_knows_them(case: Case) -> None:
    case.database.upgrade()
    case.fill()
    case.execute("DELETE FROM worker")
    head, rows = case.shape(), case.rows()
    case.database.downgrade(OLD)
    left = case.rows()
    assert left["run"] and lost(rows, left) == []
    case.database.upgrade()
    assert case.shape() == head
    assert lost(left, case.rows()) == []


def test_a_server_of_the_version_before_may_write_beside_the_newer_one(case: Case) -> None:
    """Such a server names the columns that it knows: those that were added need no value."""
    old = case.at(OLD).reflected()
    case.database.upgrade()
    case.fill(old)
    rows = case.rows()
    assert all(len(rows[table.name]) >= 2 for table in old.sorted_tables if table.name in ("run", "sandbox", "exec"))


def test_an_older_database_is_refused_until_it_is_upgraded(case: Case) -> None:
    case.at(OLD)
    refused = refusal(case.make())
    assert "older" in refused.detail and "corral db upgrade" in str(refused.hint)
    assert case.version() == OLD and not case.database.check().good
    case.database.upgrade()

    async def use() -> None:
        store = case.make()
        await store.open()
        assert (await store.submit_run(Bench(store).run(), audit()))[1]
        await store.close()

    asyncio.run(use())
    assert case.database.check().good


def test_a_newer_database_is_refused_by_everything_that_would_change_it(case: Case) -> None:
    case.database.upgrade()
    case.execute("UPDATE alembic_version SET version_num = '9999_pre'")
    assert "newer" in refusal(case.make()).detail
    for change in (case.database.upgrade, lambda: case.database.downgrade(OLD)):
        with pytest.raises(CorralError) as caught:
            change()
        assert "newer" in caught.value.detail and caught.value.hint
    assert case.version() == "9999_pre"


def test_a_foreign_database_is_refused_unchanged(case: Case) -> None:
    case.execute("CREATE TABLE mine (x INTEGER)")
    refusal(case.make())
    for call in (case.database.check, case.database.upgrade, lambda: case.database.downgrade(OLD)):
        with pytest.raises(CorralError) as caught:
            call()
        assert caught.value.code == "store_error" and not caught.value.retryable and caught.value.hint
    assert list(case.shape()) == ["mine"]


def test_a_failed_migration_changes_nothing(case: Case) -> None:
    case.at(OLD).fill()
    shape, rows = case.shape(), case.rows()

    def fail() -> None:
        raise RuntimeError("struck")

    faults.arm("store.migrate.before", fail)
    try:
        with pytest.raises(RuntimeError, match="struck"):
            case.database.upgrade()
    finally:
        faults.arm("store.migrate.before", None)
    assert (case.version(), case.shape(), case.rows()) == (OLD, shape, rows)
    assert case.database.upgrade() == (OLD, migrate.HEAD)


def test_only_an_older_version_is_gone_down_to(case: Case) -> None:
    case.database.upgrade()
    for wrong in (migrate.HEAD, "base", "0000", "-1", ""):
        with pytest.raises(CorralError) as caught:
            case.database.downgrade(wrong)
        assert caught.value.code == "invalid_value" and OLD in str(caught.value.hint)
    assert case.version() == migrate.HEAD


def test_an_empty_database_is_told_as_empty(case: Case) -> None:
    health = case.database.check()
    assert health.version is None and not health.good and not health.rows
    assert case.database.upgrade() == (None, migrate.HEAD)
    health = case.database.check()
    assert health.good and health.rows["run"] == 0


def test_check_counts_rows_and_names_what_is_wrong(case: Case) -> None:
    async def fill() -> None:
        store = case.make()
        await store.open()
        bench = Bench(store)
        await bench.leased()
        await store.submit_run(bench.run(), audit())
        await store.close()

    asyncio.run(fill())
    health = case.database.check()
    assert health.good and (health.rows["run"], health.rows["sandbox"], health.rows["sandbox_event"]) == (1, 1, 2)
    case.execute("DELETE FROM sandbox_lease")
    case.execute("UPDATE run SET state = 'finished'")
    health = case.database.check()
    assert not health.good
    assert set(health.problems) == {"1 sandboxes without a lease", "1 finished runs without a result"}


def test_a_server_at_work_is_not_left_behind_by_a_downgrade(postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh_database(tables=True)

    async def beat(ttl_ms: int) -> None:
        store = PostgresStore(url)
        await store.open()
        await store.beat("w_1", ttl_ms, {})
        await store.close()

    asyncio.run(beat(60_000))
    with pytest.raises(CorralError) as caught:
        PostgresDatabase(url).downgrade(OLD)
    assert "w_1" in caught.value.detail and PostgresDatabase(url).check().version == migrate.HEAD
    asyncio.run(beat(0))
    assert PostgresDatabase(url).downgrade(OLD) == (migrate.HEAD, OLD)


async def used(store: Store) -> None:
    await store.open()
    bench = Bench(store)
    await bench.leased()
    for number in range(20):
        await store.submit_run(bench.run(f"run_{number}", request={"code": "print('你好')"}), audit())


async def test_a_backup_of_a_server_at_work_is_restored(
    case: Case, tmp_path: Path, postgres_server: PostgresServer
) -> None:
    store = case.make()
    await used(store)
    copy = tmp_path / "the copy"
    writing = [asyncio.ensure_future(store.add_audit(audit())) for _ in range(50)]
    size = await asyncio.to_thread(case.database.backup, str(copy))
    await asyncio.gather(*writing)
    expected = await store.open_runs()
    installation = await store.installation_id()
    await store.close()
    assert size == copy.stat().st_size > 0 and stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("the copy")] == ["the copy"]
    with pytest.raises(CorralError) as caught:
        await asyncio.to_thread(case.database.backup, str(copy))
    assert caught.value.code == "invalid_value" and "exists" in caught.value.detail

    if isinstance(case.database, SqliteDatabase):
        place = tmp_path / "restored" / "corral.db"
        place.parent.mkdir()
        shutil.copy(copy, place)
        restored: Store = SqliteStore(place, Clock())
        assert SqliteDatabase(place).check().good
    else:
        url = postgres_server.fresh_database()
        command = ["pg_restore", "--no-owner", "--exit-on-error", "--single-transaction", f"--dbname={url}", str(copy)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        restored = PostgresStore(url, Clock())
        assert PostgresDatabase(url).check().good
    await restored.open()
    assert await restored.open_runs() == expected and await restored.installation_id() == installation
    assert (await restored.submit_run(Bench(restored).run("run_new"), audit()))[1]
    await restored.add_audit(audit())
    await restored.close()


def test_a_backup_that_fails_leaves_nothing(
    tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corral.db"
    for empty in (SqliteDatabase(path), PostgresDatabase(postgres_server.fresh_database())):
        with pytest.raises(CorralError):
            empty.backup(str(tmp_path / "copy"))
    SqliteDatabase(path).upgrade()
    with pytest.raises(CorralError) as caught:
        SqliteDatabase(path).backup(str(tmp_path / "no" / "copy"))
    assert caught.value.code == "invalid_value" and caught.value.field == "FILE"
    database = PostgresDatabase(postgres_server.fresh_database(tables=True))
    broken = tmp_path / "pg_dump"
    broken.write_text("#!/bin/sh\necho 'server version mismatch' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("corral.adapters.store.databases._pg_dump", lambda: str(broken))
    with pytest.raises(CorralError) as caught:
        database.backup(str(tmp_path / "copy"))
    assert "mismatch" in caught.value.detail and caught.value.hint
    monkeypatch.undo()
    monkeypatch.setattr("corral.adapters.store.databases.Path.glob", lambda self, pattern: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(CorralError) as caught:
        database.backup(str(tmp_path / "copy"))
    assert "pg_dump is not installed" in caught.value.detail and caught.value.hint
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("copy")]


def test_a_backup_gets_the_password_without_showing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tcp=True) as server:
        name = server.name_of(server.fresh_database(tables=True))
        words: list[str] = []
        run = subprocess.run

        def seen(command: list[str], **more: Any) -> Any:
            words.extend(command)
            return run(command, **more)

        monkeypatch.setattr("corral.adapters.store.databases.subprocess.run", seen)
        assert PostgresDatabase(server.url(name, tcp=True)).backup(str(tmp_path / "copy")) > 0
        assert words and not any(PASSWORD in word or "pass%3A" in word for word in words)
        words.clear()
        more = f"{server.url(name, tcp=True)}?sslpassword=of-the-key"
        assert PostgresDatabase(more).backup(str(tmp_path / "another")) > 0
        assert words and not any("of-the-key" in word for word in words)
        with pytest.raises(CorralError) as caught:
            PostgresDatabase(f"{more}&service=mine").backup(str(tmp_path / "third"))
        assert "of-the-key" not in f"{caught.value} {caught.value.hint}"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "corral.db"
    SqliteDatabase(path).upgrade()
    with sqlite3.connect(path) as connection:
        connection.executescript("PRAGMA foreign_keys = OFF; PRAGMA writable_schema = ON;")
        connection.execute("INSERT INTO sandbox_lease VALUES ('sbx_gone', NULL, 0, 0, 0, 0, NULL)")
    connection.close()
    health = SqliteDatabase(path).check()
    assert "1 leases of no sandbox" in health.problems and not health.good
