"""Every runtime keeps what the port promises: as root, as an ordinary user, and the fake that stands in for them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import corral
from corral.node.interpreter import GUEST_ARGV, PYTHON_ARGV, ensure_interpreter
from corral.testing import runtime as checks

SLOW = {
    "death_anywhere_in_create_leaves_nothing_after_destroy",
    "create_again_after_death_in_create_works",
    "death_anywhere_in_destroy_leaves_nothing_after_another",
    "kill_ends_a_fork_bomb",
}
ALL = [pytest.param(name, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, _ in checks.CHECKS]
BUBBLEWRAP = "corral.adapters.runtimes.bubblewrap:BubblewrapRuntime"
CRUN = "corral.adapters.runtimes.crun:CrunRuntime"
RUNC = "corral.adapters.runtimes.runc:RuncRuntime"
RUNSC = "corral.adapters.runtimes.runsc:RunscRuntime"
FAKE = "corral.adapters.runtimes.fake:FakeRuntime"
USER = 54321
AS_USER: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": []}


def make_rootfs(path: Path) -> None:
    """The least that a sandbox needs: mount points, a static busybox, names of users."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is not installed: the checks have no program to run")
    for name in (
        *(".corral", "bin", "dev", "etc", "home/sandbox", "proc", "root", "run/user/1000", "sys", "tmp", "usr/bin"),
        *("var/tmp", "workspace"),
    ):
        (path / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(busybox, path / "bin/busybox")
    for name in ("sh", "sleep", "env"):
        (path / "bin" / name).symlink_to("busybox")
    (path / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000:sandbox:/home/sandbox:/bin/sh\n"
    )
    (path / "etc/group").write_text("root:x:0:\nsandbox:x:1000:\n")
    (path / "etc/shadow").write_text("root:*:1:0:99999:7:::\n")
    (path / "etc/shadow").chmod(0o600)


@cache
def user_python() -> str | None:
    """A Python that an ordinary user may run: this one, else the system's."""
    for candidate in (sys.executable, "/usr/bin/python3"):
        probe = [candidate, "-c", "import sys; raise SystemExit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(probe, capture_output=True, cwd="/", **AS_USER).returncode == 0:
                return candidate
        except OSError:
            continue
    return None


@pytest.fixture(scope="session")
def state() -> Iterator[Path]:
    # Closed to every other id, and so is the directory above, as below root's home.
    top = Path(tempfile.mkdtemp(prefix="corral-conformance-"))
    path = top / "state"
    path.mkdir(0o700)
    yield path
    shutil.rmtree(top, ignore_errors=True)


@pytest.fixture(scope="session")
def interpreter(state: Path) -> str:
    return str(ensure_interpreter(state))


@pytest.fixture(scope="session")
def rootfs(state: Path) -> str:
    make_rootfs(state / "base")
    return str(state / "base")


def run(check: str, config: checks.Config) -> None:
    try:
        asyncio.run(checks.run_check(dict(checks.CHECKS)[check], config))
    except checks.NotApplicable as reason:
        pytest.skip(f"does not apply: {reason}")


def config_of(factory: str, state: Path, rootfs: str, interpreter: str, scripted: bool = False) -> checks.Config:
    # One installation per state directory, as in life: each claims a block of uids of its own.
    installation = "conf" + hashlib.sha256(f"{factory} {state}".encode()).hexdigest()[:12]
    return checks.Config(factory, str(state), rootfs, interpreter, GUEST_ARGV, PYTHON_ARGV, scripted, installation)


@pytest.mark.root
class TestAsRoot:
    @pytest.mark.parametrize("check", ALL)
    def test_bubblewrap(self, check: str, state: Path, rootfs: str, interpreter: str) -> None:
        run(check, config_of(BUBBLEWRAP, state, rootfs, interpreter))

    @pytest.mark.parametrize("check", ALL)
    def test_crun(self, check: str, state: Path, rootfs: str, interpreter: str) -> None:
        run(check, config_of(CRUN, state, rootfs, interpreter))

    @pytest.mark.parametrize("check", ALL)
    def test_runc(self, check: str, state: Path, rootfs: str, interpreter: str) -> None:
        run(check, config_of(RUNC, state, rootfs, interpreter))

    @pytest.mark.parametrize("check", ALL)
    def test_runsc(self, check: str, state: Path, rootfs: str, interpreter: str) -> None:
        run(check, config_of(RUNSC, state, rootfs, interpreter))


class TestAsOrdinaryUser:
    """Run by root, each check is a child with another uid; run by an ordinary user, by that user. The directory is his alone."""

    @pytest.fixture(scope="class")
    def own_config(self) -> Iterator[checks.Config]:
        path = Path(tempfile.mkdtemp(prefix="corral-conformance-"))
        make_rootfs(path / "base")
        if os.geteuid() == 0:
            for place in (path, *path.rglob("*")):
                os.chown(place, USER, USER, follow_symlinks=False)
            tree = self._as_user(
                "import sys; from corral.node.interpreter import ensure_interpreter; print(ensure_interpreter(sys.argv[1]))",
                str(path),
            )
        else:
            tree = str(ensure_interpreter(path))
        yield config_of(BUBBLEWRAP, path, str(path / "base"), tree)
        shutil.rmtree(path, ignore_errors=True)

    def _as_user(self, code: str, *arguments: str) -> str:
        python = user_python()
        if python is None:
            pytest.skip("no Python of at least 3.11 is executable by an ordinary user")
        site = [path for path in sys.path if path.endswith("site-packages")]
        library = os.pathsep.join([str(Path(corral.__file__).parents[1]), *site])
        done = subprocess.run(
            [python, "-c", code, *arguments],
            capture_output=True,
            text=True,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": library, "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=280,
            **AS_USER,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.strip()

    @pytest.mark.parametrize("check", ALL)
    def test_bubblewrap(self, check: str, own_config: checks.Config) -> None:
        if os.geteuid() != 0:
            run(check, own_config)
            return
        code = "import sys; from corral.testing.runtime.elsewhere import main; sys.exit(main(sys.argv[1:]))"
        answer = json.loads(self._as_user(code, own_config.to_json(), check).splitlines()[-1])
        if "not_applicable" in answer:
            pytest.skip(f"does not apply: {answer['not_applicable']}")
        assert answer == {"passed": check}


@pytest.mark.parametrize("check", ALL)
def test_fake(check: str, state: Path, rootfs: str, interpreter: str) -> None:
    run(check, config_of(FAKE, state, rootfs, interpreter, scripted=True))
