"""A PostgreSQL server of a test's own: started in a temporary directory, stopped, killed and restarted by who started it.

    with PostgresServer() as server:
        url = server.fresh_database(tables=True)

It listens on a unix socket and, with `tcp=True`, on a free port of 127.0.0.1 as well. PostgreSQL refuses to be root: then it runs as
`postgres` or `nobody`. Only the process that this object started is ever signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from corral.linux.process import ProcessRef, kill, ref_of

PASSWORD = "pass:word/@%&?"  # every character that a URL must hide
_LIMIT_S = 120.0


def _programs() -> Path:
    """The directory of `initdb` and `postgres`: the newest version of Debian's, else whatever is on PATH."""
    found = [p for p in Path("/usr/lib/postgresql").glob("*/bin") if (p / "initdb").exists()]
    if not has_name() and nss_wrapper() is None:
        pytest.skip("postgresql runs for users with a name only, and libnss-wrapper is not installed")
    if found:
        return max(found, key=lambda p: float(p.parent.name))
    if initdb := shutil.which("initdb"):
        return Path(initdb).resolve().parent
    pytest.skip("postgresql is not installed")


def _other_user() -> list[str]:
    """The words before a command that make it an ordinary user's."""
    if os.geteuid() != 0:
        return []
    user = _account()
    return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", "--"]


def _account() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise LookupError("neither postgres nor nobody is a user here")


def has_name() -> bool:
    """This user has an entry in passwd."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return True


def nss_wrapper() -> Path | None:
    """The library that answers a process who it is."""
    return next(iter(Path("/usr/lib").glob("*/libnss_wrapper.so")), None)


class PostgresServer:
    """One cluster and its server process. `durable=False` (the default) never waits for the disk; kill -9 loses nothing even so."""

    def __init__(self, *, tcp: bool = False, durable: bool = False, **settings: str) -> None:
        self.bin = _programs()
        self._root = Path(tempfile.mkdtemp(prefix="corral-pg-", dir="/tmp"))
        self.data = self._root / "data"
        self.sockets = self._root / "s"
        self.log = self._root / "log"
        self.port = _free_port() if tcp else 5432
        self._tcp = tcp
        self._settings = {
            "unix_socket_directories": str(self.sockets),
            "listen_addresses": "127.0.0.1" if tcp else "",
            "port": str(self.port),
            "max_connections": "200",
            "shared_buffers": "64MB",
            "dynamic_shared_memory_type": "mmap",
            **({} if durable else {"fsync": "off", "full_page_writes": "off"}),
            **settings,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._guard = threading.Lock()
        self._template: str | None = None
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        self.sockets.mkdir()
        if os.geteuid() == 0:
            user = _account()
            for path in (self._root, self.sockets):
                os.chown(path, user.pw_uid, user.pw_gid)
        os.chmod(self._root, 0o755)
        password = self._root / "password"
        password.write_text(PASSWORD)
        os.chmod(password, 0o644)
        made = subprocess.run(
            [
                *_other_user(),
                str(self.bin / "initdb"),
                *("--pgdata", str(self.data), "--username=corral", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"),
                *("--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}"),
            ],
            capture_output=True,
            cwd="/",
            env=self._environment(),
            timeout=_LIMIT_S,
        )
        if made.returncode:
            raise RuntimeError(f"initdb: {made.stderr.decode(errors='replace')}")

    def _environment(self) -> dict[str, str]:
        """PostgreSQL runs for nobody who has no name: such a user gets one in its processes."""
        if has_name():
            return dict(os.environ)
        names, groups = self._root / "passwd", self._root / "group"
        names.write_text(f"somebody:x:{os.geteuid()}:{os.getegid()}::/:/bin/sh\n")
        groups.write_text(f"somebody:x:{os.getegid()}:\n")
        found = {"LD_PRELOAD": str(nss_wrapper()), "NSS_WRAPPER_PASSWD": str(names), "NSS_WRAPPER_GROUP": str(groups)}
        return {**os.environ, **found}

    def __enter__(self) -> PostgresServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the process -----------------------------------------------------------------------------------------------------------
    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers. Running: nothing."""
        if self._process is not None:
            return
        deadline = time.monotonic() + _LIMIT_S
        while True:
            options = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
            with open(self.log, "ab") as log:
                self._process = subprocess.Popen(
                    [*_other_user(), str(self.bin / "postgres"), "-D", str(self.data), *options],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=self._environment(),
                    start_new_session=True,
                )
            while self._process.poll() is None:
                try:
                    with self.connect("postgres"):
                        return
                except psycopg.OperationalError:
                    if time.monotonic() >= deadline:
                        self.stop(signal.SIGQUIT)
                        raise
                    time.sleep(0.02)
            # After kill -9 its children may hold the shared memory for a moment: it then refuses to start.
            self._process = None
            if time.monotonic() >= deadline:
                raise RuntimeError(f"postgres does not start: {self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)

    def stop(self, how: int = signal.SIGINT) -> None:
        """SIGINT: fast shutdown, open transactions are rolled back. SIGQUIT: at once. Not running: nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        if how == signal.SIGKILL:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LIMIT_S)
            return
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def kill(self) -> None:
        """kill -9 of the postmaster; its children notice and end."""
        self.stop(signal.SIGKILL)

    def restart(self, how: int = signal.SIGINT) -> None:
        self.stop(how)
        self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The server and all its processes stand still: connections are there, and nothing answers."""
        stopped: list[ProcessRef] = []
        try:
            todo = [self.pid]
            while todo:
                if (process := ref_of(todo.pop())) is None:
                    continue
                kill(process, signal.SIGSTOP)  # itself first: a stopped one has no more children
                stopped.append(process)
                with contextlib.suppress(OSError):
                    todo += map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
            yield
        finally:
            for process in stopped:
                kill(process, signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove everything. Again: nothing."""
        self.stop(signal.SIGQUIT)
        deadline = time.monotonic() + 20
        while self._root.exists():
            shutil.rmtree(self._root, ignore_errors=True)
            if time.monotonic() >= deadline:
                break
            if self._root.exists():
                time.sleep(0.05)

    # -- databases -------------------------------------------------------------------------------------------------------------
    def url(self, database: str, *, tcp: bool = False) -> str:
        """Over the unix socket (no password), or over TCP with the password."""
        if tcp:
            from urllib.parse import quote

            assert self._tcp, "made without tcp=True"
            return f"postgresql://corral:{quote(PASSWORD, safe='')}@127.0.0.1:{self.port}/{database}"
        return f"postgresql://corral@/{database}?host={self.sockets}&port={self.port}"

    def connect(self, database: str) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url(database), autocommit=True, connect_timeout=10)

    def _administer(self, text: str, *names: str) -> None:
        with self._guard, self.connect("postgres") as connection:
            connection.execute(sql.SQL(text).format(*map(sql.Identifier, names)))

    def fresh_database(self, *, tables: bool = False) -> str:
        """-> URL of a new database; empty, or with the tables of this version (quick: copied from a template)."""
        name = f"corral_{os.getpid()}_{next(self._numbers)}"
        if not tables:
            self._administer("CREATE DATABASE {} TEMPLATE template0", name)
            return self.url(name)
        with self._guard:
            if self._template is None:
                template = f"template_{os.getpid()}_{next(self._numbers)}"
                with self.connect("postgres") as connection:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(template)))
                from corral.adapters.store import migrate_postgres

                migrate_postgres.ensure(self.url(template))
                self._template = template
        self._administer("CREATE DATABASE {} TEMPLATE {}", name, self._template)
        return self.url(name)

    @staticmethod
    def name_of(url: str) -> str:
        return str(psycopg.conninfo.conninfo_to_dict(url)["dbname"])

    def copy_of(self, url: str) -> str:
        """-> URL of a copy of the database as it is now; whoever is connected to it loses the connection."""
        name = f"copy_{os.getpid()}_{next(self._numbers)}"
        self._replace(self.name_of(url), name)
        return self.url(name)

    def restore(self, url: str, copy: str) -> None:
        """The database becomes what `copy` is (an older copy of it), under the old name, as after a restored backup."""
        name = self.name_of(url)
        self._kick(name)
        self._administer("DROP DATABASE {} WITH (FORCE)", name)
        self._replace(self.name_of(copy), name)

    def _replace(self, source: str, name: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            self._kick(source)
            try:
                return self._administer("CREATE DATABASE {} TEMPLATE {}", name, source)
            except psycopg.errors.ObjectInUse:  # somebody was quick to connect again
                if time.monotonic() >= deadline:
                    raise

    def _kick(self, database: str) -> None:
        with self.connect("postgres") as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", [database]
            )

    def disconnect(self, url: str) -> None:
        """End every connection to the database from the server's side."""
        self._kick(self.name_of(url))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(**settings: Any) -> Iterator[PostgresServer]:
    server = PostgresServer(**settings)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for the tests of this process that do not stop it. Import it: `from postgres_server import postgres_server`."""
    with running() as server:
        yield server


def wait_until(ready: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
    """For threads of a test: until it is so."""
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


async def until(ready: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
    """The same for tasks."""
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)
