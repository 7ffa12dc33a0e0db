"""An exec and whoever started or joined it: what is typed goes in, output comes out, until it ends or the user leaves it.

Output is resumed by cursor and input by offset, so that a broken connection loses and doubles nothing; an outage is waited for up to
`OUTAGE_S`, which the detach keys cut short. The main thread waits and takes the signals; one thread reads, one sends what was read, one
passes output on, one tells of a new size.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from corral.cli import terminal, tty
from corral.cli.following import Ended, Following, Interrupted, Interrupts, die_of, exit_status
from corral.cli.terminal import OutputGone
from corral.client import Transport
from corral.client.calls import Calls
from corral.client.effects import drive, iterate
from corral.client.transport import LineTransport
from corral.errors import CorralError

Json = dict[str, Any]
BLOCK = 64 * 1024
AHEAD = 4 * 1024 * 1024
"""Input that may be read before it can be sent: so far the detach keys are seen while the program reads nothing."""
OUTAGE_S = 300.0
STOOD_S = 60.0
"""A connection that stood longer than this and then broke begins another outage."""
LAST_WORDS_S = 10.0
_AWAY = ("node_unavailable", "shutting_down")
_HANGUP = 1
_BEYOND = 10**11 - 1
"""Further than any input: the refusal says where the input stands."""


class _Left(Exception):
    """Nobody is there any more to write for."""


class _Gate(Interrupts):
    """Writing to the caller is possible until it is shut; signals are none of this thread's business."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._shut = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        with self._lock:
            if self._shut:
                raise _Left
            yield

    def shut(self) -> None:
        """After this nothing is written."""
        with self._lock:
            self._shut = True


class _Outbox:
    """Input between the thread that reads it and the one that sends it."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._eof = False
        self._closed = False
        self._moved = threading.Condition()

    def put(self, data: bytes, eof: bool = False) -> bool:
        """More; waits while there is too much. False: nobody wants it."""
        with self._moved:
            self._moved.wait_for(lambda: self._closed or len(self._data) < AHEAD)
            self._data += data
            self._eof = self._eof or eof
            self._moved.notify_all()
            return not self._closed

    def take(self) -> tuple[bytes, bool] | None:
        """(the next bytes, do they end the input); None when it was closed."""
        with self._moved:
            self._moved.wait_for(lambda: self._closed or self._data or self._eof)
            if self._closed:
                return None
            data = bytes(self._data[:BLOCK])
            del self._data[:BLOCK]
            return data, self._eof and not self._data

    def close(self) -> None:
        """Whoever waits goes home."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()


@dataclass(frozen=True)
class Outcome:
    """`ended`: how the exec ended; None when the user left it running."""

    exec_id: str
    ended: Ended | None


class Interactive:
    """One exec. `offset`: where its input stands, None if it takes none; `screen`: the caller's terminal if the exec has one.

    `detach`: the keys that leave it running. `close_input`: the end of our input ends that of the program.
    """

    def __init__(
        self,
        transport: Transport,
        interrupts: Interrupts,
        exec_id: str,
        *,
        offset: int | None,
        screen: tty.RawTerminal | None,
        detach: bytes,
        close_input: bool,
    ) -> None:
        assert isinstance(transport, LineTransport)
        self._calls = Calls(transport.line)
        self._exec_id = exec_id
        self._offset = offset
        self._screen = screen
        self._keys = tty.Keys(detach if screen is not None else b"")
        self._close_input = close_input
        self._gate = _Gate()
        self._following = Following(transport, self._gate, "execs", exec_id)
        self._ender = Following(transport, interrupts, "execs", exec_id)
        self._outbox = _Outbox()
        self._input = tty.Readable()
        self._news: queue.Queue[Json | BaseException | None] = queue.Queue()
        """The ended exec, what went wrong, or None: the user leaves."""
        self._open = threading.Event()

    def run(self, *, signal_ends: bool) -> Outcome:
        """Until it ends or the user leaves. A signal ends it with `signal_ends`, else `Interrupted` is raised and it goes on."""
        self._open.set()
        threads = [self._pass_on]
        if self._offset is not None:
            threads += [self._read, self._send]
        if self._screen is not None:
            threads.append(self._resize)
        try:
            with self._screen or nullcontext():
                for work in threads:
                    threading.Thread(target=work, daemon=True).start()
                try:
                    news = self._news.get()
                    if isinstance(news, Interrupted):
                        raise news
                except Interrupted as stopped:
                    if not signal_ends:
                        raise
                    return self.end(stopped)
        finally:
            self._leave()
        if news is None:
            return Outcome(self._exec_id, None)
        if isinstance(news, OutputGone):
            if signal_ends:
                self._ender.cancel()
            die_of(news)
        if isinstance(news, BaseException):
            raise news
        return Outcome(self._exec_id, Ended(news, exit_status(news.get("result")), self._following))

    def end(self, stopped: Interrupted) -> Outcome:
        """End the exec because of a signal to us; its last output goes out."""
        self._ender.cancel()
        news: Json | BaseException | None = None
        if self._open.is_set():
            with suppress(queue.Empty):
                news = self._news.get(timeout=LAST_WORDS_S)
        document = news if isinstance(news, dict) else self._ender.wait(output="none")
        return Outcome(self._exec_id, Ended(document, stopped.exit_status, self._following))

    def _leave(self) -> None:
        self._open.clear()
        self._gate.shut()
        self._outbox.close()
        self._input.stop()
        if self._screen is not None:
            self._screen.resized.set()

    # -- output ------------------------------------------------------------------------------------------------------------------
    def _pass_on(self) -> None:
        """By cursor, over outages too: the service may be restarting, or a laptop asleep."""
        lost: float | None = None
        while self._open.is_set():
            began = time.monotonic()
            try:
                self._news.put(self._following.pass_through())
                return
            except _Left:
                return
            except CorralError as error:
                now = time.monotonic()
                if lost is None or now - began > STOOD_S:
                    lost = now
                    self._note(f"corral: no connection, trying again: {error.detail}")
                if error.code not in _AWAY or now - lost > OUTAGE_S:
                    self._news.put(error)
                    return
            except BaseException as error:
                self._news.put(error)
                return

    def _note(self, text: str) -> None:
        if self._screen is None or not self._open.is_set():
            return
        with suppress(_Left, OutputGone), self._gate.hold():
            terminal.write(2, f"\r\n{terminal.plain(text)}\r\n".encode())

    # -- input -------------------------------------------------------------------------------------------------------------------
    def _read(self) -> None:
        while self._open.is_set():
            data = self._input.read(tty.HELD_S if self._keys.held else None, BLOCK)
            if not self._open.is_set():
                return
            if data is None:
                self._outbox.put(self._keys.release())
            elif data:
                more, leaves = self._keys.take(data)
                wanted = self._outbox.put(more)
                if leaves:
                    self._news.put(None)
                if leaves or not wanted:
                    return
            else:
                if self._screen is not None:
                    self._news.put(Interrupted(_HANGUP))
                elif self._close_input:
                    self._outbox.put(b"", eof=True)
                return

    def _send(self) -> None:
        while (taken := self._outbox.take()) is not None:
            data, eof = taken
            if not self._sent(data, eof):
                self._outbox.close()
                return
            if eof:
                return

    def _sent(self, data: bytes, eof: bool) -> bool:
        """False: the program takes no more. What was cut off is sent again at its offset, however often."""
        assert self._offset is not None
        begin = self._offset
        while self._open.is_set():
            start = self._offset
            rest = data[start - begin :]
            try:
                for accepted, reads in iterate(self._calls.write(self._exec_id, rest, eof, start)):
                    self._offset = start + accepted
                    if not reads:
                        return False
                return True
            except CorralError as error:
                if error.code not in _AWAY:
                    return False  # it has ended, or its sandbox has: the output says so
                time.sleep(0.1)
        return False

    def _resize(self) -> None:
        assert self._screen is not None
        told = tty.size()
        while self._open.is_set():
            self._screen.resized.wait()
            self._screen.resized.clear()
            now = tty.size()
            if now != told and self._open.is_set():
                try:
                    drive(self._calls.resize(self._exec_id, *now))
                    told = now
                except CorralError as error:
                    if error.code in _AWAY:
                        self._screen.resized.set()


def input_offset(transport: Transport, exec_id: str) -> int | None:
    """Where the input of a running exec stands; None when it takes none."""
    assert isinstance(transport, LineTransport)
    calls = Calls(transport.line)
    at = _BEYOND
    for _ in range(2):
        try:
            [(_, reads)] = list(iterate(calls.write(exec_id, b"", False, at)))
            return at if reads and at != _BEYOND else None
        except CorralError as error:
            if error.code != "invalid_value" or "continues_at" not in error.facts:
                if error.code == "conflict":
                    return None
                raise
            at = int(error.facts["continues_at"])
    return None


def resize(transport: Transport, exec_id: str) -> bool:
    """Give the exec's terminal the size of ours; False when it has none."""
    assert isinstance(transport, LineTransport)
    try:
        drive(Calls(transport.line).resize(exec_id, *tty.size()))
    except CorralError as error:
        if error.code in ("bad_request", "conflict", "illegal_transition"):
            return False
        raise
    return True
