"""`corral gc`: remove what no sandbox owns any more."""

from __future__ import annotations

import click

from corral.cli import terminal, words
from corral.cli.connection import opened


@click.command()
@words.json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Remove processes, mounts, cgroups, loop devices and files that no sandbox owns any more."""
    with opened() as transport:
        counts = transport.request("POST", "/v1/gc")
    if as_json:
        terminal.put_json(counts)
    else:
        rows = [{"kind": kind, "removed": count} for kind, count in counts.items() if kind != "failed" and count]
        terminal.table(rows, ("kind", "removed"), empty="nothing to remove")
    if counts.get("failed"):
        terminal.say(f"corral: infra_error: {counts['failed']} could not be removed (corral doctor lists them)")
        ctx.exit(125)
