"""`corral certify` and `corral doctor --security` as a user calls them, on each runtime of this host."""

import pytest

from .conftest import Box


def test_certify_holds_what_it_tries_and_leaves_nothing(box: Box) -> None:
    if box.own_kernel:
        pytest.skip("what it shows there is on the page of the reference; each start takes half a second")
    status, document = box.document(
        "certify", "--runtime", box.runtime, "--only", "network", "--only", "files", "--json"
    )
    assert status == 0 and document["ok"], document
    (runtime,) = document["runtimes"]
    verdicts = {f"{attack['group']}/{attack['name']}": attack["verdict"] for attack in runtime["attacks"]}
    assert set(verdicts.values()) == {"held"}, verdicts
    assert {"network/services of the host", "files/file of the host", "residue/the host, afterwards"} <= set(verdicts)
    assert all(attack["evidence"] and attack["control"] for attack in runtime["attacks"])
    assert [path for path in box.state.parent.iterdir() if "certify" in path.name] == []


def test_certify_refuses_a_group_that_is_none(box: Box) -> None:
    status, document = box.document("certify", "--only", "everything", "--json")
    assert status == 125 and document["error"]["code"] == "invalid_value", document


def test_doctor_grades_this_host(box: Box) -> None:
    security = box.document("doctor", "--security", "--json")[1]["security"]
    grades = {one["name"]: one["grade"] for one in security["runtimes"]}
    expected = {"bubblewrap-user": "C", "bubblewrap-root": "B", "crun-root": "B", "runc-root": "B", "runsc-root": "A"}
    assert grades[box.runtime] == expected[box.name], security
    assert security["host"]["reason"] and all(check["seen"] for check in security["checks"])
