"""What a caller asks for: parsed from JSON with an exact error for each bad value. The words are those of the contract (1 and 5).

`parse_run`, `parse_sandbox`, `parse_exec` take the decoded JSON object and return frozen values, or raise `CorralError` with
`field` = JSON pointer: `invalid_value` (does not parse, <= 0, over the host), `not_supported_yet` (a field of the schema that this
version cannot honour, named), `unknown_language`, `too_large`. Unknown members are refused by name with the nearest known one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class FileIn:
    """A file given inline: `path` relative to /workspace (no `..`, no NUL), bytes, mode."""

    path: str
    content: bytes
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
    outputs: tuple[str, ...] = ("/workspace/out/**",)
    wishes: ResourceWishes = field(default_factory=ResourceWishes)
    placement: Placement = field(default_factory=Placement)
    keep: bool = False
    ttl_s: float | None = None
    attached: bool = False


@dataclass(frozen=True)
class SandboxRequest:
    """`POST /v1/sandboxes`."""

    files: tuple[FileIn, ...] = ()
    wishes: ResourceWishes = field(default_factory=ResourceWishes)
    placement: Placement = field(default_factory=Placement)
    ttl_s: float | None = None


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
    attached: bool = False
