"""Processes of a pid namespace as the host sees them."""

from __future__ import annotations

import os
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
        (inner,) = nsproc.children(child.pid)
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
    rss, pss = nsproc.totals(pids), nsproc.totals(pids, pss=True)
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
            found.append([nsproc.totals([child.pid], pss=pss).memory_bytes for pss in (False, True)])
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
            assert nsproc.unlinked([child.pid], device + 1) == (0, 0)
            child.stdin.write(b"\n")
            child.stdin.flush()
    (size, count), after = found
    assert count == 2 and 2 << 20 <= size < 3 << 20
    assert after == (0, 0)


def test_a_launch_is_found_by_its_arguments() -> None:
    marker = ("--bind", f"/nowhere/{os.getpid()}/disk/workspace", "/workspace")
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()", "x", *marker, "y"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert child.stdin
        assert nsproc.with_arguments(marker) == [process.ref_of(child.pid)]
        assert nsproc.with_arguments(marker[::-1]) == []
        child.stdin.close()
