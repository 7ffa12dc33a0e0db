"""The run: one execution with its result. One terminal state; `reason` says how it ended."""

from __future__ import annotations

from corral.domain.machine import Machine

STATES = ("requested", "planning", "queued", "starting", "running", "collecting", "finished")

RUN = Machine(
    kind="run",
    initial="requested",
    table={
        ("requested", "planning_started"): "planning",
        ("planning", "planned"): "queued",
        ("queued", "placed"): "starting",
        ("starting", "started"): "running",
        ("starting", "never_started"): "collecting",
        ("running", "ended"): "collecting",
        # A cancel is a wish: the state moves on when the exec has really ended.
        **{(state, "cancel"): state for state in STATES[:-1]},
        **{(state, "finish"): "finished" for state in STATES[:-1]},
    },
    final=frozenset({"finished"}),
)

OPEN = STATES[:-1]

_PUBLIC = {"requested": "queued", "planning": "queued"}


def public_state(state: str) -> str:
    """The word of the contract: queued starting running collecting finished."""
    return _PUBLIC.get(state, state)
