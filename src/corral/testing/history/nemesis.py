"""What breaks things, by the plan. Each fault is noted when it begins; what was stopped goes on when it ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from corral.errors import CorralError
from corral.linux import process
from corral.testing.history.events import Recorder
from corral.testing.history.installation import COPY, Installation, wait_until
from corral.testing.history.plan import Fault
from corral.testing.history.proxy import Proxy

DATABASE = "corral"


class Crowd(Protocol):
    """The clients, as far as somebody harms them."""

    def kill(self, dice: float) -> str:
        """One of them; -> its name."""
        ...

    def jump(self, dice: float) -> str | None:
        """Its clock; None where clocks cannot be moved."""
        ...


class Nemesis:
    """Runs in a thread of its own."""

    def __init__(
        self,
        installation: Installation,
        proxies: list[Proxy],
        crowd: Crowd,
        notes: Recorder,
        progress: Callable[[str], None],
    ) -> None:
        self._it = installation
        self._proxies = proxies
        self._crowd = crowd
        self._notes = notes
        self._progress = progress
        self._copied_at = 0
        self.done: dict[str, int] = {}
        """How often each fault was done."""
        self.failed: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, faults: list[Fault], beginning: float) -> None:
        self._thread = threading.Thread(target=self._live, args=(faults, beginning), name="nemesis")
        self._thread.start()

    def finish(self) -> None:
        """What it did last is over; nothing is broken any more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for proxy in self._proxies:
            proxy.mode = "calm"

    def _live(self, faults: list[Fault], beginning: float) -> None:
        try:
            if any(fault.what == "restore_postgres" for fault in faults):
                self._copy()
            for fault in faults:
                if wait_until(beginning + fault.at_s, self._stop):
                    return
                if self._do(fault):
                    self.done[fault.what] = self.done.get(fault.what, 0) + 1
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _copy(self) -> None:
        assert self._it.postgres is not None
        self._copied_at = time.monotonic_ns()
        self._it.postgres.copy(DATABASE, COPY)

    def _note(self, fault: Fault, victim: str = "", **facts: object) -> None:
        self._progress(f"{fault.what} {victim}".strip())
        self._notes.note("fault", what=fault.what, victim=victim or None, **facts)

    def _pause(self, fault: Fault) -> None:
        self._stop.wait(fault.for_s)

    def _do(self, fault: Fault) -> bool:
        """False when there was nobody to do it to."""
        what = fault.what
        match what:
            case "cut" | "slow" | "swallow":
                return self._line(fault)
            case "kill_client":
                self._note(fault, self._crowd.kill(fault.dice))
                return True
            case "jump_clock":
                victim = self._crowd.jump(fault.dice)
                if victim is not None:
                    self._note(fault, victim)
                return victim is not None
            case "kill_server" | "stop_server":
                return self._server(fault)
            case "kill_replica" | "stop_replica" | "restart_replicas" | "kill_node":
                return self._part(fault)
            case "flush_redis" | "restart_redis" | "hang_redis":
                return self._redis(fault)
            case _:
                return self._postgres(fault)

    def _line(self, fault: Fault) -> bool:
        if not self._proxies:
            return False
        proxy = self._proxies[int(fault.dice * len(self._proxies))]
        self._note(fault)
        proxy.mode = fault.what
        self._pause(fault)
        proxy.mode = "calm"
        if fault.what == "swallow":
            proxy.cut_all()
        return True

    def _server(self, fault: Fault) -> bool:
        server = self._it.server
        assert server is not None
        self._note(fault)
        if fault.what == "stop_server":
            server.send_signal(signal.SIGSTOP)
            try:
                self._pause(fault)
            finally:
                server.send_signal(signal.SIGCONT)
            return True
        server.kill()
        server.wait()
        self._pause(fault)
        self._it.start_server()
        return True

    def _part(self, fault: Fault) -> bool:
        assert self._it.server is not None
        if fault.what == "restart_replicas":
            self._note(fault)
            self._it.server.send_signal(signal.SIGHUP)
            return True
        found = self._it.children("node" if fault.what == "kill_node" else "replica")
        if not found:
            return False
        victim = found[int(fault.dice * len(found))]
        self._note(fault, f"{victim.pid}")
        if fault.what != "stop_replica":
            return process.kill(victim)
        if not process.kill(victim, signal.SIGSTOP):
            return False
        try:
            self._pause(fault)
        finally:
            process.kill(victim, signal.SIGCONT)
        return True

    def _redis(self, fault: Fault) -> bool:
        redis = self._it.redis
        assert redis is not None
        self._note(fault)
        match fault.what:
            case "flush_redis":
                redis.command("FLUSHALL")
            case "hang_redis":
                redis.signal(signal.SIGSTOP)
                try:
                    self._pause(fault)
                finally:
                    redis.signal(signal.SIGCONT)
            case _:
                redis.kill()
                self._pause(fault)
                redis.start()
        return True

    def _postgres(self, fault: Fault) -> bool:
        postgres = self._it.postgres
        assert postgres is not None
        if fault.what == "restore_postgres":
            began = time.monotonic_ns()
            postgres.restore(DATABASE, COPY)
            # Noted when it is over, with when it began: who was told something meanwhile was told it by the old database.
            now = time.monotonic_ns()
            self._progress(f"{fault.what}, as of {(now - self._copied_at) / 1e9:.1f} s ago")
            self._notes.note("fault", what="restore", copied_at=self._copied_at, began=began, until=now)
            self._pause(fault)
            self._copy()
            return True
        self._note(fault)
        postgres.stop(signal.SIGQUIT if fault.what == "crash_postgres" else signal.SIGINT)
        self._pause(fault)
        with contextlib.suppress(CorralError):
            postgres.start()
            return True
        postgres.stop(signal.SIGQUIT)
        postgres.start()
        return True


def jump_of(dice: float) -> str:
    """How far a clock goes: hours or days, either way."""
    hours = [-48, -1, 1, 24 * 40][int(dice * 4)]
    return f"{hours * 3600:+d}"


def write_clock(path: Path, text: str) -> None:
    """For libfaketime, whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(text + "\n")
    new.replace(path)
