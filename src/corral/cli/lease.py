"""`corral lease`: ls, acquire, renew, release. A lease that is acquired here lives as long as its time, unless it is renewed."""

from __future__ import annotations

import click

from corral.cli import terminal, words
from corral.cli.connection import every, opened
from corral.client.transport import quote

COLUMNS = ("sandbox_id", "owner", "lease", "state", "session", "expires_at")
FENCE = {"metavar": "FENCE", "help": "The lease, as acquire printed it."}


@click.group(name="lease")
def command() -> None:
    """Who has which sandbox, for how long."""


@command.command()
@words.tenant_option("Whose they are, for an admin; one's own by default.")
@words.json_option
def ls(tenant: str | None, as_json: bool) -> None:
    """List leases."""
    with opened() as transport:
        items = every(transport, "/v1/leases", {"tenant": tenant})
    if as_json:
        terminal.put_json({"items": items, "next": None})
    else:
        terminal.table(items, COLUMNS, empty="no leases")


@command.command(short_help="Get a sandbox under a lease.")
@click.argument("sandbox_id", type=words.IDENT, metavar="ID")
@click.option("--owner", required=True, metavar="OWNER", help="For whom, such as session/tool-call.")
@click.option("--ttl", metavar="SECONDS", help="How long it lasts without a renewal; 60 by default.")
@click.option("--contention", metavar="WORD", help="If somebody has it: wait, fail, or new (a sandbox like it).")
@click.option("--wait", metavar="SECONDS", help="How long to wait for it; 30 by default.")
@click.option("--session", metavar="NAME", help="In which the owner works.")
@words.json_option
def acquire(
    sandbox_id: str,
    owner: str,
    ttl: str | None,
    contention: str | None,
    wait: str | None,
    session: str | None,
    as_json: bool,
) -> None:
    """Get a sandbox under a lease; prints the sandbox's id, the lease and when it ends."""
    given = {
        "ttl_s": None if ttl is None else words.number("ttl", ttl),
        "contention": contention,
        "wait_s": None if wait is None else words.number("wait", wait),
        "session": session,
    }
    request = {"owner": owner, **{name: value for name, value in given.items() if value is not None}}
    with opened() as transport:
        lease = transport.request("POST", f"/v1/sandboxes/{quote(sandbox_id)}/attach", request)
    _show(lease, as_json)


@command.command()
@click.argument("sandbox_id", type=words.IDENT, metavar="ID")
@click.option("--lease", required=True, **FENCE)  # type: ignore[arg-type]
@click.option("--ttl", metavar="SECONDS", help="How long it lasts from now on; as before without it.")
@words.json_option
def renew(sandbox_id: str, lease: str, ttl: str | None, as_json: bool) -> None:
    """Keep a lease; prints when it ends."""
    request = {} if ttl is None else {"ttl_s": words.number("ttl", ttl)}
    path, headers = f"/v1/sandboxes/{quote(sandbox_id)}/renew", {"Corral-Lease": lease}
    with opened() as transport:
        document = transport.request("POST", path, request, None, headers)
    _show(document, as_json)


@command.command(short_help="Give a sandbox back.")
@click.argument("sandbox_id", type=words.IDENT, metavar="ID")
@click.option("--lease", required=True, **FENCE)  # type: ignore[arg-type]
@click.option("--keep", is_flag=True, help="Programs that no client is attached to go on.")
@words.json_option
def release(sandbox_id: str, lease: str, keep: bool, as_json: bool) -> None:
    """Give a sandbox back: what runs in it is ended, what is temporary in it is removed."""
    path, headers = f"/v1/sandboxes/{quote(sandbox_id)}/release", {"Corral-Lease": lease}
    with opened() as transport:
        sandbox = transport.request("POST", path, {"keep": keep}, None, headers)
    if as_json:
        terminal.put_json(sandbox)
    else:
        terminal.put(f"{sandbox['id']} {sandbox['state']}\n")


def _show(lease: words.Json, as_json: bool) -> None:
    if as_json:
        terminal.put_json(lease)
    else:
        terminal.put(f"{lease['sandbox_id']} {lease['lease']} {lease['expires_at']}\n")
