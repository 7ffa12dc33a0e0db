"""The resource intent: what a planner advises (B30). Advice only; the guard decides."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ResourceIntent:
    """One planner's answer. None = no opinion; `resource_class` is a name that the policy may or may not know."""

    workload: str
    resource_class: str
    cpu: float | None = None
    memory_mb: int | None = None
    disk_gb: float | None = None
    requires_browser: bool = False
    requires_gpu: bool = False
    runtime: str | None = None
    isolation: str | None = None
    template: str | None = None
    network_profile: str | None = None
    ttl_seconds: float | None = None
    confidence: float = 0.0
    reason: str = ""
    planner: str = ""
    """Name and version of the planner, so that a decision can be told from a later planner's."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
