"""Host side of the guest protocol: `GuestClient` and the types of its answers.

Everything that comes from the guest is hostile input. Whatever violates the protocol, a size, a window, a rate or a time limit ends
the connection and is `CorralError("guest_lost")`; memory and time are bounded. No fact here may decide about trust, limits or kills.
"""

from corral.channel.answers import ExecFailure
from corral.channel.client import (
    ChannelLimits,
    Data,
    Ended,
    ExecStatus,
    GuestClient,
    GuestHello,
    KillReport,
)

__all__ = [
    "ChannelLimits",
    "Data",
    "Ended",
    "ExecFailure",
    "ExecStatus",
    "GuestClient",
    "GuestHello",
    "KillReport",
]
