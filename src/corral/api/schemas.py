"""Schemas of the OpenAPI document: what requests may say, from the tables that parse them, and what answers have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from corral.api import queue_schemas
from corral.api.lease_schemas import SHOWN as LEASE_SHOWN
from corral.domain.facts import Usage
from corral.domain.grade import LETTERS
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
REASONS = sorted({*ORDER, *NO_OUTCOME})


# -- small schemas -------------------------------------------------------------------------------------------------------------
def ref(name: str) -> Json:
    """The schema of that name."""
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
    return _object({"items": _list(ref(item)), "next": NULL_TEXT})


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
END: Json = {
    "description": "Seconds; none: without a limit, where policy allows it.",
    "anyOf": [SECONDS, {"const": "none"}],
}
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
    "files": _list(ref("FileIn"), MAX_FILES),
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
    "ttl_s": END,
    "ttl": END,
    "idle_timeout_s": END,
    "idle_timeout": END,
    "timeout_s": SECONDS,
    "timeout": SECONDS,
    "memory": SIZE,
    "cpu": {"type": "number", "minimum": 0.01, "description": "Cores."},
    "pids": {"type": "integer", "minimum": MIN_PIDS, "maximum": MAX_PIDS},
    "disk": SIZE,
    "tmp": SIZE,
    "output_limit": SIZE,
    "output_kill": SIZE,
    **queue_schemas.FIELDS,
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
def schemas() -> Json:
    """Every schema of the document by its name. An answer has no member that its schema does not name."""
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
            "stdout": ref("Stream"),
            "stderr": ref("Stream"),
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
            "files": _list(ref("FileChange")),
            "files_truncated": BOOL,
            "artifacts": _list(_object({"path": TEXT, "size": COUNT, "digest": TEXT, "url": TEXT})),
            "usage": _object(usage),
            "limits": _object({name: limit for name in LIMIT_NAMES}),
            "timings": _object({name: NULL_COUNT for name in TIMINGS}),
        }
    )
    decision = _or_null(
        {"type": "object", "properties": {"verdict": TEXT, "reason": TEXT}, "additionalProperties": True}
    )
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
            "result": _or_null(ref("Result")),
            **queue_schemas.RUN_MEMBERS,
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
            "result": _or_null(ref("Result")),
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
        "lease": LEASE_SHOWN,
        "session": NULL_TEXT,
        "created_at": MOMENT,
        "expires_at": {"anyOf": [MOMENT, {"type": "null"}]},
        "idle_timeout_s": {"type": ["number", "null"]},
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
            "capabilities": {"type": "object", "additionalProperties": True},
            "limits": {"type": "object", "additionalProperties": LIMIT_MODES},
            "overshoot": {
                "type": "object",
                "additionalProperties": TEXT,
                "description": "Limit that is watched -> how far a program may get beyond it.",
            },
            "start_ms": {"type": ["number", "null"], "description": "Of a sandbox, at the last probe."},
        }
    )
    grade = {"grade": {"enum": list(LETTERS)}, "reason": TEXT, "hint": NULL_TEXT}
    security = _object(
        {
            "host": _object(grade),
            "runtimes": _list(_object({"name": TEXT, **grade})),
            "checks": _list(
                _object(
                    {
                        "name": TEXT,
                        "kind": {"enum": ["must", "should", "may"]},
                        "ok": {"type": ["boolean", "null"], "description": "null: it cannot be told here."},
                        "seen": TEXT,
                        "hint": NULL_TEXT,
                    }
                )
            ),
        }
    )
    leftover = _object({"kind": TEXT, "id": TEXT, "instance_id": NULL_TEXT, "path": TEXT}, ("path",))
    summary = {
        "name": TEXT,
        "digest": NULL_TEXT,
        "available": {**BOOL, "description": "It is built, or this host can build it."},
        "reason": NULL_TEXT,
        "languages": _list(TEXT),
        "description": TEXT,
        "kind": {"enum": ["frozen", "debian", "archive", "oci"]},
        "skills": _list(TEXT),
    }
    template = {
        **summary,
        "allowed": {**BOOL, "description": "Policy lets callers use it."},
        "build": _or_null(
            _object(
                {
                    "state": {"enum": ["building", "failed"]},
                    "text": TEXT,
                    "part": {"type": ["number", "null"]},
                    "error": _or_null(ref("Problem")),
                }
            )
        ),
    }
    left_out = {
        "type": "object",
        "additionalProperties": COUNT,
        "description": "Kind of entry that no base has -> how many.",
    }
    words = _or_null(_list(TEXT))
    detail = {
        "path": NULL_TEXT,
        "size_bytes": NULL_COUNT,
        "files": NULL_COUNT,
        "built_at": {"type": ["number", "null"], "description": "Seconds since 1970."},
        "build_s": {"type": ["number", "null"]},
        "packages": _or_null({"type": "object", "additionalProperties": TEXT}),
        "archive": _or_null(_object({"sha256": TEXT, "left_out": left_out})),
        "image": _or_null(
            _object(
                {
                    "digest": TEXT,
                    "platform": TEXT,
                    "layers": _list(TEXT),
                    "left_out": left_out,
                    "env": _list(TEXT),
                    "entrypoint": _list(TEXT),
                    "cmd": _list(TEXT),
                    "working_dir": NULL_TEXT,
                    "user": NULL_TEXT,
                }
            )
        ),
        "recipe": {
            "type": "object",
            "additionalProperties": True,
            "description": "The operator's, without members that say nothing.",
        },
        **dict.fromkeys(("start", "ready", "health"), words),
        "stop_signal": NULL_TEXT,
    }
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
        "TemplateDetail": _object({**template, **detail, "sandboxes": _list(TEXT)}),
        "Removed": _object({"name": TEXT, "digest": NULL_TEXT, "freed_bytes": NULL_COUNT}),
        "Doctor": _object(
            {
                "runtimes": _list(runtime),
                "default": NULL_TEXT,
                "default_reason": TEXT,
                "host": _object(
                    {
                        "cgroup": {"enum": ["v1", "v2", "hybrid", "none"]},
                        "user": {"enum": ["root", "user"]},
                        "memory_bytes": COUNT,
                        "cpus": {"type": "number"},
                    }
                ),
                "templates": _list(_object(summary)),
                "bases": _object({"count": COUNT, "size_bytes": COUNT, "unused": COUNT, "unused_bytes": COUNT}),
                "leftovers": _list(leftover),
                "quota": queue_schemas.DRIFT,
                "security": {**security, "description": "With `security` only."},
            },
            ("security",),
        ),
        "Garbage": _object(
            {
                "removed": {"type": "object", "additionalProperties": COUNT},
                "sandboxes": COUNT,
                "leftovers": _list(leftover),
            }
        ),
        "Status": _object(
            {"status": TEXT, "missing": _list(TEXT), "warnings": _list(TEXT)}, optional=("missing", "warnings")
        ),
        "Nothing": {"type": "object"},
        "Problem": problem,
    }
