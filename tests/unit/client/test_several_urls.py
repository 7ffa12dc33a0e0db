"""One service at several URLs: a call that fails at one goes on at the next, with the same key."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from corral.client import endpoint
from corral.client.effects import Blocking, drive, iterate
from corral.client.http import open_url
from corral.client.line import Line
from corral.errors import CorralError

from .test_http import Server, request_of

Serve = Callable[[socket.socket, int], None]
STOPPING = json.dumps(CorralError("shutting_down", "going").to_problem()).encode()


def answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body)


class Two:
    """Two servers, each with what it was asked."""

    def __init__(
        self, first: Callable[[socket.socket, int], None], second: Callable[[socket.socket, int], None]
    ) -> None:
        self.asked: list[list[bytes]] = [[], []]
        self.servers = [Server(self._noting(0, first)), Server(self._noting(1, second))]
        self.effects = Blocking()
        self.line = Line(open_url(self.urls, None, self.effects), self.effects, 5.0)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def _noting(self, which: int, serve: Serve) -> Serve:
        def noting(sock: socket.socket, number: int) -> None:
            if asked := request_of(sock):
                self.asked[which].append(asked)
                serve(sock, number)

        return noting

    def close(self) -> None:
        for server in self.servers:
            with contextlib.suppress(OSError):  # the test has closed it
                server.close()


@pytest.fixture
def two() -> Iterator[Callable[[Serve, Serve], Two]]:
    made: list[Two] = []

    def make(first: Serve, second: Serve) -> Two:
        made.append(Two(first, second))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ok(sock: socket.socket, number: int) -> None:
    sock.sendall(answer(b'{"a": 1}'))


def cut(sock: socket.socket, number: int) -> None:
    """Nothing at all."""


def stopping(sock: socket.socket, number: int) -> None:
    sock.sendall(answer(STOPPING, b"503 Service Unavailable"))


def key_of(request: bytes) -> bytes:
    return next(line for line in request.split(b"\r\n") if line.lower().startswith(b"idempotency-key:"))


@pytest.mark.parametrize("first", [cut, stopping], ids=["cut off", "shutting down"])
def test_a_call_goes_on_at_the_next_url_with_its_key_and_the_others_start_there(two: Any, first: Serve) -> None:
    both = two(first, ok)
    assert drive(both.line.request("POST", "/v1/runs", {"code": "1"})) == {"a": 1}
    assert key_of(both.asked[0][0]) == key_of(both.asked[1][0])
    assert drive(both.line.request("GET", "/v1/runs")) == {"a": 1}
    assert [len(asked) for asked in both.asked] == [1, 2]


def test_a_url_where_nobody_is_costs_no_call(two: Any) -> None:
    both = two(cut, ok)
    both.servers[0].close()
    assert drive(both.line.request("GET", "/v1/runs")) == {"a": 1}


def test_a_name_that_does_not_exist_is_one_failure_among_several_and_the_end_alone(two: Any) -> None:
    both = two(cut, ok)
    effects = Blocking()
    line = Line(open_url(["http://no-such-host.invalid", both.urls[1]], None, effects), effects)
    assert drive(line.request("GET", "/v1/runs")) == {"a": 1}
    with pytest.raises(CorralError, match="there is no host"):
        drive(Line(open_url("http://no-such-host.invalid", None, effects), effects).request("GET", "/"))


def test_a_stream_goes_on_at_the_next_url_by_its_cursor(two: Any) -> None:
    def event(kind: str, cursor: str, **more: Any) -> bytes:
        return f"event: {kind}\nid: {cursor}\ndata: {json.dumps(more)}\n\n".encode()

    def part(sock: socket.socket, number: int) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        sock.sendall(event("started", "s") + event("stdout", "c1", offset=0, base64="YQ=="))

    def rest(sock: socket.socket, number: int) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        sock.sendall(event("stdout", "c2", offset=1, base64="Yg==") + event("ended", "e", result={}))

    both = two(part, rest)
    events = list(iterate(both.line.stream("/v1/execs/exe_1/stream")))
    assert b"".join(event.data for event in events) == b"ab"
    assert [event.kind for event in events] == ["started", "stdout", "stdout", "ended"]
    assert b"cursor=c1" in both.asked[1][0].split(b"\r\n")[0]


def test_several_urls_are_a_list_or_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    effects = Blocking()
    for given in (["http://a:1", "http://b:2/x"], "http://a:1, http://b:2/x,"):
        made = open_url(given, None, effects)
        assert made.hint == "check that a server listens on http://a:1 or http://b:2"
    monkeypatch.setenv("CORRAL_URL", "http://a:1,http://b:2")
    assert endpoint(None, None, None, None, effects).hint == "check that a server listens on http://a:1 or http://b:2"
    for bad in ("", ",", "http://a:1,ftp://b"):
        with pytest.raises(CorralError) as refused:
            open_url(bad, None, effects)
        assert (refused.value.code, refused.value.field) == ("invalid_value", "CORRAL_URL")


def test_when_none_answers_the_refusal_names_all(two: Any) -> None:
    both = two(cut, cut)
    with pytest.raises(CorralError) as gone:
        drive(both.line.hurried(0.3).request("GET", "/v1/runs"))
    assert gone.value.code == "node_unavailable"
    assert gone.value.hint == f"check that a server listens on {both.urls[0]} or {both.urls[1]}"
