"""What a tree held at one moment, and what changed between two moments. Values only; `guesttree` takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["file", "dir", "symlink"]


class Entry(NamedTuple):
    """One name of a manifest. `digest`: SHA-256 of a file's bytes or a link's target; None = a directory, or not read."""

    kind: Kind
    size: int
    mode: int
    inode: int
    stamp: int
    """Change time in ns: with inode and size it tells that a file is untouched."""
    digest: bytes | None


@dataclass
class Manifest:
    """What a tree held at one moment: path relative to its root -> entry."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    complete: bool = True
    taken_ns: int = 0

    def digest(self) -> str:
        """`sha256:…` over names, kinds, modes and contents; equal trees have equal digests."""
        whole = hashlib.sha256()
        for path in sorted(self.entries):
            entry = self.entries[path]
            content = (entry.digest or b"").hex()
            whole.update(b"%d:%s%s%o:%s;" % (len(path), path, entry.kind.encode(), entry.mode, content.encode()))
        return f"sha256:{whole.hexdigest()}"

    def dump(self) -> Iterator[bytes]:
        """Lines for a file; `Manifest.load` is the inverse."""
        yield b"corral-manifest 1 %d %d\n" % (self.complete, self.taken_ns)
        for path, entry in self.entries.items():
            digest = entry.digest.hex() if entry.digest else "-"
            numbers = f"{entry.kind} {entry.size} {entry.mode} {entry.inode} {entry.stamp} {digest} "
            yield numbers.encode() + path.hex().encode() + b"\n"

    @classmethod
    def load(cls, lines: Iterable[bytes]) -> Manifest:
        """Raises ValueError on anything that `dump` did not write whole."""
        source = iter(lines)
        head = next(source, b"").split()
        if head[:2] != [b"corral-manifest", b"1"]:
            raise ValueError("not a manifest")
        manifest = cls(complete=head[2] == b"1", taken_ns=int(head[3]))
        for line in source:
            kind, size, mode, inode, stamp, digest, path = line.decode("ascii").split()
            manifest.entries[bytes.fromhex(path)] = Entry(
                kind,  # type: ignore[arg-type]
                int(size),
                int(mode),
                int(inode),
                int(stamp),
                None if digest == "-" else bytes.fromhex(digest),
            )
        return manifest


@dataclass(frozen=True)
class Change:
    """One difference between two manifests; `entry` is the new one, or the old one of what was deleted."""

    path: bytes
    change: Literal["created", "modified", "deleted"]
    entry: Entry


def diff(old: Manifest, new: Manifest, limit: int = 10_000) -> tuple[list[Change], bool]:
    """(changes by path, whether there were more than `limit`). Nothing is called deleted unless `new` is complete.

    A touched file with the same bytes and mode is not a change; nor is a directory whose content changed.
    """
    changes: list[Change] = []
    for path, entry in new.entries.items():
        before = old.entries.get(path)
        if before is None:
            if old.complete:
                changes.append(Change(path, "created", entry))
        elif _differs(before, entry):
            changes.append(Change(path, "modified", entry))
    if new.complete:
        changes += [Change(path, "deleted", entry) for path, entry in old.entries.items() if path not in new.entries]
    changes.sort(key=lambda change: change.path)
    return changes[:limit], len(changes) > limit


def _differs(a: Entry, b: Entry) -> bool:
    if (a.kind, a.mode) != (b.kind, b.mode):
        return True
    if a.kind == "dir":
        return False
    if a.digest is None or b.digest is None:
        return (a.size, a.inode, a.stamp) != (b.size, b.inode, b.stamp)
    return a.digest != b.digest
