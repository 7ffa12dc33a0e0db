"""What is held, as SQL: reservations and the sums beside them, for the transactions that make something pending or end it.

A tenant's row of `tenant_use` is the lock of what it holds: whoever changes a reservation has it until the transaction ends. What all
hold together is the sum of these rows, taken when it is asked for. The row `*` has no sums: it keeps the clock of the queue, and is the
lock of those who let something in. They have it first, so that no two take the same room; whoever queues or gives back needs only the
tenant's row, and so waits for no other tenant. A sum that is read meanwhile is at most too large.

The order is: the rows that a transaction decides over (run, sandbox), `*`, the tenant, every row here. The functions below are the last
of their transactions, so that the locks are held briefly.
"""

from __future__ import annotations

from typing import Any

from corral.domain.queue import expected_ms, overtime, rate_of
from corral.domain.quota import EVERYBODY, NAMES, QUEUED, RUNNING, Amounts, QuotaRules, exceeded
from corral.ports.queue import Charge, Entry, Ticket

from .transacting import Tx

# ruff: noqa: S608 - what is put together are column names of this package

FREE_STATES = ("terminated", "hibernated")
"""States of a sandbox in which it holds nothing."""
AMOUNTS = ", ".join(NAMES)
TOGETHER = (
    f"SELECT {', '.join(f'CAST(COALESCE(SUM({name}), 0) AS BIGINT)' for name in (*NAMES, 'waiting'))}, NULL, NULL"
    " FROM tenant_use WHERE queued + running + sandboxes + waiting > 0 AND tenant_id <> '*'"  # as its index says
)
"""What all tenants hold: the amounts, and how many runs wait."""
_ROWS = f"SELECT {AMOUNTS}, waiting, finish, tenant_id FROM tenant_use WHERE tenant_id"
_VALUES = ", ".join(f":{name}" for name in NAMES)
_RESERVE = (
    f"INSERT INTO reservation (holder_id, tenant_id, run_id, created_at, {AMOUNTS}, paid_until, rate)"
    f" VALUES (:holder, :tenant, :run_id, :now, {_VALUES}, :paid_until, :rate)"
    " ON CONFLICT (holder_id) DO NOTHING RETURNING holder_id"
)


class Sums:
    """What a decision is made over, locked: the tenant's sums and, where something is let in, everybody's."""

    def __init__(self, tenant_id: str, rows: dict[str | None, tuple[Any, ...]]) -> None:
        none = (0,) * (len(NAMES) + 1)
        mine, everybody = rows[tenant_id], rows.get(None, none)
        self.tenant_id = tenant_id
        self.mine, self.everybody = amounts_of(mine), amounts_of(everybody)
        self.waiting = int(everybody[len(NAMES)])
        self.finish = int(mine[len(NAMES) + 1])
        self.clock = int(rows[EVERYBODY][len(NAMES) + 1]) if EVERYBODY in rows else 0

    def check(self, rules: QuotaRules, more: Amounts) -> None:
        """`quota_exceeded` or `queue_full` unless there is room for `more`."""
        rule = rules.passed(self.tenant_id, self.mine, self.everybody, more)
        if rule is not None:
            use = self.everybody if rule.startswith("capacity.") else self.mine
            raise exceeded(rules, self.tenant_id, rule, use, more)


def amounts_of(row: tuple[Any, ...]) -> Amounts:
    """The first columns of a row that begins with `AMOUNTS`."""
    return Amounts(*(int(number) for number in row[: len(NAMES)]))


def lock(tx: Tx, tenant_id: str, *, everybody: bool = False) -> Sums:
    """Lock the sums of a tenant, whose row is made with the first thing that it holds; those of `everybody` too, to let something in."""
    names = (EVERYBODY, tenant_id) if everybody and tenant_id != EVERYBODY else (tenant_id,)
    params = {"tenant": tenant_id}
    where = "IN ('*', :tenant)" if len(names) > 1 else "= :tenant"
    for _ in range(2):
        if tx.for_update:
            # A statement of its own: the sums are then read as they are when this one has waited.
            order = " ORDER BY CASE WHEN tenant_id = '*' THEN 0 ELSE 1 END" if len(names) > 1 else ""
            tx.send(f"SELECT 1 FROM tenant_use WHERE tenant_id {where}{order} {tx.for_update}", params)
        text = f"{_ROWS} {where}"
        if everybody:
            text += f" UNION ALL {TOGETHER}"
        found = {row[-1]: row for row in tx.rows(text, params)}
        if all(name in found for name in names):
            return Sums(tenant_id, found)
        values = "('*'), (:tenant)" if len(names) > 1 else "(:tenant)"
        tx.rows(f"INSERT INTO tenant_use (tenant_id) VALUES {values} ON CONFLICT (tenant_id) DO NOTHING", params)
    raise AssertionError("a row that was just made is not there")


def change(
    tx: Tx, tenant_id: str, delta: Amounts, *, waiting: int = 0, finish: int | None = None, clock: int | None = None
) -> None:
    """Add to the tenant's sums, and move the virtual times that are given. The rows are locked already."""
    sets = "".join(f"{name} = {name} + :{name}, " for name in NAMES)
    params: dict[str, Any] = {**delta.as_dict(), "waiting": waiting, "tenant": tenant_id}
    if finish is not None:
        params["finish"] = finish
        sets += "finish = :finish, "
    if clock is not None:
        tx.send("UPDATE tenant_use SET finish = :clock WHERE tenant_id = '*'", {"clock": clock})
    tx.send(f"UPDATE tenant_use SET {sets}waiting = waiting + :waiting WHERE tenant_id = :tenant", params)


def reserve(
    tx: Tx,
    holder: str,
    tenant_id: str,
    amounts: Amounts,
    *,
    run_id: str | None = None,
    paid_until: int | None = None,
    rate: int = 0,
) -> bool:
    """Write the row; False if there is one."""
    params = {"holder": holder, "tenant": tenant_id, "run_id": run_id, "now": tx.now, "paid_until": paid_until}
    return bool(tx.rows(_RESERVE, {**params, **amounts.as_dict(), "rate": rate}))


# -- the hooks of transactions -----------------------------------------------------------------------------------------------------


def run_submitted(tx: Tx, run_id: str, tenant_id: str, ticket: Ticket) -> None:
    """A run's place in the queue; `queue_full` if its tenant has no more. Its webhook waits with it."""
    if ticket.webhook is not None:
        tx.rows(
            "INSERT INTO webhook_delivery (delivery_id, run_id, tenant_id, url, secret, state, attempts, created_at)"
            " VALUES (:delivery, :run_id, :tenant, :url, :secret, 'waiting', 0, :now)",
            {
                "delivery": ticket.webhook.delivery_id,
                "run_id": run_id,
                "tenant": tenant_id,
                "url": ticket.webhook.url,
                "secret": ticket.webhook.secret,
                "now": tx.now,
            },
        )
    sums = lock(tx, tenant_id, everybody=ticket.rules.host.queued is not None)
    sums.check(ticket.rules, QUEUED)
    if reserve(tx, run_id, tenant_id, QUEUED):
        change(tx, tenant_id, QUEUED)


def run_admitted(
    tx: Tx, run_id: str, tenant_id: str, sandbox_id: str, amounts: Amounts, cost: int, weight: float
) -> Amounts:
    """A run goes from its place in the queue to holding itself and the room of its sandbox; -> what that adds to the sums."""
    demand = amounts + RUNNING
    before = tx.rows(f"DELETE FROM reservation WHERE holder_id = :run RETURNING {AMOUNTS}", {"run": run_id})
    paid_until = tx.now + expected_ms(demand, cost)
    reserve(tx, run_id, tenant_id, RUNNING, paid_until=paid_until, rate=rate_of(demand, weight))
    reserve(tx, sandbox_id, tenant_id, amounts, run_id=run_id)
    return demand - amounts_of(before[0]) if before else demand


def run_ended(tx: Tx, run_id: str, tenant_id: str) -> None:
    """What a run held is returned, and the room of its sandbox if there is none; its webhook is due."""
    tx.rows(
        "UPDATE webhook_delivery SET state = 'pending', next_at = :now WHERE run_id = :run_id AND state = 'waiting'",
        {"run_id": run_id, "now": tx.now},
    )
    sums = lock(tx, tenant_id)
    waited = tx.rows("DELETE FROM run_queue WHERE run_id = :run_id RETURNING run_id", {"run_id": run_id})
    found = tx.rows(
        "DELETE FROM reservation WHERE holder_id = :run_id OR (run_id = :run_id AND NOT EXISTS"
        " (SELECT 1 FROM sandbox WHERE sandbox.sandbox_id = reservation.holder_id AND sandbox.state <> 'terminated'))"
        f" RETURNING {AMOUNTS}, paid_until, rate",
        {"run_id": run_id},
    )
    if not found and not waited:
        return
    held, owed = Amounts(), 0
    for row in found:
        held += amounts_of(row)
        *_, paid_until, rate = row
        if paid_until is not None:
            owed += overtime(int(rate), tx.now - int(paid_until))
    finish = sums.finish + owed if owed else None
    change(tx, tenant_id, Amounts() - held, waiting=-len(waited), finish=finish)


def sandbox_made(tx: Tx, sandbox_id: str, tenant_id: str, charge: Charge) -> None:
    """The room of a sandbox, unless its run holds it already; `quota_exceeded` if there is none."""
    if tx.for_update:
        # Its run cannot end meanwhile: it would return the room, as nobody sees the sandbox yet.
        tx.send(
            "SELECT 1 FROM run WHERE run_id = (SELECT run_id FROM reservation WHERE holder_id = :holder)"
            f" {tx.for_update}",
            {"holder": sandbox_id},
        )
    if reserve(tx, sandbox_id, tenant_id, charge.amounts, run_id=charge.run_id):
        lock(tx, tenant_id, everybody=True).check(charge.rules, charge.amounts)
        change(tx, tenant_id, charge.amounts)


def sandbox_ended(tx: Tx, sandbox_id: str, tenant_id: str) -> None:
    """Its room is returned, once."""
    lock(tx, tenant_id)
    found = tx.rows(f"DELETE FROM reservation WHERE holder_id = :holder RETURNING {AMOUNTS}", {"holder": sandbox_id})
    if found:
        change(tx, tenant_id, Amounts() - amounts_of(found[0]))


def enqueue(tx: Tx, run_id: str, tenant_id: str, place: int, entry: Entry) -> None:
    """The run waits."""
    tx.rows(
        "INSERT INTO run_queue (run_id, tenant_id, place, cost, sandboxes, cpu, memory, queued_at, deadline_at)"
        " VALUES (:run_id, :tenant, :place, :cost, :sandboxes, :cpu, :memory, :now, :deadline)",
        {
            "run_id": run_id,
            "tenant": tenant_id,
            "place": place,
            "cost": entry.cost,
            "sandboxes": entry.amounts.sandboxes,
            "cpu": entry.amounts.cpu,
            "memory": entry.amounts.memory,
            "now": tx.now,
            "deadline": tx.now + entry.timeout_ms,
        },
    )
    change(tx, tenant_id, Amounts(), waiting=1)
