"""A runtime without a sandbox: a scripted guest in this process, for tests of everything above the runtime port.

It speaks the guest protocol over the control socket (an implementation of its own) and plays a few programs instead of running any:

    true | false | exit N | die SIGNAL       end at once
    echo WORD… | error WORD…                 words and a newline on stdout or stderr
    cat                                      stdin to stdout
    flood BYTES | lines COUNT                much output; `line 0` … on both streams in turn
    sleep SECONDS | stubborn                 wait; `stubborn` ignores TERM
    write PATH TEXT                          a file under the workspace
    oom | crash                              die by 9 with the counter risen; take the whole sandbox down

Level 0 and never the default: it isolates nothing, because nothing foreign ever runs. An instance lives as long as this object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import struct
import time
from collections.abc import Callable, Coroutine
from typing import Any

from corral.domain.limits import LimitModes
from corral.errors import CorralError
from corral.linux import sockets
from corral.ports.runtime import Evidence, HostTree, Instance, InstanceRef, InstanceSpec, RuntimeInfo, Stats

HELLO, REQUEST, REPLY, EVENT, DATA, ACK, INPUT = 1, 2, 3, 4, 5, 6, 7
WINDOW = 1024 * 1024
PIECE = 32 * 1024
_head = struct.Struct(">IB")
_data = struct.Struct(">IQI")


class _Stream:
    """Produced bytes that are not acknowledged; the writer waits while the window is full."""

    def __init__(self) -> None:
        self.base = 0
        self.buffer = bytearray()
        self.room = asyncio.Event()

    @property
    def end(self) -> int:
        return self.base + len(self.buffer)

    def acknowledge(self, offset: int) -> None:
        if offset > self.base:
            del self.buffer[: offset - self.base]
            self.base = offset
            self.room.set()

    async def write(self, data: bytes) -> None:
        while len(self.buffer) >= WINDOW:
            self.room.clear()
            await self.room.wait()
        self.buffer += data


class _Exec:
    def __init__(self, guest: FakeGuest, spec: dict[str, Any], fence: list[int]) -> None:
        self.guest = guest
        self.exec_id: str = spec["exec_id"]
        self.argv: list[str] = spec["argv"]
        self.fence = fence
        self.begun = time.monotonic()
        self.streams = {"stdout": _Stream(), "stderr": _Stream()}
        self.stdin: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.received = 0
        self.reads = spec.get("stdin") == "open"
        if not self.reads:
            self.stdin.put_nowait(None)
        self.state = "running"
        self.failure: dict[str, str] | None = None
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.ended_by: str | None = None
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()

    def status(self) -> dict[str, Any]:
        return {
            "exec_id": self.exec_id,
            "state": self.state,
            "started": self.state != "failed",
            "exit_code": self.exit_code,
            "signal": self.signal,
            "failure": self.failure,
            "started_ms": int(self.begun * 1000),
            "ended_ms": None,
            "utime_ms": None,
            "stime_ms": None,
            "maxrss_kib": None,
            "ended_by": self.ended_by,
            "killed": 0,
            "killed_all": True,
            "background": 0,
            "offsets": {name: stream.end for name, stream in self.streams.items()},
            "stdin": self.input() if self.reads else None,
            "already": False,
        }

    def input(self) -> dict[str, int]:
        return {"received": self.received, "written": self.received, "open": int(self.state == "running")}

    def start(self) -> None:
        program = getattr(self, f"_do_{self.argv[0]}", None)
        if program is None:
            self.state = "failed"
            message = f"{self.argv[0]}: No such file or directory"
            self.failure = {"what": "argv", "errno": "ENOENT", "message": message}
            return
        self.task = asyncio.create_task(self._run(program))

    async def _run(self, program: Callable[..., Coroutine[Any, Any, int]]) -> None:
        try:
            code = await program(*self.argv[1:])
            if self.signal is None:
                self.exit_code = code
        except asyncio.CancelledError:
            self.signal = self.signal or 9
        except (TypeError, ValueError):
            self.exit_code = 2
        self.state = "ended"
        self.exit_code = None if self.signal is not None else self.exit_code
        self.tell()

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def say(self, name: str, data: bytes) -> None:
        for at in range(0, len(data), PIECE):
            await self.guest.runs.wait()
            await self.streams[name].write(data[at : at + PIECE])
            self.tell()

    async def kill(self, grace: float, why: str) -> None:
        if self.state != "running" or self.task is None:
            return
        self.ended_by = self.ended_by or why
        if self.argv[0] == "stubborn":
            await asyncio.sleep(grace)
            self.signal = 9
        else:
            self.signal = 15 if grace > 0 else 9
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    # -- programs ------------------------------------------------------------------------------------------------------
    async def _do_true(self) -> int:
        return 0

    async def _do_false(self) -> int:
        return 1

    async def _do_exit(self, code: str) -> int:
        return int(code) & 255

    async def _do_die(self, number: str) -> int:
        self.signal = int(number)
        return 0

    async def _do_echo(self, *words: str) -> int:
        await self.say("stdout", " ".join(words).encode("utf-8", "surrogateescape") + b"\n")
        return 0

    async def _do_error(self, *words: str) -> int:
        await self.say("stderr", " ".join(words).encode("utf-8", "surrogateescape") + b"\n")
        return 0

    async def _do_cat(self) -> int:
        while (piece := await self.stdin.get()) is not None:
            await self.say("stdout", piece)
        return 0

    async def _do_flood(self, size: str) -> int:
        left = int(size)
        while left > 0:
            await self.say("stdout", b"x" * min(PIECE, left))
            left -= PIECE
        return 0

    async def _do_lines(self, count: str) -> int:
        for number in range(int(count)):
            await self.say("stdout" if number % 2 == 0 else "stderr", f"line {number}\n".encode())
            await asyncio.sleep(0.001)
        return 0

    async def _do_sleep(self, seconds: str) -> int:
        await asyncio.sleep(float(seconds))
        await self.guest.runs.wait()
        return 0

    async def _do_stubborn(self) -> int:
        await self.say("stdout", b"ready\n")
        await asyncio.Event().wait()
        return 0

    async def _do_write(self, path: str, text: str) -> int:
        target = os.path.join(self.guest.tree, "workspace", path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
        return 0

    async def _do_oom(self) -> int:
        self.guest.oom_kills += 1
        self.signal = 9
        return 0

    async def _do_crash(self) -> int:
        await self.say("stdout", b"last words\n")
        await asyncio.sleep(0.05)
        self.guest.end()
        return 0


class FakeGuest:
    """The inside of one instance."""

    def __init__(self, instance_id: str, tree: str, listener: socket.socket, deadline: float | None) -> None:
        self.instance_id = instance_id
        self.tree = tree
        self.listener = listener
        self.gone = asyncio.Event()
        self.oom_kills = 0
        self.sandbox = ""
        self.quiet = False
        self.floor = [0, 0]
        self.execs: dict[str, _Exec] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.writer: asyncio.StreamWriter | None = None
        self.server: asyncio.Server | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.runs = asyncio.Event()
        """Not while it is frozen."""
        self.runs.set()
        if deadline is not None:
            self.set_deadline(deadline)

    async def serve(self) -> None:
        self.server = await asyncio.start_unix_server(self._connection, sock=self.listener)

    def set_deadline(self, seconds: float) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = asyncio.get_running_loop().call_later(seconds, self.end)

    def end(self) -> None:
        """PID 1 dies, everything with it."""
        if self.gone.is_set():
            return
        self.gone.set()
        if self.deadline is not None:
            self.deadline.cancel()
        if self.server is not None:
            self.server.close()
        for one in self.execs.values():
            if one.task is not None:
                one.task.cancel()
        if self.writer is not None:
            self.writer.close()
        for task in self.tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.writer is not None:
            self.writer.close()  # the newest client wins
        self.writer = writer
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        streams: dict[int, _Stream] = {}
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                length, kind = _head.unpack(await reader.readexactly(_head.size))
                payload = await reader.readexactly(length)
                await self.runs.wait()
                if kind == HELLO:
                    self._send(writer, HELLO, self._hello())
                elif kind == ACK:
                    number, offset = struct.unpack(">IQ", payload)
                    if number in streams:
                        streams[number].acknowledge(offset)
                elif kind == INPUT:
                    (size,) = struct.unpack_from(">I", payload)
                    self._spawn(self._serve(writer, json.loads(payload[4 : 4 + size]), streams, payload[4 + size :]))
                else:
                    self._spawn(self._serve(writer, json.loads(payload), streams, b""))
        writer.close()
        self.tasks.discard(task)

    @staticmethod
    def _send(writer: asyncio.StreamWriter, kind: int, value: dict[str, Any]) -> None:
        payload = json.dumps(value).encode()
        writer.write(_head.pack(len(payload), kind) + payload)

    def _hello(self) -> dict[str, Any]:
        return {
            "versions": [1, 1],
            "version": 1,
            "guest": "fake",
            "instance": self.instance_id,
            "capabilities": {},
            "identified": bool(self.sandbox),
            "quiet": self.quiet,
            "floor": self.floor,
        }

    async def _serve(
        self, writer: asyncio.StreamWriter, request: dict[str, Any], streams: dict[int, _Stream], data: bytes
    ) -> None:
        try:
            answer = await self._answer(writer, request, streams, data)
            reply = {"id": request["id"], "ok": answer}
        except CorralError as error:
            reply = {"id": request["id"], "error": {"code": error.code, "detail": error.detail, "field": None}}
        if not writer.is_closing():
            self._send(writer, REPLY, reply)
            if request["op"] == "exec.attach" and "ok" in reply:
                self._spawn(self._follow(writer, request))

    async def _answer(
        self, writer: asyncio.StreamWriter, request: dict[str, Any], streams: dict[int, _Stream], data: bytes
    ) -> dict[str, Any]:
        operation, fence = request["op"], request.get("fence")
        if self.quiet and operation != "identify":
            raise CorralError("illegal_transition", "quiet until it is identified anew")
        if self.quiet and request["sandbox"] != self.sandbox:
            self.floor = [0, 0]
        if fence is not None:
            if fence < self.floor:
                raise CorralError("lease_lost", f"the floor is {self.floor}")
            self.floor = max(self.floor, fence)
        if operation == "identify":
            self.sandbox, self.quiet = request["sandbox"], False
            self.instance_id = request.get("instance", self.instance_id)
            return {"floor": self.floor}
        if operation == "quiesce":
            if any(one.state == "running" for one in self.execs.values()):
                raise CorralError("illegal_transition", "an exec runs")
            self.quiet = True
            return {"kept": 0}
        if operation == "pause":
            return {"whole": 1, "stopped": 0}
        if operation == "deadline":
            self.set_deadline(request["seconds"])
            return {}
        if operation == "shutdown":
            asyncio.get_running_loop().call_soon(self.end)
            return {}
        if operation in ("fence", "kill_all"):
            older = [one for one in self.execs.values() if operation == "kill_all" or one.fence < (fence or [0, 0])]
            if request.get("mode") != "adopt":
                await asyncio.gather(*(one.kill(0.0, "fence") for one in older))
            return {"killed_all": True, "killed": 0}
        if operation.startswith("exec."):
            return await self._exec_operation(writer, operation, request, streams, data)
        return {}

    async def _exec_operation(
        self,
        writer: asyncio.StreamWriter,
        operation: str,
        request: dict[str, Any],
        streams: dict[int, _Stream],
        data: bytes,
    ) -> dict[str, Any]:
        if operation == "exec.start":
            spec = request["spec"]
            known = self.execs.get(spec["exec_id"])
            if known is not None:
                return {**known.status(), "already": True}
            one = self.execs[spec["exec_id"]] = _Exec(self, spec, request["fence"])
            one.start()
            return one.status()
        found = self.execs.get(request["exec_id"])
        if found is None:
            if operation == "exec.status":
                return {"exec_id": request["exec_id"], "state": "unknown", "started": False}
            raise CorralError("not_found", "no such exec")
        if operation == "exec.attach":
            for name, number in request["streams"].items():
                stream = found.streams[name]
                if request["offsets"][name] < stream.base:
                    raise CorralError("cursor_gone", f"{name} before {stream.base}")
                stream.acknowledge(request["offsets"][name])
                streams[number] = stream
        elif operation == "exec.stdin":
            found.received += len(data)
            if data:
                found.stdin.put_nowait(data)
            if request.get("eof"):
                found.stdin.put_nowait(None)
            open_ = found.state == "running"
            event = {"event": "stdin", "exec_id": found.exec_id, "written": found.received, "open": open_}
            self._send(writer, EVENT, event)
            return {"received": found.received, "written": found.received, "open": open_}
        elif operation == "exec.signal" and found.task is not None:
            found.signal = request["signal"]
            found.task.cancel()
            return {}
        elif operation == "exec.kill":
            await found.kill(request["grace_s"], "kill")
            return {"killed_all": True, "killed": 0}
        return found.status()

    async def _follow(self, writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        one = self.execs[request["exec_id"]]
        sent = dict(request["offsets"])
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                changed = one.changed
                for name, stream in one.streams.items():
                    while sent[name] < stream.end:
                        at = max(sent[name], stream.base)
                        piece = bytes(stream.buffer[at - stream.base : at - stream.base + PIECE])
                        t_ms = int((time.monotonic() - one.begun) * 1000)
                        head = _data.pack(request["streams"][name], at, t_ms)
                        writer.write(_head.pack(len(head) + len(piece), DATA) + head + piece)
                        sent[name] = at + len(piece)
                        await writer.drain()
                if one.state != "running" and all(sent[n] >= s.end for n, s in one.streams.items()):
                    self._send(writer, EVENT, {"event": "ended", "attach": request["attach"], "status": one.status()})
                    return
                if one.changed is changed:
                    await changed.wait()


class FakeRuntime:
    """See the module docstring and `corral.ports.runtime`."""

    name = "fake"

    def __init__(self, state_dir: str, *, installation_id: str, subuid_range: tuple[int, int] | None = None) -> None:
        self._guests: dict[str, FakeGuest] = {}

    async def probe(self) -> RuntimeInfo:
        modes = LimitModes(output="enforced", wall="enforced")
        capabilities = {
            "host_pids": False,
            "two_uids": os.geteuid() == 0,
            "memory_snapshot": True,
            "pause": True,
        }
        return RuntimeInfo(self.name, True, None, 0, "1", capabilities, modes, 0.0)

    async def create(self, spec: InstanceSpec, control: socket.socket) -> Instance:
        if spec.instance_id not in self._guests:
            tree = os.path.join(spec.directory, "disk")
            uid = 65534 if os.geteuid() == 0 else os.geteuid()
            for name in ("workspace", "home", "var_tmp"):
                path = os.path.join(tree, name)
                os.makedirs(path, exist_ok=True)
                if os.geteuid() == 0:
                    os.chown(path, uid, uid)
            words = spec.guest_argv
            deadline = float(words[words.index("--deadline") + 1]) if "--deadline" in words else None
            listener = control.dup()
            listener.setblocking(False)
            guest = self._guests[spec.instance_id] = FakeGuest(spec.instance_id, tree, listener, deadline)
            await guest.serve()
        return self._instance(self.partial_ref(spec.directory, spec.instance_id))

    async def pause(self, ref: InstanceRef) -> None:
        if (guest := self._guests.get(ref.instance_id)) is not None:
            guest.runs.clear()

    async def resume(self, ref: InstanceRef) -> None:
        if (guest := self._guests.get(ref.instance_id)) is not None:
            guest.runs.set()

    async def checkpoint(self, ref: InstanceRef, into: str) -> None:
        """All that a guest here remembers is who it is."""
        guest = self._guests.get(ref.instance_id)
        if guest is None or guest.gone.is_set():
            raise CorralError("infra_error", "there is no such guest")
        with open(os.path.join(into, "memory"), "w", encoding="utf-8") as file:
            json.dump([guest.instance_id, guest.sandbox, guest.floor], file)
        await asyncio.to_thread(shutil.copytree, guest.tree, os.path.join(into, "disk"))
        guest.end()

    async def restore(self, spec: InstanceSpec, image: str) -> Instance:
        await asyncio.to_thread(shutil.copytree, os.path.join(image, "disk"), os.path.join(spec.directory, "disk"))
        with sockets.listen(spec.directory, "s") as control:
            instance = await self.create(spec, control)
        guest = self._guests[spec.instance_id]
        with open(os.path.join(image, "memory"), encoding="utf-8") as file:
            guest.instance_id, guest.sandbox, guest.floor = json.load(file)
        guest.quiet = True
        return instance

    def _instance(self, ref: InstanceRef) -> Instance:
        uid = 65534 if os.geteuid() == 0 else os.geteuid()
        gid = 65534 if os.geteuid() == 0 else os.getegid()
        tree = HostTree(os.path.join(ref.directory, "disk"), uid, gid, "directory")
        # For an ordinary user nothing on the host tells its programs from us.
        return Instance(ref, tree, same_uid=os.geteuid() != 0)

    def partial_ref(self, directory: str, instance_id: str) -> InstanceRef:
        return InstanceRef(self.name, instance_id, directory, {})

    async def attach(self, ref: InstanceRef) -> Instance | None:
        guest = self._guests.get(ref.instance_id)
        return None if guest is None or guest.gone.is_set() else self._instance(ref)

    async def stats(self, ref: InstanceRef) -> Stats:
        guest = self._guests.get(ref.instance_id)
        if guest is None:
            raise CorralError("not_found", "no such instance")
        return Stats(oom_kills=guest.oom_kills, pids=1 + sum(e.state == "running" for e in guest.execs.values()))

    async def reset_peaks(self, ref: InstanceRef) -> bool:
        return False

    async def processes(self, ref: InstanceRef) -> list[int]:
        """Ours stands for all of them while it lives."""
        guest = self._guests.get(ref.instance_id)
        return [] if guest is None or guest.gone.is_set() else [os.getpid()]

    async def kill(self, ref: InstanceRef) -> None:
        if (guest := self._guests.get(ref.instance_id)) is not None:
            guest.end()

    async def wait_gone(self, ref: InstanceRef) -> None:
        if (guest := self._guests.get(ref.instance_id)) is not None:
            await guest.gone.wait()

    async def destroy(self, ref: InstanceRef) -> Evidence:
        await self.kill(ref)
        self._guests.pop(ref.instance_id, None)
        await asyncio.to_thread(shutil.rmtree, os.path.join(ref.directory, "disk"), True)
        return Evidence(True)
