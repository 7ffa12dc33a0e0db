"""Which runtime: a pure choice over what the probes found, with its reason and all that was considered.

What a request's isolation needs (`Needs`) comes from the policy: a level, limits that the kernel holds, and a grade
(`corral.domain.grade`), which is what host and runtime were found to be worth. A runtime that is not graded has the lowest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from corral.domain.grade import ANY_GRADE, Grade, Letter, at_least
from corral.domain.limits import LimitModes
from corral.errors import CorralError

CONTRACT_RUNTIMES = ("bubblewrap", "crun", "runc", "runsc")
"""Names that mean something to every caller, with or without an adapter in this version."""

NEVER_BY_DEFAULT = frozenset({"fake"})
STRONG = 2
"""Least security level of `--isolation strong`."""
SHARED_HINT = (
    "run the service as root or with a runtime whose limits the kernel holds (corral doctor shows them); an operator who wants watched "
    "limits for several tenants sets isolation.require_enforced in the policy, to [] for none"
)
UNGRADED = Grade("D", "not graded", "corral doctor --security grades it")


@dataclass(frozen=True)
class Needs:
    """The least that a runtime must be for a request: `isolation` as asked for (`standard` or `strong`), the rest by the policy."""

    isolation: str = "standard"
    level: int = 0
    grade: Letter = "D"
    enforced: frozenset[str] = frozenset()
    shared: bool = False
    """The limits in `enforced` are demanded because there are several tenants, and the policy says nothing else."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON; `from_dict` is the inverse."""
        return {
            "isolation": self.isolation,
            "level": self.level,
            "grade": self.grade,
            "enforced": sorted(self.enforced),
            **({"shared": True} if self.shared else {}),
        }

    @classmethod
    def from_dict(cls, doc: Mapping[str, Any]) -> Needs:
        """Needs as stored by `as_dict`."""
        return cls(doc["isolation"], doc["level"], doc["grade"], frozenset(doc["enforced"]), doc.get("shared", False))

    @property
    def words(self) -> str:
        """For people."""
        parts = [f"grade {self.grade} or better"] if self.grade != "D" else []
        parts += [f"level {self.level} or more"] if self.level else []
        parts += [f"{', '.join(sorted(self.enforced))} held by the kernel{self._why}"] if self.enforced else []
        return f"isolation {self.isolation} takes {', '.join(parts) if parts else 'any runtime'}"

    @property
    def _why(self) -> str:
        return ", because there are several tenants" if self.shared else ""


@dataclass(frozen=True)
class RuntimeFacts:
    """What placement reads of a runtime. Levels: 3 VM, 2 gVisor, 1 own uid and kernel limits, 0 the caller's uid."""

    name: str
    usable: bool
    reason: str | None
    security_level: int
    start_ms: float | None = None
    modes: LimitModes = field(default_factory=LimitModes)
    grade: Grade = UNGRADED


@dataclass(frozen=True)
class Considered:
    """One runtime and why it was not taken (None = it was, or could have been)."""

    name: str
    security_level: int
    start_ms: float | None
    rejected: str | None
    grade: Letter = "D"


@dataclass(frozen=True)
class PlacementChoice:
    """The runtime taken."""

    runtime: str
    security_level: int
    modes: LimitModes
    reason: str
    considered: tuple[Considered, ...] = ()
    grade: Grade = UNGRADED
    let_through: str | None = None
    """Why it should not have been taken, where the operator said that it may be."""

    def as_dict(self) -> dict[str, Any]:
        """`decisions.placement` of a run; the template's digest is added by who knows it."""
        return {
            "verdict": "placed",
            "reason": self.reason,
            "runtime": self.runtime,
            "security_level": self.security_level,
            "grade": self.grade.letter,
            "considered": [asdict(item) for item in self.considered],
        }


def choose(
    facts: Sequence[RuntimeFacts],
    wanted_runtime: str | None = None,
    needs: Needs = Needs(),
    *,
    any_grade: bool = False,
) -> PlacementChoice:
    """The runtime for a request.

    Asked for by name: that one or an error, never another. `strong`: the fastest of level 2 or 3. Else the fastest of level 1, and
    where there is none the highest level there is. Nothing that is less than `needs`, but for its grade where `any_grade` is given.
    `isolation_unavailable` where something works here and none of it is enough, else `runtime_unavailable`.
    """
    if wanted_runtime is not None:
        _known(facts, wanted_runtime)
    verdicts = {fact.name: _Verdict.of(fact, wanted_runtime, needs, any_grade) for fact in facts}
    considered = tuple(
        Considered(fact.name, fact.security_level, fact.start_ms, verdicts[fact.name].rejected, fact.grade.letter)
        for fact in sorted(facts, key=lambda fact: fact.name)
    )
    candidates = [fact for fact in facts if verdicts[fact.name].rejected is None]
    if not candidates:
        _refuse(considered, wanted_runtime, needs, any(verdict.too_weak for verdict in verdicts.values()))
    if wanted_runtime is not None:
        best, why = candidates[0], "asked for by name"
    else:
        best, why = _best(candidates, needs.level)
    through = verdicts[best.name].let_through
    reason = f"{why}; grade {best.grade.letter}" + (f", {through}" if through else "")
    return PlacementChoice(best.name, best.security_level, best.modes, reason, considered, best.grade, through)


@dataclass(frozen=True)
class _Verdict:
    """`too_weak`: it works, and would be taken if less isolation were asked for."""

    rejected: str | None
    too_weak: bool = False
    let_through: str | None = None

    @classmethod
    def of(cls, fact: RuntimeFacts, wanted: str | None, needs: Needs, any_grade: bool) -> _Verdict:
        if wanted is not None and fact.name != wanted:
            return cls(f"{wanted} was asked for")
        if wanted is None and fact.name in NEVER_BY_DEFAULT:
            return cls("isolates nothing: only on request")
        if not fact.usable:
            return cls(fact.reason or "does not work here")
        if fact.security_level < needs.level:
            by = "isolation strong needs" if needs.isolation == "strong" else "policy demands"
            return cls(f"is of level {fact.security_level}, {by} {needs.level} or more", True)
        weak = [name for name in sorted(needs.enforced) if getattr(fact.modes, name, "absent") != "enforced"]
        if weak:
            by = "with several tenants" if needs.shared else "policy demands that"
            return cls(f"{by} {', '.join(weak)} {'must ' if needs.shared else ''}be enforced", True)
        if at_least(fact.grade.letter, needs.grade):
            return cls(None)
        short = (
            f"is of grade {fact.grade.letter} ({fact.grade.reason}), isolation {needs.isolation} needs {needs.grade}"
        )
        return cls(None, let_through=f"{short}: let through by {ANY_GRADE}") if any_grade else cls(short, True)


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


def _refuse(considered: Sequence[Considered], wanted: str | None, needs: Needs, too_weak: bool) -> NoReturn:
    code = "isolation_unavailable" if too_weak else "runtime_unavailable"
    listed = [asdict(item) for item in considered]
    if wanted is not None:
        why = next(item.rejected for item in considered if item.name == wanted)
        raise CorralError(
            code,
            f"the runtime {wanted} cannot be used here: {why}",
            hint=SHARED_HINT
            if needs.shared and too_weak
            else "leave runtime out to take what works here; corral doctor --security shows all",
            field="/runtime",
            considered=listed,
        )
    reasons = "; ".join(f"{item.name}: {item.rejected}" for item in considered) or "none is installed"
    if needs.isolation == "strong":
        hint = "isolation standard may be possible; corral doctor --security shows what is missing for a stronger one"
    elif too_weak and needs.shared:
        hint = SHARED_HINT
    elif too_weak:
        hint = (
            "the policy's isolation is above what this host can do: corral doctor --security says what would mend it; "
            f"its operator may lower isolation.grades, or start the service with CORRAL_UNSAFE={ANY_GRADE}"
        )
    else:
        hint = "corral doctor shows what each runtime lacks"
    raise CorralError(code, f"no runtime can take this: {reasons}", hint=hint, considered=listed)
