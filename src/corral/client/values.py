"""What the SDK hands out: frozen views of the API's documents. The document itself is always there, as `document`."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

Json = dict[str, Any]


@dataclass(frozen=True)
class Output:
    """One stream of a result: the kept bytes, and what is known about the rest."""

    data: bytes
    """The kept bytes, exactly; when `truncated`, the first `head_bytes` of them and the last."""
    text: str
    """The same as text, with U+FFFD for what is not UTF-8 and one marker line where bytes were left out."""
    bytes: int
    """How many were produced."""
    truncated: bool
    head_bytes: int | None = None

    @classmethod
    def of(cls, document: Json) -> Output:
        """From a result's `stdout` or `stderr`."""
        encoded = document.get("base64")
        text = str(document.get("text") or "")
        data = base64.b64decode(encoded) if encoded is not None else text.encode()
        head = document.get("head_bytes")
        return cls(data, text, int(document["bytes"]), bool(document["truncated"]), head)


class Result:
    """How a program ended. Members of the contract's result are attributes; `document` has them all.

    A result is never raised: look at `ok`, `reason` and `exit_code`. `hint` says what to do about any reason but `ok`.
    """

    def __init__(self, document: Json, agent_view: str | None = None) -> None:
        self.document = document
        self.agent_view = agent_view
        """The text for a model, if it was asked for."""
        self.exit_code: int | None = document["exit_code"]
        self.signal: str | None = document["signal"]
        self.reason: str = document["reason"]
        self.hint: str | None = document["hint"]
        self.started: bool | None = document["started"]
        """None: nobody knows whether the program began."""
        self.phase: str | None = document.get("phase")
        """`build` when the build of compiled code did not succeed, else `run`; None when neither began."""
        self.build: Json | None = document.get("build")
        """How the build before the program went, if there was one."""
        self.stdout = Output.of(document["stdout"])
        self.stderr = Output.of(document["stderr"])
        self.timeline: list[Json] = document.get("timeline", [])
        self.files: list[Json] = document["files"]
        self.artifacts: list[Json] = document["artifacts"]
        self.usage: Json = document["usage"]
        self.limits: Json = document["limits"]
        self.timings: Json = document["timings"]

    @property
    def ok(self) -> bool:
        """The program ran and exited 0."""
        return self.reason == "ok"

    def __repr__(self) -> str:
        return f"<Result {self.reason} exit_code={self.exit_code}>"


@dataclass(frozen=True)
class FileInfo:
    """One entry of a directory inside: a file, directory, link, or something else that can only be looked at."""

    path: str
    """Absolute. Bytes that are not UTF-8 are lone surrogates (`surrogateescape`); `path_bytes` has them."""
    name: str
    type: Literal["file", "dir", "symlink", "fifo", "socket", "device"]
    size: int
    mode: int
    """Permission bits."""
    uid: int
    gid: int
    mtime: str
    """RFC 3339 with nanoseconds."""
    target: str | None = None
    """Where a link points."""
    document: Json = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, entry: Json) -> FileInfo:
        """From an ENTRY of the file API."""
        path = str(entry["path"])
        if (encoded := entry.get("path_base64")) is not None:
            path = base64.b64decode(encoded).decode("utf-8", "surrogateescape")
        return cls(
            path,
            path.rstrip("/").rpartition("/")[2],
            entry["type"],
            int(entry["size"]),
            int(str(entry["mode"]), 8),
            int(entry["uid"]),
            int(entry["gid"]),
            str(entry["mtime"]),
            entry.get("target"),
            entry,
        )

    @property
    def path_bytes(self) -> bytes:
        """The exact bytes of the path."""
        return self.path.encode("utf-8", "surrogateescape")

    @property
    def is_dir(self) -> bool:
        return self.type == "dir"

    @property
    def is_file(self) -> bool:
        return self.type == "file"

    @property
    def is_link(self) -> bool:
        return self.type == "symlink"


@dataclass(frozen=True)
class FileEvent:
    """Something happened to a file: `created`, `modified`, `deleted`, `moved`.

    `started`: the watch has begun (or has begun again after a broken connection, following an `overflow`). `overflow`: events were
    lost, look at the directory. `ended`: the sandbox has ended.
    """

    kind: Literal["started", "created", "modified", "deleted", "moved", "overflow", "ended"]
    path: str | None = None
    document: Json = field(default_factory=dict, repr=False, compare=False)


class Wishes(TypedDict, total=False):
    """What a run or a sandbox may take and where it goes; sizes are bytes or text as `512M`. None everywhere: not said."""

    memory: int | str | None
    cpu: float | None
    pids: int | None
    disk: int | str | None
    tmp: int | str | None
    output_limit: int | str | None
    output_kill: int | str | None
    runtime: str | None
    template: str | None
    isolation: Literal["standard", "strong"] | None
    network: str | None
    session: str | None
    ttl_s: float | Literal["none"] | None
    timeout_s: float | None
    files: Mapping[str, bytes | str] | Sequence[Json] | None
    """Files that lie below /workspace from the start: content by relative path, or as the API takes them."""


class Program(TypedDict, total=False):
    """What a run or an exec starts, beside its words."""

    code: str | None
    language: str | None
    shell: str | None
    args: Sequence[str] | None
    stdin: bytes | str | None
    env: Mapping[str, str] | None
    cwd: str | None
    user: str | None
    outputs: Sequence[str] | None
    attached: bool | None
    """End the program when this client is gone for some seconds."""


class RunRequest(Wishes, Program, total=False):
    """`POST /v1/runs`: exactly one of `code` (with `language`), `command`, `shell`."""

    command: Sequence[str] | None
    code_path: str | None
    keep: bool | None
    priority: Literal["high", "normal", "low"] | None
    queue_timeout_s: float | None
    """How long it may wait in the queue."""
    expected_s: float | None
    """How long it will probably run."""
    webhook: str | Json | None
    """Who is told of its end: a URL, or `url` and `secret`."""


class SandboxRequest(Wishes, total=False):
    """`POST /v1/sandboxes`."""

    idle_timeout_s: float | Literal["none"] | None


class ExecRequest(Program, total=False):
    """`POST /v1/sandboxes/{id}/execs`, beside `argv`."""

    timeout_s: float | None
    output_limit: int | str | None
    output_kill: int | str | None
    pty: tuple[int, int] | None
    """(rows, columns): the program gets a terminal."""


def encoded(request: Mapping[str, Any]) -> Json:
    """The JSON document of keywords: bytes become base64, a mapping of files a list; what is None is left out."""
    document = {name: value for name, value in request.items() if value is not None}
    if isinstance(document.get("stdin"), bytes):
        document["stdin_base64"] = _base64(document.pop("stdin"))
    if isinstance(document.get("files"), Mapping):
        document["files"] = [{"path": path, **_content(data)} for path, data in document["files"].items()]
    for name in ("argv", "command", "args", "outputs", "pty"):
        if isinstance(document.get(name), tuple):
            document[name] = list(document[name])
    if isinstance(document.get("env"), Mapping):
        document["env"] = dict(document["env"])
    return document


def _content(data: bytes | str) -> Json:
    return {"content": data} if isinstance(data, str) else {"base64": _base64(data)}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
