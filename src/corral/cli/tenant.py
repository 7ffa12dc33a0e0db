"""`corral tenant`: create, ls, disable, enable, rm."""

from __future__ import annotations

import click

from corral.cli import terminal, words
from corral.cli.connection import every, opened
from corral.client.transport import quote

COLUMNS = ("id", "name", "state", "created_at", "created_by")


@click.group(name="tenant")
def command() -> None:
    """Create, list, disable and remove tenants. Needs a key with the scope admin."""


@command.command()
@click.argument("tenant_id", type=words.IDENT, metavar="ID")
@click.option("--name", metavar="TEXT", help="What people call it.")
@words.json_option
def create(tenant_id: str, name: str | None, as_json: bool) -> None:
    """Create a tenant and print its id. Its first key: corral key create --tenant ID."""
    with opened() as transport:
        _show(transport.request("POST", "/v1/tenants", {"id": tenant_id, "name": name}), as_json)


@command.command()
@words.json_option
def ls(as_json: bool) -> None:
    """List tenants."""
    with opened() as transport:
        items = every(transport, "/v1/tenants")
    if as_json:
        terminal.put_json({"items": items, "next": None})
    else:
        terminal.table(items, COLUMNS, empty="no tenants")


@command.command()
@click.argument("tenant_id", type=words.IDENT, metavar="ID")
@words.json_option
def disable(tenant_id: str, as_json: bool) -> None:
    """Refuse its keys from now on. What runs goes on until it ends or is removed."""
    _change(tenant_id, True, as_json)


@command.command()
@click.argument("tenant_id", type=words.IDENT, metavar="ID")
@words.json_option
def enable(tenant_id: str, as_json: bool) -> None:
    """Take its keys again."""
    _change(tenant_id, False, as_json)


@command.command(short_help="Remove a disabled tenant, for good.")
@click.argument("tenant_id", type=words.IDENT, metavar="ID")
@words.json_option
def rm(tenant_id: str, as_json: bool) -> None:
    """Remove a disabled tenant in which nothing goes on, for good: its id is never given again."""
    with opened() as transport:
        _show(transport.request("DELETE", f"/v1/tenants/{quote(tenant_id)}"), as_json)


def _change(tenant_id: str, disabled: bool, as_json: bool) -> None:
    with opened() as transport:
        _show(transport.request("PATCH", f"/v1/tenants/{quote(tenant_id)}", {"disabled": disabled}), as_json)


def _show(tenant: words.Json, as_json: bool) -> None:
    if as_json:
        terminal.put_json(tenant)
    else:
        terminal.put(f"{tenant['id']}\n")
