"""The making of an instance, from the listening socket to a guest that knows whose it is, and its removal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from corral import faults
from corral.errors import CorralError
from corral.linux import disk, sockets
from corral.linux.guesttree import remove_tree
from corral.node import files, snapshots
from corral.node.body import SOCKET, Body
from corral.node.interpreter import GUEST_ARGV
from corral.node.journal import InstanceEntry, Journal
from corral.node.watch import empty_disk
from corral.ports.node import CreateInstance
from corral.ports.runtime import (
    Evidence,
    Instance,
    InstanceRef,
    InstanceSpec,
    Runtime,
    SupportsMemorySnapshot,
)


class Clock:
    """Milliseconds per phase."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.phases[name] = round((now - self._at) * 1000, 3)
        self._at = now


class Turns:
    """So many instances are made at once, the others wait their turn: a guest that shares the host with hundreds of beginners is too late.

    Whoever is given up while it waits is not made at all.
    """

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: OrderedDict[str, asyncio.Future[None]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def of(self, instance_id: str) -> AsyncIterator[None]:
        """Inside it is this one's turn; `sandbox_deleted` when it was given up before."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(instance_id)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, instance_id: str) -> None:
        turn = self._waiting[instance_id] = asyncio.get_running_loop().create_future()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(instance_id, None)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on()  # it had just come
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            _, turn = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def give_up(self, instance_id: str) -> None:
        """It is to be removed: its turn does not come any more. Not waiting: nothing."""
        turn = self._waiting.pop(instance_id, None)
        if turn is not None and not turn.done():
            turn.set_exception(CorralError("sandbox_deleted", "it was removed before it was made"))


def ref_to_json(ref: InstanceRef) -> dict[str, Any]:
    return dataclasses.asdict(ref)


def ref_from_json(data: dict[str, Any]) -> InstanceRef:
    return InstanceRef(data["runtime"], data["instance_id"], data["directory"], data["data"])


async def make(
    request: CreateInstance,
    runtime: Runtime,
    journal: Journal,
    *,
    directory: str,
    rootfs: str,
    interpreter: str,
    installation_id: str,
    facts: dict[str, Any],
    body_of: Callable[[Instance, dict[str, Any]], Body],
    clock: Clock,
    image: str | None = None,
) -> Body:
    """A connected, identified instance, journalled as live with `facts`; a failure leaves nothing but its error.

    With `image` it goes on from the runtime's files of a snapshot.
    """
    data = {**facts, "ref": ref_to_json(runtime.partial_ref(directory, request.instance_id))}
    if request.unsafe:
        data["unsafe"] = sorted(request.unsafe)
    if request.seccomp != "default":
        data["seccomp"] = request.seccomp
    journal.put_instance(InstanceEntry(request.instance_id, "creating", request.fence, data))
    faults.point("node.create.journalled")
    body: Body | None = None
    try:
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o711)  # noqa: S103  # the sandbox's own uid passes through, and may not list
        control = sockets.listen(directory, SOCKET)
        try:
            spec = InstanceSpec(
                instance_id=request.instance_id,
                sandbox_id=request.sandbox_id,
                incarnation=request.incarnation,
                installation_id=installation_id,
                directory=directory,
                rootfs=rootfs,
                interpreter=interpreter,
                guest_argv=(
                    *GUEST_ARGV,
                    *("--instance", request.instance_id, "--installation", installation_id),
                    *("--deadline", f"{request.deadline_s:.3f}"),
                ),
                limits=request.limits,
                seccomp=request.seccomp,
                unsafe=request.unsafe,
            )
            if image is None:
                instance = await runtime.create(spec, control)
            else:
                instance = await cast("SupportsMemorySnapshot", runtime).restore(spec, image)
        finally:
            control.close()
        faults.point("node.create.made")
        clock.lap("runtime_ms")
        data["ref"] = ref_to_json(instance.ref)
        data.setdefault("disk_base", empty_disk(instance.tree))  # a restored disk is not empty: its facts tell
        body = body_of(instance, data)
        # Beside the guest's own start, which takes longer.
        marked = files.mark(instance.tree, files.mark_path(directory))
        looking = asyncio.gather(marked, body.find_pid1())
        try:
            client = await body.client()
            clock.lap("connect_ms")
            await client.identify(
                request.sandbox_id,
                request.fence,
                now=time.time(),
                entropy=os.urandom(32),
                instance_id=request.instance_id,
            )
            if image is not None:  # its own is the one of the instance that it was
                await client.extend_deadline(request.deadline_s, fence=request.fence)
            clock.lap("identify_ms")
        except BaseException:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)  # or its end is reported as nobody's
            raise
        await looking
        body.take_base()
        journal.put_instance(InstanceEntry(request.instance_id, "live", request.fence, data))
        return body
    except BaseException as error:
        reason: BaseException = error
        if body is not None:
            if isinstance(error, CorralError) and error.code == "guest_lost":
                said = await asyncio.to_thread(_tail, os.path.join(body.tree.path, disk.LOG))
                reason = CorralError("infra_error", f"the sandbox did not start: {said or error.detail}")
            await body.let_go()
        await asyncio.shield(undo(journal, runtime, directory, request.instance_id))
        if isinstance(error, OSError):
            code = "too_large" if error.errno == errno.ENOSPC else "infra_error"
            reason = CorralError(code, f"the sandbox could not be made: {error}")
        raise reason from error


async def undo(journal: Journal, runtime: Runtime, directory: str, instance_id: str) -> Evidence:
    """Remove an instance by its journalled ref; the entry goes only with everything else."""
    entry = journal.instances.get(instance_id)
    ref = ref_from_json(entry.data["ref"]) if entry is not None else runtime.partial_ref(directory, instance_id)
    ref = dataclasses.replace(ref, directory=directory)  # the state directory may have been moved since
    evidence = await runtime.destroy(ref)
    left = list(evidence.left)
    if evidence.clean:
        left += await asyncio.to_thread(remove_tree, directory)
        if entry is not None and (save := entry.data.get("saving")) is not None:
            left += await asyncio.to_thread(snapshots.discard_half, instance_id, save["into"], save["made"])
    if left:
        return Evidence(False, tuple(left), evidence.notes)
    journal.drop_instance(instance_id)
    return evidence


def _tail(path: str) -> str:
    """The guest's last words; before any exec has run they are its own."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, 400, max(0, size - 400)).decode("utf-8", "replace").strip()
    finally:
        os.close(fd)
