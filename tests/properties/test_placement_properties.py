"""Placement by what runtimes hold: nothing weaker than asked for, and nothing refused that is enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from corral.domain.grade import LETTERS, Check, Grade, at_least, grade_runtime
from corral.domain.limits import LIMIT_NAMES, LimitModes
from corral.domain.placement import NEVER_BY_DEFAULT, Needs, PlacementChoice, RuntimeFacts, choose
from corral.errors import CorralError

letters = st.sampled_from(LETTERS)
modes = st.builds(LimitModes, **{name: st.sampled_from(["enforced", "watched", "absent"]) for name in LIMIT_NAMES})
facts = st.builds(
    RuntimeFacts,
    name=st.sampled_from(["bubblewrap", "crun", "fake", "runc", "runsc", "vm"]),
    usable=st.booleans(),
    reason=st.none(),
    security_level=st.integers(0, 3),
    start_ms=st.none() | st.floats(0, 5000),
    modes=modes,
    grade=st.builds(Grade, letters, st.just("why")),
)
hosts = st.lists(facts, max_size=5, unique_by=lambda fact: fact.name)
needs = st.builds(
    Needs,
    isolation=st.sampled_from(["standard", "strong"]),
    level=st.integers(0, 3),
    grade=letters,
    enforced=st.frozensets(st.sampled_from(LIMIT_NAMES), max_size=3),
)


def enough(fact: RuntimeFacts, wanted: Needs) -> bool:
    return (
        fact.usable
        and fact.security_level >= wanted.level
        and at_least(fact.grade.letter, wanted.grade)
        and all(getattr(fact.modes, name) == "enforced" for name in wanted.enforced)
    )


def chosen(host: list[RuntimeFacts], wanted: Needs, **more: Any) -> PlacementChoice | None:
    try:
        return choose(host, needs=wanted, **more)
    except CorralError as error:
        assert error.hint
        assert error.code in ("isolation_unavailable", "runtime_unavailable")
        return None


@given(hosts, needs)
def test_what_is_taken_is_enough_and_what_is_enough_is_taken(host: list[RuntimeFacts], wanted: Needs) -> None:
    made = chosen(host, wanted)
    fitting = {fact.name for fact in host if enough(fact, wanted) and fact.name not in NEVER_BY_DEFAULT}
    assert (made is None) == (not fitting)
    if made is not None:
        assert made.runtime in fitting and made.let_through is None
        assert {item.name for item in made.considered if item.rejected is None} == fitting
        assert f"grade {made.grade.letter}" in made.reason


@given(hosts, needs)
def test_a_runtime_asked_for_by_name_is_held_to_the_same(host: list[RuntimeFacts], wanted: Needs) -> None:
    for fact in host:
        made = chosen(host, wanted, wanted_runtime=fact.name)
        assert (made is not None) == enough(fact, wanted)
        assert made is None or made.runtime == fact.name


@given(hosts, needs)
def test_the_code_says_whether_less_isolation_would_do(host: list[RuntimeFacts], wanted: Needs) -> None:
    try:
        choose(host, needs=wanted)
    except CorralError as error:
        assert (error.code == "isolation_unavailable") == (chosen(host, Needs()) is not None)


@given(hosts, needs)
def test_the_opt_out_of_grades_forgives_the_grade_alone_and_is_told(host: list[RuntimeFacts], wanted: Needs) -> None:
    made = chosen(host, wanted, any_grade=True)
    anyhow = chosen(host, replace(wanted, grade="D"))
    assert (made is None) == (anyhow is None)
    if made is not None and anyhow is not None:
        assert made.runtime == anyhow.runtime
        assert (made.let_through is None) == at_least(made.grade.letter, wanted.grade)
        assert made.let_through is None or "unsafe_any_grade" in made.reason


@given(hosts, needs, st.randoms(use_true_random=False))
def test_the_order_of_what_is_known_does_not_matter(host: list[RuntimeFacts], wanted: Needs, rng: Any) -> None:
    other = list(host)
    rng.shuffle(other)
    assert chosen(other, wanted) == chosen(host, wanted)


checks = st.lists(
    st.builds(
        Check,
        name=st.text(min_size=1, max_size=4),
        kind=st.sampled_from(["must", "should", "may"]),
        ok=st.sampled_from([True, False, None]),
        seen=st.just("seen"),
        hint=st.just("mend it"),
    ),
    max_size=4,
)
defences = st.frozensets(
    st.sampled_from(["unsafe_no_seccomp", "unsafe_one_uid", "unsafe_dumpable_guest", "unsafe_no_landlock"])
)


@given(st.booleans(), st.integers(0, 3), st.booleans(), modes, checks, defences, defences)
def test_a_grade_never_rises_by_what_is_taken_away(
    usable: bool, level: int, two: bool, held: LimitModes, host: list[Check], off: frozenset[str], more: frozenset[str]
) -> None:
    def graded(**changes: Any) -> Grade:
        given = {"usable": usable, "level": level, "two": two, "held": held, "host": host, "off": off, **changes}
        capabilities = {"two_uids": given["two"]}
        return grade_runtime(
            given["usable"], None, given["level"], capabilities, given["held"], given["host"], given["off"]
        )

    best = graded()
    assert (best.hint is None) == (best.letter == "A")
    lessened = [
        graded(usable=False),
        graded(level=max(0, level - 1)),
        graded(two=False),
        graded(off=off | more),
        graded(host=[*host, Check("another", "must", False, "absent", "mend it")]),
        *(graded(held=replace(held, **{name: "watched"})) for name in LIMIT_NAMES),
    ]
    assert all(at_least(best.letter, less.letter) for less in lessened)
