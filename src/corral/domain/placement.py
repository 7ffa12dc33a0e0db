"""Which runtime: a pure choice over what the probes found, with its reason and all that was considered."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from corral.domain.limits import LimitModes
from corral.errors import CorralError

CONTRACT_RUNTIMES = ("bubblewrap", "crun", "runc", "runsc")
"""Names that mean something to every caller, with or without an adapter in this version."""

NEVER_BY_DEFAULT = frozenset({"fake"})
STRONG = 2
"""Least security level of `--isolation strong`."""


@dataclass(frozen=True)
class RuntimeFacts:
    """What placement reads of a runtime. Levels: 3 VM, 2 gVisor, 1 own uid and kernel limits, 0 the caller's uid."""

    name: str
    usable: bool
    reason: str | None
    security_level: int
    start_ms: float | None = None
    modes: LimitModes = field(default_factory=LimitModes)


@dataclass(frozen=True)
class Considered:
    """One runtime and why it was not taken (None = it was, or could have been)."""

    name: str
    security_level: int
    start_ms: float | None
    rejected: str | None


@dataclass(frozen=True)
class PlacementChoice:
    """The runtime taken."""

    runtime: str
    security_level: int
    modes: LimitModes
    reason: str
    considered: tuple[Considered, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """`decisions.placement` of a run; the template's digest is added by who knows it."""
        return {
            "verdict": "placed",
            "reason": self.reason,
            "runtime": self.runtime,
            "security_level": self.security_level,
            "considered": [asdict(item) for item in self.considered],
        }


def choose(
    facts: Sequence[RuntimeFacts],
    wanted_runtime: str | None = None,
    isolation: str | None = None,
    floor: int = 0,
    require_enforced: Collection[str] = (),
) -> PlacementChoice:
    """The runtime for a request.

    Asked for by name: that one or an error, never another. `strong`: the fastest of level 2 or 3. Else the fastest of level 1, and
    where there is none the highest level there is. Nothing below `floor`, nothing that does not enforce what the policy demands.
    """
    if wanted_runtime is not None:
        _known(facts, wanted_runtime)
    least = max(floor, STRONG if isolation == "strong" else 0)
    considered = tuple(
        Considered(
            fact.name,
            fact.security_level,
            fact.start_ms,
            _rejected(fact, wanted_runtime, least, isolation, require_enforced),
        )
        for fact in sorted(facts, key=lambda fact: fact.name)
    )
    accepted = {item.name for item in considered if item.rejected is None}
    candidates = [fact for fact in facts if fact.name in accepted]
    if not candidates:
        _refuse(considered, wanted_runtime, isolation, floor)
    if wanted_runtime is not None:
        best, why = candidates[0], "asked for by name"
    else:
        best, why = _best(candidates, least)
    return PlacementChoice(best.name, best.security_level, best.modes, why, considered)


def _best(candidates: Sequence[RuntimeFacts], least: int) -> tuple[RuntimeFacts, str]:
    def speed(fact: RuntimeFacts) -> tuple[float, str]:
        return (fact.start_ms if fact.start_ms is not None else float("inf"), fact.name)

    if least >= STRONG:
        return min(candidates, key=speed), f"the fastest usable runtime of level {least} or more"
    level_one = [fact for fact in candidates if fact.security_level == 1]
    if level_one:
        return min(level_one, key=speed), "the fastest usable runtime of level 1"
    highest = max(fact.security_level for fact in candidates)
    top = [fact for fact in candidates if fact.security_level == highest]
    return min(top, key=speed), f"no usable runtime of level 1; the fastest of level {highest}, the highest there is"


def _known(facts: Sequence[RuntimeFacts], wanted: str) -> None:
    names = sorted(fact.name for fact in facts)
    if wanted in names:
        return
    if wanted in CONTRACT_RUNTIMES:
        raise CorralError(
            "not_supported_yet",
            f"this version has no adapter for the runtime {wanted}",
            hint=f"use one of {', '.join(names)}" if names else "no runtime is installed",
            field="/runtime",
        )
    raise CorralError(
        "invalid_value",
        f"there is no runtime '{wanted}'",
        hint=f"use one of {', '.join(names)}" if names else "no runtime is installed",
        field="/runtime",
    )


def _rejected(
    fact: RuntimeFacts, wanted: str | None, least: int, isolation: str | None, require_enforced: Collection[str]
) -> str | None:
    if wanted is not None and fact.name != wanted:
        return f"{wanted} was asked for"
    if wanted is None and fact.name in NEVER_BY_DEFAULT:
        return "isolates nothing: only on request"
    if not fact.usable:
        return fact.reason or "does not work here"
    if fact.security_level < least:
        by = "isolation strong needs" if isolation == "strong" else "policy demands"
        return f"is of level {fact.security_level}, {by} {least} or more"
    weak = [name for name in sorted(require_enforced) if getattr(fact.modes, name, "absent") != "enforced"]
    if weak:
        return f"policy demands that {', '.join(weak)} be enforced"
    return None


def _refuse(considered: Sequence[Considered], wanted: str | None, isolation: str | None, floor: int) -> NoReturn:
    listed = [asdict(item) for item in considered]
    if wanted is not None:
        why = next(item.rejected for item in considered if item.name == wanted)
        raise CorralError(
            "runtime_unavailable",
            f"the runtime {wanted} cannot be used here: {why}",
            hint="leave runtime out to take what works here; corral doctor shows all",
            field="/runtime",
            considered=listed,
        )
    reasons = "; ".join(f"{item.name}: {item.rejected}" for item in considered) or "none is installed"
    if isolation == "strong":
        hint = "isolation standard may be possible; corral doctor shows what is missing for a stronger one"
    elif floor:
        hint = (
            "the policy's isolation.floor or require_enforced is above what this host can do; corral doctor shows all"
        )
    else:
        hint = "corral doctor shows what each runtime lacks"
    raise CorralError("runtime_unavailable", f"no runtime can take this: {reasons}", hint=hint, considered=listed)
