"""What is kept of a stream, as results show it: whole where it is little, in pieces where it is much.

`text` and `base64` of a stream of hundreds of megabytes are never in memory: a `LargeStream` is written as JSON while the node is read.
"""

from __future__ import annotations

import binascii
import codecs
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from corral.domain.facts import StreamFacts
from corral.domain.result import omission, stream_document
from corral.errors import CorralError
from corral.ports.node import Node

Json = dict[str, Any]
Name = Literal["stdout", "stderr"]
NAMES: tuple[Name, Name] = ("stdout", "stderr")
LARGE = 1024 * 1024
"""Bytes from which on a stream is told in pieces to those who take it so."""
GLIMPSE = 512 * 1024
"""Bytes of a stream that a view of it is made from."""


async def kept_document(node: Node, exec_id: str | None, name: Name, facts: StreamFacts) -> Json:
    """One stream of a result. A spool that was removed shows as produced bytes of which none is kept."""
    kept = bytearray()
    if facts.produced and exec_id is not None:
        try:
            async for piece in node.kept_output(exec_id, name):
                kept += piece
        except CorralError as error:
            if error.code != "not_found":
                raise
    return stream_document(facts, bytes(kept[: facts.head]), bytes(kept[facts.head :]))


async def glimpse(node: Node, exec_id: str | None, name: Name, facts: StreamFacts) -> Json:
    """The same with at most `GLIMPSE` bytes of what is kept, its middle left out like what is not kept."""
    if facts.kept <= GLIMPSE or exec_id is None:
        return await kept_document(node, exec_id, name, facts)
    half = GLIMPSE // 2
    head = min(half, facts.head) if facts.tail else half
    tail = min(half, facts.tail) if facts.tail else half
    try:
        first = await _range(node, exec_id, name, 0, head)
        last = await _range(node, exec_id, name, facts.kept - tail, tail)
    except CorralError as error:
        if error.code != "not_found":
            raise
        first, last = b"", b""
    return stream_document(facts, first, last)


async def _range(node: Node, exec_id: str, name: Name, offset: int, size: int) -> bytes:
    found = bytearray()
    async with aclosing(_pieces(node, exec_id, name, offset)) as pieces:
        while len(found) < size and (piece := await anext(pieces, b"")):
            found += piece
    return bytes(found[:size])


async def _pieces(node: Node, exec_id: str, name: Name, offset: int = 0) -> AsyncGenerator[bytes, None]:
    source = node.kept_output(exec_id, name, offset=offset)
    try:
        async for piece in source:
            yield piece
    finally:
        await source.aclose()  # type: ignore[attr-defined]


def nothing_shown(facts: StreamFacts) -> Json:
    """The sizes of a stream, without its bytes."""
    return {
        "bytes": facts.produced,
        "kept_bytes": facts.kept,
        "truncated": facts.truncated,
        "text": None,
        "base64": None,
        "head_bytes": facts.head if facts.truncated else None,
    }


@dataclass(frozen=True)
class LargeStream:
    """One stream of a result that is not read yet."""

    node: Node
    exec_id: str
    name: Name
    facts: StreamFacts

    async def json(self) -> AsyncGenerator[bytes, None]:
        """The JSON of `stream_document`, byte for byte, in pieces. What is kept is read once to see if it is text, then for each member."""
        kept, ends_line, exact = await self._look()
        head = min(self.facts.head, kept)
        produced = max(self.facts.produced, kept)
        truncated = kept < produced
        if not truncated:
            head = kept
        sizes = {"bytes": produced, "kept_bytes": kept, "truncated": truncated}
        yield json.dumps(sizes, separators=(",", ":")).encode()[:-1] + b',"text":"'
        marker = omission(produced - kept, after_line=ends_line or not head)
        async with aclosing(self._text(head, kept, marker if truncated else "")) as text:
            async for part in text:
                yield json.dumps(part).encode()[1:-1]
        if exact and not truncated:
            yield b'","base64":null'
        else:
            yield b'","base64":"'
            rest = b""
            async with aclosing(self._bytes(kept)) as pieces:
                async for piece in pieces:
                    piece = rest + piece
                    rest = piece[len(piece) - len(piece) % 3 :]
                    yield binascii.b2a_base64(memoryview(piece)[: len(piece) - len(rest)], newline=False)
            yield binascii.b2a_base64(rest, newline=False) + b'"'
        yield b',"head_bytes":%s}' % (str(head).encode() if truncated else b"null")

    async def _look(self) -> tuple[int, bool, bool]:
        """(bytes that are there, whether the head ends with a line, whether all of it is UTF-8)."""
        kept, last, exact = 0, b"", True
        strict = codecs.getincrementaldecoder("utf-8")("strict")
        try:
            async with aclosing(_pieces(self.node, self.exec_id, self.name)) as pieces:
                async for piece in pieces:
                    if kept < self.facts.head:
                        last = piece[: self.facts.head - kept][-1:]
                    kept += len(piece)
                    if exact:
                        try:
                            strict.decode(piece)
                        except UnicodeDecodeError:
                            exact = False
        except CorralError as error:
            if error.code != "not_found":
                raise
            return 0, True, True
        if exact:
            try:
                strict.decode(b"", True)
            except UnicodeDecodeError:
                exact = False
        return kept, last == b"\n", exact

    async def _bytes(self, size: int) -> AsyncGenerator[bytes, None]:
        """So many bytes as were there at the first look: less is an error, as the answer has begun."""
        if not size:
            return
        async with aclosing(_pieces(self.node, self.exec_id, self.name)) as pieces:
            async for piece in pieces:
                piece = piece[:size]
                size -= len(piece)
                if piece:
                    yield piece
        if size:
            raise CorralError("not_found", "the output was removed while it was read")

    async def _text(self, head: int, kept: int, marker: str) -> AsyncGenerator[str, None]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        left = head
        async with aclosing(self._bytes(kept)) as pieces:
            async for piece in pieces:
                if marker and left <= len(piece):
                    yield decoder.decode(piece[:left], True) + marker
                    decoder.reset()
                    piece, marker = piece[left:], ""
                left -= len(piece)
                yield decoder.decode(piece)
        yield decoder.decode(b"", True) + marker
