"""What this node made and has not yet undone: written before each effect, so that a `kill -9` at any point leaves a record.

One SQLite file in `STATE/node`, used from the event loop's thread only (a write takes tens of microseconds; nothing is synced: it
must survive the death of the process, not of the machine, after which no instance lives anyway). A file that cannot be read is
moved aside; what it knew is then found by scanning the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from dataclasses import dataclass, replace
from typing import Any

from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.node import witness

FLOORS = 20_000
"""So many floors of sandboxes that have no instance any more are kept, the newest: a store that was set back may want them again."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS instance (
  instance_id TEXT PRIMARY KEY, state TEXT NOT NULL, incarnation INTEGER NOT NULL, token INTEGER NOT NULL, data TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS exec (
  exec_id TEXT PRIMARY KEY, instance_id TEXT NOT NULL, state TEXT NOT NULL, ended_by TEXT, data TEXT NOT NULL, facts TEXT);
CREATE TABLE IF NOT EXISTS fact (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS floor (sandbox_id TEXT UNIQUE NOT NULL, incarnation INTEGER NOT NULL, token INTEGER NOT NULL);
PRAGMA user_version = 1;
"""


@dataclass(frozen=True)
class InstanceEntry:
    """`state`: creating | live | condemned. `floor` = the lowest fence that may act. `data`: what is needed to find and serve it."""

    instance_id: str
    state: str
    floor: Fence
    data: dict[str, Any]


@dataclass(frozen=True)
class ExecEntry:
    """`state`: starting | running | ended. `ended_by`: decided before the kill is sent. `facts` once ended, as JSON."""

    exec_id: str
    instance_id: str
    state: str
    data: dict[str, Any]
    ended_by: str | None = None
    facts: dict[str, Any] | None = None


class Journal:
    """See the module docstring. Entries are kept in memory too: reads cost nothing."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "journal.db")
        self._db: sqlite3.Connection | None = None
        self.instances: dict[str, InstanceEntry] = {}

    def open(self) -> None:
        """Read everything; a broken file is moved aside."""
        os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        try:
            self._load()
        except sqlite3.DatabaseError as error:
            self.close()
            with contextlib.suppress(OSError):
                os.replace(self._path, self._path + ".broken")
            for suffix in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path + suffix)
            try:
                self._load()
            except sqlite3.DatabaseError:
                raise CorralError("infra_error", f"the node's journal cannot be used: {error}") from error

    def _load(self) -> None:
        self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        self._db.executescript(_SCHEMA)
        self.instances = {
            row[0]: InstanceEntry(row[0], row[1], Fence(row[2], row[3]), json.loads(row[4]))
            for row in self._db.execute("SELECT instance_id, state, incarnation, token, data FROM instance")
        }

    def close(self) -> None:
        """Idempotent."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if self._db is None:
            raise CorralError("shutting_down", "the node is closed")
        try:
            return self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise CorralError("infra_error", f"the node's journal: {error}") from error

    # -- instances -----------------------------------------------------------------------------------------------------
    def put_instance(self, entry: InstanceEntry) -> None:
        """Insert or replace."""
        self._run(
            "INSERT OR REPLACE INTO instance VALUES (?, ?, ?, ?, ?)",
            *(entry.instance_id, entry.state, entry.floor.incarnation, entry.floor.token, json.dumps(entry.data)),
        )
        self.instances[entry.instance_id] = entry

    def set_instance(self, instance_id: str, *, state: str | None = None, floor: Fence | None = None) -> InstanceEntry:
        """Change state or raise the floor (it never falls)."""
        entry = self.instances[instance_id]
        entry = replace(entry, state=state or entry.state, floor=max(entry.floor, floor or entry.floor))
        self._run(
            "UPDATE instance SET state = ?, incarnation = ?, token = ? WHERE instance_id = ?",
            *(entry.state, entry.floor.incarnation, entry.floor.token, instance_id),
        )
        self.instances[instance_id] = entry
        return entry

    def drop_instance(self, instance_id: str) -> None:
        """Forget it: nothing of it is left on the host. Its ended execs stay until they are forgotten, its floor longer."""
        entry = self.instances.get(instance_id)
        sandbox_id = None if entry is None else entry.data.get("sandbox_id")
        if entry is not None and sandbox_id is not None:
            floor = max(entry.floor, self.floor_of(sandbox_id))
            self._run("INSERT OR REPLACE INTO floor VALUES (?, ?, ?)", sandbox_id, floor.incarnation, floor.token)
            self._run("DELETE FROM floor WHERE rowid <= last_insert_rowid() - ?", FLOORS)
        self._run("DELETE FROM instance WHERE instance_id = ?", instance_id)
        self.instances.pop(instance_id, None)

    def floor_of(self, sandbox_id: str) -> Fence:
        """The highest floor that any instance of a sandbox has had here, those that are gone included."""
        row = self._run("SELECT incarnation, token FROM floor WHERE sandbox_id = ?", sandbox_id).fetchone()
        known = [Fence(row[0], row[1])] if row is not None else []
        known += [entry.floor for entry in self.instances.values() if entry.data.get("sandbox_id") == sandbox_id]
        return max(known, default=Fence(0, 0))

    # -- single facts --------------------------------------------------------------------------------------------------
    def fact(self, name: str) -> int:
        """A number that was kept, 0 without one."""
        row = self._run("SELECT value FROM fact WHERE name = ?", name).fetchone()
        return 0 if row is None else int(row[0])

    def set_fact(self, name: str, value: int) -> None:
        self._run("INSERT OR REPLACE INTO fact VALUES (?, ?)", name, value)

    # -- execs ---------------------------------------------------------------------------------------------------------
    def put_exec(self, entry: ExecEntry) -> bool:
        """Insert; False when it is known already."""
        done = self._run(
            "INSERT OR IGNORE INTO exec VALUES (?, ?, ?, ?, ?, NULL)",
            *(entry.exec_id, entry.instance_id, entry.state, entry.ended_by, json.dumps(entry.data)),
        )
        return done.rowcount == 1

    def set_exec(self, exec_id: str, state: str, data: dict[str, Any]) -> None:
        """Change the state and data of an exec that has not ended."""
        self._run("UPDATE exec SET state = ?, data = ? WHERE exec_id = ?", state, json.dumps(data), exec_id)

    def ending(self, exec_id: str, ended_by: str) -> None:
        """Why we are about to end it; the first reason stays."""
        self._run("UPDATE exec SET ended_by = coalesce(ended_by, ?) WHERE exec_id = ?", ended_by, exec_id)

    def end_exec(self, exec_id: str, facts: dict[str, Any]) -> None:
        """The facts; once."""
        witness.note("end", exec=exec_id, started=facts.get("started"))
        self._run(
            "UPDATE exec SET state = 'ended', facts = ? WHERE exec_id = ? AND facts IS NULL", json.dumps(facts), exec_id
        )

    def get_exec(self, exec_id: str) -> ExecEntry | None:
        for entry in self._execs("WHERE exec_id = ?", exec_id):
            return entry
        return None

    def open_execs(self) -> list[ExecEntry]:
        """Those without facts."""
        return self._execs("WHERE facts IS NULL")

    def exec_ids(self) -> set[str]:
        return {row[0] for row in self._run("SELECT exec_id FROM exec")}

    def drop_exec(self, exec_id: str) -> None:
        self._run("DELETE FROM exec WHERE exec_id = ?", exec_id)

    def _execs(self, where: str, *values: Any) -> list[ExecEntry]:
        rows = self._run(f"SELECT exec_id, instance_id, state, data, ended_by, facts FROM exec {where}", *values)  # noqa: S608
        return [
            ExecEntry(row[0], row[1], row[2], json.loads(row[3]), row[4], json.loads(row[5]) if row[5] else None)
            for row in rows
        ]
