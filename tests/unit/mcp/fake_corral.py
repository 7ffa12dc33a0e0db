"""The MCP server over a Corral that is written down here: sandboxes are dictionaries, programs are words."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from mcp import Client

from corral.client import Event
from corral.errors import CorralError
from corral.mcp.server import make_server
from corral.mcp.sessions import Wishes

Json = dict[str, Any]


def stream(text: str) -> Json:
    size = len(text.encode())
    return {"bytes": size, "kept_bytes": size, "truncated": False, "text": None, "base64": None}


def result(reason: str = "ok", exit_code: int | None = 0, out: str = "", hint: str | None = None) -> Json:
    return {
        "reason": reason,
        "exit_code": exit_code,
        "signal": None,
        "hint": hint,
        "started": True,
        "stdout": stream(out),
        "stderr": stream(""),
        "files": [{"path": "/workspace/made", "change": "created", "type": "file"}],
        "timings": {"running_ms": 7},
    }


class FakeCorral:
    """A transport. Programs: `say WORDS`, `exit N`, `hang WORDS` (says them, then runs until it is ended), `fail CODE`."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.sandboxes: dict[str, str] = {}
        self.created: list[Json] = []
        self.execs: dict[str, Json] = {}
        self.over: dict[str, threading.Event] = {}
        self.files: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.asked: list[Json] = []
        self.refuse: CorralError | None = None
        self.cap_timeout_s: float | None = None
        self.closed = False

    # -- what tests do to it ---------------------------------------------------------------------------------------------------
    def alive(self) -> list[str]:
        return [ident for ident, state in self.sandboxes.items() if state == "leased"]

    def kill(self, sandbox_id: str, reason: str = "sandbox_lost") -> None:
        with self.guard:
            self.sandboxes[sandbox_id] = "terminated"
            for ident, document in self.execs.items():
                if document["sandbox_id"] == sandbox_id and document["result"] is None:
                    self._end(ident, result(reason, None))

    def finish(self, exec_id: str) -> None:
        self._end(exec_id, result(out="late"))

    def _end(self, ident: str, ending: Json) -> None:
        self.execs[ident]["result"] = ending
        self.over[ident].set()

    # -- the transport ---------------------------------------------------------------------------------------------------------
    def request(
        self,
        method: str,
        path: str,
        json: Json | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        with self.guard:
            self.calls.append(f"{method} {path}")
            if self.refuse is not None:
                raise self.refuse
            parts = path.strip("/").split("/")[1:]
            if parts == ["sandboxes"] and method == "POST":
                self.created.append(json or {})
                ident = f"sbx_{len(self.created)}"
                self.sandboxes[ident] = "leased"
                return self._sandbox(ident)
            if parts[0] == "sandboxes" and parts[1] not in self.sandboxes:
                raise CorralError("not_found", f"there is no sandbox {parts[1]}")
            if parts[0] == "sandboxes" and len(parts) == 2:
                if method == "DELETE":
                    self.kill(parts[1], "sandbox_deleted")
                return self._sandbox(parts[1])
            if parts[0] == "sandboxes" and parts[2] == "execs":
                return self._start(parts[1], json or {})
            if parts[0] == "sandboxes" and parts[2] == "files":
                return self._file(method, parts, dict(params or {}))
            return self._exec(method, parts, json)

    def _sandbox(self, ident: str) -> Json:
        return {
            "id": ident,
            "state": self.sandboxes[ident],
            "runtime": "fake",
            "template": "host",
            "limits": {"memory": {"value": 512 << 20}, "wall": {"value": 60.0}, "pids": {"value": None}},
            "created_at": "2026-01-01T00:00:00Z",
            "expires_at": "2026-01-01T01:00:00Z",
        }

    def _start(self, sandbox_id: str, request: Json) -> Json:
        if self.sandboxes[sandbox_id] != "leased":
            raise CorralError("sandbox_lost", f"the sandbox {sandbox_id} is gone")
        if self.cap_timeout_s is not None and request.get("timeout_s", 0) > self.cap_timeout_s:
            raise CorralError("policy_denied", f"timeout over {self.cap_timeout_s}", hint="ask for less")
        self.asked.append(request)
        ident = f"exe_{len(self.execs) + 1}"
        word, _, rest = (request.get("shell") or request.get("code") or "").partition(" ")
        document: Json = {"id": ident, "sandbox_id": sandbox_id, "result": None, "out": rest if word != "fail" else ""}
        self.execs[ident] = document
        self.over[ident] = threading.Event()
        if word == "say":
            self._end(ident, result(out=rest))
        elif word == "exit":
            self._end(ident, result("nonzero_exit", int(rest), hint="see its output"))
        elif word == "fail":
            self._end(ident, result(rest, None, hint="so it is"))
        return self._shown(ident)

    def _shown(self, ident: str) -> Json:
        document = dict(self.execs[ident])
        ending = document["result"]
        if ending is not None:
            document["agent_view"] = f"{document['out']}\n[{ending['reason']}]"
        return document

    def _exec(self, method: str, parts: list[str], json: Json | None) -> Json:
        ident = parts[1]
        if method == "POST" and self.execs[ident]["result"] is None:
            what = "cancelled" if parts[2] == "cancel" else "signal"
            self._end(ident, result(what, 137 if what == "cancelled" else 130))
        elif method == "POST":
            raise CorralError("conflict", "it has ended")
        return self._shown(ident)

    def _file(self, method: str, parts: list[str], params: Json) -> Json:
        path = str(params["path"])
        whole = path if path.startswith("/") else f"/workspace/{path}"
        if parts[3] == "stat":
            if whole not in self.files:
                raise CorralError("not_found", f"there is no {whole}", field="/path")
            return self._entry(whole)
        names = sorted(name for name in self.files if name.startswith(f"{whole.rstrip('/')}/"))
        rest = [name for name in names if params.get("after") is None or name > params["after"]]
        page = rest[: params["limit"]]
        return {"items": [self._entry(n) for n in page], "next": page[-1] if len(rest) > len(page) else None}

    def _entry(self, path: str) -> Json:
        return {"path": path, "type": "file", "size": len(self.files[path]), "mode": "0644", "mtime": None}

    def stream(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[Event]:
        ident = path.split("/")[3]
        yield Event("started", "0", doc={})
        out = self.execs[ident]["out"].encode()
        for at in range(0, len(out), 5):  # cut wherever it falls, also inside a character
            yield Event("stdout", str(at), at, out[at : at + 5])
        assert self.over[ident].wait(60)
        yield Event("ended", "9", doc=self._shown(ident))

    def download(self, path: str, params: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        name = str((params or {})["path"])
        data = self.files[name if name.startswith("/") else f"/workspace/{name}"]
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    def upload(
        self, path: str, chunks: Iterable[bytes], params: Mapping[str, Any] | None = None, method: str = "PUT"
    ) -> Json:
        name = str((params or {})["path"])
        whole = name if name.startswith("/") else f"/workspace/{name}"
        self.files[whole] = b"".join(chunks)
        return self._entry(whole)

    def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def served(corral: FakeCorral, wishes: Wishes | None = None, mode: str = "auto") -> AsyncIterator[Client]:
    """A real client of a server over the fake, in process."""
    async with Client(make_server(lambda: corral, wishes), mode=mode) as client:
        yield client


def words(answer: Any) -> str:
    """All text of an answer."""
    return "\n".join(block.text for block in answer.content if block.type == "text")
