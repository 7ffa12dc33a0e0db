"""A Redis server of a test's own: on a unix socket in a directory of its own, started, stopped, killed, hung and flushed by the test."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAM = shutil.which("redis-server") or "/usr/bin/redis-server"
STARTED_S = 30.0


class RedisServer:
    """`url` stays the same over restarts. Nothing is written to disk, so a restart forgets everything."""

    def __init__(self) -> None:
        # Not below pytest's directories: the path of a unix socket is short.
        self._dir = Path(tempfile.mkdtemp(prefix="corral-redis-"))
        self.socket = str(self._dir / "s")
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        command = [PROGRAM, "--port", "0", "--unixsocket", self.socket, "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, "--dir", str(self._dir), "--daemonize", "no"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + STARTED_S
        while time.monotonic() < until:
            try:
                if self.command("PING").startswith(b"+PONG"):
                    return
            except OSError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.02)
        raise AssertionError(f"redis-server does not start: {self._process.poll()}")

    def command(self, *words: str) -> bytes:
        """Send one command, without the client library; -> the first bytes of its answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10.0)
            connection.connect(self.socket)
            connection.sendall(" ".join(words).encode() + b"\r\n")
            return connection.recv(4096)

    def flush(self) -> None:
        """FLUSHALL."""
        assert self.command("FLUSHALL").startswith(b"+OK")

    def kill(self) -> None:
        """As by kill -9; nothing listens afterwards."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """kill and start."""
        self.kill()
        self.start()

    def hang(self) -> None:
        """It keeps its connections and answers nothing, until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.send_signal(number)
            process.wait(30.0)
        Path(self.socket).unlink(missing_ok=True)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._dir, ignore_errors=True)


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer]:
    """A running server, gone afterwards."""
    server = RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.close()
