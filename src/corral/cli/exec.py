"""`corral exec`: a command in a sandbox that is there."""

from __future__ import annotations

from typing import Any

import click

from corral.cli import words
from corral.cli.run import perform
from corral.client.transport import quote


@click.command(cls=words.PassThroughAfterId, short_help="Run a command in a sandbox that is there.")
@click.argument("sandbox_id", type=words.IDENT, metavar="ID")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="-- ARGV...")
@words.program_options
@words.lease_option
@click.pass_context
def command(ctx: click.Context, /, sandbox_id: str, program: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Run ARGV, CODE or a shell STRING in the sandbox ID, under its limits."""
    request = words.program(ctx, given, program, "argv") | words.common(given)
    ctx.exit(perform(ctx.obj, f"/v1/sandboxes/{quote(sandbox_id)}/execs", request, given, as_json))
