"""Whether this process can take work, and which part of it is missing; answered within `PATIENCE_S` whatever hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from corral.errors import CorralError
from corral.services.control import Core

PATIENCE_S = 2.0


@dataclass(frozen=True)
class Readiness:
    """`missing`: store, node - without them nothing new can begin. `warnings`: coordination - without it all is slower."""

    missing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


async def look(core: Core) -> Readiness:
    """Ask each part something small."""
    parts: dict[str, Awaitable[Any]] = {"store": core.store.workers(), "node": core.node.instances()}
    answers = await asyncio.gather(*(_answers(work) for work in parts.values()))
    missing = tuple(name for name, well in zip(parts, answers, strict=True) if not well)
    return Readiness(missing, () if core.coordination.healthy else ("coordination",))


async def _answers(work: Awaitable[Any]) -> bool:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await work
    except (TimeoutError, CorralError, OSError):
        return False
    return True
