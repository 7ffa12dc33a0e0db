"""A node over the fake runtime, or over any wrapper of it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from corral.adapters.runtimes.fake import FakeRuntime
from corral.domain.facts import ExecFacts
from corral.domain.fence import Fence
from corral.domain.ids import new_id
from corral.domain.limits import Limits
from corral.node import service
from corral.node.service import LocalNode
from corral.node.templates import Template
from corral.ports.node import CreateInstance, ExecSpec
from corral.ports.runtime import Runtime

FENCE = Fence(1, 1)
INSTALLATION = "test-installation"


def fresh(prefix: str) -> str:
    return new_id(prefix, time.time_ns() // 1_000_000, secrets.token_bytes(10))


class StubTemplates:
    """One template that is always there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def ensure(self, name: str, progress: Any = None) -> Template:
        return Template(name, "sha256:0", str(self.path), ("python",))

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        yield

    def unfinished(self) -> list[Path]:
        return []

    def remove_unfinished(self) -> int:
        return 0

    def describe(self) -> list[dict[str, Any]]:
        return [{"name": "host", "digest": None, "available": True, "reason": None, "languages": ["python"]}]


@dataclass
class Bench:
    """A state directory, its runtime, and the node of the moment."""

    state: Path
    runtime: Runtime
    node: LocalNode = field(init=False)

    async def start(self) -> None:
        templates: Any = StubTemplates(self.state)
        self.node = LocalNode(
            str(self.state), {self.runtime.name: self.runtime}, templates, node_id="n", installation_id=INSTALLATION
        )
        await self.node.open()

    async def restart(self) -> None:
        """The node dies and another opens the same journal; the fake's instances live on."""
        await self.node.close()
        await self.start()

    async def create(self, **changes: Any) -> str:
        values: dict[str, Any] = {
            "instance_id": fresh("ins"),
            "sandbox_id": fresh("sbx"),
            "incarnation": 1,
            "fence": FENCE,
            "runtime": self.runtime.name,
            "template": "host",
            "limits": Limits(),
            "deadline_s": 300.0,
        }
        request = CreateInstance(**{**values, **changes})
        return (await self.node.create(request)).instance_id

    async def begin(self, instance: str, *argv: str, fence: Fence = FENCE, **spec: Any) -> str:
        exec_id = fresh("exe")
        await self.node.start_exec(instance, fence, ExecSpec(exec_id, argv, **spec))
        return exec_id

    async def run(self, instance: str, *argv: str, **spec: Any) -> tuple[ExecFacts, bytes, bytes]:
        exec_id = await self.begin(instance, *argv, **spec)
        facts = await self.node.wait_exec(exec_id)
        out = b"".join([piece async for piece in self.node.kept_output(exec_id, "stdout")])
        return facts, out, b"".join([piece async for piece in self.node.kept_output(exec_id, "stderr")])


@pytest.fixture
async def bench_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    monkeypatch.setattr(service, "ensure_interpreter", lambda state, progress=None: tmp_path)
    made: list[Bench] = []

    async def make(wrap: Callable[[Runtime], Runtime] | None = None) -> Bench:
        inner: Runtime = FakeRuntime(str(tmp_path), installation_id=INSTALLATION)
        bench = Bench(tmp_path, wrap(inner) if wrap else inner)
        await bench.start()
        made.append(bench)
        return bench

    yield make
    for bench in made:
        for instance in await bench.node.instances():
            await bench.node.destroy(instance, "test")
        await bench.node.close()


@pytest.fixture
async def bench(bench_of: Callable[..., Any]) -> Bench:
    made: Bench = await bench_of()
    return made
