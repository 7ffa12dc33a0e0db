"""The part of the store that several workers need: who is alive, and who drives which run and exec. See `ports.store` for the rules.

A worker is a process that drives: it has a row, which it extends by `beat`. What it drives is marked by its id in `driver`; a run or
exec whose driver's row is gone or has expired (by the store's clock) may be taken over by any other, one winner. Every write of a
driver about its run names itself, and is refused with `superseded` once another has taken the run over: one that was stopped for a
while and goes on (SIGSTOP, a paused machine) starts nothing twice. Execs need no such check: node and guest start an `exec_id` once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from corral.domain.records import ExecRecord, RunRecord, SandboxView, WorkerRecord

FORGET_MS = 24 * 3600 * 1000
"""How long the row of a dead worker stays. One that stood still for longer finds no row of its own in a store that is what it was."""


@dataclass(frozen=True)
class Beat:
    """What a heartbeat brings: the store's clock, its highest event id, and ends that were asked for of what this worker drives."""

    now_ms: int
    last_event_id: int
    runs: Mapping[str, str] = field(default_factory=dict)
    """run_id -> why, of open runs with `cancel_requested`."""
    execs: Mapping[str, str] = field(default_factory=dict)
    """exec_id -> why, the same for open execs without a run, and for those of its runs."""


class WorkerStore(Protocol):
    """See the module docstring."""

    async def beat(
        self, worker_id: str, ttl_ms: int, facts: dict[str, Any], watched: Sequence[str] = (), watch_ms: int = 0
    ) -> Beat:
        """Make or extend the row: alive for `ttl_ms` from now. `watched`: ids of open runs and execs that clients wait for here,
        whoever drives them: their `watched_until` becomes now + `watch_ms`. One transaction."""
        ...

    async def leave(self, worker_id: str) -> None:
        """Remove the row: what it drove is free at once. Again: nothing."""
        ...

    async def workers(self) -> list[WorkerRecord]:
        """All rows, dead ones too, oldest first. Rows that have been dead for longer than `FORGET_MS` go with somebody's `beat`."""
        ...

    async def hold_command(self, sandbox_id: str, kind: str, worker_id: str, claim_ms: int) -> bool:
        """Take the sandbox's open commands of this kind that are free, as in `lock_command`, and hold its own for `claim_ms` from now.

        False while another worker holds one. True where there is none: nobody else has it.
        """
        ...

    async def adopt_runs(self, worker_id: str, limit: int = 100) -> list[RunRecord]:
        """Make it the driver of open runs that no living worker drives, oldest first; -> those. Each has one winner."""
        ...

    async def driven_runs(self, worker_id: str) -> list[tuple[str, str]]:
        """(run_id, tenant_id) of each open run that it drives, oldest first; without what they ask for, which may be large."""
        ...

    async def adopt_execs(self, worker_id: str, limit: int = 100) -> list[ExecRecord]:
        """The same for open execs without a run."""
        ...

    async def stale_sandboxes(self, states: Sequence[str], before_ms: int, limit: int = 100) -> list[SandboxView]:
        """Sandboxes in one of these states that nobody has moved since `before_ms` (`last_active_at`), oldest first."""
        ...

    async def abandoned_sandboxes(self, before_ms: int, limit: int = 100) -> list[SandboxView]:
        """One-shot sandboxes that are not terminated, that nobody has moved since `before_ms`, and whose run is over, oldest first."""
        ...
