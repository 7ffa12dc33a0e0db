"""`corral run`: code or a command in a fresh sandbox."""

from __future__ import annotations

from typing import Any

import click

from corral.cli import artifacts, terminal, words
from corral.cli.connection import opened
from corral.cli.following import Interrupts, carry_out, explain


@click.command(
    cls=words.PassThrough,
    short_help="Run code or a command in a fresh sandbox.",
    options_metavar="[OPTIONS]",
    epilog="Options end where FILE or -- stands; what follows belongs to the program.",
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="FILE [ARGS]... | -c CODE [ARGS]... | -- ARGV...")
@words.program_options
@words.sandbox_options
@click.option("--keep", is_flag=True, help="Leave the sandbox alive, leased to you for --ttl.")
@click.pass_context
def command(ctx: click.Context, /, program: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Run FILE, CODE, a shell STRING or ARGV in a fresh sandbox; the environment is gone afterwards.

    Output comes through byte by byte and the exit status is the program's; see the reference for the rest.
    """
    request = words.program(ctx, given, program, "command") | words.common(given)
    ctx.exit(perform(ctx.obj, "/v1/runs", request, given, as_json))


def perform(interrupts: Interrupts, path: str, request: words.Json, given: words.Json, as_json: bool) -> int:
    """Submit, follow, print; shared with `exec`."""
    chars = given["agent_view"]
    view = None if not as_json and chars is None else words.view(chars)
    with opened() as transport:
        ended = carry_out(transport, interrupts, path, request, view=view)
        if given["out"] is not None:
            artifacts.write(transport, ended.document, given["out"])
        if as_json:
            terminal.put_json(ended.document)
            return ended.status
        if chars is not None:
            terminal.put(str(ended.document.get("agent_view") or ""))
        explain(ended)
        if given.get("keep") and ended.document.get("sandbox_id"):
            terminal.say(f"corral: kept {ended.document['sandbox_id']}")
    return ended.status
