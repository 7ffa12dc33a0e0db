"""What this node knows of the store's past: the floors of its instances, and the highest event that a store in use had.

A store that was set back to an earlier copy knows neither; whoever works with it compares (`services.leases`).
"""

from __future__ import annotations

from corral.domain.fence import Fence
from corral.node.journal import Journal


class Floors:
    """See `ports.node.Node`."""

    _journal: Journal

    async def floors(self) -> list[tuple[str, str, Fence]]:
        return [
            (entry.instance_id, str(entry.data["sandbox_id"]), entry.floor)
            for entry in self._journal.instances.values()
            if entry.state != "condemned" and "sandbox_id" in entry.data
        ]

    async def remember_event(self, event_id: int, *, accept: bool = False) -> int:
        known = self._journal.fact("event_id")
        if event_id > known or (accept and event_id < known):
            self._journal.set_fact("event_id", event_id)
            if event_id < known:
                self._journal.set_fact("regressed", known)
        return event_id if accept else max(known, event_id)

    async def regressed(self, *, forget: bool = False) -> int:
        known = self._journal.fact("regressed")
        if forget and known:
            self._journal.set_fact("regressed", 0)
        return known
