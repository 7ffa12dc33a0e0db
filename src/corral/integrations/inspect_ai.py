"""The sandbox `corral` of inspect_ai. Needs `corral[inspect-ai]`, which registers it.

    Task(dataset, solver=..., sandbox="corral")
    Task(dataset, solver=..., sandbox=("corral", "corral.yaml"))          # a file with members of `CorralConfig`
    Task(dataset, solver=..., sandbox=SandboxEnvironmentSpec("corral", CorralConfig(memory="1G")))

A sample has one sandbox, made at its start and deleted at its end. Configurations are written to logs of evaluations, so a key is
never part of one: it comes from `CORRAL_KEY`.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import anyio
import yaml
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from corral.client import AsyncCorral, CorralError
from corral.client.async_sdk import AsyncSandbox
from corral.client.values import Result
from corral.integrations import failures

__all__ = ["CorralConfig", "CorralSandboxEnvironment"]

WORKSPACE = "/workspace"
WHOLE_INPUT = 1024 * 1024
"""Input up to here goes with the request, more follows the start."""
CANCEL_S = 10.0


class CorralConfig(BaseModel):
    """Where the sandboxes are, and what each of them may take. Every member may be left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = None
    """A server; without it, what `CORRAL_URL` or else `CORRAL_STATE_DIR` say, embedded on the default directory at last."""
    state_dir: str | None = None
    ca_file: str | None = None
    template: str | None = None
    runtime: str | None = None
    isolation: Literal["standard", "strong"] | None = None
    network: str | None = None
    memory: int | str | None = None
    cpu: float | None = None
    pids: int | None = None
    disk: int | str | None = None
    tmp: int | str | None = None
    timeout_s: float = 3600.0
    """Time limit of programs for which the caller gives none."""
    ttl_s: float = 21600.0
    """The sandbox ends after this, should nobody be left to delete it."""

    def request(self) -> dict[str, Any]:
        """Members of `POST /v1/sandboxes`."""
        return self.model_dump(exclude={"url", "state_dir", "ca_file"}, exclude_none=True)

    def place(self) -> tuple[str | None, str | None, str | None]:
        """What tells clients apart."""
        return self.url, self.state_dir, self.ca_file


class _Shared:
    """A client and how many tasks and samples use it."""

    def __init__(self, client: AsyncCorral) -> None:
        self.client = client
        self.users = 0


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, _Shared]] = WeakKeyDictionary()


def _acquire(config: CorralConfig) -> AsyncCorral:
    """The client of this event loop for that place; each call is paired with a `_release`."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("the sandbox corral needs inspect's backend asyncio, not trio") from None
    clients = _shared.setdefault(loop, {})
    shared = clients.get(config.place())
    if shared is None:
        client = AsyncCorral(config.url, state_dir=config.state_dir, ca_file=config.ca_file)
        shared = clients[config.place()] = _Shared(client)
    shared.users += 1
    return shared.client


async def _release(config: CorralConfig) -> None:
    clients = _shared.get(asyncio.get_running_loop(), {})
    shared = clients.get(config.place())
    if shared is None:
        return
    shared.users -= 1
    if shared.users == 0:
        del clients[config.place()]
        await shared.client.close()


@sandboxenv(name="corral")
class CorralSandboxEnvironment(SandboxEnvironment):
    """One sandbox. Programs and files have the rights of the user `sandbox`; `user="root"` where the policy lets the template."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        super().__init__()
        self.sandbox = sandbox

    # -- its life ----------------------------------------------------------------------------------------------------------------
    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """One client for all samples, kept until `task_cleanup`."""
        _acquire(_settled(config))

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        await _release(_settled(config))

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        settled = _settled(config)
        client = _acquire(settled)
        try:
            return {"default": cls(await client.sandboxes.create(**settled.request()))}
        except BaseException:
            await _release(settled)
            raise

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Delete the sandbox, after an interruption too; one that is gone already is fine."""
        try:
            for environment in environments.values():
                try:
                    await environment.as_type(cls).sandbox.delete()
                except CorralError as error:
                    if not failures.is_gone(error):
                        raise
        finally:
            await _release(_settled(config))

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Delete the sandbox `id`. Without an id nothing: sandboxes do not say what they were made for, and end by their `ttl_s`."""
        if id is None:
            print("name one: `inspect sandbox cleanup corral sbx_…`; `corral sandbox ls` lists them")
            return
        async with AsyncCorral() as client:
            await (await client.sandboxes.get(id)).delete()

    @classmethod
    def config_files(cls) -> list[str]:
        return ["corral.yaml"]

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return CorralConfig(**config)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """`corral shell` in it."""
        if (await self.sandbox.refresh()).state in ("failed", "sanitizing", "terminated"):
            raise ConnectionError(f"the sandbox {self.sandbox.id} has ended")
        words = ["corral", "shell", *([] if user is None else ["--user", user]), self.sandbox.id]
        return SandboxConnection(type="corral", command=shlex.join(words))

    # -- programs ----------------------------------------------------------------------------------------------------------------
    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """To its end. A program over its time is ended with all that it started, and is not tried again: nothing runs twice."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        request: dict[str, Any] = {
            "cwd": posixpath.join(WORKSPACE, cwd or ""),
            "env": env,
            "user": user,
            "timeout_s": timeout,
            "output_limit": limit,
        }
        data = input.encode() if isinstance(input, str) else input or b""
        async with _errors():
            if len(data) > WHOLE_INPUT:
                result = await self._fed(cmd, data, request)
            else:
                if data:
                    request["stdin"] = data
                result = await self.sandbox.exec(cmd, **request)
        return _answer(result)

    async def _fed(self, cmd: list[str], data: bytes, request: dict[str, Any]) -> Result:
        """The same with input that is too long for a request. Interrupted: the program is cancelled."""
        started = await self.sandbox.start(cmd, **request)
        try:
            try:
                await started.write(data, eof=True)  # returns early when the program ends, or reads no more
            except CorralError as error:
                if error.code != "conflict":  # that it has ended before it could be given any
                    raise
            return await started.wait()
        except BaseException:
            with anyio.move_on_after(CANCEL_S, shield=True):
                await started.cancel()
            raise

    # -- files -------------------------------------------------------------------------------------------------------------------
    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Atomic, with the directories above it."""
        async with _errors():
            await self.sandbox.files.write(file, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        most = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        async with _errors():
            data = await self.sandbox.files.read(file, 0, most + 1)
        if len(data) > most:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode("utf-8") if text else data


def _settled(config: SandboxEnvironmentConfigType | None) -> CorralConfig:
    """From what a task names: a configuration, the path of a YAML file, or nothing."""
    if config is None:
        return CorralConfig()
    if isinstance(config, CorralConfig):
        return config
    if isinstance(config, str):
        with open(config, encoding="utf-8") as file:
            return CorralConfig.model_validate(yaml.safe_load(file) or {})
    raise ValueError(f"the sandbox corral takes a CorralConfig or a YAML file, not {type(config).__name__}")


@asynccontextmanager
async def _errors() -> AsyncGenerator[None, None]:
    """Refusals as the errors that inspect_ai documents; what else goes wrong is passed on as it is."""
    try:
        yield
    except CorralError as error:
        if error.code == "user_refused" or (error.code == "invalid_value" and error.field == "/user"):
            raise SandboxUserUnsupportedError(error.detail) from error
        if failures.is_gone(error):
            raise SandboxUnavailableError(f"{error.detail} ({error.code})") from error
        if (known := failures.os_error(error)) is not None:
            raise known from error
        raise


def _answer(result: Result) -> ExecResult[str]:
    hint = result.hint or result.reason
    if failures.ended_with_sandbox(result):
        raise SandboxUnavailableError(hint)
    if result.reason == "user_refused":
        raise SandboxUserUnsupportedError(hint)
    if result.reason == "timeout":
        raise TimeoutError(hint)
    if result.reason == "output_limit" or result.stdout.truncated or result.stderr.truncated:
        longer = result.stdout if result.stdout.truncated else result.stderr
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, longer.text)
    if failures.not_executable(result):
        raise PermissionError(hint)
    code = failures.exit_of(result)
    return ExecResult(code == 0, code, result.stdout.text, failures.complaint_of(result))
