"""The tools. What they are called, what they take and what their texts say is read by models: short, exact, with a next step."""

import base64
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, ToolAnnotations
from pydantic import Field

from corral.client.transport import Json
from corral.errors import CorralError
from corral.mcp import answers
from corral.mcp.calls import Call, CallContext, perform
from corral.mcp.files import BINARY_CAP, Files, Part
from corral.mcp.models import CommandAnswer, FileContent, FileList, FileWritten, SandboxAnswer
from corral.mcp.sessions import Sessions

INSTRUCTIONS = (
    "Corral runs code, commands and builds in one hardened Linux sandbox that belongs to this session. Files under /workspace stay "
    "between calls; variables and processes of code_run do not. There is no network. Every answer ends with a reason, such as "
    "[ok, exit code 0], and mostly with a hint about what to do next. A command that takes long goes on in the background: look at it "
    "with command_status, end it with command_interrupt. sandbox_reset gives a fresh, empty sandbox."
)
Language = Literal["python", "bash", "javascript", "typescript", "c", "cpp", "go", "java", "rust", "sql", "r"]
Timeout = Annotated[
    float | None,
    Field(gt=0, description="Seconds that it may run. Default: the sandbox's own, mostly 60; in the background 3600."),
]
Wait = Annotated[
    float,
    Field(
        ge=0, le=3600, description="Answer after at most this many seconds; what still runs goes on in the background."
    ),
]
Chars = Annotated[int, Field(ge=200, le=200_000, description="The most characters of output in the answer.")]
Cwd = Annotated[str, Field(description="Working directory; relative to /workspace.")]
Path = Annotated[str, Field(description="Relative to /workspace, or absolute in the sandbox.")]

WAIT_S = 45.0
"""Below the 60 s after which some clients give a call up."""
CHARS = 8000

READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
CHANGES = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
REPLACES = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False)


def add_tools(server: MCPServer[Sessions]) -> None:
    """All nine."""
    _add_command_tools(server)
    _add_file_tools(server)
    _add_sandbox_tools(server)


def _add_command_tools(server: MCPServer[Sessions]) -> None:
    @server.tool(
        title="Run code",
        description="Run a program in the sandbox and get its output. Each call is a new process; files under /workspace stay.",
        annotations=CHANGES,
    )
    async def code_run(
        ctx: CallContext,
        code: Annotated[str, Field(description="The whole program.")],
        language: Language = "python",
        args: Annotated[list[str], Field(description="Arguments of the program.")] = [],  # noqa: B006
        stdin: Annotated[str, Field(description="Standard input.")] = "",
        cwd: Cwd = "",
        timeout_s: Timeout = None,
        wait_s: Wait = WAIT_S,
        max_chars: Chars = CHARS,
    ) -> Annotated[CallToolResult, CommandAnswer]:
        request: Json = {"code": code, "language": language, "args": args} | _given(stdin=stdin, cwd=cwd)
        title = f"{language}: {_title(code)}"
        return await perform(ctx, lambda call: call.run(title, request, timeout_s, False, wait_s, max_chars))

    @server.tool(
        title="Run a command",
        description=(
            "Run a shell command (sh -c) in the sandbox. If it takes longer than wait_s, or with background=true, the answer has a "
            "command_id for command_status and command_interrupt."
        ),
        annotations=CHANGES,
    )
    async def command_run(
        ctx: CallContext,
        command: Annotated[str, Field(min_length=1, description="The command line.")],
        cwd: Cwd = "",
        stdin: Annotated[str, Field(description="Standard input.")] = "",
        env: Annotated[dict[str, str], Field(description="Environment variables to add.")] = {},  # noqa: B006
        background: Annotated[bool, Field(description="Answer at once; for servers and long builds.")] = False,
        timeout_s: Timeout = None,
        wait_s: Wait = WAIT_S,
        max_chars: Chars = CHARS,
    ) -> Annotated[CallToolResult, CommandAnswer]:
        request: Json = {"shell": command} | _given(stdin=stdin, cwd=cwd, env=env)
        return await perform(
            ctx, lambda call: call.run(_title(command), request, timeout_s, background, wait_s, max_chars)
        )

    @server.tool(
        title="Look at a command",
        description=(
            "How a command is, with its output since the last look. Give a cursor to read on from there instead (0: from the start)."
        ),
        annotations=READS,
    )
    async def command_status(
        ctx: CallContext,
        command_id: Annotated[str, Field(description="From command_run or code_run.")],
        cursor: Annotated[
            int | None, Field(ge=0, description="Where to read from; of an earlier answer, or 0.")
        ] = None,
        wait_s: Annotated[float, Field(ge=0, le=3600, description="Wait so long for its end first.")] = 0,
        max_chars: Chars = CHARS,
    ) -> Annotated[CallToolResult, CommandAnswer]:
        async def act(call: Call) -> CallToolResult:
            command = call.session.command(command_id)
            await command.wait(wait_s, call.told)
            return await call.answer(command, max_chars, cursor=cursor)

        return await perform(ctx, act)

    @server.tool(
        title="Interrupt a command",
        description="Send a signal to a running command and see how it is then. INT is Ctrl-C; KILL ends it and all that it started.",
        annotations=CHANGES,
    )
    async def command_interrupt(
        ctx: CallContext,
        command_id: Annotated[str, Field(description="From command_run or code_run.")],
        signal: Literal["INT", "TERM", "KILL"] = "INT",
        wait_s: Annotated[float, Field(ge=0, le=60, description="Wait so long for its end.")] = 5,
        max_chars: Chars = CHARS,
    ) -> Annotated[CallToolResult, CommandAnswer]:
        async def act(call: Call) -> CallToolResult:
            command = call.session.command(command_id)
            if not command.ended:
                try:
                    await command.send(signal)
                except CorralError:
                    await command.wait(1.0)  # it may just have ended, which is no failure
                    if not command.ended:
                        raise
            await command.wait(wait_s, call.told)
            return await call.answer(command, max_chars)

        return await perform(ctx, act)


def _add_file_tools(server: MCPServer[Sessions]) -> None:
    @server.tool(
        title="Read a file",
        description=(
            "Read a text file, whole or by lines. At most max_chars characters are answered; next_line says where to go on. An image "
            f"comes as an image, any other binary file as a base64 resource, up to {BINARY_CAP >> 20} MiB."
        ),
        annotations=READS,
    )
    async def file_read(
        ctx: CallContext,
        path: Path = "",
        start_line: Annotated[int, Field(ge=1, description="First line, from 1.")] = 1,
        end_line: Annotated[int | None, Field(ge=1, description="Last line, included.")] = None,
        encoding: Annotated[
            Literal["auto", "text", "base64"], Field(description="text or base64 whatever the file holds.")
        ] = "auto",
        max_chars: Chars = 20_000,
        path_base64: Annotated[str, Field(description="Instead of path, for a name that is not UTF-8.")] = "",
    ) -> Annotated[CallToolResult, FileContent]:
        async def act(call: Call) -> CallToolResult:
            where = _where(path, path_base64)
            if end_line is not None and end_line < start_line:
                raise CorralError("invalid_value", "end_line is before start_line", field="/end_line")
            async with call.inside() as sandbox:
                files = Files(call.session.backend, sandbox["id"])
                entry = await files.stat(where)
                if entry["type"] == "dir":
                    raise CorralError("is_a_directory", f"{entry['path']} is a directory", hint="use file_list")
                as_text = None if encoding == "auto" else encoding == "text"
                read = await files.read(where, as_text, start_line, end_line, max_chars)
            if isinstance(read, Part):
                return answers.text_file(sandbox["id"], call.session.take_news(), entry, read)
            data, whole = read
            if not whole:
                raise CorralError(
                    "too_large",
                    f"{entry['path']} is binary and has {entry['size']} bytes; at most {BINARY_CAP} are answered",
                    hint="look at a part of it with command_run (file, head -c, xxd), or read it with encoding text",
                )
            return answers.binary_file(sandbox["id"], call.session.take_news(), entry, data, encoding == "auto")

        return await perform(ctx, act)

    @server.tool(
        title="Write a file",
        description="Write a whole file; an older one is replaced, missing directories are made.",
        annotations=REPLACES,
    )
    async def file_write(
        ctx: CallContext,
        path: Path,
        content: Annotated[str, Field(description="The text, or base64.")],
        encoding: Literal["text", "base64"] = "text",
        executable: bool = False,
    ) -> Annotated[CallToolResult, FileWritten]:
        async def act(call: Call) -> CallToolResult:
            data = content.encode() if encoding == "text" else _decoded(content)
            async with call.inside() as sandbox:
                files = Files(call.session.backend, sandbox["id"])
                existed = await files.exists(path)
                entry = await files.write(path, data, "0755" if executable else None)
            answer = FileWritten(
                sandbox_id=sandbox["id"],
                note=call.session.take_news(),
                path=entry["path"],
                size=len(data),
                created=not existed,
            )
            done = "replaced" if existed else "created"
            return answers.success(answer, answers.text(f"{done} {answer.path}, {answer.size} bytes"))

        return await perform(ctx, act)

    @server.tool(title="List files", description="What a directory holds, sorted by path.", annotations=READS)
    async def file_list(
        ctx: CallContext,
        path: Path = "/workspace",
        recursive: bool = False,
        limit: Annotated[int, Field(ge=1, le=1000, description="The most entries in the answer.")] = 200,
        after: Annotated[str, Field(description="Go on: next of an earlier answer.")] = "",
    ) -> Annotated[CallToolResult, FileList]:
        async def act(call: Call) -> CallToolResult:
            async with call.inside() as sandbox:
                files = Files(call.session.backend, sandbox["id"])
                page = await files.list(path, recursive, limit, after or None)
            return answers.file_list(sandbox["id"], call.session.take_news(), path, page)

        return await perform(ctx, act)


def _add_sandbox_tools(server: MCPServer[Sessions]) -> None:
    @server.tool(
        title="About the sandbox",
        description="What the sandbox is, what it may use, when it ends, which commands were started.",
        annotations=READS,
    )
    async def sandbox_info(ctx: CallContext) -> Annotated[CallToolResult, SandboxAnswer]:
        async def act(call: Call) -> CallToolResult:
            sandbox = call.session.current
            if sandbox is not None:
                found = sandbox["id"]
                try:
                    sandbox = await call.session.backend.request("GET", f"/v1/sandboxes/{found}")
                except CorralError as error:
                    call.gone_by(error, found)
                    raise
                if sandbox["state"] in ("lost", "sanitizing", "terminated"):
                    call.session.lose(found, sandbox["state"])
                    raise CorralError("sandbox_lost", f"the sandbox {found} is {sandbox['state']}")
            return answers.sandbox_about(sandbox, call.session)

        return await perform(ctx, act)

    @server.tool(
        title="Reset the sandbox",
        description="End the sandbox with all its files and commands, and make a fresh one.",
        annotations=ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False),
    )
    async def sandbox_reset(ctx: CallContext) -> Annotated[CallToolResult, SandboxAnswer]:
        async def act(call: Call) -> CallToolResult:
            return answers.sandbox_about(await call.session.reset(), call.session)

        return await perform(ctx, act)


def _given(**members: Any) -> Json:
    return {name: value for name, value in members.items() if value}


def _title(words: str) -> str:
    first = words.strip().partition("\n")[0]
    return first if len(first) <= 100 else f"{first[:99]}…"


def _where(path: str, path_base64: str) -> Json:
    if bool(path) == bool(path_base64):
        raise CorralError("invalid_value", "give path (or path_base64 instead)", field="/path")
    return {"path": path} if path else {"path_base64": path_base64}


def _decoded(content: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise CorralError(
            "invalid_value", f"content is not base64: {error}", field="/content", hint="use encoding text for text"
        ) from error
