"""What clients were promised: leases, by the clocks of their holders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from corral.testing.history.checker import ACTS, REFUSED_BY_FENCE, Call, History, Rule, Violation
from corral.testing.history.events import Event, Fence


@dataclass
class Promise:
    """A lease as its holder may count on it: from when he heard of it until the last expiry that he was told."""

    taken: Call
    begins: int
    until: int
    shown: list[Event]

    @property
    def owner(self) -> str:
        return str(self.taken.fact("owner"))

    @property
    def fence(self) -> Fence:
        fence = self.taken.fence
        assert fence is not None
        return fence


def _lasts(call: Call) -> int:
    """Until when an answer promises: counted from before the request was sent."""
    return call.asked.at + int(str(call.fact("ttl_ms"))) * 1_000_000


def promises(history: History, sandbox: str, *, before: Call | None = None) -> list[Promise]:
    """Of a sandbox; `before` = a call: by answers that had arrived when it was made, as if its own answer had ended nothing."""
    limit = None if before is None else before.asked.at
    made: dict[tuple[str, Fence], Promise] = {}
    for call in history.acquired(sandbox):
        assert call.told is not None and call.fence is not None
        if limit is not None and call.told.at >= limit:
            continue
        key = (str(call.fact("owner")), call.fence)
        known = made.get(key)
        if known is None:
            made[key] = Promise(call, call.told.at, _lasts(call), [call.told])
        else:  # the same lease, told again
            known.until = max(known.until, _lasts(call))
    for call in history.called("renew"):
        if not call.ok or call.sandbox != sandbox or call.fence is None or call.told is None:
            continue
        renewed = made.get((str(call.fact("owner")), call.fence))
        in_time = limit is None or call.told.at < limit
        if renewed is not None and in_time and _lasts(call) > renewed.until:
            renewed.until = _lasts(call)
            renewed.shown = [renewed.shown[0], call.told]
    for promise in made.values():
        promise.until = min([promise.until, *_ends(history, sandbox, promise, before)])
    return list(made.values())


def _ends(history: History, sandbox: str, promise: Promise, spared: Call | None) -> Iterator[int]:
    """What ends a promise before its time: its holder, a delete, a restore of the database, the word that it is lost."""
    for call in history.calls:
        if call is spared or call is promise.taken or call.fact("sandbox") != sandbox:
            continue
        if call.name == "delete" and not call.code:
            yield call.asked.at
        elif call.name == "acquire" and call.asked.get("owner") == promise.owner and call.fence != promise.fence:
            if call.asked.at > promise.taken.asked.at:
                yield call.asked.at
        elif call.asked.get("fence") == str(promise.fence):
            if call.name == "release":
                yield call.asked.at
            elif call.code in REFUSED_BY_FENCE and call.told is not None:
                yield call.told.at
    for restore in history.restores:
        if promise.begins <= restore.until:
            yield restore.at


def tokens_rise(history: History) -> Iterator[Violation]:
    for sandbox in history.sandboxes():
        for earlier, later in combinations(history.acquired(sandbox), 2):
            assert earlier.told and earlier.fence and later.fence
            history.examined["tokens-rise"] += 1
            same = earlier.fact("owner") == later.fact("owner")
            if earlier.fence == later.fence and not same:
                what = f"two owners of {sandbox} got the same token {later.fence}"
                yield Violation("tokens-rise", what, (*earlier.events, *later.events))
            elif earlier.told.at < later.asked.at and later.fence < earlier.fence:
                what = f"the token of {sandbox} fell from {earlier.fence} to {later.fence}"
                yield Violation("tokens-rise", what, (*earlier.events, *later.events))


def one_owner(history: History) -> Iterator[Violation]:
    for sandbox in history.sandboxes():
        for one, two in combinations(sorted(promises(history, sandbox), key=lambda promise: promise.begins), 2):
            history.examined["one-owner"] += 1
            over = (one.until - two.begins) / 1e6
            if over > 0 and two.until > two.begins and one.owner != two.owner:
                what = f"{sandbox}: {two.owner} was told of his lease {over:.1f} ms before that of {one.owner} ended"
                yield Violation("one-owner", what, (*one.shown, *two.shown))


def promise_kept(history: History) -> Iterator[Violation]:
    for call in history.calls:
        if call.name not in ACTS or call.asked.get("fence") is None or call.told is None:
            continue
        history.examined["promise-kept"] += 1
        if call.code not in REFUSED_BY_FENCE:
            continue
        for promise in promises(history, call.sandbox, before=call):
            mine = promise.fence == call.fence and promise.owner == call.asked.get("owner")
            if mine and call.told.at < promise.until:
                left = (promise.until - call.told.at) / 1e6
                what = f"{promise.owner} lost {call.sandbox} {left:.1f} ms before the expiry that he was told"
                yield Violation("promise-kept", what, (*promise.shown, *call.events))


def expired_is_lost(history: History) -> Iterator[Violation]:
    """By the latest moment at which the store may have counted from: when its answer had arrived. Each call of a holder renews."""
    for sandbox in history.sandboxes():
        latest: dict[Fence, tuple[int, int, Event]] = {}
        told = [call for call in history.called("acquire", *ACTS) if call.told is not None and call.sandbox == sandbox]
        for call in sorted(told, key=lambda call: call.asked.at):
            if call.told is None or call.fence is None or not call.ok:
                continue
            history.examined["expired-is-lost"] += 1
            ttl, expiry, shown = latest.get(call.fence, (0, 0, call.told))
            if call.name == "renew" and shown is not call.told and call.asked.at > expiry:
                late = (call.asked.at - expiry) / 1e6
                what = f"{call.asked.get('owner')} renewed {sandbox} {late:.1f} ms after his lease had expired"
                yield Violation("expired-is-lost", what, (shown, *call.events))
            given = call.told.get("ttl_ms")
            ttl = ttl if given is None else max(ttl, int(given) * 1_000_000)
            if call.told.at + ttl > expiry:
                latest[call.fence] = (ttl, call.told.at + ttl, call.told)


def no_stale_call(history: History) -> Iterator[Violation]:
    for call in history.calls:
        if call.name not in ACTS or call.asked.get("fence") is None:
            continue
        fence = Fence.of(str(call.asked["fence"]))
        for newer in history.acquired(call.sandbox):
            assert newer.told and newer.fence
            if newer.told.at >= call.asked.at or newer.fence <= fence:
                continue
            history.examined["no-stale-call"] += 1
            if call.accepted and not (call.name == "delete" and _was_over(history, call)):
                what = f"{call.name} with the old fence {fence} was done after {newer.fact('owner')} had {newer.fence}"
                yield Violation("no-stale-call", what, (*newer.events, *call.events))
            break


def _was_over(history: History, call: Call) -> bool:
    """What is deleted already may be deleted by anybody: nothing happens."""
    seen = history.by_sandbox.get(call.sandbox, ())
    return any(event.kind in ("destroy", "destroyed") and event.at < call.asked.at for event in seen)


RULES: tuple[Rule, ...] = (tokens_rise, one_owner, promise_kept, expired_is_lost, no_stale_call)
