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
import secrets
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from furnished import furnish, once

HERE = Path(__file__).resolve().parent / "ecosystem"
CHECKOUT = HERE.parents[1]
ROOT = os.geteuid() == 0
MODES = ("bubblewrap", *(["crun"] if ROOT and shutil.which("crun") else []), *(["bubblewrap-user"] if ROOT else []))
"""A runtime of this user, embedded. `bubblewrap-user`: a server of an ordinary user, over HTTP."""
ORDINARY_UID = 64055
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


def clean() -> dict[str, str]:
    """The environment without what concerns this test run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("CORRAL_", "PYTEST_"))}


@contextmanager
def embedded(state: Path, shared: Path) -> Iterator[dict[str, str]]:
    """What a client needs to know of a new state directory of this user."""
    furnish(state, shared)
    yield {"CORRAL_STATE_DIR": str(state)}
    corral = [sys.executable, "-c", "from corral.cli.main import main; main()"]
    subprocess.run([*corral, "gc"], env=clean() | {"CORRAL_STATE_DIR": str(state)}, check=True, capture_output=True)


@contextmanager
def served_by_an_ordinary_user(state: Path, shared: Path) -> Iterator[dict[str, str]]:
    """What a client needs to know of a server that such a user has started from a checkout which it may only read."""
    place = shared / "ecosystem-user"
    home = place / "home"
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(home), "LANG": "C.UTF-8"}
    env |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_"))}
    words = ["setpriv", "--reuid", str(ORDINARY_UID), "--regid", str(ORDINARY_UID), "--clear-groups"]
    words.append(str(place / "checkout" / "corral"))

    def make() -> None:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=CHECKOUT, capture_output=True, check=True).stdout
        for name in map(os.fsdecode, filter(None, listed.split(b"\0"))):
            if (CHECKOUT / name).is_file():
                target = place / "checkout" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CHECKOUT / name, target)
        home.mkdir(mode=0o700)
        os.chown(home, ORDINARY_UID, ORDINARY_UID)
        subprocess.run([*words, "--version"], env=env, cwd="/", check=True, capture_output=True)

    once(place, make)
    furnish(state, shared, ORDINARY_UID)
    env["CORRAL_STATE_DIR"] = str(state)
    key = secrets.token_hex(24)
    serve = [*words, "serve", "--port", "0"]
    server = subprocess.Popen(serve, env=env | {"CORRAL_ADMIN_KEY": key}, cwd="/", stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield {"CORRAL_URL": server.stdout.readline().split()[-1], "CORRAL_KEY": key}
    finally:
        server.terminate()
        server.wait(120)
    subprocess.run([*words, "gc"], env=env, cwd="/", check=True, capture_output=True)


def run_suite(plug: str, mode: str, shared: Path) -> Path:
    """Run all checks of `plug` once per test run. -> a file with the outcomes by name, and the sandboxes that were left."""
    place = shared / f"ecosystem-{plug}-{mode}"
    answer = place / "outcomes.json"

    def make() -> None:
        python = environment(plug, shared)
        runtime, _, user = mode.partition("-")
        checks = HERE / "inside" / f"{plug.replace('-', '_')}_checks.py"
        report = place / "report.xml"
        with (served_by_an_ordinary_user if user else embedded)(place / "s", shared) as there:
            env = clean() | there | {"ECOSYSTEM_RUNTIME": runtime, "PYTHONDONTWRITEBYTECODE": "1"}
            pytest_words = [python, "-m", "pytest", "--rootdir", checks.parent, "--junitxml", report, checks]
            with open(place / "log", "wb") as log:
                subprocess.run(pytest_words, cwd=checks.parent, env=env, stdout=log, stderr=log, timeout=SUITE_S)
            assert report.exists(), (place / "log").read_text(errors="replace")[-4000:]
            left = delete_what_is_left(env)
        shutil.rmtree(place / "s")
        found = {name: [outcome.kind, outcome.why] for name, outcome in outcomes(report).items()}
        answer.write_text(json.dumps({"outcomes": found, "left": left}))

    once(place, make)
    return answer


def delete_what_is_left(env: dict[str, str]) -> list[str]:
    """-> the ids of the sandboxes that were still there."""
    corral = [sys.executable, "-c", "from corral.cli.main import main; main()", "sandbox"]
    listed = subprocess.run([*corral, "ls", "--json"], env=env, capture_output=True, check=True)
    left = [box["id"] for box in json.loads(listed.stdout)["items"] if box["state"] != "terminated"]
    if left:
        subprocess.run([*corral, "rm", *left], env=env, check=True)
    return left


class Suite:
    """What came of one suite in one mode."""

    def __init__(self, plug: str, mode: str, shared: Path) -> None:
        told = json.loads(run_suite(plug, mode, shared).read_text())
        self.outcomes = {name: Outcome(*said) for name, said in told["outcomes"].items()}
        self.left: list[str] = told["left"]

    def must_pass(self, check: str, cannot: dict[str, str]) -> None:
        """Fails as the check did. What we cannot do is named with the reason, and must go on to fail."""
        outcome = self.outcomes[check]
        if check in cannot:
            assert outcome.kind == "xfailed", f"{outcome.kind}: {outcome.why}"
            pytest.xfail(cannot[check])
        assert outcome.kind == "passed", f"{outcome.kind}: {outcome.why}"
