"""Place and launcher of an instance: seen only where they should be, gone when they should be."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.adapters.runtimes import _instance
from corral.domain.limits import Limits
from corral.linux import mounts, process, userns

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")]
BASE = 1_910_000_000 // 65536 * 65536


@pytest.fixture
def directory() -> Iterator[str]:
    """An instance directory below one that is closed to all others."""
    top = tempfile.mkdtemp(prefix="corral-instance-")
    path = f"{top}/i"
    os.mkdir(path, 0o711)
    try:
        yield path
    finally:
        assert _instance.clear_place(path) == []
        shutil.rmtree(top)


def launch(directory: str, command: list[str], **more: str) -> _instance.Launcher:
    with socket.socket(socket.AF_UNIX) as control:
        return _instance.Launcher(
            directory, command, control.fileno(), groups=(), log=f"{directory}/out", files={}, limits=Limits(), **more
        )


def said(directory: str) -> list[str]:
    return Path(f"{directory}/out").read_text().splitlines()


def test_a_launcher_shows_closed_places_to_the_ids_of_sandboxes_and_the_host_sees_none_of_it(directory: str) -> None:
    place = _instance.make_place(directory)
    Path(f"{directory}/tools").mkdir(0o755)
    Path(f"{directory}/tools/program").touch()
    look = f"ls {_instance.VIEW}/late {_instance.TOOLS_VIEW}; ls {place}"
    command = ["setpriv", "--reuid", str(BASE), "--regid", str(BASE), "--clear-groups", "--", "sh", "-c", look]
    launcher = launch(directory, command, tools=f"{directory}/tools")
    try:
        # What is mounted after the launcher began is there too.
        Path(f"{directory}/base").mkdir(0o755)
        Path(f"{directory}/base/file").touch()
        _instance.show(f"{directory}/base", place, "late", None)
        launcher.go()
        assert launcher.wait(20) == 2
    finally:
        launcher.close()
    lines = said(directory)
    assert "file" in lines and "program" in lines
    assert "Permission denied" in lines[-1]
    assert mounts.mounts_below(_instance.VIEW) == []


def test_a_launcher_holds_the_lock_until_it_is_told_to_go(directory: str) -> None:
    _instance.make_place(directory)
    assert not _instance.starting(directory)
    launcher = launch(directory, ["cat", "/proc/self/limits"])
    try:
        assert _instance.starting(directory)
        launcher.go()
        assert launcher.wait(20) == 0
        assert not _instance.starting(directory)
    finally:
        launcher.close()
    assert any(line.split()[:5] == ["Max", "core", "file", "size", "0"] for line in said(directory))


def test_a_launcher_ends_with_its_creator(directory: str) -> None:
    _instance.make_place(directory)
    program = """
import os, signal, socket, sys
from corral.adapters.runtimes import _instance
from corral.domain.limits import Limits
from corral.linux import process
directory = sys.argv[1]
launcher = _instance.Launcher(directory, ["sleep", "100"], socket.socket(socket.AF_UNIX).fileno(), groups=(),
                              log=directory + "/out", files={}, limits=Limits())
print(launcher.ref.pid, flush=True)
process.kill(process.ref_of(os.getpid()))
"""
    done = subprocess.run([sys.executable, "-c", program, directory], capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    launched = process.ref_of(int(done.stdout))
    assert launched is None or process.wait_gone_blocking(launched, 20)
    assert not _instance.starting(directory)


def test_a_tree_is_shown_with_translated_owners_where_the_kernel_can_and_as_it_is_elsewhere(directory: str) -> None:
    place = _instance.make_place(directory)
    namespace = userns.create(BASE)
    try:
        Path(f"{directory}/base").mkdir()
        _instance.show(f"{directory}/base", place, "root", namespace)
        _instance.show("/proc/sys", place, "other", namespace)  # of a kind that has no id maps
    finally:
        os.close(namespace)
    assert os.stat(f"{place}/root").st_uid in (BASE, 0)
    assert os.stat(f"{place}/other").st_uid == 0
    for name in ("root", "other"):
        assert os.statvfs(f"{place}/{name}").f_flag & os.ST_RDONLY


def test_a_place_with_mounts_over_mounts_is_cleared(directory: str) -> None:
    place = _instance.make_place(directory)
    mounts.bind(place, place, read_only=False)
    os.mkdir(f"{place}/root")
    for _ in range(2):
        mounts.bind("/proc/sys", f"{place}/root", read_only=True)
    assert len(mounts.mounts_below(directory)) == 4
    assert _instance.clear_place(directory) == []
    assert mounts.mounts_below(directory) == []
    assert os.listdir(directory) == []


def test_records_and_what_a_death_left_of_their_making_are_removed(directory: str) -> None:
    for name in ("status", "instance.json", "instance.json.17.18", "s"):
        Path(f"{directory}/{name}").touch()
    _instance.remove_files(directory, "instance.json", "status")
    assert os.listdir(directory) == ["s"]


def test_a_filter_is_compiled_once_per_version(directory: str) -> None:
    path = _instance.filter_file(f"{directory}/tools", "exec")
    made = os.stat(path).st_mtime_ns
    time.sleep(0.01)
    assert _instance.filter_file(f"{directory}/tools", "exec") == path
    assert os.stat(path).st_mtime_ns == made
    assert path != _instance.filter_file(f"{directory}/tools", "default")
