"""Many callers at once: one winner, nothing lost, nothing seen half. A store with one writer passes these by its nature."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, TypeVar

from corral.domain.fence import Fence
from corral.domain.quota import Amounts, Ceiling
from corral.domain.records import EventRecord, InstanceChange, LeaseChange, Transition
from corral.errors import CorralError
from corral.ports.queue import Charge
from corral.testing.store.bench import EVENT, Bench, audit, check, key_of, refused
from corral.testing.store.queue import ROOM, finished, held, placed, rules

T = TypeVar("T")
ROUNDS = 8
CALLERS = 8


async def outcomes(*calls: Awaitable[T]) -> tuple[list[T], list[CorralError]]:
    """(what came back, refusals) of calls that run at once; any other failure is raised."""
    done: list[T] = []
    errors: list[CorralError] = []
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, CorralError):
            errors.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            done.append(answer)
    return done, errors


def codes(errors: list[CorralError]) -> set[str]:
    return {error.code for error in errors}


@check
async def of_execs_that_end_at_once_exactly_one_is_the_last(b: Bench) -> None:
    for number in range(ROUNDS):
        name = f"sbx_{number}"
        fence = await b.leased(name)
        ids = [f"exe_{number}_{i}" for i in range(4)]
        for exec_id in ids:
            await b.store.create_exec(b.exec(exec_id, name), fence)
        last = Transition(name, 2, "idle", replace(EVENT, event_type="exec_ended"))
        ended, errors = await outcomes(*(b.store.end_exec(e, changes={"state": "ended"}, last=last) for e in ids))
        assert len(ended) == 4 and not errors
        view = await b.store.get_sandbox(name, None)
        assert view is not None and (view.sandbox.state, view.sandbox.version) == ("idle", 3), "the last one saw it"


@check
async def no_exec_slips_in_beside_an_end_of_all(b: Bench) -> None:
    for number in range(ROUNDS):
        name = f"sbx_{number}"
        fence = await b.leased(name)
        take = LeaseChange("take", "system:destroy", 1000)
        end = Transition(name, 2, "sanitizing", EVENT, lease=take, end_execs="sandbox_deleted")
        calls: list[Awaitable[Any]] = [
            b.store.create_exec(b.exec(f"exe_{number}_{i}", name), fence) for i in range(CALLERS)
        ]
        calls.insert(number % CALLERS, b.store.commit_transition(end))
        _, errors = await outcomes(*calls)
        assert codes(errors) <= {"lease_lost"}
        execs = await b.store.list_execs(name)
        assert len(execs) + len(errors) == CALLERS
        assert {e.cancel_requested for e in execs} <= {"sandbox_deleted"}, "each that began is told to end"


@check
async def a_renewal_never_survives_a_change_of_hands(b: Bench) -> None:
    fence = await b.leased()
    for number in range(ROUNDS):
        calls: list[Awaitable[Any]] = [
            b.store.renew_lease("sbx_1", f"me/{number}" if number else "me/1", fence, 60_000 + i)
            for i in range(CALLERS)
        ]
        taken = LeaseChange("take", f"me/{number + 1}", 5_000)
        calls.insert(number % CALLERS, b.step(state="leased", lease=taken))
        done, errors = await outcomes(*calls)
        assert codes(errors) <= {"lease_lost"} and len(done) + len(errors) == CALLERS + 1
        view = await b.store.get_sandbox("sbx_1", None)
        assert view is not None and view.lease is not None
        assert (view.lease.lease_owner, view.lease.lease_version) == (f"me/{number + 1}", fence.token + 1)
        assert view.lease.expires_at == b.clock.now + 5_000, "no renewal of the former holder stretched it"
        fence = Fence(0, fence.token + 1)


@check
async def at_the_expiry_a_lease_is_either_renewed_or_taken(b: Bench) -> None:
    for number in range(ROUNDS * 2):
        name = f"sbx_{number}"
        fence = await b.leased(name, ttl_ms=1000)
        b.clock.now += 999
        take = LeaseChange("take", "you/1", 1000, if_expired=True)

        async def passes() -> None:
            await asyncio.sleep(0)
            b.clock.now += 1

        calls: list[Awaitable[Any]] = [
            b.store.renew_lease(name, "me/1", fence, 1000),
            b.store.commit_transition(Transition(name, 2, "leased", EVENT, lease=take)),
        ]
        done, errors = await outcomes(*(calls if number % 2 else calls[::-1]), passes())
        assert codes(errors) <= {"lease_lost", "conflict"}
        winners = [each for each in done if each is not None]
        assert len(winners) <= 1, "both were told that it is theirs"


@check
async def each_command_is_locked_by_one_worker(b: Bench) -> None:
    await b.made()
    await b.step(commands=tuple(b.command(f"cmd_{i:02}") for i in range(24)))

    async def drain(worker: str) -> list[str]:
        mine = []
        while (command := await b.store.lock_command(worker, 60_000)) is not None:
            assert (command.claimed_by, command.attempt) == (worker, 1)
            mine.append(command.command_id)
        return mine

    locked = [each for mine in await asyncio.gather(*(drain(f"w{i}") for i in range(6))) for each in mine]
    assert sorted(locked) == [f"cmd_{i:02}" for i in range(24)]


@check
async def each_command_has_one_outcome(b: Bench) -> None:
    await b.made()
    await b.step(commands=tuple(b.command(f"cmd_{i}", claimed_by="w") for i in range(ROUNDS)))
    for number in range(ROUNDS):
        answers = await asyncio.gather(
            *(b.store.finish_command(f"cmd_{number}", "w", {"n": i}) for i in range(CALLERS))
        )
        assert sum(answers) == 1


@check
async def each_abandoned_run_is_adopted_once(b: Bench) -> None:
    for i in range(40):
        await b.store.submit_run(b.run(f"run_{i:02}", created_at=b.clock.now + i, driver="gone"), audit())
    workers = [f"w{i}" for i in range(4)]
    for worker in workers:
        await b.store.beat(worker, 60_000, {})

    async def adopt(worker: str) -> list[str]:
        mine: list[str] = []
        while found := await b.store.adopt_runs(worker, 3):
            assert len(found) <= 3 and all(run.driver == worker for run in found)
            mine += [run.run_id for run in found]
        return mine

    # Who finds all that is left locked by others goes home: what they had then is still theirs.
    adopted = [each for mine in await asyncio.gather(*(adopt(w) for w in workers)) for each in mine]
    assert len(adopted) == len(set(adopted)) == 40


@check
async def a_run_is_finished_by_its_driver_or_taken_over_never_both(b: Bench) -> None:
    await b.store.beat("w2", 60_000, {})
    for number in range(ROUNDS):
        name = f"run_{number}"
        await b.store.submit_run(b.run(name, driver="w1"), audit())
        finish = b.store.finish_run(name, result={}, reason="ok", timings={}, audit=audit(), driver="w1")
        adopt = b.store.adopt_runs("w2")
        calls: list[Awaitable[Any]] = [finish, adopt] if number % 2 else [adopt, finish]
        _, errors = await outcomes(*calls)
        run = await b.store.get_run(name, "default")
        assert run is not None and codes(errors) <= {"superseded"}
        assert (run.state, run.driver) == (("requested", "w2") if errors else ("finished", "w1"))
        await b.store.finish_run(name, result={}, reason="ok", timings={}, audit=audit())


@check
async def a_finished_run_is_not_changed_by_who_came_late(b: Bench) -> None:
    for number in range(ROUNDS):
        name = f"run_{number}"
        await b.store.submit_run(b.run(name), audit())
        calls: list[Awaitable[Any]] = [
            b.store.update_run(name, expect_states=["requested"], changes={"state": "running", "owner": f"w{i}"})
            for i in range(CALLERS)
        ]
        finish = b.store.finish_run(name, result={"n": number}, reason="ok", timings={}, audit=audit())
        calls.insert(number % CALLERS, finish)
        done, errors = await outcomes(*calls)
        assert codes(errors) <= {"conflict"} and 1 <= len(done) <= 2
        run = await b.store.get_run(name, "default")
        assert run is not None and (run.state, run.result) == ("finished", {"n": number})


@check
async def an_instance_moves_once_from_one_state(b: Bench) -> None:
    await b.made()
    for number in range(ROUNDS):
        name = f"ins_{number}"
        await b.step(instances=(InstanceChange("insert", b.instance(name, state="condemned")),))
        done, errors = await outcomes(
            *(
                b.store.update_instance(name, expect_states=["condemned"], state="gone", ref={"n": i})
                for i in range(CALLERS)
            )
        )
        assert len(done) == 1 and codes(errors) == {"conflict"}


@check
async def steps_and_observations_of_one_sandbox_are_in_order(b: Bench) -> None:
    await b.made()
    ids = await asyncio.gather(
        *(b.store.add_event(EventRecord("sbx_1", "condition", None, None, {"n": i})) for i in range(24))
    )
    assert len(set(ids)) == 24
    history = [event.event_id for event in await b.store.history("sbx_1")]
    assert history == sorted(history) and set(ids) < set(history)


@check
async def one_key_makes_one_sandbox_with_all_its_steps(b: Bench) -> None:
    for number in range(ROUNDS):
        key = key_of(f"k{number}", route="POST /v1/sandboxes")

        def create(i: int, key: Any = key, number: int = number) -> Awaitable[Any]:
            name = f"sbx_{number}_{i}"
            step = Transition(name, 1, "planning", replace(EVENT, event_type="planning_started"))
            return b.store.create_sandbox(b.sandbox(name), EVENT, audit(name), key, [step])

        answers = await asyncio.gather(*(create(i) for i in range(CALLERS)))
        assert sum(made for _, made in answers) == 1
        assert {(s.sandbox_id, s.state, s.version) for s, _ in answers} == {(answers[0][0].sandbox_id, "planning", 2)}
        other = replace(key, body_digest="d2")
        await refused("idempotency_conflict", b.store.create_sandbox(b.sandbox("sbx_x"), EVENT, audit(), other))
    assert len(await b.store.list_sandboxes(None)) == ROUNDS


@check
async def a_run_that_ends_while_its_sandbox_is_made_leaves_the_sandbox_its_room(b: Bench) -> None:
    limits = rules()
    for number in range(ROUNDS * 3):
        run = await placed(b, f"run_{number}", limits)
        sandbox_id = str(run.sandbox_id)
        made = b.store.create_sandbox(
            b.sandbox(sandbox_id, one_shot=True), EVENT, audit(sandbox_id), charge=Charge(ROOM, limits)
        )
        calls: list[Awaitable[Any]] = [made, finished(b, run.run_id)]
        _, errors = await outcomes(*(calls if number % 2 else calls[::-1]))
        assert not errors
        assert await b.store.quota_drift() == [], "the sandbox lives, whoever was first"


@check
async def what_all_tenants_hold_is_never_more_than_there_is_while_things_come_and_go(b: Bench) -> None:
    limits = rules(host=Ceiling(running=3, sandboxes=6))
    over: list[Amounts] = []
    left = 6 * 4

    async def tenant(name: str) -> None:
        nonlocal left
        for i in range(4):
            run = await placed(b, f"run_{name}_{i}", limits, tenant_id=name)
            if run.state == "starting":
                await finished(b, run.run_id)
                left -= 1

    async def boxes(name: str) -> None:
        for i in range(4):
            sandbox = b.sandbox(f"sbx_{name}_{i}", tenant_id=name)
            try:
                await b.store.create_sandbox(sandbox, EVENT, audit(sandbox.sandbox_id), charge=Charge(ROOM, limits))
            except CorralError as error:
                assert error.code == "quota_exceeded"
                continue
            await b.step(sandbox.sandbox_id, state="terminated")

    async def loop(worker: str) -> None:
        nonlocal left
        number = 0
        while left:
            number += 1
            for run in await b.store.admit(limits, [f"sbx_{worker}_{number}_{i}" for i in range(3)]):
                await finished(b, run.run_id)
                left -= 1

    async def mender() -> None:
        while left:
            assert await b.store.mend_quota() == [], "nothing was ever wrong"
            use = (await b.store.tenant_use("*")).use
            if use.running > 3 or use.sandboxes > 6:
                over.append(use)
            await asyncio.sleep(0)

    names = [f"t{i}" for i in range(6)]
    async with asyncio.timeout(120):
        await asyncio.gather(
            *(tenant(n) for n in names), *(boxes(n) for n in names[:3]), *(loop(w) for w in "xy"), mender()
        )
    assert not over
    assert await held(b, "*") == Amounts()
