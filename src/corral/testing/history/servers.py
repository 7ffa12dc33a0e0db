"""PostgreSQL and Redis servers of a chaos run's own, below a directory of its own; only what was started here is ever signalled."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from corral.errors import CorralError

STARTED_S = 60.0
CUT_OFF = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"


def until(true: Callable[[], object], what: str, seconds: float = STARTED_S) -> None:
    """Look again and again; `infra_error` when it does not come true."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise CorralError("infra_error", f"not within {seconds:.0f} s: {what}", retryable=False)
        time.sleep(0.05)


def _program(name: str, *places: Path) -> str:
    for place in sorted(places, reverse=True):
        if (place / name).exists():
            return str(place / name)
    found = shutil.which(name)
    if found is None:
        hint = "apt-get install postgresql redis-server"
        raise CorralError("invalid_value", f"{name} is not installed", hint=hint, field="--replicas")
    return found


class Redis:
    """On a unix socket; it writes nothing to disk, so a restart forgets everything."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket = str(directory / "redis.sock")
        self.url = f"unix://{self._socket}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["--port", "0", "--unixsocket", self._socket, "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [_program("redis-server"), *words, "--dir", str(self._directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(self._answers, "Redis answers")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.command("PING").startswith(b"+PONG")
        return False

    def command(self, *words: str) -> bytes:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(10)
            line.connect(self._socket)
            parts = [f"*{len(words)}\r\n", *(f"${len(word.encode())}\r\n{word}\r\n" for word in words)]
            line.sendall("".join(parts).encode())
            return line.recv(4096)

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _has_name() -> bool:
    try:
        return bool(pwd.getpwuid(os.geteuid()))
    except KeyError:
        return False


class Postgres:
    """On a unix socket in its directory. It refuses to be root, and to be a user without a name: then it runs as another one."""

    def __init__(self, directory: Path) -> None:
        self._data = directory / "pg"
        self._sockets = directory / "pgs"
        self._log = directory / "postgres.log"
        self._bins = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").exists()]
        self._user = self._account() if os.geteuid() == 0 or not _has_name() else None
        self.process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def _account() -> pwd.struct_passwd:
        for name in ("postgres", "nobody"):
            with contextlib.suppress(KeyError):
                return pwd.getpwnam(name)
        raise CorralError("invalid_value", "neither postgres nor nobody is a user here", field="--replicas")

    def _as_user(self) -> list[str]:
        if self._user is None:
            return []
        if os.geteuid() != 0:  # what it takes itself for, in a namespace; outside it is who we are
            return ["unshare", "--user", f"--map-user={self._user.pw_uid}", f"--map-group={self._user.pw_gid}", "--"]
        return ["setpriv", f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups", "--"]

    def make(self) -> None:
        """An empty cluster."""
        for place in (self._data, self._sockets):
            place.mkdir(mode=0o700)
            if self._user is not None and os.geteuid() == 0:
                os.chown(place, self._user.pw_uid, self._user.pw_gid)
        words = ["-D", str(self._data), "-U", "corral", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync"]
        done = subprocess.run(
            [*self._as_user(), _program("initdb", *self._bins), *words], capture_output=True, cwd="/", check=False
        )
        if done.returncode:
            raise CorralError("infra_error", f"initdb: {done.stderr.decode(errors='replace')[-500:]}")

    def start(self) -> None:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._sockets),
            "fsync": "off",  # the process dies here, never the machine
            "max_connections": "100",
            "shared_buffers": "32MB",
        }
        words = [f"--{name}={value}" for name, value in settings.items()]
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                [*self._as_user(), _program("postgres", *self._bins), "-D", str(self._data), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        until(self._answers, f"PostgreSQL answers, see {self._log}")

    def _answers(self) -> bool:
        import psycopg

        with contextlib.suppress(psycopg.Error):
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
            return True
        return False

    def url(self, database: str = "corral") -> str:
        return f"postgresql://corral@/{database}?host={self._sockets}"

    def stop(self, number: int = signal.SIGINT) -> None:
        """SIGINT: cut clients, write out, end. SIGQUIT: at once, and recover at the next start."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(STARTED_S)

    def sql(self, *statements: str) -> None:
        """On the maintenance database, each by itself."""
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as line:
            for statement in statements:
                line.execute(statement.encode())

    def copy(self, database: str, name: str) -> None:
        """A copy of a database that is in use: clients are cut off for a moment, as a template must be nobody's."""
        self._alone(database, f'DROP DATABASE IF EXISTS "{name}"', f'CREATE DATABASE "{name}" TEMPLATE "{database}"')

    def restore(self, database: str, name: str) -> None:
        """The database becomes the copy."""
        self._alone(
            database,
            f'CREATE DATABASE "{database} new" TEMPLATE "{name}"',
            f'ALTER DATABASE "{database}" RENAME TO "{database} old"',
            f'ALTER DATABASE "{database} new" RENAME TO "{database}"',
            f'DROP DATABASE "{database} old"',
        )

    def _alone(self, database: str, *statements: str) -> None:
        import psycopg

        # Not one by one: who reconnects in between would be in the way.
        self.sql(f'ALTER DATABASE "{database}" ALLOW_CONNECTIONS false')
        try:
            for statement in statements:
                for _ in range(50):
                    with psycopg.connect(self.url("postgres"), autocommit=True) as line:
                        line.execute(CUT_OFF, [database])
                        try:
                            line.execute(statement.encode())
                            break
                        except psycopg.errors.ObjectInUse:
                            time.sleep(0.1)
        finally:
            self.sql(f'ALTER DATABASE "{database}" ALLOW_CONNECTIONS true')
