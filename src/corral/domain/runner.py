"""Runners: how code in a language becomes one or two commands. Data (`runners/*.yaml`), read here without I/O.

A runner with `compile` makes two execs: the compiler's, and only if that exits 0 the program's. They are separate execs, so the
outcome of one can never be taken for the other's; `compile_hint` is the sentence for the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LANGUAGES = ("python", "bash", "javascript", "typescript", "c", "cpp", "go", "java", "rust", "sql", "r")
"""Every language of the contract, whether or not this version has a runner for it."""

DEFAULT_OUT = "/tmp/.corral-program"  # noqa: S108 - a path inside the sandbox, where nobody else is

EXTENSIONS: dict[str, str] = {
    ".py": "python",
    ".pyw": "python",
    ".sh": "bash",
    ".bash": "bash",
    ".js": "javascript",
    ".mjs": "javascript",
    ".cjs": "javascript",
    ".ts": "typescript",
    ".mts": "typescript",
    ".cts": "typescript",
    ".c": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cxx": "cpp",
    ".go": "go",
    ".java": "java",
    ".rs": "rust",
    ".sql": "sql",
    ".r": "r",
}

SHEBANGS: dict[str, str] = {
    "python": "python",
    "python3": "python",
    "pypy3": "python",
    "bash": "bash",
    "sh": "bash",
    "dash": "bash",
    "node": "javascript",
    "nodejs": "javascript",
    "deno": "typescript",
    "bun": "typescript",
    "ts-node": "typescript",
    "tsx": "typescript",
    "Rscript": "r",
}


@dataclass(frozen=True)
class Runner:
    """One language. In the commands `{file}` is the path of the code inside and `{out}` the path of the compiled program."""

    language: str
    file_name: str
    run: tuple[str, ...]
    compile: tuple[str, ...] | None = None
    tools: tuple[str, ...] = ()
    """Programs that the template must have on PATH."""
    extensions: tuple[str, ...] = ()
    shebangs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, doc: Mapping[str, Any]) -> Runner:
        """A runner of its YAML document; ValueError names the member that is wrong."""
        known = {"language", "file_name", "run", "compile", "tools", "extensions", "shebangs", "env"}
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
        run = _words(doc, "run")
        if not run:
            raise ValueError(f"runner {language}: run must name a program")
        env = doc.get("env") or {}
        if not isinstance(env, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in env.items()):
            raise ValueError(f"runner {language}: env must map names to text")
        return cls(
            language=language,
            file_name=file_name,
            run=run,
            compile=_words(doc, "compile") or None,
            tools=_words(doc, "tools"),
            extensions=_words(doc, "extensions"),
            shebangs=_words(doc, "shebangs"),
            env=dict(env),
        )


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


def commands(
    runner: Runner, path: str, args: Sequence[str] = (), *, out: str = DEFAULT_OUT
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """(argv of the compiler or None, argv of the program) for code at `path` inside; `args` go to the program only."""

    def filled(words: tuple[str, ...]) -> tuple[str, ...]:
        # Whole words only: a path that happens to hold "{out}" is never expanded again.
        return tuple({"{file}": path, "{out}": out}.get(word, word) for word in words)

    return filled(runner.compile) if runner.compile else None, filled(runner.run) + tuple(args)


def compile_hint(runner: Runner, hint: str | None) -> str:
    """The hint of a result whose compile step failed, so that it reads differently from a failed program."""
    sentence = f"the {runner.language} code did not compile, so the program never started; the compiler's messages are in stderr"
    return f"{sentence}; {hint}" if hint else sentence


def language_by_extension(file_name: str) -> str | None:
    """The language of a file name's last extension, or None."""
    name = file_name.rpartition("/")[2]
    stem, dot, extension = name.rpartition(".")
    return EXTENSIONS.get(f".{extension.lower()}") if dot and stem else None


def language_by_first_line(first_bytes: bytes) -> str | None:
    """The language of a `#!` line, `env` with options and assignments included, or None."""
    if not first_bytes.startswith(b"#!"):
        return None
    words = first_bytes[2:].split(b"\n", 1)[0][:512].decode("utf-8", "replace").split()
    if words and words[0].rpartition("/")[2] == "env":
        words = words[1:]
        while words and (words[0].startswith("-") or "=" in words[0]):
            words = words[1:]
    if not words:
        return None
    program = words[0].rpartition("/")[2]
    return SHEBANGS.get(program) or SHEBANGS.get(program.rstrip("0123456789."))
