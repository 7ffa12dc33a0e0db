"""Packages of a distribution: what their scripts do at build time, they do as nobody of this host."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.errors import CorralError
from corral.linux import userns
from corral.node import templates_confined
from corral.node.templates import Templates
from corral.node.templates_debian import applets_of
from debs import SUITE, base, package, served

UID = 64056
"""An ordinary user, who has a name only where a test gives one."""
LOOK = """
id=/usr/share/probe
cat /proc/self/uid_map > $id/uid_map
cat /proc/self/status > $id/status
chown mail $id/theirs
chmod 4755 $id/theirs
"""
PATIENCE_S = 120.0
pytestmark = pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="needs mmdebstrap")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`probe` notes in its directory who ran its script; `left` leaves a process; `stuck` never comes to its end."""
    place = tmp_path_factory.mktemp("repository")
    base(place)
    files = {"usr/share/probe/theirs": "x"}
    package(place, "probe", files, LOOK)
    package(place, "left", files, f"{LOOK}\nsleep 1000 < /dev/null > /dev/null 2>&1 &\n")
    package(place, "stuck", files, f"{LOOK}\nsleep 1000\n")
    with served(place) as line:
        yield line


@pytest.fixture
def state(shared: Path) -> Iterator[Path]:
    """A state directory that other users may pass through."""
    made = Path(tempfile.mkdtemp(prefix="debian-", dir=shared))
    made.chmod(0o755)
    (made / "recipes").mkdir()
    yield made
    shutil.rmtree(made)


def recipe(state: Path, line: str, *packages: str) -> Templates:
    """A template `small` of these packages, whose scripts run."""
    document = {"name": "small", "kind": "debian", "configure": True, "suite": SUITE}
    told = json.dumps(document | {"packages": packages, "sources": [line]})
    (state / "recipes" / "small.yaml").write_text(told)
    return Templates(state, state / "recipes")


def mapped(tree: Path) -> tuple[int, int]:
    """(first id of the host, how many) that the script found itself under, as uid 0."""
    inside, first, count = (int(word) for word in (tree / "usr/share/probe/uid_map").read_text().split())
    assert inside == 0
    return first, count


def owners(tree: Path) -> set[tuple[int, int]]:
    return {(path.lstat().st_uid, path.lstat().st_gid) for path in (tree, *tree.rglob("*"))}


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.root
def test_scripts_run_as_ids_of_the_installation_and_what_they_made_is_roots(
    state: Path, repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where only root comes
    ids = userns.SubordinateRange(f"test {state.name}", state_dir=str(state))
    recipe(state, repository, "left")
    built = asyncio.run(Templates(state, state / "recipes", ids=ids).ensure("small"))
    tree = Path(built.path)
    first, count = mapped(tree)
    block, size = ids.claim()
    assert (count, block <= first < block + size) == (userns.SIZE, True)
    assert "Uid:\t0\t0\t0\t0\n" in (tree / "usr/share/probe/status").read_text(), "root of its own namespace"
    assert owners(tree) == {(0, 0)}
    assert (tree / "usr/share/probe/theirs").stat().st_mode & 0o7777 == 0o755
    assert userns.processes_of(first) == [], "what a script leaves running ends with the build"
    assert ids.allocate("next") == first, "the ids were given back"
    ids.release("next")
    assert not list((state / "base").glob(".build-*"))


@pytest.mark.root
def test_ids_that_something_still_runs_with_are_not_given_back_and_its_tree_waits(state: Path) -> None:
    ids = userns.SubordinateRange(f"test {state.name}", state_dir=str(state))
    templates = Templates(state, state / "recipes", ids=ids)
    (state / "base" / ".build-old").mkdir(parents=True)
    first = ids.allocate(".build-old")
    with subprocess.Popen(["setpriv", f"--reuid={first + 8}", "--clear-groups", "cat"], stdin=subprocess.PIPE) as alive:
        until(lambda: userns.processes_of(first))
        assert templates.remove_unfinished() == 0
        assert ids.find(".build-old") == first
        assert alive.stdin is not None
        alive.stdin.close()
    assert templates.remove_unfinished() == 1
    assert ids.find(".build-old") is None


PROGRAM = """
import asyncio, json, os, sys, yaml
from corral.errors import CorralError
from corral.node.templates import Templates
who = int(sys.argv[3])
os.setgroups([]); os.setresgid(who, who, who); os.setresuid(who, who, who)
templates = Templates(*sys.argv[1:3])
if sys.argv[4:]:
    print(json.dumps([[path.name for path in templates.unfinished()], templates.remove_unfinished()]))
    sys.exit()
try:
    print(json.dumps(asyncio.run(templates.ensure("small")).path))
except CorralError as error:
    print(json.dumps({**error.to_problem(), "listed": templates.describe()[0]["reason"]}))
"""


@pytest.fixture
def first(state: Path) -> int:
    """Of the range of that user."""
    return userns.SubordinateRange(f"user of {state.name}", state_dir=str(state)).allocate("somebody")


def command(state: Path, uid: int, ranges: str, *more: str) -> list[str]:
    """Build `small` as this user with these lines in /etc/subuid and subgid, which no other process of the host sees."""
    etc = state / "etc"
    if not etc.exists():
        shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
        with (etc / "passwd").open("a") as file:
            file.write(f"somebody:x:{UID}:{UID}::/nonexistent:/bin/sh\n")
    for name in ("subuid", "subgid"):
        (etc / name).write_text(ranges)
    (state / "home").mkdir(mode=0o700, exist_ok=True)
    for place in (state / "home", state / "recipes"):
        os.chown(place, uid, uid)
    mounted = 'mount --bind "$1" /etc && shift && exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", mounted, "sh", str(etc)]
    return [*words, sys.executable, "-c", PROGRAM, str(state / "home/state"), str(state / "recipes"), str(uid), *more]


def told(words: list[str]) -> Any:
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.root
@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs uidmap")
def test_an_ordinary_user_with_a_range_builds_as_ids_of_that_range(state: Path, repository: str, first: int) -> None:
    recipe(state, repository, "left")
    path = told(command(state, UID, f"other:{first + userns.SIZE}:65536\nsomebody:{first}:65536\n"))
    assert isinstance(path, str), path
    assert mapped(Path(path)) == (1, 65536), "of a namespace in which the user itself is 0"
    assert owners(Path(path)) == {(UID, UID)}
    assert (Path(path) / "usr/share/probe/theirs").stat().st_mode & 0o7777 == 0o755
    assert userns.processes_of(first) == []
    assert not list((state / "home/state/base").glob(".build-*"))


@pytest.mark.root
@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs uidmap")
@pytest.mark.parametrize("ranges", ["", "somebody:2000000000:1000\n", "other:2000000000:65536\n"])
def test_an_ordinary_user_without_a_range_is_told_how_to_get_one(state: Path, repository: str, ranges: str) -> None:
    recipe(state, repository, "probe")
    problem = told(command(state, UID, ranges))
    assert problem["code"] == "template_unavailable"
    assert "needs a subordinate range of 65536 ids" in problem["detail"]
    assert problem["listed"] in problem["detail"]
    assert "--add-subuids" in problem["hint"]
    assert not (state / "home/state/base").exists()


@pytest.mark.root
@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs uidmap")
@pytest.mark.parametrize("uid", [0, UID])
def test_a_build_that_is_killed_takes_its_scripts_with_it_and_leaves_nothing_that_is_not_found(
    state: Path, repository: str, uid: int, first: int
) -> None:
    ranges = f"somebody:{first}:65536\n"
    recipe(state, repository, "stuck")
    bases = state / "home/state/base"
    with subprocess.Popen(
        command(state, uid, ranges), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as building:

        def ran() -> list[Path]:
            places = bases.glob(".build-*/root/usr/share/probe/theirs")
            return [path for path in places if path.stat().st_mode & 0o4000]

        until(lambda: ran() or building.poll() is not None)
        [theirs] = ran()
        first = first if uid else mapped(theirs.parents[3])[0]
        assert theirs.stat().st_uid == first + 8, "the user mail of the tree, and of nobody here"
        work = bases / theirs.relative_to(bases).parts[0]
        assert (work.stat().st_uid, work.stat().st_mode & 0o777) == (uid, 0o700)
        assert userns.processes_of(first)
        building.send_signal(signal.SIGKILL)
    until(lambda: not userns.processes_of(first))
    assert told(command(state, uid, ranges, "look")) == [[work.name], 1]
    assert not work.exists()
    recipe(state, repository, "probe")
    built = Path(told(command(state, uid, ranges)))
    assert mapped(built)[0] == (1 if uid else first), "the ids were given back"


@pytest.mark.root
def test_a_build_that_nobody_can_follow_any_more_ends_at_once(state: Path, repository: str) -> None:
    def broken(text: str, part: float | None) -> None:
        if "installing remaining" in text:
            raise ValueError("no such line")

    templates = recipe(state, repository, "stuck")
    with pytest.raises(CorralError, match="no such line") as caught:
        asyncio.run(templates.ensure("small", broken))
    assert caught.value.code == "infra_error"
    until(lambda: templates.unfinished() == [] or templates.remove_unfinished())


@pytest.mark.root
def test_where_user_namespaces_are_forbidden_root_runs_no_script_either(
    state: Path, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden = templates_confined._CONFINED.replace("unshare --user", "unshare --nothing-like-it")
    monkeypatch.setattr(templates_confined, "_CONFINED", forbidden)
    with pytest.raises(CorralError, match=r"cannot be given ids of their own: unshare: .*nothing-like-it") as caught:
        asyncio.run(recipe(state, repository, "probe").ensure("small"))
    assert (caught.value.code, caught.value.hint is not None) == ("template_unavailable", True)
    assert not list((state / "base").glob("*/"))


def test_the_applets_of_a_busybox_are_read_from_it_and_it_is_not_run() -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("needs busybox-static")
    said = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    assert applets_of(Path(busybox).read_bytes()) == said


@pytest.mark.parametrize("program", [b"", b"\x7fELF", b"\0[\0[[\0ash\0../cat\0", b"\0[\0[[\0cat\0ls\0ash\0sh\0"])
def test_a_program_without_a_table_of_applets_is_refused(program: bytes) -> None:
    with pytest.raises(OSError, match="no table of applets"):
        applets_of(program)
