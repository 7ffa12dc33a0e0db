"""`corral mcp` on real sandboxes, by the real client: in process, on the standard streams, over HTTP, embedded and against a server."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from corral.client import connect
from corral.client.embedded import open_embedded
from corral.mcp.server import make_server
from furnished import furnish

PROGRAM = [sys.executable, "-c", "from corral.cli.main import main; main()"]
KEY = "a key that is long enough".replace(" ", "-")
PATIENCE_S = 240
DOORS = ["in process", "stdio", "http"]


@pytest.fixture
def state(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory with the template host; nothing may be left in it at the end."""
    for name in [name for name in os.environ if name.startswith("CORRAL_")]:
        if name != "CORRAL_TEST_SHARED":
            monkeypatch.delenv(name)
    above = Path(tempfile.mkdtemp(prefix="corral-mcp-"))
    above.chmod(0o711)
    made = above / "state"
    furnish(made, shared)
    monkeypatch.setenv("CORRAL_STATE_DIR", str(made))
    monkeypatch.setenv("CORRAL_RUNTIMES", "bubblewrap")
    yield made
    transport = open_embedded(str(made))
    try:
        left = transport.request("GET", "/v1/sandboxes")["items"]
        for item in left:
            transport.request("DELETE", f"/v1/sandboxes/{item['id']}")
        transport.request("POST", "/v1/gc")
        leftovers = transport.request("GET", "/v1/doctor")["leftovers"]
    finally:
        transport.close()
    shutil.rmtree(above, ignore_errors=True)
    assert left == [] and leftovers == []


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}


def sandboxes() -> list[str]:
    """Ids of what is alive, as any other process on the state directory sees it."""
    transport = connect()
    try:
        return [item["id"] for item in transport.request("GET", "/v1/sandboxes")["items"]]
    finally:
        transport.close()


async def eventually_none() -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(sandboxes):
            await asyncio.sleep(0.05)


class Listening:
    """One `corral mcp --http` of ours."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "mcp", "--http", "--port", "0", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(CORRAL_MCP_KEY=KEY),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("corral: listening on http"), line
        self.url = line.split()[-1]

    @asynccontextmanager
    async def client(self, mode: str = "auto", **headers: str) -> AsyncIterator[Client]:
        given = {"Authorization": f"Bearer {KEY}", **headers}
        async with (
            httpx2.AsyncClient(headers=given, timeout=PATIENCE_S) as http,
            Client(streamable_http_client(self.url, http_client=http), mode=mode) as client,
        ):
            yield client

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def listening(state: Path) -> Iterator[Listening]:
    server = Listening()
    yield server
    assert server.stop() == 0


@asynccontextmanager
async def entered(door: str, mode: str = "auto", **more: str) -> AsyncIterator[Client]:
    """A client through one of the doors; its server is ours alone and has ended afterwards."""
    if door == "in process":
        async with Client(make_server(connect), mode=mode) as client:
            yield client
    elif door == "stdio":
        parameters = StdioServerParameters(command=PROGRAM[0], args=[*PROGRAM[1:], "mcp"], env=environment(**more))
        async with Client(parameters, mode=mode) as client:
            yield client
    else:
        server = await asyncio.to_thread(Listening)
        try:
            async with server.client(mode) as client:
                yield client
        finally:
            assert await asyncio.to_thread(server.stop) == 0


def words(answer: Any) -> str:
    return "\n".join(block.text for block in answer.content if block.type == "text")


async def run(client: Client, command: str, **more: Any) -> str:
    """The output of a command that ends well."""
    answer = await client.call_tool("command_run", {"command": command, **more})
    assert not answer.is_error, words(answer)
    assert answer.structured_content is not None and answer.structured_content["reason"] == "ok", words(answer)
    return str(answer.structured_content["output"]).rpartition("[ok")[0]


@pytest.mark.parametrize(("door", "mode"), [(door, mode) for door in DOORS for mode in ("auto", "legacy")])
async def test_files_stay_between_calls_and_text_is_exact_in_every_language(state: Path, door: str, mode: str) -> None:
    async with entered(door, mode) as client:
        code = "import sys\nprint('你好', sys.argv[1], sys.stdin.read())\nopen('文件.txt', 'w').write('第一行\\n第二行\\n')"
        answer = await client.call_tool("code_run", {"code": code, "args": ["世界"], "stdin": "输入"})
        assert words(answer) == "你好 世界 输入\n[ok, exit code 0]"
        assert answer.structured_content is not None
        assert answer.structured_content["files"] == ["created /workspace/文件.txt"]
        read = await client.call_tool("file_read", {"path": "文件.txt", "start_line": 2})
        assert words(read) == "第二行\n"
        await client.call_tool(
            "file_write", {"path": "深/目录/run.sh", "content": "echo 运行 $1\n", "executable": True}
        )
        assert await run(client, "sh 深/目录/run.sh ok; test -x 深/目录/run.sh") == "运行 ok\n"
        failed = await client.call_tool("command_run", {"command": "echo out; echo err >&2; exit 3"})
        assert not failed.is_error and failed.structured_content is not None
        assert failed.structured_content["exit_code"] == 3
        assert "out" in words(failed) and "err" in words(failed) and "nonzero_exit" in words(failed)
        listed = await client.call_tool("file_list", {"recursive": True})
        assert listed.structured_content is not None
        paths = [entry["path"] for entry in listed.structured_content["entries"]]
        assert not any(".corral" in path for path in paths), "what Corral needs for itself is not shown"
        expected = [f"/workspace/{p}" for p in ("深", "深/目录", "深/目录/run.sh", "文件.txt")]
        assert paths == sorted(expected, key=str.encode), paths
        if door != "in process" or mode == "legacy":
            assert len(await asyncio.to_thread(sandboxes)) == 1
    await eventually_none()


@pytest.mark.parametrize("door", DOORS)
async def test_bytes_and_big_output_come_whole_or_say_what_is_missing(state: Path, door: str) -> None:
    data = bytes(range(256)) * 4096
    async with entered(door) as client:
        content = base64.b64encode(data).decode()
        await client.call_tool("file_write", {"path": "b", "content": content, "encoding": "base64"})
        read = await client.call_tool("file_read", {"path": "b"})
        assert base64.b64decode(read.content[1].resource.blob) == data  # type: ignore[union-attr]
        big = await client.call_tool(
            "code_run",
            {"code": "for n in range(300000): print('line', n)", "timeout_s": PATIENCE_S, "wait_s": PATIENCE_S},
        )
        assert big.structured_content is not None
        output = big.structured_content["output"]
        assert len(output) <= 8000 and "omitted" in output and output.startswith("line 0\n") and "line 299999" in output
        ident = big.structured_content["command_id"]
        assert f'command_status(command_id="{ident}", cursor=0)' in words(big)
        cursor, pages = 0, ""
        while True:  # the window holds the end of it; what is gone is said
            page = await client.call_tool(
                "command_status", {"command_id": ident, "cursor": cursor, "max_chars": 100_000}
            )
            assert page.structured_content is not None
            if not pages:
                assert "no longer kept here" in words(page)
            pages += page.structured_content["output"]
            cursor = page.structured_content["cursor"]
            if not page.structured_content["unread"]:
                break
        assert pages.endswith("line 299999\n") and "line 280000\nline 280001\n" in pages


@pytest.mark.parametrize("door", DOORS)
async def test_twenty_calls_at_once_share_the_sandbox_and_none_waits_for_all(state: Path, door: str) -> None:
    async with entered(door) as client:
        async with asyncio.timeout(PATIENCE_S):
            outputs = await asyncio.gather(*(run(client, f"sleep 1; echo {n}") for n in range(20)))
        assert outputs == [f"{n}\n" for n in range(20)]
        known = (await client.call_tool("sandbox_info", {})).structured_content
        assert known is not None and known["state"] != "none" and len(known["commands"]) == 20


@pytest.mark.parametrize("door", DOORS)
async def test_a_sandbox_that_is_killed_in_the_middle_is_told_and_replaced(state: Path, door: str) -> None:
    async with entered(door) as client:
        await run(client, "echo kept > f")
        info = (await client.call_tool("sandbox_info", {})).structured_content
        assert info is not None
        command = asyncio.create_task(client.call_tool("command_run", {"command": "echo begun; sleep 600"}))
        async with asyncio.timeout(PATIENCE_S):
            while "sleep 600" not in words(await client.call_tool("sandbox_info", {})):
                await asyncio.sleep(0.05)
        killed = subprocess.run([*PROGRAM, "sandbox", "rm", info["sandbox_id"]], env=environment(), timeout=PATIENCE_S)
        assert killed.returncode == 0
        answer = await command
        assert answer.is_error and "sandbox_deleted" in words(answer), words(answer)
        after = await client.call_tool("command_run", {"command": "ls"})
        assert not after.is_error and "new, empty sandbox" in words(after) and "files with it" in words(after)
        assert after.structured_content is not None
        assert after.structured_content["sandbox_id"] != info["sandbox_id"]
        assert await run(client, "ls") == ""


@pytest.mark.parametrize(("door", "mode"), [(door, mode) for door in DOORS for mode in ("auto", "legacy")])
async def test_a_cancelled_call_ends_what_it_started(state: Path, door: str, mode: str) -> None:
    async with entered(door, mode) as client:
        call = asyncio.create_task(client.call_tool("command_run", {"command": "echo $$ > pid; exec sleep 600"}))
        async with asyncio.timeout(PATIENCE_S):
            while (await client.call_tool("file_read", {"path": "pid"})).is_error:
                await asyncio.sleep(0.05)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            while await run(client, 'kill -0 "$(cat pid)" 2>/dev/null && echo alive || echo dead') != "dead\n":
                await asyncio.sleep(0.05)


async def test_a_long_command_is_watched_and_interrupted_with_progress_on_the_way(state: Path) -> None:
    heard: list[str | None] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        heard.append(message)

    script = "trap 'echo 收到; exit 7' INT; n=0; while :; do n=$((n+1)); echo 步骤 $n; sleep 0.1; done"
    async with entered("stdio") as client, asyncio.timeout(PATIENCE_S):
        running = await client.call_tool("command_run", {"command": script, "wait_s": 3}, progress_callback=progress)
        assert running.structured_content is not None and running.structured_content["state"] == "running"
        assert any(message and message.startswith("步骤") for message in heard)
        ident = running.structured_content["command_id"]
        seen = running.structured_content["output"]
        more = await client.call_tool("command_status", {"command_id": ident, "wait_s": 1})
        assert more.structured_content is not None
        seen += more.structured_content["output"]
        ended = await client.call_tool("command_interrupt", {"command_id": ident, "wait_s": 60})
        assert ended.structured_content is not None and ended.structured_content["exit_code"] == 7
        seen += ended.structured_content["output"]
        steps = [int(line.split()[1]) for line in seen.splitlines() if line.startswith("步骤")]
        assert steps == list(range(1, len(steps) + 1)), "each line is told once"
        assert "收到" in ended.structured_content["output"]


async def test_each_handshake_session_over_http_has_its_own_sandbox_and_takes_it_along(listening: Listening) -> None:
    async with listening.client("legacy") as first:
        await run(first, "echo 1 > f")
        async with listening.client("legacy") as second:
            assert await run(second, "ls") == ""
            assert len(await asyncio.to_thread(sandboxes)) == 2
        async with asyncio.timeout(PATIENCE_S):
            while len(await asyncio.to_thread(sandboxes)) == 2:
                await asyncio.sleep(0.05)
        assert await run(first, "cat f") == "1\n"
    await eventually_none()


async def test_without_a_handshake_the_client_and_its_header_name_the_session(listening: Listening) -> None:
    async with listening.client("auto") as first, listening.client("auto", **{"Corral-Session": "b"}) as other:
        await run(first, "echo 1 > f")
        assert await run(other, "ls") == ""
    async with listening.client("auto") as again:
        assert await run(again, "cat f") == "1\n"


async def test_http_refuses_who_has_no_key_and_foreign_pages(listening: Listening) -> None:
    async with httpx2.AsyncClient(timeout=PATIENCE_S) as http:
        post = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        right = {"Authorization": f"Bearer {KEY}", "Accept": "application/json, text/event-stream"}
        assert (await http.post(listening.url, json=post)).status_code == 401
        assert (await http.post(listening.url, json=post, headers={"Authorization": "Bearer no"})).status_code == 401
        for wrong, status in (({"Host": "evil.example"}, 421), ({"Origin": "http://evil.example"}, 403)):
            assert (await http.post(listening.url, json=post, headers={**right, **wrong})).status_code == status


def speak(process: subprocess.Popen[bytes], ident: int, method: str, **parameters: Any) -> None:
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
    message = {"jsonrpc": "2.0", "id": ident, "method": method, "params": {**parameters, "_meta": meta}}
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()


@pytest.mark.parametrize("end", ["stdin closed", "SIGTERM", "stdin closed while a command runs"])
def test_a_client_that_vanishes_takes_the_sandbox_along_and_stdout_had_nothing_but_the_protocol(
    state: Path, end: str
) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "mcp"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(CORRAL_LOG="1"),
    )
    try:
        assert process.stdout is not None
        speak(process, 1, "tools/call", name="command_run", arguments={"command": "(setsid sleep 600 &) ; echo 在"})
        first = json.loads(process.stdout.readline())
        assert first["result"]["structuredContent"]["output"].startswith("在\n")
        assert len(sandboxes()) == 1
        if end == "stdin closed while a command runs":
            speak(process, 2, "tools/call", name="command_run", arguments={"command": "echo x > begun; sleep 600"})
            deadline = time.monotonic() + PATIENCE_S
            sandbox = first["result"]["structuredContent"]["sandbox_id"]
            while subprocess.run(
                [*PROGRAM, "exec", sandbox, "--shell", "test -e begun"], env=environment(), timeout=PATIENCE_S
            ).returncode:
                assert time.monotonic() < deadline
        if end == "SIGTERM":
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            out, err = process.stdout.read(), process.stderr.read() if process.stderr else b""
        else:
            out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        assert all(json.loads(line)["jsonrpc"] == "2.0" for line in out.splitlines()), out
        assert b"Traceback" not in err
        assert sandboxes() == []
    finally:
        process.kill()
        process.communicate()


async def test_it_works_against_a_server_by_url_and_key(state: Path) -> None:
    server = subprocess.Popen(
        [*PROGRAM, "serve", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(CORRAL_ADMIN_KEY=KEY),
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        elsewhere = {"CORRAL_URL": url, "CORRAL_KEY": KEY, "CORRAL_STATE_DIR": str(state.parent / "none")}
        async with entered("stdio", **elsewhere) as client:
            assert await run(client, "echo 远程 > f; cat f") == "远程\n"
            read = await client.call_tool("file_read", {"path": "f"})
            assert words(read) == "远程\n"
            assert len(await asyncio.to_thread(sandboxes)) == 1
        await eventually_none()
        assert not (state.parent / "none").exists()
        async with entered("stdio", **(elsewhere | {"CORRAL_KEY": "wrong-but-long-enough"})) as client:
            refused = await client.call_tool("command_run", {"command": "true"})
            assert refused.is_error and "unauthorized" in words(refused) and "CORRAL_KEY" in words(refused)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--memory", "much"], "memory"),
        (["--http", "--host", "0.0.0.0"], "--unsafe-plaintext"),
        (["--http", "--host", "0.0.0.0", "--unsafe-plaintext", "--unsafe-no-key"], "loopback"),
        (["--http", "--tls-cert", "x"], "--tls-key"),
        (["--idle", "0"], "--idle"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start_to_the_operator(state: Path, given: list[str], said: str) -> None:
    done = subprocess.run(
        [*PROGRAM, "mcp", *given], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode in (2, 125) and done.stdout == ""
    assert said in done.stderr and "Traceback" not in done.stderr
