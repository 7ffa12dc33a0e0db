"""The exec: one process tree in a sandbox. It starts at most once; `lost` means that nobody can tell how it ended."""

from __future__ import annotations

from corral.domain.machine import Machine

EXEC = Machine(
    kind="exec",
    initial="starting",
    table={
        ("starting", "exec_started"): "running",
        ("starting", "exec_ended"): "ended",  # it ended before the report of its start was read
        ("starting", "never_started"): "never_started",
        ("starting", "lost"): "lost",
        ("running", "exec_ended"): "ended",
        ("running", "lost"): "lost",
        ("starting", "cancel"): "starting",
        ("running", "cancel"): "running",
    },
    final=frozenset({"ended", "never_started", "lost"}),
)

OPEN = ("starting", "running")
