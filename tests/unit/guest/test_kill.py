"""Ending: whole trees, whatever they do; time-outs, fences, lost supervisors, the dead man's switch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from corral.channel import Ended, GuestClient
from corral.domain.fence import Fence
from corral.errors import CorralError

FENCE = Fence(1, 1)

STUBBORN = r"""
import os, signal, sys, time
def ignore():
    for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(n, signal.SIG_IGN)
ready, said = os.pipe()
def forever(mark):
    ignore()
    os.write(said, b"x")
    while True:
        time.sleep(0.05)
if os.fork() == 0:
    forever("child")
if os.fork() == 0:
    os.setsid()
    forever("session")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 3)
        forever("double")
    os._exit(0)
count = 0
while count < 3:
    count += len(os.read(ready, 3))
print("start", flush=True)
time.sleep(600)
"""


async def processes_inside(client: GuestClient) -> int:
    return (await client.usage())["processes"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def until_none(client: GuestClient) -> None:
    deadline = time.monotonic() + 30
    while await processes_inside(client):
        assert time.monotonic() < deadline, "something lives on"
        await asyncio.sleep(0.02)


async def begin(guest, client: GuestClient, *argv: str, **more: object):
    spec = guest.spec(*argv, **more)
    await client.start_exec(spec, fence=FENCE)
    stream = client.attach(spec["exec_id"])
    first = await asyncio.wait_for(anext(stream), 60)
    return spec["exec_id"], stream, first


async def end_of(stream) -> Ended:
    items = [item async for item in stream]
    assert isinstance(items[-1], Ended)
    return items[-1]


async def test_a_kill_ends_double_forked_and_deaf_descendants(guest, client: GuestClient) -> None:
    exec_id, stream, first = await begin(guest, client, "python3", "-I", "-S", "-c", STUBBORN)
    assert first.data == b"start\n"
    report = await client.kill_exec(exec_id, 0.3, fence=FENCE)
    assert report["killed_all"] is True and report["killed"] >= 3
    end = await end_of(stream)
    assert (end.status["state"], end.status["signal"], end.status["ended_by"]) == ("ended", 15, "kill")
    await until_none(client)
    assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"


async def test_the_own_time_limit_ends_the_tree_without_any_client(guest) -> None:
    client = await guest.connect()
    spec = guest.spec("python3", "-I", "-S", "-c", STUBBORN, timeout_s=1.0, grace_s=0.2)
    await client.start_exec(spec, fence=FENCE)
    await client.close()
    await asyncio.sleep(2.5)
    client = await guest.connect()
    result = await guest.follow(client, spec["exec_id"])
    assert (result.stdout, result.status["ended_by"], result.status["killed_all"]) == (b"start\n", "timeout", True)
    # The clock runs from the request; on a busy machine the program begins a good while later.
    assert 300 <= result.status["ended_ms"] - result.status["started_ms"] < 20_000
    await until_none(client)


async def test_term_is_enough_for_who_listens(guest, client: GuestClient) -> None:
    script = "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep .05; done"
    exec_id, stream, _ = await begin(guest, client, "sh", "-c", script)
    begun = time.monotonic()
    assert (await client.kill_exec(exec_id, 30, fence=FENCE))["killed_all"] is True
    assert time.monotonic() - begun < 20
    items = [item async for item in stream]
    assert items[-1].status["exit_code"] == 3
    assert b"bye\n" in b"".join(i.data for i in items[:-1])


async def test_a_second_kill_cuts_the_grace_short(guest, client: GuestClient) -> None:
    exec_id, _, _ = await begin(guest, client, "sh", "-c", "trap '' TERM; echo ready; while :; do sleep .05; done")
    slow = asyncio.create_task(client.kill_exec(exec_id, 300, fence=FENCE))
    await asyncio.sleep(0.2)
    assert (await asyncio.wait_for(client.kill_exec(exec_id, 0, fence=FENCE), 30))["killed_all"] is True
    assert (await asyncio.wait_for(slow, 30))["killed_all"] is True


async def test_a_stopped_program_is_killed_too(guest, client: GuestClient) -> None:
    exec_id, stream, _ = await begin(guest, client, "sh", "-c", "echo ready; kill -STOP $$; sleep 100")
    assert (await client.kill_exec(exec_id, 5, fence=FENCE))["killed_all"] is True
    assert (await end_of(stream)).status["signal"] == 15
    await until_none(client)


async def test_a_thread_that_outlives_its_leader_is_killed(guest, client: GuestClient) -> None:
    """After pthread_exit of the first thread the process shows as a zombie, and lives."""
    script = (
        "import ctypes,threading,time,os\n"
        "if os.fork()==0:\n"
        " os.setsid()\n"
        " threading.Thread(target=lambda:time.sleep(600)).start()\n"
        " ctypes.CDLL(None).pthread_exit(None)\n"
        "print('ready',flush=True);time.sleep(600)"
    )
    exec_id, _, _ = await begin(guest, client, "python3", "-c", script)
    await asyncio.sleep(0.3)
    report = await client.kill_exec(exec_id, 0, fence=FENCE)
    assert report == {"killed_all": True, "killed": 2}
    await until_none(client)


async def test_a_small_fork_bomb_ends(guest, client: GuestClient) -> None:
    script = (
        "import os,resource,time\n"
        "print('go',flush=True)\n"
        "end=time.monotonic()+60\n"
        "n=0\n"
        "while time.monotonic()<end and n<3000:\n"
        " n+=1\n"
        " try:\n"
        "  if os.fork()==0:\n"
        "   os.setsid(); time.sleep(0.3)\n"
        "   if os.fork()==0: time.sleep(0.3); os.fork(); time.sleep(60)\n"
        "   os._exit(0)\n"
        " except OSError: pass\n"
        " time.sleep(0.002)\n"
    )
    exec_id, _, _ = await begin(guest, client, "python3", "-I", "-S", "-c", script)
    await asyncio.sleep(1)
    assert (await client.kill_exec(exec_id, 0, fence=FENCE))["killed_all"] is True
    await until_none(client)


async def test_background_processes_end_with_main_when_asked(guest, client: GuestClient) -> None:
    result = await guest.run(
        client, "sh", "-c", "sleep 100 & (setsid sleep 100 &) ; sleep .2; exit 4", background="kill"
    )
    assert (result.status["exit_code"], result.status["killed"], result.status["background"]) == (4, 2, 0)
    await until_none(client)


async def test_kill_all_ends_every_exec_and_what_was_kept(guest, client: GuestClient) -> None:
    await guest.run(client, "sh", "-c", "setsid sleep 100 & exit 0")
    _, stream, _ = await begin(guest, client, "python3", "-I", "-S", "-c", STUBBORN)
    report = await client.kill_all(fence=FENCE)
    assert report["killed_all"] is True
    end = await end_of(stream)
    assert (end.status["state"], end.status["signal"], end.status["ended_by"]) == ("ended", 9, "kill")
    assert await processes_inside(client) == 0
    assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"
    assert (await client.kill_all(fence=FENCE))["killed_all"] is True


async def test_signals_reach_main_or_the_tree(guest, client: GuestClient) -> None:
    script = "trap 'echo main' USR1; (trap 'echo child; exit' USR1; echo ready; while :; do sleep .05; done) & while :; do sleep .05; done"
    exec_id, stream, first = await begin(guest, client, "sh", "-c", script)
    await client.signal(exec_id, 10, fence=FENCE)
    seen = first.data
    while b"main" not in seen:
        seen += (await asyncio.wait_for(anext(stream), 30)).data
    assert b"child" not in seen
    await client.signal(exec_id, 9, fence=FENCE, tree=True)
    assert (await end_of(stream)).status["signal"] == 9
    await until_none(client)


async def test_orphans_are_reaped(guest, client: GuestClient) -> None:
    result = await guest.run(
        client, "sh", "-c", "for i in 1 2 3 4 5 6 7 8; do (sleep .05 &) ; done; exit 0", background="keep"
    )
    assert result.status["exit_code"] == 0
    await until_none(client)
    count = await guest.run(client, "sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true")
    if guest.mode != "child":
        assert int(count.stdout) == 0


# -- fence -----------------------------------------------------------------------------------------------------------------------
async def test_below_the_floor_everything_is_refused(guest, client: GuestClient) -> None:
    spec = guest.spec("sleep", "100", stdin="open")
    await client.start_exec(spec, fence=FENCE)
    await client.fence(Fence(1, 5), "adopt")
    exec_id = spec["exec_id"]
    for attempt in (
        client.start_exec(guest.spec("true"), fence=Fence(1, 4)),
        client.stdin(exec_id, b"x", fence=Fence(1, 4)),
        client.signal(exec_id, 9, fence=Fence(1, 4)),
        client.resize(exec_id, 1, 1, fence=Fence(1, 4)),
        client.kill_exec(exec_id, 0, fence=Fence(1, 4)),
        client.kill_all(fence=Fence(0, 99)),
        client.extend_deadline(1, fence=Fence(1, 4)),
        client.shutdown(fence=Fence(1, 4)),
        client.fence(Fence(1, 4), "kill"),
        client.identify("sbx_test", Fence(1, 4), now=0, entropy=b""),
        client.start_exec(guest.spec("true"), fence=Fence(2, 1)),
    ):
        with pytest.raises(CorralError) as caught:
            await attempt
        assert caught.value.code == "lease_lost"
    assert (await client.exec_status(exec_id))["state"] == "running"
    assert (await client.kill_exec(exec_id, 0, fence=Fence(1, 5)))["killed_all"] is True


async def test_fence_kill_ends_older_execs_before_it_answers(guest, client: GuestClient) -> None:
    _, stream, _ = await begin(guest, client, "python3", "-I", "-S", "-c", STUBBORN)
    report = await client.fence(Fence(1, 2), "kill")
    assert report["killed_all"] is True
    assert await processes_inside(client) == 0
    assert (await end_of(stream)).status["ended_by"] == "fence"
    spec = guest.spec("sleep", "100")
    await client.start_exec(spec, fence=Fence(1, 2))
    await client.fence(Fence(1, 2), "kill")
    assert (await client.exec_status(spec["exec_id"]))["state"] == "running"
    await client.fence(Fence(1, 3), "kill")
    assert (await client.exec_status(spec["exec_id"]))["state"] == "ended"


async def test_before_identify_nothing_is_served(guest) -> None:
    client = await guest.connect(identify=False)
    assert client.hello.identified is False
    await client.ping()
    for attempt in (client.usage(), client.start_exec(guest.spec("true"), fence=FENCE), client.kill_all(fence=FENCE)):
        with pytest.raises(CorralError) as caught:
            await attempt
        assert caught.value.code == "illegal_transition"


# -- supervisor and guest --------------------------------------------------------------------------------------------------------
async def test_a_killed_supervisor_is_an_exec_lost_and_its_processes_end(launch) -> None:
    guest = launch("child")
    client = await guest.connect()
    _, stream, _ = await begin(guest, client, "python3", "-I", "-S", "-c", STUBBORN)
    other, other_stream, _ = await begin(guest, client, "sh", "-c", "echo ready; read x; exit 6", stdin="open")
    children = children_of(guest.process.pid)
    supervisor = min(children)
    os.kill(supervisor, 9)
    end = await asyncio.wait_for(end_of(stream), 60)
    assert (end.status["state"], end.status["started"], end.status["killed_all"]) == ("lost", True, True)
    assert end.status["killed"] >= 4
    # The neighbour goes on, and the guest too.
    await client.stdin(other, b"\n", fence=FENCE)
    assert (await end_of(other_stream)).status["exit_code"] == 6
    await until_none(client)
    assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"


@pytest.mark.slow
async def test_a_stopped_supervisor_does_not_save_the_exec(launch) -> None:
    guest = launch("child")
    client = await guest.connect()
    exec_id, stream, _ = await begin(guest, client, "sh", "-c", "echo ready; sleep 500")
    (supervisor,) = children_of(guest.process.pid)
    os.kill(supervisor, 19)
    assert (await client.kill_exec(exec_id, 0, fence=FENCE))["killed_all"] is True
    assert (await asyncio.wait_for(end_of(stream), 60)).status["ended_by"] == "kill"
    await until_none(client)


@pytest.mark.slow
async def test_the_deadline_ends_guest_and_execs(launch) -> None:
    for mode in ("child", "pid1"):
        guest = launch(mode, "--deadline", "3")
        client = await guest.connect()
        await client.start_exec(guest.spec("python3", "-I", "-S", "-c", STUBBORN), fence=FENCE)
        assert await asyncio.to_thread(guest.process.wait, 60) in (0, 137)
        await asyncio.wait_for(client.closed.wait(), 30)


@pytest.mark.slow
async def test_the_deadline_can_be_moved_both_ways(launch) -> None:
    guest = launch("child", "--deadline", "4")
    client = await guest.connect()
    await client.extend_deadline(600, fence=FENCE)
    await asyncio.sleep(5)
    assert await client.ping() < 30
    await client.extend_deadline(0, fence=FENCE)
    assert await asyncio.to_thread(guest.process.wait, 60) == 0


@pytest.mark.slow
async def test_without_a_first_client_the_guest_gives_up(launch) -> None:
    guest = launch("pid1")
    begun = time.monotonic()
    assert await asyncio.to_thread(guest.process.wait, 90) == 0
    assert time.monotonic() - begun > 12


async def test_when_the_guest_dies_nothing_lives_on(launch) -> None:
    guest = launch("child")
    client = await guest.connect()
    mark = f"corral-test-{os.getpid()}-{time.monotonic_ns()}"
    await begin(guest, client, "sh", "-c", f"echo ready; setsid sh -c 'sleep 500; : {mark}' & sleep 500; : {mark}")
    guest.process.kill()
    deadline = time.monotonic() + 30
    while subprocess.run(["pgrep", "-f", mark], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_shutdown_ends_everything(guest, client: GuestClient) -> None:
    await client.start_exec(guest.spec("python3", "-I", "-S", "-c", STUBBORN), fence=FENCE)
    await client.shutdown(fence=FENCE)
    assert await asyncio.to_thread(guest.process.wait, 60) == 0
    await asyncio.wait_for(client.closed.wait(), 30)
