"""The queue of runs as a service: what a run asks for, waiting for its turn, and letting the next ones in.

Whoever ends something (a run, a sandbox) wakes the loop here, which admits what there is room for now, whoever drives it; besides it
looks each second, so that a worker that died in between holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from corral.domain.guard import GuardDecision
from corral.domain.identity import DEFAULT_TENANT
from corral.domain.limits import Limits
from corral.domain.quantities import format_seconds
from corral.domain.queue import cost_of
from corral.domain.quota import EVERYBODY, PRIORITIES, RUNNING, Amounts, Ceiling, sandbox_amounts, too_large
from corral.domain.records import RunRecord
from corral.domain.request import RunRequest
from corral.domain.webhook import check_literal, parse_target, parse_webhook
from corral.errors import CorralError
from corral.ports.queue import Entry, QueuedRun, Ticket
from corral.services.control import Core
from corral.services.documents import moment
from corral.services.events import Caller

Json = dict[str, Any]
QUEUE = "queue"
"""The key that is rung when room may have come free. Here only: the others look by themselves."""
LOOK_S = 1.0
AT_ONCE = 16
"""Runs that one transaction admits."""


class Queue:
    """See the module docstring."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waits: dict[str, asyncio.Event] = {}

    # -- what a run asks for ---------------------------------------------------------------------------------------------------
    def ticket(self, request: RunRequest) -> Ticket:
        """What goes with a run when it is submitted; `invalid_value` for a webhook that cannot be."""
        core = self._core
        if request.webhook is None:
            return Ticket(core.quota)
        hook = parse_webhook(request.webhook, core.policy.webhooks, core.id("whd"))
        try:
            check_literal(parse_target(hook.url, core.policy.webhooks), core.policy.webhooks)
        except ValueError as error:
            hint = "a host that can be reached from here; the operator names private ranges (webhooks.private)"
            raise CorralError("invalid_value", str(error), hint=hint, field="/webhook") from error
        if hook.secret is not None:
            hook = replace(hook, secret=core.sealer.seal(hook.secret, hook.delivery_id))
        return Ticket(core.quota, hook)

    def compared(self, document: Any) -> Any:
        """The request as a repetition is compared with it: the secret of the webhook as a mark, since what is compared is kept."""
        hook = document.get("webhook") if isinstance(document, dict) else None
        if isinstance(hook, dict) and isinstance(secret := hook.get("secret"), str):
            return {**document, "webhook": {**hook, "secret": self._core.sealer.mark(secret)}}
        return document

    @staticmethod
    def stored(document: Json) -> Json:
        """The request as its row keeps it: without the secret of the webhook."""
        hook = document.get("webhook")
        if isinstance(hook, dict) and "secret" in hook:
            return {**document, "webhook": {name: value for name, value in hook.items() if name != "secret"}}
        return document

    def entry(self, request: RunRequest, limits: Limits) -> Entry:
        """What a run that is ready to start needs."""
        core, amounts = self._core, sandbox_amounts(limits)
        wait_s = request.queue_timeout_s if request.queue_timeout_s is not None else core.policy.queue.timeout_s
        return Entry(
            sandbox_id=core.id("sbx"),
            amounts=amounts,
            cost=cost_of(amounts, request.expected_s, limits.wall_s),
            priority=request.priority,
            timeout_ms=max(1, round(wait_s * 1000)),
        )

    # -- its turn --------------------------------------------------------------------------------------------------------------
    async def place(self, run: RunRecord, changes: Json, entry: Entry) -> RunRecord:
        """The run `starting` if there is room for it, else `queued`. Safe to repeat."""
        core = self._core

        async def attempt() -> RunRecord:
            try:
                return await core.store.place_run(
                    run.run_id, changes=changes, entry=entry, rules=core.quota, driver=core.driver
                )
            except CorralError as error:
                row = await core.store.get_run(run.run_id, run.tenant_id) if error.code == "conflict" else None
                if row is None or row.state not in ("queued", "starting"):
                    raise
                return row  # an attempt before was committed although it seemed to fail

        return await core.endure(attempt)

    async def turn(self, run: RunRecord) -> RunRecord:
        """Returns when the run waits no more; `queue_timeout` if it has waited as long as it may."""
        core, run_id = self._core, run.run_id
        event = self._waits.setdefault(run_id, asyncio.Event())
        try:
            while (queued := await core.endure(lambda: core.store.queued_run(run_id, run.tenant_id))) is not None:
                left_s = (queued.deadline_at - core.store_ms()) / 1000
                if left_s <= 0:
                    raise await self._too_late(queued)
                try:
                    async with asyncio.timeout(left_s):
                        await event.wait()
                except TimeoutError:
                    pass
                event.clear()
        finally:
            self._waits.pop(run_id, None)
        row = await core.endure(lambda: core.store.get_run(run_id, run.tenant_id))
        if row is None or (row.state != "finished" and row.sandbox_id is None):  # let in by nobody, and not there
            raise CorralError(
                "infra_error",
                "the database was restored to a copy from before the run was queued",
                hint="send it again",
                started=False,
            )
        if row.state != "finished" and run.tenant_id != DEFAULT_TENANT:  # which cannot be disabled
            tenant = await core.endure(lambda: core.store.get_tenant(run.tenant_id))
            if tenant is not None and tenant.disabled_at is not None:  # one that is gone has no open runs
                hint = "an admin enables it again: corral tenant enable"
                raise CorralError("policy_denied", "its tenant was disabled while it waited", hint=hint, started=False)
        return row

    async def _too_late(self, queued: QueuedRun) -> CorralError:
        waited = format_seconds((queued.deadline_at - queued.queued_at) / 1000)
        why = await self.lacking(queued)
        return CorralError(
            "queue_timeout",
            f"no room came free within {waited}; it was number {queued.position} of its tenant's queue"
            + (f", waiting for {why}" if why else ""),
            hint="send it again, with a longer queue_timeout_s, or ask for less",
            started=False,
        )

    async def lacking(self, queued: QueuedRun) -> str | None:
        """The limit that is used up for this run, such as `tenants.running`; None = its turn has not come."""
        store = self._core.store
        mine, everybody = await store.tenant_use(queued.tenant_id), await store.tenant_use(EVERYBODY)
        return self._core.quota.passed(queued.tenant_id, mine.use, everybody.use, queued.demand)

    # -- who is next -----------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """The loop that runs as long as the service does."""
        self._core.keep_on(self._loop, QUEUE)

    async def _loop(self) -> None:
        core = self._core
        with core.wakes.listen(QUEUE) as woken:
            while True:
                await woken.wait(LOOK_S)
                woken.look()
                if core.coordination.alone and not self._waits:
                    continue  # what waits is ours, and nothing does
                try:
                    if await core.store.waiting():
                        await self.admit()
                    if not core.coordination.alone:
                        await self._see_admitted()
                except CorralError as error:
                    if error.code != "store_error":
                        core.log(f"queue: {error}")  # the next look comes

    async def admit(self) -> None:
        """Let in what there is room for."""
        core = self._core
        while True:
            runs = await core.store.admit(core.quota, [core.id("sbx") for _ in range(AT_ONCE)])
            for run in runs:
                if (event := self._waits.get(run.run_id)) is not None:
                    event.set()
                core.wakes.ring(run.run_id, run)
            if runs and not core.coordination.alone:
                core.coordination.ring((QUEUE,))  # those who drive them
            if len(runs) < AT_ONCE:
                return

    async def _see_admitted(self) -> None:
        """Runs of ours that another worker has let in, or ended."""
        mine: Sequence[str] = list(self._waits)
        if not mine:
            return
        there = await self._core.store.still_queued(mine)
        for run_id in set(mine) - there:
            if (event := self._waits.get(run_id)) is not None:
                event.set()

    # -- what is shown ---------------------------------------------------------------------------------------------------------
    async def of_run(self, run: RunRecord) -> Json | None:
        """`queue` of a run's document: where it stands, while it waits."""
        if run.state != "queued":
            return None
        queued = await self._core.store.queued_run(run.run_id, run.tenant_id)
        if queued is None:
            return None
        return {**_item(queued), "ahead": queued.position - 1, "waiting_for": await self.lacking(queued)}

    async def show(self, caller: Caller, limit: int) -> Json:
        """`GET /v1/queue`: the tenant's queued runs in their order, what it holds, and what it may."""
        store, rules = self._core.store, self._core.quota
        use = await store.tenant_use(caller.tenant_id)
        items = [
            {"run_id": each.run_id, **_item(each)} for each in await store.list_queue(caller.tenant_id, limit=limit)
        ]
        limits = rules.of(caller.tenant_id)
        return {
            "items": items,
            "waiting": use.waiting,
            "use": _amounts(use.use),
            "limits": _ceiling(limits.ceiling),
            "weight": limits.weight,
            "priorities": [name for name in PRIORITIES if name in limits.priorities],
        }

    # -- whether it is right ---------------------------------------------------------------------------------------------------
    async def drift(self) -> list[Json]:
        """`quota` of `corral doctor`: where what is reserved is not what is live."""
        return [
            {"kind": each.kind, "subject": each.subject, **each.data} for each in await self._core.store.quota_drift()
        ]

    async def mend(self) -> int:
        """Set right what does not agree; -> how many places. Told in the log: it is a fault."""
        mended = await self._core.store.mend_quota()
        for each in mended:
            self._core.log(f"quota: {each.kind} {each.subject}: {each.data}")
        if mended:
            self._core.wakes.heard(QUEUE)
        return len(mended)


def judged(core: Core, decision: GuardDecision, tenant_id: str, request: RunRequest | None = None) -> GuardDecision:
    """The guard's decision, or a denial of what could never be admitted, however long it waited. `request`: of a run."""
    if not decision.allowed:
        return decision
    rules, amounts = core.quota, sandbox_amounts(decision.limits)
    rule = rules.never(tenant_id, amounts + RUNNING if request is not None else amounts)
    if rule is not None:
        why, hint = too_large(rules, tenant_id, rule, amounts)
        return replace(decision, verdict="deny", reason=why, hint=hint, rule=rule)
    if request is None:
        return decision
    allowed = rules.of(tenant_id).priorities
    if request.priority not in allowed:
        words = [name for name in PRIORITIES if name in allowed]
        return replace(
            decision,
            verdict="deny",
            reason=f"the priority {request.priority} is not allowed for this tenant",
            hint=f"use {' or '.join(words)}",
            suggested={"priority": words[0]},
            rule="tenants.priorities",
        )
    most = core.policy.queue.max_timeout_s
    if request.queue_timeout_s is not None and request.queue_timeout_s > most:
        asked = format_seconds(request.queue_timeout_s)
        return replace(
            decision,
            verdict="deny",
            reason=f"queue_timeout_s of {asked} is over the cap of {format_seconds(most)}",
            hint=f"ask for queue_timeout_s of at most {most:g}",
            suggested={"queue_timeout_s": most},
            rule="queue.max_timeout_s",
        )
    return decision


def _item(queued: QueuedRun) -> Json:
    return {
        "position": queued.position,
        "priority": queued.priority,
        "queued_at": moment(queued.queued_at),
        "deadline_at": moment(queued.deadline_at),
    }


def _amounts(amounts: Amounts) -> Json:
    return {**amounts.as_dict(), "cpu": amounts.cpu / 1000}


def _ceiling(ceiling: Ceiling) -> Json:
    cpu = None if ceiling.cpu is None else ceiling.cpu / 1000
    names = ("queued", "running", "sandboxes", "cpu", "memory")
    return {**{name: getattr(ceiling, name) for name in names}, "cpu": cpu}
