"""Small pieces of SQL text that every part of the store is put together from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def page_size(limit: int) -> int:
    """A limit as the database takes it: none below zero, none beyond its integers."""
    return min(max(0, limit), 1 << 40)


def one_of(column: str, words: Sequence[str], params: dict[str, Any]) -> str:
    """`column IN (...)` with bound parameters; no words match nothing."""
    if not words:
        return "1 = 0"
    names = [f"{column.replace('.', '_')}_{i}" for i in range(len(words))]
    params.update(zip(names, words, strict=True))
    return f"{column} IN ({', '.join(':' + name for name in names)})"
