"""Supervisors as the guest sees them: made for one exec, or standing by for the next."""

from __future__ import annotations

import _socket
import _struct
import os

from corral.guest import kernel, launch, supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_IDLE = 1
"""How many supervisors may stand by."""

_three = _struct.Struct("3i")


class Post:
    """A living supervisor. `plans` is None when it serves one exec only; `turn` counts the execs that it was given."""

    __slots__ = ("channel", "pid", "plans", "turn")

    def __init__(self, pid: int, channel: Any, plans: Any, turn: int) -> None:
        self.pid = pid
        self.channel = channel
        self.plans = plans
        self.turn = turn

    def hand(self, plan: launch.Plan, packed: bytes) -> bool:
        """Give it the next exec. False: it is of no use any more, and the plan went nowhere."""
        fds = _three.pack(plan.stdin, plan.stdout, plan.stderr)
        try:
            self.plans.sendmsg((packed,), ((_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds),), _socket.MSG_DONTWAIT)
        except OSError:
            return False
        self.turn += 1
        return True

    def command(self, kind: str, number: int) -> None:
        if self.channel is not None:
            try:
                self.channel.send(b"%s%d %d" % (kind.encode("ascii"), self.turn, number))
            except OSError:
                pass

    def hear(self) -> bytes | None:
        """One packet; b"" when there will be no more, None when there is none now."""
        try:
            packet: bytes = self.channel.recv(8192)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        return packet

    def close(self) -> None:
        for end in (self.channel, self.plans):
            if end is not None:
                end.close()
        self.channel = self.plans = None


def fork(
    plan: launch.Plan | None, standard: launch.Standard, *, reusable: bool, dumpable: bool, namespace: bool
) -> Post:
    """A new supervisor, at work on `plan` or standing by; with `namespace` as the init of one. OSError when there cannot be one."""
    kind = _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC
    channel, their_channel = _socket.socketpair(_socket.AF_UNIX, kind)
    plans, their_plans = _socket.socketpair(_socket.AF_UNIX, kind) if reusable else (None, None)
    post = Post(0, channel, plans, 0 if plan is None else 1)
    try:
        channel.setblocking(False)
        post.pid = kernel.fork_as_init() if namespace else os.fork()
        if post.pid == 0:
            supervisor.run(plan, their_channel, their_plans, standard, dumpable, namespace)
    except OSError:
        post.close()
        raise
    finally:
        their_channel.close()
        if their_plans is not None:
            their_plans.close()
    return post
