"""Somebody at a terminal: a command of ours on a pseudo-terminal, typed to and looked at."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from typing import Any

from acceptance.conftest import Box

PATIENCE_S = 30.0
PROMPT = r"(?:bash|sh)[-.\d]*[$#] "


class Person:
    """As a context manager; the command is killed if it lives at the end."""

    def __init__(self, box: Box, *words: str, rows: int = 30, cols: int = 100) -> None:
        self.master, self._slave = os.openpty()
        self.resize(rows, cols, tell=False)
        self.as_found = termios.tcgetattr(self._slave)
        self.screen = b""
        """All that came."""
        self._seen = 0
        self.process = subprocess.Popen(
            box.command(*words), stdin=self._slave, stdout=self._slave, stderr=self._slave, cwd="/", start_new_session=True,
            env=box.env | {"TERM": "dumb"}, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self._slave)

    def resize(self, rows: int, cols: int, *, tell: bool = True) -> None:
        """The window changes; the kernel tells the foreground group."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def type(self, text: str | bytes) -> None:
        """All of it, however slowly it is taken; what comes meanwhile is looked at."""
        rest = text.encode() if isinstance(text, str) else text
        end = time.monotonic() + PATIENCE_S
        os.set_blocking(self.master, False)
        while rest:
            assert time.monotonic() < end, f"{len(rest)} bytes are not taken"
            self._look(0)
            if select.select([], [self.master], [], 0.2)[1]:
                try:
                    rest = rest[os.write(self.master, rest[:1024]) :]
                except BlockingIOError:
                    continue

    def _look(self, seconds: float) -> bool:
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            came = os.read(self.master, 65536)
        except (BlockingIOError, OSError):
            return False
        self.screen += came
        return bool(came)

    def sees(self, pattern: str, within: float = PATIENCE_S) -> str:
        """Wait until a pattern stands behind what was seen before; the text up to and with it."""
        end = time.monotonic() + within
        while True:
            new = self.screen[self._seen :]
            if found := re.search(pattern.encode(), new):
                self._seen += found.end()
                return new[: found.end()].decode("utf-8", "replace")
            left = end - time.monotonic()
            assert left > 0 and (self.process.poll() is None or self._look(0.2)), (pattern, new[-3000:])
            self._look(min(left, 0.5))

    def sees_bytes(self, count: int, within: float = PATIENCE_S) -> bytes:
        """Everything behind what was seen before, when there is that much of it or the time is over."""
        end = time.monotonic() + within
        while len(self.screen) - self._seen < count and time.monotonic() < end:
            self._look(0.1)
        return self.screen[self._seen :]

    def leaves(self, within: float = PATIENCE_S) -> int:
        """The exit status of the command, when it has ended."""
        end = time.monotonic() + within
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it goes on: {self.screen[-2000:]!r}"
            self._look(0.1)
        while self._look(0.05):
            pass
        return self.process.returncode

    def terminal_is_as_found(self) -> bool:
        return termios.tcgetattr(self._slave) == self.as_found
