"""Follow one run or exec to its end: bytes through as they come, signals into a cancel, the result into an exit status.

The first Ctrl-C, SIGTERM or SIGHUP cancels and waits until everything of the run has ended; the second leaves at once (the
service then ends the run, because nobody attached is left). A reader of our output who leaves is treated the same way.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from corral.cli import leaving, terminal
from corral.cli.terminal import OutputGone
from corral.client import Event, Transport
from corral.client.transport import quote
from corral.errors import CorralError

Json = dict[str, Any]

_OURS = {"timeout": 124, "oom": 137, "output_limit": 137, "circuit_breaker": 137, "cancelled": 137}
_NO_OUTCOME = ("sandbox_lost", "sandbox_deleted", "lease_lost", "infra_error", "policy_denied")
_SPEAKS_FOR_ITSELF = ("ok", "nonzero_exit", "signal")
_POLL_S = 30
_CANCEL_ATTEMPTS = 4


class Interrupted(KeyboardInterrupt):
    """A signal asks us to end; `exit_status` is what a shell would say."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_status = 128 + number


class Interrupts:
    """Signals as an exception, where that is safe: inside `hold` and once `--json` has its document they wait.

    The second one ends the process at once.
    """

    def __init__(self) -> None:
        self._held = 0
        self.seen: int | None = None
        """The signal that has come."""

    @contextmanager
    def installed(self) -> Iterator[Interrupts]:
        """Own SIGINT, SIGTERM and SIGHUP, unless the caller of this process has them ignored."""
        old = {}
        for number in leaving.SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, self._arrived)
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A step that must not be cut: a signal is raised after it."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.seen is not None and not self._held:
            raise Interrupted(self.seen)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.seen is not None:
            leaving.leave(number)
        self.seen = number
        if not self._held and not leaving.answer.given:
            raise Interrupted(number)


@dataclass
class Following:
    """One run (`runs`) or exec (`execs`) and how far its output has been passed on."""

    transport: Transport
    interrupts: Interrupts
    kind: str
    ident: str
    cursor: str | None = None
    written: dict[str, int] = field(default_factory=lambda: {"stdout": 0, "stderr": 0})
    last: dict[str, bytes] = field(default_factory=dict)
    tenant: str | None = None
    """Whose it is, where that is not the caller's own: then it can be waited for and cancelled."""

    @property
    def path(self) -> str:
        return f"/v1/{self.kind}/{quote(self.ident)}"

    def pass_through(self) -> Json:
        """Write the output as it comes, return the ended run or exec (without its output)."""
        for event in self.transport.stream(self.path + "/stream", {"cursor": self.cursor} if self.cursor else None):
            if event.kind in ("stdout", "stderr"):
                self._pass(event)
            elif event.kind == "gap" and event.doc is not None:
                raise CorralError(
                    "cursor_gone",
                    f"{event.doc.get('bytes')} bytes of {event.doc.get('stream')} were not kept long enough to be passed on",
                    hint="read what is kept with corral logs",
                )
            self.cursor = event.cursor or self.cursor
        document = self.wait(output="none")
        self._complete(document)
        return document

    def _complete(self, document: Json) -> None:
        """What the result counts and the stream did not bring comes from the spool: output is never lost in silence."""
        result = document.get("result") or {}
        kill = ((result.get("limits") or {}).get("output") or {}).get("kill")
        for stream in ("stdout", "stderr"):
            produced = (result.get(stream) or {}).get("bytes") or 0
            offset = 0
            if produced > self.written[stream]:
                for block in self.transport.download(self.path + "/logs", {"stream": stream}):
                    self._pass(Event(stream, None, offset, block))
                    offset += len(block)
            if produced > self.written[stream]:
                missing = produced - self.written[stream]
                if (
                    kill is not None and self.written[stream] >= kill
                ):  # the limit that ends the program: all below it is out
                    if result.get("reason") != "output_limit":  # it was faster; its status stays its own
                        terminal.say(
                            f"corral: the last {missing} bytes of {stream} are over --output-kill and were dropped"
                        )
                    continue
                hint = "what is kept is in the result: corral runs show"
                raise CorralError("cursor_gone", f"the last {missing} bytes of {stream} are no longer there", hint=hint)

    def _pass(self, event: Event) -> None:
        """The bytes of one event that have not gone out yet. A signal finds `written` exact, so that nothing doubles after it."""
        descriptor = 1 if event.kind == "stdout" else 2
        view = memoryview(event.data)[max(0, self.written[event.kind] - event.offset) :]
        while view:
            terminal.wait_writable(descriptor)
            with self.interrupts.hold():
                count = terminal.write_some(descriptor, view)
                self.written[event.kind] += count
            view = view[count:]
        self.last[event.kind] = event.data[-1:] or self.last.get(event.kind, b"")

    def wait(self, **params: str | int | None) -> Json:
        """The ended run or exec, however long that takes."""
        while True:
            document = self.transport.request(
                "GET", self.path, params={"wait": _POLL_S, "tenant": self.tenant, **params}
            )
            if document.get("result") is not None or document.get("state") == "finished":
                return document

    def cancel(self) -> None:
        """Ask for the end of everything in it and wait until that is so."""
        for _ in range(_CANCEL_ATTEMPTS):
            document = self.transport.request("POST", self.path + "/cancel", params={"tenant": self.tenant})
            if document.get("result") is not None or document.get("state") == "finished":
                return
        raise CorralError("infra_error", f"{self.ident} does not end", hint="see corral doctor for what is left")


@dataclass(frozen=True)
class Ended:
    """What `carry_out` ends with. `following` knows what went to the terminal."""

    document: Json
    status: int
    following: Following


def carry_out(transport: Transport, interrupts: Interrupts, path: str, request: Json, *, view: Json | None) -> Ended:
    """POST the run or exec, follow it to its end. A signal or a reader that left cancels it first.

    `view` None: the output goes through as it comes; else the document has it, as these query parameters want it.
    """
    kind = "execs" if path.endswith("/execs") else "runs"
    following: Following | None = None

    def to_the_end(following: Following) -> Json:
        return following.pass_through() if view is None else following.wait(**view)

    try:
        with interrupts.hold():
            started = transport.request("POST", path, request | {"attached": True}, {"wait": 0, "output": "none"})
            following = Following(transport, interrupts, kind, started["id"])
        document = to_the_end(following)
    except OutputGone as gone:
        if following is not None:
            following.cancel()
        die_of(gone)
    except (Interrupted, Exception):  # once a signal has come, what a cut call raises on its way out does not matter
        if interrupts.seen is None or following is None:
            raise
        following.cancel()
        return Ended(to_the_end(following), 128 + interrupts.seen, following)
    return Ended(document, exit_status(document.get("result")), following)


def die_of(gone: OutputGone) -> NoReturn:
    """End as a program does whose reader left, or say why nothing more can be written."""
    if gone.broken_pipe:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    raise CorralError("infra_error", str(gone), retryable=False)


def exit_status(result: Json | None) -> int:
    """The table of the contract: `reason` is the authority."""
    if result is None:
        return 125
    reason = result.get("reason")
    if reason in _OURS:
        return _OURS[reason]
    code = result.get("exit_code")
    if reason in _NO_OUTCOME or not isinstance(code, int):
        return 125
    return code


def explain(ended: Ended) -> None:
    """Say on stderr what the output cannot say; nothing for an ending that speaks for itself."""
    result = ended.document.get("result") or {}
    reason, hint = result.get("reason"), result.get("hint")
    if reason in _SPEAKS_FOR_ITSELF and result.get("started") is not False and result.get("phase") != "build":
        return
    if ended.following.last.get("stderr", b"\n") != b"\n" and os.isatty(2):
        terminal.say("")
    terminal.say(f"corral: {reason}: {hint}" if hint else f"corral: {reason}")
