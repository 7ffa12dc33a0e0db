"""Snapshots of memory: an instance as files, and instances made of such files. Only runtimes that declare `memory_snapshot` have it.

Below the directory of a snapshot lie the runtime's own files and `snapshot.json`, written last, when all the others are on disk: without
it there is no snapshot. It says what an instance needs that goes on from these files: the same base, interpreter, limits and defences,
which are in the memory already.

While one is made the journal's entry of the instance says where (`saving`), and `snapshot.partial` lies there and says of whom. So
whatever ends the making, one of two things is left, at once or when the node opens again: an instance that goes on and no file, or no
instance. In the second case the snapshot is whole, or there is no file of it either.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from corral import faults
from corral.domain.fence import Fence
from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.linux.guesttree import remove_tree
from corral.node.body import Body
from corral.node.journal import Journal
from corral.node.probes import Probes
from corral.ports.runtime import Evidence, Runtime, SupportsMemorySnapshot

MANIFEST = "snapshot.json"
PARTIAL = "snapshot.partial"
FORMAT = 3
WAKE_S = 20.0
"""How long the instance of a snapshot that failed may take to show that it is still of use."""
SAVE_S, END_S = 10.0, 3.0
"""How long a node that closes waits for snapshots, and then for the end of those that are still being written."""
CLOSE_S = SAVE_S + END_S + 2.0
"""What an owner gives a node to close: a checkpoint may take longer than anybody waits for an owner."""
_IN_MEMORY = ("memory_bytes", "cpu", "pids", "disk_bytes", "inodes", "tmp_bytes", "open_files")
"""Limits that an instance is born with: of the sandbox, not of an exec."""


@dataclass(frozen=True)
class Snapshot:
    """What `snapshot.json` says."""

    instance_id: str
    """Whose memory it is."""
    runtime: str
    version: str | None
    template_digest: str
    interpreter: str
    """Name of the interpreter's tree, which the guest runs on."""
    limits: Limits
    seccomp: str
    """Profile of system calls: the programs' filter is compiled for it, and lives in the memory."""
    unsafe: tuple[str, ...]
    """Defences that were switched off."""
    disk_base: int
    """Bytes that its disk used when it was empty."""

    def check(
        self,
        runtime: str,
        version: str | None,
        template_digest: str,
        limits: Limits,
        *,
        seccomp: str,
        unsafe: Collection[str],
    ) -> None:
        """`conflict` where an instance that is asked for cannot go on from it."""
        wrong = [name for name in _IN_MEMORY if getattr(self.limits, name) != getattr(limits, name)]
        for what, same in (
            (f"runtime {self.runtime}", self.runtime == runtime),
            (f"version {self.version} of {self.runtime}", self.version == version),
            (f"base {self.template_digest}", self.template_digest == template_digest),
            (f"profile of system calls ({self.seccomp})", self.seccomp == seccomp),
            (f"set of defences (off: {', '.join(self.unsafe) or 'none'})", {*self.unsafe} == {*unsafe}),
            (f"limits ({', '.join(wrong)})", not wrong),
        ):
            if not same:
                raise CorralError("conflict", f"the snapshot is of another {what}", retryable=False)


def begin(directory: str, instance_id: str) -> None:
    """Take the directory, an empty one or one that is made now, for the snapshot of this instance. `conflict` where it is not empty."""
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        if os.listdir(directory):
            raise CorralError("conflict", f"{directory} is not empty", retryable=False)
        os.symlink(instance_id, os.path.join(directory, PARTIAL))  # there with its word, or not at all
    except OSError as error:
        raise CorralError("infra_error", f"the snapshot could not be made: {error}", retryable=False) from error


def seal(directory: str, snapshot: Snapshot) -> None:
    """What the runtime has written becomes a snapshot: on disk first, then the manifest, whole or not at all."""
    for name in sorted(os.listdir(directory)):
        if name != PARTIAL:
            _sync(os.path.join(directory, name))
    _sync(directory)
    faults.point("node.checkpoint.synced")
    aside = os.path.join(directory, f"{MANIFEST}.new")
    with open(aside, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **dataclasses.asdict(snapshot)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, os.path.join(directory, MANIFEST))
    _sync(directory)
    _sync(os.path.dirname(os.path.abspath(directory)))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, PARTIAL))


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(mode := os.fstat(fd).st_mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "neither a file nor a directory", path)
        os.fsync(fd)
    finally:
        os.close(fd)


def discard_half(instance_id: str, directory: str, made: bool) -> list[str]:
    """Remove what a snapshot of this instance that never became whole has left, and nothing else; -> what could not be removed.

    `made`: the directory was made for it, and goes too.
    """
    partial = os.path.join(directory, PARTIAL)
    try:
        if os.readlink(partial) != instance_id:
            return []
    except OSError:
        if made:
            with contextlib.suppress(OSError):
                os.rmdir(directory)  # nothing came
        return []
    left: list[str] = []
    with contextlib.suppress(CorralError):
        if read(directory).instance_id == instance_id:
            return remove_tree(partial)  # it is whole
    for name in sorted(os.listdir(directory), key=lambda name: name == PARTIAL):  # what says whose it is goes last
        left += remove_tree(os.path.join(directory, name))
    if made and not left:
        with contextlib.suppress(OSError):
            os.rmdir(directory)
    return left


def read(directory: str) -> Snapshot:
    """`not_found` where there is no whole snapshot that this version can read."""
    try:
        with open(os.path.join(directory, MANIFEST), encoding="utf-8") as file:
            data: dict[str, Any] = json.load(file)
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        return Snapshot(**{**data, "limits": Limits(**data["limits"]), "unsafe": tuple(data["unsafe"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorralError("not_found", f"there is no whole snapshot of memory in {directory}: {error}") from error


def interpreter(state_dir: str, snapshot: Snapshot) -> str:
    """The tree that the guest in the memory runs on, from which it goes on loading."""
    path = os.path.join(state_dir, "interpreter", os.path.basename(snapshot.interpreter))
    if not os.path.exists(os.path.join(path, ".complete")):
        raise CorralError("not_found", "the interpreter that the snapshot runs on is not here any more")
    return path


class MemorySnapshots(ABC):
    """See `ports.node.SupportsMemorySnapshots`; the rest of the node is told by the abstract methods."""

    _journal: Journal
    _probes: Probes
    _saves: set[asyncio.Task[Any]]
    _writing: dict[str, _Save]
    """By instance: those that are being written."""
    _closing = False
    """None begins any more."""
    _cut = False
    """None is taken back any more: that is for the next node."""
    _lost: asyncio.Queue[str]

    @abstractmethod
    def _alive(self, instance_id: str) -> Body:
        """The live instance, or why there is none."""

    @abstractmethod
    def _check_fence(self, body: Body, fence: Fence) -> None:
        """`lease_lost` for a fence below the instance's floor."""

    @abstractmethod
    async def destroy(self, instance_id: str, reason: str) -> Evidence: ...

    async def _snapshotting(self, name: str, runtime: Runtime) -> SupportsMemorySnapshot:
        if not (await self._probes.one(name)).capabilities.get("memory_snapshot", False):
            raise CorralError("not_supported_yet", f"{name} has no snapshots of memory", field="/runtime")
        return cast("SupportsMemorySnapshot", runtime)

    async def checkpoint_instance(self, instance_id: str, fence: Fence, into: str) -> Evidence:
        if self._closing:
            raise CorralError("shutting_down", "the node is closing")
        body = self._alive(instance_id)
        self._check_fence(body, fence)
        body.reserve()  # before anything is awaited: nothing can begin between this look and the guest's own
        save = _Save(body, fence, os.path.abspath(into))
        # A task of its own: who asked may go away in the middle. Before anything is written that ends it, later nothing does.
        task = asyncio.create_task(self._save(save))
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._cut:
                raise CorralError("shutting_down", "the node closed before the snapshot was whole") from None
            if save.writing is None:
                task.cancel()
                await asyncio.wait({task})
            raise

    async def _save(self, save: _Save) -> Evidence:
        body, instance_id = save.body, save.body.instance_id
        try:
            self._still(body)
            data = self._journal.instances[instance_id].data
            runtime = await self._snapshotting(data["runtime"], body.runtime)
            snapshot = Snapshot(
                instance_id=instance_id,
                runtime=data["runtime"],
                version=(await self._probes.one(data["runtime"])).version,
                template_digest=data["template_digest"],
                interpreter=data["interpreter"],
                limits=body.limits,
                seccomp=data.get("seccomp", "default"),
                unsafe=tuple(data.get("unsafe", ())),
                disk_base=body.disk_base,
            )
            self._still(body)
            self._note_save(instance_id, {"into": save.into, "made": not os.path.lexists(save.into)})
            begin(save.into, instance_id)
            faults.point("node.checkpoint.begun")
            save.quieting = asyncio.ensure_future(_quiesce(body, save.fence))
            save.quieting.add_done_callback(_seen)
            await asyncio.shield(save.quieting)
            faults.point("node.checkpoint.quiet")
            self._still(body)
            body.leaving = True
            self._journal.set_instance(instance_id, state="condemned")
            faults.point("node.checkpoint.condemned")
            save.writing = asyncio.ensure_future(_write(runtime, body, save.into, snapshot))
            self._writing[instance_id] = save
            save.writing.add_done_callback(_seen)
            save.writing.add_done_callback(lambda _: self._writing.pop(instance_id, None))
            await asyncio.shield(save.writing)
            faults.point("node.checkpoint.written")
        except BaseException:
            if self._cut:
                raise
            back = asyncio.create_task(self._take_back(save))  # whole, whoever goes away meanwhile
            self._saves.add(back)
            back.add_done_callback(self._saves.discard)
            await asyncio.shield(back)
            raise
        return await self.destroy(instance_id, "snapshot")

    def _still(self, body: Body) -> None:
        if body.destroying is not None:
            raise CorralError("sandbox_deleted", f"instance {body.instance_id} is being destroyed")
        if body.gone.is_set():
            raise CorralError("sandbox_lost", f"instance {body.instance_id} has ended")

    def _note_save(self, instance_id: str, save: dict[str, Any] | None) -> None:
        """Where a snapshot of it is being made, in the journal."""
        entry = self._journal.instances[instance_id]
        data = {name: value for name, value in entry.data.items() if name != "saving"}
        if save is not None:
            data["saving"] = save
        self._journal.put_instance(dataclasses.replace(entry, data=data))

    async def _take_back(self, save: _Save) -> None:
        """After a failure: an instance that goes on, or none; no file of the snapshot either way."""
        body, instance_id = save.body, save.body.instance_id
        try:
            if save.writing is not None:
                await asyncio.wait({save.writing})
            if await self._goes_on(save):
                body.drop_base()
                await self._forget_save(instance_id)
            elif body.destroying is not None:
                await self.destroy(instance_id, "snapshot")
            elif body.gone.is_set() and not body.leaving:
                await self._forget_save(instance_id)  # it ended by itself, and whoever has it hears of that
            else:
                try:
                    await self.destroy(instance_id, "snapshot")  # with it what there is of the snapshot
                finally:
                    self._lost.put_nowait(instance_id)
        finally:
            body.saving = body.leaving = False

    async def _goes_on(self, save: _Save) -> bool:
        """Whether it is still of use; it serves again then."""
        body, instance_id = save.body, save.body.instance_id
        if body.destroying is not None or body.gone.is_set():
            return False
        if save.quieting is None:
            return True
        # A guest that writes its files out hears nothing until that is done; how long it may take the call itself knows.
        await asyncio.wait({save.quieting})
        error = None if save.quieting.cancelled() else save.quieting.exception()
        if isinstance(error, CorralError) and error.code == "lease_lost":
            return body.destroying is None and not body.gone.is_set()  # it did not listen, and is as it was
        try:
            async with asyncio.timeout(WAKE_S):
                if await body.runtime.attach(body.ref) is None:
                    return False
                await self._wake(body, save.fence)
            if body.destroying is not None or body.gone.is_set():
                return False
            if body.leaving:
                self._journal.set_instance(instance_id, state="live")
        except (CorralError, OSError, TimeoutError):
            return False
        body.leaving = False  # from here on its end is news again
        return True

    async def _wake(self, body: Body, fence: Fence = Fence(0, 0)) -> None:
        """End the quiet of a guest whose memory was not saved: it is who it was. `fence` is the last that it may have heard of."""
        instance_id = body.instance_id
        sandbox_id = self._journal.instances[instance_id].data["sandbox_id"]
        client = await body.client()
        # Every call may have raised the guest's floor above ours: with less it does not listen.
        floor = max(body.floor, client.hello.floor, fence)
        if floor > body.floor:
            self._journal.set_instance(instance_id, floor=floor)
        await client.identify(sandbox_id, floor, now=time.time(), entropy=os.urandom(32), instance_id=instance_id)

    async def _forget_save(self, instance_id: str) -> None:
        """No snapshot is being made of it any more: what there was of one goes."""
        entry = self._journal.instances.get(instance_id)
        if entry is None or (save := entry.data.get("saving")) is None:
            return
        left = await asyncio.to_thread(discard_half, instance_id, save["into"], save["made"])
        if not left and instance_id in self._journal.instances:
            self._note_save(instance_id, None)

    async def _await_writing(self, instance_id: str) -> None:
        """Nothing writes below a snapshot's directory any more: what there is of it now can be told, and removed."""
        save = self._writing.get(instance_id)
        if save is not None and save.writing is not None:
            await asyncio.wait({save.writing})

    async def _end_saves(self) -> None:
        """The node closes: none begins any more. What is whole in time is a snapshot; of the rest the next node finds what is noted.

        An instance whose memory is still being written is ended, or its files would go on growing when nobody can make them whole.
        """
        self._closing = True
        if self._saves:
            await asyncio.wait(set(self._saves), timeout=SAVE_S)
        if ends := {asyncio.create_task(_end(save.body)) for save in self._writing.values()}:
            await asyncio.wait(ends | self._saves, timeout=END_S)
        self._cut = True
        for task in (rest := set(self._saves)):
            task.cancel()
        if rest:
            await asyncio.wait(rest)


@dataclass
class _Save:
    """A snapshot that is being made."""

    body: Body
    fence: Fence
    into: str
    quieting: asyncio.Future[None] | None = None
    """The guest's being quiet, from when it was asked."""
    writing: asyncio.Future[None] | None = None


def _seen(part: asyncio.Future[None]) -> None:
    if not part.cancelled():
        part.exception()  # where nobody waits for it any more, it is nobody's news


async def _quiesce(body: Body, fence: Fence) -> None:
    client = await body.client()
    try:
        await client.quiesce(fence)
    except CorralError as error:
        if error.code != "illegal_transition":
            raise
        raise CorralError("illegal_transition", error.detail, retryable=True) from error


async def _end(body: Body) -> None:
    with contextlib.suppress(CorralError, OSError):
        await body.runtime.kill(body.ref)


async def _write(runtime: SupportsMemorySnapshot, body: Body, into: str, snapshot: Snapshot) -> None:
    await runtime.checkpoint(body.ref, into)
    faults.point("node.checkpoint.files")
    try:
        await asyncio.to_thread(seal, into, snapshot)
    except OSError as error:
        raise CorralError("infra_error", f"the snapshot could not be kept: {error}", retryable=False) from error
