"""The schema's version: look without Alembic, make the tables with it.

`ensure` is what the store calls: one plain query when the database is current. Only an empty database costs the import of Alembic
(about a second). Making it is one transaction under a file lock: of many processes one does it, and a killed one leaves it empty.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral import faults
from corral.errors import CorralError

REVISIONS = ("0001_pre", "0002_pre")
"""All revisions, oldest first; the last one is what this version speaks. A test compares them with Alembic's own list."""

HEAD = REVISIONS[-1]
_LOCK_WAIT_S = 60.0
_ROOM = 1024 * 1024


@dataclass(frozen=True)
class Words:
    """What the hints of a kind of database say."""

    another: str
    upgrade: str
    backup: str


SQLITE = Words("another CORRAL_STATE_DIR", "corral db upgrade", "corral db backup FILE")


def ensure(path: Path) -> None:
    """Make the tables of an empty (or absent) database; `store_error` (not retryable) for another version or a foreign file."""
    if version(path) == HEAD:
        return
    with _lock(path):
        found = version(path)
        if found is None:
            _create(path)
        elif found != HEAD:
            raise refusal(str(path), found, SQLITE)


def version(path: Path) -> str | None:
    """The revision that the database has, None if it is empty. Raises `store_error` if it is no database of ours."""
    try:
        if path.stat().st_size == 0:
            return None
    except FileNotFoundError:
        return None
    try:
        connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
        try:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            if not tables:
                return None
            if ("alembic_version",) not in tables:
                raise _foreign(path, "it has tables, but none that says its version")
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        raise CorralError("store_error", f"{path} cannot be read: {error}", hint=_without_room(path)) from error
    except sqlite3.DatabaseError as error:
        raise _foreign(path, str(error)) from error
    if len(rows) != 1:
        raise _foreign(path, f"it names {len(rows)} versions")
    return str(rows[0][0])


def _without_room(path: Path) -> str | None:
    """A full file system is an "I/O error" in the words of SQLite, which needs a little room even to read."""
    try:
        room = os.statvfs(path.parent)
    except OSError:
        return None
    free = room.f_bfree if os.geteuid() == 0 else room.f_bavail
    return f"the file system of {path.parent} is full: free some space on it" if free * room.f_frsize < _ROOM else None


def _foreign(path: Path, why: str) -> CorralError:
    return foreign(str(path), why, SQLITE)


def foreign(where: str, why: str, words: Words) -> CorralError:
    """It is no database of ours."""
    return CorralError(
        "store_error",
        f"{where} is not a database of Corral: {why}",
        hint=f"move it away or choose {words.another}",
        retryable=False,
    )


def refusal(where: str, found: str, words: Words) -> CorralError:
    """It is one of ours, of another version than this."""
    if found in REVISIONS:
        return CorralError(
            "store_error",
            f"{where} is of the older version {found}; this Corral needs {HEAD}",
            hint=f"upgrade it: {words.upgrade} ({words.backup} keeps a copy first), or choose {words.another}",
            retryable=False,
        )
    return CorralError(
        "store_error",
        f"{where} is of version {found}, which this Corral ({HEAD}) does not know; a newer one made it",
        hint=f"use the newer Corral, or choose {words.another}",
        retryable=False,
    )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock file beside the database. It stays there: removing a lock file races with those who wait on it."""
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CorralError(
                        "store_error", f"another process has been preparing {path} for {_LOCK_WAIT_S:.0f} s"
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _create(path: Path) -> None:
    # Made by us first: SQLite would give it the umask's mode, and the files beside it take theirs from it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")  # is kept in the file; not possible inside a transaction
    finally:
        connection.close()
    run_alembic(path)


def alembic(connection: Any, revision: str, *, down: bool = False) -> None:
    """Migrate inside the open transaction of a SQLAlchemy connection."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    (command.downgrade if down else command.upgrade)(config, revision)


def run_alembic(path: Path, revision: str = "head", *, down: bool = False) -> None:
    """Bring the database to `revision` in one transaction. The caller sees to it that nobody else does the same."""
    import sqlalchemy

    def connect() -> sqlite3.Connection:
        # Autocommit, so that the driver does not end our transaction around DDL, as it does by default.
        return sqlite3.connect(path, timeout=30.0, isolation_level=None)

    engine = sqlalchemy.create_engine("sqlite://", creator=connect, poolclass=sqlalchemy.pool.NullPool)

    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    sqlalchemy.event.listen(engine, "begin", begin)
    try:
        with engine.begin() as connection:
            alembic(connection, revision, down=down)
            faults.point("store.migrate.before")
    except sqlalchemy.exc.SQLAlchemyError as error:
        told = f"the tables in {path} cannot be made: {error}"
        raise CorralError("store_error", told, hint=_without_room(path)) from error
    finally:
        engine.dispose()
