"""Sandboxes to attack: on bubblewrap as root, bubblewrap as an ordinary user, crun and runc. The witness is the host, seen by us."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import corral
from corral.domain.facts import ExecFacts, StreamFacts, Usage
from corral.node.interpreter import PYTHON_ARGV
from corral.testing.certify.bench import status_of
from corral.testing.hostile.files import who_am_i

from .probes import AS_USER, USER, user_python

ROOT = os.geteuid() == 0
MODES = ["bubblewrap-user"]
if ROOT:
    MODES = ["bubblewrap-root", "bubblewrap-user", *(f"{name}-root" for name in ("crun", "runc") if shutil.which(name))]
ON_RUNC = ("test_filesystem", "test_identity", "test_kernel_surface", "test_network_closed", "test_residue")
"""What an OCI program sets up. The rest tries the guest, the host's side of it, or what the conformance suite tries on each runtime."""
APPLETS = [
    "sh",
    "cat",
    "sleep",
    "env",
    "true",
    "false",
    "dd",
    "rm",
    "mkdir",
    "ln",
    "ls",
    "stat",
    "kill",
    "setsid",
    "mkfifo",
    "touch",
    "echo",
    "id",
    "find",
    "ps",
    "mount",
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Show nothing twice: see `ON_RUNC`."""

    def again(item: pytest.Item) -> bool:
        found = getattr(item, "callspec", None)
        return found is not None and "runc-root" in found.params.values() and not item.path.name.startswith(ON_RUNC)

    if left_out := [item for item in items if again(item)]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@cache
def landlock_abi() -> int:
    """Version of the kernel's Landlock; signals can be confined from 6 on."""
    return max(0, ctypes.CDLL(None).syscall(444, None, 0, 1))


def make_rootfs(path: Path) -> None:
    """A static busybox, names of users, and two traps: a set-uid program and a file that only root may read."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is not installed: there is no program to run inside")
    directories = ".corral bin dev etc home/sandbox proc root run/user/1000 sys tmp usr/bin var/tmp workspace"
    for name in directories.split():
        (path / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(busybox, path / "bin/busybox")
    for name in APPLETS:
        (path / "bin" / name).symlink_to("busybox")
    (path / "bin/raised").write_bytes(who_am_i())
    (path / "bin/raised").chmod(0o6755)
    (path / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000:sandbox:/home/sandbox:/bin/sh\n"
    )
    (path / "etc/group").write_text("root:x:0:\nsandbox:x:1000:\n")
    (path / "etc/shadow").write_text("root:*:1:0:99999:7:::\n")
    (path / "etc/shadow").chmod(0o600)


class Refused(Exception):
    """The node's own error: `code` and `detail`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class Outcome:
    """How an exec ended: the facts of the host and the bytes that came."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.stdout = base64.b64decode(told.pop("stdout_bytes"))
        self.stderr = base64.b64decode(told.pop("stderr_bytes"))
        told["usage"] = Usage(**told["usage"])
        told["stdout"], told["stderr"] = StreamFacts(**told["stdout"]), StreamFacts(**told["stderr"])
        told.pop("start_failure")
        self.facts = ExecFacts(**told)

    def json(self) -> Any:
        assert self.facts.exit_code == 0, (self.facts, self.stderr[-2000:], self.stdout[-2000:])
        return json.loads(self.stdout)


class Lab:
    """A node in another process (see lab.py), as root or as the ordinary user."""

    def __init__(self, mode: str, *, subuid_range: tuple[int, int] | None = None, **more: Any) -> None:
        options = {name: more.pop(name) for name in ("env", "cwd", "pass_fds", "arguments") if name in more}
        self.mode = mode
        self.runtime, _, who = mode.partition("-")
        self.uid = USER if who == "user" and ROOT else os.geteuid()
        # Not tmp_path: ids of sandboxes must be able to pass through every directory above.
        self.state = Path(tempfile.mkdtemp(prefix="corral-security-"))
        self.state.chmod(0o711)
        make_rootfs(self.state / "rootfs")
        become: dict[str, Any] = {}
        python = sys.executable
        if self.uid != os.geteuid():
            become, python = AS_USER, user_python()
            for place in (self.state, *self.state.rglob("*")):
                mode_before = place.lstat().st_mode
                os.chown(place, USER, USER, follow_symlinks=False)
                if not place.is_symlink():
                    place.chmod(mode_before & 0o7777)  # chown drops set-id bits
        installation = "sec" + hashlib.sha256(str(self.state).encode()).hexdigest()[:12]
        config = {"state": str(self.state), "runtime": self.runtime, "installation": installation, **more}
        if subuid_range is not None:
            config["subuid_range"] = list(subuid_range)
        site = [path for path in sys.path if path.endswith("site-packages")]
        library = os.pathsep.join([str(Path(corral.__file__).parents[1]), *site])
        program = Path(__file__).with_name("lab.py").read_text()
        self.process = subprocess.Popen(
            [python, "-c", program, json.dumps(config), *options.get("arguments", ())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=options.get("cwd", "/"),
            env={
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "PYTHONPATH": library,
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": str(self.state),
                **options.get("env", {}),
            },
            pass_fds=options.get("pass_fds", ()),
            start_new_session=True,
            text=True,
            **become,
        )
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.info = self.call("open")
        if not self.info["usable"]:
            self.close()
            pytest.skip(f"{mode} is not usable here: {self.info['reason']}")

    def send(self, op: str, **arguments: Any) -> int:
        """Begin a call; `answer` waits for it."""
        assert self.process.stdin is not None
        self._number += 1
        self.process.stdin.write(json.dumps({"id": self._number, "op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._number

    def answer(self, number: int) -> Any:
        assert self.process.stdout is not None
        while number not in self._answers:
            line = self.process.stdout.readline()
            assert line, f"the lab ended: {self.process.poll()}"
            told = json.loads(line)
            self._answers[told["id"]] = told
        told = self._answers.pop(number)
        if "error" in told:
            raise Refused(**told["error"])
        return told["ok"]

    def call(self, op: str, **arguments: Any) -> Any:
        return self.answer(self.send(op, **arguments))

    @contextlib.contextmanager
    def box(self, *unsafe: str, **options: Any) -> Iterator[Box]:
        """A sandbox with these defences switched off; ended and seen to leave nothing."""
        made = self.call("create", unsafe=list(unsafe), **options)
        box = Box(self, made)
        try:
            yield box
        finally:
            evidence = self.call("destroy", instance=box.instance)
            assert evidence["clean"], evidence

    def resident_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) * 1024

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.call("close")
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.state, ignore_errors=True)


class Box:
    """One sandbox of a lab."""

    def __init__(self, lab: Lab, made: dict[str, Any]) -> None:
        self.lab = lab
        self.instance: str = made["instance"]
        self.directory: str = made["directory"]
        self.tree = Path(made["tree"]["path"])
        self.exec_uid: int = made["exec_uid"]
        self.guest_uid: int = made["guest_uid"]
        self.same_uid: bool = made["same_uid"]
        self.security_level: int = made["security_level"]

    def start(self, *argv: str, **spec: Any) -> str:
        if isinstance(spec.get("stdin"), bytes):
            spec["stdin"] = base64.b64encode(spec["stdin"]).decode()
        exec_id: str = self.lab.call("start", instance=self.instance, argv=list(argv), **spec)
        return exec_id

    def start_python(self, code: str, *arguments: str, **spec: Any) -> str:
        return self.start(*PYTHON_ARGV, "-c", code, *arguments, **spec)

    def wait(self, exec_id: str) -> Outcome:
        return Outcome(self.lab.call("wait", exec_id=exec_id))

    def run(self, *argv: str, **spec: Any) -> Outcome:
        return self.wait(self.start(*argv, **spec))

    def sh(self, script: str, **spec: Any) -> Outcome:
        return self.run("/bin/sh", "-c", script, **spec)

    def python(self, code: str, *arguments: str, **spec: Any) -> Outcome:
        return self.wait(self.start_python(code, *arguments, **spec))

    def ask(self, code: str, *arguments: str, **spec: Any) -> dict[str, Any]:
        """The JSON object that a probe prints."""
        answers: dict[str, Any] = self.python(code, *arguments, **spec).json()
        return answers

    def works(self) -> bool:
        """Whether the guest still serves."""
        return self.run("/bin/true").facts.exit_code == 0

    def pids(self) -> list[int]:
        """Host pids of everything inside."""
        found: list[int] = self.lab.call("processes", instance=self.instance)
        return found

    def guest_pid(self) -> int:
        for pid in self.pids():
            if status_of(pid).get("NSpid", "").split()[-1:] == ["1"]:
                return pid
        raise AssertionError("PID 1 of the sandbox is not there")


def eventually(condition: Callable[[], Any], what: str, within: float = 20.0) -> Any:
    """Poll until true."""
    end = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {within} s: {what}"
        time.sleep(0.02)
    return value


@pytest.fixture(scope="session", params=MODES)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    lab = Lab(request.param)
    yield lab
    lab.close()


@pytest.fixture
def box(lab: Lab) -> Iterator[Box]:
    """A sandbox as it is."""
    with lab.box() as box:
        yield box


@pytest.fixture
def host_canary() -> Iterator[Path]:
    """A file on the host, open to everybody who can reach it, with a text that must not appear anywhere else."""
    place = Path(tempfile.mkdtemp(prefix="corral-canary-"))
    place.chmod(0o777)
    (place / "canary").write_text(f"canary-{os.urandom(16).hex()}")
    (place / "canary").chmod(0o666)
    yield place / "canary"
    shutil.rmtree(place, ignore_errors=True)
