"""What the server says before a request is one: to the slow, the many, the too large and those who speak no HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from corral.adapters.coordination.inprocess import InProcess
from corral.api import asgi, server, websocket
from corral.api.asgi import Application
from corral.api.calls import Reply
from corral.api.keys import AdminKey
from corral.errors import CorralError

KEY = "a-key-for-unit-tests"
ASK = f"GET /openapi.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()


class Store:
    async def add_audit(self, audit: Any) -> int:
        return 1


class Core:
    draining = False
    coordination = InProcess()
    store = Store()
    policy = SimpleNamespace(calls_per_minute=None)

    def log(self, line: str) -> None:
        raise AssertionError(line)

    def as_seen(self, error: CorralError) -> CorralError:
        return error

    def check_accepting(self) -> None:
        raise CorralError("shutting_down", "no")


class Services:
    core = Core()


@pytest.fixture
def application() -> Application:
    """Over services that know nothing."""
    return Application(Services(), AdminKey.of(KEY))  # type: ignore[arg-type]


@pytest.fixture
async def port(application: Any) -> AsyncIterator[int]:
    """A server of the application."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    made = server.make_server(application)
    task = asyncio.ensure_future(made.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    made.should_exit = made.force_exit = True
    await asyncio.wait_for(task, 30)


async def said(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One answer."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode().split("\r\n")
    fields = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
    body = await asyncio.wait_for(reader.readexactly(int(fields.get("content-length", 0))), 30)
    return int(head[0].split()[1]), fields, body


async def test_headers_that_do_not_come_end_with_408(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.2)
    for begun in (b"", ASK, b"GET"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        status, fields, body = await said(reader)
        assert (status, json.loads(body)["code"], fields["connection"]) == (408, "request_timeout", "close")
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_the_time_for_headers_begins_anew_with_each_request(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.5)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(ASK + b"\r\n")
        assert (await said(reader))[0] == 200
        await asyncio.sleep(0.3)
    writer.write(ASK)
    assert (await said(reader))[0] == 408
    writer.close()


async def test_a_body_that_stops_coming_ends_with_408(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "BODY_PAUSE_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASK.replace(b"GET /openapi.json", b"POST /v1/gc") + b"Content-Length: 100\r\n\r\n{")
    status, fields, body = await said(reader)
    assert (status, json.loads(body)["code"], fields["connection"]) == (408, "request_timeout", "close")
    writer.close()


@pytest.mark.slow
async def test_bodies_in_memory_are_bounded_over_all_calls(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "BODIES", 1000)
    head = ASK.replace(b"GET /openapi.json", b"POST /v1/runs")
    first_in, first_out = await asyncio.open_connection("127.0.0.1", port)
    first_out.write(head + b"Content-Length: 901\r\n\r\n" + b" " * 900)
    for _ in range(100):  # until the first body counts
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b"Content-Length: 500\r\n\r\n" + b" " * 500)
        status, fields, body = await said(reader)
        writer.close()
        if json.loads(body)["code"] == "overloaded":
            break
        assert json.loads(body)["code"] == "shutting_down"
    assert (status, fields["retry-after"]) == (503, "1")
    first_out.write(b" ")
    assert json.loads((await said(first_in))[2])["code"] == "shutting_down", "what was held is let go"
    first_out.close()


async def test_too_many_connections_are_told_to_come_back(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    kept = []
    for _ in range(2):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK + b"\r\n")
        assert (await said(reader))[0] == 200
        kept.append(writer)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    status, fields, body = await said(reader)
    assert (status, json.loads(body)["code"], fields["retry-after"]) == (503, "overloaded", "1")
    for each in (*kept, writer):
        each.close()


@pytest.mark.parametrize(
    "sent, status, code",
    [
        (b"\x16\x03\x01\x02\x00 hello\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400, "bad_request"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n", 414, "url_too_long"),
        (ASK + b"X: " + b"x" * 200_000, 431, "headers_too_large"),
        (ASK + b"X: " + b"x" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
    ],
)  # fmt: skip
async def test_what_cannot_be_a_request_is_refused_with_a_problem(
    port: int, sent: bytes, status: int, code: str
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    told, fields, body = await said(reader)
    assert (told, json.loads(body)["code"], fields["content-type"]) == (status, code, "application/problem+json")
    writer.close()


async def test_a_stranger_who_sends_a_body_is_hung_up_on(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
    status, fields, _ = await said(reader)
    assert (status, fields["connection"], fields["www-authenticate"]) == (401, "close", "Bearer")
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()


@pytest.mark.parametrize(
    "more", [f"Authorization: Bearer {KEY}\r\n", "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"]
)
async def test_what_a_proxy_may_read_otherwise_is_refused(port: int, more: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASK + more.encode() + b"\r\n" + (b"0\r\n\r\n" if "chunked" in more else b""))
    status, _, body = await said(reader)
    assert (status, json.loads(body)["code"]) == (400, "bad_request")
    writer.close()


async def test_a_message_cannot_name_what_is_counted_as_input() -> None:
    messages = iter(
        [
            {"type": "websocket.receive", "text": '{"type": "ping", "data": 5}'},
            {"type": "websocket.receive", "text": '{"type": "stdin", "text": "a", "data": 5}'},
            {"type": "websocket.disconnect"},
        ]
    )

    async def receive() -> Any:
        return next(messages)

    nothing: Any = None
    connection = websocket._Connection(nothing, nothing, "exe_x", False, receive, nothing, nothing)
    with pytest.raises(websocket._Closed) as closed:
        await connection._listen()
    assert closed.value.code is None
    assert connection._inbox.get_nowait() == {"type": "ping"}
    assert connection._inbox.get_nowait()["data"] == b"a"


async def test_once_the_last_transfer_has_ended_a_kept_connection_begins_no_other(
    port: int, application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client would lose the bytes in the middle; as it is, it asks the next owner for all of them."""
    begun: list[str] = []

    async def blocks() -> AsyncIterator[bytes]:
        begun.append("download")
        yield b"content"

    async def dispatch(_: Any, request: Any) -> Reply:
        if request.method == "PUT":
            begun.append("upload")
            return Reply(200, {})
        return Reply(200, raw=blocks(), headers={"Content-Length": "7"})

    monkeypatch.setattr(asgi, "dispatch", dispatch)
    get = ASK.replace(b"/openapi.json", b"/v1/sandboxes/sbx_1/files") + b"\r\n"
    put = get.replace(b"GET", b"PUT").replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\nx")
    for over in (get, put):
        application.transfers_over = False
        begun.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get)
        assert (await said(reader))[::2] == (200, b"content")
        application.transfers_over = True
        writer.write(over)
        status, fields, body = await said(reader)
        assert (status, json.loads(body)["code"], fields["connection"]) == (503, "shutting_down", "close")
        assert begun == ["download"] and application.transfers == {}
        writer.close()


async def test_a_stranger_is_not_told_where_the_store_is(application: Any, port: int, monkeypatch: Any) -> None:
    async def lost(*_: Any) -> Any:
        raise CorralError("store_error", "postgresql://user@10.0.0.5/corral does not answer", retry_after_s=7)

    monkeypatch.setattr(application._gate, "caller", lost)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ASK + b"\r\n")
    status, fields, body = await said(reader)
    assert (status, json.loads(body)["code"], fields["retry-after"]) == (503, "store_error", "7")
    assert b"10.0.0.5" not in body
    writer.close()
