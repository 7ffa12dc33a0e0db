"""The checker of histories finds what it should find, in histories made by hand and in good ones that are broken at one place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.testing.history.checker import RULES, check
from corral.testing.history.events import Event, Fence, Recorder, read

MS = 1_000_000


class Story:
    """Events written down one after another; `later` lets time pass."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now = 0
        self._ops = 0

    def later(self, ms: float = 1) -> None:
        self.now += round(ms * MS)

    def note(self, by: str, kind: str, **facts: Any) -> Event:
        self.later()
        event = Event(self.now, by, kind, facts)
        self.events.append(event)
        return event

    def ask(self, by: str, call: str, **facts: Any) -> str:
        self._ops += 1
        op = f"{by}.{self._ops}"
        self.note(by, "invoke", op=op, call=call, **facts)
        return op

    def tell(self, op: str, ok: bool = True, **facts: Any) -> None:
        self.note(op.partition(".")[0], "return", op=op, ok=ok, **facts)

    # -- whole acts --------------------------------------------------------------------------------------------------------
    def create(self, sandbox: str, instance: str) -> None:
        op = self.ask("c0", "create", key=f"make-{sandbox}")
        self.note("node", "create", instance=instance, sandbox=sandbox, fence="1.1")
        self.note("node", "fenced", instance=instance, sandbox=sandbox, fence="1.1", mode="kill")
        self.tell(op, sandbox=sandbox)

    def fence(self, sandbox: str, instance: str, fence: str, mode: str = "kill") -> None:
        self.note("node", "floor", instance=instance, sandbox=sandbox, fence=fence)
        self.note("node", "fenced", instance=instance, sandbox=sandbox, fence=fence, mode=mode)

    def acquire(self, by: str, sandbox: str, instance: str, fence: str, ttl_ms: int = 1000) -> None:
        op = self.ask(by, "acquire", sandbox=sandbox, owner=by)
        self.fence(sandbox, instance, fence)
        self.tell(op, sandbox=sandbox, fence=fence, ttl_ms=ttl_ms)

    def exec(self, by: str, sandbox: str, instance: str, fence: str, ms: float = 5) -> str:
        op = self.ask(by, "exec", sandbox=sandbox, fence=fence, owner=by, key=f"key-{self._ops}")
        exe = f"exe_{op}"
        self.note("node", "start", instance=instance, sandbox=sandbox, exec=exe, fence=fence, op=op)
        self.note("guest", "line", sandbox=sandbox, op=op, fence=fence, what="begin")
        self.note("node", "started", instance=instance, sandbox=sandbox, exec=exe, fence=fence, op=op)
        self.later(ms)
        self.note("guest", "line", sandbox=sandbox, op=op, fence=fence, what="end")
        self.note("node", "end", exec=exe)
        self.tell(op, exec=exe, reason="ok", exit_code=0, started=True, out=f"done {op}\n")
        return op

    def refused(self, by: str, call: str, sandbox: str, fence: str, code: str = "lease_lost") -> None:
        op = self.ask(by, call, sandbox=sandbox, fence=fence, owner=by)
        self.tell(op, False, code=code)

    def renew(self, by: str, sandbox: str, fence: str, ttl_ms: int = 1000) -> None:
        op = self.ask(by, "renew", sandbox=sandbox, fence=fence, owner=by)
        self.tell(op, ttl_ms=ttl_ms)

    def delete(self, by: str, sandbox: str, instance: str) -> None:
        op = self.ask(by, "delete", sandbox=sandbox)
        self.note("node", "destroy", instance=instance, sandbox=sandbox)
        self.note("node", "destroyed", instance=instance, sandbox=sandbox, clean=True)
        self.tell(op)

    def run(self, by: str, run: str) -> str:
        op = self.ask(by, "submit", key=f"key-{run}")
        self.note("node", "start", instance=f"ins_{run}", sandbox=f"sbx_{run}", exec=f"exe_{run}", fence="1.1", op=op)
        self.note("node", "started", instance=f"ins_{run}", sandbox=f"sbx_{run}", exec=f"exe_{run}", fence="1.1", op=op)
        self.note("node", "end", instance=f"ins_{run}", sandbox=f"sbx_{run}", exec=f"exe_{run}")
        result = {"reason": "ok", "exit_code": 0, "started": True, "out": f"done {op}\n"}
        self.tell(op, run=run, state="finished", **result)
        again = self.ask(by, "result", run=run)
        self.tell(again, run=run, state="finished", of=op, **result)
        self.note("final", "run", run=run, of=op, state="finished", **result)
        return op

    def pause(self, by: str, sandbox: str, fence: str) -> None:
        self.tell(self.ask(by, "pause", sandbox=sandbox, fence=fence, owner=by), tries=1)

    def resume(self, by: str, sandbox: str, fence: str) -> None:
        self.tell(self.ask(by, "resume", sandbox=sandbox, fence=fence, owner=by), tries=1)

    def foreign(
        self, whose: str, ok: bool = False, code: str = "not_found", detail: str = "there is no run ID"
    ) -> None:
        op = self.ask("a", "foreign", route="GET /v1/runs/{}", whose=whose, id="run_7")
        self.tell(op, ok, **({} if ok else {"code": code, "detail": detail}))

    def submit(self, name: str, run: str, priority: str = "normal", hook: str | None = None) -> None:
        more = {} if hook is None else {"hook": hook}
        op = self.ask("a", "submit", key=name, of=name, priority=priority, tenant=0, **more)
        self.tell(op, run=run, of=name, state="queued", waits=True)

    def waits(self, name: str, run: str) -> None:
        op = self.ask("a", "result", run=run, of=name)
        self.tell(op, run=run, of=name, state="queued", waits=True)

    def begins(self, name: str, run: str) -> None:
        facts = {"instance": f"ins_{run}", "sandbox": f"sbx_{run}", "exec": f"exe_{run}", "fence": "1.1", "op": name}
        self.note("node", "start", **facts)
        self.note("node", "started", **facts)

    def ends(self, name: str, run: str, **other: Any) -> None:
        self.note("node", "end", instance=f"ins_{run}", sandbox=f"sbx_{run}", exec=f"exe_{run}")
        result = {"reason": "ok", "exit_code": 0, "started": True, "out": f"done {name}\n"}
        self.note("final", "run", run=run, of=name, state="finished", **result)

    def hook(self, name: str, run: str, **other: Any) -> None:
        told = {
            "state": "finished",
            "reason": "ok",
            "exit_code": 0,
            "started": True,
            "delivery": "dlv_1",
            "signed": True,
        }
        self.note("receiver", "hook", of=name, run=run, **{**told, **other})

    def two_that_wait(self) -> None:
        """The one with the higher priority came later and goes first; both are told of."""
        self.submit("a.8-0", "run_20", "low", "own")
        self.submit("a.8-1", "run_21", "high")
        self.waits("a.8-0", "run_20")
        self.waits("a.8-1", "run_21")
        self.begins("a.8-1", "run_21")
        self.begins("a.8-0", "run_20")
        self.ends("a.8-1", "run_21")
        self.ends("a.8-0", "run_20")
        self.hook("a.8-0", "run_20")

    def quiet(self) -> None:
        self.note("final", "quota", tenant="default", of="sandboxes", reserved=0, used=0)
        self.note("final", "left", what="processes")


def good() -> Story:
    """Two owners after each other, the first of whom sleeps too long; a run; a delete."""
    story = Story()
    story.create("sbx_1", "ins_1")
    story.acquire("a", "sbx_1", "ins_1", "1.2")
    story.exec("a", "sbx_1", "ins_1", "1.2")
    story.renew("a", "sbx_1", "1.2")
    story.later(1500)
    story.acquire("b", "sbx_1", "ins_1", "1.4")
    story.refused("a", "exec", "sbx_1", "1.2")
    story.refused("a", "renew", "sbx_1", "1.2")
    story.exec("b", "sbx_1", "ins_1", "1.4")
    story.pause("b", "sbx_1", "1.4")
    story.resume("b", "sbx_1", "1.4")
    story.run("c", "run_1")
    story.foreign("nobody")
    story.foreign("another")
    story.two_that_wait()
    story.delete("b", "sbx_1", "ins_1")
    story.quiet()
    return story


def rules_of(events: list[Event]) -> set[str]:
    return {violation.rule for violation in check(events).violations}


def test_a_good_history_passes_and_gives_every_rule_something_to_look_at() -> None:
    verdict = check(good().events)
    assert verdict.ok, str(verdict)
    assert set(verdict.examined) == set(RULES)
    assert all(verdict.examined.values()), verdict.examined


def test_a_history_survives_its_file_and_a_line_that_was_cut_short_is_none(tmp_path: Any) -> None:
    recorder = Recorder(tmp_path / "h", "c1")
    noted = recorder.note("invoke", op="c1.1", call="exec", text="你好", fence=None)
    recorder.close()
    with open(tmp_path / "h", "a") as file:
        file.write('{"at": 1, "by"')
    with open(tmp_path / "h") as file:
        assert list(read(file)) == [noted]
    assert "fence" not in noted.facts


# -- by hand ---------------------------------------------------------------------------------------------------------------------


def _same_token(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=1)
    story.later(10)
    story.acquire("b", "sbx_2", "ins_2", "1.2", ttl_ms=1)


def _token_falls(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.9", ttl_ms=1)
    story.later(10)
    story.acquire("b", "sbx_2", "ins_2", "1.4", ttl_ms=1)


def _taken_too_early(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=1000)
    story.later(500)
    story.acquire("b", "sbx_2", "ins_2", "1.3", ttl_ms=1000)


def _made_again(story: Story) -> None:
    story.note("node", "create", instance="ins_2", sandbox="sbx_2", fence="1.0")
    story.note("node", "destroyed", instance="ins_2", sandbox="sbx_2", clean=True)
    story.create("sbx_2", "ins_2")
    story.acquire("a", "sbx_2", "ins_2", "1.2")


def _renewed_by_its_use(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=1000)
    story.later(600)
    story.exec("a", "sbx_2", "ins_2", "1.2")
    story.later(600)
    story.renew("a", "sbx_2", "1.2")


def _renewed_and_taken(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=1000)
    story.later(900)
    story.renew("a", "sbx_2", "1.2", ttl_ms=1000)
    story.later(500)
    story.acquire("b", "sbx_2", "ins_2", "1.3", ttl_ms=1000)


def _lost_too_early(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=1000)
    story.later(500)
    story.refused("a", "renew", "sbx_2", "1.2")


def _held_by_another_in_my_time(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=1000)
    story.refused("a", "exec", "sbx_2", "1.2", "lease_held")


def _renewed_too_late(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=100)
    story.later(200)
    story.renew("a", "sbx_2", "1.2")


def _stale_delete(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=10)
    story.later(100)
    story.acquire("b", "sbx_2", "ins_2", "1.3", ttl_ms=10)
    story.tell(story.ask("a", "delete", sandbox="sbx_2", fence="1.2", owner="a"))


def _stale_write(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=10)
    story.later(100)
    story.acquire("b", "sbx_2", "ins_2", "1.3", ttl_ms=10)
    op = story.ask("a", "write", sandbox="sbx_2", fence="1.2", owner="a")
    story.tell(op)


def _stale_renewal(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=10)
    story.later(100)
    story.acquire("b", "sbx_2", "ins_2", "1.3", ttl_ms=10)
    story.later(100)
    story.renew("a", "sbx_2", "1.2")


def _stale_exec(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=10)
    story.later(100)
    story.acquire("b", "sbx_2", "ins_2", "1.3", ttl_ms=10)
    story.exec("a", "sbx_2", "ins_2", "1.2")


def _no_barrier(story: Story) -> None:
    op = story.ask("a", "acquire", sandbox="sbx_2", owner="a")
    story.note("node", "floor", instance="ins_2", sandbox="sbx_2", fence="1.2")
    story.tell(op, sandbox="sbx_2", fence="1.2", ttl_ms=10)


def _late_barrier(story: Story) -> None:
    op = story.ask("a", "acquire", sandbox="sbx_2", owner="a")
    story.note("node", "floor", instance="ins_2", sandbox="sbx_2", fence="1.2")
    story.tell(op, sandbox="sbx_2", fence="1.2", ttl_ms=10)
    story.note("node", "fenced", instance="ins_2", sandbox="sbx_2", fence="1.2", mode="kill")


def _no_barrier_while_paused(story: Story) -> None:
    story.pause("b", "sbx_2", "1.1")
    _no_barrier(story)


def _floor_falls(story: Story) -> None:
    story.fence("sbx_2", "ins_2", "1.5")
    story.fence("sbx_2", "ins_2", "1.4")


def _survivor(story: Story) -> None:
    for kind in ("start", "started"):
        story.note("node", kind, instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.1", op="x.9")
    story.fence("sbx_2", "ins_2", "1.5")
    story.note("node", "end", exec="exe_9")


def _late_line(story: Story) -> None:
    story.note("node", "start", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.1", op="x.9")
    story.note("node", "end", instance="ins_2", sandbox="sbx_2", exec="exe_9")
    story.fence("sbx_2", "ins_2", "1.5")
    story.note("guest", "line", sandbox="sbx_2", op="x.9", fence="1.1", what="tick")


def _undead(story: Story) -> None:
    story.delete("a", "sbx_2", "ins_2")
    story.note("node", "start", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.7", op="x.9")


def _ghost(story: Story) -> None:
    story.note("node", "start", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.1", op="x.9")
    story.delete("a", "sbx_2", "ins_2")
    story.note("guest", "line", sandbox="sbx_2", op="x.9", fence="1.1", what="tick")


def _twice_by_exec(story: Story) -> None:
    for exe in ("exe_8", "exe_9"):
        story.note("node", "start", instance="ins_2", sandbox="sbx_2", exec=exe, fence="1.1", op="x.9")


def _twice_inside(story: Story) -> None:
    for _ in range(2):
        story.note("guest", "line", sandbox="sbx_2", op="x.9", fence="1.1", what="begin")


def _twice_in_two_bodies(story: Story) -> None:
    for instance in ("ins_2", "ins_3"):
        story.note("node", "start", instance=instance, sandbox="sbx_2", exec="exe_9", fence="1.1", op="x.9")


def _denied_start(story: Story) -> None:
    op = story.ask("a", "exec", sandbox="sbx_2")
    story.note("guest", "line", sandbox="sbx_2", op=op, fence="1.1", what="begin")
    story.tell(op, exec="exe_9", reason="infra_error", started=False)


def _invented_start(story: Story) -> None:
    op = story.ask("a", "exec", sandbox="sbx_2")
    story.tell(op, exec="exe_9", reason="timeout", started=True)


def _false_success(story: Story) -> None:
    op = story.ask("a", "exec", sandbox="sbx_2")
    story.note("node", "start", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.1", op=op)
    story.tell(op, exec="exe_9", reason="ok", started=True, out="")


def _run_without_end(story: Story) -> None:
    op = story.ask("a", "submit", key="k")
    story.tell(op, run="run_9", state="queued")
    story.note("final", "run", run="run_9", of=op, state="running")


def _run_gone(story: Story) -> None:
    op = story.ask("a", "submit", key="k")
    story.tell(op, run="run_9", state="queued")


def _two_results(story: Story) -> None:
    for reason in ("timeout", "infra_error"):
        op = story.ask("a", "result", run="run_9")
        story.tell(op, run="run_9", state="finished", reason=reason, started=None)
    story.note("final", "run", run="run_9", state="finished", reason="infra_error", started=None)


def _two_for_one_key(story: Story) -> None:
    for sandbox in ("sbx_8", "sbx_9"):
        story.tell(story.ask("a", "create", key="k"), sandbox=sandbox)


def _two_runs_for_one(story: Story) -> None:
    for run in ("run_8", "run_9"):
        story.note("final", "run", run=run, of="a.77", state="finished")


def _other_body(story: Story) -> None:
    story.tell(story.ask("a", "create", key="k", other=True), sandbox="sbx_9")


def _own_body_refused(story: Story) -> None:
    story.tell(story.ask("a", "create", key="k"), False, code="idempotency_conflict")


def _quota_kept(story: Story) -> None:
    story.note("final", "quota", tenant="default", of="sandboxes", reserved=3, used=2)


def _left(story: Story) -> None:
    story.note("final", "left", what="process", text="4711 sleep")


def _left_by_gc(story: Story) -> None:
    copied_at = story.now
    story.create("sbx_2", "ins_2")
    _restore(story, copied_at)
    story.note("final", "left", what="directory", text="2", instance="ins_2", after="gc")


def _defect(story: Story) -> None:
    story.tell(story.ask("a", "delete", sandbox="sbx_9"), False, code="infra_error", detail="an unexpected KeyError")


def _goes_on_while_paused(story: Story) -> None:
    story.pause("b", "sbx_2", "1.4")
    story.note("guest", "line", sandbox="sbx_2", op="x.9", fence="1.4", what="tick")
    story.resume("b", "sbx_2", "1.4")


def _starts_while_paused(story: Story) -> None:
    story.pause("b", "sbx_2", "1.4")
    story.note("node", "start", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.4", op="x.9")


def _paused_by_an_old_holder(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=10)
    story.later(100)
    story.acquire("b", "sbx_2", "ins_2", "1.3", ttl_ms=10)
    story.pause("a", "sbx_2", "1.2")


def _foreign_answers(story: Story) -> None:
    story.foreign("another", ok=True)


def _foreign_is_refused_otherwise(story: Story) -> None:
    story.foreign("another", code="forbidden")


def _foreign_is_told_apart(story: Story) -> None:
    story.foreign("another", detail="the run ID is not yours")


def _one_sandbox_for_two_tenants(story: Story) -> None:
    for tenant in (0, 1):
        story.tell(story.ask("a", "create", key="k", tenant=tenant), sandbox="sbx_9")


def _low_before_high(story: Story) -> None:
    story.submit("a.9-0", "run_30", "low")
    story.submit("a.9-1", "run_31", "high")
    story.waits("a.9-0", "run_30")
    story.begins("a.9-0", "run_30")
    story.waits("a.9-1", "run_31")


def _last_before_first(story: Story) -> None:
    story.submit("a.9-0", "run_30")
    story.submit("a.9-1", "run_31")
    story.begins("a.9-1", "run_31")
    story.waits("a.9-0", "run_30")


def _never_told_of_the_end(story: Story) -> None:
    story.submit("a.9", "run_30", hook="own")
    story.begins("a.9", "run_30")
    story.ends("a.9", "run_30")


def _told(story: Story, **other: Any) -> None:
    story.submit("a.9", "run_30", hook="own")
    story.begins("a.9", "run_30")
    story.ends("a.9", "run_30")
    story.hook("a.9", "run_30", **other)


def _not_signed(story: Story) -> None:
    _told(story, signed=False)


def _told_as_running(story: Story) -> None:
    _told(story, state="running", reason=None)


def _told_of_another_end(story: Story) -> None:
    _told(story, reason="timeout", exit_code=124)


def _told_to_another(story: Story) -> None:
    story.submit("a.9", "run_30", hook="own")
    story.begins("a.9", "run_30")
    story.ends("a.9", "run_30")
    story.hook("a.10", "run_30")


def _told_under_two_ids(story: Story) -> None:
    _told(story)
    story.hook("a.9", "run_30", delivery="dlv_2")


def _told_too_early(story: Story) -> None:
    story.submit("a.9", "run_30", hook="own")
    story.begins("a.9", "run_30")
    story.hook("a.9", "run_30")
    story.ends("a.9", "run_30")


BAD: list[tuple[str, Callable[[Story], None]]] = [
    ("paused-is-still", _goes_on_while_paused),
    ("paused-is-still", _starts_while_paused),
    ("no-stale-call", _paused_by_an_old_holder),
    ("foreign-is-nobodys", _foreign_answers),
    ("foreign-is-nobodys", _foreign_is_refused_otherwise),
    ("foreign-is-nobodys", _foreign_is_told_apart),
    ("foreign-is-nobodys", _one_sandbox_for_two_tenants),
    ("priority", _low_before_high),
    ("priority", _last_before_first),
    ("webhook", _never_told_of_the_end),
    ("webhook", _not_signed),
    ("webhook", _told_as_running),
    ("webhook", _told_of_another_end),
    ("webhook", _told_to_another),
    ("webhook", _told_under_two_ids),
    ("webhook", _told_too_early),
    ("tokens-rise", _same_token),
    ("tokens-rise", _token_falls),
    ("one-owner", _taken_too_early),
    ("one-owner", _renewed_and_taken),
    ("promise-kept", _lost_too_early),
    ("promise-kept", _held_by_another_in_my_time),
    ("expired-is-lost", _renewed_too_late),
    ("no-stale-call", _stale_delete),
    ("no-stale-call", _stale_write),
    ("no-stale-call", _stale_renewal),
    ("no-stale-call", _stale_exec),
    ("no-stale-effect", _stale_exec),
    ("barrier", _no_barrier),
    ("barrier", _late_barrier),
    ("barrier", _no_barrier_while_paused),
    ("floors-rise", _floor_falls),
    ("no-stale-effect", _survivor),
    ("no-stale-effect", _late_line),
    ("dead-is-dead", _undead),
    ("dead-is-dead", _ghost),
    ("code-once", _twice_by_exec),
    ("code-once", _twice_inside),
    ("code-once", _twice_in_two_bodies),
    ("started-agrees", _denied_start),
    ("started-agrees", _invented_start),
    ("started-agrees", _false_success),
    ("ends-once", _run_without_end),
    ("ends-once", _run_gone),
    ("ends-once", _two_results),
    ("one-per-key", _two_for_one_key),
    ("one-per-key", _two_runs_for_one),
    ("one-per-key", _other_body),
    ("one-per-key", _own_body_refused),
    ("quota", _quota_kept),
    ("nothing-left", _left),
    ("nothing-left", _left_by_gc),
    ("no-defect", _defect),
]


@pytest.mark.parametrize(("rule", "tell"), BAD, ids=[f"{rule}{tell.__name__}" for rule, tell in BAD])
def test_what_must_not_happen_is_found_and_told_with_its_events(rule: str, tell: Callable[[Story], None]) -> None:
    story = good()
    before = len(story.events)
    tell(story)
    found = [violation for violation in check(story.events).violations if violation.rule == rule]
    assert found, f"{rule} missed it"
    assert any(event in story.events[before:] for event in found[0].events)
    assert str(found[0]).count("\n    ") == len(found[0].events) and found[0].what


def test_every_rule_has_a_history_that_breaks_it() -> None:
    assert {rule for rule, _ in BAD} == set(RULES)


# -- what is allowed -------------------------------------------------------------------------------------------------------------


def _restore(story: Story, copied_at: int) -> None:
    began = story.now + MS
    story.later(100)
    story.events.append(
        Event(began, "nemesis", "fault", {"what": "restore", "copied_at": copied_at, "until": story.now})
    )


def _by_its_holder(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=10_000)
    story.tell(story.ask("a", "release", sandbox="sbx_2", fence="1.2", owner="a"))
    story.acquire("b", "sbx_2", "ins_2", "1.4", ttl_ms=1000)


def _once_more(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=10_000)
    story.acquire("a", "sbx_2", "ins_2", "1.3", ttl_ms=10_000)
    story.refused("a", "exec", "sbx_2", "1.2")


def _killed_by_the_barrier(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=10)
    op = story.ask("a", "exec", sandbox="sbx_2", fence="1.2", owner="a", key="k9")
    story.note("node", "start", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.2", op=op)
    story.note("node", "started", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.2", op=op)
    story.later(100)
    ask = story.ask("b", "acquire", sandbox="sbx_2", owner="b")
    story.note("node", "floor", instance="ins_2", sandbox="sbx_2", fence="1.4")
    story.note("node", "end", instance="ins_2", sandbox="sbx_2", exec="exe_9")
    story.note("node", "fenced", instance="ins_2", sandbox="sbx_2", fence="1.4", mode="kill")
    story.tell(ask, sandbox="sbx_2", fence="1.4", ttl_ms=10)
    story.tell(op, exec="exe_9", reason="lease_lost", started=True)


def _refused_by_the_guest_after_the_barrier(story: Story) -> None:
    story.note("node", "start", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.1", op="x.9")
    story.fence("sbx_2", "ins_2", "1.5")
    story.note("node", "refused", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.1", op="x.9")


def _adopted(story: Story) -> None:
    for kind in ("start", "started"):
        story.note("node", kind, instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.1", op="x.9")
    story.fence("sbx_2", "ins_2", "1.5", mode="adopt")
    story.note("guest", "line", sandbox="sbx_2", op="x.9", fence="1.1", what="tick")
    story.note("node", "end", instance="ins_2", sandbox="sbx_2", exec="exe_9")


def _never_told(story: Story) -> None:
    story.ask("a", "submit", key="k")
    story.ask("a", "exec", sandbox="sbx_2", fence="1.1")


def _sent_again_after_a_crash(story: Story) -> None:
    for _ in range(2):
        story.note("node", "start", instance="ins_2", sandbox="sbx_2", exec="exe_9", fence="1.1", op="x.9")


def _forgotten(story: Story) -> None:
    copied_at = story.now
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=60_000)
    story.tell(story.ask("a", "submit", key="k9"), run="run_9", state="queued")
    _restore(story, copied_at)
    story.refused("a", "renew", "sbx_2", "1.2")
    story.acquire("b", "sbx_2", "ins_2", "1.4", ttl_ms=1000)
    op = story.ask("a", "submit", key="k9")
    story.tell(op, run="run_10", state="finished", reason="infra_error", started=None)
    story.note("final", "run", run="run_10", of=op, state="finished", reason="infra_error", started=None)


def _deleted_again(story: Story) -> None:
    story.acquire("a", "sbx_2", "ins_2", "1.2", ttl_ms=10)
    story.later(100)
    story.acquire("b", "sbx_2", "ins_2", "1.3", ttl_ms=10)
    story.delete("b", "sbx_2", "ins_2")
    story.tell(story.ask("a", "delete", sandbox="sbx_2", fence="1.2", owner="a"))


def _low_while_high_is_somebody_elses(story: Story) -> None:
    op = story.ask("b", "submit", key="b.9", of="b.9", priority="high", tenant=1)
    story.tell(op, run="run_30", of="b.9", state="queued", waits=True)
    story.submit("a.9-1", "run_31", "low")
    story.begins("a.9-1", "run_31")
    story.waits("b.9", "run_30")
    story.note("final", "run", run="run_30", of="b.9", state="finished", reason="cancelled", started=False)
    story.ends("a.9-1", "run_31")


def _high_came_when_low_had_begun(story: Story) -> None:
    story.submit("a.9-0", "run_30", "low")
    story.begins("a.9-0", "run_30")
    story.submit("a.9-1", "run_31", "high")
    story.waits("a.9-1", "run_31")
    story.begins("a.9-1", "run_31")
    story.ends("a.9-0", "run_30")
    story.ends("a.9-1", "run_31")


def _resumed_by_one_who_was_never_answered(story: Story) -> None:
    story.ask("b", "resume", sandbox="sbx_2", fence="1.4", owner="b")
    story.pause("b", "sbx_2", "1.4")
    story.note("guest", "line", sandbox="sbx_2", op="x.9", fence="1.4", what="tick")


def _taken_for_a_guest_that_is_frozen_and_forgotten_to_be(story: Story) -> None:
    copied_at = story.now
    story.pause("b", "sbx_2", "1.2")
    _restore(story, copied_at)
    op = story.ask("a", "acquire", sandbox="sbx_2", owner="a")
    story.note("node", "floor", instance="ins_2", sandbox="sbx_2", fence="1.5")
    story.tell(op, sandbox="sbx_2", fence="1.5", ttl_ms=10)


def _told_twice_under_one_id(story: Story) -> None:
    _told(story)
    story.hook("a.9", "run_30")


def _the_same_key_of_two_tenants(story: Story) -> None:
    for tenant in (0, 1):
        story.tell(story.ask("a", "create", key="k", tenant=tenant), sandbox=f"sbx_9{tenant}")


def _kept_for_the_operator(story: Story) -> None:
    copied_at = story.now
    story.create("sbx_2", "ins_2")
    _restore(story, copied_at)
    story.note("final", "left", what="directory", text="2", instance="ins_2")


@pytest.mark.parametrize(
    "tell",
    [
        _by_its_holder,
        _once_more,
        _made_again,
        _renewed_by_its_use,
        _killed_by_the_barrier,
        _refused_by_the_guest_after_the_barrier,
        _adopted,
        _never_told,
        _sent_again_after_a_crash,
        _forgotten,
        _deleted_again,
        _kept_for_the_operator,
        _low_while_high_is_somebody_elses,
        _high_came_when_low_had_begun,
        _resumed_by_one_who_was_never_answered,
        _taken_for_a_guest_that_is_frozen_and_forgotten_to_be,
        _told_twice_under_one_id,
        _the_same_key_of_two_tenants,
    ],
    ids=lambda tell: tell.__name__.strip("_"),
)
def test_what_may_happen_is_no_violation(tell: Callable[[Story], None]) -> None:
    story = good()
    tell(story)
    verdict = check(story.events)
    assert verdict.ok, str(verdict)


def test_a_restore_excuses_no_token_that_falls() -> None:
    story = good()
    copied_at = story.now
    story.acquire("a", "sbx_2", "ins_2", "1.9", ttl_ms=60_000)
    _restore(story, copied_at)
    story.acquire("b", "sbx_2", "ins_2", "1.4", ttl_ms=1000)
    assert {"tokens-rise", "floors-rise"} <= rules_of(story.events)


def test_a_restore_excuses_nothing_that_was_over_before_the_copy() -> None:
    story = good()
    _restore(story, copied_at=story.now)
    story.events = [event for event in story.events if event.kind != "run"]
    story.note("final", "run", run="run_8", state="finished")
    assert "ends-once" in rules_of(story.events)


# -- at random -------------------------------------------------------------------------------------------------------------------


def lived(seed: int) -> Story:
    """What a correct system makes of clients that acquire, renew, work, sleep, release and delete."""
    dice = random.Random(seed)
    story = Story()
    token = {f"sbx_{n}": 1 for n in range(2)}
    free_at = dict.fromkeys(token, 0)
    held: dict[str, tuple[str, str]] = {}
    for name in token:
        story.create(name, f"ins_{name}")
    for step in range(dice.randint(15, 40)):
        name = dice.choice(sorted(token))
        by, instance = f"c{dice.randint(1, 3)}", f"ins_{name}"
        story.later(dice.choice([1, 50, 400]))
        owner, fence = held.get(name, ("", ""))
        match dice.choice(["acquire", "acquire", "exec", "exec", "renew", "stale", "release", "run"]):
            case "acquire" if story.now >= free_at[name] or owner == by:
                token[name] += dice.randint(1, 2)
                ttl = dice.choice([100, 1000])
                fence = f"1.{token[name]}"
                story.acquire(by, name, instance, fence, ttl)
                held[name], free_at[name] = (by, fence), story.now + ttl * MS
            case "exec" if owner and story.now < free_at[name]:
                story.exec(owner, name, instance, fence, ms=dice.choice([1, 30]))
            case "renew" if owner and story.now < free_at[name]:
                story.renew(owner, name, fence)
                free_at[name] = story.now + 1000 * MS
            case "stale" if owner and token[name] > 2:
                story.refused("c9", dice.choice(["exec", "renew", "write"]), name, "1.1")
            case "release" if owner:
                story.tell(story.ask(owner, "release", sandbox=name, fence=fence, owner=owner))
                token[name] += 1
                story.fence(name, instance, f"1.{token[name]}")
                held.pop(name)
                free_at[name] = 0
            case "run":
                story.run(by, f"run_{step}")
    for name in token:
        story.delete("c0", name, f"ins_{name}")
    story.quiet()
    return story


SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_a_history_of_a_correct_system_has_no_violation(seed: int) -> None:
    verdict = check(lived(seed).events)
    assert verdict.ok, str(verdict)


@given(SEEDS)
def test_the_order_in_which_files_are_read_does_not_matter(seed: int) -> None:
    events = lived(seed).events
    random.Random(seed).shuffle(events)
    assert check(events).ok


Break = Callable[[list[Event], random.Random], "list[Event] | None"]


def _pick(events: list[Event], dice: random.Random, wanted: Callable[[Event], bool]) -> int | None:
    places = [place for place, event in enumerate(events) if wanted(event)]
    return dice.choice(places) if places else None


def _told_acquire(events: list[Event]) -> Iterator[int]:
    asked = {event["op"] for event in events if event.get("call") == "acquire"}
    return (place for place, event in enumerate(events) if event.kind == "return" and event["op"] in asked)


def drop_a_barrier(events: list[Event], dice: random.Random) -> list[Event] | None:
    """The guest never acknowledged."""
    told = {(event.get("sandbox"), event.get("fence")) for event in (events[p] for p in _told_acquire(events))}
    place = _pick(events, dice, lambda e: e.kind == "fenced" and (e["sandbox"], e["fence"]) in told)
    return None if place is None else events[:place] + events[place + 1 :]


def lower_a_floor(events: list[Event], dice: random.Random) -> list[Event] | None:
    place = _pick(events, dice, lambda e: e.kind == "floor")
    if place is None:
        return None
    low = replace(events[place], facts={**events[place].facts, "fence": "1.0"})
    return events[:place] + [low] + events[place + 1 :]


def start_twice(events: list[Event], dice: random.Random) -> list[Event] | None:
    place = _pick(events, dice, lambda e: e.kind == "start")
    if place is None:
        return None
    event = events[place]
    again = replace(event, at=event.at + 1, facts={**event.facts, "exec": "exe_again"})
    return [*events[: place + 1], again, *events[place + 1 :]]


def start_after_the_end(events: list[Event], dice: random.Random) -> list[Event] | None:
    """An exec's start is seen when its instance is gone."""
    dead = {e["instance"]: e.at for e in events if e.kind == "destroyed"}
    place = _pick(events, dice, lambda e: e.kind == "start" and e["instance"] in dead)
    if place is None:
        return None
    event = events[place]
    return [*events[:place], replace(event, at=dead[event["instance"]] + 1), *events[place + 1 :]]


def grant_what_was_refused(events: list[Event], dice: random.Random) -> list[Event] | None:
    """A stale call succeeds."""
    place = _pick(events, dice, lambda e: e.kind == "return" and e.get("code") == "lease_lost")
    if place is None:
        return None
    done = replace(events[place], facts={"op": events[place]["op"], "ok": True, "started": True, "ttl_ms": 1})
    return events[:place] + [done] + events[place + 1 :]


def swap_two_tokens(events: list[Event], dice: random.Random) -> list[Event] | None:
    """Two owners of a sandbox were told each other's token."""
    by_sandbox: dict[str, list[int]] = {}
    for place in _told_acquire(events):
        by_sandbox.setdefault(events[place]["sandbox"], []).append(place)
    several = [places for _, places in sorted(by_sandbox.items()) if len(places) > 1]
    if not several:
        return None
    one, two = sorted(dice.sample(dice.choice(several), 2))
    made = list(events)
    for here, there in ((one, two), (two, one)):
        made[here] = replace(events[here], facts={**events[here].facts, "fence": events[there]["fence"]})
    return made


def promise_for_ever(events: list[Event], dice: random.Random) -> list[Event] | None:
    """An owner was told of an hour, and another got the sandbox within it."""
    told = list(_told_acquire(events))
    asked = {event["op"]: event for event in events if event.kind == "invoke"}
    ended = {(e.get("sandbox"), e.get("fence")) for e in events if e.get("call") == "release"}
    fit = []
    for place in told:
        event = events[place]
        others = [
            e
            for e in (events[p] for p in told)
            if e["sandbox"] == event["sandbox"] and e.at > event.at and asked[e["op"]]["owner"] != event.by
        ]
        mine = [
            e
            for e in (events[p] for p in told)
            if e["sandbox"] == event["sandbox"] and e.at > event.at and asked[e["op"]]["owner"] == event.by
        ]
        first = min((e.at for e in others), default=None)
        released = (event["sandbox"], event["fence"]) in ended
        if first is not None and not released and all(e.at > first for e in mine):
            fit.append(place)
    if not fit:
        return None
    place = dice.choice(fit)
    longer = replace(events[place], facts={**events[place].facts, "ttl_ms": 3_600_000})
    return events[:place] + [longer] + events[place + 1 :]


def forget_a_run(events: list[Event], dice: random.Random) -> list[Event] | None:
    place = _pick(events, dice, lambda e: e.kind == "run")
    if place is None or sum(event.kind == "run" for event in events) < 2:
        return None
    return events[:place] + events[place + 1 :]


def end_otherwise(events: list[Event], dice: random.Random) -> list[Event] | None:
    place = _pick(events, dice, lambda e: e.kind == "run")
    if place is None:
        return None
    other = replace(events[place], facts={**events[place].facts, "reason": "timeout", "exit_code": 124})
    return events[:place] + [other] + events[place + 1 :]


def lose_an_output(events: list[Event], dice: random.Random) -> list[Event] | None:
    place = _pick(events, dice, lambda e: e.get("reason") == "ok")
    if place is None:
        return None
    empty = replace(events[place], facts={**events[place].facts, "out": ""})
    return events[:place] + [empty] + events[place + 1 :]


def write_after_the_takeover(events: list[Event], dice: random.Random) -> list[Event] | None:
    """A program's last line comes when the next owner had been let in."""
    fit = []
    for place, event in enumerate(events):
        if event.kind == "line" and event["what"] == "end":
            later = [
                e.at
                for e in events
                if e.kind == "fenced"
                and e["sandbox"] == event["sandbox"]
                and e.at > event.at
                and Fence.of(e["fence"]) > Fence.of(event["fence"])
            ]
            if later:
                fit.append((place, later[0]))
    if not fit:
        return None
    place, after = dice.choice(fit)
    return events[:place] + [replace(events[place], at=after + 1)] + events[place + 1 :]


MUTANTS: list[tuple[Break, set[str]]] = [
    (drop_a_barrier, {"barrier"}),
    (lower_a_floor, {"floors-rise"}),
    (start_twice, {"code-once"}),
    (start_after_the_end, {"dead-is-dead"}),
    (grant_what_was_refused, {"no-stale-call"}),
    (swap_two_tokens, {"tokens-rise", "barrier"}),
    (promise_for_ever, {"one-owner"}),
    (forget_a_run, {"ends-once"}),
    (end_otherwise, {"ends-once"}),
    (lose_an_output, {"started-agrees"}),
    (write_after_the_takeover, {"no-stale-effect"}),
]


@pytest.mark.parametrize(("mutate", "rules"), MUTANTS, ids=[mutate.__name__ for mutate, _ in MUTANTS])
def test_a_good_history_that_is_broken_at_one_place_is_found(mutate: Break, rules: set[str]) -> None:
    tried = 0

    @settings(max_examples=60)
    @given(SEEDS)
    def broken(seed: int) -> None:
        nonlocal tried
        events = mutate(lived(seed).events, random.Random(seed))
        if events is not None:
            tried += 1
            assert rules & rules_of(events), f"{mutate.__name__} was not found"

    broken()
    assert tried > 10, "it was hardly ever possible"
