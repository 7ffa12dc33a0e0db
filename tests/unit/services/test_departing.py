"""A replica that leaves sends whoever waits there to another one at once, and nobody notices more than that."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from corral.api.asgi import Application
from corral.api.front import Front
from corral.api.server import make_server
from corral.cli.replica import Replica
from corral.client.aio import Loop
from corral.client.calls import Calls
from corral.client.http import Urls, unix_single
from corral.client.line import Line
from corral.domain.facts import ExecFacts
from corral.errors import CorralError

from .cluster import Cluster
from .conftest import World

FOREVER_S = 3600.0
"""The limit of a drain that nothing may wait for."""


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:  # short enough for a socket
        yield Path(path)


class Pair:
    """Two replicas behind one listening socket, `a` alone at first, and a client of it."""

    def __init__(self, cluster: Cluster, place: Path) -> None:
        self.cluster = cluster
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place / "api.sock"))
        self._listener.listen(100)
        self._listener.setblocking(False)
        effects = Loop()
        self.line = Line(Urls([unix_single(effects, str(place))], effects, "the pair"), effects)
        self.calls = Calls(self.line)
        self.replicas: dict[str, Replica] = {}

    async def serve(self, name: str) -> World:
        world = await self.cluster.start(name)
        assert world.services is not None
        front = Front()
        front.application = Application(world.services)
        server = make_server(front, None, shared=True)
        replica = Replica.__new__(Replica)
        replica._loop = asyncio.get_running_loop()
        replica._services = world.services
        replica._front_of = {"api": front}
        replica._servers = [(server, asyncio.create_task(server.serve(sockets=[self._listener.dup()])))]
        while not server.started:
            await asyncio.sleep(0.005)
        self.replicas[name] = replica
        return world

    async def drain(self, name: str) -> None:
        async with asyncio.timeout(60):
            await self.replicas[name]._drain(FOREVER_S)

    async def close(self) -> None:
        await self.line.close()
        for replica in self.replicas.values():
            for server, task in replica._servers:
                server.should_exit = server.force_exit = True
                await task
        self._listener.close()
        await self.cluster.stop()


@asynccontextmanager
async def pair_at(tmp_path: Path, place: Path) -> AsyncIterator[Pair]:
    made = Pair(Cluster(tmp_path), place)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def pair(tmp_path: Path, place: Path) -> AsyncIterator[Pair]:
    async with pair_at(tmp_path, place) as made:
        await made.serve("a")
        yield made


async def begun(pair: Pair) -> tuple[str, Any]:
    """A run whose program does what the test says."""
    run = await pair.calls.start("/v1/runs", "/v1/runs", {"command": ["hold"], "timeout_s": 300})
    async with asyncio.timeout(20):
        while not pair.cluster.node.execs:
            await asyncio.sleep(0.01)
    return str(run["id"]), next(iter(pair.cluster.node.execs.values()))


async def test_a_stream_goes_on_at_the_other_replica_with_every_event_once(pair: Pair) -> None:
    ident, program = await begun(pair)
    got = bytearray()
    kinds: list[str] = []
    reached = asyncio.Event()

    async def follow() -> None:
        async for event in pair.line.stream(f"/v1/runs/{ident}/stream"):
            kinds.append(event.kind)
            if event.kind == "stdout":
                assert event.offset == len(got), "a hole, or something twice"
                got.extend(event.data)
                reached.set()

    follower = asyncio.create_task(follow())
    program.emit(b"one \xe4\xbd")  # half of a code point stays behind
    await reached.wait()
    await pair.serve("b")
    await pair.drain("a")
    assert not follower.done()
    program.emit(b"\xa0 two ")
    program.emit(b"three")
    program.end(ExecFacts(True, exit_code=0))
    await asyncio.wait_for(follower, 60)
    assert bytes(got) == "one 你 two three".encode()
    assert (kinds[0], kinds[-1], kinds.count("started"), kinds.count("ended")) == ("started", "ended", 1, 1)


async def test_a_stream_that_is_never_silent_goes_on_at_the_other_replica_too(pair: Pair) -> None:
    ident, program = await begun(pair)
    numbers: list[bytes] = []
    flowing = asyncio.Event()

    async def flood() -> None:
        for number in range(100_000):
            program.emit(b"%d\n" % number)
            await asyncio.sleep(0)
            if program.facts is not None:
                return

    async def follow() -> None:
        async for event in pair.line.stream(f"/v1/runs/{ident}/stream"):
            if event.kind == "stdout":
                numbers.append(event.data)
                flowing.set()

    flooding, follower = asyncio.create_task(flood()), asyncio.create_task(follow())
    await flowing.wait()
    await pair.serve("b")
    await pair.drain("a")
    before = len(numbers)
    assert not flooding.done(), "it was never silent"
    async with asyncio.timeout(60):
        while len(numbers) <= before:
            await asyncio.sleep(0.01)
    program.end(ExecFacts(True, exit_code=0))
    await asyncio.wait_for(follower, 60)
    await flooding
    lines = b"".join(numbers).split()
    assert lines == [b"%d" % number for number in range(len(lines))]


async def test_whoever_waits_for_a_result_has_it_from_the_other_replica(pair: Pair) -> None:
    made = asyncio.create_task(pair.calls.to_its_end("/v1/runs", "/v1/runs", {"command": ["hold"]}, None))
    async with asyncio.timeout(20):
        while not pair.cluster.node.execs:
            await asyncio.sleep(0.01)
    program = next(iter(pair.cluster.node.execs.values()))
    (run,) = (await pair.line.request("GET", "/v1/runs"))["items"]
    again = asyncio.create_task(pair.calls.wait(f"/v1/runs/{run['id']}", 300.0))
    await asyncio.sleep(0.1)
    await pair.serve("b")
    await pair.drain("a")
    assert not made.done() and not again.done()
    program.emit("你好".encode())
    program.end(ExecFacts(True, exit_code=3))
    for answer in (await asyncio.wait_for(made, 60), await asyncio.wait_for(again, 60)):
        assert (answer["result"]["exit_code"], answer["result"]["stdout"]["text"]) == (3, "你好")
    assert len(pair.cluster.node.starts) == 1


async def test_a_plain_client_is_answered_with_the_present_state(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    world = await cluster.start("a")
    assert world.services is not None
    waiting = asyncio.create_task(world.call("POST", "/v1/runs", {"command": ["hold"]}, wait=300))
    async with asyncio.timeout(20):
        while not cluster.node.execs:
            await asyncio.sleep(0.01)
    (run,) = ((await world.call("GET", "/v1/runs")).document or {})["items"]
    sandbox = ((await world.call("POST", "/v1/sandboxes", {})).document or {})["id"]
    second = asyncio.create_task(world.call("POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["hold"]}, wait=300))
    async with asyncio.timeout(20):
        while len(cluster.node.execs) < 2 and not second.done():
            await asyncio.sleep(0.01)
    leased = ((await world.call("POST", "/v1/sandboxes", {})).document or {})["id"]
    attach = f"/v1/sandboxes/{leased}/attach"
    assert (await world.call("POST", attach, {"owner": "first"})).status == 200
    wish = {"owner": "other", "contention": "wait", "wait_s": 300}
    held = asyncio.create_task(world.call("POST", attach, wish))
    stream = (await world.call("GET", f"/v1/runs/{run['id']}/stream")).events
    assert stream is not None
    await asyncio.sleep(0.1)
    assert [call.result() for call in (waiting, second, held) if call.done()] == []
    world.services.core.leave()
    async with asyncio.timeout(20):
        answer = await waiting
        assert (answer.status, answer.headers["Location"]) == (202, f"/v1/runs/{run['id']}")
        assert answer.document is not None and (answer.document["state"], answer.document["result"]) == (
            "running",
            None,
        )
        answer = await second
        assert (answer.status, (answer.document or {})["result"]) == (202, None)
        answer = await held
        assert (answer.status, (answer.document or {})["code"]) == (503, "shutting_down")
        with pytest.raises(CorralError) as sent_on:
            [event async for event in stream]
        assert (sent_on.value.code, sent_on.value.retryable) == ("shutting_down", True)
        answer = await world.call("GET", f"/v1/runs/{run['id']}", wait=300)
        assert answer.status == 200 and (answer.document or {})["result"] is None
    for program in cluster.node.execs.values():
        program.end(ExecFacts(True, exit_code=0))
    await cluster.stop()
