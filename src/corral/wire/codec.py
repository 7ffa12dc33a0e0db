"""Values as msgpack, as they were: dataclasses of the ports by name, tuples and sets as such, text with lone surrogates.

A reader ignores members of a dataclass that it does not know and gives those that are missing their defaults, so that two versions
can speak with each other. What is not of a known kind cannot be packed (`TypeError`) and cannot be read (`ValueError`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import msgpack  # type: ignore[import-untyped]

SPOKEN = (
    "corral.ports.node",
    "corral.ports.runtime",
    "corral.domain.facts",
    "corral.domain.fence",
    "corral.domain.grade",
    "corral.domain.limits",
)
"""Modules whose dataclasses may travel: whatever the node port names. A new one in them needs nothing here."""
_DATACLASS, _TUPLE, _SET, _NUMBER = 1, 2, 3, 4


@functools.cache
def _known() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in SPOKEN:
        module = importlib.import_module(name)
        for value in vars(module).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == name:
                found[value.__name__] = value
    return found


@functools.cache
def _members(kind: type) -> tuple[str, ...]:
    return tuple(member.name for member in dataclasses.fields(kind) if member.init)


def pack(value: Any) -> bytes:
    """The bytes of a value."""
    packed: bytes = msgpack.packb(value, default=_foreign, strict_types=True, unicode_errors="surrogatepass")
    return packed


def _foreign(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return msgpack.ExtType(_TUPLE, pack(list(value)))
    if kind.__name__ in _known() and _known()[kind.__name__] is kind:
        members = {name: getattr(value, name) for name in _members(kind)}
        return msgpack.ExtType(_DATACLASS, pack([kind.__name__, members]))
    if kind in (set, frozenset):
        return msgpack.ExtType(_SET, pack(list(value)))
    if isinstance(value, bool | int):
        plain = int(value)
        return plain if -(2**63) <= plain < 2**64 and kind is not int else msgpack.ExtType(_NUMBER, str(plain).encode())
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"a value of {kind.__module__}.{kind.__qualname__} has no form on the wire")


def unpack(raw: bytes | bytearray | memoryview) -> Any:
    """The inverse of `pack`."""
    try:
        return msgpack.unpackb(raw, ext_hook=_made, strict_map_key=False, unicode_errors="surrogatepass")
    except (msgpack.UnpackException, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"this is not a value of ours: {error!r}") from error


def _made(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(unpack(data))
    if code == _SET:
        return frozenset(unpack(data))
    if code == _NUMBER:
        return int(data)
    if code != _DATACLASS:
        raise ValueError(f"an unknown kind of value: {code}")
    name, members = unpack(data)
    kind = _known()[name]
    wanted = _members(kind)
    return kind(**{key: value for key, value in members.items() if key in wanted})
