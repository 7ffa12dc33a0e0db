"""Who is told of the ends of runs: notes what comes and whether it is signed, by the words of the specification and no code of ours."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import socket
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from corral.testing.history.client import result_facts, secret_of
from corral.testing.history.events import Recorder

DEAF = 4
"""One in so many is heard the second time only."""


def own_address() -> str | None:
    """An address of this host that is not loopback, where nothing is ever sent to; no packet is sent. None: there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return None


class Receiver:
    """Listens on a free port. A URL is `/TENANT/NAME OF THE RUN/own|tenant`; `secrets` are those of the tenants."""

    def __init__(self, address: str, seed: int, notes: Recorder) -> None:
        self.secrets: dict[str, str] = {}
        heard: set[str] = set()
        secrets = self.secrets

        class Handler(BaseHTTPRequestHandler):
            timeout = 30

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                tenant, name, whose = self.path.strip("/").split("/")
                secret = secret_of(seed, name) if whose == "own" else secrets.get(tenant, "")
                document = json.loads(body)
                notes.note(
                    "hook",
                    of=name,
                    run=document["id"],
                    state=document["state"],
                    delivery=self.headers["webhook-id"],
                    signed=signed(secret, dict(self.headers.items()), body),
                    **{
                        fact: value
                        for fact, value in facts(document).items()
                        if fact in ("reason", "exit_code", "started")
                    },
                )
                first = name not in heard
                heard.add(name)
                self.send_response(503 if first and zlib.crc32(name.encode()) % DEAF == 0 else 204)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        self.address, self.port = address, int(self._server.server_address[1])
        self.url = f"http://{address}:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True, name="receiver").start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def facts(document: dict[str, Any]) -> dict[str, Any]:
    """Of a run's document."""
    result = document.get("result")
    return {} if result is None else result_facts(result)


def signed(secret: str, headers: dict[str, str], body: bytes) -> bool:
    """One of the signatures is by this secret."""
    fields = {name.lower(): value for name, value in headers.items()}
    text = f"{fields.get('webhook-id')}.{fields.get('webhook-timestamp')}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    made = "v1," + base64.b64encode(hmac.new(key, text, hashlib.sha256).digest()).decode()
    return made in fields.get("webhook-signature", "").split(" ")
