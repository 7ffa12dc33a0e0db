"""A real `corral serve` on loopback, spoken to as any program would: plain HTTP, no SDK; and a proxy that cuts connections."""

from __future__ import annotations

import base64
import http.client
import json
import os
import random
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

from .conftest import Box, owner_of

PATIENCE_S = 120.0
DOCUMENTED = frozenset(
    line.split("`")[1]
    for line in (Path(__file__).resolve().parents[2] / "docs/reference/errors.md").read_text().splitlines()
    if line.startswith("| `")
)
"""Codes of the reference page."""


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict), self.body[:500]
        return value

    @property
    def code(self) -> str | None:
        """Of a problem; None for anything else."""
        if self.headers.get("content-type") != "application/problem+json":
            return None
        return str(self.document["code"])

    def __str__(self) -> str:
        return f"{self.status} {self.body[:600]!r}"


@dataclass
class Event:
    """One server-sent event; a comment has the kind `:`."""

    kind: str
    cursor: str | None
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> bytes:
        if "base64" in self.data:
            return base64.b64decode(self.data["base64"])
        return str(self.data["text"]).encode()


def quoted(value: str | bytes) -> str:
    """One value of a query, every byte as it is."""
    return quote_from_bytes(value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape"), safe="")


def query_of(values: dict[str, Any]) -> str:
    def one(value: Any) -> str:
        return (
            ("true" if value else "false")
            if isinstance(value, bool)
            else quoted(value if isinstance(value, bytes) else str(value))
        )

    return "&".join(f"{name}={one(value)}" for name, value in values.items())


class Server:
    """One `corral serve` on a box's state directory. What it said on standard error is in `said`."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.name = box.name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        self.process = box.popen("serve", "--port", "0", stderr=self._errors)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line.startswith("corral: listening on http://127.0.0.1:"), (line, self.said)
        self.port = int(line.rpartition(":")[2])
        second = self.process.stdout.readline().decode()
        assert second.startswith("corral: admin key "), second
        self.key = second.split()[-1]
        pid = owner_of(box.state)
        assert pid is not None
        self.pid = pid

    @property
    def said(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode("utf-8", "replace")

    def stop(self) -> None:
        """Drained and gone."""
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, self.said

    def resident(self) -> int:
        """Bytes of memory that the service holds now."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the server is gone")

    # -- calls -----------------------------------------------------------------------------------------------------------------
    def connection(self, port: int | None = None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=PATIENCE_S)

    def call(
        self,
        method: str,
        target: str,
        body: bytes | Iterable[bytes] | None = None,
        *,
        document: Any = None,
        headers: dict[str, str] | None = None,
        port: int | None = None,
        **query: Any,
    ) -> Answer:
        fields = {"Authorization": f"Bearer {self.key}", **(headers or {})}
        if document is not None:
            body = json.dumps(document).encode()
            fields["Content-Type"] = "application/json"
        if query:
            target += "?" + query_of(query)
        connection = self.connection(port)
        try:
            chunked = body is not None and not isinstance(body, bytes)
            connection.request(method, target, body=body, headers=fields, encode_chunked=chunked)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, found, answer.read())
        finally:
            connection.close()

    def create(self, **wishes: Any) -> str:
        """A sandbox on this server's runtime."""
        answer = self.call("POST", "/v1/sandboxes", document={"runtime": self.box.runtime, **wishes})
        assert answer.status == 201, answer
        return str(answer.document["id"])

    def delete(self, sandbox: str, **query: Any) -> Answer:
        return self.call("DELETE", f"/v1/sandboxes/{sandbox}", **query)

    def start(self, sandbox: str, *argv: str, **more: Any) -> str:
        """An exec that is not waited for -> its id."""
        answer = self.call("POST", f"/v1/sandboxes/{sandbox}/execs", document={"argv": list(argv), "wait": 0, **more})
        assert answer.status in (200, 202), answer
        return str(answer.document["id"])

    def run(self, sandbox: str, *argv: str, **more: Any) -> dict[str, Any]:
        """An exec to its end -> its result."""
        answer = self.call("POST", f"/v1/sandboxes/{sandbox}/execs", document={"argv": list(argv), "wait": 100, **more})
        assert answer.status == 200, answer
        result = answer.document["result"]
        assert isinstance(result, dict)
        return result

    def result(self, exec_id: str) -> dict[str, Any]:
        """The result of an exec, waited for."""
        answer = self.call("GET", f"/v1/execs/{exec_id}", wait=100)
        assert answer.status == 200, answer
        result = answer.document["result"]
        assert isinstance(result, dict), answer
        return result

    def events(self, target: str, *, port: int | None = None, headers: dict[str, str] | None = None) -> Iterator[Event]:
        """Events of a stream until it ends; a connection that breaks is OSError or HTTPException, a refusal is `Refusal`."""
        connection = self.connection(port)
        try:
            connection.request("GET", target, headers={"Authorization": f"Bearer {self.key}", **(headers or {})})
            answer = connection.getresponse()
            if answer.status != 200:
                found = {name.lower(): value for name, value in answer.getheaders()}
                raise Refusal(Answer(answer.status, found, answer.read()))
            kind, cursor, data = "", None, ""
            while True:
                whole = answer.readline()
                if not whole.endswith(b"\n"):
                    return
                line = whole.decode()
                if line == "\n":
                    if kind:
                        yield Event(kind, cursor, json.loads(data))
                    kind, cursor, data = "", None, ""
                elif line.startswith(":"):
                    yield Event(":", None)
                elif line.startswith("event: "):
                    kind = line[7:-1]
                elif line.startswith("id: "):
                    cursor = line[4:-1]
                elif line.startswith("data: "):
                    data += line[6:-1]
        finally:
            connection.close()


class Refusal(Exception):
    """A stream that was refused before it began."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(str(answer))
        self.answer = answer


class Peak:
    """The most memory that a server held meanwhile."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __enter__(self) -> Peak:
        self.begun = self.most = self._server.resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, self._server.resident())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.begun


class CuttingProxy:
    """Carries bytes to a port of loopback and cuts each connection at a random moment, `cuts` times in all.

    The moment is a random number of bytes (in the middle of a line, of a code point, of the head) or a random time, whichever is
    first; half of the cuts are resets, which also throw away what was on its way.
    """

    def __init__(self, target: int, seed: int, cuts: int, *, most_bytes: int, most_s: float) -> None:
        self._target = target
        self._dice = random.Random(seed)
        self._guard = threading.Lock()
        self._left = cuts
        self._most_bytes, self._most_s = most_bytes, most_s
        self.cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            with self._guard:
                doomed = self._left > 0
                self._left -= doomed
                room = self._dice.randrange(1, self._most_bytes) if doomed else None
                seconds = self._dice.uniform(0, self._most_s) if doomed else None
                reset = self._dice.random() < 0.5
            threading.Thread(target=self._up, args=(near, far), daemon=True).start()
            threading.Thread(target=self._down, args=(far, near, room, seconds, reset), daemon=True).start()

    def _up(self, near: socket.socket, far: socket.socket) -> None:
        try:
            while piece := near.recv(65536):
                far.sendall(piece)
            far.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _down(
        self, far: socket.socket, near: socket.socket, room: int | None, seconds: float | None, reset: bool
    ) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        doomed = room is not None
        try:
            while room is None or room > 0:
                if until is not None:
                    far.settimeout(max(0.001, until - time.monotonic()))
                piece = far.recv(65536 if room is None else min(65536, room))
                if not piece:
                    room = None  # it ended by itself
                    return
                near.sendall(piece)
                room = None if room is None else room - len(piece)
        except TimeoutError:
            pass
        except OSError:
            return
        finally:
            with self._guard:
                if room is None:
                    self._left += doomed  # spared: another one is cut instead
                else:
                    self.cut += 1
            for sock in (near, far):
                try:
                    if reset and room is not None:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
                sock.close()


def remains(state: Path, instances: Iterable[str]) -> dict[str, list[str]]:
    """What the host still shows of instances: directories, mounts, loop devices, cgroups, namespaces that are kept, processes."""
    wanted = list(instances)
    found: dict[str, list[str]] = {}

    def note(kind: str, text: str) -> None:
        if any(one in text for one in wanted):
            found.setdefault(kind, []).append(text)

    for name in os.listdir(state / "i"):
        note("directory", name)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        note("mount", line)
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            note("loop device", device.read_text())
        except OSError:
            continue
    for above, below, _ in os.walk("/sys/fs/cgroup"):
        for name in below:
            note("cgroup", f"{above}/{name}")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            note("process", Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace"))
            for fd in os.listdir(f"/proc/{pid}/fd"):
                note("open file", os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
    return found
