"""Threat: a process of a sandbox is somebody on the host, shares that with another sandbox, or has rights that a program should not have."""

from __future__ import annotations

import os

import pytest

from corral.testing.certify.bench import status_of
from corral.testing.hostile.identity import GUEST_CAPABILITIES, STATUS

from .conftest import ROOT, Box, Lab
from .probes import AS_USER, on_the_host


def test_an_exec_has_no_capability_and_no_way_to_one(box: Box) -> None:
    told = box.ask(STATUS)
    for kind in ("CapPrm", "CapEff", "CapAmb", "CapInh"):
        assert int(told[kind][0], 16) == 0, (kind, told)
    # What this holds is the guest's (taking it off the bounding set needs SETPCAP); with no_new_privs it gives nothing.
    assert int(told["CapBnd"][0], 16) & ~GUEST_CAPABILITIES == 0, told
    assert told["NoNewPrivs"] == ["1"] and told["Seccomp"] == ["2"], told
    assert told["Uid"] == told["Gid"] == [str(box.exec_uid)] * 4, told
    assert set(told["Groups"]) <= {str(box.exec_uid), "65534"}, told


def test_the_same_holds_for_a_terminal_and_after_a_login_shell(box: Box) -> None:
    for spec in ({"pty": [24, 80]}, {"stdin": b"x"}, {"background": "keep"}):
        told = box.ask(STATUS, **spec)
        assert int(told["CapEff"][0], 16) == 0 and told["NoNewPrivs"] == ["1"] and told["Seccomp"] == ["2"], (
            spec,
            told,
        )


def test_control_the_guest_has_capabilities_and_the_filter_can_be_off(lab: Lab) -> None:
    """The same look at PID 1, from the host, and at an exec with the filter off."""
    with lab.box() as box:
        guest = status_of(box.guest_pid())
        expected = 1 << 5 if box.same_uid else GUEST_CAPABILITIES
        assert int(guest["CapEff"], 16) == expected, guest
        assert int(guest["CapAmb"], 16) == 0 or not box.same_uid, guest
    with lab.box("unsafe_no_seccomp") as box:
        assert box.ask(STATUS)["Seccomp"] == ["0"]


@pytest.mark.root
def test_control_a_plain_child_of_root_has_all(lab: Lab) -> None:
    told = on_the_host(STATUS)
    assert int(told["CapEff"][0], 16) != 0 and told["NoNewPrivs"] == ["0"] and told["Uid"][0] == "0", told


def test_every_process_is_seen_as_somebody_else_on_the_host(lab: Lab) -> None:
    """Where the host can give another uid it does; where not (an ordinary user), that is what is declared."""
    with lab.box() as box:
        exec_id = box.start("/bin/sleep", "1000")
        terminal = box.start("/bin/sleep", "1000", pty=[24, 80])
        seen = {pid: status_of(pid) for pid in box.pids()}
        assert len(seen) >= 5, "guest, two supervisors, two programs"
        uids = {int(uid) for one in seen.values() for uid in one["Uid"].split()}
        gids = {int(gid) for one in seen.values() for gid in one["Gid"].split()}
        assert 0 not in uids and 0 not in gids
        if lab.info["security_level"] >= 1:
            assert lab.uid not in uids and os.getuid() not in uids, uids
            assert min(uids) >= 65536 and min(gids) >= 65536, "ids of nobody else"
            groups = {int(group) for one in seen.values() for group in one["Groups"].split()}
            assert all(group >= 65536 for group in groups), groups
        else:
            assert uids == {lab.uid} and lab.info["capabilities"]["two_uids"] is False
        if lab.info["capabilities"]["two_uids"]:
            guest = status_of(box.guest_pid())["Uid"].split()[0]
            programs = [one for one in seen.values() if one["Name"] in ("sleep", "busybox")]
            assert len(programs) == 2 and all(one["Uid"].split()[0] != guest for one in programs), programs
        for one in (exec_id, terminal):
            lab.call("end", exec_id=one, why="cancelled")


def test_files_of_a_sandbox_belong_to_its_own_ids_on_the_host(box: Box) -> None:
    box.sh("mkdir /workspace/d; echo x > /workspace/d/f; echo y > /home/sandbox/f; echo z > /var/tmp/f")
    for path in ("workspace/d", "workspace/d/f", "home/f", "var_tmp/f"):
        seen = os.stat(box.tree / path)
        if box.security_level == 0:
            assert seen.st_uid == box.lab.uid
        else:
            assert seen.st_uid != 0 and seen.st_uid != os.getuid(), path


@pytest.mark.skipif(not ROOT, reason="an ordinary user has one uid for all")
def test_sandboxes_that_live_at_the_same_time_share_no_uid(lab: Lab) -> None:
    if lab.info["security_level"] == 0:
        pytest.skip("one uid for all: declared as security level 0")
    with lab.box() as first, lab.box() as second, lab.box() as third:
        boxes = [first, second, third]
        for box in boxes:
            box.start("/bin/sleep", "1000")
        owners = [{int(uid) for pid in box.pids() for uid in status_of(pid)["Uid"].split()} for box in boxes]
        for index, mine in enumerate(owners):
            for other in owners[index + 1 :]:
                assert not mine & other, owners


@pytest.mark.root
def test_control_with_one_uid_and_no_namespace_two_sandboxes_may_share_it() -> None:
    """What the check compares can be equal: two plain children of one user."""
    code = STATUS
    assert on_the_host(code, **AS_USER)["Uid"] == on_the_host(code, **AS_USER)["Uid"]
