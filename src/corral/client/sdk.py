"""The synchronous SDK: `Corral`, embedded on a state directory or remote by URL, by one argument.

    with Corral() as c:
        run = c.run(code="print(6*7)", language="python")
        print(run.result.stdout.text)

A result is never raised, whatever the program did; `CorralError` says that the platform refused or failed. A client may be used
from several threads. `AsyncCorral` in `corral.client.async_sdk` has the same surface for asyncio.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from typing import IO, Any, Literal, Unpack

from corral.client import endpoint
from corral.client.calls import Calls
from corral.client.effects import Blocking, drive, iterate
from corral.client.files import Content, FileCalls, Path, Progress, source_of
from corral.client.identity import IdentitySteps, Keys, Tenants
from corral.client.leases import Grip, GrippedLine, Lease
from corral.client.line import Event, Json, Line
from corral.client.templates import Templates
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
"""How long a call is repeated while the service answers that it is busy."""


class Run:
    """A finished run."""

    def __init__(self, calls: Calls, document: Json) -> None:
        self._calls = calls
        self.document = document
        self.id: str = document["id"]
        self.sandbox_id: str | None = document["sandbox_id"]
        self.decisions: Json = document["decisions"]
        self.result = Result(document["result"], document.get("agent_view"))

    def artifact(self, path: str) -> bytes:
        """The bytes of an artifact by its path (absolute, or relative to /workspace)."""
        return drive(self._calls.artifact(f"/v1/runs/{self.id}", path))

    def __repr__(self) -> str:
        return f"<Run {self.id} {self.result.reason}>"


class RunHandle:
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

    def refresh(self) -> RunHandle:
        """Look again."""
        self.document = drive(self._calls.look(self._at))
        return self

    def wait(self, timeout_s: float | None = None, *, agent_view: int | None = None) -> Run:
        """Its end. TimeoutError after `timeout_s`, which changes nothing: wait again."""
        self.document = drive(self._calls.wait(self._at, timeout_s, agent_view))
        return Run(self._calls, self.document)

    def cancel(self) -> RunHandle:
        """End it. A run that has finished stays as it is."""
        self.document = drive(self._calls.cancel(self._at))
        return self

    def stream(self, cursor: str | None = None) -> Generator[Event, None, None]:
        """started, stdout, stderr, gap, ended (`doc["result"]`), from a cursor on; resumed over broken connections."""
        return iterate(self._calls.line.stream(f"{self._at}/stream", {"cursor": cursor}))

    def __repr__(self) -> str:
        return f"<RunHandle {self.id} {self.state}>"


class Runs:
    """`c.runs`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def get(self, run_id: str) -> RunHandle:
        """By id; `not_found`."""
        return RunHandle(self._calls, drive(self._calls.look(f"/v1/runs/{quote(run_id)}")))

    def list(self, limit: int | None = None) -> list[Json]:
        """Summaries, newest first: `id state sandbox_id reason exit_code created_at finished_at total_ms`."""
        return drive(self._calls.pages("/v1/runs", None, limit))


class Exec:
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

    def refresh(self) -> Exec:
        """Look again."""
        self.document = drive(self._calls.look(self._at))
        return self

    def wait(self, timeout_s: float | None = None, *, agent_view: int | None = None) -> Result:
        """Its end. TimeoutError after `timeout_s`, which changes nothing: wait again."""
        self.document = drive(self._calls.wait(self._at, timeout_s, agent_view))
        return Result(self.document["result"], self.document.get("agent_view"))

    def cancel(self) -> Exec:
        """End it and all that it started. One that has ended stays as it is."""
        self.document = drive(self._calls.cancel(self._at))
        return self

    def events(self, cursor: str | None = None) -> Generator[Event, None, None]:
        """started, stdout, stderr, gap, ended (`doc["result"]`), from a cursor on; resumed over broken connections."""
        return iterate(self._calls.line.stream(f"{self._at}/stream", {"cursor": cursor}))

    def write(self, data: bytes | str, *, eof: bool = False) -> bool:
        """More input; returns when the program's side has taken it, False when the program reads no more.

        After an error `stdin_offset` says how much was accepted: write the rest.
        """
        raw = data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
        start, on = self.stdin_offset, True
        for accepted, reads in iterate(self._calls.write(self.id, raw, eof, start)):
            on = reads
            self.stdin_offset = None if start is None else start + accepted
        return on

    def close_stdin(self) -> None:
        """End of file for the program."""
        self.write(b"", eof=True)

    def signal(self, signal: str | int) -> None:
        """`TERM`, `SIGINT`, 9 …, to the whole exec."""
        drive(self._calls.signal(self.id, signal))

    def resize(self, rows: int, cols: int) -> None:
        """The size of its terminal."""
        drive(self._calls.resize(self.id, rows, cols))

    def artifact(self, path: str) -> bytes:
        """The bytes of an artifact by its path (absolute, or relative to /workspace)."""
        return drive(self._calls.artifact(self._at, path))

    def __repr__(self) -> str:
        return f"<Exec {self.id} {self.state}>"


class Execs:
    """`sb.execs`: what has been started in a sandbox."""

    def __init__(self, calls: Calls, sandbox_id: str) -> None:
        self._calls = calls
        self._sandbox_id = sandbox_id

    def get(self, exec_id: str) -> Exec:
        """By id; `not_found`."""
        return Exec(self._calls, drive(self._calls.look(f"/v1/execs/{quote(exec_id)}")), None)

    def list(self) -> list[Exec]:
        """All, oldest first. Their results are without output; `refresh` brings it."""
        found = drive(self._calls.line.request("GET", f"/v1/sandboxes/{quote(self._sandbox_id)}/execs"))
        return [Exec(self._calls, document, None) for document in found["items"]]


class Files:
    """`sb.files`: paths are absolute, or relative to /workspace; bytes and lone surrogates name what is not UTF-8."""

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls

    def as_user(self, user: str) -> Files:
        """The same files with the rights of `user` inside; `user_refused` where the template does not allow it."""
        return Files(FileCalls(self._calls.line, self._calls.sandbox_id, user))

    def read(
        self, path: Path, offset: int = 0, length: int | None = None, *, progress: Progress | None = None
    ) -> bytes:
        """The bytes from `offset`, at most `length`."""
        return drive(self._calls.read(path, offset, length, progress))

    def read_text(self, path: Path, *, errors: str = "strict") -> str:
        """The whole file as UTF-8."""
        return self.read(path).decode("utf-8", errors)

    def stream(
        self, path: Path, offset: int = 0, length: int | None = None, *, progress: Progress | None = None
    ) -> Generator[bytes, None, None]:
        """The same in blocks. A read that was cut off goes on; `conflict` if the file changed meanwhile."""
        return iterate(self._calls.stream(path, offset, length, progress))

    def write(
        self,
        path: Path,
        data: Content,
        mode: int | None = None,
        overwrite: bool = True,
        *,
        parents: bool = True,
        progress: Progress | None = None,
    ) -> FileInfo:
        """Atomic: the old content or the new, never a part. `data` is read from where it stands."""
        source = source_of(data, self._calls.line.effects)
        return drive(self._calls.write(path, source, mode, overwrite, parents, progress))

    def list(self, path: Path = "/workspace", recursive: bool = False) -> list[FileInfo]:
        """All entries, sorted by the bytes of their paths."""
        return drive(self._calls.list(path, recursive))

    def stat(self, path: Path, *, follow: bool = True) -> FileInfo:
        """One entry; `not_found`."""
        return drive(self._calls.stat(path, follow))

    def exists(self, path: Path) -> bool:
        """A link counts, whatever it points to."""
        return drive(self._calls.exists(path))

    def move(self, src: Path, dst: Path, overwrite: bool = False) -> FileInfo:
        """Rename. Not repeated when the connection breaks in the middle: look before you do it again."""
        return drive(self._calls.move(src, dst, overwrite))

    def mkdir(self, path: Path, *, parents: bool = True, mode: int | None = None) -> FileInfo:
        """A directory; one that is there is fine."""
        return drive(self._calls.mkdir(path, parents, mode))

    def delete(self, path: Path, recursive: bool = False) -> None:
        """A file, link or directory; links are removed, never followed."""
        drive(self._calls.delete(path, recursive))

    def upload(self, local: str | os.PathLike[str], path: Path, *, progress: Progress | None = None) -> None:
        """A local file or directory as `path`; the content of a directory is merged into one that is there."""
        drive(self._calls.upload(os.fspath(local), path, progress))

    def download(self, path: Path, local: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        """A file or directory as `local`; the content of a directory is merged into one that is there."""
        drive(self._calls.download(path, os.fspath(local), progress))

    def watch(self, path: Path = "/workspace", *, recursive: bool = False) -> Generator[FileEvent, None, None]:
        """What happens from `started` on, until the sandbox ends or the iterator is closed."""
        return iterate(self._calls.watch(path, recursive))


class Archive:
    """`sb.archive`: whole trees as tar streams."""

    def __init__(self, calls: FileCalls) -> None:
        self._calls = calls

    def get(self, path: Path = "/workspace", *, progress: Progress | None = None) -> Generator[bytes, None, None]:
        """A tar stream of a path inside."""
        return iterate(self._calls.get_archive(path, progress))

    def put(self, path: Path, data: bytes | IO[bytes] | Iterable[bytes], *, progress: Progress | None = None) -> None:
        """Unpack a tar stream in the directory `path`."""
        drive(self._calls.put_archive(path, source_of(data, self._calls.line.effects), progress))


class Sandbox:
    """A kept sandbox, leased to this client's key. As a context manager it is deleted at the end."""

    def __init__(self, calls: Calls, document: Json) -> None:
        self.grip = Grip()
        """The lease under which this object's calls go out."""
        self._plain = calls
        self._calls = calls = Calls(GrippedLine(calls.line, self.grip))
        self.document = document
        self.id: str = document["id"]
        self._at = f"/v1/sandboxes/{quote(self.id)}"
        self.execs = Execs(calls, self.id)
        self.files = Files(FileCalls(calls.line, self.id))
        self.archive = Archive(FileCalls(calls.line, self.id))

    @property
    def state(self) -> str:
        """As it was when this object was made or last refreshed."""
        return str(self.document["state"])

    def refresh(self) -> Sandbox:
        """Look again."""
        self.document = drive(self._calls.look(self._at))
        return self

    def exec(
        self, argv: Sequence[str] | None = None, *, agent_view: int | None = None, **request: Unpack[ExecRequest]
    ) -> Result:
        """Run a program (`argv`), a shell text (`shell=`) or `code=` and wait for its end. Interrupted: it is cancelled."""
        document = encoded({"argv": argv, **request})
        answer = drive(self._calls.to_its_end(f"{self._at}/execs", "/v1/execs", document, agent_view))
        return Result(answer["result"], answer.get("agent_view"))

    def exec_stream(
        self, argv: Sequence[str] | None = None, **request: Unpack[ExecRequest]
    ) -> Generator[Event, None, None]:
        """The same as events: started, stdout, stderr, gap, ended (`doc["result"]`).

        It starts when the first event is asked for; closing the iterator before `ended` cancels it.
        """
        document = encoded({"argv": argv, **request})
        return iterate(self._calls.watched(f"{self._at}/execs", "/v1/execs", document))

    def start(
        self, argv: Sequence[str] | None = None, *, stdin_open: bool = True, **request: Unpack[ExecRequest]
    ) -> Exec:
        """Start it and go on. `stdin_open`: more input follows by `write`, until `close_stdin`."""
        document = encoded({"argv": argv, **request, "stdin_open": stdin_open})
        return Exec(self._calls, drive(self._calls.start(f"{self._at}/execs", "/v1/execs", document)), 0)

    def lease(
        self,
        owner: str,
        ttl_s: float = 30.0,
        *,
        contention: Literal["wait", "fork", "new", "fail"] | None = None,
        wait_s: float | None = None,
        session: str | None = None,
    ) -> Lease:
        """A lease for `owner` (such as session/tool-call), held by `with` and renewed in the background: `lease.lost` says when not.

        While it is held, all calls of this object go out under it, and are `lease_lost` once it is. `contention`: if somebody else
        has the sandbox (default: wait inside the session, fail outside).
        """
        line = self._plain.line
        return Lease(self, line, self._like, owner, ttl_s, contention, wait_s, session)

    def _like(self, sandbox_id: str) -> Sandbox:
        return Sandbox(self._plain, {**self.document, "id": sandbox_id})

    def extend(
        self, *, ttl_s: float | Literal["none"] | None = None, idle_timeout_s: float | Literal["none"] | None = None
    ) -> Sandbox:
        """Move its ends, both counted from now: the time that it lives, and the time that it may be without activity."""
        self.document = drive(self._calls.extend(self.id, ttl_s, idle_timeout_s))
        return self

    def pause(self) -> Sandbox:
        """Stop all that runs in it, with its memory as it is, until `resume`. A paused one stays so."""
        self.document = drive(self._calls.turn(self.id, "pause"))
        return self

    def resume(self) -> Sandbox:
        """Let a paused sandbox go on. One that is not paused stays as it is."""
        self.document = drive(self._calls.turn(self.id, "resume"))
        return self

    def delete(self) -> None:
        """End it; returns when it is terminated. Repeated: nothing."""
        self.document = drive(self._calls.delete(self.id))

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.state}>"


class Sandboxes:
    """`c.sandboxes`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def create(self, **request: Unpack[SandboxRequest]) -> Sandbox:
        """A new sandbox; members of `POST /v1/sandboxes` as keywords."""
        return Sandbox(self._calls, drive(self._calls.create(encoded(request))))

    def get(self, sandbox_id: str) -> Sandbox:
        """By id; `not_found`."""
        return Sandbox(self._calls, drive(self._calls.look(f"/v1/sandboxes/{quote(sandbox_id)}")))

    def list(self, *, all: bool = False) -> list[Sandbox]:
        """All that have not ended (`all`: those too), newest first."""
        found = drive(self._calls.pages("/v1/sandboxes", {"all": all or None}))
        return [Sandbox(self._calls, document) for document in found]


class Corral:
    """A client; closed as a context manager or by `close`. Kept sandboxes live on.

    `url` (with `key`): that server; several (a list, or separated by commas) are replicas of one service, and a call that fails at
    one goes on at the next. `state_dir`: embedded on that directory. Neither: `CORRAL_URL` (with `CORRAL_KEY`), else the
    default state directory. `ca_file` (or `CORRAL_CA_FILE`): PEM file of the authority that signed the server's certificate.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        key: str | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        *,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        effects = Blocking()
        place = None if state_dir is None else os.fspath(state_dir)
        target = endpoint(url, key, place, None if ca_file is None else os.fspath(ca_file), effects)
        self._calls = Calls(Line(target, effects, BUSY_S))
        self.runs = Runs(self._calls)
        self.sandboxes = Sandboxes(self._calls)
        self.templates = Templates(self._calls)
        self.keys = Keys(self._calls)
        self.tenants = Tenants(self._calls)
        drive(target.current())  # so that a bad directory shows here

    def run(self, *, agent_view: int | None = None, **request: Unpack[RunRequest]) -> Run:
        """One run to its end; members of `POST /v1/runs` as keywords. Interrupted: it is cancelled."""
        return Run(self._calls, drive(self._calls.to_its_end("/v1/runs", "/v1/runs", encoded(request), agent_view)))

    def submit(self, **request: Unpack[RunRequest]) -> RunHandle:
        """Start a run and go on."""
        return RunHandle(self._calls, drive(self._calls.start("/v1/runs", "/v1/runs", encoded(request))))

    def whoami(self) -> Json:
        """Who the key is: `tenant user key by owner scopes expires_at`."""
        return drive(IdentitySteps(self._calls).whoami())

    def request(self, method: str, path: str, json: Json | None = None, **params: Any) -> Json:
        """Any other route of the API, with the same repetitions."""
        return drive(self._calls.line.request(method, path, json, params))

    def close(self) -> None:
        """Let go. Repeated: nothing."""
        drive(self._calls.line.close())

    def __enter__(self) -> Corral:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
