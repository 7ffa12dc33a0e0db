"""`LocalNode`: the node port in process. It composes; the parts are body, execcalls, filecalls, pausing, leftovers and journal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from corral.domain.facts import ExecFacts
from corral.domain.fence import Fence
from corral.domain.grade import Check
from corral.domain.ids import is_id, ulid_of
from corral.domain.limits import LimitModes, Limits
from corral.errors import CorralError
from corral.linux import cgroups, posture
from corral.linux.guesttree import remove_tree
from corral.node import execs as exec_life
from corral.node import files, leftovers, making, snapshots, witness
from corral.node.body import Body
from corral.node.execcalls import ExecCalls
from corral.node.execs import Exec
from corral.node.filecalls import FileCalls
from corral.node.floors import Floors
from corral.node.interpreter import ensure_interpreter
from corral.node.journal import ExecEntry, InstanceEntry, Journal
from corral.node.pausing import Pausing
from corral.node.probes import HostChecks, Probes
from corral.node.snapshots import MemorySnapshots
from corral.node.spool import Spool
from corral.node.templatecalls import TemplateCalls
from corral.node.templates import Templates
from corral.ports.node import CreateInstance, HostFacts, InstanceReport, Progress
from corral.ports.runtime import Evidence, Instance, Runtime, RuntimeInfo, Stats

MADE_AT_ONCE = 8
"""At least; on hosts of more processors four for each of them."""


class LocalNode(FileCalls, ExecCalls, TemplateCalls, MemorySnapshots, Pausing, Floors):
    """See `ports.node.Node`. No I/O before `open`."""

    def __init__(
        self,
        state_dir: str,
        runtimes: Mapping[str, Runtime],
        templates: Templates,
        *,
        node_id: str,
        installation_id: str,
    ) -> None:
        self.node_id = node_id
        self._state = os.path.abspath(state_dir)
        self._runtimes = dict(runtimes)
        self._templates = templates
        self._installation = installation_id
        self._journal = Journal(os.path.join(self._state, "node"))
        self._bodies: dict[str, Body] = {}
        self._creating: dict[str, asyncio.Future[InstanceReport]] = {}
        self._turns = making.Turns(max(MADE_AT_ONCE, 4 * (os.cpu_count() or 1)))
        self._destroying: dict[str, asyncio.Task[Evidence]] = {}
        self._saves, self._writing = set(), {}
        self._execs: dict[str, Exec] = {}
        self._unnoted, self._spools = {}, {}
        self._lost: asyncio.Queue[str] = asyncio.Queue()
        self._probes = Probes(os.path.join(self._state, "node", "probes.json"), self._runtimes)
        self._checks = HostChecks(os.path.join(self._state, "node", "checks.json"), posture.checks)

    # -- opening and closing -------------------------------------------------------------------------------------------
    async def open(self, progress: Progress | None = None) -> None:
        for name, mode in (("node", 0o700), ("i", 0o711), ("spool", 0o700)):
            path = os.path.join(self._state, name)
            os.makedirs(path, exist_ok=True)
            os.chmod(path, mode)
        self._journal.open()
        entries = list(self._journal.instances.values())
        self._refuse_a_copy(entries)
        if entries and progress:
            progress(f"adopting {len(entries)} sandboxes", None)
        open_execs: dict[str, list[ExecEntry]] = {}
        for entry in self._journal.open_execs():
            open_execs.setdefault(entry.instance_id, []).append(entry)
        await asyncio.gather(*(self._adopt(entry, open_execs.pop(entry.instance_id, [])) for entry in entries))
        for orphans in open_execs.values():
            self._end_lost(orphans)

    def _refuse_a_copy(self, entries: list[InstanceEntry]) -> None:
        """What the journal names may be another directory's: to adopt or remove it would reach into the original's sandboxes."""
        for entry in entries:
            made = entry.data.get("ref", {}).get("directory")
            here = self._directory(entry.instance_id)
            if not isinstance(made, str) or made == here or not os.path.isdir(made):
                continue  # a directory that has moved is ours
            if not (os.path.isdir(here) and os.path.samefile(made, here)):
                self._journal.close()
                raise CorralError(
                    "conflict",
                    f"{self._state} is a copy of a state directory whose sandboxes lie in {os.path.dirname(made)}",
                    hint="remove corral.db*, node/ and i/ from the copy, or use an empty state directory",
                    retryable=False,
                )

    async def close(self) -> None:
        try:
            await self._end_saves()
        finally:
            try:
                bodies = list(self._bodies.values())
                for job in list(self._execs.values()):
                    self._note_running(job)
                await asyncio.gather(*(body.let_go() for body in bodies), return_exceptions=True)
            finally:
                self._bodies.clear()
                self._execs.clear()
                self._journal.close()

    async def _adopt(self, entry: InstanceEntry, execs: list[ExecEntry]) -> None:
        runtime = self._runtimes.get(entry.data["runtime"])
        if runtime is None:
            return  # of an adapter that is not there today: left alone, shown by `leftovers`
        body: Body | None = None
        try:
            if entry.state == "live":
                instance = await runtime.attach(making.ref_from_json(entry.data["ref"]))
                if instance is not None:
                    body = await self._reconnect(entry, runtime, instance, execs)
        except (CorralError, OSError):
            body = None
        if body is not None:
            return
        self._end_lost(execs)
        if entry.state == "live":
            self._journal.set_instance(entry.instance_id, state="condemned")
            self._lost.put_nowait(entry.instance_id)
            return
        with contextlib.suppress(CorralError, OSError):
            await self._undo(entry.instance_id, runtime)

    async def _reconnect(
        self, entry: InstanceEntry, runtime: Runtime, instance: Instance, execs: list[ExecEntry]
    ) -> Body:
        body = self._body(entry.instance_id, runtime, instance, entry.data)
        body.background = True  # what earlier execs left is not remembered
        if await self._find_pause(body):
            # Nobody inside answers. Its execs are known, so that they can be waited for and ended; the rest comes with the thaw.
            self._bodies[entry.instance_id] = body
            for one in execs:
                job = self._exec(
                    body, one.exec_id, one.data, since_ticks=one.data["since_ticks"], ended_by=one.ended_by
                )
                if one.state == "running":
                    job.assume_started()
                body.execs[one.exec_id] = job
            body.spawn(self._reach_thawed(entry, body, execs))
        else:
            await self._reach(entry, body, execs)
        body.watch(max(0.0, entry.data["deadline_at"] - time.monotonic()))
        return body

    async def _reach_thawed(self, entry: InstanceEntry, body: Body, execs: list[ExecEntry]) -> None:
        try:
            await self._reach(entry, body, execs)
        except CorralError as error:
            if error.code == "shutting_down":
                raise
            for job in body.execs.values():  # it is gone, or of no use: so are they
                if job.task is None:
                    job.follow(None)

    async def _reach(self, entry: InstanceEntry, body: Body, execs: list[ExecEntry]) -> None:
        """Connect to the guest of an adopted instance, and follow its execs."""
        client = await body.client()
        if client.hello.quiet:
            await self._wake(body)
        if client.hello.floor < entry.floor:
            await client.fence(entry.floor, "adopt")
        self._bodies[entry.instance_id] = body
        await body.find_pid1()
        for one in execs:
            try:
                status = await client.exec_status(one.exec_id)
            except CorralError as error:
                if error.code != "not_found":
                    raise
                status = None
            started_at = one.data.get("started_at")
            known = status is not None and status["state"] != "unknown"
            spec = one.data
            job = self._execs.get(one.exec_id) or self._exec(
                body, one.exec_id, spec, since_ticks=spec["since_ticks"], ended_by=one.ended_by
            )
            if not known:
                self._execs.pop(one.exec_id, None)
                body.execs.pop(one.exec_id, None)
                job.spool.finish()
                # The guest never had it; but who asks after a crash is told no more than that it is unknown (`decisions`).
                infra = "the platform was interrupted while the program was being started"
                self._journal.end_exec(one.exec_id, exec_life.facts_to_json(ExecFacts(None, infra=infra)))
                continue
            if (older := spec.get("older")) is not None:
                job.older = frozenset((pid, began) for pid, began in older)
            if (before := spec.get("before")) is not None:
                job.meter.before = Stats(**before)
            else:
                # What was used before is not known: no difference is told, and no peak that may be an earlier program's.
                now = await body.stats()
                job.meter.before = Stats(peak_memory_bytes=now.peak_memory_bytes, peak_pids=now.peak_pids)
            # Not noted yet when its owner died: it began when it was journalled, within a tick.
            since = started_at if started_at is not None else spec["since_ticks"] / os.sysconf("SC_CLK_TCK")
            clock = time.monotonic() if started_at is not None else time.clock_gettime(time.CLOCK_BOOTTIME)
            job.paused_s = float(spec.get("paused_s", 0.0))
            job.follow(status, max(0.0, clock - since - job.paused_s - self._stands_s(body)))
            if job.ended_by is not None and not body.paused:
                body.spawn(job.end(job.ended_by))
            elif (given := job.spool.saved_input()) is not None:
                body.spawn(self._feed(body, one.exec_id, *given))
        await self._forget_save(entry.instance_id)
        await self._settle_pause(body)

    def _end_lost(self, execs: Sequence[ExecEntry]) -> None:
        for one in execs:
            spool = Spool(self._spool_path(one.exec_id), 0, ended=True)
            streams = spool.facts(int(one.data.get("limits", {}).get("output_bytes", Limits().output_bytes)))
            facts = ExecFacts(
                started=True if one.state == "running" else None,
                ended_by=one.ended_by,  # type: ignore[arg-type]
                sandbox_lost=True,
                stdout=streams["stdout"],
                stderr=streams["stderr"],
            )
            self._journal.end_exec(one.exec_id, exec_life.facts_to_json(facts))

    def _body(self, instance_id: str, runtime: Runtime, instance: Instance, data: dict[str, Any]) -> Body:
        limits, modes = Limits(**data["limits"]), LimitModes(**data["modes"])
        disk_base = int(data.get("disk_base", 0))
        body = Body(instance_id, runtime, instance, limits, modes, disk_base, self._journal, self._gone)
        body.born_as = data.get("born_as", instance_id)
        return body

    async def _gone(self, body: Body) -> None:
        """PID 1 of a body ended. If nobody asked for it, the control plane has to hear of it."""
        if body.destroying is not None or body.leaving or self._bodies.get(body.instance_id) is not body:
            return
        with contextlib.suppress(CorralError, KeyError):
            self._journal.set_instance(body.instance_id, state="condemned")
        self._lost.put_nowait(body.instance_id)

    async def lost(self) -> str:
        return await self._lost.get()

    # -- what is here --------------------------------------------------------------------------------------------------
    async def runtimes(self, *, fresh: bool = False) -> list[RuntimeInfo]:
        return await self._probes.all(fresh=fresh)

    async def host(self) -> HostFacts:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        kind = await asyncio.to_thread(lambda: cgroups.host().kind)
        user: Literal["root", "user"] = "root" if os.geteuid() == 0 else "user"
        return HostFacts(kind, user, memory, len(os.sched_getaffinity(0)))

    async def posture(self, *, fresh: bool = False) -> list[Check]:
        return await self._checks.all(fresh=fresh)

    async def instances(self) -> list[str]:
        return list(self._journal.instances)

    # -- creation ------------------------------------------------------------------------------------------------------
    async def create(self, request: CreateInstance, progress: Progress | None = None) -> InstanceReport:
        return await self._create_once(request, progress, None)

    async def restore_instance(
        self, request: CreateInstance, image: str, progress: Progress | None = None
    ) -> InstanceReport:
        return await self._create_once(request, progress, image)

    async def _create_once(
        self, request: CreateInstance, progress: Progress | None, image: str | None
    ) -> InstanceReport:
        key = request.instance_id
        if not is_id(key, "ins"):
            raise CorralError("invalid_value", f"not an instance id: {key!r}")
        if key in self._creating:
            return await asyncio.shield(self._creating[key])
        entry = self._journal.instances.get(key)
        if entry is not None:
            body = self._alive(key)
            self._check_fence(body, request.fence)
            data = entry.data
            return InstanceReport(key, data["ref"], data["template_digest"], data["security_level"], {})
        if request.fence < (floor := self._journal.floor_of(request.sandbox_id)):
            # Only a store that was set back issues a token twice; who held it then must not be taken for who holds it now.
            detail = f"fence {request.fence} is below {floor}, which {request.sandbox_id} has had"
            raise CorralError("lease_lost", detail, floor=str(floor))
        future = self._creating[key] = asyncio.get_running_loop().create_future()
        try:
            with self._templates.hold(request.template):
                report = await self._create(request, progress, image)
        except BaseException as error:
            if isinstance(error, CorralError):
                future.set_exception(error)
                future.exception()
            else:
                future.cancel()
            raise
        else:
            future.set_result(report)
            return report
        finally:
            del self._creating[key]

    async def _create(self, request: CreateInstance, progress: Progress | None, image: str | None) -> InstanceReport:
        runtime = self._runtimes.get(request.runtime)
        if runtime is None:
            raise CorralError("runtime_unavailable", f"there is no runtime {request.runtime!r}", field="/runtime")
        clock = making.Clock()
        info = await self._probes.one(request.runtime)
        if not info.usable:
            raise CorralError("runtime_unavailable", f"{request.runtime}: {info.reason}", hint="see `corral doctor`")
        template = await self._templates.ensure(request.template, progress)
        snapshotted: dict[str, Any] = {}
        if image is None:
            interpreter = str(await asyncio.to_thread(ensure_interpreter, self._state, progress))
        else:
            await self._snapshotting(request.runtime, runtime)
            snapshot = snapshots.read(image)
            snapshot.check(
                request.runtime,
                info.version,
                template.digest,
                request.limits,
                seccomp=request.seccomp,
                unsafe=request.unsafe,
            )
            interpreter = snapshots.interpreter(self._state, snapshot)
            snapshotted = {"born_as": snapshot.instance_id, "disk_base": snapshot.disk_base}
        clock.lap("template_ms")
        deadline_at = time.monotonic() + request.deadline_s
        async with self._turns.of(request.instance_id):
            clock.lap("turn_ms")
            witness.note("create", instance=request.instance_id, sandbox=request.sandbox_id, fence=request.fence)
            body = await making.make(
                request,
                runtime,
                self._journal,
                directory=self._directory(request.instance_id),
                rootfs=template.path,
                interpreter=interpreter,
                installation_id=self._installation,
                facts={
                    "runtime": request.runtime,
                    "template_digest": template.digest,
                    "security_level": info.security_level,
                    "modes": dataclasses.asdict(info.limits),
                    "limits": dataclasses.asdict(request.limits),
                    "deadline_at": deadline_at,
                    "interpreter": os.path.basename(interpreter),
                    "sandbox_id": request.sandbox_id,
                    **snapshotted,
                },
                image=image,
                body_of=lambda instance, data: self._body(request.instance_id, runtime, instance, data),
                clock=clock,
            )
        self._bodies[request.instance_id] = body
        self._note("fenced", request.instance_id, fence=request.fence, mode="kill")
        body.watch(max(0.0, deadline_at - time.monotonic()))
        ref = making.ref_to_json(body.ref)
        return InstanceReport(request.instance_id, ref, template.digest, info.security_level, clock.phases)

    def _directory(self, instance_id: str) -> str:
        return os.path.join(self._state, "i", ulid_of(instance_id))

    # -- destruction ---------------------------------------------------------------------------------------------------
    async def destroy(self, instance_id: str, reason: str) -> Evidence:
        if instance_id in self._creating:
            self._turns.give_up(instance_id)
            with contextlib.suppress(CorralError, asyncio.CancelledError):
                await asyncio.shield(self._creating[instance_id])
        if instance_id in self._destroying:
            return await asyncio.shield(self._destroying[instance_id])
        entry = self._journal.instances.get(instance_id)
        if entry is None:
            return Evidence(True)
        runtime = self._runtimes.get(entry.data["runtime"])
        if runtime is None:
            return Evidence(False, (f"instance {instance_id}: its runtime {entry.data['runtime']} is not here",))
        # A task of its own: half a destruction because the caller gave up would be a leftover.
        task = self._destroying[instance_id] = asyncio.create_task(self._destroy(instance_id, runtime, reason))
        task.add_done_callback(lambda _: self._destroying.pop(instance_id, None))
        return await asyncio.shield(task)

    async def _destroy(self, instance_id: str, runtime: Runtime, reason: str) -> Evidence:
        self._note("destroy", instance_id, reason=reason)
        self._journal.set_instance(instance_id, state="condemned")
        body = self._bodies.get(instance_id)
        if body is not None:
            body.destroying = reason
            why = reason if reason in _ENDED_BY else "sandbox_deleted"
            for job in list(body.execs.values()):
                if job.ended_by is None and not body.gone.is_set():  # else PID 1 had ended before we ended it
                    job.ended_by = why
                    self._journal.ending(job.exec_id, why)
            with contextlib.suppress(CorralError, OSError):
                await runtime.kill(body.ref)
            jobs = [asyncio.shield(job.done) for job in body.execs.values()]
            if jobs:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 5.0)
            self._bodies.pop(instance_id, None)
            await body.let_go()
        await self._await_writing(instance_id)
        return await self._undo(instance_id, runtime)

    async def _undo(self, instance_id: str, runtime: Runtime) -> Evidence:
        sandbox = self._sandbox_of(instance_id)
        evidence = await making.undo(self._journal, runtime, self._directory(instance_id), instance_id)
        witness.note("destroyed", instance=instance_id, sandbox=sandbox, clean=evidence.clean)
        return evidence

    def _sandbox_of(self, instance_id: str) -> str | None:
        entry = self._journal.instances.get(instance_id)
        return None if entry is None else entry.data.get("sandbox_id")

    def _note(self, kind: str, instance_id: str, **facts: Any) -> None:
        witness.note(kind, instance=instance_id, sandbox=self._sandbox_of(instance_id), **facts)

    # -- fence and deadline --------------------------------------------------------------------------------------------
    def _alive(self, instance_id: str) -> Body:
        body = self._living(instance_id)
        body.check_free()
        return body

    def _living(self, instance_id: str) -> Body:
        body = self._bodies.get(instance_id)
        if body is not None and body.destroying is not None:
            raise CorralError("sandbox_deleted", f"instance {instance_id} is being destroyed")
        if body is not None and not body.paused:
            body.check_free()
        if body is None or body.gone.is_set():
            known = instance_id in self._journal.instances
            raise CorralError("sandbox_lost" if known else "not_found", f"instance {instance_id} is not alive here")
        return body

    def _check_fence(self, body: Body, fence: Fence) -> None:
        if fence < body.floor:
            raise CorralError("lease_lost", f"fence {fence} is below {body.floor}", floor=str(body.floor))

    async def fence(self, instance_id: str, fence: Fence, mode: Literal["kill", "adopt"]) -> None:
        body = self._living(instance_id)
        self._check_fence(body, fence)
        self._note("floor", instance_id, fence=fence, mode=mode)
        self._journal.set_instance(instance_id, floor=fence)
        older = [job for job in body.execs.values() if job.fence < fence] if mode == "kill" else []
        if body.paused:  # nothing inside can act, and the guest hears of it before anything can
            for job in older:
                job.decide("lease_lost")
            return
        if older:
            await asyncio.gather(*(job.end("lease_lost") for job in older))
        report = await (await body.client()).fence(fence, mode)
        if mode == "kill" and not report["killed_all"]:
            raise CorralError("infra_error", f"something in {instance_id} cannot be killed", retryable=False)
        self._note("fenced", instance_id, fence=fence, mode=mode)

    async def extend_deadline(self, instance_id: str, fence: Fence, deadline_s: float) -> None:
        body = self._living(instance_id)
        self._check_fence(body, fence)
        entry = self._journal.instances[instance_id]
        data = {**entry.data, "deadline_at": time.monotonic() + deadline_s}
        self._journal.put_instance(dataclasses.replace(entry, data=data))
        body.set_deadline(deadline_s)
        if not body.paused:  # else the guest is told when it runs again
            await (await body.client()).extend_deadline(deadline_s, fence=fence)

    # -- files: see `FileCalls` -----------------------------------------------------------------------------------------
    def _mark_path(self, instance_id: str) -> str:
        return files.mark_path(self._directory(instance_id))

    async def stats(self, instance_id: str) -> Stats:
        return await self._living(instance_id).stats()

    # -- what is left over ---------------------------------------------------------------------------------------------
    async def leftovers(self) -> list[dict[str, Any]]:
        owned, execs = self._owned(), self._journal.exec_ids()
        condemned = set(self._journal.instances) - owned
        found = await asyncio.to_thread(
            leftovers.find, self._state, self._installation, owned=owned, condemned=condemned, execs=execs
        )
        unfinished = await asyncio.to_thread(self._templates.unfinished)
        found += [{"kind": "template_build", "id": p.name, "instance_id": None, "path": str(p)} for p in unfinished]
        # What came, or began to be destroyed, while we looked is somebody's.
        owned, execs = self._owned(), self._journal.exec_ids()
        return [
            item
            for item in found
            if item["instance_id"] not in owned and not (item["kind"] == "spool" and item["id"] in execs)
        ]

    def _owned(self) -> set[str]:
        """Instances that somebody looks after, be it their end."""
        kept = {key for key, entry in self._journal.instances.items() if entry.state != "condemned"}
        return kept | set(self._creating) | set(self._bodies) | set(self._destroying)

    async def gc(self) -> dict[str, int]:
        if self._destroying:
            await asyncio.wait(set(self._destroying.values()), timeout=30.0)
        before = await self.leftovers()
        counts: dict[str, int] = {}
        for instance_id in {str(item["instance_id"]) for item in before if item["instance_id"]}:
            await self._gc_instance(instance_id)
        for item in before:
            if item["kind"] == "spool" and item["id"] not in self._journal.exec_ids():
                await asyncio.to_thread(remove_tree, str(item["path"]))
        await asyncio.to_thread(self._templates.remove_unfinished)
        after = await self.leftovers()
        still = {(item["kind"], item["id"]) for item in after}
        for item in before:
            if (item["kind"], item["id"]) not in still:
                counts[item["kind"]] = counts.get(item["kind"], 0) + 1
        counts["failed"] = len(after)
        return counts

    async def _gc_instance(self, instance_id: str) -> None:
        entry = self._journal.instances.get(instance_id)
        if entry is not None:
            if entry.state == "condemned" or instance_id not in self._bodies:
                with contextlib.suppress(CorralError, OSError):
                    await self.destroy(instance_id, "gc")
            return
        # Nobody remembers who made it: every adapter finds its own by directory and id, and only that.
        # All processes end first, as only the adapter that made them may see them: nothing is taken from under what lives. Then each
        # removes what it knows, twice where the mounts of one keep the disk that another one sees.
        directory = self._directory(instance_id)
        for runtime in self._runtimes.values():
            with contextlib.suppress(CorralError, OSError):
                await runtime.kill(runtime.partial_ref(directory, instance_id))
        for _ in range(2):
            clean = [await self._is_destroyed(runtime, directory, instance_id) for runtime in self._runtimes.values()]
            if all(clean):
                await asyncio.to_thread(remove_tree, directory)
                return

    async def _is_destroyed(self, runtime: Runtime, directory: str, instance_id: str) -> bool:
        try:
            return (await runtime.destroy(runtime.partial_ref(directory, instance_id))).clean
        except (CorralError, OSError):
            return False


_ENDED_BY = frozenset({"cancelled", "sandbox_deleted", "lease_lost", "timeout", "circuit_breaker"})
