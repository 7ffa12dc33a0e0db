"""What is due is found by its indexes, however many sandboxes there are."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from corral.adapters.store import expiry
from corral.adapters.store.sqlite import SqliteStore


class Explaining:
    """A transaction that says how each statement would be run."""

    now = 1_000
    skip_locked = for_update = ""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path)
        self.plans: list[str] = []

    def rows(self, text: str, params: Any = None) -> list[tuple[Any, ...]]:
        found = self.db.execute(f"EXPLAIN QUERY PLAN {text}", params or {}).fetchall()
        self.plans.append("; ".join(str(row[3]) for row in found))
        return []


async def test_the_sweep_reads_an_index_and_sorts_nothing(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "corral.db"), lambda: 1_000)
    await store.open()
    await store.close()
    tx = Explaining(tmp_path / "corral.db")
    assert expiry.due_sandboxes(tx, 100) == []
    tx.db.close()
    by_ttl, by_idle = tx.plans
    assert "USING INDEX ix_sandbox_expires_at" in by_ttl and "ix_sandbox_idle" in by_idle, tx.plans
    assert "TEMP B-TREE" not in by_ttl and "TEMP B-TREE" not in by_idle, tx.plans
