"""`AsyncLease`: `corral.client.leases.Lease` for asyncio, renewed by a task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from corral.client.leases import Terms
from corral.errors import CorralError

if TYPE_CHECKING:
    from corral.client.async_sdk import AsyncSandbox  # noqa: F401 - named below, as text

RELEASE_S = 10.0


class AsyncLease(Terms["AsyncSandbox"]):
    """A lease of a sandbox, held from `async with` (or `acquire`) to its end (or `release`), and renewed in the background."""

    _task: asyncio.Task[None] | None = None

    async def acquire(self) -> AsyncLease:
        """Get it, and keep it. `lease_held` when somebody else has the sandbox."""
        await self._keeper.acquire(*self._asked)
        self._gripped()
        self._over = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"corral lease {self.sandbox.id}")
        return self

    async def _keep(self) -> None:
        keeper = self._keeper
        try:
            while not keeper.lost:
                await asyncio.sleep(keeper.pause_s)
                try:
                    await keeper.renew()
                except CorralError:
                    if not keeper.lost:
                        await asyncio.sleep(min(1.0, keeper.ttl_s / 10))  # while there is time it is tried again
                except Exception as error:
                    keeper.lose(f"{type(error).__name__}: {error}")
        finally:
            self._over.set()

    async def renew(self) -> None:
        """Now, beside the renewals in the background. `lease_lost`."""
        self._keeper.check()
        await self._keeper.renew()

    async def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Wait until it is lost or released; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
        except TimeoutError:
            return False
        return True

    async def release(self) -> bool:
        """Give it back: what runs in the sandbox is ended, what is temporary in it is removed. False if it was lost before."""
        if self._task is not None:
            self._task.cancel()
        try:
            return await self._keeper.release()
        finally:
            self._let_go()

    async def __aenter__(self) -> AsyncLease:
        return await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        await self.sandbox._calls.line.effects.finish(self.release(), RELEASE_S)
