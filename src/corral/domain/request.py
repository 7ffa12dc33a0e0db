"""What a caller asks for: parsed from JSON with an exact error for each bad value. The words are those of the contract (1 and 5).

`parse_run`, `parse_sandbox`, `parse_exec` take the decoded JSON object and return frozen values, or raise `CorralError` with
`field` = JSON pointer: `invalid_value` (does not parse, <= 0, over the host), `not_supported_yet` (a field of the schema that this
version cannot honour, named), `unknown_language`, `too_large`. Unknown members are refused by name with the nearest known one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from corral.domain.expiry import NONE, UNLIMITED_S
from corral.domain.limits import MIB
from corral.domain.quantities import format_bytes, parse_seconds, shown
from corral.domain.quota import PRIORITIES
from corral.domain.runner import LANGUAGES, NO_NAMES, Names
from corral.domain.values import (
    MAX_ENCODED,
    MAX_PATH,
    MAX_WORD,
    MAX_WORDS,
    MIN_DISK,
    MIN_MEMORY,
    bytes_of,
    cores,
    count,
    empty,
    file_mode,
    invalid,
    is_number,
    nearest,
    pointer,
    relative_path,
    size_of,
    utf8_of,
)
from corral.errors import CorralError

MAX_CODE = MIB
MAX_FILES = 10_000
ISOLATIONS = ("standard", "strong")
DEFAULT_OUTPUTS = ("/workspace/out/**",)
DEFAULT_PTY = (24, 80)


@dataclass(frozen=True)
class HostCaps:
    """What the host has: no wish can be larger."""

    memory_bytes: int
    cpus: float


@dataclass(frozen=True)
class FileIn:
    """A file given inline: `path` relative to /workspace (no `..`, no NUL), bytes (None: it is a directory), mode."""

    path: str
    content: bytes | None
    mode: int = 0o644


@dataclass(frozen=True)
class ResourceWishes:
    """What the caller wrote; None = not said (policy's default)."""

    memory_bytes: int | None = None
    cpu: float | None = None
    pids: int | None = None
    disk_bytes: int | None = None
    tmp_bytes: int | None = None
    output_bytes: int | None = None
    output_kill_bytes: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class Placement:
    """Wishes about where: None = decide for me."""

    runtime: str | None = None
    template: str | None = None
    isolation: str | None = None
    """`standard` (level 1 where there is one) or `strong` (2 or 3)."""
    network: str | None = None
    session: str | None = None


@dataclass(frozen=True)
class RunRequest:
    """Exactly one of `code` (needs `language`), `command` (argv), `shell`.

    `code_path`: when the code came as FILE, the name that it has under /workspace. `args` go after the program.
    """

    code: str | None = None
    language: str | None = None
    command: tuple[str, ...] | None = None
    shell: str | None = None
    code_path: str | None = None
    args: tuple[str, ...] = ()
    files: tuple[FileIn, ...] = ()
    stdin: bytes | None = None
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str = "sandbox"
    outputs: tuple[str, ...] = DEFAULT_OUTPUTS
    wishes: ResourceWishes = field(default_factory=ResourceWishes)
    placement: Placement = field(default_factory=Placement)
    keep: bool = False
    ttl_s: float | None = None
    attached: bool = False
    priority: str = "normal"
    queue_timeout_s: float | None = None
    """How long it may wait in the queue; None = what the policy says."""
    expected_s: float | None = None
    """How long the caller thinks that it will run: what it costs in the queue."""
    webhook: Any = None
    """Whom to tell of its end: a URL, or an object; read by `domain.webhook`."""


@dataclass(frozen=True)
class SandboxRequest:
    """`POST /v1/sandboxes`."""

    files: tuple[FileIn, ...] = ()
    wishes: ResourceWishes = field(default_factory=ResourceWishes)
    placement: Placement = field(default_factory=Placement)
    ttl_s: float | None = None
    """`domain.expiry.UNLIMITED_S` for none; so is the next."""
    idle_timeout_s: float | None = None


@dataclass(frozen=True)
class ExecRequest:
    """`POST /v1/sandboxes/{id}/execs`: exactly one of `argv`, `shell`, `code` (with `language`)."""

    argv: tuple[str, ...] | None = None
    shell: str | None = None
    code: str | None = None
    language: str | None = None
    args: tuple[str, ...] = ()
    stdin: bytes | None = None
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str = "sandbox"
    timeout_s: float | None = None
    output_bytes: int | None = None
    output_kill_bytes: int | None = None
    outputs: tuple[str, ...] = ()
    pty: tuple[int, int] | None = None
    """(rows, columns) of a terminal, or None."""
    attached: bool = False
    stdin_open: bool = False
    """More input comes later by `POST .../stdin`; else end of file follows `stdin`."""
    wait_s: float | None = None
    """How long the caller wants to wait for the result; None = not said."""


# -- the JSON documents --------------------------------------------------------------------------------------------------------

RESOURCE_FIELDS = ("memory", "cpu", "pids", "disk", "tmp", "output_limit", "output_kill")
LATER_FIELDS = (
    "dependencies",
    "dep",
    "secrets",
    "task",
    "project",
    "skills",
    "contention",
    "retry",
    "yield_after_s",
)
_PLACE = ("runtime", "template", "isolation", "network", "session")
_EXECUTION = ("code", "language", "shell", "args", "stdin", "stdin_base64", "env", "cwd", "user", "outputs", "attached")
RUN_FIELDS = frozenset(
    (*RESOURCE_FIELDS, *LATER_FIELDS, *_PLACE, *_EXECUTION)
    + ("command", "code_path", "files", "resources", "keep", "ttl_s", "ttl", "timeout_s", "timeout", "pty")
    + ("priority", "queue_timeout_s", "queue_timeout", "expected_s", "webhook")
)
SANDBOX_FIELDS = frozenset(
    (*RESOURCE_FIELDS, *LATER_FIELDS, *_PLACE, "files", "resources", "ttl_s", "ttl", "timeout_s", "timeout")
    + ("idle_timeout_s", "idle_timeout")
)
EXEC_FIELDS = frozenset(
    (*LATER_FIELDS, *_EXECUTION)
    + ("argv", "command", "timeout_s", "timeout", "output_limit", "output_kill", "pty", "wait", "stdin_open")
)


def parse_run(doc: Any, host: HostCaps, names: Names = NO_NAMES) -> RunRequest:
    """`POST /v1/runs`: see the module docstring. `names` tell the language of a FILE; without them it has to be said."""
    fields = _Fields(doc, RUN_FIELDS)
    fields.refuse_later(*LATER_FIELDS, "pty")
    shape = fields.program(("code", "command", "shell"))
    code_path = fields.relative_path("code_path")
    if code_path is not None and shape != "code":
        fields.fail("code_path", "code_path goes with code", "leave code_path out, or give code")
    code = fields.code() if shape == "code" else None
    files, wishes = fields.files(), fields.wishes(host)
    fields.must_fit(files, wishes)
    return RunRequest(
        code=code,
        language=fields.language(code, code_path, names),
        command=fields.argv("command", with_args=True) if shape == "command" else None,
        shell=fields.word("shell") if shape == "shell" else None,
        code_path=code_path,
        args=fields.args(shape),
        files=files,
        stdin=fields.stdin(),
        env=fields.env(),
        cwd=fields.cwd(),
        user=fields.user(),
        outputs=fields.outputs(DEFAULT_OUTPUTS),
        wishes=wishes,
        placement=fields.placement(),
        keep=fields.flag("keep"),
        ttl_s=fields.end("ttl_s", "ttl"),
        attached=fields.flag("attached"),
        priority=fields.priority(),
        queue_timeout_s=fields.seconds("queue_timeout_s", "queue_timeout"),
        expected_s=fields.seconds("expected_s", "expected_s"),
        webhook=fields.doc.get("webhook"),
    )


def parse_sandbox(doc: Any, host: HostCaps) -> SandboxRequest:
    """`POST /v1/sandboxes`. `timeout_s` and the output limits are the defaults of its execs."""
    fields = _Fields(doc, SANDBOX_FIELDS)
    fields.refuse_later(*LATER_FIELDS)
    files, wishes = fields.files(), fields.wishes(host)
    fields.must_fit(files, wishes)
    return SandboxRequest(
        files=files,
        wishes=wishes,
        placement=fields.placement(),
        ttl_s=fields.end("ttl_s", "ttl"),
        idle_timeout_s=fields.end("idle_timeout_s", "idle_timeout"),
    )


def parse_exec(doc: Any, host: HostCaps) -> ExecRequest:
    """`POST /v1/sandboxes/{id}/execs`; `command` is another word for `argv`. What belongs to the sandbox cannot be wished here."""
    fields = _Fields(
        doc,
        EXEC_FIELDS,
        elsewhere={
            name: "is set when the sandbox is made" for name in ("memory", "cpu", "pids", "disk", "tmp", *_PLACE)
        },
    )
    fields.refuse_later(*LATER_FIELDS)
    shape = fields.program(("argv", "command", "shell", "code"))
    code = fields.code() if shape == "code" else None
    wishes = fields.wishes(host)
    return ExecRequest(
        argv=fields.argv(shape, with_args=True) if shape in ("argv", "command") else None,
        shell=fields.word("shell") if shape == "shell" else None,
        code=code,
        language=fields.language(code),
        args=fields.args(shape),
        stdin=fields.stdin(),
        env=fields.env(),
        cwd=fields.cwd(),
        user=fields.user(),
        timeout_s=wishes.timeout_s,
        output_bytes=wishes.output_bytes,
        output_kill_bytes=wishes.output_kill_bytes,
        outputs=fields.outputs(()),
        pty=fields.pty(),
        attached=fields.flag("attached"),
        stdin_open=fields.flag("stdin_open"),
        wait_s=fields.wait(),
    )


def language_of(names: Names, file_name: str, first_bytes: bytes) -> str:
    """The language of a FILE: by its extension, else by its `#!` line, else `unknown_language`."""
    language = names.of_file(file_name) or names.of_first_line(first_bytes)
    if language is None:
        raise CorralError(
            "unknown_language",
            f"the language of {shown(file_name)} cannot be told from its extension or its #! line",
            hint=f"say --language (field language): {', '.join(LANGUAGES)}",
            field="/language",
        )
    return language


class _Fields:
    """One JSON object, read member by member; every method answers a checked value or raises with the member's pointer."""

    def __init__(self, doc: Any, known: frozenset[str], elsewhere: Mapping[str, str] | None = None) -> None:
        if not isinstance(doc, dict):
            invalid("", f"the request must be a JSON object, not {shown(doc)}", 'like {"command": ["echo", "hi"]}')
        self.doc: dict[str, Any] = doc
        for name in doc:
            if name in known:
                continue
            why = (elsewhere or {}).get(name)
            if why is not None:
                if doc[name] is None:
                    continue
                self.fail(name, f"{name} {why}", f"leave {name} out here, or make another sandbox with it")
            guess = nearest(str(name), known)
            self.fail(
                name,
                f"there is no field {shown(name)}",
                f"did you mean {guess}?"
                if guess
                else f"known fields: {', '.join(sorted(known - frozenset(LATER_FIELDS)))}",
            )

    def fail(self, name: str | int, detail: str, hint: str) -> NoReturn:
        invalid(pointer(name), detail, hint)

    def refuse_later(self, *names: str) -> None:
        """Fields that a later version brings: nothing may be accepted and ignored."""
        for name in names:
            if not empty(self.doc.get(name)):
                self.not_yet(name)

    def not_yet(self, name: str, detail: str | None = None) -> NoReturn:
        raise CorralError(
            "not_supported_yet",
            detail or f"this version cannot honour {name}",
            hint=f"leave {name} out",
            field=pointer(name),
        )

    def must_fit(self, files: tuple[FileIn, ...], wishes: ResourceWishes) -> None:
        """Files that the wished disk cannot hold are the caller's mistake, told before anything is made."""
        size = sum(len(file.content or b"") for file in files)
        if wishes.disk_bytes is not None and size > wishes.disk_bytes:
            self.fail("files", f"the files have {size} bytes, the disk {wishes.disk_bytes}", "ask for a larger disk")

    # -- what to run -----------------------------------------------------------------------------------------------------------
    def program(self, names: tuple[str, ...]) -> str:
        """The one of `names` that is given."""
        given = [name for name in names if self.doc.get(name) is not None]
        if not given:
            invalid("", "nothing to run", f"give exactly one of {', '.join(names)}")
        if len(given) > 1:
            self.fail(
                given[1], f"{given[0]} and {given[1]} exclude each other", f"give exactly one of {', '.join(names)}"
            )
        return given[0]

    def code(self) -> str:
        value = self.doc["code"]
        if not isinstance(value, str):
            self.fail("code", f"code is text, not {shown(value)}", "the text of the program, like print(1)")
        size = len(utf8_of(value, "/code"))
        if size > MAX_CODE:
            raise CorralError(
                "too_large",
                f"code has {size} bytes; at most {MAX_CODE} are allowed",
                hint="send the bulk as files, or put it there by the file API",
                field="/code",
            )
        return value

    def language(self, code: str | None, code_path: str | None = None, names: Names = NO_NAMES) -> str | None:
        value = self.doc.get("language")
        if code is None:
            if value is not None:
                self.fail("language", "language goes with code", "a command names its own program")
            return None
        if value is None:
            if code_path is not None:
                return language_of(names, code_path, code[:512].encode("utf-8", "surrogateescape"))
            self.fail("language", "code needs language", f"one of {', '.join(LANGUAGES)}")
        if not isinstance(value, str):
            self.fail("language", f"language is text, not {shown(value)}", f"one of {', '.join(LANGUAGES)}")
        if value not in LANGUAGES:
            guess = nearest(value, LANGUAGES)
            raise CorralError(
                "unknown_language",
                f"there is no language {shown(value)}",
                hint=f"did you mean {guess}?" if guess else f"one of {', '.join(LANGUAGES)}",
                field="/language",
            )
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """A list of arguments as the kernel takes them."""
        value = self.doc.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            hint = "for a command line use shell" if isinstance(value, str) else 'like ["echo", "hi"]'
            self.fail(name, f"{name} is a list of text, not {shown(value)}", hint)
        total = 0
        for index, word in enumerate(value):
            total += self._word(word, pointer(name, index)) + 1
        if total > MAX_WORDS:
            self.fail(name, f"{name} has {total} bytes; at most {MAX_WORDS} are allowed", "pass data by stdin or files")
        self._fits(name, value)
        return tuple(value)

    def _fits(self, name: str, value: Any) -> None:
        size = len(json.dumps(value))
        if size > MAX_ENCODED:
            self.fail(
                name,
                f"{name} has {size} bytes as ASCII JSON; at most {MAX_ENCODED} are allowed",
                "pass data by stdin or files",
            )

    def _word(self, word: Any, at: str) -> int:
        if not isinstance(word, str):
            invalid(
                at, f"an argument is text, not {shown(word)}", "write numbers as text" if is_number(word) else "text"
            )
        if "\0" in word:
            invalid(at, "an argument cannot hold a NUL character", "pass such data by stdin or files")
        size = len(utf8_of(word, at))
        if size > MAX_WORD:
            invalid(at, f"an argument has {size} bytes; the kernel takes {MAX_WORD}", "pass data by stdin or files")
        return size

    def argv(self, name: str, *, with_args: bool) -> tuple[str, ...]:
        argv = self.words(name)
        if not argv or not argv[0]:
            self.fail(name, f"{name} must name a program", 'like ["echo", "hi"]')
        return argv + (self.words("args") if with_args else ())

    def args(self, shape: str) -> tuple[str, ...]:
        """`args` of code; those of a command were appended to it."""
        if shape == "shell":
            if self.words("args"):
                self.fail("args", "args do not go with shell", "put them into the shell text, or use command")
            return ()
        return self.words("args") if shape == "code" else ()

    def word(self, name: str) -> str:
        value = self.doc[name]
        self._word(value, pointer(name))
        if not value:
            self.fail(name, f"{name} is empty", "a command line, like echo hi")
        return str(value)

    # -- its surroundings ------------------------------------------------------------------------------------------------------
    def stdin(self) -> bytes | None:
        text, encoded = self.doc.get("stdin"), self.doc.get("stdin_base64")
        if text is not None and encoded is not None:
            self.fail("stdin_base64", "stdin and stdin_base64 exclude each other", "leave one of them out")
        if encoded is not None:
            return bytes_of(encoded, "/stdin_base64")
        if text is None:
            return None
        if not isinstance(text, str):
            self.fail("stdin", f"stdin is text, not {shown(text)}", "bytes go as stdin_base64")
        return utf8_of(text, "/stdin")

    def env(self) -> dict[str, str]:
        value = self.doc.get("env")
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fail("env", f"env is an object of names and text, not {_kind(value)}", 'like {"LANG": "C.UTF-8"}')
        total = 0
        for name, content in value.items():
            at = pointer("env", name)
            if not isinstance(name, str) or not name or any(c in "=\x7f\x85\u2028\u2029" or c <= " " for c in name):
                hint = "a name without '=', spaces and control characters, like LANG"
                invalid(at, f"{shown(name)} is no name of an environment variable", hint)
            if not isinstance(content, str):
                invalid(at, f"the value of {shown(name)} is text, not {_kind(content)}", "write numbers as text")
            if "\0" in content:
                invalid(at, f"the value of {shown(name)} cannot hold a NUL character", "pass such data by a file")
            size = len(utf8_of(name, at)) + len(utf8_of(content, at)) + 2
            if size > MAX_WORD:
                invalid(at, f"the variable {shown(name)} has {size} bytes; the kernel takes {MAX_WORD}", "use a file")
            total += size
        if total > MAX_WORDS:
            self.fail("env", f"env has {total} bytes; at most {MAX_WORDS} are allowed", "use files")
        self._fits("env", value)
        return dict(value)

    def cwd(self) -> str | None:
        value = self.doc.get("cwd")
        if value is None:
            return None
        if not isinstance(value, str):
            self.fail("cwd", f"cwd is text, not {shown(value)}", "like /workspace/src")
        size = len(utf8_of(value, "/cwd"))
        if "\0" in value:
            self.fail("cwd", "a path cannot hold a NUL character", "like /workspace/src")
        if not value.startswith("/"):
            self.fail(
                "cwd", f"cwd must be absolute, not {shown(value)}", f"for example /workspace/{value[:60]}".rstrip("/")
            )
        if size > MAX_PATH:
            self.fail("cwd", f"a path has at most {MAX_PATH} bytes", "shorten it")
        return value

    def user(self) -> str:
        value = self.doc.get("user")
        if value is None:
            return "sandbox"
        if value not in ("sandbox", "root"):
            self.fail("user", f"there is no user {shown(value)}", "sandbox, or root where the template allows it")
        return str(value)

    def files(self) -> tuple[FileIn, ...]:
        value = self.doc.get("files")
        if value is None:
            return ()
        if not isinstance(value, list):
            self.fail(
                "files", f"files is a list of objects, not {shown(value)}", 'like [{"path": "a.txt", "content": "…"}]'
            )
        if len(value) > MAX_FILES:
            self.fail(
                "files", f"there are {len(value)} files; at most {MAX_FILES} go inline", "send a tar by the file API"
            )
        seen: dict[str, FileIn] = {}
        for index, item in enumerate(value):
            made = self._file(item, index)
            if made.path in seen:
                invalid(pointer("files", index, "path"), f"{shown(made.path)} is given twice", "leave one of them out")
            seen[made.path] = made
        for index, path in enumerate(seen):
            parts = path.split("/")
            for cut in range(1, len(parts)):
                above = seen.get("/".join(parts[:cut]))
                if above is not None and above.content is not None:
                    invalid(
                        pointer("files", index, "path"),
                        f"{shown(path)} lies below {shown(above.path)}, which is a file",
                        "rename one of them",
                    )
        return tuple(seen.values())

    def _file(self, item: Any, index: int) -> FileIn:
        at = pointer("files", index)
        if not isinstance(item, dict):
            invalid(at, f"a file is an object, not {shown(item)}", 'like {"path": "a.txt", "content": "…"}')
        known = ("path", "content", "base64", "mode", "type")
        for name in item:
            if name not in known:
                guess = nearest(str(name), known)
                hint = f"did you mean {guess}?" if guess else f"known: {', '.join(known)}"
                invalid(pointer("files", index, name), f"a file has no field {shown(name)}", hint)
        path = relative_path(item.get("path"), f"{at}/path")
        text, encoded, kind = item.get("content"), item.get("base64"), item.get("type")
        if kind not in (None, "file", "dir"):
            invalid(f"{at}/type", f"there is no type {shown(kind)}", "file (the default) or dir")
        if kind == "dir":
            if text is not None or encoded is not None:
                invalid(at, f"the directory {shown(path)} has content", "put files below it")
            mode = 0o755 if item.get("mode") is None else file_mode(item["mode"], f"{at}/mode")
            return FileIn(path, None, mode)
        if (text is None) == (encoded is None):
            invalid(
                at, f"the file {shown(path)} needs exactly one of content and base64", "content is text, base64 bytes"
            )
        if encoded is not None:
            content = bytes_of(encoded, f"{at}/base64")
        elif isinstance(text, str):
            content = utf8_of(text, f"{at}/content")
        else:
            invalid(f"{at}/content", f"content is text, not {shown(text)}", "bytes go as base64")
        return FileIn(path, content, file_mode(item.get("mode"), f"{at}/mode"))

    def outputs(self, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self.doc.get("outputs")
        if value is None:
            return default
        patterns = [value] if isinstance(value, str) else value
        if not isinstance(patterns, list):
            self.fail("outputs", f"outputs is a list of patterns, not {shown(value)}", 'like ["out/**"]')
        if len(patterns) > 100:
            self.fail("outputs", "at most 100 patterns are allowed", "use ** and * to say more with less")
        kept: list[str] = []
        for index, pattern in enumerate(patterns):
            at = pointer("outputs") if isinstance(value, str) else pointer("outputs", index)
            if not isinstance(pattern, str) or not pattern:
                invalid(at, f"a pattern is text, not {shown(pattern)}", "like /workspace/out/**")
            size = len(utf8_of(pattern, at))
            if "\0" in pattern or size > MAX_PATH:
                invalid(at, f"a pattern has at most {MAX_PATH} bytes and no NUL character", "like /workspace/out/**")
            if ".." in pattern.split("/"):
                invalid(at, f"{shown(pattern)} holds '..'; patterns cannot leave /workspace", "like /workspace/out/**")
            full = pattern if pattern.startswith("/") else f"/workspace/{pattern.removeprefix('./')}"
            if full != "/workspace" and not full.startswith("/workspace/"):
                invalid(at, f"{shown(pattern)} is not under /workspace", "artifacts are taken from /workspace only")
            kept.append(full)
        return tuple(dict.fromkeys(kept))

    def pty(self) -> tuple[int, int] | None:
        value = self.doc.get("pty")
        if value is None or value is False:
            return None
        if value is True:
            return DEFAULT_PTY
        if isinstance(value, dict):
            for name in value:
                if name not in ("rows", "cols"):
                    invalid(pointer("pty", name), f"a terminal has no field {shown(name)}", "rows and cols")
            pair = [value.get("rows", DEFAULT_PTY[0]), value.get("cols", DEFAULT_PTY[1])]
        elif isinstance(value, list) and len(value) == 2:
            pair = value
        else:
            self.fail("pty", f'pty is true, [rows, cols] or {{"rows", "cols"}}, not {shown(value)}', "like [24, 80]")
        for number in pair:
            if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 65535:
                self.fail("pty", f"rows and columns are integers from 1 to 65535, not {shown(number)}", "like [24, 80]")
        return pair[0], pair[1]

    def wait(self) -> float | None:
        value = self.doc.get("wait")
        if value is None or value is True:
            return None
        if value is False:
            return 0.0
        return self._seconds(value, "/wait", zero=True)

    def priority(self) -> str:
        value = self.doc.get("priority")
        if value is None:
            return "normal"
        if value not in PRIORITIES:
            self.fail("priority", f"there is no priority {shown(value)}", "high, normal or low")
        return str(value)

    def flag(self, name: str) -> bool:
        value = self.doc.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.fail(name, f"{name} is true or false, not {shown(value)}", "JSON's true or false, without quotes")
        return value

    def relative_path(self, name: str) -> str | None:
        value = self.doc.get(name)
        return None if value is None else relative_path(value, pointer(name))

    # -- sizes and places ------------------------------------------------------------------------------------------------------
    def wishes(self, host: HostCaps) -> ResourceWishes:
        """The resources, from `resources` and from the same words at top level."""
        given: dict[str, tuple[Any, str]] = {}
        inner = self.doc.get("resources")
        if inner is not None:
            if not isinstance(inner, dict):
                self.fail(
                    "resources", f"resources is an object, not {shown(inner)}", 'like {"memory": "512M", "cpu": 1}'
                )
            for name, value in inner.items():
                at = pointer("resources", name)
                if name not in RESOURCE_FIELDS:
                    guess = nearest(str(name), RESOURCE_FIELDS)
                    hint = f"did you mean {guess}?" if guess else f"known: {', '.join(RESOURCE_FIELDS)}"
                    invalid(at, f"there is no resource {shown(name)}", hint)
                if value is not None:
                    given[name] = (value, at)
        for name in RESOURCE_FIELDS:
            value = self.doc.get(name)
            if value is None:
                continue
            if name in given and given[name][0] != value:
                self.fail(name, f"{name} is given twice, with different values", f"leave out /resources/{name}")
            given[name] = (value, pointer(name))

        def size(name: str, least: int = 1) -> int | None:
            return size_of(name, *given[name], least) if name in given else None

        memory = size("memory", MIN_MEMORY)
        if memory is not None and memory > host.memory_bytes:
            invalid(
                given["memory"][1],
                f"memory of {format_bytes(memory)} exceeds this host, which has {format_bytes(host.memory_bytes)}",
                f"ask for at most {host.memory_bytes // MIB}M",
            )
        kept, kill = size("output_limit"), size("output_kill")
        if kept is not None and kill is not None and kill < kept:
            invalid(given["output_kill"][1], "output_kill must not be below output_limit", f"at least {kept}")
        return ResourceWishes(
            memory_bytes=memory,
            cpu=cores(*given["cpu"], host.cpus) if "cpu" in given else None,
            pids=count(*given["pids"]) if "pids" in given else None,
            disk_bytes=size("disk", MIN_DISK),
            tmp_bytes=size("tmp"),
            output_bytes=kept,
            output_kill_bytes=kill,
            timeout_s=self.seconds("timeout_s", "timeout"),
        )

    def seconds(self, name: str, alias: str) -> float | None:
        """A time that is not zero, under one of two words."""
        value, other = self.doc.get(name), self.doc.get(alias)
        if value is not None and other is not None and value != other:
            self.fail(alias, f"{name} and {alias} are the same field with different values", f"leave {alias} out")
        at = pointer(name if value is not None else alias)
        value = other if value is None else value
        return None if value is None else self._seconds(value, at)

    def end(self, name: str, alias: str) -> float | None:
        """The same, or `none`: a time that does not end."""
        said = [word for word in (name, alias) if self.doc.get(word) is not None]
        if said and all(self.doc[word] == NONE for word in said):
            return UNLIMITED_S
        return self.seconds(name, alias)

    @staticmethod
    def _seconds(value: Any, at: str, *, zero: bool = False) -> float:
        if isinstance(value, str):
            invalid(at, f"a time is a number of seconds, not {shown(value)}", "write it without quotes")
        try:
            seconds = parse_seconds(value)
        except ValueError as error:
            invalid(at, str(error), "decimal seconds, for example 60")
        if seconds == 0 and not zero:
            invalid(at, "a time must be greater than 0", "decimal seconds, for example 60")
        return seconds

    def placement(self) -> Placement:
        isolation = self._name("isolation")
        if isolation is not None and isolation not in ISOLATIONS:
            self.fail("isolation", f"there is no isolation {shown(isolation)}", " or ".join(ISOLATIONS))
        network = self.doc.get("network")
        if not empty(network) and network != "none":
            self.not_yet("network", "this version gives no network to a sandbox")
        self.refuse_later("session")
        return Placement(runtime=self._name("runtime"), template=self._name("template"), isolation=isolation)

    def _name(self, name: str) -> str | None:
        value = self.doc.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self.fail(name, f"{name} is text, not {shown(value)}", "the name as text")
        plain = value.replace("-", "").replace("_", "").replace(".", "")
        if not (plain.isascii() and plain.isalnum() and value[0].isalnum() and len(value) <= 64):
            self.fail(name, f"{shown(value)} is no name of a {name}", "letters, digits, '-', '_' and '.'")
        return value


def _kind(value: object) -> str:
    """What a value is, where its content is not to be repeated."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", dict: "an object", list: "a list"}
    return kinds.get(type(value), "null")
