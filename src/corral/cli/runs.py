"""`corral runs`: list runs, show one."""

from __future__ import annotations

import json

import click

from corral.cli import terminal, words
from corral.cli.connection import every, opened
from corral.client.transport import quote

COLUMNS = ("id", "state", "reason", "sandbox_id", "created_at")


@click.group(name="runs")
def command() -> None:
    """List runs, show one."""


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
@click.argument("run_id", metavar="ID")
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
