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

    def send(self, text: str, params: Params = ...) -> None:
        """The same for a statement whose answer does not matter: it goes out with the next one that is asked for, before it. If it
        is refused, the next one raises that."""
        ...

    @property
    def skip_locked(self) -> str:
        """`FOR … UPDATE SKIP LOCKED` where several transactions run at once, else nothing."""
        ...

    @property
    def for_update(self) -> str:
        """`FOR … UPDATE`, of a kind that lets others refer to the row, where several transactions run at once, else nothing."""
        ...


class Transacting:
    """What an adapter gives: `work(tx, …)` as one transaction, all or nothing."""

    async def _write(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        raise NotImplementedError

    async def _read(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One snapshot; nothing is written."""
        raise NotImplementedError
