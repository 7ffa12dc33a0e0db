"""The handler that moves the ends of a sandbox."""

from __future__ import annotations

from typing import Any

from corral.api.calls import Reply, Request, Route, object_of
from corral.domain.expiry import NONE, UNLIMITED_S
from corral.domain.quantities import parse_seconds, shown
from corral.errors import CorralError
from corral.services.control import Services
from corral.services.expiry import Extension

FIELDS = ("ttl_s", "idle_timeout_s")
SECONDS: dict[str, Any] = {
    "description": "Seconds from now; none: without a limit, where policy allows it.",
    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": NONE}, {"type": "null"}],
}
SCHEMAS: dict[str, Any] = {
    "ExpiryRequest": {"type": "object", "additionalProperties": False, "properties": dict.fromkeys(FIELDS, SECONDS)}
}


async def extend(services: Services, request: Request, sandbox_id: str) -> Reply:
    """The sandbox, with its new ends."""
    document = await object_of(request)
    for name in document:
        if name not in FIELDS:
            hint = f"this call takes {' and '.join(FIELDS)}"
            raise CorralError("invalid_value", f"there is no field {shown(name)}", hint=hint, field=f"/{name[:64]}")
    wish = Extension(*(_seconds(document.get(name), name) for name in FIELDS))
    if wish == Extension():
        hint = f"give {' or '.join(FIELDS)}"
        raise CorralError("invalid_value", "nothing is to be changed", hint=hint, field=f"/{FIELDS[0]}")
    lease = request.headers.get("corral-lease")
    view = await services.expiry.extend(request.caller, sandbox_id, wish, lease)
    return Reply(200, services.documents.sandbox(view))


def _seconds(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if value == NONE:
        return UNLIMITED_S
    try:
        if isinstance(value, str):
            raise ValueError(f"a time is a number of seconds, or {NONE}, not {shown(value)}")
        seconds = parse_seconds(value)
        if seconds == 0:
            raise ValueError("a time must be greater than 0")
    except ValueError as error:
        hint = f"decimal seconds, for example 3600, or {NONE}"
        raise CorralError("invalid_value", str(error), hint=hint, field=f"/{name}") from error
    return seconds


ROUTES: tuple[Route, ...] = (Route("PATCH", "/v1/sandboxes/{sandbox_id}", extend),)
