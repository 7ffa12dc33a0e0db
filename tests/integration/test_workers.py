"""Two replicas on PostgreSQL and Redis, whole processes: whatever dies, what was accepted is finished once and started once."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from postgres_server import PostgresServer
from redis_server import RedisServer
from replica_server import Replicas, until

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
COUNTED = "echo begun >> /workspace/starts; sleep 2; cat /workspace/starts"
"""A program that says how often it was started in its sandbox."""


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def installation(postgres: PostgresServer, redis: RedisServer) -> Iterator[Replicas]:
    place = Path(tempfile.mkdtemp(prefix="corral-workers-", dir="/tmp"))
    place.chmod(0o711)
    (place / "state").mkdir(mode=0o711)
    (place / "state" / "config.toml").write_text("[delays]\nworker_ttl_s = 2.0\nstale_s = 4.0\n")
    server = Replicas(place, postgres.fresh_database(), redis.url).start().ready()
    yield server
    server.clear()
    assert server.stop() == 0, server.errors.read_text()
    told = server.errors.read_text()
    assert "Traceback" not in told, told
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def server(installation: Replicas, postgres: PostgresServer, redis: RedisServer) -> Iterator[Replicas]:
    """The installation with two replicas at work, whatever the test before did to it."""
    until(lambda: len(installation.children("replica")) == 2, "two replicas")
    yield installation.ready()
    postgres.start()


class Call:
    """One call on a connection of its own, to one replica by chance."""

    def __init__(self, server: Replicas) -> None:
        self._server = server

    def __call__(
        self, method: str, path: str, document: Any = None, key: str | None = None, patience_s: float = 100.0
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=patience_s)
        headers = {"Authorization": f"Bearer {self._server.key}", "Content-Type": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        try:
            connection.request(method, path, None if document is None else json.dumps(document), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def repeated(self, method: str, path: str, document: Any = None, key: str | None = None) -> Any:
        """As a client that tries again, until the answer is one that stays."""

        def once() -> Any:
            try:
                status, answer = self(method, path, document, key)
            except (OSError, http.client.HTTPException):
                return None
            return answer if status < 500 else None

        return until(once, f"{method} {path}")

    def finished(self, run_id: str) -> Any:
        def once() -> Any:
            run = self.repeated("GET", f"/v1/runs/{run_id}?wait=5")
            return run if run["state"] == "finished" else None

        return until(once, run_id)


@pytest.fixture
def call(server: Replicas) -> Call:
    return Call(server)


def submit(call: Call, count: int) -> list[str]:
    document = {"shell": COUNTED, "runtime": "bubblewrap"}
    return [call("POST", "/v1/runs?wait=0", document)[1]["id"] for _ in range(count)]


def check_once(call: Call, runs: list[str]) -> None:
    for run_id in runs:
        result = call.finished(run_id)["result"]
        assert (result["reason"], result["stdout"]["text"]) == ("ok", "begun\n"), result


def test_runs_of_a_replica_that_is_killed_are_finished_by_the_other_and_start_once(
    server: Replicas, call: Call
) -> None:
    runs = submit(call, 6)
    until(lambda: any(call("GET", f"/v1/runs/{run}")[1]["state"] == "running" for run in runs), "one runs")
    server.end("replica")
    check_once(call, runs)
    until(lambda: call.repeated("GET", "/v1/sandboxes")["items"] == [], "the sandboxes of these runs are gone")


def test_runs_go_on_while_both_replicas_and_the_node_are_killed_one_after_the_other(
    server: Replicas, call: Call
) -> None:
    runs = submit(call, 6)
    server.end("replica")
    server.end("replica", -1)
    server.end("node")
    check_once(call, runs)


def test_a_replica_that_stood_still_for_longer_than_its_row_lives_does_nothing_twice(
    server: Replicas, call: Call
) -> None:
    runs = submit(call, 6)
    until(lambda: any(call("GET", f"/v1/runs/{run}")[1]["state"] == "running" for run in runs), "one runs")
    stopped = server.end("replica", 0, signal.SIGSTOP)
    which = server.children("replica").index(stopped)
    time.sleep(5.0)
    assert server.end("replica", which, signal.SIGCONT) == stopped
    check_once(call, runs)
    for run_id in runs:
        assert call.finished(run_id)["result"]["reason"] == "ok"


def test_the_result_of_a_program_that_ended_while_the_store_was_down_arrives(
    server: Replicas, call: Call, postgres: PostgresServer
) -> None:
    runs = submit(call, 4)
    until(lambda: all(call("GET", f"/v1/runs/{run}")[1]["state"] == "running" for run in runs), "all run")
    postgres.stop(signal.SIGQUIT)
    time.sleep(10.0)
    assert call("POST", "/v1/runs", {"shell": "true"})[0] == 503
    postgres.start()
    server.ready()
    check_once(call, runs)


def test_without_redis_a_run_is_waited_for_and_cancelled_at_any_replica(
    server: Replicas, call: Call, redis: RedisServer
) -> None:
    redis.kill()
    try:
        runs = [call("POST", "/v1/runs?wait=0", {"shell": "sleep 60"})[1]["id"] for _ in range(4)]
        for run_id in runs:
            until(lambda run_id=run_id: call("GET", f"/v1/runs/{run_id}")[1]["state"] == "running", "it runs")
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(call, "GET", f"/v1/runs/{run_id}?wait=50") for run_id in runs]
            for run_id in runs:
                assert call("POST", f"/v1/runs/{run_id}/cancel")[0] < 300
            answers = [future.result() for future in waiting]
        assert {answer["result"]["reason"] for _, answer in answers} == {"cancelled"}
    finally:
        redis.start()
    until(lambda: "warnings" not in server.get("/readyz")[2])


@pytest.mark.parametrize("breaking", ["flush", "restart", "hang"])
def test_a_broken_redis_loses_no_run(server: Replicas, call: Call, redis: RedisServer, breaking: str) -> None:
    runs = submit(call, 4)
    getattr(redis, breaking)()
    try:
        check_once(call, runs)
        check_once(call, submit(call, 2))
    finally:
        redis.go_on()
    until(lambda: "warnings" not in server.get("/readyz")[2])


# -- K12 ---------------------------------------------------------------------------------------------------------------------------

SANDBOX: dict[str, Any] = {"runtime": "bubblewrap"}
RUN: dict[str, Any] = {"shell": "echo 你好; sleep 1", "runtime": "bubblewrap"}


def send_and_cut(server: Replicas, path: str, document: Any, key: str) -> None:
    """The request arrives, its client is gone before the answer."""
    body = json.dumps(document).encode()
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: corral\r\nAuthorization: Bearer {server.key}\r\nIdempotency-Key: {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        time.sleep(0.05)


@pytest.mark.parametrize(("path", "document"), [("/v1/sandboxes", SANDBOX), ("/v1/runs", RUN)])
def test_k12_creating_with_one_key_makes_one(server: Replicas, call: Call, path: str, document: Any) -> None:
    before = listed(call, path)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: call("POST", path, document, "twenty" + path), range(20)))
    assert {status for status, _ in answers} <= {200, 201, 202}, answers
    assert len({answer["id"] for _, answer in answers}) == 1
    assert listed(call, path) - before == {answers[0][1]["id"]}

    send_and_cut(server, path, document, "cut" + path)
    first = call.repeated("POST", path, document, "cut" + path)
    assert call.repeated("POST", path, document, "cut" + path)["id"] == first["id"]
    assert listed(call, path) - before == {answers[0][1]["id"], first["id"]}

    status, problem = call("POST", path, {**document, "timeout_s" if path == "/v1/runs" else "ttl_s": 33}, "cut" + path)
    assert (status, problem["code"]) == (409, "idempotency_conflict")

    send_and_cut(server, path, document, "killed" + path)
    server.kill()
    server.start().ready()
    made = call.repeated("POST", path, document, "killed" + path)
    again = call.repeated("POST", path, document, "killed" + path)
    assert made["id"] == again["id"] and call.repeated("POST", path, document, "cut" + path)["id"] == first["id"]
    assert listed(call, path) - before == {answers[0][1]["id"], first["id"], made["id"]}
    if path == "/v1/runs":
        for run in (first, made):
            result = call.finished(run["id"])["result"]
            assert (result["reason"], result["stdout"]["text"]) == ("ok", "你好\n"), result
    else:
        until(lambda: call.repeated("GET", f"/v1/sandboxes/{made['id']}")["state"] == "leased", "it is made")
    until(lambda: charged(call) == len(listed(call, "/v1/sandboxes")), "the quota is charged once for each")


def charged(call: Call) -> Any:
    """How many sandboxes the tenant's quota counts, once no run holds room."""
    use = call.repeated("GET", "/v1/queue")["use"]
    return use["sandboxes"] if use["running"] == use["queued"] == 0 else None


def listed(call: Call, path: str) -> set[Any]:
    """The ids there are. Those of earlier tests may end meanwhile."""
    return {item["id"] for item in call.repeated("GET", path + "?limit=200")["items"]}


def test_creations_and_deletions_at_both_replicas_at_once_leave_nothing(server: Replicas, call: Call) -> None:
    def one(number: int) -> None:
        made = call.repeated("POST", "/v1/sandboxes", SANDBOX, f"churn {number}")
        threads: list[threading.Thread] = []
        codes: list[int] = []

        def delete() -> None:
            codes.append(call("DELETE", f"/v1/sandboxes/{made['id']}")[0])

        for _ in range(3):
            threads.append(threading.Thread(target=delete))
        begin: Callable[[threading.Thread], None] = threading.Thread.start
        for thread in threads:
            begin(thread)
        for thread in threads:
            thread.join()
        assert set(codes) <= {200, 202}, codes
        assert call.repeated("GET", f"/v1/sandboxes/{made['id']}")["state"] in ("sanitizing", "terminated")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(18)))


def test_k12_attaching_with_one_key_gives_one_lease_by_every_replica_and_after_their_death(
    server: Replicas, call: Call
) -> None:
    box = call.repeated("POST", "/v1/sandboxes", SANDBOX)["id"]
    path = f"/v1/sandboxes/{box}/attach"
    for name, wish in (("one", {}), ("new", {"contention": "new"})):
        document = {"owner": f"s/{name}", "ttl_s": 600, **wish}
        send_and_cut(server, path, document, f"attach {name}")
        first = call.repeated("POST", path, document, f"attach {name}")
        # A connection goes to one replica by chance: of so many some go to each.
        leases = [call.repeated("POST", path, document, f"attach {name}") for _ in range(20)]
        server.kill()
        server.start().ready()
        leases.append(call.repeated("POST", path, document, f"attach {name}"))
        assert {(lease["sandbox_id"], lease["lease"]) for lease in leases} == {(first["sandbox_id"], first["lease"])}
        assert (first["sandbox_id"] == box) == (name == "one")
        assert all(0 < lease["ttl_ms"] <= first["ttl_ms"] for lease in leases)
