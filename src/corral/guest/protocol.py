"""Frames of the guest protocol (PROTOCOL.md), shared by the guest and the host's channel. Low-level modules only.

A frame is `length u32, type u8, payload`. HELLO, REQUEST, REPLY, EVENT carry JSON; DATA and ACK are binary; INPUT is a request
with bytes behind its JSON. On transports without connections a SYNC (`MAGIC` + 16 random bytes, outside any frame) restarts both sides.
"""

from __future__ import annotations

import _json
import _struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
OLDEST = 1
GUEST_VERSION = "0.1.0"

HELLO, REQUEST, REPLY, EVENT, DATA, ACK, INPUT, SYNC = 1, 2, 3, 4, 5, 6, 7, 8

MAGIC = b"\xffCORRAL\x00SYNC\xfe\xfd\xfc\xfb"
NONCE = 16

MAX_DATA = 64 * 1024
"""Payload bytes of one DATA or INPUT frame."""

WINDOW = 1024 * 1024
"""Bytes of one stream that the guest keeps unacknowledged before it stops reading the program's pipe."""

INPUT_WINDOW = 256 * 1024
"""Bytes of standard input that may be on their way to a program."""

_header = _struct.Struct(">IB")
_data = _struct.Struct(">IQI")
_ack = _struct.Struct(">IQ")
_length = _struct.Struct(">I")
HEADER_SIZE = _header.size
DATA_SIZE = _data.size


class ProtocolError(Exception):
    """The other side broke the protocol; the connection is of no more use."""


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class _Context:
    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = staticmethod(_constant)
    memo: dict[str, str] = {}  # noqa: RUF012  # read by the C scanner


def _default(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is not JSON")


_scan: Any = _json.make_scanner(_Context())  # type: ignore[arg-type]
_encode: Any = _json.make_encoder(None, _default, _json.encode_basestring_ascii, None, ":", ",", False, False, False)  # type: ignore[arg-type,call-arg,unused-ignore]


def dumps(value: Any) -> bytes:
    """Compact ASCII JSON; lone surrogates survive as escapes."""
    return "".join(_encode(value, 0)).encode("ascii")


def loads(payload: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON object in `payload`; ProtocolError on anything else, however deep or odd."""
    try:
        text = str(payload, "ascii")
        value, end = _scan(text, 0)
    except (ValueError, StopIteration, RecursionError, MemoryError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None
    if end != len(text) or type(value) is not dict:
        raise ProtocolError("not one JSON object")
    return value


def frame(kind: int, payload: bytes) -> bytes:
    return _header.pack(len(payload), kind) + payload


def control(kind: int, value: dict[str, Any]) -> bytes:
    return frame(kind, dumps(value))


def data_frame(stream: int, offset: int, t_ms: int, payload: bytes | bytearray | memoryview) -> bytes:
    head = _header.pack(_data.size + len(payload), DATA) + _data.pack(stream, offset, t_ms & 0xFFFFFFFF)
    return b"".join((head, payload))


def split_data(payload: bytes) -> tuple[int, int, int, bytes]:
    """-> (stream id, offset, t_ms, bytes)."""
    if len(payload) <= _data.size:
        raise ProtocolError("a data frame without data")
    stream, offset, t_ms = _data.unpack_from(payload)
    return stream, offset, t_ms, payload[_data.size :]


def ack_frame(stream: int, offset: int) -> bytes:
    return frame(ACK, _ack.pack(stream, offset))


def split_ack(payload: bytes) -> tuple[int, int]:
    if len(payload) != _ack.size:
        raise ProtocolError("a malformed ack")
    stream, offset = _ack.unpack(payload)
    return stream, offset


def input_frame(value: dict[str, Any], payload: bytes | memoryview) -> bytes:
    head = dumps(value)
    return frame(INPUT, b"".join((_length.pack(len(head)), head, payload)))


def split_input(payload: bytes) -> tuple[dict[str, Any], bytes]:
    if len(payload) < 4:
        raise ProtocolError("a malformed input frame")
    (length,) = _length.unpack_from(payload)
    if length > len(payload) - 4:
        raise ProtocolError("a malformed input frame")
    return loads(payload[4 : 4 + length]), payload[4 + length :]


class Decoder:
    """Bytes in, frames out. Never holds more than one incomplete frame of at most its type's limit."""

    def __init__(self, limits: dict[int, int], *, resync: bool = False) -> None:
        self._limits = limits
        self._resync = resync
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Complete frames; ProtocolError on an unknown type or a length above the type's limit, before its payload is awaited."""
        buffer = self._buffer
        buffer += data
        out: list[tuple[int, bytes]] = []
        if self._resync:
            at = buffer.rfind(MAGIC)
            if at >= 0:
                end = at + len(MAGIC) + NONCE
                if len(buffer) < end:
                    return out
                out.append((SYNC, bytes(buffer[at + len(MAGIC) : end])))
                del buffer[:end]
        position = 0
        size = len(buffer)
        while size - position >= HEADER_SIZE:
            length, kind = _header.unpack_from(buffer, position)
            limit = self._limits.get(kind)
            if limit is None:
                raise ProtocolError(f"frame type {kind}")
            if length > limit:
                raise ProtocolError(f"a frame of {length} bytes")
            end = position + HEADER_SIZE + length
            if end > size:
                break
            out.append((kind, bytes(buffer[position + HEADER_SIZE : end])))
            position = end
        if position:
            del buffer[:position]
        return out
