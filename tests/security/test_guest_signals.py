"""Threat: an exec signals PID 1 or a supervisor, by any of the kernel's ways; and what remains when a supervisor did die.

A supervisor is kept by other uids (`uid`) or, where guest and execs share one, by Landlock's signal scope (`landlock`); either holds
alone, so the controls switch both off. PID 1 is kept by the kernel: it has no handler, and what has none does not reach the init of
a pid namespace. Its control is the same signal to a plain process.
"""

from __future__ import annotations

import uuid

import pytest

from corral.testing.certify.bench import marked
from corral.testing.hostile.prelude import TELL
from corral.testing.hostile.signals import AT_GUEST, AT_SUPERVISOR, SIGNAL, WAYS

from .conftest import Box, Lab, eventually, landlock_abi
from .probes import on_the_host


def test_no_signal_reaches_pid_1(lab: Lab) -> None:
    for unsafe in ((), ("unsafe_one_uid", "unsafe_no_landlock")):
        if unsafe and not lab.info["capabilities"]["two_uids"]:
            unsafe = ("unsafe_no_landlock",)
        with lab.box(*unsafe) as box:
            guest = box.guest_pid()
            assert box.ask(AT_GUEST) == {"alive": True}
            assert box.guest_pid() == guest
            assert box.works()


def test_control_a_plain_process_dies_of_the_same_signals() -> None:
    code = (
        SIGNAL
        + r"""
for way in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.setsid()
        time.sleep(30)
        os._exit(0)
    while os.getsid(child) != child:
        time.sleep(0.001)
    send(way, child, 9)
    answers[way] = os.WTERMSIG(os.waitpid(child, 0)[1])
"""
        + TELL
    )
    # The owner ways with F_SETSIG 9: all of them end it.
    assert on_the_host(code, *WAYS, "group") == dict.fromkeys((*WAYS, "group"), 9)


def test_a_supervisor_cannot_be_killed_or_stopped(box: Box) -> None:
    if box.same_uid and landlock_abi() < 6:
        pytest.skip("one uid and a kernel that cannot confine signals: the guest survives the loss instead (below)")
    for way in (*WAYS, "group"):
        for number in (9, 19):
            answers = box.ask(AT_SUPERVISOR, way, str(number))
            assert answers["supervisor"] not in ("gone", "T"), (way, answers)
            if not way.startswith("owner"):  # what a descriptor's owner may not be sent is dropped without a word
                assert answers["told"] == "EPERM", (way, answers)
    assert box.works()


def test_kill_minus_one_costs_no_exec_its_supervisor(box: Box) -> None:
    if box.same_uid and landlock_abi() < 6:
        pytest.skip("one uid and a kernel that cannot confine signals: the guest survives the loss instead (below)")
    other = box.start("/bin/sleep", "1000")
    outcome = box.sh("/bin/sleep 1001 & kill -9 -1; echo survived")
    assert not outcome.facts.guest_lost and not outcome.facts.sandbox_lost, outcome.facts
    eventually(lambda: not any(b"sleep\0" + b"1001" in line for line in _lines(box)), "the signal was sent")
    assert box.works()
    if box.same_uid:
        # Each exec has a domain of its own: the neighbour was out of reach.
        assert any(b"sleep\0" + b"1000" in line for line in _lines(box))
        box.lab.call("end", exec_id=other, why="cancelled")
    else:
        ended = box.wait(other).facts
        assert (ended.signal, ended.guest_lost) == (9, False), ended


def _lines(box: Box) -> list[bytes]:
    found = []
    for pid in box.pids():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found.append(file.read())
        except OSError:
            continue
    return found


def test_control_without_other_uids_and_landlock_each_way_kills_it_and_only_its_exec_is_lost(lab: Lab) -> None:
    """Lost means lost: all that the exec had started ends, nothing else does, and the host is the witness."""
    off = ["unsafe_no_landlock"]
    if lab.info["capabilities"]["two_uids"]:
        off.append("unsafe_one_uid")
    with lab.box(*off) as box:
        neighbour = box.start("/bin/sh", "-c", "sleep 1000 & wait; exit 7")
        for way in WAYS:
            mark = f"mark{uuid.uuid4().hex}"
            daemon = "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: time.sleep(1000)\n os._exit(0)\n"
            facts = box.python(f"#{mark}\n{daemon}{AT_SUPERVISOR}", way, "9", "and wait").facts
            assert facts.guest_lost and facts.exit_code is None and facts.started and facts.killed_all, (way, facts)
            eventually(lambda mark=mark: not marked(mark), f"what a lost exec had started ends ({way})")
            assert box.works(), way
        assert any(b"sleep\0" + b"1000" in line for line in _lines(box)), "the neighbour's exec was not lost"
        box.lab.call("end", exec_id=neighbour, why="cancelled")


@pytest.mark.parametrize("on", ["uid", "landlock"])
def test_control_either_defence_alone_keeps_the_supervisor(lab: Lab, on: str) -> None:
    two = lab.info["capabilities"]["two_uids"]
    if (on == "uid" and not two) or (on == "landlock" and landlock_abi() < 6):
        pytest.skip(f"{on} is no defence of this mode on this kernel")
    off = ["unsafe_no_landlock"] if on == "uid" else ["unsafe_one_uid"] if two else []
    with lab.box(*off, "unsafe_no_seccomp") as box:
        for way in WAYS:
            answers = box.ask(AT_SUPERVISOR, way, "9")
            assert answers["supervisor"] not in ("gone", "T"), (way, answers)
