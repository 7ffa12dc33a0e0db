"""A lease in a program's hands, over a line that this test answers: what it believes, when it says lost, what goes out under it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from corral.client import leases
from corral.client.async_leases import AsyncLease
from corral.client.async_sdk import AsyncSandbox
from corral.client.calls import Calls
from corral.client.effects import Blocking, drive
from corral.client.leases import Grip, GrippedLine, Keeper, Lease
from corral.client.line import Cut, Line, Request
from corral.client.sdk import Sandbox
from corral.errors import CorralError

BOX = {"id": "sbx_1", "state": "leased"}


class Service:
    """One lease at a time, whose clock is `now`; refuses what is stale. Also the endpoint, the single and the answer."""

    hint = None
    patience_s = 0.2
    status = 200

    def __init__(self) -> None:
        self.now = leases.moment
        self.token = 0
        self.until = 0.0
        self.ttl = 0.0
        self.seen: list[Request] = []
        self.away = False
        self.held_until = 0.0
        self._document: Any = None
        self.guard = threading.Lock()

    async def current(self) -> Service:
        return self

    def failed(self, single: Any) -> None: ...

    async def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.02))

    async def close(self) -> None: ...

    async def send(self, request: Request) -> Service:
        with self.guard:
            self.seen.append(request)
            if self.away:
                raise Cut("no connection", sent=False)
            answer = self._answer(request)
        made = Service.__new__(Service)
        made._document = answer
        return made

    async def document(self) -> Any:
        return self._document

    def _answer(self, request: Request) -> Any:
        given = request.headers.get("Corral-Lease")
        current = f"1.{self.token}"
        if request.path.endswith("/attach"):
            if self.now() < self.held_until:
                raise CorralError("lease_held", "somebody has it")
            self.ttl = request.json["ttl_s"]
            self.token, self.until = self.token + 1, self.now() + self.ttl
        elif request.path.endswith("/renew"):
            if given != current or self.now() >= self.until:
                raise CorralError("lease_lost", "it is another's")
            self.until = self.now() + self.ttl
        elif given is not None and given != current:
            raise CorralError("lease_lost", "it is another's")
        elif request.path.endswith("/release"):
            self.token += 1
            return {"id": "sbx_1", "state": "recycling"}
        else:
            return {"id": "exe_1", "sandbox_id": "sbx_1", "result": {}, "state": "ended"}
        left = round((self.until - self.now()) * 1000)
        return {"sandbox_id": "sbx_1", "lease": f"1.{self.token}", "ttl_ms": left, "owner": "s/1"}


@pytest.fixture
def service() -> Service:
    return Service()


def line_of(service: Service) -> Line:
    return Line(service, Blocking())  # type: ignore[arg-type]


def box_of(service: Service) -> Sandbox:
    return Sandbox(Calls(line_of(service)), dict(BOX))


def paths(service: Service) -> list[str]:
    return [request.path.rpartition("/")[2] for request in service.seen]


def test_calls_of_the_object_go_out_under_the_lease_and_only_while_it_is_held(service: Service) -> None:
    box = box_of(service)
    with box.lease("s/1", 5) as lease:
        assert (lease.fence, lease.owner, lease.lost, lease.sandbox) == ("1.1", "s/1", False, box)
        assert 4 < lease.left_s <= 5
        box.start(["true"])
        box.files.delete("x")
    box.start(["true"])
    given = {request.path.rpartition("/")[2]: request.headers.get("Corral-Lease") for request in service.seen[:4]}
    assert given == {"attach": None, "execs": "1.1", "files": "1.1", "release": "1.1"}
    assert service.seen[-1].headers.get("Corral-Lease") is None
    assert lease.lost and lease.left_s == 0.0


def test_it_is_renewed_in_the_background_before_it_runs_out(service: Service) -> None:
    with box_of(service).lease("s/1", 0.5) as lease:
        assert not lease.wait_lost(1.3)
        assert not lease.lost and lease.left_s > 0.1
    assert paths(service).count("renew") >= 3


def test_what_is_left_counts_from_before_the_request_whatever_the_service_s_clock_says(service: Service) -> None:
    keeper = Keeper(line_of(service), "sbx_1", "s/1", 2.0)
    real, began = service.send, leases.moment()

    async def slow(request: Request) -> Service:
        answer = await real(request)
        time.sleep(0.3)
        return answer

    service.send = slow  # type: ignore[method-assign]
    drive(keeper.acquire(None, None, None))
    assert keeper.until <= began + 2.1
    service.now = lambda: leases.moment() + 86_400  # its clock has jumped: it refuses, and is believed
    with pytest.raises(CorralError, match="lease_lost"):
        drive(keeper.renew())
    assert keeper.lost


def test_a_holder_that_was_stopped_knows_that_it_has_lost_without_asking(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = box_of(service)
    lease = box.lease("s/1", 600).acquire()
    asked = len(service.seen)
    real = leases.moment
    monkeypatch.setattr(leases, "moment", lambda: real() + 601)
    assert lease.lost
    for call in (
        lambda: box.start(["true"]),
        lambda: box.files.delete("x"),
        lambda: box.delete(),
        lambda: lease.renew(),
    ):
        with pytest.raises(CorralError, match="lease_lost") as caught:
            call()
        assert caught.value.hint
    monkeypatch.undo()
    assert lease.lost, "for good"
    assert len(service.seen) == asked, "nothing went out"
    assert lease.release() is False
    box.start(["true"])


def test_a_refusal_of_any_call_tells_the_lease(service: Service) -> None:
    box = box_of(service)
    with box.lease("s/1", 600) as lease:
        service.token += 1  # somebody has taken it
        with pytest.raises(CorralError, match="lease_lost"):
            box.start(["true"])
        assert lease.lost


def test_a_service_that_is_away_for_less_than_what_is_left_costs_nothing(service: Service) -> None:
    with box_of(service).lease("s/1", 3.0) as lease:
        service.away = True
        assert not lease.wait_lost(1.6)
        service.away = False
        before = paths(service).count("renew")
        until = time.monotonic() + 5
        while paths(service).count("renew") <= before and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.2)
        assert not lease.lost and lease.left_s > 2.0


def test_a_service_that_is_away_for_longer_loses_it(service: Service) -> None:
    with box_of(service).lease("s/1", 1.0) as lease:
        service.away = True
        assert lease.wait_lost(10)
        assert lease.lost
        service.away = False


def test_whoever_waited_for_it_asks_at_once_how_much_is_left(service: Service) -> None:
    keeper = Keeper(line_of(service), "sbx_1", "s/1", 1.0)
    real = service.send

    async def slow(request: Request) -> Service:
        if request.path.endswith("/attach"):
            time.sleep(1.2)  # as long as the whole lease
        return await real(request)

    service.send = slow  # type: ignore[method-assign]
    drive(keeper.acquire("wait", 10, None))
    assert paths(service) == ["attach", "renew"] and not keeper.lost
    assert service.seen[0].json["contention"] == "wait"


def test_held_by_another_is_an_error_and_no_lease(service: Service) -> None:
    service.held_until = leases.moment() + 60
    box = box_of(service)
    with pytest.raises(CorralError, match="lease_held"), box.lease("s/1", 5, wait_s=300):
        raise AssertionError("it was not held")
    assert len(service.seen) == 1 and box.grip.keeper is None
    box.start(["true"])


def test_another_sandbox_is_the_leases_own(service: Service) -> None:
    real = service._answer

    def elsewhere(request: Request) -> Any:
        answer = real(request)
        return {**answer, "sandbox_id": "sbx_2"} if "lease" in answer else answer

    service._answer = elsewhere  # type: ignore[method-assign]
    box = box_of(service)
    with box.lease("s/1", 5, contention="new") as lease:
        assert lease.sandbox.id == "sbx_2" and box.grip.keeper is None
        lease.sandbox.start(["true"])
    assert service.seen[1].path == "/v1/sandboxes/sbx_2/execs"
    assert service.seen[1].headers["Corral-Lease"] == "1.1"


def test_a_gripped_line_keeps_its_patience_and_its_lease_when_hurried(service: Service) -> None:
    grip = Grip()
    line = GrippedLine(Line(service, Blocking(), busy_s=9.0), grip)  # type: ignore[arg-type]
    grip.keeper = Keeper(line_of(service), "sbx_1", "s/1", 5.0)
    drive(grip.keeper.acquire(None, None, None))
    hurried = line.hurried(1.0)
    drive(hurried.request("POST", "/v1/execs/exe_1/cancel"))
    assert (hurried.limit_s, hurried.busy_s) == (1.0, 1.0)
    assert service.seen[-1].headers["Corral-Lease"] == "1.1"


async def test_the_asynchronous_one_is_renewed_by_a_task_and_let_go_when_cancelled(service: Service) -> None:
    from corral.client.aio import Loop

    async def pause(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.02))

    service.pause = pause  # type: ignore[method-assign]
    box = AsyncSandbox(Calls(Line(service, Loop())), dict(BOX))  # type: ignore[arg-type]

    async def work() -> None:
        async with box.lease("s/1", 0.6) as lease:
            assert isinstance(lease, AsyncLease)
            assert not await lease.wait_lost(1.3)
            assert not lease.lost
            await box.start(["true"])
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    while "execs" not in paths(service):
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert paths(service).count("renew") >= 3 and paths(service)[-1] == "release"
    assert box.grip.keeper is None


def test_a_lease_says_what_it_is(service: Service) -> None:
    lease = box_of(service).lease("会话/1", 5)
    assert isinstance(lease, Lease) and repr(lease) == "<Lease sbx_1 - '会话/1'>"
    with lease:
        assert repr(lease) == "<Lease sbx_1 1.1 '会话/1'>"
    assert repr(lease).endswith("lost>")
