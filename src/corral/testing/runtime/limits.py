"""Limits, attacked to four times their size."""

from __future__ import annotations

import asyncio
import signal
import time

from corral.domain.limits import MIB, Limits
from corral.testing import attacks
from corral.testing.runtime.bench import LIMITS, Bench, NotApplicable, check, require, until


@check
async def memory_is_enforced(bench: Bench) -> None:
    require(await bench.info(), "memory", "enforced")
    if not await bench.host_pids():
        raise NotApplicable("a hit ends the whole sandbox")
    async with bench.box() as box:
        before = await bench.runtime.stats(box.ref)
        hog = await box.python(f"x = bytearray(b'x') * {4 * LIMITS.memory_bytes}\nprint(len(x))")
        after = await bench.runtime.stats(box.ref)
        assert hog.status["signal"] == signal.SIGKILL and hog.stdout == b"", hog
        assert before.oom_kills is not None and after.oom_kills is not None and after.oom_kills > before.oom_kills
        assert after.peak_memory_bytes is not None
        assert LIMITS.memory_bytes * 0.8 < after.peak_memory_bytes <= LIMITS.memory_bytes, after
        assert await box.alive(), "the guest must survive an OOM of an exec"
        victim = await box.run(["/bin/busybox", "sh", "-c", "kill -9 $$"])
        assert victim.status["signal"] == signal.SIGKILL
        assert (await bench.runtime.stats(box.ref)).oom_kills == after.oom_kills, "a plain kill is no OOM"


@check
async def memory_is_enforced_around_the_whole_sandbox(bench: Bench) -> None:
    """Its kernel is inside the limit: a hit ends it, for sure, and the host's counter tells afterwards that it was one."""
    require(await bench.info(), "memory", "enforced")
    if await bench.host_pids():
        raise NotApplicable("a hit ends the process that made it")
    async with bench.box() as box:
        before = await bench.runtime.stats(box.ref)
        await box.start_python(f"x = bytearray(b'x') * {4 * LIMITS.memory_bytes}\nprint(len(x))")
        await asyncio.wait_for(bench.runtime.wait_gone(box.ref), 60)
        after = await bench.runtime.stats(box.ref)
        assert before.oom_kills is not None and after.oom_kills is not None and after.oom_kills > before.oom_kills
        assert after.peak_memory_bytes is not None
        # To what is dying the kernel gives a page more.
        assert LIMITS.memory_bytes * 0.8 < after.peak_memory_bytes < LIMITS.memory_bytes + MIB, after
        assert await bench.runtime.attach(box.ref) is None
    async with bench.box() as box:
        assert await box.alive()
        before = await bench.runtime.stats(box.ref)
        await bench.runtime.kill(box.ref)
        assert (await bench.runtime.stats(box.ref)).oom_kills == before.oom_kills, "a plain kill is no OOM"


@check
async def memory_is_watched(bench: Bench) -> None:
    info = await bench.info()
    require(info, "memory", "watched")
    assert info.limits.overshoot["memory"]
    async with bench.box() as box:
        size = LIMITS.memory_bytes * 5 // 4
        await box.start_python(f"import time\nx = bytearray(b'x') * {size}\ntime.sleep(1000)")

        async def seen() -> bool:
            return ((await bench.runtime.stats(box.ref)).memory_bytes or 0) > LIMITS.memory_bytes

        assert await until(seen)
        assert ((await bench.runtime.stats(box.ref)).peak_memory_bytes or 0) > LIMITS.memory_bytes
        hog = await box.python(f"x = bytearray(b'x') * {5 * LIMITS.memory_bytes}\nprint(len(x))")
        assert hog.stdout == b"", "one process passed the bound above the watched limit"


@check
async def peaks_start_anew(bench: Bench) -> None:
    half = LIMITS.memory_bytes // 2
    async with bench.box() as box:
        wait = "import os, time\nwhile not os.path.exists('/workspace/go'): time.sleep(0.02)"
        await box.start_python(f"x = bytearray(b'x') * {half}\n{wait}")

        async def peaked() -> bool:
            peak = (await bench.runtime.stats(box.ref)).peak_memory_bytes
            if peak is None:
                raise NotApplicable("no peak is measured")
            return peak >= half

        async def given_back() -> bool:
            """A new peak begins with what is used then, and a kernel of its own returns a program's memory a little after its end."""
            return ((await bench.runtime.stats(box.ref)).memory_bytes or 0) < half

        assert await until(peaked)
        await box.python("open('/workspace/go', 'w')")
        assert await until(given_back)
        await bench.runtime.reset_peaks(box.ref)
        peak = (await bench.runtime.stats(box.ref)).peak_memory_bytes
        assert peak is not None and peak < half, peak


@check
async def tmp_is_bounded_and_cannot_kill_the_guest(bench: Bench) -> None:
    require(await bench.info(), "tmp", "enforced")
    async with bench.box() as box:
        sums = 0
        for path in ("/tmp", "/dev/shm", "/run/user/1000", "/run", "/dev"):  # noqa: S108
            answer = (await box.python(attacks.FILL % (path, LIMITS.memory_bytes))).json()
            sums += answer["bytes"]
            assert answer["errno"] in ("ENOSPC", "EACCES", "EROFS"), (path, answer)
            if path == "/tmp":  # noqa: S108
                assert LIMITS.tmp_bytes * 0.9 <= answer["bytes"] <= LIMITS.tmp_bytes, answer
        assert sums <= LIMITS.memory_bytes // 2, "what tmpfs holds cannot be freed by killing"
        assert await box.alive()


@check
async def disk_is_enforced(bench: Bench) -> None:
    require(await bench.info(), "disk", "enforced")
    async with bench.box() as box:
        total = 0
        for path in ("/workspace", "/home/sandbox", "/var/tmp"):  # noqa: S108
            answer = (await box.python(attacks.FILL % (path, 4 * LIMITS.disk_bytes))).json()
            total += answer["bytes"]
            assert answer["errno"] == "ENOSPC", answer
        assert LIMITS.disk_bytes * 0.9 <= total <= LIMITS.disk_bytes, total
        stats = await bench.runtime.stats(box.ref)
        assert stats.disk_free_bytes is not None and stats.disk_free_bytes < MIB
        assert stats.disk_bytes is not None and stats.disk_bytes > LIMITS.disk_bytes * 0.9
        assert await box.alive()


@check
async def inodes_are_enforced(bench: Bench) -> None:
    require(await bench.info(), "inodes", "enforced")
    async with bench.box() as box:
        answer = (await box.python(attacks.FILES % (4 * LIMITS.inodes))).json()
        assert answer["errno"] == "ENOSPC", answer
        assert LIMITS.inodes * 0.8 <= answer["files"] <= LIMITS.inodes * 1.1 + 32, answer
        assert ((await bench.runtime.stats(box.ref)).inodes_free or 0) < 16
        assert await box.alive()


@check
async def disk_is_watched(bench: Bench) -> None:
    info = await bench.info()
    require(info, "disk", "watched")
    assert info.limits.overshoot["disk"] and info.limits.overshoot["inodes"]
    async with bench.box() as box:
        answer = (await box.python(attacks.FILL % ("/workspace", 4 * LIMITS.disk_bytes))).json()
        assert answer["bytes"] <= LIMITS.disk_bytes, "one file passed the limit"
        await box.run(["/bin/busybox", "cp", "/workspace/fill", "/home/sandbox/more"])

        async def seen() -> bool:
            return ((await bench.runtime.stats(box.ref)).disk_bytes or 0) > LIMITS.disk_bytes

        assert await until(seen)
        assert (await bench.runtime.stats(box.ref)).disk_free_bytes == 0
        await box.python(attacks.FILES % (2 * LIMITS.inodes))

        async def crowded() -> bool:
            return (await bench.runtime.stats(box.ref)).inodes_free == 0

        assert await until(crowded)


@check
async def pids_are_enforced(bench: Bench) -> None:
    info = await bench.info()
    require(info, "pids", "enforced")
    async with bench.box(await bench.roomy()) as box:
        # It waits for its children: what outlives an exec counts until it is gone.
        collect = "os.close(w)\nfor _ in range(children): os.wait()\n"
        answer = (await box.python(attacks.FORK % (4 * LIMITS.pids) + collect)).json()
        assert answer["errno"] == "EAGAIN" and LIMITS.pids // 2 < answer["children"] < LIMITS.pids, answer
        stats = await bench.runtime.stats(box.ref)
        if not await bench.host_pids():
            assert stats.pids_limit_hits is None, "a kernel inside held it: the host has no counter"
        elif info.capabilities.get("cgroup", False):
            assert stats.pids_limit_hits and stats.pids_limit_hits > 0
        assert await box.alive()


@check
async def pids_are_watched(bench: Bench) -> None:
    info = await bench.info()
    require(info, "pids", "watched")
    assert info.limits.overshoot["pids"]
    async with bench.box() as box:
        exec_id = await box.start_python(
            attacks.FORK % (8 * LIMITS.pids) + "\nimport sys; sys.stdout.flush(); time.sleep(1)"
        )

        async def seen() -> bool:
            return ((await bench.runtime.stats(box.ref)).pids or 0) > LIMITS.pids

        assert await until(seen)
        answer = (await box.result(exec_id)).json()
        assert answer["errno"] == "EAGAIN" and answer["children"] <= 4 * LIMITS.pids, answer


@check
async def cpu_is_enforced(bench: Bench) -> None:
    require(await bench.info(), "cpu", "enforced")
    limits = Limits(memory_bytes=LIMITS.memory_bytes, pids=64, disk_bytes=LIMITS.disk_bytes, tmp_bytes=MIB, cpu=0.25)
    async with bench.box(limits) as box:
        assert await box.alive()
        before, began = (await bench.runtime.stats(box.ref)).cpu_seconds, time.monotonic()
        code = "import os, time\nos.fork(); os.fork()\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
        await box.python(code)
        after, took = (await bench.runtime.stats(box.ref)).cpu_seconds, time.monotonic() - began
        assert before is not None and after is not None
        assert after - before < 0.25 * took * 1.5 + 0.1, (after - before, took)
