"""A whole node with a captured guest in one sandbox, and an honest neighbour in another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from corral.adapters.runtimes import fake
from corral.adapters.runtimes.fake import FakeRuntime
from corral.channel import client as client_module
from corral.domain.facts import ExecFacts
from corral.domain.fence import Fence
from corral.domain.ids import new_id
from corral.domain.limits import LimitModes, Limits
from corral.domain.result import judge, result_document
from corral.errors import CODES, CorralError
from corral.linux.guesttree import remove_tree
from corral.linux.process import ProcessRef
from corral.node import body as body_module
from corral.node import execs as execs_module
from corral.node import making, service, transfers, watch
from corral.node.service import LocalNode
from corral.node.templates import Template
from corral.ports.node import CreateInstance, ExecSpec
from corral.ports.runtime import Evidence, HostTree, Instance, InstanceRef, InstanceSpec, RuntimeInfo, Stats

from . import trees
from .channel import check_text, check_words
from .clock import Broken, Secrets, Time, VirtualLoop, conduct, replaced
from .guest import STREAMS, ModelGuest
from .tape import Case, Tape

FENCE = Fence(1, 1)
LIMITS = Limits(wall_s=20.0, output_bytes=5000, output_kill_bytes=300_000, disk_bytes=1 << 24, inodes=5000)
MODES = LimitModes(output="enforced", wall="enforced")
FIRST_PID = 5_000_000  # beyond what the kernel gives: nothing of ours is ever meant by accident
MOST_STEPS = 16
BOUND_S = {"exec": 160.0, "file": 1500.0, "short": 160.0, "destroy": 160.0}
"""Virtual seconds, by the clocks of the node: three connections, a request, a kill, and for files the time without a byte moved."""
LAST_S = 1800.0


class StubTemplates:
    def __init__(self, path: Path) -> None:
        self.path = path

    async def ensure(self, name: str, progress: Any = None) -> Template:
        return Template(name, "sha256:0", str(self.path), ("python",))

    def hold(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def describe(self) -> list[dict[str, Any]]:
        return []


class HostileRuntime:
    """Sandboxes whose guest is the model's; what the host would see of their processes is what the model says really lives."""

    name = "hostile"

    def __init__(self, loop: VirtualLoop, tape: Tape) -> None:
        self.loop = loop
        self.tape = tape
        self.guests: dict[str, ModelGuest] = {}
        self.pids: dict[tuple[str, str], int] = {}

    async def probe(self) -> RuntimeInfo:
        return RuntimeInfo(self.name, True, None, 1, "1", {"host_pids": True, "two_uids": True}, MODES, 0.0)

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        tree = os.path.join(spec.directory, "disk")
        for name in ("workspace", "home", "var_tmp"):
            os.makedirs(os.path.join(tree, name), exist_ok=True)
            os.chown(os.path.join(tree, name), trees.UID, trees.GID)
        guest = self.guests[spec.instance_id] = ModelGuest(self.loop, self.tape, spec.instance_id)
        guest.workspace = os.path.join(tree, "workspace")
        listener = control.dup()
        listener.setblocking(False)
        await guest.listen(listener)
        return self._instance(self.partial_ref(spec.directory, spec.instance_id))

    def _instance(self, ref: InstanceRef) -> Instance:
        return Instance(ref, HostTree(os.path.join(ref.directory, "disk"), trees.UID, trees.GID, "directory"))

    def partial_ref(self, directory: str, instance_id: str) -> InstanceRef:
        return InstanceRef(self.name, instance_id, directory, {})

    async def attach(self, ref: InstanceRef) -> Instance | None:
        guest = self.guests.get(ref.instance_id)
        return None if guest is None or guest.gone.is_set() else self._instance(ref)

    async def stats(self, ref: InstanceRef) -> Stats:
        return Stats(oom_kills=0, pids=len(await self.processes(ref)), memory_bytes=1 << 20)

    async def reset_peaks(self, ref: InstanceRef) -> bool:
        return False

    async def processes(self, ref: InstanceRef) -> list[int]:
        guest = self.guests.get(ref.instance_id)
        if guest is None or guest.gone.is_set():
            return []
        return [FIRST_PID, *(self.pid(guest, run.exec_id) for run in guest.runs.values() if run.alive)]

    def pid(self, guest: ModelGuest, exec_id: str) -> int:
        return self.pids.setdefault((guest.instance_id, exec_id), FIRST_PID + 1 + len(self.pids))

    def began(self, pid: int) -> int | None:
        """Start time of a process of the model, in ticks; None when it lives no more."""
        if pid == FIRST_PID:
            return 1
        for (instance, exec_id), known in self.pids.items():
            if known == pid:
                guest = self.guests[instance]
                run = guest.runs[exec_id]
                return int(run.began * 100) if run.alive and not guest.gone.is_set() else None
        return None

    async def kill(self, ref: InstanceRef) -> None:
        if (guest := self.guests.get(ref.instance_id)) is not None:
            guest.end()

    async def wait_gone(self, ref: InstanceRef) -> None:
        if (guest := self.guests.get(ref.instance_id)) is not None:
            await guest.gone.wait()

    async def destroy(self, ref: InstanceRef) -> Evidence:
        await self.kill(ref)
        left = remove_tree(os.path.join(ref.directory, "disk"))
        return Evidence(not left, tuple(left))


class World:
    """One node, its two sandboxes, and the calls under way."""

    def __init__(self, loop: VirtualLoop, base: Path, case: Case) -> None:
        self.loop = loop
        self.base = base
        self.host = Tape(case.host)
        self.runtime = HostileRuntime(loop, Tape(case.guest))
        self.fake = FakeRuntime(str(base / "state"), installation_id="fuzz")
        self.node: LocalNode = None  # type: ignore[assignment]
        self.instance = ""
        self.neighbour = ""
        self.tasks: list[tuple[str, asyncio.Task[Any]]] = []
        self.execs: list[str] = []
        self.alone: dict[str, bool] = {}
        self.working = 0
        self.specs: dict[str, ExecSpec] = {}
        self._ids = 0

    def fresh(self, prefix: str) -> str:
        self._ids += 1
        return new_id(prefix, 1_000_000, self._ids.to_bytes(10, "big"))

    async def open(self) -> None:
        templates: Any = StubTemplates(self.base)
        runtimes: Any = {"hostile": self.runtime, "fake": self.fake}
        self.node = LocalNode(str(self.base / "state"), runtimes, templates, node_id="n", installation_id="fuzz")
        await self.node.open()

    async def create(self, runtime: str) -> str:
        request = CreateInstance(
            self.fresh("ins"), self.fresh("sbx"), 1, FENCE, runtime, "host", LIMITS, deadline_s=100_000.0
        )
        return (await self.node.create(request)).instance_id

    # -- calls -----------------------------------------------------------------------------------------------------------------
    def call(self, kind: str, what: str, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(self._timed(kind, what, work))
        task.add_done_callback(lambda _: work.close())
        self.tasks.append((what, task))

    async def _timed(self, kind: str, what: str, work: Coroutine[Any, Any, Any]) -> Any:
        began = self.loop.now
        self.working += 1
        if self.working > 1:
            self.alone = dict.fromkeys(self.alone, False)
        try:
            return await work
        except CorralError as error:
            if error.code not in CODES:
                raise Broken(f"{what} ended with the unknown code {error.code}") from error
            check_words(what, error)
            return error
        finally:
            self.working -= 1
            if (took := self.loop.now - began) > BOUND_S[kind]:
                raise Broken(f"{what} took {took:.0f} s of at most {BOUND_S[kind]:.0f}")

    async def step(self) -> None:
        tape, node, instance = self.host, self.node, self.instance
        name = tape.choose(self.execs) if self.execs else self.fresh("exe")
        path = tape.choose(("f", "a/b", "/etc/x", "\udcff", "é"))
        kind = tape.below(24)
        if kind < 5:
            self._exec()
        elif kind == 5:
            self.call("exec", "stream", self._stream(name))
        elif kind == 6:
            data = b"i" * tape.choose((0, 10, 300_000))
            self.call("exec", "stdin", node.stdin_exec(name, data, tape.below(2) == 1))
        elif kind == 7:
            self.call("short", "end", node.end_exec(name, tape.choose(("cancelled", "timeout"))))
        elif kind == 8:
            self.call("short", "signal", node.signal_exec(name, 15))
        elif kind == 9:
            self.call("short", "put", node.put_files(instance, FENCE, [(tape.choose(trees.PATHS), 0o644, b"x")]))
        elif kind == 10:
            self.call("file", "put_tar", node.put_tar(instance, FENCE, _blocks(tape.upto(3)), "d"))
        elif kind == 11:
            self.call("file", "get_tar", self._drain(node.get_tar(instance, path)))
        elif kind == 12:
            self.call("file", "stat", self._stat(path))
        elif kind == 13:
            self.call("file", "list", self._list(path))
        elif kind == 14:
            self.call("file", "read", self._read(path))
        elif kind == 15:
            work = node.write_file(instance, FENCE, path, _blocks(tape.choose((0, 1, 2, 12))), overwrite=True)
            self.call("file", "write", work)
        elif kind == 16:
            self.call("file", "move", node.move_file(instance, FENCE, path, "g", overwrite=True))
        elif kind == 17:
            self.call("file", "mkdir", node.make_directory(instance, FENCE, path, parents=True, mode=0o755))
        elif kind == 18:
            self.call("file", "remove", node.remove_file(instance, FENCE, path, recursive=True))
        elif kind == 19:
            self.call("file", "watch", self._watch(path))
        elif kind == 20:
            self.call("short", "collect", self._collect(tape.below(2) == 1))
        elif kind == 21:
            mode: Any = tape.choose(("adopt", "kill"))
            self.call("short", "fence", node.fence(instance, FENCE, mode))
            self.call("short", "deadline", node.extend_deadline(instance, FENCE, 100_000.0))
        elif kind == 22:
            await self._restart()
        else:
            open_ = [task for _, task in self.tasks if not task.done()]
            if open_ and tape.below(2):
                tape.choose(open_).cancel()
        await asyncio.sleep(tape.choose((0, 0, 0.01, 3.0, 25.0)))

    def _exec(self) -> None:
        tape = self.host
        exec_id = self.fresh("exe")
        self.execs.append(exec_id)
        argv = tape.choose(
            (
                ("say", str(tape.choose((0, 5, 4096, 70_000, 400_000))), "7", str(tape.choose((0, 0, 1)))),
                ("later", "5"),
                ("wait",),
                ("cat",),
                ("plant",),
                ("cannot",),
            )
        )
        background: Any = tape.choose(("kill", "keep"))
        stdin = b"input" if argv[0] == "cat" else None
        spec = ExecSpec(exec_id, argv, limits=LIMITS, background=background, stdin=stdin, stdin_open=tape.below(4) == 1)
        self.specs[exec_id] = spec
        self.alone[exec_id] = self.working == 0
        self.call("exec", f"exec {argv[0]}", self._run(spec))

    async def _run(self, spec: ExecSpec) -> None:
        node = self.node
        await node.start_exec(self.instance, FENCE, spec)
        job = node._execs.get(spec.exec_id)
        facts = await node.wait_exec(spec.exec_id)
        self._judge(spec, facts, job)
        for name in STREAMS:
            kept = b"".join([piece async for piece in node.kept_output(spec.exec_id, name)])  # type: ignore[arg-type]
            told = getattr(facts, name)
            if len(kept) != told.kept:
                raise Broken(f"{len(kept)} bytes are kept where {told} is told")
            head = kept[: told.head]
            guest = self.runtime.guests[self.instance]
            with self.loop.elsewhere():  # we only look on: this is no turn of the host's
                known = guest.said.sent(spec.exec_id, name, head)
            if not known:
                raise Broken(f"{name} holds what was never sent")
        await node.timeline(spec.exec_id)

    def _judge(self, spec: ExecSpec, facts: ExecFacts, job: Any) -> None:
        verdict = judge(facts, LIMITS, MODES)
        result_document
        for text in (verdict.hint or "", facts.infra or ""):
            check_text("a result", text)
        if facts.start_failure is not None:
            check_text("a start failure", facts.start_failure.message + facts.start_failure.errno)
        guest = self.runtime.guests[self.instance]
        if verdict.reason == "ok" and not guest.said.ended_well(spec.exec_id):
            raise Broken("ok without a word of the guest")
        run = guest.runs.get(spec.exec_id)
        lives = run is not None and run.alive and not guest.gone.is_set()
        watched = self.alone[spec.exec_id] and job is not None and job.accountable
        if lives and watched and facts.killed_all and (verdict.reason == "ok" and spec.background == "kill"):
            raise Broken("ok, and the host sees it run")
        if lives and watched and facts.killed_all and facts.ended_by is not None:
            raise Broken(f"ended by {facts.ended_by}, and the host sees it run")
        if facts.exit_code is not None and facts.signal is not None:
            raise Broken("both an exit code and a signal")

    async def _stream(self, name: str) -> None:
        at = {"stdout": 0, "stderr": 0}
        async for chunk in self.node.stream_exec(name):
            if chunk.offset != at[chunk.stream]:
                raise Broken(f"a chunk at {chunk.offset} instead of {at[chunk.stream]}")
            at[chunk.stream] += len(chunk.data)  # type: ignore[union-attr]

    async def _drain(self, source: AsyncIterator[bytes]) -> None:
        async with contextlib.aclosing(source):  # type: ignore[type-var]
            total = 0
            async for piece in source:
                total += len(piece)
                if total > 64 << 20:
                    return

    async def _stat(self, path: str) -> None:
        check_info(await self.node.stat_file(self.instance, path))

    async def _list(self, path: str) -> None:
        page = await self.node.list_files(self.instance, path, limit=10)
        for info in page.items:
            check_info(info)
        if len(page.items) > 10:
            raise Broken("more entries than were asked for")

    async def _read(self, path: str) -> None:
        blocks = await self.node.read_file(self.instance, path)
        check_info(blocks.info)
        total = 0
        async for piece in blocks:
            total += len(piece)
        if total != blocks.length:
            raise Broken(f"{total} bytes of {blocks.length}, without an error")

    async def _watch(self, path: str) -> None:
        events = await self.node.watch_files(self.instance, path)
        try:
            count = 0
            async with asyncio.timeout(300):
                async for event in events:
                    check_text("an event", event.path + (event.source or ""))
                    count += 1
                    if count > 200:
                        return
        except TimeoutError:
            pass
        finally:
            await events.aclose()

    async def _collect(self, mark: bool) -> None:
        into = self.base / "into"
        found = await self.node.collect(self.instance, outputs=["**"], max_bytes=1 << 20, into=str(into), mark=mark)
        trees._check_copies(str(into), found)

    async def _restart(self) -> None:
        """The node lets go and another takes over, with the guest as it is."""
        for _, task in self.tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in self.tasks), return_exceptions=True)
        self._check_tasks()
        await self.node.close()
        await self.open()
        if self.neighbour not in self.node._bodies:
            raise Broken("the neighbour was not adopted")

    # -- the end ---------------------------------------------------------------------------------------------------------------
    def _check_tasks(self) -> None:
        for what, task in self.tasks:
            if not task.done():
                raise Broken(f"{what} still waits")
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        self.tasks.clear()

    async def finish(self) -> None:
        if self.tasks:
            await asyncio.wait([task for _, task in self.tasks], timeout=LAST_S)
        self._check_tasks()
        await self.check_neighbour()
        for instance in await self.node.instances():
            evidence = await self._timed("destroy", "destroy", self.node.destroy(instance, "test"))
            if isinstance(evidence, CorralError) or not evidence.clean:
                raise Broken(f"destroyed with leftovers: {evidence}")
        await self.node.close()
        guest = self.runtime.guests[self.instance] if self.instance else None
        if guest is not None:
            if guest.broken:
                raise Broken(guest.broken)
            if twice := [name for name, count in guest.counts.items() if count > 1]:
                raise Broken(f"started twice: {twice}")
        self.check_state()

    async def check_neighbour(self) -> None:
        """The other sandbox does its work, soon, as if nothing were."""
        began = self.loop.now
        exec_id = self.fresh("exe")
        await self.node.start_exec(self.neighbour, FENCE, ExecSpec(exec_id, ("cat",), stdin=b"undisturbed"))
        facts = await self.node.wait_exec(exec_id)
        out = b"".join([piece async for piece in self.node.kept_output(exec_id, "stdout")])
        if (facts.exit_code, out) != (0, b"undisturbed") or self.loop.now - began > 5:
            raise Broken(f"the neighbour was disturbed: {facts}, {out!r}, {self.loop.now - began:.1f} s")

    def check_state(self) -> None:
        """Only what is the node's own lies in its directory."""
        state = self.base / "state"
        if extra := set(os.listdir(state)) - {"node", "i", "spool"}:
            raise Broken(f"odd things in the state directory: {extra}")
        if left := os.listdir(state / "i"):
            raise Broken(f"instances are left: {left}")
        for name in os.listdir(state / "spool"):
            if extra := set(os.listdir(state / "spool" / name)) - {"stdout", "stderr", "order", "input", "input-eof"}:
                raise Broken(f"odd things in a spool: {extra}")
        if extra := set(os.listdir(state / "node")) - {"probes.json", "journal.db", "journal.db-wal", "journal.db-shm"}:
            raise Broken(f"odd things of the node: {extra}")


def check_info(info: Any) -> None:
    check_text("a file", info.path + (info.target or "") + (info.error or ""))
    if "\0" in info.path or info.size < 0:
        raise Broken(f"an odd file: {info}")


async def _blocks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(100_000)
        await asyncio.sleep(0)


def run(case: Case) -> VirtualLoop:
    """Target `node`."""
    base = Path(tempfile.mkdtemp(prefix="corral-fuzz-", dir=trees.SCRATCH))
    base.chmod(0o755)
    (base / "state").mkdir()
    world: World | None = None

    async def play(loop: VirtualLoop) -> None:
        nonlocal world
        world = World(loop, base, case)
        clock = Time(loop)
        processes = SimpleNamespace(start_time=world.runtime.began, ref_of=lambda pid: None, ProcessRef=ProcessRef)
        modules = (client_module, body_module, execs_module, service, watch, making, transfers, fake)
        times = {f"time{number}": (module, "time", clock) for number, module in enumerate(modules)}
        with replaced(
            **times,
            secrets=(transfers, "secrets", Secrets()),
            interpreter=(service, "ensure_interpreter", lambda state, progress=None: base),
            process=(body_module, "process", processes),
            runs=(body_module, "_runs", lambda pid, began, uid: world.runtime.began(pid) == began),
        ):
            await world.open()
            try:
                world.neighbour = await world.create("fake")
                with contextlib.suppress(CorralError):
                    world.instance = await world.create("hostile")
                steps = 0
                while world.instance and not world.host.over and steps < MOST_STEPS:
                    steps += 1
                    await world.step()
                await world.finish()
            finally:
                for guest in world.runtime.guests.values():
                    guest.end()
                for guest_ in world.fake._guests.values():
                    guest_.end()
            await asyncio.sleep(0)

    try:
        return conduct(play, 8 * 3600.0)
    finally:
        remove_tree(str(base / "state"))
        shutil.rmtree(base, ignore_errors=True)
