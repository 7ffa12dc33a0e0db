"""Over two FIFOs: owners that die without a word, and what the next one finds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from tests.unit.guest.conftest import FENCE, RunningGuest

from corral.channel import ChannelLimits
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.guest import protocol
from corral.linux import fifos

OWNERS = """
import asyncio, json, os, sys, time
from corral.channel import ChannelLimits, Data, GuestClient
from corral.domain.fence import Fence
from corral.guest import protocol
from corral.linux import fifos

directory, program = sys.argv[1:3]
PATIENT = ChannelLimits(request_s=60, connect_s=60)

async def own(turn, offset, report):
    ends = fifos.connect(directory)
    client = await GuestClient.connect(ends, limits=PATIENT)
    if not client.hello.identified:
        await client.identify("sbx_1", Fence(1, 1), now=time.time(), entropy=b"")
        spec = {"exec_id": "exe_1", "argv": ["sh", "-c", program], "env": {"PATH": "/usr/bin:/bin"}, "cwd": "/"}
        await client.start_exec(spec, fence=Fence(1, 1))
    begun = offset
    async for item in client.attach("exe_1", {"stdout": offset, "stderr": 0}):
        assert isinstance(item, Data) and item.offset == offset
        pattern = b"0123456789\\n"
        expected = pattern[offset % 11:] + pattern * (len(item.data) // 11 + 2)
        assert item.data == expected[:len(item.data)]
        offset += len(item.data)
        os.write(report, b"%d\\n" % offset)  # what is kept, before the guest may drop it
        if turn % 2 and offset - begun > 5000:
            frame = protocol.input_frame({"id": 1, "op": "exec.stdin", "exec_id": "exe_1"}, b"x" * 500)
            os.write(ends.to_guest, frame[:7 + turn * 15])
            os.kill(os.getpid(), 9)

offset = 0
for turn in range(30):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(own(turn, offset, write))
        except BaseException as error:
            print(f"turn {turn}: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    os.close(write)
    told = b""
    while part := os.read(read, 65536):
        told += part
        if turn % 2 == 0 and told.count(b"\\n") > 3 + turn % 7:
            os.kill(pid, 9)  # wherever it is just now
    os.close(read)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9, status
    assert int(told.split()[-1]) > offset
    offset = int(told.split()[-1])
print(json.dumps({"offset": offset}))
"""


@pytest.fixture
async def guest(launch: Callable[..., RunningGuest]) -> RunningGuest:
    return launch("fifo")


async def test_thirty_owners_die_and_each_next_one_goes_on_where_they_were(guest: RunningGuest) -> None:
    """Half of them in the middle of a frame, the others wherever the kill finds them."""
    program = "while :; do printf '0123456789\\n%.0s' 1 2 3 4 5 6 7 8 9; done"
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", OWNERS, guest.directory, program],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["offset"] > 30 * 11
    client = await guest.connect()
    assert (await client.kill_exec("exe_1", 0, fence=FENCE))["killed_all"] is True


async def test_an_owner_that_is_stopped_keeps_others_out_until_it_is_dead(guest: RunningGuest) -> None:
    script = "import sys,time; from corral.linux import fifos; e = fifos.connect(sys.argv[1]); print('mine', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script, guest.directory], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == b"mine\n"
        owner.send_signal(signal.SIGSTOP)
        with pytest.raises(BlockingIOError):
            fifos.connect(guest.directory)
        owner.kill()
        owner.wait()
    client = await guest.connect()
    assert await client.ping() < 60


async def test_a_stopped_guest_is_given_up_in_time_and_taken_up_when_it_runs_again(guest: RunningGuest) -> None:
    client = await guest.connect(limits=ChannelLimits(request_s=0.3))
    os.kill(guest.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(CorralError, match="in time"):
            await client.ping()
        assert client.closed.is_set()
        with pytest.raises(CorralError, match="in time"):
            await guest.connect(limits=ChannelLimits(connect_s=0.3))
    finally:
        os.kill(guest.process.pid, signal.SIGCONT)
    client = await guest.connect()
    assert client.hello.floor == FENCE and await client.ping() < 60


async def test_the_death_of_the_guest_ends_the_client_at_once(guest: RunningGuest) -> None:
    client = await guest.connect()
    spec = guest.spec("sh", "-c", "echo last words; exec sleep 100")
    await client.start_exec(spec, fence=FENCE)
    output = client.attach(spec["exec_id"])
    assert (await anext(output)).data == b"last words\n"
    guest.process.kill()
    with pytest.raises(CorralError):
        await asyncio.wait_for(anext(output), 30)
    assert client.closed.is_set()


async def test_a_guest_whose_pipes_nobody_calls_gives_up(launch: Callable[..., RunningGuest]) -> None:
    guest = launch("fifo", "--deadline", "1.0")
    assert await asyncio.to_thread(guest.process.wait, 60) == 0


async def test_large_frames_pass_both_ways_at_the_same_time(guest: RunningGuest) -> None:
    client = await guest.connect()
    data = os.urandom(3 << 20)
    spec = guest.spec("cat", stdin="open")
    await client.start_exec(spec, fence=FENCE, follow=True)
    feeding = asyncio.create_task(client.stdin(spec["exec_id"], data, True, fence=FENCE))
    result = await guest.follow(client, spec["exec_id"])
    assert await feeding is True and result.stdout == data
    begun = time.monotonic()
    long = guest.spec(
        "true", "x" * 100_000, env={"PATH": "/usr/bin:/bin", **{f"V{n}": "y" * 100_000 for n in range(10)}}
    )
    assert (await client.start_exec(long, fence=FENCE))["started"] is True
    assert time.monotonic() - begun < 60


async def test_the_mark_of_a_resync_in_a_programs_input_is_only_data(guest: RunningGuest) -> None:
    client = await guest.connect()
    data = (protocol.MAGIC + b"n" * 16) * 5000 + protocol.MAGIC[:-1]
    spec = guest.spec("cat", stdin="open")
    await client.start_exec(spec, fence=FENCE, follow=True)
    feeding = asyncio.create_task(client.stdin(spec["exec_id"], data, True, fence=FENCE))
    result = await guest.follow(client, spec["exec_id"])
    assert await feeding is True and result.stdout == data
    assert (await client.fence(Fence(1, 2), "adopt"))["killed_all"] is True
