"""Files of a sandbox from the host's side: put, mark, collect. What goes through a process inside is in `transfers`."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from corral.errors import CorralError
from corral.linux.guesttree import GuestTree, Look, is_as_seen
from corral.linux.manifest import Change, Manifest, diff
from corral.ports.node import Collected, FileChange
from corral.ports.runtime import HostTree, Instance

WORKSPACE = "/workspace"
MAX_CHANGES = 10_000
_STALE = ".stale"


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


@contextlib.contextmanager
def _alone(mark_path: str) -> Iterator[None]:
    """One change of a base at a time: `put` reads it, adds and writes, and transfers that end together each write it."""
    lock = os.open(mark_path + ".lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


async def put(
    tree: HostTree, mark_path: str, items: Sequence[tuple[str, int, bytes | None]], *, settle: bool = False
) -> None:
    """Write files, and directories (without content); what we put counts as there before the program ran."""
    guest = _workspace(tree)

    def work() -> None:
        guest.put(items)
        with _alone(mark_path):
            previous = _load(mark_path)
            if previous is None:
                return
            current = guest.scan(previous, settle=settle)
            for path, _, _ in items:
                parts = [part for part in os.fsencode(path).split(b"/") if part not in (b"", b".")]
                for depth in range(1, len(parts) + 1):
                    name = b"/".join(parts[:depth])
                    if name in current.entries:
                        previous.entries[name] = current.entries[name]
            _save(mark_path, previous)

    await asyncio.to_thread(work)


async def mark(tree: HostTree, mark_path: str, *, settle: bool = False) -> None:
    """The workspace as it is now becomes the base of the next `collect`. `settle`: programs run, see `GuestTree.scan`."""
    guest = _workspace(tree)

    def work() -> None:
        with _alone(mark_path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(mark_path + _STALE)  # before the look: what is touched while it lasts may not be in it
            try:
                _save(mark_path, guest.scan(_load(mark_path), settle=settle))
            except BaseException:
                touch(mark_path)  # there is no new base, so the change still waits for one
                raise

    await asyncio.to_thread(work)


def touch(mark_path: str) -> None:
    """The caller changed files while no program ran: `freshen` before the next one makes them its base, once for any number."""
    os.close(os.open(mark_path + _STALE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


async def freshen(tree: HostTree, mark_path: str, *, settle: bool = False) -> None:
    """What callers changed since the last `mark` counts as there before."""
    if os.path.exists(mark_path + _STALE):
        await mark(tree, mark_path, settle=settle)


async def collect(
    tree: HostTree,
    mark_path: str,
    *,
    outputs: Sequence[str],
    max_bytes: int,
    into: str | None,
    mark: bool = False,
    settle: bool = False,
    seen: Callable[[Look], None] = lambda look: None,
) -> Collected:
    """See `ports.node.Node.collect`. Globs may be absolute (`/workspace/…`) or relative to the workspace.

    `seen` is called, in a thread, with the look that became the base.
    """
    guest = _workspace(tree)
    globs = [_relative(glob) for glob in outputs]

    def work() -> Collected:
        with _alone(mark_path):
            previous = _load(mark_path)
            look = guest.look(previous, settle=settle)
            now = look.manifest
            changes, more = diff(previous if previous is not None else Manifest(), now, MAX_CHANGES)
            if mark and (
                now.entries or changes or previous is None
            ):  # an empty workspace that stays empty needs no new base
                _save(mark_path, now)
        if mark:
            seen(look)
        artifacts: list[dict[str, Any]] = []
        skipped: tuple[str, ...] = ()
        complete = now.complete
        if into is not None and globs:
            try:
                os.makedirs(into, mode=0o700, exist_ok=True)
                copied = guest.copy_out(globs, into, max_bytes)
            except OSError as error:
                raise CorralError("infra_error", f"the outputs could not be kept: {error.strerror}") from error
            with contextlib.suppress(OSError):
                os.rmdir(into)  # nothing came
            complete = complete and copied.complete
            skipped = tuple(_shown(path) for path in copied.skipped)
            for path, size, digest in copied.files:
                artifacts.append({"path": _shown(path), "size": size, "digest": f"sha256:{digest.hex()}"})
        more = more or not now.complete  # what could not be seen may have changed too
        return Collected(tuple(map(_change, changes)), more, tuple(artifacts), skipped, complete)

    return await asyncio.to_thread(work)


def unchanged(tree: HostTree, look: Look) -> bool:
    """True only if the workspace is as a look saw it; quick, for when no program runs."""
    return is_as_seen(os.path.join(tree.path, "workspace"), look)


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
