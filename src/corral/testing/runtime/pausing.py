"""Instances that stand still and go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

from corral.ports.runtime import RuntimeInfo, SupportsPause
from corral.testing.runtime.bench import FENCE, Bench, Box, NotApplicable, check, until
from corral.testing.runtime.host import traces


def _may_pause(info: RuntimeInfo) -> bool:
    return info.capabilities.get("pause", False)


async def _pause(bench: Bench, box: Box) -> None:
    """As the node does: its guest stands still first, then the host freezes it, or the guest stops the tree."""
    by_guest = (await bench.info()).pause_by == "guest"
    client = await box.client()
    assert (await client.pause(FENCE, stop=by_guest))["whole"] == 1
    if not by_guest:
        client.hold()
        await cast("SupportsPause", bench.runtime).pause(box.ref)


async def _resume(bench: Bench, box: Box) -> None:
    client = await box.client()
    if (await bench.info()).pause_by == "host":
        await cast("SupportsPause", bench.runtime).resume(box.ref)
        client.release()
    await client.resume(FENCE)


@check
async def pause_stops_every_process_and_resume_goes_on(bench: Bench) -> None:
    if not _may_pause(await bench.info()):
        raise NotApplicable("it cannot pause")
    async with bench.box() as box:
        path = Path(f"{box.instance.tree.path}/workspace/ticks")
        code = (
            "import os, time\nos.fork(); os.setsid() if os.fork() == 0 else None\n"
            "while True:\n open('/workspace/ticks', 'a').write('x')\n for _ in range(9999): pass"
        )
        await box.start_python(code)

        def ticks() -> int:
            return path.stat().st_size if path.exists() else 0

        async def more() -> bool:
            return ticks() > seen

        seen = 0
        assert await until(more)
        await _pause(bench, box)
        seen, before = ticks(), await bench.runtime.stats(box.ref)
        assert not await until(more, 0.5), "something ran while the instance was paused"
        after = await bench.runtime.stats(box.ref)
        if before.cpu_seconds is not None and after.cpu_seconds is not None:
            assert after.cpu_seconds - before.cpu_seconds < 0.1, "a paused instance used the processor"
        if before.memory_bytes and after.memory_bytes:
            assert after.memory_bytes > before.memory_bytes // 2, "its memory did not stay"
        await _resume(bench, box)
        assert await until(more)
        assert await box.alive()
        for _ in range(5):
            await _pause(bench, box)
            await _resume(bench, box)
        await _pause(bench, box)
        await box.close()
        await bench.destroy(box.ref)
        assert traces(box.spec) == []


@check
async def what_forks_all_the_time_stands_still_paused_and_is_killed(bench: Bench) -> None:
    if not _may_pause(await bench.info()) or bench.config.scripted:
        raise NotApplicable("it cannot pause")
    async with bench.box(await bench.roomy()) as box:
        code = "import os\nwhile True:\n try:\n  if os.fork() == 0: os._exit(0)\n  os.waitpid(-1, 0)\n except OSError: pass"
        for _ in range(3):
            await box.start_python(code)
        await _pause(bench, box)
        before = await bench.runtime.stats(box.ref)
        await asyncio.sleep(0.3)
        after = await bench.runtime.stats(box.ref)
        if before.cpu_seconds is not None and after.cpu_seconds is not None:
            assert after.cpu_seconds - before.cpu_seconds < 0.1, "a paused instance used the processor"
        await box.close()
        await asyncio.wait_for(bench.runtime.kill(box.ref), 60)
        assert await bench.runtime.processes(box.ref) == []
