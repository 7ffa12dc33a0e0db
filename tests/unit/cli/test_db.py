"""`corral db` on a state directory: what it prints, its statuses, and that it never works beside an owner."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path

import pytest

from corral.adapters.store import migrate
from corral.cli import serve
from corral.client.embedded import take_lock

from .conftest import Call

OLD = migrate.REVISIONS[0]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    monkeypatch.setenv("CORRAL_STATE_DIR", str(state))
    monkeypatch.delenv("CORRAL_DATABASE_URL", raising=False)
    return state


def test_an_empty_one_is_made_and_then_good(corral: Call, state: Path) -> None:
    empty = corral("db", "check", "--json")
    assert empty.status == 1 and empty.json["version"] is None and not empty.json["good"]
    made = corral("db", "upgrade", "--json")
    assert (made.status, made.json) == (0, {"before": None, "version": migrate.HEAD})
    good = corral("db", "check", "--json")
    assert good.status == 0 and good.json["good"] and good.json["problems"] == []
    assert good.json["database"] == str(state / "corral.db") and good.json["rows"]["run"] == 0
    assert good.json["rows"]["api_key"] == good.json["rows"]["run_queue"] == 0
    assert corral("db", "check").status == 0


def test_an_older_one_is_upgraded_and_brought_back(corral: Call, state: Path) -> None:
    migrate.run_alembic(state / "corral.db", OLD)
    old = corral("db", "check", "--json")
    assert (old.status, old.json["version"], old.json["needed"]) == (1, OLD, migrate.HEAD)
    assert corral("db", "upgrade", "--json").json == {"before": OLD, "version": migrate.HEAD}
    refused = corral("db", "downgrade", "--to", OLD, "--json")
    assert refused.status == 2 and "--lose-data" in refused.json["error"]["hint"]
    back = corral("db", "downgrade", "--to", OLD, "--lose-data", "--json")
    assert (back.status, back.json) == (0, {"before": migrate.HEAD, "version": OLD})


def test_it_is_not_changed_beside_an_owner(
    corral: Call, state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    corral("db", "upgrade")
    lock = take_lock(str(state))
    assert lock is not None
    monkeypatch.setattr(serve, "PATIENCE_S", 0.05)
    try:
        for words in (("upgrade",), ("downgrade", "--to", OLD, "--lose-data")):
            refused = corral("db", *words, "--json")
            assert refused.status == 125 and refused.json["error"]["code"] == "state_locked"
        assert corral("db", "check").status == 0, "looking and copying are free"
        assert corral("db", "backup", str(tmp_path / "copy")).status == 0
    finally:
        os.close(lock)


def test_a_backup_is_a_database(corral: Call, state: Path, tmp_path: Path) -> None:
    corral("db", "upgrade")
    copy = tmp_path / "copy"
    told = corral("db", "backup", str(copy), "--json")
    assert told.json == {"file": str(copy), "bytes": copy.stat().st_size}
    with sqlite3.connect(copy) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(migrate.HEAD,)]
    connection.close()
    again = corral("db", "backup", str(copy), "--json")
    assert again.status != 0 and "exists" in again.json["error"]["detail"]


def test_a_damaged_one_is_told_with_status_1(corral: Call, state: Path) -> None:
    corral("db", "upgrade")
    with sqlite3.connect(state / "corral.db") as connection:
        connection.execute("INSERT INTO sandbox_lease VALUES ('sbx_gone', NULL, 0, 0, 0, 0, NULL)")
    connection.close()
    told = corral("db", "check")
    assert told.status == 1 and b"leases of no sandbox" in told.out


def test_a_url_that_leads_nowhere_is_refused_without_its_password(corral: Call, state: Path, tmp_path: Path) -> None:
    url = f"postgresql://me:geheim@/corral?host={tmp_path}"
    refused = corral("db", "check", "--database-url", url, "--json")
    assert refused.status == 125 and refused.json["error"]["code"] == "store_error"
    assert "geheim" not in json.dumps(refused.json)
