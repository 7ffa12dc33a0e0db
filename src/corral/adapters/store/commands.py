"""Commands: the effects that are to be brought about, who is at them, and their outcomes. See `transactions` for the rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corral.domain.records import CommandRecord

from .rows import COMMAND, DoneStep, Row
from .rules import new_command
from .sql_text import one_of
from .tables import row_of
from .transacting import Tx

# ruff: noqa: S608 - what is put together are column names of this package


def add_command(tx: Tx, command: Row) -> None:
    tx.send(COMMAND.insert, new_command(command, tx.now))


def finish_commands(tx: Tx, sandbox_id: str, done: Sequence[DoneStep]) -> None:
    """The outcome is of the transition that reports it, whoever holds the command."""
    for each in done:
        params: dict[str, Any] = {"sandbox_id": sandbox_id}
        where = one_of("kind", each.kinds, params)
        found = tx.rows(
            f"SELECT {COMMAND.select} FROM sandbox_command WHERE sandbox_id = :sandbox_id AND done_at IS NULL AND {where}",
            params,
        )
        for command in map(COMMAND.decode, found):
            if each.meets(command.args):
                tx.send(
                    "UPDATE sandbox_command SET done_at = :now, outcome = :outcome"
                    " WHERE command_id = :command_id AND done_at IS NULL",
                    {"now": tx.now, "outcome": each.outcome, "command_id": command.command_id},
                )


def lock_command(tx: Tx, worker: str, claim_ms: int, kinds: Sequence[str] | None) -> CommandRecord | None:
    params: dict[str, Any] = {"worker": worker, "now": tx.now, "until": tx.now + claim_ms}
    where = "" if kinds is None else " AND " + one_of("kind", kinds, params)
    locked = tx.rows(
        "WITH picked AS MATERIALIZED (SELECT command_id FROM sandbox_command WHERE done_at IS NULL"
        " AND (claimed_by IS NULL OR claim_until <= :now OR claimed_by IN"
        f" (SELECT worker_id FROM worker WHERE alive_until <= :now)){where} ORDER BY command_seq LIMIT 1 {tx.skip_locked})"
        " UPDATE sandbox_command SET claimed_by = :worker, claim_until = :until, attempt = attempt + 1"
        f" WHERE command_id IN (SELECT command_id FROM picked) RETURNING {COMMAND.select}",
        params,
    )
    return COMMAND.decode(locked[0]) if locked else None


def finish_command(tx: Tx, command_id: str, worker: str, outcome: str) -> bool:
    done = tx.rows(
        "UPDATE sandbox_command SET done_at = :now, outcome = :outcome"
        " WHERE command_id = :command_id AND done_at IS NULL AND claimed_by = :worker RETURNING command_id",
        {"now": tx.now, "outcome": outcome, "command_id": command_id, "worker": worker},
    )
    if not done:
        row_of(tx, COMMAND, command_id)
    return bool(done)


def open_commands(tx: Tx, sandbox_id: str | None) -> list[CommandRecord]:
    params: dict[str, Any] = {}
    where = "done_at IS NULL"
    if sandbox_id is not None:
        params["sandbox_id"] = sandbox_id
        where += " AND sandbox_id = :sandbox_id"
    found = tx.rows(f"SELECT {COMMAND.select} FROM sandbox_command WHERE {where} ORDER BY command_seq", params)
    return [COMMAND.decode(row) for row in found]
