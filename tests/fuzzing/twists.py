"""What can be wrong with one frame: values of other types, impossible numbers, broken JSON, wrong lengths. Pure functions of a tape."""

from __future__ import annotations

import json
import struct
from typing import Any

from corral.guest import protocol

from .tape import Tape

HEADER = struct.Struct(">IB")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 64, 255, 256, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308,
    "", "x", "x" * 300, "x" * 9000, "\ud800", "\udc80\udcff", "\0", "a\nb", "../../etc/passwd", "/etc/passwd", "..", "é漢字", "ok", "ended",
    "failed", "lost", "unknown", "running", "kill", "timeout", "not_found", "lease_lost", "cursor_gone", "store_error", "stdout", "\x1b[2J",
    [], {}, [[]], [None], {"": None}, [1] * 500, {str(n): n for n in range(100)}, {"a": {"a": {"a": {}}}}, [1, 1], [2**62, 2**62], ["x"],
)  # fmt: skip
RAW = (
    "[" * 3000 + "]" * 3000, "[" * 30000, '{"a":' * 5000, "NaN", "Infinity", "-Infinity", "1" * 4000, "1" * 20000, "1e999", "-", "01", '"', "'x'",
    '"\\ud800"', '"\\u12"', "tru", '{"a":1,"a":2}', "[1,]", "\x00", "\xff", "/**/1", '"' + "\\u0000" * 5000 + '"',
)  # fmt: skip
_MARK = "@@%d@@"


def dumps(value: Any) -> bytes:
    """JSON as a guest may write it: with `_Raw` parts as they are."""
    raws: list[str] = []

    def mark(part: Any) -> str:
        raws.append(part.text)
        return _MARK % (len(raws) - 1)

    text = json.dumps(value, separators=(",", ":"), default=mark)
    for number, raw in enumerate(raws):
        text = text.replace('"' + _MARK % number + '"', raw)
    return text.encode("latin-1")


class _Raw:
    def __init__(self, text: str) -> None:
        self.text = text


def twisted(value: Any, tape: Tape) -> Any:
    """The same value with one part replaced, removed, added or moved by a little."""
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            items: Any = part.items()
        elif isinstance(part, list):
            items = enumerate(part)
        else:
            return
        for key, inner in items:
            places.append((part, key))
            if len(places) < 200:
                walk(inner)

    whole = json.loads(json.dumps(value))
    walk(whole)
    if not places:
        return tape.choose(VALUES)
    holder, key = tape.choose(places)
    kind = tape.below(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[tape.choose(("x", "", "id", "ok", "error", "event", "\ud800", "k" * 3000))] = tape.choose(VALUES)
    elif kind == 2:
        holder[key] = _Raw(tape.choose(RAW))
    elif kind == 3 and type(holder[key]) is int:
        holder[key] += tape.choose((1, -1, 2, 100, 65536, -65536, 2**32))
    elif kind == 4:
        other_holder, other_key = tape.choose(places)
        other = other_holder.get(other_key) if isinstance(other_holder, dict) else None
        holder[key] = None if isinstance(other, (dict, list)) else other
    else:
        holder[key] = tape.choose(VALUES)
    return whole


def garbled(text: bytes, tape: Tape) -> bytes:
    """JSON that is none, or two, or says a thing twice."""
    kind = tape.below(9)
    if kind == 0:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        keys = list(value) if isinstance(value, dict) else []
        key = json.dumps(tape.choose(keys)) if keys else '"id"'
        again = dumps(tape.choose(VALUES))
        return text[:-1] + b"," + key.encode() + b":" + again + b"}"
    if kind == 1:
        return text + tape.choose((b" ", b"\n", b"{}", b"\0", b"x"))
    if kind == 2:
        return tape.choose((b" ", b"\xef\xbb\xbf", b"[")) + text
    if kind == 3:
        return text[: tape.upto(len(text))]
    if kind == 4:
        return tape.choose(RAW).encode("latin-1")
    if kind == 5:
        return dumps(tape.choose(VALUES))
    if kind == 6:
        at = tape.upto(len(text))
        return text[:at] + bytes([tape.byte()]) + text[at + 1 :]
    if kind == 7:
        return text.decode("latin-1").encode("utf-16")
    return b""


def misframed(kind: int, payload: bytes, tape: Tape) -> bytes:
    """A frame whose head lies, or whose bytes are not those that were meant."""
    whole = bytearray(HEADER.pack(len(payload), kind) + payload)
    act = tape.below(8)
    if act == 0:
        whole[4] = tape.byte()
    elif act == 1:
        length = tape.choose((0, 1, len(payload) - 1, len(payload) + 1, 65536, 65537, 65553, 2**31, 2**32 - 1))
        whole[:4] = struct.pack(">I", max(0, length))
    elif act == 2:
        del whole[tape.upto(len(whole)) :]
    elif act == 3:
        for _ in range(1 + tape.below(4)):
            whole[tape.upto(len(whole) - 1)] ^= 1 << tape.below(8)
    elif act == 4:
        at = tape.upto(len(whole))
        whole[at:at] = tape.bytes(1 + tape.below(8))
    elif act == 5:
        at = tape.upto(len(whole))
        del whole[at : at + 1 + tape.below(16)]
    elif act == 6:
        whole[:0] = tape.choose((b"\0", protocol.MAGIC + bytes(16), b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 9))
    else:
        whole += whole[: tape.upto(len(whole))]
    return bytes(whole)


def unasked(instance_id: str, exec_ids: list[str], tape: Tape) -> bytes:
    """A frame that nothing led to."""
    number = tape.choose((0, 1, 2, 3, 4, 5, 2**31, -1, 2**80))
    exec_id = tape.choose([*exec_ids, "exe_unknown", ""])
    kind = tape.below(9)
    if kind == 0:
        return protocol.data_frame(
            tape.below(9), tape.choose((0, 1, 2**63, 2**64 - 1)), tape.choose((0, 2**32 - 1)), b"unasked"
        )
    if kind == 1:
        return protocol.control(protocol.REPLY, {"id": number, "ok": {}})
    if kind == 2:
        status = {
            "exec_id": exec_id,
            "state": "ended",
            "started": True,
            "exit_code": 0,
            "signal": None,
            "failure": None,
            "started_ms": 1,
        }
        more = {
            "ended_ms": 2,
            "utime_ms": 0,
            "stime_ms": 0,
            "maxrss_kib": 0,
            "ended_by": None,
            "killed": 0,
            "killed_all": True,
            "background": 0,
        }
        last = {"offsets": {"stdout": 0, "stderr": 0}, "stdin": None, "already": False}
        return protocol.control(
            protocol.EVENT, {"event": "ended", "attach": number, "status": {**status, **more, **last}}
        )
    if kind == 3:
        return protocol.control(
            protocol.EVENT,
            {"event": "stdin", "exec_id": exec_id, "written": tape.upto(300000), "open": tape.below(2) == 1},
        )
    if kind == 4:
        return protocol.control(
            protocol.HELLO, {"versions": [1, 1], "version": 1, "instance": instance_id, "guest": "", "capabilities": {}}
        )
    if kind == 5:
        return protocol.frame(tape.byte(), tape.bytes(tape.below(20)))
    if kind == 6:
        return protocol.control(protocol.EVENT, {"event": tape.choose(("", "invented", "started")), "exec_id": exec_id})
    if kind == 7:
        return protocol.control(
            protocol.REPLY, {"id": number, "error": {"code": "not_found", "detail": "", "field": None}}
        )
    return tape.bytes(tape.below(40))
