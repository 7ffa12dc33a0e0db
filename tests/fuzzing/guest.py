"""A model of a guest that does right until its tape says otherwise; and what it said, for those who judge the host by it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

from corral.guest import protocol

from . import programs, twists
from .clock import VirtualLoop
from .tape import Tape

LIMITS = {
    protocol.HELLO: 1 << 20,
    protocol.REQUEST: 16 << 20,
    protocol.INPUT: 1 << 20,
    protocol.ACK: 64,
}
LATER = (0.001, 0.5, 5.0, 30.0, 200.0)
STREAMS = ("stdout", "stderr")


class Run:
    """One exec inside: what it says, and whether a process of it lives."""

    def __init__(self, spec: dict[str, Any], now: float) -> None:
        self.spec = spec
        self.exec_id: str = spec["exec_id"]
        self.began = now
        self.out = {"stdout": bytearray(), "stderr": bytearray()}
        self.state = "running"
        self.code: int | None = None
        self.signal: int | None = None
        self.failure: dict[str, str] | None = None
        self.ended_by: str | None = None
        self.alive = True
        """Whether the host sees a process of it."""
        self.input = bytearray()
        self.open = spec.get("stdin") == "open"
        self.on_input: Any = None

    def end(self, code: int | None, signal: int | None = None, why: str | None = None) -> None:
        if self.state == "running":
            self.state, self.code, self.signal, self.ended_by = "ended", code, signal, why
            self.alive = self.open = False

    def status(self) -> dict[str, Any]:
        return {
            "exec_id": self.exec_id, "state": self.state, "started": self.state != "failed", "exit_code": self.code, "signal": self.signal,
            "failure": self.failure, "started_ms": 1, "ended_ms": None if self.state == "running" else 2, "utime_ms": 0, "stime_ms": 0,
            "maxrss_kib": 0, "ended_by": self.ended_by, "killed": 0, "killed_all": True, "background": 0,
            "offsets": {name: len(data) for name, data in self.out.items()},
            "stdin": self.taken() if self.spec.get("stdin") == "open" else None, "already": False,
        }  # fmt: skip

    def taken(self) -> dict[str, int]:
        return {"received": len(self.input), "written": len(self.input), "open": int(self.open)}


class Follower:
    """One attach on one connection."""

    def __init__(self, run: Run, number: int, streams: dict[str, int], offsets: dict[str, int]) -> None:
        self.run = run
        self.number = number
        self.streams = streams
        self.sent = dict(offsets)
        self.acked = dict(offsets)
        self.told = False


class Said:
    """What went over the wire to the host, understood without the host's code: the judge of what the host may believe."""

    def __init__(self) -> None:
        self.ends: dict[str, list[dict[str, Any]]] = {}
        """exec id -> every status of it that says `ended`."""
        self.data: dict[tuple[str, str], list[tuple[int, bytes]]] = {}

    def hear(self, raw: bytearray, names: dict[int, tuple[str, str]]) -> None:
        """Take the whole frames from the front of `raw`; `names` = what the host's stream numbers stand for."""
        while len(raw) >= 5:
            length, kind = struct.unpack_from(">IB", raw)
            if len(raw) < 5 + length:
                return
            payload = bytes(raw[5 : 5 + length])
            del raw[: 5 + length]
            if kind == protocol.DATA and length > 16:
                stream, offset, _ = struct.unpack_from(">IQI", payload)
                if stream in names:
                    self.data.setdefault(names[stream], []).append((offset, payload[16:]))
            elif kind in (protocol.REPLY, protocol.EVENT):
                try:
                    value = json.loads(payload)
                except (ValueError, RecursionError):
                    continue
                for status in (value.get("ok"), value.get("status")) if isinstance(value, dict) else ():
                    if (
                        isinstance(status, dict)
                        and status.get("state") == "ended"
                        and isinstance(status.get("exec_id"), str)
                    ):
                        self.ends.setdefault(status["exec_id"], []).append(status)

    def ended_well(self, exec_id: str) -> bool:
        return any(
            s.get("exit_code") == 0 and type(s["exit_code"]) is int and s.get("signal") is None
            for s in self.ends.get(exec_id, [])
        )

    def sent(self, exec_id: str, stream: str, output: bytes) -> bool:
        """Whether `output` is made of bytes that were sent for this stream at these places."""
        at = 0
        pieces = self.data.get((exec_id, stream), [])
        while at < len(output):
            best = 0
            for offset, data in pieces:
                if offset <= at < offset + len(data):
                    best = max(best, shared(data[at - offset :], output[at:]))
            if best == 0:
                return False
            at += best
        return True


def shared(one: bytes, other: bytes) -> int:
    """How many bytes both begin with; megabytes in no time, as this looks on while the host's time is taken."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Link(asyncio.Protocol):
    """One connection: frames in, frames out by way of what the tape does to them."""

    def __init__(self, guest: ModelGuest) -> None:
        self.guest = guest
        self.tape = guest.tape
        self.transport: Any = None
        self.decoder = protocol.Decoder(LIMITS)
        self.followers: dict[int, Follower] = {}
        self.names: dict[int, tuple[str, str]] = {}
        self.heard = bytearray()
        self.held: list[bytes] = []
        self.history: list[bytes] = []
        self.lost = False
        self.silent = False
        self.tiny = 0
        self.windows = True

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.guest.links.append(self)

    def data_received(self, data: bytes) -> None:
        with self.guest.loop.elsewhere():
            try:
                for kind, payload in self.decoder.feed(data):
                    self.guest.handle(self, kind, payload)
            except protocol.ProtocolError as error:
                self.guest.broken = f"the host sent what is no frame: {error}"

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True

    # -- out -------------------------------------------------------------------------------------------------------------------
    def raw(self, data: bytes) -> None:
        if self.transport.is_closing() or self.silent:
            return
        self.guest.bytes_sent += len(data)
        if self.guest.bytes_sent > programs.MOST:
            return
        self.heard += data
        self.guest.said.hear(self.heard, self.names)
        self.transport.write(data)

    def emit(self, kind: int, value: dict[str, Any] | None, payload: bytes = b"") -> None:
        """One honest frame, or what becomes of it."""
        if value is not None:
            payload = twists.dumps(value)
        choice = self.tape.byte()
        if choice < 180:
            self._out(twists.HEADER.pack(len(payload), kind) + payload)
            return
        act = (choice - 180) % len(_ACTS)
        self.guest.log.append(f"{_ACTS[act].__name__.strip('_')} {kind} {payload[:60]!r}")
        _ACTS[act](self, kind, value, payload)

    def _out(self, frame: bytes) -> None:
        self.raw(frame)
        self.history = [*self.history[-15:], frame[:70000]]
        held, self.held = self.held, []
        for one in held:
            self.raw(one)

    def later(self, seconds: float, frame: bytes) -> None:
        self.guest.timers.append(self.guest.loop.call_later(seconds, self.raw, frame))


# -- what may become of a frame ------------------------------------------------------------------------------------------------
def _twist(link: Link, kind: int, value: Any, payload: bytes) -> None:
    if value is None:
        _misframe(link, kind, value, payload)
        return
    for _ in range(1 + link.tape.below(3)):
        value = twists.twisted(value, link.tape) if isinstance(value, dict) and not _has_raw(value) else value
    body = twists.dumps(value)
    link._out(twists.HEADER.pack(len(body), kind) + body)


def _has_raw(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return True
    return False


def _garble(link: Link, kind: int, value: Any, payload: bytes) -> None:
    if value is None:
        _misframe(link, kind, value, payload)
        return
    body = twists.garbled(payload, link.tape)
    link._out(twists.HEADER.pack(len(body), kind) + body)


def _misframe(link: Link, kind: int, value: Any, payload: bytes) -> None:
    link._out(twists.misframed(kind, payload, link.tape))


def _drop(link: Link, kind: int, value: Any, payload: bytes) -> None:
    pass


def _twice(link: Link, kind: int, value: Any, payload: bytes) -> None:
    link._out((twists.HEADER.pack(len(payload), kind) + payload) * 2)


def _hold(link: Link, kind: int, value: Any, payload: bytes) -> None:
    link.held.append(twists.HEADER.pack(len(payload), kind) + payload)


def _late(link: Link, kind: int, value: Any, payload: bytes) -> None:
    link.later(link.tape.choose(LATER), twists.HEADER.pack(len(payload), kind) + payload)


def _again(link: Link, kind: int, value: Any, payload: bytes) -> None:
    link._out(twists.HEADER.pack(len(payload), kind) + payload)
    if link.history:
        link.raw(link.tape.choose(link.history))


def _inject(link: Link, kind: int, value: Any, payload: bytes) -> None:
    for _ in range(1 + link.tape.below(3)):
        link.raw(twists.unasked(link.guest.instance_id, list(link.guest.runs), link.tape))
    link._out(twists.HEADER.pack(len(payload), kind) + payload)


def _renumber(link: Link, kind: int, value: Any, payload: bytes) -> None:
    if kind == protocol.DATA:
        stream, offset, t_ms, data = protocol.split_data(payload)
        change = link.tape.below(5)
        stream += link.tape.choose((0, 1, -1, 2)) if change == 0 else 0
        offset += link.tape.choose((1, -1, 65536, 2**40)) if change == 1 else 0
        t_ms = link.tape.choose((0, 2**32 - 1)) if change == 2 else t_ms
        data = data * 2 if change == 3 else data[: max(1, len(data) // 2)] if change == 4 else data
        link._out(protocol.data_frame(max(0, stream), max(0, offset), t_ms, data[: protocol.MAX_DATA + 1]))
    elif kind == protocol.REPLY and value is not None:
        body = twists.dumps({**value, "id": value["id"] + link.tape.choose((1, -1, 2, -2, 10, 2**40))})
        link._out(twists.HEADER.pack(len(body), kind) + body)
    else:
        _twist(link, kind, value, payload)


def _refuse(link: Link, kind: int, value: Any, payload: bytes) -> None:
    if kind != protocol.REPLY or value is None:
        _twist(link, kind, value, payload)
        return
    code = link.tape.choose(
        (
            "not_found",
            "lease_lost",
            "cursor_gone",
            "illegal_transition",
            "bad_request",
            "conflict",
            "infra_error",
            "store_error",
        )
    )
    detail = link.tape.choose(("", "no", "\ud800", "x" * 1000, "x" * 1001, "\x1b]0;title\x07"))
    body = twists.dumps(
        {
            "id": value["id"],
            "error": {"code": code, "detail": detail, "field": link.tape.choose((None, "/x", "x" * 101, 7))},
        }
    )
    link._out(twists.HEADER.pack(len(body), kind) + body)


def _lie(link: Link, kind: int, value: Any, payload: bytes) -> None:
    """A frame that is in order and untrue."""
    status = value.get("ok", value.get("status")) if value is not None else None
    if not isinstance(status, dict) or "state" not in status:
        if isinstance(status, dict) and "killed_all" in status:
            status = {"killed_all": link.tape.below(2) == 0, "killed": link.tape.upto(1000)}
            value = {**value, "ok": status}
            payload = twists.dumps(value)
        link._out(twists.HEADER.pack(len(payload), kind) + payload)
        return
    state = link.tape.choose(("ended", "failed", "lost", "unknown", "running", "starting"))
    status = {
        **status,
        "state": state,
        "started": state != "failed",
        "exit_code": 0 if state == "ended" else None,
        "signal": None,
    }
    if state == "failed":
        status["failure"] = {
            "what": link.tape.choose(("argv", "cwd", "user", "platform")),
            "errno": "ENOENT",
            "message": link.tape.choose(("no", "\ud800", "x" * 1000)),
        }
    status["ended_by"] = link.tape.choose((None, None, "timeout", "kill", "fence", "deadline"))
    status["killed_all"] = link.tape.below(3) != 1
    status["background"] = link.tape.choose((0, 0, 1, 2**31 - 1))
    if link.tape.below(3) == 1:
        status["offsets"] = {"stdout": link.tape.upto(70000), "stderr": 0}
    body = twists.dumps({**value, ("ok" if "ok" in value else "status"): status})
    link._out(twists.HEADER.pack(len(body), kind) + body)


def _silence(link: Link, kind: int, value: Any, payload: bytes) -> None:
    if link.tape.below(2):
        link.raw(twists.HEADER.pack(len(payload), kind) + payload[: len(payload) // 2])
    link.silent = True


def _hang_up(link: Link, kind: int, value: Any, payload: bytes) -> None:
    if link.tape.below(2):
        link._out(twists.HEADER.pack(len(payload), kind) + payload)
    if link.tape.below(2):
        link.transport.abort()
    else:
        link.transport.close()


def _crumbs(link: Link, kind: int, value: Any, payload: bytes) -> None:
    link.tiny = 200 + link.tape.upto(4000)
    link._out(twists.HEADER.pack(len(payload), kind) + payload)


def _flood(link: Link, kind: int, value: Any, payload: bytes) -> None:
    """More than the window allows."""
    link.windows = False
    for run in link.guest.runs.values():
        if run.state == "running":
            run.out[link.tape.choose(STREAMS)] += b"f" * (link.tape.below(64) << 16)
    link._out(twists.HEADER.pack(len(payload), kind) + payload)


def _large(link: Link, kind: int, value: Any, payload: bytes) -> None:
    """As large as a frame may be, or by one larger."""
    room = 65536 - len(payload) - len(b',"pad":""') + link.tape.choose((0, 1, -1))
    body = (
        payload[:-1] + b',"pad":"' + b"p" * max(0, room) + b'"}'
        if value is not None
        else payload + b"p" * (65536 + 16 - len(payload))
    )
    link._out(twists.HEADER.pack(len(body), kind) + body)


_ACTS = (
    _twist, _garble, _misframe, _drop, _twice, _hold, _late, _again, _inject, _renumber, _refuse, _lie, _silence, _hang_up, _crumbs, _flood, _large,
    _twist, _lie,
)  # fmt: skip


class ModelGuest:
    """The inside of one instance, over any number of connections."""

    def __init__(self, loop: VirtualLoop, tape: Tape, instance_id: str) -> None:
        self.loop = loop
        self.tape = tape
        self.instance_id = instance_id
        self.links: list[Link] = []
        self.runs: dict[str, Run] = {}
        self.said = Said()
        self.log: list[str] = []
        self.broken: str | None = None
        self.floor = [1, 1]
        self.identified = False
        self.bytes_sent = 0
        self.gone = asyncio.Event()
        self.timers: list[asyncio.TimerHandle] = []
        self.server: asyncio.Server | None = None
        self.counts: dict[str, int] = {}
        """Starts by exec id: code starts at most once."""
        self.workspace: str | None = None
        """Where its programs write on the host, if they do."""

    async def listen(self, listener: socket.socket) -> None:
        self.server = await self.loop.create_unix_server(lambda: Link(self), sock=listener)

    async def over(self, sock: socket.socket) -> None:
        """Serve this one connection."""
        await self.loop.create_unix_connection(lambda: Link(self), sock=sock)

    def end(self) -> None:
        """PID 1 dies, everything with it."""
        self.gone.set()
        for run in self.runs.values():
            run.alive = False
        for timer in self.timers:
            timer.cancel()
        for link in self.links:
            if not link.lost:
                link.transport.abort()
        if self.server is not None:
            self.server.close()

    # -- in --------------------------------------------------------------------------------------------------------------------
    def handle(self, link: Link, kind: int, payload: bytes) -> None:
        if kind == protocol.HELLO:
            link.emit(protocol.HELLO, self._hello())
        elif kind == protocol.ACK:
            number, offset = protocol.split_ack(payload)
            for follower in link.followers.values():
                for name, stream in follower.streams.items():
                    if stream == number:
                        follower.acked[name] = max(follower.acked[name], offset)
            self.pump()
        else:
            request, data = protocol.split_input(payload) if kind == protocol.INPUT else (protocol.loads(payload), b"")
            answer = self._serve(link, request, data)
            link.emit(protocol.REPLY, {"id": request["id"], **answer})
            self.pump()

    def _hello(self) -> dict[str, Any]:
        return {
            "versions": [1, 1], "version": 1, "guest": "0.1.0", "instance": self.instance_id, "installation": "", "identified": self.identified,
            "capabilities": {"subreaper": 1, "pidfd": 1, "pid1": 1}, "sandbox": "", "floor": self.floor,
        }  # fmt: skip

    def _serve(self, link: Link, request: dict[str, Any], data: bytes) -> dict[str, Any]:
        operation = request["op"]
        if operation == "identify":
            self.identified, self.floor = True, request["fence"]
            return {"ok": {"floor": self.floor}}
        if operation in ("kill_all", "fence"):
            self.floor = max(self.floor, request["fence"])
            if request.get("mode") != "adopt":
                for run in self.runs.values():
                    self._kill(run, "fence")
            return {"ok": {"killed_all": True, "killed": 0}}
        if operation == "exec.start":
            return self._start(link, request)
        if operation.startswith("exec."):
            return self._about(link, operation, request, data)
        return {
            "ok": {"processes": 1, "uptime_ms": 5}
            if operation == "usage"
            else {"now_ms": 5}
            if operation == "ping"
            else {}
        }

    def _start(self, link: Link, request: dict[str, Any]) -> dict[str, Any]:
        spec = request["spec"]
        self.counts[spec["exec_id"]] = self.counts.get(spec["exec_id"], 0) + 1
        known = self.runs.get(spec["exec_id"])
        if known is not None:
            return {"ok": {**known.status(), "already": True}}
        run = self.runs[spec["exec_id"]] = Run(spec, self.loop.now)
        programs.begin(self, run)
        answer = run.status()
        if run.state != "failed" and "attach" in request:
            self._follow(link, run, request, dict.fromkeys(STREAMS, 0))
            answer["attached"] = True
        return {"ok": answer}

    def _follow(self, link: Link, run: Run, request: dict[str, Any], offsets: dict[str, int]) -> None:
        follower = Follower(run, request["attach"], request["streams"], offsets)
        link.followers[follower.number] = follower
        for name, stream in follower.streams.items():
            link.names[stream] = (run.exec_id, name)

    def _about(self, link: Link, operation: str, request: dict[str, Any], data: bytes) -> dict[str, Any]:
        if operation == "exec.detach":
            link.followers.pop(request["attach"], None)
            return {"ok": {}}
        run = self.runs.get(request["exec_id"])
        if operation == "exec.forget":
            return {"ok": {}}
        if run is None:
            if operation == "exec.status":
                return {"ok": {"exec_id": request["exec_id"], "state": "unknown", "started": False}}
            return {"error": {"code": "not_found", "detail": "no such exec", "field": "exec_id"}}
        if operation == "exec.attach":
            self._follow(link, run, request, request["offsets"])
        elif operation == "exec.stdin":
            return {"ok": self._input(link, run, request, data)}
        elif operation == "exec.signal":
            self._kill(run, None, request["signal"])
        elif operation == "exec.kill":
            self._kill(run, "kill")
            return {"ok": {"killed_all": True, "killed": 1}}
        return {"ok": run.status()}

    def _kill(self, run: Run, why: str | None, signal: int = 9) -> None:
        # A guest that only says so is the one that has to be found out.
        if self.tape.byte() >= 200:
            self.log.append("does not kill")
            run.state, run.signal, run.ended_by = "ended", signal, why
        else:
            run.end(None, signal, why)
            run.alive = False

    def _input(self, link: Link, run: Run, request: dict[str, Any], data: bytes) -> dict[str, Any]:
        fresh = data[max(0, len(run.input) - request["offset"]) :]
        if self.tape.byte() >= 220:
            self.log.append("takes no input")
            return {"received": len(run.input) + len(fresh), "written": len(run.input), "open": run.open}
        if run.open:
            run.input += fresh
            if request.get("eof"):
                run.open = False
            if run.on_input is not None:
                run.on_input(fresh, not run.open)
        taken = {"written": len(run.input), "open": run.open}
        link.emit(protocol.EVENT, {"event": "stdin", "exec_id": run.exec_id, **taken})
        return {"received": len(run.input), **taken}

    # -- output ----------------------------------------------------------------------------------------------------------------
    def pump(self) -> None:
        """Send what the windows allow, and the ends."""
        for link in self.links:
            for follower in list(link.followers.values()):
                self._pump(link, follower)

    def _pump(self, link: Link, follower: Follower) -> None:
        run = follower.run
        if follower.told or link.transport.is_closing():
            return
        for name, stream in follower.streams.items():
            out = run.out[name]
            while (at := follower.sent[name]) < len(out) and (
                not link.windows or at - follower.acked[name] < protocol.WINDOW
            ):
                size = protocol.MAX_DATA
                if link.tiny > 0:
                    link.tiny -= 1
                    size = 1
                piece = bytes(out[at : at + size])
                follower.sent[name] = at + len(piece)
                link.emit(
                    protocol.DATA,
                    None,
                    struct.pack(">IQI", stream, at, int((self.loop.now - run.began) * 1000) & 0xFFFFFFFF) + piece,
                )
                if self.bytes_sent > programs.MOST:
                    return
        if run.state != "running" and all(follower.sent[name] >= len(run.out[name]) for name in STREAMS):
            follower.told = True
            link.emit(protocol.EVENT, {"event": "ended", "attach": follower.number, "status": run.status()})
