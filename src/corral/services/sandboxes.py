"""Kept sandboxes and the execs in them. The caller's key owns an implicit lease, which every call renews."""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any, Literal, TypeVar

from corral.domain.expiry import idle_timeout_of
from corral.domain.fence import Fence
from corral.domain.guard import check_user, exec_limits
from corral.domain.guard import decide as guard_decide
from corral.domain.lease import key_of
from corral.domain.lease import lost as lease_lost
from corral.domain.limits import Limits
from corral.domain.plan import plan_by_rules
from corral.domain.records import AuditRecord, EventRecord, ExecRecord, Idempotency, SandboxView
from corral.domain.request import ExecRequest, parse_exec, parse_sandbox
from corral.errors import CorralError
from corral.ports.node import ExecSpec
from corral.services import placing
from corral.services.control import Core
from corral.services.documents import read_limits
from corral.services.events import Caller, StreamEvent
from corral.services.execs import Execs, Stopwatch, artifact_named, environment, fence_of, file_blocks, instance_of
from corral.services.executor import ended_document
from corral.services.expiry import Expiry
from corral.services.languages import Languages, exec_directories, is_code
from corral.services.leases import Leases, Wish, ttl_of
from corral.services.lifecycle import Lifecycle, Wanted
from corral.services.pausing import Pausing
from corral.services.queue import judged
from corral.services.transitions import ENDING, gone

Json = dict[str, Any]
T = TypeVar("T")
ALIVE = ("leased", "running")
REMOVE_S = 10.0
"""What the removal of an exec's code may take: its caller waits for it."""
NOT_THERE = ("not_found", "guest_lost", "sandbox_lost", "sandbox_deleted", "lease_lost")
NOT_NOW = (*NOT_THERE, "lease_held", "sandbox_paused", "illegal_transition", "conflict")
"""Why a sandbox takes no further exec; those that it has taken are there all the same."""
OPEN_EXEC = ("starting", "running")
SIGNALS = {
    "HUP": 1, "INT": 2, "QUIT": 3, "KILL": 9, "USR1": 10, "USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15,
    "CONT": 18, "STOP": 19, "TSTP": 20, "WINCH": 28,
}  # fmt: skip
LIVING_STATES = (
    "requested", "planning", "allocating", "provisioning", "locking", "ready", "leased", "running", "idle",
    "reuse_checking", "recycling", "hibernating", "hibernated", "pausing", "paused", "resuming", "sanitizing",
    "failed", "lost",
)  # fmt: skip


class Sandboxes:
    """Creates, lists, uses and deletes kept sandboxes."""

    def __init__(self, core: Core, lifecycle: Lifecycle, execs: Execs) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._execs = execs
        self._languages = Languages(core)
        self._driven: dict[str, asyncio.Task[None]] = {}
        self.leases = Leases(core, lifecycle, execs)
        self.pausing = Pausing(core, lifecycle)
        self.expiry = Expiry(core, lifecycle)

    # -- sandboxes -------------------------------------------------------------------------------------------------------------
    async def create(self, caller: Caller, document: Json, idempotency: Idempotency | None) -> SandboxView:
        """A sandbox leased to the caller. With a key that was used: the same sandbox, finished if it was half made."""
        core = self._core
        core.check_open()
        request = parse_sandbox(document, core.host)
        policy = core.policy
        intent = plan_by_rules(request, core.names)
        guard = guard_decide(
            policy,
            intent,
            request.wishes,
            request.placement,
            ttl_s=request.ttl_s,
            idle_timeout_s=request.idle_timeout_s,
        )
        guard = judged(core, guard, caller.tenant_id)
        if not guard.allowed:
            await core.store.add_audit(
                AuditRecord(caller.tenant_id, caller.actor, "guard.deny", "sandbox", {"reason": guard.reason})
            )
            raise guard.error()
        sandbox_id = core.id("sbx")
        choice = await placing.place(core, request.placement, guard.needs, sandbox_id)
        digest = await core.node.ensure_template(guard.template, core.progress)
        seccomp = await placing.seccomp_profile(core, guard.template)
        wanted = Wanted(
            sandbox_id=sandbox_id,
            tenant_id=caller.tenant_id,
            owner=caller.owner,
            user_id=caller.user_id,
            runtime=choice.runtime,
            security_level=choice.security_level,
            template=guard.template,
            template_digest=digest,
            resource_class=guard.resource_class,
            limits=guard.limits,
            modes=choice.modes,
            ttl_s=guard.ttl_s,
            idle_timeout_s=idle_timeout_of(policy, request.idle_timeout_s),
            one_shot=False,
            seccomp=seccomp,
        )
        view, fresh = await self._lifecycle.begin(wanted, idempotency)
        if not fresh:
            wanted = self._lifecycle.wanted_of(view)
            if view.sandbox.state in ("sanitizing", "terminated"):
                return view
        view = await self._lifecycle.provide(wanted, view)
        if fresh or not await core.store.list_execs(wanted.sandbox_id):
            files = [(f.path, f.mode, f.content) for f in request.files]
            if files:
                try:
                    await core.node.put_files(instance_of(view), fence_of(view), files)
                except CorralError as error:
                    try:
                        raise await self.met(error, wanted.sandbox_id) from error
                    finally:
                        # Its caller never hears the id: nobody could use it, and nobody would remove it.
                        core.spawn(self._lifecycle.destroy(wanted.sandbox_id, "failed"), "files refused", last=True)
        return view

    async def page(
        self, caller: Caller, *, after: str | None, limit: int, ended: bool
    ) -> tuple[list[SandboxView], str | None]:
        """Newest first; `ended` = terminated ones too."""
        states = None if ended else LIVING_STATES
        views = await self._core.store.list_sandboxes(caller.tenant_id, states=states, after=after, limit=limit + 1)
        return views[:limit], views[limit - 1].sandbox.sandbox_id if len(views) > limit else None

    async def inspect(self, caller: Caller, sandbox_id: str) -> tuple[SandboxView, list[EventRecord]]:
        """The sandbox and its history."""
        view = await self._lifecycle.view(sandbox_id, caller.tenant_id)
        return view, await self._core.store.history(sandbox_id)

    async def delete(self, caller: Caller, sandbox_id: str, wait_s: float, lease: str | None = None) -> SandboxView:
        """End it; wins every race. Waits until it is terminated, at most `wait_s`. Repeated: the same answer.

        With a `lease` it is the holder's end of it: `lease_lost` for a stale one. Without it is the tenant's, whoever has it.
        """
        view = await self._lifecycle.view(sandbox_id, caller.tenant_id)
        if view.sandbox.state == "terminated":
            return view
        audit = AuditRecord(caller.tenant_id, caller.actor, "sandbox.deleted", sandbox_id, {})
        if lease is not None:
            await self.leases.condemn(view, _parsed(lease), audit)
        return await self._lifecycle.destroy(sandbox_id, "deleted", audit, wait_s=wait_s)

    async def usable(self, caller: Caller, sandbox_id: str, lease: str | None = None) -> SandboxView:
        """The sandbox, with the caller's lease renewed; else why it cannot be used. `lease`: what `Corral-Lease` says."""
        for last in (False, True):
            view, owner, ttl_ms = await self._held(caller, sandbox_id, lease)
            try:
                await self._core.store.renew_lease(sandbox_id, owner, fence_of(view), ttl_ms)
            except CorralError as error:
                if lease is None and error.code == "lease_lost" and not last:
                    continue  # it has changed hands since we looked
                raise await self.met(error, sandbox_id) from error
            await self.expiry.used(view)
            return view
        raise AssertionError

    async def readable(self, caller: Caller, sandbox_id: str) -> SandboxView:
        """The sandbox, to look into it: needs no lease, and counts as activity of a caller that has the implicit one."""
        view = await self._lifecycle.view(sandbox_id, caller.tenant_id)
        row, lease = view.sandbox, view.lease
        if row.state in ENDING:
            raise gone(view)
        if row.state not in (*ALIVE, "idle", "reuse_checking", "recycling"):
            raise _not_now(view)
        if row.state in ALIVE and lease is not None and lease.lease_owner == caller.owner:
            try:
                await self._core.store.renew_lease(sandbox_id, caller.owner, fence_of(view), _ttl_ms(view))
            except CorralError as error:
                if error.code != "lease_lost":
                    raise
        await self.expiry.used(view)
        return view

    async def met(self, error: CorralError, sandbox_id: str) -> CorralError:
        """What a call met because the sandbox was ending under it is told by why the sandbox ends."""
        if error.code in ("lease_lost", "guest_lost", "sandbox_lost", "sandbox_deleted", "not_found", "infra_error"):
            if error.code == "lease_lost":
                await self.leases.floors.heard(sandbox_id, error)
            view = await self._core.store.get_sandbox(sandbox_id, None)
            if view is not None and view.sandbox.state in ENDING:
                return gone(view)
        return error

    async def _held(
        self, caller: Caller, sandbox_id: str, lease: str | None = None, *, latest: bool = False
    ) -> tuple[SandboxView, str, int]:
        """(the sandbox, who of the caller's has it, how long that is extended for).

        A caller that names no lease has the implicit one of its key: taken again if nobody has the sandbox.
        """
        look = self._lifecycle.latest if latest else self._lifecycle.view
        view = await look(sandbox_id, caller.tenant_id)
        row, holder = view.sandbox, view.lease.lease_owner if view.lease is not None else None
        if row.state in ENDING:
            raise gone(view)
        if lease is not None:
            fence = _parsed(lease)
            if fence != fence_of(view) or holder is None or key_of(holder) != caller.owner:
                raise lease_lost(f"the lease {fence} is not the current one")
            if row.state not in ALIVE:
                raise _not_now(view)
            return view, holder, ttl_of(view)
        if row.state not in ALIVE or holder != caller.owner:
            wish = Wish(None, _ttl_ms(view))
            view = (await self.leases.acquire(caller, sandbox_id, wish)).view
        return view, caller.owner, _ttl_ms(view)

    # -- execs -----------------------------------------------------------------------------------------------------------------
    async def start_exec(
        self,
        caller: Caller,
        sandbox_id: str,
        document: Json,
        idempotency: Idempotency | None,
        lease: str | None,
        wait_s: float | None,
        default_wait_s: float,
    ) -> ExecRecord:
        """Start an exec, driven in the background, and wait as `wait_exec` does: `wait_s`, else what the document says."""
        core = self._core
        core.check_open()
        request = parse_exec(document, core.host)
        if wait_s is None:
            wait_s = default_wait_s if request.wait_s is None else request.wait_s
        try:
            return await self._start_exec(caller, sandbox_id, request, idempotency, lease, wait_s)
        except CorralError as error:
            if idempotency is None or error.code not in NOT_NOW:
                raise
            # The sandbox has gone on since the first call, whose answer may have been lost: that one's exec is what is asked for.
            if (made := await core.store.made_under(idempotency)) is None:
                raise
            return await self.wait_exec(caller, made, wait_s)

    async def _start_exec(
        self,
        caller: Caller,
        sandbox_id: str,
        request: ExecRequest,
        idempotency: Idempotency | None,
        lease: str | None,
        wait_s: float,
    ) -> ExecRecord:
        core = self._core
        self._languages.runner(request.language)
        view, owner, ttl_ms = await self._held(caller, sandbox_id, lease, latest=lease is None)
        await self._languages.check_tools(request.language, view.sandbox.template_id)
        sandbox_limits, _ = read_limits(view.sandbox.limits)
        check_user(core.policy, view.sandbox.template_id, request.user)
        limits = exec_limits(
            core.policy, sandbox_limits, request.timeout_s, request.output_bytes, request.output_kill_bytes
        )
        record = ExecRecord(
            exec_id=core.id("exe"),
            sandbox_id=sandbox_id,
            incarnation=view.sandbox.incarnation,
            lease_version=fence_of(view).token,
            state="starting",
            spec=_stored(request, limits),
            created_at=core.store_ms(),
            attached=request.attached,
            driver=core.worker,
        )
        for last in (False, True):
            try:
                record, after = await self._lifecycle.exec_requested(
                    record,
                    view,
                    renew=(owner, ttl_ms),
                    idempotency=idempotency,
                    tenant_id=caller.tenant_id,
                    any_fence=lease is None,
                )
                break
            except CorralError as error:
                if error.code == "store_error":
                    core.store_failed(error)
                if last or error.code not in ("lease_lost", "illegal_transition"):
                    raise
            # It has changed hands or state since we looked.
            view, owner, ttl_ms = await self._held(caller, sandbox_id, lease)
            fence = fence_of(view)
            record = replace(record, incarnation=fence.incarnation, lease_version=fence.token)
        if after is not None or core.driver in (None, record.driver):
            self.drive(record, view=after)
        # A row of this very call has had no news yet: nothing ran between its commit and the listening.
        return await self.wait_exec(caller, record.exec_id, wait_s, record if after is not None else None)

    def drive(self, record: ExecRecord, grace_s: float = 0.0, view: SandboxView | None = None) -> None:
        """Begin, or go on with, an exec in the background. `view`: its sandbox as just committed."""
        if record.exec_id in self._driven or record.state not in OPEN_EXEC:
            return
        if record.attached:
            self._core.watchers.expect(record.exec_id, grace_s)
        self._execs.expect(record)
        task = self._core.spawn(self._drive(record, view), record.exec_id)
        self._driven[record.exec_id] = task
        task.add_done_callback(lambda _: self._left(record.exec_id))

    def drives(self, key: str) -> bool:
        """Whether `key` is an exec that this process looks after (one of a run too), or the sandbox of one."""
        return self._execs.concerns(key)

    def asked_to_end(self, exec_id: str, why: str) -> None:
        """The exec's `cancel_requested` has been committed as `why`, wherever that was."""
        self._execs.heard(exec_id, why)

    def watched_elsewhere(self, record: ExecRecord) -> bool:
        """Whether another worker has a client of it, or drives it and so judges itself; `record` as stored now."""
        core = self._core
        return core.driver is not None and (record.driver != core.worker or record.watched_until > core.store_ms())

    def _left(self, exec_id: str) -> None:
        self._driven.pop(exec_id, None)
        self._execs.forget(exec_id)

    async def _drive(self, record: ExecRecord, known: SandboxView | None) -> None:
        core = self._core
        watch = Stopwatch("preparing")
        view = known
        if view is None:
            view = await core.endure(lambda: self._lifecycle.view(record.sandbox_id))
        _, modes = read_limits(view.sandbox.limits)
        request, limits = _read(record)
        instance_id = view.instance.instance_id if view.instance is not None else ""
        url = f"/v1/execs/{record.exec_id}/artifacts/"
        if request.code is not None and record.state == "starting":
            try:
                file = (self._languages.exec_code_path(request.language, record.exec_id), 0o644, _bytes(request.code))
                await core.node.put_files(instance_id, fence_of(view), [file])
            except CorralError as error:
                core.log(f"{record.exec_id}: {error}")  # the exec then says itself what is wrong
        argv, env, built = self._languages.exec_command(request, record.exec_id, limits)
        spec = ExecSpec(
            exec_id=record.exec_id,
            argv=argv,
            env=environment(request.user, env, request.env),
            cwd=request.cwd or "/workspace",
            user=request.user,
            stdin=request.stdin,
            stdin_open=request.stdin_open,
            pty=request.pty,
            limits=limits,
            background="keep",
        )
        outcome = await self._execs.supervise(
            record,
            instance_id,
            spec,
            modes,
            outputs=request.outputs,
            into=os.path.join(core.artifacts, record.exec_id),
            watch=watch,
            mark=True,
            ended=lambda verdict: self._still(record),
            new=known is not None,
        )
        hint = None
        verdict = outcome.verdict
        phase = await self._phase(instance_id, built, verdict.reason)
        if phase == "build":
            hint = await self._languages.build_hint(record.exec_id, request.language, verdict, limits)
        result = outcome.document(limits, modes, watch.timings(), url, hint, phase=phase)
        result["files"] = [file for file in result["files"] if not is_code(str(file["path"]))]
        if request.code is not None:
            await self._remove_code(record, view, request.user)
        await core.endure(lambda: self._lifecycle.exec_ended(record, outcome, result, known))
        core.watchers.forget(record.exec_id)

    async def _still(self, record: ExecRecord) -> None:
        """`superseded` if this worker has been away and another drives the exec: its files are looked at once."""
        core = self._core
        if core.doubtful:
            row = await core.endure(lambda: core.store.get_exec(record.exec_id, None))
            if row is not None and row.driver != core.worker:
                raise CorralError("superseded", f"{record.exec_id} is driven by {row.driver or 'nobody'} now")

    async def get_exec(self, caller: Caller, exec_id: str) -> ExecRecord:
        """The exec; a foreign or unknown id is `not_found`."""
        record = await self._core.store.get_exec(exec_id, caller.tenant_id)
        if record is None:
            raise CorralError("not_found", f"there is no exec {exec_id[:64]}")
        return record

    async def list_execs(self, caller: Caller, sandbox_id: str) -> list[ExecRecord]:
        """All execs of a sandbox, oldest first."""
        await self._lifecycle.view(sandbox_id, caller.tenant_id)
        return await self._core.store.list_execs(sandbox_id)

    async def wait_exec(
        self, caller: Caller, exec_id: str, seconds: float, known: ExecRecord | None = None
    ) -> ExecRecord:
        """The exec when it has ended, or as it is after `seconds`. The caller counts as an attached client meanwhile.

        `known`: its row, if nothing can have happened since it was committed.
        """
        record = known or await self.get_exec(caller, exec_id)
        if record.state not in OPEN_EXEC or seconds <= 0:
            return record
        until = asyncio.get_running_loop().time() + seconds
        with self._core.watchers.watching(exec_id), self._core.wakes.listen(exec_id) as woken:
            while True:
                record = known or woken.look() or await self.get_exec(caller, exec_id)
                known = None
                left = until - asyncio.get_running_loop().time()
                if record.state not in OPEN_EXEC or left <= 0 or self._core.leaving:
                    return record
                self._core.check_open()
                await woken.wait(left)

    async def stream(self, caller: Caller, exec_id: str, cursor: str | None) -> AsyncIterator[StreamEvent]:
        """`started`, output from the node's cursor on, `ended`."""
        core = self._core
        with core.watchers.watching(exec_id):
            await self.get_exec(caller, exec_id)
            record = await self._execs.begun(exec_id)
            if record.state != "never_started":
                if cursor is None:
                    yield StreamEvent("started", None, doc={"exec_id": exec_id, "sandbox_id": record.sandbox_id})
                async for event in self._execs.stream(exec_id, cursor):
                    yield event
            while (record := await self.wait_exec(caller, exec_id, 3600.0)).state in OPEN_EXEC:
                pass
            around = {"id": exec_id, "sandbox_id": record.sandbox_id, "lease_version": record.lease_version}
            yield StreamEvent("ended", None, doc=await ended_document(core.node, exec_id, record.result or {}, around))

    async def logs(
        self, caller: Caller, exec_id: str, stream: Literal["stdout", "stderr"], *, follow: bool
    ) -> AsyncIterator[bytes]:
        """Everything that the program wrote to a stream, raw."""
        record = await self.get_exec(caller, exec_id)
        return self._execs.raw(exec_id, stream, follow and record.state in OPEN_EXEC)

    async def sandbox_logs(
        self, caller: Caller, sandbox_id: str, stream: Literal["stdout", "stderr"], *, follow: bool
    ) -> AsyncIterator[bytes]:
        """The output of the sandbox's newest exec; `not_found` when it has had none."""
        records = await self.list_execs(caller, sandbox_id)
        if not records:
            raise CorralError("not_found", f"the sandbox {sandbox_id} has had no exec yet")
        return await self.logs(caller, records[-1].exec_id, stream, follow=follow)

    async def artifact(self, caller: Caller, exec_id: str, path: str) -> tuple[int, AsyncIterator[bytes]]:
        """(size, blocks) of an artifact that the exec's result names."""
        record = await self.get_exec(caller, exec_id)
        if (inner := artifact_named(record.result, path)) is not None:
            return await file_blocks(os.path.join(self._core.artifacts, exec_id, inner))
        raise CorralError("not_found", f"the exec has no artifact {path[:200]!r}")

    async def cancel_exec(self, caller: Caller, exec_id: str, why: str, lease: str | None = None) -> ExecRecord:
        """End it; answers when it has ended, at most 10 s later. Like the end of a sandbox: a stale `lease` ends nothing."""
        record = await self.get_exec(caller, exec_id)
        if lease is not None:
            await self._held(caller, record.sandbox_id, lease)
        if record.state in OPEN_EXEC:
            why = record.cancel_requested or why
            try:
                changes = {"cancel_requested": why}
                await self._core.store.update_exec(exec_id, expect_states=OPEN_EXEC, changes=changes)
                self._execs.request_end(exec_id, why)
                if record.driver != self._core.worker and self._core.wakes.others is not None:
                    self._core.wakes.others((exec_id,))
            except CorralError as error:
                if error.code != "conflict":
                    raise
        return await self.wait_exec(caller, exec_id, 10.0)

    async def _running(self, caller: Caller, exec_id: str, lease: str | None = None) -> tuple[ExecRecord, Fence]:
        record = await self.get_exec(caller, exec_id)
        if lease is not None:
            await self._held(caller, record.sandbox_id, lease)
        if record.state not in OPEN_EXEC:
            raise CorralError("conflict", f"the exec has ended ({record.state})", retryable=False)
        fence = fence_of(await self.usable(caller, record.sandbox_id, lease))
        return (await self._execs.begun(exec_id) if record.state == "starting" else record), fence

    async def _sent(self, work: Awaitable[T], exec_id: str) -> T:
        """What the node says to an exec's input or signal; what it met because the sandbox was ending is told as every other such."""
        try:
            return await work
        except CorralError as error:
            record = await self._core.store.get_exec(exec_id, None)
            if record is None:
                raise
            raise await self.met(error, record.sandbox_id) from error

    async def signal_exec(self, caller: Caller, exec_id: str, document: Any, lease: str | None = None) -> None:
        """`{"signal": "TERM" | "SIGTERM" | 15}` to the whole exec."""
        given = document.get("signal") if isinstance(document, dict) else None
        if isinstance(given, str) and re.fullmatch(r"[A-Z0-9]{2,10}", given):
            number = SIGNALS.get(given.removeprefix("SIG"), 0)
        else:
            number = given if isinstance(given, int) and not isinstance(given, bool) else 0
        if not 1 <= number <= 64:
            raise CorralError("invalid_value", "signal is not a signal", field="/signal", hint="use TERM, INT, KILL, …")
        _, fence = await self._running(caller, exec_id, lease)
        await self._sent(self._core.node.signal_exec(exec_id, number, fence=fence), exec_id)

    async def resize_exec(self, caller: Caller, exec_id: str, document: Any, lease: str | None = None) -> None:
        """`{"rows", "cols"}` of the exec's terminal."""
        rows, cols = (document.get(n) if isinstance(document, dict) else None for n in ("rows", "cols"))
        for name, value in (("rows", rows), ("cols", cols)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
                raise CorralError("invalid_value", f"{name} is not an integer from 1 to 65535", field=f"/{name}")
        _, fence = await self._running(caller, exec_id, lease)
        work = self._core.node.resize_exec(exec_id, int(rows), int(cols), fence=fence)  # type: ignore[arg-type]
        await self._sent(work, exec_id)

    async def stdin_exec(
        self,
        caller: Caller,
        exec_id: str,
        data: bytes,
        eof: bool,
        offset: int | None = None,
        lease: str | None = None,
    ) -> bool:
        """More input for an exec that was started with `stdin_open`; False when the program reads no more.

        `offset`: where `data` stands in all of the input. What has arrived already is skipped, so a call may be repeated.
        """
        record, fence = await self._running(caller, exec_id, lease)
        ahead = len(_read(record)[0].stdin or b"")  # what came with the exec itself does not count for the caller
        try:
            at = None if offset is None else offset + ahead
            return await self._sent(self._core.node.stdin_exec(exec_id, data, eof, at, fence=fence), exec_id)
        except CorralError as error:
            if error.code == "illegal_transition":
                return False  # it has ended since we looked
            if error.code != "bad_request":
                raise
            hint = "send what is missing first, or leave offset out to go on where the input ends"
            facts: Json = {}
            if (known := error.facts.get("continues_at")) is not None:
                facts["continues_at"] = max(0, known - ahead)
            detail = "there is a hole before the offset"
            raise CorralError("invalid_value", detail, hint=hint, field="/offset", **facts) from error

    # -- files -----------------------------------------------------------------------------------------------------------------
    async def get_tar(self, caller: Caller, sandbox_id: str, path: str, user: str) -> AsyncIterator[bytes]:
        """A tar stream of a path inside."""
        view = await self.readable(caller, sandbox_id)
        check_user(self._core.policy, view.sandbox.template_id, user)
        told = self._told(self._core.node.get_tar(instance_of(view), path, user), sandbox_id)
        self.expiry.keeps(view, told)
        return told

    async def _told(self, blocks: AsyncIterator[bytes], sandbox_id: str) -> AsyncIterator[bytes]:
        try:
            async for block in blocks:
                yield block
        except CorralError as error:
            raise await self.met(error, sandbox_id) from error
        finally:
            close = getattr(blocks, "aclose", None)
            if close is not None:
                await close()

    async def put_tar(
        self,
        caller: Caller,
        sandbox_id: str,
        blocks: AsyncIterator[bytes],
        path: str,
        user: str,
        lease: str | None = None,
    ) -> None:
        """Unpack a tar stream inside; afterwards its files count as there before."""
        view = await self.usable(caller, sandbox_id, lease)
        check_user(self._core.policy, view.sandbox.template_id, user)
        try:
            with self.expiry.using(view):
                await self._core.node.put_tar(instance_of(view), fence_of(view), blocks, path, user)
            if not await self._core.store.open_execs(sandbox_id):
                await self._core.node.mark(instance_of(view))
        except CorralError as error:
            raise await self.met(error, sandbox_id) from error

    # -- parts -----------------------------------------------------------------------------------------------------------------
    async def _phase(self, instance_id: str, built: str | None, reason: str) -> str | None:
        """Whether an exec that ended for `reason` was still building; None when nobody can look any more.

        Unless it is `ok`, this is the sandbox's own word: a program can remove the file that tells.
        """
        if built is None or reason == "ok":
            return "run"
        try:
            await self._core.node.stat_file(instance_id, built)
        except CorralError as error:
            there = reason not in ("sandbox_lost", "sandbox_deleted", "lease_lost")
            return "build" if error.code == "not_found" and there else None
        return "run"

    async def _remove_code(self, record: ExecRecord, view: SandboxView, user: str) -> None:
        """Remove the code of an exec that has ended and what its build and its interpreter wrote; what cannot be removed stays until the sandbox ends.

        A process of the sandbox does it, as the exec's user, so whatever a program put there instead gives it nothing.
        """
        for path in exec_directories(record.exec_id):
            try:
                removal = self._core.node.remove_file(
                    instance_of(view), fence_of(view), path, recursive=True, user=user
                )
                await asyncio.wait_for(removal, REMOVE_S)
            except (CorralError, TimeoutError) as error:
                if getattr(error, "code", None) not in NOT_THERE:
                    self._core.log(f"{record.exec_id}: {path} stays: {error}")


def _parsed(lease: str) -> Fence:
    try:
        return Fence.parse(lease)
    except ValueError as error:
        hint = "as the lease's document gives it"
        raise CorralError("invalid_value", "Corral-Lease is not <incarnation>.<lease_version>", hint=hint) from error


def _not_now(view: SandboxView) -> CorralError:
    row = view.sandbox
    if row.state in ("paused", "pausing", "resuming"):
        return CorralError("sandbox_paused", f"the sandbox {row.sandbox_id} is {row.state}", hint="resume it first")
    return CorralError("conflict", f"the sandbox {row.sandbox_id} is {row.state}", hint="try again in a moment")


def _ttl_ms(view: SandboxView) -> int:
    """How long a lease of the sandbox is renewed for."""
    return max(1000, view.sandbox.expires_at - view.sandbox.created_at)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _stored(request: ExecRequest, limits: Limits) -> Json:
    """`ExecRecord.spec`: all that is needed to send the exec again."""
    document = dict(vars(request))
    document["stdin"] = None if request.stdin is None else base64.b64encode(request.stdin).decode("ascii")
    return {"request": document, "limits": limits.as_dict()}


def _read(record: ExecRecord) -> tuple[ExecRequest, Limits]:
    """The inverse of `_stored`."""
    document = dict(record.spec["request"])
    for name in ("argv", "args", "outputs", "pty"):
        if document.get(name) is not None:
            document[name] = tuple(document[name])
    if document["stdin"] is not None:
        document["stdin"] = base64.b64decode(document["stdin"])
    return ExecRequest(**document), Limits.from_dict(record.spec["limits"])
