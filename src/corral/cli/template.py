"""`corral template`: what sandboxes are made from."""

from __future__ import annotations

import click

from corral.cli import terminal, words
from corral.cli.connection import opened


@click.group(name="template")
def command() -> None:
    """List templates."""


@command.command()
@words.json_option
def ls(as_json: bool) -> None:
    """List templates and whether they can be had here."""
    with opened() as transport:
        items = transport.request("GET", "/v1/doctor")["templates"]
    if as_json:
        terminal.put_json({"items": items, "next": None})
    else:
        rows = [item | {"languages": " ".join(item.get("languages") or [])} for item in items]
        terminal.table(rows, ("name", "available", "digest", "languages", "reason"), empty="no templates")
