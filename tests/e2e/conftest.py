"""The harness of the acceptance cases, with state directories of this suite's own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from acceptance import conftest as harness
from acceptance.conftest import Box, marker, user_checkout

__all__ = ["Box", "Served", "marker", "user_checkout"]


def _made(mode: str, shared: Path, name: str = "e") -> Iterator[Box]:
    state = shared / f"{name}-{mode}-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    if mode == "bubblewrap-user":
        box = harness.user_box(state, shared)
    else:
        box = harness.root_box(state, shared, mode.partition("-")[0])
    made = box("run", "--runtime", box.runtime, "-c", "print(1)", timeout=600)
    assert (made.returncode, made.stdout) == (0, b"1\n"), made.stderr
    yield box
    for process in box.started:
        if process.poll() is None:
            process.kill()
            process.wait()
    live = [s["id"] for s in box.document("sandbox", "ls", "--json")[1]["items"] if s["state"] != "terminated"]
    if live:
        box("sandbox", "rm", *live)
    gone = box("gc")
    assert gone.returncode == 0, gone.stderr
    assert box.document("doctor", "--json")[1]["leftovers"] == []
    assert not harness.holding(state), "a process of this state directory lives on"
    shutil.rmtree(state, ignore_errors=True)


@pytest.fixture(scope="session", params=harness.MODES)
def box(request: pytest.FixtureRequest, shared: Path) -> Iterator[Box]:
    """Parametrised over runtime and user."""
    yield from _made(request.param, shared)


@pytest.fixture(scope="session")
def one(shared: Path) -> Iterator[Box]:
    """One way of calling, for what no runtime ever sees."""
    with contextlib.contextmanager(_made)(
        "bubblewrap-user" if os.geteuid() else "bubblewrap-root", shared, "one"
    ) as box:
        yield box


@pytest.fixture(scope="session")
def sandbox(box: Box) -> Iterator[str]:
    """One sandbox for tests that leave it as it was."""
    yield box.sandbox()


KEY = "a-key-of-this-suite-" + "0" * 12


@dataclass(frozen=True)
class Served:
    """A server, the box on its state directory, and a box whose commands go to the server by URL."""

    local: Box
    remote: Box
    port: int

    def through(self, port: int) -> Box:
        """The same by another port of loopback."""
        return dataclasses.replace(self.remote, env=self.remote.env | {"CORRAL_URL": f"http://127.0.0.1:{port}"})


@pytest.fixture(scope="session")
def served(shared: Path) -> Iterator[Served]:
    """`corral serve` on loopback, with the first runtime and user that can run here."""
    mode = harness.MODES[0]
    for local in _made(mode, shared, "served"):
        environment = local.env | {"CORRAL_ADMIN_KEY": KEY}
        server = dataclasses.replace(local, env=environment).popen("serve", "--port", "0")
        assert server.stdout is not None
        port = int(server.stdout.readline().decode().rpartition(":")[2])
        nowhere = {"CORRAL_STATE_DIR": "/dev/null/none", "CORRAL_URL": f"http://127.0.0.1:{port}", "CORRAL_KEY": KEY}
        try:
            yield Served(local, dataclasses.replace(local, env=local.env | nowhere), port)
        finally:
            server.terminate()
            assert server.wait(60) == 0
