"""`corral gc`: remove what no sandbox owns any more."""

from __future__ import annotations

import click

from corral.cli import terminal, words
from corral.cli.connection import opened


@click.command()
@click.option("--unknown", is_flag=True, help="Also sandboxes that a restored database does not know.")
@words.json_option
@click.pass_context
def command(ctx: click.Context, unknown: bool, as_json: bool) -> None:
    """Remove processes, mounts, cgroups, loop devices and files that no sandbox owns any more."""
    with opened() as transport:
        answer = transport.request("POST", "/v1/gc", params={"unknown": True} if unknown else None)
    removed = dict(answer["removed"])
    failed = removed.pop("failed", 0)
    removed["sandbox"] = answer.get("sandboxes", 0)
    if as_json:
        terminal.put_json(answer)
    else:
        rows = [{"kind": kind, "removed": count} for kind, count in removed.items() if count]
        if rows or not failed:
            terminal.table(rows, ("kind", "removed"), empty="nothing to remove")
    if failed:
        for left in () if as_json else answer.get("leftovers", ()):
            terminal.say(f"corral: left: {left.get('kind')} {left.get('id')}")
        hint = "run it again; corral doctor lists what is left"
        terminal.say(f"corral: infra_error: {failed} could not be removed ({hint})")
        ctx.exit(125)
