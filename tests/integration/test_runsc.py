"""runsc: what only gVisor has. Its sockets are out of reach, a hit of its memory limit is told, and memory goes on in copies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corral import faults
from corral.adapters.runtimes.bubblewrap import BubblewrapRuntime
from corral.adapters.runtimes.runsc import RunscRuntime
from corral.domain.facts import ExecFacts
from corral.domain.fence import Fence
from corral.domain.ids import new_id
from corral.domain.limits import MIB, Limits
from corral.errors import CorralError
from corral.node import snapshots
from corral.node.interpreter import PYTHON_ARGV
from corral.node.service import LocalNode
from corral.node.templates import Template
from corral.ports.node import CreateInstance, ExecSpec

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="runsc is used by root only"),
    pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc is not installed"),
    pytest.mark.skipif(shutil.which("busybox") is None, reason="the rootfs of these tests is a static busybox"),
]
LIMITS = Limits(memory_bytes=256 * MIB, disk_bytes=32 * MIB, inodes=1000, tmp_bytes=8 * MIB, pids=32, wall_s=60)


def fresh(prefix: str) -> str:
    return new_id(prefix, time.time_ns() // 1_000_000, secrets.token_bytes(10))


def make_rootfs(path: Path) -> None:
    places = "bin dev etc home/sandbox proc root run/user/1000 sys tmp usr/bin var/tmp workspace .corral"
    for name in places.split():
        (path / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(str(shutil.which("busybox")), path / "bin/busybox")
    for name in ("sh", "cat", "true", "sleep", "date", "df", "ls"):
        (path / "bin" / name).symlink_to("busybox")
    (path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000::/home/sandbox:/bin/sh\n")
    (path / "etc/group").write_text("root:x:0:\nsandbox:x:1000:\n")


class OneTemplate:
    digest = "sha256:busybox"

    def __init__(self, path: Path) -> None:
        self.path = path

    async def ensure(self, name: str, progress: Any = None) -> Template:
        return Template(name, self.digest, str(self.path), ())

    def describe(self) -> list[dict[str, Any]]:
        return []

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        yield

    def unfinished(self) -> list[Path]:
        return []

    def remove_unfinished(self) -> int:
        return 0


class Host:
    """A node on a state directory, and fences by instance."""

    def __init__(self, state: Path, installation: str | None = None) -> None:
        self.state = state
        self.installation = installation or f"rs{secrets.token_hex(4)}"
        self.templates = OneTemplate(state / "rootfs")
        self.fences: dict[str, Fence] = {}
        self.node: LocalNode

    async def open(self) -> None:
        runtimes: dict[str, Any] = {
            "runsc": RunscRuntime(str(self.state), installation_id=self.installation),
            "bubblewrap": BubblewrapRuntime(str(self.state), installation_id=self.installation),
        }
        templates: Any = self.templates
        self.node = LocalNode(str(self.state), runtimes, templates, node_id="n", installation_id=self.installation)
        await self.node.open()

    def request(self, incarnation: int = 1, instance: str | None = None, **changes: Any) -> CreateInstance:
        instance = instance or fresh("ins")
        fence = self.fences[instance] = Fence(incarnation, 1)
        made = CreateInstance(instance, fresh("sbx"), incarnation, fence, "runsc", "busybox", LIMITS, 600.0)
        return replace(made, **changes)

    async def create(self, **changes: Any) -> str:
        return (await self.node.create(self.request(**changes))).instance_id

    async def run(self, instance: str, *argv: str, **spec: Any) -> tuple[ExecFacts, bytes]:
        exec_id = fresh("exe")
        await self.node.start_exec(instance, self.fences[instance], ExecSpec(exec_id, argv, **spec))
        facts = await self.node.wait_exec(exec_id)
        return facts, b"".join([piece async for piece in self.node.kept_output(exec_id, "stdout")])

    async def python(self, instance: str, code: str, **spec: Any) -> tuple[ExecFacts, bytes]:
        return await self.run(instance, *PYTHON_ARGV, "-c", code, **spec)

    def workspace(self, instance: str) -> Path:
        return Path(self.node._bodies[instance].tree.path) / "workspace"


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    # Closed to every other id, as below root's home.
    path = Path(tempfile.mkdtemp(prefix="corral-runsc-"))
    make_rootfs(path / "rootfs")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def null_device() -> Iterator[None]:
    """Whatever is started, saved and restored: the device of the host that every program has open stays what it is."""

    def shown() -> tuple[int, int, int, int]:
        found = os.stat("/dev/null")
        return found.st_uid, found.st_gid, found.st_mode, found.st_rdev

    before = shown()
    yield
    assert shown() == before


@pytest.fixture
async def host(state: Path) -> AsyncIterator[Host]:
    made = Host(state)
    await made.open()
    info = next(one for one in await made.node.runtimes() if one.name == "runsc")
    if not info.usable:
        await made.node.close()
        pytest.skip(f"runsc: {info.reason}")
    yield made
    await settled(made)


async def settled(made: Host) -> None:
    """End all, close, and see that nothing is left."""
    state = made.state
    await asyncio.gather(*(made.node.destroy(one, "test") for one in await made.node.instances()))
    left = await made.node.leftovers()
    await made.node.close()
    assert [item for item in left if item["kind"] != "spool"] == []
    assert str(state) not in Path("/proc/self/mountinfo").read_text()
    for path in (state / "i").iterdir():
        raise AssertionError(f"{path} is left")
    for path in (state / "spool").iterdir():
        shutil.rmtree(path)


async def eventually(condition: Any, what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        await asyncio.sleep(0.05)


# -- the boundary -----------------------------------------------------------------------------------------------------


def reach(name: str, uid: int) -> str:
    """What a process of the host with this uid gets from an abstract socket."""
    code = "import os, socket, sys\nos.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))\n"
    code += "socket.socket(socket.AF_UNIX).connect(chr(0) + sys.argv[1] + chr(0))"
    done = subprocess.run([sys.executable, "-c", code, name, str(uid)], capture_output=True, text=True, timeout=60)
    return "connected" if done.returncode == 0 else done.stderr.strip().rsplit("\n", 1)[-1].partition(":")[0]


async def test_no_user_of_the_host_reaches_the_control_socket_and_no_id_is_shared(host: Host) -> None:
    ins = await host.create()
    for uid in (0, 54321):
        assert await asyncio.to_thread(reach, f"runsc-sandbox.{ins}", uid) == "ConnectionRefusedError"
    # The look can fail: the socket is there, in the network namespace that the instance's place keeps.
    listed = subprocess.run(
        ["nsenter", f"--net={state_of(host, ins)}/m/net", "--", "cat", "/proc/net/unix"],
        capture_output=True,
        check=True,
    )
    assert f"@runsc-sandbox.{ins}@".encode() in listed.stdout
    body = host.node._bodies[ins]
    owners = set()
    for pid in await body.runtime.processes(body.ref):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        owners.update(line for line in lines if line.startswith(("Uid:", "Gid:")))
        assert Path(f"/proc/{pid}/uid_map").read_text().split()[0:2] != ["0", "0"]
    ids = {int(word) for line in owners for word in line.split()[1:]}
    first = body.tree.uid - 1000
    assert ids and all(first <= one < first + 65536 for one in ids), ids


WRAPPER = """#!/bin/sh
place=/run/corral/i/rec
for word; do [ "$word" = checkpoint ] && place=/run/corral/i/saved; done
{ cat /proc/self/uid_map; readlink /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2; } >$place/who
exec %s "$@"
"""


def seen_by_runsc(path: Path) -> tuple[int, list[str]]:
    """(host id that is 0 where it ran, what its standard streams are)"""
    first, *streams = path.read_text().splitlines()
    inside, outside, _ = (int(word) for word in first.split())
    assert inside == 0
    return outside, streams


async def test_runsc_is_nobody_on_the_host_whatever_it_does_and_has_no_device_as_stream(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="corral-runsc-wrapper-") as name:
        os.chmod(name, 0o755)
        wrapper = Path(name) / "runsc"
        wrapper.write_text(WRAPPER % shutil.which("runsc"))
        wrapper.chmod(0o755)
        monkeypatch.setattr(RunscRuntime, "_program", lambda _: str(wrapper))
        ins = await host.create()
        image = tmp_path / "image"
        base = host.node._bodies[ins].tree.uid - 1000
        told = [(base, seen_by_runsc(state_of(host, ins) / "m/rec/who"))]
        written, seen = state_of(host, ins) / "saved/who", tmp_path / "who"

        def take_aside() -> None:  # what is no file of a memory would end the snapshot
            shutil.move(written, seen)

        faults.arm("runtime.checkpoint.memory", take_aside)
        try:
            assert (await host.node.checkpoint_instance(ins, host.fences[ins], str(image))).clean
        finally:
            faults.arm("runtime.checkpoint.memory", None)
        told.append((base, seen_by_runsc(seen)))
        request = host.request(2)
        await host.node.restore_instance(request, str(image))
        base = host.node._bodies[request.instance_id].tree.uid - 1000
        told.append((base, seen_by_runsc(state_of(host, request.instance_id) / "m/rec/who")))
    for base, (zero, streams) in told:
        assert zero == base > 65536
        assert streams and not [one for one in streams if one.startswith("/dev/")], streams
    for path in image.iterdir():
        assert (path.stat().st_uid, path.stat().st_mode & 0o077) == (0, 0) or path.name == snapshots.MANIFEST, path


TABLE = """
import json, os
seen, words = {}, b""
for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
    try:
        if os.stat(f"/proc/{pid}").st_uid == 1000 and pid != os.readlink("/proc/self"):
            continue  # another program
    except OSError:
        continue  # it has ended
    seen[pid] = []
    for name in ("environ", "maps", "auxv", "cmdline", "status", "stat", "fd"):
        try:
            path = f"/proc/{pid}/{name}"
            content = b"" if name == "fd" and os.listdir(path) else open(path, "rb").read()
            seen[pid].append(name)
            words += content if name == "environ" and pid != os.readlink("/proc/self") else b""
        except OSError:
            pass
own = seen.pop(os.readlink("/proc/self"))
covers = [line.split()[1] for line in open("/proc/mounts") if line.split()[1].startswith("/proc/")]
# A fork of the guest that waits to become the next program is below a supervisor that is covered: its parent is not told.
waiting = [pid for pid in seen if "stat" in seen[pid]]
print(json.dumps({"own": len(own), "covered": [pid for pid in seen if not seen[pid]], "waiting": len(waiting),
    "words": words.decode(), "covers": len(covers)}))
"""


async def test_a_program_sees_of_the_guest_and_supervisors_their_numbers_only_however_many_there_were(
    host: Host, tmp_path: Path
) -> None:
    async def look(instance: str) -> dict[str, Any]:
        facts, out = await host.python(instance, TABLE)
        assert facts.exit_code == 0, facts
        found: dict[str, Any] = json.loads(out)
        assert found["own"] == 7, "what is looked for is there"
        assert "1" in found["covered"] and set(found["words"].split("\0")) <= {"", "HOME=/root"}, found
        assert found["waiting"] <= 2, "who waits to become the next program"
        return found

    ins = await host.create()
    await look(ins)
    for _ in range(8):  # each with a supervisor of its own, which goes with what it has left behind
        await host.run(ins, "sh", "-c", "sleep 0.05 &")
    facts, _ = await host.run(ins, "sh", "-c", "sleep 1000 & true", background="kill")
    assert facts.exit_code == 0

    async def few() -> bool:
        # The guest, the supervisor of this look and the one that stands by: what covered the others went with them.
        return (await look(ins))["covers"] <= 3

    until = time.monotonic() + 60
    while not await few():
        assert time.monotonic() < until, "covers of supervisors that are gone stay"
    image = str(tmp_path / "image")
    assert (await host.node.checkpoint_instance(ins, host.fences[ins], image)).clean
    request = host.request(2)
    await host.node.restore_instance(request, image)
    await look(request.instance_id)


ORPHANS = """
import asyncio, ctypes, os, sys
from pathlib import Path
from tests.integration.test_runsc import Host, settled
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # as PID 1 of a container: orphans are ours
def children():
    found = []
    for thread in os.listdir("/proc/self/task"):
        found += Path(f"/proc/self/task/{thread}/children").read_text().split()
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in found]
async def main():
    host = Host(Path(sys.argv[1]))
    await host.open()
    came = 0
    for _ in range(int(sys.argv[2])):
        ins = await host.create()
        await host.run(ins, "sh", "-c", "sleep 1000 & sleep 1000 & true")
        came += len(children())
        await host.node.destroy(ins, "test")
    print(came, children().count("Z"), flush=True)
    await settled(host)
asyncio.run(main())
"""


async def in_another_process(code: str, *arguments: str, **environment: str) -> tuple[int | None, str, str]:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )
    out, err = await asyncio.wait_for(child.communicate(), 180)
    return child.returncode, out.decode(), err.decode()


@pytest.mark.skipif(not Path(f"/proc/self/task/{os.getpid()}/children").exists(), reason="the kernel lists no children")
async def test_who_inherits_orphans_keeps_no_dead_process_of_a_sandbox(state: Path) -> None:
    status, out, err = await in_another_process(ORPHANS, str(state), "5")
    assert status == 0, err
    came, dead = (int(word) for word in out.split())
    assert came >= 5, "sandboxes are children of who made them here"
    assert dead == 0


def state_of(host: Host, instance: str) -> Path:
    return Path(host.node._bodies[instance].ref.directory)


async def test_a_hit_of_the_memory_limit_is_told_and_the_sandbox_is_lost(host: Host) -> None:
    ins = await host.create(limits=replace(LIMITS, memory_bytes=128 * MIB))
    facts, _ = await host.python(ins, "x = bytearray(b'x') * (400 << 20)\nprint(len(x))")
    assert facts.sandbox_lost and (facts.exit_code, facts.signal, facts.ended_by) == (None, None, None)
    assert (facts.usage.oom_kills or 0) >= 1
    assert facts.usage.pids_limit_hits is None and facts.usage.peak_pids is None
    assert await asyncio.wait_for(host.node.lost(), 30) == ins
    with pytest.raises(CorralError) as caught:
        await host.run(ins, "true")
    assert caught.value.code == "sandbox_lost"


async def test_a_node_that_comes_later_goes_on_with_it(host: Host) -> None:
    ins = await host.create()
    exec_id = fresh("exe")
    code = "import time\nprint('begun', flush=True)\nwhile not __import__('os').path.exists('go'): time.sleep(0.05)\nprint('你好')"
    await host.node.start_exec(ins, host.fences[ins], ExecSpec(exec_id, (*PYTHON_ARGV, "-c", code)))
    async for chunk in host.node.stream_exec(exec_id):
        assert getattr(chunk, "data", b"") == b"begun\n"
        break
    await host.node.close()
    await host.open()
    await host.node.put_files(ins, host.fences[ins], [("go", 0o644, b"")])
    facts = await asyncio.wait_for(host.node.wait_exec(exec_id), 60)
    assert facts.exit_code == 0
    assert b"".join([piece async for piece in host.node.kept_output(exec_id, "stdout")]) == "begun\n你好\n".encode()


# -- memory -----------------------------------------------------------------------------------------------------------

# Left behind by its exec: what it knows is in its memory only, and it tells it every 20 ms.
RESIDENT = """
import json, os, random, sys, time
if os.fork():
    os._exit(0)
os.setsid()
for fd in (0, 1, 2):
    os.close(fd)
def read(path):
    return open(path).read() if os.path.exists(path) else None
secret, generator, drawn, beats = os.urandom(8).hex(), random.Random(os.urandom(8)), None, 0
last, backwards, longest = time.monotonic(), 0, 0.0
while True:
    beats += 1
    now = time.monotonic()
    backwards += now < last
    longest, last = max(longest, now - last), now
    value = read("/workspace/set")
    if value is not None and drawn is None:
        drawn = generator.random()
    with open("/workspace/.told", "w") as file:
        json.dump({"secret": secret, "fresh": os.urandom(8).hex(), "drawn": drawn, "value": value, "beats": beats,
            "tmp": read("/tmp/note"), "wall": time.time(), "monotonic": now, "longest": longest, "backwards": backwards}, file)
    os.rename("/workspace/.told", "/workspace/told")
    time.sleep(0.02)
"""
WHO = """
import json, os, random, time
print(json.dumps({"urandom": open("/dev/urandom", "rb").read(16).hex(), "getrandom": os.urandom(16).hex(), "seeded": random.random(),
    "wall": time.time(), "note": open("/tmp/note").read()}))
"""


def told(host: Host, instance: str) -> dict[str, Any]:
    until = time.monotonic() + 60
    while True:
        with contextlib.suppress(FileNotFoundError, ValueError):
            found: dict[str, Any] = json.loads((host.workspace(instance) / "told").read_text())
            return found
        assert time.monotonic() < until, "the background process tells nothing"
        time.sleep(0.05)


async def test_the_original_and_three_forks_of_one_memory_go_on_apart(host: Host, tmp_path: Path) -> None:
    ins = await host.create()
    facts, _ = await host.run(ins, "sh", "-c", "echo 记住 >/tmp/note; echo kept >file")
    assert facts.exit_code == 0
    facts, _ = await host.python(ins, RESIDENT)
    assert facts.exit_code == 0
    before = await asyncio.to_thread(told, host, ins)
    await host.node.close()
    await host.open()  # a node that comes later can save it as well as the one that made it
    image = str(tmp_path / "image")
    old = host.fences[ins]
    evidence = await host.node.checkpoint_instance(ins, old, image)
    assert evidence.clean, evidence
    assert await host.node.instances() == []
    assert os.stat(image).st_mode & 0o777 == 0o700
    snapshot = snapshots.read(image)
    assert (snapshot.instance_id, snapshot.runtime, snapshot.limits) == (ins, "runsc", LIMITS)

    # The original under its own id, and three forks, all at once.
    requests = [host.request(2, instance=ins), *(host.request(2) for _ in range(3))]
    reports = await asyncio.gather(*(host.node.restore_instance(request, image) for request in requests))
    names = [report.instance_id for report in reports]
    assert names == [request.instance_id for request in requests]
    bodies = [host.node._bodies[name] for name in names]
    assert len({body.ref.data["init"]["pid"] for body in bodies}) == 4

    # Identity: each guest is the instance and obeys the fence of its own request, and no older one; so it tells a node that comes later.
    ranges = {body.tree.uid for body in bodies}
    assert len(ranges) == 4
    await host.node.close()
    await host.open()
    for name in names:
        body = host.node._bodies[name]
        hello = (await body.client()).hello
        assert (hello.instance_id, hello.floor, hello.quiet) == (name, Fence(2, 1), False)
        assert body.floor == Fence(2, 1) == host.fences[name]
        with pytest.raises(CorralError) as caught:
            await host.node.start_exec(name, old, ExecSpec(fresh("exe"), ("true",)))
        assert caught.value.code == "lease_lost"
        assert {body.tree.uid} <= ranges

    # What ran goes on, with what it knew; entropy differs; the wall clock is the host's.
    answers = []
    for name in names:
        facts, out = await host.python(name, WHO)
        assert facts.exit_code == 0
        answers.append(json.loads(out))
    now = time.time()
    for answer in answers:
        assert answer["note"] == "记住\n"
        assert now - 60 < answer["wall"] <= now
    for source in ("urandom", "getrandom", "seeded"):
        assert len({answer[source] for answer in answers}) == 4, source
    for number, name in enumerate(names):
        await host.node.put_files(name, host.fences[name], [("set", 0o644, f"only {number}".encode())])
    for number, name in enumerate(names):
        await eventually(lambda n=name, k=number: told(host, n)["value"] == f"only {k}", "it hears what it is told")
    last = [told(host, name) for name in names]
    for name, now_told in zip(names, last, strict=True):
        assert now_told["secret"] == before["secret"] and now_told["beats"] > before["beats"]
        assert (host.workspace(name) / "file").read_text() == "kept\n"
        assert abs(now_told["wall"] - time.time()) < 60
        # No timer that ran is missed or comes early: it went on by as much as the clock on the wall.
        assert now_told["backwards"] == 0
        passed = now_told["monotonic"] - before["monotonic"]
        assert passed > 0 and abs(passed - (now_told["wall"] - before["wall"])) < 5, (passed, before, now_told)
    # What it asks the kernel for is each one's own; what it makes of what it remembers is the same in all: nobody tells it that it was copied.
    assert len({one["fresh"] for one in last}) == 4
    assert len({one["drawn"] for one in last}) == 1 and last[0]["drawn"] is not None

    # The parent and the files go; the forks stay, each alone.
    assert (await host.node.destroy(ins, "test")).clean
    shutil.rmtree(image)
    assert (await host.node.destroy(names[1], "test")).clean
    beats = told(host, names[2])["beats"]
    await eventually(lambda: told(host, names[2])["beats"] > beats, "a fork goes on without its parent")
    facts, out = await host.run(names[3], "cat", "file")
    assert (facts.exit_code, out) == (0, b"kept\n")


async def test_what_cannot_be_saved_or_restored_is_refused_and_leaves_the_rest(host: Host, tmp_path: Path) -> None:
    ins = await host.create()
    exec_id = fresh("exe")
    await host.node.start_exec(ins, host.fences[ins], ExecSpec(exec_id, ("sleep", "1000")))
    image = str(tmp_path / "image")

    async def refused(code: str, call: Any) -> None:
        with pytest.raises(CorralError) as caught:
            await call
        assert caught.value.code == code, caught.value

    await refused("lease_lost", host.node.checkpoint_instance(ins, Fence(0, 9), image))
    await refused("illegal_transition", host.node.checkpoint_instance(ins, host.fences[ins], image))
    await host.node.end_exec(exec_id, "cancelled")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    await refused("conflict", host.node.checkpoint_instance(ins, host.fences[ins], str(tmp_path / "full")))
    facts, _ = await host.run(ins, "true")
    assert facts.exit_code == 0

    weak = await host.create(runtime="bubblewrap")
    await refused("not_supported_yet", host.node.checkpoint_instance(weak, host.fences[weak], image))
    facts, _ = await host.run(weak, "true")
    assert facts.exit_code == 0

    (tmp_path / "empty").mkdir()
    await refused("not_found", host.node.restore_instance(host.request(), str(tmp_path / "empty")))
    assert (await host.node.checkpoint_instance(ins, host.fences[ins], image)).clean
    larger = replace(LIMITS, memory_bytes=2 * LIMITS.memory_bytes)
    await refused("conflict", host.node.restore_instance(host.request(2, limits=larger), image))
    await refused("conflict", host.node.restore_instance(host.request(2, seccomp="debug"), image))
    host.templates.digest = "sha256:another"
    await refused("conflict", host.node.restore_instance(host.request(2), image))
    host.templates.digest = OneTemplate.digest
    Path(image, "checkpoint.img").write_bytes(b"not a memory")
    await refused("infra_error", host.node.restore_instance(host.request(2), image))
    assert await host.node.instances() == [weak]


# -- deaths in the middle ---------------------------------------------------------------------------------------------

DYING = """
import asyncio, sys
from pathlib import Path
from tests.integration.test_runsc import Host
async def main():
    host = Host(Path(sys.argv[1]), sys.argv[2])
    await host.open()
    ins = await host.create()
    facts, _ = await host.run(ins, "sh", "-c", "echo kept >file")
    print(ins, facts.exit_code, flush=True)
    await host.node.checkpoint_instance(ins, host.fences[ins], sys.argv[3])
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def crash_state() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="corral-runsc-"))
    make_rootfs(path / "rootfs")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize(
    ("point", "then"),
    [
        ("node.checkpoint.begun", "goes on"),
        ("node.checkpoint.quiet", "goes on"),
        ("node.checkpoint.condemned", "is gone"),
        ("runtime.checkpoint.memory", "is gone"),
        ("runtime.checkpoint.moved", "is gone"),
        ("node.checkpoint.synced", "is gone"),
        ("node.checkpoint.written", "is a snapshot"),
        ("runtime.destroy.stopped", "is a snapshot"),
    ],
)
async def test_after_a_death_at_any_moment_there_is_an_instance_or_a_whole_snapshot_or_neither(
    host: Host, crash_state: Path, tmp_path: Path, point: str, then: str
) -> None:
    image, installation = tmp_path / "image", f"rs{secrets.token_hex(4)}"
    status, out, err = await in_another_process(
        *(DYING, str(crash_state), installation, str(image)), CORRAL_FAULT_POINTS=f"{point}=kill"
    )
    assert status == -9, (status, err)
    ins, exit_code = out.split()
    assert exit_code == "0"
    later = Host(crash_state, installation)
    await later.open()
    try:
        if then == "goes on":
            assert await later.node.instances() == [ins]
            assert not image.exists()
            later.fences[ins] = Fence(1, 1)
            facts, said = await later.run(ins, "cat", "file")
            assert (facts.exit_code, said) == (0, b"kept\n")
            return
        assert await later.node.instances() == []
        if then == "is gone":
            assert not image.exists()
            return
        assert snapshots.read(str(image)).instance_id == ins
        request = later.request(2)
        await later.node.restore_instance(request, str(image))
        facts, said = await later.run(request.instance_id, "cat", "file")
        assert (facts.exit_code, said) == (0, b"kept\n")
    finally:
        assert (await later.node.gc())["failed"] == 0
        await settled(later)
