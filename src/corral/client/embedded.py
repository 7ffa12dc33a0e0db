"""Embedded mode: the state directory is the service. The one lazy door from the client to the server side.

One process at a time owns STATE, by `flock` on STATE/owner.lock; it works in process and serves the others on STATE/api.sock. All
others are clients of that socket. When the owner is gone, whoever waits takes over, adopts what runs and goes on with its own call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from corral import config
from corral.client.effects import Blocking, Effects, drive
from corral.client.line import PATIENCE_S, Line, Single
from corral.client.transport import LineTransport
from corral.errors import CorralError

if TYPE_CHECKING:
    from corral.bootstrap import Owner

Progress = Callable[[str, float | None], None]
SOCKET = "api.sock"
LOOK_S = 0.004
"""How often a process that waits tries the lock."""


class StateDirectory:
    """An `Endpoint`: owner or client of one state directory, whichever this process can be just now."""

    hint: str | None = None

    def __init__(
        self, settings: config.Config, effects: Effects, progress: Progress | None, patience_s: float = PATIENCE_S
    ) -> None:
        self._settings = settings
        self._effects = effects
        self._progress = progress
        self._patience_s = patience_s
        self._guard = threading.Lock()
        self._owner: Owner | None = None
        self._single: Single | None = None
        self._closed = False
        self._pid = os.getpid()

    @property
    def patience_s(self) -> float:
        return self._patience_s

    @property
    def owner(self) -> Owner | None:
        """The service in this process, while it owns the state directory."""
        return self._owner

    async def current(self) -> Single:
        if self._pid != os.getpid():
            raise CorralError("infra_error", "a client cannot be used after fork; open a new one", retryable=False)
        single = self._single
        return single if single is not None else await self._effects.local(self._elected)

    def _elected(self) -> Single:
        with self._guard:
            if self._closed:
                raise CorralError("shutting_down", "this client is closed", retryable=False)
            if self._single is None:
                self._single = self._elect()
            return self._single

    def failed(self, single: Single) -> None:
        with self._guard:
            if self._single is single and self._owner is None:
                self._single = None
                single.close()

    async def pause(self, seconds: float) -> None:
        """Wait for the lock rather than for the clock: whoever waits has the same chance as whoever comes now."""
        await self._effects.local(self._wait, seconds)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self._guard:
                if self._single is not None or self._closed:
                    return
                if (lock := take_lock(self._settings.state_dir)) is not None:
                    self._single = self._own(lock)
                    return
            time.sleep(LOOK_S)

    def _elect(self) -> Single:
        config.prepare_state(self._settings.state_dir)
        lock = take_lock(self._settings.state_dir)
        if lock is not None:
            return self._own(lock)
        from corral.client.http import unix_single

        return unix_single(self._effects, self._settings.state_dir, SOCKET)

    def _own(self, lock: int) -> Single:
        from corral import bootstrap
        from corral.client.owner import OwnerSingle

        try:
            self._owner = bootstrap.start_owner(self._settings, progress=self._progress)
        except BaseException:
            os.close(lock)
            raise
        self._owner.release.append(lambda: os.close(lock))
        return OwnerSingle(self._owner, self._effects)

    async def close(self) -> None:
        """Finish what must not be left half-done (at most some seconds), then let another process own the directory."""
        await self._effects.local(self._let_go)

    def _let_go(self) -> None:
        with self._guard:
            owner, self._owner, single, self._single, self._closed = self._owner, None, self._single, None, True
        if single is not None:
            single.close()
        if owner is not None and self._pid == os.getpid():
            owner.close()


# -- opening -------------------------------------------------------------------------------------------------------------------
def take_lock(state_dir: str) -> int | None:
    """The descriptor that holds STATE/owner.lock, or None when another process has it."""
    path = os.path.join(state_dir, "owner.lock")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        hint = "set CORRAL_STATE_DIR to a directory that you can write to"
        raise CorralError("infra_error", f"cannot open {path}: {error.strerror}", hint=hint, retryable=False) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise CorralError(
            "infra_error",
            f"cannot lock {path}: {error.strerror}",
            hint="the state directory must be on a local file system",
            retryable=False,
        ) from error
    return descriptor


class EmbeddedTransport(LineTransport):
    """Owner or client of one state directory, for a synchronous program. Safe to use from several threads."""

    def __init__(self, settings: config.Config, progress: Progress | None, patience_s: float = PATIENCE_S) -> None:
        effects = Blocking()
        self._state = StateDirectory(settings, effects, progress, patience_s)
        super().__init__(Line(self._state, effects))

    @property
    def is_owner(self) -> bool:
        """True while this process owns the state directory."""
        return self._state.owner is not None

    @property
    def owner(self) -> Owner | None:
        """The service in this process, while it owns the state directory."""
        return self._state.owner


def open_embedded(state_dir: str | None = None, progress: Progress | None = None) -> EmbeddedTransport:
    """A transport on `state_dir` (default: `config.default_state_dir`); elects at once, so that a bad directory shows here."""
    transport = EmbeddedTransport(config.load(state_dir), progress)
    drive(transport.line.endpoint.current())
    return transport
