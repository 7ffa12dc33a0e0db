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
from .postgres_session import connected, described, refusal

_LOCK = int.from_bytes(b"corral_m", "big")
_LOCK_WAIT_S = 60
_TABLE_WAIT_S = 5
"""How long a table is waited for: whoever comes after us to it waits behind us, and servers that go on wait no longer than 10 s."""


def ensure(url: str) -> None:
    """Make the tables of an empty database; `store_error` (not retryable) for another version or a foreign database."""
    with connection(url) as opened:
        _check_sessions(opened, url)
        found = version(opened, url)
    if found is None:
        run_alembic(url, expected=None)
        with connection(url) as opened:
            found = version(opened, url)
    if found != migrate.HEAD:
        raise migrate.refusal(described(url), str(found), POSTGRES)


POSTGRES = migrate.Words(
    another="another database",
    upgrade="corral db upgrade --database-url URL",
    backup="corral db backup --database-url URL FILE",
)


def connection(url: str) -> psycopg.Connection[Any]:
    """A connection outside the store's own; `store_error` if there is none to be had."""
    try:
        return connected(url)
    except psycopg.Error as error:
        raise refusal(error, described(url)) from error


def _check_sessions(opened: psycopg.Connection[Any], url: str) -> None:
    """Refuse a pooler that gives the session of one client to the next: locks, settings and prepared statements would go astray."""
    backend = _backend(opened)
    if backend == opened.info.backend_pid:
        return  # nobody stands between
    with connection(url) as other:
        try:
            with other.transaction():
                kept = _backend(other) != backend
        except (
            psycopg.errors.ProtocolViolation
        ):  # one that gives it to the next after each statement has no transactions
            kept = False
    if not kept:
        raise CorralError(
            "store_error",
            f"{described(url)} is reached through a pooler that keeps no sessions",
            hint="give the database URL of PostgreSQL itself, or let the pooler keep sessions (PgBouncer: pool_mode = session)",
            retryable=False,
        )


def _backend(opened: psycopg.Connection[Any]) -> int:
    """The server's process, which a pooler does not tell."""
    [(backend,)] = opened.execute("SELECT pg_backend_pid()").fetchall()
    return int(backend)


def version(opened: psycopg.Connection[Any], url: str) -> str | None:
    """The revision that the database has, None if it is empty. Raises `store_error` if it is no database of ours."""
    where = described(url)
    [(encoding, schema)] = opened.execute("SELECT current_setting('server_encoding'), current_schema()").fetchall()
    if encoding != "UTF8":
        raise migrate.foreign(where, f"its encoding is {encoding}, not UTF8", POSTGRES)
    if schema is None:
        raise CorralError(
            "store_error",
            f"{where} has no schema for tables: none of its search_path is there",
            hint="CREATE SCHEMA, or another search_path of the user or the URL",
            retryable=False,
        )
    tables = {
        row[0]
        for row in opened.execute(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p', 'v')"
            # What an extension has brought (pg_stat_statements is in many a new database) is nobody's data.
            " AND NOT EXISTS (SELECT 1 FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid"
            " AND d.deptype = 'e')"
        )
    }
    if not tables:
        return None
    if "alembic_version" not in tables:
        raise migrate.foreign(where, "it has tables, but none that says its version", POSTGRES)
    rows = opened.execute("SELECT version_num FROM alembic_version").fetchall()
    if not rows and tables == {"alembic_version"}:
        return None
    if len(rows) != 1:
        raise migrate.foreign(where, f"it names {len(rows)} versions", POSTGRES)
    return str(rows[0][0])


def run_alembic(url: str, revision: str = "head", *, down: bool = False, expected: str | None) -> None:
    """Bring the database to `revision` in one transaction, alone; nothing if it is not of the `expected` version any more."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://", creator=lambda: _raw(url), poolclass=sqlalchemy.pool.NullPool
    )
    try:
        with engine.begin() as transaction:
            transaction.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_WAIT_S}s'")
            transaction.exec_driver_sql("SET LOCAL statement_timeout = 0")
            transaction.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
            transaction.exec_driver_sql(f"SET LOCAL lock_timeout = '{_TABLE_WAIT_S}s'")
            raw: Any = transaction.connection.dbapi_connection
            if version(raw, url) != expected:
                return  # somebody was quicker
            migrate.alembic(transaction, revision, down=down)
            faults.point("store.migrate.before")
    except sqlalchemy.exc.SQLAlchemyError as error:
        where = described(url)
        cause = getattr(error, "orig", None)
        if isinstance(cause, psycopg.errors.LockNotAvailable):
            told = f"the tables in {where} cannot be changed: somebody else has had them for too long"
            raise CorralError("store_error", told, hint="does a backup run? nothing has changed: try again") from error
        if isinstance(cause, psycopg.Error):
            why = refusal(cause, where)
            told = f"the tables cannot be changed: {why.detail}"
            raise CorralError("store_error", told, hint=why.hint, retryable=why.retryable) from error
        raise CorralError("store_error", f"the tables in {where} cannot be changed: {error}") from error
    finally:
        engine.dispose()


def _raw(url: str) -> psycopg.Connection[Any]:
    opened = connection(url)
    opened.autocommit = False
    # Whatever the role's defaults are: after waiting for another that migrates, what that one did has to be seen.
    opened.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    opened.read_only = False
    return opened
