"""`c.keys`, `c.tenants` and `c.whoami()` of both clients. Documents are those of the API."""

from __future__ import annotations

from collections.abc import Sequence

from corral.client.calls import Calls
from corral.client.effects import drive
from corral.client.line import Json
from corral.client.transport import quote

KEYS, TENANTS = "/v1/keys", "/v1/tenants"


class IdentitySteps:
    """The calls, for whatever effects the line has."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._line = calls.line

    async def whoami(self) -> Json:
        return await self._line.request("GET", "/v1/whoami")

    async def create_key(
        self, scopes: Sequence[str], tenant: str | None, user: str | None, name: str | None, expires_in_s: float | None
    ) -> Json:
        asked = {"scopes": list(scopes), "tenant": tenant, "user": user, "name": name, "expires_in_s": expires_in_s}
        return await self._line.request("POST", KEYS, asked)

    async def keys(self, tenant: str | None) -> list[Json]:
        return await self._calls.pages(KEYS, {"tenant": tenant})

    async def key(self, key_id: str) -> Json:
        return await self._line.request("GET", f"{KEYS}/{quote(key_id)}")

    async def revoke(self, key_id: str) -> Json:
        return await self._line.request("DELETE", f"{KEYS}/{quote(key_id)}")

    async def rotate(self, key_id: str, overlap_s: float | None, expires_in_s: float | None) -> Json:
        asked = {"overlap_s": overlap_s, "expires_in_s": expires_in_s}
        return await self._line.request("POST", f"{KEYS}/{quote(key_id)}/rotate", asked)

    async def create_tenant(self, tenant_id: str, name: str | None) -> Json:
        return await self._line.request("POST", TENANTS, {"id": tenant_id, "name": name})

    async def tenants(self) -> list[Json]:
        return await self._calls.pages(TENANTS)

    async def disable(self, tenant_id: str, disabled: bool) -> Json:
        return await self._line.request("PATCH", f"{TENANTS}/{quote(tenant_id)}", {"disabled": disabled})

    async def delete_tenant(self, tenant_id: str) -> Json:
        return await self._line.request("DELETE", f"{TENANTS}/{quote(tenant_id)}")


class Keys:
    """`c.keys`."""

    def __init__(self, calls: Calls) -> None:
        self._steps = IdentitySteps(calls)

    def create(
        self,
        scopes: Sequence[str] = ("run",),
        *,
        tenant: str | None = None,
        user: str | None = None,
        name: str | None = None,
        expires_in_s: float | None = None,
    ) -> Json:
        """A key; its member `key` is the key itself, this once."""
        return drive(self._steps.create_key(scopes, tenant, user, name, expires_in_s))

    def list(self, tenant: str | None = None) -> list[Json]:
        """Newest first: of all tenants for an admin, else of one's own."""
        return drive(self._steps.keys(tenant))

    def get(self, key_id: str) -> Json:
        """One; `not_found`."""
        return drive(self._steps.key(key_id))

    def revoke(self, key_id: str) -> Json:
        """Refuse it from now on. Again is no error."""
        return drive(self._steps.revoke(key_id))

    def rotate(self, key_id: str, *, overlap_s: float | None = None, expires_in_s: float | None = None) -> Json:
        """A successor with the same scopes and leases; the old key goes on for the overlap, a day by default."""
        return drive(self._steps.rotate(key_id, overlap_s, expires_in_s))


class Tenants:
    """`c.tenants`. Needs the scope admin."""

    def __init__(self, calls: Calls) -> None:
        self._steps = IdentitySteps(calls)

    def create(self, tenant_id: str, *, name: str | None = None) -> Json:
        """`already_exists` for an id that is, or was, somebody's."""
        return drive(self._steps.create_tenant(tenant_id, name))

    def list(self) -> list[Json]:
        """By id: `id name state created_at created_by disabled_at`."""
        return drive(self._steps.tenants())

    def disable(self, tenant_id: str) -> Json:
        """Refuse its keys from now on; what runs goes on."""
        return drive(self._steps.disable(tenant_id, True))

    def enable(self, tenant_id: str) -> Json:
        """Take its keys again."""
        return drive(self._steps.disable(tenant_id, False))

    def delete(self, tenant_id: str) -> Json:
        """For good; `tenant_in_use` unless it is disabled and nothing goes on in it."""
        return drive(self._steps.delete_tenant(tenant_id))


class AsyncKeys:
    """`c.keys` of `AsyncCorral`."""

    def __init__(self, calls: Calls) -> None:
        self._steps = IdentitySteps(calls)

    async def create(
        self,
        scopes: Sequence[str] = ("run",),
        *,
        tenant: str | None = None,
        user: str | None = None,
        name: str | None = None,
        expires_in_s: float | None = None,
    ) -> Json:
        """A key; its member `key` is the key itself, this once."""
        return await self._steps.create_key(scopes, tenant, user, name, expires_in_s)

    async def list(self, tenant: str | None = None) -> list[Json]:
        """Newest first: of all tenants for an admin, else of one's own."""
        return await self._steps.keys(tenant)

    async def get(self, key_id: str) -> Json:
        """One; `not_found`."""
        return await self._steps.key(key_id)

    async def revoke(self, key_id: str) -> Json:
        """Refuse it from now on. Again is no error."""
        return await self._steps.revoke(key_id)

    async def rotate(self, key_id: str, *, overlap_s: float | None = None, expires_in_s: float | None = None) -> Json:
        """A successor with the same scopes and leases; the old key goes on for the overlap, a day by default."""
        return await self._steps.rotate(key_id, overlap_s, expires_in_s)


class AsyncTenants:
    """`c.tenants` of `AsyncCorral`. Needs the scope admin."""

    def __init__(self, calls: Calls) -> None:
        self._steps = IdentitySteps(calls)

    async def create(self, tenant_id: str, *, name: str | None = None) -> Json:
        """`already_exists` for an id that is, or was, somebody's."""
        return await self._steps.create_tenant(tenant_id, name)

    async def list(self) -> list[Json]:
        """By id: `id name state created_at created_by disabled_at`."""
        return await self._steps.tenants()

    async def disable(self, tenant_id: str) -> Json:
        """Refuse its keys from now on; what runs goes on."""
        return await self._steps.disable(tenant_id, True)

    async def enable(self, tenant_id: str) -> Json:
        """Take its keys again."""
        return await self._steps.disable(tenant_id, False)

    async def delete(self, tenant_id: str) -> Json:
        """For good; `tenant_in_use` unless it is disabled and nothing goes on in it."""
        return await self._steps.delete_tenant(tenant_id)
