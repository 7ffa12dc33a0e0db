"""Services over a node in memory and a store in memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from corral import config
from corral.adapters.coordination.inprocess import InProcess
from corral.adapters.store.memory import MemoryStore
from corral.api.routes import Reply, Request, dispatch
from corral.domain.policy import Policy
from corral.domain.request import HostCaps
from corral.domain.runner import Runner
from corral.ports.coordination import Coordination
from corral.services.control import Core, Services
from corral.services.documents import Documents
from corral.services.execs import Execs
from corral.services.executor import Executor
from corral.services.files import Files
from corral.services.lifecycle import Lifecycle
from corral.services.sandboxes import Sandboxes
from corral.services.upkeep import Upkeep

from .fake_node import FakeNode

RUNNERS = {
    "python": Runner("python", "main.py", ("print", "ran", "{file}")),
    "c": Runner("c", "main.c", ("print", "program"), build=("exit", "1"), tools=("cc",)),
    "javascript": Runner("javascript", "main.js", ("print", "program"), build=("exit", "0")),
    "cpp": Runner("cpp", "main.cc", ("print",), build=("exit", "1", "as: No space left on device")),
    "sql": Runner("sql", "main.sql", ("print", "rows"), tools=("sqlite3",)),
}


class World:
    """A store and a node that outlive the services; `start` makes services as a new process would."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.node = FakeNode()
        self.offset_ms = 0
        self.store = MemoryStore(self.now_ms)
        self.logged: list[str] = []
        self.services: Services | None = None

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.offset_ms

    async def start(self, coordination: Coordination | None = None, worker: str = "owner", **delays: float) -> Services:
        await self.store.open()
        core = Core(
            store=self.store,
            node=self.node,
            policy=Policy.from_dict(config.data_document(config.data_file("policy/default.yaml"), str(self.tmp))),
            runners=RUNNERS,
            host=HostCaps(8 << 30, 2),
            artifacts=str(self.tmp / "artifacts"),
            now_ms=self.now_ms,
            entropy=os.urandom,
            log=self.logged.append,
            coordination=coordination or InProcess(),
            worker=worker,
            delays={**config.DELAYS, "sweep_s": 0.02, "client_gone_s": 0.2, "takeover_client_gone_s": 0.2, **delays},
        )
        execs = Execs(core)
        lifecycle = Lifecycle(core, execs)
        documents = Documents(self.node)
        executor = Executor(core, lifecycle, execs)
        sandboxes = Sandboxes(core, lifecycle, execs)
        upkeep = Upkeep(core, lifecycle, executor, sandboxes, documents)
        self.services = Services(core, documents, sandboxes, executor, upkeep, Files(core, sandboxes))
        await self.services.start()
        return self.services

    async def crash(self) -> None:
        """The process is gone: its tasks stop where they are, nothing is finished."""
        assert self.services is not None
        core = self.services.core
        for task in [*core.tasks, *core.last]:
            task.cancel()
        self.services = None

    async def call(self, method: str, route: str, document: Any = None, **query: Any) -> Reply:
        assert self.services is not None
        headers = {k.removeprefix("h_").replace("_", "-"): v for k, v in query.items() if k.startswith("h_")}
        rest = {k: str(v) for k, v in query.items() if not k.startswith("h_")}
        return await dispatch(self.services, Request(method, route, rest, headers, b"", document))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    await made.start()
    yield made
    for gate in ("create_gate", "start_gate", "destroy_gate"):
        if (event := getattr(made.node, gate)) is not None:
            event.set()
    if made.services is not None:
        await made.services.stop(5.0)


async def turns() -> None:
    """All that can go on without a timer or a gate has gone on: store and node are in memory, nothing waits for a thread."""
    for _ in range(500):
        await asyncio.sleep(0)


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Any]:
    """Wait until a condition holds (10 s)."""
    import inspect

    async def wait(condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while True:
                held = condition()
                if inspect.isawaitable(held):
                    held = await held
                if held:
                    return
                await asyncio.sleep(0.005)

    return wait
