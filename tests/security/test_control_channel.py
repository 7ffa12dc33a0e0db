"""Threat: an exec finds the control channel (descriptor, path, socket) and speaks on it as if it were the guest or the node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from corral.testing.hostile.channel import CONNECT, DESCRIPTORS, FORGE, FORGERIES, SPEAK

from .conftest import ROOT, Box, Lab
from .probes import AS_USER, USER, on_the_host


def test_an_exec_has_its_three_descriptors_and_no_other(box: Box) -> None:
    for spec in ({}, {"stdin": b"text"}, {"pty": [24, 80]}):
        seen = json.loads(box.python(DESCRIPTORS, **spec).stdout)["mine"]
        assert sorted(seen) == ["0", "1", "2"], (spec, seen)
        assert all(what.startswith(("pipe", "/dev/null", "/dev/pts/")) for what in seen.values()), (spec, seen)


def test_control_the_look_finds_a_descriptor_that_is_there(box: Box) -> None:
    opened = 'import os\nfor _ in range(3): os.open("/", os.O_RDONLY)\nimport socket\na, b = socket.socketpair()\n'
    seen = box.ask(opened + DESCRIPTORS)["mine"]
    assert len(seen) == 8 and "socket" in seen.values(), seen


@pytest.mark.parametrize("pty", [False, True])
def test_frames_on_the_descriptors_of_an_exec_are_output_and_nothing_else(box: Box, pty: bool) -> None:
    """Written to every descriptor that it has, standard input and the doors of /proc included."""
    for name, frame in FORGERIES.items():
        spec: dict[str, Any] = {"pty": [24, 80]} if pty else {"stdin": b"", "stdin_open": True}
        outcome = box.python(FORGE, frame.hex(), **spec)
        assert outcome.facts.exit_code == 7 and not outcome.facts.guest_lost, (name, outcome.facts)
        if not pty:
            assert (outcome.stdout, outcome.stderr) == (frame, frame), name
    assert box.works()


def host_sockets() -> list[str]:
    """Names of unix sockets of the host, abstract (with @) and paths."""
    with open("/proc/net/unix", errors="replace") as table:
        names = [line.split()[7] for line in table.readlines()[1:] if len(line.split()) > 7]
    return [name for name in dict.fromkeys(names) if all(32 < ord(c) < 127 for c in name)][:60]


def test_no_socket_of_the_host_can_be_reached_by_path_name_or_descriptor(box: Box, lab: Lab) -> None:
    name = f"corral-test-{os.urandom(6).hex()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letters:
        listener.bind(f"\0{name}")
        listener.listen()
        letters.bind(f"\0{name}-letters")
        own = [
            f"{box.directory}/s",
            "/run/corral/i/s",
            "/run/corral/t/s",
            f"{lab.state}/api.sock",
            "/s",
            "/workspace/s",
        ]
        targets = [f"@{name}", f"@{name}-letters", *own, *host_sockets()]
        answers = box.ask(CONNECT, json.dumps(targets))
        assert answers.pop("listed") == []
        reached = {target: answer for target, answer in answers.items() if answer == "ok"}
        assert reached == {}
        # Control: a plain child of the host reaches the same names.
        outside = on_the_host(CONNECT, json.dumps([f"@{name}", f"@{name}-letters"]))
        assert outside[f"stream \0{name}"] == "ok" and outside[f"datagram \0{name}-letters"] == "ok", outside
        assert f"@{name}" in outside["listed"]


@pytest.mark.root
def test_other_users_of_the_host_cannot_speak_to_a_guest(box: Box) -> None:
    assert on_the_host(SPEAK, box.directory, **{**AS_USER, "user": USER + 1, "group": USER + 1}) == {"speak": "EACCES"}
    assert box.works()


@pytest.mark.skipif(not ROOT, reason="the owner is this process: nothing to show by another")
def test_control_the_owner_of_the_state_directory_can(lab: Lab) -> None:
    with lab.box() as box:
        assert box.works()
        become = AS_USER if lab.uid != 0 else {}
        assert on_the_host(SPEAK, box.directory, **become) == {"speak": "ok"}
        assert box.works(), "the node takes its place again"


def test_the_directory_of_an_instance_is_not_inside(box: Box, lab: Lab) -> None:
    probe = f"import json, os; print(json.dumps([os.path.lexists(p) for p in {[box.directory, str(lab.state)]!r}]))"
    assert box.python(probe).json() == [False, False]
    found = box.run("/bin/find", "/", "-xdev", "-type", "s")
    assert found.stdout == b"", found.stdout
    outside = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert json.loads(outside.stdout) == [True, True]
