"""The guest's part of a pause: clocks that stand still and, where no host freezes it, a tree that is stopped.

While paused no exec's own clock counts. Frozen by the host the guest has no clock either, so its dead man's switch counts the time in
which it runs. Where it stops the tree itself, it runs on, and so does that switch.
"""

from __future__ import annotations

import os
import time

from corral.guest import processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from corral.guest.execs import Runner
    from corral.guest.loop import Deadline

STOP_PATIENCE_S = 5.0
"""How long rounds of STOP go on before the guest says that something does not stop."""
_STOPPED = (b"T", b"t")
_AS_GOOD = (*_STOPPED, b"D", b"Z", b"X")
"""With a STOP on its way: what sleeps in the kernel stops before it does anything of its own."""


class Pause:
    """Nothing, or since when; idempotent both ways."""

    def __init__(self, deadline: Deadline, runner: Runner) -> None:
        self._deadline = deadline
        self._runner = runner
        self.since: float | None = None
        self.stopped: list[processes.Process] = []

    def begin(self, now: float, *, stop: bool) -> tuple[bool, int]:
        """-> (whether nothing moves any more, how many were stopped). Without `stop` the host does that, from outside."""
        if self.since is None:
            self.since = now
            self._runner.held = True
            if not stop:
                self._deadline.begin_quiet(now)
        if not stop:
            return True, 0
        until = now + STOP_PATIENCE_S
        # A program whose supervisor has yet to fork is in no table: nobody would stop it.
        whole = wait_for(self._runner.none_starts, until) and stop_all(self._below, self.stopped, until)
        return whole, len(self.stopped)

    def end(self, now: float) -> int:
        """Let what was stopped go on, the last one first: a parent that is told of a stop finds its child running. -> how many."""
        if self.since is None:
            return 0
        count = len(self.stopped)
        while self.stopped:
            processes.send(self.stopped.pop(), processes.SIGCONT)
        if self._deadline.quiet:
            self._deadline.end_quiet(now)
        self._runner.held = False
        self._runner.postpone(now - self.since)
        self.since = None
        return count

    def _below(self) -> list[processes.Process]:
        """All but the guest, its supervisors, and those that stand by."""
        ours = self._runner.by_supervisor
        found = processes.descendants(os.getpid(), set(self._runner.idle))
        return [process for process in found if process.pid not in ours]


def wait_for(seen: Callable[[], bool], until: float) -> bool:
    """False if it has not come to that at `until` (monotonic)."""
    while not seen():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def stop_all(look: Callable[[], list[processes.Process]], stopped: list[processes.Process], until: float) -> bool:
    """STOP to all that `look` finds until a round finds nothing new and nothing that moves; False at `until` (monotonic).

    Added to `stopped`, parents first: what was stopped by itself before (a job of a shell) is not among them, and stays as it is.
    """
    known = {(process.pid, process.start) for process in stopped}
    pause = 0.0005
    while True:
        moves = False
        for process in look():
            if (process.pid, process.start) in known:
                if process.state in _AS_GOOD:
                    continue
            elif process.state == b"T":
                continue
            else:
                known.add((process.pid, process.start))
                stopped.append(process)
            moves = True
            processes.send(process, processes.SIGSTOP)
        if not moves:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
