"""Who may do what: tenants, users, keys, and the rules over their scopes. Pure: clock and dice are arguments.

A key is `ck_<26 characters of its id>_<64 hexadecimal digits>`. The last part is 256 random bits, of which only the SHA-256 is kept:
nothing shorter than the key itself is searched by trying, and who reads the database cannot call.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from corral.domain.ids import ulid_of
from corral.domain.quantities import shown
from corral.errors import CorralError

Json = Any
"""What a JSON column holds."""

DEFAULT_TENANT = "default"
"""Always there: of the server's own key and of the state directory."""
ADMIN, TENANT, RUN, READ = "admin", "tenant", "run", "read"
SCOPES = (ADMIN, TENANT, RUN, READ)
"""`admin`: the installation, with all tenants and keys. `tenant`: users and keys of one's tenant. `run`: runs, sandboxes, execs and
files of one's tenant. `read`: to look at these."""
INCLUDES = {ADMIN: (TENANT,), RUN: (READ,)}
EVERYTHING = frozenset(SCOPES)

SECRET_BYTES = 32
MAX_NAME = 200
OVERLAP_MS = 24 * 3600 * 1000
"""How long a key that was rotated goes on, if nobody says otherwise."""
MAX_LIFE_MS = 100 * 366 * 86_400_000
_KEY = re.compile(r"ck_([0-7][0-9a-hjkmnp-tv-z]{25})_([0-9a-f]{64})")
_TENANT_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_USER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class TenantRecord:
    """Whose things are kept apart. One that is deleted keeps its row, so that nobody ever gets its name, and with it its past."""

    tenant_id: str
    name: str
    created_at: int
    created_by: str
    limits: Json = field(default_factory=dict)
    disabled_at: int | None = None
    """Since then none of its keys is accepted."""
    deleted_at: int | None = None


@dataclass(frozen=True)
class UserRecord:
    """Somebody of a tenant, whom keys and tokens name."""

    tenant_id: str
    user_id: str
    created_at: int
    name: str | None = None
    disabled_at: int | None = None


@dataclass(frozen=True)
class KeyRecord:
    """A key without its secret. `expires_at` is the first instant at which it is not accepted."""

    key_id: str
    tenant_id: str
    key_hash: str
    scopes: Json
    """A list, as they were given, without what they include."""
    created_at: int
    created_by: str
    user_id: str | None = None
    name: str | None = None
    expires_at: int | None = None
    revoked_at: int | None = None
    last_used_at: int | None = None
    """About when; never null once it was used."""
    family: str | None = None
    """Id of the first key of which it is a rotation; None for a first one."""
    rotated_from: str | None = None

    @property
    def lineage(self) -> str:
        """What stays the same when the key is rotated: leases belong to it."""
        return self.family or self.key_id

    @property
    def granted(self) -> tuple[str, ...]:
        """Its scopes in the order of `SCOPES`."""
        return tuple(name for name in SCOPES if name in self.scopes)

    def state(self, now: int) -> str:
        """active, expired or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


@dataclass(frozen=True)
class KeyView:
    """A key with all that decides over it, read in one snapshot at `now` by the store's clock."""

    key: KeyRecord
    now: int
    tenant_disabled: bool = False
    user_disabled: bool = False

    @property
    def good(self) -> bool:
        """Whether it is accepted at this instant."""
        return self.key.state(self.now) == "active" and not self.tenant_disabled and not self.user_disabled


# -- scopes ------------------------------------------------------------------------------------------------------------------------
def with_included(scopes: Iterable[str]) -> frozenset[str]:
    """These and what they include."""
    given = [name for name in scopes if name in SCOPES]
    return frozenset(given) | {inner for name in given for inner in INCLUDES.get(name, ())}


def parse_scopes(value: Any, where: str = "/scopes") -> tuple[str, ...]:
    """A list of scopes from outside, in the order of `SCOPES`."""
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise CorralError(
            "invalid_value", "scopes is not a list of words", hint=f"known: {', '.join(SCOPES)}", field=where
        )
    if unknown := [name for name in value if name not in SCOPES]:
        hint = f"known: {', '.join(SCOPES)}"
        raise CorralError("invalid_value", f"there is no scope {shown(unknown[0])}", hint=hint, field=where)
    return tuple(name for name in SCOPES if name in value)


def check_may(held: frozenset[str], scope: str) -> None:
    """`forbidden` unless `scope` is held."""
    if scope not in held:
        raise CorralError(
            "forbidden", f"the key does not have the scope {scope}", hint=f"use a key with the scope {scope}"
        )


def check_grant(held: frozenset[str], ends_at: int | None, wanted: Iterable[str], expires_at: int | None) -> None:
    """`forbidden` if a holder of these scopes, whose own key ends at `ends_at`, may not give away a key like that.

    Nobody gives what he has not, nor for longer than he has it. Who has the installation may give everything in it.
    """
    if ADMIN not in held and (missing := [name for name in wanted if name not in held]):
        detail = f"the key does not have the scope {missing[0]}, so it cannot give it"
        raise CorralError("forbidden", detail, hint="use a key that has it", field="/scopes")
    if ends_at is not None and (expires_at is None or expires_at > ends_at):
        hint = "ask for a time that ends before it, or use a key that goes on for longer"
        raise CorralError("forbidden", "the key would go on after the one that makes it has ended", hint=hint)


def check_revoke(held: frozenset[str], scopes: Iterable[str]) -> None:
    """`forbidden` if a holder of these scopes may not end a key like that: who could not give it cannot take it away either."""
    if ADMIN not in held and (missing := [name for name in scopes if name not in held]):
        detail = f"the key has the scope {missing[0]}, which yours does not have, so yours cannot end it"
        raise CorralError("forbidden", detail, hint="use a key that has it")


# -- keys --------------------------------------------------------------------------------------------------------------------------
def key_text(key_id: str, secret: bytes) -> str:
    """The key as its holder keeps it."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has exactly {SECRET_BYTES} bytes")
    return f"ck_{ulid_of(key_id)}_{secret.hex()}"


def key_hash(secret: bytes) -> str:
    """What is kept of it."""
    return hashlib.sha256(secret).hexdigest()


def parse_key(text: str) -> tuple[str, bytes] | None:
    """(key id, secret) of the text of a key, or None."""
    match = _KEY.fullmatch(text) if len(text) < 128 else None
    return None if match is None else (f"key_{match[1]}", bytes.fromhex(match[2]))


def is_of(key: KeyRecord, secret: bytes) -> bool:
    """Whether it is the secret of this key; takes the same time for all that are not."""
    return hmac.compare_digest(key_hash(secret), key.key_hash)


# -- names -------------------------------------------------------------------------------------------------------------------------
def check_tenant_id(value: Any, where: str = "/id") -> str:
    """The id of a tenant, as an operator chooses it."""
    if not isinstance(value, str) or _TENANT_ID.fullmatch(value) is None:
        hint = "1 to 63 of a-z, 0-9, - and _, a letter or digit first"
        raise CorralError("invalid_value", f"{shown(value)} is not the id of a tenant", hint=hint, field=where)
    return value


def check_user_id(value: Any, where: str = "/id") -> str:
    """The id of a user, as a tenant chooses it."""
    if not isinstance(value, str) or _USER_ID.fullmatch(value) is None:
        hint = "1 to 64 of letters, digits, - and _"
        raise CorralError("invalid_value", f"{shown(value)} is not the id of a user", hint=hint, field=where)
    return value


def user_id_of(claim: str) -> str:
    """The id of a user whom somebody else names: the name itself where it is an id, else a digest of it."""
    if _USER_ID.fullmatch(claim) is not None:
        return claim
    return "sub_" + hashlib.sha256(claim.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def check_name(value: Any, where: str = "/name") -> str | None:
    """What people call it; None is no name."""
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_NAME or not value.isprintable():
        hint = f"1 to {MAX_NAME} printable characters"
        raise CorralError("invalid_value", f"{shown(value)} is not a name", hint=hint, field=where)
    return value
