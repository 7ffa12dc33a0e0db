"""The OpenAPI document, made from the table of routes and from the tables that parse requests, so that it cannot drift from them.

A route without an operation here, a field of a request without a schema, or either without the other, is an error of `document`.
`python -m corral.api.openapi` prints it; the committed copy is docs/reference/openapi.json, which a test compares.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Any

from corral.api.calls import MAX_WAIT_S
from corral.api.files import MAX_PAGE
from corral.api.routes import MAX_OFFSET, ROUTES
from corral.domain.facts import Usage
from corral.domain.limits import LIMIT_NAMES
from corral.domain.request import (
    EXEC_FIELDS,
    ISOLATIONS,
    LATER_FIELDS,
    MAX_CODE,
    MAX_FILES,
    RESOURCE_FIELDS,
    RUN_FIELDS,
    SANDBOX_FIELDS,
)
from corral.domain.result import NO_OUTCOME, ORDER, PHASES, TIMINGS
from corral.domain.runner import LANGUAGES
from corral.domain.values import MAX_PATH, MAX_PIDS, MIN_PIDS
from corral.errors import CODES

Json = dict[str, Any]
MAX_LIST = 1000
REASONS = sorted({*ORDER, *NO_OUTCOME})


# -- small schemas -------------------------------------------------------------------------------------------------------------
def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(properties: Json, optional: Iterable[str] = (), *, closed: bool = False) -> Json:
    left_out = set(optional)
    made: Json = {"type": "object", "properties": properties}
    if required := [name for name in properties if name not in left_out]:
        made["required"] = required
    if closed:
        made["additionalProperties"] = False
    return made


def _list(item: Json, most: int | None = None) -> Json:
    return {"type": "array", "items": item, **({"maxItems": most} if most is not None else {})}


def _page(item: str) -> Json:
    return _object({"items": _list(_ref(item)), "next": NULL_TEXT})


TEXT: Json = {"type": "string"}
BOOL: Json = {"type": "boolean"}
COUNT: Json = {"type": "integer", "minimum": 0}
NULL_TEXT: Json = {"type": ["string", "null"]}
NULL_COUNT: Json = {"type": ["integer", "null"], "minimum": 0}
MOMENT: Json = {"type": "string", "format": "date-time"}
IDENT: Json = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}
MODE: Json = {"type": "string", "pattern": "^0?[0-7]{3,4}$"}
SIZE: Json = {
    "description": "Bytes; text may have K, M or G (binary).",
    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]+[KMG]?$"}],
}
SECONDS: Json = {"type": "number", "exclusiveMinimum": 0}
WORD: Json = {"type": "string", "description": "Without a NUL character."}
NAME: Json = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}
LIMIT_MODES: Json = {"enum": ["enforced", "watched", "absent"]}


# -- requests: one schema for each word that the parsers know --------------------------------------------------------------------
FIELDS: Json = {
    "code": {"type": "string", "maxLength": MAX_CODE, "description": "Text of a program; needs language."},
    "language": {"enum": list(LANGUAGES)},
    "command": {**_list(WORD), "minItems": 1, "description": "Argument list."},
    "argv": {**_list(WORD), "minItems": 1, "description": "Argument list."},
    "shell": {**WORD, "minLength": 1, "description": "A command line for /bin/sh."},
    "args": {**_list(WORD), "description": "Arguments after the program."},
    "code_path": {"type": "string", "maxLength": MAX_PATH, "description": "Name of the code's file under /workspace."},
    "files": _list(_ref("FileIn"), MAX_FILES),
    "stdin": {"type": "string", "description": "Input as text, then end of file."},
    "stdin_base64": {"type": "string", "format": "byte", "description": "Input as bytes; excludes stdin."},
    "stdin_open": {**BOOL, "description": "More input follows by POST /v1/execs/{exec_id}/stdin."},
    "env": {"type": "object", "additionalProperties": TEXT},
    "cwd": {"type": "string", "pattern": "^/", "maxLength": MAX_PATH},
    "user": {"enum": ["sandbox", "root"]},
    "outputs": {
        "description": "Patterns under /workspace whose files are kept as artifacts.",
        "anyOf": [TEXT, _list(TEXT, 100)],
    },
    "attached": {**BOOL, "description": "Cancel it when no client waits for it or follows it any more."},
    "keep": {**BOOL, "description": "Leave the sandbox leased to the caller, for ttl_s."},
    "pty": {
        "description": "A terminal: true, [rows, columns] or an object.",
        "anyOf": [
            BOOL,
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 65535},
                "minItems": 2,
                "maxItems": 2,
            },
            _object(
                {name: {"type": "integer", "minimum": 1, "maximum": 65535} for name in ("rows", "cols")},
                ("rows", "cols"),
                closed=True,
            ),
        ],
    },
    "wait": {
        "description": "How long to wait for the result; false: not at all.",
        "anyOf": [BOOL, {"type": "number", "minimum": 0}],
    },
    "ttl_s": SECONDS,
    "ttl": SECONDS,
    "timeout_s": SECONDS,
    "timeout": SECONDS,
    "memory": SIZE,
    "cpu": {"type": "number", "minimum": 0.01, "description": "Cores."},
    "pids": {"type": "integer", "minimum": MIN_PIDS, "maximum": MAX_PIDS},
    "disk": SIZE,
    "tmp": SIZE,
    "output_limit": SIZE,
    "output_kill": SIZE,
    "resources": None,  # made below, from the words above
    "runtime": NAME,
    "template": NAME,
    "isolation": {"enum": list(ISOLATIONS)},
    "network": {"enum": ["none"]},
    "session": None,  # of a later version
}
LATER: Json = {"enum": [None], "description": "Of a later version: refused as not_supported_yet unless it is empty."}


def _request(known: frozenset[str]) -> Json:
    """The schema of a request from the words that its parser knows."""
    properties: Json = {}
    for name in sorted(known):
        if name in LATER_FIELDS or name == "session":
            properties[name] = LATER
        elif name == "resources":
            inner = {word: _or_null(FIELDS[word]) for word in RESOURCE_FIELDS}
            properties[name] = _or_null(_object(inner, inner, closed=True))
        else:
            properties[name] = _or_null(FIELDS[name])
    return _object(properties, properties, closed=True)


# -- answers -------------------------------------------------------------------------------------------------------------------
def _schemas() -> Json:
    stream = _object(
        {
            "bytes": {**COUNT, "description": "Produced."},
            "kept_bytes": COUNT,
            "truncated": BOOL,
            "text": {**NULL_TEXT, "description": "What is kept, as UTF-8; null where output was not asked for."},
            "base64": {**NULL_TEXT, "description": "The exact bytes where text is not exact."},
            "head_bytes": NULL_COUNT,
        }
    )
    usage = {each.name: {"type": ["number", "null"]} for each in fields(Usage)}
    limit = _object({"value": {"type": ["number", "null"]}, "mode": LIMIT_MODES, "hit": BOOL, "kill": COUNT}, ("kill",))
    build = _object(
        {
            "exec_id": TEXT,
            "exit_code": {"type": ["integer", "null"]},
            "reason": {"enum": REASONS},
            "running_ms": NULL_COUNT,
            "stdout_bytes": COUNT,
            "stderr_bytes": COUNT,
        }
    )
    result = _object(
        {
            "exit_code": {"type": ["integer", "null"]},
            "signal": NULL_TEXT,
            "reason": {"enum": REASONS},
            "hint": NULL_TEXT,
            "phase": {
                "enum": [*PHASES, None],
                "description": "`build`: the build of code in a compiled language did not succeed, and what is told is how it "
                "ended; `run`: the program; null: neither began, or it is not known.",
            },
            "started": {"type": ["boolean", "null"]},
            "build": {
                **_or_null(build),
                "description": "The build that came before the program; its logs are those of `exec_id`.",
            },
            "stdout": _ref("Stream"),
            "stderr": _ref("Stream"),
            "timeline": _list(
                _object(
                    {
                        "t_ms": {"type": "number"},
                        "stream": {"enum": ["stdout", "stderr"]},
                        "offset": COUNT,
                        "bytes": COUNT,
                    }
                )
            ),
            "files": _list(_ref("FileChange")),
            "files_truncated": BOOL,
            "artifacts": _list(_object({"path": TEXT, "size": COUNT, "digest": TEXT, "url": TEXT})),
            "usage": _object(usage),
            "limits": _object({name: limit for name in LIMIT_NAMES}),
            "timings": _object({name: NULL_COUNT for name in TIMINGS}),
        }
    )
    decision = _or_null({"type": "object", "properties": {"verdict": TEXT, "reason": TEXT}})
    run = _object(
        {
            "id": TEXT,
            "state": {"enum": ["queued", "starting", "running", "collecting", "finished"]},
            "sandbox_id": NULL_TEXT,
            "lease_version": {"type": ["integer", "null"]},
            "exec_id": NULL_TEXT,
            "created_at": MOMENT,
            "decisions": {
                "type": "object",
                "properties": {n: decision for n in ("plan", "guard", "reuse", "placement")},
            },
            "result": _or_null(_ref("Result")),
            "agent_view": TEXT,
        },
        ("agent_view",),
    )
    an_exec = _object(
        {
            "id": TEXT,
            "sandbox_id": TEXT,
            "lease_version": {"type": "integer"},
            "incarnation": {"type": "integer"},
            "state": TEXT,
            "created_at": MOMENT,
            "result": _or_null(_ref("Result")),
            "agent_view": TEXT,
        },
        ("agent_view",),
    )
    sandbox: Json = {
        "id": TEXT,
        "state": TEXT,
        "runtime": TEXT,
        "template": TEXT,
        "template_digest": NULL_TEXT,
        "resource_class": NULL_TEXT,
        "limits": {"type": "object", "additionalProperties": limit},
        "lease_version": {"type": "integer"},
        "incarnation": {"type": "integer"},
        "session": NULL_TEXT,
        "created_at": MOMENT,
        "expires_at": {"anyOf": [MOMENT, {"type": "null"}]},
        "conditions": {},
        "tainted": {},
        "failure": NULL_TEXT,
    }
    entry = _object(
        {
            "path": TEXT,
            "path_base64": TEXT,
            "name": TEXT,
            "type": TEXT,
            "size": COUNT,
            "mode": TEXT,
            "uid": COUNT,
            "gid": COUNT,
            "mtime": TEXT,
            "target": TEXT,
            "target_base64": TEXT,
            "error": TEXT,
        },
        ("path", "path_base64", "target", "target_base64", "error"),
    )
    runtime = _object(
        {
            "name": TEXT,
            "usable": BOOL,
            "reason": NULL_TEXT,
            "security_level": {"type": "integer", "minimum": 0, "maximum": 3},
            "version": NULL_TEXT,
            "capabilities": {"type": "object"},
            "limits": {"type": "object", "additionalProperties": LIMIT_MODES},
        }
    )
    template = _object(
        {
            "name": TEXT,
            "digest": NULL_TEXT,
            "available": {**BOOL, "description": "It is built, or this host can build it."},
            "reason": NULL_TEXT,
            "languages": _list(TEXT),
            "description": TEXT,
            "kind": {"enum": ["frozen", "debian", "archive", "oci"]},
            "skills": _list(TEXT),
            "allowed": {**BOOL, "description": "Policy lets callers use it."},
            "build": _or_null(
                _object(
                    {
                        "state": {"enum": ["building", "failed"]},
                        "text": TEXT,
                        "part": {"type": ["number", "null"]},
                        "error": _or_null(_ref("Problem")),
                    }
                )
            ),
        }
    )["properties"]
    problem = _object(
        {
            "type": TEXT,
            "title": TEXT,
            "status": {"type": "integer", "minimum": 400, "maximum": 599},
            "detail": TEXT,
            "code": {"enum": sorted(CODES)},
            "retryable": BOOL,
            "hint": NULL_TEXT,
            "field": {**TEXT, "description": "JSON pointer of the value to blame."},
        },
        ("field",),
    )
    file_in = _object(
        {
            "path": {"type": "string", "minLength": 1, "maxLength": MAX_PATH, "description": "Relative to /workspace."},
            "content": NULL_TEXT,
            "base64": {"type": ["string", "null"], "format": "byte"},
            "mode": {"anyOf": [MODE, {"type": "integer", "minimum": 0, "maximum": 0o777}, {"type": "null"}]},
            "type": {"enum": ["file", "dir", None]},
        },
        ("content", "base64", "mode", "type"),
        closed=True,
    )
    return {
        "RunRequest": {
            **_request(RUN_FIELDS),
            "description": "Exactly one of code (with language), command and shell.",
        },
        "SandboxRequest": _request(SANDBOX_FIELDS),
        "ExecRequest": {**_request(EXEC_FIELDS), "description": "Exactly one of argv (or command), shell and code."},
        "FileIn": file_in,
        "SignalRequest": _object(
            {
                "signal": {
                    "anyOf": [{"type": "integer", "minimum": 1, "maximum": 64}, {"type": "string", "maxLength": 10}]
                }
            }
        ),
        "ResizeRequest": _object({n: {"type": "integer", "minimum": 1, "maximum": 65535} for n in ("rows", "cols")}),
        "MoveRequest": _object(
            {"from": TEXT, "to": TEXT, "from_base64": TEXT, "to_base64": TEXT, "overwrite": BOOL, "user": TEXT},
            ("from", "to", "from_base64", "to_base64", "overwrite", "user"),
            closed=True,
        ),
        "MkdirRequest": _object(
            {"path": TEXT, "path_base64": TEXT, "parents": BOOL, "mode": MODE, "user": TEXT},
            ("path", "path_base64", "parents", "mode", "user"),
            closed=True,
        ),
        "Run": run,
        "RunSummary": _object(
            {
                "id": TEXT,
                "state": TEXT,
                "sandbox_id": NULL_TEXT,
                "reason": NULL_TEXT,
                "exit_code": {"type": ["integer", "null"]},
                "created_at": MOMENT,
                "finished_at": {"anyOf": [MOMENT, {"type": "null"}]},
                "total_ms": {"type": ["number", "null"]},
            }
        ),
        "RunPage": _page("RunSummary"),
        "Exec": an_exec,
        "ExecPage": _page("Exec"),
        "Result": result,
        "Stream": stream,
        "FileChange": _object(
            {
                "path": TEXT,
                "change": {"enum": ["created", "modified", "deleted"]},
                "type": {"enum": ["file", "dir", "symlink"]},
                "size": COUNT,
                "mode": TEXT,
                "digest": NULL_TEXT,
            }
        ),
        "Sandbox": _object(sandbox),
        "SandboxPage": _page("Sandbox"),
        "SandboxDetail": _object(
            {**sandbox, "instance": _or_null({"type": "object"}), "history": _list({"type": "object"})}
        ),
        "Entry": entry,
        "EntryPage": _page("Entry"),
        "Taken": _object({"open": {**BOOL, "description": "False: the program reads no more."}}),
        "BuildRequest": _object(
            {"name": IDENT, "refresh": {**BOOL, "description": "Build it anew, beside the base that is there."}},
            ("refresh",),
            closed=True,
        ),
        "Template": _object(template),
        "TemplatePage": _page("Template"),
        "TemplateDetail": _object(
            {
                **template,
                "path": NULL_TEXT,
                "size_bytes": NULL_COUNT,
                "files": NULL_COUNT,
                "built_at": {"type": ["number", "null"], "description": "Seconds since 1970."},
                "packages": _or_null({"type": "object", "additionalProperties": TEXT}),
                "image": _or_null({"type": "object"}),
                "recipe": {"type": "object"},
                "sandboxes": _list(TEXT),
            }
        ),
        "Removed": _object({"name": TEXT, "digest": NULL_TEXT, "freed_bytes": NULL_COUNT}),
        "Doctor": _object(
            {
                "runtimes": _list(runtime),
                "default": NULL_TEXT,
                "host": _object(
                    {"cgroup": {"enum": ["v1", "v2", "hybrid", "none"]}, "user": {"enum": ["root", "user"]}}
                ),
                "leftovers": _list({"type": "object"}),
            }
        ),
        "Garbage": _object({"removed": {"type": "object"}, "sandboxes": COUNT, "leftovers": _list({"type": "object"})}),
        "Status": _object({"status": TEXT}),
        "Nothing": {"type": "object"},
        "Problem": problem,
    }


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
    f"DELETE {_BOX}": Operation("End a sandbox", {200: "Sandbox", 202: "Sandbox"}, ("wait",)),
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
    f"POST {_EXEC}/cancel": Operation("End an exec with all that it started", {200: "Exec"}),
    f"POST {_EXEC}/signal": Operation("Send a signal", {200: "Nothing"}, (), (), "SignalRequest"),
    f"POST {_EXEC}/resize": Operation("Resize its terminal", {200: "Nothing"}, (), (), "ResizeRequest"),
    f"POST {_EXEC}/stdin": Operation(
        "More input; with an offset it may be repeated",
        {200: "Taken"},
        ("offset", "eof"),
        (),
        BINARY,
        body_needed=False,
    ),
    f"GET {_EXEC}/ws": Operation("A WebSocket: output, input, size, signals", {101: "Nothing"}, ("cursor",)),
    "GET /v1/templates": Operation("List templates, by name", {200: "TemplatePage"}),
    "POST /v1/templates": Operation(
        "Build a recipe of the operator", {200: "TemplateDetail", 202: "TemplateDetail"}, ("wait",), (), "BuildRequest"
    ),
    "GET /v1/templates/{name}": Operation("All that is known of a template", {200: "TemplateDetail"}, ("wait",)),
    "DELETE /v1/templates/{name}": Operation("Remove its base, and a recipe that is not shipped", {200: "Removed"}),
    "POST /v1/gc": Operation("Remove what no sandbox owns", {200: "Garbage"}),
    "GET /v1/doctor": Operation("What this host can do", {200: "Doctor"}, ("fresh", "security")),
    "GET /openapi.json": Operation("This document", {200: "Nothing"}),
    "GET /healthz": Operation("The process answers", {200: "Status"}, open=True),
    "GET /readyz": Operation("It can run", {200: "Status", 503: "Status"}, open=True),
}


def _content(what: str) -> Json:
    if "/" not in what:
        return {"application/json": {"schema": _ref(what)}}
    return {what: {"schema": {"type": "string"} if what == EVENTS else {"type": "string", "format": "binary"}}}


def _operation(name: str, operation: Operation, pattern: str, ident: str) -> Json:
    path_names = [part[1:-1].partition(":")[0] for part in pattern.split("/") if part.startswith("{")]
    parameters: list[Json] = [
        {"name": n, "in": "path", "required": True, "schema": IDENT if n.endswith("_id") else TEXT} for n in path_names
    ]
    known = {**QUERY, "limit": {**QUERY["limit"], "maximum": operation.page}}
    parameters += [{"name": n, "in": "query", "schema": known[n]} for n in operation.query]
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
    return made


@functools.cache
def document() -> Json:
    """The whole document. `KeyError` or `ValueError` when a table and this module do not agree."""
    paths: Json = {}
    left = dict(OPERATIONS)
    for route in ROUTES:
        name = f"{route.method} {route.pattern}"
        made = _operation(name, left.pop(name), route.pattern, route.handler.__name__)
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
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "responses": {
                "Problem": {
                    "description": "A refusal or a failure, with what to do about it",
                    "content": {"application/problem+json": {"schema": _ref("Problem")}},
                }
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def text() -> str:
    """The document as committed."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
