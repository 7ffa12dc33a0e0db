"""What a probe starts: an instance of the smallest program there is, which depends on nothing that the host has installed."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from corral.domain.limits import MIB, Limits
from corral.errors import CorralError
from corral.linux import mounts
from corral.ports.runtime import InstanceSpec

LIMITS = Limits(memory_bytes=64 * MIB, pids=16, disk_bytes=4 * MIB, inodes=64, tmp_bytes=MIB)

# A static program of one system call, `pause`.
_PAUSE = {
    "x86_64": (62, bytes.fromhex("b8220000000f05ebf7")),  # mov eax, 34; syscall; again
    "aarch64": (183, bytes.fromhex("000080d2010080d2020080d2030080d2280980d2010000d4faffff17")),  # ppoll
}


@contextmanager
def spec(state_dir: str, installation_id: str) -> Iterator[InstanceSpec]:
    """An instance to try, below STATE/tmp; its trees are removed at the end, unless something is still mounted there."""
    aside = f"{state_dir}/tmp"  # noqa: S108
    os.makedirs(aside, exist_ok=True)
    place = tempfile.mkdtemp(prefix="probe-", dir=aside)
    try:
        directory, rootfs = f"{place}/i", f"{place}/root"
        os.mkdir(directory, 0o711)
        _tree(rootfs)
        name = f"probe-{os.path.basename(place)}"
        command = ("/pause", "--instance", name, "--installation", installation_id)
        yield InstanceSpec(name, "probe", 1, installation_id, directory, rootfs, rootfs, command, LIMITS)
    finally:
        if not mounts.mounts_below(place):
            shutil.rmtree(place, ignore_errors=True)


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
