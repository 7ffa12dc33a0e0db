"""The store of bases: another recipe or a refresh makes a new base, removal spares what is used, killed builds leave nothing for long."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.errors import CorralError
from corral.node import templates_confined, templates_debian
from corral.node.templates import Templates
from corral.node.templates_debian import cannot_build, packages_of
from corral.node.templates_recipe import parse

from .layouts import tar_of

NOBODY: frozenset[str] = frozenset()


def nobody() -> frozenset[str]:
    """Who stands on a base, as removals ask."""
    return NOBODY


def only(*digests: str) -> Callable[[], frozenset[str]]:
    return lambda: frozenset(digests)


def store(state: Path) -> Templates:
    (state / "shipped").mkdir(parents=True, exist_ok=True)
    return Templates(state, state / "shipped")


def add(templates: Templates, state: Path, name: str, content: str, **more: Any) -> None:
    path = state / f"{name}-{content}.tar"
    path.write_bytes(tar_of([("program", "bin/bash", "#!"), ("file", "content", content)]))
    templates.add(parse({"name": name, "kind": "archive", "archive": str(path), **more}, "test"))


def made(templates: Templates, name: str, **how: bool) -> Path:
    return Path(asyncio.run(templates.ensure(name, **how)).path)


def refusal(code: str, call: Any, *given: Any) -> CorralError:
    with pytest.raises(CorralError) as caught:
        call(*given)
    assert caught.value.code == code
    return caught.value


def test_another_recipe_of_the_name_makes_a_new_base_beside_the_one_in_use(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")
    first = made(templates, "mine")
    add(templates, tmp_path, "mine", "two")
    assert made(templates, "mine") == first  # a run takes what is built
    second = made(templates, "mine", current=True)
    assert second != first
    assert (first / "content").read_text() == "one"
    assert (second / "content").read_text() == "two"
    assert made(templates, "mine", current=True) == second


def test_what_is_known_of_a_base_is_shown(tmp_path: Path) -> None:
    templates = store(tmp_path)
    tools = {
        "languages": {"bash": "bash", "c": "cc"},
        "skills": ["shell"],
        "stop_signal": "SIGINT",
        "start": ["/bin/x"],
    }
    add(templates, tmp_path, "mine", "one", **tools)
    before = templates.show("mine")
    assert (before["digest"], before["size_bytes"], before["path"]) == (None, None, None)
    path = made(templates, "mine")
    shown = templates.show("mine")
    assert (shown["kind"], shown["path"], shown["languages"], shown["skills"]) == (
        "archive",
        str(path),
        ["bash"],
        ["shell"],
    )
    assert (shown["stop_signal"], shown["start"]) == ("SIGINT", ["/bin/x"])
    files = [found for found in path.rglob("*") if found.is_symlink() or found.is_file()]
    assert shown["files"] == len(files)
    assert shown["size_bytes"] == sum(found.lstat().st_size for found in files if not found.is_symlink())
    assert abs(shown["built_at"] - time.time()) < 600


def test_packages_are_read_from_the_trees_own_list_and_never_through_a_link_out(tmp_path: Path) -> None:
    templates = store(tmp_path)
    status = "Package: gcc\nStatus: install ok installed\nVersion: 12\nDescription: x\n y\n\nPackage: old\nStatus: deinstall ok config-files\nVersion: 1\n"
    (tmp_path / "status").write_text(status)
    for name, kind, what in (("a", "file", status), ("b", "link", str(tmp_path / "status"))):
        path = tmp_path / f"{name}.tar"
        path.write_bytes(tar_of([(kind, "var/lib/dpkg/status", what)]))
        templates.add(parse({"name": name, "kind": "archive", "archive": str(path)}, "test"))
        made(templates, name)
    assert templates.show("a")["packages"] == {"gcc": "12"}
    assert templates.show("b")["packages"] == {}


def test_removal_is_refused_while_a_sandbox_stands_on_it_or_is_being_made(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")
    path = made(templates, "mine")
    digest = templates.show("mine")["digest"]
    refusal("template_in_use", templates.remove, "mine", only(digest))
    with templates.hold("mine"):
        refusal("template_in_use", templates.remove, "mine", nobody)
    assert path.is_dir()
    gone = templates.remove("mine", only("sha256:other"))
    assert (gone["digest"], gone["freed_bytes"] > 0) == (digest, True)
    assert [entry.name for entry in (tmp_path / "base").iterdir()] == [".lock"]
    assert templates.names() == []
    refusal("not_found", templates.remove, "mine", nobody)


def test_a_shipped_recipe_stays_when_its_base_is_removed_and_takes_no_other_recipe(tmp_path: Path) -> None:
    templates = store(tmp_path)
    (tmp_path / "shipped/small.yaml").write_text("name: small\nkind: frozen\nprograms: [sh]\n")
    made(templates, "small")
    templates.remove("small", nobody)
    assert templates.names() == ["small"]
    assert templates.remove("small", nobody)["digest"] is None
    refusal("already_exists", templates.add, parse({"name": "small", "kind": "frozen"}, "test"))


def test_a_base_that_two_templates_have_stays_for_the_other(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "same")
    add(templates, tmp_path, "yours", "same")
    path = made(templates, "mine")
    assert made(templates, "yours") == path
    assert templates.remove("mine", nobody)["freed_bytes"] == 0
    assert path.is_dir()
    assert templates.disk_use(NOBODY)["count"] == 1


def test_a_base_that_no_template_has_goes_after_a_time_unless_it_is_needed(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")
    first = made(templates, "mine")
    digest = templates.show("mine")["digest"]
    add(templates, tmp_path, "mine", "two")
    made(templates, "mine", current=True)
    assert templates.disk_use(NOBODY)["unused"] == 1
    assert templates.disk_use(frozenset({digest}))["unused"] == 0
    assert templates.sweep(nobody)["base"] == 0  # it was somebody's just now
    day = time.time() - 25 * 3600
    os.utime(f"{first}.about.json", (day, day))
    assert templates.sweep(only(digest))["base"] == 0
    assert templates.sweep(nobody)["base"] == 1
    assert not first.exists()
    assert templates.disk_use(NOBODY)["count"] == 1


def test_a_build_that_was_killed_leaves_only_what_the_next_look_finds_and_removes(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")
    program = (
        "import asyncio, sys, time\n"
        "from corral.node.templates import Templates\n"
        "def stay(text, part):\n"
        "    if 'checking' in text: print('here', flush=True); time.sleep(600)\n"
        f"asyncio.run(Templates({str(tmp_path)!r}, {str(tmp_path / 'shipped')!r}).ensure('mine', stay))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as building:
        assert building.stdout is not None
        assert building.stdout.readline() == b"here\n"
        assert templates.unfinished() == []  # somebody's, who lives
        assert templates.remove_unfinished() == 0
        building.send_signal(signal.SIGKILL)
    assert len(templates.unfinished()) == 1
    assert templates.built("mine") is None
    assert templates.sweep(nobody) == {"template_build": 1, "base": 0}
    assert templates.unfinished() == []
    assert made(templates, "mine").is_dir()


def ready(steps: list[str]) -> int:
    return sum(text.endswith("ready") for text in steps)


def test_a_refresh_that_waited_for_another_one_takes_what_that_built(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")
    steps: list[str] = []
    (tmp_path / "base").mkdir()

    async def both() -> None:
        with open(tmp_path / "base" / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            calls = [
                asyncio.create_task(templates.ensure("mine", lambda text, _: steps.append(text), refresh=True))
                for _ in range(2)
            ]
            await asyncio.sleep(0)  # both have asked, neither has built
        await asyncio.gather(*calls)

    asyncio.run(both())
    assert ready(steps) == 1


def test_a_refresh_that_comes_during_a_build_reads_everything_anew(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")
    archive = tmp_path / "mine-one.tar"
    has_read, may_end = threading.Event(), threading.Event()

    def stay(text: str, part: float | None) -> None:
        if "checking" in text:
            has_read.set()
            may_end.wait(60)

    async def both() -> Path:
        plain = asyncio.create_task(templates.ensure("mine", stay))
        await asyncio.to_thread(has_read.wait, 60)
        archive.write_bytes(tar_of([("file", "content", "changed")]))
        refresh = asyncio.create_task(templates.ensure("mine", refresh=True))
        await asyncio.sleep(0)
        may_end.set()
        await plain
        return Path((await refresh).path)

    assert (asyncio.run(both()) / "content").read_text() == "changed"


def test_a_removal_waits_for_no_build_and_says_that_it_may_be_tried_again(tmp_path: Path) -> None:
    templates = store(tmp_path)
    for name in ("mine", "yours"):
        add(templates, tmp_path, name, name)
    path = made(templates, "mine")
    builds, may_end = threading.Event(), threading.Event()

    def stay(text: str, part: float | None) -> None:
        builds.set()
        may_end.wait(60)

    building = threading.Thread(target=lambda: asyncio.run(templates.ensure("yours", stay)))
    building.start()
    try:
        assert builds.wait(60)
        for of in (templates, store(tmp_path)):  # of this process and of another one
            told = refusal("conflict", of.remove, "mine", nobody)
            assert told.retryable
        assert path.is_dir()
    finally:
        may_end.set()
        building.join()
    assert templates.remove("mine", nobody)["freed_bytes"] > 0


def test_who_stands_on_a_base_is_asked_when_nobody_else_can_begin_to(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")
    path = made(templates, "mine")
    comes, began = threading.Event(), threading.Event()

    def begin() -> None:
        comes.set()
        with templates.hold("mine"):
            began.set()

    beginning = threading.Thread(target=begin)

    def in_use() -> frozenset[str]:
        beginning.start()
        assert comes.wait(60)
        assert not began.wait(0.3)
        return NOBODY

    assert templates.remove("mine", in_use)["freed_bytes"] > 0
    beginning.join()
    assert began.is_set()
    assert not path.exists()


def test_a_base_that_another_template_had_when_a_sandbox_of_it_began_stays(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "same")
    add(templates, tmp_path, "yours", "same")
    path = made(templates, "mine")
    with templates.hold("yours"):
        assert made(templates, "yours") == path
        add(templates, tmp_path, "yours", "other")
        made(templates, "yours", current=True)
        assert templates.remove("mine", nobody)["freed_bytes"] == 0
        assert path.is_dir()
    assert templates.sweep(nobody)["base"] == 0, "it was somebody's just now"
    os.utime(f"{path}.about.json", (1, 1))
    assert templates.sweep(nobody)["base"] == 1


def test_a_sandbox_can_begin_while_an_old_base_is_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")
    first = made(templates, "mine")
    add(templates, tmp_path, "mine", "two")
    made(templates, "mine", current=True)
    os.utime(f"{first}.about.json", (1, 1))
    began: list[bool] = []

    def begin() -> None:
        with templates.hold("mine"):
            began.append(True)

    def slow(path: Path, **_: Any) -> None:
        beginning = threading.Thread(target=begin, daemon=True)
        beginning.start()
        beginning.join(60)

    monkeypatch.setattr("shutil.rmtree", slow)
    assert templates.sweep(nobody)["base"] == 1
    assert began == [True]
    assert not first.exists(), "nobody finds it any more"


def test_what_no_base_had_to_expect_is_told_by_a_code_too(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")

    def broken(text: str, part: float | None) -> None:
        raise ValueError("no such step")

    with pytest.raises(CorralError, match="ValueError: no such step") as caught:
        asyncio.run(templates.ensure("mine", broken))
    assert caught.value.code == "infra_error"
    assert templates.built("mine") is None


def test_of_the_list_of_packages_of_a_stranger_no_more_is_read_than_a_list_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = "".join(f"Package: p{number}\nVersion: {'1' * 1000}\n\n" for number in range(100))
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(status)
    assert len(packages_of(tmp_path)) == 100
    assert max(map(len, packages_of(tmp_path).values())) == templates_debian.MAX_WORD
    monkeypatch.setattr(templates_debian, "MAX_PACKAGES", 50)
    assert len(packages_of(tmp_path)) == 50
    monkeypatch.setattr(templates_debian, "MAX_STATUS", 10 * 1030)
    assert len(packages_of(tmp_path)) <= 11


def test_a_recipe_in_a_file_names_paths_relative_to_itself(tmp_path: Path) -> None:
    templates = store(tmp_path / "state")
    (tmp_path / "root.tar").write_bytes(tar_of([("file", "x", "1")]))
    (tmp_path / "own.yaml").write_text("name: own\nkind: archive\narchive: root.tar\n")
    assert templates.add_file(str(tmp_path / "own.yaml")) == "own"
    assert templates.add_file(str(tmp_path / "own.yaml"), "other") == "other"
    assert (made(templates, "other") / "x").read_text() == "1"


def test_one_bad_recipe_hides_no_other(tmp_path: Path) -> None:
    templates = store(tmp_path)
    (tmp_path / "shipped/good.yaml").write_text("name: good\nkind: frozen\n")
    (tmp_path / "shipped/bad.yaml").write_text("kind: [\n")
    listed = {item["name"]: item for item in templates.describe()}
    assert listed["good"]["available"]
    assert not listed["bad"]["available"]
    assert "bad.yaml" in listed["bad"]["reason"]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ([], "must be a mapping"),
        ({"name": "a"}, "kind: must be one of archive, debian, frozen, oci"),
        ({"name": "A", "kind": "frozen"}, "name: must match"),
        ({"name": "../a", "kind": "frozen"}, "name: must match"),
        ({"kind": "frozen"}, "name: is missing"),
        ({"name": "a", "kind": "debian"}, "packages: is missing"),
        ({"name": "a", "kind": "archive"}, "archive: is missing"),
        ({"name": "a", "kind": "frozen", "packages": ["x"]}, "packages: unknown member for the kind frozen"),
        ({"name": "a", "kind": "debian", "packages": ["--hook=x"]}, "'--hook=x' is no name"),
        ({"name": "a", "kind": "debian", "packages": "x"}, "must be a list"),
        ({"name": "a", "kind": "debian", "packages": ["x"], "suite": "-o"}, "suite: must match"),
        ({"name": "a", "kind": "debian", "packages": ["x"], "sources": ["-o x"]}, "sources: must match"),
        ({"name": "a", "kind": "debian", "packages": ["x"], "sources": ["deb x\ndeb y"]}, "sources: must match"),
        ({"name": "a", "kind": "frozen", "languages": {"cobol": "x"}}, "'cobol' is none of"),
        ({"name": "a", "kind": "frozen", "languages": {"c": "../cc"}}, "must name a program"),
        ({"name": "a", "kind": "frozen", "stop_signal": "SIGFOO"}, "stop_signal: must be one of"),
        ({"name": "a", "kind": "archive", "archive": "x", "sha256": "0"}, "sha256: must match"),
        ({"name": "a", "kind": "oci", "image": "x", "platform": "../x"}, "platform: must match"),
    ],
)  # fmt: skip
def test_a_recipe_that_is_wrong_says_where(document: Any, told: str) -> None:
    assert told in refusal("invalid_value", parse, document, "x.yaml").detail


def test_a_host_that_cannot_build_says_what_it_lacks_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = parse({"name": "a", "kind": "debian", "packages": ["x"], "configure": True}, "x")

    def lack(*missing: str) -> tuple[str, str]:
        monkeypatch.setattr("shutil.which", lambda name, path=None: None if name in missing else f"/usr/bin/{name}")
        found = cannot_build(recipe)
        assert found is not None
        return found.reason, found.hint

    sysctl: dict[str, int] = {}
    monkeypatch.setattr(templates_confined, "sysctl", sysctl.get)
    assert lack("mmdebstrap") == ("needs mmdebstrap on the host", "install the package mmdebstrap")
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    assert lack("newgidmap") == ("needs newuidmap and newgidmap on the host", "install the package uidmap")
    assert "a subordinate range of 65536 ids" in lack()[0]
    assert "--add-subuids" in lack()[1]
    for name in ("kernel/unprivileged_userns_clone", "user/max_user_namespaces"):
        sysctl[name] = 0
        assert lack() == ("needs user namespaces", lack()[1])
        assert name.rpartition("/")[2] in lack()[1]


def test_removal_on_a_fresh_state_directory_finds_nothing_built(tmp_path: Path) -> None:
    templates = store(tmp_path)
    add(templates, tmp_path, "mine", "one")
    assert templates.remove("mine", nobody) == {"name": "mine", "digest": None, "freed_bytes": 0}
