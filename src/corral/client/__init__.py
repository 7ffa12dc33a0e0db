"""The SDK: see `docs`. Imports nothing heavy; `connect` picks the transport.

`connect()` -> `CORRAL_URL` (with `CORRAL_KEY`) if it is set, else embedded on the state directory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from corral.client.transport import Event, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Event", "Transport", "connect"]


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
