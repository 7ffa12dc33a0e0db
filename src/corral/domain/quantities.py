"""Sizes and times as people write them: `512M`, `1.5` seconds. A ValueError says in one sentence what would be right.

A size is an integer with optional K, M or G, and these are binary: 1K = 1024. A time is decimal seconds.
"""

from __future__ import annotations

import math
import re

from corral.domain.limits import GIB, KIB, MIB

MAX_SIZE = 2**63 - 1
_UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB}
_SIZE = re.compile(r"([0-9]{1,19})([KMG]?)", re.IGNORECASE | re.ASCII)
_FRACTION = re.compile(r"([0-9]{1,9}\.[0-9]{1,9})([KMG])(i?B)?", re.IGNORECASE | re.ASCII)
_OTHER_UNIT = re.compile(r"([0-9]{1,19}) ?([KMGT])(i?B|i)", re.IGNORECASE | re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18}", re.ASCII)


def parse_size(value: object) -> int:
    """Bytes of an int or of text such as `512M`; zero is allowed here, a sign or a fraction is not."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"a size is an integer of bytes or text such as 512M, not {shown(value)}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"a size cannot be negative: {shown(value)}")
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError(_size_help(value))
        size = int(match[1]) * _UNITS[match[2].upper()]
    if size > MAX_SIZE:
        raise ValueError(f"a size cannot exceed 63 bits: {shown(value)}")
    return size


def _size_help(text: str) -> str:
    if other := _OTHER_UNIT.fullmatch(text):
        if other[2].upper() == "T":
            return f"{shown(text)} is not a size; the largest unit is G, so write {int(other[1]) * 1024}G"
        return f"{shown(text)} is not a size; write {other[1]}{other[2].upper()} (K, M and G are binary)"
    if fraction := _FRACTION.fullmatch(text):
        smaller = {"K": ("", 1024), "M": ("K", 1024), "G": ("M", 1024)}[fraction[2].upper()]
        return (
            f"{shown(text)} is not a size; write whole numbers, such as {round(float(fraction[1]) * 1024)}{smaller[0]}"
        )
    return f"{shown(text)} is not a size; write an integer with optional K, M or G, such as 512M"


def parse_seconds(value: object) -> float:
    """Seconds of a number or of decimal text such as `1.5`; finite, not negative."""
    if isinstance(value, str):
        if _SECONDS.fullmatch(value) is None:
            raise ValueError(f"{shown(value)} is not a time; write decimal seconds, such as 2 or 0.5")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"a time is a number of seconds, not {shown(value)}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise ValueError(f"a time is a finite number of seconds, not {shown(value)}")
    if seconds < 0:
        raise ValueError(f"a time cannot be negative: {shown(value)}")
    return seconds


def format_bytes(size: int) -> str:
    """`256 MiB`, `1.5 GiB`, `12 bytes`: at most one decimal, for sentences."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{_short(size / unit)} {name}"
    return f"{size} byte" if size == 1 else f"{size} bytes"


def format_seconds(seconds: float) -> str:
    """`2 s`, `0.5 s`, `250 ms`: for sentences."""
    if 0 < seconds < 0.1:
        return f"{_short(seconds * 1000)} ms"
    return f"{_short(seconds, 2)} s"


def _short(number: float, decimals: int = 1) -> str:
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def shown(value: object, limit: int = 60) -> str:
    """A value of a caller as it may stand in a sentence: printable, short, without lone surrogates."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        if (
            abs(value) >= 10**30
        ):  # printing a huge integer costs more than reading it, and Python refuses past 4300 digits
            return "a number of more than 30 digits"
        return str(value)
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, str):
        text = value[:limit]
        quoted = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
        return f"'{quoted}{'…' if len(value) > limit else ''}'"
    return str(value)[:limit]
