"""The tables: made once, as the records and the mission want them; other databases are refused."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from corral.adapters.store import migrate, rows
from corral.adapters.store.sqlite import SqliteStore
from corral.errors import CorralError

COLUMNS = {
    "sandbox_instance": "sandbox_id tenant_id user_id session_id runtime_provider runtime_instance_id resource_class"
    " template_id state created_at last_active_at expires_at version tainted",
    "sandbox_lease": "sandbox_id lease_owner lease_version acquired_at heartbeat_at expires_at request_digest",
    "sandbox_environment": "sandbox_id base_image_digest dependency_hash workspace_id snapshot_id environment_version"
    " dirty_level",
    "sandbox_event": "event_id sandbox_id event_type old_state new_state request_id timestamp metadata",
    "sandbox_allocation": "task_id planner_input_hash recommended_class actual_class reason confidence cpu memory"
    " duration peak_cpu peak_memory oom",
}
TABLES = [
    "run",
    "exec",
    "instance",
    "sandbox_command",
    "snapshot",
    "layer",
    "template",
    "workspace",
    "pool",
    "node",
    "tenant",
    "user",
    "api_key",
    "secret",
    "reservation",
    "idempotency_key",
    "audit",
    "artifact",
    "usage",
]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "corral.db"
    migrate.ensure(path)
    return path


def columns(path: Path, table: str) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]
    finally:
        connection.close()


def execute(path: Path, text: str) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.execute(text)
        connection.commit()
    finally:
        connection.close()


@pytest.mark.parametrize("table", sorted(COLUMNS))
def test_the_named_tables_have_exactly_their_columns(database: Path, table: str) -> None:
    assert columns(database, table) == COLUMNS[table].split()


@pytest.mark.parametrize("table", TABLES)
def test_every_table_of_the_design_exists(database: Path, table: str) -> None:
    assert columns(database, table)


@pytest.mark.parametrize(
    "shape",
    [rows.RUN, rows.SANDBOX, rows.LEASE, rows.INSTANCE, rows.EXEC, rows.COMMAND, rows.EVENT, rows.AUDIT],
    ids=lambda shape: shape.table,
)
def test_a_record_and_its_table_have_the_same_columns(database: Path, shape: rows.Shape) -> None:
    own = {"command_seq"} if shape is rows.COMMAND else set()
    assert set(columns(database, shape.table)) == set(shape.columns) | own


def test_the_revisions_are_those_of_alembic() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrate.__file__).parent / "migrations"))
    script = ScriptDirectory.from_config(config)
    known = [revision.revision for revision in script.walk_revisions()][::-1]
    assert known == list(migrate.REVISIONS) and script.get_current_head() == migrate.HEAD


def test_the_database_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "corral.db"
    old = os.umask(0)
    try:
        migrate.ensure(path)
    finally:
        os.umask(old)
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}


def test_a_current_database_costs_neither_alembic_nor_a_lock(database: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from corral.adapters.store import migrate, sqlite, memory;"
        "import fcntl; fcntl.flock = None; migrate.ensure(Path(sys.argv[1]));"
        "assert not {'sqlalchemy', 'alembic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(database)], check=True, timeout=60)


def refusal(path: Path) -> CorralError:
    async def attempt() -> None:
        store = SqliteStore(path, lambda: 1)
        await store.open()
        await store.close()

    with pytest.raises(CorralError) as caught:
        asyncio.run(attempt())
    assert caught.value.code == "store_error" and not caught.value.retryable
    assert caught.value.hint
    return caught.value


def test_a_newer_database_is_refused_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "corral.db"
    migrate.ensure(path)
    execute(path, "UPDATE alembic_version SET version_num = '9999_pre'")
    assert "newer" in refusal(path).detail
    assert migrate.version(path) == "9999_pre"


def test_an_older_database_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corral.db"
    migrate.ensure(path)
    monkeypatch.setattr(migrate, "REVISIONS", (*migrate.REVISIONS, "9999_pre"))
    monkeypatch.setattr(migrate, "HEAD", "9999_pre")
    assert "older" in refusal(path).detail


def test_foreign_files_are_refused_unchanged(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    execute(other, "CREATE TABLE mine (x)")
    refusal(other)
    assert columns(other, "mine") == ["x"] and not columns(other, "run")
    text = tmp_path / "text.db"
    text.write_bytes(b"this is no database, but long enough for its header" * 40)
    before = text.read_bytes()
    refusal(text)
    assert text.read_bytes() == before


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    assert "corral.db" in refusal(tmp_path / "no" / "corral.db").detail


def test_a_full_file_system_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corral.db"
    path.mkdir()  # whatever it is that cannot be read
    with pytest.raises(CorralError) as caught:
        migrate.version(path)
    assert caught.value.hint is None
    real = os.statvfs(tmp_path)
    full = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 0, 0, *tuple(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda place: full)
    with pytest.raises(CorralError) as caught:
        migrate.version(path)
    assert (
        caught.value.code == "store_error"
        and caught.value.hint == f"the file system of {tmp_path} is full: free some space on it"
    )


def test_a_path_may_hold_any_character(tmp_path: Path) -> None:
    directory = tmp_path / "状态 100%;?#\udcff"
    directory.mkdir()
    migrate.ensure(directory / "corral.db")
    assert migrate.version(directory / "corral.db") == migrate.HEAD
