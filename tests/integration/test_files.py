"""The file API from its routes down to the process inside: in process and over HTTP, on every runtime that is usable here."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest

from corral.api.routes import Request, dispatch
from corral.client.embedded import EmbeddedTransport, open_embedded

RUNTIMES = ["bubblewrap", *(["crun"] if os.geteuid() == 0 and shutil.which("crun") else [])]
RECIPE = (
    "name: host\nkind: frozen\ndescription: small\nprograms: [sh sleep cat ln mkdir mkfifo rm mv touch seq printf dd]\n"
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
    extra: dict[str, str] = field(default_factory=dict)

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
    made.sh("rm -rf /workspace/* /workspace/.[!.]* /tmp/*")


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
