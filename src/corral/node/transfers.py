"""Files by a process inside with the exec's user: one run of the guest's file program per call, content streamed both ways.

All that it says is hostile: lines, counts and numbers are bounded and checked in shape, refusals are taken from a list, and a promised
length is held to. Memory does not grow with what is moved. It dies with the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar, cast

from corral.channel import Ended
from corral.channel.client import ExecStatus
from corral.domain.fence import Fence
from corral.domain.ids import new_id
from corral.errors import CorralError
from corral.node.body import Body
from corral.node.files import WORKSPACE, user_ids
from corral.node.interpreter import INSIDE, PYTHON_ARGV
from corral.ports.node import FileEvent, FileInfo, FilePage

LINE = 64 * 1024
"""One line of facts: four names of 4096 bytes, escaped."""
PAGE_BYTES = 4 * 1024 * 1024
BLOCK = 256 * 1024
SIGN_OF_LIFE_S = 60.0
"""How often the program that watches is told that somebody listens; it ends after several times of that without."""
IDLE_S = 660.0
"""Without a byte moved for ten minutes the program ends by itself; a guest that does not let it is given up a little later."""
ABORT_GRACE_S = 1.0
"""For a write or a move that is given up, whose half copy has to be removed."""
_PROGRAM = f"{INSIDE}/site/corral/guest/files.pyc"
_REFUSALS = frozenset(
    {
        "already_exists",
        "conflict",
        "disk_full",
        "invalid_value",
        "is_a_directory",
        "not_a_directory",
        "not_a_file",
        "not_empty",
        "not_found",
        "permission_denied",
        "quota_exceeded",
        "range_not_satisfiable",
        "too_large",
    }
)
_HINTS = {
    "disk_full": "delete something, or ask for a larger disk",
    "is_a_directory": "name a file in it, or use the archive for whole directories",
    "not_empty": "pass recursive=true to remove what is in it too",
    "already_exists": "pass overwrite=true to replace it",
}
_TYPES = frozenset({"file", "dir", "symlink", "fifo", "socket", "device"})
_EVENTS = frozenset({"created", "modified", "deleted", "moved", "overflow"})
_FAR = 2**63
T = TypeVar("T")


class Inside:
    """One exec of the file program: not in the journal, its output not in a spool; it dies with the call."""

    def __init__(self, body: Body, fence: Fence, user: str, arguments: Sequence[str], *, grace_s: float = 0.0) -> None:
        self.body = body
        self.fence = fence
        self.exec_id = new_id("exe", time.time_ns() // 1_000_000, secrets.token_bytes(10))
        uid, gid = user_ids(user, body.instance)
        self.errors = b""
        self.status: ExecStatus | None = None
        self._grace_s = grace_s
        self._counted = False
        self._patience: set[asyncio.Timeout] = set()
        self._spec = {
            "exec_id": self.exec_id,
            "argv": [*PYTHON_ARGV, _PROGRAM, *arguments],
            "env": {"LC_ALL": "C.UTF-8"},
            "cwd": "/",
            "uid": uid,
            "gid": gid,
            "stdin": "open",
            # No clock: it ends by itself when the other side does nothing for long, see `IDLE_S`.
            "timeout_s": None,
            "background": "kill",
        }

    async def start(self) -> None:
        """From here on `stop` must follow."""
        self.body.check_free()
        self.body.transfers += 1
        self._counted = True
        self.body.drop_base()
        status = await (await self.body.client()).start_exec(self._spec, fence=self.fence)
        if status["state"] == "failed":
            failure = status["failure"]
            raise CorralError("infra_error", f"file transfer: {failure['message'] if failure else 'not started'}")

    async def output(self) -> AsyncIterator[bytes]:
        """Bytes of stdout to the end; what the program complained about is raised at its end."""
        source: Any = (await self.body.client()).attach(self.exec_id)
        async with contextlib.aclosing(source):
            while (item := await self._in_time(anext(source, None))) is not None:
                self._moved()
                if isinstance(item, Ended):
                    self.status = item.status
                elif item.stream == "stdout":
                    yield item.data
                elif len(self.errors) < LINE:
                    self.errors += item.data
        self.check()

    async def _in_time(self, work: Awaitable[T]) -> T:
        """What `work` gives, as long as bytes move one way or the other."""
        try:
            async with asyncio.timeout(IDLE_S) as patience:
                self._patience.add(patience)
                try:
                    return await work
                finally:
                    self._patience.discard(patience)
        except TimeoutError:
            raise CorralError(
                "infra_error", f"the file transfer inside stands still: no byte in {IDLE_S:.0f} s"
            ) from None

    def _moved(self) -> None:
        later = asyncio.get_running_loop().time() + IDLE_S
        for patience in self._patience:
            with contextlib.suppress(RuntimeError):  # it is over this very moment
                patience.reschedule(later)

    def check(self) -> None:
        """Raise what the program complained about, unless it ended well."""
        status = self.status
        if status is not None and status["exit_code"] == 0:
            return
        if status is not None and status["exit_code"] == 3:
            for text in self.errors.splitlines():
                if (refusal := _refusal(text)) is not None:
                    raise refusal
        why = self.errors[-300:].decode("utf-8", "replace").strip()
        raise CorralError("infra_error", f"the file transfer inside ended early: {why or 'no reason given'}")

    async def give(self, data: bytes | memoryview, eof: bool = False) -> bool:
        """To its standard input; False when it reads no more."""
        client = await self.body.client()
        reads = await self._in_time(client.stdin(self.exec_id, bytes(data), eof, fence=self.fence))
        self._moved()
        return reads

    async def stop(self) -> None:
        """Nothing of it is left. Idempotent."""
        if not self._counted:
            return
        self._counted = False
        try:
            with contextlib.suppress(CorralError):
                client = await self.body.client()
                if self.status is None:
                    await client.kill_exec(self.exec_id, self._grace_s, fence=self.body.floor)
                client.forget_exec(self.exec_id, fence=self.body.floor)
        finally:
            self.body.transfers -= 1


def _refusal(text: bytes) -> CorralError | None:
    """The words come from inside: only what this program may say is passed on."""
    try:
        told = json.loads(text)
        code, detail, entry, size = str(told["code"]), str(told["detail"]), told.get("entry"), told.get("size")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if code not in _REFUSALS:
        return None
    facts: dict[str, Any] = {} if entry is None else {"entry": str(entry)[:4096]}
    if type(size) is int and 0 <= size < _FAR:
        facts["size"] = size
    return CorralError(code, detail[:2000], hint=_HINTS.get(code), **facts)


def _odd(what: str) -> CorralError:
    return CorralError("infra_error", f"what the sandbox says of its files makes no sense: {what}", retryable=False)


def resolved(path: str) -> str:
    """An absolute path inside; relative ones lie in the workspace. `..` is left to whoever knows the links."""
    whole = path if path.startswith("/") else f"{WORKSPACE}/{path}"
    return "/" + "/".join(part for part in whole.split("/") if part not in ("", "."))


# -- what it says --------------------------------------------------------------------------------------------------------------
def _document(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _odd("a line that is no JSON") from None
    if type(value) is not dict:
        raise _odd("a line that is no object")
    return value


def _number(told: dict[str, Any], name: str, low: int = 0, high: int = _FAR) -> int:
    value = told.get(name)
    if type(value) is not int or not low <= value < high:
        raise _odd(f"an odd {name}")
    return value


def _text(told: dict[str, Any], name: str, most: int = 8192) -> str:
    value = told.get(name)
    if type(value) is not str or len(value) > most:
        raise _odd(f"an odd {name}")
    return value


def _path(told: dict[str, Any], name: str) -> str:
    value = _text(told, name)
    try:
        raw = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise _odd(f"an odd {name}") from None
    if not raw or b"\0" in raw:
        raise _odd(f"an odd {name}")
    return value


def info_of(told: dict[str, Any]) -> FileInfo:
    """An entry, checked in shape; raises `infra_error` on anything that this program would not say."""
    kind = _text(told, "type", 10)
    if kind not in _TYPES:
        raise _odd("an odd type")
    path = _path(told, "path")
    if not path.startswith("/"):
        raise _odd("an odd path")
    return FileInfo(
        path,
        kind,  # type: ignore[arg-type]
        _number(told, "size"),
        _number(told, "mode", high=0o10000),
        _number(told, "uid", high=2**32),
        _number(told, "gid", high=2**32),
        _number(told, "mtime_ns", -_FAR),
        _number(told, "inode", high=2**64),
        _path(told, "target") if told.get("target") else None,
        _text(told, "error", 50) if told.get("error") is not None else None,
    )


async def _answer(inside: Inside, most: int = LINE) -> bytes:
    """All that it says."""
    told = bytearray()
    source = inside.output()
    async with contextlib.aclosing(cast(Any, source)):
        async for piece in source:
            told += piece
            if len(told) > most:
                raise _odd("more than was asked for")
    return bytes(told)


async def _ask(body: Body, fence: Fence, user: str, *arguments: str, most: int = LINE, grace_s: float = 0.0) -> bytes:
    """Run one operation that takes nothing and answers little."""
    inside = Inside(body, fence, user, arguments, grace_s=grace_s)
    try:
        await inside.start()
        return await _answer(inside, most)
    finally:
        await inside.stop()


# -- operations ----------------------------------------------------------------------------------------------------------------
async def stat(body: Body, path: str, *, follow: bool, user: str) -> FileInfo:
    return info_of(_document(await _ask(body, body.floor, user, "stat", resolved(path), "1" if follow else "0")))


async def list_page(body: Body, path: str, *, recursive: bool, limit: int, after: str, user: str) -> FilePage:
    words = ("list", resolved(path), "1" if recursive else "0", str(limit), after)
    lines = (await _ask(body, body.floor, user, *words, most=PAGE_BYTES)).splitlines()
    if not lines or len(lines) > limit + 1:
        raise _odd("a page of another size")
    items = tuple(info_of(_document(text)) for text in lines[:-1])
    last = _document(lines[-1])
    if "next" not in last:
        raise _odd("a page without an end")
    return FilePage(items, None if last["next"] is None else _path(last, "next"))


async def move(body: Body, fence: Fence, source: str, target: str, *, overwrite: bool, user: str) -> FileInfo:
    words = ("move", resolved(source), resolved(target), "1" if overwrite else "0")
    return info_of(_document(await _ask(body, fence, user, *words, grace_s=ABORT_GRACE_S)))


async def make_directory(body: Body, fence: Fence, path: str, *, parents: bool, mode: int, user: str) -> FileInfo:
    words = ("mkdir", resolved(path), "1" if parents else "0", f"{mode:o}")
    return info_of(_document(await _ask(body, fence, user, *words)))


async def remove(body: Body, fence: Fence, path: str, *, recursive: bool, user: str) -> None:
    await _ask(body, fence, user, "remove", resolved(path), "1" if recursive else "0")


async def empty(body: Body, fence: Fence, paths: Sequence[str], *, user: str) -> str | None:
    told = _document(await _ask(body, fence, user, "empty", *map(resolved, paths)))
    return None if told.get("stays") is None else _text(told, "stays")


class Blocks:
    """See `ports.node.FileBlocks`. The process inside ends with it, also when nobody ever reads."""

    def __init__(self, inside: Inside, source: AsyncIterator[bytes], told: dict[str, Any], begun: bytes) -> None:
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._inside = inside
        self._source = source
        self._begun = begun
        self.info = info_of(told)
        self.offset = _number(told, "offset")
        self.length = self._left = _number(told, "length")

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._closed:
            raise StopAsyncIteration
        try:
            piece, self._begun = self._begun or await anext(self._source, b""), b""
            if len(piece) > self._left:
                raise _odd("more bytes than were promised")
            if not piece and self._left:
                raise CorralError("infra_error", f"the file ended {self._left} bytes early")
        except BaseException:
            await self.aclose()
            raise
        self._left -= len(piece)
        if not piece:
            await self.aclose()
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            try:
                await cast(Any, self._source).aclose()
            finally:
                await self._inside.stop()

    def __del__(self) -> None:
        if not self._closed:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_stop_later, self._inside)


def _stop_later(inside: Inside) -> None:
    inside.body.spawn(inside.stop())


async def read(body: Body, path: str, first: int | None, last: int | None, user: str) -> Blocks:
    words = ("read", resolved(path), *("-" if bound is None else str(bound) for bound in (first, last)))
    inside = Inside(body, body.floor, user, words)
    source = inside.output()
    try:
        await inside.start()
        told = b""
        while b"\n" not in told:
            if not (piece := await anext(source, b"")):
                raise _odd("no facts of a file")
            told += piece
            if len(told) > 2 * LINE and b"\n" not in piece:
                raise _odd("no end of the facts")
        head, _, begun = told.partition(b"\n")
        return Blocks(inside, source, _document(head), begun)
    except BaseException:
        await cast(Any, source).aclose()
        await inside.stop()
        raise


async def write(
    body: Body,
    fence: Fence,
    path: str,
    blocks: AsyncIterator[bytes],
    *,
    mode: int | None,
    parents: bool,
    overwrite: bool,
    size: int | None,
    user: str,
) -> tuple[FileInfo, bool]:
    switches = ("1" if parents else "0", "1" if overwrite else "0", "-" if size is None else str(size))
    words = ("write", resolved(path), "-" if mode is None else f"{mode:o}", *switches)
    inside = Inside(body, fence, user, words, grace_s=ABORT_GRACE_S)
    total, answer = await _feed(inside, blocks, size)
    told = _document(answer)
    info = info_of(told)
    if info.size != total:
        raise _odd("a file of another size than was sent")
    return info, told.get("created") is True


async def gathered(blocks: AsyncIterator[bytes], least: int = BLOCK // 4) -> AsyncIterator[bytes]:
    """The same bytes in pieces of at least `least`, the last excepted: each piece costs a round trip, however small it is."""
    kept = bytearray()
    async for block in blocks:
        if not kept and len(block) >= least:
            yield block
            continue
        kept += block
        if len(kept) >= least:
            yield bytes(kept)
            kept.clear()
    if kept:
        yield bytes(kept)


async def _feed(inside: Inside, blocks: AsyncIterator[bytes], size: int | None = None) -> tuple[int, bytes]:
    """Send a stream through it; -> (bytes sent, what it says at its end). It sees an end of file only behind the whole stream."""
    reader: asyncio.Future[bytes] | None = None
    total = 0
    try:
        await inside.start()
        reader = asyncio.ensure_future(_answer(inside))
        whole = True
        async for piece in gathered(blocks):
            view = memoryview(piece)
            total += len(view)
            while view and whole:
                # False: it refused; its complaint is at the end of its output.
                whole = await inside.give(view[:BLOCK])
                view = view[BLOCK:]
            if reader.done() or not whole:
                whole = False
                break
        if whole and size is not None and total != size:
            raise CorralError("bad_request", f"{total} bytes came, {size} were promised")
        if whole:
            with contextlib.suppress(CorralError):
                await inside.give(b"", True)
        answer = await reader
        if not whole:
            raise _odd("an end before the end")
        return total, answer
    finally:
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        await inside.stop()


# -- watching ------------------------------------------------------------------------------------------------------------------
class Events:
    """See `ports.node.FileEvents`."""

    def __init__(self, inside: Inside, source: AsyncIterator[bytes]) -> None:
        self._inside = inside
        self._source = source
        self._buffer = bytearray()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._life: asyncio.Task[None] | None = None

    async def line(self) -> dict[str, Any] | None:
        """The next one; None at the end."""
        while (at := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > LINE:
                raise _odd("no end of a line")
            piece = await anext(self._source, b"")
            if not piece:
                if self._buffer:
                    raise _odd("half a line")
                return None
            self._buffer += piece
        text = bytes(self._buffer[:at])
        del self._buffer[: at + 1]
        return _document(text)

    def begin(self) -> None:
        self._life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        with contextlib.suppress(CorralError):
            listens = True
            while listens:
                listens = await self._inside.give(b"\n")
                await asyncio.sleep(SIGN_OF_LIFE_S)

    def __aiter__(self) -> AsyncIterator[FileEvent]:
        return self

    async def __anext__(self) -> FileEvent:
        try:
            told = None if self._closed else await self.line()
            if told is None:
                raise StopAsyncIteration
            kind = _text(told, "event", 20)
            if kind not in _EVENTS:
                raise _odd("an odd event")
            source = _path(told, "from") if kind == "moved" else None
            return FileEvent(kind, _path(told, "path"), told.get("directory") is True, source)  # type: ignore[arg-type]
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            if self._life is not None:
                self._life.cancel()
            try:
                await cast(Any, self._source).aclose()
            finally:
                await self._inside.stop()

    def __del__(self) -> None:
        if not self._closed:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_stop_later, self._inside)


async def watch(body: Body, path: str, recursive: bool, user: str) -> Events:
    inside = Inside(body, body.floor, user, ("watch", resolved(path), "1" if recursive else "0"))
    events = Events(inside, inside.output())
    try:
        await inside.start()
        told = await events.line()
        if told is None or told.get("event") != "started":
            raise _odd("no beginning of a watch")
        events.begin()
        return events
    except BaseException:
        await events.aclose()
        raise


# -- tar streams ---------------------------------------------------------------------------------------------------------------
async def put_tar(body: Body, fence: Fence, tar: AsyncIterator[bytes], dest: str, user: str) -> None:
    """Unpack a stream at `dest` (relative to the workspace, or absolute inside)."""
    limits = body.limits
    words = ("unpack", os.path.join(WORKSPACE, dest), str(limits.disk_bytes), str(limits.inodes))
    await _feed(Inside(body, fence, user, words), tar)


async def get_tar(body: Body, path: str, user: str) -> AsyncIterator[bytes]:
    """Pack a path inside; `not_found` before the first byte."""
    inside = Inside(body, body.floor, user, ["pack", os.path.join(WORKSPACE, path)])
    try:
        await inside.start()
        async for piece in inside.output():
            yield piece
    finally:
        await inside.stop()
