import json
from pathlib import Path

import pytest
import yaml

from corral.domain.request import (
    ExecRequest,
    FileIn,
    HostCaps,
    ResourceWishes,
    language_of,
    parse_exec,
    parse_run,
    parse_sandbox,
)
from corral.domain.runner import Names, Runner
from corral.domain.values import MAX_ENCODED
from corral.errors import CorralError
from corral.guest.connections import MAX_REQUEST

RUNNERS = (Path(__file__).parents[3] / "runners").glob("*.yaml")
NAMES = Names.of(Runner.from_dict(yaml.safe_load(path.read_text("utf-8"))) for path in RUNNERS)
HOST = HostCaps(memory_bytes=4 * 2**30, cpus=2)
CODE = {"code": "print(1)", "language": "python"}


def refused(doc, parse=parse_run):
    with pytest.raises(CorralError) as caught:
        parse(doc, HOST)
    json.dumps(caught.value.to_problem(), ensure_ascii=False).encode("utf-8")  # can always be sent
    assert caught.value.hint
    return caught.value


def test_a_full_run_is_read_word_by_word():
    run = parse_run(
        {
            "code": "print('你好')", "language": "python", "args": ["a", "-b"], "stdin": "in\n", "cwd": "/workspace/x",
            "files": [{"path": "a/b.txt", "content": "x"}, {"path": "./run.sh", "base64": "AP8=", "mode": "0755"}],
            "env": {"A": "1", "空": ""}, "user": "sandbox", "outputs": ["out/*.png", "/workspace/r.txt"],
            "resources": {"memory": "256M", "cpu": 0.5, "pids": 64}, "disk": "100M", "tmp": 2**20,
            "output_limit": "1M", "output_kill": "2M", "timeout_s": 2.5, "ttl_s": 60, "keep": True, "attached": True,
            "runtime": "crun", "template": "host", "isolation": "strong", "network": "none",
        },
        HOST,
    )  # fmt: skip
    assert run.code == "print('你好')" and run.args == ("a", "-b") and run.stdin == b"in\n"
    assert run.files == (FileIn("a/b.txt", b"x"), FileIn("run.sh", b"\x00\xff", 0o755))
    assert run.env == {"A": "1", "空": ""}
    assert run.outputs == ("/workspace/out/*.png", "/workspace/r.txt")
    assert run.wishes == ResourceWishes(256 * 2**20, 0.5, 64, 100 * 2**20, 2**20, 2**20, 2**21, 2.5)
    assert (run.placement.runtime, run.placement.template, run.placement.isolation) == ("crun", "host", "strong")
    assert (run.keep, run.attached, run.ttl_s, run.placement.network) == (True, True, 60.0, None)


def test_a_directory_has_a_mode_and_no_content():
    files = [
        {"path": "d/e", "type": "dir"},
        {"path": "d", "type": "dir", "mode": "0700"},
        {"path": "d/f", "type": "file", "content": ""},
    ]
    assert parse_run(CODE | {"files": files}, HOST).files == (
        FileIn("d/e", None, 0o755),
        FileIn("d", None, 0o700),
        FileIn("d/f", b""),
    )
    for bad, field in (
        ([{"path": "d", "type": "dir", "content": ""}], "/files/0"),
        ([{"path": "d", "type": "link"}], "/files/0/type"),
        ([{"path": "d", "type": "dir", "mode": "rwx"}], "/files/0/mode"),
        ([{"path": "d", "content": ""}, {"path": "d/e", "type": "dir"}], "/files/1/path"),
    ):
        with pytest.raises(CorralError) as caught:
            parse_run(CODE | {"files": bad}, HOST)
        assert (caught.value.code, caught.value.field) == ("invalid_value", field)


def test_what_is_not_said_stays_open():
    run = parse_run(CODE, HOST)
    assert run.wishes == ResourceWishes() and run.stdin is None and run.user == "sandbox"
    assert run.outputs == ("/workspace/out/**",)
    assert parse_run({"shell": "echo hi", "memory": None, "env": None, "files": None}, HOST).shell == "echo hi"


def test_args_of_a_command_are_appended_to_it():
    assert parse_run({"command": ["echo"], "args": ["x"]}, HOST).command == ("echo", "x")


def test_timeout_is_another_word_for_timeout_s():
    assert parse_run({**CODE, "timeout": 3}, HOST).wishes.timeout_s == 3.0
    assert refused({**CODE, "timeout": 3, "timeout_s": 4}).field == "/timeout"


def test_bytes_that_are_not_utf8_travel_as_surrogates_or_base64():
    assert parse_run({"command": ["cat", "\udcff"], "stdin_base64": "/w=="}, HOST).stdin == b"\xff"
    assert parse_run({**CODE, "stdin": "\udcff"}, HOST).stdin == b"\xff"
    assert refused({**CODE, "stdin": "\ud800"}).field == "/stdin"


@pytest.mark.parametrize(
    "doc, code, field",
    [
        ([], "invalid_value", ""),
        (None, "invalid_value", ""),
        ({}, "invalid_value", ""),
        ({"code": "x", "shell": "y", "language": "python"}, "invalid_value", "/shell"),
        ({"code": "x"}, "invalid_value", "/language"),
        ({"code": 1, "language": "python"}, "invalid_value", "/code"),
        ({"code": "x", "language": "pyton"}, "unknown_language", "/language"),
        ({"code": "x", "code_path": "a.xyz"}, "unknown_language", "/language"),
        ({"code": "x" * (2**20 + 1), "language": "python"}, "too_large", "/code"),
        ({"shell": "x", "language": "bash"}, "invalid_value", "/language"),
        ({"shell": ""}, "invalid_value", "/shell"),
        ({"shell": "a\0b"}, "invalid_value", "/shell"),
        ({"shell": "a" * 2**17}, "invalid_value", "/shell"),
        ({"shell": "x", "args": ["y"]}, "invalid_value", "/args"),
        ({"shell": "x", "code_path": "a.py"}, "invalid_value", "/code_path"),
        ({"command": "ls -l"}, "invalid_value", "/command"),
        ({"command": []}, "invalid_value", "/command"),
        ({"command": [""]}, "invalid_value", "/command"),
        ({"command": ["ls", 1]}, "invalid_value", "/command/1"),
        ({"command": ["ls", "a\0"]}, "invalid_value", "/command/1"),
        ({"command": ["ls", "\ud800"]}, "invalid_value", "/command/1"),
        ({"command": ["x"] + ["y" * 1000] * 2000}, "invalid_value", "/command"),
        ({"command": ["x"] + ["\x01" * 60_000] * 17}, "invalid_value", "/command"),
        ({**CODE, "args": ["\udcff" * 60_000] * 17}, "invalid_value", "/args"),
        ({**CODE, "env": {f"A{n}": "\x7f\x01" * 50_000 for n in range(12)}}, "invalid_value", "/env"),
        ({**CODE, "files": {}}, "invalid_value", "/files"),
        ({**CODE, "files": ["a"]}, "invalid_value", "/files/0"),
        ({**CODE, "files": [{"path": "../a", "content": ""}]}, "invalid_value", "/files/0/path"),
        ({**CODE, "files": [{"path": "a/../../b", "content": ""}]}, "invalid_value", "/files/0/path"),
        ({**CODE, "files": [{"path": "/etc/passwd", "content": ""}]}, "invalid_value", "/files/0/path"),
        ({**CODE, "files": [{"path": "", "content": ""}]}, "invalid_value", "/files/0/path"),
        ({**CODE, "files": [{"path": "a/", "content": ""}]}, "invalid_value", "/files/0/path"),
        ({**CODE, "files": [{"path": "a\0", "content": ""}]}, "invalid_value", "/files/0/path"),
        ({**CODE, "files": [{"path": "你" * 86, "content": ""}]}, "invalid_value", "/files/0/path"),
        ({**CODE, "files": [{"path": "a"}]}, "invalid_value", "/files/0"),
        ({**CODE, "files": [{"path": "a", "content": "", "base64": ""}]}, "invalid_value", "/files/0"),
        ({**CODE, "files": [{"path": "a", "base64": "x"}]}, "invalid_value", "/files/0/base64"),
        ({**CODE, "files": [{"path": "a", "base64": "é"}]}, "invalid_value", "/files/0/base64"),
        ({**CODE, "files": [{"path": "a", "content": 1}]}, "invalid_value", "/files/0/content"),
        ({**CODE, "files": [{"path": "a", "content": "", "mode": "0o755"}]}, "invalid_value", "/files/0/mode"),
        ({**CODE, "files": [{"path": "a", "content": "", "mode": "4755"}]}, "invalid_value", "/files/0/mode"),
        ({**CODE, "files": [{"path": "a", "content": "", "mode": 755}]}, "invalid_value", "/files/0/mode"),
        ({**CODE, "files": [{"path": "a", "content": "", "mod": 1}]}, "invalid_value", "/files/0/mod"),
        ({**CODE, "files": [{"path": "a", "content": ""}, {"path": "./a", "content": ""}]}, "invalid_value", "/files/1/path"),
        ({**CODE, "files": [{"path": "a/b", "content": ""}, {"path": "a", "content": ""}]}, "invalid_value", "/files/0/path"),
        ({**CODE, "stdin": 1}, "invalid_value", "/stdin"),
        ({**CODE, "stdin": "a", "stdin_base64": "YQ=="}, "invalid_value", "/stdin_base64"),
        ({**CODE, "stdin_base64": "a b"}, "invalid_value", "/stdin_base64"),
        ({**CODE, "env": []}, "invalid_value", "/env"),
        ({**CODE, "env": {"": "x"}}, "invalid_value", "/env/"),
        ({**CODE, "env": {"A=B": "x"}}, "invalid_value", "/env/A=B"),
        ({**CODE, "env": {"A\nB": "x"}}, "invalid_value", "/env/A\nB"),
        ({**CODE, "env": {"A\x1b": "x"}}, "invalid_value", "/env/A\x1b"),
        ({**CODE, "env": {"A/~": 1}}, "invalid_value", "/env/A~1~0"),
        ({**CODE, "env": {"A": "\0"}}, "invalid_value", "/env/A"),
        ({**CODE, "env": {"A": 1}}, "invalid_value", "/env/A"),
        ({**CODE, "env": {"A": "x" * 2**17}}, "invalid_value", "/env/A"),
        ({**CODE, "cwd": "x"}, "invalid_value", "/cwd"),
        ({**CODE, "cwd": "/a\0"}, "invalid_value", "/cwd"),
        ({**CODE, "cwd": 1}, "invalid_value", "/cwd"),
        ({**CODE, "user": "nobody"}, "invalid_value", "/user"),
        ({**CODE, "user": 0}, "invalid_value", "/user"),
        ({**CODE, "user": []}, "invalid_value", "/user"),
        ({**CODE, "outputs": ["/etc/*"]}, "invalid_value", "/outputs/0"),
        ({**CODE, "outputs": ["../*"]}, "invalid_value", "/outputs/0"),
        ({**CODE, "outputs": 1}, "invalid_value", "/outputs"),
        ({**CODE, "resources": []}, "invalid_value", "/resources"),
        ({**CODE, "resources": {"memry": 1}}, "invalid_value", "/resources/memry"),
        ({**CODE, "resources": {"memory": True}}, "invalid_value", "/resources/memory"),
        ({**CODE, "resources": {"memory": "1G"}, "memory": "2G"}, "invalid_value", "/memory"),
        ({**CODE, "memory": "5G"}, "invalid_value", "/memory"),
        ({**CODE, "memory": 0}, "invalid_value", "/memory"),
        ({**CODE, "memory": 1}, "invalid_value", "/memory"),
        ({**CODE, "memory": -1}, "invalid_value", "/memory"),
        ({**CODE, "memory": 1e9}, "invalid_value", "/memory"),
        ({**CODE, "memory": 10**400}, "invalid_value", "/memory"),
        ({**CODE, "memory": "lots"}, "invalid_value", "/memory"),
        ({**CODE, "cpu": 64}, "invalid_value", "/cpu"),
        ({**CODE, "cpu": 0}, "invalid_value", "/cpu"),
        ({**CODE, "cpu": float("nan")}, "invalid_value", "/cpu"),
        ({**CODE, "cpu": float("inf")}, "invalid_value", "/cpu"),
        ({**CODE, "cpu": 10**400}, "invalid_value", "/cpu"),
        ({**CODE, "cpu": "1"}, "invalid_value", "/cpu"),
        ({**CODE, "cpu": True}, "invalid_value", "/cpu"),
        ({**CODE, "pids": 0}, "invalid_value", "/pids"),
        ({**CODE, "pids": 1.0}, "invalid_value", "/pids"),
        ({**CODE, "pids": 2**40}, "invalid_value", "/pids"),
        ({**CODE, "disk": 0}, "invalid_value", "/disk"),
        ({**CODE, "disk": "7M"}, "invalid_value", "/disk"),
        ({**CODE, "output_limit": "2M", "output_kill": "1M"}, "invalid_value", "/output_kill"),
        ({**CODE, "timeout_s": 0}, "invalid_value", "/timeout_s"),
        ({**CODE, "timeout_s": -1}, "invalid_value", "/timeout_s"),
        ({**CODE, "timeout_s": "2"}, "invalid_value", "/timeout_s"),
        ({**CODE, "timeout_s": True}, "invalid_value", "/timeout_s"),
        ({**CODE, "timeout_s": float("inf")}, "invalid_value", "/timeout_s"),
        ({**CODE, "timeout_s": 10**400}, "invalid_value", "/timeout_s"),
        ({**CODE, "ttl_s": 0}, "invalid_value", "/ttl_s"),
        ({**CODE, "keep": 1}, "invalid_value", "/keep"),
        ({**CODE, "attached": "yes"}, "invalid_value", "/attached"),
        ({**CODE, "runtime": 1}, "invalid_value", "/runtime"),
        ({**CODE, "runtime": "../x"}, "invalid_value", "/runtime"),
        ({**CODE, "template": ""}, "invalid_value", "/template"),
        ({**CODE, "isolation": "weak"}, "invalid_value", "/isolation"),
        ({**CODE, "tiemout_s": 1}, "invalid_value", "/tiemout_s"),
        ({**CODE, "a/b~c": 1}, "invalid_value", "/a~1b~0c"),
        ({**CODE, "\udc80": 1}, "invalid_value", "/\\udc80"),
    ],
)  # fmt: skip
def test_each_bad_value_is_refused_by_name(doc, code, field):
    error = refused(doc)
    assert (error.code, error.field) == (code, field)


@pytest.mark.parametrize(
    "doc, hint",
    [
        ({**CODE, "tiemout_s": 1}, "did you mean timeout_s?"),
        ({**CODE, "output-limit": 1}, "did you mean output_limit?"),
        ({**CODE, "zzz": 1}, "known fields: "),
        ({**CODE, "memory": "1.5G"}, None),
        ({**CODE, "memory": "1T"}, None),
        ({**CODE, "memory": "64G"}, "ask for at most 4096M"),
        ({"code": "x", "language": "javascrpt"}, "did you mean javascript?"),
        ({**CODE, "files": [{"path": "/workspace/a", "content": ""}]}, "write 'a'"),
    ],
)
def test_a_refusal_says_what_would_be_right(doc, hint):
    error = refused(doc)
    assert (error.hint or "").startswith(hint or "")


@pytest.mark.parametrize(
    "name, value",
    [("dependencies", {"python": ["numpy"]}), ("dep", ["numpy"]), ("secrets", ["x"]), ("task", {"prompt": "x"}), ("project", "x"),
     ("skills", ["x"]), ("contention", "wait"), ("retry", "safe"), ("yield_after_s", 1), ("session", "s"),
     ("network", "pypi"), ("pty", True)],
)  # fmt: skip
def test_fields_of_later_versions_are_refused_by_name_unless_empty(name, value):
    error = refused({**CODE, name: value})
    assert (error.code, error.status, error.field) == ("not_supported_yet", 422, f"/{name}")
    for nothing in (None, "", [], {}):
        assert parse_run({**CODE, name: nothing}, HOST) == parse_run(CODE, HOST)


def test_an_empty_set_of_dependencies_is_nothing():
    assert parse_run({**CODE, "dependencies": {"python": [], "npm": [], "apt": []}}, HOST).code


def test_code_that_came_as_a_file_may_leave_the_language_to_its_name():
    assert parse_run({"code": "x", "code_path": "a.js"}, HOST, NAMES).language == "javascript"
    assert parse_run({"code": "#!/bin/sh\n", "code_path": "tool"}, HOST, NAMES).language == "bash"
    assert refused({"code": "x", "code_path": "a.js"}).code == "unknown_language", (
        "without runners no name tells anything"
    )


def test_a_sandbox_is_read():
    made = parse_sandbox({"memory": "64M", "timeout_s": 5, "ttl_s": 9, "files": [{"path": "a", "content": "x"}]}, HOST)
    assert (made.wishes.memory_bytes, made.wishes.timeout_s, made.ttl_s) == (64 * 2**20, 5.0, 9.0)
    assert parse_sandbox({}, HOST).files == ()
    assert refused({"code": "x"}, parse_sandbox).field == "/code"
    assert refused({"session": "x"}, parse_sandbox).code == "not_supported_yet"


def test_an_exec_is_read():
    made = parse_exec(
        {"argv": ["ls"], "args": ["-l"], "pty": {"rows": 3}, "wait": 2, "output_limit": "1K", "stdin_open": True}, HOST
    )
    assert made == ExecRequest(argv=("ls", "-l"), pty=(3, 80), wait_s=2.0, output_bytes=1024, stdin_open=True)
    assert parse_exec({"command": ["ls"], "pty": True, "wait": False}, HOST) == ExecRequest(
        ("ls",), pty=(24, 80), wait_s=0.0
    )
    assert parse_exec({"code": "1", "language": "python"}, HOST).language == "python"


@pytest.mark.parametrize(
    "doc, field",
    [({"argv": ["x"], "command": ["x"]}, "/command"), ({"argv": ["x"], "memory": "1G"}, "/memory"),
     ({"argv": ["x"], "runtime": "crun"}, "/runtime"), ({"argv": ["x"], "pty": [0, 1]}, "/pty"), ({"argv": ["x"], "pty": "y"}, "/pty"),
     ({"argv": ["x"], "pty": {"row": 1}}, "/pty/row"), ({"argv": ["x"], "wait": -1}, "/wait"), ({"argv": ["x"], "keep": True}, "/keep"),
     ({}, "")],
)  # fmt: skip
def test_a_bad_exec_is_refused_by_name(doc, field):
    assert refused(doc, parse_exec).field == field


@pytest.mark.parametrize(
    "name, first, language",
    [("a.py", b"", "python"), ("dir.py/x.R", b"", "r"), ("a.tar.js", b"", "javascript"), ("A.PY", b"", "python"),
     ("a.c", b"#!/bin/sh", "c"), ("run", b"#!/usr/bin/env python3\n", "python"), ("run", b"#! /usr/bin/python3.11 -u\n", "python"),
     ("run", b"#!/usr/bin/env -S FOO=1 node --x\n", "javascript"), ("run.txt", b"#!/bin/bash -e\r\n", "bash")],
)  # fmt: skip
def test_the_language_is_told_by_extension_then_by_first_line(name, first, language):
    assert language_of(NAMES, name, first) == language


@pytest.mark.parametrize(
    "name, first", [("a", b""), ("a.txt", b"x"), (".py", b""), ("a", b"#!"), ("a", b"#!/usr/bin/env"), ("a", b"#!/x/y")]
)
def test_else_the_language_is_unknown(name, first):
    with pytest.raises(CorralError, match="unknown_language") as caught:
        language_of(NAMES, name, first)
    assert "python" in caught.value.hint


@pytest.mark.parametrize("letter", ["x", "日", "🐂"])
def test_a_mebibyte_of_arguments_is_accepted_in_any_script(letter):
    word = letter * (2**16 // len(letter.encode()))
    made = parse_exec({"argv": ["printf", "%s", *[word] * 16]}, HOST)
    assert made.argv == ("printf", "%s", *[word] * 16)


def test_the_longest_request_that_is_accepted_fits_into_one_frame_of_the_guest():
    assert 3 * MAX_ENCODED + 64 * 1024 <= MAX_REQUEST  # argv, args and env


@pytest.mark.parametrize(
    "env",
    [
        "TOKEN=sekret",
        ["TOKEN=sekret"],
        {"TOKEN": ["sekret"]},
        {"TOKEN": "sekret\0"},
        {"TOKEN": 4711},
        {"TO KEN": "sekret"},
    ],
)
def test_a_wrong_environment_is_refused_without_repeating_its_values(env):
    told = json.dumps(refused({"command": ["true"], "env": env}).to_problem())
    assert "/env" in told
    assert "sekret" not in told and "4711" not in told
