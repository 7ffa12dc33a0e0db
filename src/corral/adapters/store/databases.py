"""`ports.database` for a SQLite file and for a PostgreSQL database."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from corral.errors import CorralError
from corral.ports.database import Health

from . import migrate

COUNTED = ("tenant", "api_key", "run", "sandbox", "exec", "instance", "sandbox_command", "sandbox_event", "audit")
COUNTED_NOW = ("run_queue", "webhook_delivery", "worker")
"""Not in every version."""
_OF_NO_SANDBOX = "NOT EXISTS (SELECT 1 FROM sandbox s WHERE s.sandbox_id = t.sandbox_id)"
# What the transactions never leave, whatever the version: a row of these tells of a hand or a disk that was at the file.
RULES = (
    (
        "sandboxes without a lease",
        "sandbox t",
        "NOT EXISTS (SELECT 1 FROM sandbox_lease l WHERE l.sandbox_id = t.sandbox_id)",
    ),
    ("leases of no sandbox", "sandbox_lease t", _OF_NO_SANDBOX),
    ("execs of no sandbox", "exec t", _OF_NO_SANDBOX),
    ("events of no sandbox", "sandbox_event t", _OF_NO_SANDBOX),
    ("commands of no sandbox", "sandbox_command t", _OF_NO_SANDBOX),
    ("instances bound to no sandbox", "instance t", f"t.state = 'bound' AND {_OF_NO_SANDBOX}"),
    ("finished runs without a result", "run t", "t.state = 'finished' AND (t.result IS NULL OR t.reason IS NULL)"),
)
Ask = Callable[[str], list[tuple[Any, ...]]]


def _looked(where: str, version: str | None, ask: Ask, more: Callable[[], list[str]]) -> Health:
    if version is None:
        return Health(where, None, migrate.HEAD, {}, ())
    tables = COUNTED + (COUNTED_NOW if version == migrate.HEAD else ())
    rows = {table: int(ask(f"SELECT COUNT(*) FROM {table}")[0][0]) for table in tables}  # noqa: S608 - names of ours
    problems = more()
    for what, table, rule in RULES:
        [(count,)] = ask(f"SELECT COUNT(*) FROM {table} WHERE {rule}")  # noqa: S608 - texts of this module
        if count:
            problems.append(f"{count} {what}")
    return Health(where, version, migrate.HEAD, rows, tuple(problems))


def _older(where: str, found: str | None, revision: str, words: migrate.Words) -> str:
    """The version that the database has; refused unless `revision` is an older one."""
    if found is None:
        raise CorralError("store_error", f"{where} is empty", retryable=False)
    if found not in migrate.REVISIONS:
        raise migrate.refusal(where, found, words)
    if revision not in migrate.REVISIONS[: migrate.REVISIONS.index(found)]:
        older = ", ".join(migrate.REVISIONS[: migrate.REVISIONS.index(found)]) or "none"
        raise CorralError(
            "invalid_value", f"{revision} is no version older than {found}", hint=f"there are: {older}", field="--to"
        )
    return found


@contextlib.contextmanager
def _new_file(path: str) -> Iterator[str]:
    """A name beside `path` to write to, which becomes `path` when all has gone well; for its owner only, on the disk."""
    if os.path.lexists(path):
        raise CorralError(
            "invalid_value", f"{path} exists already", hint="name a new file: no copy is overwritten", field="FILE"
        )
    part = f"{path}.{os.getpid()}.part"
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise CorralError("invalid_value", f"{path} cannot be written: {error.strerror}", field="FILE") from error
    try:
        yield part
        descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


class SqliteDatabase:
    """The file of a state directory."""

    alone = True

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    @property
    def where(self) -> str:
        return str(self._path)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = sqlite3.connect(self._path, timeout=30.0, isolation_level=None)
            try:
                connection.execute("PRAGMA query_only = ON")
                yield connection
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise CorralError("store_error", f"{self._path}: {error}") from error

    def check(self) -> Health:
        version = migrate.version(self._path)
        if version is None:
            return _looked(self.where, None, lambda text: [], list)
        with self._opened() as connection:

            def ask(text: str) -> list[tuple[Any, ...]]:
                return connection.execute(text).fetchall()

            def more() -> list[str]:
                told = [str(row[0]) for row in ask("PRAGMA integrity_check(20)")]
                broken = ask("PRAGMA foreign_key_check")
                return [t for t in told if t != "ok"] + ([f"{len(broken)} broken references"] if broken else [])

            return _looked(self.where, version, ask, more)

    def upgrade(self) -> tuple[str | None, str]:
        before = migrate.version(self._path)
        if before is not None and before not in migrate.REVISIONS:
            raise migrate.refusal(self.where, before, migrate.SQLITE)
        if before is None:
            migrate.ensure(self._path)
        elif before != migrate.HEAD:
            migrate.run_alembic(self._path)
        return before, migrate.HEAD

    def downgrade(self, revision: str) -> tuple[str, str]:
        before = _older(self.where, migrate.version(self._path), revision, migrate.SQLITE)
        migrate.run_alembic(self._path, revision, down=True)
        return before, revision

    def backup(self, path: str) -> int:
        if migrate.version(self._path) is None:
            raise CorralError("store_error", f"{self._path} is empty", retryable=False)
        with self._opened() as source, _new_file(path) as part:
            copy = sqlite3.connect(part, isolation_level=None)
            try:
                source.backup(copy)
                # One file: nothing beside it is needed to read it.
                copy.execute("PRAGMA journal_mode = DELETE")
                [(told,)] = copy.execute("PRAGMA quick_check(1)").fetchall()
            finally:
                copy.close()
            if told != "ok":
                raise CorralError(
                    "store_error", f"the copy is damaged: {told}", hint="corral db check looks at the original"
                )
        return os.path.getsize(path)


class PostgresDatabase:
    """A database of a server; only needs `pg_dump` for `backup`."""

    alone = False

    def __init__(self, url: str) -> None:
        from .postgres_session import described

        self._url = url
        self.where = described(url)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        import psycopg

        from . import migrate_postgres, postgres_session

        with migrate_postgres.connection(self._url) as connection:
            try:
                yield connection
            except psycopg.Error as error:
                raise postgres_session.refusal(error, self.where) from error

    def _version(self) -> str | None:
        from . import migrate_postgres

        with self._opened() as connection:
            return migrate_postgres.version(connection, self._url)

    def check(self) -> Health:
        from . import migrate_postgres

        with self._opened() as connection:
            version = migrate_postgres.version(connection, self._url)

            def ask(text: str) -> list[tuple[Any, ...]]:
                found: list[tuple[Any, ...]] = connection.execute(text).fetchall()
                return found

            def more() -> list[str]:
                invalid = ask("SELECT indexrelid::regclass::text FROM pg_index WHERE NOT indisvalid OR NOT indisready")
                return [f"the index {name} is not valid: REINDEX INDEX {name}" for (name,) in invalid]

            return _looked(self.where, version, ask, more)

    def upgrade(self) -> tuple[str | None, str]:
        from . import migrate_postgres

        before = self._version()
        if before is not None and before not in migrate.REVISIONS:
            raise migrate.refusal(self.where, before, migrate_postgres.POSTGRES)
        if before != migrate.HEAD:
            migrate_postgres.run_alembic(self._url, expected=before)
        return before, migrate.HEAD

    def downgrade(self, revision: str) -> tuple[str, str]:
        from . import migrate_postgres
        from .postgres_hold import PostgresHold

        before = _older(self.where, self._version(), revision, migrate_postgres.POSTGRES)
        with self._opened() as connection:
            alive = []
            if connection.execute("SELECT to_regclass('worker')").fetchone()[0] is not None:
                now = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
                found = connection.execute(f"SELECT worker_id FROM worker WHERE alive_until > {now}")  # noqa: S608
                alive = sorted(str(row[0]) for row in found)
        if alive:
            raise CorralError(
                "store_error",
                f"{len(alive)} servers are at work on {self.where}: {', '.join(alive[:5])}",
                hint="stop them first; one that was killed counts for a few seconds more",
            )
        hold = PostgresHold(self._url, shared=False, lost=lambda error: None)
        hold.take(0)  # one that has not beaten yet has this, and none begins meanwhile
        try:
            migrate_postgres.run_alembic(self._url, revision, down=True, expected=before)
        finally:
            hold.close()
        return before, revision

    def backup(self, path: str) -> int:
        from psycopg.conninfo import make_conninfo

        from .postgres_session import parsed

        if self._version() is None:
            raise CorralError("store_error", f"{self.where} is empty", retryable=False)
        program = _pg_dump()
        parts = parsed(self._url)
        environment = dict(os.environ)
        if (password := parts.pop("password", None)) is not None:
            environment["PGPASSWORD"] = str(password)  # other users see the words of a command, not its environment
        with _new_file(path) as part, _kept_from_the_words(parts, environment):
            words = [program, "--format=custom", "--no-owner", "--no-privileges", f"--file={part}"]
            made = subprocess.run(
                [*words, f"--dbname={make_conninfo(**parts)}"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            if made.returncode:
                told = made.stderr.decode("utf-8", "replace").strip()[-500:]
                raise CorralError(
                    "store_error", f"pg_dump failed: {told}", hint="it must be at least as new as the server"
                )
        return os.path.getsize(path)


@contextlib.contextmanager
def _kept_from_the_words(parts: dict[str, Any], environment: dict[str, str]) -> Iterator[None]:
    """What else is secret in a URL (that of a client's key, of OAuth) goes by a service file: no variable is read for it."""
    secret = {name: str(parts.pop(name)) for name in _SECRET if name in parts}
    if not secret:
        yield
        return
    if "service" in parts or "\n" in "".join(secret.values()):
        raise CorralError(
            "invalid_value",
            f"a backup cannot pass on {' and '.join(sorted(secret))} of this database URL",
            hint="write it into the service file that the URL names",
            field="database_url",
            retryable=False,
        )
    with tempfile.NamedTemporaryFile("w", prefix="corral-service-") as file:  # which is its owner's alone
        file.write("[corral]\n" + "".join(f"{name}={value}\n" for name, value in secret.items()))
        file.flush()
        environment["PGSERVICEFILE"] = file.name
        parts["service"] = "corral"
        yield


_SECRET = ("sslpassword", "oauth_client_secret")


def _pg_dump() -> str:
    """The newest that there is: an older one than the server refuses."""
    found = [p for p in Path("/usr/lib/postgresql").glob("*/bin/pg_dump") if p.parent.parent.name.isdigit()]
    program = str(max(found, key=lambda p: int(p.parent.parent.name))) if found else shutil.which("pg_dump")
    if program is None:
        raise CorralError(
            "infra_error",
            "pg_dump is not installed",
            hint="install the PostgreSQL client (Debian: postgresql-client), or use your provider's backups",
            retryable=False,
        )
    return program
