"""Calls about runs: they are submitted, shown, followed and cancelled here; `services.driving` brings them to their results."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, Literal

from corral.domain.facts import StreamFacts
from corral.domain.records import AuditRecord, Idempotency, RunRecord
from corral.domain.request import RunRequest, parse_run
from corral.domain.run import OPEN
from corral.errors import CorralError
from corral.ports.node import Node
from corral.services import placing
from corral.services.driving import Driving
from corral.services.events import Caller, StreamEvent
from corral.services.execs import artifact_named, file_blocks
from corral.services.output import NAMES, kept_document, nothing_shown

Json = dict[str, Any]
ENDED_BYTES = 64 * 1024


class Executor(Driving):
    """Submits, drives, cancels and shows runs."""

    async def submit(
        self, caller: Caller, document: Json, idempotency: Idempotency | None, wait_s: float = 0.0
    ) -> RunRecord:
        """Step 1, then `wait`. A request that cannot be honoured raises and makes no run; the same key joins the first call."""
        core = self._core
        core.check_open()
        request = parse_run(document, core.host, core.names)
        self._languages.runner(request.language)
        ticket = self.queue.ticket(request)
        await placing.choose(core, request.placement, core.policy.needs(request.placement.isolation))
        run = RunRecord(
            run_id=core.id("run"),
            tenant_id=caller.tenant_id,
            owner=caller.owner,
            user_id=caller.user_id,
            state="requested",
            request=self.queue.stored(document),
            created_at=core.store_ms(),  # compared with `regressed_ms`, whichever process that is of
            attached=request.attached,
            driver=core.worker,
        )
        audit = AuditRecord(caller.tenant_id, caller.actor, "run.submitted", run.run_id, _summary(request))
        try:
            run, made = await core.store.submit_run(run, audit, idempotency, ticket)
        except CorralError as error:
            if error.code == "store_error":
                core.store_failed(error)
            raise
        if made or (run.state != "finished" and core.driver in (None, run.driver)):
            self.drive(run)
        return await self.wait(caller, run.run_id, wait_s, run if made else None)

    async def get(self, caller: Caller, run_id: str) -> RunRecord:
        """The run; a foreign or unknown id is `not_found`."""
        run = await self._core.store.get_run(run_id, caller.tenant_id)
        if run is None:
            raise CorralError("not_found", f"there is no run {run_id[:64]}", hint="corral runs lists them")
        return run

    async def wait(self, caller: Caller, run_id: str, seconds: float, known: RunRecord | None = None) -> RunRecord:
        """The run when it is finished, or as it is after `seconds`. The caller counts as an attached client meanwhile.

        `known`: its row, if nothing can have happened since it was committed.
        """
        run = known or await self.get(caller, run_id)
        if run.state == "finished" or seconds <= 0:
            return run
        until = asyncio.get_running_loop().time() + seconds
        with self._core.watchers.watching(run_id), self._core.wakes.listen(run_id) as woken:
            while True:
                run = known or woken.look() or await self.get(caller, run_id)
                known = None
                left = until - asyncio.get_running_loop().time()
                if run.state == "finished" or left <= 0 or self._core.leaving:
                    return run
                self._core.check_open()
                await woken.wait(left)

    async def page(self, caller: Caller, *, after: str | None, limit: int) -> tuple[list[RunRecord], str | None]:
        """Newest first, and the id to go on after."""
        runs = await self._core.store.list_runs(caller.tenant_id, after=after, limit=limit + 1)
        return runs[:limit], runs[limit - 1].run_id if len(runs) > limit else None

    async def cancel(self, caller: Caller, run_id: str, why: str) -> None:
        """Ask the run to end, in whatever state; does nothing to one that has finished."""
        core = self._core
        run = await self.get(caller, run_id)
        if run.state == "finished":
            return
        audit = AuditRecord(run.tenant_id, caller.actor, "run.cancel", run_id, {"why": why})
        if run.cancel_requested is None:
            try:
                changes = {"cancel_requested": why}
                run = await core.store.update_run(run_id, expect_states=OPEN, changes=changes, audit=audit)
            except CorralError as error:
                if error.code != "conflict":
                    raise
                return
        if (flight := self._flights.get(run_id)) is not None:
            flight.cancel.set()
        elif core.wakes.others is not None:
            core.wakes.others((run_id,))
        for record in await self._rows(run):
            if record.state in ("starting", "running"):
                await self._ask_end(record, why)

    async def stream(self, caller: Caller, run_id: str, cursor: str | None) -> AsyncIterator[StreamEvent]:
        """`started`, output from the node's cursor on, `ended` with the run's document minus output."""
        core = self._core
        with core.watchers.watching(run_id):
            run = await self._until(caller, run_id, lambda r: r.exec_id is not None or r.state == "finished")
            if run.exec_id is not None:
                if cursor is None and (await self._execs.begun(run.exec_id)).state != "never_started":
                    yield StreamEvent("started", None, doc={"run_id": run_id, "exec_id": run.exec_id})
                async for event in self._execs.stream(run.exec_id, cursor):
                    yield event
            run = await self._until(caller, run_id, lambda r: r.state == "finished")
            yield StreamEvent(
                "ended",
                None,
                doc=await ended_document(core.node, run.exec_id, run.result or {}, {"id": run_id, "state": run.state}),
            )

    async def _until(self, caller: Caller, run_id: str, good: Any) -> RunRecord:
        with self._core.wakes.listen(run_id) as woken:
            while True:
                run = woken.look() or await self.get(caller, run_id)
                if good(run):
                    return run
                self._core.check_open()
                await woken.wait()

    async def logs(
        self, caller: Caller, run_id: str, stream: Literal["stdout", "stderr"], *, follow: bool
    ) -> AsyncIterator[bytes]:
        """Everything that the program wrote to a stream, raw."""
        run = await self.get(caller, run_id)
        if run.exec_id is None and follow:
            run = await self._until(caller, run_id, lambda r: r.exec_id is not None or r.state == "finished")
        if run.exec_id is None:
            return _nothing()
        return self._execs.raw(run.exec_id, stream, follow and run.state != "finished")

    async def artifact(self, caller: Caller, run_id: str, path: str) -> tuple[int, AsyncIterator[bytes]]:
        """(size, blocks) of an artifact that the result names; nothing else is ever opened."""
        run = await self.get(caller, run_id)
        if (inner := artifact_named(run.result, path)) is not None:
            return await file_blocks(os.path.join(self._core.artifacts, run_id, inner))
        raise CorralError("not_found", f"the run has no artifact {path[:200]!r}")

    async def deserted(self, run: RunRecord) -> bool:
        """Whether no other worker has a client of this attached run either, and this one still drives it."""
        core = self._core
        if core.driver is None:
            return True
        row = await core.store.get_run(run.run_id, run.tenant_id)
        return row is not None and row.driver == core.worker and row.watched_until <= core.store_ms()

    def alone(self) -> list[RunRecord]:
        """Attached runs for which nobody waits at this moment."""
        return [r for r in self.in_flight if r.attached and self._core.watchers.alone_s(r.run_id) > 0]

    async def abandon(self, runs: list[RunRecord]) -> None:
        """At a stop: attached runs whose client was this very process are cancelled; the others go to the next owner."""
        tasks = {f.task for r in runs if (f := self._flights.get(r.run_id)) is not None and f.task is not None}
        for run in runs:
            try:
                await self.cancel(Caller(run.tenant_id, run.owner), run.run_id, "client_gone")
            except CorralError as error:
                self._core.log(f"{run.run_id}: {error}")
        if tasks:
            await asyncio.wait(tasks, timeout=self._core.delays["drain_s"])


async def ended_document(node: Node, exec_id: str | None, result: Json, around: Json) -> Json:
    """The document of an `ended` event: the result, with the text of a stream that kept little; of one that kept much it is null,
    since the events have carried it already."""
    shown = dict(result)
    for name in NAMES:
        facts = StreamFacts(**(shown.get(name) or {}))
        shown[name] = nothing_shown(facts)
        if facts.kept <= ENDED_BYTES:
            try:
                shown[name] = await kept_document(node, exec_id, name, facts)
            except CorralError:
                pass  # what is not there any more is null, as what is too much
    return {**around, "result": shown}


async def _nothing() -> AsyncIterator[bytes]:
    yield b""


def _summary(request: RunRequest) -> Json:
    """What the audit says of a request: its shape and sizes, no content."""
    kind = "code" if request.code is not None else "command" if request.command is not None else "shell"
    return {
        "kind": kind,
        "language": request.language,
        "files": len(request.files),
        "keep": request.keep,
        "attached": request.attached,
    }
