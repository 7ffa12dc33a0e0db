"""For every test: what needs root is collected only for root, one directory is shared by all workers of a run."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parent))

# The machine may be busy with other tests: how long an example takes says nothing.
settings.register_profile("corral", deadline=None)
settings.load_profile("corral")

# A test run that was started in the background of a script has inherited "ignored" for these, and so would every command under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_SHARED = "CORRAL_TEST_SHARED"


@pytest.hookimpl(tryfirst=True)  # before pytest chooses where temporary directories lie
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "root: shows something that only root can set up")
    if not hasattr(config, "workerinput"):
        made = tempfile.mkdtemp(prefix="corral-test-")
        os.chmod(made, 0o755)
        os.environ[_SHARED] = made  # workers are children of this process
        if config.option.basetemp is None:  # pytest's own place is closed to other users by each pytest that starts
            config.option.basetemp = os.path.join(made, "pytest")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(_SHARED), ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where `./check` has found every program that it knows, a test that misses one is a fault of its list, and not skipped."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and os.environ.get("CORRAL_TEST_COMPLETE"):
        why = report.longrepr[2].removeprefix("Skipped: ")
        if "is not installed" in why or (why.startswith("needs ") and not why.startswith("needs root")):
            report.outcome, report.longrepr = "failed", f"skipped, though ./check has all its programs: {why}"
    return report


@pytest.fixture(scope="session")
def shared() -> Path:
    """A directory that all workers of this test run share, open to every user, removed at the end."""
    return Path(os.environ[_SHARED])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root") is not None:
            item.add_marker(pytest.mark.skip(reason="needs root; run ./check as root to show it"))
