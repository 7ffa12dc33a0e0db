"""One exec from its committed row to its stored result: start at most once, wait, judge, collect. Used by runs and by kept sandboxes.

`supervise` may be called again for the same row after a restart: the node and the guest deduplicate by `exec_id`, so a row that is
`starting` is sent again (unknown = it never started), and one that is `running` is waited for.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from corral import faults
from corral.domain.facts import EndedBy, ExecFacts
from corral.domain.fence import Fence
from corral.domain.limits import LimitModes, Limits
from corral.domain.records import ExecRecord, SandboxView
from corral.domain.result import Verdict, judge, result_document
from corral.errors import CorralError
from corral.ports.node import Chunk, Collected, ExecSpec, Gap
from corral.services.control import Core
from corral.services.documents import stored_stream
from corral.services.events import StreamEvent

Json = dict[str, Any]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ARTIFACT_BYTES = 100 * 1024 * 1024
NOTE_S = 0.025
"""An exec that is over sooner is not written down as running first, unless somebody waits for its output."""
PAUSED_LOOK_S = 0.5
"""How often an exec that is to begin in a paused sandbox looks whether it can, beside being woken."""
BLOCK = 256 * 1024
_ENDED: dict[str, EndedBy] = {
    "cancelled": "cancelled",
    "client_gone": "cancelled",
    "sandbox_deleted": "sandbox_deleted",
    "ttl": "sandbox_deleted",
    "lease_lost": "lease_lost",
}
"""Why a cancellation was asked for -> what the result says."""


def environment(user: str, *more: Mapping[str, str]) -> dict[str, str]:
    """The clean environment of every exec (A4), then `more` on top."""
    env = {
        "PATH": PATH,
        "HOME": "/root" if user == "root" else "/home/sandbox",
        "USER": user,
        "LOGNAME": user,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TMPDIR": "/tmp",  # noqa: S108 - inside the sandbox
        "PYTHONUNBUFFERED": "1",
    }
    for each in more:
        env.update(each)
    return env


class Stopwatch:
    """Milliseconds per phase; one phase is open at a time."""

    def __init__(self, phase: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._first = self._since = self._loop.time()
        self._phase = phase
        self.spent: dict[str, float] = {}

    def switch(self, phase: str) -> None:
        """Close the open phase and begin another; a phase may be entered again."""
        now = self._loop.time()
        self.spent[self._phase] = self.spent.get(self._phase, 0.0) + (now - self._since) * 1000
        self._since, self._phase = now, phase

    def prepared(self) -> None:
        """What has run up to now was no program yet: it counts as preparing."""
        self.switch("preparing")
        for phase in ("running", "collecting"):
            self.spent["preparing"] += self.spent.pop(phase, 0.0)

    def timings(self) -> dict[str, float | None]:
        """`queued_ms` … `total_ms`; phases that were never entered are 0."""
        self.switch(self._phase)
        names = ("queued", "planning", "acquiring", "preparing", "running", "collecting")
        spent: dict[str, float | None] = {f"{name}_ms": self.spent.get(name, 0.0) for name in names}
        spent["total_ms"] = (self._since - self._first) * 1000
        return spent


@dataclass
class Outcome:
    """An exec that has ended."""

    facts: ExecFacts
    verdict: Verdict
    collected: Collected | None
    timeline: list[Json]
    started_at: int | None = None
    """When this process saw it started; None: it did not, or the row says."""

    def document(
        self,
        limits: Limits,
        modes: LimitModes,
        timings: Mapping[str, float | None],
        url: str,
        hint: str | None = None,
        *,
        phase: str | None = "run",
        build: Json | None = None,
    ) -> Json:
        """The result as stored. `url` is the prefix of artifacts; `hint` replaces the verdict's; `build` came before."""
        verdict = self.verdict if hint is None else replace(self.verdict, hint=hint)
        if self.collected is not None and not self.collected.complete:
            more = "not all files could be read, so the list of changes is not complete, and outputs may be missing"
            verdict = replace(verdict, hint=f"{verdict.hint}; {more}" if verdict.hint else more)
        if self.collected is not None and self.collected.skipped:
            more = f"{len(self.collected.skipped)} outputs were over the limit of artifacts and not kept"
            verdict = replace(verdict, hint=f"{verdict.hint}; {more}" if verdict.hint else more)
        known = dict(timings)
        if self.facts.running_ms is not None:
            # The timeline counts from the start as seen inside, which the host hears of a moment later: that moment ran already.
            last = max((float(entry["t_ms"]) for entry in self.timeline), default=0.0)
            early_ms = max(0.0, last - self.facts.running_ms)
            known["running_ms"] = self.facts.running_ms + early_ms
            known["preparing_ms"] = max(0.0, (known.get("preparing_ms") or 0.0) - early_ms)
        found = self.collected
        return result_document(
            verdict,
            self.facts,
            stdout=stored_stream(self.facts.stdout),
            stderr=stored_stream(self.facts.stderr),
            timeline=self.timeline,
            files=[asdict(change) for change in found.files] if found else (),
            files_truncated=found.files_truncated if found else False,
            artifacts=[{**a, "url": url + _quoted(str(a["path"]))} for a in found.artifacts] if found else (),
            limits=limits,
            modes=modes,
            timings=known,
            phase=phase,
            build=build,
        )


class _End:
    """An exec that this process looks after: whether its row has got a `cancel_requested`, and a bell for news."""

    def __init__(self, record: ExecRecord) -> None:
        self.sandbox_id = record.sandbox_id
        self.asked = record.cancel_requested
        self.bell = asyncio.Event()
        self.started_at: int | None = None
        self.followed = False
        """Whether somebody waits for its output."""
        self.note: Callable[[], None] = lambda: None
        """Write down now that it runs, if that is still to be done."""

    @property
    def why(self) -> EndedBy | None:
        """What the result will say; None = nobody wants its end."""
        # `sandbox_lost` is what happened to it, nothing that we would have to bring about.
        return None if self.asked is None or self.asked == "sandbox_lost" else _ENDED.get(self.asked, "cancelled")


class Execs:
    """Supervises execs; the callers own rows, leases and transitions."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ends: dict[str, _End] = {}
        self._of: dict[str, set[str]] = {}
        """sandbox_id -> those of its execs."""

    def expect(self, record: ExecRecord) -> None:
        """Its row is committed (or was read by a take-over): from now on every request of its end is heard, until `forget`."""
        self._expected(record)

    def _expected(self, record: ExecRecord) -> _End:
        self._of.setdefault(record.sandbox_id, set()).add(record.exec_id)
        return self._ends.setdefault(record.exec_id, _End(record))

    def forget(self, exec_id: str) -> None:
        """It has ended, or this process stops to look after it."""
        end = self._ends.pop(exec_id, None)
        if end is not None:
            left = self._of[end.sandbox_id]
            left.discard(exec_id)
            if not left:
                del self._of[end.sandbox_id]

    def request_end(self, exec_id: str, why: str) -> None:
        """The row's `cancel_requested` has been committed as `why`."""
        if (end := self._ends.get(exec_id)) is not None:
            end.asked = why
            end.bell.set()

    def heard(self, exec_id: str, why: str) -> None:
        """`request_end` of what was committed elsewhere; it may be told again and again."""
        if (end := self._ends.get(exec_id)) is not None and end.asked is None:
            self.request_end(exec_id, why)

    def concerns(self, key: str) -> bool:
        """Whether `key` is an exec that this process looks after, or a sandbox of one."""
        return key in self._ends or key in self._of

    def request_ends(self, sandbox_id: str, why: str) -> None:
        """A transition has been committed that gave `why` to every open exec of the sandbox; an earlier reason stays."""
        for exec_id in self._of.get(sandbox_id, ()):
            self.request_end(exec_id, self._ends[exec_id].asked or why)

    async def supervise(
        self,
        record: ExecRecord,
        instance_id: str,
        spec: ExecSpec,
        modes: LimitModes,
        *,
        outputs: tuple[str, ...] | None,
        into: str,
        watch: Stopwatch,
        mark: bool = False,
        ended: Callable[[Verdict], Awaitable[None]] | None = None,
        new: bool = False,
    ) -> Outcome:
        """Start (or find) the exec, wait for its end, take its files; -> what happened. Writes the row's states, not its result.

        `new`: this process made the row, so nobody has sent it yet. `outputs` None = do not look at files; `mark`: what is found is
        the base of the next exec's changes. `ended` is awaited between the end and the files. Never raises for what happens to the
        exec, nor for a fault of ours: the exec is then ended, and its outcome is `infra_error`. Only `shutting_down` and `superseded`
        get through: somebody else looks after it.
        """
        try:
            return await self._supervise(record, instance_id, spec, modes, outputs, into, watch, mark, ended, new)
        except Exception as error:
            if isinstance(error, CorralError) and error.code in ("shutting_down", "superseded"):
                raise
            self._core.log(f"{record.exec_id}: {traceback.format_exc()}")
            killed = True
            try:
                await self._core.node.end_exec(record.exec_id, "cancelled")
            except CorralError as refused:
                killed = refused.code == "not_found"  # else its sandbox goes
            why = f"an unexpected {type(error).__name__} in the service"
            facts = ExecFacts(None, infra=why, killed_all=killed)
            return Outcome(facts, judge(facts, spec.limits, modes, spec.cwd), None, [])

    async def _supervise(
        self,
        record: ExecRecord,
        instance_id: str,
        spec: ExecSpec,
        modes: LimitModes,
        outputs: tuple[str, ...] | None,
        into: str,
        watch: Stopwatch,
        mark: bool,
        ended: Callable[[Verdict], Awaitable[None]] | None,
        new: bool,
    ) -> Outcome:
        end = self._expected(record)
        try:
            facts = await self._attempt(record, instance_id, spec, end, watch, new)
            if record.state == "starting" and _interrupted(facts):
                # An earlier owner stopped between its journal and the guest's answer. Sending the same `exec_id` again is
                # safe whatever happened: a guest that knows it answers with what became of it and starts nothing.
                await self._core.node.forget_exec(record.exec_id)
                facts = await self._attempt(record, instance_id, spec, end, watch)
            facts = await self._core.endure(lambda: self._because(record.exec_id, facts))
            if facts.infra is not None:
                facts = replace(facts, infra=self._core.discretion.text(facts.infra))
        finally:
            self.forget(record.exec_id)
        watch.switch("collecting")
        verdict = judge(facts, spec.limits, modes, spec.cwd)
        if ended is not None:
            await ended(verdict)
        collected = None
        timeline: list[Json] = []
        if verdict.started is not False:
            timeline = await self._timeline(record.exec_id)
            if outputs is not None and not facts.sandbox_lost and verdict.reason != "sandbox_deleted":
                collected = await self._collect(instance_id, outputs, into, mark)
        return Outcome(facts, verdict, collected, timeline, end.started_at)

    async def _attempt(
        self, record: ExecRecord, instance_id: str, spec: ExecSpec, end: _End, watch: Stopwatch, new: bool = False
    ) -> ExecFacts:
        facts = await self._start(record, instance_id, spec, end, new)
        if facts is not None:
            return facts
        watch.switch("running")
        if record.state != "starting":
            self._core.wakes.ring(record.exec_id)
            return await self._wait(record, end)
        end.started_at = self._core.now_ms()
        # Beside the program, as nothing waits for it but those who stream. The row's end comes after it, or without it.
        notes: list[asyncio.Task[None]] = []

        def note() -> None:
            if not notes:
                notes.append(self._core.spawn(self._note_running(record.exec_id, end), record.exec_id))

        timer = asyncio.get_running_loop().call_later(0.0 if end.followed else NOTE_S, note)
        end.note = note
        try:
            return await self._wait(record, end)
        finally:
            timer.cancel()
            end.note = lambda: None
            for noted in notes:
                await noted

    async def _start(
        self, record: ExecRecord, instance_id: str, spec: ExecSpec, end: _End, new: bool
    ) -> ExecFacts | None:
        """None = it runs (or the node knows how it ended); else why it does not."""
        fence = Fence(record.incarnation, record.lease_version)
        if record.state == "running":
            return None
        if end.why is not None:
            sent = False if new else await self._sent(record.exec_id, instance_id)
            return None if sent else ExecFacts(sent, ended_by=end.why)
        self._core.check_open()  # a start that a stop would cut short is left to the next owner
        try:
            faults.point("exec.start.before")
            # Never cut short by a stop of ours: the frame may have arrived, and then the node has to know the exec.
            sending = self._core.spawn(self._send(record.sandbox_id, instance_id, fence, spec, end), "start", last=True)
            if (why := await asyncio.shield(sending)) is not None:
                return ExecFacts(False, ended_by=why)
            faults.point("exec.start.after")
        except CorralError as error:
            if error.code == "shutting_down":
                raise
            return _not_started(error)
        return None

    async def _sent(self, exec_id: str, instance_id: str) -> bool | None:
        """Whether an earlier owner sent it, though its row says `starting`; None: what could know it is gone."""
        node = self._core.node
        try:
            await self._core.reach(lambda: node.timeline(exec_id))
            return True
        except CorralError as error:
            if error.code != "not_found":
                raise
        return False if instance_id in await self._core.reach(node.instances) else None

    async def _send(self, sandbox_id: str, instance_id: str, fence: Fence, spec: ExecSpec, end: _End) -> EndedBy | None:
        """None: it runs. One whose sandbox was paused before it began begins when that is resumed, unless it is to end by then."""
        node = self._core.node
        while True:
            try:
                await self._core.reach(lambda: node.start_exec(instance_id, fence, spec))
                return None
            except CorralError as error:
                if error.code != "sandbox_paused":
                    raise
            self._core.check_open()
            if end.why is not None:
                return end.why
            with self._core.wakes.listen(sandbox_id) as woken:
                await woken.wait(PAUSED_LOOK_S)

    async def _note_running(self, exec_id: str, end: _End) -> None:
        row, store = None, self._core.store
        changes = {"state": "running", "started_at": end.started_at}
        try:
            row = await self._core.endure(
                lambda: store.update_exec(exec_id, expect_states=("starting",), changes=changes)
            )
        except CorralError as error:
            if error.code != "conflict":
                raise
        self._core.wakes.ring(exec_id, row)

    async def _wait(self, record: ExecRecord, end: _End) -> ExecFacts:
        core = self._core
        waiting = asyncio.ensure_future(core.reach(lambda: core.node.wait_exec(record.exec_id)))
        waiting.add_done_callback(lambda _: end.bell.set())
        try:
            while not waiting.done():
                end.bell.clear()
                if (why := end.why) is not None:
                    if why == "sandbox_deleted":  # its instance is being destroyed, which ends it: do not fight over it
                        await asyncio.wait({waiting}, timeout=30.0)
                    if not waiting.done():
                        await core.reach(partial(core.node.end_exec, record.exec_id, why))
                    return await waiting
                await end.bell.wait()
            return waiting.result()
        except CorralError as error:
            if error.code == "shutting_down":
                raise
            # A row of an older copy may say less than has happened: it is not sent again, and whether it was is not known.
            sent = record.state == "starting" or record.started_at is not None
            return _ended_unseen(error, True if sent else None)
        finally:
            waiting.cancel()

    async def _because(self, exec_id: str, facts: ExecFacts) -> ExecFacts:
        """What an exec met because its sandbox was ending is told by why the sandbox ends: deleted by us, or lost."""
        met = (facts.sandbox_lost or facts.guest_lost) and facts.ended_by is None
        if not (met or facts.ended_by == "lease_lost") or facts.exit_code is not None or facts.signal is not None:
            return facts
        row = await self._core.store.get_exec(exec_id, None)
        if row is None:
            return facts
        if (why := _End(row).why) is not None:
            return replace(facts, ended_by=why)
        view = await self._core.store.get_sandbox(row.sandbox_id, None)
        if view is None or view.sandbox.state not in ("sanitizing", "terminated", "lost"):
            return facts
        lost = view.sandbox.state == "lost" or "sandbox_lost" in (row.cancel_requested, view.sandbox.failure)
        return replace(facts, ended_by=None, sandbox_lost=True) if lost else replace(facts, ended_by="sandbox_deleted")

    async def _timeline(self, exec_id: str) -> list[Json]:
        try:
            return await self._core.node.timeline(exec_id)
        except CorralError:
            return []

    async def _collect(self, instance_id: str, outputs: tuple[str, ...], into: str, mark: bool) -> Collected | None:
        try:
            if outputs:
                os.makedirs(into, mode=0o700, exist_ok=True)
            return await self._core.node.collect(
                instance_id, outputs=outputs, max_bytes=ARTIFACT_BYTES, into=into if outputs else None, mark=mark
            )
        except (CorralError, OSError) as error:
            self._core.log(f"collect {instance_id}: {error}")
            return Collected((), False, (), (), False)
        finally:
            if outputs:
                try:
                    os.rmdir(into)  # nothing matched: leave no directory behind
                except OSError:
                    pass

    # -- output ----------------------------------------------------------------------------------------------------------------
    async def begun(self, exec_id: str) -> ExecRecord:
        """The exec's row once the exec is more than `starting`: from then on the node can stream it."""
        core = self._core
        with core.wakes.listen(exec_id) as woken:
            if (end := self._ends.get(exec_id)) is not None:
                end.followed = True
                end.note()
            while True:
                row = woken.look() or await core.store.get_exec(exec_id, None)
                if row is None:
                    raise CorralError("not_found", f"there is no exec {exec_id}")
                if row.state != "starting":
                    return row
                core.check_open()
                await woken.wait()

    async def stream(self, exec_id: str, cursor: str | None) -> AsyncIterator[StreamEvent]:
        """Output from the node's cursor to the end of the exec, without `started` and `ended`; waits for its start."""
        row = await self.begun(exec_id)
        if row.state == "never_started":
            return
        source = self._core.node.stream_exec(exec_id, cursor)
        try:
            async for item in source:
                match item:
                    case Chunk():
                        yield StreamEvent(item.stream, item.cursor, item.offset, item.data)
                    case Gap():
                        lost = {"stream": item.stream, "offset": item.offset, "bytes": item.bytes}
                        yield StreamEvent("gap", None, item.offset, b"", lost)
        except CorralError as error:
            if error.code not in ("not_found", "cursor_gone") or "bytes" in error.facts:
                raise
            result = row.result or {}
            missing = {name: int((result.get(name) or {}).get("produced", 0)) for name in ("stdout", "stderr")}
            if cursor is not None and any(missing.values()):
                hint = "begin again without a cursor: gaps then say what is gone"
                detail = "the output is no longer kept"
                raise CorralError("cursor_gone", detail, hint=hint, bytes=sum(missing.values())) from error
            for name, size in missing.items():  # the spool is gone: say how much there was
                if size:
                    yield StreamEvent("gap", None, 0, b"", {"stream": name, "offset": 0, "bytes": size})
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()

    async def raw(self, exec_id: str, stream: Literal["stdout", "stderr"], follow: bool) -> AsyncIterator[bytes]:
        """Everything spooled; with `follow`, to the end of the exec."""
        if not follow:
            async for block in self._core.node.raw_output(exec_id, stream):
                yield block
            return
        async for event in self.stream(exec_id, None):
            if event.kind == stream:
                yield event.data


def instance_of(view: SandboxView) -> str:
    """The bound instance; `sandbox_lost` when there is none."""
    if view.instance is None or view.instance.state != "bound":
        raise CorralError("sandbox_lost", f"the sandbox {view.sandbox.sandbox_id} has no live instance")
    return view.instance.instance_id


def fence_of(view: SandboxView) -> Fence:
    """The current fence of a sandbox."""
    return Fence(view.sandbox.incarnation, view.lease.lease_version if view.lease else 0)


def artifact_named(result: Json | None, path: str) -> str | None:
    """The path, relative to the artifacts' directory, of an artifact that a result names; the caller may leave out /workspace."""
    wanted = "/" + path.lstrip("/")
    for known in (result or {}).get("artifacts", ()):
        inner = str(known["path"]).removeprefix("/workspace/")
        if wanted in (str(known["path"]), "/" + inner):
            return inner
    return None


async def file_blocks(path: str) -> tuple[int, AsyncIterator[bytes]]:
    """(size, blocks) of a regular file, never through a link at its end; `not_found` otherwise."""
    try:
        descriptor = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CorralError("not_found", "there is no such artifact") from error
    file = os.fdopen(descriptor, "rb")
    size = os.fstat(descriptor).st_size

    async def blocks() -> AsyncIterator[bytes]:
        with file:
            while block := await asyncio.to_thread(file.read, BLOCK):
                yield block

    return size, blocks()


def _interrupted(facts: ExecFacts) -> bool:
    """The platform failed before anybody saw the program run, and nobody wanted it to end."""
    unseen = facts.started is not True and facts.exit_code is None and facts.signal is None and not facts.sandbox_lost
    return unseen and facts.infra is not None and facts.ended_by is None and facts.start_failure is None


def _not_started(error: CorralError) -> ExecFacts:
    """What `start_exec` refused. Whatever leaves a doubt about the start is `started` unknown."""
    match error.code:
        case "lease_lost":
            return ExecFacts(False, ended_by="lease_lost")
        case "sandbox_deleted":  # the node refuses before it sends anything
            return ExecFacts(False, ended_by="sandbox_deleted")
        case "not_found" | "sandbox_lost":
            return ExecFacts(None, sandbox_lost=True)
        case "guest_lost":
            return ExecFacts(None, guest_lost=True)
        case _:
            return ExecFacts(None, infra=error.detail)


def _ended_unseen(error: CorralError, started: bool | None) -> ExecFacts:
    match error.code:
        case "not_found" | "sandbox_lost":
            return ExecFacts(started, sandbox_lost=True)
        case "guest_lost":
            return ExecFacts(started, guest_lost=True)
        case _:
            return ExecFacts(started, infra=error.detail)


def _quoted(path: str) -> str:
    if path.isascii() and all(c.isalnum() or c in "/._-" for c in path):
        return path.lstrip("/")
    from urllib.parse import quote

    return quote(path.encode("utf-8", "surrogateescape"), safe="/").lstrip("/")
