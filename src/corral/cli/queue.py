"""`corral queue`: the runs of a tenant that wait for room, in the order in which they start."""

from __future__ import annotations

import click

from corral.cli import terminal, words
from corral.cli.connection import opened

COLUMNS = ("position", "run", "priority", "waits_since", "until")
MOST = 1000
"""More than this the API does not list at once."""


@click.command(name="queue")
@words.tenant_option("Whose they are, for an admin; one's own by default.")
@words.json_option
def command(tenant: str | None, as_json: bool) -> None:
    """List the runs that wait for room, in the order in which they start."""
    with opened() as transport:
        queue = transport.request("GET", "/v1/queue", params={"limit": str(MOST), "tenant": tenant})
    if as_json:
        terminal.put_json(queue)
        return
    rows = [
        {
            "position": item["position"],
            "run": item["run_id"],
            "priority": item["priority"],
            "waits_since": item["queued_at"],
            "until": item["deadline_at"],
        }
        for item in queue["items"]
    ]
    terminal.table(rows, COLUMNS, empty="no run waits")
    if queue["waiting"] > len(rows):
        terminal.say(f"{queue['waiting'] - len(rows)} more wait behind them")
