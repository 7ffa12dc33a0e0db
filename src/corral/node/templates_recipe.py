"""Recipes: what the operator writes to have a template, read strictly: an unknown member or a value of another kind is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from corral.domain.runner import LANGUAGES
from corral.errors import CorralError
from corral.linux.seccomp import PROFILES

T = TypeVar("T")
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
SKILL = re.compile(r"[a-z0-9][a-z0-9._+-]{0,62}")
SOURCE = re.compile(r"deb [\x20-\x7e]{1,1000}")
KINDS: dict[str, frozenset[str]] = {
    "frozen": frozenset({"programs", "trees", "exclude"}),
    "debian": frozenset({"packages", "suite", "sources", "configure", "exclude", "busybox_applets"}),
    "archive": frozenset({"archive", "sha256"}),
    "oci": frozenset({"image", "sha256", "platform", "reference"}),
}
"""The members of each kind beside those that every recipe may have."""
SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL"})
TOOLS = {
    "python": "python3",
    "bash": "bash",
    "javascript": "node",
    "typescript": "tsc",
    "c": "cc",
    "cpp": "g++",
    "go": "go",
    "java": "javac",
    "rust": "rustc",
    "sql": "sqlite3",
    "r": "Rscript",
}
"""Language -> program, for a tree of which nothing else is known."""
_SHARED = frozenset(
    {"name", "kind", "description", "languages", "skills", "start", "ready", "health", "stop_signal", "seccomp"}
)


@dataclass(frozen=True)
class Recipe:
    """One template as it is asked for; which members mean something depends on `kind` (see `KINDS`)."""

    name: str
    kind: str
    description: str = ""
    languages: dict[str, str] = field(default_factory=dict)
    """Language -> the program that must be inside for it to be offered."""
    skills: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    stop_signal: str | None = None
    seccomp: str | None = None
    """Profile of system calls of its sandboxes, where it is not `default`; policy must allow it."""
    programs: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    suite: str | None = None
    """Of the distribution; None for the host's."""
    sources: tuple[str, ...] = ()
    """Lines as in apt's sources.list, in place of the distribution's own mirror."""
    configure: bool = False
    """Maintainer scripts run, in the new tree; otherwise packages are only unpacked."""
    busybox_applets: bool = False
    archive: str | None = None
    image: str | None = None
    sha256: str | None = None
    platform: str | None = None
    reference: str | None = None

    def document(self) -> dict[str, Any]:
        """What `parse` reads, without members that say nothing: the same recipe has the same document."""
        doc = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(self).items()}
        return {name: value for name, value in doc.items() if value not in (None, [], {}, "", False)}


def parse(document: Any, where: str) -> Recipe:
    """A recipe of its YAML document; `invalid_value` names the member that is wrong. `where` is said in messages only."""
    if not isinstance(document, Mapping):
        raise _wrong(where, "must be a mapping")
    kind = document.get("kind")
    if kind not in KINDS:
        raise _wrong(f"{where}: kind", f"must be one of {', '.join(sorted(KINDS))}")
    known = _SHARED | KINDS[kind]
    for member in document:
        if member not in known:
            raise _wrong(
                f"{where}: {member}", f"unknown member for the kind {kind}", f"known: {', '.join(sorted(known))}"
            )
    read: dict[str, Callable[[Any], Any]] = {
        "name": _matching(NAME),
        "kind": _text,
        "description": _text,
        "languages": _languages,
        "skills": _list_of(_matching(SKILL)),
        "start": _list_of(_text),
        "ready": _list_of(_text),
        "health": _list_of(_text),
        "stop_signal": _one_of(SIGNALS),
        "seccomp": _one_of(frozenset(PROFILES)),
        "programs": _words,
        "trees": _list_of(_text),
        "exclude": _list_of(_text),
        "packages": _words,
        "suite": _matching(re.compile(r"[a-z][a-z0-9.-]{0,40}")),
        "sources": _list_of(_matching(SOURCE)),
        "configure": _flag,
        "busybox_applets": _flag,
        "archive": _text,
        "image": _text,
        "sha256": _matching(re.compile(r"[0-9a-f]{64}")),
        "platform": _matching(re.compile(r"[a-z0-9]+/[a-z0-9_]+(/[a-z0-9.]+)?")),
        "reference": _text,
    }
    values: dict[str, Any] = {}
    for member, value in document.items():
        try:
            values[member] = read[member](value)
        except ValueError as error:
            raise _wrong(f"{where}: {member}", str(error)) from None
    needed = {"debian": "packages", "archive": "archive", "oci": "image"}.get(kind)
    for member in ("name", needed):
        if member is not None and not values.get(member):
            raise _wrong(f"{where}: {member}", "is missing")
    return Recipe(**values)


def _wrong(where: str, detail: str, hint: str = "mend the recipe") -> CorralError:
    return CorralError("invalid_value", f"template recipe {where}: {detail}", hint=hint)


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("must be text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _matching(pattern: re.Pattern[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or pattern.fullmatch(value) is None:
            raise ValueError(f"must match {pattern.pattern}")
        return value

    return read


def _one_of(words: frozenset[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(sorted(words))}")
        return str(value)

    return read


def _list_of(read: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    def all_of(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise ValueError("must be a list")
        return tuple(read(item) for item in value)

    return all_of


def _words(value: Any) -> tuple[str, ...]:
    """A list of texts; blanks within one separate words too, so that long lists stay readable."""
    words = tuple(word for line in _list_of(_text)(value) for word in line.split())
    if option := next((word for word in words if word.startswith("-")), None):
        raise ValueError(f"{option!r} is no name")
    return words


def _languages(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError("must map languages to programs")
    for language, program in value.items():
        if language not in LANGUAGES:
            raise ValueError(f"{language!r} is none of {', '.join(LANGUAGES)}")
        if not isinstance(program, str) or not re.fullmatch(r"[\w.+-]+", program):
            raise ValueError(f"{language}: must name a program")
    return dict(value)
