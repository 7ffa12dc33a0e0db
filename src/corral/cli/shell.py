"""`corral shell`: a terminal in a sandbox."""

from __future__ import annotations

from typing import Any

import click

from corral.cli import terminal, tty, words
from corral.cli.connection import opened, under
from corral.cli.following import Interrupted, Interrupts, explain
from corral.cli.interactive import Interactive, Outcome
from corral.cli.sandbox import remove
from corral.client import Transport
from corral.client.transport import quote

SHELL = ("/bin/sh", "-c", "if command -v bash >/dev/null 2>&1; then exec bash; else exec sh; fi")
TIMEOUT = "3600"
OUTPUT = "1G"
"""What a shell may write before it is ended: a person looks at it, so more than a program's default."""
_EXEC = ("timeout", "env", "cwd", "user", "output_kill")


class _Words(words.PassThrough):
    """`[ID] [OPTIONS] [--command ARGV…]`; `--` is the same as `--command`."""

    leading = 1
    separators = ("--", "--command")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, ids, separator, rest = self.split(ctx, list(args))
        if rest and not separator:
            raise click.UsageError(f"{rest[0]!r} is no option: the program goes after --command.", ctx)
        if separator and not rest:
            raise click.UsageError("--command needs a program.", ctx)
        ctx.meta["program"] = rest
        return click.Command.parse_args(self, ctx, [*options, "--", *ids])


def detach_option(function: words.F) -> words.F:
    """`--detach-keys`."""
    told = f"Keys that leave it running, such as ctrl-p,ctrl-q; none for no keys. {tty.DETACH} by default."
    return click.option("--detach-keys", metavar="KEYS", default=tty.DETACH, help=told)(function)


@click.command(
    cls=_Words,
    short_help="Open a terminal in a sandbox.",
    options_metavar="[OPTIONS] [--command ARGV...]",
    epilog="Without a terminal on both sides it works with pipes: input is a script, output comes as it is.",
)
@click.argument("sandbox_id", type=words.IDENT, metavar="[ID]", required=False)
@words.sandbox_options
@click.option("--timeout", metavar="VALUE", help=f"Seconds that the program may run; {TIMEOUT} by default.")
@click.option("--output-kill", metavar="VALUE", help=f"Output that ends the program; {OUTPUT} by default.")
@click.option("--env", multiple=True, metavar="K=V", help="Environment variable.")
@click.option("--cwd", metavar="PATH", help="Working directory inside.")
@click.option("--user", metavar="NAME", help="User inside: sandbox (default) or root.")
@click.option("--keep", is_flag=True, help="Leave the fresh sandbox alive for --ttl.")
@words.lease_option
@detach_option
@click.option("--command", "unused", metavar="ARGV...", expose_value=False, help="This instead of a shell; comes last.")
@click.pass_context
def command(
    ctx: click.Context, /, sandbox_id: str | None, keep: bool, lease: str | None, detach_keys: str, **given: Any
) -> None:
    """Open a shell in the sandbox ID, or in a fresh one that is gone afterwards.

    Every key goes inside, Ctrl-C and Ctrl-Z too. The exit status is the program's.
    """
    interrupts: Interrupts = ctx.obj
    detach = tty.keys_of(detach_keys)
    screen = tty.RawTerminal() if tty.interactive() else None
    given["timeout"] = given["timeout"] or TIMEOUT
    given["output_kill"] = given["output_kill"] or OUTPUT
    request = words.common({name: given.pop(name) for name in _EXEC})
    request |= {"argv": ctx.meta["program"] or list(SHELL), "stdin_open": True}
    if screen is not None:
        request["pty"] = list(tty.size())
        request["env"] = tty.environment() | request.get("env", {})
    wrong = ["keep"] if keep else [name for name, value in given.items() if value]
    if sandbox_id is not None and wrong:
        raise click.UsageError(f"--{wrong[0].replace('_', '-')} is for a fresh sandbox; {sandbox_id} is there already.")
    if sandbox_id is None and lease is not None:
        raise click.UsageError("--lease is for a sandbox that is there; name its ID.")
    with opened() as transport:
        if sandbox_id is not None:
            outcome = _open(under(transport, lease), interrupts, sandbox_id, request, screen, detach)
        else:
            outcome = _in_a_fresh_one(transport, interrupts, words.common(given), keep, request, screen, detach)
    ctx.exit(told(outcome))


def _in_a_fresh_one(
    transport: Transport,
    interrupts: Interrupts,
    wishes: words.Json,
    keep: bool,
    request: words.Json,
    screen: tty.RawTerminal | None,
    detach: bytes,
) -> Outcome:
    sandbox_id: str | None = None
    try:
        with interrupts.hold():
            sandbox_id = str(transport.request("POST", "/v1/sandboxes", wishes)["id"])
        outcome = _open(transport, interrupts, sandbox_id, request, screen, detach)
        if outcome.ended is None:
            keep = True
        return outcome
    finally:
        if sandbox_id is not None and keep:
            terminal.say(f"corral: kept {sandbox_id}")
        elif sandbox_id is not None:
            remove(transport, sandbox_id)


def _open(
    transport: Transport,
    interrupts: Interrupts,
    sandbox_id: str,
    request: words.Json,
    screen: tty.RawTerminal | None,
    detach: bytes,
) -> Outcome:
    path = f"/v1/sandboxes/{quote(sandbox_id)}/execs"
    shell: Interactive | None = None
    try:
        with interrupts.hold():
            started = transport.request("POST", path, request, {"wait": 0, "output": "none"})
            shell = Interactive(
                transport, interrupts, started["id"], offset=0, screen=screen, detach=detach, close_input=True
            )
        terminal.stop_progress()
        return shell.run(signal_ends=True)
    except Interrupted as stopped:  # before the terminal was taken, or while it was given back
        if shell is None:
            raise
        return shell.end(stopped)


def told(outcome: Outcome) -> int:
    """Say what has to be said; the exit status."""
    if outcome.ended is None:
        terminal.say(f"corral: left running; corral attach {outcome.exec_id} comes back")
        return 0
    explain(outcome.ended)
    return outcome.ended.status
