"""Composition: the only module that names concrete adapters. Everything heavy is imported where it is needed.

`start_owner` makes this process the owner of a state directory whose lock the caller holds: an event loop in a background thread
with store, node and services on it. Calls of this process go straight to `api.routes.dispatch`; the socket for other processes
is bound at once, the web server is imported when the first of them connects.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

from corral import config
from corral.client.effects import result_of
from corral.client.line import Params
from corral.errors import CorralError
from corral.linux.statesocket import bind_socket, hide_socket, show_socket, unlink_socket

if TYPE_CHECKING:
    import ssl

    from corral.adapters.store.postgres_hold import PostgresHold
    from corral.api.asgi import Application
    from corral.api.keys import AdminKey
    from corral.api.routes import Reply
    from corral.ports.coordination import Coordination
    from corral.ports.database import Database
    from corral.ports.node import Node
    from corral.ports.store import Store
    from corral.services.control import Services

Progress = Callable[[str, float | None], None]
Log = Callable[[str], None]
STALLED_S = 5.0
"""How long an owner that wants to end waits for a transfer that does not move."""
T = TypeVar("T")


def start_owner(settings: config.Config, progress: Progress | None = None, log: Log | None = None) -> Owner:
    """Start everything for the state directory; raises what went wrong, with nothing left running."""
    return Owner(settings, progress, log or _log)


_open: set[Owner] = set()
"""Running services that nobody has closed yet."""


@functools.cache
def _close_at_the_end() -> None:
    """Have what is left open closed when the main thread ends, while its worker threads still take work.

    `atexit` is too late for that: executors refuse by then. The hook of threads calls the newest first, so theirs comes before ours.
    """
    import concurrent.futures.thread  # noqa: F401

    def close() -> None:
        for owner in list(_open):
            if owner._pid == os.getpid():  # a child of a fork has the object, not its threads
                owner.close()

    getattr(threading, "_register_atexit", atexit.register)(close)


class Owner:
    """A running service in this process, and the transport of this process's own calls."""

    def __init__(
        self, settings: config.Config, progress: Progress | None, log: Log, listener: socket.socket | None = None
    ) -> None:
        """With a `listener` the state directory's socket is another process's, which shares it with us."""
        self.release: list[Callable[[], None]] = []
        self._shares_socket = listener is not None
        self._settings = settings
        self._log = log
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="corral-owner", daemon=True)
        self._services: Services | None = None
        self._node: Node | None = None
        self._store: Store | None = None
        self._hold: PostgresHold | None = None
        self._listener = listener
        self._applications: list[Application] = []
        self._servers: list[tuple[Any, asyncio.Task[None]]] = []
        self._serving: asyncio.Task[None] | None = None
        self._hand_on = False
        self._closed = False
        self._thread.start()
        try:
            self._call(self._start(progress))
        except BaseException:
            self.close()
            raise
        self._pid = os.getpid()
        _open.add(self)
        _close_at_the_end()

    # -- life ------------------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _start(self, progress: Progress | None) -> None:
        self._listener = bind_socket(self._settings.state_dir)
        await self._take_hold()
        self._store = make_store(self._settings)
        await self._store.open()
        self._node = await reach_node(self._settings, self._store)
        await self._node.open(progress)
        await self._compose(self._store, self._node, progress)
        self._loop.add_reader(self._listener.fileno(), self._first_connection)

    async def _take_hold(self) -> None:
        """A database that others can reach is driven by this process alone, or by workers who share it; `state_locked` otherwise."""
        if self._hold is None and self._settings.database_url is not None:
            self._hold = make_hold(self._settings, self._hold_lost)
            try:
                await asyncio.to_thread(self._hold.take)
            except BaseException:
                self._hold.close()
                self._hold = None
                raise

    def _hold_lost(self, error: CorralError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: so has all that could do harm
            self._loop.call_soon_threadsafe(self._refuse, error)

    def _refuse(self, error: CorralError) -> None:
        """Another drives what the store holds: nothing new is begun here."""
        self._log(f"takes nothing new: {error}")
        if self._services is not None:
            self._services.core.refusing = error
            self._services.core.draining = True

    async def _compose(self, store: Store, node: Node, progress: Progress | None) -> None:
        """The services over an open store and node."""
        others = make_coordination(self._settings, await store.installation_id(), self._log)
        self._services = await make_services(self._settings, store, node, progress, self._log, others)
        await self._services.start()

    def _first_connection(self) -> None:
        assert self._listener is not None
        self._loop.remove_reader(self._listener.fileno())
        self._serving = self._loop.create_task(self._serve(self._listener))

    async def _serve(
        self, listener: socket.socket, key: AdminKey | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        await asyncio.to_thread(_web)
        if self._closed:
            return
        from corral.api.asgi import Application
        from corral.api.server import make_server

        assert self._services is not None
        application = Application(self._services, key)
        server = make_server(application, tls)
        self._applications.append(application)
        self._servers.append((server, self._loop.create_task(server.serve(sockets=[listener]))))

    def listen(self, listener: socket.socket, key: AdminKey, tls: ssl.SSLContext | None) -> None:
        """Serve the same routes on one more listening socket, to those who have the key."""
        self._call(self._serve(listener, key, tls))

    def drain(self, seconds: float) -> None:
        """Take nothing new, let the calls that are under way end, at most `seconds`. What runs is handed on to the next owner."""
        self._call(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        assert self._services is not None
        self._hand_on = self._services.core.draining = True
        until = self._loop.time() + seconds
        while (left := until - self._loop.time()) > 0:
            calls = {call for application in self._applications for call in application.calls}
            if not calls:
                return
            await asyncio.wait(calls, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        """Stop accepting, finish what must not be left half-done, journal, let the directory go. Idempotent.

        Transfers of other processes come first: the next owner could not go on with them. Meanwhile all is served as before.
        """
        if self._closed:
            return
        try:
            if not self._hand_on:
                self._call(self._finish_transfers())
        except CorralError:
            pass  # the loop is ending already
        finally:
            self._close()

    async def _finish_transfers(self) -> None:
        """Until no transfer of another process is under way that moves; afterwards nobody finds our socket any more."""
        stalled: set[asyncio.Task[Any]] = set()
        while self._servers:
            await self._let_move(stalled)
            hide_socket(self._settings.state_dir)
            for _ in range(10):  # who had connected before is served
                await asyncio.sleep(0)
            if set(self._transfers()) <= stalled:
                for (
                    application
                ) in self._applications:  # in the same turn of the loop: a kept connection may bring the next one
                    application.transfers_over = True
                return
            show_socket(self._settings.state_dir)

    async def _let_move(self, stalled: set[asyncio.Task[Any]]) -> None:
        waiting = set(self._transfers()) - stalled
        moved, until = -1, 0.0
        while waiting:
            now, counts = self._loop.time(), self._transfers()
            seen = sum(counts.get(task, 0) for task in waiting)
            if seen != moved:
                moved, until = seen, now + STALLED_S
            elif now >= until:
                stalled |= waiting
                return
            _, waiting = await asyncio.wait(waiting, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)

    def _transfers(self) -> dict[asyncio.Task[Any], int]:
        return {task: count for application in self._applications for task, count in application.transfers.items()}

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        try:
            self._call(self._stop(), timeout=self._stop_s())
        except (TimeoutError, CorralError, RuntimeError) as error:
            print(f"corral: the service did not stop cleanly: {error!r}", file=sys.stderr)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
            for step in self.release:
                step()
            self.release.clear()

    def _stop_s(self) -> float:
        """How long a stop may take: runs that nobody waits for and the last things have `drain_s` each, then the node lets go."""
        from corral.node.snapshots import CLOSE_S

        return 2 * self._settings.delays["drain_s"] + CLOSE_S + 10.0

    async def _stop(self) -> None:
        if self._listener is not None and not self._shares_socket:
            self._loop.remove_reader(self._listener.fileno())
            if self._serving is None:
                self._listener.close()
            unlink_socket(self._settings.state_dir)
        for server, _ in self._servers:
            server.should_exit = True
        if self._services is not None:
            await self._services.stop(self._settings.delays["drain_s"], hand_on=self._hand_on)
        for server, _ in self._servers:
            server.force_exit = True
        serving = {task for _, task in self._servers} | ({self._serving} if self._serving is not None else set())
        if serving:
            await asyncio.wait(serving, timeout=2.0)
            for task in serving:
                task.cancel()
        for server, _ in self._servers:
            for connection in list(server.server_state.connections):
                connection.transport.abort()  # whoever waits for an answer asks the next owner
        if self._listener is not None:
            self._listener.close()
        if self._node is not None:
            await self._node.close()
        if self._store is not None:
            await self._store.close()
        if self._hold is not None:
            await asyncio.to_thread(self._hold.close)
        mine = asyncio.current_task()
        for _ in range(2):  # what is cancelled may leave generators, and these have to end too
            rest = [task for task in asyncio.all_tasks() if task is not mine]
            for task in rest:
                task.cancel()
            if rest:
                await asyncio.wait(rest, timeout=2.0)
            await self._loop.shutdown_asyncgens()

    # -- calls of this process (client.owner) ------------------------------------------------------------------------------------
    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run on this service's event loop, from any thread. `shutting_down` when it has stopped."""
        if self._loop.is_closed() or not self._thread.is_alive():
            work.close()
            raise CorralError("shutting_down", "the service is not running")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run there and wait; an interruption here cancels the waiting there."""
        future = self.submit(work)
        try:
            return result_of(future, timeout)
        except CancelledError as error:
            raise CorralError("shutting_down", "the service is stopping") from error
        except BaseException:
            future.cancel()
            raise

    async def dispatch(
        self,
        method: str,
        path: str,
        params: Params | None,
        headers: Mapping[str, str] | None = None,
        document: Any = None,
        body: bytes | AsyncIterator[bytes] = b"",
    ) -> Reply:
        """The answer of a route; a problem is raised."""
        from corral.api.routes import Request, dispatch

        if self._services is None:
            raise CorralError("shutting_down", "the service is not running")
        query = {
            k: ("true" if v else "false") if isinstance(v, bool) else str(v)
            for k, v in (params or {}).items()
            if v is not None
        }
        fields = {name.lower(): value for name, value in (headers or {}).items()}
        reply = await dispatch(self._services, Request(method, path, query, fields, body, document))
        if reply.status >= 400:
            raise CorralError.from_problem(reply.document or {})
        return reply


def _web() -> None:
    """Import what serves, away from the event loop."""
    import logging

    import corral.api.asgi
    import corral.api.server  # noqa: F401

    if not os.environ.get(
        "CORRAL_LOG"
    ):  # stderr belongs to the program; what a broken connection means is the client's to say
        logging.getLogger("uvicorn").addHandler(logging.NullHandler())
        logging.getLogger("uvicorn").propagate = False


# -- concrete parts ------------------------------------------------------------------------------------------------------------
_BOOTED_NS = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _now_ms() -> int:
    """The time of day as it was when this process began, going on by a clock that nobody sets: a jump ends no sandbox early."""
    return (_BOOTED_NS + time.clock_gettime_ns(time.CLOCK_BOOTTIME)) // 1_000_000


def make_store(settings: config.Config) -> Store:
    """The store: PostgreSQL where the settings name a database, else SQLite in the state directory."""
    if settings.database_url is not None:
        from corral.adapters.store.postgres import PostgresStore

        return PostgresStore(settings.database_url)
    from corral.adapters.store.sqlite import SqliteStore

    return SqliteStore(os.path.join(settings.state_dir, "corral.db"), _now_ms)


def make_hold(settings: config.Config, lost: Callable[[CorralError], None]) -> PostgresHold:
    """Who may drive the settings' database: one process alone, or workers of one kind together."""
    from corral.adapters.store.postgres_hold import PostgresHold

    assert settings.database_url is not None
    there = os.stat(settings.state_dir)  # a directory that is moved stays the same
    home = f"{socket.gethostname()} {there.st_dev} {there.st_ino}"
    return PostgresHold(settings.database_url, shared=settings.worker is not None, lost=lost, home=home)


def make_database(settings: config.Config) -> Database:
    """The same database, for who looks after it."""
    from corral.adapters.store.databases import PostgresDatabase, SqliteDatabase

    if settings.database_url is not None:
        return PostgresDatabase(settings.database_url)
    return SqliteDatabase(os.path.join(settings.state_dir, "corral.db"))


RUNTIMES = {
    "bubblewrap": ("corral.adapters.runtimes.bubblewrap", "BubblewrapRuntime"),
    "crun": ("corral.adapters.runtimes.crun", "CrunRuntime"),
    "fake": ("corral.adapters.runtimes.fake", "FakeRuntime"),
    "runc": ("corral.adapters.runtimes.runc", "RuncRuntime"),
    "runsc": ("corral.adapters.runtimes.runsc", "RunscRuntime"),
}
"""The adapters of this distribution, named here because reading all entry points costs more than a warm run. Others are found
by the entry point group `corral.runtimes` when the configuration names them."""
BY_DEFAULT = ("bubblewrap", "crun", "runc", "runsc")


def by_default(settings: config.Config) -> tuple[str, ...]:
    """The runtimes that are registered when the configuration names none."""
    return (*BY_DEFAULT, *(program.name for program in settings.oci))


async def reach_node(settings: config.Config, store: Store) -> Node:
    """The node that the services work with: in a process of its own when the settings name its socket, else in this one."""
    if settings.node_socket is not None:
        return node_at(settings.node_socket)
    return make_node(settings, await _installation(settings, store))


def node_at(path: str) -> Node:
    """The node that serves a socket."""
    from corral.adapters.nodes.remote import RemoteNode

    return cast("Node", RemoteNode(path))


async def _installation(settings: config.Config, store: Store | None) -> str:
    """By what this host knows its own: processes, groups and subordinate ids carry it, whatever database there is above them.

    It is the store's, and written down once the state directory has, or may have, a store that is not on this disk.
    """
    path = os.path.join(settings.state_dir, "node", "installation")
    with contextlib.suppress(FileNotFoundError), open(path, encoding="ascii") as file:
        return file.read().strip()
    if store is not None and settings.database_url is None:
        return await store.installation_id()
    if os.path.exists(os.path.join(settings.state_dir, "corral.db")):
        local = make_store(dataclasses.replace(settings, database_url=None))
        await local.open()
        try:
            found = await local.installation_id()
        finally:
            await local.close()
    else:
        found = await store.installation_id() if store is not None else os.urandom(16).hex()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fresh = f"{path}.{os.getpid()}"
    with open(fresh, "w", encoding="ascii") as file:
        file.write(found)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    return found


async def serve_node(
    settings: config.Config, name: str, stop: asyncio.Event, ready: Callable[[], None], log: Log
) -> None:
    """This host's node on the socket `name` in the state directory, until `stop`. The caller holds the directory's lock."""
    from corral.node.serving import NodeServer

    node = make_node(settings, await _installation(settings, None))
    await node.open(lambda sentence, _: log(sentence))
    try:
        server = NodeServer(node, settings.state_dir, name, log)
        await server.start()
        ready()
        await stop.wait()
        await server.close()
    finally:
        await node.close()


def make_node(settings: config.Config, installation_id: str) -> Node:
    """The node of this host, in process, with the configured runtimes."""
    from corral.linux.userns import SubordinateRange
    from corral.node.service import LocalNode
    from corral.node.templates import Templates

    ids = SubordinateRange(installation_id, state_dir=settings.state_dir, configured=settings.subuid_range)
    return LocalNode(
        settings.state_dir,
        {name: _runtime(name, settings, installation_id) for name in settings.runtimes or by_default(settings)},
        Templates(settings.state_dir, settings.templates, ids=ids),
        node_id="local",
        installation_id=installation_id,
    )


def trial_node(
    settings: config.Config,
    installation_id: str,
    name: str,
    base: str,
    around: Callable[[Any], Any],
) -> Node:
    """A node with one runtime, as `around` wraps it, whose every template is the tree `base`: for `corral certify`."""
    from corral.node.service import LocalNode
    from corral.node.templates import Template, Templates

    class OneBase(Templates):
        async def ensure(self, name: str, *_: Any, **__: Any) -> Template:
            return Template(name, "sha256:trial", base, ())

        def describe(self) -> list[dict[str, Any]]:
            return []

    runtime = around(_runtime(name, settings, installation_id))
    templates = OneBase(settings.state_dir, settings.templates)
    return LocalNode(settings.state_dir, {name: runtime}, templates, node_id="trial", installation_id=installation_id)


def _runtime(name: str, settings: config.Config, installation_id: str) -> Any:
    """The adapter of a name. One that cannot be imported is an error: a configured runtime is never silently left out."""
    import importlib

    if (program := next((one for one in settings.oci if one.name == name), None)) is not None:
        return _configured(program, settings, installation_id)
    if name in RUNTIMES:
        module, attribute = RUNTIMES[name]
        made: Any = getattr(importlib.import_module(module), attribute)
    else:
        from importlib.metadata import entry_points

        found = [point for point in entry_points(group="corral.runtimes") if point.name == name]
        if not found:
            raise CorralError("invalid_value", f"there is no runtime adapter {name!r}", field="CORRAL_RUNTIMES")
        made = found[0].load()
    return made(settings.state_dir, installation_id=installation_id, subuid_range=settings.subuid_range)


def _configured(given: config.OciProgram, settings: config.Config, installation_id: str) -> Any:
    """The adapter of a program of the OCI family that the operator names."""
    from corral.adapters.runtimes import _oci, runc

    program = _oci.Program(
        command=given.program,
        package=os.path.basename(given.program),
        options=given.options,
        security_level=given.security_level,
        groups=cast("Any", given.groups),
        user_namespace=given.user_namespace,
        launch_memory=runc.PROGRAM.launch_memory,
        launch_pids=runc.PROGRAM.launch_pids,
    )
    return _oci.OciRuntime(
        given.name, program, settings.state_dir, installation_id=installation_id, subuid_range=settings.subuid_range
    )


def make_coordination(settings: config.Config, installation: str, log: Log) -> Coordination:
    """How this process hears of the other workers of the installation; alone where the settings do not name it."""
    if settings.worker is None or settings.redis_url is None:
        from corral.adapters.coordination.inprocess import InProcess

        # One replica has a name too, since its successor is there before it leaves.
        return InProcess(alone=settings.worker is None)
    from corral.adapters.coordination.redis import RedisCoordination

    return RedisCoordination(settings.redis_url, installation, log)


async def make_services(
    settings: config.Config,
    store: Store,
    node: Node,
    progress: Progress | None,
    log: Log,
    coordination: Coordination | None = None,
) -> Services:
    """The services over the ports. Without `coordination` this process is the only worker."""
    from corral.adapters.coordination.inprocess import InProcess
    from corral.adapters.delivery.http import HttpSender
    from corral.adapters.sealing.aes import AesSealer
    from corral.domain.policy import Policy
    from corral.domain.request import HostCaps
    from corral.domain.runner import Names, Runner
    from corral.services.control import Core, Services
    from corral.services.documents import Documents
    from corral.services.execs import Execs
    from corral.services.executor import Executor
    from corral.services.files import Files
    from corral.services.lifecycle import Lifecycle
    from corral.services.sandboxes import Sandboxes
    from corral.services.upkeep import Upkeep

    cache = os.path.join(settings.state_dir, "cache")
    try:
        runners = [
            Runner.from_dict(config.data_document(os.path.join(settings.runners, name), cache))
            for name in sorted(os.listdir(settings.runners))
            if name.endswith(".yaml")
        ]
        Names.of(runners)  # now, and not at the first request, two that claim the same are refused
    except ValueError as error:
        raise CorralError("invalid_value", f"{settings.runners}: {error}", field="CORRAL_RUNNERS") from error
    host = await node.host()
    core = Core(
        store=store,
        node=node,
        policy=Policy.from_dict(config.data_document(settings.policy, cache)),
        runners={runner.language: runner for runner in runners},
        host=HostCaps(host.memory_bytes, host.cpus),
        artifacts=os.path.join(settings.state_dir, "artifacts"),
        now_ms=_now_ms,
        entropy=os.urandom,
        log=log,
        delays=settings.delays,
        coordination=coordination or InProcess(),
        worker=settings.worker or "owner",
        unsafe=settings.unsafe,
        sender=HttpSender(),
        sealer=AesSealer(os.path.join(settings.state_dir, "secret.key"), os.urandom),
        progress=progress,
    )
    os.makedirs(core.artifacts, mode=0o700, exist_ok=True)
    execs = Execs(core)
    lifecycle = Lifecycle(core, execs)
    documents = Documents(node)
    executor = Executor(core, lifecycle, execs)
    sandboxes = Sandboxes(core, lifecycle, execs)
    upkeep = Upkeep(core, lifecycle, executor, sandboxes, documents)
    services = Services(core, documents, sandboxes, executor, upkeep, Files(core, sandboxes))
    if settings.oidc is not None:
        from corral.adapters.identity.oidc import Oidc

        services.identity.admission.tokens = Oidc(settings.oidc, log)
    return services


def add_template(settings: config.Config, kind: str, path: str, name: str | None, more: dict[str, Any]) -> str:
    """Make a recipe of the operator known in the state directory; -> its name. `kind`: recipe (a file of one), archive or oci.

    Only who may write the state directory adds recipes: the API builds those that are there, by name.
    """
    from corral.node.templates import Templates

    config.prepare_state(settings.state_dir)
    templates = Templates(settings.state_dir, settings.templates)
    if kind == "recipe":
        return templates.add_file(path, name)
    return templates.add_packed(kind, path, name or "", more)


def _log(line: str) -> None:
    """Messages of the service: to stderr if CORRAL_LOG is set, else nowhere (stderr belongs to the program's output)."""
    if os.environ.get("CORRAL_LOG"):
        print(f"corral: {line}", file=sys.stderr, flush=True)
