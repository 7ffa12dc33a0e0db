"""`ports.leases` in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.domain.fence import Fence
from corral.domain.lease import is_system
from corral.domain.records import LeaseRecord, SandboxView
from corral.errors import CorralError
from corral.ports.leases import Renewal, Seen

from .leases import ENDING, adoption, check_wishes, raised, renewed
from .memory_base import MemoryBase
from .rows import LEASE, SANDBOX, Row, not_found
from .sql_text import page_size


class MemoryLeases(MemoryBase):
    """`ports.leases.LeaseStore`."""

    async def see_sandbox(self, sandbox_id: str, tenant_id: str | None) -> Seen | None:
        def work() -> Seen | None:
            row = self._sandboxes.get(sandbox_id)
            if row is None or tenant_id not in (None, row["tenant_id"]):
                return None
            return Seen(self._view(row), self._now)

        return await self._transact(work)

    async def renew_leases(self, renewals: Sequence[Renewal]) -> tuple[int, list[LeaseRecord | CorralError]]:
        check_wishes(renewals)

        def one(wish: Renewal) -> LeaseRecord | CorralError:
            row = self._sandboxes.get(wish.sandbox_id)
            if row is None:
                return not_found("sandbox", wish.sandbox_id)
            lease = LEASE.from_row(self._leases[wish.sandbox_id])
            new = renewed(wish.sandbox_id, int(row["incarnation"] or 0), lease, wish, self._now)
            if isinstance(new, LeaseRecord):
                self._put(self._leases, wish.sandbox_id, LEASE.encode(new))
            return lease if new is None else new

        return await self._transact(lambda: (self._now, [one(wish) for wish in renewals]))

    def _held(self, row: Row) -> bool:
        owner = self._leases[row["sandbox_id"]]["lease_owner"]
        return owner is not None and not is_system(str(owner))

    async def due_leases(self, limit: int = 100) -> list[SandboxView]:
        def work() -> list[SandboxView]:
            def until(row: Row) -> int:
                return int(self._leases[row["sandbox_id"]]["expires_at"] or 0)

            found = [
                row
                for row in self._sandboxes.values()
                if row["state"] in ENDING and not row["one_shot"] and self._held(row) and until(row) <= self._now
            ]
            return [self._view(row) for row in sorted(found, key=until)[: page_size(limit)]]

        return await self._transact(work)

    async def list_leases(self, tenant_id: str, *, after: str | None = None, limit: int = 100) -> list[Seen]:
        def work() -> list[Seen]:
            rows = self._page(self._sandboxes, SANDBOX, tenant_id, None, after, len(self._sandboxes))
            held = [row for row in rows if row["state"] != "terminated" and self._held(row)]
            return [Seen(self._view(row), self._now) for row in held[: page_size(limit)]]

        return await self._transact(work)

    async def adopt_floor(self, sandbox_id: str, floor: Fence, evidence: dict[str, Any]) -> SandboxView | None:
        def work() -> SandboxView | None:
            row = self._sandboxes.get(sandbox_id)
            if row is None:
                return None
            sandbox, lease = SANDBOX.from_row(row), LEASE.from_row(self._leases[sandbox_id])
            new = raised(sandbox, lease, floor, self._now)
            if new is None:
                return None
            row = {**row, "incarnation": new[0], "version": sandbox.version + 1}
            self._put(self._sandboxes, sandbox_id, row)
            self._put(self._leases, sandbox_id, LEASE.encode(new[1]))
            self._append(self._events, "event_id", adoption(sandbox, lease, floor, evidence))
            return self._view(row)

        return await self._transact(work)

    async def newest_event(self) -> int:
        return await self._transact(lambda: len(self._events))

    async def environment_version(self, sandbox_id: str) -> int:
        def work() -> int:
            self._get(self._sandboxes, SANDBOX, sandbox_id)
            return self._environments.get(sandbox_id, 1)

        return await self._transact(work)
