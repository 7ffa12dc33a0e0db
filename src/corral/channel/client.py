"""`GuestClient`: one connection to one guest. See the package docstring for what is trusted (nothing)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from corral.domain.fence import Fence

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True)
class ChannelLimits:
    """What the host gives one guest before it calls it lost. Sizes in bytes, times in seconds."""

    max_frame: int = 128 * 1024
    max_control: int = 64 * 1024
    max_window: int = 2 * 1024 * 1024 + 128 * 1024
    max_buffer: int = 8 * 1024 * 1024
    events_per_s: float = 2000.0
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


class GuestClient:
    """See the module docstring. Made by `connect` only; all methods may be called from many tasks of one loop.

    Errors: `guest_lost` (connection unusable, `closed` set), `lease_lost` (fence below the guest's floor), `not_found` (exec id),
    `cursor_gone` (attach below what is kept), `illegal_transition` (not identified yet), `bad_request`.
    """

    hello: GuestHello
    closed: asyncio.Event

    @classmethod
    async def connect(
        cls,
        sock_or_connector: socket.socket | Callable[[], Awaitable[socket.socket]],
        *,
        limits: ChannelLimits | None = None,
        role: str = "node",
    ) -> GuestClient:
        """Say hello over a connected unix stream socket (or what the connector answers); the older connections are closed by the guest."""
        ...

    async def close(self) -> None: ...

    async def identify(self, sandbox_id: str, fence: Fence, *, now: float, entropy: bytes) -> None: ...

    async def fence(self, fence: Fence, mode: Literal["kill", "adopt"]) -> None: ...

    async def start_exec(self, spec: Mapping[str, Any], *, fence: Fence) -> ExecStatus:
        """At most once by `spec["exec_id"]`. Returns once main runs or certainly does not (`state == "failed"`).

        Keys: exec_id, argv [str], env {str: str}, cwd, uid?, gid? (default: the guest's --exec-uid/gid), stdin "open"|"eof" (default
        eof), pty [rows, cols] | None, umask (0o022), timeout_s? (backup), grace_s (2), rlimits {nofile, core, fsize, data, nproc, stack,
        cpu}, background "keep"|"kill" (keep), nice (5), oom_score_adj (500), seccomp bool (True).
        """
        ...

    async def exec_status(self, exec_id: str) -> ExecStatus: ...

    def attach(self, exec_id: str, offsets: Mapping[str, int] | None = None) -> AsyncIterator[Data | Ended]:
        """Output from the offsets on, then `Ended`. Bytes are acknowledged (dropped by the guest) as the consumer takes them."""
        ...

    async def stdin(self, exec_id: str, data: bytes, eof: bool = False, *, fence: Fence) -> bool:
        """Hand over all of `data`, waiting while the program does not read. False = the program no longer reads."""
        ...

    async def signal(self, exec_id: str, signal: int, *, fence: Fence, tree: bool = False) -> None: ...

    async def resize(self, exec_id: str, rows: int, cols: int, *, fence: Fence) -> None: ...

    async def kill_exec(self, exec_id: str, grace_s: float, *, fence: Fence) -> KillReport: ...

    async def kill_all(self, *, fence: Fence) -> KillReport:
        """End every process inside but the guest."""
        ...

    async def usage(self) -> dict[str, int]: ...

    async def extend_deadline(self, seconds: float, *, fence: Fence) -> None:
        """The dead man's switch now fires `seconds` from now."""
        ...

    async def ping(self) -> float:
        """Round trip in seconds."""
        ...

    async def shutdown(self, *, fence: Fence) -> None:
        """Ask PID 1 to end everything and exit."""
        ...
