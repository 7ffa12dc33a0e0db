"""`corral doctor`: what this host can do."""

from __future__ import annotations

import click

from corral.cli import terminal, words
from corral.cli.connection import opened


@click.command()
@click.option("--fresh", is_flag=True, help="Probe again instead of using what was found since boot.")
@words.json_option
@click.pass_context
def command(ctx: click.Context, fresh: bool, as_json: bool) -> None:
    """Say which runtimes work here, how each holds the limits, and what is left over. Exit status 1 if none works."""
    with opened() as transport:
        report = transport.request("GET", "/v1/doctor", params={"fresh": True} if fresh else None)
    if as_json:
        terminal.put_json(report)
    else:
        _print(report)
    ctx.exit(0 if report.get("default") else 1)


def _print(report: words.Json) -> None:
    host = report["host"]
    terminal.put(f"host: cgroup {host['cgroup']}, {host['user']}\n")
    terminal.put(f"default: {report.get('default') or 'none'}\n\n")
    columns = ("name", "usable", "security_level", "version", "reason")
    terminal.table(report["runtimes"], columns, empty="no runtimes")
    usable = [r for r in report["runtimes"] if r.get("usable")]
    if usable:
        limits = list(usable[0].get("limits") or {})
        terminal.put("\n")
        terminal.table(
            [{"limits": r["name"], **(r.get("limits") or {})} for r in usable], ("limits", *limits), empty=""
        )
        terminal.put("\n")
        able = [{"can": r["name"], "capabilities": _named(r.get("capabilities") or {})} for r in usable]
        terminal.table(able, ("can", "capabilities"), empty="")
    if report.get("leftovers"):
        terminal.put("\nleft over (corral gc removes it):\n")
        terminal.table(report["leftovers"], ("kind", "id", "instance_id"), empty="")


def _named(capabilities: dict[str, bool]) -> str:
    return " ".join(sorted(name for name, there in capabilities.items() if there))
