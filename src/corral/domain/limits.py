"""Limits of a sandbox or exec: the numbers, and how a runtime holds each one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

Mode = Literal["enforced", "watched", "absent"]
"""`enforced` by the kernel at once, `watched` by a poll of the host with overshoot, or `absent`."""

LIMIT_NAMES = ("memory", "cpu", "pids", "disk", "inodes", "tmp", "output", "wall")


@dataclass(frozen=True)
class Limits:
    """Every resource of a sandbox, capped. Bytes, counts, cores and seconds; the defaults are those of `decisions`.

    `output_bytes` is what is *kept* per stream (head half, tail half); `output_kill_bytes` ends the exec.
    `tmp_bytes` holds for /tmp; other tmpfs mounts are derived from it, their sum stays below half of `memory_bytes`.
    """

    memory_bytes: int = 512 * MIB
    cpu: float = 1.0
    pids: int = 128
    disk_bytes: int = 1 * GIB
    inodes: int = 65536
    tmp_bytes: int = 64 * MIB
    output_bytes: int = 10 * MIB
    output_kill_bytes: int = 100 * MIB
    wall_s: float = 60.0
    open_files: int = 16384

    def as_dict(self) -> dict[str, Any]:
        """The words of the contract -> numbers (bytes, counts, cores, seconds); `from_dict` is the inverse."""
        return {word: getattr(self, name) for word, name in _WORDS.items()}

    @classmethod
    def from_dict(cls, doc: Mapping[str, Any]) -> Limits:
        """Limits as stored by `as_dict`; a word that is missing gets its default, an unknown one is ignored (a newer writer)."""
        return cls(**{name: doc[word] for word, name in _WORDS.items() if doc.get(word) is not None})


_WORDS = {
    "memory": "memory_bytes",
    "cpu": "cpu",
    "pids": "pids",
    "disk": "disk_bytes",
    "inodes": "inodes",
    "tmp": "tmp_bytes",
    "output": "output_bytes",
    "output_kill": "output_kill_bytes",
    "wall": "wall_s",
    "open_files": "open_files",
}


@dataclass(frozen=True)
class LimitModes:
    """How each limit is held by one runtime on one host."""

    memory: Mode = "absent"
    cpu: Mode = "absent"
    pids: Mode = "absent"
    disk: Mode = "absent"
    inodes: Mode = "absent"
    tmp: Mode = "absent"
    output: Mode = "enforced"
    wall: Mode = "enforced"
    overshoot: dict[str, str] = field(default_factory=dict)  # limit -> sentence, for `watched`

    def as_dict(self) -> dict[str, str]:
        """Limit name -> mode, in the order of `LIMIT_NAMES`."""
        return {name: getattr(self, name) for name in LIMIT_NAMES}

    @classmethod
    def from_dict(cls, doc: Mapping[str, Any]) -> LimitModes:
        """The inverse of `as_dict`; a limit that is not named is `absent`."""
        return cls(**{name: doc.get(name, "absent") for name in LIMIT_NAMES})
