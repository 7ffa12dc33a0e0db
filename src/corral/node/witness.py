"""What this node really does, noted before it does it: for tests that compare it with what callers were told. Off in production.

`CORRAL_WITNESS=FILE` makes every process that is a node append one JSON document per line: `at` (nanoseconds of the host's monotonic
clock), `by` (`node:PID`), `kind`, and its facts. A note is one write to a file opened for appending: the death of the process loses
none, and the notes of a node and its successor stand in the order of what they did. `corral.testing.history.events` lists the kinds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

VARIABLE = "CORRAL_WITNESS"
OP = "CORRAL_OP"
"""What the caller of an exec calls it, in its environment: the exec is the node's name for it."""

_path = os.environ.get(VARIABLE)
_fd: int | None = None


def note(kind: str, **facts: object) -> None:
    """Nothing without the variable."""
    global _fd
    if not _path:
        return
    if _fd is None:
        _fd = os.open(_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    told = {name: str(value) if name == "fence" else value for name, value in facts.items() if value is not None}
    line = {"at": time.monotonic_ns(), "by": f"node:{os.getpid()}", "kind": kind, **told}
    os.write(_fd, (json.dumps(line, separators=(",", ":")) + "\n").encode())


def op_of(env: Mapping[str, str]) -> str | None:
    """The caller's name for an exec."""
    return env.get(OP)
