"""A node whose process hangs with its socket open: calls end as when it is gone; one that is only slow is waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from corral.adapters.nodes import remote
from corral.adapters.nodes.remote import RemoteNode
from corral.errors import CorralError
from corral.wire import link as wire

SERVER = """
import asyncio, sys
from corral.node.serving import NodeServer
from corral.ports.node import HostFacts

class Slow:
    node_id = "n1"
    async def host(self):
        return HostFacts("v2", "user", 1, 2)
    async def lost(self):
        await asyncio.Event().wait()
    async def signal_exec(self, exec_id, signal):
        await asyncio.sleep(signal)
    async def wait_exec(self, exec_id):
        await asyncio.sleep(2)
        return exec_id

async def main():
    await NodeServer(Slow(), sys.argv[1], "node.sock", print).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BEAT_S", 0.1)
    monkeypatch.setattr(remote, "HELLO_S", 0.3)


@pytest.fixture
def process(tmp_path: Path) -> Any:
    started = subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE)
    assert started.stdout is not None and started.stdout.readline() == b"ready\n"
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


@pytest.fixture
async def node(quick: None, process: Any, tmp_path: Path) -> AsyncIterator[Any]:
    made = RemoteNode(str(tmp_path / "node.sock"), patience_s=0.5, fresh_s=0.0)
    await made.open()
    yield made
    await made.close()


async def test_calls_to_a_process_that_hangs_end_and_it_is_found_again_when_it_goes_on(node: Any, process: Any) -> None:
    waiting = asyncio.create_task(node.wait_exec("exe_1"))
    once = asyncio.create_task(node.signal_exec("exe_1", 3600))
    await node.host()
    os.kill(process.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        many = await asyncio.gather(*(node.host() for _ in range(50)), once, return_exceptions=True)
        assert {error.code for error in many if isinstance(error, CorralError)} == {"node_unavailable"}
        assert len(many) == sum(isinstance(error, CorralError) for error in many) == 51
        assert not waiting.done(), "its end is waited for as long as it takes"
        os.kill(process.pid, signal.SIGCONT)
        assert (await node.host()).cpus == 2
        assert await waiting == "exe_1"


async def test_many_who_wait_for_a_node_that_hangs_wait_no_longer_than_one(node: Any, process: Any) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        with pytest.raises(CorralError):
            await node.host()
        began = time.monotonic()
        await asyncio.gather(*(node.host() for _ in range(200)), return_exceptions=True)
    assert time.monotonic() - began < 200 * 0.3 / 4, "not one after the other"


async def test_a_call_that_takes_long_is_not_cut(node: Any) -> None:
    connection = node._connection
    await node.signal_exec("exe_1", 2)  # many beats
    assert node._connection is connection and connection.link.open


async def test_who_stood_still_himself_does_not_take_the_node_for_silent(node: Any) -> None:
    connection = node._connection
    for _ in range(3):
        time.sleep(1.0)
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    assert node._connection is connection and connection.link.open


async def test_beats_end_with_the_connection(node: Any) -> None:
    link = node._connection.link
    await node.close()
    while link.open:
        await asyncio.sleep(0.01)
    assert link._beat is not None and link._beat.cancelled()
