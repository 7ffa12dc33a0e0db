"""How often a key may call, where the policy says so."""

from __future__ import annotations

import math

from corral.errors import CorralError
from corral.services.control import Services
from corral.services.events import Caller

WINDOW_MS = 60_000


async def check_rate(services: Services, caller: Caller) -> None:
    """`rate_limited` when the key has called more often in this minute than the policy allows, over all workers."""
    most = services.core.policy.calls_per_minute
    if most is None:
        return
    counted = await services.core.coordination.count(
        f"rate:{caller.tenant_id}:{caller.owner}"[:200], 1, most, WINDOW_MS
    )
    if not counted.allowed:
        raise CorralError(
            "rate_limited",
            f"this key may make {most} calls a minute",
            hint="wait as long as Retry-After says; wait=SECONDS and streams take the place of many calls",
            retry_after_s=max(1, math.ceil(counted.retry_after_ms / 1000)),
        )
