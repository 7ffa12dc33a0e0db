"""`GuestClient`: one connection to one guest. See the package docstring for what is trusted (nothing)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal

from corral.channel.answers import (
    ChannelLimits,
    Data,
    Ended,
    ExecStatus,
    GuestHello,
    KillReport,
    Stream,
    Violation,
    check_clock,
    check_hello,
    check_input,
    check_kill,
    check_numbers,
    check_reply,
    check_status,
)
from corral.channel.flows import Attached, Budget, Input, first_piece, forget_closed
from corral.channel.pipes import PipeEnds, PipeTransport, Receiver
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.guest import protocol

__all__ = ["ChannelLimits", "Data", "Ended", "ExecStatus", "GuestClient", "GuestHello", "KillReport"]

_NAMES: tuple[Stream, ...] = ("stdout", "stderr")
_ACK_EVERY = 64 * 1024
_MAX_INPUTS = 1024
_MAX_PENDING = 4096
"""Questions that a guest may owe an answer to; those that nobody waits for have no time limit of their own."""
_MAX_ASKED = 256
"""Frames of one input on their way at once: they may be tiny."""
_TOGETHER = 256 * 1024
_TOGETHER_MS = 10
"""Output of so few milliseconds is handed out as if it had come at once."""
_SYNC_S = 60.0
_KILL_S = 12.0
"""What the guest itself may need to find that something survives a kill, beyond the grace."""


class GuestClient:
    """See the module docstring. Made by `connect` only; all methods may be called from many tasks of one loop.

    Errors: `guest_lost` (connection unusable, `closed` set), `lease_lost` (fence below the guest's floor), `not_found` (exec id),
    `cursor_gone` (attach below what is kept), `illegal_transition` (not identified yet), `bad_request`.
    """

    hello: GuestHello
    closed: asyncio.Event

    def __init__(self, limits: ChannelLimits) -> None:
        self.limits = limits
        self.closed = asyncio.Event()
        self.lost_reason: str | None = None
        self._decoder = protocol.Decoder(
            {
                protocol.HELLO: limits.max_control,
                protocol.REPLY: limits.max_control,
                protocol.EVENT: limits.max_control,
                protocol.DATA: protocol.DATA_SIZE + limits.max_frame,
            }
        )
        self._transport: asyncio.Transport | PipeTransport | None = None
        self._greeting: asyncio.Future[dict[str, Any]] | None = None
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._abandoned: set[int] = set()
        self._number = 0
        self._stream_number = 0
        self._attached: dict[int, Attached] = {}
        self._streams: dict[int, tuple[Attached, Stream]] = {}
        self._ready: dict[str, Attached] = {}
        self._inputs: dict[str, Input] = {}
        self._budget = Budget(limits.frames_per_s)
        self._last_seen = time.monotonic()
        self._frozen = False
        self._patience: dict[asyncio.Timeout, float] = {}
        """Of those who wait for an answer, with their seconds."""
        self._tasks: set[asyncio.Task[None]] = set()

    # -- connection --------------------------------------------------------------------------------------------------------------
    @classmethod
    async def connect(
        cls,
        way: socket.socket | PipeEnds | Callable[[], Awaitable[socket.socket | PipeEnds]],
        *,
        limits: ChannelLimits | None = None,
        role: str = "node",
    ) -> GuestClient:
        """Say hello over a connected unix stream socket, over locked pipes, or over what the connector answers; they are ours then.

        The guest closes older connections; over pipes it forgets whoever was there before.
        """
        self = cls(limits or ChannelLimits())
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.limits.connect_s):
                ends = await way() if callable(way) else way
                self._greeting = loop.create_future()
                wire = Receiver(self._arrived, self._ended)
                if isinstance(ends, socket.socket):
                    ends.setblocking(False)
                    self._transport, _ = await loop.create_unix_connection(lambda: wire, sock=ends)
                else:
                    self._transport = pipes = PipeTransport(ends, wire)
                    await pipes.resync(self.limits.max_resync)
                hello = {"versions": [protocol.OLDEST, protocol.VERSION], "role": role}
                self._send(protocol.control(protocol.HELLO, hello))
                self.hello = check_hello(await self._greeting)
        except TimeoutError:
            self._lose("the guest did not say hello in time")
            raise self._error() from None
        except Violation as error:
            self._lose(f"the guest's hello: {error}")
            raise self._error() from None
        except OSError as error:
            self._lose(f"the guest cannot be reached: {error}")
            raise self._error() from None
        except BaseException:
            self._lose("given up")
            raise
        self._spawn(self._keep_alive())
        return self

    async def close(self) -> None:
        """Let go; the sandbox lives on. Idempotent."""
        self._lose("closed by us")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, error: Exception | None) -> None:
        self._lose("the connection to the guest ended" if error is None else f"the connection failed: {error}")

    def _error(self) -> CorralError:
        return CorralError("guest_lost", self.lost_reason or "the guest does not answer")

    def _lose(self, reason: str) -> None:
        """The one way out: from here on every call fails and nothing is held."""
        if self.lost_reason is not None:
            return
        self.lost_reason = reason
        if self._transport is not None:
            self._transport.abort()
        for future in [*self._pending.values(), *([self._greeting] if self._greeting else [])]:
            if not future.done():
                future.set_exception(self._error())
                future.exception()  # nobody may be waiting any more
        self._pending.clear()
        self._streams.clear()
        self._ready.clear()
        for attached in self._attached.values():
            attached.news.set()
        self._attached.clear()
        for task in self._tasks:
            task.cancel()
        for taken in self._inputs.values():
            taken.moved.set()
        self.closed.set()

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_alive(self) -> None:
        half = self.limits.keepalive_s / 2
        with contextlib.suppress(CorralError):
            while not self.closed.is_set():
                await asyncio.sleep(half)
                if self._attached and not self._frozen and time.monotonic() - self._last_seen > half:
                    await self.ping()

    # -- frames ------------------------------------------------------------------------------------------------------------------
    def _send(self, frame: bytes) -> None:
        transport = self._transport
        if transport is None or self.lost_reason is not None:
            raise self._error()
        transport.write(frame)
        if transport.get_write_buffer_size() > self.limits.max_buffer:
            self._lose("the guest does not read")
            raise self._error()

    def _arrived(self, data: bytes) -> None:
        if self.lost_reason is not None:
            return
        self._last_seen = time.monotonic()
        try:
            frames = self._decoder.feed(data)
            for kind, payload in frames:
                self._frame(kind, payload)
        except (protocol.ProtocolError, Violation) as error:
            self._lose(f"the guest broke the protocol: {error}")
            return
        self._throttle(len(frames))

    def _throttle(self, count: int) -> None:
        pause = self._budget.spend(count)
        if pause > 0 and self._transport is not None and self.lost_reason is None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(min(2.0, pause), self._transport.resume_reading)

    def _frame(self, kind: int, payload: bytes) -> None:
        if kind == protocol.HELLO:
            if self._greeting is None or self._greeting.done():
                raise Violation("a second hello")
            self._greeting.set_result(protocol.loads(payload))
        elif self._greeting is None or not self._greeting.done():
            raise Violation("no hello")
        elif kind == protocol.DATA:
            stream, offset, t_ms, data = protocol.split_data(payload)
            known = self._streams.get(stream)
            if known is None:
                raise Violation("output that nobody asked for")
            known[0].add(known[1], offset, t_ms, data, self.limits.max_window)
        elif kind == protocol.REPLY:
            self._reply(protocol.loads(payload))
        else:
            self._event(protocol.loads(payload))

    def _reply(self, reply: dict[str, Any]) -> None:
        number = reply.get("id")
        if type(number) is not int:
            raise Violation("a reply without a number")
        if number in self._abandoned:
            self._abandoned.discard(number)
            return
        # It stays pending until its reply proves to be one: whoever waits for it must hear at once of a violation.
        future = self._pending.get(number)
        if future is None:
            raise Violation("a reply to nothing")
        answer = check_reply(reply)
        if future.done():
            pass
        elif isinstance(answer, CorralError):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        del self._pending[number]

    def _event(self, event: dict[str, Any]) -> None:
        if event.get("event") == "ended":
            number, status = event.get("attach"), event.get("status")
            attached = self._attached.get(number) if type(number) is int else None
            if attached is None or attached.ended is not None or type(status) is not dict:
                raise Violation("an end that nobody waits for")
            told = check_status(status, attached.exec_id)
            if told["state"] not in ("ended", "failed", "lost"):
                raise Violation("an end that is none")
            if any(told["offsets"].get(name, 0) != offset for name, offset in attached.next.items()):
                raise Violation("an end before the end of the output")
            attached.ended = told
            attached.news.set()
            if (taken := self._inputs.get(attached.exec_id)) is not None:
                taken.close()
        elif event.get("event") == "stdin":
            exec_id = event.get("exec_id")
            taken = self._inputs.get(exec_id) if type(exec_id) is str else None
            if taken is None:
                raise Violation("news of an input that nobody sent")
            taken.take(*check_input(event))
        else:
            raise Violation("an unknown event")

    # -- requests ----------------------------------------------------------------------------------------------------------------
    def _ask(
        self,
        operation: str,
        values: Mapping[str, Any] | None = None,
        *,
        fence: Fence | None = None,
        payload: bytes | memoryview | None = None,
    ) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        """Send a request; its answer or its error comes through the future."""
        if len(self._pending) >= _MAX_PENDING:
            self._lose("the guest answers too little of what it is asked")
        self._number += 1
        number = self._number
        request: dict[str, Any] = {"id": number, "op": operation, **(values or {})}
        if fence is not None:
            request["fence"] = [fence.incarnation, fence.token]
        frame = (
            protocol.control(protocol.REQUEST, request) if payload is None else protocol.input_frame(request, payload)
        )
        self._send(frame)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        return number, future

    async def _request(
        self,
        operation: str,
        values: Mapping[str, Any] | None = None,
        *,
        fence: Fence | None = None,
        patience: float = 0.0,
        payload: bytes | memoryview | None = None,
    ) -> dict[str, Any]:
        """One question, one answer. Silence beyond the limit loses the guest; a cancelled caller only loses the answer."""
        number, future = self._ask(operation, values, fence=fence, payload=payload)
        return await self._answer(operation, number, future, patience)

    async def _answer(
        self, operation: str, number: int, future: asyncio.Future[dict[str, Any]], patience: float = 0.0
    ) -> dict[str, Any]:
        try:
            return await self._in_time(future, self.limits.request_s + patience)
        except TimeoutError:
            self._lose(f"the guest did not answer {operation} in time")
            raise self._error() from None
        except asyncio.CancelledError:
            if self._pending.pop(number, None) is not None and len(self._abandoned) < 10_000:
                self._abandoned.add(number)
            raise
        finally:
            self._pending.pop(number, None)

    async def _in_time(self, future: asyncio.Future[dict[str, Any]], seconds: float) -> dict[str, Any]:
        async with asyncio.timeout(None if self._frozen else seconds) as patience:
            self._patience[patience] = seconds
            try:
                return await future
            finally:
                del self._patience[patience]

    def _checked(self, check: Callable[..., Any], *values: Any) -> Any:
        try:
            return check(*values)
        except Violation as error:
            self._lose(f"the guest broke the protocol: {error}")
            raise self._error() from None

    async def identify(
        self, sandbox_id: str, fence: Fence, *, now: float, entropy: bytes, instance_id: str | None = None
    ) -> float | None:
        """Tell the guest whose it is; before this, and after `quiesce`, it serves nothing. -> seconds that its clock is ahead of `now`.

        Again for a restored one, under the instance that it is from now on: as another sandbox with any fence, as the same one with a
        fence not below the floor. What still runs in it is older than that fence.
        """
        values: dict[str, Any] = {"sandbox": sandbox_id, "now": now, "entropy": entropy.hex()}
        if instance_id is not None:
            values["instance"] = instance_id
        clock: int | None = self._checked(check_clock, await self._request("identify", values, fence=fence))
        return None if clock is None else clock / 1000 - now

    async def quiesce(self, fence: Fence) -> dict[str, int]:
        """Make the guest ready for a snapshot of its memory: nobody stands by, its file systems are synced.

        `illegal_transition` while an exec runs; nothing has changed then. Afterwards it refuses everything but `identify`, whether restored
        or not. -> `kept`: execs of which background processes are left; they go on in every copy.
        """
        answer = await self._request("quiesce", fence=fence, patience=_SYNC_S)
        numbers: dict[str, int] = self._checked(check_numbers, answer)
        return numbers

    async def fence(self, fence: Fence, mode: Literal["kill", "adopt"]) -> KillReport:
        """Raise the guest's floor; with `kill` no exec of an older fence lives on when this returns."""
        patience = _KILL_S if mode == "kill" else 0.0
        answer = await self._request("fence", {"mode": mode}, fence=fence, patience=patience)
        report: KillReport = self._checked(check_kill, answer)
        return report

    async def pause(self, fence: Fence, *, stop: bool) -> dict[str, int]:
        """The clocks of execs stand still; with `stop` the guest stops everything below it, else the host is about to freeze it.

        -> `whole` (1: nothing moves any more), `stopped`. Idempotent.
        """
        answer = await self._request("pause", {"stop": stop}, fence=fence, patience=_KILL_S)
        numbers: dict[str, int] = self._checked(check_numbers, answer)
        return numbers

    async def resume(self, fence: Fence) -> None:
        """The end of a pause: what was stopped goes on, and clocks have what they had. Without one: nothing."""
        await self._request("resume", fence=fence)

    def hold(self) -> None:
        """The guest is frozen: its silence means nothing until `release`. Questions wait for their answers as long as it takes."""
        self._frozen = True
        for patience in self._patience:
            if not patience.expired():
                patience.reschedule(None)

    def release(self) -> None:
        """It runs again: whoever asked it something waits from now on as long as they would have."""
        self._frozen = False
        self._last_seen = time.monotonic()
        now = asyncio.get_running_loop().time()
        for patience, seconds in self._patience.items():
            if not patience.expired():
                patience.reschedule(now + seconds)

    async def start_exec(self, spec: Mapping[str, Any], *, fence: Fence, follow: bool = False) -> ExecStatus:
        """At most once by `spec["exec_id"]`. Returns once main runs or certainly does not (`state == "failed"`).

        Keys: exec_id, argv [str], env {str: str}, cwd, uid?, gid? (default: the guest's --exec-uid/gid), stdin "open"|"eof" (default
        eof), pty [rows, cols] | None, umask (0o022), timeout_s? (backup), grace_s (2), rlimits {nofile, core, fsize, data, nproc, stack,
        cpu}, background "keep"|"kill" (keep), nice (5), oom_score_adj (500), seccomp bool (True).

        With `follow` the output comes at once and waits here (one window of it) for the `attach` that the caller promises.
        """
        exec_id = spec["exec_id"]
        if not follow:
            answer = await self._request("exec.start", {"spec": dict(spec)}, fence=fence)
            status: ExecStatus = self._checked(check_status, answer, exec_id)
            return status
        attached = self._follow(exec_id, dict.fromkeys(_NAMES, 0))
        values = {"spec": dict(spec), "attach": attached.number, "streams": attached.streams}
        try:
            answer = await self._request("exec.start", values, fence=fence)
            status = self._checked(check_status, answer, exec_id)
        except CorralError:
            self._forget(attached)
            raise
        except BaseException:
            self._leave(attached)
            raise
        if answer.get("attached") is True and status["state"] not in ("failed", "unknown"):
            self._ready[exec_id] = attached
        else:  # nothing to follow, a second start, or a guest of an older version
            self._forget(attached)
        return status

    async def exec_status(self, exec_id: str) -> ExecStatus:
        """What the guest knows of it; state `unknown` = it never started."""
        answer = await self._request("exec.status", {"exec_id": exec_id})
        status: ExecStatus = self._checked(check_status, answer, exec_id)
        return status

    async def attach(self, exec_id: str, offsets: Mapping[str, int] | None = None) -> AsyncIterator[Data | Ended]:
        """Output from the offsets on, then `Ended`. Bytes are acknowledged (dropped by the guest) as the consumer takes them.

        One follower per exec: a later `attach` takes over and the earlier one ends with `conflict`.
        """
        begin: dict[Stream, int] = {name: (offsets or {}).get(name, 0) for name in _NAMES}
        attached = self._ready.pop(exec_id, None)
        if attached is not None and any(begin.values()):
            self._leave(attached)
            attached = None
        follows = attached is not None
        if attached is None:
            attached = self._follow(exec_id, begin)
        try:
            if not follows:
                values = {"exec_id": exec_id, "attach": attached.number, "streams": attached.streams, "offsets": begin}
                self._checked(check_status, await self._request("exec.attach", values), exec_id)
            while True:
                while attached.queue:
                    name, offset, t_ms, data = attached.queue.popleft()
                    # What waits is taken in larger pieces, as each costs the consumer a trip to the disk.
                    while (
                        attached.queue
                        and (after := attached.queue[0])[0] == name
                        and after[2] - t_ms < _TOGETHER_MS
                        and len(data) + len(after[3]) <= _TOGETHER
                    ):
                        data += attached.queue.popleft()[3]
                    yield Data(name, offset, bytes(data), t_ms)
                    attached.taken[name] = offset + len(data)
                    self._acknowledge(attached, name, _ACK_EVERY)
                if attached.ended is not None:
                    for name in _NAMES:
                        self._acknowledge(attached, name, 1)
                    yield Ended(attached.ended)
                    return
                if self.lost_reason is not None:
                    raise self._error()
                if attached.superseded:
                    raise CorralError("conflict", "another follower of this exec took over")
                attached.news.clear()
                await attached.news.wait()
        finally:
            self._leave(attached)

    def _follow(self, exec_id: str, begin: dict[Stream, int]) -> Attached:
        """Be ready for the output of an exec, under new numbers; an earlier follower is superseded."""
        for other in self._attached.values():
            if other.exec_id == exec_id and other.ended is None:
                other.superseded = True
                other.news.set()
        self._stream_number += 2
        number = self._stream_number
        attached = Attached(number, exec_id, {"stdout": number, "stderr": number + 1}, begin)
        self._attached[number] = attached
        for name, stream in attached.streams.items():
            self._streams[stream] = (attached, name)
        return attached

    def _acknowledge(self, attached: Attached, name: Stream, least: int) -> None:
        if attached.taken[name] - attached.acked[name] >= least and self.lost_reason is None:
            self._send(protocol.ack_frame(attached.streams[name], attached.taken[name]))
            attached.acked[name] = attached.taken[name]

    def _leave(self, attached: Attached) -> None:
        attached.queue.clear()
        if attached.ended is not None or self.lost_reason is not None:
            self._forget(attached)
            return
        attached.leaving = True
        # No task waits for the answer: until it comes the streams stay known, and the keep-alive watches the guest.
        try:
            for name in attached.streams:
                self._acknowledge(attached, name, 1)
            answer = self._ask("exec.detach", {"attach": attached.number})[1]
            answer.add_done_callback(lambda done: self._detached(attached, done))
        except CorralError:
            self._forget(attached)

    def _detached(self, attached: Attached, answer: asyncio.Future[dict[str, Any]]) -> None:
        if not answer.cancelled():
            answer.exception()
        self._forget(attached)

    def _forget(self, attached: Attached) -> None:
        self._attached.pop(attached.number, None)
        for number in attached.streams.values():
            self._streams.pop(number, None)

    async def stdin(
        self, exec_id: str, data: bytes, eof: bool = False, *, fence: Fence, offset: int | None = None
    ) -> bool:
        """Hand over all of `data`, waiting while the program does not read. False = the program no longer reads.

        `offset` places the data absolutely (bytes that the guest has already are skipped); without it the data follows what was sent.
        """
        taken = self._inputs.get(exec_id)
        if taken is None:
            status = await self.exec_status(exec_id)
            known = status["stdin"]
            if known is None:
                if status["state"] == "unknown":
                    raise CorralError("not_found", "no such exec inside", field="exec_id")
                return False
            if len(self._inputs) >= _MAX_INPUTS:
                forget_closed(self._inputs, _MAX_INPUTS // 2)
            taken = self._inputs.setdefault(
                exec_id, Input(known.get("received", 0), known.get("written", 0), bool(known.get("open", 0)))
            )
        async with taken.lock:
            if offset is not None:
                skip = taken.sent - offset
                if skip < 0:
                    detail = f"standard input continues at {taken.sent}"
                    raise CorralError("bad_request", detail, field="offset", continues_at=taken.sent)
                data = data[skip:]
            return await self._feed(exec_id, taken, memoryview(data), eof, fence)

    async def _feed(self, exec_id: str, taken: Input, rest: memoryview, eof: bool, fence: Fence) -> bool:
        # Several frames are on their way at once, as far as the window allows: a busy machine makes each answer late.
        asked: deque[tuple[int, asyncio.Future[dict[str, Any]]]] = deque()
        whole = False
        try:
            while not whole:
                piece = first_piece(rest)
                while (
                    taken.reads()
                    and self.lost_reason is None
                    and taken.sent - taken.written + len(piece) > protocol.INPUT_WINDOW
                ):
                    taken.moved.clear()
                    await taken.moved.wait()
                if not taken.reads():
                    return False
                rest = rest[len(piece) :]
                whole = not rest
                values = {"exec_id": exec_id, "offset": taken.sent, "eof": eof and whole}
                asked.append(self._ask("exec.stdin", values, fence=fence, payload=piece))
                taken.sent += len(piece)
                while asked and (whole or len(asked) >= _MAX_ASKED or asked[0][1].done()):
                    answer = await self._answer("exec.stdin", *asked.popleft())
                    reads: bool = self._checked(check_input, answer)[1]
                    if eof and whole and not asked:
                        taken.open = False
                        return True
                    if not reads:
                        taken.open = False
                        return False
            return True
        finally:
            for _, unheard in asked:
                unheard.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    async def signal(self, exec_id: str, signal: int, *, fence: Fence, tree: bool = False) -> None:
        """To the main program, or with `tree` to every process of the exec."""
        await self._request("exec.signal", {"exec_id": exec_id, "signal": signal, "tree": tree}, fence=fence)

    async def resize(self, exec_id: str, rows: int, cols: int, *, fence: Fence) -> None:
        """New size of the exec's terminal."""
        await self._request("exec.resize", {"exec_id": exec_id, "rows": rows, "cols": cols}, fence=fence)

    async def kill_exec(self, exec_id: str, grace_s: float, *, fence: Fence) -> KillReport:
        """TERM to the whole tree, the grace, then rounds of KILL until none is left. Also for what an ended exec left behind."""
        values = {"exec_id": exec_id, "grace_s": grace_s}
        answer = await self._request("exec.kill", values, fence=fence, patience=grace_s + _KILL_S)
        report: KillReport = self._checked(check_kill, answer)
        return report

    def forget_exec(self, exec_id: str, *, fence: Fence) -> None:
        """Let the guest drop what it keeps of an exec that is over and that nobody will ask for or start again. Waits for nothing."""
        if (taken := self._inputs.get(exec_id)) is not None:
            taken.close()
        answer = self._ask("exec.forget", {"exec_id": exec_id}, fence=fence)[1]
        answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    async def kill_all(self, *, fence: Fence) -> KillReport:
        """End every process inside but the guest."""
        report: KillReport = self._checked(check_kill, await self._request("kill_all", fence=fence, patience=_KILL_S))
        return report

    async def usage(self) -> dict[str, int]:
        """processes, rss_bytes, execs, known_execs, uptime_ms: a convenience, not a measurement."""
        numbers: dict[str, int] = self._checked(check_numbers, await self._request("usage"))
        return numbers

    async def extend_deadline(self, seconds: float, *, fence: Fence) -> None:
        """The dead man's switch now fires `seconds` from now."""
        await self._request("deadline", {"seconds": seconds}, fence=fence)

    async def ping(self) -> float:
        """Round trip in seconds."""
        begun = time.monotonic()
        await self._request("ping")
        return time.monotonic() - begun

    async def shutdown(self, *, fence: Fence) -> None:
        """Ask PID 1 to end everything and exit."""
        await self._request("shutdown", fence=fence)
