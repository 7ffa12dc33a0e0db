"""Who is admitted next: start-time fair queueing between tenants, priority and then order of submission within one.

Each tenant has a *virtual finish*: where the service that it has been given would end if it had been given at the rate of its weight.
The clock of the queue is the virtual start of what was admitted last. A run starts at the greater of the two, so a tenant that was idle
has no credit, and one that ran alone owes nothing. Of the tenants that wait and have room below their own ceilings the one with the
least start is next. If the host has no room for its first run, nobody overtakes it: a large run gets its turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from corral.domain.quota import PRIORITIES, Amounts, QuotaRules

AGEING_MS = 600_000
"""A run of the next lower priority that has waited so much longer goes first: none waits for ever behind its own tenant's runs."""
DEFAULT_EXPECTED_S = 10.0
"""What a run is taken to last if its caller does not say; what it lasts longer is charged when it ends."""
UNIT_MEMORY = 512 * 1024 * 1024
"""One unit of cost is one CPU or so much memory, whichever is more."""
MIN_EXPECTED_S = 0.01


@dataclass(frozen=True)
class Head:
    """The first run of a tenant's queue."""

    run_id: str
    place: int
    cost: int
    demand: Amounts


@dataclass(frozen=True)
class Waiting:
    """A tenant with something queued."""

    tenant_id: str
    finish: int
    """Its virtual finish."""
    use: Amounts
    head: Head


def place_of(created_at: int, priority: str) -> int:
    """Runs of one tenant are admitted in the order of this number, then of their ids."""
    return created_at + PRIORITIES.index(priority) * AGEING_MS


def priority_of(created_at: int, place: int) -> str:
    """The inverse."""
    return PRIORITIES[(place - created_at) // AGEING_MS]


def units(demand: Amounts) -> float:
    """How much of a host a run takes."""
    return max(demand.cpu / 1000, demand.memory / UNIT_MEMORY, 0.01)


def cost_of(demand: Amounts, expected_s: float | None, wall_s: float) -> int:
    """Units x expected milliseconds."""
    seconds = DEFAULT_EXPECTED_S if expected_s is None else max(expected_s, MIN_EXPECTED_S)
    return max(1, math.ceil(units(demand) * min(seconds, wall_s) * 1000))


def expected_ms(demand: Amounts, cost: int) -> int:
    """How long the run may last at this cost before more is charged."""
    return math.ceil(cost / units(demand))


def start_of(clock: int, finish: int) -> int:
    """Virtual start of a tenant's next run."""
    return max(clock, finish)


def finish_of(start: int, cost: int, weight: float) -> int:
    """Virtual finish of the tenant after it."""
    return start + max(1, math.ceil(cost / weight))


def rate_of(demand: Amounts, weight: float) -> int:
    """Thousandths of virtual time for each millisecond that a run lasts."""
    return max(1, math.ceil(units(demand) * 1000 / weight))


def overtime(rate: int, beyond_ms: int) -> int:
    """What is added to a tenant's virtual finish for a run that lasted longer than was paid for: a wrong `expected_s` gains nothing."""
    return rate * max(0, beyond_ms) // 1000


def choose(waiting: Sequence[Waiting], clock: int, everybody: Amounts, rules: QuotaRules) -> Waiting | None:
    """Who is admitted next; None = nobody can be, until something ends."""
    able = [
        each for each in waiting if rules.of(each.tenant_id).ceiling.passed(each.use, each.head.demand) is None
    ]  # a tenant at its own ceiling holds up nobody else
    if not able:
        return None
    first = min(able, key=lambda w: (start_of(clock, w.finish), w.head.place, w.tenant_id))
    return first if rules.host.passed(everybody, first.head.demand) is None else None
