"""A single-threaded `poll` loop. Not epoll: its registrations do not survive a memory snapshot of gVisor."""

from __future__ import annotations

import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = select.POLLIN
WRITE = select.POLLOUT


class Loop:
    """Descriptors with one handler each. A paused descriptor is not watched at all: else a hang-up would spin."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._masks: dict[int, int] = {}

    def watch(self, fd: int, mask: int, handler: Callable[[int], None]) -> None:
        """Set what is awaited; a mask of 0 pauses."""
        if mask == 0:
            self.forget(fd)
            return
        if self._masks.get(fd) != mask:
            self._poll.register(fd, mask)
            self._masks[fd] = mask
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        if self._masks.pop(fd, None) is not None:
            self._poll.unregister(fd)
            del self._handlers[fd]

    def turn(self, timeout_ms: int | None) -> int:
        """Wait, serve what is ready; how many that were."""
        ready = self._poll.poll(timeout_ms)
        for fd, events in ready:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler(events)
        return len(ready)


class Deadline:
    """The dead man's switch, by the monotonic clock; while `quiet` by the time in which this process runs.

    That clock goes on while the process is only a file, a snapshot that nobody has restored.
    """

    TURN_S = 0.5
    """The longest that a turn of the loop may take while quiet; what takes longer was no time of ours."""

    def __init__(self, at: float | None) -> None:
        self.at = at
        self.quiet = False
        self._left = 0.0

    def begin_quiet(self, now: float) -> None:
        self.quiet = True
        self._left = 0.0 if self.at is None else self.at - now

    def end_quiet(self, now: float) -> None:
        self.quiet = False
        if self.at is not None:
            self.at = now + self._left

    def turned(self, seconds: float) -> None:
        self._left -= min(seconds, self.TURN_S)

    def is_over(self, now: float) -> bool:
        return self.at is not None and (self._left <= 0 if self.quiet else now >= self.at)
