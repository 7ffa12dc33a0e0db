"""What several workers, tenants and a queue need: who drives what, accounts, reservations, webhooks."""

from __future__ import annotations

import json
import time
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002_pre"
down_revision = "0001_pre"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _workers()
    _queue()
    _leases()
    _expiry()
    _identity()
    _many_rows()
    _repeats()
    _sums()


def downgrade() -> None:
    _no_sums()
    _no_repeats()
    _no_many_rows()
    _no_identity()
    _no_expiry()
    _no_leases()
    _no_queue()
    _no_workers()


# -- many rows -----------------------------------------------------------------------------------------------------------------------

_MANY = (
    # What has ended stays, and must not be in the way of what is asked for all the time: what is open.
    ("ix_run_open", "run", ("tenant_id", "created_at", "run_id"), "state <> 'finished'"),
    ("ix_run_cancelled", "run", ("driver",), "state <> 'finished' AND cancel_requested IS NOT NULL"),
    ("ix_sandbox_open", "sandbox", ("tenant_id", "created_at", "sandbox_id"), "state <> 'terminated'"),
    # The last words keep it from those who look for states in another order.
    (
        "ix_sandbox_stale",
        "sandbox",
        ("state", "last_active_at", "sandbox_id"),
        "state <> 'terminated' AND last_active_at > 0",
    ),
    ("ix_instance_open", "instance", ("node_id", "state", "born_at", "instance_id"), "state <> 'gone'"),
    ("ix_exec_open", "exec", ("sandbox_id", "created_at", "exec_id"), "state IN ('starting', 'running')"),
    ("ix_exec_cancelled", "exec", ("exec_id",), "state IN ('starting', 'running') AND cancel_requested IS NOT NULL"),
    ("ix_sandbox_command_open", "sandbox_command", ("sandbox_id", "command_seq"), "done_at IS NULL"),
    ("ix_audit_tenant_id_audit_id", "audit", ("tenant_id", "audit_id"), None),
)


def _many_rows() -> None:
    for name, table, columns, only in _MANY:
        _index(name, table, *columns, only=only)


def _no_many_rows() -> None:
    for name, table, _, _ in reversed(_MANY):
        op.drop_index(name, table)


def _text(name: str, *, null: bool = False, key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=null, primary_key=key)


def _int(name: str, *, default: int | None = None) -> sa.Column[Any]:
    """A number; with a default the rows that are there get it, without one it may be null."""
    given = None if default is None else sa.text(str(default))
    return sa.Column(name, sa.BigInteger(), nullable=default is None, server_default=given)


def _index(name: str, table: str, *columns: str, only: str | None = None, unique: bool = False) -> None:
    where = sa.text(only) if only else None
    op.create_index(name, table, list(columns), unique=unique, sqlite_where=where, postgresql_where=where)


# -- what is kept for a time --------------------------------------------------------------------------------------------------------


def _repeats() -> None:
    _index("ix_idempotency_key_created_at", "idempotency_key", "created_at")
    _index("ix_webhook_delivery_done_at", "webhook_delivery", "done_at", only="done_at IS NOT NULL")


def _no_repeats() -> None:
    op.drop_index("ix_webhook_delivery_done_at", "webhook_delivery")
    op.drop_index("ix_idempotency_key_created_at", "idempotency_key")


# -- sums ---------------------------------------------------------------------------------------------------------------------------


def _sums() -> None:
    # What all tenants hold is summed over those that hold something.
    _index("ix_tenant_use_held", "tenant_use", "tenant_id", only="queued + running + sandboxes + waiting > 0")


def _no_sums() -> None:
    op.drop_index("ix_tenant_use_held", "tenant_use")


# -- workers -----------------------------------------------------------------------------------------------------------------------


def _workers() -> None:
    op.create_table(
        "worker",
        _text("worker_id", key=True),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("alive_until", sa.BigInteger(), nullable=False),
        _text("facts"),
    )
    for table in ("run", "exec"):
        op.add_column(table, _text("driver", null=True))
        op.add_column(table, _int("watched_until", default=0))
    op.add_column("exec", _text("step", null=True))
    _index("ux_exec_run_id_step", "exec", "run_id", "step", only="step IS NOT NULL", unique=True)
    _index("ix_run_sandbox_id", "run", "sandbox_id", only="state <> 'finished'")
    _index(
        "ix_sandbox_last_active_at_one_shot",
        "sandbox",
        "last_active_at",
        "sandbox_id",
        only="one_shot AND state <> 'terminated'",
    )


def _no_workers() -> None:
    op.drop_index("ix_sandbox_last_active_at_one_shot", "sandbox")
    op.drop_index("ix_run_sandbox_id", "run")
    op.drop_index("ux_exec_run_id_step", "exec")
    op.drop_column("exec", "step")
    for table in ("exec", "run"):
        op.drop_column(table, "watched_until")
        op.drop_column(table, "driver")
    op.drop_table("worker")


# -- identity ----------------------------------------------------------------------------------------------------------------------


def _identity() -> None:
    op.add_column("tenant", sa.Column("created_by", sa.Text(), nullable=False, server_default=""))
    for table, columns in _IDENTITY.items():
        for name in columns:
            number = name.endswith("_at")
            op.add_column(table, _int(name) if number else _text(name, null=True))
    op.add_column("api_key", sa.Column("created_by", sa.Text(), nullable=False, server_default=""))
    _index("ix_api_key_tenant_id_created_at_key_id", "api_key", "tenant_id", "created_at", "key_id")
    _index("ix_api_key_created_at_key_id", "api_key", "created_at", "key_id")
    _index("ux_api_key_rotated_from", "api_key", "rotated_from", only="rotated_from IS NOT NULL", unique=True)
    op.execute(
        "INSERT INTO tenant (tenant_id, name, limits, created_at, created_by)"  # noqa: S608 - a number of ours
        f" VALUES ('default', 'default', '{{}}', {time.time_ns() // 1_000_000}, 'system:migration')"
        " ON CONFLICT (tenant_id) DO NOTHING"
    )


def _no_identity() -> None:
    for name in (
        "ux_api_key_rotated_from",
        "ix_api_key_created_at_key_id",
        "ix_api_key_tenant_id_created_at_key_id",
    ):
        op.drop_index(name, "api_key")
    for table in ("api_key", "tenant"):
        op.drop_column(table, "created_by")
    for table, columns in _IDENTITY.items():
        for name in columns:
            op.drop_column(table, name)


_IDENTITY = {
    "tenant": ("disabled_at", "deleted_at"),
    "user": ("disabled_at",),
    "api_key": ("name", "last_used_at", "family", "rotated_from"),
}


# -- leases ------------------------------------------------------------------------------------------------------------------------


def _leases() -> None:
    # What somebody has, the system not counted: rows of sandboxes that have ended are not in it.
    held = "lease_owner IS NOT NULL AND substr(lease_owner, 1, 7) <> 'system:'"
    _index("ix_sandbox_lease_expires_at", "sandbox_lease", "expires_at", only=held)
    op.add_column("sandbox_lease", _text("request_digest", null=True))


def _no_leases() -> None:
    op.drop_column("sandbox_lease", "request_digest")
    op.drop_index("ix_sandbox_lease_expires_at", "sandbox_lease")


# -- queue, quota, webhooks --------------------------------------------------------------------------------------------------------


_HELD = ("queued", "running", "sandboxes", "cpu", "memory")


def _queue() -> None:
    op.drop_index("ix_reservation_tenant_id", "reservation")
    op.drop_table("reservation")  # nothing was ever written to it
    op.create_table(
        "reservation",
        _text("holder_id", key=True),
        _text("tenant_id"),
        _text("run_id", null=True),
        _int("created_at", default=0),
        *(_int(name, default=0) for name in _HELD),
        _int("paid_until"),
        _int("rate", default=0),
    )
    _index("ix_reservation_run_id", "reservation", "run_id", only="run_id IS NOT NULL")
    op.create_table(
        "tenant_use",
        _text("tenant_id", key=True),
        *(_int(name, default=0) for name in (*_HELD, "waiting", "finish")),
    )
    _index("ix_tenant_use_waiting", "tenant_use", "tenant_id", only="waiting > 0")
    op.create_table(
        "run_queue",
        _text("run_id", key=True),
        _text("tenant_id"),
        *(
            _int(name, default=0)
            for name in ("place", "cost", "sandboxes", "cpu", "memory", "queued_at", "deadline_at")
        ),
    )
    _index("ix_run_queue_tenant_id_place_run_id", "run_queue", "tenant_id", "place", "run_id")
    op.create_table(
        "webhook_delivery",
        _text("delivery_id", key=True),
        _text("run_id"),
        _text("tenant_id"),
        _text("url"),
        _text("secret", null=True),
        _text("state"),
        _int("attempts", default=0),
        _int("created_at", default=0),
        _int("next_at"),
        _text("claimed_by", null=True),
        _int("claim_until"),
        _int("last_status"),
        _text("last_error", null=True),
        _int("done_at"),
    )
    _index("ix_webhook_delivery_run_id", "webhook_delivery", "run_id")
    _index("ix_webhook_delivery_next_at", "webhook_delivery", "next_at", only="state = 'pending'")
    op.create_table(
        "webhook_secret",
        _text("tenant_id", key=True),
        _text("secret"),
        _text("old_secret", null=True),
        _int("old_until"),
        _int("created_at", default=0),
    )
    _reserve_what_lives()


def _reserve_what_lives() -> None:
    """What is open and alive in an older database holds its room from now on."""
    bind = op.get_bind()
    rows: list[dict[str, Any]] = []
    empty = dict.fromkeys(_HELD, 0)
    for run_id, tenant_id, state, at in bind.execute(
        sa.text("SELECT run_id, tenant_id, state, created_at FROM run WHERE state <> 'finished'")
    ):
        what = "queued" if state in ("requested", "planning", "queued") else "running"
        rows.append({**empty, what: 1, "holder_id": run_id, "tenant_id": tenant_id, "created_at": at})
    for sandbox_id, tenant_id, limits, at in bind.execute(
        sa.text(
            "SELECT sandbox_id, tenant_id, limits, created_at FROM sandbox WHERE state NOT IN ('terminated', 'hibernated')"
        )
    ):
        values = json.loads(limits).get("values", {})
        room = {"sandboxes": 1, "cpu": round(values.get("cpu", 0) * 1000), "memory": values.get("memory", 0)}
        rows.append({**empty, **room, "holder_id": sandbox_id, "tenant_id": tenant_id, "created_at": at})
    reservation = sa.table("reservation", *(sa.column(n) for n in ("holder_id", "tenant_id", "created_at", *_HELD)))
    if rows:
        op.bulk_insert(reservation, rows)
    sums: dict[str, dict[str, int]] = {"*": dict(empty)}  # which is for the queue's clock, and stays empty
    for row in rows:
        use = sums.setdefault(row["tenant_id"], dict(empty))
        for name in _HELD:
            use[name] += row[name]
    tenant_use = sa.table("tenant_use", *(sa.column(n) for n in ("tenant_id", *_HELD)))
    op.bulk_insert(tenant_use, [{"tenant_id": tenant, **use} for tenant, use in sums.items()])


def _no_queue() -> None:
    for table in ("webhook_secret", "webhook_delivery", "run_queue", "tenant_use", "reservation"):
        op.drop_table(table)
    op.create_table(
        "reservation",
        _text("reservation_id", key=True),
        _text("tenant_id"),
        _text("holder_id"),
        _text("amounts"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        _int("released_at"),
    )
    _index("ix_reservation_tenant_id", "reservation", "tenant_id", only="released_at IS NULL")


# -- expiry ------------------------------------------------------------------------------------------------------------------------


def _expiry() -> None:
    op.add_column("sandbox", _int("idle_timeout_ms"))
    lives, idles = "state <> 'terminated' AND state <> 'sanitizing'", sa.text("idle_timeout_ms IS NOT NULL")
    _index("ix_sandbox_expires_at", "sandbox", "expires_at", "sandbox_id", only=lives)
    ends = sa.text("(last_active_at + idle_timeout_ms)")
    op.create_index("ix_sandbox_idle", "sandbox", [ends, "sandbox_id"], sqlite_where=idles, postgresql_where=idles)


def _no_expiry() -> None:
    op.drop_index("ix_sandbox_idle", "sandbox")
    op.drop_index("ix_sandbox_expires_at", "sandbox")
    op.drop_column("sandbox", "idle_timeout_ms")
