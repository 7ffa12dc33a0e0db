"""The host's view of a hostile tree: nothing outside is read or written, whatever the tree does."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.errors import CorralError
from corral.linux.guesttree import RACY_NS, Caps, GuestTree, Look, is_as_seen, remove_tree
from corral.linux.manifest import Manifest, diff

UID = 54399


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[tuple[Path, GuestTree]]:
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path("/tmp"):
            break
        parent.chmod(parent.stat().st_mode | 0o011)
    root = tmp_path / "workspace"
    root.mkdir()
    uid = UID if os.geteuid() == 0 else os.geteuid()
    os.chown(root, uid, uid) if os.geteuid() == 0 else None
    yield root, GuestTree(str(root), uid, uid)
    remove_tree(str(root))


def _own(root: Path) -> None:
    if os.geteuid() == 0:
        for base, dirs, files in os.walk(root):
            for name in (*dirs, *files):
                os.lchown(os.path.join(base, name), UID, UID)


def test_files_put_arrive_owned_by_the_sandbox_with_parents_and_mode(tree: tuple[Path, GuestTree]) -> None:
    root, guest = tree
    guest.put([("a/b/你好\n'\".py", 0o4755, b"x" * 10), ("n\udcff", 0o600, b"")])
    info = (root / "a/b/你好\n'\".py").stat()
    assert info.st_mode & 0o7777 == 0o755
    assert info.st_uid == (UID if os.geteuid() == 0 else os.geteuid())
    assert (root / "a").stat().st_uid == info.st_uid
    assert b"n\xff" in os.listdir(os.fsencode(root))


def test_directories_put_keep_their_modes_even_when_closed_to_writing(tree: tuple[Path, GuestTree]) -> None:
    root, guest = tree
    guest.put([("shut", 0o500, None), ("shut/in", 0o2710, None), ("shut/in/f", 0o640, b"x"), ("空/e", 0o755, None)])
    modes = {name: (root / name).stat().st_mode & 0o7777 for name in ("shut", "shut/in", "shut/in/f", "空", "空/e")}
    assert modes == {"shut": 0o500, "shut/in": 0o710, "shut/in/f": 0o640, "空": 0o755, "空/e": 0o755}
    guest.put([("shut", 0o700, None)])
    assert (root / "shut").stat().st_mode & 0o777 == 0o700 and (root / "shut/in/f").read_bytes() == b"x"


def test_a_directory_does_not_replace_a_file_or_a_link(tree: tuple[Path, GuestTree]) -> None:
    root, guest = tree
    guest.put([("f", 0o644, b"x")])
    (root / "l").symlink_to("/etc")
    for name in ("f", "l"):
        with pytest.raises(CorralError) as caught:
            guest.put([(name, 0o700, None)])
        assert (caught.value.code, caught.value.field) == ("invalid_value", "/files/0/path")
    assert (root / "f").read_bytes() == b"x" and (root / "l").is_symlink()


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", ".", "a/", "x\0y", "d" * 300])
def test_a_path_that_is_not_below_is_refused_and_named(tree: tuple[Path, GuestTree], path: str) -> None:
    with pytest.raises(CorralError) as caught:
        tree[1].put([("ok", 0o644, b""), (path, 0o644, b"")])
    assert (caught.value.code, caught.value.field) == ("invalid_value", "/files/1/path")
    assert not (tree[0] / "ok").exists()


def test_put_never_follows_a_link(tree: tuple[Path, GuestTree], tmp_path: Path) -> None:
    root, guest = tree
    canary = tmp_path / "canary"
    canary.mkdir(mode=0o777)
    canary.chmod(0o777)
    (canary / "file").write_bytes(b"host")
    (canary / "file").chmod(0o666)
    (root / "d").symlink_to(canary)
    (root / "f").symlink_to(canary / "file")
    with pytest.raises(CorralError) as caught:
        guest.put([("d/file", 0o644, b"pwned")])
    assert caught.value.code == "invalid_value"
    guest.put([("f", 0o644, b"mine")])
    assert (canary / "file").read_bytes() == b"host"
    assert not (root / "f").is_symlink()
    assert (root / "f").read_bytes() == b"mine"


def test_a_scan_tells_created_modified_deleted_and_ignores_a_touch(tree: tuple[Path, GuestTree]) -> None:
    root, guest = tree
    guest.put([("keep", 0o644, b"1"), ("touch", 0o644, b"1"), ("change", 0o644, b"1"), ("gone", 0o644, b"1")])
    before = guest.scan()
    os.utime(root / "touch", (1, 1))
    (root / "change").write_bytes(b"2")
    (root / "gone").unlink()
    (root / "new").mkdir()
    (root / "new" / "link").symlink_to("/etc/passwd")
    (root / b"bad\xff\n".decode("utf-8", "surrogateescape")).write_bytes(b"z")
    os.mkfifo(root / "fifo")
    _own(root)
    after = guest.scan(before)
    changes, more = diff(before, after)
    assert not more
    assert [(c.path, c.change, c.entry.kind) for c in changes] == [
        (b"bad\xff\n", "created", "file"),
        (b"change", "modified", "file"),
        (b"gone", "deleted", "file"),
        (b"new", "created", "dir"),
        (b"new/link", "created", "symlink"),
    ]
    assert changes[0].entry.digest == hashlib.sha256(b"z").digest()
    assert after.digest() != before.digest()
    assert Manifest.load(list(after.dump())).entries == after.entries
    assert after.complete


def test_a_change_of_equal_size_right_after_a_scan_is_seen(tree: tuple[Path, GuestTree]) -> None:
    root, guest = tree
    for turn in range(20):
        guest.put([("f", 0o644, b"a")])
        before = guest.scan()
        with open(root / "f", "r+b") as file:
            file.write(b"b")
        changes, _ = diff(before, guest.scan(before))
        assert [c.change for c in changes] == ["modified"], turn


def test_a_program_that_writes_on_through_a_mapping_is_seen_once_its_file_was_settled(
    tree: tuple[Path, GuestTree],
) -> None:
    root, guest = tree
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(root)], capture_output=True, text=True, check=True
    ).stdout.strip()
    if kind == "tmpfs":
        pytest.skip("a write through a mapping of tmpfs leaves no stamp at all")
    guest.put([("db", 0o644, bytes(4096))])
    with open(root / "db", "r+b") as file, mmap.mmap(file.fileno(), 4096) as mapped:
        mapped[0:5] = b"first"
        while time.time_ns() - os.fstat(file.fileno()).st_ctime_ns <= 2 * RACY_NS:
            time.sleep(0.01)
        before = guest.scan(settle=True)
        mapped[0:5] = b"again"
        changes, _ = diff(before, guest.scan(before))
    assert [(c.change, c.path) for c in changes] == [("modified", b"db")]


def _after_the_next_tick(scratch: Path) -> None:
    """The clock of change times has moved on."""
    scratch.write_bytes(b"")
    before = scratch.stat().st_ctime_ns
    while scratch.stat().st_ctime_ns == before:
        scratch.chmod(0o600)


def _old(look: Look) -> Look:
    """The same look, as if it had been taken when all its stamps were old enough to prove something."""
    look.manifest.taken_ns += 2 * RACY_NS
    return look


CHANGES = {
    "a new name at the top": lambda root: (root / "new").write_bytes(b""),
    "a new name below": lambda root: (root / "d/e/new").write_bytes(b""),
    "other bytes of the same size": lambda root: (root / "d/f").write_bytes(b"2"),
    "a forged modification time": lambda root: (
        (root / "d/f").write_bytes(b"3"),
        os.utime(root / "d/f", ns=(0, (root / "d/g").stat().st_mtime_ns)),
    ),
    "a mode": lambda root: (root / "d/f").chmod(0o611),
    "a directory's mode": lambda root: (root / "d/e").chmod(0o711),
    "a name less": lambda root: (root / "d/f").unlink(),
    "a file behind another name": lambda root: (root / "d/g").rename(root / "d/f"),
    "a link that turned": lambda root: ((root / "l").unlink(), (root / "l").symlink_to("elsewhere")),
    "a directory that became a link": lambda root: (
        (root / "d").rename(root.parent / "aside"),
        (root / "d").symlink_to(root.parent / "aside"),
    ),
    "there and back": lambda root: ((root / "d/f").rename(root / "d/x"), (root / "d/x").rename(root / "d/f")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_escapes_a_quick_look_and_an_untouched_tree_passes_it(
    tree: tuple[Path, GuestTree], tmp_path: Path, change: str
) -> None:
    root, guest = tree
    (root / "d/e").mkdir(parents=True)
    (root / "d/f").write_bytes(b"1")
    (root / "d/g").write_bytes(b"1")
    (root / "l").symlink_to("d/f")
    _own(root)
    look = guest.look()
    taken = look.manifest.taken_ns
    look.manifest.taken_ns = (root / "d/g").stat().st_ctime_ns + RACY_NS  # as a machine with time to spare would be
    assert not is_as_seen(str(root), look), "stamps of just now prove nothing"
    look.manifest.taken_ns = taken
    look = _old(look)
    _after_the_next_tick(tmp_path / "scratch")
    assert is_as_seen(str(root), look)
    assert not is_as_seen(str(root), look, most=3), "many are left to a thread"
    CHANGES[change](root)
    assert not is_as_seen(str(root), look)


def test_a_quick_look_knows_nothing_of_a_tree_that_was_not_seen_whole(tree: tuple[Path, GuestTree]) -> None:
    root, guest = tree
    (root / "f").write_bytes(b"1")
    look = _old(guest.look())
    assert is_as_seen(str(root), look)
    look.manifest.complete = False
    assert not is_as_seen(str(root), look)
    assert not is_as_seen(str(root.parent / "gone"), _old(guest.look()))


def test_caps_make_an_answer_incomplete_and_then_nothing_is_called_deleted(tree: tuple[Path, GuestTree]) -> None:
    root, guest = tree
    guest.put([(f"f{i}", 0o644, b"") for i in range(50)])
    whole = guest.scan()
    small = GuestTree(str(root), whole and os.stat(root).st_uid, os.stat(root).st_gid, Caps(entries=10))
    part = small.scan()
    assert not part.complete
    assert len(part.entries) == 10
    assert diff(whole, part)[0] == []
    (root / ("d/" * 200)).mkdir(parents=True)
    _own(root)
    deep = guest.scan()
    assert not deep.complete


def test_copy_out_takes_regular_files_only_and_names_what_does_not_fit(
    tree: tuple[Path, GuestTree], tmp_path: Path
) -> None:
    root, guest = tree
    into = tmp_path / "artifacts"
    into.mkdir(mode=0o700)
    guest.put(
        [("out/a.txt", 0o644, b"a"), ("out/s/b.bin", 0o755, b"bb"), ("out/big", 0o644, b"x" * 100), ("c", 0o644, b"")]
    )
    os.link(root / "out/a.txt", root / "out/hard")
    (root / "out/link").symlink_to("/etc/passwd")
    os.mkfifo(root / "out/fifo")
    os.chmod(root / "out/s/b.bin", 0o6755)
    copied = guest.copy_out(["out/**", "out/a*"], str(into), 50)
    assert [(path, size) for path, size, _ in copied.files] == [
        (b"out/a.txt", 1),
        (b"out/hard", 1),
        (b"out/s/b.bin", 2),
    ]
    assert copied.skipped == [b"out/big"]
    assert copied.complete
    assert (into / "out/s/b.bin").stat().st_mode & 0o7777 == 0o755
    assert (into / "out/s/b.bin").stat().st_uid == os.geteuid()
    assert sorted(p.name for p in (into / "out").iterdir()) == ["a.txt", "hard", "s"]


def test_copy_out_takes_as_many_files_as_allowed_and_names_the_rest(
    tree: tuple[Path, GuestTree], tmp_path: Path
) -> None:
    root, guest = tree
    into = tmp_path / "artifacts"
    into.mkdir(mode=0o700)
    guest.put([(f"out/{name}", 0o644, b"") for name in "abcde"])
    info = root.stat()
    few = GuestTree(str(root), info.st_uid, info.st_gid, Caps(copies=3))
    copied = few.copy_out(["out/**", "**"], str(into), 1000)
    assert len(copied.files) == 3
    assert sorted(copied.skipped + [path for path, _, _ in copied.files]) == [b"out/%c" % name for name in b"abcde"]
    assert len(list((into / "out").iterdir())) == 3
    assert copied.complete


@pytest.mark.parametrize(
    ("glob", "found"),
    [
        ("*.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "d/b.txt", "d/e/c.txt"]),
        ("d", ["d/b.txt", "d/e/c.txt"]),
        ("d/*", ["d/b.txt", "d/e/c.txt"]),
        ("d/?.txt", ["d/b.txt"]),
        ("[ab].txt", ["a.txt"]),
        ("[!a].txt", []),
        ("**", ["a.txt", "d/b.txt", "d/e/c.txt"]),
        ("missing/**", []),
        ("./d/e/", ["d/e/c.txt"]),
    ],
)
def test_globs_match_as_people_expect(
    tree: tuple[Path, GuestTree], tmp_path: Path, glob: str, found: list[str]
) -> None:
    _, guest = tree
    (tmp_path / "o").mkdir()
    guest.put([(name, 0o644, b"1") for name in ("a.txt", "d/b.txt", "d/e/c.txt")])
    copied = guest.copy_out([glob], str(tmp_path / "o"), 1000)
    assert [os.fsdecode(path) for path, _, _ in copied.files] == found


def test_a_swap_of_directory_and_link_during_the_work_reads_and_writes_nothing_of_the_host(
    tree: tuple[Path, GuestTree], tmp_path: Path
) -> None:
    root, guest = tree
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "f").write_bytes(b"HOST")
    canary.chmod(0o777)
    (canary / "f").chmod(0o666)
    guest.put([("real/f", 0o644, b"guest")])
    (root / "link").symlink_to(canary)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for source in ("real", "link"):
                try:
                    os.rename(root / source, root / "d")
                    os.rename(root / "d", root / source)
                except OSError:
                    pass

    swapper = threading.Thread(target=swap)
    swapper.start()
    into = tmp_path / "o"
    into.mkdir()
    done = refused = 0
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            try:
                guest.put([("d/f", 0o644, b"guest")])
                done += 1
            except CorralError:
                refused += 1
            guest.copy_out(["d/f"], str(into), 1000)
            guest.scan()
    finally:
        stop.set()
        swapper.join()
    assert done + refused > 20
    assert (canary / "f").read_bytes() == b"HOST"
    assert os.listdir(canary) == ["f"]
    for base, _, files in os.walk(into):
        for name in files:
            assert (Path(base) / name).read_bytes() == b"guest"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another uid")
def test_the_work_is_done_with_the_sandboxs_ids_and_ours_are_untouched(
    tree: tuple[Path, GuestTree], tmp_path: Path
) -> None:
    root, guest = tree
    secret = root / "secret"
    secret.write_bytes(b"root only")
    secret.chmod(0o600)
    guest.scan()
    (tmp_path / "out").mkdir()
    copied = guest.copy_out(["secret"], str(tmp_path / "out"), 1000)
    assert copied.files == []
    assert secret.read_bytes() == b"root only"
    (root / "mine").write_bytes(b"")
    assert (root / "mine").stat().st_uid == 0


def test_modes_hide_nothing_from_a_scan_or_make_it_incomplete(tree: tuple[Path, GuestTree]) -> None:
    root, guest = tree
    guest.put([("shut/kept", 0o644, b"1"), ("shut/gone", 0o644, b"2"), ("dark", 0o644, b"3")])
    before = guest.scan()
    (root / "shut" / "gone").unlink()
    (root / "shut" / "new").write_bytes(b"4")
    _own(root)
    (root / "dark").chmod(0)
    (root / "shut").chmod(0)
    after = guest.scan(before)
    changes = {(change.path, change.change) for change in diff(before, after)[0]}
    (root / "shut").chmod(0o755)
    seen = {(b"shut", "modified"), (b"dark", "modified")}
    if os.geteuid() == 0:
        assert after.complete
        assert changes == seen | {(b"shut/new", "created"), (b"shut/gone", "deleted")}
        assert after.entries[b"dark"].digest == before.entries[b"dark"].digest
        assert guest.usage().complete
    else:  # an owner cannot read it either: nothing is claimed about what is below
        assert not after.complete and changes == seen


def test_remove_tree_survives_deep_nests_no_modes_and_strange_names(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir()
    canary = tmp_path / "canary"
    canary.write_bytes(b"host")
    (root / "l").symlink_to(tmp_path)
    (root / b"\xff\n".decode("utf-8", "surrogateescape")).write_bytes(b"")
    os.mkfifo(root / "fifo")
    here = os.open(root, os.O_RDONLY)
    name = "n" * 200
    for _ in range(600):  # far beyond PATH_MAX
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.mkdir("shut", 0o000, dir_fd=below)
        os.close(here)
        here = below
    os.close(here)
    assert remove_tree(str(root)) == []
    assert not root.exists()
    assert canary.read_bytes() == b"host"
    assert remove_tree(str(root)) == []


def test_usage_counts_blocks_once_per_hard_link(tree: tuple[Path, GuestTree]) -> None:
    root, guest = tree
    guest.put([("f", 0o644, random.randbytes(1 << 20))])
    once = guest.usage()
    os.link(root / "f", root / "g")
    twice = guest.usage()
    assert once.complete
    assert once.bytes >= 1 << 20
    assert (twice.bytes, twice.entries) == (once.bytes, once.entries + 1)
