"""The one key of a server: made once, kept as a hash, set by the operator."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from corral.api.keys import AdminKey, open_key
from corral.errors import CorralError


def test_a_key_is_made_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    made = open_key(str(path), None, os.urandom)
    assert made.how == "made" and made.fresh is not None
    assert made.fresh not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["admin.key"]
    again = open_key(str(path), None, os.urandom)
    assert (again.how, again.fresh) == ("stored", None)
    assert again.key.accepts(f"Bearer {made.fresh}")


def test_the_operator_s_key_replaces_the_stored_one(tmp_path: Path) -> None:
    path = str(tmp_path / "admin.key")
    assert open_key(path, "k" * 16, os.urandom).how == "given"
    assert open_key(path, "k" * 16, os.urandom).how == "stored"
    assert open_key(path, "n" * 16, os.urandom).how == "replaced"
    assert open_key(path, None, os.urandom).key == AdminKey.of("n" * 16)


@pytest.mark.parametrize(
    "key", ["", "short", "x" * 600, "with a space in the key", "ключ-ключ-ключ-ключ", "line\nline-line-line"]
)
def test_a_key_that_could_be_guessed_or_not_be_sent_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(CorralError) as refused:
        open_key(str(tmp_path / "admin.key"), key, os.urandom)
    assert refused.value.field == "CORRAL_ADMIN_KEY" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"sha256": 1}', '{"sha256": "short"}', "null"])
def test_a_damaged_file_lets_nobody_in(tmp_path: Path, content: str) -> None:
    path = tmp_path / "admin.key"
    path.write_text(content)
    with pytest.raises(CorralError, match="damaged"):
        open_key(str(path), None, os.urandom)


def test_only_the_exact_key_as_bearer_is_accepted() -> None:
    key = AdminKey.of("the-key-of-all-keys")
    assert key.accepts("Bearer the-key-of-all-keys") and key.accepts("bearer  the-key-of-all-keys")
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        "the-key-of-all-keys",
        "Basic the-key-of-all-keys",
        "Bearer the-key-of-all-key",
    ):
        assert not key.accepts(wrong)
    assert not key.accepts("Bearer \udcff")
