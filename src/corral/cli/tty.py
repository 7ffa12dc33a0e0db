"""The caller's own terminal: raw while a program inside has it, always restored, and the keys that leave the program."""

from __future__ import annotations

import os
import select
import signal
import termios
import threading
import tty
from types import FrameType
from typing import Any

import click

from corral.cli import leaving

DETACH = "ctrl-],ctrl-]"
HELD_S = 0.5
"""How long the beginning of the detach keys is held back."""
_FALLBACK = (24, 80)
_NAMES = {"@": 0, "[": 27, "\\": 28, "]": 29, "^": 30, "_": 31}


def interactive() -> bool:
    """True if a person sits on both sides."""
    return os.isatty(0) and os.isatty(1)


def size() -> tuple[int, int]:
    """(rows, columns) of the terminal."""
    try:
        columns, rows = os.get_terminal_size(1)
    except OSError:
        return _FALLBACK
    return (rows or _FALLBACK[0], columns or _FALLBACK[1])


def environment() -> dict[str, str]:
    """What a program needs to know of the terminal."""
    return {name: os.environ[name] for name in ("TERM", "COLORTERM") if os.environ.get(name)}


class RawTerminal:
    """As a context manager: every key goes to the program inside, Ctrl-C and Ctrl-Z too. Main thread only.

    The terminal is restored at the end, around a stop that came from elsewhere, and before this process ends by a signal.
    """

    def __init__(self) -> None:
        self.resized = threading.Event()
        """Set when the size may have changed."""
        self._saved: list[Any] = []
        self._old: dict[int, Any] = {}

    def __enter__(self) -> RawTerminal:
        self._saved = termios.tcgetattr(0)
        leaving.undo.append(self.restore)
        handlers = {
            signal.SIGWINCH: self._changed,
            signal.SIGTSTP: self._stopped,
            signal.SIGCONT: self._continued,
            signal.SIGQUIT: self._quit,
        }
        for number, handler in handlers.items():
            self._old[number] = signal.signal(number, handler)
        self._raw()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        for number, handler in self._old.items():
            signal.signal(number, handler)
        leaving.undo.remove(self.restore)

    def _raw(self) -> None:
        tty.setraw(0, termios.TCSANOW)  # what was typed ahead stays

    def restore(self) -> None:
        """As it was found."""
        old = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # also from the background
        try:
            termios.tcsetattr(0, termios.TCSANOW, self._saved)
        except termios.error:
            pass  # the terminal itself is gone
        finally:
            signal.signal(signal.SIGTTOU, old)

    def _changed(self, number: int, frame: FrameType | None) -> None:
        self.resized.set()

    def _stopped(self, number: int, frame: FrameType | None) -> None:
        self.restore()
        signal.raise_signal(signal.SIGSTOP)

    def _continued(self, number: int, frame: FrameType | None) -> None:
        self._raw()
        self.resized.set()

    def _quit(self, number: int, frame: FrameType | None) -> None:
        self.restore()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def keys_of(text: str) -> bytes:
    """The bytes of `ctrl-p,ctrl-q` or `ctrl-],d`; empty for `none`."""
    if text in ("", "none"):
        return b""
    keys = bytearray()
    for name in text.split(","):
        letter = name.lower().removeprefix("ctrl-")
        if name.lower().startswith("ctrl-") and len(letter) == 1 and ("a" <= letter <= "z" or letter in _NAMES):
            keys.append(_NAMES[letter] if letter in _NAMES else ord(letter) - 96)
        elif len(name) == 1 and name.isascii() and name.isprintable():
            keys += name.encode()
        else:
            raise click.BadParameter(
                f"{name!r} is no key; write keys such as ctrl-] or q with commas between", param_hint="--detach-keys"
            )
    return bytes(keys)


class Keys:
    """Tells the detach keys from what goes to the program. What may be their beginning is held until the next key, or for `HELD_S`."""

    def __init__(self, detach: bytes) -> None:
        self._detach = detach
        self.held = b""

    def take(self, data: bytes) -> tuple[bytes, bool]:
        """(what goes to the program, True if the user leaves: what was typed after that is dropped)."""
        data, self.held = self.held + data, b""
        if not self._detach:
            return data, False
        found = data.find(self._detach)
        if found >= 0:
            return data[:found], True
        for length in range(min(len(self._detach) - 1, len(data)), 0, -1):
            if data.endswith(self._detach[:length]):
                self.held = data[-length:]
                return data[:-length], False
        return data, False

    def release(self) -> bytes:
        """What was held."""
        held, self.held = self.held, b""
        return held


class Readable:
    """The standard input as a thread can wait for it: until something comes, or `stop`."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        self._poll.register(self._out, select.POLLIN)

    def read(self, seconds: float | None, most: int) -> bytes | None:
        """The next bytes, empty at the end of file; None when the time is over, or after `stop`."""
        ready = dict(self._poll.poll(None if seconds is None else seconds * 1000))
        if not ready or self._out in ready:
            return None
        try:
            return os.read(0, most)
        except BlockingIOError:
            return None
        except OSError:  # EIO: the terminal hung up
            return b""

    def stop(self) -> None:
        """Wake the reader."""
        os.write(self._in, b"x")
