"""Schemas of what the routes about the queue and webhooks answer, and of what these add to requests and runs."""

from __future__ import annotations

from typing import Any

from corral.domain.quota import NAMES, PRIORITIES
from corral.domain.webhook import MAX_SECRET, MAX_URL

Json = dict[str, Any]
_MOMENT: Json = {"type": "string", "format": "date-time"}
_NULL_MOMENT: Json = {"anyOf": [_MOMENT, {"type": "null"}]}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NULL_TEXT: Json = {"type": ["string", "null"]}
_URL: Json = {"type": "string", "minLength": 1, "maxLength": MAX_URL}


def _all(properties: Json, description: str | None = None) -> Json:
    made: Json = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {**made, "description": description} if description else made


FIELDS: Json = {
    "priority": {"enum": list(PRIORITIES), "description": "In the order in which a tenant's queued runs start."},
    "queue_timeout_s": {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "How long it may wait in the queue; then it ends with the reason queue_timeout.",
    },
    "queue_timeout": {"type": "number", "exclusiveMinimum": 0},
    "expected_s": {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "How long it will probably run: what it costs in the queue. What it lasts longer is charged when it ends.",
    },
    "webhook": {
        "description": "Who is told of the end: a URL, or an object with the secret that the delivery is signed with.",
        "anyOf": [
            _URL,
            {
                "type": "object",
                "properties": {
                    "url": _URL,
                    "secret": {"type": ["string", "null"], "maxLength": 2 * MAX_SECRET, "writeOnly": True},
                },
                "required": ["url"],
                "additionalProperties": False,
            },
        ],
    },
}
"""Fields of a run's request."""

_PLACE: Json = {
    "position": {**_COUNT, "minimum": 1},
    "priority": {"enum": list(PRIORITIES)},
    "queued_at": _MOMENT,
    "deadline_at": _MOMENT,
}
RUN_MEMBERS: Json = {
    "queue": {
        "anyOf": [
            _all(
                {
                    **_PLACE,
                    "ahead": {**_COUNT, "description": "Runs of its tenant that start before it."},
                    "waiting_for": {
                        **_NULL_TEXT,
                        "description": "The limit that is used up, such as tenants.running; null: others are before it.",
                    },
                }
            ),
            {"type": "null"},
        ],
        "description": "While it waits.",
    },
    "webhook": {
        "anyOf": [
            _all(
                {
                    "id": {"type": "string"},
                    "url": _URL,
                    "state": {"enum": ["waiting", "pending", "delivered", "failed"]},
                    "attempts": _COUNT,
                    "of_at_most": _COUNT,
                    "next_at": _NULL_MOMENT,
                    "last_status": {"type": ["integer", "null"]},
                    "last_error": _NULL_TEXT,
                    "done_at": _NULL_MOMENT,
                }
            ),
            {"type": "null"},
        ]
    },
}
"""Members of a run's document."""

_HELD: Json = {name: {"type": "number", "minimum": 0} for name in NAMES}
_MOST: Json = {name: {"type": ["number", "null"]} for name in NAMES}
DRIFT: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"kind": {"enum": ["no_holder", "not_reserved", "sum"]}, "subject": {"type": "string"}},
        "required": ["kind", "subject"],
        "additionalProperties": True,
    },
    "description": "Where what is reserved is not what is live; empty on a sound installation.",
}
SCHEMAS: Json = {
    "Queue": _all(
        {
            "items": {"type": "array", "items": _all({"run_id": {"type": "string"}, **_PLACE})},
            "waiting": _COUNT,
            "use": _all(_HELD, "What the tenant holds now; cpu in cores."),
            "limits": _all(_MOST, "What it may hold; null: no limit."),
            "weight": {"type": "number"},
            "priorities": {"type": "array", "items": {"enum": list(PRIORITIES)}},
        }
    ),
    "WebhookSecret": _all(
        {
            "secret": {"type": "string"},
            "created_at": _MOMENT,
            "old_secret_until": {**_NULL_MOMENT, "description": "Until then the one before signs too."},
        }
    ),
}
