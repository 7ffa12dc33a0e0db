import re

import pytest

from corral.domain import sandbox
from corral.domain.sandbox import NONE, STATES, TABLE, decide
from corral.errors import CorralError


@pytest.mark.parametrize(
    "state, event, flags, following, row",
    [
        (NONE, "create", "", "requested", "1"),
        ("requested", "planning_started", "", "planning", "2"),
        ("planning", "planner_failed", "", "planning", "2a"),
        ("planning", "planned", "", "allocating", "3"),
        ("planning", "refused", "", "failed", "4"),
        ("allocating", "hit", "", "locking", "5"),
        ("allocating", "miss", "", "provisioning", "6"),
        ("allocating", "no_capacity", "before_queue_deadline", "allocating", "7"),
        ("allocating", "queue_deadline", "", "failed", "8"),
        ("provisioning", "provisioned", "", "locking", "9"),
        ("provisioning", "deadline", "attempts_left retryable", "allocating", "10"),
        ("provisioning", "provision_failed", "attempts_left", "failed", "11"),
        ("locking", "fenced", "", "locking", "12"),
        ("locking", "bound", "", "ready", "12a"),
        ("locking", "bind_failed", "attempts_left", "allocating", "13"),
        ("locking", "fence_failed", "", "failed", "14"),
        ("ready", "acquire", "creator", "leased", "15"),
        ("ready", "idle_timeout", "", "idle", "16"),
        ("leased", "exec_requested", "", "running", "17"),
        ("paused", "renew", "", "paused", "18"),
        ("leased", "release", "", "recycling", "19"),
        ("running", "exec_requested", "", "running", "20"),
        ("running", "kill_failed", "", "sanitizing", "20a"),
        ("leased", "acquire", "other_owner", "leased", "20b"),
        ("resuming", "acquire", "", "resuming", "20c"),
        ("running", "exec_ended", "others_run owner_system", "running", "21"),
        ("running", "exec_ended", "", "leased", "22"),
        ("running", "exec_timeout", "", "running", "23"),
        ("running", "release", "detached_execs", "running", "24"),
        ("running", "lease_expired", "", "recycling", "25"),
        ("running", "acquire", "owner_system same_session other_owner", "running", "26"),
        ("running", "acquire", "owner_system other_owner", "running", "20b"),
        ("running", "exec_ended", "owner_system", "recycling", "27"),
        ("idle", "pause", "can_pause", "pausing", "28"),
        ("pausing", "paused", "", "paused", "28a"),
        ("paused", "resume", "", "resuming", "29"),
        ("resuming", "resume_failed", "", "lost", "29b"),
        ("paused", "release", "", "paused", "30"),
        ("leased", "fork", "", "leased", "31"),
        ("idle", "acquire", "", "reuse_checking", "36"),
        ("reuse_checking", "verdict_reuse", "", "leased", "37"),
        ("reuse_checking", "verdict_reuse_with_new_venv", "", "reuse_checking", "38"),
        ("reuse_checking", "bound", "", "leased", "38a"),
        ("reuse_checking", "bind_failed", "", "sanitizing", "38b"),
        ("reuse_checking", "verdict_fork_clean_snapshot", "", "recycling", "39"),
        ("reuse_checking", "verdict_new_sandbox", "still_useful", "idle", "40"),
        ("reuse_checking", "verdict_new_sandbox", "", "sanitizing", "41"),
        ("reuse_checking", "lease_expired", "", "idle", "42"),
        ("leased", "hibernate", "can_hibernate", "hibernating", "43"),
        ("idle", "idle_timeout", "can_hibernate", "hibernating", "43"),
        ("idle", "idle_timeout", "can_hibernate tainted", "sanitizing", "44"),
        ("hibernating", "hibernated", "", "hibernated", "45"),
        ("hibernating", "hibernate_failed", "instance_healthy", "idle", "46"),
        ("hibernating", "hibernate_failed", "", "lost", "47"),
        ("hibernated", "resume", "", "allocating", "48"),
        ("hibernated", "retention_over", "", "sanitizing", "49"),
        ("lost", "restore", "wanted", "allocating", "50"),
        ("lost", "give_up", "", "sanitizing", "51"),
        ("failed", "cleanup", "", "sanitizing", "52"),
        ("sanitizing", "step_failed", "", "sanitizing", "53"),
        ("sanitizing", "sanitized", "evidence_ok", "terminated", "54"),
        ("terminated", "destroy", "", "terminated", "G2"),
        ("sanitizing", "instance_gone", "", "sanitizing", "G4"),
        ("leased", "violation", "policy_stop", "sanitizing", "G5"),
        ("leased", "violation", "", "leased", "G6"),
        ("terminated", "stale_report", "", "terminated", "G7"),
        ("running", "node_unreachable", "", "running", "G8"),
    ],
)  # fmt: skip
def test_each_row_of_the_table(state, event, flags, following, row):
    step = decide(state, event, flags.split())
    assert (step.next_state, step.row) == (following, row)


@pytest.mark.parametrize(
    "remembered, event, flags, following, row",
    [
        ("soft", "settled", "session_alive evidence_ok", "idle", "32"),
        ("soft", "settled", "session_alive evidence_ok tainted", "sanitizing", "33"),
        ("soft", "settled", "session_alive", "sanitizing", "33"),
        ("fork", "forked", "still_useful", "idle", "34"),
        ("fork", "forked", "", "sanitizing", "34"),
        ("soft", "verify_failed", "", "sanitizing", "35"),
        ("fork", "failed", "", "sanitizing", "35"),
    ],
)
def test_recycling_goes_by_its_level(remembered, event, flags, following, row):
    step = decide("recycling", event, flags.split(), remembered=remembered)
    assert (step.next_state, step.row, step.remembered) == (following, row, None)


def test_the_levels_of_recycling_take_their_own_events_only():
    for remembered, event in (("soft", "forked"), ("fork", "settled"), (None, "settled")):
        with pytest.raises(CorralError, match="illegal_transition"):
            decide("recycling", event, remembered=remembered)


def test_pause_goes_back_to_where_it_came_from():
    for origin in ("leased", "running", "idle"):
        step = decide(origin, "pause", {"can_pause"})
        assert (step.next_state, step.remembered) == ("pausing", origin)
        assert decide("pausing", "pause_failed", remembered=origin).next_state == origin
        assert decide("pausing", "paused", remembered=origin).remembered == origin
        assert decide("paused", "resume", remembered=origin).remembered == origin
        step = decide("resuming", "resumed", remembered=origin)
        assert (step.next_state, step.remembered) == (origin, None)
        released = decide("paused", "lease_expired", remembered=origin)
        assert (released.next_state, released.remembered, released.lease) == ("paused", "idle", "take_system")


def test_the_last_exec_that_ends_while_paused_changes_what_the_sandbox_goes_back_to():
    for state in ("pausing", "paused", "resuming"):
        step = decide(state, "exec_ended", remembered="running")
        assert (step.next_state, step.remembered, step.row) == (state, "leased", "30b")
        step = decide(state, "exec_ended", {"others_run"}, remembered="running")
        assert (step.next_state, step.remembered, step.row) == (state, "running", "30a")


def test_who_changes_the_owner_takes_the_next_token():
    assert decide("provisioning", "provisioned").lease == "take"
    assert decide("ready", "acquire", {"creator"}).lease == "extend"
    assert decide("ready", "acquire").lease == "take"
    assert decide("idle", "acquire").lease == "take"
    assert decide("leased", "release").lease == "take_system"
    assert decide("leased", "renew").lease == "extend"
    assert decide("leased", "acquire", {"other_owner"}).lease is None


@pytest.mark.parametrize("state", [s for s in STATES if s not in ("sanitizing", "terminated")])
def test_destroy_wins_everywhere(state):
    step = decide(state, "destroy")
    assert (step.next_state, step.row, step.lease, step.end_execs) == (
        "sanitizing",
        "G1",
        "take_system",
        "sandbox_deleted",
    )
    assert step.commands == ("destroy",) and step.condemn


@pytest.mark.parametrize("row", [r for r in TABLE if r.next == "sanitizing"], ids=lambda r: r.number)
def test_whatever_ends_a_sandbox_has_it_destroyed_once(row):
    place = row.states[0]
    state, _, level = place.partition(":")
    step = decide(state, row.events[0], [f for f in row.when if not f.startswith("!")], remembered=level or None)
    assert step.commands.count("destroy") == 1 and step.condemn and step.end_execs


def test_a_lost_instance_ends_its_execs_and_is_condemned():
    step = decide("running", "instance_gone")
    assert (step.next_state, step.end_execs, step.condemn, step.lease) == ("lost", "sandbox_lost", True, "take_system")
    assert decide("resuming", "resume_failed").end_execs == "sandbox_lost"


def test_an_illegal_pair_raises_with_the_history():
    with pytest.raises(CorralError) as caught:
        decide("terminated", "acquire", history=["requested", "planning"])
    assert caught.value.code == "illegal_transition"
    assert caught.value.facts == {"state": "terminated", "event": "acquire", "history": ["requested", "planning"]}
    assert "destroy" in caught.value.hint


def test_a_condition_that_does_not_hold_is_illegal_too():
    for state, event in (("sanitizing", "sanitized"), ("leased", "pause"), ("lost", "restore"), ("leased", "acquire")):
        with pytest.raises(CorralError, match="illegal_transition"):
            decide(state, event)
    with pytest.raises(CorralError, match="illegal_transition"):
        decide("leased", "renew", {"expired"})


def test_a_condition_that_nobody_knows_is_a_mistake():
    with pytest.raises(ValueError, match="evidence_okay"):
        decide("sanitizing", "sanitized", {"evidence_okay"})


def test_the_rendered_table_has_every_row_and_the_diagram_every_edge():
    table = sandbox.render_table()
    for row in TABLE:
        assert re.search(rf"^\| {row.number} \| .*{row.events[0]}", table, re.M), row.number
    assert (
        "| G1 | all but sanitizing, terminated | destroy, ttl | sanitizing | T+ sys, destroy, end execs `sandbox_deleted` |"
        in table
    )
    diagram = sandbox.render_diagram()
    assert "  [*] --> requested: create\n" in diagram and "  sanitizing --> terminated: sanitized\n" in diagram
    assert set(re.findall(r"^  (\w+) -->", diagram, re.M)) == set(STATES)


def test_the_words_of_the_table_are_consistent():
    for row in TABLE:
        for place in row.states:
            assert place == NONE or place.partition(":")[0] in STATES
        assert row.next in (*STATES, sandbox.SAME, sandbox.REMEMBERED)
    assert set(sandbox.EVENTS) >= sandbox.SYSTEM_EVENTS
