"""Making, finding and ending instances."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from dataclasses import replace

from corral.linux import process, sockets
from corral.testing.runtime.bench import INFOS, Bench, NotApplicable, check, until
from corral.testing.runtime.host import host_uid, traces, tried


@check
async def probe_is_truthful(bench: Bench) -> None:
    """What it says of itself is what an instance shows."""
    began = time.monotonic()
    INFOS.clear()
    info = await bench.info()
    assert time.monotonic() - began < 20
    assert not tried(bench.config.installation_id, bench.config.state_dir), "the probe left something"
    assert info.name == bench.runtime.name and info.version and info.reason is None and 0 <= info.security_level <= 3
    async with bench.box() as box:
        assert box.instance.same_uid != info.capabilities.get("two_uids", False)
        assert await box.alive()
        stats = await bench.runtime.stats(box.ref)
        grouped = info.capabilities.get("cgroup", False)
        if not bench.config.scripted:
            assert (stats.oom_kills is not None) == grouped, "a counter that does not exist is None, not 0"
            assert stats.memory_bytes and stats.memory_bytes > 0 and stats.disk_free_bytes
            assert bool(stats.pids) == info.capabilities.get("host_pids", False)


@check
async def create_is_idempotent(bench: Bench) -> None:
    async with bench.box() as box:
        assert await box.alive()
        await box.close()  # one client at a time
        again = await bench.create(box.spec)
        assert again.ref == box.ref
        assert await box.alive()


@check
async def destroy_ends_everything_and_is_idempotent(bench: Bench) -> None:
    async with bench.box() as box:
        stubborn = "trap '' TERM INT HUP; busybox setsid busybox sleep 1000 & busybox sleep 1000"
        await box.start(["/bin/busybox", "sh", "-c", stubborn])
        await box.run(["/bin/busybox", "dd", "if=/dev/zero", "of=/workspace/dirty", "bs=1M", "count=8"])

        async def started() -> bool:
            return len(await box.refs()) >= (4 if await bench.host_pids() else 2)

        assert await until(started)
        refs = await box.refs()
        await box.close()
        await bench.destroy(box.ref)
        assert not any(process.is_alive(ref) for ref in refs)
        assert traces(box.spec) == []
        await bench.destroy(box.ref)
        await bench.destroy(bench.runtime.partial_ref(box.spec.directory, box.spec.instance_id))


@check
async def kill_ends_every_process_and_wait_gone_tells(bench: Bench) -> None:
    async with bench.box() as box:
        await box.start(["/bin/busybox", "sleep", "1000"])
        waiter = asyncio.create_task(bench.runtime.wait_gone(box.ref))
        refs = await box.refs()
        await asyncio.sleep(0)
        assert not waiter.done() and refs
        await box.close()
        await bench.runtime.kill(box.ref)
        await asyncio.wait_for(waiter, 10)
        assert not any(process.is_alive(ref) for ref in refs)
        assert await bench.runtime.processes(box.ref) == []
        await bench.runtime.kill(box.ref)
        assert os.path.isdir(box.spec.directory)


@check
async def kill_ends_a_fork_bomb(bench: Bench) -> None:
    async with bench.box(await bench.roomy()) as box:
        code = "import os\nwhile True:\n try:\n  os.fork()\n  os.setsid()\n except BlockingIOError: open('/workspace/full', 'w')\n except OSError: pass"
        await box.start_python(code)

        async def grown() -> bool:
            if await bench.host_pids():
                return len(await bench.runtime.processes(box.ref)) > 20
            return os.path.exists(f"{box.instance.tree.path}/workspace/full")  # its guest may be too late to tell

        assert await until(grown)
        await box.close()
        await asyncio.wait_for(bench.runtime.kill(box.ref), 60)
        assert await bench.runtime.processes(box.ref) == []


@check
async def concurrent_instances_are_apart(bench: Bench) -> None:
    await bench.info()
    specs = [bench.spec() for _ in range(4)]
    boxes = await asyncio.gather(*(bench.create(spec) for spec in specs))
    secret = secrets.token_hex(8)
    for box in boxes[:1]:
        where = ("/workspace", "/tmp", "/home/sandbox", "/var/tmp", "/dev/shm")  # noqa: S108
        wrote = await box.run(["/bin/busybox", "touch", *(f"{path}/{secret}" for path in where)])
        assert wrote.ok, wrote.stderr
    for box in boxes[1:]:
        seen = await box.run(["/bin/busybox", "find", "/", "-xdev", "-name", secret])
        assert seen.stdout == b"", seen.stdout
        listing = await box.run(["/bin/busybox", "ps"])
        assert listing.ok and len(listing.stdout.splitlines()) < 10
    if (await bench.info()).security_level >= 1:
        owners = [uid for box in boxes for uid in {host_uid(ref.pid) for ref in await box.refs()}]
        assert len(set(owners)) == len(owners), "two instances share a uid on the host"
    for box in boxes:
        await box.close()
    await asyncio.gather(*(bench.destroy(box.ref) for box in boxes))


@check
async def an_instance_of_a_forgotten_installation_goes_with_its_directory_only(bench: Bench) -> None:
    if bench.config.scripted:
        raise NotApplicable("an instance lives only as long as its creator")
    async with bench.box() as box:
        await box.start(["/bin/busybox", "sleep", "1000"])
        refs, spec = await box.refs(), box.spec
        stranger = replace(bench.config, installation_id=f"conf{secrets.token_hex(4)}").make()
        elsewhere = f"{bench.config.state_dir}/copy-{secrets.token_hex(4)}/{os.path.basename(spec.directory)}"
        os.makedirs(elsewhere)
        evidence = await stranger.destroy(stranger.partial_ref(elsewhere, spec.instance_id))
        assert evidence.clean, evidence
        assert await box.alive()
        os.rmdir(os.path.dirname(elsewhere))
        await box.close()
        evidence = await stranger.destroy(stranger.partial_ref(spec.directory, spec.instance_id))
        assert evidence.clean, evidence
        assert refs and not any(process.is_alive(ref) for ref in refs)
        assert traces(spec) == []


@check
async def a_cancelled_create_can_be_destroyed(bench: Bench) -> None:
    await bench.info()
    for delay in (0.0, 0.004, 0.012):
        spec = bench.spec()
        with sockets.listen(spec.directory, "s") as control:
            creating = asyncio.create_task(bench.runtime.create(spec, control))
            await asyncio.sleep(delay)
            creating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await creating
            await bench.destroy(bench.runtime.partial_ref(spec.directory, spec.instance_id))
        assert traces(spec) == []
