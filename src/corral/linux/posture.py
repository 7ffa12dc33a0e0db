"""Behaviour probes of this host for `corral doctor --security`: each is tried, not looked up, where trying harms nothing. Under a second."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from corral.domain.grade import Check, check_dict
from corral.errors import CorralError
from corral.linux import cgroups, seccomp, userns

_CLONE_NEWUSER, _CLONE_NEWNS, _CLONE_NEWNET, _CLONE_NEWPID = 0x10000000, 0x00020000, 0x40000000, 0x20000000
_LANDLOCK, _MOUNT_SETATTR = 444, 442
LANDLOCK_SIGNALS = 6
OLDEST_KERNEL = (5, 15)
_HARMLESS: tuple[Callable[[ctypes.CDLL], int], ...] = (
    lambda libc: int(libc.unshare(0)),
    lambda libc: int(libc.personality(0x40000)),  # addresses that are not randomised
)
"""Calls that the filter refuses with EPERM: by its number the first, by its argument the second. Any process may make them."""
PATIENCE_S = 10.0


def checks() -> list[Check]:
    """Every check, the important ones first. A probe that cannot be made says so and costs nothing.

    They fork and change the child, so they run in a process of their own, which has no threads. Raises `infra_error`.
    """
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from corral.linux import posture; posture._tell()"
    command = [sys.executable, "-I", "-S", "-c", code, json.dumps([path for path in sys.path if path])]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=True)
        return [Check(**check) for check in json.loads(done.stdout)]
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        raise CorralError("infra_error", f"the host could not be probed: {error}") from error


def _tell() -> None:
    print(json.dumps([check_dict(probe()) for probe in _PROBES]))


def _in_child(action: Callable[[ctypes.CDLL], bool]) -> bool:
    """What the action says in a child of its own, which it may change as it likes; one that dies or raises did not work."""
    child = os.fork()
    if child == 0:
        status = 2
        with contextlib.suppress(BaseException):
            status = 0 if action(ctypes.CDLL(None, use_errno=True)) else 1
        os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _seccomp(program: bytes | None = None) -> Check:
    """With a control: only a call that is answered without the filter shows that it is the filter which refuses it."""
    installed = partial(_filtered, seccomp.compile("exec") if program is None else program)
    open_calls = [call for call in _HARMLESS if _in_child(lambda libc, call=call: call(libc) >= 0)]  # type: ignore[misc]
    if not _in_child(installed):
        works, seen = False, "cannot be installed"
    elif not open_calls:
        return Check("seccomp filter", "must", None, "cannot be told: what it should refuse is refused without it")
    else:

        def refuses(libc: ctypes.CDLL) -> bool:
            return installed(libc) and all(call(libc) < 0 and ctypes.get_errno() == errno.EPERM for call in open_calls)

        works = _in_child(refuses)
        seen = "refuses what it should" if works else "lets through what it should refuse"
    return Check("seccomp filter", "must", works, seen, "a kernel with CONFIG_SECCOMP_FILTER")


def _filtered(program: bytes, libc: ctypes.CDLL) -> bool:
    """Whether the kernel took the filter for this process, which still runs under it."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    asked = Program(len(program) // 8, program)
    return not libc.prctl(38, 1, 0, 0, 0) and not libc.prctl(22, 2, ctypes.byref(asked), 0, 0)


def _namespaces() -> Check:
    def apart(libc: ctypes.CDLL) -> bool:
        return bool(libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWPID) == 0)

    works = _in_child(apart)
    kind = "should" if os.geteuid() == 0 else "must"
    hint = "sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns"
    return Check("user namespaces", kind, works, "can be made" if works else "cannot be made", hint)  # type: ignore[arg-type]


def _network() -> Check:
    def alone(libc: ctypes.CDLL) -> bool:
        # Root makes them without a user namespace, as the runtimes do, so that one which is forbidden does not hide the other.
        if libc.unshare(_CLONE_NEWNET | (0 if os.geteuid() == 0 else _CLONE_NEWUSER)) != 0:
            return False
        import socket

        return [name for _, name in socket.if_nameindex()] == ["lo"]

    works = _in_child(alone)
    return Check("network namespaces", "must", works, "lo and nothing else" if works else "cannot be made", "a kernel with CONFIG_NET_NS")  # fmt: skip


def _groups() -> Check:
    found = cgroups.host()
    held = [name for name in ("memory", "pids", "cpu") if found.can(name)]
    missing = sorted({"memory", "pids", "cpu"} - set(held))
    hint = "as a user: systemd-run --user --scope -p Delegate=yes; as root: mount cgroup2"
    return Check("control groups", "should", not missing, f"{found.kind}: {', '.join(held) or 'none usable'}", hint)


def _own_ids() -> Check:
    if os.geteuid() == 0:
        return Check("subordinate ids", "should", True, "root gives any")
    given = userns.subordinate("uid") is not None
    mapper = shutil.which("newuidmap") is not None
    seen = f"{'a range' if given else 'no range'} in /etc/subuid, {'newuidmap' if mapper else 'no newuidmap'}"
    return Check("subordinate ids", "should", given and mapper, seen, "usermod --add-subuids, and the package uidmap")


def _landlock() -> Check:
    abi = int(ctypes.CDLL(None).syscall(_LANDLOCK, None, 0, 1))
    seen = f"ABI {abi}" if abi > 0 else "absent"
    return Check("landlock", "may", abi >= LANDLOCK_SIGNALS, f"{seen}, signals are confined from {LANDLOCK_SIGNALS} on", "Linux 6.12 or later")  # fmt: skip


def _idmapped() -> Check:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(_MOUNT_SETATTR, -1, b"", 0, None, 0)
    exists = ctypes.get_errno() != 38  # ENOSYS
    return Check(
        "idmapped mounts", "may", exists, "the call exists" if exists else "no such call", "Linux 5.12 or later"
    )


def _overlay() -> Check:
    known = "\toverlay" in (_read("/proc/filesystems") or "")
    return Check("overlay", "may", known, "known to the kernel" if known else "not loaded", "modprobe overlay")


def _disk() -> Check:
    loop = os.access("/dev/loop-control", os.R_OK | os.W_OK)
    make = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None
    seen = f"{'loop devices' if loop else 'no loop devices'}, {'mkfs.ext4' if make else 'no mkfs.ext4'}"
    return Check("disk images", "should", loop and make, seen, "root, /dev/loop-control and the package e2fsprogs: then the kernel holds the disk limit")  # fmt: skip


def _kernel() -> Check:
    release = platform.release()
    try:
        number = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    except ValueError:
        return Check("kernel", "may", None, release)
    oldest = ".".join(map(str, OLDEST_KERNEL))
    return Check("kernel", "may", number >= OLDEST_KERNEL, release, f"Linux {oldest} or later, with its fixes")


def _ptrace() -> Check:
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    seen = f"scope {scope}" if scope is not None else "no Yama"
    return Check("ptrace scope", "may", scope not in (None, "0"), seen, "sysctl kernel.yama.ptrace_scope=1")


def _bpf() -> Check:
    value = _read("/proc/sys/kernel/unprivileged_bpf_disabled")
    if value is None:
        return Check("unprivileged bpf", "may", None, "the kernel does not say")
    return Check("unprivileged bpf", "may", value != "0", "off" if value != "0" else "on", "sysctl kernel.unprivileged_bpf_disabled=1")  # fmt: skip


def _cores() -> Check:
    pattern = _read("/proc/sys/kernel/core_pattern") or ""
    piped = pattern.startswith("|")
    seen = "the kernel starts a program" if piped else "a file"
    return Check(
        "core pattern", "may", not piped, f"{seen}; sandboxes leave no cores", "sysctl kernel.core_pattern=core"
    )


def _swap() -> Check:
    lines = (_read("/proc/swaps") or "").splitlines()[1:]
    hint = "swapoff, or encrypted swap: what a sandbox had in memory may lie on the disk"
    return Check("swap", "may", not lines, f"{len(lines)} in use" if lines else "none", hint)


def _hidepid() -> Check:
    options = ""
    for line in (_read("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[4] == "/proc":
            options = right.split()[-1]
    hidden = any(option in options.split(",") for option in ("hidepid=1", "hidepid=2", "hidepid=4", "hidepid=invisible", "hidepid=ptraceable"))  # fmt: skip
    if os.geteuid() == 0:
        return Check("hidepid", "may", True, "sandboxes have ids and a /proc of their own" if not hidden else "on")
    return Check("hidepid", "may", hidden, "on" if hidden else "off: other users see command lines", "mount -o remount,hidepid=2 /proc")  # fmt: skip


_PROBES: tuple[Callable[[], Check], ...] = (
    *(_seccomp, _namespaces, _network, _groups, _own_ids, _disk, _landlock, _idmapped, _overlay),
    *(_kernel, _ptrace, _bpf, _cores, _swap, _hidepid),
)
