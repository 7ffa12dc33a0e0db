"""Leases of sandboxes: who has one, for how long, and how it changes hands. Decisions are in `domain.contention` and the table.

Taking over is a state: the store issues the token, the node journals it as its floor, the guest acknowledges it; by then nothing of an
older fence acts any more, and only then the lease is reported. A lease that ends is settled (`services.settling`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from corral import faults
from corral.domain import contention
from corral.domain.contention import Asker, Choice
from corral.domain.fence import Fence
from corral.domain.lease import BETWEEN, is_system, key_of, named, owner_name
from corral.domain.lease import lost as lease_lost
from corral.domain.records import AuditRecord, CommandRecord, Idempotency, LeaseRecord, SandboxView
from corral.errors import CorralError
from corral.ports.leases import Renewal, Seen
from corral.services.control import Core
from corral.services.events import Caller
from corral.services.execs import Execs, fence_of, instance_of
from corral.services.floors import Floors
from corral.services.lifecycle import Lifecycle
from corral.services.settling import UNSETTLED, Settling
from corral.services.transitions import Plan, gone

Json = dict[str, Any]
JOIN_S = 30.0
"""How long a call waits at least for a transition that ends by itself."""
RETRIES = 16
FENCING = ("fence", "fence_adopt")
MAKING = ("requested", "planning", "allocating", "provisioning", "locking")


@dataclass(frozen=True)
class Wish:
    """What an asker wants: see `POST /v1/sandboxes/{id}/attach`. `owner` None: the implicit lease."""

    owner: str | None
    ttl_ms: int
    contention: str | None = None
    wait_s: float = 30.0
    session: str | None = None


@dataclass(frozen=True)
class Held:
    """A lease as its holder hears of it; `left_ms` counts from the store's commit, so never from before the request was sent."""

    view: SandboxView
    lease: LeaseRecord
    left_ms: int

    @property
    def fence(self) -> Fence:
        return Fence(self.view.sandbox.incarnation, self.lease.lease_version)


@dataclass
class _Asked:
    """What was asked for under an idempotency key, and how many calls wait for it."""

    task: asyncio.Task[Held]
    waiting: int = 0


def held_by_another(sandbox_id: str, until_ms: int | None, now_ms: int) -> CorralError:
    """`lease_held`, with when to try again."""
    left_s = 1 if until_ms is None else max(1, min(60, math.ceil((until_ms - now_ms) / 1000)))
    hint = "wait for its end (contention=wait), or make a sandbox like it (contention=new)"
    return CorralError("lease_held", f"another owner has the sandbox {sandbox_id}", hint=hint, retry_after_s=left_s)


def under_way(view: SandboxView) -> CorralError:
    """`lease_held` by what the system does, which has lasted for longer than the caller waits."""
    row = view.sandbox
    detail = f"the sandbox {row.sandbox_id} is {row.state}, which takes its time"
    return CorralError("lease_held", detail, hint="try again in a moment, or wait longer (wait_s)", retry_after_s=1)


class Leases:
    """See the module docstring."""

    def __init__(self, core: Core, lifecycle: Lifecycle, execs: Execs) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._execs = execs
        self.floors = Floors(core, lifecycle)
        self._settling = Settling(core, lifecycle, self.floors)
        self._renewals: list[tuple[Renewal, asyncio.Future[tuple[int, LeaseRecord]]]] = []
        self._renewing = False
        self._asked: dict[str, _Asked] = {}

    # -- acquire ---------------------------------------------------------------------------------------------------------------
    async def attach(self, caller: Caller, sandbox_id: str, wish: Wish, key: str | None = None) -> Held:
        """`acquire`; asked for again under the same key, such as after a broken connection, it is the same lease while that is
        the current one, also from another worker or after a crash; with `new` the same sandbox.

        Only of the same caller: another one's owner of this name is somebody else. When nobody waits for it any more it is given up, so
        that no client that is gone gets the sandbox, or takes it from its own next call.
        """
        if key is None:
            return await self.acquire(caller, sandbox_id, wish)
        digest = _digest(caller, sandbox_id, wish, key)
        asked = self._asked.get(digest)
        if asked is None or asked.task.done():
            task = self._core.spawn(self.acquire(caller, sandbox_id, wish, digest), f"{sandbox_id} attach")
            asked = self._asked[digest] = _Asked(task)
        asked.waiting += 1
        try:
            return await asyncio.shield(asked.task)
        finally:
            asked.waiting -= 1
            if not asked.waiting:
                asked.task.cancel()  # nothing, if it is done
                if self._asked.get(digest) is asked:
                    del self._asked[digest]

    async def acquire(self, caller: Caller, sandbox_id: str, wish: Wish, digest: str | None = None) -> Held:
        """The sandbox under a lease of the asker, from whatever state it is in. See `domain.contention` for who gets it.

        `digest`: of a call that may be a repeated one, which gets what the first one was given.
        """
        core = self._core
        if digest is not None and wish.contention == "new":
            made = await core.store.made_under(_idempotency(caller, digest))
            if made is not None:  # even where the sandbox that was asked for has come free meanwhile
                return await self._made(caller, await self._lifecycle.view(made, caller.tenant_id), wish, digest)
        asker = Asker(caller.owner, wish.owner, wish.session, caller.user_id)
        loop = asyncio.get_running_loop()
        begun, races = loop.time(), 0
        with core.wakes.listen(sandbox_id) as woken:
            while True:
                core.check_open()
                woken.look()
                seen = await self._seen(sandbox_id, caller.tenant_id)
                view, lease = seen.view, _lease(seen.view)
                choice = contention.decide(view.sandbox, lease, asker, seen.now_ms)
                wanted = contention.contention_of(wish.contention, view.sandbox, asker)
                if choice.kind in ("take_over", "paused") and _repeated(view, asker, digest):
                    try:
                        return await self._again(view, seen.now_ms)
                    except CorralError as error:
                        races += 1
                        if error.code != "conflict" or races > RETRIES:
                            raise
                    continue
                match choice.kind:
                    case "have":
                        return Held(view, lease, max(0, lease.expires_at - seen.now_ms))
                    case "gone":
                        raise gone(view)
                    case "paused":
                        raise CorralError(
                            "sandbox_paused", f"the sandbox {sandbox_id} is paused", hint="resume it first"
                        )
                    case "unfit" | "held" if wanted == "new":
                        return await self._another(caller, view, wish, digest)
                    case "unfit":
                        hint = "make a sandbox of your own (contention=new)"
                        why = f"the sandbox {sandbox_id} cannot be used: {choice.why}"
                        raise CorralError("conflict", why, hint=hint, retryable=False)
                    case "held" if wanted == "fork":
                        detail = "this version does not fork a sandbox that another owner has"
                        raise CorralError("not_supported_yet", detail, hint="new, wait or fail", field="/contention")
                    case "held" | "join":
                        # The end of a transition is waited for by everybody: it comes by itself.
                        patience_s = wish.wait_s if wanted == "wait" else 0.0
                        if choice.kind == "join":
                            patience_s = max(patience_s, JOIN_S)
                        left_s = begun + patience_s - loop.time()
                        if left_s <= 0 and choice.kind == "join":
                            raise under_way(view)
                        if left_s <= 0:
                            raise held_by_another(sandbox_id, choice.until_ms, seen.now_ms)
                        if choice.until_ms is not None:
                            left_s = min(left_s, max(0.0, (choice.until_ms - seen.now_ms) / 1000) + 0.005)
                        core.check_staying()
                        await woken.wait(left_s)
                        continue
                try:
                    if choice.kind == "expire":
                        await self.expire(view)
                    elif (held := await self._take(view, choice, asker, wish, digest)) is not None:
                        return held
                except CorralError as error:
                    races += 1
                    # Somebody was quicker: the fence that ran out is another one now, or the sandbox has moved on.
                    if error.code not in ("conflict", "lease_lost") or races > RETRIES:
                        raise

    async def _seen(self, sandbox_id: str, tenant_id: str | None) -> Seen:
        seen = await self._core.store.see_sandbox(sandbox_id, tenant_id)
        if seen is None:
            hint = "corral sandbox ls --all lists them"
            raise CorralError("not_found", f"there is no sandbox {sandbox_id[:64]}", hint=hint)
        return seen

    async def _again(self, view: SandboxView, now_ms: int) -> Held:
        """The lease that the call has been given before, once node and guest know it: whoever took it may have ended before that."""
        lease = _lease(view)
        if view.sandbox.state != "paused" and await self._unfenced(view):
            await self._barrier(view, "adopt")  # what runs by now is the caller's own
            self._core.spawn(self._fenced(view), f"{view.sandbox.sandbox_id} fenced")
        return Held(view, lease, max(0, lease.expires_at - now_ms))

    async def _unfenced(self, view: SandboxView) -> list[CommandRecord]:
        """The open commands by which node and guest are to know the current fence."""
        commands = await self._core.store.open_commands(view.sandbox.sandbox_id)
        return [one for one in commands if one.kind in FENCING and one.token == fence_of(view).token]

    async def _fenced(self, view: SandboxView) -> None:
        for command in await self._unfenced(view):
            await self._core.store.finish_command(command.command_id, self._core.worker, {"ok": True})

    async def _take(
        self, view: SandboxView, choice: Choice, asker: Asker, wish: Wish, digest: str | None
    ) -> Held | None:
        """None: the check that was under way has been brought to its end, but for another call of the same owner. Ask again."""
        lifecycle = self._lifecycle
        if choice.kind != "go_on":
            changes = None
            if wish.session is not None and view.sandbox.session_id is None:
                changes = {"session_id": wish.session}  # from now on it is that session's
            plan = Plan(view)
            lifecycle.step(
                plan, "acquire", choice.flags, owner=asker.name, ttl_ms=wish.ttl_ms, changes=changes, cause="acquire"
            )
            [step] = plan.transitions
            assert step.lease is not None
            plan.transitions[0] = replace(step, lease=replace(step.lease, request_digest=digest))
            faults.point("lease.taken.before")
            view = await lifecycle.commit(plan)
            faults.point("lease.taken")
        await self._barrier(view, "adopt" if choice.kind == "take_over" else "kill")
        faults.point("lease.fenced")
        if view.sandbox.state == "reuse_checking":
            changes = await self._clean(view)
            plan = Plan(view)
            lifecycle.step(plan, "verdict_reuse", changes=changes, done=(lifecycle.finishing(FENCING, {"ok": True}),))
            view = await lifecycle.commit(plan)
            if choice.kind == "go_on" and (digest is None or _lease(view).request_digest != digest):
                return None  # or two calls would be told the same fence
        else:
            self._core.spawn(self._fenced(view), f"{view.sandbox.sandbox_id} fenced")
        lease = _lease(view)
        return Held(view, lease, max(0, lease.expires_at - lease.heartbeat_at))

    async def _clean(self, view: SandboxView) -> Json:
        """Do what could not be done when the last lease ended, as the sandbox stood still; -> what changes by that."""
        row = view.sandbox
        if UNSETTLED not in row.conditions:
            return {}
        left = await self._settling.clean(view)
        if left is None:
            return {"conditions": {name: value for name, value in row.conditions.items() if name != UNSETTLED}}
        after = await self._lifecycle.fire(view, "probe_failed", cause="unknown_history", metadata={"left": left})
        self._core.log(f"{row.sandbox_id} is not used again: {left}")
        work = self._lifecycle.destroy(row.sandbox_id, "unknown_history")
        self._core.spawn(work, f"{row.sandbox_id} unsettled", last=True)
        raise gone(after)

    async def _barrier(self, view: SandboxView, mode: Any) -> None:
        """Node and guest know the fence; `conflict` when they know a newer one: look again."""
        sandbox_id = view.sandbox.sandbox_id
        try:
            await self._core.node.fence(instance_of(view), fence_of(view), mode)
        except CorralError as error:
            if error.code == "lease_lost":
                await self.floors.heard(sandbox_id, error)
                raise CorralError("conflict", f"the sandbox {sandbox_id} has been taken over meanwhile") from error
            if error.code in ("sandbox_lost", "guest_lost", "not_found"):
                if view.sandbox.state == "reuse_checking":
                    await self._lifecycle.fire(view, "probe_failed", cause="probe_failed")
                self._core.spawn(self._lifecycle.lost(sandbox_id, "instance_gone"), f"{sandbox_id} lost", last=True)
                raise CorralError(
                    "sandbox_lost", f"the sandbox {sandbox_id} is lost", hint="create a new one"
                ) from error
            raise

    async def _another(self, caller: Caller, view: SandboxView, wish: Wish, digest: str | None) -> Held:
        """A new sandbox like it, for the asker."""
        core = self._core
        core.check_accepting()
        wanted = replace(self._lifecycle.wanted_of(view), sandbox_id=core.id("sbx"), owner=caller.owner, one_shot=False)
        made, _ = await self._lifecycle.begin(wanted, None if digest is None else _idempotency(caller, digest))
        return await self._made(caller, made, wish, digest)

    async def _made(self, caller: Caller, made: SandboxView, wish: Wish, digest: str | None) -> Held:
        """The sandbox that was made for the asker, by this call or by the one that it repeats."""
        if made.sandbox.state in contention.OVER:
            raise gone(made)
        if made.sandbox.state in MAKING:
            await self._lifecycle.provide(self._lifecycle.wanted_of(made), made)
        return await self.acquire(caller, made.sandbox.sandbox_id, replace(wish, contention="fail"), digest)

    # -- renew and release -----------------------------------------------------------------------------------------------------
    async def renew(self, caller: Caller, sandbox_id: str, fence: Fence, owner: str | None, ttl_ms: int | None) -> Held:
        """The committed expiry of the holder's lease, extended when it is due; `lease_lost` once it has expired, for ever."""
        seen = await self._seen(sandbox_id, caller.tenant_id)
        self._check_ours(seen.view, caller, fence, owner)
        lease = _lease(seen.view)
        name = str(lease.lease_owner)
        try:
            now, lease = await self.extend(Renewal(sandbox_id, name, fence, ttl_ms or ttl_of(seen.view)))
        except CorralError as error:
            raise await self.ending(error, sandbox_id) from error
        return Held(seen.view, lease, max(0, lease.expires_at - now))

    @staticmethod
    def _check_ours(view: SandboxView, caller: Caller, fence: Fence, owner: str | None) -> None:
        if view.sandbox.state in contention.OVER:
            raise gone(view)
        holder = _lease(view).lease_owner
        if fence != fence_of(view) or holder is None or is_system(holder):
            raise lease_lost(f"the lease {fence} is not the current one")
        if key_of(holder) != caller.owner or (owner is not None and holder != owner_name(caller.owner, owner)):
            raise lease_lost("another owner has taken the sandbox")

    async def extend(self, renewal: Renewal) -> tuple[int, LeaseRecord]:
        """(the store's clock, the lease). What is asked for while one batch is being written goes with the next."""
        future: asyncio.Future[tuple[int, LeaseRecord]] = asyncio.get_running_loop().create_future()
        self._renewals.append((renewal, future))
        if not self._renewing:
            self._renewing = True
            task = self._core.spawn(self._renew_all(), "renewals")
            task.add_done_callback(lambda ended: self._not_renewed(self._renewals) if ended.cancelled() else None)
        return await future

    async def _renew_all(self) -> None:
        batch: list[tuple[Renewal, asyncio.Future[tuple[int, LeaseRecord]]]] = []
        try:
            while self._renewals:
                batch, self._renewals = self._renewals, []
                try:
                    now, answers = await self._core.store.renew_leases([renewal for renewal, _ in batch])
                except CorralError as error:
                    now, answers = 0, [error] * len(batch)
                for (_, future), answer in zip(batch, answers, strict=True):
                    if future.done():
                        continue
                    if isinstance(answer, CorralError):
                        future.set_exception(answer)
                    else:
                        future.set_result((now, answer))
        finally:
            self._renewing = False
            self._not_renewed([*batch, *self._renewals])

    def _not_renewed(self, asked: list[tuple[Renewal, asyncio.Future[tuple[int, LeaseRecord]]]]) -> None:
        """Whoever waits for these hears why nobody writes them any more: the next owner is to be asked, if the service stops."""
        self._renewals = []
        why = self._core.as_seen(CorralError("infra_error", "the lease could not be extended", retryable=True))
        for _, future in asked:
            if not future.done():
                future.set_exception(why)

    async def release(
        self, caller: Caller, sandbox_id: str, fence: Fence, owner: str | None, *, keep: bool = False
    ) -> SandboxView:
        """Give it back: what ran is ended and the sandbox settled, beside the caller. Again: the same answer.

        `keep`: execs that no client is attached to go on under the system; the sandbox is settled after the last one.
        """

        async def attempt(view: SandboxView) -> SandboxView:
            holder = _lease(view).lease_owner
            if holder == "system:released" and fence_of(view) == Fence(fence.incarnation, fence.token + 1):
                return view
            self._check_ours(view, caller, fence, owner)
            return await self._end(view, "release", "released", fence, keep=keep)

        try:
            view = await self._lifecycle.view(sandbox_id, caller.tenant_id)
            return await self._lifecycle.retrying(sandbox_id, attempt, view)
        except CorralError as error:
            raise await self.ending(error, sandbox_id) from error

    async def expire(self, view: SandboxView) -> SandboxView:
        """Commit that the lease has run out; `conflict` unless it has, by the store's clock."""
        return await self._end(view, "lease_expired", "lease_expired", fence_of(view), only_expired=True)

    async def _end(
        self,
        view: SandboxView,
        event: str,
        cause: str,
        fence: Fence,
        *,
        only_expired: bool = False,
        keep: bool = False,
    ) -> SandboxView:
        sandbox_id, flags, attached = view.sandbox.sandbox_id, [], []
        if keep and view.sandbox.state == "running":
            execs = await self._core.store.open_execs(sandbox_id)
            attached = [record for record in execs if record.attached]
            if len(attached) < len(execs):
                flags.append("detached_execs")
        plan = Plan(view)
        stands = view.sandbox.state == "paused"
        unsettled = {"conditions": {**view.sandbox.conditions, UNSETTLED: True}} if stands else None
        self._lifecycle.step(plan, event, flags, cause=cause, changes=unsettled)
        [step] = plan.transitions
        assert step.lease is not None
        change = replace(step.lease, if_expired=only_expired, if_held=not only_expired)
        plan.transitions[0] = replace(step, expect_fence=fence, lease=change)
        after = await self._lifecycle.commit(plan)
        if after.sandbox.state == "recycling":
            self._settling.later(sandbox_id)
        elif after.sandbox.state == "running":
            for record in attached:
                changes = {"cancel_requested": record.cancel_requested or "lease_lost"}
                await self._core.store.update_exec(
                    record.exec_id, expect_states=("starting", "running"), changes=changes
                )
                self._execs.request_end(record.exec_id, changes["cancel_requested"])
            await self._barrier(after, "adopt")
        return after

    async def condemn(self, view: SandboxView, fence: Fence, audit: AuditRecord) -> None:
        """The holder's own end of the sandbox, committed only while `fence` is the current one: a stale holder ends nothing."""

        async def attempt(seen: SandboxView) -> SandboxView:
            if seen.sandbox.state in ("sanitizing", "terminated"):
                return seen
            plan = Plan(seen)
            self._lifecycle.step(plan, "destroy", cause="deleted", metadata={"cause": "deleted"}, audit=audit)
            [step] = plan.transitions
            assert step.lease is not None
            plan.transitions[0] = replace(step, expect_fence=fence, lease=replace(step.lease, if_held=True))
            return await self._lifecycle.commit(plan)

        await self._lifecycle.retrying(view.sandbox.sandbox_id, attempt, view)

    async def page(self, caller: Caller, *, after: str | None, limit: int) -> tuple[list[Seen], str | None]:
        """What the tenant's callers have."""
        found = await self._core.store.list_leases(caller.tenant_id, after=after, limit=limit + 1)
        following = found[limit - 1].view.sandbox.sandbox_id if len(found) > limit else None
        return found[:limit], following

    async def ending(self, error: CorralError, sandbox_id: str) -> CorralError:
        """What a call met because the sandbox was ending is told by why it ends."""
        if error.code == "lease_lost":
            view = await self._core.store.get_sandbox(sandbox_id, None)
            if view is not None and view.sandbox.state in contention.OVER:
                return gone(view)
        return error

    # -- what others left ------------------------------------------------------------------------------------------------------
    async def sweep(self) -> None:
        """See whether the store is what it was, take back what has run out, settle what a dead worker was settling."""
        await self.floors.look()
        for view in await self._core.store.due_leases():
            try:
                await self.expire(view)
            except CorralError as error:
                if error.code not in ("conflict", "lease_lost"):
                    raise
        await self._settling.take_over()

    async def interrupted(self, view: SandboxView) -> None:
        """Whoever recycled or checked the sandbox is gone, or stands still: the one is done over, of the other nothing was changed."""
        if view.sandbox.state == "recycling":
            self._settling.later(view.sandbox.sandbox_id)
            return
        try:
            await self._lifecycle.fire(view, "claim_lost", cause="claim_lost")
        except CorralError as error:
            if error.code != "conflict":
                raise


def _lease(view: SandboxView) -> LeaseRecord:
    assert view.lease is not None
    return view.lease


def _digest(caller: Caller, sandbox_id: str, wish: Wish, key: str) -> str:
    """Of a call with its idempotency key: the same only where caller, key and all that is asked for are."""
    whole = [caller.tenant_id, caller.owner, caller.user_id, sandbox_id, key, *vars(wish).values()]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


def _idempotency(caller: Caller, digest: str) -> Idempotency:
    return Idempotency(caller.tenant_id, "POST /v1/sandboxes/{sandbox_id}/attach", digest, digest)


def _repeated(view: SandboxView, asker: Asker, digest: str | None) -> bool:
    """The current lease is the one that the call was given before."""
    lease = _lease(view)
    same = digest is not None and lease.request_digest == digest and lease.lease_owner == asker.name
    return same and view.sandbox.state in ("leased", "running", "paused")


def ttl_of(view: SandboxView) -> int:
    """How long the lease of a sandbox is extended for: an implicit one for as long as the sandbox was asked for."""
    lease, row = _lease(view), view.sandbox
    if lease.lease_owner is not None and BETWEEN in lease.lease_owner:
        return max(1, lease.expires_at - lease.heartbeat_at)
    return max(1000, row.expires_at - row.created_at)


def lease_document(held: Held) -> Json:
    """LEASE of the API."""
    from corral.services.documents import moment

    lease = held.lease
    return {
        "sandbox_id": lease.sandbox_id,
        "owner": named(lease.lease_owner),
        "implicit": lease.lease_owner is not None and BETWEEN not in lease.lease_owner,
        "incarnation": held.view.sandbox.incarnation,
        "lease_version": lease.lease_version,
        "lease": str(held.fence),
        "ttl_ms": held.left_ms,
        "acquired_at": moment(lease.acquired_at),
        "expires_at": moment(lease.expires_at),
        "session": held.view.sandbox.session_id,
        "state": held.view.sandbox.state,
    }
