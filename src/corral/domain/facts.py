"""What the host saw of one exec: the raw input of `domain.result.judge`. Data only.

`None` always means "cannot be measured here"; a counter that does not exist is never 0. Deltas are taken over the exec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

EndedBy = Literal[
    "timeout",
    "cancelled",
    "sandbox_deleted",
    "lease_lost",
    "circuit_breaker",
    "output_limit",
    "memory_watch",
    "pids_watch",
    "disk_watch",
    "inodes_watch",
    "memory_unseen",
    "disk_unseen",
]
"""Why *we* ended the exec, when we did. `..._unseen`: a watched limit could not be watched any more."""


@dataclass(frozen=True)
class StartFailure:
    """Why the main program never ran: `what` is `argv` (exec failed), `cwd`, `user` or `platform`; `errno` its symbolic name."""

    what: Literal["argv", "cwd", "user", "platform"]
    errno: str
    message: str


@dataclass(frozen=True)
class Usage:
    """Measured use over the exec; see contract 3. None = cannot be measured."""

    peak_memory_bytes: int | None = None
    cpu_seconds: float | None = None
    peak_pids: int | None = None
    disk_bytes: int | None = None
    oom_kills: int | None = None
    pids_limit_hits: int | None = None
    rx_bytes: int | None = None
    tx_bytes: int | None = None


@dataclass(frozen=True)
class StreamFacts:
    """One output stream as spooled: `produced` bytes came, of which the first `head` and the last `tail` are kept.

    Nothing is dropped while `produced <= output_bytes` (then `head == produced`, `tail == 0`).
    """

    produced: int = 0
    head: int = 0
    tail: int = 0

    @property
    def kept(self) -> int:
        return self.head + self.tail

    @property
    def truncated(self) -> bool:
        return self.kept < self.produced


@dataclass(frozen=True)
class ExecFacts:
    """One exec as the host saw it.

    `started`: True after the guest reported the start, False when it certainly never ran, None when that is unknown.
    `exit_code` 0-255 xor `signal` (number) of the main program; both None when unknown or never started.
    """

    started: bool | None
    exit_code: int | None = None
    signal: int | None = None
    ended_by: EndedBy | None = None
    start_failure: StartFailure | None = None
    sandbox_lost: bool = False
    guest_lost: bool = False
    killed_all: bool = True
    """False when some process of the exec outlived the kill (row 20a: the sandbox is condemned)."""
    killed_children: int = 0
    """Background processes that were ended together with a main program that exited by itself."""
    disk_full: bool = False
    inodes_full: bool = False
    tmp_full: bool = False
    seccomp_hits: int | None = None
    cpu_throttled: int | None = None
    """How many times the kernel held it back for its share of the processors."""
    usage: Usage = field(default_factory=Usage)
    stdout: StreamFacts = field(default_factory=StreamFacts)
    stderr: StreamFacts = field(default_factory=StreamFacts)
    running_ms: int | None = None
    infra: str | None = None
    """A platform failure in one sentence; forces `infra_error`."""
