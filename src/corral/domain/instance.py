"""The instance: the body behind a sandbox. It is bound once, and what was condemned never returns."""

from __future__ import annotations

from corral.domain.machine import Machine

INSTANCE = Machine(
    kind="instance",
    initial="warming",
    table={
        ("warming", "warmed"): "warm",
        ("warming", "bind"): "bound",
        ("warm", "bind"): "bound",
        ("warming", "condemn"): "condemned",
        ("warm", "condemn"): "condemned",
        ("bound", "condemn"): "condemned",
        ("condemned", "condemn"): "condemned",
        ("condemned", "destroyed"): "gone",
    },
    final=frozenset({"gone"}),
)

LIVE = ("warming", "warm", "bound")
"""States in which an instance may still serve."""
