"""The one place where errors become answers, and where request bodies become documents."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from corral.errors import CorralError

MAX_BODY = 32 * 1024 * 1024
MAX_DEPTH = 64
RETRY_AFTER_S = 1


def problem(error: CorralError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, RFC 9457 document, headers) of an error."""
    later = (error.status in (429, 503) and error.retryable) or "retry_after_s" in error.facts
    headers = {"Retry-After": str(error.facts.get("retry_after_s", RETRY_AFTER_S))} if later else {}
    if error.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    if "allow" in error.facts:
        headers["Allow"] = ", ".join(error.facts["allow"])
    return error.status, error.to_problem(), headers


async def read_body(body: bytes | AsyncIterator[bytes], limit: int = MAX_BODY) -> bytes:
    """The whole body, or `too_large` as soon as it passes `limit`."""
    if isinstance(body, bytes):
        if len(body) > limit:
            raise _too_large(limit)
        return body
    parts: list[bytes] = []
    size = 0
    async for part in body:
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> CorralError:
    return CorralError(
        "too_large",
        f"the request body is over {limit // (1024 * 1024)} MiB",
        hint="send large files with the file API of a kept sandbox",
    )


def decode(raw: bytes) -> Any:
    """One JSON document, strictly: UTF-8, no NaN, no duplicate member, bounded depth; else `bad_request`."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorralError("bad_request", f"the body is not UTF-8 (byte {error.start})") from error
    try:
        document = json.loads(text, parse_constant=_constant, object_pairs_hook=_members, parse_float=_float)
    except RecursionError as error:
        raise CorralError("bad_request", "the body is nested too deeply") from error
    except CorralError:
        raise
    except ValueError as error:
        raise CorralError("bad_request", f"the body is not JSON: {error}") from error
    check_depth(document)
    return document


def check_depth(document: Any) -> None:
    """`bad_request` when containers are nested deeper than any request of ours can be."""
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise CorralError("bad_request", "the body is nested too deeply")


def _constant(name: str) -> NoReturn:
    raise CorralError("bad_request", f"the body is not JSON: {name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise CorralError("bad_request", f"the number {text[:40]} is out of range")
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise CorralError("bad_request", f"the member {name!r} appears twice")
            seen.add(name)
    return document
