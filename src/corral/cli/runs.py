"""`corral runs`: list runs, show one."""

from __future__ import annotations

import json

import click

from corral.cli import terminal, words
from corral.cli.connection import every, opened
from corral.client.transport import quote

COLUMNS = ("id", "state", "reason", "sandbox_id", "created_at")
whose = words.tenant_option("Whose they are, for an admin; one's own by default.")


class Listing(click.Group):
    """A group that lists when nothing is named, and shows what an id names: `runs`, `runs ID`, with options anywhere."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = ["", *args]
        names = [word for word, last in zip(args, before, strict=False) if word[:1] != "-" and last != "--tenant"]
        if ("-h" not in args and "--help" not in args) or names:
            if not names:
                args = ["ls", *args]
            elif names[0].startswith("run_"):
                args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(name="runs", cls=Listing, options_metavar="[OPTIONS]", subcommand_metavar="[ID | COMMAND [ARGS]...]")
def command() -> None:
    """List runs, or show the one that ID names."""


@command.command()
@whose
@words.json_option
def ls(tenant: str | None, as_json: bool) -> None:
    """List runs, newest first."""
    with opened() as transport:
        items = every(transport, "/v1/runs", {"tenant": tenant})
    if as_json:
        terminal.put_json({"items": items, "next": None})
    else:
        terminal.table(items, COLUMNS, empty="no runs")


@command.command()
@click.argument("run_id", type=words.IDENT, metavar="ID")
@click.option("--agent-view", is_flag=True, help="With the output as a model should read it.")
@whose
@words.json_option
def show(run_id: str, agent_view: bool, tenant: str | None, as_json: bool) -> None:
    """Show one run: decisions, result, usage."""
    params = words.view(str(words.AGENT_VIEW_CHARS)) if agent_view else {}
    with opened() as transport:
        run = transport.request("GET", f"/v1/runs/{quote(run_id)}", params={**params, "tenant": tenant})
    if as_json:
        terminal.put_json(run)
        return
    terminal.put(json.dumps(run, indent=2, ensure_ascii=False) + "\n")
