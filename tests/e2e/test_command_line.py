"""The command line from outside, from the contract alone, on every runtime and user that can run here."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from acceptance.conftest import Box, eventually, marked

REASONS_OF_EXIT = {0: "ok", 1: "nonzero_exit", 2: "nonzero_exit", 7: "nonzero_exit", 124: "nonzero_exit", 125: "nonzero_exit",
                   126: "nonzero_exit", 127: "nonzero_exit", 128: "nonzero_exit", 137: "nonzero_exit", 255: "nonzero_exit"}  # fmt: skip


def run(box: Box, *arguments: str, **options: Any) -> Any:
    return box("run", "--runtime", box.runtime, *arguments, **options)


# -- run -----------------------------------------------------------------------------------------------------------------------
def test_code_prints_and_nothing_is_added(box: Box) -> None:
    done = run(box, "-c", 'print("你好", 6*7)')
    assert (done.returncode, done.stdout, done.stderr) == (0, "你好 42\n".encode(), b"")


@pytest.mark.parametrize("code", REASONS_OF_EXIT)
def test_the_programs_exit_status_is_ours(box: Box, code: int) -> None:
    done = run(box, "--json", "--", "sh", "-c", f"exit {code}")
    result = json.loads(done.stdout)["result"]
    assert (done.returncode, result["exit_code"], result["reason"]) == (code, code, REASONS_OF_EXIT[code])
    assert (result["hint"] is None) == (code == 0)
    assert result["started"] is True and result["signal"] is None


@pytest.mark.parametrize(("name", "number"), [("KILL", 9), ("TERM", 15), ("SEGV", 11), ("USR1", 10)])
def test_death_by_signal_is_128_plus_n(box: Box, name: str, number: int) -> None:
    done = run(box, "--json", "-c", f"import os, signal; os.kill(os.getpid(), signal.SIG{name})")
    result = json.loads(done.stdout)["result"]
    assert (done.returncode, result["exit_code"], result["signal"], result["reason"]) == (
        128 + number, 128 + number, f"SIG{name}", "signal",
    )  # fmt: skip


def test_a_program_that_is_not_there_is_127_and_named(box: Box) -> None:
    done = run(box, "--json", "--", "no-such-program-x")
    result = json.loads(done.stdout)["result"]
    assert (done.returncode, result["reason"]) == (127, "nonzero_exit")
    assert "no-such-program-x" in result["hint"]
    assert b"no-such-program-x" in run(box, "--", "no-such-program-x").stderr


def test_a_file_that_is_not_executable_is_126(box: Box, tmp_path: Path) -> None:
    plain = readable(tmp_path / "plain", b"#!/bin/sh\n")
    assert run(box, "--file", f"{plain}:plain", "--", "/workspace/plain").returncode == 126


def test_a_missing_directory_is_refused_by_name(box: Box) -> None:
    done = run(box, "--cwd", "/workspace/none", "--", "true")
    assert done.returncode == 125
    assert done.stderr.startswith(b"corral: cwd_not_found: ") and b"/workspace/none" in done.stderr


def test_streams_stay_apart_and_bytes_stay_bytes(box: Box) -> None:
    code = "import os; os.write(1, bytes(range(256))*50); os.write(2, b'\\xff\\xfe err'); os._exit(7)"
    done = run(box, "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (7, bytes(range(256)) * 50, b"\xff\xfe err")
    result = box.run_json("-c", code)["result"]
    assert result["stdout"]["bytes"] == 12800 and result["stdout"]["base64"] is not None
    assert result["stderr"]["bytes"] == 6


def test_output_arrives_while_the_program_runs(box: Box) -> None:
    process = box.popen(
        "run", "--runtime", box.runtime, "-c", "import time; print('early', flush=True); time.sleep(60)"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"early\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130


def test_words_that_are_not_utf8_reach_the_program(box: Box) -> None:
    word = os.fsdecode(b"\xff\xc3 \n")
    done = run(box, "-c", "import os, sys; os.write(1, os.fsencode(sys.argv[1]))", word)
    assert (done.returncode, done.stdout) == (0, b"\xff\xc3 \n")


def test_options_after_the_program_are_the_programs(box: Box) -> None:
    done = run(box, "-c", "import sys; print(sys.argv[1:])", "a", "--json", "--", "-c")
    assert done.stdout == b"['a', '--json', '--', '-c']\n"


def readable(path: Path, content: bytes) -> Path:
    """A file that the ordinary user of a test may read."""
    path.write_bytes(content)
    for parent in path.parents:
        if parent.stat().st_uid == path.stat().st_uid and parent != Path("/") and "pytest" in str(parent):
            parent.chmod(0o755)
    return path


def test_a_file_runs_by_its_extension_and_lies_in_the_workspace(box: Box, tmp_path: Path) -> None:
    script = readable(tmp_path / "工具.py", b"import sys; print(__file__, sys.argv[1:])")
    done = run(box, str(script), "a", "-b")
    assert (done.returncode, done.stdout) == (0, "/workspace/工具.py ['a', '-b']\n".encode()), done.stderr


def test_a_file_runs_by_its_first_line(box: Box, tmp_path: Path) -> None:
    script = readable(tmp_path / "tool", b"#!/bin/sh\necho shell $1\n")
    assert run(box, str(script), "x").stdout == b"shell x\n"


def test_a_file_of_no_known_language_is_refused(box: Box, tmp_path: Path) -> None:
    done = run(box, str(readable(tmp_path / "tool.xyz", b"hm")))
    assert done.returncode == 125
    assert done.stderr.startswith(b"corral: unknown_language: ")


@pytest.mark.parametrize(
    ("language", "code"),
    [("python", "print('hi')"), ("bash", "echo hi"), ("javascript", "console.log('hi')"),
     ("c", '#include <stdio.h>\nint main(void){puts("hi");}')],
)  # fmt: skip
def test_languages(box: Box, language: str, code: str) -> None:
    done = run(box, "--language", language, "-c", code)
    assert (done.returncode, done.stdout) == (0, b"hi\n"), done.stderr


def test_shell_stdin_env_and_cwd(box: Box) -> None:
    options = ("--env", "A=ä b", "--cwd", "/tmp", "--stdin", "-")
    done = run(box, *options, "--shell", 'cat; echo "$A"; pwd', input=b"in\xff\n")
    assert (done.returncode, done.stdout) == (0, b"in\xff\n" + "ä b\n/tmp\n".encode())
    assert run(box, "--", "cat").stdout == b""


def test_files_go_in_and_artifacts_come_out(box: Box, tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "sub").mkdir(parents=True)
    readable(source / "sub" / "data", b"\0\xff").chmod(0o644)
    readable(source / "go.sh", b"#!/bin/sh\nmkdir -p out/d && cp d/sub/data out/d/copy").chmod(0o755)
    (source / "sub").chmod(0o755)
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o777)
    done = run(box, "--file", f"{source}:d", "--out", f"{out}/x", "--", "d/go.sh")
    assert done.returncode == 0, done.stderr
    assert (out / "x" / "d" / "copy").read_bytes() == b"\0\xff"
    document = box.run_json("--file", f"{source}:d", "--", "d/go.sh")
    [artifact] = document["result"]["artifacts"]
    assert artifact["size"] == 2
    assert artifact["digest"] == "sha256:" + hashlib.sha256(b"\0\xff").hexdigest()
    changed = {f["path"]: f["change"] for f in document["result"]["files"] if f["type"] == "file"}
    assert changed == {"/workspace/out/d/copy": "created"}


def test_timeout_is_124_with_partial_output(box: Box) -> None:
    began = time.monotonic()
    done = run(box, "--timeout", "5", "-c", "import time; print('start', flush=True); time.sleep(60)")
    assert time.monotonic() - began < 30
    assert (done.returncode, done.stdout) == (124, b"start\n")
    assert done.stderr.startswith(b"corral: timeout: ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_us_ends_everything_inside(box: Box, marker: str, number: signal.Signals) -> None:
    process = box.popen(
        "run", "--runtime", box.runtime, "--shell", f"echo up; sleep 100 & exec -a {marker} sleep 100; :"
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    eventually(lambda: not marked(marker), what="nothing of the run lives")


def test_a_reader_that_leaves_ends_the_run(box: Box) -> None:
    process = box.popen("run", "--runtime", box.runtime, "--", "yes")
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(30) == -signal.SIGPIPE


def test_document_has_all_members_of_the_contract(box: Box) -> None:
    document = box.run_json("-c", "print('x')")
    assert {"id", "state", "sandbox_id", "lease_version", "decisions", "result"} <= document.keys()
    assert document["state"] == "finished"
    decisions = document["decisions"]
    assert decisions["placement"]["runtime"] == box.runtime
    assert decisions["placement"]["template_digest"].startswith("sha256:")
    assert decisions["guard"]["limits"]
    result = document["result"]
    assert {
        "exit_code", "signal", "reason", "hint", "started", "stdout", "stderr", "timeline", "files", "artifacts", "usage",
        "limits", "timings",
    } <= result.keys()  # fmt: skip
    assert {"bytes", "kept_bytes", "truncated", "text", "base64"} <= result["stdout"].keys()
    assert {"memory", "cpu", "pids", "disk", "inodes", "tmp", "output", "wall"} <= result["limits"].keys()
    assert all(limit["mode"] in ("enforced", "watched", "absent") for limit in result["limits"].values())
    assert {"running_ms", "total_ms", "queued_ms"} <= result["timings"].keys()


def test_agent_view_folds_and_fits(box: Box) -> None:
    done = run(box, "--agent-view", "1000", "-c", "for i in range(5000): print('line', i)")
    assert done.returncode == 0
    assert 0 < len(done.stdout.decode()) <= 1100
    assert b"line 4999" in done.stdout


LATER = [["--network", "web"], ["--session", "s"], ["--dep", "python:requests"]]
INVALID = [
    ["--timeout", "0"], ["--timeout", "soon"], ["--memory", "12Q"], ["--memory", "0"], ["--memory", "9999999G"], ["--memory", "-1"],
    ["--cpu", "0"], ["--cpu", "100000"], ["--pids", "0"], ["--disk", "x"], ["--tmp", "1.5M"], ["--output-limit", "-5"],
    ["--runtime", "docker"], ["--template", "../x"], ["--language", "cobol"], ["--user", "nobody"], ["--cwd", "relative"],
    ["--isolation", "perfect"],
]  # fmt: skip


@pytest.mark.parametrize("options", LATER + INVALID, ids=" ".join)
def test_bad_values_are_refused_with_code_field_and_hint(one: Box, options: list[str]) -> None:
    box = one
    before = len(box.document("runs", "ls", "--json")[1]["items"])
    told = box("run", "--json", *options, "-c", "print(1)")
    error = json.loads(told.stdout)["error"]
    assert told.returncode == 125, told.stdout
    assert error["code"] and error["hint"] and error["retryable"] is False
    word = options[0].removeprefix("--").replace("-", "_")
    assert word in (error.get("field") or "") + error["detail"]
    said = box("run", *options, "-c", "print(1)")
    assert (said.returncode, said.stdout) == (125, b"")
    assert said.stderr.startswith(f"corral: {error['code']}: ".encode())
    assert len(box.document("runs", "ls", "--json")[1]["items"]) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["sandbox"],
        ["runs", "nonsense"],
        ["run", "--bogus"],
        ["nonsense"],
        ["run", "/no/such.py"],
        ["exec", "sbx_x"],
        ["cp", "a", "b"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(one: Box, arguments: list[str]) -> None:
    said = one(*arguments)
    assert (said.returncode, said.stdout) == (2, b"")
    assert said.stderr.startswith(b"corral: usage: ")


# -- sandboxes -----------------------------------------------------------------------------------------------------------------
def test_a_sandbox_lives_from_create_to_rm(box: Box) -> None:
    sandbox = box.sandbox("--memory", "256M")
    assert sandbox.startswith("sbx_") and len(sandbox) == 30
    assert box("exec", sandbox, "--", "sh", "-c", "echo kept > f").returncode == 0
    assert box("exec", sandbox, "--", "cat", "f").stdout == b"kept\n"
    status, told = box.document("exec", sandbox, "--json", "--", "sh", "-c", "exit 3")
    assert status == 3 and told["sandbox_id"] == sandbox and told["id"].startswith("exe_")
    assert told["result"]["reason"] == "nonzero_exit"
    listed = box.document("sandbox", "ls", "--json")[1]
    assert listed["next"] is None and sandbox in [item["id"] for item in listed["items"]]
    inspected = box.document("sandbox", "inspect", sandbox, "--json")[1]
    assert {"id", "state", "runtime", "template", "template_digest", "resource_class", "limits", "lease_version", "incarnation",
            "session", "created_at", "expires_at", "conditions", "tainted", "instance", "history"} <= inspected.keys()  # fmt: skip
    assert box("sandbox", "rm", sandbox).returncode == 0
    assert box("sandbox", "rm", sandbox).returncode == 0
    assert box.document("sandbox", "inspect", sandbox, "--json")[1]["state"] == "terminated"
    assert box("exec", sandbox, "--", "true").returncode == 125


@pytest.mark.parametrize(
    "arguments",
    [["sandbox", "rm"], ["sandbox", "inspect"], ["exec"], ["logs"], ["cancel"], ["runs", "show"]],
    ids=" ".join,
)
def test_what_never_existed_is_not_found(one: Box, arguments: list[str]) -> None:
    box = one
    ident = ("run_" if arguments[0] in ("logs", "cancel", "runs") else "sbx_") + "0" * 26
    rest = ["--", "true"] if arguments == ["exec"] else []
    status, told = box.document(*arguments, ident, "--json", *rest)
    assert (status, told["error"]["code"]) == (125, "not_found")


def test_cp_takes_trees_in_and_out(box: Box, sandbox: str, tmp_path: Path) -> None:
    source = tmp_path / "源"
    (source / "sub").mkdir(parents=True)
    readable(source / "sub" / "f", os.urandom(300_000)).chmod(0o640 if os.geteuid() else 0o644)
    readable(source / "go", b"#!/bin/sh\n").chmod(0o755)
    (source / "link").symlink_to("sub/f")
    for folder in (source, source / "sub"):
        folder.chmod(0o755)
    assert box("cp", str(source), f"{sandbox}:tree").returncode == 0
    listed = box(
        "exec", sandbox, "--", "sh", "-c", "cd tree && find . | sort && readlink link && test -x go && cksum < sub/f"
    )
    assert listed.stdout.decode().split()[:6] == [".", "./go", "./link", "./sub", "./sub/f", "sub/f"], listed.stderr
    tmp_path.chmod(0o777)
    back = tmp_path / "back"
    done = box("cp", f"{sandbox}:/workspace/tree", str(back))
    assert done.returncode == 0, done.stderr
    assert (back / "sub" / "f").read_bytes() == (source / "sub" / "f").read_bytes()
    assert os.readlink(back / "link") == "sub/f"
    assert os.access(back / "go", os.X_OK)
    stream = box("cp", f"{sandbox}:tree/go", "-")
    assert b"go" in stream.stdout[:100]
    assert box("cp", "-", f"{sandbox}:tree/sub", input=stream.stdout).returncode == 0
    assert box("exec", sandbox, "--", "cat", "tree/sub/go").stdout == b"#!/bin/sh\n"
    missing = box("cp", f"{sandbox}:none", str(tmp_path / "x"))
    assert missing.returncode == 125 and missing.stderr.startswith(b"corral: not_found: ")
    box("exec", sandbox, "--", "rm", "-rf", "tree")


def test_logs_give_the_raw_bytes_of_each_stream(box: Box) -> None:
    ident = box.run_json("--", "sh", "-c", r"printf 'o\377'; printf e >&2")["id"]
    assert box("logs", ident, "--stream", "stdout").stdout == b"o\xff"
    assert box("logs", ident, "--stream", "stderr").stdout == b"e"
    both = box("logs", ident)
    assert (both.stdout, both.stderr) == (b"o\xff", b"e")


def test_runs_are_listed_and_shown(box: Box) -> None:
    ident = box.run_json("--", "true")["id"]
    for words in (["runs"], ["runs", "ls"]):
        assert ident in [item["id"] for item in box.document(*words, "--json")[1]["items"]]
    for words in (["runs"], ["runs", "show"]):
        assert box.document(*words, ident, "--json")[1]["result"]["reason"] == "ok"
    assert ident in box("runs").stdout.decode()
    assert box("cancel", ident).returncode == 0


def test_kept_sandbox_stays_usable(box: Box) -> None:
    document = box.run_json("--keep", "--ttl", "300", "--", "sh", "-c", "echo x > f")
    sandbox = document["sandbox_id"]
    try:
        assert box("exec", sandbox, "--", "cat", "f").stdout == b"x\n"
    finally:
        assert box("sandbox", "rm", sandbox).returncode == 0


def test_doctor_names_runtimes_and_a_default(box: Box) -> None:
    status, report = box.document("doctor", "--json")
    assert (status == 0) == (report["default"] is not None)
    assert {"bubblewrap", "crun"} <= {runtime["name"] for runtime in report["runtimes"]}
    mine = next(runtime for runtime in report["runtimes"] if runtime["name"] == box.runtime)
    assert mine["usable"] and mine["reason"] is None
    assert report["host"]["cgroup"] in ("v1", "v2", "hybrid", "none")
    assert all(runtime["usable"] or runtime["reason"] for runtime in report["runtimes"])


def test_tables_are_for_people(box: Box, sandbox: str) -> None:
    lines = box("sandbox", "ls").stdout.decode().splitlines()
    assert lines[0].startswith("ID") and any(sandbox in line for line in lines[1:])
