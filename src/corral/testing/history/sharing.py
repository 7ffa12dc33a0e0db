"""What tenants share without getting in each other's way: ids, the queue, who is told of an end; and what stands still."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations

from corral.testing.history.checker import Call, History, Rule, Violation
from corral.testing.history.events import Event
from corral.testing.history.plan import PRIORITIES

LATE_NS = 30_000_000_000
"""So long the first of two requests that were sent for one call may be under way."""
IDS = ("sandbox", "run", "exec")


def paused_is_still(history: History) -> Iterator[Violation]:
    lines: dict[str, list[Event]] = defaultdict(list)
    for event in history.of("line"):
        lines[str(event.get("sandbox"))].append(event)
    ends: dict[str, list[Call]] = defaultdict(list)
    for call in history.called("resume", "delete"):
        ends[call.sandbox].append(call)
    last = history.events[-1].at + 1 if history.events else 0
    for call in history.called("pause"):
        if not call.ok or call.told is None:
            continue
        begun = call.told.at
        until = min((end.asked.at for end in ends[call.sandbox] if _may_act_after(end, begun)), default=last)
        if until <= begun or history.restored_within(call.asked.at, until):
            continue
        history.examined["paused-is-still"] += 1
        seen = [*lines[call.sandbox], *(e for e in history.by_sandbox.get(call.sandbox, ()) if e.kind == "start")]
        moved = [event for event in seen if begun < event.at < until]
        if moved:
            what = f"{call.sandbox} was told to be paused, and {moved[0].get('op')} went on in it"
            yield Violation("paused-is-still", what, (*call.events, moved[0]))


def _may_act_after(end: Call, moment: int) -> bool:
    """A call that may have its effect later than this."""
    if end.told is None:
        return True
    late = LATE_NS if int(str(end.told.get("tries", 1))) > 1 else 0
    return end.told.at + late > moment


def foreign_is_nobodys(history: History) -> Iterator[Violation]:
    nobodys: dict[str, set[tuple[object, object]]] = defaultdict(set)
    for call in history.called("foreign"):
        if call.asked.get("whose") == "nobody" and call.told is not None:
            nobodys[str(call.asked["route"])].add((call.code, call.told.get("detail")))
    for call in history.called("foreign"):
        if call.told is None or call.asked.get("whose") == "nobody":
            continue
        history.examined["foreign-is-nobodys"] += 1
        answers = nobodys[str(call.asked["route"])]
        if call.ok or call.code != "not_found":
            yield Violation("foreign-is-nobodys", f"{call.asked['route']} answers another tenant", call.events)
        elif answers and (call.code, call.told.get("detail")) not in answers:
            yield Violation("foreign-is-nobodys", f"{call.asked['route']} tells that there is such an id", call.events)
    owners: dict[tuple[str, str], Call] = {}
    for call in history.calls:
        if call.told is None or not call.ok or call.asked.get("tenant") is None or call.name == "foreign":
            continue
        for kind in IDS:
            if call.told.get(kind) is not None:
                first = owners.setdefault((kind, str(call.told[kind])), call)
                if first.asked["tenant"] != call.asked["tenant"]:
                    what = f"{call.told[kind]} was told to two tenants"
                    yield Violation("foreign-is-nobodys", what, (*first.events, *call.events))


@dataclass
class Waiting:
    """A run as its clients saw it. Moments between which it waited for certain, and when it had been let in at the latest."""

    tenant: object
    rank: int
    asked: int
    accepted: int | None = None
    since: int | None = None
    until: int = 0
    seen: list[int] = field(default_factory=list)
    """Moments at which it still waited."""
    began: Event | None = None
    shown: list[Event] = field(default_factory=list)


def priority(history: History) -> Iterator[Violation]:
    runs = _waiting(history)
    by_tenant: dict[object, list[tuple[str, Waiting]]] = defaultdict(list)
    for name, run in runs.items():
        by_tenant[run.tenant].append((name, run))
    for mine in by_tenant.values():
        for (before, first), (name, then) in permutations(mine, 2):
            if first.since is None or first.rank > then.rank or then.began is None:
                continue
            earlier = first.accepted is not None and first.accepted < then.asked
            if first.rank == then.rank and not earlier:
                continue
            still = max([then.asked, *(moment for moment in then.seen if moment < then.began.at)])
            if not first.since <= still < first.until or history.restored_within(first.since, first.until):
                continue
            history.examined["priority"] += 1
            if then.began.at < first.until:
                what = f"{name} was let in while {before} of the same tenant waited, which goes before it"
                yield Violation("priority", what, (*first.shown, then.began))


def _waiting(history: History) -> dict[str, Waiting]:
    found: dict[str, Waiting] = {}
    for call in history.called("submit"):
        if call.asked.get("of") is None:
            continue
        rank = PRIORITIES.index(str(call.asked.get("priority", "normal")))
        run = found.setdefault(str(call.asked["of"]), Waiting(call.asked.get("tenant"), rank, call.asked.at))
        if call.ok and call.told is not None and run.accepted is None:
            run.accepted = call.told.at
    for call in history.called("submit", "result"):
        run = found.get(str(call.fact("of")))  # type: ignore[assignment]
        if run is None or call.told is None or not call.told.get("waits"):
            continue
        run.since = call.told.at if run.since is None else min(run.since, call.told.at)
        if call.name == "result":
            run.seen.append(call.asked.at)
            if call.asked.at > run.until:
                run.until, run.shown = call.asked.at, [*run.shown[:1], call.asked, call.told]
        elif not run.shown:
            run.shown = [call.told]
    for event in history.of("start"):
        run = found.get(str(event.get("op")))  # type: ignore[assignment]
        if run is not None and run.began is None:
            run.began = event
    return found


def webhook(history: History) -> Iterator[Violation]:
    told: dict[str, list[Event]] = defaultdict(list)
    for event in history.of("hook"):
        told[str(event["run"])].append(event)
    last = {str(event["run"]): event for event in history.of("run")}
    for call in history.called("submit"):
        run = None if call.told is None else call.told.get("run")
        if call.asked.get("hook") is None or run is None or call.told is None:
            continue
        history.examined["webhook"] += 1
        end = last.get(str(run))
        over = end is not None and end.get("state") == "finished"
        if over and not told[str(run)] and not history.may_be_forgotten(call.told.at):
            yield Violation("webhook", f"{run} ended, and nobody was told", (*call.events, *([end] if end else [])))
    ended = _ends(history)
    for run, events in told.items():
        for event in events:
            history.examined["webhook"] += 1
            yield from _true(history, event, last.get(run), ended.get(str(event["of"])))
        if len({event["delivery"] for event in events}) > 1 and not history.restores:
            yield Violation("webhook", f"the end of {run} was told under several ids", tuple(events))


def _true(history: History, event: Event, end: Event | None, over: Event | None) -> Iterator[Violation]:
    if not event.get("signed"):
        yield Violation("webhook", f"what was told of {event['of']} is not signed by its secret", (event,))
    if event.get("state") != "finished" or event.get("reason") is None:
        yield Violation("webhook", f"{event['of']} was told of before it ended", (event,))
    if event.get("reason") == "ok" and over is not None and over.at > event.at:
        yield Violation("webhook", f"{event['of']} was told of before it ended", (event, over))
    if end is None or history.may_be_forgotten(event.at):
        return
    if end.get("of") is not None and end["of"] != event["of"]:
        yield Violation("webhook", f"the end of {end['of']} was told as that of {event['of']}", (event, end))
    elif end.get("state") == "finished" and _result(end) != _result(event):
        yield Violation("webhook", f"the end of {event['of']} was told otherwise than it was", (event, end))


def _result(event: Event) -> tuple[object, ...]:
    return tuple(event.get(name) for name in ("reason", "exit_code", "started"))


def _ends(history: History) -> dict[str, Event]:
    """By the caller's name: when the last process of its exec had ended."""
    op = {str(event["exec"]): str(event["op"]) for event in history.of("start") if event.get("op") is not None}
    return {op[str(event["exec"])]: event for event in history.of("end") if str(event.get("exec")) in op}


RULES: tuple[Rule, ...] = (paused_is_still, foreign_is_nobodys, priority, webhook)
