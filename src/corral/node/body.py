"""A live instance: its connection to the guest, its execs, its deadline, and the watch over whether it still is.

The guest may be captured. It is asked first, because it is fast and gentle; whether something ended is then seen on the host, and
what the guest does not confirm in time the runtime ends from outside, the whole sandbox with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from corral.channel import GuestClient
from corral.domain.fence import Fence
from corral.domain.limits import LimitModes, Limits
from corral.errors import CorralError
from corral.linux import fifos, process, sockets
from corral.linux.guesttree import Look
from corral.node.journal import Journal
from corral.ports.runtime import Instance, InstanceRef, Runtime, Stats

if TYPE_CHECKING:
    from corral.node.execs import Exec

SOCKET = "s"
CONNECT_S = 20.0
DIAL_S = 5.0
LOSSES = 3
"""Connections that may break within `LOSSES_S` seconds before the guest counts as lost."""
LOSSES_S = 60.0
GONE_S = 10.0
DRAIN_S = 0.5


class Body:
    """One live instance. Made by `service` after `create` or `attach`; `watch` starts what looks after it."""

    def __init__(
        self,
        instance_id: str,
        runtime: Runtime,
        instance: Instance,
        limits: Limits,
        modes: LimitModes,
        disk_base: int,
        journal: Journal,
        on_gone: Callable[[Body], Coroutine[Any, Any, None]],
    ) -> None:
        self.instance_id = instance_id
        self.runtime = runtime
        self.instance = instance
        self.ref: InstanceRef = instance.ref
        self.tree = instance.tree
        self.limits = limits
        self.modes = modes
        self.disk_base = disk_base
        """Bytes that an empty disk uses already."""
        self.journal = journal
        self.execs: dict[str, Exec] = {}
        self.transfers = 0
        """File transfers under way: processes inside that belong to no exec."""
        self.putting = asyncio.Lock()
        """Input files are written by one call after another: whoever has raised the fence writes after those that it was raised over."""
        self.visits = 0
        """Looks at its files and changes of them from the host's side that are under way."""
        self.saving = False
        """A snapshot of its memory is being made: nothing begins, see `check_free`."""
        self.leaving = False
        """That snapshot is being written: the end that comes with it is no news."""
        self.paused = False
        """Nothing inside runs, or is about to stop, or to run again: nothing begins, clocks stand still. See `pausing`."""
        self.frozen = False
        """By the host: the guest cannot answer."""
        self.turning = asyncio.Lock()
        """Held by the one pause or resume that is under way."""
        self.background = False
        """An exec that is over left processes behind."""
        self.look: Look | None = None
        """The workspace as it was when its last look became the base of changes, if nothing ran meanwhile."""
        self.gone = asyncio.Event()
        self.destroying: str | None = None
        """The reason of `destroy`, once it began."""
        self.forsaken = False
        """The guest is beyond use; the sandbox is being ended."""
        self.pid1: process.ProcessRef | None = None
        self.born_as = instance_id
        """Which instance the guest was when its memory was saved, where it goes on from a snapshot."""
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._on_gone = on_gone
        self._client: GuestClient | None = None
        self._dialling = asyncio.Lock()
        self._losses: list[float] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._base: asyncio.Task[Stats] | None = None

    @property
    def is_quiet(self) -> bool:
        """No program of the sandbox runs, as far as we know."""
        return not (self.execs or self.transfers or self.background)

    # -- snapshots of memory -------------------------------------------------------------------------------------------
    def check_free(self) -> None:
        """`illegal_transition` while a snapshot is made: what begins now would go on in every copy, and its end be told nowhere.

        `sandbox_paused` while it is paused: nothing could begin.
        """
        if self.paused:
            raise CorralError("sandbox_paused", "the sandbox is paused", hint="resume it first")
        self._check_unsaved()

    def _check_unsaved(self) -> None:
        if self.saving:
            raise CorralError(
                "illegal_transition",
                "a snapshot of the sandbox is being made",
                hint="try again when it is done",
                retryable=True,
            )

    def reserve(self) -> None:
        """Begin a snapshot: from now on `check_free` refuses. `illegal_transition` while something is under way."""
        self.check_free()
        if self.execs or self.transfers or self.visits:
            # Its outcome would be told nowhere: not here, where it ends, and in every copy, where nobody waits for it.
            raise CorralError(
                "illegal_transition", "a program or a file transfer runs; its end comes first", retryable=True
            )
        self.saving = True

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """Around what reaches for its files from the host's side, of a paused one too."""
        self._check_unsaved()
        self.visits += 1
        try:
            yield
        finally:
            self.visits -= 1

    # -- pause ---------------------------------------------------------------------------------------------------------
    def stand_still(self) -> None:
        """Nothing begins any more, and clocks of execs stand still. Idempotent."""
        self.paused = True
        for one in self.execs.values():
            one.hold()

    def hold_line(self) -> None:
        """The guest is about to be frozen: its silence means nothing until `release_line`."""
        self.frozen = True
        self._thawed.clear()
        if self._client is not None:
            self._client.hold()

    def release_line(self) -> None:
        self.frozen = False
        self._thawed.set()
        if self._client is not None:
            self._client.release()

    def go_on(self, paused_s: float) -> None:
        """The end of `stand_still`."""
        self.paused = False
        for one in list(self.execs.values()):
            one.go_on(paused_s)

    # -- connection ----------------------------------------------------------------------------------------------------
    @property
    def floor(self) -> Fence:
        entry = self.journal.instances.get(self.instance_id)
        return entry.floor if entry is not None else Fence(0, 0)

    async def _dial(self) -> socket.socket | fifos.Ends:
        if self.instance.control == "socket":
            return await asyncio.to_thread(sockets.connect, self.ref.directory, SOCKET, timeout_s=DIAL_S)
        until = time.monotonic() + DIAL_S
        while True:
            try:
                return fifos.connect(self.ref.directory)
            except BlockingIOError:  # an owner before us is just ending
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.02)

    async def _connect(self) -> GuestClient:
        try:
            async with asyncio.timeout(CONNECT_S):
                client = await GuestClient.connect(self._dial)
        except (OSError, TimeoutError) as error:
            raise CorralError("guest_lost", f"the guest does not answer: {error or 'time is up'}") from error
        if client.hello.instance_id not in (self.instance_id, self.born_as):
            await client.close()
            raise CorralError("guest_lost", "the guest says that it is another instance")
        self._client = client
        return client

    async def client(self) -> GuestClient:
        """The connection, made anew after a loss; `sandbox_lost` when there is no instance, `guest_lost` when it is beyond use."""
        if self._client is not None and not self._client.closed.is_set():
            return self._client
        async with self._dialling:
            if self._client is not None and not self._client.closed.is_set():
                return self._client
            if self._client is not None:
                # PID 1 may be gone with the connection; then there is nobody to call.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.gone.wait(), 0.2)
            await self._thawed.wait()  # frozen when this node came, or since its line broke: nobody answers before
            if self.gone.is_set() or self.destroying is not None:
                raise CorralError("sandbox_lost", "the sandbox is gone")
            now = time.monotonic()
            self._losses = [at for at in self._losses if now - at < LOSSES_S]
            if self.forsaken or len(self._losses) >= LOSSES:
                self.forsake()
                raise CorralError("guest_lost", "the program inside the sandbox does not keep to its protocol")
            if self._client is not None:
                self._losses.append(now)
            try:
                return await self._connect()
            except CorralError as error:
                if error.code == "guest_lost":
                    self.forsake()
                raise

    def forsake(self) -> None:
        """Give the guest up: end the whole sandbox from outside; open execs end as lost."""
        if not self.forsaken:
            self.forsaken = True
            self.spawn(self.kill())

    # -- life ----------------------------------------------------------------------------------------------------------
    def watch(self, deadline_s: float | None = None) -> None:
        """Begin to look after it; `deadline_s` from now the host ends it, whatever the guest does."""
        self._watcher = asyncio.create_task(self._watch_gone(), name=f"gone:{self.instance_id}")
        if deadline_s is not None:
            self.set_deadline(deadline_s)

    def set_deadline(self, deadline_s: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        # The guest's own switch fires first; a captured guest has none.
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(max(0.0, deadline_s) + 1.0, lambda: self.spawn(self.kill()))

    async def _watch_gone(self) -> None:
        await self.runtime.wait_gone(self.ref)
        self.gone.set()
        self._thawed.set()
        # What the guest had sent before it died is still in the socket: the pumps read it to its end.
        pumps = [one.pumped.wait() for one in self.execs.values()]
        if pumps:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*pumps), DRAIN_S)
        if self._client is not None:
            await self._client.close()
        waiting = [asyncio.shield(one.done) for one in self.execs.values()]
        if waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5.0)
        await self._on_gone(self)

    async def kill(self) -> bool:
        """End every process from outside; True when the host shows none."""
        try:
            async with asyncio.timeout(GONE_S):
                await self.runtime.kill(self.ref)
                await self.runtime.wait_gone(self.ref)
                await self._wait_empty()
        except (CorralError, OSError, TimeoutError):
            return False
        return True

    async def _wait_empty(self) -> None:
        pause = 0.005
        while await self.runtime.processes(self.ref):
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.1)

    async def find_pid1(self) -> None:
        """Note which host process is PID 1 inside, for looks through its root; where it cannot be told, nothing is lost."""
        with contextlib.suppress(CorralError, OSError):
            for pid in await self.runtime.processes(self.ref):
                with open(f"/proc/{pid}/status", "rb") as file:
                    inside = [line.split()[-1] for line in file if line.startswith(b"NSpid:")]
                if inside == [b"1"]:
                    self.pid1 = process.ref_of(pid)
                    return

    async def stats(self) -> Stats:
        """The host's counters; all None when they are gone with the instance."""
        try:
            async with asyncio.timeout(5.0):
                return await self.runtime.stats(self.ref)
        except (CorralError, OSError, TimeoutError):
            return Stats()

    def take_base(self, after: Stats | None = None) -> None:
        """Begin to take the base line of the next exec, while nothing runs; not for after a transfer or beside a process left behind.

        `after`: the counters as they were just read, when the last program had ended.
        """
        self._base = asyncio.create_task(self._fresh_base() if after is None else self._base_after(after))
        self._tasks.add(self._base)
        self._base.add_done_callback(self._spawned)

    async def base(self) -> Stats:
        """The counters before an exec that runs alone, the kernel's peaks begun anew."""
        taken, self._base = self._base, None
        if taken is None or self.background or self.transfers:
            return await self._fresh_base()
        return await taken

    def drop_base(self) -> None:
        """Something else has run inside since it was taken."""
        self._base = None

    async def _fresh_base(self) -> Stats:
        with contextlib.suppress(CorralError, OSError):  # then the peak is the highest sample
            await self.runtime.reset_peaks(self.ref)
        return await self.stats()

    async def _base_after(self, after: Stats) -> Stats:
        with contextlib.suppress(CorralError, OSError):
            if await self.runtime.reset_peaks(self.ref):
                return dataclasses.replace(after, peak_memory_bytes=after.memory_bytes)
        return after

    async def members(self) -> frozenset[tuple[int, int]]:
        """(pid on the host, start time) of everything inside."""
        try:
            pids = await self.runtime.processes(self.ref)
        except (CorralError, OSError):
            return frozenset()
        return frozenset((pid, began) for pid in pids if (began := process.start_time(pid)) is not None)

    async def survivors(
        self, since_ticks: int, older: frozenset[tuple[int, int]] = frozenset(), uid: int | None = None
    ) -> list[int]:
        """Host pids that began at or after `since_ticks`, are none of `older` and still run: the witness of a kill.

        PID 1 is never one: a sandbox's first exec may begin within the same tick. With `uid` only processes of that user of the host:
        where execs have their own, the guest may have its helpers.
        """
        first = set() if self.pid1 is None else {(self.pid1.pid, self.pid1.start_time)}
        members = await self.members()
        return [pid for pid, began in members - older - first if began >= since_ticks and _runs(pid, began, uid)]

    def uid_of_execs(self, uid: int | None) -> int | None:
        """Whom on the host an exec's processes belong to for sure, given its uid inside; None when they share it with the guest."""
        return self.tree.uid if not self.instance.same_uid and uid == self.instance.exec_uid else None

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something of this body beside; it is cancelled when we let go."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen; whatever it was about shows itself to those who wait for it

    async def let_go(self) -> None:
        """Stop looking after it; it lives on. Idempotent."""
        if self._deadline is not None:
            self._deadline.cancel()
        for one in self.execs.values():
            one.closing = True
        tasks = [*self._tasks, *(one.task for one in self.execs.values() if one.task is not None)]
        if self._watcher is not None and self._watcher is not asyncio.current_task():
            tasks.append(self._watcher)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self.execs.values():
            one.let_go()
        if self._client is not None:
            await self._client.close()


def _runs(pid: int, began: int, uid: int | None) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X") or int(fields[19]) != began:
            return False
        if uid is None:
            return True
        # Not the owner of the directory: that is root for what may not be dumped.
        with open(f"/proc/{pid}/status", "rb") as file:
            owners = next((line.split()[1:] for line in file if line.startswith(b"Uid:")), [])
        return any(int(owner) == uid for owner in owners)
    except (OSError, IndexError, ValueError):
        return False
