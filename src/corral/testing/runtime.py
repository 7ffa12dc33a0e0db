"""Conformance of a runtime: what `corral.ports.runtime` promises, as checks without a test framework.

`CHECKS` is a list of `(id, run)`; `await run_check(run, bench)` runs one and proves afterwards that the host is clean. A check that
does not apply to what the runtime declares raises `NotApplicable`. Limits are attacked to four times their size; what is declared
must hold. The witness is the host (/proc, mount table, loop devices, control groups, files), never the guest or the adapter.

`python -m corral.testing.runtime CONFIG ID` runs one check in a process of its own, which may have another uid and is where
creations die at fault points; CONFIG is the JSON of `Config`, the answer one JSON line.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from corral import faults
from corral.channel.client import Data, ExecStatus, GuestClient
from corral.domain.fence import Fence
from corral.domain.limits import MIB, Limits
from corral.linux import fifos, process, sockets
from corral.linux.process import ProcessRef
from corral.ports.runtime import Instance, InstanceRef, InstanceSpec, Runtime, RuntimeInfo, SupportsPause
from corral.testing import attacks

FENCE = Fence(1, 1)
LIMITS = Limits(memory_bytes=128 * MIB, pids=64, disk_bytes=24 * MIB, inodes=1000, tmp_bytes=4 * MIB, cpu=1.0)
TOLD_BY_OWN_KERNEL = ("priority", "nice")
"""Niceness, which gVisor only notes down: the host's scheduler is not asked."""
OF_THE_DISK = ("runtime.create.image", "runtime.create.loop", "runtime.create.disk")
GUEST_CAPABILITIES = (1 << 5) | (1 << 6) | (1 << 7)  # KILL, SETGID, SETUID


class NotApplicable(Exception):
    """The runtime does not declare what the check is about."""


@dataclass(frozen=True)
class Config:
    """What a check needs to know; JSON, so that it reaches processes of other uids."""

    factory: str
    """`module:Class`, called as `Class(state_dir, installation_id=...)`."""
    state_dir: str
    """May be closed to every other uid, like the directories above it."""
    rootfs: str
    interpreter: str
    guest_argv: tuple[str, ...]
    """Command of the guest, without its options."""
    python_argv: tuple[str, ...]
    """Command of the projected interpreter inside: attacks are written in Python and need nothing from the image."""
    scripted: bool = False
    """No real program runs inside (the fake): checks that need one do not apply."""
    installation_id: str = field(default_factory=lambda: f"conf{secrets.token_hex(4)}")

    @classmethod
    def from_json(cls, text: str) -> Config:
        values = json.loads(text)
        values["guest_argv"], values["python_argv"] = tuple(values["guest_argv"]), tuple(values["python_argv"])
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def make(self) -> Runtime:
        module, _, name = self.factory.partition(":")
        made = getattr(importlib.import_module(module), name)(self.state_dir, installation_id=self.installation_id)
        return cast(Runtime, made)

    def spec(
        self, limits: Limits = LIMITS, unsafe: frozenset[str] = frozenset(), seccomp: str = "default"
    ) -> InstanceSpec:
        """A new instance: its directory is made as the node makes it."""
        name = secrets.token_hex(8)
        instance_id = f"ins_{name}"
        directory = f"{self.state_dir}/i/{name}"
        os.makedirs(directory)
        for path in (f"{self.state_dir}/i", directory):
            os.chmod(path, 0o711)  # noqa: S103
        options = ("--instance", instance_id, "--installation", self.installation_id, "--deadline", "300")
        return InstanceSpec(
            instance_id=instance_id,
            sandbox_id=f"sbx_{name}",
            incarnation=1,
            installation_id=self.installation_id,
            directory=directory,
            rootfs=self.rootfs,
            interpreter=self.interpreter,
            guest_argv=(*self.guest_argv, *options),
            limits=limits,
            seccomp=seccomp,
            unsafe=unsafe,
        )


@dataclass(frozen=True)
class Outcome:
    """How one exec ended."""

    status: ExecStatus
    stdout: bytes
    stderr: bytes

    @property
    def ok(self) -> bool:
        return self.status["exit_code"] == 0

    def json(self) -> Any:
        assert self.ok, (self.status, self.stderr.decode("utf-8", "replace"))
        return json.loads(self.stdout)


class Box:
    """One live instance with a client of its guest."""

    def __init__(self, bench: Bench, spec: InstanceSpec, instance: Instance) -> None:
        self.bench, self.spec, self.instance = bench, spec, instance
        self._client: GuestClient | None = None

    @property
    def ref(self) -> InstanceRef:
        return self.instance.ref

    def _connect(self) -> socket.socket | fifos.Ends:
        if self.instance.control == "fifo":
            return fifos.connect(self.spec.directory)
        try:
            return sockets.connect(self.spec.directory, "s", timeout_s=15)
        except ConnectionRefusedError:
            return sockets.connect(self.spec.directory, "again", timeout_s=15)

    async def client(self) -> GuestClient:
        if self._client is None:
            self._client = await GuestClient.connect(self._connect())
            if not self._client.hello.identified:
                entropy = secrets.token_bytes(32)
                await self._client.identify(self.spec.sandbox_id, FENCE, now=time.time(), entropy=entropy)
        return self._client

    async def start(self, argv: list[str], **more: Any) -> str:
        if self.bench.config.scripted and "/" in argv[0]:
            raise NotApplicable("nothing real runs inside")
        exec_id = f"exe_{secrets.token_hex(8)}"
        spec = {"exec_id": exec_id, "argv": argv, "cwd": "/workspace", "env": {"PATH": "/bin:/usr/bin"}, **more}
        status = await (await self.client()).start_exec(spec, fence=FENCE)
        assert status["state"] != "failed", status
        return exec_id

    async def result(self, exec_id: str) -> Outcome:
        out = {"stdout": bytearray(), "stderr": bytearray()}
        async with asyncio.timeout(120):
            async for item in (await self.client()).attach(exec_id):
                if isinstance(item, Data):
                    out[item.stream] += item.data
                else:
                    return Outcome(item.status, bytes(out["stdout"]), bytes(out["stderr"]))
        raise AssertionError("the stream ended without an end")

    async def run(self, argv: list[str], **more: Any) -> Outcome:
        return await self.result(await self.start(argv, **more))

    async def python(self, code: str, **more: Any) -> Outcome:
        return await self.run([*self.bench.config.python_argv, "-c", code], **more)

    async def start_python(self, code: str, **more: Any) -> str:
        return await self.start([*self.bench.config.python_argv, "-c", code], **more)

    async def alive(self) -> bool:
        """Whether the guest still answers and serves."""
        await (await self.client()).ping()
        return (await self.run(["true"] if self.bench.config.scripted else ["/bin/busybox", "true"])).ok

    async def refs(self) -> list[ProcessRef]:
        found = [process.ref_of(pid) for pid in await self.bench.runtime.processes(self.ref)]
        return [ref for ref in found if ref is not None]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


_INFOS: dict[tuple[str, str], RuntimeInfo] = {}


class Bench:
    """A runtime under check, and every instance that the check made."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.runtime = config.make()
        self.made: list[InstanceSpec] = []
        self._info: RuntimeInfo | None = None

    async def info(self) -> RuntimeInfo:
        if self._info is None:
            # Probed once per process and state, as the node does: each probe starts an instance.
            key = self.config.factory, self.config.state_dir
            self._info = _INFOS[key] = _INFOS.get(key) or await self.runtime.probe()
            if not self._info.usable:
                raise NotApplicable(f"{self.runtime.name} is not usable here: {self._info.reason}")
        return self._info

    def spec(
        self, limits: Limits = LIMITS, unsafe: frozenset[str] = frozenset(), seccomp: str = "default"
    ) -> InstanceSpec:
        spec = self.config.spec(limits, unsafe, seccomp)
        self.made.append(spec)
        return spec

    async def create(self, spec: InstanceSpec) -> Box:
        # The socket of a live instance is not taken away from it.
        name = "s"
        with contextlib.suppress(OSError):
            sockets.connect(spec.directory, name, timeout_s=5).close()
            name = "again"
        with sockets.listen(spec.directory, name) as control:
            return Box(self, spec, await self.runtime.create(spec, control))

    @contextlib.asynccontextmanager
    async def box(
        self, limits: Limits = LIMITS, unsafe: frozenset[str] = frozenset(), seccomp: str = "default"
    ) -> AsyncIterator[Box]:
        await self.info()
        box = await self.create(self.spec(limits, unsafe, seccomp))
        try:
            yield box
        finally:
            await box.close()
            evidence = await self.runtime.destroy(box.ref)
            assert evidence.clean, evidence

    async def host_pids(self) -> bool:
        """Whether what runs inside are processes of the host; not so where each instance has a kernel of its own."""
        return (await self.info()).capabilities.get("host_pids", False)

    async def roomy(self) -> Limits:
        """Limits under which that of processes is met first: a kernel of its own needs memory for each one too."""
        return LIMITS if await self.host_pids() else replace(LIMITS, memory_bytes=8 * LIMITS.memory_bytes)

    async def destroy(self, ref: InstanceRef) -> None:
        evidence = await self.runtime.destroy(ref)
        assert evidence.clean and not evidence.left, evidence

    async def child(self, verb: str, spec: InstanceSpec, *, fault: str = "", **more: Any) -> tuple[int, Any]:
        """Do one thing with the runtime in another process; -> (exit status, its answer)."""
        if self.config.scripted:
            raise NotApplicable("an instance lives only as long as its creator")
        job = json.dumps({"verb": verb, "spec": _spec_json(spec), **more})
        environment = {
            **os.environ,
            "CORRAL_FAULT_POINTS": f"{fault}=kill" if fault else "",
            "PYTHONPATH": _python_path(),
        }
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "corral.testing.runtime", self.config.to_json(), job),
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert child.stdout is not None
        # One line, not end of file: what outlives the child could hold its output open.
        line = await asyncio.wait_for(child.stdout.readline(), 120)
        status = await asyncio.wait_for(child.wait(), 120)
        return status, json.loads(line) if line else None


Check = Callable[[Bench], Awaitable[None]]
CHECKS: list[tuple[str, Check]] = []


def _check(run: Check) -> Check:
    CHECKS.append((run.__name__, run))
    return run


async def run_check(run: Check, config: Config) -> None:
    """Run one check; whatever it does, everything that it made is destroyed and the host must show nothing of it."""
    bench = Bench(config)
    try:
        await run(bench)
    finally:
        left = []
        for spec in bench.made:
            evidence = await bench.runtime.destroy(bench.runtime.partial_ref(spec.directory, spec.instance_id))
            if not evidence.clean:
                left.append(str(evidence))
            left += traces(spec)
            shutil.rmtree(spec.directory, ignore_errors=True)
        assert not left, left


def traces(spec: InstanceSpec) -> list[str]:
    """Everything on the host that still speaks of an instance: looked for without the adapter."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        found += [f"mount {line.split()[4]}" for line in table if spec.directory in line]
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if spec.directory in (name := backing.read_text().strip()):
                found.append(f"loop {name}")
    for path, names, _ in os.walk("/sys/fs/cgroup"):  # groups of others vanish meanwhile: `walk` does not mind
        found += [f"cgroup {path}/{name}" for name in names if name == spec.instance_id]
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) not in (os.getpid(), os.getppid()):
            with contextlib.suppress(OSError):
                line = (place / "cmdline").read_bytes()
                named = os.fsencode(f"{spec.directory}/") in line or os.fsencode(spec.instance_id) in line
                if named and b"corral.testing.runtime" not in line:
                    found.append(f"process {place.name} {line[:80]!r}")
    for place in Path("/run/corral").glob("**/*"):
        if place.is_symlink() and spec.instance_id in os.readlink(place):
            found.append(f"uid range {place}")
    if os.path.lexists(spec.directory):
        # The directory itself and the socket in it were made by the caller: the adapter may leave them.
        found += [f"file {spec.directory}/{name}" for name in os.listdir(spec.directory) if name not in ("s", "again")]
    return found


def _require(info: RuntimeInfo, limit: str, mode: str) -> None:
    if getattr(info.limits, limit) != mode:
        raise NotApplicable(f"{limit} is {getattr(info.limits, limit)}")


async def _until(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


# -- life ------------------------------------------------------------------------------------------------------------------------


@_check
async def probe_is_truthful(bench: Bench) -> None:
    """What it says of itself is what an instance shows."""
    began = time.monotonic()
    _INFOS.clear()
    info = await bench.info()
    assert time.monotonic() - began < 20
    assert not _tried(bench.config), "the probe left something"
    assert info.name == bench.runtime.name and info.version and info.reason is None and 0 <= info.security_level <= 3
    async with bench.box() as box:
        assert box.instance.same_uid != info.capabilities.get("two_uids", False)
        assert await box.alive()
        stats = await bench.runtime.stats(box.ref)
        grouped = info.capabilities.get("cgroup", False)
        if not bench.config.scripted:
            assert (stats.oom_kills is not None) == grouped, "a counter that does not exist is None, not 0"
            assert stats.memory_bytes and stats.memory_bytes > 0 and stats.disk_free_bytes
            assert bool(stats.pids) == info.capabilities.get("host_pids", False)


@_check
async def create_is_idempotent(bench: Bench) -> None:
    async with bench.box() as box:
        assert await box.alive()
        await box.close()  # one client at a time
        again = await bench.create(box.spec)
        assert again.ref == box.ref
        assert await box.alive()


@_check
async def attach_works_from_another_process(bench: Bench) -> None:
    async with bench.box() as box:
        status, answer = await bench.child("attach", box.spec, ref=_ref_json(box.ref))
        assert (status, answer) == (0, True)
        assert (await bench.runtime.attach(box.ref)) == box.instance
        await bench.runtime.kill(box.ref)
        assert await bench.runtime.attach(box.ref) is None
        assert (await bench.child("attach", box.spec, ref=_ref_json(box.ref))) == (0, False)


@_check
async def an_instance_outlives_its_creator(bench: Bench) -> None:
    await bench.info()
    spec = bench.spec()
    status, answer = await bench.child("create_and_die", spec)
    assert status == -signal.SIGKILL and answer, (status, answer)
    ref = InstanceRef(**answer)
    instance = await bench.runtime.attach(ref)
    assert instance is not None
    box = Box(bench, spec, instance)
    assert await box.alive()
    refs = await box.refs()
    await box.close()
    await bench.destroy(ref)
    assert not any(process.is_alive(one) for one in refs)
    assert traces(spec) == []


@_check
async def destroy_ends_everything_and_is_idempotent(bench: Bench) -> None:
    async with bench.box() as box:
        stubborn = "trap '' TERM INT HUP; busybox setsid busybox sleep 1000 & busybox sleep 1000"
        await box.start(["/bin/busybox", "sh", "-c", stubborn])
        await box.run(["/bin/busybox", "dd", "if=/dev/zero", "of=/workspace/dirty", "bs=1M", "count=8"])

        async def started() -> bool:
            return len(await box.refs()) >= (4 if await bench.host_pids() else 2)

        assert await _until(started)
        refs = await box.refs()
        await box.close()
        await bench.destroy(box.ref)
        assert not any(process.is_alive(ref) for ref in refs)
        assert traces(box.spec) == []
        await bench.destroy(box.ref)
        await bench.destroy(bench.runtime.partial_ref(box.spec.directory, box.spec.instance_id))


@_check
async def kill_ends_every_process_and_wait_gone_tells(bench: Bench) -> None:
    async with bench.box() as box:
        await box.start(["/bin/busybox", "sleep", "1000"])
        waiter = asyncio.create_task(bench.runtime.wait_gone(box.ref))
        refs = await box.refs()
        await asyncio.sleep(0)
        assert not waiter.done() and refs
        await box.close()
        await bench.runtime.kill(box.ref)
        await asyncio.wait_for(waiter, 10)
        assert not any(process.is_alive(ref) for ref in refs)
        assert await bench.runtime.processes(box.ref) == []
        await bench.runtime.kill(box.ref)
        assert os.path.isdir(box.spec.directory)


def _may_pause(info: RuntimeInfo) -> bool:
    return info.capabilities.get("pause", False)


async def _pause(bench: Bench, box: Box) -> None:
    """As the node does: its guest stands still first, then the host freezes it, or the guest stops the tree."""
    by_guest = (await bench.info()).pause_by == "guest"
    client = await box.client()
    assert (await client.pause(FENCE, stop=by_guest))["whole"] == 1
    if not by_guest:
        client.hold()
        await cast("SupportsPause", bench.runtime).pause(box.ref)


async def _resume(bench: Bench, box: Box) -> None:
    client = await box.client()
    if (await bench.info()).pause_by == "host":
        await cast("SupportsPause", bench.runtime).resume(box.ref)
        client.release()
    await client.resume(FENCE)


@_check
async def pause_stops_every_process_and_resume_goes_on(bench: Bench) -> None:
    if not _may_pause(await bench.info()):
        raise NotApplicable("it cannot pause")
    async with bench.box() as box:
        path = Path(f"{box.instance.tree.path}/workspace/ticks")
        code = (
            "import os, time\nos.fork(); os.setsid() if os.fork() == 0 else None\n"
            "while True:\n open('/workspace/ticks', 'a').write('x')\n for _ in range(9999): pass"
        )
        await box.start_python(code)

        def ticks() -> int:
            return path.stat().st_size if path.exists() else 0

        async def more() -> bool:
            return ticks() > seen

        seen = 0
        assert await _until(more)
        await _pause(bench, box)
        seen, before = ticks(), await bench.runtime.stats(box.ref)
        assert not await _until(more, 0.5), "something ran while the instance was paused"
        after = await bench.runtime.stats(box.ref)
        if before.cpu_seconds is not None and after.cpu_seconds is not None:
            assert after.cpu_seconds - before.cpu_seconds < 0.1, "a paused instance used the processor"
        if before.memory_bytes and after.memory_bytes:
            assert after.memory_bytes > before.memory_bytes // 2, "its memory did not stay"
        await _resume(bench, box)
        assert await _until(more)
        assert await box.alive()
        for _ in range(5):
            await _pause(bench, box)
            await _resume(bench, box)
        await _pause(bench, box)
        await box.close()
        await bench.destroy(box.ref)
        assert traces(box.spec) == []


@_check
async def what_forks_all_the_time_stands_still_paused_and_is_killed(bench: Bench) -> None:
    if not _may_pause(await bench.info()) or bench.config.scripted:
        raise NotApplicable("it cannot pause")
    async with bench.box(await bench.roomy()) as box:
        code = "import os\nwhile True:\n try:\n  if os.fork() == 0: os._exit(0)\n  os.waitpid(-1, 0)\n except OSError: pass"
        for _ in range(3):
            await box.start_python(code)
        await _pause(bench, box)
        before = await bench.runtime.stats(box.ref)
        await asyncio.sleep(0.3)
        after = await bench.runtime.stats(box.ref)
        if before.cpu_seconds is not None and after.cpu_seconds is not None:
            assert after.cpu_seconds - before.cpu_seconds < 0.1, "a paused instance used the processor"
        await box.close()
        await asyncio.wait_for(bench.runtime.kill(box.ref), 60)
        assert await bench.runtime.processes(box.ref) == []


@_check
async def kill_ends_a_fork_bomb(bench: Bench) -> None:
    async with bench.box(await bench.roomy()) as box:
        code = "import os\nwhile True:\n try:\n  os.fork()\n  os.setsid()\n except BlockingIOError: open('/workspace/full', 'w')\n except OSError: pass"
        await box.start_python(code)

        async def grown() -> bool:
            if await bench.host_pids():
                return len(await bench.runtime.processes(box.ref)) > 20
            return os.path.exists(f"{box.instance.tree.path}/workspace/full")  # its guest may be too late to tell

        assert await _until(grown)
        await box.close()
        await asyncio.wait_for(bench.runtime.kill(box.ref), 60)
        assert await bench.runtime.processes(box.ref) == []


@_check
async def concurrent_instances_are_apart(bench: Bench) -> None:
    await bench.info()
    specs = [bench.spec() for _ in range(4)]
    boxes = await asyncio.gather(*(bench.create(spec) for spec in specs))
    secret = secrets.token_hex(8)
    for box in boxes[:1]:
        where = ("/workspace", "/tmp", "/home/sandbox", "/var/tmp", "/dev/shm")  # noqa: S108
        wrote = await box.run(["/bin/busybox", "touch", *(f"{path}/{secret}" for path in where)])
        assert wrote.ok, wrote.stderr
    for box in boxes[1:]:
        seen = await box.run(["/bin/busybox", "find", "/", "-xdev", "-name", secret])
        assert seen.stdout == b"", seen.stdout
        listing = await box.run(["/bin/busybox", "ps"])
        assert listing.ok and len(listing.stdout.splitlines()) < 10
    if (await bench.info()).security_level >= 1:
        owners = [uid for box in boxes for uid in {_host_uid(ref.pid) for ref in await box.refs()}]
        assert len(set(owners)) == len(owners), "two instances share a uid on the host"
    for box in boxes:
        await box.close()
    await asyncio.gather(*(bench.destroy(box.ref) for box in boxes))


@_check
async def an_instance_of_a_forgotten_installation_goes_with_its_directory_only(bench: Bench) -> None:
    if bench.config.scripted:
        raise NotApplicable("an instance lives only as long as its creator")
    async with bench.box() as box:
        await box.start(["/bin/busybox", "sleep", "1000"])
        refs, spec = await box.refs(), box.spec
        stranger = replace(bench.config, installation_id=f"conf{secrets.token_hex(4)}").make()
        elsewhere = f"{bench.config.state_dir}/copy-{secrets.token_hex(4)}/{os.path.basename(spec.directory)}"
        os.makedirs(elsewhere)
        evidence = await stranger.destroy(stranger.partial_ref(elsewhere, spec.instance_id))
        assert evidence.clean, evidence
        assert await box.alive()
        os.rmdir(os.path.dirname(elsewhere))
        await box.close()
        evidence = await stranger.destroy(stranger.partial_ref(spec.directory, spec.instance_id))
        assert evidence.clean, evidence
        assert refs and not any(process.is_alive(ref) for ref in refs)
        assert traces(spec) == []


@_check
async def a_cancelled_create_can_be_destroyed(bench: Bench) -> None:
    await bench.info()
    for delay in (0.0, 0.004, 0.012):
        spec = bench.spec()
        with sockets.listen(spec.directory, "s") as control:
            creating = asyncio.create_task(bench.runtime.create(spec, control))
            await asyncio.sleep(delay)
            creating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await creating
            await bench.destroy(bench.runtime.partial_ref(spec.directory, spec.instance_id))
        assert traces(spec) == []


@_check
async def death_anywhere_in_create_leaves_nothing_after_destroy(bench: Bench) -> None:
    names = await _points(bench, "runtime.create.")
    if bench.config.scripted:
        raise NotApplicable("an instance lives only as long as its creator")
    assert len(names) >= 3, f"create passes {names} only"
    for name in names:
        spec = bench.spec()
        status, _ = await bench.child("create", spec, fault=name)
        assert status == -signal.SIGKILL, (name, status)
        await bench.destroy(bench.runtime.partial_ref(spec.directory, spec.instance_id))
        assert traces(spec) == [], name


@_check
async def create_again_after_death_in_create_works(bench: Bench) -> None:
    for name in await _points(bench, "runtime.create."):
        if name in OF_THE_DISK and not await bench.host_pids():
            continue  # the disk is made the same way for all, and each start costs half a second here
        spec = bench.spec()
        status, _ = await bench.child("create", spec, fault=name)
        assert status == -signal.SIGKILL, (name, status)
        box = await bench.create(spec)
        assert await box.alive(), name
        await box.close()
        await bench.destroy(box.ref)


@_check
async def death_anywhere_in_destroy_leaves_nothing_after_another(bench: Bench) -> None:
    names = await _points(bench, "runtime.destroy.")
    if not names:
        raise NotApplicable("destroy passes no fault point")
    for name in names:
        box = await bench.create(bench.spec())
        assert await box.alive()
        await box.close()
        status, _ = await bench.child("destroy", box.spec, fault=name, ref=_ref_json(box.ref))
        assert status == -signal.SIGKILL, (name, status)
        await bench.destroy(box.ref)
        assert traces(box.spec) == [], name


async def _points(bench: Bench, prefix: str) -> list[str]:
    """Fault points that one life of an instance passes, each once, in order."""
    seen: list[str] = []
    passing = faults.point

    def note(name: str) -> None:
        if name.startswith(prefix) and name not in seen:
            seen.append(name)

    faults.point = note
    try:
        async with bench.box():
            pass
    finally:
        faults.point = passing
    return seen


# -- what reaches the inside -----------------------------------------------------------------------------------------------------


@_check
async def nothing_of_the_host_reaches_the_inside(bench: Bench) -> None:
    """Environment, working directory and descriptors of the creating process stay outside."""
    secret = f"corral-secret-{secrets.token_hex(8)}"
    hidden = f"{bench.config.state_dir}/{secret}"
    await bench.info()
    if bench.config.scripted:
        raise NotApplicable("nothing real runs inside")
    os.mkdir(hidden)
    Path(f"{hidden}/file").write_text(secret)
    before, leaked = os.getcwd(), os.open(f"{hidden}/file", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    os.environ["CORRAL_TEST_SECRET"] = secret
    try:
        os.chdir(hidden)
        async with bench.box() as box:
            os.chdir(before)
            assert await box.alive()
            for ref in await box.refs():
                # What may not be looked at (an ordinary user, a process that is not dumpable) is looked at as root; what has ended
                # since it was listed holds nothing any more.
                with contextlib.suppress(PermissionError, FileNotFoundError, ProcessLookupError):
                    assert secret.encode() not in Path(f"/proc/{ref.pid}/environ").read_bytes()
                    assert secret not in os.readlink(f"/proc/{ref.pid}/cwd")
                    # What came from outside stays; what the guest itself reads just now, as its own /proc, it closes.
                    ours = await bench.host_pids()
                    stays = set(_strange(ref.pid, secret, box.spec, box.instance, ours).items())
                    for _ in range(10):
                        if not stays:
                            break
                        await asyncio.sleep(0.05)
                        stays &= set(_strange(ref.pid, secret, box.spec, box.instance, ours).items())
                    assert not stays, stays
            shown = await box.run(["/bin/busybox", "env"], env={"PATH": "/bin", "A": "b"})
            assert set(shown.stdout.split()) <= {b"PATH=/bin", b"A=b", b"PWD=/workspace", b"SHLVL=0", b"SHLVL=1"}, (
                shown.stdout
            )
            looked = await box.python(attacks.LOOK)
            answers = looked.json()
            assert answers["fds"] == [0, 1, 2], answers
            assert answers["hostname"] == box.spec.hostname
            assert answers["interfaces"] == ["lo"], answers
            if box.instance.guest_uid == 0:
                assert answers["shadow"] != "read", "an exec reads what only root of the base may"
            assert not (await box.run(["/bin/busybox", "ls", hidden])).ok
    finally:
        os.chdir(before)
        os.close(leaked)
        del os.environ["CORRAL_TEST_SECRET"]
        shutil.rmtree(hidden)


def _strange(pid: int, secret: str, spec: InstanceSpec, instance: Instance, ours: bool) -> dict[int, str]:
    """Descriptors that no process of a sandbox should have. Not `ours`: it is a kernel, which holds the files of its programs."""
    held = {int(n): _link(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
    usual = ("socket:", "pipe:", "anon_inode:")
    if ours:
        return {n: to for n, to in held.items() if secret in to or (n > 2 and not to.startswith(usual))}
    return {
        n: to
        for n, to in held.items()
        if secret in to or not (to.startswith((*usual, "/memfd:")) or _shown_inside(pid, n, to, spec, instance))
    }


def _shown_inside(pid: int, number: int, to: str, spec: InstanceSpec, instance: Instance) -> bool:
    """Whether a descriptor of a kernel of its own is the very file of what it shows inside, or one of the instance's own."""
    try:
        held = os.stat(f"/proc/{pid}/fd/{number}")
    except OSError:
        return True  # it is closed meanwhile
    if stat.S_ISCHR(held.st_mode):
        return held.st_rdev == os.stat("/dev/null").st_rdev
    if stat.S_ISDIR(held.st_mode) and re.fullmatch(r"/proc/\d+/fd", to):
        return True  # its own, as it numbers itself
    inside, tree = to.removeprefix("/root"), instance.tree.path
    shown = [f"{spec.rootfs}{inside}", f"{spec.interpreter}{inside.removeprefix('/.corral')}"]
    for name, place in (("workspace", "/workspace"), ("home", "/home/sandbox"), ("var_tmp", "/var/tmp")):  # noqa: S108
        shown.append(f"{tree}/{name}{inside.removeprefix(place)}")
    # Beside its disk and on it, and the pipes to its guest.
    shown += [f"{os.path.dirname(tree)}{to}", f"{tree}{to}", *([to] if to.startswith(f"{spec.directory}/") else [])]
    for path in shown:
        with contextlib.suppress(OSError):
            if os.path.samestat(held, os.stat(path)):
                return True
    return False


@_check
async def ids_on_the_host_are_the_instances_own(bench: Bench) -> None:
    info = await bench.info()
    async with bench.box() as box:
        exec_id = await box.start(["/bin/busybox", "sleep", "1000"])
        (pid1, *_), everyone = await box.refs(), await box.refs()
        sleepers = [ref for ref in everyone if b"sleep" in Path(f"/proc/{ref.pid}/cmdline").read_bytes()]
        assert len(sleepers) == int(await bench.host_pids()), (exec_id, everyone)
        uids = {_host_uid(ref.pid) for ref in everyone}
        if info.security_level >= 1:
            assert not uids & {0, os.getuid()}, uids
        elif os.getuid() != 0:
            assert uids == {os.getuid()}
        assert 0 not in uids
        assert os.stat("/dev/null").st_uid == 0, "the host's device was given away"
        assert info.capabilities["two_uids"] == (not box.instance.same_uid)
        if not await bench.host_pids():
            # The host sees neither of the two: the kernel inside tells them apart, by whom it lets be signalled.
            code = "import os\ndef may(pid):\n try: os.kill(pid, 0)\n except PermissionError: return 0\n return 1\n"
            asked = await box.python(code + "print(may(os.getpid()), may(os.getppid()))")
            assert asked.stdout == (b"1 0\n" if info.capabilities["two_uids"] else b"1 1\n"), asked
        for sleeper in sleepers:
            assert info.capabilities["two_uids"] == (_host_uid(pid1.pid) != _host_uid(sleeper.pid))
        told = await box.run(["/bin/busybox", "id"])
        assert told.stdout.startswith(f"uid={box.instance.exec_uid}".encode()), told.stdout
        made = await box.run(["/bin/busybox", "touch", "/workspace/mine"])
        assert made.ok, made.stderr
        seen = os.stat(f"{box.instance.tree.path}/workspace/mine")
        assert (seen.st_uid, seen.st_gid) == (box.instance.tree.uid, box.instance.tree.gid)


@_check
async def execs_have_no_privilege(bench: Bench) -> None:
    async with bench.box() as box:
        shown = await box.run(["/bin/busybox", "cat", "/proc/self/status"])
        fields = dict(line.split(":\t", 1) for line in shown.stdout.decode().splitlines() if ":\t" in line)
        if await bench.host_pids():
            assert int(fields["CapAmb"], 16) == 0 and fields["NoNewPrivs"] == "1", fields
        else:  # not every kernel tells these two
            asked = await box.python(
                "import ctypes; print(ctypes.CDLL('/.corral/lib/libc.so.6').prctl(39, 0, 0, 0, 0))"
            )
            assert int(fields.get("CapAmb", "0"), 16) == 0 and asked.stdout == b"1\n", (fields, asked)
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0, fields
        # Where PID 1 makes a pid namespace per exec, that takes one capability more, which no kernel of the host has given.
        bound = GUEST_CAPABILITIES if await bench.host_pids() else GUEST_CAPABILITIES | 1 << 21
        assert int(fields["CapBnd"], 16) & ~bound == 0, fields["CapBnd"]
        assert fields["Seccomp"] == "2", fields
        groups = fields["Groups"].split()
        assert set(groups) <= {"1000", "65534"}, groups


@_check
async def only_the_named_places_are_writable(bench: Bench) -> None:
    async with bench.box() as box:
        answers = (await box.python(attacks.WRITE)).json()
        for path in ("/workspace", "/home/sandbox", "/tmp", "/var/tmp", "/dev/shm", "/run/user/1000"):  # noqa: S108
            assert answers[path] == "ok", (path, answers)
            del answers[path]
        assert "ok" not in answers.values(), [path for path, answer in answers.items() if answer == "ok"]
        assert answers["write /etc/passwd"] != "ok"
    assert not list(Path(bench.config.rootfs).glob("**/.probe"))


# -- limits, attacked to four times their size -----------------------------------------------------------------------------------


@_check
async def memory_is_enforced(bench: Bench) -> None:
    _require(await bench.info(), "memory", "enforced")
    if not await bench.host_pids():
        raise NotApplicable("a hit ends the whole sandbox")
    async with bench.box() as box:
        before = await bench.runtime.stats(box.ref)
        hog = await box.python(f"x = bytearray(b'x') * {4 * LIMITS.memory_bytes}\nprint(len(x))")
        after = await bench.runtime.stats(box.ref)
        assert hog.status["signal"] == signal.SIGKILL and hog.stdout == b"", hog
        assert before.oom_kills is not None and after.oom_kills is not None and after.oom_kills > before.oom_kills
        assert after.peak_memory_bytes is not None
        assert LIMITS.memory_bytes * 0.8 < after.peak_memory_bytes <= LIMITS.memory_bytes, after
        assert await box.alive(), "the guest must survive an OOM of an exec"
        victim = await box.run(["/bin/busybox", "sh", "-c", "kill -9 $$"])
        assert victim.status["signal"] == signal.SIGKILL
        assert (await bench.runtime.stats(box.ref)).oom_kills == after.oom_kills, "a plain kill is no OOM"


@_check
async def memory_is_enforced_around_the_whole_sandbox(bench: Bench) -> None:
    """Its kernel is inside the limit: a hit ends it, for sure, and the host's counter tells afterwards that it was one."""
    _require(await bench.info(), "memory", "enforced")
    if await bench.host_pids():
        raise NotApplicable("a hit ends the process that made it")
    async with bench.box() as box:
        before = await bench.runtime.stats(box.ref)
        await box.start_python(f"x = bytearray(b'x') * {4 * LIMITS.memory_bytes}\nprint(len(x))")
        await asyncio.wait_for(bench.runtime.wait_gone(box.ref), 60)
        after = await bench.runtime.stats(box.ref)
        assert before.oom_kills is not None and after.oom_kills is not None and after.oom_kills > before.oom_kills
        assert after.peak_memory_bytes is not None
        # To what is dying the kernel gives a page more.
        assert LIMITS.memory_bytes * 0.8 < after.peak_memory_bytes < LIMITS.memory_bytes + MIB, after
        assert await bench.runtime.attach(box.ref) is None
    async with bench.box() as box:
        assert await box.alive()
        before = await bench.runtime.stats(box.ref)
        await bench.runtime.kill(box.ref)
        assert (await bench.runtime.stats(box.ref)).oom_kills == before.oom_kills, "a plain kill is no OOM"


@_check
async def memory_is_watched(bench: Bench) -> None:
    info = await bench.info()
    _require(info, "memory", "watched")
    assert info.limits.overshoot["memory"]
    async with bench.box() as box:
        size = LIMITS.memory_bytes * 5 // 4
        await box.start_python(f"import time\nx = bytearray(b'x') * {size}\ntime.sleep(1000)")

        async def seen() -> bool:
            return ((await bench.runtime.stats(box.ref)).memory_bytes or 0) > LIMITS.memory_bytes

        assert await _until(seen)
        assert ((await bench.runtime.stats(box.ref)).peak_memory_bytes or 0) > LIMITS.memory_bytes
        hog = await box.python(f"x = bytearray(b'x') * {5 * LIMITS.memory_bytes}\nprint(len(x))")
        assert hog.stdout == b"", "one process passed the bound above the watched limit"


@_check
async def peaks_start_anew(bench: Bench) -> None:
    half = LIMITS.memory_bytes // 2
    async with bench.box() as box:
        wait = "import os, time\nwhile not os.path.exists('/workspace/go'): time.sleep(0.02)"
        await box.start_python(f"x = bytearray(b'x') * {half}\n{wait}")

        async def peaked() -> bool:
            peak = (await bench.runtime.stats(box.ref)).peak_memory_bytes
            if peak is None:
                raise NotApplicable("no peak is measured")
            return peak >= half

        async def given_back() -> bool:
            """A new peak begins with what is used then, and a kernel of its own returns a program's memory a little after its end."""
            return ((await bench.runtime.stats(box.ref)).memory_bytes or 0) < half

        assert await _until(peaked)
        await box.python("open('/workspace/go', 'w')")
        assert await _until(given_back)
        await bench.runtime.reset_peaks(box.ref)
        peak = (await bench.runtime.stats(box.ref)).peak_memory_bytes
        assert peak is not None and peak < half, peak


@_check
async def tmp_is_bounded_and_cannot_kill_the_guest(bench: Bench) -> None:
    _require(await bench.info(), "tmp", "enforced")
    async with bench.box() as box:
        sums = 0
        for path in ("/tmp", "/dev/shm", "/run/user/1000", "/run", "/dev"):  # noqa: S108
            answer = (await box.python(attacks.FILL % (path, LIMITS.memory_bytes))).json()
            sums += answer["bytes"]
            assert answer["errno"] in ("ENOSPC", "EACCES", "EROFS"), (path, answer)
            if path == "/tmp":  # noqa: S108
                assert LIMITS.tmp_bytes * 0.9 <= answer["bytes"] <= LIMITS.tmp_bytes, answer
        assert sums <= LIMITS.memory_bytes // 2, "what tmpfs holds cannot be freed by killing"
        assert await box.alive()


@_check
async def disk_is_enforced(bench: Bench) -> None:
    _require(await bench.info(), "disk", "enforced")
    async with bench.box() as box:
        total = 0
        for path in ("/workspace", "/home/sandbox", "/var/tmp"):  # noqa: S108
            answer = (await box.python(attacks.FILL % (path, 4 * LIMITS.disk_bytes))).json()
            total += answer["bytes"]
            assert answer["errno"] == "ENOSPC", answer
        assert LIMITS.disk_bytes * 0.9 <= total <= LIMITS.disk_bytes, total
        stats = await bench.runtime.stats(box.ref)
        assert stats.disk_free_bytes is not None and stats.disk_free_bytes < MIB
        assert stats.disk_bytes is not None and stats.disk_bytes > LIMITS.disk_bytes * 0.9
        assert await box.alive()


@_check
async def inodes_are_enforced(bench: Bench) -> None:
    _require(await bench.info(), "inodes", "enforced")
    async with bench.box() as box:
        answer = (await box.python(attacks.FILES % (4 * LIMITS.inodes))).json()
        assert answer["errno"] == "ENOSPC", answer
        assert LIMITS.inodes * 0.8 <= answer["files"] <= LIMITS.inodes * 1.1 + 32, answer
        assert ((await bench.runtime.stats(box.ref)).inodes_free or 0) < 16
        assert await box.alive()


@_check
async def disk_is_watched(bench: Bench) -> None:
    info = await bench.info()
    _require(info, "disk", "watched")
    assert info.limits.overshoot["disk"] and info.limits.overshoot["inodes"]
    async with bench.box() as box:
        answer = (await box.python(attacks.FILL % ("/workspace", 4 * LIMITS.disk_bytes))).json()
        assert answer["bytes"] <= LIMITS.disk_bytes, "one file passed the limit"
        await box.run(["/bin/busybox", "cp", "/workspace/fill", "/home/sandbox/more"])

        async def seen() -> bool:
            return ((await bench.runtime.stats(box.ref)).disk_bytes or 0) > LIMITS.disk_bytes

        assert await _until(seen)
        assert (await bench.runtime.stats(box.ref)).disk_free_bytes == 0
        await box.python(attacks.FILES % (2 * LIMITS.inodes))

        async def crowded() -> bool:
            return (await bench.runtime.stats(box.ref)).inodes_free == 0

        assert await _until(crowded)


@_check
async def pids_are_enforced(bench: Bench) -> None:
    info = await bench.info()
    _require(info, "pids", "enforced")
    async with bench.box(await bench.roomy()) as box:
        # It waits for its children: what outlives an exec counts until it is gone.
        collect = "os.close(w)\nfor _ in range(children): os.wait()\n"
        answer = (await box.python(attacks.FORK % (4 * LIMITS.pids) + collect)).json()
        assert answer["errno"] == "EAGAIN" and LIMITS.pids // 2 < answer["children"] < LIMITS.pids, answer
        stats = await bench.runtime.stats(box.ref)
        if not await bench.host_pids():
            assert stats.pids_limit_hits is None, "a kernel inside held it: the host has no counter"
        elif info.capabilities.get("cgroup", False):
            assert stats.pids_limit_hits and stats.pids_limit_hits > 0
        assert await box.alive()


@_check
async def pids_are_watched(bench: Bench) -> None:
    info = await bench.info()
    _require(info, "pids", "watched")
    assert info.limits.overshoot["pids"]
    async with bench.box() as box:
        exec_id = await box.start_python(
            attacks.FORK % (8 * LIMITS.pids) + "\nimport sys; sys.stdout.flush(); time.sleep(1)"
        )

        async def seen() -> bool:
            return ((await bench.runtime.stats(box.ref)).pids or 0) > LIMITS.pids

        assert await _until(seen)
        answer = (await box.result(exec_id)).json()
        assert answer["errno"] == "EAGAIN" and answer["children"] <= 4 * LIMITS.pids, answer


@_check
async def cpu_is_enforced(bench: Bench) -> None:
    _require(await bench.info(), "cpu", "enforced")
    limits = Limits(memory_bytes=LIMITS.memory_bytes, pids=64, disk_bytes=LIMITS.disk_bytes, tmp_bytes=MIB, cpu=0.25)
    async with bench.box(limits) as box:
        assert await box.alive()
        before, began = (await bench.runtime.stats(box.ref)).cpu_seconds, time.monotonic()
        code = "import os, time\nos.fork(); os.fork()\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
        await box.python(code)
        after, took = (await bench.runtime.stats(box.ref)).cpu_seconds, time.monotonic() - began
        assert before is not None and after is not None
        assert after - before < 0.25 * took * 1.5 + 0.1, (after - before, took)


# -- hostile execs ---------------------------------------------------------------------------------------------------------------


@_check
async def hostile_exec_is_refused(bench: Bench) -> None:
    """Reading, tracing, stopping or killing the guest and the supervisor, and every door to more rights."""
    async with bench.box() as box:
        answers = (await box.python(attacks.HOSTILE)).json()
        opened = {name: answer for name, answer in answers.items() if answer == "done"}
        if not await bench.host_pids():
            opened = {name: answer for name, answer in opened.items() if not name.startswith(TOLD_BY_OWN_KERNEL)}
        assert not opened, opened
        assert await box.alive()


@_check
async def hostile_exec_is_refused_with_one_uid(bench: Bench) -> None:
    """Guest and execs share a uid: the guest's own measures must hold."""
    if not (await bench.info()).capabilities.get("one_uid", False):
        raise NotApplicable("guest and execs never share a uid")
    async with bench.box(unsafe=frozenset({"unsafe_one_uid"})) as box:
        if not box.instance.same_uid:
            raise NotApplicable("the runtime has no way with one uid")
        answers = (await box.python(attacks.HOSTILE)).json()
        opened = {name: answer for name, answer in answers.items() if answer == "done"}
        assert not opened, opened
        assert await box.alive()


@_check
async def profile_debug_lets_an_exec_trace_its_own_and_nobody_else(bench: Bench) -> None:
    async with bench.box(seccomp="debug") as box:
        traced = (await box.python(attacks.TRACE)).json()
        wanted = {"attach": 0, "peek": 0, "word": "inside", "read": 6, "detach": 0, "fixed addresses": 0, "status": 9}
        if not await bench.host_pids():  # gVisor has neither
            wanted |= {"read": "ENOSYS", "fixed addresses": "EINVAL"}
        assert traced == wanted, traced
        answers = (await box.python(attacks.HOSTILE)).json()
        opened = {name: answer for name, answer in answers.items() if answer == "done"}
        if not await bench.host_pids():
            opened = {name: answer for name, answer in opened.items() if not name.startswith(TOLD_BY_OWN_KERNEL)}
        assert not opened, opened
        assert await box.alive()
    async with bench.box() as box:  # the control
        refused = (await box.python(attacks.TRACE)).json()
        assert refused == {"attach": "EPERM", "fixed addresses": "EPERM", "status": 9}, refused


@_check
async def profile_browser_lets_a_program_shut_itself_in_and_opens_nothing_around_it(bench: Bench) -> None:
    async with bench.box(seccomp="browser") as box:
        code = f"GUEST_IS_ANOTHER = {not box.instance.same_uid}\n{attacks.BROWSE}"
        answers = (await box.python(code)).json()
        opened = {name for name, answer in answers.items() if answer == "done"}
        if box.instance.guest_uid != 0:
            opened.discard("shadow")  # with one id whatever is in the base is the exec's
        wanted = {"namespaces of a child", "root of its own", "chroot"}
        if not await bench.host_pids():
            wanted -= {"root of its own"}  # gVisor refuses it in a namespace below
        assert opened == wanted, answers
        traced = (await box.python(attacks.TRACE)).json()
        assert traced["attach"] == "EPERM", traced
        assert await box.alive()


@_check
async def hostile_exec_cannot_kill_guest_or_supervisor(bench: Bench) -> None:
    async with bench.box() as box:
        for code in (
            "import os; print(os.kill(1, 9))",
            "import os; print(os.kill(1, 19))",
            "import os; print(os.kill(os.getppid(), 9))",
            "import os; print(os.kill(os.getppid(), 19))",
            "import os; print(os.kill(-1, 9))",
            attacks.OWNER_SIGNAL,
        ):
            outcome = await box.python(code)
            ended = outcome.status
            assert ended["state"] == "ended" and ended["started"] and ended["ended_by"] is None, (code, ended)
            if "kill(-1" not in code and not (box.instance.same_uid and "kill(1," in code):
                # Of one's own uid, PID 1 may be told; it has no handler, so the kernel drops the signal.
                assert not outcome.ok, (code, "was not refused")
            assert await box.alive(), code


@_check
async def control_without_seccomp_a_user_namespace_opens(bench: Bench) -> None:
    """The hostile checks can fail: with the filter off, what it refuses works."""
    async with bench.box(unsafe=frozenset({"unsafe_no_seccomp"})) as box:
        code = "import ctypes; print(ctypes.CDLL('/.corral/lib/libc.so.6').unshare(0x10000000))"
        assert (await box.python(code)).stdout == b"0\n"
        if box.instance.same_uid:
            code = "import resource; print(len(resource.prlimit(1, resource.RLIMIT_NOFILE)))"
            assert (await box.python(code)).stdout == b"2\n"
    async with bench.box() as box:
        code = "import ctypes; print(ctypes.CDLL('/.corral/lib/libc.so.6').unshare(0x10000000))"
        assert (await box.python(code)).stdout == b"-1\n"


@_check
async def control_with_one_uid_the_supervisor_dies(bench: Bench) -> None:
    """The kill checks can fail: with one uid and no signal scope, an exec ends its supervisor; the guest survives that."""
    async with bench.box(unsafe=frozenset({"unsafe_one_uid", "unsafe_no_landlock"})) as box:
        if not box.instance.same_uid:
            raise NotApplicable("the runtime has no way with one uid")
        outcome = await box.python("import os, time; os.kill(os.getppid(), 9); time.sleep(30)")
        assert outcome.status["state"] == "lost", outcome.status
        assert await box.alive()


# -- small parts and the other process -------------------------------------------------------------------------------------------


def _tried(config: Config) -> list[str]:
    """Processes and mounts of trial instances."""
    found = []
    mark, place = f"\0{config.installation_id}\0".encode(), f"{config.state_dir}/tmp/"  # noqa: S108
    for entry in (Path("/proc/self"), *Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            if place in (entry / "mountinfo").read_text(errors="surrogateescape"):
                found.append(f"mounts of {entry}")
            if mark in (entry / "cmdline").read_bytes():
                found.append(str(entry))
    return found


def _host_uid(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Uid:"):
                return int(line.split()[2])
    raise AssertionError(f"no uid of {pid}")


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "socket:[gone]"


def _python_path() -> str:
    return os.pathsep.join(path for path in sys.path if path)


def _ref_json(ref: InstanceRef) -> dict[str, Any]:
    return asdict(ref)


def _spec_json(spec: InstanceSpec) -> dict[str, Any]:
    return {**asdict(spec), "unsafe": sorted(spec.unsafe)}


def _spec_of(values: dict[str, Any]) -> InstanceSpec:
    changed = {
        "limits": Limits(**values["limits"]),
        "unsafe": frozenset(values["unsafe"]),
        "guest_argv": tuple(values["guest_argv"]),
    }
    return InstanceSpec(**{**values, **changed})


async def _do(config: Config, job: dict[str, Any]) -> Any:
    runtime, spec = config.make(), _spec_of(job["spec"])
    ref = InstanceRef(**job["ref"]) if "ref" in job else runtime.partial_ref(spec.directory, spec.instance_id)
    if job["verb"] == "attach":
        return await runtime.attach(ref) is not None
    if job["verb"] == "destroy":
        return asdict(await runtime.destroy(ref))
    with sockets.listen(spec.directory, "s") as control:
        instance = await runtime.create(spec, control)
    print(json.dumps(_ref_json(instance.ref)), flush=True)
    if job["verb"] == "create_and_die":
        signal.raise_signal(signal.SIGKILL)
    return None


def _main(arguments: list[str]) -> int:
    config, what = Config.from_json(arguments[0]), arguments[1]
    if what.startswith("{"):
        answer = asyncio.run(_do(config, json.loads(what)))
        print(json.dumps(answer), flush=True)
        return 0
    try:
        asyncio.run(run_check(dict(CHECKS)[what], config))
    except NotApplicable as reason:
        print(json.dumps({"not_applicable": str(reason)}))
    else:
        print(json.dumps({"passed": what}))
    return 0


if __name__ == "__main__":
    # As the module that adapters and checks import, not as a second copy of it.
    from corral.testing import runtime as _self

    sys.exit(_self._main(sys.argv[1:]))
