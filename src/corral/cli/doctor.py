"""`corral doctor`: what this host can do."""

from __future__ import annotations

from typing import Any

import click

from corral.cli import terminal, words
from corral.cli.connection import opened


@click.command()
@click.option("--fresh", is_flag=True, help="Probe again instead of using what was found since boot.")
@click.option("--security", is_flag=True, help="Grade host and runtimes, A to D, by behaviour probes.")
@words.json_option
@click.pass_context
def command(ctx: click.Context, fresh: bool, security: bool, as_json: bool) -> None:
    """Say which runtimes work here, how each holds the limits, and what is left over. Exit status 1 if nothing can be run here."""
    params = {name: True for name, wanted in (("fresh", fresh), ("security", security)) if wanted}
    with opened() as transport:
        report = transport.request("GET", "/v1/doctor", params=params or None)
    if as_json:
        terminal.put_json(report)
    elif security:
        _print_grades(report["security"])
    else:
        _print(report)
    ctx.exit(0 if report.get("default") else 1)


def _print(report: words.Json) -> None:
    host = report["host"]
    terminal.put(f"host: cgroup {host['cgroup']}, {host['user']}\n")
    default = report.get("default") or f"none ({report.get('default_reason') or 'nothing works here'})"
    terminal.put(f"default: {default}\n\n")
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
    if bases := report.get("bases"):
        unused = (
            f", {bases['unused']} of them ({terminal.size(bases['unused_bytes'])}) unused" if bases["unused"] else ""
        )
        terminal.put(f"\nbases: {bases['count']}, {terminal.size(bases['size_bytes'])}{unused}\n")
    if report.get("leftovers"):
        terminal.put("\nleft over (corral gc removes it):\n")
        terminal.table(report["leftovers"], ("kind", "id", "instance_id"), empty="")
    if report.get("quota"):
        terminal.put("\nheld, but not by what lives (a fault; corral gc mends it):\n")
        terminal.table(report["quota"], ("kind", "subject"), empty="")


def _named(capabilities: dict[str, Any]) -> str:
    there = sorted(name for name, there in capabilities.items() if there is True)
    by = capabilities.get("pause_by")
    return " ".join(f"{name} (by the {by})" if name == "pause" and by else name for name in there)


GRADES = {"A": "green", "B": "green", "C": "yellow", "D": "bold red"}


def _print_grades(report: words.Json) -> None:
    graded = [{"name": "host", **report["host"]}, *report["runtimes"]]
    rows = [{**one, "style": GRADES[one["grade"]]} for one in graded]
    terminal.table(rows, ("name", "grade", "reason", "hint"), empty="", style="style")
    verdicts = {True: ("ok", "green"), False: ("missing", "yellow"), None: ("unknown", "")}
    checks = [
        {
            "check": check["name"],
            "kind": check["kind"],
            "verdict": verdicts[check["ok"]][0],
            "seen": check["seen"],
            "hint": check["hint"] if check["ok"] is False else None,
            "style": verdicts[check["ok"]][1],
        }
        for check in report["checks"]
    ]
    terminal.put("\n")
    terminal.table(checks, ("check", "kind", "verdict", "seen", "hint"), empty="", style="style")
    terminal.put("\ncorral certify attacks the runtimes and shows what holds\n")
