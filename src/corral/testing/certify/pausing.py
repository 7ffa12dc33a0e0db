"""A pause, where it is declared: what was made to go on all the time stands still, by the host's counters and its view of the disk.

The control is the same program before the pause and after it: it moves, so its standing still meanwhile says something.
"""

from __future__ import annotations

import asyncio

from corral.errors import CorralError
from corral.testing.certify.bench import FENCE, ROOMY, SMALL, Bench, Box, eventually
from corral.testing.certify.register import attack
from corral.testing.certify.verdict import Seen, Trial

STILL_S = 0.6
IDLE_S = 0.1
"""Processor time that a guest may use to look around, while it keeps the others from running."""
RUNS_ON = """
import os, signal
for number in (1, 2, 15, 18, 20): signal.signal(number, signal.SIG_IGN)
if os.fork() == 0: os.setsid()
if os.fork() == 0:
    while True:
        if os.fork() == 0: os._exit(0)
        os.waitpid(-1, 0)
while True:
    open("/workspace/moves", "a").write("x")
    for _ in range(9999): pass
"""


@attack("limits", "pause", "runs on while it is paused: forks, ignores signals, leaves its session", "host")
async def pause(bench: Bench) -> list[Trial]:
    if not bench.info.capabilities.get("pause", False):
        nothing = Seen(None, "a pause is not declared")
        return [Trial("pause", nothing, nothing)]
    async with bench.box(limits=SMALL) as box:
        exec_id = await box.start_python(RUNS_ON, limits=ROOMY, background="kill")
        moved = await eventually(lambda: _written(box) > 0, 20.0)
        await bench.node.pause(box.instance_id, FENCE)
        written, used = _written(box), (await bench.node.stats(box.instance_id)).cpu_seconds
        await asyncio.sleep(STILL_S)
        after, more = _written(box), (await bench.node.stats(box.instance_id)).cpu_seconds
        spent = 0.0 if used is None or more is None else more - used
        entered = False
        try:
            await box.start(["true"])
            entered = True
        except CorralError as error:
            refused = error.code
        await bench.node.resume(box.instance_id, FENCE)
        goes_on = await eventually(lambda: _written(box) > after, 20.0)
        await box.end(exec_id)
    how = f"{after - written} bytes written, {spent:.2f} s of a processor in {STILL_S} s"
    how += ", a program was started in it" if entered else f", a start is {refused}"
    control = Seen(
        moved and goes_on, "before and after the pause it moves" if goes_on else "it does not go on after the pause"
    )
    return [Trial("pause", Seen(after > written or spent > IDLE_S or entered or not goes_on, how), control)]


def _written(box: Box) -> int:
    try:
        return (box.tree / "workspace" / "moves").stat().st_size
    except OSError:
        return 0
