"""Single attempts over HTTP: to a URL, or to a unix socket in a state directory. No library, for a quick start.

Connections to a URL are kept for the next request for some seconds. What cannot be sent twice always gets a connection of its own, so that
one that the server was just closing cannot make a call doubtful.
"""

from __future__ import annotations

import base64
import json as jsonlib
import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

from corral.client.effects import Address, Effects, Wire
from corral.client.http1 import LAST_CHUNK, Response, chunk, head
from corral.client.line import PATIENCE_S, Answer, Cut, Event, Json, Request, Single
from corral.errors import CorralError

FIRST_PATIENCE_S = 3.0
KEEP_S = 3.0
"""Less than what servers keep an idle connection for."""
KEEP = 64
MAX_DOCUMENT = 256 * 1024 * 1024


class HttpSingle:
    """Requests to one address. `prefix` goes before every path; at most `keep` connections wait for the next request."""

    def __init__(
        self,
        effects: Effects,
        address: Address,
        host: str,
        prefix: str = "",
        key: str | None = None,
        keep: int = KEEP,
        *,
        alone: bool = True,
    ) -> None:
        """`alone` False: there are others to try, so that what will never be (no such host) is one more failed attempt."""
        self._alone = alone
        self._effects = effects
        self._address = address
        self._host = host
        self._prefix = prefix
        self._key = key
        self._keep = keep
        self._guard = threading.Lock()
        self._idle: list[tuple[Wire, object, float]] = []
        self._closed = False
        self.answered = False
        """True once anything has answered."""

    async def send(self, request: Request) -> Answer:
        """See `Single`."""
        first, streamed = self._encode(request)
        wire = None if request.fresh else self._kept()
        wire = wire or await self._connect()
        response = Response(request.method)
        try:
            try:
                await wire.send(first)
                if request.blocks is not None:
                    await _send_blocks(wire, request, chunked=streamed)
            except OSError:
                # an answer that came while we were still sending (413): read it although the peer has closed its side
                if not wire.waiting():
                    raise
            while not response.started:
                response.feed(await wire.receive())
            self.answered = True
            answer = HttpAnswer(self, wire, response)
            if not 200 <= response.status < 300:
                raise await _refusal(answer)
            return answer
        except OSError as error:
            wire.close()
            raise _cut(error) from error
        except BaseException:
            wire.close()
            raise

    def _encode(self, request: Request) -> tuple[bytes, bool]:
        """(the head, with a body that is at hand; whether the body is chunked)."""
        query = {name: _text(value) for name, value in request.params.items() if value is not None}
        target = self._prefix + request.path + ("?" + urlencode(query, errors="surrogateescape") if query else "")
        fields = dict(request.headers)
        if self._key is not None:
            fields["Authorization"] = f"Bearer {self._key}"
        body = request.raw
        if request.json is not None:
            body = jsonlib.dumps(request.json, separators=(",", ":")).encode()
            fields["Content-Type"] = "application/json"
        elif body is not None or request.blocks is not None:
            fields.setdefault("Content-Type", "application/octet-stream")
        chunked = request.blocks is not None and request.size is None
        if chunked:
            fields["Transfer-Encoding"] = "chunked"
        elif request.blocks is not None or body is not None or request.method in ("POST", "PUT"):
            fields["Content-Length"] = str(request.size if request.blocks is not None else len(body or b""))
        try:
            start = head(request.method, target, self._host, fields)
        except ValueError as error:
            raise CorralError("invalid_value", f"this cannot be sent: {error}", retryable=False) from error
        return start + (body or b""), chunked

    async def _connect(self) -> Wire:
        try:
            return await self._effects.connect(self._address)
        except OSError as error:
            if (told := _hopeless(error, self._host)) is not None:
                if self._alone:
                    raise told from error
                raise Cut(told.detail, sent=False) from error
            raise Cut(str(error) or type(error).__name__, sent=False) from error

    def _kept(self) -> Wire | None:
        place, now = self._effects.place(), time.monotonic()
        with self._guard:
            mine = [entry for entry in self._idle if entry[1] == place and now - entry[2] < KEEP_S]
            rest = [entry for entry in self._idle if entry not in mine]
            found: Wire | None = None
            while mine and found is None:
                wire = mine.pop()[0]
                if wire.waiting():
                    wire.close()
                else:
                    found = wire
            self._idle = mine
        for entry in rest:
            entry[0].close()
        return found

    def keep(self, wire: Wire) -> None:
        """Use a connection again, or let it go."""
        with self._guard:
            if not self._closed and len(self._idle) < self._keep:
                self._idle.append((wire, self._effects.place(), time.monotonic()))
                return
        wire.close()

    def close(self) -> None:
        """Let idle connections go; others close when their answers end."""
        with self._guard:
            idle, self._idle, self._closed = self._idle, [], True
        for wire, _, _ in idle:
            wire.close()


class HttpAnswer:
    """See `Answer`."""

    def __init__(self, single: HttpSingle, wire: Wire, response: Response) -> None:
        self._single = single
        self._wire: Wire | None = wire
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def document(self) -> Json:
        raw = await self.whole()
        try:
            document = jsonlib.loads(raw) if raw else {}
        except ValueError as error:
            raise _foreign(self.status) from error
        return document if isinstance(document, dict) else {"value": document}

    async def whole(self) -> bytes:
        """All bytes of the body."""
        parts, size = [], 0
        async for block in self.blocks():
            parts.append(block)
            if (size := size + len(block)) > MAX_DOCUMENT:
                raise CorralError("infra_error", "the answer is longer than any of ours", retryable=False)
        return b"".join(parts)

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        response, wire = self._response, self._wire
        assert wire is not None
        try:
            while True:
                for block in response.take():
                    yield block
                if response.ended:
                    break
                response.feed(await wire.receive())
        except OSError as error:
            raise _cut(error) from error
        if response.reusable:
            self._wire = None
            self._single.keep(wire)

    async def events(self) -> AsyncGenerator[Event, None]:
        rest = b""
        source = self.blocks()
        try:
            async for block in source:
                *whole, rest = (rest + block).split(b"\n\n")
                for text in whole:
                    event = _event(text)
                    if event is not None:
                        yield event
        finally:
            await source.aclose()

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()


def _cut(error: OSError) -> Cut:
    return Cut(str(error) or type(error).__name__, sent=True, slow=isinstance(error, TimeoutError))


async def _send_blocks(wire: Wire, request: Request, *, chunked: bool) -> None:
    assert request.blocks is not None
    left = request.size or 0
    async for block in request.blocks:
        if not block:
            continue
        if wire.waiting():  # an answer before the end: the rest is not wanted
            return
        if not chunked and len(block) > left:
            raise CorralError("conflict", "the content became longer while it was sent", retryable=True)
        left -= len(block)
        await wire.send(chunk(block) if chunked else block)
    if chunked:
        await wire.send(LAST_CHUNK)
    elif left:
        raise CorralError("conflict", "the content became shorter while it was sent", retryable=True)


async def _refusal(answer: HttpAnswer) -> Exception:
    raw = await answer.whole()
    await answer.close()
    try:
        document = jsonlib.loads(raw) if raw else None
    except ValueError:
        document = None
    if isinstance(document, dict) and "code" in document:
        error = CorralError.from_problem(document)
        after = answer.headers.get("retry-after", "")
        if after.isascii() and after.isdigit() and len(after) < 6:
            error.facts["retry_after_s"] = int(after)
        return error
    return _foreign(answer.status)


def _foreign(status: int) -> Exception:
    """An answer that is none of our routes'. From 500 on, the server or a proxy before it is going or coming."""
    if status >= 500:
        return Cut(f"the service answered {status} without a document of ours", sent=True)
    hint = "check CORRAL_URL: something else answers there"
    return CorralError("infra_error", f"answered {status} without a document of ours", hint=hint, retryable=False)


def _hopeless(error: OSError, host: str) -> CorralError | None:
    """The error of a connection that no repetition will make."""
    import socket
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        return CorralError(
            "node_unavailable",
            f"the certificate of {host} is not trusted: {error.verify_message}",
            hint="name the file of its authority: ca_file=, or CORRAL_CA_FILE",
            retryable=False,
        )
    if isinstance(error, ssl.SSLError):
        hint = "does the server speak TLS on this port? Use http:// if it does not"
        return CorralError("node_unavailable", f"no TLS with {host}: {error.reason}", hint=hint, retryable=False)
    if isinstance(error, socket.gaierror) and error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5)):
        return CorralError("node_unavailable", f"there is no host {host}", hint="check CORRAL_URL", retryable=False)
    return None


def _text(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _event(text: bytes) -> Event | None:
    """One server-sent event; None for a comment."""
    kind, cursor, data = "", None, ""
    for line in text.decode("utf-8").split("\n"):
        name, _, value = line.rstrip("\r").partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "id":
            cursor = value
        elif name == "data":
            data += value
    if not kind:
        return None
    doc = jsonlib.loads(data) if data else {}
    if kind in ("stdout", "stderr"):
        content = base64.b64decode(doc["base64"]) if "base64" in doc else str(doc.get("text", "")).encode()
        return Event(kind, cursor, int(doc["offset"]), content)
    if kind == "error":
        raise CorralError.from_problem(doc)
    return Event(kind, cursor, int(doc.get("offset") or 0), b"", doc)


class Urls:
    """One service at one or several URLs: a call that fails at one goes on at the next, and the others after it start there.

    One that has answered is waited for as long as it restarts; if none ever did, there is probably none.
    """

    def __init__(self, singles: Sequence[HttpSingle], effects: Effects, shown: str) -> None:
        self._singles = tuple(singles)
        self._effects = effects
        self._guard = threading.Lock()
        self._at = 0
        self.hint: str | None = f"check that a server listens on {shown}"

    @property
    def patience_s(self) -> float:
        return PATIENCE_S if any(single.answered for single in self._singles) else FIRST_PATIENCE_S

    async def current(self) -> Single:
        return self._singles[self._at]

    def failed(self, single: Single) -> None:
        """The next attempt goes to the next one, unless another call has gone on already."""
        with self._guard:
            if self._singles[self._at] is single:
                self._at = (self._at + 1) % len(self._singles)

    async def pause(self, seconds: float) -> None:
        await self._effects.sleep(seconds)

    async def close(self) -> None:
        for single in self._singles:
            single.close()


_ADDRESS = "write it like http://127.0.0.1:8484; without it commands work on the state directory"


def open_url(url: str | Sequence[str], key: str | None, effects: Effects, ca_file: str | None = None) -> Urls:
    """A server by URL (`http://`, `https://`, verified), or by several: a list, or separated by commas.

    A bad URL is `invalid_value`; nothing is connected yet.
    """
    given = [each.strip() for each in (url.split(",") if isinstance(url, str) else url)]
    given = [each for each in given if each] or [""]
    made = [_single(each, key, effects, ca_file, alone=len(given) == 1) for each in given]
    return Urls([single for single, _ in made], effects, " or ".join(shown for _, shown in made))


def _single(url: str, key: str | None, effects: Effects, ca_file: str | None, *, alone: bool) -> tuple[HttpSingle, str]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise CorralError("invalid_value", f"CORRAL_URL: {error}", field="CORRAL_URL", hint=_ADDRESS) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        detail = f"CORRAL_URL {url!r} is not an http or https URL"
        raise CorralError("invalid_value", detail, field="CORRAL_URL", hint=_ADDRESS)
    if parts.query or parts.fragment:
        hint = "give the address alone; the key goes into CORRAL_KEY"
        raise CorralError("invalid_value", "CORRAL_URL has more than an address", field="CORRAL_URL", hint=hint)
    tls = None
    if parts.scheme == "https":
        tls = _verified(ca_file or os.environ.get("CORRAL_CA_FILE") or None)
    address = Address(parts.hostname, port or (443 if tls is not None else 80), tls)
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    host = name if port is None else f"{name}:{port}"
    return HttpSingle(effects, address, host, parts.path.rstrip("/"), key, alone=alone), f"{parts.scheme}://{host}"


def _verified(ca_file: str | None) -> Any:
    import ssl

    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        detail = f"no certificates can be read from {ca_file!r}: {error}"
        raise CorralError("invalid_value", detail, field="CORRAL_CA_FILE", hint="name a PEM file") from error


def unix_single(effects: Effects, directory: str, name: str = "api.sock") -> HttpSingle:
    """Single attempts on the socket `directory/name`. Who owns it is found by its name each time: an owner that ends hides it."""
    return HttpSingle(effects, Address(directory=directory, name=name), "corral", keep=0)
