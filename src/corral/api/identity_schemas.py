"""Schemas of the OpenAPI document about tenants, users and keys."""

from __future__ import annotations

from typing import Any

from corral.api.schemas import MOMENT, NULL_TEXT, TEXT, _list, _object, _or_null, _page
from corral.domain.identity import MAX_LIFE_MS, MAX_NAME, SCOPES

Json = dict[str, Any]
NULL_MOMENT: Json = {"anyOf": [MOMENT, {"type": "null"}]}
TENANT_ID: Json = {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]{0,62}$"}
USER_ID: Json = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
NAME: Json = {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_NAME}
SCOPE_LIST: Json = {**_list({"enum": list(SCOPES)}), "minItems": 1}
DISABLED: Json = {"type": ["boolean", "null"], "description": "True: keys and tokens are refused from now on."}


def _seconds(least: int, told: str) -> Json:
    return {"type": ["number", "null"], "minimum": least, "maximum": MAX_LIFE_MS // 1000, "description": told}


_key: Json = {
    "id": TEXT,
    "tenant": TEXT,
    "user": NULL_TEXT,
    "name": NULL_TEXT,
    "scopes": SCOPE_LIST,
    "state": {"enum": ["active", "expired", "revoked"]},
    "owner": {**TEXT, "description": "Whose its implicit leases are; a rotation keeps it."},
    "created_at": MOMENT,
    "created_by": TEXT,
    "expires_at": NULL_MOMENT,
    "revoked_at": NULL_MOMENT,
    "last_used_at": NULL_MOMENT,
    "rotated_from": NULL_TEXT,
}
_told = "The key itself, this once; null if it was made, and used, before under the same Idempotency-Key."

SCHEMAS: Json = {
    "Caller": _object(
        {
            "tenant": TEXT,
            "user": NULL_TEXT,
            "key": NULL_TEXT,
            "by": {"enum": ["server", "key", "token"]},
            "owner": TEXT,
            "scopes": _list({"enum": list(SCOPES)}),
            "expires_at": NULL_MOMENT,
        }
    ),
    "TenantRequest": _object({"id": _or_null(TENANT_ID), "name": NAME}, ("id", "name"), closed=True),
    "ChangeRequest": _object({"name": NAME, "disabled": DISABLED}, ("name", "disabled"), closed=True),
    "Tenant": _object(
        {
            "id": TEXT,
            "name": TEXT,
            "state": {"enum": ["active", "disabled", "deleted"]},
            "created_at": MOMENT,
            "created_by": TEXT,
            "disabled_at": NULL_MOMENT,
        }
    ),
    "TenantPage": _page("Tenant"),
    "UserRequest": _object(
        {"id": _or_null(USER_ID), "name": NAME, "tenant": _or_null(TENANT_ID)}, ("id", "name", "tenant"), closed=True
    ),
    "User": _object(
        {
            "id": TEXT,
            "tenant": TEXT,
            "name": NULL_TEXT,
            "state": {"enum": ["active", "disabled"]},
            "created_at": MOMENT,
            "disabled_at": NULL_MOMENT,
        }
    ),
    "UserPage": _page("User"),
    "KeyRequest": _object(
        {
            "scopes": SCOPE_LIST,
            "tenant": _or_null(TENANT_ID),
            "user": {**_or_null(USER_ID), "description": "One who is not known yet is made."},
            "name": NAME,
            "expires_in_s": _seconds(1, "Without it the key does not expire."),
        },
        ("scopes", "tenant", "user", "name", "expires_in_s"),
        closed=True,
    ),
    "RotateRequest": _object(
        {
            "expires_in_s": _seconds(1, "Else as long as the old key was made for."),
            "overlap_s": _seconds(0, "How long the old key goes on; a day if nothing is said."),
        },
        ("expires_in_s", "overlap_s"),
        closed=True,
    ),
    "Key": _object(_key),
    "KeyPage": _page("Key"),
    "NewKey": _object({**_key, "key": {**NULL_TEXT, "description": _told}}),
}
