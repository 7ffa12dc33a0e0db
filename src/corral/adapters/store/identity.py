"""`ports.identity` as SQL: tenants, users, keys. See `transactions` for the rules.

The order of locks is tenant, then user and key: whoever adds something to a tenant holds its row, so that it cannot be deleted below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from corral.domain.identity import DEFAULT_TENANT, KeyRecord, KeyView, TenantRecord, UserRecord
from corral.domain.records import AuditRecord, Idempotency
from corral.errors import CorralError

from .repeats import claim_key
from .rows import AUDIT, KEY, TENANT, USER, Row, to_text
from .sql_text import page_size
from .trail import add_audit
from .transacting import Transacting, Tx

# ruff: noqa: S608 - what is put together are column names of this package

R = TypeVar("R")
THERE = "deleted_at IS NULL"


# -- what is said, in both stores ----------------------------------------------------------------------------------------------------
def no_tenant(tenant_id: str) -> CorralError:
    return CorralError("not_found", f"there is no tenant {tenant_id[:64]}", hint="corral tenant ls lists them")


def no_user(user_id: str) -> CorralError:
    return CorralError("not_found", f"there is no user {user_id[:64]}")


def no_key(key_id: str) -> CorralError:
    return CorralError("not_found", f"there is no key {key_id[:64]}", hint="corral key ls lists them")


def taken(what: str, name: str) -> CorralError:
    hint = "choose another id; that of one that was deleted is never given again" if what == "tenant" else None
    return CorralError(
        "already_exists", f"there is, or was, a {what} {name}" if hint else f"there is a {what} {name}", hint=hint
    )


def always_there() -> CorralError:
    hint = "the server's own key and the state directory belong to it"
    return CorralError("conflict", "the tenant default cannot be disabled or deleted", hint=hint, retryable=False)


def in_use(tenant_id: str, why: str, hint: str) -> CorralError:
    return CorralError("tenant_in_use", f"the tenant {tenant_id} {why}", hint=hint)


def not_disabled(tenant_id: str) -> CorralError:
    return in_use(tenant_id, "is not disabled", f"corral tenant disable {tenant_id} comes first: nobody calls any more")


def has_live(tenant_id: str, what: str) -> CorralError:
    ends = f"corral sandbox rm --tenant {tenant_id}" if what == "sandboxes" else f"corral cancel --tenant {tenant_id}"
    return in_use(tenant_id, f"has {what} that go on", f"end them first: {ends} ID")


def has_ended(key_id: str) -> CorralError:
    return CorralError("conflict", f"the key {key_id} has ended", hint="make a new key", retryable=False)


def is_rotated(key_id: str) -> CorralError:
    hint = "rotate the newest key of its line: corral key ls shows it"
    return CorralError("conflict", f"the key {key_id} has been rotated already", hint=hint, retryable=False)


# -- tenants -------------------------------------------------------------------------------------------------------------------------
def create_tenant(tx: Tx, row: Row, audit: Row, idem: Idempotency | None) -> tuple[TenantRecord, bool]:
    known = claim_key(tx, idem, str(row["tenant_id"]))
    if known is not None:
        found = get_tenant(tx, known)
        if found is None:
            raise no_tenant(known)
        return found, False
    made = tx.rows(f"{TENANT.insert} ON CONFLICT (tenant_id) DO NOTHING RETURNING {TENANT.select}", row)
    if not made:
        raise taken("tenant", str(row["tenant_id"]))
    add_audit(tx, audit)
    return TENANT.decode(made[0]), True


def get_tenant(tx: Tx, tenant_id: str) -> TenantRecord | None:
    found = tx.rows(f"SELECT {TENANT.select} FROM tenant WHERE tenant_id = :tenant AND {THERE}", {"tenant": tenant_id})
    return TENANT.decode(found[0]) if found else None


def _locked(tx: Tx, tenant_id: str) -> TenantRecord:
    """The tenant's row, which stays as it is until this transaction ends."""
    found = tx.rows(
        f"SELECT {TENANT.select} FROM tenant WHERE tenant_id = :tenant AND {THERE} {tx.for_update}",
        {"tenant": tenant_id},
    )
    if not found:
        raise no_tenant(tenant_id)
    return TENANT.decode(found[0])


def list_tenants(tx: Tx, after: str | None, limit: int) -> list[TenantRecord]:
    found = tx.rows(
        f"SELECT {TENANT.select} FROM tenant WHERE {THERE} AND tenant_id > :after ORDER BY tenant_id LIMIT :limit",
        {"after": after or "", "limit": page_size(limit)},
    )
    return [TENANT.decode(row) for row in found]


def count_tenants(tx: Tx) -> int:
    [(count,)] = tx.rows(f"SELECT COUNT(*) FROM tenant WHERE {THERE}")
    return int(count)


def update_tenant(tx: Tx, tenant_id: str, audit: Row, name: str | None, disabled: bool | None) -> TenantRecord:
    known = _locked(tx, tenant_id)
    if disabled and tenant_id == DEFAULT_TENANT:
        raise always_there()
    [row] = tx.rows(
        f"UPDATE tenant SET name = :name, disabled_at = :disabled WHERE tenant_id = :tenant RETURNING {TENANT.select}",
        {"tenant": tenant_id, "name": name or known.name, "disabled": since(known.disabled_at, disabled, tx.now)},
    )
    add_audit(tx, audit)
    return TENANT.decode(row)


def since(known: int | None, disabled: bool | None, now: int) -> int | None:
    """The new `disabled_at`; disabling again keeps the first time."""
    return known if disabled is None else (known or now) if disabled else None


def delete_tenant(tx: Tx, tenant_id: str, audit: Row) -> TenantRecord:
    known = _locked(tx, tenant_id)
    if tenant_id == DEFAULT_TENANT:
        raise always_there()
    if known.disabled_at is None:
        raise not_disabled(tenant_id)
    for what, sql in (
        ("sandboxes", "SELECT 1 FROM sandbox WHERE tenant_id = :tenant AND state <> 'terminated' LIMIT 1"),
        ("runs", "SELECT 1 FROM run WHERE tenant_id = :tenant AND state <> 'finished' LIMIT 1"),
    ):
        if tx.rows(sql, {"tenant": tenant_id}):
            raise has_live(tenant_id, what)
    params = {"tenant": tenant_id, "now": tx.now}
    tx.rows("UPDATE api_key SET revoked_at = :now WHERE tenant_id = :tenant AND revoked_at IS NULL", params)
    [row] = tx.rows(f"UPDATE tenant SET deleted_at = :now WHERE tenant_id = :tenant RETURNING {TENANT.select}", params)
    add_audit(tx, audit)
    return TENANT.decode(row)


# -- users ---------------------------------------------------------------------------------------------------------------------------
def create_user(tx: Tx, row: Row, audit: Row, idem: Idempotency | None) -> tuple[UserRecord, bool]:
    tenant_id, user_id = str(row["tenant_id"]), str(row["user_id"])
    _locked(tx, tenant_id)
    known = claim_key(tx, idem, user_id)
    if known is not None:
        found = get_user(tx, tenant_id, known)
        if found is None:
            raise no_user(known)
        return found, False
    made = tx.rows(f"{USER.insert} ON CONFLICT (tenant_id, user_id) DO NOTHING RETURNING {USER.select}", row)
    if not made:
        raise taken("user", user_id)
    add_audit(tx, audit)
    return USER.decode(made[0]), True


def get_user(tx: Tx, tenant_id: str, user_id: str) -> UserRecord | None:
    found = tx.rows(
        f'SELECT {USER.select} FROM "user" WHERE tenant_id = :tenant AND user_id = :user', _of(tenant_id, user_id)
    )
    return USER.decode(found[0]) if found else None


def _of(tenant_id: str, user_id: str) -> dict[str, Any]:
    return {"tenant": tenant_id, "user": user_id}


def list_users(tx: Tx, tenant_id: str, after: str | None, limit: int) -> list[UserRecord]:
    found = tx.rows(
        f'SELECT {USER.select} FROM "user" WHERE tenant_id = :tenant AND user_id > :after ORDER BY user_id LIMIT :limit',
        {"tenant": tenant_id, "after": after or "", "limit": page_size(limit)},
    )
    return [USER.decode(row) for row in found]


def update_user(
    tx: Tx, tenant_id: str, user_id: str, audit: Row, name: str | None, disabled: bool | None
) -> UserRecord:
    found = tx.rows(
        f'SELECT {USER.select} FROM "user" WHERE tenant_id = :tenant AND user_id = :user {tx.for_update}',
        _of(tenant_id, user_id),
    )
    if not found:
        raise no_user(user_id)
    known = USER.decode(found[0])
    [row] = tx.rows(
        'UPDATE "user" SET name = :name, disabled_at = :disabled WHERE tenant_id = :tenant AND user_id = :user'
        f" RETURNING {USER.select}",
        {
            **_of(tenant_id, user_id),
            "name": name or known.name,
            "disabled": since(known.disabled_at, disabled, tx.now),
        },
    )
    add_audit(tx, audit)
    return USER.decode(row)


def delete_user(tx: Tx, tenant_id: str, user_id: str, audit: Row) -> None:
    _locked(tx, tenant_id)  # else a key could be made for the user meanwhile
    gone = tx.rows(
        'DELETE FROM "user" WHERE tenant_id = :tenant AND user_id = :user RETURNING user_id', _of(tenant_id, user_id)
    )
    if not gone:
        raise no_user(user_id)
    tx.rows(
        "UPDATE api_key SET revoked_at = :now WHERE tenant_id = :tenant AND user_id = :user AND revoked_at IS NULL",
        {**_of(tenant_id, user_id), "now": tx.now},
    )
    add_audit(tx, audit)


# -- keys ----------------------------------------------------------------------------------------------------------------------------
def create_key(tx: Tx, row: Row, audit: Row, idem: Idempotency | None) -> tuple[KeyRecord, bool]:
    _locked(tx, str(row["tenant_id"]))
    known = claim_key(tx, idem, str(row["key_id"]))
    if known is not None:
        return _made_before(tx, known, row)
    if row["user_id"] is not None:
        made = tx.rows(
            f"{USER.insert} ON CONFLICT (tenant_id, user_id) DO NOTHING RETURNING user_id",
            {
                **dict.fromkeys(USER.columns),
                "tenant_id": row["tenant_id"],
                "user_id": row["user_id"],
                "created_at": tx.now,
            },
        )
        if made:
            add_audit(tx, made_with_key(audit, row))
    tx.rows(KEY.insert, row)
    add_audit(tx, audit)
    return KEY.decode(_key(tx, str(row["key_id"]))), True


def made_with_key(audit: Row, key: Row) -> Row:
    """The audit of the user whom a key made, beside that of the key (both stores)."""
    data = AUDIT.encode(AuditRecord("", "", "", "", {"by": "key", "key": key["key_id"]}))["data"]
    return {**audit, "kind": "user.created", "subject": key["user_id"], "data": data}


def _key(tx: Tx, key_id: str) -> tuple[Any, ...]:
    found = tx.rows(f"SELECT {KEY.select} FROM api_key WHERE key_id = :key", {"key": key_id})
    if not found:
        raise no_key(key_id)
    return found[0]


def _made_before(tx: Tx, key_id: str, row: Row) -> tuple[KeyRecord, bool]:
    """A new secret for a key that nobody has ever used: the answer with the first one did not arrive."""
    renewed = tx.rows(
        "UPDATE api_key SET key_hash = :hash WHERE key_id = :key AND last_used_at IS NULL AND revoked_at IS NULL"
        f" RETURNING {KEY.select}",
        {"key": key_id, "hash": row["key_hash"]},
    )
    return (KEY.decode(renewed[0]), True) if renewed else (KEY.decode(_key(tx, key_id)), False)


def rotate_key(
    tx: Tx,
    key_id: str,
    tenant_id: str | None,
    row: Row,
    overlap_ms: int,
    audit: Row,
    idem: Idempotency | None,
) -> tuple[KeyRecord, bool]:
    old = _key_of(tx, key_id, tenant_id)
    _locked(tx, old.tenant_id)
    known = claim_key(tx, idem, str(row["key_id"]))
    if known is not None:
        return _made_before(tx, known, row)
    # Read again: what was decided over has to be what the lock holds.
    old = _key_of(tx, key_id, tenant_id, tx.for_update)
    if old.state(tx.now) != "active":
        raise has_ended(key_id)
    if tx.rows("SELECT 1 FROM api_key WHERE rotated_from = :key", {"key": key_id}):
        raise is_rotated(key_id)
    ends = min(tx.now + overlap_ms, old.expires_at or tx.now + overlap_ms)
    tx.rows("UPDATE api_key SET expires_at = :ends WHERE key_id = :key", {"ends": ends, "key": key_id})
    tx.rows(KEY.insert, {**row, **inherited(old)})
    add_audit(tx, {**audit, "tenant_id": old.tenant_id})
    return KEY.decode(_key(tx, str(row["key_id"]))), True


def inherited(old: KeyRecord) -> Row:
    """What a successor has of the key before it."""
    row = KEY.encode(old)
    same = {name: row[name] for name in ("tenant_id", "user_id", "name", "scopes")}
    return {**same, "family": old.lineage, "rotated_from": old.key_id}


def _key_of(tx: Tx, key_id: str, tenant_id: str | None, lock: str = "") -> KeyRecord:
    """The key if it is there for this tenant (None = for the system)."""
    params = {"key": key_id} if tenant_id is None else {"key": key_id, "tenant": tenant_id}
    mine = "" if tenant_id is None else " AND tenant_id = :tenant"
    found = tx.rows(f"SELECT {KEY.select} FROM api_key WHERE key_id = :key{mine} {lock}", params)
    if not found:
        raise no_key(key_id)
    return KEY.decode(found[0])


def find_key(tx: Tx, key_id: str) -> KeyView | None:
    found = tx.rows(
        f"SELECT {KEY.qualified('k')}, t.disabled_at, u.disabled_at FROM api_key k"
        " JOIN tenant t ON t.tenant_id = k.tenant_id AND t.deleted_at IS NULL"
        ' LEFT JOIN "user" u ON u.tenant_id = k.tenant_id AND u.user_id = k.user_id WHERE k.key_id = :key',
        {"key": key_id},
    )
    if not found:
        return None
    *row, tenant, user = found[0]
    return KeyView(KEY.decode(row), tx.now, tenant is not None, user is not None)


def list_keys(tx: Tx, tenant_id: str | None, after: str | None, limit: int) -> tuple[list[KeyRecord], int]:
    params: dict[str, Any] = {"limit": page_size(limit)}
    where = ["1 = 1"]
    if tenant_id is not None:
        where.append("tenant_id = :tenant")
        params["tenant"] = tenant_id
    if after is not None:
        last = _key_of(tx, after, tenant_id)
        where.append("(created_at, key_id) < (:created_at, :after)")
        params |= {"created_at": last.created_at, "after": after}
    found = tx.rows(
        f"SELECT {KEY.select} FROM api_key WHERE {' AND '.join(where)}"
        " ORDER BY created_at DESC, key_id DESC LIMIT :limit",
        params,
    )
    return [KEY.decode(row) for row in found], tx.now


def revoke_key(tx: Tx, key_id: str, tenant_id: str | None, audit: Row) -> KeyRecord:
    known = _key_of(tx, key_id, tenant_id)
    changed = tx.rows(
        f"UPDATE api_key SET revoked_at = :now WHERE key_id = :key AND revoked_at IS NULL RETURNING {KEY.select}",
        {"key": key_id, "now": tx.now},
    )
    if not changed:
        return KEY.decode(_key(tx, key_id))
    add_audit(tx, {**audit, "tenant_id": known.tenant_id})
    return KEY.decode(changed[0])


def touch_key(tx: Tx, key_id: str) -> None:
    tx.rows("UPDATE api_key SET last_used_at = :now WHERE key_id = :key", {"key": key_id, "now": tx.now})


class SqlIdentity(Transacting):
    """`ports.identity.IdentityStore`."""

    async def create_tenant(
        self, tenant: TenantRecord, audit: AuditRecord, idempotency: Idempotency | None = None
    ) -> tuple[TenantRecord, bool]:
        return await self._write(create_tenant, TENANT.encode(tenant), AUDIT.encode(audit), idempotency)

    async def get_tenant(self, tenant_id: str) -> TenantRecord | None:
        return await self._read(get_tenant, tenant_id)

    async def list_tenants(self, *, after: str | None = None, limit: int = 100) -> list[TenantRecord]:
        return await self._read(list_tenants, after, limit)

    async def count_tenants(self) -> int:
        return await self._read(count_tenants)

    async def update_tenant(
        self, tenant_id: str, audit: AuditRecord, *, name: str | None = None, disabled: bool | None = None
    ) -> TenantRecord:
        return await self._write(update_tenant, tenant_id, AUDIT.encode(audit), _name(name), disabled)

    async def delete_tenant(self, tenant_id: str, audit: AuditRecord) -> TenantRecord:
        return await self._write(delete_tenant, tenant_id, AUDIT.encode(audit))

    async def create_user(
        self, user: UserRecord, audit: AuditRecord, idempotency: Idempotency | None = None
    ) -> tuple[UserRecord, bool]:
        return await self._write(create_user, USER.encode(user), AUDIT.encode(audit), idempotency)

    async def get_user(self, tenant_id: str, user_id: str) -> UserRecord | None:
        return await self._read(get_user, tenant_id, user_id)

    async def list_users(self, tenant_id: str, *, after: str | None = None, limit: int = 100) -> list[UserRecord]:
        return await self._read(list_users, tenant_id, after, limit)

    async def update_user(
        self, tenant_id: str, user_id: str, audit: AuditRecord, *, name: str | None = None, disabled: bool | None = None
    ) -> UserRecord:
        return await self._write(update_user, tenant_id, user_id, AUDIT.encode(audit), _name(name), disabled)

    async def delete_user(self, tenant_id: str, user_id: str, audit: AuditRecord) -> None:
        await self._write(delete_user, tenant_id, user_id, AUDIT.encode(audit))

    async def create_key(
        self, key: KeyRecord, audit: AuditRecord, idempotency: Idempotency | None = None
    ) -> tuple[KeyRecord, bool]:
        return await self._write(create_key, KEY.encode(key), AUDIT.encode(audit), idempotency)

    async def rotate_key(
        self,
        key_id: str,
        tenant_id: str | None,
        successor: KeyRecord,
        overlap_ms: int,
        audit: AuditRecord,
        idempotency: Idempotency | None = None,
    ) -> tuple[KeyRecord, bool]:
        row = KEY.encode(successor)
        return await self._write(rotate_key, key_id, tenant_id, row, overlap_ms, AUDIT.encode(audit), idempotency)

    async def find_key(self, key_id: str) -> KeyView | None:
        return await self._read(find_key, key_id)

    async def list_keys(
        self, tenant_id: str | None, *, after: str | None = None, limit: int = 100
    ) -> tuple[list[KeyRecord], int]:
        return await self._read(list_keys, tenant_id, after, limit)

    async def revoke_key(self, key_id: str, tenant_id: str | None, audit: AuditRecord) -> KeyRecord:
        return await self._write(revoke_key, key_id, tenant_id, AUDIT.encode(audit))

    async def touch_key(self, key_id: str) -> None:
        await self._write(touch_key, key_id)


def _name(name: str | None) -> str | None:
    return None if name is None else to_text(name, "name")


def page(rows: list[R], place: Callable[[R], Any], after: Any, limit: int) -> list[R]:
    """Rows in rising order behind `after`, for the store in memory."""
    found = sorted((row for row in rows if after is None or place(row) > after), key=place)
    return found[: page_size(limit)]
