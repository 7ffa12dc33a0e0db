"""Records as rows: which columns a record has, what may stand in them, and both directions. Shared by all stores, so that they agree.

JSON columns hold ASCII text (`\\uXXXX` for the rest): lone surrogates and NUL survive in every database. The one thing that JSON cannot
say: a high surrogate directly followed by a low one comes back as the character that the pair encodes. Text columns refuse lone
surrogates and NUL, integer columns more than 64 bits, JSON columns NaN and infinities (`invalid_value`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from corral.domain.identity import KeyRecord, TenantRecord, UserRecord
from corral.domain.records import (
    AuditRecord,
    CommandDone,
    CommandRecord,
    EventRecord,
    ExecRecord,
    InstanceRecord,
    LeaseRecord,
    RunRecord,
    SandboxRecord,
    Transition,
    WorkerRecord,
)
from corral.domain.webhook import Delivery
from corral.errors import CorralError

R = TypeVar("R")
SqlValue = str | int | None
Row = dict[str, SqlValue]

INSTANCE_STATES = ("warming", "warm", "bound", "condemned", "gone")
"""In the order in which an instance may move; never back."""

OPEN_EXEC = ("starting", "running")
DEFAULT_CLAIM_MS = 60_000
"""Claim of a command that is inserted locked without saying until when."""

_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_load = json.JSONDecoder().decode


def to_json(value: Any, column: str) -> str:
    """ASCII JSON text, or `invalid_value` for what JSON cannot say."""
    try:
        return _dump(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise CorralError("invalid_value", f"{column} cannot be kept as JSON: {error}") from error


def to_text(value: Any, column: str) -> str:
    """Text that every database can hold: valid UTF-8 without NUL."""
    if not isinstance(value, str):
        raise TypeError(f"{column} must be text, not {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CorralError("invalid_value", f"{column} is not valid Unicode text") from error
    if "\0" in value:
        raise CorralError("invalid_value", f"{column} contains a NUL character")
    return value


def to_int(value: Any, column: str) -> int:
    """An integer of at most 64 bits."""
    if not isinstance(value, int):
        raise TypeError(f"{column} must be an integer, not {type(value).__name__}")
    if not -(1 << 63) <= value < 1 << 63:
        raise CorralError("invalid_value", f"{column} does not fit in 64 bits")
    return int(value)


def _to_bool(value: Any, column: str) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{column} must be true or false, not {type(value).__name__}")
    return value


_ENCODERS: dict[str, Callable[[Any, str], SqlValue]] = {
    "Json": to_json,
    "str": to_text,
    "int": to_int,
    "bool": _to_bool,
}


class Shape(Generic[R]):
    """One record class and its table: column list, insert statement, encode and decode.

    `serial` names the column whose value the store issues; it is left out of `insert`.
    """

    def __init__(self, record: type[R], table: str, key: str, *, fixed: Sequence[str] = (), serial: str | None = None):
        self.record = record
        self.table = table
        self.key = key
        fields = dataclasses.fields(record)  # type: ignore[arg-type]
        self.columns = tuple(f.name for f in fields)
        # Annotations are strings here ("Json | None"); they say all that a column needs to know.
        notes = {f.name: str(f.type).split(" | ") for f in fields}
        self._encoders = {name: _ENCODERS[parts[0]] for name, parts in notes.items()}
        self._optional = {name for name, parts in notes.items() if "None" in parts}
        self._json = [i for i, name in enumerate(self.columns) if notes[name][0] == "Json"]
        self._bool = [i for i, name in enumerate(self.columns) if notes[name][0] == "bool"]
        self._fixed = {key, "version", *fixed}
        self.select = ", ".join(self.columns)
        inserted = [name for name in self.columns if name != serial]
        values = ", ".join(f":{name}" for name in inserted)
        returning = f" RETURNING {serial}" if serial else ""
        self.insert = f"INSERT INTO {table} ({', '.join(inserted)}) VALUES ({values}){returning}"  # noqa: S608

    def qualified(self, alias: str) -> str:
        """The column list with a table alias, for joins."""
        return ", ".join(f"{alias}.{name}" for name in self.columns)

    def encode(self, record: R) -> Row:
        """Column -> SQL value; the record's own values are not referred to any more."""
        return {name: self._value(name, getattr(record, name)) for name in self.columns}

    def encode_changes(self, changes: Mapping[str, Any]) -> Row:
        """The same for a part of the columns, sorted by name; unknown and fixed columns are a ValueError."""
        for name in changes:
            if name not in self._encoders or name in self._fixed:
                raise ValueError(f"{self.table} has no column {name!r} that may be changed")
        return {name: self._value(name, changes[name]) for name in sorted(changes)}

    def _value(self, name: str, value: Any) -> SqlValue:
        if value is None and name in self._optional:
            return None
        return self._encoders[name](value, f"{self.table}.{name}")

    def decode(self, row: Sequence[Any]) -> R:
        """A row in the order of `columns` -> the record."""
        values = list(row)
        for i in self._json:
            if values[i] is not None:
                values[i] = _load(values[i])
        for i in self._bool:
            values[i] = bool(values[i])
        return self.record(*values)

    def from_row(self, row: Row) -> R:
        """The same from a mapping."""
        return self.decode([row[name] for name in self.columns])


def listed(run: RunRecord) -> RunRecord:
    """A run as it stands in a list: without what may be large, so that a page of them is small."""
    result = run.result
    if result is not None:
        result = {name: value for name, value in result.items() if name not in ("files", "timeline")}
    return dataclasses.replace(run, request={}, result=result)


RUN = Shape(RunRecord, "run", "run_id", fixed=("tenant_id", "created_at"))
SANDBOX = Shape(SandboxRecord, "sandbox", "sandbox_id", fixed=("tenant_id", "created_at", "state"))
LEASE = Shape(LeaseRecord, "sandbox_lease", "sandbox_id")
INSTANCE = Shape(InstanceRecord, "instance", "instance_id")
EXEC = Shape(ExecRecord, "exec", "exec_id", fixed=("sandbox_id", "created_at"))
COMMAND = Shape(CommandRecord, "sandbox_command", "command_id")
WORKER = Shape(WorkerRecord, "worker", "worker_id")
DELIVERY = Shape(Delivery, "webhook_delivery", "delivery_id")
TENANT = Shape(TenantRecord, "tenant", "tenant_id")
USER = Shape(UserRecord, '"user"', "user_id")
"""The name is a word of SQL."""
KEY = Shape(KeyRecord, "api_key", "key_id")
EVENT = Shape(EventRecord, "sandbox_event", "event_id", serial="event_id")
AUDIT = Shape(AuditRecord, "audit", "audit_id", serial="audit_id")


@dataclass(frozen=True)
class InstanceStep:
    """An `InstanceChange`, checked and encoded: either a whole row, or a move."""

    record: Row | None
    instance_id: str
    expect: tuple[str, ...]
    state: str
    ref: str | None


@dataclass(frozen=True)
class DoneStep:
    """A `CommandDone`, checked and encoded."""

    kinds: tuple[str, ...]
    worker: str
    outcome: str
    match: dict[str, Any]

    def meets(self, args: Mapping[str, Any]) -> bool:
        """Whether a command with these arguments is meant."""
        return all(args.get(name) == value for name, value in self.match.items())


@dataclass(frozen=True)
class Step:
    """A `Transition`, checked and encoded in the caller's thread: what it holds is not shared with the caller any more."""

    source: Transition
    new_state: str
    changes: Row
    event: Row
    instances: tuple[InstanceStep, ...]
    commands: tuple[Row, ...]
    audit: Row | None
    done: tuple[DoneStep, ...] = ()


def encode_transition(transition: Transition) -> Step:
    """Check what can be checked without the database; programming errors are ValueError or TypeError."""
    lease = transition.lease
    if lease is not None:
        if lease.kind not in ("take", "extend", "drop"):
            raise ValueError(f"no such lease change: {lease.kind!r}")
        if lease.kind == "take" and not lease.owner:
            raise ValueError("taking a lease needs an owner")
        if lease.owner is not None:
            to_text(lease.owner, "sandbox_lease.lease_owner")
        if lease.request_digest is not None:
            to_text(lease.request_digest, "sandbox_lease.request_digest")
        if lease.kind != "drop":
            check_ttl(lease.ttl_ms)
    if transition.end_execs is not None:
        to_text(transition.end_execs, "exec.cancel_requested")
    return Step(
        source=transition,
        new_state=to_text(transition.new_state, "sandbox.state"),
        changes=SANDBOX.encode_changes(transition.changes),
        event=EVENT.encode(transition.event),
        instances=tuple(_encode_instance(change, transition) for change in transition.instances),
        commands=tuple(COMMAND.encode(command) for command in transition.commands),
        audit=AUDIT.encode(transition.audit) if transition.audit is not None else None,
        done=encode_done(transition.done),
    )


def encode_done(done: Sequence[CommandDone]) -> tuple[DoneStep, ...]:
    """Outcomes of commands, encoded."""
    return tuple(
        DoneStep(
            each.kinds,
            to_text(each.worker, "sandbox_command.claimed_by"),
            to_json(each.outcome, "sandbox_command.outcome"),
            dict(each.match),
        )
        for each in done
    )


def _encode_instance(change: Any, transition: Transition) -> InstanceStep:
    if change.kind == "insert":
        record = change.record
        if record is None:
            raise ValueError("inserting an instance needs its record")
        check_instance_state(record.state)
        if record.state == "bound" and record.sandbox_id != transition.sandbox_id:
            raise ValueError("an instance can only be bound to the sandbox of the transition")
        return InstanceStep(INSTANCE.encode(record), record.instance_id, (), record.state, None)
    if change.kind == "move":
        if change.instance_id is None or change.state is None:
            raise ValueError("moving an instance needs its id and the new state")
        check_instance_state(change.state)
        ref = to_json(change.ref, "instance.ref") if change.ref is not None else None
        return InstanceStep(None, change.instance_id, tuple(change.expect), change.state, ref)
    raise ValueError(f"no such instance change: {change.kind!r} (insert, move)")


def check_instance_state(state: str) -> None:
    """ValueError for a word that is no state of an instance."""
    if state not in INSTANCE_STATES:
        raise ValueError(f"no such instance state: {state!r}")


def may_move(old: str, new: str) -> bool:
    """An instance never moves back: a condemned one is never bound, a bound one never warm again."""
    return INSTANCE_STATES.index(new) >= INSTANCE_STATES.index(old)


def check_ttl(ttl_ms: int) -> None:
    """ValueError for a time to live that is negative or longer than any clock runs."""
    if not 0 <= to_int(ttl_ms, "ttl_ms") < 1 << 53:
        raise ValueError(f"not a time to live: {ttl_ms} ms")


def renewed_expiry(expires_at: int, now: int, ttl_ms: int) -> int | None:
    """The new expiry when less than two thirds of the time to live is left, else None: the promise in the row is long enough."""
    if 3 * (expires_at - now) < 2 * ttl_ms:
        return now + ttl_ms
    return None


def conflict(detail: str, **facts: Any) -> CorralError:
    return CorralError("conflict", detail, hint="read the current state and decide again", **facts)


def not_found(what: str, key: str) -> CorralError:
    return CorralError(
        "not_found", f"no {what} {key}", hint=f"list what there is with `corral {what}s ls`" if what == "run" else None
    )


def superseded(run_id: str, driver: str | None) -> CorralError:
    return CorralError("superseded", f"the run {run_id} is driven by {driver or 'nobody'} now")


def lease_lost(sandbox_id: str, why: str) -> CorralError:
    return CorralError(
        "lease_lost",
        f"the lease of {sandbox_id} is lost: {why}",
        hint="acquire the sandbox again; others may have changed it",
    )


def idempotency_conflict(route: str, key: str) -> CorralError:
    return CorralError(
        "idempotency_conflict",
        f"the key {key!r} was used on {route} with another body",
        hint="use a new key for another request",
    )
