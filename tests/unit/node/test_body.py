"""A body whose guest talks over two FIFOs: whose turn it is, and what is left when it lets go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.guest import conftest as guests

from corral.domain.limits import LimitModes, Limits
from corral.errors import CorralError
from corral.linux import fifos
from corral.node.body import Body
from corral.node.journal import Journal
from corral.ports.runtime import HostTree, Instance, InstanceRef


class OneGuest:
    """A runtime of which only the end of its one guest is asked."""

    name = "one"

    def __init__(self, guest: guests.RunningGuest) -> None:
        self.guest = guest

    async def wait_gone(self, ref: InstanceRef) -> None:
        while self.guest.process.poll() is None:
            await asyncio.sleep(0.01)

    async def kill(self, ref: InstanceRef) -> None:
        self.guest.process.kill()

    async def processes(self, ref: InstanceRef) -> list[int]:
        return [] if self.guest.process.poll() is not None else [self.guest.process.pid]


@pytest.fixture
async def guest() -> AsyncIterator[guests.RunningGuest]:
    made = guests.start("fifo")
    yield made
    await made.stop()


@contextlib.asynccontextmanager
async def body_of(guest: guests.RunningGuest, tmp_path: Path) -> AsyncIterator[tuple[Body, list[Any]]]:
    gone: list[Any] = []

    async def on_gone(body: Body) -> None:
        gone.append(body)

    instance = Instance(
        InstanceRef("one", "ins_test", guest.directory, {}),
        HostTree(str(tmp_path), 0, 0, "directory"),
        control="fifo",
    )
    runtime: Any = OneGuest(guest)
    journal = Journal(str(tmp_path / "journal"))
    body = Body("ins_test", runtime, instance, Limits(), LimitModes(), 0, journal, on_gone)
    try:
        yield body, gone
    finally:
        await body.let_go()


async def test_it_waits_for_an_owner_that_is_just_ending_and_is_one_itself(
    guest: guests.RunningGuest, tmp_path: Path
) -> None:
    before = fifos.connect(guest.directory)
    async with body_of(guest, tmp_path) as (body, _):
        connecting = asyncio.create_task(body.client())
        await asyncio.sleep(0.1)
        assert not connecting.done()
        before.close()
        client = await connecting
        assert await client.ping() < 60
        with pytest.raises(BlockingIOError):
            fifos.connect(guest.directory)
    fifos.connect(guest.directory).close()


async def test_the_end_of_the_guest_is_the_end_of_its_channel(guest: guests.RunningGuest, tmp_path: Path) -> None:
    async with body_of(guest, tmp_path) as (body, gone):
        body.watch()
        client = await body.client()
        guest.process.kill()
        await asyncio.wait_for(client.closed.wait(), 30)
        await asyncio.wait_for(body.gone.wait(), 30)
        with pytest.raises(CorralError) as caught:
            await body.client()
        assert caught.value.code == "sandbox_lost"
        async with asyncio.timeout(30):
            while gone != [body]:
                await asyncio.sleep(0.01)
