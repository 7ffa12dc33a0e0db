"""A captured guest says whatever it likes: the host ends the connection as `guest_lost`, in bounded memory and time."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral.channel import ChannelLimits, GuestClient
from corral.channel.answers import unknown_status
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.guest import protocol

FENCE = Fence(1, 1)
HELLO: dict[str, Any] = {
    "versions": [1, 1], "version": 1, "guest": "0.1.0", "instance": "ins_x", "capabilities": {}, "identified": True, "floor": [1, 1],
}  # fmt: skip
LIMITS = ChannelLimits(request_s=2, connect_s=2, keepalive_s=2)
TYPES = {kind: 8 << 20 for kind in range(1, 9)}
KIB, MIB = 1024, 1024 * 1024


def status(**more: Any) -> dict[str, Any]:
    base = dict(unknown_status("exe_1")) | {"state": "running", "started": True, "offsets": {"stdout": 0, "stderr": 0}}
    return base | more


def ending(**more: Any) -> dict[str, Any]:
    return status(state="ended", exit_code=0) | more


def reply(number: Any, **body: Any) -> bytes:
    return protocol.control(protocol.REPLY, {"id": number, **body})


def event(**body: Any) -> bytes:
    return protocol.control(protocol.EVENT, body)


class Hostile:
    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX)
        self.theirs.setblocking(False)
        self.decoder = protocol.Decoder(TYPES)
        self.frames: list[tuple[int, bytes]] = []

    async def send(self, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self.theirs, data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    async def request(self) -> dict[str, Any]:
        while True:
            while self.frames:
                kind, payload = self.frames.pop(0)
                if kind == protocol.REQUEST:
                    return protocol.loads(payload)
            self.frames += self.decoder.feed(await asyncio.get_running_loop().sock_recv(self.theirs, 65536))

    async def connect(self, limits: ChannelLimits = LIMITS) -> GuestClient:
        task = asyncio.create_task(GuestClient.connect(self.ours, limits=limits))
        await self.send(protocol.control(protocol.HELLO, HELLO))
        return await task

    def close(self) -> None:
        self.theirs.close()


async def follow(client: GuestClient, hold: asyncio.Event | None = None) -> int:
    total = 0
    async for item in client.attach("exe_1"):
        total += len(getattr(item, "data", b""))
        if hold is not None:
            await hold.wait()
    return total


async def attached(hostile: Hostile, client: GuestClient, hold: asyncio.Event | None = None):
    task = asyncio.create_task(follow(client, hold))
    request = await hostile.request()
    await hostile.send(reply(request["id"], ok=status()))
    return task, request["attach"], request["streams"]["stdout"], request["streams"]["stderr"]


async def must_be_lost(client: GuestClient, *tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait_for(client.closed.wait(), 20)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, CorralError) and result.code == "guest_lost", result
    with pytest.raises(CorralError) as caught:
        await client.ping()
    assert caught.value.code == "guest_lost"
    await client.close()


BAD_HELLOS = [
    b"\x00", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, protocol.frame(9, b""), protocol.frame(protocol.HELLO, b"x"),
    struct.pack(">IB", 2**32 - 1, protocol.HELLO), struct.pack(">IB", 64 * KIB + 1, protocol.HELLO),
    protocol.control(protocol.HELLO, {}), protocol.control(protocol.REPLY, {"id": 1, "ok": {}}),
    protocol.control(protocol.HELLO, HELLO | {"version": 99}), protocol.control(protocol.HELLO, HELLO | {"version": True}),
    protocol.control(protocol.HELLO, HELLO | {"instance": "x" * 1000}), protocol.control(protocol.HELLO, HELLO | {"floor": [1]}),
    protocol.control(protocol.HELLO, HELLO | {"floor": [-1, 2**70]}), protocol.control(protocol.HELLO, HELLO | {"capabilities": []}),
    protocol.control(protocol.HELLO, HELLO | {"capabilities": {str(n): n for n in range(100)}}),
    protocol.control(protocol.HELLO, HELLO | {"identified": 1}), protocol.control(protocol.HELLO, {"versions": [7, 9]}),
    protocol.frame(protocol.HELLO, b'{"version":' + b"[" * 60000),
]  # fmt: skip


@pytest.mark.parametrize("greeting", BAD_HELLOS, ids=range(len(BAD_HELLOS)))
async def test_a_bad_hello_is_a_lost_guest(greeting: bytes) -> None:
    hostile = Hostile()
    task = asyncio.create_task(GuestClient.connect(hostile.ours, limits=LIMITS))
    await hostile.send(greeting)
    with pytest.raises(CorralError) as caught:
        await asyncio.wait_for(task, 20)
    assert caught.value.code == "guest_lost"
    hostile.close()


UNASKED = [
    protocol.control(protocol.HELLO, HELLO),
    protocol.frame(0, b""), protocol.frame(protocol.REQUEST, b"{}"), protocol.frame(protocol.ACK, bytes(12)), protocol.frame(200, b"x"),
    struct.pack(">IB", 2**31, protocol.DATA), struct.pack(">IB", 65 * KIB + 16, protocol.DATA), struct.pack(">IB", 64 * KIB + 1, protocol.EVENT),
    reply(77, ok={}), reply(None, ok={}), reply("1", ok={}), reply(-1, ok={}), reply(True, ok={}), reply(2**80, ok={}), protocol.control(protocol.REPLY, {}),
    protocol.frame(protocol.REPLY, b"[" * 60000), protocol.frame(protocol.REPLY, b"\xff\xfe"), protocol.frame(protocol.EVENT, b"null"),
    event(), event(event="ended"), event(event="ended", attach=2, status=ending()), event(event="ended", attach=[], status={}),
    event(event="ended", attach={}, status={}), event(event="stdin", exec_id="exe_1", written=1, open=True), event(event="stdin", exec_id=[], written=1),
    event(event="stdin", exec_id=None), event(event="invented"), event(event=["x"]), event(event={"a": 1}),
    protocol.data_frame(1, 0, 0, b"x"), protocol.data_frame(2**32 - 1, 2**64 - 1, 0, b"x"), protocol.frame(protocol.DATA, b""),
    protocol.frame(protocol.DATA, bytes(protocol.DATA_SIZE)),
]  # fmt: skip


@pytest.mark.parametrize("frame", UNASKED, ids=range(len(UNASKED)))
async def test_what_nobody_asked_for_is_a_lost_guest(frame: bytes) -> None:
    hostile = Hostile()
    client = await hostile.connect()
    await hostile.send(frame)
    await must_be_lost(client)
    hostile.close()


BAD_STATUSES: list[dict[str, Any]] = [
    {}, {"exec_id": "exe_2"}, status(exec_id="exe_2"), status(state="dreaming"), status(state=["running"]), status(state={}), status(started=1),
    status(started="yes"), ending(exit_code=256), ending(exit_code=-1), ending(exit_code=True), ending(exit_code=1.5), ending(signal=9),
    ending(exit_code=None), ending(exit_code=None, signal=65), ending(started=False), ending(started=None), status(state="failed"),
    status(state="failed", started=False, failure={"what": "magic", "errno": "X", "message": ""}),
    status(state="failed", started=False, failure={"what": "argv", "errno": "X" * 100, "message": ""}),
    status(state="failed", started=False, failure={"what": "argv", "errno": "X", "message": "m" * 5000}),
    status(offsets=None), status(offsets={"stdout": -1}), status(offsets={"stdout": "1"}), status(offsets={"stdout": 2**64}), status(killed=-1),
    status(killed_all=None), status(killed_all="x"), status(background=2**40), status(utime_ms=-5), status(maxrss_kib="big"), status(ended_by="god"),
    status(ended_by=["kill"]), status(ended_by={}), status(stdin=[]), status(stdin={"received": "x"}), status(stdin={str(n): 1 for n in range(99)}), status(already=0),
]  # fmt: skip


@pytest.mark.parametrize("answer", BAD_STATUSES, ids=range(len(BAD_STATUSES)))
async def test_a_malformed_status_is_a_lost_guest(answer: dict[str, Any]) -> None:
    hostile = Hostile()
    client = await hostile.connect()
    task = asyncio.create_task(client.exec_status("exe_1"))
    await hostile.send(reply((await hostile.request())["id"], ok=answer))
    await must_be_lost(client, task)
    hostile.close()


BAD_REPLIES: list[dict[str, Any]] = [
    {}, {"ok": None}, {"ok": []}, {"ok": {}, "error": {}}, {"error": []}, {"error": {"code": "store_error", "detail": ""}},
    {"error": {"code": "policy_denied", "detail": ""}}, {"error": {"code": ["x"], "detail": ""}}, {"error": {"code": "not_found"}},
    {"error": {"code": "not_found", "detail": "x" * 9999}}, {"error": {"code": "not_found", "detail": "", "field": 7}},
]  # fmt: skip


@pytest.mark.parametrize("body", BAD_REPLIES, ids=range(len(BAD_REPLIES)))
async def test_a_malformed_reply_is_a_lost_guest(body: dict[str, Any]) -> None:
    hostile = Hostile()
    client = await hostile.connect()
    task = asyncio.create_task(client.kill_all(fence=FENCE))
    await hostile.send(reply((await hostile.request())["id"], **body))
    await must_be_lost(client, task)
    hostile.close()


async def test_offsets_that_lie_are_a_lost_guest() -> None:
    lies = [
        lambda a, out, err: protocol.data_frame(out, 1, 0, b"x"),
        lambda a, out, err: protocol.data_frame(out, 0, 0, b"xx") + protocol.data_frame(out, 1, 0, b"x"),
        lambda a, out, err: protocol.data_frame(out, 2**64 - 1, 0, b"x"),
        lambda a, out, err: protocol.data_frame(err + 1, 0, 0, b"x"),
        lambda a, out, err: event(event="ended", attach=a, status=ending(offsets={"stdout": 5, "stderr": 0})),
        lambda a, out, err: protocol.data_frame(out, 0, 0, b"x") + event(event="ended", attach=a, status=ending()),
        lambda a, out, err: event(event="ended", attach=a + 1, status=ending()),
        lambda a, out, err: event(event="ended", attach=a, status=status()),
        lambda a, out, err: event(event="ended", attach=a, status=ending()) * 2,
        lambda a, out, err: event(event="ended", attach=a, status=ending()) + protocol.data_frame(out, 0, 0, b"x"),
    ]
    for number, lie in enumerate(lies):
        hostile = Hostile()
        client = await hostile.connect()
        task, attach, out, err = await attached(hostile, client)
        await hostile.send(lie(attach, out, err))
        await asyncio.wait_for(client.closed.wait(), 20)
        results = await asyncio.gather(task, return_exceptions=True)
        # After a proper end the follower may have been content already.
        assert number >= 8 or getattr(results[0], "code", None) == "guest_lost"
        await must_be_lost(client)
        hostile.close()


async def test_duplicate_and_late_answers_are_a_lost_guest() -> None:
    hostile = Hostile()
    client = await hostile.connect()
    task = asyncio.create_task(client.ping())
    request = await hostile.request()
    await hostile.send(reply(request["id"], ok={}) * 2)
    assert await task >= 0
    await must_be_lost(client)
    hostile.close()


async def test_output_beyond_the_window_is_a_lost_guest_in_bounded_memory() -> None:
    """The guest ignores acknowledgements and sends gigabytes to a consumer that does not take them."""
    hostile = Hostile()
    client = await hostile.connect(ChannelLimits(request_s=30))
    hold = asyncio.Event()
    task, _, out, _ = await attached(hostile, client, hold)
    tracemalloc.start()
    try:
        payload = b"f" * protocol.MAX_DATA
        for n in range(2000):
            if client.closed.is_set():
                break
            await hostile.send(protocol.data_frame(out, n * len(payload), n, payload))
            await asyncio.sleep(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    await asyncio.wait_for(client.closed.wait(), 20)
    assert peak < 16 * MIB
    hold.set()
    await must_be_lost(client, task)
    hostile.close()


async def test_a_flood_of_tiny_frames_costs_neither_memory_nor_the_other_tasks() -> None:
    hostile = Hostile()
    client = await hostile.connect(ChannelLimits(request_s=60, frames_per_s=5000))
    hold = asyncio.Event()
    task, _, out, _ = await attached(hostile, client, hold)
    stop = time.monotonic() + 6
    worst = 0.0

    async def flood() -> None:
        position = 0
        while time.monotonic() < stop and position < 1_000_000:
            block = b"".join(protocol.data_frame(out, position + n, position + n, b"x") for n in range(200))
            await hostile.send(block)
            position += 200

    async def neighbour() -> None:
        nonlocal worst
        while time.monotonic() < stop:
            begun = time.monotonic()
            await asyncio.sleep(0.005)
            worst = max(worst, time.monotonic() - begun)

    tracemalloc.start()
    flooding = asyncio.create_task(flood())
    await neighbour()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    assert peak < 32 * MIB
    assert worst < 4.0  # without the throttle it would be all of the six seconds
    hold.set()
    await client.close()
    await asyncio.gather(task, return_exceptions=True)
    hostile.close()


async def test_half_a_frame_and_then_silence_ends_every_request_in_time() -> None:
    for half in (b"\x00", struct.pack(">IB", 1000, protocol.REPLY) + b"{", struct.pack(">IB", 60000, protocol.DATA)):
        hostile = Hostile()
        client = await hostile.connect(ChannelLimits(request_s=0.5, keepalive_s=0.5))
        await hostile.send(half)
        begun = time.monotonic()
        await must_be_lost(client, asyncio.create_task(client.ping()), asyncio.create_task(follow(client)))
        assert time.monotonic() - begun < 15
        hostile.close()


async def test_one_byte_at_a_time_does_not_stretch_a_deadline() -> None:
    hostile = Hostile()
    client = await hostile.connect(ChannelLimits(request_s=1))

    async def drip() -> None:
        for byte in protocol.control(protocol.REPLY, {"id": 1, "ok": {}, "pad": "x" * 5000}):
            await hostile.send(bytes([byte]))
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    await must_be_lost(client, asyncio.create_task(client.ping()))
    dripping.cancel()
    hostile.close()


@given(st.lists(st.binary(max_size=200) | st.integers(0, 30), max_size=20), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes_leave_the_host_standing(script: list[bytes | int], chance: random.Random) -> None:
    """Mutated and mixed frames, in any order, with a request and a follower waiting: an answer, an error, never a hang or a crash."""

    async def play() -> None:
        hostile = Hostile()
        client = await hostile.connect(ChannelLimits(request_s=0.3, keepalive_s=0.3))
        tasks = [asyncio.create_task(follow(client)), asyncio.create_task(client.exec_status("exe_1"))]
        await hostile.request()
        frames = [
            reply(1, ok=status()), reply(2, ok=status()), reply(2, ok=ending()), protocol.data_frame(2, 0, 0, b"abc"), protocol.data_frame(3, 0, 1, b"abc"),
            event(event="ended", attach=2, status=ending()), event(event="ended", attach=2, status=ending(offsets={"stdout": 3, "stderr": 0})), *UNASKED,
        ]  # fmt: skip
        for part in script:
            data = part if isinstance(part, bytes) else frames[part % len(frames)]
            if chance.random() < 0.3 and data:
                mutable = bytearray(data)
                mutable[chance.randrange(len(mutable))] ^= 1 << chance.randrange(8)
                data = bytes(mutable)
            await hostile.send(data)
        hostile.close()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        for result in results:
            assert not isinstance(result, BaseException) or (
                isinstance(result, CorralError)
                and result.code in ("guest_lost", "not_found", "lease_lost", "bad_request")
            ), repr(result)
        await client.close()

    asyncio.run(play())


async def test_nothing_of_the_guest_s_text_reaches_an_error_unbounded() -> None:
    hostile = Hostile()
    client = await hostile.connect()
    task = asyncio.create_task(client.exec_status("exe_1"))
    request = await hostile.request()
    text = os.urandom(300).hex()
    await hostile.send(reply(request["id"], error={"code": "not_found", "detail": text, "field": None}))
    with pytest.raises(CorralError) as caught:
        await task
    assert len(caught.value.detail) < 1100
    await client.close()
    hostile.close()
