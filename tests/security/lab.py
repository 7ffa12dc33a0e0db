"""A node in a process of its own, driven by JSON lines: the security checks attack what it makes and look on from the host.

`python lab.py CONFIG`, CONFIG = `{"state", "runtime", "installation", "subuid_range"?, "limits"?}`. It may run as root or as an
ordinary user; whoever drives it keeps its own ids and is the witness. Each line in is `{"id", "op", ...}`, each line out `{"id", "ok"}` or
`{"id", "error"}`; calls run side by side.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import os
import sys
import tarfile
import traceback
from typing import Any

from corral.adapters.runtimes.bubblewrap import BubblewrapRuntime
from corral.adapters.runtimes.crun import CrunRuntime
from corral.adapters.runtimes.runc import RuncRuntime
from corral.channel import client as channel
from corral.channel.answers import ChannelLimits
from corral.domain.limits import MIB, Limits
from corral.errors import CorralError
from corral.node.making import ref_from_json
from corral.node.service import LocalNode
from corral.node.templates import Template
from corral.ports.node import CreateInstance, ExecSpec
from corral.testing.certify.bench import FENCE, Stage, fresh
from corral.testing.hostile.guest import WITHOUT_CAPABILITY

SMALL = Limits(memory_bytes=192 * MIB, disk_bytes=48 * MIB, inodes=2000, tmp_bytes=8 * MIB, pids=64, wall_s=30)
ADAPTERS: dict[str, Any] = {"bubblewrap": BubblewrapRuntime, "crun": CrunRuntime, "runc": RuncRuntime}


class OneTemplate:
    def __init__(self, path: str) -> None:
        self.path = path

    async def ensure(self, name: str, progress: Any = None) -> Template:
        return Template(name, "sha256:busybox", self.path, ())

    def describe(self) -> list[dict[str, Any]]:
        return []

    def hold(self, name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Server:
    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        ranged = config.get("subuid_range")
        adapter = ADAPTERS[config["runtime"]](
            config["state"],
            installation_id=config["installation"],
            subuid_range=tuple(ranged) if ranged else None,
        )
        self.runtime = Stage(adapter)
        templates: Any = OneTemplate(os.path.join(config["state"], "rootfs"))
        self.node = LocalNode(
            config["state"],
            {config["runtime"]: self.runtime},
            templates,
            node_id="lab",
            installation_id=config["installation"],
        )
        self.refs: dict[str, Any] = {}

    # -- operations
    async def op_open(self) -> dict[str, Any]:
        await self.node.open()
        info = (await self.node.runtimes())[0]
        return dataclasses.asdict(info)

    async def op_create(
        self,
        unsafe: list[str] | None = None,
        limits: dict[str, Any] | None = None,
        guest: str | None = None,
        without_capability: bool = False,
        deadline_s: float = 300.0,
        instance: str | None = None,
    ) -> dict[str, Any]:
        instance = instance or fresh("ins")
        if guest is not None or without_capability:
            self.runtime.guests[instance] = (guest or WITHOUT_CAPABILITY, guest is None)
        request = CreateInstance(
            *(instance, fresh("sbx"), 1, FENCE, self.config["runtime"], "busybox"),
            *(dataclasses.replace(SMALL, **(limits or {})), deadline_s, frozenset(unsafe or ())),
        )
        try:
            report = await self.node.create(request)
        finally:
            self.runtime.guests.pop(instance, None)
        ref = self.refs[instance] = ref_from_json(report.ref)
        made = await self.runtime.attach(ref)
        assert made is not None
        return {
            "instance": instance,
            "directory": ref.directory,
            "tree": dataclasses.asdict(made.tree),
            "exec_uid": made.exec_uid,
            "guest_uid": made.guest_uid,
            "same_uid": made.same_uid,
            "security_level": report.security_level,
        }

    async def op_start(self, instance: str, argv: list[str], stdin: str | None = None, **spec: Any) -> str:
        exec_id = fresh("exe")
        if stdin is not None:
            spec["stdin"] = base64.b64decode(stdin)
        if "limits" in spec:
            spec["limits"] = dataclasses.replace(SMALL, **spec["limits"])
        if "pty" in spec:
            spec["pty"] = tuple(spec["pty"])
        await self.node.start_exec(instance, FENCE, ExecSpec(exec_id, tuple(argv), **spec))
        return exec_id

    async def op_wait(self, exec_id: str) -> dict[str, Any]:
        facts = await self.node.wait_exec(exec_id)
        answer = dataclasses.asdict(facts)
        for stream in ("stdout", "stderr"):
            kept = b"".join([piece async for piece in self.node.kept_output(exec_id, stream)])  # type: ignore[arg-type]
            answer[stream + "_bytes"] = base64.b64encode(kept).decode()
        return answer

    async def op_end(self, exec_id: str, why: str) -> None:
        await self.node.end_exec(exec_id, why)

    async def op_destroy(self, instance: str) -> dict[str, Any]:
        self.refs.pop(instance, None)
        return dataclasses.asdict(await self.node.destroy(instance, "test"))

    async def op_processes(self, instance: str) -> list[int]:
        return await self.runtime.processes(self.refs[instance])

    async def op_attach(self, instance: str) -> bool:
        return await self.runtime.attach(self.refs[instance]) is not None

    async def op_mark(self, instance: str) -> None:
        await self.node.mark(instance)

    async def op_collect(self, instance: str, outputs: list[str], into: str) -> dict[str, Any]:
        found = await self.node.collect(instance, outputs=outputs, max_bytes=32 * MIB, into=into)
        return dataclasses.asdict(found)

    async def op_put(self, instance: str, files: list[tuple[str, int, str]]) -> None:
        items = [(path, mode, base64.b64decode(data)) for path, mode, data in files]
        await self.node.put_files(instance, FENCE, items)

    async def op_put_tar(self, instance: str, tar: str, dest: str, pause_s: float = 0.0) -> None:
        async def once() -> Any:
            data = base64.b64decode(tar)
            yield data[:100]
            await asyncio.sleep(pause_s)
            yield data[100:]

        await self.node.put_tar(instance, FENCE, once(), dest)

    async def op_get_tar(self, instance: str, path: str) -> dict[str, Any]:
        data = b"".join([piece async for piece in self.node.get_tar(instance, path)])
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            names = [[one.name, one.type.decode("latin-1"), one.linkname] for one in archive.getmembers()]
        return {"members": names, "data": base64.b64encode(data).decode()}

    async def op_instances(self) -> list[str]:
        return await self.node.instances()

    async def op_close(self) -> None:
        for instance in await self.node.instances():
            await self.node.destroy(instance, "test")
        await self.node.gc()
        await self.node.close()

    # -- wire
    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=64 * MIB)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        running: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(json.loads(line)))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _answer(self, request: dict[str, Any]) -> None:
        number = request.pop("id")
        try:
            told: dict[str, Any] = {"ok": await getattr(self, f"op_{request.pop('op')}")(**request)}
        except CorralError as error:
            told = {"error": {"code": error.code, "detail": error.detail}}
        except Exception:
            told = {"error": {"code": "crash", "detail": traceback.format_exc()}}
        sys.stdout.write(json.dumps({"id": number, **told}) + "\n")
        sys.stdout.flush()


def main() -> None:
    config = json.loads(sys.argv[1])
    if "channel" in config:
        # A silent guest is waited for as long as these say; the tests have less patience than a loaded host deserves.
        patience = ChannelLimits(**config["channel"])
        channel.ChannelLimits = lambda: patience  # type: ignore[assignment,misc]
    asyncio.run(Server(config).serve())


if __name__ == "__main__":
    main()
