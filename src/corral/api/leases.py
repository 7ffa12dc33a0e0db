"""Handlers about leases: to get a sandbox, to keep it, to give it back, and who has what."""

from __future__ import annotations

import math
from typing import Any

from corral.api.calls import Reply, Request, Route, document_of, ident_of, integer_of, object_of
from corral.domain.contention import CONTENTIONS
from corral.domain.fence import Fence
from corral.domain.lease import MAX_OWNER
from corral.domain.quantities import shown
from corral.errors import CorralError
from corral.services.control import Services
from corral.services.leases import Held, Wish, lease_document

Json = dict[str, Any]
TTL_S = 60.0
LEAST_TTL_S, MOST_TTL_S = 1.0, 86_400.0
WAIT_S, MOST_WAIT_S = 30.0, 3600.0
ATTACH = frozenset({"owner", "ttl_s", "contention", "wait_s", "session"})
RENEW = frozenset({"owner", "ttl_s"})
RELEASE = frozenset({"owner", "keep"})


async def attach(services: Services, request: Request, sandbox_id: str) -> Reply:
    """A lease of the sandbox, or of one like it."""
    document = _members(await document_of(request), ATTACH)
    owner = _text(document, "owner")
    if owner is None:
        hint = "who holds it, such as session/tool-call"
        raise CorralError("invalid_value", "owner is missing", field="/owner", hint=hint)
    contention = document.get("contention")
    if contention is not None and contention not in CONTENTIONS:
        hint = " or ".join(CONTENTIONS)
        raise CorralError(
            "invalid_value", f"there is no contention {shown(contention)}", field="/contention", hint=hint
        )
    ttl_ms = _ttl_ms(document)
    wish = Wish(
        owner,
        round(TTL_S * 1000) if ttl_ms is None else ttl_ms,
        contention,
        _seconds(document, "wait_s", 0.0, MOST_WAIT_S, WAIT_S),
        _text(document, "session"),
    )
    key = request.headers.get("idempotency-key")
    held = await services.leases.attach(request.caller, sandbox_id, wish, key)
    return Reply(200, lease_document(held), {"Location": f"/v1/sandboxes/{held.lease.sandbox_id}"})


async def renew(services: Services, request: Request, sandbox_id: str) -> Reply:
    """The committed expiry."""
    document = _members(await object_of(request), RENEW)
    fence = _fence(request)
    held = await services.leases.renew(request.caller, sandbox_id, fence, _text(document, "owner"), _ttl_ms(document))
    return Reply(200, lease_document(held))


async def release(services: Services, request: Request, sandbox_id: str) -> Reply:
    """Nobody's; what it was used for is cleaned up behind this answer."""
    document = _members(await object_of(request), RELEASE)
    keep = document.get("keep", False)
    if not isinstance(keep, bool):
        raise CorralError("invalid_value", "keep is neither true nor false", field="/keep")
    fence = _fence(request)
    view = await services.leases.release(request.caller, sandbox_id, fence, _text(document, "owner"), keep=keep)
    return Reply(200, services.documents.sandbox(view))


async def list_leases(services: Services, request: Request) -> Reply:
    """Of the tenant's sandboxes."""
    limit = integer_of(request, "limit", 100, 1, 1000)
    found, following = await services.leases.page(request.caller, after=ident_of(request, "after"), limit=limit)
    items = []
    for seen in found:
        assert seen.view.lease is not None
        left_ms = max(0, seen.view.lease.expires_at - seen.now_ms)
        items.append(lease_document(Held(seen.view, seen.view.lease, left_ms)))
    return Reply(200, {"items": items, "next": following})


def _members(document: Any, known: frozenset[str]) -> Json:
    if not isinstance(document, dict):
        raise CorralError("invalid_value", "the body is not an object", field="")
    for name in document:
        if name not in known:
            hint = f"known: {', '.join(sorted(known))}"
            raise CorralError("invalid_value", f"there is no member {shown(name)}", field=f"/{name[:100]}", hint=hint)
    return document


def _text(document: Json, name: str) -> str | None:
    value = document.get(name)
    if value is None:
        return None
    good = isinstance(value, str) and 1 <= len(value) <= MAX_OWNER and value.isprintable() and value == value.strip()
    if not good:
        hint = f"1 to {MAX_OWNER} printable characters, such as session/tool-call"
        raise CorralError("invalid_value", f"{shown(value)} is no {name}", field=f"/{name}", hint=hint)
    return str(value)


def _seconds(document: Json, name: str, least: float, most: float, default: float) -> float:
    value = document.get(name)
    if value is None:
        return default
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not least <= value <= most:
        detail = f"{name} is a number of seconds from {least:g} to {most:g}, not {shown(value)}"
        raise CorralError("invalid_value", detail, field=f"/{name}", hint="for example 30")
    return float(value)


def _ttl_ms(document: Json) -> int | None:
    if document.get("ttl_s") is None:
        return None
    return round(_seconds(document, "ttl_s", LEAST_TTL_S, MOST_TTL_S, TTL_S) * 1000)


def _fence(request: Request) -> Fence:
    given = request.headers.get("corral-lease")
    if given is None:
        hint = "send the lease's `lease` as the header Corral-Lease"
        raise CorralError("invalid_value", "the header Corral-Lease is missing", hint=hint)
    try:
        return Fence.parse(given)
    except ValueError as error:
        hint = "as the lease's document gives it"
        raise CorralError("invalid_value", "Corral-Lease is not <incarnation>.<lease_version>", hint=hint) from error


ROUTES = (
    Route("POST", "/v1/sandboxes/{sandbox_id}/attach", attach, starts=True),
    Route("POST", "/v1/sandboxes/{sandbox_id}/renew", renew),
    Route("POST", "/v1/sandboxes/{sandbox_id}/release", release),
    Route("GET", "/v1/leases", list_leases, of_tenant=True),
)
