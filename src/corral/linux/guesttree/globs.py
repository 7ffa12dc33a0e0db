"""Patterns of names in a tree, over bytes: a name need not be text."""

from __future__ import annotations

import re

from corral.errors import CorralError

Glob = tuple[list[bytes], re.Pattern[bytes]]
"""Leading directories that are fixed, and the expression for the whole relative path."""
_WILD = re.compile(rb"[*?\[]")


def glob(pattern: str) -> Glob:
    """`*` and `?` stay within a name, `**` crosses directories; a match of a directory takes all below it."""
    parts = [part for part in pattern.encode("utf-8", "surrogateescape").split(b"/") if part not in (b"", b".")]
    if b".." in parts or not parts or any(b"\0" in part for part in parts):
        raise CorralError("invalid_value", f"not a glob below the workspace: {pattern!r}", field="/outputs")
    fixed: list[bytes] = []
    for part in parts[:-1]:
        if _WILD.search(part):
            break
        fixed.append(part)
    out = b""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == b"**":
            out += rb".+" if last else rb"(?:[^/]+/)*"
        else:
            out += _glob_name(part) + (b"" if last else b"/")
    if parts[-1] != b"**":
        out += rb"(?:/.+)?"
    return fixed, re.compile(out, re.DOTALL)


def _glob_name(part: bytes) -> bytes:
    out, at = b"", 0
    while at < len(part):
        char = part[at : at + 1]
        at += 1
        if char == b"*":
            out += rb"[^/]*"
        elif char == b"?":
            out += rb"[^/]"
        elif char == b"[" and (end := part.find(b"]", at + 1)) > 0:
            inside = part[at:end]
            negate = inside[:1] in (b"!", b"^")
            inside = inside[1:] if negate else inside
            out += b"[" + (b"^/" if negate else b"") + re.escape(inside).replace(rb"\-", b"-") + b"]"
            at = end + 1
        else:
            out += re.escape(char)
    return out
