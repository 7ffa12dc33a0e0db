"""The SDK. Imports nothing heavy; `Corral` and `AsyncCorral` are the faces for programs, `connect` picks a transport.

Where a client goes: `url` (with `key`) if given, else embedded on `state_dir` if given, else `CORRAL_URL` (with `CORRAL_KEY`) if it
is set, else embedded on the default state directory. Several URLs of one service: a list, or separated by commas.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from corral.errors import CorralError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from corral.client.async_sdk import AsyncCorral
    from corral.client.effects import Effects
    from corral.client.line import Endpoint
    from corral.client.sdk import Corral
    from corral.client.transport import Event, Transport
    from corral.client.values import FileEvent, FileInfo, Output, Result

__all__ = [
    "AsyncCorral",
    "Corral",
    "CorralError",
    "Event",
    "FileEvent",
    "FileInfo",
    "Output",
    "Result",
    "Transport",
    "connect",
]
_FROM = {
    "AsyncCorral": "async_sdk",
    "Corral": "sdk",
    "Event": "line",
    "FileEvent": "values",
    "FileInfo": "values",
    "Output": "values",
    "Result": "values",
    "Transport": "transport",
}


def __getattr__(name: str) -> object:
    """Names are imported when they are asked for: the command line does without most of them."""
    if name in _FROM:
        from importlib import import_module

        return getattr(import_module(f"corral.client.{_FROM[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def connect(
    url: str | Sequence[str] | None = None,
    key: str | None = None,
    state_dir: str | None = None,
    progress: Callable[[str, float | None], None] | None = None,
) -> Transport:
    """A synchronous transport. `progress(sentence, fraction | None)` hears of long set-up."""
    from corral.client.effects import Blocking

    url, key = where(url, key, state_dir)
    if url is None:
        from corral.client.embedded import open_embedded

        return open_embedded(state_dir, progress=progress)
    from corral.client.line import Line
    from corral.client.transport import LineTransport

    effects = Blocking()
    return LineTransport(Line(endpoint(url, key, None, None, effects), effects))


def where(
    url: str | Sequence[str] | None, key: str | None, state_dir: str | None
) -> tuple[str | Sequence[str] | None, str | None]:
    """(URL or URLs, or None for embedded; key), with what the environment says."""
    if url is None and state_dir is not None:
        return None, None
    if url is None:
        url = os.environ.get("CORRAL_URL") or None
    if url is not None and key is None:
        key = os.environ.get("CORRAL_KEY") or None
    return url, key


def endpoint(
    url: str | Sequence[str] | None, key: str | None, state_dir: str | None, ca_file: str | None, effects: Effects
) -> Endpoint:
    """What a face of the SDK talks to; nothing is connected or started yet."""
    url, key = where(url, key, state_dir)
    if url is not None:
        from corral.client.http import open_url

        return open_url(url, key, effects, ca_file)
    from corral import config
    from corral.client.embedded import StateDirectory

    return StateDirectory(config.load(state_dir), effects, None)
