"""The system under test: `corral serve` on a directory of its own, alone on SQLite or as replicas over PostgreSQL and Redis."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from corral import config
from corral.errors import CorralError
from corral.linux import process
from corral.testing.history.servers import Postgres, Redis, until

START_S = 120.0
RUNNING = 3
"""Runs at once, of all tenants."""
COPY = "older"
"""Name of the older copy of the database."""


class Installation:
    """Started by `start`; `close` ends what was started here. Everything lies in `directory`.

    `spoil`: what the server runs first; tests take a promise out of it, to see that it is missed.
    """

    def __init__(self, directory: Path, replicas: int = 0, spoil: str = "") -> None:
        self._program = f"{spoil}\nfrom corral.cli.main import main; main()"
        self.directory = directory
        self.state = directory / "state"
        self.witness = directory / "witness.jsonl"
        self.log = directory / "serve.log"
        self.key = secrets.token_urlsafe(24)
        self.keys: list[str] = []
        """Of the tenants, once they are made."""
        self.policy = directory / "policy.json"
        self.token = directory.name
        """On the command line of every program that runs inside."""
        self.port = 0
        self.replicas = replicas
        # The path of a unix socket is short.
        self._sockets = Path(tempfile.mkdtemp(prefix="cc-"))
        self._sockets.chmod(0o711)
        self.postgres = Postgres(self._sockets) if replicas else None
        self.redis = Redis(self._sockets) if replicas else None
        self.server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # -- life --------------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Servers of data first; returns when the API is ready."""
        if self.postgres is not None and self.redis is not None:
            self.postgres.make()
            self.postgres.start()
            self.postgres.sql("CREATE DATABASE corral")
            self.redis.start()
        self.start_server()

    def write_policy(self, receiver: tuple[str, int] | None) -> None:
        """The shipped one, with little room for runs, so that some wait, and with a receiver of webhooks on this very host."""
        policy = dict(config.data_document(config.data_file("policy/default.yaml"), str(self.state)))
        policy["capacity"] = {**policy["capacity"], "running": RUNNING}
        policy["isolation"] = {**policy["isolation"], "require_enforced": []}  # also where limits are only watched
        if receiver is not None:
            policy["webhooks"] = {"http": True, "ports": [receiver[1]], "private": [f"{receiver[0]}/32"]}
        self.policy.write_text(json.dumps(policy))

    def make_tenants(self, count: int) -> list[str]:
        """Each with a key of its own; -> what their webhooks are signed with."""
        found = []
        for number in range(count):
            name = f"chaos-{number}"
            self._made("/v1/tenants", {"id": name})
            self.keys.append(self._made("/v1/keys", {"tenant": name, "scopes": ["run", "tenant"]})["key"])
            status, told = self.call("GET", "/v1/webhooks/secret", key=self.keys[-1])
            if status != 200:
                raise CorralError("infra_error", f"GET /v1/webhooks/secret: {told}", retryable=False)
            found.append(str(told["secret"]))
        return found

    def _made(self, path: str, document: Any) -> Any:
        status, told = self.call("POST", path, document)
        if status != 201:
            raise CorralError("infra_error", f"POST {path}: {told}", retryable=False)
        return told

    def start_server(self) -> None:
        """`corral serve`, on the same port every time."""
        if not self.port:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
        kept = {name: os.environ[name] for name in ("CORRAL_TEMPLATES", "CORRAL_RUNTIMES") if name in os.environ}
        env = {
            **clean,
            **kept,
            "CORRAL_STATE_DIR": str(self.state),
            "CORRAL_ADMIN_KEY": self.key,
            "CORRAL_WITNESS": str(self.witness),
        }
        if self.policy.exists():
            env["CORRAL_POLICY"] = str(self.policy)
        words = ["serve", "--port", str(self.port)]
        if self.postgres is not None and self.redis is not None:
            env |= {"CORRAL_DATABASE_URL": self.postgres.url(), "CORRAL_REDIS_URL": self.redis.url}
            words += ["--replicas", str(self.replicas)]
        with open(self.log, "ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-c", self._program, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                cwd="/",
                start_new_session=True,
            )
        assert self.server.stdout is not None
        line = self.server.stdout.readline().decode()
        if not line.startswith("corral: listening on "):
            raise CorralError("infra_error", f"corral serve did not start: {line!r} {self.said()}", retryable=False)

    def said(self) -> str:
        """The end of what the server logged."""
        try:
            return self.log.read_text(errors="replace")[-2000:]
        except OSError:
            return ""

    def ready(self) -> bool:
        """By its own word."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def readiness(self) -> str:
        """What the server says of itself."""
        try:
            return str(self.call("GET", "/readyz"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"nothing: {error}"

    def wait_ready(self, seconds: float = START_S) -> None:
        """Several times in a row, as another replica answers each time."""
        try:
            until(lambda: all(self.ready() for _ in range(2 * max(1, self.replicas))), "the server is ready", seconds)
        except CorralError as error:
            detail = f"{error.detail}; it says {self.readiness()}; its log ends: {self.said()}"
            raise CorralError("infra_error", detail, retryable=False) from error

    def call(self, method: str, path: str, document: Any = None, key: str | None = None) -> tuple[int, Any]:
        """One request, not repeated."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            body = None if document is None else json.dumps(document)
            connection.request(method, path, body, {"Authorization": f"Bearer {key or self.key}"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def stop_server(self) -> None:
        """Drained; sandboxes live on."""
        if self.server is not None and self.server.poll() is None:
            self.server.send_signal(signal.SIGCONT)
            self.server.terminate()
            try:
                self.server.wait(60)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()

    def sweep(self) -> None:
        """End bodies that no row knows any more, as an operator would after a restore; nothing else is running by now."""
        place = self.state / "i"
        names = os.listdir(place) if place.is_dir() else []
        wanted = {f"ins_{name}".encode() for name in names}
        for pid in filter(str.isdigit, os.listdir("/proc")) if wanted else ():
            with contextlib.suppress(OSError):
                if wanted & set(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")):
                    ref = process.ref_of(int(pid))
                    if ref is not None and process.kill(ref):
                        process.wait_gone_blocking(ref, 10.0)
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (point := line.split()[4]).startswith(f"{place}/"):
                subprocess.run(["umount", "-l", point], capture_output=True, check=False)

    def close(self) -> None:
        """All that was started here ends."""
        try:
            self.stop_server()
            self.sweep()
        finally:
            if self.redis is not None:
                self.redis.signal(signal.SIGCONT)
                self.redis.kill()
            if self.postgres is not None:
                self.postgres.stop()
            shutil.rmtree(self._sockets, ignore_errors=True)

    # -- its processes -----------------------------------------------------------------------------------------------------
    def children(self, word: str) -> list[process.ProcessRef]:
        """Processes that the server started, by a word of their command line (`replica`, `node`), oldest first."""
        if self.server is None:
            return []
        found = []
        for pid in _children_of(self.server.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue
            ref = process.ref_of(pid)
            if word in words and ref is not None:
                found.append(ref)
        return sorted(found, key=lambda ref: (ref.start_time, ref.pid))

    def has_leases(self) -> bool:
        """Whether leases have owners here."""
        return self.call("POST", "/v1/sandboxes/sbx_none/attach", {})[0] == 422

    def remains(self) -> dict[str, list[str]]:
        """What the host still shows of sandboxes: directories, mounts, loop devices, processes that carry the token."""
        found: dict[str, list[str]] = {"directory": [], "mount": [], "loop device": [], "process": []}
        place = f"{self.state}/i"
        if os.path.isdir(place):
            found["directory"] = sorted(os.listdir(place))
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if place in line:
                found["mount"].append(line)
        for device in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                name = device.read_text().strip()
            except OSError:
                continue
            if name.startswith(place):
                found["loop device"].append(name)
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").replace("\0", " ")
            except OSError:
                continue
            if self.token in line and "/workspace/" in line:
                found["process"].append(f"{pid} {line[-200:]}")
        return found


def _children_of(pid: int) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(int(entry))
    return found


def wait_until(moment: float, stop: Any) -> bool:
    """Until a moment of the monotonic clock; True when `stop` (an event) came first."""
    return bool(stop.wait(max(0.0, moment - time.monotonic())))
