"""The supervisor of an exec: a forked child of the guest that has main started, sees it end, and can end everything below it.

It is a child subreaper, or the init of a pid namespace of its own where subreapers do nothing, so whatever main leaves behind (double
forks, new sessions) stays below it; it lives until none of that is left. After an exec of which nothing is left it may serve another: then a child that will be the next main (`launch.await_plan`) waits
below it. It talks to the guest over one packet socket: packed news out (`started`, `failed`, `exited`, `killed`), short commands in, each with the
number of the exec that it is for (`K <turn> <grace ms>`, `S <turn> <signal>` to main, `T <turn> <signal>` to all).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself would import enum
import _socket
import os
import select
import time

from corral.guest import kernel, launch, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

KILL_PATIENCE_S = 5.0
"""How long rounds of KILL go on before the supervisor says that something survived."""

MAX_LOSSES = 5
"""How often in a row a child that waits may be ended from outside."""

_QUIET = tuple(number for number in range(1, 65) if number not in (4, 5, 6, 7, 8, 11, _signal.SIGCHLD, 32, 33))
"""Signals that a supervisor blocks: all but its own faults and the news of children."""


def run(
    plan: launch.Plan | None,
    guest: _socket.socket,
    plans: _socket.socket | None,
    standard: launch.Standard,
    dumpable: bool,
    namespace: bool,
) -> NoReturn:
    """In the forked child: serve `plan`, then what comes through `plans`. Never returns; status 0 when all was told."""
    status = 70
    try:
        below = processes.Namespace() if namespace else processes.Subtree()
        status = _Supervisor(guest, plans, standard, below).run(plan, dumpable)
    finally:
        os._exit(status)


class _Supervisor:
    def __init__(
        self,
        guest: _socket.socket,
        plans: _socket.socket | None,
        standard: launch.Standard,
        below: processes.Subtree | processes.Namespace,
    ) -> None:
        self.guest = guest
        self.plans = plans
        self.standard = standard
        self.below = below
        self.turn = 0
        self.waiting = 0
        self.report = -1
        self.said = -1
        self.losses = 0
        self.main = 0
        self.main_ended = False
        self.background_kill = False
        self.childless = False
        self.reusable = False
        self.commanded = False
        self.killed: set[tuple[int, int]] = set()
        self.poller = select.poll()

    def run(self, plan: launch.Plan | None, dumpable: bool) -> int:
        os.setsid()
        # A supervisor of the same uid as its exec can be signalled by it: only KILL and STOP may have an effect.
        _signal.pthread_sigmask(_signal.SIG_SETMASK, _QUIET)
        _signal.set_wakeup_fd(-1)
        keep = {0, 1, 2, self.guest.fileno()}
        if self.plans is not None:
            keep.add(self.plans.fileno())
        if plan is not None:
            keep.update((plan.stdin, plan.stdout, plan.stderr))
        _close_others(keep)
        if not dumpable:
            kernel.set_dumpable(False)
        if isinstance(self.below, processes.Namespace):
            processes.cover_self()
            # It was for making the namespace, and for that; no exec may ever have it.
            kernel.give_up(kernel.CAP_SYS_ADMIN)
        else:
            kernel.become_subreaper()
        wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.poller.register(self.guest.fileno(), select.POLLIN)
        self.poller.register(wake, select.POLLIN)
        if plan is None:
            self._rest()
        else:
            failure = self._start(plan)
            for fd in {plan.stdin, plan.stdout, plan.stderr}:
                os.close(fd)
            if failure is not None:
                self._tell(failure)
                return 0
            self._tell({"event": "started", "pid": self.main, "at": _now_ms()})
        self._reap()
        while self._goes_on():
            # One at a time: what is done about one may close, or open anew, what another was about.
            fd, _ = self.poller.poll()[0]
            if fd == wake:
                _drain(wake)
            elif fd == self.report:
                self._launched()
            elif not self._command():
                # The guest is gone, and with it the sandbox: nothing may live on without it.
                self.below.end(time.monotonic() + KILL_PATIENCE_S, self.killed, self._reap)
                return 0
            self._reap()
        return 0

    def _goes_on(self) -> bool:
        if self.main_ended and self.childless:
            if not self.reusable:
                return False
            self._rest()
        return self.main != 0 or self.waiting != 0

    # -- start -------------------------------------------------------------------------------------------------------------------
    def _start(self, plan: launch.Plan) -> dict[str, Any] | None:
        self.turn += 1
        self.background_kill = plan.background_kill
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            self.main = os.fork()
        except OSError as error:
            return launch.Step("platform", error, "the process cannot be made").event()
        if self.main == 0:
            launch.become_main(plan, write)
        os.close(write)
        answer = b""
        while True:
            part = os.read(read, 4096)
            if not part:
                break
            answer += part
        os.close(read)
        if not answer:
            return None
        os.waitpid(self.main, 0)
        failure: dict[str, Any] = launch.unpack(answer)
        return failure

    def _rest(self) -> None:
        """Nothing is left of the exec before: let the next main wait. Without one there is nothing to live for."""
        self.main = 0
        self.main_ended = self.reusable = self.commanded = False
        self.killed.clear()
        plans = self.plans
        if plans is None:
            return
        report, report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        said, said_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self.waiting = os.fork()
        except OSError as error:
            for fd in (report, report_write, said, said_write):
                os.close(fd)
            if self._plan_waits():
                # Nobody has read it, and nobody will.
                self.turn += 1
                self._tell(launch.Step("platform", error, "the process cannot be made").event())
            return
        if self.waiting == 0:
            self.guest.close()
            launch.await_plan(plans, said_write, report_write, self.standard)
        os.close(report_write)
        os.close(said_write)
        self.report, self.said = report, said
        self.poller.register(report, select.POLLIN)

    def _plan_waits(self) -> bool:
        if self.plans is None:
            return False
        try:
            return bool(self.plans.recv(1, _socket.MSG_PEEK | _socket.MSG_DONTWAIT))
        except OSError:
            return False

    def _launched(self, end: tuple[int, Any] | None = None) -> None:
        """The child that waited has turned into main, or is gone; `end` if it was reaped already."""
        pid, report, said = self.waiting, self.report, self.said
        failure, plan = _read(report), _read(said)
        self.poller.unregister(report)
        os.close(report)
        os.close(said)
        self.waiting, self.report, self.said = 0, -1, -1
        if plan and not failure and self._plan_waits():
            plan = b""
        if end is None and (failure or not plan):
            os.waitpid(pid, 0)
        if not plan:
            # It was ended from outside, before it took a plan: another one will. But not for ever, nor if it cannot be made ready.
            self.losses += 1
            if failure or self.losses > MAX_LOSSES:
                os._exit(70)
            self._rest()
            return
        self.turn += 1
        self.losses = 0
        self.background_kill = plan.endswith(b"k")
        if failure:
            self._tell({**launch.unpack(failure), "idle": True})
            self._rest()
        else:
            self.main = pid
            self._tell({"event": "started", "pid": pid, "at": _now_ms()})
            if end is not None:
                self._end_of_main(*end)

    # -- watch -------------------------------------------------------------------------------------------------------------------
    def _reap(self) -> None:
        end = turned = None
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.childless = True
                break
            self.childless = False
            if pid == 0:
                break
            self.below.reaped(pid, status)
            if pid == self.main and not self.main_ended:
                end = status, usage
            elif pid == self.waiting:
                turned = status, usage
        if end is not None:
            self._end_of_main(*end)
        elif turned is not None:
            self._launched(turned)

    def _end_of_main(self, status: int, usage: Any) -> None:
        self.main_ended = True
        ended = _now_ms()
        background = 0
        all_dead = True
        before = len(self.killed)
        if self.background_kill and not self.childless:
            all_dead = self.below.end(time.monotonic() + KILL_PATIENCE_S, self.killed, self._reap)
        if not self.childless:
            background = len(self.below.living())
        self.reusable = self.plans is not None and self.childless and not self.commanded
        self._tell(
            {
                "event": "exited",
                "status": status,
                "at": ended,
                "utime_ms": int(usage.ru_utime * 1000),
                "stime_ms": int(usage.ru_stime * 1000),
                "maxrss_kib": usage.ru_maxrss,
                "killed": len(self.killed) - before,
                "killed_all": all_dead,
                "background": background,
                "idle": self.reusable,
            }
        )

    # -- commands ----------------------------------------------------------------------------------------------------------------
    def _command(self) -> bool:
        try:
            message = self.guest.recv(256)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not message:
            return False
        kind, turn, number = _split(message)
        while turn == self.turn + 1 and self.waiting:
            # Its plan was sent before: a moment, and there is something to command.
            select.select([self.report], [], [])
            self._launched()
        if turn != self.turn or not self.main or self.reusable:
            return True  # that exec is over, and nothing of it is left
        if kind == b"K":
            self._kill(number / 1000)
        elif kind == b"S":
            if not self.main_ended:
                processes.send_child(self.main, number)
        else:
            self.below.signal(number)
        return True

    def _kill(self, grace: float) -> None:
        self.commanded = True
        before = len(self.killed)
        if grace > 0:
            for number in (processes.SIGTERM, processes.SIGCONT):
                self.below.signal(number)
            self._wait_for_none(time.monotonic() + grace)
        done = self.below.end(time.monotonic() + KILL_PATIENCE_S, self.killed, self._reap)
        self._reap()
        self._tell({"event": "killed", "killed": len(self.killed) - before, "killed_all": done})

    def _wait_for_none(self, until: float) -> None:
        pause = 0.002
        while time.monotonic() < until:
            self._reap()
            if self.childless or not (self.below.exact or self.below.living()):
                return
            # A second, shorter kill cuts the grace short.
            if select.select([self.guest], [], [], min(pause, max(0.0, until - time.monotonic())))[0]:
                try:
                    message = self.guest.recv(256)
                except OSError:
                    return
                if not message:
                    return
                kind, turn, number = _split(message)
                if kind == b"K" and turn == self.turn:
                    until = min(until, time.monotonic() + number / 1000)
            pause = min(pause * 2, 0.05)

    def _tell(self, event: dict[str, Any]) -> None:
        event["turn"] = self.turn
        try:
            self.guest.send(launch.pack(event))
        except OSError:
            pass


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except BlockingIOError:
        return b""


def _split(message: bytes) -> tuple[bytes, int, int]:
    turn, number = message[1:].split(b" ")
    return message[:1], int(turn), int(number)


def _close_others(keep: set[int]) -> None:
    last = 2
    for fd in sorted(keep):
        if fd > last + 1:
            os.closerange(last + 1, fd)
        last = max(last, fd)
    os.closerange(last + 1, 1 << 20)


def _drain(fd: int) -> None:
    try:
        while len(os.read(fd, 512)) == 512:
            pass
    except BlockingIOError:
        pass


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
