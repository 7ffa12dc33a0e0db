"""What is not one JSON document of ours is `bad_request`, whatever it is; nothing crashes."""

from __future__ import annotations

import pytest

from corral.api import problems
from corral.errors import CODES, CorralError


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nul",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 2}}',
        b"\xff\xfe",
        b'{"a": "\xff"}',
        b"[" * 100_000,
        b"[" * 100 + b"]" * 100,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"9" * 5000,
        b"{} {}",
        b"{'a': 1}",
    ],
)
def test_what_is_not_json_is_a_bad_request(raw):
    with pytest.raises(CorralError) as caught:
        problems.decode(raw)
    assert caught.value.code == "bad_request" and caught.value.status == 400


@pytest.mark.parametrize("raw", [b"{}", b"[1, 2.5, null]", '{"你": "\\ud800"}'.encode(), b'"\\u0000"', b"[[[[1]]]]"])
def test_json_is_read(raw):
    problems.decode(raw)


async def test_a_body_over_the_limit_is_refused_before_it_is_read_whole():
    read = 0

    async def endless():
        nonlocal read
        while True:
            read += 1
            yield b"x" * 65536

    with pytest.raises(CorralError) as caught:
        await problems.read_body(endless())
    assert caught.value.code == "too_large" and caught.value.status == 413
    assert read <= problems.MAX_BODY // 65536 + 1


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_is_a_problem_with_all_members(code):
    status, document, headers = problems.problem(CorralError(code, "why", hint="do", field="/x"))
    assert status == CODES[code].status
    assert {"type", "title", "status", "detail", "code", "retryable", "hint", "field"} <= set(document)
    assert ("Retry-After" in headers) == (status in (429, 503) and CODES[code].retryable)
