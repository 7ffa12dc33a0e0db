"""User namespaces and the host ids behind them.

`SubordinateRange` is the block of host ids that belongs to one installation, cut into sub-ranges of 65536, one per live sandbox.
Claims and allocations are entries below `/run/corral`, made by single atomic calls: they live exactly as long as processes can
(until the next boot), survive any death of ours, and keep installations on one host apart.

`delegated` reads what ids the host has given to its users. `create` makes a user namespace with given maps and hands out its descriptor: for id-mapped mounts and for bubblewrap's `--userns`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import subprocess
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from corral.errors import CorralError
from corral.linux import nsproc

SIZE = 65536
"""Host ids per sandbox."""

RUN = "/run/corral"
"""What installations on this host share until the next boot."""

_BLOCK = 256 * SIZE
_FLOOR = 1 << 28  # above what distributions, login ids and directory services hand out
_CEILING = (1 << 31) - SIZE  # tools that keep ids in a signed int exist


class SubordinateRange:
    """The ids of one installation. Construction does no I/O; all methods may be called from any thread or process at once."""

    def __init__(
        self,
        installation_id: str,
        *,
        state_dir: str,
        configured: tuple[int, int] | None = None,
        run_dir: str = RUN,
    ) -> None:
        """`configured` = (first id, count) from the configuration; else a free block is claimed at the first allocation."""
        self._installation = installation_id
        self._state_dir = os.path.realpath(state_dir)
        self._configured = configured
        self._run = run_dir
        self._block: tuple[int, int] | None = None

    def allocate(self, instance_id: str) -> int:
        """The first host id of the instance's own 65536; the same answer again until `release`."""
        self.claim()
        with self._lock():
            # Somebody who needed room may have taken a block of which nothing was in use.
            first, count = self._current() or self._claim_locked()
            self._block = first, count
            taken = self._records()
            if instance_id in taken:
                return first + taken[instance_id] * SIZE
            used = set(taken.values())
            for index in range(count // SIZE):
                if index not in used:
                    os.symlink(instance_id, self._record(index))
                    return first + index * SIZE
        raise CorralError(
            "quota_exceeded",
            f"all {count // SIZE} user id ranges of this installation are in use",
            hint="end sandboxes, or set a larger subuid_range",
        )

    def find(self, instance_id: str) -> int | None:
        """The first host id that the instance holds, or None."""
        block = self._current()
        if block is None:
            return None
        index = self._records().get(instance_id)
        return None if index is None else block[0] + index * SIZE

    def release(self, instance_id: str) -> None:
        """Give the sub-range back. Only when no process and no mount uses it any more. Idempotent."""
        if not self._claims():
            return
        own = self._current()
        with self._lock():
            for block in self._claims():
                # A lost store leaves us with a new id, and what the old one held under a claim that nobody would ever give back.
                index = self._entries(block).get(instance_id)
                if index is not None and (block == own or not processes_of(block[0] + index * SIZE)):
                    os.unlink(f"{self._directory(block)}/{index}")

    def claim(self) -> tuple[int, int]:
        """The block (first id, count) of this installation, claimed now if it was not yet."""
        if self._block is not None:
            return self._block
        make_run_directory(self._run)
        with self._lock():
            self._block = self._claim_locked()
        return self._block

    def _claim_locked(self) -> tuple[int, int]:
        block = self._claimed()
        if block is not None and self._configured and block != self._configured:
            if self._entries(block):
                raise CorralError(
                    "infra_error",
                    f"subuid_range was changed while sandboxes of the range {block[0]}+{block[1]} are alive",
                    hint="end them first",
                )
            self._drop_claim(block)
            block = None
        if block is None:
            block = self._checked(self._configured) if self._configured else self._free_block()
            self._write_claim(block)
        return block

    def _current(self) -> tuple[int, int] | None:
        if self._block is None or not self._owns(self._block):
            self._block = self._claimed()
        return self._block

    def _owns(self, block: tuple[int, int]) -> bool:
        return self._owner(block).get("installation") == self._installation

    def _owner(self, block: tuple[int, int]) -> dict[str, str]:
        try:
            with open(f"{self._directory(block)}/owner", encoding="utf-8", errors="surrogateescape") as file:
                return dict(json.load(file))
        except (OSError, ValueError):
            return {}

    def _checked(self, block: tuple[int, int]) -> tuple[int, int]:
        first, count = block
        if first < SIZE or count < SIZE or first + count > 1 << 32:
            raise CorralError(
                "invalid_value",
                f"subuid_range {first}+{count} does not hold one range of {SIZE} ids above {SIZE - 1}",
                hint="give FIRST:COUNT with FIRST >= 65536 and COUNT a multiple of 65536",
            )
        for other, text in self._claims().items():
            if other[0] >= first + count or first >= other[0] + other[1]:
                continue
            if self._stale(other, text):
                self._drop_claim(other)
            else:
                raise CorralError(
                    "infra_error",
                    f"subuid_range {first}+{count} overlaps the one of the installation at {text.get('state_dir')}",
                    hint="give each installation a range of its own",
                )
        return block

    def _free_block(self) -> tuple[int, int]:
        floor = max([_FLOOR, *(first + count for kind in ("uid", "gid") for _, first, count in delegated(kind))])
        first = -(-floor // SIZE) * SIZE
        claims = sorted(self._claims().items())
        for block, owner in claims:
            if first + _BLOCK <= block[0]:
                break
            if block[0] + block[1] <= first:
                continue
            if self._stale(block, owner):
                self._drop_claim(block)
            else:
                first = block[0] + block[1]
        if first + _BLOCK <= _CEILING:
            return first, _BLOCK
        # Full of installations that are still on disk: one of which nothing is in use will claim anew when it needs to.
        for block, _ in claims:
            if block[1] == _BLOCK and floor <= block[0] and not self._entries(block) and not processes_of(*block):
                self._drop_claim(block)
                return block
        raise CorralError("infra_error", "no free block of host user ids is left", hint="set subuid_range")

    def _stale(self, block: tuple[int, int], claim: dict[str, str]) -> bool:
        """A claim whose installation was deleted from disk, and none of whose ids runs anything."""
        if claim and os.path.lexists(claim["state_dir"]):  # without an owner: its removal was interrupted
            return False
        return not processes_of(block[0], block[1])

    def _claims(self) -> dict[tuple[int, int], dict[str, str]]:
        found = {}
        for name in _listdir(self._run):
            first, plus, count = name.partition("+")
            if plus and first.isdigit() and count.isdigit():
                block = int(first), int(count)
                found[block] = self._owner(block)
        return found

    def _claimed(self) -> tuple[int, int] | None:
        for block, text in self._claims().items():
            if text.get("installation") == self._installation:
                return block
        return None

    def _write_claim(self, block: tuple[int, int]) -> None:
        # The directory appears with its owner inside or not at all: a nameless block could never be reclaimed.
        draft = f"{self._run}/.{os.getpid()}-{block[0]}"
        _remove_claim(draft)
        os.mkdir(draft, 0o755)
        with open(f"{draft}/owner", "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump({"installation": self._installation, "state_dir": self._state_dir}, file)
        os.rename(draft, self._directory(block))

    def _drop_claim(self, block: tuple[int, int]) -> None:
        _remove_claim(self._directory(block))

    def _directory(self, block: tuple[int, int]) -> str:
        return f"{self._run}/{block[0]}+{block[1]}"

    def _record(self, index: int) -> str:
        assert self._block is not None
        return f"{self._directory(self._block)}/{index}"

    def _records(self) -> dict[str, int]:
        assert self._block is not None
        return self._entries(self._block)

    def _entries(self, block: tuple[int, int]) -> dict[str, int]:
        directory = self._directory(block)
        found = {}
        for name in _listdir(directory):
            if name.isdigit():
                try:
                    found[os.readlink(f"{directory}/{name}")] = int(name)
                except FileNotFoundError:  # released meanwhile
                    continue
        return found

    @contextmanager
    def _lock(self) -> Iterator[None]:
        fd = os.open(f"{self._run}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


class Namespaces:
    """User namespaces with the whole map of a sub-range, made once and kept for the next user of the range."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        self._guard = threading.Lock()
        weakref.finalize(self, _close_all, self._made)

    def of(self, base: int) -> int:
        """The descriptor of the namespace whose first host id is `base`; it stays open as long as this object lives."""
        with self._guard:
            if base in self._made:
                return self._made[base]
        fd = create(base)  # not under the lock: others want theirs meanwhile
        with self._guard:
            kept = self._made.setdefault(base, fd)
        if kept != fd:
            os.close(fd)
        return kept


def _close_all(made: dict[int, int]) -> None:
    while made:
        os.close(made.popitem()[1])


def make_run_directory(path: str = RUN) -> None:
    """Make a directory at or below `RUN`, open to every id whatever the umask."""
    if path != RUN and os.path.dirname(path) == RUN:
        make_run_directory(RUN)
    os.makedirs(path, exist_ok=True)
    if os.stat(path).st_mode & 0o755 != 0o755:  # new, or left so by a death in between
        os.chmod(path, 0o755)  # noqa: S103 - ids of sandboxes pass through


def create(base: int, count: int = SIZE) -> int:
    """A user namespace in which ids 0..count-1 are the host ids base..base+count-1; -> its descriptor (the caller closes it).

    The namespace belongs to the host id `base`, which bubblewrap's `--userns` needs. Works from a process with threads: a child is executed with that uid, unshares, gets its maps from us, and ends.
    """
    # By programs, because a copy of this process made to take another id would cost more than three starts.
    as_owner = ["setpriv", "--reuid", str(base), "--regid", str(base), "--clear-groups", "--"]
    with subprocess.Popen(
        [*as_owner, "unshare", "--user", "--", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
        cwd="/",
        bufsize=0,
    ) as child:
        assert child.stdin and child.stdout and child.stderr
        # `cat` echoes only when `unshare` has left our namespace. It ends when its input does, so also when we die.
        try:
            child.stdin.write(b".")
            echoed = child.stdout.read(1)
        except BrokenPipeError:
            echoed = b""
        if echoed != b".":
            why = child.stderr.read().decode("utf-8", "replace").strip()
            raise OSError(errno.EPERM, f"user namespaces do not work here: {why}")
        fd = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name in ("uid_map", "gid_map"):
                table = os.open(f"/proc/{child.pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.write(table, f"0 {base} {count}\n".encode())
                finally:
                    os.close(table)
        except BaseException:
            os.close(fd)
            raise
    return fd


def processes_of(base: int, count: int = SIZE) -> list[int]:
    """Host pids of all processes that run with an id of the range, zombies left out: the host's own word on what is alive."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/status", "rb") as file:
                text = file.read()
        except OSError:
            continue
        if (b"\nState:\tZ" in text or b"\nState:\tX" in text) and not nsproc.runs(int(name)):
            continue
        _, _, rest = text.partition(b"\nUid:")
        if any(base <= int(uid) < base + count for uid in rest.split(b"\n", 1)[0].split()):
            found.append(int(name))
    return found


def own_names() -> list[str]:
    """What files of the host call this user: its name, where it has one, and its number."""
    number = os.geteuid()
    with contextlib.suppress(KeyError):
        return [pwd.getpwuid(number).pw_name, str(number)]
    return [str(number)]


def subordinate(kind: str, count: int = 1, *, etc: str = "/etc") -> int | None:
    """The first `uid` or `gid` of a range of `count` or more that is delegated to this user, or None."""
    names = own_names()
    return next((first for name, first, size in delegated(kind, etc=etc) if name in names and size >= count), None)


def delegated(kind: str, *, etc: str = "/etc") -> Iterator[tuple[str, int, int]]:
    """(name or number of a user, first id, count) of every range of `uid`s or `gid`s that users of this host have been given."""
    try:
        with open(f"{etc}/sub{kind}", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.strip().split(":")
                if len(fields) == 3 and fields[1].isdecimal() and fields[2].isdecimal():
                    yield fields[0], int(fields[1]), int(fields[2])
    except OSError:
        return


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []


def _remove_claim(directory: str) -> None:
    for name in _listdir(directory):
        os.unlink(f"{directory}/{name}")
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        pass
