"""What fuzzing has found, each as the smallest conversation that shows it."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from corral.channel import ChannelLimits, Data, Ended, GuestClient
from corral.channel.answers import unknown_status
from corral.client import trees
from corral.errors import CorralError
from corral.guest import protocol
from corral.linux import guesttree
from corral.linux.guesttree import copying, ids
from corral.node import files, transfers
from corral.ports.runtime import HostTree

from . import test_hostile_files as hostile_files
from .test_hostile_guest_channel import FENCE, HELLO, Hostile, attached, ending, event, must_be_lost, reply, status


class Hearing(Hostile):
    async def frame(self) -> tuple[int, bytes]:
        """The next one, whatever it is."""
        while not self.frames:
            self.frames += self.decoder.feed(await asyncio.get_running_loop().sock_recv(self.theirs, 65536))
        return self.frames.pop(0)


@pytest.mark.parametrize(
    "error",
    [
        {"code": "not_found", "detail": "\ud800", "field": None},
        {"code": "not_found", "detail": "", "field": "\udfff\ud800"},
    ],
)
async def test_a_refusal_in_what_is_no_text_is_a_lost_guest(error: dict[str, Any]) -> None:
    hostile = Hostile()
    client = await hostile.connect()
    task = asyncio.create_task(client.exec_status("exe_1"))
    await hostile.send(reply((await hostile.request())["id"], error=error))
    await must_be_lost(client, task)
    hostile.close()


@pytest.mark.parametrize("odd", [{"guest": "\ud800"}, {"capabilities": {"\ud800": 1}}])
async def test_a_hello_in_what_is_no_text_is_a_lost_guest(odd: dict[str, Any]) -> None:
    hostile = Hostile()
    task = asyncio.create_task(GuestClient.connect(hostile.ours))
    await hostile.send(protocol.control(protocol.HELLO, HELLO | odd))
    with pytest.raises(CorralError) as caught:
        await asyncio.wait_for(task, 20)
    assert caught.value.code == "guest_lost"
    hostile.close()


async def test_a_file_name_that_is_not_utf8_is_still_text() -> None:
    hostile = Hostile()
    client = await hostile.connect()
    task = asyncio.create_task(client.exec_status("exe_1"))
    await hostile.send(
        reply((await hostile.request())["id"], error={"code": "not_found", "detail": "\udcff", "field": None})
    )
    with pytest.raises(CorralError) as caught:
        await task
    assert caught.value.code == "not_found"
    await client.close()
    hostile.close()


async def test_a_program_that_never_ran_has_no_output_whatever_the_guest_says() -> None:
    hostile = Hostile()
    client = await hostile.connect()
    task = asyncio.create_task(client.start_exec({"exec_id": "exe_1", "argv": ["x"]}, fence=FENCE, follow=True))
    request = await hostile.request()
    failure = {"what": "argv", "errno": "ENOENT", "message": "no"}
    failed = status(state="failed", started=False, failure=failure, attached=True)
    await hostile.send(reply(request["id"], ok=failed))
    assert (await task)["state"] == "failed"
    await hostile.send(protocol.data_frame(request["streams"]["stdout"], 0, 0, b"x"))
    await must_be_lost(client)
    hostile.close()


async def test_whoever_gives_input_waits_no_longer_than_the_program_lives() -> None:
    """A guest that takes nothing and does not say that the program reads no more."""
    hostile = Hearing()
    client = await hostile.connect(ChannelLimits(request_s=60, keepalive_s=60))
    following, number, _, _ = await attached(hostile, client)
    giving = asyncio.create_task(client.stdin("exe_1", bytes(2 * protocol.INPUT_WINDOW), fence=FENCE, offset=0))
    request = await hostile.request()
    assert request["op"] == "exec.status"
    await hostile.send(reply(request["id"], ok=status(stdin={"received": 0, "written": 0, "open": 1})))
    while (await hostile.frame())[0] != protocol.INPUT:
        pass
    await hostile.send(event(event="ended", attach=number, status=ending()))
    await asyncio.wait_for(following, 20)
    assert await asyncio.wait_for(giving, 20) is False
    await client.close()
    hostile.close()


async def test_questions_that_nobody_waits_for_do_not_pile_up() -> None:
    hostile = Hostile()
    client = await hostile.connect(ChannelLimits(request_s=60, keepalive_s=60))
    with pytest.raises(CorralError) as caught:
        for _ in range(10_000):
            client.forget_exec("exe_1", fence=FENCE)
    assert caught.value.code == "guest_lost"
    await must_be_lost(client)
    hostile.close()


def _archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _member(name: str, **more: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in more.items():
        setattr(info, key, value)
    return info


@pytest.mark.parametrize(
    "members",
    [
        [_member("root", type=tarfile.DIRTYPE), _member("root/a", pax_headers={"GNU.sparse.map": "root/a"})],
        [_member("root", type=tarfile.DIRTYPE), _member("root/a", pax_headers={"path": "root/a\0b"})],
        [_member("root", type=tarfile.DIRTYPE), _member("root/a", type=tarfile.LNKTYPE, linkname="root")],
        [_member("root", type=tarfile.DIRTYPE), _member("root/a", type=tarfile.FIFOTYPE)],
    ],
    ids=["a number that is none", "a NUL in a name", "a hard link to a directory", "a pipe"],
)
def test_an_archive_of_a_sandbox_that_is_damaged_is_refused_and_leaves_no_descriptor(
    members: list[tarfile.TarInfo], tmp_path: Path
) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CorralError) as caught:
        trees.unpack_stream([_archive(*((info, b"") for info in members))], str(tmp_path), "copy")
    assert caught.value.code == "infra_error"
    assert set(os.listdir("/proc/self/fd")) <= before  # what another test had left open may go meanwhile


async def test_a_lost_guest_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    hostile = Hostile()
    client = await hostile.connect(ChannelLimits(keepalive_s=600))
    await hostile.send(b"\xff" * 9)
    await asyncio.wait_for(client.closed.wait(), 20)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    hostile.close()


def _silent(*pieces: bytes) -> Any:
    """A file program that says this much, and then neither ends nor takes anything."""
    return hostile_files.saying(*pieces, endless=True)


@pytest.mark.parametrize("call", ["stat", "page", "read", "write", "watch"])
async def test_a_file_program_that_stands_still_is_given_up(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "IDLE_S", 0.3)
    guest = _silent(hostile_files.line(offset=0, length=9) + b"half") if call == "read" else _silent()
    error = await hostile_files.refused(getattr(hostile_files, call)(guest), guest)
    assert "stands still" in error.detail
    assert guest.killed


async def test_a_file_program_that_moves_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes one way keep the other way patient: a long upload answers only at its end."""
    monkeypatch.setattr(transfers, "IDLE_S", 0.5)
    guest = hostile_files.saying()
    ended = asyncio.Event()

    async def attach(exec_id: str) -> AsyncIterator[Any]:
        await ended.wait()
        yield Data("stdout", 0, hostile_files.line(size=20, created=True), 0)
        gone: Any = dict(unknown_status(exec_id)) | {"state": "ended", "started": True, "exit_code": 0}
        yield Ended(gone)

    async def stdin(exec_id: str, data: bytes, eof: bool = False, *, fence: Any) -> bool:
        await asyncio.sleep(0.1)
        if eof:
            ended.set()
        return True

    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"xx"

    monkeypatch.setattr(guest, "attach", attach)
    monkeypatch.setattr(guest, "stdin", stdin)
    monkeypatch.setattr(transfers, "gathered", lambda source: source)
    work = transfers.write(
        guest, FENCE, "f", blocks(), mode=None, parents=True, overwrite=True, size=None, user="sandbox"
    )
    assert (await asyncio.wait_for(work, 20))[1] is True


def test_outputs_that_change_their_kind_while_they_are_copied_are_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that was copied has become a file when the next pattern comes to it."""
    tree, into = tmp_path / "tree", tmp_path / "into"
    (tree / "a").mkdir(parents=True)
    into.mkdir()
    (tree / "a" / "b").write_text("first")
    uid = 65534 if os.geteuid() == 0 else os.geteuid()
    gid = 65534 if os.geteuid() == 0 else os.getegid()
    for path in (tmp_path, tree, tree / "a", tree / "a" / "b"):
        path.chmod(0o755)
    real = copying._copy_one

    def copied(*values: Any) -> int:
        size = real(*values)
        with ids.host_ids(values[-1]):  # the test's directories are closed to the sandbox's user
            if (tree / "a").is_dir():
                (tree / "a").rename(tmp_path / "away")
                (tree / "a").write_text("second")
                (tree / "a").chmod(0o644)
        return size

    monkeypatch.setattr(copying, "_copy_one", copied)
    if os.geteuid() == 0:
        for path in (tmp_path, tree, tree / "a", tree / "a" / "b"):
            os.chown(path, uid, gid)
    found = guesttree.GuestTree(str(tree), uid, gid).copy_out(["a/b", "*"], str(into), 1000)
    assert [path for path, _, _ in found.files] == [b"a/b"]
    assert not found.complete


async def test_outputs_that_find_no_room_on_the_host_are_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "workspace").mkdir()

    def full(*values: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(guesttree.GuestTree, "copy_out", full)
    tree = HostTree(str(tmp_path), 65534, 65534, "directory")
    with pytest.raises(CorralError) as caught:
        await files.collect(tree, str(tmp_path / "mark"), outputs=["*"], max_bytes=10, into=str(tmp_path / "into"))
    assert (caught.value.code, "No space" in caught.value.detail) == ("infra_error", True)
