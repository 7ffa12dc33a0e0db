"""Hostile files, fuzzed: trees that change at every look of the host, and archives that the caller unpacks on a disk of their own."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fuzzing import campaign, trees
from fuzzing.clock import Broken
from fuzzing.tape import Case

FRESH = int.from_bytes(os.urandom(4), "big")


@pytest.mark.parametrize("seed", [1, FRESH], ids=["fixed", "fresh"])
@pytest.mark.parametrize(("target", "count"), [("trees", 60), ("archives", 150)])
def test_whatever_lies_in_the_files_nothing_of_the_host_is_read_or_written(target: str, count: int, seed: int) -> None:
    assert campaign.some(target, seed, count, seconds=4.0)


def test_a_host_that_follows_links_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judges judge: names that are opened in the usual way lead out of the tree within a few cases."""

    def plainly(directory: int, name: bytes, flags: int, mode: int = 0) -> int:
        return os.open(name, flags & ~os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=directory)

    monkeypatch.setattr(trees.beneath, "open_one", plainly)
    with pytest.raises(Broken):
        campaign.some("trees", 1, 300, seconds=60.0)


def test_an_unpacking_that_leaves_its_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trees.client_trees.unpack_stream

    def escaping(blocks: Any, dst: str, name: str) -> Any:
        with open(f"{dst}/../../outside/new", "w"):
            pass
        return real(blocks, dst, name)

    monkeypatch.setattr(trees.client_trees, "unpack_stream", escaping)
    with pytest.raises(Broken, match="outside the tree"):
        trees.unpack(Case("archives", b"\x01", b""))
