"""A key that ends in the middle of a call: whatever the call is doing, it ends, and never looks whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping, Sequence
from typing import Any

import pytest

from corral.api import auth
from corral.api.asgi import Application
from corral.api.auth import Watch, network_of
from corral.api.keys import AdminKey
from corral.testing.store import audit

from .conftest import World
from .test_identity import made


class Call:
    """One HTTP call to an application, with its client in the test's hands."""

    def __init__(
        self,
        world: World,
        key: str,
        method: str,
        path: str,
        *chunks: bytes,
        ended: bool = True,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        assert world.services is not None
        path, _, query = path.partition("?")
        self.sent: list[MutableMapping[str, Any]] = []
        self._chunks: list[dict[str, Any]] = [
            {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
        ]
        if ended:
            self._chunks.append({"type": "http.request", "body": b"", "more_body": False})
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(b"authorization", f"Bearer {key}".encode()), *headers],
            "client": ("192.0.2.1", 1),
        }
        application = Application(world.services, AdminKey.of("the-key-of-the-server"))
        self.task = asyncio.ensure_future(application(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._chunks:
            return self._chunks.pop(0)
        await asyncio.Event().wait()  # the client is there, and silent
        raise AssertionError

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from corral.services import admission

    monkeypatch.setattr(auth, "LOOK_S", 0.03)
    monkeypatch.setattr(admission, "HOLDS_S", 0.02)


async def revoked(world: World, key_id: str) -> None:
    await asyncio.sleep(0.1)
    await world.store.revoke_key(key_id, None, audit())


async def box(world: World, key: str) -> str:
    call = Call(world, key, "POST", "/v1/sandboxes")
    await asyncio.wait_for(call.task, 10)
    assert call.status == 201, call.body
    return str(json.loads(call.body)["id"])


async def test_a_call_that_waits_is_refused(world: World) -> None:
    key = await made(world)
    sandbox = await box(world, key["key"])
    begin = Call(world, key["key"], "POST", f"/v1/sandboxes/{sandbox}/execs?wait=0", b'{"argv": ["sleep", "60"]}')
    await asyncio.wait_for(begin.task, 10)
    exec_id = json.loads(begin.body)["id"]
    calls = {
        "wait": Call(world, key["key"], "GET", f"/v1/execs/{exec_id}?wait=60"),
        "follow": Call(world, key["key"], "GET", f"/v1/execs/{exec_id}/logs?follow=true"),
        "stream": Call(world, key["key"], "GET", f"/v1/execs/{exec_id}/stream"),
        "upload": Call(world, key["key"], "PUT", f"/v1/sandboxes/{sandbox}/files?path=/workspace/a", b"x", ended=False),
        "body": Call(world, key["key"], "POST", "/v1/runs", b"{", ended=False),
    }
    await revoked(world, key["id"])
    await asyncio.wait_for(asyncio.gather(*(call.task for call in calls.values())), 10)
    for name in ("wait", "follow", "upload", "body"):
        assert calls[name].status == 401, (name, calls[name].body)
        assert json.loads(calls[name].body)["code"] == "unauthorized"
    stream = calls["stream"]
    assert stream.status in (200, 401)
    assert b"unauthorized" in stream.body and not stream.sent[-1].get("more_body", False)
    stored = await world.store.get_exec(exec_id, "acme")
    assert stored is not None and stored.state in ("starting", "running"), "what it started goes on"


async def test_a_call_with_a_good_key_notices_nothing(world: World) -> None:
    key = (await made(world))["key"]
    sandbox = await box(world, key)
    call = Call(world, key, "POST", f"/v1/sandboxes/{sandbox}/execs?wait=5", b'{"argv": ["sleep", "0.3"]}')
    await asyncio.wait_for(call.task, 20)
    assert call.status in (200, 202), call.body


@pytest.mark.parametrize("name", ["authorization", "corral-lease", "idempotency-key"])
async def test_a_call_with_two_of_what_there_is_one_of_does_nothing(world: World, name: str) -> None:
    key = (await made(world))["key"]
    twice = [(name.encode(), b"1.1"), (name.encode(), b"1.2")]
    call = Call(world, key, "POST", "/v1/sandboxes", headers=twice)
    await asyncio.wait_for(call.task, 10)
    assert (call.status, json.loads(call.body)["code"]) == (400, "bad_request")
    assert await world.store.list_sandboxes("acme") == []


async def test_a_watch_hands_every_message_on_until_the_key_ends() -> None:
    good, messages = True, [{"type": "http.request", "body": bytes([n])} for n in range(100)]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.001)
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def still() -> bool:
        return good

    watch = Watch(receive, still, "http.disconnect")
    assert [(await watch.receive())["body"][0] for _ in range(100)] == list(range(100)) and not watch.over
    good = False
    assert (await asyncio.wait_for(watch.receive(), 10))["type"] == "http.disconnect" and watch.over
    assert (await watch.receive())["type"] == "http.disconnect"
    watch.close()


@pytest.mark.parametrize(
    "address, network",
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("a socket", "a socket"),
    ],
)
def test_whom_an_address_counts_for(address: str, network: str) -> None:
    assert network_of(address) == network
