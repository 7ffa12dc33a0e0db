"""K11: whatever is under way, a delete wins: nothing of the sandbox is left, nothing runs after it was said, and whoever waits is told why."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from .conftest import eventually, marked, rounds
from .serving import DOCUMENTED, Answer, Server, remains

ROUNDS = 50
PAUSES = 100
AT_ONCE = 6
OVER = ("sanitizing", "terminated")
STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["setsid", "sh", "-c", "trap '' TERM; while :; do sleep 1; done", sys.argv[1]])
if os.fork() == 0:
    os.setsid()
else:
    print("running", flush=True)
while True:
    open("beat", "a").write("x")
    time.sleep(0.01)
"""


class Watched:
    """A server whose every answer is looked at: documented codes only, no failure, never alive after a delete was said."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.sandboxes: set[str] = set()
        self.instances: set[str] = set()

    def checked(self, answer: Answer) -> Answer:
        assert answer.status < 500, f"{answer}\n{self.server.said[-4000:]}"
        assert answer.status < 400 or answer.code in DOCUMENTED, str(answer)
        return answer

    def call(self, method: str, target: str, **more: Any) -> Answer:
        return self.checked(self.server.call(method, target, **more))

    def create(self, **wishes: Any) -> str:
        sandbox = self.server.create(**wishes)
        self.know(sandbox)
        return sandbox

    def know(self, sandbox: str) -> None:
        self.sandboxes.add(sandbox)
        seen = self.call("GET", f"/v1/sandboxes/{sandbox}").document
        instance = seen.get("instance")
        if isinstance(instance, dict):
            instance = instance.get("id") or instance.get("instance_id")
        if instance:
            self.instances.add(str(instance))

    def delete(self, sandbox: str, **query: Any) -> Answer:
        """2xx, and from then on it is not alive any more."""
        answer = self.call("DELETE", f"/v1/sandboxes/{sandbox}", **query)
        assert answer.status in (200, 202), str(answer)
        assert answer.document["state"] in OVER
        assert answer.status == 202 or answer.document["state"] == "terminated"
        seen = self.call("GET", f"/v1/sandboxes/{sandbox}")
        assert seen.status == 200 and seen.document["state"] in OVER, str(seen)
        refused = self.call("POST", f"/v1/sandboxes/{sandbox}/execs", document={"argv": ["true"]})
        assert (refused.status, refused.code) == (410, "sandbox_deleted"), str(refused)
        return answer

    def nothing_is_left(self) -> None:
        state = self.server.box.state
        names = self.sandboxes | self.instances

        def left() -> Any:
            live = [item["id"] for item in self.call("GET", "/v1/sandboxes", limit=1000).document["items"]]
            return [one for one in live if one in self.sandboxes], remains(state, names)

        eventually(lambda: left() == ([], {}), 30, "nothing of the deleted sandboxes is left")
        for sandbox in self.sandboxes:
            assert self.call("GET", f"/v1/sandboxes/{sandbox}").document["state"] == "terminated"
            again = self.call("DELETE", f"/v1/sandboxes/{sandbox}")
            assert again.status == 200 and again.document["state"] == "terminated", "repeated: the same answer"


@pytest.fixture
def watched(server: Server) -> Iterator[Watched]:
    made = Watched(server)
    yield made
    made.nothing_is_left()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls that begin together."""
    barrier = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls))


def test_created_and_deleted_twice_at_once(watched: Watched) -> None:
    def one(number: int) -> None:
        sandbox = watched.create()
        answers = at_once(lambda: watched.delete(sandbox), lambda: watched.delete(sandbox, wait=number % 2))
        assert 200 in {answer.status for answer in answers}
        assert watched.delete(sandbox).status == 200

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(rounds(watched.server.box, ROUNDS))))


def test_deleted_while_it_is_being_made(watched: Watched) -> None:
    """The id is known from the list before the call that creates is answered."""
    over = threading.Event()
    deleted: set[str] = set()
    early: list[str] = []

    def hunt() -> None:
        while not over.is_set():
            for item in watched.call("GET", "/v1/sandboxes", limit=1000).document["items"]:
                if item["id"] not in deleted and item["state"] not in OVER:
                    deleted.add(item["id"])
                    watched.sandboxes.add(item["id"])
                    early.extend([item["id"]] if item["state"] != "leased" else [])
                    at_once(lambda: watched.delete(item["id"], wait=0), lambda: watched.delete(item["id"], wait=0))

    hunter = threading.Thread(target=hunt)
    hunter.start()

    def one(number: int) -> tuple[int, str | None]:
        files = [{"path": f"f{n}", "content": "x" * 1000} for n in range(number % 3 * 20)]
        answer = watched.call("POST", "/v1/sandboxes", document={"runtime": watched.server.box.runtime, "files": files})
        if answer.status == 201:
            watched.know(answer.document["id"])
        else:
            assert answer.code == "sandbox_deleted", str(answer)
        return answer.status, answer.code

    try:
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(one, range(24)))
        eventually(lambda: deleted >= watched.sandboxes, 30, "all of them are deleted")
    finally:
        over.set()
        hunter.join()
    assert len(made) == 24 and early, "none was caught while it was being made"


def test_whoever_waits_for_a_running_exec_is_told_that_the_sandbox_was_deleted(watched: Watched, marker: str) -> None:
    server, sandbox = watched.server, watched.create()
    watched.call("PUT", f"/v1/sandboxes/{sandbox}/files", body=bytes(20 << 20), path="big")
    exec_id = server.start(sandbox, "python3", "-c", STUBBORN, marker, stdin_open=True)
    first = server.events(f"/v1/execs/{exec_id}/stream")
    assert [next(first).kind, next(first).kind] == ["started", "stdout"]
    eventually(lambda: len(marked(marker)) >= 2, 30, "it runs on the host")
    files = f"/v1/sandboxes/{sandbox}/files"
    watch = server.events(f"{files}/watch?path=/workspace")
    assert next(watch).kind == "started"

    def transfer() -> str:
        """A download that is read slowly: either whole, or broken off, never short and well."""
        connection = server.connection()
        try:
            connection.request("GET", f"{files}?path=big", headers={"Authorization": f"Bearer {server.key}"})
            answer = connection.getresponse()
            if answer.status != 200:
                return str(answer.status)
            time.sleep(1)
            return "whole" if len(answer.read()) == 20 << 20 else "short"
        except (OSError, http.client.HTTPException):
            return "broken"
        finally:
            connection.close()

    def upload() -> Answer | None:
        def blocks() -> Iterator[bytes]:
            for _ in range(200):
                yield bytes(1000)
                time.sleep(0.02)

        try:
            return watched.call("PUT", files, body=blocks(), path="up")
        except OSError:
            return None  # refused in the middle, and not read on

    def feed() -> Answer:
        while True:
            answer = watched.call("POST", f"/v1/execs/{exec_id}/stdin", body=b"x" * 1000)
            if answer.status >= 400:
                return answer
            time.sleep(0.01)

    def execs(argv: list[str]) -> Answer:
        return watched.call("POST", f"/v1/sandboxes/{sandbox}/execs", document={"argv": argv, "wait": 100})

    with ThreadPoolExecutor(12) as pool:
        waiting: list[Future[Answer]] = [
            pool.submit(execs, ["sleep", "100"]),
            pool.submit(execs, ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]),
            pool.submit(watched.call, "GET", f"/v1/execs/{exec_id}", wait=100),
        ]
        logs = pool.submit(watched.call, "GET", f"/v1/execs/{exec_id}/logs", follow=True)
        following = pool.submit(lambda: list(first))
        watching = pool.submit(lambda: [event for event in watch if event.kind in ("ended", "error")])
        others = [pool.submit(call) for call in (upload, feed)]
        slow = pool.submit(transfer)
        eventually(
            lambda: (
                len(
                    [
                        item
                        for item in watched.call("GET", f"/v1/sandboxes/{sandbox}/execs").document["items"]
                        if item["state"] == "running"
                    ]
                )
                == 3
            ),
            30,
            "all three run",
        )
        time.sleep(0.3)
        assert {answer.status for answer in at_once(*[lambda: watched.delete(sandbox)] * 3)} == {200}
        assert marked(marker) == [], "nothing runs after the delete was answered"
        for call in waiting:
            result = call.result().document["result"]
            assert result["reason"] == "sandbox_deleted" and result["hint"], result
            assert result["started"] is True and result["exit_code"] != 0
        assert following.result()[-1].data["result"]["reason"] == "sandbox_deleted"
        assert [event.data["reason"] for event in watching.result()] == ["sandbox_deleted"]
        assert logs.result().body == b"running\n"
        assert slow.result() in ("whole", "broken", "410")
        for other in others:
            answer = other.result()
            assert answer is None or answer.code in ("sandbox_deleted", "conflict"), str(answer)
    assert server.result(exec_id)["reason"] == "sandbox_deleted", "and it stays so"


def test_a_delete_at_any_moment_of_an_exec_leaves_one_true_result(watched: Watched, marker: str) -> None:
    dice = random.Random(11)

    def one(number: int) -> None:
        sandbox = watched.create()
        delay = dice.uniform(0, 0.1)
        argv = ["sh", "-c", "sleep 0.05; echo done; exit 3", marker] if number % 2 else ["sleep", "100"]

        def run() -> Answer:
            return watched.call("POST", f"/v1/sandboxes/{sandbox}/execs", document={"argv": argv, "wait": 100})

        def end() -> Answer:
            time.sleep(delay)
            return watched.delete(sandbox, wait=0 if number % 3 else 60)

        ran, _ = at_once(run, end)
        if ran.status == 410:
            assert ran.code == "sandbox_deleted"
            return
        assert ran.status == 200, str(ran)
        result = ran.document["result"]
        if number % 2 and result["reason"] == "nonzero_exit":
            assert (result["exit_code"], result["stdout"]["text"]) == (3, "done\n")
        else:
            assert result["reason"] == "sandbox_deleted", result

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(rounds(watched.server.box, 30))))
    assert marked(marker) == []


def test_the_sandbox_of_a_run_can_be_deleted_under_it(watched: Watched, marker: str) -> None:
    document = {"runtime": watched.server.box.runtime, "command": ["python3", "-c", STUBBORN, marker]}
    started = watched.call("POST", "/v1/runs", document=document, wait=0)
    run = f"/v1/runs/{started.document['id']}"
    eventually(lambda: marked(marker), 60, "it runs on the host")
    sandbox = str(watched.call("GET", run).document["sandbox_id"])
    watched.know(sandbox)
    assert watched.delete(sandbox).status == 200
    done = watched.call("GET", run, wait=60).document
    assert (done["state"], done["result"]["reason"]) == ("finished", "sandbox_deleted")
    assert marked(marker) == []


def test_a_delete_meets_the_end_of_the_time_to_live(watched: Watched, marker: str) -> None:
    def one(number: int) -> None:
        sandbox = watched.create(ttl=5)
        exec_id = watched.server.start(sandbox, "sleep", "100")  # which renews the lease, not the time to live
        expires = watched.call("GET", f"/v1/sandboxes/{sandbox}").document["expires_at"]
        end = datetime.fromisoformat(expires.replace("Z", "+00:00")).timestamp()
        time.sleep(max(0, end - time.time() - 0.2 + number * 0.05))
        at_once(lambda: watched.delete(sandbox), lambda: watched.delete(sandbox))
        assert watched.server.result(exec_id)["reason"] == "sandbox_deleted"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))


def test_what_is_not_there_cannot_be_deleted(watched: Watched) -> None:
    for name in (
        "sbx_01aaaaaaaaaaaaaaaaaaaaaaaa",
        "sbx_",
        "exe_01aaaaaaaaaaaaaaaaaaaaaaaa",
        "x",
        "..",
        str(Path("a") / "b"),
    ):
        answer = watched.call("DELETE", f"/v1/sandboxes/{name}")
        assert (answer.status, answer.code) == (404, "not_found"), (name, str(answer))


PAUSED = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
while True:
    open("/workspace/beat", "a").write("x")
    time.sleep(0.005)
"""


def test_a_delete_wins_against_pause_and_resume_at_any_moment(watched: Watched, marker: str) -> None:
    """Pause, a resume that nobody waits for, a delete within a tenth of a second: whoever wins the others is told the truth."""
    dice = random.Random(28)
    moments = [dice.uniform(0, 0.1) for _ in range(PAUSES)]

    def one(number: int) -> None:
        sandbox = watched.create()
        exec_id = watched.server.start(sandbox, "python3", "-c", PAUSED, marker)
        turn = f"/v1/sandboxes/{sandbox}"
        if number % 3:
            paused = watched.call("POST", f"{turn}/pause")
            assert (paused.status, paused.document["state"]) == (200, "paused"), str(paused)

        def resume() -> Answer:
            return watched.call("POST", f"{turn}/{'resume' if number % 3 else 'pause'}")

        def delete() -> Answer:
            time.sleep(moments[number])
            return watched.delete(sandbox, wait=0 if number % 2 else 60)

        resumed, _ = at_once(resume, delete)
        if resumed.status == 200:
            assert resumed.document["state"] in ("running", "leased", "paused"), str(resumed)
        else:
            assert (resumed.status, resumed.code) == (410, "sandbox_deleted"), str(resumed)
        assert watched.server.result(exec_id)["reason"] == "sandbox_deleted"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(rounds(watched.server.box, PAUSES))))
    eventually(lambda: marked(marker) == [], 10, "nothing runs")


def test_of_many_who_pause_resume_and_delete_at_once_the_delete_wins(watched: Watched, marker: str) -> None:
    for number in range(min(5, rounds(watched.server.box, 50))):
        sandbox = watched.create()
        watched.server.start(sandbox, "python3", "-c", PAUSED, marker)

        def turn(word: str, at: str = sandbox) -> Answer:
            return watched.call("POST", f"/v1/sandboxes/{at}/{word}")

        turns = [lambda word=word: turn(word) for word in ("pause", "resume", "pause", "resume")]
        calls = [*turns, lambda at=sandbox: watched.delete(at)] if number % 2 else [*turns, *turns]
        for answer in at_once(*calls):
            assert answer.status in (200, 409, 410), str(answer)
        assert watched.delete(sandbox).status == 200
    eventually(lambda: marked(marker) == [], 10, "nothing runs")


def test_a_paused_sandbox_is_deleted_as_fast_as_any_other(watched: Watched, marker: str) -> None:
    sandbox = watched.create()
    exec_id = watched.server.start(sandbox, "python3", "-c", STUBBORN, marker)
    eventually(lambda: len(marked(marker)) >= 2, 30, "it runs on the host")
    assert watched.call("POST", f"/v1/sandboxes/{sandbox}/pause").document["state"] == "paused"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(watched.call, "GET", f"/v1/execs/{exec_id}", wait=100)
        assert watched.delete(sandbox).document["state"] == "terminated"
        assert marked(marker) == [], "nothing of it runs, frozen or not"
        assert waiting.result().document["result"]["reason"] == "sandbox_deleted"
