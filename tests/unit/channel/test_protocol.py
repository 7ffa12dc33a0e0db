"""Frames: what is packed is unpacked, however the bytes are cut; what is not a frame is refused early."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.guest import protocol

LIMITS = {kind: 1 << 20 for kind in range(1, 8)}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(st.characters(), max_size=8), json_values, max_size=5))
def test_control_values_round_trip_surrogates_included(value: dict) -> None:
    encoded = protocol.dumps(value)
    assert protocol.loads(encoded) == value
    assert json.loads(encoded) == value


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 5, 6, 7]), st.binary(max_size=300)), max_size=8), st.data())
def test_frames_survive_any_cutting(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(protocol.frame(kind, payload) for kind, payload in frames)
    decoder = protocol.Decoder(LIMITS)
    out = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        out += decoder.feed(stream[:size])
        stream = stream[size:]
    assert out == frames


@given(st.binary(max_size=2000))
@settings(max_examples=300)
def test_garbage_never_crashes_the_decoder(garbage: bytes) -> None:
    decoder = protocol.Decoder(LIMITS)
    try:
        for kind, payload in decoder.feed(garbage):
            for read in (protocol.loads, protocol.split_data, protocol.split_ack, protocol.split_input):
                try:
                    read(payload)
                except protocol.ProtocolError:
                    pass
            assert kind in LIMITS
    except protocol.ProtocolError:
        pass


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[", b"[]", b"1", b"nul", b"null", b"{} ", b"{}{}", b'{"a":NaN}', b'{"a":Infinity}', b"\xff", b'{"a":"\x01"}',
        b'{"a":' * 100_000, b"[" * 100_000, b'{"a":' + b"1" * 10_000 + b"}", "{\"é\":1}".encode(),
    ],
)  # fmt: skip
def test_what_is_not_one_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(protocol.ProtocolError):
        protocol.loads(text)


def test_a_length_above_the_limit_is_refused_before_its_payload() -> None:
    decoder = protocol.Decoder({protocol.REPLY: 100})
    with pytest.raises(protocol.ProtocolError):
        decoder.feed(b"\xff\xff\xff\xff\x03")
    with pytest.raises(protocol.ProtocolError):
        protocol.Decoder({protocol.REPLY: 100}).feed(b"\x00\x00\x00\x00\x63")


@given(st.binary(max_size=200), st.integers(0, 60))
def test_a_resync_is_found_after_any_half_frame(rubbish: bytes, cut: int) -> None:
    nonce = os.urandom(protocol.NONCE)
    sync = protocol.MAGIC + nonce
    tail = protocol.control(protocol.REQUEST, {"id": 1})
    decoder = protocol.Decoder(LIMITS, resync=True)
    half = protocol.frame(protocol.REQUEST, b"x" * 100_000)[: 5 + len(rubbish)]
    out = decoder.feed(half)
    out += decoder.feed(sync[:cut])
    out += decoder.feed(sync[cut:] + tail)
    assert out == [(protocol.SYNC, nonce), (protocol.REQUEST, b'{"id":1}')]
