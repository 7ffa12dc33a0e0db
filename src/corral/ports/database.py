"""What an operator does to the database as a whole: see its state, change its version, keep a copy. Blocking; no server is needed.

Only `upgrade` and `downgrade` change it, each in one transaction: it happens whole or not at all. None of them is made for a database
that is not ours: `store_error`, not retryable, with a hint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Health:
    """What `check` found. `version` is None for an empty database; then there are neither rows nor problems."""

    where: str
    version: str | None
    needed: str
    rows: Mapping[str, int]
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        return self.version == self.needed and not self.problems


class Database(Protocol):
    """See the module docstring."""

    @property
    def where(self) -> str:
        """Which one, without its password."""
        ...

    @property
    def alone(self) -> bool:
        """Whether it is of one state directory, whose owner must not be at work while its version is changed."""
        ...

    def check(self) -> Health:
        """Version, how many rows, what is wrong with them. May be called while servers are at work."""
        ...

    def upgrade(self) -> tuple[str | None, str]:
        """To the version of this program; -> (before, now). Current already: nothing."""
        ...

    def downgrade(self, revision: str) -> tuple[str, str]:
        """To an older version; what only newer ones keep is lost. -> (before, now)."""
        ...

    def backup(self, path: str) -> int:
        """Write one consistent copy to a new file, readable for its owner only; -> bytes. May be called while servers are at work."""
        ...
