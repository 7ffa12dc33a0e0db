"""What a command line means as a request."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from .conftest import Call, FakeTransport


@pytest.mark.parametrize(
    ("arguments", "document"),
    [
        (["-c", "print(1)"], {"code": "print(1)", "language": "python", "args": []}),
        (["-c", "x", "a", "--json", "-c"], {"code": "x", "language": "python", "args": ["a", "--json", "-c"]}),
        (["-c", "x", "--", "-v"], {"code": "x", "language": "python", "args": ["-v"]}),
        (["-c", "--", "a"], {"code": "--", "language": "python", "args": ["a"]}),
        (["-cprint(1)"], {"code": "print(1)", "language": "python", "args": []}),
        (["--language", "bash", "-c", "ls"], {"code": "ls", "language": "bash", "args": []}),
        (["--", "ls", "--", "-l"], {"command": ["ls", "--", "-l"]}),
        (["--", "--version"], {"command": ["--version"]}),
        (["--shell", "a | b"], {"shell": "a | b"}),
        (["--", "你好", "\udcff"], {"command": ["你好", "\udcff"]}),
        (["--timeout", "2.5", "--", "x"], {"command": ["x"], "timeout": 2.5}),
        (["--memory=1G", "--pids", "9", "--cpu", "0.5", "--", "x"], {"command": ["x"], "memory": "1G", "pids": 9, "cpu": 0.5}),
        (["--env", "A=b=c", "--env", "E=", "--", "x"], {"command": ["x"], "env": {"A": "b=c", "E": ""}}),
        (["--keep", "--ttl", "60", "--", "x"], {"command": ["x"], "keep": True, "ttl": 60.0}),
        (["--outputs", "a/*", "--outputs", "b", "--", "x"], {"command": ["x"], "outputs": ["a/*", "b"]}),
        (["--network", "web", "--session", "s", "--", "x"], {"command": ["x"], "network": "web", "session": "s"}),
        (["--dep", "python:requests", "--", "x"], {"command": ["x"], "dep": ["python:requests"]}),
        (["--output-limit", "1M", "--output-kill", "2M", "--", "x"],
         {"command": ["x"], "output_limit": "1M", "output_kill": "2M"}),
    ],
)  # fmt: skip
def test_words_become_fields_of_the_api(request_of: Any, arguments: list[str], document: dict[str, Any]) -> None:
    assert request_of("run", *arguments) == document


def test_file_goes_as_code_under_its_own_name(request_of: Any, tmp_path: Path) -> None:
    program = tmp_path / "工具.py"
    program.write_bytes("print('你好')\n".encode() + b"# \xff\n")
    document = request_of("run", str(program), "-v", "--", "x")
    assert document["code_path"] == "工具.py"
    assert document["code"].encode("utf-8", "surrogateescape") == program.read_bytes()
    assert document["args"] == ["-v", "--", "x"]
    assert "language" not in document


@pytest.mark.parametrize(
    ("written", "chars"), [(["--agent-view"], 8000), (["--agent-view", "300"], 300), (["--agent-view=500"], 500)]
)
def test_agent_view_takes_the_next_word_only_if_it_is_a_number(
    corral: Call, transport: FakeTransport, tmp_path: Path, written: list[str], chars: int
) -> None:
    program = tmp_path / "p.py"
    program.touch()
    transport.document = {
        "id": "run_x",
        "state": "finished",
        "agent_view": "seen",
        "result": {"reason": "ok", "exit_code": 0},
    }
    called = corral("run", *written, str(program))
    assert called.out == b"seen"
    assert transport.calls[-1][3] == {"wait": 30, "view": "agent", "chars": chars}


def test_exec_takes_options_on_both_sides_of_the_id(request_of: Any, transport: FakeTransport) -> None:
    document = request_of("exec", "--timeout", "3", "sbx_1", "--cwd", "/tmp", "--", "ls", "-l")
    assert document == {"argv": ["ls", "-l"], "timeout": 3.0, "cwd": "/tmp"}
    assert transport.calls[0][:2] == ("POST", "/v1/sandboxes/sbx_1/execs")


def test_files_go_with_their_modes_and_directories_whole(request_of: Any, tmp_path: Path) -> None:
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "a.bin").write_bytes(b"\0\xff")
    (tmp_path / "d" / "run.sh").write_text("x")
    (tmp_path / "d" / "run.sh").chmod(0o755)
    source = str(tmp_path / "d")
    document = request_of(
        "run", "--file", source, "--file", f"{source}/run.sh:bin/go", "--file", f"{source}/run.sh:in/", "--", "x"
    )
    files = {f["path"]: (f["mode"], base64.b64decode(f["base64"])) for f in document["files"]}
    assert files == {
        "d/e/a.bin": ("0644", b"\0\xff"),
        "d/run.sh": ("0755", b"x"),
        "bin/go": ("0755", b"x"),
        "in/run.sh": ("0755", b"x"),
    }


def test_the_last_colon_splits_source_and_destination(request_of: Any, tmp_path: Path) -> None:
    odd = tmp_path / "a:b"
    odd.write_text("x")
    assert request_of("run", "--file", f"{odd}:c", "--", "x")["files"][0]["path"] == "c"


def test_the_last_colon_splits_also_when_a_file_has_the_whole_name(
    corral: Call, request_of: Any, tmp_path: Path
) -> None:
    (tmp_path / "a:b").write_text("x")
    said = corral("run", "--file", f"{tmp_path}/a:b", "--", "x")
    assert said.status == 2 and f"write '{tmp_path}/a:b:'" in said.err
    assert request_of("run", "--file", f"{tmp_path}/a:b:", "--", "x")["files"][0]["path"] == "a:b"
    (tmp_path / "a").write_text("y")
    assert corral("run", "--file", f"{tmp_path}/a:b", "--", "x").status == 0


def paths_of(document: dict[str, Any]) -> dict[str, bytes]:
    return {f["path"]: base64.b64decode(f["base64"]) for f in document["files"]}


def test_links_that_stay_inside_a_directory_are_sent_as_what_they_point_to(request_of: Any, tmp_path: Path) -> None:
    tree = tmp_path / "t"
    (tree / "d").mkdir(parents=True)
    (tree / "d" / "f").write_text("x")
    (tree / "l").symlink_to("d/f")
    (tree / "absolute").symlink_to(tree / "d" / "f")
    (tree / "m").symlink_to("d")
    (tmp_path / "link").symlink_to("t")
    expected = {name: b"x" for name in ("link/d/f", "link/l", "link/absolute", "link/m/f")}
    assert paths_of(request_of("run", "--file", str(tmp_path / "link"), "--", "x")) == expected


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "..", "missing", ".", "d/..", "../t2/f"])
def test_links_that_lead_out_of_a_directory_or_round_are_refused(
    corral: Call, transport: FakeTransport, tmp_path: Path, target: str
) -> None:
    (tmp_path / "t" / "d").mkdir(parents=True)
    (tmp_path / "t2").mkdir()
    (tmp_path / "t2" / "f").touch()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "t" / "d" / "evil").symlink_to(os.path.join("..", target) if target[0] != "/" else target)
    said = corral("run", "--file", str(tmp_path / "t"), "--", "x")
    assert said.status == 2
    assert f"the link '{tmp_path}/t/d/evil' leads" in said.err and "corral cp" in said.err
    assert transport.calls == []


@pytest.mark.parametrize("place", ["file", "inside", "FILE"])
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_no_regular_file_is_refused_at_once(corral: Call, tmp_path: Path, kind: str, place: str) -> None:
    odd = tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        os.mknod(odd, stat.S_IFSOCK | 0o600)
    words = {
        "file": ["--file", str(odd), "--", "x"],
        "inside": ["--file", str(tmp_path), "--", "x"],
        "FILE": [str(odd)],
    }
    said = corral("run", *words[place])
    assert said.status == 2
    assert f"cannot read '{odd}': it is a {kind}, not a regular file" in said.err


def test_directories_go_with_their_modes_the_empty_ones_too(request_of: Any, tmp_path: Path) -> None:
    for name, mode in (("t", 0o755), ("t/空", 0o755), ("t/shut", 0o700), ("t/open", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "t/shut/f").touch(0o640)
    (tmp_path / "t/open/f").touch()
    files = request_of("run", "--file", f"{tmp_path}/t", "--", "x")["files"]
    assert [(f["path"], f.get("type"), f["mode"]) for f in files if f["path"] != "t/open/f"] == [
        ("t/shut", "dir", "0700"),
        ("t/shut/f", None, "0640"),
        ("t/空", "dir", "0755"),
    ]


def test_the_mode_of_the_workspace_is_not_the_callers(request_of: Any, tmp_path: Path) -> None:
    (tmp_path / "t" / "空").mkdir(parents=True)
    (tmp_path / "t").chmod(0o700)
    files = request_of("run", "--file", f"{tmp_path}/t:.", "--", "x")["files"]
    assert [f["path"] for f in files] == ["空"]


def test_file_and_a_file_of_the_same_destination_exclude_each_other(
    corral: Call, transport: FakeTransport, tmp_path: Path
) -> None:
    (tmp_path / "p.py").touch()
    (tmp_path / "q").touch()
    for dest in ("p.py", "./p.py", "/workspace/p.py"):
        said = corral("run", "--file", f"{tmp_path}/q:{dest}", f"{tmp_path}/p.py")
        assert said.status == 2 and "would replace FILE" in said.err
    assert transport.calls == []
    assert corral("run", "--file", f"{tmp_path}/q:r", f"{tmp_path}/p.py").status == 0


def test_a_directory_that_holds_file_at_its_place_goes_along(
    request_of: Any, corral: Call, transport: FakeTransport, tmp_path: Path
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.go").write_bytes(b"package main // \xff")
    (tmp_path / "app" / "util.go").write_text("package main")
    sent = request_of("run", "--file", f"{tmp_path}/app:.", f"{tmp_path}/app/main.go")
    assert (sent["code_path"], [f["path"] for f in sent["files"]]) == ("main.go", ["util.go"])
    (tmp_path / "main.go").write_text("another")
    calls = len(transport.calls)
    said = corral("run", "--file", f"{tmp_path}/app:.", f"{tmp_path}/main.go")
    assert said.status == 2 and "would replace FILE" in said.err and len(transport.calls) == calls


def test_workspace_prefix_of_a_destination_is_taken_off(request_of: Any, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    document = request_of("run", "--file", f"{tmp_path}/f:/workspace/g", "--file", f"{tmp_path}:/workspace", "--", "x")
    assert [f["path"] for f in document["files"]] == ["g", "f"]


def test_stdin_is_sent_as_bytes(request_of: Any, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\xff\n")
    document = request_of("run", "--stdin", str(tmp_path / "in"), "--", "cat")
    assert base64.b64decode(document["stdin_base64"]) == b"\xff\n"


BAD = [
    (["run"], "usage", 2),
    (["run", "--bogus", "x"], "usage", 2),
    (["run", "--timeout"], "usage", 2),
    (["run", "-c"], "usage", 2),
    (["run", "-c", "x", "--shell", "y"], "usage", 2),
    (["run", "--shell", "y", "arg"], "usage", 2),
    (["run", "--language", "python", "--", "x"], "usage", 2),
    (["run", "/no/such/file.py"], "usage", 2),
    (["run", "/"], "usage", 2),
    (["run", "a\0b"], "usage", 2),
    (["run", "--env", "A", "--", "x"], "usage", 2),
    (["run", "--env", "=b", "--", "x"], "usage", 2),
    (["run", "--env", "A\nB=1", "--", "x"], "usage", 2),
    (["run", "--env", "A\x1b=1", "--", "x"], "usage", 2),
    (["run", "--env", "A B=1", "--", "x"], "usage", 2),
    (["run", "--file", "/no/such", "--", "x"], "usage", 2),
    (["run", "--file", ":d", "--", "x"], "usage", 2),
    (["run", "--file", "", "--", "x"], "usage", 2),
    (["run", "--file", "/dev/null", "--", "x"], "usage", 2),
    (["run", "--stdin", "/no/such", "--", "x"], "usage", 2),
    (["run", "--agent-view=many", "--", "x"], "usage", 2),
    (["run", "--agent-view=199", "--", "x"], "usage", 2),
    (["run", "--agent-view", "1000001", "--", "x"], "usage", 2),
    (["run", "--outputs", "--keep", "--", "x"], "usage", 2),
    (["run", "--timeout", "soon", "--", "x"], "invalid_value", 125),
    (["run", "--timeout", "-1", "--", "x"], "invalid_value", 125),
    (["run", "--timeout", "nan", "--", "x"], "invalid_value", 125),
    (["run", "--timeout", "1e3", "--", "x"], "invalid_value", 125),
    (["run", "--cpu", "all", "--", "x"], "invalid_value", 125),
    (["run", "--pids", "1.5", "--", "x"], "invalid_value", 125),
    (["exec"], "usage", 2),
    (["exec", "sbx_1"], "usage", 2),
    (["exec", "sbx_1", "--memory", "1G", "--", "x"], "usage", 2),
    (["cp", "a"], "usage", 2),
    (["cp", "a", "b"], "usage", 2),
    (["cp", "sbx_1:a", "sbx_2:b"], "usage", 2),
    (["cp", "a", "sbx_1:"], "usage", 2),
    (["cp", "/no/such", "sbx_1:a"], "usage", 2),
    (["runs", "burn"], "usage", 2),
    (["runs", ""], "usage", 2),
    (["runs", "show", ""], "usage", 2),
    (["exec", "", "--", "x"], "usage", 2),
    (["sandbox", "inspect", ""], "usage", 2),
    (["sandbox", "inspect", " "], "usage", 2),
    (["sandbox", "rm", "sbx_1", ""], "usage", 2),
    (["logs", ""], "usage", 2),
    (["cancel", ""], "usage", 2),
    (["cp", "", "sbx_1:a"], "usage", 2),
    (["cp", "sbx_1:a", ""], "usage", 2),
    (["sandbox", "rm"], "usage", 2),
    (["sandbox", "burn"], "usage", 2),
    (["logs", "run_1", "--stream", "stdlog"], "usage", 2),
    (["frobnicate"], "usage", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "status"), BAD, ids=[" ".join(a).replace("\0", "NUL") or "nothing" for a, _, _ in BAD]
)
def test_bad_words_are_refused_in_both_forms(
    corral: Call, transport: FakeTransport, arguments: list[str], code: str, status: int
) -> None:
    said = corral(*arguments)
    assert (said.status, said.out) == (status, b"")
    assert said.err.startswith(f"corral: {code}: ") and said.err.count("\n") == 1
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    told = corral(*arguments[:1], "--json", *arguments[1:cut], *arguments[cut:])
    assert (told.status, told.err) == (status, "")
    assert told.json["error"]["code"] == code
    assert told.json["error"]["hint"]
    assert not [call for call in transport.calls if call[0] in ("POST", "PUT")]


def test_input_over_the_body_limit_is_refused_before_it_is_sent(
    corral: Call, transport: FakeTransport, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        os.truncate(file.fileno(), 25 * 1024 * 1024)
    for arguments in (["--file", str(big)], ["--stdin", str(big)]):
        said = corral("run", *arguments, "--", "x")
        assert said.status == 125
        assert "corral: too_large: " in said.err and "corral cp" in said.err
    assert not transport.calls


def test_code_may_look_like_an_option(request_of: Any) -> None:
    assert request_of("run", "-c", "--json")["code"] == "--json"


def test_a_directory_as_file_is_told_how_to_go_along(corral: Call, tmp_path: Path) -> None:
    said = corral("run", str(tmp_path))
    assert said.status == 2 and f"--file {tmp_path} sends the directory along" in said.err
