"""The process that makes or destroys an instance dies: what it left is found, used or removed by another."""

from __future__ import annotations

import signal
from dataclasses import asdict

from corral import faults
from corral.linux import process
from corral.ports.runtime import InstanceRef
from corral.testing.runtime.bench import Bench, Box, NotApplicable, check
from corral.testing.runtime.elsewhere import do_elsewhere
from corral.testing.runtime.host import traces

OF_THE_DISK = ("runtime.create.image", "runtime.create.loop", "runtime.create.disk")


@check
async def attach_works_from_another_process(bench: Bench) -> None:
    async with bench.box() as box:
        status, answer = await do_elsewhere(bench, "attach", box.spec, ref=asdict(box.ref))
        assert (status, answer) == (0, True)
        assert (await bench.runtime.attach(box.ref)) == box.instance
        await bench.runtime.kill(box.ref)
        assert await bench.runtime.attach(box.ref) is None
        assert (await do_elsewhere(bench, "attach", box.spec, ref=asdict(box.ref))) == (0, False)


@check
async def an_instance_outlives_its_creator(bench: Bench) -> None:
    await bench.info()
    spec = bench.spec()
    status, answer = await do_elsewhere(bench, "create_and_die", spec)
    assert status == -signal.SIGKILL and answer, (status, answer)
    ref = InstanceRef(**answer)
    instance = await bench.runtime.attach(ref)
    assert instance is not None
    box = Box(bench, spec, instance)
    assert await box.alive()
    refs = await box.refs()
    await box.close()
    await bench.destroy(ref)
    assert not any(process.is_alive(one) for one in refs)
    assert traces(spec) == []


@check
async def death_anywhere_in_create_leaves_nothing_after_destroy(bench: Bench) -> None:
    names = await _points(bench, "runtime.create.")
    if bench.config.scripted:
        raise NotApplicable("an instance lives only as long as its creator")
    assert len(names) >= 3, f"create passes {names} only"
    for name in names:
        spec = bench.spec()
        status, _ = await do_elsewhere(bench, "create", spec, fault=name)
        assert status == -signal.SIGKILL, (name, status)
        await bench.destroy(bench.runtime.partial_ref(spec.directory, spec.instance_id))
        assert traces(spec) == [], name


@check
async def create_again_after_death_in_create_works(bench: Bench) -> None:
    for name in await _points(bench, "runtime.create."):
        if name in OF_THE_DISK and not await bench.host_pids():
            continue  # the disk is made the same way for all, and each start costs half a second here
        spec = bench.spec()
        status, _ = await do_elsewhere(bench, "create", spec, fault=name)
        assert status == -signal.SIGKILL, (name, status)
        box = await bench.create(spec)
        assert await box.alive(), name
        await box.close()
        await bench.destroy(box.ref)


@check
async def death_anywhere_in_destroy_leaves_nothing_after_another(bench: Bench) -> None:
    names = await _points(bench, "runtime.destroy.")
    if not names:
        raise NotApplicable("destroy passes no fault point")
    for name in names:
        box = await bench.create(bench.spec())
        assert await box.alive()
        await box.close()
        status, _ = await do_elsewhere(bench, "destroy", box.spec, fault=name, ref=asdict(box.ref))
        assert status == -signal.SIGKILL, (name, status)
        await bench.destroy(box.ref)
        assert traces(box.spec) == [], name


async def _points(bench: Bench, prefix: str) -> list[str]:
    """Fault points that one life of an instance passes, each once, in order."""
    seen: list[str] = []
    passing = faults.point

    def note(name: str) -> None:
        if name.startswith(prefix) and name not in seen:
            seen.append(name)

    faults.point = note
    try:
        async with bench.box():
            pass
    finally:
        faults.point = passing
    return seen
