"""The schema's version in a PostgreSQL database: look without Alembic, make the tables with it, one process at a time.

All of a migration is one transaction that holds an advisory lock: of many replicas that start together one does it, and a killed one
leaves the database as it was.
"""

from __future__ import annotations

from typing import Any

import psycopg

from corral import faults
from corral.errors import CorralError

from . import migrate
from .postgres_session import connected, described

_LOCK = int.from_bytes(b"corral_m", "big")
_LOCK_WAIT_S = 60


def ensure(url: str) -> None:
    """Make the tables of an empty database; `store_error` (not retryable) for another version or a foreign database."""
    with _connection(url) as connection:
        found = version(connection, url)
    if found is None:
        run_alembic(url, only_empty=True)
        with _connection(url) as connection:
            found = version(connection, url)
    if found != migrate.HEAD:
        raise migrate.refusal(described(url), str(found), POSTGRES)


POSTGRES = migrate.Words(
    another="another database",
    upgrade="corral db upgrade --database-url URL",
    backup="corral db backup --database-url URL FILE",
)


def _connection(url: str) -> psycopg.Connection[Any]:
    try:
        return connected(url)
    except psycopg.Error as error:
        from .postgres import _translate

        raise _translate(error, described(url)) from error


def version(connection: psycopg.Connection[Any], url: str) -> str | None:
    """The revision that the database has, None if it is empty. Raises `store_error` if it is no database of ours."""
    where = described(url)
    [(encoding,)] = connection.execute("SELECT current_setting('server_encoding')").fetchall()
    if encoding != "UTF8":
        raise migrate.foreign(where, f"its encoding is {encoding}, not UTF8", POSTGRES)
    tables = {
        row[0]
        for row in connection.execute(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v')"
        )
    }
    if not tables:
        return None
    if "alembic_version" not in tables:
        raise migrate.foreign(where, "it has tables, but none that says its version", POSTGRES)
    rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    if not rows and tables == {"alembic_version"}:
        return None
    if len(rows) != 1:
        raise migrate.foreign(where, f"it names {len(rows)} versions", POSTGRES)
    return str(rows[0][0])


def run_alembic(url: str, revision: str = "head", *, down: bool = False, only_empty: bool = False) -> None:
    """Bring the database to `revision` in one transaction, alone. `only_empty`: unless somebody else has made the tables meanwhile."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: _raw(url), poolclass=sqlalchemy.pool.NullPool
    )
    try:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_WAIT_S}s'")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
            raw: Any = connection.connection.dbapi_connection
            if only_empty and version(raw, url) is not None:
                return
            migrate.alembic(connection, revision, down=down)
            faults.point("store.migrate.before")
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise CorralError("store_error", f"the tables in {described(url)} cannot be changed: {error}") from error
    finally:
        engine.dispose()


def _raw(url: str) -> psycopg.Connection[Any]:
    connection = _connection(url)
    connection.autocommit = False
    return connection
