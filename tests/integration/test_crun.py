"""crun on this host: what an instance is like inside, that its limits hold, and that nothing of it stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from corral import faults
from corral.adapters.runtimes import oci
from corral.adapters.runtimes.crun import CrunRuntime
from corral.domain.limits import MIB, Limits
from corral.errors import CorralError
from corral.linux import cgroups, mounts, process, userns
from corral.linux.process import ProcessRef
from corral.node.interpreter import PYTHON_ARGV, ensure_interpreter
from corral.ports.runtime import Instance, InstanceSpec

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("crun") is None, reason="crun is not installed"),
]

INSTALLATION = f"crun-test-{os.getpid()}"
SMALL = Limits(memory_bytes=128 * MIB, pids=40, disk_bytes=16 * MIB, inodes=500, tmp_bytes=4 * MIB)

# PID 1 of these tests: runs what comes over the control socket as uid 1000 (or as itself) and answers with its result.
GUEST = f"""
import json, os, signal, socket, subprocess, sys, threading
listener = socket.socket(fileno=int(sys.argv[sys.argv.index("--control-fd") + 1]))
VICTIM = "with open('/proc/self/oom_score_adj', 'w') as file: file.write('500')\\n"
def serve(connection):
    request = json.loads(connection.makefile().readline())
    ids = dict(user=1000, group=1000, extra_groups=[]) if request["drop"] else {{}}
    done = subprocess.run([*{PYTHON_ARGV!r}, "-c", VICTIM + request["code"]], stdin=subprocess.DEVNULL,
                          capture_output=True, cwd="/", **ids)
    answer = [done.returncode, done.stdout.decode(), done.stderr.decode()]
    connection.sendall(json.dumps(answer).encode() + b"\\n")
    connection.close()
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],)).start()
"""


@dataclass
class Host:
    """One state directory with a runtime; makes instances and knows what belongs to them."""

    state: str
    interpreter: str
    rootfs: str
    runtime: CrunRuntime
    made: list[Any] = field(default_factory=list)

    def spec(self, limits: Limits = SMALL, **changes: Any) -> InstanceSpec:
        instance_id = f"ins_{secrets.token_hex(8)}"
        directory = f"{self.state}/i/{instance_id}"
        os.makedirs(directory, 0o711)
        spec = InstanceSpec(
            instance_id=instance_id,
            sandbox_id="sbx_test",
            incarnation=1,
            installation_id=INSTALLATION,
            directory=directory,
            rootfs=self.rootfs,
            interpreter=self.interpreter,
            guest_argv=(*PYTHON_ARGV, "-c", GUEST),
            limits=limits,
        )
        return replace(spec, **changes)

    async def create(self, spec: InstanceSpec) -> Instance:
        self.made.append(self.runtime.partial_ref(spec.directory, spec.instance_id))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{spec.directory}/s")
        with socket.socket(socket.AF_UNIX) as control:
            with at(spec.directory) as path:
                control.bind(path)
            control.listen()
            return await self.runtime.create(spec, control)

    def traces(self, instance_id: str) -> list[str]:
        """Everything on this host that still belongs to an instance, looked up without the runtime's help."""
        directory = f"{self.state}/i/{instance_id}"
        found = [f"mount {point}" for point in mounts.mounts_below(directory)]
        found += [f"loop {device}" for device in mounts.loops_below(directory)]
        for top, names, _ in os.walk("/sys/fs/cgroup"):
            found += [f"cgroup {top}/{name}" for name in names if name == instance_id]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/cgroup").read_text() + Path(f"/proc/{pid}/mountinfo").read_text()
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if f"/{instance_id}" in text or instance_id.encode() in words:
                    found.append(f"process {pid} {words!r}")
        if os.path.lexists(f"{self.state}/node/crun/{instance_id}"):
            found.append("crun's record")
        if userns.SubordinateRange(INSTALLATION, state_dir=self.state).find(instance_id) is not None:
            found.append("id range")
        if os.path.lexists(directory):
            found.append(f"directory {os.listdir(directory)}")
        return found


@contextlib.contextmanager
def at(directory: str) -> Iterator[str]:
    """A short path of the control socket, whatever the length of the directory's."""
    fd = os.open(directory, os.O_PATH)
    try:
        yield f"/proc/self/fd/{fd}/s"
    finally:
        os.close(fd)


async def inside(instance: Instance, code: str, *, drop: bool = True, timeout: float = 60) -> tuple[int, str, str]:
    """Run Python code in the instance as the exec's user (`drop`) or as the guest itself."""

    def ask() -> tuple[int, str, str]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout)
            with at(instance.ref.directory) as path:
                connection.connect(path)
            connection.sendall(json.dumps({"code": code, "drop": drop}).encode() + b"\n")
            line = connection.makefile().readline()
        assert line, Path(f"{instance.tree.path}/guest.log").read_text()
        status, out, err = json.loads(line)
        return status, out, err

    return await asyncio.to_thread(ask)


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(ensure_interpreter(tmp_path_factory.mktemp("interpreter")))


@pytest.fixture
async def host(interpreter: str) -> AsyncIterator[Host]:
    # Closed to others, as a state directory below a user's own may be.
    state = tempfile.mkdtemp(prefix="corral-crun-")
    rootfs = f"{state}/base"
    for name in (".corral", "workspace", "home/sandbox", "tmp", "var/tmp", "dev", "proc", "run", "etc", "bin", "root"):
        os.makedirs(f"{rootfs}/{name}")
    Path(f"{rootfs}/etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nsandbox:x:1000:1000::/home/sandbox:/bin/sh\n")
    Path(f"{rootfs}/etc/secret").write_text("only for root\n")
    os.chmod(f"{rootfs}/etc/secret", 0o600)
    shutil.copy("/bin/busybox", f"{rootfs}/bin/busybox")
    runtime = CrunRuntime(state, installation_id=INSTALLATION)
    found = Host(state, interpreter, rootfs, runtime)
    try:
        yield found
    finally:
        left = []
        for ref in found.made:
            left += (await runtime.destroy(ref)).left
        assert left == []
        shutil.rmtree(state)


def init_of(instance: Instance) -> ProcessRef:
    return ProcessRef.from_json(instance.ref.data["init"])


async def test_exec_and_guest_have_two_ids_and_the_host_sees_neither_root_nor_1000(host: Host) -> None:
    instance = await host.create(host.spec())
    status, out, _ = await inside(
        instance,
        "import os; open('/workspace/f', 'w').write('文件'); print(os.getuid(), os.getgid(), os.getgroups(), os.getpid(),"
        " os.uname().nodename, os.stat('/workspace').st_uid, os.stat('/etc/passwd').st_uid)",
    )
    assert status == 0
    words = out.split()
    assert words[:3] == ["1000", "1000", "[]"]
    assert words[4:] == ["sandbox", "1000", "0"]
    written = os.stat(f"{instance.tree.path}/workspace/f")
    assert (written.st_uid, written.st_gid) == (instance.tree.uid, instance.tree.gid)
    assert instance.tree.uid >= 65536
    assert Path(f"{instance.tree.path}/workspace/f").read_text() == "文件"
    assert instance.guest_uid == 0 and instance.exec_uid == 1000 and not instance.same_uid
    assert userns.processes_of(instance.tree.uid - 1000) == [init_of(instance).pid]


async def test_nothing_of_the_host_is_inside(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "value")
    instance = await host.create(host.spec())
    code = (
        "import os, json; print(json.dumps([sorted(os.environ), sorted(os.listdir('/proc/self/fd')),"
        " sorted(p for p in os.listdir('/proc') if p.isdigit()).__len__(), open('/proc/net/dev').read().count(':'),"
        " os.listdir('/'), open('/proc/self/cgroup').read()]))"
    )
    status, out, err = await inside(instance, code, drop=False)
    assert status == 0, err
    environment, descriptors, processes, interfaces, top, groups = json.loads(out)
    assert environment == ["HOME", "LANG", "PATH"]
    assert len(descriptors) == 4, "0, 1, 2 and the listing itself"
    assert processes == 2
    assert interfaces == 1, "only lo"
    assert sorted(top) == sorted(os.listdir(host.rootfs))
    assert INSTALLATION not in groups


async def test_an_exec_cannot_do_what_only_the_guest_or_the_host_may(host: Host) -> None:
    instance = await host.create(host.spec())
    code = """
import ctypes, os, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, work):
    try:
        work()
    except OSError as error:
        return
    print("allowed:", name)
def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
tried("setuid", lambda: os.setuid(0))
tried("kill guest", lambda: os.kill(1, signal.SIGKILL))
tried("read secret", lambda: open("/etc/secret").read())
tried("write root", lambda: open("/new", "w"))
tried("write etc", lambda: open("/etc/passwd", "a"))
tried("guest environment", lambda: open("/proc/1/environ").read())
tried("guest memory", lambda: open("/proc/1/mem", "rb"))
tried("guest descriptors", lambda: os.listdir("/proc/1/fd"))
tried("user namespace", lambda: call("unshare", 0x10000000))
tried("mount", lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None))
tried("umount", lambda: call("umount2", b"/workspace", 2))
tried("chroot", lambda: os.chroot("/tmp"))
tried("device", lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0)))
tried("hostname", lambda: socket.sethostname("x"))
tried("sysctl", lambda: open("/proc/sys/kernel/hostname", "w"))
tried("sysrq", lambda: open("/proc/sysrq-trigger", "w"))
socket.socket().bind(("127.0.0.1", 80))
print("port 80")
"""
    assert await inside(instance, code) == (0, "port 80\n", "")


async def test_the_guest_has_three_capabilities_and_no_way_to_gain_any(host: Host) -> None:
    instance = await host.create(host.spec())
    _, out, _ = await inside(instance, "print(open('/proc/self/status').read())", drop=False)
    fields = dict(line.split(":\t", 1) for line in out.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {"00000000000000e0"}
    assert fields["CapAmb"] == fields["CapInh"] == "0" * 16
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


async def test_without_seccomp_a_user_namespace_can_be_made(host: Host) -> None:
    """Shows that the refusal above is the filter's work."""
    instance = await host.create(host.spec(unsafe=frozenset({"unsafe_no_seccomp"})))
    code = "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"
    assert (await inside(instance, code))[1] == "0\n"


async def test_one_uid_is_declared_as_such(host: Host) -> None:
    instance = await host.create(host.spec(unsafe=frozenset({"unsafe_one_uid"})))
    assert instance.same_uid and instance.guest_uid == 1000 and instance.tree.uid == 1000
    status, out, _ = await inside(instance, "import os; print(os.getuid(), os.stat('/workspace').st_uid)", drop=False)
    assert (status, out) == (0, "1000 1000\n")


async def test_memory_over_the_limit_kills_the_exec_and_leaves_the_guest(host: Host) -> None:
    instance = await host.create(host.spec())
    before = await host.runtime.stats(instance.ref)
    status, _, _ = await inside(instance, f"b = bytearray({4 * SMALL.memory_bytes})")
    after = await host.runtime.stats(instance.ref)
    assert status == -signal.SIGKILL
    assert before.oom_kills == 0 and after.oom_kills == 1
    assert after.peak_memory_bytes is not None and after.peak_memory_bytes <= SMALL.memory_bytes
    assert (await inside(instance, "print('alive')"))[1] == "alive\n"


async def test_a_peak_can_be_started_anew(host: Host) -> None:
    instance = await host.create(host.spec())
    await inside(instance, f"b = bytearray({40 * MIB})")
    high = (await host.runtime.stats(instance.ref)).peak_memory_bytes
    await host.runtime.reset_peaks(instance.ref)
    low = (await host.runtime.stats(instance.ref)).peak_memory_bytes
    assert high is not None and low is not None
    assert high >= 40 * MIB > low


async def test_processes_over_the_limit_are_refused_and_counted(host: Host) -> None:
    instance = await host.create(host.spec())
    code = f"""
import os, sys, time
made = 0
for _ in range({4 * SMALL.pids}):
    try:
        if os.fork() == 0:
            os.close(1); os.close(2); time.sleep(300); os._exit(0)
    except BlockingIOError:
        break
    made += 1
print(made)
"""
    _, out, _ = await inside(instance, code)
    assert 20 < int(out) < SMALL.pids
    stats = await host.runtime.stats(instance.ref)
    assert stats.pids_limit_hits is not None and stats.pids_limit_hits >= 1
    assert stats.pids is not None and stats.pids <= SMALL.pids
    assert len(await host.runtime.processes(instance.ref)) == int(out) + 1


FILL = """
import os
written = 0
try:
    with open({path!r}, "wb", buffering=0) as file:
        while written < {stop}:
            written += file.write(b"x" * 65536)
except OSError as error:
    print(error.errno)
print(os.stat({path!r}).st_size)
"""


async def test_disk_bytes_end_at_the_limit(host: Host) -> None:
    instance = await host.create(host.spec())
    for place in ("/workspace", "/home/sandbox", "/var/tmp"):
        _, out, err = await inside(instance, FILL.format(path=f"{place}/big", stop=4 * SMALL.disk_bytes))
        number, size = out.split()
        assert number == "28", err
        if place == "/workspace":
            assert 0.9 * SMALL.disk_bytes < int(size) <= SMALL.disk_bytes
            stats = await host.runtime.stats(instance.ref)
            assert stats.disk_bytes is not None and stats.disk_bytes >= int(size)
            assert stats.disk_free_bytes is not None and stats.disk_free_bytes < MIB
        else:
            assert int(size) < MIB, "one limit for all of the disk"


async def test_inodes_end_at_the_limit(host: Host) -> None:
    instance = await host.create(host.spec())
    code = f"""
made = 0
try:
    for made in range({4 * SMALL.inodes}):
        open(f"/workspace/{{made}}", "w").close()
except OSError as error:
    print(error.errno, made)
"""
    _, out, _ = await inside(instance, code)
    number, made = map(int, out.split())
    assert number == 28
    assert 0.9 * SMALL.inodes < made <= 1.1 * SMALL.inodes
    assert (await host.runtime.stats(instance.ref)).inodes_free == 0


async def test_every_tmpfs_is_limited_and_all_full_ones_together_leave_the_guest_alive(host: Host) -> None:
    instance = await host.create(host.spec())
    sizes = oci.TmpfsSizes.of(SMALL)
    for place, size, drop in (
        ("/tmp", sizes.tmp, True),
        ("/dev/shm", sizes.shm, True),
        ("/run/user/1000", sizes.user, True),
        ("/run", sizes.run, False),
    ):
        _, out, err = await inside(instance, FILL.format(path=f"{place}/big", stop=4 * size), drop=drop)
        assert out.split() == ["28", str(size)], (place, out, err)
    assert sizes.tmp == SMALL.tmp_bytes
    assert (await host.runtime.stats(instance.ref)).oom_kills == 0
    assert (await inside(instance, "print('alive')"))[1] == "alive\n"


def test_tmpfs_sizes_stay_below_half_of_memory() -> None:
    for memory in (8 * MIB, 64 * MIB, 512 * MIB, 8192 * MIB):
        for tmp in (MIB, 64 * MIB, 4096 * MIB):
            sizes = oci.TmpfsSizes.of(Limits(memory_bytes=memory, tmp_bytes=tmp))
            assert sizes.tmp + sizes.shm + sizes.run + sizes.user < memory / 2
            assert sizes.tmp <= memory // 4


async def test_files_of_inodes_in_tmp_are_limited(host: Host) -> None:
    instance = await host.create(host.spec())
    code = """
made = 0
try:
    for made in range(100000):
        open(f"/tmp/{made}", "w").close()
except OSError as error:
    print(error.errno, made)
"""
    _, out, _ = await inside(instance, code)
    assert out.split()[0] == "28"


async def test_cpu_time_is_held_at_the_quota(host: Host) -> None:
    instance = await host.create(host.spec(replace(SMALL, cpu=0.5)))
    code = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            pass
        os._exit(0)
for _ in range(2):
    os.wait()
"""
    before = (await host.runtime.stats(instance.ref)).cpu_seconds
    began = time.monotonic()
    await inside(instance, code)
    took = time.monotonic() - began
    after = (await host.runtime.stats(instance.ref)).cpu_seconds
    assert before is not None and after is not None
    assert after - before <= 0.5 * took * 1.2 + 0.1


async def test_a_second_create_finds_the_first(host: Host) -> None:
    spec = host.spec()
    first = await host.create(spec)
    with socket.socket(socket.AF_UNIX) as unused:
        second = await host.runtime.create(spec, unused)
    assert second == first


async def test_another_process_of_the_same_state_directory_can_attach_and_destroy(host: Host) -> None:
    spec = host.spec()
    first = await host.create(spec)
    ref = replace(first.ref, data=json.loads(json.dumps(first.ref.data)))
    later = CrunRuntime(host.state, installation_id=INSTALLATION)
    assert await later.attach(ref) == first
    assert await later.attach(later.partial_ref(spec.directory, spec.instance_id)) is None
    assert (await later.destroy(ref)).clean
    assert await later.attach(ref) is None
    assert host.traces(spec.instance_id) == []


async def test_kill_ends_a_fork_bomb_and_wait_gone_notices(host: Host) -> None:
    spec = host.spec()
    instance = await host.create(spec)
    gone = asyncio.create_task(host.runtime.wait_gone(instance.ref))
    bomb = asyncio.create_task(inside(instance, "import os\nwhile True:\n try: os.fork()\n except OSError: pass"))
    async with asyncio.timeout(60):
        while (await host.runtime.stats(instance.ref)).pids_limit_hits == 0:
            assert not bomb.done(), bomb.result()
            await asyncio.sleep(0.01)
    assert not gone.done()
    await host.runtime.kill(instance.ref)
    await asyncio.wait_for(gone, 10)
    with contextlib.suppress(OSError, AssertionError):
        await bomb
    assert await host.runtime.processes(instance.ref) == []
    assert await host.runtime.attach(instance.ref) is None
    await host.runtime.kill(instance.ref)


async def test_pause_stops_time_inside_and_a_paused_instance_can_be_destroyed(host: Host) -> None:
    spec = host.spec()
    instance = await host.create(spec)
    await host.runtime.pause(instance.ref)
    with pytest.raises(TimeoutError):
        await inside(instance, "print(1)", timeout=0.5)
    await host.runtime.resume(instance.ref)
    assert (await inside(instance, "print(2)"))[1] == "2\n"
    await host.runtime.pause(instance.ref)
    assert (await host.runtime.destroy(instance.ref)).clean
    assert host.traces(spec.instance_id) == []


async def test_destroy_is_idempotent_and_an_unknown_instance_is_clean(host: Host) -> None:
    spec = host.spec()
    instance = await host.create(spec)
    assert host.traces(spec.instance_id) != []
    for _ in range(2):
        evidence = await host.runtime.destroy(instance.ref)
        assert evidence.clean and evidence.left == ()
        assert host.traces(spec.instance_id) == []
    assert (await host.runtime.destroy(host.runtime.partial_ref(f"{host.state}/i/never", "never"))).clean


async def test_what_is_still_in_use_is_named_not_forgotten(host: Host) -> None:
    spec = host.spec()
    instance = await host.create(spec)
    held = os.open(f"{instance.tree.path}/workspace", os.O_RDONLY)
    try:
        evidence = await host.runtime.destroy(instance.ref)
    finally:
        os.close(held)
    assert not evidence.clean and any("disk" in name for name in evidence.left)
    assert os.path.exists(spec.directory)
    assert (await host.runtime.destroy(instance.ref)).clean
    assert host.traces(spec.instance_id) == []


async def test_many_instances_leave_nothing(host: Host) -> None:
    specs = [host.spec() for _ in range(20)]
    for batch in range(0, 20, 4):
        made = await asyncio.gather(*(host.create(spec) for spec in specs[batch : batch + 4]))
        assert len({instance.tree.uid for instance in made}) == 4, "no two live instances share ids"
        evidence = await asyncio.gather(*(host.runtime.destroy(instance.ref) for instance in made))
        assert all(found.clean for found in evidence)
    assert [trace for spec in specs for trace in host.traces(spec.instance_id)] == []
    assert mounts.mounts_below(host.state) == []
    assert cgroups.host().find_ours(INSTALLATION) == []
    assert os.listdir(f"{host.state}/i") == []


async def test_a_guest_that_cannot_start_is_an_error_that_says_why_and_leaves_only_the_directory(host: Host) -> None:
    spec = host.spec(guest_argv=("/bin/not-there",))
    with pytest.raises(CorralError) as caught:
        await host.create(spec)
    assert caught.value.code == "infra_error"
    assert "not-there" in caught.value.detail
    assert host.traces(spec.instance_id) == ["directory ['s']"]


async def test_a_cancelled_create_is_removed_by_destroy(host: Host) -> None:
    spec = host.spec()
    creating = asyncio.create_task(host.create(spec))
    while not os.path.exists(f"{spec.directory}/m"):
        await asyncio.sleep(0.001)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert (await host.runtime.destroy(host.runtime.partial_ref(spec.directory, spec.instance_id))).clean
    assert host.traces(spec.instance_id) == []


CREATE_POINTS = [
    "range",
    "cgroup",
    "place",
    "launching",
    "image",
    "loop",
    "disk",
    "root",
    "config",
    "started",
    "recorded",
]


@pytest.mark.parametrize("point", CREATE_POINTS)
async def test_killed_in_the_middle_of_create_everything_is_found_and_removed(host: Host, point: str) -> None:
    spec = host.spec()
    killed_at(host, spec, f"runtime.create.{point}", destroy=False)
    evidence = await host.runtime.destroy(host.runtime.partial_ref(spec.directory, spec.instance_id))
    assert evidence.clean, evidence
    assert host.traces(spec.instance_id) == []


@pytest.mark.parametrize("point", ["stopped", "cgroup", "disk", "directory"])
async def test_killed_in_the_middle_of_destroy_a_second_one_finishes(host: Host, point: str) -> None:
    spec = host.spec()
    killed_at(host, spec, f"runtime.destroy.{point}", destroy=True)
    evidence = await host.runtime.destroy(host.runtime.partial_ref(spec.directory, spec.instance_id))
    assert evidence.clean, evidence
    assert host.traces(spec.instance_id) == []


async def test_killed_in_the_middle_of_create_the_same_instance_can_be_made(host: Host) -> None:
    spec = host.spec()
    killed_at(host, spec, "runtime.create.started", destroy=False)
    instance = await host.create(spec)
    assert (await inside(instance, "print('new')"))[1] == "new\n"
    assert userns.processes_of(instance.tree.uid - 1000) == [init_of(instance).pid], "the first one is gone"


def killed_at(host: Host, spec: InstanceSpec, point: str, *, destroy: bool) -> None:
    """Make (and destroy) an instance in a process of its own that is killed at a fault point."""
    program = """
import asyncio, json, socket, sys
from corral.adapters.runtimes.crun import CrunRuntime
from corral.domain.limits import Limits
from corral.ports.runtime import InstanceSpec
state, installation, text, destroy = sys.argv[1:]
fields = json.loads(text)
fields["limits"] = Limits(**fields["limits"])
fields["unsafe"] = frozenset()
fields["guest_argv"] = tuple(fields["guest_argv"])
spec = InstanceSpec(**fields)
async def main():
    runtime = CrunRuntime(state, installation_id=installation)
    with socket.socket(socket.AF_UNIX) as control:
        control.bind("")
        control.listen()
        instance = await runtime.create(spec, control)
    if destroy == "True":
        await runtime.destroy(instance.ref)
asyncio.run(main())
"""
    text = json.dumps({**vars(spec), "limits": vars(spec.limits), "unsafe": []})
    done = subprocess.run(
        [sys.executable, "-c", program, host.state, INSTALLATION, text, str(destroy)],
        env={**os.environ, "CORRAL_FAULT_POINTS": f"{point}=kill"},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, (point, done.stderr.decode())


async def test_a_failure_at_any_point_of_create_cleans_up_itself(host: Host) -> None:
    def fail() -> None:
        raise OSError("broken by the test")

    for point in CREATE_POINTS:
        spec = host.spec()
        faults.arm(f"runtime.create.{point}", fail)
        try:
            with pytest.raises(CorralError) as caught:
                await host.create(spec)
        finally:
            faults.arm(f"runtime.create.{point}", None)
        assert "broken by the test" in caught.value.detail
        assert host.traces(spec.instance_id) == ["directory ['s']"], point


async def test_probe_tells_what_holds_and_leaves_nothing(host: Host) -> None:
    info = await host.runtime.probe()
    assert info.usable, info.reason
    assert info.security_level == 1 and info.version and info.start_ms
    assert set(info.limits.as_dict().values()) == {"enforced"}
    assert info.capabilities["two_uids"]
    assert mounts.mounts_below(host.state) == []
    assert os.listdir(f"{host.state}/i") == []
    assert cgroups.host().find_ours(INSTALLATION) == []


async def test_probe_says_why_an_ordinary_user_cannot_use_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    info = await host.runtime.probe()
    assert not info.usable and info.reason and "root" in info.reason
    assert process.is_alive(process.ref_of(os.getpid()) or pytest.fail("no reference to ourselves"))
