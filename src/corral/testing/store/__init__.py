"""Conformance of a store: what `corral.ports.store` promises, as checks without a test framework.

`CHECKS` is a list of `(id, run)`; `await run_check(run, make)` runs one, where `make(clock)` builds an unopened store on an empty
database of its own. `corral.testing.pytest_suites.StoreConformance` wraps them for pytest.
"""

from __future__ import annotations

from corral.testing.store import (  # each registers its checks
    expiry,
    identity,
    instances,
    leases,
    queue,
    races,
    repeats,
    runs,
    sandboxes,
    values,
    webhooks,
    workers,
)
from corral.testing.store.bench import (
    CHECKS,
    START_MS,
    Bench,
    Check,
    Clock,
    MakeStore,
    audit,
    check,
    refused,
    run_check,
)

__all__ = [
    "CHECKS",
    "START_MS",
    "Bench",
    "Check",
    "Clock",
    "MakeStore",
    "audit",
    "check",
    "expiry",
    "identity",
    "instances",
    "leases",
    "queue",
    "races",
    "refused",
    "repeats",
    "run_check",
    "runs",
    "sandboxes",
    "values",
    "webhooks",
    "workers",
]
