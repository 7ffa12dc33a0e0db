"""`ports.expiry` in memory."""

from __future__ import annotations

from collections.abc import Sequence

from corral.domain.expiry import Cause, due
from corral.ports.expiry import Due

from .memory_base import MemoryBase
from .rows import SANDBOX, Row
from .sql_text import page_size


class MemoryExpiry(MemoryBase):
    """`ports.expiry.ExpiryStore`."""

    async def due_sandboxes(self, limit: int = 100) -> list[Due]:
        def work() -> list[Due]:
            found: list[tuple[bool, int, str, Row, Cause]] = []
            for row in self._sandboxes.values():
                cause = self._cause(row)
                if cause is not None:
                    idle = int(row["last_active_at"] or 0) + int(row["idle_timeout_ms"] or 0)
                    since = int(row["expires_at"] or 0) if cause == "ttl" else idle
                    found.append((cause != "ttl", since, str(row[SANDBOX.key]), row, cause))
            found.sort(key=lambda one: one[:3])
            return [Due(self._view(row), cause) for *_, row, cause in found[: page_size(limit)]]

        return await self._transact(work)

    def _cause(self, row: Row) -> Cause | None:
        idle = row["idle_timeout_ms"]
        return due(
            self._now,
            str(row["state"]),
            int(row["expires_at"] or 0),
            int(row["last_active_at"] or 0),
            None if idle is None else int(idle),
            one_shot=bool(row["one_shot"]),
        )

    async def touch(self, sandbox_ids: Sequence[str]) -> None:
        def work() -> None:
            for sandbox_id in set(sandbox_ids):
                row = self._sandboxes.get(sandbox_id)
                if row is None or row["state"] in ("terminated", "sanitizing"):
                    continue
                if int(row["last_active_at"] or 0) < self._now:
                    newer = {"last_active_at": self._now, "version": int(row["version"] or 0) + 1}
                    self._put(self._sandboxes, sandbox_id, {**row, **newer})

        await self._transact(work)
