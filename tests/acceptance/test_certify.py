"""`corral certify` and `corral doctor --security` as a user calls them; what the suite finds is in `tests/security/test_certify.py`."""

import os

import pytest

from .conftest import MODES, RUNC, STRONG, Box

BUBBLEWRAP = [mode for mode in MODES if mode.startswith("bubblewrap")]
USUAL = {"bubblewrap": "B", "crun": "B", "runc": "B", "runsc": "A"}


@pytest.mark.parametrize("box", BUBBLEWRAP, indirect=True)
def test_certify_holds_what_it_tries_and_leaves_nothing(box: Box) -> None:
    of_files = ("files/file of the host", "files/links laid for the host")
    only = [word for name in of_files for word in ("--only", name)]
    status, document = box.document("certify", "--runtime", box.runtime, *only, "--json")
    assert status == 0 and document["ok"], document
    (runtime,) = document["runtimes"]
    verdicts = {f"{attack['group']}/{attack['name']}": attack["verdict"] for attack in runtime["attacks"]}
    assert verdicts == dict.fromkeys((*of_files, "residue/the host, afterwards"), "held")
    assert all(attack["evidence"] and attack["control"] for attack in runtime["attacks"])
    assert [path for path in box.state.parent.iterdir() if "certify" in path.name] == []


@pytest.mark.parametrize("box", BUBBLEWRAP[-1:], indirect=True)
def test_certify_refuses_a_group_that_is_none(box: Box) -> None:
    status, document = box.document("certify", "--only", "everything", "--json")
    assert status == 125 and document["error"]["code"] == "invalid_value", document


@pytest.mark.parametrize("box", BUBBLEWRAP, indirect=True)
def test_doctor_grades_this_host(box: Box) -> None:
    security = box.document("doctor", "--security", "--json")[1]["security"]
    grades = {one["name"]: one["grade"] for one in security["runtimes"]}
    of_root = [mode.partition("-")[0] for mode in (*MODES, *RUNC, *STRONG) if mode.endswith("-root")]
    by_root = os.geteuid() == 0 and box.name != "bubblewrap-user"
    expected = {name: USUAL[name] for name in of_root} if by_root else {"bubblewrap": "C"}
    assert {name: grades[name] for name in expected} == expected, security
    assert security["host"]["reason"] and all(check["seen"] for check in security["checks"])
