"""What the tools answer beside their text: pydantic models, from which the output schemas are made.

A client may hand only this to its model, so everything that the text says is here too.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sandbox_id: str | None = Field(description="The sandbox that answered.")
    note: str | None = Field(default=None, description="What changed since the last call, such as a new sandbox.")


class CommandAnswer(Answer):
    """A command or program: how it ended, or that it still runs."""

    command_id: str = Field(description="For command_status and command_interrupt.")
    state: Literal["running", "ended"]
    output: str = Field(description="Output as a model should read it; for command_status: what is new.")
    exit_code: int | None = Field(default=None, description="128+n when a signal ended it; null while it runs.")
    signal: str | None = None
    reason: str | None = Field(
        default=None, description="ok, nonzero_exit, timeout, oom, output_limit, cancelled and so on."
    )
    hint: str | None = Field(default=None, description="What to do about it.")
    stdout_bytes: int | None = Field(default=None, description="Bytes written to stdout; null while it runs.")
    stderr_bytes: int | None = None
    running_ms: int | None = None
    cursor: int | None = Field(
        default=None, description="Where the output shown here ends; pass it to read on from there."
    )
    unread: int = Field(default=0, description="Characters of output beyond the cursor that are not shown.")
    files: list[str] = Field(
        default_factory=list, description="Files under /workspace that it made, changed or removed."
    )
    files_more: int = Field(default=0, description="How many more files than listed.")


class FileContent(Answer):
    """A file, or a range of its lines."""

    path: str
    size: int = Field(description="Bytes of the whole file.")
    encoding: Literal["text", "base64"]
    mime_type: str
    text: str | None = Field(
        default=None, description="The lines, exactly; null for a binary file, which is sent as content."
    )
    first_line: int | None = None
    last_line: int | None = Field(default=None, description="The last line that is shown at least in part.")
    total_lines: int | None = Field(default=None, description="Null when the file was not read to its end.")
    truncated: bool = Field(default=False, description="There is more of the asked range than shown.")
    next_line: int | None = Field(default=None, description="Go on with start_line at this line.")
    replaced: int = Field(default=0, description="Bytes that are not UTF-8, shown as U+FFFD.")


class FileWritten(Answer):
    """A file that was written whole."""

    path: str
    size: int
    created: bool = Field(description="False: an older file was replaced.")


class FileEntry(BaseModel):
    """One file, directory or link."""

    model_config = ConfigDict(extra="forbid")

    path: str
    type: str = Field(description="file, dir, symlink, fifo, socket or device.")
    size: int
    mode: str
    modified: str | None = None
    target: str | None = Field(default=None, description="Where a link points.")
    path_base64: str | None = Field(default=None, description="The exact bytes of a name that is not UTF-8.")


class FileList(Answer):
    """What a directory holds, sorted by path."""

    path: str
    entries: list[FileEntry]
    next: str | None = Field(default=None, description="There is more: pass it as after.")


class RunningCommand(BaseModel):
    """A command that the session remembers."""

    model_config = ConfigDict(extra="forbid")

    command_id: str
    command: str
    state: Literal["running", "ended"]


class SandboxAnswer(Answer):
    """The session's sandbox."""

    state: str = Field(description="none: it is made by the first call that needs it.")
    runtime: str | None = None
    template: str | None = None
    workspace: str = "/workspace"
    user: str = "sandbox"
    network: str = "none"
    limits: dict[str, str] = Field(default_factory=dict, description="What it may use.")
    created_at: str | None = None
    expires_at: str | None = Field(default=None, description="It ends then, with its files.")
    commands: list[RunningCommand] = Field(default_factory=list)
