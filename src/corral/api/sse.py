"""Stream events as server-sent events (contract 5): text cut at code points, cursors that resume at the exact byte.

A cursor is `<stdout bytes delivered>.<stderr bytes delivered>.<node cursor>`: the node resumes at its own cursor, which never lies
behind an undelivered byte, and what the client already has is dropped by offset. So a code point that is split between two chunks
can be held back without being lost or doubled.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from corral.errors import CorralError
from corral.services.events import StreamEvent


@dataclass
class Position:
    """Where a client is. `node` None = from the start."""

    node: str | None = None
    delivered: dict[str, int] = field(default_factory=lambda: {"stdout": 0, "stderr": 0})

    @classmethod
    def parse(cls, text: str | None) -> Position:
        """The inverse of `str`; `invalid_value` for anything that we did not issue."""
        if not text:
            return cls()
        out, _, rest = text.partition(".")
        err, dot, node = rest.partition(".")
        good = all(part.isascii() and part.isdigit() and len(part) <= 18 for part in (out, err))
        if not (dot and good) or len(text) > 300:
            raise CorralError("invalid_value", "not a cursor of ours", field="/cursor", hint="use the id of an event")
        return cls(node or None, {"stdout": int(out), "stderr": int(err)})

    def __str__(self) -> str:
        return f"{self.delivered['stdout']}.{self.delivered['stderr']}.{self.node or ''}"


async def position(
    events: AsyncIterator[StreamEvent], start: Position, *, whole: bool = False
) -> AsyncIterator[StreamEvent]:
    """The same events with cursors of ours, without the bytes before `start`; whole code points unless `whole` is False.

    With `whole`, at most three bytes of a stream are held back, until the rest of the code point or the end comes.
    """
    here = Position(start.node, dict(start.delivered))
    held = {"stdout": b"", "stderr": b""}
    async for event in events:
        if event.kind not in held:
            lost_of = str(event.doc["stream"]) if event.kind == "gap" and event.doc is not None else None
            for name, rest in held.items():
                if rest and (event.kind == "ended" or name == lost_of):  # the rest of the code point never comes
                    held[name] = b""
                    here.delivered[name] += len(rest)
                    yield StreamEvent(name, str(here), here.delivered[name] - len(rest), rest)
            if lost_of is not None and event.doc is not None:
                end = int(event.doc["offset"]) + int(event.doc["bytes"])
                here.delivered[lost_of] = max(here.delivered[lost_of], end)
            yield StreamEvent(event.kind, str(here), event.offset, b"", event.doc)
            continue
        name = event.kind
        known = here.delivered[name] + len(held[name])
        data = event.data[max(0, known - event.offset) :]
        if event.offset > known:  # the node skipped bytes without a gap event: never hide that
            lost = event.offset - known
            if rest := held[name]:
                held[name] = b""
                here.delivered[name] += len(rest)
                yield StreamEvent(name, str(here), known - len(rest), rest)
            here.delivered[name] += lost
            yield StreamEvent("gap", str(here), known, b"", {"stream": name, "offset": known, "bytes": lost})
        data = held[name] + data
        cut = len(data) - (_incomplete(data) if whole else 0)
        offset = here.delivered[name]
        held[name] = data[cut:]
        here.delivered[name] += cut
        if not any(held.values()):
            here.node = event.cursor
        if cut:
            yield StreamEvent(name, str(here), offset, data[:cut])


def _incomplete(data: bytes) -> int:
    """How many bytes at the end are the beginning of a code point."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        need = 4 if byte & 0xF8 == 0xF0 else 3 if byte & 0xF0 == 0xE0 else 2 if byte & 0xE0 == 0xC0 else 1
        return back if need > back else 0
    return 0


def encode(event: StreamEvent, *, text: bool) -> bytes:
    """One event as sent on the wire."""
    head = f"event: {event.kind}\n" + (f"id: {event.cursor}\n" if event.cursor else "") + "data: "
    document: dict[str, object] = event.doc or {}
    if event.kind in ("stdout", "stderr"):
        try:
            if not text:
                raise ValueError
            document = {"offset": event.offset, "text": event.data.decode("utf-8")}
        except ValueError:
            # Put together by hand: base64 needs no escaping, and there may be much of it.
            coded = binascii.b2a_base64(event.data, newline=False)
            return b"".join((head.encode(), b'{"offset":%d,"base64":"' % event.offset, coded, b'"}\n\n'))
    return f"{head}{json.dumps(document, separators=(',', ':'))}\n\n".encode()


KEEP_ALIVE = b": still here\n\n"
KEEP_ALIVE_S = 15.0
RETRY_MS = 1000
"""When a client whose stream was cut by a stop of the service should come back."""
