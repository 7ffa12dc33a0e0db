"""Who this installation is."""

from __future__ import annotations

from .transacting import Tx


def installation_id(tx: Tx, proposal: str) -> str:
    """The stored id; the first caller's proposal becomes it."""
    tx.rows(
        "INSERT INTO installation (only_row, installation_id, created_at) VALUES (1, :id, :now)"
        " ON CONFLICT (only_row) DO NOTHING",
        {"id": proposal, "now": tx.now},
    )
    [(stored,)] = tx.rows("SELECT installation_id FROM installation")
    return str(stored)
