"""The calls behind both faces: what becomes of input when its program ends."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from corral.client.calls import INPUT_BLOCK, Calls
from corral.client.line import Line
from corral.errors import CorralError


class Ending:
    """A service whose exec ends after it took some blocks of input."""

    def __init__(self, taken: int, code: str = "conflict") -> None:
        self.left = taken
        self.code = code

    async def request(self, *words: Any, raw: bytes, once: bool) -> dict[str, Any]:
        if self.left == 0:
            raise CorralError(self.code, "the exec has ended")
        self.left -= 1
        return {"open": True}


def given(line: Ending) -> list[tuple[int, bool]]:
    async def work() -> list[tuple[int, bool]]:
        calls = Calls(cast(Line, line))
        return [step async for step in calls.write("exe_1", bytes(3 * INPUT_BLOCK), True, 0)]

    return asyncio.run(work())


def test_a_program_that_ends_in_the_middle_of_its_input_reads_no_more() -> None:
    assert given(Ending(2)) == [(INPUT_BLOCK, True), (2 * INPUT_BLOCK, True), (2 * INPUT_BLOCK, False)]
    assert given(Ending(3))[-1] == (3 * INPUT_BLOCK, True)


@pytest.mark.parametrize(("taken", "code"), [(0, "conflict"), (2, "sandbox_lost")])
def test_input_that_nothing_took_and_other_failures_are_told(taken: int, code: str) -> None:
    with pytest.raises(CorralError, match="has ended"):
        given(Ending(taken, code))
