"""Calls that survive: what was cut off is repeated so that nothing starts twice, streams go on at their cursor. Without I/O of its own.

An `Endpoint` gives something to try (`Single`: in process, a socket, a URL), and is told when it broke. A `Line` makes calls out of
single attempts; each POST carries one `Idempotency-Key` through all of them. Patience is bounded: `patience_s` while nothing
answers, `busy_s` while the service answers that it is busy (429, 503), whose `Retry-After` is honoured.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from corral.client.effects import Effects
from corral.errors import CorralError

Json = dict[str, Any]
Params = Mapping[str, str | int | float | bool | None]
PATIENCE_S = 30.0
"""How long a call is repeated while nothing answers."""
STOOD_S = 1.0
"""A stream that stood longer than this, however quiet, was a good connection."""
BUSY = (429, 503)


SLOW = 5
"""How often an answer that does not come in time is asked for again."""


class Cut(ConnectionError):
    """The connection could not be made (`sent` False) or broke off; `slow`: it stands, but nothing came for a long time."""

    def __init__(self, message: str, *, sent: bool, slow: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.slow = slow


@dataclass(frozen=True)
class Event:
    """One event of a stream: `kind` is started, stdout, stderr, gap or ended.

    `data` are the exact bytes at `offset` (stdout, stderr); `doc` is the event's document: `ended` has `result` (and the run or
    exec around it), `gap` has `stream`, `offset`, `bytes`. `cursor` goes into `?cursor=` to resume after this event.
    """

    kind: str
    cursor: str | None = None
    offset: int = 0
    data: bytes = b""
    doc: Json | None = None


@dataclass(frozen=True)
class Request:
    """One call: a JSON document, or raw bytes, or raw blocks that can be sent once (`size` of them, if known)."""

    method: str
    path: str
    params: Params = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Json | None = None
    raw: bytes | None = None
    blocks: AsyncIterable[bytes] | None = None
    size: int | None = None
    fresh: bool = False
    """On a connection of its own: one that is being closed must not make the call doubtful."""


class Answer(Protocol):
    """A 2xx answer, of which one of the three forms is asked for; `close` when it was not read to its end.

    Each raises `Cut` when the connection breaks in the middle.
    """

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""

    async def document(self) -> Json: ...
    def events(self) -> AsyncGenerator[Event, None]: ...
    def blocks(self) -> AsyncGenerator[bytes, None]: ...
    async def close(self) -> None: ...


class Single(Protocol):
    """Tries once."""

    async def send(self, request: Request) -> Answer:
        """The answer; `CorralError` for a refusal, `Cut` when there is none."""
        ...

    def close(self) -> None:
        """Keep nothing; calls under way go on."""
        ...


class Endpoint(Protocol):
    """See the module docstring."""

    hint: str | None
    """What to do when nothing answers."""

    @property
    def patience_s(self) -> float: ...

    async def current(self) -> Single:
        """Something to try now."""
        ...

    def failed(self, single: Single) -> None:
        """It broke: the next `current` makes another."""
        ...

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt; less if there is a reason to try at once."""
        ...

    async def close(self) -> None: ...


class Line:
    """See the module docstring."""

    def __init__(self, endpoint: Endpoint, effects: Effects, busy_s: float = 0.0, limit_s: float | None = None) -> None:
        self.endpoint = endpoint
        self.effects = effects
        self.busy_s = busy_s
        self.limit_s = limit_s

    def hurried(self, seconds: float) -> Line:
        """The same, with patience for `seconds` only."""
        return Line(self.endpoint, self.effects, min(self.busy_s, seconds), seconds)

    async def request(
        self,
        method: str,
        path: str,
        json: Json | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        raw: bytes | None = None,
        once: bool = False,
        gone: bool = False,
    ) -> Json:
        """One call; the decoded document of a 2xx answer.

        `once`: what would do harm twice is not repeated after it was sent. `gone`: when a repeated call finds nothing, the one
        that was cut off has done it.
        """
        fields = dict(headers or {})
        if method == "POST":
            fields.setdefault("Idempotency-Key", new_key())
        request = Request(method, path, params or {}, fields, json, raw, fresh=once)
        patience = _Patience(self)
        doubtful = False
        while True:
            single = await self.endpoint.current()
            try:
                answer = await single.send(request)
                try:
                    return await answer.document()
                finally:
                    await answer.close()
            except Cut as cut:
                self.endpoint.failed(single)
                if once and cut.sent:
                    raise unsure(f"{method} {path}") from cut
                doubtful = doubtful or cut.sent
                await patience.after(cut)
            except CorralError as error:
                if gone and doubtful and error.code == "not_found":
                    return {}
                await patience.after_refusal(error, single)

    async def stream(self, path: str, params: Params | None = None) -> AsyncGenerator[Event, None]:
        """Events until `ended` (included), resumed by cursor over broken connections."""
        wanted = dict(params or {})
        started = False
        patience = _Patience(self)
        while True:
            single = await self.endpoint.current()
            began = float("inf")
            try:
                answer = await single.send(Request("GET", path, {"encoding": "base64", **wanted}, _EVENTS))
                began = time.monotonic()
                source = answer.events()
                try:
                    async for event in source:
                        patience = _Patience(self)
                        if event.cursor is not None:
                            wanted["cursor"] = event.cursor
                        if event.kind == "started":
                            if started:
                                continue
                            started = True
                        yield event
                        if event.kind == "ended":
                            return
                finally:
                    await source.aclose()
                    await answer.close()
                raise Cut("the stream ended early", sent=True)
            except Cut as cut:
                self.endpoint.failed(single)
                if time.monotonic() - began > STOOD_S:
                    patience = _Patience(self)
                await patience.after(cut)
            except CorralError as error:
                if time.monotonic() - began > STOOD_S:
                    patience = _Patience(self)
                await patience.after_refusal(error, single)

    async def open(self, path: str, params: Params | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        """An answer whose body is read by the caller: it is repeated until it has begun, `Cut` afterwards is the caller's."""
        request = Request("GET", path, params or {}, headers or {})
        patience = _Patience(self)
        while True:
            single = await self.endpoint.current()
            try:
                return await single.send(request)
            except Cut as cut:
                self.endpoint.failed(single)
                await patience.after(cut)
            except CorralError as error:
                await patience.after_refusal(error, single)

    async def download(self, path: str, params: Params | None = None) -> AsyncGenerator[bytes, None]:
        """Raw bytes; `infra_error` when the connection breaks in the middle, never a short file."""
        answer = await self.open(path, params)
        source = answer.blocks()
        try:
            async for block in source:
                yield block
        except Cut as cut:
            raise CorralError("infra_error", "the download broke off", hint="start it again") from cut
        finally:
            await source.aclose()
            await answer.close()

    async def upload(
        self,
        path: str,
        source: Callable[[], AsyncGenerator[bytes, None]],
        params: Params | None = None,
        method: str = "PUT",
        *,
        size: int | None = None,
        again: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """Raw blocks, streamed. `infra_error` when the connection breaks after the first of them, unless they can be sent `again`."""
        patience = _Patience(self)
        while True:
            single = await self.endpoint.current()
            blocks = source()
            try:
                answer = await single.send(
                    Request(method, path, params or {}, headers or {}, blocks=blocks, size=size, fresh=True)
                )
                try:
                    return await answer.document()
                finally:
                    await answer.close()
            except Cut as cut:
                self.endpoint.failed(single)
                if cut.sent and not again:
                    raise CorralError("infra_error", "the upload broke off", hint="send it again") from cut
                await patience.after(cut)
            except CorralError as error:
                if not again:
                    raise
                await patience.after_refusal(error, single)
            finally:
                await blocks.aclose()

    async def close(self) -> None:
        """Let go."""
        await self.endpoint.close()


_EVENTS = {"Accept": "text/event-stream"}


def new_key() -> str:
    """An `Idempotency-Key`."""
    return os.urandom(16).hex()


def unsure(what: str) -> CorralError:
    """The error of a call that was cut off and must not be repeated."""
    return CorralError(
        "infra_error",
        f"the connection broke off during {what}: nobody knows whether it was done",
        hint="look at the state, then decide whether to do it again",
    )


class _Patience:
    """Begins with the first failure: how long a good connection was waited on does not count, unless there is no time."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._since: float | None = None if line.limit_s is None else time.monotonic()
        self._pause = 0.01
        self._slow = 0

    async def after(self, cut: Exception) -> None:
        """Wait before the next attempt, or say that it is enough."""
        endpoint, limit, now = self._line.endpoint, self._line.limit_s, time.monotonic()
        if isinstance(cut, Cut) and cut.slow and limit is None and self._slow < SLOW:
            self._slow += 1
            self._since = now
        self._since = now if self._since is None else self._since
        patience = endpoint.patience_s if limit is None else min(limit, endpoint.patience_s)
        if now - self._since >= patience:
            if isinstance(cut, CorralError):
                raise cut
            raise CorralError("node_unavailable", f"the service does not answer: {cut}", hint=endpoint.hint) from cut
        await endpoint.pause(self._pause)
        self._pause = min(self._pause * 1.6, 0.5)

    async def after_refusal(self, error: CorralError, single: Single) -> None:
        """The same for an answer that says "later"; every other refusal is raised."""
        if error.code == "shutting_down":
            self._line.endpoint.failed(single)
            await self.after(error)
            return
        if error.status not in BUSY or not error.retryable:
            raise error
        self._since = time.monotonic() if self._since is None else self._since
        left = self._line.busy_s - (time.monotonic() - self._since)
        seconds = max(self._pause, float(error.facts.get("retry_after_s") or 0))
        if seconds > left:
            raise error
        await self._line.effects.sleep(seconds)
        self._pause = min(self._pause * 2, 1.0)
