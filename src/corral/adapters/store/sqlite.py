"""The store on SQLite: one writer thread, a few readers, write-ahead log.

A committed transaction survives `kill -9` of the process at any instant. Against loss of *power* the log is synced at checkpoints only
(`synchronous = NORMAL`): the last commits before it may be missing, the file is never damaged. One file belongs to one server; others
(`doctor`) may read it.

A transaction is one hop: the caller's values are checked and encoded in its own thread, the writer runs `BEGIN IMMEDIATE` ... `COMMIT`,
and the result comes back by `call_soon_threadsafe`. A caller that is cancelled leaves its transaction running; whether it happened
must then be read, as after a crash.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import sqlite3
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from corral import faults
from corral.errors import CorralError

from . import migrate, transactions
from .rows import (
    conflict,
)
from .sql import SqlStore
from .transacting import Tx

P = ParamSpec("P")
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


def _unfindable(value: Any) -> Any:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) and not value.isascii() else value


def _translate(error: sqlite3.Error) -> CorralError:
    code = getattr(error, "sqlite_errorcode", 0) or 0
    if code in _UNIQUE:
        return conflict(f"it exists already ({error})")
    if isinstance(error, sqlite3.IntegrityError) or code & 0xFF in _BROKEN:
        return CorralError("store_error", f"the database refuses: {error}", retryable=False)
    return CorralError("store_error", f"the database does not answer: {error}")


class _Worker:
    """A thread with a connection of its own that takes jobs from a queue; the stop job ends it."""

    def __init__(
        self, name: str, path: Path, clock: Callable[[], int], jobs: queue.SimpleQueue[Any], begin: str
    ) -> None:
        self._path = path
        self._clock = clock
        self._jobs = jobs
        self._begin = begin
        self._connection: sqlite3.Connection | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, future = job
            result: Any = None
            failure: BaseException | None = None
            try:
                result = work(self)
            except sqlite3.Error as error:
                failure = _translate(error)
                failure.__cause__ = error
            except BaseException as error:  # whatever it is, it belongs to the caller, and the thread goes on
                failure = error
            try:
                loop.call_soon_threadsafe(_deliver, future, result, failure)
            except RuntimeError:
                pass  # the caller's loop is closed: nobody waits any more
            del job, work, future, result, failure
        self._disconnect()

    def _disconnect(self) -> None:
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
        """Run `work` in one transaction: all or nothing."""
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
            self._disconnect()  # closing rolls back; the next job gets a new connection


def _deliver(future: asyncio.Future[Any], result: Any, failure: BaseException | None) -> None:
    if future.done():
        return  # the caller was cancelled meanwhile
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)


class SqliteStore(SqlStore):
    """`corral.ports.store.Store` on one SQLite file; see the module docstring.

    `clock` gives Unix epoch milliseconds and is called in the store's threads, once per transaction. `new_id(prefix)` makes the
    installation id; 128 random bits without it. Usable from several event loops at once.
    """

    def __init__(self, path: str | Path, clock: Callable[[], int], new_id: Callable[[str], str] | None = None) -> None:
        self._path = Path(path)
        self._clock = clock
        self._new_id = new_id
        self._guard = threading.Lock()
        self._workers: list[_Worker] = []
        self._writes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._usable = False
        self._installation: str | None = None

    # -- opening and closing ---------------------------------------------------------------------------------------------------
    async def open(self) -> None:
        """Make or check the tables, connect. Again: nothing. After a failure it may be tried again."""
        proposal = self._new_id("org") if self._new_id is not None else secrets.token_hex(16)

        def prepare(worker: _Worker) -> str:
            try:
                migrate.ensure(self._path)
            except OSError as error:
                raise CorralError(
                    "store_error",
                    f"{self._path} cannot be opened: {error.strerror or error}",
                    hint="does the state directory exist, and may this user write to it?",
                    retryable=False,
                ) from error
            return worker.transact(lambda tx: transactions.installation_id(tx, proposal))

        with self._guard:
            if self._usable:
                return
            if not self._workers:
                self._workers.append(_Worker("store-writer", self._path, self._clock, self._writes, "BEGIN IMMEDIATE"))
                for number in range(READERS):
                    self._workers.append(
                        _Worker(f"store-reader-{number}", self._path, self._clock, self._reads, "BEGIN")
                    )
            prepared = self._hop(self._writes, prepare)
        try:
            self._installation = await prepared
        except BaseException:
            self._stop()
            raise
        with self._guard:
            self._usable = bool(self._workers)

    async def close(self) -> None:
        """Finish what is queued, then disconnect. Again: nothing."""
        workers = self._stop()
        for worker in workers:
            await asyncio.to_thread(worker.thread.join)

    def _stop(self) -> list[_Worker]:
        with self._guard:
            workers, self._workers = self._workers, []
            self._usable = False
            if workers:
                self._writes.put(None)
                for _ in range(READERS):
                    self._reads.put(None)
                self._writes, self._reads = queue.SimpleQueue(), queue.SimpleQueue()
            return workers

    def _hop(self, jobs: queue.SimpleQueue[Any], work: Callable[[_Worker], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        jobs.put((work, loop, future))
        return future

    def _submit(self, writes: bool, work: Callable[[Tx], T]) -> asyncio.Future[T]:
        with self._guard:
            if not self._usable:
                raise CorralError("store_error", "the store is not open", retryable=False)
            return self._hop(self._writes if writes else self._reads, lambda worker: worker.transact(work))

    async def _write(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._submit(True, lambda tx: work(tx, *args, **kwargs))

    async def _read(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._submit(False, lambda tx: work(tx, *args, **kwargs))

    async def installation_id(self) -> str:
        if self._installation is None:
            raise CorralError("store_error", "the store is not open", retryable=False)
        return self._installation
