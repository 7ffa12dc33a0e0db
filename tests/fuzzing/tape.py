"""Inputs as byte strings: how decisions are read from them, how they are changed, and how a failing one is made small."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST = 600


class Tape:
    """Decisions from bytes. Zeros, and everything behind the end, are the plain choice: an empty tape is an honest guest."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def over(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        if self.over:
            return 0
        self._at += 1
        return self._data[self._at - 1]

    def below(self, limit: int) -> int:
        """0 to limit - 1."""
        if limit <= 1:
            return 0
        value = self.byte()
        while limit > 256:
            value = value << 8 | self.byte()
            limit = (limit + 255) >> 8
        return value if limit == 256 else value % limit

    def choose(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def feed(self, data: bytes) -> None:
        """More decisions, behind those that are there."""
        self._data += data

    def upto(self, limit: int) -> int:
        """0 to limit, of two bytes."""
        return (self.byte() << 8 | self.byte()) % (limit + 1)

    def bytes(self, count: int) -> bytes:
        return bytes(self.byte() for _ in range(count))


@dataclass(frozen=True)
class Case:
    """One input. As JSON it is what a crasher's file holds."""

    target: str
    host: bytes
    guest: bytes

    def dump(self, **more: Any) -> str:
        return json.dumps({"target": self.target, "host": self.host.hex(), "guest": self.guest.hex(), **more}, indent=1)

    @classmethod
    def load(cls, text: str) -> Case:
        told = json.loads(text)
        return cls(told["target"], bytes.fromhex(told["host"]), bytes.fromhex(told["guest"]))


def fresh(target: str, rng: random.Random) -> Case:
    """A new input: a host that is busy, a guest that errs now and then."""
    host = bytes(rng.randrange(256) for _ in range(rng.randrange(2, 60)))
    rare = rng.choice((0.02, 0.1, 0.3, 1.0))
    guest = bytes(rng.randrange(256) if rng.random() < rare else 0 for _ in range(rng.randrange(1, 200)))
    return Case(target, host, guest)


def changed(case: Case, other: Case, rng: random.Random) -> Case:
    """A neighbour of an input that was of interest, perhaps crossed with another of its target."""
    host, guest = case.host, case.guest
    for _ in range(1 << rng.randrange(4)):
        if rng.random() < 0.35:
            host = _change(host, other.host, rng)
        else:
            guest = _change(guest, other.guest, rng)
    return Case(case.target, host[:LONGEST], guest[:LONGEST])


def _change(data: bytes, other: bytes, rng: random.Random) -> bytes:
    tape = bytearray(data)
    at = rng.randrange(len(tape) + 1)
    kind = rng.randrange(8)
    if kind == 0 and tape:
        tape[at % len(tape)] = rng.randrange(256)
    elif kind == 1 and tape:
        tape[at % len(tape)] ^= 1 << rng.randrange(8)
    elif kind == 2:
        tape[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 6)))
    elif kind == 3:
        tape[at:at] = bytes(rng.randrange(1, 12))
    elif kind == 4:
        del tape[at : at + rng.randrange(1, 8)]
    elif kind == 5 and other:
        cut = rng.randrange(len(other))
        tape[at:] = other[cut:]
    elif kind == 6 and tape:
        tape[at % len(tape)] = rng.choice((0, 1, 127, 128, 192, 200, 230, 255))
    elif tape:
        begin = rng.randrange(len(tape))
        tape[at:at] = tape[begin : begin + rng.randrange(1, 16)]
    return bytes(tape)


def smallest(case: Case, fails: Callable[[Case], bool], tries: int = 400) -> Case:
    """A shorter input that fails too, found by cutting and zeroing; at most `tries` runs."""

    def pieces(data: bytes, build: Callable[[bytes], Case]) -> bytes:
        nonlocal tries
        size = max(1, len(data) // 2)
        while size and tries > 0:
            at = 0
            while at < len(data) and tries > 0:
                for shorter in (
                    data[:at] + data[at + size :],
                    data[:at] + bytes(len(data[at : at + size])) + data[at + size :],
                ):
                    if shorter == data:
                        continue
                    tries -= 1
                    if fails(build(shorter)):
                        data = shorter
                        break
                else:
                    at += size
                    continue
                if data[at : at + size] == bytes(len(data[at : at + size])):
                    at += size
            size //= 2
        return data.rstrip(b"\0") if fails(build(data.rstrip(b"\0"))) else data

    guest = pieces(case.guest, lambda data: Case(case.target, case.host, data))
    host = pieces(case.host, lambda data: Case(case.target, data, guest))
    return Case(case.target, host, guest)
