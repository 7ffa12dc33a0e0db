"""Who a caller is, by the secret that he sends: a key of the store, or a token of the operator's issuer.

What was found holds for `HOLDS_S`, so that a busy key costs one read in that time, and a key that is revoked is refused a moment
later, at every replica and without a word between them. Keys that are refused are remembered apart: whoever tries many cannot push
out those that are good. A store that does not answer is a `store_error`, never a refusal.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace

from corral.domain.identity import DEFAULT_TENANT, KeyRecord, UserRecord, is_of, parse_key, user_id_of, with_included
from corral.domain.ids import ulid_of
from corral.domain.records import AuditRecord
from corral.errors import CorralError
from corral.ports.identity import Claims, TokenVerifier
from corral.services.control import Core
from corral.services.events import Caller

HOLDS_S = 0.75
KNOWN = 4096
TOUCH_MS = 60_000
"""How exact `last_used_at` is."""


@dataclass(frozen=True)
class Verdict:
    """Who it is, or why nobody: that is for the log and the audit, a caller hears the same of all."""

    caller: Caller | None
    why: str = ""
    key: KeyRecord | None = None
    """The key that was named, if there is one."""


class Admission:
    """See the module docstring."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.tokens: TokenVerifier | None = None
        self._good: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()
        self._bad: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Verdict]] = {}
        self._epoch = 0

    async def of(self, text: str) -> Verdict:
        """The verdict over a secret; the same one for `HOLDS_S`."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        now = asyncio.get_running_loop().time()
        for known in (self._good, self._bad):
            if (found := known.get(digest)) is not None and now < found[1]:
                return found[0]
        task = self._asking.get(digest)
        if task is None:
            task = self._asking[digest] = asyncio.get_running_loop().create_task(self._ask(text, digest))
            task.add_done_callback(lambda ended: self._asked(digest, ended))
        return await asyncio.shield(task)

    def forget(self) -> None:
        """Something about keys was changed here: judge each anew."""
        self._epoch += 1
        self._good.clear()
        self._bad.clear()
        self._asking.clear()

    def _asked(self, digest: bytes, ended: asyncio.Task[Verdict]) -> None:
        if self._asking.get(digest) is ended:
            del self._asking[digest]
        if not ended.cancelled():
            ended.exception()  # whoever waited has it

    async def _ask(self, text: str, digest: bytes) -> Verdict:
        epoch, began = self._epoch, asyncio.get_running_loop().time()
        verdict, left_s = await self._judge(text)
        if verdict.caller is not None and verdict.caller.tenant_id != DEFAULT_TENANT and not self._core.policy.shared:
            # There is a second tenant, whichever replica made it: its first call must find that known.
            self._core.policy = replace(self._core.policy, shared=True)
        if epoch == self._epoch:
            known = self._bad if verdict.caller is None else self._good
            known[digest] = (verdict, began + min(HOLDS_S, left_s))
            known.move_to_end(digest)
            if len(known) > KNOWN:
                known.popitem(last=False)
        return verdict

    async def _judge(self, text: str) -> tuple[Verdict, float]:
        """(verdict, for how many seconds it can hold)."""
        parsed = parse_key(text)
        if parsed is not None:
            return await self._key(*parsed)
        if self.tokens is not None and self.tokens.may_be(text):
            try:
                claims = await self.tokens.verify(text)
            except CorralError as error:
                if error.code != "unauthorized":
                    raise
                return Verdict(None, f"token: {error.detail}"), HOLDS_S
            return await self._token(claims)
        return Verdict(None, "no key"), HOLDS_S

    async def _key(self, key_id: str, secret: bytes) -> tuple[Verdict, float]:
        view = await self._core.store.find_key(key_id)
        if view is None:
            return Verdict(None, "unknown key"), HOLDS_S
        key = view.key
        if not is_of(key, secret):
            return Verdict(None, "wrong secret", key), HOLDS_S
        if not view.good:
            state = key.state(view.now)
            return Verdict(None, "its tenant or user is disabled" if state == "active" else state, key), HOLDS_S
        if key.last_used_at is None:
            await self._core.store.touch_key(key_id)  # before the first answer: a key in use is never made anew
        elif view.now - key.last_used_at >= TOUCH_MS:
            self._core.spawn(self._core.store.touch_key(key_id), f"{key_id} used")
        caller = Caller(
            tenant_id=key.tenant_id,
            owner=f"key:{ulid_of(key.lineage)}",
            user_id=key.user_id,
            scopes=with_included(key.granted),
            key_id=key.key_id,
            ends_at=key.expires_at,
        )
        left = HOLDS_S if key.expires_at is None else (key.expires_at - view.now) / 1000
        return Verdict(caller, key=key), left

    async def _token(self, claims: Claims) -> tuple[Verdict, float]:
        store = self._core.store
        tenant = await store.get_tenant(claims.tenant_id)
        if tenant is None or tenant.disabled_at is not None:
            return Verdict(None, "token: its tenant is unknown or disabled"), HOLDS_S
        user_id = user_id_of(claims.user)
        user = await store.get_user(claims.tenant_id, user_id)
        if user is None:
            await self._seen(claims, user_id)
        elif user.disabled_at is not None:
            return Verdict(None, "token: its user is disabled"), HOLDS_S
        caller = Caller(
            tenant_id=claims.tenant_id,
            owner=f"user:{user_id}",
            user_id=user_id,
            scopes=with_included(claims.scopes),
            ends_at=claims.expires_at,
        )
        return Verdict(caller), (claims.expires_at - self._core.now_ms()) / 1000

    async def _seen(self, claims: Claims, user_id: str) -> None:
        """Users of the issuer get a row when they come first, so that an operator finds them and may disable them."""
        name = None if claims.user == user_id or not claims.user.isprintable() else claims.user[:200]
        made = UserRecord(claims.tenant_id, user_id, self._core.now_ms(), name)
        audit = AuditRecord(claims.tenant_id, f"user:{user_id}", "user.created", user_id, {"by": "token"})
        try:
            await self._core.store.create_user(made, audit)
        except CorralError as error:
            if error.code != "already_exists":
                raise
