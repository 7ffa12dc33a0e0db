"""Answers of probes: one start tells it for all state directories of root, what fails is asked again, a fresh look really looks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from corral.domain.limits import LimitModes
from corral.node.probes import Probes
from corral.ports.runtime import RuntimeInfo

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="answers are shared between state directories of root only")


class Probed:
    """Only what is asked of a runtime here."""

    def __init__(self, key: str | None = "k", usable: bool = True) -> None:
        self.key, self.usable, self.asked = key, usable, 0

    def probe_key(self) -> str | None:
        return self.key

    async def probe(self) -> RuntimeInfo:
        self.asked += 1
        reason = None if self.usable else "it does not start"
        return RuntimeInfo("r", self.usable, reason, 2, "1", {"pause": True}, LimitModes(memory="enforced"), 5.0)


def ask(runtime: Probed, state: Path, run: Path, **how: Any) -> RuntimeInfo:
    state.mkdir(exist_ok=True)
    runtimes: Any = {"r": runtime}
    return asyncio.run(Probes(str(state / "probes.json"), runtimes, str(run)).all(**how))[0]


@needs_root
def test_another_state_directory_takes_the_answer(tmp_path: Path) -> None:
    first, second = Probed(), Probed()
    told = ask(first, tmp_path / "a", tmp_path / "run")
    assert ask(second, tmp_path / "b", tmp_path / "run") == told
    assert (first.asked, second.asked) == (1, 0)
    assert ask(Probed(key=None), tmp_path / "b", tmp_path / "run") == told, "it is the state directory's own now"


@needs_root
def test_another_program_is_asked(tmp_path: Path) -> None:
    ask(Probed("one"), tmp_path / "a", tmp_path / "run")
    other = Probed("another")
    ask(other, tmp_path / "b", tmp_path / "run")
    assert other.asked == 1


@needs_root
def test_what_did_not_work_is_asked_again_and_takes_an_older_answer_away(tmp_path: Path) -> None:
    ask(Probed(), tmp_path / "a", tmp_path / "run")
    broken = Probed(usable=False)
    assert not ask(broken, tmp_path / "a", tmp_path / "run", fresh=True).usable
    again = Probed()
    assert ask(again, tmp_path / "b", tmp_path / "run").usable
    assert (broken.asked, again.asked) == (1, 1)


@needs_root
def test_a_fresh_look_looks(tmp_path: Path) -> None:
    ask(Probed(), tmp_path / "a", tmp_path / "run")
    other = Probed()
    ask(other, tmp_path / "b", tmp_path / "run", fresh=True)
    assert other.asked == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"name": "r"}', '{"limits": 3}'])
@needs_root
def test_a_damaged_answer_is_none(tmp_path: Path, text: str) -> None:
    ask(Probed(), tmp_path / "a", tmp_path / "run")
    (kept,) = (tmp_path / "run").iterdir()
    kept.write_text(text)
    other = Probed()
    assert ask(other, tmp_path / "b", tmp_path / "run").usable
    assert other.asked == 1


def test_a_runtime_without_a_key_shares_nothing(tmp_path: Path) -> None:
    ask(Probed(key=None), tmp_path / "a", tmp_path / "run")
    other = Probed(key=None)
    ask(other, tmp_path / "b", tmp_path / "run")
    assert other.asked == 1
    assert not (tmp_path / "run").exists()
