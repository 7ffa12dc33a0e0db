"""Snapshots of memory: an instance as files, and instances made of such files. Only runtimes that declare `memory_snapshot` have it.

Below the directory of a snapshot lie the runtime's own files and `snapshot.json`, written last: without it there is no snapshot. It
says what an instance needs that goes on from these files: the same base, interpreter, limits and defences, which are in the memory already.
"""

from __future__ import annotations

import dataclasses
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from corral import faults
from corral.domain.fence import Fence
from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.node.body import Body
from corral.node.journal import Journal
from corral.node.probes import Probes
from corral.ports.runtime import Evidence, Runtime, SupportsMemorySnapshot

MANIFEST = "snapshot.json"
FORMAT = 2
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


def write(directory: str, snapshot: Snapshot) -> None:
    """The manifest appears whole or not at all, and on disk."""
    aside = os.path.join(directory, f"{MANIFEST}.new")
    with open(aside, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **dataclasses.asdict(snapshot)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, os.path.join(directory, MANIFEST))


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
        body = self._alive(instance_id)
        self._check_fence(body, fence)
        data = self._journal.instances[instance_id].data
        runtime = await self._snapshotting(data["runtime"], body.runtime)
        if body.execs or body.transfers:
            # Its outcome would be told nowhere: not here, where it ends, and in every copy, where nobody waits for it.
            raise CorralError(
                "illegal_transition", "a program or a file transfer runs; its end comes first", retryable=True
            )
        os.makedirs(into, 0o700, exist_ok=True)
        if os.listdir(into):
            raise CorralError("conflict", f"{into} is not empty", retryable=False)
        await (await body.client()).quiesce(fence)
        body.destroying = "snapshot"  # from here on its end is ours, and no news
        self._journal.set_instance(instance_id, state="condemned")
        faults.point("node.checkpoint.condemned")
        try:
            await runtime.checkpoint(body.ref, into)
        except CorralError:
            await self.destroy(instance_id, "snapshot")
            raise
        snapshot = Snapshot(
            instance_id=instance_id,
            runtime=data["runtime"],
            version=(await self._probes.one(data["runtime"])).version,
            template_digest=data["template_digest"],
            interpreter=data["interpreter"],
            limits=body.limits,
            seccomp=data.get("seccomp", "default"),
            unsafe=tuple(data.get("unsafe", ())),
        )
        write(into, snapshot)
        faults.point("node.checkpoint.written")
        return await self.destroy(instance_id, "snapshot")
