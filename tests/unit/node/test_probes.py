"""Answers of probes: one start tells it for all state directories of root, what fails is asked again, a fresh look really looks."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from corral.domain.grade import Check
from corral.domain.limits import LimitModes
from corral.node.probes import HostChecks, Probes
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


class Broken(Probed):
    """Does with a probe whatever an adapter of anybody might."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def probe_key(self) -> str | None:
        raise RuntimeError("no key today")

    async def probe(self) -> Any:
        if isinstance(self.what, Exception):
            raise self.what
        if self.what == "hangs":
            await asyncio.Event().wait()
        return self.what


WORKS = asyncio.run(Probed().probe())


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (ValueError("no JSON"), "the adapter failed: ValueError('no JSON')"),
        (KeyError("pid"), "the adapter failed: KeyError('pid')"),
        (AssertionError(), "the adapter failed: AssertionError()"),
        (TimeoutError("its own"), "its own"),
        (OSError(8, "Exec format error"), "[Errno 8] Exec format error"),
        ("hangs", "the probe did not end in time"),
        (None, "the adapter failed: TypeError"),
        (dataclasses.replace(WORKS, version=b"1"), "the adapter failed: TypeError"),
        (dataclasses.replace(WORKS, limits=None), "the adapter failed: TypeError"),
    ],
)
def test_whatever_one_adapter_does_the_others_are_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, why: str
) -> None:
    monkeypatch.setattr("corral.node.probes.PROBE_S", 0.2 if what == "hangs" else 20.0)
    runtimes: Any = {"broken": Broken(what), "r": Probed(key=None)}
    probes = Probes(str(tmp_path / "probes.json"), runtimes, str(tmp_path / "run"))
    for fresh in (False, True):
        broken, works = asyncio.run(probes.all(fresh=fresh))
        assert (broken.name, broken.usable, works.usable) == ("broken", False, True)
        assert broken.reason is not None and broken.reason.startswith(why)
    again = Probes(str(tmp_path / "probes.json"), {"r": Probed(usable=False)}, str(tmp_path / "run"))  # type: ignore[dict-item]
    assert asyncio.run(again.one("r")).usable, "what works is kept, whatever the other one did"


def look_at_host(state: Path, seen: list[list[Check]], **how: Any) -> list[Check]:
    return asyncio.run(HostChecks(str(state / "checks.json"), lambda: seen.pop(0)).all(**how))


def test_the_checks_of_the_host_are_made_once_and_anew_when_asked_to(tmp_path: Path) -> None:
    first, second = [Check("swap", "may", False, "1 in use", "swapoff")], [Check("swap", "may", True, "none")]
    seen = [first, second]
    assert look_at_host(tmp_path, seen) == first
    assert look_at_host(tmp_path, seen) == first
    assert look_at_host(tmp_path, seen, fresh=True) == second
    assert look_at_host(tmp_path, seen) == second and seen == []


def test_a_host_that_lacks_what_it_must_have_is_looked_at_again(tmp_path: Path) -> None:
    fine, broken = [Check("filter", "must", True, "works")], [Check("filter", "must", False, "does not")]
    seen = [fine, broken, broken, fine]
    assert look_at_host(tmp_path, seen) == fine
    assert look_at_host(tmp_path, seen, fresh=True) == broken, "and the older answer is gone"
    assert look_at_host(tmp_path, seen) == broken
    assert look_at_host(tmp_path, seen) == fine


async def test_who_lives_long_looks_at_a_broken_host_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine, broken = [Check("filter", "must", True, "works")], [Check("filter", "must", False, "does not")]
    seen = [broken, broken, fine]
    checks = HostChecks(str(tmp_path / "checks.json"), lambda: seen.pop(0))
    assert await checks.all() == broken
    assert await checks.all() == broken and len(seen) == 2, "not for every request"
    monkeypatch.setattr("corral.node.probes.AGAIN_S", 0.0)
    assert await checks.all(fresh=True) == broken
    assert await checks.all() == fine
    assert await checks.all() == fine and seen == []


@pytest.mark.parametrize("text", ["", "[]", '{"key": 1}', '{"checks": [{}]}'])
def test_a_damaged_answer_about_the_host_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "checks.json").write_text(text)
    fine = [Check("filter", "must", True, "works")]
    assert look_at_host(tmp_path, [fine]) == fine


def test_what_takes_long_not_to_work_is_spared_by_others_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.node.probes.SLOW_S", -1.0)

    def other_process(usable: bool = False) -> tuple[Probes, Probed]:
        runtime = Probed(key=None, usable=usable)
        runtimes: Any = {"slow": runtime, "r": Probed(key=None)}
        return Probes(str(tmp_path / "probes.json"), runtimes, str(tmp_path / "run")), runtime

    first, asked = other_process()
    assert [info.usable for info in asyncio.run(first.all())] == [False, True] and asked.asked == 1
    second, asked = other_process()
    told = asyncio.run(second.all())[0]
    assert not told.usable and told.reason is not None
    assert told.reason.startswith("it does not start (as found") and "--fresh" in told.reason
    assert asked.asked == 0, "spared"
    assert not asyncio.run(second.one("slow")).usable and asked.asked == 1, "who names it wants to know"
    third, asked = other_process(usable=True)
    assert not asyncio.run(third.all())[0].usable
    assert asyncio.run(third.all(fresh=True))[0].usable and asked.asked == 1, "a fresh look looks"
    fourth, asked = other_process()
    assert asyncio.run(fourth.all())[0].usable and asked.asked == 0, "it works now"
    asyncio.run(fourth.all(fresh=True))
    monkeypatch.setattr("corral.node.probes.SPARED_S", 0.0)
    fifth, asked = other_process()
    asyncio.run(fifth.all())
    assert asked.asked == 1, "not for ever"


def test_what_failed_slowly_and_then_quickly_is_spared_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_process() -> tuple[Probes, Probed]:
        runtime = Probed(key=None, usable=False)
        runtimes: Any = {"r": runtime, "other": Probed(key=None)}
        return Probes(str(tmp_path / "probes.json"), runtimes, str(tmp_path / "run")), runtime

    monkeypatch.setattr("corral.node.probes.SLOW_S", -1.0)
    asyncio.run(other_process()[0].all())
    monkeypatch.setattr("corral.node.probes.SLOW_S", 1000.0)
    asyncio.run(other_process()[0].one("r"))
    third, asked = other_process()
    assert asyncio.run(third.all())[0].reason == "it does not start" and asked.asked == 1


def test_what_quickly_does_not_work_is_asked_again_at_once(tmp_path: Path) -> None:
    for _ in range(2):
        runtime = Probed(key=None, usable=False)
        assert not ask(runtime, tmp_path / "a", tmp_path / "run").usable and runtime.asked == 1
