"""Misbehaving runtimes: wrappers over any adapter that break one promise each, so that what stands above shows how it bears it.

The guest-side ones stand between node and guest as a proxy of the control socket; they work over real sandboxes too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import replace
from typing import Literal, cast

from corral.linux import sockets
from corral.ports.runtime import (
    Evidence,
    Instance,
    InstanceRef,
    InstanceSpec,
    Runtime,
    RuntimeInfo,
    Stats,
    SupportsPause,
)


class _Around:
    """Everything as the inner one does it."""

    def __init__(self, inner: Runtime) -> None:
        self.inner = inner
        self.name = inner.name

    async def probe(self) -> RuntimeInfo:
        return await self.inner.probe()

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        return await self.inner.create(spec, control)

    def partial_ref(self, directory: str, instance_id: str) -> InstanceRef:
        return self.inner.partial_ref(directory, instance_id)

    async def attach(self, ref: InstanceRef) -> Instance | None:
        return await self.inner.attach(ref)

    async def stats(self, ref: InstanceRef) -> Stats:
        return await self.inner.stats(ref)

    async def reset_peaks(self, ref: InstanceRef) -> bool:
        return await self.inner.reset_peaks(ref)

    async def processes(self, ref: InstanceRef) -> list[int]:
        return await self.inner.processes(ref)

    async def kill(self, ref: InstanceRef) -> None:
        await self.inner.kill(ref)

    async def wait_gone(self, ref: InstanceRef) -> None:
        await self.inner.wait_gone(ref)

    async def destroy(self, ref: InstanceRef) -> Evidence:
        return await self.inner.destroy(ref)

    async def pause(self, ref: InstanceRef) -> None:
        await cast("SupportsPause", self.inner).pause(ref)

    async def resume(self, ref: InstanceRef) -> None:
        await cast("SupportsPause", self.inner).resume(ref)


class SlowRuntime(_Around):
    """Every call takes `delay_s` longer."""

    def __init__(self, inner: Runtime, delay_s: float = 0.2) -> None:
        super().__init__(inner)
        self.delay_s = delay_s

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        await asyncio.sleep(self.delay_s)
        return await self.inner.create(spec, control)

    async def stats(self, ref: InstanceRef) -> Stats:
        await asyncio.sleep(self.delay_s)
        return await self.inner.stats(ref)

    async def kill(self, ref: InstanceRef) -> None:
        await asyncio.sleep(self.delay_s)
        await self.inner.kill(ref)

    async def destroy(self, ref: InstanceRef) -> Evidence:
        await asyncio.sleep(self.delay_s)
        return await self.inner.destroy(ref)


class NeverRuntime(_Around):
    """`probe` and `create` never answer."""

    async def probe(self) -> RuntimeInfo:
        await asyncio.Event().wait()
        raise AssertionError

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        await asyncio.Event().wait()
        raise AssertionError


class LyingRuntime(_Around):
    """Says dead of what lives: `attach` finds nothing, `kill` only says so."""

    async def attach(self, ref: InstanceRef) -> Instance | None:
        return None

    async def kill(self, ref: InstanceRef) -> None:
        return None


class LeakyRuntime(_Around):
    """Cannot remove everything, and says so, until `healed`."""

    healed = False

    async def destroy(self, ref: InstanceRef) -> Evidence:
        evidence = await self.inner.destroy(ref)
        return evidence if self.healed else replace(evidence, clean=False, left=("a mount that is busy",))


Mood = Literal["pass", "silent", "garbage"]


class TwoFacedRuntime(_Around):
    """Between node and guest sits a proxy; `mood` is how the guest seems from now on: `silent` after any request, or `garbage`."""

    mood: Mood = "pass"

    def __init__(self, inner: Runtime) -> None:
        super().__init__(inner)
        self._servers: dict[str, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        real = sockets.listen(spec.directory, "real")

        async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                inside, outside = await asyncio.open_unix_connection(sock=sockets.connect(spec.directory, "real"))
                back = asyncio.create_task(self._copy(inside, writer, guest=True))
                self._tasks.add(back)
                await self._copy(reader, outside, guest=False)
                back.cancel()
                outside.close()
            writer.close()

        listener = control.dup()
        listener.setblocking(False)
        self._servers[spec.instance_id] = await asyncio.start_unix_server(connection, sock=listener)
        try:
            return await self.inner.create(spec, real)
        finally:
            real.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, guest: bool) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(65536):
                if guest and self.mood == "silent":
                    continue
                writer.write(b"\xff" * 64 if guest and self.mood == "garbage" else data)
                await writer.drain()
            writer.close()

    async def destroy(self, ref: InstanceRef) -> Evidence:
        server = self._servers.pop(ref.instance_id, None)
        if server is not None:
            server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(ref.directory, "real"))
        return await self.inner.destroy(ref)
