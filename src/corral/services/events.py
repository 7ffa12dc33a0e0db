"""What the services tell whoever listens: stream events and wake-ups. In memory only; no fact lives here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from corral.domain.identity import DEFAULT_TENANT, EVERYTHING
from corral.domain.ids import ulid_of

Json = dict[str, Any]


@dataclass(frozen=True)
class Caller:
    """Who calls: the tenant, the name that owns leases, what he may do. Without more it is the holder of the state directory."""

    tenant_id: str = DEFAULT_TENANT
    owner: str = "key:local"
    """Of a key it is its line, so that leases outlive its rotation; of a token its user."""
    user_id: str | None = None
    scopes: frozenset[str] = EVERYTHING
    key_id: str | None = None
    """The key of the store that he came with."""
    ends_at: int | None = None
    """When what he came with ends, in Unix milliseconds."""

    @property
    def ends(self) -> bool:
        """Whether somebody may end meanwhile what he came with."""
        return self.key_id is not None or self.ends_at is not None

    @property
    def actor(self) -> str:
        """Who it was, for the audit."""
        return self.owner if self.key_id is None else f"key:{ulid_of(self.key_id)}"


@dataclass(frozen=True)
class StreamEvent:
    """started, stdout, stderr, gap or ended; `cursor` is the node's."""

    kind: str
    cursor: str | None = None
    offset: int = 0
    data: bytes = b""
    doc: Json | None = None


class Woken:
    """What a waiter holds: set at each `ring` of its key, with the row if the ringer had it at hand."""

    def __init__(self, patience: Callable[[], float | None]) -> None:
        self._event = asyncio.Event()
        self._row: Any = None
        self._patience = patience

    def look(self) -> Any:
        """Forget the wake-ups so far; -> the newest row that came with them, or None: then read the store."""
        self._event.clear()
        row, self._row = self._row, None
        return row

    def wake(self, row: Any) -> None:
        """Called by `Wakes`. A ring without a row says that what came before may be old."""
        self._row = row
        self._event.set()

    async def wait(self, seconds: float | None = None) -> None:
        """Until the next `wake`, or until `seconds` have passed, or until it is time to look although nobody has rung."""
        patience = self._patience()
        if patience is not None:
            seconds = patience if seconds is None else min(seconds, patience)
        if seconds is None:
            await self._event.wait()
            return
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            pass


class Wakes:
    """Wake-ups by key (a run, exec or sandbox id): a waiter looks at the store, sleeps until `ring`, looks again.

    With other workers `others` rings there too, and `patience` says after how many seconds a waiter looks without having been rung.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[Woken]] = {}
        self.others: Callable[[Sequence[str]], None] | None = None
        self.patience: Callable[[], float | None] = lambda: None

    @contextmanager
    def listen(self, key: str) -> Iterator[Woken]:
        """Rings of `key` from now on."""
        woken = Woken(self.patience)
        self._waiting.setdefault(key, set()).add(woken)
        try:
            yield woken
        finally:
            left = self._waiting[key]
            left.discard(woken)
            if not left:
                del self._waiting[key]

    def ring(self, key: str, row: Any = None) -> None:
        """Wake all who listen to `key`; `row` is what the store has committed for it, if the caller has it."""
        for woken in self._waiting.get(key, ()):
            woken.wake(row)
        if self.others is not None:
            self.others((key,))

    def heard(self, key: str) -> None:
        """Another worker has rung."""
        for woken in self._waiting.get(key, ()):
            woken.wake(None)

    def ring_all(self) -> None:
        """Wake everybody here: the service stops, or wake-ups may have been missed."""
        for key in list(self._waiting):
            self.heard(key)


class Watchers:
    """How many clients wait for each run or exec, and since when nobody does."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._left: dict[str, float] = {}
        self._grace: dict[str, float] = {}

    @contextmanager
    def watching(self, key: str) -> Iterator[None]:
        """Count one client of `key`."""
        self._count[key] = self._count.get(key, 0) + 1
        try:
            yield
        finally:
            self._count[key] -= 1
            if not self._count[key]:
                del self._count[key]
                if key in self._left:  # else nobody has to be missed: it has ended, or was never attached
                    self._left[key] = asyncio.get_running_loop().time()
                    self._grace.pop(key, None)

    def expect(self, key: str, grace_s: float = 0.0) -> None:
        """A client should come: count the time without one from now (plus `grace_s`)."""
        self._left[key] = asyncio.get_running_loop().time()
        self._grace[key] = grace_s

    def alone_s(self, key: str) -> float:
        """Seconds since the last client of `key` left and its grace was over; 0 while there is one."""
        return max(0.0, (self.unwatched_s(key) or 0.0) - self._grace.get(key, 0.0))

    def unwatched_s(self, key: str) -> float | None:
        """How long this process has seen no client of `key`, without any grace; None while there is one, or none is expected."""
        if key in self._count or key not in self._left:
            return None
        return max(0.0, asyncio.get_running_loop().time() - self._left[key])

    def deserted(self, seconds: float) -> list[str]:
        """Expected keys without a client for so long, their grace over."""
        return [key for key in self._left if key not in self._count and self.alone_s(key) >= seconds]

    @property
    def watched(self) -> list[str]:
        """What clients wait for here."""
        return list(self._count)

    def forget(self, key: str) -> None:
        """The thing has ended."""
        self._left.pop(key, None)
        self._grace.pop(key, None)
