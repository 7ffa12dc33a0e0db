"""The base of changes of an instance: many callers at once, and what is told while it is being made."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from corral.linux.guesttree import GuestTree, remove_tree
from corral.node import files
from corral.ports.runtime import HostTree

UID = 54399


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    uid = os.geteuid()
    if uid == 0:
        uid = UID
        os.chown(workspace, uid, uid)
        for parent in (tmp_path, *tmp_path.parents):
            if parent == Path("/tmp"):
                break
            parent.chmod(parent.stat().st_mode | 0o011)
    yield HostTree(str(tmp_path), uid, uid if uid == UID else os.getegid(), "directory")
    remove_tree(str(workspace))


async def changes(tree: HostTree, mark_path: str) -> list[str]:
    found = await files.collect(tree, mark_path, outputs=(), max_bytes=0, into=None)
    assert found.complete
    return sorted(change.path for change in found.files)


def test_transfers_that_end_together_each_make_their_base(tree: HostTree, tmp_path: Path) -> None:
    mark_path = str(tmp_path / "node-mark")

    async def scenario() -> None:
        for name in range(40):
            (tmp_path / "workspace" / f"文件{name}").write_text("内容 " * name)
        for _ in range(20):
            await asyncio.gather(*(files.mark(tree, mark_path) for _ in range(6)))
        assert await changes(tree, mark_path) == []

    asyncio.run(scenario())
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".new")]


def test_files_put_while_others_make_the_base_are_no_change_of_a_program(tree: HostTree, tmp_path: Path) -> None:
    mark_path = str(tmp_path / "node-mark")

    async def scenario() -> None:
        await files.mark(tree, mark_path)
        for turn in range(20):
            puts = (files.put(tree, mark_path, [(f"put/{turn}-{one}.txt", 0o644, "你好".encode())]) for one in range(3))
            await asyncio.gather(*puts, files.mark(tree, mark_path), files.mark(tree, mark_path))
        assert await changes(tree, mark_path) == []

    asyncio.run(scenario())


def test_a_change_told_while_the_base_is_being_made_is_not_forgotten(
    tree: HostTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_path = str(tmp_path / "node-mark")
    scan = GuestTree.scan

    def slow(self: GuestTree, *args: Any, **options: Any) -> Any:
        seen = scan(self, *args, **options)
        (tmp_path / "workspace" / "late").write_text("came after the look")
        files.touch(mark_path)
        return seen

    async def scenario() -> None:
        await files.mark(tree, mark_path)
        files.touch(mark_path)
        with monkeypatch.context() as patch:
            patch.setattr(GuestTree, "scan", slow)
            await files.freshen(tree, mark_path)
        assert await changes(tree, mark_path) == ["/workspace/late"]
        await files.freshen(tree, mark_path)
        assert await changes(tree, mark_path) == []

    asyncio.run(scenario())


def test_a_base_that_could_not_be_made_is_still_waited_for(
    tree: HostTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_path = str(tmp_path / "node-mark")

    def broken(self: GuestTree, *args: Any, **options: Any) -> Any:
        raise OSError("the disk does not answer")

    async def scenario() -> None:
        await files.mark(tree, mark_path)
        (tmp_path / "workspace" / "given").write_text("by the caller")
        files.touch(mark_path)
        with monkeypatch.context() as patch:
            patch.setattr(GuestTree, "scan", broken)
            with pytest.raises(OSError, match="does not answer"):
                await files.freshen(tree, mark_path)
        await files.freshen(tree, mark_path)
        assert await changes(tree, mark_path) == []

    asyncio.run(scenario())
