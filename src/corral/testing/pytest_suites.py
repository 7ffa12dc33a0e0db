"""The conformance checks as pytest classes: subclass one, give it the fixture that it asks for, and pytest collects the checks."""

from __future__ import annotations

import pytest

from . import coordination as coordination_checks
from . import store as store_checks


class StoreConformance:
    """Needs a fixture `make_store`: `(clock) -> Store`, unopened, each on an empty database of its own."""

    @pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in store_checks.CHECKS])
    async def test_store(self, make_store: store_checks.MakeStore, run: store_checks.Check) -> None:
        await store_checks.run_check(run, make_store)


class CoordinationConformance:
    """Needs a fixture `place`: `corral.testing.coordination.Place`, for one check alone."""

    @pytest.mark.parametrize("run", [pytest.param(run, id=name) for name, run in coordination_checks.CHECKS])
    async def test_coordination(self, place: coordination_checks.Place, run: coordination_checks.Check) -> None:
        await coordination_checks.run_check(run, place)
