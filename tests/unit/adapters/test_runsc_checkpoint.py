"""What runsc leaves where it saves a memory: files are taken from there, whatever else may lie there is not, and nothing stays."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corral import faults
from corral.adapters.runtimes import _instance, runsc
from corral.errors import CorralError
from corral.linux import mounts
from corral.ports.runtime import InstanceRef

BASE = 1_910_065_536 // 65536 * 65536


def as_root(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.root(pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")(test))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    path.mkdir(0o700)
    (tmp_path / "into").mkdir()
    (path / "checkpoint.img").write_bytes(b"memory")
    (path / "checkpoint.img").chmod(0o644)
    return path


def handed_over(saved: Path) -> dict[str, bytes]:
    into = saved.parent / "into"
    runsc._hand_over(str(saved), str(into))
    return {path.name: path.read_bytes() for path in into.iterdir()}


def test_the_files_of_a_memory_are_handed_over_closed_to_all_others(saved: Path) -> None:
    (saved / "pages.img").write_bytes(b"pages")
    assert handed_over(saved) == {"checkpoint.img": b"memory", "pages.img": b"pages"}
    assert os.listdir(saved) == []
    for path in (saved.parent / "into").iterdir():
        seen = path.stat()
        assert (seen.st_uid, seen.st_mode & 0o777) == (os.geteuid(), 0o600)


def a_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "letter")


def another_name(path: Path) -> None:
    os.link(path.parent.parent / "letter", path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


@pytest.mark.parametrize("plant", [a_link, another_name, a_socket, os.mkfifo, Path.mkdir])
def test_what_is_no_file_of_a_memory_is_neither_opened_nor_changed_nor_taken(
    saved: Path, plant: Callable[[Path], None]
) -> None:
    letter = saved.parent / "letter"
    letter.write_text("mine")
    letter.chmod(0o644)
    os.unlink(saved / "checkpoint.img")
    plant(saved / "checkpoint.img")
    with pytest.raises((CorralError, OSError)):
        handed_over(saved)
    assert (letter.stat().st_mode & 0o777, letter.read_text()) == (0o644, "mine")
    assert os.listdir(saved.parent / "into") == []


@pytest.mark.parametrize("name", ["snapshot.json", "snapshot.partial", "snapshot.json.new", "disk.img", "who"])
def test_a_name_that_runsc_does_not_use_ends_the_snapshot(saved: Path, name: str) -> None:
    (saved / name).write_text("{}")
    with pytest.raises(CorralError, match=name):
        handed_over(saved)
    assert os.listdir(saved.parent / "into") == []


def test_no_memory_is_no_snapshot(saved: Path) -> None:
    os.unlink(saved / "checkpoint.img")
    with pytest.raises(CorralError, match="no memory"):
        handed_over(saved)


# -- the whole of it, with an instance that consists of its directory alone ----------------------------------------------


class Saving:
    """A runtime whose runsc is `write`, and an instance of it."""

    def __init__(self, top: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runtime = runsc.RunscRuntime(top, installation_id="unit-checkpoint")
        self.ref = InstanceRef("runsc", f"ins_{os.path.basename(top)}", f"{top}/i", {})
        self.into, self.saved = Path(top, "into"), Path(top, "i", "saved")
        for path in (top, self.ref.directory, self.into):
            os.makedirs(path, 0o711, exist_ok=True)
        _instance.make_place(self.ref.directory)
        Path(self.ref.directory, "disk.img").touch()
        monkeypatch.setattr(self.runtime._ids, "find", lambda _: BASE)

    def checkpoint(self, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.runtime, "_save_memory", lambda _, place: write(Path(place, "saved")))
        self.runtime._checkpoint(self.ref, str(self.into))


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Saving]:
    top = tempfile.mkdtemp(prefix="corral-checkpoint-")
    one = Saving(top, monkeypatch)
    try:
        yield one
    finally:
        assert _instance.clear_place(one.ref.directory) == []
        shutil.rmtree(top)


def a_memory(path: Path) -> None:
    (path / "checkpoint.img").write_bytes(b"memory")


@as_root
def test_a_snapshot_is_the_memory_and_the_disk(saving: Saving, monkeypatch: pytest.MonkeyPatch) -> None:
    saving.checkpoint(a_memory, monkeypatch)
    assert sorted(os.listdir(saving.into)) == ["checkpoint.img", "disk.img"]


@as_root
@pytest.mark.parametrize("name", ["checkpoint.img", "snapshot.json"])
def test_a_link_in_place_of_a_file_reaches_nothing(saving: Saving, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    letter = saving.into.parent / "letter"
    letter.touch()
    letter.chmod(0o644)
    with pytest.raises(CorralError):
        saving.checkpoint(lambda path: (path / name).symlink_to(letter), monkeypatch)
    assert letter.stat().st_mode & 0o777 == 0o644
    assert os.listdir(saving.into) == []


@as_root
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "error",
    [OSError("broken"), CorralError("infra_error", "broken"), subprocess.TimeoutExpired("runsc", 1), RuntimeError()],
    ids=lambda error: type(error).__name__,
)
def test_a_checkpoint_that_fails_keeps_no_half_memory(
    saving: Saving, monkeypatch: pytest.MonkeyPatch, error: Exception, late: bool
) -> None:
    def fail() -> None:
        raise error

    def write(path: Path) -> None:
        a_memory(path)
        (path / "deep").mkdir()
        (path / "deep" / "file").write_bytes(b"half")
        if not late:
            fail()

    if late:
        faults.arm("runtime.checkpoint.memory", fail)
    try:
        with pytest.raises((CorralError, RuntimeError)):
            saving.checkpoint(write, monkeypatch)
    finally:
        faults.arm("runtime.checkpoint.memory", None)
    assert not saving.saved.exists()
    assert mounts.mounts_below(f"{saving.ref.directory}/m/saved") == []
    saving.checkpoint(a_memory, monkeypatch)  # and does not stand in the way of the next
    assert sorted(os.listdir(saving.into)) == ["checkpoint.img", "disk.img"]


@pytest.mark.parametrize("planted", ["link", "pipe", "directory"])
def test_what_a_sandbox_lays_in_place_of_a_record_is_neither_followed_nor_waited_for(
    tmp_path: Path, planted: str
) -> None:
    secret, record = tmp_path / "secret", tmp_path / "pid"
    secret.write_text("17")
    {
        "link": lambda: record.symlink_to(secret),
        "pipe": lambda: os.mkfifo(record),
        "directory": record.mkdir,
    }[planted]()
    with pytest.raises((OSError, ValueError)):
        runsc._record(str(record))
    assert runsc._record(str(secret)) == "17"
