"""A guest that stops what is below it: nothing moves, clocks stand, and what was stopped before stays so."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from tests.unit.guest.conftest import FENCE, RunningGuest

from corral.channel import GuestClient
from corral.errors import CorralError
from corral.guest import processes
from corral.guest.pausing import stop_all

TICKS = "import os, time\nif os.fork() == 0: os.setsid()\nos.fork()\nwhile True:\n print('x', flush=True); time.sleep(0.002)"
FORKS = "import os, time\nwhile True:\n if os.fork() == 0:\n  time.sleep(0.001)\n  os._exit(0)\n os.waitpid(-1, 0)"


def programs(guest: RunningGuest, word: str) -> list[processes.Process]:
    """Live programs below the guest whose command line holds the word, seen by the host."""
    found = []
    for process in processes.descendants(guest.process.pid):
        try:
            with open(f"/proc/{process.pid}/cmdline", "rb") as file:
                line = file.read()
        except OSError:
            continue
        if word.encode() in line and b"boot.py" not in line:
            found.append(process)
    return found


def cpu_of(process: processes.Process) -> list[str]:
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[11:13]


async def until_states(guest: RunningGuest, word: str, states: bytes, count: int) -> None:
    end = time.monotonic() + 30
    while True:
        seen = [process.state for process in programs(guest, word)]
        if len(seen) == count and all(state in states for state in seen):
            return
        assert time.monotonic() < end, f"{word}: {seen}"
        await asyncio.sleep(0.01)


async def begin(guest: RunningGuest, client: GuestClient, *argv: str, **more: object) -> str:
    spec = guest.spec(*argv, **more)
    assert (await client.start_exec(spec, fence=FENCE))["state"] != "failed"
    return str(spec["exec_id"])


async def test_nothing_moves_until_it_is_resumed(guest: RunningGuest, client: GuestClient) -> None:
    exec_id = await begin(guest, client, "python3", "-c", TICKS)
    await until_states(guest, "setsid", b"SR", 4)
    told = await client.pause(FENCE, stop=True)
    assert told["whole"] == 1 and told["stopped"] >= 4
    await until_states(guest, "setsid", b"T", 4)
    times = [cpu_of(one) for one in programs(guest, "setsid")]
    produced = (await client.exec_status(exec_id))["offsets"]["stdout"]
    await asyncio.sleep(0.3)
    produced_later = (await client.exec_status(exec_id))["offsets"]["stdout"]
    assert produced_later - produced <= 64 * 1024, "at most what was in the pipe"
    assert times == [cpu_of(one) for one in programs(guest, "setsid")]
    assert (await client.pause(FENCE, stop=True))["whole"] == 1, "again: nothing"
    await client.resume(FENCE)
    await until_states(guest, "setsid", b"SR", 4)
    await client.resume(FENCE)
    assert (await client.kill_exec(exec_id, 0.0, fence=FENCE))["killed_all"]


async def test_what_a_program_has_stopped_itself_stays_stopped(guest: RunningGuest, client: GuestClient) -> None:
    await begin(guest, client, "sh", "-c", "sleep 1001 & kill -STOP $!; sleep 1002 & wait")

    async def one_of_three_is_stopped() -> int:
        end = time.monotonic() + 30
        while True:
            found = [
                *programs(guest, "1001"),
                *programs(guest, "sleep\x001002"),
            ]  # the shell, or what it has become, and its two
            stopped = {one.pid for one in found if one.state == b"T"}
            if len({one.pid for one in found}) == 3 and len(stopped) == 1:
                return stopped.pop()
            assert time.monotonic() < end, [(one.pid, one.state) for one in found]
            await asyncio.sleep(0.01)

    stopped = await one_of_three_is_stopped()
    assert await client.pause(FENCE, stop=True) == {"whole": 1, "stopped": 2}
    await client.resume(FENCE)
    assert await one_of_three_is_stopped() == stopped
    assert (await client.kill_all(fence=FENCE))["killed_all"]


async def test_programs_that_fork_all_the_time_are_all_found(guest: RunningGuest, client: GuestClient) -> None:
    for _ in range(3):
        await begin(guest, client, "python3", "-c", FORKS)
    await until_some(guest, "waitpid")
    for _ in range(5):
        assert (await client.pause(FENCE, stop=True))["whole"] == 1
        assert {one.state for one in programs(guest, "waitpid")} <= {b"T", b"Z"}
        await client.resume(FENCE)
    assert (await client.kill_all(fence=FENCE))["killed_all"]


async def test_a_program_that_is_about_to_start_is_stopped_too(guest: RunningGuest, client: GuestClient) -> None:
    for _ in range(20):
        start = asyncio.ensure_future(client.start_exec(guest.spec("sh", "-c", "while :; do :; done"), fence=FENCE))
        paused = asyncio.ensure_future(client.pause(FENCE, stop=True))  # right behind it, on the same line
        assert (await paused)["whole"] == 1 and (await start)["started"] is True
        assert {one.state for one in programs(guest, "while :")} == {b"T"}
        await client.resume(FENCE)
    assert (await client.kill_all(fence=FENCE))["killed_all"]


@pytest.mark.parametrize("stop", [True, False])
async def test_nothing_begins_while_it_is_paused(guest: RunningGuest, client: GuestClient, stop: bool) -> None:
    await client.pause(FENCE, stop=stop)
    spec = guest.spec("true")
    with pytest.raises(CorralError) as refused:
        await client.start_exec(spec, fence=FENCE)
    assert refused.value.code == "sandbox_paused" and (await client.exec_status(spec["exec_id"]))["started"] is False
    await client.resume(FENCE)
    assert (await client.start_exec(spec, fence=FENCE))["started"] is True


async def until_some(guest: RunningGuest, word: str) -> None:
    end = time.monotonic() + 30
    while len(programs(guest, word)) < 3:
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def test_the_clock_of_an_exec_stands_while_it_is_paused(guest: RunningGuest, client: GuestClient) -> None:
    exec_id = await begin(guest, client, "sleep", "1003", timeout_s=1.0, grace_s=0.0)
    await client.pause(FENCE, stop=True)
    await asyncio.sleep(1.5)
    assert (await client.exec_status(exec_id))["state"] == "running"
    resumed = time.monotonic()
    await client.resume(FENCE)
    ended = await guest.follow(client, exec_id)
    assert ended.status["ended_by"] == "timeout"
    assert time.monotonic() - resumed > 0.5, "it had most of its second left"


async def test_a_paused_exec_is_killed_without_running_on(guest: RunningGuest, client: GuestClient) -> None:
    exec_id = await begin(guest, client, "sh", "-c", "trap 'echo alive' TERM CONT; while :; do sleep 0.01; done")
    await asyncio.sleep(0.1)
    await client.pause(FENCE, stop=True)
    assert (await client.kill_exec(exec_id, 0.0, fence=FENCE))["killed_all"]
    ended = await guest.follow(client, exec_id)
    assert (ended.stdout, ended.status["signal"]) == (b"", 9)
    await client.resume(FENCE)


@pytest.mark.parametrize("guest", ["child"], indirect=False)
async def test_the_deadline_ends_a_paused_tree(guest: str, launch) -> None:
    running = launch(guest)
    client = await running.connect()
    await begin(running, client, "sleep", "1004")
    await until_states(running, "1004", b"S", 1)
    await client.pause(FENCE, stop=True)
    await client.extend_deadline(0.2, fence=FENCE)
    await asyncio.to_thread(running.process.wait, 30)
    assert programs(running, "1004") == []


async def test_a_frozen_guest_has_time_left_when_it_wakes(launch) -> None:
    """Frozen from outside, here by STOP: neither its deadline nor its execs' clocks count what it slept through."""
    running = launch("child", "--exec-uid", str(os.getuid()))
    client = await running.connect()
    exec_id = await begin(running, client, "sleep", "1005", timeout_s=1.0, grace_s=0.0)
    await client.extend_deadline(1.0, fence=FENCE)
    assert await client.pause(FENCE, stop=False) == {"whole": 1, "stopped": 0}
    client.hold()
    os.kill(running.process.pid, 19)
    try:
        await asyncio.sleep(1.5)
    finally:
        os.kill(running.process.pid, 18)
    client.release()
    await client.resume(FENCE)
    assert (await client.exec_status(exec_id))["state"] == "running"
    await client.extend_deadline(60, fence=FENCE)
    assert (await running.follow(client, exec_id)).status["ended_by"] == "timeout"


async def test_questions_to_a_frozen_guest_wait_as_long_as_it_takes(launch) -> None:
    from corral.channel import ChannelLimits

    running = launch("child")
    client = await running.connect(limits=ChannelLimits(request_s=0.3, connect_s=60, keepalive_s=0.2))
    client.hold()
    os.kill(running.process.pid, 19)
    try:
        question = asyncio.create_task(client.ping())
        await asyncio.sleep(0.8)
        assert not question.done()
    finally:
        os.kill(running.process.pid, 18)
    client.release()
    assert await question > 0.5
    os.kill(running.process.pid, 19)
    try:
        with pytest.raises(CorralError, match="did not answer"):
            await client.ping()
    finally:
        os.kill(running.process.pid, 18)


def test_stop_all_leaves_alone_what_was_stopped_before_and_waits_for_what_moves() -> None:
    table = {1: b"S", 2: b"T", 3: b"R", 4: b"D", 5: b"t"}
    looks = 0

    def look() -> list[processes.Process]:
        nonlocal looks
        looks += 1
        if looks == 3:
            table.update({1: b"T", 3: b"T"})
        return [processes.Process(2**30 + pid, 0, 1, True, state) for pid, state in table.items()]

    stopped: list[processes.Process] = []
    assert stop_all(look, stopped, time.monotonic() + 5)
    assert [one.pid - 2**30 for one in stopped] == [1, 3, 4, 5] and looks == 3
    table[6] = b"R"
    assert not stop_all(look, stopped, time.monotonic() + 0.05)
