"""`corral mcp`: the sandbox as a set of tools for a model, over the Model Context Protocol."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from corral.cli import leaving, terminal, words
from corral.errors import CorralError

if TYPE_CHECKING:
    from corral.mcp.server import CorralMCP
    from corral.mcp.sessions import Wishes

DEFAULT_PORT = 8485
TTL_S = 8 * 3600
KEY_VARIABLE = "CORRAL_MCP_KEY"
KEY_FILE = "mcp.key"


@dataclass(frozen=True)
class Listening:
    """What `--http` goes with."""

    host: str
    port: int
    tls_cert: str | None
    tls_key: str | None
    allow_host: tuple[str, ...]
    allow_origin: tuple[str, ...]
    unsafe_plaintext: bool
    unsafe_no_key: bool


@click.command(short_help="Serve the sandbox to a model over MCP.")
@words.sandbox_options
@click.option("--timeout", "timeout", metavar="SECONDS", help="How long a program may run that says nothing.")
@click.option("--idle", default=1800.0, show_default=True, help="Seconds after which a silent HTTP session is ended.")
@click.option("--max-sessions", default=64, show_default=True, help="The most sessions, and so sandboxes, over HTTP.")
@click.option("--http", is_flag=True, help="Serve streamable HTTP at /mcp instead of the standard streams.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address or name to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0 picks one.")
@click.option("--tls-cert", metavar="FILE", help="Certificate with its chain, PEM.")
@click.option("--tls-key", metavar="FILE", help="Key of the certificate, PEM.")
@click.option("--allow-host", multiple=True, metavar="NAME[:PORT]", help="Host header to take besides the own address.")
@click.option(
    "--allow-origin", multiple=True, metavar="ORIGIN", help="Web page that may call, such as https://a.example."
)
@click.option("--unsafe-plaintext", is_flag=True, help="Serve beyond this host without TLS: the key can be read.")
@click.option("--unsafe-no-key", is_flag=True, help="Let every process of this host in; loopback only.")
def command(
    timeout: str | None,
    idle: float,
    max_sessions: int,
    http: bool,
    host: str,
    port: int,
    tls_cert: str | None,
    tls_key: str | None,
    allow_host: tuple[str, ...],
    allow_origin: tuple[str, ...],
    unsafe_plaintext: bool,
    unsafe_no_key: bool,
    **given: Any,
) -> None:
    """Serve the sandbox as MCP tools: on the standard streams to the client that started it, or with --http to those with the key.

    Each session has a sandbox of its own, made at first use and ended with the session. The options shape the sandboxes.
    """
    request = words.common({**given, "timeout": timeout})
    request.setdefault("ttl", TTL_S)
    _check(request, idle, max_sessions)
    listening = Listening(host, port, tls_cert, tls_key, allow_host, allow_origin, unsafe_plaintext, unsafe_no_key)
    from corral.client import connect
    from corral.mcp.server import make_server
    from corral.mcp.sessions import Wishes

    wishes = Wishes(request, idle, max_sessions)
    server = make_server(connect, wishes)

    async def serve(stop: asyncio.Event) -> None:
        await (_http(server, stop, wishes, listening) if http else _stdio(server, stop))

    asyncio.run(_until_signal(serve))


def _check(request: words.Json, idle: float, max_sessions: int) -> None:
    """What can be judged without the service is refused now, to the one who can change it, and not to a model later."""
    from corral.domain.request import HostCaps, parse_sandbox

    parse_sandbox(request, HostCaps(memory_bytes=2**62, cpus=1e6))
    for name, value, least in (("--idle", idle, 1), ("--max-sessions", max_sessions, 1)):
        if not least <= value < 1e7:
            raise CorralError("invalid_value", f"{name} {value} is not a number from {least} on", field=name)


async def _until_signal(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Serve, with an event that the first signal sets; the second one ends the process."""
    stop = asyncio.Event()

    def arrived(number: int) -> None:
        if stop.is_set():
            leaving.leave(number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in leaving.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, arrived, number)
    await serve(stop)


async def _stdio(server: CorralMCP, stop: asyncio.Event) -> None:
    import anyio

    from corral.mcp import stdio

    async def watch(scope: anyio.CancelScope) -> None:
        await stop.wait()
        scope.cancel()  # ends the session in order: what must be done then is shielded

    with anyio.CancelScope() as scope:
        watching = asyncio.create_task(watch(scope))
        try:
            await stdio.serve(server)
        finally:
            watching.cancel()


async def _http(server: CorralMCP, stop: asyncio.Event, wishes: Wishes, listening: Listening) -> None:
    from corral.api.tls import Tls
    from corral.cli import serve
    from corral.mcp.http import PATH, application

    cert, key = listening.tls_cert, listening.tls_key
    if (cert is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    tls = Tls(cert, key).context() if cert is not None and key is not None else None
    listener = serve.bind(listening.host, listening.port)
    try:
        serve.check_reach(listener, tls is not None, listening.unsafe_plaintext)
        accepts, told = _key(listening, listener.getsockname()[0])
        hosts = [*_own_names(listener), *listening.allow_host]
        async with application(server, wishes, accepts=accepts, hosts=hosts, origins=listening.allow_origin) as app:
            web = _web(app, tls)

            async def watch() -> None:
                await stop.wait()
                web.should_exit = True

            watching = asyncio.create_task(watch())
            terminal.put(f"corral: listening on {serve.url_of(listener, tls is not None)}{PATH}\n{told}")
            try:
                await web.serve(sockets=[listener])
            finally:
                watching.cancel()
    finally:
        listener.close()


def _web(app: Any, tls: Any) -> Any:
    """A server that leaves the signals to us: uvicorn would raise them once more at its end."""
    import uvicorn

    from corral.api.server import make_server

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(make_server(app, tls).config)


def _key(listening: Listening, address: str) -> tuple[Callable[[str], bool] | None, str]:
    """(who judges the Authorization header, what is said about the key)."""
    from corral import config
    from corral.api.keys import open_key

    if listening.unsafe_no_key:
        if not _is_loopback(address):
            raise CorralError("usage", "--unsafe-no-key is for loopback alone", field="--unsafe-no-key")
        terminal.say("corral: warning: --unsafe-no-key: every process of this host can use the sandboxes")
        return None, ""
    settings = config.load()
    config.prepare_state(settings.state_dir)
    opened = open_key(
        os.path.join(settings.state_dir, KEY_FILE), os.environ.get(KEY_VARIABLE), os.urandom, KEY_VARIABLE
    )
    return opened.key.accepts, f"corral: key {opened.fresh}\n" if opened.fresh is not None else ""


def _own_names(listener: Any) -> list[str]:
    """Host headers that name this listener."""
    address, port = listener.getsockname()[:2]
    own = f"[{address}]" if ":" in address else address
    names = [own, "localhost", "127.0.0.1", "[::1]"] if _is_loopback(address) else [own]
    return [f"{name}:{port}" for name in names]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
