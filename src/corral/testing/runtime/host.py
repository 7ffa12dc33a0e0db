"""What the host shows of instances, looked for without the adapter: processes, mounts, loop devices, control groups, files."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from corral.ports.runtime import InstanceSpec


def traces(spec: InstanceSpec) -> list[str]:
    """Everything on the host that still speaks of an instance."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        found += [f"mount {line.split()[4]}" for line in table if spec.directory in line]
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if spec.directory in (name := backing.read_text().strip()):
                found.append(f"loop {name}")
    for path, names, _ in os.walk("/sys/fs/cgroup"):  # groups of others vanish meanwhile: `walk` does not mind
        found += [f"cgroup {path}/{name}" for name in names if name == spec.instance_id]
    for place in Path("/proc").iterdir():
        if place.name.isdigit() and int(place.name) not in (os.getpid(), os.getppid()):
            with contextlib.suppress(OSError):
                line = (place / "cmdline").read_bytes()
                named = os.fsencode(f"{spec.directory}/") in line or os.fsencode(spec.instance_id) in line
                if named and b"corral.testing.runtime" not in line:
                    found.append(f"process {place.name} {line[:80]!r}")
    for place in Path("/run/corral").glob("**/*"):
        if place.is_symlink() and spec.instance_id in os.readlink(place):
            found.append(f"uid range {place}")
    if os.path.lexists(spec.directory):
        # The directory itself and the socket in it were made by the caller: the adapter may leave them.
        found += [f"file {spec.directory}/{name}" for name in os.listdir(spec.directory) if name not in ("s", "again")]
    return found


def tried(installation_id: str, state_dir: str) -> list[str]:
    """Processes and mounts of the instances that probes try."""
    found = []
    mark, place = f"\0{installation_id}\0".encode(), f"{state_dir}/tmp/"  # noqa: S108
    for entry in (Path("/proc/self"), *Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            if place in (entry / "mountinfo").read_text(errors="surrogateescape"):
                found.append(f"mounts of {entry}")
            if mark in (entry / "cmdline").read_bytes():
                found.append(str(entry))
    return found


def host_uid(pid: int) -> int:
    """As whom a process runs."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Uid:"):
                return int(line.split()[2])
    raise AssertionError(f"no uid of {pid}")
