"""What the guest may say: limits, the types of its answers, and the checks of their shape. Nothing here does I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.guest import protocol

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class ChannelLimits:
    """What the host gives one guest before it calls it lost. Sizes in bytes, times in seconds."""

    max_frame: int = 64 * 1024
    """Bytes of output in one frame."""
    max_control: int = 64 * 1024
    """One JSON frame of the guest."""
    max_window: int = 2 * 1024 * 1024 + 128 * 1024
    """Bytes of one stream that may be here without having been taken by the consumer."""
    max_buffer: int = 8 * 1024 * 1024
    """Bytes of ours that the guest has not read."""
    max_resync: int = 64 * 1024 * 1024
    """Bytes that were meant for an earlier client, over pipes: what 32 execs may have unacknowledged."""
    frames_per_s: float = 10000.0
    """Above this we read more slowly; the guest then has to wait."""
    request_s: float = 15.0
    connect_s: float = 15.0
    keepalive_s: float = 20.0


class ExecFailure(TypedDict):
    """Why the main program never ran: `what` in argv | cwd | user | platform; `errno` symbolic."""

    what: str
    errno: str
    message: str


class ExecStatus(TypedDict):
    """What the guest says about one exec. Validated in shape, never in truth.

    `state`: `unknown` (never started, never will have been) | `starting` | `running` | `ended` | `failed` (never started, see
    `failure`) | `lost` (its supervisor was killed; its processes were ended). `started` None = cannot be known.
    Exactly one of `exit_code` 0-255 and `signal` is set when the end of main was seen. Times are the guest's monotonic milliseconds.
    `ended_by`: None | `timeout` (own backup) | `kill` | `fence` | `deadline`. `offsets` = bytes produced per stream.
    `stdin` = {received, written, open} where standard input was left open.
    `already` is True in the answer to a second start.
    """

    exec_id: str
    state: str
    started: bool | None
    exit_code: int | None
    signal: int | None
    failure: ExecFailure | None
    started_ms: int | None
    ended_ms: int | None
    utime_ms: int | None
    stime_ms: int | None
    maxrss_kib: int | None
    ended_by: str | None
    killed: int
    killed_all: bool
    background: int
    offsets: dict[str, int]
    stdin: dict[str, int] | None
    already: bool


class KillReport(TypedDict):
    """`killed_all` False = something outlived the kill; `killed` = processes that got KILL."""

    killed_all: bool
    killed: int


@dataclass(frozen=True)
class GuestHello:
    """What the guest said about itself at connect. `capabilities`: subreaper pidfd change_uid landlock same_uid pid1."""

    protocol: int
    guest_version: str
    instance_id: str
    capabilities: dict[str, int]
    identified: bool
    floor: Fence
    quiet: bool = False
    """It was made ready for a snapshot, and may be a copy: `instance_id`, `identified` and `floor` are those of the original."""


@dataclass(frozen=True)
class Data:
    """Bytes of one stream from `offset`; `t_ms` since the start of the exec. Acknowledged when the consumer asks for the next one."""

    stream: Stream
    offset: int
    data: bytes
    t_ms: int


@dataclass(frozen=True)
class Ended:
    """Last item of `attach`: every byte before it was delivered."""

    status: ExecStatus


class Violation(Exception):
    """The guest broke the protocol: what it did, in a few words."""


_STATES = frozenset({"unknown", "starting", "running", "ended", "failed", "lost"})
_WHATS = frozenset({"argv", "cwd", "user", "platform"})
_CODES = frozenset(
    {
        "lease_lost",
        "not_found",
        "cursor_gone",
        "illegal_transition",
        "sandbox_paused",
        "bad_request",
        "conflict",
        "infra_error",
    }
)
_ENDED_BY = frozenset({None, "timeout", "kill", "fence", "deadline"})
_MAX = 2**63
_STREAMS = ("stdout", "stderr")


def _number(value: dict[str, Any], name: str, *, high: int = _MAX, optional: bool = False) -> Any:
    number = value.get(name)
    if number is None and optional:
        return None
    if type(number) is not int or not 0 <= number < high:
        raise Violation(f"{name} is not a number in range")
    return number


def _text(value: dict[str, Any], name: str, longest: int) -> str:
    text = value.get(name)
    if type(text) is not str or len(text) > longest:
        raise Violation(f"{name} is not a short text")
    if not _encodable(text):
        raise Violation(f"{name} is no text")
    return text


def _encodable(text: str) -> bool:
    """Lone surrogates other than those that stand for a byte can be neither stored nor shown."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _truth(value: dict[str, Any], name: str) -> bool:
    truth = value.get(name)
    if type(truth) is not bool:
        raise Violation(f"{name} is not true or false")
    return truth


def _object(value: dict[str, Any], name: str) -> dict[str, Any]:
    inner = value.get(name)
    if type(inner) is not dict:
        raise Violation(f"{name} is not an object")
    return inner


def check_hello(value: dict[str, Any]) -> GuestHello:
    if "version" not in value:
        raise Violation("no common protocol version")
    version = _number(value, "version", high=1000)
    if not protocol.OLDEST <= version <= protocol.VERSION:
        raise Violation("a protocol version that was not offered")
    capabilities = _object(value, "capabilities")
    if len(capabilities) > 32 or not all(map(_encodable, capabilities)):
        raise Violation("too many capabilities, or odd ones")
    floor = value.get("floor")
    if type(floor) is not list or len(floor) != 2 or not all(type(n) is int and 0 <= n < _MAX for n in floor):
        raise Violation("floor is not a fence")
    return GuestHello(
        protocol=version,
        guest_version=_text(value, "guest", 50),
        instance_id=_text(value, "instance", 100),
        capabilities={name[:50]: _number(capabilities, name) for name in capabilities},
        identified=_truth(value, "identified"),
        floor=Fence(floor[0], floor[1]),
        quiet="quiet" in value and _truth(value, "quiet"),
    )


def unknown_status(exec_id: str) -> ExecStatus:
    return {
        "exec_id": exec_id,
        "state": "unknown",
        "started": False,
        "exit_code": None,
        "signal": None,
        "failure": None,
        "started_ms": None,
        "ended_ms": None,
        "utime_ms": None,
        "stime_ms": None,
        "maxrss_kib": None,
        "ended_by": None,
        "killed": 0,
        "killed_all": True,
        "background": 0,
        "offsets": {},
        "stdin": None,
        "already": False,
    }


def check_status(value: dict[str, Any], exec_id: str) -> ExecStatus:
    """Shape, ranges, and that it is about the exec that was asked for."""
    if value.get("exec_id") != exec_id:
        raise Violation("an answer about another exec")
    state = value.get("state")
    if type(state) is not str or state not in _STATES:
        raise Violation("an unknown exec state")
    if state == "unknown":
        return unknown_status(exec_id)
    started = value.get("started")
    if started not in (True, False, None) or type(started) is int:
        raise Violation("started is not true, false or null")
    code, signal = (
        _number(value, "exit_code", high=256, optional=True),
        _number(value, "signal", high=65, optional=True),
    )
    if state == "ended" and (code is None) == (signal is None):
        raise Violation("an end without exactly one of exit code and signal")
    if state == "ended" and started is not True:
        raise Violation("an end without a start")
    ended_by = value.get("ended_by")
    if not (ended_by is None or type(ended_by) is str) or ended_by not in _ENDED_BY:
        raise Violation("an unknown ended_by")
    failure: ExecFailure | None = None
    if state == "failed":
        told = _object(value, "failure")
        what = _text(told, "what", 20)
        if what not in _WHATS or started is not False:
            raise Violation("an odd start failure")
        failure = {"what": what, "errno": _text(told, "errno", 40), "message": _text(told, "message", 1000)}
    offsets = _object(value, "offsets")
    return {
        "exec_id": exec_id,
        "state": state,
        "started": started,
        "exit_code": code,
        "signal": signal,
        "failure": failure,
        "started_ms": _number(value, "started_ms", optional=True),
        "ended_ms": _number(value, "ended_ms", optional=True),
        "utime_ms": _number(value, "utime_ms", optional=True),
        "stime_ms": _number(value, "stime_ms", optional=True),
        "maxrss_kib": _number(value, "maxrss_kib", optional=True),
        "ended_by": ended_by,
        "killed": _number(value, "killed", high=2**31),
        "killed_all": _truth(value, "killed_all"),
        "background": _number(value, "background", high=2**31),
        "offsets": {name: _number(offsets, name) for name in _STREAMS if name in offsets},
        "stdin": None if value.get("stdin") is None else check_numbers(_object(value, "stdin")),
        "already": _truth(value, "already"),
    }


def check_kill(value: dict[str, Any]) -> KillReport:
    return {"killed_all": _truth(value, "killed_all"), "killed": _number(value, "killed", high=2**31)}


def check_clock(value: dict[str, Any]) -> int | None:
    """The guest's clock in milliseconds since 1970; None from one that does not tell."""
    clock: int | None = _number(value, "clock_ms", optional=True)
    return clock


def check_numbers(value: dict[str, Any]) -> dict[str, int]:
    if len(value) > 32 or not all(map(_encodable, value)):
        raise Violation("too many numbers, or odd ones")
    return {name[:50]: _number(value, name) for name in value}


def check_input(value: dict[str, Any]) -> tuple[int, bool]:
    """-> (bytes that the program took, whether it may still read)."""
    return _number(value, "written"), _truth(value, "open")


def check_reply(value: dict[str, Any]) -> dict[str, Any] | CorralError:
    """What was answered, or the refusal."""
    answer, error = value.get("ok"), value.get("error")
    if type(answer) is dict and error is None:
        return answer
    if type(error) is dict and answer is None:
        code, detail, field = _error(error)
        return CorralError(code, f"the guest refused: {detail}", field=field)
    raise Violation("a reply that says neither yes nor no")


def _error(value: dict[str, Any]) -> tuple[str, str, str | None]:
    code = _text(value, "code", 50)
    if code not in _CODES:
        raise Violation("an unknown error code")
    field = None if value.get("field") is None else _text(value, "field", 100)
    return code, _text(value, "detail", 1000), field
