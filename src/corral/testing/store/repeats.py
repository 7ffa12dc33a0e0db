"""What `ports.repeats` promises."""

from __future__ import annotations

import asyncio

from corral.ports.repeats import DELIVERY_LIFE_MS, KEY_LIFE_MS
from corral.testing.store.bench import EVENT, Bench, audit, check, key_of, refused
from corral.testing.store.webhooks import hooked


@check
async def a_key_counts_for_a_day_and_is_new_after_that(b: Bench) -> None:
    await b.store.submit_run(b.run("run_1"), audit(), key_of())
    b.clock.now += KEY_LIFE_MS - 1
    again, made = await b.store.submit_run(b.run("run_2"), audit(), key_of())
    assert (again.run_id, made) == ("run_1", False), "a use does not make it younger"
    await refused("idempotency_conflict", b.store.submit_run(b.run("run_2"), audit(), key_of(digest="d2")))
    b.clock.now += 1
    second, made = await b.store.submit_run(b.run("run_2"), audit(), key_of(digest="d2"))
    assert (second.run_id, made) == ("run_2", True)
    b.clock.now += KEY_LIFE_MS - 1
    again, made = await b.store.submit_run(b.run("run_3"), audit(), key_of(digest="d2"))
    assert (again.run_id, made) == ("run_2", False), "its day begins anew"
    await refused("idempotency_conflict", b.store.submit_run(b.run("run_3"), audit(), key_of()))


@check
async def one_of_many_at_once_has_a_key_that_is_too_old(b: Bench) -> None:
    await b.store.create_sandbox(b.sandbox("sbx_old"), EVENT, audit(), key_of())
    b.clock.now += KEY_LIFE_MS
    calls = [b.store.create_sandbox(b.sandbox(f"sbx_{i}"), EVENT, audit(), key_of()) for i in range(12)]
    made, _ = await asyncio.gather(asyncio.gather(*calls), b.store.forget_old())
    assert len({record.sandbox_id for record, _ in made}) == 1 and [fresh for _, fresh in made].count(True) == 1
    assert len(await b.store.list_sandboxes(None)) == 2


@check
async def a_refused_call_leaves_an_old_key_as_it_was(b: Bench) -> None:
    await b.store.submit_run(b.run("run_1"), audit(), key_of())
    b.clock.now += KEY_LIFE_MS
    await refused("conflict", b.store.submit_run(b.run("run_1"), audit(), key_of(digest="d2")))
    assert await b.store.forget_old() == 1


@check
async def what_a_key_made_can_be_asked_for(b: Bench) -> None:
    assert await b.store.made_under(key_of()) is None
    await b.store.submit_run(b.run("run_1"), audit(), key_of())
    assert await b.store.made_under(key_of()) == "run_1"
    await refused("idempotency_conflict", b.store.made_under(key_of(digest="d2")))
    for other in (key_of("k2"), key_of(route="POST /v1/sandboxes"), key_of(tenant_id="t2")):
        assert await b.store.made_under(other) is None
    await refused("invalid_value", b.store.made_under(key_of("a\0b")))
    b.clock.now += KEY_LIFE_MS
    assert await b.store.made_under(key_of()) is None and await b.store.made_under(key_of(digest="d2")) is None


@check
async def old_keys_are_removed_a_bounded_number_at_a_time(b: Bench) -> None:
    for n in range(5):
        await b.store.submit_run(b.run(f"run_{n}"), audit(), key_of(f"k{n}"))
        b.clock.now += 1
    assert await b.store.forget_old() == 0
    b.clock.now += KEY_LIFE_MS - 2  # the last is a millisecond too young
    assert [await b.store.forget_old(3), await b.store.forget_old(3), await b.store.forget_old(3)] == [3, 1, 0]
    assert await b.store.made_under(key_of("k4")) == "run_4"
    assert await b.store.get_run("run_0", "default") is not None, "what it made stays"
    b.clock.now += 1
    assert await b.store.forget_old(0) == 0 and await b.store.forget_old() == 1


@check
async def webhooks_are_forgotten_a_week_after_their_end_and_never_before_it(b: Bench) -> None:
    done, open_, given_up = await hooked(b), await hooked(b, "run_2", end=False), await hooked(b, "run_3")
    await b.store.claim_deliveries("w", 1000)
    assert await b.store.delivery_tried(done, "w", state="delivered", status=200)
    b.clock.now += 1
    assert await b.store.delivery_tried(given_up, "w", state="failed", status=500)
    b.clock.now += DELIVERY_LIFE_MS - 1
    assert await b.store.forget_old(1) == 2, "a key, and a delivery"
    assert await b.store.delivery_of("run_1", "default") is None
    assert await b.store.delivery_of("run_3", "default") is not None
    b.clock.now += 10 * DELIVERY_LIFE_MS
    await b.store.forget_old()
    assert await b.store.delivery_of("run_3", "default") is None
    waiting = await b.store.delivery_of("run_2", "default")
    assert waiting is not None and waiting.delivery_id == open_
