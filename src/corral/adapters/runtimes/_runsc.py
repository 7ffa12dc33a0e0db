"""What runsc is told, and what it tells: pure, paths and numbers in, words and values out.

The tree that the sandbox gets is complete on the host (`VIEW/root` with the disk's directories and the interpreter mounted in it):
mounts that the configuration names would each cost a connection to the gofer, and could not be replaced later.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from corral.adapters.runtimes import oci
from corral.domain.limits import KIB, MIB, Limits
from corral.linux import userns
from corral.ports.runtime import InstanceSpec

GUEST_CAPABILITIES = (*oci.GUEST_CAPABILITIES, "CAP_SYS_ADMIN")
"""The last is for pid namespaces of execs; like the others it is honoured by gVisor's own kernel only."""

RECORDS, NETWORK, IMAGE, SAVED = "rec", "net", "image", "saved"
"""Names in an instance's place: runsc's own record, the network namespace of its sockets, the snapshot that it is restored from, and
where runsc writes one."""

MEMORY, MEMORY_PARTS = "checkpoint.img", ("pages_meta.img", "pages.img")
"""What runsc writes for a snapshot, and what newer ones write beside it."""

COVERED = "/run/guest"
"""Where the guest alone sees all of /proc: this kernel shows everybody's environment, maps and descriptors to all."""

LAUNCH_MEMORY = 64 * MIB
"""What runsc itself needs beside the sandbox, until it has started that."""

HOST_PIDS_SHARE, HOST_PIDS = 16, 1024
"""Host threads that one process inside may cost at most, and those of gVisor itself: a bound for a captured gVisor, never met before."""

# Standard input and output become the two FIFOs; the network namespace is entered first, as that is not the user namespace's own.
_ENTER = """
exec 3>&- <>"$1" 1<>"$2" || exit 95
network=$3
shift 3
exec nsenter --net="$network" -- nsenter --user=/proc/self/fd/7 -- /bin/sh -c 'exec 7<&-; exec "$@"' sh "$@"
"""


def configuration(spec: InstanceSpec, *, view: str, open_files: int, exec_filter: bytes | None) -> dict[str, Any]:
    """The whole `config.json`. The user namespace is entered before runsc starts, so it is not named here."""
    capabilities = list(GUEST_CAPABILITIES)
    # gVisor counts by user: guest, supervisor and main itself began as another one.
    processes = max(1, spec.limits.pids - 3)
    # No descriptor but the standard streams reaches the inside, and no file of ours is in the tree.
    options = ["--cover-proc", COVERED]
    options += [] if exec_filter is None else ["--seccomp-exec", f"hex:{exec_filter.hex()}"]
    if "unsafe_dumpable_guest" in spec.unsafe:
        options.append("--unsafe-dumpable")
    return {
        "ociVersion": "1.0.2",
        "hostname": spec.hostname,
        # Read-only by its mount on the host. Told so, gVisor would make the workspace read-only with it.
        "root": {"path": f"{view}/root", "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0, "umask": 0o022},
            "args": [*spec.guest_argv, *options, "--control-fifo"],
            "env": [],  # it needs none, and a kernel that shows it to all shows one word of its own, HOME=/root
            "cwd": "/",
            "noNewPrivileges": True,
            # A program of uid 0 gets the bounding set there: the guest's one more is none of it.
            "capabilities": {
                "bounding": list(oci.GUEST_CAPABILITIES),
                "effective": capabilities,
                "permitted": capabilities,
            },
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "hard": open_files, "soft": open_files},
                {"type": "RLIMIT_NPROC", "hard": processes, "soft": processes},
                {"type": "RLIMIT_CORE", "hard": 0, "soft": 0},
            ],
        },
        "mounts": _mounts(spec.limits),
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }


def _mounts(limits: Limits) -> list[dict[str, Any]]:
    sizes = oci.TmpfsSizes.of(limits)
    owner = (f"uid={oci.SANDBOX_UID}", f"gid={oci.SANDBOX_UID}")
    return [
        {"type": "proc", "destination": "/proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
        _tmpfs("/dev/shm", sizes.shm),  # noqa: S108
        _tmpfs("/tmp", sizes.tmp),  # noqa: S108
        _tmpfs("/run", sizes.run, mode="755"),
        _tmpfs("/run/user", 64 * KIB, mode="755"),  # made as a place for the next one it would be open to all
        _tmpfs("/run/user/1000", sizes.user, *owner, mode="700"),
    ]


def _tmpfs(target: str, size: int, *options: str, mode: str = "1777") -> dict[str, Any]:
    settings = ["nosuid", "nodev", *options, f"size={size}", f"mode={mode}"]
    return {"type": "tmpfs", "destination": target, "source": "tmpfs", "options": settings}


def start_command(
    program: str, spec: InstanceSpec, *, view: str, to_guest: str, from_guest: str, restored: bool
) -> list[str]:
    """What the launcher becomes: it enters the instance's namespaces and starts or restores the sandbox."""
    verb = ["restore", "-image-path", f"{view}/{IMAGE}"] if restored else ["run"]
    return [
        *("/bin/sh", "-c", _ENTER, "sh", to_guest, from_guest, f"{view}/{NETWORK}"),
        *(program, "--root", f"{view}/{RECORDS}", *_OPTIONS, *verb),
        *("-detach", "-bundle", view, "-pid-file", f"{view}/{RECORDS}/pid", spec.instance_id),
    ]


def checkpoint_command(program: str, *, view: str, user_namespace: str, instance_id: str) -> list[str]:
    """Writes into `VIEW/saved`, as root of the instance's user namespace, who is nobody on the host.

    Never with `-leave-running`: that restarts the sandbox with the standard streams of this very command.
    """
    # The network namespace first, as it is not the user namespace's own.
    enter = ["nsenter", f"--net={view}/{NETWORK}", "--", "nsenter", f"--user={user_namespace}", "--"]
    verb = ["checkpoint", "-image-path", f"{view}/{SAVED}", instance_id]
    return [*enter, program, "--root", f"{view}/{RECORDS}", *_OPTIONS, *verb]


# The platform is always named: one that a host seems to offer (kvm) may hang at the first start.
_OPTIONS = ("--platform=ptrace", "--network=none", "--file-access=shared", "--ignore-cgroups")


def gofer_pid(record: str) -> int | None:
    """The pid of the gofer out of runsc's own record of a sandbox."""
    try:
        found = json.loads(record).get("goferPid")
    except (ValueError, AttributeError):
        return None
    return found if type(found) is int and found > 1 else None


def host_limits(limits: Limits, *, launching: bool) -> Limits:
    """What the control group around gVisor gets. A limit of pids there would end the whole sandbox: inside, RLIMIT_NPROC holds them."""
    memory = limits.memory_bytes + (LAUNCH_MEMORY if launching else 0)
    return replace(limits, memory_bytes=memory, pids=limits.pids * HOST_PIDS_SHARE + HOST_PIDS, open_files=userns.SIZE)


# -- what a probe runs inside ----------------------------------------------------------------------------------------------------

PROBED = {"t": "tmp", "p": "pids"}
"""Letter that the program writes -> the limit that held."""

# As uid 1000: write 2 MiB to a file in /tmp, fork up to eight times, then write `tp` to standard output with `-` for what was not refused; wait.
_PROGRAM = {
    "x86_64": bytes.fromhex(
        "bfe803000089fe89fab8770000000f05b8750000000f05488d3d6b000000be41000000bab6010000b8020000000f0589c7be00004000"
        "ba00002000b8010000000f05488d1d0200000039d07403c60374bd08000000b8390000000f0585c074207806ffcd75efeb04c6430170"
        "4889debf01000000ba02000000b8010000000f05b8220000000f05ebf72f746d702f66002d2d"
    )
}


def probe_program(machine: str) -> bytes | None:
    """A static program that tries the limits which gVisor holds inside; None where there is none for this kind of machine."""
    code = _PROGRAM.get(machine)
    if code is None:
        return None
    start, memory = 0x400000, 4 * MIB
    fields = (
        (2, 2),
        (62, 2),
        (1, 4),
        (start + 120, 8),
        (64, 8),
        (0, 8),
        (0, 4),
        (64, 2),
        (56, 2),
        (1, 2),
        (0, 2),
        (0, 2),
        (0, 2),
    )
    segment = ((1, 4), (7, 4), (0, 8), (start, 8), (start, 8), (120 + len(code), 8), (memory, 8), (0x1000, 8))
    numbers = b"".join(value.to_bytes(width, "little") for value, width in (*fields, *segment))
    return b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + numbers + code
