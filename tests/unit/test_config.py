"""Where the state directory may lie."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from corral import config
from corral.errors import CorralError


def state_of(length: int, below: Path) -> Path:
    path = os.fspath(below)
    while length - len(path) > 120:
        path += "/" + "d" * 100
    return Path(path + "/" + "d" * (length - len(path) - 1))


def test_a_path_that_is_too_long_is_refused_with_the_limit() -> None:
    long = state_of(config.MAX_STATE_DIR + 1, Path("/tmp"))
    with pytest.raises(CorralError) as caught:
        config.load(environ={"CORRAL_STATE_DIR": str(long)})
    error = caught.value
    assert (error.code, error.field) == ("invalid_value", "CORRAL_STATE_DIR")
    assert str(config.MAX_STATE_DIR) in error.detail and error.hint


def test_bytes_count_not_characters() -> None:
    with pytest.raises(CorralError):
        config.load("/tmp/" + "/".join(["目" * 50] * 4))


def test_the_longest_path_has_room_for_every_database(tmp_path: Path) -> None:
    state = state_of(config.MAX_STATE_DIR, tmp_path)
    assert config.load(str(state)).state_dir == str(state) and len(os.fsencode(state)) == config.MAX_STATE_DIR
    (state / "node").mkdir(parents=True)
    for name in ("corral.db", "node/journal.db"):
        with sqlite3.connect(state / name) as database:
            database.execute("pragma journal_mode=wal")
            database.execute("create table t (x)")
        database.close()
