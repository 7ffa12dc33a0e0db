"""Sealed text: only this installation reads it, only where it belongs."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from corral.adapters.sealing.aes import PREFIX, AesSealer
from corral.errors import CorralError

TEXT = "whsec_密钥"


def made(path: Path) -> AesSealer:
    return AesSealer(str(path / "secret.key"), os.urandom)


def test_what_is_sealed_opens_for_every_process_of_the_installation_and_never_looks_the_same(tmp_path: Path) -> None:
    one, other = made(tmp_path), made(tmp_path)
    sealed = [one.seal(TEXT, "whd_1") for _ in range(20)]
    assert len(set(sealed)) == 20 and all(TEXT not in each and "whsec" not in each for each in sealed)
    assert {other.unseal(each, "whd_1") for each in sealed} == {TEXT}
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret.key"]
    assert stat.S_IMODE((tmp_path / "secret.key").stat().st_mode) == 0o600


def test_it_opens_only_for_what_it_is_about_and_only_whole(tmp_path: Path) -> None:
    sealer = made(tmp_path)
    sealed = sealer.seal(TEXT, "whd_1")
    with pytest.raises(ValueError, match="another key"):
        sealer.unseal(sealed, "whd_2")
    body = sealed.removeprefix(PREFIX)
    for bad in (body[:-4], "", "!", body[:8] + ("A" if body[8] != "A" else "B") + body[9:], body + "AAAA"):
        with pytest.raises(ValueError, match="another key"):
            sealer.unseal(PREFIX + bad, "whd_1")


def test_another_installation_reads_nothing(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    here, there = made(tmp_path / "here"), made(tmp_path / "there")
    with pytest.raises(ValueError, match="another key"):
        there.unseal(here.seal(TEXT, "x"), "x")
    assert here.mark(TEXT) != there.mark(TEXT)


def test_a_mark_is_the_same_for_the_same_text_and_does_not_tell_it(tmp_path: Path) -> None:
    sealer = made(tmp_path)
    assert sealer.mark(TEXT) == made(tmp_path).mark(TEXT) != sealer.mark(TEXT + "x")
    assert TEXT not in sealer.mark(TEXT)


def test_what_was_never_sealed_stays_as_it_is_and_needs_no_key(tmp_path: Path) -> None:
    assert made(tmp_path).unseal("whsec_plain", "x") == "whsec_plain"
    assert list(tmp_path.iterdir()) == []


def test_whoever_comes_first_makes_the_key_and_all_have_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        sealed = list(pool.map(lambda _: made(tmp_path).seal(TEXT, "x"), range(16)))
    assert {made(tmp_path).unseal(each, "x") for each in sealed} == {TEXT}
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret.key"]


def test_a_damaged_key_is_never_replaced(tmp_path: Path) -> None:
    sealed = made(tmp_path).seal(TEXT, "x")
    (tmp_path / "secret.key").write_bytes(b"short")
    with pytest.raises(CorralError, match="damaged"):
        made(tmp_path).seal(TEXT, "x")
    with pytest.raises(ValueError, match="damaged"):
        made(tmp_path).unseal(sealed, "x")
    assert (tmp_path / "secret.key").read_bytes() == b"short"
