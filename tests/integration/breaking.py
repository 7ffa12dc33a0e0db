"""A TCP proxy that breaks connections: after a random number of bytes, either way, with or without a reset."""

from __future__ import annotations

import random
import socket
import struct
import threading


class BreakingProxy:
    """Listens on `port` of loopback; a connection is cut after at most `high` bytes, unless `calm`. Counts what it `cut`."""

    def __init__(self, target: int, seed: int, high: int = 30_000, share: float = 0.7) -> None:
        self.target = target
        self._random = random.Random(seed)
        self._guard = threading.Lock()
        self._high = high
        self._share = share
        self.calm = False
        self.cut = 0
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_all()

    def break_all(self) -> None:
        """Cut what is open now."""
        with self._guard:
            left = list(self._open)
        for sock in left:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            Pair(self, near, far).start()

    def budget(self) -> int | None:
        """How many bytes a direction of a connection may carry; None = any number."""
        with self._guard:
            if self.calm or self._random.random() > self._share:
                return None
            return int(self._high ** self._random.random())

    def coin(self) -> bool:
        with self._guard:
            return self._random.random() < 0.5


class Pair:
    def __init__(self, proxy: BreakingProxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy = proxy
        self._near, self._far = near, far

    def start(self) -> None:
        with self._proxy._guard:
            self._proxy._open |= {self._near, self._far}
        for source, target in ((self._near, self._far), (self._far, self._near)):
            threading.Thread(target=self._carry, args=(source, target, self._proxy.budget()), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, budget: int | None) -> None:
        try:
            while True:
                block = source.recv(65536 if budget is None else max(1, min(65536, budget)))
                if not block:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(block)
                if budget is not None:
                    budget -= len(block)
                    if budget <= 0:
                        self._break()
                        return
        except OSError:
            self._end()

    def _break(self) -> None:
        if self._proxy.coin():
            for sock in (self._near, self._far):
                try:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                except OSError:
                    pass
        self._proxy.cut += 1
        self._end()

    def _end(self) -> None:
        for sock in (self._near, self._far):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            sock.close()
        with self._proxy._guard:
            self._proxy._open -= {self._near, self._far}
