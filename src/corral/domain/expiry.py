"""When a sandbox ends by itself: a time to live, which is absolute, and a time without activity, which every use starts anew.

Activity is whatever the holder does with it, an exec that runs, and a stream or terminal that is open. A process that an exec left
behind is none. While a sandbox is paused its time to live goes on, and its time without activity does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from corral.domain.quantities import format_seconds

if TYPE_CHECKING:
    from corral.domain.policy import Policy

Cause = Literal["ttl", "idle_timeout"]
NONE = "none"
"""How a caller says that a time is not to be limited."""
UNLIMITED_S = 100 * 365 * 86400.0
"""What `none` is kept as: longer than any installation lives, and short enough for every clock."""
IDLE_STATES = ("ready", "leased", "idle")
"""States in which time without activity counts: nothing runs, and nothing is under way."""


@dataclass(frozen=True)
class Wanted:
    """What a caller asks for, or a policy gives; None = nothing was said. `UNLIMITED_S` = without a limit."""

    ttl_s: float | None = None
    idle_timeout_s: float | None = None


@dataclass(frozen=True)
class Denied:
    """Why policy refuses it: the field, a sentence, what to ask for, the rule."""

    field: str
    reason: str
    hint: str
    most: float
    rule: str


def is_unlimited(created_at: int, expires_at: int) -> bool:
    """Whether a row's times are those of a sandbox without a time to live."""
    return expires_at - created_at >= UNLIMITED_S * 1000


def denied(policy: Policy, wanted: Wanted) -> list[Denied]:
    """What of it is over the caps."""
    caps = policy.caps
    found = []
    for name, value, cap, free in (
        ("ttl_s", wanted.ttl_s, caps.ttl_s, caps.unlimited_ttl),
        ("idle_timeout_s", wanted.idle_timeout_s, caps.idle_timeout_s, caps.idle_timeout_s is None),
    ):
        if value is None or cap is None or value <= cap or (free and value >= UNLIMITED_S):
            continue
        said = NONE if value >= UNLIMITED_S else format_seconds(value)
        hint = f"ask for {name} of at most {cap:g}"
        found.append(
            Denied(name, f"{name} of {said} is over the cap of {format_seconds(cap)}", hint, cap, f"caps.{name}")
        )
    return found


def idle_timeout_of(policy: Policy, asked: float | None) -> float | None:
    """Seconds without activity after which a sandbox ends; None = never. What was not said is the policy's, within its cap."""
    cap = policy.caps.idle_timeout_s
    value = policy.defaults.idle_timeout_s if asked is None else asked
    if value is None or value >= UNLIMITED_S:
        return cap
    return value if cap is None else min(value, cap)


def due(
    now: int, state: str, expires_at: int, last_active_at: int, idle_timeout_ms: int | None, *, one_shot: bool
) -> Cause | None:
    """Why a sandbox ends now, or None: the rule of every store."""
    if state in ("sanitizing", "terminated"):
        return None
    if expires_at <= now:
        return "ttl"
    idle = not one_shot and state in IDLE_STATES and idle_timeout_ms is not None
    return "idle_timeout" if idle and last_active_at + (idle_timeout_ms or 0) <= now else None
