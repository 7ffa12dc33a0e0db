"""Where attacks run: sandboxes of one runtime on a node of their own, and the bare host beside them as witness and control."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.domain.facts import ExecFacts
from corral.domain.fence import Fence
from corral.domain.ids import new_id
from corral.domain.limits import MIB, LimitModes, Limits
from corral.domain.result import judge
from corral.errors import CorralError
from corral.ports.node import CreateInstance, ExecSpec, Node
from corral.ports.runtime import Evidence, Instance, InstanceRef, InstanceSpec, Runtime, RuntimeInfo
from corral.testing.hostile.files import who_am_i
from corral.testing.hostile.guest import WITHOUT_CAPABILITY
from corral.testing.runtimes import _Around

FENCE = Fence(1, 1)
NOBODY = 65534
"""Whom the bare host is tried as where it must be no root."""
SMALL = Limits(
    memory_bytes=128 * MIB,
    cpu=1.0,
    pids=40,
    disk_bytes=24 * MIB,
    inodes=1000,
    tmp_bytes=4 * MIB,
    output_bytes=64 * 1024,
    output_kill_bytes=1 * MIB,
    wall_s=60.0,
    open_files=256,
)
ROOMY = dataclasses.replace(
    SMALL,
    memory_bytes=1536 * MIB,
    cpu=float(len(os.sched_getaffinity(0))),
    pids=512,
    disk_bytes=160 * MIB,
    inodes=8000,
    tmp_bytes=40 * MIB,
    output_kill_bytes=16 * MIB,
    open_files=4096,
)
"""The control of every limit: what is stopped below passes here."""
SWITCHES = ("unsafe_no_seccomp", "unsafe_one_uid", "unsafe_dumpable_guest", "unsafe_no_landlock")
APART = """
import ctypes as _c
_l = _c.CDLL(None, use_errno=True)
if _l.unshare(0x0C020000) or _l.mount(b"none", b"/", None, 0x44000, None):
    raise SystemExit("no namespaces of one's own")
"""
"""As root the bare host is tried behind mounts, names and IPC of its own: what can do too much must not do it to the host."""


def fresh(prefix: str) -> str:
    """A new id."""
    return new_id(prefix, time.time_ns() // 1_000_000, secrets.token_bytes(10))


class Stage(_Around):
    """The runtime under trial. It notes what is projected into instances and gives chosen ones another program as PID 1."""

    def __init__(self, inner: Runtime) -> None:
        super().__init__(inner)
        self.python: tuple[str, ...] = ()
        self.interpreter = ""
        self.guests: dict[str, tuple[str, bool]] = {}

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        at = next(index for index, word in enumerate(spec.guest_argv) if word.endswith(".pyc"))
        self.python, self.interpreter = spec.guest_argv[:at], spec.interpreter
        code, before = self.guests.pop(spec.instance_id, ("", False))
        if code:
            given = spec.guest_argv if before else spec.guest_argv[at:]
            spec = dataclasses.replace(spec, guest_argv=(*self.python, "-c", code, *given))
        return await self.inner.create(spec, control)


def make_base(path: Path) -> Path:
    """A root file system of nothing but directories, names of users, and a set-uid program as a trap: programs are projected."""
    names = ".corral bin dev etc home/sandbox proc root run/user/1000 sys tmp usr/bin var/tmp workspace"
    for name in names.split():
        (path / name).mkdir(parents=True, exist_ok=True)
    for place in (path, *path.rglob("*")):
        place.chmod(0o755)
    (path / "bin/raised").write_bytes(who_am_i())
    (path / "bin/raised").chmod(0o6755)
    (path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nsandbox:x:1000:1000::/home/sandbox:/bin/sh\n")
    (path / "etc/group").write_text("root:x:0:\nsandbox:x:1000:\n")
    (path / "etc/shadow").write_text("root:*:1:0:99999:7:::\n")
    (path / "etc/shadow").chmod(0o600)
    return path


@dataclass(frozen=True)
class Ended:
    """How an exec ended: facts of the host, and the bytes that came."""

    facts: ExecFacts
    stdout: bytes
    stderr: bytes

    @property
    def reason(self) -> str:
        return judge(self.facts, SMALL, LimitModes()).reason

    def json(self) -> Any:
        if self.facts.exit_code != 0 or not self.stdout:
            last = self.stderr[-300:].decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise CorralError("infra_error", f"the attack itself failed: {self.reason} {last}".strip())
        return json.loads(self.stdout)


class Box:
    """One sandbox."""

    def __init__(self, bench: Bench, instance_id: str, instance: Instance) -> None:
        self.bench, self.instance_id, self.instance = bench, instance_id, instance

    @property
    def tree(self) -> Path:
        return Path(self.instance.tree.path)

    async def start(self, argv: Sequence[str], *, fence: Fence = FENCE, **spec: Any) -> str:
        exec_id = fresh("exe")
        spec.setdefault("limits", SMALL)
        await self.bench.node.start_exec(self.instance_id, fence, ExecSpec(exec_id, tuple(argv), **spec))
        return exec_id

    async def start_python(self, code: str, *arguments: str, **spec: Any) -> str:
        return await self.start([*self.bench.stage.python, "-c", code, *arguments], **spec)

    async def wait(self, exec_id: str) -> Ended:
        node = self.bench.node
        async with asyncio.timeout(90):
            facts = await node.wait_exec(exec_id)
        out = [
            b"".join([piece async for piece in node.kept_output(exec_id, stream)]) for stream in ("stdout", "stderr")
        ]
        return Ended(facts, *out)

    async def python(self, code: str, *arguments: str, **spec: Any) -> Ended:
        return await self.wait(await self.start_python(code, *arguments, **spec))

    async def ask(self, code: str, *arguments: str, **spec: Any) -> dict[str, Any]:
        """The JSON object that a program prints."""
        spec.setdefault("limits", dataclasses.replace(SMALL, output_bytes=4 * MIB, output_kill_bytes=8 * MIB))
        answers = (await self.python(code, *arguments, **spec)).json()
        if not isinstance(answers, dict):
            raise CorralError("infra_error", f"the attack told no object: {str(answers)[:100]}")
        return answers

    async def end(self, exec_id: str) -> None:
        await self.bench.node.end_exec(exec_id, "cancelled")

    async def works(self) -> bool:
        """Whether the guest still serves."""
        try:
            return (await self.python("raise SystemExit(7)")).facts.exit_code == 7
        except (CorralError, TimeoutError):
            return False

    async def pids(self) -> list[int]:
        """Host pids of everything inside, as the host lists them."""
        return await self.bench.stage.processes(self.instance.ref)

    async def destroy(self) -> Evidence:
        return await self.bench.node.destroy(self.instance_id, "certify")


class Bench:
    """A node with one runtime on a state directory of its own, sandboxes that attacks share, canaries on the host."""

    def __init__(
        self,
        compose: Callable[[Path, Callable[[Runtime], Runtime]], Node],
        state: Path,
        installation: str,
        unsafe: frozenset[str],
    ) -> None:
        self.state = state
        self.installation = installation
        self.unsafe = unsafe
        self._stages: list[Stage] = []
        self.node = compose(make_base(state / "trial"), self._wrap)
        self._shared: dict[str, Box] = {}
        self._memo: dict[str, Any] = {}
        self._lock = asyncio.Lock()
        self._opening: asyncio.Future[RuntimeInfo] | None = None

    def _wrap(self, inner: Runtime) -> Runtime:
        self._stages.append(Stage(inner))
        return self._stages[-1]

    @property
    def stage(self) -> Stage:
        return self._stages[-1]

    @property
    def root(self) -> bool:
        return os.geteuid() == 0

    async def open(self) -> RuntimeInfo:
        """Whoever is cancelled in it leaves the rest to `close`, which waits for it: threads know of no cancelling."""
        self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> RuntimeInfo:
        await self.node.open()
        self.info = (await self.node.runtimes())[0]
        return self.info

    @property
    def two_uids(self) -> bool:
        return bool(self.info.capabilities.get("two_uids"))

    # -- sandboxes -------------------------------------------------------------------------------------------------------------
    async def create(
        self,
        *unsafe: str,
        limits: Limits = SMALL,
        guest: str | None = None,
        without_capability: bool = False,
        instance_id: str | None = None,
        deadline_s: float = 300.0,
    ) -> Box:
        """A new sandbox: as the runtime makes it, or with these defences off, or with another program as PID 1."""
        instance_id = instance_id or fresh("ins")
        if guest is not None or without_capability:
            self.stage.guests[instance_id] = (guest or WITHOUT_CAPABILITY, guest is None)
        off = frozenset(unsafe) | self.unsafe
        if not self.two_uids:
            off -= {"unsafe_one_uid"}  # there is nothing to switch off
        request = CreateInstance(
            instance_id=instance_id,
            sandbox_id=fresh("sbx"),
            incarnation=1,
            fence=FENCE,
            runtime=self.info.name,
            template="trial",
            limits=limits,
            deadline_s=deadline_s,
            unsafe=off,
        )
        report = await self.node.create(request)
        instance = await self.stage.attach(InstanceRef(**report.ref))
        if instance is None:
            raise CorralError("sandbox_lost", "it ended as soon as it was made")
        return Box(self, instance_id, instance)

    @contextlib.asynccontextmanager
    async def box(self, *unsafe: str, **options: Any) -> AsyncIterator[Box]:
        box = await self.create(*unsafe, **options)
        try:
            yield box
        finally:
            await box.destroy()

    async def _one(self, name: str, make: Callable[[], Awaitable[Box]]) -> Box:
        async with self._lock:
            box = self._shared.get(name)
            if box is not None and await self.stage.attach(box.instance.ref) is None:
                await box.destroy()
                box = None
            if box is None:
                box = self._shared[name] = await make()
            return box

    async def held(self) -> Box:
        """The sandbox as it is, shared by the attacks."""
        return await self._one("held", self.create)

    async def unfiltered(self) -> Box:
        """The control of what the system call filter keeps shut."""
        return await self._one("unfiltered", lambda: self.create("unsafe_no_seccomp"))

    async def bare(self) -> Box:
        """The control of what guards guest and supervisors: every switch off, where it exists the other uid too."""

        async def make() -> Box:
            box = await self.create(*SWITCHES, without_capability=not self.two_uids)
            if self.two_uids and box.instance.same_uid:
                # Only a guest that need not change to another uid can do without its capability.
                await box.destroy()
                box = await self.create(*SWITCHES, without_capability=True)
            return box

        return await self._one("bare", make)

    async def small(self) -> Box:
        """A sandbox whose limits are attacked; a new one after it was lost to that."""
        return await self._one("small", self.create)

    async def roomy(self) -> Box:
        """The control of limits."""
        return await self._one("roomy", lambda: self.create(limits=ROOMY))

    async def own_kernel(self) -> bool:
        """Whether a sandbox has a kernel of its own, as declared *and* as it shows: what that lets in is no door of the host's."""

        async def ask() -> bool:
            told = await (await self.held()).ask("import json, os; print(json.dumps(dict(enumerate(os.uname()))))")
            return bool(told["2"] != os.uname().release)

        return self.info.security_level >= 2 and bool(await self.once("own kernel", ask))

    async def sees_programs(self) -> bool:
        """Whether the host lists what runs in these sandboxes, by its command line: looked for once, as it takes a while to be sure."""

        async def look() -> bool:
            box, marker = await self.held(), f"corral-seen-{secrets.token_hex(8)}"
            exec_id = await box.start_python("import time; time.sleep(600)", marker)
            try:
                await box.works()  # one that was started after it has ended
                return await eventually(lambda: marked(marker), 2.0)
            finally:
                await box.end(exec_id)

        return bool(await self.once("sees programs", look))

    async def once(self, name: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """An answer that several attacks read."""
        if name not in self._memo:
            self._memo[name] = await make()
        return self._memo[name]

    async def let_go(self, *names: str) -> None:
        """End shared sandboxes that nobody needs any more."""
        for name in names or tuple(self._shared):
            box = self._shared.pop(name, None)
            if box is not None:
                await box.destroy()

    async def close(self) -> None:
        """End what there is, whatever of it fails."""
        if self._opening is None:
            return
        await asyncio.wait([self._opening])
        try:
            for instance_id in await self.node.instances():
                with contextlib.suppress(CorralError):  # `gc` tries once more
                    await self.node.destroy(instance_id, "certify")
            await self.node.gc()
        finally:
            await self.node.close()

    # -- the bare host ---------------------------------------------------------------------------------------------------------
    def _host_python(self) -> list[str]:
        inside = "/.corral"
        return [
            self.stage.interpreter + word[len(inside) :] if word.startswith(inside) else word
            for word in self.stage.python
        ]

    def host_command(self, code: str, *arguments: str, who: str) -> tuple[list[str], dict[str, Any]]:
        """Command and options of a plain child: `self` (this user), `user` (no root) or `root`."""
        options: dict[str, Any] = {
            "cwd": "/",
            "env": {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            "start_new_session": True,
        }
        if who == "user" and self.root:
            options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        apart = APART if self.root and who != "user" else ""
        return [*self._host_python(), "-c", apart + code, *arguments], options

    async def outside(self, code: str, *arguments: str, who: str = "self", stdin: bytes = b"") -> dict[str, Any] | None:
        """What the program tells as a plain child of the host; None where it does not run there."""
        if not self.stage.python:
            await self.held()
        if who == "root" and not self.root:
            return None
        command, options = self.host_command(code, *arguments, who=who)

        def run() -> dict[str, Any] | None:
            try:
                done = subprocess.run(command, input=stdin, capture_output=True, timeout=60, **options)
                answers: dict[str, Any] | None = json.loads(done.stdout) if done.returncode == 0 else None
            except (OSError, ValueError, subprocess.SubprocessError):
                return None
            return answers

        return await asyncio.to_thread(run)


class Canaries:
    """What must not be reached from inside: a file, services and a process of the host. Open to everybody who can reach them."""

    def __init__(self) -> None:
        self.word = f"canary-{secrets.token_hex(16)}"
        # Everybody may write beside the file, as the attack does: so the name of that directory is known to nobody else. The one
        # above can be listed by us alone, and /proc/net/unix, which tells everybody where sockets are, names only that one.
        self._above = Path(tempfile.mkdtemp(prefix="corral-canary-"))
        self._above.chmod(0o711)
        self.place = self._above / secrets.token_hex(16)
        self.place.mkdir()
        self.file = self.place / "file"
        self.targets: list[list[Any]] = []
        self._servers: list[asyncio.Server] = []
        self._letters: list[asyncio.DatagramTransport] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        with open(create(self.file), "w", encoding="utf-8") as file:
            file.write(self.word)
            os.fchmod(file.fileno(), 0o666)
            self._inode = os.fstat(file.fileno()).st_ino
        self.place.chmod(0o777)

    def untouched(self) -> bool:
        """The file is the one that it was, as it was, and alone."""
        try:
            with open(os.open(self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                same = os.fstat(file.fileno()).st_ino == self._inode and file.read() == self.word.encode()
            return same and os.listdir(self.place) == ["file"]
        except OSError:
            return False

    async def listen(self) -> list[list[Any]]:
        """Services on loopback of both families, the host's own address, an abstract name and a path; -> `[kind, where, port?]`."""
        if self.targets:
            return self.targets
        addresses = ["127.0.0.1", "::1", *_own_address()]
        for address in addresses:
            with contextlib.suppress(OSError):
                server = await asyncio.start_server(_greet, address, 0)
                self._servers.append(server)
                self.targets.append(["tcp", address, server.sockets[0].getsockname()[1]])
            with contextlib.suppress(OSError):
                loop = asyncio.get_running_loop()
                letters, _ = await loop.create_datagram_endpoint(_Echo, local_addr=(address, 0))
                self._letters.append(letters)
                self.targets.append(["udp", address, letters.get_extra_info("sockname")[1]])
        name = f"corral-canary-{secrets.token_hex(6)}"
        self._servers.append(await asyncio.start_unix_server(_greet, "\0" + name))
        self.targets.append(["abstract", name])
        path = str(self._above / "socket")
        self._servers.append(await asyncio.start_unix_server(_greet, path))
        os.chmod(path, 0o666)  # noqa: S103
        self.targets.append(["path", path])
        return self.targets

    def process(self, marker: str) -> subprocess.Popen[bytes]:
        """A process of this user whose command line holds the marker."""
        code = "import sys, time; time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", code, marker], cwd="/", start_new_session=True)
        self._processes.append(child)
        return child

    async def close(self) -> None:
        for child in self._processes:
            child.kill()
            child.wait()
        for server in self._servers:
            server.close()
        for letters in self._letters:
            letters.close()
        shutil.rmtree(self._above, ignore_errors=True)


def create(path: Path) -> int:
    """A new file, open for writing: never one that is there, nor where a link leads."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def unlisted(code: str, *arguments: str) -> tuple[str, bytes]:
    """The program, and what it reads from standard input in place of arguments, which every user of the host could read."""
    return f"import json, sys\nsys.argv[1:] = json.loads(sys.stdin.readline())\n{code}", json.dumps(arguments).encode()


def _own_address() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return [str(probe.getsockname()[0])]
        except OSError:
            return []


async def _greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.write(b"!")
        await writer.drain()
    writer.close()


class _Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.transport.sendto(b"!", addr)


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status of a host process; empty when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def marked(marker: str) -> list[int]:
    """Live host processes whose command line holds the marker; not this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if marker.encode() in line and state not in "ZX":
                    found.append(int(entry.name))
    return found


async def eventually(condition: Callable[[], Any], within_s: float = 15.0) -> bool:
    """Whether the condition comes true in time."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True
