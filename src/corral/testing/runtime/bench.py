"""What the checks of a runtime share: the runtime with the instances made by a check, what runs in them, and the register of the checks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from corral.channel.client import Data, ExecStatus, GuestClient
from corral.domain.fence import Fence
from corral.domain.limits import MIB, Limits
from corral.linux import fifos, process, sockets
from corral.linux.process import ProcessRef
from corral.ports.runtime import Instance, InstanceRef, InstanceSpec, Runtime, RuntimeInfo
from corral.testing.runtime.host import traces

FENCE = Fence(1, 1)
LIMITS = Limits(memory_bytes=128 * MIB, pids=64, disk_bytes=24 * MIB, inodes=1000, tmp_bytes=4 * MIB, cpu=1.0)


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


INFOS: dict[tuple[str, str], RuntimeInfo] = {}


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
            self._info = INFOS[key] = INFOS.get(key) or await self.runtime.probe()
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


Check = Callable[[Bench], Awaitable[None]]
CHECKS: list[tuple[str, Check]] = []


def check(run: Check) -> Check:
    """Register a check under its function's name."""
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


def require(info: RuntimeInfo, limit: str, mode: str) -> None:
    """`NotApplicable` unless the runtime declares that it holds this limit in this way."""
    if getattr(info.limits, limit) != mode:
        raise NotApplicable(f"{limit} is {getattr(info.limits, limit)}")


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True
