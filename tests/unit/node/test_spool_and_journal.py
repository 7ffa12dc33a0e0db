"""What survives on disk: exact bytes and their order, and what the node must not forget."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path

import pytest

from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.node.journal import ExecEntry, InstanceEntry, Journal
from corral.node.spool import MAX_ENTRIES, Spool


async def fill(spool: Spool, rounds: int, size: int, seed: int = 1) -> dict[str, bytes]:
    dice = random.Random(seed)
    whole = {"stdout": b"", "stderr": b""}
    for turn in range(rounds):
        stream = dice.choice(["stdout", "stderr"])
        data = dice.randbytes(dice.randint(1, size))
        await spool.write(stream, len(whole[stream]), data, turn)  # type: ignore[arg-type]
        whole[stream] += data
    return whole


async def test_following_gives_every_byte_once_from_any_cursor(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "x"), 10**9)
    whole = await fill(spool, 500, 40_000)
    spool.finish()
    chunks = [chunk async for chunk in spool.follow(None)]
    for stream in ("stdout", "stderr"):
        assert b"".join(c.data for c in chunks if c.stream == stream) == whole[stream]
    cut = len(chunks) // 3
    again = [chunk async for chunk in Spool(str(tmp_path / "x"), 0, ended=True).follow(chunks[cut].cursor)]
    assert [(c.stream, c.offset, c.data) for c in again] == [(c.stream, c.offset, c.data) for c in chunks[cut + 1 :]]
    assert [c.t_ms for c in chunks] == sorted(c.t_ms for c in chunks)


async def test_a_follower_waits_for_more_and_ends_with_the_exec(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "x"), 10**9)
    seen: list[bytes] = []

    async def follow() -> None:
        async for chunk in spool.follow(None):
            seen.append(chunk.data)

    task = asyncio.create_task(follow())
    for part in (b"a", b"b", b"c"):
        await spool.write("stdout", spool.produced["stdout"], part, 0)
        await asyncio.sleep(0.01)
        assert b"".join(seen).endswith(part)
    assert not task.done()
    spool.finish()
    await asyncio.wait_for(task, 5)


async def test_a_follower_with_much_to_read_lets_others_work_between_pieces(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "x"), 10**9)
    await spool.write("stdout", 0, bytes(2 << 20), 0)
    spool.finish()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    pieces = [chunk async for chunk in spool.follow(None)]
    task.cancel()
    assert turns >= len(pieces) - 1 > 10
    assert max(len(piece.data) for piece in pieces) <= 32 * 1024, "two hundred followers hold one each"


async def test_a_program_that_says_nothing_leaves_no_file(tmp_path: Path) -> None:
    silent = Spool(str(tmp_path / "x"), 10**9)
    silent.finish()
    assert not (tmp_path / "x").exists()
    assert [chunk async for chunk in silent.follow(None)] == [] and silent.timeline() == []
    again = Spool(str(tmp_path / "x"), 10**9)
    await again.write("stderr", 0, b"late", 1)
    again.finish()
    assert (tmp_path / "x" / "stderr").read_bytes() == b"late"
    silent.remove()
    assert not (tmp_path / "x").exists()


async def test_a_torn_order_file_costs_order_but_no_byte(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "x"), 10**9)
    whole = await fill(spool, 50, 100)
    spool.finish()
    order = tmp_path / "x" / "order"
    order.write_bytes(order.read_bytes()[:-5] + b"")
    with open(tmp_path / "x" / "stdout", "ab") as file:
        file.write(b"written, never noted")
    again = Spool(str(tmp_path / "x"), 10**9)
    await again.write("stderr", again.produced["stderr"], b"more", 99)
    again.finish()
    got = [chunk async for chunk in again.follow(None)]
    assert b"".join(c.data for c in got if c.stream == "stdout") == whole["stdout"] + b"written, never noted"
    assert b"".join(c.data for c in got if c.stream == "stderr") == whole["stderr"] + b"more"


async def test_the_timeline_is_capped_and_its_sum_is_exact(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "x"), 10**9)
    for turn in range(MAX_ENTRIES + 3000):
        stream = "stdout" if turn % 2 else "stderr"
        await spool.write(stream, spool.produced[stream], b"x", turn)  # type: ignore[index,arg-type]
    timeline = spool.timeline()
    assert len(timeline) == MAX_ENTRIES
    assert sum(entry["bytes"] for entry in timeline) == MAX_ENTRIES + 3000
    spool.finish()
    assert sum([len(c.data) async for c in spool.follow(None)]) == MAX_ENTRIES + 3000


@pytest.mark.parametrize(
    ("size", "keep", "expected"),
    [(0, 10, (0, 0, 0)), (10, 10, (10, 10, 0)), (11, 10, (11, 5, 5)), (11, 9, (11, 4, 5)), (300, 7, (300, 3, 4))],
)
async def test_head_and_tail_are_exact_at_the_edges(
    tmp_path: Path, size: int, keep: int, expected: tuple[int, int, int]
) -> None:
    spool = Spool(str(tmp_path / "x"), 200)
    data = bytes(n % 251 for n in range(size))
    await spool.write("stdout", 0, data, 0)
    facts = spool.facts(keep)["stdout"]
    assert (facts.produced, facts.head, facts.tail) == expected
    there = data[:200]
    kept = there[: facts.head] + (there[len(there) - facts.tail :] if facts.tail else b"")
    for offset in range(len(kept) + 2):
        assert b"".join([piece async for piece in spool.kept("stdout", facts, offset)]) == kept[offset:]
    spool.finish()


async def test_output_whose_files_were_removed_is_gone_not_a_failure(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "x"), 1000)
    await spool.write("stdout", 0, b"abcd", 0)
    spool.finish()
    shutil.rmtree(tmp_path / "x")
    for cursor in (None, "1.0"):
        with pytest.raises(CorralError) as caught:
            [chunk async for chunk in spool.follow(cursor)]
        assert caught.value.code == "cursor_gone"


async def test_overlaps_are_skipped_and_holes_refused(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "x"), 1000)
    await spool.write("stdout", 0, b"abcd", 0)
    await spool.write("stdout", 2, b"cdef", 0)
    with pytest.raises(CorralError) as caught:
        await spool.write("stdout", 7, b"h", 0)
    assert caught.value.code == "guest_lost"
    assert b"".join([piece async for piece in spool.raw("stdout")]) == b"abcdef"
    spool.remove()
    assert not os.path.exists(spool.directory)
    with pytest.raises(CorralError) as caught:
        [c async for c in spool.follow(None)]
    assert caught.value.code == "cursor_gone"


def test_the_journal_remembers_whole_entries_and_never_lowers_a_floor(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "node"))
    journal.open()
    journal.put_instance(InstanceEntry("ins_a", "creating", Fence(1, 5), {"x": "你\udcff"}))
    journal.set_instance("ins_a", state="live", floor=Fence(1, 3))
    assert journal.put_exec(ExecEntry("exe_a", "ins_a", "starting", {"n": 1}))
    assert not journal.put_exec(ExecEntry("exe_a", "ins_b", "starting", {}))
    journal.ending("exe_a", "timeout")
    journal.ending("exe_a", "cancelled")
    # No close: the process dies here.
    other = Journal(str(tmp_path / "node"))
    other.open()
    assert other.instances == {"ins_a": InstanceEntry("ins_a", "live", Fence(1, 5), {"x": "你\udcff"})}
    (entry,) = other.open_execs()
    assert (entry.instance_id, entry.ended_by, entry.data) == ("ins_a", "timeout", {"n": 1})
    other.end_exec("exe_a", {"first": 1})
    other.end_exec("exe_a", {"second": 2})
    found = other.get_exec("exe_a")
    assert found is not None
    assert found.facts == {"first": 1}
    assert other.open_execs() == []
    other.drop_instance("ins_a")
    assert other.exec_ids() == {"exe_a"}


def test_a_journal_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "journal.db").write_bytes(b"no database" * 1000)
    journal = Journal(str(tmp_path / "node"))
    journal.open()
    assert journal.instances == {}
    journal.put_instance(InstanceEntry("ins_a", "live", Fence(1, 1), {}))
    assert (tmp_path / "node" / "journal.db.broken").exists()


def test_the_highest_fence_of_a_sandbox_is_remembered_when_its_instances_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.node.journal.FLOORS", 2)
    journal = Journal(str(tmp_path))
    journal.open()
    assert journal.floor_of("sbx_a") == Fence(0, 0)
    journal.put_instance(InstanceEntry("ins_1", "live", Fence(1, 5), {"sandbox_id": "sbx_a"}))
    journal.put_instance(InstanceEntry("ins_2", "live", Fence(1, 3), {"sandbox_id": "sbx_a"}))
    assert journal.floor_of("sbx_a") == Fence(1, 5)
    journal.drop_instance("ins_1")
    journal.drop_instance("ins_2")
    journal.close()
    journal.open()
    assert journal.instances == {} and journal.floor_of("sbx_a") == Fence(1, 5)
    for number in (3, 4):
        journal.put_instance(InstanceEntry(f"ins_{number}", "live", Fence(1, 1), {"sandbox_id": f"sbx_{number}"}))
        journal.drop_instance(f"ins_{number}")
    assert journal.floor_of("sbx_a") == Fence(0, 0), "the oldest make room"
    assert journal.floor_of("sbx_3") == journal.floor_of("sbx_4") == Fence(1, 1)
    journal.close()
