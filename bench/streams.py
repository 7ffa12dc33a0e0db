"""Large streams: output, upload and download through Corral, as ratios to a raw pipe that carries the same bytes.

    .venv/bin/python -m bench.streams [--rounds 5] [--size 1G] [--peers pipe-out,http-out-bubblewrap,…] [--json FILE]

Every round carries `size` bytes through each peer once, in shuffled order. `embedded` is the SDK in the process of the service,
`http` the SDK on `corral serve`; output comes as events, `http-raw` is the same output by `logs?follow=true`. All content is compared
with what was sent in every round, by digest in the first, uncounted one; wrong bytes end the run. The growth of the service's memory
over all rounds is printed and has a limit.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.run import Bench, Peer, arguments, conduct, show
from bench.server import Memory, Server

RUNTIMES = ("bubblewrap", "crun")
MIB = 1 << 20
BLOCK = 4 * MIB
GROWTH = 64 * MIB


class Content:
    """Numbered blocks of random bytes: no two stretches are alike, and what is right is known without being kept."""

    def __init__(self, size: int) -> None:
        self.count = max(1, size // BLOCK)
        self.size = self.count * BLOCK
        self.block = os.urandom(BLOCK - 8)
        self.script = f"i=0; while [ $i -lt {self.count} ]; do printf %08d $i; cat block; i=$((i+1)); done"
        digest = hashlib.sha256()
        for piece in self:
            digest.update(piece)
        self.digest = digest.digest()

    def __iter__(self) -> Iterator[bytes]:
        for number in range(self.count):
            yield b"%08d" % number
            yield self.block

    def check(self, pieces: Iterable[bytes], *, by_digest: bool) -> None:
        """RuntimeError unless these are exactly the bytes."""
        digest, at = hashlib.sha256(), 0
        for piece in pieces:
            if by_digest:
                digest.update(piece)
            elif not self._is(memoryview(piece), at):
                raise RuntimeError(f"wrong bytes in {at}..{at + len(piece)}")
            at += len(piece)
        if at != self.size or (by_digest and digest.digest() != self.digest):
            raise RuntimeError(f"{at} bytes of {self.size}, or wrong ones")

    def _is(self, piece: memoryview, at: int) -> bool:
        block = memoryview(self.block)
        while piece:
            number, inside = divmod(at, BLOCK)
            right = memoryview(b"%08d" % number)[inside:] if inside < 8 else block[inside - 8 :]
            length = min(len(piece), len(right))
            if piece[:length] != right[:length]:
                return False
            piece, at = piece[length:], at + length
        return True


class Streams(Bench):
    """The peers, on one embedded service and one server."""

    def __init__(self, scratch: Path, content: Content) -> None:
        super().__init__(scratch)
        self.content = content
        self.memories: dict[str, Memory] = {}
        self.growth: dict[str, int] = {}
        self._server: Server | None = None
        self._clients: dict[str, Any] = {}
        self._boxes: dict[tuple[str, str], Any] = {}
        (scratch / "block").write_bytes(content.block)

    def look_at_memory(self) -> None:
        self.growth = {via: memory.growth() for via, memory in self.memories.items()}

    def pipe_out(self) -> Peer:
        return self._peer("pipe-out", "the same program, a raw pipe", None, lambda: self._piped(self.content.script))

    def pipe_down(self) -> Peer:
        self._fill()
        return self._peer("pipe-down", "cat of a file, a raw pipe", None, lambda: self._piped("cat whole"))

    def pipe_up(self) -> Peer:
        def send() -> Iterator[bytes]:
            self._fill()
            return iter(self.content)

        return self._peer("pipe-up", "a raw pipe into cat to a file", None, send)

    def _fill(self) -> None:
        with subprocess.Popen(["sh", "-c", "cat > whole"], stdin=subprocess.PIPE, cwd=self.scratch) as program:
            assert program.stdin is not None
            for piece in self.content:
                program.stdin.write(piece)

    def _piped(self, script: str) -> Iterator[bytes]:
        with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, cwd=self.scratch) as program:
            assert program.stdout is not None
            while piece := os.read(program.stdout.fileno(), MIB):
                yield piece

    # -- ours ------------------------------------------------------------------------------------------------------------------
    def client(self, via: str) -> Any:
        if via not in self._clients:
            if via == "http":
                self._server = Server(self.scratch / "state-serve")
                self.undo.callback(self._server.close)
                made = self._server.client()
            else:
                from corral.client import Corral

                made = Corral(state_dir=self.scratch / "state")
            self.undo.callback(made.close)
            self._clients[via] = made
        return self._clients[via]

    def box(self, via: str, runtime: str) -> Any:
        """A sandbox with the block in it, and room for two: a file that is written anew is there until its successor is whole."""
        if (via, runtime) not in self._boxes:
            self._usable(runtime)
            made = self.client(via).sandboxes.create(runtime=runtime, disk=2 * self.content.size + 512 * MIB)
            self.undo.callback(made.delete)
            made.files.write("block", self.content.block)
            if made.exec(["true"]).reason != "ok":
                raise RuntimeError("the sandbox does not run")
            self.memories.setdefault(via, Memory(self._server.process.pid if via == "http" and self._server else None))
            self._boxes[via, runtime] = made
        return self._boxes[via, runtime]

    def out(self, via: str, runtime: str) -> Peer:
        box = self.box(via, runtime)

        def events() -> Iterator[bytes]:
            end: Any = None
            for event in box.exec_stream(shell=self.content.script, output_kill="1G", timeout_s=3600):
                if event.kind == "stdout":
                    yield event.data
                end = event
            if end.kind != "ended" or end.doc["result"]["reason"] != "ok":
                raise RuntimeError(end.doc)

        return self._peer(f"{via}-out-{runtime}", f"output as events, {via}, {runtime}", "pipe-out", events)

    def raw(self, runtime: str) -> Peer:
        box = self.box("http", runtime)
        server = self._server
        assert server is not None

        def blocks() -> Iterator[bytes]:
            running = box.start(shell=self.content.script, stdin_open=False, output_kill="1G", timeout_s=3600)
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=600)
            try:
                path = f"/v1/execs/{running.id}/logs?stream=stdout&follow=true"
                connection.request("GET", path, headers={"Authorization": f"Bearer {server.key}"})
                answer = connection.getresponse()
                while piece := answer.read1(MIB):
                    yield piece
            finally:
                connection.close()

        return self._peer(f"http-raw-{runtime}", f"output raw, http, {runtime}", "pipe-out", blocks)

    def up(self, via: str, runtime: str) -> Peer:
        box = self.box(via, runtime)

        def send() -> Iterator[bytes]:
            box.files.write("whole", iter(self.content))
            return iter(self.content)

        def look() -> None:
            done = box.exec(["sha256sum", "whole"], timeout_s=3600)
            if done.stdout.text.split()[:1] != [self.content.digest.hex()]:
                raise RuntimeError(f"the file has other bytes than were sent: {done.stdout.text}{done.stderr.text}")

        return self._peer(f"{via}-up-{runtime}", f"upload, {via}, {runtime}", "pipe-up", send, look)

    def down(self, via: str, runtime: str) -> Peer:
        box = self.box(via, runtime)
        box.files.write("whole", iter(self.content))
        what = f"download, {via}, {runtime}"
        return self._peer(f"{via}-down-{runtime}", what, "pipe-down", lambda: box.files.stream("whole"))

    def _peer(
        self,
        name: str,
        what: str,
        against: str | None,
        pieces: Callable[[], Iterator[bytes]],
        close: Callable[[], None] = lambda: None,
    ) -> Peer:
        """`pieces` does the work and gives what arrived; an upload gives what it sent, and `close` looks at what arrived."""
        first = True

        def once() -> None:
            nonlocal first
            if name.partition("-")[2].startswith("up"):
                pieces()
            else:
                self.content.check(pieces(), by_digest=first)
            first = False

        return Peer(name, what, against, once, close)


def makers(streams: Streams) -> dict[str, Callable[[], Peer]]:
    made: dict[str, Callable[[], Peer]] = {
        "fork": streams.fork,
        "pipe-out": streams.pipe_out,
        "pipe-up": streams.pipe_up,
        "pipe-down": streams.pipe_down,
    }
    for runtime in RUNTIMES:
        for via in ("embedded", "http"):
            made[f"{via}-out-{runtime}"] = lambda via=via, runtime=runtime: streams.out(via, runtime)
            made[f"{via}-up-{runtime}"] = lambda via=via, runtime=runtime: streams.up(via, runtime)
            made[f"{via}-down-{runtime}"] = lambda via=via, runtime=runtime: streams.down(via, runtime)
        made[f"http-raw-{runtime}"] = lambda runtime=runtime: streams.raw(runtime)
    return made


def size_of(text: str) -> int:
    """`64M`, `1G`."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    try:
        size = int(text[:-1]) * units[text[-1].upper()]
    except (KeyError, ValueError, IndexError):
        raise argparse.ArgumentTypeError("such as 64M or 1G") from None
    if not BLOCK <= size <= 1 << 30:
        raise argparse.ArgumentTypeError("from 4M to 1G, the largest output that the policy allows")
    return size


def main() -> int:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--size", type=size_of, default=1 << 30)
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="cb-"))
    scratch.chmod(0o755)
    streams = Streams(scratch, Content(options.size))
    always = ("fork", "pipe-out", "pipe-up", "pipe-down")
    report, _, _ = conduct(options, scratch, streams.undo, makers(streams), always, streams.look_at_memory)
    report["size"] = streams.content.size
    report["memory_growth"] = streams.growth
    status = show(report, options.json)
    print(f"\n{streams.content.size / MIB:.0f} MiB per round; throughput as a part of the pipe's, MiB/s at the median")
    for row in report["peers"]:
        rate = streams.content.size / MIB / row["median_ms"] * 1000
        if row["ratio"]:
            print(f"{row['name']:<24} {1 / row['ratio'][0]:6.3f}  {rate:8.1f}")
        elif row["name"] != "fork":
            print(f"{row['name']:<24} {'':6}  {rate:8.1f}")
    for via, grown in streams.growth.items():
        over = grown > GROWTH
        status |= over
        print(
            f"memory of the service, {via}: {grown / MIB:.1f} MiB more than before{' OVER ITS LIMIT' if over else ''}"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
