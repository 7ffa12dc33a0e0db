"""Identifiers: a prefix, `_` and a lower-case ULID. They sort by time of birth and are safe as file and cgroup names.

Clock and randomness are arguments, so that the domain stays pure and tests can name their ids.
"""

from __future__ import annotations

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: no i, l, o, u."""

_LENGTH = 26
_MAX_MS = 2**48 - 1


def new_id(prefix: str, now_ms: int, entropy10: bytes) -> str:
    """`run_<26 characters>` from a time in Unix milliseconds and ten random bytes."""
    if not 0 <= now_ms <= _MAX_MS:
        raise ValueError(f"not a time of 48 bits: {now_ms}")
    if len(entropy10) != 10:
        raise ValueError("an id needs exactly ten random bytes")
    number = now_ms << 80 | int.from_bytes(entropy10, "big")
    text = "".join(ALPHABET[number >> shift & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))
    return f"{prefix}_{text}"


def is_id(text: str, prefix: str) -> bool:
    """True when `text` is what `new_id(prefix, ...)` may have made: nothing else may become a path or a query."""
    head, underscore, tail = text.partition("_")
    return (
        bool(underscore)
        and head == prefix
        and len(tail) == _LENGTH
        and tail[0] <= "7"
        and all(c in ALPHABET for c in tail)
    )


def ulid_of(text: str) -> str:
    """The 26 characters without the prefix: short names for directories."""
    return text.partition("_")[2]


def time_of(text: str) -> int:
    """The time of birth in Unix milliseconds; ValueError on what is no id."""
    tail = ulid_of(text)
    if len(tail) != _LENGTH or any(c not in ALPHABET for c in tail):
        raise ValueError(f"not an id: {text!r}")
    number = 0
    for character in tail:
        number = number << 5 | ALPHABET.index(character)
    return number >> 80
