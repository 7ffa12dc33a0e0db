"""Threat: an exec uses a door of the kernel that needs no bug to be more than a program should have.

Each door is tried in four places: in an exec as it is (shut); with the system call filter off (`filter`: that alone opens it); with the
filter off and inside a user namespace of one's own, which only the filter forbids (`namespace`); and as a plain child of root on the host
(`host`: shut twice, by the filter and by missing privilege, so no single switch opens it). What would do harm on the host is asked for
with arguments that cannot work: an errno that comes after the check of privilege shows that the door is open.
"""

from __future__ import annotations

import pytest

from corral.testing.hostile.doors import DOORS, SHUT, opened

from .conftest import ROOT, Box, Lab
from .probes import AS_USER, on_the_host


@pytest.fixture(scope="session")
def doors() -> dict[str, list[str]]:
    names: dict[str, list[str]] = on_the_host(DOORS, "names", **(AS_USER if ROOT else {}))
    return names


def test_every_door_is_shut(box: Box) -> None:
    answers = box.ask(DOORS, "exec")
    # One id inside: there is no other to become, which is EINVAL.
    allowed = {"setuid 0", "setgid 0"} if box.same_uid else set()
    assert opened(answers) <= allowed, {name: answers[name] for name in opened(answers) - allowed}
    strange = {name: answer for name, answer in answers.items() if answer not in SHUT and name not in allowed}
    assert not strange, "an answer that says neither yes nor no shows nothing"
    assert box.works()


def test_every_door_is_shut_behind_a_user_namespace_too(box: Box) -> None:
    answers = box.ask(DOORS, "namespace")
    assert set(answers.values()) == {"EPERM"}, answers


def test_control_the_filter_alone_keeps_these_shut(lab: Lab, doors: dict[str, list[str]]) -> None:
    with lab.box("unsafe_no_seccomp") as box:
        answers = box.ask(DOORS, "exec")
        missing = _not_in_this_kernel()
        shut = set(doors["filter"]) - opened(answers) - missing
        assert not shut, {name: answers[name] for name in shut}
        both = opened(answers) & set(doors["host"])
        assert not both, {"shut without the filter too": {name: answers[name] for name in both}}


def test_control_the_filter_keeps_these_shut_by_forbidding_user_namespaces(
    lab: Lab, doors: dict[str, list[str]]
) -> None:
    with lab.box("unsafe_no_seccomp") as box:
        answers = box.ask(DOORS, "namespace")
        shut = set(doors["namespace"]) - opened(answers) - _not_in_this_kernel()
        assert not shut, {name: answers[name] for name in shut}


@pytest.mark.root
def test_control_root_of_the_host_finds_these_open(doors: dict[str, list[str]]) -> None:
    answers = on_the_host(DOORS, "root")
    shut = {name for name in doors["host"] if name not in opened(answers) and answers[name] != "ENOSYS"}
    assert not shut, {name: answers[name] for name in shut}


def _not_in_this_kernel() -> set[str]:
    """What an ordinary user of the host, unfiltered, is told does not exist or was switched off for everybody."""
    answers = on_the_host(DOORS, "user", **(AS_USER if ROOT else {}))
    return {name for name, answer in answers.items() if answer in {"ENOSYS", "EAFNOSUPPORT", "ENODEV"}} | {
        name for name in ("io_uring_setup",) if answers[name] == "EPERM"
    }
