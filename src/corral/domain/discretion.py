"""What tenants are told of failures: what to do about them, but nothing of the host and the installation. The operator's log has it all."""

from __future__ import annotations

import re
from collections.abc import Iterable

from corral.errors import CorralError

HIDDEN = {
    "store_error": ("the store does not answer as it should", "corral doctor tells the operator more"),
    "state_locked": ("another process works with the store", "corral doctor tells the operator more"),
}
"""Codes whose details say where a store is and who has it: what is said instead."""
AGAIN = "try again in a moment"
PLATFORM = ("infra_error", "node_unavailable", "template_unavailable", "runtime_unavailable", "guest_lost")
"""Failures that are not about what the caller named: no path of theirs is one of a sandbox."""
HOST_PLACES = ("/sys/fs/cgroup", "/proc/", "/run/corral", "/var/lib/corral", "/etc/corral")
HOST_PATH = "(a path of the host)"


class Discretion:
    """Hides paths below `places`, those of the installation, in what is told."""

    def __init__(self, places: Iterable[str]) -> None:
        mine = {place.rstrip("/") for place in places}
        self._mine = _paths(sorted(place for place in mine if place))
        self._host = _paths(HOST_PLACES)

    def error(self, error: CorralError) -> CorralError:
        """The same error as it is told; itself if there is nothing to hide."""
        if error.code in HIDDEN:
            detail, hint = HIDDEN[error.code]
            facts = {name: value for name, value in error.facts.items() if name in ("retry_after_s", "started")}
            return CorralError(
                error.code, detail, hint=AGAIN if error.retryable else hint, retryable=error.retryable, **facts
            )
        detail, hint_ = self.text(error.detail, error.code), error.hint and self.text(error.hint, error.code)
        if (detail, hint_) == (error.detail, error.hint):
            return error
        return CorralError(error.code, detail, hint=hint_, field=error.field, retryable=error.retryable, **error.facts)

    def text(self, text: str, code: str = "infra_error") -> str:
        """A sentence about a failure of this code."""
        text = self._mine.sub(HOST_PATH, text)
        return self._host.sub(HOST_PATH, text) if code in PLATFORM else text


def _paths(places: Iterable[str]) -> re.Pattern[str]:
    below = r"[^\s'\",;:()\[\]]*"
    starts = "|".join(re.escape(place) for place in places)
    return re.compile(rf"(?:{starts}){below}" if starts else r"(?!)")
