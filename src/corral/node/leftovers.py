"""What of ours lies around on the host without an owner: found by looking, never by remembering.

Ours is what carries the installation's id (processes, control groups) or lies under its state directory (instance directories,
mounts, loop devices, spools). What a live or half-made instance of the journal owns is not a leftover, nor what a probe tries just now.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from corral.domain.ids import is_id
from corral.linux import cgroups, process


def find(
    state_dir: str, installation_id: str, *, owned: set[str], condemned: set[str], execs: set[str]
) -> list[dict[str, Any]]:
    """`{"kind", "id", "instance_id", ...}` for each; `condemned` instances are in the journal but should be gone."""
    found: list[dict[str, Any]] = []

    def add(kind: str, name: str, instance_id: str | None, **more: Any) -> None:
        if instance_id is None or instance_id not in owned:
            found.append({"kind": kind, "id": name, "instance_id": instance_id, **more})

    directory = os.path.join(state_dir, "i")
    tried = set(_tried(directory))
    for name in filter(_instance, _names(directory)):  # what is not named like ours is not ours
        add("directory", name, _instance(name), path=os.path.join(directory, name))
    for instance_id in condemned:
        add("instance", instance_id, instance_id)
    for point in _mounts(directory):
        name = point[len(directory) + 1 :].split("/", 1)[0]
        add("mount", point, _instance(name))
    for device, backing in _loops(directory):
        name = backing[len(directory) + 1 :].split("/", 1)[0]
        add("loop", device, _instance(name))
    try:
        groups = cgroups.host().find_ours(installation_id)
    except (OSError, ValueError):
        groups = []
    for group in groups:
        add("cgroup", group, _instance(group.rpartition("/")[2].removeprefix("ins_")))
    for pid, owner in _processes(installation_id):
        if (started := process.start_time(pid)) is not None:
            add("process", str(pid), owner, start_time=started)
    spool = os.path.join(state_dir, "spool")
    for name in _names(spool):
        if name not in execs:
            add("spool", name, None, path=os.path.join(spool, name))
    tried.update(_tried(directory))  # some began while we looked
    return [item for item in found if item["instance_id"] not in tried]


def _tried(directory: str) -> Iterator[str]:
    """Instances that a living probe has: it holds their lock."""
    for name in _names(directory):
        instance_id = _instance(name)
        try:
            fd = os.open(os.path.join(directory, name, "probe.lock"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if instance_id is not None:
                yield instance_id
        finally:
            os.close(fd)


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _instance(name: str) -> str | None:
    instance_id = f"ins_{name}"
    return instance_id if is_id(instance_id, "ins") else None


def _mounts(directory: str) -> Iterator[str]:
    with open("/proc/self/mountinfo", "rb") as file:
        for line in file:
            # Octal escapes stand for blanks and backslashes; Python knows the same ones.
            point = line.split()[4].decode("unicode_escape").encode("latin-1").decode("utf-8", "surrogateescape")
            if point.startswith(directory + "/"):
                yield point


def _loops(directory: str) -> Iterator[tuple[str, str]]:
    try:
        devices = [name for name in os.listdir("/sys/block") if name.startswith("loop")]
    except OSError:
        return
    for device in devices:
        try:
            with open(f"/sys/block/{device}/loop/backing_file", "rb") as file:
                backing = os.fsdecode(file.read().rstrip(b"\n"))
        except OSError:
            continue
        if backing.startswith(directory + "/"):
            yield f"/dev/{device}", backing.removesuffix(" (deleted)")


def _processes(installation_id: str) -> Iterator[tuple[int, str | None]]:
    """Guests of ours by their command line: `--installation ID --instance ID` in any order."""
    wanted = installation_id.encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if _after(words, b"--installation") == wanted:
            instance_id = (_after(words, b"--instance") or b"").decode("ascii", "replace")
            yield int(name), instance_id if is_id(instance_id, "ins") else None


def _after(words: list[bytes], option: bytes) -> bytes | None:
    for word, following in pairwise(words):
        if word == option:
            return following
    return None
