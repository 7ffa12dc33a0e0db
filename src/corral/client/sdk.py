"""The Python SDK: `Corral` (sync) and `AsyncCorral`, embedded on a state directory or remote by URL, by one argument.

    with Corral() as c:
        run = c.run(code="print(6*7)", language="python")
        print(run.result.stdout.text)

A result is never raised, whatever the program did; `CorralError` says that the platform refused or failed.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from corral.client.transport import Event, Json, Transport, quote

P = ParamSpec("P")
T = TypeVar("T")
WAIT_S = 60.0


@dataclass(frozen=True)
class Output:
    """One stream of a result: the kept bytes, and what is known about the rest."""

    data: bytes
    text: str
    bytes: int
    truncated: bool

    @classmethod
    def of(cls, document: Json) -> Output:
        encoded = document.get("base64")
        text = str(document.get("text") or "")
        data = base64.b64decode(encoded) if encoded is not None else text.encode()
        return cls(data, text, int(document["bytes"]), bool(document["truncated"]))


class Result:
    """How a program ended. Members of the contract's result are attributes; `document` has them all."""

    def __init__(self, document: Json) -> None:
        self.document = document
        self.exit_code: int | None = document["exit_code"]
        self.signal: str | None = document["signal"]
        self.reason: str = document["reason"]
        self.hint: str | None = document["hint"]
        self.started: bool | None = document["started"]
        self.stdout = Output.of(document["stdout"])
        self.stderr = Output.of(document["stderr"])
        self.files: list[Json] = document["files"]
        self.artifacts: list[Json] = document["artifacts"]
        self.usage: Json = document["usage"]
        self.limits: Json = document["limits"]
        self.timings: Json = document["timings"]

    @property
    def ok(self) -> bool:
        """The program ran and exited 0."""
        return self.reason == "ok"

    def __repr__(self) -> str:
        return f"<Result {self.reason} exit_code={self.exit_code}>"


class Run:
    """A finished run."""

    def __init__(self, transport: Transport, document: Json) -> None:
        self._transport = transport
        self.document = document
        self.id: str = document["id"]
        self.sandbox_id: str | None = document["sandbox_id"]
        self.decisions: Json = document["decisions"]
        self.result = Result(document["result"])

    def artifact(self, path: str) -> bytes:
        """The bytes of an artifact by its path (absolute, or relative to /workspace)."""
        inner = "/".join(quote(part) for part in path.strip("/").split("/"))
        return b"".join(self._transport.download(f"/v1/runs/{self.id}/artifacts/{inner}"))

    def __repr__(self) -> str:
        return f"<Run {self.id} {self.result.reason}>"


class Sandbox:
    """A kept sandbox, leased to this client's key."""

    def __init__(self, transport: Transport, document: Json) -> None:
        self._transport = transport
        self.document = document
        self.id: str = document["id"]

    @property
    def state(self) -> str:
        """As it was when this object was made or last refreshed."""
        return str(self.document["state"])

    def refresh(self) -> Sandbox:
        """Look again."""
        self.document = self._transport.request("GET", f"/v1/sandboxes/{self.id}")
        return self

    def exec(self, argv: list[str] | None = None, **request: Any) -> Result:
        """Run a program (`argv`) or a shell text (`shell=`) and wait for its end."""
        if argv is not None:
            request["argv"] = argv
        document = self._transport.request("POST", f"/v1/sandboxes/{self.id}/execs", request, {"wait": WAIT_S})
        while document["result"] is None:
            document = self._transport.request("GET", f"/v1/execs/{document['id']}", None, {"wait": WAIT_S})
        return Result(document["result"])

    def exec_stream(self, argv: list[str] | None = None, **request: Any) -> Iterator[Event]:
        """The same as events: started, stdout, stderr, gap, ended (`doc["result"]`)."""
        if argv is not None:
            request["argv"] = argv
        document = self._transport.request("POST", f"/v1/sandboxes/{self.id}/execs", request, {"wait": 0})
        return self._transport.stream(f"/v1/execs/{document['id']}/stream")

    def delete(self) -> None:
        """End it; returns when it is terminated. Repeated: nothing."""
        while self._transport.request("DELETE", f"/v1/sandboxes/{self.id}")["state"] != "terminated":
            pass

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.state}>"


class Sandboxes:
    """`c.sandboxes`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, **request: Any) -> Sandbox:
        """A new sandbox; members of `POST /v1/sandboxes` as keywords."""
        return Sandbox(self._transport, self._transport.request("POST", "/v1/sandboxes", request))

    def get(self, sandbox_id: str) -> Sandbox:
        """By id; `not_found`."""
        return Sandbox(self._transport, self._transport.request("GET", f"/v1/sandboxes/{quote(sandbox_id)}"))

    def list(self) -> list[Sandbox]:
        """All that have not ended, newest first."""
        found: list[Sandbox] = []
        after: str | None = None
        while True:
            page = self._transport.request("GET", "/v1/sandboxes", None, {"after": after, "limit": 1000})
            found += [Sandbox(self._transport, item) for item in page["items"]]
            after = page["next"]
            if after is None:
                return found


class Corral:
    """See the module docstring. `url` None and no `CORRAL_URL`: embedded on `state_dir`."""

    def __init__(self, url: str | None = None, key: str | None = None, state_dir: str | None = None) -> None:
        from corral.client import connect

        self.transport = connect(url, key, state_dir)
        self.sandboxes = Sandboxes(self.transport)

    def run(self, **request: Any) -> Run:
        """One run to its end; members of `POST /v1/runs` as keywords (`code=`, `language=`, `timeout_s=`, …)."""
        document = self.transport.request("POST", "/v1/runs", request, {"wait": WAIT_S})
        while document["state"] != "finished":
            document = self.transport.request("GET", f"/v1/runs/{document['id']}", None, {"wait": WAIT_S})
        return Run(self.transport, document)

    def close(self) -> None:
        """Let go; kept sandboxes live on."""
        self.transport.close()

    def __enter__(self) -> Corral:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncSandbox:
    """`Sandbox` for asyncio: each call waits in a thread."""

    def __init__(self, below: Sandbox) -> None:
        self._below = below
        self.id = below.id

    @property
    def state(self) -> str:
        """As it was when last seen."""
        return self._below.state

    async def exec(self, argv: list[str] | None = None, **request: Any) -> Result:
        """See `Sandbox.exec`."""
        return await _threaded(self._below.exec, argv, **request)

    async def exec_stream(self, argv: list[str] | None = None, **request: Any) -> AsyncIterator[Event]:
        """See `Sandbox.exec_stream`."""
        events = await _threaded(self._below.exec_stream, argv, **request)
        while (event := await _threaded(lambda: next(events, None))) is not None:
            yield event

    async def delete(self) -> None:
        """See `Sandbox.delete`."""
        await _threaded(self._below.delete)


class AsyncSandboxes:
    """`Sandboxes` for asyncio."""

    def __init__(self, below: Sandboxes) -> None:
        self._below = below

    async def create(self, **request: Any) -> AsyncSandbox:
        """See `Sandboxes.create`."""
        return AsyncSandbox(await _threaded(self._below.create, **request))

    async def get(self, sandbox_id: str) -> AsyncSandbox:
        """See `Sandboxes.get`."""
        return AsyncSandbox(await _threaded(self._below.get, sandbox_id))

    async def list(self) -> list[AsyncSandbox]:
        """See `Sandboxes.list`."""
        return [AsyncSandbox(each) for each in await _threaded(self._below.list)]


class AsyncCorral:
    """`Corral` for asyncio, as an async context manager."""

    def __init__(self, url: str | None = None, key: str | None = None, state_dir: str | None = None) -> None:
        self._arguments = (url, key, state_dir)
        self._below: Corral | None = None

    async def __aenter__(self) -> AsyncCorral:
        self._below = await _threaded(Corral, *self._arguments)
        self.sandboxes = AsyncSandboxes(self._below.sandboxes)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._below is not None:
            await _threaded(self._below.close)

    async def run(self, **request: Any) -> Run:
        """See `Corral.run`."""
        if self._below is None:
            self._below = await _threaded(Corral, *self._arguments)
        return await _threaded(self._below.run, **request)


async def _threaded(call: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> T:
    import asyncio

    return await asyncio.to_thread(call, *arguments, **keywords)
