"""Values on the wire arrive as they were."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.domain.facts import ExecFacts, StartFailure, StreamFacts, Usage
from corral.domain.fence import Fence
from corral.domain.limits import LimitModes, Limits
from corral.ports import node as port
from corral.ports.runtime import Evidence, RuntimeInfo, Stats
from corral.wire.codec import _known, pack, unpack
from corral.wire.methods import methods

FACTS = ExecFacts(
    True,
    exit_code=3,
    ended_by="timeout",
    start_failure=StartFailure("argv", "ENOENT", "no \udcff"),
    usage=Usage(cpu_seconds=0.5),
    stdout=StreamFacts(10, 5, 5),
)
VALUES: list[Any] = [
    None,
    "你好 \udcff \0",
    b"\xff\0",
    (1, [2, (3,)], {"a": (None, True)}),
    frozenset({"a", "b"}),
    2**64,
    -(2**70),
    {1: "one"},
    FACTS,
    Fence(2, 7),
    port.CreateInstance("ins", "sbx", 1, Fence(1, 2), "crun", "host", Limits(), 3.5, frozenset({"unsafe_one_uid"})),
    port.ExecSpec("exe", ("a", "\udc80"), {"K": "V"}, stdin=b"x", pty=(24, 80)),
    port.Collected((port.FileChange("/a", "created", "file", 1, "0644", None),), False, ({"path": "a"},)),
    port.FileInfo("/a", "file", 1, 0o644, 0, 0, 2**62, 5),
    Evidence(False, ("a",)),
    Stats(memory_bytes=4),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_arrives_as_it_was(value: Any) -> None:
    came = unpack(pack(value))
    assert came == value
    assert type(came) is type(value)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(TREES)
def test_any_tree_of_plain_values_arrives_as_it_was(value: Any) -> None:
    assert unpack(pack(value)) == value


def test_members_of_a_newer_version_are_ignored_and_missing_ones_have_their_defaults() -> None:
    newer = msgpack.ExtType(1, msgpack.packb(["Stats", {"pids": 3, "colour": "red"}]))
    assert unpack(msgpack.packb(newer)) == Stats(pids=3)


def test_what_is_no_value_of_ours_is_refused_on_both_sides() -> None:
    with pytest.raises(TypeError):
        pack(object())
    for raw in (b"", b"\xc1", msgpack.packb(msgpack.ExtType(1, msgpack.packb(["Popen", {}]))), b"\x92\x01"):
        with pytest.raises(ValueError, match="not a value of ours"):
            unpack(raw)


def test_every_dataclass_of_the_port_can_travel() -> None:
    mine = {value for value in vars(port).values() if isinstance(value, type) and dataclasses.is_dataclass(value)}
    assert mine <= set(_known().values())
    assert {RuntimeInfo, LimitModes} <= set(_known().values())


def test_every_method_of_the_port_is_asked_in_its_own_way() -> None:
    kinds = {name: method.kind for name, method in methods().items()}
    assert {"create", "wait_exec", "put_tar", "collect", "checkpoint_instance"} <= {
        k for k, v in kinds.items() if v == "call"
    }
    assert {name for name, kind in kinds.items() if kind == "stream"} == {
        "get_tar",
        "stream_exec",
        "kept_output",
        "raw_output",
    }
    assert {name for name, kind in kinds.items() if kind == "opened"} == {"read_file", "watch_files"}
    assert {name for name, method in methods().items() if method.source} == {"put_tar", "write_file"}
    assert methods()["read_file"].members == ("info", "offset", "length")
    assert methods()["create"].progress
