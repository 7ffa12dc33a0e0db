"""The transport over HTTP: to a URL, or to a unix socket in a state directory. Standard library only, for a quick start.

`HttpTransport` raises `Cut` when the connection cannot be made or breaks; `open_url` wraps it in the repeating form.
"""

from __future__ import annotations

import base64
import json as jsonlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from corral.client.transport import Cut, Event, Json, Params, Repeating, Single
from corral.errors import CorralError

CONNECT_TIMEOUT_S = 10.0
FIRST_PATIENCE_S = 3.0
READ_TIMEOUT_S = 90.0
"""Longer than the longest `wait` we ask for and than the pause between comments of a stream."""
BLOCK = 256 * 1024


class _UnixConnection(HTTPConnection):
    """HTTP on a unix socket, reached through its directory's descriptor: the path may be longer than a socket address."""

    def __init__(self, directory: str, name: str) -> None:
        super().__init__("corral", timeout=CONNECT_TIMEOUT_S)
        self._directory = directory
        self._name = name

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = -1
        try:
            sock.settimeout(self.timeout)
            folder = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            sock.connect(f"/proc/self/fd/{folder}/{self._name}")
        except BaseException:
            sock.close()
            raise
        finally:
            if folder >= 0:
                os.close(folder)
        self.sock = sock


class HttpTransport:
    """One attempt per call, no repetition. `connect` makes a fresh connection."""

    def __init__(self, connect: Callable[[], HTTPConnection], prefix: str = "", key: str | None = None) -> None:
        self._connect = connect
        self._prefix = prefix
        self._key = key
        self.answered = False
        """True once anything has answered."""

    def _send(
        self,
        method: str,
        path: str,
        params: Params | None,
        headers: Mapping[str, str] | None,
        body: bytes | Iterable[bytes] | None,
        content_type: str | None,
    ) -> tuple[HTTPConnection, HTTPResponse]:
        query = {name: _text(value) for name, value in (params or {}).items() if value is not None}
        target = self._prefix + path + ("?" + urlencode(query, errors="surrogateescape") if query else "")
        fields = dict(headers or {})
        if self._key is not None:
            fields["Authorization"] = f"Bearer {self._key}"
        if content_type is not None:
            fields["Content-Type"] = content_type
        connection = self._connect()
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise Cut(str(error), sent=False) from error
        try:
            if connection.sock is not None:
                connection.sock.settimeout(READ_TIMEOUT_S)
            connection.request(
                method,
                target,
                body=body,
                headers=fields,
                encode_chunked=body is not None and not isinstance(body, bytes),
            )
            response = connection.getresponse()
            self.answered = True
            return connection, response
        except (OSError, HTTPException) as error:
            early = _early_answer(connection)
            if early is not None:
                return connection, early
            connection.close()
            raise Cut(str(error) or type(error).__name__, sent=True) from error
        except BaseException:
            connection.close()
            raise

    def request(
        self,
        method: str,
        path: str,
        json: Json | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        body = None if json is None else jsonlib.dumps(json, separators=(",", ":")).encode()
        connection, response = self._send(method, path, params, headers, body, "application/json" if json else None)
        try:
            raw = _read_all(response)
        finally:
            connection.close()
        return _document(response.status, raw)

    def stream(self, path: str, params: Params | None = None) -> Iterator[Event]:
        wanted: dict[str, Any] = {"encoding": "base64", **(params or {})}
        connection, response = self._send("GET", path, wanted, {"Accept": "text/event-stream"}, None, None)
        try:
            if response.status != 200:
                _document(response.status, _read_all(response))
            yield from _events(response)
        finally:
            connection.close()

    def download(self, path: str, params: Params | None = None) -> Iterator[bytes]:
        connection, response = self._send("GET", path, params, None, None, None)
        try:
            if response.status != 200:
                _document(response.status, _read_all(response))
            while True:
                try:
                    block = response.read1(BLOCK)
                except (OSError, HTTPException) as error:
                    raise CorralError("infra_error", "the download broke off") from error
                if not block:
                    break
                yield block
            if response.length:  # bytes that were promised and did not come
                raise CorralError("infra_error", "the download broke off")
        finally:
            connection.close()

    def upload(self, path: str, chunks: Iterable[bytes], params: Params | None = None, method: str = "PUT") -> Json:
        connection, response = self._send(method, path, params, None, chunks, "application/octet-stream")
        try:
            raw = _read_all(response)
        finally:
            connection.close()
        return _document(response.status, raw)

    def close(self) -> None:
        """Nothing is held between calls."""


def _text(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _early_answer(connection: HTTPConnection) -> HTTPResponse | None:
    """An answer that came while we were still sending (413): read it although the peer has closed its side."""
    if connection.sock is None:
        return None
    try:
        connection.sock.settimeout(1.0)
        response = HTTPResponse(connection.sock)
        response.begin()
    except (OSError, HTTPException):
        return None
    return response


def _read_all(response: HTTPResponse) -> bytes:
    try:
        return response.read()
    except (OSError, HTTPException) as error:
        raise Cut(str(error) or type(error).__name__, sent=True) from error


def _document(status: int, raw: bytes) -> Json:
    try:
        document = jsonlib.loads(raw) if raw else {}
    except ValueError as error:
        if status >= 500:  # not from our routes: the server or a proxy before it is going or coming
            raise Cut(f"the service answered {status} without a document", sent=True) from error
        raise CorralError("infra_error", f"the service answered {status} without a JSON document") from error
    if 200 <= status < 300:
        return document if isinstance(document, dict) else {"value": document}
    if isinstance(document, dict) and "code" in document:
        raise CorralError.from_problem(document)
    raise CorralError("infra_error", f"the service answered {status}")


def _events(response: HTTPResponse) -> Iterator[Event]:
    """Server-sent events; `Cut` when the stream ends before `ended`."""
    kind, cursor, data = "", None, ""
    while True:
        try:
            line = response.readline()
        except (OSError, HTTPException) as error:
            raise Cut(str(error) or type(error).__name__, sent=True) from error
        if not line:
            raise Cut("the stream ended early", sent=True)
        text = line.rstrip(b"\r\n").decode("utf-8")
        if not text:
            if kind:
                yield _event(kind, cursor, jsonlib.loads(data) if data else {})
                if kind == "ended":
                    return
            kind, cursor, data = "", None, ""
            continue
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "id":
            cursor = value
        elif name == "data":
            data += value


def _event(kind: str, cursor: str | None, doc: Json) -> Event:
    if kind in ("stdout", "stderr"):
        data = base64.b64decode(doc["base64"]) if "base64" in doc else str(doc.get("text", "")).encode()
        return Event(kind, cursor, int(doc["offset"]), data)
    if kind == "error":
        raise CorralError.from_problem(doc)
    return Event(kind, cursor, int(doc.get("offset") or 0), b"", doc)


class _Url(Repeating):
    """A server that has answered once is waited for as long as it restarts; one that never did is probably not there."""

    def __init__(self, single: HttpTransport, url: str) -> None:
        super().__init__()
        self._single = single
        self.hint = f"check that a server listens on {url}"

    @property
    def patience_s(self) -> float:
        return self._patience_s if self._single.answered else FIRST_PATIENCE_S

    def current(self) -> Single:
        return self._single


def open_url(url: str, key: str | None) -> Repeating:
    """A transport to a server by URL (`http://`, `https://`). A bad URL is `invalid_value`."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise CorralError("invalid_value", f"CORRAL_URL: {error}", field="CORRAL_URL") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CorralError("invalid_value", f"CORRAL_URL {url!r} is not an http or https URL", field="CORRAL_URL")
    host = parts.hostname
    kind: type[HTTPConnection] = HTTPSConnection if parts.scheme == "https" else HTTPConnection

    def connect() -> HTTPConnection:
        return kind(host, port, timeout=CONNECT_TIMEOUT_S)

    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # no user, no password
    return _Url(HttpTransport(connect, parts.path.rstrip("/"), key), address)


def unix_transport(directory: str, name: str = "api.sock") -> HttpTransport:
    """Single attempts on the socket `directory/name`."""
    return HttpTransport(lambda: _UnixConnection(directory, name))
