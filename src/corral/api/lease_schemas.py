"""Schemas of what the routes about leases take and answer."""

from __future__ import annotations

from typing import Any

from corral.api.leases import LEAST_TTL_S, MOST_TTL_S, MOST_WAIT_S
from corral.domain.contention import CONTENTIONS
from corral.domain.lease import MAX_OWNER

Json = dict[str, Any]
_OWNER: Json = {"type": "string", "minLength": 1, "maxLength": MAX_OWNER, "description": "Such as session/tool-call."}
_TTL: Json = {"type": ["number", "null"], "minimum": LEAST_TTL_S, "maximum": MOST_TTL_S}
_NULL_OWNER: Json = {**_OWNER, "type": ["string", "null"]}
_MOMENT: Json = {"type": "string", "format": "date-time"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_TEXT: Json = {"type": "string"}
_LEASE: Json = {
    "sandbox_id": _TEXT,
    "owner": {"type": ["string", "null"], "description": "As its holder named it; of an implicit lease the key."},
    "implicit": {"type": "boolean", "description": "Of a caller that knows no leases."},
    "incarnation": _COUNT,
    "lease_version": _COUNT,
    "lease": {"type": "string", "description": "For the header Corral-Lease: <incarnation>.<lease_version>."},
    "ttl_ms": {**_COUNT, "description": "What is left of it; count from before the request was sent."},
    "acquired_at": _MOMENT,
    "expires_at": _MOMENT,
    "session": {"type": ["string", "null"]},
    "state": _TEXT,
}
SCHEMAS: Json = {
    "AttachRequest": {
        "type": "object",
        "additionalProperties": False,
        "required": ["owner"],
        "properties": {
            "owner": _OWNER,
            "ttl_s": _TTL,
            "contention": {"enum": [*CONTENTIONS, None], "description": "If somebody has it."},
            "wait_s": {"type": ["number", "null"], "minimum": 0, "maximum": MOST_WAIT_S},
            "session": {**_NULL_OWNER, "description": "In which the caller works."},
        },
    },
    "RenewRequest": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"owner": _NULL_OWNER, "ttl_s": _TTL},
    },
    "ReleaseRequest": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "owner": _NULL_OWNER,
            "keep": {"type": "boolean", "description": "Execs that no client is attached to go on."},
        },
    },
    "Lease": {"type": "object", "required": sorted(_LEASE), "properties": _LEASE},
    "LeasePage": {
        "type": "object",
        "required": ["items", "next"],
        "properties": {
            "items": {"type": "array", "items": {"$ref": "#/components/schemas/Lease"}},
            "next": {"type": ["string", "null"]},
        },
    },
}
SHOWN: Json = {
    "anyOf": [
        {
            "type": "object",
            "required": ["owner", "lease", "acquired_at", "expires_at"],
            "properties": {name: _LEASE[name] for name in ("owner", "lease", "acquired_at", "expires_at")},
        },
        {"type": "null"},
    ],
    "description": "Who has it; null: nobody.",
}
