"""What node and guest really did, whatever anybody was told."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from corral.testing.history.checker import Call, History, Rule, Violation
from corral.testing.history.events import Event


def barrier(history: History) -> Iterator[Violation]:
    for sandbox, seen in history.by_sandbox.items():
        taken = [event for event in seen if event.kind == "fenced" and event.fence is not None]
        for call in history.acquired(sandbox):
            assert call.told and call.fence
            history.examined["barrier"] += 1
            known = any(event.fence == call.fence and event.at <= call.told.at for event in taken)
            if not known and not _frozen(history, seen, call):
                what = f"{call.fact('owner')} was told of {call.fence} on {sandbox} before the guest had taken it"
                late = [event for event in taken if event.fence == call.fence][:1]
                yield Violation("barrier", what, (*call.events, *late))


def _frozen(history: History, seen: list[Event], call: Call) -> bool:
    """The node took the fence for a guest that stands still, as a restored database has forgotten: it hears of it before it acts."""
    assert call.told is not None
    floor = any(e.kind == "floor" and e.fence == call.fence and e.at <= call.told.at for e in seen)
    turns = [c for c in history.called("pause", "resume") if c.ok and c.sandbox == call.sandbox and c.told is not None]
    before = [c for c in turns if c.told is not None and c.told.at < call.told.at]
    last = max(before, key=lambda c: c.told.at if c.told else 0, default=None)
    forgotten = last is not None and last.told is not None and history.may_be_forgotten(last.told.at)
    return floor and last is not None and last.name == "pause" and forgotten


def floors_rise(history: History) -> Iterator[Violation]:
    for sandbox, seen in history.by_sandbox.items():
        floors = [event for event in seen if event.kind in ("create", "floor")]
        for earlier, later in pairwise(floors):
            history.examined["floors-rise"] += 1
            if earlier.fence and later.fence and later.fence < earlier.fence:
                what = f"the floor of {sandbox} fell from {earlier.fence} to {later.fence}"
                yield Violation("floors-rise", what, (earlier, later))


def _by_instance(history: History) -> dict[str, list[Event]]:
    """The witness of each instance; the end of an exec belongs to where it was started."""
    found: dict[str, list[Event]] = defaultdict(list)
    place: dict[str, str] = {}
    for event in history.events:
        if not event.by.startswith("node"):
            continue
        if event.kind == "start":
            place[str(event["exec"])] = str(event["instance"])
        instance = event.get("instance") or place.get(str(event.get("exec")))
        if instance is not None:
            found[str(instance)].append(event)
    return found


def no_stale_effect(history: History) -> Iterator[Violation]:
    lines = _lines_by_op(history)
    for instance, seen in _by_instance(history).items():
        floor: Event | None = None
        started: list[Event] = []
        for event in seen:
            if event.kind in ("create", "floor") and event.fence is not None:
                if floor is None or (floor.fence is not None and event.fence > floor.fence):
                    floor = event
            elif event.kind == "start":
                history.examined["no-stale-effect"] += 1
                started.append(event)
                if floor is not None and floor.fence and event.fence and event.fence < floor.fence:
                    what = f"an exec with {event.fence} started in {instance} whose floor was {floor.fence}"
                    yield Violation("no-stale-effect", what, (floor, event))
        yield from _survivors(seen, started)
        yield from _late_lines(history, seen, started, lines)


def _survivors(seen: list[Event], started: list[Event]) -> Iterator[Violation]:
    """What ran, and had not ended when a take-over that kills was over. What the guest refused never ran."""
    ran = {event["exec"] for event in seen if event.kind == "started"}
    over = {event["exec"]: event.at for event in reversed(seen) if event.kind in ("end", "refused")}
    for start in started:
        takeover = _first([event for event in seen if event.kind == "fenced" and event.get("mode") == "kill"], start)
        if takeover is None or start["exec"] not in ran:
            continue
        if over.get(start["exec"], takeover.at + 1) > takeover.at:
            what = f"an exec with {start.fence} was still there when {takeover.fence} had taken over"
            yield Violation("no-stale-effect", what, (start, takeover))


def _late_lines(
    history: History, seen: list[Event], started: list[Event], lines: dict[str, list[Event]]
) -> Iterator[Violation]:
    """What a program writes after the barrier of a take-over that should have ended it."""
    barriers = [event for event in seen if event.kind == "fenced" and event.get("mode") == "kill"]
    for start in started:
        over = _first(barriers, start)
        for line in lines.get(str(start.get("op")), ()):
            history.examined["no-stale-effect"] += 1
            if over is not None and line.at > over.at:
                what = f"{start.get('op')} with {start.fence} wrote after {over.fence} had taken over"
                yield Violation("no-stale-effect", what, (start, over, line))
                break


def _first(barriers: list[Event], start: Event) -> Event | None:
    newer = [b for b in barriers if b.fence and start.fence and b.fence > start.fence and b.at > start.at]
    return newer[0] if newer else None


def _lines_by_op(history: History) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = defaultdict(list)
    for event in history.of("line"):
        found[str(event["op"])].append(event)
    return found


def dead_is_dead(history: History) -> Iterator[Violation]:
    lines = _lines_by_op(history)
    for instance, seen in _by_instance(history).items():
        dead: Event | None = None
        for event in seen:
            history.examined["dead-is-dead"] += 1
            if event.kind == "create":  # what was cut short is undone, and made again under its name
                dead = None
            elif event.kind == "destroyed":
                dead = event
            elif event.kind in ("start", "started", "fenced") and dead is not None:
                yield Violation("dead-is-dead", f"{event.kind} in {instance} after its end", (dead, event))
        if dead is not None:
            yield from _undead(dead, seen, lines)


def _undead(dead: Event, seen: list[Event], lines: dict[str, list[Event]]) -> Iterator[Violation]:
    """Programs of an instance that write after its last end."""
    for start in seen:
        late = [line for line in lines.get(str(start.get("op")), ()) if line.at > dead.at]
        if start.kind == "start" and late:
            yield Violation("dead-is-dead", f"{start.get('op')} wrote after its instance's end", (dead, late[0]))


def code_once(history: History) -> Iterator[Violation]:
    by_exec: dict[str, list[Event]] = defaultdict(list)
    by_op: dict[str, list[Event]] = defaultdict(list)
    for event in history.of("start"):
        by_exec[str(event["exec"])].append(event)
        if event.get("op") is not None:
            by_op[str(event["op"])].append(event)
    for name, starts in by_exec.items():
        history.examined["code-once"] += 1
        # The same frame may be sent again after a crash; a guest that knows the exec starts nothing.
        if len({event["instance"] for event in starts}) > 1:
            yield Violation("code-once", f"{name} was started in several instances", tuple(starts))
    for op, starts in by_op.items():
        history.examined["code-once"] += 1
        different = {event["exec"]: event for event in starts}
        first, last = starts[0].at, starts[-1].at
        if len(different) > 1 and not history.restored_within(first, last):
            yield Violation("code-once", f"the program of {op} was started {len(different)} times", tuple(starts))
    for op, lines in _lines_by_op(history).items():
        begun = [line for line in lines if line.get("what") == "begin"]
        history.examined["code-once"] += 1
        if len(begun) > 1 and not history.restored_within(begun[0].at, begun[-1].at):
            yield Violation("code-once", f"the program of {op} ran {len(begun)} times inside", tuple(begun))


def started_agrees(history: History) -> Iterator[Violation]:
    sent: dict[str, Event] = {}
    seen: dict[str, Event] = {}
    for event in history.of("start", "started"):
        if event.get("op") is not None:
            sent.setdefault(str(event["op"]), event)
            if event.kind == "started":
                seen.setdefault(str(event["op"]), event)
    for op, lines in _lines_by_op(history).items():
        seen.setdefault(op, lines[0])
    witnessed = any(event.by.startswith("node") for event in history.events)
    for told in history.events:
        op, started = told.get("of", told.get("op")), told.get("started", "nothing")
        if told.kind not in ("return", "run") or op is None or started == "nothing":
            continue
        history.examined["started-agrees"] += 1
        ran = seen.get(str(op))
        if started is False and ran is not None and not history.restored_within(ran.at, told.at):
            yield Violation("started-agrees", f"{op} is said not to have started, and did", (ran, told))
        if witnessed and started is True and str(op) not in sent:
            yield Violation("started-agrees", f"{op} is said to have started, and nobody saw it", (told,))
        if told.get("reason") == "ok" and told.get("out") != f"done {op}\n":
            yield Violation("started-agrees", f"{op} is said to have succeeded, without its output", (told,))


RULES: tuple[Rule, ...] = (barrier, floors_rise, no_stale_effect, dead_is_dead, code_once, started_agrees)
