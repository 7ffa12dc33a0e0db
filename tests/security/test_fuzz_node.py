"""A captured guest against a whole node, fuzzed: execs, files, archives, watches, collection, restarts; a neighbour looks on.

Time is virtual, what the host sees of processes is what the model says really lives: `tests/fuzzing`.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import campaign, node
from fuzzing.clock import Broken
from fuzzing.guest import shared
from fuzzing.tape import Case, fresh

FRESH = int.from_bytes(os.urandom(4), "big")
EXEC = bytes([0, 0, 0, 0, 0, 3])
"""One exec that says nothing, to be ended with whatever it began, nothing else at the same time."""

FOUND = {
    "an end that waits for an exec whose start is refused": ("0000000000000000003e00007f", "0000d1"),
    "a failure at closing that nobody hears": ("000000002c0000000059bc00ee", "0000000000000000f9"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_not_there_any_more(name: str) -> None:
    host, guest = FOUND[name]
    node.run(Case("node", bytes.fromhex(host), bytes.fromhex(guest)))


@pytest.mark.parametrize("seed", [1, FRESH], ids=["fixed", "fresh"])
def test_whatever_a_guest_does_the_node_holds_its_promises(seed: int) -> None:
    assert campaign.some("node", seed, 60, seconds=7.0)


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40))
def test_what_two_outputs_share_is_found_to_the_byte(front: bytes, one: bytes, other: bytes) -> None:
    here, there = front + one, front + other
    same = shared(here, there)
    assert here[:same] == there[:same] and len(front) <= same
    assert same == min(len(here), len(there)) or here[same] != there[same]


def test_an_honest_guest_is_served_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: results are told, and `ok` where a program ended well."""
    reasons: list[str] = []
    real = node.judge

    def judged(*values: Any) -> Any:
        verdict = real(*values)
        reasons.append(verdict.reason)
        return verdict

    monkeypatch.setattr(node, "judge", judged)
    rng = random.Random(3)
    for _ in range(8):
        node.run(Case("node", fresh("node", rng).host, b""))
    assert {"ok", "nonzero_exit"} <= set(reasons)


def _broken_by(case: Case) -> str:
    with pytest.raises(Broken) as caught:
        node.run(case)
    return str(caught.value)


def test_a_node_that_believes_a_kill_without_looking_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judges judge: the same lie that the node finds out is seen where it is not looked for."""
    waits, says_that_it_kills = bytes([0, 0, 0, 0, 2, 0, 0, 0]), bytes([0, 0, 0, 0, 255])
    lie = Case("node", waits, says_that_it_kills)
    node.run(lie)

    async def believing(self: Any) -> bool:
        return True

    monkeypatch.setattr(node.execs_module.Exec, "_witnessed", believing)
    assert "the host sees it run" in _broken_by(lie)


def test_a_neighbour_that_is_disturbed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any) -> int:
        return 0

    monkeypatch.setattr(node.fake._Exec, "_do_cat", nothing)
    assert "disturbed" in _broken_by(Case("node", EXEC, b""))


def test_a_file_where_none_belongs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = node.World.finish

    async def finish(self: Any) -> None:
        (self.base / "state" / "spool" / "odd").mkdir()
        (self.base / "state" / "spool" / "odd" / "thing").touch()
        await real(self)

    monkeypatch.setattr(node.World, "finish", finish)
    assert "odd things in a spool" in _broken_by(Case("node", EXEC, b""))
