"""How a transaction is run, whatever the database: what statements need of it, and what a store gives to its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Params = Mapping[str, Any]


class Tx(Protocol):
    """An open transaction: `rows` runs one statement and returns all its rows; `now` is the store's clock, read once."""

    @property
    def now(self) -> int: ...

    def rows(self, text: str, params: Params = ...) -> list[tuple[Any, ...]]: ...

    @property
    def skip_locked(self) -> str:
        """`FOR UPDATE SKIP LOCKED` where several transactions run at once, else nothing."""
        ...

    @property
    def for_update(self) -> str:
        """`FOR UPDATE` where several transactions run at once, else nothing."""
        ...


class Transacting:
    """What an adapter gives: `work(tx, …)` as one transaction, all or nothing."""

    async def _write(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        raise NotImplementedError

    async def _read(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One snapshot; nothing is written."""
        raise NotImplementedError
