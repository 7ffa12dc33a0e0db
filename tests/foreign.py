"""Other people's suites over our plugs, each in an environment of its own, so that their pins never meet ours.

The packages of a lock are installed once into `${XDG_CACHE_HOME:-~/.cache}/corral/ecosystem/<digest of the lock>`; a test run adds the
checkout in a thin environment on top. A suite runs once per test run and mode; each of its checks is then a test here.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from furnished import furnish, once

HERE = Path(__file__).resolve().parent / "ecosystem"
CHECKOUT = HERE.parents[1]
MODES = ("bubblewrap", "crun") if os.geteuid() == 0 and shutil.which("crun") else ("bubblewrap",)
SUITE_S = 1200
PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


@dataclass(frozen=True)
class Outcome:
    """How one foreign check went: `passed failed xfailed skipped`, and why."""

    kind: str
    why: str


def names(plug: str) -> list[str]:
    """The checks that the suite of `plug` is known to have."""
    return (HERE / f"{plug}.checks").read_text().split()


def deploy() -> ModuleType:
    """`deploy/environment.py`, which is no package."""
    spec = importlib.util.spec_from_file_location("environment", CHECKOUT / "deploy" / "environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def packages(plug: str) -> Path:
    """Site-packages with what the lock of `plug` says, installed at first use; any number of callers at once."""
    lock = HERE / f"{plug}.lock"
    digest = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:20]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corral" / "ecosystem"
    place = cache / digest
    place.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{digest}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (place / "whole").exists():
            shutil.rmtree(place)
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            pip = [place / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "--no-input", "--no-deps"]
            hashed = ["--require-hashes", "--only-binary", ":all:", "-r", lock]
            done = subprocess.run([*pip, *hashed], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            (place / "whole").touch()
        return Path(subprocess.check_output([place / "bin" / "python", "-I", "-c", PACKAGES], text=True).strip())


def environment(plug: str, shared: Path) -> Path:
    """The Python of an environment of this test run: those packages, and the checkout as an installer would leave it."""
    venv = shared / f"ecosystem-{plug}"

    def make() -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        made = deploy().Environment(CHECKOUT, venv)
        site = Path(subprocess.check_output([made.python, "-I", "-c", PACKAGES], text=True).strip())
        (site / "packages.pth").write_text(f"{packages(plug)}\n")
        made.place_package()
        os.close(made.lock)

    once(shared / f"ecosystem-{plug}-made", make)
    return venv / "bin" / "python"


def outcomes(report: Path) -> dict[str, Outcome]:
    """By the name of the check, from a JUnit report."""
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kind, why = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                kind, why = "failed", f"{child.get('message')}\n{child.text}"
            elif child.tag == "skipped" and kind == "passed":
                kind = "xfailed" if child.get("type") == "pytest.xfail" else "skipped"
                why = child.get("message") or ""
        found[str(case.get("name"))] = Outcome(kind, why)
    return found


def run_suite(plug: str, mode: str, shared: Path) -> dict[str, Any]:
    """Run all checks of `plug` embedded on a new state directory. -> outcomes by name, and the sandboxes that were left."""
    place = shared / f"ecosystem-{plug}-{mode}"
    answer = place / "outcomes.json"

    def make() -> None:
        python = environment(plug, shared)
        state = place / "s"
        furnish(state, shared)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("CORRAL_", "PYTEST_"))}
        env = {**clean, "CORRAL_STATE_DIR": str(state), "ECOSYSTEM_RUNTIME": mode, "PYTHONDONTWRITEBYTECODE": "1"}
        checks = HERE / "inside" / f"{plug.replace('-', '_')}_checks.py"
        report = place / "report.xml"
        pytest_words = [python, "-m", "pytest", "--rootdir", checks.parent, "--junitxml", report, checks]
        with open(place / "log", "wb") as log:
            subprocess.run(pytest_words, cwd=checks.parent, env=env, stdout=log, stderr=log, timeout=SUITE_S)
        assert report.exists(), (place / "log").read_text(errors="replace")[-4000:]
        corral = [sys.executable, "-c", "from corral.cli.main import main; main()"]
        listed = subprocess.run([*corral, "sandbox", "ls", "--json"], env=env, capture_output=True, check=True)
        left = [box["id"] for box in json.loads(listed.stdout)["items"] if box["state"] != "terminated"]
        if left:
            subprocess.run([*corral, "sandbox", "rm", *left], env=env, check=True)
        subprocess.run([*corral, "gc"], env=env, check=True, capture_output=True)
        shutil.rmtree(state)
        found = {name: [outcome.kind, outcome.why] for name, outcome in outcomes(report).items()}
        answer.write_text(json.dumps({"outcomes": found, "left": left}))

    once(place, make)
    return json.loads(answer.read_text())


class Suite:
    """What came of one suite in one mode."""

    def __init__(self, plug: str, mode: str, shared: Path) -> None:
        told = run_suite(plug, mode, shared)
        self.outcomes = {name: Outcome(*said) for name, said in told["outcomes"].items()}
        self.left: list[str] = told["left"]

    def must_pass(self, check: str, cannot: dict[str, str]) -> None:
        """Fails as the check did. What we cannot do is named with the reason, and must go on to fail."""
        outcome = self.outcomes[check]
        if check in cannot:
            assert outcome.kind == "xfailed", f"{outcome.kind}: {outcome.why}"
            pytest.xfail(cannot[check])
        assert outcome.kind == "passed", f"{outcome.kind}: {outcome.why}"
