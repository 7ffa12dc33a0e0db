"""The command line over a transport that answers from a script: no service, no sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from corral.cli import commands, connection
from corral.client import Event
from corral.errors import CorralError

RUN = "run_" + "0" * 26
SANDBOX = "sbx_" + "1" * 26


def ended(reason: str = "ok", exit_code: int | None = 0, **more: Any) -> dict[str, Any]:
    """A finished run."""
    result = {"reason": reason, "exit_code": exit_code, "started": True, "hint": None, "artifacts": [], **more}
    return {"id": RUN, "state": "finished", "sandbox_id": SANDBOX, "result": result}


@dataclass
class FakeTransport:
    """Answers `document` to everything; `events` are what a stream gives. Callables are called, exceptions raised."""

    document: Any = None
    events: list[Any] = field(default_factory=list)
    blocks: Any = ()
    calls: list[tuple[str, str, Any, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    leased: list[tuple[str, str, str]] = field(default_factory=list)
    uploads: list[bytes] = field(default_factory=list)
    streamed: list[str | None] = field(default_factory=list)
    closed: bool = False

    def request(
        self,
        method: str,
        path: str,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        self.calls.append((method, path, json, {k: v for k, v in (params or {}).items() if v is not None}))
        self.headers.append(dict(headers or {}))
        answer = self.document(method, path) if callable(self.document) else self.document
        if isinstance(answer, Exception):
            raise answer
        return answer

    def stream(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[Event]:
        self.streamed.append((params or {}).get("cursor"))
        for event in list(self.events):
            if callable(event):
                event()
            else:
                yield event

    def download(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        self.calls.append(("GET", path, None, dict(params or {})))
        blocks = self.blocks(path) if callable(self.blocks) else self.blocks
        if isinstance(blocks, Exception):
            raise blocks
        yield from blocks

    def upload(
        self, path: str, chunks: Iterable[bytes], params: Mapping[str, Any] | None = None, method: str = "PUT"
    ) -> dict[str, Any]:
        self.uploads.append(b"".join(chunks))
        self.calls.append((method, path, None, dict(params or {})))
        return {}

    def under(self, lease: str) -> Under:
        return Under(self, lease)

    def close(self) -> None:
        self.closed = True


class Under:
    """The fake, noting each call that goes out under the lease."""

    def __init__(self, inner: FakeTransport, lease: str) -> None:
        self._inner, self._lease = inner, lease
        self.stream, self.close = inner.stream, inner.close

    def request(
        self, method: str, path: str, json: Any = None, params: Any = None, headers: Any = None
    ) -> dict[str, Any]:
        self._inner.leased.append((method, path, self._lease))
        return self._inner.request(method, path, json, params, {**(headers or {}), "Corral-Lease": self._lease})

    def download(self, path: str, params: Any = None) -> Iterator[bytes]:
        self._inner.leased.append(("GET", path, self._lease))
        return self._inner.download(path, params)

    def upload(self, path: str, chunks: Iterable[bytes], params: Any = None, method: str = "PUT") -> dict[str, Any]:
        self._inner.leased.append((method, path, self._lease))
        return self._inner.upload(path, chunks, params, method)


@dataclass
class Called:
    status: int
    out: bytes
    err: str

    @property
    def json(self) -> Any:
        assert self.out.count(b"\n") == 1 and self.out.endswith(b"\n")
        return json.loads(self.out)


Call = Callable[..., Called]


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> FakeTransport:
    fake = FakeTransport(document=ended())
    monkeypatch.setattr(connection, "connect", lambda **_: fake)
    return fake


@pytest.fixture
def corral(transport: FakeTransport, capfdbinary: pytest.CaptureFixture[bytes]) -> Call:
    def call(*arguments: str) -> Called:
        status = commands.call(arguments)
        out, err = capfdbinary.readouterr()
        return Called(status, out, err.decode())

    return call


@pytest.fixture
def request_of(transport: FakeTransport, corral: Call) -> Callable[..., dict[str, Any]]:
    """The document that a command line posts."""

    def posted(*arguments: str) -> dict[str, Any]:
        called = corral(*arguments)
        posts = [json for method, _, json, _ in transport.calls if method == "POST"]
        assert posts, called.err
        document = dict(posts[0])
        assert document.pop("attached", True) is True
        return document

    return posted


def refusal(code: str, detail: str = "no", **more: Any) -> CorralError:
    return CorralError(code, detail, **more)
