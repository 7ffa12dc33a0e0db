"""The store on SQLite: one writer thread, a few readers, write-ahead log.

A committed transaction survives `kill -9` of the process at any instant. Against loss of *power* the log is synced at checkpoints only
(`synchronous = NORMAL`): the last commits before it may be missing, the file is never damaged. One file belongs to one server; others
(`doctor`) may read it. How transactions come to the threads: `threaded`.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from corral import faults
from corral.errors import CorralError

from . import installation, migrate
from .rows import conflict
from .threaded import Jobs, StoreThread, ThreadedStore
from .transacting import Tx

T = TypeVar("T")

READERS = 2
_BUSY_S = 10.0
_UNIQUE = (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_ERROR)


class _SqliteTx:
    """One open transaction of a connection. Only one writes at a time, so nothing needs a lock."""

    skip_locked = ""
    for_update = ""

    def __init__(self, connection: sqlite3.Connection, now: int) -> None:
        self._execute = connection.execute
        self.now = now

    def rows(self, text: str, params: Mapping[str, Any] = {}) -> list[tuple[Any, ...]]:
        try:
            return self._execute(text, params).fetchall()
        except UnicodeEncodeError:
            # What is written was checked before, so this is a key to look for, and no text in the database equals it.
            return self._execute(text, {name: _unfindable(value) for name, value in params.items()}).fetchall()

    def send(self, text: str, params: Mapping[str, Any] = {}) -> None:
        self.rows(text, params)


def _unfindable(value: Any) -> Any:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) and not value.isascii() else value


def _translate(error: sqlite3.Error) -> CorralError:
    code = getattr(error, "sqlite_errorcode", 0) or 0
    if code in _UNIQUE:
        return conflict(f"it exists already ({error})")
    if isinstance(error, sqlite3.IntegrityError) or code & 0xFF in _BROKEN:
        return CorralError("store_error", f"the database refuses: {error}", retryable=False)
    return CorralError("store_error", f"the database does not answer: {error}")


class _Worker(StoreThread):
    """A connection to the file, for writing (`BEGIN IMMEDIATE`) or for reading (`BEGIN`)."""

    def __init__(self, name: str, path: Path, clock: Callable[[], int], jobs: Jobs, begin: str) -> None:
        super().__init__(name, jobs)
        self._path = path
        self._clock = clock
        self._begin = begin
        self._connection: sqlite3.Connection | None = None

    def translated(self, error: BaseException) -> BaseException:
        return _translate(error) if isinstance(error, sqlite3.Error) else error

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error:
                pass

    def connect(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=True, cached_statements=256
            )
            try:
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("PRAGMA temp_store = MEMORY")
                if self._begin == "BEGIN":
                    connection.execute("PRAGMA query_only = ON")
            except sqlite3.Error:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def transact(self, work: Callable[[Tx], T]) -> T:
        connection = self.connect()
        connection.execute(self._begin)
        writes = self._begin != "BEGIN"
        try:
            result = work(_SqliteTx(connection, self._clock()))
            if writes:
                faults.point("store.commit.before")
            connection.execute("COMMIT")
        except BaseException:
            self._roll_back(connection)
            raise
        if writes:
            faults.point("store.commit.after")
        return result

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            self.disconnect()  # closing rolls back; the next job gets a new connection


class SqliteStore(ThreadedStore[_Worker]):
    """`corral.ports.store.Store` on one SQLite file; see the module docstring.

    `clock` gives Unix epoch milliseconds and is called in the store's threads, once per transaction. `new_id(prefix)` makes the
    installation id; 128 random bits without it.
    """

    def __init__(self, path: str | Path, clock: Callable[[], int], new_id: Callable[[str], str] | None = None) -> None:
        super().__init__()
        self._path = Path(path)
        self._clock = clock
        self._new_id = new_id

    def _made(self, writes: Jobs, reads: Jobs) -> Sequence[tuple[_Worker, Jobs]]:
        writer = _Worker("store-writer", self._path, self._clock, writes, "BEGIN IMMEDIATE")
        readers = [_Worker(f"store-reader-{n}", self._path, self._clock, reads, "BEGIN") for n in range(READERS)]
        return [(writer, writes), *((reader, reads) for reader in readers)]

    def _prepare(self, thread: _Worker) -> str:
        proposal = self._new_id("org") if self._new_id is not None else secrets.token_hex(16)
        try:
            migrate.ensure(self._path)
        except OSError as error:
            raise CorralError(
                "store_error",
                f"{self._path} cannot be opened: {error.strerror or error}",
                hint="does the state directory exist, and may this user write to it?",
                retryable=False,
            ) from error
        return thread.transact(lambda tx: installation.installation_id(tx, proposal))
