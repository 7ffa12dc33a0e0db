"""The removal of an instance: by what the journal says, where it lies now."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.node import making
from corral.node.journal import InstanceEntry, Journal
from corral.ports.runtime import Evidence, InstanceRef, Runtime

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
