"""Handlers about templates. The body of a build names a recipe of the operator; no path of the host is taken from a request."""

from __future__ import annotations

from corral.api.calls import Json, Reply, Request, document_of, seconds_of, seen_by
from corral.domain.identity import ADMIN
from corral.domain.quantities import shown
from corral.errors import CorralError
from corral.services.control import Services

FIELDS = frozenset({"name", "refresh"})
BUILD_WAIT_S = 600.0


async def list_templates(services: Services, request: Request) -> Reply:
    items = [_as_seen(services, request, known) for known in await services.templates.every()]
    return Reply(200, {"items": items, "next": None})


async def get_template(services: Services, request: Request, name: str) -> Reply:
    whose = None if ADMIN in request.caller.scopes else request.caller.tenant_id
    document = await services.templates.get(name, seconds_of(request, "wait", 0.0), whose)
    return Reply(200, _as_seen(services, request, document))


def _as_seen(services: Services, request: Request, document: Json) -> Json:
    """Why it is not there, and what a build says, without what lies where; all of it for an admin."""
    if ADMIN in request.caller.scopes:
        return document
    discretion, seen = services.core.discretion, seen_by(services, request.caller)
    reason, build = document["reason"], document["build"]
    if build is not None:
        error = build["error"] and seen(CorralError.from_problem(build["error"])).to_problem()
        build = {**build, "text": discretion.text(build["text"]), "error": error}
    return {**document, "reason": reason and discretion.text(reason), "build": build}


async def build_template(services: Services, request: Request) -> Reply:
    document = await document_of(request)
    if not isinstance(document, dict):
        raise CorralError("invalid_value", "the body is not an object", field="")
    for member in document:
        if member not in FIELDS:
            hint = "known: name, refresh; what it is made from stands in the operator's recipe"
            raise CorralError("invalid_value", f"unknown member {shown(member)}", field=f"/{member}", hint=hint)
    name, refresh = document.get("name"), document.get("refresh", False)
    if not isinstance(name, str):
        raise CorralError("invalid_value", "name must be the name of a template", field="/name")
    if not isinstance(refresh, bool):
        raise CorralError("invalid_value", "refresh must be true or false", field="/refresh")
    made = await services.templates.build(name, refresh=refresh, wait_s=seconds_of(request, "wait", BUILD_WAIT_S))
    return Reply(202 if made["build"] else 200, made)


async def delete_template(services: Services, request: Request, name: str) -> Reply:
    return Reply(200, await services.templates.remove(name))
