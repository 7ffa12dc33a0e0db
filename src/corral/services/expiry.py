"""The end of sandboxes in time: by their time to live, and by time without activity. Rules are in `domain.expiry`; the store's clock judges.

What has no row to show that it goes on (a transfer, a watch of files) is counted here, and told to the store with each sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from corral.domain import expiry
from corral.domain.records import SandboxView
from corral.errors import CorralError
from corral.services.control import Core
from corral.services.events import Caller
from corral.services.execs import fence_of, instance_of
from corral.services.leases import ttl_of
from corral.services.lifecycle import MARGIN_S, Lifecycle
from corral.services.pausing import check_holder, check_runs
from corral.services.transitions import ENDING, Plan, gone

Json = dict[str, Any]
FRESH_MS = 1000
"""Uses that follow each other so fast are written down as one, where the time without activity is long."""


@dataclass(frozen=True)
class Extension:
    """What is to be changed; None = stays. `domain.expiry.UNLIMITED_S` = without a limit."""

    ttl_s: float | None = None
    idle_timeout_s: float | None = None


class Expiry:
    """See the module docstring."""

    def __init__(self, core: Core, lifecycle: Lifecycle) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._in_use: Counter[str] = Counter()
        self._open: WeakKeyDictionary[object, str] = WeakKeyDictionary()
        self._ending: set[str] = set()

    # -- activity --------------------------------------------------------------------------------------------------------------
    async def used(self, view: SandboxView) -> None:
        """A call uses the sandbox, and has changed nothing that shows it."""
        row = view.sandbox
        if row.idle_timeout_ms is None:
            return
        if self._core.store_ms() - row.last_active_at >= min(FRESH_MS, row.idle_timeout_ms // 10):
            await self._core.store.touch([row.sandbox_id])

    @contextmanager
    def using(self, view: SandboxView) -> Iterator[None]:
        """Around what may take long."""
        sandbox_id = view.sandbox.sandbox_id
        if view.sandbox.idle_timeout_ms is None:
            yield
            return
        self._in_use[sandbox_id] += 1
        try:
            yield
        finally:
            self._in_use[sandbox_id] -= 1
            if not self._in_use[sandbox_id]:
                del self._in_use[sandbox_id]

    def keeps(self, view: SandboxView, stream: object) -> None:
        """The sandbox is in use for as long as somebody has this."""
        if view.sandbox.idle_timeout_ms is not None:
            self._open[stream] = view.sandbox.sandbox_id

    # -- ends ------------------------------------------------------------------------------------------------------------------
    async def sweep(self) -> None:
        """End what has outlived its time."""
        core = self._core
        if in_use := {*self._in_use, *self._open.values()}:
            await core.store.touch(sorted(in_use))
        for due in await core.store.due_sandboxes():
            sandbox_id = due.view.sandbox.sandbox_id
            if due.cause == "ttl":
                work = self._lifecycle.destroy(sandbox_id, "ttl", event="ttl")
                core.spawn(work, f"{sandbox_id} ttl", last=True)
            elif sandbox_id not in self._ending:
                self._ending.add(sandbox_id)
                core.spawn(self._end_idle(due.view), f"{sandbox_id} idle", last=True)

    async def _end_idle(self, view: SandboxView) -> None:
        try:
            await self._end_unused(view)
        finally:
            self._ending.discard(view.sandbox.sandbox_id)

    async def _end_unused(self, view: SandboxView) -> None:
        """Over just this view: whoever has used it since then keeps it."""
        lifecycle, sandbox_id = self._lifecycle, view.sandbox.sandbox_id
        plan = Plan(view)
        told: Json = {"cause": "idle_timeout", "changes": {"failure": "idle_timeout"}}
        if view.sandbox.state == "leased":
            # Its lease ends as any other does; as the sandbox ends with it, nothing has to be made fit for another.
            lifecycle.step(plan, "lease_expired", **told)
            done = lifecycle.finishing(("settle", "fence", "fence_adopt"), {"ok": True, "cause": "idle_timeout"})
            lifecycle.step(plan, "settled", **told, done=(done,))
        else:
            if view.sandbox.state == "ready":
                lifecycle.step(plan, "idle_timeout", **told)
            lifecycle.step(plan, "idle_timeout", **told)
        try:
            await lifecycle.commit(plan)
        except CorralError as error:
            if error.code != "conflict":
                raise
            return
        await lifecycle.destroy(sandbox_id, "idle_timeout")

    # -- changes ---------------------------------------------------------------------------------------------------------------
    async def extend(self, caller: Caller, sandbox_id: str, wish: Extension, lease: str | None = None) -> SandboxView:
        """Move the ends of a sandbox: both count from now. `policy_denied` over the caps."""
        core = self._core
        core.check_open()
        for denied in expiry.denied(core.policy, expiry.Wanted(wish.ttl_s, wish.idle_timeout_s)):
            raise CorralError("policy_denied", denied.reason, hint=denied.hint, field=f"/{denied.field}")

        async def attempt(view: SandboxView) -> SandboxView:
            seen = await core.store.see_sandbox(sandbox_id, caller.tenant_id)
            if seen is None:
                raise CorralError("not_found", f"there is no sandbox {sandbox_id[:64]}")
            view, row = seen.view, seen.view.sandbox
            if row.state in ENDING:
                raise gone(view)
            check_holder(view, caller, lease)
            if lease is not None:
                check_runs(seen)
            if row.one_shot:
                raise CorralError("illegal_transition", f"the sandbox {sandbox_id} belongs to a run, and ends with it")
            changes: Json = {}
            if wish.ttl_s is not None:
                changes["expires_at"] = seen.now_ms + round(wish.ttl_s * 1000)
            if wish.idle_timeout_s is not None:
                idle_s = expiry.idle_timeout_of(core.policy, wish.idle_timeout_s)
                changes["idle_timeout_ms"] = None if idle_s is None else max(1, round(idle_s * 1000))
            longer = changes.get("expires_at", row.expires_at) > row.expires_at
            if longer:  # first, or an end that nobody wants any more could still come
                await self._tell_node(view, wish.ttl_s)
            plan = Plan(view)
            self._lifecycle.step(plan, "set_expiry", changes=changes, metadata=changes, cause="extended")
            after = await self._lifecycle.commit(plan)
            if wish.ttl_s is not None and not longer:
                await self._tell_node(after, wish.ttl_s)
            return after

        view = await self._lifecycle.view(sandbox_id, caller.tenant_id)
        view = await self._lifecycle.retrying(sandbox_id, attempt, view)
        if view.lease is not None and view.lease.lease_owner == caller.owner:
            try:
                await core.store.renew_lease(sandbox_id, caller.owner, fence_of(view), ttl_of(view))
            except CorralError as error:
                if error.code != "lease_lost":
                    raise
        return view

    async def _tell_node(self, view: SandboxView, ttl_s: float | None) -> None:
        """The instance's own end follows."""
        assert ttl_s is not None
        node, instance_id, fence = self._core.node, instance_of(view), fence_of(view)
        try:
            await self._core.reach(lambda: node.extend_deadline(instance_id, fence, ttl_s + MARGIN_S))
        except CorralError as error:
            if error.code != "lease_lost":
                raise
            raise CorralError("conflict", f"the sandbox {view.sandbox.sandbox_id} has changed hands") from error
