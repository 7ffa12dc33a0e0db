"""Archives of strangers as a stream of entries: decompression and the tar format, with a cap on everything that is read.

Nothing here writes. `tarfile` is not used because it reads a header's extension of any length into memory and follows sparse maps
without end. Understood: ustar, pax (path, linkpath, size, mtime) and GNU long names; gzip of several members, bzip2, xz, zstd by
the program of that name. A sparse file and an unknown type are refused, an end without its marks is a truncation.
"""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import lzma
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from corral.node.templates_sealing import PROGRAM_PATH

BLOCK = 512
CHUNK = 256 * 1024
MAX_HEADER = 1024 * 1024
"""Bytes of one extension of a header."""
XZ_MEMORY = 256 * 1024 * 1024

Kind = Literal["file", "directory", "symlink", "hardlink", "device"]
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"3": "device",
    b"4": "device",
    b"6": "device",
    b"5": "directory",
}


class Refused(Exception):
    """The archive is not what it should be; the text says what and, where one is to blame, which entry."""


class CutOff(Refused):
    """It ends before it should."""


@dataclass(frozen=True)
class Entry:
    """One entry as the archive has it: neither name nor link has been judged."""

    name: bytes
    kind: Kind
    size: int
    mode: int
    mtime: float
    link: bytes = b""


class Source(Protocol):
    """What bytes are read from."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; empty at the end."""
        ...


class Tar:
    """Entries of an uncompressed tar; `content` reads the file of the entry that `__iter__` gave last."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._buffer = b""
        self._left = 0
        """Of the current entry's content."""
        self._padding = 0

    def __iter__(self) -> Iterator[Entry]:
        pax: dict[str, bytes] = {}
        long_name = long_link = None
        while True:
            self._skip_content()
            header = self._exactly(BLOCK, "the archive ends without its end mark: it was cut off")
            if header == bytes(BLOCK):
                return
            _check_sum(header)
            flag = header[156:157]
            size = _number(header[124:136])
            if flag in (b"x", b"g", b"L", b"K"):
                extension = self._extension(size)
                if flag == b"L":
                    long_name = extension.rstrip(b"\0")
                elif flag == b"K":
                    long_link = extension.rstrip(b"\0")
                elif flag == b"x":
                    pax = _records(extension)
                elif {"path", "linkpath", "size"} & _records(extension).keys():
                    raise Refused("a global header names a path, which would hold for every entry")
                continue
            yield self._entry(header, flag, size, pax, long_name, long_link)
            pax, long_name, long_link = {}, None, None

    def _entry(
        self,
        header: bytes,
        flag: bytes,
        size: int,
        pax: dict[str, bytes],
        long_name: bytes | None,
        long_link: bytes | None,
    ) -> Entry:
        name = header[:100].split(b"\0", 1)[0]
        if header[257:263] == b"ustar\0" and (prefix := header[345:500].split(b"\0", 1)[0]):
            name = prefix + b"/" + name
        name = pax.get("path", long_name if long_name is not None else name)
        told = name.decode("utf-8", "backslashreplace")
        link = header[157:257].split(b"\0", 1)[0]
        link = pax.get("linkpath", long_link if long_link is not None else link)
        if flag == b"S" or any(key.startswith("GNU.sparse") for key in pax):
            raise Refused(f"{told}: sparse files are not taken; make the archive without --sparse")
        kind = _KINDS.get(flag)
        if kind is None:
            raise Refused(f"{told}: unknown type {flag!r}")
        if kind == "file" and name.endswith(b"/") and header[257:262] != b"ustar":
            kind = "directory"  # before types existed
        try:
            size = int(pax.get("size", size))
            mtime = float(pax["mtime"]) if "mtime" in pax else float(_number(header[136:148]))
        except ValueError:
            raise Refused(f"{told}: damaged header") from None
        if size < 0:
            raise Refused(f"{told}: negative size")
        size = size if kind == "file" else 0  # of other kinds the number is about something else, no content follows
        self._left, self._padding = size, -size % BLOCK
        return Entry(name, kind, size, _number(header[100:108]) & 0o7777, mtime, link)

    def content(self) -> Iterator[bytes]:
        """The current file's bytes, in pieces."""
        while self._left:
            piece = self._some(min(self._left, CHUNK))
            self._left -= len(piece)
            yield piece

    def _skip_content(self) -> None:
        for _ in self.content():
            pass
        self._exactly(self._padding)
        self._padding = 0

    def _extension(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER:
            raise Refused(f"a header has an extension of {size} bytes")
        extension = self._exactly(size)
        self._exactly(-size % BLOCK)
        return extension

    def _some(self, size: int) -> bytes:
        if not self._buffer:
            self._buffer = self._source.read(CHUNK)
            if not self._buffer:
                raise CutOff("the archive is cut off in the middle of an entry")
        piece, self._buffer = self._buffer[:size], self._buffer[size:]
        return piece

    def _exactly(self, size: int, otherwise: str | None = None) -> bytes:
        got = b""
        while len(got) < size:
            try:
                got += self._some(size - len(got))
            except CutOff:
                if otherwise and not got:
                    raise Refused(otherwise) from None
                raise
        return got


def _check_sum(header: bytes) -> None:
    blank = header[:148] + b" " * 8 + header[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in blank)
    if _number(header[148:156]) not in (sum(blank), signed):
        raise Refused("this is no tar archive, or it is damaged: a header's sum is wrong")


def _number(field: bytes) -> int:
    """Octal text, or base 256 where the first bit is set."""
    if field[0] in (0o200, 0o377):
        value = int.from_bytes(field[1:], "big")
        return value - (1 << 8 * (len(field) - 1)) if field[0] == 0o377 else value
    text = field.split(b"\0", 1)[0].strip()
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise Refused("this is no tar archive, or it is damaged: a header has no number") from None


def _records(extension: bytes) -> dict[str, bytes]:
    """Of a pax header: `LENGTH KEY=VALUE\\n`, one after the other."""
    found: dict[str, bytes] = {}
    at = 0
    while at < len(extension):
        digits, blank, _ = extension[at : at + 12].partition(b" ")
        if not blank or not digits.isdigit():
            raise Refused("a pax header is damaged")
        end = at + int(digits)
        record = extension[at + len(digits) + 1 : end]
        key, equals, value = record.partition(b"=")
        if end > len(extension) or not equals or not value.endswith(b"\n"):
            raise Refused("a pax header is damaged")
        found[key.decode("utf-8", "replace")] = value[:-1]
        at = end
    return found


# -- decompression -------------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def decompressed(raw: Source) -> Iterator[Source]:
    """What `raw` holds, by its first bytes; `OSError` where the program for it is not on this host."""
    head = raw.read(6)
    again = _Again(head, raw)
    if head[:2] == b"\x1f\x8b":
        yield _Members(again, lambda: zlib.decompressobj(wbits=31))
    elif head[:3] == b"BZh":
        yield _Members(again, bz2.BZ2Decompressor)
    elif head == b"\xfd7zXZ\0":
        yield _Members(again, lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY))
    elif head[:4] == b"\x28\xb5\x2f\xfd":
        with _zstd(again) as source:
            yield source
    else:
        yield again


class _Again:
    def __init__(self, head: bytes, rest: Source) -> None:
        self._head = head
        self._rest = rest

    def read(self, size: int, /) -> bytes:
        if self._head:
            piece, self._head = self._head[:size], self._head[size:]
            return piece
        return self._rest.read(size)


class _Members:
    """One compressed stream after the other (gzip of several members is common); never more than asked for is unpacked at once."""

    def __init__(self, raw: Source, make: Callable[[], Any]) -> None:
        self._raw = raw
        self._make = make
        self._current = make()
        self._waiting = b""

    def read(self, size: int, /) -> bytes:
        while True:
            if self._current.eof:
                self._waiting = self._current.unused_data or self._raw.read(CHUNK)
                if not self._waiting.strip(b"\0"):
                    return b""  # nothing, or padding after the last member
                self._current = self._make()
            ended = False
            if not self._waiting and getattr(self._current, "needs_input", True):
                self._waiting = self._raw.read(CHUNK)
                ended = not self._waiting  # zlib may still hold some output
            try:
                piece: bytes = self._current.decompress(self._waiting, size)
            except (zlib.error, OSError, ValueError, lzma.LZMAError, EOFError) as error:
                raise Refused(f"the compressed data is damaged: {error}") from None
            self._waiting = getattr(self._current, "unconsumed_tail", b"")
            if piece:
                return piece
            if ended and not self._current.eof:
                raise Refused("the compressed data is cut off")


class Counted:
    """Passes bytes on, digests them, and refuses more than `most`."""

    def __init__(self, source: Source, most: int, algorithm: str = "sha256") -> None:
        self._source = source
        self._most = most
        self._digest = hashlib.new(algorithm)
        self.count = 0

    def read(self, size: int, /) -> bytes:
        piece = self._source.read(size)
        self.count += len(piece)
        if self.count > self._most:
            raise Refused(f"it unpacks to more than {self._most} bytes")
        self._digest.update(piece)
        return piece

    def finish(self) -> str:
        """Read what is left; -> hexadecimal digest of everything."""
        while self.read(CHUNK):
            pass
        return self._digest.hexdigest()


@contextlib.contextmanager
def _zstd(raw: Source) -> Iterator[Source]:
    program = shutil.which("zstd", path=PROGRAM_PATH)
    if program is None:
        raise OSError("an archive compressed by zstd needs the program zstd on the host")
    failed: list[Exception] = []
    # Its default cap on memory for a window is 128 MiB.
    with subprocess.Popen(
        [program, "-dcq"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}
    ) as process:

        def feed() -> None:
            with process.stdin or contextlib.nullcontext() as given:
                try:
                    while given and (piece := raw.read(CHUNK)):
                        given.write(piece)
                except BrokenPipeError:
                    pass  # it ended before its input: `_Checked` says so
                except (OSError, Refused) as error:
                    failed.append(error)

        feeding = threading.Thread(target=feed, daemon=True)
        feeding.start()
        try:
            yield _Checked(process, failed)
        finally:
            process.kill()
            feeding.join()


class _Checked:
    """Output of a process whose end has to be a good one."""

    def __init__(self, process: subprocess.Popen[bytes], failed: list[Exception]) -> None:
        self._process = process
        self._failed = failed

    def read(self, size: int, /) -> bytes:
        piece: bytes = self._process.stdout.read(size) if self._process.stdout else b""
        if not piece:
            if self._process.wait() != 0:
                raise Refused("the compressed data is damaged")
            if self._failed:
                raise self._failed[0]
        return piece
