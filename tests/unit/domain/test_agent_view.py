import time

import pytest

from corral.domain.agent_view import agent_view, clean, fold, render
from corral.domain.facts import ExecFacts, StreamFacts
from corral.domain.limits import LimitModes, Limits
from corral.domain.result import judge, result_document, stream_document


@pytest.mark.parametrize(
    "data, text",
    [
        (b"plain\n", "plain\n"),
        (b"\x1b[1;31mred\x1b[0m\n", "red\n"),
        (b"\x1b]0;title\x07x\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\\n", "xlink\n"),
        (b"\x1bPq#0\x1b\\x\x1b(B\x1b=\n", "x\n"),
        (b" 10%\r 50%\r100%\n", "100%\n"),
        (b" 10%\r 50%\r", " 50%"),
        (b"a\r\nb\r\n", "a\nb\n"),
        (b"|\b/\b-\b done\n", " done\n"),
        (b"\x00a\x07b\x7f\tc\n", "ab\tc\n"),
        ("你好\n".encode(), "你好\n"),
        (b"\xff\n", "�\n"),
        (b"\x1b]0;never closed\nnext\n", "\nnext\n"),
        (b"\x1b[", ""),
        (b"a" + b"\n" * 50 + b"b", "a\n\n\nb"),
    ],
)
def test_escapes_and_progress_go(data, text):
    assert clean(data) == text


def test_repeats_are_folded_with_their_count():
    assert fold("a\na\na\na\nb") == "a\n[… the line above repeated 3 more times …]\nb"
    assert fold("a\nb\na\nb\na\nb\na\nb\nc") == "a\nb\n[… the 2 lines above repeated 3 more times …]\nc"
    assert fold("1\n2\n3\n4") == "1\n2\n3\n4"
    assert fold("a\na\nb") == "a\na\nb"  # a mark would not be shorter


def test_the_reason_and_the_hint_end_the_view():
    assert (
        render(b"out\n", b"", reason="oom", exit_code=137, hint="reduce memory")
        == "out\n[oom, exit code 137] reduce memory"
    )
    assert render(b"out", b"err\n", reason="ok", exit_code=0) == "out\n[stderr]\nerr\n[ok, exit code 0]"
    assert render(b"", b"", reason="policy_denied", hint="ask for less") == "[policy_denied] ask for less"


def test_head_and_tail_in_the_budget():
    data = b"".join(b"line %d\n" % i for i in range(10_000))
    made = render(data, b"", 500, reason="nonzero_exit", exit_code=1, hint="x")
    assert len(made) <= 500 and made.startswith("line 0\n") and "line 9999\n[nonzero_exit, exit code 1] x" in made
    assert made.count("characters omitted") == 1


def test_stderr_of_a_failure_has_room():
    made = render(b"o" * 10_000, b"Traceback\n" + b"e" * 50, 400, reason="nonzero_exit", exit_code=1)
    assert "Traceback\n" + "e" * 50 in made


@pytest.mark.parametrize("budget", [0, 1, 2, 10, 40, 100, 1000])
def test_the_budget_holds(budget):
    assert len(render(b"x\n" * 1000, b"y y\n" * 1000, budget, reason="timeout", exit_code=143, hint="h" * 50)) <= budget


def test_missing_bytes_are_marked_where_they_are_missing():
    facts = ExecFacts(started=True, exit_code=0, stdout=StreamFacts(1000, 5, 5))
    result = result_document(
        judge(facts, Limits(), LimitModes()),
        facts,
        stdout=stream_document(facts.stdout, b"head\n", b"tail\n"),
        limits=Limits(),
        modes=LimitModes(),
    )
    assert agent_view(result).startswith("head\n[… 990 bytes omitted …]\ntail\n[ok, exit code 0]")


@pytest.mark.parametrize(
    "data",
    [
        b"\x1b[" * 10**6,
        b"\x1b]" * 10**6,
        b"a\b" * 10**6,
        b"\r" * 10**6,
        b"\n" * 10**6,
        b"a\nb\na\n" * 10**6,
        b"[" * 10**6,
    ],
)
def test_hostile_output_costs_little(data):
    start = time.monotonic()
    assert len(render(data, data, 1000)) <= 1000
    assert time.monotonic() - start < 20  # some tenths of a second; only what is quadratic takes longer
