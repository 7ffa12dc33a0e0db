"""`corral user`: create, ls, disable, enable, rm. Users of one's own tenant, or, for an admin, of the one that is named."""

from __future__ import annotations

import click

from corral.cli import terminal, words
from corral.cli.connection import every, opened
from corral.client.transport import quote

COLUMNS = ("id", "tenant", "name", "state", "created_at", "disabled_at")
tenant_option = words.tenant_option("Whose user; of one's own tenant by default.")


@click.group(name="user")
def command() -> None:
    """Create, list, disable and remove users. Needs a key with the scope tenant."""


@command.command()
@click.argument("user_id", type=words.IDENT, metavar="ID")
@click.option("--name", metavar="TEXT", help="What people call him.")
@tenant_option
@words.json_option
def create(user_id: str, name: str | None, tenant: str | None, as_json: bool) -> None:
    """Create a user and print the id. A key of his: corral key create --user ID."""
    with opened() as transport:
        _show(transport.request("POST", "/v1/users", {"id": user_id, "name": name, "tenant": tenant}), as_json)


@command.command()
@tenant_option
@words.json_option
def ls(tenant: str | None, as_json: bool) -> None:
    """List the users of a tenant. Who came with a token is among them."""
    with opened() as transport:
        items = every(transport, "/v1/users", {"tenant": tenant})
    if as_json:
        terminal.put_json({"items": items, "next": None})
    else:
        terminal.table(items, COLUMNS, empty="no users")


@command.command()
@click.argument("user_id", type=words.IDENT, metavar="ID")
@tenant_option
@words.json_option
def disable(user_id: str, tenant: str | None, as_json: bool) -> None:
    """Refuse his keys and tokens from now on. What he has started goes on. Again is no error."""
    _change(user_id, tenant, True, as_json)


@command.command()
@click.argument("user_id", type=words.IDENT, metavar="ID")
@tenant_option
@words.json_option
def enable(user_id: str, tenant: str | None, as_json: bool) -> None:
    """Take his keys and tokens again."""
    _change(user_id, tenant, False, as_json)


@command.command(short_help="Remove a user and revoke his keys.")
@click.argument("user_id", type=words.IDENT, metavar="ID")
@tenant_option
@words.json_option
def rm(user_id: str, tenant: str | None, as_json: bool) -> None:
    """Remove a user; his keys are revoked. Who comes with tokens of an issuer comes back with the next one: disable him instead."""
    with opened() as transport:
        transport.request("DELETE", f"/v1/users/{quote(user_id)}", params={"tenant": tenant})
    _show({"id": user_id}, as_json)


def _change(user_id: str, tenant: str | None, disabled: bool, as_json: bool) -> None:
    path = f"/v1/users/{quote(user_id)}"
    with opened() as transport:
        _show(transport.request("PATCH", path, {"disabled": disabled}, {"tenant": tenant}), as_json)


def _show(user: words.Json, as_json: bool) -> None:
    if as_json:
        terminal.put_json(user)
    else:
        terminal.put(f"{user['id']}\n")
