"""What the host measures over one exec: counters before and after, peaks in between, full disks, and limits held by watching."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from corral.domain.facts import Usage
from corral.errors import CorralError
from corral.linux import nsproc
from corral.linux.guesttree import Caps, DiskUse, GuestTree
from corral.linux.process import ProcessRef, start_time
from corral.node.body import Body
from corral.ports.runtime import HostTree, Stats

WATCHED_S = 0.1
"""Between two looks when a limit depends on them."""
SAMPLE_S = 0.5
"""Between two looks that only serve peaks and transient hits."""
FULL_BYTES = 2 * 1024 * 1024
"""What a file system of ours may still have free when it has refused a write: it takes memory in units of up to this size before it
asks for blocks, so a large write fails with up to 2 MiB left (measured: 0.4 to 1.8 MiB; small writes leave none)."""
FULL_SHARE = 4
"""... but never more than this part of the disk: a program that fails on a disk that is half empty has another reason."""
FULL_TMP_BYTES = 64 * 1024
FULL_INODES = 16
DISK_WALK_S = 0.5
LONGEST_WALK_S = 3.0
LAST_WALK_S = 0.05
UNSEEN_LOOKS = 2
"""So many looks one after the other that did not see all end the exec. One alone may have met what was ending or being started."""


@dataclass(frozen=True)
class Measured:
    usage: Usage
    disk_full: bool
    inodes_full: bool
    tmp_full: bool
    cpu_throttled: int | None = None


class Meter:
    """Begin before the start frame, `watch` while it runs, `end` once. Everything is read on the host."""

    def __init__(self, body: Body) -> None:
        self._body = body
        # The sandbox's, not the exec's: what is watched is shared by all that runs in it.
        self._limits = body.limits
        self.before = Stats()
        self.after = Stats()
        self._peak_memory: int | None = None
        self._peak_pids: int | None = None
        self._disk_full = self._inodes_full = self._tmp_full = False
        self._disk_bytes: int | None = None
        self._entries = 0
        self._unseen = 0
        self._walk_s = DISK_WALK_S
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.TimerHandle | None = None

    async def begin(self, *, alone: bool) -> None:
        """Take the base line; peaks of the kernel start anew when no other exec runs."""
        base = await self._body.base() if alone else None
        self.before = base or await self._body.stats()

    def watch(self, end: Callable[[str], None]) -> None:
        """Look at it until `end()` or `stop()`; `end` is called with the reason when a watched limit is passed."""
        # No look is due before: an exec that is over by then needs no task.
        self._first = asyncio.get_running_loop().call_later(WATCHED_S, self._begin_watch, end)

    def _begin_watch(self, end: Callable[[str], None]) -> None:
        self._task = asyncio.create_task(self._watch(end), name="meter")

    def stop(self) -> None:
        if self._first is not None:
            self._first.cancel()
        if self._task is not None:
            self._task.cancel()

    async def _watch(self, end: Callable[[str], None]) -> None:
        # Apart, as a walk over a large tree takes longer than memory may go unseen.
        await asyncio.gather(self._watch_counters(end), self._watch_disk(end))

    async def _watch_counters(self, end: Callable[[str], None]) -> None:
        watched = {name for name in ("memory", "pids") if getattr(self._body.modes, name) == "watched"}
        unseen = 0
        while True:
            stats = await self._body.stats()
            self._sample(stats)
            unseen = 0 if stats.memory_whole else unseen + 1
            if "memory" in watched and (stats.memory_bytes or 0) > self._limits.memory_bytes:
                end("memory_watch")
            if "memory" in watched and unseen >= UNSEEN_LOOKS:
                end("memory_unseen")
            if "pids" in watched and (stats.pids or 0) > self._limits.pids:
                end("pids_watch")
            await asyncio.sleep(WATCHED_S if watched else SAMPLE_S)

    async def _watch_disk(self, end: Callable[[str], None]) -> None:
        modes = self._body.modes
        while True:
            began = time.monotonic()
            await self._look_at_disk(self._walk_s)
            if modes.disk == "watched" and (self._disk_bytes or 0) > self._limits.disk_bytes:
                end("disk_watch")
            if modes.disk == "watched" and self._unseen >= UNSEEN_LOOKS:
                end("disk_unseen")
            if modes.inodes == "watched" and self._entries > self._limits.inodes:
                end("inodes_watch")
            # A tree that takes long to walk may take a third of our time, no more.
            await asyncio.sleep(max(SAMPLE_S, 2 * (time.monotonic() - began)))

    def _sample(self, stats: Stats) -> None:
        if stats.memory_bytes is not None:
            self._peak_memory = max(self._peak_memory or 0, stats.memory_bytes)
        if stats.pids is not None:
            self._peak_pids = max(self._peak_pids or 0, stats.pids)

    async def _look_at_disk(self, seconds: float) -> None:
        tree = self._body.tree
        if tree.mode == "image":
            try:
                info = os.statvfs(tree.path)
            except OSError:
                return
            used = (info.f_blocks - info.f_bfree) * info.f_frsize
            self._disk_bytes = max(0, used - self._body.disk_base)
            free, size = info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize
            self._disk_full |= free < min(FULL_BYTES, size // FULL_SHARE)
            self._inodes_full |= info.f_files > 0 and info.f_favail < FULL_INODES
        else:
            caps = Caps(entries=max(200_000, 2 * self._limits.inodes), seconds=seconds)
            try:
                use, whole = await asyncio.to_thread(_use_of, tree, caps, self._body.pid1)
            except (CorralError, OSError):
                return
            self._unseen = 0 if whole else self._unseen + 1
            if use.complete or use.bytes > (self._disk_bytes or 0):
                self._disk_bytes = use.bytes
            if use.complete or use.entries > self._entries:
                self._entries = use.entries
            if not use.complete:
                # What was seen is a lower bound: look longer next time, or a tree that grows fast would never be over.
                self._walk_s = min(2 * self._walk_s, LONGEST_WALK_S)
            self._disk_full |= use.bytes >= self._limits.disk_bytes  # one file may be as large as the limit, not larger
            self._inodes_full |= use.entries > self._limits.inodes - FULL_INODES
        self._tmp_full |= _tmp_is_full(self._body.pid1)

    async def end(self) -> Measured:
        """Stop looking; what was used."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        after, before = await self._body.stats(), self.before
        self.after = after
        self._sample(after)
        await self._look_at_disk(LAST_WALK_S)
        peak = self._peak_memory
        if after.peak_memory_bytes is not None and after.peak_memory_bytes > (before.peak_memory_bytes or 0):
            peak = after.peak_memory_bytes
        pids = self._peak_pids
        if after.peak_pids is not None and after.peak_pids > (before.peak_pids or 0):
            pids = after.peak_pids
        usage = Usage(
            peak_memory_bytes=peak,
            cpu_seconds=_delta(before.cpu_seconds, after.cpu_seconds),
            peak_pids=pids,
            disk_bytes=self._disk_bytes,
            oom_kills=_count(before.oom_kills, after.oom_kills),
            pids_limit_hits=_count(before.pids_limit_hits, after.pids_limit_hits),
        )
        throttled = _count(before.cpu_throttled, after.cpu_throttled)
        return Measured(usage, self._disk_full, self._inodes_full, self._tmp_full, throttled)


def _use_of(tree: HostTree, caps: Caps, pid1: ProcessRef | None) -> tuple[DiskUse, bool]:
    """(what lies in the tree, with what was removed from it and lives on because a program has it open, whether all of that was seen)"""
    before = _nameless(tree, pid1)
    use = GuestTree(tree.path, tree.uid, tree.gid, caps).usage()
    after = _nameless(tree, pid1)
    # What lost or got its name during the walk is in the tree's count already, or in the next one's.
    size, count = min(before.bytes, after.bytes), min(before.count, after.count)
    return replace(use, bytes=use.bytes + size, entries=use.entries + count), before.whole and after.whole


def _nameless(tree: HostTree, pid1: ProcessRef | None) -> nsproc.Nameless:
    if pid1 is None or (namespace := nsproc.pid_namespace(pid1.pid)) is None or start_time(pid1.pid) != pid1.start_time:
        return nsproc.Nameless()
    return nsproc.unlinked(nsproc.members(namespace), os.stat(tree.path).st_dev)


def empty_disk(tree: HostTree) -> int:
    """Bytes that the file system of a fresh disk uses for itself."""
    if tree.mode != "image":
        return 0
    info = os.statvfs(tree.path)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def _delta(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, round(after - before, 6))


def _count(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


def _tmp_is_full(ref: ProcessRef | None) -> bool:
    """The temporary directory inside, seen through PID 1's root where we may look; never following a name of the sandbox."""
    if ref is None:
        return False
    try:
        root = os.open(f"/proc/{ref.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if start_time(ref.pid) != ref.start_time:
            return False
        tmp = os.open("tmp", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root)
        device = os.fstat(root).st_dev
    except OSError:
        return False
    finally:
        os.close(root)
    try:
        if os.fstat(tmp).st_dev == device:
            return False  # no file system of its own: its limit is the disk's
        info = os.statvfs(tmp)
    except OSError:
        return False
    finally:
        os.close(tmp)
    small = info.f_blocks * info.f_frsize
    return small > 0 and info.f_bavail * info.f_frsize < min(FULL_TMP_BYTES, small // 8)
