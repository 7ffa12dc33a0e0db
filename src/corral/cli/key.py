"""`corral key`: create, ls, revoke, rotate. The key itself is shown once, on standard output, alone on its line."""

from __future__ import annotations

from typing import Any

import click

from corral.cli import terminal, words
from corral.cli.connection import every, opened
from corral.client.transport import quote
from corral.domain.identity import SCOPES
from corral.errors import CorralError

COLUMNS = ("id", "tenant", "user", "name", "scopes", "state", "created_at", "expires_at", "last_used_at")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Duration(click.ParamType[float]):
    """Seconds, or a number with s, m, h or d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        number, unit = (value[:-1], value[-1]) if value[-1:] in UNITS else (value, "s")
        try:
            if not number.isascii() or not number.replace(".", "", 1).isdigit():
                raise ValueError
            return float(number) * UNITS[unit]
        except ValueError:
            self.fail(f"{value!r} is no duration: seconds, or a number with s, m, h or d.", param, ctx)


@click.group(name="key")
def command() -> None:
    """Create, list, revoke and rotate the keys that open the API."""


@command.command()
@click.option("--tenant", metavar="ID", help="Whose it is; one's own by default.")
@click.option("--user", metavar="ID", help="Who of the tenant; one who is not known yet is made.")
@click.option("--name", metavar="TEXT", help="What people call it.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    default=("run",),
    show_default=True,
    help="What it may do; several times for several.",
)
@click.option("--expires", type=Duration(), metavar="TIME", help="After how long it ends, such as 12h or 30d.")
@words.json_option
def create(
    tenant: str | None,
    user: str | None,
    name: str | None,
    scopes: tuple[str, ...],
    expires: float | None,
    as_json: bool,
) -> None:
    """Create a key and print it. It is shown this once: only a hash of it is kept."""
    request = {
        "tenant": tenant,
        "user": user,
        "name": name,
        "scopes": list(dict.fromkeys(scopes)),
        "expires_in_s": expires,
    }
    with opened() as transport:
        _show(transport.request("POST", "/v1/keys", request), as_json)


@command.command(short_help="List keys, newest first.")
@click.option("--tenant", metavar="ID", help="Those of one tenant only.")
@words.json_option
def ls(tenant: str | None, as_json: bool) -> None:
    """List keys, newest first: of all tenants for an admin, else of one's own."""
    with opened() as transport:
        items = every(transport, "/v1/keys", {"tenant": tenant})
    if as_json:
        terminal.put_json({"items": items, "next": None})
    else:
        rows = [item | {"scopes": " ".join(item["scopes"])} for item in items]
        terminal.table(rows, COLUMNS, empty="no keys")


@command.command()
@click.argument("key_id", type=words.IDENT, metavar="ID")
@words.json_option
def revoke(key_id: str, as_json: bool) -> None:
    """Refuse a key from now on, for good. Again is no error."""
    with opened() as transport:
        key = transport.request("DELETE", f"/v1/keys/{quote(key_id)}")
    if as_json:
        terminal.put_json(key)
    else:
        terminal.put(f"{key['id']}: {key['state']}\n")


@command.command()
@click.argument("key_id", type=words.IDENT, metavar="ID")
@click.option("--overlap", type=Duration(), metavar="TIME", help="How long the old key goes on; 24h by default.")
@click.option(
    "--expires", type=Duration(), metavar="TIME", help="After how long the new one ends; else as the old one."
)
@words.json_option
def rotate(key_id: str, overlap: float | None, expires: float | None, as_json: bool) -> None:
    """Create a successor of a key and print it. It may do the same, and has the same leases."""
    request = {"overlap_s": overlap, "expires_in_s": expires}
    with opened() as transport:
        _show(transport.request("POST", f"/v1/keys/{quote(key_id)}/rotate", request), as_json)


def _show(key: words.Json, as_json: bool) -> None:
    if key["key"] is None:
        hint = f"corral key revoke {key['id']}, and create another"
        raise CorralError("conflict", f"{key['id']} is there, and its text has been shown", hint=hint, retryable=False)
    if as_json:
        terminal.put_json(key)
        return
    terminal.put(f"{key['key']}\n")
    ends = f", until {key['expires_at']}" if key["expires_at"] else ""
    terminal.say(f"corral: {key['id']} of tenant {key['tenant']}: {' '.join(key['scopes'])}{ends}; shown this once")
