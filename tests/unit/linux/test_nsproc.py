"""Processes of a pid namespace as the host sees them."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.linux import nsproc, process

# PID 1 of a new pid namespace: a child burns CPU and ends, another holds memory, a third leaves a zombie; then it says so and waits.
INIT = """
import os, sys, time
if os.fork() == 0:
    end = time.process_time() + 0.2
    while time.process_time() < end: pass
    os._exit(0)
os.wait()
held = bytearray(os.urandom(1)) * (32 << 20)
r, w = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        os.read(r, 1)
        os._exit(0)
zombie = os.fork()
if zombie == 0: os._exit(0)
os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
print("ready", flush=True)
sys.stdin.read()
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def running(program: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A program of Python that has said `ready`; it ends when its input does."""
    command = [sys.executable, "-I", "-S", "-c", f"import ctypes, mmap, os, sys, threading\n{program}"]
    with subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        try:
            assert child.stdout.readline() == b"ready\n"
            yield child
        finally:
            child.stdin.close()


@pytest.fixture
def namespace() -> Iterator[process.ProcessRef]:
    unshare = shutil.which("unshare")
    assert unshare
    command = [
        unshare,
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--kill-child",
        sys.executable,
        "-I",
        "-S",
        "-c",
        INIT,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        assert child.stdout.readline() == b"ready\n"
        (inner,) = children(child.pid)
        ref = process.ref_of(inner)
        assert ref is not None
        yield ref
        child.stdin.close()
        process.kill(ref)


def test_all_live_members_are_found_and_nobody_else(namespace: process.ProcessRef) -> None:
    inode = nsproc.pid_namespace(namespace.pid)
    assert inode is not None and inode != nsproc.pid_namespace(os.getpid())
    pids = nsproc.members(inode)
    assert namespace.pid in pids and len(pids) == 4  # the zombie is no live process
    assert os.getpid() not in pids
    assert nsproc.depth(namespace.pid) == nsproc.depth(os.getpid()) + 1


def test_nested_namespaces_belong_to_the_outer_one(namespace: process.ProcessRef) -> None:
    inode = nsproc.pid_namespace(namespace.pid)
    assert inode is not None
    enter = ["nsenter", "--user", "--preserve-credentials", "--pid", "--target", str(namespace.pid), "--"]
    command = [*enter, "unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo ready; read end"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        assert child.stdout.readline() == b"ready\n"
        deepest = [pid for pid in nsproc.members(inode) if nsproc.depth(pid) == nsproc.depth(namespace.pid) + 1]
        assert len(deepest) == 1
        child.stdin.close()


def test_sums_cover_memory_and_cpu_of_ended_children(namespace: process.ProcessRef) -> None:
    inode = nsproc.pid_namespace(namespace.pid)
    assert inode is not None
    pids = nsproc.members(inode)
    rss, pss = nsproc.totals(pids), nsproc.totals(pids, pss_above=0)
    assert rss.count == pss.count == 4
    assert rss.cpu_seconds >= 0.2
    # The buffer is shared by four processes: RSS counts it in each, PSS once.
    assert rss.memory_bytes >= 4 * (32 << 20)
    assert 32 << 20 <= pss.memory_bytes < 3 * (32 << 20)


def test_memory_files_count_whether_they_are_mapped_or_not_and_once() -> None:
    program = """
import mmap, os, sys
def told():
    print("ready", flush=True)
    sys.stdin.readline()
told()
file = os.memfd_create("held")
for _ in range(64): os.write(file, bytes(1 << 20))
again = os.dup(file)
told()
seen = mmap.mmap(file, 64 << 20)
sum(seen[at] for at in range(0, 64 << 20, 4096))
told()
"""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin and child.stdout
        found = []
        for _ in range(3):
            assert child.stdout.readline() == b"ready\n"
            found.append([nsproc.totals([child.pid], pss_above=above).memory_bytes for above in (None, 0)])
            child.stdin.write(b"\n")
            child.stdin.flush()
    (rss_before, before), (rss_open, held), (rss_mapped, mapped) = found
    assert 64 << 20 <= held - before < 70 << 20
    assert 64 << 20 <= mapped - before < 70 << 20
    assert rss_open - rss_before >= 64 << 20
    assert rss_mapped >= mapped


def test_files_without_a_name_are_told_as_long_as_they_are_open(tmp_path: Path) -> None:
    program = """
import os, sys
files = [os.open(name, os.O_RDWR | os.O_CREAT) for name in ("kept", "gone", "gone too")]
for file in files: os.write(file, bytes(1 << 20)); os.fsync(file)
os.dup(files[1])
os.unlink("gone"); os.unlink("gone too")
print("ready", flush=True)
sys.stdin.readline()
os.closerange(3, 20)
print("ready", flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-I", "-S", "-c", program]
    device = tmp_path.stat().st_dev
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as child:
        assert child.stdin and child.stdout
        found = []
        for _ in range(2):
            assert child.stdout.readline() == b"ready\n"
            found.append(nsproc.unlinked([child.pid], device))
            assert nsproc.unlinked([child.pid], device + 1) == nsproc.Nameless(0, 0, whole=True)
            child.stdin.write(b"\n")
            child.stdin.flush()
    held, after = found
    assert held.whole and held.count == 2 and 2 << 20 <= held.bytes < 3 << 20
    assert after == nsproc.Nameless(0, 0, whole=True)


def test_other_shared_memory_hides_no_memory_file() -> None:
    program = """
shared = mmap.mmap(-1, 48 << 20)
for at in range(0, len(shared), 4096): shared[at] = 1
file = os.memfd_create("held")
for _ in range(48): os.write(file, bytes(1 << 20))
print("ready", flush=True)
sys.stdin.readline()
"""
    with running(program) as child:
        found = nsproc.totals([child.pid], pss_above=0)
    assert 96 << 20 <= found.memory_bytes < 120 << 20


def test_private_copies_of_a_memory_file_hide_none_of_it_and_its_mapping_counts_once() -> None:
    program = """
file = os.memfd_create("held")
for _ in range(32): os.write(file, bytes(1 << 20))
shown = mmap.mmap(file, 32 << 20)
sum(shown[at] for at in range(0, len(shown), 4096))
copies = mmap.mmap(file, 32 << 20, flags=mmap.MAP_PRIVATE)
for at in range(0, len(copies), 4096): copies[at] = 1
print("ready", flush=True)
sys.stdin.readline()
"""
    with running(program) as child:
        found = nsproc.totals([child.pid], pss_above=0)
    assert 64 << 20 <= found.memory_bytes < 88 << 20


def test_a_memory_file_that_is_mapped_and_not_touched_counts() -> None:
    program = """
file = os.memfd_create("held")
for _ in range(32): os.write(file, bytes(1 << 20))
shown = mmap.mmap(file, 32 << 20)
print("ready", flush=True)
sys.stdin.readline()
"""
    with running(program) as child:
        found = nsproc.totals([child.pid], pss_above=0)
    assert 32 << 20 <= found.memory_bytes < 52 << 20


def test_a_secret_memory_file_counts_mapped_or_not_and_once() -> None:
    program = """
made = []
for number in range(24):
    file = ctypes.CDLL(None).syscall(447, 0)
    if file < 0: break
    made.append(file)
    os.ftruncate(file, 1 << 20)
    shown = mmap.mmap(file, 1 << 20)
    for at in range(0, len(shown), 4096): shown[at] = 1
    if number < 20: shown.close()
    else: made.append(shown)
print("ready", flush=True)
print(len(made), flush=True)
sys.stdin.readline()
"""
    with running(program) as child:
        assert child.stdout
        if int(child.stdout.readline()) < 24:
            pytest.skip("the kernel has no secret memory, or no more for this user")
        found = nsproc.totals([child.pid], pss_above=0)
    assert 24 << 20 <= found.memory_bytes < 40 << 20


HOLD = """
gone = os.open("gone", os.O_RDWR | os.O_CREAT)
os.write(gone, bytes(16 << 20)); os.fsync(gone)
os.unlink("gone")
held = os.memfd_create("held")
for _ in range(32): os.write(held, bytes(1 << 20))
print("ready", flush=True)
"""


def test_too_many_open_files_to_look_at_are_never_taken_for_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsproc, "MOST_OPEN", 200)
    crowd = "null = os.open('/dev/null', os.O_RDONLY)\nfor _ in range({}): os.dup(null)\n"
    wait = "print('ready', flush=True)\nsys.stdin.readline()\n"
    device = tmp_path.stat().st_dev
    with running(HOLD + "sys.stdin.readline()\n", tmp_path) as last, running(crowd.format(50) + wait) as few:
        both = [few.pid, last.pid]
        held, files = nsproc.totals(both), nsproc.unlinked(both, device)
        assert held.whole and held.memory_bytes >= 32 << 20
        assert files.whole and files.bytes >= 16 << 20
        with running(crowd.format(150) + wait) as more:
            pids = [few.pid, more.pid, last.pid]
            assert not nsproc.totals(pids).whole and not nsproc.totals(pids, pss_above=0).whole
            assert not nsproc.unlinked(pids, device).whole


def test_a_process_that_cannot_be_looked_into_is_not_taken_for_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    listdir = os.listdir

    def refused(path: str) -> list[str]:
        if str(path).endswith("/task"):
            raise PermissionError(13, "not yours", path)
        return listdir(path)

    monkeypatch.setattr(nsproc.os, "listdir", refused)
    assert not nsproc.totals([os.getpid()]).whole
    assert not nsproc.unlinked([os.getpid()], 0).whole


def test_a_process_that_is_not_dumpable_as_every_guest_is_nothing_unseen() -> None:
    program = "assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0\nprint('ready', flush=True)\nsys.stdin.readline()\n"
    with running(program) as child:
        assert nsproc.totals([os.getpid(), child.pid], pss_above=0).whole
        assert nsproc.unlinked([os.getpid(), child.pid], 0).whole


def test_a_process_that_has_ended_is_nothing_unseen() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    found = nsproc.totals([child.pid], pss_above=0)
    assert (found.count, found.memory_bytes, found.whole) == (0, 0, True)
    assert nsproc.unlinked([child.pid], 0) == nsproc.Nameless(0, 0, whole=True)


def test_files_of_a_thread_with_a_table_of_its_own_count(tmp_path: Path) -> None:
    program = f"""
CLONE_FILES = 0x400
def apart():
    assert ctypes.CDLL(None).unshare(CLONE_FILES) == 0
    {HOLD.strip().replace(chr(10), chr(10) + "    ")}
    os.read(0, 1)
threading.Thread(target=apart).start()
"""
    with running(program, tmp_path) as child:
        held, files = nsproc.totals([child.pid]), nsproc.unlinked([child.pid], tmp_path.stat().st_dev)
    assert held.memory_bytes >= 32 << 20 and files.bytes >= 16 << 20


def test_a_process_that_makes_itself_not_dumpable_hides_nothing_of_it(tmp_path: Path) -> None:
    bwrap = shutil.which("bwrap")
    python = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(p)), None)
    if bwrap is None or python is None:
        pytest.skip("needs bwrap and a Python of the system")
    program = f"""
import ctypes, os, sys
os.chdir("/work")
{HOLD.strip()}
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
print("ready", flush=True)
os.read(0, 1)
"""
    # Its root is not this user, as in a sandbox: what is root's there is nobody's here.
    apart = [bwrap, "--unshare-user", "--unshare-pid", "--uid", "1000", "--gid", "1000", "--as-pid-1"]
    view = [
        "--ro-bind",
        "/",
        "/",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--tmpfs",
        "/tmp",
        "--bind",
        str(tmp_path),
        "/work",
    ]
    with subprocess.Popen(
        [*apart, *view, python, "-I", "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin and child.stdout
        try:
            if child.stdout.readline() != b"ready\n":
                pytest.skip("bwrap does not work here")
            assert child.stdout.readline() == b"ready\n"
            (inner,) = children(child.pid)
            own = sorted(os.listdir("/proc/self/fd"))
            held, files = nsproc.totals([inner]), nsproc.unlinked([inner], tmp_path.stat().st_dev)
            assert sorted(os.listdir("/proc/self/fd")) == own, "no copy is kept"
        finally:
            child.stdin.close()
    assert held.whole and held.memory_bytes >= 32 << 20
    assert files.whole and files.bytes >= 16 << 20


def test_threads_that_share_their_files_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsproc, "MOST_OPEN", 200)
    program = """
null = os.open("/dev/null", os.O_RDONLY)
for _ in range(50): os.dup(null)
for _ in range(8): threading.Thread(target=os.read, args=(0, 1)).start()
print("ready", flush=True)
"""
    with running(program) as child:
        assert nsproc.totals([child.pid]).whole


def test_a_process_whose_first_thread_has_ended_is_alive_and_counts(tmp_path: Path) -> None:
    exit_one = {"x86_64": 60, "aarch64": 93}.get(platform.machine())
    if exit_one is None:
        pytest.skip("the number of the call is not known here")
    program = f"""
import time
def last():
    while open("/proc/self/stat").read().rpartition(")")[2].split()[0] != "Z": time.sleep(0.01)
    global kept
    kept = bytearray(os.urandom(1)) * (32 << 20)
    {HOLD.strip().replace(chr(10), chr(10) + "    ")}
    os.read(0, 1)
    os._exit(0)
threading.Thread(target=last).start()
ctypes.CDLL(None).syscall({exit_one}, 0)
"""
    with running(program, tmp_path) as child:
        own = nsproc.pid_namespace(os.getpid())
        assert own is not None
        assert child.pid in nsproc.members(own) and nsproc.runs(child.pid)
        rss, pss = nsproc.totals([child.pid]), nsproc.totals([child.pid], pss_above=0)
        files = nsproc.unlinked([child.pid], tmp_path.stat().st_dev)
    assert rss.count == 1 and rss.whole and pss.whole
    assert rss.memory_bytes >= 64 << 20 and pss.memory_bytes >= 64 << 20
    assert files.bytes >= 16 << 20


def test_a_launch_is_found_by_its_arguments() -> None:
    marker = ("--bind", f"/nowhere/{os.getpid()}/disk/workspace", "/workspace")
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()", "x", *marker, "y"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert child.stdin
        assert nsproc.with_arguments(marker) == [process.ref_of(child.pid)]
        assert nsproc.with_arguments(marker[::-1]) == []
        child.stdin.close()
