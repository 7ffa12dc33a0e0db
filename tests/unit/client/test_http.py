"""Single attempts over HTTP against scripted servers, with both kinds of effects."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest

from corral.client.aio import HIGH, Loop
from corral.client.effects import Blocking, drive
from corral.client.http import HttpSingle, open_url
from corral.client.line import Cut, Request
from corral.client.owner import _Ahead, _Feed
from corral.errors import CorralError

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}'
Serve = Callable[[socket.socket, int], None]


class Server:
    """Each connection is handled by `serve(socket, number)` in a thread."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._one, args=(sock, self.connections), daemon=True).start()

    def _one(self, sock: socket.socket, number: int) -> None:
        with sock:
            try:
                self._serve(sock, number)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def request_of(sock: socket.socket) -> bytes:
    """One request's head, with a body of known length; empty at the end."""
    raw = b""
    while b"\r\n\r\n" not in raw:
        block = sock.recv(65536)
        if not block:
            return b""
        raw += block
    start, _, body = raw.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in start.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
    while len(body) < length:
        body += sock.recv(65536)
    return start + b"\r\n\r\n" + body


@pytest.fixture
def served() -> Iterator[Callable[[Serve], Server]]:
    servers: list[Server] = []

    def start(serve: Serve) -> Server:
        servers.append(Server(serve))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(params=["blocking", "loop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[Any], Any]], Any]:
    """Calls a coroutine function with the effects to use."""
    if request.param == "blocking":
        return lambda work: drive(work(Blocking()))
    return lambda work: asyncio.run(work(Loop()))


def single_to(server: Server, effects: Any, key: str | None = None) -> HttpSingle:
    single = open_url(server.url, key, effects)._singles[0]
    assert isinstance(single, HttpSingle)
    return single


async def document(single: HttpSingle, request: Request) -> Any:
    answer = await single.send(request)
    try:
        return await answer.document()
    finally:
        await answer.close()


GET = Request("GET", "/x", {"q": "ä b", "n": None, "t": True})


def again_and_again(sock: socket.socket, number: int) -> None:
    while request_of(sock):
        sock.sendall(OK)


def test_a_connection_is_kept_for_the_next_request(served: Any, run: Any) -> None:
    server = served(again_and_again)

    async def work(effects: Any) -> None:
        single = single_to(server, effects)
        for _ in range(3):
            assert await document(single, GET) == {"a": 1}
        assert server.connections == 1
        assert await document(single, Request("POST", "/x", fresh=True)) == {"a": 1}
        assert server.connections == 2
        single.close()

    run(work)


def test_a_connection_that_the_server_has_closed_is_replaced(served: Any, run: Any) -> None:
    closed = threading.Event()

    def once(sock: socket.socket, number: int) -> None:
        request_of(sock)
        sock.sendall(OK)
        sock.shutdown(socket.SHUT_WR)
        closed.set()
        sock.recv(1)

    server = served(once)

    async def work(effects: Any) -> None:
        single = single_to(server, effects)
        for number in range(3):
            closed.clear()
            assert await document(single, GET) == {"a": 1}
            await effects.local(closed.wait, 30)
            await effects.sleep(0.01)
            assert server.connections == number + 1

    run(work)


def test_the_key_and_the_query_arrive_as_they_are(served: Any, run: Any) -> None:
    seen: list[bytes] = []

    def look(sock: socket.socket, number: int) -> None:
        while raw := request_of(sock):
            seen.append(raw)
            sock.sendall(OK)

    server = served(look)

    async def work(effects: Any) -> None:
        single = single_to(server, effects, "secret")
        await document(single, Request("GET", "/x", {"path": "a/\udcff&ä", "n": None, "t": True}))
        await document(single, Request("POST", "/x", json={"ä": 1}))
        await document(single, Request("POST", "/x", raw=b"\0\1"))

    run(work)
    assert seen[0].startswith(b"GET /x?path=a%2F%FF%26%C3%A4&t=true HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer secret\r\n" in seen[0]
    assert seen[1].endswith(b'\r\n\r\n{"\\u00e4":1}') and b"Content-Type: application/json" in seen[1]
    assert seen[2].endswith(b"\r\n\r\n\0\1") and b"Content-Length: 2\r\n" in seen[2]


def problem(status: int, code: str, extra: bytes = b"") -> bytes:
    body = json.dumps({"code": code, "detail": "no", "retryable": True, "hint": None}).encode()
    return b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n%b" % (status, extra, len(body), body)


def test_an_answer_before_the_end_of_an_upload_stops_it(served: Any, run: Any) -> None:
    def early(sock: socket.socket, number: int) -> None:
        sock.recv(65536)
        sock.sendall(problem(413, "too_large", b"Connection: close\r\n"))
        while sock.recv(1 << 20):
            pass

    server = served(early)
    sent: list[int] = []

    async def endless() -> AsyncGenerator[bytes, None]:
        while len(sent) < 4000:
            sent.append(1)
            yield bytes(65536)

    async def work(effects: Any) -> None:
        with pytest.raises(CorralError) as caught:
            await single_to(server, effects).send(Request("PUT", "/x", blocks=endless(), fresh=True))
        assert caught.value.code == "too_large"

    run(work)
    assert len(sent) < 4000


async def test_an_upload_to_a_fast_reader_leaves_turns_to_other_tasks(served: Any) -> None:
    def swallow(sock: socket.socket, number: int) -> None:
        while b"0\r\n\r\n" not in sock.recv(1 << 20):
            pass
        sock.sendall(OK)

    sent: list[int] = []
    seen: list[int] = []

    async def many() -> AsyncGenerator[bytes, None]:
        for number in range(50):
            sent.append(number)
            yield b"x"

    async def watch() -> None:
        while True:
            seen.append(len(sent))
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    answer = await single_to(served(swallow), Loop()).send(Request("PUT", "/x", blocks=many(), fresh=True))
    watching.cancel()
    await answer.close()
    assert {*range(1, 50)} <= {*seen}, "between any two blocks the loop had a turn"


def test_content_that_changes_its_length_while_it_is_sent_is_refused(served: Any, run: Any) -> None:
    server = served(again_and_again)

    async def blocks() -> AsyncGenerator[bytes, None]:
        yield b"abc"

    async def work(effects: Any) -> None:
        for size in (2, 4):
            with pytest.raises(CorralError) as caught:
                await single_to(server, effects).send(Request("PUT", "/x", blocks=blocks(), size=size, fresh=True))
            assert caught.value.code == "conflict"

    run(work)


@pytest.mark.parametrize(
    ("raw", "code", "retryable"),
    [
        (problem(429, "quota_exceeded", b"Retry-After: 7\r\n"), "quota_exceeded", True),
        (b"HTTP/1.1 404 No\r\nContent-Length: 6\r\n\r\n<html>", "infra_error", False),
        (b"HTTP/1.1 302 No\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", "infra_error", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "infra_error", False),
    ],
)
def test_what_is_refused_or_foreign_is_an_error(served: Any, run: Any, raw: bytes, code: str, retryable: bool) -> None:
    def answer(sock: socket.socket, number: int) -> None:
        request_of(sock)
        sock.sendall(raw)

    server = served(answer)

    async def work(effects: Any) -> None:
        with pytest.raises(CorralError) as caught:
            await document(single_to(server, effects), GET)
        assert (caught.value.code, caught.value.retryable) == (code, retryable)
        assert code != "quota_exceeded" or caught.value.facts == {"retry_after_s": 7}

    run(work)


@pytest.mark.parametrize("raw", [b"HTTP/1.1 502 Bad\r\nContent-Length: 3\r\n\r\nbad", b"", b"HTTP/1.1 20", OK[:-2]])
def test_what_breaks_or_comes_from_a_proxy_is_a_cut(served: Any, run: Any, raw: bytes) -> None:
    def answer(sock: socket.socket, number: int) -> None:
        request_of(sock)
        sock.sendall(raw)

    server = served(answer)

    async def work(effects: Any) -> None:
        with pytest.raises(Cut) as caught:
            await document(single_to(server, effects), GET)
        assert caught.value.sent is True

    run(work)


def test_nobody_there_is_a_cut_before_anything_was_sent(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

    async def work(effects: Any) -> None:
        with pytest.raises(Cut) as caught:
            await open_url(url, None, effects)._singles[0].send(GET)
        assert caught.value.sent is False

    run(work)


def test_events_come_whole_however_they_are_cut(served: Any, run: Any) -> None:
    data = base64.b64encode(bytes(range(256))).decode()
    text = (
        ": hello\n\nevent: started\ndata: {}\n\n"
        f'event: stdout\nid: c1\ndata: {{"offset": 3, "base64": "{data}"}}\n\n: still here\n\n'
        'event: gap\nid: c2\ndata: {"stream": "stdout", "offset": 259, "bytes": 4}\n\n'
        'event: stderr\nid: c3\ndata: {"offset": 0, "text": "你\\u0085\x85"}\n\nevent: ended\ndata: {"result": 1}\n\n'
    ).encode()

    def stream(sock: socket.socket, number: int) -> None:
        request_of(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in text:
            sock.sendall(b"1\r\n%c\r\n" % byte)
        sock.sendall(b"0\r\n\r\n")

    server = served(stream)

    async def work(effects: Any) -> None:
        answer = await single_to(server, effects).send(GET)
        events = [event async for event in answer.events()]
        assert [(e.kind, e.cursor, e.offset) for e in events] == [
            ("started", None, 0), ("stdout", "c1", 3), ("gap", "c2", 259), ("stderr", "c3", 0), ("ended", None, 0),
        ]  # fmt: skip
        assert events[1].data == bytes(range(256)) and events[3].data == "你\x85\x85".encode()

    run(work)


def test_a_stream_that_ends_with_an_error_raises_it(served: Any, run: Any) -> None:
    body = b'event: error\ndata: {"code": "cursor_gone", "detail": "gone", "bytes": 9}\n\n'

    def stream(sock: socket.socket, number: int) -> None:
        request_of(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    server = served(stream)

    async def work(effects: Any) -> None:
        answer = await single_to(server, effects).send(GET)
        with pytest.raises(CorralError) as caught:
            [event async for event in answer.events()]
        assert caught.value.code == "cursor_gone"

    run(work)


async def test_a_reader_that_is_slow_does_not_make_the_client_grow(served: Any) -> None:
    total = 64 << 20

    def flood(sock: socket.socket, number: int) -> None:
        request_of(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
        for _ in range(total >> 20):
            sock.sendall(bytes(1 << 20))

    answer = await single_to(served(flood), Loop()).send(GET)
    wire: Any = answer._wire  # type: ignore[attr-defined]
    got, most = 0, 0
    async for block in answer.blocks():
        got += len(block)
        if got < 8 << 20:
            await asyncio.sleep(0.01)
        most = max(most, wire._size)
    assert got == total and most < 2 * HIGH


async def test_a_cancelled_wait_leaves_no_connection(served: Any) -> None:
    gone = threading.Event()

    def silent(sock: socket.socket, number: int) -> None:
        request_of(sock)
        if not sock.recv(1):
            gone.set()

    single = single_to(served(silent), Loop())
    task = asyncio.create_task(single.send(GET))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(gone.wait, 30)


# -- between the owner's loop and others -----------------------------------------------------------------------------------------
async def test_reading_ahead_is_bounded_keeps_order_and_passes_errors_on() -> None:
    made = 0
    closed = []

    async def source() -> AsyncGenerator[bytes, None]:
        nonlocal made
        try:
            for number in range(100):
                made += 1
                yield b"%03d" % number + bytes(100_000)
            raise CorralError("sandbox_lost", "gone")
        finally:
            closed.append(True)

    ahead = _Ahead(source())
    first = await ahead.take()
    for _ in range(50):
        await asyncio.sleep(0)
    assert made < 30
    items = [*first]
    with pytest.raises(CorralError) as caught:
        while batch := await ahead.take():
            items += batch
    assert [item[:3] for item in items] == [b"%03d" % n for n in range(100)]
    assert caught.value.code == "sandbox_lost" and closed == [True]
    early = _Ahead(source())
    await early.take()
    await early.close()
    assert closed == [True, True]


async def test_a_body_from_elsewhere_waits_for_its_reader_until_nobody_reads() -> None:
    feed = _Feed()
    puts = [asyncio.create_task(feed.put(b"%d" % n)) for n in range(10)]
    await asyncio.sleep(0.01)
    assert sum(task.done() for task in puts) == 4
    body = feed.blocks()
    assert [await anext(body) for _ in range(10)] == [b"%d" % n for n in range(10)]
    assert all([await task for task in puts])
    more = [asyncio.create_task(feed.put(b"x")) for _ in range(10)]
    await asyncio.sleep(0.01)
    feed.close()
    assert not any([await task for task in more[4:]])
