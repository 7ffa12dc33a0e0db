"""The commands beside run and exec."""

from __future__ import annotations

import io
import os
import socket
import stat
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.client import connect
from corral.client.line import PATIENCE_S
from corral.client.transport import LineTransport
from corral.errors import CorralError

from .conftest import RUN, SANDBOX, Call, FakeTransport, refusal

SBX = {"id": SANDBOX, "state": "idle", "runtime": "crun", "template": "host"}


def archive(*members: tuple[str, Any]) -> bytes:
    """A tar: bytes = file, None = directory, str = link, or a TarInfo."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if content is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            elif isinstance(content, bytes):
                info.size, info.mode = len(content), 0o640
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def sliced(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 700):
        yield data[start : start + 700]


def test_create_prints_the_id_and_a_newline(corral: Call, transport: FakeTransport) -> None:
    transport.document = SBX
    assert corral("sandbox", "create", "--memory", "1G").out == f"{SANDBOX}\n".encode()
    assert transport.calls[0][:3] == ("POST", "/v1/sandboxes", {"memory": "1G"})
    assert corral("sandbox", "create", "--json").json == SBX


def test_ls_reads_every_page(corral: Call, transport: FakeTransport) -> None:
    pages = iter([{"items": [SBX], "next": "n"}, {"items": [SBX], "next": None}])
    transport.document = lambda *_: next(pages)
    assert corral("sandbox", "ls", "--json").json == {"items": [SBX, SBX], "next": None}
    assert [call[3].get("after") for call in transport.calls] == [None, "n"]


RUNS = {"items": [{"id": RUN, "state": "finished"}], "next": None}


@pytest.mark.parametrize("words", [["runs"], ["runs", "ls"]], ids=" ".join)
def test_runs_are_listed_with_or_without_a_word_for_it(
    corral: Call, transport: FakeTransport, words: list[str]
) -> None:
    transport.document = RUNS
    assert corral(*words, "--json").json == RUNS
    assert RUN in corral(*words).out.decode()
    assert {call[1] for call in transport.calls} == {"/v1/runs"}


@pytest.mark.parametrize(
    "words",
    [["runs", RUN, "--json"], ["runs", "--json", RUN], ["runs", "show", RUN, "--json"], ["runs", "--agent-view", RUN, "--json"]],
    ids=" ".join,
)  # fmt: skip
def test_a_run_is_shown_by_its_id_alone(corral: Call, transport: FakeTransport, words: list[str]) -> None:
    assert corral(*words).json["id"] == RUN
    assert transport.calls[-1][:2] == ("GET", f"/v1/runs/{RUN}")
    assert transport.calls[-1][3] == ({"view": "agent", "chars": 8000} if "--agent-view" in words else {})


def test_a_run_that_never_existed_is_not_found_and_another_word_is_usage(
    corral: Call, transport: FakeTransport
) -> None:
    transport.document = refusal("not_found", "no run")
    said = corral("runs", "run_x", "--json")
    assert (said.status, said.json["error"]["code"]) == (125, "not_found")
    assert corral("runs", "lst", "--json").json["error"]["code"] == "usage"
    assert corral("runs", "lst").status == 2


@pytest.mark.parametrize("words", [[], ["sandbox"], ["template"]], ids=" ".join)
def test_a_group_alone_prints_its_help_to_stderr_and_is_2(corral: Call, words: list[str]) -> None:
    said = corral(*words)
    assert (said.status, said.out) == (2, b"")
    lines = said.err.splitlines()
    assert lines[0].startswith("corral: usage: no command given")
    assert lines[1].startswith(f"Usage: {' '.join(['corral', *words])}") and "Commands:" in lines


def test_help_of_runs_is_help(corral: Call, transport: FakeTransport) -> None:
    said = corral("runs", "--help")
    assert said.status == 0 and said.out.startswith(b"Usage: corral runs") and transport.calls == []


def test_ls_prints_plain_columns_when_it_is_no_terminal(corral: Call, transport: FakeTransport) -> None:
    transport.document = {"items": [SBX | {"state": "id\x1b[0m"}], "next": None}
    lines = corral("sandbox", "ls").out.decode().splitlines()
    assert lines[0].split()[:3] == ["ID", "STATE", "RUNTIME"]
    assert lines[1].split()[:3] == [SANDBOX, "id\\x1b[0m", "crun"]


def test_rm_goes_on_after_a_refusal_and_reports_it(corral: Call, transport: FakeTransport) -> None:
    gone = SBX | {"state": "terminated"}
    transport.document = lambda method, path: refusal("not_found", "no sandbox") if "bad" in path else gone
    assert corral("sandbox", "rm", SANDBOX).status == 0
    said = corral("sandbox", "rm", "sbx_bad", SANDBOX)
    assert (said.status, said.err) == (125, "corral: not_found: no sandbox\n")
    assert [call[1] for call in transport.calls][-1].endswith(SANDBOX)
    assert corral("sandbox", "rm", "--json", "sbx_bad").json["error"]["code"] == "not_found"


def test_logs_of_one_stream_are_raw(corral: Call, transport: FakeTransport) -> None:
    transport.blocks = [b"\xff\0", b"end"]
    said = corral("logs", RUN, "--stream", "stderr")
    assert (said.out, said.err) == (b"\xff\0end", "")
    assert transport.calls[0][1:] == (f"/v1/runs/{RUN}/logs", None, {"stream": "stderr", "follow": False})
    assert corral("logs", "exe_1", "--stream", "stdout", "--json").json == {
        "id": "exe_1",
        "stdout": {"bytes": 5, "text": "\ufffd\0end", "base64": "/wBlbmQ="},
    }


@pytest.mark.parametrize(("default", "status"), [("crun", 0), (None, 1)])
def test_doctor_fails_without_a_default(
    corral: Call, transport: FakeTransport, default: str | None, status: int
) -> None:
    runtimes = [
        {
            "name": "crun",
            "usable": True,
            "reason": None,
            "security_level": 1,
            "version": "1",
            "limits": {"cpu": "enforced"},
            "capabilities": {"pause": True, "memory_snapshot": True, "resize": False},
        }
    ]
    transport.document = {
        "runtimes": runtimes,
        "default": default,
        "host": {"cgroup": "v2", "user": "root"},
        "leftovers": [],
    }
    said = corral("doctor")
    assert said.status == status
    assert [line.split() for line in said.out.decode().splitlines()[-2:]] == [
        ["CAN", "CAPABILITIES"],
        ["crun", "memory_snapshot", "pause"],
    ]
    told = corral("doctor", "--json")
    assert (told.status, told.json["default"]) == (status, default)


def test_gc_fails_when_something_could_not_be_removed(corral: Call, transport: FakeTransport) -> None:
    transport.document = {"removed": {"mount": 2, "failed": 0}, "sandboxes": 0, "leftovers": []}
    assert corral("gc").out.decode().splitlines()[1].split() == ["mount", "2"]
    left = {"kind": "loop", "id": "/dev/loop9", "instance_id": "ins_1"}
    transport.document = {"removed": {"mount": 0, "failed": 1}, "sandboxes": 0, "leftovers": [left]}
    said = corral("gc")
    assert (said.status, said.out) == (125, b"")
    assert "left: loop /dev/loop9" in said.err and "1 could not be removed" in said.err


def test_upload_is_a_tar_of_what_is_there(corral: Call, transport: FakeTransport, tmp_path: Path) -> None:
    source = tmp_path / "源"
    (source / "empty").mkdir(parents=True)
    (source / "run.sh").write_bytes(b"\xff" * 1000)
    (source / "run.sh").chmod(0o750)
    (source / "link").symlink_to("/etc/passwd")
    transport.blocks = refusal("not_found", "no such path")
    assert corral("cp", str(source), f"{SANDBOX}:new").status == 0
    assert transport.calls[-1][1:] == (
        f"/v1/sandboxes/{SANDBOX}/files/archive",
        None,
        {"path": "/workspace", "user": None},
    )
    with tarfile.open(fileobj=io.BytesIO(transport.uploads[0])) as tar:
        assert {m.name: (m.type, m.mode, m.linkname) for m in tar} == {
            "new": (tarfile.DIRTYPE, stat.S_IMODE(source.stat().st_mode), ""),
            "new/empty": (tarfile.DIRTYPE, stat.S_IMODE(source.stat().st_mode), ""),
            "new/link": (tarfile.SYMTYPE, 0o777, "/etc/passwd"),
            "new/run.sh": (tarfile.REGTYPE, 0o750, ""),
        }
        content = tar.extractfile("new/run.sh")
        assert content is not None and content.read() == b"\xff" * 1000


def test_an_upload_holds_no_empty_block_whatever_the_sizes(
    corral: Call, transport: FakeTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "y"
    source.mkdir()
    sizes = {"a": 2, "b": 0, "c": 512, "d": 1024, "e": 1}
    for name, size in sizes.items():
        (source / name).write_bytes(b"x" * size)
    blocks: list[bytes] = []

    def upload(path: str, chunks: Iterable[bytes], *_: Any) -> dict[str, Any]:
        blocks.extend(chunks)
        return {}

    monkeypatch.setattr(transport, "upload", upload)
    transport.blocks = refusal("not_found", "no such path")
    assert corral("cp", str(source), f"{SANDBOX}:y").status == 0
    assert all(blocks)
    with tarfile.open(fileobj=io.BytesIO(b"".join(blocks))) as tar:
        assert {m.name: m.size for m in tar if m.isfile()} == {f"y/{name}": size for name, size in sizes.items()}


def test_empty_chunks_of_an_upload_do_not_reach_what_sends_it() -> None:
    sent = []

    class Wire:
        async def send(self, data: bytes) -> None:
            sent.append(data)

        async def receive(self) -> bytes:
            return b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

        def waiting(self) -> bool:
            return False

        def close(self) -> None:
            pass

    transport = connect(url="http://127.0.0.1:1")
    assert isinstance(transport, LineTransport)

    async def wire(address: Any) -> Any:
        return Wire()

    transport.line.effects.connect = wire  # type: ignore[method-assign]
    assert transport.upload("/x", [b"a", b"", b"c", b""]) == {}
    assert sent[1:] == [b"1\r\na\r\n", b"1\r\nc\r\n", b"0\r\n\r\n"]


def test_a_url_where_nothing_listens_is_told_soon() -> None:
    with socket.socket() as taken:  # bound, not listening: refuses
        taken.bind(("127.0.0.1", 0))
        remote = connect(url=f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}/x")
        assert isinstance(remote, LineTransport)
        began = time.monotonic()
        with pytest.raises(CorralError) as refused:
            remote.request("GET", "/v1/runs")
    assert time.monotonic() - began < 15
    assert refused.value.code == "node_unavailable"
    assert refused.value.hint is not None and "127.0.0.1" in refused.value.hint and "secret" not in refused.value.hint
    assert remote.line.endpoint.patience_s < 10 < PATIENCE_S


def test_upload_into_a_directory_that_is_there_keeps_the_name(
    corral: Call, transport: FakeTransport, tmp_path: Path
) -> None:
    (tmp_path / "f").write_text("x")
    transport.blocks = lambda _: sliced(archive(("d", None)))
    assert corral("cp", f"{tmp_path}/f", f"{SANDBOX}:/tmp/d").status == 0
    assert transport.calls[-1][3]["path"] == "/tmp/d"
    transport.blocks = lambda _: sliced(archive(("d", b"a file")))
    assert corral("cp", f"{tmp_path}/f", f"{SANDBOX}:/tmp/d").status == 0
    assert transport.calls[-1][3]["path"] == "/tmp"
    with tarfile.open(fileobj=io.BytesIO(transport.uploads[-1])) as tar:
        assert tar.getnames() == ["d"]


def test_download_makes_files_directories_and_links(corral: Call, transport: FakeTransport, tmp_path: Path) -> None:
    name = "很" * 60
    tree = archive(
        ("out", None), ("out/a", b"A" * 5000), ("out/l", "/etc/passwd"), (f"out/{name}", b""), ("out/d", None)
    )
    transport.blocks = lambda _: sliced(tree)
    assert corral("cp", f"{SANDBOX}:out", str(tmp_path / "copy")).status == 0
    assert (tmp_path / "copy" / "a").read_bytes() == b"A" * 5000
    assert stat.S_IMODE((tmp_path / "copy" / "a").stat().st_mode) == 0o640
    assert os.readlink(tmp_path / "copy" / "l") == "/etc/passwd"
    assert (tmp_path / "copy" / name).is_file() and (tmp_path / "copy" / "d").is_dir()
    told = corral("cp", "--json", f"{SANDBOX}:out", str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "out" / "a").exists(), "a directory that is there receives the tree under its name"
    assert told.json["files"] == 2 and told.json["bytes"] == 5000


def test_download_of_a_file_replaces_a_link_instead_of_following_it(
    corral: Call, transport: FakeTransport, tmp_path: Path
) -> None:
    (tmp_path / "canary").write_text("safe")
    (tmp_path / "f").symlink_to(tmp_path / "canary")
    transport.blocks = lambda _: sliced(archive(("f", b"new")))
    assert corral("cp", f"{SANDBOX}:f", str(tmp_path / "f")).status == 0
    assert (tmp_path / "canary").read_text() == "safe"
    assert (tmp_path / "f").read_text() == "new" and not (tmp_path / "f").is_symlink()


def device() -> tarfile.TarInfo:
    info = tarfile.TarInfo("r/dev")
    info.type, info.devmajor, info.devminor = tarfile.CHRTYPE, 1, 3
    return info


def hard_link(target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo("r/hard")
    info.type, info.linkname = tarfile.LNKTYPE, target
    return info


EVIL = {
    "parent": [("r", None), ("r/../../evil", b"x")],
    "absolute": [("/evil", b"x")],
    "other root": [("r", None), ("evil", b"x")],
    "through a link": [("r", None), ("r/l", "../.."), ("r/l/evil", b"x")],
    "link over the root": [("r", "../.."), ("r/evil", b"x")],
    "device": [("r", None), ("r/dev", device())],
    "hard link out": [("r", None), ("r/hard", hard_link("r/../../secret"))],
    "hard link through a link": [("r", None), ("r/l", "../.."), ("r/hard", hard_link("r/l/secret"))],
}


@pytest.mark.parametrize("kind", EVIL)
def test_a_hostile_archive_writes_and_reads_nothing_outside(
    corral: Call, transport: FakeTransport, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "secret").write_text("secret")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    transport.blocks = lambda _: sliced(archive(*EVIL[kind]))
    said = corral("cp", f"{SANDBOX}:r", str(inner / "copy"))
    assert said.status in (2, 125) and said.err.startswith("corral: ")
    assert not list(tmp_path.rglob("evil"))
    assert [p for p in inner.rglob("*") if p.is_file() and not p.is_symlink() and p.read_text() == "secret"] == []


def test_a_tar_stream_goes_through_as_it_is(
    corral: Call, transport: FakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = archive(("d", None), ("d/f", b"x"))
    transport.blocks = lambda _: sliced(data)
    assert corral("cp", f"{SANDBOX}:d", "-").out == data
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    saved = os.dup(0)
    os.dup2(read, 0)
    try:
        assert corral("cp", "-", f"{SANDBOX}:d").status == 0
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(read)
    assert transport.uploads == [data]
    assert transport.calls[-1][3]["path"] == "/workspace/d"


def test_cancel_of_what_has_ended_is_no_error(corral: Call, transport: FakeTransport) -> None:
    said = corral("cancel", RUN)
    assert (said.status, said.out, said.err) == (0, b"", "")
    assert transport.calls[0][:2] == ("POST", f"/v1/runs/{RUN}/cancel")


@pytest.mark.parametrize(
    ("words", "path", "field"),
    [
        (["logs", RUN, "--stream"], "corral logs", None),
        (["run", "-c"], "corral run", None),
        (["run", "--timeout", "-c", "print(1)"], "corral run", None),
        (["sandbox", "rm"], "corral sandbox rm", "ID..."),
        (["exec"], "corral exec", "ID"),
        (["runs", "show"], "corral runs show", "ID"),
        (["sandbox", "create", "--memory"], "corral sandbox create", None),
    ],
)
def test_wrong_usage_names_the_words_as_they_are_written_and_the_help_to_read(
    corral: Call, transport: FakeTransport, words: list[str], path: str, field: str | None
) -> None:
    error = corral(*words, "--json").json["error"] if words[-1] not in ("--stream", "-c", "--memory") else None
    said = corral(*words)
    assert said.status == 2 and f"(see {path} --help)" in said.err and "argument" in said.err
    if error is not None:
        assert error.get("field") == field
    assert transport.calls == []


def test_templates_are_listed(corral: Call, transport: FakeTransport) -> None:
    page = {"items": [{"name": "host", "languages": ["c", "python"]}], "next": None}
    transport.document = lambda method, path: page if (method, path) == ("GET", "/v1/templates") else {}
    assert corral("template", "ls", "--json").json == page
    assert b"c python" in corral("template", "ls").out


def test_doctor_tells_the_disk_use_of_bases(corral: Call, transport: FakeTransport) -> None:
    bases = {"count": 3, "size_bytes": 3 << 30, "unused": 1, "unused_bytes": 1536}
    host = {"cgroup": "none", "user": "user"}
    transport.document = {"host": host, "runtimes": [], "default": None, "leftovers": [], "bases": bases}
    assert "bases: 3, 3.0 GiB, 1 of them (1.5 KiB) unused\n" in corral("doctor").out.decode()


def built(**more: Any) -> dict[str, Any]:
    known = {"name": "mine", "digest": "sha256:00", "allowed": True, "build": None}
    return known | more


def test_a_build_is_watched_to_its_end(corral: Call, transport: FakeTransport) -> None:
    building = built(digest=None, build={"state": "building", "text": "fetching", "part": 0.5, "error": None})
    answers = iter([building, building, built()])
    transport.document = lambda method, path: next(answers)
    told = corral("template", "build", "mine", "--refresh")
    assert (told.status, told.out) == (0, b"mine sha256:00\n")
    assert [call[:2] for call in transport.calls] == [
        ("POST", "/v1/templates"),
        *[("GET", "/v1/templates/mine")] * 2,
    ]


def test_a_build_that_failed_says_why_and_one_that_vanished_that_it_did(corral: Call, transport: FakeTransport) -> None:
    problem = CorralError("template_unavailable", "template mine: usr/x looks like a credential").to_problem()
    transport.document = lambda method, path: built(
        digest=None, build={"state": "failed", "text": "", "part": None, "error": problem}
    )
    told = corral("template", "build", "mine")
    assert told.status == 125
    assert "usr/x looks like a credential" in told.err
    transport.document = lambda method, path: built(digest=None)
    assert "interrupted" in corral("template", "build", "mine").err


@pytest.mark.parametrize(
    "words",
    [
        [], ["a", "--from-archive", "x"], ["--from-archive", "x"], ["--from-oci", "x"], ["a", "--name", "b"],
        ["a", "--platform", "linux/amd64"], ["./nothing.yaml"], ["--from-archive", "nothing.tar", "--name", "b"],
    ],
)  # fmt: skip
def test_a_build_of_nothing_or_of_two_things_is_wrong_usage(
    corral: Call, transport: FakeTransport, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CORRAL_URL", raising=False)
    assert corral("template", "build", *words).status == 2
    assert transport.calls == []


def test_a_server_takes_no_recipes(corral: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CORRAL_URL", "http://127.0.0.1:9")
    (tmp_path / "a.yaml").write_text("name: a\nkind: frozen\n")
    told = corral("template", "build", str(tmp_path / "a.yaml"))
    assert told.status == 2
    assert "a server takes no recipes" in told.err


def test_a_template_that_is_removed_says_what_it_freed(corral: Call, transport: FakeTransport) -> None:
    transport.document = lambda method, path: {"name": "mine", "digest": "sha256:0", "freed_bytes": 3 << 20}
    assert corral("template", "rm", "mine").out == b"mine: 3.0 MiB freed\n"
    transport.document = lambda method, path: {"name": "mine", "digest": None, "freed_bytes": 0}
    assert corral("template", "rm", "mine").out == b"mine: nothing was built\n"


def test_a_template_is_shown_with_its_packages(corral: Call, transport: FakeTransport) -> None:
    document = built(
        kind="oci", description="d", path="/b", reason=None, size_bytes=2048, files=3, built_at=0.0, build_s=1.5,
        languages=["c"], skills=[], sandboxes=["sbx_1"], packages={"gcc": "12"}, start=["/bin/x", "-a"],
        image={"user": "app", "env": ["A=1"], "left_out": {"device": 2, "mark": 1}},
    )  # fmt: skip
    transport.document = lambda method, path: document
    out = corral("template", "show", "mine").out.decode()
    for line in ("size: 2.0 KiB", "built at: 1970-01-01T00:00:00+00:00", "sandboxes: sbx_1", "image user: app", "gcc"):
        assert line in out
    assert "start: /bin/x -a\n" in out
    assert "left out: 2 devices 1 mark\n" in out
    assert corral("template", "show", "mine", "--json").json == document


def test_the_history_of_a_sandbox_is_a_table(corral: Call, transport: FakeTransport) -> None:
    event = {
        "event_id": 1,
        "event": "create",
        "old_state": None,
        "new_state": "requested",
        "at": "2026",
        "metadata": {"row": "1"},
    }
    transport.document = SBX | {"history": [event]}
    lines = corral("sandbox", "inspect", SANDBOX).out.decode().splitlines()
    assert lines[-2].split() == ["AT", "EVENT", "OLD_STATE", "NEW_STATE", "METADATA"]
    assert lines[-1].split() == ["2026", "create", "-", "requested", '{"row":', '"1"}']


def test_columns_stay_below_each_other_when_characters_are_wide(corral: Call, transport: FakeTransport) -> None:
    names = {"acme": "阿克美有限公司", "bolt": "Bolt", "caf": "cafe\u0301"}
    items = [{"id": key, "name": name, "state": "active"} for key, name in names.items()]
    transport.document = {"items": items, "next": None}
    _, *lines = corral("tenant", "ls").out.decode().splitlines()
    shown = [line[: line.index("active")] for line in lines]
    wide = [sum("\u4e00" <= char <= "\u9fff" for char in text) - text.count("\u0301") for text in shown]
    assert len({len(text) + more for text, more in zip(shown, wide, strict=True)}) == 1


def test_the_list_of_commands_is_not_cut_off(corral: Call) -> None:
    for group in ("tenant", "key", "lease", "db", "sandbox", "template", "runs", "bench"):
        assert b"..." not in corral(group, "--help").out.split(b"Commands:")[1], group


LEASE = {
    "sandbox_id": SANDBOX,
    "owner": "会话/1",
    "lease": "1.7",
    "state": "leased",
    "session": None,
    "expires_at": "2030-01-01T00:00:00.000Z",
}


def test_a_lease_is_acquired_kept_and_given_back(corral: Call, transport: FakeTransport) -> None:
    transport.document = LEASE
    done = corral(
        "lease", "acquire", SANDBOX, "--owner", "会话/1", "--ttl", "2.5", "--contention", "wait", "--wait", "5"
    )
    assert done.out == f"{SANDBOX} 1.7 2030-01-01T00:00:00.000Z\n".encode()
    wanted = {"owner": "会话/1", "ttl_s": 2.5, "contention": "wait", "wait_s": 5}
    assert transport.calls[0][:3] == ("POST", f"/v1/sandboxes/{SANDBOX}/attach", wanted)
    assert corral("lease", "renew", SANDBOX, "--lease", "1.7", "--json").json == LEASE
    assert transport.calls[1][:3] == ("POST", f"/v1/sandboxes/{SANDBOX}/renew", {})
    transport.document = SBX
    assert corral("lease", "release", SANDBOX, "--lease", "1.7", "--keep").out == f"{SANDBOX} idle\n".encode()
    assert transport.calls[2][:3] == ("POST", f"/v1/sandboxes/{SANDBOX}/release", {"keep": True})
    assert transport.headers[1:3] == [{"Corral-Lease": "1.7"}] * 2


def test_leases_are_listed(corral: Call, transport: FakeTransport) -> None:
    transport.document = {"items": [LEASE], "next": None}
    assert "会话/1" in corral("lease", "ls").out.decode()
    assert corral("lease", "ls", "--json").json == {"items": [LEASE], "next": None}
    transport.document = {"items": [], "next": None}
    assert "no leases" in corral("lease", "ls").err


def test_the_queue_is_listed_in_its_order(corral: Call, transport: FakeTransport) -> None:
    item = {"run_id": RUN, "position": 1, "priority": "high", "queued_at": "2026-12-01T10:00:00Z", "deadline_at": None}
    transport.document = queue = {"items": [item], "waiting": 3, "use": {}, "limits": {}, "weight": 1, "priorities": []}
    shown = corral("queue")
    assert shown.status == 0 and transport.calls[0] == ("GET", "/v1/queue", None, {"limit": "1000"})
    header, row = shown.out.decode().splitlines()
    assert header.lower().split() == ["position", "run", "priority", "waits_since", "until"]
    assert row.split()[:4] == ["1", RUN, "high", "2026-12-01T10:00:00Z"]
    assert "2 more" in shown.err, "the API lists no more at once"
    assert corral("queue", "--json").json == queue
    transport.document = {**queue, "items": [], "waiting": 0}
    empty = corral("queue")
    assert (empty.status, empty.out) == (0, b"") and "no run waits" in empty.err


def test_a_lost_lease_is_told_as_such(corral: Call, transport: FakeTransport) -> None:
    transport.document = refusal("lease_lost")
    done = corral("lease", "renew", SANDBOX, "--lease", "1.7")
    assert done.status == 125 and done.err.startswith("corral: lease_lost:")
