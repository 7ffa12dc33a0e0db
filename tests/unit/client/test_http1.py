"""HTTP/1.1 as bytes: every way in which an answer may come in pieces, and what is no answer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.client.http1 import LAST_CHUNK, MAX_HEAD, Malformed, Response, chunk, head


def read(raw: bytes, cuts: list[int], method: str = "GET", *, close: bool = False) -> tuple[Response, bytes]:
    """The response, fed in pieces."""
    response = Response(method)
    body = b""
    edges = [0, *sorted({cut % (len(raw) + 1) for cut in cuts}), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges) if a != b]
    for piece in [*pieces, *([b""] if close else [])]:
        response.feed(piece)
        body += b"".join(response.take())
    return response, body


SPLITS = st.lists(st.integers(0, 400), max_size=40)


@given(SPLITS, st.lists(st.binary(min_size=1, max_size=60), max_size=6))
def test_a_chunked_body_is_the_same_however_it_is_cut(cuts: list[int], blocks: list[bytes]) -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\nX-A: 2\r\n\r\n"
    raw += b"".join(chunk(block) for block in blocks) + LAST_CHUNK
    response, body = read(raw, cuts)
    assert (response.status, body, response.ended, response.reusable) == (200, b"".join(blocks), True, True)
    assert response.headers["x-a"] == "1, 2"


@given(SPLITS, st.binary(max_size=200))
def test_a_body_of_known_length_is_the_same_however_it_is_cut(cuts: list[int], body: bytes) -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: %d\r\n\r\n" % len(body)
    response, got = read(raw + body, cuts)
    assert (response.status, got, response.ended, response.reusable) == (201, body, True, True)


@given(SPLITS)
def test_a_body_without_length_ends_with_the_connection(cuts: list[int]) -> None:
    response, body = read(b"HTTP/1.1 200 OK\r\n\r\nall of it", cuts, close=True)
    assert (body, response.ended, response.reusable) == (b"all of it", True, False)


def test_chunk_extensions_and_trailers_are_passed_over() -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\n"
    response, body = read(raw, [])
    assert body == b"abc" and response.reusable


@pytest.mark.parametrize(
    "raw", [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"]
)
def test_answers_without_a_body_end_at_once(raw: bytes) -> None:
    response, body = read(raw, [])
    assert response.ended and body == b""


def test_head_has_a_length_and_no_body() -> None:
    response, body = read(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", [], "HEAD")
    assert response.ended and body == b"" and response.headers["content-length"] == "5"


@pytest.mark.parametrize(
    "line",
    [b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n"],
)
def test_a_connection_that_closes_is_not_used_again(line: bytes) -> None:
    response, _ = read(line + b"\r\n", [])
    assert response.ended and not response.reusable


def test_bytes_after_the_answer_make_the_connection_useless() -> None:
    response, _ = read(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab", [])
    assert response.ended and not response.reusable


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
        b"HTTP/1.1 200 OK\r\nConte",
        b"",
    ],
)
def test_an_end_in_the_middle_is_never_taken_for_the_end(raw: bytes) -> None:
    with pytest.raises(Malformed):
        read(raw, [3, 20, 50], close=True)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 9000,
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * MAX_HEAD + b"\r\n\r\n",
    ],
)
def test_what_is_no_answer_is_refused(raw: bytes) -> None:
    with pytest.raises(Malformed):
        read(raw, [])


def test_a_request_head_holds_no_line_break_of_a_value() -> None:
    assert head("GET", "/x?y=%20", "h", {"A": "b"}) == b"GET /x?y=%20 HTTP/1.1\r\nHost: h\r\nA: b\r\n\r\n"
    for values in (
        ("GET /\r\nX: y", "/", {}),
        ("GET", "/ä", {}),
        ("GET", "/", {"A": "b\r\nC: d"}),
        ("GET", "/", {"A": "\0"}),
    ):
        with pytest.raises(ValueError):
            head(values[0], values[1], "h", values[2])
