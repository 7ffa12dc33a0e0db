"""The documents of the API, read into values."""

from __future__ import annotations

from typing import Any

from corral.domain.request.asked import DEFAULT_OUTPUTS, ExecRequest, HostCaps, RunRequest, SandboxRequest
from corral.domain.request.fields import EXEC_FIELDS, LATER_FIELDS, PLACE_FIELDS, RUN_FIELDS, SANDBOX_FIELDS, Fields
from corral.domain.request.files import must_fit, read_files
from corral.domain.request.program import read_args, read_argv, read_code, read_language, read_shape, read_shell
from corral.domain.request.surroundings import read_cwd, read_env, read_outputs, read_pty, read_stdin, read_user
from corral.domain.request.wishes import read_placement, read_priority, read_wait, read_wishes
from corral.domain.runner import NO_NAMES, Names


def parse_run(doc: Any, host: HostCaps, names: Names = NO_NAMES) -> RunRequest:
    """`POST /v1/runs`: see the package. `names` tell the language of a FILE; without them it has to be said."""
    fields = Fields(doc, RUN_FIELDS)
    fields.refuse_later(*LATER_FIELDS, "pty")
    shape = read_shape(fields, ("code", "command", "shell"))
    code_path = fields.relative_path("code_path")
    if code_path is not None and shape != "code":
        fields.fail("code_path", "code_path goes with code", "leave code_path out, or give code")
    code = read_code(fields) if shape == "code" else None
    files, wishes = read_files(fields), read_wishes(fields, host)
    must_fit(fields, files, wishes)
    return RunRequest(
        code=code,
        language=read_language(fields, code, code_path, names),
        command=read_argv(fields, "command", with_args=True) if shape == "command" else None,
        shell=read_shell(fields) if shape == "shell" else None,
        code_path=code_path,
        args=read_args(fields, shape),
        files=files,
        stdin=read_stdin(fields),
        env=read_env(fields),
        cwd=read_cwd(fields),
        user=read_user(fields),
        outputs=read_outputs(fields, DEFAULT_OUTPUTS),
        wishes=wishes,
        placement=read_placement(fields),
        keep=fields.flag("keep"),
        ttl_s=fields.end("ttl_s", "ttl"),
        attached=fields.flag("attached"),
        priority=read_priority(fields),
        queue_timeout_s=fields.seconds("queue_timeout_s", "queue_timeout"),
        expected_s=fields.seconds("expected_s", "expected_s"),
        webhook=fields.doc.get("webhook"),
    )


def parse_sandbox(doc: Any, host: HostCaps) -> SandboxRequest:
    """`POST /v1/sandboxes`. `timeout_s` and the output limits are the defaults of its execs."""
    fields = Fields(doc, SANDBOX_FIELDS)
    fields.refuse_later(*LATER_FIELDS)
    files, wishes = read_files(fields), read_wishes(fields, host)
    must_fit(fields, files, wishes)
    return SandboxRequest(
        files=files,
        wishes=wishes,
        placement=read_placement(fields),
        ttl_s=fields.end("ttl_s", "ttl"),
        idle_timeout_s=fields.end("idle_timeout_s", "idle_timeout"),
    )


def parse_exec(doc: Any, host: HostCaps) -> ExecRequest:
    """`POST /v1/sandboxes/{id}/execs`; `command` is another word for `argv`. What belongs to the sandbox cannot be wished here."""
    fields = Fields(
        doc,
        EXEC_FIELDS,
        elsewhere={
            name: "is set when the sandbox is made" for name in ("memory", "cpu", "pids", "disk", "tmp", *PLACE_FIELDS)
        },
    )
    fields.refuse_later(*LATER_FIELDS)
    shape = read_shape(fields, ("argv", "command", "shell", "code"))
    code = read_code(fields) if shape == "code" else None
    wishes = read_wishes(fields, host)
    return ExecRequest(
        argv=read_argv(fields, shape, with_args=True) if shape in ("argv", "command") else None,
        shell=read_shell(fields) if shape == "shell" else None,
        code=code,
        language=read_language(fields, code),
        args=read_args(fields, shape),
        stdin=read_stdin(fields),
        env=read_env(fields),
        cwd=read_cwd(fields),
        user=read_user(fields),
        timeout_s=wishes.timeout_s,
        output_bytes=wishes.output_bytes,
        output_kill_bytes=wishes.output_kill_bytes,
        outputs=read_outputs(fields, ()),
        pty=read_pty(fields),
        attached=fields.flag("attached"),
        stdin_open=fields.flag("stdin_open"),
        wait_s=read_wait(fields),
    )
