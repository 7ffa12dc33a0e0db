"""Handlers of the file API. Paths come as text, or as `path_base64` when their bytes are not UTF-8."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from corral.api.calls import (
    Reply,
    Request,
    document_of,
    flag_of,
    idempotency_of,
    integer_of,
    until_stop,
)
from corral.errors import CorralError
from corral.ports.node import FileInfo
from corral.services.control import Services
from corral.services.files import entry

Json = dict[str, Any]
MAX_PATH = 4096
MAX_PAGE = 10_000
BINARY = "application/octet-stream"
FARTHEST = 2**63 - 1
"""No file has a byte behind it."""
_RANGE = re.compile(r"bytes\s*=\s*([0-9]{0,40})\s*-\s*([0-9]{0,40})\s*")


# -- parts of requests ---------------------------------------------------------------------------------------------------------
def path_of(values: Mapping[str, Any], name: str = "path") -> str:
    """The path that a query or a body names under `name` or `<name>_base64`; lone surrogates stand for bytes."""
    text, encoded = values.get(name), values.get(f"{name}_base64")
    if (text is None) == (encoded is None):
        raise CorralError("invalid_value", f"exactly one of {name} and {name}_base64 names a path", field=f"/{name}")
    if encoded is not None:
        return _decoded(encoded, f"{name}_base64")
    if not isinstance(text, str):
        raise CorralError("invalid_value", f"{name} is not a text", field=f"/{name}")
    try:
        raw = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise CorralError("invalid_value", f"{name} stands for no bytes", field=f"/{name}") from error
    return _checked(raw, name)


def _decoded(encoded: Any, name: str) -> str:
    try:
        if not isinstance(encoded, str):
            raise ValueError
        # Either alphabet; a + that was not encoded in a query has become a space.
        plain = encoded.rstrip("=").replace(" ", "+").replace("-", "+").replace("_", "/")
        raw = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except ValueError as error:
        raise CorralError("invalid_value", f"{name} is not base64", field=f"/{name}") from error
    return _checked(raw, name)


def _checked(raw: bytes, name: str) -> str:
    text = raw.decode("utf-8", "surrogateescape")
    if not raw or b"\0" in raw or len(raw) > MAX_PATH:
        why = "is empty" if not raw else "holds a NUL" if b"\0" in raw else f"is longer than {MAX_PATH} bytes"
        raise CorralError("invalid_value", f"{name} {why}", field=f"/{name}", entry=text[:200])
    return text


def user_of(request: Request) -> str:
    """The user inside who does it."""
    return request.query.get("user", "sandbox")


def mode_of(value: Any, field: str) -> int:
    """Permissions as an octal text; set-id and sticky bits are nobody's to set from outside."""
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise CorralError("invalid_value", "mode is not octal permissions like 0644", field=field)
    return int(value, 8)


def range_of(request: Request) -> tuple[int | None, int | None]:
    """(first, last) of a `Range` of bytes; without a first the number of last bytes; both None for the whole.

    What is no range of bytes is ignored, as the standard wants; several parts at once are not served as such.
    """
    match = _RANGE.fullmatch(request.headers.get("range", ""))
    if match is None or not (match[1] or match[2]):
        return None, None
    first, last = (min(int(text), FARTHEST) if text else None for text in match.groups())
    if first is not None and last is not None and last < first:
        return None, None
    return first, last


def _members(document: Any, known: set[str]) -> Json:
    if not isinstance(document, dict):
        raise CorralError("invalid_value", "the body is not an object", field="")
    for name in document:
        if name not in known:
            raise CorralError("invalid_value", f"there is no member {name[:100]!r}", field=f"/{name[:100]}")
    return document


def _truth(document: Json, name: str, default: bool) -> bool:
    value = document.get(name, default)
    if not isinstance(value, bool):
        raise CorralError("invalid_value", f"{name} is neither true nor false", field=f"/{name}")
    return value


def _user(document: Json) -> str:
    value = document.get("user", "sandbox")
    if not isinstance(value, str):
        raise CorralError("invalid_value", "user is not a text", field="/user")
    return value


def _headers(info: FileInfo) -> dict[str, str]:
    from email.utils import formatdate  # loads ten modules, which only a download needs

    seconds = min(max(info.mtime_ns // 10**9, 0), 253_402_300_799)
    return {
        "Accept-Ranges": "bytes",
        "Last-Modified": formatdate(seconds, usegmt=True),
        "ETag": f'"{info.inode:x}-{info.size:x}-{info.mtime_ns & (2**64 - 1):x}"',
    }


async def _blocks(body: bytes | AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if isinstance(body, bytes):
        yield body
        return
    async for block in body:
        yield block


# -- handlers ------------------------------------------------------------------------------------------------------------------
async def read_file(services: Services, request: Request, sandbox_id: str) -> Reply:
    path = path_of(request.query)
    first, last = range_of(request)
    if (first, last) != (None, None) and (known := request.headers.get("if-range")) is not None:
        info = await services.files.stat(request.caller, sandbox_id, path, follow=True, user=user_of(request))
        if known != _headers(info)["ETag"]:  # a date is too coarse to tell; the whole file is always right
            first = last = None
    try:
        reading = await services.files.read(
            request.caller, sandbox_id, path, first=first, last=last, user=user_of(request)
        )
    except CorralError as error:
        if error.code == "range_not_satisfiable" and "size" in error.facts:
            headers = {"Content-Range": f"bytes */{error.facts['size']}"}
            return Reply(416, error.to_problem(), headers, media_type="application/problem+json")
        raise
    headers = {**_headers(reading.info), "Content-Length": str(reading.length)}
    if first is None and last is None:
        return Reply(200, headers=headers, raw=reading, media_type=BINARY)
    end = reading.offset + reading.length - 1
    headers["Content-Range"] = f"bytes {reading.offset}-{end}/{reading.info.size}"
    return Reply(206, headers=headers, raw=reading, media_type=BINARY)


async def head_file(services: Services, request: Request, sandbox_id: str) -> Reply:
    info = await services.files.stat(
        request.caller, sandbox_id, path_of(request.query), follow=True, user=user_of(request)
    )
    if info.type != "file":
        code = "is_a_directory" if info.type == "dir" else "not_a_file"
        raise CorralError(code, f"{info.path!r} is a {info.type}", entry=info.path)
    return Reply(200, headers={**_headers(info), "Content-Length": str(info.size)}, media_type=BINARY)


async def write_file(services: Services, request: Request, sandbox_id: str) -> Reply:
    if "content-range" in request.headers:
        hint = "send the whole file"
        raise CorralError("bad_request", "a file is written whole, not in ranges", hint=hint)
    mode = request.query.get("mode")
    length = request.headers.get("content-length", "")
    info, created = await services.files.write(
        request.caller,
        sandbox_id,
        path_of(request.query),
        _blocks(request.body),
        mode=None if mode is None else mode_of(mode, "/mode"),
        parents=flag_of(request, "parents", True),
        overwrite=flag_of(request, "overwrite", True),
        size=int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None,
        user=user_of(request),
        lease=request.headers.get("corral-lease"),
    )
    return Reply(201 if created else 200, entry(info), _headers(info))


async def remove_file(services: Services, request: Request, sandbox_id: str) -> Reply:
    await services.files.remove(
        request.caller,
        sandbox_id,
        path_of(request.query),
        recursive=flag_of(request, "recursive"),
        user=user_of(request),
        lease=request.headers.get("corral-lease"),
    )
    return Reply(200, {})


async def stat_file(services: Services, request: Request, sandbox_id: str) -> Reply:
    info = await services.files.stat(
        request.caller,
        sandbox_id,
        path_of(request.query),
        follow=flag_of(request, "follow", True),
        user=user_of(request),
    )
    return Reply(200, entry(info), _headers(info))


async def list_files(services: Services, request: Request, sandbox_id: str) -> Reply:
    items, following = await services.files.page(
        request.caller,
        sandbox_id,
        path_of(request.query),
        recursive=flag_of(request, "recursive"),
        limit=integer_of(request, "limit", 1000, 1, MAX_PAGE),
        after=request.query.get("after"),
        user=user_of(request),
    )
    return Reply(200, {"items": [entry(info) for info in items], "next": following})


async def move_file(services: Services, request: Request, sandbox_id: str) -> Reply:
    known = {"from", "to", "from_base64", "to_base64", "overwrite", "user"}
    document = _members(await document_of(request), known)
    info = await services.files.move(
        request.caller,
        sandbox_id,
        path_of(document, "from"),
        path_of(document, "to"),
        overwrite=_truth(document, "overwrite", False),
        user=_user(document),
        lease=request.headers.get("corral-lease"),
        idempotency=idempotency_of(request, f"POST /v1/sandboxes/{sandbox_id}/files/move", document),
    )
    return Reply(200, entry(info))


async def make_directory(services: Services, request: Request, sandbox_id: str) -> Reply:
    document = _members(await document_of(request), {"path", "path_base64", "parents", "mode", "user"})
    info = await services.files.make_directory(
        request.caller,
        sandbox_id,
        path_of(document),
        parents=_truth(document, "parents", True),
        mode=mode_of(document.get("mode", "0755"), "/mode"),
        user=_user(document),
        lease=request.headers.get("corral-lease"),
    )
    return Reply(200, entry(info))


async def watch_files(services: Services, request: Request, sandbox_id: str) -> Reply:
    services.core.check_open()
    events = await services.files.watch(
        request.caller,
        sandbox_id,
        path_of(request.query),
        recursive=flag_of(request, "recursive"),
        user=user_of(request),
    )
    if request.method == "HEAD":  # an iteration that never begins would not close it
        await events.aclose()
    return Reply(events=until_stop(services, events), media_type="text/event-stream")
