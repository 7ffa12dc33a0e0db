"""A campaign of `bench.fuzz` goes on from what an earlier one kept, saves what fails as its smallest input, and that fails again."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import fuzz

from fuzzing import campaign
from fuzzing.clock import Broken
from fuzzing.tape import Case


def _picky(case: Case) -> None:
    if 200 in case.guest:
        raise Broken("a 200 was let in")


@pytest.fixture(autouse=True)
def one_target(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(campaign, "TARGETS", {"channel": _picky})
    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, campaign._hangs)
    yield
    signal.signal(signal.SIGALRM, before)


def _cases(directory: Path, seed: int, count: int) -> campaign.Campaign:
    made = campaign.Campaign(directory, seed, ("channel",))
    made._take()
    for _ in range(count):
        made._one()
    made._count()
    return made


def test_what_fails_is_saved_small_with_its_seed_and_fails_again(tmp_path: Path) -> None:
    made = _cases(tmp_path, 5, 60)
    assert list(made.crashes) == ["Broken: a N was let in"]
    (path,) = (tmp_path / "crashes").iterdir()
    told = json.loads(path.read_text())
    assert (told["wrong"], told["seed"], told["smallest"]) == ("Broken: a N was let in", 5, True)
    assert bytes.fromhex(told["guest"]) == b"\xc8" and told["host"] == ""
    with pytest.raises(Broken, match="a 200"):
        fuzz.replay(path)


def test_a_later_campaign_goes_on_from_the_kept_inputs_and_counts_beside(tmp_path: Path) -> None:
    first = campaign.Campaign(tmp_path, 1, ("channel",))
    first._keep(Case("channel", b"kept", b"\x01"))
    (tmp_path / "corpus" / "half.json").write_text('{"target"')  # another was just writing it
    second = _cases(tmp_path, 1, 3)
    assert Case("channel", b"kept", b"\x01") in second.kept["channel"]
    _cases(tmp_path, 1, 4)
    counts = [json.loads(path.read_text())["cases"]["channel"] for path in tmp_path.glob("counts-*.json")]
    assert sorted(counts) == [3, 4]


def test_a_campaign_that_is_interrupted_still_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = iter([None, None])

    def interrupted(case: Case) -> None:
        if next(ended, "over") == "over":
            raise KeyboardInterrupt

    campaign.TARGETS["channel"] = interrupted
    options = argparse.Namespace(dir=tmp_path, jobs=1, child=False, hours=1.0, seed=9, targets=("channel",))
    assert fuzz.conduct(options) == 0
    said = capsys.readouterr().out
    assert "seeds 9 to 9" in said and "cases: channel 3 (3)" in said


def test_a_report_names_the_command_that_repeats_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _cases(tmp_path, 5, 60)
    assert fuzz._report(tmp_path) == 1
    (path,) = (tmp_path / "crashes").iterdir()
    assert f"bench.fuzz --replay {path}" in capsys.readouterr().out
