"""Whatever the order of beats, deaths and writes: a run has one driver, and only what that one writes counts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from corral.adapters.store.memory import MemoryStore
from corral.domain.fence import Fence
from corral.domain.records import Transition
from corral.errors import CorralError
from corral.testing.store import Bench, Clock, audit
from corral.testing.store.bench import EVENT

TTL_MS = 1000
WORKERS = st.sampled_from(["w_1", "w_2", "w_3"])
RUNS = st.sampled_from(["run_1", "run_2"])


class Workers(RuleBasedStateMachine):
    """The model: until when each worker is alive, who drives each run, and what of it has been done."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        clock = Clock()
        self.b = Bench(MemoryStore(clock), clock)
        self.call(self.b.store.open())
        self.fence: Fence = self.call(self.b.leased("sbx_1", 10**9))
        self.alive: dict[str, int] = {}
        self.driver: dict[str, str] = {}
        self.finished: dict[str, str] = {}
        self.begun: dict[str, str] = {}
        self.numbers = 0

    def call(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.loop.close()

    def code(self, work: Any) -> str | None:
        try:
            self.call(work)
        except CorralError as error:
            return error.code
        return None

    @rule(ms=st.integers(1, 2 * TTL_MS))
    def time_passes(self, ms: int) -> None:
        self.b.clock.now += ms

    @rule(worker=WORKERS)
    def beats(self, worker: str) -> None:
        self.call(self.b.store.beat(worker, TTL_MS, {}))
        self.alive[worker] = self.b.clock.now + TTL_MS

    @rule(worker=WORKERS)
    def leaves(self, worker: str) -> None:
        self.call(self.b.store.leave(worker))
        self.alive.pop(worker, None)

    @rule(worker=WORKERS, run=RUNS)
    def submits(self, worker: str, run: str) -> None:
        if run not in self.driver:
            self.call(self.b.store.submit_run(self.b.run(run, driver=worker, sandbox_id="sbx_1"), audit()))
            self.driver[run] = worker

    @rule(worker=WORKERS)
    def adopts(self, worker: str) -> None:
        free = {
            run
            for run, driver in self.driver.items()
            if run not in self.finished and self.alive.get(driver, 0) <= self.b.clock.now
        }
        taken = self.call(self.b.store.adopt_runs(worker))
        assert {run.run_id for run in taken} == free and all(run.driver == worker for run in taken)
        self.driver.update(dict.fromkeys(free, worker))

    def expected(self, worker: str, run: str) -> str | None:
        if run not in self.driver:
            return "not_found"
        return None if self.driver[run] == worker else "superseded"

    @rule(worker=WORKERS, run=RUNS)
    def writes(self, worker: str, run: str) -> None:
        changes = {"lease_version": self.numbers}
        states = ("requested",)
        code = self.code(self.b.store.update_run(run, expect_states=states, changes=changes, driver=worker))
        expected = self.expected(worker, run)
        assert code == (expected or ("conflict" if run in self.finished else None))

    @rule(worker=WORKERS, run=RUNS)
    def begins_the_program(self, worker: str, run: str) -> None:
        self.numbers += 1
        view = self.call(self.b.store.get_sandbox("sbx_1", None))
        fence = self.fence
        record = self.b.exec(
            f"exe_{self.numbers}",
            incarnation=fence.incarnation,
            lease_version=fence.token,
            run_id=run,
            step="program",
            driver=worker,
        )
        transition = Transition("sbx_1", view.sandbox.version, "running", replace(EVENT, event_type="exec_requested"))
        code = self.code(self.b.store.begin_exec(record, fence, transition, driver=worker))
        if code is None:
            assert run not in self.begun, "it was started twice"
            assert self.driver[run] == worker and run not in self.finished
            self.begun[run] = record.exec_id
        elif run in self.driver and self.driver[run] == worker and run not in self.finished:
            assert code == "conflict" and run in self.begun

    @rule(worker=WORKERS, run=RUNS)
    def finishes(self, worker: str, run: str) -> None:
        self.numbers += 1
        result = {"by": self.numbers}
        code = self.code(
            self.b.store.finish_run(run, result=result, reason="ok", timings={}, audit=audit(run), driver=worker)
        )
        if run in self.finished:
            assert code is None
        else:
            assert code == self.expected(worker, run)
            if code is None:
                self.finished[run] = str(self.numbers)

    @invariant()
    def each_end_is_the_first_one_and_told_once(self) -> None:
        for run in self.driver:
            row = self.call(self.b.store.get_run(run, "default"))
            assert row.driver == self.driver[run]
            assert (row.state == "finished") == (run in self.finished)
            if run in self.finished:
                assert row.result == {"by": int(self.finished[run])}


Workers.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWorkers = Workers.TestCase
