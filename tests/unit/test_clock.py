"""The clock of a process that serves goes on evenly, whoever sets the time of day."""

from __future__ import annotations

import time

import pytest

from corral import bootstrap


def test_a_jump_of_the_time_of_day_ends_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bootstrap._now_ms()
    real_ns, real = time.time_ns, time.time
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 10**15)
    monkeypatch.setattr(time, "time", lambda: real() + 10**6)
    assert 0 <= bootstrap._now_ms() - before < 60_000
    assert abs(before - real_ns() // 1_000_000) < 60_000, "it began with the time of day"
