"""`corral serve --replicas N`: the parent of one node process and N API processes, which share its listening sockets.

It does no work itself. It holds the state directory's lock and the sockets, so that no connection is refused while a child is restarted;
a child that dies is started again after a pause that grows with its failures. SIGHUP replaces the replicas one at a time: the new one
is ready before the old one drains. SIGTERM drains all of them, then the node lets go; sandboxes live on. When this process dies, the
kernel kills its children: the next one starts from the same state.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from corral.cli.child import Child, log
from corral.errors import CorralError

PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Before a child that died is started again: longer each time, from the start once it has stood for `STOOD_S`."""
STOOD_S = 30.0
ATTEMPTS = 5
"""How often a child may die before the server has begun to listen."""
READY_S = 60.0
"""How long a new replica may take before a restart of all is given up and the old ones stay."""
STOP_S = 45.0
"""Longer than a drain with all that follows it; then a child is killed."""
NODE_STOP_S = 30.0
SECRETS = ("CORRAL_ADMIN_KEY", "CORRAL_KEY")
DATABASE = ("CORRAL_DATABASE_URL", "CORRAL_REDIS_URL")
Kind = Literal["node", "replica"]


@dataclass
class Running:
    """A child process. `state`: starting, waiting, ready, refused or leaving."""

    kind: Kind
    name: str
    process: subprocess.Popen[bytes]
    status: int
    watch: int
    """A descriptor that is readable once the process has ended."""
    began: float
    state: str = "starting"
    why: str = ""
    problem: dict[str, Any] | None = None
    rest: bytes = b""
    kill_at: float | None = None


@dataclass
class Slot:
    """A place for one child: who is there, who comes, and when the next one is started."""

    kind: Kind
    name: str
    current: Running | None = None
    next: Running | None = None
    failures: int = 0
    start_at: float | None = 0.0
    waiting: list[Running] = field(default_factory=list)
    """Old ones that drain."""

    def all(self) -> list[Running]:
        return [one for one in (self.current, self.next, *self.waiting) if one is not None]


class Replicas:
    """See the module docstring. `sockets`: `tcp` and `api`, listening; `lock` is held by every child too."""

    def __init__(
        self,
        count: int,
        sockets: Mapping[str, socket.socket],
        lock: int,
        tls: tuple[str, str] | None,
        environ: Mapping[str, str],
        up: Callable[[], None],
    ) -> None:
        self._sockets = sockets
        self._lock = lock
        self._tls = tls
        self._environ = {name: value for name, value in environ.items() if name not in SECRETS}
        self._up = up
        self._node = Slot("node", "node")
        self._slots = [Slot("replica", f"replica {number + 1}") for number in range(count)]
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._told_up = False
        self._stopping = False
        self._rolling: list[Slot] = []
        """Slots whose replica is still to be replaced, in turn."""
        self._roll_began = 0.0
        self._roll_until = 0.0
        self._roll_again = False

    # -- life --------------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Until a signal has stopped it. Raises the refusal of a child that cannot start at the first attempt."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        self._selector.register(reader, selectors.EVENT_READ, None)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        old = {number: signal.signal(number, self._arrived) for number in numbers}
        old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            while not (self._stopping and not self._children()):
                self._step(reader)
        except BaseException:
            self._kill_all()
            raise
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            reader.close()
            writer.close()

    def _arrived(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _step(self, reader: socket.socket) -> None:
        self._act()
        for key, _ in self._selector.select(self._until_next()):
            if key.data is None:
                try:
                    reader.recv(4096)
                except BlockingIOError:
                    pass
            elif key.data[1] == "status":
                self._read(key.data[0])
            else:
                self._ended(key.data[0])
        while self._signals:
            self._signal(self._signals.pop(0))

    def _until_next(self) -> float:
        now = time.monotonic()
        times = [slot.start_at for slot in self._all_slots() if slot.start_at is not None]
        times += [one.kill_at for one in self._children() if one.kill_at is not None]
        if self._rolling and self._rolling[0].next is not None:
            times.append(self._roll_until)
        return max(0.0, min([now + 5.0, *times]) - now)

    def _all_slots(self) -> list[Slot]:
        return [self._node, *self._slots]

    def _children(self) -> list[Running]:
        return [one for slot in self._all_slots() for one in slot.all()]

    # -- what is due -------------------------------------------------------------------------------------------------------
    def _act(self) -> None:
        now = time.monotonic()
        for slot in self._all_slots():
            if slot.current is None and slot.start_at is not None and now >= slot.start_at and not self._stopping:
                slot.start_at = None
                slot.current = self._try(slot)
                if slot.current is None:
                    slot.failures += 1
                    slot.start_at = now + PAUSES_S[min(slot.failures, len(PAUSES_S) - 1)]
        for one in self._children():
            if one.kill_at is not None and now >= one.kill_at:
                log(f"{one.name} did not end in time and is killed")
                one.process.kill()
                one.kill_at = None
        if self._stopping:
            self._stop_node()
        elif self._rolling:
            self._roll(now)

    def _try(self, slot: Slot) -> Running | None:
        """A host that has no process, memory or descriptor to spare just now ends nobody who is there already."""
        try:
            return self._start(slot)
        except OSError as error:
            if not self._told_up:
                raise
            log(f"{slot.name} cannot be started: {error.strerror}")
            return None

    def _start(self, slot: Slot) -> Running:
        reader, writer = os.pipe()
        descriptors = {"lock": self._lock}
        environ = dict(self._environ)
        if slot.kind == "replica":
            descriptors |= {name: listener.fileno() for name, listener in self._sockets.items()}
            words = ["replica"]
        else:
            words = ["node", "serve"]
            environ = {name: value for name, value in environ.items() if name not in DATABASE}
        tls = self._tls if slot.kind == "replica" else None
        given = Child(os.getpid(), writer, slot.name, descriptors, tls, first=not self._told_up)
        try:
            process = subprocess.Popen(
                [*_ourselves(), *words, "--as-child", given.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environ,
                pass_fds=(writer, *descriptors.values()),
                start_new_session=True,
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        try:
            watch = os.pidfd_open(process.pid)
        except OSError:
            os.close(reader)
            process.kill()
            process.wait()
            raise
        made = Running(slot.kind, slot.name, process, reader, watch, time.monotonic())
        self._selector.register(made.status, selectors.EVENT_READ, (made, "status"))
        self._selector.register(made.watch, selectors.EVENT_READ, (made, "end"))
        return made

    # -- what children say -------------------------------------------------------------------------------------------------
    def _read(self, one: Running) -> None:
        if one.status < 0:  # it has ended, which was told together with its last word
            return
        try:
            data = os.read(one.status, 65536)
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(one.status)
            os.close(one.status)
            one.status = -1
            return
        *lines, one.rest = (one.rest + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if one.state != "leaving":
                one.state = told["state"]
            one.why = told.get("why", "")
            one.problem = told.get("problem")
            self._news(one)

    def _news(self, one: Running) -> None:
        if one.state == "refused" and not self._told_up:
            raise CorralError.from_problem(one.problem or {})
        replicas = [slot.current for slot in self._slots]
        answering = all(each is not None and each.state in ("ready", "waiting") for each in replicas)
        if answering and not self._told_up and not self._stopping:
            self._told_up = True
            self._up()

    def _ended(self, one: Running) -> None:
        if one.status >= 0:
            self._read(one)
        self._selector.unregister(one.watch)
        os.close(one.watch)
        status = one.process.wait()
        if one.status >= 0:
            self._selector.unregister(one.status)
            os.close(one.status)
            one.status = -1
        slot = next(each for each in self._all_slots() if one in each.all())
        if one in slot.waiting:
            slot.waiting.remove(one)
            return
        if one is slot.next:
            slot.next = None
            log(f"the new {one.name} is not ready ({one.why or _ending(status)}); the old ones stay")
            self._rolling.clear()
            self._roll_again = False
            return
        slot.current = None
        if self._stopping:
            return
        stood = time.monotonic() - one.began >= STOOD_S
        slot.failures = 0 if stood else slot.failures + 1
        if not self._told_up and slot.failures >= ATTEMPTS:
            raise CorralError(
                "infra_error",
                f"{one.name} ended {slot.failures} times before it answered, at last with {_ending(status)}",
                hint="what it wrote before says why; CORRAL_DEBUG=1 shows more",
                retryable=False,
            )
        pause = PAUSES_S[min(slot.failures, len(PAUSES_S) - 1)]
        slot.start_at = time.monotonic() + pause
        log(f"{one.name} ended ({_ending(status)}); started again in {pause:g} s")

    # -- signals -----------------------------------------------------------------------------------------------------------
    def _signal(self, number: int) -> None:
        if number == signal.SIGHUP and not self._stopping:
            if self._rolling:
                self._roll_again = True
                return
            log("restarting the replicas, one at a time")
            self._begin_roll()
            return
        if number == signal.SIGHUP:
            return
        if self._stopping:
            self._kill_all()
            os._exit(128 + number)
        log("stopping: new work is refused, what runs lives on")
        self._stopping = True
        self._rolling.clear()
        for slot in self._all_slots():
            slot.start_at = None
        for slot in self._slots:
            for one in slot.all():
                self._let_go(one, STOP_S)

    def _let_go(self, one: Running, seconds: float) -> None:
        if one.state != "leaving":
            one.state = "leaving"
            one.process.terminate()
            one.kill_at = time.monotonic() + seconds

    def _stop_node(self) -> None:
        """The node is the last to go: replicas need it to hand on what they have."""
        if self._node.current is not None and not any(slot.all() for slot in self._slots):
            self._let_go(self._node.current, NODE_STOP_S)

    # -- one at a time -----------------------------------------------------------------------------------------------------
    def _begin_roll(self) -> None:
        self._rolling = list(self._slots)
        self._roll_began = time.monotonic()

    def _roll(self, now: float) -> None:
        """One step: start the next, or let the old one go once the new one is ready, or give up."""
        slot = self._rolling[0]
        if slot.waiting:
            return
        if slot.next is None:
            if slot.current is None or slot.current.began >= self._roll_began:
                self._next_roll()
                return
            slot.next = self._try(slot)
            self._roll_until = now + READY_S
            if slot.next is None:
                log("the old ones stay")
                self._rolling.clear()
                self._roll_again = False
        elif slot.next.state == "ready":
            if slot.current is not None:
                self._let_go(slot.current, STOP_S)
                slot.waiting.append(slot.current)
            slot.current, slot.next, slot.start_at, slot.failures = slot.next, None, None, 0
        elif now >= self._roll_until or slot.next.state == "refused":
            log(f"the new {slot.name} is not ready ({slot.next.why or slot.next.state}); the old ones stay")
            self._let_go(slot.next, STOP_S)
            slot.waiting.append(slot.next)
            slot.next = None
            self._rolling.clear()
            self._roll_again = False

    def _next_roll(self) -> None:
        self._rolling.pop(0)
        if not self._rolling:
            log("the replicas are restarted")
            if self._roll_again:
                self._roll_again = False
                self._begin_roll()

    def _kill_all(self) -> None:
        for one in self._children():
            one.process.kill()
        for one in self._children():
            one.process.wait()


def _ourselves() -> list[str]:
    """The words that started this process, up to those of the command line."""
    return [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]


def _ending(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
