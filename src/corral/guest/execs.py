"""Execs as the guest keeps them: buffers with offsets, standard input, state, and the talk with each exec's supervisor."""

from __future__ import annotations

import _struct
import errno
import fcntl
import os
import select
import time

from corral.guest import kernel, launch, loop, posts, processes, protocol, supervisor
from corral.guest.posts import Post
from corral.guest.record import Exec
from corral.guest.requests import Defaults, Refusal, choice_of, plan_of, seconds_of, window_of
from corral.guest.streams import Input, Stream, pipes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

FIONREAD = 0x541B
TIOCSWINSZ = 0x5414
READ_SIZE = 64 * 1024
SINK_PAUSE_S = 0.05
PTY_QUIET_S = 0.03
PTY_PATIENCE_S = 0.5
FORCE_MARGIN_S = 1.0


class Runner:
    """Starts execs and moves their bytes and news; `changed(exec)` = there is something for an attached client."""

    def __init__(
        self,
        poll_loop: loop.Loop,
        defaults: Defaults,
        changed: Callable[[Exec], None],
        input_moved: Callable[[Exec], None],
    ) -> None:
        self._loop = poll_loop
        self._defaults = defaults
        self._changed = changed
        self._input_moved = input_moved
        self.execs: dict[str, Exec] = {}
        self.by_supervisor: dict[int, Exec] = {}
        self.idle: dict[int, Post] = {}
        self._standard = launch.Standard(defaults.filter, defaults.oom_score_adj)
        self._resting = False
        self.held = False
        """Paused: the clocks of execs stand still."""
        self.ending: set[Exec] = set()
        self.unwanted: set[str] = set()
        """Execs that no client will ask for again."""

    # -- start -------------------------------------------------------------------------------------------------------------------
    def start(self, spec: dict[str, Any], fence: tuple[int, int]) -> Exec:
        """A new exec in state `starting` (or `failed` when not even its supervisor can be made)."""
        exec_id = spec["exec_id"]
        plan = plan_of(spec, self._defaults)
        window = window_of(spec.get("pty"))
        wants_input = choice_of(spec, "stdin", ("eof", "open")) == "open"
        timeout = seconds_of(spec, "timeout_s", None)
        grace = seconds_of(spec, "grace_s", 2.0)
        job = Exec(exec_id, fence)
        job.grace = grace if grace is not None else 2.0
        if timeout is not None:
            job.deadline = job.born + timeout
        self.execs[exec_id] = job
        theirs: list[int] = []
        try:
            self._open_pipes(job, plan, window, wants_input, theirs)
            post = job.post = self._hand_over(plan) or self._fork(plan)
        except OSError as error:
            self._never_started(job, error)
            return job
        finally:
            for fd in set(theirs):
                os.close(fd)
        self.by_supervisor[post.pid] = job
        self._loop.watch(post.channel.fileno(), loop.READ, lambda _: self._hear(job))
        for stream in job.streams.values():
            self._watch_stream(job, stream)
        return job

    def _hand_over(self, plan: launch.Plan) -> Post | None:
        """The supervisor that stood by, if there is one and the plan is for it."""
        if not self.idle or not self._reusable(plan) or not self._standard.fits(plan):
            return None
        packed = plan.pack()
        if len(packed) > launch.MAX_PACKED:
            return None
        _, post = self.idle.popitem()
        if post.hand(plan, packed):
            return post
        self._dismiss(post)
        return None

    def _fork(self, plan: launch.Plan) -> Post:
        # One is to stand by when all is over; more of them would only prepare in vain.
        enough = bool(self.idle) or any(
            job.post is not None and job.post.plans is not None and not job.finished
            for job in self.by_supervisor.values()
        )
        return self._supervisor(plan, reusable=self._reusable(plan) and not enough, dumpable=plan.dumpable)

    def _supervisor(self, plan: launch.Plan | None, *, reusable: bool, dumpable: bool) -> Post:
        namespace = self._defaults.namespaces
        return posts.fork(plan, self._standard, reusable=reusable, dumpable=dumpable, namespace=namespace)

    def _reusable(self, plan: launch.Plan) -> bool:
        # Who has the guest's own uid can reach its supervisor.
        return self._defaults.standing and plan.uid != os.getuid()

    def stand_by(self) -> None:
        """Have a supervisor ready for the next exec, where that is safe."""
        if not self._defaults.standing or self.idle or self._resting:
            return
        try:
            self._keep(self._supervisor(None, reusable=True, dumpable=self._defaults.dumpable))
        except OSError:
            pass  # the next exec makes its own, or says why it cannot

    def rest(self, until: float) -> None:
        """Have nobody stand by any more, from now on: every copy of a memory would hold the same one."""
        self._resting = True
        while self.idle:
            pid, post = self.idle.popitem()
            self._dismiss(post)
            processes.await_child(pid, until)

    def wake(self, after: float) -> None:
        """The end of `rest`, perhaps as another sandbox: what still runs is older than any fence to come, and has the time that it had."""
        self._resting = False
        for job in self.by_supervisor.values():
            job.fence = (0, 0)
        self.postpone(after)

    def postpone(self, after: float) -> None:
        """Execs have the time that they had: for so many seconds none of them could use it."""
        for job in self.by_supervisor.values():
            if job.deadline is not None:
                job.deadline += after

    def _keep(self, post: Post) -> None:
        self.idle[post.pid] = post
        self._loop.watch(post.channel.fileno(), loop.READ, lambda _: self._hear_idle(post))

    def _hear_idle(self, post: Post) -> None:
        if post.hear() == b"":
            self.idle.pop(post.pid, None)
            self._dismiss(post)

    def _dismiss(self, post: Post) -> None:
        """It ends by itself when nobody talks to it any more."""
        if post.channel is not None:
            self._loop.forget(post.channel.fileno())
        post.close()

    def idle_ended(self, pid: int) -> None:
        """One that stood by was reaped."""
        self._dismiss(self.idle.pop(pid))

    def _never_started(self, job: Exec, error: OSError) -> None:
        job.state = "failed"
        job.started = False
        code = errno.errorcode.get(error.errno or 0, "EIO")
        job.failure = {"what": "platform", "errno": code, "message": f"the exec cannot be made: {error.strerror}"}
        self._release(job)

    def _open_pipes(
        self, job: Exec, plan: launch.Plan, window: tuple[int, int] | None, wants_input: bool, theirs: list[int]
    ) -> None:
        plan.pty = window is not None
        if window is not None:
            ((master, slave),) = self._as_user(plan, lambda: [os.openpty()])
            theirs.append(slave)
            os.set_blocking(master, False)
            fcntl.ioctl(master, TIOCSWINSZ, _struct.pack("HHHH", window[0], window[1], 0, 0))
            plan.stdin = plan.stdout = plan.stderr = slave
            job.pty_master = master
            job.streams = {"stdout": Stream("stdout", master), "stderr": Stream("stderr", -1)}
            job.input = Input(master, pty=True)
            if not wants_input:
                job.input.eof = True
                self._feed(job)
            return
        made = self._as_user(plan, lambda: pipes(3 if wants_input else 2))
        for name, (read, write) in zip(("stdout", "stderr"), made, strict=False):
            theirs.append(write)
            setattr(plan, name, write)
            os.set_blocking(read, False)
            job.streams[name] = Stream(name, read)
        if wants_input:
            plan.stdin, write = made[2]
            os.set_blocking(write, False)
            job.input = Input(write, pty=False)
        else:
            plan.stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        theirs.append(plan.stdin)

    def _as_user(self, plan: launch.Plan, make: Callable[[], list[tuple[int, int]]]) -> list[tuple[int, int]]:
        """Terminals and pipes belong to whoever makes them; the exec's user must be able to open /dev/tty, /dev/stdin … by name."""
        me, group = os.geteuid(), os.getegid()
        if me != 0 or plan.uid == 0:
            return make()
        os.setegid(plan.gid)
        try:
            os.seteuid(plan.uid)
            try:
                return make()
            finally:
                os.seteuid(me)
        finally:
            os.setegid(group)
            if not self._defaults.dumpable:
                kernel.set_dumpable(False)

    # -- output ------------------------------------------------------------------------------------------------------------------
    def _watch_stream(self, job: Exec, stream: Stream) -> None:
        if stream.fd < 0:
            return
        mask = loop.READ if stream.open and not stream.full else 0
        if job.input is not None and job.input.fd == stream.fd and job.input.buffer:
            mask |= loop.WRITE
        self._loop.watch(stream.fd, mask, lambda events: self._stream_ready(job, stream, events))

    def _stream_ready(self, job: Exec, stream: Stream, events: int) -> None:
        if events & loop.WRITE:
            self._feed(job)
        if events & ~loop.WRITE and stream.open:
            self._read(job, stream, READ_SIZE)
            self._watch_stream(job, stream)
            self._changed(job)

    def _read(self, job: Exec, stream: Stream, size: int) -> int:
        """Bytes read; 0 when there are none now or never again (then the stream is closed)."""
        try:
            data = os.read(stream.fd, size)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: every process has closed the terminal
            data = b""
        if not data:
            self._close_stream(job, stream)
            return 0
        now = time.monotonic()
        stream.append(max(0, int((now - job.born) * 1000)), data)
        job.pty_quiet = now + PTY_QUIET_S
        return len(data)

    def _close_stream(self, job: Exec, stream: Stream) -> None:
        if stream.open:
            stream.open = False
            self._loop.forget(stream.fd)
            if job.input is not None and job.input.fd == stream.fd:
                job.input.fd = -1
            os.close(stream.fd)
            stream.fd = -1

    def acknowledge(self, job: Exec, name: str, offset: int) -> None:
        stream = job.streams[name]
        was_full = stream.full
        stream.acknowledge(offset)
        if was_full and stream.open and not job.finished:
            self._watch_stream(job, stream)

    # -- input -------------------------------------------------------------------------------------------------------------------
    def feed(self, job: Exec, offset: int, data: bytes, eof: bool) -> None:
        """Take bytes `[offset, …)`; what was received before is skipped, a hole is refused."""
        target = job.input
        if target is None:
            raise Refusal("bad_request", "the exec has no open standard input")
        if offset > target.received:
            raise Refusal("bad_request", f"standard input continues at {target.received}")
        fresh = data[target.received - offset :]
        if len(target.buffer) + len(fresh) > protocol.INPUT_WINDOW + protocol.MAX_DATA:
            raise Refusal("bad_request", "more standard input than the window allows")
        target.received += len(fresh)
        if target.fd < 0:
            target.written = target.received
            return
        target.buffer += fresh
        target.eof = target.eof or eof
        self._feed(job)

    def _feed(self, job: Exec) -> None:
        target = job.input
        if target is None or target.fd < 0:
            return
        if target.eof and target.pty:
            # End of file on a terminal is a character.
            target.buffer += b"\x04"
            target.eof = False
        try:
            while target.buffer:
                count = os.write(target.fd, target.buffer[:READ_SIZE])
                target.written += count
                del target.buffer[:count]
        except BlockingIOError:
            pass
        except OSError:
            target.written = target.received
            target.buffer.clear()
            target.eof = not target.pty
        if target.pty:
            self._watch_stream(job, job.streams["stdout"])
        elif not target.buffer and target.eof:
            self.close_input(job)
        else:
            self._loop.watch(target.fd, loop.WRITE if target.buffer else 0, lambda _: self._feed(job))
        if target.written - target.reported >= protocol.INPUT_WINDOW // 4 or not target.buffer:
            target.reported = target.written
            self._input_moved(job)

    def close_input(self, job: Exec) -> None:
        target = job.input
        if target is not None and target.fd >= 0 and not target.pty:
            self._loop.forget(target.fd)
            os.close(target.fd)
            target.fd = -1
            target.buffer.clear()
            target.written = target.received
            self._input_moved(job)

    def resize(self, job: Exec, rows: int, columns: int) -> None:
        if job.streams.get("stdout") is None or job.pty_master < 0 or not job.streams["stdout"].open:
            raise Refusal("bad_request", "the exec has no terminal")
        fcntl.ioctl(job.pty_master, TIOCSWINSZ, _struct.pack("HHHH", rows, columns, 0, 0))

    # -- news of the supervisor --------------------------------------------------------------------------------------------------
    def none_starts(self) -> bool:
        """Every supervisor that was given a program has said, by now, that it runs or that it cannot."""
        for job in list(self.by_supervisor.values()):
            if job.started is None:
                self._hear(job)
        return all(job.started is not None or job.post is None for job in self.by_supervisor.values())

    def signal(self, job: Exec, number: int, *, tree: bool) -> None:
        if job.post is not None:
            job.post.command("T" if tree else "S", number)

    def _hear(self, job: Exec) -> None:
        """What its supervisor says. Its end is judged when it is reaped."""
        while job.post is not None and job.post.channel is not None:
            packet = job.post.hear()
            if packet is None:
                return
            if packet:
                self._news(job, job.post, launch.unpack(packet))
            else:
                self._dismiss(job.post)

    def _news(self, job: Exec, post: Post, news: dict[str, Any]) -> None:
        if news["turn"] != post.turn:
            return
        kind = news["event"]
        if kind == "started":
            # In another namespace its number means nothing here.
            job.main = 0 if self._defaults.namespaces else news["pid"]
            job.started = True
            job.started_ms = news["at"]
            job.state = "running"
            self._tell_starters(job)
        elif kind == "failed":
            job.started = False
            job.failure = {"what": news["what"], "errno": news["errno"], "message": news["message"]}
            job.state = "failed"
            self._release(job)
            self._tell_starters(job)
            if news.get("idle"):
                self._part(job, post)
        elif kind == "exited":
            job.take_status(news["status"])
            job.ended_ms = news["at"]
            job.utime_ms, job.stime_ms, job.maxrss_kib = news["utime_ms"], news["stime_ms"], news["maxrss_kib"]
            job.killed += news["killed"]
            job.killed_all = job.killed_all and news["killed_all"]
            job.background = news["background"]
            self.finish(job, "ended")
            if news["idle"]:
                self._part(job, post)
        elif kind == "killed":
            job.killed += news["killed"]
            job.killed_all = news["killed_all"]
            if news["killed_all"]:
                # It ends now; the answer waits for that, so that nothing at all of the exec is left when it comes.
                job.background = 0
                job.kill_answer += news["killed"]
            else:
                job.force_at = None
                self.tell_killers(job, False, news["killed"])

    def _part(self, job: Exec, post: Post) -> None:
        """Nothing is left of the exec, and its supervisor is free for another."""
        self._no_longer_supervised(job)
        if len(self.idle) < posts.MAX_IDLE and not self._resting:
            self._keep(post)
        else:
            self._dismiss(post)
        self.settle(job, done=True, count=0, lost=False, status=None)

    def _no_longer_supervised(self, job: Exec) -> None:
        if job.post is not None:
            self.by_supervisor.pop(job.post.pid, None)
            job.post = None
        job.force_at = None

    def _tell_starters(self, job: Exec) -> None:
        waiters, job.start_waiters = job.start_waiters, []
        for waiter in waiters:
            waiter()

    def tell_killers(self, job: Exec, done: bool, count: int) -> None:
        waiters, job.kill_waiters = job.kill_waiters, []
        for waiter in waiters:
            waiter(done, count)

    # -- end ---------------------------------------------------------------------------------------------------------------------
    def finish(self, job: Exec, state: str) -> None:
        """Main is over: take what its pipes hold now, all of it, then let leftovers write into nothing."""
        if job.finished or job.state == "ending":
            return
        job.deadline = None
        if job.pty_master >= 0 and job.streams["stdout"].open:
            # What was written to a terminal arrives a moment later: read until it is closed or quiet.
            job.state = "ending"
            job.end_state = state
            self.ending.add(job)
            now = time.monotonic()
            job.pty_until, job.pty_quiet = now + PTY_PATIENCE_S, now + PTY_QUIET_S
            self._loop.watch(job.pty_master, loop.READ, lambda _: self._read_terminal(job))
            self._read_terminal(job)
            return
        for stream in job.streams.values():
            if stream.open:
                self._drain(job, stream)
        self._end(job, state)

    def _drain(self, job: Exec, stream: Stream) -> None:
        word = bytearray(4)
        try:
            fcntl.ioctl(stream.fd, FIONREAD, word)
        except OSError:
            return
        left = int.from_bytes(word, "little")
        while left > 0 and stream.open:
            count = self._read(job, stream, min(left, READ_SIZE))
            if count == 0:
                return
            left -= count

    def _read_terminal(self, job: Exec) -> None:
        stream = job.streams["stdout"]
        while stream.open and stream.end - stream.base < 2 * protocol.WINDOW and self._read(job, stream, READ_SIZE):
            pass
        now = time.monotonic()
        if (
            not stream.open
            or now >= job.pty_until
            or now >= job.pty_quiet
            or stream.end - stream.base >= 2 * protocol.WINDOW
        ):
            self._end(job, job.end_state)

    def _end(self, job: Exec, state: str) -> None:
        self.ending.discard(job)
        job.state = state
        self.close_input(job)
        self._changed(job)
        if job.background and job.post is not None:
            for stream in job.streams.values():
                if stream.open:
                    self._open_sink(job, stream)
        else:
            self._release(job)

    def _open_sink(self, job: Exec, stream: Stream) -> None:
        """Leftover processes may go on writing; what they write is read slowly and dropped, so that they neither block nor die."""
        fd, stream.fd, stream.open = stream.fd, -1, False
        if job.input is not None and job.input.fd == fd:
            job.input.fd = -1
        self._loop.forget(fd)
        self._watch_sink(job, fd)

    def _watch_sink(self, job: Exec, fd: int) -> None:
        job.sinks[fd] = 0.0
        self._loop.watch(fd, loop.READ, lambda _: self._sink(job, fd))

    def _sink(self, job: Exec, fd: int) -> None:
        try:
            data = os.read(fd, READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._loop.forget(fd)
        if data:
            job.sinks[fd] = time.monotonic() + SINK_PAUSE_S
        else:
            del job.sinks[fd]
            os.close(fd)

    def _release(self, job: Exec) -> None:
        """Close every descriptor of the exec but its supervisor's socket; unacknowledged bytes stay."""
        for stream in job.streams.values():
            if stream.open:
                self._close_stream(job, stream)
        self.close_input(job)
        for fd in list(job.sinks):
            self._loop.forget(fd)
            os.close(fd)
        job.sinks.clear()
        job.pty_master = -1

    def supervisor_ended(self, job: Exec) -> bool:
        """Its supervisor was reaped. True when it told everything before: nothing of the exec lives."""
        self._hear(job)
        if job.post is not None:
            self._dismiss(job.post)
        self._no_longer_supervised(job)
        return job.finished or job.state == "ending"

    def settle(self, job: Exec, *, done: bool, count: int, lost: bool, status: int | None) -> None:
        """Close the books of an exec whose supervisor is gone and whose processes were ended by others (`lost`), or had ended."""
        if lost and not (job.finished or job.state == "ending"):
            job.killed += count
            job.killed_all = done
            job.ended_ms = int(time.monotonic() * 1000)
            # Ended by us as a whole: main's own fate is known if it came to us. Otherwise nobody knows what happened to it.
            deliberate = job.ended_by is not None and job.started is True and status is not None
            if deliberate and status is not None:
                job.take_status(status)
            job.background = 0
            self.finish(job, "ended" if deliberate else "lost")
            self._tell_starters(job)
        elif job.finished:
            self._release(job)
        job.background = 0 if done else job.background
        self.tell_killers(job, done, job.kill_answer + count)

    def forget(self, job: Exec) -> None:
        """No client will ask for it again, nor start it: its record goes as soon as nothing of it is left."""
        self.unwanted.add(job.exec_id)
        for exec_id in list(self.unwanted):
            known = self.execs[exec_id]
            if known.finished and known.post is None and known.watcher is None:
                del self.execs[exec_id]
                self.unwanted.discard(exec_id)

    # -- time --------------------------------------------------------------------------------------------------------------------
    def next_time(self) -> float | None:
        """When `tick` has something to do."""
        times: list[float] = []
        for job in self.by_supervisor.values():
            if job.deadline is not None and not self.held:
                times.append(job.deadline)
            if job.force_at is not None:
                times.append(job.force_at)
            times.extend(when for when in job.sinks.values() if when)
        times.extend(min(job.pty_quiet, job.pty_until) for job in self.ending)
        return min(times) if times else None

    def tick(self, now: float) -> None:
        for job in list(self.by_supervisor.values()):
            if job.deadline is not None and now >= job.deadline and not (self._resting or self.held):
                job.deadline = None
                self.end(job, job.grace, "timeout")
            if job.force_at is not None and now >= job.force_at:
                # It does not answer (it may have been stopped): its processes come to us when it is gone.
                job.force_at = None
                if job.post is not None:
                    processes.send_child(job.post.pid, processes.SIGKILL)
            for fd, when in job.sinks.items():
                if when and now >= when:
                    self._watch_sink(job, fd)
        for job in list(self.ending):
            self._read_terminal(job)

    def end_all(self, until: float) -> int:
        """Where main goes with its supervisor, only that sees how it ended: have each end its exec and tell. -> how many got KILL."""
        asked = list(self.by_supervisor.values()) if self._defaults.namespaces else []
        before = sum(job.kill_answer for job in asked)
        for job in asked:
            if job.post is not None:
                job.post.command("K", 0)
        poller = select.poll()
        while True:
            channels = [job.post.channel for job in asked if job.post is not None and job.post.channel is not None]
            left = until - time.monotonic()
            if not channels or left <= 0:
                return sum(job.kill_answer for job in asked) - before
            for channel in channels:
                poller.register(channel.fileno(), select.POLLIN)
            poller.poll(left * 1000)
            for channel in channels:
                poller.unregister(channel.fileno())
            for job in asked:
                self._hear(job)

    def end(self, job: Exec, grace: float, why: str) -> None:
        """Have its supervisor end the whole tree; the answer comes to the kill waiters."""
        if not job.finished and job.ended_by is None:
            job.ended_by = why
        if job.post is not None:
            job.post.command("K", int(grace * 1000))
        force_at = time.monotonic() + grace + supervisor.KILL_PATIENCE_S + FORCE_MARGIN_S
        job.force_at = force_at if job.force_at is None else min(job.force_at, force_at)
