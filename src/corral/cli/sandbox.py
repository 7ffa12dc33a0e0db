"""`corral sandbox`: create, ls, inspect, extend, pause, resume, rm."""

from __future__ import annotations

from typing import Any

import click

from corral.cli import terminal, words
from corral.cli.connection import every, opened, under
from corral.cli.following import Interrupts
from corral.client import Transport
from corral.client.transport import quote
from corral.errors import CorralError

COLUMNS = ("id", "state", "runtime", "template", "resource_class", "created_at", "expires_at")
whose = words.tenant_option("Whose they are, for an admin; one's own by default.")


@click.group(name="sandbox")
def command() -> None:
    """Create, list, inspect, pause and remove sandboxes."""


@command.command()
@words.sandbox_options
@words.idle_option()
@words.json_option
@click.pass_obj
def create(interrupts: Interrupts, /, as_json: bool, **given: Any) -> None:
    """Create a sandbox and print its id."""
    request = words.common(given)
    with opened() as transport, interrupts.hold():
        sandbox = transport.request("POST", "/v1/sandboxes", request)
        if as_json:
            terminal.put_json(sandbox)
        else:
            terminal.put(f"{sandbox['id']}\n")


@command.command()
@click.option("--all", "ended", is_flag=True, help="Those that have ended too.")
@whose
@words.json_option
def ls(ended: bool, tenant: str | None, as_json: bool) -> None:
    """List sandboxes."""
    with opened() as transport:
        items = every(transport, "/v1/sandboxes", {"all": True if ended else None, "tenant": tenant})
    if as_json:
        terminal.put_json({"items": items, "next": None})
    else:
        terminal.table(items, COLUMNS, empty="no sandboxes")


@command.command()
@click.argument("sandbox_id", type=words.IDENT, metavar="ID")
@whose
@words.json_option
def inspect(sandbox_id: str, tenant: str | None, as_json: bool) -> None:
    """Show one sandbox with its instance and history."""
    with opened() as transport:
        sandbox = transport.request("GET", f"/v1/sandboxes/{quote(sandbox_id)}", params={"tenant": tenant})
    if as_json:
        terminal.put_json(sandbox)
        return
    rows = [{"what": name, "value": value} for name, value in sandbox.items() if name != "history"]
    terminal.table(rows, ("what", "value"), empty="nothing")
    if history := sandbox.get("history"):
        terminal.put("\n")
        terminal.table(history, ("at", "event", "old_state", "new_state", "metadata"), empty="")


@command.command()
@click.argument("sandbox_id", type=words.IDENT, metavar="ID")
@words.lease_option
@words.json_option
def pause(sandbox_id: str, lease: str | None, as_json: bool) -> None:
    """Stop all that runs in a sandbox, with its memory as it is. Again is no error."""
    _turn(sandbox_id, "pause", lease, as_json)


@command.command()
@click.argument("sandbox_id", type=words.IDENT, metavar="ID")
@words.lease_option
@words.json_option
def resume(sandbox_id: str, lease: str | None, as_json: bool) -> None:
    """Let a paused sandbox go on. Again is no error."""
    _turn(sandbox_id, "resume", lease, as_json)


@command.command(short_help="Move the ends of a sandbox in time.")
@click.argument("sandbox_id", type=words.IDENT, metavar="ID")
@click.option("--ttl", "ttl", metavar="SECONDS", help="How long it lives from now on; none where policy allows it.")
@words.idle_option("End it after so many seconds without activity, from now on; none where policy allows it.")
@words.lease_option
@words.json_option
def extend(sandbox_id: str, lease: str | None, as_json: bool, **given: str | None) -> None:
    """Move the ends of a sandbox: its time to live, its time without activity."""
    ends = {f"{name}_s": words.number(name, value) for name, value in given.items() if value is not None}
    if not ends:
        raise click.UsageError("Nothing to change: give --ttl or --idle-timeout.")
    with opened() as transport:
        sandbox = under(transport, lease).request("PATCH", f"/v1/sandboxes/{quote(sandbox_id)}", ends)
    if as_json:
        terminal.put_json(sandbox)
    else:
        terminal.put(f"{sandbox['id']} {sandbox['expires_at'] or 'none'}\n")


def _turn(sandbox_id: str, word: str, lease: str | None, as_json: bool) -> None:
    with opened() as transport:
        sandbox = under(transport, lease).request("POST", f"/v1/sandboxes/{quote(sandbox_id)}/{word}")
    if as_json:
        terminal.put_json(sandbox)
    else:
        terminal.put(f"{sandbox['id']} {sandbox['state']}\n")


@command.command()
@click.argument("sandbox_ids", type=words.IDENT, nargs=-1, required=True, metavar="ID...")
@words.lease_option
@whose
@words.json_option
@click.pass_context
def rm(ctx: click.Context, sandbox_ids: tuple[str, ...], lease: str | None, tenant: str | None, as_json: bool) -> None:
    """Remove sandboxes; returns when they are terminated. Again is no error."""
    removed: list[words.Json] = []
    errors: list[tuple[str, CorralError]] = []
    if lease is not None and len(sandbox_ids) > 1:
        raise click.UsageError("--lease is that of one sandbox; name one ID.")
    with opened() as transport:
        for sandbox_id in sandbox_ids:
            try:
                removed.append(remove(under(transport, lease), sandbox_id, tenant))
            except CorralError as error:
                errors.append((sandbox_id, error))
                if not as_json:
                    terminal.complain(error)
    if as_json and errors and len(sandbox_ids) == 1:
        raise errors[0][1]
    if as_json:
        refused = [{"id": sandbox_id, "error": error.to_problem()} for sandbox_id, error in errors]
        terminal.put_json({"items": [*removed, *refused], "next": None})
    if errors:
        ctx.exit(errors[0][1].exit_status)


def remove(transport: Transport, sandbox_id: str, tenant: str | None = None) -> words.Json:
    """Delete it; returns when it is terminated."""
    for _ in range(4):
        params = {"wait": 60, "tenant": tenant}
        sandbox = transport.request("DELETE", f"/v1/sandboxes/{quote(sandbox_id)}", params=params)
        if sandbox.get("state") == "terminated":
            return sandbox
    hint = "corral gc removes it once its processes have ended; corral doctor lists what is left"
    raise CorralError("infra_error", f"{sandbox_id} is {sandbox.get('state')}, not yet terminated", hint=hint)
