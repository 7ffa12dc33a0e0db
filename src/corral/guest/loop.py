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
