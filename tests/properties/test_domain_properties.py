"""Properties that hold for every input: parsing, judging, streams, ids, sizes, fences."""

import base64
import json
import math
from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from corral.domain.agent_view import render
from corral.domain.facts import EndedBy, ExecFacts, StartFailure, StreamFacts, Usage
from corral.domain.fence import Fence
from corral.domain.ids import is_id, new_id, time_of
from corral.domain.limits import LimitModes, Limits
from corral.domain.quantities import format_bytes, parse_seconds, parse_size
from corral.domain.request import HostCaps, language_of, parse_exec, parse_run, parse_sandbox
from corral.domain.result import NO_OUTCOME, ORDER, exit_status, judge, merge_timeline, result_document, stream_document
from corral.domain.runner import Names
from corral.errors import CorralError

NAMES = Names({".py": "python", ".r": "r"}, {"sh": "bash", "python3": "python"})
HOST = HostCaps(memory_bytes=4 * 2**30, cpus=2)
WORDS = sorted(
    [
        "code",
        "language",
        "command",
        "argv",
        "shell",
        "code_path",
        "args",
        "files",
        "stdin",
        "stdin_base64",
        "env",
        "cwd",
        "user",
        "outputs",
        "resources",
        "memory",
        "cpu",
        "pids",
        "disk",
        "tmp",
        "output_limit",
        "output_kill",
        "timeout_s",
        "timeout",
        "runtime",
        "template",
        "isolation",
        "network",
        "session",
        "keep",
        "ttl_s",
        "ttl",
        "attached",
        "pty",
        "wait",
        "dependencies",
        "dep",
        "secrets",
        "task",
        "project",
        "skills",
        "contention",
        "retry",
        "yield_after_s",
        "expected_s",
        "path",
        "content",
        "base64",
        "mode",
        "rows",
        "cols",
    ]
)
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates included
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**300, max_value=10**310)
    | st.floats()
    | ANY_TEXT
    | st.sampled_from(
        ["512M", "1.5G", "python", "none", "/workspace", "../x", "a/b", "sandbox", "root", "YQ==", "\0", "\ud800"]
    )
)
KEYS = st.sampled_from(WORDS) | ANY_TEXT
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
DOCUMENTS = JSON | st.dictionaries(KEYS, JSON, max_size=6)


@settings(max_examples=400)
@given(DOCUMENTS)
def test_no_json_makes_a_parser_raise_anything_but_a_corral_error(doc):
    for parse in (parse_run, parse_sandbox, parse_exec):
        try:
            parse(doc, HOST)
        except CorralError as error:
            assert error.status in (413, 422) and error.field is not None and error.detail and error.hint
            json.dumps(error.to_problem(), ensure_ascii=False, allow_nan=False).encode("utf-8")


@given(
    st.sampled_from([{"shell": "x"}, {"code": "1", "language": "python"}, {"command": ["x"]}]),
    st.sampled_from(WORDS),
    JSON,
)
def test_one_odd_member_in_a_good_run_is_taken_or_named(base, name, value):
    try:
        parse_run({**base, name: value}, HOST)
    except CorralError as error:
        assert error.field is not None and (error.field == "" or error.field.split("/")[1] in {*base, name})
        assert error.hint


def test_deep_nesting_is_no_way_to_the_stack():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for doc in ({"shell": "x", "dependencies": deep}, {"shell": "x", "env": {"A": deep}}, {"command": deep}, deep):
        try:
            parse_run(doc, HOST)
        except CorralError:
            continue
        raise AssertionError("accepted")


@given(ANY_TEXT, st.binary(max_size=80))
def test_a_language_is_told_or_refused(name, first):
    try:
        assert language_of(NAMES, name, first)
    except CorralError as error:
        assert error.code == "unknown_language"


# -- judging -------------------------------------------------------------------------------------------------------------------

COUNTS = st.none() | st.integers(0, 3)
STREAMS = st.builds(StreamFacts, st.integers(0, 100), st.integers(0, 50), st.integers(0, 50))


def facts_of(exit_codes, trouble):
    """Facts of any kind; `trouble` False leaves out what forces a verdict without looking at the program."""
    some = st.booleans() if trouble else st.just(False)
    return st.builds(
        ExecFacts,
        started=st.sampled_from([True, False, None]),
        exit_code=exit_codes,
        signal=st.none() | st.integers(1, 64),
        ended_by=st.none() | st.sampled_from(ENDED_BY),
        start_failure=(st.none() | START_FAILURES) if trouble else st.none(),
        sandbox_lost=some,
        guest_lost=some,
        killed_all=st.booleans(),
        killed_children=st.integers(0, 3) | st.integers(120, 140),
        disk_full=st.booleans(),
        inodes_full=st.booleans(),
        tmp_full=st.booleans(),
        seccomp_hits=COUNTS,
        usage=st.builds(Usage, oom_kills=COUNTS, pids_limit_hits=COUNTS, peak_pids=COUNTS | st.integers(120, 140)),
        stdout=STREAMS,
        stderr=STREAMS,
        infra=(st.none() | st.just("a disk failed")) if trouble else st.none(),
    ).filter(lambda f: f.exit_code is None or f.signal is None)


ENDED_BY = get_args(EndedBy)
START_FAILURES = st.builds(
    StartFailure,
    st.sampled_from(["argv", "cwd", "user", "platform"]),
    st.sampled_from(["ENOENT", "EACCES", "EIO"]),
    st.text(),
)
FACTS = facts_of(st.none() | st.integers(0, 255), trouble=True)
PLAIN_FACTS = facts_of(st.sampled_from([None, 0, 0, 1, 137, 255]), trouble=False)


def applicable(facts, modes):
    """The reasons of the contract that the facts support, written down a second time and as plainly as can be."""
    failed = facts.exit_code != 0
    known = facts.exit_code is not None or facts.signal is not None
    found = []
    if facts.ended_by in ("cancelled", "sandbox_deleted", "lease_lost", "timeout", "circuit_breaker", "output_limit"):
        found.append(facts.ended_by)
    if failed and (facts.ended_by in ("memory_watch", "memory_unseen") or facts.usage.oom_kills):
        found.append("oom")
    if failed and (facts.ended_by in ("disk_watch", "disk_unseen") or facts.disk_full or facts.tmp_full):
        found.append("disk_full")
    if failed and (facts.ended_by == "inodes_watch" or facts.inodes_full):
        found.append("inodes")
    crowd = modes.pids == "watched" and (facts.killed_children >= 128 or (facts.usage.peak_pids or 0) > 128)
    if failed and (facts.ended_by == "pids_watch" or facts.usage.pids_limit_hits or crowd):
        found.append("pids_limit")
    if failed and (facts.signal == 31 or facts.seccomp_hits):
        found.append("seccomp")
    if facts.signal is not None:
        found.append("signal")
    if known and failed and facts.signal is None:
        found.append("nonzero_exit")
    if facts.exit_code == 0:
        found.append("ok")
    return min(found, key=ORDER.index, default=None)


MODES = st.sampled_from([LimitModes(), LimitModes(memory="watched", pids="watched", disk="watched")])


@settings(max_examples=500)
@given(FACTS, MODES)
def test_every_exec_has_one_verdict_that_can_be_sent(facts, modes):
    made = judge(facts, Limits(), modes)
    assert made.reason in ORDER or made.reason in NO_OUTCOME
    assert made.hint or made.reason == "ok"
    assert made.exit_code is None or 0 <= made.exit_code <= 255
    if facts.infra is not None:
        assert made.reason == "infra_error"
    if made.reason == "ok":
        assert made.exit_code == 0
    status = exit_status(made.reason, made.exit_code)
    assert 0 <= status <= 255 and (status != 0 or (made.reason not in NO_OUTCOME and made.exit_code == 0))
    document = result_document(made, facts, limits=Limits(), modes=modes)
    json.dumps(document, allow_nan=False)


@settings(max_examples=500)
@given(PLAIN_FACTS, MODES)
def test_the_first_reason_that_applies_is_the_one(facts, modes):
    first = applicable(facts, modes)
    assert judge(facts, Limits(), modes).reason == (first or "infra_error")


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 10**6))
def test_a_stream_gives_back_exactly_what_was_kept(data, cut, missing):
    head, tail = data[:cut], data[cut:]
    facts = StreamFacts(len(data) + missing, len(head), len(tail)) if missing else StreamFacts(len(data), len(data), 0)
    made = stream_document(facts, head, tail) if missing else stream_document(facts, data, b"")
    assert made["bytes"] == made["kept_bytes"] + missing and made["kept_bytes"] == len(data)
    if made["base64"] is None:
        assert not made["truncated"] and made["text"].encode("utf-8") == data
    else:
        assert base64.b64decode(made["base64"]) == data
        assert made["truncated"] or made["text"].encode("utf-8") != data
    assert made["truncated"] == bool(missing)
    if missing:
        assert f"[… {missing} bytes omitted …]\n" in made["text"] and made["head_bytes"] == len(head)


@given(
    st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.integers(0, 5), st.integers(1, 9)), max_size=60),
    st.integers(2, 20),
)
def test_a_timeline_loses_no_byte(chunks, cap):
    entries, now, at = [], 0, {"stdout": 0, "stderr": 0}
    for stream, delay, size in chunks:
        now += delay
        entries.append({"t_ms": now, "stream": stream, "offset": at[stream], "bytes": size})
        at[stream] += size
    made = merge_timeline(entries, cap)
    assert len(made) <= cap
    reached = {"stdout": 0, "stderr": 0}
    for item in made:
        assert item["offset"] == reached[item["stream"]]
        reached[item["stream"]] += item["bytes"]
    assert reached == at
    assert [item["t_ms"] for item in made] == sorted(item["t_ms"] for item in made)


@given(
    st.binary(max_size=400),
    st.binary(max_size=400),
    st.integers(0, 300),
    st.sampled_from(["ok", "oom"]),
    st.none() | st.text(max_size=50),
)
def test_an_agent_view_keeps_to_its_budget_and_holds_no_escape(out, err, budget, reason, hint):
    made = render(out, err, budget, reason=reason, exit_code=1, hint=hint)
    assert len(made) <= budget
    assert not {"\x1b", "\r", "\x08", "\x9b"} & set(made)


# -- round trips ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10))
def test_an_id_keeps_its_time(now, entropy):
    made = new_id("sbx", now, entropy)
    assert is_id(made, "sbx") and time_of(made) == now


@given(st.integers(0, 2**48 - 2), st.binary(min_size=10, max_size=10), st.binary(min_size=10, max_size=10))
def test_a_later_id_is_greater(now, one, two):
    assert new_id("run", now, one) < new_id("run", now + 1, two)


@given(st.integers(0, 2**40))
def test_sizes_are_read_back(size):
    assert parse_size(size) == parse_size(str(size)) == size
    if size < 2**30:
        assert parse_size(f"{size}K") == size * 1024
    assert format_bytes(size)


@given(ANY_TEXT | st.integers() | st.floats() | st.none() | st.booleans())
def test_sizes_and_times_raise_value_errors_only(value):
    for parse in (parse_size, parse_seconds):
        try:
            assert math.isfinite(parse(value)) and parse(value) >= 0
        except ValueError as error:
            str(error).encode("utf-8")


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_fences_round_trip_and_compare_incarnation_first(a, b, c, d):
    assert Fence.parse(str(Fence(a, b))) == Fence(a, b)
    assert (Fence(a, b) < Fence(c, d)) == ((a, b) < (c, d))


@given(st.builds(Limits, st.integers(1, 2**40), st.floats(0.01, 64), st.integers(1, 9999)))
def test_limits_round_trip(limits):
    assert Limits.from_dict(json.loads(json.dumps(limits.as_dict()))) == limits
