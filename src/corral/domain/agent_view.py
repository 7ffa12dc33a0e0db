"""The agent view: output as a model should read it. Progress collapsed, escapes removed, repeats folded, head and tail in a budget.

The raw bytes are kept elsewhere; this is a reading aid, so it may drop and never invents. It ends with the reason and the hint,
which are never cut away, and is never longer than its budget.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

DEFAULT_BUDGET = 8000
_MOST = 1 << 19
"""Bytes of a stream that are looked at; the middle of a larger one is left out."""
_LONGEST_BLOCK = 6

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|\x9b[0-?]*[ -/]*[@-~]?"
    r"|\x1b\][^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links
    r"|\x1b[PX^_][^\x1b\x9c\n]*(?:\x1b\\|\x9c)?"  # DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"
)
_BLANK_LINES = re.compile(r"\n{4,}")
_CONTROLS = re.compile(r"[\x00-\x07\x0b-\x1f\x7f-\x9f]")


def render(
    stdout: bytes,
    stderr: bytes,
    budget_chars: int = DEFAULT_BUDGET,
    *,
    reason: str = "ok",
    exit_code: int | None = None,
    hint: str | None = None,
    stdout_head: int | None = None,
    stderr_head: int | None = None,
    stdout_omitted: int = 0,
    stderr_omitted: int = 0,
) -> str:
    """The view of one result. `..._head` and `..._omitted`: where and how many bytes were dropped before (see a result's streams)."""
    ended = f"[{reason}" + (f", exit code {exit_code}]" if exit_code is not None else "]")
    # A hint may name what the caller gave, a program for one; it is read by the same model.
    footer = f"{ended} {_plain(hint.encode('utf-8', 'replace'))}" if hint else ended
    budget = max(0, budget_chars)
    if len(footer) >= budget:
        return footer[:budget] if budget < 2 else (footer if len(footer) == budget else footer[: budget - 1] + "…")
    out = clean(stdout, stdout_head, stdout_omitted)
    err = clean(stderr, stderr_head, stderr_omitted)
    title = "[stderr]\n" if err else ""
    room = budget - len(footer) - len(title) - 2  # two line ends that may have to be added
    failed = reason != "ok"
    share_out, share_err = _shares(len(out), len(err), max(0, room), failed)
    parts = [_within(out, share_out, failed)]
    if err and share_err:
        parts += [title, _within(err, share_err, failed)]
    text = ""
    for part in (*parts, footer):
        if not part:
            continue
        if text and not text.endswith("\n"):
            text += "\n"
        text += part
    return text[:budget]


def agent_view(result: Mapping[str, Any], budget_chars: int = DEFAULT_BUDGET) -> str:
    """The view of a result document."""
    streams: dict[str, Any] = {}
    for name in ("stdout", "stderr"):
        stream = result[name]
        streams[name] = _kept_bytes(stream)
        streams[f"{name}_head"] = stream.get("head_bytes")
        streams[f"{name}_omitted"] = stream["bytes"] - stream["kept_bytes"]
    return render(
        budget_chars=budget_chars,
        reason=result["reason"],
        exit_code=result["exit_code"],
        hint=result["hint"],
        **streams,
    )


def _kept_bytes(stream: Mapping[str, Any]) -> bytes:
    encoded = stream.get("base64")
    return base64.b64decode(encoded) if encoded is not None else (stream["text"] or "").encode("utf-8")


def clean(data: bytes, head: int | None = None, omitted: int = 0) -> str:
    """Readable text of output: no escapes, no overwritten progress, repeats folded; at most one mark where bytes are missing."""
    first, second = (data[:head], data[head:]) if omitted and head is not None else (data, b"")
    if len(first) + len(second) > _MOST:
        half = _MOST // 2
        whole = first + second
        dropped = len(whole) - 2 * half
        if not omitted or len(first) <= half or len(second) <= half:
            first, second = whole[:half], whole[-half:]
        else:
            first, second = first[:half], second[-half:]
        omitted += dropped
    parts = [fold(_plain(first))]
    if omitted:
        parts.append(f"[… {omitted} bytes omitted …]")
    if second:
        parts.append(fold(_plain(second)))
    return "\n".join(part.rstrip("\n") if index < len(parts) - 1 else part for index, part in enumerate(parts) if part)


def _plain(data: bytes) -> str:
    text = _ESCAPES.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
    lines = [_overwritten(line) if "\r" in line or "\b" in line else line for line in text.split("\n")]
    return _BLANK_LINES.sub("\n\n\n", _CONTROLS.sub("", "\n".join(lines)))


def _overwritten(line: str) -> str:
    """What a terminal shows at the end of a line that went back to its start or rubbed out characters."""
    kept = ""
    for piece in line.split("\r"):
        if piece.strip():
            kept = piece
    if "\b" not in kept:
        return kept
    shown: list[str] = []
    for character in kept:
        if character != "\b":
            shown.append(character)
        elif shown:
            shown.pop()
    return "".join(shown)


def fold(text: str) -> str:
    """Lines or blocks of up to six lines that repeat at once are shown once, with their count."""
    lines = text.split("\n")
    kept: list[str] = []
    at = 0
    while at < len(lines):
        size, times = _repeat(lines, at)
        kept += lines[at : at + size]
        if times > 1:
            what = "line" if size == 1 else f"{size} lines"
            kept.append(f"[… the {what} above repeated {times - 1} more times …]")
        at += size * times
    return "\n".join(kept)


def _repeat(lines: list[str], at: int) -> tuple[int, int]:
    """(lines of the block, how often it stands there) of the fold that saves most; (1, 1) when none saves anything."""
    best, saved = (1, 1), 0
    for size in range(1, _LONGEST_BLOCK + 1):
        # The first and last line of a block that repeats are equal to those one block later: cheap to look at first.
        if (
            at + 2 * size > len(lines)
            or lines[at] != lines[at + size]
            or lines[at : at + size] != lines[at + size : at + 2 * size]
        ):
            continue
        block = lines[at : at + size]
        if not any(block):
            continue  # empty lines are cheap to show, and counting them from each one on would be quadratic
        times = 2
        while lines[at + times * size : at + (times + 1) * size] == block:
            times += 1
        gain = size * (times - 1) - 1
        if gain > saved:
            best, saved = (size, times), gain
    return best


def _shares(out: int, err: int, room: int, failed: bool) -> tuple[int, int]:
    """How many characters each stream gets: what the other does not need goes to it; a failure is explained by stderr."""
    if out + err <= room:
        return out, err
    half_err = room * 2 // 3 if failed else room // 2
    if err <= half_err:
        return room - err, err
    if out <= room - half_err:
        return out, room - out
    return room - half_err, half_err


def _within(text: str, room: int, failed: bool) -> str:
    """Head and tail of a text that is too long; of a failure more of the tail."""
    if len(text) <= room:
        return text
    mark = f"\n[… {len(text)} characters omitted …]\n"
    left = room - len(mark)
    if left <= 0:
        return text[:room]
    head = left // 3 if failed else left // 2
    tail = left - head
    first, last = text[:head], text[len(text) - tail :] if tail else ""
    # Whole lines read better, where that costs little.
    cut = first.rfind("\n")
    if cut > head // 2:
        first = first[:cut]
    cut = last.find("\n")
    if 0 <= cut < tail // 2:
        last = last[cut + 1 :]
    return f"{first}\n[… {len(text) - len(first) - len(last)} characters omitted …]\n{last}"
