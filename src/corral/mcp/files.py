"""Files of a sandbox as a model reads them: text by lines within a budget, everything else as bytes under a cap."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from corral.client.transport import Json, quote
from corral.errors import CorralError
from corral.mcp.backend import Backend

SNIFF = 8192
SCAN = 64 << 20
"""How far into a text lines are looked for and counted."""
BINARY_CAP = 4 << 20
IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}


@dataclass(frozen=True)
class Part:
    """Some lines of a text. `last` is the last one shown, in part if `cut`; `total` None: the text was not read
    to its end, only its first `seen` bytes."""

    text: str
    first: int
    last: int
    total: int | None
    seen: int
    cut: bool = False
    more: bool = False


def is_text(head: bytes, whole: bool) -> bool:
    """Told by its first bytes: no NUL, and nearly all of it UTF-8."""
    if b"\0" in head:
        return False
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(head, final=whole)
    return text.count("\ufffd") * 10 <= len(text)


def image_type(head: bytes) -> str | None:
    """The MIME type of an image that MCP clients show."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in IMAGES.items() if head.startswith(magic)), None)


def lines_of(chunks: Iterable[bytes], first: int, last: int | None, most: int, scan: int = SCAN) -> Part:
    """Lines `first` to `last` (1-based, both included), at most `most` characters of them. Reads little more than `scan` bytes."""
    shown: list[str] = []
    room = most
    line, reached = 1, first - 1
    cut = more = inside = False  # inside: the text so far does not end with a line end
    seen = 0
    whole = True
    for text, size in _decoded(chunks):
        seen += size
        at = 0
        while at < len(text):
            end = text.find("\n", at)
            stop = end + 1 if end >= 0 else len(text)
            if line >= first and (last is None or line <= last):
                piece = text[at : min(stop, at + room)]
                if piece:
                    shown.append(piece)
                    room -= len(piece)
                    reached = line
                cut = cut or (reached == line and len(piece) < stop - at)
                more = more or reached < line
            inside = end < 0
            line += end >= 0
            at = stop
        if seen >= scan:
            whole = False
            break
    total = line if inside else line - 1
    unseen = not whole and (last is None or line <= last)
    return Part("".join(shown), first, reached, total if whole else None, seen, cut, more or unseen)


def _decoded(chunks: Iterable[bytes]) -> Iterator[tuple[str, int]]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for chunk in chunks:
        yield decoder.decode(chunk), len(chunk)
    yield decoder.decode(b"", final=True), 0


class Files:
    """The file API of one sandbox."""

    def __init__(self, backend: Backend, sandbox_id: str) -> None:
        self._backend = backend
        self._base = f"/v1/sandboxes/{quote(sandbox_id)}/files"

    async def stat(self, where: Json) -> Json:
        """`where`: `{"path"}` or `{"path_base64"}`. Links are followed."""
        return await self._backend.request("GET", f"{self._base}/stat", None, where)

    async def exists(self, path: str) -> bool:
        """True if there is anything at the path."""
        try:
            await self._backend.request("GET", f"{self._base}/stat", None, {"path": path, "follow": False})
        except CorralError as error:
            if error.code != "not_found":
                raise
            return False
        return True

    async def read(
        self, where: Json, text: bool | None, first: int, last: int | None, most: int
    ) -> Part | tuple[bytes, bool]:
        """The lines of a text (see `lines_of`), or (the first `BINARY_CAP` bytes, is that all). `text` None: as it looks."""
        transport = await self._backend.transport()

        def work() -> Part | tuple[bytes, bool]:
            chunks = transport.download(self._base, where)
            try:
                head = bytearray()
                while len(head) < SNIFF and (chunk := next(chunks, None)) is not None:
                    head += chunk
                if text if text is not None else is_text(bytes(head[:SNIFF]), len(head) <= SNIFF):
                    return lines_of(itertools.chain([bytes(head)], chunks), first, last, most)
                while len(head) <= BINARY_CAP and (chunk := next(chunks, None)) is not None:
                    head += chunk
                return bytes(head[:BINARY_CAP]), len(head) <= BINARY_CAP
            finally:
                close = getattr(chunks, "close", None)
                if close is not None:
                    close()

        return await self._backend.threaded(work)

    async def write(self, path: str, data: bytes, mode: str | None) -> Json:
        """The whole file, atomically; parents are made."""
        transport = await self._backend.transport()
        params: Json = {"path": path, "parents": True, "mode": mode}
        return await self._backend.threaded(lambda: transport.upload(self._base, [data], params))

    async def list(self, path: str, recursive: bool, limit: int, after: str | None) -> Json:
        """One page of what lies below a directory."""
        params: Json = {"path": path, "recursive": recursive, "limit": limit, "after": after}
        return await self._backend.request("GET", f"{self._base}/list", None, params)
