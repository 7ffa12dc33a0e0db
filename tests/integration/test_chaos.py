"""Chaos, short, with fixed seeds: what clients were told is what node and guests did, whatever broke meanwhile.

The long version is `corral bench chaos`; a seed that fails here gives the same plan there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from corral.bootstrap import node_at
from corral.testing.history.harness import Report, run
from corral.testing.history.plan import FAULTS, Kind, Plan
from corral.testing.history.receiver import own_address
from furnished import furnish

ALWAYS = {"floors-rise", "no-stale-effect", "dead-is-dead", "code-once", "started-agrees", "ends-once", "one-per-key"}
LEASES = {"tokens-rise", "one-owner", "promise-kept", "expired-is-lost", "no-stale-call", "barrier"}


def chaos(plan: Plan, shared: Path) -> Report:
    """Done, and no promise broken; a rule that had nothing to look at has shown nothing."""
    print(plan.text())
    report = run(plan, door=node_at, prepare=lambda state: furnish(state, shared), progress=print)
    print(report.document())
    assert report.ok, f"{report.verdict}\nseed {plan.seed}, the history is in {report.directory}"
    seen = {name for name, count in report.verdict.examined.items() if count}
    wanted = ALWAYS | LEASES | {"quota", "nothing-left", "no-defect", "foreign-is-nobodys"}
    wanted |= set() if own_address() is None else {"webhook"}
    assert wanted <= seen, report.verdict.examined
    assert set(report.straight) == {"lease_lost"}, report.straight
    return report


@pytest.mark.slow
def test_one_owner_killed_and_stopped_while_clients_fight_over_sandboxes(shared: Path) -> None:
    report = chaos(Plan(seed=1, seconds=40, clients=4, slots=2), shared)
    assert set(report.faults) >= {"kill_server", "stop_server", "kill_client"}, report.faults


@pytest.mark.slow
@pytest.mark.skipif(
    not any(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or shutil.which("redis-server") is None,
    reason="PostgreSQL or Redis is not installed",
)
def test_two_replicas_while_replicas_node_postgresql_and_redis_fail(shared: Path) -> None:
    report = chaos(Plan(seed=2, seconds=60, kind="postgres", clients=4, slots=2), shared)
    assert len(report.faults) >= 8, report.faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "missed"),
    [
        pytest.param(
            "from corral.services.leases import Leases\nasync def none(*_): pass\nLeases._barrier = none",
            {"barrier"},
            id="a lease is reported before the guest knows of it",
        ),
        pytest.param(
            "from corral.domain import contention as c\nc._held = lambda lease: c.Choice('take_over', flags=('own',))",
            {"one-owner", "promise-kept"},
            id="whoever asks gets it",
        ),
    ],
)
def test_a_promise_that_is_taken_out_of_the_product_is_missed(spoil: str, missed: set[str], shared: Path) -> None:
    plan = Plan(seed=5, seconds=25, clients=5, slots=2, only=("kill_client", "cut"))
    report = run(plan, prepare=lambda state: furnish(state, shared), progress=print, spoil=spoil)
    try:
        found = {violation.rule for violation in report.verdict.violations}
        assert found and found <= missed, str(report.verdict)
    finally:
        if report.directory is not None:
            shutil.rmtree(report.directory)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_seed_gives_its_plan_again_and_another_one_another(kind: Kind) -> None:
    one, again, other = Plan(7, 60, kind), Plan(7, 60, kind), Plan(8, 60, kind)
    assert one.text(50) == again.text(50) != other.text(50)
    assert {fault.what for fault in Plan(7, 3600, kind).faults()} == set(FAULTS[kind])


def test_only_the_faults_that_are_wanted_happen() -> None:
    assert {fault.what for fault in Plan(1, 600, "postgres", only=("flush_redis", "kill_node")).faults()} == {
        "flush_redis",
        "kill_node",
    }
