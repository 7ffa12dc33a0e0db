"""Grades of a host and its runtimes from what probes saw: A to D, by a rule that anybody can check, with the reason and a way up.

A check is of one of three kinds. Where a `must` is missing the grade is D, where a `should` is missing C, where only a `may` is
missing B, else A. A runtime's grade is also bounded by what it is: A needs a kernel of its own (level 2), B own ids and every limit of
memory, processes and disk held by the kernel; what is not usable, or runs programs without a filter, is D. With any other defence
switched off it is at most C.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from corral.domain.limits import LimitModes

Letter = Literal["A", "B", "C", "D"]
LETTERS: tuple[Letter, ...] = ("A", "B", "C", "D")
Kind = Literal["must", "should", "may"]
_COSTS: dict[Kind, Letter] = {"must": "D", "should": "C", "may": "B"}
HELD = ("memory", "pids", "disk", "inodes", "tmp")

ACCEPTABLE: tuple[Letter, ...] = ("A", "B", "C")
"""What a policy may demand. D is what no program is given to, unless the operator opts out by name (`ANY_GRADE`)."""
NO_FILTER = "unsafe_no_seccomp"
ANY_GRADE = "unsafe_any_grade"
"""Switches no defence off: it lets a runtime through that is not graded well enough, and says so each time."""
UNSAFE_HINT = "start the service without CORRAL_UNSAFE"


@dataclass(frozen=True)
class Check:
    """One behaviour of the host: `ok` None = cannot be told here, which costs nothing and is shown."""

    name: str
    kind: Kind
    ok: bool | None
    seen: str
    hint: str | None = None


@dataclass(frozen=True)
class Grade:
    """A letter, why it is no better, and how it gets better (None for A)."""

    letter: Letter
    reason: str
    hint: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"grade": self.letter, "reason": self.reason, "hint": self.hint}


def check_dict(check: Check) -> dict[str, Any]:
    """As JSON."""
    return asdict(check)


def worse(one: Letter, other: Letter) -> Letter:
    """The lower of two grades."""
    return max(one, other, key=LETTERS.index)


def at_least(letter: Letter, floor: Letter) -> bool:
    """Whether a grade is no worse than a floor."""
    return LETTERS.index(letter) <= LETTERS.index(floor)


def grade_host(checks: Sequence[Check]) -> Grade:
    """The worst that a missing check costs; of equals the first is named."""
    letter: Letter = "A"
    worst: Check | None = None
    for check in checks:
        if check.ok is False and LETTERS.index(_COSTS[check.kind]) > LETTERS.index(letter):
            letter, worst = _COSTS[check.kind], check
    if worst is None:
        return Grade("A", "every check passed")
    same = [check.name for check in checks if check.ok is False and _COSTS[check.kind] == letter]
    more = f" (and {', '.join(same[1:])})" if len(same) > 1 else ""
    return Grade(letter, f"{worst.name}: {worst.seen}{more}", worst.hint)


def grade_runtime(
    usable: bool,
    reason: str | None,
    security_level: int,
    capabilities: Mapping[str, bool],
    limits: LimitModes,
    host: Sequence[Check],
    unsafe: Collection[str] = (),
) -> Grade:
    """What a runtime is worth on this host; `unsafe` names the defences that are switched off."""
    unsafe = set(unsafe) - {ANY_GRADE}
    if not usable:
        return Grade("D", f"not usable: {reason or 'it does not work here'}", "see corral doctor for what it lacks")
    must = [check for check in host if check.kind == "must" and check.ok is False]
    if must:
        return Grade("D", f"the host lacks {must[0].name}: {must[0].seen}", must[0].hint)
    if NO_FILTER in unsafe:
        return Grade("D", f"{NO_FILTER}: programs run without a filter of system calls", UNSAFE_HINT)
    if unsafe:
        return Grade("C", f"defences are switched off: {', '.join(sorted(unsafe))}", UNSAFE_HINT)
    if security_level < 1:
        return Grade(
            "C",
            "programs run under the caller's own uid on the host",
            "start it as root, or give the user subordinate ids",
        )
    if not capabilities.get("two_uids", False):
        return Grade(
            "C",
            "guest and programs share one uid inside",
            "install newuidmap (package uidmap) and give subordinate ids",
        )
    weak = [name for name in HELD if getattr(limits, name) != "enforced"]
    if weak:
        hint = "control groups for memory and pids, loop devices and mkfs.ext4 for the disk"
        return Grade("C", f"{', '.join(weak)}: not held by the kernel", hint)
    if security_level < 2:
        return Grade("B", "programs share the host's kernel", "a runtime with a kernel of its own (runsc) is grade A")
    return Grade("A", "own kernel, own ids, every limit held by the kernel")
