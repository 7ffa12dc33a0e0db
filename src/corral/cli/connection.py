"""Open the transport for one command and close it again, with progress for what takes long on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from corral.cli import terminal
from corral.client import Transport, connect

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


def under(transport: Transport, lease: str | None) -> Transport:
    """The transport for calls under a lease, if there is one."""
    return transport if lease is None else transport.under(lease)


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
