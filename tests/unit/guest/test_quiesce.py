"""Made ready for a snapshot the guest has nobody standing by, serves nothing, and becomes what `identify` says."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest
from tests.unit.guest.conftest import FENCE, ROOT, RunningGuest

from corral.channel import GuestClient
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.guest import processes

pytestmark = pytest.mark.skipif(not ROOT, reason="supervisors stand by only where execs have another uid")


@pytest.fixture(params=["pid1", "namespaces"])
async def quiet(request: pytest.FixtureRequest, launch: Callable[..., RunningGuest]) -> RunningGuest:
    return launch(request.param)


async def refusal(attempt) -> str:
    with pytest.raises(CorralError) as caught:
        await attempt
    return caught.value.code


async def identify(client: GuestClient, sandbox: str, fence: Fence, instance: str | None = None) -> float | None:
    return await client.identify(sandbox, fence, now=time.time(), entropy=os.urandom(32), instance_id=instance)


async def test_nobody_stands_by_and_nothing_is_served_until_the_guest_is_identified(quiet: RunningGuest) -> None:
    client = await quiet.connect()
    assert (await quiet.run(client, "echo", "one")).stdout == b"one\n"
    assert len(processes.descendants(quiet.process.pid)) > 1, "the guest and who stands by"
    assert await client.quiesce(FENCE) == {"kept": 0}
    assert len(processes.descendants(quiet.process.pid)) == 1
    for attempt in (
        client.ping(),
        client.usage(),
        client.start_exec(quiet.spec("true"), fence=FENCE),
        client.kill_all(fence=FENCE),
        client.fence(Fence(1, 9), "adopt"),
        client.exec_status("exe_0"),
        client.stdin("exe_0", b"x", fence=FENCE, offset=0),
        client.extend_deadline(1, fence=FENCE),
        client.shutdown(fence=FENCE),
        client.quiesce(FENCE),
    ):
        assert await refusal(attempt) == "illegal_transition"
    client = await quiet.connect()
    assert (client.hello.quiet, client.hello.instance_id, client.hello.floor) == (True, "ins_test", FENCE)
    assert await refusal(client.ping()) == "illegal_transition"
    assert await refusal(identify(client, "sbx_test", Fence(1, 0))) == "lease_lost"
    assert await refusal(client.ping()) == "illegal_transition"
    await identify(client, "sbx_test", FENCE)
    assert (await quiet.run(client, "echo", "two")).stdout == b"two\n"
    assert (await quiet.connect()).hello.quiet is False


async def test_a_copy_is_another_sandbox_with_fences_of_its_own(quiet: RunningGuest) -> None:
    client = await quiet.connect()
    await client.fence(Fence(1, 700), "adopt")
    old = Fence(1, 700)
    spec = quiet.spec("sh", "-c", "(sleep 100 &); exit 3")
    await client.start_exec(spec, fence=old)
    left = await quiet.follow(client, spec["exec_id"])
    assert (left.status["exit_code"], left.status["background"]) == (3, 1)
    assert await client.quiesce(old) == {"kept": 1}
    client = await quiet.connect()
    fresh = Fence(1, 2)
    await identify(client, "sbx_copy", fresh, "ins_copy")
    client = await quiet.connect()
    assert (client.hello.instance_id, client.hello.floor, client.hello.quiet) == ("ins_copy", fresh, False)
    # What was left behind goes on, and is older than any fence of the copy.
    assert (await client.usage())["processes"] > 0
    assert (await client.fence(Fence(1, 3), "kill"))["killed_all"] is True
    assert (await client.usage())["processes"] == 0
    assert await refusal(client.kill_all(fence=fresh)) == "lease_lost"


async def test_it_does_not_become_quiet_while_an_exec_runs(quiet: RunningGuest) -> None:
    client = await quiet.connect()
    spec = quiet.spec("sh", "-c", "echo before; read x; echo after $x", stdin="open")
    await client.start_exec(spec, fence=FENCE)
    assert await refusal(client.quiesce(FENCE)) == "illegal_transition"
    # Nothing has changed: it serves, and nobody was sent away.
    assert (await quiet.run(client, "echo", "beside")).stdout == b"beside\n"
    await client.stdin(spec["exec_id"], b"all\n", fence=FENCE)
    result = await quiet.follow(client, spec["exec_id"])
    assert (result.stdout, result.status["exit_code"]) == (b"before\nafter all\n", 0)
    assert await client.quiesce(FENCE) == {"kept": 0}


async def test_only_the_owner_makes_it_quiet(quiet: RunningGuest) -> None:
    client = await quiet.connect()
    await client.fence(Fence(1, 5), "adopt")
    assert await refusal(client.quiesce(Fence(1, 4))) == "lease_lost"
    assert await client.ping() < 60


@pytest.mark.slow
async def test_the_deadline_waits_while_the_guest_is_only_a_file(launch: Callable[..., RunningGuest]) -> None:
    """Here it is stopped instead: its clock goes on, and it does not run."""
    quiet = launch("namespaces")
    client = await quiet.connect()
    await client.extend_deadline(3.0, fence=FENCE)
    await client.quiesce(FENCE)
    pid = processes.descendants(quiet.process.pid)[0].pid
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(3.5)
    os.kill(pid, signal.SIGCONT)
    client = await quiet.connect()
    await identify(client, "sbx_test", FENCE)
    assert (await client.usage())["execs"] == 0
    # What was left of it then is left of it now.
    assert await asyncio.to_thread(quiet.process.wait, 60) == 0


async def test_a_copy_that_nobody_identifies_ends_at_its_deadline(launch: Callable[..., RunningGuest]) -> None:
    quiet = launch("namespaces")
    client = await quiet.connect()
    await client.extend_deadline(1.5, fence=FENCE)
    await client.quiesce(FENCE)
    await client.close()
    assert await asyncio.to_thread(quiet.process.wait, 60) == 0


async def test_identify_tells_how_far_the_clock_is_off(quiet: RunningGuest) -> None:
    client = await quiet.connect()
    ahead = await client.identify("sbx_test", FENCE, now=time.time() - 5000, entropy=b"")
    assert ahead is not None and 4990 < ahead < 5060
