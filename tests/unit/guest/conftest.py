"""Real guests: as an ordinary child, as PID 1 of a namespace with two uids, as PID 1 with one uid (the five measures), and as under gVisor.

The last talks over two FIFOs, and each of its execs has a pid namespace of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import corral
from corral.channel import ChannelLimits, Data, Ended, ExecStatus, GuestClient
from corral.domain.fence import Fence
from corral.linux import fifos

SOURCE = Path(corral.__file__).parent
BOOT = SOURCE / "guest" / "boot.py"
OWN = os.path.realpath(sys.executable)
OF_THE_SYSTEM = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(p)), OWN)
"""What another user can run, too."""
ROOT = os.getuid() == 0
OTHER_UID = 54321
FENCE = Fence(1, 1)


@dataclass
class Result:
    status: ExecStatus
    stdout: bytes
    stderr: bytes
    chunks: list[Data] = field(default_factory=list)


class RunningGuest:
    """A guest process, its socket, and the short way to run something in it."""

    def __init__(self, mode: str, arguments: list[str], prefix: list[str]) -> None:
        self.mode = mode
        self.directory = tempfile.mkdtemp(prefix="corral-guest-")
        os.chmod(self.directory, 0o755)
        self.path = os.path.join(self.directory, "s")
        self.fifo = mode in ("fifo", "namespaces")
        given: tuple[int, ...]
        if self.fifo:
            given = fifos.make(self.directory)
            control = ["--control-fifo", *(["--exec-pid-namespaces"] if mode == "namespaces" else [])]
        else:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self.path)
            listener.listen(8)
            given = (listener.detach(),)
            control = ["--control-fd", str(given[0])]
        uid = OTHER_UID if mode in ("pid1", "namespaces") and ROOT else 1000 if mode == "same_uid" else os.getuid()
        command = [
            *prefix,
            OF_THE_SYSTEM if mode == "same_uid" else OWN, "-I", "-S", "-B",
            os.path.join(readable_site(), "boot.py") if mode == "same_uid" else str(BOOT),
            "--instance", "ins_test", "--installation", "test",
            "--exec-uid", str(uid), "--exec-gid", str(uid if uid != os.getuid() else os.getgid()),
            "--deadline", "300",  # whatever happens to the test, nothing of it lives on
            *arguments, *control,
        ]  # fmt: skip
        self.exec_uid = uid
        self.log = open(os.path.join(self.directory, "log"), "wb")  # noqa: SIM115
        self.begun = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            pass_fds=() if self.fifo else given,
            start_new_session=True,
            stdin=given[0] if self.fifo else subprocess.DEVNULL,
            stdout=given[1] if self.fifo else self.log,
            stderr=self.log,
            env={"PATH": "/usr/bin:/bin"},
        )
        for fd in given:
            os.close(fd)
        self.clients: list[GuestClient] = []
        self._names = itertools.count()

    async def dial(self) -> socket.socket | fifos.Ends:
        if self.fifo:
            return fifos.connect(self.directory)
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.path)
        return sock

    async def connect(self, *, identify: bool = True, limits: ChannelLimits | None = None) -> GuestClient:
        if self.fifo and self.clients:
            await self.clients[-1].close()  # a pair of FIFOs has one owner at a time
        client = await GuestClient.connect(self.dial, limits=limits or ChannelLimits(request_s=60, connect_s=60))
        self.clients.append(client)
        if identify and not client.hello.identified:
            await client.identify("sbx_test", FENCE, now=time.time(), entropy=os.urandom(32))
        return client

    def name(self) -> str:
        return f"exe_{next(self._names)}"

    def spec(self, *argv: str, **more: Any) -> dict[str, Any]:
        base = {"exec_id": self.name(), "argv": list(argv), "env": {"PATH": "/usr/bin:/bin"}, "cwd": "/"}
        return base | more

    async def run(self, client: GuestClient, *argv: str, **more: Any) -> Result:
        spec = self.spec(*argv, **more)
        status = await client.start_exec(spec, fence=FENCE, follow=True)
        if status["state"] == "failed":
            return Result(status, b"", b"")
        return await self.follow(client, spec["exec_id"])

    async def follow(self, client: GuestClient, exec_id: str, offsets: dict[str, int] | None = None) -> Result:
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        chunks = []
        async for item in client.attach(exec_id, offsets):
            if isinstance(item, Ended):
                return Result(item.status, b"".join(parts["stdout"]), b"".join(parts["stderr"]), chunks)
            parts[item.stream].append(item.data)
            chunks.append(item)
        raise AssertionError("the output ended without an end")

    async def stop(self) -> None:
        for client in self.clients:
            await client.close()
        if self.process.poll() is None:
            with contextlib.suppress(Exception):
                client = await self.connect()
                await client.shutdown(fence=max(FENCE, client.hello.floor))
                await client.close()
        try:
            await asyncio.to_thread(self.process.wait, 15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@functools.cache
def readable_site() -> str:
    """The guest as it lies inside a sandbox, where another uid can read it wherever the checkout is."""
    site = tempfile.mkdtemp(prefix="guest-site-")
    shutil.copytree(BOOT.parent, os.path.join(site, "corral", "guest"), ignore=shutil.ignore_patterns("__pycache__"))
    shutil.move(os.path.join(site, "corral", "guest", "boot.py"), site)
    Path(site, "corral", "__init__.py").touch()
    for directory, _, files in os.walk(site):
        os.chmod(directory, 0o755)
        for name in files:
            os.chmod(os.path.join(directory, name), 0o644)
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    return site


def start(mode: str, *arguments: str) -> RunningGuest:
    if mode in ("child", "fifo"):
        return RunningGuest(mode, list(arguments), [])
    if mode in ("pid1", "namespaces"):
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return RunningGuest(mode, list(arguments), unshare if ROOT else [*unshare, "--map-root-user"])
    assert mode == "same_uid"
    prefix = [
        "bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--uid", "1000", "--gid", "1000",
        "--cap-add", "CAP_KILL", *programs_of_the_host(), "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp",
        "--ro-bind", readable_site(), readable_site(), "--as-pid-1", "--",
    ]  # fmt: skip
    if ROOT:
        prefix = ["setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups", *prefix]
    return RunningGuest(mode, ["--same-uid", *arguments], prefix)


def programs_of_the_host() -> list[str]:
    """Not the whole root: a mount that goes elsewhere on the machine while bwrap copies the tree makes it fail."""
    view: list[str] = []
    for place in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc"):
        if os.path.islink(place):
            view += ["--symlink", os.readlink(place), place]
        elif os.path.isdir(place):
            view += ["--ro-bind", place, place]
    return view


MODES = ("child", "pid1", "same_uid", "namespaces")


def skip_unless_possible(mode: str) -> None:
    if mode in ("pid1", "namespaces") and not ROOT:
        pytest.skip("two uids inside a namespace need root")
    if mode == "same_uid":
        if shutil.which("bwrap") is None or shutil.which("setpriv") is None:
            pytest.skip("needs bwrap and setpriv")
        probe = ["setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups"] if ROOT else []
        readable = subprocess.run(
            [
                *probe,
                OF_THE_SYSTEM,
                "-I",
                "-S",
                "-B",
                "-c",
                f"open({str(BOOT)!r}); import sys; sys.exit(sys.version_info < (3, 11))",
            ],
            capture_output=True,
        )
        if readable.returncode != 0:
            pytest.skip("another user cannot run the guest from here")


@pytest.fixture
async def launch() -> AsyncIterator[Callable[..., RunningGuest]]:
    """`launch(mode, *arguments)`; everything is stopped at the end."""
    running: list[RunningGuest] = []

    def begin(mode: str = "child", *arguments: str) -> RunningGuest:
        skip_unless_possible(mode)
        guest = start(mode, *arguments)
        running.append(guest)
        return guest

    yield begin
    for guest in running:
        await guest.stop()


@pytest.fixture(params=MODES)
async def guest(request: pytest.FixtureRequest, launch: Callable[..., RunningGuest]) -> RunningGuest:
    """A guest in each of the modes."""
    return launch(request.param)


@pytest.fixture
async def client(guest: RunningGuest) -> GuestClient:
    return await guest.connect()
