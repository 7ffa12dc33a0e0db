"""How this process ends by a signal, from its first moment to its last, and whether `--json` has had its one document.

Imports next to nothing: `guard` has to stand before everything that takes long to load.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps; that takes longer to load than all of this
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_NAMES: dict[int, str] = {_signal.SIGINT: "SIGINT", _signal.SIGTERM: "SIGTERM", _signal.SIGHUP: "SIGHUP"}
SIGNALS = tuple(_NAMES)


class Answer:
    """The one document of `--json`: is it wanted, has it been given (or begun)."""

    def __init__(self) -> None:
        self.wanted = False
        self.given = False

    def expect(self, arguments: list[str]) -> None:
        """A new command line. Until it is parsed `--json` among our words counts."""
        ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
        self.wanted, self.given = "--json" in ours, False


answer = Answer()


def guard(arguments: list[str]) -> None:
    """Own the signals until a command does, and again after it: no traceback, and the document that was asked for."""
    answer.expect(arguments)
    late: list[int] = []

    def arrived(number: int, frame: object) -> None:
        if answer.given and not late:  # all is said: the first signal only finds us leaving
            late.append(number)
            return
        leave(number)

    for number in SIGNALS:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, arrived)
    if not os.environ.get("CORRAL_DEBUG"):
        sys.unraisablehook = lambda unraisable: None  # a signal that came in a finalizer


def detail(number: int) -> str:
    """What the refusal says."""
    return f"stopped by {_NAMES[number]}"


HINT = "corral runs lists what had been started"


def document(number: int) -> str:
    """`{"error": PROBLEM}` of code `cancelled`; written out, as a handler must not import."""
    return (
        '{"error": {"type": "urn:corral:error:cancelled", "title": "The call was stopped", "status": 409, '
        f'"detail": "{detail(number)}", "code": "cancelled", "retryable": false, "hint": "{HINT}"}}}}\n'
    )


undo: list[Callable[[], None]] = []
"""What must not be left as it is: called before this process ends at once."""


def leave(number: int) -> None:
    """End at once with the status that a shell gives to the signal; whatever is attached to us ends by itself."""
    for step in undo:
        step()
    if answer.wanted and not answer.given:
        answer.given = True
        try:
            os.write(1, document(number).encode())
        except OSError:
            pass  # there is nobody to tell
    os._exit(128 + number)
