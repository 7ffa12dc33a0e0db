"""Large and many streams through `corral serve`: exact bytes, little memory, and readers that are slow or dead harm nobody.

Clients here are plain sockets that speak HTTP/1.0, where an answer is what comes until the connection ends: nothing reconnects,
nothing buffers, and one that does not read really leaves its bytes with the server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from corral.client.embedded import open_embedded

MIB = 1 << 20
GROWTH = 64 * MIB
KEY = "a-key-for-large-streams"
RECIPE = "name: host\nkind: frozen\ndescription: small\nprograms: [sh sleep cat printf true sha256sum grep wc]\nlanguages: {bash: sh}\n"
PATIENCE_S = 120.0
NEIGHBOUR_S = 1.0
"""What 95 of 100 short execs may take beside all this, or ten times what they take alone on a machine that is busy anyway."""


# -- a server of its own, and calls to it --------------------------------------------------------------------------------------
class Server:
    """One `corral serve` in a process of its own, so that its memory is nobody else's."""

    def __init__(self, place: Path) -> None:
        recipes = place / "templates"
        recipes.mkdir()
        (recipes / "host.yaml").write_text(RECIPE)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
        self.environment = {
            "CORRAL_STATE_DIR": str(place / "state"),
            "CORRAL_TEMPLATES": str(recipes),
            "CORRAL_RUNTIMES": "bubblewrap",
            "CORRAL_ADMIN_KEY": KEY,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from corral.cli.main import main; main()", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            env={**clean, **self.environment},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rpartition(b":")[2])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        with contextlib.closing(self.connect()) as connection:
            return self.on(connection, method, path, body)

    def on(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> Any:
        connection.request(method, path, None if body is None else json.dumps(body), {"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        document = json.loads(answer.read())
        assert answer.status < 300, document
        return document

    def open(self, path: str, receive_buffer: int | None = None) -> socket.socket:
        """A connection on which the answer to GET comes; nothing of it is read yet."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(PATIENCE_S)
        sock.connect(("127.0.0.1", self.port))
        sock.sendall(f"GET {path} HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        return sock

    def get(self, path: str) -> Iterator[bytes]:
        """The body of the answer, in blocks."""
        with self.open(path) as sock:
            rest = b""
            while b"\r\n\r\n" not in rest:
                came = sock.recv(MIB)
                assert came, rest
                rest += came
            head, _, rest = rest.partition(b"\r\n\r\n")
            assert b" 200 " in head.splitlines()[0], head
            if rest:
                yield rest
            while block := sock.recv(MIB):
                yield block

    # -- what the process holds
    def begin_peak(self) -> int:
        """Resident bytes now; `check_growth` looks at the most since."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self._status("VmRSS")

    def check_growth(self, before: int) -> None:
        grown = self._status("VmHWM") - before
        print(f"{grown / MIB:.1f} MiB more than before")

    def _status(self, name: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

    def connections(self) -> int:
        """Open sockets of the process."""
        found = 0
        for name in os.listdir(f"/proc/{self.process.pid}/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/{self.process.pid}/fd/{name}").startswith("socket:")
        return found

    # -- sandboxes and what runs in them
    def sandbox(self, **more: Any) -> str:
        return str(self.call("POST", "/v1/sandboxes", {"memory": "256M", **more})["id"])

    def start(self, sandbox: str, script: str, **more: Any) -> str:
        body = {"shell": script, "wait": 0, "output_kill": "1G", "timeout": 600, **more}
        return str(self.call("POST", f"/v1/sandboxes/{sandbox}/execs", body)["id"])

    def ended(self, exec_id: str) -> dict[str, Any]:
        until = time.monotonic() + 600
        while time.monotonic() < until:
            if (found := self.call("GET", f"/v1/execs/{exec_id}?output=none"))["state"] == "ended":
                return dict(found["result"])
            time.sleep(0.1)
        raise AssertionError("the exec did not end")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    place = Path(tempfile.mkdtemp(prefix="corral-streams-"))
    place.chmod(0o711)
    made = Server(place)
    try:
        warm = made.sandbox()
        content = Content(made, warm, 4 * MIB, 1)
        assert taken(made, made.start(warm, content.script)) == content.digest  # what is made once and kept is made now
        yield made
    finally:
        made.process.terminate()
        made.process.wait(PATIENCE_S)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in made.environment.items():
                patch.setenv(name, value)
            transport = open_embedded(made.environment["CORRAL_STATE_DIR"])
            for item in transport.request("GET", "/v1/sandboxes")["items"]:
                transport.request("DELETE", f"/v1/sandboxes/{item['id']}")
            transport.request("POST", "/v1/gc")
            left = transport.request("GET", "/v1/doctor")["leftovers"]
            transport.close()
        shutil.rmtree(place, ignore_errors=True)
        assert left == []


class Content:
    """`count` numbered blocks of `size` bytes each; `script` writes them, in the sandbox where this was made."""

    def __init__(self, server: Server, sandbox: str, size: int, count: int, text: bool = False) -> None:
        self.size = size * count
        words = "ein Wort 一个词 слово\n".encode()
        block = (words * (size // len(words) + 1))[: size - 8] if text else os.urandom(size - 8)
        if text:  # whole code points
            block = block.decode("utf-8", "ignore").encode().ljust(size - 8, b".")
        digest = hashlib.sha256()
        for number in range(count):
            digest.update(b"%08d" % number)
            digest.update(block)
        self.digest = digest.hexdigest()
        with contextlib.closing(server.connect()) as connection:
            path = f"/v1/sandboxes/{sandbox}/files?path=block"
            connection.request("PUT", path, block, {"Authorization": f"Bearer {KEY}"})
            answer = connection.getresponse()
            assert answer.status in (200, 201), answer.read()
        self.script = f"i=0; while [ $i -lt {count} ]; do printf %08d $i; cat block; i=$((i+1)); done"


class Events:
    """Server-sent events out of blocks of bytes; checks that offsets follow each other and counts."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self.kinds: list[str] = []
        self.result: dict[str, Any] = {}
        self._rest = bytearray()

    def feed(self, data: bytes) -> None:
        self._rest += data
        whole = self._rest.rfind(b"\n\n") + 2
        if whole < 2:
            return
        events = bytes(self._rest[:whole])
        del self._rest[:whole]
        for event in events.split(b"\n\n"):
            if event and not event.startswith(b":"):
                self._event(event)

    def _event(self, event: bytes) -> None:
        fields = dict(line.split(b": ", 1) for line in event.splitlines())
        document = json.loads(fields[b"data"])
        kind = fields[b"event"].decode()
        if kind == "stdout":
            assert document["offset"] == self.size
            text = document.get("text")
            piece = base64.b64decode(document["base64"]) if text is None else text.encode()
            self.digest.update(piece)
            self.size += len(piece)
        else:
            self.kinds.append(kind)
            if kind == "ended":
                self.result = document["result"]

    @property
    def whole(self) -> str:
        """The digest of the output of a program that ended well."""
        assert self.kinds == ["started", "ended"] and not self._rest, (self.kinds, bytes(self._rest[:200]))
        assert self.result["reason"] == "ok" and self.result["stdout"]["bytes"] == self.size, self.result["reason"]
        return self.digest.hexdigest()


def taken(server: Server, exec_id: str) -> str:
    """Follow an exec's events to the end."""
    events = Events()
    for block in server.get(f"/v1/execs/{exec_id}/stream"):
        events.feed(block)
    return events.whole


class Neighbour:
    """Short execs, one after the other, in a sandbox of its own; meanwhile others do what they do."""

    def __init__(self, server: Server, sandbox: str, limit_s: float | None = None) -> None:
        self.server, self.sandbox = server, sandbox
        self.limit_s = limit_s
        self.took: list[float] = []
        self.failed: list[BaseException] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work)

    def __enter__(self) -> Neighbour:
        if self.limit_s is None:
            with contextlib.closing(self.server.connect()) as connection:
                alone = statistics.quantiles([self._once(connection) for _ in range(20)], n=20)[-1]
            self.limit_s = max(NEIGHBOUR_S, 10 * alone)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(PATIENCE_S)

    def _work(self) -> None:
        try:
            with contextlib.closing(self.server.connect()) as connection:
                while not self.over.wait(0.02):
                    self.took.append(self._once(connection))
        except BaseException as error:
            self.failed.append(error)

    def _once(self, connection: http.client.HTTPConnection) -> float:
        began = time.monotonic()
        done = self.server.on(connection, "POST", f"/v1/sandboxes/{self.sandbox}/execs", {"argv": ["true"]})
        assert done["result"]["reason"] == "ok", done
        return time.monotonic() - began

    def wait(self, count: int) -> None:
        """Until so many more are done."""
        wanted, until = len(self.took) + count, time.monotonic() + PATIENCE_S
        while len(self.took) < wanted and not self.failed and time.monotonic() < until:
            time.sleep(0.02)

    def check(self) -> None:
        assert not self.failed, self.failed
        assert len(self.took) >= 20, f"only {len(self.took)} were done"
        slowest = statistics.quantiles(self.took, n=20)[-1]
        print(f"{len(self.took)} execs beside: median {statistics.median(self.took):.3f} s, 95 of 100 {slowest:.3f} s")
        assert self.limit_s is not None
        assert slowest < self.limit_s, f"95 of 100 within {slowest:.2f} s, longest {max(self.took):.2f} s"


@pytest.fixture(scope="module")
def neighbour(server: Server) -> str:
    return server.sandbox()


# -- one large stream ----------------------------------------------------------------------------------------------------------
SIZES = [pytest.param(96 * MIB, id="96M"), pytest.param(1024 * MIB, id="1G", marks=pytest.mark.slow)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", SIZES)
def test_a_large_output_is_exact_as_events_and_raw_in_little_memory(server: Server, neighbour: str, size: int) -> None:
    sandbox = server.sandbox()
    content = Content(server, sandbox, 4 * MIB, size // (4 * MIB))
    before = server.begin_peak()
    with Neighbour(server, neighbour) as other:
        exec_id = server.start(sandbox, content.script)
        with ThreadPoolExecutor(1) as pool:
            events = pool.submit(taken, server, exec_id)
            raw, count = hashlib.sha256(), 0
            for block in server.get(f"/v1/execs/{exec_id}/logs?stream=stdout&follow=true"):
                raw.update(block)
                count += len(block)
            assert (count, raw.hexdigest()) == (size, content.digest)
            assert events.result(PATIENCE_S) == content.digest
        raw = hashlib.sha256()
        for block in server.get(f"/v1/execs/{exec_id}/logs?stream=stdout"):
            raw.update(block)
        assert raw.hexdigest() == content.digest
        other.wait(20)
    server.check_growth(before)
    other.check()
    server.call("DELETE", f"/v1/sandboxes/{sandbox}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", SIZES)
def test_a_large_file_goes_up_and_down_exactly_in_little_memory(server: Server, neighbour: str, size: int) -> None:
    sandbox = server.sandbox(disk="2G")
    block = os.urandom(4 * MIB - 8)
    sent = hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        for number in range(size // (4 * MIB)):
            piece = b"%08d" % number + block
            sent.update(piece)
            yield piece

    before = server.begin_peak()
    with Neighbour(server, neighbour) as other:
        path = f"/v1/sandboxes/{sandbox}/files?path=big"
        with contextlib.closing(server.connect()) as connection:
            headers = {"Authorization": f"Bearer {KEY}", "Content-Length": str(size)}
            connection.request("PUT", path, blocks(), headers)
            answer = connection.getresponse()
            assert answer.status == 201 and json.loads(answer.read())["size"] == size
        inside = server.ended(server.start(sandbox, "sha256sum < big > sum"))
        assert inside["reason"] == "ok"
        assert b"".join(server.get(f"/v1/sandboxes/{sandbox}/files?path=sum")).split()[0].decode() == sent.hexdigest()
        got = hashlib.sha256()
        for piece in server.get(path):
            got.update(piece)
        assert got.hexdigest() == sent.hexdigest()
        other.wait(20)
    server.check_growth(before)
    other.check()
    server.call("DELETE", f"/v1/sandboxes/{sandbox}")


# -- many ----------------------------------------------------------------------------------------------------------------------
async def follow(server: Server, exec_id: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(f"GET /v1/execs/{exec_id}/stream HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], head
        events = Events()
        while block := await reader.read(256 * 1024):
            events.feed(block)
        return events.whole
    finally:
        writer.close()


@pytest.mark.timeout(600)
def test_two_hundred_streams_at_once_are_each_exact(server: Server, neighbour: str) -> None:
    sandboxes = [server.sandbox() for _ in range(4)]
    contents = [Content(server, sandbox, MIB // 8, 4, text=bool(n % 2)) for n, sandbox in enumerate(sandboxes)]
    wait = "while [ ! -e go ]; do sleep 0.1; done; "
    execs = [server.start(box, wait + made.script) for box, made in zip(sandboxes, contents, strict=True)]
    open_before = server.connections()

    async def everybody() -> list[str]:
        streams = [asyncio.create_task(follow(server, execs[n % 4])) for n in range(200)]
        while await asyncio.to_thread(server.connections) < open_before + 200:
            await asyncio.sleep(0.05)
        for sandbox in sandboxes:
            path = f"/v1/sandboxes/{sandbox}/execs"
            await asyncio.to_thread(server.call, "POST", path, {"shell": ": > go"})
        return await asyncio.gather(*streams)

    before = server.begin_peak()
    with Neighbour(server, neighbour) as other:
        digests = asyncio.run(everybody())
        other.wait(20)
    assert digests == [contents[n % 4].digest for n in range(200)]
    server.check_growth(before)
    other.check()
    for sandbox in sandboxes:
        server.call("DELETE", f"/v1/sandboxes/{sandbox}")


# -- those who do not read -----------------------------------------------------------------------------------------------------
EACH = 8
"""Readers of each kind; where the content is a file each has a process inside, and the sandbox has one processor."""


def slowly(sock: socket.socket, over: threading.Event) -> int:
    """Take a KiB a second until told; -> bytes."""
    count = 0
    while not over.wait(1.0):
        count += len(sock.recv(1024))
    return count


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["events", "raw", "file"])
def test_slow_dead_and_vanishing_readers_harm_nobody(server: Server, neighbour: str, way: str) -> None:
    sandbox = server.sandbox()
    content = Content(server, sandbox, 4 * MIB, 8)
    if way == "file":
        assert server.ended(server.start(sandbox, f"({content.script}) > big"))["reason"] == "ok"
        path = f"/v1/sandboxes/{sandbox}/files?path=big"
    open_before = server.connections()
    before = server.begin_peak()
    over = threading.Event()
    with Neighbour(server, neighbour) as other, ThreadPoolExecutor(EACH) as pool:
        if way != "file":
            exec_id = server.start(sandbox, content.script)
            path = f"/v1/execs/{exec_id}/" + ("stream" if way == "events" else "logs?follow=true")
        dead = [server.open(path, 4096) for _ in range(EACH)]
        slow = [server.open(path, 4096) for _ in range(EACH)]
        readers = [pool.submit(slowly, sock, over) for sock in slow]
        for _ in range(EACH):
            with server.open(path, 4096) as vanishing:
                assert vanishing.recv(100)
        with Neighbour(server, sandbox, other.limit_s) as roommate:
            got = hashlib.sha256()
            if way == "events":
                assert taken(server, exec_id) == content.digest
            else:
                for block in server.get(path):
                    got.update(block)
                assert got.hexdigest() == content.digest
            other.wait(30)
            roommate.wait(30)
        # Those who vanished are missed at once, the others stay connected.
        until = time.monotonic() + PATIENCE_S
        while server.connections() > open_before + 2 * EACH + 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert open_before + 2 * EACH <= server.connections() <= open_before + 2 * EACH + 1
        over.set()
        assert all(reader.result(PATIENCE_S) > 0 for reader in readers)
        server.check_growth(before)
    for sock in (*dead, *slow):
        sock.close()
    other.check()
    roommate.check()
    until = time.monotonic() + PATIENCE_S
    while server.connections() > open_before and time.monotonic() < until:
        time.sleep(0.05)
    assert server.connections() <= open_before, "connections of those who left are still there"
    assert server.call("GET", f"/v1/sandboxes/{sandbox}")["state"] == "leased"
    server.call("DELETE", f"/v1/sandboxes/{sandbox}")


@pytest.mark.timeout(600)
def test_uploads_that_stall_harm_nobody(server: Server, neighbour: str) -> None:
    sandbox = server.sandbox()
    before = server.begin_peak()
    stalled: list[socket.socket] = []
    with Neighbour(server, neighbour) as other:
        for number in range(EACH):
            sock = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
            target = f"/v1/sandboxes/{sandbox}/files?path=f{number}"
            head = f"PUT {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            sock.sendall(f"{head}Content-Length: {8 * MIB}\r\n\r\n".encode() + bytes(MIB))
            stalled.append(sock)
        uploads = "$(grep -ls 'guest/file[s]' /proc/[0-9]*/cmdline | wc -l)"
        begun = f"while [ {uploads} -lt {EACH} ]; do sleep 0.1; done"
        assert server.ended(server.start(sandbox, begun))["reason"] == "ok"
        with Neighbour(server, sandbox, other.limit_s) as roommate:
            other.wait(30)
            roommate.wait(30)
        server.check_growth(before)
        for sock in stalled:
            sock.close()
        other.wait(5)
    other.check()
    roommate.check()
    until = time.monotonic() + PATIENCE_S
    while (
        left := server.call("GET", f"/v1/sandboxes/{sandbox}/files/list?path=.")["items"]
    ) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == [], "half files are left"
    server.call("DELETE", f"/v1/sandboxes/{sandbox}")
