"""What must be true when all is quiet again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from corral.testing.history.checker import Call, History, Rule, Violation
from corral.testing.history.events import Event


def ends_once(history: History) -> Iterator[Violation]:
    accepted: dict[str, Event] = {}
    outcomes: dict[str, list[Event]] = defaultdict(list)
    at_last: dict[str, Event] = {}
    for event in history.events:
        run = event.get("run")
        if run is None or event.kind not in ("return", "run"):
            continue
        if event.kind == "return":
            accepted.setdefault(str(run), event)
        else:
            at_last[str(run)] = event
        if event.get("state") == "finished":
            outcomes[str(run)].append(event)
    looked = any(event.kind == "run" for event in history.events)
    for run, first in accepted.items():
        history.examined["ends-once"] += 1
        end = at_last.get(run)
        if looked and end is None and not history.may_be_forgotten(first.at):
            yield Violation("ends-once", f"{run} was accepted and is not there any more", (first,))
        elif end is not None and end.get("state") != "finished":
            yield Violation("ends-once", f"{run} was accepted and never ended", (first, end))
    for run, told in outcomes.items():
        history.examined["ends-once"] += 1
        for earlier, later in pairwise(told):
            if _outcome(earlier) != _outcome(later) and not history.may_be_forgotten(earlier.at):
                yield Violation("ends-once", f"{run} ended in two ways", (earlier, later))
                break


def _outcome(event: Event) -> tuple[object, ...]:
    return tuple(event.get(name) for name in ("reason", "exit_code", "started", "out"))


def one_per_key(history: History) -> Iterator[Violation]:
    by_key: dict[tuple[str, str, object], list[Call]] = defaultdict(list)
    for call in history.calls:
        if call.asked.get("key") is not None and call.name in ("create", "submit", "exec"):
            by_key[call.name, str(call.asked["key"]), call.asked.get("tenant")].append(call)
    made = {"create": "sandbox", "submit": "run", "exec": "exec"}
    for (name, key, _), calls in by_key.items():
        history.examined["one-per-key"] += 1
        kept: dict[str, Call] = {}
        for call in (call for call in calls if call.ok):
            if call.asked.get("other"):
                yield Violation("one-per-key", f"another body was taken under the key {key}", call.events)
                continue
            kept.setdefault(str(call.fact(made[name])), call)
        first = [call for call in kept.values() if call.told]
        for one, two in pairwise(first):
            assert one.told and two.told
            if not history.may_be_forgotten(one.told.at):
                yield Violation("one-per-key", f"the key {key} made two", (*one.events, *two.events))
        for call in calls:
            if call.code == "idempotency_conflict" and not call.asked.get("other"):
                yield Violation("one-per-key", f"the same body was refused under its key {key}", call.events)
    by_op: dict[str, list[Event]] = defaultdict(list)
    for event in history.of("run"):
        if event.get("of") is not None:
            by_op[str(event["of"])].append(event)
    for op, runs in by_op.items():
        history.examined["one-per-key"] += 1
        if len({event["run"] for event in runs}) > 1 and not history.restores:
            yield Violation("one-per-key", f"{op} was accepted as {len(runs)} runs", tuple(runs))


def quota(history: History) -> Iterator[Violation]:
    for event in history.of("quota"):
        history.examined["quota"] += 1
        if event["reserved"] != event["used"]:
            what = f"{event.get('tenant')} has {event.get('of')} reserved {event['reserved']}, and uses {event['used']}"
            yield Violation("quota", what, (event,))


def forgotten(history: History) -> set[str]:
    """Instances that were made after a copy that came back: the database may know nothing of them."""
    return {str(event["instance"]) for event in history.of("create") if history.may_be_forgotten(event.at)}


def nothing_left(history: History) -> Iterator[Violation]:
    """Bodies of which a restored database knows nothing are kept on purpose, and shown, until the operator says `corral gc --unknown`."""
    unknown = forgotten(history)
    for event in history.of("left"):
        history.examined["nothing-left"] += 1
        if event.get("text") is not None and (
            event.get("after") == "gc" or event.get("instance") not in unknown
        ):  # a look that found nothing is an event too
            yield Violation("nothing-left", f"{event.get('what')}: {event['text']}", (event,))


def no_defect(history: History) -> Iterator[Violation]:
    for call in history.calls:
        if call.told is None:
            continue
        history.examined["no-defect"] += 1
        if call.code is not None and "unexpected" in str(call.told.get("detail", "")):
            yield Violation("no-defect", f"{call.name} met a defect of the service", call.events)


RULES: tuple[Rule, ...] = (ends_once, one_per_key, quota, nothing_left, no_defect)
