"""`inspect_ai.util._sandbox.self_check` over the sandbox `corral`: each of its checks by name, on each runtime."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from foreign import HERE, MODES, Suite, clean, embedded, environment, names

PLUG = "inspect-ai"
CANNOT = {
    "test_exec_as_user": "it makes an account as root; here the users are fixed, the root file system is not writable and the policy "
    "refuses root",
}
pytestmark = [pytest.mark.index, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", params=MODES)
def suite(request: pytest.FixtureRequest, shared: Path) -> Suite:
    return Suite(PLUG, request.param, shared)


@pytest.mark.parametrize("check", names(PLUG))
def test_their_check_passes(suite: Suite, check: str) -> None:
    suite.must_pass(check, CANNOT)


def test_their_suite_has_the_checks_that_are_known_here(suite: Suite) -> None:
    assert sorted(suite.outcomes) == names(PLUG)


def test_every_sandbox_was_deleted(suite: Suite) -> None:
    assert suite.left == []


def test_the_plug_does_what_their_checks_do_not_ask(shared: Path) -> None:
    python = environment(PLUG, shared)
    with embedded(shared / "ecosystem-inspect-plug", shared) as there:
        words = [python, "-m", "pytest", "--rootdir", HERE / "inside", HERE / "inside" / "inspect_ai_plug.py"]
        env = clean() | there | {"PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(words, cwd=HERE / "inside", env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "5 passed" in done.stdout, done.stdout[-4000:]
