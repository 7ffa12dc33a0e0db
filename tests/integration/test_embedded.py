"""The state directory as the service: one owner, any number of clients, and what happens when the owner goes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral import config
from corral.client import connect
from corral.client.embedded import EmbeddedTransport, open_embedded
from corral.errors import CorralError

RECIPE = "name: host\nkind: frozen\ndescription: small\nprograms: [sh sleep true cat printf]\nlanguages: {bash: sh}\n"
BANNED = ("fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "pydantic", "httpx2", "yaml", "rich", "h11")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A name for a state directory, with a small template and the runtime that runs nothing."""
    recipes = tmp_path / "templates"
    recipes.mkdir()
    (recipes / "host.yaml").write_text(RECIPE)
    monkeypatch.setenv("CORRAL_TEMPLATES", str(recipes))
    monkeypatch.setenv("CORRAL_RUNTIMES", "fake")
    monkeypatch.delenv("CORRAL_URL", raising=False)
    above = Path(tempfile.mkdtemp(prefix="corral-embedded-"))
    above.chmod(0o711)
    made = above / "state"
    monkeypatch.setenv("CORRAL_STATE_DIR", str(made))
    yield made
    shutil.rmtree(above, ignore_errors=True)


@pytest.fixture
def bubblewrap(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same with real sandboxes, which outlive their owner; emptied at the end."""
    monkeypatch.setenv("CORRAL_RUNTIMES", "bubblewrap")
    yield state
    with open_embedded_closing(state) as transport:
        for item in transport.request("GET", "/v1/sandboxes")["items"]:
            transport.request("DELETE", f"/v1/sandboxes/{item['id']}")
        transport.request("POST", "/v1/gc")
        assert transport.request("GET", "/v1/doctor")["leftovers"] == []


class open_embedded_closing:
    def __init__(self, state: Path) -> None:
        self.transport = open_embedded(str(state))

    def __enter__(self) -> EmbeddedTransport:
        return self.transport

    def __exit__(self, *_: object) -> None:
        self.transport.close()


def child(code: str, **environment: str) -> subprocess.Popen[str]:
    """Another process with `t` = a transport on the same directory; it prints JSON lines."""
    head = """
    import json, sys, time, os
    from corral.client import connect
    def say(x): print(json.dumps(x), flush=True)
    t = connect()
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def said(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return json.loads(line)


def ended(process: subprocess.Popen[str]) -> None:
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


FAKE = {"runtime": "fake"}
OWN = "say(t.is_owner); sys.stdin.readline(); t.close()"


def test_the_first_process_owns_and_leaves_nothing_locked(state: Path) -> None:
    with open_embedded_closing(state) as transport:
        assert transport.is_owner
        assert stat.S_IMODE((state / "api.sock").stat().st_mode) == 0o600
        assert stat.S_IMODE(state.stat().st_mode) == (0o711 if os.geteuid() == 0 else 0o700)
        run = transport.request("POST", "/v1/runs", {**FAKE, "command": ["echo", "你好"]})
        assert run["result"]["stdout"]["text"] == "你好\n"
    assert not (state / "api.sock").exists()
    with open_embedded_closing(state) as again:
        assert again.is_owner
        assert again.request("GET", f"/v1/runs/{run['id']}")["result"]["stdout"]["text"] == "你好\n"


def test_a_second_process_is_a_client_with_the_same_answers(state: Path) -> None:
    owner = child(OWN)
    try:
        assert said(owner) is True
        with open_embedded_closing(state) as transport:
            assert not transport.is_owner
            run = transport.request("POST", "/v1/runs", {**FAKE, "command": ["lines", "50"]}, {"wait": 0})
            events = list(transport.stream(f"/v1/runs/{run['id']}/stream"))
            assert events[0].kind == "started" and events[-1].kind == "ended"
            assert events[-1].doc is not None and events[-1].doc["result"]["reason"] == "ok"
            for name in ("stdout", "stderr"):
                got = b"".join(e.data for e in events if e.kind == name)
                raw = b"".join(transport.download(f"/v1/runs/{run['id']}/logs", {"stream": name}))
                assert got == raw and len(got.splitlines()) == 25
            middle = next(e for e in events[len(events) // 2 :] if e.cursor)
            rest = list(transport.stream(f"/v1/runs/{run['id']}/stream", {"cursor": middle.cursor}))
            at = events.index(middle)
            assert b"".join(e.data for e in rest) == b"".join(e.data for e in events[at + 1 :])
            with pytest.raises(CorralError) as caught:
                transport.request("GET", "/v1/runs/run_nope")
            assert caught.value.code == "not_found"
            with pytest.raises(CorralError) as caught:
                transport.request("POST", "/v1/runs", {"command": ["true"], "memory": "x"})
            assert (caught.value.code, caught.value.field) == ("invalid_value", "/memory")
    finally:
        owner.communicate("\n", timeout=60)


def test_raw_http_on_the_socket_is_refused_with_problems(state: Path) -> None:
    owner = child(OWN)
    try:
        assert said(owner) is True

        def post(body: bytes, length: int | None = None) -> tuple[int, dict[str, Any]]:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(30)
                folder = os.open(state, os.O_PATH)
                sock.connect(f"/proc/self/fd/{folder}/api.sock")
                os.close(folder)
                size = len(body) if length is None else length
                head = f"POST /v1/runs HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
                try:
                    sock.sendall(head.encode() + body)
                except (BrokenPipeError, ConnectionResetError):
                    pass
                answer = b""
                while block := sock.recv(65536):
                    answer += block
            header, _, rest = answer.partition(b"\r\n\r\n")
            return int(header.split()[1]), json.loads(rest)

        assert post(b"{nope")[1]["code"] == "bad_request"
        assert post(b"\xff")[0] == 400
        status, document = post(b"[" + b" " * (33 << 20) + b"]")
        assert (status, document["code"]) == (413, "too_large")
        assert post(b'{"command": ["true"], "runtime": "fake"}')[0] == 200
    finally:
        owner.communicate("\n", timeout=60)


def test_a_client_takes_over_when_the_owner_leaves_gracefully(bubblewrap: Path) -> None:
    owner = child(OWN)
    assert said(owner) is True
    client = child(
        """
        run = t.request("POST", "/v1/runs", {"shell": "echo a; sleep 3; echo b"}, {"wait": 0})
        say(run["id"])
        out = b""
        for event in t.stream(f"/v1/runs/{run['id']}/stream"):
            out += event.data
            if out == b"a\\n" and event.data:
                say("follows")
        say([event.kind, event.doc["result"]["reason"], out.decode(), t.is_owner])
        t.close()
        """
    )
    said(client)
    assert said(client) == "follows"
    owner.communicate("\n", timeout=60)
    assert said(client) == ["ended", "ok", "a\nb\n", True]
    ended(client)


def test_a_client_takes_over_when_the_owner_is_killed(bubblewrap: Path) -> None:
    owner = child(OWN)
    assert said(owner) is True
    client = child(
        """
        run = t.request("POST", "/v1/runs", {"shell": "echo a; sleep 3; echo b; exit 5"}, {"wait": 0})
        say(run["id"])
        run = t.request("GET", f"/v1/runs/{run['id']}", params={"wait": 60})
        say([run["result"]["reason"], run["result"]["exit_code"], run["result"]["stdout"]["text"], t.is_owner])
        t.close()
        """
    )
    said(client)
    time.sleep(1.0)
    owner.kill()
    owner.communicate()
    assert said(client) == ["nonzero_exit", 5, "a\nb\n", True]
    ended(client)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        "exec.start.before",
        "exec.start.after",
        "instance.create.before",
        "instance.create.after",
        "run.exec.after",
        "run.finish.before",
        "run.finish.after",
        "instance.destroy.before",
        "transition.after",
    ],
)
def test_the_owner_killed_at_any_point_starts_the_program_once(bubblewrap: Path, point: str) -> None:
    owner = child(OWN, CORRAL_FAULT_POINTS=f"{point}=kill")
    assert said(owner) is True
    client = child(
        """
        run = t.request("POST", "/v1/runs", {"shell": "echo once >> /workspace/log; cat /workspace/log"})
        say([run["result"]["reason"], run["result"]["stdout"]["text"], run["sandbox_id"]])
        t.close()
        """
    )
    reason, text, sandbox_id = said(client)
    ended(client)
    owner.communicate(timeout=60)
    assert owner.returncode == -signal.SIGKILL
    assert (reason, text) == ("ok", "once\n")
    with open_embedded_closing(bubblewrap) as transport:
        until = time.monotonic() + 20
        while transport.request("GET", f"/v1/sandboxes/{sandbox_id}")["state"] != "terminated":
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_post_that_is_repeated_with_its_key_is_one_run(state: Path) -> None:
    headers = {"Idempotency-Key": "one"}
    with open_embedded_closing(state) as transport:
        runs = [
            transport.request("POST", "/v1/runs", {**FAKE, "command": ["true"]}, headers=headers)["id"] for _ in "ab"
        ]
        assert len(set(runs)) == 1
        with pytest.raises(CorralError) as caught:
            transport.request("POST", "/v1/runs", {**FAKE, "command": ["false"]}, headers=headers)
        assert caught.value.code == "idempotency_conflict"


def test_an_interrupted_wait_leaves_the_run_and_the_transport_usable(state: Path) -> None:
    with open_embedded_closing(state) as transport:
        run = transport.request("POST", "/v1/runs", {**FAKE, "command": ["sleep", "30"]}, {"wait": 0})
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            transport.request("GET", f"/v1/runs/{run['id']}", params={"wait": 30})
        run = transport.request("POST", f"/v1/runs/{run['id']}/cancel")
        assert run["result"]["reason"] == "cancelled"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_stale_socket_is_replaced(state: Path) -> None:
    state.mkdir(mode=0o711)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(state / "api.sock"))
    with open_embedded_closing(state) as transport:
        assert transport.is_owner


def test_a_state_path_longer_than_a_socket_address_works(state: Path) -> None:
    deep = state / ("d" * 60) / ("e" * 60) / ("f" * 60)
    owner = child(OWN, CORRAL_STATE_DIR=str(deep))
    try:
        assert said(owner) is True
        with open_embedded_closing(deep) as transport:
            assert not transport.is_owner
            assert transport.request("GET", "/healthz") == {"status": "ok"}
    finally:
        owner.communicate("\n", timeout=60)


def test_a_bad_state_directory_is_a_clear_error(state: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for path in (file, file / "below", Path("/proc/nope/state"), open_to_all):
        with pytest.raises(CorralError) as caught:
            open_embedded(str(path))
        assert str(path) in caught.value.detail and caught.value.hint, path
        assert caught.value.retryable is False


def test_a_bad_configuration_is_a_clear_error(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state.mkdir(mode=0o711)
    (state / "config.toml").write_text("runtimes = [")
    with pytest.raises(CorralError) as caught:
        open_embedded(str(state))
    assert caught.value.code == "invalid_value" and "config.toml" in caught.value.detail
    (state / "config.toml").write_text("[delays]\nsweep_s = -1\n")
    with pytest.raises(CorralError):
        open_embedded(str(state))
    (state / "config.toml").unlink()
    monkeypatch.setenv("CORRAL_RUNTIMES", "nope")
    with pytest.raises(CorralError) as caught:
        open_embedded(str(state))
    assert "nope" in caught.value.detail
    monkeypatch.setenv("CORRAL_RUNTIMES", "fake")
    with open_embedded_closing(state) as transport:
        assert transport.is_owner, "a failed start lets the lock go"


def test_a_warm_run_imports_nothing_slow(state: Path) -> None:
    code = """
    for _ in range(2):
        run = t.request("POST", "/v1/runs", {"runtime": "fake", "command": ["true"]})
    t.close()
    say([run["result"]["reason"], sorted(m for m in sys.modules)])
    """
    first = child(code)
    assert said(first)[0] == "ok"
    ended(first)
    warm = child(code)
    reason, modules = said(warm)
    ended(warm)
    assert reason == "ok"
    assert [m for m in modules if m.partition(".")[0] in BANNED] == []


def test_importing_the_client_is_light() -> None:
    code = "import sys; from corral.client import connect; print(' '.join(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "asyncio" not in modules and "http.client" not in modules
    assert [m for m in modules if m.partition(".")[0] in BANNED] == []


def test_the_sdk_runs_keeps_and_deletes(state: Path) -> None:
    from corral.client import Corral

    with Corral() as c:
        run = c.run(command=["exit", "3"], runtime="fake")
        assert (run.result.reason, run.result.exit_code, run.result.ok) == ("nonzero_exit", 3, False)
        box = c.sandboxes.create(runtime="fake")
        assert box.id in [each.id for each in c.sandboxes.list()]
        assert box.exec(["echo", "你好"]).stdout.data == "你好\n".encode()
        kinds = [event.kind for event in box.exec_stream(["lines", "3"])]
        assert kinds[0] == "started" and kinds[-1] == "ended"
        box.delete()
        assert c.sandboxes.get(box.id).state == "terminated"


async def test_the_async_sdk_is_the_same(state: Path) -> None:
    from corral.client import AsyncCorral

    async with AsyncCorral() as c:
        assert (await c.run(command=["true"], runtime="fake")).result.ok
        box = await c.sandboxes.create(runtime="fake")
        assert (await box.exec(["echo", "x"])).stdout.text == "x\n"
        assert [event.kind async for event in box.exec_stream(["true"])] == ["started", "ended"]
        await box.delete()


LEFT_OPEN = {
    "run": "c.run(code='echo 1', language='bash')",
    "stream": "s = c.sandboxes.create(); i = iter(s.exec_stream(['sleep', '1000'])); next(i)",
    "failure": "c.run(code='echo 1', language='bash'); raise SystemExit('wrong')",
}


@pytest.mark.parametrize("left", LEFT_OPEN)
def test_a_program_that_ends_without_close_ends_cleanly(bubblewrap: Path, left: str) -> None:
    script = f"from corral.client import Corral\nc = Corral()\n{LEFT_OPEN[left]}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    told = "wrong\n" if left == "failure" else ""
    assert (done.returncode, done.stdout, done.stderr) == (1 if told else 0, "", told)


def test_a_url_is_checked() -> None:
    for url in ("ftp://x", "nonsense", "http://", "http://x:99999"):
        with pytest.raises(CorralError) as caught:
            connect(url=url)
        assert caught.value.code == "invalid_value"


def test_the_data_cache_is_by_content(tmp_path: Path) -> None:
    source, cache = tmp_path / "a.yaml", tmp_path / "cache"
    source.write_text("a: 1\n")
    assert config.data_document(str(source), str(cache)) == {"a": 1}
    assert config.data_document(str(source), str(cache)) == {"a": 1}
    source.write_text("a: 2\n")
    assert config.data_document(str(source), str(cache)) == {"a": 2}
    next(cache.iterdir()).write_text("garbage")
    assert config.data_document(str(source), str(cache))["a"] == 2
    source.write_text("a: [")
    with pytest.raises(CorralError):
        config.data_document(str(source), str(cache))


SLOW = """
import io, tarfile
id = sys.stdin.readline().strip()
def archive():
    header = tarfile.TarInfo("big")
    header.size = 40 * 262144
    yield header.tobuf()
    for n in range(40):
        if n == 2:
            say("under way")
        time.sleep(0.02)
        yield bytes(262144)
    yield bytes(1024)
t.upload(f"/v1/sandboxes/{id}/files/archive", archive(), {"path": "/workspace"})
size = 0
for block in t.download(f"/v1/sandboxes/{id}/files/archive", {"path": "/workspace/big"}):
    if size < 262144 <= size + len(block):
        say("under way")
    size += len(block)
    time.sleep(0.002)
say([t.is_owner, size >= 40 * 262144])
t.close()
"""


def test_an_owner_that_ends_waits_for_the_transfers_of_others(bubblewrap: Path) -> None:
    with open_embedded_closing(bubblewrap) as keeper:
        made = keeper.request("POST", "/v1/sandboxes", {})["id"]
        client = child(SLOW)
        assert client.stdin is not None
        client.stdin.write(f"{made}\n")
        client.stdin.flush()
        assert said(client) == "under way"
    # The upload came whole, though its owner wanted to end in the middle; the next owner has the download, unless it is the client.
    with open_embedded_closing(bubblewrap):
        assert said(client) == "under way"
    whole = said(client)
    ended(client)
    assert whole[1] is True


def test_a_transfer_that_nobody_reads_does_not_keep_an_owner(bubblewrap: Path) -> None:
    content = base64.b64encode(bytes(8_000_000)).decode()
    with open_embedded_closing(bubblewrap) as keeper:
        made = keeper.request("POST", "/v1/sandboxes", {"files": [{"path": "big", "base64": content}]})["id"]
        code = f"""
        blocks = t.download("/v1/sandboxes/{made}/files/archive", {{"path": "/workspace/big"}})
        next(blocks)
        say("stuck")
        sys.stdin.readline()
        """
        client = child(code)
        assert said(client) == "stuck"
        began = time.monotonic()
    assert time.monotonic() - began < 60
    client.kill()
    client.communicate()
