"""The register of attacks: a group, a name, one sentence, and how to try it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from corral.testing.certify.bench import Bench
from corral.testing.certify.verdict import Seen, Trial, Witness

Try = Callable[[Bench], Awaitable[Sequence[Trial]]]

GROUPS: dict[str, str] = {
    "mounts": "mounts, changes of root, handles of files",
    "namespaces": "user and other namespaces inside, names of the host",
    "tracing": "ptrace, memory and descriptors of others",
    "keyrings": "keys of the kernel",
    "kernel": "further doors of the kernel",
    "files": "files of the host, /proc, /sys, core patterns, links laid for the host",
    "devices": "devices and ports",
    "identity": "uid 0, set-uid programs, rights",
    "network": "the host's services, other addresses, raw sockets",
    "terminal": "input forged on a terminal",
    "guest": "guest and supervisors: their memory, signals, capture, frames, fences",
    "limits": "every resource at several times its limit",
    "residue": "what the next tenant and the host find",
}


@dataclass(frozen=True)
class Attack:
    """One attack. `witness` says whose word counts: the host's where it has one."""

    group: str
    name: str
    about: str
    witness: Witness
    run: Try


ATTACKS: list[Attack] = []


def attack(group: str, name: str, about: str, witness: Witness = "inside") -> Callable[[Try], Try]:
    """Register a function as an attack."""
    if group not in GROUPS:
        raise ValueError(f"there is no group {group!r}")

    def register(run: Try) -> Try:
        ATTACKS.append(Attack(group, name, about, witness, run))
        return run

    return register


def of_its_own(seen: Seen) -> Seen:
    """What a sandbox's own kernel lets in is no door of the host's: it shows nothing about that."""
    return Seen(None, f"its own kernel's: {seen.how}") if seen.broke else seen


NO_CONTROL = Seen(None, "no control: it needs root of the host")


def opened(answer: str | None, where: str = "") -> Seen:
    """A try whose program says `ok` when it worked."""
    words = "could not be tried" if answer is None else "works" if answer == "ok" else answer
    return Seen(None if answer is None else answer == "ok", f"{words} {where}".rstrip())


def first(*controls: Seen) -> Seen:
    """The first control that shows the attack at work, else the last that was tried."""
    for control in controls:
        if control.broke:
            return control
    tried = [control for control in controls if control.broke is not None]
    return tried[-1] if tried else (controls[-1] if controls else NO_CONTROL)
