"""The node over real sandboxes: what an exec did is told as it was, kills are seen on the host, a killed node loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from corral.adapters.nodes.remote import RemoteNode
from corral.adapters.runtimes.bubblewrap import BubblewrapRuntime
from corral.adapters.runtimes.crun import CrunRuntime
from corral.domain.facts import ExecFacts
from corral.domain.fence import Fence
from corral.domain.ids import new_id
from corral.domain.limits import MIB, Limits
from corral.errors import CorralError
from corral.node.body import Body
from corral.node.interpreter import PYTHON_ARGV
from corral.node.service import LocalNode
from corral.node.serving import NodeServer
from corral.node.templates import Template
from corral.ports.node import CreateInstance, ExecSpec

pytestmark = pytest.mark.skipif(shutil.which("busybox") is None, reason="the rootfs of these tests is a static busybox")
FENCE = Fence(1, 1)
RUNTIMES: dict[str, Any] = {"bubblewrap": BubblewrapRuntime, "crun": CrunRuntime}
USABLE = ["bubblewrap", *(["crun"] if os.geteuid() == 0 and shutil.which("crun") else [])]


def fresh(prefix: str) -> str:
    return new_id(prefix, time.time_ns() // 1_000_000, secrets.token_bytes(10))


def make_rootfs(path: Path) -> None:
    directories = "bin dev etc home/sandbox proc root run/user/1000 sys tmp usr/bin var/tmp workspace .corral"
    for name in directories.split():
        (path / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(str(shutil.which("busybox")), path / "bin/busybox")
    for name in [
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
        "yes",
        "seq",
        "mkfifo",
        "touch",
        "echo",
    ]:
        (path / "bin" / name).symlink_to("busybox")
    (path / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nsandbox:x:1000:1000:sandbox:/home/sandbox:/bin/sh\n"
    )
    (path / "etc/group").write_text("root:x:0:\nsandbox:x:1000:\n")


class OneTemplate:
    def __init__(self, path: Path) -> None:
        self.path = path

    async def ensure(self, name: str, progress: Any = None) -> Template:
        return Template(name, "sha256:busybox", str(self.path), ())

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[None]:
        yield

    def unfinished(self) -> list[Path]:
        return []

    def remove_unfinished(self) -> int:
        return 0

    def describe(self) -> list[dict[str, Any]]:
        return []


class Afar(RemoteNode):
    """The node as its callers in other processes have it; what a test looks up inside is the real one's."""

    def __init__(self, local: LocalNode, state: Path) -> None:
        super().__init__(str(state / "node.sock"), fresh_s=0.0)
        self.local = local
        self.server = NodeServer(local, str(state), "node.sock", lambda line: None)

    async def open(self, progress: Any = None) -> None:
        await self.local.open(progress)
        await self.server.start()
        await super().open(progress)

    async def close(self) -> None:
        await super().close()
        await self.server.close()
        await self.local.close()

    @property
    def _bodies(self) -> dict[str, Body]:
        return self.local._bodies


@dataclass
class Host:
    """A state directory and the node on it, `afar`: over its socket."""

    state: Path
    runtime: str
    installation: str
    afar: bool = False
    node: Any = field(init=False)

    async def start(self) -> None:
        adapter = RUNTIMES[self.runtime](str(self.state), installation_id=self.installation)
        templates: Any = OneTemplate(self.state / "rootfs")
        self.node = LocalNode(
            str(self.state), {self.runtime: adapter}, templates, node_id="n", installation_id=self.installation
        )
        if self.afar:
            self.node = Afar(self.node, self.state)
        await self.node.open()

    async def create(self, limits: Limits | None = None, **changes: Any) -> str:
        instance = changes.pop("instance_id", None) or fresh("ins")
        request = CreateInstance(
            instance, fresh("sbx"), 1, FENCE, self.runtime, "busybox", limits or SMALL, changes.pop("deadline_s", 600.0)
        )
        return (await self.node.create(request)).instance_id

    async def begin(self, instance: str, *argv: str, **spec: Any) -> str:
        exec_id = fresh("exe")
        await self.node.start_exec(instance, FENCE, ExecSpec(exec_id, argv, **spec))
        return exec_id

    async def run(self, instance: str, *argv: str, **spec: Any) -> tuple[ExecFacts, bytes, bytes]:
        exec_id = await self.begin(instance, *argv, **spec)
        facts = await self.node.wait_exec(exec_id)
        out = b"".join([piece async for piece in self.node.kept_output(exec_id, "stdout")])
        return facts, out, b"".join([piece async for piece in self.node.kept_output(exec_id, "stderr")])

    async def sh(self, instance: str, script: str, **spec: Any) -> tuple[ExecFacts, bytes, bytes]:
        return await self.run(instance, "/bin/sh", "-c", script, **spec)

    async def python(self, instance: str, code: str, **spec: Any) -> tuple[ExecFacts, bytes, bytes]:
        return await self.run(instance, *PYTHON_ARGV, "-c", code, **spec)


SMALL = Limits(memory_bytes=192 * MIB, disk_bytes=48 * MIB, inodes=2000, tmp_bytes=8 * MIB, pids=64, wall_s=30)


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    # Not tmp_path: uids of sandboxes must be able to pass through every directory above.
    path = Path(tempfile.mkdtemp(prefix="corral-node-"))
    path.chmod(0o711)
    make_rootfs(path / "rootfs")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=[*USABLE, "bubblewrap over a socket"])
async def host(state: Path, request: pytest.FixtureRequest) -> AsyncIterator[Host]:
    where = state / f"s-{secrets.token_hex(3)}"
    where.mkdir(mode=0o711)
    where.chmod(0o711)
    (where / "rootfs").symlink_to(state / "rootfs")
    (state / "interpreter").mkdir(exist_ok=True)
    (where / "interpreter").symlink_to(state / "interpreter")
    made = Host(where, request.param.partition(" ")[0], f"it{secrets.token_hex(4)}", " " in request.param)
    await made.start()
    (info,) = await made.node.runtimes()
    if not info.usable:
        await made.node.close()
        pytest.skip(f"{made.runtime}: {info.reason}")
    yield made
    # Another's process that began meanwhile may hold a mount of ours for a moment: then the next attempt removes it.
    until = time.monotonic() + 60
    for instance in await made.node.instances():
        while not (evidence := await made.node.destroy(instance, "test")).clean:
            assert time.monotonic() < until, evidence
            await asyncio.sleep(0.5)
    left = await made.node.leftovers()
    await made.node.close()
    assert [item for item in left if item["kind"] != "spool"] == []


async def modes(host: Host) -> Any:
    return (await host.node.runtimes())[0].limits


async def test_an_exec_has_the_promised_surroundings(host: Host) -> None:
    ins = await host.create()
    facts, out, err = await host.sh(ins, "echo $HOME $LANG $TZ; pwd; stat -c %u:%g .; touch a && touch $HOME/b /tmp/c")
    assert (facts.exit_code, err) == (0, b"")
    assert out == b"/home/sandbox C.UTF-8 UTC\n/workspace\n1000:1000\n"
    facts, out, _ = await host.sh(ins, "env", env={"A": "你好", "B": "\udcff", "TZ": "Asia/Tokyo"})
    assert "A=你好\n".encode() in out
    assert b"B=\xff\n" in out
    assert b"TZ=Asia/Tokyo\n" in out


async def test_each_ending_is_told_as_it_was(host: Host) -> None:
    ins = await host.create()
    assert (await host.sh(ins, "exit 7"))[0].exit_code == 7
    assert (await host.sh(ins, "kill -9 $$"))[0].signal == 9
    facts, _, _ = await host.run(ins, "no-such-program")
    assert (facts.started, facts.start_failure and facts.start_failure.errno) == (False, "ENOENT")
    facts, _, _ = await host.run(ins, "/etc/passwd")
    assert (facts.started, facts.start_failure and facts.start_failure.errno) == (False, "EACCES")
    facts, _, _ = await host.run(ins, "true", cwd="/missing")
    assert (facts.started, facts.start_failure and facts.start_failure.what) == (False, "cwd")
    data = bytes(range(256)) * 4000
    assert (await host.run(ins, "cat", stdin=data))[1] == data
    with pytest.raises(CorralError) as caught:
        await host.run(ins, "true", user="nobody")
    assert caught.value.code == "user_refused"


async def test_a_full_disk_and_a_full_tmp_are_seen_by_the_host(host: Host) -> None:
    ins = await host.create()
    facts, _, _ = await host.sh(ins, "dd if=/dev/zero of=big bs=1M 2>/dev/null; exit 1")
    assert (facts.disk_full, facts.inodes_full) == (True, False)
    assert facts.usage.disk_bytes is not None
    assert facts.usage.disk_bytes > 40 * MIB
    assert not (await host.sh(ins, "rm -f big; exit 1"))[0].disk_full
    many = "import itertools\nfor n in itertools.count(): open(f'f{n}', 'w').close()"
    facts, _, _ = await host.python(ins, many)
    assert facts.inodes_full
    assert (await host.sh(ins, "rm -f f*"))[0].exit_code == 0
    facts, _, _ = await host.sh(ins, "dd if=/dev/zero of=/tmp/big bs=64k 2>/dev/null; exit 1")
    if os.geteuid() == 0:
        assert facts.tmp_full
    assert not facts.sandbox_lost


async def test_one_file_is_bounded_only_where_the_kernel_does_not_hold_the_disk(host: Host) -> None:
    """A file with holes takes no disk; where the disk is watched, the bound is what holds between two looks."""
    ins = await host.create()
    code = (
        "import os, resource\nprint(resource.getrlimit(resource.RLIMIT_FSIZE)[0])\n"
        f"os.truncate(os.open('/workspace/holes', os.O_CREAT | os.O_WRONLY), {4 * SMALL.disk_bytes})"
    )
    facts, out, err = await host.python(ins, code)
    if (await modes(host)).disk == "enforced":
        assert (facts.exit_code, out, err) == (0, b"-1\n", b"")
    else:
        assert int(out) == SMALL.disk_bytes
        assert facts.exit_code != 0 or facts.ended_by == "disk_watch"


async def test_out_of_memory_is_told_from_a_plain_kill(host: Host) -> None:
    ins = await host.create()
    facts, _, _ = await host.python(ins, "x = bytearray(400 << 20)\nprint(len(x))")
    held = (await modes(host)).memory
    if held == "enforced":
        assert (facts.signal, facts.ended_by) == (9, None)
        assert (facts.usage.oom_kills or 0) >= 1
    else:
        assert facts.ended_by == "memory_watch" or b"MemoryError" in (await host.python(ins, "bytearray(4<<30)"))[2]
    facts, _, _ = await host.sh(ins, "kill -9 $$")
    assert (facts.signal, facts.ended_by, facts.usage.oom_kills or 0) == (9, None, 0)
    facts, _, _ = await host.python(ins, "x = b'1' * (60 << 20)\nprint(len(x))")
    assert facts.exit_code == 0
    assert facts.usage.peak_memory_bytes is not None
    if held == "enforced":
        assert 60 * MIB < facts.usage.peak_memory_bytes < 120 * MIB


CROWD = """
import os, resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (16384, 16384))
null = os.open("/dev/null", os.O_RDONLY)
ready, done = os.pipe()
for _ in range({processes}):
    if os.fork() == 0:
        for _ in range({files}): os.dup(null)
        os.write(done, b".")
        time.sleep(1000)
for _ in range({processes}): os.read(ready, 1)
print("open", flush=True)
if os.fork() == 0:
    for _ in range({memory_files}):
        held = os.memfd_create("held")
        for _ in range(32): os.write(held, bytes(1 << 20))
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("crowd", "ended_by"),
    [
        ({"processes": 2, "files": 10_001, "memory_files": 9}, "memory_watch"),
        ({"processes": 3, "files": 16_000, "memory_files": 1}, "memory_unseen"),
    ],
)
async def test_a_crowd_of_open_files_hides_no_memory(host: Host, crowd: dict[str, int], ended_by: str) -> None:
    if (await modes(host)).memory != "watched":
        pytest.skip("the kernel counts it")
    ins = await host.create(replace(SMALL, wall_s=300))
    facts, out, err = await host.python(ins, CROWD.format(**crowd))
    assert (out, err, facts.ended_by) == (b"open\n", b"", ended_by)
    assert (await host.sh(ins, "echo still of use"))[1] == b"still of use\n"


STUBBORN = r"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for new_session in (False, True, True):
    if os.fork() == 0:
        if new_session:
            os.setsid()
            if os.fork():
                os._exit(0)
        while True:
            with open('beat', 'a') as f: f.write('x')
            time.sleep(0.02)
print('start', flush=True)
time.sleep(60)
"""


async def spoken(host: Host, exec_id: str, words: bytes) -> None:
    """Until it has said so much."""
    until = time.monotonic() + 60
    while b"".join([piece async for piece in host.node.kept_output(exec_id, "stdout")]) != words:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


async def of_execs(body: Body) -> list[int]:
    """Host pids of live processes of the sandbox's user, the guest's own apart."""
    if not body.instance.same_uid:
        return await body.survivors(0, uid=body.tree.uid)
    found = []
    for pid in await body.survivors(0):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            if b"boot.pyc" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
async def test_a_kill_ends_the_whole_tree_and_the_host_sees_it(host: Host, how: str) -> None:
    ins = await host.create()
    body = host.node._bodies[ins]
    assert await of_execs(body) == []
    begun = time.monotonic()
    limits = Limits(wall_s=1.0 if how == "timeout" else 30.0)
    exec_id = await host.begin(ins, *PYTHON_ARGV, "-c", STUBBORN, limits=limits, grace_s=0.5)
    if how == "cancelled":
        await spoken(host, exec_id, b"start\n")
        await host.node.end_exec(exec_id, "cancelled")
    facts = await host.node.wait_exec(exec_id)
    assert time.monotonic() - begun < 20
    assert (facts.ended_by, facts.killed_all, facts.sandbox_lost) == (how, True, False)
    assert b"".join([piece async for piece in host.node.kept_output(exec_id, "stdout")]) == b"start\n"
    assert await of_execs(body) == []
    first = (await host.sh(ins, "stat -c %s beat"))[1]
    await asyncio.sleep(0.3)
    assert (await host.sh(ins, "stat -c %s beat"))[1] == first


async def test_background_processes_live_on_or_end_by_option(host: Host) -> None:
    ins = await host.create()
    body = host.node._bodies[ins]
    kept, _, _ = await host.sh(ins, "sleep 300 >/dev/null 2>&1 & echo ok")
    assert (kept.exit_code, kept.killed_children) == (0, 0)
    assert len(await of_execs(body)) == 1
    ended, _, _ = await host.sh(ins, "setsid sleep 301 >/dev/null 2>&1 & sleep 0.1", background="kill")
    assert (ended.exit_code, ended.killed_children) == (0, 1)
    await host.node.fence(ins, Fence(1, 2), "kill")
    until = time.monotonic() + 5
    while await of_execs(body) and time.monotonic() < until:
        await asyncio.sleep(0.02)
    assert await of_execs(body) == []
    helpers = await body.runtime.processes(body.ref)
    assert len(helpers) <= 3, "the guest, a supervisor that stands by and its starter"


async def test_floods_keep_the_service_small_and_the_neighbour_fast(host: Host) -> None:
    noisy, quiet = await host.create(), await host.create()
    limits = Limits(output_bytes=1 * MIB, output_kill_bytes=200 * MIB, wall_s=600)
    await host.sh(quiet, "true")
    before = _rss()
    flood = await host.begin(noisy, "yes", limits=limits)
    times = []
    while len(times) < 30:
        begun = time.monotonic()
        assert (await host.run(quiet, "true"))[0].exit_code == 0
        times.append(time.monotonic() - begun)
    facts = await host.node.wait_exec(flood)
    assert facts.ended_by == "output_limit"
    assert facts.stdout.produced > 200 * MIB
    assert _rss() - before < 32 * MIB
    assert sorted(times)[28] < 1.0
    await host.node.forget_exec(flood)


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


# -- files -----------------------------------------------------------------------------------------------------------------
async def stream(*members: tuple[tarfile.TarInfo, bytes]) -> AsyncIterator[bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    data = buffer.getvalue()
    for at in range(0, len(data), 1000):
        yield data[at : at + 1000]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


async def test_tar_streams_go_in_and_come_out_the_same(host: Host) -> None:
    ins = await host.create()
    big = secrets.token_bytes(3 * MIB)
    members = (
        (member("d", tarfile.DIRTYPE, mode=0o555), b""),
        (member("d/你好\n'\"", mode=0o4711), big),
        (member("d/n\udcff"), b"x"),
        (member("d/link", tarfile.SYMTYPE, "/etc/passwd"), b""),
        (member("d/hard", tarfile.LNKTYPE, "d/n\udcff"), b""),
        (member("x" * 250), b"long"),
    )
    await host.node.put_tar(ins, FENCE, stream(*members), "sub")
    _, out, _ = await host.sh(ins, "stat -c '%a %u %F' sub/d sub/d/link sub/d/hard")
    assert out == b"555 1000 directory\n777 1000 symbolic link\n644 1000 regular file\n"
    data = b"".join([piece async for piece in host.node.get_tar(ins, "sub")])
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as archive:
        names = {entry.name: entry for entry in archive}
        assert set(names) == {
            "sub",
            "sub/d",
            "sub/d/你好\n'\"",
            "sub/d/n\udcff",
            "sub/d/link",
            "sub/d/hard",
            "sub/" + "x" * 250,
        }
        content = archive.extractfile("sub/d/你好\n'\"")
        assert content is not None
        assert content.read() == big
        assert names["sub/d/你好\n'\""].mode == 0o711
        assert names["sub/d/link"].linkname == "/etc/passwd"
    with pytest.raises(CorralError) as caught:
        [piece async for piece in host.node.get_tar(ins, "nothing")]
    assert caught.value.code == "not_found"
    with pytest.raises(CorralError) as caught:
        [piece async for piece in host.node.get_tar(ins, "/dev/null")]
    assert caught.value.code == "not_a_file"


BAD: list[tuple[str, list[tuple[tarfile.TarInfo, bytes]], str]] = [
    ("../up", [(member("../up"), b"x")], "invalid_value"),
    ("/abs", [(member("/abs"), b"x")], "invalid_value"),
    ("a/../../b", [(member("a/../../b"), b"x")], "invalid_value"),
    ("l/passwd", [(member("l", tarfile.SYMTYPE, "/etc"), b""), (member("l/passwd"), b"x")], "invalid_value"),
    ("dev", [(member("dev", tarfile.CHRTYPE), b"")], "invalid_value"),
    ("fifo", [(member("fifo", tarfile.FIFOTYPE), b"")], "invalid_value"),
    ("h", [(member("h", tarfile.LNKTYPE, "../../etc/passwd"), b"")], "invalid_value"),
    (
        "h2",
        [(member("l2", tarfile.SYMTYPE, "/etc/passwd"), b""), (member("h2", tarfile.LNKTYPE, "l2"), b"")],
        "invalid_value",
    ),
    ("bomb", [(member("bomb"), bytes(60 * MIB))], "too_large"),
]


@pytest.mark.parametrize(("entry", "members", "code"), BAD, ids=[bad[0].replace("/", "_") for bad in BAD])
async def test_a_bad_archive_is_refused_by_the_name_of_the_entry(
    host: Host, entry: str, members: list[tuple[tarfile.TarInfo, bytes]], code: str
) -> None:
    ins = await host.create()
    with pytest.raises(CorralError) as caught:
        await host.node.put_tar(ins, FENCE, stream(*members), ".")
    assert (caught.value.code, caught.value.facts["entry"]) == (code, entry)


async def test_what_is_no_archive_is_refused(host: Host) -> None:
    ins = await host.create()

    async def junk(data: bytes) -> AsyncIterator[bytes]:
        yield data

    whole = b"".join([piece async for piece in stream((member("f"), b"x" * 5000))])
    for data in (b"not a tar", secrets.token_bytes(50_000), whole[:3000], b""):
        with pytest.raises(CorralError) as caught:
            await host.node.put_tar(ins, FENCE, junk(data), ".")
        assert caught.value.code == "invalid_value", data[:20]


async def test_collect_tells_changes_since_the_mark_and_brings_artifacts(host: Host, tmp_path: Path) -> None:
    ins = await host.create()
    await host.node.mark(ins)
    await host.node.put_files(ins, FENCE, [("in/data", 0o644, b"given"), ("gone", 0o644, b"")])
    script = (
        "mkdir -p out/deep; echo hi > out/deep/a; echo more >> in/data; rm gone; ln -s /etc/passwd out/l; mkfifo out/p"
    )
    assert (await host.sh(ins, script))[0].exit_code == 0
    into = tmp_path / "art"
    got = await host.node.collect(ins, outputs=["/workspace/out/**"], max_bytes=100, into=str(into))
    assert [(f.path, f.change, f.type, f.size) for f in got.files] == [
        ("/workspace/gone", "deleted", "file", 0),
        ("/workspace/in/data", "modified", "file", 10),
        ("/workspace/out", "created", "dir", 0),
        ("/workspace/out/deep", "created", "dir", 0),
        ("/workspace/out/deep/a", "created", "file", 3),
        ("/workspace/out/l", "created", "symlink", 11),
    ]
    digest = "sha256:" + hashlib.sha256(b"hi\n").hexdigest()
    assert list(got.artifacts) == [{"path": "/workspace/out/deep/a", "size": 3, "digest": digest}]
    assert (into / "out/deep/a").read_bytes() == b"hi\n"
    assert got.complete


async def test_what_was_found_is_the_base_of_the_next_look(host: Host) -> None:
    ins = await host.create()
    await host.sh(ins, "echo one > a")
    first = await host.node.collect(ins, outputs=(), max_bytes=0, into=None)
    again = await host.node.collect(ins, outputs=(), max_bytes=0, into=None, mark=True)
    assert [(c.path, c.change) for c in first.files] == [("/workspace/a", "created")] and again == first
    assert (await host.node.collect(ins, outputs=(), max_bytes=0, into=None, mark=True)).files == ()
    await host.sh(ins, "echo two > a; echo new > b")
    last = await host.node.collect(ins, outputs=(), max_bytes=0, into=None)
    assert sorted((c.path, c.change) for c in last.files) == [("/workspace/a", "modified"), ("/workspace/b", "created")]


async def test_a_start_cut_short_after_its_frame_stays_known(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    ins = await host.create()
    client = await host.node._bodies[ins].client()
    real, sent = client.start_exec, asyncio.Event()

    async def never_answers(*args: Any, **named: Any) -> Any:
        await real(*args, **named)
        sent.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(client, "start_exec", never_answers)
    exec_id = fresh("exe")
    starting = asyncio.create_task(host.node.start_exec(ins, FENCE, ExecSpec(exec_id, ("/bin/sh", "-c", "echo ran"))))
    await asyncio.wait_for(sent.wait(), 30)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await host.node.close()
    await host.start()
    facts = await asyncio.wait_for(host.node.wait_exec(exec_id), 30)
    assert (facts.started, facts.exit_code) == (True, 0)
    assert b"".join([piece async for piece in host.node.kept_output(exec_id, "stdout")]) == b"ran\n"


async def test_a_link_planted_in_the_way_of_the_hosts_files_leads_nowhere(host: Host, tmp_path: Path) -> None:
    ins = await host.create()
    canary = tmp_path / "canary"
    canary.mkdir(mode=0o777)
    canary.chmod(0o777)
    await host.sh(ins, f"ln -s {canary} d; ln -s {canary}/x f; ln -s /etc up; ln -s / root")
    for path in ("d/x", "up/passwd", "root/x"):
        with pytest.raises(CorralError) as caught:
            await host.node.put_files(ins, FENCE, [(path, 0o644, b"pwned")])
        assert (caught.value.code, caught.value.field) == ("invalid_value", "/files/0/path")
    await host.node.put_files(ins, FENCE, [("f", 0o644, b"ours")])
    assert list(canary.iterdir()) == []
    got = await host.node.collect(ins, outputs=["**", "d/*", "root/etc/*"], max_bytes=10**9, into=str(tmp_path / "a"))
    assert [a["path"] for a in got.artifacts] == ["/workspace/f"]


# -- deaths ----------------------------------------------------------------------------------------------------------------
NODE = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from tests.integration.test_node import Host, FENCE, SMALL, PYTHON_ARGV
from corral.ports.node import ExecSpec
from pathlib import Path
async def main(state, runtime, installation, plan):
    host = Host(Path(state), runtime, installation)
    await host.start()
    ins = await host.create(instance_id=plan["instance"])
    for exec_id, argv in plan["execs"]:
        await host.node.start_exec(ins, FENCE, ExecSpec(exec_id, tuple(argv)))
    print("started", flush=True)
    await asyncio.sleep(600)
asyncio.run(main(*sys.argv[2:5], json.loads(sys.argv[5])))
"""


def start_node(host: Host, plan: dict[str, Any], **env: str) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    argv = [sys.executable, "-c", NODE, json.dumps([root]), str(host.state), host.runtime, host.installation]
    return subprocess.Popen([*argv, json.dumps(plan)], stdout=subprocess.PIPE, env={**os.environ, **env})


async def test_a_node_killed_in_the_middle_loses_no_byte_and_no_exit_code(host: Host) -> None:
    await host.node.close()
    ins, counter, quick, sleeper = fresh("ins"), fresh("exe"), fresh("exe"), fresh("exe")
    count = "import time\nfor n in range(3000):\n print('line', n, flush=True)\n if n % 10 == 0: time.sleep(0.005)\nraise SystemExit(5)"
    plan = {
        "instance": ins,
        "execs": [
            (counter, [*PYTHON_ARGV, "-c", count]),
            (quick, ["sh", "-c", "echo hi; exit 4"]),
            (sleeper, ["sleep", "99"]),
        ],
    }
    process = start_node(host, plan)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"started\n"
    await asyncio.sleep(0.3)
    process.kill()
    process.wait()
    process.stdout.close()
    await asyncio.sleep(0.3)
    await host.start()
    assert await host.node.instances() == [ins]
    facts = await host.node.wait_exec(counter)
    assert (facts.started, facts.exit_code, facts.ended_by) == (True, 5, None)
    assert b"".join([piece async for piece in host.node.kept_output(counter, "stdout")]) == b"".join(
        b"line %d\n" % n for n in range(3000)
    )
    assert (await host.node.wait_exec(quick)).exit_code == 4
    await host.node.end_exec(sleeper, "cancelled")
    assert (await host.node.wait_exec(sleeper)).ended_by == "cancelled"
    assert (await host.sh(ins, "echo on"))[1] == b"on\n"
    assert await host.node.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", ["node.create.journalled", "node.create.made", "node.exec.journalled", "node.exec.started"]
)
async def test_a_node_that_dies_at_a_fault_point_leaves_nothing_that_open_and_gc_do_not_settle(
    host: Host, point: str
) -> None:
    await host.node.close()
    ins, exec_id = fresh("ins"), fresh("exe")
    plan = {"instance": ins, "execs": [(exec_id, ["sh", "-c", "echo ran; exit 3"])]}
    process = start_node(host, plan, CORRAL_FAULT_POINTS=f"{point}=kill")
    out, _ = await asyncio.to_thread(process.communicate, timeout=60)
    assert (out, process.returncode) == (b"", -9)
    await host.start()
    if point.startswith("node.create"):
        assert await host.node.instances() == []
    else:
        facts = await host.node.wait_exec(exec_id)
        if point == "node.exec.started":
            assert (facts.exit_code, facts.started) == (3, True)
        else:
            assert facts.exit_code is None
            assert facts.infra is not None
            assert b"".join([piece async for piece in host.node.kept_output(exec_id, "stdout")]) == b""
        with contextlib.suppress(CorralError):
            await host.node.destroy(ins, "test")
    await host.node.gc()
    assert await host.node.leftovers() == []


async def test_a_sandbox_whose_pid_1_is_killed_is_lost_at_once_and_its_execs_say_so(host: Host) -> None:
    ins = await host.create()
    exec_id = await host.begin(ins, "sh", "-c", "echo said; sleep 60")
    await spoken(host, exec_id, b"said\n")
    body = host.node._bodies[ins]
    begun = time.monotonic()
    await body.runtime.kill(body.ref)
    facts = await host.node.wait_exec(exec_id)
    assert time.monotonic() - begun < 20
    assert (facts.sandbox_lost, facts.exit_code, facts.started) == (True, None, True)
    assert b"".join([piece async for piece in host.node.kept_output(exec_id, "stdout")]) == b"said\n"
    assert await asyncio.wait_for(host.node.lost(), 5) == ins


async def test_the_deadline_holds_without_anybody_asking(host: Host) -> None:
    ins = await host.create(deadline_s=1.0)
    assert await asyncio.wait_for(host.node.lost(), 10) == ins
    assert (await host.node.destroy(ins, "ttl")).clean


async def test_many_at_once_create_run_and_vanish(host: Host) -> None:
    async def one(number: int) -> None:
        ins = await host.create()
        facts, out, _ = await host.sh(ins, f"echo {number}; exit {number}")
        assert (facts.exit_code, out) == (number, b"%d\n" % number)
        first, second = await asyncio.gather(host.node.destroy(ins, "rm"), host.node.destroy(ins, "rm"))
        assert first.clean
        assert second.clean

    await asyncio.gather(*(one(n) for n in range(8)))
    assert await host.node.instances() == []
