"""The parts below the tools, one by one: windows of output, lines of files, the wording of errors, the standard streams."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.shared.message import SessionMessage

from corral.errors import CODES, CorralError
from corral.mcp import answers, files, stdio
from corral.mcp.commands import Window, readable, sendable, without_output
from corral.mcp.http import application
from corral.mcp.server import make_server
from corral.mcp.sessions import GONE, Wishes
from unit.mcp.fake_corral import FakeCorral


# -- output --------------------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=9)), max_size=30))
def test_a_window_holds_what_it_was_fed_however_it_was_cut(fed: list[tuple[str, bytes]]) -> None:
    window = Window()
    for name, data in fed:
        window.feed(name, data)
    for name in ("stdout", "stderr"):
        window.feed(name, b"", final=True)
    at, text = window.read(0)
    whole = {n: b"".join(d for m, d in fed if m == n).decode("utf-8", "replace") for n in ("stdout", "stderr")}
    assert at == 0 and window.end == len(text)
    assert sorted(text) == sorted(whole["stdout"] + whole["stderr"])


@given(st.text(min_size=1, max_size=400), st.integers(1, 40), st.integers(0, 500))
def test_a_window_keeps_the_end_and_says_where_it_begins(text: str, most: int, cursor: int) -> None:
    window = Window(most)
    for character in text:
        window.add(character)
    at, got = window.read(cursor)
    assert got == text[at:]
    assert at >= min(cursor, len(text))
    assert len(text) - at >= min(most, len(text) - min(cursor, len(text)))


def test_a_character_that_comes_in_two_halves_is_whole() -> None:
    window = Window()
    first, second = "你".encode()[:1], "你".encode()[1:]
    window.feed("stdout", first)
    window.feed("stderr", b"!")
    window.feed("stdout", second)
    assert window.read(0)[1] == "!你"


def test_escapes_progress_and_controls_do_not_reach_a_model() -> None:
    raw = "\x1b[31mred\x1b[0m\n 10%\r 50%\r100%\r\nbell\x07\x1b]0;title\x07 end\x9b\n"
    assert readable(raw) == "red\n100%\nbell end\n"
    assert sendable("a\udce4b") == "a\ufffdb"


def test_a_result_is_remembered_without_its_output() -> None:
    kept = without_output({"reason": "ok", "stdout": {"bytes": 9, "text": "x" * 9}, "stderr": {"bytes": 0, "text": ""}})
    assert kept == {
        "reason": "ok",
        "stdout": {"bytes": 9, "text": None, "base64": None},
        "stderr": {"bytes": 0, "text": None, "base64": None},
    }
    assert without_output(None) is None


# -- files ---------------------------------------------------------------------------------------------------------------------
def cut(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


@given(
    st.text(alphabet="ab你\n\r", max_size=60),
    st.integers(1, 7),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 12)),
    st.integers(1, 80),
)
def test_lines_are_those_of_the_file_and_what_is_missing_is_said(
    text: str, size: int, first: int, last: int | None, most: int
) -> None:
    part = files.lines_of(cut(text.encode(), size), first, last, most)
    lines = text.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    asked = lines[first - 1 : last]
    assert part.total == len(lines)
    assert "".join(asked).startswith(part.text)
    if part.cut or part.more:
        assert len(part.text) == most < len("".join(asked))
    else:
        assert part.text == "".join(asked)
    if part.more:  # going on at the next line gives the rest, but for a line that was cut
        shown = "".join(lines[first - 1 : part.last])
        assert shown.startswith(part.text) and (part.cut or shown == part.text)


def test_a_text_is_not_read_far_beyond_the_scan_and_its_length_is_then_unknown() -> None:
    part = files.lines_of(cut(b"x\n" * 1000, 10), 1, 3, 100, scan=500)
    assert (part.text, part.total, part.more) == ("x\nx\nx\n", None, False)
    assert files.lines_of(cut(b"x\n" * 1000, 10), 1, None, 10_000, scan=500).more
    assert files.lines_of(cut(b"x\n" * 1000, 10), 900, 901, 100, scan=500).more


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", True),
        ("你好\n".encode(), True),
        ("你好".encode()[:-1], True),
        (b"caf\xe9 and much more text", True),
        (b"a\0b", False),
        (bytes(range(128, 256)), False),
    ],
)
def test_what_is_text(data: bytes, text: bool) -> None:
    assert files.is_text(data, whole=False) is text


# -- errors --------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", CODES)
def test_every_code_comes_with_a_next_step(code: str) -> None:
    answer = answers.failure(CorralError(code, "so it is"))
    text = answer.content[0].text  # type: ignore[union-attr]
    assert answer.is_error and text.startswith(f"error {code}: so it is\nnext: ")
    assert len(text.partition("next: ")[2]) > 10
    assert ("new sandbox" in text) is (code in GONE)


# -- the standard streams ------------------------------------------------------------------------------------------------------
def test_a_line_that_is_no_message_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "LONGEST_LINE", 100)
    good = b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n'
    source = io.BytesIO(good + b"nonsense\n" + b"x" * 300 + b"\n" + b"\xff\xfe\n" + good)
    kinds = [type(message) for message in stdio.messages(source)]
    assert [kind is SessionMessage for kind in kinds] == [True, False, False, False, True]


def test_only_the_protocol_reaches_stdout() -> None:
    code = """
    import os, subprocess
    from corral.mcp import stdio
    with stdio.claimed() as (source, sink):
        print("noise"); os.write(1, b"noise"); subprocess.run(["echo", "noise"])
        assert os.read(0, 10) == b""
        os.write(sink, os.read(source, 10))
    os.write(1, b" after")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], input=b"wire", capture_output=True)
    assert (done.stdout, done.returncode) == (b"wire after", 0), done.stderr
    assert done.stderr.count(b"noise") == 3


@pytest.mark.parametrize("leaves", ["closes its side", "stops listening"])
async def test_a_client_that_leaves_ends_the_session(corral: FakeCorral, leaves: str) -> None:
    ours, theirs = os.pipe(), os.pipe()
    below = make_server(lambda: corral)._lowlevel_server

    async def serve() -> None:
        async with stdio.streams(theirs[0], ours[1]) as (read, write):
            await below.run(read, write, below.create_initialization_options())

    serving = asyncio.create_task(serve())
    meta = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }

    def send(ident: int, command: str) -> None:
        parameters = {"name": "command_run", "arguments": {"command": command}, "_meta": meta}
        message = {"jsonrpc": "2.0", "id": ident, "method": "tools/call", "params": parameters}
        os.write(theirs[1], json.dumps(message).encode() + b"\n")

    send(1, "say 1")
    with os.fdopen(ours[0], "rb", buffering=0) as answers_in:
        line = await asyncio.to_thread(answers_in.readline)
        assert json.loads(line)["result"]["content"][0]["text"] == "1\n[ok]"
        if leaves == "closes its side":
            send(2, "hang x")
            while len(corral.execs) < 2:
                await asyncio.sleep(0.01)
            os.close(theirs[1])
    if leaves == "stops listening":
        send(3, "say 3")
    async with asyncio.timeout(60):
        await serving
    assert corral.alive() == [] and corral.closed
    if leaves == "stops listening":
        os.close(theirs[1])
    os.close(ours[1])


# -- HTTP ----------------------------------------------------------------------------------------------------------------------
INITIALIZE: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Authorization": "Bearer other"}, 401),
        ({"Authorization": ""}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1:81"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:80"}, 403),
        ({"Origin": "https://app.example"}, 200),
    ],
)
async def test_http_is_for_those_with_the_key_by_its_own_name_and_for_no_foreign_page(
    corral: FakeCorral, headers: dict[str, str], status: int
) -> None:
    server = make_server(lambda: corral)

    def accepts(authorization: str) -> bool:
        return authorization == "Bearer right"

    hosts, origins = ["127.0.0.1:80"], ["https://app.example"]
    async with (
        application(server, Wishes(), accepts=accepts, hosts=hosts, origins=origins) as app,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1:80") as client,
    ):
        usual = {
            "Authorization": "Bearer right",
            "Accept": "application/json, text/event-stream",
            "Host": "127.0.0.1:80",
        }
        answer = await client.post("/mcp", json=INITIALIZE, headers={**usual, **headers})
        assert answer.status_code == status
        if status == 401:
            assert answer.headers["www-authenticate"] == "Bearer" and answer.json()["code"] == "unauthorized"
        assert (await client.get("/.well-known/oauth-protected-resource")).status_code == 404


@pytest.mark.parametrize(
    ("line", "number", "code"),
    [
        (b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"path":"\\ud800"}}\n', 7, -32600),
        (b'{"jsonrpc":"2.0","id":"a","method":5}\n', "a", -32600),
        (b'{"jsonrpc":"2.0","id":[1]}\n', None, -32600),
        (b"no json\n", None, -32700),
        (b"[" * 100_000 + b"\n", None, -32700),
    ],
    ids=["surrogate", "method", "id", "text", "deep"],
)
def test_who_sends_what_is_no_message_is_told_so_under_its_number(
    line: bytes, number: str | int | None, code: int
) -> None:
    [message] = stdio.messages(io.BytesIO(line))
    assert isinstance(message, stdio.Unreadable)
    reply = json.loads(message.reply)
    assert (reply["jsonrpc"], reply["id"], reply["error"]["code"]) == ("2.0", number, code)
    assert message.reply.endswith(b"\n") and message.reply.count(b"\n") == 1
