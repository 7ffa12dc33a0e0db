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
from corral.node.templates import Templates
from corral.node.templates_debian import applets_of
from debs import SUITE, base, package, served

UID = 64056
"""An ordinary user, who has a name only where a test gives one."""
FIRST = 1_900_000_000
"""Of that user's range."""
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
    assert ids.allocated() == {}
    assert not list((state / "base").glob(".build-*"))


@pytest.mark.root
def test_a_build_that_is_killed_takes_its_scripts_with_it_and_its_ids_are_free_again(
    state: Path, repository: str
) -> None:
    templates = recipe(state, repository, "stuck")
    program = "import asyncio, sys; from corral.node.templates import Templates; asyncio.run(Templates(*sys.argv[1:]).ensure('small'))"
    words = [sys.executable, "-c", program, str(state), str(state / "recipes")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as building:

        def ran() -> list[Path]:
            return [p for p in state.glob("base/.build-*/root/usr/share/probe/theirs") if p.stat().st_mode & 0o4000]

        until(lambda: ran() or building.poll() is not None)
        [theirs] = ran()
        first, _ = mapped(theirs.parents[3])
        assert theirs.stat().st_uid == first + 8, "the user mail of the tree, and of nobody here"
        assert state.joinpath("base", theirs.relative_to(state / "base").parts[0]).stat().st_mode & 0o077 == 0
        assert userns.processes_of(first)
        building.send_signal(signal.SIGKILL)
    until(lambda: not userns.processes_of(first))
    assert len(templates.unfinished()) == 1
    assert templates.remove_unfinished() == 1
    recipe(state, repository, "probe")
    built = asyncio.run(templates.ensure("small"))
    assert mapped(Path(built.path))[0] == first, "the ids were given back"


@pytest.mark.root
def test_ids_that_something_still_runs_with_are_not_given_back_and_its_tree_waits(state: Path) -> None:
    ids = userns.SubordinateRange(f"test {state.name}", state_dir=str(state))
    templates = Templates(state, state / "recipes", ids=ids)
    (state / "base" / ".build-old").mkdir(parents=True)
    first = ids.allocate(".build-old")
    with subprocess.Popen(["setpriv", f"--reuid={first + 8}", "--clear-groups", "cat"], stdin=subprocess.PIPE) as alive:
        until(lambda: userns.processes_of(first))
        assert templates.remove_unfinished() == 0
        assert ids.allocated() == {".build-old": first}
        assert alive.stdin is not None
        alive.stdin.close()
    assert templates.remove_unfinished() == 1
    assert ids.allocated() == {}


AS_USER = """
import asyncio, json, os, sys, yaml
from corral.errors import CorralError
from corral.node.templates import Templates
os.setgroups([]); os.setresgid(*[int(sys.argv[3])] * 3); os.setresuid(*[int(sys.argv[3])] * 3)
templates = Templates(*sys.argv[1:3])
try:
    print(json.dumps(asyncio.run(templates.ensure("small")).path))
except CorralError as error:
    print(json.dumps({**error.to_problem(), "listed": templates.describe()[0]["reason"]}))
"""


def as_user(state: Path, ranges: str) -> Any:
    """Build `small` as an ordinary user with these lines in /etc/subuid and subgid, which no other process of the host sees."""
    etc = state / "etc"
    shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
    with (etc / "passwd").open("a") as file:
        file.write(f"somebody:x:{UID}:{UID}::/nonexistent:/bin/sh\n")
    for name in ("subuid", "subgid"):
        (etc / name).write_text(ranges)
    for place in (state, state / "recipes"):
        os.chown(place, UID, UID)
    mounted = 'mount --bind "$1" /etc && shift && exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", mounted, "sh", str(etc)]
    words += [sys.executable, "-c", AS_USER, str(state), str(state / "recipes"), str(UID)]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.root
@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs uidmap")
def test_an_ordinary_user_with_a_range_builds_as_ids_of_that_range(state: Path, repository: str) -> None:
    recipe(state, repository, "probe")
    path = as_user(state, f"other:{FIRST - 65536}:65536\nsomebody:{FIRST}:65536\n")
    assert isinstance(path, str), path
    assert mapped(Path(path)) == (FIRST, 65536)
    assert owners(Path(path)) == {(UID, UID)}


@pytest.mark.root
@pytest.mark.skipif(shutil.which("newuidmap") is None, reason="needs uidmap")
@pytest.mark.parametrize("ranges", ["", f"somebody:{FIRST}:1000\n", f"other:{FIRST}:65536\n"])
def test_an_ordinary_user_without_a_range_is_told_how_to_get_one(state: Path, repository: str, ranges: str) -> None:
    recipe(state, repository, "probe")
    told = as_user(state, ranges)
    assert told["code"] == "template_unavailable"
    assert "needs a subordinate range of 65536 ids" in told["detail"]
    assert told["listed"] in told["detail"]
    assert "--add-subuids" in told["hint"]
    assert not (state / "base").exists()


@pytest.mark.root
def test_where_user_namespaces_are_forbidden_root_runs_no_script_either(
    state: Path, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> int:
        raise PermissionError(1, "user namespaces do not work here")

    monkeypatch.setattr(userns, "create", refused)
    with pytest.raises(CorralError, match="user namespaces do not work here") as caught:
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
