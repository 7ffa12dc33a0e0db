"""Webhooks: the end of a run is told to whom its caller named, signed, by whichever worker comes first, again until it is heard.

Where a request goes is decided here, each time anew: the URL is read again under the policy of now, its name is resolved once, every
address that it has is judged, and the connection is made to one of those. Nothing that a receiver answers is shown but its status.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from corral.domain.addresses import Address, judge, read_host
from corral.domain.records import AuditRecord, RunRecord
from corral.domain.webhook import (
    ATTEMPTS,
    Delivery,
    Target,
    new_secret,
    next_attempt_ms,
    parse_target,
    signature,
)
from corral.errors import CorralError
from corral.ports.delivery import DeliveryError, Post
from corral.ports.webhooks import Secrets
from corral.services.control import Core
from corral.services.documents import Documents, moment
from corral.services.events import Caller

Json = dict[str, Any]
WEBHOOKS = "webhooks"
"""The key that is rung when one is due."""
LOOK_S = 2.0
CLAIM_MS = 60_000
"""Longer than an attempt can take."""
AT_ONCE = 8
OVERLAP_MS = 24 * 3600 * 1000
"""How long an old secret signs beside the new one."""
TRIED_ADDRESSES = 2


class Webhooks:
    """See the module docstring."""

    def __init__(self, core: Core, documents: Documents) -> None:
        self._core = core
        self._documents = documents
        self._tries: set[asyncio.Task[Any]] = set()

    # -- deliveries ------------------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """The loop that runs as long as the service does."""
        if self._core.sender is not None:
            self._core.keep_on(self._loop, WEBHOOKS)

    def last_call(self) -> None:
        """At a stop: what has just become due is tried once, for an owner that lived for one run."""
        if self._core.sender is not None:
            self._core.spawn(self._last(), "last webhooks", last=True)

    async def _last(self) -> None:
        if await self._core.store.due_deliveries():
            await self.deliver()

    async def _loop(self) -> None:
        core = self._core
        with core.wakes.listen(WEBHOOKS) as woken:
            while True:
                try:
                    while await core.store.due_deliveries():
                        if not await self.deliver():
                            break
                except CorralError as error:
                    if error.code != "store_error":
                        core.log(f"webhooks: {error}")  # the next look comes
                await woken.wait(LOOK_S)
                woken.look()

    async def deliver(self) -> int:
        """Begin one attempt at each of some that are due; -> how many. None waits for the receiver of another, up to `AT_ONCE`."""
        core = self._core
        if len(self._tries) >= AT_ONCE:
            await asyncio.wait(self._tries, return_when=asyncio.FIRST_COMPLETED)
        claimed = await core.store.claim_deliveries(core.worker, CLAIM_MS, AT_ONCE - len(self._tries))
        # A stop waits for them, bounded: whoever ran one command only is gone with it.
        for each in claimed:
            task = core.spawn(self._attempt(each), each.delivery_id, last=True)
            self._tries.add(task)
            task.add_done_callback(self._tries.discard)
        return len(claimed)

    async def _attempt(self, delivery: Delivery) -> None:
        core = self._core
        status, error = None, None
        try:
            status = await self._send(delivery)
        except DeliveryError as failure:
            error = str(failure)
        except CorralError as failure:
            if failure.code != "not_found":
                raise  # the claim runs out, and another attempt is made
            error = failure.detail
        heard = status is not None and 200 <= status < 300
        retry_ms = next_attempt_ms(delivery.attempts)
        if status is not None and not heard:
            error = f"the receiver answered {status}" + (": redirects are not followed" if 300 <= status < 400 else "")
        error = error and core.discretion.text(error)
        gone = status == 410
        state = "delivered" if heard else "failed" if gone or retry_ms is None else "pending"
        await core.store.delivery_tried(
            delivery.delivery_id, core.worker, state=state, retry_ms=retry_ms, status=status, error=error
        )
        if state == "failed":
            data = {"run_id": delivery.run_id, "attempts": delivery.attempts, "error": error}
            await core.store.add_audit(
                AuditRecord(delivery.tenant_id, "system:webhooks", "webhook.failed", delivery.delivery_id, data)
            )

    async def _send(self, delivery: Delivery) -> int:
        core = self._core
        try:
            target = parse_target(delivery.url, core.policy.webhooks)
        except ValueError as error:
            raise DeliveryError(f"the policy does not allow the target any more: {error}") from error
        run = await core.store.get_run(delivery.run_id, delivery.tenant_id)
        if run is None:
            raise CorralError("not_found", "the run is gone")
        addresses = await self._addresses(target)
        body = json.dumps(await self._documents.run(run, output=False), separators=(",", ":")).encode()
        now_s = core.now_ms() // 1000
        headers = {
            "Content-Type": "application/json",
            "webhook-id": delivery.delivery_id,
            "webhook-timestamp": str(now_s),
            "webhook-signature": signature(await self._secrets(delivery), delivery.delivery_id, now_s, body),
        }
        assert core.sender is not None
        failure: DeliveryError | None = None
        for address in addresses[:TRIED_ADDRESSES]:
            try:
                return await core.sender.post(Post(target, address, headers, body))
            except DeliveryError as error:
                if error.connected:
                    raise
                failure = error
        raise failure or DeliveryError(f"the name {target.host} has no address")

    async def _addresses(self, target: Target) -> Sequence[Address]:
        """What the host stands for now, if all of it may be connected to: one bad address among good ones is no accident."""
        host = read_host(target.host)
        assert self._core.sender is not None
        found = await self._core.sender.resolve(host, target.port) if isinstance(host, str) else [host]
        for address in found:
            if (refusal := judge(address, self._core.policy.webhooks.private)) is not None:
                raise DeliveryError(f"the target is refused: {refusal}")
        return found

    async def _secrets(self, delivery: Delivery) -> list[str]:
        try:
            if delivery.secret is not None:
                return [self._core.sealer.unseal(delivery.secret, delivery.delivery_id)]
            mine = await self._of_tenant(delivery.tenant_id)
        except ValueError as error:
            raise DeliveryError(f"the secret cannot be read here: {error}") from error
        except CorralError as error:
            if error.code != "infra_error":
                raise
            raise DeliveryError(f"no secret can be made here: {error.detail}") from error
        return [mine.secret] if mine.old_secret is None else [mine.secret, mine.old_secret]

    async def _of_tenant(self, tenant_id: str) -> Secrets:
        """What the tenant's deliveries are signed with; ValueError if it cannot be read here."""
        fresh = self._new_secret()
        found = await self._core.store.webhook_secrets(tenant_id, self._core.sealer.seal(fresh, tenant_id))
        return self._readable(found, tenant_id)

    def _readable(self, sealed: Secrets, tenant_id: str) -> Secrets:
        """An old one that cannot be read any more is left out."""
        secret, old = self._core.sealer.unseal(sealed.secret, tenant_id), None
        with suppress(ValueError):
            old = sealed.old_secret and self._core.sealer.unseal(sealed.old_secret, tenant_id)
        return replace(sealed, secret=secret, old_secret=old, old_until=None if old is None else sealed.old_until)

    def _new_secret(self) -> str:
        return new_secret(self._core.entropy(24))

    # -- what is shown ---------------------------------------------------------------------------------------------------------
    async def of_run(self, run: RunRecord) -> Json | None:
        """`webhook` of a run's document."""
        if run.request.get("webhook") is None:
            return None
        delivery = await self._core.store.delivery_of(run.run_id, run.tenant_id)
        if delivery is None:
            return None
        return {
            "id": delivery.delivery_id,
            "url": delivery.url,
            "state": delivery.state,
            "attempts": delivery.attempts,
            "of_at_most": ATTEMPTS,
            "next_at": moment(delivery.next_at),
            "last_status": delivery.last_status,
            "last_error": delivery.last_error,
            "done_at": moment(delivery.done_at),
        }

    async def secret(self, caller: Caller) -> Json:
        """What the tenant's deliveries are signed with, where a run names no secret of its own."""
        try:
            return _secret_document(await self._of_tenant(caller.tenant_id))
        except ValueError as error:
            hint = "put back secret.key of the state directory, or make a new secret: POST /v1/webhooks/secret/rotate"
            raise CorralError("infra_error", f"the secret cannot be read here: {error}", hint=hint) from error

    async def rotate(self, caller: Caller) -> Json:
        """A new secret; the old one signs beside it for a day."""
        core = self._core
        sealed = core.sealer.seal(self._new_secret(), caller.tenant_id)
        fresh = await core.store.rotate_webhook_secret(caller.tenant_id, sealed, OVERLAP_MS)
        await core.store.add_audit(
            AuditRecord(caller.tenant_id, caller.actor, "webhook.secret_rotated", caller.tenant_id, {})
        )
        return _secret_document(self._readable(fresh, caller.tenant_id))


def _secret_document(secrets: Secrets) -> Json:
    return {
        "secret": secrets.secret,
        "created_at": moment(secrets.created_at),
        "old_secret_until": moment(secrets.old_until),
    }
