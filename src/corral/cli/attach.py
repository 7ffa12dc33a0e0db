"""`corral attach`: join what is running."""

from __future__ import annotations

import click

from corral.cli import terminal, tty, words
from corral.cli.connection import opened, under
from corral.cli.following import Ended, Following, Interrupted, Interrupts, exit_status, explain
from corral.cli.interactive import Interactive, input_offset, resize
from corral.cli.shell import detach_option, told
from corral.client import Transport
from corral.client.transport import quote


@click.command(short_help="Follow what is running, with its terminal.")
@click.argument("ident", type=words.IDENT, metavar="EXEC_ID|RUN_ID")
@words.lease_option
@detach_option
@click.pass_context
def command(ctx: click.Context, ident: str, lease: str | None, detach_keys: str) -> None:
    """Follow a running exec or run from its first output on, until it ends; its exit status is ours.

    If it has a terminal, ours becomes that; the detach keys leave it running. Without one Ctrl-C does.
    """
    interrupts: Interrupts = ctx.obj
    detach = tty.keys_of(detach_keys)
    words.check_lease(lease, ident)
    with opened() as transport:
        try:
            ctx.exit(_follow(under(transport, lease), interrupts, ident, detach))
        except Interrupted as stopped:
            terminal.say(f"corral: left running; corral cancel {ident} ends it")
            ctx.exit(stopped.exit_status)


def _follow(transport: Transport, interrupts: Interrupts, ident: str, detach: bytes) -> int:
    if not ident.startswith("exe_"):
        following = Following(transport, interrupts, "runs", ident)
        document = following.pass_through()
        ended = Ended(document, exit_status(document.get("result")), following)
        explain(ended)
        return ended.status
    running = transport.request("GET", f"/v1/execs/{quote(ident)}", params={"output": "none"})["result"] is None
    person = tty.interactive()
    has_terminal = running and person and resize(transport, ident)
    return told(
        Interactive(
            transport,
            interrupts,
            ident,
            offset=input_offset(transport, ident) if running else None,
            screen=tty.RawTerminal() if has_terminal else None,
            detach=detach,
            close_input=False,
        ).run(signal_ends=False)
    )
