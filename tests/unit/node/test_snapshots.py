"""The manifest of a memory snapshot: an instance goes on only with what it was born with."""

import json
import os
from pathlib import Path

import pytest

from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.node import snapshots
from corral.node.snapshots import Snapshot

DEBUG = Snapshot("ins_1", "runsc", "1", "sha256:1", "py", Limits(), "debug", ("unsafe_no_landlock",), 4096)


def test_a_snapshot_is_read_as_it_was_written(tmp_path: Path) -> None:
    snapshots.seal(str(tmp_path), DEBUG)
    assert snapshots.read(str(tmp_path)) == DEBUG


def test_all_that_a_snapshot_is_made_of_is_on_disk_before_its_manifest_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = tmp_path / "image"
    snapshots.begin(str(into), "ins_1")
    for name in ("checkpoint.img", "disk.img"):
        (into / name).write_bytes(b"x")
    steps: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(fd: int) -> None:
        steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    def noted_replace(source: str, target: str) -> None:
        steps.append(f"{os.path.basename(target)} appears")
        replace(source, target)

    monkeypatch.setattr(snapshots.os, "fsync", noted_sync)
    monkeypatch.setattr(snapshots.os, "replace", noted_replace)
    snapshots.seal(str(into), DEBUG)
    appears = steps.index("snapshot.json appears")
    assert steps[:appears] == ["checkpoint.img", "disk.img", "image", "snapshot.json.new"]
    assert steps[appears + 1 :] == ["image", tmp_path.name]
    assert sorted(os.listdir(into)) == ["checkpoint.img", "disk.img", "snapshot.json"]


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_is_neither_file_nor_directory_makes_no_snapshot(tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(tmp_path / "memory")
    else:
        (tmp_path / "memory").symlink_to(tmp_path)
    with pytest.raises(OSError):
        snapshots.seal(str(tmp_path), DEBUG)
    assert os.listdir(tmp_path) == ["memory"]


def test_only_half_a_snapshot_of_just_this_instance_is_discarded(tmp_path: Path) -> None:
    def kept(into: Path, instance: str, made: bool = True) -> list[str] | None:
        assert snapshots.discard_half(instance, str(into), made) == []
        return sorted(os.listdir(into)) if into.exists() else None

    def half(name: str) -> Path:
        snapshots.begin(str(tmp_path / name), "ins_1")
        (tmp_path / name / "memory").write_bytes(b"x")
        return tmp_path / name

    assert kept(half("another"), "ins_2") == ["memory", "snapshot.partial"]
    assert kept(half("own"), "ins_1") is None
    assert kept(half("given"), "ins_1", made=False) == []
    whole = half("whole")
    snapshots.seal(str(whole), DEBUG)
    assert kept(whole, "ins_1") == ["memory", "snapshot.json"]
    # Its node died just before the mark was taken away.
    os.symlink("ins_1", whole / "snapshot.partial")
    assert kept(whole, "ins_1") == ["memory", "snapshot.json"]
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "letter").touch()
    assert kept(stranger, "ins_1") == ["letter"]
    assert kept(tmp_path / "never", "ins_1") is None


def test_a_snapshot_that_becomes_whole_while_one_looks_at_it_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.begin(str(tmp_path / "image"), "ins_1")
    (tmp_path / "image" / "memory").write_bytes(b"x")
    read = snapshots.read

    def read_late(directory: str) -> Snapshot:
        snapshots.seal(directory, DEBUG)
        return read(directory)

    monkeypatch.setattr(snapshots, "read", read_late)
    assert snapshots.discard_half("ins_1", str(tmp_path / "image"), True) == []
    assert sorted(os.listdir(tmp_path / "image")) == ["memory", "snapshot.json"]


@pytest.mark.parametrize("missing", ["seccomp", "unsafe", "disk_base"])
def test_a_manifest_that_does_not_tell_its_defences_is_no_snapshot(tmp_path: Path, missing: str) -> None:
    snapshots.seal(str(tmp_path), DEBUG)
    manifest = tmp_path / snapshots.MANIFEST
    document = json.loads(manifest.read_text())
    del document[missing]
    manifest.write_text(json.dumps(document))
    with pytest.raises(CorralError) as refused:
        snapshots.read(str(tmp_path))
    assert refused.value.code == "not_found"


def test_other_defences_than_those_it_was_born_with_are_a_conflict() -> None:
    def check(seccomp: str, unsafe: frozenset[str]) -> None:
        DEBUG.check("runsc", "1", "sha256:1", Limits(), seccomp=seccomp, unsafe=unsafe)

    same = frozenset({"unsafe_no_landlock"})
    check("debug", same)
    for seccomp, unsafe, word in (("default", same, "debug"), ("debug", frozenset[str](), "defences")):
        with pytest.raises(CorralError) as refused:
            check(seccomp, unsafe)
        assert refused.value.code == "conflict" and word in refused.value.detail
