"""Streams of results: what is much is told in pieces, and says the same as if it had been told at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.api.pieces import encoded, written
from corral.domain.facts import StreamFacts
from corral.domain.result import stream_document
from corral.errors import CorralError
from corral.services.output import GLIMPSE, LargeStream, glimpse, kept_document

from .conftest import World
from .test_gate import Call


class Kept:
    """A node that keeps one output and hands it out in pieces of `size`."""

    def __init__(self, data: bytes, size: int = 7) -> None:
        self.data = data
        self.size = size
        self.given = 0
        self.closed = 0
        self.gone = False
        self.shorter_at_second = False

    async def kept_output(self, exec_id: str, stream: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        if self.gone:
            raise CorralError("not_found", "no exec")
        try:
            for at in range(offset, len(self.data), self.size):
                self.given += 1
                yield self.data[at : at + self.size]
        finally:
            self.closed += 1
            if self.shorter_at_second:
                self.data = b""


async def shown(document: Any) -> Any:
    whole, parts = encoded(document)
    assert not whole
    return json.loads(b"".join([piece async for piece in written(parts)]))


words = st.lists(
    st.sampled_from(
        [b"a", b"\n", b"\\", b'"', b"\x00", "你好".encode(), "😀".encode(), b"\xff", b"\xe4\xbd", b"\xed\xa0\x80"]
    ),
    max_size=20,
).map(b"".join)


@given(head=words, tail=words, lost=st.integers(0, 3), size=st.integers(1, 9))
def test_a_stream_in_pieces_is_the_same_document(head: bytes, tail: bytes, lost: int, size: int) -> None:
    facts = (
        StreamFacts(len(head + tail) + lost, len(head), len(tail))
        if lost
        else StreamFacts(len(head + tail), len(head + tail), 0)
    )
    node: Any = Kept(head + tail, size)
    expected = stream_document(facts, head, tail)
    document = {"你": LargeStream(node, "exe_1", "stdout", facts), "b": ["\udcff", None]}
    assert asyncio.run(shown(document)) == {"你": expected, "b": ["\udcff", None]}
    assert asyncio.run(kept_document(node, "exe_1", "stdout", facts)) == expected


async def test_output_that_was_removed_is_shown_as_none_of_it_kept() -> None:
    node: Any = Kept(b"x" * 100)
    node.gone = True
    facts = StreamFacts(100, 100, 0)
    expected = stream_document(facts, b"", b"")
    assert await shown({"a": LargeStream(node, "exe_1", "stdout", facts)}) == {"a": expected}
    assert await kept_document(node, "exe_1", "stdout", facts) == expected


async def test_output_that_goes_away_in_the_middle_of_an_answer_is_an_error_and_not_a_shorter_output() -> None:
    node: Any = Kept(b"x" * 100)
    node.shorter_at_second = True
    with pytest.raises(CorralError):
        await shown({"a": LargeStream(node, "exe_1", "stdout", StreamFacts(100, 100, 0))})


async def test_two_streams_of_a_document_stand_where_they_belong_and_no_piece_is_long() -> None:
    size = 3 * 1024 * 1024
    node: Any = Kept(b"\xff" + b"y" * (size - 1), 65536)
    facts = StreamFacts(size, size, 0)
    document = {
        "o": LargeStream(node, "exe_1", "stdout", facts),
        "x": 1,
        "e": LargeStream(node, "exe_1", "stderr", facts),
    }
    pieces = [piece async for piece in written(encoded(document)[1])]
    assert json.loads(b"".join(pieces)) == {
        "o": stream_document(facts, node.data, b""),
        "x": 1,
        "e": stream_document(facts, node.data, b""),
    }
    assert max(map(len, pieces)) < 200_000
    assert node.closed == 6


async def test_a_view_reads_only_what_it_can_show() -> None:
    size = 64 * 1024 * 1024
    node: Any = Kept(b"head" + b"x" * (size - 8) + b"tail", 65536)
    seen = await glimpse(node, "exe_1", "stdout", StreamFacts(size, size, 0))
    assert node.given <= GLIMPSE // 65536 + 2
    assert (seen["kept_bytes"], seen["bytes"], seen["head_bytes"]) == (GLIMPSE, size, GLIMPSE // 2)
    assert (seen["text"][:4], seen["text"][-4:]) == ("head", "tail")
    cut = StreamFacts(10 * size, 100, size - 100)
    seen = await glimpse(node, "exe_1", "stdout", cut)
    assert (seen["head_bytes"], seen["kept_bytes"], seen["bytes"]) == (100, 100 + GLIMPSE // 2, 10 * size)
    assert (seen["text"][:4], seen["text"][-4:]) == ("head", "tail")


async def test_every_answer_with_a_result_is_the_same_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"command": ["print", "你好"], "keep": True}
    run = (await world.call("POST", "/v1/runs", body)).document
    assert run is not None
    made = (await world.call("POST", f"/v1/sandboxes/{run['sandbox_id']}/execs", {"argv": ["print", "2"]})).document
    assert made is not None
    monkeypatch.setattr("corral.services.documents.LARGE", 0)
    large: list[LargeStream] = []
    json_of = LargeStream.json
    monkeypatch.setattr(LargeStream, "json", lambda self: (large.append(self), json_of(self))[1])
    for method, path in (
        ("GET", f"/v1/runs/{run['id']}"),
        ("GET", f"/v1/runs/{run['id']}?view=agent"),
        ("POST", f"/v1/runs/{run['id']}/cancel"),
        ("GET", f"/v1/execs/{made['id']}"),
        ("POST", f"/v1/execs/{made['id']}/cancel"),
    ):
        route, _, query = path.partition("?")
        expected = await world.call(method, route, **dict([query.split("=")] if query else []))
        call = Call(world, "the-key-of-the-server", method, path)
        await asyncio.wait_for(call.task, 10)
        assert (call.status, json.loads(call.body)) == (expected.status, expected.document), path
        assert len(large) == 1, path
        large.clear()
