"""Mounts: flags are there from the first moment, nothing spreads, and everything below a directory can be taken down."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.linux import mounts, userns

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")]

BASE = 1_900_000_000 // 65536 * 65536


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("content")
    (tmp_path / "target").mkdir()
    try:
        yield tmp_path
    finally:
        left = mounts.umount_below(str(tmp_path))
        assert left == []


def options(point: Path) -> tuple[set[str], list[str]]:
    """(mount options, propagation tags) of a mount point."""
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        fields = line.split(" ")
        if fields[4] == str(point).replace(" ", "\\040"):
            return set(fields[5].split(",")), fields[6 : fields.index("-")]
    raise AssertionError(f"{point} is not mounted")


def test_a_read_only_bind_cannot_be_written_and_its_source_can(place: Path) -> None:
    mounts.bind(str(place / "source"), str(place / "target"), read_only=True)
    assert (place / "target" / "file").read_text() == "content"
    with pytest.raises(OSError) as caught:
        (place / "target" / "new").touch()
    assert caught.value.errno == errno.EROFS
    (place / "source" / "new").touch()
    assert {"ro", "nosuid", "nodev"} <= options(place / "target")[0]


def test_a_writable_bind_keeps_nosuid_and_nodev(place: Path) -> None:
    mounts.bind(str(place / "source"), str(place / "target"), read_only=False)
    (place / "target" / "new").touch()
    assert {"rw", "nosuid", "nodev"} <= options(place / "target")[0]


def test_mounts_below_the_source_come_along_only_when_asked(place: Path) -> None:
    (place / "source" / "sub").mkdir()
    mounts.tmpfs(str(place / "source" / "sub"), size=1 << 20)
    (place / "source" / "sub" / "inner").touch()
    mounts.bind(str(place / "source"), str(place / "target"), read_only=True)
    assert not (place / "target" / "sub" / "inner").exists()
    mounts.umount(str(place / "target"))
    mounts.bind(str(place / "source"), str(place / "target"), read_only=True, recursive=True)
    assert (place / "target" / "sub" / "inner").exists()


def test_a_mount_under_a_shared_one_is_private_and_invisible_to_its_peers(place: Path) -> None:
    shared = place / "target"
    mounts.bind(str(shared), str(shared), read_only=False)
    mounts.make_shared(str(shared))
    assert options(shared)[1] != []
    (shared / "inner").mkdir()
    mounts.bind(str(place / "source"), str(shared / "inner"), read_only=True)
    assert options(shared / "inner")[1] == []


def test_an_id_mapped_bind_shows_owners_of_the_range(place: Path) -> None:
    os.chown(place / "source" / "file", 1000, 1000)
    namespace = userns.create(BASE)
    try:
        mounts.idmapped_bind(str(place / "source"), str(place / "target"), namespace)
    finally:
        os.close(namespace)
    assert os.stat(place / "target").st_uid == BASE
    assert os.stat(place / "target" / "file").st_uid == BASE + 1000
    assert os.stat(place / "source" / "file").st_uid == 1000
    assert {"ro", "idmapped"} <= options(place / "target")[0]


def test_a_tmpfs_holds_bytes_and_inodes(place: Path) -> None:
    mounts.tmpfs(str(place / "target"), size=1 << 20, inodes=10, mode=0o700, uid=7, gid=8)
    found = os.stat(place / "target")
    assert (found.st_mode & 0o7777, found.st_uid, found.st_gid) == (0o700, 7, 8)
    with pytest.raises(OSError) as caught:
        (place / "target" / "big").write_bytes(bytes(4 << 20))
    assert caught.value.errno == errno.ENOSPC
    assert (place / "target" / "big").stat().st_size <= 1 << 20
    with pytest.raises(OSError) as caught:
        for number in range(20):
            (place / "target" / str(number)).touch()
    assert caught.value.errno == errno.ENOSPC


def test_everything_below_is_listed_and_taken_down_whatever_its_name(place: Path) -> None:
    odd = place / "a b\t文\\件"
    odd.mkdir()
    (place / "source" / "in").mkdir()
    mounts.tmpfs(str(odd), size=4096)
    mounts.tmpfs(str(odd), size=4096)
    mounts.bind(str(place / "source"), str(place / "target"), read_only=True)
    mounts.tmpfs(str(place / "target" / "in"), size=4096)
    beside = Path(f"{place}-beside")
    beside.mkdir()
    mounts.tmpfs(str(beside), size=4096)
    try:
        assert mounts.mounts_below(str(place)) == [
            str(odd),
            str(odd),
            str(place / "target"),
            str(place / "target" / "in"),
        ]
        assert mounts.umount_below(str(place)) == []
        assert mounts.mounts_below(str(beside)) == [str(beside)]
    finally:
        mounts.umount(str(beside))


def test_a_mount_in_use_is_named_and_detaching_hides_it(place: Path) -> None:
    mounts.tmpfs(str(place / "target"), size=1 << 20)
    with open(place / "target" / "open", "w"):
        assert mounts.umount_below(str(place)) == [str(place / "target")]
        mounts.umount(str(place / "target"), detach=True)
        assert mounts.mounts_below(str(place)) == []


def test_a_failed_call_names_itself_and_the_path(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"open_tree.*missing"):
        mounts.bind(str(place / "missing"), str(place / "target"), read_only=True)
    with pytest.raises(OSError, match=r"umount.*target"):
        mounts.umount(str(place / "target"))


def test_what_is_mounted_in_an_own_namespace_is_not_seen_outside(place: Path) -> None:
    def work() -> bool:
        mounts.tmpfs(str(place / "target"), size=4096)
        return os.path.ismount(place / "target")

    assert mounts.in_own_namespace(work)
    assert mounts.mounts_below(str(place)) == []
    with pytest.raises(ZeroDivisionError):
        mounts.in_own_namespace(lambda: 1 // 0)


def test_an_own_namespace_sees_what_is_mounted_below_a_shared_tree_later(place: Path) -> None:
    import threading

    shared = place / "target"
    mounts.bind(str(shared), str(shared), read_only=False)
    mounts.make_shared(str(shared))
    (shared / "late").mkdir()
    inside, mounted = threading.Event(), threading.Event()
    seen: list[bool] = []

    def work() -> None:
        inside.set()
        mounted.wait(30)
        seen.append(os.path.exists(shared / "late" / "file"))

    other = threading.Thread(target=lambda: mounts.in_own_namespace(work))
    other.start()
    assert inside.wait(30)
    mounts.bind(str(place / "source"), str(shared / "late"), read_only=True)
    mounted.set()
    other.join()
    assert seen == [True]


def test_a_loop_device_is_listed_by_its_file_and_goes_with_its_descriptor(place: Path) -> None:
    image = place / "image"
    image.write_bytes(bytes(1 << 20))
    loop, device = mounts.attach_loop(str(image))
    try:
        assert mounts.loops_below(str(place)) == {device: str(image)}
    finally:
        os.close(loop)
    assert mounts.loops_below(str(place)) == {}
