"""A captured guest against the host's side of the channel, fuzzed: a fixed set of cases and a fresh seed, named when something fails.

`python -m bench.fuzz --replay FILE` runs a saved case again; what was found lies as its own test in `test_fuzz_found.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest

from fuzzing import campaign, channel
from fuzzing.clock import Broken, VirtualLoop, conduct, replaced
from fuzzing.guest import ModelGuest
from fuzzing.tape import Case, Tape, fresh, smallest

FRESH = int.from_bytes(os.urandom(4), "big")


@pytest.mark.parametrize("seed", [1, FRESH], ids=["fixed", "fresh"])
@pytest.mark.parametrize(("target", "count"), [("channel", 250), ("bytes", 250)])
def test_whatever_a_guest_says_the_channel_holds_its_promises(target: str, count: int, seed: int) -> None:
    assert campaign.some(target, seed, count, seconds=4.0)


def test_an_honest_guest_is_served_in_full() -> None:
    """The control: with nothing broken, every call of every recording and of the model answers."""
    for number in range(len(channel.recordings())):
        channel.replay(Case("bytes", bytes([number]), b""))
    rng = random.Random(7)
    for _ in range(30):
        channel.run(Case("channel", fresh("channel", rng).host, b""))


def _broken_by(case: Case) -> str:
    with pytest.raises(Broken) as caught:
        channel.run(case)
    return str(caught.value)


BUSY = Case("channel", bytes([0, 0, 1, 1, 0, 11, 0, 10, 0, 0, 0, 1, 1, 0]), b"")


def test_output_that_was_never_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judges judge: a channel that invents a byte, swallows an end or never gives up is found out."""
    real = channel.protocol.split_data
    monkeypatch.setattr(
        "corral.guest.protocol.split_data", lambda payload: (*real(payload)[:3], b"?" * len(real(payload)[3]))
    )
    assert "never sent" in _broken_by(BUSY)


def test_a_wait_without_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def patiently(self: Any, operation: str, number: int, future: Any, patience: float = 0.0) -> Any:
        return await future

    monkeypatch.setattr(channel.client_module.GuestClient, "_answer", patiently)
    monkeypatch.setattr(channel.client_module.GuestClient, "_keep_alive", lambda self: asyncio.sleep(0))
    silent = bytes([0, 180 + 12])
    assert "still waiting: ['ping']" in _broken_by(Case("channel", bytes([11]), silent))


def test_a_loop_that_is_held_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzzing.clock.TURN_S", 0.01)

    async def busy(loop: VirtualLoop) -> None:
        total = 0
        for number in range(2_000_000):
            total += number

    with pytest.raises(Broken, match="held up"):
        conduct(busy)


def test_a_task_and_a_descriptor_that_are_left_are_found() -> None:
    async def leaves_a_task(loop: VirtualLoop) -> None:
        loop.create_task(asyncio.sleep(100), name="left")

    with pytest.raises(Broken, match="tasks are left"):
        conduct(leaves_a_task)
    kept: list[int] = []

    async def leaves_a_descriptor(loop: VirtualLoop) -> None:
        kept.append(os.open("/dev/null", os.O_RDONLY))

    with pytest.raises(Broken, match="descriptors are left"):
        conduct(leaves_a_descriptor)
    os.close(kept[0])


def test_a_case_is_the_same_every_time() -> None:
    """By what the guest was asked and said, byte for byte."""
    case = fresh("channel", random.Random(11))

    def told() -> list[str]:
        log: list[str] = []
        real = ModelGuest.handle

        def handle(self: ModelGuest, link: object, kind: int, payload: bytes) -> None:
            log.append(f"{self.loop.now:.6f} {kind} {payload.hex()}")
            real(self, link, kind, payload)  # type: ignore[arg-type]

        with replaced(handle=(ModelGuest, "handle", handle)):
            channel.run(case)
        return log

    first = told()
    assert len(first) > 3 and first == told()


def test_a_failing_input_is_made_small() -> None:
    case = Case("channel", bytes(range(60)), bytes([9] * 40 + [77] + [9] * 40))
    small = smallest(case, lambda other: 77 in other.guest and 5 in other.host)
    assert (small.host.strip(b"\0"), small.guest) == (b"\x05", b"M")
    assert Tape(small.guest).byte() == 77
