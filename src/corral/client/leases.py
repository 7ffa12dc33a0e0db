"""A lease of a sandbox in the hands of a program: kept alive behind its back, and known to be lost as soon as it may be.

What is left of it is counted from before each request was sent, on this machine's monotonic clock: whatever the clocks of others say,
the holder never believes in it for longer than the service does. Once it is lost no call goes out under it any more.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from corral.client.effects import drive
from corral.client.line import Answer, Event, Json, Line, Params
from corral.client.transport import quote
from corral.errors import CorralError

if TYPE_CHECKING:
    from corral.client.sdk import Sandbox  # noqa: F401 - named below, as text

LEASE = "Corral-Lease"
AGAIN = 0.4
"""After this part of its time a lease is renewed: then less than two thirds are left, and the service extends it."""
ASK_S = 60.0
"""How long one request waits for a sandbox that somebody else has."""
OVER = ("lease_lost", "sandbox_deleted", "sandbox_lost", "not_found")


def moment() -> float:
    """Seconds on a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Keeper:
    """One lease: its fence, and until when it is surely held."""

    def __init__(self, line: Line, sandbox_id: str, owner: str, ttl_s: float) -> None:
        self._line = line
        self._at = f"/v1/sandboxes/{quote(sandbox_id)}"
        self.sandbox_id = sandbox_id
        self.owner = owner
        self.ttl_s = ttl_s
        self.fence = ""
        self.document: Json = {}
        self.until = 0.0
        """On `moment`'s clock."""
        self._why: str | None = None

    @property
    def lost(self) -> bool:
        """It is not held any more, or may not be. Never becomes false again."""
        if self._why is None and self.fence and moment() >= self.until:
            self._why = "it ran out before it could be renewed"
        return self._why is not None

    def lose(self, why: str) -> None:
        """It is not held any more."""
        self._why = self._why or why

    def check(self) -> None:
        """`lease_lost` once it is."""
        if self.lost:
            hint = "acquire the sandbox again and look at what changed before going on"
            why = f"the lease {self.fence} of {self.sandbox_id} is lost: {self._why}"
            raise CorralError("lease_lost", why, hint=hint)

    @property
    def pause_s(self) -> float:
        """How long to wait before the next renewal."""
        return max(0.05, min(self.until - moment() - (1 - AGAIN) * self.ttl_s, AGAIN * self.ttl_s))

    def _have(self, document: Json, sent: float) -> None:
        self.document = document
        self.fence = str(document["lease"])
        self.until = sent + document["ttl_ms"] / 1000

    async def acquire(self, contention: str | None, wait_s: float | None, session: str | None) -> None:
        """Get it. `lease_held` when somebody else has the sandbox for longer than `wait_s`."""
        body: Json = {"owner": self.owner, "ttl_s": self.ttl_s}
        body |= {name: value for name, value in (("contention", contention), ("session", session)) if value is not None}
        wait_s = 30.0 if wait_s is None else wait_s
        begun = moment()
        while True:
            left = max(0.0, begun + wait_s - moment())
            sent = moment()
            try:
                asked = {**body, "wait_s": round(min(left, ASK_S), 3)}
                answer = await self._line.request("POST", f"{self._at}/attach", asked)
                break
            except CorralError as error:
                waited = moment() - sent > ASK_S / 2  # else it does not wait for this one
                if error.code != "lease_held" or left <= ASK_S or not waited:
                    raise
        self.sandbox_id = str(answer["sandbox_id"])
        self._at = f"/v1/sandboxes/{quote(self.sandbox_id)}"
        self._why = None
        self._have(answer, sent)
        if (
            moment() - sent > self.ttl_s / 4
        ):  # it was waited for: what is left counts from the answer's commit, unknown here
            self.until = moment() + self.ttl_s
            await self.renew()

    async def renew(self) -> None:
        """Extend it; `lease_lost` (or why the sandbox has ended) if it is not held any more."""
        sent = moment()
        headers = {LEASE: self.fence}
        line = self._line.hurried(max(1.0, self.until - sent))
        try:
            body = {"owner": self.owner, "ttl_s": self.ttl_s}
            self._have(await line.request("POST", f"{self._at}/renew", body, None, headers), sent)
        except CorralError as error:
            if error.code in OVER:
                self.lose(error.detail)
            raise

    async def release(self) -> bool:
        """Give it back; False if it was not held any more. Afterwards it is lost."""
        if self.lost:
            return False
        headers = {LEASE: self.fence}
        self.lose("it was released")
        try:
            await self._line.request("POST", f"{self._at}/release", {"owner": self.owner}, None, headers)
        except CorralError as error:
            if error.code not in OVER:
                raise
            return False
        return True


class Grip:
    """The lease under which the calls of one sandbox object go out, if there is one."""

    def __init__(self) -> None:
        self.keeper: Keeper | None = None

    def headers(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """With the lease's; `lease_lost` once it is."""
        given = dict(more or {})
        if self.keeper is not None and LEASE not in given:
            self.keeper.check()
            given[LEASE] = self.keeper.fence
        return given

    def heard(self, error: CorralError) -> None:
        """A refusal of a call under it."""
        if self.keeper is not None and error.code == "lease_lost":
            self.keeper.lose(error.detail)


class FixedGrip(Grip):
    """A lease that somebody else keeps: all that is known of it is its fence."""

    def __init__(self, fence: str) -> None:
        super().__init__()
        self._fence = fence

    def headers(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return {LEASE: self._fence, **(more or {})}


class GrippedLine(Line):
    """The same line, for the calls about one sandbox."""

    def __init__(self, line: Line, grip: Grip) -> None:
        super().__init__(line.endpoint, line.effects, line.busy_s, line.limit_s)
        self._plain = line
        self._grip = grip

    def hurried(self, seconds: float) -> Line:
        return GrippedLine(self._plain.hurried(seconds), self._grip)

    async def request(
        self,
        method: str,
        path: str,
        json: Json | None = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        raw: bytes | None = None,
        once: bool = False,
        gone: bool = False,
    ) -> Json:
        given = self._grip.headers(headers)
        try:
            return await super().request(method, path, json, params, given, raw=raw, once=once, gone=gone)
        except CorralError as error:
            self._grip.heard(error)
            raise

    def stream(self, path: str, params: Params | None = None) -> AsyncGenerator[Event, None]:
        self._grip.headers()
        return super().stream(path, params)

    async def open(self, path: str, params: Params | None = None, headers: Mapping[str, str] | None = None) -> Answer:
        return await super().open(path, params, self._grip.headers(headers))

    async def upload(
        self,
        path: str,
        source: Callable[[], AsyncGenerator[bytes, None]],
        params: Params | None = None,
        method: str = "PUT",
        *,
        size: int | None = None,
        again: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        given = self._grip.headers(headers)
        try:
            return await super().upload(path, source, params, method, size=size, again=again, headers=given)
        except CorralError as error:
            self._grip.heard(error)
            raise


class Leased(Protocol):
    """A sandbox object: what a lease needs of it."""

    id: str
    grip: Grip


L = TypeVar("L", bound=Leased)


class Terms(Generic[L]):
    """What a lease was asked for, and what it is now. See `Lease`."""

    def __init__(
        self,
        sandbox: L,
        line: Line,
        another: Callable[[str], L],
        owner: str,
        ttl_s: float,
        contention: str | None,
        wait_s: float | None,
        session: str | None,
    ) -> None:
        self.sandbox = sandbox
        """The sandbox that it is of: with `contention="new"` perhaps another one. Its calls go out under the lease."""
        self._another = another
        self._keeper = Keeper(line, sandbox.id, owner, ttl_s)
        self._asked = (contention, wait_s, session)

    @property
    def owner(self) -> str:
        """As it was asked for."""
        return self._keeper.owner

    @property
    def fence(self) -> str:
        """`<incarnation>.<lease_version>`; empty before it is acquired."""
        return self._keeper.fence

    @property
    def document(self) -> Json:
        """LEASE as the service told it last."""
        return self._keeper.document

    @property
    def lost(self) -> bool:
        """True once it is not held any more, or may not be; for good. Costs nothing."""
        return self._keeper.lost

    @property
    def left_s(self) -> float:
        """How long it is surely held without a renewal."""
        return 0.0 if self.lost else max(0.0, self._keeper.until - moment())

    def _gripped(self) -> None:
        if self._keeper.sandbox_id != self.sandbox.id:
            self.sandbox = self._another(self._keeper.sandbox_id)
        self.sandbox.grip.keeper = self._keeper

    def _let_go(self) -> None:
        if self.sandbox.grip.keeper is self._keeper:
            self.sandbox.grip.keeper = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.sandbox.id} {self.fence or '-'} {self.owner!r}{' lost' if self.lost else ''}>"


class Lease(Terms["Sandbox"]):
    """A lease of a sandbox, held from `with` (or `acquire`) to its end (or `release`), and renewed in the background by a thread."""

    _thread: threading.Thread | None = None

    def acquire(self) -> Lease:
        """Get it, and keep it. `lease_held` when somebody else has the sandbox."""
        drive(self._keeper.acquire(*self._asked))
        self._gripped()
        self._stop = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"corral lease {self.sandbox.id}", daemon=True)
        self._thread.start()
        return self

    def _keep(self) -> None:
        keeper = self._keeper
        while not self._stop.wait(keeper.pause_s) and not keeper.lost:
            try:
                drive(keeper.renew())
            except CorralError:
                if not keeper.lost:
                    self._stop.wait(min(1.0, keeper.ttl_s / 10))  # while there is time it is tried again
            except Exception as error:
                keeper.lose(f"{type(error).__name__}: {error}")
        self._over.set()

    def renew(self) -> None:
        """Now, beside the renewals in the background. `lease_lost`."""
        self._keeper.check()
        drive(self._keeper.renew())

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Wait until it is lost or released; False after `timeout_s`."""
        return self._over.wait(timeout_s)

    def release(self) -> bool:
        """Give it back: what runs in the sandbox is ended, what is temporary in it is removed. False if it was lost before."""
        if self._thread is not None:
            self._stop.set()
        try:
            return drive(self._keeper.release())
        finally:
            self._let_go()
            if self._thread is not None:
                self._thread.join(5.0)
                self._over.set()

    def __enter__(self) -> Lease:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(CorralError):  # then it ends by itself
            self.release()
