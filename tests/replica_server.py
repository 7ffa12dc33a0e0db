"""`corral serve --replicas` of a test's own, with the processes that it starts: which are there, and how to end one of them."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corral.client import Corral

PATIENCE_S = 120.0
RECIPE = "name: host\nkind: frozen\ndescription: small\nprograms: [sh sleep cat printf seq wc]\nlanguages: {bash: sh}\n"


def until(true: Callable[[], Any], what: str = "") -> Any:
    """The first answer that is true."""
    end = time.monotonic() + PATIENCE_S
    while not (found := true()):
        assert time.monotonic() < end, what or "it does not come"
        time.sleep(0.02)
    return found


class Replicas:
    """A server on `place/state`, its database and its Redis given by URL. Only children of its own process are ever signalled."""

    def __init__(self, place: Path, database: str, redis: str, count: int = 2, **environment: str) -> None:
        self.state = place / "state"
        recipes = place / "templates"
        if not recipes.exists():
            recipes.mkdir()
            (recipes / "host.yaml").write_text(RECIPE)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
        self.environment = {
            **clean,
            "CORRAL_STATE_DIR": str(self.state),
            "CORRAL_TEMPLATES": str(recipes),
            "CORRAL_RUNTIMES": "bubblewrap",
            "CORRAL_DATABASE_URL": database,
            "CORRAL_REDIS_URL": redis,
            **environment,
        }
        self.count = count
        self.key = ""
        self.port = 0
        self.errors = place / "stderr"
        self.process: subprocess.Popen[str] | None = None

    def start(self, *words: str, scheme: str = "http") -> Replicas:
        """Returns once it listens."""
        port = ["--port", str(self.port)]
        with self.errors.open("a") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from corral.cli.main import main; main()",
                    "serve",
                    *port,
                    *self._words(),
                    *words,
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self.environment,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(f"corral: listening on {scheme}://"), (line, self.errors.read_text())
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])
        if not self.key:
            self.key = self.process.stdout.readline().split()[-1]
        return self

    def _words(self) -> list[str]:
        return ["--replicas", str(self.count)]

    def client(self) -> Corral:
        return Corral(self.url, self.key)

    def ready(self) -> Replicas:
        """Wait until every replica can work."""
        until(lambda: self.get("/readyz")[0] == 200, "readyz")
        return self

    def get(self, path: str) -> tuple[int, dict[str, str], Any]:
        """One plain call."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.key}"})
            answer = connection.getresponse()
            fields = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, fields, json.loads(answer.read())
        finally:
            connection.close()

    # -- processes -------------------------------------------------------------------------------------------------------------
    def children(self, kind: str) -> list[int]:
        """Pids of the children that are `node` or `replica`, oldest first."""
        assert self.process is not None
        found: list[tuple[int, int]] = []
        for name in os.listdir("/proc"):
            if name.isdigit() and (seen := self._child(int(name), kind)) is not None:
                found.append((seen, int(name)))
        return [pid for _, pid in sorted(found)]

    def _child(self, pid: int, kind: str) -> int | None:
        """When a child of ours of this kind began."""
        assert self.process is not None
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        mine = int(fields[1]) == self.process.pid and fields[0] != "Z" and b"--as-child" in words
        return int(fields[19]) if mine and kind.encode() in words else None

    def end(self, kind: str, which: int = 0, number: int = signal.SIGKILL) -> int:
        """Signal one of them; -> its pid."""
        pid = until(lambda: self.children(kind), kind)[which]
        descriptor = os.pidfd_open(pid)
        try:
            assert self._child(pid, kind) is not None
            signal.pidfd_send_signal(descriptor, number)
            if number == signal.SIGKILL:
                select.select([descriptor], [], [], PATIENCE_S)
        finally:
            os.close(descriptor)
        return pid

    def restart_all(self) -> None:
        """SIGHUP, and wait until no replica is an old one."""
        assert self.process is not None
        old = set(self.children("replica"))
        self.process.send_signal(signal.SIGHUP)
        until(lambda: len(now := self.children("replica")) == self.count and not old & set(now), "the restart")

    def kill(self) -> None:
        """kill -9 of the parent."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]
        self.process = None

    def stop(self) -> int:
        """SIGTERM; -> exit status."""
        if self.process is None:
            return 0
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.stdout.close()  # type: ignore[union-attr]
            self.process = None

    def clear(self) -> None:
        """Remove every sandbox, and see that nothing is left."""
        with self.client() as client:
            for sandbox in client.sandboxes.list():
                sandbox.delete()
            client.request("POST", "/v1/gc")
            assert client.request("GET", "/v1/doctor")["leftovers"] == []
