"""`corral cancel`: end a run or exec."""

from __future__ import annotations

import click

from corral.cli import terminal, words
from corral.cli.connection import opened, under
from corral.cli.following import Following, Interrupts


@click.command()
@click.argument("ident", type=words.IDENT, metavar="ID")
@words.lease_option
@words.tenant_option("Whose it is, for an admin.")
@words.json_option
@click.pass_obj
def command(interrupts: Interrupts, ident: str, lease: str | None, tenant: str | None, as_json: bool) -> None:
    """End the run or exec ID with everything in it; returns when it has ended. Ended before is no error."""
    kind = "execs" if ident.startswith("exe_") else "runs"
    words.check_lease(lease, ident)
    with opened() as transport:
        following = Following(under(transport, lease), interrupts, kind, ident, tenant=tenant)
        following.cancel()
        document = following.wait() if as_json else None
    if as_json:
        terminal.put_json(document)
