"""Documents as JSON, where a stream of a result may be too much to hold: that one is written while it is read."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from corral.services.output import LargeStream


def encoded(document: Any) -> tuple[bytes, list[LargeStream | bytes]]:
    """(the whole JSON, nothing) or (nothing, its parts in order): ASCII, so that lone surrogates of foreign paths survive."""
    found: list[LargeStream] = []
    mark = ""

    def place(value: object) -> str:
        nonlocal mark
        if not isinstance(value, LargeStream):
            raise TypeError(f"{type(value).__name__} has no form in JSON")
        mark = mark or secrets.token_hex(16)  # what a program printed must not be taken for it
        found.append(value)
        return mark

    text = json.dumps(document, separators=(",", ":"), default=place)
    if not found:
        return text.encode(), []
    first, *others = text.split(f'"{mark}"')
    parts: list[LargeStream | bytes] = [first.encode()]
    for large, other in zip(found, others, strict=True):
        parts += [large, other.encode()]
    return b"", parts


async def written(parts: list[LargeStream | bytes]) -> AsyncIterator[bytes]:
    """The bytes of `encoded` parts. The first comes when the first stream is there, so that its absence is an answer of its own."""
    before = b""
    for part in parts:
        if isinstance(part, bytes):
            before += part
            continue
        async with aclosing(part.json()) as pieces:
            async for piece in pieces:
                yield before + piece
                before = b""
    yield before
