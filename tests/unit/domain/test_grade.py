"""Grades: each letter has its rule, its reason and a way up."""

import dataclasses

from corral.domain.grade import LETTERS, Check, Grade, at_least, grade_host, grade_runtime, worse
from corral.domain.limits import LimitModes

HELD = LimitModes(memory="enforced", pids="enforced", disk="enforced", inodes="enforced", tmp="enforced")
FINE = [Check("seccomp filter", "must", True, "works"), Check("swap", "may", True, "none")]


def test_a_host_is_as_good_as_its_worst_missing_check() -> None:
    assert grade_host(FINE).letter == "A"
    for kind, letter in (("may", "B"), ("should", "C"), ("must", "D")):
        missing = Check("thing", kind, False, "absent", "mend it")  # type: ignore[arg-type]
        grade = grade_host([*FINE, Check("other", "may", False, "x"), missing])
        assert grade.letter == letter and (letter == "B" or grade.hint == "mend it")
        assert "thing" in grade.reason
    assert grade_host([*FINE, Check("thing", "must", None, "cannot be told")]).letter == "A", "unknown costs nothing"


def test_a_runtime_is_graded_by_what_it_is_and_by_what_the_host_lacks() -> None:
    two = {"two_uids": True}
    assert grade_runtime(True, None, 2, two, HELD, FINE).letter == "A"
    assert grade_runtime(True, None, 1, two, HELD, FINE).letter == "B"
    assert grade_runtime(True, None, 1, {}, HELD, FINE).letter == "C"
    assert grade_runtime(True, None, 0, two, HELD, FINE).letter == "C"
    watched = grade_runtime(True, None, 2, two, dataclasses.replace(HELD, disk="watched"), FINE)
    assert watched.letter == "C" and "disk" in watched.reason and watched.hint
    assert grade_runtime(False, "not installed", 2, two, HELD, FINE).letter == "D"
    broken = [Check("seccomp filter", "must", False, "does not work", "another kernel")]
    assert grade_runtime(True, None, 2, two, HELD, broken).letter == "D"


def test_a_defence_that_is_switched_off_costs_the_grade() -> None:
    def graded(level: int, *unsafe: str) -> Grade:
        return grade_runtime(True, None, level, {"two_uids": True}, HELD, FINE, frozenset(unsafe))

    for level in (1, 2):
        assert graded(level, "unsafe_no_seccomp", "unsafe_one_uid").letter == "D"
        one = graded(level, "unsafe_no_landlock")
        assert one.letter == "C" and "unsafe_no_landlock" in one.reason and "CORRAL_UNSAFE" in str(one.hint)


def test_the_opt_out_of_the_guard_is_no_defence_of_a_sandbox() -> None:
    assert grade_runtime(True, None, 2, {"two_uids": True}, HELD, FINE, {"unsafe_any_grade"}).letter == "A"


def test_letters_are_ordered() -> None:
    assert worse("B", "C") == worse("C", "B") == "C"
    assert [at_least(letter, "B") for letter in LETTERS] == [True, True, False, False]
