"""One run, top to bottom (design 3): plan, guard, place, bind, start at most once, collect, answer, settle.

Every step first looks at what the store has already: `_drive` of a run that an earlier process began goes on where that one stopped.
Another worker may drive the run meanwhile: then nothing more of ours counts.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from corral import faults
from corral.domain.guard import decide as guard_decide
from corral.domain.limits import LimitModes, Limits
from corral.domain.placement import Needs
from corral.domain.plan import plan_by_rules
from corral.domain.records import AuditRecord, ExecRecord, RunRecord, SandboxView
from corral.domain.request import RunRequest, parse_run
from corral.domain.result import Verdict, build_document, outcomeless_document
from corral.domain.run import OPEN
from corral.errors import CorralError
from corral.ports.node import ExecSpec
from corral.services import placing
from corral.services.control import Core
from corral.services.documents import read_limits
from corral.services.execs import Execs, Stopwatch, environment, fence_of, instance_of
from corral.services.languages import Languages, build_limits
from corral.services.lifecycle import Lifecycle, Wanted
from corral.services.queue import QUEUE, Queue, judged
from corral.services.transitions import RETRIES, restless
from corral.services.webhooks import WEBHOOKS

Json = dict[str, Any]
NOT_PLACED: Json = {
    "verdict": "not_placed",
    "reason": "refused before placement",
    "runtime": None,
    "template_digest": None,
}
NEW_SANDBOX: Json = {"verdict": "new_sandbox", "reason": "a run without a session always gets a new sandbox"}
OUTCOMES = frozenset(
    (
        "policy_denied",
        "missing_tool",
        "cwd_not_found",
        "user_refused",
        "queue_timeout",
        "sandbox_lost",
        "sandbox_deleted",
        "lease_lost",
        "dependency_failed",
    )
)
"""Error codes that are reasons of a run as they are; every other one is `infra_error`."""
GRACE_S = 120.0
"""What a one-shot sandbox may live beyond its program's time before it ends itself."""


class _Cancelled(Exception):
    """The run was cancelled before its program was started."""


class _Superseded(Exception):
    """Another worker drives the run: what it does counts, and nothing more of ours."""


@dataclass
class _Flight:
    """A run that this process drives."""

    run: RunRecord
    cancel: asyncio.Event = field(default_factory=asyncio.Event)
    limits: Limits | None = None
    modes: LimitModes | None = None
    built: Json | None = None
    """What the build did, once it has succeeded: code of the caller's may have run in it."""
    task: asyncio.Task[None] | None = None
    exec_id: str | None = None
    """Of the step that is under way."""
    started: bool | None = False
    """Whether code of the caller's has run since `built`, as far as is known; None once a frame may have been sent."""


class Driving:
    """The runs that this process drives, each a task of its own."""

    def __init__(self, core: Core, lifecycle: Lifecycle, execs: Execs) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._execs = execs
        self._languages = Languages(core)
        self.queue = Queue(core)
        self._flights: dict[str, _Flight] = {}

    def drive(self, run: RunRecord, grace_s: float = 0.0) -> None:
        """Begin, or go on with, a run in the background. `grace_s`: more time for an attached client to come back."""
        if run.run_id in self._flights:
            return
        flight = self._flights[run.run_id] = _Flight(run)
        if run.cancel_requested:
            flight.cancel.set()
        if run.attached:
            self._core.watchers.expect(run.run_id, grace_s)
        flight.task = self._core.spawn(self._drive(flight), run.run_id)

    def drives(self, run_id: str) -> bool:
        """Whether this process drives the run."""
        return run_id in self._flights

    def asked_to_end(self, run_id: str, why: str) -> None:
        """The run's `cancel_requested` has been committed as `why`, wherever that was."""
        flight = self._flights.get(run_id)
        if flight is not None and not flight.cancel.is_set():
            flight.run = replace(flight.run, cancel_requested=flight.run.cancel_requested or why)
            flight.cancel.set()
            if flight.exec_id is not None:  # who asked may have been stopped before the exec's row
                self._execs.request_end(flight.exec_id, why)

    async def give_up(self, run: RunRecord, why: str) -> None:
        """Finish a run that cannot be gone on with, since nobody knows what became of it."""
        result = outcomeless_document("infra_error", why, limits=None, modes=None, timings={}, started=None)
        nothing = {"produced": 0, "head": 0, "tail": 0}
        result = {**result, "stdout": nothing, "stderr": nothing, "phase": None, "build": None}
        audit = AuditRecord(run.tenant_id, "system:executor", "run.finished", run.run_id, {"reason": "infra_error"})
        store, now = self._core.store, self._core.now_ms()
        for row in await self._rows(run):
            try:
                changes = {"state": "lost", "ended_at": now}
                await store.update_exec(row.exec_id, expect_states=("starting", "running"), changes=changes)
            except CorralError as error:
                if error.code != "conflict":
                    raise
            self._core.wakes.ring(row.exec_id)
        finished = await store.finish_run(
            run.run_id, result=result, reason="infra_error", timings=result["timings"], audit=audit
        )
        self._core.wakes.ring(run.run_id)
        self._settle(finished)

    @property
    def in_flight(self) -> list[RunRecord]:
        """What this process drives."""
        return [flight.run for flight in self._flights.values()]

    async def over(self, run_id: str) -> None:
        """Returns when this process does not drive the run (any more)."""
        flight = self._flights.get(run_id)
        if flight is not None and flight.task is not None:
            await asyncio.wait({flight.task})

    async def _drive(self, flight: _Flight) -> None:
        run_id = flight.run.run_id
        watch = Stopwatch("queued")
        try:
            result = await self._outcome(flight, watch)
            await self._finish(flight, result)
        except _Superseded:
            if flight.exec_id is not None:
                self._execs.forget(flight.exec_id)
            self._core.spawn(self._perhaps_again(flight.run), run_id)
            return
        finally:
            self._flights.pop(run_id, None)
            self._core.watchers.forget(run_id)
            self._core.wakes.ring(run_id, flight.run if flight.run.state == "finished" else None)
        self._settle(flight.run)

    async def _perhaps_again(self, run: RunRecord) -> None:
        """A run that went to another worker may have come back by now, further on than we knew."""
        core = self._core
        row = await core.endure(lambda: core.store.get_run(run.run_id, run.tenant_id))
        if row is not None and row.state != "finished" and row.driver == core.worker:
            self.drive(row)

    async def _outcome(self, flight: _Flight, watch: Stopwatch) -> Json:
        """The result document, whatever happens; only a stop of the service gets through."""

        def without(reason: str, hint: str, started: bool | None = False) -> Json:
            phase = "build" if flight.built is not None and started is False else None
            if flight.built is not None:  # then something was run, whatever became of the program
                started, hint = True, f"the build had succeeded; {hint}"
            document = outcomeless_document(
                reason, hint, limits=flight.limits, modes=flight.modes, timings=watch.timings(), started=started
            )
            nothing = {"produced": 0, "head": 0, "tail": 0}
            return {**document, "stdout": nothing, "stderr": nothing, "phase": phase, "build": flight.built}

        try:
            return await self._run(flight, watch)
        except _Cancelled:
            when = "it was started; nothing was run" if flight.built is None else "the program was started"
            return without("cancelled", f"cancelled by request before {when}")
        except _Superseded:
            raise
        except CorralError as error:
            if error.code == "shutting_down":
                raise asyncio.CancelledError from error
            if error.code == "superseded":
                raise _Superseded from error
            reason = error.code if error.code in OUTCOMES else "infra_error"
            hint = self._core.told(error)
            started = flight.started if flight.started is not False else error.facts.get("started", False)
            return without(reason, hint, started)
        except Exception as error:
            self._core.log(f"{flight.run.run_id}: {traceback.format_exc()}")
            return without("infra_error", f"an unexpected {type(error).__name__} in the service", flight.started)

    async def _run(self, flight: _Flight, watch: Stopwatch) -> Json:
        core, run = self._core, flight.run
        request = parse_run(run.request, core.host, core.names)
        if await self._known_rows(run):  # an earlier process began something: what became of it is the outcome
            flight.started = None
        else:
            self._check(flight)

        # 2, 3: plan and guard; what is stored is replayed, never decided again
        watch.switch("planning")
        run = await self._plan(flight, request)
        guard = run.decisions["guard"]
        limits = flight.limits = Limits.from_dict(guard["limits"])
        if guard["verdict"] != "allow":
            raise CorralError("policy_denied", guard["reason"], hint=guard.get("hint"))

        # 4: where
        watch.switch("acquiring")
        run = await self._place(flight, request, guard)
        if run.state == "queued":
            watch.switch("queued")
            run = flight.run = await self._race(flight, self.queue.turn(run))
            watch.switch("acquiring")
        place = run.decisions["placement"]
        await self._languages.check_tools(request.language, guard["template"])
        assert run.sandbox_id is not None
        wall_s = limits.wall_s + (build_limits(limits).wall_s if self._languages.builds(request) else 0.0)
        ttl_s = guard["ttl_s"] if request.keep else wall_s + GRACE_S
        wanted = Wanted(
            sandbox_id=run.sandbox_id,
            tenant_id=run.tenant_id,
            user_id=run.user_id,
            owner=run.owner if request.keep else f"{run.owner}/{run.run_id}",
            runtime=place["runtime"],
            security_level=place["security_level"],
            template=guard["template"],
            template_digest=place["template_digest"],
            resource_class=guard["resource_class"],
            limits=limits,
            modes=flight.modes or LimitModes(),
            ttl_s=ttl_s,
            one_shot=not request.keep,
            seccomp=place.get("seccomp", "default"),
        )

        # 5: the sandbox, with the lease; 6: its files
        rows = {str(r.spec.get("step")): r for r in await self._known_rows(run)}
        if rows:  # an earlier process came that far: the execs say what happened, even if the sandbox is gone by now
            view = await core.endure(lambda: self._lifecycle.view(wanted.sandbox_id))
        else:
            view = await core.endure(lambda: self._race(flight, self._lifecycle.provide(wanted)))
        watch.switch("preparing")
        if not rows:
            if core.driver is not None and run.lease_version:
                # Another worker may be putting the same files, or stand still in that.
                view = await core.endure(lambda: self._race(flight, self._take_anew(flight, view, wanted)))
            fence = fence_of(view)
            run = await self._update(flight, {"lease_version": fence.token, "incarnation": fence.incarnation})
            await core.reach(lambda: self._race(flight, self._put_files(view, request)))

        # 7, 8: the build, if there is one, and the program
        steps = self._languages.steps(request, limits)
        if steps.build is not None:
            row = rows.get("build")
            made, result = await self._step(flight, request, view, "build", steps.build, steps.env, row, watch)
            if result["reason"] != "ok":
                return result
            flight.built = build_document(made, result)
            flight.started = None if "program" in rows else False
            watch.prepared()
        row = rows.get("program")
        _, result = await self._step(flight, request, view, "program", steps.run, steps.env, row, watch)
        return result

    async def _plan(self, flight: _Flight, request: RunRequest) -> RunRecord:
        run = flight.run
        if run.decisions.get("guard") is not None:
            return run
        policy = self._core.policy
        intent = plan_by_rules(request, self._core.names)
        ttl_s = request.ttl_s if request.keep else None
        verdict = guard_decide(policy, intent, request.wishes, request.placement, ttl_s=ttl_s, user=request.user)
        verdict = judged(self._core, verdict, run.tenant_id, request)
        plan = {**intent.as_dict(), "verdict": "planned", "reason": intent.reason}
        decisions = {**run.decisions, "plan": plan, "guard": verdict.as_dict()}
        if not verdict.allowed:
            decisions["placement"] = NOT_PLACED
        audit = AuditRecord(
            run.tenant_id, "system:guard", f"guard.{verdict.verdict}", run.run_id, {"reason": verdict.reason}
        )
        return await self._update(flight, {"state": "planning", "decisions": decisions}, audit)

    async def _place(self, flight: _Flight, request: RunRequest, guard: Json) -> RunRecord:
        run, core = flight.run, self._core
        placed = run.decisions.get("placement")
        if placed is None:
            # Decided by a version that did not store what is needed: what the policy says now.
            stored = guard.get("needs")
            needs = Needs.from_dict(stored) if stored else core.policy.needs(request.placement.isolation)
            choice = await placing.place(core, request.placement, needs, run.run_id)
            digest = await self._race(flight, core.node.ensure_template(guard["template"], core.progress))
            placed = {
                **choice.as_dict(),
                "template_digest": digest,
                "seccomp": await placing.seccomp_profile(core, guard["template"]),
                "modes": choice.modes.as_dict(),
                "overshoot": dict(choice.modes.overshoot),
            }
            decisions = {**run.decisions, "reuse": NEW_SANDBOX, "placement": placed}
            # The sandbox's id is committed before there is a sandbox, so that none is ever without its run.
            entry = self.queue.entry(request, Limits.from_dict(guard["limits"]))
            run = flight.run = await self.queue.place(run, {"decisions": decisions}, entry)
            if run.cancel_requested is not None:
                flight.cancel.set()
        _, flight.modes = read_limits({"values": guard["limits"], **placed})
        return run

    async def _take_anew(self, flight: _Flight, view: SandboxView, wanted: Wanted) -> SandboxView:
        """The sandbox under a token of this driver's, known to the node: one that drove the run before changes nothing in it any more."""
        core, sandbox_id, run = self._core, wanted.sandbox_id, flight.run
        for _ in range(RETRIES):
            # Asked after the view was read: if somebody else drives the run since, the view is too old to be committed over.
            row = await core.store.get_run(run.run_id, run.tenant_id)
            if row is None or row.driver != core.driver:
                raise _Superseded
            if view.lease is None or view.lease.lease_owner != wanted.owner:
                return view  # a kept one that has been attached to
            try:
                view = await self._lifecycle.fire(
                    view, "acquire", ["own"], owner=wanted.owner, ttl_ms=wanted.ttl_ms, cause="take_over"
                )
            except CorralError as error:
                if error.code != "conflict":
                    raise
                view = await self._lifecycle.view(sandbox_id)
                continue
            await core.reach(partial(core.node.fence, instance_of(view), fence_of(view), "adopt"))
            await self._lifecycle.done(sandbox_id, ("fence_adopt",), {"ok": True})
            return view
        raise restless(sandbox_id)

    async def _put_files(self, view: SandboxView, request: RunRequest) -> None:
        """Step 6. Safe to repeat: nothing of the caller's has run yet."""
        files = [(f.path, f.mode, f.content) for f in request.files]
        if request.code is not None:
            files.append((self._languages.code_path(request), 0o644, request.code.encode("utf-8", "surrogateescape")))
        node, instance_id = self._core.node, instance_of(view)
        if files:
            await node.put_files(instance_id, fence_of(view), files)

    async def _step(
        self,
        flight: _Flight,
        request: RunRequest,
        view: SandboxView,
        step: str,
        argv: tuple[str, ...],
        env: dict[str, str],
        record: ExecRecord | None,
        watch: Stopwatch,
    ) -> tuple[str, Json]:
        """One exec of the run, row first, then the frame; -> its id and its result, which is the run's if it is the last one."""
        core, run = self._core, flight.run
        assert flight.limits is not None
        limits = build_limits(flight.limits) if step == "build" else flight.limits
        modes = flight.modes or LimitModes()
        after: SandboxView | None = None
        if record is not None and record.result is not None:
            if step == "program" or record.result["reason"] != "ok":
                await self._update(flight, {"state": "collecting", "exec_id": record.exec_id})
            return record.exec_id, record.result
        new = record is None
        if record is None:
            self._check(flight)
            record = ExecRecord(
                exec_id=core.id("exe"),
                sandbox_id=view.sandbox.sandbox_id,
                incarnation=view.sandbox.incarnation,
                lease_version=fence_of(view).token,
                state="starting",
                spec={"step": step, "argv": list(argv)},
                created_at=core.store_ms(),
                run_id=run.run_id,
                step=step,
                driver=core.worker,
            )
            record, after = await self._begin_exec(flight, record, view)
        flight.exec_id = record.exec_id
        flight.started = None
        spec = ExecSpec(
            exec_id=record.exec_id,
            argv=argv,
            env=environment(request.user, env, request.env),
            cwd=request.cwd or "/workspace",
            user=request.user,
            stdin=request.stdin if step == "program" else None,
            limits=limits,
            background="keep" if request.keep and step == "program" else "kill",
        )
        changes: Json = {"state": "running"}
        if step == "program":
            changes["exec_id"] = record.exec_id
        await self._update(flight, changes)
        if flight.cancel.is_set():
            self._execs.expect(record)  # else nobody hears it
            why = flight.run.cancel_requested or "cancelled"
            await core.endure(lambda: self._ask_end(record, why))
        core.wakes.ring(run.run_id, flight.run)

        async def ended(verdict: Verdict) -> None:
            if step == "program" or verdict.reason != "ok":
                await self._update(flight, {"state": "collecting", "exec_id": record.exec_id})
                core.wakes.ring(run.run_id, flight.run)

        faults.point("run.exec.before")
        outcome = await self._execs.supervise(
            record,
            view.instance.instance_id if view.instance is not None else "",
            spec,
            modes,
            outputs=request.outputs if step == "program" else None,
            into=os.path.join(core.artifacts, run.run_id),
            watch=watch,
            mark=request.keep,
            ended=ended,
            new=new,
        )
        faults.point("run.exec.after")
        verdict, hint, phase = outcome.verdict, None, "run"
        flight.started = verdict.started
        if step == "build":
            phase = "build"
            if verdict.reason != "ok":
                hint = await self._languages.build_hint(record.exec_id, request.language, verdict, limits)
        url = f"/v1/runs/{run.run_id}/artifacts/"
        result = outcome.document(limits, modes, watch.timings(), url, hint, phase=phase, build=flight.built)
        await core.endure(lambda: self._lifecycle.exec_ended(record, outcome, result, after))
        return record.exec_id, result

    async def _begin_exec(
        self, flight: _Flight, record: ExecRecord, view: SandboxView
    ) -> tuple[ExecRecord, SandboxView | None]:
        """The row of a step's exec; `_Superseded` when the step has one already."""
        core = self._core
        try:
            return await core.endure(
                lambda: self._lifecycle.exec_requested(record, view, tenant_id=flight.run.tenant_id, driver=core.driver)
            )
        except CorralError as error:
            if error.code == "conflict" and any(row.step == record.step for row in await self._rows(flight.run)):
                raise _Superseded from error
            raise

    async def _finish(self, flight: _Flight, result: Json) -> None:
        """Step 9."""
        run = flight.run
        audit = AuditRecord(
            run.tenant_id,
            "system:executor",
            "run.finished",
            run.run_id,
            {"reason": result["reason"], "exit_code": result["exit_code"], "started": result["started"]},
        )
        core = self._core
        faults.point("run.finish.before")
        try:
            # Who waits for the run would wait for ever: a store that does not answer for a while is asked again.
            flight.run = await core.endure(
                lambda: core.store.finish_run(
                    run.run_id,
                    result=result,
                    reason=result["reason"],
                    timings=result["timings"],
                    audit=audit,
                    driver=core.driver,
                )
            )
        except CorralError as error:
            if error.code == "superseded":
                raise _Superseded from error
            if error.code == "shutting_down":
                raise asyncio.CancelledError from error
            raise
        core.wakes.heard(QUEUE)
        if run.request.get("webhook") is not None:
            core.wakes.heard(WEBHOOKS)
        faults.point("run.finish.after")

    def _settle(self, run: RunRecord) -> None:
        """Step 10, off the caller's path: a one-shot's sandbox goes; a kept one stays leased, if it has become one."""
        keep = bool(run.request.get("keep"))
        if run.sandbox_id is not None and (not keep or (run.result or {}).get("started") is False):
            sandbox_id = run.sandbox_id
            settled = self._core.endure(lambda: self._lifecycle.destroy(sandbox_id, "run_finished"))
            self._core.spawn(settled, f"{run.run_id} settle", last=True)

    async def _rows(self, run: RunRecord) -> list[ExecRecord]:
        if run.sandbox_id is None:
            return []
        return [r for r in await self._core.store.list_execs(run.sandbox_id) if r.run_id == run.run_id]

    async def _known_rows(self, run: RunRecord) -> list[ExecRecord]:
        return await self._core.endure(lambda: self._rows(run))

    async def _ask_end(self, record: ExecRecord, why: str) -> None:
        try:
            await self._core.store.update_exec(
                record.exec_id, expect_states=("starting", "running"), changes={"cancel_requested": why}
            )
        except CorralError as error:
            if error.code != "conflict":
                raise
            return
        self._execs.request_end(record.exec_id, why)

    async def _update(self, flight: _Flight, changes: Json, audit: AuditRecord | None = None) -> RunRecord:
        core = self._core
        flight.run = await core.endure(
            lambda: core.store.update_run(
                flight.run.run_id, expect_states=OPEN, changes=changes, audit=audit, driver=core.driver
            )
        )
        if flight.run.cancel_requested is not None:
            flight.cancel.set()
        return flight.run

    def _check(self, flight: _Flight) -> None:
        if flight.cancel.is_set():
            raise _Cancelled

    async def _race(self, flight: _Flight, work: Any) -> Any:
        """`work`, unless the run is cancelled first; then the work ends by itself and what it made is destroyed afterwards."""
        if flight.cancel.is_set():
            work.close()
            raise _Cancelled
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(flight.cancel.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise _Cancelled
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            asked.cancel()
