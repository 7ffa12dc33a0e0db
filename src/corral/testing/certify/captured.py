"""PID 1 itself in the hands of the sandboxed code: what it says costs nothing but its own exec, and no limit rests on it.

Exit code and output of a program are the guest's word, as they are the program's anyway. That a program runs, that it was killed and
what it used is seen by the host; a guest that is found to lie is no sandbox any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path

from corral.domain.limits import MIB
from corral.errors import CorralError
from corral.testing.certify.bench import SMALL, Bench, Box, eventually, marked
from corral.testing.certify.register import attack
from corral.testing.certify.verdict import Seen, Trial
from corral.testing.hostile.guest import guest

CLAIMS_END = "def on_attach(request):\n ok(request, **status(request['exec_id']))\n time.sleep(0.3)\n end(request)\n"
DENIES_KILL = "def on_kill(request):\n ok(request, killed_all=True, killed=0)\n"
FLOOD = """
def on_attach(request):
    ok(request, **status(request["exec_id"]))
    block, at = b"f" * 65536, 0
    while True:
        send(protocol.data_frame(request["streams"]["stdout"], at, 0, block))
        at += len(block)
"""
GARBAGE = """
def on_attach(request):
    ok(request, **status(request["exec_id"]))
    while True:
        send(os.urandom(65536))
"""
NO_HELLO = "raise SystemExit(0)\n"
SLEEPER = "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(600)\n"
ROOM = 64 * MIB
"""What the control plane may take for what a guest sends."""


def _marker() -> str:
    return f"corral-captive-{os.urandom(8).hex()}"


async def _visible(box: Box, marker: str) -> bool:
    """Whether the host sees the program at all; where it does not, its processes are no witness."""
    return await box.bench.sees_programs() and await eventually(lambda: marked(marker), 5.0)


@attack("guest", "captured: a false end", "says that a program ended well while the host sees it run", "host")
async def false_end(bench: Bench) -> list[Trial]:
    marker = _marker()
    async with bench.box(guest=guest(CLAIMS_END)) as box:
        exec_id = await box.start_python(SLEEPER, marker, background="kill")
        visible = await _visible(box, marker)
        ended = await box.wait(exec_id)
        gone = await eventually(lambda: not marked(marker), 10.0)
        believed = ended.reason == "ok"
        honest = await _honest(bench)
    if not visible:
        seen = Seen(None, "the host does not see processes of this runtime")
        return [Trial("a false end", seen, honest)]
    how = f"reason {ended.reason}, {'the program is ended' if gone else 'the program lives'}"
    return [Trial("a false end", Seen(believed or not gone, how), honest)]


async def _honest(bench: Bench) -> Seen:
    """The same words where nothing speaks against them are believed: so they were no refusal of everything."""
    async with bench.box(guest=guest(CLAIMS_END)) as box:
        ended = await box.python("raise SystemExit(0)", background="kill")
        return Seen(ended.reason == "ok", f"the same words of a program that has ended: {ended.reason}")


@attack("guest", "captured: a kill denied", "says that it killed a program that is over its time, and did not", "host")
async def denied_kill(bench: Bench) -> list[Trial]:
    marker = _marker()
    limits = dataclasses.replace(SMALL, wall_s=0.8)
    async with bench.box(guest=guest(DENIES_KILL)) as box:
        exec_id = await box.start_python(SLEEPER, marker, limits=limits, grace_s=0.1)
        visible = await _visible(box, marker)
        ended = await box.wait(exec_id)
        gone = await eventually(lambda: not marked(marker), 15.0)
    longer = _marker()
    async with bench.box(guest=guest(DENIES_KILL)) as box:
        lives = await _stays(box, await box.start_python(SLEEPER, longer, grace_s=0.1), longer, 1.5)
    control = Seen(lives, "without a time limit it lives on")
    if not visible:
        seen = ended.reason not in ("timeout", "sandbox_lost")
        return [Trial("a kill denied", Seen(seen, f"reason {ended.reason}; processes are not seen"), control)]
    how = f"reason {ended.reason}, {'every process gone' if gone else 'the program lives'}"
    return [Trial("a kill denied", Seen(ended.reason == "ok" or not gone, how), control)]


@attack("guest", "captured: floods", "sends the control plane endless output and garbage", "host")
async def floods(bench: Bench) -> list[Trial]:
    neighbour = await bench.held()
    trials = []
    for name, mood in (("output without end", FLOOD), ("garbage", GARBAGE)):
        before, began = _resident(), time.monotonic()
        limits = dataclasses.replace(SMALL, wall_s=2.0, output_kill_bytes=8 * MIB)
        async with bench.box(guest=guest(mood)) as box:
            exec_id = await box.start_python(SLEEPER, _marker(), limits=limits, grace_s=0.1)
            works = await neighbour.works()
            ended = await box.wait(exec_id)
        took, grown = time.monotonic() - began, _resident() - before
        harm = ended.reason == "ok" or not works or grown > ROOM or took > 60
        how = f"reason {ended.reason} after {took:.1f} s, {max(0, grown) // MIB} MiB, the neighbour {'serves' if works else 'does not serve'}"  # fmt: skip
        async with bench.box(guest=guest("")) as box:
            calm = await _calm(box)
        trials.append(Trial(name, Seen(harm, how), calm))
    return trials


async def _stays(box: Box, exec_id: str, marker: str, seconds: float) -> bool:
    """Whether a program is still there after this time, by the host's word; where it sees none, by the node's."""
    if await _visible(box, marker):
        return not await eventually(lambda: not marked(marker), seconds)
    try:
        async with asyncio.timeout(seconds):
            await box.bench.node.wait_exec(exec_id)
    except TimeoutError:
        return True
    return False


async def _calm(box: Box) -> Seen:
    """The same guest without that mood is left alone for as long."""
    exec_id = await box.start_python(SLEEPER, marker := _marker(), limits=dataclasses.replace(SMALL, wall_s=60.0))
    try:
        lives = await _stays(box, exec_id, marker, 0.6)
    finally:
        await box.end(exec_id)
    return Seen(lives, "the same guest that says nothing is left alone")


def _resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@attack(
    "guest", "captured: no guest at all", "ends before it says who it is: no sandbox, and nothing left of it", "host"
)
async def nobody(bench: Bench) -> list[Trial]:
    before = set(await bench.node.instances())
    try:
        box = await bench.create(guest=guest(NO_HELLO))
    except CorralError as error:
        left = set(await bench.node.instances()) - before
        seen = Seen(bool(left), f"{error.code}, {len(left)} left")
    else:
        await box.destroy()
        seen = Seen(True, "it became a sandbox")
    honest = await bench.held()
    return [Trial("a guest that ends", seen, Seen(await honest.works(), "an honest guest is one"))]
