"""The instance's disk: hard limits, the right owners, and removable from whatever state a crash left."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral import faults
from corral.errors import CorralError
from corral.linux import disk, mounts, userns

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
MIB = 1 << 20
BASE = 1_900_000_000 // 65536 * 65536


@pytest.fixture
def place(tmp_path: Path) -> Iterator[str]:
    directory = tmp_path / "i"
    directory.mkdir()
    try:
        yield str(directory)
    finally:
        assert disk.discard(str(directory), str(directory)) == []
        assert disk.stray_loops(str(directory)) == {}


def fill(path: str) -> int:
    """Write until the disk is full; -> bytes written."""
    try:
        with open(path, "wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    return os.stat(path).st_size


@contextlib.contextmanager
def holder(*command: str) -> Iterator[int]:
    """A process in a mount namespace of its own, as long as the block runs; -> its pid."""
    with subprocess.Popen([*command, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdin.write(b".")
        other.stdin.flush()
        assert other.stdout.read(1) == b"."
        yield other.pid
        other.stdin.close()


@pytest.mark.root
@needs_root
class TestImage:
    @pytest.mark.parametrize(("size", "inodes"), [(MIB, 50), (16 * MIB, 65536), (200 * MIB, 3000)])
    def test_bytes_and_inodes_end_at_the_limit(self, place: str, size: int, inodes: int) -> None:
        tree = disk.prepare(place, place, size, inodes, 1000, 1000)
        assert tree.mode == "image"
        free, files = disk.free(place)
        assert 0.9 * size - 65536 <= free <= size
        assert inodes <= files <= inodes * 1.1 + 64
        if inodes <= 3000:
            made = 0
            with pytest.raises(OSError) as caught:
                for made in range(4 * inodes):
                    open(f"{tree.path}/workspace/{made}", "w").close()
            assert caught.value.errno == errno.ENOSPC
            assert made <= files
            for number in range(made):
                os.unlink(f"{tree.path}/workspace/{number}")
        written = fill(f"{tree.path}/home/big")
        assert 0.85 * size - 65536 <= written <= size
        assert disk.free(place)[0] < MIB

    def test_an_unused_disk_costs_the_host_almost_nothing(self, place: str) -> None:
        disk.prepare(place, place, 1024 * MIB, 65536, 1000, 1000)
        assert os.stat(f"{place}/disk.img").st_blocks * 512 < 2 * MIB

    def test_directories_belong_to_the_sandbox_and_the_rest_does_not(self, place: str) -> None:
        tree = disk.prepare(place, place, 4 * MIB, 100, 4321, 4322)
        for name, mode in (("workspace", 0o755), ("home", 0o755), ("var_tmp", 0o1777)):
            found = os.stat(f"{tree.path}/{name}")
            assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (4321, 4322, mode)
        assert (tree.uid, tree.gid) == (4321, 4322)
        assert os.stat(tree.path).st_uid == 0
        line = next(line for line in Path("/proc/self/mounts").read_text().splitlines() if f" {tree.path} " in line)
        assert {"nosuid", "nodev", "noatime"} <= set(line.split(" ")[3].split(","))

    def test_with_an_id_map_the_image_does_not_depend_on_the_range(self, place: str) -> None:
        namespace = userns.create(BASE)
        try:
            tree = disk.prepare(place, place, 4 * MIB, 100, 1000, 1000, idmap=lambda: namespace)
        finally:
            os.close(namespace)
        assert (tree.uid, tree.gid) == (BASE + 1000, BASE + 1000)
        made = f"{tree.path}/workspace"
        subprocess.run(["touch", "f"], cwd=made, user=tree.uid, group=tree.gid, extra_groups=[], check=True)
        assert os.stat(f"{made}/f").st_uid == BASE + 1000
        with pytest.raises(OSError) as caught:
            open(f"{made}/by-root", "w").close()
        assert caught.value.errno == errno.EOVERFLOW
        assert os.stat(f"{tree.path}/{disk.LOG}").st_uid == BASE
        # Somebody may have a copy of the mount for a moment, and so its data are not written with the umount.
        subprocess.run(["sync", "--file-system", tree.path], check=True)
        mounts.umount(tree.path)
        loop, device = mounts.attach_loop(f"{place}/disk.img")
        plain = mounts.new_filesystem("ext4", device, {})
        try:
            assert os.stat("workspace/f", dir_fd=plain).st_uid == 1000
        finally:
            os.close(plain)
            os.close(loop)

    def test_prepare_over_an_older_disk_starts_empty(self, place: str) -> None:
        tree = disk.prepare(place, place, 4 * MIB, 100, 1000, 1000)
        Path(f"{tree.path}/workspace/old").touch()
        tree = disk.prepare(place, place, 8 * MIB, 100, 1000, 1000)
        assert os.listdir(f"{tree.path}/workspace") == []
        assert len(mounts.mounts_below(place)) == 1

    def test_discard_removes_a_full_disk_and_says_nothing_is_left(self, place: str) -> None:
        tree = disk.prepare(place, place, 64 * MIB, 100, 1000, 1000)
        fill(f"{tree.path}/workspace/big")
        assert disk.discard(place, place) == []
        assert os.listdir(place) == []
        assert disk.stray_loops(place) == {}
        assert disk.discard(place, place) == []

    @pytest.mark.parametrize("point", ["image", "loop", "disk"])
    def test_discard_works_wherever_prepare_stopped(self, place: str, point: str) -> None:
        def stop() -> None:
            raise InterruptedError

        faults.arm(f"runtime.create.{point}", stop)
        try:
            with pytest.raises(InterruptedError):
                disk.prepare(place, place, 4 * MIB, 100, 1000, 1000)
        finally:
            faults.arm(f"runtime.create.{point}", None)
        assert os.listdir(place) != []
        assert disk.discard(place, place) == []
        assert os.listdir(place) == []

    def test_a_disk_in_use_is_named_kept_and_removable_later(self, place: str) -> None:
        tree = disk.prepare(place, place, 4 * MIB, 100, 1000, 1000)
        with open(f"{tree.path}/workspace/f", "w"):
            left = disk.discard(place, place, timeout_s=0.1)
            assert left == [f"{place}/disk"]
            assert os.path.exists(f"{place}/disk.img")
        assert disk.discard(place, place) == []

    def test_what_somebody_keeps_loses_its_content_and_is_named_until_he_lets_go(self, place: str) -> None:
        tree = disk.prepare(place, place, 4 * MIB, 100, 1000, 1000)
        with open(f"{tree.path}/workspace/f", "w"):
            mounts.umount(tree.path, detach=True)
            began = time.monotonic()
            left = disk.discard(place, place)
            assert time.monotonic() - began < 10
            assert len(left) == 1 and left[0].startswith("/dev/loop")
            assert os.listdir(place) == []
            assert disk.stray_loops(place) == {left[0].split()[0]: f"{place}/disk.img"}
            assert disk.discard(place, place) == left
        assert disk.discard(place, place) == []
        assert disk.stray_loops(place) == {}

    @pytest.mark.parametrize("command", [("--mount",), ("--user", "--map-root-user", "--mount")], ids=["root", "user"])
    def test_copies_in_private_mount_namespaces_go_too(self, place: str, command: tuple[str, ...]) -> None:
        tree = disk.prepare(place, place, 4 * MIB, 100, 1000, 1000)
        with holder("unshare", *command) as other:
            before = Path(f"/proc/{other}/mountinfo").read_text().splitlines()
            assert any(tree.path in line for line in before)
            assert disk.discard(place, place) == []
            assert disk.stray_loops(place) == {}
            after = Path(f"/proc/{other}/mountinfo").read_text().splitlines()
            assert not any(tree.path in line for line in after)
            # Nothing else goes. (What other tests have mounted may.)
            kept = [line for line in before if line.split()[4].startswith(("/proc", "/dev", "/sys"))]
            assert kept and set(kept) <= set(after)

    def test_a_copy_in_use_in_a_private_mount_namespace_is_named_until_its_user_ends(self, place: str) -> None:
        tree = disk.prepare(place, place, 4 * MIB, 100, 1000, 1000)
        with holder("unshare", "--mount", f"--wd={tree.path}/workspace"):
            left = disk.discard(place, place)
            assert len(left) == 1 and left[0].startswith("/dev/loop")
        assert disk.discard(place, place) == []

    def test_the_second_disk_of_a_size_is_not_computed(self, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        blanks = f"{place}/blanks"
        disk.prepare(place, place, 4 * MIB, 100, 1000, 1000, blanks=blanks)
        first = disk.free(place)
        Path(f"{place}/disk/workspace/old").touch()
        assert disk.discard(place, place) == []
        assert len(os.listdir(blanks)) == 1
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
        tree = disk.prepare(place, place, 4 * MIB, 100, 1000, 1000, blanks=blanks)
        assert disk.free(place) == first
        assert os.listdir(f"{tree.path}/workspace") == []
        with pytest.raises(CorralError):
            disk.prepare(place, place, 4 * MIB, 101, 1000, 1000, blanks=blanks)

    def test_blanks_are_few_and_an_unusable_one_is_not_used(self, place: str) -> None:
        blanks = Path(place) / "blanks"
        for inodes in range(100, 100 + disk._BLANKS + 3):
            disk.prepare(place, place, MIB, inodes, 1000, 1000, blanks=str(blanks))
            assert disk.discard(place, place) == []
        assert len(os.listdir(blanks)) == disk._BLANKS
        for blank in blanks.iterdir():
            os.truncate(blank, 5)
        disk.prepare(place, place, MIB, 120, 1000, 1000, blanks=str(blanks))
        assert disk.free(place)[0] <= MIB

    def test_without_mkfs_the_error_names_the_package(self, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
        with pytest.raises(CorralError) as caught:
            disk.prepare(place, place, 4 * MIB, 100, 1000, 1000)
        assert caught.value.hint and "e2fsprogs" in caught.value.hint


def test_plain_directories_have_the_same_layout(place: str) -> None:
    tree = disk.prepare_directory(place, os.geteuid(), os.getegid())
    assert tree.mode == "directory"
    assert sorted(os.listdir(tree.path)) == ["guest.log", "home", "var_tmp", "workspace"]
    Path(f"{tree.path}/workspace/f").touch()
    assert disk.prepare_directory(place, os.geteuid(), os.getegid()) == tree
    assert os.path.exists(f"{tree.path}/workspace/f")
    assert disk.discard(place, place) == []
    assert os.listdir(place) == []


def test_a_hostile_tree_is_removed_and_what_it_points_to_is_not(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(outside)
    (tree / "file").symlink_to(outside / "file")
    closed = tree / "closed"
    (closed / "in").mkdir(parents=True)
    (closed / "in" / "f").touch()
    (closed / "in").chmod(0)
    closed.chmod(0)
    os.mkfifo(tree / "fifo")
    (tree / ".0").touch()
    deep = os.open(tree, os.O_RDONLY)
    name = "d" * 200
    for _ in range(1500):
        os.mkdir(name, dir_fd=deep)
        below = os.open(name, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    disk.remove_tree(str(tree))
    assert not tree.exists()
    assert (outside / "file").exists()
    disk.remove_tree(str(tree))


@pytest.mark.root
@needs_root
class TestCopies:
    """A disk with what is on it, given away and made anew for others."""

    @pytest.fixture
    def namespace(self) -> Iterator[int]:
        made = userns.create(BASE)
        try:
            yield made
        finally:
            os.close(made)

    def test_each_copy_has_content_owners_and_limits_and_is_independent(
        self, place: str, tmp_path: Path, namespace: int
    ) -> None:
        tree = disk.prepare(place, place, 4 * MIB, 100, 1000, 1000, idmap=lambda: namespace)
        made = f"{tree.path}/workspace"
        subprocess.run(
            ["sh", "-c", "echo 你好 >file"], cwd=made, user=tree.uid, group=tree.gid, extra_groups=[], check=True
        )
        free = disk.free(place)
        assert disk.detach(place, place) == []
        assert disk.stray_loops(place) == {}
        image = str(tmp_path / "kept.img")
        disk.move(f"{place}/disk.img", image)
        assert not os.path.lexists(f"{place}/disk.img")
        copies = [str(tmp_path / name) for name in ("one", "two")]
        try:
            for copy in copies:
                os.mkdir(copy)
                again = disk.restore(copy, copy, image, idmap=lambda: namespace)
                assert (again.path, again.uid, again.gid, again.mode) == (f"{copy}/disk", tree.uid, tree.gid, "image")
                assert Path(f"{copy}/disk/workspace/file").read_text() == "你好\n"
                assert disk.free(copy) == free
            os.unlink(f"{copies[0]}/disk/workspace/file")
            assert Path(f"{copies[1]}/disk/workspace/file").exists()
        finally:
            for copy in copies:
                assert disk.discard(copy, copy) == []
        assert os.stat(image).st_mode & 0o777 == 0o600

    def test_a_disk_in_use_is_not_detached(self, place: str) -> None:
        tree = disk.prepare(place, place, 4 * MIB, 100, 1000, 1000)
        with open(f"{tree.path}/workspace/open", "w"):
            assert disk.detach(place, place, timeout_s=0.05)
        assert disk.detach(place, place) == []

    def test_a_move_to_another_file_system_takes_the_content_along(self, tmp_path: Path, place: str) -> None:
        image = f"{place}/disk.img"
        Path(image).write_bytes(b"x" * 5000)
        other = tmp_path / "other"
        other.mkdir()
        mounts.tmpfs(str(other), size=MIB)
        try:
            disk.move(image, f"{other}/moved")
            assert (other / "moved").read_bytes() == b"x" * 5000
            assert not os.path.lexists(image)
        finally:
            mounts.umount(str(other))
