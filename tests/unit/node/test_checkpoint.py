"""The making of a memory snapshot, whatever interrupts it: an instance that goes on and no file, or a whole snapshot, or neither."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.node.conftest import FENCE, Bench, fresh

from corral import faults
from corral.adapters.runtimes.fake import FakeRuntime
from corral.domain.fence import Fence
from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.node import snapshots
from corral.ports.node import CreateInstance
from corral.ports.runtime import Evidence, InstanceRef, Runtime

BEFORE_WRITING = ("node.checkpoint.begun", "node.checkpoint.quiet", "node.checkpoint.condemned")
WRITTEN = ("node.checkpoint.files", "node.checkpoint.synced")


class Holding(FakeRuntime):
    """A checkpoint waits for `go`, and fails with `failure` before or after it has ended the guest."""

    def __init__(self, inner: FakeRuntime) -> None:
        self.__dict__.update(inner.__dict__)
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.failure: BaseException | None = None
        self.ends = False
        self.indestructible = False
        self.on_kill: Callable[[], None] = lambda: None

    async def checkpoint(self, ref: InstanceRef, into: str) -> None:
        Path(into, "memory.part").touch()
        self.begun.set()
        await self.go.wait()
        if self.failure is not None:
            if self.ends:
                await self.kill(ref)
            raise self.failure
        os.unlink(Path(into, "memory.part"))
        await super().checkpoint(ref, into)

    async def kill(self, ref: InstanceRef) -> None:
        await super().kill(ref)
        self.on_kill()

    async def destroy(self, ref: InstanceRef) -> Evidence:
        if self.indestructible:
            raise CorralError("infra_error", "it could not be removed")
        return await super().destroy(ref)


@pytest.fixture
async def saving(bench_of: Callable[..., Any], tmp_path: Path) -> AsyncIterator[Bench]:
    interpreter = tmp_path / "interpreter" / tmp_path.name  # as the node of these tests calls it
    interpreter.mkdir(parents=True)
    (interpreter / ".complete").touch()
    yield await bench_of(lambda runtime: cast("Runtime", Holding(cast("FakeRuntime", runtime))))


@contextlib.contextmanager
def broken_at(point: str, error: BaseException) -> Iterator[None]:
    def fail() -> None:
        raise error

    faults.arm(point, fail)
    try:
        yield
    finally:
        faults.arm(point, None)


def holding(bench: Bench) -> Holding:
    return cast("Holding", bench.runtime)


async def refused(call: Any, code: str, *, retryable: bool | None = None) -> CorralError:
    with pytest.raises(CorralError) as caught:
        await call
    assert caught.value.code == code, caught.value
    assert retryable in (None, caught.value.retryable)
    return caught.value


async def goes_on(bench: Bench, instance: str, fence: Fence = FENCE) -> None:
    facts, out, _ = await bench.run(instance, "echo", "on", fence=fence)
    assert (facts.exit_code, out) == (0, b"on\n")
    await bench.node.extend_deadline(instance, fence, 300.0)
    assert bench.node._journal.instances[instance].state == "live"
    assert "saving" not in bench.node._journal.instances[instance].data


def restored(bench: Bench, **changes: Any) -> CreateInstance:
    request = CreateInstance(
        fresh("ins"), fresh("sbx"), 2, Fence(2, 1), bench.runtime.name, "host", Limits(), deadline_s=300.0
    )
    return dataclasses.replace(request, **changes)


async def test_a_snapshot_is_whole_and_its_copies_go_on_with_the_disk(saving: Bench, tmp_path: Path) -> None:
    instance = await saving.create()
    await saving.run(instance, "write", "file", "kept")
    saving.node._bodies[instance].disk_base = 12345
    image = tmp_path / "image"
    assert (await saving.node.checkpoint_instance(instance, FENCE, str(image))).clean
    assert sorted(os.listdir(image)) == ["disk", "memory", "snapshot.json"]
    assert await saving.node.instances() == []
    request = restored(saving)
    await saving.node.restore_instance(request, str(image))
    body = saving.node._bodies[request.instance_id]
    assert (Path(body.tree.path) / "workspace" / "file").read_text() == "kept"
    # What its disk held when it was saved was written by programs: it counts.
    assert body.disk_base == 12345
    # So it does in a copy of the copy, and for a node that comes later.
    await saving.restart()
    again = tmp_path / "again"
    assert (await saving.node.checkpoint_instance(request.instance_id, Fence(2, 1), str(again))).clean
    assert snapshots.read(str(again)).disk_base == 12345


@pytest.mark.parametrize("error", [OSError("broken"), RuntimeError("broken"), CorralError("infra_error", "broken")])
@pytest.mark.parametrize("point", BEFORE_WRITING)
async def test_a_failure_before_the_memory_is_written_leaves_an_instance_that_goes_on(
    saving: Bench, tmp_path: Path, point: str, error: Exception
) -> None:
    instance = await saving.create()
    image = tmp_path / "image"
    with broken_at(point, error), pytest.raises(type(error)):
        await saving.node.checkpoint_instance(instance, FENCE, str(image))
    assert not image.exists()
    await goes_on(saving, instance)
    assert (await saving.node.checkpoint_instance(instance, FENCE, str(image))).clean


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("error", [OSError("broken"), RuntimeError("broken"), CorralError("infra_error", "broken")])
async def test_a_runtime_that_fails_leaves_an_instance_that_goes_on_or_none(
    saving: Bench, tmp_path: Path, error: Exception, ends: bool
) -> None:
    instance = await saving.create()
    image = tmp_path / "image"
    image.mkdir()
    holding(saving).failure, holding(saving).ends = error, ends
    with pytest.raises(type(error)):
        await saving.node.checkpoint_instance(instance, FENCE, str(image))
    assert os.listdir(image) == []  # it was there before, so it stays
    if ends:
        assert await saving.node.instances() == []
        assert await asyncio.wait_for(saving.node.lost(), 30) == instance
    else:
        await goes_on(saving, instance)


@pytest.mark.parametrize("point", WRITTEN)
async def test_a_snapshot_that_cannot_be_kept_leaves_neither_file_nor_instance(
    saving: Bench, tmp_path: Path, point: str
) -> None:
    instance = await saving.create()
    image = tmp_path / "image"
    with broken_at(point, OSError(28, "No space left on device")), pytest.raises((CorralError, OSError)):
        await saving.node.checkpoint_instance(instance, FENCE, str(image))
    assert not image.exists()
    assert await saving.node.instances() == []
    assert await asyncio.wait_for(saving.node.lost(), 30) == instance


async def test_who_goes_away_while_the_guest_writes_its_files_out_leaves_an_instance_that_goes_on(
    saving: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears nothing until that is done, which may take longer than any other answer."""
    instance = await saving.create()
    client = await saving.node._bodies[instance].client()
    asked, synced = asyncio.Event(), asyncio.Event()
    quiesce, identify = client.quiesce, client.identify

    async def slow(fence: Fence) -> dict[str, int]:
        answer = await quiesce(fence)
        asked.set()
        await synced.wait()
        return answer

    async def deaf(*values: Any, **more: Any) -> float | None:
        if not synced.is_set():
            raise CorralError("guest_lost", "the guest did not answer identify in time")
        return await identify(*values, **more)

    monkeypatch.setattr(client, "quiesce", slow)
    monkeypatch.setattr(client, "identify", deaf)
    image = tmp_path / "image"
    call = asyncio.create_task(saving.node.checkpoint_instance(instance, FENCE, str(image)))
    await asked.wait()
    call.cancel()
    for _ in range(100):
        await asyncio.sleep(0)
    synced.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not image.exists()
    await goes_on(saving, instance)


@pytest.mark.parametrize("heard", ["with the snapshot", "before", "by who connected last"])
async def test_a_guest_that_heard_of_a_newer_lease_goes_on_with_that(saving: Bench, tmp_path: Path, heard: str) -> None:
    instance = await saving.create()
    newer = Fence(1, 7)
    if heard != "with the snapshot":
        await saving.node.extend_deadline(instance, newer, 300.0)
    if heard == "by who connected last":
        await saving.restart()
        saving.node._journal.set_instance(instance, floor=FENCE)
    with broken_at("node.checkpoint.quiet", OSError("broken")), pytest.raises(OSError):
        await saving.node.checkpoint_instance(instance, newer, str(tmp_path / "image"))
    await goes_on(saving, instance, newer)
    assert saving.node._bodies[instance].floor == newer
    await refused(saving.node.extend_deadline(instance, FENCE, 300.0), "lease_lost")


async def test_a_snapshot_by_a_lease_that_the_guest_refuses_changes_nothing(
    saving: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await saving.create()
    newer = Fence(1, 7)
    await saving.node.extend_deadline(instance, newer, 300.0)
    client = await saving.node._bodies[instance].client()
    monkeypatch.setattr(client, "identify", None)  # it is who it was
    await refused(saving.node.checkpoint_instance(instance, FENCE, str(tmp_path / "image")), "lease_lost")
    assert not (tmp_path / "image").exists()
    assert saving.node._bodies[instance].floor == FENCE
    await goes_on(saving, instance, newer)


async def test_a_node_that_comes_later_wakes_a_guest_that_heard_of_a_newer_lease(saving: Bench) -> None:
    instance = await saving.create()
    await (await saving.node._bodies[instance].client()).quiesce(Fence(1, 7))
    await saving.restart()
    await goes_on(saving, instance, Fence(1, 7))


async def test_a_guest_that_does_not_wake_is_ended_and_told_as_lost(
    saving: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await saving.create()
    client = await saving.node._bodies[instance].client()

    async def deaf(*_: Any, **__: Any) -> float | None:
        raise CorralError("infra_error", "no answer")

    monkeypatch.setattr(client, "identify", deaf)
    image = tmp_path / "image"
    with broken_at("node.checkpoint.quiet", OSError("broken")), pytest.raises(OSError):
        await saving.node.checkpoint_instance(instance, FENCE, str(image))
    assert not image.exists()
    assert await saving.node.instances() == []
    assert await asyncio.wait_for(saving.node.lost(), 30) == instance


@pytest.mark.parametrize("end", ["it ends", "it is destroyed"])
async def test_an_end_while_what_failed_is_being_removed_is_told(
    saving: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    instance = await saving.create()
    body, loop, discard = saving.node._bodies[instance], asyncio.get_running_loop(), snapshots.discard_half

    async def come_to_an_end() -> None:
        if end == "it is destroyed":
            monkeypatch.setattr(snapshots, "discard_half", discard)
            assert (await saving.node.destroy(instance, "sandbox_deleted")).clean
            return
        await saving.runtime.kill(body.ref)
        assert body._watcher is not None
        await asyncio.wait({body._watcher})

    def removed_meanwhile(*values: Any) -> list[str]:
        asyncio.run_coroutine_threadsafe(come_to_an_end(), loop).result(60)
        return discard(*values)

    monkeypatch.setattr(snapshots, "discard_half", removed_meanwhile)
    holding(saving).failure = CorralError("infra_error", "broken")
    await refused(saving.node.checkpoint_instance(instance, FENCE, str(tmp_path / "image")), "infra_error")
    assert not (tmp_path / "image").exists()
    if end == "it ends":
        assert await asyncio.wait_for(saving.node.lost(), 30) == instance
        assert "saving" not in saving.node._journal.instances[instance].data
    else:
        assert await saving.node.instances() == []


async def test_an_instance_that_cannot_be_removed_after_its_snapshot_failed_is_told_as_lost(
    saving: Bench, tmp_path: Path
) -> None:
    instance = await saving.create()
    runtime = holding(saving)
    runtime.failure, runtime.ends, runtime.indestructible = CorralError("infra_error", "broken"), True, True
    await refused(saving.node.checkpoint_instance(instance, FENCE, str(tmp_path / "image")), "infra_error")
    assert await asyncio.wait_for(saving.node.lost(), 30) == instance
    runtime.indestructible = False
    assert (await saving.node.destroy(instance, "sandbox_deleted")).clean
    assert not (tmp_path / "image").exists()


async def test_who_goes_away_while_the_memory_is_written_leaves_a_whole_snapshot(
    saving: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SAVE_S", 60.0)
    instance = await saving.create()
    runtime = holding(saving)
    runtime.go.clear()
    image = tmp_path / "image"
    call = asyncio.create_task(saving.node.checkpoint_instance(instance, FENCE, str(image)))
    await runtime.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await refused(saving.node.checkpoint_instance(instance, FENCE, str(image)), "illegal_transition", retryable=True)
    runtime.go.set()
    await saving.restart()  # a node that closes waits for it
    assert await saving.node.instances() == []
    assert snapshots.read(str(image)).instance_id == instance
    await saving.node.restore_instance(restored(saving), str(image))


async def test_a_destruction_in_the_middle_wins_and_leaves_no_file(saving: Bench, tmp_path: Path) -> None:
    instance = await saving.create()
    runtime = holding(saving)
    runtime.go.clear()
    runtime.failure = CorralError("infra_error", "it was killed")
    image = tmp_path / "image"
    call = asyncio.create_task(saving.node.checkpoint_instance(instance, FENCE, str(image)))
    await runtime.begun.wait()
    destroying = asyncio.create_task(saving.node.destroy(instance, "sandbox_deleted"))
    await asyncio.sleep(0)
    runtime.go.set()
    await refused(call, "infra_error")
    assert (await destroying).clean
    assert not image.exists() and await saving.node.instances() == []


@pytest.mark.parametrize("obeys", [True, False])
async def test_a_node_that_closes_ends_what_takes_too_long_and_lets_go(
    saving: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obeys: bool
) -> None:
    monkeypatch.setattr(snapshots, "SAVE_S", 0.05)
    monkeypatch.setattr(snapshots, "END_S", 60.0 if obeys else 0.05)
    instance, other = await saving.create(), await saving.create()
    runtime, node, image = holding(saving), saving.node, tmp_path / "image"
    image.mkdir()
    runtime.go.clear()
    if obeys:
        runtime.failure = CorralError("infra_error", "it was killed")
        runtime.on_kill = runtime.go.set
    call = asyncio.create_task(node.checkpoint_instance(instance, FENCE, str(image)))
    await runtime.begun.wait()
    closing = asyncio.create_task(node.close())
    await asyncio.sleep(0)
    await refused(node.checkpoint_instance(other, FENCE, str(tmp_path / "other")), "shutting_down")
    await asyncio.wait_for(closing, 60)
    await refused(call, "infra_error" if obeys else "shutting_down")
    assert not node._saves
    assert node._journal._db is None
    runtime.go.set()
    await saving.start()
    assert await saving.node.instances() == [other]
    assert os.listdir(image) == []
    await goes_on(saving, other)


async def test_a_node_whose_owner_waits_no_longer_lets_go_all_the_same(saving: Bench, tmp_path: Path) -> None:
    instance = await saving.create()
    runtime, node = holding(saving), saving.node
    runtime.go.clear()
    call = asyncio.create_task(node.checkpoint_instance(instance, FENCE, str(tmp_path / "image")))
    await runtime.begun.wait()
    closing = asyncio.create_task(node.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert node._journal._db is None and not node._bodies
    runtime.go.set()
    await asyncio.gather(call, return_exceptions=True)
    await saving.start()


@pytest.mark.parametrize("whole", [True, False])
async def test_a_destruction_while_the_files_are_made_safe_finds_all_of_them_or_none(
    saving: Bench, tmp_path: Path, whole: bool
) -> None:
    instance = await saving.create()
    image = tmp_path / "image"
    image.mkdir()
    reached, go = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go.wait(60)
        if not whole:
            raise OSError(28, "No space left on device")

    faults.arm("node.checkpoint.synced", wait)
    try:
        call = asyncio.create_task(saving.node.checkpoint_instance(instance, FENCE, str(image)))
        assert await asyncio.to_thread(reached.wait, 60)
        destroying = asyncio.create_task(saving.node.destroy(instance, "sandbox_deleted"))
        await asyncio.wait({destroying}, timeout=0.5)  # one that does not wait for the files would be done
        assert not destroying.done()
        go.set()
        if whole:
            assert (await call).clean
        else:
            await refused(call, "infra_error")
        assert (await destroying).clean
    finally:
        go.set()
        faults.arm("node.checkpoint.synced", None)
    assert await saving.node.instances() == []
    assert sorted(os.listdir(image)) == (["disk", "memory", "snapshot.json"] if whole else [])


async def test_nothing_begins_once_a_snapshot_has_begun(saving: Bench, tmp_path: Path) -> None:
    """Each is tried before the first await of the snapshot is over, and while the memory is being written."""
    instance = await saving.create()
    runtime, node = holding(saving), saving.node
    runtime.go.clear()

    async def tar() -> AsyncIterator[bytes]:
        yield bytes(1024)

    async def all_refused() -> None:
        for call in (
            saving.begin(instance, "true"),
            node.put_files(instance, FENCE, [("file", 0o644, b"x")]),
            node.put_tar(instance, FENCE, tar(), "/workspace"),
            node.stat_file(instance, "/workspace"),
            node.make_directory(instance, FENCE, "/workspace/d", parents=False, mode=0o755),
            node.mark(instance),
            node.collect(instance, outputs=["*"], max_bytes=1, into=None),
            node.fence(instance, Fence(1, 2), "kill"),
            node.extend_deadline(instance, FENCE, 600.0),
            node.checkpoint_instance(instance, FENCE, str(tmp_path / "other")),
        ):
            await refused(call, "illegal_transition", retryable=True)

    image = tmp_path / "image"
    call = asyncio.create_task(node.checkpoint_instance(instance, FENCE, str(image)))
    await asyncio.sleep(0)
    assert not image.exists()
    await all_refused()
    await runtime.begun.wait()
    await all_refused()
    runtime.go.set()
    assert (await call).clean
    assert node._journal.open_execs() == []
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("busy", ["exec", "transfer", "visit", "starting"])
async def test_a_snapshot_does_not_begin_while_something_is_under_way(
    saving: Bench, tmp_path: Path, busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await saving.create()
    body = saving.node._bodies[instance]
    image = str(tmp_path / "image")
    starting: asyncio.Task[str] | None = None
    if busy == "exec":
        await saving.begin(instance, "sleep", "1000")
    elif busy == "transfer":
        body.transfers += 1
    elif busy == "visit":
        body.visits += 1
    else:  # it waits for a look at the files, and is no exec of the body yet
        looked, go = asyncio.Event(), asyncio.Event()

        async def slow(*_: Any, **__: Any) -> None:
            looked.set()
            await go.wait()

        monkeypatch.setattr("corral.node.files.freshen", slow)
        starting = asyncio.create_task(saving.begin(instance, "sleep", "1000"))
        await looked.wait()
    await refused(saving.node.checkpoint_instance(instance, FENCE, image), "illegal_transition", retryable=True)
    assert not os.path.exists(image)
    if starting is not None:
        go.set()
        await starting
    body.transfers = body.visits = 0


async def test_the_guest_has_the_last_word_on_whether_something_runs(saving: Bench, tmp_path: Path) -> None:
    instance = await saving.create()
    await saving.begin(instance, "sleep", "1000")
    body = saving.node._bodies[instance]
    hidden, body.execs = body.execs, {}
    call = saving.node.checkpoint_instance(instance, FENCE, str(tmp_path / "image"))
    await refused(call, "illegal_transition", retryable=True)
    body.execs = hidden
    assert not (tmp_path / "image").exists()
    await goes_on(saving, instance)


@pytest.mark.parametrize("state", ["live", "live and quiet", "condemned", "whole"])
async def test_a_node_that_comes_later_ends_what_a_dead_one_had_begun(
    saving: Bench, tmp_path: Path, state: str
) -> None:
    """What the journal and the directory say after a death between any two steps."""
    instance = await saving.create()
    journal, image = saving.node._journal, tmp_path / "image"
    entry = journal.instances[instance]
    data = {**entry.data, "saving": {"into": str(image), "made": True}}
    journal.put_instance(dataclasses.replace(entry, data=data))
    snapshots.begin(str(image), instance)
    if state == "live and quiet":
        await (await saving.node._bodies[instance].client()).quiesce(FENCE)
    if state in ("condemned", "whole"):
        journal.set_instance(instance, state="condemned")
        (image / "memory").touch()
    if state == "whole":
        whole = snapshots.Snapshot(instance, "fake", "1", "sha256:0", "py", Limits(), "default", (), 0)
        snapshots.seal(str(image), whole)
    await saving.restart()
    if state.startswith("live"):
        assert not image.exists()
        await goes_on(saving, instance)
        return
    assert await saving.node.instances() == []
    assert (sorted(os.listdir(image)) if image.exists() else None) == (
        ["memory", "snapshot.json"] if state == "whole" else None
    )
