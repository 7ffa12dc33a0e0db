"""The node port over a unix socket: the node is a process of its own (`corral node serve`), which many workers use at once.

All calls share one connection. When it breaks, or the node has been silent for about 20 s (it answers beats whatever else it does), calls
are repeated on the next one, for `patience_s` and at most `SENDS` times; then they fail with `node_unavailable`. What a second time would
do something else (`wire.methods.ONCE`) is not repeated once it was sent, nor is a call whose stream of bytes has begun to flow. `wait_exec`
and `lost` wait for the node as long as it takes: that nobody answers says nothing about sandboxes. Output of an exec goes on at its cursor,
what is kept of it at its byte.
Notices of `lost` reach one of the workers that listen, and another one if that goes away before it has asked for the next.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from corral.errors import CorralError
from corral.linux import sockets
from corral.ports.node import Chunk, Gap, Progress
from corral.wire.link import (
    CALL,
    CANCEL,
    CREDIT,
    END,
    ERROR,
    HELLO,
    ITEM,
    PIECE,
    PROGRESS,
    RESULT,
    VERSIONS,
    Credit,
    Inflow,
    Link,
    agreed,
)
from corral.wire.methods import Method, methods

PATIENCE_S = 30.0
SENDS = 10
"""One call that takes the node down with it must not do so for ever: it is every worker's node."""
FRESH_S = 1.0
"""How long the answer of a cheap read that every run makes is used again."""
KEPT = frozenset({"runtimes", "posture", "templates", "host", "template_seccomp"})
CHANGES = frozenset({"build_template", "remove_template", "ensure_template"})
"""After these what is known of templates is asked for again."""
HELLO_S = 10.0
PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


class Broken(Exception):
    """The connection was lost; `sent`: the call may have arrived."""

    def __init__(self, *, sent: bool) -> None:
        super().__init__("the connection to the node broke off")
        self.sent = sent


class RemoteNode:
    """See `ports.node.Node`, all of whose methods are here by `wire.methods`. `open` waits for the node's process to answer."""

    def __init__(self, path: str, *, patience_s: float = PATIENCE_S, fresh_s: float = FRESH_S) -> None:
        self.node_id = "local"
        self._directory, self._name = os.path.split(os.path.abspath(path))
        self._patience_s = patience_s
        self._fresh_s = fresh_s
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()
        self._refused: tuple[float, OSError] | None = None
        """When a connection was last tried in vain, and why."""
        self._closed = False
        self._can: frozenset[str] | None = None
        self._kept: dict[Any, tuple[float, Any]] = {}
        self._heard: str | None = None

    async def open(self, progress: Progress | None = None) -> None:
        if progress is not None and not os.path.exists(os.path.join(self._directory, self._name)):
            progress("waiting for the node", None)
        await self._connected(time.monotonic() + self._patience_s)

    async def close(self) -> None:
        self._closed = True
        if (connection := self._connection) is not None:
            connection.link.close()
        self._connection = None

    def __getattr__(self, name: str) -> Any:
        method = methods().get(name) if not name.startswith("_") else None
        if method is None or (self._can is not None and name not in self._can):
            raise AttributeError(f"the node has no {name!r}")
        if name == "stream_exec":
            return self._stream_exec
        if name == "kept_output":
            return self._kept_output
        if method.kind == "stream":
            return lambda *arguments, **named: _Stream(
                self, method, method.bind(*arguments, **named), patience_s=self._patience_s
            )
        if name in KEPT:
            return lambda *arguments, **named: self._lately(method, method.bind(*arguments, **named))
        return lambda *arguments, **named: self._ask(method, method.bind(*arguments, **named))

    async def lost(self) -> str:
        """See the module docstring: the notice before is acknowledged by asking for the next."""
        while True:
            connection = await self._connected(None)
            try:
                heard = str(await connection.ask("lost", {"heard": self._heard}))
            except Broken:
                continue
            self._heard = heard
            return heard

    # -- one call ----------------------------------------------------------------------------------------------------------
    async def _ask(self, method: Method, arguments: dict[str, Any]) -> Any:
        progress = arguments.pop("progress", None)
        source = _Source(arguments.pop(method.source)) if method.source is not None else None
        until = None if method.name == "wait_exec" else time.monotonic() + self._patience_s
        sends = 0
        try:
            while True:
                connection = await self._connected(until)
                try:
                    answer = await connection.ask(
                        method.name, arguments, source=source, progress=progress, members=method.kind == "opened"
                    )
                except Broken as broken:
                    sends += broken.sent
                    spent = until is not None and sends >= SENDS
                    if spent or (source is not None and source.begun) or (broken.sent and method.once(arguments)):
                        raise CorralError(
                            "node_unavailable",
                            f"the connection to the node broke off during {method.name}",
                            hint="look at the state, then decide whether to do it again",
                        ) from broken
                    if until is not None:
                        until = max(until, time.monotonic() + self._patience_s)
                    continue
                if method.name in CHANGES:
                    self._kept.clear()
                return answer
        finally:
            if source is not None:
                await source.stop()

    async def _lately(self, method: Method, arguments: dict[str, Any]) -> Any:
        key = (method.name, *sorted((name, value) for name, value in arguments.items() if name != "fresh"))
        kept = self._kept.get(key)
        if kept is not None and not arguments.get("fresh") and time.monotonic() - kept[0] < self._fresh_s:
            return kept[1]
        began = time.monotonic()
        answer = await self._ask(method, arguments)
        if len(self._kept) >= 256:
            self._kept.clear()
        self._kept[key] = (began, answer)
        return answer

    async def _stream_exec(self, exec_id: str, cursor: str | None = None) -> AsyncIterator[Chunk | Gap]:
        """Goes on at the last cursor over a broken connection, and over a node that starts again."""
        method = methods()["stream_exec"]
        while True:
            source = _Stream(self, method, {"exec_id": exec_id, "cursor": cursor}, patience_s=None, resumed=True)
            try:
                async for item in source:
                    cursor = getattr(item, "cursor", cursor)
                    yield item
                return
            except Broken:
                continue
            finally:
                await source.aclose()

    async def _kept_output(self, exec_id: str, stream: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Goes on at the last byte over a broken connection."""
        method = methods()["kept_output"]
        sends = 0
        while True:
            arguments = {"exec_id": exec_id, "stream": stream, "offset": offset}
            source = _Stream(self, method, arguments, patience_s=self._patience_s, resumed=True)
            try:
                async for piece in source:
                    offset, sends = offset + len(piece), 0
                    yield piece
                return
            except Broken as broken:
                sends += 1
                if sends >= SENDS:
                    raise _broken() from broken
            finally:
                await source.aclose()

    # -- the connection ----------------------------------------------------------------------------------------------------
    async def _connected(self, until: float | None) -> _Connection:
        pauses = itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1]))
        while True:
            if self._closed:
                raise CorralError("shutting_down", "the service is stopping")
            if (connection := self._connection) is not None and connection.link.open:
                return connection
            failed: OSError | None = None
            asked = time.monotonic()
            async with self._connecting:
                if self._connection is None or not self._connection.link.open:
                    if self._refused is not None and self._refused[0] >= asked:
                        failed = self._refused[1]  # of many who wait for a node that hangs each would wait in turn
                    else:
                        try:
                            self._connection = await self._connect()
                        except OSError as error:
                            failed = error
                            self._refused = time.monotonic(), error
            if failed is None:
                continue
            if until is not None and time.monotonic() >= until:
                raise CorralError(
                    "node_unavailable",
                    f"the node does not answer: {failed.strerror or failed}",
                    hint="it is started again by corral serve; its sandboxes live on meanwhile",
                ) from failed
            await asyncio.sleep(next(pauses))

    async def _connect(self) -> _Connection:
        """A connection that has said hello. OSError when there is nobody."""
        sock = sockets.connect(self._directory, self._name, timeout_s=1.0)
        sock.setblocking(False)
        connection = _Connection()
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection.link, sock=sock)
            hello = await connection.greeted()
        except BaseException:
            connection.link.abort()
            raise
        self.node_id = str(hello["node_id"])
        self._can = frozenset(hello["methods"])
        return connection


class _Source:
    """The bytes that a call sends along: each block once, whatever becomes of the connection."""

    def __init__(self, blocks: AsyncIterator[bytes]) -> None:
        self._blocks = blocks
        self._pump: asyncio.Task[None] | None = None
        self.begun = False
        self.error: BaseException | None = None

    def start(self, link: Link, call: int, credit: Credit) -> None:
        """Send them as far as the node wants them."""
        self._pump = asyncio.get_running_loop().create_task(self._run(link, call, credit))

    async def _run(self, link: Link, call: int, credit: Credit) -> None:
        self.begun = True
        try:
            async for block in self._blocks:
                for at in range(0, len(block), PIECE):
                    if not await credit.wait():
                        return
                    await link.flows()
                    piece = bytes(block[at : at + PIECE])
                    link.send(ITEM, call, piece)
                    credit.spend(len(piece))
        except Exception as error:
            self.error = error
            told = (
                error if isinstance(error, CorralError) else CorralError("infra_error", f"the source broke: {error!r}")
            )
            link.send(END, call, told.to_problem())
        else:
            link.send(END, call, None)

    async def stop(self) -> None:
        """Nobody wants the rest."""
        if (pump := self._pump) is not None and not pump.done():
            pump.cancel()
            await asyncio.wait({pump})


class _Call:
    """One call under way."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.progress: Callable[[str, float | None], None] | None = None
        self.credit: Credit | None = None
        self.inflow: Inflow | None = None
        self.size = 0

    def fail(self, error: BaseException) -> None:
        if self.credit is not None:
            self.credit.end()
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()
        if self.inflow is not None:
            self.inflow.end(error)


class _Connection:
    """A link with the calls that are under way on it."""

    def __init__(self) -> None:
        self.link = Link(self._frame, self._gone)
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def greeted(self) -> dict[str, Any]:
        """Say hello, and hear it; OSError if the other side hangs up, `node_unavailable` if it speaks another version."""
        self.link.send(HELLO, 0, {"versions": VERSIONS})
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await self._hello
        except Broken as broken:
            raise ConnectionResetError(str(broken)) from broken
        except TimeoutError as error:
            raise TimeoutError("the node says nothing") from error
        agreed(hello["versions"])
        self.link.watch()
        return hello

    def begin(self, name: str, arguments: dict[str, Any], call: _Call, *, source: bool = False) -> int:
        """Send a call; -> its number. `Broken` when there is no connection any more."""
        if not self.link.open:
            raise Broken(sent=False)
        number = next(self._numbers)
        self._calls[number] = call
        try:
            self.link.send(CALL, number, name, arguments, {"source": source, "progress": call.progress is not None})
        except BaseException:
            del self._calls[number]
            raise
        return number

    async def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        *,
        source: _Source | None = None,
        progress: Progress | None = None,
        members: bool = False,
    ) -> Any:
        """One call and its answer; of an opened stream the stream."""
        call = _Call()
        call.progress = progress
        await self.link.flows()
        number = self.begin(name, arguments, call, source=source is not None)
        if source is not None:
            call.credit = Credit()
            source.start(self.link, number, call.credit)
        opened = False
        try:
            if members:
                call.inflow = Inflow(lambda size: self.grant(number, size))
            answer = await call.answer
            if members:
                opened = True
                return _Opened(self, number, call, answer)
            return answer
        except Broken:
            raise
        except CorralError:
            if source is not None and source.error is not None:
                raise source.error from None
            raise
        except BaseException:
            self.cancel(number)
            raise
        finally:
            if not opened:
                self.drop(number)

    def grant(self, number: int, size: int) -> None:
        """So much of a stream was taken here."""
        if number in self._calls:
            self.link.send(CREDIT, number, size)

    def cancel(self, number: int) -> None:
        """Nobody waits for this one any more."""
        if self._calls.pop(number, None) is not None:
            self.link.send(CANCEL, number)

    def drop(self, number: int) -> None:
        """It has been answered."""
        call = self._calls.pop(number, None)
        if call is not None and call.credit is not None:
            call.credit.end()

    # -- what comes --------------------------------------------------------------------------------------------------------
    def _frame(self, frame: list[Any]) -> None:
        kind, number = frame[0], frame[1]
        if kind == HELLO:
            if not self._hello.done():
                self._hello.set_result(frame[2])
            return
        call = self._calls.get(number)
        if call is None:
            return
        if kind == RESULT:
            if not call.answer.done():
                call.answer.set_result(frame[2])
        elif kind == ERROR:
            call.fail(CorralError.from_problem(frame[2]))
        elif kind == ITEM and call.inflow is not None:
            call.inflow.put(frame[2], frame[3])
        elif kind == END and call.inflow is not None:
            call.inflow.end(None if frame[2] is None else CorralError.from_problem(frame[2]))
        elif kind == CREDIT and call.credit is not None:
            call.credit.give(int(frame[2]))
        elif kind == PROGRESS and call.progress is not None:
            call.progress(frame[2], frame[3])

    def _gone(self) -> None:
        if not self._hello.done():
            self._hello.set_exception(Broken(sent=False))
            self._hello.exception()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.fail(Broken(sent=True))


class _Opened:
    """An opened stream: the members that came with the answer, then the items."""

    def __init__(self, connection: _Connection, number: int, call: _Call, members: dict[str, Any]) -> None:
        self._connection = connection
        self._number = number
        self._call = call
        self.__dict__.update({name: value for name, value in members.items() if not name.startswith("_")})

    def __aiter__(self) -> _Opened:
        return self

    async def __anext__(self) -> Any:
        assert self._call.inflow is not None
        try:
            return await self._call.inflow.__anext__()
        except (StopAsyncIteration, CorralError):
            self._connection.drop(self._number)
            raise
        except Broken as broken:
            raise _broken() from broken

    async def aclose(self) -> None:
        """Nobody reads on."""
        assert self._call.inflow is not None
        self._connection.cancel(self._number)
        self._call.inflow.end()


class _Stream:
    """A stream that begins with the first item that is asked for. `resumed`: a broken connection is the reader's affair (`Broken`)."""

    def __init__(
        self,
        node: RemoteNode,
        method: Method,
        arguments: dict[str, Any],
        *,
        patience_s: float | None,
        resumed: bool = False,
    ) -> None:
        self._node = node
        self._method = method
        self._arguments = arguments
        self._patience_s = patience_s
        self._resumed = resumed
        self._connection: _Connection | None = None
        self._number = 0
        self._call: _Call | None = None
        self._closed = False

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> Any:
        if self._closed:
            raise StopAsyncIteration
        if self._call is None:
            await self._begin()
        assert self._call is not None and self._call.inflow is not None and self._connection is not None
        try:
            return await self._call.inflow.__anext__()
        except (StopAsyncIteration, CorralError):
            self._closed = True
            self._connection.drop(self._number)
            raise
        except Broken as broken:
            self._closed = True
            if self._resumed:
                raise
            raise _broken() from broken

    async def _begin(self) -> None:
        until = None if self._patience_s is None else time.monotonic() + self._patience_s
        while True:
            connection = await self._node._connected(until)
            call = _Call()
            self._connection, self._call = connection, call
            call.inflow = Inflow(self._grant)
            try:
                self._number = connection.begin(self._method.name, self._arguments, call)
            except Broken:
                continue
            return

    def _grant(self, size: int) -> None:
        if self._connection is not None:
            self._connection.grant(self._number, size)

    async def aclose(self) -> None:
        """Nobody reads on."""
        self._closed = True
        if self._connection is not None and self._call is not None and self._call.inflow is not None:
            self._connection.cancel(self._number)
            self._call.inflow.end()


def _broken() -> CorralError:
    return CorralError("node_unavailable", "the connection to the node broke off in the middle", hint="start it again")
