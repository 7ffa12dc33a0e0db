"""The channel against a guest that goes wrong at any point of any conversation: chosen and made small by Hypothesis."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fuzzing import channel
from fuzzing.channel import Host, JudgingGuest
from fuzzing.clock import TURN_S, Broken, Time, VirtualLoop, replaced, waiting
from fuzzing.tape import Tape


class Conversation(RuleBasedStateMachine):
    """A host that calls, and a guest that answers as it should until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop(4 * 3600.0)
        asyncio.set_event_loop(self.loop)
        self.tape = Tape(b"")
        self.guest = JudgingGuest(self.loop, self.tape, "ins_x")
        self.host = Host(self.loop, self.guest)

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        with replaced(clock=(channel.client_module, "time", Time(self.loop))):
            self.loop.run_until_complete(work)

    @initialize(wrong=st.binary(max_size=3))
    def connect(self, wrong: bytes) -> None:
        self.tape.feed(wrong)
        self._do(self.host.connect())

    @precondition(lambda self: self.host.client is not None)
    @rule(how=st.binary(min_size=1, max_size=6))
    def call(self, how: bytes) -> None:
        self._do(self.host.step(Tape(how)))

    @rule(how=st.binary(min_size=1, max_size=5))
    def the_guest_goes_wrong(self, how: bytes) -> None:
        self.tape.feed(how)

    @rule(seconds=st.sampled_from((0.01, 1.0, 12.0, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self._do(asyncio.sleep(seconds))

    @invariant()
    def nothing_piles_up_and_nobody_waits_for_the_loop(self) -> None:
        self.host.look()
        assert self.loop.turn_s < TURN_S
        assert not self.loop.failures, self.loop.failures

    def teardown(self) -> None:
        try:
            self._do(self.host.finish())
            self.guest.end()
            self._do(asyncio.sleep(1))
            if asyncio.all_tasks(self.loop):
                raise Broken(f"tasks are left: {waiting(self.loop)}")
            assert self.guest.broken is None
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()


Conversation.TestCase.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)
TestConversation = Conversation.TestCase
