"""What a caller can ask for, as frozen values. None = not said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEFAULT_OUTPUTS = ("/workspace/out/**",)


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
    webhook: Any = field(default=None, repr=False)
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
