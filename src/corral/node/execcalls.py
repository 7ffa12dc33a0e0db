"""The part of `LocalNode` that is about execs: begun once, waited for, spoken to, ended, and what they said.

A node that starts again calls `_exec` for each that its journal names.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Literal

from corral import faults
from corral.domain.facts import ExecFacts, StreamFacts
from corral.domain.fence import Fence
from corral.domain.ids import is_id
from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.node import execs as exec_life
from corral.node import files, witness
from corral.node.body import Body
from corral.node.execs import Exec
from corral.node.journal import ExecEntry, Journal
from corral.node.spool import Spool
from corral.ports.node import Chunk, ExecSpec, Gap

RECENT_SPOOLS = 32
NOTE_S = 0.025
"""An exec that is over sooner is not journalled as running."""
BACKUP_CLOCK_S = 10.0
"""The guest ends an exec by itself this long after the host should have: for when no node lives."""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/home/sandbox",
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "SHELL": "/bin/sh",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TMPDIR": "/tmp",  # noqa: S108
    "PYTHONUNBUFFERED": "1",
}
"""What every exec has unless its spec says otherwise."""


class ExecCalls(ABC):
    """See `ports.node.Node`. What is not here is the instance's own: who is alive, under which fence."""

    _state: str
    _journal: Journal
    _execs: dict[str, Exec]
    _unnoted: dict[str, dict[str, Any]]
    """Execs that run and are not yet journalled as running."""
    _spools: dict[str, Spool]
    """Of the execs that ended last, as they are asked for at once."""

    @abstractmethod
    def _alive(self, instance_id: str) -> Body:
        """The live instance, or why there is none."""

    @abstractmethod
    def _check_fence(self, body: Body, fence: Fence) -> None:
        """`lease_lost` for a fence below the instance's floor."""

    @abstractmethod
    async def _freshen(self, instance_id: str) -> None:
        """What we put lately is no change of the first program's."""

    @abstractmethod
    def _note(self, kind: str, instance_id: str, **facts: Any) -> None:
        """Told to the witness."""

    def _spool_path(self, exec_id: str) -> str:
        if not is_id(exec_id, "exe"):
            raise CorralError("not_found", f"no exec {exec_id!r}")
        return os.path.join(self._state, "spool", exec_id)

    # -- from the start to the end -----------------------------------------------------------------------------------
    async def start_exec(self, instance_id: str, fence: Fence, spec: ExecSpec) -> None:
        known = self._journal.get_exec(spec.exec_id)
        if known is not None:
            if known.instance_id != instance_id:
                raise CorralError("conflict", f"exec {spec.exec_id} belongs to another instance", retryable=False)
            return
        body = self._alive(instance_id)
        self._check_fence(body, fence)
        ids = files.user_ids(spec.user, body.instance)
        data = {
            "limits": dict(vars(spec.limits)),
            "grace_s": spec.grace_s,
            "background": spec.background,
            "fence": str(fence),
            "since_ticks": exec_life.now_ticks(),
            "uid": ids[0],
        }
        self._spool_path(spec.exec_id)  # refuses what is no id
        if not self._journal.put_exec(ExecEntry(spec.exec_id, instance_id, "starting", data)):
            return
        faults.point("node.exec.journalled")
        told: dict[str, Any] = {"exec": spec.exec_id, "fence": fence, "op": witness.op_of(spec.env)}
        self._note("start", instance_id, **told)
        job: Exec | None = None
        try:
            if not body.execs:
                await self._freshen(instance_id)
            job = self._exec(body, spec.exec_id, data)
            if spec.stdin:
                job.spool.save_input(spec.stdin, not spec.stdin_open)
            await job.start(self._frame(spec, ids, body), fence)
        except BaseException as error:
            self._execs.pop(spec.exec_id, None)
            if job is not None and job.sent and not isinstance(error, CorralError):
                raise  # cut short after the frame may have left: who asks later finds it in the journal, its outcome unknown
            # The guest refused it or was never asked: it did not start, and the caller hears why.
            if job is not None:
                job.spool.remove()
            with contextlib.suppress(CorralError):
                self._journal.drop_exec(spec.exec_id)
            self._note("refused", instance_id, **told)
            raise
        self._note("started", instance_id, **told)
        faults.point("node.exec.started")
        if job.started_at is not None:
            self._unnoted[spec.exec_id] = data
            asyncio.get_running_loop().call_later(NOTE_S, self._note_running, job)
        if spec.stdin is not None and job.started_at is not None:
            body.spawn(self._feed(body, spec.exec_id, spec.stdin, not spec.stdin_open))

    def _note_running(self, job: Exec) -> None:
        """What a take-over uses better than its own guess; the journal knows the exec already, and one that is over needs it no more."""
        data = self._unnoted.pop(job.exec_id, None)
        if data is None or job.done.done():
            return
        more: dict[str, Any] = {"started_at": job.started_at, "before": dict(vars(job.meter.before))}
        if job.older is not None:
            more["older"] = sorted(job.older)
        if job.paused_s:
            more["paused_s"] = job.paused_s
        with contextlib.suppress(CorralError):
            self._journal.set_exec(job.exec_id, "running", {**data, **more})

    async def _feed(self, body: Body, exec_id: str, data: bytes, eof: bool) -> None:
        """All of a given input; the guest skips what an earlier node has sent already."""
        while True:
            try:
                await (await body.client()).stdin(exec_id, data, eof, fence=body.floor, offset=0)
                return
            except CorralError as error:
                if error.code != "guest_lost" or body.gone.is_set() or body.forsaken:
                    return

    def _frame(self, spec: ExecSpec, ids: tuple[int, int], body: Body) -> dict[str, Any]:
        limits = spec.limits
        # Between two looks at a disk that is watched one file must not outgrow it. Where the kernel holds the disk, a file may be as
        # large as it likes to be, such as one with holes.
        one_file = {} if body.modes.disk == "enforced" else {"fsize": body.limits.disk_bytes}
        return {
            "exec_id": spec.exec_id,
            "argv": list(spec.argv),
            "env": {**ENVIRONMENT, **spec.env},
            "cwd": spec.cwd,
            "uid": ids[0],
            "gid": ids[1],
            "stdin": "open" if spec.stdin is not None or spec.stdin_open else "eof",
            "pty": list(spec.pty) if spec.pty else None,
            "timeout_s": limits.wall_s + BACKUP_CLOCK_S,
            "grace_s": spec.grace_s,
            "rlimits": {"nofile": limits.open_files, "core": 0, **one_file},
            "background": spec.background,
        }

    def _exec(
        self,
        body: Body,
        exec_id: str,
        data: dict[str, Any],
        *,
        since_ticks: int | None = None,
        ended_by: str | None = None,
    ) -> Exec:
        limits = Limits(**data["limits"])
        spool = Spool(self._spool_path(exec_id), limits.output_kill_bytes)
        job = Exec(
            body,
            exec_id,
            limits,
            spool,
            fence=Fence.parse(data["fence"]),
            grace_s=data["grace_s"],
            background=data["background"],
            since_ticks=since_ticks if since_ticks is not None else data["since_ticks"],
            ended_by=ended_by,
            uid=data.get("uid"),
        )
        self._execs[exec_id] = job
        job.done.add_done_callback(lambda _: self._over(exec_id))
        return job

    def _over(self, exec_id: str) -> None:
        job = self._execs.pop(exec_id, None)
        if job is not None and job.spool.ended:
            self._spools[exec_id] = job.spool
            if len(self._spools) > RECENT_SPOOLS:
                del self._spools[next(iter(self._spools))]

    def _entry(self, exec_id: str) -> ExecEntry:
        entry = self._journal.get_exec(exec_id)
        if entry is None:
            raise CorralError("not_found", f"no exec {exec_id!r}")
        return entry

    async def wait_exec(self, exec_id: str) -> ExecFacts:
        job = self._execs.get(exec_id)
        if job is not None:
            return await asyncio.shield(job.done)
        entry = self._entry(exec_id)
        if entry.facts is None:
            raise CorralError("infra_error", f"exec {exec_id} has no outcome here")
        return exec_life.facts_from_json(entry.facts)

    def _job(self, exec_id: str) -> Exec:
        job = self._execs.get(exec_id)
        if job is None:
            self._entry(exec_id)
            raise CorralError("illegal_transition", f"exec {exec_id} has ended")
        return job

    def _fence_of(self, job: Exec, fence: Fence | None) -> Fence:
        if fence is not None:
            self._check_fence(job.body, fence)
        return fence or job.body.floor

    async def stdin_exec(
        self, exec_id: str, data: bytes, eof: bool, offset: int | None = None, *, fence: Fence | None = None
    ) -> bool:
        job = self._job(exec_id)
        under = self._fence_of(job, fence)
        client = await job.body.client()
        giving = asyncio.ensure_future(client.stdin(exec_id, data, eof, fence=under, offset=offset))
        try:
            # A guest need not say that the program reads no more; that it is over is known without it.
            either: set[asyncio.Future[Any]] = {giving, job.done}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return giving.result() if giving.done() else False
        finally:
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)

    async def signal_exec(self, exec_id: str, signal: int, *, fence: Fence | None = None) -> None:
        if not 1 <= signal <= 64:
            raise CorralError("invalid_value", f"not a signal: {signal}", field="/signal")
        job = self._job(exec_id)
        under = self._fence_of(job, fence)
        await (await job.body.client()).signal(exec_id, signal, fence=under)

    async def resize_exec(self, exec_id: str, rows: int, cols: int, *, fence: Fence | None = None) -> None:
        job = self._job(exec_id)
        under = self._fence_of(job, fence)
        await (await job.body.client()).resize(exec_id, rows, cols, fence=under)

    async def end_exec(self, exec_id: str, ended_by: str) -> None:
        job = self._execs.get(exec_id)
        if job is None:
            self._entry(exec_id)
            return
        await job.end(ended_by)

    # -- output --------------------------------------------------------------------------------------------------------
    def _spool(self, exec_id: str) -> tuple[Spool, ExecEntry]:
        entry = self._entry(exec_id)
        job = self._execs.get(exec_id)
        spool = job.spool if job is not None else self._spools.get(exec_id)
        return spool or Spool(self._spool_path(exec_id), 0, ended=True), entry

    async def stream_exec(self, exec_id: str, cursor: str | None = None) -> AsyncIterator[Chunk | Gap]:
        spool, _ = self._spool(exec_id)
        async for chunk in spool.follow(cursor):
            yield chunk

    async def kept_output(
        self, exec_id: str, stream: Literal["stdout", "stderr"], *, offset: int = 0
    ) -> AsyncIterator[bytes]:
        spool, entry = self._spool(exec_id)
        if entry.facts is not None:
            facts = StreamFacts(**entry.facts[stream])
        else:
            facts = spool.facts(int(entry.data["limits"]["output_bytes"]))[stream]
        async for piece in spool.kept(stream, facts, offset):
            yield piece

    async def raw_output(self, exec_id: str, stream: Literal["stdout", "stderr"]) -> AsyncIterator[bytes]:
        spool, _ = self._spool(exec_id)
        async for piece in spool.raw(stream):
            yield piece

    async def timeline(self, exec_id: str) -> list[dict[str, Any]]:
        spool = self._spools.get(exec_id) or self._spool(exec_id)[0]
        return spool.timeline()

    async def forget_exec(self, exec_id: str) -> None:
        if exec_id in self._execs:
            raise CorralError("illegal_transition", f"exec {exec_id} still runs")
        if self._journal.get_exec(exec_id) is not None:
            self._spools.pop(exec_id, None)
            await asyncio.to_thread(Spool(self._spool_path(exec_id), 0, ended=True).remove)
            self._journal.drop_exec(exec_id)
