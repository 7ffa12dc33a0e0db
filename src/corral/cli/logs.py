"""`corral logs`: the output of a run or exec, raw."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import click

from corral.cli import terminal, words
from corral.cli.connection import opened
from corral.cli.following import Following, Interrupts
from corral.client import Transport
from corral.client.transport import quote
from corral.errors import CorralError

STREAMS = ("stdout", "stderr")


@click.command()
@click.argument("ident", type=words.IDENT, metavar="ID")
@click.option("--stream", type=click.Choice(STREAMS), help="Only this stream, to our stdout.")
@click.option("--follow", "-f", is_flag=True, help="Go on until it ends.")
@words.json_option
@click.pass_obj
def command(interrupts: Interrupts, ident: str, stream: str | None, follow: bool, as_json: bool) -> None:
    """Print what the run or exec ID wrote: stdout to stdout, stderr to stderr, as the bytes that they were."""
    kind = "execs" if ident.startswith("exe_") else "runs"
    path = f"/v1/{kind}/{quote(ident)}"
    with opened() as transport:
        if as_json:
            wanted = STREAMS if stream is None else (stream,)
            terminal.put_json({"id": ident} | {name: _whole(transport, path, name, follow) for name in wanted})
        elif follow and stream is None:
            Following(transport, interrupts, kind, ident).pass_through()
        elif follow:
            for block in _follow(transport, path, str(stream)):
                terminal.write(1, block)
        else:
            for name in STREAMS if stream is None else (stream,):
                descriptor = 2 if stream is None and name == "stderr" else 1
                for block in transport.download(f"{path}/logs", {"stream": name, "follow": follow}):
                    terminal.write(descriptor, block)


def _follow(transport: Transport, path: str, stream: str) -> Iterator[bytes]:
    """By events, as a stream goes on where another owner or replica takes over; a download does not."""
    for event in transport.stream(f"{path}/stream"):
        if event.kind == stream:
            yield event.data
        elif event.kind == "gap" and event.doc is not None and event.doc.get("stream") == stream:
            detail = f"{event.doc.get('bytes')} bytes of {stream} were not kept long enough to be passed on"
            raise CorralError("cursor_gone", detail, hint="read what is kept with corral logs, without --follow")


def _whole(transport: Transport, path: str, stream: str, follow: bool) -> words.Json:
    blocks = _follow(transport, path, stream) if follow else transport.download(f"{path}/logs", {"stream": stream})
    data = b"".join(blocks)
    text = data.decode("utf-8", "replace")
    exact = text.encode() == data
    return {"bytes": len(data), "text": text, "base64": None if exact else base64.b64encode(data).decode("ascii")}
