"""MCP on the standard streams of this process. fd 1 carries the protocol and nothing else, whatever is printed meanwhile.

Reading and writing block in threads of their own that nobody waits for at the end, so that a signal ends the server although the
client still holds its side open or has stopped reading.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, contextmanager
from typing import BinaryIO

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from corral.mcp.server import CorralMCP

LONGEST_LINE = 64 << 20
PARSE_ERROR, INVALID_REQUEST = -32700, -32600
FLUSH_S = 2.0

Incoming = SessionMessage | Exception
_Outgoing = tuple[bytes, "asyncio.Future[None]"]


async def serve(server: CorralMCP) -> None:
    """Serve until the client closes its side or stops listening; its session has ended when this returns."""
    below = server._lowlevel_server  # as in `MCPServer.run_stdio_async`, which reads in a thread that it waits for
    with claimed() as (source, sink):
        async with streams(source, sink) as (read, write):
            await below.run(read, write, below.create_initialization_options())


@contextmanager
def claimed() -> Iterator[tuple[int, int]]:
    """Private descriptors of the client's pipes; meanwhile 0 is empty and 1 is stderr, for us and for what we start."""
    source, sink = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    sys.stdout.flush()
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    try:
        yield source, sink
    finally:
        sys.stdout.flush()
        os.dup2(sink, 1)


@asynccontextmanager
async def streams(
    source: int, sink: int
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]]:
    """The client's messages and ours, as the SDK's dispatcher takes them. The descriptors are left open."""
    read_in, read = anyio.create_memory_object_stream[Incoming](0)
    write, write_out = anyio.create_memory_object_stream[SessionMessage](0)
    loop = asyncio.get_running_loop()
    outgoing: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(source, read_in, loop, outgoing), name="corral-mcp-stdin", daemon=True).start()
    threading.Thread(target=_write, args=(sink, outgoing, loop), name="corral-mcp-stdout", daemon=True).start()

    async def pump() -> None:
        async with write_out:
            async for message in write_out:
                line = message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                written = loop.create_future()
                outgoing.put((line, written))
                try:
                    await written
                except OSError:  # the client no longer listens: the same as its end
                    await read_in.aclose()
                    return

    writing = asyncio.create_task(pump())
    try:
        yield read, write
        await write.aclose()
        await asyncio.wait({writing}, timeout=FLUSH_S)
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        for stream in (read_in, read, write, write_out):
            stream.close()


def messages(file: BinaryIO) -> Iterator[Incoming]:
    """What the lines of a client say; a line that is no message is an exception, which costs nothing but itself."""
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield Unreadable(f"a message is longer than {LONGEST_LINE} bytes", None, INVALID_REQUEST)
            continue
        try:
            yield SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError as error:
            yield _unreadable(line, error)


class Unreadable(ValueError):
    """A line that is no message; `reply` is what its sender is told, who may wait for an answer."""

    def __init__(self, detail: str, number: str | int | None, code: int) -> None:
        super().__init__(detail)
        error = {"code": code, "message": detail[:500]}
        self.reply = json.dumps({"jsonrpc": "2.0", "id": number, "error": error}).encode() + b"\n"


def _unreadable(line: bytes, error: ValueError) -> Unreadable:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return Unreadable(f"this is no JSON: {error}", None, PARSE_ERROR)
    number = said.get("id") if isinstance(said, dict) else None
    known = isinstance(number, (str, int)) and not isinstance(number, bool)
    return Unreadable(f"this is no message of the protocol: {error}", number if known else None, INVALID_REQUEST)


def _read(
    source: int,
    read_in: MemoryObjectSendStream[Incoming],
    loop: asyncio.AbstractEventLoop,
    outgoing: queue.SimpleQueue[_Outgoing],
) -> None:
    async def end() -> None:
        await read_in.aclose()

    try:
        try:
            with os.fdopen(source, "rb", closefd=False) as file:
                for message in messages(file):
                    if isinstance(message, Unreadable):
                        written = loop.create_future()
                        written.add_done_callback(
                            lambda done: done.cancelled() or done.exception()
                        )  # nobody waits for it
                        outgoing.put((message.reply, written))
                    asyncio.run_coroutine_threadsafe(read_in.send(message), loop).result()
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the same as the client's end
        asyncio.run_coroutine_threadsafe(end(), loop).result()
    except (RuntimeError, CancelledError):
        pass  # the loop is closed, or closing: we have ended first


def _write(sink: int, outgoing: queue.SimpleQueue[_Outgoing], loop: asyncio.AbstractEventLoop) -> None:
    while True:
        line, written = outgoing.get()
        failure: OSError | None = None
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(sink, view) :]
        except OSError as error:
            failure = error
        try:
            loop.call_soon_threadsafe(_settle, written, failure)
        except RuntimeError:
            return


def _settle(written: asyncio.Future[None], failure: OSError | None) -> None:
    if written.done():
        return
    if failure is None:
        written.set_result(None)
    else:
        written.set_exception(failure)
