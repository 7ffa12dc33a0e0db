"""`corral cp SRC DST`: files and directories into or out of a sandbox, by tar; `-` is a tar stream.

As `cp -r`: an existing directory as DST receives SRC under its own name, else DST is the new name; links stay links. Archives that
come from a sandbox are unpacked member by member below DST without ever following a link (`corral.client.trees`).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Generator, Iterable, Iterator

import click

from corral.cli import terminal, words
from corral.cli.connection import opened, under
from corral.client import Transport, trees
from corral.client.transport import quote
from corral.errors import CorralError

BLOCK = 256 * 1024
_SOURCE = "name a file or directory that can be read, or - for a tar stream"
_SIDE = re.compile(r"(sbx_[0-9a-z]{26}):(.*)", re.DOTALL)
_LIKELY_SIDE = re.compile(r"(sbx_[^:/]*):(.*)", re.DOTALL)


@click.command()
@click.argument("src", metavar="SRC")
@click.argument("dst", metavar="DST")
@click.option("--user", metavar="NAME", help="User inside who reads or writes: sandbox (default) or root.")
@words.lease_option
@words.json_option
def command(src: str, dst: str, user: str | None, lease: str | None, as_json: bool) -> None:
    """Copy SRC to DST; exactly one of them is ID:PATH. Directories are copied whole, - is a tar stream."""
    if not src or not dst:
        raise click.UsageError("SRC and DST must not be empty.")
    source, target = _side(src), _side(dst)
    if (source is None) == (target is None):
        raise click.UsageError("Exactly one of SRC and DST must be ID:PATH.")
    if as_json and dst == "-":
        raise click.UsageError("--json and a tar stream on stdout exclude each other.")
    with opened() as plain:
        transport = under(plain, lease)
        if target is not None:
            remote = Remote(transport, *target, user)
            copied = remote.put_stream(_blocks_of_stdin()) if src == "-" else remote.put(src)
        elif source is not None:
            remote = Remote(transport, *source, user)
            copied = remote.get_stream() if dst == "-" else remote.get(dst)
    if as_json:
        terminal.put_json({"src": src, "dst": dst, **copied})


def _side(text: str) -> tuple[str, str] | None:
    match = _SIDE.fullmatch(text) or _LIKELY_SIDE.fullmatch(text)
    if match is None:
        return None
    if not match[2]:
        raise click.UsageError(f"{text!r} lacks a path; write {match[1]}:/workspace")
    return match[1], match[2]


class Remote:
    """One path inside a sandbox. A relative one is below /workspace."""

    def __init__(self, transport: Transport, sandbox_id: str, path: str, user: str | None) -> None:
        self.transport = transport
        self.into = path.endswith("/")
        self.path = os.path.normpath(os.path.join("/workspace", path))
        self.address = f"/v1/sandboxes/{quote(sandbox_id)}/files/archive"
        self.user = user

    def kind(self) -> str | None:
        """`dir`, `file` or None (nothing there), told by the first member of its archive."""
        try:
            with contextlib.closing(self._download()) as blocks, trees.opened(blocks) as archive:
                first = archive.next()
        except CorralError as error:
            if error.code == "not_found" and "sbx_" not in error.detail:
                return None
            raise
        return "dir" if first is not None and first.isdir() else "file"

    def put(self, src: str) -> words.Json:
        """A local file or directory to here."""
        name = os.path.basename(os.path.abspath(src))
        try:
            facts = os.lstat(src)
        except OSError as error:
            raise CorralError("usage", f"cannot read {src!r}: {error.strerror}", field="SRC", hint=_SOURCE) from error
        contents_only = src.endswith("/.")
        if self.path == "/workspace" or self.into or self.kind() == "dir":
            folder = self.path
        else:
            folder, name = os.path.split(self.path)
        if contents_only and stat.S_ISDIR(facts.st_mode):
            folder, name = (self.path, ".")
        done = trees.Unpacked()
        try:
            self.transport.upload(self.address, trees.pack(src, name, done), {"path": folder, "user": self.user})
        except OSError as error:
            told = f"cannot read {error.filename!r}: {error.strerror}"
            raise CorralError("usage", told, field="SRC", hint=_SOURCE) from error
        return done.as_dict()

    def put_stream(self, blocks: Iterable[bytes]) -> words.Json:
        """A tar stream, unpacked here."""
        self.transport.upload(self.address, blocks, {"path": self.path, "user": self.user})
        return {}

    def get(self, dst: str) -> words.Json:
        """From here to a local path."""
        try:
            with contextlib.closing(self._download()) as blocks:
                return trees.unpack_stream(blocks, dst, os.path.basename(self.path)).as_dict()
        except OSError as error:
            where = error.filename if isinstance(error.filename, str) else dst
            raise CorralError(
                "usage",
                f"cannot write {where!r}: {error.strerror or error}",
                field="DST",
                hint="name a place that you may write to",
            ) from error

    def get_stream(self) -> words.Json:
        """From here as a tar stream to stdout."""
        for block in self._download():
            terminal.write(1, block)
        return {}

    def _download(self) -> Generator[bytes, None, None]:
        yield from self.transport.download(self.address, {"path": self.path, "user": self.user})


def _blocks_of_stdin() -> Iterator[bytes]:
    while block := os.read(0, BLOCK):
        yield block
