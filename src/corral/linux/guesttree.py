"""The one module that touches trees made by sandboxes, on the host.

A tree is hostile: links that point out, names with any byte, nests deeper than a path may be long, devices, FIFOs, and a program that
swaps a directory for a link while we look. Therefore:

* Every name is opened as one component under an open directory by `openat2` with BENEATH, NO_SYMLINKS, NO_MAGICLINKS, NO_XDEV; no
  path string of the guest is ever resolved by the host. Only directories and regular files are opened, the latter through an O_PATH
  descriptor whose type was checked first.
* The work runs in a thread of its own whose file-system uid, gid and groups are the sandbox's, so even a mistake here could do no
  more than the sandbox itself. The thread ends with the work; it never goes back to a pool with foreign ids. A scan may read what
  the sandbox has made unreadable for itself, nothing else: it copies nothing and writes nothing.
* Entries, depth, bytes and seconds are capped; what is beyond makes an answer `complete = False`, never an error or a hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import platform
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from corral.errors import CorralError
from corral.linux.manifest import Entry, Manifest

T = TypeVar("T")
CHUNK = 256 * 1024
RACY_NS = 100_000_000
"""A file changed this shortly before a scan may change again within one clock tick: its stamp proves nothing."""

_SYS_OPENAT2 = 437
_NUMBERS = {"x86_64": (116, 122, 123), "aarch64": (159, 151, 152)}  # setgroups, setfsuid, setfsgid
_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08  # NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH
_BASE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_CAPABILITY_VERSION_3 = 0x20080522
_DAC_READ_SEARCH = 1 << 2
_IN_THE_WAY = frozenset(
    {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.EXDEV, errno.EACCES}
)
"""What a tree that changes while it is copied brings about: a file where a directory was, or the other way round."""
_SYNC_PAGES = 1 | 2 | 4  # wait, write, wait; no journal, no flush of the device
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def open_beneath(directory: int, name: bytes, flags: int, mode: int = 0) -> int:
    """Open `name` under an open directory; a link, another mount or a way out is OSError (ELOOP, EXDEV)."""
    how = _OpenHow(flags | os.O_CLOEXEC, mode, _RESOLVE)
    for _ in range(16):
        fd: int = _libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(directory),
            ctypes.c_char_p(name),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(code, os.strerror(code))


def _thread_ids(uid: int, gid: int) -> None:
    """Make the calling thread act on files as uid:gid without supplementary groups, and verify it (raw calls are per thread)."""
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise CorralError("infra_error", f"no system call numbers for {platform.machine()}")
    setgroups, setfsuid, setfsgid = numbers
    if _libc.syscall(ctypes.c_long(setgroups), ctypes.c_size_t(0), None) != 0:
        raise CorralError("infra_error", f"setgroups: {os.strerror(ctypes.get_errno())}")
    for number, value in ((setfsgid, gid), (setfsuid, uid)):
        _libc.syscall(ctypes.c_long(number), ctypes.c_long(value))
        if (_libc.syscall(ctypes.c_long(number), ctypes.c_long(-1)) & 0xFFFFFFFF) != value:
            raise CorralError("infra_error", f"the thread could not become {uid}:{gid}")


def _read_all() -> None:
    """Let the calling thread read every directory and file again, which `_thread_ids` took from it, as far as we may ourselves.

    For scans only: what a sandbox does to its own modes must not hide from us what it wrote. That a scan stays inside its tree is
    held by `open_beneath`, not by ids.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0-31, then of 32-63
    if _libc.capget(header, sets) == 0 and sets[1] & _DAC_READ_SEARCH:
        sets[0] |= _DAC_READ_SEARCH
        _libc.capset(header, sets)


@contextlib.contextmanager
def _host_ids(user: tuple[int, int] | None) -> Iterator[None]:
    """Inside `_run_as`: back to the host's ids for the writing of host files."""
    if user is None:
        yield
        return
    _thread_ids(os.geteuid(), os.getegid())
    try:
        yield
    finally:
        _thread_ids(*user)


def _run_as(user: tuple[int, int] | None, work: Callable[[], T]) -> T:
    """Run `work` in a fresh thread with these ids (None = keep ours) and give its answer."""
    answer: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            if user is not None:
                _thread_ids(*user)
            answer.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="guesttree", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return answer[0]


@dataclass(frozen=True)
class Caps:
    """How much of a hostile tree we are willing to look at."""

    entries: int = 100_000
    depth: int = 128
    hash_bytes: int = 2 * 1024**3
    seconds: float = 20.0
    copies: int = 10_000
    """Files that are copied out: each is a file of the host, a line of the result and a request of who fetches it."""


@dataclass(frozen=True)
class DiskUse:
    """Blocks and names under the tree; `complete` False = the walk met a cap, so at least this much."""

    bytes: int
    entries: int
    complete: bool


@dataclass
class Copied:
    """What `copy_out` brought: (path relative to the root, size, SHA-256), names over a cap, and whether all was seen."""

    files: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    skipped: list[bytes] = field(default_factory=list)
    complete: bool = True


class _Walk:
    """A depth-first walk under an open directory. Yields (path, directory fd, name, lstat) with caps; closes what it opens."""

    def __init__(self, root: int, caps: Caps) -> None:
        self.root = root
        self.caps = caps
        self.complete = True
        self.deadline = time.monotonic() + caps.seconds
        self.seen = 0

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def __call__(self, prefix: bytes = b"") -> Iterator[tuple[bytes, int, bytes, os.stat_result]]:
        stack: list[tuple[int, os._ScandirIterator[str], bytes]] = []
        try:
            first = os.dup(self.root)
            stack.append((first, os.scandir(first), prefix))
            while stack:
                fd, entries, path = stack[-1]
                try:
                    item = next(entries, None)
                except OSError:
                    self.complete, item = False, None
                if item is None:
                    stack.pop()
                    entries.close()
                    os.close(fd)
                    continue
                self.seen += 1
                if self.seen > self.caps.entries or (self.seen % 64 == 0 and self.late()):
                    self.complete = False
                    return
                name = os.fsencode(item.name)
                try:
                    info = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError:
                    self.complete = False
                    continue
                here = path + name
                yield here, fd, name, info
                if not stat.S_ISDIR(info.st_mode):
                    continue
                if len(stack) >= self.caps.depth:
                    self.complete = False
                    continue
                try:
                    child = open_beneath(fd, name, os.O_RDONLY | os.O_DIRECTORY | _BASE)
                except FileNotFoundError:
                    continue
                except OSError:
                    self.complete = False
                    continue
                try:
                    scan = os.scandir(child)
                except OSError:
                    os.close(child)
                    self.complete = False
                    continue
                stack.append((child, scan, here + b"/"))
        finally:
            for fd, entries, _ in stack:
                entries.close()
                os.close(fd)


def _open_regular(directory: int, name: bytes) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; anything else is OSError without ever having been opened (a FIFO would tell its writer)."""
    handle = open_beneath(directory, name, os.O_PATH | os.O_NOFOLLOW)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.ENXIO, "not a regular file")
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), info
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Look:
    """A scan and the root's own inode and change time before it: what `is_as_seen` compares with."""

    root: tuple[int, int]
    manifest: Manifest


def is_as_seen(path: str, look: Look, most: int = 64) -> bool:
    """True only if nothing can have changed since a look: every directory and entry has the inode, size, mode and change time of then.

    A directory whose change time stands has the names that it had. Quick, so it may be called where nothing may wait, once no program
    of the sandbox runs; it reads no file and opens nothing but the tree's own directories. False says nothing: more than `most` entries,
    a stamp too fresh to prove anything, no access.
    """
    seen = look.manifest
    if not seen.complete or len(seen.entries) > most:
        return False
    sure = seen.taken_ns - RACY_NS
    opened: dict[bytes, int] = {}
    try:
        opened[b""] = root = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        info = os.fstat(root)
        if (info.st_ino, info.st_ctime_ns) != look.root or info.st_ctime_ns >= sure:
            return False
        for name, entry in seen.entries.items():  # a scan names a directory before what is in it
            above, _, last = name.rpartition(b"/")
            info = os.stat(last, dir_fd=opened[above], follow_symlinks=False)
            if (info.st_ino, info.st_ctime_ns, stat.S_IMODE(info.st_mode)) != (entry.inode, entry.stamp, entry.mode):
                return False
            if entry.stamp >= sure or (entry.kind == "file" and info.st_size != entry.size):
                return False
            if entry.kind == "dir":
                opened[name] = open_beneath(opened[above], last, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        return True
    except (OSError, KeyError):
        return False
    finally:
        for fd in opened.values():
            os.close(fd)


class GuestTree:
    """A directory that a sandbox writes. Synchronous: call it from a worker thread (`asyncio.to_thread`).

    `uid`, `gid`: the host ids of the sandbox's user. As root the work is done as them; otherwise as ourselves.
    """

    def __init__(self, path: str, uid: int, gid: int, caps: Caps | None = None) -> None:
        self._path = path
        self._caps = caps or Caps()
        self._user: tuple[int, int] | None = None
        if os.geteuid() == 0:
            if uid <= 0 or gid <= 0:
                raise CorralError("infra_error", "a guest tree is never touched as uid 0")
            self._user = (uid, gid)

    def _with_root(self, work: Callable[[int], T], *, read_all: bool = False) -> T:
        def seen(root: int) -> T:
            if read_all and self._user is not None:
                _read_all()
            return work(root)

        # The root itself is the host's: its path has no component that a sandbox can change.
        root = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return _run_as(self._user, lambda: seen(root))
        finally:
            os.close(root)

    def scan(self, previous: Manifest | None = None, *, settle: bool = False) -> Manifest:
        """The manifest now. Files that are provably untouched since `previous` are not read again.

        `settle`: programs run, so what is read is written back first. The kernel moves the change time at the first write through a
        mapping after a write-back only; a stamp would otherwise hold for what such a program still writes.
        """
        return self._with_root(lambda root: self._scan(root, previous, settle), read_all=True)

    def look(self, previous: Manifest | None = None, *, settle: bool = False) -> Look:
        """`scan`, with what `is_as_seen` needs."""

        def work(root: int) -> Look:
            info = os.fstat(root)
            return Look((info.st_ino, info.st_ctime_ns), self._scan(root, previous, settle))

        return self._with_root(work, read_all=True)

    def _scan(self, root: int, previous: Manifest | None, settle: bool) -> Manifest:
        walk = _Walk(root, self._caps)
        manifest = Manifest(taken_ns=time.time_ns())
        budget = self._caps.hash_bytes
        for path, fd, name, info in walk():
            mode = stat.S_IMODE(info.st_mode)
            if stat.S_ISDIR(info.st_mode):
                manifest.entries[path] = Entry("dir", 0, mode, info.st_ino, info.st_ctime_ns, None)
            elif stat.S_ISLNK(info.st_mode):
                try:
                    target = os.readlink(name, dir_fd=fd)
                except OSError:
                    continue
                digest = hashlib.sha256(target).digest()
                manifest.entries[path] = Entry("symlink", len(target), mode, info.st_ino, info.st_ctime_ns, digest)
            elif stat.S_ISREG(info.st_mode):
                known = _untouched(previous, path, info)
                if known is None and info.st_size <= budget:
                    budget -= info.st_size
                    known, info = self._hash(walk, fd, name, info, settle)
                manifest.entries[path] = Entry("file", info.st_size, mode, info.st_ino, info.st_ctime_ns, known)
        manifest.complete = walk.complete
        return manifest

    @staticmethod
    def _hash(
        walk: _Walk, fd: int, name: bytes, info: os.stat_result, settle: bool
    ) -> tuple[bytes | None, os.stat_result]:
        try:
            source, info = _open_regular(fd, name)
        except OSError:
            return None, info  # unreadable or swapped meanwhile: a name without digest, not a failure
        whole = hashlib.sha256()
        left = info.st_size
        try:
            if settle:
                _libc.sync_file_range(source, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_SYNC_PAGES))
            while left > 0 and not walk.late():
                piece = os.read(source, min(CHUNK, left))
                if not piece:
                    break
                whole.update(piece)
                left -= len(piece)
        except OSError:
            return None, info
        finally:
            os.close(source)
        return (whole.digest() if left == 0 else None), info

    def usage(self) -> DiskUse:
        """Bytes in blocks (hard links once) and names, for limits that are held by watching."""
        return self._with_root(self._usage, read_all=True)

    def _usage(self, root: int) -> DiskUse:
        walk = _Walk(root, self._caps)
        total = names = 0
        linked: set[int] = set()
        for _, _, _, info in walk():
            names += 1
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                if info.st_ino in linked:
                    continue
                linked.add(info.st_ino)
            total += info.st_blocks * 512
        return DiskUse(total, names, walk.complete)

    def put(self, files: Sequence[tuple[str, int, bytes | None]]) -> None:
        """Write (relative path, mode, content), parents made. A link in the way is `invalid_value`; a full disk `too_large`.

        The last name is replaced, whatever it was, unless it is a directory; setuid and setgid are dropped. Without content it is a
        directory, new or there already; directories get their modes last, so that one may be closed to writing.
        """
        for index, (path, _, _) in enumerate(files):
            _parts(path, index)
        self._with_root(lambda root: self._put(root, files))

    def _put(self, root: int, files: Sequence[tuple[str, int, bytes | None]]) -> None:
        directories = []
        for index, (path, mode, content) in enumerate(files):
            parts = _parts(path, index)
            if content is None:
                directories.append((len(parts), index, parts))
            with _named(path, index), _entered(root, parts if content is None else parts[:-1]) as directory:
                if content is not None:
                    _write_file(directory, parts[-1], mode & 0o777, content)
        for _, index, parts in sorted(directories, reverse=True):  # the deepest first
            path, mode, _ = files[index]
            with _named(path, index), _entered(root, parts) as directory:
                os.fchmod(directory, mode & 0o777)

    def copy_out(self, globs: Sequence[str], into: str, max_bytes: int) -> Copied:
        """Copy regular files that match to the host directory `into` (which only we write), at their relative paths.

        Globs are relative to the root: `*` and `?` stay within a name, `**` crosses directories; a match of a directory takes all
        below it. Modes are reduced to rw and x; a file that does not fit in what is left of `max_bytes`, or comes after as many as
        the caps allow, is skipped and named.
        """
        patterns = [_glob(pattern) for pattern in globs]
        return self._with_root(lambda root: self._copy_out(root, patterns, into, max_bytes))

    def _copy_out(
        self, root: int, patterns: list[tuple[list[bytes], re.Pattern[bytes]]], into: str, max_bytes: int
    ) -> Copied:
        copied = Copied()
        done: set[bytes] = set()
        with _host_ids(self._user):
            target = os.open(into, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for fixed, pattern in patterns:
                start = os.dup(root)
                try:
                    for part in fixed:
                        below = open_beneath(start, part, os.O_RDONLY | os.O_DIRECTORY | _BASE)
                        os.close(start)
                        start = below
                    walk = _Walk(start, self._caps)
                    prefix = b"".join(part + b"/" for part in fixed)
                    for path, fd, name, info in walk(prefix):
                        if not stat.S_ISREG(info.st_mode) or path in done or not pattern.fullmatch(path):
                            continue
                        done.add(path)
                        max_bytes -= self._copy_one(fd, name, path, target, max_bytes, copied)
                    copied.complete = copied.complete and walk.complete
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno not in _IN_THE_WAY:
                        raise
                    copied.complete = False
                finally:
                    os.close(start)
        finally:
            os.close(target)
        copied.files.sort()
        return copied

    def _copy_one(self, fd: int, name: bytes, path: bytes, target: int, room: int, copied: Copied) -> int:
        try:
            source, info = _open_regular(fd, name)
        except OSError:
            copied.complete = False
            return 0
        try:
            if info.st_size > room or len(copied.files) >= self._caps.copies:
                copied.skipped.append(path)
                return 0
            with _host_ids(self._user):
                out = _create_host_file(target, path, 0o755 if info.st_mode & 0o100 else 0o644)
                try:
                    whole = hashlib.sha256()
                    left = info.st_size  # a file that grows meanwhile is taken as it was when we met it
                    while left > 0 and (piece := os.read(source, min(CHUNK, left))):
                        whole.update(piece)
                        _write_all(out, piece)
                        left -= len(piece)
                finally:
                    os.close(out)
            copied.files.append((path, info.st_size - left, whole.digest()))
            return info.st_size - left
        finally:
            os.close(source)


def _untouched(previous: Manifest | None, path: bytes, info: os.stat_result) -> bytes | None:
    if previous is None or (before := previous.entries.get(path)) is None or before.kind != "file":
        return None
    if (before.inode, before.size, before.stamp) != (info.st_ino, info.st_size, info.st_ctime_ns):
        return None
    return before.digest if before.stamp < previous.taken_ns - RACY_NS else None


def _parts(path: str, index: int) -> list[bytes]:
    raw = path.encode("utf-8", "surrogateescape")
    parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
    bad = None
    if raw.startswith(b"/"):
        bad = "is absolute"
    elif b".." in parts:
        bad = "goes up with `..`"
    elif b"\0" in raw:
        bad = "holds a NUL"
    elif not parts or raw.endswith(b"/"):
        bad = "names no file"
    elif any(len(part) > 255 for part in parts) or len(parts) > 64 or len(raw) > 4000:
        bad = "is too long or too deep"
    if bad is not None:
        raise CorralError("invalid_value", f"file path {path!r} {bad}", field=f"/files/{index}/path")
    return parts


@contextlib.contextmanager
def _named(path: str, index: int) -> Iterator[None]:
    """An OSError inside becomes the refusal of the file at `index`."""
    try:
        yield
    except OSError as error:
        raise _put_error(error, path, index) from error


@contextlib.contextmanager
def _entered(root: int, parts: Sequence[bytes]) -> Iterator[int]:
    """The directory `parts` below `root`, made as far as it is missing."""
    directory = os.dup(root)
    try:
        for part in parts:
            below = _enter(directory, part)
            os.close(directory)
            directory = below
        yield directory
    finally:
        os.close(directory)


def _enter(directory: int, name: bytes) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | _BASE
    try:
        return open_beneath(directory, name, flags)
    except FileNotFoundError:
        try:
            os.mkdir(name, 0o755, dir_fd=directory)
            made = open_beneath(directory, name, flags)
            os.fchmod(made, 0o755)
            return made
        except FileExistsError:
            return open_beneath(directory, name, flags)


def _write_file(directory: int, name: bytes, mode: int, content: bytes) -> None:
    # A new name renamed over the old one: a link there is replaced, not followed, and no reader sees half a file.
    fresh = b".corral-" + secrets.token_hex(8).encode()
    fd = open_beneath(directory, fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        try:
            _write_all(fd, content)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)
        os.rename(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh, dir_fd=directory)
        raise


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _put_error(error: OSError, path: str, index: int) -> CorralError:
    where = f"/files/{index}/path"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CorralError(
            "too_large", f"no room for {path!r}", field=where, hint="ask for a larger disk limit or send less"
        )
    if error.errno in (errno.ELOOP, errno.EXDEV):
        return CorralError("invalid_value", f"{path!r} leads through a link", field=where)
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
        return CorralError("invalid_value", f"{path!r}: a file and a directory are in each other's way", field=where)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return CorralError("invalid_value", f"{path!r}: the sandbox's user may not write there", field=where)
    if error.errno == errno.ENAMETOOLONG:
        return CorralError("invalid_value", f"{path!r} is too long", field=where)
    return CorralError("infra_error", f"{path!r}: {error.strerror}")


def _create_host_file(directory: int, path: bytes, mode: int) -> int:
    """Create `path` under a directory that only we write."""
    *parents, name = path.split(b"/")
    here = os.dup(directory)
    try:
        for parent in parents:
            below = _enter(here, parent)
            os.close(here)
            here = below
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=here)
        fd = open_beneath(here, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(fd, mode)
        return fd
    finally:
        os.close(here)


_WILD = re.compile(rb"[*?\[]")


def _glob(pattern: str) -> tuple[list[bytes], re.Pattern[bytes]]:
    """(fixed leading directories, expression over the relative path)."""
    parts = [part for part in pattern.encode("utf-8", "surrogateescape").split(b"/") if part not in (b"", b".")]
    if b".." in parts or not parts or any(b"\0" in part for part in parts):
        raise CorralError("invalid_value", f"not a glob below the workspace: {pattern!r}", field="/outputs")
    fixed: list[bytes] = []
    for part in parts[:-1]:
        if _WILD.search(part):
            break
        fixed.append(part)
    out = b""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == b"**":
            out += rb".+" if last else rb"(?:[^/]+/)*"
        else:
            out += _glob_name(part) + (b"" if last else b"/")
    if parts[-1] != b"**":
        out += rb"(?:/.+)?"
    return fixed, re.compile(out, re.DOTALL)


def _glob_name(part: bytes) -> bytes:
    out, at = b"", 0
    while at < len(part):
        char = part[at : at + 1]
        at += 1
        if char == b"*":
            out += rb"[^/]*"
        elif char == b"?":
            out += rb"[^/]"
        elif char == b"[" and (end := part.find(b"]", at + 1)) > 0:
            inside = part[at:end]
            negate = inside[:1] in (b"!", b"^")
            inside = inside[1:] if negate else inside
            out += b"[" + (b"^/" if negate else b"") + re.escape(inside).replace(rb"\-", b"-") + b"]"
            at = end + 1
        else:
            out += re.escape(char)
    return out


def remove_tree(path: str) -> list[str]:
    """Remove a tree of ours that a sandbox may have filled, its processes dead; -> what could not be removed.

    Works beyond PATH_MAX (deep directories are moved up first) and on modes 0000; never follows a link or enters another mount.
    """
    left: list[str] = []
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return left
        with contextlib.suppress(OSError):
            os.chmod(path, 0o700)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return left
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    try:
        # Directories moved to the top by one pass are emptied by the next one.
        for _ in range(10_000):
            left.clear()
            if not _empty(top, top, 0, left, path):
                break
    finally:
        os.close(top)
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        left.append(f"{path}: {error.strerror}")
    return left


_DEEP = 48


def _empty(top: int, directory: int, depth: int, left: list[str], path: str) -> bool:
    """Remove what is in `directory`; True when something was moved up and another pass is needed."""
    moved = False
    with os.scandir(directory) as scan:
        names = [os.fsencode(entry.name) for entry in scan]
    for name in names:
        try:
            os.unlink(name, dir_fd=directory)
            continue
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM, errno.EACCES):
                left.append(f"{path}/{os.fsdecode(name)}: {error.strerror}")
                continue
        try:
            child = _open_dir_anyhow(directory, name)
        except OSError as error:
            left.append(f"{path}/{os.fsdecode(name)}: {error.strerror}")
            continue
        try:
            if depth < _DEEP:
                moved |= _empty(top, child, depth + 1, left, f"{path}/{os.fsdecode(name)}"[:300])
            else:
                with os.scandir(child) as scan:
                    below = [os.fsencode(entry.name) for entry in scan]
                for one in below:
                    with contextlib.suppress(OSError):  # a directory moves only when its owner may write in it
                        os.close(_open_dir_anyhow(child, one))
                    os.rename(one, b".corral-up-" + secrets.token_hex(8).encode(), src_dir_fd=child, dst_dir_fd=top)
                    moved = True
            os.rmdir(name, dir_fd=directory)
        except OSError as error:
            left.append(f"{path}/{os.fsdecode(name)}: {error.strerror}"[:400])
        finally:
            os.close(child)
    return moved


def _open_dir_anyhow(directory: int, name: bytes) -> int:
    handle = open_beneath(directory, name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with contextlib.suppress(OSError):
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
