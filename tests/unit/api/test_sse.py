"""Streams on the wire: whole code points, exact bytes, cursors that resume at the very byte."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.api import sse
from corral.errors import CorralError
from corral.services.events import StreamEvent


async def source(chunks, ended=True):
    """Chunks as a node gives them; its cursor is the number of chunks that were read."""
    at = {"stdout": 0, "stderr": 0}
    for number, (name, data) in enumerate(chunks, 1):
        yield StreamEvent(name, str(number), at[name], data)
        at[name] += len(data)
    if ended:
        yield StreamEvent("ended", None, doc={"result": {}})


async def from_cursor(chunks, text):
    """What the service gives for a cursor of ours."""
    start = sse.Position.parse(text)
    skip = int(start.node or 0)
    at = {"stdout": 0, "stderr": 0}

    async def rest():
        for number, (name, data) in enumerate(chunks, 1):
            if number > skip:
                yield StreamEvent(name, str(number), at[name], data)
            at[name] += len(data)
        yield StreamEvent("ended", None, doc={"result": {}})

    return [event async for event in sse.position(rest(), start, whole=True)]


def joined(events, name):
    return b"".join(event.data for event in events if event.kind == name)


CHUNKS = st.lists(
    st.tuples(st.sampled_from(["stdout", "stderr"]), st.one_of(st.binary(min_size=1, max_size=6), st.sampled_from(
        ["你".encode()[:1], "你".encode()[1:], "☕".encode(), "𝄞".encode()[:3], "𝄞".encode()[3:], b"a"]
    ))),
    max_size=12,
)  # fmt: skip


@given(CHUNKS)
async def test_every_byte_comes_once_and_in_order(chunks):
    for whole in (True, False):
        events = [event async for event in sse.position(source(chunks), sse.Position(), whole=whole)]
        for name in ("stdout", "stderr"):
            assert joined(events, name) == b"".join(d for n, d in chunks if n == name)
            at = 0
            for event in events:
                if event.kind == name:
                    assert event.offset == at
                    at += len(event.data)
        assert events[-1].kind == "ended"


@given(CHUNKS)
async def test_any_cursor_resumes_without_loss_or_repetition(chunks):
    events = [event async for event in sse.position(source(chunks), sse.Position(), whole=True)]
    for seen in range(len(events)):
        resumed = await from_cursor(chunks, events[seen].cursor)
        for name in ("stdout", "stderr"):
            before = joined(events[: seen + 1], name)
            assert before + joined(resumed, name) == b"".join(d for n, d in chunks if n == name)


async def test_text_arrives_byte_by_byte_without_a_broken_code_point():
    raw = "café ☕ 你好 𝄞".encode()
    chunks = [("stdout", raw[i : i + 1]) for i in range(len(raw))]
    lines = [sse.encode(e, text=True) async for e in sse.position(source(chunks), sse.Position(), whole=True)]
    documents = [json.loads(line.split(b"data: ")[1]) for line in lines[:-1]]
    assert all("base64" not in document for document in documents)
    assert "".join(document["text"] for document in documents) == "café ☕ 你好 𝄞"


async def test_bytes_that_are_not_text_go_as_base64():
    raw = bytes(range(256))
    [line, _] = [
        sse.encode(e, text=True) async for e in sse.position(source([("stdout", raw)]), sse.Position(), whole=True)
    ]
    assert base64.b64decode(json.loads(line.split(b"data: ")[1])["base64"]) == raw


async def test_a_hole_is_never_hidden():
    async def holed():
        yield StreamEvent("stdout", "1", 0, b"ab")
        yield StreamEvent("stdout", "2", 10, b"z")

    events = [event async for event in sse.position(holed(), sse.Position(), whole=False)]
    assert [(e.kind, e.offset) for e in events] == [("stdout", 0), ("gap", 2), ("stdout", 10)]
    assert events[1].doc == {"stream": "stdout", "offset": 2, "bytes": 8}


@pytest.mark.parametrize("told", [True, False])
async def test_what_was_held_of_a_code_point_comes_before_the_hole_that_cuts_it(told):
    async def holed():
        yield StreamEvent("stdout", "1", 0, b"a" + "好".encode()[:2])
        if told:
            yield StreamEvent("gap", None, 3, b"", {"stream": "stdout", "offset": 3, "bytes": 7})
        yield StreamEvent("stdout", "2", 10, b"z")

    events = [event async for event in sse.position(holed(), sse.Position(), whole=True)]
    assert [(e.kind, e.offset, e.data) for e in events] == [
        ("stdout", 0, b"a"),
        ("stdout", 1, "好".encode()[:2]),
        ("gap", 3, b""),
        ("stdout", 10, b"z"),
    ]
    assert [sse.Position.parse(e.cursor).delivered["stdout"] for e in events] == [1, 3, 10, 11]


@pytest.mark.parametrize("text", ["x", "1", "1.2", "-1.0.", "1.x.y", "٣.0.", "1" * 19 + ".0.", "0.0." + "a" * 400])
def test_foreign_cursors_are_refused(text):
    with pytest.raises(CorralError) as caught:
        sse.Position.parse(text)
    assert caught.value.code == "invalid_value"


def test_a_cursor_survives_its_text():
    position = sse.Position("3.7", {"stdout": 3, "stderr": 9})
    assert sse.Position.parse(str(position)) == position
    assert sse.Position.parse(None) == sse.Position() == sse.Position.parse("")


@given(st.binary(max_size=200), st.integers(0, 2**40), st.booleans())
def test_every_event_is_json_with_its_offset_and_exact_bytes(data, offset, text):
    wire = sse.encode(StreamEvent("stderr", "1.2.x", offset, data), text=text)
    kind, cursor, line, *end = wire.split(b"\n")
    assert (kind, cursor, end) == (b"event: stderr", b"id: 1.2.x", [b"", b""])
    document = json.loads(line.removeprefix(b"data: "))
    sent = base64.b64decode(document["base64"]) if "base64" in document else document["text"].encode()
    assert (document["offset"], sent, len(document)) == (offset, data, 2)
