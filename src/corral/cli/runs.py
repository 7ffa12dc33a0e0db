"""`corral runs`: list runs, show one."""

from __future__ import annotations

import json

import click

from corral.cli import terminal, words
from corral.cli.connection import every, opened
from corral.client.transport import quote

COLUMNS = ("id", "state", "reason", "sandbox_id", "created_at")


class Listing(click.Group):
    """A group that lists when nothing is named, and shows what an id names: `runs`, `runs ID`, with options anywhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = [word for word in args if not word.startswith("-")]
        if ("-h" not in args and "--help" not in args) or names:
            if not names:
                args = ["ls", *args]
            elif names[0].startswith("run_"):
                args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(name="runs", cls=Listing, options_metavar="[--json]", subcommand_metavar="[ID | COMMAND [ARGS]...]")
def command() -> None:
    """List runs, or show the one that ID names."""


@command.command()
@words.json_option
def ls(as_json: bool) -> None:
    """List runs, newest first."""
    with opened() as transport:
        items = every(transport, "/v1/runs")
    if as_json:
        terminal.put_json({"items": items, "next": None})
    else:
        terminal.table(items, COLUMNS, empty="no runs")


@command.command()
@click.argument("run_id", type=words.IDENT, metavar="ID")
@click.option("--agent-view", is_flag=True, help="With the output as a model should read it.")
@words.json_option
def show(run_id: str, agent_view: bool, as_json: bool) -> None:
    """Show one run: decisions, result, usage."""
    params = words.view(str(words.AGENT_VIEW_CHARS)) if agent_view else None
    with opened() as transport:
        run = transport.request("GET", f"/v1/runs/{quote(run_id)}", params=params)
    if as_json:
        terminal.put_json(run)
        return
    terminal.put(json.dumps(run, indent=2, ensure_ascii=False) + "\n")
