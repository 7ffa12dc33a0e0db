"""The fencing token: (incarnation, lease_version), compared in this order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Fence:
    """Carried by every operation that changes a sandbox; store, node and guest refuse one below their floor."""

    incarnation: int
    token: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.token}"

    @classmethod
    def parse(cls, text: str) -> Fence:
        """`"<incarnation>.<lease_version>"` (the `Corral-Lease` header); raises ValueError on anything else."""
        left, dot, right = text.partition(".")
        if not (dot and left.isascii() and left.isdigit() and right.isascii() and right.isdigit()) or len(text) > 40:
            raise ValueError(f"not a fence: {text!r}")
        return cls(int(left), int(right))
