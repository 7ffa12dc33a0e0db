"""What sandboxed code may do to the guest: nothing. Each defence has a control that succeeds when it is switched off."""

from __future__ import annotations

import asyncio

from corral.channel import Ended, GuestClient
from corral.domain.fence import Fence

FENCE = Fence(1, 1)

LOOK = r"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
open_doors = []
def door(name, action):
    try:
        action()
    except OSError:
        return
    open_doors.append(name)
def ptrace():
    if libc.ptrace(16, int(sys.argv[1]), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    libc.ptrace(17, int(sys.argv[1]), 0, 0)
pid = sys.argv[1]
for name in ("environ", "mem", "maps", "auxv"):
    door(name, lambda: open(f"/proc/{pid}/{name}", "rb").read(1) if name != "mem" else os.open(f"/proc/{pid}/mem", os.O_RDWR))
door("fd", lambda: os.listdir(f"/proc/{pid}/fd"))
for name in ("root", "cwd", "exe"):
    door(name, lambda: os.readlink(f"/proc/{pid}/{name}"))
door("ptrace", ptrace)
print(",".join(open_doors))
"""

KILL_PARENT = r"""
import os, sys, time
print("ready", flush=True)
try:
    os.kill(os.getppid(), 9)
except OSError as error:
    print("refused", flush=True)
    sys.exit(3)
time.sleep(60)
"""


async def look_at(guest, client: GuestClient, pid: str) -> list[str]:
    result = await guest.run(client, "python3", "-I", "-c", LOOK, pid)
    assert result.status["exit_code"] == 0, result.stderr
    return [door for door in result.stdout.decode().strip().split(",") if door]


async def test_pid_1_cannot_be_looked_into(launch) -> None:
    for mode in ("pid1", "same_uid"):
        guest = launch(mode)
        client = await guest.connect()
        assert await look_at(guest, client, "1") == [], mode


async def test_control_a_process_of_the_same_uid_without_these_measures_is_an_open_door(launch) -> None:
    """An exec is dumpable, has no capability that others lack, and without Landlock no domain: the same look succeeds."""
    guest = launch("same_uid", "--unsafe-no-landlock")
    client = await guest.connect()
    spec = guest.spec("sh", "-c", "echo $$; exec sleep 100")
    await client.start_exec(spec, fence=FENCE)
    stream = client.attach(spec["exec_id"])
    victim = (await anext(stream)).data.decode().strip()
    doors = await look_at(guest, client, victim)
    assert {"environ", "maps", "fd", "root"} <= set(doors)
    await client.kill_exec(spec["exec_id"], 0, fence=FENCE)


async def test_signals_to_pid_1_do_nothing(launch) -> None:
    for mode in ("pid1", "same_uid"):
        guest = launch(mode)
        client = await guest.connect()
        script = (
            "for s in INT TERM HUP QUIT USR1 USR2 STOP KILL ABRT SEGV ALRM; do kill -$s 1 2>/dev/null; done; echo tried"
        )
        assert (await guest.run(client, "sh", "-c", script)).stdout == b"tried\n"
        await client.ping()
        assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n", mode


async def test_a_supervisor_cannot_be_killed_from_inside(launch) -> None:
    for mode in ("pid1", "same_uid"):
        guest = launch(mode)
        client = await guest.connect()
        if mode == "same_uid" and client.hello.capabilities["landlock"] < 6:
            continue
        result = await guest.run(client, "python3", "-I", "-S", "-c", KILL_PARENT)
        assert (result.stdout, result.status["exit_code"]) == (b"ready\nrefused\n", 3), mode


async def test_control_without_landlock_the_supervisor_dies_and_the_guest_survives_it(launch) -> None:
    guest = launch("same_uid", "--unsafe-no-landlock")
    client = await guest.connect()
    spec = guest.spec("python3", "-I", "-S", "-c", KILL_PARENT)
    await client.start_exec(spec, fence=FENCE)
    items = [item async for item in client.attach(spec["exec_id"])]
    assert isinstance(items[-1], Ended)
    assert (items[-1].status["state"], items[-1].status["killed_all"]) == ("lost", True)
    for _ in range(300):
        if (await client.usage())["processes"] == 0:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("the orphan lives on")
    assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"


async def test_kill_minus_one_from_inside_hurts_only_the_exec(launch) -> None:
    for mode in ("pid1", "same_uid"):
        guest = launch(mode)
        client = await guest.connect()
        if mode == "same_uid" and client.hello.capabilities["landlock"] < 6:
            continue
        result = await guest.run(client, "sh", "-c", "kill -9 -1; echo alive")
        assert result.status["state"] == "ended", mode
        await client.ping()
        assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"
