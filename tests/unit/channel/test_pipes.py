"""The channel over two FIFOs against a scripted guest: whose the pipes are, how both sides begin anew, and what a hostile end may do."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.channel import ChannelLimits, GuestClient
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.guest import protocol
from corral.linux import fifos

FENCE = Fence(3, 4)
HELLO = {
    "versions": [1, 1],
    "version": 1,
    "guest": "0.1.0",
    "instance": "ins_x",
    "capabilities": {"pidfd": 1},
    "identified": True,
    "floor": [3, 4],
}
PATIENT = ChannelLimits(request_s=30, connect_s=30)
QUICK = ChannelLimits(request_s=0.5, connect_s=0.5, keepalive_s=0.4)
LIMITS = {kind: 16 << 20 for kind in range(1, 9)}


class Peer:
    """The guest's ends of a pair, driven by the test; both are open both ways, as a guest holds them."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.read, self.write = fifos.make(self.directory)
        self.open = True
        os.set_blocking(self.read, False)
        os.set_blocking(self.write, False)
        self.decoder = protocol.Decoder(LIMITS, resync=True)
        self.frames: list[tuple[int, bytes]] = []

    async def send(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self.write, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.001)

    async def frame(self) -> tuple[int, bytes]:
        while not self.frames:
            try:
                self.frames += self.decoder.feed(os.read(self.read, 65536))
            except BlockingIOError:
                await asyncio.sleep(0.001)
        return self.frames.pop(0)

    async def sync(self) -> bytes:
        kind, nonce = await self.frame()
        assert kind == protocol.SYNC
        return nonce

    async def welcome(self, before: bytes = b"") -> None:
        """Answer one client's resync and hello."""
        nonce = await self.sync()
        await self.send(before + protocol.MAGIC + nonce)
        assert (await self.frame())[0] == protocol.HELLO
        await self.send(protocol.control(protocol.HELLO, HELLO))

    async def answer(self, ok: dict[str, Any]) -> dict[str, Any]:
        kind, payload = await self.frame()
        assert kind == protocol.REQUEST
        request = protocol.loads(payload)
        await self.send(protocol.control(protocol.REPLY, {"id": request["id"], "ok": ok}))
        return request

    def end(self) -> None:
        if self.open:
            self.open = False
            os.close(self.read)
            os.close(self.write)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path)
    yield made
    made.end()


@contextlib.asynccontextmanager
async def connected(peer: Peer, before: bytes = b"", limits: ChannelLimits = PATIENT) -> AsyncIterator[GuestClient]:
    ends = fifos.connect(peer.directory)
    client, _ = await asyncio.gather(GuestClient.connect(ends, limits=limits), peer.welcome(before))
    try:
        yield client
    finally:
        await client.close()


async def refused(peer: Peer, limits: ChannelLimits = QUICK) -> str:
    with pytest.raises(CorralError) as caught:
        await GuestClient.connect(fifos.connect(peer.directory), limits=limits)
    assert caught.value.code == "guest_lost"
    return caught.value.detail


async def reaches(client: GuestClient, peer: Peer) -> None:
    await asyncio.gather(client.ping(), peer.answer({"now_ms": 1}))


async def test_a_pair_belongs_to_one_client_until_it_lets_go(peer: Peer) -> None:
    async with connected(peer):
        with pytest.raises(BlockingIOError):
            fifos.connect(peer.directory)
    async with connected(peer) as client:
        await reaches(client, peer)


async def test_the_guest_cannot_lock_the_host_out(peer: Peer) -> None:
    fcntl.flock(peer.read, fcntl.LOCK_EX)
    fcntl.flock(peer.write, fcntl.LOCK_EX)
    async with connected(peer) as client:
        await reaches(client, peer)


async def test_bytes_for_an_earlier_client_are_dropped_until_the_answer(peer: Peer) -> None:
    await peer.send(protocol.control(protocol.REPLY, {"id": 1, "ok": {}}) + b"\xff\xffhalf a fr")
    stale = b"x" * 100_000 + protocol.MAGIC + b"another's number" + protocol.MAGIC[:9]
    async with connected(peer, before=stale) as client:
        await reaches(client, peer)


async def test_half_a_frame_of_a_dead_client_does_not_reach_the_next(peer: Peer) -> None:
    ends = fifos.connect(peer.directory)
    os.write(ends.to_guest, protocol.control(protocol.REQUEST, {"id": 1, "op": "x" * 500})[:200])
    ends.close()
    async with connected(peer) as client:
        await reaches(client, peer)


async def test_a_guest_that_never_answers_is_given_up_and_the_pair_is_free(peer: Peer) -> None:
    assert "in time" in await refused(peer)
    fifos.connect(peer.directory).close()


async def test_a_guest_that_floods_before_its_answer_is_given_up_long_before_the_time(peer: Peer) -> None:
    async def flood() -> None:
        while True:
            await peer.send(b"\0" * 65536)

    task = asyncio.create_task(flood())
    limits = ChannelLimits(connect_s=300, max_resync=1 << 20)
    assert "floods" in await asyncio.wait_for(refused(peer, limits), 60)
    task.cancel()


async def test_an_answer_given_twice_breaks_the_protocol(peer: Peer) -> None:
    async with connected(peer) as client:
        await peer.send(protocol.MAGIC + b"n" * protocol.NONCE)
        await asyncio.wait_for(client.closed.wait(), 30)
        assert "broke the protocol" in (client.lost_reason or "")

    async def twice() -> None:
        nonce = await peer.sync()
        await peer.send(2 * (protocol.MAGIC + nonce))

    task = asyncio.create_task(twice())
    assert "broke the protocol" in await refused(peer, PATIENT)
    await task


async def test_a_guess_of_the_answer_does_not_count(peer: Peer) -> None:
    async def guess() -> None:
        await peer.sync()
        await peer.send((protocol.MAGIC + os.urandom(protocol.NONCE)) * 100 + protocol.control(protocol.HELLO, HELLO))

    task = asyncio.create_task(guess())
    assert "in time" in await refused(peer)
    await task


async def test_the_end_of_the_guest_ends_the_channel_at_once(peer: Peer) -> None:
    async with connected(peer) as client:
        asking = asyncio.create_task(client.ping())
        await peer.frame()
        peer.end()
        with pytest.raises(CorralError):
            await asyncio.wait_for(asking, 10)
        assert client.closed.is_set()


async def test_a_guest_that_is_gone_cannot_be_called(peer: Peer) -> None:
    peer.end()
    with pytest.raises(OSError, match="No such device"):
        fifos.connect(peer.directory)


async def test_a_guest_that_stops_reading_is_lost_at_the_limit_without_waiting_for_it(peer: Peer) -> None:
    async with connected(peer, limits=ChannelLimits(max_buffer=1 << 20, request_s=3000)) as client:
        with pytest.raises(CorralError):
            # Who is lost at once has waited for nothing: the loop had no turn in between.
            client.forget_exec("x" * (2 << 20), fence=FENCE)
        assert client.lost_reason == "the guest does not read"


async def test_frames_larger_than_the_pipe_arrive_whole(peer: Peer) -> None:
    async with connected(peer) as client:
        spec = {"exec_id": "e", "argv": ["x" * (3 << 20)]}
        asking = asyncio.create_task(client.start_exec(spec, fence=FENCE))
        kind, payload = await peer.frame()
        assert kind == protocol.REQUEST and protocol.loads(payload)["spec"] == spec
        await reaches(client, peer)
        asking.cancel()


async def test_a_silent_guest_is_found_by_the_keep_alive_of_a_follower(peer: Peer) -> None:
    async with connected(peer, limits=ChannelLimits(request_s=0.5, keepalive_s=0.4)) as client:

        async def follow() -> None:
            async for _ in client.attach("exe_1"):
                pass

        following = asyncio.create_task(follow())
        kind, payload = await peer.frame()
        request = protocol.loads(payload)
        status = {
            "exec_id": "exe_1", "state": "running", "started": True, "offsets": {}, "killed": 0, "killed_all": True,
            "background": 0, "already": False,
        }  # fmt: skip
        await peer.send(protocol.control(protocol.REPLY, {"id": request["id"], "ok": status}))
        with pytest.raises(CorralError) as caught:
            await asyncio.wait_for(following, 30)
        assert kind == protocol.REQUEST and caught.value.code == "guest_lost"


async def test_a_flood_of_frames_is_read_no_faster_than_allowed(peer: Peer) -> None:
    """More frames than the budget: reading pauses, goes on, and the client stays usable."""
    async with connected(peer, limits=ChannelLimits(frames_per_s=4000, request_s=60)) as client:
        attached = asyncio.create_task(anext(client.attach("exe_1")))
        request = protocol.loads((await peer.frame())[1])
        status = {
            "exec_id": "exe_1", "state": "running", "started": True, "offsets": {}, "killed": 0, "killed_all": True,
            "background": 0, "already": False,
        }  # fmt: skip
        await peer.send(protocol.control(protocol.REPLY, {"id": request["id"], "ok": status}))
        stream = request["streams"]["stdout"]
        begun = time.monotonic()
        await peer.send(b"".join(protocol.data_frame(stream, offset, 0, b"x") for offset in range(9000)))
        await attached
        await reaches(client, peer)
        assert (
            time.monotonic() - begun > 0.5
        )  # 1000 at once, the others at 4000 in a second, one filled buffer of about 3000 in advance


def test_what_is_no_fifo_is_refused(tmp_path: Path) -> None:
    (tmp_path / fifos.TO_GUEST).write_bytes(b"")
    with pytest.raises(OSError, match="no FIFO"):
        fifos.connect(str(tmp_path))
    (tmp_path / fifos.TO_GUEST).unlink()
    (tmp_path / fifos.TO_GUEST).symlink_to("/dev/null")
    with pytest.raises(OSError):
        fifos.connect(str(tmp_path))


def test_a_pair_is_private_and_made_anew(tmp_path: Path) -> None:
    first = fifos.make(str(tmp_path))
    old = os.stat(tmp_path / fifos.TO_GUEST)
    second = fifos.make(str(tmp_path))
    new = os.stat(tmp_path / fifos.TO_GUEST)
    assert new.st_mode & 0o777 == 0o600 and (old.st_dev, old.st_ino) != (new.st_dev, new.st_ino)
    ends = fifos.connect(str(tmp_path))
    os.write(ends.to_guest, b"x")
    assert os.read(second[0], 10) == b"x"
    ends.close()
    ends.close()
    for fd in (*first, *second):
        os.close(fd)
