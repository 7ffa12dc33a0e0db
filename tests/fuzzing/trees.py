"""Hostile trees and archives: what lies in a sandbox's files, and what changes in them while the host looks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.client import trees as client_trees
from corral.errors import CorralError
from corral.linux.guesttree import Caps, GuestTree, beneath, remove_tree
from corral.node import files
from corral.ports.runtime import HostTree

from .clock import Broken, VirtualLoop, conduct, replaced
from .tape import Case, Tape

SECRET = b"of the host, and of nobody else"
UID = 65534 if os.geteuid() == 0 else os.geteuid()
GID = 65534 if os.geteuid() == 0 else os.getegid()
NAMES = (
    b"a", b"b", b"c", b"d", b"out.txt", b"\xff\xfe", b"...", b" ", b"-rf", b"x" * 255, b"a\nb", "é漢".encode(), b"\x1b[2J", b"*", b"[a]", b".corral-1",
    b"\\", b"~", b"%2e%2e", b"a:b", b"\xed\xa0\x80", b"node-mark", b"home",
)  # fmt: skip
LONGEST_S = 20.0
SCRATCH = (
    "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
)  # a memory file system where there is one: ten times the cases


class Place:
    """A directory of ours with a tree for the sandbox, and things beside it that must stay as they are."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="corral-fuzz-", dir=SCRATCH))
        self.base.chmod(0o711)
        self.outside = self.base / "outside"
        (self.outside / "deep").mkdir(parents=True)
        for name in ("canary", "deep/canary"):
            (self.outside / name).write_bytes(SECRET)
        self.outside.chmod(0o777)  # if something leads here, no mode shall hide it
        (self.outside / "deep").chmod(0o777)
        (self.outside / "canary").chmod(0o666)
        self.tree = self.base / "state" / "disk" / "workspace"
        self.tree.mkdir(parents=True)
        os.chown(self.tree, UID, GID)
        self._before = self._look()

    def _look(self) -> dict[str, tuple[Any, ...]]:
        seen: dict[str, tuple[Any, ...]] = {}
        for folder, _, names in os.walk(self.outside):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                info = os.lstat(path)
                content = Path(path).read_bytes() if stat.S_ISREG(info.st_mode) else b""
                seen[path] = (info.st_mode, info.st_ino, info.st_size, info.st_mtime_ns, info.st_uid, content)
        return seen

    def check(self) -> None:
        """Nothing beside the tree has changed, and nothing new is there."""
        if self._look() != self._before:
            raise Broken(f"outside the tree something changed: {sorted(self._look())}")
        if extra := set(os.listdir(self.base)) - {"outside", "state", "into"}:
            raise Broken(f"something new beside the tree: {sorted(extra)}")

    def close(self) -> None:
        left = remove_tree(str(self.base / "state")) if (self.base / "state").exists() else []
        self.check()
        if left:
            raise Broken(f"cannot be removed: {left[:3]}")
        shutil.rmtree(self.base)


# -- planting ------------------------------------------------------------------------------------------------------------------
def plant(root: str, tape: Tape, outside: str = "../../../outside") -> None:
    """A few names under `root`, of every kind that there is. Follows no link itself, so that what it harms is never its own doing."""
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for _ in range(1 + tape.below(6)):
            with contextlib.suppress(OSError):
                _plant_one(top, tape, outside)
    finally:
        os.close(top)


@contextlib.contextmanager
def _inside(top: int, tape: Tape) -> Iterator[int]:
    here = os.dup(top)
    try:
        for _ in range(tape.below(3)):
            name = tape.choose(NAMES[:4])
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=here)
                os.chown(name, UID, GID, dir_fd=here, follow_symlinks=False)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def _plant_one(top: int, tape: Tape, outside: str) -> None:
    with _inside(top, tape) as here:
        name = tape.choose(NAMES)
        kind = tape.below(16)
        if kind in (8, 9, 10, 11):
            _clear(here, name)
        if kind < 4:
            with _new_file(here, name) as fd:
                os.write(fd, tape.choose((b"", b"hello\n", b"x" * 5000)))
        elif kind == 4:
            with _new_file(here, name) as fd:
                os.truncate(fd, tape.choose((1 << 20, 1 << 33, 1 << 40)))
        elif kind == 5:
            os.mkdir(name, dir_fd=here)
        elif kind == 6:
            _nest(here, name, 60 + tape.below(200))
        elif kind == 7:
            os.chmod(name, tape.choose((0, 0o4777, 0o2755, 0o1777, 0o500)), dir_fd=here) if not _is_link(
                here, name
            ) else None
        elif kind in (8, 9):
            deep = outside + "/.." * 0
            targets = (
                deep,
                deep + "/canary",
                deep + "/deep",
                "/etc/passwd",
                "/",
                ".",
                "..",
                "../..",
                name,
                b"x" * 4000,
                "/proc/self/fd/0",
                "a",
            )
            os.symlink(tape.choose(targets), name, dir_fd=here)
        elif kind == 10:
            os.mkfifo(name, 0o666, dir_fd=here)
        elif kind == 11:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(f"/proc/self/fd/{here}/s{tape.below(4)}")
        elif kind == 12:
            os.link(tape.choose(NAMES[:6]), name, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
        elif kind == 13:
            os.rename(tape.choose(NAMES[:6]), name, src_dir_fd=here, dst_dir_fd=top)
        elif kind == 14:
            _clear(here, name)
        else:
            for number in range(tape.below(100)):
                with _new_file(here, b"many%d" % number):
                    pass
        if kind not in (7, 13):
            with contextlib.suppress(OSError):
                os.chown(name, UID, GID, dir_fd=here, follow_symlinks=False)


@contextlib.contextmanager
def _new_file(here: int, name: bytes) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(name, flags, 0o644, dir_fd=here)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_link(here: int, name: bytes) -> bool:
    return stat.S_ISLNK(os.lstat(name, dir_fd=here).st_mode)


def _clear(here: int, name: bytes) -> None:
    try:
        os.unlink(name, dir_fd=here)
    except IsADirectoryError:
        os.rename(name, b"was-%d" % time.monotonic_ns(), src_dir_fd=here, dst_dir_fd=here)
    except FileNotFoundError:
        pass


def _nest(here: int, name: bytes, depth: int) -> None:
    at = os.dup(here)
    try:
        for _ in range(depth):
            os.mkdir(name, dir_fd=at)
            os.chown(name, UID, GID, dir_fd=at)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
    finally:
        os.close(at)


# -- the host looks ------------------------------------------------------------------------------------------------------------
GLOBS = ("*", "**", "**/*.txt", "a/*", "a/b/c", "out.txt", "[a]", "[!a]*", "?", "a/**/b", "*/", "/workspace/*", "/etc/*", "..", "a/../b", "\udcff*", "[", "[]", "\0", "x" * 5000)  # fmt: skip
PATHS = (
    "a",
    "a/b",
    "a/b/c/d",
    "out.txt",
    "../x",
    "/etc/x",
    "a/../../x",
    "",
    ".",
    "a/",
    "\udcff",
    "x" * 300,
    "a//b",
    "\0",
    "/".join("d" * 70),
    "*",
    "é",
)


def run(case: Case) -> VirtualLoop:
    """Target `trees`: put, mark, collect, measure and remove a tree that changes at every look."""
    place = Place()
    try:
        host, guest = Tape(case.host), Tape(case.guest)
        tree = HostTree(str(place.tree.parent), UID, GID, "directory")
        mark = str(place.base / "state" / "node-mark")

        async def play(loop: VirtualLoop) -> None:
            began = time.thread_time()
            plant(str(place.tree), guest)
            with _restless(place, guest):
                steps = 0
                while steps == 0 or (not host.over and steps < 12):
                    steps += 1
                    await _step(place, tree, mark, host, guest)
                    plant(str(place.tree), guest)
            if time.thread_time() - began > LONGEST_S:
                raise Broken(f"{time.thread_time() - began:.1f} s of processor time")

        return conduct(play)
    finally:
        place.close()


@contextlib.contextmanager
def _restless(place: Place, tape: Tape) -> Iterator[None]:
    """Before some of the host's steps into the tree, the sandbox changes it: what it saw just now is something else."""
    real, restless, busy = beneath.open_one, 0, False

    def opened(directory: int, name: bytes, flags: int, mode: int = 0) -> int:
        nonlocal restless, busy
        if not busy and restless < 40 and tape.byte() >= 200:
            restless += 1
            busy = True
            try:
                with contextlib.suppress(OSError):
                    _swap(place, directory, name, tape)
            finally:
                busy = False
        return real(directory, name, flags, mode)

    with replaced(open=(beneath, "open_one", opened)):
        yield


def _swap(place: Place, directory: int, name: bytes, tape: Tape) -> None:
    if not os.readlink(f"/proc/self/fd/{directory}").startswith(str(place.tree)):
        return  # the host's own directory: the sandbox does not reach it
    kind = tape.below(5)
    _clear(directory, name)
    if kind == 0:
        os.symlink(str(place.outside), name, dir_fd=directory)
    elif kind == 1:
        os.symlink(str(place.outside / "canary"), name, dir_fd=directory)
    elif kind == 2:
        os.mkdir(name, dir_fd=directory)
    elif kind == 3:
        with _new_file(directory, name) as fd:
            os.write(fd, b"swapped")
    else:
        os.mkfifo(name, dir_fd=directory)


async def _step(place: Place, tree: HostTree, mark: str, host: Tape, guest: Tape) -> None:
    into = str(place.base / "into")
    kind = host.below(8)
    try:
        if kind == 0:
            outputs = [host.choose(GLOBS) for _ in range(host.below(4))]
            marks = host.below(2) == 1
            found = await files.collect(
                tree, mark, outputs=outputs, max_bytes=1 << 20, into=into, mark=marks, settle=host.below(2) == 1
            )
            _check_copies(into, found)
        elif kind == 1:
            await files.mark(tree, mark, settle=host.below(2) == 1)
        elif kind in (2, 3):
            items = [
                (host.choose(PATHS), host.choose((0o644, 0o7777, 0)), host.choose((b"put", None, b"")))
                for _ in range(1 + host.below(4))
            ]
            await files.put(tree, mark, items)
        elif kind == 4:
            use = GuestTree(
                str(place.tree), UID, GID, Caps(entries=300, depth=host.choose((1, 16, 128)), seconds=5)
            ).usage()
            if use.entries > 301:
                raise Broken("more entries than the cap allows")
        elif kind == 5:
            look = GuestTree(str(place.tree), UID, GID).look()
            files.unchanged(tree, look)
            look.manifest.digest()
        elif kind == 6:
            await files.freshen(tree, mark)
        else:
            _tear(mark, guest)
    except CorralError as error:
        if error.code not in ("invalid_value", "too_large", "infra_error"):
            raise Broken(f"a step ended with {error.code}") from error
    place.check()


def _tear(mark: str, tape: Tape) -> None:
    """A base that is no base any more: what a full disk or an older version leaves."""
    with contextlib.suppress(FileNotFoundError):
        raw = bytearray(Path(mark).read_bytes())
        for _ in range(1 + tape.below(3)):
            if raw:
                at = tape.upto(len(raw) - 1)
                raw[at : at + tape.below(3)] = tape.bytes(tape.below(4))
        Path(mark).write_bytes(raw)


def _check_copies(into: str, found: Any) -> None:
    """Regular files only, small enough, nothing of the host's."""
    names = set()
    for folder, _, inside in os.walk(os.fsencode(into)):
        for name in inside:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o7000:
                raise Broken(f"{path!r} was copied out with mode {info.st_mode:o}")
            with open(path, "rb") as file:
                content = file.read()
            if SECRET in content:
                raise Broken(f"{path!r} holds what is the host's")
            names.add(os.path.relpath(path, os.fsencode(into)))
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            told = next(
                (
                    a
                    for a in found.artifacts
                    if a["path"].encode("utf-8", "surrogateescape")
                    == b"/workspace/" + os.path.relpath(path, os.fsencode(into))
                ),
                None,
            )
            if told is not None and (told["size"], told["digest"]) != (len(content), digest):
                raise Broken(f"{path!r} is not what is told of it")
    for one in found.artifacts:
        if one["path"].encode("utf-8", "surrogateescape").removeprefix(b"/workspace/") not in names:
            raise Broken(f"{one['path']!r} was not copied")
    for change in found.files:
        if not change.path.startswith("/workspace/") or "/../" in change.path:
            raise Broken(f"an odd path {change.path!r}")
    shutil.rmtree(into, ignore_errors=True)


# -- archives ------------------------------------------------------------------------------------------------------------------
TYPES = (b"0", b"5", b"2", b"1", b"3", b"4", b"6", b"7", b"x", b"g", b"L", b"K", b"S", b"\0", b"Z")
MEMBERS = (
    "root",
    "root/a",
    "root/a/b",
    "root/../x",
    "../x",
    "/etc/x",
    "root//a",
    "other",
    "",
    ".",
    "root/a\0b",
    "root/\udcff",
    "root/" + "n" * 300,
    "root/" + "d/" * 100 + "f",
)


def unpack(case: Case) -> VirtualLoop:
    """Target `archives`: what the command line and the SDK unpack on the caller's own disk."""
    place = Place()
    try:
        tape = Tape(case.guest)
        raw = archive(tape)
        dst = place.base / "state" / "dst"
        if Tape(case.host).below(3):
            dst.mkdir()

        async def play(loop: VirtualLoop) -> None:
            began = time.thread_time()
            with loop.elsewhere(), contextlib.suppress(CorralError, OSError):
                client_trees.unpack_stream(_blocks(raw, 1 + tape.upto(5000)), str(dst), "")
            if time.thread_time() - began > LONGEST_S:
                raise Broken(f"{time.thread_time() - began:.1f} s of processor time")
            await asyncio.sleep(0)

        return conduct(play)
    finally:
        place.close()


def _blocks(raw: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(raw), size):
        yield raw[at : at + size]


def archive(tape: Tape) -> bytes:
    """Members of any name and type, then a few bytes changed."""
    out = bytearray()
    out += _member("root", b"5", b"", tape)
    for _ in range(1 + tape.below(8)):
        kind = tape.choose(TYPES)
        content = tape.choose((b"", b"hello", b"c" * 600))
        if kind in (b"x", b"g"):
            content = _pax(tape)
        elif kind in (b"L", b"K"):
            content = tape.choose(MEMBERS).encode("utf-8", "surrogateescape") + b"\0"
        out += _member(tape.choose(MEMBERS[:3]) if tape.below(3) else tape.choose(MEMBERS), kind, content, tape)
    out += bytes(1024)
    for _ in range(tape.below(4)):
        at = tape.upto(len(out) - 1)
        out[at] ^= 1 << tape.below(8)
        if tape.below(2):
            _resum(out, at - at % 512)
    if tape.below(8) == 7:
        del out[tape.upto(len(out)) :]
    return bytes(out)


def _member(name: str, kind: bytes, content: bytes, tape: Tape) -> bytes:
    info = tarfile.TarInfo("x")
    info.size = len(content)
    head = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    raw = name.encode("utf-8", "surrogateescape")[:100]
    head[:100] = raw.ljust(100, b"\0")
    head[156:157] = kind
    target = tape.choose(("root/a", "../../outside/canary", "/etc/passwd", "root", "")).encode()
    head[157:257] = target.ljust(100, b"\0")
    if tape.byte() > 200:
        sizes = (
            b"77777777777\0",
            b"\x80" + bytes(10) + b"\x05",
            b"\xff" * 12,
            b"-0000000001\0",
            b"            ",
            b"\x80" + b"\xff" * 11,
        )
        head[124:136] = tape.choose(sizes)
    if tape.byte() > 220:
        head[100:108] = tape.choose((b"\xff" * 8, b"7777777\0", b"0000000\0", b"zzzzzzz\0"))
    _resum(head, 0)
    return bytes(head) + content + bytes(-len(content) % 512)


def _resum(data: bytearray, at: int) -> None:
    block = bytearray(data[at : at + 512])
    if len(block) == 512:
        block[148:156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(block)


def _pax(tape: Tape) -> bytes:
    keys = (
        "path",
        "linkpath",
        "size",
        "mtime",
        "uid",
        "GNU.sparse.map",
        "GNU.sparse.major",
        "GNU.sparse.size",
        "GNU.sparse.realsize",
        "GNU.sparse.name",
        "hdrcharset",
        "",
    )
    values = (
        "root/a",
        "../x",
        "root/a\0b",
        "-1",
        "99999999999999999999",
        "nan",
        "inf",
        "1,2,3",
        "x" * 2000,
        "BINARY",
        "1",
        "0",
        "\udcff",
        "1e400",
    )
    out = b""
    for _ in range(1 + tape.below(4)):
        body = f" {tape.choose(keys)}={tape.choose(values)}\n".encode("utf-8", "surrogateescape")
        length = len(body) + len(str(len(body) + 3))
        if tape.byte() > 220:
            length = tape.choose((0, 1, -1, 2**31, 3))
        out += str(length).encode() + body
    return out
