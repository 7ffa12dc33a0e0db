import pytest

from corral.domain.limits import LimitModes
from corral.domain.placement import RuntimeFacts, choose
from corral.errors import CorralError

BWRAP = RuntimeFacts("bubblewrap", True, None, 1, 25.0)
CRUN = RuntimeFacts("crun", True, None, 1, 45.0, LimitModes(memory="enforced"))
RUNSC = RuntimeFacts("runsc", True, None, 2, 340.0)
VM = RuntimeFacts("vm", True, None, 3, 4000.0)
PLAIN = RuntimeFacts("bubblewrap", True, None, 0, 20.0)
BROKEN = RuntimeFacts("crun", False, "no cgroups", 1, 10.0)
FAKE = RuntimeFacts("fake", True, None, 0, 0.1)


@pytest.mark.parametrize(
    "facts, more, taken",
    [
        ([BWRAP, CRUN, RUNSC, FAKE], {}, "bubblewrap"),
        ([CRUN, RUNSC], {"isolation": "standard"}, "crun"),
        ([BROKEN, PLAIN], {}, "bubblewrap"),
        ([PLAIN, RUNSC, VM], {}, "vm"),
        ([BWRAP, RUNSC, VM], {"isolation": "strong"}, "runsc"),
        ([BWRAP, VM], {"floor": 2}, "vm"),
        ([BWRAP, CRUN], {"wanted_runtime": "crun"}, "crun"),
        ([BWRAP, FAKE], {"wanted_runtime": "fake"}, "fake"),
        ([BWRAP, CRUN], {"require_enforced": ["memory"]}, "crun"),
        ([RuntimeFacts("b", True, None, 1), RuntimeFacts("a", True, None, 1)], {}, "a"),
    ],
)
def test_the_runtime_that_is_taken(facts, more, taken):
    made = choose(facts, **more)
    assert made.runtime == taken and made.reason
    assert {item.name for item in made.considered} == {fact.name for fact in facts}
    assert [item.rejected for item in made.considered if item.name == taken] == [None]


@pytest.mark.parametrize(
    "facts, more, code",
    [
        ([], {}, "runtime_unavailable"),
        ([FAKE], {}, "runtime_unavailable"),
        ([BROKEN], {}, "runtime_unavailable"),
        ([BROKEN, BWRAP], {"wanted_runtime": "crun"}, "runtime_unavailable"),
        ([BWRAP], {"isolation": "strong"}, "runtime_unavailable"),
        ([BWRAP], {"isolation": "strong", "wanted_runtime": "bubblewrap"}, "runtime_unavailable"),
        ([PLAIN], {"floor": 1}, "runtime_unavailable"),
        ([BWRAP], {"require_enforced": ["memory"]}, "runtime_unavailable"),
        ([BWRAP], {"wanted_runtime": "runsc"}, "not_supported_yet"),
        ([BWRAP], {"wanted_runtime": "docker"}, "invalid_value"),
    ],
)
def test_never_another_than_was_asked_for(facts, more, code):
    with pytest.raises(CorralError) as caught:
        choose(facts, **more)
    assert caught.value.code == code and caught.value.hint


def test_a_refusal_says_what_each_runtime_lacks():
    with pytest.raises(CorralError) as caught:
        choose([BROKEN, BWRAP, FAKE], isolation="strong")
    assert "no cgroups" in caught.value.detail and "level 1" in caught.value.detail
