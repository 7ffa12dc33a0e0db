"""Fault points: named places where a test may stop, delay or break the process. A leaf; does nothing in production.

`point("store.commit.before")` costs one dictionary look-up. Tests (`corral.testing.faults`) arm a name with a callable, or set
`CORRAL_FAULT_POINTS="name=kill"` in the environment of a child process, which then receives SIGKILL at the point.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_armed: dict[str, Callable[[], None]] = {}


def point(name: str) -> None:
    """Run what is armed under `name`, else nothing."""
    if _armed and (action := _armed.get(name)) is not None:
        action()


def arm(name: str, action: Callable[[], None] | None) -> None:
    """Set or clear (None) the action of a point; tests only."""
    if action is None:
        _armed.pop(name, None)
    else:
        _armed[name] = action


def _die() -> None:
    signal.raise_signal(signal.SIGKILL)


for _entry in os.environ.get("CORRAL_FAULT_POINTS", "").split(","):
    if _entry.endswith("=kill"):
        arm(_entry[: -len("=kill")], _die)
