"""The file program by itself: lists in order and in pages, whatever the names; parts, holes and removals, without a sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corral
from corral.guest import fileops

PROGRAM = Path(corral.__file__).parent / "guest" / "files.py"
NAME = st.binary(min_size=1, max_size=3).filter(lambda raw: not set(raw) & {0, 47} and raw not in (b".", b".."))


def run(*words: str | bytes, data: bytes = b"") -> tuple[int, bytes, dict[str, Any]]:
    argv = [sys.executable, "-I", "-S", "-B", str(PROGRAM), *words]
    done = subprocess.run(argv, input=data, capture_output=True, env={"LC_ALL": "C.UTF-8"})
    return done.returncode, done.stdout, json.loads(done.stderr) if done.stderr else {}


@settings(max_examples=60)
@given(st.sets(st.lists(NAME, min_size=1, max_size=3).map(tuple), max_size=12), st.integers(1, 5), st.booleans())
def test_pages_hold_every_path_once_in_the_order_of_bytes(
    paths: set[tuple[bytes, ...]], limit: int, deep: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        top = os.fsencode(directory)
        for path in paths:
            os.makedirs(os.path.join(top, *path), exist_ok=True)
        every = {b"/".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
        wanted = sorted(path for path in every if deep or b"/" not in path)
        got: list[bytes] = []
        after = b""
        while True:
            page = []
            for name in fileops._walk(top, deep, limit + 1, after):
                page.append(name)
                if len(page) == limit:
                    break
            got += page
            if len(page) < limit:
                break
            after = page[-1]
        assert got == wanted


def test_a_page_that_would_be_too_large_ends_early_and_says_where(tmp_path: Path) -> None:
    for number in range(1500):
        (tmp_path / (f"{number:04}" + "\udcff" * 240)).touch()
    seen, after = 0, ""
    while True:
        status, out, _ = run("list", str(tmp_path), "0", "10000", after)
        lines = [json.loads(text) for text in out.splitlines()]
        assert status == 0 and len(out) < fileops.PAGE_BYTES + 2 * 65536
        seen += len(lines) - 1
        if lines[-1]["next"] is None:
            break
        assert lines[-1]["next"] == os.path.basename(lines[-2]["path"])
        after = lines[-1]["next"]
    assert seen == 1500


def test_zeros_become_holes_and_are_read_back(tmp_path: Path) -> None:
    data = bytes(1 << 20) + b"x" + bytes(1 << 20)
    status, out, _ = run("write", str(tmp_path / "f"), "-", "1", "1", "-", data=data)
    assert status == 0 and json.loads(out)["size"] == len(data)
    assert (tmp_path / "f").read_bytes() == data
    assert (tmp_path / "f").stat().st_blocks * 512 < 1 << 19
    status, out, _ = run("read", str(tmp_path / "f"), str(1 << 20), str(1 << 20))
    assert status == 0 and out.endswith(b"\nx")


def test_a_write_without_its_end_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    argv = [sys.executable, "-I", "-S", "-B", str(PROGRAM), "write", str(tmp_path / "f"), "-", "1", "1", "-"]
    writer = subprocess.Popen(argv, stdin=subprocess.PIPE)
    assert writer.stdin is not None
    writer.stdin.write(b"x" * 500_000)
    writer.stdin.flush()
    writer.kill()
    writer.wait()
    writer.stdin.close()
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_text() == "old"


def test_a_size_that_was_promised_is_held_to(tmp_path: Path) -> None:
    status, _, refusal = run("write", str(tmp_path / "f"), "-", "1", "1", "9", data=b"short")
    assert (status, refusal["code"], os.listdir(tmp_path)) == (3, "bad_request", [])


def test_what_is_removed_is_not_what_links_name(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "x").touch()
    tree = tmp_path / "tree" / "a"
    tree.mkdir(parents=True)
    (tree / "out").symlink_to(tmp_path / "keep")
    status, _, refusal = run("remove", str(tmp_path / "tree"), "0")
    assert (status, refusal["code"]) == (3, "not_empty")
    assert run("remove", str(tmp_path / "tree"), "1")[0] == 0
    assert sorted(os.listdir(tmp_path)) == ["keep"] and os.listdir(tmp_path / "keep") == ["x"]


def test_a_directory_below_a_file_is_refused_for_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "child", tmp_path / "file" / "child" / "below"):
        assert run("mkdir", str(path), "1", "0755")[2]["code"] == "not_a_directory"
        assert run("write", str(path), "-", "1", "1", "-")[2]["code"] == "not_a_directory"
    assert run("mkdir", str(tmp_path / "file"), "1", "0755")[2]["code"] == "already_exists"


@pytest.mark.parametrize("source", [b"/", b"/proc"])
def test_where_a_file_system_begins_is_not_copied_to_another_one(tmp_path: Path, source: bytes) -> None:
    with pytest.raises(fileops.Refused) as caught:
        fileops._carry(source, os.fsencode(tmp_path / "got"), False)
    assert (caught.value.code, caught.value.entry) == ("invalid_value", source.decode())
    assert os.listdir(tmp_path) == []


def test_a_move_between_file_systems_that_is_given_up_leaves_no_half_copy(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    code = (
        "import os, shutil, signal\n"
        "from corral.guest import fileops\n"
        "def half(source, target, **more):\n"
        "    os.mkdir(target)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "shutil.copytree = half\n"
        "here = os.getcwdb()\n"
        "fileops._carry(here + b'/old', here + b'/new', False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr) == (5, b"")
    assert os.listdir(tmp_path) == ["old"]


def test_a_directory_is_not_moved_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "f").touch()
    status, _, refusal = run("move", str(tmp_path / "d"), str(tmp_path / "f"), "1")
    assert (status, refusal["code"], refusal["entry"]) == (3, "not_a_directory", str(tmp_path / "f"))


def test_directories_are_emptied_whatever_is_in_them_and_through_no_link(tmp_path: Path) -> None:
    for place in ("one", "two", "outside"):
        (tmp_path / place).mkdir()
    (tmp_path / "outside" / "kept").write_text("x")
    deep = tmp_path / "one" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "\udcff").write_text("x")
    (tmp_path / "one" / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(tmp_path / "two" / "pipe")
    (tmp_path / "away").symlink_to(tmp_path / "outside")
    code, out, _ = run("empty", *(str(tmp_path / name) for name in ("one", "two", "absent", "away")))
    assert code == 0 and json.loads(out) == {"stays": None}
    assert os.listdir(tmp_path / "one") == os.listdir(tmp_path / "two") == []
    assert os.listdir(tmp_path / "outside") == ["kept"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for another user")
def test_what_another_user_keeps_is_told_and_the_rest_is_removed() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # pytest's own are closed to others
        _a_sticky_place(Path(directory))


def _a_sticky_place(place: Path) -> None:
    place.chmod(0o1777)
    for name, owner in (("mine", 12345), ("theirs", 0), ("too", 12345)):
        (place / name).write_text("x")
        os.chown(place / name, owner, owner)
    reading, writing = os.pipe()
    child = os.fork()  # not another program: that user may not be able to read ours
    if child == 0:
        try:
            os.dup2(writing, 1)
            os.setgroups([])
            os.setresgid(12345, 12345, 12345)
            os.setresuid(12345, 12345, 12345)
            fileops.empty(str(place))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        assert json.loads(told.read()) == {"stays": str(place / "theirs")}
    os.waitpid(child, 0)
    assert os.listdir(place) == ["theirs"]
