"""The store on PostgreSQL: a few connections, each in a thread of its own; any number of processes share one database.

Writes run at READ COMMITTED and lock the rows that they decide over (see `transactions`); reads are one REPEATABLE READ snapshot. The
store's clock is the database's, read once per transaction. A transaction that lost a deadlock, or whose connection broke before its
COMMIT was sent, is run again; one whose COMMIT was not answered is a `store_error`, and whether it happened must be read, as after a
crash. A server that is away is a retryable `store_error` at once or within the limits of `postgres_session`; connections come back by
themselves.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg

from corral import faults
from corral.errors import CorralError

from . import installation, migrate_postgres
from .postgres_session import Interrupted, Session, Unanswered, described, refusal
from .threaded import Jobs, StoreThread, ThreadedStore
from .transacting import Tx

T = TypeVar("T")

WRITERS = 4
READERS = 2
_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_AGAIN = ("40001", "40P01")
_ELSEWHERE = ("25006", "26000", "42P05", "0A000")
"""It is the connection: it leads to what has become a standby, or what was prepared there is gone or fits the tables no more."""
_ATTEMPTS = 10
_CONNECTIONS = 3


class _PostgresTx:
    """One open transaction of a session."""

    # No store function changes a key: rows that refer to a locked one may be inserted meanwhile.
    skip_locked = "FOR NO KEY UPDATE SKIP LOCKED"
    for_update = "FOR NO KEY UPDATE"

    def __init__(self, session: Session, clock: Callable[[], int] | None) -> None:
        self._session = session
        self._now = clock() if clock is not None else None
        self.rows = session.rows
        self.send = session.send

    @property
    def now(self) -> int:
        if self._now is None:
            self._session.answers()  # only if nothing was asked yet
            self._now = self._session.clock
        return self._now


class _Outage:
    """When a connection was last refused, and why. Whoever asked before that has waited long enough: he is not tried once more, else
    a server that swallows connections would be waited for by everybody in turn."""

    def __init__(self) -> None:
        self.at = -1.0
        self.error: psycopg.Error | None = None


class _Worker(StoreThread):
    """A thread with a session, for writing or for reading."""

    def __init__(
        self, name: str, url: str, clock: Callable[[], int] | None, jobs: Jobs, outage: _Outage, *, writes: bool
    ) -> None:
        super().__init__(name, jobs)
        self._outage = outage
        self._url = url
        self._where = described(url)
        self._clock = clock
        self._writes = writes
        self._session: Session | None = None

    def translated(self, error: BaseException) -> BaseException:
        if isinstance(error, Interrupted):
            return CorralError(
                "store_error",
                f"{self._where} broke off in the middle of a commit: whether it happened is unknown",
                hint="read the current state and decide again",
            )
        return refusal(error, self._where) if isinstance(error, psycopg.Error) else error

    def disconnect(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def transact(self, work: Callable[[Tx], T], asked: float | None = None) -> T:
        """`asked`: when (monotonic clock), where it may have waited in a queue."""
        attempt = 0
        while True:
            attempt += 1
            if self._session is None:
                self._session = self._connected(asked)
            session = self._session
            try:
                return self._once(session, work)
            except Interrupted:
                self.disconnect()
                raise
            except psycopg.Error as error:
                if session.broken or isinstance(error, Unanswered) or error.sqlstate in _ELSEWHERE:
                    self.disconnect()
                    # It may have broken long ago, while nobody looked. Nothing of it was committed.
                    if attempt >= _CONNECTIONS or isinstance(error, Unanswered):
                        raise
                    continue
                self._roll_back(session)
                if error.sqlstate not in _AGAIN or attempt >= _ATTEMPTS:
                    raise
                time.sleep(random.uniform(0, 0.002 * 2**attempt))
            except BaseException:
                self._roll_back(session)
                raise

    def _connected(self, asked: float | None) -> Session:
        known = self._outage.error
        if known is not None and asked is not None and asked < self._outage.at:
            raise refusal(known, self._where)
        try:
            session = Session(self._url)
        except psycopg.Error as error:
            self._outage.error, self._outage.at = error, time.monotonic()
            raise
        self._outage.error = None
        return session

    def _once(self, session: Session, work: Callable[[Tx], T]) -> T:
        session.begin(_WRITE if self._writes else _READ, clock=self._clock is None)
        result = work(_PostgresTx(session, self._clock))
        if not self._writes:
            session.leave()
            return result
        faults.point("store.commit.before")
        session.commit()
        faults.point("store.commit.after")
        return result

    def _roll_back(self, session: Session) -> None:
        try:
            session.roll_back()
        except psycopg.Error:
            self.disconnect()


class PostgresStore(ThreadedStore[_Worker]):
    """`corral.ports.store.Store` on a PostgreSQL database (>= 13); see the module docstring.

    `url`: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE` or what else libpq reads; never shown with its password. `clock` gives Unix
    epoch milliseconds instead of the database's clock (tests). `new_id(prefix)` makes the installation id; 128 random bits without it.
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], int] | None = None,
        new_id: Callable[[str], str] | None = None,
        *,
        writers: int = WRITERS,
        readers: int = READERS,
    ) -> None:
        super().__init__()
        self._url = url
        self._clock = clock
        self._new_id = new_id
        self._writers = writers
        self._readers = readers
        described(url)  # a URL that cannot be read is refused here

    def _made(self, writes: Jobs, reads: Jobs) -> Sequence[tuple[_Worker, Jobs]]:
        outage = _Outage()
        made = [(f"store-writer-{n}", writes) for n in range(self._writers)]
        made += [(f"store-reader-{n}", reads) for n in range(self._readers)]
        return [
            (_Worker(name, self._url, self._clock, jobs, outage, writes=jobs is writes), jobs) for name, jobs in made
        ]

    def _job(self, work: Callable[[Tx], T]) -> Callable[[_Worker], T]:
        asked = time.monotonic()
        return lambda thread: thread.transact(work, asked)

    def _prepare(self, thread: _Worker) -> str:
        proposal = self._new_id("org") if self._new_id is not None else secrets.token_hex(16)
        migrate_postgres.ensure(self._url)
        return thread.transact(lambda tx: installation.installation_id(tx, proposal))
