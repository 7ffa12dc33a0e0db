"""Pause and resume of an instance: nothing inside runs, its memory stays, and time that could not be used does not count.

The host freezes it where the runtime can; elsewhere the guest stops the tree below it (`RuntimeInfo.pause_by`). The journal's entry of the
instance says what is under way (`pause`: `stage`, `by`, `since`) before it is done. A node that opens finds it so: one that is `paused`
stays as it is, and whoever froze it is not missed; in the middle of either change all of it runs on, and is asked for again.

What is to end while it is paused is decided at once and done first when it runs again; the end of the whole sandbox waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Literal, cast

from corral import faults
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.node.body import Body
from corral.node.journal import Journal
from corral.node.probes import Probes
from corral.ports.runtime import SupportsPause

ENDS_S = 15.0
"""How long the ends of execs that are under way are waited for before a pause."""
THAW_S = 20.0
"""What a guest that was frozen may take until it answers again."""
By = Literal["host", "guest"]


class Pausing(ABC):
    """See the module docstring and `ports.node.Node.pause`; the rest of the node is told by the abstract methods."""

    _journal: Journal
    _probes: Probes

    @abstractmethod
    def _living(self, instance_id: str) -> Body:
        """The live instance, be it paused, or why there is none."""

    @abstractmethod
    def _check_fence(self, body: Body, fence: Fence) -> None:
        """`lease_lost` for a fence below the instance's floor."""

    async def pause(self, instance_id: str, fence: Fence) -> None:
        body = self._living(instance_id)
        self._check_fence(body, fence)
        await _whole(body, self._pause(body, fence))

    async def resume(self, instance_id: str, fence: Fence) -> None:
        body = self._living(instance_id)
        self._check_fence(body, fence)
        await _whole(body, self._resume(body, fence))

    # -- pause ---------------------------------------------------------------------------------------------------------
    async def _pause(self, body: Body, fence: Fence) -> None:
        async with body.turning:
            _must_live(body)
            if body.paused:
                return
            body.check_free()
            by = await self._way(body)
            body.stand_still()  # from here on nothing begins
            try:
                ends = {asyncio.shield(one.done) for one in body.execs.values() if one.ending}
                if ends and (await asyncio.wait(ends, timeout=ENDS_S))[1]:
                    raise CorralError("conflict", "a program is being ended; its end comes first")
                _must_live(body)
                self._note_pause(body, {"stage": "pausing", "by": by, "since": time.monotonic()})
                faults.point("node.pause.journalled")
                await self._stop(body, fence, by)
                faults.point("node.pause.stopped")
                _must_live(body)
                self._note_stage(body, "paused")
            except BaseException:
                with contextlib.suppress(CorralError, OSError, TimeoutError):
                    await self._let_run(body, fence)
                raise

    async def _way(self, body: Body) -> By:
        info = await self._probes.one(body.ref.runtime)
        if not info.capabilities.get("pause", False):
            raise CorralError("not_supported_yet", f"{info.name} cannot pause here", hint="see corral doctor")
        return info.pause_by

    async def _stop(self, body: Body, fence: Fence, by: By) -> None:
        client = await body.client()
        if not (await client.pause(fence, stop=by == "guest")).get("whole"):
            raise CorralError("infra_error", "not every program inside stops", hint="try again in a moment")
        if by == "host":
            body.hold_line()
            await cast("SupportsPause", body.runtime).pause(body.ref)

    # -- resume --------------------------------------------------------------------------------------------------------
    async def _resume(self, body: Body, fence: Fence) -> None:
        async with body.turning:
            _must_live(body)
            if not body.paused:
                if fence > body.floor:
                    self._journal.set_instance(body.instance_id, floor=fence)
                    await (await body.client()).fence(fence, "adopt")
                return
            self._journal.set_instance(body.instance_id, floor=fence)
            self._note_stage(body, "resuming")
            faults.point("node.resume.journalled")
            await self._let_run(body, fence)
            faults.point("node.resume.done")

    async def _let_run(self, body: Body, fence: Fence) -> None:
        """The end of a pause, at whatever stage it was. What was decided to end goes first."""
        pause = self._pause_of(body)
        if pause is not None and pause["by"] == "host":
            await cast("SupportsPause", body.runtime).resume(body.ref)
        body.release_line()
        paused_s = 0.0
        if pause is not None:
            async with asyncio.timeout(THAW_S):
                client = await body.client()
                await client.fence(max(fence, body.floor), "adopt")
                await self._end_decided(body)
                _must_live(body)
                client = await body.client()
                left = self._journal.instances[body.instance_id].data["deadline_at"] - time.monotonic()
                await client.resume(body.floor)
                await client.extend_deadline(max(0.0, left), fence=body.floor)
            paused_s = self._stands_s(body)
        body.go_on(paused_s)
        for job in body.execs.values():
            self._note_paused(job.exec_id, job.paused_s)
        self._note_pause(body, None)

    async def _end_decided(self, body: Body) -> None:
        ends = []
        for job in list(body.execs.values()):
            job.end_decided()
            if job.ending:
                ends.append(asyncio.shield(job.done))
        if ends:
            await asyncio.wait(ends)

    # -- journal -------------------------------------------------------------------------------------------------------
    def _pause_of(self, body: Body) -> dict[str, Any] | None:
        entry = self._journal.instances.get(body.instance_id)
        return None if entry is None else cast("dict[str, Any] | None", entry.data.get("pause"))

    def _note_pause(self, body: Body, pause: dict[str, Any] | None) -> None:
        entry = self._journal.instances.get(body.instance_id)
        if entry is None or (pause is None and "pause" not in entry.data):
            return
        data = {name: value for name, value in entry.data.items() if name != "pause"}
        if pause is not None:
            data["pause"] = pause
        self._journal.put_instance(dataclasses.replace(entry, data=data))

    def _note_stage(self, body: Body, stage: str) -> None:
        if (pause := self._pause_of(body)) is not None:
            self._note_pause(body, {**pause, "stage": stage})

    def _note_paused(self, exec_id: str, paused_s: float) -> None:
        """For the node that comes after this one: so much of the time since its start does not count."""
        entry = self._journal.get_exec(exec_id)
        if entry is not None and entry.facts is None:
            self._journal.set_exec(exec_id, entry.state, {**entry.data, "paused_s": paused_s})

    # -- taking over ---------------------------------------------------------------------------------------------------
    async def _find_pause(self, body: Body) -> bool:
        """Bring a body that was just attached to what the journal says of its pause; -> whether its guest is frozen.

        One that was in the middle of a change runs again; its guest is told by `_settle_pause`, once there is a line to it.
        """
        pause = self._pause_of(body)
        if pause is None:
            return False
        body.stand_still()
        if pause["by"] != "host":
            return False
        if pause["stage"] == "paused":
            body.hold_line()
            return True
        await cast("SupportsPause", body.runtime).resume(body.ref)
        return False

    def _stands_s(self, body: Body) -> float:
        """How long the pause of now has lasted."""
        pause = self._pause_of(body)
        return 0.0 if pause is None else max(0.0, time.monotonic() - pause["since"])

    async def _settle_pause(self, body: Body) -> None:
        """After `_find_pause`, with the guest connected and its execs followed."""
        pause = self._pause_of(body)
        if pause is not None and pause["stage"] != "paused":
            await self._let_run(body, body.floor)


def _must_live(body: Body) -> None:
    if body.destroying is not None:
        raise CorralError("sandbox_deleted", f"instance {body.instance_id} is being destroyed")
    if body.gone.is_set() or body.forsaken:
        raise CorralError("sandbox_lost", f"instance {body.instance_id} has ended")


async def _whole(body: Body, work: Coroutine[Any, Any, None]) -> None:
    """A task of its own: half of it done because the caller gave up would be neither."""
    task = body.spawn(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        us = asyncio.current_task()
        if not task.cancelled() or (us is not None and us.cancelling()):
            raise
        # The body was let go in the middle of it: it is being destroyed, or the node closes.
        _must_live(body)
        raise CorralError("shutting_down", "the node is closing") from None
