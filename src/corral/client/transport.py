"""How a client speaks to Corral, whatever is below: in process, on the state directory's socket, or a URL.

Contract of every transport: calls are synchronous and may come from several threads. Paths are those of the API, already
percent-encoded (`quote`). A request that was cut off is repeated by the transport itself, with one `Idempotency-Key` per POST,
so that nothing starts twice; a stream that was cut off goes on at its cursor. Refusals raise `CorralError` with the code of the
problem document. `KeyboardInterrupt` passes through every call and leaves the transport usable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Json = dict[str, Any]
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
        """Send raw bytes, streamed; not repeated."""
        ...

    def close(self) -> None:
        """Let go. In embedded mode the owner finishes what must not be left half-done, at most 5 s."""
        ...


def quote(segment: str) -> str:
    """One path segment, percent-encoded; lone surrogates become the bytes that they stand for."""
    from urllib.parse import quote as encode

    return encode(segment.encode("utf-8", "surrogateescape"), safe="")
