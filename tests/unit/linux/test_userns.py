"""Subordinate id ranges never overlap and are used again only after release; namespaces have the maps that were asked for."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from corral.errors import CorralError
from corral.linux import userns
from corral.linux.userns import SIZE, SubordinateRange

root = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="other ids need root")]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that no real installation of this host has, whose sandboxes may be running."""
    monkeypatch.setattr(userns, "_FLOOR", 1_700_000_000 // SIZE * SIZE)


def installation(tmp_path: Path, name: str, configured: tuple[int, int] | None = None) -> SubordinateRange:
    state = tmp_path / f"state-{name}"
    state.mkdir(exist_ok=True)
    return SubordinateRange(name, state_dir=str(state), configured=configured, run_dir=str(tmp_path / "run"))


def test_live_instances_have_different_ranges_and_asking_again_changes_nothing(tmp_path: Path) -> None:
    ids = installation(tmp_path, "a")
    first, second = ids.allocate("ins_1"), ids.allocate("ins_2")
    assert abs(first - second) >= SIZE
    assert first % SIZE == 0
    assert ids.allocate("ins_1") == first
    assert ids.find("ins_2") == second


def test_a_range_is_used_again_only_after_release(tmp_path: Path) -> None:
    ids = installation(tmp_path, "a", (1 << 20, 2 * SIZE))
    bases = {ids.allocate("ins_1"), ids.allocate("ins_2")}
    assert bases == {1 << 20, (1 << 20) + SIZE}
    with pytest.raises(CorralError) as caught:
        ids.allocate("ins_3")
    assert caught.value.code == "quota_exceeded"
    ids.release("ins_1")
    ids.release("ins_1")
    assert ids.allocate("ins_3") in bases
    assert ids.find("ins_1") is None


def test_records_survive_the_process_that_made_them(tmp_path: Path) -> None:
    base = installation(tmp_path, "a").allocate("ins_1")
    later = installation(tmp_path, "a")
    assert later.find("ins_1") == base
    assert later.allocate("ins_2") != base
    assert installation(tmp_path, "a").allocate("ins_1") == base


def test_nothing_is_claimed_by_looking(tmp_path: Path) -> None:
    ids = installation(tmp_path, "a")
    assert ids.find("ins_1") is None
    ids.release("ins_1")
    assert not (tmp_path / "run").exists()


def test_many_threads_and_objects_get_distinct_ranges(tmp_path: Path) -> None:
    def one(number: int) -> int:
        return installation(tmp_path, f"inst{number % 4}").allocate(f"ins_{number}")

    with ThreadPoolExecutor(16) as pool:
        bases = list(pool.map(one, range(64)))
    assert len(set(bases)) == 64


def test_installations_on_one_host_never_overlap(tmp_path: Path) -> None:
    blocks = [installation(tmp_path, name).claim() for name in "abcde"]
    blocks.sort()
    for (first, count), (second, _) in itertools.pairwise(blocks):
        assert first + count <= second


def test_a_configured_range_that_overlaps_another_installation_is_refused(tmp_path: Path) -> None:
    first, count = installation(tmp_path, "a").claim()
    with pytest.raises(CorralError, match="overlaps"):
        installation(tmp_path, "b", (first + count - SIZE, 4 * SIZE)).allocate("ins_1")
    assert installation(tmp_path, "c", (first + count, 4 * SIZE)).allocate("ins_1") == first + count


@pytest.mark.parametrize("block", [(0, SIZE), (100, SIZE), (1 << 20, 10), ((1 << 32) - SIZE, 2 * SIZE)])
def test_a_configured_range_without_room_or_over_real_users_is_refused(tmp_path: Path, block: tuple[int, int]) -> None:
    with pytest.raises(CorralError) as caught:
        installation(tmp_path, "a", block).claim()
    assert caught.value.code == "invalid_value"


def test_a_changed_configuration_waits_for_live_sandboxes(tmp_path: Path) -> None:
    old = installation(tmp_path, "a", (1 << 20, 2 * SIZE))
    old.allocate("ins_1")
    with pytest.raises(CorralError, match="alive"):
        installation(tmp_path, "a", (1 << 24, 2 * SIZE)).allocate("ins_2")
    old.release("ins_1")
    assert installation(tmp_path, "a", (1 << 24, 2 * SIZE)).allocate("ins_2") == 1 << 24


def test_the_block_of_a_deleted_installation_is_given_out_again(tmp_path: Path) -> None:
    block = installation(tmp_path, "a").claim()
    assert installation(tmp_path, "b").claim() != block
    (tmp_path / "state-a").rmdir()
    assert installation(tmp_path, "c").claim() == block


def test_when_room_runs_out_an_idle_block_moves_on_and_its_owner_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(userns, "_CEILING", userns._FLOOR + 2 * userns._BLOCK)
    idle, used = installation(tmp_path, "a"), installation(tmp_path, "b")
    block = idle.claim()
    base = used.allocate("ins_1")
    assert installation(tmp_path, "c").claim() == block
    installation(tmp_path, "c").allocate("ins_2")
    with pytest.raises(CorralError, match="no free block"):
        idle.allocate("ins_3")
    assert used.allocate("ins_1") == base
    installation(tmp_path, "c").release("ins_2")
    assert idle.allocate("ins_3") == block[0]


class TestAsRoot:
    pytestmark = root

    def test_the_block_of_a_deleted_installation_is_kept_while_its_ids_run_something(self, tmp_path: Path) -> None:
        base = installation(tmp_path, "a").allocate("ins_1")
        (tmp_path / "state-a").rmdir()
        with subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, user=base + 1000, group=base + 1000, extra_groups=[]
        ) as cat:
            assert userns.processes_of(base) == [cat.pid]
            assert installation(tmp_path, "b").claim()[0] != base
            assert cat.stdin is not None
            cat.stdin.close()
        assert userns.processes_of(base) == []

    def test_a_process_whose_first_thread_has_ended_still_holds_its_ids(self, tmp_path: Path) -> None:
        program = """
import ctypes, os, platform, sys, threading, time
def last():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z": time.sleep(0.01)
    print("ready", flush=True)
    os.read(0, 1)
    os._exit(0)
number = {"x86_64": 60, "aarch64": 93}.get(platform.machine())
if number is None:
    sys.exit()
threading.Thread(target=last).start()
ctypes.CDLL(None).syscall(number, 0)
"""
        base = installation(tmp_path, "a").allocate("ins_1")
        python = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(p)), None)
        if python is None:
            pytest.skip("needs a Python that another user can run")
        with subprocess.Popen(
            [python, "-I", "-S", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            user=base,
            group=base,
            extra_groups=[],
            cwd="/",
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            if child.stdout.readline() != b"ready\n":
                pytest.skip("the number of the call is not known here")
            assert userns.processes_of(base) == [child.pid]
            child.stdin.close()
        assert userns.processes_of(base) == []

    def test_the_default_block_lies_above_every_subordinate_range_in_use(self, tmp_path: Path) -> None:
        first, _ = installation(tmp_path, "a").claim()
        for path in ("/etc/subuid", "/etc/subgid"):
            for line in Path(path).read_text().splitlines() if os.path.exists(path) else []:
                _, start, count = line.split(":")
                assert first >= int(start) + int(count)

    def test_a_namespace_has_the_whole_map_and_is_kept_for_the_next_user(self, tmp_path: Path) -> None:
        base = installation(tmp_path, "a").allocate("ins_1")
        namespaces = userns.Namespaces()
        fd = namespaces.of(base)
        assert namespaces.of(base) == fd
        read = "cat /proc/self/uid_map; echo --; cat /proc/self/gid_map"
        said = subprocess.run(
            ["nsenter", f"--user=/proc/self/fd/{fd}", "--preserve-credentials", "sh", "-c", read],
            pass_fds=[fd],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("--")
        kept = os.readlink(f"/proc/self/fd/{fd}")
        del namespaces  # who opens and closes the state directory many times keeps no descriptor of each time
        gc.collect()
        assert kept not in [
            os.readlink(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{n}")
        ]
        expected = [["0", str(base), "65536"]]
        assert [[line.split() for line in part.strip().splitlines()] for part in said] == [expected, expected]

    def test_a_namespace_can_be_made_beside_other_threads_and_leaves_no_process(self, tmp_path: Path) -> None:
        base = installation(tmp_path, "a").allocate("ins_1")
        stop = threading.Event()
        busy = [threading.Thread(target=stop.wait) for _ in range(4)]
        for thread in busy:
            thread.start()
        try:
            with ThreadPoolExecutor(8) as pool:
                fds = list(pool.map(lambda _: userns.create(base), range(16)))
        finally:
            stop.set()
        names = {os.readlink(f"/proc/self/fd/{fd}") for fd in fds}
        for fd in fds:
            os.close(fd)
        assert len(names) == 16
        assert os.readlink("/proc/self/ns/user") not in names
        assert userns.processes_of(base) == []


def test_a_delegated_range_is_this_users_by_name_or_number_and_long_enough(tmp_path: Path) -> None:
    name, number = userns.own_names()[0], userns.own_names()[-1]
    lines = [
        "somebody:100000:65536",
        f"{name}:1000",
        f"{name}:x:65536",
        f"{name}:\u00b2:65536",
        "\xff",
        f"{name}:200000:10",
    ]
    (tmp_path / "subuid").write_text("\n".join([*lines, f"{number}:300000:65536", f"{name}:400000:65536", ""]))
    (tmp_path / "subgid").write_text("somebody:100000:65536\n")
    assert list(userns.delegated("uid", etc=str(tmp_path))) == [
        ("somebody", 100000, 65536),
        (name, 200000, 10),
        (number, 300000, 65536),
        (name, 400000, 65536),
    ]
    assert userns.subordinate("uid", etc=str(tmp_path)) == 200000
    assert userns.subordinate("uid", SIZE, etc=str(tmp_path)) == 300000
    assert userns.subordinate("gid", etc=str(tmp_path)) is None
    assert userns.subordinate("uid", etc=str(tmp_path / "none")) is None
