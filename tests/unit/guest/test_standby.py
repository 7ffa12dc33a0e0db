"""Supervisors that stand by: what they serve, what ends them, and that a program cannot tell how it was started."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from corral.channel import Ended, GuestClient
from corral.domain.fence import Fence
from corral.linux import seccomp

from .conftest import ROOT, RunningGuest

FENCE = Fence(1, 1)
pytestmark = pytest.mark.skipif(not ROOT, reason="execs with a user of their own need root here")

BIG = {"PATH": "/usr/bin:/bin", "BIG": "x" * 100_000}
"""An environment that no supervisor that stands by is given."""

SELF = r"""
import json, os, resource
def status():
    wanted = ("Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "SigCgt", "CapPrm", "CapEff", "CapInh", "CapAmb", "CapBnd")
    lines = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
    return {name: lines[name] for name in wanted}
print(json.dumps({
    "status": status(), "cwd": os.getcwd(), "fds": sorted(os.listdir("/proc/self/fd"))[:-1], "nice": os.nice(0),
    "leader": os.getsid(0) == os.getpid() == os.getpgrp(), "score": open("/proc/self/oom_score_adj").read(),
    "limits": [resource.getrlimit(n) for n in range(16)], "env": {k: v for k, v in os.environ.items() if k != "BIG"},
    "stdin": os.readlink("/proc/self/fd/0"), "dumpable": os.access("/proc/self/environ", os.R_OK),
    "affinity": len(os.sched_getaffinity(0)), "parent": open(f"/proc/{os.getppid()}/stat").read().split()[3],
}))
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def inside(pid: int) -> int:
    """What a process of the host is called inside."""
    return int(
        next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid")).split()[
            -1
        ]
    )


def pid1(guest: RunningGuest) -> int:
    (found,) = children(guest.process.pid)
    return found


async def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


async def standing(guest: RunningGuest) -> tuple[int, int]:
    """Host pids of the one supervisor that stands by, and of the child that waits below it."""
    top = pid1(guest)
    await eventually(lambda: len(found := children(top)) == 1 and len(children(found[0])) == 1)
    supervisor = children(top)[0]
    return supervisor, children(supervisor)[0]


@pytest.fixture
async def guest(launch) -> RunningGuest:
    return launch("pid1")


async def test_one_supervisor_serves_exec_after_exec(guest, client: GuestClient) -> None:
    first, waiting = await standing(guest)
    for number in range(5):
        result = await guest.run(client, "sh", "-c", f"echo $PPID; exit {number}")
        assert (int(result.stdout), result.status["exit_code"]) == (inside(first), number)
        supervisor, successor = await standing(guest)
        assert supervisor == first and successor != waiting
        waiting = successor
    assert (await guest.run(client, "no-such-program")).status["state"] == "failed"
    assert (await guest.run(client, "true", cwd="/nowhere")).status["failure"]["what"] == "cwd"
    assert (await standing(guest))[0] == first
    assert (await client.usage())["processes"] == 0, "who stands by is no process of anybody"


@pytest.mark.parametrize("more", [{}, {"umask": 0o077, "nice": 9, "oom_score_adj": 700, "cwd": "/tmp"}])
@pytest.mark.parametrize("filtered", [False, True])
async def test_a_program_cannot_tell_how_it_was_started(launch, tmp_path: Path, filtered: bool, more: dict) -> None:
    path = tmp_path / "filter"
    path.write_bytes(seccomp.compile("exec"))
    guest = launch("pid1", *(("--seccomp-exec", str(path)) if filtered else ()))
    client = await guest.connect()
    rlimits = {"nofile": 64, "core": 4096, "fsize": 1 << 20, "nproc": 4000}
    seen = []
    for environment in (BIG, {"PATH": "/usr/bin:/bin"}):
        await standing(guest)
        result = await guest.run(client, "python3", "-c", SELF, env=environment, rlimits=rlimits, **more)
        assert result.status["exit_code"] == 0, result.stderr
        seen.append(json.loads(result.stdout))
    assert seen[0] == seen[1]
    assert seen[0]["status"]["Seccomp"] == ("2" if filtered else "0") and seen[0]["leader"]
    assert seen[0]["limits"][4] == [4096, 4096] and seen[0]["fds"] == ["0", "1", "2"]


async def test_who_has_the_guests_own_uid_gets_a_supervisor_that_serves_nobody_else(guest, client: GuestClient) -> None:
    first, _ = await standing(guest)
    result = await guest.run(client, "sh", "-c", "id -u; echo $PPID", uid=0, gid=0)
    uid, parent = (int(word) for word in result.stdout.split())
    assert uid == 0 and parent != inside(first)
    await eventually(lambda: children(pid1(guest)) == [first])
    assert (await standing(guest))[0] == first


async def test_after_a_kill_the_supervisor_is_gone_and_the_next_exec_works(guest, client: GuestClient) -> None:
    first, _ = await standing(guest)
    spec = guest.spec("sleep", "1000")
    await client.start_exec(spec, fence=FENCE)
    assert (await client.kill_exec(spec["exec_id"], 0, fence=FENCE))["killed_all"] is True
    await eventually(lambda: first not in children(pid1(guest)))
    assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"
    assert (await standing(guest))[0] != first


async def test_leftovers_keep_their_supervisor_and_a_kill_of_them_leaves_the_next_exec_alone(guest, client) -> None:
    first, _ = await standing(guest)
    old = guest.spec("sh", "-c", "sleep 1000 >/dev/null 2>&1 & exit 3")
    await client.start_exec(old, fence=FENCE, follow=True)
    assert (await guest.follow(client, old["exec_id"])).status["background"] == 1
    new = guest.spec("sh", "-c", "read x; exit 5", stdin="open")
    await client.start_exec(new, fence=FENCE)
    assert first in children(pid1(guest)) and len(children(pid1(guest))) == 2
    assert await client.kill_exec(old["exec_id"], 0, fence=FENCE) == {"killed_all": True, "killed": 1}
    await client.stdin(new["exec_id"], b"\n", fence=FENCE)
    assert (await guest.follow(client, new["exec_id"])).status["exit_code"] == 5


async def test_a_kill_of_what_has_ended_does_not_reach_the_next_exec(guest, client: GuestClient) -> None:
    """Commands carry the number of the exec that they are for: the same supervisor serves the next one already."""
    for _ in range(40):
        ended, running = guest.spec("true"), guest.spec("sh", "-c", "read x; exit 7", stdin="open")
        await client.start_exec(ended, fence=FENCE)
        kill = asyncio.create_task(client.kill_exec(ended["exec_id"], 0, fence=FENCE))
        await asyncio.sleep(0.001 * (_ % 4))
        await client.start_exec(running, fence=FENCE)
        assert (await kill)["killed_all"] is True
        await client.stdin(running["exec_id"], b"\n", fence=FENCE)
        assert (await guest.follow(client, running["exec_id"])).status["exit_code"] == 7


async def test_when_the_child_that_waits_is_killed_the_next_exec_runs_once(guest, client: GuestClient) -> None:
    for _ in range(10):
        _, waiting = await standing(guest)
        os.kill(waiting, 9)
        result = await guest.run(client, "sh", "-c", "echo once")
        assert (result.status["state"], result.status["exit_code"], result.stdout) == ("ended", 0, b"once\n")


async def test_when_the_supervisor_that_stands_by_is_killed_nothing_of_it_lives_and_the_next_exec_works(
    guest, client: GuestClient
) -> None:
    supervisor, waiting = await standing(guest)
    os.kill(supervisor, 9)
    await eventually(lambda: not Path(f"/proc/{supervisor}").exists() and not Path(f"/proc/{waiting}").exists())
    assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"
    assert (await standing(guest))[0] != supervisor


async def test_a_killed_supervisor_of_a_second_exec_is_an_exec_lost(guest, client: GuestClient) -> None:
    await guest.run(client, "true")
    supervisor, _ = await standing(guest)
    spec = guest.spec("sh", "-c", "echo ready; setsid sleep 1000 & sleep 1000")
    await client.start_exec(spec, fence=FENCE, follow=True)
    stream = client.attach(spec["exec_id"])
    assert (await anext(stream)).data == b"ready\n"
    os.kill(supervisor, 9)
    last = [item async for item in stream][-1]
    assert isinstance(last, Ended)
    assert (last.status["state"], last.status["started"], last.status["killed_all"]) == ("lost", True, True)
    assert (await client.usage())["processes"] == 0
    assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"


async def test_many_at_once_and_then_one_stands_by(guest, client: GuestClient) -> None:
    results = await asyncio.gather(*(guest.run(client, "sh", "-c", f"echo {n}; exit {n}") for n in range(12)))
    assert [(r.stdout, r.status["exit_code"]) for r in results] == [(f"{n}\n".encode(), n) for n in range(12)]
    await standing(guest)


async def test_kill_all_ends_who_stands_by_too_and_another_takes_the_place(guest, client: GuestClient) -> None:
    supervisor, _ = await standing(guest)
    assert (await client.kill_all(fence=FENCE)) == {"killed_all": True, "killed": 0}
    await eventually(lambda: supervisor not in children(pid1(guest)))
    assert (await standing(guest))[0] != supervisor
    assert (await guest.run(client, "echo", "ok")).stdout == b"ok\n"


async def test_nobody_stands_by_where_execs_could_reach_it(launch) -> None:
    for mode in ("child", "same_uid"):
        guest = launch(mode)
        client = await guest.connect()
        assert (await guest.run(client, "true")).status["exit_code"] == 0
        for _ in range(200):
            if (await client.usage())["processes"] == 0:
                break
            await asyncio.sleep(0.05)
        listing = await guest.run(client, "sh", "-c", "grep -l '^PPid:.*[[:space:]]1$' /proc/[0-9]*/status | wc -l")
        if mode == "same_uid":
            assert listing.stdout.strip() == b"1", "the supervisor of this very exec"
