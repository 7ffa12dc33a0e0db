"""The file calls behind both faces of the SDK, written once. Reads go on where they were cut off, and notice when the file changed."""

from __future__ import annotations

import base64
import os
import stat
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from dataclasses import dataclass
from typing import IO, Any, Literal, cast

from corral.client.effects import BLOCK, Effects, in_turn, pieces
from corral.client.line import Answer, Cut, Json, Line
from corral.client.transport import quote
from corral.client.values import FileEvent, FileInfo
from corral.errors import CorralError

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Content = bytes | bytearray | memoryview | str | IO[bytes] | IO[str] | Iterable[bytes]
Progress = Callable[[int, int | None], object]
CUTS = 20
"""How often in a row a transfer may be cut off without a byte of progress."""
EVENTS = ("started", "created", "modified", "deleted", "moved", "overflow", "ended")


@dataclass(frozen=True)
class Source:
    """What is sent: `open` gives its blocks, `again` says that it can be called more than once."""

    open: Callable[[], AsyncGenerator[bytes, None]]
    size: int | None
    again: bool


class FileCalls:
    """Files of one sandbox, with the rights of `user` inside (default: the exec's)."""

    def __init__(self, line: Line, sandbox_id: str, user: str | None = None) -> None:
        self.line = line
        self.sandbox_id = sandbox_id
        self.user = user
        self._at = f"/v1/sandboxes/{quote(sandbox_id)}/files"

    # -- one call each -----------------------------------------------------------------------------------------------------------
    async def stat(self, path: Path, follow: bool) -> FileInfo:
        params = {**self._where(path), "follow": follow}
        return FileInfo.of(await self.line.request("GET", f"{self._at}/stat", None, params))

    async def exists(self, path: Path) -> bool:
        """A link counts, whatever it points to."""
        try:
            await self.stat(path, False)
        except CorralError as error:
            if error.code != "not_found" or f"sandbox {self.sandbox_id}" in error.detail:
                raise
            return False
        return True

    async def list(self, path: Path, recursive: bool) -> list[FileInfo]:
        found: list[FileInfo] = []
        after: str | None = None
        while True:
            params = {**self._where(path), "recursive": recursive or None, "after": after, "limit": 1000}
            page = await self.line.request("GET", f"{self._at}/list", None, params)
            found += [FileInfo.of(item) for item in page["items"]]
            after = page["next"]
            if after is None:
                return found

    async def move(self, src: Path, dst: Path, overwrite: bool) -> FileInfo:
        body = {**self._named(src, "from"), **self._named(dst, "to"), "overwrite": overwrite, **self._as()}
        return FileInfo.of(await self.line.request("POST", f"{self._at}/move", body, once=True))

    async def mkdir(self, path: Path, parents: bool, mode: int | None) -> FileInfo:
        body: Json = {**self._named(path, "path"), "parents": parents, **self._as()}
        if mode is not None:
            body["mode"] = f"{mode:04o}"
        return FileInfo.of(await self.line.request("POST", f"{self._at}/mkdir", body))

    async def delete(self, path: Path, recursive: bool) -> None:
        params = {**self._where(path), "recursive": recursive or None}
        await self.line.request("DELETE", self._at, None, params, gone=True)

    # -- content -----------------------------------------------------------------------------------------------------------------
    async def stream(
        self, path: Path, offset: int = 0, length: int | None = None, progress: Progress | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The bytes from `offset`, at most `length`. `conflict` when the file changes while a broken read goes on."""
        if offset < 0 or (length is not None and length < 0):
            raise CorralError("invalid_value", "offset and length are not negative", field="/offset")
        if length == 0:
            await self.stat(path, True)
            return
        done, cuts, tag = 0, 0, None
        while True:
            answer = await self._range(path, offset + done, None if length is None else offset + length, bool(done))
            if answer is None:
                return
            try:
                tag = self._same(answer, tag, offset + done)
                total = _total(answer, done)
                source = answer.blocks()
                try:
                    async for block in source:
                        done += len(block)
                        cuts = 0
                        if progress is not None:
                            progress(done, total)
                        yield block
                finally:
                    await source.aclose()
                return
            except Cut as cut:
                cuts += 1
                if cuts >= CUTS or tag is None:
                    raise CorralError("infra_error", "the download broke off", hint="start it again") from cut
            finally:
                await answer.close()

    async def _range(self, path: Path, start: int, end: int | None, resumed: bool) -> Answer | None:
        """The answer from `start` on; None when nothing lies there."""
        headers = {}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-" if end is None else f"bytes={start}-{end - 1}"
        try:
            answer = await self.line.open(self._at, self._where(path), headers)
        except CorralError as error:
            if error.code != "range_not_satisfiable":
                raise
            if resumed:
                raise _changed() from error
            return None
        if start and answer.status != 206:
            await answer.close()
            raise CorralError("infra_error", "the service does not read from an offset", retryable=False)
        return answer

    @staticmethod
    def _same(answer: Answer, tag: str | None, start: int) -> str | None:
        found = answer.headers.get("etag")
        if tag is not None and found != tag:
            raise _changed()
        return found

    async def read(self, path: Path, offset: int, length: int | None, progress: Progress | None) -> bytes:
        parts = [block async for block in self.stream(path, offset, length, progress)]
        return b"".join(parts)

    async def write(
        self, path: Path, source: Source, mode: int | None, overwrite: bool, parents: bool, progress: Progress | None
    ) -> FileInfo:
        """Atomic: a reader inside sees the old content or the new."""
        params = {
            **self._where(path),
            "mode": None if mode is None else f"{mode:04o}",
            "parents": parents,
            "overwrite": overwrite,
        }
        again = source.again and overwrite
        opened = lambda: _counted(source, progress)  # noqa: E731
        return FileInfo.of(await self.line.upload(self._at, opened, params, size=source.size, again=again))

    # -- between here and there --------------------------------------------------------------------------------------------------
    async def upload(self, local: str, path: Path, progress: Progress | None) -> None:
        """A local file or directory as `path`. The content of a directory is merged into one that is there."""
        effects = self.line.effects
        facts = await effects.local(os.stat, local)
        if not stat.S_ISDIR(facts.st_mode):
            source = _local_file(local, effects, facts.st_size)
            await self.write(path, source, stat.S_IMODE(facts.st_mode) & 0o777, True, True, progress)
            return
        from corral.client.trees import pack

        await self.mkdir(path, True, None)
        tree = Source(lambda: in_turn(pack(local, "."), effects), None, True)
        await self.put_archive(path, tree, progress)

    async def download(self, path: Path, local: str, progress: Progress | None) -> None:
        """A file or directory as `local`. The content of a directory is merged into one that is there."""
        effects = self.line.effects
        facts = await self.stat(path, True)
        if facts.is_dir:
            from corral.client.trees import unpack_stream

            folder, name = os.path.split(os.path.abspath(local))
            archive = self.get_archive(path, progress)
            await effects.consume(lambda blocks: unpack_stream(blocks, folder, name), archive)
            return
        part = await effects.local(_Part, local)
        try:
            async for block in self.stream(path, progress=progress):
                await effects.local(part.write, block)
            await effects.local(part.finish, facts.mode & 0o777)
        finally:
            part.discard()

    async def get_archive(self, path: Path, progress: Progress | None = None) -> AsyncGenerator[bytes, None]:
        """A tar stream of `path`."""
        done = 0
        source = self.line.download(f"{self._at}/archive", self._where(path))
        try:
            async for block in source:
                done += len(block)
                if progress is not None:
                    progress(done, None)
                yield block
        finally:
            await source.aclose()

    async def put_archive(self, path: Path, source: Source, progress: Progress | None = None) -> None:
        """Unpack a tar stream in the directory `path`."""
        opened = lambda: _counted(source, progress)  # noqa: E731
        params = self._where(path)
        await self.line.upload(f"{self._at}/archive", opened, params, size=source.size, again=source.again)

    async def watch(self, path: Path, recursive: bool) -> AsyncGenerator[FileEvent, None]:
        """What happens from `started` on, until the sandbox ends. After a broken connection: `overflow`, then it goes on."""
        begun = False
        while True:
            params = {**self._where(path), "recursive": recursive or None}
            answer = await self.line.open(f"{self._at}/watch", params, {"Accept": "text/event-stream"})
            source = answer.events()
            try:
                async for event in source:
                    if event.kind == "started" and begun:
                        yield FileEvent("overflow")
                    begun = True
                    if event.kind in EVENTS:
                        doc = event.doc or {}
                        yield FileEvent(cast(Any, event.kind), _path_of(doc), doc)
                    if event.kind == "ended":
                        return
                if not begun:
                    raise CorralError("infra_error", "the service says nothing of a watch", retryable=False)
                await self.line.effects.sleep(0.05)
            except Cut:
                await self.line.effects.sleep(0.05)
            except CorralError as error:
                if error.code != "shutting_down":
                    raise
                await self.line.effects.sleep(0.5)  # the next service goes on with it
            finally:
                await source.aclose()
                await answer.close()

    # -- words of requests -------------------------------------------------------------------------------------------------------
    def _as(self) -> dict[str, str]:
        return {} if self.user is None else {"user": self.user}

    def _where(self, path: Path) -> dict[str, Any]:
        return {**self._named(path, "path"), **self._as()}

    @staticmethod
    def _named(path: Path, name: Literal["path", "from", "to"]) -> dict[str, str]:
        raw = os.fsencode(path) if not isinstance(path, str) else path.encode("utf-8", "surrogateescape")
        try:
            return {name: raw.decode("utf-8")}
        except UnicodeDecodeError:
            return {f"{name}_base64": base64.b64encode(raw).decode("ascii")}


def source_of(data: Content | AsyncIterable[bytes], effects: Effects) -> Source:
    """What `write` was given, as blocks."""
    if isinstance(data, str | bytes | bytearray | memoryview):
        whole = bytes_of(data)
        return Source(lambda: pieces(whole), len(whole), True)
    if isinstance(data, AsyncIterable):
        blocks = data
        return Source(lambda: _forwarded(blocks), None, False)
    if hasattr(data, "read"):
        return _stream_source(cast("IO[Any]", data), effects)
    if isinstance(data, Iterable):
        items = data
        return Source(lambda: in_turn(items, effects), None, False)
    raise TypeError(f"content is bytes, str, a file or an iterable of bytes, not {type(data).__name__}")


def bytes_of(data: str | bytes | bytearray | memoryview) -> bytes:
    """Text as UTF-8, with lone surrogates for the bytes that they stand for."""
    return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)


def _stream_source(file: IO[Any], effects: Effects) -> Source:
    try:
        start: int | None = file.tell() if file.seekable() else None
    except (OSError, AttributeError):
        start = None

    async def blocks() -> AsyncGenerator[bytes, None]:
        if start is not None:
            await effects.local(file.seek, start)
        while True:
            block: Any = await effects.local(file.read, BLOCK)
            if not block:
                return
            yield bytes_of(block)

    return Source(blocks, None, start is not None)


def _local_file(path: str, effects: Effects, size: int) -> Source:
    async def blocks() -> AsyncGenerator[bytes, None]:
        file: IO[bytes] = await effects.local(_opened, path)
        try:
            while block := await effects.local(file.read, BLOCK):
                yield block
        finally:
            file.close()

    return Source(blocks, size, True)


def _opened(path: str) -> IO[bytes]:
    return open(path, "rb")


async def _forwarded(blocks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    async for block in blocks:
        yield block


async def _counted(source: Source, progress: Progress | None) -> AsyncGenerator[bytes, None]:
    done = 0
    blocks = source.open()
    try:
        async for block in blocks:
            yield block
            done += len(block)
            if progress is not None:
                progress(done, source.size)
    finally:
        await blocks.aclose()


def _total(answer: Answer, done: int) -> int | None:
    """How many bytes the whole read will have, if the answer says so."""
    length = answer.headers.get("content-length")
    return None if length is None else done + int(length)


def _path_of(doc: Json) -> str | None:
    if (encoded := doc.get("path_base64")) is not None:
        return base64.b64decode(encoded).decode("utf-8", "surrogateescape")
    return doc.get("path")


def _changed() -> CorralError:
    return CorralError("conflict", "the file changed while it was read", hint="read it again from the start")


class _Part:
    """A local file in the making, beside its place; nothing of it stays unless it is finished."""

    def __init__(self, place: str) -> None:
        self._place = os.path.abspath(place)
        # Not with the name in it, which may be as long as names can be.
        descriptor, self._path = tempfile.mkstemp(prefix=".corral-", suffix=".part", dir=os.path.dirname(self._place))
        self._file = open(descriptor, "wb")  # noqa: SIM115 - closed by finish or discard
        self._done = False

    def write(self, block: bytes) -> None:
        self._file.write(block)

    def finish(self, mode: int) -> None:
        """Give it its name."""
        os.fchmod(self._file.fileno(), mode)
        self._file.close()
        os.replace(self._path, self._place)
        self._done = True

    def discard(self) -> None:
        """Forget it, unless it is finished."""
        if not self._done:
            self._file.close()
            os.unlink(self._path)
            self._done = True
