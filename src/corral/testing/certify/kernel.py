"""Doors of the kernel: each is tried in a sandbox as it is, and where fewer defences stand until it opens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from corral.testing.certify.bench import Bench
from corral.testing.certify.register import NO_CONTROL, Try, attack, first, of_its_own
from corral.testing.certify.verdict import Seen, Trial
from corral.testing.hostile.doors import BEYOND, DOORS, SHUT

_GROUPS = {
    "mounts": (
        "mount calls",
        "mounts, unmounts, another root, quotas, accounting and handles of files",
        "mount tmpfs,bind mount,move /proc,umount2,fsopen,fsmount,fsconfig,fspick,move_mount,open_tree,mount_setattr,pivot_root,"
        "chroot,listmount,statmount,quotactl,quotactl_fd,name_to_handle_at,open_by_handle_at,swapon,swapoff,acct,sysfs,ustat",
    ),
    "namespaces": (
        "namespaces",
        "new namespaces, foreign ones, names of the host",
        "unshare user,clone user,clone3,setns,unshare mounts,unshare net,unshare pids,sethostname,setdomainname",
    ),
    "tracing": (
        "tracing calls",
        "calls that read, write or compare another process",
        "ptrace,process_vm_readv,process_vm_writev,pidfd_getfd,process_madvise,process_mrelease,kcmp,perf_event_open",
    ),
    "keyrings": ("keyrings", "keys of the kernel, shared across sandboxes", "keyctl,add_key,request_key"),
    "devices": ("device calls", "device nodes and ports of the machine", "mknod device,iopl,ioperm"),
    "network": ("special sockets", "raw, packet, kernel and machine sockets", "packet socket,raw socket,raw socket 6,alg socket,vsock"),
    "terminal": ("terminal input", "input forged on a terminal (TIOCSTI, TIOCLINUX)", "TIOCSTI,TIOCLINUX"),
    "identity": ("uid 0", "becoming root, more priority", "setuid 0,setgid 0,nice -20"),
}  # fmt: skip
_REST = "kernel"
_ONE_UID = {"setuid 0", "setgid 0"}


def is_open(name: str, answer: str) -> bool:
    """Whether an answer says that the call was let in. With one uid inside `setuid(0)` is EINVAL: there is no such id."""
    return answer == "ok" or (answer in BEYOND and name not in _ONE_UID)


def attack_of(name: str, answer: str | None) -> Seen:
    """What a sandbox as it is answered."""
    if answer is None:
        return Seen(None, "not tried")
    if is_open(name, answer):
        return Seen(True, f"let in ({answer})")
    known = answer in SHUT or name in _ONE_UID
    return Seen(False, answer) if known else Seen(None, f"{answer}: neither yes nor no")


def control_of(name: str, places: Sequence[tuple[str, dict[str, Any] | None]]) -> Seen:
    """The first place where the door is open."""
    tried = [(where, answers[name]) for where, answers in places if answers is not None and name in answers]
    if not tried:
        return NO_CONTROL
    return first(*(Seen(is_open(name, answer), f"opens: {where}" if is_open(name, answer) else f"{answer} {where} too") for where, answer in tried))  # fmt: skip


async def _answers(bench: Bench) -> tuple[dict[str, str], list[tuple[str, dict[str, Any] | None]]]:
    async def ask() -> tuple[dict[str, str], list[tuple[str, dict[str, Any] | None]]]:
        held, unfiltered = await bench.held(), await bench.unfiltered()

        async def without() -> list[dict[str, Any]]:
            return [await unfiltered.ask(DOORS, where) for where in ("exec", "namespace")]

        inside, (plain, namespace), user, root = await asyncio.gather(
            *(held.ask(DOORS, "exec"), without()),
            *(bench.outside(DOORS, who, who=who) for who in ("user", "root")),
        )
        places: list[tuple[str, dict[str, Any] | None]] = [
            ("without the filter", plain),
            ("without the filter, in a user namespace", namespace),
            ("for an ordinary user of the host", user),
            ("for root of the host", root),
        ]
        return inside, places

    answers: tuple[dict[str, str], list[tuple[str, dict[str, Any] | None]]] = await bench.once("doors", ask)
    return answers


def _doors(names: frozenset[str] | None) -> Try:
    named = frozenset(name for _, _, text in _GROUPS.values() for name in text.split(","))

    async def run(bench: Bench) -> list[Trial]:
        inside, places = await _answers(bench)
        own = set((await (await bench.held()).ask(DOORS, "names"))["host"]) if await bench.own_kernel() else set()
        mine = [name for name in inside if (name in names if names is not None else name not in named)]
        missing = [] if names is None else sorted(names - set(inside))
        seen = {name: attack_of(name, inside[name]) for name in mine}
        seen.update({name: of_its_own(seen[name]) for name in mine if name in own})
        return [Trial(name, seen[name], control_of(name, places)) for name in mine] + [
            Trial(name, Seen(None, "not a call of this architecture"), NO_CONTROL) for name in missing
        ]

    return run


for _group, (_name, _about, _text) in _GROUPS.items():
    attack(_group, _name, _about)(_doors(frozenset(_text.split(","))))
attack(
    _REST,
    "further calls",
    "bpf, io_uring, userfaultfd, modules, kexec, reboot, clocks, logs, foreign calls and others",
)(_doors(None))
