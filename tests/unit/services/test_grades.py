"""Grades: `doctor` shows them when it is asked to, and the guard acts on them."""

from typing import Any

import pytest

from corral.domain.grade import Check
from corral.errors import CorralError

NO_FILTER = [Check("seccomp filter", "must", False, "does not work", "another kernel")]
CREATE: dict[str, Any] = {}


async def test_doctor_grades_when_it_is_asked_to(world: Any) -> None:
    assert "security" not in (await world.call("GET", "/v1/doctor")).document
    security = (await world.call("GET", "/v1/doctor", security="true")).document["security"]
    assert security["host"]["grade"] == "B" and security["host"]["hint"] == "swapoff"
    assert security["runtimes"][0]["name"] == "bubblewrap" and security["runtimes"][0]["grade"] in "BC"
    assert [check["name"] for check in security["checks"]] == ["seccomp filter", "swap"]
    world.node.usable = False
    assert (await world.call("GET", "/v1/doctor", security="true")).document["security"]["runtimes"][0]["grade"] == "D"


async def test_the_decisions_of_a_run_say_which_grade_was_needed_and_found(world: Any) -> None:
    run = (await world.call("POST", "/v1/runs", {"code": "1", "language": "python"}, wait="10")).document
    guard, placed = run["decisions"]["guard"], run["decisions"]["placement"]
    assert guard["needs"] == {"isolation": "standard", "level": 0, "grade": "C", "enforced": []}
    assert "grade C or better" in guard["reason"]
    assert placed["grade"] == "B" and "grade B" in placed["reason"]
    assert [(item["name"], item["grade"]) for item in placed["considered"]] == [("bubblewrap", "B")]


@pytest.mark.parametrize("route", ["/v1/runs", "/v1/sandboxes"])
async def test_a_host_without_a_must_runs_nothing(world: Any, route: str) -> None:
    world.node.checks = NO_FILTER
    document = {"code": "1", "language": "python"} if route == "/v1/runs" else {}
    reply = await world.call("POST", route, document)
    assert (reply.status, reply.document["code"]) == (503, "isolation_unavailable")
    assert "seccomp filter" in reply.document["detail"] and "unsafe_any_grade" in reply.document["hint"]
    assert world.node.creates == [] and (await world.call("GET", "/v1/doctor")).document["default"] is None


async def test_a_host_that_cannot_be_looked_at_runs_nothing(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*, fresh: bool = False) -> list[Check]:
        raise CorralError("infra_error", "the host could not be probed: no fork")

    monkeypatch.setattr(world.node, "posture", fails)
    reply = await world.call("POST", "/v1/sandboxes", {})
    assert (reply.document["code"], reply.document["retryable"]) == ("infra_error", True)
    assert "could not be probed" in reply.document["detail"] and world.node.creates == []
    assert (await world.call("GET", "/v1/doctor")).document["default"] is None


async def test_the_opt_out_runs_it_and_is_logged_with_whose_it_is_and_why(world: Any) -> None:
    world.node.checks = NO_FILTER
    world.services.core.unsafe = frozenset({"unsafe_any_grade"})
    made = (await world.call("POST", "/v1/sandboxes", {})).document
    run = (await world.call("POST", "/v1/runs", {"code": "1", "language": "python"}, wait="10")).document
    assert (
        run["result"]["reason"] == "ok" and "let through by unsafe_any_grade" in run["decisions"]["placement"]["reason"]
    )
    told = [line for line in world.logged if "unsafe_any_grade" in line]
    assert len(told) == 2 and made["id"] in told[0] and run["id"] in told[1]
    assert all("seccomp filter" in line and "grade D" in line for line in told)
    assert all(request.unsafe == frozenset() for request in world.node.live.values()), "no defence of a sandbox"


async def test_a_defence_that_is_switched_off_takes_programs_from_it(world: Any) -> None:
    world.services.core.unsafe = frozenset({"unsafe_no_seccomp"})
    reply = await world.call("POST", "/v1/sandboxes", {})
    assert reply.document["code"] == "isolation_unavailable"
    world.services.core.unsafe = frozenset({"unsafe_no_landlock"})
    assert (await world.call("POST", "/v1/sandboxes", {})).status in (200, 201)
