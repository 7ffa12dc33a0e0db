"""Many rows for a store, made by the database itself: what has ended grows with the installation, what waits for somebody does not.

Of `count` sandboxes half have ended; the others are idle or leased, and nobody has touched them for an hour. A hundred are in the middle
of something, a hundred leases have run out, a hundred runs, execs, commands and deliveries are open, whatever the count.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

FEW = 100
HOUR_MS = 3_600_000
TENANTS = 10

# Each row number i -> the value of a column, in words that both databases read. {pad} is i as text of eight digits.
_MOVING = f"i < {FEW}"
_ENDED = f"(i >= {FEW} AND (i / {TENANTS}) % 2 = 0)"
_TENANT = f"CASE WHEN i % {TENANTS} = 0 THEN 'default' ELSE 't' || (i % {TENANTS}) END"
_STATE = (
    f"CASE WHEN i < {FEW // 2} THEN 'locking' WHEN {_MOVING} THEN 'sanitizing' WHEN {_ENDED} THEN 'terminated'"
    " WHEN i % 4 = 1 THEN 'idle' ELSE 'leased' END"
)
_OPEN = f"i < {FEW}"
TABLES: dict[str, dict[str, str]] = {
    "sandbox": {
        "sandbox_id": "'sbx_' || {pad}",
        "tenant_id": _TENANT,
        "state": _STATE,
        "runtime": "'bubblewrap'",
        "template_id": "'host'",
        "template_digest": "'sha256:00'",
        "resource_class": "'python-small'",
        "limits": "'{{}}'",
        "created_at": "{now} - {count} + i",
        "last_active_at": "{now} - {hour}",
        "expires_at": f"CASE WHEN {_MOVING} THEN {{now}} - 1 ELSE {{now}} + {{hour}} END",
        "incarnation": "1",
        "version": "3",
        "tainted": "{no}",
        "conditions": "'{{}}'",
        "labels": "'{{}}'",
        "one_shot": "{no}",
    },
    "sandbox_lease": {
        "sandbox_id": "'sbx_' || {pad}",
        "lease_owner": f"CASE WHEN {_ENDED} THEN 'system:destroy' WHEN i % 4 = 1 THEN NULL ELSE 'key:1' END",
        "lease_version": "2",
        "acquired_at": "{now}",
        "heartbeat_at": "{now}",
        "expires_at": f"CASE WHEN i BETWEEN {FEW} AND {5 * FEW} THEN {{now}} - 1 ELSE {{now}} + {{hour}} END",
    },
    "sandbox_environment": {
        "sandbox_id": "'sbx_' || {pad}",
        "base_image_digest": "'sha256:00'",
        "environment_version": "1",
        "dirty_level": "'clean'",
    },
    "instance": {
        "instance_id": "'ins_' || {pad}",
        "node_id": "'node_1'",
        "runtime": "'bubblewrap'",
        "template_digest": "'sha256:00'",
        "resource_class": "'python-small'",
        "security_level": "1",
        "state": f"CASE WHEN {_MOVING} THEN 'condemned' WHEN {_ENDED} THEN 'gone' ELSE 'bound' END",
        "sandbox_id": "'sbx_' || {pad}",
        "incarnation": "1",
        "born_at": "{now} - {count} + i",
    },
    "run": {
        "run_id": "'run_' || {pad}",
        "tenant_id": _TENANT,
        "owner": "'key:1'",
        "state": f"CASE WHEN i < {FEW // 2} THEN 'queued' WHEN {_OPEN} THEN 'running' ELSE 'finished' END",
        "request": "'{{}}'",
        "created_at": "{now} - {count} + i",
        "sandbox_id": "'sbx_' || {pad}",
        "attached": "{no}",
        "decisions": "'{{}}'",
        "timings": "'{{}}'",
        "result": f"CASE WHEN {_OPEN} THEN NULL ELSE '{{{{}}}}' END",
        "reason": f"CASE WHEN {_OPEN} THEN NULL ELSE 'ok' END",
        "version": "3",
        "driver": "'w_gone'",
    },
    "exec": {
        "exec_id": "'exe_' || {pad}",
        "sandbox_id": "'sbx_' || {pad}",
        "incarnation": "1",
        "lease_version": "2",
        "state": f"CASE WHEN {_OPEN} THEN 'running' ELSE 'ended' END",
        "spec": "'{{}}'",
        "attached": "{no}",
        "created_at": "{now} - {count} + i",
        "version": "2",
        "driver": "'w_gone'",
    },
    "sandbox_command": {
        "command_id": "'cmd_' || {pad}",
        "sandbox_id": "'sbx_' || {pad}",
        "incarnation": "1",
        "token": "2",
        "kind": "'create_instance'",
        "args": "'{{}}'",
        "attempt": "1",
        "done_at": f"CASE WHEN {_OPEN} THEN NULL ELSE {{now}} END",
        "outcome": f"CASE WHEN {_OPEN} THEN NULL ELSE '{{{{}}}}' END",
    },
    "audit": {
        "tenant_id": _TENANT,
        "actor": "'key:1'",
        "kind": "'run.submitted'",
        "subject": "'run_' || {pad}",
        "data": "'{{}}'",
        "timestamp": "{now}",
    },
    "idempotency_key": {
        "tenant_id": _TENANT,
        "route": "'POST /v1/runs'",
        "request_key": "'key_' || {pad}",
        "body_digest": "'d'",
        "resource_id": "'run_' || {pad}",
        "created_at": "{now}",
    },
    "reservation": {
        "holder_id": "'sbx_' || {pad}",
        "tenant_id": _TENANT,
        "sandboxes": "1",
    },
    "run_queue": {
        "run_id": "'run_' || {pad}",
        "tenant_id": _TENANT,
        "place": "{now} - {count} + i",
        "queued_at": "{now}",
        "deadline_at": "{now} + {hour}",
    },
    "webhook_delivery": {
        "delivery_id": "'whd_' || {pad}",
        "run_id": "'run_' || {pad}",
        "tenant_id": _TENANT,
        "url": "'https://example.com/'",
        "state": f"CASE WHEN {_OPEN} THEN 'pending' ELSE 'delivered' END",
        "next_at": f"CASE WHEN {_OPEN} THEN {{now}} - 1 ELSE NULL END",
    },
}
_ONLY = {"reservation": f"WHERE NOT {_ENDED}", "run_queue": f"WHERE i < {FEW // 2}"}
_EVENT = {
    "sandbox_id": "'sbx_' || {pad}",
    "event_type": "'exec_ended'",
    "old_state": "'running'",
    "new_state": "'leased'",
    "timestamp": "{now}",
    "metadata": "'{{}}'",
}
_SUMS = (
    "INSERT INTO tenant_use (tenant_id, sandboxes) SELECT tenant_id, COUNT(*) FROM reservation GROUP BY tenant_id"
    " ON CONFLICT (tenant_id) DO UPDATE SET sandboxes = excluded.sandboxes",
    "INSERT INTO tenant_use (tenant_id) VALUES ('*') ON CONFLICT (tenant_id) DO NOTHING",
    "UPDATE tenant_use SET waiting = (SELECT COUNT(*) FROM run_queue q WHERE tenant_use.tenant_id = q.tenant_id)",
)
BIG = tuple(name for name in (*TABLES, "sandbox_event") if name != "run_queue")


def _texts(series: str, pad: str, no: str, count: int, events: int, now: int) -> list[str]:
    words = {"now": now, "count": count, "hour": HOUR_MS, "no": no}

    def insert(table: str, columns: dict[str, str], number: int, of: str) -> str:
        values = ", ".join(text.format(**words, pad=pad.format(of)) for text in columns.values())
        rows = series.format(number)
        return f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {rows} {_ONLY.get(table, '')}"

    made = [insert(table, columns, count, "i") for table, columns in TABLES.items()]
    return [*made, insert("sandbox_event", _EVENT, events, f"(i % {count})"), *_SUMS]


def fill_sqlite(path: Path, count: int, events: int, now: int) -> None:
    """Into a file that has its tables and no sandbox."""
    series = "(WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {0} - 1) SELECT i FROM n)"
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
        for text in _texts(series, "substr('00000000' || {0}, -8)", "0", count, events, now):
            connection.execute(text)
        connection.execute("COMMIT")
    finally:
        connection.close()


def fill_postgres(connection: Any, count: int, events: int, now: int) -> None:
    """Into a database that has its tables and no sandbox, by an autocommit connection of a superuser."""
    connection.execute("SET session_replication_role = replica")  # no look at every reference: all of them are there
    connection.execute("SET synchronous_commit = off")
    for text in _texts(
        "generate_series(0, {0} - 1) AS n(i)", "right('00000000' || {0}, 8)", "false", count, events, now
    ):
        connection.execute(text)
    connection.execute("VACUUM ANALYZE")
