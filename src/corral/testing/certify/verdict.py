"""What a try showed, and what may be said of it: pure.

An attack counts as refused only where its *control* succeeds: the same attack with the defence switched off, or where nothing defends.
Else the attack may be no attack here (the kernel lacks the call, the means are missing), and its refusal shows nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from corral.domain.limits import Mode

Verdict = Literal["held", "failed", "not_provable"]
Witness = Literal["host", "inside"]
_STRENGTH: dict[str, int] = {"absent": 0, "watched": 1, "enforced": 2}
AFTERWARDS = ("residue", "the host, afterwards")
"""The row that every trial ends with: alone it proves nothing of a runtime."""
NAMED = 6
"""How many ways a sentence names before it counts the rest."""


@dataclass(frozen=True)
class Seen:
    """One try: `broke` True = it achieved what it was for, False = it was refused, None = it could not be tried. `how` says what was seen."""

    broke: bool | None
    how: str


@dataclass(frozen=True)
class Trial:
    """One way of an attack and its control. Of a limit also: the mode that is declared, and the one that was seen."""

    way: str
    attack: Seen
    control: Seen
    declared: Mode | None = None
    seen: Mode | None = None


@dataclass(frozen=True)
class Finding:
    """What is said of one attack on one runtime."""

    group: str
    name: str
    about: str
    verdict: Verdict
    evidence: str
    control: str
    witness: Witness
    declared: Mode | None = None
    seen: Mode | None = None
    took_ms: int = 0
    trials: tuple[tuple[Trial, Verdict], ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON."""
        ways = [
            {"way": trial.way, "verdict": verdict, "attack": trial.attack.how, "control": trial.control.how}
            for trial, verdict in self.trials
        ]
        limit = {"declared": self.declared, "seen": self.seen} if self.declared is not None else {}
        return {
            "group": self.group,
            "name": self.name,
            "about": self.about,
            "verdict": self.verdict,
            "evidence": self.evidence,
            "control": self.control,
            "witness": self.witness,
            **limit,
            "took_ms": self.took_ms,
            "ways": ways,
        }


@dataclass(frozen=True)
class RuntimeReport:
    """Everything that was found of one runtime; `unusable` says why nothing was tried."""

    name: str
    version: str | None
    security_level: int
    unusable: str | None
    findings: tuple[Finding, ...] = ()
    took_s: float = 0.0
    unsafe: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether an attack held: the last row, which every trial has, is none."""
        return any(one.verdict == "held" and (one.group, one.name) != AFTERWARDS for one in self.findings)

    def count(self, verdict: Verdict) -> int:
        """How many attacks have this verdict."""
        return sum(finding.verdict == verdict for finding in self.findings)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "version": self.version,
            "security_level": self.security_level,
            "usable": self.unusable is None,
            "reason": self.unusable,
            "unsafe": list(self.unsafe),
            "held": self.count("held"),
            "failed": self.count("failed"),
            "not_provable": self.count("not_provable"),
            "took_s": round(self.took_s, 1),
            "attacks": [finding.document() for finding in self.findings],
        }


@dataclass(frozen=True)
class Report:
    """One run of `corral certify`. `host` and `versions` are facts for the reader, no names of the machine."""

    date: str
    user: str
    host: dict[str, Any]
    versions: dict[str, str | None]
    runtimes: tuple[RuntimeReport, ...] = field(default_factory=tuple)
    named: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing failed, of each runtime that was tried something was proven, and each that was named could be tried."""
        tried = [runtime for runtime in self.runtimes if runtime.unusable is None]
        missing = set(self.named) - {runtime.name for runtime in tried}
        return bool(tried) and not missing and all(runtime.proven and not runtime.count("failed") for runtime in tried)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "date": self.date,
            "user": self.user,
            "host": self.host,
            "versions": self.versions,
            "ok": self.ok,
            "runtimes": [runtime.document() for runtime in self.runtimes],
        }


def judge(trial: Trial) -> Verdict:
    """What one way shows."""
    if trial.attack.broke:
        return "failed"
    if trial.attack.broke is None or not trial.control.broke:
        return "not_provable"
    return "held"


def limit_trial(declared: Mode, seen: Mode | None, how: str, control: Seen) -> Trial:
    """A limit attacked to several times its size: weaker than declared is a failure; what is declared absent cannot be proven to hold."""
    if seen is None:
        attack = Seen(None, how)
    elif declared == "absent":
        attack = Seen(None, f"declared absent: {how}")
    else:
        attack = Seen(_STRENGTH[seen] < _STRENGTH[declared], how)
    return Trial("over the limit", attack, control, declared, seen)


def find(group: str, name: str, about: str, witness: Witness, trials: Sequence[Trial], took_ms: int = 0) -> Finding:
    """One finding of all ways: any that broke fails it; it holds where at least one is proven and none broke."""
    judged = tuple((trial, judge(trial)) for trial in trials)
    verdicts = {verdict for _, verdict in judged}
    verdict: Verdict = "failed" if "failed" in verdicts else "held" if "held" in verdicts else "not_provable"
    first = trials[0] if trials else None
    return Finding(
        *(group, name, about, verdict, _evidence(judged, verdict), _control(judged, verdict), witness),
        declared=first.declared if first else None,
        seen=first.seen if first else None,
        took_ms=took_ms,
        trials=judged,
    )


def broken(group: str, name: str, about: str, witness: Witness, why: str, took_ms: int = 0) -> Finding:
    """An attack that came to no end: what took the trial away may have been the attack, so it counts as failed."""
    return Finding(
        group, name, about, "failed", f"the trial did not come to its end: {why}", "-", witness, took_ms=took_ms
    )


def _evidence(judged: Sequence[tuple[Trial, Verdict]], verdict: Verdict) -> str:
    if not judged:
        return "nothing to try"
    if len(judged) == 1:
        trial = judged[0][0]
        if verdict == "not_provable" and trial.attack.broke is False:
            return f"refused ({trial.attack.how}), which shows nothing: the control is refused too"
        return trial.attack.how
    here = [trial for trial, one in judged if one == verdict]
    rest = [trial for trial, one in judged if one == "not_provable"]
    if verdict == "failed":
        return f"{len(here)} of {len(judged)} ways: {_named([f'{trial.way} ({trial.attack.how})' for trial in here])}"
    if verdict == "not_provable":
        return f"none of {len(judged)} ways: {_named([f'{trial.way} ({trial.attack.how})' for trial in here])}"
    told = f"{len(here)} of {len(judged)} ways refused: {_counted([trial.attack.how for trial in here])}"
    return told + (f"; shows nothing here: {_named([trial.way for trial in rest])}" if rest else "")


def _control(judged: Sequence[tuple[Trial, Verdict]], verdict: Verdict) -> str:
    wanted = [trial.control.how for trial, one in judged if one == verdict]
    return _counted(wanted) if wanted else "-"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _counted(words: Sequence[str]) -> str:
    if len(set(words)) == 1:
        return words[0]
    return _named([f"{word} x{count}" if count > 1 else word for word, count in Counter(words).most_common()])
