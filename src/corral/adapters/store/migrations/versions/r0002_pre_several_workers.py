"""What several workers, tenants and a queue need: who drives what, accounts, reservations, webhooks."""

from __future__ import annotations

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
    _leases()
    _identity()


def downgrade() -> None:
    _no_identity()
    _no_leases()
    _no_workers()


def _text(name: str, *, null: bool = False, key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=null, primary_key=key)


def _int(name: str, *, default: int | None = None) -> sa.Column[Any]:
    """A number; with a default the rows that are there get it, without one it may be null."""
    given = None if default is None else sa.text(str(default))
    return sa.Column(name, sa.BigInteger(), nullable=default is None, server_default=given)


def _index(name: str, table: str, *columns: str, only: str | None = None, unique: bool = False) -> None:
    where = sa.text(only) if only else None
    op.create_index(name, table, list(columns), unique=unique, sqlite_where=where, postgresql_where=where)


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


def _no_workers() -> None:
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


def _no_leases() -> None:
    op.drop_index("ix_sandbox_lease_expires_at", "sandbox_lease")
