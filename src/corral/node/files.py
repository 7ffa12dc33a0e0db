"""Files of a sandbox: put, mark, collect from the host's side; tar streams through a process inside with the exec's user."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from corral.channel import Ended
from corral.channel.client import ExecStatus
from corral.domain.fence import Fence
from corral.domain.ids import new_id
from corral.errors import CorralError
from corral.linux.guesttree import GuestTree
from corral.linux.manifest import Change, Manifest, diff
from corral.node.body import Body
from corral.node.interpreter import INSIDE, PYTHON_ARGV
from corral.ports.node import Collected, FileChange
from corral.ports.runtime import HostTree, Instance

WORKSPACE = "/workspace"
MAX_CHANGES = 10_000
TAR_S = 600.0
_PROGRAM = f"{INSIDE}/site/corral/guest/files.pyc"


def user_ids(user: str, instance: Instance) -> tuple[int, int]:
    """(uid, gid) inside of a user that execs may have."""
    if user == "sandbox":
        return instance.exec_uid, instance.exec_uid
    if user == "root" and not instance.same_uid:
        return instance.guest_uid, instance.guest_uid
    raise CorralError("user_refused", f"there is no user {user!r} for execs here", field="/user", hint="use `sandbox`")


def mark_path(directory: str) -> str:
    """Where an instance's base of changes is kept."""
    return os.path.join(directory, "node-mark")


def _workspace(tree: HostTree) -> GuestTree:
    return GuestTree(os.path.join(tree.path, "workspace"), tree.uid, tree.gid)


def _load(path: str) -> Manifest | None:
    try:
        with open(path, "rb") as file:
            return Manifest.load(file)
    except FileNotFoundError:
        return None
    except (ValueError, IndexError):
        return None


def _save(path: str, manifest: Manifest) -> None:
    with open(path + ".new", "wb") as file:
        file.writelines(manifest.dump())
    os.replace(path + ".new", path)


async def put(tree: HostTree, mark_path: str, items: Sequence[tuple[str, int, bytes | None]]) -> None:
    """Write files, and directories (without content); what we put counts as there before the program ran."""
    guest = _workspace(tree)

    def work() -> None:
        guest.put(items)
        previous = _load(mark_path)
        if previous is not None:
            current = guest.scan(previous)
            for path, _, _ in items:
                parts = [part for part in os.fsencode(path).split(b"/") if part not in (b"", b".")]
                for depth in range(1, len(parts) + 1):
                    name = b"/".join(parts[:depth])
                    if name in current.entries:
                        previous.entries[name] = current.entries[name]
            _save(mark_path, previous)

    await asyncio.to_thread(work)


async def mark(tree: HostTree, mark_path: str) -> None:
    """The workspace as it is now becomes the base of the next `collect`."""
    guest = _workspace(tree)
    await asyncio.to_thread(lambda: _save(mark_path, guest.scan(_load(mark_path))))


async def collect(
    tree: HostTree, mark_path: str, *, outputs: Sequence[str], max_bytes: int, into: str | None, mark: bool = False
) -> Collected:
    """See `ports.node.Node.collect`. Globs may be absolute (`/workspace/…`) or relative to the workspace."""
    guest = _workspace(tree)
    globs = [_relative(glob) for glob in outputs]

    def work() -> Collected:
        previous = _load(mark_path)
        now = guest.scan(previous)
        changes, more = diff(previous if previous is not None else Manifest(), now, MAX_CHANGES)
        if mark and (
            now.entries or changes or previous is None
        ):  # an empty workspace that stays empty needs no new base
            _save(mark_path, now)
        artifacts: list[dict[str, Any]] = []
        skipped: tuple[str, ...] = ()
        complete = now.complete
        if into is not None and globs:
            os.makedirs(into, mode=0o700, exist_ok=True)
            copied = guest.copy_out(globs, into, max_bytes)
            with contextlib.suppress(OSError):
                os.rmdir(into)  # nothing came
            complete = complete and copied.complete
            skipped = tuple(_shown(path) for path in copied.skipped)
            for path, size, digest in copied.files:
                artifacts.append({"path": _shown(path), "size": size, "digest": f"sha256:{digest.hex()}"})
        more = more or not now.complete  # what could not be seen may have changed too
        return Collected(tuple(map(_change, changes)), more, tuple(artifacts), skipped, complete)

    return await asyncio.to_thread(work)


def _relative(glob: str) -> str:
    if glob.startswith("/"):
        if not glob.startswith(WORKSPACE + "/"):
            raise CorralError("invalid_value", f"outputs lie under {WORKSPACE}: {glob!r}", field="/outputs")
        return glob[len(WORKSPACE) + 1 :]
    return glob


def _shown(path: bytes) -> str:
    return f"{WORKSPACE}/{path.decode('utf-8', 'surrogateescape')}"


def _change(change: Change) -> FileChange:
    entry = change.entry
    digest = f"sha256:{entry.digest.hex()}" if entry.digest is not None else None
    return FileChange(_shown(change.path), change.change, entry.kind, entry.size, f"{entry.mode:04o}", digest)


# -- tar streams -----------------------------------------------------------------------------------------------------------
class _Inside:
    """One exec of the file program: not in the journal, its output not in a spool; it dies with the call."""

    def __init__(self, body: Body, fence: Fence, user: str, arguments: Sequence[str], cwd: str) -> None:
        self.body = body
        self.fence = fence
        self.exec_id = new_id("exe", time.time_ns() // 1_000_000, secrets.token_bytes(10))
        uid, gid = user_ids(user, body.instance)
        self.errors = b""
        self.status: ExecStatus | None = None
        self._spec = {
            "exec_id": self.exec_id,
            "argv": [*PYTHON_ARGV, _PROGRAM, *arguments],
            "env": {"LC_ALL": "C.UTF-8"},
            "cwd": cwd,
            "uid": uid,
            "gid": gid,
            "stdin": "open",
            "timeout_s": TAR_S,
            "background": "kill",
        }

    async def start(self) -> None:
        """From here on `stop` must follow."""
        self.body.transfers += 1
        self.body.drop_base()
        status = await (await self.body.client()).start_exec(self._spec, fence=self.fence)
        if status["state"] == "failed":
            failure = status["failure"]
            raise CorralError("infra_error", f"file transfer: {failure['message'] if failure else 'not started'}")

    async def output(self) -> AsyncIterator[bytes]:
        """Bytes of stdout to the end; what the program complained about is raised at its end."""
        async for item in (await self.body.client()).attach(self.exec_id):
            if isinstance(item, Ended):
                self.status = item.status
            elif item.stream == "stdout":
                yield item.data
            elif len(self.errors) < 65536:
                self.errors += item.data
        self.check()

    def check(self) -> None:
        status = self.status
        if status is not None and status["exit_code"] == 0:
            return
        if status is not None and status["exit_code"] == 3:
            for line in self.errors.splitlines():
                try:
                    refusal = json.loads(line)
                    code, detail = str(refusal["code"]), str(refusal["detail"])
                    entry = refusal["entry"]
                except (ValueError, KeyError, TypeError):
                    continue
                # The words come from inside: only what this program may say is passed on.
                if code in ("invalid_value", "too_large", "not_found"):
                    raise CorralError(code, detail[:2000], entry=str(entry)[:1000] if entry is not None else None)
        why = self.errors[-300:].decode("utf-8", "replace").strip()
        raise CorralError("infra_error", f"the file transfer inside ended early: {why or 'no reason given'}")

    async def stop(self) -> None:
        try:
            if self.status is None:
                with contextlib.suppress(CorralError):
                    await (await self.body.client()).kill_exec(self.exec_id, 0.0, fence=self.body.floor)
        finally:
            self.body.transfers -= 1


async def put_tar(body: Body, fence: Fence, tar: AsyncIterator[bytes], dest: str, user: str) -> None:
    """Unpack a stream at `dest` (relative to the workspace, or absolute inside)."""
    where, limits = os.path.join(WORKSPACE, dest), body.limits
    inside = _Inside(body, fence, user, ["unpack", where, str(limits.disk_bytes), str(limits.inodes)], WORKSPACE)
    reader: asyncio.Future[None] | None = None
    try:
        await inside.start()
        reader = asyncio.ensure_future(_drain(inside))
        client = await body.client()
        async for piece in tar:
            for at in range(0, len(piece), 256 * 1024):
                if not await client.stdin(inside.exec_id, piece[at : at + 256 * 1024], fence=fence):
                    break  # it refused the archive; its complaint is at the end of its output
            if reader.done():
                break
        with contextlib.suppress(CorralError):
            await client.stdin(inside.exec_id, b"", True, fence=fence)
        await reader
    finally:
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        await inside.stop()


async def _drain(inside: _Inside) -> None:
    async for _ in inside.output():
        pass


async def get_tar(body: Body, path: str, user: str) -> AsyncIterator[bytes]:
    """Pack a path inside; `not_found` before the first byte."""
    inside = _Inside(body, body.floor, user, ["pack", os.path.join(WORKSPACE, path)], WORKSPACE)
    try:
        await inside.start()
        async for piece in inside.output():
            yield piece
    finally:
        await inside.stop()
