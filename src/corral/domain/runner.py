"""Runners: how code in a language becomes one or two commands. Data (`runners/*.yaml`), read here without I/O.

A runner with `build` makes two execs of a run: the compiler's, and only if that exits 0 the program's. They are separate execs, so
the outcome of one can never be taken for the other's; `result.phase` says whose it is, and `build_hint` is the sentence for the first.
In a sandbox that stays both are one exec, and its `phase` is what the sandbox itself tells: a program may forge it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from corral.domain.limits import Limits

LANGUAGES = ("python", "bash", "javascript", "typescript", "c", "cpp", "go", "java", "rust", "sql", "r")
"""Every language of the contract, whether or not this version has a runner for it."""

ROOT = "/workspace"
OUT = "/var/tmp/.corral-build"  # noqa: S108 - inside the sandbox, where nobody else is; on its disk, out of the workspace
BUILD_S = 120.0
"""What a build may take, whatever the program may: the clock of the caller's code starts with the program."""
ABOUT = ("how", "files", "offline")
"""What each runner says of itself for the page of the reference."""

_EXTENSION = re.compile(r"\.[a-z0-9_+-]+")
_PLACE = re.compile(r"\{(file|root|out|memory|cpus)(?::([0-9]{1,2})%)?\}")


@dataclass(frozen=True)
class Runner:
    """One language. Places in the words of its commands and in its environment:

    `{file}` the path of the code inside, `{root}` the directory whose files belong to the program (both only as whole words),
    `{out}` a directory for what the build makes (the build makes it), `{memory}` the limit in bytes, `{memory:85%}` that part of
    it, `{cpus}` the limit of CPUs, rounded up.
    """

    language: str
    file_name: str
    run: tuple[str, ...]
    build: tuple[str, ...] | None = None
    tools: tuple[str, ...] = ()
    """Programs that the template must have on PATH."""
    extensions: tuple[str, ...] = ()
    shebangs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, doc: Mapping[str, Any]) -> Runner:
        """A runner of its YAML document; ValueError names the member that is wrong."""
        known = {"language", "file_name", "run", "build", "tools", "extensions", "shebangs", "env", "about"}
        if not isinstance(doc, Mapping):
            raise ValueError("a runner is a mapping")
        if unknown := sorted(str(key) for key in doc if key not in known):
            raise ValueError(f"runner: unknown member {unknown[0]}")
        language = _text(doc, "language")
        if language not in LANGUAGES:
            raise ValueError(f"runner: language {language!r} is none of {', '.join(LANGUAGES)}")
        file_name = _text(doc, "file_name")
        if "/" in file_name or file_name in (".", ".."):
            raise ValueError(f"runner {language}: file_name must be a plain name")
        run, build, env = _words(doc, "run"), _words(doc, "build"), _names(doc, "env")
        if not run:
            raise ValueError(f"runner {language}: run must name a program")
        for word in (*run, *build, *env.values()):
            for place in _PLACE.finditer(word):
                name, part = place.groups()
                if name in ("file", "root") and place.group() != word:
                    # Such a path is the caller's: inside a script it would be code.
                    raise ValueError(f"runner {language}: {{{name}}} must be a word of its own")
                if part is not None and name != "memory":
                    raise ValueError(f"runner {language}: only memory has parts, not {place.group()}")
        extensions = _words(doc, "extensions")
        for extension in extensions:
            if _EXTENSION.fullmatch(extension) is None:
                raise ValueError(f"runner {language}: extension {extension!r} is not like .py, in small letters")
        about = _names(doc, "about")
        if about and set(about) != set(ABOUT):
            raise ValueError(f"runner {language}: about must say {', '.join(ABOUT)}")
        return cls(
            language=language,
            file_name=file_name,
            run=run,
            build=build or None,
            tools=_words(doc, "tools"),
            extensions=extensions,
            shebangs=_words(doc, "shebangs"),
            env=env,
            about=about,
        )


@dataclass(frozen=True)
class Names:
    """By what a language is told: extensions and programs of first lines, each of one language. Made from the runners: `of`."""

    extensions: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, runners: Iterable[Runner]) -> Names:
        """ValueError when two languages claim the same."""
        made = cls({}, {})
        for runner in runners:
            for known, words in ((made.extensions, runner.extensions), (made.programs, runner.shebangs)):
                for word in words:
                    if known.setdefault(word, runner.language) != runner.language:  # type: ignore[attr-defined]
                        raise ValueError(f"runner {runner.language}: {word} is {known[word]}'s already")
        return made

    def of_file(self, file_name: str) -> str | None:
        """The language of a file name's last extension, or None."""
        name = file_name.rpartition("/")[2]
        stem, dot, extension = name.rpartition(".")
        return self.extensions.get(f".{extension.lower()}") if dot and stem else None

    def of_program(self, path: str) -> str | None:
        """The language that a program interprets, whatever its version, or None."""
        program = path.rpartition("/")[2]
        return self.programs.get(program) or self.programs.get(program.rstrip("0123456789."))

    def of_first_line(self, first_bytes: bytes) -> str | None:
        """The language of a `#!` line, `env` with options and assignments included, or None."""
        if not first_bytes.startswith(b"#!"):
            return None
        words = first_bytes[2:].split(b"\n", 1)[0][:512].decode("utf-8", "replace").split()
        if words and words[0].rpartition("/")[2] == "env":
            words = words[1:]
            while words and (words[0].startswith("-") or "=" in words[0]):
                words = words[1:]
        return self.of_program(words[0]) if words else None


NO_NAMES = Names()


@dataclass(frozen=True)
class Commands:
    """The argv of the build (or None) and of the program, and the runner's environment for both."""

    build: tuple[str, ...] | None
    run: tuple[str, ...]
    env: dict[str, str]


def _text(doc: Mapping[str, Any], name: str) -> str:
    value = doc.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"runner: {name} must be text")
    return value


def _words(doc: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = doc.get(name)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) and word for word in value):
        raise ValueError(f"runner: {name} must be a list of text")
    return tuple(value)


def _names(doc: Mapping[str, Any], name: str) -> dict[str, str]:
    value = doc.get(name) or {}
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise ValueError(f"runner: {name} must map names to text")
    return dict(value)


def commands(
    runner: Runner, path: str, args: Sequence[str], limits: Limits, *, root: str = ROOT, out: str = OUT
) -> Commands:
    """What to start for code at `path` inside, under `limits`; `args` go to the program only, as they are."""

    def value(place: re.Match[str]) -> str:
        name, part = place.groups()
        if name == "memory":
            return str(limits.memory_bytes * int(part or 100) // 100)
        return {"file": path, "root": root, "out": out, "cpus": str(max(1, math.ceil(limits.cpu)))}[str(name)]

    def filled(words: tuple[str, ...]) -> tuple[str, ...]:
        # One pass: a path that happens to hold "{out}" is never expanded again.
        return tuple(_PLACE.sub(value, word) for word in words)

    return Commands(
        filled(runner.build) if runner.build else None,
        filled(runner.run) + tuple(args),
        {name: _PLACE.sub(value, text) for name, text in runner.env.items()},
    )


def build_hint(language: str, reason: str, exit_code: int | None, hint: str | None) -> str:
    """The hint of a result whose build did not succeed, so that it reads differently from a failed program."""
    if reason not in ("nonzero_exit", "signal"):
        return f"in the build of the {language} code, before the program was started: {hint}"
    odd = reason == "signal" or (exit_code or 0) >= 126  # the compiler did not simply find fault with the code
    return (
        f"the build failed{f' ({hint})' if odd else ''}: the {language} code did not compile, so the program was never started; "
        "the compiler's messages are in stderr"
    )
