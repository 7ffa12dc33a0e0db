"""`corral run`: code or a command in a fresh sandbox."""

from __future__ import annotations

from typing import Any

import click

from corral.cli import artifacts, terminal, words
from corral.cli.connection import opened, under
from corral.cli.following import Ended, Interrupted, Interrupts, carry_out, explain
from corral.client import Transport


@click.command(
    cls=words.PassThrough,
    short_help="Run code or a command in a fresh sandbox.",
    options_metavar="[OPTIONS]",
    epilog="Options end where FILE or -- stands; what follows belongs to the program.",
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="FILE [ARGS]... | -c CODE [ARGS]... | -- ARGV...")
@words.program_options
@words.sandbox_options
@words.queue_options
@click.option("--keep", is_flag=True, help="Leave the sandbox alive, leased to you for --ttl.")
@click.pass_context
def command(ctx: click.Context, /, program: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Run FILE, CODE, a shell STRING or ARGV in a fresh sandbox; the environment is gone afterwards.

    Output comes through byte by byte. Exit status: the program's own; 124 timeout, 137 out of memory or too much output, 127
    program not found, 125 no outcome of the program, 2 wrong usage. More in docs/reference/command-line.md.
    """
    what = words.program(ctx, given, program, "command")
    request = what | words.common(given, what.get("code_path"), what.get("code"))
    ctx.exit(perform(ctx.obj, "/v1/runs", request, given, as_json))


def perform(interrupts: Interrupts, path: str, request: words.Json, given: words.Json, as_json: bool) -> int:
    """Submit, follow, print; shared with `exec`."""
    chars, out = given["agent_view"], given["out"]
    view = None if not as_json and chars is None else words.view(chars)
    if out is not None:
        artifacts.check(out)
    with opened() as plain:
        transport = under(plain, given.get("lease"))
        ended = carry_out(transport, interrupts, path, request, view=view)
        status = ended.status
        if out is not None:
            status = _write_artifacts(transport, ended, out)
        if as_json:
            terminal.put_json(ended.document)
            return status
        if chars is not None:
            terminal.put(str(ended.document.get("agent_view") or ""))
        explain(ended)
        if given.get("keep") and ended.document.get("sandbox_id"):
            terminal.say(f"corral: kept {ended.document['sandbox_id']}")
    return status


def _write_artifacts(transport: Transport, ended: Ended, directory: str) -> int:
    """The exit status with that: 125 if a program that succeeded left what could not be written. Never raises: the result counts."""
    try:
        failures = artifacts.write(transport, ended.document, directory)
    except Interrupted as stopped:
        terminal.say(f"corral: stopped while artifacts were written to {directory!r}")
        return stopped.exit_status
    for failure in failures:
        terminal.complain(failure)
    return ended.status or (125 if failures else 0)
