"""Which handler a path finds, and what is said to those who find none."""

from __future__ import annotations

import pytest

from corral.api.problems import problem
from corral.api.routes import ROUTES, match
from corral.errors import CorralError


def test_every_route_is_found_by_its_own_pattern() -> None:
    for route in ROUTES:
        path = route.pattern.replace("{path:path}", "a/b%20c").replace("{", "").replace("}", "")
        found, parts = match(route.method, path)
        assert found is route
        assert parts.get("path", "a/b c") == "a/b c"


def test_a_wrong_method_is_told_which_ones_there_are() -> None:
    with pytest.raises(CorralError) as refused:
        match("DELETE", "/v1/runs")
    status, document, headers = problem(refused.value)
    assert (status, document["code"], headers["Allow"]) == (405, "method_not_allowed", "GET, HEAD, POST")


def test_head_is_answered_by_get_where_it_has_no_route_of_its_own() -> None:
    assert match("HEAD", "/v1/runs")[0] is match("GET", "/v1/runs")[0]
    assert match("HEAD", "/v1/sandboxes/sbx_1/files")[0].method == "HEAD"
    with pytest.raises(CorralError, match="method_not_allowed"):
        match("HEAD", "/v1/gc")


@pytest.mark.parametrize(
    "path", ["/v1/runs/%ff", "/v1/runs/" + "x" * 65, "/v1/runs/a%2Fb", "/v1/runs//", "/", "/v2/runs"]
)
def test_what_is_no_id_finds_nothing(path: str) -> None:
    if path == "/v1/runs//":
        assert match("GET", path)[0].pattern == "/v1/runs"
        return
    with pytest.raises(CorralError, match="not_found"):
        match("GET", path)


def test_only_calls_that_begin_something_are_refused_while_draining() -> None:
    assert {route.pattern for route in ROUTES if route.starts} == {
        "/v1/runs",
        "/v1/sandboxes",
        "/v1/sandboxes/{sandbox_id}/attach",
        "/v1/sandboxes/{sandbox_id}/execs",
        "/v1/templates",
    }


def test_a_refusal_for_the_moment_says_when_to_come_back() -> None:
    for code, told in (
        ("shutting_down", True),
        ("overloaded", True),
        ("quota_exceeded", True),
        ("template_unavailable", False),
    ):
        assert ("Retry-After" in problem(CorralError(code, "no"))[2]) is told
