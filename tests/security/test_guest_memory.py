"""Threat: an exec reads, traces, alters or starves the guest or its supervisor.

Five defences stand side by side: other uids (`uid`), the system call filter (`seccomp`), guest and supervisors that are not dumpable
(`dumpable`), a capability that they have and execs lack (`capability`), and Landlock (`landlock`, where guest and execs share a
uid). Most doors are closed by several at once, so no single switch opens them; therefore the controls go the other way round: with all
five off every door is open, and each defence put back alone closes exactly the doors that it is for.
"""

from __future__ import annotations

import pytest

from corral.testing.hostile.memory import LOOK_AT_GUEST

from .conftest import Box, Lab, landlock_abi

ALL = ("uid", "seccomp", "dumpable", "capability", "landlock")
SWITCH = {
    "uid": "unsafe_one_uid",
    "seccomp": "unsafe_no_seccomp",
    "dumpable": "unsafe_dumpable_guest",
    "landlock": "unsafe_no_landlock",
}


def layers(lab: Lab) -> list[str]:
    """The defences that exist here."""
    found = [name for name in ALL if name != "landlock" or landlock_abi() >= 6]
    return [name for name in found if name != "uid" or lab.info["capabilities"]["two_uids"]]


def opened(lab: Lab, target: str, on: str | None) -> tuple[dict[str, str], Box]:
    """What a look at the target finds with only this defence on (None: with none)."""
    off = [SWITCH[name] for name in ALL if name in SWITCH and name != on]
    if not lab.info["capabilities"]["two_uids"]:
        off = [name for name in off if name != "unsafe_one_uid"]
    # With two uids the guest needs its capabilities to change to the other: then they are not what is being switched.
    without = on not in ("capability", "uid")
    with lab.box(*off, without_capability=without) as box:
        answers = box.ask(LOOK_AT_GUEST, target)
        assert box.works()
        return answers, box


@pytest.mark.parametrize("target", ["guest", "supervisor"])
def test_nothing_of_the_guest_or_a_supervisor_can_be_read_traced_or_altered(box: Box, target: str) -> None:
    answers = box.ask(LOOK_AT_GUEST, target)
    assert {name for name, answer in answers.items() if answer == "ok"} == set(), answers
    assert box.works()


@pytest.mark.parametrize("target", ["guest", "supervisor"])
def test_the_same_holds_with_one_uid_for_both(lab: Lab, target: str) -> None:
    if not lab.info["capabilities"]["two_uids"]:
        pytest.skip("the sandboxes of this mode have one uid anyway: the check above is this one")
    with lab.box("unsafe_one_uid") as box:
        answers = box.ask(LOOK_AT_GUEST, target)
        assert {name for name, answer in answers.items() if answer == "ok"} == set(), answers
        assert box.works()


# Doors that a defence closes when it is the only one; whatever is not named stays open under it.
_LOOKS = {
    "environ",
    "maps",
    "smaps",
    "auxv",
    "root",
    "cwd",
    "list fd",
    "list map_files",
    "exe",
    "namespace",
    "follow fd",
}
_LOOKS |= {"read memory", "write memory", "pagemap", "io", "personality", "stack", "syscall"}
_CALLS = {"ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "process_madvise"}
_RANK = {"affinity", "scheduler", "priority"}
_ROOT_ONLY = {"stack", "process_madvise"}
"""Closed to everybody who is not root of the host, whatever we do."""
CLOSES = {
    "uid": _LOOKS | _CALLS | _RANK | {"prlimit", "oom_score_adj"},
    "seccomp": _CALLS | {"prlimit"},
    "dumpable": _LOOKS | _CALLS | {"oom_score_adj"},
    "capability": (_LOOKS | _CALLS | _RANK) - {"list fd"},
    "landlock": (_LOOKS | _CALLS) - {"list fd"},
}


@pytest.mark.parametrize("target", ["guest", "supervisor"])
def test_control_with_every_defence_off_the_doors_are_open(lab: Lab, target: str) -> None:
    answers, _ = opened(lab, target, None)
    shut = {name for name, answer in answers.items() if answer != "ok"}
    assert shut <= _ROOT_ONLY, {name: answers[name] for name in shut}


@pytest.mark.parametrize("defence", ALL)
def test_control_each_defence_alone_closes_its_own_doors_and_no_others(lab: Lab, defence: str) -> None:
    if defence not in layers(lab):
        pytest.skip(f"{defence} is no defence of this mode on this kernel")
    bare, _ = opened(lab, "guest", None)
    answers, box = opened(lab, "guest", defence)
    assert box.same_uid == (defence != "uid")
    open_before = {name for name, answer in bare.items() if answer == "ok"}
    closed = {name for name in open_before if answers[name] != "ok"}
    assert closed == CLOSES[defence] & open_before, answers
