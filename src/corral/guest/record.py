"""One exec as the guest keeps it: its buffers, its state, and what is told of it."""

from __future__ import annotations

import os
import time

from corral.guest.posts import Post
from corral.guest.streams import Input, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Exec:
    """One exec. States: starting -> running -> (ending ->) ended | failed | lost; `failed` = main certainly never ran."""

    __slots__ = (
        "background",
        "born",
        "deadline",
        "end_state",
        "ended_by",
        "ended_ms",
        "exec_id",
        "exit_code",
        "failure",
        "fence",
        "force_at",
        "grace",
        "input",
        "input_client",
        "kill_answer",
        "kill_waiters",
        "killed",
        "killed_all",
        "main",
        "maxrss_kib",
        "post",
        "pty_master",
        "pty_quiet",
        "pty_until",
        "signal",
        "sinks",
        "start_waiters",
        "started",
        "started_ms",
        "state",
        "stime_ms",
        "streams",
        "utime_ms",
        "watcher",
    )

    def __init__(self, exec_id: str, fence: tuple[int, int]) -> None:
        self.exec_id = exec_id
        self.fence = fence
        self.state = "starting"
        self.started: bool | None = None
        self.main = 0
        self.post: Post | None = None
        self.streams: dict[str, Stream] = {}
        self.input: Input | None = None
        self.pty_master = -1
        self.pty_until = 0.0
        self.pty_quiet = 0.0
        self.sinks: dict[int, float] = {}
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.failure: dict[str, str] | None = None
        self.born = time.monotonic()
        self.started_ms: int | None = None
        self.ended_ms: int | None = None
        self.utime_ms: int | None = None
        self.stime_ms: int | None = None
        self.maxrss_kib: int | None = None
        self.ended_by: str | None = None
        self.killed = 0
        self.killed_all = True
        self.kill_answer = 0
        self.background = 0
        self.deadline: float | None = None
        self.grace = 2.0
        self.force_at: float | None = None
        self.start_waiters: list[Callable[[], None]] = []
        self.kill_waiters: list[Callable[[bool, int], None]] = []
        self.watcher: Any = None
        self.input_client: Any = None
        self.end_state = "ended"

    @property
    def finished(self) -> bool:
        return self.state in ("ended", "failed", "lost")

    @property
    def alive(self) -> bool:
        """Something of it may still run."""
        return self.post is not None

    def facts(self) -> dict[str, Any]:
        return {
            "exec_id": self.exec_id,
            "state": "running" if self.state == "ending" else self.state,
            "started": self.started,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "failure": self.failure,
            "started_ms": self.started_ms,
            "ended_ms": self.ended_ms,
            "utime_ms": self.utime_ms,
            "stime_ms": self.stime_ms,
            "maxrss_kib": self.maxrss_kib,
            "ended_by": self.ended_by,
            "killed": self.killed,
            "killed_all": self.killed_all,
            "background": self.background,
            "offsets": {name: stream.end for name, stream in self.streams.items()},
            "stdin": self.input.facts() if self.input is not None else None,
            "already": False,
        }

    def take_status(self, status: int) -> None:
        """Set exit code or signal from a wait status."""
        if os.WIFSIGNALED(status):
            self.signal = os.WTERMSIG(status)
        else:
            self.exit_code = os.WEXITSTATUS(status)
