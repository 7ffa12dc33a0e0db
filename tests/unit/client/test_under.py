"""A transport under a lease that somebody else keeps: each call that changes something says which."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from corral.client import connect
from corral.client.effects import drive, iterate
from corral.client.line import Event, Line, Request
from corral.client.transport import LineTransport


class Answering:
    """Notes each request; the answer is `{}`."""

    status = 200

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.seen: list[Request] = []

    async def send(self, request: Request) -> Answering:
        if request.blocks is not None:
            async for _ in request.blocks:
                pass
        self.seen.append(request)
        return self

    async def document(self) -> dict[str, Any]:
        return {"open": True}

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        yield b"x"

    async def events(self) -> AsyncGenerator[Event, None]:
        yield Event("ended", None, doc={})

    async def close(self) -> None:
        pass


def made(monkeypatch: Any) -> tuple[LineTransport, Answering]:
    transport = connect(url="http://127.0.0.1:1")
    assert isinstance(transport, LineTransport)
    wire = Answering()

    async def current() -> Any:
        return wire

    monkeypatch.setattr(transport.line.endpoint, "current", current)
    return transport, wire


def test_requests_uploads_and_input_name_the_lease(monkeypatch: Any) -> None:
    from corral.client.calls import Calls

    plain, wire = made(monkeypatch)
    leased = plain.under("3.9")
    leased.request("POST", "/v1/sandboxes/sbx_1/execs", {}, None, {"Idempotency-Key": "k"})
    leased.upload("/v1/sandboxes/sbx_1/files/archive", [b"a"])
    list(iterate(Calls(leased.line).write("exe_1", b"x", False, 0)))
    drive(Calls(leased.line).resize("exe_1", 10, 20))
    drive(Calls(leased.line.hurried(1.0)).signal("exe_1", "TERM"))
    assert [request.headers.get("Corral-Lease") for request in wire.seen] == ["3.9"] * 5
    assert wire.seen[0].headers["Idempotency-Key"] == "k"
    wire.seen.clear()
    plain.request("GET", "/v1/runs")
    plain.upload("/v1/sandboxes/sbx_1/files/archive", [b"a"])
    assert [request.headers.get("Corral-Lease") for request in wire.seen] == [None, None]


def test_it_is_still_a_line_for_a_terminal(monkeypatch: Any) -> None:
    plain, wire = made(monkeypatch)
    leased = plain.under("3.9")
    assert isinstance(leased, LineTransport) and isinstance(leased.line, Line)
    assert list(leased.download("/v1/execs/exe_1/logs")) == [b"x"]
    assert [event.kind for event in leased.stream("/v1/execs/exe_1/stream")] == ["ended"]
    assert len(wire.seen) == 2
