"""The pipe pair without connections: a client that died in mid-frame is forgotten by the next one's resync."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import corral
from corral.guest import protocol

BOOT = Path(corral.__file__).parent / "guest" / "boot.py"
LIMITS = {kind: 8 << 20 for kind in range(1, 8)}


class Pipes:
    """A guest whose descriptors 0 and 1 are two FIFOs, as under a runtime without sockets."""

    def __init__(self, directory: Path) -> None:
        for name in ("in", "out"):
            os.mkfifo(directory / name)
        self.write = os.open(directory / "in", os.O_RDWR)
        self.read = os.open(directory / "out", os.O_RDWR)
        command = [
            sys.executable,
            "-I",
            "-S",
            "-B",
            str(BOOT),
            "--exec-uid",
            str(os.getuid()),
            "--exec-gid",
            str(os.getgid()),
        ]
        self.process = subprocess.Popen(
            [*command, "--control-fifo"], stdin=self.write, stdout=self.read, start_new_session=True
        )
        self.number = 0

    def receive(self) -> bytes:
        assert select.select([self.read], [], [], 30)[0], "the guest is silent"
        return os.read(self.read, 65536)

    def resync(self) -> None:
        nonce = os.urandom(protocol.NONCE)
        os.write(self.write, protocol.MAGIC + nonce)
        seen = b""
        while protocol.MAGIC + nonce not in seen:
            seen += self.receive()
        self.decoder = protocol.Decoder(LIMITS)
        self.frames = self.decoder.feed(seen.partition(protocol.MAGIC + nonce)[2])
        os.write(self.write, protocol.control(protocol.HELLO, {"versions": [1, 1]}))
        assert self.frame()[0] == protocol.HELLO

    def frame(self) -> tuple[int, bytes]:
        while not self.frames:
            self.frames = self.decoder.feed(self.receive())
        return self.frames.pop(0)

    def request(self, op: str, **values: Any) -> dict[str, Any]:
        self.number += 1
        os.write(
            self.write, protocol.control(protocol.REQUEST, {"id": self.number, "op": op, "fence": [1, 1], **values})
        )
        while True:
            kind, payload = self.frame()
            if kind == protocol.REPLY and (answer := protocol.loads(payload))["id"] == self.number:
                return answer["ok"]


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[Pipes]:
    made = Pipes(tmp_path)
    yield made
    try:
        if made.process.poll() is None:
            made.resync()
            made.request("shutdown")
        made.process.wait(20)
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()
        os.close(made.read)
        os.close(made.write)


def test_thirty_deaths_in_mid_frame_are_resynced(pipes: Pipes) -> None:
    pipes.resync()
    pipes.request("identify", sandbox="sbx_1")
    spec = {
        "exec_id": "exe_1",
        "argv": ["sh", "-c", "while :; do echo 0123456789; sleep .001; done"],
        "env": {"PATH": "/usr/bin:/bin"},
    }
    assert pipes.request("exec.start", spec=spec)["state"] == "running"
    got = b""
    for turn in range(30):
        pipes.request(
            "exec.attach",
            exec_id="exe_1",
            attach=turn,
            streams={"stdout": 1, "stderr": 2},
            offsets={"stdout": len(got), "stderr": 0},
        )
        begun = len(got)
        while len(got) < begun + 100:
            kind, payload = pipes.frame()
            if kind == protocol.DATA:
                stream, offset, _, data = protocol.split_data(payload)
                assert (stream, offset) == (1, len(got))
                got += data
        # Dies in the middle of a request.
        os.write(
            pipes.write, protocol.control(protocol.REQUEST, {"id": 1, "op": "ping", "pad": "x" * 500})[: 7 + turn * 10]
        )
        pipes.resync()
    assert got == (b"0123456789\n" * (len(got) // 11 + 1))[: len(got)]
    assert pipes.request("exec.kill", exec_id="exe_1", grace_s=0)["killed_all"] is True
    assert pipes.request("usage")["processes"] == 0


def test_a_guest_whose_pipe_is_at_an_end_ends_too() -> None:
    """As with a runtime that hands it one end only: it must not spin."""
    command = [sys.executable, "-I", "-S", "-B", str(BOOT), "--deadline", "300", "--control-fifo"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=60).returncode == 0
    nonce = protocol.MAGIC + b"n" * protocol.NONCE
    done = subprocess.run(command, input=nonce, stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (0, nonce)
