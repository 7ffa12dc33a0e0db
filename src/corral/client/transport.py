"""How a synchronous program speaks to Corral, whatever is below: in process, on the state directory's socket, or a URL.

Contract of every transport: calls are synchronous and may come from several threads. Paths are those of the API, already
percent-encoded (`quote`). A request that was cut off is repeated by the transport itself, with one `Idempotency-Key` per POST,
so that nothing starts twice; a stream that was cut off goes on at its cursor. Refusals raise `CorralError` with the code of the
problem document. `KeyboardInterrupt` passes through every call and leaves the transport usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from corral.client.effects import drive, in_turn, iterate
from corral.client.line import PATIENCE_S, Cut, Event, Json, Line, Params

__all__ = ["PATIENCE_S", "Cut", "Event", "Json", "LineTransport", "Params", "Transport", "quote"]


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

    def under(self, lease: str) -> Transport:
        """The same, with every call under a lease, given by its fence. Closing either closes both."""
        ...

    def close(self) -> None:
        """Let go. In embedded mode the owner finishes what must not be left half-done, at most 5 s."""
        ...


class LineTransport:
    """A `Transport` over a line with blocking effects."""

    def __init__(self, line: Line) -> None:
        self.line = line

    def request(
        self,
        method: str,
        path: str,
        json: Json | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        return drive(self.line.request(method, path, json, params, headers))

    def stream(self, path: str, params: Params | None = None) -> Iterator[Event]:
        return iterate(self.line.stream(path, params))

    def download(self, path: str, params: Params | None = None) -> Iterator[bytes]:
        return iterate(self.line.download(path, params))

    def upload(self, path: str, chunks: Iterable[bytes], params: Params | None = None, method: str = "PUT") -> Json:
        return drive(self.line.upload(path, lambda: in_turn(chunks, self.line.effects), params, method))

    def under(self, lease: str) -> LineTransport:
        from corral.client.leases import FixedGrip, GrippedLine

        return LineTransport(GrippedLine(self.line, FixedGrip(lease)))

    def close(self) -> None:
        drive(self.line.close())


def quote(segment: str) -> str:
    """One path segment, percent-encoded; lone surrogates become the bytes that they stand for."""
    from urllib.parse import quote as encode

    return encode(segment.encode("utf-8", "surrogateescape"), safe="")
