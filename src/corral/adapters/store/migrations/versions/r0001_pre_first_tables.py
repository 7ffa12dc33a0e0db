"""All tables of the first version.

`sandbox_instance` is a *view*: the promise to the caller (`sandbox`) and the body behind it (`instance`) are two rows with lives of their
own, and a table with the columns of both would state each binding twice.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001_pre"
down_revision = None
branch_labels = None
depends_on = None


def _text(name: str, *, null: bool = False, key: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=null, primary_key=key)


def _int(name: str, *, null: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger(), nullable=null)


def _real(name: str, *, null: bool = True) -> sa.Column[Any]:
    return sa.Column(name, sa.Double(), nullable=null)


def _bool(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Boolean(), nullable=False)


def _serial(name: str) -> sa.Column[Any]:
    kind = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    return sa.Column(name, kind, primary_key=True, autoincrement=True)


def _of_sandbox(*, key: bool = False) -> sa.Column[Any]:
    return sa.Column("sandbox_id", sa.Text(), sa.ForeignKey("sandbox.sandbox_id"), nullable=False, primary_key=key)


def _index(table: str, *columns: str, only: str | None = None, unique: bool = False) -> None:
    """An index named after what it is on; `only` makes it partial."""
    name = "_".join(("ux" if unique else "ix", table, *columns))
    where = sa.text(only) if only else None
    op.create_index(name, table, list(columns), unique=unique, sqlite_where=where, postgresql_where=where)


def upgrade() -> None:
    _installation()
    _core()
    _sandboxes()
    _catalogue()
    _accounts()
    _records()


def downgrade() -> None:
    """Nothing is left but the table in which Alembic keeps its version."""
    op.execute("DROP VIEW sandbox_instance")
    for table in _TABLES:
        op.drop_table(table)


_TABLES = (
    # Those that refer to others first.
    *("usage", "artifact", "audit", "reservation", "secret", "api_key", "user", "tenant"),
    *("node", "pool", "snapshot", "workspace", "layer", "template"),
    *("sandbox_command", "sandbox_allocation", "sandbox_event", "sandbox_environment", "sandbox_lease"),
    *("exec", "instance", "sandbox", "run", "idempotency_key", "installation"),
)


def _installation() -> None:
    op.create_table(
        "installation",
        sa.Column("only_row", sa.Integer(), primary_key=True, autoincrement=False),
        _text("installation_id"),
        _int("created_at"),
        sa.CheckConstraint("only_row = 1", name="ck_installation_only_row"),
    )
    op.create_table(
        "idempotency_key",
        _text("tenant_id", key=True),
        _text("route", key=True),
        _text("request_key", key=True),
        _text("body_digest"),
        _text("resource_id"),
        _int("created_at"),
    )


def _core() -> None:
    op.create_table(
        "run",
        _text("run_id", key=True),
        _text("tenant_id"),
        _text("user_id", null=True),
        _text("session_id", null=True),
        _text("owner"),
        _text("state"),
        _text("request"),
        _int("created_at"),
        _text("sandbox_id", null=True),
        _int("incarnation", null=True),
        _int("lease_version", null=True),
        _text("exec_id", null=True),
        _bool("attached"),
        _text("cancel_requested", null=True),
        _text("decisions"),
        _text("timings"),
        _text("result", null=True),
        _text("reason", null=True),
        _int("finished_at", null=True),
        _int("version"),
    )
    _index("run", "tenant_id", "created_at", "run_id")
    _index("run", "created_at", "run_id", only="state <> 'finished'")
    op.create_table(
        "sandbox",
        _text("sandbox_id", key=True),
        _text("tenant_id"),
        _text("user_id", null=True),
        _text("session_id", null=True),
        _text("state"),
        _text("runtime"),
        _text("template_id"),
        _text("template_digest"),
        _text("resource_class"),
        _text("limits"),
        _int("created_at"),
        _int("last_active_at"),
        _int("expires_at"),
        _int("incarnation"),
        _int("version"),
        _bool("tainted"),
        _text("remembered_state", null=True),
        _text("conditions"),
        _text("labels"),
        _bool("one_shot"),
        _text("failure", null=True),
    )
    _index("sandbox", "tenant_id", "created_at", "sandbox_id")
    _index("sandbox", "created_at", "sandbox_id", only="state <> 'terminated'")
    op.create_table(
        "instance",
        _text("instance_id", key=True),
        _text("node_id"),
        _text("runtime"),
        _text("template_digest"),
        _text("resource_class"),
        _int("security_level"),
        _text("state"),
        _text("sandbox_id", null=True),
        _int("incarnation"),
        _int("born_at"),
        _text("ref", null=True),
    )
    _index("instance", "sandbox_id", only="state = 'bound'", unique=True)
    _index("instance", "sandbox_id")
    _index("instance", "node_id", "born_at")
    op.create_table(
        "exec",
        _text("exec_id", key=True),
        _of_sandbox(),
        _text("run_id", null=True),
        _int("incarnation"),
        _int("lease_version"),
        _text("state"),
        _text("spec"),
        _bool("attached"),
        _text("cancel_requested", null=True),
        _int("created_at"),
        _int("started_at", null=True),
        _int("ended_at", null=True),
        _text("result", null=True),
        _int("version"),
    )
    _index("exec", "sandbox_id", "created_at", "exec_id")
    _index("exec", "created_at", "exec_id", only="state IN ('starting', 'running')")


def _sandboxes() -> None:
    op.execute(
        "CREATE VIEW sandbox_instance AS SELECT s.sandbox_id AS sandbox_id, s.tenant_id AS tenant_id,"
        " s.user_id AS user_id, s.session_id AS session_id, s.runtime AS runtime_provider,"
        " i.instance_id AS runtime_instance_id, s.resource_class AS resource_class, s.template_id AS template_id,"
        " s.state AS state, s.created_at AS created_at, s.last_active_at AS last_active_at,"
        " s.expires_at AS expires_at, s.version AS version, s.tainted AS tainted"
        " FROM sandbox s LEFT JOIN instance i ON i.sandbox_id = s.sandbox_id AND i.state = 'bound'"
    )
    op.create_table(
        "sandbox_lease",
        _of_sandbox(key=True),
        _text("lease_owner", null=True),
        _int("lease_version"),
        _int("acquired_at"),
        _int("heartbeat_at"),
        _int("expires_at"),
    )
    op.create_table(
        "sandbox_environment",
        _of_sandbox(key=True),
        _text("base_image_digest"),
        _text("dependency_hash", null=True),
        _text("workspace_id", null=True),
        _text("snapshot_id", null=True),
        _int("environment_version"),
        _text("dirty_level"),
    )
    op.create_table(
        "sandbox_event",
        _serial("event_id"),
        _of_sandbox(),
        _text("event_type"),
        _text("old_state", null=True),
        _text("new_state", null=True),
        _text("request_id", null=True),
        _int("timestamp"),
        _text("metadata"),
        sqlite_autoincrement=True,
    )
    _index("sandbox_event", "sandbox_id", "event_id")
    op.create_table(
        "sandbox_allocation",
        _text("task_id", key=True),
        _text("planner_input_hash"),
        _text("recommended_class"),
        _text("actual_class"),
        _text("reason"),
        _real("confidence"),
        _real("cpu"),
        _int("memory", null=True),
        _real("duration"),
        _real("peak_cpu"),
        _int("peak_memory", null=True),
        _bool("oom"),
    )
    op.create_table(
        "sandbox_command",
        _serial("command_seq"),
        sa.Column("command_id", sa.Text(), nullable=False, unique=True),
        _of_sandbox(),
        _int("incarnation"),
        _int("token"),
        _text("kind"),
        _text("args"),
        _int("attempt"),
        _text("claimed_by", null=True),
        _int("claim_until", null=True),
        _int("done_at", null=True),
        _text("outcome", null=True),
        sqlite_autoincrement=True,
    )
    _index("sandbox_command", "command_seq", only="done_at IS NULL")
    _index("sandbox_command", "sandbox_id")


def _catalogue() -> None:
    op.create_table(
        "template",
        _text("template_id", key=True),
        _text("template_digest", key=True),
        _text("tenant_id", null=True),
        _text("recipe"),
        _text("capabilities"),
        _text("state"),
        _int("created_at"),
    )
    op.create_table(
        "layer",
        _text("layer_id", key=True),
        _text("tenant_id", null=True),
        _text("digest"),
        _text("kind"),
        _text("parent_id", null=True),
        _text("lock"),
        _int("size_bytes"),
        _int("created_at"),
        _int("last_used_at"),
    )
    op.create_table(
        "workspace",
        _text("workspace_id", key=True),
        _text("tenant_id"),
        _text("session_id", null=True),
        _text("node_id", null=True),
        _text("writer", null=True),
        _int("writer_version"),
        _int("writer_expires_at", null=True),
        _int("size_bytes", null=True),
        _int("created_at"),
        _int("last_used_at"),
    )
    op.create_table(
        "snapshot",
        _text("snapshot_id", key=True),
        _text("tenant_id"),
        _text("sandbox_id", null=True),
        _text("parent_id", null=True),
        _text("kind"),
        _text("state"),
        _text("template_digest"),
        _text("node_id", null=True),
        _text("digest", null=True),
        _int("size_bytes", null=True),
        _int("depth"),
        _int("created_at"),
        _int("expires_at", null=True),
    )
    op.create_table(
        "pool",
        _text("pool_id", key=True),
        _text("runtime"),
        _text("resource_class"),
        _text("template_digest"),
        _int("security_level"),
        _text("band"),
        _int("version"),
    )
    _index("pool", "runtime", "resource_class", "template_digest", "security_level", unique=True)
    op.create_table(
        "node",
        _text("node_id", key=True),
        _text("url", null=True),
        _int("epoch"),
        _int("lease_until"),
        _text("state"),
        _text("capabilities"),
        _text("load"),
        _int("seen_at"),
    )


def _accounts() -> None:
    op.create_table("tenant", _text("tenant_id", key=True), _text("name"), _text("limits"), _int("created_at"))
    op.create_table(
        "user", _text("tenant_id", key=True), _text("user_id", key=True), _text("name", null=True), _int("created_at")
    )
    op.create_table(
        "api_key",
        _text("key_id", key=True),
        _text("tenant_id"),
        _text("user_id", null=True),
        _text("key_hash"),
        _text("scopes"),
        _int("created_at"),
        _int("expires_at", null=True),
        _int("revoked_at", null=True),
    )
    _index("api_key", "key_hash", unique=True)
    op.create_table(
        "secret",
        _text("secret_id", key=True),
        _text("tenant_id"),
        _text("name"),
        _text("sealed"),
        _text("delivery"),
        _text("hosts"),
        _int("created_at"),
        _int("version"),
    )
    _index("secret", "tenant_id", "name", unique=True)
    op.create_table(
        "reservation",
        _text("reservation_id", key=True),
        _text("tenant_id"),
        _text("holder_id"),
        _text("amounts"),
        _int("created_at"),
        _int("released_at", null=True),
    )
    _index("reservation", "tenant_id", only="released_at IS NULL")


def _records() -> None:
    op.create_table(
        "audit",
        _serial("audit_id"),
        _text("tenant_id"),
        _text("actor"),
        _text("kind"),
        _text("subject"),
        _text("data"),
        _int("timestamp"),
        sqlite_autoincrement=True,
    )
    _index("audit", "tenant_id", "subject", "audit_id")
    op.create_table(
        "artifact",
        _text("run_id", key=True),
        _text("path", key=True),
        _text("tenant_id"),
        _text("digest"),
        _int("size_bytes"),
        _int("created_at"),
    )
    op.create_table(
        "usage",
        _text("usage_id", key=True),
        _text("tenant_id"),
        _text("run_id", null=True),
        _text("sandbox_id", null=True),
        _real("cpu_seconds"),
        _real("memory_gib_seconds"),
        _int("disk_bytes", null=True),
        _int("egress_bytes", null=True),
        _int("started_at"),
        _int("ended_at"),
    )
    _index("usage", "tenant_id", "started_at")
