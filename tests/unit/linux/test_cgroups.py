"""Control groups: real ones where this host lets us, and a v2 tree played by a directory."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.domain.limits import MIB, Limits
from corral.linux import cgroups
from corral.linux.cgroups import Cgroup, Hierarchies

LIMITS = Limits(memory_bytes=64 * MIB, pids=24, cpu=0.5)


@pytest.fixture
def group() -> Iterator[Cgroup]:
    host = cgroups.detect()
    if host.kind == "none":
        pytest.skip("no control group can be made here (ordinary user without delegation)")
    made = host.create(f"unit{secrets.token_hex(4)}/ins_a", LIMITS)
    yield made
    assert made.kill(30)
    assert made.remove() == ()
    assert not made.exists()


def start(group: Cgroup, *command: str) -> subprocess.Popen[bytes]:
    """The command as a member of the group from its first instruction on."""
    script = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 9; shift; done; shift; exec "$@"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "sh", *group.procs_files, "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def python(group: Cgroup, code: str) -> subprocess.Popen[bytes]:
    return start(group, sys.executable, "-I", "-S", "-c", code)


def test_members_are_seen_counted_and_killed(group: Cgroup) -> None:
    forks = "import os, sys, time\nfor _ in range(5):\n if os.fork() == 0: os.setsid(); time.sleep(1000)\nprint(flush=True)\ntime.sleep(1000)"
    with python(group, forks) as child:
        assert child.stdout and child.stdout.readline()
        assert len(group.procs()) == 6 and child.pid in group.procs()
        stats = group.stats()
        if "pids" in group.held:
            assert stats.pids == 6
        reaper = threading.Thread(target=child.wait)
        reaper.start()
        assert group.kill(30)
        reaper.join(30)
        assert group.procs() == [] and child.returncode == -signal.SIGKILL


def test_freezer_alone_kills_a_bomb(group: Cgroup) -> None:
    if "freezer" not in group.v1:
        pytest.skip("no v1 freezer here")
    alone = Cgroup(group.name, group.v1, None, group.held)
    bomb = "import os\nprint(flush=True)\nwhile True:\n try: os.fork()\n except OSError: pass"
    with python(alone, bomb) as child:
        assert child.stdout and child.stdout.readline()
        threading.Thread(target=child.wait, daemon=True).start()
        assert alone.kill(60)
        assert alone.procs() == []


def test_memory_over_the_limit_is_an_oom_kill_and_peaks_reset(group: Cgroup) -> None:
    if "memory" not in group.held:
        pytest.skip("no memory controller here")
    before = group.stats()
    with python(group, f"x = bytearray(b'x') * {4 * LIMITS.memory_bytes}") as child:
        assert child.wait(60) == -signal.SIGKILL
    after = group.stats()
    assert before.oom_kills is not None and after.oom_kills == before.oom_kills + 1
    assert after.peak_memory_bytes is not None and after.peak_memory_bytes > LIMITS.memory_bytes * 0.8
    if group.reset_peak():
        assert (group.stats().peak_memory_bytes or 0) < LIMITS.memory_bytes // 2
    with python(group, "import os; os.kill(os.getpid(), 9)") as child:
        child.wait(60)
    assert group.stats().oom_kills == after.oom_kills, "a plain kill is no OOM"


def test_pids_over_the_limit_are_refused_and_counted(group: Cgroup) -> None:
    if "pids" not in group.held:
        pytest.skip("no pids controller here")
    code = (
        "import os, time\nn = 0\n"
        "for _ in range(96):\n try:\n  pid = os.fork()\n except OSError: break\n"
        " if pid == 0: time.sleep(1000)\n n += 1\nprint(n, flush=True)\ntime.sleep(1000)"
    )
    with python(group, code) as child:
        assert child.stdout
        assert int(child.stdout.readline()) == LIMITS.pids - 1
        assert (group.stats().pids_limit_hits or 0) > 0
        threading.Thread(target=child.wait, daemon=True).start()
        assert group.kill(30)


def test_cpu_time_is_measured(group: Cgroup) -> None:
    # Eight of them, so that they get more than half a processor beside whatever else the machine does.
    with python(group, "import os\nfor _ in range(3): os.fork()\nwhile True: pass") as child:
        end = time.monotonic() + 60
        while True:
            seen = group.stats()
            held_back = "cpu" not in group.held or (seen.cpu_throttled or 0) > 0
            if ((seen.cpu_seconds or 0) >= 0.2 and held_back) or time.monotonic() > end:
                break
            time.sleep(0.05)
        reaper = threading.Thread(target=child.wait)
        reaper.start()
        assert group.kill(30)
        reaper.join(30)
    assert 0.2 <= (seen.cpu_seconds or 0) < 60
    assert held_back, "half a processor for eight that each want a whole one"


def test_frozen_processes_do_not_run_until_thawed(group: Cgroup) -> None:
    with python(group, "import sys\nfor line in sys.stdin: print(line, end='', flush=True)") as child:
        assert child.stdin and child.stdout
        child.stdin.write(b"a\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"a\n"
        if not group.freeze():
            pytest.skip("nothing freezes here")
        child.stdin.write(b"b\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        assert os.fstat(child.stdout.fileno()) and _waiting(child.stdout.fileno()) is False
        group.thaw()
        os.set_blocking(child.stdout.fileno(), True)
        assert child.stdout.readline() == b"b\n"
        child.stdin.close()
        assert child.wait(30) == 0


def _waiting(fd: int) -> bool:
    import select

    return bool(select.select([fd], [], [], 0.2)[0])


def test_create_takes_what_is_there_and_names_are_listed(group: Cgroup) -> None:
    host = cgroups.detect()
    installation = group.name.split("/")[0]
    again = host.create(group.name, LIMITS)
    assert again == group
    other = host.create(f"{installation}/ins_b", LIMITS)
    assert host.find_ours(installation) == [group.name, other.name]
    assert other.remove() == ()
    assert host.find_ours(installation) == [group.name]
    assert Cgroup.from_json(group.to_json()) == group


def test_empty_parents_go_with_the_last_group() -> None:
    host = cgroups.detect()
    if host.kind == "none":
        pytest.skip("no control group can be made here (ordinary user without delegation)")
    installation = f"unit{secrets.token_hex(4)}"
    made = host.create(f"{installation}/ins_a", LIMITS)
    parents = [os.path.dirname(directory) for directory in made.directories]
    assert all(os.path.isdir(parent) for parent in parents)
    assert made.remove() == () and made.remove() == ()
    assert not any(os.path.exists(parent) for parent in parents)


@pytest.mark.parametrize("name", ["", "a/../b", "/a", "a//b", "a/b c", "..", "a/.hidden"])
def test_names_that_leave_our_part_of_the_tree_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        Hierarchies({"pids": "/nowhere"}).open(name)


# A v2 tree played by a directory: this machine's controllers belong to v1.

V2_FILES = {
    "cgroup.procs": "",
    "cgroup.events": "populated 0\nfrozen 0\n",
    "cgroup.subtree_control": "",
    "cgroup.controllers": "cpu memory pids\n",
    "cgroup.kill": "",
    "cgroup.freeze": "0\n",
    "memory.max": "max\n",
    "memory.swap.max": "max\n",
    "memory.current": "4096\n",
    "memory.peak": "8192\n",
    "memory.events": "low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 0\n",
    "pids.max": "max\n",
    "pids.current": "2\n",
    "pids.peak": "7\n",
    "pids.events": "max 5\n",
    "cpu.max": "max 100000\n",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1\nnr_periods 9\nnr_throttled 3\n",
}


@pytest.fixture
def v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hierarchies:
    top = tmp_path / "fs"
    files = dict(V2_FILES)

    def mkdir(path: str) -> None:
        os.mkdir(path)
        for name, content in files.items():
            Path(path, name).write_text(content)

    def rmdir(path: str) -> None:
        entries = list(Path(path).iterdir())
        if any(entry.is_dir() for entry in entries):
            raise OSError(16, "busy")
        for entry in entries:
            entry.unlink()
        os.rmdir(path)

    monkeypatch.setattr(cgroups, "_mkdir", mkdir)

    def write(path: str, text: str) -> None:
        with open(path, "r+") as file:
            file.truncate()
            file.write(text)

    monkeypatch.setattr(cgroups, "_rmdir", rmdir)
    monkeypatch.setattr(cgroups, "_write", write)
    mkdir(str(top))
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"31 23 0:28 / {top} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/\n")
    return cgroups.detect(str(mountinfo), str(own))


@pytest.mark.root
def test_v2_is_found_and_gets_limits(v2: Hierarchies) -> None:
    assert v2.kind == "v2" and v2.v2_controllers == {"memory", "pids", "cpu"}
    group = v2.create("inst/ins_a", LIMITS)
    assert group.held == {"memory", "pids", "cpu"} and group.v2
    place = Path(group.v2)
    assert (place / "memory.max").read_text().startswith(str(64 * MIB))
    assert (place / "memory.swap.max").read_text().startswith("0")
    assert (place / "pids.max").read_text().startswith("24")
    assert (place / "cpu.max").read_text().startswith("50000 100000")
    assert (place.parent / "cgroup.subtree_control").read_text() != "", "controllers must be handed down"
    assert v2.find_ours("inst") == ["inst/ins_a"]
    assert group.remove() == () and not place.exists() and not place.parent.parent.exists()


@pytest.mark.root
def test_v2_counters_are_read_and_missing_ones_are_none(v2: Hierarchies) -> None:
    group = v2.create("inst/ins_a", LIMITS)
    assert group.stats() == cgroups.CgroupStats(4096, 8192, 1, 2, 7, 5, 1.5, 3)
    assert not group.reset_peak()
    assert group.v2
    for name in ("memory.peak", "pids.peak", "memory.events"):
        Path(group.v2, name).unlink()
    stats = group.stats()
    assert (stats.peak_memory_bytes, stats.peak_pids, stats.oom_kills) == (None, None, None)
    assert cgroups.detect("/nonexistent").open("inst/ins_a").stats() == cgroups.CgroupStats()


@pytest.mark.root
def test_v2_kill_is_one_write(v2: Hierarchies) -> None:
    group = v2.create("inst/ins_a", LIMITS)
    assert group.v2 and group.kill(1)
    assert Path(group.v2, "cgroup.kill").read_text() == "1"


def test_a_group_without_one_of_its_limits_is_none(tmp_path: Path) -> None:
    """A runtime that declares the limit as enforced must not have an instance that is without it."""
    host = Hierarchies({"memory": str(tmp_path), "pids": str(tmp_path)})
    with pytest.raises(OSError, match="does not take the limit of memory, pids"):
        host.create("inst/ins_a", LIMITS)
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"


def _deaf(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Files that take every value and keep their own, as those of a kernel that knows better."""
    real = cgroups._write

    def write(path: str, text: str) -> None:
        if os.path.basename(path) not in names:
            real(path, text)

    monkeypatch.setattr(cgroups, "_write", write)


@pytest.mark.root
@pytest.mark.parametrize(
    ("limit", "name"),
    [("memory", "memory.max"), ("memory", "memory.swap.max"), ("pids", "pids.max"), ("cpu", "cpu.max")],
)
def test_a_limit_that_reads_back_as_another_is_not_held(
    v2: Hierarchies, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, name: str
) -> None:
    _deaf(monkeypatch, name)
    with pytest.raises(OSError, match=f"does not take the limit of {limit}$"):
        v2.create("inst/ins_a", LIMITS)
    assert v2.find_ours("inst") == []
    seen = cgroups.detect(str(tmp_path / "mountinfo"), str(tmp_path / "cgroup"))
    assert not seen.can(limit) and seen.can("cpu" if limit == "pids" else "pids"), "nor is it declared"


def test_a_real_limit_that_reads_back_as_another_is_not_held(group: Cgroup, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pids" not in group.held:
        pytest.skip("no pids controller here")
    host = cgroups.detect()
    _deaf(monkeypatch, "pids.max")
    assert not cgroups.detect().can("pids")
    with pytest.raises(OSError, match="does not take the limit of pids"):
        host.create(group.name, Limits(memory_bytes=64 * MIB, pids=25, cpu=0.5))


def test_sizes_that_are_no_whole_pages_are_held(group: Cgroup) -> None:
    """The kernel keeps whole pages: that is the limit, not another one."""
    again = cgroups.detect().create(group.name, Limits(memory_bytes=64 * MIB + 1, pids=24, cpu=0.333))
    assert again.held == group.held
