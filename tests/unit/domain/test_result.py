import base64

import pytest

from corral.domain.facts import ExecFacts, StartFailure, StreamFacts, Usage
from corral.domain.limits import LIMIT_NAMES, LimitModes, Limits
from corral.domain.result import (
    TIMINGS,
    exit_status,
    judge,
    limit_hits,
    merge_timeline,
    outcomeless_document,
    refusal,
    result_document,
    signal_name,
    stream_document,
)

LIMITS = Limits(memory_bytes=256 * 2**20, wall_s=2, pids=64)
MODES = LimitModes(
    memory="enforced", cpu="enforced", pids="enforced", disk="enforced", inodes="enforced", tmp="enforced"
)


def verdict(modes=MODES, **facts):
    return judge(ExecFacts(**{"started": True, **facts}), LIMITS, modes)


@pytest.mark.parametrize(
    "facts, reason, code, signal, words",
    [
        ({"exit_code": 0}, "ok", 0, None, None),
        ({"exit_code": 3}, "nonzero_exit", 3, None, "status 3"),
        ({"exit_code": 127}, "nonzero_exit", 127, None, "did not find"),
        ({"exit_code": 137}, "nonzero_exit", 137, None, "128+9"),
        ({"signal": 9}, "signal", 137, "SIGKILL", "no limit of the sandbox was hit"),
        ({"signal": 11}, "signal", 139, "SIGSEGV", "segmentation"),
        ({"signal": 31}, "seccomp", 159, "SIGSYS", "system call"),
        ({"signal": 9, "usage": Usage(oom_kills=1)}, "oom", 137, "SIGKILL", "killed: exceeded 256 MiB; reduce memory"),
        ({"exit_code": 1, "usage": Usage(oom_kills=2)}, "oom", 1, None, "a process of it was killed: exceeded 256 MiB"),
        ({"exit_code": 0, "usage": Usage(oom_kills=2)}, "ok", 0, None, "2 child processes were killed for memory"),
        ({"signal": 9, "ended_by": "memory_watch"}, "oom", 137, "SIGKILL", "exceeded 256 MiB"),
        ({"exit_code": 0, "ended_by": "memory_watch"}, "ok", 0, None, None),
        ({"signal": 9, "ended_by": "memory_unseen"}, "oom", 137, "SIGKILL", "more files are open"),
        ({"signal": 9, "ended_by": "disk_unseen"}, "disk_full", 137, "SIGKILL", "cannot be seen to stay within 1 GiB"),
        ({"signal": 15, "ended_by": "timeout"}, "timeout", 143, "SIGTERM", "ran longer than 2 s"),
        ({"exit_code": 5, "ended_by": "timeout", "usage": Usage(oom_kills=1)}, "timeout", 5, None, "2 s"),
        ({"exit_code": 0, "ended_by": "timeout"}, "timeout", 0, None, "2 s"),
        ({"signal": 9, "ended_by": "timeout", "cpu_throttled": 7}, "timeout", 137, "SIGKILL", "limit of 1 cpu"),
        ({"signal": 9, "ended_by": "output_limit"}, "output_limit", 137, "SIGKILL", "100 MiB of output"),
        ({"signal": 9, "ended_by": "cancelled"}, "cancelled", 137, "SIGKILL", "cancelled"),
        ({"signal": 9, "ended_by": "sandbox_deleted", "sandbox_lost": True}, "sandbox_deleted", 137, "SIGKILL", "deleted"),
        ({"signal": 9, "ended_by": "lease_lost"}, "lease_lost", 137, "SIGKILL", "lease"),
        ({"signal": 9, "ended_by": "circuit_breaker"}, "circuit_breaker", 137, "SIGKILL", "operator"),
        ({"started": False, "ended_by": "cancelled"}, "cancelled", None, None, "before it was started"),
        ({"exit_code": 1, "disk_full": True}, "disk_full", 1, None, "1 GiB"),
        ({"exit_code": 0, "disk_full": True}, "ok", 0, None, "the disk was full"),
        ({"exit_code": 1, "tmp_full": True}, "disk_full", 1, None, "/tmp is full (64 MiB)"),
        ({"exit_code": 1, "inodes_full": True}, "inodes", 1, None, "65536"),
        ({"signal": 9, "ended_by": "inodes_watch"}, "inodes", 137, "SIGKILL", "killed: made 65536"),
        ({"exit_code": 1, "usage": Usage(pids_limit_hits=4)}, "pids_limit", 1, None, "64 pids"),
        ({"exit_code": 1, "killed_children": 90, "usage": Usage(pids_limit_hits=0)}, "nonzero_exit", 1, None, "status 1"),
        ({"exit_code": 0, "usage": Usage(pids_limit_hits=4)}, "ok", 0, None, "hit 4 times"),
        ({"exit_code": 1, "usage": Usage(pids_limit_hits=0, oom_kills=0)}, "nonzero_exit", 1, None, "status 1"),
        ({"sandbox_lost": True}, "sandbox_lost", None, None, "unknown"),
        ({"guest_lost": True}, "sandbox_lost", None, None, "unknown"),
        ({"sandbox_lost": True, "usage": Usage(oom_kills=1)}, "oom", None, None, "whole sandbox"),
        ({"sandbox_lost": True, "exit_code": 4}, "nonzero_exit", 4, None, "status 4"),
        ({"infra": "the disk of the host failed", "exit_code": 0}, "infra_error", None, None, "the disk of the host"),
        ({}, "infra_error", None, None, "unknown"),
        ({"exit_code": 0, "killed_children": 3}, "ok", 0, None, "3 background processes were ended"),
        ({"exit_code": 0, "stdout": StreamFacts(20, 5, 5)}, "ok", 0, None, "stdout had 20 bytes, of which 10 bytes are kept"),
        ({"signal": 9, "ended_by": "timeout", "killed_all": False}, "timeout", 137, "SIGKILL", "outlived the kill"),
    ],
)  # fmt: skip
def test_facts_have_one_reason(facts, reason, code, signal, words):
    made = verdict(**facts)
    assert (made.reason, made.exit_code, made.signal_name) == (reason, code, signal)
    if words is None:
        assert made.hint is None
    else:
        assert words in made.hint


@pytest.mark.parametrize(
    "failure, reason, code, words",
    [
        (StartFailure("argv", "ENOENT", "frobnicate"), "nonzero_exit", 127, "frobnicate"),
        (StartFailure("argv", "EACCES", "/etc/passwd"), "nonzero_exit", 126, "/etc/passwd"),
        (StartFailure("argv", "ENOEXEC", "./a"), "nonzero_exit", 126, "./a"),
        (StartFailure("argv", "E2BIG", "sh"), "nonzero_exit", 126, "too long"),
        (StartFailure("cwd", "ENOENT", "/nowhere"), "cwd_not_found", None, "/nowhere"),
        (StartFailure("user", "EPERM", "root"), "user_refused", None, "root"),
        (StartFailure("platform", "EAGAIN", "fork"), "infra_error", None, "fork"),
    ],
)
def test_a_program_that_never_ran(failure, reason, code, words):
    made = verdict(started=False, start_failure=failure)
    assert (made.reason, made.exit_code, made.signal_name, made.started) == (reason, code, None, False)
    assert words in made.hint


def test_a_program_that_found_no_process_left_was_not_failed_by_the_platform():
    failure = StartFailure("platform", "EAGAIN", "the exec cannot be made")
    made = verdict(started=False, start_failure=failure, usage=Usage(pids_limit_hits=3))
    assert (made.reason, made.exit_code, made.started) == ("pids_limit", None, False)
    assert "limit 64 pids, taken by other programs of the sandbox" in made.hint
    quiet = verdict(started=False, start_failure=failure, usage=Usage(pids_limit_hits=0))
    assert quiet.reason == "infra_error", "the host had none left"
    other = verdict(started=False, start_failure=StartFailure("platform", "EIO", "x"), usage=Usage(pids_limit_hits=3))
    assert other.reason == "infra_error"


def test_only_what_the_caller_asked_for_is_an_error():
    def failed(what):
        made = verdict(started=False, start_failure=StartFailure(what, "ENOENT", "/nowhere"))
        return refusal(made.reason, made.hint)

    assert (failed("cwd").code, failed("cwd").field) == ("cwd_not_found", "/cwd")
    assert "/nowhere" in failed("cwd").detail and failed("cwd").hint == "create it first, or leave cwd out"
    assert (failed("user").code, failed("user").field) == ("user_refused", "/user")
    assert failed("user").hint == "use the user sandbox" and failed("user").hint not in failed("user").detail
    assert failed("argv") is None and failed("platform") is None and refusal("ok", None) is None


def test_a_watched_limit_says_so():
    modes = LimitModes(memory="watched", overshoot={"memory": "up to 20 MiB more"})
    assert "watched, not enforced: up to 20 MiB more" in verdict(modes, signal=9, ended_by="memory_watch").hint


@pytest.mark.parametrize("ended_by", ["memory_unseen", "disk_unseen"])
def test_a_limit_that_could_not_be_watched_is_not_said_to_be_reached(ended_by):
    assert "exceeded" not in verdict(signal=9, ended_by=ended_by).hint
    assert not any(limit_hits(ExecFacts(started=True, signal=9, ended_by=ended_by), LIMITS, MODES).values())


WATCHED = LimitModes(pids="watched", disk="watched", inodes="watched")


@pytest.mark.parametrize(
    "facts, over",
    [
        ({"killed_children": 64}, True),
        ({"killed_children": 63}, False),
        ({"usage": Usage(peak_pids=65)}, True),
        ({"usage": Usage(peak_pids=64)}, False),
        ({"ended_by": "pids_watch"}, True),
    ],
)
def test_more_processes_than_a_watched_limit_allows_is_the_limit(facts, over):
    failed = verdict(WATCHED, exit_code=9, **facts)
    assert failed.reason == ("pids_limit" if over else "nonzero_exit")
    assert ("64 pids" in failed.hint) == over
    well = verdict(WATCHED, exit_code=0, **facts)
    assert well.reason == "ok" and ("64 pids" in (well.hint or "")) == over
    document = result_document(failed, ExecFacts(True, exit_code=9, **facts), limits=LIMITS, modes=WATCHED)
    assert document["limits"]["pids"]["hit"] is over


def test_a_directory_that_is_not_there_is_named():
    facts = ExecFacts(started=False, start_failure=StartFailure("cwd", "ENOENT", "No such file or directory"))
    made = judge(facts, LIMITS, MODES, cwd="/no/such")
    assert "'/no/such' cannot be entered: No such file" in made.hint
    assert "/no/such" in refusal(made.reason, made.hint).detail


def test_an_unknown_start_stays_unknown():
    assert judge(ExecFacts(started=None, sandbox_lost=True), LIMITS, MODES).started is None


def test_signals_have_names():
    assert [signal_name(n) for n in (1, 9, 15, 31, 34, 40, 99)] == [
        "SIGHUP", "SIGKILL", "SIGTERM", "SIGSYS", "SIGRTMIN+0", "SIGRTMIN+6", "SIG99",
    ]  # fmt: skip


# -- streams -------------------------------------------------------------------------------------------------------------------


def test_a_whole_stream_is_its_text():
    text = "café 你好\n".encode()
    assert stream_document(StreamFacts(len(text), len(text), 0), text, b"") == {
        "bytes": len(text), "kept_bytes": len(text), "truncated": False, "text": "café 你好\n", "base64": None, "head_bytes": None,
    }  # fmt: skip


@pytest.mark.parametrize("data", [b"\xff", "你".encode()[:2], b"a\x80b", b"\xed\xa0\x80"])
def test_bytes_that_are_no_text_come_as_base64_too(data):
    made = stream_document(StreamFacts(len(data), len(data), 0), data, b"")
    assert "�" in made["text"] and base64.b64decode(made["base64"]) == data


def test_a_real_replacement_character_is_text():
    data = "�".encode()
    assert stream_document(StreamFacts(3, 3, 0), data, b"")["base64"] is None


def test_a_truncated_stream_has_one_marker_line_between_head_and_tail():
    made = stream_document(StreamFacts(100, 4, 4), b"head", b"tail")
    assert made["text"] == "head\n[… 92 bytes omitted …]\ntail"
    assert base64.b64decode(made["base64"]) == b"headtail"
    assert (made["bytes"], made["kept_bytes"], made["truncated"], made["head_bytes"]) == (100, 8, True, 4)
    assert stream_document(StreamFacts(9, 2, 2), b"a\n", b"b\n")["text"] == "a\n[… 5 bytes omitted …]\nb\n"


def test_a_spool_that_is_gone_shows_as_produced_bytes_of_which_none_is_kept():
    made = stream_document(StreamFacts(10, 10, 0), b"", b"")
    assert (made["bytes"], made["kept_bytes"], made["truncated"]) == (10, 0, True)


# -- the document --------------------------------------------------------------------------------------------------------------


def test_a_result_has_every_field_of_the_contract():
    facts = ExecFacts(started=True, exit_code=0, running_ms=12, usage=Usage(peak_pids=2))
    made = result_document(judge(facts, LIMITS, MODES), facts, limits=LIMITS, modes=MODES, timings={"total_ms": 20.4})
    assert set(made) == {
        "exit_code", "signal", "reason", "hint", "phase", "started", "build", "stdout", "stderr", "timeline", "files", "files_truncated", "artifacts",
        "usage", "limits", "timings",
    }  # fmt: skip
    assert set(made["usage"]) == {
        "peak_memory_bytes", "cpu_seconds", "peak_pids", "disk_bytes", "oom_kills", "pids_limit_hits", "rx_bytes", "tx_bytes",
    }  # fmt: skip
    assert made["usage"]["oom_kills"] is None and made["usage"]["peak_pids"] == 2
    assert tuple(made["limits"]) == LIMIT_NAMES
    assert made["limits"]["memory"] == {"value": 256 * 2**20, "mode": "enforced", "hit": False}
    assert tuple(made["timings"]) == TIMINGS
    assert (
        made["timings"]["running_ms"] == 12
        and made["timings"]["total_ms"] == 20
        and made["timings"]["queued_ms"] is None
    )


@pytest.mark.parametrize(
    "facts, name",
    [
        ({"usage": Usage(oom_kills=1)}, "memory"),
        ({"ended_by": "memory_watch"}, "memory"),
        ({"usage": Usage(pids_limit_hits=1)}, "pids"),
        ({"ended_by": "inodes_watch"}, "inodes"),
        ({"cpu_throttled": 3}, "cpu"),
        ({"disk_full": True}, "disk"),
        ({"inodes_full": True}, "inodes"),
        ({"tmp_full": True}, "tmp"),
        ({"stdout": StreamFacts(9, 1, 1)}, "output"),
        ({"ended_by": "output_limit"}, "output"),
        ({"ended_by": "timeout"}, "wall"),
    ],
)
def test_a_hit_limit_is_marked_and_only_that(facts, name):
    facts = ExecFacts(started=True, exit_code=0, **facts)
    made = result_document(judge(facts, LIMITS, MODES), facts, limits=LIMITS, modes=MODES)
    assert [limit for limit, entry in made["limits"].items() if entry["hit"]] == [name]


def test_a_run_without_a_program_has_the_same_fields():
    made = outcomeless_document("policy_denied", "ask for less")
    assert (made["reason"], made["exit_code"], made["started"], made["hint"]) == (
        "policy_denied",
        None,
        False,
        "ask for less",
    )
    assert made["stdout"]["text"] == ""


@pytest.mark.parametrize(
    "reason, code, status",
    [("ok", 0, 0), ("nonzero_exit", 255, 255), ("nonzero_exit", 127, 127), ("signal", 143, 143), ("timeout", 143, 124),
     ("timeout", None, 124), ("oom", 1, 137), ("oom", None, 137), ("output_limit", 141, 137), ("circuit_breaker", 9, 137),
     ("cancelled", 143, 137), ("cancelled", None, 137), ("pids_limit", 2, 2), ("disk_full", 1, 1), ("inodes", 1, 1),
     ("seccomp", 159, 159), ("sandbox_lost", None, 125), ("sandbox_deleted", 137, 125), ("lease_lost", 137, 125),
     ("infra_error", None, 125), ("policy_denied", None, 125), ("missing_tool", None, 125), ("queue_timeout", None, 125),
     ("dependency_failed", None, 125), ("not_found", None, 125), ("pids_limit", None, 125)],
)  # fmt: skip
def test_the_exit_status_of_the_command_line(reason, code, status):
    assert exit_status(reason, code) == status
    assert exit_status({"reason": reason, "exit_code": code}) == status


def test_ctrl_c_is_130_for_the_one_who_pressed_it():
    assert exit_status("cancelled", 143, interrupted=True) == 130
    assert exit_status("ok", 0, interrupted=True) == 0


# -- the timeline --------------------------------------------------------------------------------------------------------------


def entry(t, stream, offset, size):
    return {"t_ms": t, "stream": stream, "offset": offset, "bytes": size}


def test_neighbours_of_the_same_moment_are_merged():
    made = merge_timeline(
        [entry(1, "stdout", 0, 2), entry(1, "stdout", 2, 3), entry(1, "stderr", 0, 1), entry(2, "stdout", 5, 1)]
    )
    assert made == [entry(1, "stdout", 0, 5), entry(1, "stderr", 0, 1), entry(2, "stdout", 5, 1)]


def test_a_long_timeline_gets_coarser_and_stays_whole():
    entries = [entry(i, ("stdout", "stderr")[i % 2], i // 2, 1) for i in range(30_000)]
    made = merge_timeline(entries)
    assert 2_500 < len(made) <= 10_000
    for stream in ("stdout", "stderr"):
        at = 0
        for item in (item for item in made if item["stream"] == stream):
            assert item["offset"] == at
            at += item["bytes"]
        assert at == 15_000
    assert [item["t_ms"] for item in made] == sorted(item["t_ms"] for item in made)


def test_even_one_moment_is_brought_below_the_cap():
    made = merge_timeline([entry(0, ("stdout", "stderr")[i % 2], i // 2, 1) for i in range(1000)], cap=10)
    assert made == [entry(0, "stdout", 0, 500), entry(0, "stderr", 0, 500)]
