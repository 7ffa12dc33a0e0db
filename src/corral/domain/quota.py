"""What tenants may hold at once, as values: amounts, ceilings, and the one rule that compares them.

An amount is held by a reservation row from the transaction that makes something pending to the one that ends it. Sums per tenant and
over all of them are kept beside the rows, so that whether there is room is asked of two rows, however much is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from corral.domain.limits import Limits
from corral.domain.quantities import format_bytes
from corral.errors import CorralError

EVERYBODY = "*"
"""In `tenants`: whoever is not named. In sums: all tenants together."""
PRIORITIES = ("high", "normal", "low")
"""In the order in which the queued runs of one tenant are admitted."""
RETRY_AFTER_S = 5
"""When a refused caller may ask again: quota comes back as things end, which nobody can foretell."""


@dataclass(frozen=True)
class Amounts:
    """What is held, or asked for. `queued`: runs that wait; `running`: admitted runs; `sandboxes`: those that live."""

    queued: int = 0
    running: int = 0
    sandboxes: int = 0
    cpu: int = 0
    """Thousandths of a core."""
    memory: int = 0
    """Bytes."""

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(*(getattr(self, name) + getattr(other, name) for name in NAMES))

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(*(getattr(self, name) - getattr(other, name) for name in NAMES))

    def as_dict(self) -> dict[str, int]:
        """Name -> number."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = tuple(each.name for each in fields(Amounts))
NOTHING = Amounts()
QUEUED = Amounts(queued=1)
RUNNING = Amounts(running=1)


@dataclass(frozen=True)
class Ceiling:
    """The most of each amount; None = as much as there is."""

    queued: int | None = None
    running: int | None = None
    sandboxes: int | None = None
    cpu: int | None = None
    memory: int | None = None

    def passed(self, use: Amounts, more: Amounts) -> str | None:
        """The first amount of which `more` would be too much over `use`; None = there is room."""
        for name in NAMES:
            most, asked = getattr(self, name), getattr(more, name)
            if most is not None and asked and getattr(use, name) + asked > most:
                return name
        return None


@dataclass(frozen=True)
class TenantLimits:
    """What the policy says of a tenant."""

    ceiling: Ceiling = field(default_factory=Ceiling)
    weight: float = 1.0
    """Its share beside others that wait too."""
    priorities: frozenset[str] = frozenset(PRIORITIES)


@dataclass(frozen=True)
class QuotaRules:
    """Who may hold how much, as the store has to know it to decide inside a transaction."""

    host: Ceiling = field(default_factory=Ceiling)
    """All tenants together."""
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)

    def of(self, tenant_id: str) -> TenantLimits:
        """A tenant's own limits, else those of everybody."""
        return self.tenants.get(tenant_id) or self.tenants.get(EVERYBODY) or TenantLimits()

    def passed(self, tenant_id: str, mine: Amounts, everybody: Amounts, more: Amounts) -> str | None:
        """What has no room for `more`: `tenants.running`, `capacity.memory`, ...; None = it fits."""
        name = self.of(tenant_id).ceiling.passed(mine, more)
        if name is not None:
            return f"tenants.{name}"
        name = self.host.passed(everybody, more)
        return f"capacity.{name}" if name is not None else None

    def never(self, tenant_id: str, more: Amounts) -> str | None:
        """What could not hold `more` even if nothing else were held."""
        return self.passed(tenant_id, NOTHING, NOTHING, more)

    def most(self, tenant_id: str, rule: str) -> int | None:
        """The number behind an answer of `passed`."""
        where, _, name = rule.partition(".")
        most: int | None = getattr(self.host if where == "capacity" else self.of(tenant_id).ceiling, name)
        return most


NO_RULES = QuotaRules()


def sandbox_amounts(limits: Limits) -> Amounts:
    """What a sandbox of these limits holds as long as it lives."""
    return Amounts(sandboxes=1, cpu=max(1, round(limits.cpu * 1000)), memory=limits.memory_bytes)


_WORDS = {
    "queued": "runs that wait",
    "running": "runs at once",
    "sandboxes": "sandboxes",
    "cpu": "CPUs",
    "memory": "of memory",
}


def amount_words(name: str, value: int) -> str:
    """An amount as a person says it."""
    match name:
        case "memory":
            return f"{format_bytes(value)} {_WORDS[name]}"
        case "cpu":
            return f"{value / 1000:g} {_WORDS[name]}"
    return f"{value} {_WORDS[name]}"


def exceeded(rules: QuotaRules, tenant_id: str, rule: str, use: Amounts, more: Amounts) -> CorralError:
    """The refusal of what does not fit now: which limit, what is asked for, what is held. `use`: of the tenant, or of everybody."""
    name = rule.partition(".")[2]
    most = rules.most(tenant_id, rule) or 0
    held, asked = getattr(use, name), getattr(more, name)
    if name == "queued":
        return CorralError(
            "queue_full",
            f"{held} runs of this tenant wait already, and {most} may",
            hint="send it again later, or cancel runs that wait (GET /v1/queue lists them)",
            limit=rule,
            retry_after_s=RETRY_AFTER_S,
        )
    where = "on this host" if rule.startswith("capacity.") else "for this tenant"
    users = f"{use.sandboxes} sandboxes and {use.running} runs"
    return CorralError(
        "quota_exceeded",
        f"{amount_words(name, asked)} more would be over the {amount_words(name, most)} that there are {where}",
        hint=f"{amount_words(name, held)} are held by {users}; delete sandboxes that are not needed (corral sandbox ls), "
        "ask for less, or try again later",
        limit=rule,
        retry_after_s=RETRY_AFTER_S,
    )


def too_large(rules: QuotaRules, tenant_id: str, rule: str, more: Amounts) -> tuple[str, str]:
    """(why, hint) for what can never fit."""
    name = rule.partition(".")[2]
    most = rules.most(tenant_id, rule) or 0
    return (
        f"{amount_words(name, getattr(more, name))} is over the limit {rule}, {amount_words(name, most)}",
        f"ask for at most {amount_words(name, most)}",
    )
