"""What to run: code, a command or a line for the shell, with its arguments."""

from __future__ import annotations

import json
from typing import Any

from corral.domain.limits import MIB
from corral.domain.quantities import shown
from corral.domain.request.fields import Fields
from corral.domain.runner import LANGUAGES, NO_NAMES, Names
from corral.domain.values import MAX_ENCODED, MAX_WORD, MAX_WORDS, invalid, is_number, nearest, pointer, utf8_of
from corral.errors import CorralError

MAX_CODE = MIB


def read_shape(fields: Fields, names: tuple[str, ...]) -> str:
    """The one of `names` that is given."""
    given = [name for name in names if fields.doc.get(name) is not None]
    if not given:
        invalid("", "nothing to run", f"give exactly one of {', '.join(names)}")
    if len(given) > 1:
        fields.fail(
            given[1], f"{given[0]} and {given[1]} exclude each other", f"give exactly one of {', '.join(names)}"
        )
    return given[0]


def read_code(fields: Fields) -> str:
    value = fields.doc["code"]
    if not isinstance(value, str):
        fields.fail("code", f"code is text, not {shown(value)}", "the text of the program, like print(1)")
    size = len(utf8_of(value, "/code"))
    if size > MAX_CODE:
        raise CorralError(
            "too_large",
            f"code has {size} bytes; at most {MAX_CODE} are allowed",
            hint="send the bulk as files, or put it there by the file API",
            field="/code",
        )
    return value


def read_language(
    fields: Fields, code: str | None, code_path: str | None = None, names: Names = NO_NAMES
) -> str | None:
    value = fields.doc.get("language")
    if code is None:
        if value is not None:
            fields.fail("language", "language goes with code", "a command names its own program")
        return None
    if value is None:
        if code_path is not None:
            return language_of(names, code_path, code[:512].encode("utf-8", "surrogateescape"))
        fields.fail("language", "code needs language", f"one of {', '.join(LANGUAGES)}")
    if not isinstance(value, str):
        fields.fail("language", f"language is text, not {shown(value)}", f"one of {', '.join(LANGUAGES)}")
    if value not in LANGUAGES:
        guess = nearest(value, LANGUAGES)
        raise CorralError(
            "unknown_language",
            f"there is no language {shown(value)}",
            hint=f"did you mean {guess}?" if guess else f"one of {', '.join(LANGUAGES)}",
            field="/language",
        )
    return value


def language_of(names: Names, file_name: str, first_bytes: bytes) -> str:
    """The language of a FILE: by its extension, else by its `#!` line, else `unknown_language`."""
    language = names.of_file(file_name) or names.of_first_line(first_bytes)
    if language is None:
        raise CorralError(
            "unknown_language",
            f"the language of {shown(file_name)} cannot be told from its extension or its #! line",
            hint=f"say --language (field language): {', '.join(LANGUAGES)}",
            field="/language",
        )
    return language


def read_argv(fields: Fields, name: str, *, with_args: bool) -> tuple[str, ...]:
    argv = read_words(fields, name)
    if not argv or not argv[0]:
        fields.fail(name, f"{name} must name a program", 'like ["echo", "hi"]')
    return argv + (read_words(fields, "args") if with_args else ())


def read_args(fields: Fields, shape: str) -> tuple[str, ...]:
    """`args` of code; those of a command were appended to it."""
    if shape == "shell":
        if read_words(fields, "args"):
            fields.fail("args", "args do not go with shell", "put them into the shell text, or use command")
        return ()
    return read_words(fields, "args") if shape == "code" else ()


def read_words(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of arguments as the kernel takes them."""
    value = fields.doc.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        hint = "for a command line use shell" if isinstance(value, str) else 'like ["echo", "hi"]'
        fields.fail(name, f"{name} is a list of text, not {shown(value)}", hint)
    total = 0
    for index, word in enumerate(value):
        total += _size_of_word(word, pointer(name, index)) + 1
    if total > MAX_WORDS:
        fields.fail(name, f"{name} has {total} bytes; at most {MAX_WORDS} are allowed", "pass data by stdin or files")
    must_encode(fields, name, value)
    return tuple(value)


def read_shell(fields: Fields) -> str:
    value = fields.doc["shell"]
    _size_of_word(value, "/shell")
    if not value:
        fields.fail("shell", "shell is empty", "a command line, like echo hi")
    return str(value)


def _size_of_word(word: Any, at: str) -> int:
    if not isinstance(word, str):
        invalid(at, f"an argument is text, not {shown(word)}", "write numbers as text" if is_number(word) else "text")
    if "\0" in word:
        invalid(at, "an argument cannot hold a NUL character", "pass such data by stdin or files")
    size = len(utf8_of(word, at))
    if size > MAX_WORD:
        invalid(at, f"an argument has {size} bytes; the kernel takes {MAX_WORD}", "pass data by stdin or files")
    return size


def must_encode(fields: Fields, name: str, value: Any) -> None:
    """What goes inside as JSON has a limit there."""
    size = len(json.dumps(value))
    if size > MAX_ENCODED:
        fields.fail(
            name,
            f"{name} has {size} bytes as ASCII JSON; at most {MAX_ENCODED} are allowed",
            "pass data by stdin or files",
        )
