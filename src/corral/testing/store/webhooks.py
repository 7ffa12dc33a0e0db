"""Webhooks: due with the end of their run, claimed by one worker at a time, tried until they are delivered or given up."""

from __future__ import annotations

import asyncio

from corral.domain.webhook import NewWebhook
from corral.ports.queue import Ticket
from corral.testing.store.bench import Bench, audit, check, key_of

URL = "https://hooks.example/a?b=c"
SECRET = "a secret of the caller"  # noqa: S105 - it is nobody's


async def hooked(b: Bench, run_id: str = "run_1", *, end: bool = True) -> str:
    """A run with a webhook; -> the id of its delivery."""
    hook = NewWebhook(f"whd_{run_id}", URL, SECRET)
    await b.store.submit_run(b.run(run_id), audit(run_id), key_of(run_id), Ticket(webhook=hook))
    if end:
        await b.store.finish_run(run_id, result={}, reason="ok", timings={}, audit=audit(run_id))
    return hook.delivery_id


@check
async def a_webhook_is_due_when_its_run_has_ended(b: Bench) -> None:
    await hooked(b, end=False)
    waiting = await b.store.delivery_of("run_1", "default")
    assert waiting is not None and (waiting.state, waiting.url, waiting.attempts) == ("waiting", URL, 0)
    assert "secret of" not in repr(waiting)
    assert await b.store.due_deliveries() == 0 and await b.store.claim_deliveries("w", 1000) == []
    await b.store.finish_run("run_1", result={}, reason="ok", timings={}, audit=audit())
    assert await b.store.due_deliveries() == 1
    [claimed] = await b.store.claim_deliveries("w", 1000)
    assert (claimed.run_id, claimed.secret, claimed.attempts) == ("run_1", "a secret of the caller", 1)
    assert await b.store.delivery_of("run_1", "t2") is None and await b.store.delivery_of("run_2", "default") is None


@check
async def a_replayed_submit_makes_no_second_webhook(b: Bench) -> None:
    await hooked(b, end=False)
    hook = NewWebhook("whd_again", URL)
    await b.store.submit_run(b.run("run_2"), audit(), key_of("run_1"), Ticket(webhook=hook))
    await b.store.finish_run("run_1", result={}, reason="ok", timings={}, audit=audit())
    assert [each.delivery_id for each in await b.store.claim_deliveries("w", 1000)] == ["whd_run_1"]


@check
async def a_delivery_has_one_claim_at_a_time(b: Bench) -> None:
    for i in range(6):
        await hooked(b, f"run_{i}")
    lots = await asyncio.gather(*(b.store.claim_deliveries(f"w{i}", 1000, 2) for i in range(5)))
    claimed = [each.delivery_id for lot in lots for each in lot]
    assert len(claimed) == len(set(claimed))
    claimed += [each.delivery_id for each in await b.store.claim_deliveries("w9", 1000, 9)]
    assert len(claimed) == len(set(claimed)) == 6
    assert await b.store.claim_deliveries("w", 1000, 9) == []
    b.clock.now += 1000
    again = await b.store.claim_deliveries("w", 1000, 9)
    assert len(again) == 6 and {each.attempts for each in again} == {2}, "a claim that has run out is free"
    assert not await b.store.delivery_tried("whd_run_0", "w0", state="delivered", status=200)


@check
async def an_attempt_that_failed_is_made_again_later(b: Bench) -> None:
    name = await hooked(b)
    await b.store.claim_deliveries("w", 1000)
    assert await b.store.delivery_tried(name, "w", state="pending", retry_ms=5000, status=503, error="说不")
    b.clock.now += 4999
    assert await b.store.claim_deliveries("w", 1000) == []
    b.clock.now += 1
    [again] = await b.store.claim_deliveries("w", 1000)
    assert (again.attempts, again.last_status, again.last_error) == (2, 503, "说不")
    assert await b.store.delivery_tried(name, "w", state="delivered", status=204)
    assert not await b.store.delivery_tried(name, "w", state="failed")
    b.clock.now += 10**9
    assert await b.store.due_deliveries() == 0
    done = await b.store.delivery_of("run_1", "default")
    assert done is not None and (done.state, done.last_status, done.last_error) == ("delivered", 204, None)
    assert done.done_at is not None and done.next_at is None and done.claimed_by is None


@check
async def the_secret_of_a_delivery_is_kept_while_it_is_needed_and_no_longer(b: Bench) -> None:
    for state in ("delivered", "failed"):
        name = await hooked(b, f"run_{state}")
        await b.store.claim_deliveries("w", 1000)
        await b.store.delivery_tried(name, "w", state="pending", retry_ms=0, status=503)
        [again] = await b.store.claim_deliveries("w", 1000)
        assert again.secret == SECRET
        await b.store.delivery_tried(name, "w", state=state, status=204)
        done = await b.store.delivery_of(f"run_{state}", "default")
        assert done is not None and (done.state, done.secret, done.url) == (state, None, URL)


@check
async def a_tenants_secret_is_made_once_and_replaced_with_an_overlap(b: Bench) -> None:
    first = await asyncio.gather(*(b.store.webhook_secrets("default", f"s{i}") for i in range(5)))
    assert len({each.secret for each in first}) == 1
    other = await b.store.webhook_secrets("t2", "other")
    assert (other.secret, other.old_secret) == ("other", None)
    new = await b.store.rotate_webhook_secret("default", "new", 1000)
    assert (new.secret, new.old_secret) == ("new", first[0].secret)
    b.clock.now += 1000
    later = await b.store.webhook_secrets("default", "x")
    assert (later.secret, later.old_secret, later.old_until) == ("new", None, None)
    assert (await b.store.rotate_webhook_secret("t3", "first", 1000)).old_secret is None
