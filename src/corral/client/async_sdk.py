"""The SDK for asyncio: `AsyncCorral`, the same surface as `Corral`. What a method promises is said there.

    async with AsyncCorral() as c:
        run = await c.run(code="print(6*7)", language="python")
        print(run.result.stdout.text)

Nothing waits in a thread: connections and the owner's calls belong to the event loop. A task that is cancelled in `run` or `exec`
cancels the program that it waited for. Threads are used for the local disk only, and to open an embedded state directory.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from typing import IO, Any, Literal, Unpack

from corral.client import endpoint
from corral.client.aio import Loop
from corral.client.async_leases import AsyncLease
from corral.client.calls import Calls
from corral.client.files import Content, FileCalls, Path, Progress, source_of
from corral.client.identity import AsyncKeys, AsyncTenants, IdentitySteps
from corral.client.leases import Grip, GrippedLine
from corral.client.line import Event, Json, Line
from corral.client.templates import AsyncTemplates
from corral.client.transport import quote
from corral.client.values import (
    ExecRequest,
    FileEvent,
    FileInfo,
    Result,
    RunRequest,
    SandboxRequest,
    encoded,
)

BUSY_S = 30.0
"""See `corral.client.sdk`."""
DELETE_S = 60.0
OPEN_S = 10.0
"""How long a client whose opening was interrupted is waited for until it has let go."""


class AsyncRun:
    """A finished run."""

    def __init__(self, calls: Calls, document: Json) -> None:
        self._calls = calls
        self.document = document
        self.id: str = document["id"]
        self.sandbox_id: str | None = document["sandbox_id"]
        self.decisions: Json = document["decisions"]
        self.result = Result(document["result"], document.get("agent_view"))

    async def artifact(self, path: str) -> bytes:
        """The bytes of an artifact by its path (absolute, or relative to /workspace)."""
        return await self._calls.artifact(f"/v1/runs/{self.id}", path)

    def __repr__(self) -> str:
        return f"<AsyncRun {self.id} {self.result.reason}>"


class AsyncRunHandle:
    """A run that was submitted. It goes on whatever happens to this object; `c.runs.get(id)` makes another."""

    def __init__(self, calls: Calls, document: Json) -> None:
        self._calls = calls
        self.document = document
        self.id: str = document["id"]
        self._at = f"/v1/runs/{quote(self.id)}"

    @property
    def state(self) -> str:
        """As it was when last seen: queued, starting, running, collecting, finished."""
        return str(self.document["state"])

    @property
    def result(self) -> Result | None:
        """The result if the run had finished when last seen."""
        found = self.document.get("result")
        return None if found is None else Result(found, self.document.get("agent_view"))

    async def refresh(self) -> AsyncRunHandle:
        """Look again."""
        self.document = await self._calls.look(self._at)
        return self

    async def wait(self, timeout_s: float | None = None, *, agent_view: int | None = None) -> AsyncRun:
        """Its end. TimeoutError after `timeout_s`, which changes nothing: wait again."""
        self.document = await self._calls.wait(self._at, timeout_s, agent_view)
        return AsyncRun(self._calls, self.document)

    async def cancel(self) -> AsyncRunHandle:
        """End it. A run that has finished stays as it is."""
        self.document = await self._calls.cancel(self._at)
        return self

    def stream(self, cursor: str | None = None) -> AsyncGenerator[Event, None]:
        """started, stdout, stderr, gap, ended (`doc["result"]`), from a cursor on; resumed over broken connections."""
        return self._calls.line.stream(f"{self._at}/stream", {"cursor": cursor})

    def __repr__(self) -> str:
        return f"<AsyncRunHandle {self.id} {self.state}>"


class AsyncRuns:
    """`c.runs`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def get(self, run_id: str) -> AsyncRunHandle:
        """By id; `not_found`."""
        return AsyncRunHandle(self._calls, (await self._calls.look(f"/v1/runs/{quote(run_id)}")))

    async def list(self, limit: int | None = None) -> list[Json]:
        """Summaries, newest first: `id state sandbox_id reason exit_code created_at finished_at total_ms`."""
        return await self._calls.pages("/v1/runs", None, limit)


class AsyncExec:
    """A program that was started in a sandbox. It goes on whatever happens to this object.

    Input: `write` follows what was written before (after `stdin=` of the start), `stdin_offset` counts it. A handle from
    `sb.execs.get` does not know the count (None) until it is set; without it, input that was cut off is an error instead of being
    sent again.
    """

    def __init__(self, calls: Calls, document: Json, stdin_offset: int | None) -> None:
        self._calls = calls
        self.document = document
        self.id: str = document["id"]
        self.sandbox_id: str = document["sandbox_id"]
        self.stdin_offset = stdin_offset
        self._at = f"/v1/execs/{quote(self.id)}"

    @property
    def state(self) -> str:
        """As it was when last seen."""
        return str(self.document["state"])

    @property
    def result(self) -> Result | None:
        """The result if the program had ended when last seen."""
        found = self.document.get("result")
        return None if found is None else Result(found, self.document.get("agent_view"))

    async def refresh(self) -> AsyncExec:
        """Look again."""
        self.document = await self._calls.look(self._at)
        return self

    async def wait(self, timeout_s: float | None = None, *, agent_view: int | None = None) -> Result:
        """Its end. TimeoutError after `timeout_s`, which changes nothing: wait again."""
        self.document = await self._calls.wait(self._at, timeout_s, agent_view)
        return Result(self.document["result"], self.document.get("agent_view"))

    async def cancel(self) -> AsyncExec:
        """End it and all that it started. One that has ended stays as it is."""
        self.document = await self._calls.cancel(self._at)
        return self

    def events(self, cursor: str | None = None) -> AsyncGenerator[Event, None]:
        """started, stdout, stderr, gap, ended (`doc["result"]`), from a cursor on; resumed over broken connections."""
        return self._calls.line.stream(f"{self._at}/stream", {"cursor": cursor})

    async def write(self, data: bytes | str, *, eof: bool = False) -> bool:
        """More input; returns when the program's side has taken it, False when the program reads no more.

        After an error `stdin_offset` says how much was accepted: write the rest.
        """
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
        start, on = self.stdin_offset, True
        async for accepted, reads in self._calls.write(self.id, raw, eof, start):
            on = reads
            self.stdin_offset = None if start is None else start + accepted
        return on

    async def close_stdin(self) -> None:
        """End of file for the program."""
        await self.write(b"", eof=True)

    async def signal(self, signal: str | int) -> None:
        """`TERM`, `SIGINT`, 9 …, to the whole exec."""
        await self._calls.signal(self.id, signal)

    async def resize(self, rows: int, cols: int) -> None:
        """The size of its terminal."""
        await self._calls.resize(self.id, rows, cols)

    async def artifact(self, path: str) -> bytes:
        """The bytes of an artifact by its path (absolute, or relative to /workspace)."""
        return await self._calls.artifact(self._at, path)

    def __repr__(self) -> str:
        return f"<AsyncExec {self.id} {self.state}>"


class AsyncExecs:
    """`sb.execs`: what has been started in a sandbox."""

    def __init__(self, calls: Calls, sandbox_id: str) -> None:
        self._calls = calls
        self._sandbox_id = sandbox_id

    async def get(self, exec_id: str) -> AsyncExec:
        """By id; `not_found`."""
        return AsyncExec(self._calls, (await self._calls.look(f"/v1/execs/{quote(exec_id)}")), None)

    async def list(self) -> list[AsyncExec]:
        """All, oldest first. Their results are without output; `refresh` brings it."""
        found = await self._calls.line.request("GET", f"/v1/sandboxes/{quote(self._sandbox_id)}/execs")
        return [AsyncExec(self._calls, document, None) for document in found["items"]]


class AsyncFiles:
    """`sb.files`: paths are absolute, or relative to /workspace; bytes and lone surrogates name what is not UTF-8."""

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls

    def as_user(self, user: str) -> AsyncFiles:
        """The same files with the rights of `user` inside; `user_refused` where the template does not allow it."""
        return AsyncFiles(FileCalls(self._calls.line, self._calls.sandbox_id, user))

    async def read(
        self, path: Path, offset: int = 0, length: int | None = None, *, progress: Progress | None = None
    ) -> bytes:
        """The bytes from `offset`, at most `length`."""
        return await self._calls.read(path, offset, length, progress)

    async def read_text(self, path: Path, *, errors: str = "strict") -> str:
        """The whole file as UTF-8."""
        return (await self.read(path)).decode("utf-8", errors)

    def stream(
        self, path: Path, offset: int = 0, length: int | None = None, *, progress: Progress | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The same in blocks. A read that was cut off goes on; `conflict` if the file changed meanwhile."""
        return self._calls.stream(path, offset, length, progress)

    async def write(
        self,
        path: Path,
        data: Content | AsyncIterable[bytes],
        mode: int | None = None,
        overwrite: bool = True,
        *,
        parents: bool = True,
        progress: Progress | None = None,
    ) -> FileInfo:
        """Atomic: the old content or the new, never a part. `data` is read from where it stands."""
        source = source_of(data, self._calls.line.effects)
        return await self._calls.write(path, source, mode, overwrite, parents, progress)

    async def list(self, path: Path = "/workspace", recursive: bool = False) -> list[FileInfo]:
        """All entries, sorted by the bytes of their paths."""
        return await self._calls.list(path, recursive)

    async def stat(self, path: Path, *, follow: bool = True) -> FileInfo:
        """One entry; `not_found`."""
        return await self._calls.stat(path, follow)

    async def exists(self, path: Path) -> bool:
        """A link counts, whatever it points to."""
        return await self._calls.exists(path)

    async def move(self, src: Path, dst: Path, overwrite: bool = False) -> FileInfo:
        """Rename. Not repeated when the connection breaks in the middle: look before you do it again."""
        return await self._calls.move(src, dst, overwrite)

    async def mkdir(self, path: Path, *, parents: bool = True, mode: int | None = None) -> FileInfo:
        """A directory; one that is there is fine."""
        return await self._calls.mkdir(path, parents, mode)

    async def delete(self, path: Path, recursive: bool = False) -> None:
        """A file, link or directory; links are removed, never followed."""
        await self._calls.delete(path, recursive)

    async def upload(self, local: str | os.PathLike[str], path: Path, *, progress: Progress | None = None) -> None:
        """A local file or directory as `path`; the content of a directory is merged into one that is there."""
        await self._calls.upload(os.fspath(local), path, progress)

    async def download(self, path: Path, local: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        """A file or directory as `local`; the content of a directory is merged into one that is there."""
        await self._calls.download(path, os.fspath(local), progress)

    def watch(self, path: Path = "/workspace", *, recursive: bool = False) -> AsyncGenerator[FileEvent, None]:
        """What happens from `started` on, until the sandbox ends or the iterator is closed."""
        return self._calls.watch(path, recursive)


class AsyncArchive:
    """`sb.archive`: whole trees as tar streams."""

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls

    def get(self, path: Path = "/workspace", *, progress: Progress | None = None) -> AsyncGenerator[bytes, None]:
        """A tar stream of a path inside."""
        return self._calls.get_archive(path, progress)

    async def put(
        self,
        path: Path,
        data: bytes | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes],
        *,
        progress: Progress | None = None,
    ) -> None:
        """Unpack a tar stream in the directory `path`."""
        await self._calls.put_archive(path, source_of(data, self._calls.line.effects), progress)


class AsyncSandbox:
    """A kept sandbox, leased to this client's key. As a context manager it is deleted at the end."""

    def __init__(self, calls: Calls, document: Json) -> None:
        self.grip = Grip()
        """The lease under which this object's calls go out."""
        self._plain = calls
        self._calls = calls = Calls(GrippedLine(calls.line, self.grip))
        self.document = document
        self.id: str = document["id"]
        self._at = f"/v1/sandboxes/{quote(self.id)}"
        self.execs = AsyncExecs(calls, self.id)
        self.files = AsyncFiles(FileCalls(calls.line, self.id))
        self.archive = AsyncArchive(FileCalls(calls.line, self.id))

    @property
    def state(self) -> str:
        """As it was when this object was made or last refreshed."""
        return str(self.document["state"])

    async def refresh(self) -> AsyncSandbox:
        """Look again."""
        self.document = await self._calls.look(self._at)
        return self

    async def exec(
        self, argv: Sequence[str] | None = None, *, agent_view: int | None = None, **request: Unpack[ExecRequest]
    ) -> Result:
        """AsyncRun a program (`argv`), a shell text (`shell=`) or `code=` and wait for its end. Interrupted: it is cancelled."""
        document = encoded({"argv": argv, **request})
        answer = await self._calls.to_its_end(f"{self._at}/execs", "/v1/execs", document, agent_view)
        return Result(answer["result"], answer.get("agent_view"))

    def exec_stream(
        self, argv: Sequence[str] | None = None, **request: Unpack[ExecRequest]
    ) -> AsyncGenerator[Event, None]:
        """The same as events: started, stdout, stderr, gap, ended (`doc["result"]`).

        It starts when the first event is asked for; closing the iterator before `ended` cancels it.
        """
        document = encoded({"argv": argv, **request})
        return self._calls.watched(f"{self._at}/execs", "/v1/execs", document)

    async def start(
        self, argv: Sequence[str] | None = None, *, stdin_open: bool = True, **request: Unpack[ExecRequest]
    ) -> AsyncExec:
        """Start it and go on. `stdin_open`: more input follows by `write`, until `close_stdin`."""
        document = encoded({"argv": argv, **request, "stdin_open": stdin_open})
        return AsyncExec(self._calls, (await self._calls.start(f"{self._at}/execs", "/v1/execs", document)), 0)

    def lease(
        self,
        owner: str,
        ttl_s: float = 30.0,
        *,
        contention: Literal["wait", "fork", "new", "fail"] | None = None,
        wait_s: float | None = None,
        session: str | None = None,
    ) -> AsyncLease:
        """A lease for `owner` (such as session/tool-call), held by `async with` and renewed in the background: `lease.lost` says when not.

        While it is held, all calls of this object go out under it, and are `lease_lost` once it is. `contention`: if somebody else
        has the sandbox (default: wait inside the session, fail outside).
        """
        line = self._plain.line
        return AsyncLease(self, line, self._like, owner, ttl_s, contention, wait_s, session)

    def _like(self, sandbox_id: str) -> AsyncSandbox:
        return AsyncSandbox(self._plain, {**self.document, "id": sandbox_id})

    async def extend(
        self, *, ttl_s: float | Literal["none"] | None = None, idle_timeout_s: float | Literal["none"] | None = None
    ) -> AsyncSandbox:
        """Move its ends, both counted from now: the time that it lives, and the time that it may be without activity."""
        self.document = await self._calls.extend(self.id, ttl_s, idle_timeout_s)
        return self

    async def pause(self) -> AsyncSandbox:
        """Stop all that runs in it, with its memory as it is, until `resume`. A paused one stays so."""
        self.document = await self._calls.turn(self.id, "pause")
        return self

    async def resume(self) -> AsyncSandbox:
        """Let a paused sandbox go on. One that is not paused stays as it is."""
        self.document = await self._calls.turn(self.id, "resume")
        return self

    async def delete(self) -> None:
        """End it; returns when it is terminated. Repeated: nothing."""
        self.document = await self._calls.delete(self.id)

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._calls.line.effects.finish(self.delete(), DELETE_S)

    def __repr__(self) -> str:
        return f"<AsyncSandbox {self.id} {self.state}>"


class AsyncSandboxes:
    """`c.sandboxes`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def create(self, **request: Unpack[SandboxRequest]) -> AsyncSandbox:
        """A new sandbox; members of `POST /v1/sandboxes` as keywords."""
        return AsyncSandbox(self._calls, (await self._calls.create(encoded(request))))

    async def get(self, sandbox_id: str) -> AsyncSandbox:
        """By id; `not_found`."""
        return AsyncSandbox(self._calls, (await self._calls.look(f"/v1/sandboxes/{quote(sandbox_id)}")))

    async def list(self, *, all: bool = False) -> list[AsyncSandbox]:
        """All that have not ended (`all`: those too), newest first."""
        found = await self._calls.pages("/v1/sandboxes", {"all": all or None})
        return [AsyncSandbox(self._calls, document) for document in found]


class AsyncCorral:
    """A client, used from one event loop at a time; closed as an async context manager or by `close`. Arguments as of `Corral`."""

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        key: str | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        *,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        effects = Loop()
        place = None if state_dir is None else os.fspath(state_dir)
        target = endpoint(url, key, place, None if ca_file is None else os.fspath(ca_file), effects)
        self._calls = Calls(Line(target, effects, BUSY_S))
        self.runs = AsyncRuns(self._calls)
        self.sandboxes = AsyncSandboxes(self._calls)
        self.templates = AsyncTemplates(self._calls)
        self.keys = AsyncKeys(self._calls)
        self.tenants = AsyncTenants(self._calls)

    async def run(self, *, agent_view: int | None = None, **request: Unpack[RunRequest]) -> AsyncRun:
        """One run to its end; members of `POST /v1/runs` as keywords. Interrupted: it is cancelled."""
        return AsyncRun(
            self._calls, (await self._calls.to_its_end("/v1/runs", "/v1/runs", encoded(request), agent_view))
        )

    async def submit(self, **request: Unpack[RunRequest]) -> AsyncRunHandle:
        """Start a run and go on."""
        return AsyncRunHandle(self._calls, (await self._calls.start("/v1/runs", "/v1/runs", encoded(request))))

    async def whoami(self) -> Json:
        """Who the key is: `tenant user key by owner scopes expires_at`."""
        return await IdentitySteps(self._calls).whoami()

    async def request(self, method: str, path: str, json: Json | None = None, **params: Any) -> Json:
        """Any other route of the API, with the same repetitions."""
        return await self._calls.line.request(method, path, json, params)

    async def close(self) -> None:
        """Let go. Repeated: nothing."""
        await self._calls.line.close()

    async def __aenter__(self) -> AsyncCorral:
        line = self._calls.line
        try:
            await line.endpoint.current()  # so that a bad directory shows here
        except BaseException:
            await line.effects.finish(line.close(), OPEN_S)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
