"""The judge of a history. Pure: events in, violations out, each with the events that show it; and how much every rule had to look at.

A database that was restored from an older copy forgets what came after the copy: a promise that was given before ends with the
restore, and a row may be missing or made a second time. What the fences say holds over it all the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from corral.testing.history.events import Event, Fence, merged

REFUSED_BY_FENCE = frozenset({"lease_lost", "lease_held"})
ACTS = frozenset({"exec", "write", "renew", "delete", "pause", "resume"})
"""Calls of a holder, refused once the lease is another's; a delete only if it names its fence."""


@dataclass(frozen=True)
class Call:
    """One call of a client: what it asked, and what it was told, if it was."""

    asked: Event
    told: Event | None

    @property
    def op(self) -> str:
        return str(self.asked["op"])

    @property
    def name(self) -> str:
        return str(self.asked["call"])

    @property
    def ok(self) -> bool:
        return self.told is not None and bool(self.told.get("ok"))

    @property
    def code(self) -> str | None:
        return None if self.told is None or self.ok else str(self.told.get("code"))

    @property
    def accepted(self) -> bool:
        """It had its effect, as far as the client was told. An exec has one only if its program started."""
        return self.ok and (self.name != "exec" or (self.told is not None and self.told.get("started") is True))

    def fact(self, name: str) -> object:
        """As told, else as asked."""
        told = None if self.told is None else self.told.get(name)
        return self.asked.get(name) if told is None else told

    @property
    def sandbox(self) -> str:
        return str(self.fact("sandbox"))

    @property
    def fence(self) -> Fence | None:
        found = self.fact("fence")
        return None if found is None else Fence.of(str(found))

    @property
    def events(self) -> tuple[Event, ...]:
        return (self.asked,) if self.told is None else (self.asked, self.told)


@dataclass(frozen=True)
class Restore:
    """The database was replaced by a copy of itself as of `copied_at`; between `at` and `until` nobody could use it."""

    event: Event

    @property
    def copied_at(self) -> int:
        return int(self.event["copied_at"])

    @property
    def at(self) -> int:
        return int(self.event.get("began", self.event.at))

    @property
    def until(self) -> int:
        return int(self.event["until"])


@dataclass(frozen=True)
class Violation:
    """A promise that was broken, in words, and the events that show it."""

    rule: str
    what: str
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.rule}: {self.what}", *(f"    {event}" for event in self.events)])


class History:
    """Events in the order of time, by what the rules ask for."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = merged(events)
        self.calls = _calls(self.events)
        self.restores = [Restore(event) for event in self.of("fault") if event.get("what") == "restore"]
        self.examined: Counter[str] = Counter()
        self.by_sandbox: dict[str, list[Event]] = defaultdict(list)
        """The node's witness."""
        for event in self.events:
            if event.by.startswith("node") and "sandbox" in event.facts:
                self.by_sandbox[str(event["sandbox"])].append(event)

    def of(self, *kinds: str) -> Iterator[Event]:
        return (event for event in self.events if event.kind in kinds)

    def called(self, *names: str) -> Iterator[Call]:
        return (call for call in self.calls if call.name in names)

    def acquired(self, sandbox: str) -> list[Call]:
        """Acquires that succeeded, in the order in which their holders heard of it."""
        found = [call for call in self.called("acquire") if call.ok and call.sandbox == sandbox]
        return sorted(found, key=lambda call: call.told.at if call.told else 0)

    def sandboxes(self) -> list[str]:
        return sorted({call.sandbox for call in self.calls if call.fact("sandbox") is not None})

    def restored_within(self, first: int, last: int) -> bool:
        """A restore falls between two moments, or what was written at the first may have been forgotten by the second."""
        return any(restore.at <= last and first <= restore.until for restore in self.restores)

    def may_be_forgotten(self, written: int) -> bool:
        """It was written after a copy was taken that came back later."""
        return any(restore.copied_at <= written <= restore.until for restore in self.restores)


Rule = Callable[[History], Iterator[Violation]]


@dataclass(frozen=True)
class Verdict:
    """`examined`: how many things each rule looked at; a rule that had nothing to look at has shown nothing."""

    violations: list[Violation]
    examined: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        return "\n".join(str(violation) for violation in self.violations) or "no promise was broken"


def check(events: Iterable[Event]) -> Verdict:
    """All rules over a history."""
    from corral.testing.history import effects, endings, promises, sharing

    history = History(events)
    found: list[Violation] = []
    for rule in (*promises.RULES, *effects.RULES, *endings.RULES, *sharing.RULES):
        found += rule(history)
    return Verdict(found, {name: history.examined[name] for name in RULES})


RULES = {
    "tokens-rise": "each acquire gets a higher token than every one before it",
    "one-owner": "no two owners hold a sandbox at once, by what they were promised",
    "promise-kept": "a lease is not lost before the expiry that its holder was told",
    "expired-is-lost": "a lease that has expired is not renewed",
    "no-stale-call": "a call with an old fence is refused once a newer owner was told of his lease",
    "barrier": "a lease is reported only after node and guest took its fence",
    "floors-rise": "what a node takes as floor of a sandbox never falls",
    "no-stale-effect": "nothing starts below the floor, and what is older than a take-over acts no more after it",
    "dead-is-dead": "nothing starts or writes in an instance after it was destroyed",
    "code-once": "a program starts at most once",
    "started-agrees": "what a result says of the start is what the witness saw, and success is never false",
    "ends-once": "every accepted run ends, once, with one result",
    "one-per-key": "one idempotency key makes one thing",
    "paused-is-still": "nothing starts or writes in a sandbox from when it is told to be paused until somebody resumes it",
    "foreign-is-nobodys": "what is another tenant's answers like what nobody has, and no id is told to two tenants",
    "priority": "of a tenant's runs that wait none is let in before one that waits with a higher priority, or as long with the same",
    "webhook": "the end of each run with a webhook is told, signed, never before it, and as it was",
    "quota": "what is reserved of each tenant is what lives",
    "nothing-left": "no process, mount, directory or instance is left over",
    "no-defect": "no answer is an unexpected failure of the service",
}


def _calls(events: list[Event]) -> list[Call]:
    told: dict[tuple[str, str], Event] = {}
    for event in events:
        if event.kind == "return":
            told.setdefault((event.by, str(event["op"])), event)
    return [Call(event, told.get((event.by, str(event["op"])))) for event in events if event.kind == "invoke"]
