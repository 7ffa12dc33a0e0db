"""A history: one event per line of JSON, each with its moment on the host's monotonic clock, which all processes of one host share.

| kind | by | facts |
|---|---|---|
| `invoke` | client | `op`, `call`, what it sends: `sandbox`, `fence`, `key`, `owner` |
| `return` | client | `op`, `ok`, `code` of a refusal, what it was told; an invoke without one has an unknown outcome |
| `create` `floor` `fenced` `start` `end` `destroy` `destroyed` | node | what it accepted: `instance`, `sandbox`, `exec`, `fence`, `mode` |
| `line` | guest | what a program wrote inside: `sandbox`, `op`, `fence`, `what` (begin, tick, end) |
| `fault` | nemesis | `what`; of a restored database `copied_at` and `until` |
| `hook` | receiver | what a webhook told: `of` (the client's name for the run), `run`, its result, `delivery`, `signed` |
| `run` `sandbox` `quota` `left` | final | what is there when all is quiet again |

`floor` is noted before a fence is journalled, `fenced` after the guest acknowledged it: from then on nothing older acts. `start` is
noted before the frame is sent, `end` after the last process of the exec ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

Json = dict[str, Any]


@dataclass(frozen=True, order=True)
class Fence:
    """(incarnation, token), compared in this order. An own one: the checker shares no code with what it checks."""

    incarnation: int
    token: int

    @classmethod
    def of(cls, text: str) -> Fence:
        left, _, right = text.partition(".")
        return cls(int(left), int(right))

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.token}"


@dataclass(frozen=True)
class Event:
    """See the module docstring. `at`: nanoseconds."""

    at: int
    by: str
    kind: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def get(self, name: str, default: Any = None) -> Any:
        return self.facts.get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    @property
    def fence(self) -> Fence | None:
        text = self.facts.get("fence")
        return None if text is None else Fence.of(text)

    def __str__(self) -> str:
        words = " ".join(f"{name}={_short(value)}" for name, value in self.facts.items())
        return f"{self.at / 1e9:.6f} {self.by} {self.kind} {words}".rstrip()

    def line(self) -> str:
        return json.dumps({"at": self.at, "by": self.by, "kind": self.kind, **self.facts}, separators=(",", ":"))

    @classmethod
    def parse(cls, line: str) -> Event:
        told = json.loads(line)
        return cls(told.pop("at"), told.pop("by"), told.pop("kind"), told)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= 120 else text[:117] + "..."


class Recorder:
    """Appends events to a file, each in one write: a process that is killed loses none that it had noted."""

    def __init__(self, path: str | os.PathLike[str], by: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.by = by

    def note(self, kind: str, **facts: Any) -> Event:
        event = Event(time.monotonic_ns(), self.by, kind, {name: v for name, v in facts.items() if v is not None})
        self.put(event)
        return event

    def put(self, event: Event) -> None:
        """One that was noted elsewhere."""
        os.write(self._fd, (event.line() + "\n").encode())

    def close(self) -> None:
        os.close(self._fd)


def read(source: IO[str] | Iterable[str]) -> Iterator[Event]:
    """Events of a file; a last line that was cut short is none."""
    for line in source:
        if line.endswith("\n"):
            yield Event.parse(line)


def merged(events: Iterable[Event]) -> list[Event]:
    """In the order of time; what has the same moment stays in the order in which it was given."""
    return sorted(events, key=lambda event: event.at)
