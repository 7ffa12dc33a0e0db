"""What the model guest's execs do: a few small programs, and the file program with answers that its tape makes wrong."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING, Any

from . import trees, twists

if TYPE_CHECKING:
    from .guest import ModelGuest, Run

MOST = 24 << 20
"""Bytes that one case may send: a host that can take these can take more."""
CONTENT = b"0123456789abcdef" * 256


def begin(guest: ModelGuest, run: Run) -> None:
    """Decide what the exec does; `run` is over or gets its output at once or later."""
    argv = run.spec["argv"]
    if any(word.endswith("files.pyc") for word in argv):
        words = argv[next(n for n, word in enumerate(argv) if word.endswith("files.pyc")) + 1 :]
        _file_program(guest, run, words)
        return
    program, rest = argv[0], argv[1:]
    if program == "say":
        run.out["stdout"] += CONTENT * (int(rest[0]) // len(CONTENT)) + CONTENT[: int(rest[0]) % len(CONTENT)]
        run.out["stderr"] += b"e" * int(rest[1])
        run.end(int(rest[2]))
    elif program == "cat":
        _on_input(guest, run, lambda data: run.out["stdout"].extend(data), lambda: run.end(0))
    elif program == "later":
        guest.timers.append(guest.loop.call_later(float(rest[0]), _end_later, guest, run))
    elif program == "plant":
        if guest.workspace is not None:
            trees.plant(guest.workspace, guest.tape)
        run.end(0)
    elif program == "cannot":
        run.state, run.alive = "failed", False
        run.failure = {"what": "argv", "errno": "ENOENT", "message": "no such program"}


def _end_later(guest: ModelGuest, run: Run) -> None:
    run.out["stdout"] += b"late\n"
    run.end(0)
    guest.pump()


def _on_input(guest: ModelGuest, run: Run, take: Any, end: Any) -> None:
    def taken(data: bytes, eof: bool) -> None:
        take(data)
        if eof:
            end()
        guest.pump()

    run.on_input = taken
    if not run.open:
        end()


def _file_program(guest: ModelGuest, run: Run, words: list[str]) -> None:
    operation = words[0]
    if guest.tape.byte() >= 230:
        _refuse(guest, run)
        return
    if operation in ("write", "unpack"):
        _on_input(guest, run, lambda data: None, lambda: _answer(guest, run, operation, words))
    elif operation == "watch":
        _say(guest, run, {"event": "started"})
        for kind in ("created", "modified", "moved", "deleted"):
            _say(guest, run, {"event": kind, "path": "/workspace/é", "directory": False, "from": "/workspace/before"})
        _on_input(guest, run, lambda data: None, lambda: run.end(0))
        if guest.tape.byte() < 200:
            guest.timers.append(guest.loop.call_later(5.0, _end_later_quietly, guest, run))
    else:
        _answer(guest, run, operation, words)


def _end_later_quietly(guest: ModelGuest, run: Run) -> None:
    run.end(0)
    guest.pump()


def _answer(guest: ModelGuest, run: Run, operation: str, words: list[str]) -> None:
    tape = guest.tape
    facts = {
        "path": "/workspace/f", "type": "file", "size": len(run.input), "mode": 0o644, "uid": 1000, "gid": 1000, "mtime_ns": 1, "inode": 2,
        "created": True,
    }  # fmt: skip
    if operation == "list":
        for number in range(3):
            _say(guest, run, {**facts, "path": f"/workspace/{number}"})
        _say(guest, run, {"next": None})
    elif operation == "read":
        size = tape.choose((5, 0, 4096, 200_000))
        _say(guest, run, {**facts, "size": size, "offset": 0, "length": size})
        run.out["stdout"] += (CONTENT * 50)[: size + (tape.choose((1, 100, 10**6)) if tape.byte() > 200 else 0)]
    elif operation == "pack":
        run.out["stdout"] += _archive()
    elif operation == "remove":
        _say(guest, run, {"removed": 1})
    elif operation != "unpack":
        _say(guest, run, facts)
    if tape.byte() >= 230:
        guest.log.append("the file program ends oddly")
        run.end(tape.choose((0, 1, 3, 4, 137, None)), 9 if tape.below(2) else None)
        if run.code is None and run.signal is None:
            run.code = 255
    elif tape.byte() >= 245:
        guest.log.append("the file program does not end")
    else:
        run.end(0)


def _archive() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("f")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))
    return out.getvalue()


def _say(guest: ModelGuest, run: Run, value: dict[str, Any]) -> None:
    """A line, honest or not."""
    tape = guest.tape
    choice = tape.byte()
    text = twists.dumps(value)
    if choice >= 200:
        kind = choice % 6
        guest.log.append(f"line {kind} {text[:50]!r}")
        if kind < 2:
            text = twists.dumps(twists.twisted(value, tape))
        elif kind == 2:
            text = twists.garbled(text, tape)
        elif kind == 3:
            text = text[:-1] + b"x" * (tape.below(30) << 16)
        elif kind == 4:
            text = b"\n".join([text] * (1 + tape.upto(2000)))
        else:
            return
    run.out["stdout"] += text + b"\n"


def _refuse(guest: ModelGuest, run: Run) -> None:
    tape = guest.tape
    told: Any = {
        "code": tape.choose(("not_found", "disk_full", "too_large", "sandbox_deleted", "ok")),
        "detail": "no",
        "entry": "f",
        "size": 5,
    }
    if tape.below(2):
        told = twists.twisted(told, tape)
    text = twists.dumps(told)
    if tape.byte() > 200:
        text = twists.garbled(text, tape)
    run.out["stderr"] += text + b"\n"
    run.end(3)
