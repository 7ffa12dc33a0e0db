"""Databases as they are found: a role's own defaults, extensions, rights that are missing, schemas that are not there."""

from __future__ import annotations

import asyncio
import threading
from urllib.parse import quote

import psycopg
import pytest

from corral.adapters.store import migrate, migrate_postgres
from corral.adapters.store.databases import PostgresDatabase
from corral.adapters.store.postgres import PostgresStore
from corral.adapters.store.postgres_hold import PostgresHold
from corral.errors import CorralError
from corral.testing.store import refused
from postgres_server import PostgresServer, postgres_server

__all__ = ["postgres_server"]


def with_options(url: str, options: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}options={quote(options)}"


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


async def opened(url: str) -> None:
    store = PostgresStore(url)
    await store.open()
    await store.close()


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
async def test_the_tables_are_made_once_whatever_isolation_the_role_has(
    postgres_server: PostgresServer, level: str
) -> None:
    url = with_options(
        postgres_server.fresh_database(), f"-cdefault_transaction_isolation={level.replace(' ', chr(92) + ' ')}"
    )
    await asyncio.gather(*(opened(url) for _ in range(6)))
    assert PostgresDatabase(url).check().version == migrate.HEAD


async def test_a_role_that_only_reads_by_default_gets_its_tables(
    postgres_server: PostgresServer,
) -> None:
    url = postgres_server.fresh_database()
    await opened(with_options(url, "-cdefault_transaction_read_only=on"))
    assert PostgresDatabase(url).check().version == migrate.HEAD


async def test_a_database_with_an_extension_only_is_an_empty_one(postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh_database()
    run(url, "CREATE EXTENSION pg_stat_statements")
    assert PostgresDatabase(url).check().version is None
    await opened(url)
    assert PostgresDatabase(url).check().version == migrate.HEAD


async def test_one_with_other_tables_beside_an_extension_is_not(postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh_database()
    run(url, "CREATE EXTENSION pg_stat_statements", "CREATE TABLE mine (id int)")
    error = await refused("store_error", opened(url))
    assert "not a database of Corral" in str(error) and not error.retryable


async def test_a_search_path_that_leads_nowhere_is_told(postgres_server: PostgresServer) -> None:
    url = with_options(postgres_server.fresh_database(), "-csearch_path=nowhere")
    error = await refused("store_error", opened(url))
    assert "search_path" in str(error) and not error.retryable


async def test_a_user_who_may_not_make_tables_is_told_in_one_line(postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh_database()
    run(url, "CREATE ROLE guest LOGIN", "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    try:
        error = await refused("store_error", opened(url.replace("corral@", "guest@", 1)))
        assert "permission denied" in str(error) and "own" in str(error.hint) and not error.retryable
        assert "\n" not in str(error) and "CREATE TABLE" not in str(error)
    finally:
        run(url, "DROP ROLE guest")


def test_a_downgrade_is_refused_while_an_owner_that_is_no_worker_drives_it(postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh_database(tables=True)
    hold = PostgresHold(url, shared=False, lost=lambda error: None)
    hold.take()
    try:
        with pytest.raises(CorralError) as caught:
            PostgresDatabase(url).downgrade(migrate.REVISIONS[0])
        assert caught.value.code == "state_locked"
    finally:
        hold.close()
    assert PostgresDatabase(url).downgrade(migrate.REVISIONS[0]) == (migrate.HEAD, migrate.REVISIONS[0])


def test_an_upgrade_behind_a_long_reader_holds_up_nobody_for_long(postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh_database()
    migrate_postgres.run_alembic(url, migrate.REVISIONS[0], expected=None)
    with psycopg.connect(url) as reader, psycopg.connect(url, autocommit=True) as server:
        reader.execute("SELECT count(*) FROM run")  # as a backup: its transaction stays open
        failed: list[CorralError] = []

        def upgrade() -> None:
            try:
                PostgresDatabase(url).upgrade()
            except CorralError as error:
                failed.append(error)

        thread = threading.Thread(target=upgrade)
        thread.start()
        server.execute("SET lock_timeout = '30s'")
        while thread.is_alive():  # a server that goes on; it fails if it has to wait as long as that
            server.execute("SELECT count(*) FROM run")
            thread.join(0.05)
        assert failed and failed[0].retryable and "backup" in str(failed[0].hint)
    assert PostgresDatabase(url).upgrade() == (migrate.REVISIONS[0], migrate.HEAD)
