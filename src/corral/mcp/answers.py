"""From results and errors to what a tool call answers: text that a model reads, and the structured form of the same."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import quote

from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    TextContent,
)

from corral.client.transport import Json
from corral.errors import CorralError
from corral.mcp.commands import Command, Look, readable, sendable
from corral.mcp.files import Part, image_type
from corral.mcp.models import (
    Answer,
    CommandAnswer,
    FileContent,
    FileEntry,
    FileList,
    RunningCommand,
    SandboxAnswer,
)
from corral.mcp.sessions import GONE, Session

NO_OUTCOME = GONE | {"infra_error", "policy_denied", "missing_tool", "dependency_failed", "queue_timeout"}
"""Reasons of results that say nothing of the program: the model has to do something else than read its output."""
MOST_FILES = 50
CODE_PLACE = "/workspace/.corral-exec"

NEXT = {
    "not_found": "check the name; file_list shows what is there",
    "permission_denied": "write below /workspace, /tmp or the home directory: nothing else can be changed",
    "not_a_file": "it is a pipe, a socket or a device: use command_run",
    "sandbox_lost": "call again: a new sandbox is made, and its files start empty",
    "sandbox_deleted": "call again: a new sandbox is made, and its files start empty",
    "lease_lost": "call again: a new sandbox is made, and its files start empty",
    "guest_lost": "call again: a new sandbox is made, and its files start empty",
    "node_unavailable": "try again in a moment; if it stays so, tell the user that the Corral service does not answer",
    "unauthorized": "tell the user that the key (CORRAL_KEY) of this MCP server is not valid",
    "infra_error": "try again once; if it fails again, tell the user what this says",
}


def text(words: str) -> TextContent:
    """One text block."""
    return TextContent(type="text", text=sendable(words))


def failure(error: CorralError, note: str | None = None) -> CallToolResult:
    """What happened and the next step. No structured part: some clients check one against the schema even in an error."""
    parameter = f" (parameter {error.field.strip('/')})" if error.field and error.field.strip("/") else ""
    lines = [f"error {error.code}: {error.detail}{parameter}"]
    step = error.hint or NEXT.get(error.code)
    if error.code in GONE:
        step = f"{NEXT[error.code]}; write the files that you need again"
    elif error.retryable:
        step = f"{step or 'try again'} (the same call can work later)"
    lines.append(f"next: {step or 'change the call, or tell the user'}")
    if note:
        lines.append(f"note: {note}")
    return CallToolResult(content=[text("\n".join(lines))], is_error=True)


def success(answer: Answer, *content: ContentBlock, is_error: bool = False) -> CallToolResult:
    """The answer with its text; the note, if there is one, comes first."""
    blocks = [text(f"note: {answer.note}"), *content] if answer.note else list(content)
    return CallToolResult(content=blocks, structured_content=_clean(answer.model_dump(mode="json")), is_error=is_error)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return sendable(value)
    if isinstance(value, dict):
        return {key: _clean(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_clean(member) for member in value]
    return value


def command_ended(command: Command, document: Json, note: str | None) -> CallToolResult:
    """A command that was waited for to its end; `document` has the agent view."""
    result = document["result"]
    view = readable(document.get("agent_view") or "")
    answer = CommandAnswer(
        sandbox_id=command.sandbox_id, note=note, command_id=command.ident, state="ended", output=view, **_facts(result)
    )
    blocks: list[ContentBlock] = [text(view)]
    if " omitted …]" in view:
        blocks.append(text(f'[all of it: command_status(command_id="{command.ident}", cursor=0)]'))
    return success(answer, *blocks, is_error=result["reason"] in NO_OUTCOME)


def command_seen(command: Command, look: Look, note: str | None) -> CallToolResult:
    """A part of a command's output, and how it is."""
    output = readable(look.text)
    if look.hidden:
        output = f"[… {look.hidden} characters before this: cursor={look.hidden_from} …]\n{output}"
    if look.lost:
        output = f"[… {look.lost} characters before this are no longer kept here …]\n{output}"
    if command.failure is not None:
        return failure(command.failure, note)
    result = command.document.get("result")
    ident = command.ident
    if result is None:
        seconds = command.seconds()
        state = (
            f"[running for {seconds:.0f} s; command_id {ident}: command_status looks again, command_interrupt ends it]"
        )
    else:
        state = f"[{result['reason']}" + (
            f", exit code {result['exit_code']}]" if result["exit_code"] is not None else "]"
        )
        state += f" {result['hint']}" if result["hint"] else ""
    if look.unread:
        state = f"[{look.unread} more characters: cursor={look.cursor}]\n{state}"
    answer = CommandAnswer(
        sandbox_id=command.sandbox_id,
        note=note,
        command_id=ident,
        state="running" if result is None else "ended",
        output=output,
        cursor=look.cursor,
        unread=look.unread,
        **(_facts(result) if result is not None else {}),
    )
    shown = output if not output or output.endswith("\n") else f"{output}\n"
    return success(answer, text(shown + state), is_error=result is not None and result["reason"] in NO_OUTCOME)


def _facts(result: Json) -> Json:
    changed = [f"{entry['change']} {entry['path']}" for entry in result["files"] if entry["type"] != "dir"]
    return {
        "exit_code": result["exit_code"],
        "signal": result["signal"],
        "reason": result["reason"],
        "hint": result["hint"],
        "stdout_bytes": result["stdout"]["bytes"],
        "stderr_bytes": result["stderr"]["bytes"],
        "running_ms": round(result["timings"]["running_ms"] or 0) if result.get("timings") else None,
        "files": changed[:MOST_FILES],
        "files_more": max(0, len(changed) - MOST_FILES),
    }


def text_file(sandbox_id: str, note: str | None, entry: Json, part: Part) -> CallToolResult:
    """Lines of a text file, exact in the first block; what is not shown is said in the others."""
    if part.total is not None and part.first > max(1, part.total):
        raise CorralError(
            "invalid_value",
            f"{entry['path']} has {part.total} lines",
            hint=f"start_line is at most {max(1, part.total)}",
            field="/start_line",
        )
    answer = FileContent(
        sandbox_id=sandbox_id,
        note=note,
        path=entry["path"],
        size=part.seen if part.total is not None else int(entry["size"]),
        encoding="text",
        mime_type="text/plain",
        text=part.text,
        first_line=part.first,
        last_line=max(part.first, part.last),
        total_lines=part.total,
        truncated=part.cut or part.more,
        next_line=part.last + 1 if part.more else None,
        replaced=part.text.count("\ufffd"),
    )
    told = []
    if part.cut:
        told.append(f"line {part.last} is cut: read it with command_run (cut -c)")
    if part.more:
        of = f" of {part.total}" if part.total is not None else ""
        told.append(f"lines {part.first} to {part.last}{of}: go on with start_line={part.last + 1}")
    if answer.replaced:
        told.append(f"{answer.replaced} characters are shown as U+FFFD, mostly for bytes that are not UTF-8")
    blocks = [text(part.text or "(empty)")] + [text(f"[{words}]") for words in told]
    return success(answer, *blocks)


def binary_file(sandbox_id: str, note: str | None, entry: Json, data: bytes, as_image: bool) -> CallToolResult:
    """A whole binary file: an image that clients show, else a resource."""
    image = image_type(data)
    kind = image or "application/octet-stream"
    answer = FileContent(
        sandbox_id=sandbox_id, note=note, path=entry["path"], size=len(data), encoding="base64", mime_type=kind
    )
    encoded = base64.b64encode(data).decode("ascii")
    about = text(f"{answer.path}: {kind}, {answer.size} bytes")
    if image is not None and as_image:
        return success(answer, about, ImageContent(type="image", data=encoded, mime_type=kind))
    uri = "file://" + quote(entry["path"].encode("utf-8", "surrogateescape"))
    resource = BlobResourceContents(uri=uri, blob=encoded, mime_type=kind)
    return success(answer, about, EmbeddedResource(type="resource", resource=resource))


def file_list(sandbox_id: str, note: str | None, path: str, page: Json) -> CallToolResult:
    """One page of a directory."""
    answer = FileList(
        sandbox_id=sandbox_id,
        note=note,
        path=path,
        entries=[_entry(item) for item in page["items"] if not _is_ours(item["path"]) or _is_ours(path)],
        next=page.get("next"),
    )
    lines = [_listed(entry) for entry in answer.entries] or ["(empty)"]
    if answer.next is not None:
        lines.append(f"[there is more: after={answer.next!r}]")
    return success(answer, text("\n".join(lines)))


def _is_ours(path: str) -> bool:
    """Where Corral puts the code of `code_run`: shown only to who asks for it."""
    return f"{path}/".startswith((f"{CODE_PLACE}/", CODE_PLACE.removeprefix("/workspace/") + "/"))


def _entry(item: Json) -> FileEntry:
    return FileEntry(
        path=item["path"],
        type=item["type"],
        size=item["size"],
        mode=item["mode"],
        modified=item.get("mtime"),
        target=item.get("target"),
        path_base64=item.get("path_base64"),
    )


def _listed(entry: FileEntry) -> str:
    arrow = f" -> {entry.target}" if entry.target is not None else ""
    exact = f" (path_base64 {entry.path_base64})" if entry.path_base64 is not None else ""
    return f"{entry.type:<7} {entry.size:>10} {entry.path}{arrow}{exact}"


def sandbox_about(sandbox: Json | None, session: Session) -> CallToolResult:
    """The sandbox (None: not made yet) and the session's commands."""
    listed = [
        RunningCommand(command_id=c.ident, command=c.title, state="ended" if c.ended else "running")
        for c in session.commands.values()
    ]
    note = session.take_news()
    if sandbox is None:
        answer = SandboxAnswer(sandbox_id=None, note=note, state="none", commands=listed)
        return success(answer, text("no sandbox yet: the first call that needs it makes it"))
    limits = {name: _limit(name, limit["value"]) for name, limit in sandbox["limits"].items() if limit["value"]}
    answer = SandboxAnswer(
        sandbox_id=sandbox["id"],
        note=note,
        state=sandbox["state"],
        runtime=sandbox["runtime"],
        template=sandbox["template"],
        limits=limits,
        created_at=sandbox["created_at"],
        expires_at=sandbox["expires_at"],
        commands=listed,
    )
    lines = [
        f"{answer.sandbox_id}: {answer.state}, {answer.runtime}, template {answer.template}, no network",
        f"files in {answer.workspace} stay until {answer.expires_at} or the end of this session",
        "limits: " + ", ".join(f"{name} {value}" for name, value in limits.items()),
        *(f"{c.command_id} runs: {c.command}" for c in listed if c.state == "running"),
    ]
    return success(answer, text("\n".join(lines)))


def _limit(name: str, value: Any) -> str:
    if name in ("memory", "disk", "tmp", "output"):
        size = int(value)
        for unit in ("GiB", "MiB", "KiB"):
            factor = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}[unit]
            if size >= factor and size % factor == 0:
                return f"{size // factor} {unit}"
        return f"{size} bytes"
    return f"{value} s" if name == "wall" else str(value)
