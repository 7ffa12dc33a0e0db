"""Queue, quota and webhooks as programs meet them: two replicas on PostgreSQL and Redis, real sandboxes, two tenants."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from corral.config import data_file
from postgres_server import PostgresServer
from redis_server import RedisServer
from replica_server import Replicas, until

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
EACH = 50
AT_ONCE = 3


def own_address() -> str:
    """An address of this host that is not loopback; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


class Receiver:
    """Keeps what is posted to it; answers 503 the first time, to be told again."""

    def __init__(self) -> None:
        received: list[tuple[dict[str, str], bytes]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(503 if len(received) == 1 else 204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.received = received
        self.server = ThreadingHTTPServer((own_address(), 0), Handler)
        self.host, self.port = str(self.server.server_address[0]), self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(receiver: Receiver) -> Iterator[Replicas]:
    place = Path(tempfile.mkdtemp(prefix="corral-queue-", dir="/tmp"))
    place.chmod(0o711)
    (place / "state").mkdir(mode=0o711)
    policy = yaml.safe_load(Path(data_file("policy/default.yaml")).read_text(encoding="utf-8"))
    policy["capacity"] = {"running": AT_ONCE}
    policy["tenants"] = {"*": {"sandboxes": 12, "queue": 60}, "small": {"queue": 2, "running": 1, "sandboxes": 2}}
    policy["webhooks"] = {"http": True, "ports": [receiver.port], "private": [f"{receiver.host}/32"]}
    policy["isolation"]["require_enforced"] = []
    (place / "policy.yaml").write_text(json.dumps(policy))
    redis = RedisServer()
    redis.start()
    with PostgresServer() as postgres:
        replicas = Replicas(place, postgres.fresh_database(), redis.url, CORRAL_POLICY=str(place / "policy.yaml"))
        replicas.start().ready()
        yield replicas
        replicas.clear()
        assert replicas.stop() == 0, replicas.errors.read_text()
        told = replicas.errors.read_text()
    redis.close()
    assert "Traceback" not in told, told
    shutil.rmtree(place, ignore_errors=True)


class Tenant:
    """Calls with a key of a tenant of its own."""

    def __init__(self, server: Replicas, name: str) -> None:
        self._server = server
        self._key = server.key
        if name != "default":
            assert self("POST", "/v1/tenants", {"id": name})[0] == 201
            self._key = self("POST", "/v1/keys", {"tenant": name, "scopes": ["run", "tenant"]})[1]["key"]

    def __call__(self, method: str, path: str, document: Any = None) -> tuple[int, Any]:
        return self.whole(method, path, document)[:2]

    def whole(self, method: str, path: str, document: Any = None) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=100)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if document is None else json.dumps(document), headers)
            answer = connection.getresponse()
            fields = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, json.loads(answer.read()), fields
        finally:
            connection.close()

    def submit(self, shell: str = "true", **more: Any) -> str:
        status, run = self("POST", "/v1/runs?wait=0", {"shell": shell, "runtime": "bubblewrap", **more})
        assert status == 202, run
        return str(run["id"])

    def finished(self, run_id: str) -> Any:
        def once() -> Any:
            try:
                status, run = self("GET", f"/v1/runs/{run_id}?wait=5")
            except (OSError, http.client.HTTPException):
                return None
            return run if status == 200 and run["state"] == "finished" else None

        return until(once, run_id)


def nothing_is_held(server: Replicas) -> bool:
    return bool(server.get("/v1/doctor")[2]["quota"] == [])


def test_a_greedy_tenant_does_not_hold_up_another_and_a_killed_replica_loses_nothing(server: Replicas) -> None:
    greedy, modest = Tenant(server, "greedy"), Tenant(server, "modest")
    theirs = [greedy.submit() for _ in range(EACH)]
    ours = [modest.submit() for _ in range(EACH)]
    assert modest("GET", "/v1/queue")[1]["waiting"] > EACH // 2
    server.end("replica")
    ends = {}
    for tenant, ids in ((greedy, theirs), (modest, ours)):
        for run_id in ids:
            run = tenant.finished(run_id)
            assert (run["result"]["reason"], run["result"]["started"]) == ("ok", True), run["result"]
        ends |= {run["id"]: run["finished_at"] for run in tenant("GET", "/v1/runs?limit=200")[1]["items"]}
    assert len(ends) == 2 * EACH
    order = sorted(ends, key=lambda run_id: ends[run_id])
    begun = next(place for place, run_id in enumerate(order) if run_id in set(ours))
    shared = order[begun : begun + EACH]
    assert abs(sum(run_id in set(ours) for run_id in shared) - EACH // 2) <= EACH // 5, "half and half while both wait"
    for tenant in (greedy, modest):
        until(lambda one=tenant: one("GET", "/v1/queue")[1]["use"]["sandboxes"] == 0, "the sandboxes are gone")
        assert set(tenant("GET", "/v1/queue")[1]["use"].values()) == {0}
    assert nothing_is_held(server)


def test_limits_of_a_tenant(server: Replicas) -> None:
    small = Tenant(server, "small")
    boxes = [small("POST", "/v1/sandboxes", {"runtime": "bubblewrap"}) for _ in range(2)]
    assert [status for status, _ in boxes] == [201, 201]
    status, problem, fields = small.whole("POST", "/v1/sandboxes", {"runtime": "bubblewrap"})
    assert (status, problem["code"], problem["limit"]) == (429, "quota_exceeded", "tenants.sandboxes")
    assert int(fields["retry-after"]) > 0
    first = small.submit(queue_timeout_s=1)
    second = small.submit(priority="high")
    until(lambda: small("GET", "/v1/queue")[1]["waiting"] == 2, "both wait")
    assert [item["run_id"] for item in small("GET", "/v1/queue")[1]["items"]] == [second, first]
    assert small("GET", f"/v1/runs/{second}")[1]["queue"]["waiting_for"] == "tenants.sandboxes"
    status, problem, fields = small.whole("POST", "/v1/runs?wait=0", {"shell": "true"})
    assert (status, problem["code"]) == (429, "queue_full") and int(fields["retry-after"]) > 0
    late = small.finished(first)["result"]
    assert (late["reason"], late["started"]) == ("queue_timeout", False)
    assert small("DELETE", f"/v1/sandboxes/{boxes[0][1]['id']}")[0] == 200
    assert small.finished(second)["result"]["reason"] == "ok"
    assert small("DELETE", f"/v1/sandboxes/{boxes[1][1]['id']}")[0] == 200
    until(lambda: set(small("GET", "/v1/queue")[1]["use"].values()) == {0}, "all of it is returned")
    assert nothing_is_held(server)


def test_a_webhook_comes_signed_to_a_range_that_the_operator_has_named(server: Replicas, receiver: Receiver) -> None:
    tenant = Tenant(server, "hooked")
    secret = tenant("GET", "/v1/webhooks/secret")[1]["secret"]
    url = f"http://{receiver.host}:{receiver.port}/hook?a=b"
    run_id = tenant.submit("echo 你好", webhook=url)
    assert tenant.finished(run_id)["result"]["reason"] == "ok"
    until(lambda: tenant("GET", f"/v1/runs/{run_id}")[1]["webhook"]["state"] == "delivered", "it is told again")
    told = tenant("GET", f"/v1/runs/{run_id}")[1]["webhook"]
    assert (told["attempts"], told["last_status"], told["url"]) == (2, 204, url)
    (first, _), (again, body) = receiver.received
    assert first["webhook-id"] == again["webhook-id"] == told["id"]
    signed = f"{again['webhook-id']}.{again['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    assert (
        again["webhook-signature"] == "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    )
    document = json.loads(body)
    assert document["id"] == run_id and document["result"]["stdout"]["text"] is None
    for refused in (
        f"http://127.0.0.1:{receiver.port}/",
        f"http://0x7f.1:{receiver.port}/",
        f"https://{receiver.host}/",
    ):
        status, problem = tenant("POST", "/v1/runs?wait=0", {"shell": "true", "webhook": refused})
        assert (status, problem["field"]) == (422, "/webhook"), problem
    assert len(receiver.received) == 2
