"""Conformance of a runtime: what `corral.ports.runtime` promises, as checks without a test framework.

`CHECKS` is a list of `(id, run)`; `await run_check(run, config)` runs one and proves afterwards that the host is clean. A check that
does not apply to what the runtime declares raises `NotApplicable`. Limits are attacked to four times their size; what is declared
must hold. The witness is the host (/proc, mount table, loop devices, control groups, files), never the guest or the adapter.

`python -m corral.testing.runtime CONFIG ID` runs one check in a process of its own, which may have another uid and is where
creations die at fault points; CONFIG is the JSON of `Config`, the answer one JSON line.
"""

from __future__ import annotations

from corral.testing.runtime import crashes, hostile, inside, life, limits, pausing  # each registers its checks
from corral.testing.runtime.bench import CHECKS, Bench, Check, Config, NotApplicable, run_check

__all__ = [
    "CHECKS",
    "Bench",
    "Check",
    "Config",
    "NotApplicable",
    "crashes",
    "hostile",
    "inside",
    "life",
    "limits",
    "pausing",
    "run_check",
]
