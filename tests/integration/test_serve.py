"""`corral serve`: who may own, who may call, what a stop leaves running; and the API over TCP as programs meet it."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import socket
import stat
import struct
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
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from corral.client.embedded import open_embedded

RECIPE = "name: host\nkind: frozen\ndescription: small\nprograms: [sh sleep cat printf stty]\nlanguages: {bash: sh}\n"
PATIENCE_S = 60.0


class Server:
    """One `corral serve` of ours, and calls to it."""

    def __init__(self, state: Path, *words: str, **environment: str) -> None:
        self.state = state
        clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
        kept = {name: os.environ[name] for name in ("CORRAL_TEMPLATES", "CORRAL_RUNTIMES") if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from corral.cli.main import main; main()", "serve", "--port", "0", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, **kept, "CORRAL_STATE_DIR": str(state), **environment},
        )
        self.key = ""
        self.host, self.port = "127.0.0.1", 0

    def started(self, *, first: bool) -> Server:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("corral: listening on http"), (line, self.process.communicate(timeout=PATIENCE_S))
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])
        if first:
            self.second = self.process.stdout.readline().strip()
            self.key = self.second.removeprefix("corral: admin key ")
        return self

    def ended(self, number: int | None = signal.SIGTERM) -> tuple[str, str]:
        """(rest of stdout, stderr) after the signal."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.communicate(timeout=PATIENCE_S)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, key: str | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        try:
            raw = json.dumps(body).encode() if isinstance(body, dict | list) else body
            given = {"Authorization": f"Bearer {self.key if key is None else key}", **(headers or {})}
            connection.request(method, path, body=raw, headers=given)
            answer = connection.getresponse()
            fields = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, fields, answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        status, _, raw = self.call(method, path, body, headers)
        return status, json.loads(raw)

    def socket(self, exec_id: str, query: str = "", key: str | None = None) -> ClientConnection:
        return connect(
            f"ws://{self.host}:{self.port}/v1/execs/{exec_id}/ws{query}",
            additional_headers={"Authorization": f"Bearer {self.key if key is None else key}"},
            proxy=None,
            open_timeout=PATIENCE_S,
        )


def _state(runtime: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    recipes = place / "templates"
    recipes.mkdir()
    (recipes / "host.yaml").write_text(RECIPE)
    monkeypatch.setenv("CORRAL_TEMPLATES", str(recipes))
    monkeypatch.setenv("CORRAL_RUNTIMES", runtime)
    return place / "state"


@pytest.fixture
def above() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="corral-serve-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def state(above: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A name for a state directory, with the runtime that runs nothing."""
    return _state("fake", above, monkeypatch)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server with real sandboxes for all tests that leave it as it was."""
    with pytest.MonkeyPatch.context() as patch:
        place = Path(tempfile.mkdtemp(prefix="corral-serve-"))
        place.chmod(0o711)
        made = Server(_state("bubblewrap", place, patch))
        try:
            yield made.started(first=True)
        finally:
            made.ended()
            _empty(made.state)
            shutil.rmtree(place, ignore_errors=True)


def _empty(state: Path) -> None:
    transport = open_embedded(str(state))
    try:
        for item in transport.request("GET", "/v1/sandboxes")["items"]:
            transport.request("DELETE", f"/v1/sandboxes/{item['id']}")
        transport.request("POST", "/v1/gc")
        assert transport.request("GET", "/v1/doctor")["leftovers"] == []
    finally:
        transport.close()


@pytest.fixture(scope="module")
def sandbox(server: Server) -> str:
    status, made = server.json("POST", "/v1/sandboxes", {})
    assert status == 201, made
    return str(made["id"])


# -- the server itself ---------------------------------------------------------------------------------------------------------
def test_the_key_is_shown_once_and_kept_as_a_hash_only(state: Path) -> None:
    first = Server(state).started(first=True)
    assert first.second == f"corral: admin key {first.key}" and len(first.key) > 40
    assert first.call("GET", "/v1/runs")[0] == 200
    assert first.ended()[0] == "" and first.process.returncode == 0
    kept = state / "admin.key"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    for file in state.rglob("*"):
        if file.is_file() and file.stat().st_size < 1_000_000:
            assert first.key.encode() not in file.read_bytes(), file
    second = Server(state).started(first=False)
    second.key = first.key
    assert second.call("GET", "/v1/runs")[0] == 200
    assert second.ended(signal.SIGINT) == ("", "corral: stopping: new work is refused, what runs lives on\n")
    assert second.process.returncode == 0


def test_an_operator_sets_the_key_and_sets_another(state: Path) -> None:
    mine = "a-key-of-the-operator"
    first = Server(state, CORRAL_ADMIN_KEY=mine).started(first=True)
    assert first.second == "corral: admin key set by CORRAL_ADMIN_KEY"
    assert first.call("GET", "/v1/runs", key=mine)[0] == 200
    first.ended()
    other = Server(state, CORRAL_ADMIN_KEY="another-of-the-operator").started(first=True)
    assert other.call("GET", "/v1/runs", key=mine)[0] == 401
    assert other.call("GET", "/v1/runs", key="another-of-the-operator")[0] == 200
    other.ended()
    bad = Server(state, CORRAL_ADMIN_KEY="short")
    assert "CORRAL_ADMIN_KEY" in bad.ended(None)[1] and bad.process.returncode == 125


def test_without_the_key_only_health_is_answered(state: Path) -> None:
    server = Server(state).started(first=True)
    try:
        assert server.call("GET", "/healthz", key="")[0] == 200
        status, _, raw = server.call("GET", "/readyz", key="")
        assert (status, json.loads(raw)) == (503, {"status": "no runtime", "missing": []}), (
            "the runtime that runs nothing is no default"
        )
        for authorization in (
            "",
            f"Bearer {server.key}x",
            f"Basic {server.key}",
            server.key,
            "Bearer " + server.key[:-1],
        ):
            status, fields, raw = server.call("GET", "/v1/runs", headers={"Authorization": authorization})
            assert (status, json.loads(raw)["code"]) == (401, "unauthorized")
            assert fields["www-authenticate"] == "Bearer"
            assert fields["content-type"] == "application/problem+json"
        assert server.call("GET", "/v1/nothing", key="")[0] == 401, "paths are not told to strangers"
        assert server.call("GET", "/v1/runs", headers={"Authorization": f"bearer {server.key}"})[0] == 200
    finally:
        server.ended()


def test_a_second_owner_is_told_who_the_first_is(state: Path) -> None:
    first = Server(state).started(first=True)
    try:
        second = Server(state)
        out, err = second.ended(None)
        assert (out, second.process.returncode) == ("", 125)
        assert "state_locked" in err and f"process {first.process.pid} " in err and str(state) in err
    finally:
        first.ended()


def test_beyond_loopback_needs_tls_or_a_word_that_says_unsafe(state: Path) -> None:
    refused = Server(state, "--host", "0.0.0.0")
    assert "--unsafe-plaintext" in refused.ended(None)[1] and refused.process.returncode == 2
    assert not state.exists(), "nothing was made for a server that does not start"
    plain = Server(state, "--host", "0.0.0.0", "--unsafe-plaintext").started(first=True)
    assert plain.call("GET", "/v1/runs")[0] == 200
    assert "warning: --unsafe-plaintext" in plain.ended()[1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls_serves_https_and_bad_files_are_named(state: Path, above: Path) -> None:
    key, certificate = above / "key.pem", above / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    import ssl

    server = Server(state, "--host", "0.0.0.0", "--tls-cert", str(certificate), "--tls-key", str(key))
    server.started(first=True)
    assert server.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(certificate))
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=PATIENCE_S, context=trusted)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()
    server.ended()
    swapped = Server(state, "--tls-cert", str(key), "--tls-key", str(certificate))
    assert str(key) in swapped.ended(None)[1] and swapped.process.returncode == 125


def test_two_replicas_on_one_sqlite_file_are_refused(state: Path) -> None:
    server = Server(state, "--replicas", "2")
    assert "one SQLite file has one server" in server.ended(None)[1] and server.process.returncode == 125
    assert not state.exists()


def test_a_port_that_is_taken_is_said(state: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = Server(state, "--port", str(port))
        assert f"port {port}" in server.ended(None)[1] and server.process.returncode == 125


@pytest.mark.root
def test_a_stop_refuses_new_work_lets_calls_end_and_leaves_what_runs_alive(
    above: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _state("bubblewrap", above, monkeypatch)
    server = Server(state).started(first=True)
    _, made = server.json("POST", "/v1/sandboxes", {})
    execs = f"/v1/sandboxes/{made['id']}/execs"
    _, running = server.json("POST", execs, {"shell": "echo begun; sleep 25; echo done", "wait": 0})

    stream = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    stream.request("GET", f"/v1/execs/{running['id']}/stream", headers={"Authorization": f"Bearer {server.key}"})
    following = stream.getresponse()
    seen = b""
    while b"begun" not in seen:
        seen += following.readline()
    ends: list[Any] = []
    short = threading.Thread(target=lambda: ends.append(server.json("POST", execs, {"shell": "sleep 3; echo short"})))
    short.start()
    while len(server.json("GET", execs)[1]["items"]) < 2:
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + PATIENCE_S
    while server.call("GET", "/readyz")[0] == 200:
        assert time.monotonic() < until
        time.sleep(0.02)
    for path, body in ((execs, {"shell": "true"}), ("/v1/runs", {"shell": "true"}), ("/v1/sandboxes", {})):
        status, fields, raw = server.call("POST", path, body)
        assert (status, json.loads(raw)["code"], json.loads(raw)["retryable"]) == (503, "shutting_down", True)
        assert int(fields["retry-after"]) >= 1
    short.join(PATIENCE_S)
    assert ends[0][0] == 200 and ends[0][1]["result"]["stdout"]["text"] == "short\n"
    rest = following.read().decode()
    assert "event: error" in rest and "shutting_down" in rest and "retry: " in rest
    stream.close()
    server.ended(None)
    assert server.process.returncode == 0

    cursor = [line for line in seen.decode().splitlines() if line.startswith("id: ")][-1].removeprefix("id: ")
    again = Server(state).started(first=False)
    again.key = server.key
    try:
        status, _, raw = again.call("GET", f"/v1/execs/{running['id']}/stream", headers={"Last-Event-ID": cursor})
        assert status == 200
        output, ended, _ = raw.partition(b"event: ended")  # which has the result, and little output again
        assert b'"text":"done\\n"' in output and b"begun" not in output and ended
        assert again.json("POST", execs, {"shell": "echo alive"})[1]["result"]["stdout"]["text"] == "alive\n"
    finally:
        again.ended()
        _empty(state)


@pytest.mark.root
def test_the_second_signal_ends_at_once(above: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = _state("bubblewrap", above, monkeypatch)
    server = Server(state).started(first=True)
    waiting = threading.Thread(target=_ignoring, args=(server, "POST", "/v1/runs", {"shell": "sleep 30"}))
    waiting.start()
    while not server.json("GET", "/v1/runs")[1]["items"]:
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    while server.call("GET", "/readyz")[0] == 200:
        time.sleep(0.02)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE_S) == 143 and time.monotonic() - began < 20
    server.ended(None)
    waiting.join(PATIENCE_S)
    _empty(state)


def _ignoring(server: Server, *words: Any) -> None:
    try:
        server.call(*words)
    except (OSError, http.client.HTTPException):
        pass


# -- the wire ------------------------------------------------------------------------------------------------------------------
def test_a_wrong_method_is_405_with_what_the_path_takes(server: Server) -> None:
    for method, path, takes in (
        ("PATCH", "/v1/runs", "GET, HEAD, POST"),
        ("OPTIONS", "/v1/sandboxes", "GET, HEAD, POST"),
        ("GET", "/v1/gc", "POST"),
        ("HEAD", "/v1/gc", "POST"),
        ("POST", "/healthz", "GET, HEAD"),
    ):
        status, fields, raw = server.call(method, path)
        assert (status, fields["allow"]) == (405, takes)
        if method != "HEAD":
            assert json.loads(raw)["code"] == "method_not_allowed" and json.loads(raw)["hint"]


def test_head_is_get_without_a_body(server: Server, sandbox: str) -> None:
    for path in ("/healthz", "/v1/runs", f"/v1/sandboxes/{sandbox}", "/v1/nothing"):
        status, fields, raw = server.call("HEAD", path)
        assert status == (404 if "nothing" in path else 200)
        assert raw == b"" and int(fields["content-length"]) > 0


def test_what_is_too_large_is_refused_in_the_api_s_words(server: Server) -> None:
    status, _, raw = server.call("GET", "/v1/runs?after=" + "x" * 20_000)
    assert (status, json.loads(raw)["code"]) == (414, "url_too_long")
    status, _, raw = server.call("GET", "/v1/runs", headers={"X-Large": "x" * 100_000})
    assert (status, json.loads(raw)["code"]) == (431, "headers_too_large")
    status, _, raw = server.call("POST", "/v1/runs", b" " * (33 * 1024 * 1024))
    assert (status, json.loads(raw)["code"]) == (413, "too_large")
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as raw_socket:
        raw_socket.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert b"400 Bad Request" in raw_socket.recv(65536)
    assert server.call("GET", "/healthz")[0] == 200


def test_bytes_that_are_not_utf_8_in_ids_and_queries_are_refused_not_a_failure(server: Server) -> None:
    for path in ("/v1/runs/%ff", "/v1/execs/%00", "/v1/sandboxes/%ed%a0%80/execs", "/v1/runs/" + "x" * 500):
        assert server.call("GET", path)[0] == 404
    assert server.call("GET", "/v1/runs?after=%ff")[0] == 422
    assert server.call("GET", "/v1/sandboxes?after=%00")[0] == 422


def test_a_missing_directory_is_refused_with_what_to_do(server: Server, sandbox: str) -> None:
    status, answer = server.json("POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["true"], "cwd": "/nowhere"})
    assert (status, answer["code"], answer["field"]) == (422, "cwd_not_found", "/cwd")
    assert "/nowhere" in answer["detail"] and answer["hint"] == "create it first, or leave cwd out"


# -- nothing is started twice --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["runs", "sandboxes", "execs"])
def test_a_repeated_creating_call_joins_the_first_also_at_once(server: Server, sandbox: str, kind: str) -> None:
    path = f"/v1/sandboxes/{sandbox}/execs" if kind == "execs" else f"/v1/{kind}"
    body: dict[str, Any] = {} if kind == "sandboxes" else {"shell": "echo once"}
    other: dict[str, Any] = {"ttl_s": 99} if kind == "sandboxes" else {"shell": "echo twice"}
    key = {"Idempotency-Key": f"the-{kind}-{os.getpid()}"}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: server.json("POST", path, body, key), range(8)))
    assert {status for status, _ in answers} <= {200, 201}, answers
    assert len({answer["id"] for _, answer in answers}) == 1
    assert server.json("POST", path, body, key)[1]["id"] == answers[0][1]["id"]
    status, problem = server.json("POST", path, other, key)
    assert (status, problem["code"]) == (409, "idempotency_conflict")
    assert server.json("POST", path, body, {"Idempotency-Key": "another"})[1]["id"] != answers[0][1]["id"]


def test_repeated_input_with_an_offset_is_never_doubled(server: Server, sandbox: str) -> None:
    body = {"argv": ["cat"], "stdin": "0", "stdin_open": True, "wait": 0}
    _, made = server.json("POST", f"/v1/sandboxes/{sandbox}/execs", body)
    path = f"/v1/execs/{made['id']}/stdin"
    for offset, data in ((0, b"abc"), (0, b"abc"), (1, b"bcde"), (5, b"f")):
        assert server.call("POST", f"{path}?offset={offset}", data)[0] == 200
    status, problem = server.json("POST", f"{path}?offset=99", b"x")
    assert (status, problem["code"], problem["field"]) == (422, "invalid_value", "/offset")
    assert server.call("POST", f"{path}?offset=6&eof=true", b"")[0] == 200
    _, answer = server.json("GET", f"/v1/execs/{made['id']}?wait=30")
    assert answer["result"]["stdout"]["text"] == "0abcdef"


# -- WebSocket -----------------------------------------------------------------------------------------------------------------
def _until(connection: ClientConnection, kind: str) -> list[dict[str, Any]]:
    seen = []
    while True:
        seen.append(json.loads(connection.recv(timeout=PATIENCE_S)))
        if seen[-1]["type"] == kind:
            return seen


def _text(messages: list[dict[str, Any]]) -> str:
    return "".join(m.get("text", "") for m in messages if m["type"] == "stdout")


def test_a_websocket_carries_output_input_signals_and_the_end(server: Server, sandbox: str) -> None:
    _, made = server.json("POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["cat"], "stdin_open": True, "wait": 0})
    with server.socket(made["id"]) as connection:
        assert _until(connection, "started")[0]["exec_id"] == made["id"]
        connection.send(json.dumps({"type": "stdin", "offset": 0, "text": "你"}))
        connection.send(json.dumps({"type": "stdin", "offset": 0, "text": "你"}))
        connection.send(struct.pack(">Q", 3) + "好".encode())
        seen = _until(connection, "stdout")
        while _text(seen) != "你好":
            seen += _until(connection, "stdout")
        connection.send(json.dumps({"type": "signal", "signal": "TERM"}))
        ended = _until(connection, "ended")[-1]
        assert ended["result"]["signal"] == "SIGTERM"
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(timeout=PATIENCE_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1000


def test_a_websocket_goes_on_at_its_cursor_and_speaks_binary(server: Server, sandbox: str) -> None:
    body = {"shell": "printf one; read line; printf 'two\\377'", "stdin_open": True, "wait": 0}
    _, made = server.json("POST", f"/v1/sandboxes/{sandbox}/execs", body)
    with server.socket(made["id"]) as first:
        last = _until(first, "stdout")[-1]
        assert last["text"] == "one"
    with server.socket(made["id"], f"?cursor={last['cursor']}&encoding=binary") as second:
        second.send(json.dumps({"type": "stdin", "text": "\n", "eof": True}))
        data = b""
        while True:
            message = second.recv(timeout=PATIENCE_S)
            if isinstance(message, bytes):
                kind, offset, size = struct.unpack_from(">BQH", message)
                assert (kind, offset) == (1, 3 + len(data))
                data += message[11 + size :]
            elif json.loads(message)["type"] == "ended":
                break
        assert data == b"two\xff"


def test_a_terminal_over_a_websocket_is_resized_and_cancelled(server: Server, sandbox: str) -> None:
    body = {"shell": "read x; stty size; sleep 60", "pty": [24, 80], "stdin_open": True, "wait": 0}
    _, made = server.json("POST", f"/v1/sandboxes/{sandbox}/execs", body)
    with server.socket(made["id"]) as connection:
        connection.send(json.dumps({"type": "resize", "rows": 41, "cols": 99}))
        connection.send(json.dumps({"type": "stdin", "text": "\n"}))
        seen = _until(connection, "stdout")
        while "41 99" not in _text(seen):
            seen += _until(connection, "stdout")
        connection.send(json.dumps({"type": "resize", "rows": 0, "cols": 99}))
        refused = _until(connection, "error")[-1]
        assert (refused["of"], refused["code"], refused["field"]) == ("resize", "invalid_value", "/rows")
        connection.send(json.dumps({"type": "cancel"}))
        assert _until(connection, "ended")[-1]["result"]["reason"] == "cancelled"


def test_a_websocket_is_refused_before_it_opens(server: Server, sandbox: str) -> None:
    _, made = server.json("POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["true"]})
    for exec_id, query, key, status in (
        (made["id"], "", "wrong", 401),
        ("exe_nothing", "", None, 404),
        (made["id"], "?cursor=nonsense", None, 422),
        (made["id"], "?encoding=morse", None, 422),
    ):
        with pytest.raises(InvalidStatus) as refused, server.socket(exec_id, query, key):
            pass
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body or b"")["code"]
    assert server.call("GET", f"/v1/execs/{made['id']}/ws")[0] == 400


def test_a_websocket_that_breaks_the_rules_is_closed_and_the_exec_lives_on(server: Server, sandbox: str) -> None:
    body = {"shell": "sleep 2; echo lives", "stdin_open": True, "wait": 0}
    _, made = server.json("POST", f"/v1/sandboxes/{sandbox}/execs", body)
    for message in ("no json", "[]", '{"type": 1}', b"short"):
        with server.socket(made["id"]) as connection:
            connection.send(message)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    connection.recv(timeout=PATIENCE_S)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    flood = base64.b64encode(b"x" * 1_000_000).decode()
    with server.socket(made["id"]) as connection, pytest.raises(ConnectionClosed):
        for _ in range(3):  # the program does not read, so none of it is taken
            connection.send(json.dumps({"type": "stdin", "base64": flood}))
        while True:
            connection.recv(timeout=PATIENCE_S)
    _, answer = server.json("GET", f"/v1/execs/{made['id']}?wait=30")
    assert answer["result"]["stdout"]["text"] == "lives\n"
