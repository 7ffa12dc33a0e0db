"""Packages of the distribution, by tools that the test plays: what a package or its scripts may do to whoever unpacks them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from corral.node import templates_confined, templates_debian
from corral.node.templates_debian import applets_of, unpack
from corral.node.templates_recipe import Recipe, parse
from corral.node.templates_tar import Refused

from .layouts import tar_of

DPKG_DEB = """#!/bin/sh
case $1 in
-x) tar --keep-directory-symlink -x -f "$2" -C "$3" ;;
--fsys-tarfile) echo "dpkg-deb: reads $2" >&2; cat "$2"; [ "${2%broken.deb}" = "$2" ] ;;
esac
"""


def recipe(*packages: str) -> Recipe:
    return parse({"name": "small", "kind": "debian", "packages": list(packages)}, "test")


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], Path]:
    """Give what packages hold -> the root of a tree to unpack them to, on a host that has apt-get and dpkg-deb only."""
    tools, index, root = tmp_path / "tools", tmp_path / "index", tmp_path / "build" / "root"
    for made in (tools, index, root):
        made.mkdir(parents=True)

    def play(packages: dict[str, bytes]) -> Path:
        for name, content in packages.items():
            (index / f"{name}.deb").write_bytes(content)
        for name, text in (("dpkg-deb", DPKG_DEB), ("apt-get", f"#!/bin/sh\ncp {index}/*.deb .\n")):
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        monkeypatch.setattr(templates_debian, "on_host", lambda program: program in ("apt-get", "dpkg-deb"))
        monkeypatch.setattr(templates_debian, "environment", lambda: {"PATH": f"{tools}:{os.environ['PATH']}"})
        return root

    return play


def quiet(text: str, part: float | None) -> None:
    pass


def test_a_link_of_one_package_never_leads_the_files_of_another_out_of_the_tree(
    tmp_path: Path, played: Callable[[dict[str, bytes]], Path]
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = played(
        {
            "a": tar_of([("link", "srv/out", str(outside)), ("link", "srv/in", "/usr/share/in")]),
            "b": tar_of([("file", "srv/out/file", "written"), ("file", "srv/in/file", "kept")]),
        }
    )
    unpack(recipe("a", "b"), root, quiet, None)
    assert not list(outside.iterdir())
    assert (root / "usr/share/in/file").read_text() == "kept", "the root of a link is the tree's"


def test_a_package_that_cannot_be_read_is_told_by_the_words_of_the_tool(
    played: Callable[[dict[str, bytes]], Path],
) -> None:
    whole = tar_of([("file", "usr/bin/x", "x")])
    for content in (whole, whole[:700], b""):
        root = played({"broken": content})
        with pytest.raises(OSError, match=r"dpkg-deb ended with 1: dpkg-deb: reads .*broken\.deb"):
            unpack(recipe("broken"), root, quiet, None)
        shutil.rmtree(root.parent / "debs")


def test_a_package_that_holds_what_no_package_may_is_refused_by_its_name(
    played: Callable[[dict[str, bytes]], Path],
) -> None:
    root = played({"bad": tar_of([("file", "../x", "x"), ("file", "more", "m" * 300_000)])})
    with pytest.raises(Refused, match=r"bad\.deb: \.\./x: "):
        unpack(recipe("bad"), root, quiet, None)
    assert not (root.parent / "x").exists()


class Bounded:
    """A stream of text of which nobody may read a whole line, however long."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readline(self, size: int) -> str:
        assert 0 < size <= 1 << 20
        return str(self._stream.readline(size))

    def close(self) -> None:
        self._stream.close()


def test_a_script_that_never_ends_its_line_takes_no_memory_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(command: list[str], tree: Path, base: int | None, env: Mapping[str, str]) -> subprocess.Popen[str]:
        text = "head -c 300000 /dev/zero | tr '\\0' x >&2; printf '\\nE: no such package\\n' >&2; exit 3"
        process = subprocess.Popen(["sh", "-c", text], stderr=subprocess.PIPE, text=True)
        process.stderr = Bounded(process.stderr)  # type: ignore[assignment]
        return process

    monkeypatch.setattr(templates_debian, "on_host", lambda program: True)
    monkeypatch.setattr(templates_confined, "lack", lambda: None)
    monkeypatch.setattr(templates_confined, "begin", begin)
    with pytest.raises(OSError, match="mmdebstrap ended with 3: E: no such package"):
        unpack(recipe("x"), tmp_path, quiet, None)


def test_a_table_of_applets_is_read_as_far_as_one_may_be_long() -> None:
    program = b"\0[\0[[\0cat\0ls\0sh\0" + bytes(16 << 20)
    tracemalloc.start()
    try:
        assert applets_of(program) == ["[", "[[", "cat", "ls", "sh"]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
