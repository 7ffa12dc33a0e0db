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


async def test_a_repeated_exec_is_the_first_one_whatever_became_of_its_sandbox_meanwhile(world):
    box = (await world.call("POST", "/v1/sandboxes", {})).document["id"]
    call = {"argv": ["print", "x"]}

    async def again(key="k1"):
        return await world.call("POST", f"/v1/sandboxes/{box}/execs", call, h_idempotency_key=key, wait="5")

    first = (await again()).document["id"]
    assert (await world.call("POST", f"/v1/sandboxes/{box}/pause")).status == 200
    while_paused = await again()
    assert (while_paused.status, while_paused.document["id"]) == (200, first)
    assert (await again("k2")).document["code"] == "sandbox_paused"
    assert (await world.call("DELETE", f"/v1/sandboxes/{box}")).status == 200
    gone = await again()
    assert (gone.status, gone.document["id"]) == (200, first)
    assert gone.document["result"]["reason"] == "ok", "what ran is not told as never begun"
    assert (await again("k2")).document["code"] == "sandbox_deleted"
    call["argv"] = ["print", "y"]
    assert (await again()).document["code"] == "idempotency_conflict"
