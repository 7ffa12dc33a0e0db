"""Ten thousand random bad requests: each is refused as such, and the service's memory stays flat."""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

KEY = "a-key-for-bad-requests"
SEED = 20_261_130
REQUESTS = 10_000
PATIENCE_S = 60.0
WORDS = ("code", "language", "command", "shell", "files", "env", "cwd", "memory", "timeout_s", "pty", "stdin", "keep")
PATHS = (
    "/v1/runs", "/v1/sandboxes", "/v1/runs/run_x", "/v1/execs/exe_x/stdin", "/v1/execs/exe_x/signal", "/v1/gc/x",
    "/v1/sandboxes/sbx_x/execs", "/v1/sandboxes/sbx_x/files?path=x", "/v1/sandboxes/sbx_x/files/move", "/", "/%ff",
)  # fmt: skip


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """(port, pid) of a server whose runtime runs nothing."""
    recipes = tmp_path / "templates"
    recipes.mkdir()
    (recipes / "host.yaml").write_text(
        "name: host\nkind: frozen\ndescription: small\nprograms: [sh]\nlanguages: {bash: sh}\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
    with subprocess.Popen(
        [sys.executable, "-c", "from corral.cli.main import main; main()", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **clean,
            "CORRAL_STATE_DIR": str(tmp_path / "state"),
            "CORRAL_TEMPLATES": str(recipes),
            "CORRAL_RUNTIMES": "fake",
            "CORRAL_ADMIN_KEY": KEY,
        },
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().rpartition(":")[2]), process.pid
        process.terminate()
        process.wait(PATIENCE_S)


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def value(dice: random.Random, depth: int = 0) -> Any:
    match dice.randrange(9 if depth < 4 else 6):
        case 0:
            return None
        case 1:
            return dice.choice((True, False))
        case 2:
            return dice.choice((0, -1, 2**70, 1e308, -0.5, dice.randrange(10**6)))
        case 3:
            return "".join(dice.choices(string.printable + "ü你\ud800\x00", k=dice.randrange(40)))
        case 4:
            return "x" * dice.randrange(10_000)
        case 5:
            return "../" * dice.randrange(5) + "/etc/passwd"
        case 6 | 7:
            return [value(dice, depth + 1) for _ in range(dice.randrange(4))]
        case _:
            return {dice.choice(WORDS): value(dice, depth + 1) for _ in range(dice.randrange(4))}


def body(dice: random.Random) -> bytes:
    match dice.randrange(5):
        case 0:
            return os.urandom(0) + bytes(dice.randrange(256) for _ in range(dice.randrange(200)))
        case 1:
            return b"[" * dice.randrange(1, 5000)
        case 2:
            return b'{"shell":"true","shell":' + b"9" * dice.randrange(1, 6000) + b"}"
        case _:
            document = {dice.choice(WORDS): value(dice) for _ in range(dice.randrange(1, 5))}
            document["no_such_word"] = 1
            return json.dumps(document).encode()


def send(connection: http.client.HTTPConnection, dice: random.Random) -> int:
    path = dice.choice(PATHS)
    if dice.random() < 0.1:
        path += ("&" if "?" in path else "?") + "wait=" + "".join(dice.choices("0123456789-.exnaif", k=5)) + "x"
    headers = {"Authorization": f"Bearer {KEY if dice.random() < 0.8 else KEY[::-1]}"}
    if dice.random() < 0.2:
        headers["Idempotency-Key"] = "k" * dice.choice((0, 300, 5000))
    if dice.random() < 0.1:
        headers["Content-Type"] = "text/plain"
    connection.request(dice.choice(("POST", "POST", "POST", "PATCH", "PUT")), path, body=body(dice), headers=headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def garbage(port: int, dice: random.Random) -> None:
    """What is no HTTP, and who leaves in the middle."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as raw:
        if dice.random() < 0.5:
            raw.sendall(bytes(dice.randrange(256) for _ in range(100)) + b"\r\n\r\n")
            try:
                raw.recv(65536)
            except ConnectionError:
                pass
        else:
            raw.sendall(b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n")
            raw.sendall(b"Content-Length: 5000000\r\n\r\n" + b"x" * dice.randrange(100_000))


def test_ten_thousand_bad_requests_are_refused_and_leave_the_memory_flat(server: tuple[int, int]) -> None:
    port, pid = server
    dice = random.Random(SEED)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    seen: dict[int, int] = {}
    marks = []
    for number in range(REQUESTS):
        if number % 2000 == 0:
            marks.append(resident(pid))
        if number % 20 == 0:
            garbage(port, dice)
            continue
        try:
            status = send(connection, dice)
        except (http.client.RemoteDisconnected, ConnectionError, BrokenPipeError):  # it hung up after a refusal
            connection.close()
            status = 0
        seen[status] = seen.get(status, 0) + 1
    marks.append(resident(pid))
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()
    assert all(status == 0 or 400 <= status < 500 for status in seen), (SEED, seen)
    assert seen.get(0, 0) < REQUESTS // 20 and len(seen) >= 5, seen
    # The first thousands fill caches of the interpreter and of the allocator; what leaks shows after them.
    assert marks[-1] - marks[2] < 4 * 1024 * 1024, marks
    assert marks[-1] - marks[0] < 48 * 1024 * 1024, marks
