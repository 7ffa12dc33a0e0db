"""One `GuestClient` against the model guest, or against a recorded conversation with broken bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corral.channel import ChannelLimits, Data, Ended, GuestClient
from corral.channel import client as client_module
from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.guest import protocol

from . import twists
from .clock import Broken, Time, VirtualLoop, conduct, replaced
from .guest import ModelGuest
from .tape import Case, Tape

FENCE = Fence(1, 1)
CODES = frozenset(
    {
        "guest_lost",
        "lease_lost",
        "not_found",
        "cursor_gone",
        "illegal_transition",
        "bad_request",
        "conflict",
        "infra_error",
    }
)
LIMITS = ChannelLimits()
RECORDED = Path(__file__).parent / "recorded"
MOST_STEPS = 40
SLACK_S = 1.0
QUIET_S = 120.0


@dataclass
class Call:
    """One call of the host and how long it may take; None = as long as the exec."""

    what: str
    task: asyncio.Task[Any]
    within_s: float | None
    cancelled: bool = False


class Host:
    """What a node does with a client, in any order, with everything checked that comes back."""

    def __init__(self, loop: VirtualLoop, guest: Any) -> None:
        self.loop = loop
        self.guest = guest
        self.client: GuestClient | None = None
        self.calls: list[Call] = []
        self.began: list[str] = []
        self.ended: set[str] = set()

    async def connect(self) -> None:
        """Over a pair of sockets; a guest that says no hello is lost, in time."""
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        await self.guest.over(theirs)
        call = self._call("connect", GuestClient.connect(ours, limits=LIMITS), LIMITS.connect_s)
        await asyncio.wait([call.task])
        if call.task.exception() is None:
            self.client = call.task.result()

    def _call(self, what: str, work: Coroutine[Any, Any, Any], within_s: float | None) -> Call:
        call = Call(what, asyncio.create_task(self._timed(what, work, within_s)), within_s)
        call.task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        self.calls.append(call)
        return call

    async def _timed(self, what: str, work: Coroutine[Any, Any, Any], within_s: float | None) -> Any:
        began = self.loop.now
        try:
            return await work
        finally:
            if within_s is not None and self.loop.now - began > within_s + SLACK_S:
                raise Broken(f"{what} took {self.loop.now - began:.1f} s of at most {within_s}")

    async def settle(self) -> None:
        """Everything that can happen now."""
        for _ in range(8):
            await asyncio.sleep(0)

    # -- steps -----------------------------------------------------------------------------------------------------------------
    async def step(self, tape: Tape) -> None:
        """One more call, a pause, or a caller that gives up."""
        client = self.client
        assert client is not None
        name = tape.choose(self.began) if self.began else "exe_none"
        request = LIMITS.request_s
        kind = tape.below(18)
        if kind in (0, 1, 2):
            self._start(tape)
        elif kind in (3, 4):
            self._call(f"attach {name}", self._attach(name, tape.choose((0.0, 0.0, 0.5, 3.0)), None), None)
        elif kind == 5:
            self._call(f"attach {name}", self._attach(name, 0.0, {"stdout": tape.upto(300), "stderr": 0}), None)
        elif kind in (6, 7):
            data = b"i" * tape.choose((0, 1, 1000, 65537, 300_000))
            offset = tape.choose((None, None, 0, 5))
            work = client.stdin(name, data, tape.below(2) == 1, fence=FENCE, offset=offset)
            self._call(f"stdin {name}", work, None)
        elif kind == 8:
            self._call("status", client.exec_status(name), request)
        elif kind == 9:
            grace = float(tape.below(4))
            self._call("kill", client.kill_exec(name, grace, fence=FENCE), request + 12 + grace)
        elif kind == 10:
            self._call("usage", client.usage(), request)
        elif kind == 11:
            self._call("ping", client.ping(), request)
        elif kind == 12:
            self._call("signal", client.signal(name, 15, fence=FENCE), request)
        elif kind == 13:
            self._call("kill_all", client.kill_all(fence=FENCE), request + 12)
        elif kind == 14:
            work_: Any = client.fence(FENCE, "kill" if tape.below(2) else "adopt")
            self._call("fence", work_, request + 12)
        elif kind == 15:
            try:
                client.forget_exec(name, fence=FENCE)
            except CorralError as error:
                self._refused("forget", error)
        elif kind == 16:
            open_ = [call for call in self.calls if not call.task.done()]
            if open_:
                call = tape.choose(open_)
                call.cancelled = True
                call.task.cancel()
        elif kind == 17:
            await asyncio.sleep(tape.choose((0.01, 1.0, 11.0, 40.0)))
        if tape.below(4) < 3:
            await self.settle()
        self.look()

    def _start(self, tape: Tape) -> None:
        client = self.client
        assert client is not None
        name = f"exe_{len(self.began)}"
        self.began.append(name)
        sizes = (0, 5, 4096, 70_000, 1_500_000)
        argv = tape.choose(
            (
                ["say", str(tape.choose(sizes)), str(tape.choose(sizes[:3])), "0"],
                ["cat"],
                ["later", str(tape.choose((0.1, 5, 100)))],
                ["wait"],
                ["cannot"],
            )
        )
        spec = {"exec_id": name, "argv": argv, "stdin": "open" if argv == ["cat"] else "eof"}
        self._call(f"start {name}", self._start_and_follow(client, spec, tape.below(3) > 0), None)

    async def _start_and_follow(self, client: GuestClient, spec: dict[str, Any], follow: bool) -> None:
        status = await client.start_exec(spec, fence=FENCE, follow=follow)
        if status["exec_id"] != spec["exec_id"]:
            raise Broken("the status of another exec")
        if follow and status["state"] != "failed":
            await self._attach(spec["exec_id"], 0.0, None)

    async def _attach(self, name: str, pause_s: float, offsets: dict[str, int] | None) -> None:
        assert self.client is not None
        at = {"stdout": 0, "stderr": 0, **(offsets or {})}
        taken = 0
        async for item in self.client.attach(name, offsets):
            if isinstance(item, Ended):
                self.guest.check_end(name, item.status)
                self.ended.add(name)
                return
            assert isinstance(item, Data)
            if item.offset != at[item.stream]:
                raise Broken(f"{item.stream} at {item.offset} instead of {at[item.stream]}")
            self.guest.check_data(name, item.stream, item.offset, item.data)
            at[item.stream] += len(item.data)
            taken += 1
            if pause_s and taken < 20:
                await asyncio.sleep(pause_s)
        raise Broken("the output ended without an end")

    # -- judging ---------------------------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Nothing that a guest sends is held without a bound."""
        client = self.client
        if client is None:
            return
        held = len(client._decoder._buffer)
        if held > 512 * 1024:
            raise Broken(f"{held} bytes of an unfinished frame")
        for attached in client._attached.values():
            size = sum(len(piece[3]) for piece in attached.queue)
            if size > 2 * LIMITS.max_window or len(attached.queue) > 2100:
                raise Broken(f"{size} bytes in {len(attached.queue)} pieces wait for one follower")
        for name, most in (("_pending", 2000), ("_abandoned", 10_000), ("_attached", 1000), ("_inputs", 1100)):
            if len(getattr(client, name)) > most:
                raise Broken(f"{len(getattr(client, name))} in {name}")

    async def finish(self) -> None:
        """After a while every question has been answered or the guest is lost; after the end nothing waits."""
        await asyncio.sleep(QUIET_S)
        late = [call.what for call in self.calls if call.within_s is not None and not call.task.done()]
        late += [
            call.what for call in self.calls if not call.task.done() and call.what.removeprefix("stdin ") in self.ended
        ]
        if late:
            raise Broken(f"still waiting: {late}")
        self.look()
        if self.client is not None:
            await self.client.close()
        await asyncio.sleep(61)
        for call in self.calls:
            if not call.task.done():
                raise Broken(f"{call.what} waits after the client was closed")
            if call.task.cancelled():
                if not call.cancelled:
                    raise Broken(f"{call.what} was cancelled by nobody")
                continue
            error = call.task.exception()
            if isinstance(error, CorralError):
                self._refused(call.what, error)
            elif error is not None:
                raise error
        if self.client is not None:
            for name in ("_pending", "_streams", "_ready", "_attached"):
                if getattr(self.client, name):
                    raise Broken(f"{name} holds {len(getattr(self.client, name))} after the close")

    def _refused(self, what: str, error: CorralError) -> None:
        if error.code not in CODES:
            raise Broken(f"{what} ended with {error.code}")
        check_words(what, error)


def check_words(what: str, error: CorralError) -> None:
    """An error's words can be stored, sent and shown, and are not endless."""
    for text in (
        error.detail,
        error.field or "",
        error.hint or "",
        *(v for v in error.facts.values() if isinstance(v, str)),
    ):
        if len(text) > 4200:
            raise Broken(f"{what} ended with {len(text)} characters")
        check_text(what, text)


def check_text(what: str, text: str) -> None:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise Broken(f"{what} tells what is no text: {text[:60]!r}") from None


class JudgingGuest(ModelGuest):
    """The model guest, which knows what it really said."""

    def check_end(self, name: str, status: Any) -> None:
        if status["state"] == "ended":
            told = self.said.ends.get(name, [])
            if not any(s.get("exit_code") == status["exit_code"] and s.get("signal") == status["signal"] for s in told):
                raise Broken(f"an end that was never told: {status}")

    def check_data(self, name: str, stream: str, offset: int, data: bytes) -> None:
        at = 0
        while at < len(data):
            for begin, piece in self.said.data.get((name, stream), []):
                inside = offset + at - begin
                if 0 <= inside < len(piece):
                    same = piece[inside : inside + len(data) - at]
                    if data[at : at + len(same)] == same:
                        at += len(same)
                        break
            else:
                raise Broken(f"{stream} at {offset + at} was never sent")


def run(case: Case) -> VirtualLoop:
    """Target `channel`: the model guest."""
    return _run(case, lambda loop: JudgingGuest(loop, Tape(case.guest), "ins_x"))


def _run(case: Case, make: Callable[[VirtualLoop], Any], script: Callable[[Host], Any] | None = None) -> VirtualLoop:
    guest: Any = None

    async def play(loop: VirtualLoop) -> None:
        nonlocal guest
        guest = make(loop)
        host = Host(loop, guest)
        tape = Tape(case.host)
        try:
            with replaced(clock=(client_module, "time", Time(loop))):
                await host.connect()
                if host.client is not None:
                    if script is not None:
                        await script(host)
                    steps = 0
                    while not tape.over and steps < MOST_STEPS:
                        steps += 1
                        await host.step(tape)
                await host.finish()
        finally:
            guest.end()
        await asyncio.sleep(0)
        if guest.broken:
            raise Broken(guest.broken)

    return conduct(play)


# -- recorded conversations ----------------------------------------------------------------------------------------------------
class Recorded(asyncio.Protocol):
    """Says what a real guest once said, at the same points of the conversation, with some bytes changed."""

    def __init__(self, loop: VirtualLoop, tape: Tape, parts: list[tuple[int, bytes]]) -> None:
        self.loop = loop
        self.transport: Any = None
        self.broken: str | None = None
        self.log: list[str] = []
        self._decoder = protocol.Decoder({kind: 16 << 20 for kind in range(1, 9)})
        self._frames = 0
        self._parts = _spoilt(parts, tape, self.log)

    async def over(self, sock: socket.socket) -> None:
        await self.loop.create_unix_connection(lambda: self, sock=sock)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._frames += len(self._decoder.feed(data))
        while self._parts and self._parts[0][0] <= self._frames:
            self.transport.write(self._parts.pop(0)[1])

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def check_end(self, name: str, status: Any) -> None: ...

    def check_data(self, name: str, stream: str, offset: int, data: bytes) -> None: ...


def _spoilt(parts: list[tuple[int, bytes]], tape: Tape, log: list[str]) -> list[tuple[int, bytes]]:
    """The frames of a recording, a few of them broken; frames of the whole recording may be put in elsewhere."""
    frames = list(parts)
    for _ in range(12):
        if tape.over or not frames:
            break
        at = tape.upto(len(frames) - 1)
        after, raw = frames[at]
        kind = tape.below(9)
        log.append(f"{kind} at frame {at}")
        head, payload = raw[4] if len(raw) > 4 else 0, raw[5:]
        if kind < 3:
            frames[at] = (after, twists.misframed(head, payload, tape))
        elif kind == 3:
            frames[at] = (after, twists.HEADER.pack(len(body := twists.garbled(payload, tape)), head) + body)
        elif kind in (4, 5) and head != protocol.DATA and payload[:1] == b"{":
            try:
                body = twists.dumps(twists.twisted(json.loads(payload), tape))
            except (ValueError, RecursionError, UnicodeEncodeError):
                continue
            frames[at] = (after, twists.HEADER.pack(len(body), head) + body)
        elif kind == 6:
            frames.insert(at, (after, tape.choose(parts)[1]))
        elif kind == 7:
            del frames[at]
        else:
            other = tape.upto(len(frames) - 1)
            frames[at], frames[other] = (after, frames[other][1]), (frames[other][0], raw)
    return frames


def recordings() -> dict[str, tuple[list[dict[str, Any]], list[tuple[int, bytes]]]]:
    """name -> (what the host did, what the guest said after how many frames)."""
    found = {}
    for path in sorted(RECORDED.glob("*.json")):
        told = json.loads(path.read_text())
        found[path.stem] = (told["host"], [(after, bytes.fromhex(raw)) for after, raw in told["guest"]])
    return found


def replay(case: Case) -> VirtualLoop:
    """Target `bytes`: a recording, by the host's tape, with bytes changed by the guest's."""
    known = recordings()
    tape = Tape(case.host)
    steps, parts = known[tape.choose(sorted(known))]

    async def script(host: Host) -> None:
        assert host.client is not None
        for step in steps:
            await perform(host, step)
            await host.settle()

    return _run(Case(case.target, b"", case.guest), lambda loop: Recorded(loop, Tape(case.guest), parts), script)


async def perform(host: Host, step: dict[str, Any]) -> None:
    """One step of a recorded conversation, by the words of its file."""
    client = host.client
    assert client is not None
    do, name = step["do"], step.get("exec", "")
    works: dict[str, Callable[[], Any]] = {
        "identify": lambda: client.identify("sbx_test", FENCE, now=1.0, entropy=bytes(32)),
        "ping": client.ping,
        "usage": client.usage,
        "start": lambda: host._start_and_follow(client, step["spec"], step["follow"]),
        "attach": lambda: host._attach(name, 0.0, None),
        "stdin": lambda: client.stdin(name, step["data"].encode(), step["eof"], fence=FENCE),
        "status": lambda: client.exec_status(name),
        "signal": lambda: client.signal(name, 15, fence=FENCE),
        "kill": lambda: client.kill_exec(name, 0.5, fence=FENCE),
        "fence": lambda: client.fence(FENCE, "kill"),
        "kill_all": lambda: client.kill_all(fence=FENCE),
    }
    host._call(do, works[do](), None)
