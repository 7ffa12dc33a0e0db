"""Calls that are repeated under their key: over processes, and no longer than keys live."""

from __future__ import annotations

from corral.domain.records import Idempotency
from corral.ports.repeats import KEY_LIFE_MS

RUN = {"command": ["print", "x"]}


async def test_the_sweep_forgets_keys_after_a_day_and_keeps_younger_ones(world, until):
    async def forgotten():
        return not world.store._keys

    first = (await world.call("POST", "/v1/runs", RUN, h_idempotency_key="k1", wait="5")).document["id"]
    again = (await world.call("POST", "/v1/runs", RUN, h_idempotency_key="k1", wait="5")).document["id"]
    assert again == first
    world.offset_ms += KEY_LIFE_MS + 1000
    world.services.upkeep._forgets_at_s = 0.0  # else its next look is a minute away
    await until(forgotten)
    other = (await world.call("POST", "/v1/runs", RUN, h_idempotency_key="k1", wait="5")).document["id"]
    assert other != first


async def test_more_old_keys_than_one_look_removes_go_with_the_next_looks(world, until):
    for n in range(1200):
        world.store._keys["default", "POST /v1/runs", f"k{n}"] = ("d", "run_1", 0)
    key = Idempotency("default", "POST /v1/runs", "young", "d")
    world.store._keys[key.tenant_id, key.route, key.key] = ("d", "run_1", world.now_ms())
    world.services.upkeep._forgets_at_s = 0.0
    await until(lambda: len(world.store._keys) == 1)
    assert await world.store.made_under(key) == "run_1"
