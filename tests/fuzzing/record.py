"""Makes `recorded/`: what a real guest says in a few conversations, frame by frame, with how much the host had said before.

    .venv/bin/python tests/fuzzing/record.py

To be run again when the protocol changes. The guest is an ordinary child of this process on a socket of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import corral
from corral.channel import ChannelLimits, GuestClient
from corral.domain.fence import Fence
from corral.guest import protocol

FENCE = Fence(1, 1)
HERE = Path(__file__).parent
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "output": [
        {"do": "start", "argv": ["/bin/sh", "-c", "echo one; echo two >&2; exit 3"], "follow": True, "stdin": "eof"},
        {"do": "start", "argv": ["/nothing/such"], "follow": True, "stdin": "eof"},
        {"do": "start", "argv": ["/bin/sh", "-c", "seq 1 2000"], "follow": True, "stdin": "eof"},
        {"do": "usage"},
        {"do": "ping"},
    ],
    "input": [
        {"do": "start", "argv": ["/bin/cat"], "follow": True, "stdin": "open"},
        {"do": "stdin", "data": "hello", "eof": False},
        {"do": "stdin", "data": "x" * 3000, "eof": True},
        {"do": "status"},
    ],
    "kill": [
        {"do": "start", "argv": ["/bin/sleep", "100"], "follow": True, "stdin": "eof"},
        {"do": "signal"},
        {"do": "start", "argv": ["/bin/sleep", "100"], "follow": True, "stdin": "eof"},
        {"do": "kill"},
        {"do": "start", "argv": ["/bin/sleep", "100"], "follow": True, "stdin": "eof"},
        {"do": "fence"},
        {"do": "kill_all"},
    ],
}


class Tap:
    """Between the two: passes bytes on and notes the guest's frames."""

    def __init__(self) -> None:
        limits = {kind: 16 << 20 for kind in range(1, 9)}
        self.host, self.guest = protocol.Decoder(limits), protocol.Decoder(limits)
        self.count = 0
        self.said: list[tuple[int, str]] = []

    async def between(self, ours: socket.socket, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()

        async def pass_on(source: socket.socket, target: socket.socket, note: Any) -> None:
            while data := await loop.sock_recv(source, 65536):
                note(data)
                await loop.sock_sendall(target, data)

        await asyncio.gather(pass_on(ours, theirs, self._heard), pass_on(theirs, ours, self._said))

    def _heard(self, data: bytes) -> None:
        self.count += len(self.host.feed(data))

    def _said(self, data: bytes) -> None:
        for kind, payload in self.guest.feed(data):
            self.said.append((self.count, protocol.frame(kind, payload).hex()))


async def record(name: str, steps: list[dict[str, Any]]) -> None:
    """One conversation into its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "s")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(1)
        uid, gid = str(os.getuid()), str(os.getgid())
        boot = Path(corral.__file__).parent / "guest" / "boot.py"
        words = [
            "--instance",
            "ins_x",
            "--installation",
            "test",
            "--exec-uid",
            uid,
            "--exec-gid",
            gid,
            "--deadline",
            "60",
        ]
        command = [sys.executable, "-I", "-S", "-B", str(boot), *words, "--control-fd", str(listener.fileno())]
        child = subprocess.Popen(
            command, pass_fds=[listener.fileno()], start_new_session=True, env={"PATH": "/usr/bin:/bin"}
        )
        listener.close()
        try:
            await _talk(name, steps, path)
        finally:
            child.kill()
            child.wait()


async def _talk(name: str, steps: list[dict[str, Any]], path: str) -> None:
    loop = asyncio.get_running_loop()
    theirs = socket.socket(socket.AF_UNIX)
    theirs.setblocking(False)
    await loop.sock_connect(theirs, path)
    ours, host = socket.socketpair()
    ours.setblocking(False)
    tap = Tap()
    passing = asyncio.create_task(tap.between(ours, theirs))
    client = await GuestClient.connect(host, limits=ChannelLimits(keepalive_s=600))
    await client.identify("sbx_test", FENCE, now=1.0, entropy=bytes(32))
    done: list[dict[str, Any]] = [{"do": "identify"}]
    tasks: list[asyncio.Task[None]] = []
    started = 0
    for step in steps:
        do = step["do"]
        if do == "start":
            spec = {"exec_id": f"exe_{started}", "argv": step["argv"], "env": {}, "cwd": "/", "stdin": step["stdin"]}
            started += 1
            done.append({"do": "start", "spec": spec, "follow": True})
            tasks.append(asyncio.create_task(_follow(client, spec)))
        else:
            step = {**step, "exec": f"exe_{started - 1}"}
            done.append(step)
            works: dict[str, Any] = {
                "usage": client.usage,
                "ping": client.ping,
                "status": lambda: client.exec_status(step["exec"]),
                "stdin": lambda: client.stdin(step["exec"], step["data"].encode(), step["eof"], fence=FENCE),
                "signal": lambda: client.signal(step["exec"], 15, fence=FENCE),
                "kill": lambda: client.kill_exec(step["exec"], 0.5, fence=FENCE),
                "fence": lambda: client.fence(FENCE, "kill"),
                "kill_all": lambda: client.kill_all(fence=FENCE),
            }
            await works[do]()
        await asyncio.sleep(0.3)  # one after the other, so that the recording has an order
    for task in tasks[:-1]:
        await task
    await client.close()
    passing.cancel()
    await asyncio.gather(passing, *tasks, return_exceptions=True)
    ours.close()
    theirs.close()
    (HERE / "recorded").mkdir(exist_ok=True)
    (HERE / "recorded" / f"{name}.json").write_text(json.dumps({"host": done, "guest": tap.said}, indent=1) + "\n")


async def _follow(client: GuestClient, spec: dict[str, Any]) -> None:
    status = await client.start_exec(spec, fence=FENCE, follow=True)
    if status["state"] != "failed":
        async for _ in client.attach(spec["exec_id"]):
            pass


if __name__ == "__main__":
    for title, conversation in CONVERSATIONS.items():
        asyncio.run(asyncio.wait_for(record(title, conversation), 60))
        print(title)
