"""The OpenAPI document, made from the table of routes and from the tables that parse requests, so that it cannot drift from them.

A route without an operation here, a field of a request without a schema, or either without the other, is an error of `document`.
`python -m corral.api.openapi` prints it; the committed copy is docs/reference/openapi.json, which a test compares.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from corral.api.calls import ANYBODY, MAX_WAIT_S, Route
from corral.api.expiry import SCHEMAS as EXPIRY_SCHEMAS
from corral.api.files import MAX_PAGE
from corral.api.identity_schemas import SCHEMAS
from corral.api.lease_schemas import SCHEMAS as LEASE_SCHEMAS
from corral.api.queue_schemas import SCHEMAS as QUEUE_SCHEMAS
from corral.api.routes import MAX_OFFSET, ROUTES
from corral.api.schemas import FIELDS, IDENT, TEXT, ref, schemas
from corral.domain.request import EXEC_FIELDS, RUN_FIELDS, SANDBOX_FIELDS
from corral.domain.values import MAX_PATH

Json = dict[str, Any]
MAX_LIST = 1000


# -- operations ----------------------------------------------------------------------------------------------------------------
_CHOICE_BOOL: Json = {"enum": ["true", "false", "1", "0"]}
QUERY: dict[str, Json] = {
    "wait": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S},
    "view": {"enum": ["full", "agent"]},
    "output": {"enum": ["full", "none"]},
    "chars": {"type": "integer", "minimum": 200, "maximum": 1_000_000},
    "limit": {"type": "integer", "minimum": 1},
    "after": {"type": "string", "description": "`next` of the page before."},
    "all": _CHOICE_BOOL,
    "fresh": _CHOICE_BOOL,
    "security": _CHOICE_BOOL,
    "follow": _CHOICE_BOOL,
    "stream": {"enum": ["stdout", "stderr"]},
    "encoding": {"enum": ["text", "base64"]},
    "cursor": {"type": "string", "maxLength": 300, "description": "Id of the last event; as Last-Event-ID."},
    "offset": {"type": "integer", "minimum": 0, "maximum": MAX_OFFSET},
    "eof": _CHOICE_BOOL,
    "path": {"type": "string", "minLength": 1, "maxLength": MAX_PATH},
    "path_base64": {"type": "string", "description": "The path where its bytes are not UTF-8; excludes path."},
    "user": {"enum": ["sandbox", "root"]},
    "mode": {"type": "string", "pattern": "^0?[0-7]{3}$"},
    "parents": _CHOICE_BOOL,
    "overwrite": _CHOICE_BOOL,
    "recursive": _CHOICE_BOOL,
    "unknown": _CHOICE_BOOL,
    "tenant": {"type": "string", "description": "Whose, for a key with the scope admin; else one's own."},
}
SECURITY: Json = {
    "key": {"type": "http", "scheme": "bearer", "description": "The server's own key, or one of POST /v1/keys."},
    "token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT", "description": "Of the configured issuer."},
}
KEY, LEASE = "Idempotency-Key", "Corral-Lease"
HEADERS: dict[str, Json] = {
    KEY: {
        "type": "string",
        "minLength": 1,
        "maxLength": 200,
        "description": "The same key: the same thing, made once.",
    },
    LEASE: {
        "type": "string",
        "description": "<incarnation>.<lease_version>: refused as lease_lost when it is not current.",
    },
    "Last-Event-ID": {"type": "string", "maxLength": 300},
    "Range": {"type": "string", "description": "bytes=FIRST-LAST"},
    "If-Range": {"type": "string", "description": "ETag for which the range is wanted; of another file all is sent."},
}
BINARY, TAR, EVENTS = "application/octet-stream", "application/x-tar", "text/event-stream"
RESULT_VIEW = ("view", "output", "chars")
FILE = ("path", "path_base64", "user")


@dataclass(frozen=True)
class Operation:
    """What a route takes and answers. `body`: a schema's name or a media type; `answers`: status -> the same."""

    summary: str
    answers: dict[int, str]
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    body: str | None = None
    body_needed: bool = True
    open: bool = False
    """Needs no key."""
    page: int = MAX_LIST
    """The most that `limit` may say."""


_RUN, _EXEC, _BOX = "/v1/runs/{run_id}", "/v1/execs/{exec_id}", "/v1/sandboxes/{sandbox_id}"
_FILES = f"{_BOX}/files"
OPERATIONS: dict[str, Operation] = {
    "POST /v1/runs": Operation(
        "Run code or a command in a fresh sandbox",
        {200: "Run", 202: "Run"},
        ("wait", *RESULT_VIEW),
        (KEY,),
        "RunRequest",
    ),
    "GET /v1/runs": Operation("List runs, newest first", {200: "RunPage"}, ("limit", "after")),
    f"GET {_RUN}": Operation("A run and its result", {200: "Run"}, ("wait", *RESULT_VIEW)),
    f"POST {_RUN}/cancel": Operation("End a run", {200: "Run", 202: "Run"}, ("wait",)),
    f"GET {_RUN}/stream": Operation("Follow a run", {200: EVENTS}, ("cursor", "encoding"), ("Last-Event-ID",)),
    f"GET {_RUN}/logs": Operation("Output as bytes", {200: BINARY}, ("stream", "follow")),
    f"GET {_RUN}/artifacts/{{path:path}}": Operation("An artifact", {200: BINARY}),
    "POST /v1/sandboxes": Operation(
        "Make a sandbox, leased to the caller", {201: "Sandbox"}, (), (KEY,), "SandboxRequest", body_needed=False
    ),
    "GET /v1/sandboxes": Operation("List sandboxes, newest first", {200: "SandboxPage"}, ("limit", "after", "all")),
    f"GET {_BOX}": Operation("A sandbox, its instance and its history", {200: "SandboxDetail"}),
    f"DELETE {_BOX}": Operation("End a sandbox", {200: "Sandbox", 202: "Sandbox"}, ("wait",), (LEASE,)),
    f"POST {_BOX}/attach": Operation("Get a sandbox under a lease", {200: "Lease"}, (), (KEY,), "AttachRequest"),
    f"POST {_BOX}/renew": Operation("Keep a lease", {200: "Lease"}, (), (LEASE,), "RenewRequest", body_needed=False),
    f"POST {_BOX}/release": Operation(
        "Give a lease back", {200: "Sandbox"}, (), (LEASE,), "ReleaseRequest", body_needed=False
    ),
    f"PATCH {_BOX}": Operation("Move the ends of a sandbox", {200: "Sandbox"}, (), (LEASE,), "ExpiryRequest"),
    f"POST {_BOX}/pause": Operation("Stop all that runs in a sandbox for a while", {200: "Sandbox"}, (), (LEASE,)),
    f"POST {_BOX}/resume": Operation("Let a paused sandbox go on", {200: "Sandbox"}, (), (LEASE,)),
    "GET /v1/leases": Operation("Who has which sandbox", {200: "LeasePage"}, ("limit", "after")),
    f"POST {_BOX}/execs": Operation(
        "Start a program in a sandbox", {200: "Exec", 202: "Exec"}, ("wait", *RESULT_VIEW), (KEY, LEASE), "ExecRequest"
    ),
    f"GET {_BOX}/execs": Operation("Execs of a sandbox, oldest first", {200: "ExecPage"}),
    f"GET {_BOX}/logs": Operation("Output of the newest exec as bytes", {200: BINARY}, ("stream", "follow")),
    f"GET {_FILES}/archive": Operation("A path as a tar stream", {200: TAR}, FILE),
    f"PUT {_FILES}/archive": Operation("Unpack a tar stream", {200: "Nothing"}, FILE, (LEASE,), TAR),
    f"GET {_FILES}": Operation("Read a file", {200: BINARY, 206: BINARY}, FILE, ("Range", "If-Range")),
    f"HEAD {_FILES}": Operation("Length and times of a file", {200: BINARY}, FILE),
    f"PUT {_FILES}": Operation(
        "Write a file, whole or not at all",
        {200: "Entry", 201: "Entry"},
        (*FILE, "mode", "parents", "overwrite"),
        (LEASE,),
        BINARY,
    ),
    f"DELETE {_FILES}": Operation("Delete a file or directory", {200: "Nothing"}, (*FILE, "recursive"), (LEASE,)),
    f"GET {_FILES}/stat": Operation("What lies at a path", {200: "Entry"}, (*FILE, "follow")),
    f"GET {_FILES}/list": Operation(
        "What lies in a directory", {200: "EntryPage"}, (*FILE, "recursive", "limit", "after"), page=MAX_PAGE
    ),
    f"POST {_FILES}/move": Operation("Rename", {200: "Entry"}, (), (KEY, LEASE), "MoveRequest"),
    f"POST {_FILES}/mkdir": Operation("Make a directory", {200: "Entry"}, (), (LEASE,), "MkdirRequest"),
    f"GET {_FILES}/watch": Operation("Changes below a path, as they happen", {200: EVENTS}, (*FILE, "recursive")),
    f"GET {_EXEC}": Operation("An exec and its result", {200: "Exec"}, ("wait", *RESULT_VIEW)),
    f"GET {_EXEC}/stream": Operation("Follow an exec", {200: EVENTS}, ("cursor", "encoding"), ("Last-Event-ID",)),
    f"GET {_EXEC}/logs": Operation("Output as bytes", {200: BINARY}, ("stream", "follow")),
    f"GET {_EXEC}/artifacts/{{path:path}}": Operation("An artifact", {200: BINARY}),
    f"POST {_EXEC}/cancel": Operation("End an exec with all that it started", {200: "Exec"}, (), (LEASE,)),
    f"POST {_EXEC}/signal": Operation("Send a signal", {200: "Nothing"}, (), (LEASE,), "SignalRequest"),
    f"POST {_EXEC}/resize": Operation("Resize its terminal", {200: "Nothing"}, (), (LEASE,), "ResizeRequest"),
    f"POST {_EXEC}/stdin": Operation(
        "More input; with an offset it may be repeated",
        {200: "Taken"},
        ("offset", "eof"),
        (LEASE,),
        BINARY,
        body_needed=False,
    ),
    f"GET {_EXEC}/ws": Operation("A WebSocket: output, input, size, signals", {101: "Nothing"}, ("cursor",), (LEASE,)),
    "GET /v1/templates": Operation("List templates, by name", {200: "TemplatePage"}),
    "POST /v1/templates": Operation(
        "Build a recipe of the operator", {200: "TemplateDetail", 202: "TemplateDetail"}, ("wait",), (), "BuildRequest"
    ),
    "GET /v1/templates/{name}": Operation("All that is known of a template", {200: "TemplateDetail"}, ("wait",)),
    "DELETE /v1/templates/{name}": Operation("Remove its base, and a recipe that is not shipped", {200: "Removed"}),
    "GET /v1/whoami": Operation("Who the key is, and what it may do", {200: "Caller"}),
    "POST /v1/tenants": Operation("Make a tenant", {201: "Tenant"}, (), (KEY,), "TenantRequest", body_needed=False),
    "GET /v1/tenants": Operation("List tenants, by id", {200: "TenantPage"}, ("limit", "after")),
    "GET /v1/tenants/{tenant_id}": Operation("A tenant", {200: "Tenant"}),
    "PATCH /v1/tenants/{tenant_id}": Operation(
        "Rename, disable or enable a tenant", {200: "Tenant"}, (), (), "ChangeRequest"
    ),
    "DELETE /v1/tenants/{tenant_id}": Operation("Delete a disabled tenant in which nothing goes on", {200: "Tenant"}),
    "POST /v1/users": Operation("Make a user", {201: "User"}, (), (KEY,), "UserRequest", body_needed=False),
    "GET /v1/users": Operation("List users, by id", {200: "UserPage"}, ("tenant", "limit", "after")),
    "GET /v1/users/{user_id}": Operation("A user", {200: "User"}, ("tenant",)),
    "PATCH /v1/users/{user_id}": Operation(
        "Rename, disable or enable a user", {200: "User"}, ("tenant",), (), "ChangeRequest"
    ),
    "DELETE /v1/users/{user_id}": Operation("Delete a user and revoke his keys", {200: "Nothing"}, ("tenant",)),
    "POST /v1/keys": Operation("Make a key", {201: "NewKey"}, (), (KEY,), "KeyRequest", body_needed=False),
    "GET /v1/keys": Operation("List keys, newest first", {200: "KeyPage"}, ("tenant", "limit", "after")),
    "GET /v1/keys/{key_id}": Operation("A key, without its secret", {200: "Key"}),
    "DELETE /v1/keys/{key_id}": Operation("Revoke a key, at once and for good", {200: "Key"}),
    "POST /v1/keys/{key_id}/rotate": Operation(
        "Make a successor of a key", {201: "NewKey"}, (), (KEY,), "RotateRequest", body_needed=False
    ),
    "GET /v1/queue": Operation(
        "The tenant's queued runs in their order, and what it holds", {200: "Queue"}, ("limit",)
    ),
    "GET /v1/webhooks/secret": Operation("What the tenant's webhooks are signed with", {200: "WebhookSecret"}),
    "POST /v1/webhooks/secret/rotate": Operation(
        "Sign with a new secret; the old one signs beside it for a day", {200: "WebhookSecret"}
    ),
    "POST /v1/gc": Operation("Remove what no sandbox owns", {200: "Garbage"}, ("unknown",)),
    "GET /v1/doctor": Operation("What this host can do", {200: "Doctor"}, ("fresh", "security")),
    "GET /openapi.json": Operation("This document", {200: "Nothing"}),
    "GET /healthz": Operation("The process answers", {200: "Status"}, open=True),
    "GET /readyz": Operation("It can run", {200: "Status", 503: "Status"}, open=True),
}


def _content(what: str) -> Json:
    if "/" not in what:
        return {"application/json": {"schema": ref(what)}}
    return {what: {"schema": {"type": "string"} if what == EVENTS else {"type": "string", "format": "binary"}}}


def _operation(name: str, operation: Operation, route: Route) -> Json:
    pattern, ident = route.pattern, route.handler.__name__
    path_names = [part[1:-1].partition(":")[0] for part in pattern.split("/") if part.startswith("{")]
    parameters: list[Json] = [
        {"name": n, "in": "path", "required": True, "schema": IDENT if n.endswith("_id") else TEXT} for n in path_names
    ]
    known = {**QUERY, "limit": {**QUERY["limit"], "maximum": operation.page}}
    query = (*operation.query, "tenant") if route.of_tenant else operation.query
    parameters += [{"name": n, "in": "query", "schema": known[n]} for n in query]
    parameters += [{"name": n, "in": "header", "schema": HEADERS[n]} for n in operation.headers]
    responses: Json = {}
    for status, what in operation.answers.items():
        responses[str(status)] = {"description": operation.summary}
        if status != 101 and not name.startswith("HEAD "):
            responses[str(status)]["content"] = _content(what)
    responses["4XX"] = {"$ref": "#/components/responses/Problem"}
    responses["5XX"] = {"$ref": "#/components/responses/Problem"}
    made: Json = {"operationId": ident, "summary": operation.summary, "parameters": parameters, "responses": responses}
    if operation.body is not None:
        made["requestBody"] = {"required": operation.body_needed, "content": _content(operation.body)}
    if operation.open:
        made["security"] = []
    if (needs := route.needs) != ANYBODY:
        made["x-corral-scope"] = needs
    return made


@functools.cache
def document() -> Json:
    """The whole document. `KeyError` or `ValueError` when a table and this module do not agree."""
    paths: Json = {}
    left = dict(OPERATIONS)
    for route in ROUTES:
        name = f"{route.method} {route.pattern}"
        made = _operation(name, left.pop(name), route)
        paths.setdefault(route.pattern.replace(":path}", "}"), {})[route.method.lower()] = made
    if left:
        raise ValueError(f"operations without a route: {sorted(left)}")
    unknown = set(FIELDS) - (RUN_FIELDS | SANDBOX_FIELDS | EXEC_FIELDS)
    if unknown:
        raise ValueError(f"fields that no request has: {sorted(unknown)}")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Corral",
            "version": version("corral"),
            "description": "Untrusted intents in, explained results out. Each error is a problem document (RFC 9457).",
        },
        "security": [{"key": []}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas(), **SCHEMAS, **LEASE_SCHEMAS, **EXPIRY_SCHEMAS, **QUEUE_SCHEMAS},
            "responses": {
                "Problem": {
                    "description": "A refusal or a failure, with what to do about it",
                    "content": {"application/problem+json": {"schema": ref("Problem")}},
                }
            },
            "securitySchemes": SECURITY,
        },
    }


def text() -> str:
    """The document as committed."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
