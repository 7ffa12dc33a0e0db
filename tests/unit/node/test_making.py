"""The removal of an instance: by what the journal says, where it lies now."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.node import making, service
from corral.node.journal import InstanceEntry, Journal
from corral.ports.runtime import Evidence, Instance, InstanceRef, InstanceSpec, Runtime

from .conftest import Bench, fresh


class Destroyer:
    """A runtime that only hears what it is to destroy."""

    def __init__(self) -> None:
        self.heard: list[InstanceRef] = []

    async def destroy(self, ref: InstanceRef) -> Evidence:
        self.heard.append(ref)
        return Evidence(clean=True, left=(), notes=())


async def test_an_instance_of_a_moved_state_directory_is_removed_where_it_lies_now(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    journal.open()
    now, data = tmp_path / "i" / "x", {"init": {"pid": 5}}
    now.mkdir(parents=True)
    old: dict[str, Any] = {"runtime": "crun", "instance_id": "ins_x", "directory": "/gone/i/x", "data": data}
    journal.put_instance(InstanceEntry("ins_x", "condemned", Fence(1, 1), {"ref": old}))
    runtime = Destroyer()
    evidence = await making.undo(journal, cast(Runtime, runtime), str(now), "ins_x")
    assert evidence.clean
    assert runtime.heard == [InstanceRef("crun", "ins_x", str(now), data)]
    assert not now.exists() and "ins_x" not in journal.instances
    journal.close()


async def test_a_sandbox_that_was_here_is_made_again_above_the_fences_that_it_had_and_not_below(bench: Bench) -> None:
    sandbox = fresh("sbx")
    first = await bench.create(sandbox_id=sandbox)
    await bench.node.fence(first, Fence(1, 5), "kill")
    await bench.node.destroy(first, "deleted")
    await bench.restart()
    with pytest.raises(CorralError) as refused:
        await bench.create(sandbox_id=sandbox, fence=Fence(1, 4))
    assert (refused.value.code, refused.value.facts["floor"]) == ("lease_lost", "1.5")
    assert await bench.node.instances() == []
    again = await bench.create(sandbox_id=sandbox, fence=Fence(1, 6))
    with pytest.raises(CorralError, match=r"1\.5 is below 1\.6"):
        await bench.begin(again, "true", fence=Fence(1, 5))
    with pytest.raises(CorralError) as second:
        await bench.create(sandbox_id=sandbox, fence=Fence(1, 1))
    assert second.value.facts["floor"] == "1.6", "a body beside the one that lives"
    await bench.create(sandbox_id=sandbox, incarnation=2, fence=Fence(2, 0))


class Slow:
    """The fake runtime, whose `create` waits until it is let on; counts how many are under way."""

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner
        self.go_on = asyncio.Event()
        self.now = self.most = self.begun = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        self.now += 1
        self.begun += 1
        self.most = max(self.most, self.now)
        try:
            await self.go_on.wait()
            return await self._inner.create(spec, control)
        finally:
            self.now -= 1


async def test_only_so_many_are_made_at_once_and_who_is_removed_while_it_waits_is_not_made(
    bench_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.os, "cpu_count", lambda: 1)
    bench = await bench_of(Slow)
    slow, first, others = bench.runtime, [fresh("ins") for _ in range(8)], [fresh("ins") for _ in range(20)]
    begun = [asyncio.create_task(bench.create(instance_id=each)) for each in first]
    while slow.begun < len(first):
        await asyncio.sleep(0.001)
    waiting = [asyncio.create_task(bench.create(instance_id=each)) for each in others]
    for _ in range(200):
        await asyncio.sleep(0)
    given_up, cancelled, wanted = others[:10], waiting[10], waiting[11:]
    for each in given_up:
        assert (await asyncio.wait_for(bench.node.destroy(each, "deleted"), 10)).clean
    cancelled.cancel()
    slow.go_on.set()
    refused = await asyncio.gather(*waiting[:10], return_exceptions=True)
    assert {error.code for error in refused if isinstance(error, CorralError)} == {"sandbox_deleted"}
    assert await asyncio.gather(*begun, *wanted) == [*first, *others[11:]]
    assert (slow.most, slow.begun) == (len(first), len(first) + len(wanted)), (
        "and a turn that was given up is nobody's loss"
    )
    assert set(await bench.node.instances()) == {*first, *others[11:]}
