import re
from pathlib import Path

import pytest

from corral.domain import execution, run
from corral.domain.execution import EXEC
from corral.domain.instance import INSTANCE, LIVE
from corral.domain.run import RUN, public_state
from corral.errors import CorralError


def walk(machine, *events):
    state = machine.initial
    for event in events:
        state = machine.decide(state, event)
    return state


def test_a_run_goes_its_way():
    assert walk(RUN, "planning_started", "planned", "placed", "started", "ended", "finish") == "finished"
    assert walk(RUN, "planning_started", "planned", "placed", "never_started", "finish") == "finished"
    assert walk(RUN, "planning_started", "finish") == "finished"


@pytest.mark.parametrize("state", run.STATES)
def test_a_cancel_is_legal_in_all_but_finished(state):
    if state == "finished":
        with pytest.raises(CorralError, match="illegal_transition"):
            RUN.decide(state, "cancel")
    else:
        assert RUN.decide(state, "cancel") == state


def test_the_contract_has_five_states_of_a_run():
    assert {public_state(state) for state in run.STATES} == {"queued", "starting", "running", "collecting", "finished"}


def test_an_exec_starts_at_most_once_and_ends_once():
    assert walk(EXEC, "exec_started", "exec_ended") == "ended"
    assert walk(EXEC, "never_started") == "never_started"
    assert walk(EXEC, "exec_started", "lost") == "lost"
    for state in EXEC.final:
        assert EXEC.events(state) == []
    assert set(EXEC.sources("lost")) == set(execution.OPEN)


def test_a_condemned_instance_is_never_bound():
    assert walk(INSTANCE, "warmed", "bind", "condemn", "destroyed") == "gone"
    assert set(INSTANCE.sources("bind")) == {"warming", "warm"}
    for state in ("condemned", "gone"):
        with pytest.raises(CorralError, match="illegal_transition"):
            INSTANCE.decide(state, "bind")
    assert INSTANCE.states - set(LIVE) == {"condemned", "gone"}


def test_an_illegal_pair_tells_the_story():
    with pytest.raises(CorralError) as caught:
        INSTANCE.decide("gone", "bind", history=["warming", {"event": "destroyed"}])
    assert caught.value.facts["history"] == ["warming", {"event": "destroyed"}]
    assert caught.value.hint == "legal here: nothing, it is over"


@pytest.mark.parametrize("machine", [RUN, EXEC, INSTANCE], ids=lambda m: m.kind)
def test_the_diagram_holds_every_edge(machine):
    text = machine.mermaid()
    for (state, event), following in machine.table.items():
        assert f"  {state} --> {following}: {event}\n" in text + "\n"


def test_the_domain_does_no_io():
    folder = Path(run.__file__).parent
    banned = re.compile(
        r"^\s*(?:import|from) (os|io|time|random|secrets|asyncio|socket|subprocess|threading|pathlib|uuid|logging)\b",
        re.M,
    )
    for path in folder.glob("*.py"):
        assert not banned.search(path.read_text("utf-8")), path.name
