"""What a program finds around it: input, environment, directory, user, terminal; and what is taken from it afterwards."""

from __future__ import annotations

from corral.domain.quantities import shown
from corral.domain.request.fields import Fields
from corral.domain.request.program import must_encode
from corral.domain.values import MAX_PATH, MAX_WORD, MAX_WORDS, bytes_of, invalid, pointer, utf8_of

DEFAULT_PTY = (24, 80)


def read_stdin(fields: Fields) -> bytes | None:
    text, encoded = fields.doc.get("stdin"), fields.doc.get("stdin_base64")
    if text is not None and encoded is not None:
        fields.fail("stdin_base64", "stdin and stdin_base64 exclude each other", "leave one of them out")
    if encoded is not None:
        return bytes_of(encoded, "/stdin_base64")
    if text is None:
        return None
    if not isinstance(text, str):
        fields.fail("stdin", f"stdin is text, not {shown(text)}", "bytes go as stdin_base64")
    return utf8_of(text, "/stdin")


def read_env(fields: Fields) -> dict[str, str]:
    value = fields.doc.get("env")
    if value is None:
        return {}
    if not isinstance(value, dict):
        fields.fail("env", f"env is an object of names and text, not {_kind(value)}", 'like {"LANG": "C.UTF-8"}')
    total = 0
    for name, content in value.items():
        at = pointer("env", name)
        if not isinstance(name, str) or not name or any(c in "=\x7f\x85\u2028\u2029" or c <= " " for c in name):
            hint = "a name without '=', spaces and control characters, like LANG"
            invalid(at, f"{shown(name)} is no name of an environment variable", hint)
        if not isinstance(content, str):
            invalid(at, f"the value of {shown(name)} is text, not {_kind(content)}", "write numbers as text")
        if "\0" in content:
            invalid(at, f"the value of {shown(name)} cannot hold a NUL character", "pass such data by a file")
        size = len(utf8_of(name, at)) + len(utf8_of(content, at)) + 2
        if size > MAX_WORD:
            invalid(at, f"the variable {shown(name)} has {size} bytes; the kernel takes {MAX_WORD}", "use a file")
        total += size
    if total > MAX_WORDS:
        fields.fail("env", f"env has {total} bytes; at most {MAX_WORDS} are allowed", "use files")
    must_encode(fields, "env", value)
    return dict(value)


def read_cwd(fields: Fields) -> str | None:
    value = fields.doc.get("cwd")
    if value is None:
        return None
    if not isinstance(value, str):
        fields.fail("cwd", f"cwd is text, not {shown(value)}", "like /workspace/src")
    size = len(utf8_of(value, "/cwd"))
    if "\0" in value:
        fields.fail("cwd", "a path cannot hold a NUL character", "like /workspace/src")
    if not value.startswith("/"):
        fields.fail(
            "cwd", f"cwd must be absolute, not {shown(value)}", f"for example /workspace/{value[:60]}".rstrip("/")
        )
    if size > MAX_PATH:
        fields.fail("cwd", f"a path has at most {MAX_PATH} bytes", "shorten it")
    return value


def read_user(fields: Fields) -> str:
    value = fields.doc.get("user")
    if value is None:
        return "sandbox"
    if value not in ("sandbox", "root"):
        fields.fail("user", f"there is no user {shown(value)}", "sandbox, or root where the template allows it")
    return str(value)


def read_outputs(fields: Fields, default: tuple[str, ...]) -> tuple[str, ...]:
    value = fields.doc.get("outputs")
    if value is None:
        return default
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, list):
        fields.fail("outputs", f"outputs is a list of patterns, not {shown(value)}", 'like ["out/**"]')
    if len(patterns) > 100:
        fields.fail("outputs", "at most 100 patterns are allowed", "use ** and * to say more with less")
    kept: list[str] = []
    for index, pattern in enumerate(patterns):
        at = pointer("outputs") if isinstance(value, str) else pointer("outputs", index)
        if not isinstance(pattern, str) or not pattern:
            invalid(at, f"a pattern is text, not {shown(pattern)}", "like /workspace/out/**")
        size = len(utf8_of(pattern, at))
        if "\0" in pattern or size > MAX_PATH:
            invalid(at, f"a pattern has at most {MAX_PATH} bytes and no NUL character", "like /workspace/out/**")
        if ".." in pattern.split("/"):
            invalid(at, f"{shown(pattern)} holds '..'; patterns cannot leave /workspace", "like /workspace/out/**")
        full = pattern if pattern.startswith("/") else f"/workspace/{pattern.removeprefix('./')}"
        if full != "/workspace" and not full.startswith("/workspace/"):
            invalid(at, f"{shown(pattern)} is not under /workspace", "artifacts are taken from /workspace only")
        kept.append(full)
    return tuple(dict.fromkeys(kept))


def read_pty(fields: Fields) -> tuple[int, int] | None:
    value = fields.doc.get("pty")
    if value is None or value is False:
        return None
    if value is True:
        return DEFAULT_PTY
    if isinstance(value, dict):
        for name in value:
            if name not in ("rows", "cols"):
                invalid(pointer("pty", name), f"a terminal has no field {shown(name)}", "rows and cols")
        pair = [value.get("rows", DEFAULT_PTY[0]), value.get("cols", DEFAULT_PTY[1])]
    elif isinstance(value, list) and len(value) == 2:
        pair = value
    else:
        fields.fail("pty", f'pty is true, [rows, cols] or {{"rows", "cols"}}, not {shown(value)}', "like [24, 80]")
    for number in pair:
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 65535:
            fields.fail("pty", f"rows and columns are integers from 1 to 65535, not {shown(number)}", "like [24, 80]")
    return pair[0], pair[1]


def _kind(value: object) -> str:
    """What a value is, where its content is not to be repeated."""
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", dict: "an object", list: "a list"}
    return kinds.get(type(value), "null")
