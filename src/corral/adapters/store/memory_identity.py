"""`ports.identity` in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from corral.domain.identity import DEFAULT_TENANT, KeyRecord, KeyView, TenantRecord, UserRecord
from corral.domain.records import AuditRecord, Idempotency

from .identity import (
    always_there,
    has_ended,
    has_live,
    inherited,
    is_rotated,
    made_with_key,
    no_key,
    no_tenant,
    no_user,
    not_disabled,
    page,
    since,
    taken,
)
from .memory_base import MemoryBase
from .rows import AUDIT, KEY, TENANT, USER, Row, conflict, to_text
from .sql_text import page_size


class MemoryIdentity(MemoryBase):
    """`ports.identity.IdentityStore`."""

    def __init__(self, clock: Callable[[], int]) -> None:
        super().__init__(clock)
        first = TenantRecord(DEFAULT_TENANT, DEFAULT_TENANT, clock(), "system:migration")
        self._tenants: dict[Any, Row] = {DEFAULT_TENANT: TENANT.encode(first)}
        self._users: dict[Any, Row] = {}
        self._api_keys: dict[Any, Row] = {}

    # -- tenants ---------------------------------------------------------------------------------------------------------------
    def _tenant(self, tenant_id: str) -> Row:
        row = self._tenants.get(tenant_id)
        if row is None or row["deleted_at"] is not None:
            raise no_tenant(tenant_id)
        return row

    async def create_tenant(
        self, tenant: TenantRecord, audit: AuditRecord, idempotency: Idempotency | None = None
    ) -> tuple[TenantRecord, bool]:
        row, audit_row = TENANT.encode(tenant), AUDIT.encode(audit)

        def work() -> tuple[TenantRecord, bool]:
            known = self._claim_key(idempotency, tenant.tenant_id)
            if known is not None:
                return TENANT.from_row(self._tenant(known)), False
            if tenant.tenant_id in self._tenants:
                raise taken("tenant", tenant.tenant_id)
            self._put(self._tenants, tenant.tenant_id, row)
            self._append(self._audit, "audit_id", audit_row)
            return TENANT.from_row(row), True

        return await self._transact(work)

    async def get_tenant(self, tenant_id: str) -> TenantRecord | None:
        def work() -> TenantRecord | None:
            row = self._tenants.get(tenant_id)
            return None if row is None or row["deleted_at"] is not None else TENANT.from_row(row)

        return await self._transact(work)

    def _living_tenants(self) -> list[TenantRecord]:
        return [TENANT.from_row(row) for row in self._tenants.values() if row["deleted_at"] is None]

    async def list_tenants(self, *, after: str | None = None, limit: int = 100) -> list[TenantRecord]:
        return await self._transact(lambda: page(self._living_tenants(), lambda t: t.tenant_id, after, limit))

    async def count_tenants(self) -> int:
        return await self._transact(lambda: len(self._living_tenants()))

    async def update_tenant(
        self, tenant_id: str, audit: AuditRecord, *, name: str | None = None, disabled: bool | None = None
    ) -> TenantRecord:
        audit_row = AUDIT.encode(audit)

        def work() -> TenantRecord:
            known = self._tenant(tenant_id)
            if disabled and tenant_id == DEFAULT_TENANT:
                raise always_there()
            row = self._changed(known, name, disabled)
            self._put(self._tenants, tenant_id, row)
            self._append(self._audit, "audit_id", audit_row)
            return TENANT.from_row(row)

        return await self._transact(work)

    def _changed(self, known: Row, name: str | None, disabled: bool | None) -> Row:
        text = known["name"] if name is None else to_text(name, "name")
        before = None if known["disabled_at"] is None else int(known["disabled_at"])
        return {**known, "name": text, "disabled_at": since(before, disabled, self._now)}

    async def delete_tenant(self, tenant_id: str, audit: AuditRecord) -> TenantRecord:
        audit_row = AUDIT.encode(audit)

        def work() -> TenantRecord:
            known = self._tenant(tenant_id)
            if tenant_id == DEFAULT_TENANT:
                raise always_there()
            if known["disabled_at"] is None:
                raise not_disabled(tenant_id)
            for what, table, over in (
                ("sandboxes", self._sandboxes, "terminated"),
                ("runs", self._runs, "finished"),
            ):
                if any(row["tenant_id"] == tenant_id and row["state"] != over for row in table.values()):
                    raise has_live(tenant_id, what)
            self._revoke_all(lambda row: row["tenant_id"] == tenant_id)
            row = {**known, "deleted_at": self._now}
            self._put(self._tenants, tenant_id, row)
            self._append(self._audit, "audit_id", audit_row)
            return TENANT.from_row(row)

        return await self._transact(work)

    def _revoke_all(self, meant: Callable[[Row], bool]) -> None:
        for key_id, row in list(self._api_keys.items()):
            if meant(row) and row["revoked_at"] is None:
                self._put(self._api_keys, key_id, {**row, "revoked_at": self._now})

    # -- users -----------------------------------------------------------------------------------------------------------------
    async def create_user(
        self, user: UserRecord, audit: AuditRecord, idempotency: Idempotency | None = None
    ) -> tuple[UserRecord, bool]:
        row, audit_row = USER.encode(user), AUDIT.encode(audit)

        def work() -> tuple[UserRecord, bool]:
            self._tenant(user.tenant_id)
            known = self._claim_key(idempotency, user.user_id)
            if known is not None:
                return USER.from_row(self._user(user.tenant_id, known)), False
            if (user.tenant_id, user.user_id) in self._users:
                raise taken("user", user.user_id)
            self._put(self._users, (user.tenant_id, user.user_id), row)
            self._append(self._audit, "audit_id", audit_row)
            return USER.from_row(row), True

        return await self._transact(work)

    def _user(self, tenant_id: str, user_id: str) -> Row:
        row = self._users.get((tenant_id, user_id))
        if row is None:
            raise no_user(user_id)
        return row

    async def get_user(self, tenant_id: str, user_id: str) -> UserRecord | None:
        def work() -> UserRecord | None:
            row = self._users.get((tenant_id, user_id))
            return None if row is None else USER.from_row(row)

        return await self._transact(work)

    async def list_users(self, tenant_id: str, *, after: str | None = None, limit: int = 100) -> list[UserRecord]:
        def work() -> list[UserRecord]:
            mine = [USER.from_row(row) for row in self._users.values() if row["tenant_id"] == tenant_id]
            return page(mine, lambda user: user.user_id, after, limit)

        return await self._transact(work)

    async def update_user(
        self, tenant_id: str, user_id: str, audit: AuditRecord, *, name: str | None = None, disabled: bool | None = None
    ) -> UserRecord:
        audit_row = AUDIT.encode(audit)

        def work() -> UserRecord:
            row = self._changed(self._user(tenant_id, user_id), name, disabled)
            self._put(self._users, (tenant_id, user_id), row)
            self._append(self._audit, "audit_id", audit_row)
            return USER.from_row(row)

        return await self._transact(work)

    async def delete_user(self, tenant_id: str, user_id: str, audit: AuditRecord) -> None:
        audit_row = AUDIT.encode(audit)

        def work() -> None:
            self._tenant(tenant_id)
            self._user(tenant_id, user_id)
            self._drop(self._users, (tenant_id, user_id))
            self._revoke_all(lambda row: (row["tenant_id"], row["user_id"]) == (tenant_id, user_id))
            self._append(self._audit, "audit_id", audit_row)

        await self._transact(work)

    # -- keys ------------------------------------------------------------------------------------------------------------------
    async def create_key(
        self, key: KeyRecord, audit: AuditRecord, idempotency: Idempotency | None = None
    ) -> tuple[KeyRecord, bool]:
        row, audit_row = KEY.encode(key), AUDIT.encode(audit)

        def work() -> tuple[KeyRecord, bool]:
            self._tenant(key.tenant_id)
            known = self._claim_key(idempotency, key.key_id)
            if known is not None:
                return self._made_before(known, row)
            whom = (key.tenant_id, key.user_id)
            if key.user_id is not None and whom not in self._users:
                self._put(self._users, whom, USER.encode(UserRecord(key.tenant_id, key.user_id, self._now)))
                self._append(self._audit, "audit_id", made_with_key(audit_row, row))
            self._put_key(row)
            self._append(self._audit, "audit_id", audit_row)
            return KEY.from_row(row), True

        return await self._transact(work)

    def _put_key(self, row: Row) -> None:
        hashes = {known["key_hash"] for known in self._api_keys.values()}
        if row["key_id"] in self._api_keys or row["key_hash"] in hashes:
            raise conflict(f"api_key {row['key_id']} exists already")
        self._put(self._api_keys, row["key_id"], row)

    def _made_before(self, key_id: str, row: Row) -> tuple[KeyRecord, bool]:
        known = self._key_of(key_id, None)
        if known["last_used_at"] is not None or known["revoked_at"] is not None:
            return KEY.from_row(known), False
        renewed = {**known, "key_hash": row["key_hash"]}
        self._put(self._api_keys, key_id, renewed)
        return KEY.from_row(renewed), True

    def _key_of(self, key_id: str, tenant_id: str | None) -> Row:
        row = self._api_keys.get(key_id)
        if row is None or tenant_id not in (None, row["tenant_id"]):
            raise no_key(key_id)
        return row

    async def rotate_key(
        self,
        key_id: str,
        tenant_id: str | None,
        successor: KeyRecord,
        overlap_ms: int,
        audit: AuditRecord,
        idempotency: Idempotency | None = None,
    ) -> tuple[KeyRecord, bool]:
        row, audit_row = KEY.encode(successor), AUDIT.encode(audit)

        def work() -> tuple[KeyRecord, bool]:
            old_row = self._key_of(key_id, tenant_id)
            old = KEY.from_row(old_row)
            self._tenant(old.tenant_id)
            known = self._claim_key(idempotency, successor.key_id)
            if known is not None:
                return self._made_before(known, row)
            if old.state(self._now) != "active":
                raise has_ended(key_id)
            if any(each["rotated_from"] == key_id for each in self._api_keys.values()):
                raise is_rotated(key_id)
            ends = min(self._now + overlap_ms, old.expires_at or self._now + overlap_ms)
            self._put(self._api_keys, key_id, {**old_row, "expires_at": ends})
            made = {**row, **inherited(old)}
            self._put_key(made)
            self._append(self._audit, "audit_id", {**audit_row, "tenant_id": old.tenant_id})
            return KEY.from_row(made), True

        return await self._transact(work)

    async def find_key(self, key_id: str) -> KeyView | None:
        def work() -> KeyView | None:
            row = self._api_keys.get(key_id)
            if row is None:
                return None
            tenant = self._tenants.get(row["tenant_id"])
            if tenant is None or tenant["deleted_at"] is not None:
                return None
            user = self._users.get((row["tenant_id"], row["user_id"]))
            disabled = user is not None and user["disabled_at"] is not None
            return KeyView(KEY.from_row(row), self._now, tenant["disabled_at"] is not None, disabled)

        return await self._transact(work)

    async def list_keys(
        self, tenant_id: str | None, *, after: str | None = None, limit: int = 100
    ) -> tuple[list[KeyRecord], int]:
        def place(key: KeyRecord) -> tuple[int, str]:
            return key.created_at, key.key_id

        def work() -> tuple[list[KeyRecord], int]:
            mine = [KEY.from_row(r) for r in self._api_keys.values() if tenant_id in (None, r["tenant_id"])]
            if after is not None:
                last = place(KEY.from_row(self._key_of(after, tenant_id)))
                mine = [key for key in mine if place(key) < last]
            return sorted(mine, key=place, reverse=True)[: page_size(limit)], self._now

        return await self._transact(work)

    async def revoke_key(self, key_id: str, tenant_id: str | None, audit: AuditRecord) -> KeyRecord:
        audit_row = AUDIT.encode(audit)

        def work() -> KeyRecord:
            row = self._key_of(key_id, tenant_id)
            if row["revoked_at"] is None:
                row = {**row, "revoked_at": self._now}
                self._put(self._api_keys, key_id, row)
                self._append(self._audit, "audit_id", {**audit_row, "tenant_id": row["tenant_id"]})
            return KEY.from_row(row)

        return await self._transact(work)

    async def touch_key(self, key_id: str) -> None:
        def work() -> None:
            row = self._api_keys.get(key_id)
            if row is not None:
                self._put(self._api_keys, key_id, {**row, "last_used_at": self._now})

        await self._transact(work)
