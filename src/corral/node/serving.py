"""The node port on a unix socket, for the workers of one host: each call of theirs is a task here. See `corral.wire`.

What a caller has begun goes on to its end when the caller's connection breaks, as half of it would be a leftover; only what merely
waits or streams ends with it. Notices of instances that were lost stay here until a caller has acknowledged them: one caller has each,
and when that goes away first, the next one that listens gets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from corral.errors import CorralError
from corral.linux import sockets
from corral.ports.node import Node
from corral.wire.link import (
    CALL,
    CANCEL,
    CREDIT,
    END,
    ERROR,
    HELLO,
    ITEM,
    PROGRESS,
    RESULT,
    VERSIONS,
    Credit,
    Inflow,
    Link,
    agreed,
)
from corral.wire.methods import WAITS, Method, methods

Work = Callable[[], Coroutine[Any, Any, None]]
ATTEMPTS = 3
MAX_CALLS = 16_384
"""Calls of one connection at a time; more are a defect of the caller."""


class NodeServer:
    """Serves an open node at `directory/name`. `close` ends connections and waits; the node itself stays open."""

    def __init__(self, node: Node, directory: str, name: str, log: Callable[[str], None]) -> None:
        self.node = node
        self.log = log
        self.notices = Notices(node)
        self.work: set[asyncio.Task[Any]] = set()
        self.closing = False
        self._directory = directory
        self._name = name
        self._peers: set[_Peer] = set()
        self._server: asyncio.Server | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; the socket takes the place of one that is there."""
        listener = sockets.listen(self._directory, self._name, backlog=128)
        listener.setblocking(False)
        self._listening = asyncio.get_running_loop().create_task(self.notices.collect())
        self._server = await asyncio.get_running_loop().create_server(self._peer, sock=listener)

    def _peer(self) -> Link:
        peer = _Peer(self)
        self._peers.add(peer)
        return peer.link

    def left(self, peer: _Peer) -> None:
        """Its connection is gone."""
        self._peers.discard(peer)

    async def close(self, seconds: float = 2.0) -> None:
        """Take nothing more, let what changes something end (at most `seconds`), then hang up."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.hang_up()
        if self.work:
            await asyncio.wait(set(self.work), timeout=seconds)
        rest = [*self.work, *([self._listening] if self._listening is not None else [])]
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=seconds)


class Notices:
    """Instances that were lost, until somebody has taken note."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._waiting: dict[str, object | None] = {}
        """Notice -> who has it; None: nobody yet."""
        self._changed = asyncio.Condition()

    async def collect(self) -> None:
        """Take what the node says, as long as this runs."""
        while True:
            instance_id = await self._node.lost()
            async with self._changed:
                self._waiting.setdefault(instance_id, None)
                self._changed.notify_all()

    async def next(self, who: object, heard: str | None) -> str:
        """The next notice for `who`; `heard` is the one that it has dealt with."""
        if heard is not None:
            self._waiting.pop(heard, None)
        self._give_back(who)
        async with self._changed:
            while (free := next((one for one, holder in self._waiting.items() if holder is None), None)) is None:
                await self._changed.wait()
            self._waiting[free] = who
            return free

    def _give_back(self, who: object) -> bool:
        mine = [one for one, holder in self._waiting.items() if holder is who]
        for one in mine:
            self._waiting[one] = None
        return bool(mine)

    async def gone(self, who: object) -> None:
        """What `who` had and did not acknowledge is for the others."""
        if self._give_back(who):
            async with self._changed:
                self._changed.notify_all()


class _Call:
    """A call under way."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.credit = Credit()
        self.inflow: Inflow | None = None
        self.waits = False
        self.cancelled = False


class _Peer:
    """One connection."""

    def __init__(self, server: NodeServer) -> None:
        self._server = server
        self._calls: dict[int, _Call] = {}
        self._greeted = False
        self.link = Link(self._frame, self._gone)

    # -- what comes --------------------------------------------------------------------------------------------------------
    def _frame(self, frame: list[Any]) -> None:
        kind, number = frame[0], frame[1]
        if kind == HELLO:
            self._hello(frame[2])
            return
        if not self._greeted:
            raise ValueError("no hello")
        if kind == CALL:
            self._begin(number, str(frame[2]), frame[3], frame[4])
            return
        call = self._calls.get(number)
        if call is None:
            return
        if kind == CANCEL:
            self._cancel(call)
        elif kind == CREDIT:
            call.credit.give(int(frame[2]))
        elif kind == ITEM and call.inflow is not None:
            call.inflow.put(frame[2], len(frame[2]))
        elif kind == END and call.inflow is not None:
            call.inflow.end(None if frame[2] is None else CorralError.from_problem(frame[2]))

    def _hello(self, theirs: dict[str, Any]) -> None:
        node = self._server.node
        can = [name for name in methods() if hasattr(node, name)]
        self.link.send(HELLO, 0, {"versions": VERSIONS, "node_id": node.node_id, "methods": can})
        try:
            agreed(theirs["versions"])
        except CorralError as error:
            self._server.log(str(error))
            self.link.close()
            return
        self._greeted = True

    def _cancel(self, call: _Call) -> None:
        call.cancelled = True
        call.credit.end()
        if call.task is not None:
            call.task.cancel()

    def hang_up(self) -> None:
        """The node stops: callers go on with the next one."""
        self.link.close()

    def _gone(self) -> None:
        self._server.left(self)
        for call in list(self._calls.values()):
            call.credit.end()
            if call.inflow is not None:
                call.inflow.end(CorralError("node_unavailable", "the worker that sent this is gone"))
            if call.waits and call.task is not None:
                call.task.cancel()
        task = asyncio.get_running_loop().create_task(self._server.notices.gone(self))
        self._server.work.add(task)
        task.add_done_callback(self._server.work.discard)

    # -- one call ----------------------------------------------------------------------------------------------------------
    def _begin(self, number: int, name: str, arguments: dict[str, Any], more: dict[str, Any]) -> None:
        if number in self._calls or len(self._calls) >= MAX_CALLS:
            raise ValueError("a call that cannot be")
        call = self._calls[number] = _Call()
        method = methods().get(name)
        attempts = 1
        if name == "lost":
            call.waits = True
            work: Work = functools.partial(self._notice, number, arguments.get("heard"))
        elif method is None or not hasattr(self._server.node, name):
            work = functools.partial(self._refuse, number, name)
        else:
            call.waits = method.kind != "call" or name in WAITS
            if method.source is not None:
                call.inflow = Inflow(lambda size: self._grant(number, size))
                arguments[method.source] = call.inflow
            elif not call.waits:
                attempts = ATTEMPTS
            if more.get("progress"):
                arguments["progress"] = lambda sentence, share: self._progress(number, sentence, share)
            work = functools.partial(self._run, number, call, method, arguments)
        call.task = asyncio.get_running_loop().create_task(self._guarded(number, call, name, work, attempts))
        self._server.work.add(call.task)
        call.task.add_done_callback(self._server.work.discard)
        call.task.add_done_callback(
            lambda _: self._calls.pop(number, None)
        )  # also of one that is cancelled before it begins

    async def _guarded(self, number: int, call: _Call, name: str, work: Work, attempts: int) -> None:
        """The call, whose caller hears in any case how it ended, unless it has given up."""
        while not await self._done(number, call, name, work, last=attempts <= 1):
            attempts -= 1

    async def _done(self, number: int, call: _Call, name: str, work: Work, *, last: bool) -> bool:
        """False: this one had joined another caller's call, which that one has cancelled, so it is this one's to do."""
        try:
            await work()
        except CorralError as error:
            self._fail(number, error)
        except asyncio.CancelledError:
            if call.cancelled or call.waits or self._server.closing:
                return True
            if not last:
                return False
            self._fail(number, CorralError("conflict", f"{name} was abandoned by who had begun it", hint="try again"))
        except Exception as error:
            self._server.log(f"{name}: {type(error).__name__}: {error}")
            self._fail(number, CorralError("infra_error", f"the node failed: {type(error).__name__}: {error}"))
        return True

    def _fail(self, number: int, error: CorralError) -> None:
        self.link.send(ERROR, number, _plain(error.to_problem()))

    async def _refuse(self, number: int, name: str) -> None:
        raise CorralError(
            "not_supported_yet",
            f"this node cannot do {name!r}",
            hint="restart corral serve: its parts differ in version",
        )

    async def _notice(self, number: int, heard: str | None) -> None:
        self.link.send(RESULT, number, await self._server.notices.next(self, heard))

    async def _run(self, number: int, call: _Call, method: Method, arguments: dict[str, Any]) -> None:
        try:
            placed, named = method.arrange(arguments)
            made = getattr(self._server.node, method.name)(*placed, **named)
        except TypeError as error:
            raise CorralError("not_supported_yet", f"this node does not know an argument: {error}") from error
        if method.kind == "stream":
            await self._stream(number, call, made)
            return
        answer = await made
        if method.kind == "opened":
            try:
                self.link.send(RESULT, number, {name: getattr(answer, name) for name in method.members})
            except BaseException:
                await answer.aclose()
                raise
            await self._stream(number, call, answer)
            return
        self.link.send(RESULT, number, answer)

    async def _stream(self, number: int, call: _Call, source: AsyncIterator[Any]) -> None:
        """Items as far as the caller has given credit; an error on the way ends the stream on the other side too."""
        try:
            async for item in source:
                size = _size(item)
                self.link.send(ITEM, number, item, size)
                call.credit.spend(size)
                await self.link.flows()
                if not await call.credit.wait():
                    return
            self.link.send(END, number, None)
        finally:
            with contextlib.suppress(Exception):
                await source.aclose()  # type: ignore[attr-defined]

    def _grant(self, number: int, size: int) -> None:
        if number in self._calls:
            self.link.send(CREDIT, number, size)

    def _progress(self, number: int, sentence: str, share: float | None) -> None:
        if self.link.flowing and number in self._calls:
            self.link.send(PROGRESS, number, sentence, share)


def _size(item: Any) -> int:
    data = item if isinstance(item, bytes) else getattr(item, "data", b"")
    return len(data) + 256


def _plain(problem: dict[str, Any]) -> dict[str, Any]:
    """What a problem says, in values that travel: a fact that does not is told as text."""
    from corral.wire.codec import pack

    told: dict[str, Any] = {}
    for name, value in problem.items():
        try:
            pack(value)
        except (TypeError, ValueError, OverflowError):
            value = repr(value)
        told[name] = value
    return told
