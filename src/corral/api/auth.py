"""The gate of a listener: from what a caller sends to who he is.

Whoever is refused hears the same whatever was wrong with the key. Who tries many from one address is slowed down (`rate_limited`);
a good key is looked at first and passes from any address at any time. Refusals are audited, some of each address and of all.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from corral.api.calls import Request
from corral.api.keys import AdminKey
from corral.domain.identity import DEFAULT_TENANT
from corral.domain.records import AuditRecord
from corral.errors import CorralError
from corral.services.admission import Admission, Verdict
from corral.services.control import Services
from corral.services.events import Caller

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

WRONG, WRONG_MS = 30, 60_000
"""Wrong keys of one address in that time, before it is told to wait."""
AUDITED, AUDITED_MS = 60, 60_000
"""Refusals that are written down in that time, of all addresses; one of each."""
MAX_SECRET = 16 * 1024
LOOK_S = 0.75
"""How often the key of a call that goes on is looked at again."""
HINT = "send Authorization: Bearer KEY; clients of Corral take it from CORRAL_KEY"


def refused() -> CorralError:
    """What everybody hears who is not let in."""
    return CorralError("unauthorized", "the key is missing or wrong", hint=HINT)


class Gate:
    """`key` None: whoever comes is the holder of the state directory, as on its socket."""

    def __init__(self, services: Services, key: AdminKey | None) -> None:
        self._services = services
        self._key = key

    async def caller(self, request: Request, address: str) -> Caller:
        """Who it is; `unauthorized`, `rate_limited`, or that the store does not answer."""
        if self._key is None:
            return Caller()
        given = request.headers.get("authorization", "")
        if self._key.accepts(given):
            return Caller()
        secret = secret_of(given)
        if secret is None:
            raise refused()  # nothing was tried
        verdict = await self._admission.of(secret)
        if verdict.caller is not None:
            return verdict.caller
        await self._count(verdict, address)
        raise refused()

    async def still(self, request: Request) -> bool:
        """Whether who was let in would be let in again."""
        secret = secret_of(request.headers.get("authorization", ""))
        try:
            return secret is not None and (await self._admission.of(secret)).caller is not None
        except CorralError:
            return True  # a store that does not answer says nothing about a key

    @property
    def _admission(self) -> Admission:
        return self._services.identity.admission

    async def _count(self, verdict: Verdict, address: str) -> None:
        core = self._services.core
        address = network_of(address)
        counted = await core.coordination.count(f"wrong-key:{address}", 1, WRONG, WRONG_MS)
        if not counted.allowed:
            seconds = max(1, -(-counted.retry_after_ms // 1000))
            hint = f"wait {seconds} s, and send a key that is good: that passes at once"
            raise CorralError("rate_limited", "too many wrong keys from this address", hint=hint, retry_after_s=seconds)
        await self._note(verdict, address)

    async def _note(self, verdict: Verdict, address: str) -> None:
        core = self._services.core
        for key, most in ((f"refused:{address}", 1), ("refused", AUDITED)):
            if not (await core.coordination.count(key, 1, most, AUDITED_MS)).allowed:
                return
        about = verdict.key
        audit = AuditRecord(
            DEFAULT_TENANT if about is None else about.tenant_id,
            f"address:{address}",
            "auth.refused",
            "" if about is None else about.key_id,
            {"why": verdict.why},
        )
        try:
            await core.store.add_audit(audit)
        except CorralError as error:
            core.log(f"a refused key from {address} is not in the audit: {error}")


def network_of(address: str) -> str:
    """Whom an address counts for: itself, or its network where one host has a whole one (IPv6)."""
    try:
        given = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if (
        given.ipv4_mapped is not None
    ):  # as a listener for both families names who comes by IPv4: they are all in one network
        return str(given.ipv4_mapped)
    return str(ipaddress.ip_network((given, 64), strict=False))


def secret_of(authorization: str) -> str | None:
    """What stands behind `Bearer`, if anything does."""
    scheme, _, given = authorization.partition(" ")
    secret = given.strip()
    return secret if scheme.lower() == "bearer" and 0 < len(secret) <= MAX_SECRET else None


class Watch:
    """The client's side of a call whose key may end meanwhile: then it is as if the client had gone, and `over` says why.

    Costs nothing that is felt while the call is short.
    """

    def __init__(self, receive: Receive, still: Callable[[], Awaitable[bool]], gone: str) -> None:
        loop = asyncio.get_running_loop()
        self.over = False
        self._receive = receive
        self._still = still
        self._gone = gone
        self._ended: asyncio.Future[None] = loop.create_future()
        self._task: asyncio.Task[None] | None = None
        self._begin = loop.call_later(LOOK_S, self._start)

    def _start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while True:
            if not await self._still():
                break
            await asyncio.sleep(LOOK_S)
        self.over = True
        self._ended.set_result(None)

    async def receive(self) -> Message:
        """The next message of the client, or that it has gone."""
        if self._ended.done():
            return {"type": self._gone}
        inner = asyncio.ensure_future(self._receive())
        either: set[asyncio.Future[Any]] = {inner, self._ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return inner.result() if inner.done() else {"type": self._gone}
        finally:
            inner.cancel()

    async def waiting(self) -> Message:
        """In place of `receive`, to have the last word with a client that has not gone."""
        return await self._receive()

    def close(self) -> None:
        """The call is over."""
        self._begin.cancel()
        if self._task is not None:
            self._task.cancel()
