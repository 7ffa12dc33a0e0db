"""Tenants, users and keys: made, changed and ended by those whose key allows it, each with a row of the audit that says by whom.

A caller with `admin` acts on every tenant, one with `tenant` on his own: others are not there for him, as if they did not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from corral.domain.identity import (
    ADMIN,
    OVERLAP_MS,
    SCOPES,
    SECRET_BYTES,
    TENANT,
    KeyRecord,
    TenantRecord,
    UserRecord,
    check_grant,
    check_may,
    check_revoke,
    key_hash,
    key_text,
)
from corral.domain.ids import ulid_of
from corral.domain.records import AuditRecord, Idempotency
from corral.errors import CorralError
from corral.services.admission import HOLDS_S, Admission
from corral.services.control import Core
from corral.services.documents import moment
from corral.services.events import Caller

Json = dict[str, Any]
Cancel = Callable[[Caller, str, str], Awaitable[None]]
"""Asks a run to end: the caller, its id, why."""
MOST = 1000
"""Runs of a queue that are looked at in one step."""
LOOK_S = 2.0
"""How often another worker's first second tenant is looked for."""


class Identity:
    """See the module docstring."""

    def __init__(self, core: Core, cancel: Cancel) -> None:
        self._core = core
        self._cancel = cancel
        self.admission = Admission(core)

    async def begin(self) -> None:
        """Learn how many tenants there are, and go on learning it where others may make one."""
        await self._count()
        if not self._core.coordination.alone:
            self._core.spawn(self._follow(), "tenants")

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._count()
            except CorralError as error:
                if error.code != "store_error":
                    raise

    async def _count(self) -> None:
        """Several tenants on one host: limits that are only watched are not enough any more, unless the policy says so."""
        core = self._core
        shared = await core.store.count_tenants() > 1
        if shared != core.policy.shared:
            core.policy = replace(core.policy, shared=shared)

    def whoami(self, caller: Caller) -> Json:
        """Who the caller is taken for, and what he may do."""
        by = "key" if caller.key_id is not None else "token" if caller.owner.startswith("user:") else "server"
        return {
            "tenant": caller.tenant_id,
            "user": caller.user_id,
            "key": caller.key_id,
            "by": by,
            "owner": caller.owner,
            "scopes": [name for name in SCOPES if name in caller.scopes],
            "expires_at": moment(caller.ends_at),
        }

    # -- tenants ---------------------------------------------------------------------------------------------------------------
    async def create_tenant(
        self, caller: Caller, tenant_id: str | None, name: str | None, idempotency: Idempotency | None
    ) -> Json:
        """`already_exists` for an id that is or was somebody's."""
        core = self._core
        chosen = tenant_id or core.id("ten")
        made = TenantRecord(chosen, name or chosen, core.now_ms(), caller.actor)
        audit = _audit(caller, chosen, "tenant.created", chosen, {"name": made.name})
        tenant, _ = await core.store.create_tenant(made, audit, idempotency)
        await self._count()
        return tenant_document(tenant)

    async def tenants(self, *, after: str | None, limit: int) -> tuple[list[Json], str | None]:
        """By id, and the id to go on after."""
        found = await self._core.store.list_tenants(after=after, limit=limit + 1)
        following = found[limit - 1].tenant_id if len(found) > limit else None
        return [tenant_document(tenant) for tenant in found[:limit]], following

    async def tenant(self, caller: Caller, tenant_id: str) -> Json:
        """One; `not_found` for a foreign one."""
        return tenant_document(await self._tenant(caller, tenant_id))

    async def _tenant(self, caller: Caller, tenant_id: str) -> TenantRecord:
        found = None
        if ADMIN in caller.scopes or tenant_id == caller.tenant_id:
            found = await self._core.store.get_tenant(tenant_id)
        if found is None:
            raise CorralError("not_found", f"there is no tenant {tenant_id[:64]}", hint="corral tenant ls lists them")
        return found

    async def update_tenant(self, caller: Caller, tenant_id: str, name: str | None, disabled: bool | None) -> Json:
        """Disabled: its keys are refused from the next moment on; what runs goes on, what waits in the queue is cancelled."""
        core = self._core
        audit = _audit(caller, tenant_id, "tenant.changed", tenant_id, {"name": name, "disabled": disabled})
        tenant = await core.store.update_tenant(tenant_id, audit, name=name, disabled=disabled)
        self.admission.forget()
        if disabled:
            asked: set[str] = set()
            await self._cancel_waiting(caller, tenant_id, asked)
            core.spawn(self._cancel_late(caller, tenant_id, asked), f"{tenant_id} disabled")
        return tenant_document(tenant)

    async def _cancel_waiting(self, caller: Caller, tenant_id: str, asked: set[str]) -> None:
        """Ask each run that waits for room to end; those in `asked` have been. Who missed this is refused at his turn (`Queue.turn`)."""
        its = replace(caller, tenant_id=tenant_id)
        for each in await self._core.store.list_queue(tenant_id, limit=MOST):
            if each.run_id not in asked:
                asked.add(each.run_id)
                await self._cancel(its, each.run_id, "cancelled")

    async def _cancel_late(self, caller: Caller, tenant_id: str, asked: set[str]) -> None:
        """Those who were let in a moment ago, here or at another replica, and those behind the first `MOST`."""
        until = asyncio.get_running_loop().time() + 2 * HOLDS_S
        known = -1
        while asyncio.get_running_loop().time() < until or len(asked) > known:
            known = len(asked)
            await asyncio.sleep(HOLDS_S)
            tenant = await self._core.store.get_tenant(tenant_id)
            if tenant is None or tenant.disabled_at is None:
                return
            await self._cancel_waiting(caller, tenant_id, asked)

    async def delete_tenant(self, caller: Caller, tenant_id: str) -> Json:
        """For good. `tenant_in_use` while it has something that goes on, or is not disabled."""
        store = self._core.store
        tenant = await self._tenant(caller, tenant_id)
        if tenant.disabled_at is not None:
            # Who was let in a moment ago, here or at another replica, begins nothing in it once it is gone.
            await asyncio.sleep(2 * HOLDS_S)
        gone = await store.delete_tenant(tenant_id, _audit(caller, tenant_id, "tenant.deleted", tenant_id, {}))
        self.admission.forget()
        await self._count()
        return tenant_document(gone)

    async def acting(self, caller: Caller, tenant_id: str | None) -> Caller:
        """The same caller, and his name in the audit, in another tenant, a disabled one too; `not_found` unless he is an admin."""
        tenant = await self._whose(caller, tenant_id)
        return caller if tenant == caller.tenant_id else replace(caller, tenant_id=tenant)

    # -- users -----------------------------------------------------------------------------------------------------------------
    async def create_user(
        self, caller: Caller, tenant_id: str | None, user_id: str | None, name: str | None, idem: Idempotency | None
    ) -> Json:
        """`already_exists`."""
        core = self._core
        tenant = await self._whose(caller, tenant_id)
        made = UserRecord(tenant, user_id or core.id("usr"), core.now_ms(), name)
        audit = _audit(caller, tenant, "user.created", made.user_id, {"name": name})
        user, _ = await core.store.create_user(made, audit, idem)
        return user_document(user)

    async def users(
        self, caller: Caller, tenant_id: str | None, *, after: str | None, limit: int
    ) -> tuple[list[Json], str | None]:
        """Of one tenant, by id."""
        tenant = await self._whose(caller, tenant_id)
        found = await self._core.store.list_users(tenant, after=after, limit=limit + 1)
        return [user_document(u) for u in found[:limit]], found[limit - 1].user_id if len(found) > limit else None

    async def user(self, caller: Caller, tenant_id: str | None, user_id: str) -> Json:
        """One; `not_found`."""
        found = await self._core.store.get_user(await self._whose(caller, tenant_id), user_id)
        if found is None:
            raise CorralError("not_found", f"there is no user {user_id[:64]}")
        return user_document(found)

    async def update_user(
        self, caller: Caller, tenant_id: str | None, user_id: str, name: str | None, disabled: bool | None
    ) -> Json:
        """Disabled: keys and tokens of the user are refused. `forbidden` as for `delete_user`, either way."""
        tenant = await self._whose(caller, tenant_id)
        if disabled is not None:
            await self._check_keys_of(caller, tenant, user_id)
        audit = _audit(caller, tenant, "user.changed", user_id, {"name": name, "disabled": disabled})
        user = await self._core.store.update_user(tenant, user_id, audit, name=name, disabled=disabled)
        self.admission.forget()
        return user_document(user)

    async def delete_user(self, caller: Caller, tenant_id: str | None, user_id: str) -> None:
        """His keys are revoked; `forbidden` to whom one of them could not be revoked by."""
        tenant = await self._whose(caller, tenant_id)
        await self._check_keys_of(caller, tenant, user_id)
        await self._core.store.delete_user(tenant, user_id, _audit(caller, tenant, "user.deleted", user_id, {}))
        self.admission.forget()

    async def _check_keys_of(self, caller: Caller, tenant_id: str, user_id: str) -> None:
        """What is done to a user is done to his keys: `forbidden` if one that lets somebody in has what the caller's has not."""
        after: str | None = None
        while ADMIN not in caller.scopes:
            found, now = await self._core.store.list_keys(tenant_id, after=after, limit=1000)
            for key in found:
                if key.user_id == user_id and key.state(now) == "active":
                    check_revoke(caller.scopes, key.granted)
            if len(found) < 1000:
                return
            after = found[-1].key_id

    async def _whose(self, caller: Caller, tenant_id: str | None) -> str:
        """The tenant that is meant; `not_found` for one that the caller does not act on."""
        if tenant_id is None or tenant_id == caller.tenant_id:
            return caller.tenant_id
        return (await self._tenant(caller, tenant_id)).tenant_id

    # -- keys ------------------------------------------------------------------------------------------------------------------
    async def create_key(
        self,
        caller: Caller,
        tenant_id: str | None,
        user_id: str | None,
        name: str | None,
        scopes: Sequence[str],
        life_ms: int | None,
        idempotency: Idempotency | None,
    ) -> Json:
        """The key, with its text: this once and never again (None if it was made, and used, before under the idempotency key)."""
        core = self._core
        tenant = await self._whose(caller, tenant_id)
        now = core.now_ms()
        expires_at = None if life_ms is None else now + life_ms
        check_grant(caller.scopes, caller.ends_at, scopes, expires_at)
        secret = core.entropy(SECRET_BYTES)
        wanted = KeyRecord(
            key_id=core.id("key"),
            tenant_id=tenant,
            key_hash=key_hash(secret),
            scopes=list(scopes),
            created_at=now,
            created_by=caller.actor,
            user_id=user_id,
            name=name,
            expires_at=expires_at,
        )
        audit = _audit(
            caller,
            tenant,
            "key.created",
            wanted.key_id,
            {"scopes": list(scopes), "for": user_id, "expires_at": expires_at},
        )
        key, fresh = await core.store.create_key(wanted, audit, idempotency)
        self.admission.forget()
        return {**key_document(key, now), "key": key_text(key.key_id, secret) if fresh else None}

    async def keys(
        self, caller: Caller, tenant_id: str | None, *, after: str | None, limit: int
    ) -> tuple[list[Json], str | None]:
        """Newest first. An admin who names no tenant sees those of all."""
        whose = None if tenant_id is None and ADMIN in caller.scopes else await self._whose(caller, tenant_id)
        found, now = await self._core.store.list_keys(whose, after=after, limit=limit + 1)
        return [key_document(k, now) for k in found[:limit]], found[limit - 1].key_id if len(found) > limit else None

    async def key(self, caller: Caller, key_id: str) -> Json:
        """One; `not_found` for a foreign one. Everybody may look at his own."""
        if key_id != caller.key_id:
            check_may(caller.scopes, TENANT)
        view = await self._core.store.find_key(key_id)
        if view is None or (ADMIN not in caller.scopes and view.key.tenant_id != caller.tenant_id):
            raise CorralError("not_found", f"there is no key {key_id[:64]}", hint="corral key ls lists them")
        return key_document(view.key, view.now)

    async def revoke_key(self, caller: Caller, key_id: str) -> Json:
        """At once and for good. Again: the same answer. Who may not give what a key has may not take it away either."""
        view = await self._core.store.find_key(key_id)
        if view is not None and (ADMIN in caller.scopes or view.key.tenant_id == caller.tenant_id):
            check_revoke(caller.scopes, view.key.granted)
        audit = _audit(caller, caller.tenant_id, "key.revoked", key_id, {})
        key = await self._core.store.revoke_key(key_id, self._reach(caller), audit)
        self.admission.forget()
        return key_document(key, self._core.now_ms())

    async def rotate_key(
        self, caller: Caller, key_id: str, life_ms: int | None, overlap_ms: int | None, idempotency: Idempotency | None
    ) -> Json:
        """A successor that has what the key has, leases included; the key itself goes on for the overlap, a day if nothing is said.

        `life_ms` None: it lives as long as the old one was made for.
        """
        core = self._core
        view = await core.store.find_key(key_id)
        if view is None or (ADMIN not in caller.scopes and view.key.tenant_id != caller.tenant_id):
            raise CorralError("not_found", f"there is no key {key_id[:64]}", hint="corral key ls lists them")
        old, now = view.key, core.now_ms()
        if life_ms is None and old.expires_at is not None:
            life_ms = old.expires_at - old.created_at
        expires_at = None if life_ms is None else now + life_ms
        check_grant(caller.scopes, caller.ends_at, old.granted, expires_at)
        secret = core.entropy(SECRET_BYTES)
        wanted = KeyRecord(
            core.id("key"), old.tenant_id, key_hash(secret), list(old.granted), now, caller.actor, expires_at=expires_at
        )
        audit = _audit(caller, old.tenant_id, "key.rotated", wanted.key_id, {"from": key_id, "expires_at": expires_at})
        overlap = OVERLAP_MS if overlap_ms is None else overlap_ms
        key, fresh = await core.store.rotate_key(key_id, self._reach(caller), wanted, overlap, audit, idempotency)
        self.admission.forget()
        return {**key_document(key, now), "key": key_text(key.key_id, secret) if fresh else None}

    @staticmethod
    def _reach(caller: Caller) -> str | None:
        """The tenant whose keys the caller acts on; None = all."""
        return None if ADMIN in caller.scopes else caller.tenant_id


def _audit(caller: Caller, tenant_id: str, kind: str, subject: str, data: Json) -> AuditRecord:
    """By whom: the key, and the user whose key it is."""
    return AuditRecord(tenant_id, caller.actor, kind, subject, {**data, "user": caller.user_id})


def tenant_document(tenant: TenantRecord) -> Json:
    """A tenant as the API shows it."""
    state = "deleted" if tenant.deleted_at is not None else "active" if tenant.disabled_at is None else "disabled"
    return {
        "id": tenant.tenant_id,
        "name": tenant.name,
        "state": state,
        "created_at": moment(tenant.created_at),
        "created_by": tenant.created_by,
        "disabled_at": moment(tenant.disabled_at),
    }


def user_document(user: UserRecord) -> Json:
    """A user as the API shows him."""
    return {
        "id": user.user_id,
        "tenant": user.tenant_id,
        "name": user.name,
        "state": "active" if user.disabled_at is None else "disabled",
        "created_at": moment(user.created_at),
        "disabled_at": moment(user.disabled_at),
    }


def key_document(key: KeyRecord, now: int) -> Json:
    """A key as the API shows it: without anything that would let somebody call."""
    return {
        "id": key.key_id,
        "tenant": key.tenant_id,
        "user": key.user_id,
        "name": key.name,
        "scopes": list(key.granted),
        "state": key.state(now),
        "owner": f"key:{ulid_of(key.lineage)}",
        "created_at": moment(key.created_at),
        "created_by": key.created_by,
        "expires_at": moment(key.expires_at),
        "revoked_at": moment(key.revoked_at),
        "last_used_at": moment(key.last_used_at),
        "rotated_from": key.rotated_from,
    }
