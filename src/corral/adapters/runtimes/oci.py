"""The OCI runtime configuration of one instance: what crun (and any runtime of that family) is told.

Pure: paths and numbers in, the dictionary of `config.json` out. The groups that hold memory, pids and cpu are not in it: the
launcher puts itself into them before the runtime starts, so that there is no moment without limits and nothing is left to a
runtime's own cgroup code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from corral.domain.limits import KIB, MIB, Limits
from corral.linux import userns
from corral.ports.runtime import InstanceSpec

GUEST_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL")
SANDBOX_UID = 1000
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"

_NAMESPACES = ("pid", "network", "ipc", "uts", "mount", "cgroup")
_MASKED = (
    "acpi",
    "asound",
    "config.gz",
    "fs",
    "interrupts",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "latency_stats",
    "sched_debug",
    "scsi",
    "sysrq-trigger",
    "timer_list",
    "timer_stats",
)
_READ_ONLY = ("bus", "irq", "sys")


@dataclass(frozen=True)
class TmpfsSizes:
    """Bytes of each tmpfs inside. Their sum stays below half of the memory limit: such pages outlive an OOM kill."""

    tmp: int
    shm: int
    run: int
    user: int

    @classmethod
    def of(cls, limits: Limits) -> TmpfsSizes:
        memory = limits.memory_bytes
        small = min(4 * MIB, memory // 64)
        return cls(
            tmp=min(limits.tmp_bytes, memory // 4),
            shm=min(limits.tmp_bytes, memory // 8),
            run=max(64 * KIB, small // 4),
            user=max(64 * KIB, small),
        )


def configuration(
    spec: InstanceSpec,
    *,
    view: str,
    base_uid: int | None,
    open_files: int,
    control_fd: int,
    filter_fd: int | None,
    seccomp: dict[str, Any] | None,
    annotations: dict[str, str] | None = None,
    modes_from_below: bool = False,
    user_namespace: str | None = None,
) -> dict[str, Any]:
    """The whole `config.json`. `view` holds `root`, `disk` and `corral` (the interpreter) where the runtime sees them; `base_uid` is the first host id of the user namespace, None for none (then one id inside).
    `filter_fd` is where the guest finds the filter for its execs; `seccomp` is the filter around both, None for none.
    `modes_from_below` is for programs that give a tmpfs the mode of the directory that it covers. `user_namespace` is the path of one to
    join, with this very map; None to make it."""
    one_uid = base_uid is None
    capabilities = ["CAP_KILL"] if one_uid else list(GUEST_CAPABILITIES)
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in _NAMESPACES],
        "rootfsPropagation": "rslave",
        "maskedPaths": [f"/proc/{name}" for name in _MASKED],
        "readonlyPaths": [f"/proc/{name}" for name in _READ_ONLY],
        "sysctl": {"net.ipv4.ip_unprivileged_port_start": "0"},
    }
    if not one_uid:
        mapping = [{"containerID": 0, "hostID": base_uid, "size": userns.SIZE}]
        linux["namespaces"].append({"type": "user"} | ({"path": user_namespace} if user_namespace else {}))
        linux["uidMappings"] = linux["gidMappings"] = mapping
    if seccomp is not None:
        linux["seccomp"] = seccomp
    options = [] if filter_fd is None else ["--seccomp-exec", f"fd:{filter_fd}"]
    for name, wanted in (
        ("--same-uid", one_uid),
        ("--unsafe-dumpable", "unsafe_dumpable_guest" in spec.unsafe),
        ("--unsafe-no-landlock", "unsafe_no_landlock" in spec.unsafe),
    ):
        if wanted:
            options.append(name)
    uid = SANDBOX_UID if one_uid else 0
    return {
        "ociVersion": "1.0.2",
        "hostname": spec.hostname,
        "root": {"path": f"{view}/root", "readonly": True},
        "process": {
            "terminal": False,
            "user": {"uid": uid, "gid": uid, "umask": 0o022},
            "args": [*spec.guest_argv, *options, "--control-fd", str(control_fd)],
            "env": [f"PATH={PATH}", "LANG=C.UTF-8", "HOME=/home/sandbox"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {
                "bounding": capabilities,
                "effective": capabilities,
                "permitted": capabilities,
                "inheritable": capabilities if one_uid else [],
                "ambient": capabilities if one_uid else [],
            },
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "hard": open_files, "soft": open_files},
                {"type": "RLIMIT_CORE", "hard": 0, "soft": 0},
            ],
        },
        "mounts": _mounts(spec, view, modes_from_below),
        "linux": linux,
        "annotations": annotations or {},
    }


def _mounts(spec: InstanceSpec, view: str, modes_from_below: bool) -> list[dict[str, Any]]:
    sizes = TmpfsSizes.of(spec.limits)
    owner = (f"uid={SANDBOX_UID}", f"gid={SANDBOX_UID}")
    mounts = [
        _mount("proc", "/proc", "proc", "nosuid", "noexec", "nodev"),
        _tmpfs("/dev", 64 * KIB, 64, "noexec", mode="755"),
        _mount(
            "devpts",
            "/dev/pts",
            "devpts",
            "nosuid",
            "noexec",
            "newinstance",
            "ptmxmode=0666",
            "mode=0620",
            "gid=5",
            "max=64",
        ),
        _tmpfs("/dev/shm", sizes.shm, sizes.shm // 4096, "nodev"),  # noqa: S108
        _tmpfs("/tmp", sizes.tmp, sizes.tmp // 4096, "nodev"),  # noqa: S108
        _tmpfs("/run", sizes.run, 256, "nodev", mode="755"),
        _tmpfs("/run/user/1000", sizes.user, 1024, "nodev", *owner, mode="700"),
        _bind(f"{view}/corral", "/.corral", "ro"),
        _bind(f"{view}/disk/workspace", "/workspace", "rw"),
        _bind(f"{view}/disk/home", "/home/sandbox", "rw"),
        _bind(f"{view}/disk/var_tmp", "/var/tmp", "rw"),  # noqa: S108
    ]
    if modes_from_below:
        # Whatever the base has there, this one has the right mode. /run and /dev are as closed as the base has them: small, and nobody's
        # way out; runc would make no devices in a /dev that is bound.
        below = _bind(f"{view}/disk/var_tmp", "/tmp", "ro")  # noqa: S108
        mounts.insert(next(at for at, one in enumerate(mounts) if one["destination"] == "/tmp"), below)  # noqa: S108
    return mounts


def _mount(kind: str, target: str, source: str, *options: str) -> dict[str, Any]:
    return {"type": kind, "destination": target, "source": source, "options": list(options)}


def _tmpfs(target: str, size: int, inodes: int, *options: str, mode: str = "1777") -> dict[str, Any]:
    limits: Sequence[str] = (f"size={size}", f"nr_inodes={max(64, inodes)}", f"mode={mode}")
    return _mount("tmpfs", target, "tmpfs", "nosuid", *options, *limits)


def _bind(source: str, target: str, access: str) -> dict[str, Any]:
    return _mount("bind", target, source, "rbind", access, "nosuid", "nodev")


def left_open(mountinfo: str, exists: Callable[[str], bool]) -> list[str]:
    """Paths below /proc that the configuration shuts and a program of the family left open; `mountinfo` is of the instance's first process.

    Of two mounts at one place the later one is seen. What this kernel does not have (`exists`) nobody has to shut.
    """
    options = {fields[4]: fields[5].split(",") for line in mountinfo.splitlines() if len(fields := line.split()) > 5}
    masked = [path for path in (f"/proc/{name}" for name in _MASKED) if path not in options]
    writable = [path for path in (f"/proc/{name}" for name in _READ_ONLY) if "ro" not in options.get(path, ())]
    return [path for path in masked + writable if exists(path)]
