"""Calls that survive: what is repeated, what never is, and for how long."""

from __future__ import annotations

import time
import typing
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from corral.client.effects import Blocking, drive, iterate
from corral.client.line import Cut, Event, Line, Request
from corral.errors import CorralError

BROKEN = Cut("broken", sent=True)
REFUSED = Cut("refused", sent=False)


class Answer:
    status = 200
    headers: typing.ClassVar[dict[str, str]] = {}

    def __init__(self, given: Any) -> None:
        self._given = given

    async def document(self) -> dict[str, Any]:
        return dict(self._given)

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        for item in self._given:
            if isinstance(item, Exception):
                raise item
            yield item

    async def events(self) -> AsyncGenerator[Event, None]:
        for item in self._given:
            if isinstance(item, Exception):
                raise item
            yield item

    async def close(self) -> None:
        pass


class Script:
    """An endpoint whose attempts go as written down: an exception is raised, anything else answered."""

    hint: str | None = "look there"
    patience_s = 0.4

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.requests: list[Request] = []
        self.forgotten = 0

    async def current(self) -> Script:
        return self

    def failed(self, single: Any) -> None:
        self.forgotten += 1

    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    async def send(self, request: Request) -> Answer:
        self.requests.append(request)
        if request.blocks is not None:
            async for _ in request.blocks:
                pass
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return Answer(outcome)

    def close(self) -> Any:
        async def nothing() -> None: ...

        return nothing()


def line(*outcomes: Any, busy_s: float = 0.0) -> tuple[Line, Script]:
    script = Script(*outcomes)
    return Line(script, Blocking(), busy_s), script  # type: ignore[arg-type]


def refused(code: str, **facts: Any) -> CorralError:
    return CorralError(code, "no", **facts)


def test_a_post_that_is_cut_off_is_repeated_with_the_same_key() -> None:
    calls, script = line(REFUSED, BROKEN, BROKEN, {"id": "x"})
    assert drive(calls.request("POST", "/p", {"a": 1})) == {"id": "x"}
    keys = {request.headers["Idempotency-Key"] for request in script.requests}
    assert len(script.requests) == 4 and len(keys) == 1 and script.forgotten == 3
    drive(calls.request("POST", "/p", {"a": 1}))
    assert script.requests[-1].headers["Idempotency-Key"] not in keys


def test_what_does_harm_twice_is_repeated_only_while_it_was_not_sent() -> None:
    calls, script = line(REFUSED, BROKEN, {})
    with pytest.raises(CorralError) as caught:
        drive(calls.request("POST", "/p", {}, once=True))
    assert caught.value.code == "infra_error" and len(script.requests) == 2
    assert all(request.fresh for request in script.requests)


def test_a_repeated_removal_that_finds_nothing_was_done_by_the_first() -> None:
    calls, _ = line(BROKEN, refused("not_found"))
    assert drive(calls.request("DELETE", "/p", gone=True)) == {}
    for outcomes in ([refused("not_found")], [REFUSED, refused("not_found")]):
        calls, _ = line(*outcomes)
        with pytest.raises(CorralError) as caught:
            drive(calls.request("DELETE", "/p", gone=True))
        assert caught.value.code == "not_found"


def test_patience_is_bounded_and_says_what_to_do() -> None:
    calls, script = line(REFUSED)
    began = time.monotonic()
    with pytest.raises(CorralError) as caught:
        drive(calls.request("GET", "/p"))
    assert (caught.value.code, caught.value.hint, caught.value.retryable) == ("node_unavailable", "look there", True)
    assert 0.3 < time.monotonic() - began < 20 and len(script.requests) > 3


def test_an_answer_that_is_slow_is_asked_for_again_but_not_for_ever() -> None:
    calls, script = line(Cut("slow", sent=True, slow=True))
    with pytest.raises(CorralError):
        drive(calls.request("GET", "/p"))
    assert len(script.requests) > 5


def test_a_refusal_is_not_repeated() -> None:
    for code in ("not_found", "invalid_value", "infra_error", "runtime_unavailable"):
        calls, script = line(refused(code), busy_s=30)
        with pytest.raises(CorralError) as caught:
            drive(calls.request("GET", "/p"))
        assert caught.value.code == code and len(script.requests) == 1


def test_a_busy_service_is_asked_again_after_the_time_that_it_says() -> None:
    calls, script = line(refused("quota_exceeded", retry_after_s=1), {"a": 1}, busy_s=30)
    began = time.monotonic()
    assert drive(calls.request("POST", "/p", {})) == {"a": 1}
    assert time.monotonic() - began >= 1 and len(script.requests) == 2


def test_waiting_for_a_busy_service_is_bounded() -> None:
    calls, script = line(refused("quota_exceeded", retry_after_s=60), busy_s=30)
    began = time.monotonic()
    with pytest.raises(CorralError):
        drive(calls.request("POST", "/p", {}))
    assert time.monotonic() - began < 20 and len(script.requests) == 1
    calls, script = line(refused("quota_exceeded"), busy_s=0.2)
    with pytest.raises(CorralError):
        drive(calls.request("POST", "/p", {}))
    assert len(script.requests) > 1


def test_a_service_that_stops_is_left_for_the_next() -> None:
    calls, script = line(refused("shutting_down"), {"a": 1})
    assert drive(calls.request("GET", "/p")) == {"a": 1} and script.forgotten == 1


def test_a_stream_goes_on_at_its_cursor_and_starts_once() -> None:
    begun = Event("started", "0")
    first, second = Event("stdout", "c1", 0, b"a"), Event("stdout", "c2", 1, b"b")
    end = Event("ended", None, doc={})
    calls, script = line([begun, first, BROKEN], BROKEN, [begun, second], refused("shutting_down"), [end])
    assert list(iterate(calls.stream("/s"))) == [begun, first, second, end]
    assert [request.params.get("cursor") for request in script.requests] == [None, "c1", "c1", "c2", "c2"]


def test_a_stream_whose_cursor_is_gone_says_so() -> None:
    calls, _ = line([Event("stdout", "c1", 0, b"a"), BROKEN], refused("cursor_gone", bytes=7))
    with pytest.raises(CorralError) as caught:
        list(iterate(calls.stream("/s")))
    assert caught.value.facts == {"bytes": 7}


def test_a_download_is_never_short() -> None:
    calls, script = line(BROKEN, refused("shutting_down"), [b"a", b"b"])
    assert b"".join(iterate(calls.download("/d"))) == b"ab" and len(script.requests) == 3
    calls, _ = line([b"a", BROKEN])
    with pytest.raises(CorralError) as caught:
        list(iterate(calls.download("/d")))
    assert caught.value.code == "infra_error"


async def blocks() -> AsyncGenerator[bytes, None]:
    yield b"x"


def test_an_upload_is_repeated_only_if_it_can_be_sent_again() -> None:
    source: Callable[[], AsyncGenerator[bytes, None]] = blocks
    calls, script = line(REFUSED, BROKEN, {"a": 1})
    with pytest.raises(CorralError):
        drive(calls.upload("/u", source))
    assert len(script.requests) == 2
    calls, script = line(REFUSED, BROKEN, {"a": 1})
    assert drive(calls.upload("/u", source, again=True)) == {"a": 1} and len(script.requests) == 3


class Standing(Answer):
    """A stream that is open for a while without a word."""

    def __init__(self, seconds: float) -> None:
        super().__init__([])
        self._seconds = seconds

    async def events(self) -> AsyncGenerator[Event, None]:
        time.sleep(self._seconds)
        raise BROKEN
        yield


def test_a_quiet_stream_that_stood_longer_than_patience_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.client.line.STOOD_S", 0.3)
    calls, script = line([])
    monkeypatch.setattr(script, "send", Sequence(Standing(0.6), Standing(0.6), Answer([Event("ended", "c")])).send)
    assert [event.kind for event in iterate(calls.stream("/s"))] == ["ended"]


def test_a_call_that_waited_longer_than_patience_is_repeated_when_it_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, script = line([])
    monkeypatch.setattr(script, "send", Sequence(0.6, Answer({"id": "x"})).send)
    assert drive(calls.request("GET", "/r")) == {"id": "x"}


class Sequence:
    """Answers in turn; a number is a wait, then a break."""

    def __init__(self, *steps: Any) -> None:
        self._steps = list(steps)

    async def send(self, request: Request) -> Answer:
        step = self._steps.pop(0)
        if isinstance(step, float):
            time.sleep(step)
            raise BROKEN
        assert isinstance(step, Answer)
        return step
