"""Files of a kept sandbox: every path is resolved inside, by a process with the exec's user."""

from __future__ import annotations

import asyncio
import base64
import datetime
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from corral.domain.guard import check_user
from corral.domain.records import Idempotency, SandboxView
from corral.errors import CorralError
from corral.ports.node import FileBlocks, FileEvent, FileEvents, FileInfo, Node
from corral.services.control import Core
from corral.services.events import Caller, StreamEvent
from corral.services.execs import fence_of, instance_of
from corral.services.sandboxes import Sandboxes

Json = dict[str, Any]
T = TypeVar("T")
_EARLIEST = -62_135_596_800 * 10**9
_LATEST = 253_402_300_800 * 10**9 - 1
RECENT = 1000
GONE = ("sandbox_deleted", "sandbox_lost", "not_found")


class Files:
    """Reads, changes and watches files. Reading needs no lease; a call that changes something renews it and takes its fence."""

    def __init__(self, core: Core, sandboxes: Sandboxes) -> None:
        self._core = core
        self._sandboxes = sandboxes
        self._recent: dict[tuple[str, str, str], tuple[str, asyncio.Future[FileInfo]]] = {}
        """Moves by their keys, of this process: one that is asked for again after a broken connection is not done again."""

    async def _usable(self, caller: Caller, sandbox_id: str, user: str, lease: str | None = None) -> SandboxView:
        view = await self._sandboxes.usable(caller, sandbox_id, lease)
        check_user(self._core.policy, view.sandbox.template_id, user)
        return view

    async def _readable(self, caller: Caller, sandbox_id: str, user: str) -> SandboxView:
        view = await self._sandboxes.readable(caller, sandbox_id)
        check_user(self._core.policy, view.sandbox.template_id, user)
        return view

    async def _met(self, work: Awaitable[T], sandbox_id: str) -> T:
        try:
            return await work
        except CorralError as error:
            if error.code == "not_found" and "entry" in error.facts:
                raise  # the file's, not the sandbox's
            raise await self._sandboxes.met(error, sandbox_id) from error

    @property
    def _node(self) -> Node:
        return self._core.node

    # -- reading ---------------------------------------------------------------------------------------------------------------
    async def stat(self, caller: Caller, sandbox_id: str, path: str, *, follow: bool, user: str) -> FileInfo:
        """One entry; of a link itself unless `follow`."""
        view = await self._readable(caller, sandbox_id, user)
        return await self._met(self._node.stat_file(instance_of(view), path, follow=follow, user=user), sandbox_id)

    async def page(
        self,
        caller: Caller,
        sandbox_id: str,
        path: str,
        *,
        recursive: bool,
        limit: int,
        after: str | None,
        user: str,
    ) -> tuple[list[FileInfo], str | None]:
        """(entries in the order of the bytes of their paths, where the next page begins or None)."""
        view = await self._readable(caller, sandbox_id, user)
        begin = "" if after is None else _position(after)
        page = await self._met(
            self._node.list_files(instance_of(view), path, recursive=recursive, limit=limit, after=begin, user=user),
            sandbox_id,
        )
        return list(page.items), None if page.next is None else _cursor(page.next)

    async def read(
        self,
        caller: Caller,
        sandbox_id: str,
        path: str,
        *,
        first: int | None,
        last: int | None,
        user: str,
    ) -> Reading:
        """Content, streamed; bytes `first` to `last`, or the last `last` ones without a `first`."""
        view = await self._readable(caller, sandbox_id, user)
        work = self._node.read_file(instance_of(view), path, first=first, last=last, user=user)
        reading = Reading(await self._met(work, sandbox_id), self, sandbox_id)
        self._sandboxes.expiry.keeps(view, reading)
        return reading

    # -- changing --------------------------------------------------------------------------------------------------------------
    async def write(
        self,
        caller: Caller,
        sandbox_id: str,
        path: str,
        blocks: AsyncIterator[bytes],
        *,
        mode: int | None,
        parents: bool,
        overwrite: bool,
        size: int | None,
        user: str,
        lease: str | None,
    ) -> tuple[FileInfo, bool]:
        """A whole new content at once, or nothing; -> the entry, and whether it is new."""
        view = await self._usable(caller, sandbox_id, user, lease)
        work = self._node.write_file(
            instance_of(view),
            fence_of(view),
            path,
            blocks,
            mode=mode,
            parents=parents,
            overwrite=overwrite,
            size=size,
            user=user,
        )
        with self._sandboxes.expiry.using(view):
            return await self._met(work, sandbox_id)

    async def move(
        self,
        caller: Caller,
        sandbox_id: str,
        source: str,
        target: str,
        *,
        overwrite: bool,
        user: str,
        lease: str | None,
        idempotency: Idempotency | None = None,
    ) -> FileInfo:
        """Rename, also across file systems; never into a directory. With a key that was used: the same answer."""
        view = await self._usable(caller, sandbox_id, user, lease)

        async def work() -> FileInfo:
            to = (instance_of(view), fence_of(view), source, target)
            return await self._met(self._node.move_file(*to, overwrite=overwrite, user=user), sandbox_id)

        return await (work() if idempotency is None else self._once(idempotency, work))

    async def _once(self, asked: Idempotency, work: Callable[[], Coroutine[Any, Any, FileInfo]]) -> FileInfo:
        name = (asked.tenant_id, asked.route, asked.key)
        digest, answer = self._recent.get(name, (asked.body_digest, None))
        if digest != asked.body_digest:
            raise CorralError("idempotency_conflict", "this Idempotency-Key was used with another body")
        if answer is None:
            answer = self._core.spawn(work(), f"move of {asked.route}")
            self._recent[name] = (digest, answer)
            if len(self._recent) > RECENT:
                del self._recent[next(iter(self._recent))]
        try:
            return await asyncio.shield(answer)
        except CorralError:
            self._recent.pop(name, None)  # nothing was done
            raise

    async def make_directory(
        self,
        caller: Caller,
        sandbox_id: str,
        path: str,
        *,
        parents: bool,
        mode: int,
        user: str,
        lease: str | None,
    ) -> FileInfo:
        """An existing directory is fine."""
        view = await self._usable(caller, sandbox_id, user, lease)
        work = self._node.make_directory(instance_of(view), fence_of(view), path, parents=parents, mode=mode, user=user)
        return await self._met(work, sandbox_id)

    async def remove(
        self, caller: Caller, sandbox_id: str, path: str, *, recursive: bool, user: str, lease: str | None
    ) -> None:
        """Remove a file, a link or an empty directory; with `recursive` all that is below, through no link."""
        view = await self._usable(caller, sandbox_id, user, lease)
        work = self._node.remove_file(instance_of(view), fence_of(view), path, recursive=recursive, user=user)
        await self._met(work, sandbox_id)

    # -- watching --------------------------------------------------------------------------------------------------------------
    async def watch(self, caller: Caller, sandbox_id: str, path: str, *, recursive: bool, user: str) -> Watching:
        """`started`, then changes, then `ended` with a reason when the sandbox or what is watched is gone."""
        view = await self._readable(caller, sandbox_id, user)
        work = self._node.watch_files(instance_of(view), path, recursive=recursive, user=user)
        watching = Watching(await self._met(work, sandbox_id), self, sandbox_id, path)
        self._sandboxes.expiry.keeps(view, watching)
        return watching

    async def told(self, error: CorralError, sandbox_id: str) -> CorralError:
        """What a transfer met, told by why the sandbox ends if it does."""
        return await self._sandboxes.met(error, sandbox_id)


class Reading:
    """Content on its way, with its entry. Whoever has one reads it to the end or closes it."""

    def __init__(self, blocks: FileBlocks, files: Files, sandbox_id: str) -> None:
        self.info = blocks.info
        self.offset = blocks.offset
        self.length = blocks.length
        self._blocks = blocks
        self._files = files
        self._sandbox_id = sandbox_id

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._blocks)
        except CorralError as error:
            raise await self._files.told(error, self._sandbox_id) from error

    async def aclose(self) -> None:
        await self._blocks.aclose()


class Watching:
    """Events of a watch. Whoever has one closes it."""

    def __init__(self, events: FileEvents, files: Files, sandbox_id: str, path: str) -> None:
        self._events = events
        self._files = files
        self._sandbox_id = sandbox_id
        self._path = path
        self._begun = False
        self._over = False

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        if self._over:
            raise StopAsyncIteration
        if not self._begun:
            self._begun = True
            return StreamEvent("started", doc=named("path", self._path))
        try:
            event = await anext(self._events, None)
        except CorralError as error:
            met = await self._files.told(error, self._sandbox_id)
            if met.code not in GONE:
                raise met from error
            return self._end(met.code)
        return self._end("deleted") if event is None else StreamEvent(event.kind, doc=_change(event))

    def _end(self, reason: str) -> StreamEvent:
        self._over = True
        return StreamEvent("ended", doc={**named("path", self._path), "reason": reason})

    async def aclose(self) -> None:
        self._over = True
        await self._events.aclose()


# -- documents -----------------------------------------------------------------------------------------------------------------
def named(member: str, path: str) -> Json:
    """A path in a document; one that is not UTF-8 also has its exact bytes."""
    raw = path.encode("utf-8", "surrogateescape")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return {member: path, f"{member}_base64": base64.b64encode(raw).decode("ascii")}
    return {member: path}


def entry(info: FileInfo) -> Json:
    """ENTRY of the contract."""
    document = {
        **named("path", info.path),
        "name": info.path.rstrip("/").rpartition("/")[2] or "/",
        "type": info.type,
        "size": info.size,
        "mode": f"{info.mode:04o}",
        "uid": info.uid,
        "gid": info.gid,
        "mtime": moment(info.mtime_ns),
    }
    if info.target is not None:
        document |= named("target", info.target)
    if info.error is not None:
        document["error"] = info.error
    return document


def moment(ns: int) -> str:
    """RFC 3339 with nanoseconds; a time that has no such form is the nearest one that has."""
    seconds, rest = divmod(min(max(ns, _EARLIEST), _LATEST), 10**9)
    when = datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds)
    return f"{when.isoformat()}.{rest:09d}Z"


def _change(event: FileEvent) -> Json:
    document = {**named("path", event.path), "directory": event.directory}
    if event.source is not None:
        document |= named("from", event.source)
    return document


def _cursor(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode("utf-8", "surrogateescape")).decode("ascii").rstrip("=")


def _position(cursor: str) -> str:
    """The inverse of `_cursor`; `invalid_value` for anything that we did not issue."""
    try:
        raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
    except ValueError as error:
        raise CorralError("invalid_value", "not a cursor of ours", field="/after", hint="use `next`") from error
    if b"\0" in raw or len(raw) > 4096:
        raise CorralError("invalid_value", "not a cursor of ours", field="/after", hint="use `next`")
    return raw.decode("utf-8", "surrogateescape")
