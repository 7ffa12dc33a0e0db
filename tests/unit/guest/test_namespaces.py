"""Execs with a pid namespace each: what only that mode has. All else of the guest's tests runs in it too."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.guest.conftest import FENCE, ROOT, RunningGuest

from corral.channel import GuestClient
from corral.guest import processes

pytestmark = pytest.mark.skipif(not ROOT, reason="a pid namespace needs CAP_SYS_ADMIN")
SYS_ADMIN = 1 << 21


@pytest.fixture
async def guest(launch: Callable[..., RunningGuest]) -> RunningGuest:
    return launch("namespaces")


@pytest.fixture
async def client(guest: RunningGuest) -> GuestClient:
    return await guest.connect()


async def test_main_is_an_ordinary_process_below_the_init_of_its_namespace(
    guest: RunningGuest, client: GuestClient
) -> None:
    assert client.hello.capabilities["exec_pid_namespaces"] == 1
    assert (await guest.run(client, "sh", "-c", "echo $PPID")).stdout == b"1\n"
    # What an init would survive: a signal of its own, whose default is the end.
    for number in (2, 6, 15):
        assert (await guest.run(client, "sh", "-c", f"kill -{number} $$; sleep 100")).status["signal"] == number


async def test_no_exec_has_the_capability_that_made_its_namespace(guest: RunningGuest, client: GuestClient) -> None:
    async def effective(**user: int) -> int:
        result = await guest.run(client, "grep", "CapEff", "/proc/self/status", **user)
        return int(result.stdout.split()[1], 16)

    assert await effective() == 0
    as_root = await effective(uid=0, gid=0)
    assert as_root and not as_root & SYS_ADMIN


async def test_under_cover_execs_see_numbers_and_the_guest_sees_all(
    launch: Callable[..., RunningGuest], tmp_path: Path
) -> None:
    look = "cd /proc; for n in [0-9]*; do [ ! -r $n/stat ] || echo $n; done; grep -c ' /proc/[0-9]' mounts"

    async def seen(guest: RunningGuest) -> tuple[set[str], int]:
        *others, covers = (await guest.run(await guest.connect(), "sh", "-c", look)).stdout.decode().split()
        return set(others), int(covers)

    assert "1" in (await seen(launch("namespaces")))[0], "without cover everybody sees the guest"
    guest = launch("namespaces", "--cover-proc", str(tmp_path / "table"))
    client = await guest.connect()
    assert client.hello.capabilities["covered"] == 1
    others, covers = await seen(guest)
    assert "1" not in others and covers >= 2, others
    client = await guest.connect()
    for _ in range(5):  # each with a supervisor of its own
        await guest.run(client, "sh", "-c", "sleep 100 &")
    assert (await client.usage())["processes"] >= 10
    others, covers = await seen(guest)
    # Who looks, who was left behind and whoever waits to be the next program are seen like others; their supervisors by nobody.
    assert "1" not in others and 6 <= len(others) <= 8 and covers >= 7, (others, covers)
    client = await guest.connect()
    assert (await client.kill_all(fence=FENCE))["killed_all"] is True
    assert (await client.usage())["processes"] == 0
    _, covers = await seen(guest)
    assert covers <= 4, "covers go with what they covered"
    assert not any(files for _, _, files in os.walk(tmp_path / "table")), "none of it is on the host"


async def test_where_execs_need_no_namespaces_cover_is_taken_all_the_same(
    launch: Callable[..., RunningGuest], tmp_path: Path
) -> None:
    guest = launch("pid1", "--cover-proc", str(tmp_path / "table"))
    client = await guest.connect()
    assert (client.hello.capabilities["subreaper"], client.hello.capabilities["covered"]) == (1, 1)
    shown = await guest.run(client, "sh", "-c", "cat /proc/1/environ /proc/1/stat")
    assert shown.stdout == b"" and shown.status["exit_code"] != 0


async def test_a_guest_that_cannot_take_cover_does_not_begin(tmp_path: Path) -> None:
    prefix = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "setpriv",
        "--bounding-set=-sys_admin",
        "--",
    ]
    guest = RunningGuest("pid1", ["--cover-proc", str(tmp_path / "table")], prefix)
    try:
        assert await asyncio.to_thread(guest.process.wait, 60) == 2
        assert b"/proc cannot be covered" in Path(guest.directory, "log").read_bytes()
    finally:
        await guest.stop()


async def test_a_signal_to_everyone_reaches_only_the_own_exec(guest: RunningGuest, client: GuestClient) -> None:
    victim = guest.spec("sleep", "100")
    await client.start_exec(victim, fence=FENCE)
    script = "import os,signal,time; os.fork() or time.sleep(100); os.kill(-1, 9); print('alone')"
    result = await guest.run(client, "python3", "-I", "-S", "-c", script)
    assert (result.stdout, result.status["exit_code"]) == (b"alone\n", 0)
    assert (await client.exec_status(victim["exec_id"]))["state"] == "running"
    assert await client.kill_exec(victim["exec_id"], 0, fence=FENCE) == {"killed_all": True, "killed": 1}


async def test_all_of_an_exec_goes_with_its_supervisor(guest: RunningGuest, client: GuestClient) -> None:
    script = "(setsid sleep 100 &); (setsid sh -c 'sleep 100 & sleep 100' &); echo ready; sleep 100"
    spec = guest.spec("sh", "-c", script)
    await client.start_exec(spec, fence=FENCE)
    output = client.attach(spec["exec_id"])
    await anext(output)
    first = processes.descendants(guest.process.pid)[0].pid
    supervisors = [p.pid for p in processes.descendants(first) if p.parent == first]
    # Beside it one may stand by, with a single child.
    os.kill(max(supervisors, key=lambda pid: len(processes.descendants(pid))), signal.SIGKILL)
    async with asyncio.timeout(60):
        while (status := await client.exec_status(spec["exec_id"]))["state"] == "running":
            await asyncio.sleep(0.01)
    assert (status["state"], status["killed_all"], status["exit_code"], status["signal"]) == ("lost", True, None, None)
    usage = await client.usage()
    assert (usage["execs"], usage["processes"]) == (0, 0)
    assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"


async def test_everything_ends_with_the_guest(guest: RunningGuest, client: GuestClient) -> None:
    await client.start_exec(guest.spec("sh", "-c", "setsid sleep 100 & sleep 100"), fence=FENCE)
    inside = processes.descendants(guest.process.pid)
    assert len(inside) >= 3
    os.kill(inside[0].pid, signal.SIGKILL)
    assert await asyncio.to_thread(guest.process.wait, 60) != 0
    async with asyncio.timeout(60):
        while any((now := processes.look(p.pid)) and now.start == p.start and now.live for p in inside):
            await asyncio.sleep(0.01)
