"""One call of the API: the request, its answer, and how parts of a request are read. Nothing here knows a route."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.api.problems import check_depth, decode, read_body
from corral.domain.identity import ADMIN, READ, RUN
from corral.domain.records import Idempotency
from corral.errors import CorralError
from corral.services.control import Services
from corral.services.events import Caller, StreamEvent

Json = dict[str, Any]
MAX_WAIT_S = 3600.0


@dataclass(frozen=True)
class Request:
    """One call. `document` is a body that is decoded already (in process); header names are lower-case.

    `pieces`: the document of the answer may hold what is only read when it is written (`services.output.LargeStream`).
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | AsyncIterator[bytes] = b""
    document: Any = None
    caller: Caller = field(default_factory=Caller)
    pieces: bool = False


@dataclass(frozen=True)
class Reply:
    """One answer: a document, or raw bytes, or events. `text` tells how events are put on a wire.

    `seen`: how an error that comes on the way is told to the caller.
    """

    status: int = 200
    document: Json | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: AsyncIterator[bytes] | None = None
    events: AsyncIterator[StreamEvent] | None = None
    text: bool = True
    media_type: str = "application/json"
    seen: Callable[[CorralError], CorralError] = lambda error: error


def seen_by(services: Services, caller: Caller) -> Callable[[CorralError], CorralError]:
    """How errors are told to him: while the service stops they mean nothing, and only an admin hears what lies where."""
    core = services.core

    def seen(error: CorralError) -> CorralError:
        error = core.as_seen(error)
        return error if ADMIN in caller.scopes else core.discretion.error(error)

    return seen


Handler = Callable[..., Awaitable[Reply]]


ANYBODY, ANY_KEY = "anybody", "any key"
"""In place of a scope: a route that needs no key, one for which any will do."""
TENANTS_OWN = ("runs", "sandboxes", "execs", "leases", "queue")
"""What a tenant has: to look at it is `read`, to change it `run`."""


@dataclass(frozen=True)
class Route:
    """`pattern` has `{name}` for one segment and a last `{name:path}` for the rest. `starts`: refused while the service drains.

    `scope`: what the caller's key must have. Left out it is told by the path: `TENANTS_OWN` or, so that nothing is open by mistake, admin.
    """

    method: str
    pattern: str
    handler: Handler
    starts: bool = False
    scope: str = ""
    of_tenant: bool = False
    """An admin may name another tenant, whose thing is meant: to look at it, or to end it."""

    @property
    def is_tenants_own(self) -> bool:
        """Whether it is about what a tenant has."""
        segments = self.pattern.split("/")
        return len(segments) > 2 and segments[2] in TENANTS_OWN

    @property
    def needs(self) -> str:
        """The scope, `ANY_KEY` or `ANYBODY`."""
        if self.scope:
            return self.scope
        if self.is_tenants_own:
            return READ if self.method in ("GET", "HEAD") else RUN
        return ADMIN


async def document_of(request: Request) -> Any:
    """The JSON body."""
    if request.document is not None:
        check_depth(request.document)
        return request.document
    raw = await read_body(request.body)
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind not in ("application/json", "") and not kind.endswith("+json"):
        raise CorralError("bad_request", f"the body is {kind}, not application/json")
    return decode(raw)


async def object_of(request: Request) -> Json:
    """The JSON body, an object; `{}` when there is none."""
    if request.document is None and not isinstance(request.body, bytes):
        raw = await read_body(request.body)
    elif request.document is None:
        raw = request.body if isinstance(request.body, bytes) else b""
    else:
        return request.document if isinstance(request.document, dict) else {}
    if not raw:
        return {}
    document = decode(raw)
    if not isinstance(document, dict):
        raise CorralError("invalid_value", "the body is not an object", field="")
    return document


def idempotency_of(request: Request, route: str, document: Any) -> Idempotency | None:
    """The call's `Idempotency-Key`, if it has one, with a digest of what is asked for."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 1 <= len(key) <= 200 or not key.isascii() or not key.isprintable():
        detail, hint = "the Idempotency-Key is not 1 to 200 printable ASCII characters", "a UUID will do"
        raise CorralError("invalid_value", detail, hint=hint)
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return Idempotency(request.caller.tenant_id, route, key, hashlib.sha256(canonical.encode()).hexdigest())


def seconds_of(request: Request, name: str, default: float) -> float:
    """A query parameter in seconds."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_WAIT_S:
        raise CorralError(
            "invalid_value", f"{name} is not a number of seconds from 0 to {MAX_WAIT_S:.0f}", field=f"/{name}"
        )
    return value


def flag_of(request: Request, name: str, default: bool = False) -> bool:
    """A query parameter that is true or false."""
    text = request.query.get(name, "true" if default else "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise CorralError("invalid_value", f"{name} is neither true nor false", field=f"/{name}")
    return text in ("true", "1")


def integer_of(request: Request, name: str, default: int, low: int, high: int) -> int:
    """A query parameter that is a whole number."""
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high):
        raise CorralError("invalid_value", f"{name} is not an integer from {low} to {high}", field=f"/{name}")
    return int(text)


def ident_of(request: Request, name: str) -> str | None:
    """A query parameter that is an id, or None."""
    value = request.query.get(name)
    if value is not None and (len(value) > 64 or not value.isascii() or not value.isprintable()):
        raise CorralError("invalid_value", f"{name} is not an id", field=f"/{name}", hint="use next of the page before")
    return value


def choice_of(request: Request, name: str, choices: tuple[str, ...], default: str) -> str:
    """A query parameter that is one of some words."""
    value = request.query.get(name, default)
    if value not in choices:
        raise CorralError("invalid_value", f"{name} is not one of {', '.join(choices)}", field=f"/{name}")
    return value


async def until_stop(services: Services, source: AsyncIterator[StreamEvent]) -> AsyncIterator[StreamEvent]:
    """The same events; once the service stops, or others serve, the client is sent there at once, in the middle of much too."""
    core = services.core
    departing = asyncio.ensure_future(core.departing.wait())
    pending: asyncio.Future[StreamEvent | None] | None = None
    try:
        while True:
            core.check_staying()
            pending = asyncio.ensure_future(anext(source, None))
            await asyncio.wait({pending, departing}, return_when=asyncio.FIRST_COMPLETED)
            if not pending.done():
                core.check_staying()
            event = await pending
            if event is None:
                core.check_open()
                return
            yield event
            if event.kind == "ended":
                return
    except CorralError as error:
        raise core.as_seen(error) from error
    finally:
        departing.cancel()
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()
