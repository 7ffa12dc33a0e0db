"""Handlers about tenants, users and keys, and who the caller is."""

from __future__ import annotations

from typing import Any

from corral.api.calls import (
    ANY_KEY,
    Reply,
    Request,
    Route,
    idempotency_of,
    ident_of,
    integer_of,
    object_of,
)
from corral.domain.identity import (
    ADMIN,
    MAX_LIFE_MS,
    TENANT,
    check_name,
    check_tenant_id,
    check_user_id,
    parse_scopes,
)
from corral.domain.quantities import shown
from corral.errors import CorralError
from corral.services.control import Services
from corral.services.events import Caller

Json = dict[str, Any]


# -- parts of requests ---------------------------------------------------------------------------------------------------------
async def _members(request: Request, *known: str) -> Json:
    document = await object_of(request)
    for name in document:
        if name not in known:
            hint = f"known: {', '.join(known)}"
            raise CorralError("invalid_value", f"unknown member {shown(name)}", field=f"/{name[:100]}", hint=hint)
    return document


def _id(document: Json, name: str, check: Any) -> str | None:
    value = document.get(name)
    return None if value is None else check(value, f"/{name}")


def _flag(document: Json, name: str) -> bool | None:
    value = document.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise CorralError("invalid_value", f"{name} is neither true nor false", field=f"/{name}")


def _milliseconds(document: Json, name: str, least: float) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= MAX_LIFE_MS / 1000:
        return int(value * 1000)
    hint = f"a number from {least:g} to {MAX_LIFE_MS // 1000}"
    raise CorralError("invalid_value", f"{name} is not a number of seconds", field=f"/{name}", hint=hint)


def _tenant(request: Request) -> str | None:
    """The tenant that a query names."""
    value = request.query.get("tenant")
    return None if value is None else check_tenant_id(value, "/tenant")


async def acting(services: Services, request: Request, route: Route) -> Caller:
    """The caller in the tenant that the query names; `not_found` for one that he does not act on.

    What would begin, change or read something in another's name is refused: only a key of the tenant does that.
    """
    tenant = _tenant(request)
    caller = await services.identity.acting(request.caller, tenant)
    if caller.tenant_id != request.caller.tenant_id and not route.of_tenant:
        hint = "use a key of the tenant; an admin lists, inspects, cancels and deletes"
        raise CorralError("invalid_value", "this call takes no tenant", hint=hint, field="/tenant")
    return caller


def _page(request: Request) -> Json:
    return {"after": ident_of(request, "after"), "limit": integer_of(request, "limit", 100, 1, 1000)}


# -- who am I ------------------------------------------------------------------------------------------------------------------
async def whoami(services: Services, request: Request) -> Reply:
    return Reply(200, services.identity.whoami(request.caller))


# -- tenants -------------------------------------------------------------------------------------------------------------------
async def create_tenant(services: Services, request: Request) -> Reply:
    document = await _members(request, "id", "name")
    made = await services.identity.create_tenant(
        request.caller,
        _id(document, "id", check_tenant_id),
        check_name(document.get("name")),
        idempotency_of(request, "POST /v1/tenants", document),
    )
    return Reply(201, made, {"Location": f"/v1/tenants/{made['id']}"})


async def list_tenants(services: Services, request: Request) -> Reply:
    items, following = await services.identity.tenants(**_page(request))
    return Reply(200, {"items": items, "next": following})


async def get_tenant(services: Services, request: Request, tenant_id: str) -> Reply:
    return Reply(200, await services.identity.tenant(request.caller, tenant_id))


async def update_tenant(services: Services, request: Request, tenant_id: str) -> Reply:
    document = await _members(request, "name", "disabled")
    name, disabled = check_name(document.get("name")), _flag(document, "disabled")
    return Reply(200, await services.identity.update_tenant(request.caller, tenant_id, name, disabled))


async def delete_tenant(services: Services, request: Request, tenant_id: str) -> Reply:
    return Reply(200, await services.identity.delete_tenant(request.caller, tenant_id))


# -- users ---------------------------------------------------------------------------------------------------------------------
async def create_user(services: Services, request: Request) -> Reply:
    document = await _members(request, "id", "name", "tenant")
    made = await services.identity.create_user(
        request.caller,
        _id(document, "tenant", check_tenant_id),
        _id(document, "id", check_user_id),
        check_name(document.get("name")),
        idempotency_of(request, "POST /v1/users", document),
    )
    return Reply(201, made, {"Location": f"/v1/users/{made['id']}"})


async def list_users(services: Services, request: Request) -> Reply:
    items, following = await services.identity.users(request.caller, _tenant(request), **_page(request))
    return Reply(200, {"items": items, "next": following})


async def get_user(services: Services, request: Request, user_id: str) -> Reply:
    return Reply(200, await services.identity.user(request.caller, _tenant(request), user_id))


async def update_user(services: Services, request: Request, user_id: str) -> Reply:
    document = await _members(request, "name", "disabled")
    name, disabled = check_name(document.get("name")), _flag(document, "disabled")
    made = await services.identity.update_user(request.caller, _tenant(request), user_id, name, disabled)
    return Reply(200, made)


async def delete_user(services: Services, request: Request, user_id: str) -> Reply:
    await services.identity.delete_user(request.caller, _tenant(request), user_id)
    return Reply(200, {})


# -- keys ----------------------------------------------------------------------------------------------------------------------
async def create_key(services: Services, request: Request) -> Reply:
    document = await _members(request, "tenant", "user", "name", "scopes", "expires_in_s")
    made = await services.identity.create_key(
        request.caller,
        _id(document, "tenant", check_tenant_id),
        _id(document, "user", check_user_id),
        check_name(document.get("name")),
        parse_scopes(document.get("scopes", ["run"])),
        _milliseconds(document, "expires_in_s", 1),
        idempotency_of(request, "POST /v1/keys", document),
    )
    return Reply(201, made, {"Location": f"/v1/keys/{made['id']}", "Cache-Control": "no-store"})


async def list_keys(services: Services, request: Request) -> Reply:
    items, following = await services.identity.keys(request.caller, _tenant(request), **_page(request))
    return Reply(200, {"items": items, "next": following})


async def get_key(services: Services, request: Request, key_id: str) -> Reply:
    return Reply(200, await services.identity.key(request.caller, key_id))


async def revoke_key(services: Services, request: Request, key_id: str) -> Reply:
    return Reply(200, await services.identity.revoke_key(request.caller, key_id))


async def rotate_key(services: Services, request: Request, key_id: str) -> Reply:
    document = await _members(request, "expires_in_s", "overlap_s")
    made = await services.identity.rotate_key(
        request.caller,
        key_id,
        _milliseconds(document, "expires_in_s", 1),
        _milliseconds(document, "overlap_s", 0),
        idempotency_of(request, f"POST /v1/keys/{key_id}/rotate", document),
    )
    return Reply(201, made, {"Location": f"/v1/keys/{made['id']}", "Cache-Control": "no-store"})


ROUTES: tuple[Route, ...] = (
    Route("GET", "/v1/whoami", whoami, scope=ANY_KEY),
    Route("POST", "/v1/tenants", create_tenant, scope=ADMIN),
    Route("GET", "/v1/tenants", list_tenants, scope=ADMIN),
    Route("GET", "/v1/tenants/{tenant_id}", get_tenant, scope=TENANT),
    Route("PATCH", "/v1/tenants/{tenant_id}", update_tenant, scope=ADMIN),
    Route("DELETE", "/v1/tenants/{tenant_id}", delete_tenant, scope=ADMIN),
    Route("POST", "/v1/users", create_user, scope=TENANT),
    Route("GET", "/v1/users", list_users, scope=TENANT),
    Route("GET", "/v1/users/{user_id}", get_user, scope=TENANT),
    Route("PATCH", "/v1/users/{user_id}", update_user, scope=TENANT),
    Route("DELETE", "/v1/users/{user_id}", delete_user, scope=TENANT),
    Route("POST", "/v1/keys", create_key, scope=TENANT),
    Route("GET", "/v1/keys", list_keys, scope=TENANT),
    Route("GET", "/v1/keys/{key_id}", get_key, scope=ANY_KEY),
    Route("DELETE", "/v1/keys/{key_id}", revoke_key, scope=TENANT),
    Route("POST", "/v1/keys/{key_id}/rotate", rotate_key, scope=TENANT),
)
