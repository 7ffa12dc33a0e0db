"""`corral replica`: one of the API processes of `corral serve --replicas`. Internal: it is started by that, and needs what it is given.

It answers from its first moment, and works once store and node do; it never stops waiting for them. SIGTERM drains: it accepts no
further connection (the others do), answers what it has, and hands on what runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import time
from dataclasses import replace
from typing import Any, TypeVar

import click

from corral import bootstrap, config
from corral.api.front import Front
from corral.api.keys import AdminKey, open_key
from corral.cli import child, serve
from corral.domain.ids import new_id
from corral.errors import CorralError
from corral.ports.node import Node
from corral.ports.store import Store

T = TypeVar("T", Store, Node)
PAUSE_S = 0.5
LOOK_S = 0.05


@click.command(hidden=True)
@click.option("--as-child", "given", metavar="JSON", required=True, hidden=True)
def command(given: str) -> None:
    """One API process of a server."""
    us = child.Child.take(given)
    assert us is not None
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    serve.allow_files()
    serve.show_failures()
    try:
        replica = Replica(us)
    except CorralError as error:
        us.refused(error)
        raise
    with serve.Stopping((signal.SIGTERM,)) as stop:
        while not stop.wait(0.25):
            pass
        replica.drain(serve.DRAIN_S)
        replica.close()
    os._exit(0)


class Replica(bootstrap.Owner):
    """An owner whose sockets, node and state directory are shared with others."""

    def __init__(self, us: child.Child) -> None:
        self._us = us
        settings = config.load()
        worker = new_id("w", time.time_ns() // 1_000_000, os.urandom(10))
        settings = replace(settings, node_socket=os.path.join(settings.state_dir, "node.sock"), worker=worker)
        self._key = open_key(os.path.join(settings.state_dir, serve.KEY_FILE), None, os.urandom).key
        self._tls = None
        if us.tls is not None:
            from corral.api.tls import Tls

            self._tls = Tls(*us.tls).context()
        self._front_of = {"api": Front(), "tcp": Front()}
        self._open = False
        self._building: asyncio.Task[None] | None = None
        local, self._tcp = (_socket(us.descriptors[name]) for name in ("api", "tcp"))
        super().__init__(settings, None, child.log, local)

    # -- start -------------------------------------------------------------------------------------------------------------
    async def _start(self, progress: bootstrap.Progress | None) -> None:
        await asyncio.to_thread(bootstrap._web)
        self._building = self._loop.create_task(self._build())

    async def _build(self) -> None:
        """Become ready, or end: whoever cannot work must not take connections from those who can."""
        status = 1
        try:
            await self._become_ready()
        except CorralError as error:
            self._log(f"{self._us.name} cannot start: {error}")
            self._us.refused(error)
            status = error.exit_status
        except Exception as error:
            self._log(f"{self._us.name} cannot start: unexpected {type(error).__name__}: {error}")
        else:
            return
        os._exit(status)

    async def _open_fronts(self) -> None:
        """Take connections from now on."""
        if not self._open:
            self._open = True
            assert self._listener is not None
            await self._answer(self._front_of["api"], self._listener, None)
            await self._answer(self._front_of["tcp"], self._tcp, self._tls)

    async def _answer(self, front: Front, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        from corral.api.server import make_server

        server = make_server(front, tls, shared=True)
        task = self._loop.create_task(server.serve(sockets=[listener]))
        self._servers.append((server, task))
        while not server.started and not task.done():  # noqa: ASYNC110 - the server tells nobody when it is
            await asyncio.sleep(0.005)
        listener.listen(1024)  # what one process takes at a time is no measure of how many may wait

    async def _become_ready(self) -> None:
        """Wait for store and node, as long as it takes, and say so to callers; raises what waiting does not help against."""
        from corral.api.asgi import Application

        told: str | None = None
        while True:
            part = "store"
            try:
                await self._take_hold()
                if self._store is None:
                    self._store = await _opened(bootstrap.make_store(self._settings))
                part = "node"
                if self._node is None:
                    self._node = await _opened(await bootstrap.reach_node(self._settings, self._store))
                await self._compose(self._store, self._node, None)
                break
            except CorralError as error:
                if not error.retryable or (
                    self._us.first and (error.field is not None or error.code == "state_locked")
                ):
                    raise
                part = {"node_unavailable": "node", "store_error": "store"}.get(error.code, part)
                await self._open_fronts()
                for front in self._front_of.values():
                    front.missing = part
                if part != told:
                    told = part
                    self._log(f"{self._us.name} waits for the {part}: {error}")
                    self._us.waiting(part, str(error))
            await asyncio.sleep(PAUSE_S)
        assert self._services is not None
        keys: dict[str, AdminKey | None] = {"api": None, "tcp": self._key}
        for name, front in self._front_of.items():
            application = Application(self._services, keys[name])
            self._applications.append(application)
            front.application = application
        await self._open_fronts()
        self._us.ready()

    # -- stop --------------------------------------------------------------------------------------------------------------
    async def _drain(self, seconds: float) -> None:
        """Accept nothing more, and let each connection have its answer: who is idle for long is let go by the server's own clock.

        Whoever waits or follows a stream goes on at another replica; only what is at work, and transfers, take the time.
        """
        self._hand_on = True
        for server, _ in self._servers:
            for listening in getattr(server, "servers", ()):
                listening.close()
        for front in self._front_of.values():
            front.leaving = True
        if self._services is not None:
            self._services.core.leave()  # now that whoever comes again finds another
        until = self._loop.time() + seconds
        while self._loop.time() < until and any(self._connections()):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(LOOK_S)

    def _connections(self) -> list[Any]:
        return [connection for server, _ in self._servers for connection in server.server_state.connections]

    async def _stop(self) -> None:
        if self._building is not None and not self._building.done():
            self._building.cancel()
            await asyncio.wait({self._building}, timeout=2.0)
        await super()._stop()


async def _opened(part: T) -> T:
    """A store or a node, open; closed again when that fails."""
    try:
        await part.open()
    except BaseException:
        await part.close()
        raise
    return part


def _socket(descriptor: int) -> socket.socket:
    made = socket.socket(fileno=descriptor)
    made.setblocking(False)
    return made
