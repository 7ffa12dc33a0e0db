"""Real programs inside behave as on the host: a short part of `python -m bench.programs`, on the host's own tools."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from bench import programs

from furnished import furnish

TESTS = {"system": 36, "node": 16, "pytest": 1000, "git": 20}
"""Workload -> its tests, so that one which ends early is seen."""
RUNTIMES = ["bubblewrap", *(["crun"] if os.geteuid() == 0 and shutil.which("crun") else [])]
REFUSED = {
    "a program can be traced",
    "a debugger attaches to its child",  # unless the sandbox has the profile debug
    "limits by number of a process",  # the filter cannot see whose number it is
}
"""What a sandbox refuses on purpose; docs/explanation/real-programs.md tells why."""


@pytest.fixture(scope="module")
def corral(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    state = tmp_path_factory.mktemp("programs") / "state"
    for place in (state.parent, *state.parent.parents):  # ids of sandboxes pass through
        if place.stat().st_uid == os.geteuid() and place != Path("/"):
            place.chmod(place.stat().st_mode | 0o711)
    furnish(state, shared)
    return ["env", f"CORRAL_STATE_DIR={state}", str(programs.REPOSITORY / "corral")]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("workload", TESTS)
def test_programs_find_inside_what_they_find_on_the_host(
    corral: list[str], runtime: str, workload: str, tmp_path: Path
) -> None:
    if workload == "node" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    programs.prepare(workload, tmp_path / workload)
    environment = {"FILES": "2000", "COMMITS": "40"}
    done = programs.inside(corral, runtime, "host", tmp_path, workload, 200, environment)
    tests = programs.parsed(done.stdout)
    failed = {name: test["why"] for name, test in tests.items() if test["result"] == "not ok"}
    assert (done.returncode, len(tests)) == (0, TESTS[workload]), (done.stdout[-2000:], done.stderr[-2000:])
    refused = REFUSED if workload == "system" else set()
    if runtime == "bubblewrap":
        refused = refused | ({"low ports can be bound"} if workload == "system" else set())
    assert {*failed} == refused, failed
