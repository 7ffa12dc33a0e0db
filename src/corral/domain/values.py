"""Single values of a request, checked: each answers what it is or raises `CorralError` with the JSON pointer of the value to blame."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from corral.domain.limits import KIB, MIB
from corral.domain.quantities import format_bytes, parse_size, shown
from corral.errors import CorralError

MIN_MEMORY = 16 * MIB
"""Below this the program inside that serves a sandbox does not start."""
MIN_PIDS = 8
"""The program inside that serves a sandbox and its launcher count as well: crun does not start below 4 (measured)."""
MIN_DISK = 8 * MIB
"""A file system refuses a large write with up to 2 MiB left: on a smaller disk that could not be told from one with room."""
MAX_PIDS = 4_194_304
MAX_WORD = 128 * KIB - 1
"""The kernel's own limit for one argument or environment entry."""
MAX_WORDS = MIB + 256 * KIB
"""All arguments, or the whole environment; the kernel takes about 2 MiB of both."""
MAX_ENCODED = 3 * MAX_WORDS
"""The same as the JSON text that goes inside, where a control character is six bytes long."""
MAX_PATH = 4095
MAX_NAME = 255


_CPU = "a number of cores, for example 0.5"
_PIDS = "processes and threads at once, for example 128"
_NUL = "leave the NUL character out"
_SIZES = {"memory": "512M", "disk": "1G", "tmp": "64M", "output_limit": "10M", "output_kill": "100M"}


def _size_hint(name: str, least: int) -> str:
    floor = f", at least {least // MIB}M" if least >= MIB else ""
    return f"an integer with optional K, M or G{floor}: for example {_SIZES.get(name, '64M')}"


def pointer(*parts: str | int) -> str:
    """The JSON pointer (RFC 6901) of a path of members and indexes, fit to be sent as text."""
    escaped = (str(part).replace("~", "~0").replace("/", "~1") for part in parts)
    return "".join(f"/{part[:200]}" for part in escaped).encode("utf-8", "backslashreplace").decode("utf-8")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, or None."""
    import difflib  # only wanted for errors; start-up does without it

    plain = word.replace("-", "_").lower()[:64]
    names = sorted(known)
    return plain if plain in names else next(iter(difflib.get_close_matches(plain, names, n=1, cutoff=0.6)), None)


def invalid(at: str, detail: str, hint: str) -> NoReturn:
    """Refuse a value; `hint` says what would be right."""
    raise CorralError("invalid_value", detail, hint=hint, field=at)


def empty(value: Any) -> bool:
    """True for null and for what holds nothing: a field of a later version may be present like that."""
    if isinstance(value, dict):
        return all(item is None or item == [] or item == {} or item == "" for item in value.values())
    return value is None or value is False or value == "" or value == []


def utf8_of(text: str, at: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        invalid(at, "the text holds half of a surrogate pair", "send valid Unicode; bytes go as base64")


def bytes_of(value: Any, at: str) -> bytes:
    if not isinstance(value, str):
        invalid(at, f"base64 is text, not {shown(value)}", "the standard alphabet with padding, without line breaks")
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, ValueError):
        invalid(at, "not valid base64", "use the standard alphabet with padding and without line breaks")


def relative_path(value: Any, at: str) -> str:
    """A relative path under /workspace, normalised: no empty or `.` parts left."""
    if not isinstance(value, str):
        invalid(at, f"a path is text, not {shown(value)}", "like src/main.py")
    size = len(utf8_of(value, at))
    if "\0" in value:
        invalid(at, "a path cannot hold a NUL character", _NUL)
    if value.startswith("/"):
        inner = value.removeprefix("/workspace/")
        hint = f"write {shown(inner)}" if inner != value else "only files under /workspace can be put"
        invalid(at, f"{shown(value)} is absolute; paths are relative to /workspace", hint)
    parts = value.split("/")
    if ".." in parts:
        invalid(at, f"{shown(value)} holds '..'; paths cannot leave /workspace", "write it without '..'")
    kept = [part for part in parts if part not in ("", ".")]
    if not kept or parts[-1] in ("", "."):
        invalid(at, f"{shown(value)} names no file", "end it with the name of a file, like src/main.py")
    if size > MAX_PATH or any(len(part.encode("utf-8", "surrogateescape")) > MAX_NAME for part in kept):
        invalid(at, f"a path has at most {MAX_PATH} bytes and each of its parts at most {MAX_NAME}", "shorten it")
    return "/".join(kept)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def size_of(name: str, value: Any, at: str, least: int) -> int:
    try:
        size = parse_size(value)
    except ValueError as error:
        invalid(at, str(error), _size_hint(name, least))
    if size == 0:
        invalid(at, f"{name} must be greater than 0", _size_hint(name, least))
    if size < least:
        invalid(
            at, f"{name} of {format_bytes(size)} is too little to start anything", f"ask for at least {least // MIB}M"
        )
    return size


def cores(value: Any, at: str, host_cpus: float) -> float:
    if not is_number(value):
        invalid(at, f"cpu is a number of cores, not {shown(value)}", _CPU)
    try:
        cores = float(value)
    except OverflowError:
        cores = math.inf
    if not math.isfinite(cores) or cores <= 0:
        invalid(at, f"cpu must be a finite number greater than 0, not {shown(value)}", _CPU)
    if cores < 0.01:
        invalid(at, f"cpu of {shown(value)} cores is too little to start anything", "ask for at least 0.01")
    if cores > host_cpus:
        invalid(
            at, f"cpu of {shown(value)} exceeds this host, which has {host_cpus:g}", f"ask for at most {host_cpus:g}"
        )
    return cores


def count(value: Any, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        invalid(at, f"pids is an integer, not {shown(value)}", _PIDS)
    if not MIN_PIDS <= value <= MAX_PIDS:
        invalid(at, f"pids is from {MIN_PIDS} to {MAX_PIDS}, not {shown(value)}", _PIDS)
    return value


def file_mode(value: Any, at: str) -> int:
    """`"0755"` or the number itself; only the nine permission bits."""
    if value is None:
        return 0o644
    if isinstance(value, str) and 0 < len(value) <= 5 and all(c in "01234567" for c in value):
        mode = int(value, 8)
    elif isinstance(value, int) and not isinstance(value, bool):
        mode = value
    else:
        invalid(
            at,
            f"a mode is octal text such as '0644', not {shown(value)}",
            "three octal digits after a 0, as chmod takes them",
        )
    if not 0 <= mode <= 0o777:
        invalid(
            at, f"a mode holds the nine permission bits only, not {shown(value)}", "write octal text such as '0755'"
        )
    return mode
