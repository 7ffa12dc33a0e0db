"""What a probe starts: an instance of the smallest program there is, which depends on nothing that the host has installed.

It has an id and a directory like every instance, so that whoever cleans up after a death in the middle finds all of it. A lock that
ends with its process says that it is no leftover yet (`corral.node.leftovers`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from corral.adapters.runtimes import _instance
from corral.domain.ids import new_id, ulid_of
from corral.domain.limits import MIB, Limits
from corral.errors import CorralError
from corral.linux import mounts, nsproc, process
from corral.ports.runtime import Evidence, InstanceSpec

LIMITS = Limits(memory_bytes=64 * MIB, pids=16, disk_bytes=4 * MIB, inodes=64, tmp_bytes=MIB)

# A static program of one system call, `pause`.
_PAUSE = {
    "x86_64": (62, bytes.fromhex("b8220000000f05ebf7")),  # mov eax, 34; syscall; again
    "aarch64": (183, bytes.fromhex("000080d2010080d2020080d2030080d2280980d2010000d4faffff17")),  # ppoll
}


LOCK = "probe.lock"
_TIMES, _LONGEST_S = 3, 0.3
_VERSION_S, _VERSION_BYTES = 6.0, 4096
_VERSION = re.compile(r"\S+\s+(?::\s*)?(?:version\s+)?(?=\S*[0-9])([A-Za-z0-9_.+~-]{1,64})(?:\s|$)")
T = TypeVar("T")


def fastest(once: Callable[[], tuple[float, T]]) -> tuple[float, T]:
    """The quickest of a few tries, with its answer: one alone tells more of what else the host was doing than of the runtime."""
    end = time.monotonic() + _LONGEST_S
    tries = [once()]
    while len(tries) < _TIMES and time.monotonic() < end:
        tries.append(once())
    return min(tries, key=lambda one: one[0])


def version(program: str) -> str | None:
    """What `program --version` names; None where it names none, or does not run. Raises `runtime_unavailable` when it does not end.

    It may be anything: only the beginning of what it says is read, and what runs of its session then is ended, as far as this user may.
    """
    try:
        child = subprocess.Popen(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": _instance.PATH},
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        return None
    leader = process.ref_of(child.pid)
    assert leader is not None and child.stdout is not None  # not reaped yet, so it is there
    said, end = b"", time.monotonic() + _VERSION_S
    try:
        with child.stdout:
            while len(said) < _VERSION_BYTES:
                if not select.select([child.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                    break
                if not (part := os.read(child.stdout.fileno(), _VERSION_BYTES)):
                    break
                said += part
        if not process.wait_gone_blocking(leader, max(0.0, end - time.monotonic())):
            why = f"{program} --version did not end in {_VERSION_S:.0f} s"
            raise CorralError("runtime_unavailable", why, hint="see whether the program is what it should be")
    finally:
        status = _ended(child)
    found = _VERSION.match(said.decode("ascii", "replace"))
    return found[1] if found and status == 0 else None


def _ended(child: subprocess.Popen[bytes]) -> int | None:
    """End the session that a child leads; -> the child's status, None when it may not be ended and has not."""
    end = time.monotonic() + _VERSION_S
    while left := nsproc.in_session(child.pid):  # not reaped yet: the number is its own
        for one in left:
            with contextlib.suppress(PermissionError):  # a set-id program, which is another's to end
                process.kill(one)
        process.wait_gone_blocking(left[0], 0.05)
        if time.monotonic() > end:
            break
    try:
        return child.wait(0)
    except subprocess.TimeoutExpired:
        return None


def must_be_clean(runtime: str, evidence: Evidence) -> None:
    """A runtime that cannot remove what it has made is of no use."""
    if not evidence.clean:
        raise CorralError("runtime_unavailable", f"{runtime} leaves behind {', '.join(evidence.left)}")


@contextmanager
def place(state_dir: str) -> Iterator[tuple[str, str]]:
    """(id, directory) for something that is tried, below STATE/i; removed at the end, unless something is still mounted there."""
    instance_id = new_id("ins", time.time_ns() // 1_000_000, os.urandom(10))
    directory = f"{state_dir}/i/{ulid_of(instance_id)}"
    os.makedirs(f"{state_dir}/i", 0o711, exist_ok=True)
    os.mkdir(directory, 0o711)
    lock = os.open(f"{directory}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield instance_id, directory
    finally:
        if not mounts.mounts_below(directory):
            shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


@contextmanager
def spec(state_dir: str, installation_id: str) -> Iterator[InstanceSpec]:
    """An instance to try; its trees go at the end, whoever tried it has destroyed it by then."""
    with place(state_dir) as (name, directory):
        rootfs = f"{directory}/probe-root"
        _tree(rootfs)
        command = ("/pause", "--instance", name, "--installation", installation_id)
        yield InstanceSpec(name, "probe", 1, installation_id, directory, rootfs, rootfs, command, LIMITS)


def _tree(rootfs: str) -> None:
    found = _PAUSE.get(platform.machine())
    if found is None:
        raise CorralError("runtime_unavailable", f"{platform.machine()} is not supported")
    machine, code = found
    for name in (".corral", "workspace", "home/sandbox", "tmp", "var/tmp", "dev", "proc", "run"):
        os.makedirs(f"{rootfs}/{name}")
    start, size = 0x400000, 64 + 56 + len(code)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += b"".join(
        value.to_bytes(width, "little")
        for value, width in (
            *((2, 2), (machine, 2), (1, 4), (start + 120, 8), (64, 8), (0, 8), (0, 4)),
            *((64, 2), (56, 2), (1, 2), (0, 2), (0, 2), (0, 2)),  # sizes and counts of the tables
            *(
                (1, 4),
                (5, 4),
                (0, 8),
                (start, 8),
                (start, 8),
                (size, 8),
                (size, 8),
                (0x1000, 8),
            ),  # load, read + execute
        )
    )
    with open(f"{rootfs}/pause", "wb") as file:
        file.write(header + code)
    # Open to the ids of sandboxes whatever the umask.
    for folder, _, _ in os.walk(rootfs):
        os.chmod(folder, 0o755)  # noqa: S103
    os.chmod(f"{rootfs}/pause", 0o755)  # noqa: S103
