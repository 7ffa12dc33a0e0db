"""What the SDK makes of a watch whose stream breaks off."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from corral.client.files import FileCalls
from corral.client.line import Cut, Event
from corral.errors import CorralError


class Streams:
    """A line whose watches are given: events, then an error or the end."""

    def __init__(self, *streams: list[Event | Exception]) -> None:
        self.left = list(streams)
        self.closed = 0
        self.effects = self

    async def sleep(self, seconds: float) -> None:
        pass

    async def open(self, path: str, params: Any = None, headers: Any = None) -> Stream:
        return Stream(self, self.left.pop(0))


class Stream:
    def __init__(self, line: Streams, items: list[Event | Exception]) -> None:
        self.line = line
        self.items = items

    async def events(self) -> AsyncGenerator[Event, None]:
        for item in self.items:
            if isinstance(item, Exception):
                raise item
            yield item

    async def close(self) -> None:
        self.line.closed += 1


async def seen(line: Streams) -> list[str]:
    calls = FileCalls(line, "sbx_1")  # type: ignore[arg-type]
    return [event.kind async for event in calls.watch("/workspace", False)]


STARTED = Event("started", doc={"path": "/workspace"})


@pytest.mark.parametrize("error", [CorralError("shutting_down", "the service is stopping"), Cut("gone", sent=True)])
async def test_a_watch_goes_on_with_the_next_service_and_says_that_something_was_missed(error: Exception) -> None:
    line = Streams([STARTED, Event("created"), error], [STARTED, Event("ended")])
    assert await seen(line) == ["started", "created", "overflow", "started", "ended"]
    assert line.closed == 2


async def test_a_watch_that_is_refused_raises_why() -> None:
    line = Streams([STARTED, CorralError("sandbox_lost", "the sandbox is lost")])
    with pytest.raises(CorralError) as caught:
        await seen(line)
    assert (caught.value.code, line.closed) == ("sandbox_lost", 1)


async def test_a_stream_that_ends_without_a_word_is_no_watch_and_not_asked_for_without_end() -> None:
    with pytest.raises(CorralError) as caught:
        await seen(Streams([]))
    assert caught.value.code == "infra_error"


async def test_a_stream_that_ends_before_the_watch_does_is_opened_again() -> None:
    assert await seen(Streams([STARTED], [STARTED, Event("ended")])) == ["started", "overflow", "started", "ended"]
