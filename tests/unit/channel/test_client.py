"""`GuestClient` against a scripted peer that keeps the protocol: what it sends, how it waits, how it lets go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from corral.channel import ChannelLimits, Data, Ended, GuestClient
from corral.channel.answers import unknown_status
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.guest import protocol

FENCE = Fence(3, 4)
HELLO = {
    "versions": [1, 1],
    "version": 1,
    "guest": "0.1.0",
    "instance": "ins_x",
    "capabilities": {"pidfd": 1},
    "identified": True,
    "floor": [3, 4],
    "a field of a later version": {"x": [1, 2]},
}
QUICK = ChannelLimits(request_s=0.5, connect_s=0.5, keepalive_s=0.4)


class Peer:
    """The guest's end of a socket pair, driven by the test."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.decoder = protocol.Decoder({kind: 8 << 20 for kind in range(1, 9)})
        self.frames: list[tuple[int, bytes]] = []

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def frame(self) -> tuple[int, bytes]:
        while not self.frames:
            data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
            if not data:
                raise EOFError
            self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    async def request(self) -> dict[str, Any]:
        kind, payload = await self.frame()
        if kind == protocol.INPUT:
            request, data = protocol.split_input(payload)
            return request | {"data": data}
        assert kind == protocol.REQUEST, kind
        return protocol.loads(payload)

    async def answer(self, request: dict[str, Any], ok: dict[str, Any]) -> None:
        await self.send(protocol.control(protocol.REPLY, {"id": request["id"], "ok": ok}))

    async def hello(self, hello: dict[str, Any] | None = None) -> None:
        kind, payload = await self.frame()
        assert kind == protocol.HELLO and protocol.loads(payload)["versions"] == [1, 1]
        await self.send(protocol.control(protocol.HELLO, hello or HELLO))


Pair = Callable[..., Awaitable[tuple[GuestClient, Peer]]]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made: list[tuple[GuestClient, Peer]] = []

    async def make(limits: ChannelLimits | None = None) -> tuple[GuestClient, Peer]:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        theirs.setblocking(False)
        peer = Peer(theirs)
        client, _ = await asyncio.gather(GuestClient.connect(ours, limits=limits), peer.hello())
        made.append((client, peer))
        return client, peer

    yield make
    for client, peer in made:
        await client.close()
        peer.sock.close()


def running(exec_id: str, **more: Any) -> dict[str, Any]:
    status = dict(unknown_status(exec_id)) | {
        "state": "running",
        "started": True,
        "offsets": {"stdout": 0, "stderr": 0},
    }
    return status | more


def ended(exec_id: str, stdout: int = 0, stderr: int = 0, **more: Any) -> dict[str, Any]:
    offsets = {"stdout": stdout, "stderr": stderr}
    return running(exec_id, state="ended", exit_code=0, offsets=offsets) | more


async def attach(client: GuestClient, peer: Peer, exec_id: str = "exe_1"):
    """-> (queue of items, task, attach request)."""
    items: asyncio.Queue[Any] = asyncio.Queue()

    async def follow() -> None:
        async for item in client.attach(exec_id):
            await items.put(item)

    task = asyncio.create_task(follow())
    request = await peer.request()
    assert request["op"] == "exec.attach"
    await peer.answer(request, running(exec_id))
    return items, task, request


async def lost(client: GuestClient) -> None:
    await asyncio.wait_for(client.closed.wait(), 10)
    with pytest.raises(CorralError) as caught:
        await client.ping()
    assert caught.value.code == "guest_lost"


async def test_requests_carry_the_fence_and_answers_find_their_request(pair: Pair) -> None:
    client, peer = await pair()
    one = asyncio.create_task(client.exec_status("exe_a"))
    two = asyncio.create_task(client.kill_exec("exe_b", 1, fence=FENCE))
    first, second = await peer.request(), await peer.request()
    assert second["fence"] == [3, 4] and "fence" not in first
    await peer.answer(second, {"killed_all": False, "killed": 3})
    await peer.answer(first, {"exec_id": "exe_a", "state": "unknown", "started": False})
    assert (await one)["state"] == "unknown"
    assert await two == {"killed_all": False, "killed": 3}


async def test_a_refusal_is_an_error_with_its_code(pair: Pair) -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.start_exec({"exec_id": "exe_a", "argv": ["x"]}, fence=FENCE))
    request = await peer.request()
    error = {"code": "lease_lost", "detail": "the floor is 9.9", "field": None}
    await peer.send(protocol.control(protocol.REPLY, {"id": request["id"], "error": error}))
    with pytest.raises(CorralError) as caught:
        await task
    assert caught.value.code == "lease_lost"
    assert not client.closed.is_set()


async def test_output_comes_in_order_and_is_acknowledged_once_taken(pair: Pair) -> None:
    client, peer = await pair()
    items, task, request = await attach(client, peer)
    out, err = request["streams"]["stdout"], request["streams"]["stderr"]
    await peer.send(protocol.data_frame(out, 0, 5, b"abc") + protocol.data_frame(err, 0, 6, b"E"))
    await peer.send(protocol.data_frame(out, 3, 7, b"def"))
    await peer.send(
        protocol.control(
            protocol.EVENT, {"event": "ended", "attach": request["attach"], "status": ended("exe_1", 6, 1)}
        )
    )
    await task
    got = [items.get_nowait() for _ in range(items.qsize())]
    assert got[:-1] == [Data("stdout", 0, b"abc", 5), Data("stderr", 0, b"E", 6), Data("stdout", 3, b"def", 7)]
    assert isinstance(got[-1], Ended)
    acks = [protocol.split_ack((await peer.frame())[1]) for _ in range(2)]
    assert sorted(acks) == sorted([(out, 6), (err, 1)])


async def test_what_waits_is_handed_out_in_larger_pieces_of_one_stream_and_one_moment(pair: Pair) -> None:
    client, peer = await pair()
    stream = client.attach("exe_1")
    first = asyncio.create_task(anext(stream))
    request = await peer.request()
    await peer.answer(request, running("exe_1"))
    out, err = request["streams"]["stdout"], request["streams"]["stderr"]
    pieces = [(out, 0, 1, b"a"), (out, 1, 5, b"b" * 60_000), (out, 60_001, 9, b"c"), (out, 60_002, 12, b"d")]
    pieces += [(err, 0, 12, b"E"), (out, 60_003, 12, b"e")]
    status = protocol.control(
        protocol.EVENT, {"event": "ended", "attach": request["attach"], "status": ended("exe_1", 60_004, 1)}
    )
    await peer.send(b"".join(protocol.data_frame(*piece) for piece in pieces) + status)
    got = [await first] + [item async for item in stream]
    assert got[:-1] == [
        Data("stdout", 0, b"a" + b"b" * 60_000 + b"c", 1),
        Data("stdout", 60_002, b"d", 12),
        Data("stderr", 0, b"E", 12),
        Data("stdout", 60_003, b"e", 12),
    ]


async def test_input_fills_the_window_without_waiting_for_each_answer(pair: Pair) -> None:
    client, peer = await pair()
    size = 2 * protocol.INPUT_WINDOW
    giving = asyncio.create_task(client.stdin("exe_1", bytes(size), True, fence=FENCE))
    asked = await peer.request()
    assert asked["op"] == "exec.status"
    await peer.answer(asked, running("exe_1", stdin={"received": 0, "written": 0, "open": 1}))
    count = protocol.INPUT_WINDOW // protocol.MAX_DATA
    begun = [await peer.request() for _ in range(count)]
    assert [(one["offset"], one["eof"]) for one in begun] == [(n * protocol.MAX_DATA, False) for n in range(count)]
    for one in begun:
        await peer.answer(one, {"received": one["offset"] + len(one["data"]), "written": 0, "open": True})
    assert not giving.done()
    event = {"event": "stdin", "exec_id": "exe_1", "written": protocol.INPUT_WINDOW, "open": True}
    await peer.send(protocol.control(protocol.EVENT, event))
    rest = [await peer.request() for _ in range(count)]
    assert [one["eof"] for one in rest] == [False] * (count - 1) + [True]
    for one in rest:
        await peer.answer(one, {"received": one["offset"] + len(one["data"]), "written": 0, "open": True})
    assert await giving is True


async def test_input_that_the_program_stops_reading_ends_early_and_late_answers_are_heard(pair: Pair) -> None:
    client, peer = await pair()
    giving = asyncio.create_task(client.stdin("exe_1", bytes(3 * protocol.MAX_DATA), fence=FENCE))
    asked = await peer.request()
    await peer.answer(asked, running("exe_1", stdin={"received": 0, "written": 0, "open": 1}))
    begun = [await peer.request() for _ in range(3)]
    await peer.answer(begun[0], {"received": protocol.MAX_DATA, "written": 0, "open": False})
    assert await giving is False
    for one in begun[1:]:
        error = {"code": "bad_request", "detail": "the exec has no open standard input", "field": None}
        await peer.send(protocol.control(protocol.REPLY, {"id": one["id"], "error": error}))
    ping = asyncio.create_task(client.ping())
    await peer.answer(await peer.request(), {})
    assert await ping >= 0 and not client.closed.is_set()


async def test_a_guest_of_an_older_version_is_not_quiet_and_tells_no_clock(pair: Pair) -> None:
    client, peer = await pair()
    assert client.hello.quiet is False
    task = asyncio.create_task(client.identify("sbx_1", FENCE, now=1.0, entropy=b"e"))
    request = await peer.request()
    assert "instance" not in request and request["entropy"] == "65"
    await peer.answer(request, {"floor": [3, 4]})
    assert await task is None


async def test_a_quiet_that_is_no_truth_and_a_clock_that_is_no_number_lose_the_guest(pair: Pair) -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.identify("sbx_1", FENCE, now=1.0, entropy=b"e"))
    await peer.answer(await peer.request(), {"floor": [3, 4], "clock_ms": "late"})
    with pytest.raises(CorralError):
        await task
    await lost(client)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.setblocking(False)
    with theirs:
        results = await asyncio.gather(
            GuestClient.connect(ours), Peer(theirs).hello(HELLO | {"quiet": 1}), return_exceptions=True
        )
    assert isinstance(results[0], CorralError) and results[0].code == "guest_lost"


async def test_what_was_not_taken_is_not_acknowledged(pair: Pair) -> None:
    client, peer = await pair()
    stream = client.attach("exe_1")
    first = asyncio.create_task(anext(stream))
    request = await peer.request()
    await peer.answer(request, running("exe_1"))
    for n in range(20):
        await peer.send(protocol.data_frame(request["streams"]["stdout"], n * 65536, n * 100, bytes(65536)))
    await first
    acked = 0
    for _ in range(3):
        await anext(stream)
        kind, payload = await peer.frame()
        assert kind == protocol.ACK
        acked = protocol.split_ack(payload)[1]
    assert acked == 3 * 65536
    await stream.aclose()


async def test_a_follower_that_leaves_detaches_and_late_output_is_dropped(pair: Pair) -> None:
    client, peer = await pair()
    stream = client.attach("exe_1")
    first = asyncio.create_task(anext(stream))
    request = await peer.request()
    await peer.answer(request, running("exe_1"))
    out = request["streams"]["stdout"]
    await peer.send(protocol.data_frame(out, 0, 0, b"x"))
    await first
    await stream.aclose()
    detach = await peer.request()
    assert (detach["op"], detach["attach"]) == ("exec.detach", request["attach"])
    await peer.send(protocol.data_frame(out, 1, 0, b"late"))
    await peer.answer(detach, {})
    ping = asyncio.create_task(client.ping())
    await peer.answer(await peer.request(), {})
    await ping
    await peer.send(protocol.data_frame(out, 5, 0, b"too late"))
    await lost(client)


async def start_following(
    client: GuestClient, peer: Peer, exec_id: str = "exe_1"
) -> tuple[asyncio.Task[Any], dict[str, Any]]:
    """-> (task of the start, its request, not answered yet)."""
    task = asyncio.create_task(client.start_exec({"exec_id": exec_id, "argv": ["x"]}, fence=FENCE, follow=True))
    request = await peer.request()
    assert request["op"] == "exec.start" and set(request["streams"]) == {"stdout", "stderr"}
    return task, request


async def test_a_start_that_is_followed_needs_no_attach_and_loses_nothing_that_came_before_it(pair: Pair) -> None:
    client, peer = await pair()
    task, request = await start_following(client, peer)
    await peer.send(protocol.data_frame(request["streams"]["stdout"], 0, 1, b"early "))
    await peer.answer(request, running("exe_1") | {"attached": True})
    assert (await task)["state"] == "running"
    await peer.send(protocol.data_frame(request["streams"]["stdout"], 6, 2, b"late"))
    event = {"event": "ended", "attach": request["attach"], "status": ended("exe_1", 10)}
    await peer.send(protocol.control(protocol.EVENT, event))
    items = [item async for item in client.attach("exe_1")]
    assert b"".join(item.data for item in items[:-1]) == b"early late"
    assert isinstance(items[-1], Ended)
    kind, payload = await peer.frame()
    assert (kind, protocol.split_ack(payload)) == (protocol.ACK, (request["streams"]["stdout"], 10))


async def test_where_a_start_is_not_followed_the_attach_is_asked_for(pair: Pair) -> None:
    """A second start, a program that never ran, a guest of an older version: they do not say `attached`."""
    client, peer = await pair()
    task, request = await start_following(client, peer)
    await peer.answer(request, running("exe_1"))
    await task
    _, follower, attached = await attach(client, peer)
    assert not set(attached["streams"].values()) & set(request["streams"].values())
    follower.cancel()


async def test_an_attach_from_further_on_lets_the_followed_start_go(pair: Pair) -> None:
    client, peer = await pair()
    task, request = await start_following(client, peer)
    await peer.answer(request, running("exe_1") | {"attached": True})
    await task
    stream = client.attach("exe_1", {"stdout": 5})
    first = asyncio.ensure_future(anext(stream))
    detach, again = await peer.request(), await peer.request()
    assert (detach["op"], detach["attach"]) == ("exec.detach", request["attach"])
    assert (again["op"], again["offsets"]) == ("exec.attach", {"stdout": 5, "stderr": 0})
    await peer.send(protocol.data_frame(request["streams"]["stdout"], 0, 1, b"on its way"))
    await peer.answer(detach, {})
    await peer.answer(again, running("exe_1"))
    await peer.send(protocol.data_frame(again["streams"]["stdout"], 5, 1, b"on"))
    assert (await first).data == b"on"
    await stream.aclose()


async def test_a_refused_start_is_followed_by_nothing(pair: Pair) -> None:
    client, peer = await pair()
    task, request = await start_following(client, peer)
    error = {"code": "lease_lost", "detail": "no", "field": None}
    await peer.send(protocol.control(protocol.REPLY, {"id": request["id"], "error": error}))
    with pytest.raises(CorralError):
        await task
    await peer.send(protocol.data_frame(request["streams"]["stdout"], 0, 1, b"x"))
    await lost(client)


async def test_a_followed_start_that_is_cancelled_detaches_and_the_connection_lives(pair: Pair) -> None:
    client, peer = await pair()
    task, request = await start_following(client, peer)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    detach = await peer.request()
    assert (detach["op"], detach["attach"]) == ("exec.detach", request["attach"])
    await peer.answer(request, running("exe_1") | {"attached": True})
    await peer.send(protocol.data_frame(request["streams"]["stdout"], 0, 1, b"x"))
    await peer.answer(detach, {})
    ping = asyncio.create_task(client.ping())
    await peer.answer(await peer.request(), {})
    await ping


async def test_a_followed_start_that_nobody_takes_may_not_grow_beyond_the_window(pair: Pair) -> None:
    client, peer = await pair(ChannelLimits(max_window=100_000))
    task, request = await start_following(client, peer)
    await peer.answer(request, running("exe_1") | {"attached": True})
    await task
    for number in range(3):
        await peer.send(protocol.data_frame(request["streams"]["stdout"], number * 50_000, 1, bytes(50_000)))
    await lost(client)


async def test_tiny_frames_are_merged_while_the_consumer_is_slow(pair: Pair) -> None:
    client, peer = await pair(ChannelLimits(frames_per_s=1e9))
    stream = client.attach("exe_1")
    first = asyncio.create_task(anext(stream))
    request = await peer.request()
    await peer.answer(request, running("exe_1"))
    out = request["streams"]["stdout"]
    count = 200_000
    await peer.send(protocol.data_frame(out, 0, 0, b"a"))
    await first
    for begin in range(1, count, 5000):
        end = min(count, begin + 5000)
        await peer.send(b"".join(protocol.data_frame(out, n, n, b"a") for n in range(begin, end)))
    status = ended("exe_1", count)
    await peer.send(protocol.control(protocol.EVENT, {"event": "ended", "attach": request["attach"], "status": status}))
    rest = [item async for item in stream]
    assert sum(len(i.data) for i in rest[:-1]) == count - 1
    assert len(rest) < 2000


async def test_a_cancelled_request_loses_only_its_answer(pair: Pair) -> None:
    client, peer = await pair()
    task = asyncio.create_task(client.ping())
    request = await peer.request()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await peer.answer(request, {})
    again = asyncio.create_task(client.ping())
    await peer.answer(await peer.request(), {})
    assert await again >= 0
    await peer.answer(request, {})
    await lost(client)


async def test_silence_ends_requests_connects_and_followers(pair: Pair) -> None:
    client, peer = await pair(QUICK)
    with pytest.raises(CorralError) as caught:
        await client.ping()
    assert caught.value.code == "guest_lost" and client.closed.is_set()

    client, peer = await pair(QUICK)
    _, task, _ = await attach(client, peer)
    with pytest.raises(CorralError) as caught:
        await asyncio.wait_for(task, 20)
    assert caught.value.code == "guest_lost"

    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with pytest.raises(CorralError) as caught:
        await GuestClient.connect(ours, limits=QUICK)
    assert caught.value.code == "guest_lost"
    theirs.close()


async def test_a_guest_that_does_not_read_is_lost(pair: Pair) -> None:
    client, _peer = await pair(ChannelLimits(max_buffer=1 << 20))
    spec = {"exec_id": "exe_1", "argv": ["x" * 400_000]}
    tasks = [asyncio.create_task(client.start_exec(spec, fence=FENCE)) for _ in range(8)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {getattr(r, "code", None) for r in results} == {"guest_lost"}


async def test_the_end_of_the_connection_ends_every_waiter(pair: Pair) -> None:
    client, peer = await pair()
    _, follower, _ = await attach(client, peer)
    waiting = asyncio.create_task(client.ping())
    await peer.request()
    peer.sock.shutdown(socket.SHUT_RDWR)
    results = await asyncio.gather(follower, waiting, return_exceptions=True)
    assert [getattr(r, "code", None) for r in results] == ["guest_lost", "guest_lost"]
    await lost(client)


async def test_close_is_idempotent_and_leaves_no_task(pair: Pair) -> None:
    client, peer = await pair()
    _, follower, _ = await attach(client, peer)
    await client.close()
    await client.close()
    assert isinstance((await asyncio.gather(follower, return_exceptions=True))[0], CorralError)
    assert not client._tasks


async def test_a_connector_that_fails_is_a_lost_guest() -> None:
    async def refuse() -> socket.socket:
        raise ConnectionRefusedError("no")

    with pytest.raises(CorralError) as caught:
        await GuestClient.connect(refuse)
    assert caught.value.code == "guest_lost"
