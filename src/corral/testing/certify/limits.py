"""Every resource at four times its limit, against what the runtime declares: enforced, watched or absent.

The control is the same program in a sandbox with room for it. What counts is what the host saw: how the exec ended, and counters.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from corral.domain.limits import MIB, Limits, Mode
from corral.errors import CorralError
from corral.testing.certify.bench import ROOMY, SMALL, Bench, Box, Ended, eventually, marked
from corral.testing.certify.register import attack
from corral.testing.certify.verdict import Seen, Trial, limit_trial

TIMES = 4
STAY_S = 2.5
"""How long a program stays above a limit, so that one that is watched can be seen there."""
_END = f"""
import sys
sys.stdout.flush()
if not why:
    time.sleep({STAY_S})
print(json.dumps({{"got": got, "errno": why}}))
"""
MEMORY = (
    """
import json, time
got, why, held, part = 0, None, [], 8 * 1024 * 1024
try:
    while got < %d:
        held.append(bytearray(b"x") * part)
        got += part
except MemoryError:
    why = "ENOMEM"
"""
    + _END
)
PIDS = (
    """
import errno, json, os, time
got, why = 0, None
read, write = os.pipe()
try:
    for _ in range(%d):
        if os.fork() == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        got += 1
except OSError as error:
    why = errno.errorcode[error.errno]
"""
    + _END
)
DISK = (
    """
import errno, json, os, time
got, why, part = 0, None, 2 * 1024 * 1024
try:
    for number in range(%d // part):
        fd = os.open(f"/workspace/fill{number}", os.O_CREAT | os.O_WRONLY)
        done = 0
        while done < part:
            done += os.write(fd, bytes(part - done))
        os.close(fd)
        got += done
except OSError as error:
    why = errno.errorcode[error.errno]
"""
    + _END
)
INODES = (
    """
import errno, json, os, time
got, why = 0, None
os.makedirs("/workspace/many")
try:
    for got in range(%d):
        os.close(os.open(f"/workspace/many/{got}", os.O_CREAT | os.O_WRONLY))
except OSError as error:
    why = errno.errorcode[error.errno]
"""
    + _END
)
TMP = DISK.replace("/workspace/fill", "/tmp/fill")  # noqa: S108
FILES = (
    """
import errno, json, os, time
got, why = 0, None
try:
    for _ in range(%d):
        os.dup(0)
        got += 1
except OSError as error:
    why = errno.errorcode[error.errno]
"""
    + _END
)
OUTPUT = """
import os
got, block = 0, b"x" * 65536
while got < %d:
    got += os.write(1, block)
"""
SPIN = """
import os, time
for _ in range(3): os.fork()
end = time.monotonic() + 1.2
while time.monotonic() < end: pass
"""
STAY = """
import os, signal, sys, time
for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


@dataclasses.dataclass(frozen=True)
class Amount:
    """A limit as a number that one program goes over: how it is named, asked for and shown."""

    limit: str
    code: str
    size: int
    ended_by: str | None
    slack: float
    shown: Callable[[int], str]


def _mib(value: int) -> str:
    return f"{value / MIB:.0f} MiB"


def _plain(value: int) -> str:
    return str(value)


AMOUNTS = {
    "memory": Amount("memory", MEMORY, SMALL.memory_bytes, "memory_watch", 1.05, _mib),
    "pids": Amount("pids", PIDS, SMALL.pids, "pids_watch", 1.0, _plain),
    "disk": Amount("disk", DISK, SMALL.disk_bytes, "disk_watch", 1.05, _mib),
    "inodes": Amount("inodes", INODES, SMALL.inodes, "inodes_watch", 1.1, _plain),
    "tmp": Amount("tmp", TMP, SMALL.tmp_bytes, None, 1.05, _mib),
}
_ABOUT = {
    "memory": "allocates four times its memory",
    "pids": "starts four times as many processes as it may",
    "disk": "writes four times its disk, in many files",
    "inodes": "makes four times as many files as it may",
    "tmp": "fills /tmp four times over",
}


def seen_mode(amount: Amount, ended: Ended) -> tuple[Mode | None, str]:
    """What held, by how the exec ended: the kernel's refusal or kill, our watch, or nothing."""
    facts, wanted = ended.facts, TIMES * amount.size
    told: dict[str, Any] = {}
    if facts.exit_code == 0 and ended.stdout:
        told = ended.json()
    got = int(told.get("got", 0))
    if told and got >= wanted * 0.95:
        return "absent", f"{amount.shown(got)} went through"
    if facts.ended_by is not None and facts.ended_by == amount.ended_by:
        peak = facts.usage.peak_memory_bytes if amount.limit == "memory" else None
        return "watched", f"ended by the watch{f' at {_mib(peak)}' if peak else ''}"
    if told.get("errno"):
        how = f"{told['errno']} at {amount.shown(got)} of {amount.shown(amount.size)}"
        return ("enforced" if got <= amount.size * amount.slack else "watched"), how
    if amount.limit == "memory" and (facts.signal == 9 or facts.sandbox_lost or facts.usage.oom_kills):
        peak = facts.usage.peak_memory_bytes
        above = peak is not None and peak > amount.size * amount.slack
        kills = facts.usage.oom_kills
        how = f"killed{f' at {_mib(peak)}' if peak else ''} of {_mib(amount.size)}{', counted by the kernel' if kills else ''}"
        return ("watched" if above else "enforced"), how
    return None, f"neither refused nor done: {ended.reason}"


def _amount(amount: Amount) -> Callable[[Bench], Any]:
    async def run(bench: Bench) -> list[Trial]:
        code = amount.code % (TIMES * amount.size)
        if amount.limit == "pids":  # with memory for all of them, or that would be what ends them
            await bench.let_go("small")
            small = await bench.create(limits=dataclasses.replace(SMALL, memory_bytes=ROOMY.memory_bytes))
        else:
            small = await bench.small()
        roomy = await bench.roomy()
        ended = await small.python(code, background="kill")
        mode, how = seen_mode(amount, ended)
        await small.destroy()  # the next limit is attacked from its beginning
        try:
            once = code.replace(f"sleep({STAY_S})", "sleep(0)")
            passed, told = _passed(amount, await roomy.python(once, background="kill", limits=ROOMY))
            await _tidy(roomy)
        except CorralError as error:
            passed, told = False, f"not even with room for it: {error.code}"
        return [limit_trial(getattr(bench.info.limits, amount.limit), mode, how, Seen(passed, told))]

    return run


def _passed(amount: Amount, ended: Ended) -> tuple[bool, str]:
    if ended.facts.exit_code != 0 or not ended.stdout:
        return False, f"not even with room for it: {ended.reason}"
    got = int(ended.json()["got"])
    return got >= TIMES * amount.size * 0.95, f"with room for it {amount.shown(got)} go through"


async def _tidy(box: Box) -> None:
    """Give back what was written."""
    code = "import glob, os, shutil\nshutil.rmtree('/workspace/many', True)\nfor n in glob.glob('/workspace/fill*') + glob.glob('/tmp/fill*'): os.unlink(n)"
    await box.python(code)


for _name, _one in AMOUNTS.items():
    attack("limits", _name, _ABOUT[_name], "host")(_amount(_one))


@attack("limits", "open files", "opens four times as many files as it may")
async def open_files(bench: Bench) -> list[Trial]:
    wanted = TIMES * SMALL.open_files
    ended = await (await bench.small()).python(FILES % wanted)
    got = ended.json()
    room = (
        await (await bench.roomy()).python((FILES % wanted).replace(f"sleep({STAY_S})", "sleep(0)"), limits=ROOMY)
    ).json()
    control = Seen(room["got"] > 2 * SMALL.open_files, f"with room for it {room['got']} are opened")
    return [Trial("open files", Seen(got["got"] > SMALL.open_files, f"{got['errno']} at {got['got']} of {SMALL.open_files}"), control)]  # fmt: skip


@attack("limits", "output", "writes four times what ends it", "host")
async def output(bench: Bench) -> list[Trial]:
    code, small = OUTPUT % (TIMES * SMALL.output_kill_bytes), await bench.small()
    exec_id = await small.start_python(code)
    ended = await small.wait(exec_id)
    stored = 0
    async for piece in bench.node.raw_output(exec_id, "stdout"):
        stored += len(piece)
    mode: Mode = "absent"
    if ended.reason == "output_limit":
        # What is on its way when the end is decided is still counted; what is stored is the limit.
        mode = "enforced" if stored <= SMALL.output_kill_bytes + 65536 else "watched"
    room = await (await bench.roomy()).python(code, limits=ROOMY)
    control = Seen(room.facts.exit_code == 0, f"with room for it {_mib(room.facts.stdout.produced)} go through")
    how = f"{ended.reason}: {_mib(stored)} of {_mib(TIMES * SMALL.output_kill_bytes)} stored, {len(ended.stdout) // 1024} KiB kept"
    return [limit_trial(bench.info.limits.output, mode, how, control)]


@attack("limits", "cpu", "computes in eight processes on a quarter of a processor", "host")
async def cpu(bench: Bench) -> list[Trial]:
    share = 0.25
    limits = dataclasses.replace(SMALL, cpu=share)
    async with bench.box(limits=limits) as slow:
        used, held_back = await _spin(slow, limits)
    free, not_held = await _spin(await bench.roomy(), ROOMY)
    declared = bench.info.limits.cpu
    if used is None or free is None:
        why = "the host cannot measure processor time here"
        return [limit_trial(declared, None, why, Seen(None, why))]
    # On a busy host nobody gets much: then the kernel's count of how often it held the sandbox back tells.
    counted = bool(held_back) and not not_held
    control = Seen(free > share * 1.5 + 0.1 or counted, f"without a share {free:.2f}, held back {not_held or 0} times")
    mode: Mode | None = "absent" if used > share * 1.5 + 0.1 else "enforced" if control.broke else None
    times = f", held back {held_back} times" if held_back else ""
    return [limit_trial(declared, mode, f"{used:.2f} processors of {share}{times}", control)]


async def _spin(box: Box, limits: Limits) -> tuple[float | None, int | None]:
    """Processors used, and how often the kernel held the sandbox back."""
    await box.works()
    began = time.monotonic()
    ended = await box.python(SPIN, background="kill", limits=dataclasses.replace(limits, wall_s=60.0))
    used, took = ended.facts.usage.cpu_seconds, max(0.2, time.monotonic() - began)
    return None if used is None else used / took, ended.facts.cpu_throttled


@attack("limits", "wall time", "ignores TERM, forks twice, makes a session of its own and stays", "host")
async def wall(bench: Bench) -> list[Trial]:
    box, seen = await bench.small(), await bench.sees_programs()
    marker = f"corral-late-{os.urandom(8).hex()}"
    limits = dataclasses.replace(SMALL, wall_s=0.8)
    began = time.monotonic()
    exec_id = await box.start_python(STAY, marker, limits=limits, grace_s=0.2, background="kill")
    visible = seen and await eventually(lambda: len(marked(marker)) >= 2, 0.7)
    ended = await box.wait(exec_id)
    took = time.monotonic() - began
    gone = await eventually(lambda: not marked(marker), 5.0)
    second = f"corral-late-{os.urandom(8).hex()}"
    roomy = await bench.roomy()
    other = await roomy.start_python(STAY, second, limits=ROOMY, background="kill")
    await asyncio.sleep(1.2)
    status = Seen(bool(marked(second)) if visible else None, "with time for it it stays" if visible else "the host sees no processes of this runtime")  # fmt: skip
    if not visible:
        status = Seen(not (await _is_over(bench, other)), "with time for it it stays")
    await roomy.end(other)
    mode: Mode = "enforced" if ended.reason == "timeout" and gone and took < 10 else "absent"
    how = f"{ended.reason} after {took:.1f} s, {'nothing of it lives' if gone else 'something lives on'}"
    return [limit_trial(bench.info.limits.wall, mode, how, status)]


async def _is_over(bench: Bench, exec_id: str) -> bool:
    try:
        async with asyncio.timeout(0.2):
            await bench.node.wait_exec(exec_id)
    except TimeoutError:
        return False
    return True


@attack("limits", "the neighbour", "after all that another sandbox serves as before", "host")
async def neighbour(bench: Bench) -> list[Trial]:
    box = await bench.create()
    try:
        served = 0
        slowest = 0.0
        for _ in range(5):
            began = time.monotonic()
            served += await box.works()
            slowest = max(slowest, time.monotonic() - began)
        await bench.node.destroy(box.instance_id, "certify")
        dead = not await box.works()
    finally:
        await box.destroy()
    how = f"{served} of 5 answers, the slowest after {slowest * 1000:.0f} ms"
    return [Trial("the neighbour", Seen(served < 5 or slowest > 10, how), Seen(dead, "one that is destroyed does not serve"))]  # fmt: skip
