"""A pydantic-ai workspace in a Corral sandbox. Needs `corral[pydantic-ai]`.

    client = AsyncCorral()
    agent = Agent(model, capabilities=[CorralWorkspace(client, ttl_s=3600)])

`CorralWorkspace` gives every run a sandbox of its own, made at the first use, or the one that the run's history names. A sandbox
outlives the run, as workspaces do: it ends by its `ttl_s`, or by `delete`. The client is the caller's, who opens and closes it.
"""

from __future__ import annotations

import asyncio
import errno
import math
import posixpath
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, Unpack

from pydantic_ai import RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.workspaces import (
    CommandResult,
    FileEntry,
    WorkspaceBackend,
    WorkspaceCommand,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)

from corral.client import AsyncCorral, CorralError
from corral.client.async_sdk import AsyncSandbox
from corral.client.values import FileInfo, Result, SandboxRequest
from corral.integrations import failures

__all__ = ["PROVIDER", "CorralBackend", "CorralWorkspace"]

PROVIDER = "corral"
"""`provider` of the refs; `id` is the sandbox's."""
WORKSPACE = "/workspace"
LONGEST_S = 3600.0
"""Time limit of commands without one, unless the request says otherwise."""
MOST_LINKS = 40
AT_ONCE = 8


class CorralBackend:
    """One sandbox as a `WorkspaceBackend` with commands, files and `realpath`.

    Nothing happens before the first operation, which makes a sandbox of `request` (members of `POST /v1/sandboxes`) or attaches to
    the one that `ref` names: `WorkspaceUnavailableError` if that one has ended. Never deletes it by itself; `delete` does.
    """

    def __init__(
        self, client: AsyncCorral, *, ref: WorkspaceRef | None = None, **request: Unpack[SandboxRequest]
    ) -> None:
        if ref is not None and ref.provider != PROVIDER:
            raise ValueError(f"{ref.provider!r} is not a workspace of {PROVIDER}")
        self._client = client
        self._ref = ref
        self._request: dict[str, Any] = {"timeout_s": LONGEST_S, **request}
        self._sandbox: AsyncSandbox | None = None
        self._opening: asyncio.Task[AsyncSandbox] | None = None

    @property
    def ref(self) -> WorkspaceRef | None:
        """The sandbox's identity: None until there is one, then always the same."""
        return self._ref

    async def delete(self) -> None:
        """End the sandbox, if there is one. Repeated: nothing."""
        if self._ref is None and self._opening is None:
            return
        try:
            await (await self._open()).delete()
        except WorkspaceUnavailableError:
            pass

    async def working_dir(self) -> str:
        await self._open()
        return WORKSPACE

    # -- the sandbox -------------------------------------------------------------------------------------------------------------
    async def _open(self) -> AsyncSandbox:
        """The sandbox. All first users wait for one making of it, which goes on when one of them is cancelled."""
        if self._sandbox is not None:
            return self._sandbox
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._made())
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        finally:
            if opening.done() and self._opening is opening:
                self._opening = None

    async def _made(self) -> AsyncSandbox:
        if self._ref is None:
            sandbox = await self._client.sandboxes.create(**self._request)
            self._ref = WorkspaceRef(provider=PROVIDER, id=sandbox.id)
        else:
            async with self._errors():
                sandbox = await self._client.sandboxes.get(self._ref.id)
            if sandbox.state in ("failed", "sanitizing", "terminated"):
                raise WorkspaceUnavailableError(f"the sandbox {sandbox.id} has ended")
        self._sandbox = sandbox
        return sandbox

    @asynccontextmanager
    async def _errors(self) -> AsyncGenerator[None, None]:
        """Refusals in the words of the protocol; what else goes wrong is passed on as it is."""
        try:
            yield
        except CorralError as error:
            if failures.is_gone(error):
                raise WorkspaceUnavailableError(f"{error.detail} ({error.code})") from error
            if (known := failures.os_error(error)) is not None:
                raise known from error
            raise

    # -- commands ----------------------------------------------------------------------------------------------------------------
    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """To its end, without input. A command that is cancelled, or over its time, is ended with all that it started."""
        if timeout is not None and not (isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0):
            raise ValueError("timeout is a positive number of seconds or None")
        if isinstance(command, str) != shell:
            raise TypeError("a string needs shell=True, a sequence of arguments shell=False")
        sandbox = await self._open()
        request: dict[str, Any] = {"env": None if env is None else dict(env), "timeout_s": timeout}
        request |= {"shell": command} if shell else {"argv": list(command)}
        async with self._errors():
            result = await sandbox.exec(**request)
        return _answer(result)

    # -- files -------------------------------------------------------------------------------------------------------------------
    async def read_bytes(self, path: str) -> bytes:
        sandbox = await self._open()
        async with self._errors():
            return await sandbox.files.read(_absolute(path))

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Atomic: other readers see the old content or the new."""
        sandbox = await self._open()
        async with self._errors():
            await sandbox.files.write(_absolute(path), data)

    async def stat(self, path: str) -> FileEntry:
        sandbox = await self._open()
        async with self._errors():
            return _entry(path, await sandbox.files.stat(_absolute(path)))

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        sandbox = await self._open()
        async with self._errors():
            found = await sandbox.files.list(_absolute(path))
        some = asyncio.Semaphore(AT_ONCE)

        async def followed(info: FileInfo) -> FileEntry:
            if not info.is_link:
                return _entry(info.path, info)
            async with some:
                try:
                    return await self.stat(info.path)
                except OSError:  # leads nowhere, in a circle, or where this user may not look
                    return FileEntry(name=info.name, path=info.path, is_dir=False, size=None)

        return await asyncio.gather(*(followed(info) for info in found))

    async def make_dir(self, path: str) -> None:
        sandbox = await self._open()
        async with self._errors():
            await sandbox.files.mkdir(_absolute(path))

    async def remove(self, path: str) -> None:
        """A file, link, or directory with its content; `ValueError` for the working directory and what is above it."""
        sandbox = await self._open()
        parent, name = posixpath.split(posixpath.normpath(_absolute(path)))
        target = posixpath.join(await self.realpath(parent), name)
        if target == WORKSPACE or WORKSPACE.startswith(target.rstrip("/") + "/"):
            raise ValueError("the working directory and what is above it cannot be removed")
        async with self._errors():
            await sandbox.files.delete(target, recursive=True)

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except FileNotFoundError:
            return False
        return True

    async def realpath(self, path: str) -> str:
        """As `os.path.realpath`: what is missing stays as written. A circle of links is an `OSError`."""
        sandbox = await self._open()
        rest = [part for part in reversed(_absolute(path).split("/")) if part]
        at, links = "/", 0
        while rest:
            part = rest.pop()
            if part in (".", ".."):
                at = posixpath.dirname(at) if part == ".." else at
                continue
            step = posixpath.join(at, part)
            target = None if step == WORKSPACE else await self._target(sandbox, step)
            if target is None:
                at = step
                continue
            links += 1
            if links > MOST_LINKS:
                raise OSError(errno.ELOOP, "too many links", path)
            at = "/" if target.startswith("/") else at
            rest += [part for part in reversed(target.split("/")) if part]
        return at

    async def _target(self, sandbox: AsyncSandbox, path: str) -> str | None:
        """Where a link points; None for everything else, and for what is not there."""
        async with self._errors():
            try:
                return (await sandbox.files.stat(path, follow=False)).target
            except CorralError as error:
                if error.code != "not_found" or failures.is_gone(error):
                    raise
                return None


class CorralWorkspace(AbstractCapability[Any]):
    """Gives each run of an agent a sandbox as its workspace; `request` are members of `POST /v1/sandboxes`."""

    def __init__(self, client: AsyncCorral, *, id: str | None = PROVIDER, **request: Unpack[SandboxRequest]) -> None:
        self.client = client
        self.id = id
        self.request = request

    @classmethod
    def combine(cls, capabilities: Sequence[AbstractCapability[Any]]) -> AbstractCapability[Any]:
        """A later one of the same id replaces an earlier one whole: nothing of its request is carried over."""
        return capabilities[-1]

    def get_workspace(self, ctx: RunContext[Any], *, ref: WorkspaceRef | None) -> WorkspaceBackend | None:
        """A new sandbox without `ref`, the same one with a ref of ours; refs of others are left to others."""
        if ref is not None and ref.provider != PROVIDER:
            return None
        return CorralBackend(self.client, ref=ref, **self.request)


def _answer(result: Result) -> CommandResult:
    if failures.ended_with_sandbox(result):
        raise WorkspaceUnavailableError(result.hint or result.reason)
    if result.reason == "timeout":
        raise WorkspaceTimeoutError(
            result.hint or "the command ran out of time", stdout=result.stdout.text, stderr=result.stderr.text
        )
    if result.reason == "output_limit" or result.stdout.truncated or result.stderr.truncated:
        _too_much(result)
    return CommandResult(
        exit_code=failures.exit_of(result), stdout=result.stdout.text, stderr=failures.complaint_of(result)
    )


def _too_much(result: Result) -> NoReturn:
    limit = int(result.limits["output"]["value"])
    raise WorkspaceOutputLimitError(
        f"a stream of the command is longer than {limit} bytes; let it write to a file and read parts of that",
        limit=limit,
        stdout=_beginning(result, "stdout"),
        stderr=_beginning(result, "stderr"),
    )


def _beginning(result: Result, stream: str) -> str:
    output = getattr(result, stream)
    return bytes(output.data[: output.head_bytes]).decode("utf-8", "replace")


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"the path {path!r} is not absolute")
    return path


def _entry(path: str, info: FileInfo) -> FileEntry:
    name = posixpath.basename(posixpath.normpath(path))
    return FileEntry(name=name, path=path, is_dir=info.is_dir, size=info.size if info.is_file else None)
