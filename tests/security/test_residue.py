"""Threat: what one sandbox leaves behind is found by the next one, even when that gets the same uids, loop device, directory and group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.testing.certify.bench import status_of
from corral.testing.hostile.prelude import PRELUDE, TELL
from corral.testing.hostile.residue import CLEAN, LEAVE, LOOK_FOR_MARKS, PLACES

from .conftest import MODES, Box, Lab


@pytest.fixture(scope="module", params=MODES)
def narrow(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A node with room for one sandbox at a time: the next one gets the same ids."""
    first = 65536 * (33000 + int.from_bytes(os.urandom(2)) % 25000)  # above every block that is claimed by itself
    lab = Lab(request.param, subuid_range=(first, 65536) if request.param.endswith("root") else None)
    yield lab
    lab.close()


def loop_device(box: Box) -> str | None:
    """The device that carries the disk of a sandbox."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[4] == str(box.tree):
            return right.split()[1]
    return None


def groups(box: Box) -> set[str]:
    """The control groups of the guest on the host."""
    text = Path(f"/proc/{box.guest_pid()}/cgroup").read_text()
    return {line.split(":", 2)[2] for line in text.splitlines() if "corral" in line}


def uids(box: Box) -> str:
    """Whom on the host the guest is."""
    return status_of(box.guest_pid())["Uid"]


def facts(answers: dict[str, Any]) -> dict[str, Any]:
    return {name: answers[name] for name in CLEAN}


def test_the_next_sandbox_on_the_same_ids_device_and_group_finds_nothing(narrow: Lab) -> None:
    word = f"mark{os.urandom(8).hex()}"
    with narrow.box() as first:
        fresh = first.ask(LOOK_FOR_MARKS, word, *PLACES)
        assert facts(fresh) == CLEAN
        assert first.ask(LEAVE, word, *PLACES) == {}
        # Control: a later exec of the same sandbox finds each of them.
        seen = facts(first.ask(LOOK_FOR_MARKS, word, *PLACES))
        assert seen.pop("files") >= 3 * len(PLACES)
        assert seen == {"shm": True, "msg": True, "sem": True, "tcp": "ok", "abstract": "ok", "processes": 1}
        before = (loop_device(first), uids(first), groups(first), first.directory, first.instance)
        directory, image = Path(first.directory), loop_device(first)
    assert not directory.exists()
    assert str(directory) not in Path("/proc/self/mountinfo").read_text()
    if image is not None:
        backing = Path(f"/sys/block/{os.path.basename(image)}/loop/backing_file")
        assert not backing.exists() or str(directory) not in backing.read_text()
    met_device = image is None
    for turn in range(8):
        if met_device and turn:
            break
        # The same name: the same directory and control group.
        with narrow.box(instance=before[4]) as box:
            answers = box.ask(LOOK_FOR_MARKS, word, *PLACES)
            assert facts(answers) == CLEAN, turn
            if image is not None:
                assert answers["used"] == fresh["used"], "as fresh as the first was"
            assert answers["hostname"] == fresh["hostname"]
            assert (uids(box), groups(box), box.directory) == before[1:4], "it is the same place"
            met_device = met_device or loop_device(box) == image


def test_two_that_live_at_once_see_nothing_of_each_other(lab: Lab) -> None:
    word = f"mark{os.urandom(8).hex()}"
    with lab.box() as first, lab.box() as second:
        first.ask(LEAVE, word, *PLACES)
        assert first.ask(LOOK_FOR_MARKS, word, *PLACES)["processes"] == 1
        assert facts(second.ask(LOOK_FOR_MARKS, word, *PLACES)) == CLEAN
        # Nor do they share a mount that either may write to.
        shared = set(_devices(first)) & set(_devices(second))
        assert not shared, shared


MOUNTS = PRELUDE + 'answers["rows"] = open("/proc/self/mountinfo").read().splitlines()\n' + TELL


def _devices(box: Box) -> dict[str, str]:
    """(device, directory in it) of every writable mount, as the kernel names them -> where it is inside."""
    found = {}
    for line in box.ask(MOUNTS)["rows"]:
        fields = line.partition(" - ")[0].split()
        if "rw" in fields[5].split(",") and not fields[4].startswith(("/proc", "/dev/")):
            found[f"{fields[2]} {fields[3]}"] = fields[4]
    return found
