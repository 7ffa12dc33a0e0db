"""The file API from its routes down to the process inside: in process and over HTTP, on every runtime that is usable here."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import http.client
import io
import json
import os
import shutil
import socket
import tarfile
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest

from corral.api.routes import Request, dispatch
from corral.client.embedded import EmbeddedTransport, open_embedded

RUNTIMES = ["bubblewrap", *(["crun"] if os.geteuid() == 0 and shutil.which("crun") else [])]
RECIPE = (
    "name: host\nkind: frozen\ndescription: small\nprograms: [sh sleep cat ln mkdir mkfifo rm mv touch seq printf dd chmod]\n"
    "languages: {bash: sh}\n"
)
BINARY = bytes(range(256))


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


def query_of(query: dict[str, Any]) -> str:
    def one(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        return quote_from_bytes(value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape"))

    return "&".join(f"{name}={one(value)}" for name, value in query.items())


@dataclass
class Box:
    """One sandbox and a way to call its file API."""

    state: Path
    transport: EmbeddedTransport
    sandbox_id: str
    via: str

    @property
    def owner(self) -> Any:
        return self.transport.owner

    def connection(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("corral", timeout=120)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(120)
        sock.connect(str(self.state / "api.sock"))
        connection.sock = sock
        return connection

    def path(self, tail: str = "") -> str:
        return f"/v1/sandboxes/{self.sandbox_id}/files{tail}"

    def call(
        self,
        method: str,
        tail: str = "",
        body: bytes | Iterable[bytes] | None = None,
        headers: dict[str, str] | None = None,
        document: Any = None,
        **query: Any,
    ) -> Answer:
        if document is not None:
            body = json.dumps(document).encode()
            headers = {"Content-Type": "application/json", **(headers or {})}
        if self.via == "http":
            return self._http(method, tail, body, headers or {}, query)
        return self._dispatch(method, tail, body, headers or {}, query)

    def _http(
        self,
        method: str,
        tail: str,
        body: bytes | Iterable[bytes] | None,
        headers: dict[str, str],
        query: dict[str, Any],
    ) -> Answer:
        with contextlib.closing(self.connection()) as connection:
            target = self.path(tail) + "?" + query_of(query)
            chunked = body is not None and not isinstance(body, bytes)
            connection.request(method, target, body=body, headers=headers, encode_chunked=chunked)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def _dispatch(
        self,
        method: str,
        tail: str,
        body: bytes | Iterable[bytes] | None,
        headers: dict[str, str],
        query: dict[str, Any],
    ) -> Answer:
        from corral.api.asgi import _query

        async def blocks(source: Iterable[bytes]) -> AsyncIterator[bytes]:
            for block in source:
                yield block

        async def work() -> Answer:
            given = body if isinstance(body, bytes) else b"" if body is None else blocks(body)
            fields = {name.lower(): value for name, value in headers.items()}
            request = Request(method, self.path(tail), _query(query_of(query).encode()), fields, given)
            reply = await dispatch(self.owner._services, request)
            content = b""
            if reply.raw is not None:
                content = b"".join([block async for block in reply.raw])
            elif reply.document is not None:
                content = json.dumps(reply.document).encode()
            return Answer(reply.status, {n.lower(): v for n, v in reply.headers.items()}, content)

        answer: Answer = self.owner._call(work(), 120)
        return answer

    # -- what tests say often
    def put(self, path: str | bytes, body: bytes | Iterable[bytes], **more: Any) -> Answer:
        return self.call("PUT", body=body, path=path, **more)

    def get(self, path: str | bytes, part: str | None = None, **more: Any) -> Answer:
        return self.call("GET", headers={"Range": part} if part else None, path=path, **more)

    def stat(self, path: str | bytes, **more: Any) -> Answer:
        return self.call("GET", "/stat", path=path, **more)

    def listing(self, path: str | bytes, **more: Any) -> list[str]:
        answer = self.call("GET", "/list", path=path, **more)
        assert answer.status == 200, answer.body
        return [item["path"] for item in answer.document["items"]]

    def sh(self, script: str, **more: Any) -> dict[str, Any]:
        document = {"shell": script, "wait": 60, **more}
        done = self.transport.request("POST", f"/v1/sandboxes/{self.sandbox_id}/execs", document)
        result: dict[str, Any] = done["result"]
        return result


@pytest.fixture(scope="module")
def home() -> Iterator[tuple[Path, EmbeddedTransport]]:
    """A state directory with its owner in this process."""
    above = Path(tempfile.mkdtemp(prefix="corral-files-"))
    above.chmod(0o711)
    recipes = above / "templates"
    recipes.mkdir()
    (recipes / "host.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORRAL_TEMPLATES", str(recipes))
        patch.setenv("CORRAL_RUNTIMES", ",".join(RUNTIMES))
        patch.delenv("CORRAL_URL", raising=False)
        patch.setenv("CORRAL_STATE_DIR", str(above / "state"))
        transport = open_embedded(str(above / "state"))
        try:
            yield above / "state", transport
        finally:
            for item in transport.request("GET", "/v1/sandboxes")["items"]:
                transport.request("DELETE", f"/v1/sandboxes/{item['id']}")
            transport.request("POST", "/v1/gc")
            left = transport.request("GET", "/v1/doctor")["leftovers"]
            transport.close()
            shutil.rmtree(above, ignore_errors=True)
            assert left == []


@pytest.fixture(scope="module", params=RUNTIMES)
def sandbox(request: pytest.FixtureRequest, home: tuple[Path, EmbeddedTransport]) -> str:
    made = home[1].request("POST", "/v1/sandboxes", {"runtime": request.param, "disk": "256M", "memory": "256M"})
    return str(made["id"])


@pytest.fixture(params=["dispatch", "http"])
def box(request: pytest.FixtureRequest, home: tuple[Path, EmbeddedTransport], sandbox: str) -> Iterator[Box]:
    made = Box(home[0], home[1], sandbox, request.param)
    yield made
    made.sh("rm -rf /workspace/* /workspace/.[!.]* /workspace/..?* /tmp/*")


def test_a_file_that_is_written_is_read_back_byte_for_byte(box: Box) -> None:
    answer = box.put("a/b.bin", BINARY)
    assert answer.status == 201, answer.body
    entry = answer.document
    assert (entry["path"], entry["name"], entry["type"], entry["size"]) == ("/workspace/a/b.bin", "b.bin", "file", 256)
    assert (entry["mode"], entry["uid"]) == ("0644", 1000)
    got = box.get("/workspace/a/b.bin")
    assert (got.status, got.body) == (200, BINARY)
    assert got.headers["content-length"] == "256"
    assert got.headers["accept-ranges"] == "bytes"
    assert box.stat("a/b.bin").document == {key: value for key, value in entry.items()}
    assert box.put("a/b.bin", b"other").status == 200
    assert box.get("a/b.bin").body == b"other"


def test_parts_of_a_file_are_served_and_impossible_ones_refused(box: Box) -> None:
    box.put("f", BINARY)
    for part, content, where in (
        ("bytes=0-0", BINARY[:1], "bytes 0-0/256"),
        ("bytes=10-19", BINARY[10:20], "bytes 10-19/256"),
        ("bytes=250-", BINARY[250:], "bytes 250-255/256"),
        ("bytes=250-9999", BINARY[250:], "bytes 250-255/256"),
        ("bytes=-6", BINARY[-6:], "bytes 250-255/256"),
        ("bytes=-9999", BINARY, "bytes 0-255/256"),
    ):
        got = box.get("f", part)
        assert (got.status, got.body, got.headers["content-range"]) == (206, content, where), part
        assert got.headers["content-length"] == str(len(content))
    for part in ("bytes=256-", "bytes=-0", "bytes=999-1000", f"bytes={10**18}-", f"bytes={10**30}-{10**31}"):
        got = box.get("f", part)
        assert (got.status, got.document["code"]) == (416, "range_not_satisfiable"), part
        assert got.headers["content-range"] == "bytes */256"
    for part in ("lines=1-2", "bytes=5-1", "bytes=", "bytes=0-1,4-5"):
        assert (box.get("f", part).status, box.get("f", part).body) == (200, BINARY), part


def test_the_whole_of_an_empty_file_is_nothing_and_it_has_no_part(box: Box) -> None:
    assert box.put("empty", b"").status == 201
    got = box.get("empty")
    assert (got.status, got.body, got.headers["content-length"]) == (200, b"", "0")
    assert box.get("empty", "bytes=0-").status == 416


def test_an_etag_changes_with_the_file(box: Box) -> None:
    box.put("f", b"one")
    first = box.get("f").headers
    assert box.get("f").headers["etag"] == first["etag"] and "last-modified" in first
    box.put("f", b"two")
    assert box.get("f").headers["etag"] != first["etag"]


def test_a_part_of_a_file_that_was_replaced_meanwhile_is_not_served(box: Box) -> None:
    box.put("f", b"old old")
    old = box.get("f").headers
    wanted = {"Range": "bytes=4-", "If-Range": old["etag"]}
    assert (box.call("GET", headers=wanted, path="f").status, box.call("GET", headers=wanted, path="f").body) == (
        206,
        b"old",
    )
    box.put("f", b"new")
    for known in (old["etag"], old["last-modified"]):
        got = box.call("GET", headers={**wanted, "If-Range": known}, path="f")
        assert (got.status, got.body) == (200, b"new"), known


def test_a_part_is_not_taken_for_the_whole_file(box: Box) -> None:
    box.put("f", b"0123456789")
    answer = box.call("PUT", body=b"xyz", headers={"Content-Range": "bytes 2-4/10"}, path="f")
    assert (answer.status, answer.document["code"]) == (400, "bad_request")
    assert box.get("f").body == b"0123456789"


def test_head_tells_the_size_without_the_content(box: Box) -> None:
    box.put("f", BINARY)
    got = box.call("HEAD", path="f")
    assert (got.status, got.headers["content-length"], got.body) == (200, "256", b"")
    assert got.headers["etag"] == box.get("f").headers["etag"]
    assert box.call("HEAD", path="nope").status == 404
    assert box.call("HEAD", path="/workspace").status == 422


@pytest.mark.parametrize(
    ("method", "tail", "query", "status", "code"),
    [
        ("GET", "", {"path": "nope"}, 404, "not_found"),
        ("GET", "/stat", {"path": "file/x"}, 404, "not_found"),
        ("GET", "", {"path": "/workspace"}, 422, "is_a_directory"),
        ("GET", "", {"path": "pipe"}, 422, "not_a_file"),
        ("GET", "", {"path": "/dev/zero"}, 422, "not_a_file"),
        ("GET", "/list", {"path": "file"}, 422, "not_a_directory"),
        ("GET", "/list", {"path": "nope"}, 404, "not_found"),
        ("PUT", "", {"path": "full"}, 422, "is_a_directory"),
        ("PUT", "", {"path": "pipe"}, 422, "not_a_file"),
        ("PUT", "", {"path": "file/x"}, 422, "not_a_directory"),
        ("PUT", "", {"path": "new/x", "parents": False}, 404, "not_found"),
        ("PUT", "", {"path": "file", "overwrite": False}, 409, "already_exists"),
        ("PUT", "", {"path": "/usr/x"}, 403, "permission_denied"),
        ("PUT", "", {"path": "a/.."}, 422, "is_a_directory"),
        ("PUT", "", {"path": "n" * 300}, 422, "invalid_value"),
        ("DELETE", "", {"path": "nope"}, 404, "not_found"),
        ("DELETE", "", {"path": "full"}, 409, "not_empty"),
        ("DELETE", "", {"path": "/etc/hostname-that-is-not"}, 404, "not_found"),
        ("DELETE", "", {"path": "/workspace", "recursive": True}, 422, "invalid_value"),
        ("GET", "/stat", {"path": "loop"}, 422, "invalid_value"),
        ("GET", "/watch", {"path": "nope"}, 404, "not_found"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_path_and_nothing_changes(
    box: Box, method: str, tail: str, query: dict[str, Any], status: int, code: str
) -> None:
    box.sh("mkdir -p full a; echo x > full/x; echo keep > file; mkfifo pipe; ln -s loop loop")
    answer = box.call(method, tail, b"new content" if method == "PUT" else None, **query)
    assert (answer.status, answer.document["code"]) == (status, code), answer.body
    assert "entry" in answer.document and answer.document["detail"]
    assert box.get("file").body == b"keep\n"
    assert box.listing("/workspace") == [f"/workspace/{name}" for name in ("a", "file", "full", "loop", "pipe")]


@pytest.mark.parametrize("name", ["shut", "link"])
def test_a_file_that_its_user_may_not_write_is_not_replaced(box: Box, name: str) -> None:
    box.sh("echo keep > shut; chmod 444 shut; ln -s shut link")
    answer = box.put(name, b"new content")
    assert (answer.status, answer.document["code"], answer.document["entry"]) == (
        403,
        "permission_denied",
        f"/workspace/{name}",
    )
    assert box.get("shut").body == b"keep\n"
    assert box.listing("/workspace") == ["/workspace/link", "/workspace/shut"]


@pytest.mark.parametrize(
    ("method", "tail", "query", "field"),
    [
        ("GET", "", {}, "/path"),
        ("GET", "", {"path": ""}, "/path"),
        ("GET", "", {"path": b"a\0b"}, "/path"),
        ("GET", "", {"path": "a", "path_base64": "YQ=="}, "/path"),
        ("GET", "", {"path_base64": "*"}, "/path_base64"),
        ("GET", "/stat", {"path": "x" * 5000}, "/path"),
        ("PUT", "", {"path": "a", "mode": "999"}, "/mode"),
        ("PUT", "", {"path": "a", "mode": "4755"}, "/mode"),
        ("PUT", "", {"path": "a", "overwrite": "perhaps"}, "/overwrite"),
        ("GET", "/list", {"path": ".", "limit": 0}, "/limit"),
        ("GET", "/list", {"path": ".", "after": "%%%"}, "/after"),
    ],
)
def test_a_bad_value_is_refused_by_name(box: Box, method: str, tail: str, query: dict[str, Any], field: str) -> None:
    answer = box.call(method, tail, b"" if method == "PUT" else None, **query)
    assert (answer.status, answer.document["field"]) == (422, field), answer.body


def test_a_user_that_the_template_does_not_allow_is_refused(box: Box) -> None:
    answer = box.put("f", b"x", user="root")
    assert (answer.status, answer.document["code"]) == (403, "user_refused")


def test_bodies_of_move_and_mkdir_are_read_strictly(box: Box) -> None:
    for tail, document, field in (
        ("/move", {"from": "a"}, "/to"),
        ("/move", {"from": "a", "to": "b", "force": True}, "/force"),
        ("/move", {"from": "a", "to": "b", "overwrite": "yes"}, "/overwrite"),
        ("/mkdir", {"path": 7}, "/path"),
        ("/mkdir", {"path": "a", "mode": "0999"}, "/mode"),
        ("/mkdir", [], ""),
    ):
        answer = box.call("POST", tail, document=document)
        assert (answer.status, answer.document["field"]) == (422, field), answer.body


def test_modes_are_given_kept_or_the_usual_ones(box: Box) -> None:
    assert box.put("run", b"#!/bin/sh\necho ran\n", mode="0755").document["mode"] == "0755"
    assert box.put("run", b"#!/bin/sh\necho again\n").document["mode"] == "0755"
    assert box.sh("./run")["stdout"]["text"] == "again\n"
    assert box.put("plain", b"").document["mode"] == "0644"
    assert box.put("run", b"", mode="0600").document["mode"] == "0600"


def test_a_write_through_a_link_changes_the_file_that_it_names(box: Box) -> None:
    box.sh("mkdir real; echo old > real/f; ln -s real/f link; ln -s nowhere/yet dangling")
    assert box.put("link", b"new").status == 200
    assert box.stat("link", follow=False).document["target"] == "real/f"
    assert box.get("real/f").body == b"new"
    assert box.put("dangling", b"made").status == 201
    assert box.get("nowhere/yet").body == b"made"


def test_a_reader_sees_the_old_or_the_new_content_never_a_part(box: Box) -> None:
    box.put("f", b"a" * 300_000)
    old = box.stat("f").document
    seen: list[tuple[int, bytes]] = []

    def blocks() -> Iterator[bytes]:
        for _ in range(3):
            yield b"b" * 100_000
            seen.append((box.stat("f").document["size"], box.get("f", "bytes=0-9").body))
            assert box.listing("/workspace") == ["/workspace/f"]

    if box.via == "dispatch":
        pytest.skip("the body of a call in process comes from the loop that answers it")
    assert box.put("f", blocks()).status == 200
    assert seen == [(300_000, b"a" * 10)] * 3
    assert box.get("f").body == b"b" * 300_000
    assert box.stat("f").document["mtime"] > old["mtime"]


def test_a_broken_upload_leaves_the_old_file_and_nothing_else(box: Box) -> None:
    box.put("f", b"old")
    before = box.stat("f").document
    if box.via == "http":
        with contextlib.closing(box.connection()) as connection:
            connection.putrequest("PUT", box.path() + "?path=f")
            connection.putheader("Content-Length", "1000000")
            connection.endheaders()
            connection.send(b"x" * 200_000)
            until = time.monotonic() + 30
            while not inside(box) and time.monotonic() < until:
                time.sleep(0.01)
    else:

        def blocks() -> Iterator[bytes]:
            yield b"x" * 200_000
            raise RuntimeError("the source broke")

        assert box.put("f", blocks()).status == 500
    wait_for_none(box)
    assert box.stat("f").document == before
    assert box.listing("/workspace") == ["/workspace/f"]


def test_fewer_bytes_than_promised_change_nothing(box: Box) -> None:
    if box.via == "http":
        pytest.skip("the server itself refuses such a body")
    answer = box.call("PUT", body=b"short", headers={"Content-Length": "9"}, path="f")
    assert (answer.status, answer.document["code"]) == (400, "bad_request")
    assert box.listing("/workspace") == []


def test_a_full_disk_keeps_the_old_file(box: Box) -> None:
    if box.sh("true")["limits"]["disk"]["mode"] != "enforced":
        pytest.skip("the disk is watched here while programs run, not limited by the kernel")
    box.put("f", b"old")
    box.sh("dd if=/dev/zero of=/workspace/fill bs=1M count=200")
    block = os.urandom(1 << 20)
    answer = box.put("f", (block for _ in range(100)))
    assert (answer.status, answer.document["code"]) == (507, "disk_full"), answer.body
    assert box.get("f").body == b"old"
    assert box.listing("/workspace") == ["/workspace/f", "/workspace/fill"]
    assert box.put("g", b"there is room again").status == 201


def test_delete_removes_files_links_and_trees_but_follows_nothing(box: Box) -> None:
    box.sh("mkdir -p keep tree/a/b; echo x > keep/x; echo x > tree/a/b/c; ln -s ../keep tree/out; ln -s keep link")
    assert box.call("DELETE", path="link").status == 200
    assert box.call("DELETE", path="tree", recursive=True).document == {}
    assert box.get("keep/x").body == b"x\n"
    assert box.call("DELETE", path="keep/x").status == 200
    assert box.call("DELETE", path="keep").status == 200
    assert box.listing("/workspace") == []


def test_a_tree_deeper_than_any_path_is_removed(box: Box) -> None:
    grow = "i=0; while [ $i -lt 400 ]; do mkdir dddddddd && cd dddddddd || exit 1; i=$((i+1)); done; echo x > leaf"
    for name in ("deep", "deeper"):
        assert box.sh(f"mkdir {name}; cd {name}; {grow}")["exit_code"] == 0
    down = "i=0; cd deep; while [ $i -lt 400 ]; do cd dddddddd || exit 1; i=$((i+1)); done; mv /workspace/deeper ."
    assert box.sh(down)["exit_code"] == 0
    assert box.call("DELETE", path="deep", recursive=True).status == 200
    assert box.listing("/workspace") == []


def test_a_list_is_sorted_by_the_bytes_of_paths_and_comes_in_pages(box: Box) -> None:
    names = ["a", "a-b", "a/b", "a/b.c", "a/b/d", "a0", "z", "ä", "你/好"]
    for name in names:
        if name in ("a", "a/b"):
            box.call("POST", "/mkdir", document={"path": name})
        else:
            box.put(name, b"")
    whole = sorted([*names, "你"], key=lambda name: name.encode())
    assert box.listing(".", recursive=True) == [f"/workspace/{name}" for name in whole]
    got, after = [], {}
    while True:
        page = box.call("GET", "/list", path="/workspace", recursive=True, limit=2, **after).document
        assert len(page["items"]) <= 2
        got += [item["path"] for item in page["items"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert got == [f"/workspace/{name}" for name in whole]
    assert box.listing(".") == [f"/workspace/{name}" for name in ("a", "a-b", "a0", "z", "ä", "你")]


def test_a_large_directory_is_listed_whole(box: Box) -> None:
    box.sh("mkdir many; cd many; touch $(seq -f f%05.0f 1 5000)")
    got: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = box.call("GET", "/list", path="many", limit=1500, **after).document
        got += [item["name"] for item in page["items"]]
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert got == [f"f{number:05}" for number in range(1, 5001)]


def test_a_directory_that_may_not_be_read_is_named_in_a_list(box: Box) -> None:
    box.sh("mkdir open shut; echo x > open/x; echo x > shut/x; chmod 0 shut")
    items = box.call("GET", "/list", path=".", recursive=True).document["items"]
    assert [(item["name"], item.get("error")) for item in items] == [
        ("open", None),
        ("x", None),
        ("shut", "permission_denied"),
    ]
    box.sh("chmod 755 shut")


def test_names_of_any_bytes_go_both_ways(box: Box) -> None:
    raw = b"\xff\xfe\xe4\xbd"
    assert box.put(raw, b"1").status == 201
    (item,) = box.call("GET", "/list", path=".").document["items"]
    assert base64.b64decode(item["path_base64"]) == b"/workspace/" + raw
    assert item["path"].encode("utf-8", "surrogateescape") == b"/workspace/" + raw
    assert box.call("GET", path_base64=item["path_base64"]).body == b"1"
    moved = box.call("POST", "/move", document={"from": item["path"], "to_base64": base64.b64encode(b"\x80").decode()})
    assert base64.b64decode(moved.document["path_base64"]) == b"/workspace/\x80"
    for name in ("$(touch pwned)", "a b'\"`;\n", "你好", "..x", "%2e%2e", "-rf"):
        assert box.put(name, name.encode()).status == 201
        assert box.get(name).body == name.encode()
        assert box.stat(name).document["name"] == name
    assert box.stat("pwned").status == 404


def test_a_directory_whose_name_is_not_text_is_archived_both_ways(box: Box) -> None:
    raw = base64.b64encode(b"/workspace/d\xff").decode()
    assert box.put(b"d\xff/f", b"1").status == 201
    tar = box.call("GET", "/archive", path_base64=raw)
    with tarfile.open(fileobj=io.BytesIO(tar.body)) as archive:
        assert [os.fsencode(name) for name in archive.getnames()] == [b"d\xff", b"d\xff/f"]
    assert box.call("PUT", "/archive", body=tar.body, path_base64=raw).status == 200
    assert box.get(b"d\xff/d\xff/f").body == b"1"


def test_move_renames_replaces_on_demand_and_crosses_file_systems(box: Box) -> None:
    box.put("a", b"a", mode="0600")
    box.put("b", b"b")
    refused = box.call("POST", "/move", document={"from": "a", "to": "b"})
    assert (refused.status, refused.document["code"]) == (409, "already_exists")
    assert box.call("POST", "/move", document={"from": "a", "to": "b", "overwrite": True}).document["name"] == "b"
    assert (box.get("b").body, box.stat("a").status, box.stat("b").document["mode"]) == (b"a", 404, "0600")
    assert box.call("POST", "/move", document={"from": "nope", "to": "c"}).status == 404
    assert box.call("POST", "/move", document={"from": "b", "to": "no/where"}).status == 404
    box.put("tree/x/y", b"deep")
    box.sh("ln -s y tree/x/l")
    assert box.call("POST", "/move", document={"from": "tree", "to": "/tmp/tree"}).status == 200
    assert box.listing("/tmp/tree", recursive=True) == ["/tmp/tree/x", "/tmp/tree/x/l", "/tmp/tree/x/y"]
    assert box.call("POST", "/move", document={"from": "b", "to": "/tmp/b"}).document["mode"] == "0600"
    assert box.listing("/workspace") == []
    into = box.call("POST", "/move", document={"from": "/tmp/tree", "to": "/tmp/tree/x/inside"})
    assert into.status == 422


def test_a_move_that_is_asked_for_again_with_its_key_answers_the_same(box: Box) -> None:
    box.put("a", b"1")
    key = {"Idempotency-Key": f"k-{box.via}-{box.sandbox_id}"}
    first = box.call("POST", "/move", headers=key, document={"from": "a", "to": "b"})
    again = box.call("POST", "/move", headers=key, document={"from": "a", "to": "b"})
    assert (first.status, again.status) == (200, 200) and first.document == again.document
    other = box.call("POST", "/move", headers=key, document={"from": "b", "to": "c"})
    assert (other.status, other.document["code"]) == (409, "idempotency_conflict")
    assert box.listing(".") == ["/workspace/b"]


def test_mkdir_makes_parents_and_takes_an_existing_one(box: Box) -> None:
    made = box.call("POST", "/mkdir", document={"path": "p/q/r", "mode": "0700"}).document
    assert (made["type"], made["mode"], made["path"]) == ("dir", "0700", "/workspace/p/q/r")
    assert box.call("POST", "/mkdir", document={"path": "p/q/r"}).document["mode"] == "0700"
    assert box.call("POST", "/mkdir", document={"path": "s/t", "parents": False}).status == 404
    box.put("f", b"")
    answer = box.call("POST", "/mkdir", document={"path": "f"})
    assert (answer.status, answer.document["code"]) == (409, "already_exists")


def test_what_callers_write_is_no_work_of_the_next_program(box: Box) -> None:
    box.put("given", b"1")
    result = box.sh("echo 2 > own")
    assert [item["path"] for item in result["files"]] == ["/workspace/own"]
    box.put("given", b"changed")
    box.call("DELETE", path="own")
    assert box.sh("true")["files"] == []


def test_a_file_of_the_kernel_is_read_as_long_as_it_is(box: Box) -> None:
    got = box.get("/proc/self/status")
    assert got.status == 200 and got.body.startswith(b"Name:")
    assert got.headers["content-length"] == str(len(got.body))


# -- what is left inside -------------------------------------------------------------------------------------------------------
def inside(box: Box) -> list[str]:
    """File programs that run in the sandboxes of this test's service, as the host sees them."""

    async def pids() -> list[int]:
        bodies = list(box.owner._node._bodies.values())
        return [pid for body in bodies for pid in await body.runtime.processes(body.ref)]

    found = []
    for pid in box.owner._call(pids(), 30):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"guest/files.pyc") for word in words):
                found.append(f"{pid} {words[-4:]}")
    return found


def wait_for_none(box: Box) -> None:
    until = time.monotonic() + 30
    while left := inside(box):
        assert time.monotonic() < until, left
        time.sleep(0.02)


# -- links and other ways out --------------------------------------------------------------------------------------------------
def test_links_and_dots_lead_nowhere_outside(box: Box, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("of the host")
    box.sh(f"ln -s {canary} s; ln -s / d; ln -s ../../../../.. up; ln -s /etc/passwd pw")
    for path in ("s", f"d{canary}", f"up{canary}", f"../../../..{canary}", str(canary), f"up/../../{canary}"):
        assert box.get(path).status == 404, path
        answer = box.put(path, b"changed", parents=False)
        assert answer.status in (403, 404), (path, answer.body)
        assert box.call("DELETE", path=f"{path}x").status == 404
    assert canary.read_text() == "of the host"
    assert b"of the host" not in box.get("pw").body
    assert box.put("pw", b"x").status == 403
    for item in box.call("GET", "/list", path=".", recursive=True).document["items"]:
        assert item["type"] == "symlink"


def test_a_path_that_is_swapped_for_a_link_meanwhile_never_shows_the_host(box: Box, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("of the host")
    swap = f"mkdir -p real; while :; do mkdir t && rm -rf t; ln -s {tmp_path} t && rm -f t; done"
    started = box.transport.request(
        "POST", f"/v1/sandboxes/{box.sandbox_id}/execs", {"shell": swap, "wait": 0, "timeout": 120}
    )
    try:
        for number in range(25):
            answer = box.put(f"t/f{number}", b"x")
            assert answer.status in (201, 403, 404, 409, 422), answer.body
            assert box.get("t/canary").status in (403, 404, 422)
    finally:
        box.transport.request("POST", f"/v1/execs/{started['id']}/cancel", {})
    assert sorted(os.listdir(tmp_path)) == ["canary"] and canary.read_text() == "of the host"


def tar_of(*members: tuple[str, bytes, str, bytes]) -> bytes:
    """(name, type, link, content) of each member."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, link, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize(
    ("members", "entry"),
    [
        ([("../x", tarfile.REGTYPE, "", b"x")], "../x"),
        ([("/abs", tarfile.REGTYPE, "", b"x")], "/abs"),
        ([("l", tarfile.SYMTYPE, "CANARY", b""), ("l/f", tarfile.REGTYPE, "", b"x")], "l/f"),
        ([("l", tarfile.SYMTYPE, "/", b""), ("l/etc/x", tarfile.REGTYPE, "", b"x")], "l/etc/x"),
        ([("h", tarfile.LNKTYPE, "../../etc/passwd", b"")], "h"),
        ([("null", tarfile.CHRTYPE, "", b"")], "null"),
        ([("pipe", tarfile.FIFOTYPE, "", b"")], "pipe"),
    ],
)
def test_an_archive_that_leads_out_is_refused_naming_the_entry(
    box: Box, tmp_path: Path, members: list[tuple[str, bytes, str, bytes]], entry: str
) -> None:
    given = [(name, kind, str(tmp_path) if link == "CANARY" else link, data) for name, kind, link, data in members]
    answer = box.call("PUT", "/archive", tar_of(*given), path=".")
    assert (answer.status, answer.document["code"], answer.document["entry"]) == (422, "invalid_value", entry)
    assert os.listdir(tmp_path) == []
    assert {item["type"] for item in box.call("GET", "/list", path=".").document["items"]} <= {"symlink"}


def test_a_link_over_which_an_archive_writes_is_replaced_not_followed(box: Box, tmp_path: Path) -> None:
    link, file = ("f", tarfile.SYMTYPE, str(tmp_path / "f"), b""), ("f", tarfile.REGTYPE, "", b"inside")
    assert box.call("PUT", "/archive", tar_of(link, file), path=".").status == 200
    assert box.get("f").body == b"inside" and box.stat("f", follow=False).document["type"] == "file"
    assert os.listdir(tmp_path) == []


def test_an_archive_of_more_than_the_disk_holds_is_refused_in_little_memory(box: Box) -> None:
    box.sh("dd if=/dev/zero of=/workspace/fill bs=1M count=200")

    def blocks() -> Iterator[bytes]:
        member = tarfile.TarInfo("big")
        member.size = 4 << 30
        yield member.tobuf()
        for _ in range(100):
            yield bytes(1 << 20)

    with Peak() as peak:
        answer = box.call("PUT", "/archive", blocks(), path=".")
    assert (answer.status, answer.document["code"]) == (413, "too_large"), answer.body
    assert peak.growth < 48 << 20


# -- large files ---------------------------------------------------------------------------------------------------------------
def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most memory that this process, the service included, held meanwhile."""

    def __enter__(self) -> Peak:
        self.begun = self.most = resident()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self) -> None:
        while not self.over.wait(0.02):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.begun


def round_trip(box: Box, size: int, block: bytes) -> None:
    """Up and down over HTTP, block by block, with the digest of what was sent; memory must not follow the size."""
    sent, got = hashlib.sha256(), hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        left = size
        while left > 0:
            piece = block[: min(left, len(block))]
            sent.update(piece)
            left -= len(piece)
            yield piece

    with Peak() as peak:
        answer = box.put("big", blocks())
        assert (answer.status, answer.document.get("size")) == (201, size), answer.body
        total = 0
        with contextlib.closing(box.connection()) as connection:
            connection.request("GET", box.path() + "?path=big")
            response = connection.getresponse()
            assert (response.status, response.getheader("content-length")) == (200, str(size))
            while piece := response.read(1 << 18):
                got.update(piece)
                total += len(piece)
    assert (total, got.digest()) == (size, sent.digest())
    assert peak.growth < 48 << 20, f"{peak.growth >> 20} MiB more than before"


def test_a_hundred_mebibytes_go_both_ways_in_little_memory(box: Box) -> None:
    if box.via == "dispatch":
        pytest.skip("here a call in process collects what it gets")
    round_trip(box, 100 << 20, os.urandom(1 << 20))
    assert box.get("big", f"bytes={(100 << 20) - 5}-").headers["content-length"] == "5"


@pytest.mark.slow
def test_four_gibibytes_of_holes_go_both_ways_in_little_memory(box: Box) -> None:
    if box.via == "dispatch":
        pytest.skip("here a call in process collects what it gets")
    if box.sh("true")["limits"]["disk"]["mode"] != "enforced":
        pytest.skip("no file may be larger than the disk where the disk is watched")
    round_trip(box, 4 << 30, bytes(1 << 20))
    assert box.get("big", f"bytes={(3 << 30)}-{(3 << 30) + 9}").body == bytes(10)


# -- watching ------------------------------------------------------------------------------------------------------------------
class Follower:
    """Events of a watch, as they come."""

    def __init__(self, box: Box, **query: Any) -> None:
        self.connection = box.connection()
        self.connection.request("GET", box.path("/watch") + "?" + query_of(query))
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.read()
        assert self.response.getheader("content-type") == "text/event-stream"
        assert self.next()[0] == "started"

    def next(self) -> tuple[str, dict[str, Any]]:
        kind = ""
        while True:
            text = self.response.readline().decode()
            assert text, "the stream ended"
            if text.startswith("event: "):
                kind = text[7:].strip()
            elif text.startswith("data: "):
                return kind, json.loads(text[6:])

    def until(self, kind: str, path: str) -> list[tuple[str, str]]:
        """Events up to this one."""
        seen = []
        while True:
            event, document = self.next()
            seen.append((event, document["path"]))
            if seen[-1] == (kind, path):
                return seen

    def close(self) -> None:
        self.connection.sock.shutdown(socket.SHUT_RDWR)  # a response keeps its own hold of the socket
        self.response.close()
        self.connection.close()


@pytest.fixture
def web(home: tuple[Path, EmbeddedTransport], sandbox: str) -> Iterator[Box]:
    made = Box(home[0], home[1], sandbox, "http")
    yield made
    made.sh("rm -rf /workspace/* /workspace/.[!.]* /workspace/..?* /tmp/*")
    wait_for_none(made)


def test_a_watch_tells_what_happens_and_nothing_of_half_files(web: Box) -> None:
    web.sh("mkdir d")
    follower = Follower(web, path="/workspace")
    try:
        web.put("f", b"1")
        assert follower.until("created", "/workspace/f") == [("created", "/workspace/f")]
        web.put("f", b"2")
        assert follower.until("modified", "/workspace/f") == [("modified", "/workspace/f")]
        web.sh("echo 3 >> f")
        follower.until("modified", "/workspace/f")
        web.call("POST", "/move", document={"from": "f", "to": "g"})
        kind, document = follower.next()
        assert (kind, document["path"], document["from"]) == ("moved", "/workspace/g", "/workspace/f")
        web.call("DELETE", path="g")
        follower.until("deleted", "/workspace/g")
        web.put("d/below", b"")
        web.put("last", b"")
        assert ("created", "/workspace/d/below") not in follower.until("created", "/workspace/last")
    finally:
        follower.close()


def test_a_watch_of_a_tree_knows_directories_that_come_later(web: Box) -> None:
    web.sh("mkdir -p a/b")
    follower = Follower(web, path=".", recursive=True)
    try:
        web.put("a/b/f", b"")
        follower.until("created", "/workspace/a/b/f")
        web.sh("mkdir -p n/m; echo x > n/m/x")
        assert ("created", "/workspace/n/m") in follower.until("created", "/workspace/n/m/x")
        web.put("n/m/y", b"")
        follower.until("created", "/workspace/n/m/y")
        web.sh("mv n o; echo z > o/m/z")
        follower.until("moved", "/workspace/o")
        follower.until("created", "/workspace/o/m/z")
        raw = base64.b64encode(b"o/\xff").decode()
        web.call("PUT", body=b"", path_base64=raw)
        while (event := follower.next())[1].get("path_base64") is None:
            pass
        assert base64.b64decode(event[1]["path_base64"]) == b"/workspace/o/\xff"
    finally:
        follower.close()


def test_a_watch_of_a_file_outlives_its_replacement(web: Box) -> None:
    web.put("f", b"1")
    follower = Follower(web, path="f")
    try:
        web.put("other", b"")
        web.put("f", b"2")
        assert follower.next()[1]["path"] == "/workspace/f"
        web.call("DELETE", path="f")
        follower.until("deleted", "/workspace/f")
    finally:
        follower.close()


def test_a_watch_ends_with_what_it_watches(web: Box) -> None:
    web.sh("mkdir d")
    follower = Follower(web, path="d")
    web.call("DELETE", path="d")
    follower.until("deleted", "/workspace/d")
    kind, document = follower.next()
    assert (kind, document["reason"]) == ("ended", "deleted")
    follower.close()


def test_nothing_of_a_watch_is_left_when_its_client_is_gone(web: Box) -> None:
    followers = [Follower(web, path=".") for _ in range(3)]
    assert len(inside(web)) == 3
    for follower in followers:
        follower.close()
    wait_for_none(web)


def test_nothing_is_left_of_a_head_of_a_stream(web: Box) -> None:
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    def head(target: str) -> int:
        with contextlib.closing(web.connection()) as connection:
            connection.request("HEAD", target)
            return connection.getresponse().status

    assert web.call("HEAD", "/watch", path=".").status == 200
    wait_for_none(web)
    document = {"shell": "echo a; exec sleep 600", "wait": 0}
    exec_id = web.transport.request("POST", f"/v1/sandboxes/{web.sandbox_id}/execs", document)["id"]
    events = web.transport.stream(f"/v1/execs/{exec_id}/stream")
    cursor = next(event.cursor for event in events if event.kind == "stdout")
    before = web.owner._call(tasks(), 60)
    assert [head(f"/v1/execs/{exec_id}/stream?cursor={cursor}") for _ in range(20)] == [200] * 20
    assert web.owner._call(tasks(), 60) < before + 20
    web.transport.request("POST", f"/v1/execs/{exec_id}/cancel")


def test_a_watch_ends_when_the_sandbox_is_deleted(home: tuple[Path, EmbeddedTransport]) -> None:
    made = home[1].request("POST", "/v1/sandboxes", {"runtime": "bubblewrap"})
    box = Box(home[0], home[1], made["id"], "http")
    follower = Follower(box, path=".")
    home[1].request("DELETE", f"/v1/sandboxes/{made['id']}")
    kind, document = follower.next()
    assert (kind, document["reason"]) == ("ended", "sandbox_deleted")
    follower.close()
    assert (box.stat("f").status, box.stat("f").document["code"]) == (410, "sandbox_deleted")


def test_a_watch_in_process_is_a_stream_like_any_other(home: tuple[Path, EmbeddedTransport], sandbox: str) -> None:
    box = Box(home[0], home[1], sandbox, "dispatch")
    events = home[1].stream(f"/v1/sandboxes/{sandbox}/files/watch", {"path": "/workspace"})
    try:
        assert next(events).kind == "started"
        box.put("seen", b"")
        event = next(events)
        assert (event.kind, event.doc and event.doc["path"]) == ("created", "/workspace/seen")
    finally:
        events.close()  # type: ignore[attr-defined]
    wait_for_none(box)
    box.call("DELETE", path="seen")


def test_a_download_that_nobody_reads_to_its_end_leaves_no_process(web: Box) -> None:
    web.put("big", bytes(20 << 20))
    with contextlib.closing(web.connection()) as connection:
        connection.request("GET", web.path() + "?path=big")
        assert connection.getresponse().read(10) == bytes(10)
        assert inside(web)
    wait_for_none(web)


def test_the_guest_keeps_nothing_of_calls_that_are_over(web: Box) -> None:
    async def known() -> int:
        bodies = list(web.owner._node._bodies.values())
        return sum([(await (await body.client()).usage())["known_execs"] for body in bodies])

    before = web.owner._call(known(), 30)
    for _ in range(12):
        web.stat(".")
        web.put("f", b"x")
        web.get("f")
        web.stat("nope")
    assert web.owner._call(known(), 30) <= before + 3


def test_an_unknown_sandbox_is_not_found(home: tuple[Path, EmbeddedTransport]) -> None:
    for tail in ("", "/stat", "/list", "/watch"):
        box = Box(home[0], home[1], "sbx_00000000000000000000000000", "http")
        answer = box.call("GET", tail, path="f")
        assert (answer.status, answer.document["code"]) == (404, "not_found")


def test_a_lease_that_is_not_the_current_one_changes_nothing(web: Box) -> None:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("f"))
    for tail, body, path in (("", b"x", "f"), ("/archive", tar.getvalue(), ".")):
        answer = web.call("PUT", tail, body=body, headers={"Corral-Lease": "1.999"}, path=path)
        assert (answer.status, answer.document["code"]) == (409, "lease_lost")
    assert web.listing(".") == []
