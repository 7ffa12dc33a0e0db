"""What `ports.expiry` promises."""

from __future__ import annotations

from corral.testing.store.bench import Bench, check


async def _due(b: Bench, limit: int = 100) -> list[tuple[str, str]]:
    return [(one.view.sandbox.sandbox_id, one.cause) for one in await b.store.due_sandboxes(limit)]


@check
async def a_time_to_live_is_over_at_its_instant_in_every_state_but_the_last_two(b: Bench) -> None:
    end = b.clock.now + 1000
    for n, state in enumerate(("requested", "leased", "running", "paused", "recycling", "lost", "sanitizing")):
        await b.made(f"sbx_{n}", expires_at=end + n)
        await b.step(f"sbx_{n}", state)
    await b.made("sbx_never", expires_at=end + 10**12)
    b.clock.now = end - 1
    assert await _due(b) == []
    b.clock.now = end
    assert await _due(b) == [("sbx_0", "ttl")]
    b.clock.now = end + 10
    assert await _due(b) == [(f"sbx_{n}", "ttl") for n in range(6)], "longest ago first"
    assert await _due(b, 2) == [("sbx_0", "ttl"), ("sbx_1", "ttl")]


@check
async def time_without_activity_counts_only_where_nothing_runs(b: Bench) -> None:
    for state in ("leased", "idle", "ready", "running", "paused", "pausing", "recycling"):
        await b.made(f"sbx_{state}", idle_timeout_ms=1000, one_shot=False)
        await b.step(f"sbx_{state}", state)
    await b.made("sbx_free", one_shot=False)
    await b.step("sbx_free", "leased")
    await b.made("sbx_run", idle_timeout_ms=1000, one_shot=True)
    await b.step("sbx_run", "leased")
    for state in ("leased", "idle", "ready", "running", "paused", "pausing", "recycling"):
        view = await b.store.get_sandbox(f"sbx_{state}", None)
        assert view is not None and view.sandbox.idle_timeout_ms == 1000
    b.clock.now += 999
    assert await _due(b) == []
    b.clock.now += 1
    assert sorted(await _due(b)) == [(f"sbx_{name}", "idle_timeout") for name in ("idle", "leased", "ready")]


@check
async def a_use_starts_the_time_without_activity_anew_and_wins_against_who_looked_before(b: Bench) -> None:
    await b.made(idle_timeout_ms=1000, one_shot=False)
    await b.step(state="leased")
    before = await b.store.get_sandbox("sbx_1", None)
    b.clock.now += 999
    await b.store.touch(["sbx_1", "sbx_none", "sbx_1"])
    after = await b.store.get_sandbox("sbx_1", None)
    assert before is not None and after is not None
    assert after.sandbox.last_active_at == b.clock.now and after.sandbox.version == before.sandbox.version + 1
    assert after.sandbox.state == "leased" and after.lease == before.lease
    await b.store.touch(["sbx_1"])
    assert await b.store.get_sandbox("sbx_1", None) == after, "at the same instant: nothing"
    b.clock.now += 999
    assert await _due(b) == []
    b.clock.now += 1
    assert await _due(b) == [("sbx_1", "idle_timeout")]
    await b.step(state="terminated")
    ended = await b.store.get_sandbox("sbx_1", None)
    b.clock.now += 1
    await b.store.touch(["sbx_1"])
    assert await b.store.get_sandbox("sbx_1", None) == ended
    await b.store.touch([])


@check
async def times_can_be_moved_by_a_transition(b: Bench) -> None:
    await b.made(idle_timeout_ms=1000)
    await b.step(state="leased", changes={"expires_at": b.clock.now + 5, "idle_timeout_ms": None})
    b.clock.now += 5
    assert await _due(b) == [("sbx_1", "ttl")]
