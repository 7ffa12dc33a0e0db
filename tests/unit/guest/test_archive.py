"""Archives that come in: whole or refused, with the entry that is to blame; and those that go out of a tree that changes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import corral
from corral.guest import archive, fileops

PROGRAM = Path(corral.__file__).parent / "guest" / "files.py"


def unpack(place: Path, data: bytes) -> dict[str, Any]:
    """The refusal, or nothing."""
    argv = [sys.executable, "-I", "-S", "-B", str(PROGRAM), "unpack", str(place), str(64 << 20), "1000"]
    done = subprocess.run(argv, input=data, capture_output=True, env={"LC_ALL": "C.UTF-8"})
    refusal: dict[str, Any] = json.loads(done.stderr) if done.stderr else {}
    assert done.returncode == (3 if refusal else 0), done.stderr
    return refusal


def tar_of(*names: str, headers: dict[str, str] | None = None, link: str | None = None, size: int = 10) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={}) as made:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = size, headers or {}
            if link is not None:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, link, 0
            made.addfile(member, io.BytesIO(bytes(member.size)))
    return out.getvalue()


def test_a_whole_archive_is_unpacked(tmp_path: Path) -> None:
    assert unpack(tmp_path / "new" / "place", tar_of("a", "b/c")) == {}
    assert (tmp_path / "new" / "place" / "b" / "c").read_bytes() == bytes(10)


@pytest.mark.parametrize(
    ("cut", "why"),
    [(0, "empty"), (100, "truncated"), (512, "end of data"), (1024, "before the end"), (1124, "before the end")],
)
def test_an_archive_that_is_cut_short_is_never_a_success(tmp_path: Path, cut: int, why: str) -> None:
    refusal = unpack(tmp_path, tar_of("a", "b")[:cut])
    assert refusal["code"] == "invalid_value" and why in refusal["detail"], refusal


def test_a_header_that_is_damaged_in_the_middle_is_no_end_of_the_archive(tmp_path: Path) -> None:
    data = bytearray(tar_of("a", "b", "c"))
    data[1024 + 5] ^= 1
    assert "before the end of the archive" in unpack(tmp_path, bytes(data))["detail"]


def test_what_cannot_be_is_refused_naming_the_entry(tmp_path: Path) -> None:
    assert unpack(tmp_path, tar_of("f", headers={"mtime": "1e300"}))["entry"] == "f"
    assert unpack(tmp_path, tar_of("f", headers={"mtime": "inf"}))["entry"] == "f"
    assert unpack(tmp_path, tar_of("f", size=100_000)[:2000])["entry"] == "f"
    assert unpack(tmp_path, tar_of("l", headers={"linkpath": "a\0b"}, link="x"))["entry"] == "l"


def test_the_place_is_named_when_nothing_can_be_unpacked_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        refusal = unpack(place, tar_of("a"))
        assert (refusal["code"], refusal["entry"]) == ("not_a_directory", str(place))
    refusal = unpack(tmp_path / ("n" * 300), tar_of("a"))
    assert (refusal["code"], refusal["entry"]) == ("invalid_value", str(tmp_path / ("n" * 300)))


def test_names_too_large_for_any_use_are_not_read_into_memory(tmp_path: Path) -> None:
    head = tarfile.TarInfo("long")
    head.type, head.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    assert str(1 << 33) in unpack(tmp_path, head.tobuf(tarfile.GNU_FORMAT) + bytes(4096))["detail"]


def test_what_vanishes_while_a_tree_is_packed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name)
    names = sorted(os.listdir(os.fsencode(tmp_path)))
    monkeypatch.setattr(os, "listdir", lambda path: [*names, b"gone"])
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as made:
        archive._add(made, os.fsencode(tmp_path), b"top")
    out.seek(0)
    with tarfile.open(fileobj=out) as packed:
        assert packed.getnames() == ["top", "top/a", "top/b", "top/c"]
    with tarfile.open(fileobj=io.BytesIO(), mode="w|") as made, pytest.raises(archive.Refused) as caught:
        archive._add(made, os.fsencode(tmp_path / "nothing"), b"nothing")
    assert caught.value.code == "not_found"


@pytest.mark.slow
def test_a_tree_with_more_levels_than_calls_can_nest_is_packed(tmp_path: Path) -> None:
    top = tmp_path / "a"
    deep = top.joinpath(*["a"] * 1500)
    here = os.getcwd()
    try:
        os.makedirs(top)
        os.chdir(top)
        for _ in range(1500):
            os.mkdir("a")
            os.chdir("a")
    finally:
        os.chdir(here)
    (deep / "leaf").write_bytes(b"leaf")
    argv = [sys.executable, "-I", "-S", "-B", str(PROGRAM), "pack", str(top)]
    done = subprocess.run(argv, capture_output=True, env={"LC_ALL": "C.UTF-8"})
    assert (done.returncode, done.stderr) == (0, b"")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as packed:
        names = packed.getnames()
    assert len(names) == 1502 and names[-1] == "a/" * 1501 + "leaf"
    fileops._remove_all(os.fsencode(top))  # as pytest's own removal is recursive
