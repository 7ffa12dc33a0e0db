"""One exec from the frame that starts it to its facts: pump, clock, kill, and what the host saw.

Order matters: the journal knows the exec before the frame is sent and knows why it is ended before the kill is. The guest's word is
taken for exit codes and bytes only; counters, disk, survivors and time are the host's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from typing import Any, cast

from corral.channel import Ended
from corral.channel.client import ExecStatus
from corral.domain.facts import EndedBy, ExecFacts, StartFailure, StreamFacts, Usage
from corral.domain.fence import Fence
from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.node.body import Body
from corral.node.spool import Spool
from corral.node.watch import Meter

CONFIRM_S = 1.5
"""How long the guest has, beyond the grace, to confirm a kill before the sandbox is ended from outside."""
PUMP_S = 1.0
WITNESS_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")
_INSTANT: frozenset[str] = frozenset(
    {"output_limit", "circuit_breaker"}
    | {"memory_watch", "pids_watch", "disk_watch", "inodes_watch", "memory_unseen", "disk_unseen"}
)


class Exec:
    """A started or adopted exec; `done` gets the facts, once. `pumped` is set when no more output will come."""

    def __init__(
        self,
        body: Body,
        exec_id: str,
        limits: Limits,
        spool: Spool,
        *,
        fence: Fence,
        grace_s: float,
        background: str,
        since_ticks: int | None = None,
        ended_by: str | None = None,
        uid: int | None = None,
    ) -> None:
        self.body = body
        self.exec_id = exec_id
        self.limits = limits
        self.fence = fence
        self.spool = spool
        self.done: asyncio.Future[ExecFacts] = asyncio.get_running_loop().create_future()
        self.pumped = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.ended_by: str | None = ended_by
        self.meter = Meter(body)
        self.since_ticks = now_ticks() if since_ticks is None else since_ticks
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.closing = False
        self.paused_s = 0.0
        """How long the sandbox was paused meanwhile: no part of its wall time."""
        self.sent = False
        """Whether the frame that starts it may have left."""
        self.accountable = True
        """Whether every process that began since this exec and is not in `older` must be its own."""
        self.older: frozenset[tuple[int, int]] | None = None
        """What earlier execs had left when this one began; None where that is not known any more."""
        self._uid = uid
        self._grace_s = grace_s
        self._background = background
        self._started: bool | None = None
        self._ending: asyncio.Task[None] | None = None
        self._killed_all = True
        self._timer: asyncio.TimerHandle | None = None
        self._left_s: float | None = None
        """What is left of its time, while its clock stands still."""

    # -- start ---------------------------------------------------------------------------------------------------------
    async def start(self, spec: dict[str, Any], fence: Fence) -> None:
        """Send the frame, at most once; returns when main runs or certainly does not. A refusal by the guest is raised."""
        self.body.check_free()
        self.body.execs[self.exec_id] = self
        try:
            await self.meter.begin(alone=len(self.body.execs) == 1)
            self.older = await self.body.members() if self.body.background else frozenset()
            status = await self._start(spec, fence)
        except BaseException as error:
            self.body.execs.pop(self.exec_id, None)
            self.spool.finish()
            self.pumped.set()
            if not self.done.done():
                # Somebody may wait for its end already.
                unknown = CorralError("infra_error", "the start was cut short; whether the program ran is not known")
                self.done.set_exception(error if isinstance(error, CorralError) else unknown)
                self.done.exception()
            raise
        self.follow(status)

    async def _start(self, spec: dict[str, Any], fence: Fence) -> ExecStatus | None:
        try:
            client = await self.body.client()
            self.body.check_free()  # it may have been paused since we began
            self.sent = True
            return await client.start_exec(spec, fence=fence, follow=True)
        except CorralError as error:
            if error.code not in ("guest_lost", "sandbox_lost"):
                raise
        # In doubt whether the frame arrived: ask, never send again.
        try:
            client = await self.body.client()
            return await client.exec_status(self.exec_id)
        except CorralError:
            return None

    def follow(self, status: ExecStatus | None, started_ago: float = 0.0) -> None:
        """Begin to look after an exec that the guest has (or has lost: None)."""
        self.body.execs[self.exec_id] = self
        now = time.monotonic()
        if status is not None and status["state"] in ("starting", "running", "ended", "lost"):
            self._started = True
            self.started_at = now - started_ago
            self._left_s = max(0.0, self.limits.wall_s - started_ago)
            if not self.body.paused:
                self._run_clock()
        self.meter.watch(self._limit_passed)
        self.task = asyncio.create_task(self._life(status), name=f"exec:{self.exec_id}")

    def assume_started(self) -> None:
        """It ran when the journal last heard of it; its guest cannot be asked now."""
        self._started = True

    def _run_clock(self) -> None:
        if self._left_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._left_s, lambda: self.body.spawn(self.end("timeout")))
            self._left_s = None

    def _limit_passed(self, reason: str) -> None:
        self.body.spawn(self.end(reason))

    # -- pause ---------------------------------------------------------------------------------------------------------
    @property
    def ending(self) -> bool:
        """Whether it is being killed right now."""
        return self._ending is not None and not self.done.done()

    def hold(self) -> None:
        """The sandbox is paused: the time of a program that cannot run does not pass. Idempotent."""
        if self._timer is not None:
            self._left_s = max(0.0, self._timer.when() - asyncio.get_running_loop().time())
            self._timer.cancel()
            self._timer = None

    def decide(self, reason: str) -> None:
        """It is to end, and will when it can; the first reason stays."""
        if self.ended_by is None and not self.done.done() and not self.pumped.is_set():
            self.ended_by = reason
            self.body.journal.ending(self.exec_id, reason)

    def go_on(self, paused_s: float) -> None:
        """The end of `hold`, after so many seconds."""
        self.paused_s += paused_s
        self._run_clock()
        self.end_decided()

    def end_decided(self) -> None:
        """Begin the kill that was decided while it could not be done. What it stands for is long over: there is no grace."""
        if self.ended_by is not None and self._ending is None and not self.pumped.is_set():
            self._grace_s = 0.0
            self._ending = self.body.spawn(self._kill())

    # -- life ----------------------------------------------------------------------------------------------------------
    async def _life(self, status: ExecStatus | None) -> None:
        infra: str | None = None
        final = status
        try:
            if status is not None and status["state"] not in ("failed", "unknown"):
                final = await self._pump()
        except asyncio.CancelledError:
            if self._ending is None or self.closing:
                raise
            final = None  # `_kill` cut the pump short
        except OSError as error:
            infra = f"the output could not be kept: {error.strerror}"
            final = None
            self.body.spawn(self.end("cancelled"))
        self.pumped.set()
        self.ended_at = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
        if self._ending is not None:
            await asyncio.shield(self._ending)
        elif not (self.body.gone.is_set() or self.body.destroying is not None) and not await self._believable(final):
            # No end was told, or what the guest calls over runs on: nothing of it may live behind a result that does not know.
            final = None
            self.body.forsaken = True
            self._killed_all = await self.body.kill()
        await self._finish(final, infra)

    async def _believable(self, status: ExecStatus | None) -> bool:
        """False when no end was told, or one by which nothing of this exec lives any more while the host sees that it does."""
        if status is None:
            return False
        over = status["state"] in ("failed", "unknown")
        over |= status["state"] == "ended" and self._background == "kill" and status["killed_all"]
        return not over or await self._witnessed()

    async def _pump(self) -> ExecStatus | None:
        """Bytes into the spool until the guest tells the end; None when the end was not told."""
        while True:
            try:
                client = await self.body.client()
                async for item in client.attach(
                    self.exec_id, {name: size for name, size in self.spool.produced.items()}
                ):
                    if isinstance(item, Ended):
                        return item.status
                    await self.spool.write(item.stream, item.offset, item.data, item.t_ms)
                    if self.spool.produced[item.stream] > self.limits.output_kill_bytes and self.ended_by is None:
                        self.body.spawn(self.end("output_limit"))
                raise CorralError("guest_lost", "the output ended without an end")
            except CorralError as error:
                if self.body.gone.is_set() or self.body.forsaken or self.body.destroying is not None:
                    return None
                if error.code == "cursor_gone":
                    return await self._await_end()
                if error.code != "guest_lost":
                    return None

    async def _await_end(self) -> ExecStatus | None:
        """Bytes that we counted but did not keep are gone at the guest too: only the end is of interest."""
        while not self.body.gone.is_set():
            try:
                status = await (await self.body.client()).exec_status(self.exec_id)
            except CorralError:
                return None
            if status["state"] not in ("starting", "running"):
                return status
            await asyncio.sleep(0.1)
        return None

    # -- end -----------------------------------------------------------------------------------------------------------
    async def end(self, reason: str) -> None:
        """Kill the tree; the first reason stays. Returns when the facts are there. While it is paused that is when it no longer is."""
        if not self.done.done() and not self.pumped.is_set():
            self.decide(reason)
            if self._ending is None and not self.body.paused:
                self._ending = self.body.spawn(self._kill())
        await asyncio.shield(self.done)

    async def _kill(self) -> None:
        grace = 0.0 if self.ended_by in _INSTANT else self._grace_s
        confirmed = False
        with contextlib.suppress(CorralError, TimeoutError):
            async with asyncio.timeout(grace + CONFIRM_S):
                client = await self.body.client()
                try:
                    confirmed = (await client.kill_exec(self.exec_id, grace, fence=self.body.floor))["killed_all"]
                except CorralError as error:
                    if error.code != "not_found":
                        raise
                    confirmed = True
        if confirmed:
            confirmed = await self._witnessed()
        if not confirmed:
            self._killed_all = await self.body.kill()
        if not await self._wait_pumped(PUMP_S) and self.task is not None:
            # It is dead and nothing more is said: a guest that holds the end back gets no more time.
            self.task.cancel()

    async def _wait_pumped(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.pumped.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _witnessed(self) -> bool:
        """The host's view after the guest confirmed. With several at work inside the host cannot tell whose a process is."""
        until = time.monotonic() + WITNESS_S
        pause = 0.001  # the supervisor is on its way out
        owner = self.body.uid_of_execs(self._uid)
        # Where execs have a user of their own, a process may be older than the exec that it was given to.
        since = 0 if owner is not None and self.older is not None else self.since_ticks
        while self._alone() and await self.body.survivors(since, self.older or frozenset(), owner):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.02)
        return True

    def _alone(self) -> bool:
        return self.accountable and len(self.body.execs) == 1 and not self.body.transfers

    # -- facts ---------------------------------------------------------------------------------------------------------
    async def _finish(self, status: ExecStatus | None, infra: str | None) -> None:
        if status is not None and status["background"]:
            self.body.background = True
            for other in self.body.execs.values():
                other.accountable = other.accountable and other is self
        measured = await self.meter.end()
        self.spool.finish()
        self.spool.drop_input()
        facts = self._facts(status, infra)
        streams = self.spool.facts(self.limits.output_bytes)
        facts = dataclasses.replace(
            facts,
            usage=measured.usage,
            disk_full=measured.disk_full,
            inodes_full=measured.inodes_full,
            tmp_full=measured.tmp_full,
            cpu_throttled=measured.cpu_throttled,
            stdout=streams["stdout"],
            stderr=streams["stderr"],
        )
        with contextlib.suppress(CorralError):
            self.body.journal.end_exec(self.exec_id, facts_to_json(facts))
        self.body.execs.pop(self.exec_id, None)
        if not self.done.done():
            self.done.set_result(facts)
        if self.body.is_quiet and not self.body.gone.is_set():
            self.body.take_base(self.meter.after)

    def _facts(self, status: ExecStatus | None, infra: str | None) -> ExecFacts:
        lost = self.body.gone.is_set() or self.body.forsaken or self.body.destroying is not None
        ended_by = self.ended_by
        running = None
        if self.started_at is not None and self.ended_at is not None:
            running = max(0, round((self.ended_at - self.started_at) * 1000))
        base = ExecFacts(
            started=self._started,
            ended_by=cast("EndedBy | None", ended_by),
            killed_all=self._killed_all,
            running_ms=running,
            infra=infra,
        )
        if status is None:
            return dataclasses.replace(base, sandbox_lost=lost, guest_lost=not lost or self.body.forsaken)
        state = status["state"]
        if state == "unknown":
            missing = None if ended_by else "the program was never started: the platform was interrupted before"
            return dataclasses.replace(base, started=False, infra=infra or missing, running_ms=None)
        if state == "failed":
            failure = status["failure"] or {"what": "platform", "errno": "EIO", "message": "no reason given"}
            what = failure["what"] if failure["what"] in ("argv", "cwd", "user") else "platform"
            return dataclasses.replace(
                base,
                started=False,
                running_ms=None,
                start_failure=StartFailure(cast("Any", what), failure["errno"], failure["message"]),
            )
        if state in ("starting", "running"):
            return dataclasses.replace(base, sandbox_lost=lost, guest_lost=not lost)
        if ended_by is None and status["ended_by"] is not None:
            # The guest acted for us while we were away: its backup clock, a fence, a kill whose reason died with us.
            by_guest = {"timeout": "timeout", "fence": "lease_lost", "kill": "cancelled", "deadline": "timeout"}
            ended_by = by_guest.get(status["ended_by"])
        return dataclasses.replace(
            base,
            started=status["started"] if status["started"] is not None else self._started,
            exit_code=status["exit_code"],
            signal=status["signal"],
            ended_by=cast("EndedBy | None", ended_by),
            guest_lost=state == "lost",
            sandbox_lost=lost and status["exit_code"] is None and status["signal"] is None,
            killed_all=self._killed_all and status["killed_all"],
            killed_children=status["killed"] if ended_by is None and self._background == "kill" else 0,
        )

    def let_go(self) -> None:
        """The node closes: the exec lives on, its spool stays."""
        if self._timer is not None:
            self._timer.cancel()
        if self._ending is not None:
            self._ending.cancel()
        self.meter.stop()
        self.spool.finish()
        if not self.done.done():
            self.done.set_exception(CorralError("shutting_down", "the node is closing; the program runs on"))
            self.done.exception()  # whoever waits sees it; nobody has to


def now_ticks() -> int:
    """Now in the unit of field 22 of /proc/PID/stat, a tick early."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS) - 1


def facts_to_json(facts: ExecFacts) -> dict[str, Any]:
    data = dict(vars(facts))
    for name in ("usage", "stdout", "stderr", "start_failure"):
        if data[name] is not None:
            data[name] = dict(vars(data[name]))
    return data


def facts_from_json(data: dict[str, Any]) -> ExecFacts:
    """Inverse of `facts_to_json`; members that this version does not know are dropped."""
    known = {field.name for field in dataclasses.fields(ExecFacts)}
    values = {name: value for name, value in data.items() if name in known}
    values["usage"] = Usage(**values.get("usage", {}))
    for stream in ("stdout", "stderr"):
        values[stream] = StreamFacts(**values.get(stream, {}))
    if values.get("start_failure"):
        values["start_failure"] = StartFailure(**values["start_failure"])
    return ExecFacts(**values)
