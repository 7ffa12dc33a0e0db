"""The node over its socket: whatever becomes of a connection, a call is done once or its caller is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from corral.adapters.nodes import remote
from corral.adapters.nodes.remote import RemoteNode
from corral.domain.fence import Fence
from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.node.serving import NodeServer
from corral.ports.node import Chunk, CreateInstance, Gap, HostFacts, InstanceReport
from corral.wire import link as wire

FENCE = Fence(1, 1)
REQUEST = CreateInstance("ins_1", "sbx_1", 1, FENCE, "fake", "host", Limits(), 60.0)


KEPT = 40 * 1024 * 1024 + 17
MIB = 1024 * 1024


def kept(begin: int, end: int) -> bytes:
    """Bytes of an output that differ by place."""
    return (bytes(range(251)) * ((end - begin) // 251 + 2))[begin % 251 :][: end - begin]


class Scripted:
    """A node whose answers are the test's."""

    def __init__(self) -> None:
        self.node_id = "n1"
        self.calls: list[tuple[str, Any]] = []
        self.notices: asyncio.Queue[str] = asyncio.Queue()
        self.go = asyncio.Event()
        self.begun = asyncio.Event()
        self.sent = 0
        self.closed = 0
        self.got = b""
        self.ended: list[str] = []
        self.peer: Any = None

    async def host(self) -> HostFacts:
        self.calls.append(("host", None))
        return HostFacts("v2", "user", 1, 2)

    async def lost(self) -> str:
        return await self.notices.get()

    async def create(self, request: CreateInstance, progress: Callable[[str, float | None], None] | None = None) -> Any:
        self.calls.append(("create", request))
        if progress is not None:
            progress("building 你好", 0.5)
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.ended.append("create cancelled")
            raise
        self.ended.append("create done")
        return InstanceReport(request.instance_id, {"pid": 1}, "sha256:x", 1, {"a": 1.5})

    async def wait_exec(self, exec_id: str) -> Any:
        self.calls.append(("wait_exec", exec_id))
        self.begun.set()
        try:
            await self.go.wait()
        finally:
            self.ended.append("wait_exec")
        return exec_id

    async def signal_exec(self, exec_id: str, signal: int) -> None:
        self.calls.append(("signal_exec", signal))
        self.begun.set()
        await self.go.wait()

    async def fence(self, instance_id: str, fence: Fence, mode: str) -> None:
        raise CorralError("lease_lost", "an old 栅栏", hint="acquire it again", field="/x", floor="2.1", odd={1, 2})

    async def stats(self, instance_id: str) -> Any:
        raise KeyError("a defect")

    async def timeline(self, exec_id: str) -> Any:
        """As long as its caller likes."""
        self.calls.append(("timeline", exec_id[:1]))
        return b"x" * int(exec_id)

    async def put_files(self, instance_id: str, fence: Fence, files: Any) -> None:
        self.calls.append(("put_files", files))

    async def kept_output(self, exec_id: str, stream: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        self.calls.append(("kept_output", offset))
        try:
            for at in range(offset, KEPT, 65536):
                self.sent += 1
                yield kept(at, min(at + 65536, KEPT))
                await asyncio.sleep(0)
        finally:
            self.closed += 1

    async def extend_deadline(self, instance_id: str, fence: Fence, deadline_s: float) -> None:
        """What takes the node down with it, each time."""
        self.calls.append(("extend_deadline", deadline_s))
        assert self.peer is not None
        self.peer.abort()
        await self.go.wait()

    async def stream_exec(self, exec_id: str, cursor: str | None = None) -> AsyncIterator[Chunk | Gap]:
        self.calls.append(("stream_exec", cursor))
        try:
            for number in range(int(cursor or 0), 200):
                self.sent = number + 1
                yield Chunk("stdout", number * 65536, b"x" * 65536, number, str(number + 1))
                await asyncio.sleep(0)
        finally:
            self.closed += 1

    def get_tar(self, instance_id: str, path: str, user: str = "sandbox") -> AsyncIterator[bytes]:
        return self._tar(path)

    async def _tar(self, path: str) -> AsyncIterator[bytes]:
        if path == "missing":
            raise CorralError("not_found", "no such file")
        yield b"abc"
        if path == "broken":
            raise CorralError("sandbox_lost", "gone")
        yield b"def"

    async def put_tar(
        self, instance_id: str, fence: Fence, tar: AsyncIterator[bytes], dest: str, user: str = "sandbox"
    ) -> None:
        if dest == "refused":
            raise CorralError("disk_full", "no room")
        try:
            async for block in tar:
                self.got += block
                self.begun.set()
                if dest == "slow":
                    await self.go.wait()
        except CorralError as error:
            self.ended.append(f"put_tar {error.code}")
            raise

    async def read_file(self, instance_id: str, path: str, **more: Any) -> Any:
        node = self

        class Blocks:
            info, offset, length = path, 7, 6

            def __init__(self) -> None:
                self.left = [b"abc", b"def"]

            def __aiter__(self) -> Any:
                return self

            async def __anext__(self) -> bytes:
                if not self.left:
                    raise StopAsyncIteration
                return self.left.pop(0)

            async def aclose(self) -> None:
                node.closed += 1

        return Blocks()


class Stage:
    """A node, its server, and what else a test opens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.node = Scripted()
        self.log: list[str] = []
        self.server: NodeServer | None = None
        self.clients: list[Any] = []

    async def serve(self) -> None:
        self.server = NodeServer(self.node, str(self.path), "node.sock", self.log.append)  # type: ignore[arg-type]
        await self.server.start()

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.close(0.2)
        self.server = None

    async def client(self, **more: Any) -> Any:
        made = RemoteNode(str(self.path / "node.sock"), **more)
        self.clients.append(made)
        await made.open()
        return made


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    await made.serve()
    yield made
    for client in made.clients:
        await client.close()
    if made.server is not None:
        await made.stop()


async def test_values_progress_and_errors_cross_whole(stage: Stage) -> None:
    node = await stage.client()
    assert node.node_id == "n1"
    stage.node.go.set()
    told: list[Any] = []
    report = await node.create(REQUEST, lambda *said: told.append(said))
    assert report == InstanceReport("ins_1", {"pid": 1}, "sha256:x", 1, {"a": 1.5})
    assert told == [("building 你好", 0.5)]
    assert stage.node.calls[0][1] == REQUEST
    with pytest.raises(CorralError) as refused:
        await node.fence("ins_1", FENCE, "kill")
    error = refused.value
    assert (error.code, error.detail, error.hint, error.field) == (
        "lease_lost",
        "an old 栅栏",
        "acquire it again",
        "/x",
    )
    assert error.facts == {"floor": "2.1", "odd": frozenset({1, 2})}
    with pytest.raises(CorralError, match="KeyError") as failed:
        await node.stats("ins_1")
    assert failed.value.code == "infra_error"
    assert any("KeyError" in line for line in stage.log)


async def test_what_the_node_does_not_have_is_not_there(stage: Stage) -> None:
    node = await stage.client()
    assert hasattr(node, "create")
    assert not hasattr(node, "checkpoint_instance")
    assert not hasattr(node, "anything_else")


async def test_the_socket_is_for_its_owner_only(stage: Stage) -> None:
    assert os.stat(stage.path / "node.sock").st_mode & 0o777 == 0o600


async def test_cheap_reads_are_asked_once_a_moment_and_at_once_when_fresh_is_wanted(stage: Stage) -> None:
    node = await stage.client(fresh_s=60.0)
    for _ in range(3):
        assert (await node.host()).cpus == 2
    assert stage.node.calls == [("host", None)]


async def test_a_cancelled_call_is_cancelled_at_the_node(stage: Stage) -> None:
    node = await stage.client()
    call = asyncio.create_task(node.wait_exec("exe_1"))
    await stage.node.begun.wait()
    call.cancel()
    await until(lambda: stage.node.ended == ["wait_exec"])


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


# -- streams -------------------------------------------------------------------------------------------------------------------
async def test_a_slow_reader_holds_the_node_back(stage: Stage) -> None:
    node = await stage.client()
    source = node.stream_exec("exe_1")
    first = await anext(source)
    assert (first.offset, first.cursor) == (0, "1")
    await asyncio.sleep(0.3)
    assert stage.node.sent * 65536 <= 1024 * 1024
    rest = [item.offset async for item in source]
    assert rest == [number * 65536 for number in range(1, 200)]


async def test_a_reader_that_leaves_ends_the_stream_at_the_node(stage: Stage) -> None:
    node = await stage.client()
    source = node.stream_exec("exe_1")
    await anext(source)
    await source.aclose()
    await until(lambda: stage.node.closed == 1)
    assert stage.node.sent < 200


async def test_a_stream_tells_its_errors_before_and_after_its_first_block(stage: Stage) -> None:
    node = await stage.client()
    assert [block async for block in node.get_tar("ins_1", "fine")] == [b"abc", b"def"]
    with pytest.raises(CorralError) as missing:
        await anext(node.get_tar("ins_1", "missing"))
    assert missing.value.code == "not_found"
    source = node.get_tar("ins_1", "broken")
    assert await anext(source) == b"abc"
    with pytest.raises(CorralError) as broken:
        await anext(source)
    assert broken.value.code == "sandbox_lost"


async def test_an_opened_file_has_its_members_and_its_blocks(stage: Stage) -> None:
    node = await stage.client()
    blocks = await node.read_file("ins_1", "/a", first=7)
    assert (blocks.info, blocks.offset, blocks.length) == ("/a", 7, 6)
    assert [block async for block in blocks] == [b"abc", b"def"]
    await blocks.aclose()
    left = await node.read_file("ins_1", "/a")
    assert await anext(left) == b"abc"
    await left.aclose()
    await until(lambda: stage.node.closed == 2)


async def blocks_of(size: int, count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield bytes([number % 251]) * size


async def test_what_is_sent_along_arrives_whole_and_waits_for_a_slow_node(stage: Stage) -> None:
    node = await stage.client()
    made = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal made
        for number in range(100):
            made += 1
            yield bytes([number]) * 65536

    call = asyncio.create_task(node.put_tar("ins_1", FENCE, source(), "slow"))
    await stage.node.begun.wait()
    await asyncio.sleep(0.3)
    assert made * 65536 <= 1024 * 1024
    stage.node.go.set()
    await call
    assert stage.node.got == b"".join([bytes([number]) * 65536 for number in range(100)])
    stage.node.got = b""
    await node.put_tar("ins_1", FENCE, blocks_of(1_000_000, 3), "fast")
    assert len(stage.node.got) == 3_000_000


async def test_an_error_of_the_source_is_the_call_s_and_the_node_hears_of_it(stage: Stage) -> None:
    node = await stage.client()

    async def source() -> AsyncIterator[bytes]:
        yield b"abc"
        raise ZeroDivisionError("the caller's own")

    with pytest.raises(ZeroDivisionError):
        await node.put_tar("ins_1", FENCE, source(), "fast")
    assert stage.node.ended == ["put_tar infra_error"]


async def test_a_refusal_comes_although_the_source_is_not_at_its_end(stage: Stage) -> None:
    node = await stage.client()
    with pytest.raises(CorralError) as refused:
        await node.put_tar("ins_1", FENCE, blocks_of(65536, 1000), "refused")
    assert refused.value.code == "disk_full"


# -- broken connections --------------------------------------------------------------------------------------------------------
async def test_calls_go_on_with_a_node_that_was_restarted(stage: Stage) -> None:
    node = await stage.client()
    waiting = asyncio.create_task(node.wait_exec("exe_1"))
    making = asyncio.create_task(node.create(REQUEST))
    source = node.stream_exec("exe_1")
    seen = [(await anext(source)).offset for _ in range(5)]
    await until(lambda: len(stage.node.calls) == 3)
    await stage.stop()
    stage.node.go.set()
    await asyncio.sleep(0.1)
    await stage.serve()
    assert await waiting == "exe_1"
    assert (await making).instance_id == "ins_1"
    seen += [item.offset async for item in source]
    assert seen == [number * 65536 for number in range(200)]
    assert [name for name, _ in stage.node.calls].count("create") == 2


async def test_what_must_not_be_done_twice_is_not_repeated(stage: Stage) -> None:
    node = await stage.client()
    call = asyncio.create_task(node.signal_exec("exe_1", 10))
    await stage.node.begun.wait()
    await stage.stop()
    await stage.serve()
    with pytest.raises(CorralError) as cut:
        await call
    assert (cut.value.code, cut.value.retryable) == ("node_unavailable", True)
    assert stage.node.calls == [("signal_exec", 10)]


async def test_a_call_that_breaks_every_connection_is_given_up_and_the_node_goes_on(stage: Stage) -> None:
    node = await stage.client()
    assert stage.server is not None
    server = stage.server

    class Breaks:
        @staticmethod
        def abort() -> None:
            for peer in list(server._peers):
                peer.link.abort()

    stage.node.peer = Breaks
    with pytest.raises(CorralError) as given_up:
        await node.extend_deadline("ins_1", FENCE, 5.0)
    assert given_up.value.code == "node_unavailable"
    assert stage.node.calls == [("extend_deadline", 5.0)] * remote.SENDS
    assert (await node.host()).cpus == 2


async def test_an_answer_that_is_too_long_fails_its_call_and_no_other(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await stage.client()
    waiting = asyncio.create_task(node.wait_exec("exe_1"))
    await stage.node.begun.wait()
    assert len(await node.timeline("600000")) == 600_000
    monkeypatch.setattr(wire, "MAX_FRAME", 500_000)
    with pytest.raises(CorralError, match="at once") as failed:
        await node.timeline("600000")
    assert (failed.value.code, failed.value.retryable) == ("infra_error", False)
    with pytest.raises(CorralError, match="at once"):
        await node.timeline("0" * 600_000)
    stage.node.go.set()
    assert await waiting == "exe_1"
    assert [name for name, _ in stage.node.calls] == ["wait_exec", "timeline", "timeline"], "none was repeated"


# -- what is much --------------------------------------------------------------------------------------------------------------
def parts_of(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], asyncio.Event]:
    """(kinds of frames as they come at either end, set with the first part of a long one)."""
    kinds: list[int] = []
    begun = asyncio.Event()
    take = wire.Link._take

    def noted(self: wire.Link, frame: list[Any]) -> None:
        kinds.append(frame[0])
        if frame[0] == wire.PART:
            begun.set()
        take(self, frame)

    monkeypatch.setattr(wire.Link, "_take", noted)
    return kinds, begun


async def test_a_long_answer_lets_beats_and_other_calls_pass(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await stage.client(fresh_s=0.0)
    kinds, begun = parts_of(monkeypatch)
    long = asyncio.create_task(node.timeline(str(KEPT)))
    await begun.wait()
    node._connection.link.send(wire.PING, 0)
    assert (await node.host()).cpus == 2
    assert [block async for block in node.get_tar("ins_1", "fine")] == [b"abc", b"def"]
    assert not long.done()
    assert len(await long) == KEPT
    last = max(at for at, kind in enumerate(kinds) if kind == wire.PART)
    for small in (wire.PONG, wire.RESULT, wire.END):
        assert small in kinds[:last], "it went between two parts"
    assert kinds.count(wire.PART) > KEPT // wire.PIECE


async def test_a_long_call_lets_beats_and_other_calls_pass(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await stage.client(fresh_s=0.0)
    kinds, begun = parts_of(monkeypatch)
    content = kept(0, 24 * MIB)
    long = asyncio.create_task(node.put_files("ins_1", FENCE, [("a", 0o644, content)]))
    await begun.wait()
    node._connection.link.send(wire.PING, 0)
    assert (await node.host()).cpus == 2
    assert [name for name, _ in stage.node.calls] == ["host"], "the long one has not come whole"
    await long
    assert stage.node.calls[-1] == ("put_files", [("a", 0o644, content)])
    last = max(at for at, kind in enumerate(kinds) if kind == wire.PART)
    assert wire.PONG in kinds[:last]


async def test_long_frames_of_many_calls_go_in_turn_and_come_whole(stage: Stage) -> None:
    node = await stage.client()
    sizes = [5 * MIB, 3 * MIB, 800_000, 10]
    order: list[int] = []

    async def ask(size: int) -> None:
        assert await node.timeline(str(size)) == b"x" * size
        order.append(size)

    await asyncio.gather(*(ask(size) for size in sizes))
    assert order == sorted(sizes), "the shorter ones do not wait for the longest"


async def test_a_cancel_does_not_overtake_its_long_call(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await stage.client()
    kinds, begun = parts_of(monkeypatch)
    call = asyncio.create_task(node.wait_exec("x" * MIB))
    await begun.wait()
    call.cancel()
    await until(lambda: kinds.count(wire.PART) > MIB // wire.PIECE + 1)  # the last one is the cancel
    assert stage.server is not None
    (peer,) = stage.server._peers
    await until(lambda: not peer._calls)
    assert (await node.host()).cpus == 2


async def test_kept_output_is_as_long_as_it_likes_and_neither_side_holds_much_of_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await stage.client(fresh_s=0.0)
    kinds, _ = parts_of(monkeypatch)
    source = node.kept_output("exe_1", "stdout")
    got = bytearray(await anext(source))
    await asyncio.sleep(0.2)
    assert stage.node.sent * 65536 <= MIB, "the node waits for its reader"
    assert (await node.host()).cpus == 2
    async for piece in source:
        assert len(piece) <= 65536
        got += piece
        if len(got) == 20 * MIB:
            assert (await node.host()).cpus == 2
    assert got == kept(0, KEPT)
    assert wire.PART not in kinds


async def test_kept_output_goes_on_at_its_byte_over_a_broken_connection(stage: Stage) -> None:
    node = await stage.client()
    got, breaks = bytearray(), 0
    async for piece in node.kept_output("exe_1", "stdout", offset=5):
        got += piece
        if len(got) > (breaks + 1) * 10 * MIB:
            breaks += 1
            node._connection.link.abort()
    assert (breaks, got) == (4, kept(5, KEPT))
    asked = [offset for _, offset in stage.node.calls]
    assert (asked[0], asked) == (5, sorted(asked))
    assert len(asked) >= 4


async def test_kept_output_of_a_node_that_stays_away_is_an_error_after_a_while(stage: Stage) -> None:
    node = await stage.client(patience_s=0.2)
    source = node.kept_output("exe_1", "stdout")
    await anext(source)
    await stage.stop()
    with pytest.raises(CorralError) as gone:
        [piece async for piece in source]
    assert gone.value.code == "node_unavailable"


async def test_a_node_that_does_not_come_back_is_said_to_be_unavailable(stage: Stage) -> None:
    node = await stage.client(patience_s=0.2)
    await stage.stop()
    with pytest.raises(CorralError) as gone:
        await node.stats("ins_1")
    assert (gone.value.code, gone.value.status, gone.value.retryable) == ("node_unavailable", 503, True)
    await stage.serve()
    assert (await node.host()).cpus == 2


async def test_a_worker_that_dies_leaves_nothing_half_done_and_nothing_waiting(stage: Stage) -> None:
    node = await stage.client()
    calls = [
        asyncio.create_task(node.create(REQUEST)),
        asyncio.create_task(node.wait_exec("exe_1")),
        asyncio.create_task(node.put_tar("ins_1", FENCE, blocks_of(1000, 10_000), "slow")),
    ]
    await until(lambda: len(stage.node.calls) == 2 and bool(stage.node.got))
    node._connection.link.abort()
    await node.close()
    await until(lambda: "wait_exec" in stage.node.ended)
    stage.node.go.set()
    await until(lambda: sorted(stage.node.ended) == ["create done", "put_tar node_unavailable", "wait_exec"])
    for call in calls:
        with pytest.raises(CorralError):
            await call


async def test_a_call_that_joined_one_that_was_cancelled_is_done_for_its_own_caller(stage: Stage) -> None:
    """Two workers ask for one instance; the first stops in the middle."""
    begun: asyncio.Future[None] | None = None
    real = stage.node.create

    async def joined(request: CreateInstance, progress: Any = None) -> Any:
        nonlocal begun
        if begun is not None and not begun.done():
            await asyncio.shield(begun)
        begun = asyncio.get_running_loop().create_future()
        mine = begun
        try:
            return await real(request, progress)
        finally:
            mine.cancel()

    stage.node.create = joined  # type: ignore[method-assign]
    one, two = await stage.client(), await stage.client()
    first = asyncio.create_task(one.create(REQUEST))
    await stage.node.begun.wait()
    second = asyncio.create_task(two.create(REQUEST))
    await two.host()
    first.cancel()
    await until(lambda: stage.node.ended == ["create cancelled"])
    stage.node.go.set()
    assert (await second).instance_id == "ins_1"


# -- notices -------------------------------------------------------------------------------------------------------------------
async def test_a_notice_waits_for_a_worker_and_reaches_one_of_them(stage: Stage) -> None:
    stage.node.notices.put_nowait("ins_a")
    await asyncio.sleep(0.05)
    one, two = await stage.client(), await stage.client()
    assert await one.lost() == "ins_a"
    second = asyncio.create_task(two.lost())
    await asyncio.sleep(0.1)
    assert not second.done()
    stage.node.notices.put_nowait("ins_b")
    assert await second == "ins_b"


async def test_a_notice_whose_worker_died_with_it_reaches_another_and_one_that_was_dealt_with_does_not(
    stage: Stage,
) -> None:
    one, two = await stage.client(), await stage.client()
    for name in ("ins_a", "ins_b"):
        stage.node.notices.put_nowait(name)
    assert await one.lost() == "ins_a"
    assert await one.lost() == "ins_b"  # asking again says that ins_a is done
    await one.close()
    assert await two.lost() == "ins_b"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            raise AssertionError(await two.lost())


# -- the other end -------------------------------------------------------------------------------------------------------------
async def test_a_stranger_is_not_served(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire.os, "geteuid", lambda: os.getuid() + 1)
    reader, writer = await asyncio.open_unix_connection(str(stage.path / "node.sock"))
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\0\0\0\2\x91\1", b"\0\0\0\1\xc1"])
async def test_what_is_no_frame_ends_the_connection_and_nothing_else(stage: Stage, said: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(stage.path / "node.sock"))
    writer.write(said)
    writer.write_eof()
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    assert (await (await stage.client()).host()).cpus == 2


async def test_a_node_of_another_version_is_told_and_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "VERSIONS", (7, 9))
    with pytest.raises(CorralError, match="speaks versions") as refused:
        monkeypatch.setattr(remote, "agreed", lambda theirs: wire.agreed((7, 9)))
        await stage.client(patience_s=0.5)
    assert not refused.value.retryable
