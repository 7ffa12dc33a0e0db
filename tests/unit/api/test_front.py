"""What a replica says before it can work, and while it leaves."""

from __future__ import annotations

import json
from typing import Any

from corral.api.front import Front


async def asked(front: Front, path: str, kind: str = "http") -> tuple[int, dict[bytes, bytes], Any]:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body is not wanted")

    async def send(message: Any) -> None:
        sent.append(message)

    await front({"type": kind, "path": path, "method": "POST"}, receive, send)
    if kind == "websocket":
        return sent[0]["code"], {}, None
    return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


async def test_before_the_application_is_there_all_is_told_to_come_again() -> None:
    front = Front()
    front.missing = "node"
    assert await asked(front, "/healthz") == (200, (await asked(front, "/healthz"))[1], {"status": "ok"})
    status, _, document = await asked(front, "/readyz")
    assert (status, document) == (503, {"status": "starting", "missing": ["node"]})
    status, headers, document = await asked(front, "/v1/runs")
    assert (status, document["code"], document["retryable"]) == (503, "node_unavailable", True)
    assert headers[b"retry-after"] == b"1"
    assert headers[b"connection"] == b"close"
    front.missing = "store"
    assert (await asked(front, "/v1/runs"))[2]["code"] == "store_error"
    front.missing = None
    assert (await asked(front, "/v1/runs"))[2]["code"] == "shutting_down"
    assert (await asked(front, "/v1/execs/exe_1/ws", "websocket"))[0] == 1013


async def test_while_it_leaves_each_answer_closes_its_connection_and_streams_are_as_before() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"connection", b"keep-alive"), (b"a", b"b")]}
        )
        await send({"type": "http.response.body", "body": b"{}"})

    front = Front()
    front.application = application
    assert (await asked(front, "/v1/runs"))[1] == {b"connection": b"keep-alive", b"a": b"b"}
    front.leaving = True
    assert (await asked(front, "/v1/runs"))[1] == {b"connection": b"close", b"a": b"b"}
