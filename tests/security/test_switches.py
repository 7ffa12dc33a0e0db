"""A defence can be switched off by name, for tests, and never without a word: on standard error, in the journal, and no other way."""

from __future__ import annotations

import ast
import json
import sqlite3
from pathlib import Path

import pytest

import corral
from corral import config
from corral.domain import grade
from corral.errors import CorralError

from .conftest import Lab


def test_nothing_is_off_unless_it_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config.load(str(tmp_path), {}).unsafe == frozenset()
    assert config.load(str(tmp_path), {"CORRAL_UNSAFE": " , "}).unsafe == frozenset()
    assert capsys.readouterr().err == ""


def test_what_is_switched_off_is_told_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        loaded = config.load(str(tmp_path), {"CORRAL_UNSAFE": "unsafe_no_landlock, unsafe_no_seccomp"})
        assert loaded.unsafe == {"unsafe_no_seccomp", "unsafe_no_landlock"}
        told = capsys.readouterr().err
        assert "warning" in told and "unsafe_no_landlock, unsafe_no_seccomp" in told


def test_a_demand_of_the_guard_that_is_not_made_is_told_as_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = config.load(str(tmp_path), {"CORRAL_UNSAFE": "unsafe_any_grade"})
    assert made.unsafe == {"unsafe_any_grade"}
    said = capsys.readouterr().err
    assert "too weak: unsafe_any_grade" in said and "defences off" not in said


def test_a_name_that_is_none_is_refused_and_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(CorralError) as refused:
        config.load(str(tmp_path), {"CORRAL_UNSAFE": "unsafe_no_secomp"})
    assert (refused.value.code, refused.value.field) == ("invalid_value", "CORRAL_UNSAFE")
    assert "unsafe_no_seccomp" in (refused.value.hint or "")


def test_a_file_of_the_state_directory_cannot_switch_anything_off(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('unsafe = ["unsafe_no_seccomp"]\nCORRAL_UNSAFE = "unsafe_no_seccomp"\n')
    assert config.load(str(tmp_path), {}).unsafe == frozenset()


def test_every_switch_in_the_code_is_a_known_one() -> None:
    """A name that adapters look for and nobody can set, or the other way round, would make a control show nothing."""
    found: set[str] = set()
    for source in Path(corral.__file__).parent.joinpath("adapters").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("unsafe_"):
                found.add(node.value)
    assert found == config.DEFENCES
    assert {grade.NO_FILTER, grade.ANY_GRADE} < config.UNSAFE and grade.ANY_GRADE not in config.DEFENCES


def test_the_journal_of_the_node_names_what_is_off(lab: Lab) -> None:
    with lab.box("unsafe_no_landlock") as box, lab.box() as other:
        entries = _journal(lab.state / "node")
        assert '"unsafe": ["unsafe_no_landlock"]' in entries[box.instance]
        assert "unsafe" not in entries[other.instance]


def _journal(place: Path) -> dict[str, str]:
    """Instance id -> what the journal holds of it, as text."""
    found: dict[str, str] = {}
    for path in place.iterdir():
        if path.suffix == ".db":
            with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
                for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    for row in database.execute(f'SELECT * FROM "{table}"').fetchall():
                        found.update({str(row[0]): json.dumps(row).replace('\\"', '"')})
    return found
