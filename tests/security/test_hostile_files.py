"""A captured guest answers the file API: whatever it says is bounded, checked in shape, or an error; nothing of it is left behind."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from corral.channel import Data, Ended
from corral.channel.answers import unknown_status
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.node import transfers

FENCE = Fence(1, 1)
ENTRY: dict[str, Any] = {
    "path": "/workspace/f", "type": "file", "size": 5, "mode": 420, "uid": 1000, "gid": 1000, "mtime_ns": 1, "inode": 2,
}  # fmt: skip
MIB = 1 << 20


def line(**more: Any) -> bytes:
    return json.dumps({**ENTRY, **more}).encode() + b"\n"


@dataclass
class Guest:
    """What a guest sends for one exec, and what was asked of it."""

    pieces: Callable[[], Iterator[bytes]]
    errors: bytes = b""
    exit_code: int | None = 0
    endless: bool = False
    reads: bool = True
    transfers: int = 0
    killed: list[str] = field(default_factory=list)
    given: int = 0
    instance: Any = field(default_factory=lambda: SimpleNamespace(exec_uid=1000, guest_uid=0, same_uid=False))
    floor: Fence = FENCE

    # -- as a body
    async def client(self) -> Guest:
        return self

    def drop_base(self) -> None: ...

    def check_free(self) -> None: ...

    def spawn(self, work: Any) -> None:
        asyncio.get_running_loop().create_task(work)

    # -- as a client
    async def start_exec(self, spec: dict[str, Any], *, fence: Fence) -> Any:
        return dict(unknown_status(spec["exec_id"])) | {"state": "running", "started": True}

    async def attach(self, exec_id: str) -> AsyncIterator[Any]:
        at = 0
        for piece in self.pieces():
            yield Data("stdout", at, piece, 0)
            at += len(piece)
            await asyncio.sleep(0)
        if self.errors:
            yield Data("stderr", 0, self.errors, 0)
        if self.endless:
            await asyncio.Event().wait()
        status: Any = dict(unknown_status(exec_id)) | {"state": "ended", "started": True, "exit_code": self.exit_code}
        yield Ended(status)

    async def stdin(self, exec_id: str, data: bytes, eof: bool = False, *, fence: Fence) -> bool:
        self.given += len(data)
        await asyncio.sleep(0)
        return self.reads

    async def kill_exec(self, exec_id: str, grace_s: float, *, fence: Fence) -> None:
        self.killed.append(exec_id)

    def forget_exec(self, exec_id: str, *, fence: Fence) -> None: ...


def saying(*pieces: bytes, **more: Any) -> Any:
    return Guest(lambda: iter(pieces), **more)


def for_ever(piece: bytes) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        while True:
            yield piece

    return pieces


async def stat(guest: Any) -> Any:
    return await transfers.stat(guest, "f", follow=True, user="sandbox")


async def page(guest: Any) -> Any:
    return await transfers.list_page(guest, "d", recursive=False, limit=10, after="", user="sandbox")


async def read(guest: Any) -> bytes:
    return b"".join([piece async for piece in await transfers.read(guest, "f", None, None, "sandbox")])


async def write(guest: Any, size: int = 5) -> Any:
    async def blocks() -> AsyncIterator[bytes]:
        yield bytes(size)

    return await transfers.write(
        guest, FENCE, "f", blocks(), mode=None, parents=True, overwrite=True, size=None, user="sandbox"
    )


async def watch(guest: Any) -> list[Any]:
    return [event async for event in await transfers.watch(guest, "d", True, "sandbox")]


async def refused(work: Any, guest: Any, code: str = "infra_error") -> CorralError:
    """The call ends in an error, soon, in little memory, with nothing left."""
    tracemalloc.start()
    try:
        with pytest.raises(CorralError) as caught:
            await asyncio.wait_for(work, 60)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
    assert caught.value.code == code
    assert guest.transfers == 0
    return caught.value


async def test_the_honest_answers_of_these_tests_are_taken() -> None:
    assert (await stat(saying(line()))).size == 5
    assert (await page(saying(line(), b'{"next":null}\n'))).next is None
    assert await read(saying(line(offset=0, length=5) + b"hel", b"lo")) == b"hello"
    assert (await write(saying(line(created=True))))[1] is True
    began = b'{"event":"started"}\n'
    assert len(await watch(saying(began, b'{"event":"created","path":"/w/f","directory":false}\n'))) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"size": -1},
        {"size": 2**80},
        {"size": "5"},
        {"size": True},
        {"mode": 2**40},
        {"uid": -5},
        {"type": "portal"},
        {"type": None},
        {"path": "relative"},
        {"path": ""},
        {"path": "/a\0b"},
        {"path": "/\ud800"},
        {"path": "/" + "x" * 20_000},
        {"mtime_ns": 1e300},
        {"inode": None},
        {"target": 7},
        {"target": "a\0"},
        {"error": ["x"]},
    ],
)
async def test_an_entry_that_cannot_be_one_is_an_error(change: dict[str, Any]) -> None:
    guest = saying(line(**change))
    await refused(stat(guest), guest)
    guest = saying(line(**change), b'{"next":null}\n')
    await refused(page(guest), guest)


@pytest.mark.parametrize("answer", [b"", b"\n", b"[]\n", b"nonsense\n", b'{"a":' * 5000, b"1" * 9000, b"\xff\xfe\n"])
async def test_what_is_no_answer_is_an_error(answer: bytes) -> None:
    for call in (stat, page, write, read, watch):
        guest = saying(answer)
        await refused(call(guest), guest)


async def test_an_answer_without_end_is_cut_off() -> None:
    for call in (stat, page, write, read, watch):
        guest: Any = Guest(for_ever(b"x" * 65536))
        await refused(call(guest), guest)
        assert guest.killed
    guest = Guest(for_ever(line()))
    await refused(page(guest), guest)


async def test_more_entries_than_were_asked_for_are_an_error() -> None:
    guest = saying(line() * 11, b'{"next":null}\n')
    await refused(page(guest), guest)
    guest = saying(line())
    await refused(page(guest), guest)
    guest = saying(line(), b'{"next":"a\\u0000"}\n')
    await refused(page(guest), guest)


@pytest.mark.parametrize("sent", [b"hell", b"", b"hello!", b"x" * MIB])
async def test_content_is_exactly_as_long_as_promised_or_an_error(sent: bytes) -> None:
    guest = saying(line(offset=0, length=5), sent)
    await refused(read(guest), guest)


async def test_content_without_end_is_cut_off_at_its_promised_length() -> None:
    pieces = for_ever(b"x" * 65536)

    def all_of_it() -> Iterator[bytes]:
        yield line(offset=0, length=3 * MIB)
        yield from pieces()

    guest: Any = Guest(all_of_it)
    await refused(read(guest), guest)


@pytest.mark.parametrize("numbers", [{"offset": -1, "length": 5}, {"offset": 0}, {"offset": 0, "length": 2**70}])
async def test_a_part_that_cannot_be_one_is_an_error(numbers: dict[str, int]) -> None:
    guest = saying(line(**numbers), b"hello")
    await refused(read(guest), guest)


async def test_a_write_that_is_said_to_be_of_another_size_is_an_error() -> None:
    guest = saying(line(size=4))
    await refused(write(guest), guest)


async def test_a_write_that_ends_before_its_end_is_no_success() -> None:
    guest = saying(line(size=5), reads=False)
    await refused(write(guest), guest)
    guest = saying(line(size=4 * MIB))

    async def late() -> AsyncIterator[bytes]:
        for _ in range(16):
            yield bytes(MIB // 4)
            await asyncio.sleep(0)

    work = transfers.write(
        guest, FENCE, "f", late(), mode=None, parents=True, overwrite=True, size=None, user="sandbox"
    )
    await refused(work, guest)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (b'{"code":"not_found","detail":"no","entry":"f"}\n', "not_found"),
        (b'{"code":"sandbox_deleted","detail":"no","entry":null}\n', "infra_error"),
        (b'{"code":"shutting_down","detail":"no"}\n', "infra_error"),
        (b'{"code":["not_found"],"detail":"no"}\n', "infra_error"),
        (b"[1]\n7\nnull\n", "infra_error"),
        (b"", "infra_error"),
        (b"\xff" * 65536, "infra_error"),
        (b"[" * 60_000, "infra_error"),
    ],
)
async def test_only_refusals_of_the_file_program_are_passed_on(words: bytes, code: str) -> None:
    for call in (stat, page, write, read, watch):
        guest = saying(errors=words, exit_code=3)
        await refused(call(guest), guest, code)


async def test_the_words_of_a_refusal_are_bounded() -> None:
    words = json.dumps({"code": "not_found", "detail": "d" * 9000, "entry": "e" * 9000, "size": 2**90}).encode()
    guest = saying(errors=words, exit_code=3)
    error = await refused(stat(guest), guest, "not_found")
    assert (len(error.detail), len(error.facts["entry"])) == (2000, 4096)
    assert "size" not in error.facts


@pytest.mark.parametrize(
    "event",
    [
        b'{"event":"ended"}\n',
        b'{"event":"created"}\n',
        b'{"event":"created","path":7}\n',
        b'{"event":"moved","path":"/a"}\n',
        b'{"event":"created","path":"/\\ud800"}\n',
        b'{"event":"created","path":"/a"',
    ],
)
async def test_an_event_that_cannot_be_one_ends_the_watch(event: bytes) -> None:
    guest = saying(b'{"event":"started"}\n', event)
    await refused(watch(guest), guest)


async def test_events_are_taken_one_at_a_time() -> None:
    taken = 0

    def pieces() -> Iterator[bytes]:
        nonlocal taken
        yield b'{"event":"started"}\n'
        while True:
            taken += 1
            yield b'{"event":"created","path":"/a","directory":false}\n'

    guest: Any = Guest(pieces)
    events = await transfers.watch(guest, "d", True, "sandbox")
    for _ in range(5):
        await anext(events)
    assert taken <= 6
    await events.aclose()
    assert guest.killed and guest.transfers == 0


async def test_a_reading_that_nobody_begins_is_ended() -> None:
    guest: Any = saying(line(offset=0, length=5), endless=True)
    blocks = await transfers.read(guest, "f", None, None, "sandbox")
    assert guest.transfers == 1
    del blocks
    for _ in range(100):
        await asyncio.sleep(0)
    assert guest.transfers == 0 and guest.killed
