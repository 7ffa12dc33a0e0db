"""The MCP server: the tools, with every refusal worded for a model."""

from __future__ import annotations

import difflib
import logging
import sys
import traceback
from importlib.metadata import version
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp_types import CallToolResult, InputRequiredResult, Tool
from pydantic import ValidationError

from corral.errors import CorralError
from corral.mcp import answers
from corral.mcp.backend import Connect
from corral.mcp.sessions import Sessions, Wishes, opened
from corral.mcp.tools import INSTRUCTIONS, add_tools


class CorralMCP(MCPServer[Sessions]):
    """`MCPServer` that refuses what a tool does not take, by name, and words every refusal for a model."""

    async def list_tools(self) -> list[Tool]:
        """The tools; their schemas say that nothing else is taken, and are short: they cost every model's context."""
        return [
            tool.model_copy(
                update={
                    "input_schema": {**_untitled(tool.input_schema), "additionalProperties": False},
                    "output_schema": _untitled(tool.output_schema),
                }
            )
            for tool in await super().list_tools()
        ]

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Sessions, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """See `MCPServer.call_tool`; never raises `ToolError`."""
        known = {tool.name: tool.input_schema.get("properties", {}) for tool in await super().list_tools()}
        if name not in known:
            return answers.failure(_unknown("tool", name, list(known), None))
        for argument in arguments:
            if argument not in known[name]:
                return answers.failure(_unknown("parameter", argument, list(known[name]), f"/{argument}"))
        try:
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError as error:
            _log(error.__cause__ or error)
            detail = f"an unexpected {type(error.__cause__ or error).__name__} in the MCP server"
            return answers.failure(CorralError("infra_error", detail, retryable=False))
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                return answers.failure(CorralError("bad_request", str(error)))
            first = error.__cause__.errors()[0]
            where = "/".join(str(part) for part in first["loc"])
            return answers.failure(
                CorralError(
                    "invalid_value", first["msg"], field=f"/{where}", hint="change this parameter and call again"
                )
            )


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic makes from the names."""
    if isinstance(schema, dict):
        return {k: _untitled(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
    return [_untitled(member) for member in schema] if isinstance(schema, list) else schema


def _unknown(what: str, name: str, known: list[str], field: str | None) -> CorralError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    return CorralError("invalid_value", f"there is no {what} {name[:80]!r}", hint=hint, field=field)


def _log(error: BaseException) -> None:
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)


def make_server(connect: Connect, wishes: Wishes | None = None) -> CorralMCP:
    """The MCP server. `connect` opens the transport to Corral, at the first call that needs it; closed with the server."""
    # The SDK would put a handler of its own on the root logger, with tracebacks for people.
    if not logging.root.handlers:
        logging.basicConfig(level=logging.WARNING, format="corral: %(message)s", stream=sys.stderr)
    chosen = wishes or Wishes()
    server = CorralMCP(
        "corral",
        title="Corral sandbox",
        instructions=INSTRUCTIONS,
        version=version("corral"),
        lifespan=lambda _: opened(connect, chosen),
        log_level="WARNING",
    )
    add_tools(server)
    return server
