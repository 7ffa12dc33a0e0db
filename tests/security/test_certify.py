"""`corral certify` can fail: each defence switched off is found by the attack that it is against, which holds with it on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import corral

from .conftest import ROOT
from .probes import AS_USER, USER, user_python

PROGRAM = """
import json, sys
from corral import config
from corral.testing import certify
report = certify.run_blocking([sys.argv[1]], only=sys.argv[2:], settings=config.load())
print(json.dumps(report.document()))
"""
SUPERVISOR, TOLD, NAMESPACES = "guest/kill of the supervisor", "guest/what /proc tells of them", "namespaces/namespaces"


def certified(place: Path, unsafe: str, *only: str, user: bool = False) -> dict[str, str]:
    """Verdicts by `group/name`, by a process of root or of an ordinary user."""
    place.chmod(0o711)
    for above in list(place.parents)[:3]:
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    state = place / "s"
    state.mkdir()
    become, python = {}, sys.executable
    if user and ROOT:
        os.chown(state, USER, USER)
        become, python = AS_USER, user_python()
    done = subprocess.run(
        [python, "-c", PROGRAM, "bubblewrap", *only],
        cwd="/",
        env={
            "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(Path(corral.__file__).parents[1]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(state),
            "CORRAL_STATE_DIR": str(state / "state"),
            "CORRAL_UNSAFE": unsafe,
        },
        capture_output=True,
        timeout=300,
        **become,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (runtime,) = json.loads(done.stdout)["runtimes"]
    if not runtime["usable"]:
        pytest.skip(f"bubblewrap is not usable here: {runtime['reason']}")
    assert list(state.iterdir()) == [], "the trial left something beside the state directory"
    return {f"{attack['group']}/{attack['name']}": attack["verdict"] for attack in runtime["attacks"]}


@pytest.mark.root
def test_without_the_filter_namespaces_fail_and_with_all_nothing_does(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = certified(tmp_path / "a", "unsafe_no_seccomp", NAMESPACES)
    assert found[NAMESPACES] == "failed" and found["residue/the host, afterwards"] == "held", found
    found = certified(tmp_path / "b", "", NAMESPACES, SUPERVISOR, TOLD)
    assert set(found.values()) == {"held"} and len(found) == 4, found


@pytest.mark.root
def test_with_one_uid_and_no_landlock_the_supervisor_is_killed(tmp_path: Path) -> None:
    assert certified(tmp_path, "unsafe_one_uid,unsafe_no_landlock", SUPERVISOR)[SUPERVISOR] == "failed"


def test_a_dumpable_guest_of_an_ordinary_user_is_found(tmp_path: Path) -> None:
    assert certified(tmp_path, "unsafe_dumpable_guest", TOLD, user=True)[TOLD] == "failed"
