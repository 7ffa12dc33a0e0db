"""Wherever an error reaches a tenant: it says what to do, and not where the installation lies. An admin, and the log, have all of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

import pytest

from corral.api import asgi, websocket
from corral.api.calls import Request
from corral.api.routes import ROUTES, dispatch
from corral.api.turns import Turns
from corral.domain.discretion import HOST_PATH, Discretion
from corral.domain.identity import ADMIN, EVERYTHING
from corral.errors import CorralError
from corral.ports.delivery import DeliveryError
from corral.ports.node import Chunk
from corral.services.events import Caller

from .conftest import World

TENANT = Caller(scopes=EVERYTHING - {ADMIN})
OPERATOR = Caller()
STORE = "connection to corral_user@10.0.0.5/corral_db was refused"
IDENT = "x_01m8s56b4rcxvhyz2a5abp5w8a"


class Secret:
    """What must not be told, and errors that tell it."""

    def __init__(self, world: World) -> None:
        self.path = f"{world.tmp}/spool/exe_1"
        self.words = (str(world.tmp), "10.0.0.5", "corral_user", "corral_db", "/sys/fs/cgroup")

    def failure(self, code: str = "infra_error", **more: Any) -> CorralError:
        detail = f"[Errno 5] Input/output error: '{self.path}', see /sys/fs/cgroup/corral/x: 你好"
        return CorralError(code, detail, hint=f"look at {self.path}", **more)

    def is_kept(self, told: Any) -> bool:
        said = told if isinstance(told, str) else json.dumps(told, default=str)
        return not any(word in said for word in self.words)


@pytest.fixture
def secret(world: World) -> Secret:
    return Secret(world)


async def over_the_wire(
    world: World, method: str, path: str, document: Any = None, caller: Caller = TENANT
) -> tuple[int, str]:
    """(status, body) of a call, as the wire has it."""
    assert world.services is not None
    route, _, query = path.partition("?")
    pairs = dict(pair.split("=") for pair in query.split("&") if pair)
    reply = await dispatch(world.services, Request(method, route, pairs, {}, b"", document, caller, pieces=True))
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def silent() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    await asyncio.wait_for(asgi._answer(reply, silent, send, False, Turns()), 20)
    return int(sent[0]["status"]), b"".join(message.get("body", b"") for message in sent[1:]).decode()


def test_paths_of_the_host_are_hidden_and_those_of_a_sandbox_are_not() -> None:
    discretion = Discretion(["/srv/corral/", "/", ""])
    said = "open '/srv/corral/i/01/root', (/srv/corral): /workspace/a and /sys/fs/cgroup/x"
    assert discretion.text(said) == f"open '{HOST_PATH}', ({HOST_PATH}): /workspace/a and {HOST_PATH}"
    assert discretion.text("no /proc/self/x in /workspace", "not_found") == "no /proc/self/x in /workspace"
    plain = CorralError("not_found", "there is no /workspace/a")
    assert discretion.error(plain) is plain
    told = discretion.error(CorralError("lease_lost", "at /srv/corral/x", hint="h", field="/f", floor="2.1"))
    assert (told.code, told.detail, told.hint, told.field, told.facts) == (
        "lease_lost",
        f"at {HOST_PATH}",
        "h",
        "/f",
        {"floor": "2.1"},
    )


@pytest.mark.parametrize("code", ["store_error", "state_locked"])
async def test_no_route_tells_a_tenant_where_the_store_is(world: World, secret: Secret, code: str) -> None:
    assert world.services is not None

    class Lost:
        def __getattr__(self, name: str) -> Any:
            async def lost(*_: Any, **__: Any) -> Any:
                raise CorralError(code, STORE, hint="as corral_user", host="10.0.0.5")

            return lost

    core, kept = world.services.core, world.services.core.store
    core.store = Lost()  # type: ignore[assignment]
    seen = 0
    try:
        for route in ROUTES:
            path = route.pattern.replace(":path}", "}")
            for name in ("run_id", "sandbox_id", "exec_id", "tenant_id", "key_id", "user_id", "name", "path"):
                path = path.replace(f"{{{name}}}", IDENT)
            document = {"argv": ["a"]} if path.endswith("execs") else {"command": ["a"]} if path == "/v1/runs" else {}
            async with asyncio.timeout(20):
                status, body = await over_the_wire(world, route.method, path, document)
            assert secret.is_kept(body), (route, body)
            seen += status == 503 and code in body
        assert seen > 10, "they asked the store"
        status, body = await over_the_wire(world, "GET", "/v1/runs", caller=OPERATOR)
        assert STORE in body
    finally:
        core.store = kept


async def test_errors_before_and_amid_streams_and_downloads_are_discreet(
    world: World, secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = (await world.call("POST", "/v1/runs", {"command": ["print", "1"]})).document
    assert run is not None

    async def broken(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield Chunk("stdout", 0, b"begun", 0, "1")
        raise secret.failure()

    async def at_once(*_: Any, **__: Any) -> AsyncIterator[bytes]:
        raise secret.failure()
        yield b""

    monkeypatch.setattr(world.node, "stream_exec", broken)
    monkeypatch.setattr(world.node, "raw_output", at_once)
    monkeypatch.setattr("corral.services.documents.LARGE", 0)
    monkeypatch.setattr(world.node, "kept_output", at_once)
    for path, begins in (("/stream", "event: started"), ("/logs", "{"), ("", "{")):
        status, body = await over_the_wire(world, "GET", f"/v1/runs/{run['id']}{path}")
        assert body.startswith(begins) and HOST_PATH in body and "\\u4f60" in body, (status, body)
        assert secret.is_kept(body), body
        _, body = await over_the_wire(world, "GET", f"/v1/runs/{run['id']}{path}", caller=OPERATOR)
        assert secret.path in body


async def test_a_websocket_is_discreet_in_all_that_it_says(
    world: World, secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.services is not None
    sandbox = (await world.call("POST", "/v1/sandboxes", {})).document or {}
    made = (await world.call("POST", f"/v1/sandboxes/{sandbox['id']}/execs", {"argv": ["hold"]}, wait=0)).document or {}

    async def socket(*messages: dict[str, Any], caller: Caller = TENANT) -> str:
        assert world.services is not None
        said: list[str] = []
        inbox = [
            {"type": "websocket.connect"},
            *({"type": "websocket.receive", "text": json.dumps(m)} for m in messages),
        ]
        answered = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop(0)
            await answered.wait()
            return {"type": "websocket.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            said.append(json.dumps(message, default=bytes.decode))
            if "error" in said[-1]:
                answered.set()

        request = Request("GET", f"/v1/execs/{made['id']}/ws", caller=caller)
        await asyncio.wait_for(websocket.serve(world.services, request, None, receive, send, Turns()), 20)
        return "\n".join(said)

    async def refused(*_: Any, **__: Any) -> Any:
        raise secret.failure()

    async def broken(*_: Any, **__: Any) -> AsyncIterator[Any]:
        raise secret.failure()
        yield

    monkeypatch.setattr(world.node, "signal_exec", refused)
    monkeypatch.setattr(world.node, "resize_exec", refused)
    said = await socket({"type": "signal", "signal": "TERM"})
    assert '\\"of\\":\\"signal\\"' in said and HOST_PATH in said and secret.is_kept(said), said
    monkeypatch.setattr(world.node, "stream_exec", broken)
    said = await socket()
    assert HOST_PATH in said and secret.is_kept(said), said
    assert secret.path in await socket(caller=OPERATOR)
    monkeypatch.setattr(world.services.sandboxes, "get_exec", refused)
    said = await socket()
    assert "http.response" in said and HOST_PATH in said and secret.is_kept(said), said


async def test_results_and_histories_are_discreet_and_the_log_is_not(
    world: World, secret: Secret, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.services is not None
    sandbox = (await world.call("POST", "/v1/sandboxes", {})).document or {}
    ident = sandbox["id"]

    async def refused(*_: Any, **__: Any) -> Any:
        raise secret.failure(retryable=False)

    world.node.turn_error = secret.failure(retryable=False)
    _, body = await over_the_wire(world, "POST", f"/v1/sandboxes/{ident}/pause", caller=OPERATOR)
    assert secret.path in body
    world.node.turn_error = None
    with monkeypatch.context() as patched:
        patched.setattr(world.node, "start_exec", refused)
        told = await world.call("POST", f"/v1/sandboxes/{ident}/execs", {"argv": ["a"]})
        assert told.document is not None and secret.is_kept(told.document), told.document
        run = (await world.call("POST", "/v1/runs", {"command": ["a"]})).document or {}
        assert run["result"]["reason"] == "infra_error" and HOST_PATH in run["result"]["hint"]
        assert secret.is_kept(run), run
    inspected = (await world.call("GET", f"/v1/sandboxes/{ident}")).document
    assert HOST_PATH in json.dumps(inspected), "why it could not be paused"
    assert secret.is_kept(inspected), inspected

    world.node.create_error = secret.failure(retryable=False)
    run = (await world.call("POST", "/v1/runs", {"command": ["a"]})).document or {}
    assert run["result"]["started"] is False and HOST_PATH in run["result"]["hint"], run["result"]
    assert secret.is_kept(run), run
    failed = await world.call("POST", "/v1/sandboxes", {})
    assert failed.status >= 400
    every = (await world.call("GET", "/v1/sandboxes", all="true")).document or {}
    for each in every["items"]:
        inspected = (await world.call("GET", f"/v1/sandboxes/{each['id']}")).document
        assert secret.is_kept(inspected), inspected
    assert any(secret.path in line for line in world.logged)
    world.node.create_error = None

    row = await world.store.get_run(run["id"], "default")
    assert row is not None
    body = json.dumps(await world.services.documents.run(row, output=False))
    assert HOST_PATH in body and secret.is_kept(body), "what a webhook is sent"


async def test_what_a_delivery_met_is_told_without_paths_of_the_host(world: World, secret: Secret) -> None:
    assert world.services is not None
    tried: list[Any] = []

    async def tell(*_: Any, **given: Any) -> None:
        tried.append(given["error"])

    async def fails(_: Any) -> int:
        raise DeliveryError(f"the secret cannot be read here: {secret.path} is not ours")

    webhooks = world.services.webhooks
    webhooks._send = fails  # type: ignore[method-assign]
    world.store.delivery_tried = tell  # type: ignore[method-assign, assignment]
    delivery: Any = type("D", (), {"attempts": 1, "delivery_id": "d", "tenant_id": "default", "run_id": "r"})()
    await webhooks._attempt(delivery)
    assert tried == [f"the secret cannot be read here: {HOST_PATH} is not ours"]


async def test_templates_tell_a_tenant_why_and_not_where(world: World, secret: Secret) -> None:
    world.node.build_error = secret.failure("template_unavailable")
    _, body = await over_the_wire(world, "POST", "/v1/templates", {"name": "host"}, caller=OPERATOR)
    assert secret.path in body
    for path in ("/v1/templates/host", "/v1/templates"):
        _, body = await over_the_wire(world, "GET", path)
        assert HOST_PATH in body and secret.is_kept(body), body
        _, body = await over_the_wire(world, "GET", path, caller=OPERATOR)
        assert secret.path in body
