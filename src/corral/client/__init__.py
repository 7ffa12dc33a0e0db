"""The SDK. Imports nothing heavy; `Corral` is the face for programs, `connect` picks a transport.

`connect()` -> `CORRAL_URL` (with `CORRAL_KEY`) if it is set, else embedded on the state directory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from corral.client.transport import Event, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from corral.client.sdk import AsyncCorral, Corral

__all__ = ["AsyncCorral", "Corral", "Event", "Transport", "connect"]


def __getattr__(name: str) -> object:
    """`Corral` and `AsyncCorral` are imported when they are asked for: the command line does without them."""
    if name in ("AsyncCorral", "Corral"):
        from corral.client import sdk

        return getattr(sdk, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def connect(
    url: str | None = None,
    key: str | None = None,
    state_dir: str | None = None,
    progress: Callable[[str, float | None], None] | None = None,
) -> Transport:
    """A transport by URL and key, else embedded on `state_dir` (default: `config`). `progress(sentence, fraction | None)` hears of long set-up."""
    if url is None and state_dir is None:
        url = os.environ.get("CORRAL_URL") or None
        key = key or os.environ.get("CORRAL_KEY") or None
    if url is not None:
        from corral.client.http import open_url

        return open_url(url, key)
    from corral.client.embedded import open_embedded

    return open_embedded(state_dir, progress=progress)
