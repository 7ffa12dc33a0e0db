"""Who drives what a PostgreSQL database holds: one process alone, or several that know of each other.

A session lock of the database, on a connection of its own: a process that is the only owner takes it alone, workers of `corral serve
--replicas` share it, those of one state directory only: the node of another one knows none of the sandboxes that the database names,
so workers that asked it would take them all for lost. It ends with the connection, so whoever died is no obstacle for long, even one
whose machine is gone. A connection that breaks is made again and the lock taken again; if somebody else has it by then, that is told at
once and once, and this process is out.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from corral.errors import CorralError

from .postgres_session import connected, described, refusal

LOOK_S = 2.0
"""How often the connection is looked at."""
TAKE_S = 12.0
"""How long is waited for one that is ending: longer than the server takes to notice that its machine is gone."""
PAUSE_S = 0.25
_SEEN = 3
"""How often in a row somebody else has to be seen with it."""
_KEY = "SELECT hashtextextended(current_schema()::text, 109330312618348)"
"""One lock for each set of tables."""
_HOME = "SELECT hashtextextended(current_schema()::text || ' ' || %s, 109330312618348)"
"""A second one that workers of one home share; it is there before the first one, and tells whose a worker is."""
_STRANGERS = (
    "SELECT count(*) FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND ((l.classid::bigint << 32) | l.objid::bigint) = %s AND NOT EXISTS (SELECT 1 FROM pg_locks h"
    " WHERE h.pid = l.pid AND h.locktype = 'advisory' AND h.granted AND h.objsubid = 1 AND h.database = l.database"
    " AND ((h.classid::bigint << 32) | h.objid::bigint) = %s)"
)
_HOLDERS = (
    "SELECT l.pid, a.application_name FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid"
    " WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND ((l.classid::bigint << 32) | l.objid::bigint) = %s AND l.pid <> pg_backend_pid()"
)
_SETTINGS = (
    "SET tcp_keepalives_idle = 3",
    "SET tcp_keepalives_interval = 2",
    "SET tcp_keepalives_count = 3",
    "SET statement_timeout = '10s'",
    "SET idle_session_timeout = 0",
)


class PostgresHold:
    """See the module docstring. `lost` is called once, from a thread of this object's own, with the reason.

    `home`: whose workers may share it.
    """

    def __init__(self, url: str, *, shared: bool, lost: Callable[[CorralError], None], home: str = "") -> None:
        self._url = url
        self._where = described(url)
        self._shared = shared
        self._home = home
        self._name = f"corral {'worker' if shared else 'owner'} {socket.gethostname()[:32]} {os.getpid()}"
        self._lost = lost
        self._connection: psycopg.Connection[Any] | None = None
        self._backend = 0
        self._other = False
        """Whether somebody else was seen to have it, when it was last asked for."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, patience_s: float = TAKE_S) -> None:
        """Take it, and keep it from now on. `state_locked` if somebody else has it for all that time. Blocks."""
        until = time.monotonic() + patience_s
        try:
            while not self._taken():
                if self._stop.is_set() or time.monotonic() >= until:
                    raise self._refused()
                self._stop.wait(PAUSE_S)
        except psycopg.Error as error:
            self._disconnect()
            raise refusal(error, self._where) from error
        except BaseException:
            self._disconnect()
            raise
        self._thread = threading.Thread(target=self._keep, name="store-hold", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let it go; a `take` that waits in another thread gives up. Again: nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5.0)  # one that waits for a server that hangs ends with the process

    # -- the lock --------------------------------------------------------------------------------------------------------------
    def _taken(self) -> bool:
        connection = self._connection
        if connection is None:
            connection = self._connection = connected(self._url, application_name=self._name)
            for setting in _SETTINGS:
                try:
                    connection.execute(setting)
                except psycopg.errors.UndefinedObject:
                    pass  # a server of an earlier version
            if self._shared:
                home = connection.execute(_HOME, (self._home,)).fetchone()
                connection.execute("SELECT pg_advisory_lock_shared(%s)", home)  # nobody takes it alone
        row = connection.execute(_KEY).fetchone()
        assert row is not None
        if self._shared and self._strangers(connection, row[0]):
            self._other = True
            return False
        word = "pg_try_advisory_lock_shared" if self._shared else "pg_try_advisory_lock"
        got = connection.execute(f"SELECT {word}(%s), pg_backend_pid()", row).fetchone()
        if got is not None and got[0]:
            if self._shared and self._strangers(connection, row[0]):  # who came at the same moment: both go back
                connection.execute("SELECT pg_advisory_unlock_shared(%s)", row)
                self._other = False  # for no longer than we had it
                self._stop.wait(random.uniform(0.0, PAUSE_S))
                return False
            self._backend = int(got[1])  # the driver knows only what a pooler says
            return True
        holders = connection.execute(_HOLDERS, row).fetchall()
        self._other = any(pid != self._backend and name != self._name for pid, name in holders)
        for pid, _ in holders:
            if (
                pid == self._backend
            ):  # our own connection of before, of which the server does not know yet that it broke
                connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
        return False

    def _strangers(self, connection: psycopg.Connection[Any], key: int) -> bool:
        """Whether somebody has it who is not of our home."""
        home = connection.execute(_HOME, (self._home,)).fetchone()
        assert home is not None
        found = connection.execute(_STRANGERS, (key, home[0])).fetchone()
        return found is not None and found[0] > 0

    def _refused(self) -> CorralError:
        who = "another process"
        if self._connection is not None:
            key = self._connection.execute(_KEY).fetchone()
            names = [str(name) for _, name in self._connection.execute(_HOLDERS, key).fetchall() if name]
            who = ", ".join(sorted(names)[:3]) or who
        return CorralError(
            "state_locked",
            f"{self._where} is driven by {who}",
            hint="stop that first, or run all of them as one corral serve --replicas: its host has the sandboxes",
        )

    def _keep(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                if self._connection is not None:
                    self._connection.execute("SELECT 1")
                    continue
            except psycopg.Error:
                self._disconnect()
            try:
                if not self._again():
                    self._lost(self._refused())
                    break
            except psycopg.Error:  # the server is away: for everybody
                self._disconnect()
        self._disconnect()

    def _again(self) -> bool:
        """The lock on a new connection; a session of our own that only ends slowly is waited for."""
        until = time.monotonic() + TAKE_S
        seen = 0
        while not self._taken():
            seen = seen + 1 if self._other else 0  # seen once it may be on its way back
            if seen >= _SEEN or time.monotonic() >= until:
                return False
            if self._stop.wait(PAUSE_S):
                return True
        return True

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except psycopg.Error:
                pass
