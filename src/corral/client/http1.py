"""HTTP/1.1 as bytes: what a client sends, and a reader of what comes back. No input or output happens here.

Of HTTP only what our servers and the proxies before them use: one request at a time, `Content-Length`, chunked bodies, bodies that
end with the connection. Whatever is not that raises `Malformed`; sizes are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

MAX_HEAD = 64 * 1024
MAX_LINE = 8 * 1024
NO_BODY = (204, 304)


class Malformed(ConnectionError):
    """What came is not HTTP/1.1."""


def head(method: str, target: str, host: str, headers: Mapping[str, str]) -> bytes:
    """The request's head. A line break in a part is a `ValueError`, never another header."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers.items())]
    for line in lines:
        if not line.isprintable() or not line.isascii():
            raise ValueError(f"not fit for a header: {line[:100]!r}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def chunk(block: bytes) -> bytes:
    """One block of a chunked body; an empty one would end it."""
    return b"%x\r\n%b\r\n" % (len(block), block)


LAST_CHUNK = b"0\r\n\r\n"


class Response:
    """Reads one response: `feed` what was received, then `take`. `feed(b"")` says that the connection has ended."""

    def __init__(self, method: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """Names in lower case; repeated ones joined with a comma."""
        self.started = False
        """The head is complete."""
        self._keeps = False
        self._bodyless = method == "HEAD"
        self._buffer = bytearray()
        self._closed = False
        self._next = "head"
        self._left = 0

    @property
    def ended(self) -> bool:
        """The whole body has been taken."""
        return self._next == "nothing"

    @property
    def reusable(self) -> bool:
        """The connection may carry another request."""
        return self.ended and self._keeps and not self._buffer and not self._closed

    def feed(self, data: bytes) -> None:
        """More bytes of the connection."""
        self._closed = self._closed or not data
        self._buffer += data
        while self._next == "head":
            end = self._buffer.find(b"\r\n\r\n")
            if end > MAX_HEAD or (end < 0 and len(self._buffer) > MAX_HEAD):
                raise Malformed("the head of the answer is too long")
            if end < 0:
                if self._closed:
                    raise Malformed("the connection ended before an answer")
                return
            raw = bytes(self._buffer[:end])
            del self._buffer[: end + 4]
            self._head(raw)

    def take(self) -> Iterator[bytes]:
        """What has come of the body. Raises `Malformed` when the connection ended in the middle of it."""
        while self.started and self._next != "nothing":
            if self._next in ("length", "chunk", "rest"):
                if not self._buffer:
                    break
                yield self._some()
            elif (line := self._line()) is None:
                break
            else:
                self._after(line)
        if self._closed and self.started and self._next != "nothing":
            if self._next != "rest":
                raise Malformed("the connection ended in the middle of the answer")
            self._next = "nothing"

    def _head(self, raw: bytes) -> None:
        lines = raw.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        code = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit() and len(code) == 3):
            raise Malformed(f"not an answer in HTTP/1.1: {lines[0][:60]!r}")
        if code[0] == "1":
            return
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise Malformed(f"not a header: {line[:60]!r}")
            name, value = name.lower(), value.strip()
            self.headers[name] = f"{self.headers[name]}, {value}" if name in self.headers else value
        self.status = int(code)
        self.started = True
        tokens = {word.strip().lower() for word in self.headers.get("connection", "").split(",")}
        self._keeps = version == "HTTP/1.1" and "close" not in tokens
        self._next = self._framing()

    def _framing(self) -> str:
        coding = self.headers.get("transfer-encoding")
        length = self.headers.get("content-length")
        if self._bodyless or self.status in NO_BODY:
            return "nothing"
        if coding is not None:
            if coding.lower() != "chunked":
                raise Malformed(f"a transfer coding that was not asked for: {coding[:60]!r}")
            return "size"
        if length is None:
            self._keeps = False
            return "rest"
        if not (length.isascii() and length.isdigit() and len(length) < 19):
            raise Malformed(f"not a length: {length[:60]!r}")
        self._left = int(length)
        return "length" if self._left else "nothing"

    def _some(self) -> bytes:
        if self._next == "rest" or len(self._buffer) <= self._left:
            block = bytes(self._buffer)
            self._buffer.clear()
        else:
            block = bytes(self._buffer[: self._left])
            del self._buffer[: self._left]
        if self._next != "rest":
            self._left -= len(block)
            if not self._left:
                self._next = "break" if self._next == "chunk" else "nothing"
        return block

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end > MAX_LINE or (end < 0 and len(self._buffer) > MAX_LINE):
            raise Malformed("a line of the chunked answer is too long")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _after(self, line: bytes) -> None:
        """One line between the data of a chunked body: after a chunk, before one, or of the trailer."""
        if self._next == "break":
            if line:
                raise Malformed("a chunk is longer than it said")
            self._next = "size"
        elif self._next == "size":
            size = line.partition(b";")[0].strip()
            if not size or len(size) > 15 or size.strip(b"0123456789abcdefABCDEF"):
                raise Malformed(f"not the size of a chunk: {line[:60]!r}")
            self._left = int(size, 16)
            self._next = "chunk" if self._left else "trailer"
        elif not line:
            self._next = "nothing"
