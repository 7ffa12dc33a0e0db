"""Properties of `domain.expiry`: nothing ends early, and what is over the caps never gets through."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from corral import config
from corral.domain.expiry import IDLE_STATES, UNLIMITED_S, Wanted, denied, due, idle_timeout_of
from corral.domain.policy import Policy
from corral.domain.sandbox import STATES

POLICY = Policy.from_dict(config.data_document(config.data_file("policy/default.yaml"), "/nowhere"))
instants = st.integers(0, 2**45)
seconds = st.one_of(st.floats(0.001, 10**6), st.just(UNLIMITED_S))
maybe = st.none() | seconds


def policies() -> st.SearchStrategy[Policy]:
    caps = st.builds(
        lambda ttl, free, idle: replace(POLICY.caps, ttl_s=ttl, unlimited_ttl=free, idle_timeout_s=idle),
        st.floats(1, 10**6),
        st.booleans(),
        st.none() | st.floats(1, 10**6),
    )
    return caps.map(lambda made: replace(POLICY, caps=made))


@given(instants, st.sampled_from(STATES), instants, instants, st.none() | st.integers(1, 2**40), st.booleans())
def test_nothing_ends_before_its_instant_nor_twice(
    now: int, state: str, expires_at: int, active: int, idle: int | None, one_shot: bool
) -> None:
    cause = due(now, state, expires_at, active, idle, one_shot=one_shot)
    if cause is not None:
        assert state not in ("sanitizing", "terminated")
    if cause == "ttl":
        assert now >= expires_at
    if cause == "idle_timeout":
        assert idle is not None and now - active >= idle and state in IDLE_STATES and not one_shot
        assert now < expires_at, "the time to live is the stronger reason"
        assert due(now, "running", expires_at, active, idle, one_shot=False) is None
        assert due(now, "paused", expires_at, active, idle, one_shot=False) is None
        assert due(now, state, expires_at, now, idle, one_shot=False) is None, "a use keeps it"


@given(policies(), maybe, maybe)
def test_what_is_not_refused_is_within_the_caps(policy: Policy, ttl: float | None, idle: float | None) -> None:
    refused = {one.field for one in denied(policy, Wanted(ttl, idle))}
    caps = policy.caps
    if ttl is not None and "ttl_s" not in refused:
        assert ttl <= caps.ttl_s or (caps.unlimited_ttl and ttl >= UNLIMITED_S)
    if idle is not None and "idle_timeout_s" not in refused:
        assert caps.idle_timeout_s is None or idle <= caps.idle_timeout_s
    if idle is None or "idle_timeout_s" not in refused:
        given_s = idle_timeout_of(policy, idle)
        assert caps.idle_timeout_s is None or (given_s is not None and given_s <= caps.idle_timeout_s)
        assert given_s is None or given_s < UNLIMITED_S
