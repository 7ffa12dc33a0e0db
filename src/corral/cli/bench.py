"""`corral bench`: put this build under strain on this host."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from corral.cli import terminal, words
from corral.errors import CorralError


@click.group()
def command() -> None:
    """Put this build under strain on this host."""


@command.command("chaos", short_help="Break an installation of its own, check its promises.")
@click.option("--seed", type=click.IntRange(0), help="The same seed gives the same plan; a new one by default.")
@click.option("--minutes", type=click.FloatRange(0.1), default=10.0, show_default=True, help="How long things break.")
@click.option(
    "--replicas", type=click.IntRange(1), default=1, show_default=True, help="More than one: on PostgreSQL and Redis."
)
@click.option("--clients", type=click.IntRange(1, 64), default=6, show_default=True, help="Client processes.")
@click.option("--sandboxes", type=click.IntRange(1, 64), default=3, show_default=True, help="What they fight over.")
@click.option("--fault", "faults", multiple=True, metavar="NAME", help="Only these; all that are possible by default.")
@click.option("--plan", "only_plan", is_flag=True, help="Print the plan of the seed and do nothing.")
@click.option("--keep", is_flag=True, help="Keep the history, also when no promise was broken.")
@words.json_option
@click.pass_context
def chaos(
    ctx: click.Context,
    seed: int | None,
    minutes: float,
    replicas: int,
    clients: int,
    sandboxes: int,
    faults: tuple[str, ...],
    only_plan: bool,
    keep: bool,
    as_json: bool,
) -> None:
    """Break an installation of its own while clients use it, and check that it kept its promises.

    Clients of two tenants acquire, renew, work, pause, release, queue and crash; servers, databases, clocks and connections fail by
    the plan of the seed. What clients were told is compared with what node and guests really did. Exit status 1 when a promise was
    broken.
    """
    from corral import bootstrap
    from corral.testing.history import harness
    from corral.testing.history.plan import FAULTS, Kind, Plan

    kind: Kind = "postgres" if replicas > 1 else "sqlite"
    if unknown := [name for name in faults if name not in FAULTS[kind]]:
        hint = f"there are {', '.join(FAULTS[kind])}"
        raise CorralError("invalid_value", f"no fault {unknown[0]!r} here", hint=hint, field="--fault")
    chosen = harness.fresh_seed() if seed is None else seed
    plan = Plan(chosen, minutes * 60, kind, clients, sandboxes, faults or None)
    if only_plan:
        terminal.put(plan.text() + "\n")
        return
    _check_host()
    if not as_json:
        terminal.say(plan.text(0))
    began = time.monotonic()

    def progress(text: str) -> None:
        terminal.say(f"corral: {time.monotonic() - began:7.1f} s  {text}")

    report = harness.run(plan, replicas=replicas, door=bootstrap.node_at, progress=progress, keep=keep)
    document = report.document()
    if as_json:
        terminal.put_json(document)
    else:
        _print(document)
    ctx.exit(0 if report.ok else 1)


def _check_host() -> None:
    if sys.platform != "linux" or not Path("/proc/self/mountinfo").exists():
        raise CorralError("invalid_value", "chaos needs Linux with /proc")
    if os.environ.get("CORRAL_RUNTIMES", "bubblewrap").find("bubblewrap") < 0:
        hint = "unset CORRAL_RUNTIMES, or name bubblewrap in it"
        raise CorralError("runtime_unavailable", "chaos runs on bubblewrap", hint=hint)


def _print(document: dict[str, Any]) -> None:
    rows = [
        {"call": name, "answers": ", ".join(f"{n} {how}" for how, n in told.items())}
        for name, told in document["calls"].items()
    ]
    terminal.table(rows, ("call", "answers"), empty="no call was made")
    done = ", ".join(f"{name} {count}" for name, count in sorted(document["faults"].items()))
    terminal.put(f"\nfaults: {done or 'none'}\n")
    straight = ", ".join(f"{name} {count}" for name, count in sorted(document["old_fences"].items()))
    terminal.put(f"old fences sent straight to guests and node: {straight or 'none'}\n\n")
    broken = {one["rule"] for one in document["violations"]}
    from corral.testing.history.checker import RULES

    rows = [
        {
            "rule": name,
            "looked at": count,
            "verdict": "broken" if name in broken else "held" if count else "nothing to see",
            "what": RULES[name],
            "style": "bold red" if name in broken else "green" if count else "yellow",
        }
        for name, count in document["examined"].items()
    ]
    terminal.table(rows, ("rule", "looked at", "verdict", "what"), empty="", style="style")
    for one in document["violations"]:
        terminal.put(f"\n{one['rule']}: {terminal.plain(one['what'])}\n")
        for event in one["events"]:
            terminal.put(f"    {terminal.plain(event)}\n")
    end = f"{document['events']} events in {document['took_s']} s, seed {document['seed']}"
    terminal.put(f"\n{'no promise was broken' if document['ok'] else 'promises were broken'}: {end}\n")
    if document["directory"] is not None:
        terminal.put(f"the history is in {document['directory']}\n")
