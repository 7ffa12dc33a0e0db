"""A TCP proxy between client and server whose connections can be cut, slowed down, or left standing with nothing passing."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time

SLOW_S = 0.2
BLOCK = 4096


class Proxy:
    """Listens on a free `port` of loopback for a port of loopback. `mode`: calm, cut, slow, swallow; it may change at any time."""

    def __init__(self, target: int, seed: int) -> None:
        self.target = target
        self.mode = "calm"
        self.cuts = 0
        self._dice = random.Random(seed)
        self._guard = threading.Lock()
        self._closed = False
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="proxy").start()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()

    def cut_all(self) -> None:
        """End what is open now."""
        with self._guard:
            found = list(self._open)
        for one in found:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(("127.0.0.1", self.target), timeout=10)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        with self._guard:
            self._open |= {near, far}
        try:
            self._carry(near, far)
        except OSError:
            pass
        finally:
            with self._guard:
                self._open -= {near, far}
            near.close()
            far.close()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        reading = [near, far]
        while reading:
            ready, _, _ = select.select(reading, [], [], 0.2)
            for source in ready:
                while self.mode == "swallow" and not self._closed:
                    time.sleep(0.05)  # it stays where it is, and who sent it sees nothing
                block = source.recv(BLOCK)
                if not block:
                    reading.remove(source)
                    with contextlib.suppress(OSError):
                        other[source].shutdown(socket.SHUT_WR)
                    continue
                if self.mode == "slow":
                    time.sleep(SLOW_S)
                if self.mode == "cut" and (left := self._cut()) is not None:
                    other[source].sendall(block[: int(len(block) * left)])
                    for one in (near, far) if self._coin() else ():
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                other[source].sendall(block)

    def _cut(self) -> float | None:
        """What share of a block still passes before the end; None: all of it, and no end."""
        with self._guard:
            if self._dice.random() < 0.5:
                return None
            self.cuts += 1
            return self._dice.random()

    def _coin(self) -> bool:
        with self._guard:
            return self._dice.random() < 0.5
