"""Descriptors that no process of a sandbox should have: what leaked in from the process that made it."""

from __future__ import annotations

import contextlib
import os
import re
import stat

from corral.ports.runtime import Instance, InstanceSpec


def strange(pid: int, secret: str, spec: InstanceSpec, instance: Instance, ours: bool) -> dict[int, str]:
    """Descriptors that no process of a sandbox should have. Not `ours`: it is a kernel, which holds the files of its programs."""
    held = {int(n): _link(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")}
    usual = ("socket:", "pipe:", "anon_inode:")
    if ours:
        return {n: to for n, to in held.items() if secret in to or (n > 2 and not to.startswith(usual))}
    return {
        n: to
        for n, to in held.items()
        if secret in to or not (to.startswith((*usual, "/memfd:")) or _shown_inside(pid, n, to, spec, instance))
    }


def _shown_inside(pid: int, number: int, to: str, spec: InstanceSpec, instance: Instance) -> bool:
    """Whether a descriptor of a kernel of its own is the very file of what it shows inside, or one of the instance's own."""
    try:
        held = os.stat(f"/proc/{pid}/fd/{number}")
    except OSError:
        return True  # it is closed meanwhile
    if stat.S_ISCHR(held.st_mode):
        return held.st_rdev == os.stat("/dev/null").st_rdev
    if stat.S_ISDIR(held.st_mode) and re.fullmatch(r"/proc/\d+/fd", to):
        return True  # its own, as it numbers itself
    inside, tree = to.removeprefix("/root"), instance.tree.path
    shown = [f"{spec.rootfs}{inside}", f"{spec.interpreter}{inside.removeprefix('/.corral')}"]
    for name, place in (("workspace", "/workspace"), ("home", "/home/sandbox"), ("var_tmp", "/var/tmp")):  # noqa: S108
        shown.append(f"{tree}/{name}{inside.removeprefix(place)}")
    # Beside its disk and on it, and the pipes to its guest.
    shown += [f"{os.path.dirname(tree)}{to}", f"{tree}{to}", *([to] if to.startswith(f"{spec.directory}/") else [])]
    for path in shown:
        with contextlib.suppress(OSError):
            if os.path.samestat(held, os.stat(path)):
                return True
    return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return "socket:[gone]"
