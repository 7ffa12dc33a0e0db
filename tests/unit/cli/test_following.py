"""From the first byte to the exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corral.client import Event

from .conftest import RUN, SANDBOX, Call, FakeTransport, ended, refusal

ALL_BYTES = bytes(range(256)) * 100


def test_output_goes_through_byte_by_byte_to_its_own_stream(corral: Call, transport: FakeTransport) -> None:
    transport.events = [
        Event("started", "0"),
        Event("stdout", "1", 0, ALL_BYTES),
        Event("stderr", "2", 0, "café 你好 ☕".encode()),
        Event("stdout", "3", len(ALL_BYTES), b"no newline"),
        Event("ended", "4", doc={}),
    ]
    said = corral("run", "--", "x")
    assert said.status == 0
    assert said.out == ALL_BYTES + b"no newline"
    assert said.err == "café 你好 ☕"
    assert transport.closed


@pytest.mark.parametrize("code", [0, 1, 2, 7, 42, 124, 125, 126, 127, 130, 137, 255])
def test_the_programs_own_status_is_ours(corral: Call, transport: FakeTransport, code: int) -> None:
    transport.document = ended("nonzero_exit" if code else "ok", code)
    assert corral("run", "--", "x").status == code
    told = corral("run", "--json", "--", "x")
    assert (told.status, told.err) == (code, "")
    assert told.json["result"]["exit_code"] == code


REASONS = [
    ("signal", 139, 139), ("pids_limit", 1, 1), ("disk_full", 3, 3), ("inodes", 1, 1), ("seccomp", 159, 159),
    ("timeout", 137, 124), ("oom", 137, 137), ("output_limit", 137, 137), ("circuit_breaker", 137, 137),
    ("cancelled", 137, 137), ("sandbox_deleted", 137, 125), ("lease_lost", 137, 125), ("sandbox_lost", None, 125),
    ("infra_error", None, 125), ("policy_denied", None, 125), ("queue_timeout", None, 125), ("dependency_failed", None, 125),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "code", "status"), REASONS)
def test_reason_decides_the_status(
    corral: Call, transport: FakeTransport, reason: str, code: int | None, status: int
) -> None:
    transport.document = ended(reason, code, hint="do this instead")
    said = corral("run", "--", "x")
    assert said.status == status
    quiet = reason == "signal"
    assert said.err == ("" if quiet else f"corral: {reason}: do this instead\n")
    told = corral("run", "--json", "--", "x")
    assert (told.status, told.err, told.json["result"]["reason"]) == (status, "", reason)


def test_a_program_that_was_not_found_is_explained(corral: Call, transport: FakeTransport) -> None:
    transport.document = ended("nonzero_exit", 127, started=False, hint="there is no program 'x' in this template")
    said = corral("run", "--", "x")
    assert (said.status, said.err) == (127, "corral: nonzero_exit: there is no program 'x' in this template\n")


def test_a_build_that_failed_is_explained_below_what_the_compiler_said(corral: Call, transport: FakeTransport) -> None:
    transport.document = ended("nonzero_exit", 1, phase="build", hint="the build failed")
    said = corral("run", "--", "x")
    assert (said.status, said.err) == (1, "corral: nonzero_exit: the build failed\n")


def test_refusals_come_in_the_form_that_was_asked_for(corral: Call, transport: FakeTransport) -> None:
    transport.document = refusal("not_supported_yet", "no network\nyet\x1b[31m", hint="leave it out", field="/network")
    said = corral("run", "--network", "web", "--", "x")
    assert (said.status, said.out) == (125, b"")
    assert said.err == "corral: not_supported_yet: /network: no network yet\\x1b[31m (leave it out)\n"
    told = corral("run", "--json", "--network", "web", "--", "x")
    assert (told.status, told.err) == (125, "")
    assert told.json["error"]["code"] == "not_supported_yet"
    assert told.json["error"]["field"] == "/network"


def test_an_unexpected_failure_of_ours_is_still_one_document(corral: Call, transport: FakeTransport) -> None:
    transport.document = ValueError("surprise")
    assert corral("run", "--", "x").err.startswith("corral: infra_error: unexpected ValueError: surprise (")
    told = corral("run", "--json", "--", "x")
    assert (told.status, told.json["error"]["code"]) == (125, "infra_error")


def test_a_gap_in_the_output_is_an_error_not_silence(corral: Call, transport: FakeTransport) -> None:
    transport.events = [Event("gap", "1", 0, b"", {"stream": "stdout", "offset": 0, "bytes": 10})]
    said = corral("run", "--", "x")
    assert said.status == 125
    assert "10 bytes of stdout" in said.err


def test_output_that_the_stream_did_not_bring_comes_from_the_spool(corral: Call, transport: FakeTransport) -> None:
    transport.events = [Event("stdout", "1", 0, b"first ")]
    transport.blocks = lambda path: [b"fir", b"st last"] if path.endswith("/logs") else []
    transport.document = ended(stdout={"bytes": 10}, stderr={"bytes": 0})
    assert corral("run", "--", "x").out == b"first last"
    transport.document = ended(stdout={"bytes": 11}, stderr={"bytes": 0})
    said = corral("run", "--", "x")
    assert said.status == 125
    assert "the last 1 bytes of stdout" in said.err


@pytest.mark.parametrize(("reason", "status"), [("output_limit", 137), ("ok", 0), ("nonzero_exit", 3)])
def test_output_over_the_limit_that_ends_the_program_does_not_change_the_status(
    corral: Call, transport: FakeTransport, reason: str, status: int
) -> None:
    limits = {"output": {"value": 4, "kill": 8, "hit": True}}
    transport.document = ended(reason, status, stdout={"bytes": 11}, limits=limits, hint="wrote too much")
    transport.events = [Event("stdout", "1", 0, b"12345678")]
    transport.blocks = [b"12345678"]
    said = corral("run", "--", "x")
    assert (said.status, said.out) == (status, b"12345678")
    told = (
        "output_limit: wrote too much"
        if reason == "output_limit"
        else "the last 3 bytes of stdout are over --output-kill"
    )
    assert told in said.err
    transport.blocks = transport.events = []
    lost = corral("run", "--", "x")
    assert lost.status == 125 and "cursor_gone" in lost.err, "what was kept has to arrive"


def test_lone_surrogates_leave_valid_json(corral: Call, transport: FakeTransport) -> None:
    transport.document = ended(hint="\udcff 你")
    assert corral("run", "--json", "--", "x").json["result"]["hint"] == "\udcff 你"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_signal_cancels_waits_and_tells(
    corral: Call, transport: FakeTransport, number: signal.Signals, as_json: bool
) -> None:
    sent = False

    def arrive() -> None:
        nonlocal sent
        if not sent:
            sent = True
            signal.raise_signal(number)

    def answer(method: str, path: str) -> dict[str, Any]:
        if path.endswith("/cancel") or (sent and not as_json):
            return ended("cancelled", 137, hint="cancelled")
        if method == "POST":
            return {"id": RUN, "state": "running", "result": None}
        arrive()
        return ended("cancelled", 137, hint="cancelled")

    transport.document = answer
    transport.events = [Event("stdout", "c1", 0, b"before "), arrive, Event("stdout", "c2", 7, b"after")]
    said = corral("run", *(["--json"] if as_json else []), "--", "x")
    assert said.status == 128 + number
    assert [call[1] for call in transport.calls].count(f"/v1/runs/{RUN}/cancel") == 1
    if as_json:
        assert said.json["result"]["reason"] == "cancelled"
    else:
        assert said.out == b"before after"
        assert transport.streamed == [None, "c1"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_cut_call_that_fails_on_its_way_out_is_still_a_cancel(corral: Call, transport: FakeTransport) -> None:
    def arrive() -> None:
        transport.events = []
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise RuntimeError("already running")

    transport.events = [arrive]
    transport.document = ended("cancelled", 137)
    assert corral("run", "--", "x").status == 130
    assert ("POST", f"/v1/runs/{RUN}/cancel") in [call[:2] for call in transport.calls]


def test_a_signal_while_the_run_is_submitted_still_cancels_it(corral: Call, transport: FakeTransport) -> None:
    def answer(method: str, path: str) -> dict[str, Any]:
        if path == "/v1/runs":
            signal.raise_signal(signal.SIGINT)
            return {"id": RUN, "state": "queued", "result": None}
        return ended("cancelled", 137)

    transport.document = answer
    assert corral("run", "--", "x").status == 130
    assert ("POST", f"/v1/runs/{RUN}/cancel") in [call[:2] for call in transport.calls]


def test_artifacts_are_written_below_the_directory_and_nowhere_else(
    corral: Call, transport: FakeTransport, tmp_path: Path
) -> None:
    def artifact(path: str) -> dict[str, Any]:
        return {"path": path, "size": 1, "digest": "sha256:0", "url": "/v1/runs/r/artifacts" + path}

    transport.blocks = lambda path: [path.rpartition("/")[2].encode()]
    transport.document = ended(artifacts=[artifact("/workspace/out/a.txt"), artifact("/workspace/out/d/你")])
    assert corral("run", "--out", str(tmp_path / "o"), "--", "x").status == 0
    assert (tmp_path / "o" / "a.txt").read_bytes() == b"a.txt"
    assert (tmp_path / "o" / "d" / "你").exists()
    transport.document = ended(artifacts=[artifact("/workspace/x.csv"), artifact("/workspace/out/a.txt")])
    assert corral("run", "--out", str(tmp_path / "p"), "--", "x").status == 0
    assert sorted(p.relative_to(tmp_path / "p").as_posix() for p in (tmp_path / "p").rglob("*.*")) == [
        "out/a.txt",
        "x.csv",
    ]
    transport.document = ended(artifacts=[artifact("/workspace/out/../../evil")])
    said = corral("run", "--out", str(tmp_path / "q"), "--", "x")
    assert said.status == 125
    assert not list(tmp_path.rglob("evil"))


def artifacts_of(*paths: str) -> list[dict[str, Any]]:
    return [{"path": path, "size": 1, "digest": "sha256:0", "url": "/v1/runs/r/artifacts" + path} for path in paths]


def test_artifacts_do_not_pass_through_links_that_lie_in_the_directory(
    corral: Call, transport: FakeTransport, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "canary").write_text("safe")
    real = tmp_path / "real"
    (real / "sub").mkdir(parents=True)
    (real / "d").symlink_to(tmp_path / "outside")
    (real / "sub" / "e").symlink_to("..")
    (real / "f").symlink_to(tmp_path / "canary")
    (tmp_path / "o").symlink_to(real)  # the directory itself may be a link
    transport.blocks = [b"new"]
    names = ("d/x", "sub/e/x", "f", "fine")
    transport.document = ended(artifacts=artifacts_of(*(f"/workspace/out/{name}" for name in names)))
    said = corral("run", "--out", str(tmp_path / "o"), "--", "x")
    assert said.status == 125
    assert f"{tmp_path}/o/d': a symbolic link is in the way" in said.err
    assert f"{tmp_path}/o/sub/e': a symbolic link is in the way" in said.err
    assert list((tmp_path / "outside").iterdir()) == [] and not (real / "x").exists()
    assert (tmp_path / "canary").read_text() == "safe"
    assert (real / "f").read_text() == "new" and not (real / "f").is_symlink()
    assert (real / "fine").read_text() == "new"
    assert not list(real.rglob("*.part"))


@pytest.mark.parametrize(("code", "status"), [(0, 125), (7, 7)])
def test_an_artifact_that_cannot_be_written_does_not_lose_the_result(
    corral: Call, transport: FakeTransport, tmp_path: Path, code: int, status: int
) -> None:
    (tmp_path / "o" / "name").mkdir(parents=True)
    transport.blocks = lambda path: refusal("infra_error", "broke off") if path.endswith("lost") else [b"x"]
    found = artifacts_of("/workspace/out/name", "/workspace/out/lost", "/workspace/out/other")
    transport.document = ended("nonzero_exit" if code else "ok", code, artifacts=found)
    said = corral("run", "--json", "--out", str(tmp_path / "o"), "--", "x")
    assert (said.status, said.json["result"]["exit_code"]) == (status, code)
    assert "o/name': Is a directory" in said.err and "broke off" in said.err
    assert (tmp_path / "o" / "other").read_bytes() == b"x"


def test_a_signal_while_artifacts_are_written_does_not_lose_the_result(
    corral: Call, transport: FakeTransport, tmp_path: Path
) -> None:
    def blocks(path: str) -> list[bytes]:
        signal.raise_signal(signal.SIGINT)
        return []

    transport.blocks = blocks
    transport.document = ended(artifacts=artifacts_of("/workspace/out/a"))
    said = corral("run", "--json", "--out", str(tmp_path / "o"), "--", "x")
    assert (said.status, said.json["id"]) == (130, RUN)
    assert list((tmp_path / "o").iterdir()) == []


@pytest.mark.parametrize("kind", ["empty", "file", "below a file", "dangling"])
def test_a_directory_for_artifacts_that_cannot_be_is_refused_before_the_run(
    corral: Call, transport: FakeTransport, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    out = {"empty": "", "below a file": f"{tmp_path}/file/a/b"}.get(kind, f"{tmp_path}/{kind}")
    for command in (["run"], ["exec", "sbx_1"]):
        said = corral(*command, "--json", "--out", out, "--", "x")
        assert (said.status, said.json["error"]["code"]) == (2, "usage")
    assert transport.calls == []


def test_kept_sandbox_is_named_on_stderr(corral: Call, transport: FakeTransport) -> None:
    said = corral("run", "--keep", "--", "x")
    assert (said.out, said.err) == (b"", f"corral: kept {SANDBOX}\n")


SCRIPT = """
import sys
from corral.cli import connection, main
from corral.client import Event
class Fake:
    cancelled = False
    def request(self, method, path, json=None, params=None, headers=None):
        if path.endswith("/cancel"):
            sys.stderr.write("cancelled\\n")
        return {"id": "run_1", "state": "finished", "result": {"reason": "ok", "exit_code": 0, "started": True, "hint": None}}
    def stream(self, path, params=None):
        offset = 0
        for n in range(ROUNDS):
            yield Event("stdout", str(n), offset, b"x" * 65536)
            offset += 65536
    def close(self): pass
connection.connect = lambda **_: Fake()
sys.argv = ["corral", "run", "--", "x"]
main.main()
"""


def script(rounds: int) -> list[str]:
    return [sys.executable, "-c", f"ROUNDS = {rounds}\n{SCRIPT}"]


def test_a_reader_that_leaves_cancels_and_we_end_by_sigpipe() -> None:
    child = subprocess.Popen(script(100_000), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(10)
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait(60) == -signal.SIGPIPE
    assert err == b"cancelled\n"


def test_a_full_disk_behind_stdout_is_told() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(script(3), stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 125
    assert done.stderr.startswith(b"cancelled\ncorral: infra_error: cannot write to stdout: No space left")


def test_a_nonblocking_pipe_receives_every_byte() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    child = subprocess.Popen(script(40), stdout=write)
    os.close(write)
    total = 0
    with open(read, "rb") as pipe:
        while block := pipe.read(65536):
            total += len(block)
    assert (child.wait(60), total) == (0, 40 * 65536)


@pytest.mark.parametrize(
    ("closed", "status"), [("<&-", 0), (">&-", 125), ("2>&-", 0), ("<&- >&- 2>&-", 125), (">&- 2>/dev/null", 125)]
)
def test_closed_standard_streams_lose_no_result_in_silence(closed: str, status: int) -> None:
    quoted = " ".join(["exec", "'" + sys.executable + "'", "-c", '"$SCRIPT"', closed])
    env = os.environ | {"SCRIPT": script(2)[2]}
    done = subprocess.run(["/bin/sh", "-c", quoted], env=env, timeout=60, capture_output=True)
    assert done.returncode == status, done.stderr
    if closed == ">&-":
        assert done.stderr == b"cancelled\ncorral: infra_error: cannot write to stdout: it is closed\n"


def test_what_writes_nothing_may_have_a_closed_stdout() -> None:
    quoted = " ".join(["exec", "'" + sys.executable + "'", "-c", '"$SCRIPT"', ">&-"])
    done = subprocess.run(["/bin/sh", "-c", quoted], env=os.environ | {"SCRIPT": script(0)[2]}, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_progress_is_off_the_screen_before_the_first_byte_of_output(stream: str) -> None:
    program = f"""
import sys
from corral.cli import connection, main
from corral.client import Event
class Fake:
    def request(self, method, path, json=None, params=None, headers=None):
        return {{"id": "run_1", "state": "finished", "result": {{"reason": "ok", "exit_code": 0, "started": True, "hint": None}}}}
    def stream(self, path, params=None):
        progress("building", 0.5)
        yield Event({stream!r}, "1", 0, b"FIRST")
        progress("still building", 0.7)
    def close(self): pass
def connect(progress):
    globals()["progress"] = progress
    return Fake()
connection.connect = connect
sys.argv = ["corral", "run", "--", "x"]
main.main()
"""
    master, slave = os.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm"}
    )
    os.close(slave)
    screen = b""
    try:
        while block := os.read(master, 65536):
            screen += block
    except OSError:  # the other side is gone
        pass
    os.close(master)
    assert child.wait(60) == 0, screen
    before, _, after = screen.partition(b"FIRST")
    assert b"building" in before and before.endswith((b"\x1b[2K", b"\x1b[?25h", b"\r"))
    assert before.rindex(b"\x1b[2K") > before.rindex(b"building")
    assert b"building" not in after


def test_version_prints_one_line(corral: Call) -> None:
    said = corral("--version")
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith(b"corral ") and said.out.count(b"\n") == 1


def test_help_of_every_command_exits_0(corral: Call) -> None:
    from corral.cli.commands import COMMANDS

    for name in COMMANDS:
        said = corral(name, "--help")
        assert said.status == 0
        assert said.out.startswith(b"Usage: corral " + name.encode())
