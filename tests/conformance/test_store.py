"""Every store keeps what the port promises."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from corral.adapters.store.memory import MemoryStore
from corral.adapters.store.migrate import ensure
from corral.adapters.store.postgres import PostgresStore
from corral.adapters.store.sqlite import SqliteStore
from corral.testing.pytest_suites import StoreConformance
from corral.testing.store import MakeStore
from postgres_server import PostgresServer, postgres_server

__all__ = ["postgres_server"]


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, made once: the migration has tests of its own."""
    path = tmp_path_factory.mktemp("store") / "empty.db"
    ensure(path)
    return path


class TestSqliteStore(StoreConformance):
    @pytest.fixture
    def make_store(self, tmp_path: Path, empty_database: Path) -> MakeStore:
        numbers = itertools.count()

        def make(clock):
            path = tmp_path / f"corral-{next(numbers)}.db"
            shutil.copy(empty_database, path)
            return SqliteStore(path, clock)

        return make


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return MemoryStore


class TestPostgresStore(StoreConformance):
    @pytest.fixture
    def make_store(self, postgres_server: PostgresServer) -> MakeStore:
        return lambda clock: PostgresStore(postgres_server.fresh_database(tables=True), clock)
