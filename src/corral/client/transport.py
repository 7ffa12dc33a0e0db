"""How a client speaks to Corral, whatever is below: in process, on the state directory's socket, or a URL.

Contract of every transport: calls are synchronous and may come from several threads. Paths are those of the API, already
percent-encoded (`quote`). A request that was cut off is repeated by the transport itself, with one `Idempotency-Key` per POST,
so that nothing starts twice; a stream that was cut off goes on at its cursor. Refusals raise `CorralError` with the code of the
problem document. `KeyboardInterrupt` passes through every call and leaves the transport usable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from corral.errors import CorralError

Json = dict[str, Any]
PATIENCE_S = 30.0
"""How long a call is repeated while nothing answers."""

Params = Mapping[str, str | int | float | bool | None]


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


class Transport(Protocol):
    """See the module docstring. Parameters that are None are left out."""

    def request(
        self,
        method: str,
        path: str,
        json: Json | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """One call; the decoded document of a 2xx answer (`{}` if it has none)."""
        ...

    def stream(self, path: str, params: Params | None = None) -> Iterator[Event]:
        """Events until `ended` (included), resumed by cursor over broken connections. Closing the iterator leaves the exec alone."""
        ...

    def download(self, path: str, params: Params | None = None) -> Iterator[bytes]:
        """Raw bytes, streamed; a broken connection raises `infra_error`, never a short file."""
        ...

    def upload(self, path: str, chunks: Iterable[bytes], params: Params | None = None, method: str = "PUT") -> Json:
        """Send raw bytes, streamed; not repeated. Empty chunks mean nothing."""
        ...

    def close(self) -> None:
        """Let go. In embedded mode the owner finishes what must not be left half-done, at most 5 s."""
        ...


def quote(segment: str) -> str:
    """One path segment, percent-encoded; lone surrogates become the bytes that they stand for."""
    from urllib.parse import quote as encode

    return encode(segment.encode("utf-8", "surrogateescape"), safe="")


class Cut(ConnectionError):
    """The connection could not be made (`sent` False) or broke off."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Single(Protocol):
    """A transport that tries once and may raise `Cut`."""

    def request(
        self, method: str, path: str, json: Json | None, params: Params | None, headers: Mapping[str, str] | None
    ) -> Json: ...
    def stream(self, path: str, params: Params | None) -> Iterator[Event]: ...
    def download(self, path: str, params: Params | None) -> Iterator[bytes]: ...
    def upload(self, path: str, chunks: Iterable[bytes], params: Params | None, method: str) -> Json: ...
    def close(self) -> None: ...


class Repeating:
    """Makes a transport out of single attempts: `current()` gives one to try, `failed()` is told when it broke off."""

    hint: str | None = None
    """What to do when nothing answers."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s

    @property
    def patience_s(self) -> float:
        """How long a call is repeated while nothing answers."""
        return self._patience_s

    def current(self) -> Single:
        raise CorralError("infra_error", "no transport")

    def failed(self, single: Single) -> None:
        """Forget what broke; the next `current` makes another."""

    def pause(self, seconds: float) -> None:
        """Wait before the next attempt; less if there is a reason to try at once."""
        time.sleep(seconds)

    def request(
        self,
        method: str,
        path: str,
        json: Json | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        fields = dict(headers or {})
        if method == "POST":
            fields.setdefault("Idempotency-Key", os.urandom(16).hex())
        backoff = _Backoff(self)
        while True:
            single = self.current()
            try:
                return single.request(method, path, json, params, fields)
            except Cut as cut:
                self.failed(single)
                backoff.wait(cut, self.pause)
            except CorralError as error:
                if error.code != "shutting_down":
                    raise
                self.failed(single)
                backoff.wait(error, self.pause)

    def stream(self, path: str, params: Params | None = None) -> Iterator[Event]:
        wanted = dict(params or {})
        started = False
        backoff = _Backoff(self)
        while True:
            single = self.current()
            try:
                for event in single.stream(path, wanted):
                    backoff = _Backoff(self)
                    if event.cursor is not None:
                        wanted["cursor"] = event.cursor
                    if event.kind == "started":
                        if started:
                            continue
                        started = True
                    yield event
                    if event.kind == "ended":
                        return
                raise Cut("the stream ended early", sent=True)
            except Cut as cut:
                self.failed(single)
                backoff.wait(cut, self.pause)
            except CorralError as error:
                if error.code != "shutting_down":
                    raise
                self.failed(single)
                backoff.wait(error, self.pause)

    def download(self, path: str, params: Params | None = None) -> Iterator[bytes]:
        backoff = _Backoff(self)
        while True:
            single = self.current()
            try:
                yield from single.download(path, params)
                return
            except Cut as cut:  # nothing was yielded yet: a broken body is an error of its own
                self.failed(single)
                backoff.wait(cut, self.pause)

    def upload(self, path: str, chunks: Iterable[bytes], params: Params | None = None, method: str = "PUT") -> Json:
        backoff = _Backoff(self)
        while True:
            single = self.current()
            try:
                # what is below takes an empty chunk for the end of the body
                return single.upload(path, (chunk for chunk in chunks if chunk), params, method)
            except Cut as cut:
                self.failed(single)
                if cut.sent:
                    raise CorralError("infra_error", "the upload broke off", hint="send it again") from cut
                backoff.wait(cut, self.pause)

    def close(self) -> None:
        """Subclasses let go of what they hold."""


class _Backoff:
    def __init__(self, repeating: Repeating) -> None:
        self._repeating = repeating
        self._since = time.monotonic()
        self._pause = 0.01

    def wait(self, cause: Exception, sleep: Callable[[float], object] = time.sleep) -> None:
        if time.monotonic() - self._since >= self._repeating.patience_s:
            if isinstance(cause, CorralError):
                raise cause
            raise CorralError(
                "node_unavailable", f"the service does not answer: {cause}", hint=self._repeating.hint
            ) from cause
        sleep(self._pause)
        self._pause = min(self._pause * 1.6, 0.5)
