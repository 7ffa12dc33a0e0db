from dataclasses import replace

import pytest

from corral.domain.grade import Grade
from corral.domain.limits import LimitModes
from corral.domain.placement import Needs, RuntimeFacts, choose
from corral.errors import CorralError

BWRAP = RuntimeFacts("bubblewrap", True, None, 1, 25.0)
CRUN = RuntimeFacts("crun", True, None, 1, 45.0, LimitModes(memory="enforced"))
RUNSC = RuntimeFacts("runsc", True, None, 2, 340.0)
VM = RuntimeFacts("vm", True, None, 3, 4000.0)
PLAIN = RuntimeFacts("bubblewrap", True, None, 0, 20.0)
BROKEN = RuntimeFacts("crun", False, "no cgroups", 1, 10.0)
FAKE = RuntimeFacts("fake", True, None, 0, 0.1)
STRONG = Needs("strong", level=2)


@pytest.mark.parametrize(
    "facts, more, taken",
    [
        ([BWRAP, CRUN, RUNSC, FAKE], {}, "bubblewrap"),
        ([CRUN, RUNSC], {"needs": Needs("standard")}, "crun"),
        ([BROKEN, PLAIN], {}, "bubblewrap"),
        ([PLAIN, RUNSC, VM], {}, "vm"),
        ([BWRAP, RUNSC, VM], {"needs": STRONG}, "runsc"),
        ([BWRAP, VM], {"needs": Needs(level=2)}, "vm"),
        ([BWRAP, CRUN], {"wanted_runtime": "crun"}, "crun"),
        ([BWRAP, FAKE], {"wanted_runtime": "fake"}, "fake"),
        ([BWRAP, CRUN], {"needs": Needs(enforced=frozenset({"memory"}))}, "crun"),
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
        ([BWRAP], {"needs": STRONG}, "isolation_unavailable"),
        ([BWRAP], {"needs": STRONG, "wanted_runtime": "bubblewrap"}, "isolation_unavailable"),
        ([PLAIN], {"needs": Needs(level=1)}, "isolation_unavailable"),
        ([BWRAP], {"needs": Needs(enforced=frozenset({"memory"}))}, "isolation_unavailable"),
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
        choose([BROKEN, BWRAP, FAKE], needs=STRONG)
    assert "no cgroups" in caught.value.detail and "level 1" in caught.value.detail


GOOD, FAIR, POOR, NONE = (Grade(letter, f"why {letter}", "mend it") for letter in "ABCD")
NEEDS_C = Needs(grade="C")


def graded(fact, grade):
    return replace(fact, grade=grade)


def test_a_runtime_that_is_not_graded_well_enough_is_passed_over():
    made = choose([graded(BWRAP, NONE), graded(CRUN, FAIR)], needs=NEEDS_C)
    assert made.runtime == "crun" and made.grade is FAIR and "grade B" in made.reason and made.let_through is None
    passed = {item.name: item.rejected for item in made.considered}
    assert passed == {"bubblewrap": "is of grade D (why D), isolation standard needs C", "crun": None}
    assert made.as_dict()["grade"] == "B"


def test_what_is_not_graded_has_the_lowest():
    with pytest.raises(CorralError):
        choose([BWRAP], needs=NEEDS_C)


@pytest.mark.parametrize("wanted", [None, "runsc"])
def test_strong_is_refused_where_the_kernel_is_its_own_and_the_rest_does_not_suffice(wanted):
    with pytest.raises(CorralError) as caught:
        choose([graded(RUNSC, POOR), graded(BWRAP, FAIR)], wanted, Needs("strong", level=2, grade="A"))
    assert (
        caught.value.code == "isolation_unavailable"
        and "grade C (why C), isolation strong needs A" in caught.value.detail
    )
    assert "doctor --security" in caught.value.hint and not caught.value.retryable


def test_a_low_grade_is_let_through_by_name_only_and_says_so():
    with pytest.raises(CorralError) as caught:
        choose([graded(BWRAP, NONE)], needs=NEEDS_C)
    assert caught.value.code == "isolation_unavailable" and "CORRAL_UNSAFE=unsafe_any_grade" in caught.value.hint
    made = choose([graded(BWRAP, NONE)], needs=NEEDS_C, any_grade=True)
    assert made.let_through == "is of grade D (why D), isolation standard needs C: let through by unsafe_any_grade"
    assert made.let_through in made.reason


def test_the_opt_out_of_grades_opts_out_of_nothing_else():
    needs = Needs("strong", level=2, grade="A", enforced=frozenset({"memory"}))
    for fact in (graded(BWRAP, GOOD), graded(RUNSC, GOOD), graded(BROKEN, GOOD)):
        with pytest.raises(CorralError):
            choose([fact], needs=needs, any_grade=True)


def test_needs_survive_being_stored_and_read_as_words():
    needs = Needs("strong", 2, "A", frozenset({"pids", "memory"}))
    assert Needs.from_dict(needs.as_dict()) == needs
    assert needs.words == "isolation strong takes grade A or better, level 2 or more, memory, pids held by the kernel"
    assert Needs().words == "isolation standard takes any runtime"
