"""A pooler between Corral and PostgreSQL has to keep sessions."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from corral.adapters.store.postgres import PostgresStore
from corral.adapters.store.postgres_hold import PostgresHold
from corral.testing.store import refused
from postgres_server import PostgresServer, postgres_server

__all__ = ["postgres_server"]


class Pooler:
    """As PgBouncer: it answers a client's beginning itself and passes on what follows; `one` session for all by turns, or one each."""

    def __init__(self, server: PostgresServer, database: str, *, one: bool) -> None:
        self._server, self._database = server, database
        self._shared = self._session() if one else None
        self._turn = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"postgresql://corral@127.0.0.1:{self._listener.getsockname()[1]}/{database}?sslmode=disable"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _session(self) -> socket.socket:
        session = socket.socket(socket.AF_UNIX)
        session.connect(str(self._server.sockets / f".s.PGSQL.{self._server.port}"))
        words = b"user\0corral\0database\0" + self._database.encode() + b"\0\0"
        session.sendall(struct.pack("!ii", len(words) + 8, 196608) + words)
        self.beginning = b"".join(until_ready(session))
        return session

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), client:
            (length,) = struct.unpack("!i", exactly(client, 4))
            exactly(client, length - 4)
            session = self._shared or self._session()
            key = b"K" + struct.pack("!iii", 12, 4_242_424, 1)  # a process that no server has
            at = self.beginning.index(b"K" + struct.pack("!i", 12))
            client.sendall(self.beginning[:at] + key + self.beginning[at + 13 :])
            state = b"I"
            while True:
                asked = [message(client)]
                if asked[0][:1] == b"X":
                    break
                with self._turn if self._shared else contextlib.nullcontext():
                    while True:
                        while asked[-1][:1] not in (b"Q", b"S"):
                            asked.append(message(client))
                        session.sendall(b"".join(asked))
                        answers = until_ready(session)
                        client.sendall(b"".join(answers))
                        state = answers[-1][-1:]
                        if state == b"I":
                            break
                        asked = [message(client)]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._shared is not None:
            self._shared.close()


def exactly(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (more := sock.recv(count - len(found))):
            raise EOFError
        found += more
    return found


def message(sock: socket.socket) -> bytes:
    head = exactly(sock, 5)
    return head + exactly(sock, struct.unpack("!i", head[1:])[0] - 4)


def until_ready(sock: socket.socket) -> list[bytes]:
    found = [message(sock)]
    while found[-1][:1] != b"Z":
        found.append(message(sock))
    return found


@pytest.fixture
def pooler(postgres_server: PostgresServer) -> Iterator[Callable[..., Pooler]]:
    made: list[Pooler] = []

    def make(*, one: bool) -> Pooler:
        database = postgres_server.name_of(postgres_server.fresh_database(tables=True))
        made.append(Pooler(postgres_server, database, one=one))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def test_one_that_gives_a_session_to_the_next_is_refused(pooler: Callable[..., Pooler]) -> None:
    store = PostgresStore(pooler(one=True).url)
    error = await refused("store_error", store.open())
    assert "pooler" in str(error) and "session" in str(error.hint) and not error.retryable


async def test_one_that_keeps_sessions_is_as_good_as_the_server(pooler: Callable[..., Pooler]) -> None:
    url = pooler(one=False).url
    store = PostgresStore(url)
    await store.open()
    assert await store.get_run("run_1", "default") is None
    await store.close()
    hold = PostgresHold(url, shared=False, lost=lambda error: None)
    hold.take()
    assert hold._backend not in (0, 4_242_424), "the server's own number, by which a lost session is found"
    hold.close()
