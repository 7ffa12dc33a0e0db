"""Open the transport for one command and close it again, with progress for what takes long on first use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from corral.cli import terminal
from corral.client import Transport, connect
from corral.client.line import Params

Json = dict[str, Any]


@contextmanager
def opened() -> Iterator[Transport]:
    """`CORRAL_URL` if it is set, else the state directory."""
    with terminal.progress() as progress:
        transport = connect(progress=progress)
        try:
            yield transport
        finally:
            progress.stop()
            transport.close()


class Under:
    """A transport whose requests go out under a lease."""

    def __init__(self, inner: Transport, lease: str) -> None:
        self._inner = inner
        self._lease = {"Corral-Lease": lease}
        self.stream = inner.stream
        self.download = inner.download
        self.upload = inner.upload
        self.close = inner.close

    def request(
        self,
        method: str,
        path: str,
        json: Json | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """See `Transport`."""
        return self._inner.request(method, path, json, params, {**(headers or {}), **self._lease})


def every(transport: Transport, path: str, params: Json | None = None) -> list[Json]:
    """All items of a list, page by page."""
    items: list[Json] = []
    after: str | None = None
    while True:
        page = transport.request("GET", path, params={"limit": 1000, **(params or {}), "after": after})
        items.extend(page["items"])
        after = page.get("next")
        if after is None:
            return items
