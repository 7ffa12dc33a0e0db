"""The lifecycle of a sandbox: one table, and `decide` which reads it. Everything that decides about a transition is in this file.

The table is data: each row names states, events, the conditions under which it applies (`flags`, `!` = must not hold; the first
row that applies wins) and all that is committed together with the new state. This file knows neither clock nor store: the caller
passes the conditions that hold, and commits the `Step`. An illegal pair raises `illegal_transition` with the history given.

Words of a step: `lease` is `take` (the next token, for the owner at hand), `take_system` (the next token, `system:<reason>`),
`extend` or None. `remembered` is the state that `pausing`, `paused` and `resuming` go back to, and the level of `recycling`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from corral.domain.machine import illegal

NONE = "(none)"
"""The state before `create`."""

STATES = (
    "requested",
    "planning",
    "allocating",
    "provisioning",
    "locking",
    "ready",
    "leased",
    "running",
    "idle",
    "reuse_checking",
    "recycling",
    "hibernating",
    "hibernated",
    "pausing",
    "paused",
    "resuming",
    "sanitizing",
    "terminated",
    "failed",
    "lost",
)

WITH_INSTANCE = (
    "locking",
    "ready",
    "leased",
    "running",
    "pausing",
    "paused",
    "resuming",
    "idle",
    "reuse_checking",
    "recycling",
    "hibernating",
)
"""States in which a bound instance is behind the sandbox."""

HOLDS_COMPUTE = ("requested", "planning", "allocating", "provisioning", *WITH_INSTANCE, "failed", "lost", "sanitizing")
"""States that may still hold a reservation of compute; `hibernated` and `terminated` never do."""

ENDED = ("terminated",)
Lease = Literal["take", "take_system", "extend"]

SAME = "same"
REMEMBERED = "remembered state"


@dataclass(frozen=True)
class Row:
    """One row of the table (or a part of one: 12b is two)."""

    number: str
    states: tuple[str, ...]
    events: tuple[str, ...]
    next: str
    when: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    lease: Lease | None = None
    end_execs: str | None = None
    failure: str | None = None
    taint: str | None = None
    condemn: bool = False
    bind: bool = False
    remember: str | None = None
    """What `remembered` becomes: a state, a level, or `SAME` for the state that is left."""
    answer: str | None = None
    """What the caller is told where nothing changes: `lease_held`, `join`."""

    def applies(self, flags: Collection[str]) -> bool:
        return all((flag[1:] not in flags) if flag.startswith("!") else (flag in flags) for flag in self.when)


@dataclass(frozen=True)
class Step:
    """What `decide` answers; committed as a whole."""

    row: str
    state: str
    event: str
    next_state: str
    commands: tuple[str, ...] = ()
    lease: Lease | None = None
    end_execs: str | None = None
    failure: str | None = None
    taint: str | None = None
    condemn: bool = False
    bind: bool = False
    remembered: str | None = None
    answer: str | None = None

    @property
    def changes_state(self) -> bool:
        return self.state != self.next_state


def _row(number: str, states: str, events: str, following: str, **more: Any) -> Row:
    for name in ("when", "commands"):
        if isinstance(more.get(name), str):
            more[name] = tuple(more[name].split())
    return Row(number, tuple(states.split()), tuple(events.split()), following, **more)


_LIVE = " ".join(state for state in STATES if state not in ("sanitizing", "terminated"))
_ALL = " ".join(STATES)
_INSTANCE = " ".join(WITH_INSTANCE)
_DESTROY = "destroy"
"""One command: kill, wipe, delete the volume (policy), revoke credentials, drop the network identity, return the quota."""
_SETTLE = "settle"

TABLE: tuple[Row, ...] = (
    _row("1", NONE, "create", "requested", commands="reserve_quota plan"),
    _row("2", "requested", "planning_started", "planning", commands="call_planner"),
    _row("2a", "planning", "planner_deadline planner_failed", SAME, commands="call_planner_rules"),
    _row("3", "planning", "planned", "allocating", commands="place"),
    _row("4", "planning", "refused", "failed", failure="policy_denied", commands="release_quota"),
    _row("5", "allocating", "hit", "locking", lease="take", commands="fence", bind=True),
    _row("6", "allocating", "miss", "provisioning", commands="create_instance"),
    _row("7", "allocating", "no_capacity", SAME, when="before_queue_deadline", commands="enqueue"),
    _row("8", "allocating", "queue_deadline", "failed", failure="queue_timeout", commands="release_quota"),
    _row("9", "provisioning", "provisioned", "locking", lease="take", commands="fence", bind=True),
    _row(
        "10",
        "provisioning",
        "provision_failed deadline",
        "allocating",
        when="attempts_left retryable",
        commands="condemn_instance",
        condemn=True,
    ),
    _row(
        "11",
        "provisioning",
        "provision_failed deadline",
        "failed",
        failure="infra_error",
        commands="condemn_instance release_quota",
        condemn=True,
    ),
    _row("12", "locking", "fenced", SAME, commands="identify bind_workspace select_layers"),
    _row("12a", "locking", "bound", "ready"),
    _row(
        "13",
        "locking",
        "fence_failed bind_failed",
        "allocating",
        when="attempts_left",
        commands="condemn_instance",
        condemn=True,
    ),
    _row(
        "14",
        "locking",
        "fence_failed bind_failed",
        "failed",
        failure="infra_error",
        commands="condemn_instance release_quota",
        condemn=True,
    ),
    # The creator goes on with the token that `locking` took.
    _row("15", "ready", "acquire", "leased", when="creator", lease="extend"),
    _row("15", "ready", "acquire", "leased", lease="take", commands="fence"),
    _row("16", "ready", "idle_timeout", "idle", lease="take_system"),
    _row("17", "leased", "exec_requested", "running", commands="start_exec"),
    _row("18", "leased running paused", "renew", SAME, when="!expired", lease="extend"),
    _row("18a", "ready leased running idle reuse_checking recycling pausing paused resuming", "set_expiry", SAME),
    _row("19", "leased", "release lease_expired", "recycling", lease="take_system", commands=_SETTLE, remember="soft"),
    _row("20", "running", "exec_requested", SAME, commands="start_exec"),
    _row(
        "20a",
        "running",
        "kill_failed",
        "sanitizing",
        taint="unkillable",
        commands="condemn_instance",
        condemn=True,
    ),
    _row("26", "running", "acquire", SAME, when="owner_system same_session", lease="take", commands="fence_adopt"),
    # The same caller under a name, one that comes again, or the one from whom the store's past took it: what runs is theirs.
    _row("26a", "leased running", "acquire", SAME, when="own", lease="take", commands="fence_adopt"),
    _row("20b", "leased running paused reuse_checking", "acquire", SAME, when="other_owner", answer="lease_held"),
    _row("20c", "hibernating recycling locking pausing resuming", "acquire", SAME, answer="join"),
    _row("21", "running", "exec_ended", SAME, when="others_run", commands="record_result"),
    _row(
        "27",
        "running",
        "exec_ended",
        "recycling",
        when="owner_system",
        commands="record_result settle",
        remember="soft",
    ),
    _row("22", "running", "exec_ended", "leased", commands="record_result"),
    _row("23", "running", "exec_timeout cancel breaker", SAME, commands="kill_exec"),
    _row(
        "24",
        "running",
        "release lease_expired",
        SAME,
        when="detached_execs",
        lease="take_system",
        commands="kill_attached_execs",
    ),
    _row(
        "25",
        "running",
        "release lease_expired",
        "recycling",
        lease="take_system",
        end_execs="lease_lost",
        commands="kill_all settle",
        remember="soft",
    ),
    _row("28", "leased running idle", "pause", "pausing", when="can_pause", commands="freeze", remember=SAME),
    _row("28a", "pausing", "paused", "paused"),
    _row("28b", "pausing", "pause_failed", REMEMBERED),
    _row("29", "paused", "resume", "resuming", commands="thaw fix_clocks fence"),
    _row("29a", "resuming", "resumed", REMEMBERED),
    _row(
        "29b",
        "resuming",
        "resume_failed",
        "lost",
        failure="sandbox_lost",
        commands="condemn_instance",
        condemn=True,
    ),
    # What was frozen while it ran would otherwise run on in an idle sandbox after the thaw.
    _row(
        "30",
        "paused",
        "release lease_expired",
        SAME,
        lease="take_system",
        end_execs="lease_lost",
        remember="idle",
    ),
    # An exec may end while the freeze is under way, or be the first thing that ends after the thaw.
    _row(
        "30a",
        "pausing:running paused:running resuming:running",
        "exec_ended",
        SAME,
        when="others_run",
        commands="record_result",
    ),
    _row(
        "30b",
        "pausing:running paused:running resuming:running",
        "exec_ended",
        SAME,
        commands="record_result",
        remember="leased",
    ),
    _row("31", "leased idle", "snapshot fork", SAME, commands="quiesce capture"),
    _row("32", "recycling:soft", "settled", "idle", when="session_alive !tainted evidence_ok"),
    _row("33", "recycling:soft", "settled", "sanitizing"),
    _row("34", "recycling:fork", "forked", "idle", when="still_useful !tainted"),
    _row("34", "recycling:fork", "forked", "sanitizing"),
    _row(
        "35",
        "recycling",
        "failed verify_failed claim_lost",
        "sanitizing",
        taint="unknown_history",
        commands="condemn_instance",
        condemn=True,
    ),
    _row("36", "idle", "acquire", "reuse_checking", lease="take", commands="fence probe check"),
    _row("37", "reuse_checking", "verdict_reuse", "leased"),
    _row("38", "reuse_checking", "verdict_reuse_with_new_venv", SAME, commands="select_layers"),
    _row("38a", "reuse_checking", "bound", "leased"),
    _row(
        "38b",
        "reuse_checking",
        "bind_failed",
        "sanitizing",
        lease="take_system",
        commands="condemn_instance",
        condemn=True,
    ),
    _row(
        "39",
        "reuse_checking",
        "verdict_fork_clean_snapshot",
        "recycling",
        lease="take_system",
        commands="fork",
        remember="fork",
    ),
    _row("40", "reuse_checking", "verdict_new_sandbox", "idle", when="still_useful !tainted", lease="take_system"),
    _row("41", "reuse_checking", "verdict_new_sandbox probe_failed tainted", "sanitizing", lease="take_system"),
    _row("42", "reuse_checking", "lease_expired claim_lost", "idle", lease="take_system"),
    _row(
        "43",
        "idle leased",
        "hibernate",
        "hibernating",
        when="!tainted can_hibernate",
        lease="take_system",
        commands="quiesce capture",
    ),
    _row(
        "43",
        "idle",
        "idle_timeout",
        "hibernating",
        when="!tainted can_hibernate",
        lease="take_system",
        commands="quiesce capture",
    ),
    _row("44", "idle", "idle_timeout", "sanitizing", lease="take_system"),
    _row("45", "hibernating", "hibernated", "hibernated", commands="destroy_instance release_quota", condemn=True),
    _row("46", "hibernating", "hibernate_failed", "idle", when="instance_healthy", commands="thaw"),
    _row("47", "hibernating", "hibernate_failed", "lost", commands="condemn_instance", condemn=True),
    _row("48", "hibernated", "resume", "allocating", commands="reserve_quota restore_from"),
    _row("49", "hibernated", "retention_over", "sanitizing"),
    _row("50", "lost", "restore", "allocating", when="wanted", commands="restore_from"),
    _row("51", "lost", "give_up", "sanitizing"),
    _row("52", "failed", "cleanup", "sanitizing"),
    _row("53", "sanitizing", "step_failed", SAME, commands="retry_sanitize"),
    _row("54", "sanitizing", "sanitized", "terminated", when="evidence_ok"),
    _row(
        "G1",
        _LIVE,
        "destroy ttl",
        "sanitizing",
        lease="take_system",
        end_execs="sandbox_deleted",
        commands=_DESTROY,
        condemn=True,
    ),
    _row("G2", "sanitizing terminated", "destroy ttl", SAME),
    _row(
        "G3",
        "locking ready leased running paused idle reuse_checking recycling hibernating",
        "instance_gone",
        "lost",
        lease="take_system",
        end_execs="sandbox_lost",
        failure="sandbox_lost",
        commands="revoke_credentials condemn_instance",
        condemn=True,
    ),
    _row("G4", "sanitizing", "instance_gone", SAME),
    _row(
        "G5",
        _INSTANCE,
        "violation",
        "sanitizing",
        when="policy_stop",
        lease="take_system",
        taint="violation",
        end_execs="policy_denied",
        commands=_DESTROY,
        condemn=True,
    ),
    _row("G6", _INSTANCE, "violation", SAME, taint="violation"),
    _row("G6", _INSTANCE, "taint", SAME, taint="observed"),
    _row("G7", _ALL, "stale_report", SAME),
    _row("G8", _ALL, "node_unreachable node_back", SAME),
)

FLAGS = tuple(sorted({flag.lstrip("!") for row in TABLE for flag in row.when}))
EVENTS = tuple(dict.fromkeys(event for row in TABLE for event in row.events))

SYSTEM_EVENTS = frozenset(
    [
        "planning_started",
        "planner_deadline",
        "planner_failed",
        "planned",
        "refused",
        "hit",
        "miss",
        "no_capacity",
        "queue_deadline",
        "provisioned",
        "provision_failed",
        "deadline",
        "fenced",
        "bound",
        "bind_failed",
        "fence_failed",
        "idle_timeout",
        "lease_expired",
        "exec_ended",
        "kill_failed",
        "exec_timeout",
        "breaker",
        "paused",
        "pause_failed",
        "resumed",
        "resume_failed",
        "settled",
        "forked",
        "failed",
        "verify_failed",
        "claim_lost",
        "verdict_reuse",
        "verdict_reuse_with_new_venv",
        "verdict_fork_clean_snapshot",
        "verdict_new_sandbox",
        "probe_failed",
        "tainted",
        "hibernated",
        "hibernate_failed",
        "retention_over",
        "restore",
        "give_up",
        "cleanup",
        "step_failed",
        "sanitized",
        "ttl",
        "instance_gone",
        "violation",
        "taint",
        "stale_report",
        "node_unreachable",
        "node_back",
    ]
)
"""Events that need no caller: with these alone every sandbox ends."""

_INDEX: dict[tuple[str, str], tuple[Row, ...]] = {}
for _entry in TABLE:
    for _state in _entry.states:
        for _event in _entry.events:
            _INDEX[_state, _event] = (*_INDEX.get((_state, _event), ()), _entry)


def decide(
    state: str,
    event: str,
    flags: Collection[str] = (),
    *,
    remembered: str | None = None,
    history: Sequence[Any] = (),
) -> Step:
    """The step that `event` makes in `state` while `flags` hold.

    `remembered` is the sandbox's `remembered_state` (the level while `recycling`). An unknown flag is a mistake of the caller and a
    ValueError; a pair that the table does not list, or whose conditions do not hold, is `illegal_transition` with `history`.
    """
    unknown = [flag for flag in flags if flag not in FLAGS]
    if unknown:
        raise ValueError(f"unknown condition: {unknown[0]}")
    for row in (*_INDEX.get((f"{state}:{remembered}", event), ()), *_INDEX.get((state, event), ())):
        if row.applies(flags):
            return _step(row, state, event, remembered)
    raise illegal("sandbox", state, event, legal_events(state, remembered), history)


def legal_events(state: str, remembered: str | None = None) -> list[str]:
    """Events that `state` takes under some condition."""
    places = (state, f"{state}:{remembered}")
    return [event for event in EVENTS if any((place, event) in _INDEX for place in places)]


_CAUSE = {"sanitizing": "sandbox_deleted", "lost": "sandbox_lost"}
"""Why execs end that are still open when a sandbox enters a state in which none can run."""


def _step(row: Row, state: str, event: str, remembered: str | None) -> Step:
    following = {SAME: state, REMEMBERED: remembered or "idle"}.get(row.next, row.next)
    kept: str | None = None
    if row.remember is not None:
        kept = state if row.remember == SAME else row.remember
    elif following in ("pausing", "paused", "resuming") or (following == state == "recycling"):
        kept = remembered
    commands = row.commands
    entering = following == "sanitizing" and state != "sanitizing"
    if entering and _DESTROY not in commands:
        commands = (*commands, _DESTROY)  # however a sandbox comes to its end, the same work is to be done
    return Step(
        row=row.number,
        state=state,
        event=event,
        next_state=following,
        commands=commands,
        lease=row.lease,
        end_execs=row.end_execs or _CAUSE.get(following if following != state else ""),
        failure=row.failure,
        taint=row.taint,
        condemn=row.condemn or entering,
        bind=row.bind,
        remembered=kept,
        answer=row.answer,
    )


# -- for the docs --------------------------------------------------------------------------------------------------------------


def render_table() -> str:
    """The table as Markdown."""
    lines = ["| # | state | event [condition] | next | with it |", "|---|---|---|---|---|"]
    for row in TABLE:
        event = ", ".join(row.events)
        if row.when:
            event += f" [{', '.join(flag.replace('!', 'not ') for flag in row.when)}]"
        following = f"{row.next}({row.failure})" if row.failure else row.next
        if row.next == "recycling":
            following = f"recycling({row.remember})"
        effects = list(row.commands)
        if row.lease:
            effects.insert(0, {"take": "T+", "take_system": "T+ sys", "extend": "extend lease"}[row.lease])
        if row.taint:
            effects.append(f"taint({row.taint})")
        if row.end_execs:
            effects.append(f"end execs `{row.end_execs}`")
        if row.answer:
            effects.append(f"answer {row.answer}")
        states = "all" if row.states == STATES else ", ".join(row.states)
        if row.states == tuple(_LIVE.split()):
            states = "all but sanitizing, terminated"
        lines.append(f"| {row.number} | {states} | {event} | {following} | {', '.join(effects) or '-'} |")
    return "\n".join(lines) + "\n"


def render_diagram() -> str:
    """The table as a mermaid state diagram, without the rows that change no state and without G rows (they go from everywhere)."""
    edges: dict[tuple[str, str], list[str]] = {}
    for row in TABLE:
        if row.next == SAME or row.number.startswith("G"):
            continue
        for state in row.states:
            origin = state.partition(":")[0]
            targets = ("leased", "running", "idle") if row.next == REMEMBERED else (row.next,)
            for target in targets:
                names = edges.setdefault((origin, target), [])
                names += [event for event in row.events if event not in names]
    lines = ["stateDiagram-v2"]
    for (origin, target), events in edges.items():
        lines.append(f"  {'[*]' if origin == NONE else origin} --> {target}: {', '.join(events)}")
    lines.append("  terminated --> [*]")
    return "\n".join(lines) + "\n"
