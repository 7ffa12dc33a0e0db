"""What happens in a chaos run, drawn from a seed: what each client does one after another, and what is broken when.

The same seed gives the same plan. How the two meet is up to the machine; that is what the checker is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from typing import Literal

Kind = Literal["sqlite", "postgres"]
"""One owner of a state directory, or replicas over PostgreSQL and Redis."""

FAULTS: dict[Kind, tuple[str, ...]] = {
    "sqlite": ("kill_server", "stop_server", "kill_client", "jump_clock", "cut", "slow", "swallow"),
    "postgres": (
        *("flush_redis", "restart_redis", "hang_redis"),
        *("restart_postgres", "crash_postgres", "restore_postgres"),
        *("kill_replica", "stop_replica", "restart_replicas", "kill_node"),
        *("kill_client", "jump_clock", "cut", "slow", "swallow"),
    ),
}
WHAT = {
    "kill_server": "the server is killed and started again",
    "stop_server": "the server stands still (SIGSTOP)",
    "flush_redis": "Redis forgets everything",
    "restart_redis": "Redis is killed and started again",
    "hang_redis": "Redis stands still (SIGSTOP)",
    "restart_postgres": "PostgreSQL is stopped (SIGINT) and started again",
    "crash_postgres": "PostgreSQL is stopped at once (SIGQUIT) and started again",
    "restore_postgres": "the database is replaced by an older copy of itself",
    "kill_replica": "a replica is killed",
    "stop_replica": "a replica stands still for longer than others wait for it (SIGSTOP)",
    "restart_replicas": "all replicas are replaced one after another (SIGHUP)",
    "kill_node": "the node is killed",
    "kill_client": "a client is killed and another goes on",
    "jump_clock": "the clock of a client jumps",
    "cut": "connections of clients are cut in the middle",
    "slow": "what clients send and get takes long",
    "swallow": "connections of clients stand, and nothing passes",
}
PRIORITIES = ("high", "normal", "low")
_ACTS = {"lease": 48, "run": 20, "stale": 14, "create": 5, "delete": 3, "burst": 4, "foreign": 6}
"""How often, by weight."""
WORKER_TTL_S = 6.0
"""A replica that says nothing for so long is dead to the others."""


@dataclass(frozen=True)
class Fault:
    """`at_s` after the beginning, for `for_s`; `dice` chooses its victim among what there is then."""

    at_s: float
    what: str
    for_s: float
    dice: float

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s  {self.what} ({WHAT[self.what]}) for {self.for_s:.2f} s, victim {self.dice:.3f}"


@dataclass(frozen=True)
class Work:
    """One call under a lease: exec (of `ticks` tenths of a second), write, renew, nothing for `sleep_s`, or a program of `ticks` that
    is paused for `sleep_s` in its middle."""

    what: Literal["exec", "write", "renew", "sleep", "pause"]
    ticks: int = 0
    sleep_s: float = 0.0


@dataclass(frozen=True)
class Act:
    """One thing that a client does.

    `lease`: acquire a slot's sandbox, work, and end by `ending`: release, forget (it expires), oversleep (go on with it after it
    expired), crash (the client kills itself). `run`: submit a run, `twice` at once under one key, wait or not, cancel or not.
    `stale`: use the fence of an earlier act. `create`: make a slot's sandbox `twice` at once. `delete`: end a slot's sandbox.
    `burst`: one run for each of `priorities`, then wait for all. `foreign`: use what is another tenant's; `dice` chooses what.
    """

    index: int
    what: Literal["lease", "run", "stale", "create", "delete", "burst", "foreign"]
    slot: int = 0
    ttl_s: float = 0.0
    contention: str = "fail"
    wait_s: float = 0.0
    work: tuple[Work, ...] = ()
    ending: str = ""
    ticks: int = 0
    twice: bool = False
    attached: bool = False
    cancel_after_s: float | None = None
    hook: str = ""
    """Who is told of the run's end, and by which secret it is signed: `own` (of the request), `tenant`, or nobody."""
    priorities: tuple[str, ...] = ()
    dice: float = 0.0

    def __str__(self) -> str:
        match self.what:
            case "lease":
                work = " ".join(f"{w.what}:{w.ticks or w.sleep_s or ''}".rstrip(":") for w in self.work)
                how = f"ttl {self.ttl_s} s, {self.contention} {self.wait_s} s"
                return f"{self.index}: lease of slot {self.slot}, {how}, [{work}], then {self.ending}"
            case "run":
                more = "twice, " if self.twice else ""
                cancel = "" if self.cancel_after_s is None else f", cancelled after {self.cancel_after_s:.2f} s"
                cancel += f", a webhook with the secret of the {self.hook}" if self.hook else ""
                return f"{self.index}: run, {more}{self.ticks} ticks, {'waits' if self.attached else 'asks'}{cancel}"
            case "burst":
                return f"{self.index}: runs of {self.ticks} ticks at once: {' '.join(self.priorities)}"
            case "foreign":
                return f"{self.index}: calls with what is another tenant's, {self.dice:.3f}"
            case _:
                return f"{self.index}: {self.what} of slot {self.slot}{', twice' if self.twice else ''}"


def acts(seed: int, client: int, slots: Sequence[int]) -> Iterator[Act]:
    """What one client does, without end. `slots`: those of its tenant."""
    dice = Random(f"{seed}/client/{client}")
    for index in count():
        slot = dice.choice(slots)
        what = dice.choices([*_ACTS], [*_ACTS.values()])[0]
        match what:
            case "lease":
                yield _lease(dice, index, slot)
            case "run":
                cancel = round(dice.uniform(0, 1), 3) if dice.random() < 0.15 else None
                attached, twice = dice.random() < 0.5, dice.random() < 0.3
                ticks, hook = dice.choice([0, 0, 2, 8]), dice.choice(["", "", "own", "tenant"])
                yield Act(index, "run", ticks=ticks, twice=twice, attached=attached, cancel_after_s=cancel, hook=hook)
            case "burst":
                names = tuple(dice.choice(PRIORITIES) for _ in range(dice.randint(4, 6)))
                yield Act(index, "burst", ticks=dice.choice([1, 4]), priorities=names, hook=dice.choice(["", "own"]))
            case "foreign":
                yield Act(index, "foreign", dice=round(dice.random(), 6))
            case "create":
                yield Act(index, "create", slot, twice=True)
            case "stale":
                yield Act(index, "stale", slot)
            case _:
                yield Act(index, "delete", slot)


def _lease(dice: Random, index: int, slot: int) -> Act:
    work = []
    for _ in range(dice.randint(0, 4)):
        match dice.choices(["exec", "write", "renew", "sleep", "pause"], [5, 3, 3, 2, 2])[0]:
            case "pause":
                work.append(Work("pause", ticks=dice.choice([2, 6]), sleep_s=round(dice.uniform(0.2, 1.5), 3)))
            case "exec":
                work.append(Work("exec", ticks=dice.choice([0, 0, 1, 3, 12])))
            case "write":
                work.append(Work("write"))
            case "renew":
                work.append(Work("renew"))
            case _:
                work.append(Work("sleep", sleep_s=round(dice.uniform(0.05, 0.8), 3)))
    return Act(
        index,
        "lease",
        slot,
        ttl_s=dice.choice([1.0, 2.0, 5.0]),
        contention=dice.choice(["fail", "wait", "wait"]),
        wait_s=dice.choice([0.5, 2.0, 4.0]),
        work=tuple(work),
        ending=dice.choices(["release", "forget", "oversleep", "crash"], [6, 3, 3, 1])[0],
    )


@dataclass(frozen=True)
class Plan:
    """All of it. `only`: which faults may happen; every one that may does happen, if there is time."""

    seed: int
    seconds: float
    kind: Kind = "sqlite"
    clients: int = 4
    slots: int = 3
    only: tuple[str, ...] | None = None
    tenants: int = 2
    """Clients belong to them in turn, slots too."""

    def tenant(self, client: int) -> int:
        """Whose a client is."""
        return client % self.tenants

    def slots_of(self, client: int) -> list[int]:
        """The slots of its tenant, at least one."""
        mine = self.tenant(client)
        return list(range(mine, self.slots, self.tenants)) or [mine]

    def faults(self) -> list[Fault]:
        """In the order of time, none while another that stops something for all is under way."""
        dice = Random(f"{self.seed}/faults")
        known = FAULTS[self.kind]
        names = [name for name in known if self.only is None or name in self.only]
        found: list[Fault] = []
        if not names:
            return found
        at = dice.uniform(2.0, 4.0)
        bag: list[str] = []
        while at < self.seconds - 1.0:
            if not bag:
                bag = dice.sample(names, len(names))
            what = bag.pop()
            lasts = _lasts(what, dice)
            found.append(Fault(round(at, 3), what, lasts, round(dice.random(), 6)))
            at += lasts + dice.uniform(0.3, 3.0)
        return found

    def acts(self, client: int) -> Iterator[Act]:
        return acts(self.seed, client, self.slots_of(client))

    def text(self, first: int = 8) -> str:
        """For people: all faults, and how the clients begin."""
        lines = [
            f"seed {self.seed}: {self.kind}, {self.clients} clients of {self.tenants} tenants on {self.slots} sandboxes"
            f" for {self.seconds:.0f} s"
        ]
        lines += [str(fault) for fault in self.faults()]
        for client in range(self.clients):
            lines += [f"client {client}: {act}" for act in islice(self.acts(client), first)]
        return "\n".join(lines)


def _lasts(what: str, dice: Random) -> float:
    match what:
        case "flush_redis" | "kill_client" | "jump_clock" | "kill_replica" | "kill_node" | "restart_replicas":
            lasts = 0.0
        case "stop_replica" | "stop_server":
            lasts = dice.choice([1.0, WORKER_TTL_S + 3.0])
        case "hang_redis" | "restart_redis" | "swallow":
            lasts = dice.uniform(1.0, 4.0)
        case "restart_postgres" | "crash_postgres" | "restore_postgres":
            lasts = dice.uniform(0.0, 3.0)
        case _:
            lasts = dice.uniform(0.5, 3.0)
    return round(lasts, 3)
