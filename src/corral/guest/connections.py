"""Clients of the guest: frames in, replies, events and output of followed execs out, as fast as the client reads."""

from __future__ import annotations

import os

from corral.guest import loop, protocol
from corral.guest.record import Exec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    class Host(Protocol):
        """What a connection needs of the guest."""

        loop: loop.Loop

        def received(self, connection: Connection, kind: int, payload: bytes) -> None: ...

        def gone(self, connection: Connection) -> None: ...

        def cut_off(self) -> None: ...


MAX_QUEUED = 256 * 1024
MAX_REQUEST = 12 * 1024 * 1024

_INCOMING = {
    protocol.HELLO: 64 * 1024,
    protocol.REQUEST: MAX_REQUEST,
    protocol.INPUT: protocol.MAX_DATA + 4096,
    protocol.ACK: 64,
}


class Attachment:
    """One client follows one exec: where each stream was sent up to, under the numbers that the client chose."""

    __slots__ = ("ended", "job", "number", "sent", "streams")

    def __init__(self, number: int, job: Exec, streams: dict[str, int], offsets: dict[str, int]) -> None:
        self.number = number
        self.job = job
        self.streams = streams
        self.sent = offsets
        self.ended = False


class Connection:
    """One client. After a resync a FIFO pair counts as a new one."""

    def __init__(self, guest: Host, read: int, write: int, close: Callable[[], None], resync: bool) -> None:
        self.guest = guest
        self.read_fd = read
        self.write_fd = write
        self._close = close
        self.decoder = protocol.Decoder(_INCOMING, resync=resync)
        self.resync = resync
        self.greeted = False
        self.open = True
        self.epoch = 0
        """Changes when another client takes the connection over, or nobody."""
        self.out = bytearray()
        self.attached: dict[int, Attachment] = {}
        self.streams: dict[int, tuple[Attachment, str]] = {}
        self._watch()

    def _watch(self) -> None:
        mask = loop.READ | (loop.WRITE if self.out and self.write_fd == self.read_fd else 0)
        self.guest.loop.watch(self.read_fd, mask, self._ready)
        if self.write_fd != self.read_fd:
            self.guest.loop.watch(self.write_fd, loop.WRITE if self.out else 0, self._ready)

    def _ready(self, events: int) -> None:
        if events & loop.WRITE:
            self.flush()
        if self.open and events & ~loop.WRITE:
            self._read()

    def _read(self) -> None:
        try:
            data = os.read(self.read_fd, 64 * 1024)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended()
            return
        try:
            for kind, payload in self.decoder.feed(data):
                if not self.open:
                    return
                self.guest.received(self, kind, payload)
        except protocol.ProtocolError:
            self.close()

    def _ended(self) -> None:
        if self.resync:
            self.guest.cut_off()
        self.close()

    def restart(self, nonce: bytes) -> None:
        """A new client on the same pipes: forget the old one's, answer the nonce."""
        self.epoch += 1
        self.attached.clear()
        self.streams.clear()
        self.greeted = False
        self.out = bytearray(protocol.MAGIC + nonce)
        self.flush()

    def send(self, frame: bytes) -> None:
        if self.open:
            self.out += frame
            self.flush()

    def flush(self) -> None:
        try:
            while self.out:
                count = os.write(self.write_fd, self.out)
                del self.out[:count]
                if len(self.out) < MAX_QUEUED // 2:
                    self.pump()
        except BlockingIOError:
            pass
        except OSError:
            self._ended()
            return
        if self.open:
            self._watch()

    def pump(self) -> None:
        """Queue output of attached execs, in turn, as far as the queue allows; then their ends."""
        moved = True
        while moved and len(self.out) < MAX_QUEUED:
            moved = False
            for attachment in list(self.attached.values()):
                if self._pump_one(attachment):
                    moved = True

    def _pump_one(self, attachment: Attachment) -> bool:
        job = attachment.job
        moved = False
        for name, stream in job.streams.items():
            sent = attachment.sent[name]
            if sent < stream.end and len(self.out) < MAX_QUEUED:
                sent = max(sent, stream.base)
                t_ms, piece = stream.piece(sent)
                self.out += protocol.data_frame(attachment.streams[name], sent, t_ms, piece)
                attachment.sent[name] = sent + len(piece)
                moved = True
        if (
            not attachment.ended
            and job.finished
            and all(attachment.sent[name] >= stream.end for name, stream in job.streams.items())
        ):
            attachment.ended = True
            self.out += protocol.control(
                protocol.EVENT, {"event": "ended", "attach": attachment.number, "status": job.facts()}
            )
            self.detach(attachment.number, keep_streams=True)
            moved = True
        return moved

    def follow(self, number: int, job: Exec, streams: dict[str, int], offsets: dict[str, int]) -> None:
        """From now on this client gets the output of `job`, under its numbers, and nobody else does."""
        before = job.watcher
        if before is not None:
            for other in list(before.attached.values()):
                if other.job is job:
                    before.detach(other.number)
        attachment = Attachment(number, job, streams, offsets)
        self.attached[number] = attachment
        for name, stream in streams.items():
            self.streams[stream] = (attachment, name)
        job.watcher = self

    def detach(self, number: int, *, keep_streams: bool = False) -> None:
        attachment = self.attached.pop(number, None)
        if attachment is None:
            return
        if attachment.job.watcher is self:
            attachment.job.watcher = None
        if not keep_streams:
            for stream in attachment.streams.values():
                self.streams.pop(stream, None)

    def forget(self, job: Exec) -> None:
        """Late acknowledgements of an exec whose end was told mean nothing any more."""
        for stream in [stream for stream, (attachment, _) in self.streams.items() if attachment.job is job]:
            if self.streams[stream][0].number not in self.attached:
                del self.streams[stream]

    def close(self) -> None:
        if self.open and not self.resync:
            self.open = False
            self.epoch += 1
            self.guest.loop.forget(self.read_fd)
            self.guest.loop.forget(self.write_fd)
            self._close()
            self.guest.gone(self)
