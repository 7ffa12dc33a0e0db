"""PID 1 of a sandbox: serves the control socket, reaps, and ends everything at its deadline.

Nothing that it says is trusted outside. Inside it holds these lines: what is not fenced by the current owner is refused, code starts
at most once per exec id, and no process outlives its exec's kill, its supervisor or the deadline.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself would import enum
import _socket
import gc
import os
import time

from corral.guest import begin, loop, processes, protocol
from corral.guest.connections import MAX_QUEUED, Connection
from corral.guest.execs import Runner
from corral.guest.record import Exec
from corral.guest.requests import Defaults, Refusal, fence_of, integer_of, seconds_of, window_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from corral.guest.pausing import Pause

FIRST_CONNECTION_S = 15.0
END_PATIENCE_S = 5.0


class Guest:
    """The state of PID 1."""

    def __init__(self, options: begin.Options) -> None:
        self.options = options
        self.loop = loop.Loop()
        self.begun = time.monotonic()
        self.deadline = loop.Deadline(None if options.deadline is None else self.begun + options.deadline)
        self.seen_client = False
        self.connections: list[Connection] = []
        self.incarnation = 0
        self.floor = (0, 0)
        self.sandbox = ""
        self.quiet = False
        """Made ready for a snapshot of its memory; which copy of it this is, the next `identify` tells."""
        self.quiet_since = 0.0
        self.exited: dict[int, int] = {}
        self.orphans: dict[int, int] = {}
        self.stop = False
        self.wants_standby = False
        self.operations: dict[str, tuple[Callable[[Connection, int, dict[str, Any]], Any], str]] = {
            # name -> (method, who may: "any" before identify, "read" without a fence, "fenced")
            "ping": (self._ping, "any"),
            "identify": (self._identify, "any"),
            "usage": (self._usage, "read"),
            "exec.status": (self._status, "read"),
            "exec.attach": (self._attach, "read"),
            "exec.detach": (self._detach, "read"),
            "fence": (self._fence, "fenced"),
            "exec.start": (self._start, "fenced"),
            "exec.signal": (self._signal, "fenced"),
            "exec.resize": (self._resize, "fenced"),
            "exec.kill": (self._kill, "fenced"),
            "exec.forget": (self._forget, "fenced"),
            "kill_all": (self._kill_all, "fenced"),
            "quiesce": (self._quiesce, "fenced"),
            "pause": (self._pause, "fenced"),
            "resume": (self._resume, "fenced"),
            "deadline": (self._deadline, "fenced"),
            "shutdown": (self._shutdown, "fenced"),
        }
        self.capabilities = begin.harden(options)
        filter_ = begin.load_filter(options.seccomp)
        confine = options.same_uid and self.capabilities["landlock"] >= 6 and not options.unsafe_no_landlock
        standing = (
            bool(
                self.capabilities["change_uid"]
                and (self.capabilities["subreaper"] or self.capabilities["exec_pid_namespaces"])
            )
            and not (options.same_uid or options.unsafe_dumpable)
            and options.exec_uid != os.getuid()
        )
        namespaces = bool(self.capabilities["exec_pid_namespaces"])
        defaults = Defaults(
            options.exec_uid, options.exec_gid, filter_, confine, options.unsafe_dumpable, standing, namespaces
        )
        self.runner = Runner(self.loop, defaults, self._changed, self._input_moved)
        self.pause: Pause | None = None

    # -- loop --------------------------------------------------------------------------------------------------------------------
    def run(self) -> None:
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.loop.watch(wake_read, loop.READ, lambda _: self._children_moved(wake_read))
        if self.options.fifo:
            for fd in (0, 1):
                os.set_blocking(fd, False)
            self.connections.append(Connection(self, 0, 1, lambda: None, resync=True))
        else:
            listener = _socket.socket(fileno=self.options.control_fd)
            listener.setblocking(False)
            self.loop.watch(listener.fileno(), loop.READ, lambda _: self._accept(listener))
        gc.freeze()
        while not self.stop:
            begun = time.monotonic()
            moved = self.loop.turn(0 if self.wants_standby else self._timeout())
            self.deadline.turned(time.monotonic() - begun)
            self._tick()
            if self.wants_standby and not moved:
                # Nobody waits for us: the time to prepare for the next exec.
                self.wants_standby = False
                self.runner.stand_by()
        for connection in self.connections:
            connection.flush()
        self._die()

    def _timeout(self) -> int | None:
        if self.deadline.quiet:
            return int(loop.Deadline.TURN_S * 1000)
        times = []
        if self.deadline.at is not None:
            times.append(self.deadline.at)
        if not self.seen_client:
            times.append(self.begun + FIRST_CONNECTION_S)
        soon = self.runner.next_time()
        if soon is not None:
            times.append(soon)
        if not times:
            return None
        return max(0, min(int((min(times) - time.monotonic()) * 1000) + 1, 3_600_000))

    def _tick(self) -> None:
        now = time.monotonic()
        if self.deadline.is_over(now) or (not self.seen_client and now >= self.begun + FIRST_CONNECTION_S):
            self.stop = True
            return
        self.runner.tick(now)
        if self.exited:
            self._settle()

    def _die(self) -> NoReturn:
        """The kernel removes what is left of the namespace when PID 1 is gone."""
        try:
            self._end_all()
        finally:
            os._exit(0)

    def _accept(self, listener: Any) -> None:
        try:
            fd, _ = listener._accept()
        except OSError:
            return
        os.set_blocking(fd, False)
        self.seen_client = True
        self.connections.append(Connection(self, fd, fd, lambda: os.close(fd), resync=False))

    def cut_off(self) -> None:
        """The pipes to the host are at an end: nobody can ever call again."""
        self.stop = True

    def gone(self, connection: Connection) -> None:
        if connection in self.connections:
            self.connections.remove(connection)
        for number in list(connection.attached):
            connection.detach(number)

    # -- children ----------------------------------------------------------------------------------------------------------------
    def _children_moved(self, wake: int) -> None:
        try:
            while len(os.read(wake, 512)) == 512:
                pass
        except BlockingIOError:
            pass
        self._reap()
        self._settle()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = processes.reap()
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.runner.by_supervisor:
                self.exited[pid] = status
            elif pid in self.runner.idle:
                self.runner.idle_ended(pid)
            else:
                self.orphans[pid] = status

    def _spare(self) -> set[int]:
        return set(self.runner.by_supervisor) - set(self.exited) | set(self.runner.idle)

    def _settle(self) -> None:
        """Judge the supervisors that ended. One that ended before its exec did was killed: what it kept below it is now ours, and ends."""
        while self.exited:
            gone = [(self.runner.by_supervisor[pid], status) for pid, status in self.exited.items()]
            self.exited.clear()
            lost = []
            for job, status in gone:
                told = self.runner.supervisor_ended(job)
                if told and status == 0:
                    self.runner.settle(job, done=True, count=0, lost=False, status=None)
                else:
                    lost.append(job)
            if lost:
                killed: set[tuple[int, int]] = set()
                until = time.monotonic() + END_PATIENCE_S
                done = processes.end_tree(os.getpid(), until, killed, self._reap, self._spare)
                self._reap()
                for job in lost:
                    self.runner.settle(job, done=done, count=len(killed), lost=True, status=self.orphans.get(job.main))
        self.orphans.clear()

    def _end_all(self) -> tuple[bool, int]:
        """End every process inside but this one."""
        until = time.monotonic() + END_PATIENCE_S
        killed: set[tuple[int, int]] = set()
        if os.getpid() == 1:
            count = self.runner.end_all(time.monotonic() + END_PATIENCE_S / 2)
            self._reap()
            count += len(processes.descendants(1, set(self.runner.idle)))
            done = processes.end_everything(until, self._reap)
            self.wants_standby = True
        else:
            self.runner.end_all(time.monotonic() + END_PATIENCE_S / 2)
            done = processes.end_tree(os.getpid(), until, killed, self._reap, lambda: set(self.runner.idle))
            count = len(killed)
        self._reap()
        self._settle()
        return done, count

    # -- frames ------------------------------------------------------------------------------------------------------------------
    def received(self, connection: Connection, kind: int, payload: bytes) -> None:
        if kind == protocol.SYNC:
            self.seen_client = True
            connection.restart(payload)
        elif kind == protocol.HELLO:
            self._hello(connection, protocol.loads(payload))
        elif not connection.greeted:
            raise protocol.ProtocolError("no hello")
        elif kind == protocol.ACK:
            stream, offset = protocol.split_ack(payload)
            self._acknowledge(connection, stream, offset)
        elif kind == protocol.REQUEST:
            self._request(connection, protocol.loads(payload), None)
        else:
            request, data = protocol.split_input(payload)
            self._request(connection, request, data)

    def _hello(self, connection: Connection, hello: dict[str, Any]) -> None:
        versions = hello.get("versions")
        if type(versions) is not list or len(versions) != 2 or not all(type(n) is int for n in versions):
            raise protocol.ProtocolError("hello without versions")
        version = min(versions[1], protocol.VERSION)
        if version < max(versions[0], protocol.OLDEST):
            connection.send(protocol.control(protocol.HELLO, {"versions": [protocol.OLDEST, protocol.VERSION]}))
            raise protocol.ProtocolError("no common version")
        connection.greeted = True
        # The newest client wins: an older one may be a worker that is dead or has lost its lease.
        for other in list(self.connections):
            if other is not connection:
                other.close()
        connection.send(
            protocol.control(
                protocol.HELLO,
                {
                    "versions": [protocol.OLDEST, protocol.VERSION],
                    "version": version,
                    "guest": protocol.GUEST_VERSION,
                    "instance": self.options.instance,
                    "installation": self.options.installation,
                    "capabilities": self.capabilities,
                    "identified": bool(self.sandbox),
                    "quiet": self.quiet,
                    "sandbox": self.sandbox,
                    "floor": list(self.floor),
                },
            )
        )

    def _acknowledge(self, connection: Connection, stream: int, offset: int) -> None:
        known = connection.streams.get(stream)
        if known is None:
            return
        attachment, name = known
        try:
            self.runner.acknowledge(attachment.job, name, offset)
        except Refusal:
            raise protocol.ProtocolError("an ack beyond the end") from None

    def _request(self, connection: Connection, request: dict[str, Any], data: bytes | None) -> None:
        number = request.get("id")
        if type(number) is not int:
            raise protocol.ProtocolError("a request without id")
        try:
            answer = self._serve(connection, number, request, data)
        except Refusal as refusal:
            self._refuse(connection, number, refusal)
            return
        if answer is not None:
            self._answer(connection, number, answer)

    def _serve(self, connection: Connection, number: int, request: dict[str, Any], data: bytes | None) -> Any:
        operation = request.get("op")
        if self.quiet and operation != "identify":
            raise Refusal("illegal_transition", "the guest is quiet until it is identified anew")
        if data is not None:
            if operation != "exec.stdin":
                raise Refusal("bad_request", "only exec.stdin carries bytes")
            self._check_fence(request, required=True)
            return self._stdin(connection, request, data)
        method, who = self.operations.get(operation if type(operation) is str else "", (None, ""))
        if method is None:
            raise Refusal("bad_request", f"unknown operation {operation!r:.80}", "op")
        if who != "any":
            self._check_fence(request, required=who == "fenced")
        return method(connection, number, request)

    def _check_fence(self, request: dict[str, Any], *, required: bool) -> None:
        if not self.sandbox:
            raise Refusal("illegal_transition", "the guest was not identified yet")
        if request.get("fence") is None and not required:
            return
        fence = fence_of(request)
        if fence < self.floor or fence[0] != self.incarnation:
            raise Refusal("lease_lost", f"the floor is {self.floor[0]}.{self.floor[1]}")
        self.floor = max(self.floor, fence)

    def _answer(self, connection: Connection, number: int, answer: dict[str, Any]) -> None:
        connection.send(protocol.control(protocol.REPLY, {"id": number, "ok": answer}))

    def _refuse(self, connection: Connection, number: int, refusal: Refusal) -> None:
        error = {"code": refusal.code, "detail": refusal.detail[:500], "field": refusal.field}
        connection.send(protocol.control(protocol.REPLY, {"id": number, "error": error}))

    def _changed(self, job: Exec) -> None:
        connection = job.watcher
        if connection is not None and len(connection.out) < MAX_QUEUED:
            connection.pump()
            connection.flush()

    def _input_moved(self, job: Exec) -> None:
        if job.input is not None and job.input_client is not None:
            event = {"event": "stdin", "exec_id": job.exec_id, "written": job.input.written, "open": job.input.fd >= 0}
            job.input_client.send(protocol.control(protocol.EVENT, event))

    def _job(self, request: dict[str, Any]) -> Exec:
        exec_id = request.get("exec_id")
        job = self.runner.execs.get(exec_id) if type(exec_id) is str else None
        if job is None:
            raise Refusal("not_found", "no such exec")
        return job

    # -- operations --------------------------------------------------------------------------------------------------------------
    def _ping(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        return {"now_ms": int(time.monotonic() * 1000)}

    def _identify(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        sandbox = request.get("sandbox")
        fence = fence_of(request)
        if type(sandbox) is not str or not sandbox or len(sandbox) > 100:
            raise Refusal("bad_request", "identify needs the sandbox's id", "sandbox")
        instance = request.get("instance", self.options.instance)
        if type(instance) is not str or len(instance) > 100:
            raise Refusal("bad_request", "instance is a short text", "instance")
        other = sandbox != self.sandbox
        if self.quiet and other:
            # A copy that begins as another sandbox: its fences have nothing to do with those of the first.
            self.floor = fence
        elif fence < self.floor or (self.sandbox and fence[0] == self.incarnation and other):
            raise Refusal("lease_lost", f"the floor is {self.floor[0]}.{self.floor[1]}")
        if self.quiet:
            self.quiet = False
            now = time.monotonic()
            self.deadline.end_quiet(now)
            self.runner.wake(now - self.quiet_since)
        self.options.instance = instance
        self.sandbox = sandbox
        self.incarnation = fence[0]
        self.floor = max(self.floor, fence)
        self.wants_standby = True
        entropy = request.get("entropy")
        if type(entropy) is str and entropy:
            try:
                fd = os.open("/dev/urandom", os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.write(fd, entropy[:4096].encode("utf-8", "replace"))
                finally:
                    os.close(fd)
            except OSError:
                pass  # a kernel that shares its pool with the host needs no help
        return {"floor": list(self.floor), "clock_ms": int(time.time() * 1000)}

    def _quiesce(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        running = [job.exec_id for job in self.runner.by_supervisor.values() if not job.finished]
        if running:
            # Its end would be told in every copy, to nobody.
            raise Refusal("illegal_transition", f"an exec runs: {running[0]}")
        self.quiet = True
        self.quiet_since = time.monotonic()
        self.deadline.begin_quiet(self.quiet_since)
        self.wants_standby = False
        self.runner.rest(time.monotonic() + END_PATIENCE_S)
        os.sync()
        return {"kept": len(self.runner.by_supervisor)}

    def _pause(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        if self.pause is None:
            from corral.guest.pausing import Pause

            self.pause = Pause(self.deadline, self.runner)
        whole, stopped = self.pause.begin(time.monotonic(), stop=request.get("stop") is True)
        return {"whole": int(whole), "stopped": stopped}

    def _resume(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        return {"resumed": 0 if self.pause is None else self.pause.end(time.monotonic())}

    def _fence(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        mode = request.get("mode")
        if mode not in ("kill", "adopt"):
            raise Refusal("bad_request", "mode is kill or adopt", "mode")
        if mode == "adopt":
            return {"killed_all": True, "killed": 0}
        fence = fence_of(request)
        living = list(self.runner.by_supervisor.values())
        older = [job for job in living if job.fence < fence]
        if len(older) == len(living):
            return self._end_all_because("fence")
        return self._end_some(connection, number, older, 0.0, "fence")

    def _end_some(self, connection: Connection, number: int, jobs: list[Exec], grace: float, why: str) -> Any:
        if not jobs:
            return {"killed_all": True, "killed": 0}
        total = {"killed_all": True, "killed": 0}
        waiting = len(jobs)
        epoch = connection.epoch

        def ended(done: bool, count: int) -> None:
            nonlocal waiting
            waiting -= 1
            total["killed_all"] = total["killed_all"] and done
            total["killed"] += count
            if waiting == 0 and connection.epoch == epoch:
                self._answer(connection, number, total)

        for job in jobs:
            job.kill_waiters.append(ended)
            self.runner.end(job, grace, why)
        return None

    def _end_all_because(self, why: str) -> dict[str, Any]:
        for job in self.runner.by_supervisor.values():
            if not job.finished and job.ended_by is None:
                job.ended_by = why
        done, count = self._end_all()
        return {"killed_all": done, "killed": count}

    def _start(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        spec = request.get("spec")
        if type(spec) is not dict:
            raise Refusal("bad_request", "exec.start needs a spec", "spec")
        exec_id = spec.get("exec_id")
        if type(exec_id) is not str or not 0 < len(exec_id) <= 100:
            raise Refusal("bad_request", "exec_id must be a short text", "exec_id")
        known = self.runner.execs.get(exec_id)
        if known is not None:
            return known.facts() | {"already": True}
        if self.runner.held:
            raise Refusal("sandbox_paused", "nothing begins in a sandbox that is paused")
        attach = integer_of(request, "attach", -1, 0, 2**31)
        numbers = self._stream_numbers(request) if attach >= 0 else {}
        job = self.runner.start(spec, fence_of(request))
        if job.state != "starting":
            return job.facts()
        if attach >= 0:
            connection.follow(attach, job, numbers, dict.fromkeys(numbers, 0))
        epoch = connection.epoch

        def begun() -> None:
            if connection.epoch != epoch:
                return  # who asked is gone
            answer = job.facts()
            if job.state == "failed":
                connection.detach(attach)
            elif attach >= 0:
                answer["attached"] = True
            self._answer(connection, number, answer)

        job.start_waiters.append(begun)
        return None

    def _status(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        exec_id = request.get("exec_id")
        if type(exec_id) is not str:
            raise Refusal("bad_request", "exec_id must be text", "exec_id")
        job = self.runner.execs.get(exec_id)
        if job is None:
            return {"exec_id": exec_id, "state": "unknown", "started": False}
        return job.facts()

    def _attach(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        job = self._job(request)
        attach = integer_of(request, "attach", -1, 0, 2**31)
        numbers = self._stream_numbers(request)
        offsets = request.get("offsets")
        if type(offsets) is not dict:
            raise Refusal("bad_request", "attach needs offsets", "offsets")
        sent: dict[str, int] = {}
        for name, stream in job.streams.items():
            sent[name] = integer_of(offsets, name, 0, 0, 2**63)
            if sent[name] < stream.base:
                raise Refusal("cursor_gone", f"{name} before {stream.base} was acknowledged", "offsets")
            if sent[name] > stream.end:
                raise Refusal("bad_request", f"{name} has only {stream.end} bytes", "offsets")
        for name in job.streams:
            self.runner.acknowledge(job, name, sent[name])
        connection.follow(attach, job, numbers, sent)
        self._answer(connection, number, job.facts())
        connection.pump()
        connection.flush()
        return None

    def _stream_numbers(self, request: dict[str, Any]) -> dict[str, int]:
        streams = request.get("streams")
        if type(streams) is not dict:
            raise Refusal("bad_request", "attach needs streams", "streams")
        return {name: integer_of(streams, name, -1, 0, 2**32 - 1) for name in ("stdout", "stderr")}

    def _detach(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        attach = integer_of(request, "attach", -1, 0, 2**31)
        connection.detach(attach)
        for stream, (attachment, _) in list(connection.streams.items()):
            if attachment.number == attach:
                del connection.streams[stream]
        return {}

    def _stdin(self, connection: Connection, request: dict[str, Any], data: bytes) -> Any:
        job = self._job(request)
        job.input_client = connection
        eof = request.get("eof") is True
        if job.finished or job.state == "ending":
            return {"received": 0, "written": 0, "open": False}
        self.runner.feed(job, integer_of(request, "offset", 0, 0, 2**63), data, eof)
        target = job.input
        return {"received": target.received, "written": target.written, "open": target.fd >= 0} if target else {}

    def _signal(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        job = self._job(request)
        signal = integer_of(request, "signal", 15, 1, 64)
        if not job.finished:
            self.runner.signal(job, signal, tree=request.get("tree") is True)
        return {}

    def _resize(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        job = self._job(request)
        window = window_of([request.get("rows"), request.get("cols")])
        if window is not None and not job.finished:
            self.runner.resize(job, *window)
        return {}

    def _kill(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        job = self._job(request)
        grace = seconds_of(request, "grace_s", job.grace) or 0.0
        if job.post is None:
            return {"killed_all": job.killed_all, "killed": 0}
        return self._end_some(connection, number, [job], grace, "kill")

    def _forget(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        job = self._job(request)
        for one in self.connections:
            one.forget(job)
        self.runner.forget(job)
        return {}

    def _kill_all(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        return self._end_all_because("kill")

    def _usage(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        living = processes.descendants(os.getpid(), set(self.runner.idle))
        return {
            "processes": len(living),
            "rss_bytes": processes.resident(living),
            "execs": len(self.runner.by_supervisor),
            "known_execs": len(self.runner.execs),
            "uptime_ms": int((time.monotonic() - self.begun) * 1000),
        }

    def _deadline(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        seconds = seconds_of(request, "seconds", None)
        if seconds is None:
            raise Refusal("bad_request", "deadline needs seconds", "seconds")
        self.deadline.at = time.monotonic() + seconds
        return {}

    def _shutdown(self, connection: Connection, number: int, request: dict[str, Any]) -> Any:
        self.stop = True
        return {}


def main(arguments: list[str]) -> NoReturn:
    """Never returns. Exit status: 0 ended by deadline, request or absence of clients; 2 bad command line or filter."""
    try:
        options = begin.Options(arguments)
    except ValueError as error:
        begin.fail(str(error))
    guest = Guest(options)
    keep = options.control_fd if not options.fifo else 2
    if keep > 3:
        os.closerange(3, keep)
    os.closerange(max(3, keep + 1), 1 << 20)
    if not options.fifo:
        os.set_inheritable(options.control_fd, False)
    guest.run()
    os._exit(0)
