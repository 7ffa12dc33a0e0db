"""`corral node serve`: the node of this host as a process of its own, for the replicas of `corral serve`. Internal: it is started by that.

It holds no key and no database: it takes calls on STATE/node.sock, from processes of its own user. It may be killed at any moment; the
next one adopts what lives. Given alone it owns the state directory like any other command.
"""

from __future__ import annotations

import asyncio
import os
import signal

import click

from corral import config
from corral.cli import child
from corral.errors import CorralError

SOCKET = "node.sock"


@click.group(hidden=True)
def command() -> None:
    """The node of this host."""


@command.command("serve")
@click.option("--as-child", "given", metavar="JSON", hidden=True)
def serve(given: str | None) -> None:
    """Serve the node port on the state directory's socket until a signal says stop."""
    us = child.Child.take(given)
    settings = config.load()
    lock: int | None = None
    if us is None:
        from corral.cli.serve import own

        lock = own(settings.state_dir)
    try:
        asyncio.run(_serve(settings, us))
    except CorralError as error:
        if us is not None:
            us.refused(error)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    os._exit(0)  # a thread that still builds a template would hold the process, and with it the state directory


async def _serve(settings: config.Config, us: child.Child | None) -> None:
    from corral import bootstrap

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    ready = us.ready if us is not None else lambda: child.log("the node serves")
    await bootstrap.serve_node(settings, SOCKET, stop, ready, child.log)
