"""The members that a request may have, and one JSON object of them, read member by member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from corral.domain.expiry import NONE, UNLIMITED_S
from corral.domain.quantities import parse_seconds, shown
from corral.domain.values import empty, invalid, nearest, pointer, relative_path
from corral.errors import CorralError

RESOURCE_FIELDS = ("memory", "cpu", "pids", "disk", "tmp", "output_limit", "output_kill")
LATER_FIELDS = (
    "dependencies",
    "dep",
    "secrets",
    "task",
    "project",
    "skills",
    "contention",
    "retry",
    "yield_after_s",
)
PLACE_FIELDS = ("runtime", "template", "isolation", "network", "session")
_EXECUTION = ("code", "language", "shell", "args", "stdin", "stdin_base64", "env", "cwd", "user", "outputs", "attached")
RUN_FIELDS = frozenset(
    (*RESOURCE_FIELDS, *LATER_FIELDS, *PLACE_FIELDS, *_EXECUTION)
    + ("command", "code_path", "files", "resources", "keep", "ttl_s", "ttl", "timeout_s", "timeout", "pty")
    + ("priority", "queue_timeout_s", "queue_timeout", "expected_s", "webhook")
)
SANDBOX_FIELDS = frozenset(
    (*RESOURCE_FIELDS, *LATER_FIELDS, *PLACE_FIELDS, "files", "resources", "ttl_s", "ttl", "timeout_s", "timeout")
    + ("idle_timeout_s", "idle_timeout")
)
EXEC_FIELDS = frozenset(
    (*LATER_FIELDS, *_EXECUTION)
    + ("argv", "command", "timeout_s", "timeout", "output_limit", "output_kill", "pty", "wait", "stdin_open")
)


class Fields:
    """One JSON object, read member by member; every method answers a checked value or raises with the member's pointer."""

    def __init__(self, doc: Any, known: frozenset[str], elsewhere: Mapping[str, str] | None = None) -> None:
        if not isinstance(doc, dict):
            invalid("", f"the request must be a JSON object, not {shown(doc)}", 'like {"command": ["echo", "hi"]}')
        self.doc: dict[str, Any] = doc
        for name in doc:
            if name in known:
                continue
            why = (elsewhere or {}).get(name)
            if why is not None:
                if doc[name] is None:
                    continue
                self.fail(name, f"{name} {why}", f"leave {name} out here, or make another sandbox with it")
            guess = nearest(str(name), known)
            self.fail(
                name,
                f"there is no field {shown(name)}",
                f"did you mean {guess}?"
                if guess
                else f"known fields: {', '.join(sorted(known - frozenset(LATER_FIELDS)))}",
            )

    def fail(self, name: str | int, detail: str, hint: str) -> NoReturn:
        invalid(pointer(name), detail, hint)

    def refuse_later(self, *names: str) -> None:
        """Fields that a later version brings: nothing may be accepted and ignored."""
        for name in names:
            if not empty(self.doc.get(name)):
                self.not_yet(name)

    def not_yet(self, name: str, detail: str | None = None) -> NoReturn:
        raise CorralError(
            "not_supported_yet",
            detail or f"this version cannot honour {name}",
            hint=f"leave {name} out",
            field=pointer(name),
        )

    def flag(self, name: str) -> bool:
        value = self.doc.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.fail(name, f"{name} is true or false, not {shown(value)}", "JSON's true or false, without quotes")
        return value

    def name(self, name: str) -> str | None:
        """What names something of the operator's: a runtime, a template."""
        value = self.doc.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self.fail(name, f"{name} is text, not {shown(value)}", "the name as text")
        plain = value.replace("-", "").replace("_", "").replace(".", "")
        if not (plain.isascii() and plain.isalnum() and value[0].isalnum() and len(value) <= 64):
            self.fail(name, f"{shown(value)} is no name of a {name}", "letters, digits, '-', '_' and '.'")
        return value

    def relative_path(self, name: str) -> str | None:
        value = self.doc.get(name)
        return None if value is None else relative_path(value, pointer(name))

    def seconds(self, name: str, alias: str) -> float | None:
        """A time that is not zero, under one of two words."""
        value, other = self.doc.get(name), self.doc.get(alias)
        if value is not None and other is not None and value != other:
            self.fail(alias, f"{name} and {alias} are the same field with different values", f"leave {alias} out")
        at = pointer(name if value is not None else alias)
        value = other if value is None else value
        return None if value is None else seconds_of(value, at)

    def end(self, name: str, alias: str) -> float | None:
        """The same, or `none`: a time that does not end."""
        said = [word for word in (name, alias) if self.doc.get(word) is not None]
        if said and all(self.doc[word] == NONE for word in said):
            return UNLIMITED_S
        return self.seconds(name, alias)


def seconds_of(value: Any, at: str, *, zero: bool = False) -> float:
    """A time as a member tells it."""
    if isinstance(value, str):
        invalid(at, f"a time is a number of seconds, not {shown(value)}", "write it without quotes")
    try:
        seconds = parse_seconds(value)
    except ValueError as error:
        invalid(at, str(error), "decimal seconds, for example 60")
    if seconds == 0 and not zero:
        invalid(at, "a time must be greater than 0", "decimal seconds, for example 60")
    return seconds
