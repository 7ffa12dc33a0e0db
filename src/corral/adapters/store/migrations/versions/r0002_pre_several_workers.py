"""What several workers, tenants and a queue need: who drives what, accounts, reservations, webhooks."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002_pre"
down_revision = "0001_pre"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _workers()


def downgrade() -> None:
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
