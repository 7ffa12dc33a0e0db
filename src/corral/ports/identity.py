"""The part of the store that knows who may call: tenants, users, keys. And the port for tokens of somebody else's issuer.

See `ports.store` for the rules. A tenant that was deleted is not there for any call, and its id is never given again. `default` is
there from the first day and is neither disabled nor deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from corral.domain.identity import KeyRecord, KeyView, TenantRecord, UserRecord
from corral.domain.records import AuditRecord, Idempotency


@dataclass(frozen=True)
class Claims:
    """What a good token says: whom it is for, what he may do, until when (Unix milliseconds)."""

    tenant_id: str
    user: str
    scopes: Sequence[str]
    expires_at: int


class TokenVerifier(Protocol):
    """Judges bearer tokens of an issuer."""

    def may_be(self, text: str) -> bool:
        """Whether it has the form of a token; without I/O."""
        ...

    async def verify(self, text: str) -> Claims:
        """`unauthorized` with the reason (for the log, not for the caller) unless it is good at this moment."""
        ...


class IdentityStore(Protocol):
    """See the module docstring."""

    # -- tenants ---------------------------------------------------------------------------------------------------------------
    async def create_tenant(
        self, tenant: TenantRecord, audit: AuditRecord, idempotency: Idempotency | None = None
    ) -> tuple[TenantRecord, bool]:
        """`already_exists` for an id that is, or was, somebody's. Idempotent like `submit_run`."""
        ...

    async def get_tenant(self, tenant_id: str) -> TenantRecord | None: ...

    async def list_tenants(self, *, after: str | None = None, limit: int = 100) -> list[TenantRecord]:
        """By id; `after` = the last one seen."""
        ...

    async def count_tenants(self) -> int:
        """How many there are, disabled ones too."""
        ...

    async def update_tenant(
        self, tenant_id: str, audit: AuditRecord, *, name: str | None = None, disabled: bool | None = None
    ) -> TenantRecord:
        """None leaves it as it is. Disabling again keeps the first time. `not_found`; `conflict` for disabling `default`."""
        ...

    async def delete_tenant(self, tenant_id: str, audit: AuditRecord) -> TenantRecord:
        """Its keys are revoked in the same transaction. `tenant_in_use` while it has a run that is not finished or a sandbox that is
        not terminated, or while it is not disabled; `conflict` for `default`."""
        ...

    # -- users -----------------------------------------------------------------------------------------------------------------
    async def create_user(
        self, user: UserRecord, audit: AuditRecord, idempotency: Idempotency | None = None
    ) -> tuple[UserRecord, bool]:
        """`already_exists`; `not_found` without its tenant."""
        ...

    async def get_user(self, tenant_id: str, user_id: str) -> UserRecord | None: ...

    async def list_users(self, tenant_id: str, *, after: str | None = None, limit: int = 100) -> list[UserRecord]:
        """By id."""
        ...

    async def update_user(
        self, tenant_id: str, user_id: str, audit: AuditRecord, *, name: str | None = None, disabled: bool | None = None
    ) -> UserRecord:
        """As `update_tenant`."""
        ...

    async def delete_user(self, tenant_id: str, user_id: str, audit: AuditRecord) -> None:
        """Its keys are revoked in the same transaction. `not_found`."""
        ...

    # -- keys ------------------------------------------------------------------------------------------------------------------
    async def create_key(
        self, key: KeyRecord, audit: AuditRecord, idempotency: Idempotency | None = None
    ) -> tuple[KeyRecord, bool]:
        """-> (the key, whether `key.key_hash` is its secret now). A user who is not known yet is made. `not_found` without its tenant.

        Under an idempotency key that made a key before: that one. If nobody has ever used it, its secret was lost on the way: it gets
        the new one, and the old one is worth nothing.
        """
        ...

    async def rotate_key(
        self,
        key_id: str,
        tenant_id: str | None,
        successor: KeyRecord,
        overlap_ms: int,
        audit: AuditRecord,
        idempotency: Idempotency | None = None,
    ) -> tuple[KeyRecord, bool]:
        """Insert the successor; the old key ends within `overlap_ms`. Idempotent like `create_key`.

        Its tenant, user, name, scopes and family are taken from the row of `key_id`. `not_found` (a foreign tenant's too, None = any);
        `conflict` if the old key has ended or has been rotated already.
        """
        ...

    async def find_key(self, key_id: str) -> KeyView | None:
        """None if there is no such key, or its tenant was deleted."""
        ...

    async def list_keys(
        self, tenant_id: str | None, *, after: str | None = None, limit: int = 100
    ) -> tuple[list[KeyRecord], int]:
        """(keys, newest first; the store's time). `tenant_id=None`: of all tenants."""
        ...

    async def revoke_key(self, key_id: str, tenant_id: str | None, audit: AuditRecord) -> KeyRecord:
        """At once and for good; again: the row as it is, without another audit row. `not_found` for a foreign tenant's."""
        ...

    async def touch_key(self, key_id: str) -> None:
        """It was used just now."""
        ...
