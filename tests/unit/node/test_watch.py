"""What the host measures over one exec: watched limits end it by their own names, counters are differences."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from corral.domain.limits import LimitModes, Limits
from corral.linux import nsproc, process
from corral.linux.guesttree import DiskUse
from corral.node import watch
from corral.node.body import Body
from corral.node.watch import Meter
from corral.ports.runtime import HostTree, Stats

WATCHED = LimitModes(memory="watched", pids="watched", disk="watched", inodes="watched")


UID = os.getuid() or 54321


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory of the sandbox's user."""
    made = tmp_path / "tree"
    made.mkdir()
    os.chown(made, UID, -1)
    return made


class StubBody:
    """A sandbox whose counters are what the test says; its tree is a directory."""

    def __init__(self, path: Path, modes: LimitModes, limits: Limits, stats: Callable[[], Stats]) -> None:
        self.tree = HostTree(str(path), UID, UID, "directory")
        self.modes = modes
        self.limits = limits
        self.pid1 = None
        self.runtime = self
        self.ref = None
        self._stats = stats

    async def stats(self) -> Stats:
        return self._stats()

    async def base(self) -> Stats:
        return self._stats()


def meter(
    path: Path, modes: LimitModes = WATCHED, stats: Callable[[], Stats] = Stats, **limits: Any
) -> tuple[Meter, asyncio.Queue[str]]:
    made = Meter(cast("Body", StubBody(path, modes, Limits(**limits), stats)))
    return made, asyncio.Queue()


async def first_end(one: Meter, said: asyncio.Queue[str]) -> str:
    await one.begin(alone=True)
    one.watch(said.put_nowait)
    try:
        async with asyncio.timeout(30):
            return await said.get()
    finally:
        one.stop()


@pytest.mark.parametrize(
    ("stats", "limits", "reason"),
    [
        (Stats(memory_bytes=2 << 20), {"memory_bytes": 1 << 20}, "memory_watch"),
        (Stats(pids=5), {"pids": 4}, "pids_watch"),
        (Stats(memory_bytes=1, memory_whole=False), {"memory_bytes": 1 << 20}, "memory_unseen"),
    ],
)
async def test_a_watched_counter_past_its_limit_ends_the_exec(
    place: Path, stats: Stats, limits: dict[str, int], reason: str
) -> None:
    assert await first_end(*meter(place, stats=lambda: stats, **limits)) == reason


async def test_too_many_files_are_told_from_too_many_bytes(place: Path) -> None:
    for number in range(40):
        (place / f"f{number}").touch()
    assert await first_end(*meter(place, inodes=30)) == "inodes_watch"
    (place / "big").write_bytes(b"x" * (1 << 20))
    assert await first_end(*meter(place, inodes=300, disk_bytes=1 << 19)) == "disk_watch"


async def test_a_tree_that_grows_faster_than_a_look_is_looked_at_longer(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float] = []

    class Endless:
        def __init__(self, path: str, uid: int, gid: int, caps: Any) -> None:
            patience.append(caps.seconds)

        def usage(self) -> DiskUse:
            return DiskUse(0, int(patience[-1] * 100), False)

    monkeypatch.setattr(watch, "GuestTree", Endless)
    monkeypatch.setattr(watch, "SAMPLE_S", 0.05)
    assert await first_end(*meter(place, inodes=150)) == "inodes_watch"
    assert patience == [0.5, 1.0, 2.0]


async def test_a_limit_that_the_kernel_holds_ends_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SAMPLE_S", 0.01)
    (place / "f").write_bytes(b"x" * 100_000)
    looks = itertools.count()
    seen = asyncio.Event()

    def stats() -> Stats:
        if next(looks) > 5:
            seen.set()
        return Stats(memory_bytes=9, pids=9)

    held = LimitModes(memory="enforced", pids="enforced", disk="enforced", inodes="enforced")
    one, said = meter(place, held, stats, memory_bytes=1, pids=1, disk_bytes=1, inodes=1)
    await one.begin(alone=True)
    one.watch(said.put_nowait)
    await asyncio.wait_for(seen.wait(), 30)
    measured = await one.end()
    assert said.empty()
    assert measured.usage.peak_pids == 9 and measured.disk_full and measured.inodes_full


async def test_counters_are_differences_and_none_stays_none(place: Path) -> None:
    answers = iter(
        [Stats(cpu_seconds=1.5, oom_kills=1, cpu_throttled=4), Stats(cpu_seconds=4.0, oom_kills=3, cpu_throttled=9)]
    )
    one, _ = meter(place, stats=lambda: next(answers))
    await one.begin(alone=True)
    measured = await one.end()
    assert (measured.usage.cpu_seconds, measured.usage.oom_kills, measured.cpu_throttled) == (2.5, 2, 5)
    assert (measured.usage.pids_limit_hits, measured.usage.peak_pids) == (None, None)


@pytest.mark.parametrize(
    ("size_mib", "free_kib", "full"),
    [(8, 1600, True), (8, 2100, False), (10, 1548, True), (10, 5000, False), (64, 1724, True), (1024, 1800, True),
     (1024, 3000, False), (2, 700, False)],
)  # fmt: skip
async def test_a_disk_is_full_when_it_has_less_left_than_a_refused_write_leaves(
    place: Path, monkeypatch: pytest.MonkeyPatch, size_mib: int, free_kib: int, full: bool
) -> None:
    one, _ = meter(place, LimitModes(disk="enforced"))
    body = cast("Any", one)._body
    body.tree, body.disk_base = HostTree(str(place), UID, UID, "image"), 0
    free = free_kib // 4
    numbers = (4096, 4096, size_mib * 256, free, free, 1000, 900, 900, 0, 255)
    monkeypatch.setattr(watch.os, "statvfs", lambda path: os.statvfs_result(numbers))
    measured = await one.end()
    assert measured.disk_full is full


async def test_one_look_that_did_not_see_all_ends_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "WATCHED_S", 0.01)
    looks = itertools.count()
    enough = asyncio.Event()

    def stats() -> Stats:
        number = next(looks)
        if number > 8:
            enough.set()
        return Stats(memory_bytes=1, memory_whole=number % 2 == 0)

    one, said = meter(place, stats=stats, memory_bytes=1 << 20)
    await one.begin(alone=True)
    one.watch(said.put_nowait)
    await asyncio.wait_for(enough.wait(), 30)
    await one.end()
    assert said.empty()


@pytest.mark.parametrize(("written", "full"), [(900_000, False), (1 << 20, True)])
async def test_a_watched_disk_is_full_at_its_limit_not_near_it(place: Path, written: int, full: bool) -> None:
    one, _ = meter(place, disk_bytes=1 << 20)
    (place / "f").write_bytes(b"x" * written)
    assert (await one.end()).disk_full is full


async def test_a_file_without_a_name_counts_as_long_as_a_program_has_it_open(place: Path) -> None:
    program = """
import os, sys
file = os.open("gone", os.O_RDWR | os.O_CREAT)
os.write(file, bytes(3 << 20))
os.fsync(file)
os.unlink("gone")
print("ready", flush=True)
sys.stdin.readline()
"""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", sys.executable, "-I", "-S"]
    with subprocess.Popen(
        [*apart, "-c", program], cwd=place.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin and child.stdout
        assert child.stdout.readline() == b"ready\n"
        one, said = meter(place, disk_bytes=2 << 20)
        inner = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())
        cast("Any", one)._body.pid1 = process.ref_of(inner)
        assert await first_end(one, said) == "disk_watch"
        measured = await one.end()
        child.stdin.close()
    assert measured.disk_full
    assert measured.usage.disk_bytes is not None and measured.usage.disk_bytes >= 3 << 20


async def test_a_disk_that_cannot_be_watched_any_more_ends_the_exec_and_is_not_said_to_be_full(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SAMPLE_S", 0.01)
    monkeypatch.setattr(watch.nsproc, "unlinked", lambda pids, device: nsproc.Nameless(whole=False))
    one, said = meter(place, disk_bytes=1 << 20)
    cast("Any", one)._body.pid1 = process.ref_of(os.getpid())
    assert await first_end(one, said) == "disk_unseen"
    assert not (await one.end()).disk_full
