"""`ports.repeats` in memory."""

from __future__ import annotations

from corral.domain.records import Idempotency
from corral.ports.repeats import DELIVERY_LIFE_MS, KEY_LIFE_MS

from .memory_base import MemoryBase
from .rules import check_idempotency, made_before
from .sql_text import page_size


class MemoryRepeats(MemoryBase):
    """`ports.repeats.RepeatsStore`."""

    async def made_under(self, idempotency: Idempotency) -> str | None:
        check_idempotency(idempotency)

        def work() -> str | None:
            known = self._keys.get((idempotency.tenant_id, idempotency.route, idempotency.key))
            if known is None or known[2] <= self._now - KEY_LIFE_MS:
                return None
            digest, resource_id, _ = known
            return made_before(idempotency, digest, resource_id)

        return await self._transact(work)

    async def forget_old(self, limit: int = 500) -> int:
        def work() -> int:
            keys = sorted((at, key) for key, (_, _, at) in self._keys.items() if at <= self._now - KEY_LIFE_MS)
            ended = [
                (int(row["done_at"] or 0), key) for key, row in self._webhooks.items() if row["done_at"] is not None
            ]
            hooks = sorted(one for one in ended if one[0] <= self._now - DELIVERY_LIFE_MS)
            most = page_size(limit)
            for _, key in keys[:most]:
                del self._keys[key]
            for _, delivery_id in hooks[:most]:
                del self._webhooks[delivery_id]
            return len(keys[:most]) + len(hooks[:most])

        return await self._transact(work)
