"""`doctor` with `security`: grades beside the rest, and not without being asked."""

from typing import Any


async def test_doctor_grades_when_it_is_asked_to(world: Any) -> None:
    assert "security" not in (await world.call("GET", "/v1/doctor")).document
    security = (await world.call("GET", "/v1/doctor", security="true")).document["security"]
    assert security["host"]["grade"] == "B" and security["host"]["hint"] == "swapoff"
    assert security["runtimes"][0]["name"] == "bubblewrap" and security["runtimes"][0]["grade"] in "BC"
    assert [check["name"] for check in security["checks"]] == ["seccomp filter", "swap"]
    world.node.usable = False
    assert (await world.call("GET", "/v1/doctor", security="true")).document["security"]["runtimes"][0]["grade"] == "D"
