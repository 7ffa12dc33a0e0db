"""Sandboxes of both runtimes beside each other and beside other people's mount namespaces: nobody keeps anything of another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from corral.adapters.runtimes.bubblewrap import BubblewrapRuntime
from corral.adapters.runtimes.crun import CrunRuntime
from corral.domain.limits import MIB, Limits
from corral.linux import mounts
from corral.node.interpreter import PYTHON_ARGV, ensure_interpreter
from corral.ports.runtime import Instance, InstanceSpec, Runtime

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="images need root"),
    pytest.mark.skipif(shutil.which("crun") is None, reason="crun is not installed"),
]
LIMITS = Limits(memory_bytes=64 * MIB, pids=20, disk_bytes=8 * MIB, inodes=200, tmp_bytes=MIB)
WAIT = "import signal; signal.pause()"


MADE: list[tuple[Runtime, InstanceSpec]] = []


@pytest.fixture
async def state() -> AsyncIterator[str]:
    path = tempfile.mkdtemp(prefix="corral-together-")
    for name in (".corral", "workspace", "home/sandbox", "tmp", "var/tmp", "dev", "proc", "run", "bin"):
        os.makedirs(f"{path}/base/{name}")
    try:
        yield path
    finally:
        while MADE:
            runtime, made = MADE.pop()
            await runtime.destroy(runtime.partial_ref(made.directory, made.instance_id))
        assert mounts.mounts_below(path) == []
        shutil.rmtree(path)


def spec(state: str, interpreter: str, installation: str) -> InstanceSpec:
    name = secrets.token_hex(8)
    directory = f"{state}/i/{name}"
    os.makedirs(directory)
    base = f"{state}/base"
    return InstanceSpec(
        *(f"ins_{name}", f"sbx_{name}", 1, installation, directory, base, interpreter, (*PYTHON_ARGV, "-c", WAIT)),
        LIMITS,
    )


async def create(runtime: Runtime, wanted: InstanceSpec) -> Instance:
    MADE.append((runtime, wanted))
    with socket.socket(socket.AF_UNIX) as control:
        return await runtime.create(wanted, control)


@contextlib.contextmanager
def namespace(*options: str) -> Iterator[int]:
    """A long-lived private mount namespace, copied now; -> the pid of who lives in it."""
    with subprocess.Popen(["unshare", *options, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdin.write(b".")
        other.stdin.flush()
        other.stdout.read(1)
        yield other.pid
        other.stdin.close()


def loops(state: str) -> list[str]:
    """Files below the state directory that loop devices have; a removed one says so."""
    found = []
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(entry.read_text().strip())
    return [name for name in found if name.startswith(state)]


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
async def test_eight_made_at_once_end_in_any_order_whoever_copied_their_mounts(state: str, at_once: bool) -> None:
    interpreter = str(ensure_interpreter(state))
    installation = f"together{os.getpid()}{secrets.token_hex(4)}"
    runtimes: list[Runtime] = [
        BubblewrapRuntime(state, installation_id=installation),
        CrunRuntime(state, installation_id=installation),
    ]
    for runtime in runtimes:
        assert (await runtime.probe()).usable
    made = await asyncio.gather(*(create(runtime, spec(state, interpreter, installation)) for runtime in runtimes * 4))
    by_name = {runtime.name: runtime for runtime in runtimes}
    assert len(loops(state)) == 8
    assert (os.stat("/dev/null").st_uid, os.stat("/dev/null").st_gid) == (0, 0), "given away with standard input"
    for instance in made:
        # Nothing of one is inside another, and a launch leaves nothing; what is about to end may take its moment.
        init, end = instance.ref.data["init"]["pid"], time.monotonic() + 20
        while (pids := await by_name[instance.ref.runtime].processes(instance.ref)) != [init]:
            assert init in pids and time.monotonic() < end, pids
        table = Path(f"/proc/{init}/mountinfo").read_text()
        assert table.count("/dev/loop") == 3 and "/run/corral" not in table

    took: dict[str, float] = {}

    async def destroy(instance: Instance) -> None:
        began = time.monotonic()
        evidence = await by_name[instance.ref.runtime].destroy(instance.ref)
        took[instance.ref.instance_id] = time.monotonic() - began
        assert evidence.clean and not evidence.left, evidence

    random.shuffle(made)
    with (
        namespace("--mount") as other,
        namespace("--user", "--map-root-user", "--mount"),
        namespace("--mount", "--propagation=slave"),
    ):
        assert Path(f"/proc/{other}/mountinfo").read_text().count("/dev/loop") >= 8
        if at_once:
            await asyncio.gather(*(destroy(instance) for instance in made))
        else:
            for instance in made:
                await destroy(instance)
                assert instance.ref.directory not in str(loops(state))
        assert loops(state) == []
        assert "/dev/loop" not in "".join(
            line for line in Path(f"/proc/{other}/mountinfo").read_text().splitlines() if state in line
        )
    # Nothing of it waited for whoever copied the mounts; the machine may be busy with other tests.
    assert sorted(took.values())[len(took) // 2] < 5, took
    assert mounts.mounts_below(state) == []


async def test_a_destroyed_disk_that_somebody_has_open_is_told_at_once_and_gone_with_him(state: str) -> None:
    interpreter = str(ensure_interpreter(state))
    installation = f"together{os.getpid()}{secrets.token_hex(4)}"
    for runtime in (
        BubblewrapRuntime(state, installation_id=installation),
        CrunRuntime(state, installation_id=installation),
    ):
        instance = await create(runtime, spec(state, interpreter, installation))
        with namespace("--mount", f"--wd={instance.tree.path}/workspace"):
            began = time.monotonic()
            evidence = await runtime.destroy(instance.ref)
            assert time.monotonic() - began < 20
            assert not evidence.clean and len(evidence.left) == 1 and "/dev/loop" in evidence.left[0]
            # Its content is gone all the same.
            assert not os.path.exists(f"{instance.ref.directory}/m")
            assert "(deleted)" in loops(state)[0]
            assert not (await runtime.destroy(instance.ref)).clean
        assert (await runtime.destroy(instance.ref)).clean
        assert loops(state) == []
        assert not os.path.exists(instance.ref.directory)
