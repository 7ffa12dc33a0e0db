"""Commands of a session: started, followed by a thread each while they run, looked at by cursor, interrupted, cancelled.

A cursor counts characters of the output as it came, stdout and stderr in one row. A window of it is kept here; what was pushed
out of the window is counted and said, and lies in full with the service (`corral logs`).
"""

from __future__ import annotations

import asyncio
import codecs
import re
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio

from corral.client.transport import Json, Transport, quote
from corral.errors import CorralError
from corral.mcp.backend import Backend

FIRST_S = 0.5
"""How long a start waits for the end itself: most commands are over by then and cost one call."""
WINDOW = 1 << 18
LOOK_S = 1.0
CANCEL_S = 20.0

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]?|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]?")
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]")

Told = Callable[[float, str], Awaitable[None]]
"""(seconds so far, last line of output): hears of a command that is waited for, about each second."""


class Window:
    """The last `most` characters of a text that grows, addressed from its very beginning. Safe to use from several threads."""

    def __init__(self, most: int = WINDOW) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._pieces: list[str] = []
        self._kept = 0
        self._start = 0
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")(errors="replace") for name in ("stdout", "stderr")
        }

    @property
    def end(self) -> int:
        """Where the text ends so far."""
        with self._guard:
            return self._start + self._kept

    def feed(self, stream: str, data: bytes, final: bool = False) -> None:
        """More bytes of a stream; a character that is cut in two waits for its other half."""
        self.add(self._decoders[stream].decode(data, final))

    def add(self, text: str) -> None:
        """More text."""
        if not text:
            return
        with self._guard:
            self._pieces.append(text)
            self._kept += len(text)
            if self._kept > 2 * self._most:  # seldom, so that adding stays cheap
                whole = "".join(self._pieces)[-self._most :]
                self._start += self._kept - len(whole)
                self._pieces, self._kept = [whole], len(whole)

    def read(self, cursor: int) -> tuple[int, str]:
        """(where it begins, the text from there): `cursor`, or the start of what is still kept."""
        with self._guard:
            at = min(max(cursor, self._start), self._start + self._kept)
            whole = "".join(self._pieces)
            self._pieces = [whole] if whole else []
            return at, whole[at - self._start :]


def readable(text: str) -> str:
    """Without escapes and controls; of a line that was written over, what stands there at the end."""
    text = _ESCAPES.sub("", text).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(_overwritten(line) for line in text.split("\n"))
    return sendable(_CONTROLS.sub("", text))


def _overwritten(line: str) -> str:
    return next((piece for piece in reversed(line.split("\r")) if piece.strip()), "")


def sendable(text: str) -> str:
    """Without lone surrogates, which JSON in UTF-8 cannot carry."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


@dataclass(frozen=True)
class Look:
    """A part of a command's output.

    Before it: `lost` characters that are no longer kept here, then `hidden` ones that can be read from `hidden_from` on. After it:
    `cursor`, and `unread` characters.
    """

    text: str
    cursor: int
    lost: int = 0
    hidden: int = 0
    hidden_from: int = 0
    unread: int = 0


class Command:
    """One exec. `document` is the exec's, with its result once it has ended."""

    def __init__(self, backend: Backend, title: str, document: Json, began: float) -> None:
        self._backend = backend
        self.title = title
        self.ident: str = document["id"]
        self.sandbox_id: str = document["sandbox_id"]
        self.document = document
        self.failure: CorralError | None = None
        """Why it can no longer be followed."""
        self.window = Window()
        self.looked = 0
        self._began = began
        self._following: asyncio.Event | None = None

    @property
    def ended(self) -> bool:
        """It has a result, or nothing more will be heard of it."""
        return self.document.get("result") is not None or self.failure is not None

    @property
    def path(self) -> str:
        return f"/v1/execs/{quote(self.ident)}"

    def seconds(self) -> float:
        """How long ago it was started."""
        return time.monotonic() - self._began

    async def follow(self) -> asyncio.Event:
        """Have a thread read its output from the beginning; the event is set at its end."""
        if self._following is None:
            self._following = asyncio.Event()
            transport = await self._backend.transport()
            loop = asyncio.get_running_loop()
            arguments = (transport, loop, self._following)
            threading.Thread(target=self._read, args=arguments, name=f"corral-mcp-{self.ident}", daemon=True).start()
        return self._following

    def _read(self, transport: Transport, loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
        ending: Json | None = None
        failure: CorralError | None = None
        try:
            for event in transport.stream(f"{self.path}/stream"):
                if event.kind in ("stdout", "stderr"):
                    self.window.feed(event.kind, event.data)
                elif event.kind == "gap" and event.doc is not None:
                    self.window.add(f"\n[… {event.doc.get('bytes')} bytes of {event.doc.get('stream')} not kept …]\n")
                elif event.kind == "ended" and event.doc is not None:
                    ending = event.doc
        except CorralError as error:
            failure = error
        except Exception as error:
            failure = CorralError("infra_error", f"following the command failed: {type(error).__name__}: {error}")
        for name in ("stdout", "stderr"):
            self.window.feed(name, b"", final=True)

        def settle() -> None:
            if ending is not None and self.document.get("result") is None:
                self.document = {**self.document, "result": without_output(ending.get("result"))}
            if not self.ended:
                self.failure = failure or CorralError("infra_error", "the command's output ended before the command")
            over.set()

        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    async def wait(self, seconds: float, told: Told | None = None) -> None:
        """Return when it has ended, or after `seconds`."""
        if self.ended:
            return
        over = await self.follow()
        until = time.monotonic() + seconds
        while not over.is_set() and (left := until - time.monotonic()) > 0:
            with anyio.move_on_after(min(left, LOOK_S)):
                await over.wait()
            if told is not None and not over.is_set():
                await told(self.seconds(), self.last_line())

    def last_line(self) -> str:
        """The last line of output that says something."""
        _, text = self.window.read(self.window.end - 2000)
        lines = [line.strip() for line in readable(text).splitlines() if line.strip()]
        return lines[-1][:200] if lines else ""

    def look(self, cursor: int | None, most: int) -> Look:
        """From `cursor` on, the first `most` characters; without one what is new since the last look, the last `most` of it."""
        asked = self.looked if cursor is None else cursor
        at, text = self.window.read(asked)
        lost = max(0, at - asked)
        if cursor is None:
            hidden = max(0, len(text) - most)
            self.looked = at + len(text)
            return Look(text[hidden:], self.looked, lost, hidden, at)
        shown = text[:most]
        return Look(shown, at + len(shown), lost, unread=len(text) - len(shown))

    async def view(self, chars: int) -> Json:
        """The exec's document with its agent view, after its end."""
        return await self._backend.request("GET", self.path, None, {"output": "none", "view": "agent", "chars": chars})

    async def send(self, name: str) -> None:
        """A signal to everything in it; KILL ends it by the service, which leaves nothing."""
        if name == "KILL":
            await self.cancel()
        else:
            await self._backend.request("POST", f"{self.path}/signal", {"signal": name})

    async def cancel(self) -> None:
        """End it and all that it started; returns when that is so, or is given up after some seconds."""
        with anyio.move_on_after(CANCEL_S, shield=True):
            answer = await self._backend.request("POST", f"{self.path}/cancel")
            if answer.get("result") is not None:
                self.document = {**answer, "result": without_output(answer["result"])}


def without_output(result: Json | None) -> Json | None:
    """A result to remember: the kept output can be large, and the window has what is shown of it."""
    if result is None:
        return None
    return {**result, **{name: {**result[name], "text": None, "base64": None} for name in ("stdout", "stderr")}}


async def start(backend: Backend, sandbox_id: str, title: str, request: Json, wait_s: float, chars: int) -> Command:
    """Start an exec and return it, ended if it was quick. Nothing runs on that the caller does not know of."""
    params: dict[str, Any] = {"wait": min(wait_s, FIRST_S), "output": "none", "view": "agent", "chars": chars}
    path = f"/v1/sandboxes/{quote(sandbox_id)}/execs"
    began = time.monotonic()
    document = await backend.request("POST", path, {**request, "attached": True}, params)
    return Command(backend, title, document, began)
