"""K16: a lease that is lost is lost: for its holder, whatever stopped it or moved its clock, at the service, the node and the guest."""

from __future__ import annotations

import asyncio
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from corral.adapters.nodes.remote import RemoteNode
from corral.channel.client import GuestClient
from corral.client import Corral, CorralError
from corral.domain.fence import Fence
from corral.errors import CorralError as Refused
from corral.linux import sockets
from corral.ports.node import ExecSpec
from postgres_server import PostgresServer
from redis_server import RedisServer
from replica_server import Replicas, until

from .conftest import eventually
from .serving import Answer, Server

TTL_S = 2.0
ROUNDS, AT_ONCE = 200, 20
HOLDER = r"""
import http.client, json, os, select, sys
from corral.client import Corral, CorralError

url, key, sandbox, ttl = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
say = lambda *told: print(json.dumps(told), flush=True)


def raw(method, path, body=None, more={}):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    headers = {"Authorization": "Bearer " + key, "Corral-Lease": lease.fence, **more}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    told = json.loads(answer.read() or b"{}")
    connection.close()
    return [answer.status, told.get("code")]


def code(call):
    try:
        return [None, repr(call())[:100]]
    except CorralError as error:
        return [error.code, error.hint]


with Corral(url, key) as c:
    box = c.sandboxes.get(sandbox)
    lease = box.lease("a/1", ttl).acquire()
    box.files.write("mine", b"of A")
    long = box.start(["sleep", "300"])
    open_ = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    open_.putrequest("PUT", f"/v1/sandboxes/{sandbox}/files?path=shared")
    for name, value in (("Authorization", "Bearer " + key), ("Corral-Lease", lease.fence), ("Transfer-Encoding", "chunked")):
        open_.putheader(name, value)
    open_.endheaders()
    open_.send(b"5\r\nhalf \r\n")
    say("held", lease.fence, long.id)
    sys.stdin.readline()
    at = f"/v1/sandboxes/{sandbox}"
    j = {"Content-Type": "application/json"}
    told = {
        "exec": raw("POST", at + "/execs", json.dumps({"argv": ["sh", "-c", "echo A > shared"]}), j),
        "write": raw("PUT", at + "/files?path=shared", b"of A"),
        "move": raw("POST", at + "/files/move", json.dumps({"from": "shared", "to": "gone"}), j),
        "mkdir": raw("POST", at + "/files/mkdir", json.dumps({"path": "dir"}), j),
        "remove": raw("DELETE", at + "/files?path=shared"),
        "archive": raw("PUT", at + "/files/archive?path=/workspace", b"\0" * 1024),
        "delete": raw("DELETE", at),
        "signal": raw("POST", f"/v1/execs/{long.id}/signal", json.dumps({"signal": "KILL"}), j),
        "renew": raw("POST", at + "/renew", json.dumps({"owner": "a/1"}), j),
        "release": raw("POST", at + "/release", json.dumps({"owner": "a/1"}), j),
    }
    try:
        open_.send(b"4\r\nof A\r\n0\r\n\r\n")
        answer = open_.getresponse()
        told["upload"] = [answer.status, json.loads(answer.read()).get("code")]
    except OSError as error:
        told["upload"] = [0, str(error)]
    say("raw", told)
    say("sdk", {
        "lost": [lease.lost, None],
        "exec": code(lambda: box.exec(["sh", "-c", "echo A > shared"])),
        "write": code(lambda: box.files.write("shared", b"of A")),
        "delete": code(lambda: box.files.delete("shared")),
        "end": code(box.delete),
        "renew": code(lease.renew),
        "after": [lease.lost, None],
        "released": [lease.release(), None],
    })
"""


class Holder:
    """A: a process of its own that holds a lease by the SDK, does what it is told, and can be stopped."""

    def __init__(self, url: str, key: str, sandbox: str, **environment: str) -> None:
        words = [sys.executable, "-c", HOLDER, url, key, sandbox, str(TTL_S)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}, text=True
        )
        _, self.fence, self.exec_id = self.told()

    def told(self) -> list[Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the holder has ended: {self.process.wait()}"
        return list(json.loads(line))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """It continues with all that it would do; -> (what plain calls were answered, what the SDK said)."""
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.told()[1], self.told()[1]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    made: list[Holder] = []
    yield made
    for one in made:
        one.end()


def attach(server: Server, sandbox: str, owner: str, **more: Any) -> Answer:
    document = {"owner": owner, "ttl_s": TTL_S, **more}
    return server.call("POST", f"/v1/sandboxes/{sandbox}/attach", document=document)


def under(lease: str) -> dict[str, str]:
    return {"Corral-Lease": lease}


def held(answer: Answer) -> str:
    assert answer.status == 200, str(answer)
    return str(answer.document["lease"])


def tokens(server: Server, sandbox: str) -> list[Fence]:
    history = server.call("GET", f"/v1/sandboxes/{sandbox}").document["history"]
    return [Fence.parse(e["metadata"]["lease"]) for e in history if "lease" in e["metadata"]]


def check_lost(raw: dict[str, Any], sdk: dict[str, Any]) -> None:
    """Typed `lease_lost` for all that A does."""
    assert {name: told for name, told in raw.items() if told != [409, "lease_lost"]} == {}
    assert sdk["after"] == [True, None] and sdk["released"] == [False, None]
    for name in ("exec", "write", "delete", "end", "renew"):
        assert sdk[name][0] == "lease_lost" and sdk[name][1], (name, sdk[name])


def test_a_renewal_after_the_time_is_lost(server: Server) -> None:
    sandbox = server.create()
    lease = held(attach(server, sandbox, "a/1"))
    time.sleep(3)
    answer = server.call("POST", f"/v1/sandboxes/{sandbox}/renew", document={"owner": "a/1"}, headers=under(lease))
    assert (answer.status, answer.code) == (409, "lease_lost") and answer.document["hint"]
    server.delete(sandbox)


def take_over(server: Server, holder: Holder, sandbox: str) -> tuple[str, str]:
    """A is stopped, B gets the sandbox and works: -> (B's fence, an exec of B that runs)."""
    holder.stop()
    lease = held(attach(server, sandbox, "b/1", contention="wait", wait_s=60, ttl_s=60))
    assert Fence.parse(lease) > Fence.parse(holder.fence)
    wrote = server.call(
        "PUT", f"/v1/sandboxes/{sandbox}/files", "of B: 未动".encode(), headers=under(lease), path="shared"
    )
    assert wrote.status == 201, str(wrote)
    started = server.call(
        "POST",
        f"/v1/sandboxes/{sandbox}/execs",
        document={"argv": ["sh", "-c", "i=0; while :; do i=$((i+1)); echo $i > beat; sleep 0.1; done"], "wait": 0},
        headers=under(lease),
    )
    assert started.status == 202, str(started)
    return lease, str(started.document["id"])


def of_b_is_untouched(server: Server, sandbox: str, lease: str, exec_id: str) -> None:
    read = server.call("GET", f"/v1/sandboxes/{sandbox}/files", path="shared")
    assert read.body.decode() == "of B: 未动"
    names = {
        e["name"]
        for e in server.call("GET", f"/v1/sandboxes/{sandbox}/files/list", path="/workspace").document["items"]
    }
    assert {"shared", "mine", "beat"} <= names and not names & {"gone", "dir"}
    assert server.call("GET", f"/v1/execs/{exec_id}").document["state"] == "running"
    before = server.call("GET", f"/v1/sandboxes/{sandbox}/files", path="beat").body
    eventually(lambda: server.call("GET", f"/v1/sandboxes/{sandbox}/files", path="beat").body != before, what="a beat")
    renewed = server.call("POST", f"/v1/sandboxes/{sandbox}/renew", document={"owner": "b/1"}, headers=under(lease))
    assert renewed.status == 200 and renewed.document["lease"] == lease


def old_fences_are_refused_by_the_guest(server: Server, sandbox: str, old: Fence) -> None:
    instance = server.call("GET", f"/v1/sandboxes/{sandbox}").document["instance"]["id"]
    place = server.box.state / "i" / instance.removeprefix("ins_")
    if server.box.own_kernel:  # the guest speaks to the node alone: nobody else on the host can ask it
        with pytest.raises(ConnectionRefusedError):
            sockets.connect(str(place), "s", timeout_s=10.0)
        return

    async def ask() -> None:
        client = await GuestClient.connect(sockets.connect(str(place), "s", timeout_s=10.0))
        spec = {
            "exec_id": "exe_00000000000000000000000000",
            "argv": ["/bin/sh", "-c", "echo A > shared"],
            "env": {},
            "cwd": "/workspace",
            "uid": 1000,
            "gid": 1000,
            "stdin": "eof",
            "timeout_s": 5,
            "background": "kill",
        }
        try:
            for call in (
                client.start_exec(spec, fence=old),
                client.kill_all(fence=old),
                client.fence(old, "kill"),
                client.extend_deadline(1.0, fence=old),
                client.shutdown(fence=old),
            ):
                with pytest.raises(Refused) as caught:
                    await call
                assert caught.value.code == "lease_lost"
        finally:
            await client.close()

    asyncio.run(ask())


def test_what_a_stopped_holder_does_afterwards_is_refused_and_the_next_ones_data_is_untouched(
    server: Server, holders: list[Holder]
) -> None:
    sandbox = server.create()
    url = f"http://127.0.0.1:{server.port}"
    holders.append(holder := Holder(url, server.key, sandbox))
    lease, exec_id = take_over(server, holder, sandbox)
    check_lost(*holder.go_on())
    assert server.result(holder.exec_id)["reason"] == "lease_lost"
    of_b_is_untouched(server, sandbox, lease, exec_id)
    old_fences_are_refused_by_the_guest(server, sandbox, Fence.parse(holder.fence))
    of_b_is_untouched(server, sandbox, lease, exec_id)
    seen = tokens(server, sandbox)
    assert seen == sorted(set(seen)), "strictly rising"
    server.delete(sandbox)


@pytest.mark.skipif(shutil.which("faketime") is None, reason="needs libfaketime")
@pytest.mark.parametrize("shift", ["-3600s", "+3600s"])
def test_a_shifted_clock_of_the_holder_keeps_nothing(
    server: Server, holders: list[Holder], tmp_path: Path, shift: str
) -> None:
    # All clocks of the process, in the middle of its lease: set back, its SDK believes that there is an hour left.
    moved = tmp_path / "clock"
    moved.write_text("+0")
    [library, *_] = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    faked = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(moved), "FAKETIME_NO_CACHE": "1"}
    sandbox = server.create()
    holders.append(holder := Holder(f"http://127.0.0.1:{server.port}", server.key, sandbox, **faked))
    lease, exec_id = take_over(server, holder, sandbox)
    moved.write_text(shift)
    check_lost(*holder.go_on())
    of_b_is_untouched(server, sandbox, lease, exec_id)
    server.delete(sandbox)


def test_at_the_very_expiry_a_lease_is_either_renewed_or_lost_and_both_sides_agree(server: Server) -> None:
    sandboxes = [server.create() for _ in range(AT_ONCE)]
    outcomes: list[str] = []
    guard = threading.Lock()

    def compete(sandbox: str, number: int) -> None:
        path, holder, other = f"/v1/sandboxes/{sandbox}", "a/1", "b/1"
        for round_ in range(ROUNDS // AT_ONCE):
            # Whoever had it last takes it once more, so that what runs on is short and its fence a new one.
            first = attach(server, sandbox, holder, ttl_s=1, contention="wait", wait_s=60)
            lease, before = held(first), first.document["expires_at"]
            ends = datetime.fromisoformat(before).timestamp()
            early_s = 0.005 * ((number + round_) % 6)  # the call itself takes some milliseconds
            answers: dict[str, Answer] = {}

            def renew(lease: str = lease, owner: str = holder) -> None:
                answers["renew"] = server.call("POST", f"{path}/renew", document={"owner": owner}, headers=under(lease))

            def take(owner: str = other) -> None:
                answers["take"] = attach(server, sandbox, owner, ttl_s=30, contention="fail")

            # Sleeping is no luck here: whatever the moment, the outcome has to be one of two.
            time.sleep(max(0.0, ends - early_s - time.time()))
            both = [threading.Thread(target=call) for call in (renew, take)]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join()
            renewed, taken = answers["renew"], answers["take"]
            assert renewed.status == 200 or renewed.code == "lease_lost", str(renewed)
            assert taken.status == 200 or taken.code == "lease_held", str(taken)
            assert not (renewed.status == 200 and taken.status == 200), f"two owners: {renewed} {taken}"
            if renewed.status == 200:
                assert renewed.document["expires_at"] > before and renewed.document["lease"] == lease
            else:
                again = server.call("POST", f"{path}/renew", document={}, headers=under(lease))
                assert again.code == "lease_lost", str(again)
            if taken.status == 200:
                now = server.call("GET", path).document["lease"]
                assert (now["owner"], now["lease"]) == (other, held(taken))
                assert Fence.parse(held(taken)) > Fence.parse(lease)
                holder, other = other, holder
            with guard:
                outcomes.append("renewed" if renewed.status == 200 else "lost")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(compete, sandbox, number) for number, sandbox in enumerate(sandboxes)]:
            done.result()
    assert len(outcomes) == ROUNDS and set(outcomes) == {"renewed", "lost"}, outcomes
    for sandbox in sandboxes:
        seen = tokens(server, sandbox)
        assert seen == sorted(set(seen)), "strictly rising"
        server.delete(sandbox)


# -- two replicas on PostgreSQL and Redis ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[Replicas, RedisServer]]:
    place = Path(tempfile.mkdtemp(prefix="corral-k16-", dir="/tmp"))
    place.chmod(0o711)
    redis = RedisServer()
    with PostgresServer() as postgres:
        redis.start()
        server = Replicas(place, postgres.fresh_database(), redis.url).start().ready()
        try:
            yield server, redis
            server.clear()
        finally:
            status = server.stop()
            redis.close()
    told = (place / "stderr").read_text()
    assert status == 0 and "Traceback" not in told, told
    shutil.rmtree(place, ignore_errors=True)


def test_a_redis_that_loses_everything_gives_no_lease_away(replicas: tuple[Replicas, RedisServer]) -> None:
    server, redis = replicas
    with server.client() as c, server.client() as other:
        box = c.sandboxes.create()
        again = other.sandboxes.get(box.id)
        fences = []
        with box.lease("a/1", 3) as lease:
            fences.append(Fence.parse(lease.fence))
            for lose in (redis.flush, redis.restart, redis.flush):
                lose()
                with pytest.raises(CorralError, match="lease_held"):
                    again.lease("b/1", 3).acquire()
                with pytest.raises(CorralError, match="lease_held"):
                    again.exec(["true"])
                assert box.exec(shell="echo A >> log").reason == "ok" and not lease.lost
                assert not lease.wait_lost(1.5)
            redis.kill()
            assert not lease.wait_lost(4), "longer than the lease: it lives by the store alone"
            assert box.exec(shell="echo A >> log").reason == "ok"
        with again.lease("b/1", 30, contention="wait", wait_s=60) as taken:
            fences.append(Fence.parse(taken.fence))
            redis.start()
            stale = {"Corral-Lease": str(fences[0])}
            for method, path in (("POST", "renew"), ("POST", "release"), ("POST", "execs"), ("DELETE", "")):
                with pytest.raises(CorralError, match="lease_lost"):
                    body = {"argv": ["rm", "log"]} if path == "execs" else {} if method == "POST" else None
                    _plain(c, method, f"/v1/sandboxes/{box.id}/{path}".rstrip("/"), body, stale)
            assert again.files.read("log") == b"A\n" * 4
        assert fences[1] > fences[0]
        history = c.request("GET", f"/v1/sandboxes/{box.id}")["history"]
        seen = [Fence.parse(e["metadata"]["lease"]) for e in history if "lease" in e["metadata"]]
        assert seen == sorted(set(seen)), "strictly rising"
        box.delete()


def test_leases_outlive_a_rolling_restart_of_the_replicas(replicas: tuple[Replicas, RedisServer]) -> None:
    server, _ = replicas
    with server.client() as c:
        box = c.sandboxes.create()
        with box.lease("a/1", 4) as lease:
            server.restart_all()
            assert not lease.wait_lost(5) and not lease.lost
            assert box.exec(shell=":").reason == "ok"
        box.delete()


def test_old_fences_are_refused_by_the_nodes_own_socket(replicas: tuple[Replicas, RedisServer]) -> None:
    server, _ = replicas
    with server.client() as c:
        box = c.sandboxes.create()
        box.files.write("shared", "of B")
        lease = box.lease("a/1", 30).acquire()
        old = Fence.parse(lease.fence)
        lease.release()
        new = box.lease("b/1", 30, contention="wait").acquire()
        until(lambda: Fence.parse(new.fence) > old)
        instance = c.request("GET", f"/v1/sandboxes/{box.id}")["instance"]["id"]

        async def ask() -> None:
            node = RemoteNode(str(server.state / "node.sock"))
            await node.open()

            async def blocks() -> Any:
                yield b"of A"

            spec = ExecSpec("exe_00000000000000000000000001", ("sh", "-c", "echo A > shared"))
            try:
                for call in (
                    lambda: node.fence(instance, old, "kill"),
                    lambda: node.fence(instance, old, "adopt"),
                    lambda: node.start_exec(instance, old, spec),
                    lambda: node.put_files(instance, old, [("shared", 0o644, b"of A")]),
                    lambda: node.write_file(instance, old, "/workspace/shared", blocks()),
                    lambda: node.move_file(instance, old, "/workspace/shared", "/workspace/x", overwrite=True),
                    lambda: node.remove_file(instance, old, "/workspace/shared", recursive=True),
                    lambda: node.make_directory(instance, old, "/workspace/d", parents=True, mode=0o755),
                    lambda: node.put_tar(instance, old, blocks(), "/workspace"),
                    lambda: node.extend_deadline(instance, old, 1.0),
                ):
                    with pytest.raises(Refused) as caught:
                        await call()
                    assert caught.value.code == "lease_lost"
                floors = {one: floor for one, _, floor in await node.floors()}
                assert str(floors[instance]) == new.fence
            finally:
                await node.close()

        asyncio.run(ask())
        assert box.files.read("shared") == b"of B"
        new.release()
        box.delete()


def _plain(c: Corral, method: str, path: str, body: Any, headers: dict[str, str]) -> None:
    from corral.client.effects import drive

    drive(c._calls.line.request(method, path, body, None, headers))


def test_the_history_names_who_had_it_and_who_lost_it(server: Server) -> None:
    sandbox = server.create()
    held(attach(server, sandbox, "会话/1"))
    eventually(lambda: server.call("GET", f"/v1/sandboxes/{sandbox}").document["state"] == "idle", what="settled")
    told = server.box("sandbox", "inspect", sandbox)
    assert told.returncode == 0 and re.search("会话/1", told.stdout.decode()), told
    server.delete(sandbox)
